"""A benchmark that measures for real and proves nothing: LSTMs of several sizes, in processes, clocks and records of the suite.

For measuring harness.compare alone, from measured_pairs.py. Rows `lstm_*` are NumPy's, on a CPU, without a framework; rows
`torch_*` are PyTorch's nn.LSTM, on a GPU or a CPU. Two environment variables, since no setting may tell the runs apart that
compare is to tell apart by their times:

    LSTM_BENCH_SLOWED_ROW=lstm_c     this row does 5 % more of the same work
    LSTM_BENCH_CORES=0,1             the processors that the run and all its processes keep to
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from harness.record import machine
from harness.run import benchmark, processes
from harness.run.script import Benchmark, Row

# -----
CONFIG = "small"
CONFIGS = {
    "small": dict(UNITS=48, BATCH_SIZE=8),
    "large": dict(
        UNITS=512, BATCH_SIZE=64
    ),  # for the rows torch_* on a GPU: 2 to 6 ms a step, so that kernels are the limit
}
PRESETS = {"quick": dict(PROCESSES=5), "full": dict(PROCESSES=5)}
UNITS = None  # of the smallest row; None: the config's
BATCH_SIZE = None
ROWS = "all"
PRECISION = None
PROCESSES = None
WARMUP_LIMIT_S = 0.5
BLOCKS = 5
MIN_BLOCK_S = 0.2
ROW_LIMIT_S = 120.0
ROW_BUDGET_S = 300.0
# -----
SIZES = {
    **{"lstm_a": 1.0, "lstm_b": 1.5, "lstm_c": 2.0, "lstm_d": 2.5},  # of UNITS
    **{"torch_a": 1.0, "torch_b": 1.5, "torch_c": 2.0},
}
ROUNDS = 20  # of STEPS time steps each: 21 of them are 5 % more work, whatever limits a step
STEPS = {"lstm": 5, "torch": 10}
SLOWED_ROUNDS = 21
SLOWED_ROW, CORES = "LSTM_BENCH_SLOWED_ROW", "LSTM_BENCH_CORES"
ERRORS = ("outputs", "gradients", "update", "loss", "spread")
PROOF = {"ok": True, **{f"{name}_err": 0.0 for name in ERRORS}, "limit": dict.fromkeys(ERRORS, 1e-2),
         "kernel": {"launches": 7, "syncs": None}}  # fmt: skip


def numpy_step(units: int, rounds: int, rng) -> Callable:
    """An LSTM of primitive operations: batch [batch, units] → a scalar of the last state."""
    import numpy as np

    kernel = rng.normal(size=(units, 4 * units)).astype("float32") / units**0.5

    def step(batch):
        h = c = batch
        for _ in range(rounds * STEPS["lstm"]):
            i, f, g, o = np.split(np.tanh(h @ kernel), 4, axis=1)
            c = f * c + i * g
            h = o * np.tanh(c)
        return h[0, 0]

    return step


def torch_step(units: int, rounds: int, runtime) -> Callable:
    """nn.LSTM, its states carried from round to round: batch [time, batch, units] → a scalar of the last output."""
    import torch

    runtime.seed(1)
    lstm = torch.nn.LSTM(units, units).to(runtime.device_name)

    def step(batch):
        states = None
        with torch.no_grad():
            for _ in range(rounds):
                outputs, states = lstm(batch, states)
        return outputs[-1, 0, 0].clone()  # alone: kept outputs would make the allocator grow in timed blocks

    return step


def run_row(row, c, measurement):
    import numpy as np

    from harness.frameworks import runtimes
    from harness.measure import clocks
    from harness.record.machine import OTHERS_NOTE, OTHERS_PERCENT

    cpu = machine.CpuShare()
    framework = row.split("_")[0]
    units = round(SIZES[row] * c.UNITS)
    rounds = SLOWED_ROUNDS if os.environ.get(SLOWED_ROW) == row else ROUNDS
    rng = np.random.default_rng(1)
    sync, read, environment = (lambda: None), float, {}
    if framework == "lstm":
        step = numpy_step(units, rounds, rng)
        batches = [rng.normal(size=(c.BATCH_SIZE, units)).astype("float32") for _ in range(4)]
    else:
        runtime = runtimes.make("torch", measurement.device, measurement.precision, machine.physical_cores())
        import torch

        step = torch_step(units, rounds, runtime)
        shape = (STEPS["torch"], c.BATCH_SIZE, units)
        batches = [torch.from_numpy(rng.normal(size=shape).astype("float32")).to(runtime.device_name) for _ in range(4)]
        sync, environment = runtime.sync, runtime.environment()

        def read(loss):
            return float(runtime.to_numpy([loss])[0])

    timed = clocks.time_blocks(
        step, batches, sync=sync, restore=lambda: None, read=read, warmup_batches=10,
        warmup_limit_s=c.WARMUP_LIMIT_S, timed_batches=10, blocks=c.BLOCKS, min_block_s=c.MIN_BLOCK_S,
    )  # fmt: skip
    state = machine.gpu_state() if measurement.device == "gpu" else None
    # Not all of machine.facts, which takes a second in each of hundreds of processes.
    about = {"gpu": machine.gpu_name() if state else None, "packages": machine.packages(), "diff": machine.diff()}
    about |= {"rounds": rounds, "processors": sorted(os.sched_getaffinity(0)) if os.environ.get(CORES) else None}
    disturbed = measurement.device == "cpu" and cpu.others_percent() > OTHERS_PERCENT
    part = dict(
        blocks_ms=timed.ms, items_per_batch=c.BATCH_SIZE, unit="sequences/s", proof=PROOF, losses=[read(timed.losses[0][0])],
        clocks=[{"process": measurement.process, "when": "timed", **state}] if state else [],
        warmup=[{"process": measurement.process, **timed.warmup._asdict()}], notes=[OTHERS_NOTE] if disturbed else [],
        environment={**environment, **about, **machine.commit(), "data": measurement.data.facts},
    )  # fmt: skip
    return {"forward": part}


def row_of(name: str, size: float) -> Row:
    if name.startswith("lstm"):
        return Row(f"NumPy, {size:g} times UNITS", lambda c: {})
    return Row(f"PyTorch's nn.LSTM, {size:g} times UNITS", lambda c: {}, framework="torch")


BENCHMARK = Benchmark(
    script=__file__,
    doc=__doc__,
    rows={name: row_of(name, size) for name, size in SIZES.items()},
    load=lambda c, location: SimpleNamespace(facts={"name": "random", "source": "real", "sha256": {"none": "00"}}),
    reference=lambda c, data: {"outputs": {"logits": [0.0]}},
    run_row=run_row,
    layout={
        "title": "LSTMs that prove nothing",
        "question": "Does compare find what was slowed?",
        "tables": [
            {"title": "Step", "mode": "forward", "device": None, "columns": [["ms", "step_ms", "median_range"]]}
        ],
    },
    modes=lambda flags: ("forward",),
    protocol=lambda c: {},
    published=lambda c, row, mode, device: {},
)

if __name__ == "__main__":
    if cores := os.environ.get(CORES):
        os.sched_setaffinity(0, set(map(int, cores.split(","))))
    if "--child" in sys.argv:  # TensorFlow is not started, and nothing proven
        from harness.frameworks import tensorflow
        from harness.measure import matmul, measurement

        matmul.matmul_flops = lambda *_: 1e9
        measurement.Measurement = lambda job, data, *_: SimpleNamespace(
            process=job["process"], device=job["device"], precision=job["precision"], data=data
        )
        tensorflow.TensorFlowRuntime = lambda *_: None
    processes.draw = lambda *_: []  # compare reads records alone
    sys.exit(benchmark.main(BENCHMARK))
