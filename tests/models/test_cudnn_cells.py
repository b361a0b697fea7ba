"""The cells of models/cudnn/cells.py: cuDNN's, and no others."""

import keras
import numpy as np
import pytest

from models.cudnn.cells import CudnnCompatibleGRUCell, CudnnCompatibleLSTMCell
from models.weights import layouts
from tests.comparing import error
from tests.cudnn_layer_cases import BATCH, FEATURES, INPUTS, TIME, UNITS, layer, random

pytestmark = pytest.mark.usefixtures("on_the_cpu")

CELLS = {"lstm": CudnnCompatibleLSTMCell, "gru": CudnnCompatibleGRUCell}


@pytest.mark.parametrize("mode", CELLS)
def test_a_cell_has_the_canonical_tensors_and_computes_what_the_layer_does(mode):
    made = layer(mode, 1, return_sequences=True)
    cell = CELLS[mode](UNITS, dtype="float64")
    cell.build((None, FEATURES))
    assert [weight.name for weight in cell.weights] == ["kernel", "recurrent_kernel", "bias"]
    shapes = layouts.canonical_shapes(made.spec)
    assert [weight.shape for weight in cell.weights] == list(shapes.values())
    cell.set_weights(list(made.get_canonical().values()))
    rnn = keras.layers.RNN(cell, return_sequences=True, dtype="float64")
    assert error(rnn(INPUTS), made(INPUTS)) < 1e-12


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"activation": "relu"}, "activation: 'relu' given, expected 'tanh'"),
        ({"activation": None}, "activation: None given, expected 'tanh'"),
        ({"recurrent_activation": "hard_sigmoid"}, "recurrent_activation: 'hard_sigmoid' given, expected 'sigmoid'"),
        ({"use_bias": False}, "use_bias: False given, expected True"),
        ({"dropout": 0.1}, "dropout: 0.1 given, expected 0"),
        ({"recurrent_dropout": 0.1}, "recurrent_dropout: 0.1 given, expected 0"),
    ],
)
@pytest.mark.parametrize("mode", CELLS)
def test_what_cudnn_has_not_is_refused(mode, arguments, message):
    with pytest.raises(ValueError, match=message):
        CELLS[mode](UNITS, **arguments)


def test_a_gru_that_resets_before_its_product_is_refused():
    with pytest.raises(ValueError, match="reset_after: False given, expected True"):
        CudnnCompatibleGRUCell(UNITS, reset_after=False)


@pytest.mark.parametrize("mode", CELLS)
def test_what_cudnn_has_may_be_written_out(mode):
    activation = keras.activations.tanh
    CELLS[mode](UNITS, activation=activation, recurrent_activation="sigmoid", use_bias=True, dropout=0.0)


@pytest.mark.parametrize("mode", CELLS)
def test_a_config_and_a_file_make_the_same_cell_again(mode, tmp_path):
    cells = [CELLS[mode](UNITS, bias_initializer="ones", seed=k) for k in range(2)]
    again = CELLS[mode].from_config(cells[0].get_config())
    assert type(again) is CELLS[mode] and again.get_config() == cells[0].get_config()
    model = keras.Sequential([keras.Input((TIME, FEATURES)), keras.layers.RNN(cells)])
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert [type(cell) for cell in loaded.layers[0].cell.cells] == [CELLS[mode]] * 2
    x = random(BATCH, TIME, FEATURES).astype("float32")
    np.testing.assert_array_equal(loaded(x), model(x))
