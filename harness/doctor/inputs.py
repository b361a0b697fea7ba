"""Batches for a model that is to be measured: of its own shapes and types, with the options' sizes where it leaves them open.

Numbers are drawn by a seed. An input of an Embedding gets ids from 1 on. Where a model masks, the sequences end at steps of their
own, with the padding behind them (or before, or nowhere).
"""

from types import SimpleNamespace
from typing import Any

import keras
import numpy as np

from harness.errors import UserError

BATCH_SIZE, TIME_STEPS = 32, 50  # where neither the model nor the command line says
STAGED = 4  # batches of their own numbers
FUNCTION = "or give module:function that returns (model, inputs), one batch of arrays"


def specs(model: keras.Model, options: SimpleNamespace) -> Any:
    """What the model takes, in its own structure: (name, shape with None resolved, dtype) as SimpleNamespace at each leaf.

    Raises:
        UserError: a shape that is not known, or of text.
    """
    given = dict(_given(text) for text in options.input_shape)
    if getattr(model, "inputs", None):
        struct = getattr(model, "_inputs_struct", None)
        struct = model.inputs[0] if struct is None else struct
        tensors = keras.tree.map_structure(lambda t: SimpleNamespace(name=t.name, shape=t.shape, dtype=t.dtype), struct)
    else:
        tensors = _built_for(model, given, options)
    names = [leaf.name for leaf in keras.tree.flatten(tensors)]
    for name in given:
        if name and name not in names:
            raise UserError(f"--input-shape={name}: no such input; expected one of {', '.join(names)}")
    if "" in given and len(names) > 1:
        raise UserError(f"--input-shape: {len(names)} inputs; expected NAME=…, with one of {', '.join(names)}")
    return keras.tree.map_structure(lambda leaf: _resolved(leaf, given, options), tensors)


def _given(text: str) -> tuple[str, tuple[int, ...]]:
    """("", (50, 10)) of 50,10 and ("tokens", (50,)) of tokens=50."""
    name, _, sizes = text.rpartition("=")
    try:
        shape = tuple(int(size) for size in sizes.split(",") if size.strip())
    except ValueError:
        shape = ()
    if not shape or min(shape) < 1:
        raise UserError(f"--input-shape={text}: expected sizes without the batch's, such as 50,10, or NAME=50,10")
    return name, shape


def _built_for(model: keras.Model, given: dict, options: SimpleNamespace) -> Any:
    """Of a subclassed model: what it was built for, of any batch size and as many steps as are asked for."""
    shapes = getattr(model, "_build_shapes_dict", None) or {}
    known = next(iter(shapes.values())) if len(shapes) == 1 else None
    layers = list(model._flatten_layers(include_self=False))
    dtype = model.compute_dtype
    if any(isinstance(layer, keras.layers.Embedding) for layer in layers):
        dtype = "int32"
    if known is None and "" in given:
        known = (None, *given[""])
    if known is None:
        raise UserError(f"{model.name}: the shape of its inputs is not known; expected --input-shape=50,10, {FUNCTION}")

    def leaf(name: str, shape: tuple) -> SimpleNamespace:
        stateful = any(getattr(layer, "stateful", False) for layer in layers)
        steps = [options.time_steps or shape[1]] * (len(shape) > 1)
        own = given.get(name, given.get("", (*steps, *shape[2:])))
        return SimpleNamespace(name=name, shape=(shape[0] if stateful else None, *own), dtype=dtype)

    if isinstance(known, dict):
        return {name: leaf(name, tuple(shape)) for name, shape in known.items()}
    if isinstance(known[0], list | tuple):
        return [leaf(f"input_{k}", tuple(shape)) for k, shape in enumerate(known)]
    return leaf("input", tuple(known))


