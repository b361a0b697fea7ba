"""Words per second and perplexity of an LSTM language model on PTB.

python benchmarks/ptb.py                                  # speed of every row, this machine
python benchmarks/ptb.py --rows=keras_cudnn --config=small
python benchmarks/ptb.py --train --config=small --rows=keras_cudnn    # the whole schedule, test perplexity
python benchmarks/ptb.py --list
"""

import json
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness.errors import UserError
from harness.run import benchmark, sizes
from harness.run.script import Benchmark, Row
from models import rows
from models.reference import flops

# fmt: off
# ---------------------------------------------------------------------------
CONFIG = None               # one of CONFIGS; None: the preset's
CONFIGS = {                 # Zaremba et al. 2014, as in TensorFlow's PTB tutorial
    # FLAT_EPOCHS: the tutorial's perplexities were reached with one epoch more at the full rate than the paper's text and
    # the tutorial's later versions say (4, 6, 14).
    "small": dict(UNITS=200, TIME_STEPS=20, VOCABULARY=10000, RANDOM_WORDS=False, KEEP_PROB=1.0, CLIP_NORM=5.0,
                  EPOCHS=13, FLAT_EPOCHS=5, LR_DECAY=0.5, INIT_SCALE=0.1),
    "medium": dict(UNITS=650, TIME_STEPS=35, VOCABULARY=10000, RANDOM_WORDS=False, KEEP_PROB=0.5, CLIP_NORM=5.0,
                   EPOCHS=39, FLAT_EPOCHS=7, LR_DECAY=0.8, INIT_SCALE=0.05),
    "large": dict(UNITS=1500, TIME_STEPS=35, VOCABULARY=10000, RANDOM_WORDS=False, KEEP_PROB=0.35, CLIP_NORM=10.0,
                  EPOCHS=55, FLAT_EPOCHS=15, LR_DECAY=1 / 1.15, INIT_SCALE=0.04),
    # The setting of PyTorch's word_language_model that is published beside the tutorial's; timing only.
    "word_language_model": dict(UNITS=1500, TIME_STEPS=35, VOCABULARY=35000, RANDOM_WORDS=True, KEEP_PROB=0.35,
                                CLIP_NORM=10.0, EPOCHS=1, FLAT_EPOCHS=0, LR_DECAY=1.0, INIT_SCALE=0.04),
}
PRESETS = {
    "full": dict(CONFIG="large", BLOCKS=3, PROCESSES=3, TIMED_BATCHES=50, WARMUP_LIMIT_S=1.0, ROW_LIMIT_S=7200.0,
                 ROW_BUDGET_S=120.0),
    "quick": dict(CONFIG="small", BLOCKS=3, PROCESSES=1, TIMED_BATCHES=5, WARMUP_LIMIT_S=0.5, ROW_LIMIT_S=600.0,
                  ROW_BUDGET_S=30.0, EPOCHS=1, TRAIN_WORDS=40000, EVAL_WORDS=8000),
}
RUNS = {                    # what ./run_all.sh starts: one call each
    "full": ["--config=large", "--config=small --train --rows=keras_cudnn"],  # 13 epochs take minutes
    "quick": ["--config=small", "--config=small --train --rows=keras"],
}
UNITS = None                # LSTM units per layer, and width of the embedding; None: the config's, as for the next nine
TIME_STEPS = None           # steps per sequence
VOCABULARY = None           # words
RANDOM_WORDS = None         # random words instead of PTB's
KEEP_PROB = None            # 1 - dropout, on the embedding and on every layer's output
CLIP_NORM = None            # bound of the gradients' global norm
EPOCHS = None               # of --train
FLAT_EPOCHS = None          # epochs before the learning rate falls
LR_DECAY = None             # factor per epoch after that
INIT_SCALE = None           # --train starts from uniform random weights within this
NUM_LAYERS = 2              # LSTM layers
BATCH_SIZE = 20             # sequences
LEARNING_RATE = 1.0         # of SGD
TRAIN_WORDS = None          # words to train on; None: all, or the preset's
EVAL_WORDS = None           # words to validate and to test on; None: all, or the preset's
ROWS = "all"                # comma-separated names from --list
PRECISION = None            # fp32, tf32, fp16 or bf16; None: tf32 on a GPU, fp32 on a CPU
LOSS_SCALE = 1024.0         # static, of fp16
SEED = 1                    # of the weights and states; with --train plus the number of the process
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

