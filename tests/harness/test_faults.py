"""What can happen to a run besides wrong options: the row that it happens to says so, and nothing else is harmed.

kill -9 is in test_faults_kill.py; a row's time limit, a segmentation fault and a killed row among others in
test_benchmark.py; a disk without space for a record in test_benchmark_bad_input.py; a loss that is not finite in
test_planted_mistakes.py.
"""

import ast
import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from harness.errors import UserError
from harness.record import intervals, machine, records
from harness.run import child, suite
from tests.harness.test_processes import is_gone, wait_for
from tests.harness.test_suite import HEADER, NAMES

PROJECT = Path(__file__).resolve().parents[2]


def pids(stub) -> list[int]:
    path = stub.folder / "pids"
    return [int(pid) for pid in path.read_text().split()] if path.exists() else []


def told_once(capfd) -> str:
    """The one line on standard error."""
    seen = capfd.readouterr().err
    assert seen.startswith("error: ") and seen.count("\n") == 1, seen
    return seen


# Out of memory


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("ResourceExhaustedError", "{{function_node __wrapped__MatMul}} failed to allocate memory [Op:MatMul]"),
        ("InternalError", "Failed to allocate 4294967296 bytes for new constant"),
        ("InternalError", "Dst tensor is not initialized."),
        ("InternalError", "CUDA_ERROR_OUT_OF_MEMORY: out of memory"),
        ("OutOfMemoryError", "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.10 GiB"),
        ("RuntimeError", "[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: out of memory"),
        ("AcceleratorError", "CUDA error: out of memory"),
        ("RuntimeError", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        ("RuntimeError", "cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        ("JaxRuntimeError", "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 17179869184 bytes."),
        ("XlaRuntimeError", "RESOURCE_EXHAUSTED: Failed to allocate request for 16.00GiB on device ordinal 0"),
    ],
)  # fmt: skip
def test_every_frameworks_way_to_be_out_of_memory_says_what_to_do(kind, text):
    seen = child.one_line(type(kind, (Exception,), {})(text))
    assert seen == f"out of memory: {text}; try a smaller --batch-size"


def test_the_hosts_memory_error_is_one_of_them_and_another_error_is_not():
    assert child.one_line(MemoryError("8 GiB")) == "out of memory: 8 GiB; try a smaller --batch-size"
    assert child.one_line(ValueError("allocate a name")) == "ValueError: allocate a name"


# No space, no writing


def test_rows_without_space_for_their_files_or_their_result_say_so_and_harm_no_other(stub):
    assert stub.main("--rows=fills_disk,first,long_result") == 1
    for mode in ("forward", "train"):
        reason = stub.record("fills_disk", mode)["reason"]
        assert reason.startswith(
            "no space on the disk: [Errno 27] File too large; free some there or in TMPDIR; see logs/"
        )
        reason = stub.record("long_result", mode)["reason"]
        assert reason.startswith("its result could not be written: no space on the disk: [Errno 27] File too large")
        assert stub.record("first", mode)["status"] == "ok"


def test_a_read_only_file_system_is_refused_before_any_row_starts(stub, capfd):
    from harness.run import benchmark

    for folder in ("/proc/lstm-run", "/sys/lstm-run"):  # where nobody can make a folder, root neither
        assert benchmark.main(stub.module.BENCHMARK, ["--device=cpu", f"--out={folder}"]) == 2
        line = told_once(capfd)
        assert f"{folder}: cannot be used for results" in line and "--out" in line
    assert stub.starts() == []


