"""One child process per row: started in a session of its own, watched, and ended with all that it started.

The parent never imports a framework. It hands a job (JSON) to `python SCRIPT --child JOB`, the child writes one JSON
result, whole or not at all. Whatever else happens (an exception, a signal, the time limit) becomes a one-line reason.
"""

import contextlib
import ctypes
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from harness.errors import CrashError
from harness.frameworks.profiles import SCRATCH

# prctl(2): the signal that a process gets when its parent dies; and to be given the orphans of one's descendants
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
CHILD_FLAG = "--child"
PROJECT = Path(__file__).resolve().parents[2]
WATCH_S = 0.5  # how often a process's progress is looked at
KILL_LIMIT_S = 30.0  # a killed process that is still there then hangs in the kernel, such as in a GPU's driver


class Outcome(NamedTuple):
    """What became of one child: its result, or the one-line reason why there is none, how long it took, and its log.

    `note`: that it crashed after its result, or "".
    """

    result: dict | None
    reason: str
    seconds: float
    log: str = ""  # as a reader of the run's folder finds it, such as logs/ptb.small.keras.cpu.fp32.log
    note: str = ""


def run_child(
    script: Path,
    job: dict,
    *,
    limit_s: float,
    log: Path,
    env: dict[str, str] | None = None,
    python: str = sys.executable,
    watch: Callable[[Sequence[dict]], None] | None = None,
) -> Outcome:
    """Run `job` in a child process of its own and wait for it.

    Args:
        script: the benchmark script; it is started as `python script --child JOBFILE`.
        job: JSON-able; the child finds it under JOBFILE, with "result" naming the file that it has to write.
        limit_s: after this many seconds the child and everything it started are killed.
        log: standard output and standard error are appended here.
        env: environment variables on top of this process's own.
        python: that runs the script.
        watch: told everything that the child has handed over by `write_progress` so far, whenever there is more of it; limit_s
            then counts from the last time anew. All of it is told before this function returns.

    Raises:
        CrashError: where the log or the job cannot be written.
        KeyboardInterrupt: after the child and everything it started have been killed.
    """
    started, shown = time.monotonic(), f"{log.parent.name}/{log.name}"
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    others = set(_descendants())
    with contextlib.ExitStack() as stack:
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            output = stack.enter_context(log.open("ab"))
            # In the run's folder, not in the temporary one: what a killed parent leaves there, the next run removes.
            run = log.absolute().parent.parent
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix=".row-", suffix=".tmp", dir=run))
            result_path, job_path, progress = (Path(folder, name) for name in ("result", "job", "progress"))
            paths = {"result": str(result_path), **({"progress": str(progress)} if watch else {})}
            job_path.write_text(json.dumps({**job, **paths, "parent": os.getpid()}))
            child = subprocess.Popen(
                [python, str(script), CHILD_FLAG, str(job_path)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, SCRATCH: folder, **(env or {})},
                start_new_session=True,  # Ctrl-C reaches the parent alone, which then ends the whole group
            )
        except OSError as error:
            where, what = error.filename or log.parent, error.strerror or error
            raise CrashError(f"{where}: a process cannot be started ({what}); free some space there") from error
        try:
            status = _wait(child, limit_s, progress, watch) if watch else child.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            return Outcome(None, f"stopped after its time limit of {limit_s:g} s (ROW_LIMIT_S)", limit_s, shown)
        finally:
            _end(child, others)
        seconds = time.monotonic() - started
        if result_path.exists():
            note = f"the process ended {_how(status)} after its result" if status else ""
            return Outcome(json.loads(result_path.read_text()), "", seconds, shown, note)
        return Outcome(None, _reason(status), seconds, shown)


def _wait(child: subprocess.Popen, limit_s: float, progress: Path, watch: Callable[[Sequence[dict]], None]) -> int:
    """The child's exit status; subprocess.TimeoutExpired where it has made no progress for limit_s."""
    reported, deadline = b"", time.monotonic() + limit_s
    while True:
        status = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = child.wait(timeout=max(0.0, min(WATCH_S, deadline - time.monotonic())))
        if progress.exists() and (content := progress.read_bytes()) != reported:
            reported, deadline = content, time.monotonic() + limit_s
            watch(json.loads(content))
        if status is not None:
            return status
        if time.monotonic() >= deadline:
            raise subprocess.TimeoutExpired(child.args, limit_s)


def read_job(path: str) -> dict:
    """In the child: read the job, and end with the parent."""
    job = json.loads(Path(path).read_text())
    end_with(job["parent"])
    return job


def end_with(parent: int) -> None:
    """Ask the kernel to kill this process when its parent, of that number, dies; end at once where it has died already."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):  # not Linux: the parent's own clean-up has to do
        ctypes.CDLL(None).prctl(option, value)


def write_result(job: dict, result: dict) -> None:
    """In the child: hand the result over, whole or not at all."""
    _hand_over(Path(job["result"]), result)


def write_progress(job: dict, results: Sequence[dict]) -> None:
    """In the child: hand over what is there so far, all of it again, while the child goes on."""
    _hand_over(Path(job["progress"]), results)


def _hand_over(path: Path, content: object) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(content, allow_nan=False))
    temporary.replace(path)


def _descendants() -> list:
    import psutil  # here, so that --list needs the standard library alone

    return psutil.Process().children(recursive=True)


def _end(child: subprocess.Popen, others: set) -> None:
    """Kill the child and what it started, in whatever session: orphans among it have become this process's children.

    `others`: psutil.Process of the descendants of this process that are none of the child's. What KILL_LIMIT_S does not end
    is left behind and named on standard error.
    """
    import psutil

    deadline = time.monotonic() + KILL_LIMIT_S
    with contextlib.suppress(ProcessLookupError):  # nobody left in it
        os.killpg(child.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(timeout=KILL_LIMIT_S)
    while family := [process for process in _descendants() if process not in others]:
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        left = deadline - time.monotonic()
        psutil.wait_procs(family, timeout=max(0.0, min(5.0, left)))
        if left <= 0:
            pids = ", ".join(str(process.pid) for process in family)
            problem = f"killed, and still there after {KILL_LIMIT_S:g} s (a hung driver?): process {pids}"
            print(f"warning: {problem}", file=sys.stderr)
            return


def _how(status: int) -> str:
    """How a process ended: "by SIGSEGV", or "with status 3"."""
    if status < 0:
        return f"by {next((known.name for known in signal.Signals if known == -status), f'signal {-status}')}"
    return f"with status {status}"


def _reason(status: int) -> str:
    if status < 0:
        hint = " (out of host memory?)" if status == -signal.SIGKILL else ""
        return f"the process was ended {_how(status)}{hint}"
    return f"the process ended {_how(status)} and no result"


def draw(run: Path, *options: str) -> list[str]:
    """Draw a run's tables and plots in a process of their own, since that takes 170 MB: the lines that "
    "harness.report.tables prints.

    Its warnings go to standard error. Raises CrashError where something could not be drawn or written.
    """
    done = subprocess.run(
        [sys.executable, "-m", "harness.report.tables", str(run.absolute()), *options],
        cwd=PROJECT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        start_new_session=True,  # Ctrl-C reaches the parent alone, which then ends it
        preexec_fn=functools.partial(end_with, os.getpid()),
    )
    last = (done.stderr.splitlines() or [""])[-1]
    if done.returncode:
        raise CrashError(last.removeprefix("error: ") or f"the tables could not be drawn: {_reason(done.returncode)}")
    print(done.stderr, end="", file=sys.stderr)
    return done.stdout.splitlines()
