"""The layers of models/cudnn/layers.py: compared with stacks of Keras' own, and what a Keras layer has to do."""

import itertools
import json

import keras
import numpy as np
import pytest
import tensorflow as tf

from models.cudnn import layers as cudnn_layers
from models.cudnn import rnn
from models.cudnn.layers import CudnnGRULayer, CudnnLSTMLayer, CudnnRNNReluLayer
from models.weights import layouts
from tests.cudnn_layer_cases import (
    BATCH,
    DIRECTIONS,
    FEATURES,
    INPUTS,
    LENGTHS,
    MASK,
    MODES,
    TIME,
    UNITS,
    error,
    keras_layers,
    layer,
    random,
)

FLOAT64 = 1e-12  # between two ways to compute the same; measured: 1e-15
FLAGS = list(itertools.product((False, True), repeat=3))


@pytest.fixture(autouse=True)
def on_the_cpu():
    with tf.device("CPU:0"):
        yield


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(rnn, "_resolve", lambda use_cudnn: use_cudnn is not False)


def through(layers, x, **kwargs):
    for each in layers:
        x = each(x, **kwargs)
    return x


def initial_state(made, seed=5):
    return [random(*shape, seed=seed + k) for k, shape in enumerate(made._state_shapes(BATCH))]


def recurrent_biases(made):
    _, biases = layouts.cudnn_flat_to_list(made.params.numpy(), made.spec)
    names = [name for name, _ in layouts.cudnn_biases(made.spec)]
    return np.concatenate([bias for name, bias in zip(names, biases, strict=True) if " b_R" in name])


# --- what it computes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("return_sequences", [False, True])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("mode", MODES)
def test_outputs_and_all_gradients_are_those_of_keras_layers(mode, direction, return_sequences):
    made = layer(mode, 2, direction, return_sequences=return_sequences)
    own = keras_layers(made.spec, return_sequences)
    x, results, gradients = tf.constant(INPUTS), [], []
    for run, variables in (
        (made, made.trainable_variables),
        (lambda x: through(own, x), [v for each in own for v in each.trainable_variables]),
    ):
        with tf.GradientTape() as tape:
            tape.watch(x)
            outputs = run(x)
            loss = tf.reduce_sum(outputs * random(*outputs.shape, seed=2))
        results.append(outputs)
        gradients.append(tape.gradient(loss, [x, *(v.value for v in variables)]))
    assert results[0].shape == results[1].shape and error(*results) < FLOAT64
    (d_x, d_params), (own_d_x, *own_d_weights) = gradients
    assert error(d_x, own_d_x) < FLOAT64
    canonical = layouts.from_cudnn_flat(d_params.numpy(), made.spec)
    for given, (name, expected) in zip(own_d_weights, canonical.items(), strict=True):
        assert error(given, expected) < FLOAT64, name


