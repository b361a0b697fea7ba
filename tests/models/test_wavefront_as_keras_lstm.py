"""WavefrontLSTM in the hands of somebody who knows keras.layers.LSTM: each way to use one, done with both, gives the same."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from models.wavefront import WavefrontLSTM, to_keras_layers
from tests.comparing import error
from tests.cudnn_layer_cases import DIRECTIONS
from tests.wavefront_cases import layer as wavefront
from tests.wavefront_cases import numpy_stack

pytestmark = pytest.mark.usefixtures("on_the_cpu")

BATCH, TIME, FEATURES, UNITS = 4, 5, 3, 6
LIMIT = {"mixed_float16": 3e-3, "mixed_bfloat16": 3e-2}  # else 1e-5


def random(*shape, seed=0):
    return np.random.default_rng(seed).uniform(-1, 1, shape).astype("float32")


X = random(BATCH, TIME, FEATURES)


class Both:
    """Makes the layer of one kind, with the same weights in each: initializers have seeds."""

    def __init__(self, own: bool) -> None:
        self.own = own

    def __call__(self, **kwargs):
        kwargs.setdefault("kernel_initializer", keras.initializers.GlorotUniform(seed=1))
        kwargs.setdefault("recurrent_initializer", keras.initializers.Orthogonal(seed=2))
        kwargs.setdefault("bias_initializer", keras.initializers.RandomUniform(-0.5, 0.5, seed=3))
        return WavefrontLSTM(UNITS, **kwargs) if self.own else keras.layers.LSTM(UNITS, use_cudnn=False, **kwargs)

    def model(self, batch=None, **kwargs):
        return keras.Sequential([keras.Input((TIME, FEATURES), batch_size=batch), self(**kwargs)])

    def states(self, *states):
        """States [batch, units] as the layer takes them: WavefrontLSTM's have an axis of layers, here one, in front."""
        return [state[np.newaxis] if self.own else state for state in states]

    def plain(self, states):
        """The other way round."""
        return [np.asarray(state)[0] if self.own else np.asarray(state) for state in states]


def trained(model, **kwargs):
    model.compile(keras.optimizers.SGD(0.5), "mse", **kwargs)
    model.fit(X, random(BATCH, UNITS, seed=9), batch_size=2, shuffle=False, epochs=2, verbose=0)
    return model.get_weights()


def starts(lstm, tmp_path):
    found = []
    for bias, forget in (("ones", True), ("ones", False), ("zeros", True)):
        layer = lstm(bias_initializer=bias, unit_forget_bias=forget)
        layer.build((None, None, FEATURES))
        found += layer.get_weights()
    return found


def regularizers(lstm, tmp_path):
    model = lstm.model(
        kernel_regularizer="l2", recurrent_regularizer="l1", bias_regularizer=keras.regularizers.L2(0.1),
        activity_regularizer="l2",
    )  # fmt: skip
    model(X)
    return [sum(float(loss) for loss in model.losses), *trained(model, run_eagerly=True)]


def constraints(lstm, tmp_path):
    model = lstm.model(
        kernel_constraint="non_neg", recurrent_constraint=keras.constraints.MaxNorm(0.5), bias_constraint="unit_norm"
    )
    return trained(model, run_eagerly=True)


def config(lstm, tmp_path):
    layer = lstm(kernel_regularizer="l2", kernel_constraint="non_neg", return_sequences=True, go_backwards=False)
    again = type(layer).from_config(layer.get_config())
    assert again.get_config() == layer.get_config()
    return [again(X), again.losses[0]]


def clone(lstm, tmp_path):
    model = lstm.model(kernel_regularizer="l2")
    again = keras.models.clone_model(model)
    again.set_weights(model.get_weights())
    return [again(X), again.losses[0]]


def keras_file(lstm, tmp_path):
    model = lstm.model(bias_regularizer="l2")
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    return [again(X), again.losses[0]]


