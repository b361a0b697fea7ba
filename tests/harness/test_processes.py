"""A row's process: what becomes of it is always a result or a one-line reason, and nothing of it is left behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from harness.record import records
from harness.run import child, processes

PROJECT = Path(__file__).resolve().parents[2]
# A benchmark script's part of a child process; {body} is what the row does.
STUB = """
import ctypes, json, os, signal, subprocess, sys, time
from pathlib import Path
sys.path.insert(0, {project!r})
from harness.run import processes
job = processes.read_job(sys.argv[sys.argv.index(processes.CHILD_FLAG) + 1])
here = Path(__file__).parent

def note(name, pid):
    (here / (name + ".new")).write_text(str(pid))
    (here / (name + ".new")).rename(here / name)

{body}
"""
# A grandchild that ignores what it can, and a child that waits for it.
WITH_GRANDCHILD = """
grandchild = subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"])
note("grandchild", grandchild.pid)
note("child", os.getpid())
time.sleep(600)
"""  # noqa: E501


@pytest.fixture
def stub(tmp_path):
    def write(body: str) -> Path:
        path = tmp_path / "stub.py"
        path.write_text(STUB.format(project=str(PROJECT), body=body))
        return path

    return write


@pytest.fixture
def run(stub, tmp_path):
    def start(body: str, job: dict | None = None, limit_s: float = 300.0, **more) -> processes.Outcome:
        return processes.run_child(stub(body), job or {}, limit_s=limit_s, log=tmp_path / "logs" / "a.row.log", **more)

    return start


def wait_for(condition, seconds: float = 300.0):
    """The condition's value as soon as it is true; fails after `seconds`."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)
    return value


def noted(folder: Path, name: str) -> int:
    return int(wait_for(lambda: (folder / name).exists() and (folder / name).read_text()))


