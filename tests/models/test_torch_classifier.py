"""The classifier in PyTorch: every row against the reference, what the proof asks of it, and a whole training."""

import numpy as np
import pytest
import torch

from harness.measure.clocks import EpochClock
from harness.measure.proof import UPDATE_STEPS, Kernel, Proof
from models import rows
from tests import cases, torch_cases
from tests.classifiers import (
    INPUTS,
    LABELS,
    LAYERS,
    RATES,
    TIME,
    WEIGHTS,
    failed,
    follows_the_reference_to_rounding,
    reference_of,
)
from tests.classifiers import in_pytorch as trial_of
from tests.comparing import error
from tests.language_models import assert_same

ROWS = {name: rows.FIT[name] for name in rows.PYTORCH}
EAGER = [name for name, made in ROWS.items() if not made.needs_gpu and name != "torch_compile"]
CAPTURED = ["captured", "captured cells"]


# --- against the reference ----------------------------------------------------------------------------------------------


def kernel_of(row):
    return Kernel(**ROWS[row].expected_ops(cases.LAYERS, cases.STEPS, "cpu", UPDATE_STEPS))


def row_of(row, precision):
    """As mnist.py makes it, with dropout, at the size of tests.cases."""
    torch.compiler.reset()
    return cases.build_classifier_of(ROWS[row], precision, device="cpu")


@pytest.mark.parametrize(
    ("row", "precision"), [*((row, "fp32") for row in EAGER), ("torch_lstm", "fp16"), ("torch_lstm", "bf16")]
)
def test_row_passes_its_proof_and_no_other_rows(row, precision):
    runtime = torch_cases.make_runtime("cpu", precision)
    trial = row_of(row, precision)
    proof = cases.prove_fit(trial, precision, kernel_of(row), runtime)
    assert proof.record()["ok"], proof.record()["reason"]
    cases.assert_outputs_are_of(precision, trial)
    profile = runtime.profile(lambda: trial.timed_steps(UPDATE_STEPS))
    accepted = set()
    for named in ROWS:
        proof = Proof(precision)
        proof.what_ran(profile, kernel_of(named), "cpu")
        accepted |= set() if proof.failures else {named}
    assert accepted == {row}


@pytest.mark.slow
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
    forward = 3  # graphs: steps of two layers, and the head; of training steps one serves every rate
    assert trial.traces == traces + forward
    trial.warm_up((INPUTS[:12], LABELS[:12]))
    traces = trial.traces
    trial.fit(INPUTS, LABELS, 1, (INPUTS[:12], LABELS[:12]), EpochClock())
    assert trial.traces == traces


@pytest.mark.parametrize("row", [*EAGER, *CAPTURED])
def test_float64_trial_follows_the_reference_to_rounding(row):
    follows_the_reference_to_rounding(trial_of(row, precision="fp64"))


# --- dropout ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", [*EAGER, *CAPTURED])
@pytest.mark.usefixtures("op_by_op")
def test_proof_runs_without_dropout_and_the_timed_steps_with_it(row):
    trial, plain = trial_of(row, rates=RATES), trial_of()
    np.testing.assert_allclose(trial.train_steps(3), plain.train_steps(3), rtol=1e-5)
    for rates in [RATES, *np.diag(RATES)]:
        one = trial if rates is RATES else trial_of(row, rates=tuple(rates.tolist()))
        one.restore(), plain.restore()
        assert error(one.timed_steps(3), plain.train_steps(3)) > 1e-4, rates
    with pytest.raises(KeyboardInterrupt), trial.without_dropout():
        raise KeyboardInterrupt
    trial.restore(), plain.restore()
    assert error(trial.timed_steps(3), plain.train_steps(3)) > 1e-4
    outputs = trial.outputs()
    assert_same(trial.outputs(), outputs)  # a forward pass has no dropout


@pytest.mark.usefixtures("op_by_op")
def test_captured_step_with_the_librarys_own_dropout_is_one_graph_per_rate():
    trial = trial_of("captured", rates=RATES)
    trial.train_steps(1), trial.timed_steps(1)
    assert set(trial._graphs) == {("train", 0.5), ("train", 0.0)} and trial.traces == 2
    assert trial.graph_mismatch()  # on a CPU the stack's dropout is ops, which the proven step does not have
    assert_same(trial.weights(), WEIGHTS)
    assert trial_of("captured", rates=(0.0, 0.4, 0.3)).graph_mismatch() == ""
    assert trial_of("captured cells", rates=RATES).graph_mismatch() == ""


# --- a whole training ---------------------------------------------------------------------------------------------------


def test_epoch_takes_every_sequence_once_in_an_order_of_its_own():
    trial, seen = trial_of(), []
    step = trial._train_step
    trial._train_step = lambda index: seen.extend(index.tolist()) or step(index)
    trial.fit(INPUTS, LABELS, 2, None, EpochClock())
    orders = seen[: len(INPUTS)], seen[len(INPUTS) :]
    assert [sorted(order) for order in orders] == [list(range(len(INPUTS)))] * 2
    assert orders[0] != orders[1] != list(range(len(INPUTS)))


# --- planted mistakes ---------------------------------------------------------------------------------------------------


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
