"""Sequences per second of a stacked LSTM language model, forward-only and entire training, and of its LSTM stack alone.

python benchmarks/stacked_lm.py                                     # every row, this machine
python benchmarks/stacked_lm.py --rows=keras,keras_cudnn --precision=fp16
python benchmarks/stacked_lm.py --full --device=cpu                 # the published protocol on a CPU
python benchmarks/stacked_lm.py --list
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness.run import benchmark, sizes
from harness.run.script import Benchmark, Row
from models import rows
from models.reference import flops

# fmt: off
# ---------------------------------------------------------------------------
CONFIG = None               # one of CONFIGS; None: the preset's
CONFIGS = {
    "published": dict(VOCABULARY=10001, EMBEDDING=128, UNITS=256, NUM_LAYERS=3, TIME_STEPS=50, BATCH_SIZE=128),
    # MNIST's stack under a small softmax: its speed step by step, which model.fit hides in mnist.py.
    "mnist_stack": dict(VOCABULARY=10, EMBEDDING=28, UNITS=128, NUM_LAYERS=2, TIME_STEPS=28, BATCH_SIZE=32),
    "quick": dict(VOCABULARY=10001, EMBEDDING=128, UNITS=256, NUM_LAYERS=3, TIME_STEPS=20, BATCH_SIZE=8),
}
PRESETS = {
    "full": dict(CONFIG="published", BLOCKS=3, PROCESSES=3, TIMED_BATCHES=50, WARMUP_LIMIT_S=1.0, ROW_LIMIT_S=600.0,
                 ROW_BUDGET_S=120.0),
    "quick": dict(CONFIG="quick", BLOCKS=3, PROCESSES=1, TIMED_BATCHES=5, WARMUP_LIMIT_S=0.5, ROW_LIMIT_S=600.0,
                  ROW_BUDGET_S=30.0),
}
VOCABULARY = None           # words; None: the config's, as for the next five
EMBEDDING = None            # width of the embedding
UNITS = None                # LSTM units per layer
NUM_LAYERS = None           # LSTM layers
TIME_STEPS = None           # steps per sequence
BATCH_SIZE = None           # sequences per batch
ROWS = "all"                # comma-separated names from --list
PRECISION = None            # fp32, tf32, fp16 or bf16; None: tf32 on a GPU, fp32 on a CPU
LEARNING_RATE = 1e-3        # of Adam
LOSS_SCALE = 65536.0        # static, of fp16
SEED = 1                    # of the weights and states
WARMUP_BATCHES = 10         # at least, before the clock starts
WARMUP_LIMIT_S = None       # s; a warm-up that has not settled by then ends; None: the preset's, as for the next five
TIMED_BATCHES = None        # per block
BLOCKS = None               # timed blocks per process
PROCESSES = None            # processes per row
ROW_LIMIT_S = None          # s; a process that takes longer is stopped
ROW_BUDGET_S = None         # s; a row that has taken longer gets no further process
MIN_BLOCK_S = 0.21          # s; a block is the multiple of TIMED_BATCHES that fills it; five hold a second of Joules
STAGED_BATCHES = 8          # batches on the device, taken in turn
# ---------------------------------------------------------------------------
# fmt: on

ROWS_TABLE = {name: Row.of(row) for name, row in rows.LANGUAGE_MODEL.items()}
OURS = rows.ours(rows.LANGUAGE_MODEL)
PUBLISHED = json.loads(Path(__file__).with_name("published.json").read_text())["stacked_lm"]


def load(c, location):
    """Penn Treebank (or the embedded text)."""
    from harness.data import batches, sets

    text = sets.ptb(*location)
    batches.check_length(len(text.train), c.BATCH_SIZE, c.TIME_STEPS)
    return text


def start(c, text):
    """Weights, states and batches of the proof and of the timing: the same bytes in every row."""
    from harness.data.batches import language_model_batches
    from models.weights import canonical

    shapes = canonical.language_model_shapes(c.VOCABULARY, c.EMBEDDING, c.UNITS, c.NUM_LAYERS)
    tokens = text.train.clip(max=c.VOCABULARY - 1)  # a smaller --vocabulary joins the rarest words
    inputs, targets = language_model_batches(tokens, c.BATCH_SIZE, c.TIME_STEPS)
    batches = [(inputs[k], targets[k]) for k in range(min(c.STAGED_BATCHES, len(inputs)))]
    states = canonical.random_states(c.NUM_LAYERS, c.BATCH_SIZE, c.UNITS, c.SEED)
    return canonical.large_random(shapes, c.SEED), states, batches


def reference(c, text):
    """The float64 reference of every row."""
    from models.reference import expected
    from models.reference.networks import Adam

    return expected.language_model("mean", Adam(c.LEARNING_RATE), *start(c, text), carry_states=False)


def run_row(row, c, measurement):
    """Build the row's model from the canonical weights, prove it, time it."""
    given = start(c, measurement.data)
    model = rows.LANGUAGE_MODEL[row].build(
        *given, ("Adam", c.LEARNING_RATE), precision=measurement.precision,
        device=measurement.runtime.device_name, loss_scale=c.LOSS_SCALE,
    )  # fmt: skip
    of_modes = flops.flops_of_modes(c, c.EMBEDDING)
    return measurement.steps(model, of_modes, c.BATCH_SIZE, "sequences/s", batches=given[-1])