def weights_file(lstm, tmp_path):
    lstm.model().save_weights(tmp_path / "model.weights.h5")
    again = lstm.model(kernel_initializer="zeros")
    again.load_weights(tmp_path / "model.weights.h5")
    return [again(X)]


def saved_model(lstm, tmp_path):
    lstm.model().export(tmp_path / "exported", verbose=False)
    return [keras.layers.TFSMLayer(tmp_path / "exported", call_endpoint="serve")(X[:3])]


def tflite(lstm, tmp_path):
    """WavefrontLSTM goes through to_keras_layers, and both need a fixed batch size."""
    model = lstm.model(batch=1)
    if lstm.own:
        model = keras.Sequential([keras.Input((TIME, FEATURES), batch_size=1), *to_keras_layers(model.layers[0])])
    interpreter = tf.lite.Interpreter(model_content=tf.lite.TFLiteConverter.from_keras_model(model).convert())
    interpreter.allocate_tensors()
    interpreter.set_tensor(interpreter.get_input_details()[0]["index"], X[:1])
    interpreter.invoke()
    return [interpreter.get_tensor(interpreter.get_output_details()[0]["index"])]


def eager_fit(lstm, tmp_path):
    return trained(lstm.model(), run_eagerly=True)


def graph_fit(lstm, tmp_path):
    return trained(lstm.model(), jit_compile=False)


def stateful(lstm, tmp_path):
    layer = lstm(stateful=True)
    found = [layer(X), layer(X)]
    layer.reset_state()
    return [*found, layer(X)]


def states(lstm, tmp_path):
    layer = lstm(return_sequences=True, return_state=True)
    outputs, *finals = layer(X, initial_state=lstm.states(random(BATCH, UNITS, seed=4), random(BATCH, UNITS, seed=5)))
    return [outputs, *lstm.plain(finals), *lstm.plain(layer(X)[1:])]


def gradients(lstm, tmp_path):
    layer = lstm(return_sequences=True)
    layer.build((None, None, FEATURES))
    sources = [
        tf.constant(X),
        *map(tf.constant, lstm.states(random(BATCH, UNITS, seed=4), random(BATCH, UNITS, seed=5))),
    ]
    with tf.GradientTape() as tape:
        tape.watch(sources)
        loss = tf.reduce_sum(layer(sources[0], initial_state=sources[1:]) * random(BATCH, TIME, UNITS, seed=6))
    of_inputs, *of_states = tape.gradient(loss, sources)
    return [of_inputs, *lstm.plain(of_states)]


def embedding_mask(lstm, tmp_path):
    tokens = np.array([[1, 2, 3, 0, 0], [4, 1, 2, 3, 4], [2, 0, 0, 0, 0], [3, 3, 1, 2, 0]])
    uniform = keras.initializers.RandomUniform(-1, 1, seed=7)
    embedding = keras.layers.Embedding(5, FEATURES, mask_zero=True, embeddings_initializer=uniform)
    return [keras.Sequential([keras.Input((TIME,), dtype="int32"), embedding, lstm()])(tokens)]


def time_distributed(lstm, tmp_path):
    found = []
    for outer in (2, None):
        inputs = keras.Input((outer, TIME, FEATURES))
        model = keras.Model(inputs, keras.layers.TimeDistributed(lstm())(inputs))
        found.append(model.predict_on_batch(np.stack([X, X[::-1]], 1)))
    return found


def backward_layer_of_keras(lstm, tmp_path):
    """WavefrontLSTM is the forward layer of keras.layers.Bidirectional; the backward one is keras.layers.LSTM in both."""
    forward, backward = lstm(return_sequences=True), Both(own=False)(return_sequences=True, go_backwards=True)
    layer = keras.layers.Bidirectional(forward, backward_layer=backward)
    return [layer(X), layer(X, mask=np.arange(TIME) < [[2], [5], [1], [4]])]


