"""Matrix products outside of the kernels, as XLA for a GPU runs them best, which is not how it does if left alone.

- It searches. Of a product of float32 by TensorFloat-32 it compiles dozens of Triton kernels and times them against cuBLAS': of the
  first call of a training step that was half to three quarters, for steps that were no faster. An operand precision
  other than the default keeps it to cuBLAS', and "high" is TensorFloat-32 still.
- Rows of float32 that are not made of whole 16 bytes, as those of 650 numbers, get slow kernels. They are padded with zeros.
- Where TensorFloat-32 is off, float32 runs beside the tensor cores. Here each number is the sum of three of bfloat16, which
  together hold all of its 24 bits, and a product is the sum of the six products of parts that matter to float32: bfloat16's range
  is float32's, and the tensor cores add up in float32. As with the kernels, which make one of TensorFloat-32 three, the
  result is as precise as float32's own. A number that is not finite makes the sums that it is in NaN.

docs/wavefront-kernels.md has the times.
"""

import math

import tensorflow as tf

from . import tracing

ALIGNED = 4  # float32 numbers of 16 bytes
SMALL = 5e8  # floating-point operations
TILE, TILES = (
    64,
    128,
)  # rows and columns of a thread block's result, about; as many thread blocks as a GPU should have, about


@tf.autograph.experimental.do_not_convert
def product(a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
    """a · b of one dtype, as tf.matmul(a, b).

    Args:
        a: [..., rows, inner].
        b: [..., inner, columns], with as many axes; two or three.
    """
    known = a.shape.is_fully_defined() and b.shape.is_fully_defined()
    if a.dtype != tf.float32 or not known or not tracing.compiled_for("GPU"):
        return tf.matmul(a, b)
    more = -b.shape[-2] % ALIGNED
    outer = [[0, 0]] * (b.shape.rank - 2)
    return _contracted(tf.pad(a, [*outer, [0, 0], [0, more]]), tf.pad(b, [*outer, [0, more], [0, 0]]), -1, -2)


def _contracted(a: tf.Tensor, b: tf.Tensor, of_a: int, of_b: int) -> tf.Tensor:
    """The sum over axis `of_a` of a and `of_b` of b, each -1 or -2: [..., the other axis of a, the other axis of b]."""
    if tracing.vectorized():  # a gradient may be
        return tf.matmul(a, b, transpose_a=of_a == -2, transpose_b=of_b == -1)

    @tf.custom_gradient
    def run(a, b):
        def gradient(upstream):
            free_a, free_b = -3 - of_a, -3 - of_b
            by_a = (upstream, b, -1, free_b) if of_a == -1 else (b, upstream, free_b, -1)
            by_b = (a, upstream, free_a, -2) if of_b == -2 else (upstream, a, -2, free_a)
            return _contracted(*by_a), _contracted(*by_b)

        by_tf32 = tf.config.experimental.tensor_float_32_execution_enabled()
        return (_dot if by_tf32 else _by_parts)(a, b, of_a, of_b), gradient

    return run(a, b)


def _by_parts(a: tf.Tensor, b: tf.Tensor, of_a: int, of_b: int) -> tf.Tensor:
    """`_contracted` of float32, by products of bfloat16; the small ones are added up first."""
    free_a, free_b = -3 - of_a, -3 - of_b
    of_a_parts, of_b_parts = _parts(a), _parts(b)
    size_a, size_b, size = (
        tf.TensorShape(shape).num_elements() for shape in (a.shape, b.shape, (a.shape[free_a], b.shape[free_b]))
    )
    if size > size_a + size_b:  # a large result is written once: all six side by side along the inner axis
        pairs = [(2, 0), (0, 2), (1, 1), (1, 0), (0, 1), (0, 0)]
        many_a, many_b = (
            tf.concat([parts[pair[k]] for pair in pairs], axis)
            for k, (parts, axis) in enumerate([(of_a_parts, of_a), (of_b_parts, of_b)])
        )
        return _dot(many_a, many_b, of_a, of_b)
    # Otherwise each part of the larger one is read once.
    sums = []
    for k, part in enumerate(of_a_parts if size_a >= size_b else of_b_parts):
        if size_a >= size_b:
            found = _dot(part, tf.concat(of_b_parts[: 3 - k], free_b), of_a, of_b)
        else:
            found = _dot(tf.concat(of_a_parts[: 3 - k], free_a), part, of_a, of_b)
        sums += tf.split(found, 3 - k, -1 if size_a >= size_b else -2)
    return (sums[5] + sums[2] + sums[4]) + (sums[3] + sums[1]) + sums[0]


def _parts(x: tf.Tensor) -> list[tf.Tensor]:
    """Three of bfloat16 whose sum is x, a large, a small and a very small one."""
    found = []
    for _ in range(3):
        # Rounded by hand: XLA takes a cast there and back for nothing.
        nearest = tf.bitcast(tf.bitwise.bitwise_and(tf.bitcast(x, tf.int32) + 0x8000, ~0xFFFF), tf.float32)
        found.append(tf.cast(nearest, tf.bfloat16))
        x -= nearest
    return found


def _dot(a: tf.Tensor, b: tf.Tensor, of_a: int, of_b: int) -> tf.Tensor:
    """`_contracted` by a kernel of cuBLAS', of float32 by TensorFloat-32; float32."""
    pieces = _pieces(a.shape, b.shape) if of_a == of_b == -2 else 1
    if pieces > 1:
        a, b = (tf.reshape(x, [*x.shape[:-2], pieces, x.shape[-2] // pieces, x.shape[-1]]) for x in (a, b))
        return tf.reduce_sum(_dot(a, b, of_a, of_b), -3)
    from tensorflow.compiler.tf2xla.python import xla
    from tensorflow.compiler.xla import xla_data_pb2

    rank, outer = a.shape.rank, range(a.shape.rank - 2)
    numbers = xla_data_pb2.DotDimensionNumbers(
        lhs_contracting_dimensions=[rank + of_a], rhs_contracting_dimensions=[rank + of_b],
        lhs_batch_dimensions=outer, rhs_batch_dimensions=outer,
    )  # fmt: skip
    high = xla_data_pb2.PrecisionConfig.Precision.HIGH
    precision = xla_data_pb2.PrecisionConfig(operand_precision=[high, high])
    return xla.dot_general(a, b, numbers, precision, preferred_element_type=tf.float32)


def _pieces(a: tf.TensorShape, b: tf.TensorShape) -> int:
    """In how many pieces the inner axis, -2 of both, is summed up, side by side: a small result gives few multiprocessors work."""
    inner, rows, columns = a[-2], a[-1], b[-1]
    batch = math.prod(a[:-2])
    if 2 * batch * inner * rows * columns > SMALL:
        return 1
    tiles = batch * -(-rows // TILE) * -(-columns // TILE)
    return max(k for k in range(1, max(1, min(TILES // tiles, inner // TILE)) + 1) if inner % k == 0)
