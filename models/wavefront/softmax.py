"""A softmax's cross-entropy and its gradients in one CUDA kernel (kernels/softmax.cu), called from XLA.

XLA reads the logits three times in a training step, for the largest, for the sum and for the gradient, and writes the gradient
once. The gradient of a loss that is known to be a scaled sum needs nothing that comes after it, so that one kernel can do it all:
one read, one write, and the bias' gradient on the way. Unlike softmax_loss.py it adds the bias to the logits itself, in
float32 whatever their dtype. softmax_head.py is the Keras layer that uses it.
"""

from pathlib import Path
from typing import NamedTuple

import tensorflow as tf

from . import halves, nvrtc, products
from .nvrtc import Chip
from .softmax_loss import losses_and_gradients
from .work import DTYPE_CODES, HALVES, PAIRS, SUFFIXES, by_float16

SOURCE = Path(__file__).with_name("kernels") / "softmax.cu"
VECTOR_BYTES = 16
# Of a thread block, and blocks of a multiprocessor, of which one computes while the other waits; the first that fits is taken.
THREADS = ((512, 2), (1024, 1))
REGISTERS = 40  # numbers of a row that a thread keeps, at most
FEW_THREADS = 512  # of a thread block: with fewer, narrow rows leave a multiprocessor idle
LARGE = 50 * 2**20  # bytes of logits, as many as an H100's second-level cache holds: see `pays`
# Floating-point operations of a product, from which on float16 takes float32's place without the kernel too.
FACTORS_FLOPS = 1e9
KERNEL = "softmax_cross_entropy"


class Launch(NamedTuple):
    """How the kernel divides its work.

    Attributes:
        grid, threads: thread blocks; threads of each.
        blocks: thread blocks that a multiprocessor runs at once.
        shared_bytes: of shared memory, of a thread block.
    """

    grid: int
    threads: int
    blocks: int
    shared_bytes: int


