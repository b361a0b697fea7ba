"""The Keras classifier on Keras' other backends: proven and trained, each row in a process of its own.

Keras has one backend per process, so this file is its own script:

    python -m tests.models.test_keras_backends keras_torch cpu fp32    # prints what the tests look at, as JSON
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.frameworks import runtimes
from harness.measure.proof import LIMITS, UPDATE_STEPS, Kernel, Proof
from harness.record import machine
from models import rows
from models.weights import canonical
from tests import cases

NIGHTLY = ["keras_jax_loop"] if Path(sys.prefix, rows.KERAS_NIGHTLY).is_dir() else []
ROWS = [*rows.KERAS, *NIGHTLY]
ON_CPU = [name for name in ROWS if not rows.FIT[name].needs_gpu]


def found_of(row: str, device: str, precision: str) -> dict:
    """What the script prints."""
    command = [sys.executable, "-m", "tests.models.test_keras_backends", row, device, precision]
    environment = os.environ | ({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {})
    ran = subprocess.run(command, capture_output=True, text=True, cwd=machine.PROJECT, timeout=600, env=environment)
    assert not ran.returncode, ran.stderr[-3000:]
    return json.loads(ran.stdout.splitlines()[-1])


def _found(row: str, device: str, precision: str) -> dict:
    import numpy as np

    from harness.measure.clocks import EpochClock

    made = rows.FIT[row]
    runtime = runtimes.make(made.framework, device, precision, threads=1)
    start, inputs, labels = cases.classifier_start()
    trial = made.build(
        start, inputs, labels, cases.BATCH, ("Adam", 1e-3, 1e-5), lstm_dropout=(0.2, 0.1), dense_dropout=0.2,
        precision=precision, device=runtime.device_name, loss_scale=cases.LOSS_SCALE / 4, seed=1,
    )  # fmt: skip
    test = inputs[:40], labels[:40]
    trial.warm_up(test)
    kernel = Kernel(**made.expected_ops(cases.LAYERS, cases.STEPS, device, UPDATE_STEPS))
    found = {"proof": cases.prove_fit(trial, precision, kernel, runtime).record(), "precision": {}}
    trial.restore()
    for label in {*LIMITS} - {precision}:
        proof = Proof(label)
        proof.outputs(trial.outputs(), cases.classifier_reference()["outputs"])
        found["precision"][label] = "precision" in proof.failures
    trial.restore()
    dropped, proven = trial.timed_steps(3), []
    for _ in range(2):
        trial.restore()
        proven.append(trial.train_steps(3).tolist())
    found |= {"dropped": dropped.tolist(), "proven": proven}

    shapes = {name: array.shape for name, array in start.items()}
    trial.load(canonical.keras_default(shapes, 1))
    bright = np.where(np.arange(cases.STEPS * cases.FEATURES) % cases.CLASSES == labels[:, np.newaxis], 1.0, 0.0)
    x, traces, clock = np.float32(bright.reshape(inputs.shape)), trial.traces, EpochClock()
    result = trial.fit(x, labels, 20, (x[:40], labels[:40]), clock)
    found |= {"fit": result, "traced_anew": trial.traces - traces, "epochs": len(clock.train_s)}
    return found | {"validations": len(clock.validation_s)}


@pytest.mark.parametrize(
    ("row", "precision"),
    [
        # By default keras_torch is proven in test_keras_language_model.py.
        *(pytest.param(row, "fp32", marks=[pytest.mark.slow] * (row == "keras_torch")) for row in ON_CPU),
        *(pytest.param("keras_jax", half, marks=pytest.mark.slow) for half in ("fp16", "bf16")),
    ],
)
def test_row_passes_its_proof_and_learns(row, precision):
    pytest.importorskip(rows.FIT[row].framework)
    check(found_of(row, "cpu", precision))


def check(found: dict) -> None:
    assert found["proof"]["ok"], found["proof"]["reason"]
    assert all(found["precision"].values())
    assert found["proven"][0] == pytest.approx(found["proven"][1], rel=1e-4)
    assert abs(found["dropped"][0] / found["proven"][0][0] - 1) > 1e-3
    losses, accuracy = found["fit"]["losses"], found["fit"]["accuracy"]
    assert len(losses) == found["epochs"] == found["validations"] == 20
    assert losses[-1] < 0.5 * losses[0] and accuracy["val_acc"] > 0.8 and accuracy["acc"] > 0.5
    assert found["traced_anew"] == 0


def test_backend_other_than_keras_own_is_refused(tensorflow_runtime, monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "tensorflow")  # put back after the test
    import keras

    assert keras.backend.backend() == "tensorflow"
    with pytest.raises(RuntimeError, match="Keras runs on tensorflow in this process, expected jax"):
        rows.FIT["keras_jax"].build(*cases.classifier_start(), cases.BATCH, ("Adam", 1e-3, 0.0))


@pytest.mark.parametrize(("batches", "steps"), [(1875, 375), (300, 300), (125, 125), (376, 188), (1, 1)])
def test_scans_take_as_many_steps_as_divide_an_epoch(tensorflow_runtime, monkeypatch, batches, steps):
    from models.keras import classifier

    monkeypatch.setattr(classifier.ClassifierTrial, "__init__", lambda *_: None)
    trial = classifier.ScannedTrial(None, None, None, None, 32, batches, rows.STEPS_PER_LOOP)
    assert trial._scan == steps
    trial.traces = 1
    assert trial.graph_mismatch() == ""
    trial.traces = 2
    assert "traced 2 times, expected once" in trial.graph_mismatch()


def test_precision_that_a_row_has_not_is_refused():
    with pytest.raises(ValueError, match="has no fp16, expected one of fp32, tf32"):
        rows.FIT["keras_jax_cudnn"].build(*cases.classifier_start(), cases.BATCH, ("Adam", 1e-3, 0.0), precision="fp16")


if __name__ == "__main__":
    found = _found(*sys.argv[1:])
    print(json.dumps(found))
