"""CompiledLoop against keras.Sequential with the same steps_per_execution: what a Keras user sees has to be the same."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from harness.measure.proof import UPDATE_STEPS, Kernel, Proof
from models import rows
from models.wavefront import tracing
from models.wavefront.compiled_loop import CompiledLoop
from tests import cases

FEATURES, CLASSES, BATCH = 6, 3, 8
RNG = np.random.default_rng(1)
X = RNG.normal(size=(20 * BATCH, FEATURES)).astype("float32")
Y = RNG.integers(0, CLASSES, len(X))
KINDS = (keras.Sequential, CompiledLoop)


def model_of(kind, steps=4, dropout=0.0, optimizer=None, dtype=None, **options):
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(5, "tanh", dtype=dtype), keras.layers.Dropout(dropout, seed=2, dtype=dtype)]
    model = kind([keras.Input((FEATURES,)), *layers, keras.layers.Dense(CLASSES)])
    settings = dict(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"],
                    weighted_metrics=["accuracy"], jit_compile=True, steps_per_execution=steps)  # fmt: skip
    model.compile(optimizer=optimizer or keras.optimizers.Adam(1e-2), **settings | options)
    return model


def trained(*data, **options):
    """(history, weights, optimizer's variables) of each kind after the same `fit`; `model`: of model_of."""
    found = []
    for kind in KINDS:
        of = dict(options)
        made = of.pop("model", dict)()
        model = model_of(kind, **made)
        fit = dict(shuffle=False, verbose=0, epochs=2) | of
        if "batch_size" not in fit and data:
            fit["batch_size"] = BATCH
        given = data or (fit.pop("make")(),)
        history = model.fit(*given, **fit).history
        found.append((history, model.get_weights(), [variable.numpy() for variable in model.optimizer.variables]))
    return found


def assert_same(usual, looped):
    """Within a few units of the last place of each array's largest number, since XLA may fuse two programs differently."""
    assert usual[0].keys() == looped[0].keys()
    for name, values in usual[0].items():
        np.testing.assert_allclose(looped[0][name], values, rtol=1e-6, err_msg=name)
    for one, other in zip(usual[1] + usual[2], looped[1] + looped[2], strict=True):
        np.testing.assert_allclose(other, one, rtol=0, atol=4e-7 * np.abs(one).max(initial=1e-30))


def test_what_a_step_traces_sees_that_xla_compiles_it(monkeypatch):
    """Else WavefrontLSTM took the schedule of a graph without XLA, and its CPU's masks were others than outside of the loop."""
    seen, model = [], model_of(CompiledLoop)
    first = model.layers[0]
    call = first.call
    monkeypatch.setattr(first, "call", lambda x, **more: seen.append(tracing.compiled_for("CPU")) or call(x, **more))
    model.fit(X[: 4 * BATCH], Y[: 4 * BATCH], batch_size=BATCH, verbose=0)
    model.evaluate(X[: 4 * BATCH], Y[: 4 * BATCH], batch_size=BATCH, verbose=0)
    assert len(seen) >= 2 and all(seen)


# --- the same training --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param(8 * BATCH, marks=pytest.mark.slow),  # twice 4 steps
        pytest.param(7 * BATCH, marks=pytest.mark.slow),  # 4 and 3
        6 * BATCH + 5,  # 4, 2 and a smaller batch
        pytest.param(8 * BATCH + 5, marks=pytest.mark.slow),  # twice 4, and the smaller batch alone
        pytest.param(2 * BATCH, marks=pytest.mark.slow),  # fewer than 4
        pytest.param(5, marks=pytest.mark.slow),  # less than a batch
    ],
)
def test_history_weights_and_optimizer_are_those_of_keras(rows):
    rest = X[rows:], Y[rows:]
    assert_same(*trained(X[:rows], Y[:rows], validation_data=(rest[0][:61], rest[1][:61])))


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(8, 8, 3, 8, 8, 2, 8), (3, 8, 8, 8, 5, 4), (8, 3, 2, 3, 8)])
def test_batches_of_any_sizes_are_trained_on_in_their_order(sizes):
    ends = np.cumsum(sizes)
    rows = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]

    def batches():
        yield from ((X[row], Y[row]) for row in rows)

    spec = tuple(tf.TensorSpec((None, *array.shape[1:]), array.dtype) for array in (X, Y))
    assert_same(*trained(make=lambda: tf.data.Dataset.from_generator(batches, output_signature=spec)))


