"""How long one request takes: an LSTM stack that answers, from a NumPy array on the host to one, a step or a sequence at a time.

python benchmarks/latency.py                                          # every row, this machine
python benchmarks/latency.py --rows=keras_call,torch_lstm --points="stream:1 50:8"   # one step of a stream; 50 steps, batch 8
python benchmarks/latency.py --config=lstm_b                          # a model of STAC-ML
python benchmarks/latency.py --units=256 --num-layers=3 --features=64 --requests=1000
python benchmarks/latency.py --list

./run_all.sh runs it where --only names it.
"""

import importlib.util
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness.run import points, sizes
from harness.run.script import Benchmark, Row
from models import rows

# fmt: off
# ---------------------------------------------------------------------------
CONFIG = None               # one of CONFIGS; None: the preset's
CONFIGS = {
    "ptb_medium": dict(NUM_LAYERS=2, UNITS=650, FEATURES=650, LAST_STEP=False, POINTS="stream:1 stream:8 50:1 50:64 500:1"),
    # STAC-ML Markets (Inference): layers, units, features and steps as in the model cards of
    # https://github.com/UlyssesModel/STAC-ML-Markets-Inference-Models; whose dense layer of one output is left out here.
    "lstm_a": dict(NUM_LAYERS=2, UNITS=100, FEATURES=100, LAST_STEP=True, POINTS="stream:1 50:1 50:8"),
    "lstm_b": dict(NUM_LAYERS=3, UNITS=200, FEATURES=250, LAST_STEP=True, POINTS="100:1"),
    "lstm_c": dict(NUM_LAYERS=4, UNITS=1000, FEATURES=500, LAST_STEP=True, POINTS="100:1"),
}
PRESETS = {
    "full": dict(CONFIG="ptb_medium", REQUESTS=10000, STREAM_STEPS=50, WARMUP_LIMIT_S=1.0),
    "quick": dict(CONFIG="lstm_a", REQUESTS=300, STREAM_STEPS=20, WARMUP_LIMIT_S=0.2),
}
RUNS = {                    # what ./run_all.sh starts: one call each
    "full": ["--config=ptb_medium", "--config=lstm_a", "--config=lstm_b", "--config=lstm_c"],
    "quick": ["--config=lstm_a"],
}
POINTS = None               # steps of a request, or stream, : batch; None: the config's, as for the next four
NUM_LAYERS = None           # LSTM layers
UNITS = None                # LSTM units per layer
FEATURES = None             # inputs of a step
LAST_STEP = None            # answer with the last step's outputs alone
ROWS = "all"                # comma-separated names from --list
PRECISION = None            # fp32 or tf32; None: tf32 on a GPU, fp32 on a CPU
SEED = 1                    # of the weights and inputs
STAGED_REQUESTS = 4         # whole sequences, answered in turn
STREAM_STEPS = None         # requests of a stream, after which it starts anew
REQUESTS = None             # timed per row and point, of slow ones fewer; None: the preset's, as for two more
WARMUP_LIMIT_S = None       # s; a warm-up that has not settled by then ends
WARMUP_BATCHES = 10         # requests at least, before the clock starts
BLOCKS = 5                  # into which the requests are divided
PROCESSES = 1               # processes per row and point
ROW_LIMIT_S = 300.0         # s; a point that takes longer in a process is stopped
ROW_BUDGET_S = 120.0        # s; a point that has taken a row longer gets no further process
# ---------------------------------------------------------------------------
# fmt: on
PUBLISHED = json.loads(Path(__file__).with_name("published.json").read_text())["stac_ml"]
PUBLISHED_AT = {"lstm_a": "steps_50-batch_1", "lstm_b": "steps_100-batch_1", "lstm_c": "steps_100-batch_1"}
UNROLLED_STEPS = 10  # at most, of a row that writes them all out: torch.compile takes minutes for more


PACKAGES = {"onnxruntime": ("onnx", "onnxruntime"), "openvino": ("onnx", "openvino")}  # that a row needs besides


def cannot(row, constants):
    """Why a row cannot run with these constants, or ""."""
    needed = PACKAGES.get(row.arguments.get("runtime"), ())
    if needed and constants.get("DEVICE") == "gpu":
        return "serves on a CPU: --device=cpu"
    if missing := [package for package in needed if importlib.util.find_spec(package) is None]:
        return f"{' and '.join(missing)} not installed: {sys.executable} -m pip install -r requirements-serving.txt"
    steps = constants.get("TIME_STEPS")  # at a point
    if row is rows.SERVERS["torch_compile"] and steps and steps > UNROLLED_STEPS:
        return f"its steps are written out, and compiled for minutes: {UNROLLED_STEPS} at most"
    return ""


ROWS_TABLE = {name: Row.of(row, cannot=cannot) for name, row in rows.SERVERS.items()}


def load(c, location):
    """Nothing is read: the time of a stack does not depend on what it is asked."""
    from harness.data import sets

    return sets.random_inputs(c.SEED)


