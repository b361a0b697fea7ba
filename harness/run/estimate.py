"""How long a run will take: what each row took where it was measured, and how much slower this machine is now than that one.

    python -m harness.run.estimate results/cpu-2-core         # what rows took in a run, for benchmarks/seconds.json

The table is benchmarks/seconds.json. A row's process imports, traces and compiles most of its time, so that a fixed piece of such
work, Python's own compiler on one of its modules, says how fast this machine is, and how busy. Standard library only.
"""

import ast
import functools
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from harness.errors import UserError
from harness.record import records

TABLE = Path(__file__).resolve().parents[2] / "benchmarks" / "seconds.json"
UNKNOWN_S = 20.0  # of a process that no run has measured: what the progress goes by
PARSE_S = 0.0062  # of `slowness`'s piece of work on 2 idle cores of an AMD EPYC, whose slowness is 1
LATER = 0.4  # of what a row's first process takes, a later one does, which has less to prove
GAIN = 0.42  # n processes that prepare side by side take 1/n**GAIN of the time: runs of the stacked LM by 4, 8 and 16 of them
TRIES = 40  # long enough for other processes to get their turns


class Seconds(NamedTuple):
    """What a row's first process takes: in what others do beside it, and where one has a GPU to itself.

    Attributes:
        shared: all of a process of a few steps, of which it times for little.
        alone: a whole training; as long in each process of the row.
    """

    shared: float
    alone: float = 0.0

    @property
    def later(self) -> "Seconds":
        """What a later process of the row takes, which has less to prove."""
        return Seconds(LATER * self.shared, self.alone)

    def spread(self, at_once: float, gpus: int) -> "Seconds":
        """What it adds to a run in which so many processes prepare side by side, on so many GPUs."""
        return Seconds(self.shared / at_once**GAIN, self.alone / gpus)


def mean_at_once(numbers: Sequence[int]) -> float:
    """How many processes side by side, in a whole run, take as long as equal parts of it that have these numbers of them."""
    return statistics.fmean(number**-GAIN for number in numbers) ** (-1 / GAIN)


def at_once_of(times: float) -> float:
    """How many processes side by side are so many times sooner ready than one after another."""
    return times ** (1 / GAIN)


class Estimate:
    """Seconds of the parts of a run in one preset on one device, of a machine whose `slowness` is 1.

    Attributes:
        known: whether a run like this one has been measured.
    """

    def __init__(self, preset: str, device: str) -> None:
        found = _table().get(f"{preset} {device}", {})
        self.known, self._seconds = bool(found), found
        self._slowness = found.get("slowness", 1.0)  # of the machine that these seconds are of

    def first(self, script: str, row: str, framework: str) -> Seconds:
        """Of a row's first process, at one point; `script`: as `_of` takes it.

        A row that was measured in another config alone takes what it did there, by as much less or more as its framework's rows.
        """
        own, *others = self._of(script)
        if row in own:
            return self._seconds_of(own[row])
        if elsewhere := next((other for other in others if row in other), None):
            found, ratio = self._seconds_of(elsewhere[row]), 1.0
            if framework in own and framework in elsewhere:
                ratio = sum(self._seconds_of(own[framework])) / sum(self._seconds_of(elsewhere[framework]))
            return Seconds(*(ratio * part for part in found))
        known = next((one[framework] for one in (own, *others) if framework in one), None)
        return Seconds(UNKNOWN_S) if known is None else self._seconds_of(known)

    def _seconds_of(self, known: float | list[float]) -> Seconds:
        """An entry of the table, on a machine whose slowness is 1."""
        whole, alone = known if isinstance(known, list) else (known, 0.0)
        return Seconds((whole - alone) / self._slowness, alone / self._slowness)

    def rows_of(self, script: str, plan: Mapping[str, Any]) -> tuple[float, int]:
        """(seconds, processes) of one start of a script; plan: harness.run.parent.Parent.plan. A point counts as a process."""
        shared, alone, processes = 0.0, [0.0], 0
        for row, framework in plan["rows"].items():
            first = self.first(script, row, framework)
            count = self.processes_of(first, plan["processes"], plan["budget_s"])
            shared += first.shared + (count - 1) * first.later.shared
            alone.append(count * first.alone)
            processes += count
        spread = Seconds(shared, sum(alone)).spread(plan["at_once"], plan["gpus"])
        seconds = spread.shared + max(spread.alone, *alone)
        return plan["points"] * seconds, plan["points"] * processes

    def processes_of(self, first: Seconds, processes: int, budget_s: float) -> int:
        """Processes that a row gets within its budget, which is looked at between two of them.

        As where the table was measured: a slower machine gets fewer.
        """
        left_s = budget_s - self._slowness * sum(first)
        return 1 if left_s <= 0 else min(processes, 2 + int(left_s / (self._slowness * sum(first.later))))

    def preparation_s(self, script: str) -> float:
        """Of finding the data, of the float64 reference, of the large matmul, of the tables."""
        known = next((own["preparation"] for own in self._of(script) if "preparation" in own), None)
        return UNKNOWN_S if known is None else known / self._slowness

    def takes_another(self, script: str) -> bool:
        """Whether another config of the script has been measured, and its own has not."""
        own, *others = self._of(script)
        return not own and bool(others)

    def _of(self, script: str) -> list[dict]:
        """What is known of a script as it is started, "ptb --train --config=small": of that config, then of its others."""
        of_all = script.partition(" --config=")[0]
        names = [name for name in self._seconds if name.partition(" --config=")[0] == of_all and name != script]
        return [self._seconds.get(script, {}), *(self._seconds[name] for name in names)]