@pytest.mark.parametrize("direction", [pytest.param("unidirectional", marks=pytest.mark.slow), "bidirectional"])
@pytest.mark.parametrize("mode", MODES)
def test_three_steps_of_adam_leave_the_weights_of_keras_layers(mode, direction):
    made = layer(mode, 2, direction, dtype="float32")
    inputs, labels = random(3 * BATCH, TIME, FEATURES, seed=3), random(3 * BATCH, 1, seed=4)
    own = keras_layers(made.spec, dtype="float32")
    for stack in ([made], own):
        dense = keras.layers.Dense(1, kernel_initializer="ones")
        model = keras.Sequential([keras.Input((None, FEATURES)), *stack, dense])
        model.compile(keras.optimizers.Adam(0.01), "mse", run_eagerly=True)  # tracing takes longer
        model.fit(inputs, labels, batch_size=BATCH, epochs=1, shuffle=False, verbose=0)
    start, trained = layer(mode, 2, direction).get_canonical(), made.get_canonical()
    arrays = [array for each in own for array in each.get_weights()]
    for (name, given), expected in zip(trained.items(), arrays, strict=True):
        np.testing.assert_allclose(given, expected, rtol=0, atol=2e-5, err_msg=name)  # a step is 1e-2
        assert np.abs(given - start[name]).max() > 0.01, name
    if mode != "gru":
        assert not recurrent_biases(made).any()


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("mode", MODES)
def test_states_go_in_and_come_out_layer_by_layer(mode, direction):
    made = layer(mode, 2, direction, return_sequences=True, return_state=True)
    start = initial_state(made)
    outputs, *finals = made(INPUTS, initial_state=start)
    directions, x, expected = len(made.spec.directions), INPUTS, []
    for k, own in enumerate(keras_layers(made.spec, True, return_state=True)):
        states = [s[k * directions + d] for d in range(directions) for s in start]
        x, *states = own(x, initial_state=states)
        expected += [states[d * len(start) : (d + 1) * len(start)] for d in range(directions)]
    assert error(outputs, x) < FLOAT64
    for final, of_layers in zip(finals, zip(*expected, strict=True), strict=True):
        assert error(final, np.stack(of_layers)) < FLOAT64
    if mode != "lstm":  # its one state may come without a list
        np.testing.assert_array_equal(made(INPUTS, start[0])[0], outputs)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_less_precision_gives_the_same_within_its_rounding(dtype):
    policy = {"float32": "float32", "float16": "mixed_float16"}[dtype]
    made = layer("lstm", 2, "bidirectional", dtype=policy, return_state=True)
    outputs, *finals = made(INPUTS.astype("float32"))
    assert made.params.dtype == "float32" and {t.dtype.name for t in (outputs, *finals)} == {dtype}
    exact, *_ = layer("lstm", 2, "bidirectional", return_state=True)(INPUTS)
    assert error(outputs, exact) < {"float32": 1e-6, "float16": 2e-3}[dtype]


def test_mixed_float16_trains_a_float32_weight():
    made = layer("lstm", 2, dtype="mixed_float16")
    model = keras.Sequential([keras.Input((TIME, FEATURES)), made, keras.layers.Dense(1, dtype="float32")])
    model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()), "mse")
    start = made.get_canonical()
    losses = model.fit(INPUTS, random(BATCH, 1), epochs=3, verbose=0).history["loss"]
    assert losses[2] < losses[0]
    assert all((array != start[name]).any() for name, array in made.get_canonical().items())
    assert made.params.dtype == "float32" and not recurrent_biases(made).any()


def test_time_major_is_the_same_the_other_way_round():
    batch_major, time_major = (
        layer("gru", 2, "bidirectional", time_major=flag, return_sequences=True, return_state=True)
        for flag in (False, True)
    )
    expected, expected_h = batch_major(INPUTS, mask=MASK)
    outputs, h = time_major(np.swapaxes(INPUTS, 0, 1), mask=MASK.T)
    np.testing.assert_array_equal(np.swapaxes(outputs, 0, 1), expected)
    np.testing.assert_array_equal(h, expected_h)
    time_major.return_sequences = batch_major.return_sequences = False
    np.testing.assert_array_equal(time_major(np.swapaxes(INPUTS, 0, 1))[0], batch_major(INPUTS)[0])


def test_dropout_acts_between_layers_in_training_only():
    one, two = (layer("rnn_tanh", n, dropout=0.5, return_sequences=True, seed=1) for n in (1, 2))
    np.testing.assert_array_equal(one(INPUTS, training=True), one(INPUTS))
    expected = layer("rnn_tanh", 2, return_sequences=True)(INPUTS)
    np.testing.assert_array_equal(two(INPUTS), expected)
    drawn = two(INPUTS, training=True)
    assert error(drawn, expected) > 0.05 and error(two(INPUTS, training=True), drawn) > 0.05


