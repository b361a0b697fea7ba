"""The classifier in PyTorch: every row against the reference, what the proof asks of it, and a whole training."""

import numpy as np
import pytest
import torch

from harness.measure.clocks import EpochClock
from harness.measure.proof import UPDATE_STEPS, Kernel, Proof
from models import rows
from models.pytorch.classifier import CapturedClassifier, TorchClassifier
from models.pytorch.language_model import COMPUTE_DTYPE
from models.reference import expected, networks
from models.weights import canonical
from tests import cases, torch_cases

TIME, FEATURES, UNITS, LAYERS, DENSE, CLASSES, BATCH = 3, 4, 6, 2, (8,), 3, 7
SHAPES = canonical.classifier_shapes(FEATURES, UNITS, LAYERS, DENSE, CLASSES)
WEIGHTS = canonical.large_random(SHAPES, seed=3)
INPUTS = np.random.default_rng(1).uniform(-1, 1, (4 * BATCH, TIME, FEATURES)).astype(np.float32)
LABELS = np.random.default_rng(2).integers(0, CLASSES, 4 * BATCH)
RATES = (0.5, 0.4, 0.3)
ROWS = {name: rows.FIT[name] for name in rows.PYTORCH}
EAGER = [name for name, made in ROWS.items() if not made.needs_gpu and name != "torch_compile"]


def run_eagerly(function):
    """In place of a CUDA graph: warm-up calls that change everything, then the function itself, called at every replay."""
    for _ in range(2):
        function()
    return function


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


def trial_of(row="torch_lstm", precision="fp32", optimizer=("Adam", 1e-2, 0.1), start=WEIGHTS, **options):
    """`row` as on a CPU; "captured" is torch_lstm_graph, "captured cells" the network of torch_compile, each captured."""
    torch.compiler.reset()
    name = {"captured": "torch_lstm_graph", "captured cells": "torch_compile"}.get(row, row)
    stack = ROWS[name].arguments["stack"](start, LAYERS, COMPUTE_DTYPE[precision])
    arguments = (stack, start, INPUTS, LABELS, BATCH, optimizer)
    if row.startswith("captured"):
        return CapturedClassifier(*arguments, record=run_eagerly, **options)
    return TorchClassifier(*arguments, **options)


def reference_of(decay=0.1):
    states = canonical.zero_states(LAYERS, BATCH, UNITS)
    batches = [(INPUTS[k : k + BATCH], LABELS[k : k + BATCH]) for k in range(0, len(INPUTS), BATCH)]
    return expected.classifier(networks.Adam(1e-2, decay=decay), WEIGHTS, states, batches)


def logits_of(start, x, y):
    states = canonical.zero_states(LAYERS, len(x), UNITS)
    return networks.Classifier().forward(start, x, y, states).logits


# --- against the reference ----------------------------------------------------------------------------------------------


def kernel_of(row):
    return Kernel(**ROWS[row].expected_ops(cases.LAYERS, cases.STEPS, "cpu", UPDATE_STEPS))


def row_of(row, precision):
    """As mnist.py makes it, with dropout, at the size of tests.cases."""
    torch.compiler.reset()
    return ROWS[row].classifier(
        *cases.classifier_start(), cases.BATCH, ("Adam", 1e-3, 1e-5), lstm_dropout=(0.2, 0.1), dense_dropout=0.2,
        precision=precision, device="cpu", loss_scale=cases.LOSS_SCALE / 4, seed=1,
    )  # fmt: skip


@pytest.mark.parametrize(("row", "precision"), [*((row, "fp32") for row in EAGER), ("torch_lstm", "fp16")])
def test_row_passes_its_proof_and_no_other_rows(row, precision):
    runtime = torch_cases.make_runtime("cpu", precision)
    trial = row_of(row, precision)
    proof = cases.prove_fit(trial, precision, kernel_of(row), runtime)
    assert proof.record()["ok"], proof.record()["reason"]
    trial.restore()
    for label in {"fp32", "tf32", "fp16"} - {precision}:
        proof = Proof(label)
        proof.outputs(trial.outputs(), cases.classifier_reference()["outputs"])
        assert "precision" in proof.failures
    profile = runtime.profile(lambda: trial.timed_steps(UPDATE_STEPS))
    accepted = set()
    for named in ROWS:
        proof = Proof(precision)
        proof.what_ran(profile, kernel_of(named), "cpu")
        accepted |= set() if proof.failures else {named}
    assert accepted == {row}