def launch_configuration(rows: int, columns: int, itemsize: int, chip: Chip) -> Launch | None:
    """How logits [rows, columns] are divided among the thread blocks. None: unsupported row size.

    Such a row does not fit in a thread block, or is not made of whole vectors of 16 bytes.
    """
    vector = VECTOR_BYTES // itemsize
    if columns % vector:
        return None
    for threads, blocks in THREADS:
        threads = min(threads, 32 * -(-columns // (32 * vector)))
        kept = vector * -(-columns // (vector * threads))  # numbers of a thread
        shared_bytes = 4 * (kept * threads + 2 * threads // 32)
        if kept <= REGISTERS and blocks * (shared_bytes + 1024) <= chip.shared_bytes:
            return Launch(min(rows, blocks * chip.multiprocessors), threads, blocks, shared_bytes)
    return None


def pays(rows: int, columns: int, dtype: tf.DType) -> bool:
    """Whether `scaled_loss` takes logits of this size, and they are so many that it should be the faster way.

    Logits that stay in the cache cost XLA next to nothing to read again, and a kernel that is not XLA's own cuts the CUDA graph
    of a step in two. By a probe on an H200, of which there is no record, logits of 93 MiB and more were faster with it, of 15 MiB
    slower; in between nothing was measured.

    Raises:
        ValueError: there is no GPU.
    """
    chip = nvrtc.chip()
    if chip.capability < 80 or dtype.name not in DTYPE_CODES or rows * columns * dtype.size < LARGE:
        return False
    launch = launch_configuration(rows, columns, dtype.size, chip)
    return launch is not None and launch.threads >= FEW_THREADS


def factors(dtype: tf.DType) -> int | None:
    """HALVES or PAIRS, which `scaled_loss_by_factors` takes in this dtype's place; None: none, as on a GPU that has no
    TensorFloat-32, though TensorFlow allows it.

    Raises:
        ValueError: there is no GPU.
    """
    if dtype != tf.float32 or nvrtc.chip().capability < 80:
        return None
    return by_float16(DTYPE_CODES["tf32" if products.tf32() else "float32"])


def factors_pay(rows: int, features: int, columns: int, dtype: tf.DType) -> bool:
    """Whether `scaled_loss_by_factors` should be the faster way where the kernel is not."""
    return factors(dtype) is not None and 2 * rows * features * columns >= FACTORS_FLOPS


def notes(dtype: tf.DType) -> list[str]:
    """For whoever reports times: what `scaled_loss_by_factors` multiplies in this dtype's place."""
    what = {
        HALVES: "in TensorFloat-32's place the vocabulary's products in training multiply float16 times powers of two",
        PAIRS: "the vocabulary's products in training multiply sums of two float16 times powers of two, of 23 bits",
    }
    return [f"{what[code]}: docs/wavefront-kernels.md"] if (code := factors(dtype)) else []


def scaled_loss(
    logits: tf.Tensor, bias: tf.Tensor, targets: tf.Tensor, vocabulary: int, scale: float | tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """scale · Σ -log softmax(logits + bias)[target], with its gradients, in a function that XLA compiles on a GPU.

    Args:
        logits: [rows, words] float32, float16 or bfloat16, without their bias; sizes are static.
        bias: [words] float32; words after the vocabulary's have one that makes them vanish (softmax_loss.padded).
        targets: [rows] int64. One that is no word gives NaN, and where its logits are finite nothing to the gradients.
        vocabulary: words that exist.
        scale: of each row's loss, a scalar. A gradient of float16 holds scale times that of the sum, so loss scaling belongs in
            here: what the result is multiplied by afterwards is, too, but only once the gradient is float16.

    Returns:
        The scaled loss, a float32 scalar, and the losses [rows] float32, which have no gradient.

    Raises:
        ValueError: unsupported GPU, dtypes or shapes.
    """
    columns = logits.shape[-1]
    if logits.dtype.name not in DTYPE_CODES or bias.dtype != tf.float32 or targets.dtype != tf.int64:
        raise ValueError(
            f"logits, bias and targets of {logits.dtype.name}, {bias.dtype.name} and {targets.dtype.name} given, expected "
            "float32, float16 or bfloat16, float32 and int64"
        )
    if bias.shape != [columns] or not 0 < vocabulary <= columns:
        raise ValueError(
            f"logits of shape {logits.shape}, a bias of shape {bias.shape} and a vocabulary of {vocabulary} given, expected a "
            "bias for every column and no more words than columns"
        )
    scale = tf.convert_to_tensor(scale, tf.float32)

    @tf.custom_gradient
    def run(logits, bias):
        code = DTYPE_CODES[logits.dtype.name]
        losses, d_logits, d_bias = _launch(logits, bias, targets, tf.reshape(scale, [1]), vocabulary, code)

        def gradient(upstream, _):
            return tf.cast(upstream * tf.cast(d_logits, tf.float32), logits.dtype), upstream * d_bias

        return (scale * tf.reduce_sum(losses), losses), gradient

    total, losses = run(logits, bias)
    return total, tf.stop_gradient(losses)


def scaled_loss_by_factors(
    code: int,
    x: tf.Tensor,
    kernel: tf.Tensor,
    bias: tf.Tensor,
    targets: tf.Tensor,
    vocabulary: int,
    scale: float | tf.Tensor,
) -> tuple[tf.Tensor, tf.Tensor]:
    """`scaled_loss` of the logits x · kernel, whose product and the two of its gradient are of float16, or pairs (halves.py).

    The gradient by the logits is that of a single loss there, which is 1 at most, and `scale` comes after the products. Logits
    that are too few for the kernel are XLA's.

    Args:
        code: HALVES or PAIRS.
        x, kernel: [rows, features] and [features, words] float32.
    """
    scale, features = tf.convert_to_tensor(scale, tf.float32), x.shape[-1]

    @tf.custom_gradient
    def run(x, kernel, bias):
        x, of_x = halves.factors(products.with_zeros(x, -1, -features % 8), code == PAIRS)  # to whole 16 bytes
        kernel, of_kernel = halves.factors(products.with_zeros(kernel, -2, -features % 8), code == PAIRS)
        logits, undone = products.of_factors(x, kernel, -1, -2), of_x * of_kernel
        if pays(*logits.shape, logits.dtype):
            scales = tf.stack([halves.RANGE, undone])
            losses, *d_logits, d_bias = _launch(logits, bias, targets, scales, vocabulary, code)
        else:
            losses, d_logits = losses_and_gradients(logits * undone + bias, targets, vocabulary)
            d_logits *= halves.RANGE
            d_bias = tf.reduce_sum(d_logits, 0)
            d_logits = halves.as_float16(d_logits, code == PAIRS)

        def gradient(upstream, _):
            by = upstream * scale / halves.RANGE
            d_x = products.of_factors(d_logits, kernel, -1, -1)[:, :features]
            d_kernel = products.of_factors(x, d_logits, -2, -2)[:features]
            return d_x * (by * of_kernel), d_kernel * (by * of_x), d_bias * by

        return (scale * tf.reduce_sum(losses), losses), gradient

    total, losses = run(x, kernel, bias)
    return total, tf.stop_gradient(losses)


@tf.function(jit_compile=True, autograph=False)
def _launch(logits, bias, targets, scales, vocabulary: int, dtype_code: int):
    chip, (rows, columns) = nvrtc.chip(), logits.shape
    launch = launch_configuration(rows, columns, logits.dtype.size, chip)
    if launch is None or chip.capability < 80:
        raise ValueError(
            f"logits of shape {logits.shape} {logits.dtype.name} given, expected whole vectors of {VECTOR_BYTES} bytes a row, a "
            "row that fits in one multiprocessor, and a GPU of compute capability 8.0 or later; use "
            "SoftmaxHead(fused=False)"
        )
    defines = {
        "ROWS": rows, "COLUMNS": columns, "WORDS": vocabulary, "DTYPE_CODE": dtype_code,
        "GRID": launch.grid, "THREADS": launch.threads, "BLOCKS": launch.blocks,
    }  # fmt: skip
    code = nvrtc.ptx(SOURCE.read_text(), tuple(defines.items()), chip.capability)
    gradient = tf.TensorSpec([rows, columns], tf.float16 if dtype_code in SUFFIXES else logits.dtype)
    results = [
        tf.TensorSpec([rows], tf.float32),
        *[gradient] * (2 if dtype_code == PAIRS else 1),
        tf.TensorSpec([launch.grid, columns], tf.float32),
    ]
    operands = [logits, bias, targets, scales]
    losses, *d_logits, d_bias = nvrtc.launch(
        KERNEL + SUFFIXES.get(dtype_code, ""),
        code,
        operands,
        results,
        launch.grid,
        launch.threads,
        launch.shared_bytes,
    )
    return losses, *d_logits, tf.reduce_sum(d_bias, 0)
