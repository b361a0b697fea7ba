"""implementation="auto" of WavefrontLSTM: the rule against every committed time, and what is chosen where."""

import itertools
import json
import logging
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf

from models.wavefront import choice, nvrtc, tracing
from models.wavefront.layer import WavefrontLSTM
from models.wavefront.nvrtc import Chip
from models.wavefront.stack import LayerWeights
from models.wavefront.work import DTYPE_CODES, Work, padded_units
from tests.models.emulated_kernels import H200, emulated

LIMIT = 1.05  # times the better of the two
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")


@pytest.fixture(autouse=True)
def without_mps(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture
def eager_too(monkeypatch):
    """The emulated kernels run in eager calls alone, where the rule takes XLA's implementation."""
    monkeypatch.setattr(choice, "_eager", lambda: False)


@pytest.fixture
def h200(monkeypatch):
    """Traces as on an H200; nothing of the kernels can run."""
    monkeypatch.setattr(nvrtc, "chip", lambda: H200)
    monkeypatch.setattr(nvrtc, "ptx", lambda *arguments: "")


# -- the rule and the records ------------------------------------------------------------------------------------------------


RESULTS = Path(__file__).resolve().parents[2] / "results"
# The GPU of the records: of others no point is read. Its points are judged on the fixture's chip, which is as large.
CHIP = "NVIDIA H100 80GB HBM3"
DTYPES = {"tf32": "tf32", "fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
SIZES = ("NUM_LAYERS", "UNITS", "BATCH_SIZE")


class Point(NamedTuple):
    """A size at which both were measured.

    Attributes:
        name: of the records, without their row.
        num_layers, time: of the stack; steps.
        work: of one forward step of all layers.
        masked: whether its sequences end at lengths of their own.
        by_float16: whether the kernels took factors of float16, or pairs of them.
        dropout: whether there is some between the layers.
        ms: of a step, by implementation; None: it failed.
    """

    name: str
    num_layers: int
    time: int
    work: Work
    masked: bool
    by_float16: bool
    dropout: bool
    ms: dict[str, float | None]


def points(results: Path = RESULTS) -> Iterator[Point]:
    for path in sorted(results.glob("*/rows/*.wavefront_persistent.*.gpu.*.json")):
        other = path.with_name(path.name.replace(".wavefront_persistent.", ".wavefront."))
        if not other.exists():
            continue
        ours, xla = (json.loads(each.read_text()) for each in (path, other))
        config = xla["config"]
        if xla["environment"].get("gpu") != CHIP or not all(name in config for name in SIZES):
            continue
        if config.get("STREAM"):  # one step a call: the host's time, with a spread far over LIMIT
            continue
        if xla["mode"] == "fit":  # a whole training, in mnist of another loop too
            continue
        num_layers, units, batch = (config[name] for name in SIZES)
        masked = xla["benchmark"] == "ptb_sentences"
        time = config["MAX_WORDS"] if masked else config["TIME_STEPS"]
        dtype_code = DTYPE_CODES[DTYPES[xla["precision"]]]
        padded = padded_units(units, Work(1, batch, units, dtype_code, False).itemsize)
        ms = {
            name: record["step_ms"]["median"] if record["status"] == "ok" else None
            for name, record in (("xla", xla), ("persistent", ours))
        }
        dropout = xla["mode"] == "train" and config.get("KEEP_PROB", 1) < 1
        work = Work(num_layers, batch, padded, dtype_code, False)
        name = f"{path.parts[-3]} {other.name}"
        kernels = ((ours.get("proof") or {}).get("kernel") or {}).get("kernels") or {}
        by_float16 = any(kernel.startswith("lstm_") and kernel.endswith("float16") for kernel in kernels)
        yield Point(name, num_layers, time, work, masked, by_float16, dropout, ms)


def wrong_choices(monkeypatch) -> list[str]:
    """The points at which what is chosen took over LIMIT times the better one, or could not run."""
    wrong = []
    for point in points():
        work = point.work
        tf32 = work.dtype_code == DTYPE_CODES["tf32"]
        monkeypatch.setattr(tf.config.experimental, "tensor_float_32_execution_enabled", lambda tf32=tf32: tf32)
        monkeypatch.setattr("models.wavefront.work.HALVES_ALLOWED", point.by_float16)  # by the kernels that were timed
        dtype = {2: "float16", 4: "float32"}[work.itemsize]
        x = tf.TensorSpec([point.time, work.batch, work.units], dtype)
        layer = LayerWeights(None, tf.TensorSpec([work.units, 4 * work.units], dtype), None)
        with tf.Graph().as_default():
            lengths = tf.ones([work.batch], tf.int32) if point.masked else None
            options = dict(lengths=lengths, bidirectional=False, dropout=point.dropout, keep=False)
            chosen, _ = choice.chosen(x, [layer] * point.num_layers, [], **options)
        if point.ms[chosen] is None or point.ms[chosen] > LIMIT * min(filter(None, point.ms.values())):
            wrong.append(point.name)
    return wrong


def test_no_committed_time_is_slower_than_the_better_one(h200, monkeypatch):
    names = [point.name for point in points()]
    assert len(names) > 40 and any("units_2048" in name for name in names)
    assert any(point.masked for point in points())
    assert wrong_choices(monkeypatch) == []


def test_one_implementation_everywhere_fails_the_records(h200, monkeypatch):
    for where in ("on a CPU", ""):  # always "xla"; and the kernels also where they do not fit
        monkeypatch.setattr(choice, "_elsewhere", lambda devices, where=where: where)
        if not where:
            monkeypatch.setattr(choice.persistent, "planned", lambda x, *_: (Work(1, 10**9, 16, 0, False), 1))
        assert wrong_choices(monkeypatch)


# -- what is chosen where ----------------------------------------------------------------------------------------------------


def traced(
    time=3, batch=2, units=16, mask=False, dtype="float32", around=lambda call: call, **options
) -> WavefrontLSTM:
    """A layer after one trace in training; around: what to make of its call."""
    of_nothing = dict.fromkeys(("kernel_initializer", "recurrent_initializer"), "zeros")
    layer = WavefrontLSTM(units, **{"num_layers": 2, "dtype": dtype, **of_nothing, **options})
    layer.build((None, None, 4))
    assert layer.chosen is None

    def call(x):
        return layer(x, mask=tf.ones(tf.shape(x)[:2], bool) if mask else None, training=True)

    tf.function(around(call), autograph=False).get_concrete_function(
        tf.TensorSpec([batch, time, 4], layer.variable_dtype)
    )
    return layer


@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(dropout=0.5),
        dict(recurrent_dropout=0.5),
        dict(dtype="mixed_float16"),
        dict(dtype="mixed_bfloat16"),
        dict(return_state=True, return_sequences=True),
        dict(num_layers=1),
        dict(mask=True),
        dict(direction="bidirectional"),
        dict(direction="bidirectional", num_layers=1, mask=True, dropout=0.5, recurrent_dropout=0.5),
    ],
)
def test_what_the_kernels_do_is_given_to_them(h200, options):
    assert traced(**options).chosen == "persistent"


