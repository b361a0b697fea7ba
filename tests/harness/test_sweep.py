"""A benchmark along axes: which points there are, one process for many of them, and what becomes of each."""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from harness.errors import UserError
from harness.record import machine, records
from harness.run import estimate, options, sweep
from harness.run.benchmark import PLAN_FLAG
from harness.run.script import Benchmark

PROJECT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("stub_sweep.py")
AXES = [{"name": "units", "constant": "UNITS"}, {"name": "batch", "constant": "BATCH_SIZE"}]
CENTRE, POINTS = "8 4", ["8 4", "2 4", "16 4", "8 1"]  # units and batch, in the quick preset


class Stub:
    """A copy of stub_sweep.py and its run's folder."""

    def __init__(self, folder: Path):
        self.folder, self.out = folder, folder / "out"
        self.script = Path(shutil.copy(SCRIPT, folder / "stub.py"))

    def arguments(self, *options: str) -> list[str]:
        """--quick unless another preset is named."""
        return ["--device=cpu", f"--out={self.out}", *([] if "--full" in options else ["--quick"]), *options]

    def run(self, *options: str) -> subprocess.CompletedProcess:
        """As a user would."""
        command = [sys.executable, str(self.script), *self.arguments(*options)]
        return subprocess.run(command, capture_output=True, text=True, timeout=600)

    def benchmark(self) -> Benchmark:
        spec = importlib.util.spec_from_file_location("stub", self.script)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.BENCHMARK

    def parent(self, *options: str) -> sweep.Sweep:
        return sweep.Sweep(self.benchmark(), self.arguments(*options))

    def main(self, *options: str, plan: bool = False) -> int:
        """The script's exit status; its parent runs in this process, its rows in their own as always. plan: it only plans."""
        return sweep.main(self.benchmark(), [*[PLAN_FLAG] * plan, *self.arguments(*options)])

    def starts(self) -> list[str]:
        log = self.folder / "starts"
        lines = log.read_text().splitlines() if log.exists() else []
        log.unlink(missing_ok=True)
        return lines

    def measured(self) -> list[tuple[str, str]]:
        """(process id, "units batch") of every point that was measured since the last call."""
        rows = [line.split() for line in self.starts() if line[0].isdigit()]
        return [(pid, f"{units} {batch}") for pid, _, units, batch, _ in rows]

    def statuses(self) -> dict[str, str]:
        """{"units batch": status} of the records."""
        found, problems = records.read_run(self.out)
        assert not problems
        return {f"{r['config']['UNITS']} {r['config']['BATCH_SIZE']}": r["status"] for r in found}


@pytest.fixture
def stub(tmp_path, monkeypatch, drawn_here):
    monkeypatch.setenv("PYTHONPATH", str(PROJECT), prepend=os.pathsep)
    monkeypatch.setattr(machine, "packages", dict)
    monkeypatch.setattr(machine, "commit", lambda: {"commit": "c"})
    return Stub(tmp_path)


# Points


def read(text):
    return sweep.read_axes(text, AXES, options.read_header(SCRIPT))


def test_axes_are_read_with_their_values_once_each():
    assert read("units=2,8,2  batch=1") == {"units": [2, 8], "batch": [1]}


@pytest.mark.parametrize(("text", "said"), [
    ("layers=1", "'layers=1': no such axis; expected units, batch"), ("units", "each value has to be an integer"),
    ("units=", "each value has to be an integer"), ("units=1,x", "each value has to be an integer"),
    ("units=0", "an integer of at least 1"), ("units=1.5", "an integer"), ("units=1 units=2", "units is there twice"),
    ("=1", "no such axis"),
])  # fmt: skip
def test_wrong_axes_are_told_with_what_is_expected(text, said):
    with pytest.raises(UserError, match=said):
        read(text)


def test_wrong_axes_end_the_script_before_anything_runs(stub):
    done = stub.run("--axes=layers=1")
    assert done.returncode == 2 and done.stderr.startswith("error: --axes: 'layers=1'") and not stub.out.exists()


@pytest.mark.parametrize(
    ("rows", "alone"), [("good", "good"), ("good,needs_gpu", "good"), ("good,raises", ""), ("needs_gpu", "")]
)
def test_plan_names_the_only_row_that_can_run(stub, rows, alone, capsys):
    assert stub.main(f"--rows={rows}", plan=True) == 0
    assert json.loads(capsys.readouterr().out)["alone"] == alone