# --- masks --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("mode", MODES)
def test_masked_sequences_come_out_as_if_each_ran_alone(mode, direction):
    made = layer(mode, 2, direction, return_sequences=True, return_state=True)
    last = layer(mode, 2, direction)
    x = np.where(MASK[..., np.newaxis], INPUTS, np.nan)  # nothing past the end is looked at
    outputs, *finals = made(x, mask=MASK)
    last_outputs = last(x, mask=MASK)
    for k, length in enumerate(LENGTHS):
        alone, *alone_finals = made(INPUTS[k : k + 1, :length])
        assert error(outputs[k, :length], alone[0]) < FLOAT64
        assert not np.any(outputs[k, length:])
        for final, expected in zip(finals, alone_finals, strict=True):
            assert error(final[:, k], expected[:, 0]) < FLOAT64
        assert error(last_outputs[k], last(INPUTS[k : k + 1, :length])[0]) < FLOAT64


@pytest.mark.parametrize(("mode", "return_sequences"), [("lstm", True), ("gru", False)])
def test_a_mask_of_an_embedding_does_what_it_does_in_keras_bidirectional(mode, return_sequences):
    made = layer(mode, 2, "bidirectional", dtype="float32", return_sequences=return_sequences)
    tokens = np.where(MASK, np.random.default_rng(0).integers(1, 9, MASK.shape), 0)
    embedding = keras.layers.Embedding(9, FEATURES, mask_zero=True, embeddings_initializer="glorot_normal")
    models = []
    for stack in ([made], keras_layers(made.spec, return_sequences, dtype="float32")):
        model = keras.Sequential([keras.Input((None,), dtype="int32"), embedding, *stack])
        model.compile(jit_compile=False)
        models.append(model)
    assert error(*(model.predict(tokens, verbose=0) for model in models)) < 1e-5
    eager = made(embedding(tokens))
    assert error(eager, models[0].predict(tokens, verbose=0)) < 1e-6
    assert (getattr(eager, "_keras_mask", None) is not None) == return_sequences


def test_a_mask_counts_beside_an_initial_state_too():
    made = layer("lstm", return_sequences=True)
    start = initial_state(made)
    expected = made(INPUTS, initial_state=start, mask=MASK)
    x = np.where(MASK[..., np.newaxis], INPUTS, 0.0)
    np.testing.assert_array_equal(made(keras.layers.Masking(dtype="float64")(x), initial_state=start), expected)
    inputs = keras.Input((None, FEATURES), dtype="float64")
    states = [keras.Input(batch_shape=s.shape, dtype="float64") for s in start]
    model = keras.Model([inputs, *states], made(keras.layers.Masking(dtype="float64")(inputs), initial_state=states))
    np.testing.assert_allclose(model([x, *start]), expected, atol=FLOAT64)


def test_an_empty_sequence_keeps_its_state_and_ends_in_0():
    made = layer("gru", 2, "bidirectional", return_state=True)
    start = initial_state(made)
    mask = MASK & (np.arange(BATCH) != 2)[:, np.newaxis]
    last, h = made(INPUTS, initial_state=start, mask=mask)
    np.testing.assert_array_equal(h[:, 2], start[0][:, 2])
    assert not np.any(last[2]) and np.all(np.any(np.delete(last, 2, axis=0), axis=1))
    forward = keras_layers(layer("gru", 1).spec)[0]  # as in Keras
    assert not np.any(forward(INPUTS, initial_state=start[0][0], mask=mask)[2])


LEFT_PADDED, WITH_A_HOLE = MASK.copy(), MASK.copy()
LEFT_PADDED[0] = ~MASK[0]
WITH_A_HOLE[1, 2] = False


@pytest.mark.parametrize(("mask", "sequence"), [(LEFT_PADDED, 0), (WITH_A_HOLE, 1)])
def test_a_mask_that_is_not_right_padded_is_an_error(mask, sequence):
    made = layer("lstm", return_sequences=True, return_state=True)
    with pytest.raises(ValueError, match=rf"mask: sequence {sequence} is not right-padded, expected True up to"):
        made(INPUTS, mask=mask)
    in_a_graph = tf.function(lambda x, mask: made(x, mask=mask))
    in_a_graph(INPUTS, MASK)
    with pytest.raises(tf.errors.InvalidArgumentError, match="mask: a sequence is not right-padded"):
        in_a_graph(INPUTS, mask)
    under_xla = tf.function(lambda x, mask: made(x, mask=mask), jit_compile=True)  # which knows no assertions
    for result, expected in zip(under_xla(INPUTS, mask), under_xla(INPUTS, MASK), strict=True):
        axis = 0 if result.shape[0] == BATCH else 1
        others = [np.delete(array, sequence, axis) for array in (result, expected)]
        np.testing.assert_array_equal(*others)
        inside = mask[sequence] if axis == 0 else slice(None)
        assert np.isnan(np.take(result, sequence, axis)[: inside.sum() if axis == 0 else None]).all()


