"""A stand-in for a benchmark along axes: what becomes of a point is in the row's name. Tests run a copy of it."""

import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

from harness.record import machine
from harness.run import sweep
from harness.run.script import Benchmark, Row

# -----
CONFIG = "centre"
CONFIGS = {"centre": dict(UNITS=8, BATCH_SIZE=4)}
PRESETS = {"quick": dict(PROCESSES=1, AXES="units=2,8,16 batch=1"), "full": dict(PROCESSES=2, AXES="units=2")}
AXES = None
UNITS = None
BATCH_SIZE = None
ROWS = "good"
PRECISION = None
PROCESSES = None
TIMED_BATCHES = 5
ROW_LIMIT_S = 60.0
ROW_BUDGET_S = 60.0
# -----
HERE = Path(__file__).parent
ERRORS = ("outputs", "gradients", "update", "loss", "spread")
PROOF = {"ok": True, **{f"{name}_err": 1e-6 for name in ERRORS}, "limit": dict.fromkeys(ERRORS, 1e-2),
         "kernel": {"launches": 7, "syncs": None}}  # fmt: skip
BAD = 16  # units at which a row does what its name says
NAMES = ("good", "needs_gpu", "raises", "segfaults", "sleeps", "unproven", "killed_once")

if __name__ == "__main__":
    machine.packages, machine.commit = dict, lambda: {"commit": "c"}


def note(text):
    with (HERE / "starts").open("a") as file:
        file.write(f"{text}\n")


def reference(c, data):
    note(f"reference {c.UNITS} {c.BATCH_SIZE}")
    return {"outputs": {"logits": [0.0]}}


def run_row(row, c, measurement):
    note(f"{os.getpid()} {row} {c.UNITS} {c.BATCH_SIZE} {measurement.process}")
    if c.UNITS == BAD and row == "raises":
        raise ValueError("something is wrong")
    if c.UNITS == BAD and row == "segfaults":
        os.kill(os.getpid(), signal.SIGSEGV)
    if c.UNITS == BAD and row == "sleeps":
        time.sleep(60)
    if c.UNITS == BAD and row == "killed_once" and not (HERE / "repaired").exists():
        while len(list((HERE / "out" / "rows").glob("*.json"))) < 2:  # the points before this one
            time.sleep(0.05)
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)
    if c.UNITS == BAD and row == "unproven":
        return {"stack": {"status": "failed", "reason": "x", "proof": {**PROOF, "ok": False, "failed": ["outputs"]}}}
    part = dict(
        blocks_ms=[float(c.UNITS), c.UNITS + 0.5], items_per_batch=c.BATCH_SIZE, unit="sequences/s", proof=PROOF
    )
    about = {"gpu": None, "packages": machine.packages(), **machine.commit(), "data": measurement.data.facts}
    return {"stack": {**part, "environment": about}}


BENCHMARK = Benchmark(
    script=__file__,
    doc=__doc__,
    rows={name: Row("what it is", lambda c: {}, needs_gpu=name == "needs_gpu") for name in NAMES},
    load=lambda c, location: SimpleNamespace(facts={"name": "stub", "source": "real", "sha256": {"file": "00"}}),
    reference=reference,
    run_row=run_row,
    layout={
        "title": "Stub",
        "question": "What becomes of a point?",
        "tables": [],
        "axes": [
            {"name": "units", "constant": "UNITS", "title": "Units", "label": "units", "mode": "stack"},
            {"name": "batch", "constant": "BATCH_SIZE", "title": "Batch", "label": "sequences", "mode": "stack"},
        ],
    },
    modes=lambda flags: ("stack",),
    protocol=lambda c: {},
    published=lambda c, row, mode, device: {},
)

if __name__ == "__main__":
    if "--child" in sys.argv:  # as in stub_benchmark.py
        sys.modules["harness.frameworks.tensorflow"] = SimpleNamespace(TensorFlowRuntime=lambda *_: None)
        sys.modules["harness.measure.matmul"] = SimpleNamespace(matmul_flops=lambda *_: note("matmul") or 1e9)
        sys.modules["harness.measure.measurement"] = SimpleNamespace(
            Measurement=lambda job, data, *_: SimpleNamespace(process=job["process"], data=data),
        )
    sys.exit(sweep.main(BENCHMARK))
