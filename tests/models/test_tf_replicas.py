"""What BucketModel runs on GPUs alone, as far as a CPU shows it: XLA's flag, the order of collectives, what is put together."""

import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

from models.tf import replicas


def bare(**attributes):
    """A BucketModel of one replica, without its network: what is added up is what it gives."""
    made = object.__new__(replicas.BucketModel)
    made.size, made.group, made._by_rows, made._whole = 1, SimpleNamespace(rank=0), False, True
    made._collective = lambda own, number: tf.identity(own)
    vars(made).update(attributes)
    return made


def test_xla_takes_the_flag_that_turns_its_choice_of_fusions_off():
    program = "import tensorflow as tf; print(float(tf.function(lambda x: 2 * x, jit_compile=True)(3.0)))"
    environment = {**os.environ, "XLA_FLAGS": replicas.UNTUNED, "TF_CPP_MIN_LOG_LEVEL": "2"}
    found = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120
    )
    assert (found.returncode, found.stdout) == (0, "6.0\n"), found.stderr


def test_collectives_of_one_program_come_in_order():
    """Each takes what it adds up from a barrier that also has the sum before."""

    @tf.function
    def added_up(parts):
        return bare()._added_up(parts)

    parts = [tf.constant([1.0]), tf.constant([2.0, 3.0]), tf.constant(4.0)]
    graph = added_up.get_concrete_function(parts).graph
    barriers = [op for op in graph.get_operations() if op.type == "XlaOptimizationBarrier"]
    assert len(barriers) == 2 and all(len(op.inputs) == 2 for op in barriers)
    assert barriers[1].inputs[0].op.type == "Identity" and barriers[1].inputs[0].op.inputs[0].op is barriers[0]
    compiled = tf.function(lambda *parts: bare()._added_up(parts), jit_compile=True)
    for own, total in zip(parts, compiled(*parts), strict=True):
        np.testing.assert_array_equal(own, total)


@pytest.mark.parametrize("large", [2, 6, 2**20])
@pytest.mark.parametrize("by_rows", [False, True])
def test_gradients_come_back_from_the_parts_that_are_added_up(monkeypatch, large, by_rows):
    monkeypatch.setattr(replicas, "LARGE", large)
    tokens = tf.constant([4, 1, 4], tf.int64)
    embedding = tf.IndexedSlices(tf.constant([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), tokens, (6, 2))
    gradients = [embedding, tf.constant([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]), tf.constant([7.0, 8.0])]
    model = bare(_by_rows=by_rows, embedding=tf.zeros([6, 2]), variables=[tf.zeros([6, 2]), *gradients[1:]])
    model._gradients = lambda *batch: (gradients, tf.constant(9.0), "states")
    found = []
    model._update = found.extend
    words = model._of_all(tokens) if by_rows else None
    parts, states = model._to_parts(None, None, None, words)
    loss = model._from_parts(parts, words)
    assert (float(loss), states) == (9.0, "states")
    for own, expected in zip(found, map(tf.convert_to_tensor, gradients), strict=True):
        np.testing.assert_array_equal(own, expected)
