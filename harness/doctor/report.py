"""The doctor's report in markdown, from what its processes found."""

import statistics
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

FASTER = 1.05  # the least ratio that is called faster; the blocks of the two may not overlap either


def found_part(model: str, options: Any, found: Mapping[str, Any]) -> str:
    """What runs and how long it takes: the report before anything is tried.

    Args:
        model: as on the command line.
        options: device, padding.
        found: harness.doctor.child.look's.
    """
    head = [f"# {model}: what runs, and what would be faster", _about(options, found)]
    return _joined([*head, "## Recurrent layers", _layers(found), "## How long it takes", _times(found)])


def advice_part(
    found: Mapping[str, Any], tried: Mapping[str, Mapping[str, Any]], interrupted: Sequence[str] = ()
) -> str:
    """The rest: what was tried, and what to change.

    Args:
        found: harness.doctor.child.look's.
        tried: by a candidate's name what harness.doctor.child.attempt returned, or {"error": why it could not}.
        interrupted: candidates that were to be tried, had the report not been ended before.
    """
    parts = ["## What was tried", _tried(found, tried)] if tried else []
    parts += [f"Interrupted: {', '.join(interrupted)} not tried."] if interrupted else []
    return _joined([*parts, "## What to change", _changes(found, tried)])


def _joined(parts: Sequence[str]) -> str:
    return "\n\n".join(part for part in parts if part) + "\n"


def _about(options: Any, found: Mapping[str, Any]) -> str:
    about, here = found["model"], found["environment"]
    device = here["gpu"] if options.device == "gpu" else f"{here['cpu']}, {here['cores']} cores"
    versions = [f"TensorFlow {here['tensorflow']}", f"Keras {here['keras']}"]
    versions += [f"driver {here['driver']}", f"CUDA {here['cuda']}", f"cuDNN {here['cudnn']}"] if here["gpu"] else []
    inputs = " and ".join(f"{each['dtype']} {each['shape']}" for each in about["inputs"])
    how = [f"jit_compile={about['jit_compile']}", f"steps_per_execution={about['steps_per_execution']}"]
    how += ["run_eagerly=True"] * about["run_eagerly"]
    lines = [
        f"{device}; {', '.join(versions)}.",
        f"{about['kind']}, {about['parameters']:,} parameters, policy {about['policy']}, {found['precision']}; inputs {inputs}; "
        f"{', '.join(how)}.",
        *found["notes"],
    ]
    return "\n\n".join(lines)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)])


def _layers(found: Mapping[str, Any]) -> str:
    rows = [[f"`{each['place']}`", each["what"], each["rules"], each["seen"]] for each in found["layers"]]
    parts = [_table(["layer", "is", "by Keras' rules", "seen by the profiler in a training step"], rows)]
    for each in found["layers"]:
        if each["contradicts"]:
            parts.append(
                f"`{each['place']}`: Keras' rules and the profiler differ. The profiler is right: {each['kind']}."
            )
        if each["kernels"]:
            names = ", ".join(f"`{name[:60]}` {ms:.3g} ms" for name, ms in each["kernels"].items())
            parts.append(f"`{each['place']}` on the GPU: {names}.")
    return "\n\n".join(parts)


def _times(found: Mapping[str, Any]) -> str:
    batch = found["model"]["inputs"][0]["shape"][0]
    rows = []
    for what, ms in (("forward pass", found["forward_ms"]), ("training step of `fit`", found["training_ms"])):
        if ms:
            middle = statistics.median(ms)
            rows.append([what, _ms(middle), f"{_ms(min(ms))} to {_ms(max(ms))}", f"{1e3 * batch / middle:,.0f}"])
    parts = [_table(["", "ms", "range", "sequences/s"], rows)]
    step = found["step"]
    if step["device_ms"] is not None and found["training_ms"]:
        busy = step["device_ms"] / step["calls"]
        parts.append(
            f"A training step launches {step['launches'] // step['calls']:,} kernels, which keep the GPU busy for "
            f"{_ms(busy)} ms of {_ms(statistics.median(found['training_ms']))} ms."
        )
    return "\n\n".join(parts)


