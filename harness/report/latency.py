"""What the tables of a benchmark of requests come to: which row answers soonest at each point, and how far behind Keras is.

From the records alone, each point's shortest p50, and what is within SAME of it; points at which fewer than two rows have one
are left out.
"""

import re
from collections.abc import Mapping, Sequence

from harness.report.building import in_groups
from harness.report.cells import plain, value_at

PREDICT = "keras_predict"  # where it has no time, the slowest row of Keras is said to take so much longer
SAME = 1.05  # times the shortest p50: no row is said to be sooner
POINT = re.compile(r"(.+)-((?:stream|steps_\d+)-batch_\d+)")  # as harness.run.points names a config's


def advice(rows: Sequence[Mapping]) -> list[str]:
    """A sentence for each config, device and precision, over all of its points."""
    points: dict[tuple[str, str, str], dict[str, dict[str, float]]] = {}
    for (name, device, precision), members in in_groups(rows).items():
        times = {record["row"]: value_at(record, "latency.p50_ms") for record in members
                 if record["status"] == "ok" and record["mode"] == "request"}  # fmt: skip
        times = {row: ms for row, ms in times.items() if ms}
        if len(times) > 1:
            config, point = match.groups() if (match := POINT.fullmatch(name)) else (name, name)
            points.setdefault((config, device, precision), {})[point] = times
    return [_sentence(where, at) for where, at in points.items()]


def _sentence(where: tuple[str, str, str], at: Mapping[str, Mapping[str, float]]) -> str:
    """at: {point: {row: its p50 in ms}}, two rows or more at each."""
    soonest: dict[str, list[str]] = {}
    behind: dict[str, list[float]] = {}  # how many times as long each point's row of Keras takes
    for point, times in at.items():
        shortest = min(times.values())
        first = [f"`{row}`" for row in sorted(times, key=times.get) if times[row] <= SAME * shortest]
        soonest.setdefault(" and ".join(first), []).append(plain(point))
        of_keras = [row for row in times if row.startswith("keras")]
        slower = PREDICT if PREDICT in times else max(of_keras, key=times.get, default="")
        if slower and times[slower] > SAME * shortest:
            behind.setdefault(slower, []).append(times[slower] / shortest)
    config, device, precision = where
    by = [f"by {rows} at {', '.join(points)}" for rows, points in soonest.items()]
    first = " ".join(soonest)
    takes = [
        f"`{row}` takes {_range(ratios)} times as long{' elsewhere' if f'`{row}`' in first else ''}"
        for row, ratios in behind.items()
    ]
    return f"{plain(config)}, {device.upper()}, {precision}: a request is answered soonest, by p50, {'; '.join([*by, *takes])}."


def _range(ratios: Sequence[float]) -> str:
    return " to ".join(dict.fromkeys(f"{ratio:.{int(ratio < 10)}f}" for ratio in (min(ratios), max(ratios))))
