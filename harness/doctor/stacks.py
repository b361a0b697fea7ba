"""Chains of recurrent layers in a model, of which one layer can take the place, and how it takes it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras

from models.wavefront.convert import OWN
from models.wavefront.keras_config import from_keras_config

Link = tuple[Any, Any]  # (the Dropout before a layer or None, the layer)


@dataclass
class Run:
    """Recurrent layers that follow each other, the lowest first, which one stack can compute.

    Attributes:
        owner: the model that they are in; `path`: the names of it and its owners, from below the whole model.
        dropout: the rate of `between`, the Dropout layers between them, which the stack has itself.
    """

    owner: Any
    path: tuple[str, ...]
    layers: list[Any] = field(default_factory=list)
    between: list[Any] = field(default_factory=list)
    dropout: float = 0.0

    @property
    def stateful(self) -> bool:
        return inner(self.layers[0]).stateful


def inner(layer: Any) -> Any:
    """Of a Bidirectional its forward layer; else the layer."""
    return getattr(layer, "forward_layer", layer)


def is_graph(model: Any) -> bool:
    """Whether Keras knows how a model's layers are connected: Sequential and Functional ones, and no subclassed model."""
    return isinstance(model, keras.Sequential) or hasattr(model, "operations")


def convertible(model: keras.Model, mode: str = "") -> tuple[list[Run], list[str]]:
    """(the longest runs that one stack can take the place of, why other layers cannot be in one).

    A chain is cut where kinds, units or settings change, and where the Dropout between two layers has another rate.

    mode: "lstm", of WavefrontLSTM; "" of cuDNN's, for GRU and SimpleRNN too.
    """
    runs, refused = [], []
    for owner, path, chain, reasons in _chains(model, ()):
        refused += reasons
        run = Run(owner, path)
        for gap, layer in chain:
            rate = gap.rate if gap else 0.0
            wrong = _refused(run.layers, layer, mode)
            if run.layers and (wrong or (len(run.layers) > 1 and rate != run.dropout)):
                runs.append(run)
                run = Run(owner, path)
                wrong = _refused((), layer, mode)
            if wrong:
                refused.append(f"{layer.name}: {wrong}")
                continue
            if run.layers:
                run.dropout, run.between = rate, [*run.between, *([gap] if gap else [])]
            run.layers.append(layer)
        if run.layers:
            runs.append(run)
    return runs, list(dict.fromkeys(refused))


def in_chains(model: keras.Model) -> set[int]:
    """The ids of the layers that `convertible` looks at, the halves of a Bidirectional too: not those within another layer."""
    found = set()
    for _, _, chain, _ in _chains(model, ()):
        for _, layer in chain:
            found |= {id(half) for half in (inner(layer), getattr(layer, "backward_layer", layer))}
    return found


def _refused(below: Sequence[Any], layer: Any, mode: str) -> str:
    """Why a layer cannot be one more of a stack, or ""."""
    one = inner(layer)
    if one.return_state:
        return "return_state=True: a stack's states have another form"
    try:
        fields = from_keras_config([keras.layers.serialize(each) for each in (*below, layer)], OWN if mode else ())
    except (ValueError, KeyError, TypeError) as error:
        return " ".join(str(error).split()).removeprefix(f"layer {len(below)}: ").removeprefix("forward ")[:200]
    if mode and fields["mode"] != mode:
        return f"WavefrontLSTM is for LSTM layers, and this is {type(one).__name__}"
    return ""


def _chains(owner: Any, path: tuple[str, ...]) -> Iterator[tuple[Any, tuple[str, ...], list[Link], list[str]]]:
    """(owner, path, chain, layers that can be in none, with the reason) of a model and of the models in it."""
    own = [layer for layer in owner._flatten_layers(include_self=False, recursive=False) if layer is not owner]
    recurrent = [layer for layer in own if isinstance(inner(layer), keras.layers.RNN)]
    if is_graph(owner):
        after, fed = _readers(owner)
        reasons = [
            f"{layer.name}: called with an initial state, and a stack's states have another form"
            for layer in recurrent
            if id(layer) in fed
        ]
        recurrent = [layer for layer in recurrent if id(layer) not in fed]
        following = {id(layer): _next(layer, after, fed) for layer in recurrent}
        inside = {id(link[1]) for link in following.values() if link}
        for first in (layer for layer in recurrent if id(layer) not in inside):
            chain = [(None, first)]
            while link := following[id(chain[-1][1])]:
                chain.append(link)
            yield owner, path, chain, reasons
            reasons = []
        if reasons:
            yield owner, path, [], reasons
    else:  # only its `call` knows what follows what
        for layer in recurrent:
            yield owner, path, [(None, layer)], []
    for layer in own:
        if isinstance(layer, keras.Model):
            yield from _chains(layer, (*path, layer.name))


