"""What a script refuses: one clear line, exit status 2, no traceback, and every finished row kept."""

import errno
import importlib.util
import os
import resource

import pytest

from harness.record import machine, records
from harness.run.benchmark import main
from tests import record_cases


def refusal(capfd, status: int) -> str:
    """The one line that stands on standard error."""
    message = capfd.readouterr().err
    assert status == 2 and message.startswith("error: ") and message.count("\n") == 1, message
    return message


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--units=0", ["--units=0", "at least 1", "256"]),
        ("--units=many", ["--units=many", "an integer"]),
        ("--precision=int8", ["--precision=int8", "fp32, tf32, fp16, bf16"]),
        ("--precision=tf32", ["--precision=tf32", "fp32, fp16 or bf16"]),
        ("--rows=frist", ["--rows=frist", "did you mean first?"]),
        ("--rows=,", ["--rows=,", "expected all or names"]),
        ("--config=huge", ["--config=huge", "small, large"]),
        ("--unit=3", ["--unit", "did you mean --units?"]),
        ("--device=tpu", ["--device=tpu", "gpu, cpu"]),
        ("--gpus=2", ["--gpus=2", "on a CPU"]),
        ("--gpus=0", ["--gpus=0", "at least 1"]),
        ("--data=no/such/folder", ["--data=no/such/folder", "no such folder", "embedded"]),
        ("rows", ["rows", "--name=value"]),
    ],
)
def test_wrong_options_are_refused_before_any_row_starts(stub, capfd, option, words):
    line = refusal(capfd, stub.main(option))
    assert all(word in line for word in words), line
    assert stub.starts() == []


def test_a_precision_that_no_row_has_is_refused_before_any_starts(stub, capfd):
    rows = stub.module.BENCHMARK.rows
    stub.module.BENCHMARK.rows = {name: row._replace(precisions=("fp32", "tf32")) for name, row in rows.items()}
    line = refusal(capfd, stub.main("--precision=bf16"))
    assert line.endswith("error: --precision=bf16: no row of stub that is asked for has it; expected fp32\n")
    assert stub.starts() == [] and not stub.out.exists()


@pytest.mark.parametrize(
    ("gpus", "words"),
    [
        ([("a", "H200")], ["1 GPU visible", "give --gpus=1", "CUDA_VISIBLE_DEVICES"]),
        ([("a", "H200"), ("b", "L4")], ["H200 and L4", "one kind"]),
    ],
)
def test_gpus_that_are_not_there_or_of_two_kinds_are_refused(stub, capfd, monkeypatch, gpus, words):
    monkeypatch.setattr(machine, "gpu_count", lambda: len(gpus))
    monkeypatch.setattr(machine, "gpus", lambda: [machine.Gpu(*gpu) for gpu in gpus])
    line = refusal(capfd, stub.main("--gpus=2", device="gpu"))
    assert all(word in line for word in words), line
    assert stub.starts() == []


def test_a_folder_below_a_file_is_refused(stub, capfd):
    (stub.folder / "file").write_text("x")
    line = refusal(capfd, stub.main(f"--out={stub.folder / 'file' / 'run'}"))
    assert "Not a directory" in line and "choose another folder with --out" in line


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written_is_refused(stub, capfd):
    stub.out.mkdir(mode=0o500)
    assert "Permission denied" in refusal(capfd, stub.main())


def test_a_results_folder_of_another_schema_is_refused_and_left_alone(stub, capfd):
    stub.out.mkdir()
    (stub.out / "run.json").write_text('{"schema": 2}')
    assert "schema 2: expected 1; choose another folder with --out" in refusal(capfd, stub.main())
    assert os.listdir(stub.out) == ["run.json"]


def test_a_folder_that_is_no_run_is_refused_and_left_alone(stub, capfd):
    stub.out.mkdir()
    (stub.out / "thesis.tex").write_text("x")
    assert "thesis.tex" in refusal(capfd, stub.main())
    assert os.listdir(stub.out) == ["thesis.tex"]


def test_a_second_run_into_the_same_folder_is_refused(stub, capfd):
    with records.open_run(stub.out):
        line = refusal(capfd, stub.main())
    assert "another run" in line and "--out" in line
    assert stub.starts() == []


