"""How the time of an LSTM stack depends on its layers, units, batch and steps: forward and backward, without a softmax.

python benchmarks/scaling.py                                        # every point of every axis, this machine
python benchmarks/scaling.py --rows=wavefront,torch_lstm --axes="units=128,512 batch=1,8"
python benchmarks/scaling.py --units=650 --num-layers=2             # units and layers fixed; batch and steps vary
python benchmarks/scaling.py --list

./run_all.sh runs it where there are rows to compare: on a CPU with --peers, or where --only or --rows names it.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness.run import sizes, sweep
from harness.run.script import Benchmark, Row
from models import rows
from models.reference import flops

# fmt: off
# ---------------------------------------------------------------------------
CONFIG = None               # the shape in which the axes cross, one of CONFIGS; None: the preset's
CONFIGS = {
    "published": dict(NUM_LAYERS=3, UNITS=256, BATCH_SIZE=128, TIME_STEPS=50),  # the stacked LM's
    "quick": dict(NUM_LAYERS=2, UNITS=128, BATCH_SIZE=8, TIME_STEPS=20),
}
PRESETS = {
    "full": dict(CONFIG="published", PROCESSES=1, BLOCKS=3, TIMED_BATCHES=50, WARMUP_LIMIT_S=1.0,
                 AXES="layers=1,2,4,8 units=64,128,256,512,1024,2048 batch=1,8,32,128,512 steps=10,50,100,400"),
    "quick": dict(CONFIG="quick", PROCESSES=1, BLOCKS=3, TIMED_BATCHES=10, WARMUP_LIMIT_S=0.5,
                  AXES="layers=4 units=256 batch=32 steps=50"),
}
AXES = None                 # sizes on each axis, with the others at the config's; None: the preset's
NUM_LAYERS = None           # LSTM layers; None: the config's, as for the next three; given, it is no axis
UNITS = None                # LSTM units per layer
BATCH_SIZE = None           # sequences per batch
TIME_STEPS = None           # steps per sequence
EMBEDDING = 128             # width of the stack's inputs
VOCABULARY = 1000           # random vectors of that width, of which the inputs are drawn
ROWS = "all"                # comma-separated names from --list
PRECISION = None            # fp32, tf32, fp16 or bf16; None: tf32 on a GPU, fp32 on a CPU
SEED = 1                    # of the weights, states and inputs
WARMUP_BATCHES = 10         # at least, before the clock starts
WARMUP_LIMIT_S = None       # s; a warm-up that has not settled by then ends; None: the preset's, as for the next three
TIMED_BATCHES = None        # per block
BLOCKS = None               # timed blocks per process
PROCESSES = None            # processes per row and point
ROW_LIMIT_S = 300.0         # s; a point that takes longer in a process is stopped
ROW_BUDGET_S = 120.0        # s; a point that has taken a row longer gets no further process
MIN_BLOCK_S = 0.21          # s; a block is the multiple of TIMED_BATCHES that fills it
STAGED_BATCHES = 8          # batches on the device, taken in turn
# ---------------------------------------------------------------------------
# fmt: on

OURS = ["wavefront", "wavefront_persistent"]
IMPLEMENTATIONS = {
    name: rows.LANGUAGE_MODEL[name]
    for name in ("cudnn_stack", "torch_lstm", "torch_lstm_graph", "cudnn_best", "jax_scan", *OURS)
}
ROWS_TABLE = {name: Row.of(row) for name, row in IMPLEMENTATIONS.items()}


def load(c, location):
    """Random words: the time of a stack does not depend on what it reads."""
    from harness.data import sets

    return sets.random_words(c.VOCABULARY, c.SEED)


def start(c, text):
    """Weights, states and batches of the proof and of the timing: the same bytes in every row. The softmax is never run."""
    from harness.data.batches import language_model_batches
    from models.weights import canonical

    shapes = canonical.language_model_shapes(c.VOCABULARY, c.EMBEDDING, c.UNITS, c.NUM_LAYERS)
    inputs, targets = language_model_batches(text.train, c.BATCH_SIZE, c.TIME_STEPS)
    batches = [(inputs[k], targets[k]) for k in range(min(c.STAGED_BATCHES, len(inputs)))]
    states = canonical.random_states(c.NUM_LAYERS, c.BATCH_SIZE, c.UNITS, c.SEED)
    return canonical.large_random(shapes, c.SEED), states, batches


def reference(c, text):
    """The float64 reference of every row."""
    from models.reference import expected

    weights, states, batches = start(c, text)
    return expected.stack(weights, states, [weights["embedding"][tokens] for tokens, _ in batches[: expected.STEPS]])


def run_row(row, c, measurement):
    """Build the row's stack from the canonical weights, prove it, time it; at one point."""
    model = IMPLEMENTATIONS[row].build(
        *start(c, measurement.data), ("SGD", 1.0), precision=measurement.precision,
        device=measurement.runtime.device_name,
    )  # fmt: skip
    of_stack = 3 * flops.language_model_flops(c.BATCH_SIZE * c.TIME_STEPS, 0, c.EMBEDDING, c.UNITS, c.NUM_LAYERS)
    return measurement.steps(model, {"stack": of_stack}, c.BATCH_SIZE, "sequences/s", details=False)


LAYOUT = {
    "title": "Scaling of an LSTM stack",
    "question": "How does the time of one step, forward and backward, depend on layers, units, batch and steps? Where is a "
    "wavefront faster than cuDNN, and where not? The stack alone, without embedding, softmax or optimizer.",
    "tables": [],
    "axes": [
        {"name": "layers", "constant": "NUM_LAYERS", "title": "Layers", "label": "layers", "mode": "stack"},
        {"name": "units", "constant": "UNITS", "title": "Units", "label": "units per layer", "mode": "stack"},
        {"name": "batch", "constant": "BATCH_SIZE", "title": "Batch", "label": "sequences per batch", "mode": "stack"},
        {"name": "steps", "constant": "TIME_STEPS", "title": "Steps", "label": "steps per sequence", "mode": "stack"},
    ],
    "ours": OURS,
    "footnotes": [
        "The stack starts from random inputs and from random gradients by its outputs. Its outputs, and its gradients by the "
        "inputs and by all weights, are proven at every point.",
        "Ours are the wavefronts alone: cudnn_stack, which is this suite's too, is cuDNN, and stands with the others.",
        "A process runs many points of a row, one after the other.",
    ],
}

BENCHMARK = Benchmark(
    script=__file__, doc=__doc__, rows=ROWS_TABLE, load=load, reference=reference, run_row=run_row, layout=LAYOUT,
    impossible=sizes.words_too_few, values=lambda c: sizes.stack_values(c, c["TIME_STEPS"]),
    modes=lambda flags: ("stack",), published=lambda c, row, mode, device: {}, protocol=lambda c: {},
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(sweep.main(BENCHMARK))
