"""The Keras model on JAX and on PyTorch, each in a process of its own: Keras has one backend per process."""

import itertools

import pytest

from models import rows
from tests import cases, jax_cases

ROWS = [row for row, made in (rows.JAX | rows.KERAS).items() if row.startswith("keras") and not made.needs_gpu]
BY_DEFAULT = ("keras_torch", "fp32")  # keras_jax: test_keras_backends.py


@pytest.mark.parametrize(
    ("row", "precision"),
    [
        pytest.param(*case, marks=[pytest.mark.slow] * (case != BY_DEFAULT))
        for case in itertools.product(ROWS, ("fp32", "fp16", "bf16"))
    ],
)
def test_row_passes_its_proof(row, precision):
    pytest.importorskip(rows.LANGUAGE_MODEL[row].framework)
    found = jax_cases.proofs_of(row, "cpu", precision)
    behaviour = found.pop("behaviour")
    assert set(found) == {"stacked_lm train", "stacked_lm forward", "stacked_lm stack", "ptb train"}
    for case, record in found.items():
        assert record["ok"], f"{case}: {record['reason']}"
    assert not behaviour["tensorflow"]
    assert behaviour["dropout_changes_the_loss_by"] > 1e-4
    assert behaviour["places_that_share_masks"] == 0
    assert behaviour["an_epoch_moves_the_weights"] and behaviour["rate_0_leaves_the_weights"]
    assert all(6 < loss < 8 for loss in behaviour["losses"])  # of 1000 words, untrained: ln 1000 is 6.9


def test_another_backend_than_the_rows_is_refused(monkeypatch):
    """This process has Keras on TensorFlow."""
    import keras

    assert keras.backend.backend() == "tensorflow"
    monkeypatch.setenv("KERAS_BACKEND", "tensorflow")  # put back after the test
    with pytest.raises(RuntimeError, match="Keras runs on tensorflow in this process, expected jax"):
        rows.LANGUAGE_MODEL["keras_jax"].build(*cases.language_model_start(), ("SGD", 1.0), precision="fp32")
