"""What WavefrontLSTM and the layers of models/cudnn/layers.py share: compared with stacks of Keras' own layers."""

import itertools
import json

import keras
import numpy as np
import pytest
import tensorflow as tf

from models.cudnn.convert import LAYERS
from models.wavefront.layer import WavefrontLSTM
from models.weights import layouts
from tests import cudnn_layer_cases, sizes
from tests.comparing import error
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
    initial_state,
    keras_layers,
    random,
    recurrent_biases,
    through,
)
from tests.wavefront_cases import KINDS, NORMALIZED, parameters, stack_layer

pytestmark = pytest.mark.usefixtures("on_the_cpu")

FLOAT64 = 1e-12  # between two ways to compute the same; measured: 1e-15
PLAIN = ["wavefront", *MODES]  # what Keras has layers of
CLASSES = {"wavefront": WavefrontLSTM, NORMALIZED: WavefrontLSTM, **LAYERS}
one_of_each = pytest.mark.parametrize("kind", ["wavefront", "lstm"])
directions = pytest.mark.parametrize("direction", DIRECTIONS)


# --- what it computes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "direction", "return_sequences"), sizes.half(PLAIN, DIRECTIONS, (False, True)))
def test_outputs_and_all_gradients_are_those_of_keras_layers(kind, direction, return_sequences):
    made = stack_layer(kind, 3, direction, return_sequences=return_sequences)
    own = keras_layers(made.spec, return_sequences)
    x, results, gradients = tf.constant(INPUTS), [], []
    for run, layers in ((made, [made]), (lambda x: through(own, x), own)):
        with tf.GradientTape() as tape:
            tape.watch(x)
            outputs = run(x)
            loss = tf.reduce_sum(outputs * random(*outputs.shape, seed=2))
        results.append(outputs)
        gradients.append(tape.gradient(loss, [x, *(v.value for each in layers for v in each.trainable_variables)]))
    assert results[0].shape == results[1].shape and error(*results) < FLOAT64
    if kind in MODES:
        d_x, d_params = gradients[0]
        gradients[0] = [d_x, *layouts.from_cudnn_flat(d_params.numpy(), made.spec).values()]
    for name, given, expected in zip(["inputs", *made.get_canonical()], *gradients, strict=True):
        assert error(given, expected) < FLOAT64, name


@pytest.mark.parametrize(("kind", "direction"), sizes.half(PLAIN, DIRECTIONS))
def test_three_steps_of_adam_leave_the_weights_of_keras_layers(kind, direction):
    made = stack_layer(kind, 2, direction, dtype="float32")
    inputs, labels = random(3 * BATCH, TIME, FEATURES, seed=3), random(3 * BATCH, 1, seed=4)
    start, own = made.get_canonical(), keras_layers(made.spec, dtype="float32")
    for stack in ([made], own):
        dense = keras.layers.Dense(1, kernel_initializer="ones")
        model = keras.Sequential([keras.Input((None, FEATURES)), *stack, dense])
        model.compile(keras.optimizers.Adam(0.01), "mse", run_eagerly=True)  # tracing takes longer
        model.fit(inputs, labels, batch_size=BATCH, epochs=1, shuffle=False, verbose=0)
    arrays = [array for each in own for array in each.get_weights()]
    for (name, given), expected in zip(made.get_canonical().items(), arrays, strict=True):
        np.testing.assert_allclose(given, expected, rtol=0, atol=2e-5, err_msg=name)  # a step is 1e-2
        assert np.abs(given - start[name]).max() > 0.01, name
    if kind in MODES and kind != "gru":
        assert not recurrent_biases(made).any()


@directions
@pytest.mark.parametrize("kind", ["wavefront", "rnn_tanh"])
def test_dropout_acts_between_layers_in_training_only(kind, direction):
    one, two, again = (stack_layer(kind, n, direction, dropout=0.5, return_sequences=True, seed=1) for n in (1, 2, 2))
    np.testing.assert_array_equal(one(INPUTS, training=True), one(INPUTS))
    expected = stack_layer(kind, 2, direction, return_sequences=True)(INPUTS)
    np.testing.assert_array_equal(two(INPUTS), expected)
    drawn = two(INPUTS, training=True)
    assert error(drawn, expected) > 0.05 and error(two(INPUTS, training=True), drawn) > 0.05
    if kind == "wavefront":  # cuDNN's random numbers go on from layer to layer
        np.testing.assert_array_equal(again(INPUTS, training=True), drawn)


