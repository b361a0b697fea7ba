"""The language model in TensorFlow alone: its rows' proofs, its traces and its dropout. The rest: test_language_models.py."""

import functools
import itertools

import numpy as np
import pytest
import tensorflow as tf

from models import rows
from models.reference import networks
from models.tf.language_model import _Traced
from tests import cases
from tests.comparing import error
from tests.language_models import BATCHES, LAYERS, STATES, WEIGHTS, of_ptb
from tests.language_models import in_tensorflow as model_of

ptb_model = functools.partial(of_ptb, model_of)

# --- against the reference ----------------------------------------------------------------------------------------------

ROWS = [name for name, made in rows.TENSORFLOW.items() if not made.needs_gpu]


# Every row has Adam and the mean in tests/harness/test_planted_mistakes.py too, while_loop dropout in test_dropout.py; eager
# and static_eager are the stacks of unrolled and static_graph, which clip, drop and carry states by the same code as keras.
BY_DEFAULT = {("keras", True), ("keras_xla", True), ("block_fused", True), ("wavefront", True)}


@pytest.mark.parametrize(
    ("row", "ptb"),
    [
        pytest.param(*case, marks=[pytest.mark.slow] * (case not in BY_DEFAULT))
        for case in itertools.product(ROWS, (False, True))
    ],
)
def test_row_passes_its_proof(row, ptb, tensorflow_runtime):
    trial, reference = cases.language_model(row, "fp32", ptb), cases.language_model_reference(ptb)
    for mode in ("train", "forward", "stack"):
        proof = cases.prove(trial, mode, "fp32", reference, cases.kernel_of(row), tensorflow_runtime)
        assert proof.record()["ok"], f"{mode}: {proof.record()['reason']}"


@pytest.mark.parametrize(
    ("row", "precision"),
    [  # unrolled in fp16 and keras in bf16: tests/harness/test_planted_mistakes.py
        ("while_loop", "fp16"),
        ("block_fused", "fp16"),
        pytest.param("keras", "fp16", marks=pytest.mark.slow),
        ("unrolled", "bf16"),
        pytest.param("keras", "bf16", marks=pytest.mark.slow),
    ],
)
def test_16_bit_row_passes_its_proof_and_fails_that_of_fp32(row, precision, tensorflow_runtime):
    trial, reference = cases.language_model(row, precision), cases.language_model_reference()
    for label, failed in ((precision, []), ("fp32", ["outputs", "precision", "gradients"])):
        proof = cases.prove(trial, "train", label, reference, cases.kernel_of(row), tensorflow_runtime)
        assert set(failed) <= set(proof.record()["failed"]) and proof.record()["ok"] == (label == precision)


@pytest.mark.parametrize("row", ["unrolled", "while_loop", "keras"])
def test_float64_model_follows_the_reference_to_rounding(row):
    """With SGD at a rate of two's power: Keras rounds Adam's constants and every rate to float32."""
    model = ptb_model(0.5, row=row, precision="fp64", clip_norm=0.1)
    reference = networks.trajectory(
        networks.LanguageModel("sum_over_time"), networks.SGD(0.5, clip_norm=0.1), WEIGHTS,
        BATCHES, STATES, steps=6, carry_states=True,
    )  # fmt: skip
    assert error(model.train_steps(6), reference.losses) < 1e-13  # measured: 3e-16


# --- traces -------------------------------------------------------------------------------------------------------------


def test_steps_run_their_one_trace_and_batches_of_another_shape_their_own():
    model = model_of()
    losses = model.train_steps(3)
    assert model._train.experimental_get_tracing_count() == 1
    tokens, targets = (ids[:, :2] for ids in BATCHES[0])
    model.restore()
    for batch in (model.stage(tokens, targets), model.batches[0], model.stage(tokens, targets)):
        model.forward(batch)
    assert model._forward.experimental_get_tracing_count() == 2
    np.testing.assert_allclose(model.train_steps(3), losses, rtol=1e-6)


def test_states_of_another_shape_get_a_trace_of_their_own():
    step = _Traced(lambda tokens, targets, states: tf.reduce_sum(states[0]), jit_compile=False)
    one, two = tf.ones([1]), tf.ones([2])
    assert [step(one, one, [states]).numpy() for states in (one, two, one)] == [1, 2, 1]
    assert step.experimental_get_tracing_count() == 2


def test_a_gradient_tape_sees_a_step():
    step, x = _Traced(lambda x, y: x * y, jit_compile=False), tf.constant(3.0)
    with tf.GradientTape() as tape:
        tape.watch(x)
        product = step(x, tf.constant(2.0))
    assert tape.gradient(product, x).numpy() == 2


@pytest.mark.parametrize("row", ["while_loop", "block_fused", pytest.param("wavefront", marks=pytest.mark.slow)])
@pytest.mark.parametrize("precision", ["fp32", pytest.param("fp16", marks=pytest.mark.slow)])
def test_what_is_traced_beforehand_is_what_runs(row, precision):
    model = model_of(row, precision)
    for mode in ("forward", "train", "stack"):
        model.trace(mode)
    steps = model._forward, model._train, model._stack
    traced = [[trace for trace, _ in step._traces.values()] for step in steps]
    model.train(model.batches[0]), model.forward(model.batches[1]), model.stack_alone(model.stack_batches[0])
    for step, traces in zip(steps, traced, strict=True):
        assert step.experimental_get_tracing_count() == 1
        assert [trace for trace, _ in step._traces.values()] == traces


# --- dropout ------------------------------------------------------------------------------------------------------------


def test_model_without_dropout_has_no_dropout_ops():
    def op_types(model):
        graph = model._train.get_concrete_function(*model.batches[0], model.states).graph
        return {op.type for op in graph.get_operations()}

    random_ops = {"RandomUniform", "StatelessRandomUniformV2"}
    assert not model_of(keep_prob=1.0).has_dropout and not op_types(model_of(keep_prob=1.0)) & random_ops
    assert model_of(keep_prob=0.5).has_dropout and op_types(model_of(keep_prob=0.5)) & random_ops


def test_dropout_rate_is_a_variable_of_the_one_trace():
    model = model_of(keep_prob=0.5)
    model.train_steps(1), model.train(model.batches[0])
    assert model._train.experimental_get_tracing_count() == 1
    with model.without_dropout():
        assert model._rate.numpy() == 0.0
    assert model._rate.numpy() == 0.5


def test_dropout_reaches_the_embedding_and_every_layer_with_the_mean_kept():
    seen = []
    model = model_of(row="unrolled", keep_prob=0.25, eager=True)
    drop = model._dropout
    model._dropout = lambda x: seen.append((x, drop(x))) or seen[-1][1]
    model.train(model.batches[0])
    assert len(seen) == 1 + LAYERS  # embedding, between the layers, after the last one
    for before, after in seen:
        ratio = np.asarray(after) / np.asarray(before)
        assert set(np.unique(ratio.round(4))) == {0.0, 4.0}
        assert 0.1 < np.mean(ratio > 0) < 0.45


# --- batches ------------------------------------------------------------------------------------------------------------


def test_tokens_lie_staged_as_int64():
    model = model_of()
    assert all(tensor.dtype == tf.int64 for batch in model.batches for tensor in batch)
    assert len(model.batches) == len(BATCHES)
