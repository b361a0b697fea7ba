"""A benchmark that is measured along axes: one network in many sizes. The parent of such a script, `sweep.main(BENCHMARK)`.

    centre  the shape in which all axes cross: the config
    point   the centre, or the centre with one of its sizes changed; a config of its own in records: published-units_512
    row     a process for many of its points one after the other, since starting it takes longer than measuring one of them: for
            all of them, or where more processes have room side by side than there are rows, for a part of them each

A point is proven and timed as any row is, and its record is written when it is measured. One that crashes, or takes longer than
ROW_LIMIT_S, keeps its place with the reason; another process goes on after it. The axes are those of the layout's "axes"
(harness/report/axes.py), the points the values of the constant AXES: "units=64,128 batch=1,32".
"""

import copy
import itertools
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.errors import UserError
from harness.run import benchmark, estimate, processes, progress
from harness.run.options import Header
from harness.run.parent import Parent
from harness.run.references import References
from harness.run.script import Benchmark


def main(script: Benchmark, argv: Sequence[str] | None = None) -> int:
    """As harness.run.benchmark.main."""
    return benchmark.main(script, argv, Sweep)


def read_axes(text: str, axes: Sequence[Mapping[str, str]], header: Header) -> dict[str, list[int]]:
    """{name of the axis: its values, once each} of a text such as "units=64,128 batch=1,32". Raises UserError.

    Args:
        axes: of a layout: {"name", "constant", …}.
        header: of the script: what each constant may be.
    """
    constants = {axis["name"]: axis["constant"] for axis in axes}
    found: dict[str, list[int]] = {}
    for part in text.split():
        name, _, values = part.partition("=")
        shown = f"--axes: {part[:60]!r}: "
        if name not in constants:
            known = f"{', '.join(constants)}, with values such as {next(iter(constants))}=1,2"
            raise UserError(f"{shown}no such axis; expected {known}")
        if name in found:
            raise UserError(f"{shown}{name} is there twice; join its values with commas")
        try:
            read = [header.limit(constants[name]).read(value) for value in values.split(",")]
        except ValueError as error:
            raise UserError(f"{shown}each value has to be {error}") from None
        found[name] = list(dict.fromkeys(read))
    return found


@dataclass
class Point:
    """One row at one point: the parent with the constants of that point, and what the row has come to there."""

    parent: "Sweep"
    done: int  # processes that it has had, an earlier run's among them
    spent_s: float

    @property
    def name(self) -> str:
        return self.parent.constants["CONFIG"]


@dataclass(eq=False)
class SweptRow:
    """A row and points at which it goes on: which process measures it now, and what that one has still to measure."""

    name: str
    points: list[Point]
    process: int = 0
    rest: list[Point] = field(default_factory=list)

    def due(self) -> list[Point]:
        """What the next process has to measure; empty when the row has all that it needs."""
        while self.points and not self.rest:
            self.rest = [point for point in self.points if point.done <= self.process]
            self.process += not self.rest
        return self.rest


