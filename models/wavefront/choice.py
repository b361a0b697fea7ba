"""Which implementation a WavefrontLSTM(implementation="auto") runs, chosen anew whenever its call is traced.

"persistent" where all of this holds, else "xla":

- The kernels take it: a GPU of compute capability 8.0 or later, no layer normalisation, float16, bfloat16 or float32, sizes
  that are known when the function is traced, tilings of both passes that fit with half of the batch at least
  (persistent.planned) and keep half of the weights at least on the chip, and an NVRTC that compiles it.
- They may run here: on a GPU (neither the call's device nor that of the weights is a CPU), the only logical one of its card,
  without a server of MPS; under tf.distribute within a function that XLA compiles; not in a body of tf.vectorized_map, which
  takes operations apart; not in an eager call, in which the kernels would be compiled for every shape while XLA's
  implementation runs op by op at once.

In every record of the suite in which both ran whole sequences (1 to 8 layers; sentences with a mask), "persistent" is the
faster one where the batch fits whole and half of the weights or more stay on the chip, so no time is estimated here. With 3
layers of 2,048 units at batch 128, of whose weights the kernels by TensorFloat-32 itself read over half anew at every step,
"xla" is. Batches in slices have no record of the present kernels. Of streams, one step a call of 650 units, "xla" is the faster
one at batch 1, neither at batch 8. Two directions have no record: tried by hand on an H200, "persistent" was the faster one at
both sizes.

Nothing here is an error: what "persistent" refuses is why "xla" is chosen. What is wrong with an installation (no NVRTC, or
one that does not compile for the GPU) is a warning.
"""

import logging
import os
from collections.abc import Sequence
from pathlib import Path

import tensorflow as tf

from . import nvrtc, persistent, tracing
from .stack import LayerWeights
from .tiling import streamed
from .work import parts

LOGGER = logging.getLogger("wavefront_lstm")
SLICES_OF_AUTO = 2  # of a batch, at most, in which the kernels are taken to be the faster ones
STREAMED_OF_AUTO = 0.5  # of the weights, at most, that do not stay on the chip


def chosen(
    x: tf.Tensor,
    layers: Sequence[LayerWeights],
    devices: Sequence[str],
    *,
    lengths: tf.Tensor | None,
    bidirectional: bool,
    dropout: bool,
    keep: bool,
) -> tuple[str, str]:
    """The implementation, "xla" or "persistent", and why in a few words.

    Args:
        x: inputs [time, batch, features].
        layers: where bidirectional, the forward and the backward one of each layer in turn.
        devices: of the weights.
        lengths: of sequences, where there is a mask.
        dropout, keep: whether there is dropout between the layers; recurrent dropout.
    """
    if _eager():
        return "xla", "called eagerly"
    try:
        nvrtc.chip()
        if where := _elsewhere(devices):
            return "xla", where
        work, together = persistent.planned(x, layers, dropout, keep, lengths is not None, 1 + bidirectional)
        if parts(x.shape[1], work.batch) > SLICES_OF_AUTO:
            return "xla", f"the kernels have place for {work.batch} of {x.shape[1]} sequences at a time"
        if (share := streamed(work._replace(lanes=together), x.shape[0], nvrtc.chip())) > STREAMED_OF_AUTO:
            return "xla", f"the kernels would read {share:.0%} of the weights anew at every step"
    except (ValueError, OSError) as error:  # OSError: of a GPU without CUDA
        return "xla", _told(error)
    kernel = work._replace(lanes=together), x.shape[0], layers[0].recurrent_kernel.shape[0]
    try:
        persistent.compile_backward_ahead(*kernel)
        persistent.compiled(*kernel)
    except (ValueError, OSError) as error:
        LOGGER.warning("the CUDA kernels cannot be compiled, so implementation='xla' is used: %s", _told(error))
        return "xla", _told(error)
    return "persistent", "the kernels take it"


def _told(error: Exception) -> str:
    return str(error).partition("; use implementation=")[0]


def _elsewhere(devices: Sequence[str]) -> str:
    """Why a launch cannot be here; empty: it can."""
    gpus = len(tf.config.get_visible_devices("GPU"))
    if gpus and (tracing.on("CPU") or any("CPU:" in device for device in devices)):
        return "on a CPU"
    if gpus and _logical_gpus() > gpus:
        return "several logical GPUs on a card"
    if (Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")) / "control").exists():
        return "a GPU that programs share by MPS"
    if tracing.vectorized():
        return "in tf.vectorized_map"
    if tf.distribute.has_strategy() and not tracing.compiled_by_xla():
        return "under tf.distribute, outside of XLA"
    return ""


def _logical_gpus() -> int:
    """Those of this process: TensorFlow lists a cluster's other tasks' too, named such as "/job:worker/…/task:1/device:GPU:0"."""
    own = tracing.own_device().partition("/device:")[0]
    names = [device.name for device in tf.config.list_logical_devices("GPU")]
    return sum(name.partition("/device:")[0] in ("", own) for name in names)


def _eager() -> bool:
    return tf.executing_eagerly()
