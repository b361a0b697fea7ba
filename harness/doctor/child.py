"""A process of the doctor: it loads the model, and either looks at it or tries one candidate. The parent is __main__.py.

Whatever it does to the model, the file is opened for reading alone.
"""

import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
sys.path[0] = str(PROJECT)  # in place of this folder, whose names a user's modules may have

import contextlib  # noqa: E402
import importlib  # noqa: E402
import importlib.util  # noqa: E402
import inspect  # noqa: E402
import math  # noqa: E402
import traceback  # noqa: E402
import warnings  # noqa: E402
from types import SimpleNamespace  # noqa: E402
from typing import Any  # noqa: E402

from harness.doctor import model_files  # noqa: E402
from harness.errors import UserError  # noqa: E402
from harness.frameworks import runtimes  # noqa: E402
from harness.record import machine  # noqa: E402
from harness.run import processes  # noqa: E402
from harness.run.child import one_line  # noqa: E402

GIB = 1024**3
ROUNDS = 5  # of the two models in turn
# Names of losses that Keras 3.15 writes into an .h5 file and does not find again.
UNREAD = ("mse", "mae", "mape", "msle")
PRECISIONS = {"float16": "fp16", "bfloat16": "bf16", "float64": "fp32"}  # compute dtype: whose limits hold


def main(job_path: str) -> int:
    job = processes.read_job(job_path)
    options = SimpleNamespace(**job["options"])
    try:
        runtime = runtimes.make("tensorflow", options.device, options.precision, machine.physical_cores())
        result = look(options, runtime) if job["task"] == "look" else attempt(options, runtime, job["candidate"])
    except UserError as error:
        result = {"error": str(error), "wrong_input": True}
    except Exception as error:
        traceback.print_exc()
        result = {"error": one_line(error)}
    processes.write_result(job, result)
    return 0


# --- the model --------------------------------------------------------------------------------------------------------------


def load(options: SimpleNamespace) -> tuple[Any, Any, Any]:
    """(the model, one batch of inputs and of targets where module:function returned them, else None).

    Raises:
        UserError: it cannot be loaded, and what to do.
    """
    import keras

    import models.cudnn.layers
    import models.wavefront.compiled_loop
    import models.wavefront.layer
    import models.wavefront.softmax_head  # noqa: F401 - the suite's own classes, which a file may hold

    keras.utils.set_random_seed(1)
    for name in options.imports:
        _import(name, f"--import={name}")
    if model_files.is_function(options.model):
        return _built(options.model)
    config = model_files.check(options.model)
    custom = [name for name in model_files.custom(config) if keras.saving.get_registered_object(name) is None]
    if custom:
        raise UserError(
            f"{options.model}: holds {', '.join(custom[:3])}{' and others' * (len(custom) > 3)}, which Keras does not know; "
            "expected --import=MODULE, whose classes are decorated with @keras.saving.register_keras_serializable()"
        )
    known = {} if config else {name: keras.losses.get(name) for name in UNREAD}
    try:
        model = keras.saving.load_model(options.model, known)  # in safe mode, which is Keras' default
        if not config and model.compiled:  # with the optimizer of an .h5 file Keras 3.15 does not train
            compile_like(model, model, {})
        return model, None, None
    except Exception as error:
        traceback.print_exc()
        raise UserError(f"{options.model}: Keras cannot load it: {one_line(error)}") from None


def _built(named: str) -> tuple[Any, Any, Any]:
    import keras

    module, _, name = named.rpartition(":")
    function = getattr(_import(module, named), name, None)
    if not callable(function):
        raise UserError(f"{named}: {module} has no function {name}")
    needed = [
        p.name for p in inspect.signature(function).parameters.values() if p.default is p.empty and p.kind in (0, 1, 3)
    ]
    if needed:
        raise UserError(f"{named}: needs {', '.join(needed)}; expected a function without arguments")
    try:
        made = function()
    except Exception as error:
        traceback.print_exc()
        raise UserError(f"{named}: raises {one_line(error)}") from None
    model, *rest = made if isinstance(made, tuple) else (made,)
    if not isinstance(model, keras.Model) or len(rest) > 2:
        raise UserError(
            f"{named}: returns {type(model).__name__}; expected a keras.Model, (model, inputs) or (model, inputs, targets)"
        )
    return model, *rest, *(None,) * (2 - len(rest))


def _import(name: str, where: str) -> Any:
    """A module by its name or its file, which is run once; found from this folder on, too."""
    file = Path(name if name.endswith(".py") else f"{name}.py").resolve()
    known = sys.modules.get(file.stem)
    if known is not None and getattr(known, "__file__", None) == str(file):
        return known
    try:
        if file.is_file():
            if str(file.parent) not in sys.path:
                sys.path.append(str(file.parent))
            spec = importlib.util.spec_from_file_location(file.stem, file)
            module = importlib.util.module_from_spec(spec)
            sys.modules.setdefault(file.stem, module)
            spec.loader.exec_module(module)
            return module
        if str(Path.cwd()) not in sys.path:
            sys.path.append(str(Path.cwd()))
        return importlib.import_module(name)
    except Exception as error:
        traceback.print_exc()
        raise UserError(f"{where}: {name} cannot be imported: {one_line(error)}") from None