@pytest.mark.parametrize("kind", ["wavefront", "gru"])
def test_time_major_is_the_same_the_other_way_round(kind):
    options = dict(return_sequences=True, return_state=True)
    batch_major, time_major = (
        stack_layer(kind, 2, "bidirectional", time_major=flag, **options) for flag in (False, True)
    )
    expected, *states = batch_major(INPUTS, mask=MASK)
    outputs, *swapped = time_major(np.swapaxes(INPUTS, 0, 1), mask=MASK.T)
    np.testing.assert_array_equal(np.swapaxes(outputs, 0, 1), expected)
    for state, wanted in zip(swapped, states, strict=True):
        np.testing.assert_array_equal(state, wanted)
    time_major.return_sequences = batch_major.return_sequences = False
    np.testing.assert_array_equal(time_major(np.swapaxes(INPUTS, 0, 1))[0], batch_major(INPUTS)[0])


# --- masks --------------------------------------------------------------------------------------------------------------


@directions
@pytest.mark.parametrize("kind", KINDS)
def test_masked_sequences_come_out_as_if_each_ran_alone(kind, direction):
    made = stack_layer(kind, 2, direction, return_sequences=True, return_state=True)
    last = stack_layer(kind, 2, direction)
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


@pytest.mark.parametrize(
    ("kind", "return_sequences"), [("wavefront", True), ("wavefront", False), ("lstm", True), ("gru", False)]
)
def test_a_mask_of_an_embedding_does_what_it_does_in_keras_bidirectional(kind, return_sequences):
    made = stack_layer(kind, 2, "bidirectional", dtype="float32", return_sequences=return_sequences)
    tokens = np.where(MASK, np.random.default_rng(0).integers(1, 9, MASK.shape), 0)
    embedding = keras.layers.Embedding(9, FEATURES, mask_zero=True, embeddings_initializer="glorot_normal")
    results = []
    for stack in ([made], keras_layers(made.spec, return_sequences, dtype="float32")):
        model = keras.Sequential([keras.Input((None,), dtype="int32"), embedding, *stack])
        model.compile(jit_compile=False)
        results.append(model.predict(tokens, verbose=0))
    assert error(*results) < 1e-5
    eager = made(embedding(tokens))
    assert error(eager, results[0]) < 1e-6
    assert (getattr(eager, "_keras_mask", None) is not None) == return_sequences


@one_of_each
def test_a_mask_counts_beside_an_initial_state_too(kind):
    made = stack_layer(kind, 2, return_sequences=True)
    start = initial_state(made)
    expected = made(INPUTS, initial_state=start, mask=MASK)
    x = np.where(MASK[..., np.newaxis], INPUTS, 0.0)
    np.testing.assert_array_equal(made(keras.layers.Masking(dtype="float64")(x), initial_state=start), expected)
    inputs = keras.Input((None, FEATURES), dtype="float64")
    states = [keras.Input(batch_shape=s.shape, dtype="float64") for s in start]
    model = keras.Model([inputs, *states], made(keras.layers.Masking(dtype="float64")(inputs), initial_state=states))
    np.testing.assert_allclose(model([x, *start]), expected, atol=FLOAT64)


@pytest.mark.parametrize("kind", ["wavefront", "gru"])
def test_an_empty_sequence_keeps_its_state_and_ends_in_0(kind):
    made = stack_layer(kind, 2, "bidirectional", return_state=True)
    start = initial_state(made)
    mask = MASK & (np.arange(BATCH) != 2)[:, np.newaxis]
    last, *finals = made(INPUTS, initial_state=start, mask=mask)
    for final, before in zip(finals, start, strict=True):
        np.testing.assert_array_equal(final[:, 2], before[:, 2])
    assert not np.any(last[2]) and np.all(np.any(np.delete(last, 2, axis=0), axis=1))
    forward = keras_layers(cudnn_layer_cases.layer("gru", 1).spec)[0]  # as in Keras
    assert not np.any(forward(INPUTS, initial_state=random(BATCH, UNITS), mask=mask)[2])


