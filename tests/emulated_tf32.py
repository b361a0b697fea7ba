"""TensorFloat-32 on a CPU: tf.matmul with operands of 10 bits after the point, rounded to the nearest, and sums in float32."""

import tensorflow as tf

product = tf.matmul


def rounded(x: tf.Tensor) -> tf.Tensor:
    bits = tf.bitcast(x, tf.uint32) + tf.constant(0x1000, tf.uint32)
    return tf.bitcast(tf.bitwise.bitwise_and(bits, tf.constant(0xFFFFE000, tf.uint32)), x.dtype)


@tf.custom_gradient
def matmul(a: tf.Tensor, b: tf.Tensor):
    """As tf.matmul of two float32 tensors without its options, forward and backward."""
    a, b = rounded(a), rounded(b)

    def gradient(g):
        g = rounded(g)
        return product(g, b, transpose_b=True), product(a, g, transpose_a=True)

    return product(a, b), gradient
