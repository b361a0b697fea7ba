"""Runs the benchmarks of the suite, one after the other, and draws the tables: what run_all.sh starts.

    python -m harness.run.suite                                   # full with an NVIDIA GPU, quick without
    python -m harness.run.suite --only=mnist,ptb --rows=keras,keras_cudnn --out=results/mine
    python -m harness.run.suite --units=128 --timed-batches=50    # constants of the scripts' headers

Each script of benchmarks/ is a child process. Exit status: 0 everything ran (rows may be skipped), 1 a row failed, a
script crashed or a file could not be written, 2 wrong input, 130 Ctrl-C. Only the standard library is imported until the
first benchmark starts.
"""

import contextlib
import functools
import importlib.util
import os
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from harness.data.location import locate
from harness.errors import CrashError, UserError
from harness.record import machine, records, settings
from harness.run import bf16, driver, environments, estimate, folders, jobs, options, processes, progress, references
from harness.run import check as preflight
from harness.run.jobs import OWN_FLAGS, PRESETS, SCRIPT_FLAGS, Job, list_rows, parse, plan, read_headers, row_names
from harness.run.options import Header, Options
from harness.run.parent import require_gpus
from harness.run.resume import refuse_other_device, require_run

PROJECT = Path(__file__).resolve().parents[2]
BENCHMARKS = PROJECT / "benchmarks"

USAGE = [
    ("--quick", "real numbers in minutes; the default without an NVIDIA GPU and for --device=cpu"),
    ("--full", "the published protocol; the default with an NVIDIA GPU"),
    ("--only=mnist,ptb", "these benchmarks; see --list"),
    ("--rows=keras,keras_cudnn", "these rows, in the benchmarks that have them; see --list"),
    ("--device=gpu|cpu", "where to run; gpu by default where there is an NVIDIA GPU"),
    ("--precision=NAME", "fp32, tf32, fp16 or bf16: of matrix products and LSTMs"),
    ("--data=DIR", "folder of the data sets, or embedded; also LSTM_BENCH_DATA; else data/, a cache, a download"),
    ("--out=DIR", "folder of the run; by default results/<machine>-<date>"),
    ("--repeat-until=1%", "add processes to a row until its 95 % interval is that narrow, or its time is up"),
    (
        "--at-once=4",
        "processes that prepare side by side; each is timed alone. By default 1 on a CPU, on a GPU as memory allows",
    ),
    ("--gpus=2", "spread the rows over so many GPUs of this host"),
    (
        "--resume",
        "continue the run in --out, or this machine's latest, with the options that it was begun with; others replace them",
    ),
    ("--list", "print the benchmarks and their rows"),
    ("--help", "print this text"),
]
NEEDED = ["tensorflow", "keras", "numpy", "pandas", "tabulate", "tqdm", "matplotlib", "pynvml", "psutil", "cpuinfo"]
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
TICK_S = 1.0  # between two looks at the clock
GRACE_S = 20.0  # how long a benchmark may take to end its row and write its tables after Ctrl-C


class Interrupted(BaseException):
    """SIGINT, SIGTERM or SIGHUP came; as BaseException, like KeyboardInterrupt, so that nothing swallows it."""

    def __init__(self, number: int):
        super().__init__(number)
        self.status = 128 + number


