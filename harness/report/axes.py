"""Tables of a benchmark that is measured along axes: how the time of a step goes with each size of a network, row beside row.

A layout's "axes" are [{"name", "constant", "title", "label", "mode"}]: the constant of the script that is the size, and the label
of the plot's axis. Records that differ in this size alone make one table: a line per size, a column per row, and last the best
of the layout's "ours" against the fastest of the others. Underneath stands, for each of ours against each other row, where it is
faster, level and slower, and where they cross. All from the records alone.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from harness.record import records, schema
from harness.record.stopping_rule import is_time_up
from harness.report import building, curves, warnings, what_ran
from harness.report.building import Table, foot, skipped
from harness.report.cells import INCONCLUSIVE, NONE, NOT_JUDGED, Notes, cell, plain
from harness.report.provenance import machine_line

LARGEST = 2**31 - 1  # size, as in harness/run/limits.py
LEVEL = 1.02  # two times within this factor are called level
FASTER, SLOWER, IS_LEVEL = "faster", "slower", "level"
UNITS = "ms per step"
READ = (
    f"Ratios: the other's time by ours, medians; above 1 ours is faster. Level: within {100 * (LEVEL - 1):.0f} %. "
    "Inconclusive: further apart, but their intervals overlap, or, of one process, the ranges of their blocks."
)
READ_NOT_JUDGED = (
    "Not judged: other processes ran beside the slower one, or beside either where they are level, so that its time is an "
    "upper bound."
)

Series = dict[int, dict[str, Mapping]]  # size: row: record


class Verdict(NamedTuple):
    """One row against another at one size; both None where one of them has no figure."""

    size: int
    ratio: float | None = None  # the other's time by ours
    kind: str | None = None  # FASTER, SLOWER, IS_LEVEL, INCONCLUSIVE or NOT_JUDGED


def tables(layout: Mapping, rows: Sequence[Mapping], notes: Notes) -> list[Table]:
    """The tables of all axes; points that are on none get tables of their own, of the first axis."""
    axes, found, covered = layout.get("axes") or [], [], set()
    for axis in axes:
        numbers: dict[tuple, int] = {}  # where several shapes have this axis, each has its picture
        for place, series in _series(axes, axis, rows).items():
            if len(series) > 1:
                number = numbers[place[:2]] = numbers.get(place[:2], 0) + 1
                found.append(_table(layout, axis, place, series, notes, rows, number))
                covered |= {id(record) for own in series.values() for record in own.values()}
    alone = [record for record in rows if id(record) not in covered]
    for place, series in _series(axes, axes[0], alone).items() if axes else ():
        found.append(_table(layout, axes[0], place, series, notes, rows))
    return found


def advice(layout: Mapping, rows: Sequence[Mapping]) -> list[str]:
    """A sentence for each axis: ours against the fastest other, at each size where both have a time."""
    sentences = []
    for table in tables(layout, rows, Notes()):
        compared = [f"at {size} {ratio}" for size, *_, ratio in table.lines if ratio != NONE]
        if compared:
            sentences.append(f"{table.title}: {table.headings[-1]}, {'; '.join(compared)}.")
    return sentences


def left_out(layout: Mapping, rows: Sequence[Mapping]) -> list[str]:
    """A line with the records that no table of the axes holds: one without all sizes, or with those of another."""
    axes = layout.get("axes") or []
    every = [series for axis in axes for series in _series(axes, axis, rows).values()]
    held = {id(record) for series in every for own in series.values() for record in own.values()}
    names = [records.record_name(record) for record in rows if axes and id(record) not in held]
    why = "without a size of their own on every axis"
    return [f"**Not drawn**, {why}: {', '.join(f'`{name}`' for name in names)}."] if names else []


def _size(record: Mapping, constant: str) -> int | None:
    value = record["config"].get(constant)
    return value if type(value) is int and 0 < value <= LARGEST else None


def _series(axes: Sequence[Mapping], axis: Mapping, rows: Sequence[Mapping]) -> dict[tuple, Series]:
    """{(device, precision, the sizes on the other axes): size: row: record}, GPU first; of two records of one size the first."""
    found: dict[tuple, Series] = {}
    for record in rows:
        sizes = {other["constant"]: _size(record, other["constant"]) for other in axes}
        size = sizes.pop(axis["constant"])
        if size is None or None in sizes.values() or record["mode"] != axis["mode"]:
            continue
        place = (record["device"], record["precision"], tuple(sizes.items()))
        found.setdefault(place, {}).setdefault(size, {}).setdefault(record["row"], record)

    def order(place: tuple) -> tuple:
        return schema.DEVICES.index(place[0]), schema.PRECISIONS.index(place[1]), [size for _, size in place[2]]

    return {place: dict(sorted(found[place].items())) for place in sorted(found, key=order)}


def _table(
    layout: Mapping, axis: Mapping, place: tuple, series: Series, notes: Notes, rows: Sequence[Mapping], number: int = 1
) -> Table:
    device, precision, others = place
    every = [record for own in series.values() for record in own.values()]
    names = sorted(sorted({record["row"] for record in every}), key=lambda row: building.place(layout, row))
    shown = [row for row in names if any(r["row"] == row and r["status"] != "skipped" for r in every)] or names
    ours = [row for row in shown if row in layout.get("ours", [])]
    peers = [row for row in shown if row not in ours]
    lines = [
        [f"{size:,}", *(_cell(own.get(row), notes) for row in shown), best_against_best(own, ours, peers)]
        for size, own in series.items()
    ]
    under = [f"- {line}" for line in crossovers(series, ours, peers)]
    judged = [*under, *(line[-1] for line in lines)]
    under += [READ] if under else []
    under += [READ_NOT_JUDGED] if any(NOT_JUDGED in line for line in judged) else []
    under += skipped(record for record in every if record["row"] not in shown)
    spec = {"mode": axis["mode"], "columns": [["ms", "step_ms", "median_range"]]}
    group = [record for record in rows if (record["device"], record["precision"]) == (device, precision)]
    fixed = ", ".join(f"{constant}={size:g}" for constant, size in others)
    table = Table(
        title=f"{axis['title']}: {plain(fixed)}, {device.upper()}, {precision}",
        headings=[plain(axis["label"]), *(f"{plain(row)}, ms" for row in shown), "ours against the fastest other"],
        right=[True] * (len(shown) + 1) + [False],
        lines=lines,
        foot=[*under, *foot(layout, spec, [_at_its_size(record, axis) for record in every], group, brief=False)],
    )
    if len(series) < 2:
        return table
    name = f"{axis['name']}-{number}" if number > 1 else axis["name"]
    return table._replace(
        picture=f"{layout['benchmark']}.{name}.{axis['mode']}.{device}.{precision}.png",
        curves=[curve(series, row, row in ours) for row in shown],
        across=axis["label"],
        axis=UNITS,
        caption=machine_line(every),
    )


def _at_its_size(record: Mapping, axis: Mapping) -> dict:
    """The record as one of several of its row, for the lines under the table; the size is no difference between these."""
    config = {name: value for name, value in record["config"].items() if name != axis["constant"]}
    return {**record, "row": f"{record['row']} {record['config'][axis['constant']]}", "config": config}


def _cell(record: Mapping | None, notes: Notes) -> str:
    """A row's time at one size; or that it has none, with the reason as a note."""
    if record is None:
        return NONE
    if record["status"] != "ok":
        return record["status"] + notes.mark(plain(what_ran.reason_in_words(record["reason"])))
    marks = (notes.mark(plain(note)) for note in record["notes"] if not is_time_up(note))
    return cell(record["step_ms"], "median_range") + "".join(marks)


