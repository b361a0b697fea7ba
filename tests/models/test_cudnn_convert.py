"""Layers of models/cudnn/layers.py from and to keras.layers and torch.nn: the same weights, the same outputs."""

import keras
import numpy as np
import pytest

from models.cudnn.convert import LAYERS, from_keras_layers, from_torch, to_cells, to_keras_layers, to_torch
from models.cudnn.layers import CudnnLSTMLayer
from models.weights import layouts
from tests.comparing import error
from tests.cudnn_layer_cases import (
    BATCH,
    DIRECTIONS,
    FEATURES,
    INPUTS,
    MODES,
    UNITS,
    assert_same,
    keras_layers,
    layer,
    through,
    weights,
)

pytestmark = pytest.mark.usefixtures("on_the_cpu")

FLOAT64 = 1e-12


# --- Keras --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("return_sequences", [False, True])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("mode", MODES)
def test_keras_layers_become_one_layer_and_come_back(mode, direction, return_sequences):
    spec = layouts.StackSpec(mode, 3, UNITS, FEATURES, direction == "bidirectional")
    own = keras_layers(spec, return_sequences)
    made = from_keras_layers(own, use_cudnn=False)
    assert type(made) is LAYERS[mode] and made.spec == spec and made.compute_dtype == "float64"
    assert_same(made.get_canonical(), weights(spec))
    expected = through(own, INPUTS)
    assert error(made(INPUTS), expected) < FLOAT64
    back = to_keras_layers(made)
    assert error(through(back, INPUTS), expected) < FLOAT64
    assert [each.return_sequences for each in back] == [each.return_sequences for each in own]
    assert_same(from_keras_layers(back).get_canonical(), weights(spec))


def test_arguments_of_the_new_layer_can_be_given():
    spec = layouts.StackSpec("lstm", 2, UNITS, FEATURES)
    own = keras_layers(spec)
    made = from_keras_layers(own, dropout=0.5, return_sequences=True, return_state=True, name="stack", time_major=True)
    assert made.dropout == 0.5 and made.name == "stack"
    outputs, h, _ = made(np.swapaxes(INPUTS, 0, 1))
    assert outputs.shape == (INPUTS.shape[1], BATCH, UNITS) and error(h[1], through(own, INPUTS)) < FLOAT64


def test_mixed_precision_is_taken_over():
    spec = layouts.StackSpec("gru", 2, UNITS, FEATURES)
    made = from_keras_layers(keras_layers(spec, dtype="mixed_float16"))
    assert made.dtype_policy.name == "mixed_float16" and made.params.dtype == "float32"
    assert {each.dtype_policy.name for each in to_keras_layers(made)} == {"mixed_float16"}


def built(*layers, features=FEATURES):
    for each in layers:
        each.build((None, None, features))
        features = each.compute_output_shape((1, 1, features))[-1]
    return list(layers)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (lambda: [], "configs: no layers given"),
        (lambda: [keras.layers.LSTM(4)], r"layer 0: lstm\w* is not built"),
        (lambda: built(keras.layers.GRU(4, reset_after=False)), "layer 0: GRU's reset_after=False has no counterpart"),
        (lambda: built(keras.layers.LSTM(4, activation="relu")), "LSTM's activation='relu' has no counterpart"),
        (lambda: built(keras.layers.LSTM(4, use_bias=False)), "use_bias=False has no counterpart"),
        (lambda: built(keras.layers.LSTM(4, recurrent_dropout=0.1)), "recurrent_dropout=0.1 has no counterpart"),
        (lambda: built(keras.layers.LSTM(4, go_backwards=True)), "go_backwards=True has no counterpart"),
        (lambda: built(keras.layers.LSTM(4, return_sequences=True), keras.layers.LSTM(5)), "layer 1: units=5 given"),
        (lambda: built(keras.layers.LSTM(4, return_sequences=True), keras.layers.GRU(4)), "layer 1: mode='gru' given"),
        (lambda: built(keras.layers.Bidirectional(keras.layers.LSTM(4), "sum")), "merge_mode='sum' has no counterpart"),
        (lambda: built(keras.layers.Dense(4)), "Dense has no counterpart"),
        (
            lambda: built(keras.layers.LSTM(4, return_sequences=True), keras.layers.LSTM(4, dtype="float64")),
            "layer 1: dtype='float64' given, expected 'float32' as in layer 0",
        ),
    ],
)
def test_keras_layers_without_a_counterpart_are_refused(layers, message):
    with pytest.raises(ValueError, match=message):
        from_keras_layers(layers())


def test_a_layer_that_is_not_built_cannot_be_converted():
    for convert in (to_keras_layers, to_torch, to_cells):
        with pytest.raises(ValueError, match="stack: not built yet"):
            convert(CudnnLSTMLayer(3, name="stack"))


