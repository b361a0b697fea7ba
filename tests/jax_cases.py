"""Small cases of the JAX rows, and of Keras' rows on other backends, for any device; the proof is tests.cases.prove.

Keras has one backend per process, so its rows are proven in a process of their own:

    python -m tests.jax_cases keras_torch cpu fp32      # prints {case: the proof's record} as JSON
"""

import json
import os
import subprocess
import sys
from unittest import mock

import pytest

from harness.frameworks import runtimes
from harness.frameworks.jax import JaxRuntime
from harness.measure.proof import Kernel
from harness.record import machine
from models import rows
from tests import cases


def make_runtime(device: str, precision: str) -> JaxRuntime:
    """A runtime for all that runs from now on; what it sets in the environment is for a row's own process, and put back."""
    _skip_without_profiles()
    with mock.patch.dict(os.environ):
        return JaxRuntime(device, precision, machine.physical_cores())


def language_model(row: str, precision: str, ptb: bool = False, **options):
    """A row of stacked_lm.py, or with `ptb` one of ptb.py with dropout, as in tests.cases."""
    return cases.build_language_model(rows.LANGUAGE_MODEL[row], precision, ptb, **options)


def kernel_of(row: str, device: str) -> Kernel:
    """What the row's name promises to run on "cpu" or "gpu"."""
    return Kernel(**rows.LANGUAGE_MODEL[row].expected_ops(cases.LAYERS, cases.STEPS, device))


def proofs_of(row: str, device: str, precision: str) -> dict[str, dict]:
    """The records of every proof of a Keras row, from a process of its own."""
    if rows.LANGUAGE_MODEL[row].framework == "jax":
        _skip_without_profiles()
    command = [sys.executable, "-m", "tests.jax_cases", row, device, precision]
    found = subprocess.run(command, capture_output=True, text=True, cwd=machine.PROJECT, timeout=600)
    assert not found.returncode, found.stderr[-3000:]
    return json.loads(found.stdout.splitlines()[-1])


def _skip_without_profiles() -> None:
    """JAX for Python 3.10 is one that harness.frameworks.jax refuses."""
    import jax

    if getattr(jax.profiler, "ProfileData", None) is None:
        pytest.skip(f"JAX {jax.__version__} cannot read its own profiles")


def _proofs(row: str, device: str, precision: str) -> dict[str, dict]:
    runtime = runtimes.make(rows.LANGUAGE_MODEL[row].framework, device, precision, threads=1)
    records = {}
    for ptb in (False, True):
        trial, reference = language_model(row, precision, ptb), cases.language_model_reference(ptb)
        for mode in ("train",) if ptb else ("train", "forward", "stack"):
            proof = cases.prove(trial, mode, precision, reference, kernel_of(row, device), runtime)
            records[f"{'ptb' if ptb else 'stacked_lm'} {mode}"] = proof.record()
    return records | _behaviour(row, precision)


def _behaviour(row: str, precision: str) -> dict[str, dict]:
    """What the proof does not ask for: dropout in the timed steps, rates and states of a whole training, mistakes."""
    import numpy as np

    trial = language_model(row, precision, ptb=True)
    seeds = {tuple(np.array(layer.seed_generator.state).tolist()) for layer in trial.dropouts}
    dropped = [float(trial.train(batch)) for batch in trial.batches[:3]]
    trial.restore()
    plain = trial.train_steps(3)
    trial.restore()
    epoch = trial.train_epoch(trial.batches, 1.0)
    moved = trial.weights()
    trial.restore()
    still = trial.train_epoch(trial.batches, 0.0)
    start, states, batches = cases.language_model_start()
    same = all(np.array_equal(trial.weights()[name], array) for name, array in start.items())
    two_steps = [(tokens[:1, :2], targets[:1, :2]) for tokens, targets in batches[:2]]
    lone = [[tuple(state[:1] for state in layer[0])] for layer in states]
    return {
        "behaviour": {
            "dropout_changes_the_loss_by": float(np.abs(np.array(dropped) / plain - 1).max()),
            "places_that_share_masks": len(trial.dropouts) - len(seeds),
            "an_epoch_moves_the_weights": any((moved[name] != start[name]).any() for name in start),
            "rate_0_leaves_the_weights": same,
            "losses": [epoch, still, trial.evaluate([trial.stage(*pair) for pair in two_steps], lone)],
            "tensorflow": "tensorflow" in sys.modules,
        }
    }


if __name__ == "__main__":
    print(json.dumps(_proofs(*sys.argv[1:])))
