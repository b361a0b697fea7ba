"""A stand-in for a script whose rows run in several workers, without a framework: its name says what becomes of the second."""

import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

from harness.record import machine
from harness.run import replicas
from harness.run.script import Row

# -----
CONFIG = "small"
CONFIGS = {"small": dict(BATCH_SIZE=4)}
PRESETS = {"quick": dict(PROCESSES=1), "full": dict(PROCESSES=1)}
BATCH_SIZE = None  # sequences
REPLICAS = "2"
SCALING = "weak,strong"
HOSTS = "127.0.0.1,127.0.0.2"
ROWS = "fine"
PRECISION = None
PROCESSES = None
ROW_LIMIT_S = 60.0
ROW_BUDGET_S = 60.0
# -----
HERE = Path(__file__).parent
ERRORS = ("outputs", "gradients", "update", "loss", "spread")
PROOF = {"ok": True, **{f"{name}_err": 1e-6 for name in ERRORS}, "limit": dict.fromkeys(ERRORS, 1e-2),
         "kernel": {"launches": 7, "syncs": None}}  # fmt: skip
NAMES = ("fine", "killed", "never_starts", "hangs", "hangs_together", "raises", "unproven", "memory_alone", "beside_it")
ROWS_TABLE = {name: Row("what it is", lambda c: {}) for name in NAMES}
ROWS_TABLE["one_process"] = Row("what it is", lambda c: {}, framework="jax")

if __name__ == "__main__":
    machine.commit = lambda: {"commit": "c"}
    machine.packages = dict


def load(c, location):
    return SimpleNamespace(facts={"name": "stub", "source": "real", "sha256": {"file": "00"}})


def reference(c, data):
    with (HERE / "references").open("a") as computed:
        computed.write(f"{c.BATCH_SIZE}\n")
    if (HERE / "no_reference").exists():
        raise ValueError("none today")
    return {"outputs": {"logits": [0.0]}}


def run_row(row, c, measurement):
    from harness.measure.beats import STEPS

    group = measurement.group
    second = group.rank == 1 and not (HERE / "repaired").exists()
    group.at(STEPS)
    if row == "memory_alone":
        with (HERE / "tried").open("a") as tried:
            tried.write(f"{measurement.beside_others}\n")
        if measurement.beside_others:
            raise RuntimeError("out of memory")
    if row == "beside_it" and c.REPLICAS == 1:
        end = time.monotonic() + 20.0
        while not (HERE / "tried").exists():
            assert time.monotonic() < end, "nothing runs beside this row"
            time.sleep(0.05)
    if row == "killed" and second:
        os.kill(os.getpid(), signal.SIGKILL)
    if row == "raises" and second:
        raise ValueError("something\nis wrong")
    if (row == "hangs" and second) or (row == "hangs_together" and not (HERE / "repaired").exists()):
        time.sleep(600)
    group.barrier()
    environment = {"gpu": None, "packages": {}, "commit": "c", "data": measurement.data.facts}
    if row == "one_process":
        environment["variables"] = {"XLA_FLAGS": machine.VARIABLES["XLA_FLAGS"]}
    about = {
        "gpus": measurement.gpus,
        "workers": group.size,
        "hosts": group.hosts,
        "names": [],
        "link": None,
        "nccl": None,
    }
    if row == "unproven":
        proof = {**PROOF, "ok": False, "failed": ["update"], "reason": "update: worker 1 of 2 (127.0.0.2): error 0.5"}
        return {"train": {"status": "failed", "reason": proof["reason"], "proof": proof}}
    ms = 10.0 / (2 if c.REPLICAS == 2 and c.BATCH_SIZE == 4 else 1)
    return {"train": dict(blocks_ms=[ms, ms], items_per_batch=c.BATCH_SIZE, unit="sequences/s", proof=PROOF, losses=[0.5],
                          environment=environment, replicas={**about, "communication_ms": None})}  # fmt: skip


BENCHMARK = replicas.Benchmark(
    script=__file__, doc=__doc__, rows=ROWS_TABLE, load=load, reference=reference, run_row=run_row,
    layout={"title": "Stub", "question": "What becomes of a worker?", "tables": [], "replicas": {"mode": "train"}},
    workers=lambda row, gpus: 1 if row == "one_process" else gpus,
    modes=lambda flags: ("train",), protocol=lambda c: {}, published=lambda c, row, mode, device: {},
)  # fmt: skip

if __name__ == "__main__":
    if "--child" in sys.argv:
        from harness.frameworks import tensorflow
        from harness.measure import matmul
        from harness.measure import replicas as measured
        from harness.measure.group import Group
        from harness.run import processes

        told = processes.read_job(sys.argv[2])
        if told.get("row") == "never_starts" and told["replicas"]["rank"] and not (HERE / "repaired").exists():
            time.sleep(600)
        tensorflow.TensorFlowRuntime = lambda *_: None
        matmul.matmul_flops = lambda *_: 1e9
        measured.ReplicatedMeasurement = lambda job, data, *_: SimpleNamespace(
            data=data, group=Group.of_job(job), gpus=job["replicas"]["gpus"], beside_others="turns" in job
        )
    sys.exit(replicas.main(BENCHMARK))
