"""A script's parent: rows in turn, each record kept as soon as it is there, and what becomes of it."""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness.record import intervals, machine, records, schema
from harness.record.stopping_rule import BUDGET_NOTE
from harness.run import benchmark, estimate, progress, references
from harness.run.progress import Left, Progress
from harness.run.rows_in_turn import RowsInTurn
from tests import record_cases


def named(page: Path) -> set[str]:
    """The rows of the first table of a page, and those below it that were skipped."""
    table = page.read_text().split("\n## ")[1]
    skipped = re.findall(r"^Skipped, .*", table, re.MULTILINE)
    return {*re.findall(r"^\| ([a-z]\w*)", table, re.MULTILINE)[1:], *re.findall(r"`(\w+)`", " ".join(skipped))}


def wait_for(condition, process):
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


# Processes and records


def test_rows_run_in_turn_and_data_reference_and_matmul_are_had_once(stub):
    assert stub.main("--full") == 0
    assert stub.starts() == [
        "data", "data", "reference", "matmul",  # the reference's process loads the data itself
        *(line for process in range(3) for row in ("first", "second") for line in ("data", f"{row} {process}")),
    ]  # fmt: skip
    for mode in ("forward", "train"):
        record = stub.record("first", mode)
        assert record["blocks_ms"] == [[10.0, 10.5], [11.0, 11.5], [12.0, 12.5]], "one list per process"
        assert record["step_ms"] == intervals.step_of(record["blocks_ms"]) and record["step_ms"]["median"] == 11.25
        assert record["config"]["UNITS"] == 8 and record["config"]["CONFIG"] == "small"


def test_what_a_rows_first_process_compiles_those_after_its_end_find_and_it_finds_nothing(stub):
    assert stub.main("--full", "--rows=compiles") == 0
    found = [line for line in stub.starts() if line.startswith("found")]
    assert found == ["found []", "found ['0']", "found ['0', '1']"]
    assert not list(stub.out.glob(".compiled*"))
    assert stub.main("--full", "--rows=compiles", "--out=" + str(stub.out.with_name("a space"))) == 0
    assert [line for line in stub.starts() if line.startswith("found")] == found
    assert stub.main("--full", "--rows=compiles", "--at-once=3", "--out=" + str(stub.out.with_name("beside"))) == 0
    beside = [line for line in stub.starts() if line.startswith("found")]
    *others, first = sorted(beside)
    assert first == "found []" and len(others) == 2 and all("'0'" in found for found in others), (
        "they wait for the first"
    )


def test_threads_that_the_suite_sets_are_recorded_as_no_choice_of_the_users(stub, monkeypatch):
    name = "OPENBLAS_NUM_THREADS"

    def child():
        parent = RowsInTurn(stub.module.BENCHMARK, stub.arguments("--at-once=2"))
        parent.out = stub.out
        env = {**os.environ, **parent._child("row", row="first")["env"]}
        ask = "from harness.record import machine; print(*machine.VARIABLES)"
        seen = subprocess.run([sys.executable, "-c", ask], env=env, capture_output=True, text=True, check=True).stdout
        return env[name], name in seen.split()

    monkeypatch.delenv(name, raising=False)
    assert child() == ("1", False)
    monkeypatch.setenv(name, "7")
    assert child() == ("7", True)


def test_rows_are_spread_over_the_gpus_and_each_stays_on_one(stub, monkeypatch):
    monkeypatch.setattr(machine, "gpu_count", lambda: 2)
    monkeypatch.setattr(machine, "gpus", lambda: [machine.Gpu("GPU-a", "H200"), machine.Gpu("GPU-b", "H200")])
    text = stub.script.read_text().replace('"syncs": None', '"syncs": 1')
    noted = "note(row + ' on ' + os.environ['CUDA_VISIBLE_DEVICES']); note(f\"{row} {m"
    stub.script.write_text(text.replace('note(f"{row} {m', noted))
    assert stub.main("--full", "--gpus=2", "--rows=first,second,third", device="gpu") == 0
    found = {tuple(line.split(" on ")) for line in stub.starts() if " on " in line}
    assert found == {("first", "GPU-a"), ("second", "GPU-b"), ("third", "GPU-a")}
    assert "timed beside a row on another GPU" in (stub.out / "stub.md").read_text()