class Sweep(Parent):
    """Runs each row at all points. Itself at the centre."""

    def __init__(self, script: Benchmark, argv: Sequence[str]) -> None:
        super().__init__(script, argv)
        if not {"help", "list"} & self.flags:
            self.shapes = self._shapes()

    def _shapes(self) -> dict[str, dict[str, int]]:
        """{name of a point: the constants in which it is not the centre}, the centre first.

        A size that the user has fixed has no axis, unless the axes are the user's too.
        """
        centre, axes = self.constants["CONFIG"], self.benchmark.layout["axes"]
        constants = {axis["name"]: axis["constant"] for axis in axes}
        shapes: dict[str, dict[str, int]] = {centre: {}}
        for name, values in read_axes(self.constants["AXES"], axes, self.header).items():
            constant = constants[name]
            if self._is_written(constant) and not self._is_written("AXES"):
                continue
            others = [value for value in values if value != self.constants[constant]]
            shapes |= {f"{centre}-{name}_{value}": {constant: value} for value in others}
        return shapes

    def _is_written(self, name: str) -> bool:
        """Whether a constant is the user's, on the command line or in the header."""
        return name in self.options.values or self.header.constants[name].default is not None

    def _at(self, name: str) -> "Sweep":
        """This run at one point."""
        point = copy.copy(self)
        point.constants = {**self.constants, "CONFIG": name, **self.shapes[name]}
        return point

    def _points(self) -> list[dict[str, Any]]:
        return [self._at(name).constants for name in self.shapes]

    def _cannot_run_anywhere(self, row: str) -> str:
        reasons = [self._at(name)._cannot_run(row) for name in self.shapes]
        return "" if "" in reasons else reasons[0]

    def _names(self) -> set[str]:
        return {name for point in map(self._at, self.shapes) for name in Parent._names(point)}

    def _contradicts(self, out: Path, replaced: Collection[str], of: Collection[str] | None = None) -> str:
        found = (Parent._contradicts(self._at(name), out, replaced, of) for name in self.shapes)
        return next(filter(None, found), "")

    def _run_rows(self) -> None:
        self._data()  # before it is copied: each point would ask anew
        wanted = {row: points for row in self.rows if (points := self._wanted(row))}
        due = ((row, point) for row, points in wanted.items() for point in points)
        self._say_what_is_replaced((point.parent, row) for row, point in due if not point.done)
        parts = self._parts(len(wanted))
        rows = [SweptRow(row, points[k::parts]) for row, points in wanted.items() for k in range(parts)]
        self._say_if_nothing_is_left(rows)
        for point in itertools.chain(*(row.points for row in rows)):
            point.parent._matmul_found = self._matmul()
        first, expected = self._expected(wanted)
        with progress.of_script(self.benchmark.name, self.device) as bar:
            every = [(row.name, point) for row in rows for point in row.points]
            left = progress.Left(
                bar,
                {(name, point.name): first[name] for name, point in every},
                {(name, point.name): max(0, expected[name] - point.done) for name, point in every},
            )
            waiting = [row for row in rows if row.points]
            alone: list[SweptRow] = []  # rows that found too little memory beside others
            references = References({point.name: point.parent for _, point in every}.values(), bar)

            def keep(row: SweptRow, point: Point, outcome: processes.Outcome) -> None:
                point.spent_s += outcome.seconds
                goes_on = point.parent._keep(row.name, outcome, row.process, point.spent_s)
                left.ends((row.name, point.name), goes_on)
                row.rest.remove(point)
                if not goes_on:
                    row.points.remove(point)

            def next_work() -> processes.Work | None:
                if work := references.next_work():
                    return work
                while waiting:
                    row = waiting.pop(waiting.index(min(waiting, key=lambda row: row.process)))
                    for point in [*row.due()]:
                        if point.name in references.failed:
                            keep(row, point, references.failed[point.name])
                    if row.rest:
                        bar.starts(self._shown(row.name, row.process))
                        return self._work(row, keep, waiting, alone if self.at_once > 1 and row not in alone else None)
                    if row.points:
                        row.process += 1
                        waiting.append(row)
                return None

            processes.run_together(next_work, self.at_once)
            waiting += alone
            processes.run_together(next_work)

    def _work(
        self, row: SweptRow, keep: Callable, waiting: list[SweptRow], alone: list[SweptRow] | None
    ) -> processes.Work:
        """One process for what is due of a row; each point is kept as soon as the process hands it over.

        alone: where a row goes that finds too little memory beside others; None: it has none beside it.
        """
        log, points, seconds = f"logs/{self._log_of(row.name).name}", [*row.rest], []

        def watch(handed: Sequence[Mapping]) -> None:
            for point, result in list(zip(points, handed, strict=False))[len(seconds) :]:
                outcome = processes.Outcome(result["modes"], "", result["seconds"], log)
                if alone is not None and outcome.found_no_memory():
                    alone.append(row)
                    return
                seconds.append(result["seconds"])
                keep(row, point, outcome)

        def ended(outcome: processes.Outcome) -> None:
            if alone is not None and outcome.found_no_memory() and row not in alone:
                alone.append(row)
            if alone is not None and row in alone:
                return
            if outcome.note:
                print(f"{row.name}: {outcome.note}; see {outcome.log}", file=sys.stderr)
            if len(seconds) < len(points) and (outcome.result is None or not seconds):  # it ended at this one
                spent = max(0.0, outcome.seconds - sum(seconds))
                keep(row, points[len(seconds)], outcome._replace(result=None, seconds=spent))
            row.process += not row.rest
            if row.points:
                waiting.append(row)

        jobs = [{"constants": point.parent.constants, **point.parent._job(row.process)} for point in points]
        return processes.Work(self._child("points", row=row.name, points=jobs, watch=watch), ended)

    def _parts(self, rows: int) -> int:
        """Into how many parts each of so many rows' points are dealt: each has a process of its own beside the others'."""
        return max(1, min(self.at_once // max(1, rows), len(self.shapes)))

    def _side_by_side(self, rows: int) -> dict[str, float]:
        """A GPU's points follow each other: in nearly all that one takes, first calls and blocks, it has the GPU alone."""
        found = super()._side_by_side(rows * self._parts(rows))
        if self.device == "gpu":
            found["at_once"] = min(found["at_once"], estimate.at_once_of(found["gpus"]))
        return found

    def _wanted(self, row: str) -> list[Point]:
        """The points at which the row is still to be measured; those where it cannot run are recorded as skipped."""
        wanted = []
        for name in self.shapes:
            point = self._at(name)
            if not point._settled(row):
                earlier = point._earlier(row)
                done = min((len(record["blocks_ms"]) for record in earlier), default=0)
                wanted.append(Point(point, done, max((record.get("spent_s", 0.0) for record in earlier), default=0.0)))
        return wanted
