"""Child processes, one per row: each in a session of its own, watched, and ended with all that it started.

The parent never imports a framework. It hands a job (JSON) to `python SCRIPT --child JOB`, the child writes one JSON
result, whole or not at all. Whatever else happens (an exception, a signal, the time limit) becomes a one-line reason.
"""

import collections
import contextlib
import ctypes
import faulthandler
import functools
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, NamedTuple

from harness.errors import CrashError
from harness.frameworks.profiles import SCRATCH
from harness.record.machine import RUN

# prctl(2): the signal that a process gets when its parent dies; and to be given the orphans of one's descendants
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
CHILD_FLAG = "--child"
PROJECT = Path(__file__).resolve().parents[2]
WATCH_S = 0.5  # how often a process's progress is looked at
ENDS_S = 0.1  # how often, where several run side by side, whether one of them has ended
AT_THE_DEVICE = 3  # of those side by side: a GPU gives each a slice of time in turn, which makes many slow
LONG_S = 20.0  # of a turn, such as a whole training's: whoever had it need not wait for the others' turns
WAITS_S = 120.0  # of a GPU's long turns that have not ended, for one on another GPU: no turn begins before they have
KILL_LIMIT_S = 30.0  # a killed process that is still there then hangs in the kernel, such as in a GPU's driver


class Outcome(NamedTuple):
    """What became of one child: its result, or the one-line reason why there is none, how long it worked, and its log.

    `note`: that it crashed after its result, or "". `seconds`: without those in which it waited for its turn or the reference.
    """

    result: dict | None
    reason: str
    seconds: float
    log: str = ""  # as a reader of the run's folder finds it, such as logs/ptb.small.keras.cpu.fp32.log
    note: str = ""

    def found_no_memory(self) -> bool:
        """Whether it failed for want of memory, of the device or of the host."""
        reasons = [self.reason, *(part.get("reason", "") for part in (self.result or {}).values())]
        return any("out of memory" in reason or "out of host memory" in reason for reason in reasons)


class Work(NamedTuple):
    """One child process to be: `child`, the arguments of Child; `ended`, who is told what became of it; `prepared` and `timed`,
    who are told that it waits for its turn to time, and that it has had it."""

    child: Mapping[str, Any]
    ended: Callable[[Outcome], None]
    prepared: Callable[[], None] = lambda: None
    timed: Callable[[], None] = lambda: None


# What a child is at. It works on the processors; it asks for the device and uses it beside few others; it asks to time, and times
# with everything else of the run at rest.
WORKS, ASKS_DEVICE, USES, ASKS_TURN, TIMES, TIMED = "works", "asks to use", "uses", "asks to time", "times", "has timed"
ASKS_ALONE, ALONE = "asks to use alone", "uses alone"  # the device, while others work on the processors
WAITS = "waits for another's work"
SAID = {
    ord("u"): ASKS_DEVICE,
    ord("a"): ASKS_ALONE,
    ord("r"): WAITS,
    ord("w"): WORKS,
    ord("t"): ASKS_TURN,
    ord("e"): TIMED,
}
GRANTED = {ASKS_DEVICE: USES, ASKS_ALONE: ALONE, ASKS_TURN: TIMES, TIMED: WORKS}
AT_WORK = (WORKS, USES, ALONE, TIMES)


_running: list[int] = []  # numbers of the children that have not been ended yet


