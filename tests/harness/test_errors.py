"""How a command ends whose output nobody reads any more."""

import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]


def ended_without_reader(*command: str) -> str:
    """What it prints as its error."""
    with subprocess.Popen(
        [sys.executable, "-u", *command], cwd=PROJECT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        process.stdout.close()
        return process.stderr.read()


@pytest.mark.parametrize("command", [["benchmarks/ptb.py", "--list"], ["-m", "harness.run.suite", "--list"]])
def test_a_command_whose_reader_has_left_ends_without_a_word(command):
    assert ended_without_reader(*command) == ""


@pytest.mark.parametrize("error", ["ValueError", "BrokenPipeError"])
def test_any_other_error_keeps_its_traceback(error):
    done = subprocess.run(
        [sys.executable, "-c", f"import harness.errors; raise {error}"], cwd=PROJECT, capture_output=True, text=True
    )
    assert done.returncode == 1 and "Traceback" in done.stderr and error in done.stderr
    assert "ValueError" in ended_without_reader("-c", "import harness.errors; raise ValueError")
