"""Runs into the same folder: what --resume runs again, and what stays of a row without it."""

import platform

import pytest

from harness.record import intervals, machine, records, schema
from harness.record.stopping_rule import BUDGET_NOTE
from harness.run import resume


def test_without_resume_rows_are_measured_anew_and_other_rows_kept(stub):
    assert stub.main("--processes=2") == 0
    other = stub.record("second")
    stub.starts()
    assert stub.main("--processes=1", "--rows=first") == 0
    assert stub.rows_started() == ["first 0"]
    assert stub.record("first")["blocks_ms"] == [[10.0, 10.5]]
    assert stub.record("second") == other


def test_resume_runs_finished_rows_not_again_and_failed_ones_again(stub):
    assert stub.main("--rows=first,flaky") == 1
    stub.starts()
    stub.script.with_name("repaired").touch()
    assert stub.main("--rows=first,flaky,third", "--resume") == 0
    assert stub.rows_started() == ["third 0", "flaky 0"]
    assert stub.record("flaky")["status"] == "ok"
    assert stub.main("--rows=flaky", "--resume") == 0
    assert stub.rows_started() == [], "a row is finished whatever other rows were asked for"


def test_resume_with_another_constant_is_refused_and_the_records_stay(stub, capfd):
    assert stub.main("--rows=first") == 0
    before, _ = stub.record("first"), stub.starts()
    capfd.readouterr()
    assert stub.main("--rows=first,second", "--units=32", "--resume") == 2
    error = capfd.readouterr().err
    assert error.startswith(f"error: --resume: {stub.out}: ") and error.count("\n") == 1
    assert "has UNITS=8, this run 32; leave that option out, or choose another folder with --out" in error
    assert stub.record("first") == before and stub.starts() == []


def test_resume_runs_rows_again_whose_header_changed_and_says_so(stub, capfd):
    assert stub.main("--rows=first") == 0
    stub.starts()
    stub.script.write_text(stub.script.read_text().replace("UNITS = None", "UNITS = 32"))
    assert stub.main("--rows=first", "--resume") == 0
    assert capfd.readouterr().err.rstrip().endswith("--resume: measured anew: UNITS 8, now 32: first")
    assert stub.rows_started() == ["first 0"]
    assert stub.record("first")["config"]["UNITS"] == 32


def test_resume_adds_processes_that_are_asked_for_and_takes_none_away(stub, capfd):
    assert stub.main("--rows=first", "--processes=2") == 0
    stub.starts()
    for processes, started in ((3, ["first 2"]), (2, [])):
        assert stub.main("--rows=first", f"--processes={processes}", "--resume") == 0
        assert stub.rows_started() == started and "measured anew" not in capfd.readouterr().err
    record = stub.record("first")
    assert len(record["blocks_ms"]) == 3 == record["config"]["PROCESSES"]


def test_resume_with_a_larger_budget_goes_on_with_a_row_whose_time_was_up(stub, capfd):
    assert stub.main("--rows=first", "--processes=2", "--row-budget-s=0.0001") == 0
    assert stub.rows_started() == ["first 0"] and stub.record("first")["notes"] == [BUDGET_NOTE]
    for budget, started in (("0.0001", []), ("60", ["first 1"])):
        assert stub.main("--rows=first", "--processes=2", f"--row-budget-s={budget}", "--resume") == 0
        assert stub.rows_started() == started and "measured anew" not in (said := capfd.readouterr().err)
        assert ("a larger --row-budget-s" in said) == (not started)
    assert stub.record("first")["notes"] == [] and stub.record("first")["config"]["ROW_BUDGET_S"] == 60


def test_resume_runs_rows_again_that_ran_on_other_data(stub, capfd):
    assert stub.main("--rows=first") == 0
    stub.starts()
    stub.script.write_text(stub.script.read_text().replace('"file": "00"', '"file": "11"'))
    assert stub.main("--rows=first", "--resume") == 0
    assert stub.rows_started() == ["first 0"]
    assert "--resume: measured anew: other data: first" in capfd.readouterr().err


def test_resume_says_of_each_row_why_it_is_measured_anew(stub, capfd):
    rows = ["first", "second", "third"]
    assert stub.main(f"--rows={','.join(rows)}") == 0
    forward = {row: stub.record(row, "forward") for row in rows}
    records.path_of(stub.out, forward["first"]).unlink()
    failed = {**schema.without_results(forward["second"]), "status": "failed", "reason": "why", "proof": None}
    records.write_record(stub.out, failed)
    flags = "--xla_same " * 9
    variables = {**machine.VARIABLES, "XLA_FLAGS": f"{flags}--xla_then", "TF_CPP_VMODULE": "a=1"}
    records.write_record(
        stub.out, {**forward["third"], "environment": {**forward["third"]["environment"], "variables": variables}}
    )
    capfd.readouterr()
    assert stub.main(f"--rows={','.join(rows)}", "--resume") == 0
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("--resume: measured anew: ")]
    assert [line.removeprefix("--resume: measured anew: ") for line in said] == [
        "there is no record of forward: first",
        "forward failed: second",
        "TF_CPP_VMODULE a=1, now none: third",
    ]