def test_a_mask_of_another_shape_is_an_error():
    made = layer("lstm")
    with pytest.raises(ValueError, match=r"mask: \[4, 5\] given, expected \[4, 6\]"):
        made(INPUTS, mask=MASK[:, :-1])
    unknown = [tf.TensorSpec([None, None, FEATURES], tf.float64), tf.TensorSpec([None, None], tf.bool)]
    in_a_graph = tf.function(lambda x, mask: made(x, mask=mask), input_signature=unknown)
    np.testing.assert_allclose(in_a_graph(INPUTS, MASK), made(INPUTS, mask=MASK), atol=FLOAT64)
    with pytest.raises(tf.errors.InvalidArgumentError, match="mask: of another shape than the inputs"):
        in_a_graph(INPUTS, MASK[:, :-1])


# --- stateful -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float64", "mixed_float16"])
@pytest.mark.parametrize("time_major", [False, True])
def test_a_stateful_layer_goes_on_where_the_batch_before_ended(time_major, dtype):
    whole = layer("lstm", 2, return_sequences=True, time_major=time_major, dtype=dtype)
    made = layer("lstm", 2, return_sequences=True, time_major=time_major, dtype=dtype, stateful=True)
    axis = 0 if time_major else 1
    x = np.swapaxes(INPUTS, 0, axis ^ 1)
    expected = whole(x)
    for run in (made, tf.function(made)):
        made.reset_state()
        halves = [run(tf.constant(half)) for half in np.split(x, 2, axis)]
        np.testing.assert_allclose(np.concatenate(halves, axis), expected, atol=1e-12 if dtype == "float64" else 2e-3)
        assert all(np.any(state) for state in made.states)
    assert [state.shape for state in made.states] == [(2, BATCH, UNITS)] * 2
    assert len(made.weights) == 1, "states are no weights"


def test_a_stateful_model_is_that_of_keras():
    made = layer("gru", 2, dtype="float32", stateful=True)
    inputs = keras.Input(batch_shape=(BATCH, None, FEATURES))
    own = [keras.layers.GRU(UNITS, return_sequences=k < 1, stateful=True, use_cudnn=False) for k in range(2)]
    models = [keras.Sequential([inputs, *stack]) for stack in ([made], own)]
    for k, each in enumerate(own):
        each.set_weights(layouts.to_keras(made.get_canonical(), k, mode="gru"))
    for model in models:
        model.compile("sgd", "mse", jit_compile=False)
    halves = np.split(INPUTS, 2, axis=1)
    for _ in range(2):  # the second time from zeros again
        results = [[model.predict(half, verbose=0) for half in halves] for model in models]
        assert error(results[0][1], results[1][1]) < 1e-5
        for each in (made, *own):
            each.reset_state()
    assert error(made(INPUTS), models[1](INPUTS)) < 1e-5
    models[0].fit(INPUTS, random(BATCH, UNITS), batch_size=BATCH, verbose=0)


def test_a_stateful_layer_insists_on_its_batch():
    with pytest.raises(ValueError, match=r"inputs: \[None, 6, 3\] given to a stateful layer, expected a known batch"):
        CudnnLSTMLayer(UNITS, stateful=True)(keras.Input((TIME, FEATURES)))
    with pytest.raises(ValueError, match=r"inputs: a batch of 3 given, expected 4"):
        layer("lstm", stateful=True)(INPUTS[:3])