def test_compiled_row_passes_its_proof():
    runtime = torch_cases.make_runtime("cpu", "fp32")
    trial = trial_of("torch_compile", rates=RATES)
    kernel = Kernel(**ROWS["torch_compile"].expected_ops(LAYERS, TIME, "cpu", UPDATE_STEPS))
    trial.train_steps(1)
    traces, proof, reference = trial.traces, Proof("fp32"), reference_of()
    trial.restore()
    proof.outputs(trial.outputs(), reference["outputs"])
    proof.training(trial, reference)
    proof.what_ran(runtime.profile(lambda: trial.timed_steps(UPDATE_STEPS)), kernel, "cpu")
    assert proof.record()["ok"], proof.record()["reason"]
    assert trial.traces == traces + 1  # the forward pass; one training step for every rate
    trial.warm_up((INPUTS[:12], LABELS[:12]))
    traces = trial.traces
    trial.fit(INPUTS, LABELS, 1, (INPUTS[:12], LABELS[:12]), EpochClock())
    assert trial.traces == traces


@pytest.mark.parametrize("row", [*EAGER, "captured", "captured cells"])
def test_float64_trial_follows_the_reference_to_rounding(row):
    trial, reference = trial_of(row, "fp64"), reference_of()
    assert error(trial.train_steps(4), reference["losses"][:4]) < 1e-13
    trial.restore()
    assert_close(trial.outputs(), reference["outputs"], 1e-13)
    trial.train_steps(1)
    assert_close(trial.first_gradients(), reference["gradients"], 1e-10)
    trial.restore()
    trial.train_steps(3)
    assert_close({name: array - WEIGHTS[name] for name, array in trial.weights().items()}, reference["updates"], 1e-10)


def test_rate_that_does_not_fall_is_another_update():
    trial, reference = trial_of(optimizer=("Adam", 1e-2, 0.0)), reference_of()
    trial.train_steps(3)
    updates = {name: array - WEIGHTS[name] for name, array in trial.weights().items()}
    assert min(error(updates[name], array) for name, array in reference["updates"].items()) > 0.02


@pytest.mark.parametrize("row", ["torch_lstm", "captured"])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_restore_is_exact_and_load_makes_other_weights_the_start(row, precision):
    trial = trial_of(row, precision, rates=RATES, loss_scale=64.0)
    assert_same(trial.weights(), WEIGHTS)
    losses, trained = trial.train_steps(3), trial.weights()
    assert all((trained[name] != WEIGHTS[name]).any() for name in WEIGHTS)
    trial.restore()
    assert_same(trial.weights(), WEIGHTS)
    assert trial.optimizer.iterations == 0 and not any(tensor.any() for tensor in trial.optimizer.tensors)
    np.testing.assert_array_equal(trial.train_steps(3), losses)
    others = canonical.keras_default(SHAPES, seed=4)
    trial.load(others)
    assert_same(trial.weights(), others)
    trial.train_steps(1)
    trial.restore()
    assert_same(trial.weights(), others)
    reference = logits_of(others, INPUTS[:BATCH], LABELS[:BATCH])
    assert error(trial.outputs()["logits"], reference) < (1e-5 if precision == "fp32" else 1e-2)


# --- dropout ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", [*EAGER, "captured", "captured cells"])
def test_proof_runs_without_dropout_and_the_timed_steps_with_it(row):
    trial, plain = trial_of(row, rates=RATES), trial_of()
    np.testing.assert_allclose(trial.train_steps(3), plain.train_steps(3), rtol=1e-5)
    for rates in [RATES, *(np.diag(RATES) if row != "captured cells" else [])]:
        one = trial if rates is RATES else trial_of(row, rates=tuple(rates.tolist()))
        one.restore(), plain.restore()
        assert error(one.timed_steps(3), plain.train_steps(3)) > 1e-4, rates
    with pytest.raises(KeyboardInterrupt), trial.without_dropout():
        raise KeyboardInterrupt
    trial.restore(), plain.restore()
    assert error(trial.timed_steps(3), plain.train_steps(3)) > 1e-4
    outputs = trial.outputs()
    assert_same(trial.outputs(), outputs)  # a forward pass has no dropout


