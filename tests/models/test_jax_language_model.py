"""The language model in JAX: the row of a CPU against the reference, what the proof asks of it, and a whole training."""

import math

import numpy as np
import pytest

from models import rows
from models.reference import expected, networks
from models.weights import canonical
from tests import cases, jax_cases

jax = pytest.importorskip("jax")

VOCABULARY, UNITS, LAYERS, BATCH, TIME = 13, 6, 2, 3, 5
SHAPES = canonical.language_model_shapes(VOCABULARY, UNITS, UNITS, LAYERS)
WEIGHTS = canonical.large_random(SHAPES, seed=1)
STATES = canonical.random_states(LAYERS, BATCH, UNITS, seed=2)
TOKENS = np.random.default_rng(3).integers(0, VOCABULARY, (4, 2, BATCH, TIME))
TOKENS[0, 0] = 7  # one word, many times: the rows of the embedding's gradient overlap
BATCHES = [tuple(pair) for pair in TOKENS]
FLOAT32 = 1e-5  # max|a - b| / max|b| of a few steps


@pytest.fixture(scope="module", autouse=True)
def runtime():
    before = jax.config.jax_default_matmul_precision
    yield jax_cases.make_runtime("cpu", "fp32")
    jax.config.update("jax_default_matmul_precision", before)


@pytest.fixture
def float64():
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


@pytest.fixture(params=[1, 2, 10], ids=lambda steps: f"unroll {steps}")
def unroll(request, monkeypatch):
    """Steps per iteration; 2 does not divide the 5 steps, 10 leaves no loop."""
    from models.jax import stacks

    monkeypatch.setitem(stacks.UNROLL, "cpu", request.param)
    return request.param


def error(a, b):
    return np.abs(np.asarray(a, np.float64) - b).max() / np.abs(b).max()


def assert_close(given, wanted, limit=FLOAT32):
    assert set(given) == set(wanted)
    for name, array in wanted.items():
        assert error(given[name], array) < limit, name


def assert_same(given, wanted):
    assert set(given) == set(wanted)
    for name, array in wanted.items():
        np.testing.assert_array_equal(given[name], array, err_msg=name)


def model_of(precision="fp32", optimizer=("Adam", 1e-2), states=STATES, batches=BATCHES, **options):
    made = rows.LANGUAGE_MODEL["jax_scan"]
    return made.build(WEIGHTS, states, batches, optimizer, precision=precision, **options)


def ptb_model(rate=0.5, **options):
    return model_of(optimizer=("SGD", rate), reduction="sum_over_time", carry_states=True, **options)


# --- against the reference ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ptb", [False, True], ids=["adam, mean", "sgd, clipped, dropout, states carried"])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_jax_scan_passes_its_proof(precision, ptb, runtime):
    trial = jax_cases.language_model("jax_scan", precision, ptb)
    reference, kernel = cases.language_model_reference(ptb), jax_cases.kernel_of("jax_scan", "cpu")
    for mode in ("train", "forward", "stack"):
        proof = cases.prove(trial, mode, precision, reference, kernel, runtime)
        assert proof.record()["ok"], f"{mode}: {proof.record()['reason']}"


def test_float16_fails_the_proof_of_fp32(runtime):
    trial, kernel = jax_cases.language_model("jax_scan", "fp16"), jax_cases.kernel_of("jax_scan", "cpu")
    proof = cases.prove(trial, "train", "fp32", cases.language_model_reference(), kernel, runtime)
    assert set(proof.record()["failed"]) >= {"outputs", "precision", "gradients"}


