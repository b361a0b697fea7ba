"""What BucketModel runs on GPUs alone, as far as a CPU shows it: XLA's flag, the order of collectives, what is put together."""

import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

from models import rows
from models.tf import replicas
from models.wavefront import softmax


def bare(rank=0, size=1, **attributes):
    """A BucketModel without its network: of its collectives each gives back what it is given."""
    made = object.__new__(replicas.BucketModel)
    made.size, made.group, made._by_rows, made._whole = size, SimpleNamespace(rank=rank), False, True
    made._collective = lambda own, number: tf.identity(own, f"sum_{number}")
    vars(made).update(attributes)
    return made


def test_xla_takes_the_flag_that_turns_its_choice_of_fusions_off():
    program = "import tensorflow as tf; print(float(tf.function(lambda x: 2 * x, jit_compile=True)(3.0)))"
    environment = {**os.environ, "XLA_FLAGS": rows.UNTUNED, "TF_CPP_MIN_LOG_LEVEL": "2"}
    found = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120
    )
    assert (found.returncode, found.stdout) == (0, "6.0\n"), found.stderr


def come_before(op):
    """Names of the sums that an op depends on by its data."""
    found, todo = set(), [tensor.op for tensor in op.inputs]
    while todo:
        op = todo.pop()
        if op.name not in found:
            found.add(op.name)
            todo += [tensor.op for tensor in op.inputs]
    return sorted(name for name in found if name.startswith("sum_"))


def test_collectives_of_one_program_come_in_order():
    """What each adds up depends on the sum before, the words' among them."""
    of_words, parts = tf.constant([5, 6], tf.int64), [tf.constant([1.0]), tf.constant([2.0, 3.0]), tf.constant(4.0)]

    def step(*parts):
        model = bare(_by_rows=True, _first_half=lambda *_: (parts, None), _second_half=lambda parts, words: parts)
        return model._train_step(of_words, None, None)[0]

    graph = tf.function(step).get_concrete_function(*parts).graph
    sums = [come_before(graph.get_operation_by_name(f"sum_{k}")) for k in range(4)]
    assert sums == [[], ["sum_0"], ["sum_0", "sum_1"], ["sum_0", "sum_1", "sum_2"]]
    for own, total in zip(parts, tf.function(step, jit_compile=True)(*parts), strict=True):
        np.testing.assert_array_equal(own, total)


def test_the_softmax_kernel_is_asked_for_by_the_words_of_one_device():
    """Of the batch that a strategy deals out, which has no shape of its own."""
    model, asked = object.__new__(replicas.StrategyModel), []
    of_each = SimpleNamespace(values=(tf.zeros([2, 3], tf.int64), tf.zeros([2, 3], tf.int64)))
    model.strategy = SimpleNamespace(experimental_local_results=lambda value: value.values)
    model.fused_loss, model.batches = True, [(of_each, of_each)]
    model.head = SimpleNamespace(runs_kernel=lambda rows: asked.append(rows) or True)
    assert (model.softmax_kernel, asked) == (softmax.KERNEL, [6])


TOKENS = [[4, 1, 4], [1, 0, 5]]  # of two replicas, which have a word in common
ROWS = [[[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], [[7.0, 8.0], [9.0, 10.0], [11.0, 12.0]]]
OTHERS = [[[[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], [7.0, 8.0]], [[[0.5, 0.5, 0.5], [1.5, 1.5, 1.5]], [0.0, 1.0]]]


@pytest.mark.parametrize("large", [2, 6, 2**20])
@pytest.mark.parametrize("by_rows", [False, True])
def test_each_replica_updates_by_the_mean_of_the_gradients_of_both(monkeypatch, large, by_rows):
    monkeypatch.setattr(replicas, "LARGE", large)
    models, gradients = [], []
    for rank in range(2):
        embedding = tf.IndexedSlices(tf.constant(ROWS[rank]), tf.constant(TOKENS[rank], tf.int64), (6, 2))
        own = [embedding, *map(tf.constant, OTHERS[rank])]
        model = bare(rank, 2, _by_rows=by_rows, embedding=tf.zeros([6, 2]), variables=[tf.zeros([6, 2]), *own[1:]])
        model._gradients = lambda *_, own=own, rank=rank: (own, tf.constant(8.0 + rank), "states")
        models.append(model)
        gradients.append([tf.convert_to_tensor(gradient) for gradient in own])
    words = tf.add_n([model._of_all(tf.constant(own, tf.int64)) for model, own in zip(models, TOKENS, strict=True)])
    np.testing.assert_array_equal(words, np.concatenate(TOKENS))
    parts = [model._to_parts(None, None, None, words)[0] for model in models]
    sums = [tf.add_n(of_both) for of_both in zip(*parts, strict=True)]
    for model in models:
        found = []
        model._update = found.extend
        assert float(model._from_parts(sums, words)) == 8.5
        for own, *of_both in zip(found, *gradients, strict=True):
            np.testing.assert_array_equal(own, tf.add_n(of_both) / 2)