@pytest.mark.parametrize("argv", [[], ["--resume"]])
def test_a_folder_of_a_run_on_another_device_is_left_as_it_is(stub, capfd, argv):
    with records.open_run(stub.out) as run:
        records.write_record(run, record_cases.make(device="gpu", precision="tf32"))
    before = {path: path.read_bytes() for path in stub.out.rglob("*") if path.is_file()}
    assert "holds a run on a GPU, and this one is on a CPU; choose another" in refusal(capfd, stub.main(*argv))
    assert {path: path.read_bytes() for path in stub.out.rglob("*") if path.is_file()} == before
    assert stub.starts() == []


def test_records_that_a_run_replaces_are_named(stub, capfd):
    assert stub.main("--rows=first") == 0
    assert "replaced" not in capfd.readouterr().err
    assert stub.main("--rows=first") == 0
    assert "has records of these rows, which are replaced (--out=DIR keeps both): first\n" in capfd.readouterr().err


def test_a_corrupt_record_is_named_by_resume_and_replaced_without_it(stub, capfd):
    assert stub.main("--rows=first") == 0
    path = stub.out / "rows" / "stub.small.first.train.cpu.fp32.json"
    path.write_text("{")
    capfd.readouterr()
    assert str(path) in refusal(capfd, stub.main("--rows=first", "--resume"))
    assert stub.main("--rows=first") == 0
    assert stub.record("first")["status"] == "ok"


def test_a_gpu_that_is_not_there_is_refused_before_anything_is_written(stub, capfd, monkeypatch):
    monkeypatch.setattr("harness.record.machine.gpu_count", lambda: 0)
    line = refusal(capfd, main(stub.module.BENCHMARK, ["--device=gpu", f"--out={stub.out}"]))
    assert "--device=gpu" in line and "--device=cpu" in line
    assert stub.starts() == [] and not stub.out.exists()


@pytest.mark.parametrize("module", ["numpy", "pandas", "psutil", "tqdm"])
def test_a_python_that_lacks_a_module_is_refused_before_anything_is_written(stub, capfd, monkeypatch, module):
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: None if name == module else find(name, *rest))
    line = refusal(capfd, stub.main())
    assert f"the module {module} is not installed" in line and ".venv/bin/python" in line
    assert stub.starts() == [] and not stub.out.exists()


# No space on the disk


def run_with(stub, largest_file: int, *options: str):
    """The script with a limit on the size of any file that it or its rows write: the nearest thing to a full disk."""

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))

    process = stub.start(*options, preexec_fn=limit)
    output, errors = process.communicate(timeout=300)
    return process.returncode, output, errors


def test_a_record_that_does_not_fit_on_the_disk_is_one_line_and_finished_rows_are_kept(stub):
    assert stub.main("--rows=first") == 0
    first = stub.record("first")
    largest = max(path.stat().st_size for path in stub.out.glob("rows/*.json"))
    status, _, errors = run_with(stub, largest + 500, "--rows=first,long_record,flaky", "--resume")
    reported = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert status == 1 and len(reported) == 1 and "Traceback" not in errors, errors
    assert "cannot be written (File too large); free some space, or choose another folder with --out" in reported[0]
    assert stub.record("first") == first
    found, problems = records.read_run(stub.out)
    assert problems == [] and {record["row"] for record in found} == {"first", "long_record"}, (errors, largest)
    assert "flaky 0" not in stub.starts()
    assert not list(stub.out.rglob("*.tmp"))


def test_no_space_at_all_is_one_line(stub):
    status, output, errors = run_with(stub, 0)
    assert status == 2 and errors.startswith("error: ") and errors.count("\n") == 1, output + errors
    assert "free some space" in errors


def test_no_space_for_temporary_files_is_one_line_and_finished_rows_are_kept(stub, capfd, monkeypatch):
    assert stub.main("--rows=first") == 0
    first = stub.record("first")
    capfd.readouterr()

    def no_space(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(stub.out))

    with monkeypatch.context() as patched:
        patched.setattr("tempfile.mkdtemp", no_space)
        assert stub.main() == 1
    reported = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(reported) == 1 and "free some space" in reported[0]
    assert stub.record("first") == first