@pytest.mark.slow
@pytest.mark.parametrize("ptb", [False, True], ids=["adam, mean", "sgd, clipped, states carried"])
def test_float64_model_follows_the_reference_to_rounding(ptb, unroll, float64):
    clip_norm = 0.1 if ptb else None
    model = (ptb_model if ptb else model_of)(precision="fp64", clip_norm=clip_norm)
    optimizer = networks.SGD(0.5, clip_norm) if ptb else networks.Adam(1e-2)
    reference = expected.language_model(
        "sum_over_time" if ptb else "mean", optimizer, WEIGHTS, STATES, BATCHES, carry_states=ptb
    )
    assert error(model.train_steps(6), reference["losses"]) < 1e-13
    model.restore()
    outputs = model.outputs()
    assert max(error(outputs[name], array) for name, array in reference["outputs"].items()) < 1e-13
    assert error(model.forward_losses(6), reference["forward_losses"]) < 1e-13
    model.train_steps(1)
    assert_close(model.first_gradients(), reference["gradients"], 1e-10)
    model.restore()
    model.train_steps(3)
    assert_close({name: array - WEIGHTS[name] for name, array in model.weights().items()}, reference["updates"], 1e-10)
    model.restore()
    alone = dict(model.stack_results())
    assert error(alone.pop("hidden"), reference["stack_outputs"]["hidden"]) < 1e-13
    assert_close(alone, reference["stack_gradients"], 1e-13)
    losses = [float(model.stack_alone(model.stack_batches[k % len(BATCHES)])) for k in range(6)]
    assert error(losses, reference["stack_losses"]) < 1e-13


@pytest.mark.slow
def test_written_backward_pass_is_jaxs_own_derivative(unroll, float64):
    """By the initial states and with gradients of the final ones too, which no language model asks for."""
    from models.jax import stacks

    rng = np.random.default_rng(1)
    arguments = [
        rng.normal(size=shape) for shape in ((TIME, BATCH, 4 * UNITS), (UNITS, 4 * UNITS), *[(BATCH, UNITS)] * 2)
    ]
    upstream = tuple(rng.normal(size=shape) for shape in ((TIME, BATCH, UNITS), *[(BATCH, UNITS)] * 2))

    def by(function):
        outputs, pull = jax.vjp(function, *arguments)
        return [*outputs, *pull(tuple(map(jax.numpy.asarray, upstream)))]

    ours = by(stacks._recur)
    for given, wanted in zip(ours, by(lambda *a: stacks._forward(*a)[0]), strict=True):
        assert error(given, wanted) < 1e-13


# --- restore ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [model_of, ptb_model], ids=["adam", "sgd"])
def test_restore_is_exact_for_weights_optimizer_and_states(make):
    model = make()
    assert_same(model.weights(), WEIGHTS)
    losses, trained = model.train_steps(3), model.weights()
    assert all((trained[name] != WEIGHTS[name]).any() for name in WEIGHTS)
    for _ in range(2):
        model.restore()
        assert_same(model.weights(), WEIGHTS)
        assert not any(np.any(moment) for moment in jax.tree.leaves(model.slots))
        for given, k in zip(model.states, range(2), strict=True):
            np.testing.assert_array_equal(given, np.stack([layer[0][k] for layer in STATES]))
        np.testing.assert_array_equal(model.train_steps(3), losses)


def test_forward_pass_changes_nothing():
    model = model_of(carry_states=True, keep_prob=0.5)
    first = model.outputs()
    losses = model.forward_losses(6)
    assert losses[0] == losses[4] == first["loss"] and losses[0] != losses[1]  # four batches, taken in turn
    assert_same(model.weights(), WEIGHTS)
    assert_same(model.outputs(), first)
    assert first["hidden"].shape == (BATCH, TIME, UNITS) and first["logits"].shape == (2, TIME, VOCABULARY)


# --- one step -----------------------------------------------------------------------------------------------------------


def test_states_are_carried_from_step_to_step_only_where_asked():
    reference = networks.LanguageModel("mean").forward(WEIGHTS, *BATCHES[0], STATES)
    carrying, fresh = model_of(carry_states=True), model_of()
    for model in (carrying, fresh):
        model.train(model.batches[0])
    for k, given in enumerate(carrying.states):
        assert error(given, np.stack([layer[0][k] for layer in reference.final_states])) < FLOAT32
    assert fresh.states is fresh.initial_states


def first_step(model):
    model.restore()
    model.train_steps(1)
    return model.first_gradients()


@pytest.mark.parametrize("optimizer", ["Adam", "SGD"])
def test_first_gradients_are_those_the_optimizer_received(optimizer):
    wanted = networks.LanguageModel("mean").loss_and_gradients(WEIGHTS, *BATCHES[0], STATES).gradients
    assert_close(first_step(model_of(optimizer=(optimizer, 0.5))), wanted)


