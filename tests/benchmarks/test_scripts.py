"""The scripts of benchmarks/: their command lines, rows, published figures and tables, and PTB's schedule."""

import ast
import importlib.util
import itertools
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from harness.measure.proof import Kernel
from harness.report import options as option_tables
from harness.report import tables
from harness.run import environments, options
from models.weights import canonical

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))
PUBLISHED = json.loads((FOLDER / "published.json").read_text())
HEAVY = {"numpy", "pandas", "matplotlib", "sklearn", "tensorflow", "keras", "torch", "jax"}


def load(name):
    spec = importlib.util.spec_from_file_location(f"script_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SCRIPTS = {name: load(name) for name in NAMES}


def constants(name, *arguments, preset="full", device="gpu"):
    """A script's constants as its parent resolves them."""
    header = options.read_header(FOLDER / f"{name}.py")
    found = options.parse(header, arguments, SCRIPTS[name].BENCHMARK.flags)
    points = {"multi_gpu": {"REPLICAS": 2}, "latency": {"TIME_STEPS": 50, "BATCH_SIZE": 1, "STREAM": False}}
    return options.resolve(header, found, preset) | {"DEVICE": device} | points.get(name, {})  # as at one of its points


def test_every_question_has_its_script():
    assert ROWS.keys() <= set(NAMES)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "options"])  # its rows compute their own, in NumPy
def test_reference_is_numpy_alone(name):
    """It runs in a process of its own, which would load a framework for nothing."""
    [function] = [
        f for f in ast.parse((FOLDER / f"{name}.py").read_text()).body if getattr(f, "name", "") == "reference"
    ]
    imported = {node.module for node in ast.walk(function) if isinstance(node, ast.ImportFrom)}
    assert imported and all(module.startswith(("models.reference", "models.weights")) for module in imported)


# --- command line -------------------------------------------------------------------------------------------------------


def run(name, *arguments):
    return subprocess.run(
        [sys.executable, str(FOLDER / f"{name}.py"), *arguments], capture_output=True, text=True, timeout=600
    )


@pytest.mark.parametrize("option", ["--list", "--help"])
@pytest.mark.parametrize("name", NAMES)
def test_list_and_help_import_no_framework(name, option):
    shown = run(name, option)
    assert shown.returncode == 0 and shown.stderr == "", shown.stderr
    code = (
        "import runpy, sys; sys.argv = sys.argv[1:]\n"
        "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "except SystemExit: print(sorted(sys.modules), file=sys.stderr)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, str(FOLDER / f"{name}.py"), option], capture_output=True, text=True
    )
    imported = set(ran.stderr.strip("[]\n").replace("'", "").split(", "))
    assert "harness.run.benchmark" in imported and not imported & HEAVY


@pytest.mark.parametrize("name", NAMES)
def test_list_shows_every_row_with_what_it_is_and_whether_it_needs_a_gpu(name):
    lines = run(name, "--list").stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(SCRIPTS[name].ROWS_TABLE)
    for line, row in zip(lines, SCRIPTS[name].ROWS_TABLE.values(), strict=True):
        assert row.what in line and ("needs an NVIDIA GPU" in line) == row.needs_gpu


@pytest.mark.parametrize("name", NAMES)
def test_help_names_every_constant_of_the_header_and_every_flag(name):
    text = run(name, "--help").stdout
    header = options.read_header(FOLDER / f"{name}.py")
    shown = [f"--{constant.lower().replace('_', '-')}=" for constant in header.constants if header.limit(constant)]
    flags = [f"--{flag}" for flag in (*options.FLAGS, *SCRIPTS[name].BENCHMARK.flags)]
    settings = [f"--{setting.replace('_', '-')}=" for setting in options.SETTINGS]
    assert [word for word in shown + flags + settings if word not in text] == []


# --- rows ---------------------------------------------------------------------------------------------------------------