REFUSED = [
    (dict(direction="bidirectional", units=4300, num_layers=1), "does not fit on the 132"),
    (dict(layer_normalization=True), "layer normalisation"),
    (dict(dtype="float64"), "float64 given"),
    (dict(batch=None), r"inputs of shape \(3, None, 4\)"),
    (dict(time=None), r"inputs of shape \(None, 2, 4\)"),
    (dict(units=4300, num_layers=1), "does not fit on the 132"),
    (dict(units=2000, batch=1000), r"the kernels have place for \d+ of 1000 sequences at a time"),
    (dict(units=2000, batch=100), r"the kernels would read \d\d% of the weights anew at every step"),
    (dict(around=lambda call: lambda x: tf.vectorized_map(call, x[tf.newaxis])), "in tf.vectorized_map"),
    (dict(around=lambda call: under_a_strategy(call)), "under tf.distribute, outside of XLA"),
]


def under_a_strategy(call):
    strategy = tf.distribute.OneDeviceStrategy("/cpu:0")
    return lambda x: strategy.run(call, (x,))


@pytest.mark.parametrize(("given", "why"), REFUSED)
def test_what_the_kernels_refuse_goes_to_xla_and_says_why(h200, caplog, given, why):
    caplog.set_level(logging.INFO, "wavefront_lstm")
    layer = traced(**given)
    assert layer.chosen == "xla"
    [line] = [record.getMessage() for record in caplog.records if record.name == "wavefront_lstm"]
    assert line.startswith(f"{layer.name}: xla: ") and re.search(why, line)


def test_under_a_strategy_what_xla_compiles_is_given_to_the_kernels(h200):
    around = lambda call: under_a_strategy(tf.function(call, jit_compile=True, autograph=False))  # noqa: E731
    assert traced(around=around).chosen == "persistent"


