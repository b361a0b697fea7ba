"""The float64 reference, compared with finite differences, and Keras in float64."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from models.reference import products
from models.reference.lstm import lstm_stack_backward, lstm_stack_forward
from models.reference.networks import SGD, Adam, Classifier, LanguageModel, trajectory
from models.weights import layouts
from models.weights.canonical import classifier_shapes, language_model_shapes, large_random, lstm_shapes, random_states

VOCABULARY, EMBEDDING, UNITS, BATCH, TIME, FEATURES, CLASSES = 11, 4, 5, 3, 6, 4, 3
FLOAT64 = 2e-14  # max|a - b| / max|b| between two float64 computations of these sizes; measured: up to 1e-15


def error(a, b):
    return np.abs(np.asarray(a) - np.asarray(b)).max() / np.abs(b).max()


def assert_close(given, expected, limit):
    assert set(given) == set(expected)
    for name, array in expected.items():
        assert error(given[name], array) < limit, name


def double(weights):
    return {name: array.astype(np.float64) for name, array in weights.items()}


def flat(states):
    return [array for layer in states for pair in layer for array in pair]


# --- finite differences ----------------------------------------------------------------------------------------------


def language_model_case(num_layers=2):
    rng = np.random.default_rng(5)
    weights = double(large_random(language_model_shapes(VOCABULARY, EMBEDDING, UNITS, num_layers), seed=1))
    batches = [tuple(rng.integers(0, VOCABULARY, (2, BATCH, TIME))) for _ in range(2)]
    return weights, batches, random_states(num_layers, BATCH, UNITS, seed=2)


def classifier_case(bidirectional=False):
    rng = np.random.default_rng(6)
    weights = double(large_random(classifier_shapes(FEATURES, UNITS, 2, (8, 7), CLASSES, bidirectional), seed=1))
    batches = [(rng.uniform(-1, 1, (BATCH, TIME, FEATURES)), rng.integers(0, CLASSES, BATCH)) for _ in range(2)]
    return weights, batches, random_states(2, BATCH, UNITS, seed=2, bidirectional=bidirectional)


CASES = {
    "language model, mean": (LanguageModel("mean"), *language_model_case()),
    "language model, sum over time": (LanguageModel("sum_over_time"), *language_model_case(3)),
    "classifier": (Classifier(), *classifier_case()),
    "bidirectional classifier": (Classifier(), *classifier_case(True)),
}


@pytest.mark.parametrize(
    "case",
    [  # by default those of two directions are held to Keras below
        pytest.param(case, marks=[pytest.mark.slow] * case.startswith("bidirectional")) for case in CASES
    ],
)
def test_gradients_match_finite_differences_in_every_element(case):
    model, weights, batches, states = CASES[case]
    gradients = model.loss_and_gradients(weights, *batches[0], states).gradients
    assert list(gradients) == list(weights)
    step = 1e-3  # four points: truncation of step⁴ = 1e-12 and rounding of 1e-16 / step, on gradients from 1e-3 up
    for name, array in weights.items():
        numeric = np.empty_like(array)
        for index in np.ndindex(array.shape):
            losses = {}
            for k in (-2, -1, 1, 2):
                shifted = {**weights, name: array.copy()}
                shifted[name][index] += k * step
                losses[k] = model.forward(shifted, *batches[0], states).loss
            numeric[index] = (8 * (losses[1] - losses[-1]) - (losses[2] - losses[-2])) / (12 * step)
        assert error(gradients[name], numeric) < 1e-9, name


@pytest.mark.parametrize("bidirectional", [False, True])
def test_gradients_by_inputs_and_initial_states_match_finite_differences(bidirectional):
    rng = np.random.default_rng(7)
    weights = double(large_random(lstm_shapes(FEATURES, UNITS, 2, bidirectional), seed=1))
    states = random_states(2, BATCH, UNITS, seed=2, bidirectional=bidirectional)
    points = [rng.uniform(-1, 1, (BATCH, TIME, FEATURES)), *(array.astype(np.float64) for array in flat(states))]
    d_outputs = rng.uniform(-1, 1, (BATCH, TIME, UNITS * (2 if bidirectional else 1)))

    def run(arrays):
        pairs = list(zip(arrays[1::2], arrays[2::2], strict=True))
        per_layer = len(pairs) // 2
        states = [pairs[:per_layer], pairs[per_layer:]]
        return lstm_stack_forward(arrays[0], weights, states, 2, bidirectional)

    d_inputs, _, d_states = lstm_stack_backward(d_outputs, run(points)[2])
    for k, derivative in enumerate([d_inputs, *flat(d_states)]):
        direction = rng.uniform(-1, 1, points[k].shape)
        ends = [[p + sign * 1e-5 * direction if j == k else p for j, p in enumerate(points)] for sign in (-1, 1)]
        low, high = ((run(end)[0] * d_outputs).sum() for end in ends)
        assert (derivative * direction).sum() == pytest.approx((high - low) / 2e-5, rel=1e-7), k


@pytest.mark.parametrize("case", CASES)
def test_forward_gives_the_same_loss_and_outputs_as_loss_and_gradients(case):
    model, weights, batches, states = CASES[case]
    forward = model.forward(weights, *batches[0], states)
    both = model.loss_and_gradients(weights, *batches[0], states)
    assert forward.loss == both.loss and forward.gradients == {}
    np.testing.assert_array_equal(forward.hidden, both.hidden)
    np.testing.assert_array_equal(forward.logits, both.logits)
    np.testing.assert_array_equal(flat(forward.final_states), flat(both.final_states))


def test_float32_reference_is_float32_throughout_and_near_float64():
    _, weights, batches, states = CASES["language model, mean"]
    wide = LanguageModel().loss_and_gradients(weights, *batches[0], states)
    narrow = LanguageModel(dtype=np.float32).loss_and_gradients(weights, *batches[0], states)
    arrays = [narrow.hidden, narrow.logits, *flat(narrow.final_states), *narrow.gradients.values()]
    assert {array.dtype for array in arrays} == {np.dtype(np.float32)}
    assert 1e-9 < error(narrow.logits, wide.logits) < 1e-6
    assert_close(narrow.gradients, wide.gradients, 1e-6)


def test_loss_stays_finite_where_logits_are_extreme():
    weights = dict(CASES["classifier"][1])
    weights["dense_2/kernel"] = np.zeros_like(weights["dense_2/kernel"])
    weights["dense_2/bias"] = np.array([1000.0, -1000.0, 0.0])
    inputs, states = CASES["classifier"][2][0][0], CASES["classifier"][3]
    result = Classifier().loss_and_gradients(weights, inputs, np.array([0, 1, 2]), states)
    assert result.loss == pytest.approx((0 + 2000 + 1000) / 3, rel=1e-15)
    np.testing.assert_allclose(result.gradients["dense_2/bias"], [2 / 3, -1 / 3, -1 / 3], rtol=1e-15)


def test_what_cannot_be_computed_is_refused():
    _, weights, batches, states = CASES["language model, mean"]
    tokens, targets = batches[0]
    with pytest.raises(ValueError, match=r"tokens: ids from \d to 11, expected 0 to 10"):
        LanguageModel().forward(weights, np.where(tokens == tokens[0, 0], VOCABULARY, tokens), targets, states)
    with pytest.raises(ValueError, match="targets: ids from -1 to"):
        LanguageModel().forward(weights, tokens, np.where(targets == targets[0, 0], -1, targets), states)
    with pytest.raises(ValueError, match="tokens: dtype float64, expected integers"):
        LanguageModel().forward(weights, tokens.astype(float), targets, states)
    with pytest.raises(ValueError, match=r"states: 1 layers of \[1\] directions given, expected 2 layers of 1"):
        LanguageModel().forward(weights, tokens, targets, states[:1])
    with pytest.raises(ValueError, match="reduction='sum': expected one of mean, sum_over_time"):
        LanguageModel("sum")
    with pytest.raises(ValueError, match="steps=2: expected at least 3"):
        trajectory(LanguageModel(), SGD(0.1), weights, batches, states, steps=2, carry_states=False)
    used = Adam()
    used.update(double(weights), weights)
    with pytest.raises(ValueError, match="optimizer: 1 steps taken already, expected a fresh one"):
        trajectory(LanguageModel(), used, weights, batches, states, steps=3, carry_states=False)


# --- Keras, in float64 -----------------------------------------------------------------------------------------------


@pytest.fixture
def keras():
    """Keras in float64 throughout."""
    keras = pytest.importorskip("keras")
    floatx, policy = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx("float64")  # learning rates
    keras.config.set_dtype_policy("float64")  # layers
    yield keras
    keras.config.set_floatx(floatx)
    keras.config.set_dtype_policy(policy)


def keras_stack(keras, weights, num_layers, bidirectional, return_sequences=True):
    """Keras' own layers, holding `weights`, and a call that runs them: (inputs, states) → outputs, final states."""
    layers = []
    for layer in range(num_layers):
        own = layouts.to_keras(weights, layer, bidirectional)
        sequences = return_sequences or layer < num_layers - 1
        lstm = keras.layers.LSTM(own[2].size // 4, return_sequences=sequences, return_state=True, use_cudnn=False)
        lstm = keras.layers.Bidirectional(lstm) if bidirectional else lstm
        lstm.build((None, None, own[0].shape[0]))
        lstm.set_weights(own)
        layers.append(lstm)

    def call(x, states):
        finals = []
        for lstm, pairs in zip(layers, states, strict=True):
            x, *final = lstm(x, initial_state=[array for pair in pairs for array in pair])
            finals.append(list(zip(final[0::2], final[1::2], strict=True)))
        return x, finals

    return layers, call


@pytest.mark.parametrize("bidirectional", [False, True], ids=["forward", "bidirectional"])
@pytest.mark.parametrize("num_layers", [1, 3])
def test_stack_matches_keras_layers_in_float64(keras, num_layers, bidirectional):
    tf = pytest.importorskip("tensorflow")
    rng = np.random.default_rng(8)
    weights = double(large_random(lstm_shapes(FEATURES, UNITS, num_layers, bidirectional), seed=1))
    states = [
        [tuple(tf.constant(array, tf.float64) for array in pair) for pair in layer]
        for layer in random_states(num_layers, BATCH, UNITS, seed=2, bidirectional=bidirectional)
    ]
    inputs = tf.constant(rng.uniform(-2, 2, (BATCH, TIME, FEATURES)))
    d_outputs = rng.uniform(-1, 1, (BATCH, TIME, UNITS * (2 if bidirectional else 1)))
    with tf.device("CPU:0"), tf.GradientTape() as tape:
        layers, call = keras_stack(keras, weights, num_layers, bidirectional)
        tape.watch([inputs, states])
        keras_outputs, keras_finals = call(inputs, states)
        loss = tf.reduce_sum(keras_outputs * d_outputs)
    sources = [[variable.value for variable in lstm.weights] for lstm in layers]
    keras_gradients, keras_d_inputs, keras_d_states = tape.gradient(loss, [sources, inputs, states])

    outputs, finals, cache = lstm_stack_forward(inputs.numpy(), weights, states, num_layers, bidirectional)
    d_inputs, gradients, d_states = lstm_stack_backward(d_outputs, cache)
    assert keras_outputs.dtype == "float64"
    assert error(outputs, keras_outputs) < FLOAT64
    assert error(flat(finals), flat(keras_finals)) < FLOAT64
    assert error(d_inputs, keras_d_inputs) < FLOAT64
    assert error(flat(d_states), flat(keras_d_states)) < FLOAT64
    expected = {}
    for layer, arrays in enumerate(keras_gradients):
        expected |= layouts.from_keras([array.numpy() for array in arrays], layer, bidirectional)
    assert_close(gradients, expected, FLOAT64)


def keras_language_model(keras, weights, reduction, num_layers):
    embedding = keras.layers.Embedding(*weights["embedding"].shape)
    dense = keras.layers.Dense(VOCABULARY)
    embedding.build()
    dense.build((None, UNITS))
    embedding.set_weights([weights["embedding"]])
    dense.set_weights([weights["dense_0/kernel"], weights["dense_0/bias"]])
    layers, stack = keras_stack(keras, weights, num_layers, bidirectional=False)

    def run(tokens, targets, states):
        hidden, finals = stack(embedding(tokens), states)
        logits = dense(hidden)
        losses = keras.losses.sparse_categorical_crossentropy(targets, logits, from_logits=True)  # [batch, time]
        loss = keras.ops.mean(losses if reduction == "mean" else keras.ops.sum(losses, axis=1))
        return loss, hidden, logits, finals

    return run, [embedding, *layers, dense]


def keras_classifier(keras, weights, bidirectional):
    layers, stack = keras_stack(keras, weights, 2, bidirectional, return_sequences=False)
    dense = []
    for k, activation in enumerate(["relu", "relu", None]):
        own = [weights[f"dense_{k}/kernel"], weights[f"dense_{k}/bias"]]
        dense.append(keras.layers.Dense(own[1].size, activation))
        dense[-1].build((None, own[0].shape[0]))
        dense[-1].set_weights(own)

    def run(inputs, labels, states):
        hidden, finals = stack(inputs, states)
        logits = hidden
        for layer in dense:
            logits = layer(logits)
        loss = keras.ops.mean(keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True))
        return loss, hidden, logits, finals

    return run, [*layers, *dense]


