"""WavefrontLSTM as a Keras layer: compared with stacks of keras.layers.LSTM, and what a Keras layer has to do."""

import os
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

from models.wavefront import layer as wavefront
from models.wavefront import tracing
from models.wavefront.layer import WavefrontLSTM
from tests import cudnn_layer_cases
from tests.comparing import error
from tests.cudnn_layer_cases import (
    BATCH,
    DIRECTIONS,
    FEATURES,
    INPUTS,
    LENGTHS,
    MASK,
    TIME,
    UNITS,
    initial_state,
    random,
)
from tests.wavefront_cases import layer, numpy_stack, parameters

pytestmark = pytest.mark.usefixtures("on_the_cpu")

FLOAT64 = 1e-12  # between two ways to compute the same; measured: 1e-15


def loss_and_gradients(run, x, variables):
    with tf.GradientTape() as tape:
        tape.watch(x)
        outputs = run(x)
        loss = tf.reduce_sum(tf.cast(outputs, "float64") * random(*outputs.shape, seed=2))
    return outputs, tape.gradient(loss, [x, *(v.value for v in variables)])


# --- what it computes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("normalized", [False, True])
def test_states_go_in_and_come_out_as_in_the_cudnn_layer(direction, normalized):
    made = layer(2, direction, layer_normalization=normalized, return_sequences=True, return_state=True)
    start = initial_state(made)
    results = made(INPUTS, initial_state=start, mask=MASK)
    for given, expected in zip(results, numpy_stack(INPUTS, made.get_canonical(), *start, LENGTHS), strict=True):
        assert error(given, expected) < FLOAT64
    if not normalized:
        cudnn = cudnn_layer_cases.layer("lstm", 2, direction, return_sequences=True, return_state=True)
        for given, expected in zip(results, cudnn(INPUTS, initial_state=start, mask=MASK), strict=True):
            assert given.shape == expected.shape and error(given, expected) < FLOAT64


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_under_xla_on_a_cpu_layers_run_in_turn_and_compute_what_a_gpu_does(direction, monkeypatch):
    made = layer(3, direction, return_sequences=True, recurrent_dropout=0)
    ran = []
    for compiled in (True, False):
        monkeypatch.setattr(tracing, "compiled_for", lambda _, compiled=compiled: compiled)
        run = tf.function(lambda x: loss_and_gradients(lambda x: made(x, mask=MASK, training=True), x, made.weights))
        graph = run.get_concrete_function(tf.constant(INPUTS)).graph
        loops = [op for op in graph.get_operations() if op.type in ("While", "StatelessWhile")]
        ran.append((len(loops), tf.nest.flatten(run(tf.constant(INPUTS)))))
    (turns, own), (together, of_gpu) = ran
    assert (turns, together) == (6, 0), "both passes of each layer; a GPU's body holds all of these steps"
    for given, expected in zip(own, of_gpu, strict=True):
        assert error(given, expected) < FLOAT64


def test_the_schedule_of_a_cpu_is_that_of_xla_alone(monkeypatch):
    seen = []
    call = lambda x: seen.append(tracing.compiled_for("CPU")) or x  # noqa: E731
    x = tf.ones([2, 3])
    call(x)
    tf.function(call)(x)
    tf.function(call, jit_compile=True)(x)
    tf.function(lambda x: tf.vectorized_map(call, x), jit_compile=True)(x)
    monkeypatch.setattr(tracing, "own_device", lambda: "/job:localhost/replica:0/task:0/device:GPU:0")
    tf.function(call, jit_compile=True)(x)
    assert [seen[k] for k in (0, 1, 2, -2, -1)] == [False, False, True, False, False]


@pytest.mark.parametrize("training", [True, False])
def test_what_xla_is_given_for_a_cpu(training):
    """A loop of each layer, whose body has one product, and no choice, since all steps are within the sequences."""
    made = WavefrontLSTM(4, 3)
    run = tf.function(lambda x: made(x, training=training), jit_compile=True)
    graph = run.get_concrete_function(tf.TensorSpec([1, 5, 4])).graph
    bodies = [op.get_attr("body").name for op in graph.get_operations() if op.type in ("While", "StatelessWhile")]
    ops = [node.op for f in graph.as_graph_def().library.function if f.signature.name in bodies for node in f.node_def]
    assert len(bodies) == 3
    assert [ops.count(op) for op in ("Einsum", "BatchMatMulV2", "SelectV2")] == [3, 0, 0]


