"""The recurrent layers of a model: what Keras' own rules say of each, and what the profiler saw each one run.

The rules are those of Keras 3.15 on TensorFlow: keras/src/layers/rnn/lstm.py and gru.py (`inner_loop`), and
keras/src/backend/tensorflow/rnn.py (`cudnn_ok`, `_assert_valid_mask`). They tell why; the profile tells what.
"""

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import keras
import tensorflow as tf

from models.wavefront.stack_layer import StackLayer

SCOPE = "doctor_layer_"
SCOPES = rf"{SCOPE}(\d+)"
CUDNN, PERSISTENT, XLA, LOOP, UNROLLED, EAGER, OTHER, NOTHING = (
    "cuDNN",
    "persistent kernels",
    "XLA",
    "while loop",
    "unrolled",
    "eager",
    "other",
    "nothing",
)


@dataclass
class Found:
    """One recurrent layer.

    Attributes:
        place: its path within the model, such as "encoder/lstm".
        what: the class and its size, such as "LSTM(64)".
        broken: the rules of Keras that keep it from cuDNN, each "setting: what cuDNN needs"; none: cuDNN where there is a GPU.
        changes_model: of `broken`, those that cannot be kept without another model.
        masked: whether it was called with a mask; None: it was not called.
    """

    layer: Any
    place: str
    what: str
    broken: list[str]
    changes_model: list[str]
    masked: bool | None = None


@dataclass
class Seen:
    """What the profiler saw one layer run in a training step: one of the words above, and the ops and kernels that say so."""

    kind: str
    words: str
    kernels: dict[str, float] = field(default_factory=dict)


def recurrent(model: keras.Model) -> list[Found]:
    """Every recurrent layer of a model, those within others too: keras.layers.RNN and what is made of it, and this suite's."""
    found: dict[int, Found] = {}

    def look(owner: Any, path: str) -> None:
        halves = [owner.forward_layer, owner.backward_layer] if isinstance(owner, keras.layers.Bidirectional) else None
        for layer in halves or owner._flatten_layers(include_self=False, recursive=False):
            if isinstance(layer, keras.layers.RNN | StackLayer):
                found.setdefault(id(layer), Found(layer, path + layer.name, describe(layer), *rules(layer)))
            elif layer is not owner:
                look(layer, f"{path}{layer.name}/")

    look(model, "")
    return list(found.values())


def describe(layer: Any) -> str:
    """Such as "LSTM(64)" or "RNN(LSTMCell(64))"."""
    kind = type(layer).__name__
    if type(layer) is keras.layers.RNN:
        cell = layer.cell
        return f"RNN({type(cell).__name__}({getattr(cell, 'units', '')}))"
    stacked = f", num_layers={layer.num_layers}" if isinstance(layer, StackLayer) else ""
    size = getattr(layer, "units", getattr(layer, "filters", ""))
    return f"{kind}({size}{stacked})"


def rules(layer: Any) -> tuple[list[str], list[str]]:
    """(the rules that keep a layer from cuDNN, those of them that no other setting meets without changing the model)."""
    if isinstance(layer, StackLayer):
        own = getattr(layer, "uses_cudnn", None)
        return ([] if own else [f"{type(layer).__name__}: this suite's own, not cuDNN's"]), []
    if not isinstance(layer, keras.layers.LSTM | keras.layers.GRU):
        return [f"{describe(layer)}: Keras calls cuDNN from keras.layers.LSTM and GRU alone"], []
    changes = []
    for name, expected in (("activation", "tanh"), ("recurrent_activation", "sigmoid")):
        given = getattr(layer, name)
        if given is not getattr(keras.activations, expected):
            changes.append(f"{name}={getattr(given, '__name__', given)}: cuDNN has {expected} alone")
    if not layer.use_bias:
        changes.append("use_bias=False: cuDNN's cells have biases")
    if layer.recurrent_dropout:
        changes.append(f"recurrent_dropout={layer.recurrent_dropout:g}: cuDNN has none, WavefrontLSTM has it")
    if isinstance(layer, keras.layers.GRU) and not layer.cell.reset_after:
        changes.append("reset_after=False: cuDNN resets after the product")
    broken = [*changes]
    if layer.unroll:
        broken.append("unroll=True: cuDNN is not asked; unroll=False computes the same")
    if layer.use_cudnn is False:
        broken.append("use_cudnn=False: cuDNN is not asked; leave it out")
    return broken, changes