@pytest.mark.parametrize("at_once, gpus", [([], 2), (["--at-once=1"], 1)])
def test_long_rows_are_on_different_gpus_and_the_plan_says_how_many_run_side_by_side(stub, monkeypatch, at_once, gpus):
    monkeypatch.setattr(machine, "gpu_count", lambda: 2)
    monkeypatch.setattr(machine, "gpus", lambda: [machine.Gpu("GPU-a", "H200"), machine.Gpu("GPU-b", "H200")])
    for name in ("physical_cores", "memory_bytes", "gpu_memory_bytes"):
        monkeypatch.setattr(machine, name, lambda: 2**40)
    seconds = {"first": [90, 80], "second": 9, "third": [70, 60], "raises": [40, 30]}
    monkeypatch.setattr(estimate, "_table", lambda: {"full gpu": {"stub": seconds}})
    rows = "--rows=first,second,third,raises,one_way"
    parent = RowsInTurn(stub.module.BENCHMARK, stub.arguments("--full", "--gpus=2", rows, *at_once, device="gpu"))
    on = {row: parent._gpu_of(row) for row in parent.rows}
    assert on["first"] == "GPU-a" and on["third"] == on["raises"] == "GPU-b"
    assert on["one_way"] in ("GPU-a", "GPU-b"), "which may run at another point of a sweep"
    plan = parent.plan()
    assert (plan["at_once"], plan["gpus"]) == (4 if gpus == 2 else 1, gpus), "no more than rows that can run"
    first, processes = parent._expected([*plan["rows"]])
    left = Left(bar := Progress(), first, processes)
    expected_s, count = estimate.Estimate("full", "gpu").rows_of("stub", plan)
    assert left and bar._total_s == pytest.approx(expected_s) and bar._total == count


def test_a_record_is_written_after_each_process(stub, monkeypatch):
    written, write = [], records.write_record

    def noting(run, record):
        written.append((record["row"], record["mode"], len(record["blocks_ms"])))
        return write(run, record)

    monkeypatch.setattr(records, "write_record", noting)
    assert stub.main("--processes=2") == 0
    assert written == [
        (row, mode, count) for count in (1, 2) for row in ("first", "second") for mode in ("forward", "train")
    ]


def test_a_row_over_its_budget_gets_no_further_process_and_says_so(stub):
    assert stub.main("--full", "--row-budget-s=0.001", "--rows=first") == 0
    assert stub.rows_started() == ["first 0"]
    assert stub.record("first")["status"] == "ok" and stub.record("first")["notes"] == [BUDGET_NOTE]
    assert stub.main("--full", "--row-budget-s=0.001", "--rows=first", "--resume") == 0
    assert stub.rows_started() == [], "it is finished"


def test_the_last_process_is_not_called_fewer_for_taking_long(stub):
    assert stub.main("--processes=1", "--row-budget-s=0.001", "--rows=first") == 0
    assert stub.record("first")["notes"] == []


REASONS = {
    "raises": "ValueError: something is wrong",
    "out_of_memory": "out of memory: 8 GiB; try a smaller --batch-size",
    "segfaults": "the process was ended by SIGSEGV",
    "killed": "the process was ended by SIGKILL (out of host memory?)",
    "exits": "the process ended with status 3 and no result",
    "sleeps": "stopped after its time limit of 12 s (ROW_LIMIT_S)",
    "nothing": "the process gave no reason",
}
REASONS = {row: f"{reason}; see logs/stub.small.{row}.cpu.fp32.log" for row, reason in REASONS.items()}