def _ms(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def agrees(found: Mapping[str, Any], result: Mapping[str, Any]) -> bool:
    """Whether a candidate's outputs are within the limit."""
    return result.get("difference") is not None and result["difference"] <= found["limit"]


def speedup(times: Mapping[str, Sequence[float]] | None) -> float | None:
    """How many times faster, by medians of turns in one process; None where nothing was timed."""
    return statistics.median(times["own"]) / statistics.median(times["its"]) if times else None


def is_faster(times: Mapping[str, Sequence[float]] | None) -> bool:
    return bool(times) and speedup(times) >= FASTER and max(times["its"]) < min(times["own"])


def is_slower(times: Mapping[str, Sequence[float]] | None) -> bool:
    return bool(times) and speedup(times) <= 1 / FASTER and min(times["its"]) > max(times["own"])


def verdict(found: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    """Of one candidate: recommended, for what, or why not."""
    if "error" in result:
        return f"could not run: {textwrap.shorten(result['error'], 200, placeholder=' …')}"
    if not agrees(found, result):
        return "not recommended: its outputs differ by more than the limit"
    faster = [word for key, word in KINDS.items() if is_faster(result.get(key))]
    slower = [word for key, word in KINDS.items() if is_slower(result.get(key))]
    found_of = {"faster": faster, "slower": slower}
    return (
        "; ".join(f"{what}: {' and '.join(words)}" for what, words in found_of.items() if words) or "not clearly faster"
    )


KINDS = {"training_ms": "training", "forward_ms": "forward"}


def _tried(found: Mapping[str, Any], tried: Mapping[str, Mapping[str, Any]]) -> str:
    rows = []
    for each in found["candidates"]:
        if (result := tried.get(each["name"])) is None:
            continue
        cells = []
        for key in KINDS:
            times = result.get(key)
            own, its = (_ms(statistics.median(times[whose])) for whose in ("own", "its")) if times else ("", "")
            cells.append(f"{its} against {own} ({speedup(times):.2f}×)" if times else "-")
        apart = result.get("difference")
        difference = (
            "-" if "error" in result else "not finite, or of another shape" if apart is None else f"{apart:.1e}"
        )
        rows.append([f"{each['name']}", each["what"], *cells, difference, verdict(found, result)])
    head = ["candidate", "what it is", "training, ms", "forward, ms", "outputs differ by", ""]
    text = (
        "Each ran in a process of its own, in turn with the model as it is: its ms against the "
        "model's there, and how many times as fast. Recommended is only what was faster in every turn: its slowest turn "
        f"quicker than the model's quickest, and {FASTER:g}× as fast or more by medians. Outputs are "
        f"those of the forward pass, max|a − b| / max|b|; the limit is {found['limit']:g} ({found['precision']}). Trainings are "
        "not compared."
    )
    return f"{_table(head, rows)}\n\n{text}"


def best(found: Mapping[str, Any], tried: Mapping[str, Mapping[str, Any]], key: str) -> str | None:
    """The candidate that is fastest in "training_ms" or "forward_ms", of those that agree and are faster; None: none is."""
    good = {
        name: speedup(result[key])
        for name, result in tried.items()
        if "error" not in result and agrees(found, result) and is_faster(result.get(key))
    }
    return max(good, key=good.get) if good else None


def _changes(found: Mapping[str, Any], tried: Mapping[str, Mapping[str, Any]]) -> str:
    parts, winners = [], {}
    for key, word in KINDS.items():
        if name := best(found, tried, key):
            winners.setdefault(name, []).append((word, speedup(tried[name][key])))
    if len(winners) > 1:
        parts.append("These two were tried one at a time, not together.")
    for name, gains in winners.items():
        code = next(each["code"] for each in found["candidates"] if each["name"] == name)
        gain = " and ".join(f"{word} {times:.2f} times as fast" for word, times in gains)
        lost = [word for key, word in KINDS.items() if (speedup(tried[name].get(key)) or 1) < 1 / FASTER]
        gain += "".join(f"; {word} slower" for word in lost)
        parts.append(f"**{name}**: {gain}.")
        parts.append("```python\n" + "\n".join(code) + "\n```")
    if winners:
        ours = any(
            "wavefront_lstm" in line for each in found["candidates"] if each["name"] in winners for line in each["code"]
        )
        install = "; `wavefront_lstm` installs by `pip install .` in the checkout" if ours else ""
        parts.append(f"`model`, `optimizer` and `loss` are yours{install}.")
    elif tried:
        parts.append("Nothing that was tried is clearly faster and computes the same. Leave it as it is.")
    else:
        parts.append("No candidate was tried.")
    lost = [(each["place"], reason) for each in found["layers"] for reason in each["changes_model"]]
    if lost:
        parts.append("cuDNN would need another model, to be trained anew:")
        parts.append("\n".join(f"- `{place}`: {reason}" for place, reason in lost))
    if found["not_tried"]:
        parts.append("Not tried:\n\n" + "\n".join(f"- {reason}" for reason in found["not_tried"]))
    return "\n\n".join(parts)