def recurrent_dropout(lstm, tmp_path):
    """Masks differ from draw to draw: what is the same is what no masks enter, and that masks enter in training alone."""
    model = lstm.model(recurrent_dropout=0.5)
    assert np.abs(model(X, training=True) - model(X)).max() > 1e-3
    again = keras.models.clone_model(model)
    again.set_weights(model.get_weights())
    assert again.layers[0].recurrent_dropout == 0.5
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert loaded.layers[0].recurrent_dropout == 0.5
    return [model(X), again(X), loaded(X), model.predict(X, verbose=0)]


def summary(lstm, tmp_path):
    lines = []
    lstm.model().summary(print_fn=lines.append)
    assert f"(None, {UNITS})" in "".join(lines)
    return [lstm.model().count_params()]


def symbolic(lstm, tmp_path):
    """Shapes and dtypes of KerasTensors; the dtype of c under 16 bits is WavefrontLSTM's own."""
    for policy in ("float32", "mixed_float16"):
        outputs, h, c = lstm(return_sequences=True, return_state=True, dtype=policy)(keras.Input((None, FEATURES)))
        assert outputs.shape == (None, None, UNITS) and h.shape[-2:] == c.shape[-2:] == (None, UNITS)
        assert outputs.dtype == h.dtype == policy.removeprefix("mixed_")
        assert c.dtype == ("float32" if lstm.own else h.dtype)
    return []


def mixed_float16(lstm, tmp_path):
    outputs = lstm(dtype="mixed_float16", return_sequences=True)(X)
    assert outputs.dtype == "float16"
    return [outputs]


def mixed_bfloat16(lstm, tmp_path):
    outputs = lstm(dtype="mixed_bfloat16", return_sequences=True)(X)
    assert outputs.dtype == "bfloat16"
    return [tf.cast(outputs, "float32")]


WAYS = [
    starts, regularizers, constraints, config, clone, keras_file, weights_file, saved_model, tflite, eager_fit, graph_fit,
    stateful, states, gradients, recurrent_dropout, embedding_mask, time_distributed, backward_layer_of_keras, summary, symbolic,
    mixed_float16, mixed_bfloat16,
]  # fmt: skip


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_it_does_what_keras_layers_lstm_does(way, tmp_path):
    (tmp_path / "own").mkdir()
    found, expected = way(Both(own=True), tmp_path / "own"), way(Both(own=False), tmp_path)
    assert len(found) == len(expected)
    for k, (given, wanted) in enumerate(zip(found, expected, strict=True)):
        given, wanted = np.asarray(given), np.asarray(wanted)
        assert given.shape == wanted.shape, k
        np.testing.assert_allclose(given, wanted, rtol=0, atol=LIMIT.get(way.__name__, 1e-5), err_msg=str(k))


def test_every_layer_of_a_stack_draws_weights_of_its_own():
    layer = WavefrontLSTM(UNITS, 3, kernel_initializer=keras.initializers.GlorotUniform())
    layer.build((None, None, UNITS))
    kernels = [array for name, array in layer.get_canonical().items() if name.endswith("/kernel")]
    assert len({array.tobytes() for array in kernels}) == 3


def test_an_initializer_may_be_a_function():
    layer = WavefrontLSTM(UNITS, kernel_initializer=lambda shape, dtype=None: keras.ops.full(shape, 0.25, dtype))
    layer.build((None, None, FEATURES))
    np.testing.assert_array_equal(layer.get_weights()[0], np.full((FEATURES, 4 * UNITS), 0.25, "float32"))