def test_rows_that_fail_or_cannot_run_keep_their_place_and_harm_no_other(stub, capfd):
    rows = ["needs_gpu", "one_way", "first", *REASONS, "train_unproven"]
    assert stub.main("--processes=2", "--row-limit-s=12", f"--rows={','.join(rows)}") == 1
    assert [line for line in stub.rows_started() if line.endswith("1")] == ["first 1"], "no second try of a failed row"
    for mode in ("forward", "train"):
        assert {row: stub.record(row, mode)["reason"] for row in REASONS} == REASONS
        assert {stub.record(row, mode)["status"] for row in REASONS} == {"failed"}
        assert stub.record("first", mode)["status"] == "ok" and len(stub.record("first", mode)["blocks_ms"]) == 2
        for row, reason in (("needs_gpu", "needs an NVIDIA GPU"), ("one_way", "has one direction")):
            skipped = stub.record(row, mode)
            assert (skipped["status"], skipped["reason"]) == ("skipped", reason)
    assert stub.record("train_unproven", "forward")["status"] == "ok"
    assert stub.record("train_unproven")["reason"].startswith("update: error 0.5; see logs/")
    assert named(stub.out / "stub.md") == {row for row in stub.module.ROWS_TABLE if row in rows}
    printed = capfd.readouterr().err
    assert f"failed: stub.small.raises.train.cpu.fp32: {REASONS['raises']}\n" in printed
    assert "Traceback" not in printed
    assert "Traceback" in (stub.out / "logs" / "stub.small.raises.cpu.fp32.log").read_text()
    pids = (stub.folder / "pids").read_text().split()
    assert not any(is_running(int(pid)) for pid in pids), "what a row started ends with it"


def test_where_no_row_can_run_one_line_says_why_and_nothing_is_written(stub, capfd):
    assert stub.main("--rows=needs_gpu,one_way") == 2
    why = "needs_gpu: needs an NVIDIA GPU; one_way: has one direction"
    assert capfd.readouterr().err == f"error: stub: none of these rows can be measured here: {why}\n"
    assert not stub.out.exists()
    assert stub.main("--rows=needs_gpu,first") == 0
    assert "stub: skipped: needs_gpu: needs an NVIDIA GPU\n" in capfd.readouterr().err


def test_resume_is_refused_where_there_is_nothing_to_go_on_with(stub, capfd):
    assert stub.main("--rows=first", "--resume") == 2
    assert f"error: --resume: {stub.out}: no run there; name a run's folder by --out=DIR" in capfd.readouterr().err
    assert not stub.out.exists()
    stub.out.mkdir()
    assert stub.main("--rows=first", "--resume") == 2, "an empty folder is no run"


@pytest.fixture
def without_torch(monkeypatch):
    """A Python of the user's own in which PyTorch is not installed; ends with the fixture."""
    monkeypatch.delenv("TORCH_PYTHON", raising=False)
    monkeypatch.setattr("harness.record.software.STAMP", "not-of-run_all.sh")
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: None if name == "torch" else find(name, *rest))
    return monkeypatch


def test_a_row_whose_framework_is_not_installed_is_skipped_with_what_to_do_and_runs_once_it_is(stub, without_torch):
    assert stub.main("--rows=first,of_a_peer") == 0
    assert stub.rows_started() == ["first 0"]
    for mode in ("forward", "train"):
        record = stub.record("of_a_peer", mode)
        assert (record["status"], record["reason"]) == ("skipped", "not installed: ./run_all.sh --peers")
    assert named(stub.out / "stub.md") == {"first", "of_a_peer"}
    assert "not installed: ./run_all.sh --peers" in (stub.out / "stub.md").read_text()
    without_torch.setattr("importlib.util.find_spec", lambda name, *rest: object())
    assert stub.main("--rows=first,of_a_peer", "--resume") == 0
    assert stub.starts()[-2:] == ["of_a_peer 0", "torch"], "the row's own framework"
    assert stub.record("of_a_peer")["status"] == "ok"


