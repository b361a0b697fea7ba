"""Factors of float16 times a power of two, in the place of float32's in products by TensorFloat-32.

Both have the same bits of a number, float16 in half the bytes and at twice the rate. It lacks float32's range: with an array's
power of two a number keeps all its bits down to 2^-28 of the array's largest one and is 0 below 2^-39 of it. Infinities and NaN
stay what they are. Where one power is that of several sequences, as of a step's gradients, one whose numbers are a million times
as large costs the others bits.

Pairs of such are in the place of float32's where TensorFloat-32 is off: 23 bits of a number down to 2^-28 of the largest one, 11
of one that is 2^-40 of it.
"""

from collections.abc import Sequence

import tensorflow as tf

RANGE = 2.0**15  # below float16's 65504 by a factor of two
TRAILING = 2.0**11  # of the second of a pair, which is as large as the first then


def factors(x: tf.Tensor, in_pairs: bool) -> tuple[list[tf.Tensor], tf.Tensor]:
    """x of float32 as `as_float16` has it, times a power of two, and what undoes that, a scalar."""
    scale, undone = powers(largest(x))
    return as_float16(x * scale, in_pairs), undone


def as_float16(x: tf.Tensor, in_pairs: bool) -> list[tf.Tensor]:
    """x of float32, below RANGE, as one of float16 or as a pair of them."""
    return pair(x) if in_pairs else [tf.cast(x, tf.float16)]


def pair(x: tf.Tensor) -> list[tf.Tensor]:
    """Two of float16 whose sum is x of float32, below RANGE, when the second is divided by TRAILING. What is not finite is itself
    and 0.
    """
    # As float16 has it, in steps of 2^-24 below its least power of two; XLA takes a cast there and back for nothing.
    leading = tf.where(tf.abs(x) < 2.0**-14, tf.round(x * 2.0**24) * 2.0**-24, nearest(x))
    finite = tf.math.is_finite(x)
    parts = tf.where(finite, leading, x), tf.where(finite, (x - leading) * TRAILING, 0.0)
    return [tf.cast(part, tf.float16) for part in parts]


def nearest(x: tf.Tensor) -> tf.Tensor:
    """x of float32 to as many bits as float16 and TensorFloat-32 have; of NaN anything."""
    return tf.bitcast(tf.bitwise.bitwise_and(tf.bitcast(x, tf.int32) + 0x1000, ~0x1FFF), tf.float32)


def powers(most: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """The power of two that brings a number to RANGE / 2 or more, below RANGE (from 2^-60 on); and its inverse."""
    exponent = tf.clip_by_value(tf.bitwise.right_shift(tf.bitcast(most, tf.int32), 23), 67, 254)
    scale, undone = (tf.bitwise.left_shift(x, 23) for x in (268 - exponent, exponent - 14))
    return tf.bitcast(scale, tf.float32), tf.bitcast(undone, tf.float32)


def largest(x: tf.Tensor, axis: int | Sequence[int] | None = None) -> tf.Tensor:
    """Of finite numbers, without their sign."""
    return tf.reduce_max(_sizes(x), axis)


def total(x: tf.Tensor, axis: int) -> tf.Tensor:
    """Likewise."""
    return tf.reduce_sum(_sizes(x), axis)


def _sizes(x: tf.Tensor) -> tf.Tensor:
    return tf.where(tf.math.is_finite(x), tf.abs(x), 0.0)
