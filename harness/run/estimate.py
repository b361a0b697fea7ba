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
GAIN = 0.42  # n processes that prepare side by side take 1/n**GAIN of the time: the stacked LM, by 4, 8 and 16
PREPARED = 0.8  # of what a process takes, where no run says how long it has timed
TRIES = 40  # long enough for other processes to get their turns


class Seconds(NamedTuple):
    """What one process adds to a run: until it times, which others do beside it, and while it times, one on a GPU."""

    preparing: float
    timing: float


class Estimate:
    """Seconds of the parts of a run in one preset on one device, of a machine whose `slowness` is 1.

    Attributes:
        known: whether a run like this one has been measured.
    """

    def __init__(self, preset: str, device: str) -> None:
        found = _table().get(f"{preset} {device}", {})
        self.known, self._seconds = bool(found), found
        self._slowness = found.get("slowness", 1.0)  # of the machine that these seconds are of

    def first_s(self, script: str, row: str, framework: str) -> float:
        """Of a row's first process by itself, at one point; `script`: its name, with " --train" for PTB's schedule."""
        return sum(self._known(script, row, framework))

    def process(
        self, script: str, row: str, framework: str, processes: int = 1, at_once: int = 1, gpus: int = 1
    ) -> Seconds:
        """Of each of a row's processes, where so many of all rows run side by side, on so many GPUs."""
        preparing, timing = self._known(script, row, framework)
        share = _as_first(processes) / processes
        if not timing:  # within a first process' seconds, of which the gain was measured too
            preparing, timing = PREPARED * preparing, (1 - PREPARED) * preparing
            return Seconds(share * preparing / at_once**GAIN, share * timing / at_once**GAIN)
        return Seconds(share * preparing / at_once**GAIN, share * timing / gpus)

    def _known(self, script: str, row: str, framework: str) -> Seconds:
        """Of a first process; timing 0: not known apart."""
        own = self._seconds.get(script, {})
        known = own.get(row, own.get(framework))
        if known is None:
            return Seconds(UNKNOWN_S, 0.0)
        whole, timing = known if isinstance(known, list) else (known, 0.0)
        return Seconds((whole - timing) / self._slowness, timing / self._slowness)

    def rows_of(self, script: str, plan: Mapping[str, Any]) -> tuple[float, int]:
        """(seconds, processes) of one start of a script; plan: harness.run.parent.Parent.plan. A point counts as a process."""
        seconds, processes = 0.0, 0
        for row, framework in plan["rows"].items():
            count = self.processes_of(self.first_s(script, row, framework), plan["processes"], plan["budget_s"])
            seconds += count * sum(self.process(script, row, framework, count, plan["at_once"], plan["gpus"]))
            processes += count
        return plan["points"] * seconds, plan["points"] * processes

    def processes_of(self, process_s: float, processes: int, budget_s: float) -> int:
        """Processes that a row gets within its budget, which is looked at between two of them; process_s: of the first one.

        As where the table was measured: a slower machine gets fewer.
        """
        process_s *= self._slowness
        if process_s >= budget_s:
            return 1
        return min(processes, 2 + int((budget_s / process_s - 1) / LATER))

    def preparation_s(self, script: str) -> float:
        """Of finding the data, of the float64 reference, of the large matmul, of the tables."""
        known = self._seconds.get(script, {}).get("preparation")
        return UNKNOWN_S if known is None else known / self._slowness


def _as_first(processes: int) -> float:
    """How many times what a row's first process takes so many of its processes take."""
    return 1 + LATER * (processes - 1)


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


def minutes(seconds: float) -> str:
    """Such as "40 s", "7 min" or "2 h 10 min"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    hours, rest = divmod(round(seconds / 60), 60)
    return f"{hours} h {rest} min" if hours else f"{rest} min"


def _for_the_table(whole: float, timing: float) -> float | list[float]:
    return [round(whole, 1), round(timing, 1)] if timing else round(whole, 1)


def main(runs: Sequence[str]) -> int:
    """Print {"slowness": {run: as at its start}, script: {row: seconds of a first process, for a whole training with those of
    it that were timed}} of these runs; the exit status."""
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    try:
        if not runs:
            raise UserError("expected a run's folder, such as results/cpu-2-core")
        read = [record for run in runs for record in records.read_run(run)[0]]
        slow = {run: records.check_run(run).get("slowness") for run in runs}
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for record in read:
        if record["status"] == "ok" and record.get("spent_s"):
            train = " --train" if (record["benchmark"], record["mode"]) == ("ptb", "fit") else ""
            rows = found.setdefault(record["benchmark"] + train, {})
            whole = record["spent_s"] / _as_first(len(record["blocks_ms"]))
            rows.setdefault(record["row"], []).append((whole, record.get("fit_s", 0.0)))
    medians = {
        script: {
            row: _for_the_table(*map(statistics.median, zip(*seconds, strict=True))) for row, seconds in rows.items()
        }
        for script, rows in found.items()
    }
    print(json.dumps({"slowness": slow, **medians}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