def has_gpu() -> bool:
    """Whether an NVIDIA GPU answers and is not hidden by CUDA_VISIBLE_DEVICES."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip() in machine.HIDDEN:
        return False
    if machine.gpu_count():
        return True
    if importlib.util.find_spec("pynvml") or not shutil.which("nvidia-smi"):
        return False
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        answer = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30)
        return answer.returncode == 0 and "GPU" in answer.stdout
    return False


def default_out(device: str, resume: bool, results: Path = PROJECT / "results", others: Sequence[str] = ()) -> Path:
    """results/<machine>-<date>, with -2, -3 … for a further run of the day.

    For --resume this machine's latest run that the suite has begun, on one of the `others` too, or else the latest with records.
    """
    earlier = folders.of_machine([device, *others], results) if resume else []
    begun = [path for path in earlier if _begun_with(path) is not None]
    begun = begun or [path for path in earlier if records.has_records(path)]
    return begun[-1] if begun else folders.new(device, results)


def run_job(command: Sequence[str], lent: Mapping[str, Any], bar: progress.Whole) -> int:
    """Run one benchmark to its end and return its exit status; `lent`: of records.Run.

    What it prints goes through `bar`, which draws itself below it; to `bar` it reports its progress. It has a session of its
    own, so that Ctrl-C in the terminal reaches this process alone, which hands it on once. It dies with this process, when that
    is killed. Raises Interrupted when no process of it is left.
    """
    child, family, threads = None, [], []
    die_too = functools.partial(processes.end_with, os.getpid())
    reports, end_of_child = os.pipe()
    environment = {**lent["env"], progress.REPORTS: str(end_of_child), "PYTHONUNBUFFERED": "1"}
    try:
        with _held_back():
            try:
                child = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    start_new_session=True,
                    preexec_fn=die_too,
                    pass_fds=(*lent["pass_fds"], end_of_child),
                    env=environment,
                )
            finally:
                os.close(end_of_child)
            heard = [
                (child.stdout, lambda line: bar.write(line, sys.stdout)),
                (child.stderr, lambda line: bar.write(line, sys.stderr)),
                (os.fdopen(reports, "rb"), bar.hears),
            ]
            threads = [threading.Thread(target=_hear, args=pipe, daemon=True) for pipe in heard]
            for thread in threads:
                thread.start()
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return child.wait(timeout=TICK_S)
            bar.tick()
    except Interrupted:
        if child:
            family = _descendants(child.pid)  # while they can be found: a row has a session of its own
            child.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired, Interrupted):  # a second Ctrl-C ends it at once
                child.wait(timeout=GRACE_S)
        raise
    finally:
        if child:
            with _held_back():
                _end(child, family)
                for thread in threads:
                    thread.join(GRACE_S)


def _hear(pipe: IO[bytes], what: Callable[[str], None]) -> None:
    """Hand each line of a child's pipe on, until nobody holds its other end any longer."""
    with pipe:
        for line in pipe:
            what(line.decode("utf-8", "replace").rstrip("\n"))


