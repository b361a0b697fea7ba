"""A benchmark whose rows have a process each, several times in turn (A B C A B C …): how the plain scripts run."""

import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from harness.run import processes, progress
from harness.run.parent import Parent
from harness.run.references import References


@dataclass
class RowProgress:
    """Where a row is with its processes: so many have been started; of how many the records know, and their seconds.

    `ended`: outcomes that wait for that of an earlier process.
    """

    started: int
    spent_s: float
    kept: int = -1
    begun: int = -1  # how many there were before this run
    ended: dict[int, processes.Outcome] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.kept = self.begun = self.started

    def may_start(self, least: int) -> bool:
        """Whether a further one is due.

        The others wait for the first one of this run, which compiles for them. The least number do not wait for each other, more
        go by what those before showed.
        """
        return self.started == self.kept or (self.kept > self.begun and self.started < least)

    def next_outcome(self) -> tuple[int, processes.Outcome] | None:
        """(number, outcome) of the next process, where that has ended."""
        if self.kept not in self.ended:
            return None
        outcome = self.ended.pop(self.kept)
        self.kept, self.spent_s = self.kept + 1, self.spent_s + outcome.seconds
        return self.kept - 1, outcome


class RowsInTurn(Parent):
    """Runs its rows in turn, some side by side until they time."""

    def _run_rows(self) -> None:
        done, spent = self._due()
        wanted = [*done]
        first, expected = self._expected(wanted)
        with (
            progress.of_script(f"{self.benchmark.name} {self.constants['CONFIG']}", self.device) as bar,
            self._scratch() as scratch,
        ):
            left = progress.Left(bar, first, {row: max(0, expected[row] - done[row]) for row in wanted})
            going = {row: RowProgress(done[row], spent[row]) for row in wanted}
            references = References([self] if wanted else [], bar)
            alone: list[tuple[int, str]] = []  # processes that found too little memory beside others

            def next_work() -> processes.Work | None:
                if work := references.next_work():
                    return work
                for row in [*going] if references.failed else ():
                    if going[row].started == done[row]:
                        del going[row]
                        self._keep(row, references.failed[self.constants["CONFIG"]], done[row], spent[row])
                        left.ends(row, goes_on=False)
                ready = [row for row in going if going[row].may_start(self.stopping_rule.least)]
                if not ready:
                    return None
                row = min(ready, key=lambda row: going[row].started)
                going[row].started += 1
                return work_of(row, going[row].started - 1, beside_others=self.at_once > 1)

            def work_of(row: str, process: int, beside_others: bool) -> processes.Work:
                bar.starts(self._shown(row, process))
                child = self._child("row", row=row, compiled=compiled(row, process), **self._job(process))
                return processes.Work(
                    child,
                    lambda outcome: ended(row, process, outcome, beside_others),
                    lambda: left.prepared(row, process),
                    lambda: left.timed(row, process),
                )

            def compiled(row: str, process: int) -> str | None:
                """Where a process keeps what it compiles: the first one, which finds nothing there, and those after its end."""
                folder = Path(scratch, row)
                if process == done[row] and not folder.exists():
                    folder.mkdir()
                    return str(folder)
                return str(folder) if going[row].kept > done[row] else None

            def ended(row: str, process: int, outcome: processes.Outcome, beside_others: bool) -> None:
                if row not in going:  # it has failed, or needs no more, meanwhile
                    return
                if beside_others and outcome.found_no_memory():
                    alone.append((process, row))
                    left.begins_anew(row, process)
                    return
                going[row].ended[process] = outcome
                while row in going and (found := going[row].next_outcome()):
                    number, outcome = found
                    goes_on = self._keep(row, outcome, number, going[row].spent_s)
                    left.ends(row, goes_on, number)
                    if not goes_on:
                        del going[row]

            def next_alone() -> processes.Work | None:
                while alone:
                    process, row = alone.pop(alone.index(min(alone)))
                    if row in going:
                        return work_of(row, process, beside_others=False)
                return next_work()

            processes.run_together(next_work, self.at_once)
            processes.run_together(next_alone)

    def _scratch(self) -> tempfile.TemporaryDirectory:
        """A folder that is gone after this run of the script; what a killed one leaves in the run's, the next one removes.

        Not below a folder with a space in its name: XLA's flags and Inductor's compiler end there.
        """
        below = None if " " in str(self.out.absolute()) else self.out
        return tempfile.TemporaryDirectory(prefix=".compiled-", suffix=".tmp", dir=below)
