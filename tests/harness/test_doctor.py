"""python -m harness.doctor: what it says of models that were built here, against what was built."""

import hashlib
import importlib
import json
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

keras = pytest.importorskip("keras")

from harness.doctor import __main__ as doctor  # noqa: E402
from harness.doctor import candidates, child, inputs, layers, report  # noqa: E402
from harness.doctor.subject import Subject, difference  # noqa: E402
from tests import doctor_models  # noqa: E402

PROJECT = Path(__file__).resolve().parents[2]
MODELS = "tests.doctor_models"
FACTS = SimpleNamespace(device="cpu", batch_size=4, steps_per_execution=3)
RULES = ("plain", "dropping", "unrolled", "relu", "cell", "gru", "simple")


def options(model: str = "", **given) -> SimpleNamespace:
    defaults = vars(
        doctor.parse([model, "--device=cpu", "--batch-size=4", "--time-steps=6", "--steps-per-execution=3"])
    )
    return SimpleNamespace(**{**defaults, **given})


def subject(model, runtime, batch_size=4) -> Subject:
    chosen = options(batch_size=batch_size)
    return Subject(model, inputs.batches(model, inputs.specs(model, chosen), "post"), runtime)


# --- the layers -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def looked(tensorflow_runtime, tmp_path_factory):
    """What the doctor finds in `doctor_models.settings`, from a file."""
    path = tmp_path_factory.mktemp("doctor") / "settings.keras"
    doctor_models.settings().save(path)
    before = hashlib.sha256(path.read_bytes()).hexdigest()
    found = child.look(options(str(path)), tensorflow_runtime)
    assert hashlib.sha256(path.read_bytes()).hexdigest() == before
    return found


def test_every_recurrent_layer_is_named_with_its_rules_and_what_ran(looked):
    found = {each["place"]: each for each in looked["layers"]}
    assert set(found) == set(RULES)
    assert {name for name, each in found.items() if each["rules"].startswith("cuDNN")} == {"plain", "gru"}
    for name, words in {
        "dropping": "recurrent_dropout=0.2",
        "unrolled": "unroll=True",
        "relu": "activation=relu",
        "cell": "RNN(LSTMCell(3))",
        "simple": "SimpleRNN(3)",
    }.items():
        assert found[name]["rules"].startswith("not cuDNN: ") and words in found[name]["rules"]
    kinds = {name: each["kind"] for name, each in found.items()}
    assert kinds == {name: layers.UNROLLED if name == "unrolled" else layers.LOOP for name in RULES}
    assert not any(each["contradicts"] for each in looked["layers"])


def test_what_would_be_another_model_is_named_and_not_tried(looked):
    page = report.found_part("settings.keras", options(), looked) + report.advice_part(looked, {})
    assert "`dropping`: recurrent_dropout=0.2: cuDNN has none" in page and "`relu`: activation=relu" in page
    assert not any("dropout" in each["name"] for each in looked["candidates"])
    assert "unroll=False" in [each["name"] for each in looked["candidates"]]


def test_times_are_there_and_a_file_keeps_what_it_was_compiled_with(looked):
    assert min(looked["forward_ms"]) > 0 and min(looked["training_ms"]) > 0
    assert (looked["model"]["kind"], looked["model"]["jit_compile"], looked["notes"][1:]) == ("Functional", False, [])


CASES = {
    "lstm": lambda: keras.layers.LSTM(3),
    "relu": lambda: keras.layers.LSTM(3, activation="relu"),
    "hard sigmoid": lambda: keras.layers.LSTM(3, recurrent_activation="hard_sigmoid"),
    "no bias": lambda: keras.layers.LSTM(3, use_bias=False),
    "recurrent dropout": lambda: keras.layers.LSTM(3, recurrent_dropout=0.5),
    "unroll": lambda: keras.layers.LSTM(3, unroll=True),
    "off": lambda: keras.layers.LSTM(3, use_cudnn=False),
    "backwards": lambda: keras.layers.LSTM(3, go_backwards=True, stateful=False, dropout=0.5, return_state=True),
    "gru": lambda: keras.layers.GRU(3),
    "gru, reset before": lambda: keras.layers.GRU(3, reset_after=False),
    "gru, relu": lambda: keras.layers.GRU(3, activation="relu"),
    "simple": lambda: keras.layers.SimpleRNN(3),
    "cell": lambda: keras.layers.RNN(keras.layers.LSTMCell(3)),
}


