"""A benchmark without a framework that measures for real: NumPy LSTMs of several sizes, in processes and clocks of the suite.

`--slowed=0.05` makes the row `lstm_c` do 5 % more work. It proves nothing, and is for measuring harness.compare alone.
"""

import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from harness import benchmark

# -----
CONFIG = "small"
CONFIGS = {"small": dict(UNITS=48)}
PRESETS = {"quick": dict(PROCESSES=5), "full": dict(PROCESSES=5)}
UNITS = None  # of the smallest row; None: the config's
SLOWED = 0.0  # share of more work in row lstm_c
ROWS = "all"
PRECISION = None
PROCESSES = None
ROW_LIMIT_S = 60.0
ROW_BUDGET_S = 60.0
# -----
SIZES = {"lstm_a": 1.0, "lstm_b": 1.5, "lstm_c": 2.0, "lstm_d": 2.5}  # of UNITS
STEPS, BATCH = 100, 8
PROOF = {"ok": True, "outputs_err": 0.0}


def run_row(row, c, measurement):
    import numpy as np

    from harness import clocks, machine

    units = round(SIZES[row] * c.UNITS)
    rng = np.random.default_rng(1)
    kernel = rng.normal(size=(units, 4 * units)).astype("float32") / units**0.5
    steps = round(STEPS * (1 + c.SLOWED)) if row == "lstm_c" else STEPS

    def step(batch):
        h = c_ = batch
        for _ in range(steps):
            i, f, g, o = np.split(np.tanh(h @ kernel), 4, axis=1)
            c_ = f * c_ + i * g
            h = o * np.tanh(c_)
        return h[0, 0]

    batches = [rng.normal(size=(BATCH, units)).astype("float32") for _ in range(4)]
    timed = clocks.time_blocks(
        step, batches, sync=lambda: None, restore=lambda: None, read=float, warmup_batches=10, warmup_limit_s=0.5,
        timed_batches=10, blocks=3, min_block_s=0.1,
    )  # fmt: skip
    environment = {**machine.facts("cpu"), "data": measurement.data.facts}
    part = dict(blocks_ms=timed.ms, items_per_batch=BATCH, unit="sequences/s", proof=PROOF, environment=environment)
    return {"train": part | {"losses": [0.5]}}


BENCHMARK = benchmark.Benchmark(
    script=__file__,
    doc=__doc__,
    rows={name: benchmark.Row(f"NumPy, {size:g} times UNITS", lambda c: {}) for name, size in SIZES.items()},
    load=lambda c, located: SimpleNamespace(facts={"name": "random", "source": "real", "sha256": {"none": "00"}}),
    reference=lambda c, data: {"outputs": {"logits": [0.0]}},
    run_row=run_row,
    layout={
        "title": "NumPy LSTMs",
        "question": "Does compare find what was slowed?",
        "tables": [{"title": "Step", "mode": "train", "device": None, "columns": [["ms", "step_ms", "median_range"]]}],
    },
    modes=lambda flags: ("train",),
    protocol=lambda c: {},
    published=lambda c, row, mode, device: {},
)

if __name__ == "__main__":
    if "--child" in sys.argv:  # no framework is started
        from harness import measurement

        measurement.matmul_flops = lambda *_: 1e9
        measurement.Measurement = lambda job, data, *_: SimpleNamespace(process=job["process"], data=data)
        from harness import tensorflow_runtime

        tensorflow_runtime.TensorFlowRuntime = lambda *_: None
    sys.exit(benchmark.main(BENCHMARK))