# --- as a Keras layer ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("return_sequences", "return_state", "time_major"), FLAGS)
@pytest.mark.parametrize("mode", ["lstm", "rnn_relu"])
def test_shapes_are_known_before_the_call(mode, return_sequences, return_state, time_major):
    made = layer(
        mode, 2, "bidirectional", return_sequences=return_sequences, return_state=return_state, time_major=time_major
    )
    x = np.swapaxes(INPUTS, 0, 1) if time_major else INPUTS
    results = tf.nest.flatten(made(x))
    assert [tuple(t.shape) for t in results] == [t.shape for t in tf.nest.flatten(made(keras.KerasTensor(x.shape)))]
    shapes = made.compute_output_shape(x.shape)
    assert [tuple(t.shape) for t in results] == (list(shapes) if return_state else [shapes])
    unknown = tf.nest.flatten(made(keras.KerasTensor((None, None, FEATURES))))
    assert all(t.shape[-1] in (UNITS, 2 * UNITS) and None in t.shape for t in unknown)
    assert len(tf.nest.flatten([made.compute_mask(x, MASK)])) == len(results)


def test_an_encoder_hands_its_states_to_a_decoder():
    source, target = keras.Input((None, FEATURES)), keras.Input((None, FEATURES))
    encoder = layer("lstm", 2, dtype="float32", return_state=True)
    decoder = layer("lstm", 2, dtype="float32", return_sequences=True)
    _, *states = encoder(source)
    model = keras.Model([source, target], keras.layers.Dense(2)(decoder(target, states)))
    model.compile("adam", "mse")
    x, y = INPUTS.astype("float32"), random(BATCH, 3, FEATURES).astype("float32")
    model.fit([x, y], random(BATCH, 3, 2), batch_size=2, verbose=0)
    expected = model.layers[-1](decoder(y, initial_state=encoder(x)[1:]))
    assert error(model.predict([x, y], verbose=0), expected) < 1e-5


def test_xla_runs_what_tensorflow_ops_compute():
    x, y = INPUTS.astype("float32"), random(BATCH, UNITS).astype("float32")
    losses = []
    for jit_compile in (False, True):
        made = layer("lstm", 2, dtype="float32")
        assert made.supports_jit
        model = keras.Sequential([keras.Input((TIME, FEATURES)), made])
        model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=jit_compile)
        losses.append(model.fit(x, y, epochs=3, verbose=0).history["loss"])
    assert error(*losses) < 1e-5 and losses[0][2] < losses[0][0]


@pytest.mark.parametrize("mode", MODES)
def test_a_config_makes_the_same_layer_again(mode):
    arguments = dict(
        units=3, num_layers=2, direction="bidirectional", dropout=0.25, return_sequences=True, return_state=True,
        stateful=True, time_major=True, seed=7, use_cudnn=False, name="stack", trainable=False, dtype="mixed_float16",
    )  # fmt: skip
    made = type(layer(mode))(**arguments)
    config = made.get_config()
    for name, value in arguments.items():
        assert name == "dtype" or config[name] == value, name
    serialized = json.loads(json.dumps(keras.saving.serialize_keras_object(made)))
    again = keras.saving.deserialize_keras_object(serialized)
    assert type(again) is type(made) and again.get_config() == config and again.compute_dtype == "float16"


def test_a_config_does_not_insist_on_cudnn(as_on_a_gpu):
    assert CudnnLSTMLayer(2, use_cudnn=True).get_config()["use_cudnn"] == "auto"


def test_a_layer_starts_as_keras_layers_do():
    keras.utils.set_random_seed(0)
    made = CudnnLSTMLayer(32, 2, "bidirectional")
    made.build((None, None, 48))
    start = made.get_canonical()
    for name, array in start.items():
        if name.endswith("/kernel"):
            limit = np.sqrt(6 / sum(array.shape))  # Glorot's, of the whole kernel
            assert 0.98 * limit < np.abs(array).max() <= limit, name
        elif name.endswith("/recurrent_kernel"):
            np.testing.assert_allclose(array @ array.T, np.eye(32), atol=1e-5, err_msg=name)
        else:
            np.testing.assert_array_equal(array, np.repeat([0, 1, 0, 0], 32), err_msg=name)
    assert not np.array_equal(start["lstm_1/forward/kernel"], start["lstm_1/backward/kernel"])
    assert not recurrent_biases(made).any()
    keras.utils.set_random_seed(0)
    again = CudnnLSTMLayer(32, 2, "bidirectional")
    again.build((None, None, 48))
    np.testing.assert_array_equal(again.params, made.params)
    for mode in ("gru", "rnn_relu"):
        other = type(layer(mode))(3)
        other.build((None, None, 2))
        assert not other.get_canonical()[f"{mode}_0/forward/bias"].any()


