"""What a share is taken of: how fast a plain large matmul is on this device, at the row's precision."""

import math

from harness.frameworks import runtimes
from harness.measure import clocks


def matmul_flops(runtime: runtimes.Runtime, size: int, repeats: int) -> float:
    """FLOP/s of a plain [size, size] × [size, size] product on this device, at the runtime's precision; the best of four.

    Random numbers, since zeros draw less power and run faster. In 16 bits at fp16 and bf16. TensorFlow's product is the measure
    for every row, whatever its framework, so that their shares are of one number.
    """
    import tensorflow as tf

    dtype = {"fp16": tf.float16, "bf16": tf.bfloat16}.get(runtime.precision, tf.float32)
    a, b = (tf.cast(tf.random.normal([size, size], seed=seed), dtype) for seed in (1, 2))

    def products():
        for _ in range(repeats):
            tf.matmul(a, b)

    seconds = min(clocks.seconds_of(products, runtime.sync)[0] for _ in range(4))
    return 2.0 * math.pow(size, 3) * repeats / seconds
