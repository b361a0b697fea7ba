"""Accuracy and training time of an LSTM on MNIST: `model.fit` with the vanilla LSTM and with cuDNN, and their peers.

python benchmarks/mnist.py                                 # the preset's rows, this machine
python benchmarks/mnist.py --rows=all                      # PyTorch's cells too, op by op: minutes each
python benchmarks/mnist.py --rows=keras,keras_cudnn --epochs=1
python benchmarks/mnist.py --list
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness.errors import UserError
from harness.run import benchmark, environments, sizes
from harness.run.script import Benchmark, Row
from models import rows
from models.reference import flops

# fmt: off
# ---------------------------------------------------------------------------
CONFIG = "published"        # one of CONFIGS
CONFIGS = {
    "published": dict(UNITS=128, NUM_LAYERS=2, DENSE_UNITS=32, DROPOUT_1=0.2, DROPOUT_2=0.1, DROPOUT_3=0.2,
                      BATCH_SIZE=32, LEARNING_RATE=1e-3, DECAY=1e-5, EPOCHS=3),
    # the same network, whose rate falls from 3e-3 to 0.45e-3: what accuracy the rows reach in 3 epochs
    "decaying": dict(UNITS=128, NUM_LAYERS=2, DENSE_UNITS=32, DROPOUT_1=0.2, DROPOUT_2=0.1, DROPOUT_3=0.2,
                     BATCH_SIZE=32, LEARNING_RATE=3e-3, DECAY=1e-3, EPOCHS=3),
}
PRESETS = {                 # ROWS: those that train in about a minute; PyTorch's cells, op by op, take many
    "full": dict(ROW_LIMIT_S=900.0, ROW_BUDGET_S=300.0,
                 ROWS="keras,keras_cudnn,keras_xla,keras_default,cudnn_stack,wavefront,wavefront_loop,wavefront_persistent,"
                      "torch_lstm,torch_lstm_graph,jax_scan,jax_cudnn,keras_jax,keras_jax_loop,keras_jax_cudnn,keras_torch"),
    "quick": dict(EPOCHS=1, TRAIN_SEQUENCES=9600, ROW_LIMIT_S=180.0, ROW_BUDGET_S=60.0,
                  ROWS="keras,keras_cudnn,keras_default,cudnn_stack,wavefront,wavefront_persistent,"
                       "torch_lstm,torch_lstm_graph,jax_scan,jax_cudnn,keras_jax,keras_jax_cudnn"),
}
UNITS = None                # LSTM units per layer; None: the config's, as for the next nine
NUM_LAYERS = None           # LSTM layers
DENSE_UNITS = None          # of the relu layer between LSTM and softmax
DROPOUT_1 = None            # after the first LSTM layer
DROPOUT_2 = None            # after the second LSTM layer
DROPOUT_3 = None            # after the relu layer
BATCH_SIZE = None           # sequences
LEARNING_RATE = None        # of Adam
DECAY = None                # rate at step t is LEARNING_RATE / (1 + DECAY t)
EPOCHS = None               # passes over the training set
TRAIN_SEQUENCES = None      # images to train on, at most; None: all, or the preset's
ROWS = None                 # comma-separated names from --list, or all; None: the preset's
PRECISION = None            # fp32, tf32, fp16 or bf16; None: tf32 on a GPU, fp32 on a CPU
LOSS_SCALE = 1024.0         # static, of fp16
SEED = 1                    # of the weights, the dropout masks and, but for Keras on TensorFlow, the order of the images
PROCESSES = 1               # a whole training runs once, unless more are asked for
STAGED_BATCHES = 8          # batches of the proof
ROW_LIMIT_S = None          # s; a process that takes longer is stopped; None: the preset's, as for the next one
ROW_BUDGET_S = None         # s; a row that has taken longer gets no further process
# ---------------------------------------------------------------------------
# fmt: on

TIME_STEPS = 28  # rows of an image


def expected_ops(row, c):
    """What must run in the proof's last steps."""
    from harness.measure.proof import UPDATE_STEPS

    return row.expected_ops(c.NUM_LAYERS, TIME_STEPS, c.DEVICE, UPDATE_STEPS)