@pytest.mark.slow
@pytest.mark.parametrize("rows", [6 * BATCH + 5, 8 * BATCH + 5])
def test_weights_of_samples_count_in_a_smaller_batch(rows):
    weights = RNG.uniform(0, 2, len(X))
    rest = X[rows : rows + 61], Y[rows : rows + 61], weights[rows : rows + 61]
    assert_same(*trained(X[:rows], Y[:rows], sample_weight=weights[:rows], validation_data=rest))


@pytest.mark.slow
def test_dropout_draws_keras_own_masks():
    usual, looped = trained(X, Y, model=lambda: dict(dropout=0.5))
    assert_same(usual, looped)
    undropped = trained(X, Y)[0]
    assert np.abs(usual[1][0] - undropped[1][0]).max() > 1e-3


def test_every_step_of_a_call_draws_another_mask():
    model = CompiledLoop([keras.Input((64,)), keras.layers.Dropout(0.5, seed=1),
                          keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])  # fmt: skip
    model.compile(keras.optimizers.SGD(1.0), loss=lambda y, outputs: outputs, jit_compile=True, steps_per_execution=4)
    model.fit(np.ones((4, 64), "float32"), np.zeros((4, 1), "float32"), batch_size=1, verbose=0)
    kept = np.round(-model.get_weights()[0] / 2)  # in how many of the 4 steps an input was kept
    assert set(np.unique(kept)) == {0, 1, 2, 3, 4}


SGD, ADAM = keras.optimizers.SGD, keras.optimizers.Adam
OPTIMIZERS = {
    "falling rate": lambda: dict(optimizer=SGD(keras.optimizers.schedules.InverseTimeDecay(0.5, 1, 0.5))),
    "clipping": lambda: dict(optimizer=ADAM(1e-2, global_clipnorm=0.1)),
    "moving average": lambda: dict(optimizer=ADAM(1e-2, use_ema=True, ema_overwrite_frequency=3)),
    "accumulation": lambda: dict(optimizer=ADAM(1e-2, gradient_accumulation_steps=3)),
    "loss scale": lambda: dict(
        optimizer=keras.optimizers.LossScaleOptimizer(ADAM(1e-2), initial_scale=2.0**40, dynamic_growth_steps=3),
        dtype="mixed_float16",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_optimizer_acts_at_every_step(kind):
    usual, looped = trained(X[: 7 * BATCH + 3], Y[: 7 * BATCH + 3], model=OPTIMIZERS[kind])
    assert_same(usual, looped)
    if kind == "loss scale":
        scale = [variables for variables in looped[2] if variables.size == 1 and variables > 2.0**10]
        assert len(scale) == 1 and scale[0] < 2.0**40  # overflows were met, and their steps left out


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["sample_weight", "class_weight"])
def test_weights_of_samples_and_classes_count(weights):
    given = {"sample_weight": RNG.uniform(0, 2, len(X)), "class_weight": {0: 0.2, 1: 1.0, 2: 3.0}}[weights]
    usual, looped = trained(X, Y, **{weights: given})
    assert_same(usual, looped)
    assert np.abs(looped[1][0] - trained(X, Y)[1][1][0]).max() > 1e-3


def endless():
    k = 0
    while True:
        rows = np.arange(k, k + BATCH) % len(X)
        yield X[rows], Y[rows]
        k += BATCH


class Sequence(keras.utils.PyDataset):
    def __len__(self):
        return 6

    def __getitem__(self, k):
        return X[k * BATCH : (k + 1) * BATCH], Y[k * BATCH : (k + 1) * BATCH]


DATA = {
    "dataset": lambda: tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH),
    "endless dataset": lambda: tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH).repeat(),
    "endless generator": endless,
    "PyDataset": Sequence,
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*super.*__init__")
@pytest.mark.parametrize("kind", DATA)
def test_data_of_every_kind_is_taken_in_its_order_and_none_is_lost_between_epochs(kind):
    steps = dict(steps_per_epoch=7) if "endless" in kind else {}
    assert_same(*trained(make=DATA[kind], epochs=3, **steps))