@pytest.mark.parametrize("training", [False, True])
def test_what_a_step_reads_on_a_cpu_is_taken_in_the_step_before(training):
    """A slice taken in the step would be fused into the gates' arithmetic, which is not vectorised then: 1.5 times the time."""
    made = WavefrontLSTM(16, 1, return_sequences=True)
    call = (lambda x: loss_and_gradients(made, x, made.weights)) if training else made
    x = tf.ones([8, 20, 4])
    made(x)
    program = tf.function(call, jit_compile=True).experimental_get_compiler_ir(x)(stage="optimized_hlo")
    of_step = [part for part in program.split("\n\n") if "while/" in part]  # so ops of a step are named, of both passes
    slices, arithmetic = " dynamic-slice(", (" tanh(", " multiply(")
    assert any(slices in part for part in of_step) and any(arithmetic[0] in part for part in of_step)
    assert not [part for part in of_step if slices in part and any(op in part for op in arithmetic)]


LIMITS = {"float32": 1e-6, "mixed_float16": 2e-3, "float16": 2e-3, "mixed_bfloat16": 1.5e-2}


@pytest.mark.parametrize("policy", LIMITS)
def test_less_precision_gives_the_same_within_its_rounding(policy):
    made = layer(2, "bidirectional", dtype=policy, return_state=True)
    dtype = made.compute_dtype
    results = made(INPUTS.astype("float32"))
    assert [t.dtype.name for t in results] == [dtype, dtype, "float32"] and dtype == policy.removeprefix("mixed_")
    assert {v.dtype for v in made.weights} == {"float32" if policy.startswith("mixed") else dtype}
    exact = layer(2, "bidirectional", return_state=True)(INPUTS)
    for given, expected in zip(results, exact, strict=True):
        assert error(tf.cast(given, "float64"), expected) < LIMITS[policy]


@pytest.mark.parametrize("policy", ["mixed_float16", pytest.param("mixed_bfloat16", marks=pytest.mark.slow)])
def test_mixed_precision_trains_float32_weights(policy):
    made = layer(2, dtype=policy, layer_normalization=True)
    dense = keras.layers.Dense(1, kernel_initializer="ones", dtype="float32")
    model = keras.Sequential([keras.Input((TIME, FEATURES)), made, dense])
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01), initial_scale=64)  # overflows at 2**15
    model.compile(optimizer, "mse", jit_compile=False)
    start = made.get_canonical()
    losses = model.fit(INPUTS, random(BATCH, 1), epochs=3, verbose=0).history["loss"]
    assert losses[2] < 0.95 * losses[0]
    for name, array in made.get_canonical().items():
        assert array.dtype == np.float32 and (array != start[name]).any(), name


# --- dropout ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("together", ["together", "in turn"])
def test_dropout_keeps_each_number_with_its_probability_and_the_mean(together, monkeypatch):
    monkeypatch.setattr(tracing, "compiled_for", lambda _: together == "in turn")
    made = WavefrontLSTM(1, 2, dropout=0.25, return_sequences=True, seed=0, dtype="float64")
    made.build((None, None, 1))
    # Layer 0 gives constant numbers, layer 1's input gate alone hangs on them, and c forgets: every output is 0 or of one value.
    names = ("kernel", "recurrent_kernel", "bias")
    zeros, first = np.zeros((1, 4)), np.array([9.0, -99.0, 9.0, 9.0])
    upper = np.array([[0.0, 0.0, 1.0, 0.0]])
    made.set_canonical(
        dict(zip((f"lstm_0/forward/{name}" for name in names), (zeros, zeros, first), strict=True))
        | dict(zip((f"lstm_1/forward/{name}" for name in names), (upper, zeros, [9.0, -99.0, 0.0, 9.0]), strict=True))
    )
    outputs = np.asarray(made(np.zeros((50, 80, 1)), training=True))
    kept = outputs > 1e-9
    assert abs(kept.mean() - 0.75) < 0.03  # 4.4 standard deviations
    value = np.tanh(sigmoid(9.0) * np.tanh(sigmoid(9.0) * np.tanh(sigmoid(9.0) * np.tanh(9.0)) / 0.75)) * sigmoid(9.0)
    np.testing.assert_allclose(outputs[kept], value, rtol=1e-9)
    assert 0.4 < np.mean(kept[:, 1:] == kept[:, :-1]) < 0.8, "every step is drawn anew"


