"""The language model in TensorFlow: what is timed, what the proof asks of it, and a whole training."""

import math

import keras
import numpy as np
import pytest
import tensorflow as tf

from models import rows
from models.reference import networks
from models.tf.language_model import LanguageModel, _Traced
from models.weights import canonical
from tests import cases

VOCABULARY, UNITS, LAYERS, BATCH, TIME = 13, 6, 2, 3, 5
SHAPES = canonical.language_model_shapes(VOCABULARY, UNITS, UNITS, LAYERS)
WEIGHTS = canonical.large_random(SHAPES, seed=1)
STATES = canonical.random_states(LAYERS, BATCH, UNITS, seed=2)
TOKENS = np.random.default_rng(3).integers(0, VOCABULARY, (4, 2, BATCH, TIME))
TOKENS[0, 0] = 7  # one word, many times: the rows of the embedding's sparse gradient overlap
BATCHES = [tuple(pair) for pair in TOKENS]
FLOAT32 = 1e-5  # max|a - b| / max|b| of a few steps; measured: up to 1.3e-6


def error(a, b):
    return np.abs(np.asarray(a, np.float64) - b).max() / np.abs(b).max()


def assert_close(given, expected, limit=FLOAT32):
    assert set(given) == set(expected)
    for name, array in expected.items():
        assert error(given[name], array) < limit, name


def assert_same(given, expected):
    assert set(given) == set(expected)
    for name, array in expected.items():
        np.testing.assert_array_equal(given[name], array, err_msg=name)


def model_of(row="while_loop", dtype="float32", optimizer=None, states=STATES, batches=BATCHES, **options):
    stack = rows.TENSORFLOW[row].arguments["stack"](WEIGHTS, LAYERS, dtype)
    return LanguageModel(stack, WEIGHTS, states, batches, optimizer or keras.optimizers.Adam(1e-2), **options)


def ptb_model(rate=0.5, **options):
    sgd = keras.optimizers.SGD(rate)
    return model_of(optimizer=sgd, reduction="sum_over_time", carry_states=True, **options)


# --- against the reference ----------------------------------------------------------------------------------------------

ROWS = [name for name, made in rows.TENSORFLOW.items() if not made.needs_gpu]


@pytest.mark.parametrize("ptb", [False, True], ids=["adam, mean", "sgd, clipped, dropout, states carried"])
@pytest.mark.parametrize("row", ROWS)
def test_row_passes_its_proof(row, ptb, tensorflow_runtime):
    trial, reference = cases.language_model(row, "fp32", ptb), cases.language_model_reference(ptb)
    for mode in ("train", "forward", "stack"):
        proof = cases.prove(trial, mode, "fp32", reference, cases.kernel_of(row), tensorflow_runtime)
        assert proof.record()["ok"], f"{mode}: {proof.record()['reason']}"


@pytest.mark.parametrize("row", ["while_loop", "block_fused", "keras"])
def test_float16_row_passes_its_proof_and_fails_that_of_fp32(row, tensorflow_runtime):
    trial, reference = cases.language_model(row, "fp16"), cases.language_model_reference()
    for label, failed in (("fp16", []), ("fp32", ["outputs", "precision", "gradients"])):
        proof = cases.prove(trial, "train", label, reference, cases.kernel_of(row), tensorflow_runtime)
        assert set(failed) <= set(proof.record()["failed"]) and proof.record()["ok"] == (label == "fp16")


@pytest.mark.parametrize("row", ["unrolled", "while_loop", "keras"])
def test_float64_model_follows_the_reference_to_rounding(row):
    """With SGD at a rate of two's power: Keras rounds Adam's constants and every rate to float32."""
    model = ptb_model(0.5, row=row, dtype="float64", clip_norm=0.1)
    reference = networks.trajectory(
        networks.LanguageModel("sum_over_time"), networks.SGD(0.5, clip_norm=0.1), WEIGHTS,
        BATCHES, STATES, steps=6, carry_states=True,
    )  # fmt: skip
    assert error(model.train_steps(6), reference.losses) < 1e-13  # measured: 3e-16


# --- restore ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [model_of, ptb_model], ids=["adam", "sgd"])
@pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
def test_restore_is_exact_for_weights_optimizer_and_states(make, eager):
    model = make(eager=eager)
    assert_same(model.weights(), WEIGHTS)
    start = [variable.numpy() for variable in model.optimizer.variables]
    losses, trained = model.train_steps(3), model.weights()
    assert all((trained[name] != WEIGHTS[name]).any() for name in WEIGHTS)
    model.restore()
    assert_same(model.weights(), WEIGHTS)
    for variable, array in zip(model.optimizer.variables, start, strict=True):
        np.testing.assert_array_equal(variable.numpy(), array)
    for given, layer in zip(model.states, STATES, strict=True):
        for state, array in zip(given, layer[0], strict=True):
            np.testing.assert_array_equal(state, array)
    np.testing.assert_allclose(model.train_steps(3), losses, rtol=1e-6)  # a GPU may sum in another order


