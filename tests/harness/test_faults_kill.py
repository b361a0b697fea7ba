"""kill -9 at any moment: nothing half-written is read, --resume finishes, finished rows stay, the tables come out the same."""

import contextlib
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

from harness.record import records
from tests import sizes

KILLS = sizes.cases(3, 50)
RUNS = sizes.cases(3, 5)  # over which they are spread
SEED = 6
ROWS = ("first", "second")
MODES = ("forward", "train")
PROCESSES = 2
OPTIONS = [f"--rows={','.join(ROWS)}", f"--processes={PROCESSES}"]
TOUCHES = 60  # of files, by an undisturbed run, about


def started(stub, touch: int = 0) -> subprocess.Popen:
    """The script on its way; with `touch` it is killed before that many touches of its folder."""
    killer = [str(Path(__file__).with_name("killed_at.py")), str(touch), str(stub.out)] if touch else []
    command = [
        sys.executable,
        *killer,
        str(stub.script),
        *stub.arguments(*OPTIONS, *(["--resume"] if (stub.out / "run.json").exists() else [])),
    ]
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )


def disturbed(stub, chance: random.Random, lasts_s: float) -> tuple[int, str]:
    """(exit status, who was killed: "", "parent" or "child") of a run that is killed somewhere, unless it ends before."""
    moment = chance.choice(["touch", "time", "time of child"])
    process = started(stub, chance.randint(1, TOUCHES) if moment == "touch" else 0)
    killed = ""
    if moment != "touch":
        time.sleep(chance.uniform(0.0, lasts_s))
        victims = [process] if moment == "time" else children_of(process)
        for victim in victims:
            with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
                victim.kill()
                killed = "child" if moment == "time of child" else ""
    _, printed = process.communicate(timeout=300)
    assert "Traceback" not in printed, printed
    return process.returncode, "parent" if process.returncode == -signal.SIGKILL else killed


def children_of(process: subprocess.Popen) -> list[psutil.Process]:
    """Its children once it has some; [] where it ends before."""
    while process.poll() is None:
        with contextlib.suppress(psutil.NoSuchProcess):
            if found := psutil.Process(process.pid).children():
                return found
        time.sleep(0.002)
    return []


def finished(out: Path) -> set[str]:
    """The rows that are; every file of the run has to be whole."""
    for path in out.rglob("[!.]*.json"):
        records.read_json(path)
    if not (out / "run.json").exists():
        return set()
    found, problems = records.read_run(out)
    assert problems == []
    whole = [r["row"] for r in found if r["status"] == "ok" and len(r["blocks_ms"]) == PROCESSES]
    return {row for row in whole if whole.count(row) == len(MODES)}


def noted(out: Path) -> list[Path]:
    """The records that say that the row's process was killed between its result and its end: they are whole."""
    return [path for path in (out / "rows").glob("*.json") if "ended by SIGKILL after its result" in path.read_text()]


def pages(out: Path) -> dict[str, list[str]]:
    return {path.name: path.read_text().splitlines() for path in out.glob("*.md")}


def kill_and_resume(stub, seed: int, lasts_s: float) -> tuple[list[str], dict[str, list[str]]]:
    """(who was killed KILLS // RUNS times in one run, its pages in the end)."""
    chance, who, before = random.Random(seed), [], set()
    while True:
        stub.starts()
        if len(who) < KILLS // RUNS:
            status, killed = disturbed(stub, chance, lasts_s)
        else:
            status, killed = started(stub).wait(600), ""
        assert not before & {line.split()[0] for line in stub.rows_started()}, "a finished row ran again"
        after = finished(stub.out) if stub.out.exists() else set()
        assert before <= after, "a finished row was lost"
        before = after
        who += [killed] if killed else []
        if status:
            assert killed, f"ended with status {status}, and nobody killed it"
        elif len(who) == KILLS // RUNS:
            notes = noted(stub.out)
            if not notes:
                break
            assert "child" in who, "nobody killed a row's process"
            for path in notes:  # the page would say so: these are measured once more
                path.unlink()
            before = finished(stub.out)
        else:  # it came to its end: another row's records are to be had
            (stub.out / "rows" / f"stub.small.{chance.choice(ROWS)}.train.cpu.fp32.json").unlink()
            before = finished(stub.out)
    assert before == set(ROWS)
    assert not [path for path in stub.out.rglob("*") if path.suffix == ".tmp" or path.name == ".lock"]
    return who, pages(stub.out)


def test_a_run_killed_at_random_moments_ends_as_if_nothing_had_happened(stub):
    began = time.monotonic()
    assert started(stub).wait(600) == 0
    lasts_s, undisturbed = time.monotonic() - began, pages(stub.out)
    assert set(undisturbed) == {"stub.md", "README.md"}
    folders = [stub.folder / str(number) for number in range(RUNS)]
    for folder in folders:
        folder.mkdir()
    with ThreadPoolExecutor(RUNS) as threads:  # each run waits for its processes most of the time
        runs = [threads.submit(kill_and_resume, type(stub)(f), SEED + n, lasts_s) for n, f in enumerate(folders)]
    killed = []
    for run in runs:
        who, drawn = run.result()
        assert drawn == undisturbed
        killed += who
    assert len(killed) == KILLS
    assert not sizes.ALL or (killed.count("parent") > 10 and killed.count("child") > 5)


def test_a_file_is_whole_whatever_touch_of_the_folder_was_the_last(stub):
    """Every single one of them while records are written: the folder opens again, and each record is there or not."""
    script = stub.folder / "write.py"
    script.write_text(
        "import sys\nfrom harness.record import records\nfrom tests.record_cases import make\n"
        "with records.open_run(sys.argv[1]) as run:\n"
        "    for row in 'ab':\n        records.write_record(run, make(row=row))\n"
    )
    seen = []
    for touch in range(1, 100):
        out = stub.folder / f"touch{touch}"
        command = [
            sys.executable,
            str(Path(__file__).with_name("killed_at.py")),
            str(touch),
            str(out),
            str(script),
            str(out),
        ]
        status = subprocess.run(command, stdin=subprocess.DEVNULL).returncode
        assert status in (0, -signal.SIGKILL)
        if out.exists():
            with records.open_run(out) as run:  # its lock went with its owner
                found, problems = records.read_run(run)
            assert problems == [] and [record["row"] for record in found] == ["a", "b"][: len(found)]
            assert not list(out.rglob(".*"))
            seen.append(len(found))
        if status == 0:
            break
    assert set(seen) == {0, 1, 2} and seen == sorted(seen) and status == 0