# Other ways to run the same cells, which stacked_lm.py compares.
LEFT_OUT = ("eager", "unrolled", "static_eager", "keras_cudnn_eager", "cudnn_stack_xla")
IMPLEMENTATIONS = {name: row for name, row in rows.LANGUAGE_MODEL.items() if name not in LEFT_OUT}
ROWS_TABLE = {name: Row.of(row) for name, row in IMPLEMENTATIONS.items()}
OURS = rows.ours(IMPLEMENTATIONS)
PUBLISHED = json.loads(Path(__file__).with_name("published.json").read_text())["ptb"]


def load(c, location):
    """Penn Treebank (or the embedded text), or random words of a vocabulary that PTB does not have."""
    from harness.data import batches, sets

    text = sets.random_words(c.VOCABULARY, c.SEED) if c.RANDOM_WORDS else sets.ptb(*location)
    batches.check_length(len(text.train[: c.TRAIN_WORDS]), c.BATCH_SIZE, c.TIME_STEPS)
    return text


def start(c, text):
    """Weights, states and batches of the proof and of the timing: the same bytes in every row."""
    from harness.data.batches import language_model_batches
    from models.weights import canonical

    inputs, targets = language_model_batches(words(c, text.train, c.TRAIN_WORDS), c.BATCH_SIZE, c.TIME_STEPS)
    batches = [(inputs[k], targets[k]) for k in range(min(c.STAGED_BATCHES, len(inputs)))]
    states = canonical.random_states(c.NUM_LAYERS, c.BATCH_SIZE, c.UNITS, c.SEED)
    return canonical.large_random(shapes(c), c.SEED), states, batches


def shapes(c):
    from models.weights import canonical

    return canonical.language_model_shapes(c.VOCABULARY, c.UNITS, c.UNITS, c.NUM_LAYERS)


def words(c, tokens, limit):
    return tokens[:limit].clip(max=c.VOCABULARY - 1)  # a smaller --vocabulary joins the rarest words


def reference(c, text):
    """The float64 reference of every row."""
    from models.reference import expected
    from models.reference.networks import SGD

    optimizer = SGD(c.LEARNING_RATE, clip_norm=c.CLIP_NORM)
    return expected.language_model(
        "sum_over_time", optimizer, *start(c, text), carry_states=True, keep_prob=c.KEEP_PROB
    )


def run_row(row, c, measurement):
    """Build the row's model from the canonical weights, prove it, and time its steps or run the whole schedule."""
    if "train" in c.FLAGS and c.RANDOM_WORDS:
        raise UserError(f"--train --config={c.CONFIG}: nothing can be learned from random words; name another config")
    seed = c.SEED + measurement.process if "train" in c.FLAGS else c.SEED  # each whole training of a row has its own
    measurement.runtime.seed(seed)  # of the dropout masks, where the framework draws them
    given = start(c, measurement.data)
    model = IMPLEMENTATIONS[row].build(
        *given, ("SGD", c.LEARNING_RATE), precision=measurement.precision,
        device=measurement.runtime.device_name, reduction="sum_over_time", clip_norm=c.CLIP_NORM, keep_prob=c.KEEP_PROB,
        carry_states=True, loss_scale=c.LOSS_SCALE,
    )  # fmt: skip
    if "train" in c.FLAGS:
        schedule = schedule_of(c, measurement.data)
        return measurement.training(model, lambda timed: train(c, model, measurement.data, seed, timed), schedule)
    of_modes, words = flops.flops_of_modes(c, c.UNITS), c.BATCH_SIZE * c.TIME_STEPS
    return measurement.steps(model, of_modes, words, "words/s", batches=given[-1])


