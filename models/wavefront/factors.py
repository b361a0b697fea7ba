"""What the kernels multiply in float32's place, and the products around them that share it.

Factors of float16 times powers of two, or pairs of them (halves.py): of weights and h, of what stays for the weights' gradients,
of the lowest layer's inputs and of their kernel.
"""

from collections.abc import Sequence

import tensorflow as tf

from . import halves
from .products import layer_gates, of_factors, padded_gates, rows_of, with_zeros
from .work import Work

Factors = list[tf.Tensor]  # of float16: one, or a pair


def of_weights(work: Work, weights: tf.Tensor, scale: tf.Tensor) -> tf.Tensor:
    """weights [lanes, rows, k] times a lane's scale, in float16; pairs as [lanes, rows, 2·k], see `put` in kernels/lstm.cuh."""
    weights *= scale[:, tf.newaxis, tf.newaxis]
    if not work.pairs:
        return tf.cast(weights, tf.float16)
    lanes, rows, k = weights.shape
    pairs = tf.stack([tf.reshape(x, [lanes, rows, k // 4, 4]) for x in halves.pair(weights)], -2)
    return tf.reshape(pairs, [lanes, rows, 2 * k])


def sizes(recurrent: tf.Tensor, links: tf.Tensor, shift: Sequence[int]) -> tuple[tf.Tensor, tf.Tensor]:
    """[lanes]: the largest number of what a lane's kernel multiplies; and the largest sum of a unit's, of all lanes.

    shift: lanes before and behind that have no link.
    """
    largest, sums = halves.largest(recurrent, -1), halves.total(recurrent, -1)
    if links.shape[0]:
        largest = tf.maximum(largest, tf.pad(halves.largest(links, -1), [shift, [0, 0]]))
        sums += tf.pad(halves.total(links, -1), [shift, [0, 0]])
    return tf.reduce_max(largest, 1), tf.reduce_max(sums)


def bounds(sums: tf.Tensor, time: int, c, undone, d_outputs, d_h_end, d_c_end) -> tf.Tensor:
    """[4 + lanes + time], by which the backward kernel bounds a step's gradients by the gates' sums from the last step's. M is
    the largest of these and of those by c after it:

        by h at most   d_outputs of the step + d_h_end + sums · M
        by c           max(M, d_c_end) + that
        by a gate's    as by c, or a quarter of that times c before: c0 and one a step at most

    d_h_end and d_c_end where they come in. undone: [lanes] of the weights' powers of two, for what the bounds scale.
    """
    of_c = tf.maximum(1.0, (halves.largest(c) + time) / 4)
    of_all = tf.stack([halves.largest(d_h_end), sums, halves.largest(d_c_end), of_c])
    return tf.concat([of_all, undone, halves.largest(d_outputs, [0, 2, 3])], 0)


def powers_of_h(h: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """halves.powers of all h that come from this one: those of a step are 1 at most."""
    return halves.powers(tf.maximum(1.0, halves.largest(h)))


def projected(work: Work, x, kernel) -> tuple[tf.Tensor, tf.Tensor]:
    """[directions, time, batch, 4·units]: x times the kernel; and what undoes a row's power of two, [directions, time, batch]."""
    of_kernel, undone = _of_kernel(work, kernel)
    x = with_zeros(x, -1, -x.shape[-1] % 8) * undone[:, tf.newaxis, tf.newaxis]
    scale, row_undone = halves.powers(halves.largest(x, -1))
    of_x = halves.as_float16(x * scale[..., tf.newaxis], work.pairs)
    found = of_factors([rows_of(factor) for factor in of_x], of_kernel, -1, -2)
    return tf.reshape(found, [*x.shape[:-1], 4 * work.units]), row_undone


def _of_kernel(work: Work, kernel) -> tuple[Factors, tf.Tensor]:
    """Factors [directions, features, 4·units] of it, with features up to whole 16 bytes, each with a power of two of its own; and
    what undoes those, [directions, features]."""
    kernel = padded_gates(with_zeros(kernel, -2, -kernel.shape[-2] % 8), work.units)
    scale, undone = halves.powers(halves.largest(kernel, -1))
    return halves.as_float16(kernel * scale[..., tf.newaxis], work.pairs), undone


def kept(work: Work, *shape: int) -> tf.TensorSpec:
    """What a kernel leaves for the weights' gradients: h, or gradients by the gates' sums.

    Pairs lie as `put` in kernels/lstm.cuh has them.
    """
    if not work.keeps_factors:
        return tf.TensorSpec(shape, {1: tf.float16, 2: tf.bfloat16}.get(work.dtype_code, tf.float32))
    return tf.TensorSpec([*shape[:-1], shape[-1] * (1 + work.pairs)], tf.float16)


def of_kept(work: Work, x: tf.Tensor) -> Factors:
    """The factors of float16 in it: one, or a pair."""
    if not work.pairs:
        return [x]
    fours = tf.reshape(x, [*x.shape[:-1], x.shape[-1] // 8, 2, 4])
    return [tf.reshape(part, [*x.shape[:-1], x.shape[-1] // 2]) for part in tf.unstack(fours, axis=-2)]


def gradients(
    work: Work,
    x,
    kernel,
    layer_units: int,
    first: Factors,
    rest: Factors,
    d_first: Factors,
    d_rest: Factors | None = None,
    *,
    d_undone,
    h_undone,
) -> tuple[tf.Tensor, ...]:
    """Gradients by (x, kernel, recurrent, links), of the gradients by the gates' sums as factors of float16.

    Each of their rows, a sequence at a step, has a power of two of its own. That of a sum over rows goes to the other factor.

    Args:
        first, rest, h_undone: [directions, time, batch, units], [lanes - 1, time, batch, 2·units] and a scalar: h.
        d_first, d_rest, d_undone: [directions, …, 4·units], [lanes - 1, …, 4·units] or None, and [lanes, time, batch].
    """
    features, units, lowest = x.shape[-1], work.units, x.shape[0]
    most = tf.reduce_max(d_undone, [1, 2], keepdims=True)
    # The inverse of a power of two, exactly.
    inverse = tf.bitcast((254 << 23) - tf.bitcast(most, tf.int32), tf.float32)
    relative = (d_undone * inverse)[..., tf.newaxis]

    def over_steps(factors: Factors, of_lanes: slice, gradients: Factors) -> tf.Tensor:
        """[lanes, u, 4·layer_units] without the factors' own power of two."""
        found = of_factors([rows_of(x) for x in factors], [rows_of(x) for x in gradients], -2, -2)
        return layer_gates(most[of_lanes] * found, layer_units)

    def of_h(factors: Factors, of_lanes: slice) -> Factors:
        return [tf.cast(tf.cast(factor, tf.float32) * relative[of_lanes], tf.float16) for factor in factors]

    # Each feature of x and of the kernel has a power of its own. What of x meets no gradient, past a sequence's end, is as
    # good as 0.
    x = with_zeros(x, -1, -features % 8) * relative[:lowest]  # to whole 16 bytes
    x_scale, x_undone = halves.powers(halves.largest(x, [1, 2]))
    of_x = halves.as_float16(x * x_scale[:, tf.newaxis, tf.newaxis], work.pairs)
    of_first = of_h(first, slice(0, lowest))
    d_both = over_steps([tf.concat(both, -1) for both in zip(of_x, of_first, strict=True)], slice(0, lowest), d_first)
    d_kernel = d_both[:, :features] * x_undone[:, :features, tf.newaxis]
    d_recurrent = d_both[:, -units:][:, :layer_units] * h_undone
    of_kernel, undone = _of_kernel(work, kernel)
    d_x = of_factors([rows_of(factor) for factor in d_first], of_kernel, -1, -1) * undone[:, tf.newaxis]
    d_x = tf.reshape(d_x[..., :features], [*x.shape[:-1], features]) * d_undone[:lowest, ..., tf.newaxis]
    d_links = tf.zeros([0, layer_units, 4 * layer_units])
    if d_rest:
        d_both = over_steps(of_h(rest, slice(lowest, None)), slice(lowest, None), d_rest) * h_undone
        d_recurrent = tf.concat([d_recurrent, d_both[:, :layer_units]], 0)
        d_links = d_both[:, units : units + layer_units]
    return d_x, d_kernel, d_recurrent, d_links