LEFT_PADDED, WITH_A_HOLE = MASK.copy(), MASK.copy()
LEFT_PADDED[0] = ~MASK[0]
WITH_A_HOLE[1, 2] = False


@pytest.mark.parametrize(
    ("mask", "sequence", "direction"), [(LEFT_PADDED, 0, "unidirectional"), (WITH_A_HOLE, 1, "bidirectional")]
)
@one_of_each
def test_a_mask_that_is_not_right_padded_is_an_error(kind, mask, sequence, direction):
    made = stack_layer(kind, 2, direction, return_sequences=True, return_state=True)
    message = rf"mask: sequence {sequence} is not right-padded, expected True up to .*keras.layers.LSTM takes"
    with pytest.raises(ValueError, match=message):
        made(INPUTS, mask=mask)
    in_a_graph = tf.function(lambda x, mask: made(x, mask=mask))
    in_a_graph(INPUTS, MASK)
    with pytest.raises(tf.errors.InvalidArgumentError, match="mask: a sequence is not right-padded"):
        in_a_graph(INPUTS, mask)
    under_xla = tf.function(lambda x, mask: made(x, mask=mask), jit_compile=True)  # which knows no assertions
    results = zip((0, 1, 1), under_xla(INPUTS, mask), under_xla(INPUTS, MASK), strict=True)
    for axis, result, expected in results:
        others = [np.delete(array, sequence, axis) for array in (result, expected)]
        np.testing.assert_array_equal(*others)
        inside = mask[sequence] if axis == 0 else slice(None)
        assert np.isnan(np.take(result, sequence, axis)[: inside.sum() if axis == 0 else None]).all()


@one_of_each
def test_a_mask_of_another_shape_is_an_error(kind):
    made = stack_layer(kind)
    with pytest.raises(ValueError, match=r"mask: \[4, 5\] given, expected \[4, 6\]"):
        made(INPUTS, mask=MASK[:, :-1])
    unknown = [tf.TensorSpec([None, None, FEATURES], tf.float64), tf.TensorSpec([None, None], tf.bool)]
    in_a_graph = tf.function(lambda x, mask: made(x, mask=mask), input_signature=unknown)
    np.testing.assert_allclose(in_a_graph(INPUTS, MASK), made(INPUTS, mask=MASK), atol=FLOAT64)
    with pytest.raises(tf.errors.InvalidArgumentError, match="mask: of another shape than the inputs"):
        in_a_graph(INPUTS, MASK[:, :-1])


# --- stateful -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float64", "mixed_float16"])
@pytest.mark.parametrize(
    ("kind", "time_major"), [("wavefront", False), (NORMALIZED, False), ("lstm", False), ("lstm", True)]
)
def test_a_stateful_layer_goes_on_where_the_batch_before_ended(kind, time_major, dtype):
    case = dict(return_sequences=True, time_major=time_major, dtype=dtype)
    whole, made = stack_layer(kind, 2, **case), stack_layer(kind, 2, stateful=True, **case)
    axis = 0 if time_major else 1
    x = np.swapaxes(INPUTS, 0, axis ^ 1)
    expected = whole(x)
    limit = 1e-12 if dtype == "float64" else 2e-3 if kind == "lstm" else 1e-2
    for run in (made, tf.function(made)):
        made.reset_state()
        halves = [run(tf.constant(half)) for half in np.split(x, 2, axis)]
        np.testing.assert_allclose(np.concatenate(halves, axis), expected, atol=limit)
        assert all(np.any(state) for state in made.states)
    assert [state.shape for state in made.states] == [(2, BATCH, UNITS)] * 2
    assert len(made.weights) == len(whole.weights), "states are no weights"


@one_of_each
def test_a_stateful_layer_insists_on_its_batch(kind):
    with pytest.raises(ValueError, match=r"inputs: \[None, 6, 3\] given to a stateful layer, expected a known batch"):
        CLASSES[kind](UNITS, stateful=True)(keras.Input((TIME, FEATURES)))
    with pytest.raises(ValueError, match=r"inputs: a batch of 3 given, expected 4"):
        stack_layer(kind, 2, stateful=True)(INPUTS[:3])