def subject(options: SimpleNamespace, runtime: Any):
    """(the subject of the model that is asked for, its batch size). Raises UserError."""
    import keras
    import numpy as np

    from harness.doctor import inputs
    from harness.doctor.subject import Subject

    model, given, labels = load(options)
    if keras.backend.backend() != "tensorflow":
        raise UserError(f"Keras runs on {keras.backend.backend()}; expected tensorflow")
    if given is None:
        wanted = inputs.specs(model, options)
        check_memory(model, wanted, options)
        batches = inputs.batches(model, wanted, options.padding)
    else:
        batches = [keras.tree.map_structure(np.asarray, given)]
    targets = None if labels is None else [keras.tree.map_structure(np.asarray, labels)]
    made = Subject(model, batches, runtime, targets)
    if not model.built:
        made.model(made.batches[0])
    return made, int(keras.tree.flatten(batches[0])[0].shape[0])


def check_memory(model: Any, wanted: Any, options: SimpleNamespace) -> None:
    """UserError where the inputs alone, with the weights and what trains them, do not fit."""
    import keras

    from harness.doctor.inputs import STAGED

    batch = sum(4 * math.prod(leaf.shape) for leaf in keras.tree.flatten(wanted))
    weights = 4 * sum(math.prod(weight.shape) for weight in model.trainable_weights) * 4  # gradients and Adam's two
    there = machine.gpu_memory_bytes() if options.device == "gpu" else None
    for bytes_, most, whose in (
        (2 * STAGED * batch + weights, machine.memory_bytes(), "this machine has"),
        (STAGED * batch + weights, there, "this GPU has"),
    ):
        if most is not None and bytes_ > most:
            raise UserError(
                f"{bytes_ / GIB:,.0f} GiB of memory are needed at the least, {whose} {most / GIB:,.0f}; give a smaller "
                "--batch-size, --time-steps or --input-shape"
            )


# --- the two tasks ----------------------------------------------------------------------------------------------------------


def look(options: SimpleNamespace, runtime: Any) -> dict[str, Any]:
    """What the model is, what its recurrent layers run, how long it takes, and what may be tried."""
    import keras

    from harness.doctor import candidates, layers

    made, batch_size = subject(options, runtime)
    model = made.model
    found = layers.recurrent(model)
    if not found:
        raise UserError(f"{options.model}: no recurrent layer in it (LSTM, GRU, SimpleRNN, RNN): nothing to look at")
    notes: list[str] = []
    with layers.scoped(found):
        made.outputs()
        if note := prepared(made):
            notes.append(note)
        profile = made.profile(layers.SCOPES)
    ran = [layers.seen(profile, number) for number in range(len(found))]
    share = machine.CpuShare()
    forward, training = made.forward(ROUNDS), made.training(ROUNDS) if made.given is not None else None
    others = share.others_percent() if options.device == "cpu" else 0.0
    offered, not_tried = candidates.offered(model, facts(options, batch_size))
    kept = {
        name: value for name, value in compiled_with(model).items() if name in ("jit_compile", "steps_per_execution")
    }
    kept = {name: value for name, value in kept.items() if value not in (None, False, 1)}
    environment = {**runtime.environment(), **machine.facts(options.device)}
    return {
        "model": {
            "name": model.name,
            "kind": kind_of(model),
            "parameters": model.count_params(),
            "inputs": [
                {"shape": list(leaf.shape), "dtype": str(leaf.dtype)} for leaf in keras.tree.flatten(made.batches[0])
            ],
            "policy": model.dtype_policy.name,
            "jit_compile": bool(model.jit_compile),
            "run_eagerly": bool(model.run_eagerly),
            "steps_per_execution": made.per_call,
        },
        "environment": {
            key: environment.get(key)
            for key in ("gpu", "driver", "cpu", "cores", "tensorflow", "keras", "cuda", "cudnn")
        },
        "notes": notes + [_sentence(machine.OTHERS_NOTE)] * (others > machine.OTHERS_PERCENT),
        "layers": [
            {
                "place": each.place,
                "what": each.what,
                "rules": layers.by_the_rules(each, options.device),
                "kind": seen.kind,
                "seen": seen.words,
                "kernels": dict(sorted(seen.kernels.items(), key=lambda item: -item[1])[:4]),
                "contradicts": layers.contradicts(each, seen, options.device),
                "changes_model": each.changes_model,
                "masked": each.masked,
            }
            for each, seen in zip(found, ran, strict=True)
        ],
        "step": {
            "launches": profile["launches"],
            "device_ms": sum(profile["kernels"].values()) if options.device == "gpu" else None,
            "calls": made.per_call if made.given is not None else 1,
        },
        "forward_ms": forward.ms,
        "training_ms": training.ms if training else None,
        "precision": limits_of(model, options),
        "limit": limit(limits_of(model, options)),
        "candidates": [
            {
                "name": each.name,
                "what": each.what,
                "code": [*each.code, candidates.compile_line(each, kept)],
                "training": each.training,
            }
            for each in offered
        ],
        "not_tried": not_tried,
    }