def test_a_folder_that_becomes_read_only_ends_the_run_in_one_line_and_keeps_what_was_finished(stub, capfd, monkeypatch):
    replace = os.replace

    def refuse(source, target):
        if "second" in str(target):
            raise OSError(errno.EROFS, "Read-only file system", str(target))
        replace(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", refuse)
        assert stub.main("--rows=first,second,third") == 1
    seen = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(seen) == 1 and "Read-only file system" in seen[0] and "allow writing there" in seen[0]
    found, problems = records.read_run(stub.out)
    assert problems == [] and {record["row"] for record in found} == {"first"} and not list(stub.out.rglob("*.tmp"))
    assert "| first " in (stub.out / "stub.md").read_text(), "what there is is drawn"
    stub.starts()
    assert stub.main("--rows=first,second,third", "--resume") == 0
    assert stub.rows_started() == ["second 0", "third 0"]


# The clock


def test_durations_are_never_differences_of_the_wall_clock():
    """time.time may go back; timestamps come from datetime, and stand in two files alone."""
    wall = {"time", "time_ns", "localtime", "gmtime"}
    dated = set()
    files = [file for room in ("harness", "models", "benchmarks") for file in (PROJECT / room).rglob("*.py")]
    assert {"clocks.py", "rows.py", "mnist.py"} <= {file.name for file in files}
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "time":
                assert node.attr not in wall, f"{path.name}:{node.lineno}: time.{node.attr}"
            assert not (isinstance(node, ast.ImportFrom) and node.module == "time"), path.name
            imports = ast.unparse(node) if isinstance(node, ast.Import | ast.ImportFrom) else ""
            if "datetime" in imports and imports != "from datetime import timedelta":  # which is no clock
                dated.add(path.name)
    assert dated == {"records.py", "machine.py"}


def test_a_clock_that_is_set_back_between_processes_changes_dates_and_nothing_else(stub, monkeypatch):
    assert stub.main("--processes=3", "--rows=first,clock_set_back") == 0
    for mode in ("forward", "train"):
        first, set_back = stub.record("first", mode), stub.record("clock_set_back", mode)
        assert set_back["environment"].pop("date").startswith("2026-01-09"), "the first process's"
        assert {**set_back, "row": "first", "spent_s": first["spent_s"]} == first
    stub.starts()
    assert stub.main("--processes=3", "--rows=first,clock_set_back", "--resume") == 0
    assert stub.rows_started() == []


# One run at a time


HOLDS = """
import sys, time
from harness.record import records
run = records.open_run(sys.argv[1])
print("held", flush=True)
time.sleep(60)
"""


def test_the_lock_of_a_killed_run_is_free_at_once(tmp_path):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDS, tmp_path / "run"], cwd=PROJECT, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(
        UserError, match=rf"another run \(process {holder.pid}\) is writing here; wait for it, or choose"
    ):
        records.open_run(tmp_path / "run")
    holder.kill()
    holder.communicate()
    records.open_run(tmp_path / "run").close()
    assert not (tmp_path / "run" / ".lock").exists()


# A script of the suite that opens the run, and tries what a stranger could do meanwhile.
TRIES = """
import os, subprocess, sys
from pathlib import Path
from harness.record import records
if "--list" in sys.argv:
    sys.exit(print("keras   vanilla"))
if "--plan" in sys.argv:
    numbers = '"script": "x", "processes": 1, "points": 1, "budget_s": 1.0, "at_once": 1, "gpus": 1'
    sys.exit(print('{"rows": {"keras": "tensorflow"}, "left_out": "", "alone": "", ' + numbers + "}"))
out = next(word.removeprefix("--out=") for word in sys.argv if word.startswith("--out="))
here = Path(__file__)
code = "import sys; from harness.record import records; records.open_run(sys.argv[1])"
def stranger():
    kept = {key: value for key, value in os.environ.items() if key != records.LOCK}
    return subprocess.run([sys.executable, "-c", code, out], env=kept, capture_output=True, text=True).stderr
seen = [stranger()]
with records.open_run(out):
    seen.append(stranger())
seen.append(stranger())
with here.with_name("seen").open("a") as file:
    file.writelines(line.splitlines()[-1] + "\\n" if line else "nothing\\n" for line in seen)
if here.with_suffix(".waits").exists():
    here.with_name("waiting").write_text(str(os.getpid()))
    import time
    time.sleep(60)
"""


@pytest.fixture
def scripts(tmp_path, monkeypatch, drawn_here):
    monkeypatch.setenv("PYTHONPATH", str(PROJECT), prepend=os.pathsep)
    folder = tmp_path / "scripts"
    folder.mkdir()
    for name in NAMES:
        (folder / f"{name}.py").write_text(
            HEADER.format(config="small", configs='{"small": {"UNITS": 8}}', more="", runs="") + TRIES
        )
    return folder


def test_the_suite_holds_the_run_from_its_first_script_to_its_last(scripts):
    out = scripts.parent / "out"
    assert suite.main(["--only=mnist,synthetic", "--device=cpu", f"--out={out}"], scripts) == 0
    seen = (scripts / "seen").read_text().splitlines()
    assert len(seen) == 6
    for line in seen:
        assert f"another run (process {os.getpid()}) is writing here" in line
    records.open_run(out).close()