def test_captured_step_with_the_librarys_own_dropout_is_one_graph_per_rate():
    trial = trial_of("captured", rates=RATES)
    trial.train_steps(1), trial.timed_steps(1)
    assert set(trial._graphs) == {("train", 0.5), ("train", 0.0)} and trial.traces == 2
    assert trial.unproven()  # on a CPU the stack's dropout is ops, which the proven step does not have
    assert_same(trial.weights(), WEIGHTS)
    assert trial_of("captured", rates=(0.0, 0.4, 0.3)).unproven() == ""
    assert trial_of("captured cells", rates=RATES).unproven() == ""


def test_rates_that_differ_between_the_layers_are_refused():
    start = canonical.large_random(canonical.classifier_shapes(FEATURES, UNITS, 3, DENSE, CLASSES), seed=3)
    with pytest.raises(ValueError, match="one rate between all layers"):
        ROWS["torch_lstm"].classifier(start, INPUTS, LABELS, BATCH, ("Adam", 1e-2, 0.0), lstm_dropout=(0.2, 0.1))


# --- a whole training ---------------------------------------------------------------------------------------------------


def learnable(count):
    """The label is the feature whose sum over time is the largest."""
    x = np.random.default_rng(5).uniform(-1, 1, (count, TIME, FEATURES)).astype(np.float32)
    return x, x[..., :CLASSES].sum(axis=1).argmax(axis=1)


@pytest.mark.parametrize(("row", "precision"), [("torch_lstm", "fp32"), ("captured", "fp32"), ("captured", "fp16")])
def test_fit_learns_and_feeds_the_clock(row, precision, capsys):
    x, y = learnable(40 * BATCH)
    test = learnable(25)
    options = dict(rates=(0.05, 0.05, 0.05), capacity=len(x), loss_scale=64.0)
    trial = trial_of(row, precision, optimizer=("Adam", 1e-2, 0.0), **options)
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


def test_epoch_takes_every_sequence_once_in_an_order_of_its_own():
    trial, seen = trial_of(), []
    step = trial._train_step
    trial._train_step = lambda index: seen.extend(index.tolist()) or step(index)
    trial.fit(INPUTS, LABELS, 2, None, EpochClock())
    orders = seen[: len(INPUTS)], seen[len(INPUTS) :]
    assert [sorted(order) for order in orders] == [list(range(len(INPUTS)))] * 2
    assert orders[0] != orders[1] != list(range(len(INPUTS)))


@pytest.mark.parametrize("row", ["torch_lstm", "captured"])
def test_losses_and_accuracy_of_an_epoch_are_those_of_its_steps(row):
    """With a learning rate of 0, so that all steps see the same weights."""
    trial = trial_of(row, optimizer=("Adam", 0.0, 0.0), capacity=100)
    reference = networks.Classifier().forward(
        WEIGHTS, INPUTS, LABELS, canonical.zero_states(LAYERS, len(INPUTS), UNITS)
    )
    right = (reference.logits.argmax(axis=1) == LABELS).mean()
    clock = EpochClock()
    for _ in range(2):
        result = trial.fit(INPUTS, LABELS, 2, None, clock)
        assert result["losses"] == pytest.approx([reference.loss] * 2, rel=1e-6)
        assert result["accuracy"] == {"acc": pytest.approx(right)}
    assert len(clock.train_s) == 4 and clock.validation_s == []


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
    trial._update = lambda gradients: None
    assert {"gradients", "update"} <= failed(trial)


def test_dense_layer_left_out_of_the_update_is_caught():
    trial = trial_of()
    update = trial._update
    trial._update = lambda gradients: update([*gradients[:-1], torch.zeros_like(gradients[-1])])
    assert {"gradients", "update"} <= failed(trial)


def test_first_output_in_place_of_the_last_is_caught():
    trial = trial_of()
    stack = trial.stack.module.forward
    trial.stack.module.forward = lambda x, states: stack(x[:1], states)
    assert "outputs" in failed(trial)


def test_gates_in_another_order_are_caught():
    swapped = {name: np.array(array) for name, array in WEIGHTS.items()}
    for name, array in WEIGHTS.items():
        if name.startswith("lstm_"):
            blocks = np.split(array, 4, axis=-1)
            swapped[name] = np.concatenate([blocks[k] for k in (1, 0, 2, 3)], axis=-1)
    assert "outputs" in failed(trial_of(start=swapped))
