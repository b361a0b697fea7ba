"""Files of WavefrontLSTM: they hold the canonical tensors, and only what fits is loaded."""

import zipfile

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf

from models.wavefront.layer import WavefrontLSTM
from tests.cudnn_layer_cases import BATCH, DIRECTIONS, FEATURES, INPUTS, TIME, UNITS, random
from tests.wavefront_cases import layer, parameters

X = INPUTS.astype("float32")


@pytest.fixture(autouse=True)
def on_the_cpu():
    with tf.device("CPU:0"):
        yield


def network(num_layers=2, units=UNITS, features=FEATURES, dtype="float32", stack=None, **kwargs):
    made = stack or WavefrontLSTM(units, num_layers, dtype=dtype, **kwargs)
    return keras.Sequential([keras.Input((None, features)), made, keras.layers.Dense(2, dtype=dtype)])


def randomize(model, seed):
    for k, variable in enumerate(model.trainable_variables):
        variable.assign(random(*variable.shape, seed=seed + k))


def values(model):
    return [variable.numpy() for variable in model.weights]


def group(file, name):
    """Of the layer that has a tensor of this name."""
    return next(each["vars"] for each in file["layers"].values() if name in each["vars"])


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("normalized", [False, True])
def test_saved_weights_come_back_bit_by_bit(normalized, direction, tmp_path):
    model = network(direction=direction, layer_normalization=normalized, dropout=0.5, seed=1)
    randomize(model, seed=3)
    start, expected = values(model), model(X)
    model.save_weights(tmp_path / "model.weights.h5")
    model.save(tmp_path / "model.keras")
    for name in ("model.weights.h5", "model.keras"):
        randomize(model, seed=7)
        model.load_weights(tmp_path / name)
        for given, wanted in zip(values(model), start, strict=True):
            np.testing.assert_array_equal(given, wanted)
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert loaded.layers[0].get_config() == model.layers[0].get_config()
    np.testing.assert_array_equal(loaded(X), expected)


@pytest.mark.parametrize("normalized", [False, True])
def test_a_file_holds_the_canonical_tensors(normalized, tmp_path):
    model = network(direction="bidirectional", layer_normalization=normalized)
    model.save_weights(tmp_path / "model.weights.h5")
    made = model.layers[0]
    with h5py.File(tmp_path / "model.weights.h5") as file:
        stored = group(file, "lstm_0.forward.kernel")
        assert set(stored) == {name.replace("/", ".") for name in parameters(made.spec, normalized)}
        for name, array in made.get_canonical().items():
            np.testing.assert_array_equal(stored[name.replace("/", ".")][()], array)


def test_a_float64_layer_reads_a_float32_file_and_the_other_way_round(tmp_path):
    for dtypes in (("float32", "float64"), ("float64", "float32")):
        source, target = (network(dtype=dtype) for dtype in dtypes)
        randomize(source, seed=1)
        source.save_weights(tmp_path / "model.weights.h5")
        target.load_weights(tmp_path / "model.weights.h5")
        for name, array in target.layers[0].get_canonical().items():
            np.testing.assert_array_equal(array, source.layers[0].get_canonical()[name].astype(array.dtype))


def test_a_stateful_model_and_one_trained_on_are_saved_whole(tmp_path):
    made = layer(2, dtype="float32", stateful=True)
    model = keras.Sequential([keras.Input(batch_shape=(BATCH, TIME, FEATURES)), made, keras.layers.Dense(1)])
    model.compile("adam", "mse", jit_compile=False)
    model.fit(X, random(BATCH, 1), batch_size=BATCH, epochs=2, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert [state.shape for state in loaded.layers[0].states] == [state.shape for state in made.states]
    for given, expected in zip(loaded.optimizer.variables, model.optimizer.variables, strict=True):
        np.testing.assert_array_equal(given, expected)
    made.reset_state()
    np.testing.assert_array_equal(loaded(X), model(X))


OTHERS = {  # what another file holds → what is said of it
    "fewer layers": (dict(num_layers=1), "lstm_1/forward/kernel is missing"),
    "more layers": (dict(num_layers=3), "lstm_2/forward/bias was given, expected only lstm_0"),
    "more directions": (dict(direction="bidirectional"), "lstm_0/backward/bias was given"),
    "layer normalisation": (dict(layer_normalization=True), "lstm_0/forward/cell_bias was given"),
    "more units": (dict(units=6), "lstm_0/forward/kernel is [3, 24], expected [3, 20]"),
    "more features": (dict(features=4), "lstm_0/forward/kernel is [4, 20], expected [3, 20]"),
    "keras.layers.LSTM": (None, "lstm_0/forward/kernel is missing"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_file_of_another_stack_is_refused_and_the_layer_keeps_its_weights(other, tmp_path):
    arguments, message = OTHERS[other]
    source = network(**arguments) if arguments else network(stack=keras.layers.LSTM(UNITS))
    source.save_weights(tmp_path / "other.weights.h5")
    model = network()
    start = model.layers[0].get_canonical()
    with h5py.File(tmp_path / "other.weights.h5", "a") as file:
        if not arguments:
            file["layers"].move("lstm", "wavefront_lstm")
    with pytest.raises(ValueError) as raised:
        model.load_weights(tmp_path / "other.weights.h5")
    [line] = [line for line in str(raised.value).splitlines() if "weights:" in line]
    assert message in line
    for name, array in model.layers[0].get_canonical().items():
        np.testing.assert_array_equal(array, start[name])


@pytest.mark.parametrize("name", ["model.weights.h5", "model.keras"])
def test_a_file_cut_short_is_refused_and_the_layer_keeps_its_weights(name, tmp_path):
    model = network()
    (model.save if name.endswith("keras") else model.save_weights)(tmp_path / name)
    whole = (tmp_path / name).read_bytes()
    randomize(model, seed=3)
    start = values(model)
    for length in (0, 100, len(whole) // 2, len(whole) - 100):
        (tmp_path / name).write_bytes(whole[:length])
        with pytest.raises((OSError, zipfile.BadZipFile)):
            model.load_weights(tmp_path / name)
        for given, expected in zip(values(model), start, strict=True):
            np.testing.assert_array_equal(given, expected)


def test_a_file_with_a_tensor_of_integers_is_refused(tmp_path):
    model = network(layer_normalization=True)
    model.save_weights(tmp_path / "model.weights.h5")
    with h5py.File(tmp_path / "model.weights.h5", "a") as file:
        stored = group(file, "lstm_1.forward.cell_gain")
        del stored["lstm_1.forward.cell_gain"]
        stored["lstm_1.forward.cell_gain"] = np.zeros(UNITS, "int32")
    start = model.layers[0].get_canonical()
    with pytest.raises(ValueError, match=r"lstm_1/forward/cell_gain is int32, expected float16, float32 or float64"):
        model.load_weights(tmp_path / "model.weights.h5")
    for name, array in model.layers[0].get_canonical().items():
        np.testing.assert_array_equal(array, start[name])