@contextlib.contextmanager
def scoped(found: list[Found]) -> Iterator[None]:
    """Within: each layer's ops stand under a name scope of its own, by its number, in graphs that are traced here.

    Notes whether it is called with a mask. Nothing else changes, so that the graph runs the same kernels.
    """
    calls = [each.layer.call for each in found]

    def within(number: int, call):
        def called(*arguments, **options):
            mask = options.get("mask")
            if mask is None:
                mask = getattr(arguments[0], "_keras_mask", None) if arguments else None
            found[number].masked = mask is not None
            with tf.name_scope(f"{SCOPE}{number}"):
                return call(*arguments, **options)

        return called

    for number, each in enumerate(found):
        each.layer.call = within(number, calls[number])
    try:
        yield
    finally:
        for each, call in zip(found, calls, strict=True):
            each.layer.call = call


def seen(profile: Mapping[str, Any], number: int) -> Seen:
    """What layer `number` ran, from harness.frameworks.tensorflow's profile by SCOPES."""
    own = profile["scopes"].get(str(number), {"ops": {}, "kernels": {}})
    ops, kernels = own["ops"], own["kernels"]
    products = {
        where: sum(count for op, count in ops.items() if re.fullmatch(rf"{where}\w*MatMul(V\d)?", op))
        for where in ("", "loop:", "xla:", "xla:loop:")
    }
    if cudnn := {op: count for op, count in ops.items() if re.match(r"(loop:)?CudnnRNN", op)}:
        launched = [name for name in kernels if not name.lower().startswith("mem")]
        return Seen(CUDNN, f"{_counted(cudnn)}; {len(launched)} kinds of kernel", kernels)
    if calls := sum(count for op, count in ops.items() if re.fullmatch(r"xla:(loop:)?XlaCustomCallV2", op)):
        return Seen(PERSISTENT, f"persistent kernels called from XLA {calls}×", kernels)
    if any(
        name.startswith(("lstm_wavefront", "lstm_cluster")) for name in kernels
    ):  # called from a function of the layer's own
        return Seen(PERSISTENT, "persistent kernels called from XLA", kernels)
    if products["xla:loop:"]:
        return Seen(XLA, f"XLA, a loop over the steps with {products['xla:loop:']} products in its body", kernels)
    if products["xla:"]:
        return Seen(XLA, f"XLA, {products['xla:']} products, no loop", kernels)
    if products["loop:"]:
        words = f"TensorFlow's while loop, {products['loop:']} products in its body"
        return Seen(LOOP, words, kernels)
    if products[""]:
        return Seen(UNROLLED, f"{products['']} products of TensorFlow, no loop: unrolled over the steps", kernels)
    if ops:
        return Seen(OTHER, f"ops of TensorFlow: {_counted(ops)}", kernels)
    eager = sum(count for op, count in profile["ops"].items() if re.fullmatch(r"eager:\w*MatMul", op))
    if eager:
        return Seen(EAGER, f"op by op, eagerly ({eager} products in the whole step)")
    return Seen(NOTHING, "nothing: the layer did not run")


def _counted(ops: Mapping[str, int]) -> str:
    most = sorted(ops.items(), key=lambda item: -item[1])[:3]
    return ", ".join(f"{op} {count}×" for op, count in most)


def by_the_rules(found: Found, device: str) -> str:
    """What Keras' rules say, in words."""
    if found.broken:
        return "not cuDNN: " + "; ".join(found.broken)
    where = "cuDNN" if device == "gpu" else "cuDNN on an NVIDIA GPU, not on a CPU"
    return where + ("; its mask has to be right-padded" if found.masked else "")


def contradicts(found: Found, ran: Seen, device: str) -> bool:
    """Whether the profiler saw something else than the rules say; then the profiler is right."""
    return ran.kind != NOTHING and (ran.kind == CUDNN) != (device == "gpu" and not found.broken)
