"""One child process per row: started in a session of its own, watched, and ended whole.

The parent never imports a framework. It hands a job (JSON) to `python SCRIPT --child JOB`, the child writes one JSON
result, whole or not at all. Whatever else happens (an exception, a signal, the time limit) becomes a one-line reason.
"""

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from harness.errors import UserError

PR_SET_PDEATHSIG = 1  # prctl(2): the signal a process gets when its parent dies
CHILD_FLAG = "--child"


class Outcome(NamedTuple):
    """What became of one child: its result, or the one-line reason why there is none, and how long it took."""

    result: dict | None
    reason: str
    seconds: float


def run_child(script: Path, job: dict, *, limit_s: float, log: Path, env: dict[str, str] | None = None) -> Outcome:
    """Run `job` in a child process of its own and wait for it.

    Args:
        script: the benchmark script; it is started as `python script --child JOBFILE`.
        job: JSON-able; the child finds it under JOBFILE, with "result" naming the file that it has to write.
        limit_s: after this many seconds the child and everything it started are killed.
        log: standard output and standard error are appended here.
        env: environment variables on top of this process's own.

    Raises:
        UserError: where the log or the job cannot be written.
        KeyboardInterrupt: after the child and everything it started have been killed.
    """
    started = time.monotonic()
    with contextlib.ExitStack() as stack:
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            output = stack.enter_context(log.open("ab"))
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="lstm-row-"))
            result_path, job_path = Path(folder, "result.json"), Path(folder, "job.json")
            job_path.write_text(json.dumps({**job, "result": str(result_path)}))
            child = subprocess.Popen(
                [sys.executable, str(script), CHILD_FLAG, str(job_path)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {})},
                start_new_session=True,  # Ctrl-C reaches the parent alone, which then ends the whole group
            )
        except OSError as error:
            where, what = error.filename or log.parent, error.strerror or error
            raise UserError(
                f"{where}: a process cannot be started ({what}); free some space there or in TMPDIR"
            ) from error
        try:
            status = child.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            return Outcome(None, f"stopped after its time limit of {limit_s:g} s (ROW_LIMIT_S)", limit_s)
        finally:
            _end_group(child)
        seconds = time.monotonic() - started
        if result_path.exists():
            return Outcome(json.loads(result_path.read_text()), "", seconds)
        return Outcome(None, _reason(status, log), seconds)


def read_job(path: str) -> dict:
    """In the child: read the job, and ask the kernel to end this process when its parent dies."""
    with contextlib.suppress(OSError, AttributeError):  # not Linux: the parent's own clean-up has to do
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    return json.loads(Path(path).read_text())


def write_result(job: dict, result: dict) -> None:
    """In the child: hand the result over, whole or not at all."""
    path = Path(job["result"])
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(result, allow_nan=False))
    temporary.replace(path)


def _end_group(child: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError):  # nobody left in it
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _reason(status: int, log: Path) -> str:
    if status < 0:
        name = next((known.name for known in signal.Signals if known == -status), f"signal {-status}")
        hint = " (out of host memory?)" if name == "SIGKILL" else ""
        return f"the process was ended by {name}{hint}; see {log.parent.name}/{log.name}"
    return f"the process ended with status {status} and no result; see {log.parent.name}/{log.name}"