def test_values_that_differ_late_are_shown_where_they_differ():
    long = "--xla_same " * 9
    then, now = resume._in_words("XLA_FLAGS", f"{long}--then", f"{long}--now\nor").split(", now ")
    assert then.startswith("XLA_FLAGS …") and then.endswith(" --then") and now.endswith(" --now or") and len(now) < 40


def test_resume_puts_no_embedded_data_in_the_place_of_the_real_set(stub, capfd):
    """The folder was named by LSTM_BENCH_DATA, which is not set any more."""
    assert stub.main("--rows=first") == 0
    before, _ = stub.record("first"), stub.starts()
    real = stub.script.read_text()
    embedded = '"source": "embedded", "reason": "none found"'
    stub.script.write_text(real.replace('"source": "real"', embedded))
    capfd.readouterr()
    assert stub.main("--rows=first,second", "--resume") == 2
    error = capfd.readouterr().err
    assert error.startswith(f"error: --resume: {stub.out}") and error.count("\n") == 1
    assert "now there are embedded data alone (none found); name its folder by LSTM_BENCH_DATA or --data" in error
    assert stub.record("first") == before and stub.rows_started() == []
    other = stub.out.with_name("other")
    assert stub.main("--rows=first", f"--out={other}") == 0  # a run of its own says what it runs on
    assert "on embedded data, not on the real set: none found" in capfd.readouterr().err
    stub.script.write_text(real)
    assert stub.main("--rows=first", f"--out={other}", "--resume") == 0  # what is real now replaces what was embedded
    stub.starts()
    assert stub.main("--rows=first,second", "--resume") == 0 and stub.rows_started() == ["second 0"]


INSTALLED = (
    ({"tensorflow": "2.21.0", "numpy": "2.4.6", "torch": "2.13.0"}, False),  # the peers, since then
    ({"tensorflow": "2.22.0", "numpy": "2.4.6"}, True),
    ({"tensorflow": "2.21.0", "numpy": "2.5.0"}, True),
)


def test_resume_runs_rows_again_whose_own_packages_changed(stub, monkeypatch):
    assert stub.main("--rows=first") == 0
    for installed, runs_again in INSTALLED:
        change(stub, packages={"tensorflow": "2.21.0", "numpy": "2.4.6"})
        monkeypatch.setattr(machine, "packages", lambda installed=installed: installed)
        assert stub.main("--rows=first", "--resume") == 0
        assert stub.rows_started() == ["first 0"] * runs_again, installed


def test_resume_gives_a_row_the_processes_that_it_lacks(stub):
    assert stub.main("--full") == 0
    for mode in ("forward", "train"):
        record = stub.record("first", mode)
        record["blocks_ms"] = record["blocks_ms"][:1]
        record["step_ms"] = intervals.step_of(record["blocks_ms"])
        record["throughput"]["value"] = record["items_per_batch"] / record["step_ms"]["median"] * 1e3
        records.write_record(stub.out, record)
    stub.starts()
    assert stub.main("--full", "--resume") == 0
    assert stub.rows_started() == ["first 1", "first 2"]
    assert stub.record("first")["blocks_ms"] == [[10.0, 10.5], [11.0, 11.5], [12.0, 12.5]]


def change(stub, **facts):
    """Other facts about the machine and the code in the records of the row `first`, of which one process is left."""
    for mode in ("forward", "train"):
        record = stub.record("first", mode)
        record["environment"] |= facts
        record["blocks_ms"] = record["blocks_ms"][:1]
        record["step_ms"] = intervals.step_of(record["blocks_ms"])
        record["throughput"]["value"] = record["items_per_batch"] / record["step_ms"]["median"] * 1e3
        records.write_record(stub.out, record)
    stub.starts()


def test_resume_runs_rows_again_that_ran_with_other_software(stub, capfd):
    here = {"cpu": machine.facts("cpu")["cpu"], "cores": machine.physical_cores(), "python": platform.python_version()}
    here["variables"] = {
        **machine.VARIABLES,
        "TORCH_SHOW_CPP_STACKTRACES": "1",
    }  # which is none of this row's framework
    assert stub.main("--processes=2", "--rows=first") == 0
    change(stub, **here, driver=None)
    assert stub.main("--processes=2", "--rows=first", "--resume") == 0
    assert stub.rows_started() == ["first 1"], "on this very machine its processes count"
    for key, value in (
        ("driver", "580"),
        ("python", "3.10.0"),
        ("variables", {**machine.VARIABLES, "XLA_FLAGS": "--xla"}),
    ):
        change(stub, **{key: value})
        assert stub.main("--processes=2", "--rows=first", "--resume") == 0
        assert stub.rows_started() == ["first 0", "first 1"], key
        said = "XLA_FLAGS --xla, now " if key == "variables" else f"{key} {value}, now "
        assert f"--resume: measured anew: {said}" in capfd.readouterr().err
        assert key not in stub.record("first")["environment"]


