"""The stub benchmark in a folder of its own: run inside this process, or as a user would run it."""

import contextlib
import importlib.util
import io
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from harness.errors import CrashError
from harness.record import records
from harness.report import tables
from harness.run import benchmark, estimate, processes

PROJECT = Path(__file__).resolve().parents[2]


class Stub:
    """A copy of stub_benchmark.py, its run's folder `out`, and what its processes noted that they started."""

    def __init__(self, folder: Path):
        self.folder, self.out = folder, folder / "out"
        self.script = Path(shutil.copy(Path(__file__).with_name("stub_benchmark.py"), folder / "stub.py"))
        spec = importlib.util.spec_from_file_location("stub", self.script)
        self.module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.module)

    def arguments(self, *options: str, device: str = "cpu") -> list[str]:
        return [f"--device={device}", f"--out={self.out}", *options]

    def main(self, *options: str, device: str = "cpu") -> int:
        """The script's exit status; its parent runs in this process, its rows in their own as always."""
        return benchmark.main(self.module.BENCHMARK, self.arguments(*options, device=device))

    def start(self, *options: str, **keywords) -> subprocess.Popen:
        command = [sys.executable, str(self.script), *self.arguments(*options)]
        streams = dict(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        return subprocess.Popen(command, **streams, **keywords)

    def starts(self) -> list[str]:
        """What started since the last call: "data", "reference", "matmul", and "<row> <process>"."""
        log = self.folder / "starts"
        lines = log.read_text().splitlines() if log.exists() else []
        log.unlink(missing_ok=True)
        return lines

    def rows_started(self) -> list[str]:
        return [line for line in self.starts() if " " in line]

    def record(self, row: str, mode: str = "train") -> dict:
        return records.read_record(self.out / "rows" / f"stub.small.{row}.{mode}.cpu.fp32.json")


def draw_here(run: Path, *options: str) -> list[str]:
    """As `processes.draw`, in this process: one of its own takes as long to import pandas as a stub takes for all its rows."""
    printed, warnings = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(warnings):
        status = tables.main([str(run.absolute()), *options])
    if status:
        raise CrashError(warnings.getvalue().splitlines()[-1].removeprefix("error: "))
    print(warnings.getvalue(), end="", file=sys.stderr)
    return printed.getvalue().splitlines()


@pytest.fixture
def drawn_here(monkeypatch):
    """A parent in this process draws its tables in it too; and the suite's does not measure how fast this machine is for 1 s."""
    monkeypatch.setattr(processes, "draw", draw_here)
    monkeypatch.setattr(estimate, "slowness", lambda: 1.0)


@pytest.fixture
def stub(tmp_path, monkeypatch, drawn_here):
    monkeypatch.setenv("PYTHONPATH", str(PROJECT), prepend=os.pathsep)
    monkeypatch.delenv("LSTM_BENCH_DATA", raising=False)
    monkeypatch.setattr("harness.record.machine.packages", dict)
    monkeypatch.setattr("harness.record.machine.commit", lambda: {"commit": "c"})
    return Stub(tmp_path)