@pytest.mark.parametrize("make", CASES.values(), ids=CASES)
def test_the_rules_are_those_by_which_keras_calls_cudnn(make, monkeypatch):
    rnn = importlib.import_module("keras.src.backend.tensorflow.rnn")

    called = []

    def would_call(*arguments, **named):
        called.append(True)
        raise NotImplementedError

    monkeypatch.setattr(rnn, "_is_gpu_available", lambda: True)
    monkeypatch.setattr(rnn, "_cudnn_lstm", would_call)
    monkeypatch.setattr(rnn, "_cudnn_gru", would_call)
    layer = make()
    layer(np.zeros((2, 4, 3), "float32"))
    assert bool(called) == (not layers.rules(layer)[0])


def test_the_profiler_is_right_where_it_sees_something_else():
    rule = layers.Found(None, "lstm", "LSTM(3)", [], [])
    counted = {"ops": {"xla:loop:MatMul": 6}, "kernels": {}}
    seen = layers.seen({"ops": {}, "scopes": {"0": counted}}, 0)
    assert (
        seen.kind == layers.XLA and layers.contradicts(rule, seen, "gpu") and not layers.contradicts(rule, seen, "cpu")
    )
    cudnn = {"ops": {"CudnnRNNV3": 1, "CudnnRNNBackpropV3": 1}, "kernels": {"RNN_blockPersist": 0.5}}
    assert layers.seen({"ops": {}, "scopes": {"0": cudnn}}, 0).kind == layers.CUDNN
    for ops, kind in (({"loop:Slice": 17, "loop:CudnnRNNV3": 1}, layers.CUDNN),  # steps_per_execution
                      ({"xla:XlaCustomCallV2": 1, "xla:MatMul": 2}, layers.PERSISTENT)):  # fmt: skip
        assert layers.seen({"ops": {}, "scopes": {"0": {"ops": ops, "kernels": {}}}}, 0).kind == kind
    kernels = {"ops": {"xla:MatMul": 5}, "kernels": {"lstm_wavefront_forward": 0.2}}
    assert layers.seen({"ops": {}, "scopes": {"0": kernels}}, 0).kind == layers.PERSISTENT
    assert layers.seen({"ops": {"eager:MatMul": 9}, "scopes": {}}, 0).kind == layers.EAGER
    assert layers.seen({"ops": {}, "scopes": {}}, 0).kind == layers.NOTHING


# --- the candidates ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [pytest.param(m, marks=[pytest.mark.slow] * (m not in doctor_models.BY_DEFAULT)) for m in doctor_models.MAKES],
    ids=lambda make: make.__name__,
)
def test_every_candidate_computes_what_the_model_computes(make, tensorflow_runtime):
    made = subject(make(), tensorflow_runtime)
    rng = np.random.default_rng(0)
    made.model.set_weights([rng.uniform(-0.7, 0.7, array.shape) for array in made.model.get_weights()])
    expected, mask = made.outputs(), made.mask()
    offered, _ = candidates.offered(made.model, FACTS)
    names = {each.name for each in offered}
    assert {"jit_compile=True", "steps_per_execution=3", "WavefrontLSTM"} <= names
    assert ("WavefrontLSTM in CompiledLoop" in names) == (make.__name__ in ("stacked", "masked", "stateful", "nested"))
    for each in offered:
        copy = make()
        copy.set_weights(made.model.get_weights())
        changed = each.make(copy, FACTS)
        child.compile_like(
            changed, made.model, {**each.compiled, "jit_compile": False}
        )  # outputs alone: without compiling
        apart = difference(Subject(changed, made.batches, tensorflow_runtime).outputs(), expected, mask)
        assert apart <= child.limit("fp32"), each.name