def test_an_initializer_may_be_none_or_a_class_without_a_config():
    class Full(keras.initializers.Initializer):
        def __init__(self, value):
            self.value = value

        def __call__(self, shape, dtype=None):
            return keras.ops.full(shape, self.value, dtype)

    layer = WavefrontLSTM(UNITS, 2, kernel_initializer=Full(0.25), recurrent_initializer=None)
    layer.build((None, None, FEATURES))
    weights = layer.get_weights()
    np.testing.assert_array_equal(weights[0], np.full((FEATURES, 4 * UNITS), 0.25, "float32"))
    limit = np.sqrt(6 / (5 * UNITS))  # Glorot's, as of keras.layers.LSTM
    assert 0.9 * limit < np.abs(weights[1]).max() <= limit and (weights[1] != weights[4]).any()
    again = WavefrontLSTM.from_config(WavefrontLSTM(UNITS, recurrent_initializer=None).get_config())
    assert again.recurrent_initializer is None


def test_c_of_16_bits_is_carried_from_call_to_call_without_rounding():
    """Two calls on half of the steps each are one call on all of them."""
    options = dict(num_layers=2, return_sequences=True, return_state=True, dtype="mixed_float16")
    layer = WavefrontLSTM(UNITS, **options)
    whole = layer(X)
    first = layer(X[:, :2])
    second = layer(X[:, 2:], initial_state=list(first[1:]))
    assert first[2].dtype == "float32"
    np.testing.assert_array_equal(tf.concat([first[0], second[0]], 1), whole[0])
    np.testing.assert_array_equal(second[2], whole[2])


def test_a_config_of_the_first_version_makes_a_layer():
    old = {
        "module": "models.wavefront", "class_name": "WavefrontLSTM", "registered_name": "lstm_benchmarks>WavefrontLSTM",
        "config": {
            "name": "stack", "trainable": True, "dtype": "float32", "units": 3, "num_layers": 2, "direction": "bidirectional",
            "dropout": 0.25, "return_sequences": True, "return_state": False, "stateful": False,
            "layer_normalization": False, "implementation": "xla", "seed": None,
        },
    }  # fmt: skip
    layer = keras.saving.deserialize_keras_object(old)
    assert type(layer) is WavefrontLSTM and (layer.units, layer.num_layers, layer.dropout) == (3, 2, 0.25)


# --- recurrent dropout ------------------------------------------------------------------------------------------------------

RATE = 0.3


def spied(layer) -> list[np.ndarray]:
    """The factors [layers·directions, 4, batch, units] of each call of a layer, as it draws them."""
    drawn, draw = [], layer.recurrent_keep

    def keep(batch):
        drawn.append(np.asarray(draw(batch)))
        return tf.constant(drawn[-1])

    layer.recurrent_keep = keep
    return drawn


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_recurrent_dropout_is_that_of_keras_layers_with_the_same_masks(direction):
    """Outputs, states and the gradients by inputs, initial states and all weights, in float64; and the outputs of plain NumPy."""
    options = dict(recurrent_dropout=RATE, return_sequences=True, return_state=True, seed=1)
    made = wavefront(2, direction, **options)
    drawn = spied(made)
    pseudo_layers, width = made.spec.num_pseudo_layers, made.units
    x = tf.constant(random(BATCH, TIME, made.spec.input_size).astype("float64"))
    h, c = (tf.constant(random(pseudo_layers, BATCH, width, seed=k).astype("float64")) for k in (4, 5))
    factors = [
        random(BATCH, TIME, width * len(made.spec.directions), seed=6),
        *(random(*h.shape, seed=k) for k in (7, 8)),
    ]
    chain = to_keras_layers(made)
    cells = [
        half.cell
        for each in chain
        for half in (getattr(each, "forward_layer", each), getattr(each, "backward_layer", None))
        if half
    ]

    def in_turn(x, h, c):
        finals = []
        per = pseudo_layers // len(chain)
        for k, each in enumerate(chain):
            for half in (each, *(getattr(each, name) for name in ("forward_layer", "backward_layer") if per == 2)):
                half.return_sequences = half.return_state = True
            states = [state for d in range(per) for state in (h[per * k + d], c[per * k + d])]
            x, *own = each(x, initial_state=states, training=True)
            finals += own
        return x, tf.stack(finals[::2]), tf.stack(finals[1::2])

    def with_gradients(run, weights):
        with tf.GradientTape() as tape:
            tape.watch([x, h, c])
            found = run(x, h, c)
            loss = tf.add_n([tf.reduce_sum(y * factor) for y, factor in zip(found, factors, strict=True)])
        return [*found, *tape.gradient(loss, [x, h, c, *(variable.value for variable in weights)])]

    found = with_gradients(lambda x, h, c: made(x, initial_state=[h, c], training=True), made.parameters.values())
    (keep,) = drawn
    masks = keep / (1 - RATE)
    for cell, of_cell in zip(cells, masks, strict=True):
        cell.get_recurrent_dropout_mask = lambda h, of_cell=of_cell: [tf.constant(mask) for mask in of_cell]
    expected = with_gradients(in_turn, [variable for each in chain for variable in each.trainable_weights])
    assert len(found) == len(expected) == 6 + 3 * pseudo_layers
    for k, (given, wanted) in enumerate(zip(found, expected, strict=True)):
        assert given.shape == wanted.shape and error(given, wanted) < 1e-12, k
    plain = numpy_stack(x.numpy(), made.get_canonical(), h.numpy(), c.numpy(), recurrent_masks=masks)
    for given, wanted in zip(found, plain, strict=False):
        assert error(given, wanted) < 1e-12