def test_a_layer_can_be_built_inside_of_a_function():
    made = CudnnGRULayer(UNITS, 2, use_cudnn=False)
    outputs = tf.function(made)(INPUTS.astype("float32"))
    np.testing.assert_allclose(outputs, made(INPUTS.astype("float32")), atol=1e-6)
    assert np.abs(made.params.numpy()).max() > 0.1


class LikeCudnn:
    """A model without cuDNN that has gradients in training only, as cuDNN has; `runs` lists is_training of every call."""

    uses_cudnn = True

    def __init__(self, model):
        self.model, self.runs = model, []

    def __call__(self, *tensors, is_training, sequence_lengths):
        self.runs.append(is_training)
        results = self.model(*tensors, is_training=is_training, sequence_lengths=sequence_lengths)
        return results if is_training else tuple(tf.raw_ops.PreventGradient(input=result) for result in results)


@pytest.mark.parametrize(("lengths", "in_a_graph"), [(None, False), (LENGTHS, False), (LENGTHS, True)])
@pytest.mark.parametrize("mode", ["lstm", "gru"])
def test_gradients_outside_of_training_come_from_a_second_run(mode, lengths, in_a_graph):
    made = layer(mode, 2)
    model = made._model(FEATURES, use_cudnn=False)
    tensors = [tf.constant(t) for t in (np.swapaxes(INPUTS, 0, 1), *initial_state(made), made.params.numpy())]
    gradients, cudnn = [], LikeCudnn(model)
    for each in (model, cudnn):

        def run(*tensors, model=each):
            return cudnn_layers.infer(model, *tensors, sequence_lengths=lengths)

        with tf.GradientTape() as tape:
            tape.watch(tensors)
            outputs = (tf.function(run) if in_a_graph else run)(*tensors)
            loss = tf.add_n([tf.reduce_sum(o * random(*o.shape, seed=k)) for k, o in enumerate(outputs[1:])])
        assert cudnn.runs == [False] * (each is cudnn) or in_a_graph, (
            "nothing runs twice before a gradient is asked for"
        )
        gradients.append([loss, *tape.gradient(loss, tensors)])
    assert set(cudnn.runs) == {False, True}
    for given, expected in zip(*gradients, strict=True):
        np.testing.assert_allclose(given, expected, atol=FLOAT64)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_a_graph_on_a_gpu_holds_one_cudnn_op_and_another_only_for_a_gradient_outside_of_training(
    as_on_a_gpu, policy, masked
):
    made = CudnnLSTMLayer(UNITS, 2, "bidirectional", dropout=0.25, return_sequences=True, seed=7, dtype=policy)
    made.build((None, None, FEATURES))

    def ops(training, with_gradient):
        @tf.function
        def run(x, mask):
            with tf.GradientTape() as tape:
                results = made(x, mask=mask if masked else None, training=training)
            return tape.gradient(results, made.params.value) if with_gradient else results

        specs = tf.TensorSpec([None, None, FEATURES], tf.float32), tf.TensorSpec([None, None], tf.bool)
        operations = run.get_concrete_function(*specs).graph.get_operations()
        found = [op for op in operations if op.type.startswith("CudnnRNN")]
        return [(op.type[8:], op.get_attr("dropout"), op.get_attr("seed")) for op in found], [
            op.get_attr("is_training") for op in found if op.type == "CudnnRNNV3"
        ]

    assert ops(training=False, with_gradient=False) == ([("V3", 0.0, 7)], [False])
    assert ops(training=True, with_gradient=False) == ([("V3", 0.25, 7)], [True])
    assert ops(training=True, with_gradient=True) == ([("V3", 0.25, 7), ("BackpropV3", 0.25, 7)], [True])
    assert ops(training=False, with_gradient=True) == (
        [("V3", 0.0, 7), ("V3", 0.0, 7), ("BackpropV3", 0.0, 7)],
        [False, True],
    )


