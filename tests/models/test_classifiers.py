"""What a classifier with a training loop of its own promises, in PyTorch and in JAX: the proof's methods, and a training."""

import functools
import itertools

import numpy as np
import pytest

from harness.measure.clocks import EpochClock
from models import rows
from models.reference import networks
from models.weights import canonical
from tests.classifiers import (
    BATCH,
    CLASSES,
    DENSE,
    FEATURES,
    INPUTS,
    LABELS,
    LAYERS,
    RATES,
    SHAPES,
    TIME,
    UNITS,
    WEIGHTS,
    failed,
    in_jax,
    in_pytorch,
    logits_of,
    reference_of,
)
from tests.comparing import error
from tests.language_models import assert_same

WAYS = {"torch": in_pytorch, "jax": in_jax}
CAPTURED = {"torch, captured": functools.partial(in_pytorch, "captured")}

pytestmark = pytest.mark.usefixtures("op_by_op")  # compiled heads: test_torch_classifier.py


@pytest.fixture(params=WAYS)
def trial_of(request):
    return WAYS[request.param]


@pytest.fixture(params=WAYS | CAPTURED)
def any_trial_of(request):
    return (WAYS | CAPTURED)[request.param]


@pytest.mark.parametrize(
    ("way", "precision"),
    [
        pytest.param(*case, marks=[pytest.mark.slow] * (case[1] == "bf16" or case == ("torch, captured", "fp16")))
        for case in itertools.product(WAYS | CAPTURED, ("fp32", "fp16", "bf16"))
    ],
)
def test_restore_is_exact_and_load_makes_other_weights_the_start(way, precision):
    trial = (WAYS | CAPTURED)[way](precision=precision, rates=RATES, loss_scale=64.0)
    assert_same(trial.weights(), WEIGHTS)
    losses, trained = trial.train_steps(3), trial.weights()
    assert all((trained[name] != WEIGHTS[name]).any() for name in WEIGHTS)
    trial.restore()
    assert_same(trial.weights(), WEIGHTS)
    np.testing.assert_array_equal(trial.train_steps(3), losses)  # the optimizer is as it was, too
    others = canonical.keras_default(SHAPES, seed=4)
    trial.load(others)
    assert_same(trial.weights(), others)
    trial.train_steps(1)
    trial.restore()
    assert_same(trial.weights(), others)
    reference = logits_of(others, INPUTS[:BATCH], LABELS[:BATCH])
    assert error(trial.outputs()["logits"], reference) < ({"fp32": 1e-5, "bf16": 5e-2}.get(precision, 1e-2))


def test_rate_that_does_not_fall_is_another_update(trial_of):
    trial, reference = trial_of(optimizer=("Adam", 1e-2, 0.0)), reference_of()
    trial.train_steps(3)
    updates = {name: array - WEIGHTS[name] for name, array in trial.weights().items()}
    assert min(error(updates[name], array) for name, array in reference["updates"].items()) > 0.02


@pytest.mark.parametrize(
    ("way", "rates"),
    [
        pytest.param(way, rates, marks=[pytest.mark.slow] * (way == "jax" and rates != RATES))  # each is compiled anew
        for way in WAYS
        for rates in (RATES, *map(tuple, np.diag(RATES).tolist()))
    ],
)
def test_proof_runs_without_dropout_and_the_timed_steps_with_it(way, rates):
    trial, plain = WAYS[way](rates=rates), WAYS[way]()
    np.testing.assert_allclose(trial.train_steps(3), plain.train_steps(3), rtol=1e-5)
    with pytest.raises(KeyboardInterrupt), trial.without_dropout():
        raise KeyboardInterrupt  # a step that fails puts the rates back too
    trial.restore(), plain.restore()
    assert error(trial.timed_steps(3), plain.train_steps(3)) > 1e-4
    outputs = trial.outputs()
    assert_same(trial.outputs(), outputs)  # a forward pass has no dropout


@pytest.mark.parametrize("row", ["torch_lstm", "jax_scan"])
def test_rates_that_differ_between_the_layers_are_refused(row):
    pytest.importorskip(rows.FIT[row].framework)
    start = canonical.large_random(canonical.classifier_shapes(FEATURES, UNITS, 3, DENSE, CLASSES), seed=3)
    with pytest.raises(ValueError, match="one rate between all layers"):
        rows.FIT[row].build(start, INPUTS, LABELS, BATCH, ("Adam", 1e-2, 0.0), lstm_dropout=(0.2, 0.1))


