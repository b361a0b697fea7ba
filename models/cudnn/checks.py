"""What the classes of models/cudnn/rnn.py ask of their arguments.

What is known when the call is made is a ValueError in one line: the argument, what was given, what is allowed. What only a
running graph knows is checked there, before anything is computed from it (tf.errors.InvalidArgumentError): cuDNN itself looks at
no size, and would read past the end of a params vector that is too short.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from models.wavefront.checks import FLOATS, boolean, choice, dtype, integer, probability, tensor

__all__ = [
    "FLOATS", "Lengths", "boolean", "choice", "dtype", "integer", "not_empty", "probability", "same_batch",
    "sequence_lengths", "tensor",
]  # fmt: skip


class Lengths(NamedTuple):
    """Sequence lengths where they are read: cuDNN reads them on the host, what masks the padding on the device.

    Given as one tensor, one of the two is copied at every call, and the device waits; staged as Lengths, none is.
    """

    on_host: tf.Tensor  # int32 [batch]: TensorFlow keeps int32 on the host
    on_device: tf.Tensor  # int64 [batch]


INTEGERS = (tf.int32, tf.int64)


def same_batch(tensors: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    """The tensors [time or layers, batch, …] with one batch size, which all know where one of them does."""
    known = {name: t.shape[1] for name, t in tensors.items() if t.shape[1] is not None}
    (first, reference), *others = tensors.items()
    for name, size in known.items():
        source, expected = next(iter(known.items()))
        if size != expected:
            raise ValueError(f"{name}: a batch of {size} given, expected {expected}, the batch of {source}")
    if known:
        batch = next(iter(known.values()))
        return {name: _with_batch(t, batch) for name, t in tensors.items()}
    checked = {first: reference}
    for name, t in others:
        message = f"{name}: another batch given than {first} has"
        checked[name] = _checked(tf.debugging.assert_equal, tf.shape(t)[1], tf.shape(reference)[1], message, value=t)
    return checked


def not_empty(name: str, value: tf.Tensor) -> tf.Tensor:
    """`value`, none of whose axes is 0 long."""
    if 0 in value.shape:
        raise ValueError(f"{name}: {list(value.shape)} given, expected at least one step and one sequence")
    if value.shape.is_fully_defined():
        return value
    message = f"{name}: empty, expected a step and a sequence"
    return _checked(tf.debugging.assert_positive, tf.shape(value), message, value=value)


def sequence_lengths(value: Any, inputs: tf.Tensor) -> Lengths:
    """`value`, integers [batch] from 0 to the steps of inputs [time, batch, …], or Lengths of them."""
    name = "sequence_lengths"
    batch = inputs.shape[1]
    given = value.on_host if isinstance(value, Lengths) else value
    lengths = tensor(name, given, ["batch" if batch is None else batch], tf.int32, INTEGERS)
    static, steps = tf.get_static_value(lengths), inputs.shape[0]
    allowed = f"0 to {'the steps of input_data' if steps is None else f'{steps}, the steps of input_data'}"
    if static is not None and steps is not None:
        wrong = np.flatnonzero((static < 0) | (static > steps))
        if wrong.size:
            raise ValueError(f"{name}[{wrong[0]}]: {static[wrong[0]]} given, expected {allowed}")
    else:
        steps, message = tf.cast(tf.shape(inputs)[0], lengths.dtype), f"{name}: expected {allowed}"
        lengths = _checked(tf.debugging.assert_non_negative, lengths, message, value=lengths)
        lengths = _checked(tf.debugging.assert_less_equal, lengths, steps, message, value=lengths)
    if batch is None:
        message = f"{name}: another batch given than input_data has"
        sizes = tf.shape(lengths)[0], tf.shape(inputs)[1]
        lengths = _checked(tf.debugging.assert_equal, *sizes, message, value=lengths)
    device = value.on_device if isinstance(value, Lengths) else tf.cast(lengths, tf.int64)
    return Lengths(tf.cast(lengths, tf.int32), device)


def _with_batch(value: tf.Tensor, batch: int) -> tf.Tensor:
    if value.shape[1] is not None:
        return value
    return tf.ensure_shape(value, [value.shape[0], batch, *value.shape[2:]])


def _checked(assertion: Callable, *arguments: Any, value: tf.Tensor) -> tf.Tensor:
    """`value`, to be read only once the assertion has held.

    Sizes and lengths are on the host, and so is the assertion: left to TensorFlow, part of it would run on the GPU, and the
    host would wait for that.
    """
    with tf.device("CPU:0"):
        held = assertion(*arguments)
    if held is None:  # it holds already
        return value
    with tf.control_dependencies([held]):
        return tf.identity(value)
