"""WavefrontLSTM from and to keras.layers.LSTM, CudnnLSTMLayer and torch.nn.LSTM: the same weights, the same outputs."""

import keras
import numpy as np
import pytest

from models.cudnn.convert import from_keras_layers as cudnn_from_keras_layers
from models.cudnn.convert import from_wavefront, to_wavefront
from models.cudnn.layers import CudnnLSTMLayer
from models.wavefront.convert import from_keras_layers, from_torch, to_keras_layers, to_torch
from models.wavefront.keras_config import PENALTIES
from models.wavefront.layer import WavefrontLSTM
from models.wavefront.spec import StackSpec
from models.weights import layouts
from tests import cudnn_layer_cases
from tests.comparing import error
from tests.cudnn_layer_cases import BATCH, DIRECTIONS, FEATURES, INPUTS, MASK, UNITS, assert_same, keras_layers, through
from tests.wavefront_cases import layer, parameters

pytestmark = pytest.mark.usefixtures("on_the_cpu")

FLOAT64 = 1e-12


@pytest.mark.parametrize("return_sequences", [False, True])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_keras_layers_become_one_layer_and_come_back(direction, return_sequences):
    spec = layouts.StackSpec("lstm", 3, UNITS, FEATURES, direction == "bidirectional")
    own = keras_layers(spec, return_sequences)
    made = from_keras_layers(own, dropout=0.5, name="stack")
    assert (
        type(made) is WavefrontLSTM
        and made.spec == StackSpec(3, UNITS, FEATURES, spec.bidirectional)
        and made.compute_dtype == "float64"
    )
    assert made.dropout == 0.5 and made.name == "stack" and made.return_sequences == return_sequences
    assert_same(made.get_canonical(), parameters(spec))
    expected = through(own, INPUTS)
    assert error(made(INPUTS), expected) < FLOAT64
    back = to_keras_layers(made)
    assert error(through(back, INPUTS), expected) < FLOAT64
    assert [each.return_sequences for each in back] == [each.return_sequences for each in own]
    assert_same(from_keras_layers(back).get_canonical(), parameters(spec))


@pytest.mark.parametrize("convert", [from_keras_layers, cudnn_from_keras_layers])
def test_one_layer_needs_no_list(convert):
    [own] = keras_layers(layouts.StackSpec("lstm", 1, UNITS, FEATURES, False), True)
    assert_same(convert(own).get_canonical(), convert([own]).get_canonical())