def test_clipping_is_by_the_global_norm():
    gradients = networks.LanguageModel("mean").loss_and_gradients(WEIGHTS, *BATCHES[0], STATES).gradients
    norm = math.sqrt(sum(np.square(gradient).sum() for gradient in gradients.values()))
    for clip_norm, scale in ((norm / 3, 1 / 3), (norm * 1.01, 1.0)):
        wanted = {name: gradient * scale for name, gradient in gradients.items()}
        assert_close(first_step(model_of(clip_norm=clip_norm)), wanted)


@pytest.mark.slow
def test_loss_scale_saves_small_gradients_of_float16_and_sums_over_many_tokens_are_float32():
    """10,000 tokens: a gradient of the mean loss by one token is at most 1e-4, where float16's spacing is 6e-8."""
    tokens = np.random.default_rng(1).integers(0, VOCABULARY, (2, 2000, TIME))
    tokens[1] %= 3  # few words are targets: the others' gradients are small
    states = canonical.random_states(LAYERS, 2000, UNITS, seed=2)
    wanted = networks.LanguageModel("mean").loss_and_gradients(WEIGHTS, *tokens, states).gradients
    typical = {}
    for scale in (1.0, 1024.0):
        given = first_step(model_of("fp16", states=states, batches=[tuple(tokens)], loss_scale=scale))
        assert_close(given, wanted, 0.01)
        typical[scale] = max(np.median(np.abs(given[name] - x) / np.abs(x)) for name, x in wanted.items())
    assert typical[1024.0] < 0.002 and typical[1.0] > 1.5 * typical[1024.0]


def test_loss_scale_is_left_out_where_nothing_is_float16():
    model = model_of(loss_scale=65536.0)
    assert model.loss_scale == 1.0
    assert_same(first_step(model), first_step(model_of()))


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_loss_and_weights_are_float32_whatever_the_products_are(precision):
    model = model_of(precision, loss_scale=64.0)
    assert {str(array.dtype) for array in model.parameters} == {"float32"}
    assert model.train(model.batches[0]).dtype == "float32"
    assert model.outputs()["hidden"].dtype == {"fp16": "float16", "fp32": "float32"}[precision]


def test_a_step_overwrites_the_weights_it_is_given():
    model = model_of()
    before = [*model.parameters, *jax.tree.leaves(model.slots)]
    model.train(model.batches[0])
    assert all(array.is_deleted() for array in before)
    assert not any(array.is_deleted() for array in model._start)


# --- dropout ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_proof_runs_the_timed_program_with_the_dropout_rate_at_0_and_puts_it_back():
    model, plain = model_of(keep_prob=0.5), model_of()
    np.testing.assert_allclose(model.train_steps(3), plain.train_steps(3), rtol=1e-6)
    assert_close(model.weights(), plain.weights())
    assert model.dropout_rate == 0.5
    model.restore()
    dropped = [float(model.train(batch)) for batch in model.batches[:3]]
    assert error(dropped, plain.train_steps(3)) > 1e-3
    assert model._train._cache_size() == 1 and model.unproven() == ""
    with pytest.raises(KeyboardInterrupt), model.without_dropout():
        assert model.dropout_rate == 0.0 and float(model._rates[1]) == 0.0
        raise KeyboardInterrupt
    assert model.dropout_rate == 0.5 and float(model._rates[1]) == 0.5


@pytest.mark.slow
def test_a_step_that_is_traced_again_is_not_the_proven_one():
    model = model_of()
    model.train_steps(1)
    model.train(model.stage(*(ids[:, :-1] for ids in BATCHES[0])))
    assert "traced 2 times" in model.unproven()


def test_model_without_dropout_draws_no_numbers():
    def program(model):
        arguments = (model.parameters, model.slots, model._key, model._rates, *model.batches[0], model.states)
        return str(model._train.trace(*arguments).jaxpr)

    assert not model_of().has_dropout and "random" not in program(model_of())
    assert model_of(keep_prob=0.5).has_dropout and "random" in program(model_of(keep_prob=0.5))


