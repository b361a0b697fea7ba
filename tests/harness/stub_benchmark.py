"""A stand-in for a benchmark script: its rows do what their names say, without a framework. Tests run a copy of it."""

import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

from harness.record import machine
from harness.run import benchmark
from harness.run.script import Benchmark, Row

# -----
CONFIG = "small"
CONFIGS = {"small": dict(UNITS=8), "large": dict(UNITS=16)}
PRESETS = {"quick": dict(PROCESSES=1), "full": dict(PROCESSES=3)}
UNITS = None  # per layer; None: the config's
ROWS = "first,second"
PRECISION = None
PROCESSES = None
ROW_LIMIT_S = 300.0
ROW_BUDGET_S = 60.0
# -----
HERE = Path(__file__).parent
ERRORS = ("outputs", "gradients", "update", "loss", "spread")
PROOF = {"ok": True, **{f"{name}_err": 1e-6 for name in ERRORS}, "limit": dict.fromkeys(ERRORS, 1e-2),
         "kernel": {"launches": 7, "syncs": None}}  # fmt: skip
ROWS_TABLE = {
    name: Row(
        "what it is",
        lambda c: {},
        needs_gpu=name == "needs_gpu",
        framework="torch" if name == "of_a_peer" else "tensorflow",
        cannot=lambda constants, name=name: "has one direction" if name == "one_way" else "",
    )
    for name in (
        "needs_gpu", "one_way", "first", "second", "third", "raises", "out_of_memory", "segfaults", "killed", "exits", "sleeps",
        "train_unproven", "nothing", "long_record", "flaky", "of_a_peer", "fills_disk", "long_result", "clock_set_back",
        "two_sessions", "contradicts", "compiles",
    )
}  # fmt: skip


if __name__ == "__main__":  # short, as the fixture `stub` has them in the tests' own process
    machine.commit = lambda: {"commit": "c"}
    if "STUB_HAS_PACKAGES" not in os.environ:
        machine.packages = dict


def note(text):
    with (HERE / "starts").open("a") as file:
        file.write(f"{text}\n")


def load(c, location):
    note("data")
    return SimpleNamespace(facts={"name": "stub", "source": "real", "sha256": {"file": "00"}})


def reference(c, data):
    note("reference")
    return {"outputs": {"logits": [0.0]}}


def run_row(row, c, measurement):
    note(f"{row} {measurement.process}")
    if row == "compiles":  # and leaves there what it has compiled
        kept = measurement.compiled and Path(measurement.compiled)
        note(f"found {sorted(os.listdir(kept)) if kept else 'no folder'}")
        if kept:
            assert " " not in str(kept)
            (kept / str(measurement.process)).touch()
    if row == "raises" or (row == "flaky" and not (HERE / "repaired").exists()):
        raise ValueError("something\nis wrong")
    if row == "of_a_peer":
        note(measurement.framework)
    if row == "out_of_memory":
        raise MemoryError("8 GiB")
    if row in ("segfaults", "killed"):
        os.kill(os.getpid(), signal.SIGSEGV if row == "segfaults" else signal.SIGKILL)
    if row == "exits":
        sys.exit(3)
    if row in ("fills_disk", "long_result"):  # the nearest thing to a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
    if row == "fills_disk":
        with tempfile.TemporaryFile(buffering=0) as file:
            while True:
                file.write(bytes(1000))
    if row in ("sleeps", "two_sessions"):  # of which the second's helper is in no group or session of the row
        helper = subprocess.Popen(["sleep", "600"], start_new_session=row == "two_sessions")
        (HERE / "pids").write_text(f"{os.getpid()} {helper.pid}")
        time.sleep(600)
    if row == "nothing":
        return {}
    parts = {}
    for mode in ("forward", "train"):
        ms = 10.0 + measurement.process
        parts[mode] = dict(blocks_ms=[ms, ms + 0.5], items_per_batch=c.UNITS, unit="sequences/s", proof=PROOF)
        about = {"gpu": None, "packages": machine.packages(), **machine.commit()}
        if row == "contradicts" and mode == "train":  # steps have none
            parts[mode]["accuracy"] = {"acc": 0.5}
        if row == "clock_set_back":
            about["date"] = f"2026-01-0{9 - measurement.process}T00:00:00+00:00"
        parts[mode]["environment"] = {**about, "data": measurement.data.facts}
        parts[mode]["losses"] = [0.5] * (
            150 if (row, mode) in (("long_record", "train"), ("long_result", "train")) else 1
        )
    if row == "train_unproven":
        unproven = {**PROOF, "ok": False, "failed": ["update"], "reason": "update: error 0.5"}
        parts["train"] = {"status": "failed", "reason": unproven["reason"], "proof": unproven}
    return parts


BENCHMARK = Benchmark(
    script=__file__,
    doc=__doc__,
    rows=ROWS_TABLE,
    load=load,
    reference=reference,
    run_row=run_row,
    layout={
        "title": "Stub",
        "question": "What becomes of a row?",
        "tables": [
            {"title": mode, "mode": mode, "device": None, "columns": [["ms", "step_ms", "median_range"]]}
            for mode in ("forward", "train")
        ],
    },
    modes=lambda flags: ("forward", "train"),
    protocol=lambda c: {},
    published=lambda c, row, mode, device: {},
)

if __name__ == "__main__":
    if "--child" in sys.argv:  # in place of what imports TensorFlow, and NumPy, which takes as long as all the rest
        sys.modules["harness.frameworks.tensorflow"] = SimpleNamespace(TensorFlowRuntime=lambda *_: None)
        sys.modules["harness.measure.matmul"] = SimpleNamespace(matmul_flops=lambda *_: note("matmul") or 1e9)
        sys.modules["harness.measure.measurement"] = SimpleNamespace(
            Measurement=lambda job, data, _, framework, turns: SimpleNamespace(
                process=job["process"], data=data, framework=framework, compiled=job["compiled"]
            ),
        )
    sys.exit(benchmark.main(BENCHMARK))