def test_a_killed_suite_takes_its_script_with_it_and_frees_the_run(scripts):
    (scripts / "mnist.waits").touch()
    out = scripts.parent / "out"
    code = "import sys; from pathlib import Path; from harness.run import suite; suite.main(sys.argv[2:], Path(sys.argv[1]))"
    command = [sys.executable, "-c", code, str(scripts), "--only=mnist", "--device=cpu", f"--out={out}"]
    killed = subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.DEVNULL)
    pid = int(wait_for(lambda: (scripts / "waiting").exists() and (scripts / "waiting").read_text()))
    killed.kill()
    killed.wait()
    wait_for(lambda: is_gone(pid))
    records.open_run(out).close()


# Ctrl-C and time limits


def test_ctrl_c_ends_what_a_row_started_in_a_session_of_its_own(stub):
    parent = stub.start("--rows=two_sessions")
    row, helper = wait_for(lambda: pids(stub))
    assert os.getsid(helper) != os.getsid(row)
    parent.send_signal(signal.SIGINT)
    parent.communicate(timeout=300)
    assert parent.returncode == 130 and is_gone(row) and is_gone(helper)


def test_a_time_limit_ends_it_too_and_nothing_that_others_started(stub):
    other = subprocess.Popen(["sleep", "600"], start_new_session=True)
    try:
        assert stub.main("--rows=two_sessions", "--row-limit-s=8") == 1
        assert all(map(is_gone, pids(stub))) and len(pids(stub)) == 2
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


# Logs


def test_the_log_of_a_failed_row_is_named_in_its_table_and_outlives_a_resumed_run(stub):
    assert stub.main("--rows=flaky") == 1
    name = "logs/stub.small.flaky.cpu.fp32.log"
    assert f"see {name}" in (stub.out / "stub.md").read_text()
    first = (stub.out / name).read_text()
    assert "Traceback" in first
    stub.script.write_text(stub.script.read_text().replace('row == "flaky"', 'print("said") or row == "flaky"'))
    stub.script.with_name("repaired").touch()
    assert stub.main("--rows=flaky", "--resume") == 0
    assert (stub.out / name).read_text() == first + "said\n"


# Nothing is written before the input was checked


def test_data_that_is_refused_leaves_no_folder_behind(stub, capfd):
    stub.script.write_text(stub.script.read_text().replace('note("data")', "raise UserError('--data=x: no set in it')"))
    stub.script.write_text(
        stub.script.read_text().replace("import os\n", "import os\nfrom harness.errors import UserError\n", 1)
    )
    stub.out = stub.folder / "results" / "mine"
    assert stub.main() == 2
    assert told_once(capfd) == "error: --data=x: no set in it\n"
    assert not (stub.folder / "results").exists()
    stub.out.mkdir(parents=True)
    assert stub.main() == 2
    assert stub.out.exists(), "it was not made for the run"


def test_data_that_are_refused_take_no_earlier_run_with_them(stub):
    assert stub.main("--rows=first") == 0
    good = stub.script.read_text()
    stub.script.write_text(good.replace('note("data")', "raise __import__('harness').errors.UserError('none')"))
    assert stub.main("--rows=first") == 2
    assert stub.record("first")["status"] == "ok"


def test_data_whose_loading_crashes_keep_the_log_that_says_why(stub, capfd):
    stub.script.write_text(stub.script.read_text().replace('note("data")', "os.kill(os.getpid(), signal.SIGSEGV)"))
    assert stub.main() == 1
    assert "the data could not be loaded: the process was ended by SIGSEGV; see " in told_once(capfd)
    stub.script.write_text(stub.script.read_text().replace("os.kill(os.getpid(), signal.SIGSEGV)", "1 / 0", 1))
    assert stub.main() == 1
    log = Path(told_once(capfd).rstrip().rsplit(" ", 1)[1])
    assert "ZeroDivisionError" in log.read_text()


def test_the_suite_leaves_no_folder_behind_when_its_first_script_refuses_its_input(scripts):
    (scripts / "mnist.py").write_text((scripts / "mnist.py").read_text() + "\nsys.exit(2)\n")
    out = scripts.parent / "results" / "mine"
    assert suite.main(["--only=mnist,synthetic", "--device=cpu", f"--out={out}"], scripts) == 2
    assert not out.parent.exists()