class Child:
    """A child process with its job, in a session of its own; in a `with` statement, which ends it and all that it started.

    Args:
        script: the benchmark script; it is started as `python script --child JOBFILE`.
        job: JSON-able; the child finds it under JOBFILE, with "result" naming the file that it has to write.
        limit_s: after this many seconds of work the child and everything it started are killed.
        log: standard output and standard error are appended here.
        env: environment variables on top of this process's own.
        python: that runs the script.
        watch: told everything that the child has handed over by `write_progress` so far, whenever there is more of it; limit_s
            then counts from the last time anew. All of it is told before the child's outcome.
        turns: whether it asks before it uses the device or times (`Turns`), and `state` says what it is at; else it works all the
            time.
        gpu: UUID of the GPU that it is given; None: those that this process has.

    Raises:
        CrashError: where the log or the job cannot be written.
    """

    def __init__(
        self,
        script: Path,
        job: dict,
        *,
        limit_s: float,
        log: Path,
        env: dict[str, str] | None = None,
        python: str = sys.executable,
        watch: Callable[[Sequence[dict]], None] | None = None,
        turns: bool = False,
        gpu: str | None = None,
    ) -> None:
        self.state, self.outcome, self.gpu = WORKS, None, gpu
        self._turn_s = 0.0  # seconds that its last turn to time took
        self._limit_s, self._watch, self._told = limit_s, watch, b""
        self._worked_s, self._since = 0.0, time.monotonic()  # in states that are over; when this state began
        self._limit_from_s = 0.0  # of work, when the child last made progress
        self._shown = f"{log.parent.name}/{log.name}"
        self._hears = self._grants = None
        _prctl(PR_SET_CHILD_SUBREAPER, 1)
        self._others = set(_descendants())
        with contextlib.ExitStack() as stack:
            try:
                log.parent.mkdir(parents=True, exist_ok=True)
                output = stack.enter_context(log.open("ab"))
                # In the run's folder, not in the temporary one: what a killed parent leaves there, the next run removes.
                run = log.absolute().parent.parent
                folder = stack.enter_context(tempfile.TemporaryDirectory(prefix=".row-", suffix=".tmp", dir=run))
                paths = {name: Path(folder, name) for name in ("result", "job", "progress")}
                self._folder, self._result, self._progress = folder, paths["result"], paths["progress"]
                own, theirs = self._pipes(stack) if turns else ({}, ())
                more = {"result": str(self._result), **({"progress": str(self._progress)} if watch else {}), **own}
                more |= {"parent": os.getpid(), "started": time.monotonic()}
                try:
                    paths["job"].write_text(json.dumps({**job, **more}))
                    self._process = subprocess.Popen(
                        [python, str(script), CHILD_FLAG, str(paths["job"])],
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        env={
                            **os.environ,
                            SCRATCH: folder,
                            RUN: str(os.getpid()),
                            **(env or {}),
                            **({"CUDA_VISIBLE_DEVICES": gpu} if gpu else {}),
                        },
                        start_new_session=True,  # Ctrl-C reaches the parent alone, which then ends the whole group
                        pass_fds=theirs,
                    )
                finally:
                    for descriptor in theirs:
                        os.close(descriptor)
                output.close()
                _running.append(self._process.pid)
                self._kept = stack.pop_all()  # the folder, and this end of the pipes
            except OSError as error:
                where, what = error.filename or log.parent, error.strerror or error
                raise CrashError(f"{where}: a process cannot be started ({what}); free some space there") from error

    def _pipes(self, stack: contextlib.ExitStack) -> tuple[dict, tuple[int, int]]:
        """(what the job says of them, the child's ends): one in which the child asks, one in which it is granted its turn."""
        self._hears, asks = os.pipe()
        waits, self._grants = os.pipe()
        os.set_blocking(self._hears, False)
        for descriptor in (self._hears, self._grants):
            stack.callback(os.close, descriptor)
        return {"turns": [asks, waits]}, (asks, waits)

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *_: object) -> None:
        try:
            _end(self._process, self._folder, self._others)
        finally:
            if self._process.pid in _running:
                _running.remove(self._process.pid)
            self._kept.close()

    def _at(self, state: str) -> None:
        now = time.monotonic()
        if self.state in AT_WORK:
            self._worked_s += now - self._since
        if self.state == TIMES:
            self._turn_s = now - self._since
        self.state, self._since = state, now

    def long_turn_s(self) -> float:
        """Seconds of its last turn where that was a long one, after which it ends soon; else 0, also of one that hands over point
        after point, which asks for many."""
        return self._turn_s if self._turn_s >= LONG_S and not self._watch else 0.0

    def look(self) -> None:
        """Take in what the child has said and done since the last time; `outcome` is there once it has ended."""
        if self._hears is not None:
            with contextlib.suppress(BlockingIOError):
                said = os.read(self._hears, 64)
                for what in said:
                    self._at(SAID[what])
                if not said:  # it has closed its end, most likely by ending
                    self._hears = None
        status = self._process.poll()
        if self._watch and self._progress.exists() and (content := self._progress.read_bytes()) != self._told:
            self._told, self._limit_from_s = content, self._work_s()
            self._watch(json.loads(content))
        if status is not None:
            self.outcome = self._ended(status)
        elif self._work_s() - self._limit_from_s >= self._limit_s:
            reason = f"stopped after its time limit of {self._limit_s:g} s (ROW_LIMIT_S)"
            self.outcome = Outcome(None, reason, self._work_s(), self._shown)

    def processor_s(self) -> float:
        """Processor seconds that the child has taken; 0 where it has ended."""
        import psutil

        with contextlib.suppress(psutil.Error):
            times = psutil.Process(self._process.pid).cpu_times()
            return times.user + times.system
        return 0.0

    def _work_s(self) -> float:
        return self._worked_s + (time.monotonic() - self._since if self.state in AT_WORK else 0.0)

    def _ended(self, status: int) -> Outcome:
        if self._result.exists():
            note = f"the process ended {_how(status)} after its result" if status else ""
            return Outcome(json.loads(self._result.read_text()), "", self._work_s(), self._shown, note)
        return Outcome(None, _reason(status), self._work_s(), self._shown)

    def goes_on(self) -> None:
        """Grant it what it asks for, or let it work on when it has timed."""
        self._at(GRANTED[self.state])
        with contextlib.suppress(BrokenPipeError):  # it has just ended
            os.write(self._grants, b"g")