# Keras rounds its betas and the rate of a schedule to float32 in any dtype, so the betas compared closely are sums of
# few powers of 2. For the default 0.999 that rounding moves 1 - beta_2 by 1.3e-5 of itself, the first updates by half.
EXACT = {"beta_1": 0.875, "beta_2": 1 - 2.0**-10}
OPTIMIZERS = {  # ours, Keras', limit on the relative error of the updates and of the losses' distance from the first
    "adam, Keras' betas": lambda keras: (Adam(), keras.optimizers.Adam(), 1e-5),
    "adam": lambda keras: (Adam(1e-3, **EXACT), keras.optimizers.Adam(1e-3, **EXACT), 1e-12),
    "adam, clipped": lambda keras: (
        Adam(epsilon=2.0**-17, clip_norm=0.125, **EXACT),
        keras.optimizers.Adam(epsilon=2.0**-17, global_clipnorm=0.125, **EXACT),
        1e-12,
    ),
    "adam, decay": lambda keras: (
        Adam(2e-3, decay=0.1, **EXACT),
        keras.optimizers.Adam(keras.optimizers.schedules.InverseTimeDecay(2e-3, 1, 0.1), **EXACT),
        1e-7,
    ),
    "sgd": lambda keras: (SGD(0.5), keras.optimizers.SGD(0.5), 1e-12),
    "sgd, clipped": lambda keras: (SGD(0.5, clip_norm=0.25), keras.optimizers.SGD(0.5, global_clipnorm=0.25), 1e-12),
    "sgd, below the clip": lambda keras: (
        SGD(0.5, clip_norm=99.0),
        keras.optimizers.SGD(0.5, global_clipnorm=99.0),
        1e-12,
    ),
}