TORCH = [
    "torch_cells",
    "torch_jit",
    "torch_static",
    "torch_static_jit",
    "torch_lstm",
    "torch_lstm_graph",
    "cudnn_best",
    "torch_compile",
]
JAX = ["jax_scan", "jax_cudnn", "keras_jax", "keras_jax_cudnn", "keras_torch"]
ROWS = {
    "mnist": ["keras", "keras_cudnn", "keras_xla", "keras_default", "cudnn_stack", "wavefront", "wavefront_loop",
              "wavefront_persistent", *TORCH, *JAX[:3], "keras_jax_loop", *JAX[3:]],
    "ptb": ["while_loop", "static_graph", "block_fused", "keras", "keras_xla", "keras_cudnn", "cudnn_stack",
            "wavefront", "wavefront_persistent", *TORCH, *JAX],
    "multi_gpu": ["keras_mirrored", "keras_workers", "keras_cudnn_mirrored", "keras_cudnn_workers", "wavefront_mirrored",
                  "wavefront_persistent_mirrored", "wavefront_workers", "wavefront_persistent_workers", "torch_ddp",
                  "torch_bucket", "torch_bucket_graph", "jax_sharded", "keras_jax_parallel"],
    "options": ["default", "recurrent_dropout", "wavefront_recurrent_dropout", "mask_left_padded", "run_eagerly", "gru",
                "deterministic_ops"],
    "latency": ["keras_predict", "keras_predict_on_batch", "keras_call", "keras_function", "keras_xla", "cudnn_stack",
                "wavefront", "wavefront_persistent", "torch_lstm", "torch_lstm_graph", "torch_compile", "jax_scan", "jax_cudnn"],
    "ptb_sentences": ["keras", "keras_cudnn", "padded", "lengths", "bucketed", "wavefront", "wavefront_persistent",
                      "torch_packed", "torch_lstm_graph"],
    "scaling": ["cudnn_stack", "torch_lstm", "torch_lstm_graph", "cudnn_best", "jax_scan", "wavefront",
                "wavefront_persistent"],
    "stacked_lm": ["eager", "unrolled", "while_loop", "static_eager", "static_graph", "block_fused", "keras", "keras_xla",
                   "keras_cudnn_eager", "keras_cudnn", "cudnn_stack", "cudnn_stack_xla", "wavefront", "wavefront_persistent",
                   *TORCH, *JAX],
    "synthetic": ["keras", "keras_cudnn", "keras_xla", "keras_default", "cudnn_stack", "wavefront", "wavefront_loop",
                  "wavefront_persistent", "keras_jax", "keras_jax_loop"],
}  # fmt: skip


@pytest.mark.parametrize("device", ["gpu", "cpu"])
@pytest.mark.parametrize("name", NAMES)
def test_rows_asked_for_are_there_and_each_says_what_must_run(name, device):
    table = SCRIPTS[name].ROWS_TABLE
    assert [row for row in table if row in ROWS.get(name, ())] == ROWS.get(
        name, []
    )  # more may be added in the registry
    for made in table.values():
        kernel = Kernel(**made.expected_ops(SimpleNamespace(**constants(name, device=device))))
        # What an option runs is the question there, not a promise: harness/measure/options.py holds it.
        assert (kernel.ops or name == "options") and all(np.min(times) >= 1 for times in kernel.ops.values())
    for row, made in ((row, table[row]) for row in ROWS.get(name, ())):
        assert made.needs_gpu == (
            "cudnn" in row or "persistent" in row or row in ("torch_lstm_graph", "torch_bucket_graph")
        )
        own = {"cudnn_best": "torch"}.get(row, "tensorflow")
        assert made.framework == next((name for name in ("torch", "jax") if name in row), own)


def test_row_of_keras_nightly_is_skipped_in_one_line_where_it_is_not_installed(monkeypatch, tmp_path):
    row = {name: SCRIPTS[name].ROWS_TABLE["keras_jax_loop"] for name in ("mnist", "synthetic")}
    monkeypatch.delenv("JAX_PYTHON", raising=False)
    monkeypatch.setattr(environments, "python", lambda framework: str(tmp_path / "bin" / "python"))
    for name, made in row.items():
        assert made.cannot(constants(name)) == "requirements-jax-keras-nightly.txt not installed: ./run_all.sh --peers"
    monkeypatch.setenv("JAX_PYTHON", "python3")
    for name, made in row.items():
        where = f"{tmp_path}/bin/python -m pip install --no-deps --target={tmp_path}/keras-nightly -r "
        assert made.cannot(constants(name)).endswith(f"; {where}requirements-jax-keras-nightly.txt")
    (tmp_path / "keras-nightly").mkdir()
    assert not any(made.cannot(constants(name)) for name, made in row.items())