def test_dropout_on_a_cpu_names_its_generator():
    made = WavefrontLSTM(3, 2, dropout=0.25, seed=3, dtype="float64")
    x = tf.constant(random(50, 20))
    np.testing.assert_array_equal(made.drop(x), keras.layers.Dropout(0.25, seed=3, dtype="float64")(x, training=True))
    graph = tf.function(made.drop).get_concrete_function(tf.ones([3, 4])).graph
    (draw,) = [op for op in graph.get_operations() if op.type == "StatelessRandomUniformV2"]
    assert tf.get_static_value(draw.inputs[3]) == 1, "Philox, and not 3, which leaves it to XLA"


@pytest.mark.parametrize("on_cpu", [False, True])
def test_a_rate_of_dropout_may_be_a_tensor_wherever_it_runs(on_cpu, monkeypatch):
    monkeypatch.setattr(tracing, "on", lambda _: on_cpu)
    made, x = WavefrontLSTM(3, 2, dropout=0.25, seed=3), tf.ones([50, 20])
    dropped = tf.function(made._dropped)
    np.testing.assert_array_equal(dropped(x, tf.constant(0.0)), x)
    assert 0.1 < np.mean(dropped(x, tf.constant(0.25)) == 0) < 0.4


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


# --- masks --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_no_gradient_comes_of_the_padding(direction):
    made = layer(2, direction, return_sequences=True)
    gradients = []
    for padding in (0.5, np.nan):
        x = tf.constant(np.where(MASK[..., np.newaxis], INPUTS, padding))
        gradients.append(loss_and_gradients(lambda x: made(x, mask=MASK), x, made.trainable_variables)[1])
    for given, expected in zip(*gradients, strict=True):
        np.testing.assert_array_equal(given, expected)
    assert not np.any(gradients[0][0][~MASK]) and np.all(np.any(gradients[0][0][MASK], axis=-1))


# --- stateful -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["mixed_float16", "float16"])
def test_a_stateful_layer_of_16_bits_keeps_c_in_float32_and_reads_it_so(policy):
    """Two calls on half of the steps each are one call on all of them, bit by bit."""
    whole, halves = (layer(2, return_sequences=True, stateful=True, dtype=policy) for _ in range(2))
    expected = whole(INPUTS)
    np.testing.assert_array_equal(np.concatenate([halves(half) for half in np.split(INPUTS, 2, 1)], 1), expected)
    for state, other in zip(halves.states, whole.states, strict=True):
        np.testing.assert_array_equal(state.numpy(), other.numpy())
    c = halves.states[1].numpy()
    assert c.dtype == np.float32 and (c != c.astype(np.float16)).any()


# --- as a Keras layer ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_batch_and_time_may_be_unknown(direction):
    made = layer(3, direction, dropout=0.5, return_sequences=True, return_state=True)
    unknown = [tf.TensorSpec([None, None, FEATURES], tf.float64), tf.TensorSpec([None, None], tf.bool)]
    run = tf.function(lambda x, mask: made(x, mask=mask), input_signature=unknown)
    train = tf.function(lambda x, mask: made(x, mask=mask, training=True), input_signature=unknown)
    for batch, time in ((BATCH, TIME), (2, 1), (1, 5)):
        x, mask = INPUTS[:batch, :time], MASK[:batch, :time]
        for given, expected in zip(run(x, mask), made(x, mask=mask), strict=True):
            assert error(given, expected) < FLOAT64
        assert train(x, mask)[0].shape == (batch, time, UNITS * len(made.spec.directions))
    assert run.experimental_get_tracing_count() == train.experimental_get_tracing_count() == 1
    with pytest.raises(ValueError, match="inputs: no steps given"):
        made(INPUTS[:, :0])
    with pytest.raises(tf.errors.InvalidArgumentError, match="inputs: no steps given"):
        run(INPUTS[:, :0], MASK[:, :0])