def run_child(script: Path, job: dict, **arguments: Any) -> Outcome:
    """Run one child process to its end; arguments of `Child`.

    Raises KeyboardInterrupt after the child and everything it started have been killed.
    """
    outcomes: list[Outcome] = []
    works = [Work({"script": script, "job": job, **arguments}, outcomes.append)]
    run_together(lambda: works.pop() if works else None)
    return outcomes[0]


def run_together(next_work: Callable[[], Work | None], at_once: int = 1) -> None:
    """Run child processes, at most `at_once` of them side by side, and one at a time while any of them times.

    Those side by side start, load and trace on processors of their own, one at a time compiles at the device and AT_THE_DEVICE of
    them at a time prove there, until each has asked to time or has ended. Then they time, one after the other, while all others
    wait: nothing of this run works beside what is timed, except on another GPU one that times too. Those that have timed go on
    when all have, or after a long turn, once no GPU is timed on. So that this comes, no turn begins while the long turns of one
    GPU that wait took WAITS_S or more together, though other GPUs may be idle then: an interruption loses what has timed and not
    yet ended. Others start when all have timed.

    Args:
        next_work: what to start next; None: nothing now. It is asked again as long as there is room.
    """
    running: list[tuple[Child, Work]] = []
    timing = False
    with contextlib.ExitStack() as last:
        last.callback(_end_all, running)
        while True:
            states = {child.state for child, _ in running}
            timing = TIMES in states or (timing and ASKS_TURN in states)
            while not (timing or _at_rest(states)) and len(running) < at_once and (work := next_work()):
                running.append((Child(**work.child, turns=at_once > 1), work))
            if not running:
                return
            children = [child for child, _ in running]
            for child in _granted(children):
                child.goes_on()
            _wait(children)
            for child, work in [*running]:
                before = child.state
                child.look()
                if child.state == ASKS_TURN != before:
                    work.prepared()
                if child.state == TIMED != before:
                    work.timed()
                if child.outcome:
                    child.__exit__()
                    running.remove((child, work))
                    work.ended(child.outcome)


def _end_all(running: Sequence[tuple[Child, Work]]) -> None:
    with contextlib.ExitStack() as each:  # which goes on after an exception, such as of a second Ctrl-C
        for child, _ in running:
            each.push(child.__exit__)


def _at_rest(states: Set[str]) -> bool:
    """Whether all that are left ask to time: no other may start beside them."""
    return ASKS_TURN in states and states <= {ASKS_TURN, TIMED}