def test_a_stack_of_keras_layers_becomes_one_layer_with_its_dropout():
    offered, _ = candidates.offered(model := doctor_models.stacked(), FACTS)
    wavefront = next(each for each in offered if each.name == "WavefrontLSTM")
    changed = wavefront.make(model, FACTS)
    (stack,) = [each.layer for each in layers.recurrent(changed)]
    assert (stack.num_layers, stack.dropout) == (3, 0.25)
    assert not any(isinstance(layer, keras.layers.Dropout) for layer in changed.layers)


def test_dropout_of_another_rate_cuts_the_stack():
    parts = [keras.layers.LSTM(4, return_sequences=True) for _ in range(4)]
    rates = (0.1, 0.1, 0.3)
    between = [keras.layers.Dropout(rate) for rate in rates]
    model = keras.Sequential(
        [keras.Input((5, 3)), parts[0], *(x for pair in zip(between, parts[1:], strict=True) for x in pair)]
    )
    runs, _ = candidates.convertible(model, "lstm")
    assert [(run.layers, run.dropout, run.between) for run in runs] == [
        (parts[:3], 0.1, between[:2]),
        (parts[3:], 0.0, []),
    ]


def found_for_report(**times) -> dict:
    wanted = {"name": "planted", "what": "", "code": ["code()"], "training": False}
    return {"limit": child.limit("fp32"), "precision": "fp32", "candidates": [wanted], "layers": [], "not_tried": []}


def test_a_candidate_with_wrong_weights_is_not_recommended_however_fast(tensorflow_runtime, monkeypatch):
    monkeypatch.setattr(child, "ROUNDS", 1)
    made = subject(doctor_models.stacked(), tensorflow_runtime)
    offered, _ = candidates.offered(made.model, FACTS)
    candidate = next(each for each in offered if each.name == "WavefrontLSTM")
    for planted, agrees in ((1.0, True), (1.001, False)):
        copy = doctor_models.stacked()
        copy.set_weights(made.model.get_weights())
        changed = candidate.make(copy, FACTS)
        (stack,) = [each.layer for each in layers.recurrent(changed)]
        stack.set_canonical({name: array * np.float32(planted) for name, array in stack.get_canonical().items()})
        child.compile_like(changed, made.model, {"jit_compile": False})
        result = child.compare(made, changed, made.outputs(), None, False, candidate)
        fast = {key: {"own": [10.0, 11.0], "its": [1.0, 1.1]} for key in ("forward_ms", "training_ms")}
        found, result = found_for_report(), {**result, **fast}
        assert report.agrees(found, result) == agrees
        assert (report.best(found, {"planted": result}, "training_ms") == "planted") == agrees
        assert ("code()" in report._changes(found, {"planted": result})) == agrees
        assert ("not recommended" in report.verdict(found, result)) != agrees


def test_slower_is_what_is_clearly_so_and_the_layer_is_installed_where_it_is_recommended():
    found = found_for_report()
    times = {"forward_ms": {"own": [5, 6, 7], "its": [10, 11, 12]}, "training_ms": {"own": [5, 6], "its": [4.9, 5.5]}}
    assert report.verdict(found, {"difference": 0.0, **times}) == "slower: forward"
    times["training_ms"]["its"] = [1.0, 1.1]
    result = {"difference": 0.0, **times}
    assert report.verdict(found, result) == "faster: training; slower: forward"
    assert "pip install" not in report._changes(found, {"planted": result})
    code = ["from wavefront_lstm import WavefrontLSTM"]
    found["candidates"] = [{**each, "code": code} for each in found["candidates"]]
    assert "installs by `pip install .`" in report._changes(found, {"planted": result})


@pytest.mark.parametrize("trains", [[3.0, 3.4], [1.0, 1.1]])
def test_two_recommended_changes_are_said_to_have_been_tried_one_at_a_time(trains):
    own, found = [10.0, 12.0], found_for_report()
    found["candidates"] = [{**found["candidates"][0], "name": name, "code": [f"{name}()"]} for name in ("both", "loop")]
    both = {"training_ms": {"own": own, "its": trains}, "forward_ms": {"own": own, "its": [2.0, 2.1]}}
    loop = {"training_ms": {"own": own, "its": [2.0, 2.4]}, "forward_ms": None}
    said = report._changes(found, {"both": {"difference": 0.0, **both}, "loop": {"difference": 0.0, **loop}})
    two = trains[0] > 2
    assert ("one at a time, not together" in said) == ("loop()" in said) == two and "both()" in said
    assert ("training 10.48 times as fast and forward" in said) == (not two)