def test_every_point_is_measured_in_one_process_and_has_its_own_record_and_reference(stub):
    done = stub.run()
    assert done.returncode == 0, done.stderr
    lines = stub.starts()
    assert [line for line in lines if line.startswith("reference")] == [f"reference {point}" for point in POINTS]
    assert lines.count("matmul") == 1
    rows = [line.split() for line in lines if line[0].isdigit()]
    assert [" ".join(row[2:4]) for row in rows] == POINTS and len({row[0] for row in rows}) == 1
    names = {path.name.split(".")[1] for path in (stub.out / "rows").iterdir()}
    assert names == {"centre", "centre-units_2", "centre-units_16", "centre-batch_1"}
    record = records.read_record(stub.out / "rows" / "stub.centre-units_16.good.stack.cpu.fp32.json")
    assert record["config"]["UNITS"] == 16 and record["blocks_ms"] == [[16.0, 16.5]] and record["spent_s"] > 0
    assert "| 16 |" in " ".join((stub.out / "stub.md").read_text().split())


@pytest.mark.parametrize(
    ("options", "processes"), [(("--at-once=3",), 1), (("--at-once=4",), 2), (("--at-once=40",), 4)]
)
def test_points_of_a_row_are_dealt_out_where_there_is_room_for_more_processes_than_rows(stub, options, processes):
    """Each part in a process of its own, a crash in one of them in its own place."""
    assert stub.main("--rows=good,raises", *options) == 1
    measured = [line.split() for line in stub.starts() if line[0].isdigit()]
    for row in ("good", "raises"):
        own = [(pid, f"{units} {batch}") for pid, name, units, batch, _ in measured if name == row]
        assert sorted(point for _, point in own) == sorted(POINTS), "each once"
        assert row == "raises" or len({pid for pid, _ in own}) == processes
    found = {
        (r["row"], r["config"]["UNITS"], r["config"]["BATCH_SIZE"]): r["status"] for r in records.read_run(stub.out)[0]
    }
    assert len(found) == 8 and [key for key, status in found.items() if status != "ok"] == [("raises", 16, 4)]


def test_a_size_that_the_user_fixed_is_no_axis_unless_the_axes_are_his_too(stub):
    assert stub.main("--units=3") == 0
    assert set(stub.statuses()) == {"3 4", "3 1"}
    assert stub.main("--units=3", "--axes=units=5", f"--out={stub.folder / 'other'}") == 0
    stub.out = stub.folder / "other"
    assert set(stub.statuses()) == {"3 4", "5 4"}


def test_rows_go_in_turn_over_several_processes(stub):
    assert stub.main("--full", "--rows=good,unproven") == 0
    rows = [line.split() for line in stub.starts() if line[0].isdigit()]
    turns = list(dict.fromkeys((row[1], row[4]) for row in rows))
    assert turns == [("good", "0"), ("unproven", "0"), ("good", "1"), ("unproven", "1")]
    assert len({row[0] for row in rows}) == 4
    record = records.read_record(stub.out / "rows" / "stub.centre-units_2.good.stack.cpu.fp32.json")
    assert record["blocks_ms"] == [[2.0, 2.5]] * 2


# Failures


@pytest.mark.parametrize(("row", "reason", "options"), [
    ("raises", "ValueError: something is wrong; see logs/stub.centre.raises.cpu.fp32.log", ()),
    ("segfaults", "the process was ended by SIGSEGV; see logs/", ()),
    ("sleeps", "stopped after its time limit of 10 s (ROW_LIMIT_S); see logs/", ("--row-limit-s=10",)),
])  # fmt: skip
def test_a_point_that_ends_its_process_keeps_its_place_and_the_others_are_measured(stub, row, reason, options, capfd):
    assert stub.main(f"--rows={row}", *options) == 1 and "failed: stub.centre-units_16" in capfd.readouterr().err
    assert stub.statuses() == {"8 4": "ok", "2 4": "ok", "16 4": "failed", "8 1": "ok"}
    measured = stub.measured()
    assert [point for _, point in measured] == POINTS, "each once"
    first, second, third, fourth = (pid for pid, _ in measured)
    assert first == second == third != fourth, "another process goes on after it"
    failed = records.read_record(stub.out / "rows" / f"stub.centre-units_16.{row}.stack.cpu.fp32.json")
    assert failed["reason"].startswith(reason) and not failed["blocks_ms"]
    assert "failed [1]" in (stub.out / "stub.md").read_text()