def test_recurrent_masks_are_of_the_rate_and_differ_between_calls_layers_gates_sequences_and_units():
    batch, units, layers = 64, 64, 3
    made = WavefrontLSTM(units, layers, recurrent_dropout=RATE, seed=3)
    made.build((None, None, FEATURES))
    drawn = spied(made)
    for _ in range(2):
        made(random(batch, 2, FEATURES), training=True)
    made(random(batch, 2, FEATURES))
    assert [keep.shape for keep in drawn] == [(layers, 4, batch, units)] * 2, "none without training"
    keep = np.stack(drawn)
    assert not keep.all() and keep.any()
    deviation = np.sqrt(RATE * (1 - RATE))
    assert abs(keep.mean() - (1 - RATE)) < 6 * deviation / np.sqrt(keep.size)
    agree = RATE**2 + (1 - RATE) ** 2  # of two that are drawn apart
    for axis in range(keep.ndim):
        same = keep == np.roll(keep, 1, axis)
        assert abs(same.mean() - agree) < 12 * deviation / np.sqrt(keep.size), f"axis {axis}"


def test_fit_trains_with_recurrent_dropout_under_xla_and_draws_anew_at_every_step():
    layers = [WavefrontLSTM(UNITS, 2, recurrent_dropout=0.5, seed=1), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((TIME, FEATURES)), *layers])
    x, y = np.repeat(X[:1], 8, 0), np.ones((8, 1), "float32")
    model.compile(keras.optimizers.SGD(0.0), "mse", jit_compile=True)
    losses = model.fit(x, y, epochs=3, verbose=0).history["loss"]
    assert len(set(losses)) == 3
    model.optimizer.learning_rate = 0.1
    assert model.fit(x, y, epochs=20, verbose=0).history["loss"][-1] < 0.2 * losses[0]


def test_recurrent_dropout_of_a_stateful_layer_goes_on_from_its_states_with_new_masks():
    made = wavefront(2, recurrent_dropout=RATE, stateful=True, return_sequences=True, return_state=True)
    drawn, x = spied(made), random(made.states[0].shape[1], 4, made.spec.input_size)
    first, second = made(x, training=True), made(x, training=True)
    for given, keep, before in (
        (first, drawn[0], [np.zeros(s.shape) for s in first[1:]]),
        (second, drawn[1], first[1:]),
    ):
        start = [np.asarray(state) for state in before]
        expected = numpy_stack(x.astype("float64"), made.get_canonical(), *start, recurrent_masks=keep / (1 - RATE))
        for result, wanted in zip(given, expected, strict=True):
            assert error(result, wanted) < 1e-12
