"""Ten thousand inputs of each kind, 300 by default: every one is taken or refused in one line, in bounded time and memory.

The same inputs every time; another seed: FUZZ_SEED=2. One kind alone: python -m tests.fuzz.drive records 10000 2
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import sizes

PROJECT = Path(__file__).resolve().parents[2]
INPUTS = sizes.cases(300, 10_000)
# Of the inputs of each kind: at least so many are taken, and so many kinds of refusal are reached, so that the fuzz is seen to
# get past the first check. Of fewer than 10,000 inputs as many are taken in proportion, and a few kinds of refusal.
DEPTH = {"records": (1000, 40), "compared": (600, 25), "layouts": (800, 25), "runs": (1000, 10), "idx": (500, 20),
         "text": (1000, 5), "command_lines": (500, 100), "headers": (200, 60), "weight_files": (300, 20)}  # fmt: skip


def drive(target: str, seed: str, count: int = INPUTS) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "tests.fuzz.drive", target, str(count), seed]
    return subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize("target", DEPTH)
def test_every_input_is_taken_or_refused_in_one_line(target):
    seed = os.environ.get("FUZZ_SEED", "1")
    done = drive(target, seed)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    result = json.loads(done.stdout)
    accepted, kinds = DEPTH[target] if sizes.ALL else (DEPTH[target][0] * INPUTS // 20_000, 3)
    assert result["inputs"] == INPUTS and result["accepted"] >= accepted and len(result["refused"]) >= kinds, result


PLANTED = {
    "a traceback": ("raise KeyError('x')", "KeyError"),
    "a hang": ("while True: pass", "TooLong"),
    "a bomb": ("bytearray(300 * 2**20)", "MemoryError"),
    "two lines": ("raise UserError('one\\ntwo')", "not one line"),
}


@pytest.mark.parametrize("mistake", PLANTED)
def test_fuzz_finds_a_planted(mistake):
    does, word = PLANTED[mistake]
    program = f"""
import sys
from harness.data import sets as data
from harness.errors import UserError
from tests.fuzz import drive
drive.INPUT_S = 0.3
real = data.parse_text
def parse_text(path, raw):
    if len(raw) == 1000:
        {does}
    return real(path, raw)
data.parse_text = parse_text
sys.exit(drive.main("text", 2000, 1))
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=PROJECT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 1 and word in done.stdout, done.stdout[-2000:] + done.stderr[-2000:]
