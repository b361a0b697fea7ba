"""Tables of a benchmark whose rows are options of a Keras layer: which of them keep cuDNN, and what each costs.

A layout's "options" is {"instead": {row: what to do instead}}. The records' `option` says what ran, and what Keras raised; the
figures and sentences here come from the records alone.
"""

from collections.abc import Mapping, Sequence

from harness.report import what_ran
from harness.report.building import Table, foot, in_groups, place, skipped, verdict
from harness.report.cells import NONE, Notes, cell, ours, plain, times_as_fast

DEFAULT, CUDNN, ERROR, OURS = "default", "cuDNN", "error", "persistent kernels"
WRONG, UNPROVEN = "computes something else than float64 does: see the proof", "not proven"
FIGURES = {"outputs", "gradients", "update", "loss"}
TITLES = {"train": "A training step", "forward": "A prediction"}
SLOW = 2.0  # times as long as the default: named in the sentence of a CPU
HEADINGS = [
    "row",
    "what it is",
    "what ran",
    "ms a step",
    "as long as the default",
    "error",
    "what to do instead",
    "proof",
]
IN_FIT = "in `fit`, ms a step"


def tables(layout: Mapping, rows: Sequence[Mapping], notes: Notes) -> list[Table]:
    """Of each config, device and precision: what keeps cuDNN, and a table for each mode."""
    if not layout.get("options"):
        return []
    made = []
    for (config, device, precision), members in in_groups(rows).items():
        where = f"{config}, {device.upper()}, {precision}"
        members = sorted(members, key=lambda record: place(layout, record["row"]))
        by_mode = {mode: [record for record in members if record["mode"] == mode] for mode in TITLES}
        if table := _keeps(by_mode, device, where):
            made.append(table)
        made += [_costs(layout, mode, own, members, where, notes) for mode, own in by_mode.items() if own]
    return made


def ran(record: Mapping) -> str:
    """What ran, "error" where Keras raised, "" where that is not known.

    The profile's kernels say it where the layer's own ops do not: in eager code, and in our kernels' call, a function by itself.
    """
    said = (record.get("option") or {}).get("ran", "")
    kernels = ((record["proof"] or {}).get("kernel") or {}).get("kernels") or {}
    words = {what_ran.kernel_in_words(name) for name in kernels}
    if any(each.startswith("our persistent kernel") for each in words):
        return OURS
    return f"{CUDNN} op by op" if said == "eager" and "cuDNN's LSTM gates" in words else said


def keeps(record: Mapping) -> bool:
    """Whether every layer ran cuDNN."""
    return all(kind.startswith(CUDNN) for kind in ran(record).split(", "))


def _default(rows: Sequence[Mapping]) -> Mapping | None:
    return next((other for other in rows if other["row"] == DEFAULT), None)


def against(record: Mapping, rows: Sequence[Mapping]) -> float | None:
    """How many times as long as the default a row takes; None where one of them has no time."""
    base = _default(rows)
    times = [other["step_ms"] for other in (record, base) if other and other["status"] == "ok"]
    return times[0]["median"] / times[1]["median"] if len(times) == 2 and all(times) else None


def _keeps(by_mode: Mapping[str, Sequence[Mapping]], device: str, where: str) -> Table | None:
    found = {mode: [record for record in rows if ran(record)] for mode, rows in by_mode.items()}
    if not any(found.values()):
        return None
    names: dict[str, dict[str, str]] = {}
    for mode, rows in found.items():
        for record in rows:
            if ran(record) == ERROR:
                kind = "fails"
            elif record["status"] == "failed":
                kind = WRONG if FIGURES & {*(record["proof"] or {}).get("failed", ())} else UNPROVEN
            elif device == "gpu" and ran(record) != OURS:
                kind = "keeps cuDNN" if keeps(record) else "loses it"
            else:
                kind = ran(record)
            names.setdefault(kind, {}).setdefault(record["row"], "")
            names[kind][record["row"]] += f" {mode}"
    last = ["fails", WRONG, UNPROVEN]
    order = ["keeps cuDNN", "loses it", OURS] if device == "gpu" else sorted(names.keys() - last)
    measured = {record["row"]: sum(record["row"] == r["row"] for rows in found.values() for r in rows)
                for rows in found.values() for record in rows}  # fmt: skip

    def shown(row: str, modes: str) -> str:
        whole = len(modes.split()) == measured[row]
        return f"`{row}`" + ("" if whole else f" ({'training' if 'train' in modes else 'predicting'} alone)")

    lines = [
        [kind, ", ".join(shown(row, modes) for row, modes in names[kind].items()) or NONE]
        for kind in [*order, *last]
        if kind in names
    ]
    title = "Keeps cuDNN, loses it, fails" if device == "gpu" else "What runs on a CPU, where there is no cuDNN"
    heading = "with this option Keras" if device == "gpu" else "what ran"
    return Table(f"{title}: {where}", [heading, "options"], [False, False], lines, [_advice(found, device)])


