"""Files of WavefrontLSTM and of models/cudnn/layers.py: they hold the canonical tensors, and only what fits is loaded."""

import zipfile

import h5py
import keras
import numpy as np
import pytest

from models.cudnn.convert import LAYERS
from models.wavefront.layer import WavefrontLSTM
from models.weights import layouts
from tests import cudnn_layer_cases
from tests.cudnn_layer_cases import BATCH, DIRECTIONS, FEATURES, INPUTS, TIME, UNITS, random
from tests.wavefront_cases import KINDS, NORMALIZED, parameters, stack_layer

pytestmark = pytest.mark.usefixtures("on_the_cpu")

X = INPUTS.astype("float32")
kinds = pytest.mark.parametrize("kind", KINDS)
one_of_each = pytest.mark.parametrize("kind", ["wavefront", "lstm"])


def network(kind, num_layers=2, units=UNITS, features=FEATURES, dtype="float32", **kwargs):
    if kind in LAYERS:
        made = LAYERS[kind](units, num_layers, use_cudnn=False, dtype=dtype, **kwargs)
    elif kind == "keras":
        made = keras.layers.LSTM(units)
    else:
        made = WavefrontLSTM(units, num_layers, layer_normalization=kind == NORMALIZED, dtype=dtype, **kwargs)
    return keras.Sequential([keras.Input((None, features)), made, keras.layers.Dense(2, dtype=dtype)])


def randomize(model, seed):
    for k, variable in enumerate(model.trainable_variables):
        variable.assign(random(*variable.shape, seed=seed + k))


def values(of):
    """Of a model or a layer."""
    return [variable.numpy() for variable in of.weights]


def assert_unchanged(of, start):
    for given, expected in zip(values(of), start, strict=True):
        np.testing.assert_array_equal(given, expected)


def stored_in(file, name):
    """Of the layer that has a tensor of this name."""
    return next(each["vars"] for each in file["layers"].values() if name in each["vars"])


@pytest.mark.parametrize("direction", DIRECTIONS)
@kinds
def test_saved_weights_come_back_bit_by_bit(kind, direction, tmp_path):
    model = network(kind, direction=direction, dropout=0.5, seed=1)
    made = model.layers[0]
    if kind in LAYERS:  # what an update never moves, such as one of cuDNN's two biases, is no weight
        made.set_canonical({n: a.astype("float32") for n, a in cudnn_layer_cases.weights(made.spec).items()})
    else:
        randomize(model, seed=3)
    start, expected = values(model), model(X)
    model.save_weights(tmp_path / "model.weights.h5")
    model.save(tmp_path / "model.keras")
    for name in ("model.weights.h5", "model.keras"):
        randomize(model, seed=7)
        model.load_weights(tmp_path / name)
        assert_unchanged(model, start)
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert loaded.layers[0].get_config() == made.get_config()
    np.testing.assert_array_equal(loaded(X), expected)


@kinds
def test_a_file_holds_the_canonical_tensors(kind, tmp_path):
    model = network(kind, direction="bidirectional")
    model.save_weights(tmp_path / "model.weights.h5")
    made = model.layers[0]
    names = layouts.canonical_shapes(made.spec) if kind in LAYERS else parameters(made.spec, kind == NORMALIZED)
    with h5py.File(tmp_path / "model.weights.h5") as file:
        stored = stored_in(file, f"{made.mode}_0.forward.kernel")
        assert set(stored) == {name.replace("/", ".") for name in names}
        for name, array in made.get_canonical().items():
            np.testing.assert_array_equal(stored[name.replace("/", ".")][()], array)


@one_of_each
def test_a_float64_layer_reads_a_float32_file_and_the_other_way_round(kind, tmp_path):
    for dtypes in (("float32", "float64"), ("float64", "float32")):
        source, target = (network(kind, dtype=dtype) for dtype in dtypes)
        randomize(source, seed=1)
        source.save_weights(tmp_path / "model.weights.h5")
        target.load_weights(tmp_path / "model.weights.h5")
        for name, array in target.layers[0].get_canonical().items():
            assert array.dtype == dtypes[1], name
            np.testing.assert_array_equal(array, source.layers[0].get_canonical()[name].astype(array.dtype))