BY_DEFAULT = ("language model, mean",)  # with every optimizer; the others with one, and with --all with every one


def test_adam_starts_from_keras_defaults(keras):
    theirs, ours = keras.optimizers.Adam().get_config(), Adam()
    for name in ("learning_rate", "beta_1", "beta_2", "epsilon"):
        assert theirs[name] == pytest.approx(getattr(ours, name), rel=1e-7), name  # Keras: through float32


@pytest.mark.parametrize(
    ("case", "optimizer"),
    [
        pytest.param(
            case, optimizer, marks=[pytest.mark.slow] * (case not in BY_DEFAULT and optimizer != "sgd, clipped")
        )
        for case in CASES
        for optimizer in OPTIMIZERS
    ],
)
def test_trajectory_matches_keras_in_float64(keras, case, optimizer):
    tf = pytest.importorskip("tensorflow")
    model, weights, batches, states = CASES[case]
    carry_states = "sum" in case
    if "language" in case:
        num_layers = 2 if model.reduction == "mean" else 3
        run, layers = keras_language_model(keras, weights, model.reduction, num_layers)
    else:
        run, layers = keras_classifier(keras, weights, "bidirectional" in case)
    ours, theirs, limit = OPTIMIZERS[optimizer](keras)
    result = trajectory(model, ours, weights, batches, states, steps=5, carry_states=carry_states)

    names, variables = list(weights), [variable for layer in layers for variable in layer.weights]
    losses, now = [], [[tuple(np.asarray(array, np.float64) for array in pair) for pair in layer] for layer in states]
    with tf.device("CPU:0"):
        theirs.build(variables)
        for step in range(5):
            with tf.GradientTape() as tape:
                loss, hidden, logits, finals = run(*batches[step % 2], now)
            # Made dense: of IndexedSlices, Keras squares the parts of a repeated token's gradient one by one.
            dense = [tf.convert_to_tensor(g) for g in tape.gradient(loss, [variable.value for variable in variables])]
            if step == 0:
                gradients = [gradient.numpy() for gradient in dense]
                first = {"hidden": hidden, "logits": logits, "loss": loss}
            theirs.apply(dense, variables)
            losses.append(float(loss))
            now = finals if carry_states else now
            if step == 2:
                after = [variable.numpy() for variable in variables]

    for name, value in first.items():
        assert error(getattr(result, name), value) < FLOAT64, name
    assert_close(result.gradients, dict(zip(names, gradients, strict=True)), FLOAT64)
    assert error(np.subtract(result.losses, losses[0])[1:], np.subtract(losses, losses[0])[1:]) < limit
    assert set(result.updates) == set(names)
    for name, array in zip(names, after, strict=True):
        assert error(result.updates[name], array - weights[name]) < limit, name


@pytest.mark.parametrize("m, n", [(7, 5), (5, 7), (2, 9)])
def test_a_product_that_several_threads_divide_is_the_product(monkeypatch, m, n):
    monkeypatch.setattr(products, "THREADS", 3)
    monkeypatch.setattr(products, "LARGE", 0)
    pool, at_once, matmul = ThreadPoolExecutor(3), threading.Barrier(3), np.matmul
    monkeypatch.setattr(products, "_pool", lambda: pool)
    monkeypatch.setattr(np, "matmul", lambda *parts, out: at_once.wait(timeout=20) >= 0 and matmul(*parts, out=out))
    draw = np.random.default_rng(0).normal
    a, b = draw(size=(4, m)).T, draw(size=(4, 2 * n))[:, ::2]
    assert error(products.product(a, b), a @ b) < 1e-14
    assert products.product(a.astype("float32"), b.astype("float32")).dtype == np.float32
