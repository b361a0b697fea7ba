"""Records: whole or not at all, and nothing but schema 1 comes back."""

import errno
import json
import math
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from harness.errors import UserError
from harness.record import records, schema
from harness.record.schema import RecordError
from tests.record_cases import make, training_of

PROJECT = Path(__file__).resolve().parents[2]


@pytest.fixture
def run(tmp_path):
    with records.open_run(tmp_path / "run") as opened:
        yield opened


def in_child(code, *arguments):
    """Runs code in a Python of its own, from the project's root."""
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    return subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=600)


# Names and round trips


def test_record_name_holds_what_tells_records_apart(run):
    assert records.record_name(make()) == "ptb.small.keras.train.cpu.fp32"
    assert records.path_of(run, make()) == run.path / "rows" / "ptb.small.keras.train.cpu.fp32.json"
    parts = dict(benchmark="ptb", config="small", row="keras", mode="train", device="cpu", precision="fp32")
    assert records.path_of(run, parts) == records.path_of(run, make())


@pytest.mark.parametrize("row", ["../keras", "a.b", "", "ke ras", "é", "x" * 65, "a\n", None])
def test_record_name_refuses_parts_that_are_no_plain_names(row):
    with pytest.raises(UserError, match="row="):
        records.record_name(make(row=row))


def test_record_comes_back_as_it_was_written(run):
    trained = training_of([[10.0, 11.0]]) | {"accuracy": {"acc": 0.9, "val_acc": None}}
    record = make(mode="fit", notes=["5 batches per block"], **trained)
    path = records.write_record(run, record)
    assert records.read_record(path) == record
    assert records.read_run(run) == ([record], [])


def test_numpy_values_are_written_as_numbers(run):
    record = make(
        losses=np.array([1.5, 0.5], np.float32),
        gpu_utilisation=np.float32(80),
        config={"CONFIG": "s", "N": np.int64(3)},
    )
    read = records.read_record(records.write_record(run, record))
    assert (read["losses"], read["gpu_utilisation"], read["config"]["N"]) == ([1.5, 0.5], 80, 3)


def test_figures_that_are_not_finite_become_null_and_the_reason_says_so(run):
    path = records.write_record(run, make(losses=[1.0, math.nan, math.inf]))
    text = path.read_text()
    assert "NaN" not in text and "Infinity" not in text
    record = records.read_record(path)
    assert record["losses"] == [1.0, None, None]
    assert record["reason"] == "not finite, written as null: losses[1], losses[2]"


# What is not a record

