"""A benchmark of rows that train on several devices: each row at each number of them, on several as a group of worker processes.

First all rows run on one device, where they prepare side by side as rows of other scripts do; then the groups, one after the
other. What is timed has the host alone, on one device as on several, since a speedup is of both.

A point is a number of devices and how the batch grows with it: weak scaling has the script's BATCH_SIZE on every device, strong
scaling shares it among them. The records of a point have the whole batch in BATCH_SIZE and the number in REPLICAS; the report
(harness/report/replicas.py) puts the points of a config side by side.
"""

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from harness.errors import UserError
from harness.record import machine
from harness.record.frameworks import FRAMEWORKS
from harness.run import benchmark, estimate, processes, progress, script, sweep, workers
from harness.run.parent import require_gpus
from harness.run.references import References

SCALINGS = ("weak", "strong")
MOST = 64  # devices


@dataclass
class Benchmark(script.Benchmark):
    """A benchmark script of such rows.

    Attributes:
        workers: row, number of devices → processes that it runs in.
    """

    workers: Callable[[str, int], int] = lambda row, gpus: gpus


def counts(text: str) -> list[int]:
    """The numbers of devices that --replicas names, rising; UserError for another text."""
    found = [part.strip() for part in str(text).split(",")]
    if not all(part.isdecimal() and 1 <= int(part) <= MOST for part in found):
        raise UserError(f"--replicas={text!s:.60}: expected numbers of GPUs from 1 to {MOST}, such as 1,2")
    return sorted({int(part) for part in found})


def names(text: str) -> list[str]:
    """The scalings that --scaling names; UserError for another text."""
    found = [part.strip() for part in str(text).split(",")]
    if not set(found) <= set(SCALINGS):
        raise UserError(f"--scaling={text!s:.60}: expected {' or '.join(SCALINGS)}, or both: {','.join(SCALINGS)}")
    return [name for name in SCALINGS if name in found]