def test_list_says_which_rows_cannot_run_here(stub, without_torch, capsys):
    assert stub.main("--list") == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines["of_a_peer"] == "what it is (not installed: ./run_all.sh --peers)"
    assert lines["one_way"] == "what it is (has one direction)"
    assert (lines["first"], lines["needs_gpu"]) == ("what it is", "what it is (needs an NVIDIA GPU)")


def test_the_parent_asks_for_a_framework_without_importing_it(stub):
    code = "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    check = f"try:\n    {code}\nfinally:\n    assert not {{'torch', 'tensorflow'}} & sys.modules.keys()"
    command = [sys.executable, "-c", f"import sys\n{check}", stub.script, *stub.arguments("--rows=first,of_a_peer")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


def test_an_earlier_failure_of_another_row_or_config_is_not_this_runs(stub):
    assert stub.main("--rows=raises,flaky", "--config=large") == 1
    stub.script.with_name("repaired").touch()
    assert stub.main("--rows=first,flaky") == 0


def test_constants_that_the_user_changed_are_echoed_and_no_others(stub, capsys):
    assert stub.main("--rows=first", "--units=32") == 0
    assert (
        capsys.readouterr().out.splitlines()[0] == "overriding UNITS = 32 (was 8), ROWS = 'first' (was 'first,second')"
    )


def test_a_failing_reference_fails_the_rows_with_its_reason(stub):
    text = stub.script.read_text().replace('note("reference")', 'raise ValueError("no such layer")')
    stub.script.write_text(text)
    assert stub.main("--rows=first") == 1
    assert stub.record("first")["reason"].startswith("the float64 reference: ValueError: no such layer; see logs/")
    assert not any(line.startswith("first") for line in stub.starts()), "no process was started to find nothing"


def test_a_reference_that_another_run_has_is_taken_from_there_unless_the_code_differs(stub):
    assert stub.main("--rows=first") == 0
    assert stub.main("--rows=first", f"--out={stub.folder / 'second'}") == 0
    assert stub.starts().count("reference") == 1
    (own,), (others,) = ((stub.folder / run).glob("references/*.npz") for run in ("out", "second"))
    assert own.name == others.name and own.read_bytes() == others.read_bytes()
    stub.script.write_text(stub.script.read_text() + "# changed\n")
    references.code_digest.cache_clear()
    assert stub.main("--rows=first", f"--out={stub.folder / 'third'}") == 0
    assert stub.starts().count("reference") == 1


def test_a_run_of_other_settings_leaves_the_records_of_a_folder_alone(stub, capsys):
    assert stub.main() == 0
    before = {path: path.read_bytes() for path in stub.out.glob("rows/*")}
    assert stub.main("--rows=first", "--units=32") == 2
    assert {path: path.read_bytes() for path in stub.out.glob("rows/*")} == before and len(before) == 4
    [line] = capsys.readouterr().err.splitlines()
    assert "has UNITS=8, this run 32: one configuration in a table; choose another folder with --out" in line
    assert stub.main("--rows=first", "--processes=2") == 0, "what changes the timing alone may differ"
    assert stub.main("--units=32") == 0, "all are replaced"


@pytest.fixture
def results(stub, monkeypatch):
    """The folder of runs that a script without --out writes into; a script `other`, which today's first run has too."""
    monkeypatch.setattr(machine, "PROJECT", stub.folder / "project")
    monkeypatch.setattr(machine, "run_name", lambda device: "cpu-2-core-20260102")
    monkeypatch.setattr(stub, "arguments", lambda *options, device: ["--device=cpu", *options])
    results = stub.folder / "project" / "results"
    for day in ("cpu-2-core-20260101", "cpu-2-core-20260102"):
        with records.open_run(results / day) as run:
            records.write_record(run, record_cases.make(benchmark="other"))
    return results


def rows_in(results):
    """{folder: how many records of the stub it has}, by the end of the folder's name."""
    found = {path.name.removeprefix("cpu-2-core-"): len(list(path.glob("rows/stub.*"))) for path in results.iterdir()}
    return {folder: count for folder, count in sorted(found.items()) if count}


def test_a_script_joins_todays_folder_and_writes_over_no_record_of_its_own(stub, results):
    assert stub.main() == 0
    assert rows_in(results) == {"20260102": 4}
    before = {path: path.read_bytes() for path in results.glob("*/rows/*")}
    assert stub.main("--rows=second") == stub.main("--units=32") == 0
    assert rows_in(results) == {"20260102": 4, "20260102-2": 2, "20260102-3": 4}
    assert stub.main("--rows=first") == stub.main("--rows=second") == 0, "row after row"
    assert rows_in(results) == {"20260102": 4, "20260102-2": 2, "20260102-3": 4, "20260102-4": 4}
    assert all(path.read_bytes() == content for path, content in before.items())
    assert len(list(results.glob("*/rows/other.*"))) == 2


def test_resume_of_a_script_goes_on_in_todays_latest_run_of_these_settings(stub, results):
    assert stub.main("--rows=first", "--resume") == 0, "a new run, as there is none"
    assert stub.main("--rows=first") == stub.main("--rows=first", "--units=32") == 0
    assert rows_in(results) == {"20260102": 2, "20260102-2": 2, "20260102-3": 2}
    (results / "cpu-2-core-20260102-2").rename(results / "cpu-2-core-20260101-2")
    stub.starts()
    assert stub.main("--units=32", "--resume") == 0 and stub.rows_started() == ["second 0"]
    assert rows_in(results) == {"20260101-2": 2, "20260102": 2, "20260102-3": 4}
    assert stub.main("--resume") == 0 and stub.rows_started() == ["second 0"], (
        "not the latest, which has other settings"
    )
    assert rows_in(results) == {"20260101-2": 2, "20260102": 4, "20260102-3": 4}
    for path in results.glob("cpu-2-core-20260102/rows/stub.*"):
        path.unlink()
    assert stub.main("--resume") == 2, "nothing of today to go on with"
    assert rows_in(results) == {"20260101-2": 2, "20260102-3": 4}, "yesterday's stays as it is"


def test_rows_start_beside_the_reference_and_wait_for_it(stub):
    text = stub.script.read_text()
    text = text.replace('note("reference")', 'time.sleep(3)\n    note("reference")')
    stub.script.write_text(
        text.replace("job, data, _, framework, turns: S", "job, data, _, framework, turns: wait(job) or S")
    )
    wait = "\n\ndef wait(job):\n    from harness.measure.references import wait_for\n\n"
    wait += "    note('waits')\n    wait_for(Path(job['reference']))\n"
    stub.script.write_text(stub.script.read_text().replace("\n\nBENCHMARK =", f"{wait}\n\nBENCHMARK =", 1))
    assert stub.main("--at-once=3") == 0
    rows = [line for line in stub.starts() if line != "data"]
    assert rows.index("waits") < rows.index("reference") < rows.index("first 0")
    stub.script.write_text(stub.script.read_text().replace("time.sleep(3)", "time.sleep(3); 1 / 0"))
    assert stub.main("--at-once=3", "--units=32") == 1
    assert "waits" in stub.starts()
    for row in ("first", "second"):
        assert stub.record(row)["reason"].startswith("the float64 reference: ZeroDivisionError: division by zero")


def test_a_mode_that_fails_later_loses_its_times_and_the_others_say_why_they_stopped(stub):
    text = stub.script.read_text()
    fails = 'if measurement.process: parts["train"] = {"status": "failed", "reason": "update: error 0.5"}\n    return parts\n'
    assert text.count("return parts\n") == 1
    stub.script.write_text(text.replace("return parts\n", fails))
    assert stub.main("--processes=3", "--rows=first") == 1
    assert stub.rows_started() == ["first 0", "first 1"]
    train, forward = stub.record("first"), stub.record("first", "forward")
    assert train["status"] == "failed" and train["reason"].startswith("update: error 0.5; see logs/")
    assert train["blocks_ms"] == [] and not any(train.get(key) for key in schema.RESULTS)
    assert train["share_of_matmul"] is None and train["notes"] == []
    assert (
        forward["status"] == "ok" and len(forward["blocks_ms"]) == 2 and forward["notes"] == ["stopped: train failed"]
    )
    assert stub.main("--processes=2", "--rows=first") == 1
    assert stub.record("first", "forward")["notes"] == [], "it has all of its processes"


def test_a_process_that_crashes_after_its_result_keeps_it_and_says_so(stub):
    text = stub.script.read_text()
    end = "    sys.exit(benchmark.main(BENCHMARK))"
    assert text.count(end) == 1
    row = "'--child' in sys.argv and (HERE / 'starts').read_text().endswith('first 0\\n')"
    crash = f"    benchmark.main(BENCHMARK)\n    if {row}:\n        os.kill(os.getpid(), signal.SIGSEGV)"
    stub.script.write_text(text.replace(end, crash))
    assert stub.main("--rows=first") == 0
    record = stub.record("first")
    assert record["status"] == "ok" and record["notes"] == ["the process ended by SIGSEGV after its result"]


# Ctrl-C


@pytest.mark.parametrize("of_suite", [False, True])
def test_a_script_that_the_suite_started_leaves_it_to_say_how_to_go_on(of_suite, capsys, monkeypatch):
    class Interrupted:
        def __init__(self, benchmark, argv):
            raise KeyboardInterrupt

    if of_suite:
        monkeypatch.setenv(progress.REPORTS, "3")
    assert benchmark.main(None, [], Interrupted) == 130
    assert ("--resume goes on from there" in capsys.readouterr().err) is not of_suite


@pytest.mark.parametrize("resume", [False, True])
def test_ctrl_c_in_a_row_keeps_every_finished_row_and_leaves_no_process(stub, resume):
    assert stub.main("--rows=flaky") == 1
    earlier = stub.record("flaky")
    parent = stub.start("--rows=first,sleeps,flaky", *(["--resume"] if resume else []))
    wait_for(lambda: len(_pids(stub)) == 2, parent)
    os.kill(parent.pid, signal.SIGINT)
    _, printed = parent.communicate(timeout=300)
    assert parent.returncode == 130
    assert printed.endswith("\ninterrupted: every finished row is kept; --resume goes on from there\n")
    assert "Traceback" not in printed
    assert not any(is_running(pid) for pid in _pids(stub))
    assert stub.record("first")["status"] == "ok"
    assert stub.record("flaky") == earlier, "kept until a new one is there"
    page = (stub.out / "stub.md").read_text()
    assert "| first" in page and "**Asked for, without a record here** (`--resume` measures them): `sleeps`." in page
    assert not (stub.out / ".lock").exists() and records.read_run(stub.out)[1] == []


def _pids(stub) -> list[int]:
    path = stub.folder / "pids"
    return [int(pid) for pid in path.read_text().split()] if path.exists() else []


def test_a_matmul_that_could_not_be_measured_is_measured_again_by_the_next_run(stub):
    good = stub.script.read_text()
    stub.script.write_text(good.replace('note("matmul") or 1e9', "1 / 0"))
    assert stub.main("--rows=first") == 0
    stub.script.write_text(good)
    assert stub.main("--rows=second") == 0
    assert json.loads((stub.out / "matmul.json").read_text()) == {"cpu.fp32": 1e9}


def test_a_row_whose_record_contradicts_itself_is_failed_and_harms_no_other(stub, capsys):
    assert stub.main("--rows=contradicts,second") == 1
    record = records.read_record(stub.out / "rows" / "stub.small.contradicts.train.cpu.fp32.json")
    assert record["status"] == "failed" and "accuracy" in record["reason"] and not record["blocks_ms"]
    assert records.read_record(stub.out / "rows" / "stub.small.second.train.cpu.fp32.json")["status"] == "ok"
    assert "accuracy" in capsys.readouterr().err