def published(c, row, mode, device):
    figures = PUBLISHED[device].get(row, {}).get(mode)
    return dict(zip(("wall", "elapsed", "sequences"), figures, strict=True)) if figures else {}


COLUMNS = [
    ["wall time (s)", "step_ms.median", ".5f*0.001"],
    ["elapsed time, 50 batches (s)", "step_ms.median", ".4f*0.05"],
    ["sequences/s", "throughput.value", ",.1f"],
    ["ms per batch", "step_ms", "median_range"],
    ["against keras", "throughput.value", "speedup:keras"],
    ["against the fastest peer", "throughput.value", "speedup:fastest peer"],
    ["published wall time (s)", "published.wall", ".4f"],
    ["published elapsed time (s)", "published.elapsed", ".4f"],
    ["published sequences/s", "published.sequences", ",.4f"],
    ["one step, p50 (ms)", "one_step.p50_ms", ".3f"],
    ["one step, p99 (ms)", "one_step.p99_ms", ".3f"],
    ["J per batch", "joules.batch", ".3g"],
    ["first call (s)", "first_call_s", ".1f"],
    ["GPU memory, allocator", "memory_peak_bytes.allocator", "bytes"],
    ["GPU utilisation (%)", "gpu_utilisation", ".0f"],
    ["share of a large matmul's FLOP/s", "share_of_matmul", "percent"],
]
ELAPSED, RATE = "published elapsed time (s)", "published sequences/s"
CONTRADICTIONS = [  # device, row, mode, columns, why
    ("cpu", "while_loop", "train", [ELAPSED, RATE],
     "As printed, but 0.921 s per batch is 46.05 s for 50 batches, not 46.4985 s, of which the printed sequences/s are."),
    *(("cpu", row, "train", [ELAPSED, RATE],
       "As printed, but elapsed time and sequences/s are those of the document's GPU table.")
      for row in ("static_eager", "static_graph")),
    ("gpu", "static_eager", "forward", [RATE],
     "As printed, but 128 sequences in 1.2839 s are 99.7 sequences/s, not 9.6939."),
]  # fmt: skip
MODES = {  # mode: its table's title; all are timed in one process
    "train": "Entire training, Adam 1e-3", "forward": "Forward only", "stack": "LSTM stack alone, forward and backward",
}  # fmt: skip
LAYOUT = {
    "title": "Stacked LSTM language model",
    "question": "How many sequences per second does each way to run a stacked LSTM language model manage? "
    "Vocabulary 10,001, embedding 128, 3 layers of 256 units, 50 steps, batch 128 in the published config. Published "
    "figures: GPU GeForce RTX 2080 Ti, CPU an Intel Xeon of 6 cores (model 63); TensorFlow 2.0.0-alpha0, CUDA 10.0, cuDNN 7.6.2.",
    "tables": [
        {"title": title, "mode": mode, "device": None, "columns": COLUMNS,
         "plot": "throughput.value", "plot_published": {"published": "published.sequences"}}
        for mode, title in MODES.items()
    ],
    "footnotes": [
        "Forward only: logits and loss with training=False. Keras runs cuDNN in its training mode even so, which keeps what a "
        "backward pass would need; cudnn_stack runs its inference mode. The initial state of every batch is the same tensor; it "
        "is an argument of the timed function, so its values do not change the work. Initial values are the proof's: "
        "large random weights, states that are not zero.",
        "The stack alone starts from the embedded tokens and from random gradients by its outputs: no embedding, softmax or "
        "optimizer, no dropout. Its gradients by the inputs and by all weights are proven like those of the whole model.",
        "At fp16 and bf16 the forward pass and the stack alone of PyTorch start from weights in 16 bits; in the other frameworks "
        "they cast them from float32 at every call, as a training step of PyTorch does after its update.",
        f"The fastest peer is the fastest proven row of a table that is not this suite's own ({', '.join(OURS)}).",
        *({"device": device, "row": row, "mode": mode, "column": column, "text": text}
          for device, row, mode, columns, text in CONTRADICTIONS for column in columns),
    ],
    "headline": {"table": 0, "columns": ["ms per batch", "sequences/s", "against keras", "against the fastest peer",
                                         "published sequences/s"]},
}  # fmt: skip

BENCHMARK = Benchmark(
    script=__file__, doc=__doc__, rows=ROWS_TABLE, load=load, reference=reference, run_row=run_row, layout=LAYOUT,
    modes=lambda flags: tuple(MODES), published=published, impossible=sizes.words_too_few,
    values=lambda c: sizes.language_model_values(c, c["TIME_STEPS"]),
    protocol=lambda c: CONFIGS["published"] | {"LEARNING_RATE": 1e-3},
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(benchmark.main(BENCHMARK))
