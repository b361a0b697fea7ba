"""Checks of arguments. A wrong one is a ValueError in one line: the argument, what was given, what is allowed."""

import numbers
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

FLOATS = (tf.float16, tf.float32, tf.float64)


def choice(name: str, value: Any, allowed: Sequence[str]) -> None:
    """`value` is one of `allowed`."""
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name}: {value!r} given, expected one of {', '.join(map(repr, allowed))}")


def integer(name: str, value: Any, low: int, high: int) -> int:
    """`value` as an int from `low` to `high`."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or not low <= value <= high:
        raise ValueError(f"{name}: {value!r} given, expected an integer from {low} to {high}")
    return int(value)


def probability(name: str, value: Any, why_not_1: str = "") -> float:
    """`value` as a float from 0 to 1, or below 1 where there is a reason."""
    expected = f"a number from 0 to {'below 1' if why_not_1 else '1'}"
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0 <= value <= 1:
        raise ValueError(f"{name}: {value!r} given, expected {expected}")
    if why_not_1 and value == 1:
        raise ValueError(f"{name}: {value!r} given, expected {expected}: {why_not_1}")
    return float(value)


def boolean(name: str, value: Any) -> bool:
    """`value` as a bool; a tensor is refused, since it would have to choose the op."""
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"{name}: {value!r} given, expected True or False")
    return bool(value)


def dtype(name: str, value: Any, allowed: Sequence[tf.DType] = FLOATS) -> tf.DType:
    """`value` (a tf.DType, its name or NumPy's) as one of the tf.DTypes `allowed`."""
    try:
        given = tf.as_dtype(value)
    except TypeError:
        given = None
    if given not in allowed:
        expected = " or ".join(d.name for d in allowed)
        raise ValueError(f"{name}: {given.name if given else repr(value)} given, expected {expected}")
    return given


def tensor(
    name: str,
    value: Any,
    axes: Sequence[int | str],
    default: tf.DType,
    allowed: Sequence[tf.DType] = FLOATS,
    note: str = "",
) -> tf.Tensor:
    """`value` as a tensor of these axes: sizes, and names where any size will do.

    Lists of Python numbers become `default`; what has a dtype keeps it, which must be one of `allowed`.
    """
    expected = f"[{', '.join(map(str, axes))}]{note and f' ({note})'}"
    given = getattr(value, "dtype", None)
    wanted = default if given is None else dtype(name, given, allowed)
    try:
        converted = tf.convert_to_tensor(value, wanted)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{name}: a {type(value).__name__} given, expected a {wanted.name} tensor {expected}"
        ) from error
    shape = [axis if isinstance(axis, int) else None for axis in axes]
    if not converted.shape.is_compatible_with(shape):
        raise ValueError(f"{name}: {list(converted.shape)} given, expected {expected}")
    if converted.shape.is_fully_defined():
        return converted
    return tf.ensure_shape(converted, shape, name=name if name.isidentifier() else None)