@pytest.mark.parametrize(
    ("chip", "error", "why"),
    [
        (H200._replace(capability=75), None, "compute capability 7.5 given"),
        (None, ValueError("no NVRTC found"), "no NVRTC found"),
        (None, OSError("libcuda.so.1: cannot open"), "libcuda.so.1"),
    ],
)
def test_a_gpu_or_machine_without_what_the_kernels_need_gets_xla(h200, monkeypatch, caplog, chip, error, why):
    def found():
        if error:
            raise error
        return chip

    caplog.set_level(logging.INFO, "wavefront_lstm")
    monkeypatch.setattr(nvrtc, "chip", found)
    assert traced().chosen == "xla" and why in caplog.text


def test_an_nvrtc_that_does_not_know_the_chip_gets_xla_and_a_warning(h200, monkeypatch, caplog):
    def ptx(*arguments):
        raise ValueError("CUDA source does not compile")

    monkeypatch.setattr(nvrtc, "ptx", ptx)
    assert traced().chosen == "xla"
    [warned] = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warned.endswith("so implementation='xla' is used: CUDA source does not compile")


def test_a_cpu_beside_a_gpu_gets_xla(h200, monkeypatch):
    """By the scope of the call, in Keras' own steps too, or by where the weights are."""
    gpu = SimpleNamespace(name="/physical_device:GPU:0")
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: [gpu])
    logical = [SimpleNamespace(name="/device:GPU:0")]
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: logical)
    assert traced().chosen == "xla"  # all is on this machine's CPU
    assert choice._elsewhere(["/device:CPU:0"]) == "on a CPU"
    monkeypatch.setattr(tracing, "own_device", lambda: "/job:localhost/replica:0/task:0/device:GPU:0")
    assert choice._elsewhere(["/job:localhost/replica:0/task:0/device:GPU:0"]) == ""
    assert traced().chosen == "xla"  # its weights
    logical.append(SimpleNamespace(name="/device:GPU:1"))
    assert choice._elsewhere([]) == "several logical GPUs on a card"


def test_the_gpus_of_other_tasks_are_not_on_this_card(h200, monkeypatch):
    """As TensorFlow lists them in a process of MultiWorkerMirroredStrategy, outside of the strategy's scope."""
    gpu = SimpleNamespace(name="/physical_device:GPU:0")
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: [gpu])
    names = [f"/job:worker/replica:0/task:{task}/device:GPU:0" for task in range(2)]
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: [SimpleNamespace(name=name) for name in names])
    monkeypatch.setattr(tracing, "own_device", lambda: names[1])
    assert choice._elsewhere(names[1:]) == ""
    names.append(names[1].replace("GPU:0", "GPU:1"))
    assert choice._elsewhere(names[1:]) == "several logical GPUs on a card"


def test_the_device_is_that_of_the_scope_around_the_function():
    [cpu] = {tf.zeros([]).device}
    found = []
    function = tf.function(lambda: found.append(tracing.own_device()))
    with tf.device("/CPU:0"):
        function()
    assert found == [cpu]


def test_a_gpu_under_mps_gets_xla(h200, tmp_path):
    (tmp_path / "control").touch()
    assert traced().chosen == "xla"


def test_eager_calls_get_xla(h200):
    layer = WavefrontLSTM(16)
    layer(tf.zeros([2, 3, 4]))
    assert layer.chosen == "xla"
    tf.function(layer).get_concrete_function(tf.TensorSpec([2, 3, 4]))
    assert layer.chosen == "persistent"
    tf.config.run_functions_eagerly(True)
    try:
        layer(tf.zeros([2, 3, 4]))
    finally:
        tf.config.run_functions_eagerly(False)
    assert layer.chosen == "xla"


def test_a_layer_says_each_choice_once(h200, caplog):
    caplog.set_level(logging.INFO, "wavefront_lstm")
    layer = WavefrontLSTM(16)
    model = keras.Sequential([keras.Input((3, 4)), layer])  # Keras traces it for its shapes
    assert layer.chosen is None and not caplog.records
    for batch in (2, 2, None, None, 2):
        tf.function(model).get_concrete_function(tf.TensorSpec([batch, 3, 4]))
    kinds = [record.getMessage().split(": ")[1] for record in caplog.records]
    assert kinds == ["persistent", "xla"]
    assert layer.chosen == "persistent", "the latest trace's"


def test_a_demand_is_no_choice(h200, caplog):
    caplog.set_level(logging.INFO, "wavefront_lstm")
    for kind, mask in itertools.product(("xla", "persistent"), (False, True)):
        assert traced(implementation=kind, mask=mask).chosen == kind
    assert not [record for record in caplog.records if record.name == "wavefront_lstm"]


# -- what works whatever is chosen -------------------------------------------------------------------------------------------