class Counted(WavefrontLSTM):
    """Counts the calls of its Python code, that is, the traces."""

    traces = 0

    def call(self, inputs, initial_state=None, mask=None, training=False):
        self.traces += 1
        return super().call(inputs, initial_state, mask, training)


@pytest.mark.parametrize("jit_compile", [False, True])
def test_fit_with_a_smaller_last_batch_trains_the_same_and_traces_at_most_once_more(jit_compile):
    """2.5 batches, 2 epochs: under XLA that compiles two shapes; the plain loop over the same batches is eager."""
    x, y = random(10, 3, FEATURES).astype("float32"), random(10, UNITS, seed=1).astype("float32")
    models = []
    for samples in (8, 10):
        made = Counted(UNITS, 2, dtype="float32")
        made.build((None, None, FEATURES))
        made.set_canonical(parameters(made.spec))
        model = keras.Sequential([keras.Input((3, FEATURES)), made])
        model.compile(keras.optimizers.SGD(0.5), "mse", jit_compile=jit_compile)
        made.traces = 0
        model.fit(x[:samples], y[:samples], batch_size=4, epochs=2, shuffle=False, verbose=0)
        models.append(model)
    whole, uneven = (model.layers[0].traces for model in models)
    assert whole <= uneven <= whole + 1
    eager = layer(2, dtype="float32")
    optimizer = keras.optimizers.SGD(0.5)
    for start in (0, 4, 8) * 2:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((eager(x[start : start + 4]) - y[start : start + 4]) ** 2)
        optimizer.apply(tape.gradient(loss, [v.value for v in eager.trainable_variables]), eager.trainable_variables)
    for name, expected in eager.get_canonical().items():
        assert error(models[1].layers[0].get_canonical()[name], expected) < 1e-5, name


def test_dropout_is_drawn_anew_at_every_step_of_a_compiled_function():
    made = layer(2, dropout=0.5, dtype="float32", seed=3)
    x = INPUTS.astype("float32")
    run = tf.function(lambda x: made(x, training=True), jit_compile=True)
    first, second, without = run(x), run(x), made(x)
    assert min(error(first, second), error(first, without), error(second, without)) > 0.01


# --- bad arguments ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dropout": 1.0}, r"dropout: 1.0 given, expected a number from 0 to below 1"),
        ({"layer_normalization": 1}, r"layer_normalization: 1 given, expected True or False"),
        ({"seed": -1}, r"seed: -1 given, expected an integer from 0"),
        ({"dtype": "bfloat16"}, r"dtype: policy bfloat16 given, expected .*mixed_bfloat16"),
        (
            {"recurrent_dropout": 1},
            r"recurrent_dropout: 1 given, expected a number from 0 to below 1: no gate would see any h$",
        ),
        ({"recurrent_dropout": -0.1}, r"recurrent_dropout: -0.1 given, expected a number from 0 to below 1$"),
        ({"activation": "relu"}, r"activation: 'relu' given, not supported, expected 'tanh'; use keras.layers.LSTM"),
        ({"activation": None}, r"activation: None given, not supported"),
        (
            {"activation": keras.activations.sigmoid},
            r"activation: <function sigmoid.* given, not supported, expected 'tanh'",
        ),
        ({"zero_output_for_mask": False}, r"zero_output_for_mask: False given, not supported, expected True"),
        ({"activity_regularizer": "l2", "return_state": True}, r"activity_regularizer: given with return_state=True"),
        (
            {"activity_regularizer": "l2", "time_major": True},
            r"activity_regularizer: .*keras.layers.ActivityRegularization",
        ),
        ({"recurrent_activation": "hard_sigmoid"}, r"recurrent_activation: 'hard_sigmoid' given, not supported"),
        ({"use_bias": False}, r"use_bias: False given, not supported"),
        ({"unroll": True}, r"unroll: True given, not supported"),
        ({"go_backwards": True}, r"go_backwards: True given, not supported.*reverse the inputs"),
        ({"unit_forget_bias": 1}, r"unit_forget_bias: 1 given, expected True or False"),
        ({"kernel_initializer": "none"}, r"Could not interpret initializer identifier: none"),
    ],
)
def test_a_bad_argument_is_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        WavefrontLSTM(**{"units": 3, **arguments})


