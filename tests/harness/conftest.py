"""The stub benchmark in a folder of its own: run inside this process, or as a user would run it."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from harness.record import records
from harness.run import benchmark

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


@pytest.fixture
def stub(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(PROJECT), prepend=os.pathsep)
    monkeypatch.delenv("LSTM_BENCH_DATA", raising=False)
    monkeypatch.setattr("harness.record.machine.packages", dict)
    monkeypatch.setattr("harness.record.machine.commit", lambda: {"commit": "c"})
    return Stub(tmp_path)
