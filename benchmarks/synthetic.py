"""A first look at a cuDNN LSTM in Keras: a small stack learns a synthetic task.

python benchmarks/synthetic.py                             # the preset's rows, this machine
python benchmarks/synthetic.py --rows=all
python benchmarks/synthetic.py --rows=keras_cudnn --bidirectional=true --epochs=10
python benchmarks/synthetic.py --list
"""

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
CONFIG = "template"         # one of CONFIGS
CONFIGS = {
    "template": dict(UNITS=64, NUM_LAYERS=2, DROPOUT=0.2, NUM_SEQUENCES=10000, TIME_STEPS=10, BATCH_SIZE=64,
                     LEARNING_RATE=1e-3, EPOCHS=50),
}
PRESETS = {
    "full": dict(ROWS="all", ROW_LIMIT_S=600.0, ROW_BUDGET_S=300.0),
    # on a CPU keras, keras_default and wavefront: what other rows show there MNIST shows too
    "quick": dict(ROWS="keras,keras_cudnn,keras_default,cudnn_stack,wavefront,wavefront_persistent", EPOCHS=5,
                  ROW_LIMIT_S=180.0, ROW_BUDGET_S=60.0),
}
UNITS = None                # LSTM units per layer and direction; None: the config's, as for the next seven
NUM_LAYERS = None           # LSTM layers
DROPOUT = None              # after every LSTM layer
NUM_SEQUENCES = None        # 80 % to train, 10 % to validate, 10 % to test
TIME_STEPS = None           # steps of two inputs per sequence
BATCH_SIZE = None           # sequences
LEARNING_RATE = None        # of Adam
EPOCHS = None               # passes over the training set
BIDIRECTIONAL = False       # whether every layer runs in both directions
ROWS = None                 # comma-separated names from --list, or all; None: the preset's
PRECISION = None            # fp32, tf32, fp16 or bf16; None: tf32 on a GPU, fp32 on a CPU
LOSS_SCALE = 1024.0         # static, of fp16
SEED = 1                    # of the sequences, the weights and the dropout masks
PROCESSES = 1               # a whole training runs once, unless more are asked for
STAGED_BATCHES = 8          # batches of the proof
ROW_LIMIT_S = None          # s; a process that takes longer is stopped; None: the preset's, as for the next one
ROW_BUDGET_S = None         # s; a row that has taken longer gets no further process
# ---------------------------------------------------------------------------
# fmt: on


def expected_ops(row, c):
    """A bidirectional layer runs two LSTMs, a stack in one call whichever it has."""
    from harness.measure.proof import UPDATE_STEPS

    return row.expected_ops(c.NUM_LAYERS * (1 + c.BIDIRECTIONAL), c.TIME_STEPS, c.DEVICE, UPDATE_STEPS)


def cannot(row, constants):
    return environments.lacks(row.framework, row.arguments.get("keras_folder"), "requirements-jax-keras-nightly.txt")


IMPLEMENTATIONS = rows.FIT_TENSORFLOW | {name: rows.FIT[name] for name in ("keras_jax", "keras_jax_loop")}
ROWS_TABLE = {name: Row.of(row, expected_ops, cannot) for name, row in IMPLEMENTATIONS.items()}


def load(c, location):
    """The generated sequences; the same for every --data."""
    from harness.data import sets

    sequences = sets.synthetic(c.NUM_SEQUENCES, c.TIME_STEPS, c.SEED)
    if len(sequences.x_train) < c.BATCH_SIZE:
        raise UserError(
            f"--batch-size={c.BATCH_SIZE}: expected at most the {len(sequences.x_train)} training sequences"
        )
    return sequences


def values(c):
    """Numbers held at once, at the least: those of a batch's stack, and the inputs of all sequences."""
    return sizes.stack_values(c, c["TIME_STEPS"], 1 + c["BIDIRECTIONAL"]) + 2 * c["NUM_SEQUENCES"] * c["TIME_STEPS"]