@contextlib.contextmanager
def _held_back() -> Iterator[None]:
    """Raise a signal that comes inside only at the end: a child must not be started and yet unknown."""
    came: list[int] = []
    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number, handler in before.items():
        if handler == _raise_interrupted:
            signal.signal(number, lambda number, _: came.append(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if came:
        raise Interrupted(came[0])


def _descendants(pid: int) -> list:
    import psutil

    with contextlib.suppress(psutil.Error):  # it has ended
        return psutil.Process(pid).children(recursive=True)
    return []


def _end(child: subprocess.Popen, family: list) -> None:
    """Kill what is left of the child: itself, its group, and its descendants."""
    if child.poll() is None:
        family += _descendants(child.pid)
    for process in family:
        if process.is_running():  # the same process still, not a later one of that number
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def say(text: str) -> None:
    print(text, flush=True)


def run(found: Options, chosen: Sequence[str], headers: Mapping[str, Header], folder: Path) -> int:
    """Run the jobs and draw the tables; the exit status. Raises UserError and Interrupted."""
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        what_to_do = "leave --no-install out, or install requirements-cpu.txt or requirements-cuda.txt"
        raise UserError(f"{sys.executable}: the module {missing[0]} is not installed; {what_to_do}")
    resume, now = "resume" in found.flags, jobs.noted(found)
    out = _out(found)
    if resume and (begun := _as_begun(found, headers, out)):
        own = " and as said now" if now else ""
        found, chosen = begun
        say(f"--resume: as begun{own}, with {shlex.join(jobs.noted(found))}")
    gpu = _asked_for_gpu(found)
    device = found.device or ("gpu" if gpu else "cpu")
    if device == "cpu" and found.values.get("PRECISION") == "tf32":
        raise UserError(options.NO_TF32)
    preset = found.preset or ("full" if gpu else "quick")
    refuse_other_device(out, device)
    planned = plan(found, chosen, headers, preset, _rows(found, chosen, headers, folder))
    locate(found.data)
    environments.require()
    peers = "peers" in found.flags
    if (found.gpus or 1) > 1:
        require_gpus(f"--gpus={found.gpus}", found.gpus, device)
    if "check" in found.flags:
        if not gpu and not found.device:
            say("no NVIDIA GPU: the benchmarks run on the CPU")
        preflight.check(device, preflight.frameworks_here(peers), say)
        return 0
    if device == "gpu":
        preflight.once(device, preflight.frameworks_here(), say)
    common = [f"--out={out}", f"--{preset}", f"--device={device}"]
    if resume:
        common.append("--resume")
    if found.repeat_until:
        common.append(f"--repeat-until={100 * found.repeat_until:g}%")
    if found.at_once:
        common.append(f"--at-once={found.at_once}")
    if found.gpus:
        common.append(f"--gpus={found.gpus}")
    if found.data:
        common.append(f"--data={jobs.data_of(found)}")
    plans = jobs.plans(folder, planned, common)  # before anything is written: what a script would refuse
    both = list(zip(planned, plans, strict=True))
    without = [job for job, ran in both if ran["left_out"]]
    if without and len(without) == len(both):
        raise UserError(plans[0]["left_out"])
    asked_for = _asked_for(found, headers, out if resume else None)
    alone = {job: ran["alone"] for job, ran in both if ran["alone"] and job.name not in asked_for}
    if len(without) + len(alone) == len(both):  # nothing else is left
        alone = {}
    kept = [(job, ran) for job, ran in both if job not in without and job not in alone]
    planned, parts = [job for job, _ in kept], _parts(kept, preset, device)
    if warning := bf16.settle():
        say(warning)
    # With what this machine has decided: it may decide otherwise when the run is resumed.
    about = {"options": list(dict.fromkeys([f"--{preset}", f"--device={device}", *jobs.noted(found)]))}
    with records.open_run(out, about) as held:  # to the end: a second run must not come between two scripts
        slowness = estimate.slowness()
        factor = estimate.factor(device, slowness)
        if not resume or (begun_with := _begun_with(out)) is None:
            held.note({**about, "slowness": round(slowness, 2)})
        elif more := [option for option in now if _says_how_many(option)]:
            held.note({"options": jobs.last_of_each([*begun_with, *more])})
        say(f"{preset} on {device}, into {_shown(out)}: {_how_long(parts, factor, found, preset, device, kept)}")
        for job, ran in both:
            if ran["left_out"]:
                say(f"left out: {job}: {ran['left_out']}")
        for job, row in alone.items():
            say(
                f"left out: {job}: {row} is all that can run here, and is compared with nothing; --only={job.name} runs it"
            )
        if left_out := [name for name in chosen if name not in {job.name for job, _ in both}]:
            say(f"left out, having none of --rows: {', '.join(left_out)}")
        config = found.values.get("CONFIG", "")
        own = dict.fromkeys(job.name for job in planned if config not in ("", *headers[job.name].configs))
        if own:
            say(f"in their own configs, having no {config}: {', '.join(own)}")
        try:
            with progress.Whole(parts, factor) as bar:
                status, failed = run_jobs(planned, common, folder, held.lent(), bar)
        except Interrupted:
            again = f"the same command with --resume {shlex.quote(f'--out={_shown(out)}')} goes on"
            kept = "the finished rows are in" if any((out / "rows").glob("*.json")) else "no row has finished in"
            say(f"interrupted; {kept} {_shown(out)}; {again}")
            raise
        if status == 2:
            held.discard()
        elif status == 0:
            references.discard(out)
    if status != 2:
        try:
            report(out, {job.name for job in planned})
        except CrashError as error:
            failed.append(f"error: {error}")
            status = 1
    for line in failed:
        say(line)
    return status


def _asked_for(found: Options, headers: Mapping[str, Header], resumed: Path | None) -> set[str]:
    """The scripts that the user wants even with a single row.

    By --only or --rows all that are chosen; one whose header names rows, one that has a constant of the command line alone, and
    one of which the resumed run has records.
    """
    if any(option.startswith(("--only", "--rows")) for option in found.written):
        return {*headers}
    wanted = set()
    for name, header in headers.items():
        others = [other.constants for other in headers.values() if other is not header]
        rows = header.constants.get("ROWS")
        wanted |= {name} if rows and rows.default not in ("all", None) else set()
        wanted |= {name for constant in found.values if not any(constant in constants for constants in others)}
        wanted |= {name} if resumed and any((resumed / "rows").glob(f"{name}.*.json")) else set()
    return wanted


def _begun_with(out: Path) -> object | None:
    """What the run.json of a run notes of its options; None where it notes none, or there is none."""
    return records.check_run(out).get("options") if (out / "run.json").is_file() else None


def _says_how_many(option: str) -> bool:
    """Whether an option such as --processes=3 says how many processes a row gets: said once, it is the run's."""
    name = option.partition("=")[0][2:].upper().replace("-", "_")
    return name in (*settings.HOW_MANY, "REPEAT_UNTIL")


def _as_begun(found: Options, headers: Mapping[str, Header], out: Path) -> tuple[Options, list[str]] | None:
    """As jobs.parse, of what the run in `out` was begun with and of what is written now; None where nothing is noted."""
    begun_with = _begun_with(out)
    if begun_with is None:
        return None
    try:
        if not isinstance(begun_with, list) or not all(isinstance(option, str) for option in begun_with):
            raise UserError(f"options: {begun_with!r:.60}: expected a list such as ['--only=ptb']")
        presets = [f"--{name}" for name in PRESETS if found.preset]
        begun, chosen = parse(
            [option for option in (*begun_with, *jobs.noted(found)) if option not in presets], headers
        )
    except UserError as error:
        raise UserError(
            f"{out / 'run.json'}: {error}; leave --resume out, or choose another folder with --out"
        ) from None
    begun.flags |= found.flags
    begun.out = found.out
    return begun, chosen


def _parts(planned: Sequence[tuple[jobs.Job, Mapping[str, Any]]], preset: str, device: str) -> list[progress.Part]:
    """What each job is expected to take; planned: with what it would run."""
    expected, parts = estimate.Estimate(preset, device), []
    for job, ran in planned:
        script = ran["script"]
        parts.append(progress.Part(str(job), expected.preparation_s(script), *expected.rows_of(script, ran)))
    return parts


def _how_long(parts: Sequence[progress.Part], factor: float, found: Options, preset: str, device: str,
              planned: Sequence[tuple[jobs.Job, Mapping[str, Any]]]) -> str:  # fmt: skip
    """Such as "26 processes in 7 runs, about 8 min"."""
    expected = estimate.Estimate(preset, device)
    processes_in_all = sum(part.processes for part in parts)
    text = f"{processes_in_all} process{'es' * (processes_in_all != 1)} in {len(parts)} run{'s' * (len(parts) != 1)}"
    if not expected.known:
        return f"{text}; for how long, the progress says after the first of them"
    seconds = factor * sum(part.preparation_s + part.rows_s for part in parts)
    known = {"ROWS", "PRECISION", "SEED", "PROCESSES"}
    if not any(expected.takes_another(ran["script"]) for _, ran in planned):
        known.add("CONFIG")
    own = [name for name in found.values if name not in known]
    than = f", reckoned without your --{own[0].lower().replace('_', '-')}" if own else ""
    return f"{text}, {'at most ' * ('resume' in found.flags)}about {estimate.minutes(seconds)}{than}"


def _out(found: Options) -> Path:
    """The run's folder. UserError where --resume is to go on with a run that is not there."""
    resumed, device = "resume" in found.flags, found.device or ("gpu" if has_gpu() else "cpu")
    others = ["cpu"] if device == "gpu" and not found.device else []
    out = Path(os.path.expanduser(found.out)).absolute() if found.out else default_out(device, resumed, others=others)
    if resumed:
        none = f"{out}: no run there" if found.out else f"no run of this machine on {device} in {_shown(out.parent)}"
        require_run(out, none)
    return out


def _asked_for_gpu(found: Options) -> bool:
    """Whether to run on a GPU; UserError where the user asked for one and there is none."""
    gpu = found.device != "cpu" and has_gpu()
    if found.device != "cpu" and not gpu:
        driver.require_driver()
    if found.device == "gpu" and not gpu:
        raise UserError(machine.NO_GPU)
    if gpu:
        driver.builds(driver.gpus())
    return gpu


def _rows(
    found: Options, chosen: Sequence[str], headers: Mapping[str, Header], folder: Path
) -> dict[str, list[str]] | None:
    """The rows of each script where the user named some, every one of which has to be known; None otherwise."""
    if "ROWS" not in found.values:
        return None
    asked = str(found.values["ROWS"])
    rows = {name: row_names(text) for name, text in list_rows(folder, chosen).items()}
    known = dict.fromkeys(row for names in rows.values() for row in names)
    try:
        options.rows(asked, known)
    except UserError as error:
        unknown = {row.strip() for row in asked.split(",")} - {*known, ""}
        others = list_rows(folder, [name for name in headers if name not in chosen])
        if having := [name for name, text in others.items() if unknown and min(unknown) in row_names(text)]:
            raise UserError(f"{error}; --only={','.join(having)} has {min(unknown)}") from None
        raise
    return rows


def run_jobs(
    jobs: Sequence[Job], common: Sequence[str], folder: Path, lent: Mapping[str, Any], bar: progress.Whole
) -> tuple[int, list[str]]:
    """(exit status, one line per job that failed): a failed one does not stop the others, wrong input does."""
    failed = []
    for number, job in enumerate(jobs, 1):
        place = f"[{number}/{len(jobs)}] {job}"
        bar.write(place, sys.stdout)
        bar.begins(number - 1)
        status = run_job([sys.executable, str(folder / f"{job.name}.py"), *job.arguments, *common], lent, bar)
        if status == 2:  # the script has said what was wrong: the other scripts would say it again
            return 2, failed
        if status in (130, -signal.SIGINT):
            raise Interrupted(signal.SIGINT)
        if status:
            how = f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
            failed.append(f"{place}: ended {how}; see above")
            bar.write(failed[-1], sys.stdout)
    bar.begins(len(jobs))
    return (1 if failed else 0), failed


def _shown(path: Path) -> str:
    """The path as the user would type it: relative where it lies below the current folder."""
    with contextlib.suppress(ValueError):
        return str(path.relative_to(Path.cwd()))
    return str(path)


def report(out: Path, ran: set[str]) -> None:
    """Draw the run's pages; print the headline tables, what ran on embedded data, and where the pages are."""
    from harness.report import provenance

    *headline, pages = "\n".join(processes.draw(out, "--headline")).split("\n\n")
    say("\n" + "\n\n".join(headline) + "\n")
    embedded = {record["benchmark"]: record for record in records.read_run(out)[0] if provenance.is_embedded(record)}
    for name in sorted(ran & embedded.keys()):
        say(f"{name} ran on embedded data, not on the real set: {provenance.data_of(embedded[name])}")
    say("tables:\n" + "\n".join(f"  {_shown(Path(page))}" for page in pages.splitlines()))


def help_text(headers: Mapping[str, Header]) -> str:
    """The options of the suite, then the constants of the scripts' headers with the scripts that have them."""
    flags = {name: text for flags in (OWN_FLAGS, *SCRIPT_FLAGS.values()) for name, text in flags.items()}
    table = [*USAGE, *((f"--{name.replace('_', '-')}", text) for name, text in flags.items())]
    lines = ["Runs the benchmarks on this machine and writes the tables.", ""]
    lines += ["usage: ./run_all.sh [options] [--NAME=value ...]", ""]
    lines += [f"  {option:28}{text}" for option, text in table]
    lines += ["", "Constants of the scripts' headers (benchmarks/*.py --help explains them):"]
    having: dict[str, list[str]] = {}
    for script, header in headers.items():
        for name in header.constants:
            if header.limit(name) and name not in ("ROWS", "PRECISION"):
                having.setdefault(f"--{name.lower().replace('_', '-')}", []).append(script)
    for scripts in dict.fromkeys(tuple(scripts) for scripts in having.values()):
        names = " ".join(name for name, scripts_of in having.items() if tuple(scripts_of) == scripts)
        head = "all" if len(scripts) == len(headers) else ", ".join(scripts)
        text = f"{head}: {names}"
        lines += textwrap.wrap(text, 118, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)
    return "\n".join(lines)


def _raise_interrupted(number: int, _frame: object) -> None:
    raise Interrupted(number)


def check(argv: Sequence[str], folder: Path = BENCHMARKS) -> int:
    """Whether the command line is right: 0, or 2 with one line. run_all.sh asks before it installs."""
    try:
        headers = read_headers(folder)
        found, chosen = parse(argv, headers)
        rows = _rows(found, chosen, headers, folder)
        for preset in PRESETS:
            plan(found, chosen, headers, preset, rows)
        locate(found.data)
        if found.out:  # the default one goes by what psutil says, which may not be installed yet
            _out(found)
        environments.require()
        _asked_for_gpu(found)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def main(argv: Sequence[str] | None = None, folder: Path = BENCHMARKS) -> int:
    """The command line; the exit status."""
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup, or a background job: left as it was started
            signal.signal(number, _raise_interrupted)
    try:
        headers = read_headers(folder)
        found, chosen = parse(sys.argv[1:] if argv is None else argv, headers)
        if "help" in found.flags:
            say(help_text(headers))
        elif "list" in found.flags:
            for name, text in list_rows(folder, chosen).items():
                say(f"{name}\n{textwrap.indent(text.rstrip(), '  ')}")
        else:
            return run(found, chosen, headers, folder)
        return 0
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1 if isinstance(error, CrashError) else 2
    except Interrupted as interrupted:
        return interrupted.status


if __name__ == "__main__":
    sys.exit(main())
