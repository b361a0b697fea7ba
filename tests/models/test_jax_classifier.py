"""The classifier in JAX: the row of a CPU against the reference, what the proof asks of it, and a whole training."""

import numpy as np
import pytest

from harness.measure.proof import UPDATE_STEPS, Kernel
from models import rows
from tests import cases, jax_cases
from tests.classifiers import INPUTS, failed, follows_the_reference_to_rounding
from tests.classifiers import in_jax as trial_of

jax = pytest.importorskip("jax")
pytestmark = pytest.mark.usefixtures("jax_runtime")

MADE = rows.FIT["jax_scan"]


# --- against the reference ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "fp16", pytest.param("bf16", marks=pytest.mark.slow)])
def test_row_passes_its_proof(precision):
    runtime = jax_cases.make_runtime("cpu", precision)
    trial = cases.build_classifier_of(MADE, precision)
    kernel = Kernel(**MADE.expected_ops(cases.LAYERS, cases.STEPS, "cpu", UPDATE_STEPS))
    proof = cases.prove_fit(trial, precision, kernel, runtime)
    assert proof.record()["ok"], proof.record()["reason"]
    assert trial.traces == 1  # the proof's steps and the timed ones are one executable
    cases.assert_outputs_are_of(precision, trial)


def test_float64_trial_follows_the_reference_to_rounding(jax_float64):
    follows_the_reference_to_rounding(trial_of("fp64"))


# --- a whole training ---------------------------------------------------------------------------------------------------


def test_epoch_takes_every_sequence_once_in_an_order_of_its_own():
    trial = trial_of(capacity=30)
    orders = [np.asarray(trial._drawn_order(len(INPUTS))) for _ in range(2)]
    assert [sorted(order[: len(INPUTS)].tolist()) for order in orders] == [list(range(len(INPUTS)))] * 2
    assert (orders[0] != orders[1]).any() and all(len(order) == 30 for order in orders)


# --- planted mistakes ---------------------------------------------------------------------------------------------------


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