# --- PyTorch ------------------------------------------------------------------------------------------------------------


def torch_module(torch, mode, **kwargs):
    kinds = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU}
    options = {"nonlinearity": mode[4:]} if mode.startswith("rnn") else {}
    torch.manual_seed(0)
    kwargs = {"num_layers": 2, "dtype": torch.float64, **options, **kwargs}
    return kinds.get(mode, torch.nn.RNN)(FEATURES, UNITS, **kwargs)


def run_torch(torch, module, x):
    with torch.no_grad():
        outputs, states = module(torch.tensor(x))
    states = states if isinstance(states, tuple) else (states,)
    return [tensor.numpy() for tensor in (outputs, *states)]


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_a_torch_module_becomes_a_layer_that_computes_the_same_and_comes_back(mode, bidirectional, batch_first):
    torch = pytest.importorskip("torch")
    module = torch_module(torch, mode, bidirectional=bidirectional, batch_first=batch_first, dropout=0.25).eval()
    made = from_torch(module, use_cudnn=False)
    assert type(made) is LAYERS[mode] and made.time_major != batch_first and made.dropout == 0.25
    x = INPUTS if batch_first else np.swapaxes(INPUTS, 0, 1)
    expected = run_torch(torch, module, x)
    for given, wanted in zip(made(x), expected, strict=True):
        assert given.shape == wanted.shape and error(given, wanted) < FLOAT64
    back = to_torch(made)
    assert type(back) is type(module) and (back.batch_first, back.dropout) == (batch_first, 0.25)
    for given, wanted in zip(run_torch(torch, back.eval(), x), expected, strict=True):
        assert error(given, wanted) < FLOAT64
    own, returned = module.state_dict(), back.state_dict()
    assert list(returned) == list(own)
    for name, tensor in own.items():
        if mode == "gru" or not name.startswith("bias"):
            np.testing.assert_array_equal(returned[name].numpy(), tensor.numpy(), err_msg=name)
        elif name.startswith("bias_ih"):  # the two biases are one here
            both = tensor.numpy() + own[name.replace("_ih", "_hh")].numpy()
            np.testing.assert_array_equal(returned[name].numpy(), both, err_msg=name)
            assert not returned[name.replace("_ih", "_hh")].numpy().any()
    assert_same(from_torch(back).get_canonical(), made.get_canonical())


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_torch_types_are_taken_over(dtype):
    torch = pytest.importorskip("torch")
    made = from_torch(torch_module(torch, "gru", dtype=getattr(torch, dtype)), return_sequences=False, name="stack")
    assert made.params.dtype == dtype and made.name == "stack" and not made.return_sequences
    assert to_torch(made).weight_ih_l0.dtype == getattr(torch, dtype)
    mixed = to_torch(from_keras_layers(keras_layers(made.spec, dtype="mixed_float16")))
    assert mixed.weight_ih_l0.dtype == torch.float32  # the type of the weights


def test_torch_modules_without_a_counterpart_are_refused():
    torch = pytest.importorskip("torch")
    for module, message in (
        (torch.nn.Linear(2, 2), "module: a Linear given, expected torch.nn.LSTM, GRU or RNN"),
        (torch.nn.LSTM(2, 3, bias=False), "module: bias=False has no counterpart, expected True"),
        (torch.nn.LSTM(2, 3, proj_size=2), "module: proj_size=2 has no counterpart, expected 0"),
        (torch.nn.GRU(2, 3, dtype=torch.bfloat16), "module: bfloat16 given, expected float16 or float32 or float64"),
    ):
        with pytest.raises(ValueError, match=message):
            from_torch(module)


# --- cells --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_cells_run_a_stack_step_by_step(mode):
    made = layer(mode, 3, return_sequences=True, return_state=True)
    outputs, *finals = made(INPUTS)
    cells = to_cells(made)
    rnn = keras.layers.RNN(keras.layers.StackedRNNCells(cells, dtype="float64"), return_sequences=True, dtype="float64")
    assert error(rnn(INPUTS), outputs) < FLOAT64

    states = [[np.zeros((BATCH, UNITS)) for _ in finals] for _ in cells]
    for t in range(INPUTS.shape[1]):  # as a decoder does
        x = INPUTS[:, t]
        for k, cell in enumerate(cells):
            x, states[k] = cell(x, states[k])
        assert error(x, outputs[:, t]) < FLOAT64
    for final, of_cells in zip(finals, zip(*states, strict=True), strict=True):
        assert error(np.stack(of_cells), final) < FLOAT64


def test_a_bidirectional_stack_has_no_cells():
    with pytest.raises(ValueError, match="bidirectional, expected one direction"):
        to_cells(layer("lstm", direction="bidirectional"))
