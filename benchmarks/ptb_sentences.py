"""Words per second of a PTB language model that reads sentences of their own lengths, padded in several ways.

python benchmarks/ptb_sentences.py                         # every row, this machine
python benchmarks/ptb_sentences.py --config=large --rows=bucketed
python benchmarks/ptb_sentences.py --list
"""

import functools
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
CONFIGS = {                 # of ptb.py, without dropout
    "small": dict(UNITS=200, CLIP_NORM=5.0),
    "medium": dict(UNITS=650, CLIP_NORM=5.0),
    "large": dict(UNITS=1500, CLIP_NORM=10.0),
}
PRESETS = {
    "full": dict(CONFIG="large", STAGED_BATCHES=50, TIMED_BATCHES=50, BLOCKS=3, PROCESSES=3, WARMUP_LIMIT_S=1.0,
                 ROW_LIMIT_S=600.0, ROW_BUDGET_S=120.0),
    "quick": dict(CONFIG="small", STAGED_BATCHES=10, TIMED_BATCHES=10, BLOCKS=3, PROCESSES=1, WARMUP_LIMIT_S=0.5,
                  ROW_LIMIT_S=300.0, ROW_BUDGET_S=30.0),
}
UNITS = None                # LSTM units per layer, and width of the embedding; None: the config's, as for the next one
CLIP_NORM = None            # bound of the gradients' global norm
NUM_LAYERS = 2              # LSTM layers
BATCH_SIZE = 20             # sentences of like length
MAX_WORDS = 100             # longer sentences are left out
BUCKET_STEPS = 10           # bucketed: a batch is padded to a multiple of this
VOCABULARY = 10000          # words
LEARNING_RATE = 1.0         # of SGD
ROWS = "all"                # comma-separated names from --list
PRECISION = None            # fp32, tf32, fp16 or bf16; None: tf32 on a GPU, fp32 on a CPU
LOSS_SCALE = 1024.0         # static, of fp16
SEED = 1                    # of the weights and states
WARMUP_BATCHES = 10         # at least, before the clock starts; every staged batch at least once
STAGED_BATCHES = None       # batches on the device, taken in turn, from the shortest to the longest sentences; None: the
                            # preset's, as for the next six
WARMUP_LIMIT_S = None       # s; a warm-up that has not settled by then ends
TIMED_BATCHES = None        # per block
BLOCKS = None               # timed blocks per process
PROCESSES = None            # processes per row
ROW_LIMIT_S = None          # s; a process that takes longer is stopped
ROW_BUDGET_S = None         # s; a row that has taken longer gets no further process
MIN_BLOCK_S = 0.21          # s; a block is the multiple of TIMED_BATCHES that fills it; five hold a second of Joules
# ---------------------------------------------------------------------------
# fmt: on

WAYS = {  # row in TensorFlow → (what it is, padded to the longest sentence of all, the stack is given the lengths)
    "keras": ("each batch padded to the next multiple of BUCKET_STEPS, with a mask", False, True),
    "keras_cudnn": ("each batch padded to the next multiple of BUCKET_STEPS, with a mask", False, True),
    "padded": ("all batches padded to the longest one's steps", True, False),
    "lengths": ("all batches padded to the longest one's steps, with sequence_lengths", True, True),
    "bucketed": ("each batch padded to the next multiple of BUCKET_STEPS", False, False),
    "wavefront": (
        "all batches padded to the longest one's steps, with a mask; the whole step compiled by XLA",
        True,
        True,
    ),
    "wavefront_persistent": (
        "all batches padded to the longest one's steps, with a mask; the stack in persistent CUDA kernels",
        True,
        True,
    ),
}
TORCH = {  # row → (what it is, the row of the language model that it runs as)
    "torch_packed": ("PyTorch: nn.LSTM, the words of each batch packed, without a step of padding", "torch_lstm"),
    "torch_lstm_graph": (
        "PyTorch: nn.LSTM, each batch padded to the next multiple of BUCKET_STEPS, for each of which the step is a CUDA graph",
        "torch_lstm_graph",
    ),
}
WAVEFRONT = ("wavefront", "wavefront_persistent")
KERAS = {
    "keras": "keras.layers.LSTM(use_cudnn=False), vanilla LSTM",
    "keras_cudnn": "keras.layers.LSTM(use_cudnn=True)",
}