DIFFS = (  # in the record, now, and whether the row runs again
    ({"diff": "a1"}, "a1", False), ({"diff": None}, None, False), ({"dirty": True, "diff": "a1"}, "a1", False),
    ({"diff": "a1"}, None, True), ({"diff": None}, "a1", True), ({"diff": "a1"}, "b2", True), ({"dirty": True}, None, True),
    ({"commit": "b", "diff": None}, None, True),
)  # fmt: skip


def test_resume_runs_rows_again_whose_uncommitted_code_changed(stub, monkeypatch, capfd):
    assert stub.main("--rows=first") == 0
    measured = {mode: stub.record("first", mode) for mode in ("forward", "train")}
    for then, now, runs_again in DIFFS:
        for record in measured.values():
            records.write_record(stub.out, record)
        change(stub, **then)
        monkeypatch.setattr(machine, "diff", lambda now=now: now)
        capfd.readouterr()
        assert stub.main("--rows=first", "--resume") == 0
        assert stub.rows_started() == ["first 0"] * runs_again, (then, now)
        assert ("--resume: measured anew: code " in capfd.readouterr().err) == runs_again


def test_resume_trusts_no_record_of_an_earlier_commit_where_changes_are_uncommitted_now(stub, monkeypatch):
    assert stub.main("--rows=first") == 0
    stub.starts()
    monkeypatch.setattr(machine, "commit", lambda: {"commit": "c", "dirty": True})
    assert stub.main("--rows=first", "--resume") == 0
    assert stub.rows_started() == ["first 0"], "the record does not say of which changes it is"


@pytest.mark.parametrize("resume", [(), ("--resume",)])
def test_a_row_that_was_measured_is_not_called_skipped_where_it_cannot_run_now(stub, monkeypatch, capfd, resume):
    monkeypatch.setattr("harness.run.environments.missing", lambda name, *also: "")
    assert stub.main("--rows=of_a_peer") == 0
    measured = stub.record("of_a_peer")
    records.path_of(stub.out, {**measured, "mode": "forward"}).unlink()
    monkeypatch.setattr(
        "harness.run.environments.missing", lambda name, *also: "not installed" * (name != "tensorflow")
    )
    capfd.readouterr()
    assert stub.main("--rows=of_a_peer,first", *resume) == 0
    assert stub.record("of_a_peer") == measured
    assert "of_a_peer: not installed; its earlier record stays (train)\n" in capfd.readouterr().err
    assert stub.record("of_a_peer", "forward")["status"] == "skipped"


def test_resume_goes_on_with_the_seconds_that_a_row_has_spent(stub):
    assert stub.main("--processes=3", "--rows=first") == 0
    spent = stub.record("first")["spent_s"]
    assert 0 < spent < 60 and stub.record("first", "forward")["spent_s"] == spent
    change(stub)
    for mode in ("forward", "train"):
        records.write_record(stub.out, {**stub.record("first", mode), "spent_s": 100.0})
    assert stub.main("--processes=3", "--rows=first", "--resume") == 0  # its budget is of 60 s
    assert stub.rows_started() == ["first 1"]
    assert stub.record("first")["notes"] == [BUDGET_NOTE] and stub.record("first")["spent_s"] > 100
    assert stub.main("--processes=1", "--rows=first") == 0
    assert stub.record("first")["spent_s"] < 60, "measured anew"


# Another machine


def of_another_machine(stub, row: str, **facts) -> None:
    for mode in ("forward", "train"):
        record = stub.record(row, mode)
        record["environment"] |= facts
        records.write_record(stub.out, record)


@pytest.mark.parametrize("facts", [{"cpu": "Another CPU"}, {"cores": 4096}])
def test_resume_refuses_records_of_another_machine_and_leaves_them_alone(stub, capfd, facts):
    assert stub.main("--rows=first") == 0
    of_another_machine(stub, "first", **facts)
    before = stub.record("first")
    stub.starts()
    capfd.readouterr()
    assert stub.main("--rows=first,second", "--resume") == 2
    printed = capfd.readouterr().err
    assert printed.startswith("error: --resume: ") and printed.count("\n") == 1
    assert all(
        word in printed for word in ("stub.small.first.", str(next(iter(facts.values()))), "--out", "this machine has")
    )
    assert stub.starts() == [] and stub.record("first") == before
    assert stub.main("--rows=first") == 0, "without --resume it is measured anew"
    assert stub.record("first")["environment"].get("cpu") != "Another CPU"


def test_records_of_another_machine_that_are_not_asked_for_stay_and_are_told(stub, capfd):
    assert stub.main("--rows=first") == 0
    of_another_machine(stub, "first", cpu="Another CPU")
    before = stub.record("first")
    capfd.readouterr()
    assert stub.main("--rows=second", "--resume") == 0
    assert "2 records of other rows are another machine's" in capfd.readouterr().err
    assert stub.record("first") == before and stub.record("second")["status"] == "ok"