def is_gone(pid: int) -> bool:
    """Whether no such process runs; one that nobody has waited for yet is no longer running either."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_child_gets_its_job_and_hands_back_its_result(run):
    outcome = run(
        "processes.write_result(job, {'twice': 2 * job['units'], 'x': os.environ['X']})", {"units": 21}, env={"X": "y"}
    )
    assert outcome.result == {"twice": 42, "x": "y"} and outcome.reason == ""
    assert 0 < outcome.seconds < 30


def test_output_of_every_process_is_appended_to_the_log(run, tmp_path):
    for text in ("one", "two"):
        run(f"print({text!r}); print('warning', file=sys.stderr, flush=True)")
    log = (tmp_path / "logs" / "a.row.log").read_text()
    assert log.index("one") < log.index("two") and log.count("warning") == 2


def test_child_reads_no_input(run):
    assert run("processes.write_result(job, {'read': sys.stdin.read()})").result == {"read": ""}


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("raise RuntimeError('no')", "the process ended with status 1 and no result"),
        ("sys.exit(3)", "the process ended with status 3 and no result"),
        ("sys.exit(0)", "the process ended with status 0 and no result"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "the process was ended by SIGSEGV"),
        (
            "os.kill(os.getpid(), signal.SIGKILL)",
            "the process was ended by SIGKILL (out of host memory?)",
        ),
        ("os.kill(os.getpid(), signal.SIGRTMIN + 1)", "the process was ended by signal"),
    ],
)
def test_child_without_a_result_leaves_a_reason_of_one_line(run, body, reason):
    outcome = run(body)
    assert outcome.result is None and outcome.reason.startswith(reason) and "\n" not in outcome.reason
    assert outcome.log == "logs/a.row.log"


@pytest.mark.parametrize("ends", ["SIGSEGV", "SIGABRT", "SIGILL", "SIGBUS", "SIGFPE"])
def test_the_log_says_where_a_signal_met_the_child(run, tmp_path, ends):
    outcome = run(f"def in_this_call():\n    os.kill(os.getpid(), signal.{ends})\nin_this_call()")
    assert outcome.reason == f"the process was ended by {ends}"
    assert "in in_this_call" in (tmp_path / "logs" / "a.row.log").read_text()


@pytest.mark.parametrize("text", [
    "in user code:\n\n    File 'a.py', line 8, in step  *\n        y = inner(x)\n\n    ValueError: 3:\n    too many\n",
    "Exception encountered when calling X.call().\n\n\x1b[1m3:\n  too many\x1b[0m\n\nArguments received by X.call():\n  a",
    "3: too\nmany",
])  # fmt: skip
def test_error_is_told_by_its_own_text_whoever_has_wrapped_it(text):
    assert child.one_line(ValueError(text)) == "ValueError: 3: too many"


def test_error_without_a_text_is_told_by_its_kind():
    assert child.one_line(ValueError("in user code:\n\n    File 'a.py'\n\n    ValueError:\n")) == "ValueError"
    assert child.one_line(ValueError()) == "ValueError"


def test_result_that_cannot_be_written_whole_is_never_read(run):
    for body in (
        "Path(job['result']).with_suffix('.tmp').write_text('{\"ok\": tr'); os._exit(0)",
        "processes.write_result(job, {'loss': float('nan')})",
    ):
        outcome = run(body)
        assert outcome.result is None and "no result" in outcome.reason


def test_time_limit_ends_the_child_and_what_it_started(run, tmp_path):
    outcome = run(WITH_GRANDCHILD, limit_s=8.0)
    assert outcome.result is None and outcome.reason == "stopped after its time limit of 8 s (ROW_LIMIT_S)"
    for name in ("child", "grandchild"):
        pid = noted(tmp_path, name)
        wait_for(lambda pid=pid: is_gone(pid))


def test_what_a_finished_child_left_running_is_ended_too(run, tmp_path):
    body = WITH_GRANDCHILD.replace("time.sleep(600)\n", "processes.write_result(job, {})\n")
    assert run(body).result == {}
    pid = noted(tmp_path, "grandchild")
    wait_for(lambda: is_gone(pid))


PARENT = """
import sys
from pathlib import Path
sys.path.insert(0, {project!r})
from harness.run import processes
try:
    processes.run_child(Path({stub!r}), {{}}, limit_s=300, log=Path({log!r}))
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.fixture
def parent(stub, tmp_path):
    """A process that runs the child with a grandchild; ended with its family after the test."""
    text = PARENT.format(project=str(PROJECT), stub=str(stub(WITH_GRANDCHILD)), log=str(tmp_path / "log"))
    process = subprocess.Popen([sys.executable, "-c", text], start_new_session=True)
    yield process
    for name in ("child", "grandchild"):
        if (tmp_path / name).exists() and not is_gone(pid := int((tmp_path / name).read_text())):
            os.kill(pid, signal.SIGKILL)
    process.kill()
    process.wait()


def test_ctrl_c_leaves_no_process_behind(parent, tmp_path):
    pids = [noted(tmp_path, name) for name in ("child", "grandchild")]
    os.kill(parent.pid, signal.SIGINT)
    assert parent.wait(timeout=300) == 130
    for pid in pids:
        wait_for(lambda pid=pid: is_gone(pid))


def test_child_dies_with_its_parent_even_when_that_is_killed(parent, tmp_path):
    pid = noted(tmp_path, "child")
    os.kill(parent.pid, signal.SIGKILL)
    wait_for(lambda: is_gone(pid))


class Unkillable:
    """A process that hangs in the kernel: killed, and still there."""

    pid, killed = 4711, 0

    def environ(self):
        return {}

    def kill(self):
        self.killed += 1


def test_a_process_that_cannot_be_killed_is_named_and_left_behind(run, monkeypatch, capfd):
    hangs = Unkillable()
    families = iter([[]])  # none before the row starts
    monkeypatch.setattr(processes, "_descendants", lambda: next(families, [hangs]))
    monkeypatch.setattr(psutil, "wait_procs", lambda family, timeout: time.sleep(min(timeout, 0.05)))
    monkeypatch.setattr(processes, "KILL_LIMIT_S", 0.2)
    assert run("processes.write_result(job, {})").result == {}
    assert capfd.readouterr().err == "warning: killed, and still there after 0.2 s (a hung driver?): process 4711\n"
    assert hangs.killed > 1