def start(c, sequences):
    """Weights, states and batches of the proof: the same bytes in every row."""
    from models.weights import canonical

    shapes = canonical.classifier_shapes(2, c.UNITS, c.NUM_LAYERS, (), 2, bidirectional=c.BIDIRECTIONAL)
    size = min(c.STAGED_BATCHES, len(sequences.x_train) // c.BATCH_SIZE) * c.BATCH_SIZE  # whole batches
    states = canonical.zero_states(c.NUM_LAYERS, c.BATCH_SIZE, c.UNITS, bidirectional=c.BIDIRECTIONAL)
    return shapes, canonical.large_random(shapes, c.SEED), states, (sequences.x_train[:size], sequences.y_train[:size])


def reference(c, sequences):
    """The float64 reference of every row."""
    from models.reference import expected
    from models.reference.networks import Adam

    _, weights, states, (x, y) = start(c, sequences)
    steps = range(0, len(x), c.BATCH_SIZE)
    batches = [(x[k : k + c.BATCH_SIZE], y[k : k + c.BATCH_SIZE]) for k in steps]
    return expected.classifier(Adam(c.LEARNING_RATE), weights, states, batches, [c.DROPOUT] * c.NUM_LAYERS)


def run_row(row, c, measurement):
    """Build the row's model, prove it, train it once, test it with training=False."""
    from harness.measure import training_proof
    from harness.measure.clocks import EpochClock
    from models.weights import canonical

    sequences = measurement.data
    shapes, large, _, batches = start(c, sequences)
    count = len(sequences.x_train) // c.BATCH_SIZE * c.BATCH_SIZE  # a smaller last batch would be another traced step
    trial = rows.FIT[row].build(
        large, *batches, c.BATCH_SIZE, ("Adam", c.LEARNING_RATE, 0.0), lstm_dropout=[c.DROPOUT] * c.NUM_LAYERS,
        precision=measurement.precision, loss_scale=c.LOSS_SCALE, capacity=count, seed=c.SEED,
    )  # fmt: skip
    x, y = sequences.x_train[:count], sequences.y_train[:count]
    trial.warm_up((sequences.x_valid, sequences.y_valid))

    def train(clock, plan):
        trial.load(plan.start)
        result = trial.fit(plan.x, plan.y, plan.epochs, plan.scored["val_acc"], clock)
        tested = trial.model.evaluate(
            sequences.x_test, sequences.y_test, batch_size=c.BATCH_SIZE, verbose=0, return_dict=True
        )["accuracy"]
        return {**result, "accuracy": {"val_acc": result["accuracy"]["val_acc"], "test_acc": tested}}

    def train_on(batches):
        trial.fit(x[: batches * c.BATCH_SIZE], y[: batches * c.BATCH_SIZE], 1, None, EpochClock())

    directions = 1 + c.BIDIRECTIONAL
    of_step = 3 * flops.classifier_flops(c.BATCH_SIZE, c.TIME_STEPS, 2, c.UNITS, c.NUM_LAYERS, (2,), directions)
    scored = {"val_acc": (sequences.x_valid, sequences.y_valid), "test_acc": (sequences.x_test, sequences.y_test)}
    rate = training_proof.inverse_time(c.LEARNING_RATE)
    plan = training_proof.Plan(canonical.keras_default(shapes, c.SEED), x, y, c.EPOCHS, scored, rate)
    return measurement.fit(
        trial, train, train_on, plan=plan, batch_size=c.BATCH_SIZE, flops=of_step, unit="sequences/s"
    )  # fmt: skip


LAYOUT = {
    "title": "Synthetic task",
    "question": "What does a small LSTM stack in Keras gain from cuDNN? 10,000 sequences of 10 steps × 2 inputs, a binary "
    "label from the sign of a noisy mean of non-linear terms; as published 2 layers of 64 units, batch 64, Adam 1e-3, dropout "
    "0.2, 50 epochs.",
    "tables": [
        {"title": "Accuracy and training time", "mode": "fit", "device": None, "plot": "throughput.value",
         "columns": [["validation accuracy", "accuracy.val_acc", ".4f"], ["test accuracy", "accuracy.test_acc", ".4f"],
                     ["time (s)", "fit_s", ".1f"], ["step faster than keras", "throughput.value", "speedup:keras"],
                     ["s of steps per epoch", "epoch_s", "median_range"], ["ms per step", "step_ms", "median_range"],
                     ["J per epoch", "joules.epoch", ",.0f"], ["J, whole fit", "joules.training", ",.0f"],
                     ["first call (s)", "first_call_s", ".1f"],
                     ["GPU memory, allocator", "memory_peak_bytes.allocator", "bytes"]]},
    ],
    "footnotes": [
        "Time is the whole fit with its validations and the test; every layer is trained, and validation and test run "
        "with training=False.",
        f"In wavefront TensorFlow takes up to {rows.STEPS_PER_EXECUTION} steps in one call (steps_per_execution).",
        f"In wavefront_loop and wavefront_persistent a call copies up to {rows.STEPS_PER_LOOP} batches at once and runs their "
        "steps in one XLA program (models/wavefront/compiled_loop.py), keras_jax_loop all steps of an epoch in one lax.scan.",
        "cuDNN draws the dropout masks of cudnn_stack, by a rate that is part of the graph. Its proof runs a second graph of the "
        "same code with rate 0, which may differ from the timed one in that rate alone.",
    ],
    "headline": {"table": 0, "columns": ["test accuracy", "time (s)", "step faster than keras", "ms per step"]},
}  # fmt: skip

BENCHMARK = Benchmark(
    script=__file__, doc=__doc__, rows=ROWS_TABLE, load=load, reference=reference, run_row=run_row, layout=LAYOUT,
    modes=lambda flags: ("fit",), protocol=lambda c: CONFIGS[c["CONFIG"]] | dict(BIDIRECTIONAL=False),
    published=lambda c, row, mode, device: {}, values=values,
    impossible=lambda c: sizes.too_few("sequences", c, c["BATCH_SIZE"], c["NUM_SEQUENCES"] * 8 // 10, ("BATCH_SIZE",)),
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(benchmark.main(BENCHMARK))