def expected_ops(c):
    """CudnnLSTM: one cuDNN call on a GPU; on a CPU the loops that stand for it."""
    if c.DEVICE == "gpu":
        return rows.LANGUAGE_MODEL["cudnn_stack"].expected_ops(c.NUM_LAYERS, 1, c.DEVICE)
    return {"ops": {f"loop:{rows.MATMUL}": c.NUM_LAYERS}, "not_ops": rows.CUDNN_OP}


def of_way(row):
    """The row of a way to pad."""
    what = WAYS[row][0]
    if row not in rows.LANGUAGE_MODEL:
        return Row(f"CudnnLSTM, {what}", expected_ops, precisions=rows.WITHOUT_BF16, ours=True)
    layer = KERAS.get(row, "WavefrontLSTM")
    return of_language_model(row, f"{layer}, {what}")


def of_language_model(row, what):
    """What runs as in that row of the language model's."""
    copies = {"copies_mask": True} if row == "keras_cudnn" else {}  # Keras counts the lengths, for cuDNN, on the host
    found = Row.of(rows.LANGUAGE_MODEL[row], lambda made, c: made.expected_ops(c.NUM_LAYERS, 1, c.DEVICE) | copies)
    return found._replace(what=what)


ROWS_TABLE = {row: of_way(row) for row in WAYS} | {
    row: of_language_model(name, what) for row, (what, name) in TORCH.items()
}


def load(c, location):
    """Penn Treebank (or the embedded text)."""
    from harness.data import sets

    return sets.ptb(*location)


def impossible(c):
    needed = c["BATCH_SIZE"] * c["STAGED_BATCHES"]
    return sizes.too_few("sentences", c, needed, sizes.PTB_SENTENCES, ("BATCH_SIZE", "STAGED_BATCHES"))


def start(c, text):
    """Weights, states and batches of the proof and of the timing: the same sentences in every row."""
    from harness.data.batches import sentence_batches
    from harness.data.sets import EOS
    from models.weights import canonical

    tokens = text.train.clip(max=c.VOCABULARY - 1)  # a smaller --vocabulary joins the rarest words
    eos = min(text.vocabulary.index(EOS), c.VOCABULARY - 1)
    batches = sentence_batches(tokens, eos, c.BATCH_SIZE, c.STAGED_BATCHES, c.MAX_WORDS)
    shapes = canonical.language_model_shapes(c.VOCABULARY, c.UNITS, c.UNITS, c.NUM_LAYERS)
    states = canonical.random_states(c.NUM_LAYERS, c.BATCH_SIZE, c.UNITS, c.SEED)
    return canonical.large_random(shapes, c.SEED), states, batches


def reference(c, text):
    """The float64 reference of every row: the batches as they are, without a step of padding that is not needed."""
    from models.reference import expected
    from models.reference.networks import SGD

    weights, states, batches = start(c, text)
    optimizer = SGD(c.LEARNING_RATE, clip_norm=c.CLIP_NORM)
    pairs = [(tokens, targets) for tokens, targets, _ in batches]
    found = expected.language_model("sum_over_time", optimizer, weights, states, pairs, carry_states=False)
    lengths = batches[0][2]
    outputs = {name: expected.without_padding(found["outputs"][name], lengths) for name in ("hidden", "logits")}
    return found | {"outputs": found["outputs"] | outputs}


def run_row(row, c, measurement):
    """Build the row's model from the canonical weights, prove it, time it."""
    given = start(c, measurement.data)
    model = (in_pytorch if row in TORCH else in_tensorflow)(row, c, measurement, given)
    batches = given[-1]
    words = [int(lengths.sum()) for _, _, lengths in batches]
    mean = round(sum(words) / len(words))
    of_step = 3 * flops.language_model_flops(mean, c.VOCABULARY, c.UNITS, c.UNITS, c.NUM_LAYERS)
    return measurement.steps(model, {"train": of_step}, words, "words/s", batches=batches)


