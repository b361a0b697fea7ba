"""What may run a model faster: how each candidate makes another model of a copy of it, and the lines that a user would write.

Whether a candidate computes the same is not its own claim: harness/doctor/child.py compares the outputs.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import keras

from harness.doctor import layers
from harness.doctor.stacks import Run, chain_of, convertible, in_chains, inner, is_graph, replace, with_stacks
from models.wavefront import CompiledLoop, WavefrontLSTM, convert

WITH_CUDNN = keras.layers.LSTM | keras.layers.GRU
NESTED = "XLA does not compile the gradient of a loop of Keras' own layers within its loop"
CELLS = {"LSTMCell": keras.layers.LSTM, "GRUCell": keras.layers.GRU, "SimpleRNNCell": keras.layers.SimpleRNN}


@dataclass
class Candidate:
    """One way to run the same model.

    Attributes:
        name: as in --try and in the report.
        what: what is changed, in a line.
        code: the lines to write, without the one that compiles.
        make: (a copy of the model, facts) → the changed model, which is compiled afterwards. The copy is used up.
        compiled: the arguments of `compile` that change.
        training: whether only `fit` changes.
    """

    name: str
    what: str
    code: list[str]
    make: Callable[[keras.Model, SimpleNamespace], keras.Model] = lambda model, facts: model
    compiled: dict[str, Any] = field(default_factory=dict)
    training: bool = False


def offered(model: keras.Model, facts: SimpleNamespace) -> tuple[list[Candidate], list[str]]:
    """(what to try, what is not tried and why).

    facts: device ("gpu" or "cpu"), batch_size, steps_per_execution: the one to try.
    """
    gpu, per_call = facts.device == "gpu", facts.steps_per_execution
    recurrent = list(_keras_layers(model))
    runs, not_tried = convertible(model, "lstm")
    not_tried = [f"WavefrontLSTM for {reason}" for reason in not_tried]
    known = in_chains(model)
    not_tried += [
        f"WavefrontLSTM for {each.place}: within another layer, or called with an initial state"
        for each in layers.recurrent(model)
        if isinstance(each.layer, keras.layers.LSTM)
        and id(each.layer) not in known
        and each.layer.name not in str(not_tried)
    ]
    own = [each for each in layers.recurrent(model) if isinstance(each.layer, WavefrontLSTM)]
    back = [each.layer for each in own if _goes_back(model, each.layer)]
    not_tried += [
        f"keras.layers.LSTM for {each.place}: with states, layer normalisation, or in a model that is no chain"
        for each in own
        if each.layer not in back
    ]
    found = [*_of_settings(model, recurrent, gpu)]
    if (model.steps_per_execution or 1) < per_call:
        found.append(Candidate(f"steps_per_execution={per_call}", f"`fit` runs {per_call} steps in one call", [],
                               compiled={"steps_per_execution": per_call}, training=True))  # fmt: skip
    if gpu and (every := convertible(model)[0]):
        found.append(Candidate("cuDNN stack", "each chain in one call of cuDNN: CudnnLSTMLayer and its family",
                               _stack_code(model, every, "models.cudnn.convert"), _cudnn, {"jit_compile": False}))  # fmt: skip
    if runs:
        most = max(len(run.layers) for run in runs)
        what = f"one layer for {most} LSTM layers" if most > 1 else "in the place of each LSTM"
        what += ", in CUDA kernels where it has them, else under XLA" if gpu else ", under XLA"
        code = _stack_code(model, runs, "wavefront_lstm")
        found.append(Candidate("WavefrontLSTM", what, code, _wavefront, {"jit_compile": True}))
    if own and len(back) == len(own):
        what = "in the place of WavefrontLSTM" + ", which calls cuDNN" * gpu
        found.append(Candidate("keras.layers.LSTM", what, _back_code(model, back), _back, {"jit_compile": False}))
    converted = {id(inner(layer)) for run in runs for layer in run.layers}
    loops = [
        each for each in recurrent if not each.unroll and not each.go_backwards
    ]  # of a Bidirectional the forward one
    if chain_of(model) is None:
        not_tried.append("CompiledLoop: it is a keras.Sequential, and this model is no chain of layers with one input")
    elif any(id(each) not in converted for each in loops):
        not_tried.append(f"CompiledLoop: {NESTED}")
    else:
        loop = {"jit_compile": True, "steps_per_execution": per_call}
        if not loops:
            what = f"`fit` runs {per_call} steps in one XLA program"
            found.append(Candidate("CompiledLoop", what, _loop_code(model), _loop, loop, training=True))
        if runs:
            lines = _stack_code(model, runs, "wavefront_lstm", "CompiledLoop")
            what = f"the same, {per_call} steps of `fit` in one program"
            found.append(Candidate("WavefrontLSTM in CompiledLoop", what, lines, _wavefront_loop, loop, training=True))
    return found, not_tried


def _of_settings(model: keras.Model, recurrent: Sequence[Any], gpu: bool) -> Iterator[Candidate]:
    """Settings of Keras alone."""
    if model.run_eagerly:
        yield Candidate("run_eagerly=False", "a graph in place of single ops", [], compiled={"run_eagerly": False})
    named = [each for each in recurrent if isinstance(each, WITH_CUDNN) and each.use_cudnn is False]
    if gpu and named:
        yield Candidate("use_cudnn='auto'", "cuDNN where Keras' rules allow it",
                        [_built_with(named, "without use_cudnn=False")], _use_cudnn, {"jit_compile": False})  # fmt: skip
    if named := [each for each in recurrent if each.unroll]:
        yield Candidate("unroll=False", "a loop over the steps, or cuDNN, in place of one graph of all",
                        [_built_with(named, "with unroll=False")], _no_unroll)  # fmt: skip
    if model.jit_compile:
        yield Candidate("jit_compile=False", "without XLA", [], compiled={"jit_compile": False})
    elif not model.run_eagerly:
        what = "XLA in the place of cuDNN" if gpu and _xla_code(recurrent, gpu) else "XLA compiles the steps"
        yield Candidate("jit_compile=True", what, _xla_code(recurrent, gpu), _for_xla, {"jit_compile": True})
    if named := [each for each in recurrent if type(each) is keras.layers.RNN and _kind_of_cell(each)]:
        kinds = ", ".join(sorted({_kind_of_cell(each).__name__ for each in named}))
        yield Candidate("layers for cells", "the same weights in a layer that knows cuDNN",
                        [_built_with(named, f"as keras.layers.{kinds} in place of RNN(cell)")], _whole_layers)  # fmt: skip


# --- the changes ------------------------------------------------------------------------------------------------------------


def _keras_layers(model: keras.Model) -> Iterator[Any]:
    return (each.layer for each in layers.recurrent(model) if isinstance(each.layer, keras.layers.RNN))


def _use_cudnn(model, facts):
    for layer in _keras_layers(model):
        if isinstance(layer, WITH_CUDNN):
            layer.use_cudnn = "auto"
    return model


def _no_unroll(model, facts):
    for layer in _keras_layers(model):
        layer.unroll = False
    return model


def _for_xla(model, facts):
    """Keras turns XLA off for a model with a layer that may call cuDNN."""
    for layer in _keras_layers(model):
        if isinstance(layer, WITH_CUDNN):
            layer.use_cudnn, layer.supports_jit = False, True
    return model


def _kind_of_cell(layer: Any) -> Any:
    """The class of keras.layers that is an RNN of this layer's cell; None of another cell."""
    return CELLS.get(type(layer.cell).__name__) if type(layer.cell).__module__.startswith("keras.") else None


