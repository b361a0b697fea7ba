"""What each option of keras.layers.LSTM costs, and which of them lose cuDNN.

python benchmarks/options.py                                        # every option, this machine
python benchmarks/options.py --rows=default,recurrent_dropout,wavefront_recurrent_dropout
python benchmarks/options.py --full --device=cpu                    # the shape of PTB's medium config on a CPU
python benchmarks/options.py --list

./run_all.sh runs it where --only names it.
"""

import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness.run import benchmark, together
from harness.run.script import Benchmark, Row
from models.keras.options import OPTIONS

# fmt: off
# ---------------------------------------------------------------------------
CONFIG = None               # one of CONFIGS; None: the preset's
CONFIGS = {
    "ptb_medium": dict(UNITS=650, FEATURES=650, TIME_STEPS=35, BATCH_SIZE=20),
    "quick": dict(UNITS=32, FEATURES=16, TIME_STEPS=8, BATCH_SIZE=8),
}
PRESETS = {
    "full": dict(CONFIG="ptb_medium", BLOCKS=5, PROCESSES=1, TIMED_BATCHES=20, WARMUP_LIMIT_S=1.0, ROW_LIMIT_S=600.0),
    "quick": dict(CONFIG="quick", BLOCKS=3, PROCESSES=1, TIMED_BATCHES=10, WARMUP_LIMIT_S=0.3, ROW_LIMIT_S=120.0),
}
UNITS = None                # of each of the two layers; None: the config's, as for the next three
FEATURES = None             # of the inputs
TIME_STEPS = None           # steps per sequence
BATCH_SIZE = None           # sequences per batch
OUTPUTS = 10                # of the dense layer on the last step
ROWS = "all"                # comma-separated names from --list
PRECISION = None            # fp32 or tf32; None: tf32 on a GPU, fp32 on a CPU
LEARNING_RATE = 1.0         # of SGD
SEED = 1                    # of the weights, batches and dropouts
STAGED_BATCHES = 8          # batches, taken in turn
WARMUP_BATCHES = 3          # at least, before the clock starts
WARMUP_LIMIT_S = None       # s; a warm-up that has not settled by then ends; None: the preset's, as for the next four
TIMED_BATCHES = None        # per block
BLOCKS = None               # timed blocks per process
PROCESSES = None            # processes per row
ROW_LIMIT_S = None          # s; a row that takes longer is stopped
MIN_BLOCK_S = 0.21          # s; a block is the multiple of TIMED_BATCHES that fills it
# ---------------------------------------------------------------------------
# fmt: on

ROWS_TABLE = {
    name: Row(option.what, lambda c: {}, precisions=("fp32", "tf32"), ours=option.ours)
    for name, option in OPTIONS.items()
}


class Parent(together.Together):
    alone = tuple(name for name, option in OPTIONS.items() if option.alone)


def load(c, location):
    """Nothing: the batches are random numbers."""
    facts = {"name": "random", "title": "random sequences", "source": "generated", "reason": "", "notes": [],
             "where": "models/keras/option_models.py", "sha256": {}, "seed": c.SEED}  # fmt: skip
    return SimpleNamespace(facts=facts)


def reference(c, data):
    """Each row computes its own: models/reference/recurrent.py."""
    raise NotImplementedError


def run_row(row, c, measurement):
    """Build the option's model, see what runs, prove and time it."""
    from harness.doctor import layers
    from models.keras import option_models

    def make():
        return option_models.OptionTrial(
            OPTIONS[row], batch=c.BATCH_SIZE, steps=c.TIME_STEPS, features=c.FEATURES, units=c.UNITS, outputs=c.OUTPUTS,
            rate=c.LEARNING_RATE, staged=c.STAGED_BATCHES, seed=c.SEED, precision=measurement.precision,
        )  # fmt: skip

    return measurement.option(make, layers)


def impossible(c):
    return (
        "" if c["BATCH_SIZE"] % 2 == 0 else f"--batch-size={c['BATCH_SIZE']}: expected an even number: a row halves it"
    )


LAYOUT = {
    "title": "Options of keras.layers.LSTM",
    "question": "Which options keep cuDNN, and what does each cost? Two layers and a dense one on the last step, SGD, each "
    "option alone against the default.",
    "tables": [],
    "options": {"instead": {name: option.instead for name, option in OPTIONS.items() if option.instead}},
    "footnotes": [
        "What ran: of both layers, by a profile of the call that is timed. A training step is one call of the function that "
        "Keras' `fit` runs for each step (or for `steps_per_execution` of them), a prediction that of `predict`, with the copy "
        "of the batch to the device; in `fit`, which is timed apart, its callbacks come on top. As long as the default: its time "
        "by the default's.",
        "Every row is held to float64 NumPy (models/reference/recurrent.py): predictions, the weights' change by the first call "
        "and by further ones, losses; dropout with the masks that it drew; `float64` to 1e-11. A relu "
        "near 0 may be on in one precision and off in another: below float32 its row may err as far as rounding does that.",
        "An error is what Keras raised, its first line: a result, not a failure of this run.",
        "`ragged_buckets`: its batches have 5/8 of the default's steps on average.",
    ],
}  # fmt: skip

BENCHMARK = Benchmark(
    script=__file__, doc=__doc__, rows=ROWS_TABLE, load=load, reference=reference, run_row=run_row, layout=LAYOUT,
    modes=lambda flags: ("train", "forward"), published=lambda c, row, mode, device: {}, impossible=impossible,
    values=lambda c: 2 * (c["BATCH_SIZE"] * c["TIME_STEPS"] * c["UNITS"] + 8 * c["UNITS"] ** 2), protocol=lambda c: {},
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(benchmark.main(BENCHMARK, parent=Parent))
