"""Matrix products outside of the kernels, for XLA on a GPU, whose own choice is slower.

- It searches: for a product of float32 by TensorFloat-32 it compiles dozens of Triton kernels and times them against cuBLAS'. In
  the first call of a training step that was half to three quarters of the time, and steps were no faster. An operand precision
  other than the default keeps it to cuBLAS, and "high" is TensorFloat-32 still. Small products are left to it, see SMALL.
- The weights' gradients are sums over rows of both operands, which tensor cores cannot read in that order as TensorFloat-32:
  cuBLAS transposes them inside its kernel, slowly. To transpose the smaller one before, in memory, is enough and costs less.
- Arrays of float32 whose last axis is not made of whole 16 bytes, such as 650 numbers, get slow kernels, also as a result. They
  are padded with zeros.
- Where TensorFloat-32 is off, it runs float32 without the tensor cores. In `product` each number is the sum of three of
  bfloat16, which together hold all of its 24 bits, and a product is the sum of the six products of parts that matter to float32.
  Tensor cores truncate when they accumulate, so the leading one of the six, of which the others are a hundredth, is accumulated
  in pieces. As with the kernels, which make one product three of TensorFloat-32 or of float16, a number that is not finite makes
  the sums that it is in NaN.

docs/wavefront-kernels.md has the times and the errors.
"""

import math
from collections.abc import Sequence

import tensorflow as tf

from . import halves, nvrtc, tracing, work

# Floating-point operations; 2.5 times as many where a sum over rows has few tiles of 64 x 64 as its result. With all products by
# cuBLAS a training step of 2 layers of 128 units took an eighth longer, one of 200 units no longer: docs/wavefront-kernels.md.
SMALL = 1e8
FEW_TILES = 32
# From so many floating-point operations on, and columns of the larger operand, a sum over rows has its smaller one transposed.
TRANSPOSED = 4e9
TRANSPOSED_COLUMNS = 2000
LONGEST = 1280  # of an inner axis that tensor cores accumulate precisely enough in one piece
AT_ONCE = 8  # pieces whose sums are in memory at the same time


@tf.autograph.experimental.do_not_convert
def product(a: tf.Tensor, b: tf.Tensor, transpose_a: bool = False, transpose_b: bool = False) -> tf.Tensor:
    """a · b of one dtype, as tf.matmul(a, b, transpose_a, transpose_b).

    Args:
        a: [..., rows, inner], or with transpose_a [..., inner, rows].
        b: [..., inner, columns], or with transpose_b [..., columns, inner], with as many axes as a; two or three.
    """
    of_a, of_b = -2 if transpose_a else -1, -1 if transpose_b else -2
    if not _by_cublas(a, b, of_a, of_b):
        return tf.matmul(a, b, transpose_a, transpose_b)
    inner, rows, columns = a.shape[of_a], a.shape[-3 - of_a], b.shape[-3 - of_b]
    whole = 4 if tf32() else 8  # numbers of 16 bytes, of bfloat16 where there are parts
    if -1 in (of_a, of_b):
        a, b = with_zeros(a, of_a, -inner % whole), with_zeros(b, of_b, -inner % whole)
    if of_a == -2:
        a = with_zeros(a, -1, -rows % whole)
    b = with_zeros(b, -3 - of_b, -columns % whole)  # which are the result's last axis
    return _contracted(a, b, of_a, of_b)[..., :rows, :columns]


@tf.autograph.experimental.do_not_convert
def over_rows(xs: Sequence[tf.Tensor], y: tf.Tensor) -> list[tf.Tensor]:
    """[..., features, columns] of each x [..., rows, features] with y [..., rows, columns], summed over the rows.

    The xs are side by side in one product where that is transposed: transposing writes them once more anyway.
    """
    if len(xs) > 1 and tf32():
        together = tf.concat(xs, -1)
        if _by_cublas(together, y, -2, -2) and _transposes(together, y, -2, -2):
            return tf.split(product(together, y, transpose_a=True), [x.shape[-1] for x in xs], -2)
    return [product(x, y, transpose_a=True) for x in xs]