def cannot(row, constants):
    return environments.lacks(row.framework, row.arguments.get("keras_folder"), "requirements-jax-keras-nightly.txt")


ROWS_TABLE = {name: Row.of(row, expected_ops, cannot) for name, row in rows.FIT.items()}
PUBLISHED = json.loads(Path(__file__).with_name("published.json").read_text())["mnist"]


def load(c, location):
    """MNIST (or the embedded digits)."""
    from harness.data import sets

    digits = sets.mnist(*location)
    if len(digits.x_train) < c.BATCH_SIZE:
        raise UserError(f"--batch-size={c.BATCH_SIZE}: expected at most the {len(digits.x_train)} training images")
    return digits


def images(x):
    """Pixels / 255: [images, 28 steps, 28 features] float32."""
    import numpy as np

    return np.float32(x) / np.float32(255)


def start(c, digits):
    """Weights, states and batches of the proof: the same bytes in every row."""
    from models.weights import canonical

    shapes = canonical.classifier_shapes(28, c.UNITS, c.NUM_LAYERS, (c.DENSE_UNITS,), 10)
    size = min(c.STAGED_BATCHES, len(digits.x_train) // c.BATCH_SIZE) * c.BATCH_SIZE  # whole batches
    batches = images(digits.x_train[:size]), digits.y_train[:size]
    states = canonical.zero_states(c.NUM_LAYERS, c.BATCH_SIZE, c.UNITS)
    return shapes, canonical.large_random(shapes, c.SEED), states, batches


def reference(c, digits):
    """The float64 reference of every row."""
    from models.reference import expected
    from models.reference.networks import Adam

    _, weights, states, (x, y) = start(c, digits)
    steps = range(0, len(x), c.BATCH_SIZE)
    batches = [(x[k : k + c.BATCH_SIZE], y[k : k + c.BATCH_SIZE]) for k in steps]
    optimizer = Adam(c.LEARNING_RATE, decay=c.DECAY)
    return expected.classifier(optimizer, weights, states, batches, (c.DROPOUT_1, c.DROPOUT_2), c.DROPOUT_3)


def run_row(row, c, measurement):
    """Build the row's model, prove it, and train it once from Keras' default initialisation."""
    from harness.measure import training_proof
    from harness.measure.clocks import EpochClock
    from models.weights import canonical

    digits = measurement.data
    shapes, large, _, batches = start(c, digits)
    count = min(c.TRAIN_SEQUENCES or len(digits.x_train), len(digits.x_train))
    count -= count % c.BATCH_SIZE  # a smaller last batch would be traced anew: another step than the proven one
    x, y = images(digits.x_train[:count]), digits.y_train[:count]
    test = images(digits.x_test), digits.y_test
    trial = rows.FIT[row].build(
        large, *batches, c.BATCH_SIZE, ("Adam", c.LEARNING_RATE, c.DECAY), lstm_dropout=(c.DROPOUT_1, c.DROPOUT_2),
        dense_dropout=c.DROPOUT_3, precision=measurement.precision, device=measurement.runtime.device_name,
        loss_scale=c.LOSS_SCALE, capacity=count, seed=c.SEED,
    )  # fmt: skip
    trial.warm_up(test)

    def train(clock, plan):
        trial.load(plan.start)
        return trial.fit(plan.x, plan.y, plan.epochs, plan.scored["val_acc"], clock)

    def train_on(batches):
        size = min(batches * c.BATCH_SIZE, count)
        trial.fit(x[:size], y[:size], -(-batches * c.BATCH_SIZE // size), None, EpochClock())

    of_step = 3 * flops.classifier_flops(c.BATCH_SIZE, TIME_STEPS, 28, c.UNITS, c.NUM_LAYERS, (c.DENSE_UNITS, 10))
    rate = training_proof.inverse_time(c.LEARNING_RATE, c.DECAY)
    plan = training_proof.Plan(canonical.keras_default(shapes, c.SEED), x, y, c.EPOCHS, {"val_acc": test}, rate)
    return measurement.fit(
        trial, train, train_on, plan=plan, batch_size=c.BATCH_SIZE, flops=of_step, unit="images/s"
    )  # fmt: skip


def published(c, row, mode, device):
    return PUBLISHED.get(row, {}) if device == "gpu" else {}


GPUS = ("K80", "P100")
LAYOUT = {
    "title": "MNIST, one image row per step",
    "question": "How much faster than the vanilla LSTM does the cuDNN LSTM train, and what does it cost in accuracy? "
    "Two LSTM layers of 128 units, Dense(32), Dense(10), batch 32, 3 epochs, through model.fit (torch_… and jax_…: a loop of "
    "their own); validation on the test set.",
    "tables": [
        {"title": "Accuracy and training time", "mode": "fit", "device": None, "plot": "throughput.value",
         "columns": [["(acc, val_acc)", "accuracy", "pair"],
                     *([f"{gpu}, published (acc, val_acc)", f"published.{gpu} (acc, val_acc)", "pair"] for gpu in GPUS),
                     ["time (s)", "fit_s", ".1f"],
                     *([f"{gpu}, published (s)", f"published.{gpu} (s)", ".2f"] for gpu in GPUS),
                     ["step faster than keras", "throughput.value", "speedup:keras"],
                     ["step against the fastest peer", "throughput.value", "speedup:fastest peer"],
                     ["s of steps per epoch", "epoch_s", "median_range"], ["ms per step", "step_ms", "median_range"],
                     ["J per epoch", "joules.epoch", ",.0f"], ["J, whole fit", "joules.training", ",.0f"],
                     ["first call (s)", "first_call_s", ".1f"], ["GPU utilisation (%)", "gpu_utilisation", ".0f"],
                     ["GPU memory, allocator", "memory_peak_bytes.allocator", "bytes"]]},
    ],
    "footnotes": [
        "The fastest peer is the fastest proven row of a table that is not this suite's own "
        f"({', '.join(rows.ours(rows.FIT))}).",
        "Time is the whole fit with its validations. Steps per epoch and per step are training alone. The first call "
        "(tracing, compiling, one batch) comes before and is not in it.",
        "The published vanilla LSTM used activation=\"relu\"; here it is tanh in every row, which cuDNN computes too.",
        "Training takes whole batches; images that do not fill one are left out (none of MNIST's 60,000).",
        "Of scikit-learn's digits, the embedded stand-in, there are 1,497 to train on and 300 to test.",
        "Dropout's rate is a variable of the model, so that the step proven with dropout 0 is the one that is timed.",
        f"Keras' fit feeds every batch from the host. In wavefront TensorFlow takes up to {rows.STEPS_PER_EXECUTION} steps in "
        "one call (steps_per_execution).",
        f"In wavefront_loop and wavefront_persistent a call copies up to {rows.STEPS_PER_LOOP} batches at once and runs "
        "their steps in one XLA program, validation too (models/wavefront/compiled_loop.py).",
        "In keras_jax_loop Keras stacks the batches of a call on the host. A scan takes as many steps, up to "
        f"{rows.STEPS_PER_LOOP}, as divide those of an epoch, since Keras takes the rest step by step. The proof runs scans of "
        "one and three steps: other programs around the same traced step.",
        "The loops of torch_… and jax_… keep the data set on the device, draw its order and gather their batches there, in the "
        "timed steps.",
        "cuDNN draws the dropout masks of cudnn_stack, torch_lstm_graph and cudnn_best, by a rate that is part of the graph. "
        "Their proof runs a second graph of the same code with rate 0, which may differ from the timed one in that rate alone.",
    ],
    "headline": {"table": 0, "columns": ["(acc, val_acc)", "time (s)", "step faster than keras", "ms per step",
                                         "K80, published (s)", "P100, published (s)"]},
}  # fmt: skip

BENCHMARK = Benchmark(
    script=__file__, doc=__doc__, rows=ROWS_TABLE, load=load, reference=reference, run_row=run_row, layout=LAYOUT,
    modes=lambda flags: ("fit",), published=published, values=lambda c: sizes.stack_values(c, TIME_STEPS),
    impossible=lambda c: sizes.too_few("images", c, c["BATCH_SIZE"], sizes.MNIST_IMAGES, ("BATCH_SIZE",)),
    protocol=lambda c: CONFIGS["published"] | {"TRAIN_SEQUENCES": None},
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(benchmark.main(BENCHMARK))
