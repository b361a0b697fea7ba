"""How many processes a row gets: PROCESSES, or with --repeat-until as many as its interval takes; while its time lasts."""

import math
from collections.abc import Mapping, Sequence

from harness.record import intervals

# With --repeat-until: a row stops when its interval happens to be narrow, and of few processes one is narrow by chance. Simulated
# (tests/harness/test_intervals.py), stopping so from 2 processes on leaves 88 to 93 % of coverage, from 5 on 91 to 95 %.
AT_LEAST = 5
BUDGETS = 10  # with --repeat-until a row may take this many times its ROW_BUDGET_S

BUDGET_NOTE = "fewer processes: its time was up (ROW_BUDGET_S)"
WIDE_NOTE = "interval wider than the {until:g} % asked for: its time was up"


class StoppingRule:
    """When a row of a run has enough processes, and when its time is up.

    Args:
        processes: at least this many (PROCESSES).
        budget_s: seconds that a row's processes may take together (ROW_BUDGET_S); it is looked at between two processes.
        until: None, or the half-width of the interval, as a fraction of the time, until which every mode of a row goes on.
    """

    def __init__(self, processes: int, budget_s: float, until: float | None = None) -> None:
        self.until = until
        self.least = processes if until is None else max(processes, AT_LEAST)
        self.limit_s = budget_s if until is None else BUDGETS * budget_s
        self.note = BUDGET_NOTE if until is None else WIDE_NOTE.format(until=100 * until)

    def enough(self, records: Sequence[Mapping]) -> bool:
        """Whether the records of a row, one per mode, have the processes that they need."""
        if any(len(record["blocks_ms"]) < self.least for record in records):
            return False
        widths = [intervals.half_width(record["step_ms"]) for record in records]
        return self.until is None or all(width is not None and width <= self.until for width in widths)

    def ended(self, records: Sequence[Mapping]) -> bool:
        """Whether an earlier run has brought the row to its end."""
        return self.enough(records) or any(
            self.note in record["notes"] and record.get("spent_s", math.inf) > self.limit_s for record in records
        )

    def noted(self, record: Mapping, time_is_up: bool) -> dict:
        """The record with the note that its time was up, or without the one of an earlier process.

        It keeps `until`, with which it may have more processes than PROCESSES.
        """
        notes = [note for note in record["notes"] if not is_time_up(note)]
        asked = {"repeat_until": self.until} if self.until else {}
        return {**record, "notes": [*notes, self.note] if time_is_up else notes, **asked}


def is_time_up(note: str) -> bool:
    """Whether the note says that a row's time was up; such rows stand together under a table."""
    return note.endswith("its time was up") or note == BUDGET_NOTE
