"""What builds the Keras rows: it chooses Keras' backend, so it imports Keras only when it is called."""

import os
from collections.abc import Mapping, Sequence

import numpy as np


def language_model(
    weights: Mapping[str, np.ndarray],
    states: Sequence,
    batches: Sequence,
    optimizer: tuple[str, float],
    *,
    backend: str,
    precision: str,
    device: str = "",
    **options,
):
    """The models.keras.language_model.KerasLanguageModel of a row.

    Args:
        weights, states, batches, optimizer, options: of KerasLanguageModel.
        backend: "jax" or "torch".
        precision: "fp32", "tf32", "fp16", "bf16" or "fp64".
        device: Keras finds it by itself.
    """
    _import_keras(backend)
    from models.keras import language_model as models

    dtype = {"fp16": "float16", "bf16": "bfloat16", "fp64": "float64"}.get(precision, "float32")
    kinds = {"jax": models.JaxKerasLanguageModel, "torch": models.TorchKerasLanguageModel}
    return kinds[backend](weights, states, batches, optimizer, dtype=dtype, **options)


def classifier(
    weights: Mapping[str, np.ndarray],
    inputs: np.ndarray,
    labels: np.ndarray,
    batch_size: int,
    optimizer: tuple[str, float, float],
    *,
    backend: str,
    precision: str = "fp32",
    device: str = "",
    capacity: int | None = None,
    seed: int = 0,
    **options,
):
    """The models.keras.classifier.ClassifierTrial of a row.

    Args:
        weights: canonical weights of a classifier (models.weights.canonical.classifier_shapes), whose sizes are the model's.
        inputs, labels: of the proof, [batches · batch_size, time, features] and [batches · batch_size] NumPy arrays.
        optimizer: ("Adam", learning rate, decay): the rate at step t is learning rate / (1 + decay · t).
        backend: "tensorflow", "jax" or "torch".
        precision, options: of models.keras.classifier.build_classifier.
        device: Keras finds it by itself.
        capacity: of the trials that keep their data set on the device; not used here.
        seed: of the dropout masks and, but for TensorFlow, of the order of the sequences.
    """
    keras = _import_keras(backend)
    from models.keras.classifier import ClassifierTrial, build_classifier
    from models.weights.canonical import stack_size

    keras.utils.set_random_seed(seed)
    if backend == "tensorflow":
        import tensorflow as tf

        # With a seed of its own, tf.data starts the generator of Keras' shuffling anew for every epoch: one order for all.
        tf.random.set_seed(None)
    _, rate, decay = optimizer
    schedule = keras.optimizers.schedules.InverseTimeDecay(rate, 1, decay) if decay else rate
    layers, bidirectional = stack_size(weights)
    biases = [array for name, array in weights.items() if name.startswith("dense_") and name.endswith("bias")]
    *dense, classes = map(len, biases)
    model = build_classifier(
        inputs.shape[1:], len(weights["lstm_0/forward/recurrent_kernel"]), layers, classes, dense_units=dense,
        bidirectional=bidirectional, precision=precision, optimizer=keras.optimizers.Adam(schedule), seed=seed, **options,
    )  # fmt: skip
    return ClassifierTrial(model, weights, inputs, labels, batch_size)


def _import_keras(backend: str):
    """Keras on that backend; RuntimeError where it was imported on another one."""
    os.environ["KERAS_BACKEND"] = backend
    import keras

    if keras.backend.backend() != backend:
        raise RuntimeError(f"Keras runs on {keras.backend.backend()} in this process, expected {backend}")
    return keras