def prepared(made: Any) -> str:
    """`Subject.prepare` with the model's own loss or, where that does not train, another; a note, or "".

    A model that does not train at all is timed forward only.
    """
    try:
        return made.prepare()
    except Exception as error:
        traceback.print_exc()
        first = one_line(error)
        if first.startswith("out of memory"):
            raise
    try:
        made.model.compile("adam", "mse", jit_compile=made.model.jit_compile, run_eagerly=made.model.run_eagerly)
        made.given = None
        made.prepare()
        return f"Its own loss does not train on made-up labels ({first}): timed with Adam and the mean squared error."
    except Exception as error:
        traceback.print_exc()
        made.given = None
        return f"No training step: {one_line(error)}"


def attempt(options: SimpleNamespace, runtime: Any, name: str) -> dict[str, Any]:
    """Try one candidate beside the model: its outputs against the model's, and both timed in turn."""
    from harness.doctor import candidates

    made, batch_size = subject(options, runtime)
    about = facts(options, batch_size)
    offered, _ = candidates.offered(made.model, about)
    candidate = next(each for each in offered if each.name == name)
    copy, _, _ = load(options)
    if not copy.built:
        copy(made.batches[0])
    copy.set_weights(made.model.get_weights())
    expected, mask = made.outputs(), made.mask()
    trains = not prepared(made).startswith("No training step")
    changed = candidate.make(copy, about)
    compile_like(changed, made.model, candidate.compiled)
    return compare(made, changed, expected, mask, trains, candidate)


def compare(made: Any, changed: Any, expected: Any, mask: Any, trains: bool, candidate: Any) -> dict[str, Any]:
    """The changed model's outputs and times beside those of `made`, the model as it came."""
    from harness.doctor.subject import Subject, difference

    other = Subject(changed, made.batches, made.runtime, made.given)
    apart = difference(other.outputs(), expected, mask)
    result = {"difference": apart if math.isfinite(apart) else None, "jit_compile": bool(changed.jit_compile)}
    if trains:
        other.fit(other.per_call)
    pairs = {"forward_ms": lambda each: each.forward().ms} if not candidate.training else {}
    if trains:
        pairs["training_ms"] = lambda each: each.training(1).ms
    for key, timed in pairs.items():
        turns = [[timed(each) for each in (made, other)] for _ in range(ROUNDS)]
        result[key] = {whose: [ms for turn in turns for ms in turn[k]] for k, whose in enumerate(("own", "its"))}
    return result


def compile_like(model: Any, other: Any, changes: dict[str, Any]) -> None:
    """Compile a model as another one is, but for these arguments, with an optimizer of its own."""
    given = {**compiled_with(other), **changes}
    optimizer = getattr(other.optimizer, "inner_optimizer", other.optimizer)
    given["optimizer"] = type(optimizer).from_config(optimizer.get_config())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that XLA is off: `jit_compile` of the model says so afterwards
        model.compile(**given)
    if changes.get("jit_compile") and not model.jit_compile:
        raise ValueError("Keras turns jit_compile off: a layer of the model does not support XLA")


def compiled_with(model: Any) -> dict[str, Any]:
    """The arguments of `compile`, as objects."""
    kept = getattr(model, "_compile_config", None)
    return dict(kept.config) if kept is not None else {}


def _sentence(words: str) -> str:
    return f"{words[0].upper()}{words[1:]}."


def facts(options: SimpleNamespace, batch_size: int) -> SimpleNamespace:
    return SimpleNamespace(
        device=options.device, batch_size=batch_size, steps_per_execution=options.steps_per_execution
    )


def kind_of(model: Any) -> str:
    import keras

    from harness.doctor.stacks import is_graph

    if isinstance(model, keras.Sequential):
        return "Sequential"
    return "Functional" if is_graph(model) else f"subclassed ({type(model).__name__})"


def limits_of(model: Any, options: SimpleNamespace) -> str:
    """The precision whose limits the outputs have: the coarsest in which a layer computes."""
    dtypes = {getattr(layer, "compute_dtype", "") for layer in model._flatten_layers()}
    for dtype in ("bfloat16", "float16"):
        if dtype in dtypes:
            return PRECISIONS[dtype]
    return options.precision


def limit(precision: str) -> float:
    """Of max|a − b| / max|b| of the outputs: that of the proof (docs/proof.md)."""
    from harness.measure.proof import LIMITS

    return LIMITS[precision].outputs


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main(sys.argv[2]))