def test_forward_pass_changes_nothing():
    model = model_of(carry_states=True, keep_prob=0.5)
    first = model.outputs()
    losses = model.forward_losses(6)
    assert losses[0] == losses[4] == first["loss"] and losses[0] != losses[1]  # four batches, taken in turn
    assert_same(model.weights(), WEIGHTS)
    assert_same(model.outputs(), first)
    assert first["hidden"].shape == (BATCH, TIME, UNITS) and first["logits"].shape == (2, TIME, VOCABULARY)


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


# --- one step -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", ["while_loop", "block_fused", "wavefront"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_what_is_traced_beforehand_is_what_runs(row, dtype):
    model = model_of(row, dtype)
    for mode in ("forward", "train", "stack"):
        model.trace(mode)
    steps = model._forward, model._train, model._stack
    traced = [[trace for trace, _ in step._traces.values()] for step in steps]
    model.train(model.batches[0]), model.forward(model.batches[1]), model.stack_alone(model.stack_batches[0])
    for step, traces in zip(steps, traced, strict=True):
        assert step.experimental_get_tracing_count() == 1
        assert [trace for trace, _ in step._traces.values()] == traces


def test_states_are_carried_from_step_to_step_only_where_asked():
    reference = networks.LanguageModel("mean").forward(WEIGHTS, *BATCHES[0], STATES)
    carrying, fresh = model_of(carry_states=True), model_of()
    for model in (carrying, fresh):
        model.train(model.batches[0])
    given = [state.numpy() for layer in carrying.states for state in layer]
    expected = [state for layer in reference.final_states for state in layer[0]]
    assert max(error(a, b) for a, b in zip(given, expected, strict=True)) < FLOAT32
    assert fresh.states is fresh.initial_states


def first_step(model):
    model.restore()
    model.train_steps(1)
    return model.first_gradients()


@pytest.mark.parametrize("optimizer", [keras.optimizers.Adam, keras.optimizers.SGD])
def test_first_gradients_are_those_the_optimizer_received(optimizer):
    expected = networks.LanguageModel("mean").loss_and_gradients(WEIGHTS, *BATCHES[0], STATES).gradients
    assert_close(first_step(model_of(optimizer=optimizer(0.5))), expected)


def test_clipping_is_by_the_global_norm_of_dense_gradients():
    """A word that comes up many times counts once, with the sum of its gradients."""
    gradients = networks.LanguageModel("mean").loss_and_gradients(WEIGHTS, *BATCHES[0], STATES).gradients
    norm = math.sqrt(sum(np.square(gradient).sum() for gradient in gradients.values()))
    for clip_norm, scale in ((norm / 3, 1 / 3), (norm * 1.01, 1.0)):
        expected = {name: gradient * scale for name, gradient in gradients.items()}
        assert_close(first_step(model_of(clip_norm=clip_norm)), expected)


def test_loss_scale_saves_small_gradients_of_float16_and_sums_over_many_tokens_are_float32():
    """10,000 tokens: a gradient of the mean loss by one token is at most 1e-4, where float16's spacing is 6e-8."""
    tokens = np.random.default_rng(1).integers(0, VOCABULARY, (2, 2000, TIME))
    tokens[1] %= 3  # few words are targets: the others' gradients are small
    states = canonical.random_states(LAYERS, 2000, UNITS, seed=2)
    reference = networks.LanguageModel("mean")
    expected = reference.loss_and_gradients(WEIGHTS, *tokens, states).gradients
    typical = {}
    for scale in (1.0, 1024.0):
        given = first_step(model_of(dtype="float16", states=states, batches=[tuple(tokens)], loss_scale=scale))
        assert_close(given, expected, 0.01)
        off = {name: np.median(np.abs(given[name] - array) / np.abs(array)) for name, array in expected.items()}
        typical[scale] = max(off.values())
    assert typical[1024.0] < 0.0015 and typical[1.0] > 2 * typical[1024.0]  # measured: 0.0008, 0.0032


def test_loss_scale_is_left_out_where_nothing_is_float16():
    model = model_of(loss_scale=65536.0)
    assert model.loss_scale == 1.0
    assert_close(first_step(model), first_step(model_of()))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_loss_and_master_weights_are_float32_or_better(dtype):
    model = model_of(dtype=dtype, loss_scale=64.0)
    wanted = "float64" if dtype == "float64" else "float32"
    assert {variable.dtype for variable in model.variables} == {wanted}
    assert model.train(model.batches[0]).dtype == wanted
    assert model.outputs()["hidden"].dtype == dtype


# --- dropout ------------------------------------------------------------------------------------------------------------


