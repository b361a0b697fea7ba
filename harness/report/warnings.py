"""What a reader of a table has to be warned of, from the records alone: one line per kind of trouble, with its rows."""

import itertools
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

from harness.record import machine
from harness.record.stopping_rule import is_time_up
from harness.report import launches
from harness.report.cells import NOT_JUDGED, plain
from harness.report.provenance import listed, throttling

SPREAD = 0.05  # standard deviation of the blocks, of their mean
DRIFT = 0.02  # from the first process to the last, where each is slower, or faster, than the one before
SLOW_START = 0.02  # first block against the median of the others of its process
CLOCK = 0.99  # of the maximum: NVML's steps of 15 MHz are below 1 %
HOT_C = 80
WARMED_C = 15  # between the coolest and the hottest process
Mark = Callable[[Mapping], str | None]


def _percent(fraction: float, sign: str = "") -> str:
    return f"{100 * fraction:{sign}.0f} %"


def spread(record: Mapping) -> str | None:
    """Standard deviation of all blocks, in percent of their mean, where it is over SPREAD."""
    every = [ms for blocks in record["blocks_ms"] for ms in blocks]
    if len(every) < 3:
        return None
    share = statistics.stdev(every) / statistics.fmean(every)
    return _percent(share) if share > SPREAD else None


def drift(record: Mapping) -> str | None:
    """How far the processes went in one direction, of three and more, where it is over DRIFT; of two every pair does."""
    medians = [statistics.median(blocks) for blocks in record["blocks_ms"] if blocks]
    steps = [after - before for before, after in itertools.pairwise(medians)]
    if len(medians) < 3 or not (all(step > 0 for step in steps) or all(step < 0 for step in steps)):
        return None
    change = medians[-1] / medians[0] - 1
    return _percent(change, "+") if max(medians) / min(medians) > 1 + DRIFT else None


def slow_start(record: Mapping) -> str | None:
    """How much slower the first block is than the median of the others, in the median over processes, where over SLOW_START."""
    starts = [blocks[0] / statistics.median(blocks[1:]) - 1 for blocks in record["blocks_ms"] if len(blocks) > 2]
    return _percent(statistics.median(starts), "+") if starts and statistics.median(starts) > SLOW_START else None


def not_settled(record: Mapping) -> str | None:
    """In how many of the row's processes the warm-up was given up; "" where it has one alone."""
    warmups = record.get("warmup", [])
    lost = [warmup for warmup in warmups if not warmup["settled"]]
    several = f"{len(lost)} of {len(warmups)} processes" if len(warmups) > 1 else ""
    return several if lost else None


def shared_gpu(record: Mapping) -> str | None:
    """The largest number of other processes on the GPU while a process of the row had it; None where NVML does not know."""
    others = max((state["gpu_processes"] - 1 for state in _timed(record, "gpu_processes")), default=0)
    return str(others) if others > 0 else None


def was_disturbed(record: Mapping) -> bool:
    """Whether other processes ran on the row's processors or GPU meanwhile: its times are upper bounds."""
    return machine.OTHERS_NOTE in record["notes"] or shared_gpu(record) is not None


def not_judged(slower: Mapping) -> str:
    """What follows a ratio of two rows where the time of the slower one is an upper bound; else ""."""
    return f", {NOT_JUDGED}" if was_disturbed(slower) else ""


def low_clock(record: Mapping) -> str | None:
    """The lowest SM clock right after the timed blocks, where it is under its maximum."""
    states = _timed(record, "sm_mhz", "sm_max_mhz")
    low = [state["sm_mhz"] for state in states if state["sm_mhz"] < CLOCK * state["sm_max_mhz"]]
    return f"{min(low):.0f} of {max(state['sm_max_mhz'] for state in states):.0f} MHz" if low else None


def throttled(record: Mapping) -> str | None:
    return ", ".join(throttling(record) or []) or None


def hot(record: Mapping) -> str | None:
    """The highest temperature, where it is over HOT_C; or how far the processes' lie apart, where over WARMED_C."""
    degrees = [state["temperature_c"] for state in _timed(record, "temperature_c")]
    if degrees and max(degrees) > HOT_C:
        return f"{max(degrees):.0f} °C"
    if degrees and max(degrees) - min(degrees) > WARMED_C:
        return f"{min(degrees):.0f} to {max(degrees):.0f} °C"
    return None


def _timed(record: Mapping, *keys: str) -> list[Mapping]:
    """The GPU's states right after the timed blocks, or at the end of a row that has no such; one per process."""
    states = [s for s in record["clocks"] if all(isinstance(s.get(key), int | float) for key in keys)]
    found = [state for state in states if state.get("when") == "timed"]
    return found or [state for state in states if state.get("when") == "end"]


# What is said of the rows, in the order in which it stands under a table, and how a row is found to have it: a figure, or ""
# where the row's name says all.
WARNINGS: dict[str, Mark] = {
    "Another process on the GPU": shared_gpu,
    "Clocks throttled": throttled,
    "SM clock under its maximum": low_clock,
    f"Temperature over {HOT_C} °C, or processes over {WARMED_C} °C apart": hot,
    f"Spread over {_percent(SPREAD)} (standard deviation of the blocks)": spread,
    f"Drift over {_percent(DRIFT)}, each process slower or faster than the one before": drift,
    f"First block over {_percent(SLOW_START)} slower than the others": slow_start,
    f"Launches over {_percent(launches.RATIO - 1)} off the committed record of the same row": launches.changed,
    "Warm-up not settled within its limit": not_settled,
}


def lines(rows: Iterable[Mapping], brief: bool) -> list[str]:
    """The warnings under a table of these rows, one line per kind; brief: at most six rows a line."""
    timed = [record for record in rows if record["status"] == "ok" and record["blocks_ms"]]
    found = {
        what: {r["row"]: value for r in timed if (value := mark(r)) is not None} for what, mark in WARNINGS.items()
    }
    said = [f"**{what}**: {_rows(values, brief)}." for what, values in found.items() if values]
    ended: dict[str, list[str]] = {}
    for record in timed:
        for note in filter(is_time_up, record["notes"]):
            ended.setdefault(note, []).append(record["row"])
    more = "--resume with a larger --row-budget-s adds processes."
    ended_lines = [
        f"{note[0].upper()}{note[1:]}: {listed(names, _most(names, brief))}. {more}" for note, names in ended.items()
    ]
    return said + ended_lines


def _rows(values: Mapping[str, str], brief: bool) -> str:
    shown = list(values)[: _most(values, brief)]
    more = f" and {len(values) - len(shown)} more" if len(values) > len(shown) else ""
    return ", ".join(f"`{row}` {plain(values[row])}".rstrip() for row in shown) + more


def _most(names: Sequence | Mapping, brief: bool) -> int:
    return 6 if brief else len(names)
