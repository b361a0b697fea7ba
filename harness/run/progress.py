"""How far a run is: one bar over all of its rows on a terminal, and a line now and then where there is none.

A script that the suite has started has no bar of its own: it reports to the suite, whose bar spans all scripts. The reports are
lines of JSON through a pipe whose descriptor is in the environment: ["total", seconds, processes] once, then ["starts", text] and
["ends", seconds, processes, seconds that others have done]. Seconds are expected ones (harness/run/estimate.py), by which the bar
is filled.
"""

import contextlib
import json
import os
import sys
import time
from collections.abc import Hashable, Mapping, Sequence, Set
from typing import Any, NamedTuple, TextIO

from harness.run.estimate import Seconds, factor, minutes, slowness

REPORTS = "LSTM_BENCH_PROGRESS"  # environment variable: the descriptor of the pipe to the suite
LINE_S = 30.0  # at least so long between two lines, where standard error is no terminal
BELIEF_S = 60.0  # the seconds that were expected count like so many that were measured
PREPARED = 0.8  # of what a process does beside others, it has done when it waits for its turn to time


class Progress:
    """A bar, or lines, on standard error; in a `with` statement.

    Args:
        title: what runs, such as "mnist"; "" for the suite, whose parts say it.
        slowness: how many times longer than expected the first processes are believed to take.
    """

    def __init__(self, title: str = "", slowness: float = 1.0) -> None:
        self._title, self._slowness = title, slowness
        self._total_s = self._done_s = self._others_s = 0.0
        self._total = self._done = 0
        self._text, self._bar = "", None
        self._began = self._ended = self._said = time.monotonic()

    def __enter__(self) -> "Progress":
        if sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=1.0, bar_format="{percentage:3.0f}%|{bar:20}| {desc}", dynamic_ncols=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def total(self, seconds: float, processes: int) -> None:
        """So much is there to do in all, what is done included."""
        self._total_s, self._total = seconds, processes
        self._show()

    def starts(self, text: str) -> None:
        """A process of a row begins."""
        self._text = text
        self._show()

    def ends(self, seconds: float, processes: int = 1, others_s: float = 0.0) -> None:
        """It has ended. seconds: expected of it; others_s: expected of what others have done, which have not ended."""
        self._done_s, self._done, self._others_s = self._done_s + seconds, self._done + processes, others_s
        self._ended = time.monotonic()
        self._show()

    def left_s(self) -> float:
        """Seconds that are left, going by how long what is done took against what was expected of it."""
        took = self._ended - self._began
        done_s = self._done_s + self._others_s
        slower = (took + self._slowness * BELIEF_S) / (done_s + BELIEF_S)
        running = time.monotonic() - self._ended
        return max(0.0, slower * (self._total_s - done_s) - running)

    def _show(self) -> None:
        place = f"{self._done}/{self._total} {' '.join(filter(None, [self._title, self._text]))}"
        left_s = self.left_s()
        left = f", about {minutes(left_s)} left" if left_s >= 0.5 else ", longer than expected"
        left *= self._done < self._total
        if self._bar is not None:
            self._bar.total, self._bar.n = max(self._total_s, 1e-9), min(self._done_s, self._total_s)
            self._bar.set_description_str(place + left)
        elif time.monotonic() - self._said >= LINE_S:
            self._said = time.monotonic()
            print(place + left, file=sys.stderr, flush=True)

    def tick(self) -> None:
        """Some time has gone by: the bar's time left falls. Lines are for what happens."""
        if self._bar is not None:
            self._show()

    def write(self, line: str, file: TextIO) -> None:
        """Print a line that is not the bar's."""
        clear = self._bar.external_write_mode(file=file) if self._bar is not None else contextlib.nullcontext()
        with clear:
            print(line, file=file, flush=True)


class Part(NamedTuple):
    """One start of a script: its name, the seconds expected of its preparation and of its rows, and their processes."""

    name: str
    preparation_s: float
    rows_s: float
    processes: int


