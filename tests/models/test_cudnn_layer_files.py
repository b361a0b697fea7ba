"""Files of the layers of models/cudnn/layers.py: they hold the canonical tensors, and only what fits is loaded."""

import zipfile

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf

from models.cudnn.convert import LAYERS
from models.weights import layouts
from tests.cudnn_layer_cases import BATCH, DIRECTIONS, FEATURES, INPUTS, MODES, TIME, UNITS, layer, random

X = INPUTS.astype("float32")


@pytest.fixture(autouse=True)
def on_the_cpu():
    with tf.device("CPU:0"):
        yield


def network(mode="lstm", num_layers=2, units=UNITS, features=FEATURES, dtype="float32", stack=None, **kwargs):
    made = stack or LAYERS[mode](units, num_layers, use_cudnn=False, dtype=dtype, **kwargs)
    return keras.Sequential([keras.Input((None, features)), made, keras.layers.Dense(2, dtype=dtype)])


def randomize(model, seed):
    for k, variable in enumerate(model.trainable_variables):
        variable.assign(random(*variable.shape, seed=seed + k))


def values(model):
    return [variable.numpy() for variable in model.variables]


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("mode", MODES)
def test_saved_weights_come_back_bit_by_bit(mode, direction, tmp_path):
    model = network(mode, direction=direction)
    model.layers[0].set_canonical(
        {n: a.astype("float32") for n, a in layer(mode, 2, direction).get_canonical().items()}
    )
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


@pytest.mark.parametrize("mode", MODES)
def test_a_file_holds_the_canonical_tensors(mode, tmp_path):
    model = network(mode, direction="bidirectional")
    model.save_weights(tmp_path / "model.weights.h5")
    canonical = model.layers[0].get_canonical()
    with h5py.File(tmp_path / "model.weights.h5") as file:
        group = next(g for g in file["layers"].values() if len(g["vars"]) == len(canonical))["vars"]
        assert set(group) == {name.replace("/", ".") for name in layouts.canonical_shapes(model.layers[0].spec)}
        for name, array in canonical.items():
            np.testing.assert_array_equal(group[name.replace("/", ".")][()], array)


def test_a_float64_layer_reads_a_float32_file_and_the_other_way_round(tmp_path):
    for wide in (False, True):
        source, target = (
            network(dtype="float64" if wide else "float32"),
            network(dtype="float32" if wide else "float64"),
        )
        randomize(source, seed=1)
        source.save_weights(tmp_path / "model.weights.h5")
        target.load_weights(tmp_path / "model.weights.h5")
        for name, array in target.layers[0].get_canonical().items():
            np.testing.assert_array_equal(array, source.layers[0].get_canonical()[name].astype(array.dtype))


def test_a_stateful_model_and_one_trained_on_are_saved_whole(tmp_path):
    made = layer("lstm", dtype="float32", stateful=True)
    model = keras.Sequential([keras.Input(batch_shape=(BATCH, TIME, FEATURES)), made, keras.layers.Dense(1)])
    model.compile("adam", "mse")
    model.fit(X, random(BATCH, 1), batch_size=BATCH, epochs=2, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert [state.shape for state in loaded.layers[0].states] == [state.shape for state in made.states]
    for given, expected in zip(loaded.optimizer.variables, model.optimizer.variables, strict=True):
        np.testing.assert_array_equal(given, expected)
    made.reset_state()
    np.testing.assert_array_equal(loaded(X), model(X))


OTHERS = {  # what another file holds → what is said of it
    "another mode": (dict(mode="gru"), "lstm_0/forward/kernel is missing, expected [3, 20]; given: gru_0/forward"),
    "fewer layers": (dict(num_layers=1), "lstm_1/forward/kernel is missing"),
    "more layers": (dict(num_layers=3), "lstm_2/forward/bias was given, expected only lstm_0"),
    "more directions": (dict(direction="bidirectional"), "lstm_0/backward/bias was given"),
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
    start = model.layers[0].params.numpy()
    with h5py.File(tmp_path / "other.weights.h5", "a") as file:
        name = next(iter(file["layers"]))
        if name != "cudnn_lstm_layer":
            file["layers"].move(name, "cudnn_lstm_layer")
    with pytest.raises(ValueError) as raised:
        model.load_weights(tmp_path / "other.weights.h5")
    [line] = [line for line in str(raised.value).splitlines() if "weights:" in line]
    assert message in line
    np.testing.assert_array_equal(model.layers[0].params, start)


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
    model = network()
    model.save_weights(tmp_path / "model.weights.h5")
    with h5py.File(tmp_path / "model.weights.h5", "a") as file:
        group = next(g for g in file["layers"].values() if "lstm_0.forward.bias" in g["vars"])["vars"]
        del group["lstm_0.forward.bias"]
        group["lstm_0.forward.bias"] = np.zeros(4 * UNITS, "int32")
    start = model.layers[0].params.numpy()
    with pytest.raises(ValueError, match=r"lstm_0/forward/bias is int32, expected float16, float32 or float64"):
        model.load_weights(tmp_path / "model.weights.h5")
    np.testing.assert_array_equal(model.layers[0].params, start)
