"""Whether each framework can do on this machine what its rows need: ./run_all.sh --check, and before a run's first row.

One child process per framework, started with that framework's Python, does one small step of each kind and says what it found.
What fails is one line that names the framework, the step and the library's own words; nothing has been written then.
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # as a child, which is started by its path
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from harness.errors import CrashError, UserError
from harness.frameworks import runtimes
from harness.record import machine, software
from harness.record.frameworks import FRAMEWORKS
from harness.run import driver, environments, processes

LIMIT_S = 120.0  # of one framework, which takes about 10 s; the first start after installing reads all from the disk
# In an environment that run_all.sh made: what a check has found good, so that it is done once.
STAMP = "lstm-bench-checked"
DAMAGED = ("ModuleNotFoundError", "ImportError")  # of an environment that run_all.sh made: it is not whole any more


def check(device: str, frameworks: Sequence[str], say: Callable[[str], None], optional: Collection[str] = ()) -> bool:
    """Try each framework and say in one line what it found; whether nothing failed.

    Args:
        device: "gpu" or "cpu".
        frameworks: of harness.record.frameworks.FRAMEWORKS.
        optional: those of them of which it is said what fails; the others are tried all the same.

    Raises:
        UserError: the first thing that fails.
    """
    if device == "gpu":
        found = driver.gpus()
        driver.builds(found)
        if hidden := len(found) - machine.gpu_count():
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            if hidden > 0:
                say(f"{hidden} of {len(found)} GPUs hidden: CUDA_VISIBLE_DEVICES={visible}; unset it to use them all")
    good = True
    for framework in frameworks:
        title = FRAMEWORKS[framework].title
        try:
            if reason := environments.missing(framework):
                raise UserError(f"{title}: {reason}")
            say(_try(framework, device))
        except CrashError:  # such as of a full disk
            raise
        except UserError as error:
            if framework not in optional:
                raise
            say(f"{error}; rows of {title} fail or are skipped, the others run on")
            good = False
            continue
        if reason := environments.missing(framework, "keras"):
            say(f"rows of Keras on {title} are skipped: {reason}")
    return good


def frameworks_here(peers: bool = False) -> list[str]:
    """TensorFlow, and of the others those that are installed; `peers`: all of them."""
    return [name for name in FRAMEWORKS if peers or not environments.missing(name)]


def once(device: str, frameworks: Sequence[str], say: Callable[[str], None]) -> None:
    """`check` where it has not yet found the same good in the environments that run_all.sh made.

    Raises UserError where TensorFlow fails. Where another one does, that is said, the run goes on, and the next run tries all
    of them again.
    """
    facts = {
        "gpus": [list(gpu) for gpu in driver.gpus()],
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "device": device,
    }
    facts["environments"] = {name: _identity(name) for name in frameworks}
    stamp, text = Path(sys.prefix, STAMP), json.dumps(facts)
    if stamp.is_file() and stamp.read_text() == text:
        return
    good = check(device, frameworks, say, [name for name in frameworks if name != "tensorflow"])
    if good and Path(sys.prefix, software.STAMP).is_file():
        with contextlib.suppress(OSError):  # then it is done again next time
            stamp.write_text(text)


def _identity(framework: str) -> list[Any]:
    python = environments.python(framework)
    stamp = Path(python).parents[1] / software.STAMP
    return [python, stamp.stat().st_mtime if stamp.is_file() else None]


def _try(framework: str, device: str) -> str:
    """What the framework's child found, in one line; UserError where something failed."""
    python = environments.python(framework)
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    with tempfile.TemporaryDirectory(prefix="lstm-check-") as folder:
        log = Path(folder, "check.log")
        outcome = processes.run_child(
            Path(__file__),
            {"framework": framework, "device": device},
            limit_s=LIMIT_S,
            log=log,
            python=python,
            env={**hidden, "TF_CPP_MIN_LOG_LEVEL": os.environ.get("TF_CPP_MIN_LOG_LEVEL", "2")},
        )
        last = (log.read_text(errors="replace").strip().splitlines() or [""])[-1]
    answer = outcome.result or {}
    if line := answer.get("found"):
        return line
    step = answer.get("step", "its process")
    reason = answer.get("error") or " ".join(filter(None, [outcome.reason.replace(" (ROW_LIMIT_S)", ""), last[:200]]))
    raise UserError(f"{FRAMEWORKS[framework].title}: {step}: {reason}{_mend(framework, python, reason)}")


def _mend(framework: str, python: str, reason: str) -> str:
    """What to do, and for an environment of run_all.sh that is not whole: have the next run install it anew."""
    stamp = Path(python).parents[1] / software.STAMP
    if not reason.startswith(DAMAGED):
        return ""
    if not stamp.is_file():
        return f"; install it for {python}, or leave --no-install out"
    with contextlib.suppress(OSError):  # of a checkout that cannot be written to
        if framework == "tensorflow":
            (machine.PROJECT / ".venv.incomplete").touch()
        else:
            stamp.unlink()
    again = "run again, which" if framework == "tensorflow" else "./run_all.sh --peers"
    return f"; half-installed: {again} installs it anew"


# In the child


def child(job: Mapping[str, Any]) -> dict[str, Any]:
    """{"found": one line}, or {"step", "error"}."""
    framework, device = job["framework"], job["device"]
    started, step = time.monotonic(), "start"
    done = []
    try:
        runtime = runtimes.make(framework, device, "fp32", machine.physical_cores())
        for step, run in runtime.small_steps():
            if note := run():
                done.append(f"{step} ({note})")
            else:
                done.append(step)
        step = "versions"
        found = runtime.environment()
    except UserError as error:
        return {"step": step, "error": str(error)}
    except Exception as error:
        text = " ".join(str(error).split())[:400]
        return {"step": step, "error": f"{type(error).__name__}: {text}"}
    versions = f"{FRAMEWORKS[framework].title} {found[framework]}"
    if device == "gpu":
        versions += f", CUDA {found['cuda']}, cuDNN {found['cudnn']}"
    return {"found": f"{versions}: {', '.join(done)} in {time.monotonic() - started:.0f} s"}


if __name__ == "__main__":
    task = processes.read_job(sys.argv[2])
    processes.write_result(task, child(task))
