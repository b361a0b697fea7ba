"""Which implementation a WavefrontLSTM(implementation="auto") runs, chosen anew whenever its call is traced.

"persistent" where all of this holds, else "xla":

- The kernels take it: a GPU of compute capability 8.0 or later, one direction, no mask, no layer normalisation, float16,
  bfloat16 or float32, sizes that are known when the function is traced, a tiling that fits (persistent.planned), and an NVRTC
  that compiles it.
- They may run here: on a GPU (neither the call's device nor that of the weights is a CPU), the only logical one of its card,
  without a server of MPS; under tf.distribute within a function that XLA compiles; not in a body of tf.vectorized_map, which
  takes operations apart; not where tf.functions run eagerly.
- They should take no longer: of a training step of the stack, `persistent_us` is at most `xla_us`. Both are fits to measured
  steps of an H200.

Nothing here is an error: what "persistent" refuses is why "xla" is chosen.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import tensorflow as tf
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

from . import nvrtc, persistent, stack, tiling
from .stack import LayerWeights
from .tiling import PRODUCTS_PER_US, Work

# us of a training step of a stack: a fit by tests/models/measured_choice.py to the records in results/.
XLA_US = {"call": 164.3, "step": 7.61, "products": 0.907, "weights": 0.365, "pointwise": 154.5}
PERSISTENT_US = {"call": 108.3, "gradients": 0.972}


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
        devices: of the weights.
        lengths: of sequences, where there is a mask.
        dropout, keep: whether there is dropout between the layers; recurrent dropout.
    """
    if bidirectional:
        return "xla", "two directions"
    if lengths is not None:
        return "xla", "a mask"
    try:
        nvrtc.chip()
        if where := _elsewhere(devices):
            return "xla", where
        work, together = persistent.planned(x, layers, dropout, keep)
        ours, xla = persistent_us(len(layers), x.shape[0], work, together), xla_us(len(layers), x.shape[0], work)
        if not persistent_first(ours, xla):
            return "xla", f"{ours:.0f} us expected of 'persistent', {xla:.0f} of 'xla'"
        persistent.compiled(work._replace(lanes=together), x.shape[0])
    except (ValueError, OSError) as error:  # OSError: of a GPU without CUDA
        return "xla", str(error).partition("; use implementation=")[0]
    return "persistent", f"{ours:.0f} us expected, {xla:.0f} of 'xla'"


def persistent_first(persistent_us: float, xla_us: float) -> bool:
    """Whether "persistent" is taken where both can run, by what they should take."""
    return persistent_us <= xla_us


def persistent_us(num_layers: int, time: int, work: Work, together: int) -> float:
    """An estimate of a stack's step both ways; work: of any number of lanes."""
    kernels = tiling.stack_us(num_layers, time, work._replace(lanes=together), nvrtc.chip())
    return PERSISTENT_US["call"] + kernels + PERSISTENT_US["gradients"] * gradients_us(num_layers, time, work)


def gradients_us(num_layers: int, time: int, work: Work) -> float:
    """us of the products that are the weights' gradients, at the chip's rate."""
    return 16 * time * work.batch * work.units**2 * num_layers / PRODUCTS_PER_US[work.dtype_code]


def xla_us(num_layers: int, time: int, work: Work) -> float:
    """An estimate of the same by XLA."""
    return sum(XLA_US[name] * amount for name, amount in terms(num_layers, time, work).items())


def terms(num_layers: int, time: int, work: Work) -> dict[str, float]:
    """What XLA's time is made of, by name.

    step: steps of the schedule. products: us of all products. weights: MB of kernels that the steps read. pointwise: millions of
    units of a sequence, in 4 bytes, that they write.
    """
    together = stack.layers_together(num_layers, work.units, work.itemsize)
    steps = (time + together - 1) * (num_layers // together)
    kernel = 4 * work.units**2
    pairs = 2 * num_layers - 1  # of layers and what they read, but for the lowest one's input
    return {
        "call": 1,
        "step": steps,
        "products": 6 * pairs * kernel * time * work.batch / PRODUCTS_PER_US[work.dtype_code],
        "weights": 2 * steps * together * kernel * work.itemsize * (2 if together > 1 else 1) / 1e6,
        "pointwise": steps * together * work.batch * work.units * work.itemsize / 4e6,
    }


def in_scratch() -> bool:
    """Whether Keras traces a call for its shapes alone, in a graph that never runs."""
    return any(str(getattr(graph, "name", "")).startswith("scratch_graph") for graph in nvrtc.graphs())


def _elsewhere(devices: Sequence[str]) -> str:
    """Why a launch cannot be here; empty: it can."""
    gpus = len(tf.config.get_visible_devices("GPU"))
    if gpus and any("CPU:" in device for device in (_own_device(), *devices)):
        return "on a CPU"
    if gpus and len(tf.config.list_logical_devices("GPU")) > gpus:
        return "several logical GPUs on a card"
    if (Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")) / "control").exists():
        return "a GPU that programs share by MPS"
    if nvrtc.vectorized():
        return "in tf.vectorized_map"
    if tf.config.functions_run_eagerly():
        return "tf.functions run eagerly"
    if tf.distribute.has_strategy() and not GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        return "under tf.distribute, outside of XLA"
    return ""


def _own_device() -> str:
    """Where operations go from here."""
    with tf.init_scope():  # out of a function, in the scope of device around it
        return tf.zeros([]).device