@functools.lru_cache
def _table() -> dict:
    return json.loads(TABLE.read_text())


def slowness(tries: int = TRIES) -> float:
    """How many times longer this machine takes for the same work than 2 idle cores of an AMD EPYC, as busy as it is now."""
    source = Path(json.decoder.__file__).read_bytes() + Path(functools.__file__).read_bytes()
    start = time.perf_counter()
    for _ in range(tries):
        ast.parse(source)
    return (time.perf_counter() - start) / tries / PARSE_S


def factor(device: str, slowness: float) -> float:
    """By what an `Estimate` is multiplied on this machine.

    1 on GPUs, where rows took the same on hosts whose slowness was 1.0 and 1.7.
    """
    return slowness if device == "cpu" else 1.0


def minutes(seconds: float) -> str:
    """Such as "40 s", "7 min" or "2 h 10 min"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    hours, rest = divmod(round(seconds / 60), 60)
    return f"{hours} h {rest} min" if hours else f"{rest} min"


def _first_of(record: Mapping[str, Any]) -> tuple[float, float]:
    """(whole, alone) of the first process of a record's row, as in the table."""
    later, alone = len(record["blocks_ms"]) - 1, record.get("fit_s", 0.0)
    return (record["spent_s"] - (later + 1) * alone) / (1 + LATER * later) + alone, alone


def main(runs: Sequence[str]) -> int:
    """Print, for the table, what rows took in each config (the median of these runs, of each the mean of a row's points), and
    how slow the machine was at the start of each run; the exit status."""
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    try:
        if not runs:
            raise UserError("expected a run's folder, such as results/cpu-2-core")
        of_runs = [_took(records.read_run(run)[0]) for run in runs]
        slow = {run: records.check_run(run).get("slowness") for run in runs}
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for of_run in of_runs:
        for (script, row), seconds in of_run.items():
            found.setdefault(script, {}).setdefault(row, []).append(seconds)
    for rows in found.values():
        for row, seconds in rows.items():
            whole, alone = (round(statistics.median(part), 1) for part in zip(*seconds, strict=True))
            rows[row] = [whole, alone] if alone else whole
    print(json.dumps({"slowness": slow, **found}, indent=1))
    return 0


def _took(read: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], tuple[float, float]]:
    """{(script as in `Estimate._of`, row): the mean (whole, alone) of its first processes} of a run's records."""
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for record in read:
        if record["status"] == "ok" and record.get("spent_s"):
            train = " --train" if (record["benchmark"], record["mode"]) == ("ptb", "fit") else ""
            config = record["config"]["CONFIG"].partition("-")[0]  # of a point such as "ptb_large-weak_2"
            script = f"{record['benchmark']}{train} --config={config}"
            found.setdefault((script, record["row"]), []).append(_first_of(record))
    return {key: tuple(map(statistics.fmean, zip(*seconds, strict=True))) for key, seconds in found.items()}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