def _whole_layers(model, facts):
    replaced = {}
    for layer in _keras_layers(model):
        if type(layer) is keras.layers.RNN and (kind := _kind_of_cell(layer)):
            own = {name: value for name, value in layer.get_config().items() if name != "cell"}
            new = kind(**{**layer.cell.get_config(), **own})
            new.build(layer._build_shapes_dict["sequences_shape"])
            new.set_weights(layer.get_weights())
            replaced[id(layer)] = new
    return replace(model, replaced)


def _stacked(model, facts, from_keras_layers, runs):
    def stack(run: Run):
        dropout = {"dropout": run.dropout} if run.dropout else {}
        return from_keras_layers(run.layers, stateful=False, return_state=False, **dropout)

    return with_stacks(model, runs, stack, facts.batch_size)


def _cudnn(model, facts):
    from models.cudnn.convert import from_keras_layers

    return _stacked(model, facts, from_keras_layers, convertible(model)[0])


def _wavefront(model, facts):
    runs = convertible(model, "lstm")[0]
    return _for_xla(_stacked(model, facts, convert.from_keras_layers, runs), facts)


def _goes_back(model: keras.Model, layer: WavefrontLSTM) -> bool:
    """Whether keras.layers.LSTM can take the layer's place in a chain."""
    plain = not (layer.stateful or layer.return_state or layer.layer_normalization)
    return plain and chain_of(model) is not None and layer in chain_of(model)


def _back(model, facts):
    chain = []
    for layer in chain_of(model):
        if not isinstance(layer, WavefrontLSTM):
            chain.append(layer)
            continue
        for place, new in enumerate(convert.to_keras_layers(layer)):
            chain += [keras.layers.Dropout(layer.dropout)] if place and layer.dropout else []
            chain.append(new)
    return keras.Sequential(chain)


def _loop(model, facts):
    return CompiledLoop(chain_of(_for_xla(model, facts)))


def _wavefront_loop(model, facts):
    return _loop(_wavefront(model, facts), facts)


# --- the lines to write -----------------------------------------------------------------------------------------------------


def compile_line(candidate: Candidate, kept: dict[str, Any]) -> str:
    """The line that compiles; kept: what the model was compiled with, besides optimizer, loss and metrics."""
    options = {**kept, **candidate.compiled}
    words = "".join(
        f", {name}={value!r}" for name, value in options.items() if not (name == "run_eagerly" and not value)
    )
    return f"model.compile(optimizer, loss{words})"


