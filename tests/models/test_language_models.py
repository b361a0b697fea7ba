"""What the language model promises in every framework: the proof's methods, one step, dropout, a whole training."""

import functools
import math

import numpy as np
import pytest
from ml_dtypes import bfloat16

from models.reference import networks
from models.weights import canonical
from tests.comparing import error, worst
from tests.language_models import (
    BATCH,
    BATCHES,
    FLOAT32,
    LAYERS,
    SHAPES,
    STATES,
    TIME,
    UNITS,
    VOCABULARY,
    WAYS,
    WEIGHTS,
    assert_close,
    assert_same,
    first_step,
    of_ptb,
)

MEAN = networks.LanguageModel("mean")


CAPTURED = "torch, captured"  # its head is compiled, which takes seconds: for what a CUDA graph could change

pytestmark = pytest.mark.usefixtures("op_by_op")  # compiled heads: test_torch_language_model.py


@pytest.fixture(params=[name for name in WAYS if name != CAPTURED])
def way(request):
    return WAYS[request.param]


@pytest.fixture(params=WAYS)
def any_way(request):
    return WAYS[request.param]


def assert_same_states(given, wanted, dtype="float32"):
    for layer, expected in zip(given, wanted, strict=True):
        for state, array in zip(layer[0], expected[0], strict=True):
            np.testing.assert_array_equal(state, array.astype(dtype))


# --- restore ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ptb", "precision"),
    [
        pytest.param(ptb, precision, id=f"{'sgd' if ptb else 'adam'}-{precision}", marks=[pytest.mark.slow] * is_slow)
        for ptb, precision, is_slow in [
            (False, "fp32", False), (True, "fp16", False),
            (True, "fp32", True), (False, "fp16", True), (False, "bf16", True), (True, "bf16", True),
        ]
    ],
)  # fmt: skip
def test_restore_is_exact_for_weights_optimizer_and_states(any_way, ptb, precision):
    make = functools.partial(of_ptb, any_way.model_of) if ptb else any_way.model_of
    model = make(precision=precision, loss_scale=64.0)
    assert_same(model.weights(), WEIGHTS)
    slots = any_way.slots(model)
    assert not any(np.any(slot) for slot in slots)
    losses, trained = model.train_steps(3), model.weights()
    assert all((trained[name] != WEIGHTS[name]).any() for name in WEIGHTS)
    assert any(np.any(slot) for slot in any_way.slots(model)) or not slots  # the SGD of JAX keeps nothing
    for _ in range(2):
        model.restore()
        assert_same(model.weights(), WEIGHTS)
        assert not any(np.any(slot) for slot in any_way.slots(model))
        assert_same_states(
            any_way.states(model), STATES, {"fp16": "float16", "bf16": bfloat16}.get(precision, "float32")
        )
        np.testing.assert_allclose(model.train_steps(3), losses, rtol=any_way.rtol)


def test_forward_pass_changes_nothing(way):
    model = way.model_of(carry_states=True, keep_prob=0.5)
    first = model.outputs()
    losses = model.forward_losses(6)
    assert losses[0] == losses[4] == first["loss"] and losses[0] != losses[1]  # four batches, taken in turn
    assert_same(model.weights(), WEIGHTS)
    assert_same(model.outputs(), first)
    assert first["hidden"].shape == (BATCH, TIME, UNITS) and first["logits"].shape == (2, TIME, VOCABULARY)


# --- one step -----------------------------------------------------------------------------------------------------------


def test_states_are_carried_from_step_to_step_only_where_asked(any_way):
    carried = MEAN.forward(WEIGHTS, *BATCHES[0], STATES).final_states
    for carry_states, wanted in ((True, carried), (False, STATES)):
        model = any_way.model_of(carry_states=carry_states)
        model.train(model.batches[0])
        for given, layer in zip(any_way.states(model), wanted, strict=True):
            assert worst(zip(given[0], layer[0], strict=True)) < FLOAT32


@pytest.mark.parametrize("optimizer", ["Adam", "SGD"])
def test_first_gradients_are_those_the_optimizer_received(way, optimizer):
    wanted = MEAN.loss_and_gradients(WEIGHTS, *BATCHES[0], STATES).gradients
    assert_close(first_step(way.model_of(optimizer=(optimizer, 0.5))), wanted)


def test_clipping_is_by_the_global_norm_of_dense_gradients(way):
    """A word that comes up many times counts once, with the sum of its gradients."""
    gradients = MEAN.loss_and_gradients(WEIGHTS, *BATCHES[0], STATES).gradients
    norm = math.sqrt(sum(np.square(gradient).sum() for gradient in gradients.values()))
    for clip_norm, scale in ((norm / 3, 1 / 3), (norm * 1.01, 1.0)):
        wanted = {name: gradient * scale for name, gradient in gradients.items()}
        assert_close(first_step(way.model_of(clip_norm=clip_norm)), wanted)