BAD = {
    "truncated": (lambda text: text[: len(text) // 2], "JSON"),
    "empty": (lambda text: "", "JSON"),
    "not an object": (lambda text: "[1, 2]", "JSON object"),
    "number alone": (lambda text: "3", "JSON object"),
    "NaN": (lambda text: text.replace("10.5", "NaN"), "finite"),
    "infinite by size": (lambda text: text.replace("10.5", "1e999"), "finite"),
    "a huge integer": (lambda text: text.replace("10.5", "1" + "0" * 6000), "finite"),
    "deep": (lambda text: "[" * 100_000 + "]" * 100_000, "16 levels"),
    "rather deep": (lambda text: text.replace('"UNITS": 200', '"UNITS": ' + "[" * 20 + "]" * 20), "16 levels"),
    "too large": (lambda text: text + " " * (4 * 1024**2), "4194304"),
    "another schema": (lambda text: text.replace('"schema": 2', '"schema": 3'), "found 3, expected 1 or 2"),
    "schema as a flag": (lambda text: text.replace('"schema": 2', '"schema": true'), "schema"),
    "no schema": (lambda text: text.replace('"schema": 2', '"sch": 1'), "schema"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_file_that_is_no_record_is_an_error_that_names_it(run, kind):
    spoil, expected = BAD[kind]
    path = records.write_record(run, make())
    path.write_text(spoil(path.read_text()))
    with pytest.raises(RecordError) as error:
        records.read_record(path)
    message = str(error.value)
    assert message.startswith(f"{path}: ") and expected in message and "\n" not in message and len(message) < 500


def test_bytes_that_are_not_utf8_are_an_error(run):
    path = records.write_record(run, make())
    path.write_bytes(b'{"schema": 1, "row": "\xff"}')
    with pytest.raises(RecordError, match="UTF-8"):
        records.read_record(path)


def test_a_pipe_or_a_folder_in_the_place_of_a_record_is_refused_without_waiting(run):
    pipe, folder = run.path / "rows" / "a.json", run.path / "rows" / "b.json"
    os.mkfifo(pipe)
    folder.mkdir()
    for path in (pipe, folder):
        with pytest.raises(RecordError, match="expected a file"):
            records.read_record(path)


def test_good_records_load_beside_corrupt_misnamed_and_temporary_ones(run):
    path = records.write_record(run, make())
    rows = run.path / "rows"
    (rows / "ptb.small.eager.train.cpu.fp32.json").write_text("{")
    (rows / "ptb.small.keras.fit.cpu.fp32.json").write_text(path.read_text())
    (rows / f".{path.name}.77.tmp").write_text("{")
    (rows / ".hidden.json").write_text("{")
    found, problems = records.read_run(run)
    assert found == [make()]
    assert len(problems) == 2
    assert "eager" in problems[0] and "ptb.small.keras.fit" in problems[1]


# Whole or not at all


def test_a_failing_disk_leaves_the_old_file_and_no_temporary_one(run, monkeypatch):
    path = records.write_record(run, make())
    before = path.read_bytes()

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(UserError) as error:
        records.write_record(run, make(first_call_s=3.0))
    assert (
        str(path) in str(error.value) and "No space left" in str(error.value) and "free some space" in str(error.value)
    )
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


def test_ctrl_c_while_writing_leaves_no_temporary_file(run, monkeypatch):
    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        records.write_record(run, make())
    assert os.listdir(run.path / "rows") == []


def test_a_record_larger_than_the_disk_allows_is_not_written_at_all(run):
    result = in_child(
        """
        import resource, sys
        from harness.record import records; from harness.record import schema
        from harness.errors import UserError
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        try:
            records.write_json(sys.argv[1], {"losses": [0.5] * 5000})
        except UserError as error:
            print(error)
        """,
        run.path / "rows" / "a.json",
    )
    assert result.returncode == 0, result.stderr
    assert "a.json: cannot be written (File too large); free some space" in result.stdout
    assert os.listdir(run.path / "rows") == []


def test_written_files_can_be_read_by_others(run):
    assert records.write_record(run, make()).stat().st_mode & 0o777 == 0o666 & ~_umask()


def _umask():
    current = os.umask(0o022)
    os.umask(current)
    return current


# The folder of a run


def test_open_run_makes_the_folder_and_opens_it_again(tmp_path):
    with records.open_run(tmp_path / "a" / "b", {"preset": "quick"}) as run:
        assert records.check_run(run)["preset"] == "quick"
        assert {"rows", "layout", "logs", "run.json"} <= set(os.listdir(run))
        records.write_record(run, make())
    with records.open_run(tmp_path / "a" / "b", {"preset": "full"}) as run:
        assert records.check_run(run)["preset"] == "quick"
        assert len(records.read_run(run)[0]) == 1
    assert ".lock" not in os.listdir(tmp_path / "a" / "b")


def test_a_discarded_run_takes_no_other_one_with_it(tmp_path):
    first, second = (records.open_run(tmp_path / "new" / "of" / name) for name in "ab")
    with first, second:
        first.discard()
        assert not first.path.exists() and records.check_run(second)
        second.discard()
    assert os.listdir(tmp_path / "new") == ["of"], "the second run made neither of them"
    with records.open_run(tmp_path / "newer" / "of" / "a") as run:
        run.discard()
    assert os.listdir(tmp_path) == ["new"]
    with records.open_run(tmp_path / "newer" / "of" / "a") as run:
        (tmp_path / "newer" / "thesis.tex").write_text("x")
        run.discard()
    assert os.listdir(tmp_path / "newer") == ["thesis.tex"]


def test_a_folder_of_another_schema_is_refused_and_left_alone(tmp_path):
    (tmp_path / "run.json").write_text('{"schema": 2}')
    for use in (records.open_run, records.read_run):
        with pytest.raises(UserError, match="schema 2: expected 1"):
            use(tmp_path)
    assert os.listdir(tmp_path) == ["run.json"]


def test_a_folder_with_something_else_in_it_is_refused_and_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(UserError, match=r"thesis\.tex"):
        records.open_run(tmp_path)
    with pytest.raises(UserError, match=r"no run\.json"):
        records.read_run(tmp_path)
    assert os.listdir(tmp_path) == ["thesis.tex"]


def test_a_run_whose_run_json_is_corrupt_is_refused(tmp_path):
    (tmp_path / "run.json").write_text('{"schema": 1')
    with pytest.raises(RecordError, match=r"run\.json"):
        records.open_run(tmp_path)


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "run").write_text("x")
    with pytest.raises(UserError, match="cannot be used for results"):
        records.open_run(tmp_path / "run")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(UserError, match="Permission denied"):
        records.open_run(tmp_path / "run")


def test_an_unwritable_folder_says_what_to_do(tmp_path, monkeypatch):
    def denied(*_, **__):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "mkdir", denied)
    with pytest.raises(UserError, match=r"Permission denied.*allow writing there, or choose another folder with --out"):
        records.open_run(tmp_path / "run")


def test_two_runs_cannot_write_into_one_folder(tmp_path):
    code = """
        import sys
        from harness.record import records; from harness.record import schema
        from harness.errors import UserError
        try:
            records.open_run(sys.argv[1])
            print("opened")
        except UserError as error:
            print(error)
        """
    with records.open_run(tmp_path / "run"):
        second = in_child(code, tmp_path / "run")
        assert f"another run (process {os.getpid()}) is writing here" in second.stdout, second.stderr
    assert in_child(code, tmp_path / "run").stdout == "opened\n"  # and ends without closing
    records.open_run(tmp_path / "run").close()


def test_records_need_the_standard_library_alone():
    result = in_child("""
        import sys
        before = set(sys.modules)
        import harness.record.records
        new = {name.split(".")[0] for name in set(sys.modules) - before}
        print(sorted(new - set(sys.stdlib_module_names) - {"harness"}))
        """)
    assert result.stdout.strip() == "[]", result.stderr


def test_run_json_is_json_with_the_schema(run):
    facts = json.loads((run.path / "run.json").read_text())
    assert facts["schema"] == schema.SCHEMA and facts["created"].endswith("+00:00")