def _advice(found: Mapping[str, Sequence[Mapping]], device: str) -> str:
    """One plain sentence, of the training steps that were measured."""
    rows = found["train"]
    times = {record["row"]: (record, times) for record in rows if (times := against(record, rows)) is not None}
    fails = [record["row"] for record in rows if ran(record) == ERROR]
    raises = f"; {_listed(fails)} {'raises' if len(fails) == 1 else 'raise'} an error" if fails else ""
    if device == "gpu":
        lost = {row: ratio for row, (record, ratio) in times.items() if not keeps(record) and ratio > _noise(rows)[1]}
        if not lost:
            return (
                f"Nothing that lost cuDNN made a training step clearly longer than the default's on this GPU{raises}."
            )
        slowest = max(lost, key=lost.get)
        least = f"{min(lost.values()):.1f} to " if len(lost) > 1 else ""
        return (
            f"Leave {_listed(lost)} as they are by default unless the model needs them: without cuDNN a training step took "
            f"{least}{lost[slowest]:.1f} times as long as the default's, `{slowest}` longest{raises}."
        )
    slow = {row: ratio for row, (_, ratio) in times.items() if ratio > SLOW}
    if not slow:
        return f"On this CPU no option made a training step take over {SLOW:g} times as long as the default's{raises}."
    slowest = max(slow, key=slow.get)
    times, longest = f"{slow[slowest]:.1f}", ""
    if len(slow) > 1:
        times, longest = f"over {SLOW:g}", f", with `{slowest}` {slow[slowest]:.1f} times"
    return (
        f"On this CPU leave out {_listed(slow)} where you can: a training step took {times} times as long as the "
        f"default's{longest}{raises}."
    )


def _listed(rows: Sequence[str]) -> str:
    *others, last = [f"`{row}`" for row in rows]
    return f"{', '.join(others)} and {last}" if others else last


def _costs(
    layout: Mapping, mode: str, rows: Sequence[Mapping], group: Sequence[Mapping], where: str, notes: Notes
) -> Table:
    present = [record for record in rows if record["status"] != "skipped" or ran(record)]
    shared = [note for note in (present or rows)[0]["notes"] if all(note in record["notes"] for record in present)]
    shared = shared if len(present) > 1 else []
    lines = [_line(layout, record, rows, notes, shared) for record in present]
    headings, right = list(HEADINGS), [False, False, False, True, True, False, False, False]
    if mode == "train":
        headings.insert(4, IN_FIT)
        right.insert(4, True)
    spec = {"mode": mode, "columns": [["ms", "step_ms", "median_range"]]}
    said = [f"{plain(note[:1].upper() + note[1:])}." for note in shared]
    below = said + foot(layout, spec, present, rows, brief=False) + _noise_in_words(rows) if present else []
    absent = [record for record in rows if record not in present]
    return Table(
        f"{TITLES[mode]}: {where}",
        headings,
        right,
        lines,
        [*below, *skipped(absent)],
    )


def _same(rows: Sequence[Mapping]) -> dict[str, float]:
    """Times as long as the default's, of rows that the profile cannot tell from it; {} of fewer than two, which tell little."""
    base = _default(rows)
    same = {record["row"]: ratio for record in rows if record is not base and (ratio := against(record, rows))
            and ran(record) == ran(base) and _work(record) == _work(base)}  # fmt: skip
    return same if len(same) > 1 else {}


def _noise(rows: Sequence[Mapping]) -> tuple[float, float]:
    """How far ratios lie apart that should be 1."""
    same = [*_same(rows).values(), 1.0]
    return min(same), max(same)


def _noise_in_words(rows: Sequence[Mapping]) -> list[str]:
    if not (same := _same(rows)):
        return []
    least, most = _noise(rows)
    did = (
        "launched the default's own kernels, as often,"
        if _work(_default(rows))[1]
        else "ran as many ops as the default"
    )
    return [
        f"{_listed(same)} {did} and took {least:.2f} to {most:.2f} times as long: read nothing into a ratio in between."
    ]


def _work(record: Mapping) -> tuple[int, set[str]]:
    """(launches, names of kernels: on a CPU none) of a step; of a proven record."""
    kernel = record["proof"]["kernel"]
    return kernel["launches"], {*kernel.get("kernels", ())}


def _line(layout: Mapping, record: Mapping, rows: Sequence[Mapping], notes: Notes, shared: Sequence[str]) -> list[str]:
    about, ok, ratio = record.get("option") or {}, record["status"] == "ok", against(record, rows)
    marks = "".join(notes.mark(plain(note)) for note in record["notes"] if note not in shared)
    figures = [cell(record["step_ms"], "median_range") if ok else NONE]
    if record["mode"] == "train":
        figures.append(cell(about.get("fit_ms"), ".3f") if ok else NONE)
    raised = ran(record) == ERROR
    return [
        plain(record["row"]) + marks,
        ours(layout["rows"].get(record["row"], "")),
        plain(ran(record)) or NONE,
        *figures,
        NONE if ratio is None else times_as_fast(_default(rows), record, ratio, "step_ms"),
        plain(about.get("error", "")) or NONE,
        ours(layout["options"]["instead"].get(record["row"], "") if ratio is None or ratio > _noise(rows)[1] else "")
        or NONE,
        NONE if raised else verdict(record, notes),
    ]