def test_model_without_dropout_has_no_dropout_ops():
    def op_types(model):
        graph = model._train.get_concrete_function(*model.batches[0], model.states).graph
        return {op.type for op in graph.get_operations()}

    random_ops = {"RandomUniform", "StatelessRandomUniformV2"}
    assert not model_of(keep_prob=1.0).has_dropout and not op_types(model_of(keep_prob=1.0)) & random_ops
    assert model_of(keep_prob=0.5).has_dropout and op_types(model_of(keep_prob=0.5)) & random_ops


def test_proof_runs_the_timed_graph_with_the_dropout_rate_at_0_and_puts_it_back():
    model, plain = model_of(keep_prob=0.5), model_of()
    np.testing.assert_allclose(model.train_steps(3), plain.train_steps(3), rtol=1e-6)
    assert_close(model.weights(), plain.weights())
    assert model.dropout_rate.numpy() == 0.5
    model.restore()
    dropped = [model.train(batch).numpy() for batch in model.batches[:3]]
    assert error(dropped, plain.train_steps(3)) > 1e-3
    assert model._train.experimental_get_tracing_count() == 1
    with pytest.raises(KeyboardInterrupt), model.without_dropout():
        assert model.dropout_rate.numpy() == 0.0
        raise KeyboardInterrupt
    assert model.dropout_rate.numpy() == 0.5


def test_dropout_reaches_the_embedding_and_every_layer_with_the_mean_kept():
    seen = []
    model = model_of(row="unrolled", keep_prob=0.25, eager=True)
    drop = model._dropout
    model._dropout = lambda x: seen.append((x, drop(x))) or seen[-1][1]
    model.train(model.batches[0])
    assert len(seen) == 1 + LAYERS  # embedding, between the layers, behind the last one
    for before, after in seen:
        ratio = np.asarray(after) / np.asarray(before)
        assert set(np.unique(ratio.round(4))) == {0.0, 4.0}
        assert 0.1 < np.mean(ratio > 0) < 0.45


# --- a whole training ---------------------------------------------------------------------------------------------------


def test_start_from_makes_other_weights_the_start_with_a_fresh_optimizer():
    model = model_of()
    start = [variable.numpy() for variable in model.optimizer.variables]
    model.train_steps(2)
    others = canonical.uniform(SHAPES, 0.1, seed=9)
    model.start_from(others, canonical.zero_states(LAYERS, BATCH, UNITS))
    for _ in range(2):
        assert_same(model.weights(), others)
        assert not any(np.any(state) for layer in model.states for state in layer)
        for variable, array in zip(model.optimizer.variables, start, strict=True):
            np.testing.assert_array_equal(variable.numpy(), array)
        model.train_steps(1)
        model.restore()


def reference_training(epochs, batches, clip_norm):
    """Mean losses per token of `epochs` passes by plain NumPy, and the weights after them."""
    network, sgd = networks.LanguageModel("sum_over_time"), networks.SGD(0.0, clip_norm)
    current = {name: array.astype(np.float64) for name, array in WEIGHTS.items()}
    losses = []
    for rate in epochs:
        sgd.learning_rate, states, total = rate, STATES, 0.0
        for batch in batches:
            result = network.loss_and_gradients(current, *batch, states)
            sgd.update(current, result.gradients)
            states, total = result.final_states, total + result.loss
        losses.append(total / sum(tokens.shape[1] for tokens, _ in batches))
    return losses, current


def test_epochs_of_training_follow_plain_numpy_with_falling_rate_and_states_from_the_start_of_each():
    model = ptb_model(clip_norm=1.0)
    staged = [model.stage(*batch) for batch in BATCHES]
    rates = (0.5, 0.25)
    losses, trained = reference_training(rates, BATCHES, clip_norm=1.0)
    assert error([model.train_epoch(staged, rate) for rate in rates], losses) < FLOAT32
    assert_close(model.weights(), trained, 1e-4)


@pytest.mark.parametrize("reduction", ["mean", "sum_over_time"])
def test_evaluation_is_the_mean_loss_per_token_with_states_carried_and_batches_of_any_length(reduction):
    model = model_of(reduction=reduction, keep_prob=0.5)
    text = np.random.default_rng(8).integers(0, VOCABULARY, 12)
    zero = canonical.zero_states(LAYERS, 1, UNITS)
    pieces = [(text[k : k + TIME][None], text[k + 1 : k + 1 + TIME][None]) for k in (0, 5)] + [
        (text[10:11][None], text[11:12][None])
    ]
    given = model.evaluate([model.stage(*piece) for piece in pieces], zero)
    network = networks.LanguageModel("mean")
    assert given == pytest.approx(network.forward(WEIGHTS, text[None, :-1], text[None, 1:], zero).loss, rel=1e-5)
    assert model.states is model.initial_states
    assert_same(model.weights(), WEIGHTS)


def test_tokens_lie_staged_as_int64():
    model = model_of()
    assert all(tensor.dtype == tf.int64 for batch in model.batches for tensor in batch)
    assert len(model.batches) == len(BATCHES)
