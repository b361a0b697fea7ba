"""The classifier in JAX: the row of a CPU against the reference, what the proof asks of it, and a whole training."""

import numpy as np
import pytest

from harness.measure.clocks import EpochClock
from harness.measure.proof import UPDATE_STEPS, Kernel, Proof
from models import rows
from models.reference import expected, networks
from models.weights import canonical
from tests import cases, jax_cases

jax = pytest.importorskip("jax")

TIME, FEATURES, UNITS, LAYERS, DENSE, CLASSES, BATCH = 3, 4, 6, 2, (8,), 3, 7
SHAPES = canonical.classifier_shapes(FEATURES, UNITS, LAYERS, DENSE, CLASSES)
WEIGHTS = canonical.large_random(SHAPES, seed=3)
INPUTS = np.random.default_rng(1).uniform(-1, 1, (4 * BATCH, TIME, FEATURES)).astype(np.float32)
LABELS = np.random.default_rng(2).integers(0, CLASSES, 4 * BATCH)
RATES = (0.5, 0.4, 0.3)
MADE = rows.FIT["jax_scan"]


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


def error(a, b):
    return np.abs(np.asarray(a, np.float64) - b).max() / np.abs(b).max()


def assert_close(given, wanted, limit):
    assert set(given) == set(wanted)
    for name, array in wanted.items():
        assert error(given[name], array) < limit, name


def assert_same(given, wanted):
    assert set(given) == set(wanted)
    for name, array in wanted.items():
        np.testing.assert_array_equal(given[name], array, err_msg=name)


def trial_of(precision="fp32", optimizer=("Adam", 1e-2, 0.1), rates=(0.0, 0.0, 0.0), **options):
    *lstm_dropout, dense_dropout = rates
    return MADE.build(
        WEIGHTS, INPUTS, LABELS, BATCH, optimizer, precision=precision, lstm_dropout=lstm_dropout,
        dense_dropout=dense_dropout, **options,
    )  # fmt: skip


def reference_of():
    states = canonical.zero_states(LAYERS, BATCH, UNITS)
    batches = [(INPUTS[k : k + BATCH], LABELS[k : k + BATCH]) for k in range(0, len(INPUTS), BATCH)]
    return expected.classifier(networks.Adam(1e-2, decay=0.1), WEIGHTS, states, batches)


def logits_of(start, x, y):
    return networks.Classifier().forward(start, x, y, canonical.zero_states(LAYERS, len(x), UNITS)).logits


# --- against the reference ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_row_passes_its_proof(precision):
    runtime = jax_cases.make_runtime("cpu", precision)
    trial = MADE.build(
        *cases.classifier_start(), cases.BATCH, ("Adam", 1e-3, 1e-5), lstm_dropout=(0.2, 0.1), dense_dropout=0.2,
        precision=precision, loss_scale=cases.LOSS_SCALE / 4, seed=1,
    )  # fmt: skip
    kernel = Kernel(**MADE.expected_ops(cases.LAYERS, cases.STEPS, "cpu", UPDATE_STEPS))
    proof = cases.prove_fit(trial, precision, kernel, runtime)
    assert proof.record()["ok"], proof.record()["reason"]
    assert trial.traces == 1  # the proof's steps and the timed ones are one executable
    trial.restore()
    for label in {"fp32", "tf32", "fp16"} - {precision}:
        proof = Proof(label)
        proof.outputs(trial.outputs(), cases.classifier_reference()["outputs"])
        assert "precision" in proof.failures


def test_float64_trial_follows_the_reference_to_rounding(float64):
    trial, reference = trial_of("fp64"), reference_of()
    assert error(trial.train_steps(4), reference["losses"][:4]) < 1e-13
    trial.restore()
    assert_close(trial.outputs(), reference["outputs"], 1e-13)
    trial.train_steps(1)
    assert_close(trial.first_gradients(), reference["gradients"], 1e-10)
    trial.restore()
    trial.train_steps(3)
    assert_close({name: array - WEIGHTS[name] for name, array in trial.weights().items()}, reference["updates"], 1e-10)


def test_restore_is_exact_and_load_makes_other_weights_the_start():
    trial = trial_of(rates=RATES)
    assert_same(trial.weights(), WEIGHTS)
    losses, trained = trial.train_steps(3), trial.weights()
    assert all((trained[name] != WEIGHTS[name]).any() for name in WEIGHTS)
    trial.restore()
    assert_same(trial.weights(), WEIGHTS)
    np.testing.assert_array_equal(trial.train_steps(3), losses)
    others = canonical.keras_default(SHAPES, seed=4)
    trial.load(others)
    assert_same(trial.weights(), others)
    trial.train_steps(1)
    trial.restore()
    assert_same(trial.weights(), others)
    assert error(trial.outputs()["logits"], logits_of(others, INPUTS[:BATCH], LABELS[:BATCH])) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("rates", [RATES, *np.diag(RATES).tolist()])