@pytest.mark.slow
def test_dropout_reaches_the_embedding_and_every_layer_with_the_mean_kept():
    from models.jax.language_model import _Dropout

    seen = []

    class Watched(_Dropout):
        def __call__(self, x):
            seen.append((x, super().__call__(x)))
            return seen[-1][1]

    model = model_of(keep_prob=0.25, states=canonical.random_states(LAYERS, 40, UNITS, 1), batches=[
        tuple(np.random.default_rng(1).integers(0, VOCABULARY, (2, 40, TIME)))
    ])  # fmt: skip
    dropout = Watched(jax.random.key(1), jax.numpy.float32(0.75))
    model._network(model.parameters, *model.batches[0], model.states, dropout)
    assert len(seen) == 1 + LAYERS  # embedding, between the layers, behind the last one
    masks = []
    for before, after in seen:
        ratio = np.asarray(after) / np.asarray(before)
        assert set(np.unique(ratio.round(4))) == {0.0, 4.0}
        assert 0.2 < np.mean(ratio > 0) < 0.3
        masks.append(ratio > 0)
    assert (masks[0] != masks[1]).any()
    model_with_masks = model_of(keep_prob=0.5)
    first = float(model_with_masks.train(model_with_masks.batches[0]))
    model_with_masks.restore()
    assert float(model_with_masks.train(model_with_masks.batches[0])) != first  # each step draws its own


# --- a whole training ---------------------------------------------------------------------------------------------------


def test_start_from_makes_other_weights_the_start_with_a_fresh_optimizer():
    model = model_of()
    model.train_steps(2)
    others = canonical.uniform(SHAPES, 0.1, seed=9)
    model.start_from(others, canonical.zero_states(LAYERS, BATCH, UNITS))
    for _ in range(2):
        assert_same(model.weights(), others)
        assert not any(np.any(x) for x in jax.tree.leaves((model.states, model.slots)))
        model.train_steps(1)
        model.restore()


@pytest.mark.slow
def test_epochs_of_training_follow_plain_numpy_with_falling_rate_and_states_from_the_start_of_each():
    model = ptb_model(clip_norm=1.0)
    staged = [model.stage(*batch) for batch in BATCHES]
    network, sgd = networks.LanguageModel("sum_over_time"), networks.SGD(0.0, 1.0)
    current = {name: array.astype(np.float64) for name, array in WEIGHTS.items()}
    for rate in (0.5, 0.25):
        sgd.learning_rate, states, total = rate, STATES, 0.0
        for batch in BATCHES:
            result = network.loss_and_gradients(current, *batch, states)
            sgd.update(current, result.gradients)
            states, total = result.final_states, total + result.loss
        assert error(model.train_epoch(staged, rate), total / (len(BATCHES) * TIME)) < FLOAT32
    assert_close(model.weights(), current, 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("reduction", ["mean", "sum_over_time"])
def test_evaluation_is_the_mean_loss_per_token_with_states_carried_and_batches_of_any_length(reduction):
    model = model_of(reduction=reduction, keep_prob=0.5)
    text = np.random.default_rng(8).integers(0, VOCABULARY, 12)
    zero = canonical.zero_states(LAYERS, 1, UNITS)
    pieces = [(text[k : min(k + TIME, 11)][None], text[k + 1 : k + 1 + TIME][None]) for k in (0, 5, 10)]
    given = model.evaluate([model.stage(*piece) for piece in pieces], zero)
    network = networks.LanguageModel("mean")
    assert given == pytest.approx(network.forward(WEIGHTS, text[None, :-1], text[None, 1:], zero).loss, rel=1e-5)
    assert model.states is model.initial_states
    assert_same(model.weights(), WEIGHTS)


def test_a_precision_that_a_row_has_not_is_told():
    made = rows.LANGUAGE_MODEL["jax_cudnn"]
    with pytest.raises(ValueError, match="has no fp16, expected one of fp32, tf32"):
        made.build(WEIGHTS, STATES, BATCHES, ("SGD", 1.0), precision="fp16")