def test_saved_layers_keep_their_implementation(tmp_path):
    for kind in ("auto", "xla", "persistent"):
        config = WavefrontLSTM(5, implementation=kind).get_config()
        assert config["implementation"] == kind
        assert WavefrontLSTM.from_config(config).implementation == kind
        model = keras.Sequential([keras.Input((3, 4)), WavefrontLSTM(5, implementation=kind)])
        model.save(tmp_path / "model.keras")
        assert keras.models.load_model(tmp_path / "model.keras").layers[0].implementation == kind


@pytest.mark.parametrize("jit_compile", [False, True])
def test_fit_on_batches_of_several_sizes(h200, jit_compile):
    """What "persistent" refuses by an error. The number of steps is unknown to the model, and known to its data."""
    model = keras.Sequential([keras.Input((None, 4)), WavefrontLSTM(5)])
    model.compile("sgd", "mse", jit_compile=jit_compile)
    x, y = np.zeros((10, 3, 4), "float32"), np.zeros((10, 5), "float32")
    model.fit(x, y, batch_size=4, verbose=0)
    assert model.layers[0].chosen == "xla"


@needs_compiler
def test_a_model_that_the_kernels_trained_serves_on_a_cpu(monkeypatch, folder, tmp_path, eager_too):
    """Export asks for batches of any size; the numbers are those of the kernels."""
    x = np.random.default_rng(0).normal(size=(4, 3, 4)).astype("float32")
    model = keras.Sequential([keras.Input((3, 4)), WavefrontLSTM(16, 2)])
    model.compile("sgd", "mse", jit_compile=False)
    with emulated(monkeypatch, folder, tf32=False):
        model.fit(x, np.ones((4, 16), "float32"), batch_size=4, verbose=0)
        assert model.layers[0].chosen == "persistent"
        expected = model(x)
        np.testing.assert_allclose(model.predict(x, batch_size=3, verbose=0), expected, atol=1e-6)
    with monkeypatch.context() as patch:
        patch.setattr(nvrtc, "chip", lambda: H200)
        patch.setattr(nvrtc, "ptx", lambda *arguments: "")
        model.export(tmp_path / "served", verbose=False)
        assert model.layers[0].chosen == "xla"
    served = keras.layers.TFSMLayer(tmp_path / "served", call_endpoint="serve")
    np.testing.assert_allclose(served(x), expected, atol=1e-5)
    model.save(tmp_path / "model.keras")
    np.testing.assert_allclose(keras.models.load_model(tmp_path / "model.keras")(x), expected, atol=1e-5)


@needs_compiler
def test_masks_and_batches_without_one_are_the_same_layer(monkeypatch, folder, eager_too):
    """Embedding(mask_zero=True) in a functional model, and its layer unmasked; both are Keras' LSTM."""
    tokens = np.array([[3, 1, 2, 0], [1, 2, 3, 4], [5, 0, 0, 0]])
    inputs = keras.Input((4,), dtype="int32")
    embedding = keras.layers.Embedding(6, 4, mask_zero=True)
    stack = WavefrontLSTM(16, 2)
    model = keras.Model(inputs, stack(embedding(inputs)))
    below, above = keras.layers.LSTM(16, return_sequences=True), keras.layers.LSTM(16)
    masked = keras.Model(inputs, above(below(embedding(inputs))))
    weights = list(stack.get_canonical().values())
    below.set_weights(weights[:3])
    above.set_weights(weights[3:])
    with emulated(monkeypatch, folder, tf32=False):
        np.testing.assert_allclose(model(tokens), masked(tokens), atol=1e-5)
        assert stack.chosen == "persistent"
        x = tf.constant(np.random.default_rng(0).normal(size=(3, 4, 4)), "float32")
        np.testing.assert_allclose(stack(x), above(below(x)), atol=1e-5)
        assert stack.chosen == "persistent"


def test_the_mask_of_an_embedding_goes_to_the_kernels(h200):
    model = keras.Sequential(
        [
            keras.Input((4,), dtype="int32", batch_size=2),
            keras.layers.Embedding(6, 4, mask_zero=True),
            WavefrontLSTM(5),
        ]
    )
    tf.function(model).get_concrete_function(tf.TensorSpec([2, 4], tf.int32))
    assert model.layers[1].chosen == "persistent"


def test_the_mask_of_an_embedding_is_trained_and_predicted_with_under_xla():
    model = keras.Sequential(
        [
            keras.Input((4,), dtype="int32", batch_size=2),
            keras.layers.Embedding(6, 4, mask_zero=True),
            WavefrontLSTM(5, implementation="xla"),
        ]
    )
    model.compile("sgd", "mse", jit_compile=True)
    tokens = np.array([[3, 1, 2, 0], [1, 2, 3, 4]])
    model.fit(tokens, np.zeros((2, 5), "float32"), batch_size=2, verbose=0)
    assert np.isfinite(model.predict(tokens, batch_size=2, verbose=0)).all()


