"""What a script does as a child of its own parent: one task, in a process of its own, with its result in a file."""

import errno
import gc
import re
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from harness.data.location import DataLocation, locate
from harness.errors import CrashError, UserError
from harness.frameworks import runtimes
from harness.record import machine, settings
from harness.run import processes

# How TensorFlow, PyTorch, JAX, XLA and CUDA's libraries say that the device's memory is used up: as an error's type or text.
OUT_OF_MEMORY = re.compile(
    r"ResourceExhaustedError|OutOfMemoryError|RESOURCE_EXHAUSTED|out of memory|OUT_OF_MEMORY|ALLOC_FAILED"
    r"|[Ff]ailed to allocate|Dst tensor is not initialized"
)
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
MATMUL = {"gpu": (8192, 10), "cpu": (2048, 3)}  # size and repeats of the plain product that shares are taken of


class ReferenceConstants(SimpleNamespace):
    """The constants that change the reference, which its file is named after; reading another one is an error."""

    def __getattr__(self, name: str) -> None:
        raise AttributeError(f"the reference reads {name}, which does not change it (harness/record/settings.py)")


def run(benchmark: Any, job_path: str) -> int:
    """Do the job and write its result, or the one-line reason why there is none. `benchmark`: harness.run.script.Benchmark."""
    job = processes.read_job(job_path)
    result = _points(benchmark, job) if job["task"] == "points" else _result(benchmark, job)
    try:
        processes.write_result(job, result)
    except OSError as error:
        processes.write_result(job, _failure(job, benchmark, f"its result could not be written: {one_line(error)}"))
    return 0


def _result(benchmark: Any, job: Mapping[str, Any]) -> dict:
    """What the job comes to, or why it has failed."""
    constants = SimpleNamespace(**job["constants"], FLAGS=set(job["flags"]), DEVICE=job["device"])
    if job["task"] == "reference":
        constants = ReferenceConstants(**settings.of(job["constants"], settings.Changes.REFERENCE))
    try:
        found = _do(benchmark, job, constants)
        for mode, part in found.items() if job["task"] == "row" else ():
            if part.get("status") == "failed":  # else a log that many rows share would not say which has
                print(f"failed: {job['row']} {mode}: {part['reason']}", file=sys.stderr)
        return found
    except UserError as error:
        return _failure(job, benchmark, str(error), wrong_input=not isinstance(error, CrashError))
    except Exception as error:
        traceback.print_exc()
        return _failure(job, benchmark, one_line(error))


def _points(benchmark: Any, job: Mapping[str, Any]) -> dict:
    """A row at one point after another (harness/run/sweep.py), each handed over as soon as it is there.

    It ends after a point that has raised an error: who knows in what state that has left the device. With `rehearse` the first is
    measured twice and kept the second time: a process takes longer over its first model than over the same one again.
    """
    done: list[dict] = []
    for point in job["points"]:
        started, waited_s = time.monotonic(), processes.Turns.waited_s
        modes = _result(benchmark, {**job, **point, "task": "row"})
        gc.collect()  # a model's graphs hold each other: its memory has to be free for the next one's
        if job.get("rehearse") and not done and not _raised(modes):
            processes.write_progress(job, done)  # from here its time counts anew
            modes = _result(benchmark, {**job, **point, "task": "row"})
            gc.collect()
        done.append({"seconds": time.monotonic() - started - (processes.Turns.waited_s - waited_s), "modes": modes})
        processes.write_progress(job, done)
        if _raised(modes):
            break
    return {}


def _raised(modes: Mapping[str, Mapping]) -> bool:
    return any(part.get("status") == "failed" and "proof" not in part for part in modes.values())


def _failure(job: Mapping, benchmark: Any, reason: str, wrong_input: bool = False) -> dict:
    if job["task"] != "row":
        return {"error": reason, "wrong_input": wrong_input}
    return {mode: {"status": "failed", "reason": reason} for mode in benchmark.modes(set(job["flags"]))}


def one_line(error: Exception) -> str:
    kind, text = type(error).__name__, str(error).strip()
    # AutoGraph tells the call stack, an empty line, and the error's own name and text; Keras the layer, and the text in bold.
    if text.startswith("in user code:"):
        text = text.rpartition("\n\n")[2].strip().removeprefix(f"{kind}:")
    if bold := re.search(r"\x1b\[1m(.*?)\x1b\[0m", text, re.DOTALL):
        text = bold[1]
    text = " ".join(text.split())
    if isinstance(error, MemoryError) or OUT_OF_MEMORY.search(f"{kind}: {text}"):
        return f"out of memory: {text[:200]}; try a smaller --batch-size"
    if isinstance(error, OSError) and error.errno in NO_SPACE:
        return f"no space on the disk: {text[:200]}; free some there or in TMPDIR"
    return f"{kind}: {text[:300]}" if text else kind


def _do(benchmark: Any, job: Mapping[str, Any], constants: SimpleNamespace) -> dict:
    if job["task"] == "matmul":
        from harness.measure.matmul import matmul_flops

        runtime = runtimes.make("tensorflow", job["device"], job["precision"], machine.physical_cores())
        return {"flops": matmul_flops(runtime, *MATMUL[job["device"]])}

    embedded = job["data"]["embedded"]
    location = DataLocation(None, embedded, "") if embedded else locate(job["data"]["option"])
    data = benchmark.load(constants, location)
    if job["task"] == "data":
        return {"facts": data.facts}
    if job["task"] == "reference":
        from harness.measure.references import save_reference

        save_reference(Path(job["path"]), benchmark.reference(constants, data))
        return {}
    from harness.measure.measurement import Measurement

    if "replicas" in job:
        from harness.measure.replicas import ReplicatedMeasurement as Measurement
    elif "options" in job:
        from harness.measure.options import OptionMeasurement as Measurement
    row = benchmark.rows[job["row"]]
    measurement = Measurement(job, data, row.expected_ops(constants), row.framework, processes.Turns(job))
    return benchmark.run_row(job["row"], constants, measurement)
