"""A benchmark of many small rows: one process measures many of them, since starting it takes longer than measuring one.

A row that crashes, or takes longer than ROW_LIMIT_S, keeps its place with the reason; another process goes on after it. A row
that changes its process, such as op determinism, has one of its own.
"""

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from harness.run import processes, progress
from harness.run.parent import Parent


class Together(Parent):
    """Runs its rows one after another, `alone` those that have a process of their own."""

    alone: Collection[str] = ()
    at_once = 1  # processes run one after the other

    def _run_rows(self) -> None:
        done, spent = self._due()
        first, expected = self._expected(done)
        with progress.of_script(f"{self.benchmark.name} {self.constants['CONFIG']}", self.device) as bar:
            left = progress.Left(bar, first, {row: max(0, expected[row] - done[row]) for row in done})

            def keep(row: str, outcome: processes.Outcome) -> None:
                spent[row] += outcome.seconds
                goes_on = self._keep(row, outcome, done[row], spent[row])
                left.ends(row, goes_on)
                done[row] += 1
                if not goes_on:
                    del done[row]

            while done:
                number = min(done.values())
                group = self._group([row for row in done if done[row] == number])
                bar.starts(self._shown(group[0], number) + (f" to {group[-1]}" if len(group) > 1 else ""))
                self._run_group(group, number, keep)

    def _group(self, rows: Sequence[str]) -> list[str]:
        """Those that the next process measures: the first, and with it the others of its framework."""
        first = rows[0]
        if first in self.alone:
            return [first]
        framework = self.benchmark.rows[first].framework
        return [row for row in rows if row not in self.alone and self.benchmark.rows[row].framework == framework]

    def _run_group(self, rows: Sequence[str], number: int, keep: Callable[[str, processes.Outcome], None]) -> None:
        """One process; its rows are kept as they are handed over. One that ends early has measured those before, and failed."""
        seconds: list[float] = []
        log = f"logs/{self._log_of(rows[0]).name}"

        def watch(handed: Sequence[Mapping]) -> None:
            for row, result in list(zip(rows, handed, strict=False))[len(seconds) :]:
                seconds.append(result["seconds"])
                keep(row, processes.Outcome(result["modes"], "", result["seconds"], log))

        jobs: list[dict[str, Any]] = [{"constants": self.constants, "row": row, **self._job(number)} for row in rows]
        outcome = processes.run_child(**self._child("points", row=rows[0], points=jobs, rehearse=True, watch=watch))
        if outcome.note:
            print(f"{rows[-1]}: {outcome.note}; see {outcome.log}", file=sys.stderr)
        if len(seconds) < len(rows) and (outcome.result is None or not seconds):
            rest = max(0.0, outcome.seconds - sum(seconds))
            keep(rows[len(seconds)], outcome._replace(result=None, seconds=rest))

    def _job(self, process: int) -> dict[str, Any]:
        """The float64 reference is small: each row computes its own. No share of a large product is taken."""
        return {"process": process, "data": self._data(), "reference": "", "protocol": self.constants, "matmul_flops": None,
                "options": True}  # fmt: skip