def _granted(children: Sequence[Child]) -> Sequence[Child]:
    """Those that may go on now. GPUs are shared one by one; where there are several, one process on each of them times."""
    states = {child.state for child in children}
    timed = [child for child in children if child.state == TIMED]
    waiting_s = collections.Counter()
    for child in timed:
        waiting_s[child.gpu] += child.long_turn_s()
    if any(waiting_s.values()) and TIMES not in states:
        return timed
    if any(seconds >= WAITS_S for seconds in waiting_s.values()):
        return []
    if states <= {ASKS_TURN, TIMES, TIMED} and states != {TIMED}:
        timing = {child.gpu for child in children if child.state == TIMES}
        asking = {child.gpu: child for child in reversed(children) if child.state == ASKS_TURN}
        return [child for gpu, child in asking.items() if gpu not in timing]
    granted = [] if ASKS_TURN in states else timed
    for gpu in dict.fromkeys(child.gpu for child in children):
        at = {state: [c for c in children if (c.gpu, c.state) == (gpu, state)] for state in (*GRANTED, *AT_WORK)}
        if at[ALONE] or (at[ASKS_ALONE] and at[USES]):
            continue
        granted += at[ASKS_ALONE][:1] or at[ASKS_DEVICE][: max(0, AT_THE_DEVICE - len(at[USES]))]
    return granted


def _wait(children: Sequence[Child]) -> None:
    """Until one of them has said something or, at the latest, WATCH_S later; an only child's end is noticed at once."""
    hears = [child._hears for child in children if child._hears is not None]
    if hears:
        select.select(hears, [], [], ENDS_S)
    else:
        with contextlib.suppress(subprocess.TimeoutExpired):
            children[0]._process.wait(timeout=WATCH_S if len(children) == 1 else ENDS_S)


class Turns:
    """In the child: contexts for what uses the device, and for what is timed there, which wait until the parent lets them.

    Whoever has no one beside it (no "turns" in its job) need not ask.

    Attributes:
        waited_s: seconds in which this process has waited.
    """

    waited_s = 0.0

    def __init__(self, job: Mapping[str, Any]) -> None:
        self._asks, self._waits = job.get("turns") or (None, None)

    def _say(self, what: bytes, wait: bool = True) -> None:
        if self._asks is not None:
            began = time.monotonic()
            os.write(self._asks, what)
            if wait:
                os.read(self._waits, 1)
            Turns.waited_s += time.monotonic() - began

    @contextlib.contextmanager
    def device(self, alone: bool = False) -> Iterator[None]:
        """To use the device, beside a few others of the run or alone, as what tunes itself by its own times has to."""
        self._say(b"a" if alone else b"u")
        try:
            yield
        finally:
            self._say(b"w", wait=False)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """For what another process of the run computes: it counts neither for the row's time nor for the limit."""
        began = time.monotonic()
        self._say(b"r", wait=False)
        try:
            yield
        finally:
            self._say(b"w", wait=False)
            Turns.waited_s += time.monotonic() - began

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """To time, with everything else of the run at rest."""
        self._say(b"t")
        try:
            yield
        finally:
            self._say(b"e")


def read_job(path: str) -> dict:
    """In the child: read the job, end with the parent, and say in the log where a signal such as SIGSEGV met it."""
    faulthandler.enable()
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


def _of_others(child: subprocess.Popen) -> set:
    """psutil.Process of all other children, dead ones too, and of what they have started."""
    import psutil

    found = set()
    for number in (number for number in _running if number != child.pid):
        with contextlib.suppress(psutil.Error):  # it has ended, and has been asked how
            process = psutil.Process(number)
            found |= {process, *process.children(recursive=True)}
    return found


def _is_orphan_of_another(process: Any, folder: str) -> bool:
    """Whether a process was started by another child than the one with this folder, by its environment."""
    import psutil

    with contextlib.suppress(psutil.Error):  # it has ended, or is not to be looked into
        return process.environ().get(SCRATCH, folder) != folder
    return False


def _family(child: subprocess.Popen, folder: str, others: set) -> list:
    kept = others | _of_others(child)
    return [p for p in _descendants() if p not in kept and not _is_orphan_of_another(p, folder)]


def _end(child: subprocess.Popen, folder: str, others: set) -> None:
    """Kill the child and what it started, in whatever session: orphans among it have become this process's children.

    `others`: psutil.Process of the descendants of this process from before the child. What KILL_LIMIT_S does not end is left
    and named on standard error.
    """
    import psutil

    deadline = time.monotonic() + KILL_LIMIT_S
    with contextlib.suppress(ProcessLookupError):  # nobody left in it
        os.killpg(child.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(timeout=KILL_LIMIT_S)
    while family := _family(child, folder, others):
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
    """Draw a run's tables and plots in a process of their own, since that takes 170 MB: the lines that
    harness.report.tables prints.

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