@pytest.mark.parametrize("preset", ["quick", "full"])
@pytest.mark.parametrize("name", NAMES)
def test_presets_leave_no_constant_unset_but_those_that_mean_all(name, preset):
    unset = {key for key, value in constants(name, preset=preset).items() if value is None}
    unset -= {"CLIP_NORM"} if name == "multi_gpu" else set()  # the stacked LM has none
    assert unset <= {"PRECISION", "TRAIN_SEQUENCES", "TRAIN_WORDS", "EVAL_WORDS"}


# --- published figures --------------------------------------------------------------------------------------------------


def test_published_figures_of_mnist():
    figures = PUBLISHED["mnist"]
    assert figures["keras"]["K80 (s)"] + figures["keras_cudnn"]["K80 (s)"] == pytest.approx(984.2 + 130.84)
    assert figures["keras"]["P100 (s)"] + figures["keras_cudnn"]["P100 (s)"] == pytest.approx(496.82 + 39.82)
    pairs = [tuple(figures[row][f"{gpu} (acc, val_acc)"]) for row in figures for gpu in ("K80", "P100")]
    assert pairs == [(0.9693, 0.9714), (0.9710, 0.9788), (0.9776, 0.9803), (0.9878, 0.985)]


def test_published_figures_of_ptb():
    speed = {row: tuple(figures.values()) for row, figures in PUBLISHED["ptb"]["speed"]["large"].items()}
    assert speed == {"while_loop": (15000, 1.0), "static_graph": (17000, 1.1), "cudnn_stack": (32000, 2.1),
                     "two_gpus": (25000, 1.7)}  # fmt: skip
    other = PUBLISHED["ptb"]["speed"]["word_language_model"]
    assert other == {"torch_lstm": {"P40 (ms per batch)": 100}, "cudnn_stack": {"P40 (ms per batch)": 120}}
    assert PUBLISHED["ptb"]["test_perplexity"] == {"small": 115.91, "medium": 82.07, "large": 78.29}


def test_published_figures_of_the_stacked_lm_add_up_to_the_document():
    """Columns of its tables: wall time, elapsed time, sequences/s; its best figure by itself."""
    sums = {("cpu", "forward"): (4.6456, 232.2896, 843.8264), ("cpu", "train"): (12.4789, 554.0874, 2713.9636),
            ("gpu", "forward"): (3.3317, 166.5863, 13495.0915), ("gpu", "train"): (10.172, 508.6018, 9865.0073)}  # fmt: skip
    for (device, mode), expected in sums.items():
        rows = [figures[mode] for figures in PUBLISHED["stacked_lm"][device].values()]
        assert np.sum(rows, axis=0) == pytest.approx(expected, abs=1e-6)
    assert PUBLISHED["stacked_lm"]["gpu"]["keras_cudnn"]["train"] == [0.0321, 1.6069, 3982.8802]


def test_stacked_lm_figures_that_contradict_each_other_are_the_ones_with_a_footnote():
    contradicting = set()
    for device, rows in PUBLISHED["stacked_lm"].items():
        for row, mode in itertools.product(rows, ("forward", "train")):
            wall, elapsed, sequences = rows[row][mode]
            exact = abs(elapsed / 50 - wall) < 1e-4 and abs(128 / wall / sequences - 1) < 0.01  # wall has four decimals
            contradicting |= set() if exact else {(device, row, mode)}
    notes = [note for note in SCRIPTS["stacked_lm"].LAYOUT["footnotes"] if isinstance(note, dict)]
    assert contradicting == {(note["device"], note["row"], note["mode"]) for note in notes}


