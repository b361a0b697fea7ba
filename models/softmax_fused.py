"""The cross-entropy of models/softmax_loss.py with its gradient in one CUDA kernel (models/softmax_kernel.cu), called from XLA.

XLA reads the logits three times in a training step, for the largest, for the sum and for the gradient, and writes the gradient
once. The gradient of a loss that is known to be a scaled sum needs nothing from behind it, so that one kernel can do it all:
one read, one write, and the bias' gradient on the way.
"""

from pathlib import Path
from typing import NamedTuple

import tensorflow as tf

from models import cuda_source
from models.cuda_source import Chip
from models.wavefront_tiling import NUMBERS

SOURCE = Path(__file__).with_name("softmax_kernel.cu")
VECTOR_BYTES = 16
THREADS = (
    (512, 2),
    (1024, 1),
)  # of a thread block, and blocks of a multiprocessor: of two, one waits while the other computes
REGISTERS = 40  # numbers of a row that a thread keeps, at most
LARGE = 50 * 2**20  # bytes of logits, of an H100's second-level cache: see `pays`


class Launch(NamedTuple):
    """How the kernel cuts its work.

    Attributes:
        grid, threads: thread blocks; threads of each.
        blocks: thread blocks that a multiprocessor runs at once.
        shared_bytes: of shared memory, of a thread block.
    """

    grid: int
    threads: int
    blocks: int
    shared_bytes: int


def cut(rows: int, columns: int, itemsize: int, chip: Chip) -> Launch | None:
    """How logits [rows, columns] are cut among the thread blocks, or None where a row does not fit in one."""
    vector = VECTOR_BYTES // itemsize
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
    of a step in two.
    """
    if dtype.name not in NUMBERS or rows * columns * dtype.size < LARGE:
        return False
    return cut(rows, columns, dtype.size, cuda_source.chip()) is not None


def scaled_loss(
    logits: tf.Tensor, bias: tf.Tensor, targets: tf.Tensor, vocabulary: int, scale: float
) -> tuple[tf.Tensor, tf.Tensor]:
    """scale · Σ -log softmax(logits + bias)[target], with its gradients, in a function that XLA compiles on a GPU.

    Args:
        logits: [rows, words] float32, float16 or bfloat16, without their bias; sizes are static.
        bias: [words] float32; words behind the vocabulary have one that makes them vanish (softmax_loss.padded).
        targets: [rows] int64; NaN comes of one that is no word, and nothing for the gradients.
        vocabulary: words that exist.
        scale: of each row's loss. A gradient of float16 holds scale times that of the sum: loss scaling belongs in here.

    Returns:
        The scaled loss, a float32 scalar, and the losses [rows] float32, which have no gradient.

    Raises:
        ValueError: a row is too long.
    """

    @tf.custom_gradient
    def run(logits, bias):
        losses, d_logits, d_bias = _launch(logits, bias, targets, vocabulary, scale)

        def gradient(upstream, _):
            return tf.cast(upstream, logits.dtype) * d_logits, upstream * d_bias

        return (scale * tf.reduce_sum(losses), losses), gradient

    return run(logits, bias)


@tf.function(jit_compile=True, autograph=False)
def _launch(logits, bias, targets, vocabulary: int, scale: float):
    chip, (rows, columns) = cuda_source.chip(), logits.shape
    launch = cut(rows, columns, logits.dtype.size, chip)
    if launch is None:
        raise ValueError(
            f"logits of shape {logits.shape} {logits.dtype.name} given, expected a row that fits in one multiprocessor; use "
            "models.softmax_loss.softmax_losses"
        )
    defines = {
        "ROWS": rows, "COLUMNS": columns, "WORDS": vocabulary, "NUMBER": NUMBERS[logits.dtype.name],
        "GRID": launch.grid, "THREADS": launch.threads, "BLOCKS": launch.blocks,
    }  # fmt: skip
    code = cuda_source.ptx(SOURCE.read_text(), tuple(defines.items()), chip.capability)
    results = [
        tf.TensorSpec([rows], tf.float32),
        tf.TensorSpec([rows, columns], logits.dtype),
        tf.TensorSpec([launch.grid, columns], tf.float32),
    ]
    operands = [logits, bias, targets, tf.constant([scale], tf.float32)]
    losses, d_logits, d_bias = cuda_source.launch(
        "softmax_cross_entropy", code, operands, results, launch.grid, launch.threads, launch.shared_bytes
    )
    return losses, d_logits, tf.reduce_sum(d_bias, 0)