def _by_cublas(a: tf.Tensor, b: tf.Tensor, of_a: int, of_b: int) -> bool:
    """Whether the sum over these axes is not left to XLA."""
    known = a.shape.is_fully_defined() and b.shape.is_fully_defined()
    if a.dtype != tf.float32 or not known or _small(a, b, of_a, of_b) or not tracing.compiled_for("GPU"):
        return False
    return not tracing.in_forward_mode(a, b) and (tf32() or in_parts())


def in_parts() -> bool:
    """Whether products of float32 are sums of products of bfloat16: without TensorFloat-32, on a GPU that is fast with those."""
    if tf32() or not tracing.on("GPU"):
        return False
    try:
        return nvrtc.chip().capability >= 80
    except (ValueError, OSError):  # a GPU that is not NVIDIA's
        return False


def notes(dtype: str) -> list[str]:
    """For whoever reports times: that products of this dtype are in parts, where they are."""
    told = dtype == "float32" and in_parts()
    return ["products of float32 are sums of products of their parts, on tensor cores"] if told else []


def tf32() -> bool:
    """Whether products of float32 are by TensorFloat-32."""
    return tf.config.experimental.tensor_float_32_execution_enabled()


def _contracted(a: tf.Tensor, b: tf.Tensor, of_a: int, of_b: int) -> tf.Tensor:
    """The sum over axis `of_a` of a and `of_b` of b, each -1 or -2: [..., the other axis of a, the other axis of b]."""
    if tracing.vectorized() or _small(a, b, of_a, of_b):  # as a gradient may be
        return tf.matmul(a, b, transpose_a=of_a == -2, transpose_b=of_b == -1)
    free_a, free_b = -3 - of_a, -3 - of_b

    @tf.custom_gradient
    def run(a, b):
        def gradient(upstream):
            upstream = tf.ensure_shape(upstream, [*a.shape[:-2], a.shape[free_a], b.shape[free_b]])
            x, y = tf.identity(a), tf.identity(b)  # in the graph of this gradient, where a gradient of it finds them
            by_a = (upstream, y, -1, free_b) if of_a == -1 else (y, upstream, free_b, -1)
            by_b = (x, upstream, free_a, -2) if of_b == -2 else (upstream, x, -2, free_a)
            return _contracted(*by_a), _contracted(*by_b)

        return (_by_tf32 if tf32() else _by_parts)(a, b, of_a, of_b), gradient

    return run(a, b)


def _small(a: tf.Tensor, b: tf.Tensor, of_a: int, of_b: int) -> bool:
    """Whether XLA's own kernels are the better ones."""
    rows, columns = a.shape[-3 - of_a], b.shape[-3 - of_b]
    batch = math.prod(a.shape[:-2])
    tiles = batch * work.parts(rows, 64) * work.parts(columns, 64)
    few = of_a == of_b == -2 and tiles <= FEW_TILES
    return 2 * batch * rows * a.shape[of_a] * columns < SMALL * (2.5 if few else 1)


def _by_tf32(a: tf.Tensor, b: tf.Tensor, of_a: int, of_b: int) -> tf.Tensor:
    """`_contracted` by TensorFloat-32."""
    if not _transposes(a, b, of_a, of_b):
        return dot(a, b, of_a, of_b)
    if a.shape[-1] <= b.shape[-1]:
        return dot(_transposed(a), b, -1, of_b)
    return dot(a, _transposed(b), of_a, -1)


def _transposes(a: tf.Tensor, b: tf.Tensor, of_a: int, of_b: int) -> bool:
    """Whether the operand with fewer columns is transposed. Its rows are then `inner` long, and have to be whole 16 bytes."""
    if of_a != -2 or of_b != -2 or a.shape[-2] % 4 or max(a.shape[-1], b.shape[-1]) < TRANSPOSED_COLUMNS:
        return False
    return 2 * a.shape.num_elements() * b.shape[-1] >= TRANSPOSED