# --- protocol -----------------------------------------------------------------------------------------------------------

CASES = [("mnist", (), "fit", "keras", 2 * 2), ("ptb", (), "train", "while_loop", 2),
         ("ptb", ("--train", "--config=small"), "fit", "keras_cudnn", 1), ("stacked_lm", (), "forward", "eager", 3),
         ("stacked_lm", ("--config=published",), "train", "keras_cudnn", 3),
         ("ptb", ("--config=word_language_model",), "train", "torch_lstm", 1)]  # fmt: skip


@pytest.mark.parametrize(("name", "arguments", "mode", "row", "count"), CASES)
def test_full_preset_is_the_published_protocol_and_shows_its_figures(name, arguments, mode, row, count):
    benchmark, resolved = SCRIPTS[name].BENCHMARK, constants(name, *arguments)
    assert options.departs_from_protocol(resolved, benchmark.protocol(resolved)) == []
    assert mode in benchmark.modes({argument.removeprefix("--") for argument in arguments})
    assert len(benchmark.published(resolved, row, mode, "gpu")) == count


@pytest.mark.parametrize(("name", "changed", "mode"), [
    ("mnist", "--units=64", "fit"), ("mnist", "--dropout-2=0.2", "fit"), ("mnist", "--train-sequences=100", "fit"),
    ("ptb", "--keep-prob=0.5", "train"), ("ptb", "--clip-norm=5", "train"), ("ptb", "--batch-size=64", "train"),
    ("stacked_lm", "--time-steps=49", "train"), ("stacked_lm", "--learning-rate=0.01", "train"),
])  # fmt: skip
def test_run_that_changes_the_protocol_departs_from_it(name, changed, mode):
    resolved = constants(name, changed)
    departing = options.departs_from_protocol(resolved, SCRIPTS[name].BENCHMARK.protocol(resolved))
    assert departing == [changed.removeprefix("--").split("=")[0].upper().replace("-", "_")]


# --- tables -------------------------------------------------------------------------------------------------------------


def headings(table):
    return [column[0] for column in table["columns"]]


@pytest.mark.parametrize("name", NAMES)
def test_layout_is_one_that_tables_are_drawn_from(name, tmp_path):
    script = SCRIPTS[name]
    rows = {row: made.what for row, made in script.ROWS_TABLE.items()}
    path = tmp_path / f"{name}.json"
    path.write_text(json.dumps({"schema": 1, "benchmark": name, "rows": rows, **script.LAYOUT}))
    layout = tables.read_layout(path)
    modes = {*script.BENCHMARK.modes(set()), *script.BENCHMARK.modes(set(script.BENCHMARK.flags))}
    several = [layout["replicas"]] if "replicas" in layout else []
    several += [{"mode": mode} for mode in option_tables.TITLES] if "options" in layout else []
    assert {table["mode"] for table in [*layout["tables"], *layout.get("axes", []), *several]} == modes
    for note in layout["footnotes"]:
        if isinstance(note, dict):
            assert note["row"] in rows and note.get("device", "gpu") in ("gpu", "cpu")
            assert all(
                note["column"] in headings(t) for t in layout["tables"] if t["mode"] == note.get("mode", "train")
            )
    for extra in layout.get("extra_rows", []):
        assert extra["row"] not in rows and extra["table"] in range(len(layout["tables"]))


@pytest.mark.parametrize("name", NAMES)
def test_every_published_figure_has_a_row_and_a_column(name):
    script = SCRIPTS[name]
    columns = {path.removeprefix("published.") for table in script.LAYOUT["tables"] for _, path, _ in table["columns"]
               if path.startswith("published.")}  # fmt: skip
    extra = script.LAYOUT.get("extra_rows", [])
    shown = {row for row in script.ROWS_TABLE} | {row["row"] for row in extra}
    figures = {}
    settings = [(), ("--config=small", "--train"), ("--config=word_language_model",)]
    for arguments, device in itertools.product(settings, ["gpu", "cpu"]):
        if name != "ptb" and arguments:
            continue
        resolved = constants(name, *arguments, device=device)
        for row, mode in itertools.product(script.ROWS_TABLE, ("forward", "train", "fit")):
            figures |= script.BENCHMARK.published(resolved, row, mode, device)
    for row in extra:
        figures |= row.get("published", {})
    assert set(figures) == columns
    named = {"mnist": PUBLISHED["mnist"], "ptb": PUBLISHED["ptb"]["speed"]["large"], "synthetic": {}, "ptb_sentences": {},
             "scaling": {}, "multi_gpu": {}, "options": {}, "latency": {},
             "stacked_lm": {row for rows in PUBLISHED["stacked_lm"].values() for row in rows}}[name]  # fmt: skip
    assert {"while_loop, 2 GPUs" if row == "two_gpus" else row for row in named} <= shown