class Parent(sweep.Sweep):
    """Runs each row at all points. Itself at none of them: there REPLICAS is still the text."""

    @property
    def _is_single(self) -> bool:
        """Whether this is a point of one device."""
        return self.constants["REPLICAS"] == 1

    def _shapes(self) -> dict[str, dict[str, Any]]:
        batch, config, shapes = self.constants["BATCH_SIZE"], self.constants["CONFIG"], {}
        for count in counts(self.constants["REPLICAS"]):
            for scaling in names(self.constants["SCALING"]):
                whole = batch * count if scaling == "weak" else batch
                if whole % count:
                    raise UserError(
                        f"--batch-size={batch}: expected a multiple of {count} for --replicas={count} and --scaling=strong"
                    )
                name = f"{config}-{scaling}_{count}" if count > 1 else f"{config}-1"  # alone, both are one point
                shapes[name] = {"REPLICAS": count, "BATCH_SIZE": whole}
        return shapes

    def _check(self):
        for host in self._hosts():
            try:
                workers.free_ports([host])
            except OSError as error:
                why = f"{host} is no address of this machine ({error.strerror or error})"
                raise UserError(f"--hosts={self.constants['HOSTS']}: {why}; such as 127.0.0.1") from None
        out = super()._check()
        if self.device == "gpu":
            replicas = self.constants["REPLICAS"]
            self._gpus = require_gpus(f"--replicas={replicas}", max(counts(replicas)), self.device)
        return out

    def _hosts(self) -> list[str]:
        return [host.strip() for host in self.constants["HOSTS"].split(",")]

    @property
    def at_once(self) -> int:
        return super().at_once if self._is_single else 1

    @property
    def gpus(self) -> list[str]:
        """None that rows are spread over: --gpus is read, and refused where there are fewer."""
        _ = super().gpus
        return []

    def _points(self) -> list[dict[str, Any]]:
        return [self.constants] if self._is_single else super()._points()

    def _side_by_side(self, rows: int) -> dict[str, Any]:
        """At a point; else on average over all of them."""
        if self.constants["CONFIG"] in self.shapes:
            return super(sweep.Sweep, self)._side_by_side(rows)
        of_points = [self._at(name)._side_by_side(rows)["at_once"] for name in self.shapes]
        return {"at_once": estimate.mean_at_once(of_points), "gpus": 1}

    def _gpu_of(self, row: str) -> str | None:
        """Of a row on one GPU; in a group each worker's environment names its own."""
        return self._gpus[0] if self.device == "gpu" and self._is_single else None

    def _added(self, row: str) -> dict[str, str]:
        made, gpus = self.benchmark.rows[row], self.constants["REPLICAS"]
        count = self.benchmark.workers(row, gpus)
        added = made.environment if self.device == "gpu" and count > 1 else {}
        if self.device == "cpu" and count < gpus:
            added = FRAMEWORKS[made.framework].cpu_devices
        return {name: f"{os.environ.get(name, '')} {value.format(gpus)}".strip() for name, value in added.items()}

    def _run_rows(self) -> None:
        self._data()  # before it is copied: each point would ask anew
        wanted = [(row, point) for row in self.rows for point in self._wanted(row)]
        self._say_if_nothing_is_left(wanted)
        self._say_what_is_replaced((point.parent, row) for row, point in wanted if not point.done)
        rows = dict.fromkeys(row for row, _ in wanted)
        expected = {point.name: point.parent._expected(rows) for _, point in wanted}
        first = {(row, point.name): expected[point.name][0][row] for row, point in wanted}
        counts = {(row, point.name): max(0, expected[point.name][1][row] - point.done) for row, point in wanted}
        with progress.of_script(self.benchmark.name, self.device) as bar:
            left = progress.Left(bar, first, counts)
            for _, point in wanted:
                point.parent._matmul_found = self._matmul()

            def keep(row: str, point: sweep.Point, outcome: processes.Outcome) -> bool:
                point.spent_s += outcome.seconds
                goes_on = point.parent._keep(row, outcome, point.done, point.spent_s)
                left.ends((row, point.name), goes_on, point.done)
                point.done += 1
                return goes_on

            self._run_singles([one for one in wanted if one[1].parent._is_single], bar, left, keep)
            groups = [one for one in wanted if not one[1].parent._is_single]
            references = References({point.name: point.parent for _, point in groups}.values(), bar)
            processes.run_together(references.next_work)
            while groups:  # rows in turn, A B C A B C
                row, point = groups.pop(groups.index(min(groups, key=_next_process)))
                bar.starts(f"{self._shown(row, point.done)}, {point.name}")
                if keep(row, point, references.failed.get(point.name) or self._group(point, row, point.done)):
                    groups.append((row, point))

    def _run_singles(
        self, due: list[tuple[str, sweep.Point]], bar: Any, left: progress.Left, keep: Callable[..., bool]
    ) -> None:
        """The rows that run on one device, side by side until they time.

        Args:
            due: rows and their points.
            keep: told of an outcome of a row at a point; whether it gets another process.
        """
        at_once = max((point.parent.at_once for _, point in due), default=1)
        references = References({point.name: point.parent for _, point in due}.values(), bar)
        alone: list[tuple[str, sweep.Point]] = []  # those that found too little memory beside others

        def next_work() -> processes.Work | None:
            if work := references.next_work():
                return work
            while due:
                one = row, point = due.pop(due.index(min(due, key=_next_process)))
                if failed := references.failed.get(point.name):
                    keep(row, point, failed)
                    continue
                bar.starts(f"{self._shown(row, point.done)}, {point.name}")
                job = {**point.parent._job(point.done), "replicas": {"gpus": 1, "link": None}}
                child = point.parent._child("row", row=row, **job)
                prepared = functools.partial(left.prepared, (row, point.name), point.done)
                return processes.Work(child, functools.partial(ended, one), prepared)
            return None

        def ended(one: tuple[str, sweep.Point], outcome: processes.Outcome) -> None:
            row, point = one
            if at_once > 1 and outcome.found_no_memory() and one not in alone:
                alone.append(one)
                left.begins_anew((row, point.name), point.done)
            elif keep(row, point, outcome):
                due.append(one)

        processes.run_together(next_work, at_once)
        due += alone
        processes.run_together(next_work)

    def _group(self, point: sweep.Point, row: str, number: int) -> processes.Outcome:
        """One process of a row at a point: its workers."""
        gpus = point.parent.constants["REPLICAS"]
        count = self.benchmark.workers(row, gpus)
        visible: Sequence[str] = self._gpus[:gpus] if self.device == "gpu" else ()
        if count < gpus and visible:  # one process has them all
            visible = [",".join(visible)]
        where = workers.places(self._hosts()[:count], count, visible)
        child = point.parent._child("row", row=row, **point.parent._job(number))
        child["env"] |= point.parent._added(row)
        return workers.run(child, where, gpus, machine.gpu_link(self._gpus[:gpus]) if self.device == "gpu" else None)


def _next_process(one: tuple[str, sweep.Point]) -> int:
    """Of a row and its point: the number of the process that is next."""
    return one[1].done


def main(script: Benchmark, argv: Sequence[str] | None = None) -> int:
    """Run the script; exit statuses as of harness.run.benchmark.main."""
    return benchmark.main(script, argv, Parent)


def of_row(made: Any, cannot: Callable[[Any, SimpleNamespace], str] = lambda row, constants: "") -> script.Row:
    """The row of such a benchmark from one of models/rows.py's REPLICATED."""
    single = made.row
    return script.Row(
        made.what,
        lambda c: made.expected_ops(c.NUM_LAYERS, c.TIME_STEPS, c.DEVICE, c.REPLICAS),
        single.needs_gpu,
        single.framework,
        single.precisions,
        lambda constants: cannot(made, constants),
        single.ours,
        made.environment,
    )