def test_a_failed_proof_leaves_the_process_to_the_other_points(stub):
    assert stub.main("--rows=unproven") == 1
    assert stub.statuses() == {"8 4": "ok", "2 4": "ok", "16 4": "failed", "8 1": "ok"}
    assert len({pid for pid, _ in stub.measured()}) == 1


def test_a_row_that_cannot_run_is_skipped_at_every_point(stub):
    assert stub.main("--rows=needs_gpu") == 2
    assert not stub.out.exists() and not stub.starts()
    assert stub.main("--rows=needs_gpu,good") == 0
    found, _ = records.read_run(stub.out)
    assert [r["status"] for r in found if r["row"] == "needs_gpu"] == ["skipped"] * len(POINTS)
    assert "skipped" in (stub.out / "stub.md").read_text().lower()


def test_resume_measures_only_the_points_that_are_missing(stub, capsys):
    """The parent is killed while a row is at its third point; what was measured before is there, and stays."""
    assert stub.run("--rows=killed_once").returncode == -signal.SIGKILL
    assert stub.statuses() == {"8 4": "ok", "2 4": "ok"}
    assert [point for _, point in stub.measured()] == ["8 4", "2 4", "16 4"]
    (stub.folder / "repaired").touch()
    assert stub.main("--rows=killed_once", "--resume") == 0
    assert [point for _, point in stub.measured()] == ["16 4", "8 1"]
    assert stub.statuses() == dict.fromkeys(POINTS, "ok")
    assert stub.main("--rows=killed_once", "--resume", "--axes=units=2,32") == 0
    assert [point for _, point in stub.measured()] == ["32 4"], "the same points are as good on other axes"
    capsys.readouterr()
    assert stub.main("--rows=killed_once", "--resume") == 0
    assert not stub.starts() and "nothing is left to measure" in capsys.readouterr().err
    stub.script.write_text(stub.script.read_text().replace("TIMED_BATCHES = 5", "TIMED_BATCHES = 6"))
    assert stub.main("--rows=killed_once", "--resume") == 0
    said = [line for line in capsys.readouterr().err.splitlines() if "measured anew" in line]
    assert said == ["--resume: measured anew: TIMED_BATCHES 5, now 6: killed_once"], "once for all points"
    assert stub.main("--rows=killed_once") == 0
    said = [line for line in capsys.readouterr().err.splitlines() if "replaced" in line]
    assert said == [f"{stub.out} has records of these rows, which are replaced (--out=DIR keeps both): killed_once"]


@pytest.mark.parametrize("gpus, options, took_s", [(1, (), 2 * 4 * 60.0), (2, ("--gpus=2",), 4 * 60.0)])
def test_points_on_a_gpu_follow_each_other_and_are_announced_so(stub, monkeypatch, gpus, options, took_s):
    monkeypatch.setattr(machine, "gpu_count", lambda: gpus)
    monkeypatch.setattr(machine, "gpus", lambda: [machine.Gpu(f"GPU-{n}", "H200") for n in range(gpus)])
    monkeypatch.setattr(machine, "gpu_is_exclusive", lambda: False)
    for name in ("physical_cores", "memory_bytes", "gpu_memory_bytes"):
        monkeypatch.setattr(machine, name, lambda: 2**40)
    monkeypatch.setattr(estimate, "_table", lambda: {"quick gpu": {"stub": {"tensorflow": 60.0}}})
    parent = stub.parent("--rows=good,raises", *options)
    parent.device = "gpu"
    rows = {row: "tensorflow" for row in parent.rows}
    plan = {"rows": rows, "points": 4, "processes": 1, "budget_s": 999.0, **parent._side_by_side(len(rows))}
    assert parent.at_once > 1 and plan["gpus"] == gpus
    assert estimate.Estimate("quick", "gpu").rows_of("stub", plan) == (pytest.approx(took_s), 2 * 4)