def schedule_of(c, text):
    """What `train` has to do, for the proof."""
    from harness.data.batches import language_model_batches, language_model_tail
    from harness.measure import training_proof
    from models.weights import canonical

    def pieces(tokens, limit, batch_size):
        return language_model_batches(words(c, tokens, limit), batch_size, c.TIME_STEPS)

    zero = {size: canonical.zero_states(c.NUM_LAYERS, size, c.UNITS) for size in (1, c.BATCH_SIZE)}
    rest = language_model_tail(words(c, text.test, c.EVAL_WORDS), 1, c.TIME_STEPS)
    test = [*zip(*pieces(text.test, c.EVAL_WORDS, 1), strict=True), *([rest] if rest[0].size else [])]
    valid = list(zip(*pieces(text.valid, c.EVAL_WORDS, c.BATCH_SIZE), strict=True))
    rates = training_proof.flat_then_decaying(c.LEARNING_RATE, c.EPOCHS, c.FLAT_EPOCHS, c.LR_DECAY)
    texts = {"valid": (valid, zero[c.BATCH_SIZE]), "test": (test, zero[1])}
    return training_proof.Schedule(rates, pieces(text.train, c.TRAIN_WORDS, c.BATCH_SIZE), texts)


def train(c, model, text, seed, timed):
    """The published schedule: perplexity after the last epoch, seconds of each epoch's training part."""
    from harness.data.batches import language_model_batches, language_model_tail
    from models.weights import canonical

    def staged(tokens, limit, batch_size):
        batches = language_model_batches(words(c, tokens, limit), batch_size, c.TIME_STEPS)
        return [model.stage(*batch) for batch in zip(*batches, strict=True)]

    zero = {size: canonical.zero_states(c.NUM_LAYERS, size, c.UNITS) for size in (1, c.BATCH_SIZE)}
    model.start_from(canonical.uniform(shapes(c), c.INIT_SCALE, seed), zero[c.BATCH_SIZE])
    training = staged(text.train, c.TRAIN_WORDS, c.BATCH_SIZE)
    validation = staged(text.valid, c.EVAL_WORDS, c.BATCH_SIZE)
    epoch_s, losses = [], []
    for epoch in range(c.EPOCHS):
        rate = c.LEARNING_RATE * c.LR_DECAY ** max(epoch + 1 - c.FLAT_EPOCHS, 0)
        seconds, loss = timed(lambda rate=rate: model.train_epoch(training, rate))
        epoch_s.append(seconds)
        losses.append(loss)
        valid = model.evaluate(validation, zero[c.BATCH_SIZE])
        perplexities = f"train {math.exp(loss):.2f}, valid {math.exp(valid):.2f}"
        print(f"epoch {epoch + 1}/{c.EPOCHS}: rate {rate:.4g}, {perplexities}", flush=True)
    test = staged(text.test, c.EVAL_WORDS, 1)
    rest = language_model_tail(words(c, text.test, c.EVAL_WORDS), 1, c.TIME_STEPS)
    test += [model.stage(*rest)] if rest[0].size else []  # no tail is dropped
    tested = model.evaluate(test, zero[1])
    return {
        "losses": losses, "epoch_s": epoch_s, "batches_per_epoch": len(training),
        "perplexity": {"train": math.exp(losses[-1]), "valid": math.exp(valid), "test": math.exp(tested)},
        "test_perplexity_by_seed": {str(seed): math.exp(tested)},
        "items_per_batch": c.BATCH_SIZE * c.TIME_STEPS, "unit": "words/s",
    }  # fmt: skip


def published(c, row, mode, device):
    if mode == "fit":
        return {"test": PUBLISHED["test_perplexity"].get(c["CONFIG"])}
    return PUBLISHED["speed"].get(c["CONFIG"], {}).get(row, {}) if mode == "train" and device == "gpu" else {}