def test_cudnn_and_xla_do_not_go_together(as_on_a_gpu):
    made = CudnnLSTMLayer(UNITS)
    assert made.uses_cudnn and not made.supports_jit
    model = keras.Sequential([keras.Input((None, FEATURES)), made])
    with pytest.warns(UserWarning, match="doesn't support `jit_compile=True`"):
        model.compile("sgd", "mse", jit_compile=True)
    assert not model.jit_compile


# --- bad arguments ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"units": 0}, r"units: 0 given, expected an integer from 1"),
        ({"units": 2.5}, r"units: 2.5 given"),
        ({"num_layers": 0}, r"num_layers: 0 given, expected an integer from 1"),
        ({"direction": "backward"}, r"direction: 'backward' given, expected one of 'unidirectional', 'bidirectional'"),
        ({"dropout": 1.5}, r"dropout: 1.5 given, expected a number from 0 to 1"),
        ({"return_sequences": 1}, r"return_sequences: 1 given, expected True or False"),
        ({"return_state": None}, r"return_state: None given"),
        ({"stateful": "yes"}, r"stateful: 'yes' given"),
        ({"time_major": 0}, r"time_major: 0 given"),
        ({"seed": 2**40}, r"seed: \d+ given, expected an integer"),
        ({"use_cudnn": "always"}, r"use_cudnn: 'always' given, expected True, False or 'auto'"),
        ({"dtype": "mixed_bfloat16"}, r"dtype: bfloat16 given, expected float16 or float32 or float64"),
        ({"colour": "red"}, r"Unrecognized keyword arguments"),
    ],
)
def test_a_bad_argument_is_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        CudnnRNNReluLayer(**{"units": 3, **arguments})


@pytest.mark.skipif(bool(tf.config.list_physical_devices("GPU")), reason="there is a GPU")
def test_cudnn_where_there_is_none_is_refused_and_not_chosen():
    with pytest.raises(ValueError, match="use_cudnn: True given"):
        CudnnLSTMLayer(3, use_cudnn=True)
    assert CudnnLSTMLayer(3).uses_cudnn is False


def test_bad_inputs_and_states_are_named():
    made = layer("lstm")
    h, c = initial_state(made)
    with pytest.raises(ValueError, match="expected axis -1 of input shape to have value 3"):
        made(INPUTS[..., :2])
    with pytest.raises(ValueError, match="expected ndim=3, found ndim=2"):
        made(INPUTS[0])
    with pytest.raises(ValueError, match="a known number of features"):
        CudnnLSTMLayer(3)(keras.Input((None, None)))
    with pytest.raises(ValueError, match=r"initial_state: 1 tensors given, expected 2, h and c"):
        made(INPUTS, initial_state=[h])
    with pytest.raises(ValueError, match=r"initial_state\[1\]: \[1, 4, 5\] given, expected \[2, 4, 5\]"):
        made(INPUTS, initial_state=[h, c[:1]])
    with pytest.raises(ValueError, match=r"initial_state\[0\]: \[2, 3, 5\] given, expected \[2, 4, 5\]"):
        made(INPUTS, initial_state=[h[:, :3], c])
    with pytest.raises(ValueError, match=r"not built yet"):
        CudnnLSTMLayer(3).get_canonical()
    weights = made.get_canonical()
    before = made.params.numpy()
    with pytest.raises(ValueError, match=r"weights: lstm_1/forward/bias is missing"):
        made.set_canonical({name: array for name, array in weights.items() if name != "lstm_1/forward/bias"})
    np.testing.assert_array_equal(made.params, before)
