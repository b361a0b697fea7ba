"""Small classifiers with a training loop of their own, in PyTorch and in JAX."""

import numpy as np
import pytest

from harness.measure.proof import Proof
from models import rows
from models.reference import expected, networks
from models.weights import canonical
from tests.comparing import error, worst
from tests.language_models import run_eagerly

TIME, FEATURES, UNITS, LAYERS, DENSE, CLASSES, BATCH = 3, 4, 6, 2, (8,), 3, 7
SHAPES = canonical.classifier_shapes(FEATURES, UNITS, LAYERS, DENSE, CLASSES)
WEIGHTS = canonical.large_random(SHAPES, seed=3)
INPUTS = np.random.default_rng(1).uniform(-1, 1, (4 * BATCH, TIME, FEATURES)).astype(np.float32)
LABELS = np.random.default_rng(2).integers(0, CLASSES, 4 * BATCH)
RATES = (0.5, 0.4, 0.3)
NO_DROPOUT = (0.0, 0.0, 0.0)


def in_pytorch(row="torch_lstm", precision="fp32", optimizer=("Adam", 1e-2, 0.1), start=WEIGHTS, **options):
    """`row` as on a CPU; "captured" is torch_lstm_graph, "captured cells" torch_compile, each captured."""
    torch = pytest.importorskip("torch")
    from models.pytorch.classifier import CapturedClassifier, TorchClassifier
    from models.pytorch.language_model import COMPUTE_DTYPE

    torch.compiler.reset()
    name = {"captured": "torch_lstm_graph", "captured cells": "torch_compile"}.get(row, row)
    stack = rows.FIT[name].arguments["stack"](start, LAYERS, COMPUTE_DTYPE[precision])
    arguments = (stack, start, INPUTS, LABELS, BATCH, optimizer)
    if name != row:
        return CapturedClassifier(*arguments, record=run_eagerly, **options)
    return TorchClassifier(*arguments, **options)


def in_jax(precision="fp32", optimizer=("Adam", 1e-2, 0.1), start=WEIGHTS, rates=NO_DROPOUT, **options):
    pytest.importorskip("jax")
    *lstm_dropout, dense_dropout = rates
    return rows.FIT["jax_scan"].build(
        start, INPUTS, LABELS, BATCH, optimizer, precision=precision, lstm_dropout=lstm_dropout,
        dense_dropout=dense_dropout, **options,
    )  # fmt: skip


def reference_of():
    states = canonical.zero_states(LAYERS, BATCH, UNITS)
    batches = [(INPUTS[k : k + BATCH], LABELS[k : k + BATCH]) for k in range(0, len(INPUTS), BATCH)]
    return expected.classifier(networks.Adam(1e-2, decay=0.1), WEIGHTS, states, batches)


def logits_of(start, x, y):
    return networks.Classifier().forward(start, x, y, canonical.zero_states(LAYERS, len(x), UNITS)).logits


def follows_the_reference_to_rounding(trial):
    """Assert it, of a float64 trial."""
    reference = reference_of()
    assert error(trial.train_steps(4), reference["losses"][:4]) < 1e-13
    trial.restore()
    outputs = trial.outputs()
    assert worst((outputs[name], array) for name, array in reference["outputs"].items()) < 1e-13
    trial.train_steps(1)
    gradients = trial.first_gradients()
    assert worst((gradients[name], array) for name, array in reference["gradients"].items()) < 1e-10
    trial.restore()
    trial.train_steps(3)
    trained = trial.weights()
    assert set(trained) == set(gradients) == set(reference["updates"])
    assert worst((trained[name] - WEIGHTS[name], array) for name, array in reference["updates"].items()) < 1e-10


def failed(trial):
    """The proofs that fail."""
    proof, reference = Proof("fp32"), reference_of()
    trial.restore()
    proof.outputs(trial.outputs(), reference["outputs"])
    proof.training(trial, reference)
    return set(proof.record()["failed"])
