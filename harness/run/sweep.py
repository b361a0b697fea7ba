"""A benchmark that is measured along axes: one network in many sizes. The parent of such a script, `sweep.main(BENCHMARK)`.

    centre  the shape in which all axes cross: the config
    point   the centre, or the centre with one of its sizes changed; a config of its own in records: published-units_512
    row     one process for all of its points one after the other, since starting it takes longer than measuring one of them

A point is proven and timed as any row is, and its record is written when it is measured. One that crashes, or takes longer than
ROW_LIMIT_S, keeps its place with the reason; another process goes on after it. The axes are those of the layout's "axes"
(harness/report/axes.py), the points the values of the constant AXES: "units=64,128 batch=1,32".
"""

import copy
import itertools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.errors import UserError
from harness.run import benchmark, processes, progress
from harness.run.options import Header


def main(script: benchmark.Benchmark, argv: Sequence[str] | None = None) -> int:
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
    done: int  # processes of an earlier run
    spent_s: float

    @property
    def name(self) -> str:
        return self.parent.constants["CONFIG"]


class Sweep(benchmark.Parent):
    """Runs each row at all points. Itself at the centre."""

    def __init__(self, script: benchmark.Benchmark, argv: Sequence[str]) -> None:
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

    def _names(self) -> set[str]:
        return {name for point in map(self._at, self.shapes) for name in benchmark.Parent._names(point)}

    def _run_rows(self) -> None:
        self._data()  # before it is copied: each point would ask anew
        wanted = {row: self._wanted(row) for row in self.rows}
        every, least = list(itertools.chain(*wanted.values())), self.stopping_rule.least
        for point in every:
            point.parent._matmul_found = self._matmul()
        seconds, expected = self._expected(wanted)
        with progress.of_script(self.benchmark.name) as bar:
            left = progress.Left(
                bar,
                {(row, point.name): seconds[row] for row, points in wanted.items() for point in points},
                {(row, p.name): max(0, expected[row] - p.done) for row, points in wanted.items() for p in points},
            )
            for process in itertools.count():
                wanted = {row: points for row, points in wanted.items() if points}
                if not wanted:
                    break
                for row, points in wanted.items():
                    due = [point for point in points if point.done <= process]
                    bar.starts(f"{row}, process {process + 1} of {max(least, process + 1)}" if least > 1 else row)
                    ended = self._measure(row, due, process, left) if due else []
                    wanted[row] = [point for point in points if point not in ended]

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

    def _measure(self, row: str, due: Sequence[Point], process: int, left: progress.Left) -> list[Point]:
        """Measure a row once at each of these points; those that get no further process."""
        ended: list[Point] = []

        def keep(point: Point, outcome: processes.Outcome) -> None:
            point.spent_s += outcome.seconds
            goes_on = point.parent._keep(row, outcome, process, point.spent_s)
            left.ends((row, point.name), goes_on)
            if not goes_on:
                ended.append(point)

        rest = []
        for point in due:
            if failed := point.parent._without_reference():
                keep(point, failed)
            else:
                rest.append(point)
        while rest:
            rest = self._run_points(row, rest, process, keep)
        return ended

    def _run_points(self, row: str, points: Sequence[Point], process: int, keep: Any) -> Sequence[Point]:
        """Run one process for these points and keep what it hands over; the points that it has not come to."""
        log, seconds = f"logs/{self._log_of(row).name}", []

        def watch(handed: Sequence[Mapping]) -> None:
            for point, result in list(zip(points, handed, strict=False))[len(seconds) :]:
                seconds.append(result["seconds"])
                keep(point, processes.Outcome(result["modes"], "", result["seconds"], log))

        jobs = [{"constants": point.parent.constants, **point.parent._job(process)} for point in points]
        outcome = self._task("points", row=row, points=jobs, watch=watch)
        if outcome.note:
            print(f"{row}: {outcome.note}; see {outcome.log}", file=sys.stderr)
        if len(seconds) < len(points) and (outcome.result is None or not seconds):  # it ended at this one
            spent = max(0.0, outcome.seconds - sum(seconds))
            keep(points[len(seconds)], outcome._replace(result=None, seconds=spent))
            return points[len(seconds) + 1 :]
        return points[len(seconds) :]
