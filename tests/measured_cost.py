"""What the harness itself costs on this machine, as ratios of processor time: python -m tests.measured_cost

    a timed block against the same batches in a bare loop       1.00 where the harness adds nothing
    --list against a Python that does nothing                   of run_all.sh and of every script
    the tables and plots of 100 rows against those of 10        10 where drawing is linear and starting costs nothing

Takes about two minutes. Nothing is judged; what must hold on any machine is tests/harness/test_cost.py.
"""

import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np

from harness.measure import clocks
from tests.harness.test_cost import PROJECT, SCRIPTS, run_of_rows

BATCHES = 50  # of a block, of about 1 ms each: the shortest that the suite times
PAIRS = 30
VALUES = np.linspace(0, 9, 60_000)
OUT = np.empty_like(VALUES)


def work(_batch: int) -> float:
    """About 1 ms on one thread."""
    return float(np.sin(VALUES, out=OUT)[-1])


def nothing(_batch: int) -> float:
    return 0.0


def sync() -> None:
    pass


def block_s(step: Callable[[int], float]) -> float:
    """Seconds of one block by the harness' clock."""
    timed = clocks.time_blocks(
        step, range(8), sync=sync, restore=sync, read=float, warmup_batches=0, warmup_limit_s=0.0, timed_batches=BATCHES,
        blocks=1, min_block_s=0.0,
    )  # fmt: skip
    return timed.ms[0] * timed.batches_per_block / 1e3


def bare_s(step: Callable[[int], float]) -> float:
    """Seconds of the same batches in a bare loop."""
    order = [k % 8 for k in range(BATCHES)]
    sync()
    begin = time.perf_counter()
    for batch in order:
        step(batch)
    sync()
    return time.perf_counter() - begin


def block_against_bare_loop() -> float:
    """Median of PAIRS, in turn, in seconds of this thread."""
    with mock.patch.object(time, "perf_counter", time.thread_time):
        return statistics.median(block_s(work) / bare_s(work) for _ in range(PAIRS))


def added_us() -> float:
    """Microseconds that the harness adds to a batch that takes nothing: the least of many tries."""
    return 1e6 * (min(block_s(nothing) for _ in range(200)) - min(bare_s(nothing) for _ in range(200))) / BATCHES


def processor_s(command: list[str], tries: int = 3) -> float:
    """The least user and system seconds of a command and its children."""
    taken = []
    for _ in range(tries):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        environment = {**os.environ, "PYTHON": sys.executable}
        subprocess.run(command, cwd=PROJECT, env=environment, stdout=subprocess.DEVNULL, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        taken.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(taken)


def main() -> None:
    print(f"a timed block / a bare loop: {block_against_bare_loop():.4f} ({added_us():.2f} µs added to a batch)")
    idle = processor_s([sys.executable, "-c", "pass"])
    commands = {"./run_all.sh --no-install": ["./run_all.sh", "--no-install"]}
    commands |= {f"benchmarks/{name}.py": [sys.executable, f"benchmarks/{name}.py"] for name in SCRIPTS}
    for name, command in commands.items():
        listing = processor_s([*command, "--list"])
        print(f"{name} --list / python -c pass: {listing / idle:.1f} ({listing:.2f} s)")
    with tempfile.TemporaryDirectory() as folder:
        few_s, many_s = (
            processor_s(
                [sys.executable, "-m", "harness.report.tables", str(run_of_rows(Path(folder, str(count)), count))]
            )
            for count in (10, 100)
        )
    print(f"tables and plots of 100 rows / of 10: {many_s / few_s:.2f} ({many_s:.2f} s / {few_s:.2f} s)")


if __name__ == "__main__":
    main()
