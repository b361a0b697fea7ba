"""A test that crashes is one failed test of ./run_tests.sh, which goes on with the others."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

RUN_TESTS = Path(__file__).resolve().parents[1] / "run_tests.sh"
CRASHES = """
import os, signal, pytest

@pytest.mark.parametrize("number", range(6))
def test_one(number):
    if number == 2:
        os.kill(os.getpid(), signal.SIGILL)
"""


def test_a_crash_fails_its_own_test_alone(tmp_path):
    pytest.importorskip("xdist")  # without it ./run_tests.sh itself does not start
    options = re.search(r"processes=\((.*)\)", RUN_TESTS.read_text())[1].split()
    (tmp_path / "test_crashes.py").write_text(CRASHES)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, "test_crashes.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and "1 failed, 5 passed" in done.stdout, done.stdout + done.stderr
    assert "crashed while running 'test_crashes.py::test_one[2]'" in done.stdout


@pytest.mark.parametrize("typo", ["--alll", "--no-instal", "--hepl"])
def test_a_mistyped_option_is_one_line_before_anything_is_installed(typo):
    done = subprocess.run([RUN_TESTS, typo], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: {typo}: did you mean --all, --no-install or --help?\n"