@one_of_each
def test_a_stateful_model_and_one_trained_on_are_saved_whole(kind, tmp_path):
    made = stack_layer(kind, 2, dtype="float32", stateful=True)
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
    "another mode": (dict(kind="gru"), "lstm_0/forward/kernel is missing, expected [3, 20]; given: gru_0/forward"),
    "fewer layers": (dict(num_layers=1), "lstm_1/forward/kernel is missing"),
    "more layers": (dict(num_layers=3), "lstm_2/forward/bias was given, expected only lstm_0"),
    "more directions": (dict(direction="bidirectional"), "lstm_0/backward/bias was given"),
    "layer normalisation": (dict(kind=NORMALIZED), "lstm_0/forward/cell_bias was given"),
    "more units": (dict(units=6), "lstm_0/forward/kernel is [3, 24], expected [3, 20]"),
    "more features": (dict(features=4), "lstm_0/forward/kernel is [4, 20], expected [3, 20]"),
    "keras.layers.LSTM": (dict(kind="keras"), "lstm_0/forward/kernel is missing"),
}


@pytest.mark.parametrize("other", OTHERS)
@one_of_each
def test_a_file_of_another_stack_is_refused_and_the_layer_keeps_its_weights(kind, other, tmp_path):
    arguments, message = OTHERS[other]
    network(**{"kind": kind, **arguments}).save_weights(tmp_path / "other.weights.h5")
    model = network(kind)
    start = values(model.layers[0])
    own = {"wavefront": "wavefront_lstm", "lstm": "cudnn_lstm_layer"}[kind]
    with h5py.File(tmp_path / "other.weights.h5", "a") as file:
        [name] = (name for name in file["layers"] if not name.startswith("dense"))
        if name != own:
            file["layers"].move(name, own)
    with pytest.raises(ValueError) as raised:
        model.load_weights(tmp_path / "other.weights.h5")
    [line] = [line for line in str(raised.value).splitlines() if "weights:" in line]
    assert message in line
    assert_unchanged(model.layers[0], start)


@pytest.mark.parametrize("name", ["model.weights.h5", "model.keras"])
@one_of_each
def test_a_file_cut_short_is_refused_and_the_layer_keeps_its_weights(kind, name, tmp_path):
    model = network(kind)
    (model.save if name.endswith("keras") else model.save_weights)(tmp_path / name)
    whole = (tmp_path / name).read_bytes()
    randomize(model, seed=3)
    start = values(model)
    for length in (0, 100, len(whole) // 2, len(whole) - 100):
        (tmp_path / name).write_bytes(whole[:length])
        with pytest.raises((OSError, zipfile.BadZipFile)):
            model.load_weights(tmp_path / name)
        assert_unchanged(model, start)


@pytest.mark.parametrize(
    ("kind", "tensor"), [("lstm", "lstm_0/forward/bias"), (NORMALIZED, "lstm_1/forward/cell_gain")]
)
def test_a_file_with_a_tensor_of_integers_is_refused(kind, tensor, tmp_path):
    model = network(kind)
    start, stored_name = values(model), tensor.replace("/", ".")
    model.save_weights(tmp_path / "model.weights.h5")
    with h5py.File(tmp_path / "model.weights.h5", "a") as file:
        stored = stored_in(file, stored_name)
        shape = stored.pop(stored_name).shape
        stored[stored_name] = np.zeros(shape, "int32")
    with pytest.raises(ValueError, match=rf"{tensor} is int32, expected float16, float32 or float64"):
        model.load_weights(tmp_path / "model.weights.h5")
    assert_unchanged(model, start)