@pytest.mark.parametrize(
    ("ends", "note"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "the process ended by SIGSEGV after its result"),
        ("os._exit(3)", "the process ended with status 3 after its result"),
        ("sys.exit(0)", ""),
    ],
)
def test_a_crash_after_the_result_keeps_it_with_a_note(run, ends, note):
    outcome = run(f"processes.write_result(job, {{'a': 1}}); {ends}")
    assert (outcome.result, outcome.reason, outcome.note) == ({"a": 1}, "", note)


def test_job_is_handed_over_as_json_with_the_name_of_its_result(run):
    outcome = run("processes.write_result(job, job)", {"row": "keras", "constants": {"UNITS": 8, "CONFIG": None}})
    assert outcome.result.pop("result").endswith("/result") and outcome.result.pop("parent") == os.getpid()
    assert 0 < time.monotonic() - outcome.result.pop("started") < 300
    assert outcome.result == {"row": "keras", "constants": {"UNITS": 8, "CONFIG": None}}
    assert json.dumps(outcome.result)


def test_nothing_of_a_child_stays_behind(run, tmp_path, monkeypatch):
    monkeypatch.setattr(processes.tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    for body in ("processes.write_result(job, {})", "sys.exit(1)"):
        run(f"open(os.path.join(os.environ['LSTM_BENCH_SCRATCH'], 'profile'), 'w').close(); {body}")
    assert list((tmp_path / "temporary").iterdir()) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["logs", "stub.py", "temporary"]


def test_what_a_killed_parent_leaves_lies_in_the_runs_folder_and_the_next_run_removes_it(stub, tmp_path):
    out, temporary = tmp_path / "out", tmp_path / "temporary"
    temporary.mkdir()
    script = stub("note('child', os.getpid()); time.sleep(60)")
    code = (
        "import sys; from pathlib import Path; from harness.record import records; from harness.run import processes\n"
        "with records.open_run(sys.argv[1]) as run:\n"
        "    processes.run_child(Path(sys.argv[2]), {}, limit_s=60, log=run.path / 'logs' / 'a.log')"
    )
    command = [sys.executable, "-c", code, str(out), str(script)]
    parent = subprocess.Popen(command, cwd=PROJECT, env={**os.environ, "TMPDIR": str(temporary)})
    child_pid = noted(tmp_path, "child")
    parent.kill()
    parent.wait()
    wait_for(lambda: is_gone(child_pid))
    assert list(temporary.iterdir()) == []
    assert len(list(out.glob(".row-*.tmp"))) == 1
    with records.open_run(out):
        assert [path.name for path in out.glob(".*")] == [".lock"]


# Progress

THREE = """
for number in range(3):
    processes.write_progress(job, [{"number": k} for k in range(number + 1)])
    time.sleep(float(job["pause_s"]))
"""


def progress(stub, tmp_path, ending: str, limit_s: float, pause_s: float):
    """(the outcome, what was told of the child's progress)."""
    seen = []
    job = {"pause_s": pause_s}
    outcome = processes.run_child(stub(THREE + ending), job, limit_s=limit_s, log=tmp_path / "log", watch=seen.append)
    return outcome, seen


@pytest.mark.parametrize("ending", [
    "processes.write_result(job, {})", "os.kill(os.getpid(), signal.SIGSEGV)", "sys.exit(3)", "time.sleep(600)",
])  # fmt: skip
def test_all_progress_is_told_however_the_child_ends(stub, tmp_path, ending):
    outcome, seen = progress(stub, tmp_path, ending, 8, 0)
    assert seen[-1] == [{"number": 0}, {"number": 1}, {"number": 2}]
    assert (outcome.result == {}) == ("write_result" in ending)


def test_the_time_limit_counts_from_the_last_progress(stub, tmp_path):
    outcome, seen = progress(stub, tmp_path, "processes.write_result(job, {})", 8, 4)
    assert outcome.result == {} and len(seen) == 3 and outcome.seconds > 8
    outcome, seen = progress(stub, tmp_path, "time.sleep(600)", 5, 0.1)
    assert outcome.result is None and outcome.reason.startswith("stopped after its time limit of 5 s")


def test_a_watch_that_raises_ends_the_child(stub, tmp_path):
    def watch(seen):
        raise RuntimeError("no space")

    before = psutil.Process().children()  # of other tests in this process
    with pytest.raises(RuntimeError, match="no space"):
        processes.run_child(stub(THREE), {"pause_s": 20}, limit_s=300, log=tmp_path / "log", watch=watch)
    now = [child for child in psutil.Process().children() if child not in before]
    assert not [child for child in now if child.status() != psutil.STATUS_ZOMBIE]


SIDE_BY_SIDE = """
import contextlib
turns, log = processes.Turns(job), os.open(here / "happened", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
say = lambda what: os.write(log, f"{job['name']} {what}\\n".encode())
say("works")
time.sleep(job.get("works_s", 0))
with turns.waiting():
    time.sleep(job.get("waits_s", 0))
with turns.device():
    say("uses")
    time.sleep(job.get("uses_s", 0.2))
    say("used")
say("asks")
with turns.timed():
    say("times")
    if job.get("dies"):
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(job.get("times_s", 0.2))
    say("timed")
say("goes on")
time.sleep(job.get("goes_on_s", 0))
processes.write_result(job, {"name": job["name"]})
"""


@pytest.fixture
def together(stub, tmp_path):
    """Callable: jobs, processes at once → (outcomes by name, what happened in order as (name, what))."""

    def run(jobs: dict[str, dict], at_once: int, limit_s: float = 300.0):
        script, left, outcomes = stub(SIDE_BY_SIDE), list(jobs.items()), {}

        def next_work():
            if not left:
                return None
            name, job = left.pop(0)
            child = dict(
                script=script, job={"name": name, **job}, limit_s=limit_s, log=tmp_path / "logs" / f"{name}.log",
                gpu=job.get("gpu"), watch=print if job.get("watched") else None,
            )  # fmt: skip
            return processes.Work(child, lambda outcome: outcomes.update({name: outcome}))

        processes.run_together(next_work, at_once)
        happened = [line.split(" ", 1) for line in (tmp_path / "happened").read_text().splitlines()]
        return outcomes, happened

    return run


def test_what_is_timed_is_timed_with_all_others_at_rest(together):
    names = ["a", "b", "c", "d", "e"]
    outcomes, happened = together(
        {name: {"works_s": 0.1 * k, "uses_s": 2.0} for k, name in enumerate(names)}, at_once=5
    )
    assert {name: outcome.result for name, outcome in outcomes.items()} == {name: {"name": name} for name in names}
    begins = [place for place, (_, what) in enumerate(happened) if what == "times"]
    assert len(begins) == 5
    assert all(happened[place + 1] == [happened[place][0], "timed"] for place in begins), "nothing happened beside it"
    asked = max(place for place, (_, what) in enumerate(happened) if what == "asks")
    assert asked < begins[0] and begins[-1] < min(happened.index([name, "goes on"]) for name in names)
    using = most = 0
    for _, what in happened:
        using += {"uses": 1, "used": -1}.get(what, 0)
        most = max(most, using)
    assert most == processes.AT_THE_DEVICE


def test_after_a_long_turn_one_goes_on_before_the_next_turn_and_none_starts(together, monkeypatch):
    monkeypatch.setattr(processes, "LONG_S", 3.0)
    jobs = {"dead": {"dies": True}, "a": {"times_s": 4.0, "goes_on_s": 2.0}, "b": {}, "c": {}, "d": {}}
    outcomes, happened = together(jobs, at_once=4)  # there is room when one has died
    assert all(outcomes[name].result for name in "abcd")
    at = {tuple(what): place for place, what in enumerate(happened)}
    assert at["a", "timed"] < at["a", "goes on"] < min(at["b", "times"], at["c", "times"])
    assert max(at["b", "timed"], at["c", "timed"]) < at["d", "works"], "d starts when all have timed"
    assert max(at["b", "timed"], at["c", "timed"]) < min(at["b", "goes on"], at["c", "goes on"])


def test_one_that_goes_on_to_more_turns_goes_on_when_all_have_timed(together, monkeypatch):
    monkeypatch.setattr(processes, "LONG_S", 0.5)
    _, happened = together({name: {"times_s": 1.0, "watched": True} for name in "abc"}, at_once=3)
    first = min(place for place, (_, what) in enumerate(happened) if what == "goes on")
    assert max(place for place, (_, what) in enumerate(happened) if what == "timed") < first


def test_others_start_when_there_is_room_and_nobody_times(together):
    _, happened = together({name: {} for name in "abcdef"}, at_once=2)
    timed = [(place, name) for place, (name, what) in enumerate(happened) if what == "times"]
    assert len(timed) == 6 and all(happened[place + 1] == [name, "timed"] for place, name in timed)
    running = most = 0
    for _, what in happened:
        running += {"works": 1, "goes on": -1}.get(what, 0)
        most = max(most, running)
    assert most == 2


def test_on_two_gpus_one_on_each_times_and_none_works_beside_them(together):
    jobs = {name: {"gpu": f"GPU-{k % 2}", "uses_s": 0.5, "times_s": 2.0} for k, name in enumerate("abcdef")}
    outcomes, happened = together(jobs, at_once=4)
    assert all(outcome.result for outcome in outcomes.values())
    timing, most = set(), 0
    for name, what in happened:
        assert not timing or what in ("times", "timed"), f"{name} {what} beside {timing}"
        timing ^= {name} if what in ("times", "timed") else set()
        assert len({jobs[one]["gpu"] for one in timing}) == len(timing), timing
        most = max(most, len(timing))
    assert most == 2


def test_on_two_gpus_long_turns_end_before_a_further_one_begins(together, monkeypatch):
    monkeypatch.setattr(processes, "LONG_S", 0.5)
    monkeypatch.setattr(processes, "WAITS_S", 3.5)
    jobs = {name: {"gpu": "GPU-0", "times_s": 2.0} for name in "acd"} | {"b": {"gpu": "GPU-1", "times_s": 12.0}}
    outcomes, happened = together(jobs, at_once=4)
    assert all(outcome.result for outcome in outcomes.values())
    at = {tuple(what): place for place, what in enumerate(happened)}
    first, second, third = sorted("acd", key=lambda name: at[name, "times"])
    assert at[second, "timed"] < at["b", "timed"], "GPU-1 is timed on all the while"
    assert at["b", "timed"] < min(at[first, "goes on"], at[second, "goes on"])
    assert max(at[first, "goes on"], at[second, "goes on"]) < at[third, "times"]


def test_one_that_dies_in_its_turn_holds_up_no_other(together):
    outcomes, _ = together({"a": {"dies": True}, "b": {}, "c": {}}, at_once=3)
    assert outcomes["a"].reason == "the process was ended by SIGKILL (out of host memory?)"
    assert outcomes["b"].result and outcomes["c"].result


def test_waiting_counts_neither_as_work_nor_for_the_time_limit(together):
    outcomes, _ = together(
        {"a": {"times_s": 5.0}, "b": {"times_s": 5.0, "waits_s": 6.0}, "c": {"times_s": 5.0}}, at_once=3, limit_s=10.0
    )
    assert all(outcome.result and outcome.seconds < 10.0 for outcome in outcomes.values())
    slow, _ = together({"a": {"times_s": 60.0}, "b": {}}, at_once=2, limit_s=5.0)
    assert slow["a"].reason == "stopped after its time limit of 5 s (ROW_LIMIT_S)" and slow["b"].result


def test_alone_nobody_asks(together):
    outcomes, happened = together({"a": {}, "b": {}}, at_once=1)
    assert [name for name, _ in happened] == ["a"] * 7 + ["b"] * 7 and all(o.result for o in outcomes.values())


def test_the_end_of_one_leaves_what_another_has_started(stub, tmp_path):
    helper = "helper = subprocess.Popen(['sleep', '600'], start_new_session=True); note('helper', helper.pid)"
    last = "time.sleep(3); processes.write_result(job, {'lives': helper.poll() is None})"
    bodies = [stub(f"{helper}\n{last}").rename(tmp_path / "long.py"), stub("processes.write_result(job, {})")]
    left, outcomes = [*bodies], []

    def next_work():
        script = left.pop(0) if left else None
        arguments = dict(script=script, job={}, limit_s=300.0, log=tmp_path / "logs" / "a.log")
        return script and processes.Work(arguments, outcomes.append)

    processes.run_together(next_work, 2)
    assert {"lives": True} in [outcome.result for outcome in outcomes]
    wait_for(lambda: is_gone(noted(tmp_path, "helper")))