@pytest.mark.parametrize("dtype", ["float64", "mixed_float16"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_cudnn_layer_becomes_a_wavefront_and_comes_back(direction, dtype):
    kwargs = dict(return_sequences=True, return_state=True, dropout=0.25)
    cudnn = cudnn_layer_cases.layer("lstm", 2, direction, dtype, **kwargs)
    made = to_wavefront(cudnn)
    assert {name: getattr(made, name) for name in kwargs} == kwargs and made.dtype_policy.name == dtype
    assert made.spec == StackSpec(2, UNITS, FEATURES, direction == "bidirectional")
    for given, expected in zip(made(INPUTS, mask=MASK), cudnn(INPUTS, mask=MASK), strict=True):
        assert error(given, expected) < (FLOAT64 if dtype == "float64" else 4e-3)
    back = from_wavefront(made, use_cudnn=False)
    assert type(back) is CudnnLSTMLayer and not back.uses_cudnn and back.spec == cudnn.spec
    assert {name: getattr(back, name) for name in kwargs} == kwargs and back.dtype_policy.name == dtype
    np.testing.assert_array_equal(back.params, cudnn.params)


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_a_torch_module_becomes_a_layer_that_computes_the_same_and_comes_back(bidirectional, batch_first):
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    module = torch.nn.LSTM(
        FEATURES, UNITS, 2, bidirectional=bidirectional, batch_first=batch_first, dropout=0.25, dtype=torch.float64
    ).eval()

    def run(module):
        x = torch.tensor(INPUTS if module.batch_first else np.swapaxes(INPUTS, 0, 1))
        with torch.no_grad():
            outputs, states = module.eval()(x)
        return outputs.numpy() if module.batch_first else np.swapaxes(outputs, 0, 1), *(s.numpy() for s in states)

    made = from_torch(module)
    assert type(made) is WavefrontLSTM and made.dropout == 0.25
    for given, wanted in zip(made(INPUTS), run(module), strict=True):
        assert given.shape == wanted.shape and error(given, wanted) < FLOAT64
    back = to_torch(made)
    assert (back.batch_first, back.dropout, back.bidirectional) == (True, 0.25, bidirectional)
    for given, wanted in zip(run(back), run(module), strict=True):
        assert error(given, wanted) < FLOAT64
    assert_same(from_torch(back).get_canonical(), made.get_canonical())


def test_what_has_no_counterpart_is_refused():
    torch = pytest.importorskip("torch")
    gru = keras_layers(layouts.StackSpec("gru", 2, UNITS, FEATURES))
    normalized = layer(2, layer_normalization=True, name="stack")
    for convert, given, message in (
        (from_keras_layers, gru, "a GRU, given, expected keras.layers.LSTM or Bidirectional of it"),
        (
            from_keras_layers,
            keras.layers.Dense(4, name="top"),
            "layer 0: top, a Dense, given, expected keras.layers.LSTM or Bidirectional of it$",
        ),
        (
            from_keras_layers,
            [keras.layers.LSTM(4), keras.layers.Dropout(0.2), keras.layers.LSTM(4)],
            "a Dropout, given, expected .*; leave it out and add dropout=0.2 as an argument, one rate between all layers$",
        ),
        (
            from_keras_layers,
            [keras.layers.LSTM(4), keras.layers.Dropout(0.2)],
            "a Dropout, given, expected .*; leave it out and keep it before or after the new layer$",
        ),
        (to_keras_layers, keras.layers.Dense(4), "layer: a Dense given, expected a WavefrontLSTM"),
        (to_torch, [layer(2)], "layer: a list given, expected a WavefrontLSTM"),
        (from_keras_layers, [], "configs: no layers given"),
        (from_keras_layers, [keras.layers.LSTM(4)], "is not built"),
        (to_wavefront, cudnn_layer_cases.layer("gru"), "layer: a CudnnGRULayer given, expected CudnnLSTMLayer"),
        (to_wavefront, CudnnLSTMLayer(3), "not built yet"),
        (from_torch, torch.nn.GRU(2, 3), "a stack of mode gru given"),
        (from_torch, torch.nn.LSTM(2, 3, proj_size=2), "module: proj_size=2 has no counterpart"),
        (to_keras_layers, normalized, "stack: layer_normalization=True given, keras.layers.LSTM has no counterpart"),
        (from_wavefront, normalized, "cuDNN has no counterpart"),
        (to_torch, normalized, "torch.nn.LSTM has no counterpart"),
        (
            from_wavefront,
            layer(2, name="stack", recurrent_dropout=0.25),
            "stack: recurrent_dropout=0.25 given, cuDNN has no counterpart",
        ),
        (
            from_wavefront,
            layer(2, dtype="mixed_bfloat16"),
            "dtype: bfloat16 given, expected float16 or float32 or float64",
        ),
        (to_keras_layers, WavefrontLSTM(3), "not built yet"),
        (from_wavefront, WavefrontLSTM(3), "not built yet"),
        (to_torch, WavefrontLSTM(3), "not built yet"),
    ):
        with pytest.raises(ValueError, match=message):
            convert(given)


def test_a_stateful_layer_is_refused_with_the_way_to_one():
    with pytest.raises(ValueError, match=r"stateful: True given, .*layer.set_canonical\(converted.get_canonical\(\)\)"):
        from_keras_layers(keras_layers(layer().spec), stateful=True)


SETTINGS = dict(kernel_regularizer=keras.regularizers.L2(0.1), bias_regularizer="l1", recurrent_constraint="non_neg")


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_regularizers_constraints_trainable_and_the_inner_policy_are_taken_over_both_ways(direction):
    options = dict(trainable=False, activity_regularizer="l2", recurrent_dropout=0.25, **SETTINGS)
    made = layer(2, direction, dtype="mixed_float16", **options)
    back = to_keras_layers(made)
    inner = [
        getattr(each, name) for each in back for name in ("forward_layer", "backward_layer") if hasattr(each, name)
    ]
    for each in inner or back:
        assert isinstance(each.kernel_regularizer, keras.regularizers.L2) and each.kernel_regularizer.l2 == 0.1
        assert type(each.recurrent_constraint) is keras.constraints.NonNeg and each.kernel_constraint is None
        assert not each.trainable_weights and each.recurrent_dropout == 0.25
    assert [each.activity_regularizer for each in back] == [None, made.activity_regularizer]
    back[1].activity_regularizer = None
    again = from_keras_layers(back)
    assert again.dtype_policy.name == "mixed_float16" and not again.trainable and again.recurrent_dropout == 0.25
    for name in SETTINGS:
        config = getattr(made, name).get_config()
        assert type(getattr(again, name)) is type(getattr(made, name)) and getattr(again, name).get_config() == config
    for each in back:
        each.dtype_policy = "float32"  # of the wrapper alone, where there is one
    assert from_keras_layers(back).dtype_policy.name == ("mixed_float16" if inner else "float32")


@pytest.mark.parametrize("name", PENALTIES)
def test_a_penalty_that_cudnn_has_no_counterpart_of_is_named(name):
    given = layer(2, name="stack", **{name: "l2" if name.endswith("regularizer") else "non_neg"})
    with pytest.raises(ValueError, match=f"stack: {name}=.* given, CudnnLSTMLayer has no counterpart, expected None"):
        from_wavefront(given)


def test_trainable_and_activity_regularizer_are_taken_over_between_wavefront_and_cudnn():
    made = from_wavefront(layer(2, trainable=False, activity_regularizer=keras.regularizers.L2(0.1)))
    for each in (made, to_wavefront(made)):
        assert not each.trainable and each.activity_regularizer.get_config() == {"l2": pytest.approx(0.1)}


def test_states_that_are_kept_between_batches_are_not_dropped_between_wavefront_and_cudnn():
    for kind, convert in ((WavefrontLSTM, from_wavefront), (CudnnLSTMLayer, to_wavefront)):
        given = kind(UNITS, stateful=True)
        given.build((BATCH, None, FEATURES))
        with pytest.raises(ValueError, match="stateful: True given, expected False"):
            convert(given)
        assert_same(convert(given, stateful=False).get_canonical(), given.get_canonical())


def test_what_keras_layers_do_not_share_or_a_stack_does_otherwise_is_named():
    def built(*options):
        layers = [keras.layers.LSTM(UNITS, return_sequences=True, **each) for each in options]
        for each in layers:
            each.build((BATCH, None, UNITS))
        return layers

    for options, message in (
        (({}, {"kernel_regularizer": "l2"}), "layer 1: kernel_regularizer=.* given, expected None as in layer 0"),
        (
            ({"bias_constraint": "non_neg"}, {}),
            "layer 1: bias_constraint=None given, expected .*NonNeg.* as in layer 0",
        ),
        (({}, {"recurrent_dropout": 0.5}), r"layer 1: recurrent_dropout=0\.5 given, expected 0\.0 as in layer 0"),
        (({}, {"trainable": False}), "layer 1: trainable=False given, expected True as in layer 0"),
        (({}, {"dtype": "float64"}), "layer 1: dtype='float64' given, expected 'float32' as in layer 0"),
        (({}, {"return_state": True}), "layer 1: return_state=True given, .* add return_state=True or False"),
        (({"stateful": True}, {}), "layer 0: stateful=True given, .* add stateful=True or False"),
        (({}, {"activity_regularizer": "l2"}), "activity_regularizer=.* has no counterpart"),
    ):
        with pytest.raises(ValueError, match=message):
            from_keras_layers(built(*options))
    made = from_keras_layers(built({"stateful": True}, {"return_state": True}), stateful=False, return_state=True)
    assert made.return_state and not made.stateful
    with pytest.raises(ValueError, match=r"kernel_regularizer=.* has no counterpart"):
        cudnn_from_keras_layers(built({"kernel_regularizer": "l2"}))