def in_tensorflow(row, c, measurement, given):
    """given: weights, states and batches, as the next one's."""
    import keras

    from models.tf.cudnn_stack import CudnnStack
    from models.tf.keras_lstm import KerasLSTM
    from models.tf.language_model import COMPUTE_DTYPE
    from models.tf.sentence_model import SentenceModel
    from models.tf.wavefront_stack import PersistentWavefrontStack, WavefrontStack

    _, to_longest, give_lengths = WAYS[row]
    weights, _, batches = given
    dtype = COMPUTE_DTYPE[measurement.precision]
    if row in WAVEFRONT:
        kind = PersistentWavefrontStack if row == "wavefront_persistent" else WavefrontStack
        stack = kind(weights, c.NUM_LAYERS, dtype)
    elif row in KERAS:
        stack = KerasLSTM(weights, c.NUM_LAYERS, dtype, use_cudnn=row == "keras_cudnn")
    else:
        stack = CudnnStack(weights, c.NUM_LAYERS, dtype, use_cudnn=measurement.device == "gpu")
    longest = max(tokens.shape[1] for tokens, _, _ in batches)
    return SentenceModel(
        stack, *given, keras.optimizers.SGD(c.LEARNING_RATE), clip_norm=c.CLIP_NORM,
        loss_scale=c.LOSS_SCALE, give_lengths=give_lengths, jit_compile=row in WAVEFRONT,
        pad=lambda steps: longest if to_longest else to_bucket(steps, c),
    )  # fmt: skip


def to_bucket(steps, c):
    """Steps that a batch of these is padded to."""
    return -(-steps // c.BUCKET_STEPS) * c.BUCKET_STEPS


def in_pytorch(row, c, measurement, given):
    from models.pytorch import sentence_model, stacks
    from models.pytorch.language_model import COMPUTE_DTYPE

    captured = row == "torch_lstm_graph"
    kind = stacks.CapturedLSTMStack if captured else stacks.LSTMStack
    stack = kind(given[0], c.NUM_LAYERS, COMPUTE_DTYPE[measurement.precision], measurement.runtime.device_name)
    optimizer, options = ("SGD", c.LEARNING_RATE), {"clip_norm": c.CLIP_NORM, "loss_scale": c.LOSS_SCALE}
    if captured:
        pad = functools.partial(to_bucket, c=c)
        return sentence_model.CapturedSentenceModel(stack, *given, optimizer, pad=pad, **options)
    return sentence_model.TorchSentenceModel(stack, *given, optimizer, **options)


LAYOUT = {
    "title": "PTB, sentence by sentence",
    "question": "How many words per second does the PTB language model train on when every sentence keeps its own length? "
    "Two layers, batches of 20 sentences of like length from all of the training text, SGD 1.0, gradients clipped by their "
    "global norm, no dropout. Words are those of the sentences, not those of the padding.",
    "tables": [
        {"title": "Training speed", "mode": "train", "device": None, "plot": "throughput.value",
         "columns": [["words/s", "throughput.value", ",.0f"], ["against padded", "throughput.value", "speedup:padded"],
                     ["against the fastest peer", "throughput.value", "speedup:fastest peer"],
                     ["ms per batch", "step_ms", "median_range"],
                     ["one step, p50 (ms)", "one_step.p50_ms", ".3f"], ["one step, p99 (ms)", "one_step.p99_ms", ".3f"],
                     ["J per batch", "joules.batch", ".3g"], ["GPU utilisation (%)", "gpu_utilisation", ".0f"],
                     ["GPU memory, allocator", "memory_peak_bytes.allocator", "bytes"],
                     ["share of a large matmul's FLOP/s", "share_of_matmul", "percent"],
                     ["first call (s)", "first_call_s", ".1f"]]},
    ],
    "footnotes": [
        "The same sentences in the same batches in every row. A stack that is not given the lengths computes the padding; the "
        "softmax computes it in every row but torch_packed; neither enters the loss.",
        "CudnnLSTM is one cuDNN call on a GPU, and TensorFlow ops on a CPU, whose loop runs through the padding "
        "either way. So do the loops of keras and wavefront; cuDNN, where it is given a mask or the lengths, ends where a "
        "sentence does, and the kernels of wavefront_persistent with the longest sentence of some.",
        "For cuDNN Keras takes its mask to the host in every step, and counts the lengths there.",
        "The first call of keras, keras_cudnn and bucketed traces one number of steps, torch_lstm_graph's captures one; the "
        "others follow after it, before anything is timed.",
    ],
    "headline": {"table": 0, "columns": ["words/s", "against padded", "against the fastest peer", "ms per batch"]},
}  # fmt: skip

BENCHMARK = Benchmark(
    script=__file__, doc=__doc__, rows=ROWS_TABLE, load=load, reference=reference, run_row=run_row, layout=LAYOUT,
    values=lambda c: sizes.language_model_values(c, 1), impossible=impossible,
    modes=lambda flags: ("train",), published=lambda c, row, mode, device: {},
    protocol=lambda c: CONFIGS[c["CONFIG"]] | dict(NUM_LAYERS=2, BATCH_SIZE=20, VOCABULARY=10000, LEARNING_RATE=1.0),
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(benchmark.main(BENCHMARK))