def _transposed(x: tf.Tensor) -> tf.Tensor:
    """x with its last two axes exchanged, in memory too: XLA would take the array as it is for the transposed one, and leave the
    transposing to the product, if it did not have to make one axis of it, of which there is one order."""
    from tensorflow.compiler.tf2xla.python import xla

    transposed = tf.linalg.matrix_transpose(x)
    (flat,) = xla.optimization_barrier(tf.reshape(transposed, [-1]))
    return tf.reshape(flat, transposed.shape)


def padded_gates(x: tf.Tensor, units: int) -> tf.Tensor:
    """x [..., 4·layer_units] with zeros after each gate: [..., 4·units]."""
    layer_units = x.shape[-1] // 4
    if layer_units == units:
        return x
    gates = tf.reshape(x, [*x.shape[:-1], 4, layer_units])
    gates = tf.pad(gates, [[0, 0]] * (gates.shape.rank - 1) + [[0, units - layer_units]])
    return tf.reshape(gates, [*x.shape[:-1], 4 * units])


def layer_gates(x: tf.Tensor, layer_units: int) -> tf.Tensor:
    """x [..., 4·units] without what `padded_gates` adds."""
    units = x.shape[-1] // 4
    if layer_units == units:
        return x
    gates = tf.reshape(x, [*x.shape[:-1], 4, units])[..., :layer_units]
    return tf.reshape(gates, [*x.shape[:-1], 4 * layer_units])


def rows_of(x: tf.Tensor) -> tf.Tensor:
    """x [lanes, time, batch, u] as [lanes, time · batch, u]."""
    lanes, time, batch, size = x.shape
    return tf.reshape(x, [lanes, time * batch, size])


def with_zeros(x: tf.Tensor, axis: int, more: int) -> tf.Tensor:
    """x with so many zeros after its axis -1 or -2."""
    if not more:
        return x
    paddings = [[0, 0]] * x.shape.rank
    paddings[axis] = [0, more]
    return tf.pad(x, paddings)


def _by_parts(a: tf.Tensor, b: tf.Tensor, of_a: int, of_b: int) -> tf.Tensor:
    """`_contracted` of float32, by products of bfloat16."""
    free_a, free_b = -3 - of_a, -3 - of_b
    parts_a, parts_b = _parts(a), _parts(b)
    size_a, size_b = a.shape.num_elements(), b.shape.num_elements()
    result = math.prod([*a.shape[:-2], a.shape[free_a], b.shape[free_b]])
    if result > size_a + size_b and a.shape[of_a] <= LONGEST:
        # A large result is written once, by one product: the leading part comes last, so that it is accumulated alone.
        pairs = [(2, 0), (0, 2), (1, 1), (1, 0), (0, 1), (0, 0)]
        all_a, all_b = tf.concat([parts_a[k] for k, _ in pairs], of_a), tf.concat([parts_b[k] for _, k in pairs], of_b)
        return dot(all_a, all_b, of_a, of_b)
    # Otherwise each part of the larger operand is read once, but for the leading one.
    found = []
    for k, others in enumerate(([1, 2], [0, 1], [0])):
        if size_a >= size_b:
            sums, axis = dot(parts_a[k], tf.concat([parts_b[j] for j in others], free_b), of_a, of_b), -1
        else:
            sums, axis = dot(tf.concat([parts_a[j] for j in others], free_a), parts_b[k], of_a, of_b), -2
        found += tf.split(sums, len(others), axis)
    smallest = found[1] + found[3] + found[4]
    return smallest + (found[0] + found[2]) + _in_pieces(parts_a[0], parts_b[0], of_a, of_b)


def _parts(x: tf.Tensor) -> list[tf.Tensor]:
    """Three of bfloat16 whose sum is x, a large, a small and a very small one."""
    found = []
    for _ in range(3):
        # Rounded by hand, since XLA takes a cast there and back for nothing. Truncated are the largest numbers, of which rounding
        # makes infinity, and NaN: of CUDA's, all bits set, it makes a zero.
        half = tf.where(tf.abs(x) < 2.0**127, 0x8000, 0)
        nearest = tf.bitcast(tf.bitwise.bitwise_and(tf.bitcast(x, tf.int32) + half, ~0xFFFF), tf.float32)
        found.append(tf.cast(nearest, tf.bfloat16))
        x -= nearest
    return found