FILLS = """
import sys
from pathlib import Path
from harness.run import benchmark; from harness.record import records
from harness.errors import CrashError
if "--list" in sys.argv:
    sys.exit(print("keras   vanilla"))
if "--plan" in sys.argv:
    numbers = '"script": "x", "processes": 1, "points": 1, "budget_s": 1.0, "at_once": 1, "gpus": 1'
    sys.exit(print('{"rows": {"keras": "tensorflow"}, "left_out": "", "alone": "", ' + numbers + "}"))
with open(Path(__file__).with_name("seen"), "a") as file:
    file.write(Path(__file__).stem + "\\n")
if Path(__file__).stem == "mnist":
    out = next(word.removeprefix("--out=") for word in sys.argv if word.startswith("--out="))
    import resource
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
    benchmark.run = lambda: records.write_bytes(out + "/x.json", bytes(2000))
    sys.exit(benchmark.main(None, [], parent=lambda *_: benchmark))
"""


def test_a_full_disk_in_one_script_leaves_the_others_running_and_the_tables_drawn(scripts, capfd):
    for name in NAMES:
        header = HEADER.format(config="small", configs='{"small": {"UNITS": 8}}', more="", runs="")
        (scripts / f"{name}.py").write_text(header + FILLS)
    out = scripts.parent / "out"
    assert suite.main(["--only=mnist,synthetic", "--device=cpu", f"--out={out}"], scripts) == 1
    assert (scripts / "seen").read_text().split() == ["mnist", "synthetic"]
    seen = capfd.readouterr()
    assert "mnist: ended with status 1; see above" in seen.out and (out / "README.md").is_file()
    assert seen.err.count("error: ") == 1 and "x.json: cannot be written (File too large); free some space" in seen.err


def test_tables_that_do_not_fit_on_the_disk_are_status_1_and_one_line(scripts, capfd):
    out = scripts.parent / "out"
    with records.open_run(out):
        (out / "README.md").mkdir()  # the nearest thing to a disk that refuses this file
    assert suite.main(["--only=mnist", "--device=cpu", f"--out={out}"], scripts) == 1
    seen = capfd.readouterr()
    assert (
        seen.out.rstrip().splitlines()[-1].startswith(f"error: {out / 'README.md'}: cannot be written (Is a directory)")
    )
    assert "Traceback" not in seen.err


@pytest.mark.parametrize("ask", [suite.main, suite.check])
def test_the_suite_refuses_a_gpu_that_is_not_there_before_anything_is_written(scripts, capfd, monkeypatch, ask):
    monkeypatch.setattr(suite, "has_gpu", lambda: False)
    out = scripts.parent / "out"
    assert ask(["--only=mnist", "--device=gpu", f"--out={out}"], scripts) == 2
    assert told_once(capfd) == f"error: {machine.NO_GPU}\n"
    assert not out.exists() and not (scripts / "seen").exists()


# What a killed preparation leaves


def test_a_matmul_whose_process_was_killed_is_measured_again_at_once(stub):
    text = stub.script.read_text()
    kill = "((HERE / 'once').exists() or ((HERE / 'once').touch(), os.kill(os.getpid(), signal.SIGKILL))) and 1e9"
    stub.script.write_text(text.replace('note("matmul") or 1e9', kill))
    assert stub.main("--rows=first") == 0
    assert records.read_json(stub.out / "matmul.json") == {"cpu.fp32": 1e9}


def test_a_row_that_was_killed_between_its_modes_is_measured_anew(stub):
    assert stub.main("--processes=2", "--rows=first,second") == 0
    record = stub.record("first")
    record["blocks_ms"] = record["blocks_ms"][:1]
    record["step_ms"] = intervals.step_of(record["blocks_ms"])
    record["throughput"]["value"] = record["items_per_batch"] / record["step_ms"]["median"] * 1e3
    records.write_record(stub.out, record)
    stub.starts()
    assert stub.main("--processes=2", "--rows=first,second", "--resume") == 0
    assert stub.rows_started() == ["first 0", "first 1"]
    assert [len(stub.record("first", mode)["blocks_ms"]) for mode in ("forward", "train")] == [2, 2]