def _next(layer: Any, after: Mapping[int, list], fed: set[int]) -> Link | None:
    """The recurrent layer that alone reads this one's steps, with the Dropout before it."""
    readers, gap = after.get(id(layer), []), None
    if len(readers) == 1 and type(readers[0]) is keras.layers.Dropout and readers[0].noise_shape is None:
        gap, readers = readers[0], after.get(id(readers[0]), [])
    alone = len(readers) == 1 and isinstance(inner(readers[0]), keras.layers.RNN) and id(readers[0]) not in fed
    return (gap, readers[0]) if alone and inner(layer).return_sequences else None


def _readers(owner: Any) -> tuple[dict[int, list], set[int]]:
    """(who reads a layer's output, by its id, once per call; the layers that are called with more than one tensor).

    What a model returns is read by the model.
    """
    if isinstance(owner, keras.Sequential):
        return {id(a): [b] for a, b in zip(owner.layers, [*owner.layers[1:], owner], strict=True)}, set()
    after, fed = {}, set()
    for node in (node for nodes in owner._nodes_by_depth.values() for node in nodes):
        for tensor in node.input_tensors:
            after.setdefault(id(tensor._keras_history.operation), []).append(node.operation)
        if len(node.input_tensors) > 1:
            fed.add(id(node.operation))
    for tensor in keras.tree.flatten(owner.outputs):
        after.setdefault(id(tensor._keras_history.operation), []).append(owner)
    return after, fed


def chain_of(model: keras.Model) -> list[Any] | None:
    """All layers of a model with one input that is a chain, as keras.Sequential takes them; None of any other."""
    if not is_graph(model) or len(model.inputs or ()) != 1 or len(model.outputs) != 1:
        return None
    begin = keras.Input(batch_shape=model.inputs[0].shape, dtype=model.inputs[0].dtype, name=model.inputs[0].name)
    if isinstance(model, keras.Sequential):
        return [begin, *model.layers]
    after, fed = _readers(model)
    found = [model.inputs[0]._keras_history.operation]
    while len(readers := after.get(id(found[-1]), [])) == 1 and readers[0] is not model:
        found.append(readers[0])
    whole = len(found) == len(model.operations) and not fed
    return [begin, *found[1:]] if whole and all(isinstance(each, keras.layers.Layer) for each in found) else None


def with_stacks(model: keras.Model, runs: Sequence[Run], stack: Callable[[Run], Any], batch_size: int) -> keras.Model:
    """The model with one layer of `stack` in place of each run; a stateful one is made for this batch size."""
    replaced = {}
    for run in runs:
        new = stack(run)
        if run.stateful:
            kept = type(new).from_config({**new.get_config(), "stateful": True})
            kept.build((batch_size, None, new.spec.input_size))
            kept.set_canonical(new.get_canonical())
            new = kept
        replaced |= {id(layer): keras.layers.Identity(name=layer.name) for layer in (*run.layers[1:], *run.between)}
        replaced[id(run.layers[0])] = new
    return replace(model, replaced)


def replace(model: keras.Model, replaced: Mapping[int, Any]) -> keras.Model:
    """The model with other layers in the place of some, by id. All others are the same objects: `model` is used up.

    Raises:
        ValueError: a layer is held where it cannot be replaced, such as in a list of a subclassed model.
    """
    if is_graph(model):
        compiled, model.compiled = (
            model.compiled,
            False,
        )  # clone_model would compile, by a config that may not be readable
        try:
            new = keras.models.clone_model(
                model,
                clone_function=lambda layer: replaced.get(id(layer)) or _in_attributes(layer, replaced),
                call_function=None if isinstance(model, keras.Sequential) else _called,
                recursive=True,
            )
        finally:
            model.compiled = compiled
    else:
        new = _in_attributes(model, replaced)
    for layer in new._flatten_layers(include_self=False):
        if id(layer) in replaced:
            raise ValueError(f"{layer.name}: held in a list or dict of a subclassed model, where it was not replaced")
    return new


def _called(layer: Any, x: Any, *more: Any, **named: Any) -> Any:
    """A graph that was loaded names masks, which an Identity does not take."""
    return layer(x) if isinstance(layer, keras.layers.Identity) else layer(x, *more, **named)


def _in_attributes(layer: Any, replaced: Mapping[int, Any]) -> Any:
    """A subclassed model whose attributes are the other layers; any other layer as it is."""
    if not isinstance(layer, keras.Model) or is_graph(layer):
        return layer
    for name, value in list(vars(layer).items()):
        if not isinstance(value, keras.layers.Layer):
            continue
        new = replaced.get(id(value)) or (replace(value, replaced) if isinstance(value, keras.Model) else value)
        if new is not value:
            layer._tracker.unlock()  # a model that is built takes no layer else, and forgets none
            setattr(layer, name, new)
            layer._layers[:] = [each for each in layer._layers if each is not value]
            layer._tracker.lock()
    return layer