def of_factors(a: Sequence[tf.Tensor], b: Sequence[tf.Tensor], of_a: int, of_b: int) -> tf.Tensor:
    """`dot` of two factors of float16, or of two pairs of them (halves.py), without their powers of two."""
    if len(a) == 1:
        return dot(a[0], b[0], of_a, of_b)
    (a, trailing_a), (b, trailing_b) = a, b
    result = math.prod([*a.shape[:-2], a.shape[-3 - of_a], b.shape[-3 - of_b]])
    sizes = a.shape.num_elements() + b.shape.num_elements()
    if (of_a, of_b) == (-1, -2) and result > sizes and a.shape[of_a] <= LONGEST:
        # As in `_by_parts`. What is divided here loses bits 2^18 below its range: no gradients, whose small numbers matter.
        small, small_trailing = b / halves.TRAILING, trailing_b / halves.TRAILING
        return dot(tf.concat([trailing_a, a, a], of_a), tf.concat([small, small_trailing, b], of_b), of_a, of_b)
    trailing = dot(trailing_a, b, of_a, of_b) + dot(a, trailing_b, of_a, of_b)
    return trailing / halves.TRAILING + _in_pieces(a, b, of_a, of_b)


def _in_pieces(a: tf.Tensor, b: tf.Tensor, of_a: int, of_b: int) -> tf.Tensor:
    """`dot` whose inner axis tensor cores accumulate LONGEST numbers at a time at most; the rest is added up in float32."""
    inner = a.shape[of_a]
    pieces = work.parts(inner, LONGEST)
    if pieces == 1:
        return dot(a, b, of_a, of_b)
    length = 8 * work.parts(inner, 8 * pieces)  # whole 16 bytes
    a, b = _divided(a, of_a, pieces, length), _divided(b, of_b, pieces, length)
    groups = [(a[..., k : k + AT_ONCE, :, :], b[..., k : k + AT_ONCE, :, :]) for k in range(0, pieces, AT_ONCE)]
    return tf.add_n([tf.reduce_sum(dot(*group, of_a, of_b), -3) for group in groups])


def _divided(x: tf.Tensor, axis: int, pieces: int, length: int) -> tf.Tensor:
    """x with its axis -1 or -2 in pieces, on an axis of their own before the last two; zeros fill it up."""
    x = with_zeros(x, axis, pieces * length - x.shape[axis])
    if axis == -2:
        return tf.reshape(x, [*x.shape[:-2], pieces, length, x.shape[-1]])
    x = tf.reshape(x, [*x.shape[:-1], pieces, length])
    return tf.transpose(x, [*range(x.shape.rank - 3), x.shape.rank - 2, x.shape.rank - 3, x.shape.rank - 1])


def dot(a: tf.Tensor, b: tf.Tensor, of_a: int, of_b: int) -> tf.Tensor:
    """`_contracted` by a kernel of cuBLAS under XLA, of float32 by TensorFloat-32, or of 16 bits; float32."""
    from tensorflow.compiler.tf2xla.python import xla
    from tensorflow.compiler.xla import xla_data_pb2

    rank, outer = a.shape.rank, range(a.shape.rank - 2)
    numbers = xla_data_pb2.DotDimensionNumbers(
        lhs_contracting_dimensions=[rank + of_a],
        rhs_contracting_dimensions=[rank + of_b],
        lhs_batch_dimensions=outer,
        rhs_batch_dimensions=outer,
    )
    high = xla_data_pb2.PrecisionConfig.Precision.HIGH
    precision = xla_data_pb2.PrecisionConfig(operand_precision=[high, high])
    return xla.dot_general(a, b, numbers, precision, preferred_element_type=tf.float32)