@pytest.mark.parametrize(
    ("own", "its", "faster"),
    [([10, 11, 12], [5, 6, 7], True), ([10, 11, 12], [9, 9, 10.5], False), ([10, 10, 10], [9.9, 9.8, 9.9], False)],
)
def test_faster_is_what_is_clearly_so(own, its, faster):
    found, result = found_for_report(), {"difference": 0.0, "forward_ms": {"own": own, "its": its}}
    assert report.is_faster(result["forward_ms"]) == faster
    assert (report.best(found, {"planted": result}, "forward_ms") == "planted") == faster
    said = report._tried(found, {"planted": result})
    rule = (
        "faster in every turn: its slowest turn quicker than the model's quickest, and 1.05× as fast or more by medians"
    )
    assert ("| faster: forward |" in said) == faster and "slower" not in report.verdict(found, result)
    assert rule in said and rule in (PROJECT / "docs" / "doctor.md").read_text()


def test_outputs_that_are_not_finite_or_of_another_shape_never_agree():
    one = {"output 0": np.ones((2, 3))}
    assert difference({"output 0": np.full((2, 3), np.nan)}, one, None) == float("inf")
    assert difference({"output 0": np.ones((2, 2))}, one, None) == difference({}, one, None) == float("inf")
    mask = np.array([[True, False, False], [True, True, True]])
    padding = np.ones((2, 3, 4))
    padding[~mask] = 5
    assert difference({"output 0": padding}, {"output 0": np.ones((2, 3, 4))}, mask) == 0


# --- the command ------------------------------------------------------------------------------------------------------------


def run(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "harness.doctor", *arguments], cwd=PROJECT, capture_output=True, text=True, timeout=300
    )