def _resolved(leaf: SimpleNamespace, given: dict, options: SimpleNamespace) -> SimpleNamespace:
    own = given.get(leaf.name, given.get(""))
    if own is not None and len(own) + 1 != len(leaf.shape):
        raise UserError(
            f"--input-shape: {leaf.name} has {len(leaf.shape) - 1} sizes besides the batch's, given are {len(own)}"
        )
    if leaf.dtype == "string":
        raise UserError(f"{leaf.name}: an input of text; expected numbers, {FUNCTION}")
    batch = leaf.shape[0]
    if batch and options.batch_size and batch != options.batch_size:
        raise UserError(f"--batch-size={options.batch_size}: the model is made for {batch} alone; leave it out")
    sizes = list(own or leaf.shape[1:])
    for k, fixed in enumerate(leaf.shape[1:]):
        if own and fixed and own[k] != fixed:
            raise UserError(f"--input-shape: {leaf.name} is {[*leaf.shape[1:]]} in the model, given is {list(own)}")
    if sizes and sizes[0] is None:
        sizes[0] = options.time_steps or TIME_STEPS
    if None in sizes:
        raise UserError(
            f"{leaf.name}: {[*leaf.shape]} leaves more than the steps open; expected --input-shape={leaf.name}=… with "
            f"{len(sizes)} sizes"
        )
    return SimpleNamespace(name=leaf.name, shape=(batch or options.batch_size or BATCH_SIZE, *sizes), dtype=leaf.dtype)


def batches(model: keras.Model, wanted: Any, padding: str) -> list[Any]:
    """STAGED batches of arrays for `specs`, in the model's structure."""
    generator = np.random.default_rng(1)
    layers = list(model._flatten_layers(include_self=False))
    embeddings = [layer for layer in layers if isinstance(layer, keras.layers.Embedding)]
    masking = next((layer.mask_value for layer in layers if isinstance(layer, keras.layers.Masking)), None)
    padded = padding != "none" and (masking is not None or any(e.mask_zero for e in embeddings))
    direct = _embedded(model)

    def drawn(leaf: SimpleNamespace) -> np.ndarray:
        shape = leaf.shape
        size = direct.get(leaf.name)
        ids = size is not None or (embeddings and not direct and len(shape) == 2) or "int" in leaf.dtype
        if ids:
            size = size or min((e.input_dim for e in embeddings), default=2)
            array, filler = generator.integers(min(1, size - 1), size, shape), 0
        elif leaf.dtype == "bool":
            return generator.integers(0, 2, shape).astype(bool)
        else:
            array, filler = generator.standard_normal(shape, dtype="float32"), masking
        if padded and filler is not None and len(shape) == (2 if ids else 3):
            lengths = generator.integers(max(1, shape[1] // 2), shape[1] + 1, shape[0])
            lengths[0] = shape[1]
            step = np.arange(shape[1])
            past = step >= lengths[:, None] if padding == "post" else step < shape[1] - lengths[:, None]
            array[past] = filler
        return array.astype("float32" if leaf.dtype == "bfloat16" else leaf.dtype)

    return [keras.tree.map_structure(drawn, wanted) for _ in range(STAGED)]


def _embedded(model: keras.Model) -> dict[str, int]:
    """Of a model with a graph: the inputs that go into an Embedding, by name, with the size of its vocabulary."""
    found, graph = {}, getattr(model, "_functional", None) or model  # of a Sequential
    inputs = {id(tensor): tensor.name for tensor in getattr(graph, "inputs", None) or ()}
    for operation in getattr(graph, "operations", ()) if inputs else ():
        if isinstance(operation, keras.layers.Embedding):
            for node in operation._inbound_nodes:
                found |= {inputs[id(t)]: operation.input_dim for t in node.input_tensors if id(t) in inputs}
    return found


def targets(model: keras.Model, outputs: Any, seed: int) -> Any:
    """Labels for the model's loss, in the structure of its outputs: classes where the loss is a sparse one, else numbers."""
    generator = np.random.default_rng(seed)
    leaves = keras.tree.flatten(outputs)
    losses = getattr(model, "loss", None)
    of_leaf = keras.tree.flatten(losses) if isinstance(losses, list | tuple | dict) else [losses] * len(leaves)

    def drawn(output: np.ndarray, loss: Any) -> np.ndarray:
        name = str(loss if isinstance(loss, str) else getattr(loss, "name", None) or getattr(loss, "__name__", ""))
        if "sparse" in name.lower():
            return generator.integers(0, output.shape[-1], output.shape[:-1])
        return generator.random(output.shape, dtype="float32")

    made = [drawn(leaf, of_leaf[k] if k < len(of_leaf) else None) for k, leaf in enumerate(leaves)]
    return keras.tree.pack_sequence_as(outputs, made)