def test_proof_runs_without_dropout_and_the_timed_steps_with_it(rates):
    trial, plain = trial_of(rates=tuple(rates)), trial_of()
    np.testing.assert_allclose(trial.train_steps(3), plain.train_steps(3), rtol=1e-5)
    trial.restore(), plain.restore()
    assert error(trial.timed_steps(3), plain.train_steps(3)) > 1e-4
    trial._train = None  # a step that fails puts the rates back too
    with pytest.raises(TypeError):
        trial.train_steps(1)
    assert [float(rate) for rate in trial._rates] == pytest.approx(rates)


def test_kinds_of_dropout_that_a_row_has_not_are_refused():
    start = canonical.large_random(canonical.classifier_shapes(FEATURES, UNITS, 3, DENSE, CLASSES), seed=3)
    with pytest.raises(ValueError, match="one rate between all layers"):
        MADE.build(start, INPUTS, LABELS, BATCH, ("Adam", 1e-2, 0.0), lstm_dropout=(0.2, 0.1))
    with pytest.raises(ValueError, match="has no fp16"):
        rows.FIT["jax_cudnn"].build(WEIGHTS, INPUTS, LABELS, BATCH, ("Adam", 1e-2, 0.0), precision="fp16")


# --- a whole training ---------------------------------------------------------------------------------------------------


def learnable(count):
    """The label is the feature whose sum over time is the largest."""
    x = np.random.default_rng(5).uniform(-1, 1, (count, TIME, FEATURES)).astype(np.float32)
    return x, x[..., :CLASSES].sum(axis=1).argmax(axis=1)


def test_fit_learns_and_feeds_the_clock(capsys):
    x, y = learnable(40 * BATCH)
    test = learnable(25)
    trial = trial_of(optimizer=("Adam", 1e-2, 0.0), rates=(0.05, 0.05, 0.05), capacity=len(x))
    trial.warm_up(test), trial.timed_steps(1)
    trial.load(canonical.keras_default(SHAPES, seed=1))
    clock = EpochClock()
    result = trial.fit(x, y, 8, test, clock)
    assert trial.traces == 1
    assert len(result["losses"]) == len(clock.train_s) == len(clock.validation_s) == 8
    assert result["losses"][-1] < 0.6 * result["losses"][0] < 0.8
    assert result["accuracy"]["acc"] > 0.75
    right = (logits_of(trial.weights(), *test).argmax(axis=1) == test[1]).mean()
    assert result["accuracy"]["val_acc"] == right > 0.75
    assert capsys.readouterr().out.count("val_acc") == 8


def test_losses_and_accuracy_of_an_epoch_are_those_of_its_steps():
    """With a learning rate of 0, so that all steps see the same weights; a capacity that the data do not fill."""
    trial = trial_of(optimizer=("Adam", 0.0, 0.0), capacity=100)
    reference = networks.Classifier().forward(
        WEIGHTS, INPUTS, LABELS, canonical.zero_states(LAYERS, len(INPUTS), UNITS)
    )
    right = (reference.logits.argmax(axis=1) == LABELS).mean()
    for _ in range(2):
        result = trial.fit(INPUTS, LABELS, 2, None, EpochClock())
        assert result["losses"] == pytest.approx([reference.loss] * 2, rel=1e-6)
        assert result["accuracy"] == {"acc": pytest.approx(right)}


def test_epoch_takes_every_sequence_once_in_an_order_of_its_own():
    trial = trial_of(capacity=30)
    orders = [np.asarray(trial._drawn_order(len(INPUTS))) for _ in range(2)]
    assert [sorted(order[: len(INPUTS)].tolist()) for order in orders] == [list(range(len(INPUTS)))] * 2
    assert (orders[0] != orders[1]).any() and all(len(order) == 30 for order in orders)


@pytest.mark.parametrize("count", [BATCH + 1, 5 * BATCH])
def test_sequences_that_no_proven_step_takes_are_refused(count):
    x, y = learnable(count)
    with pytest.raises(
        ValueError, match=rf"{count} sequences given, expected a multiple of the batch size 7, at most 28"
    ):
        trial_of().fit(x, y, 1, None, EpochClock())


# --- planted mistakes ---------------------------------------------------------------------------------------------------


def failed(trial):
    proof, reference = Proof("fp32"), reference_of()
    trial.restore()
    proof.outputs(trial.outputs(), reference["outputs"])
    proof.training(trial, reference)
    return set(proof.record()["failed"])


def test_step_without_a_mistake_fails_nothing():
    assert failed(trial_of(rates=RATES)) == set()


def test_dropout_left_on_in_the_proof_is_caught():
    trial = trial_of(rates=RATES)
    trial._set_rates = lambda rates: None
    assert {"gradients", "loss", "update"} <= failed(trial)


def test_forward_only_step_is_caught():
    trial = trial_of()
    trial.optimizer.update = lambda parameters, gradients, slots, rate: (parameters, slots)
    assert {"gradients", "update"} <= failed(trial)


def test_first_output_in_place_of_the_last_is_caught():
    trial = trial_of()
    stack = trial.stack
    trial.stack = type("Stack", (), {"__getattr__": lambda self, name: getattr(stack, name),
                                     "__call__": lambda self, own, x, *rest: stack(own, x[:1], *rest)})()  # fmt: skip
    assert "outputs" in failed(trial)
