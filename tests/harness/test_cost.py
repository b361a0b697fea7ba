"""What the harness itself costs: calls inside a timed block, memory, what --list imports, calls for drawing tables.

Counted, not timed: what else runs on the machine does not matter. tests/measured_cost.py prints the seconds, as ratios.
"""

import itertools
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from harness.measure import clocks
from harness.record import records
from harness.run import jobs, suite

PROJECT = Path(__file__).resolve().parents[2]


def calls_of(function: Callable[[], object]) -> list[str]:
    """Names of everything that is called while `function` runs, in Python and in C."""
    called = []

    def note(frame, event, argument):
        if event == "call":
            called.append(frame.f_code.co_name)
        elif event == "c_call":
            called.append(argument.__name__)

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return called


def calls_between_the_clocks(time_blocks: Callable) -> list[str]:
    """What is called between the two readings of the clock around a block of 50 batches."""

    def step(batch):
        return batch

    def sync():
        pass

    called = calls_of(
        lambda: time_blocks(
            step, range(8), sync=sync, restore=sync, read=float, warmup_batches=0, warmup_limit_s=0.0, timed_batches=50,
            blocks=1, min_block_s=0.0,
        )
    )  # fmt: skip
    end, start = [place for place, name in enumerate(called) if name == "perf_counter"][-2::-1][:2]
    return [name for name in called[start + 1 : end] if name != "<listcomp>"]  # a call of its own before Python 3.12


def test_between_its_clocks_a_block_calls_its_steps_and_one_sync_and_nothing_else():
    assert calls_between_the_clocks(clocks.time_blocks) == ["step"] * 50 + ["sync"]


def test_a_clock_that_does_more_for_every_batch_is_seen():
    def busier(step, batches, **rest):
        return clocks.time_blocks(lambda batch: (len("more"), step(batch))[1], batches, **rest)

    assert calls_between_the_clocks(busier) != ["step"] * 50 + ["sync"]


def test_parent_takes_less_than_100_mb_while_its_rows_run(stub):
    process = stub.start("--rows=sleeps")
    parent = psutil.Process(process.pid)
    most, deadline = 0, time.monotonic() + 300
    try:
        while not (stub.folder / "pids").exists():  # the row runs
            assert process.poll() is None and time.monotonic() < deadline
            most = max(most, parent.memory_info().rss)
            time.sleep(0.02)
        most = max(most, parent.memory_info().rss)
        loaded = {Path(mapped.path).name for mapped in parent.memory_maps()}
    finally:
        process.terminate()
        process.communicate(timeout=300)
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
    shutil.copytree(run_of_rows(stub.folder / "committed", runs="cpu-*"), stub.out)  # of a CPU, as the stub's rows
    command = [sys.executable, "-c", WHOLE_RUN, str(stub.script), *stub.arguments("--rows=first,second")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert len(list(stub.out.glob("*.png"))) >= 5 and (stub.out / "stub.md").is_file(), (
        "the tables of all rows were drawn"
    )
    word, peak, *heavy = done.stderr.splitlines()[-1].split()
    assert word == "peak" and heavy == [] and 10e6 < 1024 * int(peak) < 100e6


SCRIPTS = jobs.scripts(suite.BENCHMARKS)
# Prints what was imported at the end of a script or of a module.
IMPORTED = """
import runpy, sys
before = set(sys.modules)
sys.argv = sys.argv[1:]
run = runpy.run_path if sys.argv[0].endswith(".py") else runpy.run_module
try:
    run(sys.argv[0], run_name="__main__")
except SystemExit:
    print(*sorted(set(sys.modules) - before), file=sys.stderr)
"""


@pytest.mark.parametrize("command", ["harness.run.suite", *(f"benchmarks/{name}.py" for name in SCRIPTS)])
def test_list_imports_the_standard_library_and_this_project_alone(command):
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED, command, "--list"], cwd=PROJECT, capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stdout, done.stderr
    imported = {name.partition(".")[0] for name in done.stderr.split()}
    assert "harness" in imported and imported - sys.stdlib_module_names <= {"harness", "models"}
    assert len(done.stderr.split()) < 250  # 0.1 to 0.2 s of a processor


def run_of_rows(folder: Path, count: int = 100, runs: str = "*") -> Path:
    """The committed run of most pictures among those of such names, cut or filled up to so many rows of figures: whole
    configs, its benchmarks that have pictures in turn."""
    run = max(PROJECT.glob(f"results/{runs}/"), key=lambda path: len(list(path.glob("*.png"))))
    folder.mkdir(exist_ok=True)
    shutil.copytree(run / "layout", folder / "layout")
    shutil.copy(run / "run.json", folder)
    (folder / "rows").mkdir()
    configs: dict[str, dict[tuple, list[dict]]] = {}
    for record in (json.loads(path.read_text()) for path in sorted((run / "rows").glob("*.json"))):
        drawn = any(run.glob(f"{record['benchmark']}.*.png"))
        if record["status"] == "ok" and drawn:  # skipped rows have little to draw
            of_config = configs.setdefault(record["benchmark"], {})
            of_config.setdefault((record["config"]["CONFIG"], record["precision"]), []).append(record)
    in_turn = itertools.chain.from_iterable(
        itertools.zip_longest(*(own.values() for own in configs.values()), fillvalue=[])
    )
    chosen = list(itertools.chain.from_iterable(in_turn))[:count]
    for number in range(count - len(chosen)):
        again = chosen[number % len(chosen)]
        chosen.append({**again, "row": f"{again['row']}_{number}"})
    for record in chosen:
        records.write_record(folder, record)
    assert len(list((folder / "rows").iterdir())) == count
    return folder


# Draws a run's pages and plots, and prints how many calls that took.
DRAWN = """
import cProfile, pstats, sys
from harness.report import tables
profile = cProfile.Profile()
status = profile.runcall(tables.main, sys.argv[1:])
print(pstats.Stats(profile).total_calls)
sys.exit(status)
"""


def calls_of_drawing(run: Path) -> int:
    done = subprocess.run([sys.executable, "-c", DRAWN, str(run)], cwd=PROJECT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return int(done.stdout.splitlines()[-1])


def test_drawing_ten_times_the_rows_takes_at_most_five_times_the_calls(tmp_path):
    few, many = (run_of_rows(tmp_path / str(count), count) for count in (10, 100))
    ratio = calls_of_drawing(many) / calls_of_drawing(few)
    pages, plots = list(many.glob("*.md")), list(many.glob("*.png"))
    assert len(pages) >= 3 and len(plots) >= 5
    assert sum(page.read_text().count("\n| ") for page in pages) > 100
    assert ratio < 5  # 2.1: most of it is importing and starting to draw