# --- as a Keras layer ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("return_sequences", "return_state", "time_major"), list(itertools.product((False, True), repeat=3))
)
@pytest.mark.parametrize(
    ("kind", "direction"),
    [*itertools.product(["wavefront"], DIRECTIONS), *itertools.product(["lstm", "rnn_relu"], DIRECTIONS[1:])],
)
def test_shapes_are_known_before_the_call(kind, direction, return_sequences, return_state, time_major):
    made = stack_layer(
        kind, 2, direction, return_sequences=return_sequences, return_state=return_state, time_major=time_major
    )
    x = np.swapaxes(INPUTS, 0, 1) if time_major else INPUTS
    results = tf.nest.flatten(made(x))
    assert [tuple(t.shape) for t in results] == [t.shape for t in tf.nest.flatten(made(keras.KerasTensor(x.shape)))]
    shapes = made.compute_output_shape(x.shape)
    assert [tuple(t.shape) for t in results] == (list(shapes) if return_state else [shapes])
    unknown = tf.nest.flatten(made(keras.KerasTensor((None, None, FEATURES))))
    assert all(t.shape[-1] in (UNITS, 2 * UNITS) and None in t.shape for t in unknown)
    assert len(tf.nest.flatten([made.compute_mask(x, MASK)])) == len(results)


@one_of_each
def test_an_encoder_hands_its_states_to_a_decoder(kind):
    source, target = keras.Input((None, FEATURES)), keras.Input((None, FEATURES))
    encoder = stack_layer(kind, 2, dtype="float32", return_state=True)
    decoder = stack_layer(kind, 2, dtype="float32", return_sequences=True)
    _, *states = encoder(source)
    model = keras.Model([source, target], keras.layers.Dense(2)(decoder(target, states)))
    model.compile("adam", "mse", jit_compile=False)
    x, y = INPUTS.astype("float32"), random(BATCH, 3, FEATURES).astype("float32")
    model.fit([x, y], random(BATCH, 3, 2), batch_size=2, verbose=0)
    expected = model.layers[-1](decoder(y, initial_state=encoder(x)[1:]))
    assert error(model.predict([x, y], verbose=0), expected) < 1e-5


@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_config_makes_the_same_layer_again(kind, policy):
    arguments = dict(
        units=3, num_layers=2, direction="bidirectional", dropout=0.25, return_sequences=True, return_state=True,
        stateful=True, time_major=True, seed=7, name="stack", trainable=False, dtype=policy,
    )  # fmt: skip
    arguments |= {"use_cudnn": False} if kind in MODES else {"layer_normalization": kind == NORMALIZED}
    made = CLASSES[kind](**arguments)
    config = made.get_config()
    for name, value in arguments.items():
        assert name == "dtype" or config[name] == value, name
    serialized = json.loads(json.dumps(keras.saving.serialize_keras_object(made)))
    again = keras.saving.deserialize_keras_object(serialized)
    assert type(again) is CLASSES[kind] and again.get_config() == config and again.dtype_policy.name == policy
    drawn = CLASSES[kind](3).get_config()
    assert CLASSES[kind].from_config(drawn).get_config()["seed"] == drawn["seed"] == (0 if kind in MODES else None)


@pytest.mark.parametrize("kind", [NORMALIZED, "lstm"])
def test_a_layer_starts_as_keras_layers_do(kind):
    def built():
        keras.utils.set_random_seed(0)
        normalized = {"layer_normalization": True} if kind == NORMALIZED else {}
        made = CLASSES[kind](32, 2, direction="bidirectional", **normalized)
        made.build((None, None, 48))
        return made

    made, again = built(), built()
    start = made.get_canonical()
    assert list(start) == list(parameters(made.spec, kind == NORMALIZED))
    for name, array in start.items():
        if name.endswith("/kernel"):
            limit = np.sqrt(6 / sum(array.shape))  # Glorot's, of the whole kernel
            assert 0.98 * limit < np.abs(array).max() <= limit, name
        elif name.endswith("/recurrent_kernel"):
            np.testing.assert_allclose(array @ array.T, np.eye(32), atol=1e-5, err_msg=name)
        elif name.endswith("/bias"):
            np.testing.assert_array_equal(array, np.repeat([0, 1, 0, 0], 32), err_msg=name)
        else:
            np.testing.assert_array_equal(array, np.full(array.shape, name.endswith("gain")), err_msg=name)
    assert not np.array_equal(start["lstm_1/forward/kernel"], start["lstm_1/backward/kernel"])
    for one, other in zip(made.weights, again.weights, strict=True):
        np.testing.assert_array_equal(one, other)
    assert kind == NORMALIZED or not recurrent_biases(made).any()