@needs_compiler
@pytest.mark.parametrize(
    ("ours", "lengths", "direction", "units"),
    [
        pytest.param("auto", None, "unidirectional", 16, marks=pytest.mark.slow),
        ("persistent", (2, 1), "unidirectional", 9),
        ("persistent", (2, 1), "bidirectional", 16),
        pytest.param("persistent", (2, 1), "bidirectional", 9, marks=pytest.mark.slow),
    ],
)
def test_every_derivative_is_that_of_xla(monkeypatch, folder, eager_too, ours, lengths, direction, units):
    """First and second ones, a Jacobian, a derivative in forward mode, and what tf.vectorized_map makes of a call. Of 9 units the
    kernels have 16."""
    x = tf.constant(np.random.default_rng(0).normal(size=(2, 2, 4)), "float32")
    mask = None if lengths is None else tf.sequence_mask(lengths, 2)
    results = {}
    with emulated(monkeypatch, folder, tf32=False):
        for kind in (ours, "xla"):
            layer = WavefrontLSTM(
                units, 2, direction=direction, implementation=kind, return_sequences=True, seed=1, recurrent_dropout=0.3
            )
            layer.build(x.shape)
            random = np.random.default_rng(1)
            layer.set_canonical(
                {name: random.normal(size=array.shape, scale=0.3) for name, array in layer.get_canonical().items()}
            )
            sources = [x, *(variable.value for variable in layer.trainable_variables)]
            with tf.GradientTape() as outer:
                outer.watch(x)
                with tf.GradientTape() as tape:
                    tape.watch(x)
                    loss = tf.reduce_sum(tf.square(layer(x, mask=mask, training=True)))
                gradients = tape.gradient(loss, sources)
                penalty = sum(tf.reduce_sum(tf.square(gradient)) for gradient in gradients)
            results[kind] = [*gradients, *outer.gradient(penalty, sources)]
            with tf.GradientTape() as tape:
                tape.watch(x)
                last = layer(x, mask=mask)[:, -1]
            results[kind].append(tape.jacobian(last, x))
            with tf.autodiff.ForwardAccumulator(x, tf.ones_like(x)) as forward:
                outputs = layer(x, mask=mask)
            assert layer.chosen == {"auto": "persistent"}.get(kind, kind)
            results[kind] += [forward.jvp(outputs), keras.layers.TimeDistributed(layer)(x[:, tf.newaxis])]
    for found, expected in zip(results[ours], results["xla"], strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max(), rtol=1e-4)


def test_tapes_around_a_call_ask_no_launch_for_its_gradient(h200):
    """For a function that is watched TensorFlow makes its gradient at once, of a custom call too, which has none."""

    def twice(x):
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = layer(x)
            gradient = tape.gradient(y, x)
        return outer.gradient(gradient, x)

    layer = WavefrontLSTM(16, 2)
    layer.build((2, 3, 4))
    assert tf.function(twice).get_concrete_function(tf.TensorSpec([2, 3, 4])).structured_outputs.shape == (2, 3, 4)
    assert layer.chosen == "persistent"
    if not tf.config.list_physical_devices("GPU"):
        with (
            tf.GradientTape(),
            pytest.raises(tf.errors.NotFoundError, match="custom call"),
        ):  # the launch alone is missing
            WavefrontLSTM(16, 2, implementation="persistent")(tf.zeros([2, 3, 4]))


def test_what_the_choice_compiles_is_what_is_launched(h200, monkeypatch):
    """NVRTC keeps what it has compiled, by the macros; of 650 units the kernels have 656."""
    asked = []
    monkeypatch.setattr(nvrtc, "ptx", lambda source, macros, capability: asked.append(macros) or "")
    layer = WavefrontLSTM(650, 2, return_sequences=True)
    tf.function(layer).get_concrete_function(tf.TensorSpec([20, 9, 5]))
    assert layer.chosen == "persistent" and len(asked) > 1 and len(set(asked)) == 1


def test_a_small_chip_has_its_own_tilings(h200, monkeypatch):
    """With place for 192 sequences: of more, two launches, or XLA's implementation."""
    monkeypatch.setattr(nvrtc, "chip", lambda: Chip(multiprocessors=1, shared_bytes=64 * 1024, capability=90))
    kinds = {batch: traced(batch=batch).chosen for batch in (192, 384, 385)}
    assert list(kinds.values()) == ["persistent", "persistent", "xla"], kinds
