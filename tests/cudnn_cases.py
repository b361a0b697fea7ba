"""Small stacks of models/cudnn/rnn.py with the same arguments whatever runs them, their outputs and all their gradients."""

from collections.abc import Mapping

import numpy as np
import tensorflow as tf

from models.cudnn.rnn import CudnnGRU, CudnnLSTM, CudnnRNNRelu, CudnnRNNTanh

CLASSES = {"lstm": CudnnLSTM, "gru": CudnnGRU, "rnn_tanh": CudnnRNNTanh, "rnn_relu": CudnnRNNRelu}
DIRECTIONS = ("unidirectional", "bidirectional")
TIME, BATCH, UNITS, INPUT = 6, 4, 5, 3
LENGTHS = (3, 6, 1, 5)  # one of them full


def model(mode: str, num_layers: int = 2, skip: bool = False, **kwargs):
    """A small stack; with `skip` in skip_input mode."""
    if skip:
        kwargs["input_mode"] = "skip_input"
    return CLASSES[mode](num_layers, UNITS, UNITS if skip else INPUT, **kwargs)


def states_of(model) -> tuple[str, ...]:
    return ("input_h", "input_c") if model.rnn_mode == "lstm" else ("input_h",)


def arguments(model, seed: int = 0, time: int = TIME, batch: int = BATCH) -> dict[str, np.ndarray]:
    """input_data, the states and params; the same numbers in every dtype, but for rounding."""
    rng = np.random.default_rng(seed)
    state = (model.spec.num_pseudo_layers, batch, model.num_units)
    values = {"input_data": rng.normal(size=(time, batch, model.input_size))}
    values |= {name: rng.uniform(-1, 1, state) for name in states_of(model)}
    values["params"] = rng.uniform(-0.5, 0.5, model.params_size())
    return {name: value.astype(model.dtype.as_numpy_dtype) for name, value in values.items()}


def run(model, given: Mapping[str, np.ndarray], sequence_lengths=None, is_training: bool = True):
    """Outputs, and the gradients of a random weighting of all outputs by all arguments; NumPy, under their names."""
    tensors = {name: tf.constant(value) for name, value in given.items()}
    with tf.GradientTape() as tape:
        tape.watch(tensors)
        results = model(**tensors, is_training=is_training, sequence_lengths=sequence_lengths)
        weighted = [tf.reduce_sum(r * w) for r, w in zip(results, upstream(results), strict=True)]
        loss = tf.add_n(weighted)
    gradients = tape.gradient(loss, tensors)
    outputs = dict(zip(("output", "output_h", "output_c"), results, strict=False))
    return {n: t.numpy() for n, t in outputs.items()}, {n: t.numpy() for n, t in gradients.items()}


def upstream(results, seed: int = 1) -> list[np.ndarray]:
    """Random weights for each result, in its dtype."""
    rng = np.random.default_rng(seed)
    return [rng.normal(size=tuple(r.shape)).astype(r.dtype.as_numpy_dtype) for r in results]


def dropout_of_positive_inputs(
    rate: float, seed: int = 0, is_training: bool = True, **kwargs
) -> tuple[np.ndarray, np.ndarray]:
    """What dropout makes of 64,000 numbers from 1 to 2: (the numbers, those after it).

    Two layers of relu with identity matrices, no recurrence and no bias pass positive numbers on as they are, so the
    output is the dropout's.
    """
    units = 64
    stack = CudnnRNNRelu(2, units, units, dropout=rate, seed=seed, **kwargs)
    weights, biases = stack.params_to_canonical(np.zeros(stack.params_size(), stack.dtype.as_numpy_dtype))
    weights = [tf.eye(units, dtype=stack.dtype) if k % 2 == 0 else w for k, w in enumerate(weights)]
    inputs = np.random.default_rng(2).uniform(1, 2, (20, 50, units)).astype(stack.dtype.as_numpy_dtype)
    states = np.zeros((2, 50, units), stack.dtype.as_numpy_dtype)
    output, _ = stack(inputs, states, stack.canonical_to_params(weights, biases), is_training=is_training)
    return inputs, output.numpy()