def test_help_imports_no_framework():
    code = (
        "import sys; from harness.doctor.__main__ import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
        "sys.exit(bool({'tensorflow', 'keras', 'numpy'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True)
    assert done.returncode == 0 and "--try" in done.stdout


@pytest.mark.slow
def test_report_of_a_file_that_stays_as_it_is(tmp_path):
    path, out = tmp_path / "stacked.keras", tmp_path / "report.md"
    model = doctor_models.stacked()
    model.save(path)
    before = hashlib.sha256(path.read_bytes()).hexdigest()
    done = run(str(path), "--device=cpu", "--batch-size=4", "--try=WavefrontLSTM", f"--out={out}")
    assert (done.returncode, out.read_text()) == (0, done.stdout), done.stderr
    assert "| `middle` | LSTM(5) | cuDNN on an NVIDIA GPU" in done.stdout and "while loop" in done.stdout
    assert "| WavefrontLSTM | one layer for 3 LSTM layers" in done.stdout and "could not run" not in done.stdout
    assert hashlib.sha256(path.read_bytes()).hexdigest() == before
    assert sorted(each.name for each in tmp_path.iterdir()) == ["report.md", "stacked.keras"]


def write_lines(model, code, tmp_path):
    """Run the lines to write, in a process of their own, on a model with large weights: its outputs stay as they are."""
    model.save(tmp_path / "model.keras")
    program = [
        "import sys, keras, numpy as np, models.wavefront; sys.modules['wavefront_lstm'] = models.wavefront",
        f"model = keras.saving.load_model({str(tmp_path / 'model.keras')!r}); optimizer, loss = 'adam', 'mse'",
        "rng = np.random.default_rng(0); model.set_weights([rng.uniform(-.7, .7, w.shape) for w in model.get_weights()])",
        "shapes = [[4, *(size or 6 for size in each.shape[1:])] for each in model.inputs]",
        "batch = [rng.integers(1, 9, shape).astype('float32') for shape in shapes]",
        "batch = batch if len(batch) > 1 else batch[0]; before = np.array(model(batch))",
        *code,
        "after = np.array(model(batch)); assert np.abs(after - before).max() < 1e-5, (before, after)",
    ]
    (tmp_path / "lines.py").write_text("\n".join(program))
    environment = {"PYTHONPATH": str(PROJECT), "CUDA_VISIBLE_DEVICES": "", "KERAS_BACKEND": "tensorflow", "PATH": ""}
    done = subprocess.run([sys.executable, tmp_path / "lines.py"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "make", [make for make in doctor_models.MAKES if make.__name__ not in ("subclassed", "settings")]
)
@pytest.mark.parametrize("name", ["WavefrontLSTM", "WavefrontLSTM in CompiledLoop"])
def test_the_lines_to_write_make_the_same_model(make, name, tmp_path):
    model = make()
    offered, _ = candidates.offered(model, FACTS)
    if not (code := [[*each.code, candidates.compile_line(each, {})] for each in offered if each.name == name]):
        pytest.skip("not offered for this model")
    write_lines(model, code[0], tmp_path)


@pytest.mark.slow
def test_a_candidate_that_dies_is_a_line_of_the_report():
    done = run(f"{MODELS}:dies_when_built_again", "--device=cpu", "--batch-size=4", "--try=jit_compile=True")
    assert done.returncode == 0
    assert "| `middle` | LSTM(5) | cuDNN on an NVIDIA GPU" in done.stdout and "TensorFlow's while loop" in done.stdout
    assert "could not run: the process was ended by SIGSEGV" in done.stdout
    assert "Nothing that was tried is clearly faster" in done.stdout


# --- bad input --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "stateful.keras"
    doctor_models.stateful().save(path)
    return path


def changed(saved: Path, path: Path, **parts) -> None:
    """A copy of a .keras file with some of its parts others, by their names without ending; None: without it."""
    with zipfile.ZipFile(saved) as before, zipfile.ZipFile(path, "w") as after:
        for name in before.namelist():
            if (content := parts.get(name.split(".")[0], before.read(name))) is not None:
                after.writestr(name, content)


def refused(tmp_path: Path, capsys, *arguments: str) -> str:
    """What is printed; nothing is written."""
    before = {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    assert doctor.main([*arguments, "--device=cpu", "--try=none"]) == 2
    assert {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before
    printed, errors = capsys.readouterr()
    lines = [line for line in errors.splitlines() if not line.startswith("looking at")]
    assert printed == "" and len(lines) == 1 and lines[0].startswith("error: ")
    return lines[0]


FILES = {
    "truncated": lambda saved, path: path.write_bytes(saved.read_bytes()[:3000]),
    "not a file of Keras": lambda saved, path: path.write_text("no model"),
    "zip without config.json": lambda saved, path: changed(saved, path, config=None),
    "damaged, its config.json": lambda saved, path: changed(saved, path, config=b"{"),
    "deep as it may be": lambda saved, path: changed(saved, path, config=b"[" * 10**6),
    "its config.json is no object": lambda saved, path: changed(saved, path, config=b"[]"),
    "saved by Keras 99.0, installed": lambda saved, path: changed(saved, path, metadata=b'{"keras_version": "99.0"}'),
    "twice is a Lambda layer": lambda saved, path: doctor_models.with_a_lambda().save(path),
    "no such file": lambda saved, path: None,
    "a folder": lambda saved, path: path.mkdir(),
}


@pytest.mark.parametrize("words", FILES)
def test_a_file_that_cannot_be_a_model_is_one_line_before_tensorflow_starts(
    words, saved, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(doctor.processes, "run_child", None)
    path = tmp_path / "model.keras"
    FILES[words](saved, path)
    expected = "damaged, its config.json" if words == "deep as it may be" else words
    assert expected in refused(tmp_path, capsys, str(path))


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("--precision=tf32", "a CPU has no TensorFloat-32"),
        ("--batch-size=0", "expected a positive number"),
        ("--out=model.keras", "expected a file for the report"),
        ("--out=/nowhere/report.md", "no such folder"),
        ("--padding=left", "--padding"),
        ("--rows=keras", "unrecognized arguments"),
    ],
)
def test_a_wrong_option_is_one_line_before_tensorflow_starts(argument, words, saved, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(doctor.processes, "run_child", None)
    assert words in refused(tmp_path, capsys, str(saved), argument)


@pytest.mark.parametrize(
    ("model", "given", "words"),
    [
        ("nothing_recurrent", {}, "no recurrent layer in it"),
        ("needs_an_argument", {}, "needs units; expected a function without arguments"),
        ("returns_no_model", {}, "returns int; expected a keras.Model"),
        ("not_there", {}, "has no function not_there"),
        ("stacked", {"batch_size": 10**9}, "GiB of memory are needed at the least"),
        ("stateful", {"batch_size": 5}, "the model is made for 4 alone"),
        ("stacked", {"input_shape": ["6,7"]}, "is [6, 4] in the model"),
        ("two_inputs", {"input_shape": ["6"]}, "2 inputs; expected NAME=…"),
        ("two_inputs", {"input_shape": ["other=6"]}, "no such input; expected one of tokens, signal"),
        ("stacked", {"imports": ["no_such_module"]}, "cannot be imported"),
    ],
)
def test_a_model_that_cannot_be_looked_at_is_one_line(model, given, words, tensorflow_runtime):
    with pytest.raises(child.UserError) as error:
        child.look(options(f"{MODELS}:{model}", **{"batch_size": None, **given}), tensorflow_runtime)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_an_unknown_class_is_named_with_what_to_do_and_known_by_its_module(saved, tmp_path, tensorflow_runtime):
    path = tmp_path / "custom.keras"
    with zipfile.ZipFile(saved) as archive:
        config = json.loads(archive.read("config.json"))
    config["config"]["layers"][1] |= {"class_name": "Own", "registered_name": "mine>Own", "module": "mine"}
    changed(saved, path, config=json.dumps(config))
    with pytest.raises(child.UserError, match="holds mine>Own, which Keras does not know; expected --import=MODULE"):
        child.load(options(str(path)))
    doctor_models.subclassed().save(tmp_path / "tagger.keras")
    model, _, _ = child.load(options(str(tmp_path / "tagger.keras")))
    assert type(model) is doctor_models.Tagger


def test_an_h5_file_is_trained_with_its_loss_though_keras_reads_it_not(tmp_path, tensorflow_runtime):
    path = str(tmp_path / "model.h5")
    model = keras.Sequential([keras.Input((6, 3)), keras.layers.LSTM(4), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.save(path)
    with pytest.raises(ValueError):
        keras.saving.load_model(path)
    found = child.look(options(path), tensorflow_runtime)
    assert found["layers"] and min(found["training_ms"]) > 0
    assert not any("loss" in note for note in found["notes"]), found["notes"]


@pytest.mark.slow
def test_a_wrong_model_is_status_2_from_the_command_too(tmp_path, capsys):
    assert "no recurrent layer" in refused(tmp_path, capsys, f"{PROJECT}/tests/doctor_models.py:nothing_recurrent")


def test_a_process_that_takes_too_long_is_stopped(saved, tmp_path, capsys):
    assert "time limit of 1 s (--limit-s); a smaller --batch-size or --time-steps" in refused(
        tmp_path, capsys, str(saved), "--limit-s=1"
    )


def with_ours(**given):
    from models.wavefront import WavefrontLSTM

    stack = WavefrontLSTM(4, num_layers=3, dropout=0.25, return_sequences=True, name="stack", **given)
    last = WavefrontLSTM(5, direction="bidirectional", name="last")
    parts = [keras.Input((6, 3)), keras.layers.Masking(), stack, keras.layers.Dense(3), last, keras.layers.Dense(2)]
    model = keras.Sequential(parts)
    model.compile("sgd", "mse", jit_compile=True)
    return model


def test_of_a_model_with_the_layer_itself_keras_own_is_tried(tensorflow_runtime, tmp_path):
    """By the candidate and by the lines to write: the same outputs, with Dropout between the layers."""
    model = with_ours()
    made = subject(model, tensorflow_runtime)
    expected = made.outputs()
    offered, not_tried = candidates.offered(model, FACTS)
    [back] = [each for each in offered if each.name == "keras.layers.LSTM"]
    assert not not_tried and back.compiled == {"jit_compile": False}
    copy = with_ours()
    copy.set_weights(model.get_weights())
    changed = back.make(copy, FACTS)
    kinds = [type(layer).__name__ for layer in changed.layers]
    assert kinds == ["Masking", *["LSTM", "Dropout"] * 2, "LSTM", "Dense", "Bidirectional", "Dense"]
    assert {layer.rate for layer in changed.layers if isinstance(layer, keras.layers.Dropout)} == {0.25}
    changed.compile("sgd", "mse", jit_compile=False)
    assert difference(Subject(changed, made.batches, tensorflow_runtime).outputs(), expected, None) <= child.limit(
        "fp32"
    )
    same = "assert [type(layer).__name__ for layer in model.layers] == "
    write_lines(model, [*back.code, candidates.compile_line(back, {}), f"{same}{kinds!r}"], tmp_path)


def test_of_a_layer_that_has_no_counterpart_in_keras_it_is_said():
    offered, not_tried = candidates.offered(with_ours(layer_normalization=True), FACTS)
    assert "keras.layers.LSTM" not in [each.name for each in offered]
    [said] = not_tried
    assert said.startswith("keras.layers.LSTM for stack: with states, layer normalisation")


def test_what_was_found_is_printed_when_it_is_interrupted(saved, looked, tmp_path, capsys, monkeypatch):
    """First what runs, before anything is tried; then what was tried until Ctrl-C."""
    names, said = [each["name"] for each in looked["candidates"]], []

    def found(options, log, job):
        said.append(capsys.readouterr().out)
        if len(said) == 3:
            raise KeyboardInterrupt
        return looked if job["task"] == "look" else {"error": "planted"}

    monkeypatch.setattr(doctor, "_child", found)
    monkeypatch.setattr(doctor.signal, "signal", lambda *_: None)
    out = tmp_path / "report.md"
    assert len(names) > 2 and doctor.main([str(saved), "--device=cpu", f"--out={out}"]) == 130
    assert "## How long it takes" in said[1] and said[2] == ""
    rest = capsys.readouterr().out
    assert f"| {names[0]} |" in rest and f"Interrupted: {', '.join(names[1:])} not tried." in rest
    assert out.read_text() == said[1] + rest


def test_it_says_how_long_all_takes_at_most_and_then_going_by_those_before(saved, looked, capsys, monkeypatch):
    names, now = [each["name"] for each in looked["candidates"]][:3], iter([100, 100, 140, 200])
    monkeypatch.setattr(
        doctor, "_child", lambda options, log, job: looked if job["task"] == "look" else {"error": "planted"}
    )
    monkeypatch.setattr(doctor.signal, "signal", lambda *_: None)
    monkeypatch.setattr(doctor, "time", SimpleNamespace(monotonic=lambda: next(now)))
    assert doctor.main([str(saved), "--device=cpu", "--limit-s=200", f"--try={';'.join(names)}"]) == 0
    before = " as long as those before"
    assert capsys.readouterr().err.splitlines() == [
        f"looking at {saved}, at most 200 s (--limit-s)",
        f"trying {names[0]} (1 of 3), at most 200 s (--limit-s); all together at most 10 min",
        f"trying {names[1]} (2 of 3), at most 200 s (--limit-s); about 80 s left, if each takes{before}",
        f"trying {names[2]} (3 of 3), at most 200 s (--limit-s); about 50 s left, if each takes{before}",
    ]


# --- a GPU ------------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_on_a_gpu_the_profiler_sees_cudnns_kernels_where_the_rules_say_so(gpu_runtime):
    chosen = options(f"{MODELS}:settings", device="gpu")
    found = {each["place"]: each for each in child.look(chosen, gpu_runtime)["layers"]}
    ran = {name for name, each in found.items() if each["kind"] == layers.CUDNN}
    assert ran == {"plain", "gru"} == {name for name, each in found.items() if each["rules"].startswith("cuDNN")}
    assert all(found[name]["kernels"] for name in ran)
    assert not any(each["contradicts"] for each in found.values())


@pytest.mark.gpu
def test_on_a_gpu_the_stacks_of_cudnn_and_of_the_kernels_agree_and_are_timed():
    done = run(f"{MODELS}:stacked", "--device=gpu", "--precision=fp32", "--batch-size=16",
               "--try=cuDNN stack; WavefrontLSTM; WavefrontLSTM in CompiledLoop")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "could not run" not in done.stdout and "differ by more" not in done.stdout and "cuDNN" in done.stdout