def test_arguments_of_keras_that_say_what_the_layer_does_anyway_are_taken():
    made = WavefrontLSTM(
        3, activation="tanh", recurrent_dropout=0, unroll=False, use_cudnn="auto", kernel_regularizer=None,
        recurrent_activation=keras.activations.sigmoid, zero_output_for_mask=True,
    )  # fmt: skip
    assert made.get_config() == {**WavefrontLSTM(3, name=made.name).get_config()}
    WavefrontLSTM(3, activation=keras.activations.tanh)
    assert wavefront.INSTEAD.keys() <= keras.layers.LSTM(3).get_config().keys()


# --- what users of keras.layers.LSTM expect -------------------------------------------------------------------------------


def test_dropout_of_one_layer_warns_that_it_has_no_effect():
    with pytest.warns(UserWarning, match="acts between layers, and there is one"):
        WavefrontLSTM(4, dropout=0.5)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_initial_states_are_zeros_of_the_form_that_a_call_takes(direction):
    made = layer(2, direction, return_state=True, dtype="mixed_float16")
    start = made.get_initial_state(BATCH)
    _, *finals = made(INPUTS, initial_state=start)
    for state, final, without in zip(start, finals, made(INPUTS)[1:], strict=True):
        assert (state.shape, state.dtype) == (final.shape, final.dtype) and not np.any(state)
        np.testing.assert_array_equal(final, without)


def test_initial_states_may_be_of_any_float_dtype_and_variables():
    made = layer(1, return_state=True, dtype="mixed_float16")
    start = [state.astype("float32") for state in initial_state(made)]
    expected = made(INPUTS, initial_state=start)
    for kind in (
        keras.Variable,
        lambda state: tf.constant(state, "float64"),
        lambda state: tf.constant(state, "float32"),
    ):
        for given, wanted in zip(made(INPUTS, initial_state=list(map(kind, start))), expected, strict=True):
            assert error(tf.cast(given, "float64"), tf.cast(wanted, "float64")) < 2e-3


def test_states_are_reset_by_either_name():
    layer = WavefrontLSTM(3, stateful=True)
    layer(np.ones((2, 4, 5), "float32"))
    assert np.any(layer.states[0].numpy())
    layer.reset_states()
    assert not any(np.any(state.numpy()) for state in layer.states)


def test_bidirectional_wrapper_is_told_what_to_use_instead():
    with pytest.raises(
        ValueError, match=r"^keras.layers.Bidirectional around WavefrontLSTM is .*use direction='bidirectional'$"
    ):
        keras.layers.Bidirectional(WavefrontLSTM(3))


def test_another_backend_is_refused_by_name():
    code = "from models.wavefront.layer import WavefrontLSTM; WavefrontLSTM(3)"
    environment = {**os.environ, "KERAS_BACKEND": "jax", "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert "ValueError: backend: jax given, expected tensorflow" in done.stderr


def test_steps_per_execution_changes_nothing():
    found = []
    for steps in (1, 3):
        keras.utils.set_random_seed(1)
        layers = [keras.Input((4, 3), batch_size=2), WavefrontLSTM(3, 2, stateful=True, seed=5), keras.layers.Dense(1)]
        model = keras.Sequential(layers)
        model.compile("sgd", "mse", jit_compile=True, steps_per_execution=steps)
        rng = np.random.default_rng(1)
        x, y = rng.normal(size=(10, 4, 3)).astype("float32"), rng.normal(size=(10, 1)).astype("float32")
        model.fit(x, y, batch_size=2, shuffle=False, verbose=0)
        found.append([*model.get_weights(), *(state.numpy() for state in model.layers[0].states)])
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)
