"""Reading a stack from the configs of Keras layers."""

import pytest

from models.wavefront.keras_config import from_keras_config
from models.weights.layouts import StackSpec


def serialized(class_name="LSTM", **config):
    config = {"units": 4, "return_sequences": True, "activation": "tanh", **config}
    return {"class_name": class_name, "config": config}


def bidirectional(class_name="LSTM", merge_mode="concat", backward=None, wrapper=None, **config):
    layers = {
        "layer": serialized(class_name, **config),
        "backward_layer": serialized(class_name, **{"go_backwards": True, **config, **(backward or {})}),
    }
    return {"class_name": "Bidirectional", "config": {"merge_mode": merge_mode, **layers, **(wrapper or {})}}


@pytest.mark.parametrize(
    ("kind", "options", "mode"),
    [
        ("LSTM", {}, "lstm"),
        ("LSTM", {"unroll": True, "stateful": True, "unit_forget_bias": False, "return_state": True}, "lstm"),
        ("GRU", {}, "gru"),
        ("SimpleRNN", {}, "rnn_tanh"),
        ("SimpleRNN", {"activation": "relu"}, "rnn_relu"),
    ],
)
@pytest.mark.parametrize("both", [False, True])
def test_the_configs_of_keras_own_layers_are_read(kind, options, mode, both):
    keras = pytest.importorskip("keras")
    layers = [getattr(keras.layers, kind)(4, return_sequences=k < 2, **options) for k in range(3)]
    layers = [keras.layers.Bidirectional(layer) for layer in layers] if both else layers
    fields = from_keras_config([keras.layers.serialize(layer) for layer in layers])
    assert fields == {"mode": mode, "num_layers": 3, "units": 4, "bidirectional": both}
    assert StackSpec(input_size=7, **fields).num_pseudo_layers == (6 if both else 3)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (serialized("GRU", reset_after=False), "layer 1: GRU's reset_after=False has no counterpart, expected True"),
        (serialized(activation="relu"), "layer 1: LSTM's activation='relu' has no counterpart, expected 'tanh'"),
        (serialized("SimpleRNN", activation="elu"), "layer 1: SimpleRNN's activation='elu' has no counterpart, expected 'tanh'"),
        (serialized(recurrent_activation="hard_sigmoid"),
         "layer 1: LSTM's recurrent_activation='hard_sigmoid' has no counterpart, expected 'sigmoid'"),
        (serialized(use_bias=False), "layer 1: LSTM's use_bias=False has no counterpart, expected True"),
        (serialized(dropout=0.2), r"layer 1: LSTM's dropout=0\.2 has no counterpart, expected 0; .* give the stack dropout="),
        (serialized(recurrent_dropout=0.1), r"layer 1: LSTM's recurrent_dropout=0\.1 has no counterpart, expected 0"),
        (serialized(go_backwards=True), "layer 1: LSTM's go_backwards=True has no counterpart, expected False"),
        (serialized(kernel_regularizer={"class_name": "L2"}), "layer 1: LSTM's kernel_regularizer=.* expected None"),
        (serialized(bias_constraint={"class_name": "NonNeg"}), "layer 1: LSTM's bias_constraint=.* expected None"),
        (serialized("ConvLSTM2D"), "layer 1: ConvLSTM2D has no counterpart, expected LSTM, GRU, SimpleRNN or Bidirectional"),
        (bidirectional(merge_mode="sum"), "layer 1: merge_mode='sum' has no counterpart, expected 'concat'"),
        (bidirectional(wrapper={"activity_regularizer": "l2"}), "layer 1: activity_regularizer='l2' has no counterpart"),
        (bidirectional(go_backwards=True), "layer 1 forward: LSTM's go_backwards=True has no counterpart, expected False"),
        (bidirectional(backward={"go_backwards": False}),
         "layer 1 backward: LSTM's go_backwards=False has no counterpart, expected True"),
        (bidirectional(backward={"units": 5}), "layer 1 backward: units=5 given, expected 4 as in layer 1 forward"),
        (bidirectional(), "layer 1: bidirectional=True given, expected False as in layer 0"),
        (serialized(units=5), "layer 1: units=5 given, expected 4 as in layer 0"),
        (serialized("GRU"), "layer 1: mode='gru' given, expected 'lstm' as in layer 0"),
        (serialized(return_sequences=False), "layer 1: return_sequences=False given, expected True: the layer above"),
        ({"units": 4}, "layer 1: units given, expected class_name and config, as keras.layers.serialize gives"),
    ],
)  # fmt: skip
def test_what_has_no_counterpart_is_refused_by_layer_and_setting(config, message):
    with pytest.raises(ValueError, match=message):
        from_keras_config([serialized(), config, serialized()])


def test_no_layers_are_refused():
    with pytest.raises(ValueError, match="configs: no layers given, expected one at least"):
        from_keras_config([])
