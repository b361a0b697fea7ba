"""Tables of a benchmark whose rows train on several devices: how the throughput of each row grows with their number.

A layout's "replicas" is {"mode", "published": [{"row", "description", "reason", "config", "gpus", "words", "speedup"}]}. The
records of such a script are of the configs <config>-1, <config>-weak_<n> and <config>-strong_<n>, and their constant REPLICAS is
n. Each config makes a table of weak and one of strong scaling, with a line for each row and number of devices, from the records
alone. On a CPU the devices are replicas that share its cores: such a table has neither speedups nor efficiencies.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from harness.record import schema
from harness.report.building import Table, foot, place, skipped, verdict
from harness.report.cells import NONE, Notes, cell, ours, plain

NAME = re.compile(r"(.+)-(?:(1)|(weak|strong)_(\d+))")
HEADINGS = ["row", "what it is", "GPUs", "words/s", "speedup over one", "efficiency", "ms per batch", "ms in communication",
            "published words/s", "published speedup", "proof"]  # fmt: skip
GPU_ONLY = ("speedup over one", "efficiency", "ms in communication")  # columns that a CPU table does without
PUBLISHED = ("published words/s", "published speedup")  # columns that a table without published rows does without


def tables(layout: Mapping, rows: Sequence[Mapping], notes: Notes) -> list[Table]:
    """The tables of all configs, a GPU's first."""
    if not layout.get("replicas"):
        return []
    places: dict[tuple, list[Mapping]] = {}
    for record in rows:
        if record["mode"] != layout["replicas"]["mode"] or not (found := NAME.fullmatch(record["config"]["CONFIG"])):
            continue
        place = schema.DEVICES.index(record["device"]), found[1], schema.PRECISIONS.index(record["precision"])
        places.setdefault(place, []).append(record)
    made = []
    for place in sorted(places):
        for scaling in ("weak", "strong"):
            own = [record for record in places[place] if _scaling(record) in ("", scaling)]
            if any(_scaling(record) for record in own) or (scaling == "weak" and own):
                made.append(_table(layout, place[1], scaling, own, notes))
    return made


def _scaling(record: Mapping) -> str:
    return NAME.fullmatch(record["config"]["CONFIG"])[3] or ""


def devices(record: Mapping) -> int:
    """On how many devices it trained."""
    return record["config"].get("REPLICAS", 1)


def speedup(record: Mapping, one: Mapping | None) -> float | None:
    """Throughput over that of the same row on one device; None where one of them is not proven."""
    pair = [found["throughput"] for found in (record, one) if found and found["status"] == "ok"]
    return pair[0]["value"] / pair[1]["value"] if len(pair) == 2 and all(pair) else None


def _table(layout: Mapping, config: str, scaling: str, rows: Sequence[Mapping], notes: Notes) -> Table:
    present = [record for record in rows if record["status"] != "skipped"] or list(rows)
    present.sort(key=lambda record: (place(layout, record["row"]), devices(record)))
    ones = {record["row"]: record for record in present if devices(record) == 1}
    lines = [_line(layout, record, ones.get(record["row"]), notes) for record in present]
    device, precision = rows[0]["device"], rows[0]["precision"]
    published = layout["replicas"].get("published", [])
    extra = [row for row in published if (row["config"], scaling, device) == (config, "weak", "gpu")]
    for row in extra:
        figures = [cell(row["words"], ",.0f"), cell(row["speedup"], ".1f")]
        own = [ours(row["row"]), ours(row["description"]), str(row["gpus"]), *[NONE] * 5]
        lines.append([*own, *figures, ours(row["reason"])])
    left_out = [*PUBLISHED * (not extra), *GPU_ONLY * (device == "cpu")]
    kept = [k for k, heading in enumerate(HEADINGS) if heading not in left_out]
    devices_are = "GPUs" if device == "gpu" else "replicas"
    headings = [HEADINGS[k].replace("GPUs", devices_are) for k in kept]
    spec = {"mode": layout["replicas"]["mode"], "columns": [["ms", "step_ms", "median_range"]]}
    shown = [{**record, "row": f"{record['row']} {devices(record)}", "config": _of_any(record)} for record in present]
    return Table(
        title=f"{scaling.capitalize()} scaling: {config}, {device.upper()}, {precision}",
        headings=headings,
        right=[False, False, *[True] * (len(headings) - 3), False],
        lines=[[line[k] for k in kept] for line in lines],
        foot=[
            *["Whether it works on a CPU, not how fast: such figures say nothing about GPUs."] * (device == "cpu"),
            *where(present),
            _batches(present, devices_are),
            *foot(layout, spec, shown, rows, brief=False),
            *skipped(record for record in rows if record not in present),
        ],
    )


def _batches(present: Sequence[Mapping], devices_are: str) -> str:
    sizes = {devices(record): record["config"]["BATCH_SIZE"] for record in present}
    found = ", ".join(f"{sizes[count]} on {count}" for count in sorted(sizes))
    return f"BATCH_SIZE, of all {devices_are} together: {found}."


def _of_any(record: Mapping) -> dict[str, Any]:
    """The settings without those that are a point's."""
    return {name: value for name, value in record["config"].items() if name not in ("REPLICAS", "BATCH_SIZE", "CONFIG")}


def _line(layout: Mapping, record: Mapping, one: Mapping | None, notes: Notes) -> list[str]:
    gpus, gain = devices(record), speedup(record, one)
    figures = [NONE] * 5
    if record["status"] == "ok":
        communication = (record.get("replicas") or {}).get("communication_ms")
        figures = [
            cell(record["throughput"]["value"], ",.0f"),
            NONE if gain is None else f"{gain:.2f}x",
            NONE if gain is None else f"{gain / gpus:.0%}",
            cell(record["step_ms"], "median_range"),
            cell(communication, ".3f"),
        ]
    marks = "".join(notes.mark(plain(note)) for note in record["notes"])
    what = ours(layout["rows"].get(record["row"], ""))
    return [plain(record["row"]) + marks, what, f"{gpus}", *figures, NONE, NONE, verdict(record, notes)]


def where(rows: Sequence[Mapping]) -> list[str]:
    """A line for each way in which the rows' devices are linked: GPUs, link, NCCL, hosts."""
    found: dict[str, None] = {}
    for record in rows:
        about = record.get("replicas")
        if about and about["gpus"] > 1:
            parts = [", ".join(about["names"]) or "processes and logical devices on CPUs", about["link"]]
            parts += [about["nccl"] and f"NCCL {about['nccl']}", f"hosts {', '.join(dict.fromkeys(about['hosts']))}"]
            found[f"{about['gpus']}: {plain('; '.join(filter(None, parts)))}."] = None
    return list(found)