# --- a whole training ---------------------------------------------------------------------------------------------------


def learnable(count):
    """The label is the feature whose sum over time is the largest."""
    x = np.random.default_rng(5).uniform(-1, 1, (count, TIME, FEATURES)).astype(np.float32)
    return x, x[..., :CLASSES].sum(axis=1).argmax(axis=1)


@pytest.mark.parametrize(
    ("way", "precision"),
    [
        ("torch", "fp32"),
        ("torch, captured", "fp32"),
        pytest.param("torch, captured", "fp16", marks=pytest.mark.slow),
        ("jax", "fp32"),
    ],
)
def test_fit_learns_and_feeds_the_clock(way, precision, capsys):
    x, y = learnable(40 * BATCH)
    test = learnable(25)
    options = dict(rates=(0.05, 0.05, 0.05), capacity=len(x), loss_scale=64.0)
    trial = (WAYS | CAPTURED)[way](precision=precision, optimizer=("Adam", 1e-2, 0.0), **options)
    trial.warm_up(test), trial.timed_steps(1)
    trial.load(canonical.keras_default(SHAPES, seed=1))
    traces, clock = trial.traces, EpochClock()
    result = trial.fit(x, y, 8, test, clock)
    assert trial.traces == traces
    assert len(result["losses"]) == len(clock.train_s) == len(clock.validation_s) == 8
    assert result["losses"][-1] < 0.6 * result["losses"][0] < 0.8
    assert result["accuracy"]["acc"] > 0.75
    right = (logits_of(trial.weights(), *test).argmax(axis=1) == test[1]).mean()
    assert result["accuracy"]["val_acc"] == pytest.approx(right, abs=0 if precision == "fp32" else 0.05)
    assert right > 0.75 and capsys.readouterr().out.count("val_acc") == 8


def test_losses_and_accuracy_of_an_epoch_are_those_of_its_steps(any_trial_of):
    """With a learning rate of 0, so that all steps see the same weights; a capacity that the data do not fill."""
    trial = any_trial_of(optimizer=("Adam", 0.0, 0.0), capacity=100)
    states = canonical.zero_states(LAYERS, len(INPUTS), UNITS)
    reference = networks.Classifier().forward(WEIGHTS, INPUTS, LABELS, states)
    right = (reference.logits.argmax(axis=1) == LABELS).mean()
    clock = EpochClock()
    for _ in range(2):
        result = trial.fit(INPUTS, LABELS, 2, None, clock)
        assert result["losses"] == pytest.approx([reference.loss] * 2, rel=1e-6)
        assert result["accuracy"] == {"acc": pytest.approx(right)}
    assert len(clock.train_s) == 4 and clock.validation_s == []


@pytest.mark.parametrize("count", [BATCH + 1, 5 * BATCH])
def test_sequences_that_no_proven_step_takes_are_refused(trial_of, count):
    wanted = rf"{count} sequences given, expected a multiple of the batch size 7, at most 28"
    with pytest.raises(ValueError, match=wanted):
        trial_of().fit(*learnable(count), 1, None, EpochClock())


# --- planted mistakes ---------------------------------------------------------------------------------------------------


def test_step_without_a_mistake_fails_nothing(trial_of):
    assert failed(trial_of(rates=RATES)) == set()


def test_dropout_left_on_in_the_proof_is_caught(trial_of):
    trial = trial_of(rates=RATES)
    trial._set_rates = lambda rates: None
    assert {"gradients", "loss", "update"} <= failed(trial)


def test_gates_in_another_order_are_caught(trial_of):
    swapped = {name: np.array(array) for name, array in WEIGHTS.items()}
    for name, array in WEIGHTS.items():
        if name.startswith("lstm_"):
            blocks = np.split(array, 4, axis=-1)
            swapped[name] = np.concatenate([blocks[k] for k in (1, 0, 2, 3)], axis=-1)
    assert "outputs" in failed(trial_of(start=swapped))