class Whole(Progress):
    """The suite's bar: over all of its parts, one of which runs and reports."""

    def __init__(self, parts: Sequence[Part], slowness: float) -> None:
        super().__init__(slowness=slowness)
        self._parts, self._at = list(parts), 0

    def begins(self, number: int) -> None:
        """The part of that number starts; what was expected of those before it is done, whatever they reported."""
        self._at, self._ended = number, time.monotonic()
        self._text = f"{self._parts[number].name} preparation" if number < len(self._parts) else ""
        self._sum()

    def _sum(self, prepared_s: float = 0.0) -> None:
        before, self._others_s = self._parts[: self._at], 0.0
        self._done_s = sum(part.preparation_s + part.rows_s for part in before) + prepared_s
        self._done = sum(part.processes for part in before)
        self._total_s = sum(part.preparation_s + part.rows_s for part in self._parts)
        self.total(self._total_s, sum(part.processes for part in self._parts))

    def hears(self, report: str) -> None:
        """A line that the running part has sent; in a thread of its own."""
        kind, *what = json.loads(report)
        part = self._parts[self._at]
        if kind == "total":  # less than was planned, where --resume has found rows that are finished
            self._parts[self._at] = part._replace(rows_s=what[0], processes=what[1])
            self._ended = time.monotonic()
            self._sum(prepared_s=part.preparation_s)
        elif kind == "starts":
            self.starts(f"{part.name} {what[0]}")
        else:
            self.ends(*what)


class Left:
    """Which of the processes that were expected are left, by row, and which have prepared beside others, or timed too.

    Args:
        bar: shows them.
        first: what the first of a row's processes adds to the run.
        processes: expected, without those of an earlier run.
    """

    def __init__(self, bar: "Progress | Reports", first: Mapping[Hashable, Seconds], processes: Mapping[Hashable, int]):
        self._bar, self._first, self._left = bar, first, dict(processes)
        self._prepared: dict[Hashable, set[int]] = {key: set() for key in first}
        self._timed: dict[Hashable, set[int]] = {key: set() for key in first}
        self._begun: set[Hashable] = set()  # rows of which a process has ended
        bar.total(sum(sum(self._of(key, count)) for key, count in self._left.items()), sum(self._left.values()))

    def _of(self, key: Hashable, count: int) -> Seconds:
        """The next processes of a row, so many."""
        if not count:
            return Seconds(0.0)
        first, later = self._first[key], self._first[key].later
        following = later if key in self._begun else first
        return Seconds(following.shared + (count - 1) * later.shared, count * first.alone)

    def prepared(self, key: Hashable, process: int) -> None:
        """That process of a row waits for its turn to time, beside others. The time left takes that in when one of these ends."""
        self._prepared[key].add(process)

    def timed(self, key: Hashable, process: int) -> None:
        """It has had its turn."""
        self._timed[key].add(process)

    def begins_anew(self, key: Hashable, process: int) -> None:
        """It did not come to its end, and will run again."""
        self._prepared[key].discard(process)
        self._timed[key].discard(process)

    def ends(self, key: Hashable, goes_on: bool, process: int = 0) -> None:
        """One of a row's processes has ended; with it all that were expected, unless the row goes on."""
        count = min(1, self._left[key]) if goes_on else self._left[key]
        seconds = sum(self._of(key, count))
        self._left[key] -= count
        self._begun.add(key)
        for done in (self._prepared, self._timed):
            done[key] = done[key] - {process} if goes_on else set()
        others_s = sum(PREPARED * self._of(each, self._waiting(self._prepared, each)).shared for each in self._left)
        others_s += sum(self._of(each, self._waiting(self._timed, each)).alone for each in self._left)
        self._bar.ends(seconds, count, others_s)

    def _waiting(self, done: Mapping[Hashable, Set[int]], key: Hashable) -> int:
        """How many of a row's processes have done that, of those that are left."""
        return min(len(done[key]), self._left[key])


class Reports:
    """What a script that the suite has started tells of its progress; has Progress' methods."""

    def __init__(self, descriptor: int) -> None:
        self._pipe = os.fdopen(descriptor, "w", buffering=1)

    def __enter__(self) -> "Reports":
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()

    def _tell(self, *report: Any) -> None:
        with contextlib.suppress(BrokenPipeError):  # the suite has gone, and this process is about to
            self._pipe.write(json.dumps(report) + "\n")

    def total(self, seconds: float, processes: int) -> None:
        self._tell("total", seconds, processes)

    def starts(self, text: str) -> None:
        self._tell("starts", text)

    def ends(self, seconds: float, processes: int = 1, others_s: float = 0.0) -> None:
        self._tell("ends", seconds, processes, others_s)


def of_script(title: str, device: str) -> Progress | Reports:
    """A script's bar; or its reports to the suite, where that has started it."""
    if descriptor := os.environ.pop(REPORTS, ""):
        return Reports(int(descriptor))
    return Progress(title, factor(device, slowness(tries=4)))  # few: a script starts at once
