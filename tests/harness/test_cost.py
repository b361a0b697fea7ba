"""What the harness itself costs: of a timed block, in memory, for --list, and for drawing tables.

Seconds are those of the processor, or the least of many tries, so that what else runs on the machine counts nowhere.
"""

import itertools
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from harness.measure import clocks
from harness.record import records
from harness.run import jobs

PROJECT = Path(__file__).resolve().parents[2]
SHARE = 0.01  # of a timed block that the harness may take
BATCHES = 50  # of a block, of about 1 ms each: the shortest that the suite times


def work(_batch) -> float:
    """About 1 ms on one thread."""
    return float(np.sin(VALUES, out=OUT)[-1])


VALUES = np.linspace(0, 9, 60_000)
OUT = np.empty_like(VALUES)


def sync() -> None:
    pass


def block_s(step) -> float:
    """Seconds of one block by the harness' clock."""
    timed = clocks.time_blocks(
        step, range(8), sync=sync, restore=sync, read=float, warmup_batches=0, warmup_limit_s=0.0, timed_batches=BATCHES,
        blocks=1, min_block_s=0.0,
    )  # fmt: skip
    assert timed.batches_per_block == BATCHES
    return timed.ms[0] * timed.batches_per_block / 1e3


def bare_s(step) -> float:
    """Seconds of the same batches in a bare loop."""
    order = [k % 8 for k in range(BATCHES)]
    sync()
    begin = time.perf_counter()
    for batch in order:
        step(batch)
    sync()
    return time.perf_counter() - begin


def share_of_harness(step, monkeypatch) -> float:
    """By how much blocks exceed bare loops of the same batches, in seconds of this thread: median of 30 pairs, in turn."""
    monkeypatch.setattr(time, "perf_counter", time.thread_time)
    ratios = []
    for turn in range(30):
        if turn % 2:
            block, bare = block_s(step), bare_s(work)
        else:
            bare, block = bare_s(work), block_s(step)
        ratios.append(block / bare)
    return statistics.median(ratios) - 1


def test_harness_takes_at_most_one_percent_of_a_timed_block(monkeypatch):
    assert share_of_harness(work, monkeypatch) <= SHARE


def test_measurement_of_the_share_sees_four_percent_more(monkeypatch):
    def slower(batch):
        until = time.thread_time() + 4e-5
        while time.thread_time() < until:
            pass
        return work(batch)

    assert share_of_harness(slower, monkeypatch) > 2 * SHARE


def test_clock_adds_less_than_a_microsecond_to_a_batch():
    """The same for a step that takes nothing: what the harness adds does not hide behind the step's own noise."""

    def nothing(_batch) -> float:
        return 0.0

    added = min(block_s(nothing) for _ in range(200)) - min(bare_s(nothing) for _ in range(200))
    assert added / (BATCHES) < 1e-6


def test_parent_takes_less_than_100_mb_while_its_rows_run(stub):
    process = stub.start("--rows=sleeps")
    parent = psutil.Process(process.pid)
    most, deadline = 0, time.monotonic() + 60
    try:
        while not (stub.folder / "pids").exists():  # the row runs
            assert process.poll() is None and time.monotonic() < deadline
            most = max(most, parent.memory_info().rss)
            time.sleep(0.02)
        most = max(most, parent.memory_info().rss)
        loaded = {Path(mapped.path).name for mapped in parent.memory_maps()}
    finally:
        process.terminate()
        process.communicate(timeout=30)
    assert 10e6 < most < 100e6
    assert not [name for name in loaded if "tensorflow" in name or "torch" in name or "multiarray" in name]


# The script as a user runs it, and at its end the most memory that this process ever had (VmHWM: since it was started).
WHOLE_RUN = """
import runpy, sys
sys.argv = sys.argv[1:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    (peak,) = [line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")]
    heavy = {"numpy", "pandas", "matplotlib", "tensorflow", "torch"} & sys.modules.keys()
    print("peak", peak, *sorted(heavy), file=sys.stderr)
"""


def test_parent_takes_less_than_100_mb_to_the_end_of_its_run(stub):
    shutil.copytree(run_of_100_rows(stub.folder / "committed"), stub.out)
    command = [sys.executable, "-c", WHOLE_RUN, str(stub.script), *stub.arguments("--rows=first,second")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert len(list(stub.out.glob("*.png"))) >= 5 and (stub.out / "stub.md").is_file(), (
        "the tables of all rows were drawn"
    )
    word, peak, *heavy = done.stderr.splitlines()[-1].split()
    assert word == "peak" and heavy == [] and 10e6 < 1024 * int(peak) < 100e6


def processor_s(command: list, tries: int, **keywords) -> float:
    """The least user and system seconds of a command and its children."""
    taken = []
    for _ in range(tries):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(command, capture_output=True, text=True, **keywords)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert done.returncode == 0, done.stderr
        taken.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(taken)


SCRIPTS = sorted(jobs.SCRIPTS)


@pytest.mark.parametrize("command", [
    ["./run_all.sh", "--no-install", "--list"], [sys.executable, "-m", "harness.run.suite", "--list"],
    *([sys.executable, f"benchmarks/{name}.py", "--list"] for name in SCRIPTS),
], ids=["run_all.sh", "harness.run.suite", *SCRIPTS])  # fmt: skip
def test_list_takes_less_than_half_a_second(command):
    environment = {**os.environ, "PYTHON": sys.executable}
    assert processor_s(command, tries=3, cwd=PROJECT, env=environment) < 0.5


def run_of_100_rows(folder: Path) -> Path:
    """The largest committed run, cut or filled up to 100 rows of figures: whole configs, of each of its benchmarks in turn."""
    run = max(PROJECT.glob("results/*/"), key=lambda path: len(list((path / "rows").glob("*.json"))))
    folder.mkdir(exist_ok=True)
    shutil.copytree(run / "layout", folder / "layout")
    shutil.copy(run / "run.json", folder)
    (folder / "rows").mkdir()
    configs: dict[str, dict[tuple, list[dict]]] = {}
    for record in (json.loads(path.read_text()) for path in sorted((run / "rows").glob("*.json"))):
        if record["status"] == "ok":  # skipped rows have little to draw
            of_config = configs.setdefault(record["benchmark"], {})
            of_config.setdefault((record["config"]["CONFIG"], record["precision"]), []).append(record)
    in_turn = itertools.chain.from_iterable(
        itertools.zip_longest(*(own.values() for own in configs.values()), fillvalue=[])
    )
    chosen = list(itertools.chain.from_iterable(in_turn))[:100]
    assert {record["benchmark"] for record in chosen} == set(configs)
    for number in range(100 - len(chosen)):
        again = chosen[number % len(chosen)]
        chosen.append({**again, "row": f"{again['row']}_{number}"})
    for record in chosen:
        records.write_record(folder, record)
    assert len(list((folder / "rows").iterdir())) == 100
    return folder


def test_all_tables_and_plots_of_100_rows_are_drawn_in_less_than_3_s(tmp_path):
    run = run_of_100_rows(tmp_path)
    taken = processor_s([sys.executable, "-m", "harness.report.tables", str(run)], tries=2, cwd=PROJECT)
    pages, plots = list(run.glob("*.md")), list(run.glob("*.png"))
    assert len(pages) >= 3 and len(plots) >= 5
    assert sum(page.read_text().count("\n| ") for page in pages) > 100
    assert taken < 3.0