def weights_and_requests(c):
    """Canonical weights, and requests float32 [requests, batch, steps, features]; a stream's are its steps."""
    import numpy as np

    from models.weights import canonical

    weights = canonical.large_random(canonical.lstm_shapes(c.FEATURES, c.UNITS, c.NUM_LAYERS), c.SEED)
    requests = c.STREAM_STEPS if c.STREAM else c.STAGED_REQUESTS
    shape = (requests, c.BATCH_SIZE, c.TIME_STEPS, c.FEATURES)
    return weights, np.random.default_rng(c.SEED).uniform(-1, 1, shape).astype(np.float32)


def reference(c, data):
    """{"answers": [requests, batch, steps, units], or [requests, batch, units] with LAST_STEP} in float64.

    A stream's are those of the one sequence that its steps are.
    """
    from models.reference import expected

    weights, requests = weights_and_requests(c)
    answers = expected.answers(weights, requests, c.STREAM)["answers"]
    return {"answers": answers[..., -1, :] if c.LAST_STEP else answers}


def run_row(row, c, measurement):
    """Build the row's server from the canonical weights, prove it, time it; at one point."""
    weights, requests = weights_and_requests(c)
    server = rows.SERVERS[row].build(
        weights, requests.shape[1:], c.STREAM, c.LAST_STEP,
        precision=measurement.precision, device=measurement.runtime.device_name,
    )  # fmt: skip
    return measurement.requests(server, list(requests))


def protocol(c):
    """The shape of a STAC-ML model; any of another config."""
    config = c["CONFIG"].partition("-")[0]
    return (
        {name: value for name, value in CONFIGS[config].items() if name != "POINTS"} if config in PUBLISHED_AT else {}
    )


def published_of(system, name):
    """{column: ms} of a system for a model of STAC-ML."""
    columns = {"p99_us": "p99 (ms)", "sliding_p99_us": "p99, sliding window (ms)"}
    return {columns[key]: system[key][name] / 1e3 for key in columns if name in system.get(key, {})}


LAYOUT = {
    "title": "One request",
    "question": "How long does one request take, from its inputs on the host to the answer there? The LSTM stacks of PTB's "
    "medium model and of STAC-ML's LSTM_A, LSTM_B and LSTM_C. A point named stream is one step at a time, its states carried; "
    "the others are whole sequences.",
    "tables": [
        {"title": "One after the other", "mode": "request", "device": None, "plot": "latency.p50_ms",
         "plot_unit": "ms a request, p50; whiskers: to p99",
         "columns": [
             ["p50, ms", "latency.p50_ms", ".3f"],
             ["p99, ms", "latency.p99_ms", ".3f"],
             ["p99, published, ms", "published.p99 (ms)", ".4f"],
             ["p99, sliding window, published, ms", "published.p99, sliding window (ms)", ".4f"],
             ["p99.9, ms", "latency.p999_ms", ".3f"],
             ["longest, ms", "latency.max_ms", ".3f"],
             ["requests/s", "throughput.value", ",.0f"],
             ["against the fastest peer", "throughput.value", "speedup:fastest peer"],
             ["J per request", "latency.joules", ".4f"],
             ["requests", "latency.requests", ",d"],
             ["first call (s)", "first_call_s", ".1f"],
             ["GPU memory, allocator", "memory_peak_bytes.allocator", "bytes"],
             ["host memory", "memory_peak_bytes.resident", "bytes"],
         ]},
    ],
    "footnotes": [
        "Each request is timed by itself: it starts as a NumPy array on the host, and its answer, the top layer's outputs of all "
        "its steps (lstm_a, lstm_b and lstm_c: of the last step), ends as one. The next one starts when the answer is there, so "
        "requests/s are those of one client.",
        "Published: audited by STAC, one instance of the model. The first column is of its suite Sumaco, where a request is a "
        "whole new window, as here; the sliding window is Tacana's, which moves by a step: most of it may be computed before.",
        "A percentile is the shortest time that so many of the requests do not exceed; a dash where so few have no such.",
        "J per request: NVML's energy counter over all timed requests, of the GPU alone, with what it takes at rest; a dash on a "
        "CPU, and where the requests took under a second.",
        "Every row starts from zero states. Its answers are held to float64 before and after timing, and at random places "
        "while the clock runs; those of a stream to the whole sequence's.",
        "Host memory is that of the row's process with its framework and all points so far; onnxruntime and openvino run in a "
        "process that has loaded TensorFlow.",
        "keras_predict makes a tf.data pipeline for each request, as model.predict does. No row keeps weights on the chip "
        "between requests: wavefront_persistent reads them again at each, since a kernel that waited for the next request "
        "would keep the GPU from everything else.",
    ],
    "extra_rows": [
        {"row": system["row"], "description": system["what"], "published": figures,
         "reason": "another system's", "table": 0, "config": f"{name}-{point}"}
        for system in PUBLISHED for name, point in PUBLISHED_AT.items() if (figures := published_of(system, name))
    ],
}  # fmt: skip

BENCHMARK = Benchmark(
    script=__file__, doc=__doc__, rows=ROWS_TABLE, load=load, reference=reference, run_row=run_row, layout=LAYOUT,
    values=lambda c: sizes.stack_values(c, c["TIME_STEPS"]), modes=lambda flags: ("request",),
    published=lambda c, row, mode, device: {}, protocol=protocol,
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(points.main(BENCHMARK))