@pytest.mark.slow
def test_callbacks_are_called_as_by_keras():
    seen = []
    for kind in KINDS:
        calls = []

        class Notes(keras.callbacks.Callback):
            def on_train_batch_begin(self, batch, logs=None, calls=calls):
                calls.append(("begin", batch))

            def on_train_batch_end(self, batch, logs=None, calls=calls):
                calls.append(("end", batch, *(round(logs[name], 5) for name in sorted(logs))))

            def on_test_batch_end(self, batch, logs=None, calls=calls):
                calls.append(("tested", batch, round(logs["loss"], 5)))

        model_of(kind).fit(X[:75], Y[:75], batch_size=BATCH, verbose=0, shuffle=False, callbacks=[Notes()],
                           validation_data=(X[75:130], Y[75:130]))  # fmt: skip
        seen.append(calls)
    assert seen[0] == seen[1] and len(seen[0]) == 8


def test_training_stops_where_a_callback_says_so():
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = True

    model = model_of(CompiledLoop)
    for _ in range(2):  # a second fit begins with the data's beginning
        model.fit(X, Y, batch_size=BATCH, callbacks=[Stop()], verbose=0)
    assert model.optimizer.iterations.numpy() == 8


@pytest.mark.slow
def test_evaluation_prediction_and_single_batches_are_those_of_keras():
    usual, looped = (model_of(kind) for kind in KINDS)
    for count in (12 * BATCH, 9 * BATCH + 3, 5):
        x, y = X[:count], Y[:count]
        np.testing.assert_allclose(*(model.evaluate(x, y, BATCH, verbose=0) for model in (usual, looped)), rtol=1e-6)
        np.testing.assert_allclose(*(model.predict(x, BATCH, verbose=0) for model in (usual, looped)), rtol=1e-5)
    for _ in range(2):
        np.testing.assert_allclose(*(model.train_on_batch(X[:5], Y[:5]) for model in (usual, looped)), rtol=1e-6)
        np.testing.assert_allclose(*(model.test_on_batch(X[:5], Y[:5]) for model in (usual, looped)), rtol=1e-6)


def test_train_step_of_a_subclass_keeps_its_logs():
    class Own(CompiledLoop):
        def train_step(self, data):
            return {**super().train_step(data), "rows": tf.shape(data[0])[0], "mean": tf.reduce_mean(data[0])}

    model, seen = model_of(Own), []
    notes = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(logs))
    model.fit(X, Y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[notes])
    assert [logs["rows"] for logs in seen] == [BATCH] * 5
    means = [X[k * BATCH : (k + 1) * BATCH].mean() for k in range(3, 20, 4)]  # of the last step of each call
    np.testing.assert_allclose([logs["mean"] for logs in seen], means, rtol=1e-5)


def test_model_comes_back_from_a_file_and_trains_on(tmp_path):
    model = model_of(CompiledLoop)
    model.fit(X, Y, batch_size=BATCH, verbose=0, shuffle=False)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert type(loaded) is CompiledLoop and loaded.steps_per_execution == 4
    losses = [m.fit(X, Y, batch_size=BATCH, verbose=0, shuffle=False).history["loss"] for m in (model, loaded)]
    np.testing.assert_allclose(*losses, rtol=1e-6)


# --- one program --------------------------------------------------------------------------------------------------------


def test_one_trace_serves_every_number_of_steps():
    model, traces = model_of(CompiledLoop), []
    step = model.train_step
    model.train_step = lambda data: traces.append(data[0].shape) or step(data)
    model.fit(X[:BATCH], Y[:BATCH], batch_size=BATCH, verbose=0)
    first = len(traces)  # two, since the metrics' variables are made in one
    assert set(traces) == {(BATCH, FEATURES)} and first <= 2
    for batches in (3, 4, 11, 20):
        model.fit(X[: batches * BATCH], Y[: batches * BATCH], batch_size=BATCH, verbose=0)
    assert len(traces) == first
    model.fit(X[: 4 * BATCH + 3], Y[: 4 * BATCH + 3], batch_size=BATCH, verbose=0)
    for more in (3, 2, 3):  # smaller batches, of sizes that a step knows, where Keras would trace one of any size
        model.fit(X[: 4 * BATCH + more], Y[: 4 * BATCH + more], batch_size=BATCH, verbose=0)
    assert traces[first:] == [(3, FEATURES), (2, FEATURES)]


def test_with_one_step_per_call_it_is_keras_itself():
    model = model_of(CompiledLoop, steps=1)
    assert_same(*trained(X, Y, model=lambda: dict(steps=1)))
    model.make_train_function()
    assert model.train_function.__module__.startswith("keras.")