def _step(record: Mapping | None) -> Mapping | None:
    """The time of a proven row."""
    return record["step_ms"] if record and record["status"] == "ok" else None


def _bounds(step: Mapping) -> tuple[float, float]:
    """The interval over processes, or the range of a single one's blocks."""
    low, high = step.get("interval") or (step["min"], step["max"])
    return low, high


def verdict(size: int, own: Mapping | None, other: Mapping | None) -> Verdict:
    """How the record of one row compares with that of another row at one size."""
    own_step, other_step = _step(own), _step(other)
    if not own_step or not other_step:
        return Verdict(size)
    ratio = other_step["median"] / own_step["median"]
    (low, high), (other_low, other_high) = _bounds(own_step), _bounds(other_step)
    level = 1 / LEVEL <= ratio <= LEVEL
    doubted = (own, other) if level else (other,) if ratio > 1 else (own,)
    if any(map(warnings.was_disturbed, doubted)):
        return Verdict(size, ratio, NOT_JUDGED)
    if level:
        return Verdict(size, ratio, IS_LEVEL)
    if low <= other_high and other_low <= high:
        return Verdict(size, ratio, INCONCLUSIVE)
    return Verdict(size, ratio, FASTER if ratio > 1 else SLOWER)


def best_against_best(own: Mapping[str, Mapping], ours: Sequence[str], peers: Sequence[str]) -> str:
    """The fastest of ours against the fastest of the others, at one size: "1.85x (`wavefront` against `torch_lstm`)"."""

    def fastest(rows: Sequence[str]) -> str | None:
        timed = [row for row in rows if _step(own.get(row))]
        return min(timed, key=lambda row: own[row]["step_ms"]["median"], default=None)

    first, second = fastest(ours), fastest(peers)
    if first is None or second is None:
        return NONE
    found = verdict(0, own[first], own[second])
    kind = f", {found.kind}" if found.kind in (IS_LEVEL, INCONCLUSIVE, NOT_JUDGED) else ""
    return f"{found.ratio:.2f}x{kind} (`{plain(first)}` against `{plain(second)}`)"


