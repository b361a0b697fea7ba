"""Words per second of an LSTM language model that trains on several GPUs, and how they grow with the number of GPUs.

python benchmarks/multi_gpu.py --replicas=1,2                 # every row on one GPU and on two of this host
python benchmarks/multi_gpu.py --replicas=1,2 --rows=torch_ddp,wavefront_workers --config=ptb_large --scaling=weak
python benchmarks/multi_gpu.py --device=cpu --replicas=1,2  # processes instead of GPUs: whether it works, not how fast
python benchmarks/multi_gpu.py --list

./run_all.sh runs it where more than one GPU is visible, or where --only names it.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness.run import replicas, sizes
from models import rows
from models.reference import flops

# fmt: off
# ---------------------------------------------------------------------------
CONFIG = None               # one of CONFIGS; None: the preset's
CONFIGS = {
    "stacked_lm": dict(PROTOCOL="stacked_lm", VOCABULARY=10001, EMBEDDING=128, UNITS=256, NUM_LAYERS=3, TIME_STEPS=50,
                       BATCH_SIZE=128, LEARNING_RATE=1e-3, LOSS_SCALE=65536.0, KEEP_PROB=1.0),
    "ptb_small": dict(PROTOCOL="ptb", VOCABULARY=10000, EMBEDDING=200, UNITS=200, NUM_LAYERS=2, TIME_STEPS=20,
                      BATCH_SIZE=20, LEARNING_RATE=1.0, LOSS_SCALE=1024.0, KEEP_PROB=1.0, CLIP_NORM=5.0),
    "ptb_medium": dict(PROTOCOL="ptb", VOCABULARY=10000, EMBEDDING=650, UNITS=650, NUM_LAYERS=2, TIME_STEPS=35,
                       BATCH_SIZE=20, LEARNING_RATE=1.0, LOSS_SCALE=1024.0, KEEP_PROB=0.5, CLIP_NORM=5.0),
    "ptb_large": dict(PROTOCOL="ptb", VOCABULARY=10000, EMBEDDING=1500, UNITS=1500, NUM_LAYERS=2, TIME_STEPS=35,
                      BATCH_SIZE=20, LEARNING_RATE=1.0, LOSS_SCALE=1024.0, KEEP_PROB=0.35, CLIP_NORM=10.0),
    "quick": dict(PROTOCOL="stacked_lm", VOCABULARY=1000, EMBEDDING=32, UNITS=64, NUM_LAYERS=2, TIME_STEPS=10,
                  BATCH_SIZE=8, LEARNING_RATE=1e-3, LOSS_SCALE=65536.0, KEEP_PROB=1.0),
}
PRESETS = {
    "full": dict(CONFIG="stacked_lm", BLOCKS=3, PROCESSES=3, TIMED_BATCHES=50, WARMUP_LIMIT_S=1.0, ROW_LIMIT_S=600.0,
                 ROW_BUDGET_S=180.0),
    "quick": dict(CONFIG="quick", BLOCKS=3, PROCESSES=1, TIMED_BATCHES=10, WARMUP_LIMIT_S=0.5, ROW_LIMIT_S=600.0,
                  ROW_BUDGET_S=30.0),
}
RUNS = {                    # what ./run_all.sh starts: one call each
    "full": ["--config=stacked_lm", "--config=ptb_small", "--config=ptb_medium", "--config=ptb_large"],
}
REPLICAS = "1,2"            # numbers of GPUs, or of processes on a CPU; the first is what a speedup is over where it is 1
SCALING = "weak,strong"     # weak: BATCH_SIZE on every GPU; strong: BATCH_SIZE shared among them
HOSTS = "127.0.0.1"         # addresses of this machine; workers are spread over them as over hosts
PROTOCOL = None             # stacked_lm: Adam, mean loss, the same states; ptb: SGD, clipping, states carried; None: the config's
VOCABULARY = None           # words; None: the config's, as for the next nine
EMBEDDING = None            # width of the embedding
UNITS = None                # LSTM units per layer
NUM_LAYERS = None           # LSTM layers
TIME_STEPS = None           # steps per sequence
BATCH_SIZE = None           # sequences per batch: see SCALING
LEARNING_RATE = None        # of the optimizer
LOSS_SCALE = None           # static, of fp16
KEEP_PROB = None            # 1 - dropout, on the embedding and on every layer's output
CLIP_NORM = None            # bound of the gradients' global norm
ROWS = "all"                # comma-separated names from --list
PRECISION = None            # fp32, tf32, fp16 or bf16; None: tf32 on a GPU, fp32 on a CPU
SEED = 1                    # of the weights and states
WARMUP_BATCHES = 10         # at least, before the clock starts
WARMUP_LIMIT_S = None       # s; a warm-up that has not settled by then ends; None: the preset's, as for the next five
TIMED_BATCHES = None        # per block
BLOCKS = None               # timed blocks per process
PROCESSES = None            # processes per row and GPU, one after the other
ROW_LIMIT_S = None          # s; a process that takes longer is stopped
ROW_BUDGET_S = None         # s; a row that has taken longer gets no further process
MIN_BLOCK_S = 0.25          # s; a block is the multiple of TIMED_BATCHES that fills it
STAGED_BATCHES = 8          # batches on the device, taken in turn
# ---------------------------------------------------------------------------
# fmt: on

ROWS_TABLE = {name: replicas.of_row(row) for name, row in rows.REPLICATED.items()}
PUBLISHED = json.loads(Path(__file__).with_name("published.json").read_text())["ptb"]["speed"]["large"]["two_gpus"]


def load(c, location):
    """Penn Treebank (or the embedded text)."""
    from harness.data import batches, sets

    text = sets.ptb(*location)
    batches.check_length(len(text.train), c.BATCH_SIZE, c.TIME_STEPS)
    return text


def start(c, text):
    """Weights, states and whole batches of the proof and of the timing: the same bytes in every row and every worker."""
    from harness.data.batches import language_model_batches
    from models.weights import canonical

    shapes = canonical.language_model_shapes(c.VOCABULARY, c.EMBEDDING, c.UNITS, c.NUM_LAYERS)
    tokens = text.train.clip(max=c.VOCABULARY - 1)  # a smaller --vocabulary joins the rarest words
    inputs, targets = language_model_batches(tokens, c.BATCH_SIZE, c.TIME_STEPS)
    batches = [(inputs[k], targets[k]) for k in range(min(c.STAGED_BATCHES, len(inputs)))]
    states = canonical.random_states(c.NUM_LAYERS, c.BATCH_SIZE, c.UNITS, c.SEED)
    return canonical.large_random(shapes, c.SEED), states, batches


def reference(c, text):
    """The float64 reference of every row: one device with the whole batch."""
    from models.reference import expected
    from models.reference.networks import SGD, Adam

    if c.PROTOCOL == "stacked_lm":
        return expected.language_model("mean", Adam(c.LEARNING_RATE), *start(c, text), carry_states=False)
    optimizer = SGD(c.LEARNING_RATE, clip_norm=c.CLIP_NORM)
    return expected.language_model(
        "sum_over_time", optimizer, *start(c, text), carry_states=True, keep_prob=c.KEEP_PROB
    )


def run_row(row, c, measurement):
    """In each of the row's workers: build its model from the canonical weights, prove it, time it."""
    group = measurement.group
    measurement.runtime.seed(c.SEED + group.rank)  # every replica draws dropout masks of its own
    optimizer, options = ("Adam", c.LEARNING_RATE), {}
    if c.PROTOCOL == "ptb":
        optimizer = ("SGD", c.LEARNING_RATE)
        options = dict(reduction="sum_over_time", clip_norm=c.CLIP_NORM, keep_prob=c.KEEP_PROB, carry_states=True)
    model = rows.REPLICATED[row].build(
        *start(c, measurement.data), optimizer, precision=measurement.precision, device=measurement.runtime.device_name,
        loss_scale=c.LOSS_SCALE, group=group, replicas=measurement.gpus, **options,
    )  # fmt: skip
    step = flops.flops_of_modes(c, c.EMBEDDING)["train"]
    return measurement.steps(model, {"train": step}, c.BATCH_SIZE * c.TIME_STEPS, "words/s")