@pytest.mark.parametrize("options", [{"jit_compile": False}, {"run_eagerly": True, "jit_compile": False}])
def test_with_one_step_per_call_it_runs_without_xla_as_keras_does(options):
    usual, looped = (model_of(kind, steps=1, **options) for kind in KINDS)
    for model in (usual, looped):
        model.fit(X[:20], Y[:20], batch_size=BATCH, shuffle=False, verbose=0)
    for call in ("train_on_batch", "test_on_batch"):
        np.testing.assert_allclose(*(getattr(model, call)(X[:5], Y[:5]) for model in (usual, looped)), rtol=1e-6)


@pytest.mark.slow
def test_row_trains_like_the_wavefront_row():
    ends = []
    for row in ("wavefront", "wavefront_loop"):
        trial = cases.classifier(row, "fp32")
        trial.restore()
        proven, traces = trial.train_steps(3), trial.traces
        ends.append((proven, trial.weights(), trial.timed_steps(3), trial.weights()))
        trial.timed_steps(1)
        assert trial.traces == traces
    for one, other in zip(*ends, strict=True):
        for name in one if isinstance(one, dict) else [...]:
            np.testing.assert_allclose(other[name], one[name], rtol=0, atol=2e-6 * np.abs(one[name]).max())
    assert isinstance(trial.model, CompiledLoop) and type(trial.model).__base__ is keras.Sequential


def test_expected_ops_refuse_steps_that_did_not_run_in_one_call(tensorflow_runtime):
    """Three steps in two calls of a program of two; that one call passes is what tests/models/test_classifier.py shows."""
    kernel = Kernel(**rows.FIT_TENSORFLOW["wavefront_loop"].expected_ops(2, cases.STEPS, "cpu", UPDATE_STEPS))
    trial = cases.classifier("wavefront_loop", "fp32")
    trial.model.steps_per_execution = 2
    trial.train_steps(1)
    proof = Proof("fp32")
    proof.what_ran(tensorflow_runtime.profile(lambda: trial.timed_steps(UPDATE_STEPS)), kernel, "cpu")
    assert proof.failures == {"kernel": "op xla:While ran 2 times, expected 1 to 1"}


# --- refused ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"run_eagerly": True, "jit_compile": False}, r"^run_eagerly: True given"),
        ({"steps_per_execution": -1}, r"^steps_per_execution: -1 given, expected 1 or more"),
        ({"jit_compile": False}, r"^jit_compile: False \(given, or Keras' 'auto'\), expected True"),
    ],
)
def test_what_could_not_be_compiled_is_refused_every_time(options, message):
    model = model_of(CompiledLoop, **options)
    for call in (model.fit, model.fit, model.evaluate, model.evaluate):
        with pytest.raises(ValueError, match=message):
            call(X, Y, verbose=0)


def test_strategy_is_refused_inside_of_its_scope_and_outside():
    strategy = tf.distribute.OneDeviceStrategy("/CPU:0")
    with strategy.scope():
        model = model_of(CompiledLoop)
        with pytest.raises(ValueError, match=r"^tf.distribute: a strategy given"):
            model.fit(X, Y, verbose=0)
    with pytest.raises(ValueError, match=r"^tf.distribute: a strategy given"):
        model.fit(X, Y, verbose=0)


def test_batches_without_one_shape_are_refused():
    model = model_of(CompiledLoop)
    ragged = tf.data.Dataset.from_generator(
        lambda: iter([(X[:4], Y[:4])]),
        output_signature=(tf.TensorSpec((None, None), "float32"), tf.TensorSpec((None,), "int64")),
    )
    with pytest.raises(ValueError, match=r"^batches: TensorSpec.*known but for the batch size; pad them"):
        model.fit(ragged, verbose=0)


def test_error_of_the_data_reaches_the_user():
    def broken():
        for k in range(6):
            yield X[k * BATCH : (k + 1) * BATCH], Y[k * BATCH : (k + 1) * BATCH]
        raise ArithmeticError("of the data")

    for kind in KINDS:
        with pytest.raises(Exception, match="of the data"):
            model_of(kind).fit(broken(), verbose=0)


@pytest.mark.slow
def test_models_of_other_shapes_train_in_one_process():
    """What takes the batches is one function for all: a trace that was relaxed to several shapes would know none."""
    for shape in ((4, 3), (5, 2), (6,)):
        x, y = np.ones((20, *shape), "float32"), np.zeros(20, "int64")
        model = CompiledLoop([keras.Input(shape), keras.layers.Flatten(), keras.layers.Dense(2)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("sgd", loss, jit_compile=True, steps_per_execution=2)
        losses = model.fit(x, y, batch_size=8, epochs=2, verbose=0).history["loss"]
        assert losses[1] < losses[0]