def test_two_gpus_of_ptb_keep_their_place_with_their_published_figure():
    row = next(row for row in SCRIPTS["ptb"].LAYOUT["extra_rows"] if "2 GPUs" in row["row"])
    assert row["published"]["P40 (words/s)"] == 25000 and row["reason"].endswith("see multi_gpu.py")


# --- sentences ----------------------------------------------------------------------------------------------------------


def test_rows_of_sentences_differ_in_padding_and_lengths_and_in_nothing_else():
    """One text of sentences of 3 to 33 words, by each row's own run_row."""
    script, rng = SCRIPTS["ptb_sentences"], np.random.default_rng(1)
    lengths = rng.integers(3, 34, 200)
    train = np.concatenate([np.append(rng.integers(1, 30, n), 0) for n in lengths])
    text = SimpleNamespace(train=train, vocabulary=["<eos>"])
    options = ("--units=4", "--vocabulary=30", "--batch-size=4", "--staged-batches=8")
    c = SimpleNamespace(**constants("ptb_sentences", *options, device="cpu"))
    models = {}

    class Measurement:
        data, device, precision, runtime = text, "cpu", "fp32", SimpleNamespace(device_name="cpu")

        def steps(self, model, flops, words, unit, batches):
            models[row] = model
            assert words == [int(own.sum()) for *_, own in batches] and unit == "words/s"
            model.require_words(batches)

    for row in script.ROWS_TABLE:
        if row != "keras_cudnn":  # which needs a GPU
            script.run_row(row, c, Measurement())
    in_pytorch = {row: models.pop(row) for row in script.TORCH}
    for model in in_pytorch.values():
        assert (model.optimizer.learning_rate, model.clip_norm) == (c.LEARNING_RATE, c.CLIP_NORM)
    expected = {
        row: made.expected_ops(SimpleNamespace(NUM_LAYERS=2, DEVICE="gpu")) for row, made in script.ROWS_TABLE.items()
    }
    assert [row for row, ops in expected.items() if ops.get("copies_mask")] == ["keras_cudnn"]
    longest = [tokens.shape[1] for tokens, *_ in script.start(c, text)[2]]
    steps = {
        row: [targets.shape[not model.stack.time_major] for _, targets in model.batches]
        for row, model in models.items()
    }
    assert steps["padded"] == steps["lengths"] == [max(longest)] * 8
    assert steps["bucketed"] == [-(-n // 10) * 10 for n in longest] and len(set(steps["bucketed"])) > 1
    assert steps["bucketed"] == [len(targets) for _, targets in in_pytorch["torch_lstm_graph"].batches]
    assert [row for row, model in models.items() if model.give_lengths] == ["keras", "lengths", *script.WAVEFRONT]
    assert steps["keras"] == steps["bucketed"] and not models["keras"].jit_compile
    for row in script.WAVEFRONT:
        assert steps[row] == steps["padded"] and models[row].jit_compile
        assert models[row].stack.implementation == {"wavefront": "xla"}.get(row, "persistent")


# --- PTB's schedule -----------------------------------------------------------------------------------------------------


class Spy:
    """Stands in for a model: notes what it is trained and evaluated on."""

    def __init__(self):
        self.rates, self.evaluated, self.batches = [], [], []

    def stage(self, tokens, targets):
        return tokens, targets

    def start_from(self, weights, states):
        self.weights, self.states = weights, states

    def train_epoch(self, batches, rate):
        self.rates.append(rate)
        self.batches = batches
        return 2.0

    def evaluate(self, batches, states):
        self.evaluated.append((batches, states))
        return 3.0


@pytest.mark.parametrize(("flags", "seed"), [({"train"}, 3), (set(), 1)])
def test_each_process_of_a_whole_training_of_ptb_has_its_own_seed_and_is_proven_from_the_same_weights(
    flags, seed, monkeypatch
):
    script, seen = SCRIPTS["ptb"], {}
    c = SimpleNamespace(**constants("ptb", "--config=small", "--vocabulary=50", "--units=4"), FLAGS=flags)
    words = np.random.default_rng(1).integers(0, 50, 2003)

    class Measurement:  # of a row's third process
        process, data, precision = 2, SimpleNamespace(train=words, valid=words, test=words), "fp32"
        runtime = SimpleNamespace(device_name="cpu", seed=lambda number: seen.update(masks=number))

        def steps(self, *_, **__):
            pass

        def training(self, model, train, schedule):
            seen.update(train(lambda function: (0.5, function())))

    def build(weights, *_, **__):
        seen["proven"] = weights
        return Spy()

    monkeypatch.setitem(script.IMPLEMENTATIONS, "keras", SimpleNamespace(build=build))
    script.run_row("keras", c, Measurement())
    assert seen["masks"] == seed
    assert list(seen.get("test_perplexity_by_seed", {})) == [str(seed)] * ("train" in flags)
    same = canonical.large_random(script.shapes(c), 1)
    assert all(np.array_equal(array, same[name]) for name, array in seen["proven"].items())


@pytest.mark.parametrize("config", ["small", "medium", "large"])
def test_ptb_trains_by_the_published_schedule(config, capsys):
    script = SCRIPTS["ptb"]
    c = SimpleNamespace(**constants("ptb", f"--config={config}", "--vocabulary=50", "--units=4"))
    rng = np.random.default_rng(1)
    text = SimpleNamespace(
        train=rng.integers(0, 50, 2003), valid=rng.integers(0, 50, 1501), test=rng.integers(0, 50, 104)
    )
    spy = Spy()
    result = script.train(c, spy, text, 7, timed=lambda function: (0.5, function()))

    flat, decay = {"small": (5, 0.5), "medium": (7, 0.8), "large": (15, 1 / 1.15)}[config]
    assert len(spy.rates) == {"small": 13, "medium": 39, "large": 55}[config]
    assert spy.rates[:flat] == [1.0] * flat
    for before, after in itertools.pairwise(spy.rates[flat - 1 :]):
        assert after == pytest.approx(before * decay)
    scale = {"small": 0.1, "medium": 0.05, "large": 0.04}[config]
    assert all(np.abs(array).max() <= scale for array in spy.weights.values())
    assert not spy.weights["lstm_0/forward/bias"].any() and not np.any(spy.states)

    assert {tokens.shape for tokens, _ in spy.batches} == {(20, c.TIME_STEPS)}
    *validations, (test, test_states) = spy.evaluated
    assert len(validations) == len(spy.rates)
    assert all(tokens.shape[0] == 20 for batches, _ in validations for tokens, _ in batches)
    assert np.shape(test_states)[3] == 1 and not np.any(test_states)
    predicted = np.concatenate([targets[0] for _, targets in test])
    np.testing.assert_array_equal(predicted, text.test[1:])  # batch 1, in order, no tail dropped
    assert result["perplexity"] == {"train": np.exp(2.0), "valid": np.exp(3.0), "test": np.exp(3.0)}
    assert result["test_perplexity_by_seed"] == {"7": np.exp(3.0)}
    start = canonical.uniform(script.shapes(c), scale, 7)
    assert all(np.array_equal(array, start[name]) for name, array in spy.weights.items())
    assert result["epoch_s"] == [0.5] * len(spy.rates) and result["batches_per_epoch"] == len(spy.batches)
    assert capsys.readouterr().out.count("\n") == len(spy.rates)