LAYOUT = {
    "title": "Several GPUs",
    "question": "How do words per second grow with the number of GPUs that train a language model together? Weak scaling: the "
    "batch on every GPU stays; strong scaling: the whole batch stays.",
    "tables": [],
    "replicas": {
        "mode": "train",
        "published": [
            {"row": "BasicLSTMCell", "description": "published, not run here", "reason": "two Tesla P40", "gpus": 2,
             "config": "ptb_large", "words": PUBLISHED["P40 (words/s)"], "speedup": PUBLISHED["P40 (speedup)"]},
        ],
    },
    "footnotes": [
        "On one GPU a row is the single-GPU row of its name, with nothing of the others around it. Speedup: words per second "
        "over those of the same row on one GPU; efficiency: speedup by GPUs.",
        "N GPUs are held to the float64 reference of one device with the whole batch: outputs, losses, gradients, updates. After "
        "the timed blocks all replicas' weights have to be the same, bit by bit.",
        "A block took as long as in the worker where it took longest. Communication: the time of NCCL's kernels in a step, over "
        "a profiled block, in the worker where they took least; where one process has all GPUs the mean of these, which includes "
        "waiting and may exceed an unprofiled step. A part of it may overlap with the backward pass. The proof's kernels are the "
        "first worker's.",
        "Published: the tutorial's BasicLSTMCell, large config, on two NVIDIA Tesla P40, TensorFlow 1.8; 15,000 words/s on one.",
        "On a CPU replicas are processes, or devices that TensorFlow or JAX make of one CPU, which share its cores: such figures "
        "say nothing about GPUs, and their tables have neither speedup nor efficiency.",
    ],
}  # fmt: skip

BENCHMARK = replicas.Benchmark(
    script=__file__, doc=__doc__, rows=ROWS_TABLE, load=load, reference=reference, run_row=run_row, layout=LAYOUT,
    modes=lambda flags: ("train",), published=lambda c, row, mode, device: {}, impossible=sizes.words_too_few,
    values=lambda c: sizes.language_model_values(c, c["TIME_STEPS"]), protocol=lambda c: {},
    workers=lambda row, gpus: 1 if rows.REPLICATED[row].one_process else gpus,
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(replicas.main(BENCHMARK))