def _built_with(named: Sequence[Any], how: str) -> str:
    return f"# where the model is built: {', '.join(sorted({each.name for each in named}))} {how}"


def _xla_code(recurrent: Sequence[Any], gpu: bool) -> list[str]:
    named = [each for each in recurrent if isinstance(each, WITH_CUDNN) and each.use_cudnn is not False] if gpu else []
    return [_built_with(named, "with use_cudnn=False")] if named else []


def _loop_code(model: keras.Model) -> list[str]:
    return [
        "from wavefront_lstm import CompiledLoop",
        f"model = CompiledLoop([{_input()}, *model.layers[{_first(model)}:]])",
    ]


def _input() -> str:
    return "keras.Input(batch_shape=model.inputs[0].shape, dtype=model.inputs[0].dtype)"


def _first(model: keras.Model) -> int:
    """The first of `model.layers` that is none of Keras' inputs."""
    return int(isinstance(model.layers[0], keras.layers.InputLayer))


def _stack_code(model: keras.Model, runs: Sequence[Run], module: str, kind: str = "keras.Sequential") -> list[str]:
    """Converts the layers of a model that is there, as this module does; kind: what a chain of layers becomes."""
    names = [kind, "from_keras_layers"] if kind == "CompiledLoop" else ["from_keras_layers"]
    lines, new = [f"from {module} import {', '.join(names)}"], {}
    if not all(is_graph(run.owner) for run in runs):
        return _subclassed_code(runs, module)
    for number, run in enumerate(runs):
        name = "stack" if len(runs) == 1 else f"stack_{number}"
        owner = "model" + "".join(f'.get_layer("{part}")' for part in run.path)
        options = [f"dropout={run.dropout:g}"] * bool(run.dropout)
        options += ["stateful=False"] * run.stateful
        taken = ", ".join(f'{owner}.get_layer("{layer.name}")' for layer in run.layers)
        lines.append(f"{name} = from_keras_layers([{taken}]{''.join(f', {text}' for text in options)})")
        if run.stateful:
            lines += [
                f'stateful = type({name}).from_config({{**{name}.get_config(), "stateful": True}})',
                f"stateful.build((model.inputs[0].shape[0], None, {name}.spec.input_size))",
                f"stateful.set_canonical({name}.get_canonical())",
            ]
            name = "stateful"
        new |= {layer.name: "" for layer in (*run.layers, *run.between)}
        new[run.layers[0].name] = name
    if chain_of(model) is not None and all(run.owner is model for run in runs):
        return [*lines, f"model = {kind}([{_input()}, {_chain_code(model, new)}])"]
    kept = ", ".join(f'"{name}": {code or "keras.layers.Identity()"}' for name, code in new.items())
    lines.append(f"new = {{{kept}}}")
    options = ", recursive=True" * any(run.path for run in runs)
    if not isinstance(model, keras.Sequential):  # a graph that was loaded names masks, which an Identity does not take
        lines.append(
            "call = lambda each, x, *more, **how: each(x) if isinstance(each, keras.layers.Identity) else each(x, *more, **how)"
        )
        options += ", call_function=call"
    lines.append(
        f"model = keras.models.clone_model(model, clone_function=lambda each: new.get(each.name, each){options})"
    )
    if kind == "CompiledLoop":
        lines.append(f"model = CompiledLoop([{_input()}, *model.layers[{_first(model)}:]])")
    return lines


def _back_code(model: keras.Model, back: Sequence[WavefrontLSTM]) -> list[str]:
    lines, new = ["from wavefront_lstm import to_keras_layers"], {}
    for number, layer in enumerate(back):
        name = "stack" if len(back) == 1 else f"stack_{number}"
        lines.append(f'{name} = to_keras_layers(model.get_layer("{layer.name}"))')
        if layer.dropout:
            between = f"(keras.layers.Dropout({layer.dropout:g}), each)"
            lines.append(f"{name} = [{name}[0], *(new for each in {name}[1:] for new in {between})]")
        new[layer.name] = f"*{name}"
    return [*lines, f"model = keras.Sequential([{_input()}, {_chain_code(model, new)}])"]


def _chain_code(model: keras.Model, new: dict[str, str]) -> str:
    """The layers of a chain, as items of a list: `new` names what takes a layer's place, or "" for nothing."""
    items, begin = [], _first(model)
    for place, layer in enumerate(model.layers):
        if layer.name in new:
            items += [f"*model.layers[{begin}:{place}]"] * (place > begin) + [new[layer.name]] * bool(new[layer.name])
            begin = place + 1
    return ", ".join([*items, *[f"*model.layers[{begin}:]"] * (begin < len(model.layers))])


def _subclassed_code(runs: Sequence[Run], module: str) -> list[str]:
    kind = "WavefrontLSTM" if module == "wavefront_lstm" else "CudnnLSTMLayer"
    return [
        f"# in your class: {', '.join(layer.name for run in runs for layer in run.layers)} as {kind}(units, return_sequences=…)",
        f"from {module} import from_keras_layers",
        "new_layer.set_canonical(from_keras_layers([old_layer]).get_canonical())  # with the weights that were trained",
    ]
