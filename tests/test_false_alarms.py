"""The search for false alarms: what it plans, runs and reports, as somebody starts it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from harness.data import sets
from harness.record import machine
from harness.run import child
from tests import false_alarms

PART = {"status": "ok", "proof": {"outputs_err": 1e-6, "loss_err": 2e-6, "limit": {"outputs": 2e-5, "loss": 1e-5}}}


def of(tmp_path, *options):
    return ["false_alarms.py", f"--out={tmp_path}", "--only=ptb", "--sizes=tiny", "--seeds=1", *options]


@pytest.mark.parametrize("fails", [False, True])
def test_each_planned_row_is_run_once_after_its_reference_and_the_report_counts_it(
    tmp_path, monkeypatch, capsys, fails
):
    """All but the rows themselves, which the test below runs."""
    done = []

    def result(benchmark, job):
        done.append((job["task"], job["row"], job["data"]["option"]))
        if job["task"] == "reference":
            Path(job["path"]).parent.mkdir(exist_ok=True)
            Path(job["path"]).touch()
            return {}
        part = {**PART, "status": "failed", "reason": "loss: error 1"} if fails and job["row"] == "keras" else PART
        return {"train": part}

    monkeypatch.setattr(child, "_result", result)
    for module, name in ((machine, "physical_cores"), (sets, "ptb"), (sets, "mnist")):
        monkeypatch.setattr(module, name, getattr(module, name))  # `work` replaces them
    planned = false_alarms.plan(1, ["ptb"], {"keras", "torch_lstm"}, "tiny", ["embedded", "real"])
    assert {(run.row, run.data) for run in planned} >= {("keras", "embedded"), ("keras", "real")}
    for number, part in enumerate(false_alarms.in_turn(planned)):
        job = tmp_path / f"{number}.json"
        job.write_text(json.dumps(part))
        false_alarms.work(job, tmp_path, "/real")
    rows = [(row, option) for task, row, option in done if task == "row"]
    assert sorted(rows) == sorted((run.row, {"real": "/real"}.get(run.data, run.data)) for run in planned)
    assert done[0][0] == "reference" and sum(task == "reference" for task, *_ in done) == 2, "one for each data set"
    monkeypatch.setattr(sys, "argv", of(tmp_path, "--report"))
    assert false_alarms.main() == (1 if fails else 0)
    printed = capsys.readouterr().out
    assert printed.startswith(f"{len(planned)} rows run, {len(planned)} proofs, {2 if fails else 0} rows failed\n")
    assert "| loss | 0.2 | 2e-06 | 1e-05 | ptb " in printed and ("loss: error 1" in printed) == fails


@pytest.mark.slow
def test_a_right_row_is_run_and_proven(tmp_path):
    pytest.importorskip("torch")
    command = [sys.executable, false_alarms.__file__, *of(tmp_path, "--rows=torch_lstm", "--data=")[1:]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3600)
    log = tmp_path / "log"
    assert done.returncode == 0, done.stdout + done.stderr + (log.read_text() if log.exists() else "")
    assert done.stdout.startswith("1 rows run, 3 proofs, 0 rows failed\n"), done.stdout