def crossovers(series: Series, ours: Sequence[str], peers: Sequence[str]) -> list[str]:
    """A sentence for each of ours against each of the others, where they have a size in common."""
    sentences = []
    for row, peer in itertools.product(ours, peers):
        verdicts = [verdict(size, own.get(row), own.get(peer)) for size, own in series.items()]
        if any(found.kind for found in verdicts):
            sentences.append(f"`{plain(row)}` against `{plain(peer)}`: {sentence(verdicts)}.")
    return sentences


def sentence(verdicts: Sequence[Verdict]) -> str:
    """Where a row is faster, level and slower, in rising order: "slower at 1 (0.50x), faster from 8 to 128 (1.20x to 2.00x)".

    Sizes stand together only where every measured one between them has the same verdict. A crossing is named where a verdict
    turns into its opposite, between the last size of the one and the first of the other.
    """
    said = []
    for kind, run in itertools.groupby(verdicts, key=lambda found: found.kind):
        own = list(run)
        where = f"at {own[0].size:,}" if len(own) == 1 else f"from {own[0].size:,} to {own[-1].size:,}"
        ratios = (
            sorted({f"{found.ratio:.2f}x": found.ratio for found in own}.items(), key=lambda item: item[1])
            if kind
            else []
        )
        between = " to ".join(dict.fromkeys([ratios[0][0], ratios[-1][0]])) if ratios else ""
        said.append(f"{kind} {where} ({between})" if kind else f"not compared {where}")
    decided = [found for found in verdicts if found.kind in (FASTER, SLOWER)]
    crossings = [
        f"between {before.size:,} and {after.size:,}"
        for before, after in itertools.pairwise(decided)
        if before.kind != after.kind
    ]
    return ", ".join(said) + (f"; they cross {' and '.join(crossings)}" if crossings else "")


def curve(series: Series, row: str, is_ours: bool) -> curves.Curve:
    """A row's line through its times; where it has none at a size, the line has a gap."""
    figures, gaps = [], []
    for size, own in series.items():
        if step := _step(own.get(row)):
            figures.append((size, step["median"], *_bounds(step)))
        else:
            gaps.append(size)
    return curves.Curve(row, figures, is_ours, gaps)