def test_loss_scale_saves_small_gradients_of_float16_and_sums_over_many_tokens_are_float32(way):
    """10,000 tokens: a gradient of the mean loss by one token is at most 1e-4, where float16's spacing is 6e-8."""
    tokens = np.random.default_rng(1).integers(0, VOCABULARY, (2, 2000, TIME))
    tokens[1] %= 3  # few words are targets: the others' gradients are small
    states = canonical.random_states(LAYERS, 2000, UNITS, seed=2)
    wanted = MEAN.loss_and_gradients(WEIGHTS, *tokens, states).gradients
    at_most, with_scale, times_without = way.off
    typical = {}
    for scale in (1.0, 1024.0):
        given = first_step(way.model_of(precision="fp16", states=states, batches=[tuple(tokens)], loss_scale=scale))
        assert_close(given, wanted, at_most)
        typical[scale] = max(np.median(np.abs(given[name] - x) / np.abs(x)) for name, x in wanted.items())
    assert typical[1024.0] < with_scale and typical[1.0] > times_without * typical[1024.0]


def test_loss_scale_is_left_out_where_nothing_is_float16(way):
    model = way.model_of(loss_scale=65536.0)
    assert model.loss_scale == 1.0
    assert_close(first_step(model), first_step(way.model_of()))


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32", "fp64"])
def test_loss_and_master_weights_are_float32_or_better(way, precision):
    if precision == "fp64" and way is WAYS["jax"]:
        pytest.skip("JAX needs a switch before: test_float64_model_follows_the_reference_to_rounding")
    model = way.model_of(precision=precision, loss_scale=64.0)
    wanted = "float64" if precision == "fp64" else "float32"
    assert way.dtypes(model) == {wanted}
    assert model.numpy(model.train(model.batches[0])).dtype == wanted
    half = {"fp16": ["float16"], "bf16": ["bfloat16", "float32"]}  # PyTorch gives NumPy no bfloat16
    assert model.outputs()["hidden"].dtype.name in half.get(precision, [wanted])
    assert model.loss_scale == (64.0 if precision == "fp16" else 1.0)


# --- dropout ------------------------------------------------------------------------------------------------------------


def test_proof_runs_the_step_with_the_dropout_rate_at_0_and_puts_it_back(way):
    model, plain = way.model_of(keep_prob=0.5), way.model_of()
    np.testing.assert_allclose(model.train_steps(3), plain.train_steps(3), rtol=1e-5)
    assert_close(model.weights(), plain.weights())
    assert model.has_dropout and not plain.has_dropout and model.dropout_rate == 0.5
    model.restore()
    plain.restore()
    dropped = [model.numpy(model.train(batch)) for batch in model.batches[:3]]
    assert error(dropped, plain.train_steps(3)) > 1e-3
    with pytest.raises(KeyboardInterrupt), model.without_dropout():
        assert model.dropout_rate == 0.0
        raise KeyboardInterrupt
    assert model.dropout_rate == 0.5


def test_each_step_draws_its_own_masks(way):
    model = way.model_of(keep_prob=0.5)
    first = model.numpy(model.train(model.batches[0]))
    model.restore()
    assert model.numpy(model.train(model.batches[0])) != first


# --- a whole training ---------------------------------------------------------------------------------------------------


def test_start_from_makes_other_weights_the_start_with_a_fresh_optimizer(any_way):
    model = any_way.model_of()
    model.train_steps(2)
    others = canonical.uniform(SHAPES, 0.1, seed=9)
    zero = canonical.zero_states(LAYERS, BATCH, UNITS)
    model.start_from(others, zero)
    for _ in range(2):
        assert_same(model.weights(), others)
        assert_same_states(any_way.states(model), zero)
        assert not any(np.any(slot) for slot in any_way.slots(model))
        model.train_steps(1)
        model.restore()


def test_epochs_of_training_follow_plain_numpy_with_falling_rate_and_states_from_the_start_of_each(any_way):
    model = of_ptb(any_way.model_of, clip_norm=1.0)
    staged = [model.stage(*batch) for batch in BATCHES]
    network, sgd = networks.LanguageModel("sum_over_time"), networks.SGD(0.0, 1.0)
    current = {name: array.astype(np.float64) for name, array in WEIGHTS.items()}
    for rate in (0.5, 0.25):
        sgd.learning_rate, states, total = rate, STATES, 0.0
        for batch in BATCHES:
            result = network.loss_and_gradients(current, *batch, states)
            sgd.update(current, result.gradients)
            states, total = result.final_states, total + result.loss
        assert model.train_epoch(staged, rate) == pytest.approx(total / (len(BATCHES) * TIME), rel=FLOAT32)
    assert_close(model.weights(), current, 1e-4)


@pytest.mark.parametrize("reduction", ["mean", "sum_over_time"])
def test_evaluation_is_the_mean_loss_per_token_with_states_carried_and_batches_of_any_length(any_way, reduction):
    model = any_way.model_of(reduction=reduction, keep_prob=0.5)
    text = np.random.default_rng(8).integers(0, VOCABULARY, 12)
    zero = canonical.zero_states(LAYERS, 1, UNITS)
    pieces = [(text[k : min(k + TIME, 11)][None], text[k + 1 : k + 1 + TIME][None]) for k in (0, 5, 10)]
    given = model.evaluate([model.stage(*piece) for piece in pieces], zero)
    assert given == pytest.approx(MEAN.forward(WEIGHTS, text[None, :-1], text[None, 1:], zero).loss, rel=1e-5)
    assert_same_states(any_way.states(model), STATES)
    assert_same(model.weights(), WEIGHTS)