COLUMNS = [
    ["words/s", "throughput.value", ",.0f"],
    ["speedup over BasicLSTMCell", "throughput.value", "speedup:while_loop"],
    ["against the fastest peer", "throughput.value", "speedup:fastest peer"],
    ["ms per batch", "step_ms", "median_range"],
    ["P40, published (words/s)", "published.P40 (words/s)", ",.0f"],
    ["P40, published (speedup)", "published.P40 (speedup)", ".1f"],
    ["P40, published (ms per batch)", "published.P40 (ms per batch)", ".0f"],
    ["one step, p50 (ms)", "one_step.p50_ms", ".3f"],
    ["one step, p99 (ms)", "one_step.p99_ms", ".3f"],
    ["J per batch", "joules.batch", ".3g"],
    ["GPU utilisation (%)", "gpu_utilisation", ".0f"],
    ["GPU memory, allocator", "memory_peak_bytes.allocator", "bytes"],
    ["GPU memory in use, NVML", "memory_peak_bytes.nvml", "bytes"],
    ["share of a large matmul's FLOP/s", "share_of_matmul", "percent"],
    ["first call (s)", "first_call_s", ".1f"],
]
MODES = {  # mode: its table's title; all are timed in one process
    "train": "Training speed", "forward": "Forward only", "stack": "LSTM stack alone, forward and backward",
}  # fmt: skip
LAYOUT = {
    "title": "PTB language model",
    "question": "How many words per second does each LSTM train, and with --train what perplexity does it reach? Two layers, "
    "batch 20, a vocabulary of 10,000 as published, SGD 1.0, gradients clipped by their global norm, states carried from batch "
    "to batch.",
    "tables": [
        *({"title": title, "mode": mode, "device": None, "plot": "throughput.value", "columns": COLUMNS,
           "plot_published": {"P40, published": "published.P40 (words/s)"}} for mode, title in MODES.items()),
        {"title": "Perplexity after training", "mode": "fit", "device": None, "plot": None,
         "columns": [["train", "perplexity.train", ".2f"], ["validation", "perplexity.valid", ".2f"],
                     ["test", "perplexity.test", ".2f"], ["test, by seed", "test_perplexity_by_seed", "each"],
                     ["test, published", "published.test", ".2f"],
                     ["training time (s)", "fit_s", ".1f"], ["s per epoch", "epoch_s", "median_range"],
                     ["J per epoch", "joules.epoch", ",.0f"], ["J, whole training", "joules.training", ",.0f"],
                     ["words/s", "throughput.value", ",.0f"], ["first call (s)", "first_call_s", ".1f"]]},
    ],
    "footnotes": [
        "Published words per second: large config, one NVIDIA Tesla P40, TensorFlow 1.8; 80 to 85 % utilisation, 100 % memory.",
        "Validation with batch 20, test with batch 1; both carry states from the first word to the last.",
        "cuDNN draws the dropout masks of cudnn_stack, torch_lstm_graph and cudnn_best, by a rate that is part of the graph. "
        "Their proof runs a second graph of the same code with rate 0, which may differ from the timed one in that rate alone.",
        "Forward only: logits and loss with training=False. The stack alone starts from the embedded words and from random "
        "gradients by its outputs: no embedding, dropout, softmax or optimizer.",
        f"The fastest peer is the fastest proven row of a table that is not this suite's own ({', '.join(OURS)}).",
        "The config word_language_model is on random words: it is timed and proven, and learns nothing.",
        {"config": "word_language_model", "row": "cudnn_stack", "column": "P40, published (ms per batch)",
         "text": "Published for \"the tutorial code from TensorFlow\" beside CudnnLSTM; the document names no cell."},
        "Test, by seed: of each process's training, from weights drawn with SEED, SEED + 1 and so on. Dropout masks that a row "
        "draws by itself (those of JAX, cudnn_stack and Keras) have one seed in all.",
        "Training time holds the validation after every epoch and the test; s per epoch does not.",
    ],
    "extra_rows": [
        {"row": "while_loop, 2 GPUs", "description": "BasicLSTMCell, data parallel", "reason": "published only; see multi_gpu.py",
         "published": PUBLISHED["speed"]["large"]["two_gpus"], "table": 0, "config": "large", "device": "gpu"},
    ],
    "headline": {"table": 0, "columns": ["words/s", "speedup over BasicLSTMCell", "against the fastest peer",
                                         "ms per batch", "P40, published (words/s)"]},
}  # fmt: skip

BENCHMARK = Benchmark(
    script=__file__, doc=__doc__, rows=ROWS_TABLE, load=load, reference=reference, run_row=run_row, layout=LAYOUT,
    flags={"train": "run the config's whole schedule and report perplexity instead of speed"},
    modes=lambda flags: ("fit",) if "train" in flags else tuple(MODES), published=published,
    impossible=sizes.words_too_few, values=lambda c: sizes.language_model_values(c, c["TIME_STEPS"]),
    protocol=lambda c: CONFIGS[c["CONFIG"]] | dict(
        NUM_LAYERS=2, BATCH_SIZE=20, LEARNING_RATE=1.0, TRAIN_WORDS=None, EVAL_WORDS=None),
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(benchmark.main(BENCHMARK))