@pytest.mark.parametrize("mode", ["gru", "rnn_relu"])
def test_the_biases_of_other_modes_start_at_0(mode):
    made = LAYERS[mode](3)
    made.build((None, None, 2))
    assert not made.get_canonical()[f"{mode}_0/forward/bias"].any()


@pytest.mark.parametrize("kind", ["wavefront", "gru"])
def test_a_layer_can_be_built_inside_of_a_function(kind):
    made, x = CLASSES[kind](UNITS, 2), INPUTS.astype("float32")
    np.testing.assert_allclose(tf.function(made)(x), made(x), atol=1e-6)
    assert np.abs(next(iter(made.get_canonical().values()))).max() > 0.1


# --- bad arguments ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"units": 0}, r"units: 0 given, expected an integer from 1"),
        ({"units": 2.5}, r"units: 2.5 given"),
        ({"num_layers": 0}, r"num_layers: 0 given, expected an integer from 1"),
        ({"direction": "backward"}, r"direction: 'backward' given, expected one of 'unidirectional', 'bidirectional'"),
        ({"dropout": 1.5}, r"dropout: 1.5 given, expected a number from 0 to (below )?1$"),
        ({"dropout": -0.1}, r"dropout: -0.1 given, expected a number from 0 to (below )?1$"),
        ({"dropout": "0.5"}, r"dropout: '0.5' given"),
        ({"return_sequences": 1}, r"return_sequences: 1 given, expected True or False"),
        ({"return_state": None}, r"return_state: None given"),
        ({"stateful": "yes"}, r"stateful: 'yes' given"),
        ({"time_major": 0}, r"time_major: 0 given, expected True or False"),
        ({"seed": 2**40}, r"seed: \d+ given, expected an integer"),
        ({"colour": "red"}, r"Unrecognized keyword arguments"),
    ],
)
@pytest.mark.parametrize("kind", ["wavefront", "rnn_relu"])
def test_a_bad_argument_is_named(kind, arguments, message):
    with pytest.raises(ValueError, match=message):
        CLASSES[kind](**{"units": 3, **arguments})


@one_of_each
def test_bad_inputs_and_states_are_named(kind):
    made = stack_layer(kind, 2)
    h, c = initial_state(made)
    for inputs, states, message in (
        (INPUTS[..., :2], None, "expected axis -1 of input shape to have value 3"),
        (INPUTS[0], None, "expected ndim=3, found ndim=2"),
        (INPUTS, [h], r"initial_state: 1 tensors given, expected 2, h and c"),
        (INPUTS, [h, c[:1]], r"initial_state\[1\]: \[1, 4, 5\] given, expected \[2, 4, 5\]"),
        (INPUTS, [h[:, :3], c], r"initial_state\[0\]: \[2, 3, 5\] given, expected \[2, 4, 5\]"),
        (INPUTS, [h.astype("int32"), c], r"initial_state\[0\]: int32 given, expected float16 or .*bfloat16"),
        (INPUTS, [tf.constant("h"), c], r"initial_state\[0\]: string given, expected float16 or .*bfloat16"),
    ):
        with pytest.raises(ValueError, match=message):
            made(inputs, initial_state=states)
    with pytest.raises(ValueError, match="a known number of features"):
        CLASSES[kind](3)(keras.Input((None, None)))
    with pytest.raises(ValueError, match=r"not built yet"):
        CLASSES[kind](3).get_canonical()
    weights, before = made.get_canonical(), [variable.numpy() for variable in made.weights]
    for bad in (
        {name: array for name, array in weights.items() if name != "lstm_1/forward/bias"},
        {**weights, "lstm_1/forward/bias": np.zeros(3)},
        {**weights, "lstm_2/forward/bias": np.zeros(20)},
    ):
        with pytest.raises(ValueError, match=r"weights: lstm_./forward/bias (is missing|is \[3\]|was given)"):
            made.set_canonical(bad)
        for given, expected in zip(made.weights, before, strict=True):
            np.testing.assert_array_equal(given, expected)
