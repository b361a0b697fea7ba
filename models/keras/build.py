"""What builds the Keras rows: it chooses Keras' backend, so it imports Keras only when it is called."""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

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
    replicas: int = 1,
    **options,
):
    """The models.keras.language_model.KerasLanguageModel of a row.

    Args:
        weights, states, batches, optimizer, options: of KerasLanguageModel; with `replicas`, of DataParallelModel.
        backend: "jax" or "torch".
        precision: "fp32", "tf32", "fp16", "bf16" or "fp64".
        device: Keras finds it by itself.
        replicas: over how many devices of this process it trains; more than one on JAX alone (models/keras/replicas.py).
    """
    _import_keras(backend)
    from models.keras import language_model as models

    dtype = {"fp16": "float16", "bf16": "bfloat16", "fp64": "float64"}.get(precision, "float32")
    if replicas > 1:
        from models.keras.replicas import DataParallelModel

        return DataParallelModel(weights, states, batches, optimizer, dtype=dtype, replicas=replicas, **options)
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
    scan: int = 0,
    keras_folder: str = "",
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
        capacity: sequences of the training to be timed; used with `scan` alone.
        seed: of the dropout masks and, but for TensorFlow, of the order of the sequences.
        scan: on JAX, the most steps of one call, a lax.scan: the trial is a ScannedTrial. 0: a step each.
        keras_folder: in this environment, of a Keras to import instead of the installed one.
    """
    keras = _import_keras(backend, keras_folder)
    from models.keras.classifier import ClassifierTrial, ScannedTrial, build_classifier
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
    if scan:
        batches = (capacity or len(inputs)) // batch_size
        return ScannedTrial(model, weights, inputs, labels, batch_size, batches, scan)
    return ClassifierTrial(model, weights, inputs, labels, batch_size)


def _import_keras(backend: str, folder: str = ""):
    """Keras on that backend, from a folder of this environment where one is named.

    RuntimeError where it was imported on another backend, or from elsewhere.
    """
    os.environ["KERAS_BACKEND"] = backend
    if folder:
        sys.path.insert(0, str(Path(sys.prefix, folder)))
    import keras

    if folder and not Path(keras.__file__).is_relative_to(Path(sys.prefix, folder)):
        raise RuntimeError(f"Keras was imported from {Path(keras.__file__).parent}, expected that of {folder}")
    if keras.backend.backend() != backend:
        raise RuntimeError(f"Keras runs on {keras.backend.backend()} in this process, expected {backend}")
    return keras
