"""What a list of Keras layers amounts to as one recurrent stack, read from their configs. No TensorFlow needed."""

from collections.abc import Mapping, Sequence

KERAS_LAYERS = {"lstm": "LSTM", "gru": "GRU", "rnn_tanh": "SimpleRNN", "rnn_relu": "SimpleRNN"}

PENALTIES = tuple(
    f"{part}_{kind}" for part in ("kernel", "recurrent", "bias") for kind in ("regularizer", "constraint")
)  # settings of a layer

# What else than this a stack has no counterpart for, unless it takes the setting itself. Settings that neither a weight nor a
# result hangs on (unroll, initializers, dtype, …) may be any.
SETTINGS = {
    "recurrent_activation": "sigmoid",
    "reset_after": True,
    "use_bias": True,  # cuDNN's stack has biases, and training would move them
    "dropout": 0,  # Keras drops one mask in all steps of every layer's input; cuDNN draws anew, between layers
    "recurrent_dropout": 0,  # cuDNN's stack has none
    "activity_regularizer": None,
    **dict.fromkeys(PENALTIES),
}
INSTEAD = {  # what to do about a setting
    "dropout": "; make it anew with dropout=0 (from_config, build, set_weights), and give the stack dropout=, drawn anew in "
    "every step between its layers, or put keras.layers.Dropout before it",
}


def from_keras_config(configs: Sequence[Mapping], own: Sequence[str] = ()) -> dict[str, object]:
    """The size of the stack that is a list of Keras layers.

    Args:
        configs: of each layer, the lowest first, {"class_name": …, "config": layer.get_config()}: what
            keras.layers.serialize(layer) gives. LSTM, GRU, SimpleRNN, or Bidirectional of one of them.
        own: of SETTINGS, those that the stack has too: they may be any, but the same in all layers.

    Returns:
        {"mode", "num_layers", "units", "bidirectional"}; mode is one of KERAS_LAYERS.

    Raises:
        ValueError: no layers; layers of different kinds, units, directions or settings of `own`; a layer below another that
            returns its last step only; or a setting that has no counterpart in such a stack.
    """
    if not configs:
        raise ValueError("configs: no layers given, expected one at least")
    layers = [_read(f"layer {k}", config, own) for k, config in enumerate(configs)]
    for k, layer in enumerate(layers):
        _check_same(f"layer {k}", layer, layers[0], "layer 0")
        if k < len(layers) - 1 and not _innermost(configs[k]).get("return_sequences", False):
            raise ValueError(
                f"layer {k}: return_sequences=False given, expected True: the layer above reads every step"
            )
    return {"num_layers": len(layers), **{name: layers[0][name] for name in ("mode", "units", "bidirectional")}}


def _read(place: str, serialized: Mapping, own: Sequence[str], backward: bool = False) -> dict[str, object]:
    """mode, units, bidirectional and the settings `own` of one layer."""
    if "class_name" not in serialized or "config" not in serialized:
        given = ", ".join(serialized)
        raise ValueError(f"{place}: {given} given, expected class_name and config, as keras.layers.serialize gives")
    name, config = serialized["class_name"], serialized["config"]
    if name == "Bidirectional":
        for key, expected in (("merge_mode", "concat"), ("activity_regularizer", None)):
            if config.get(key) != expected:
                raise ValueError(f"{place}: {key}={config[key]!r} has no counterpart, expected {expected!r}")
        forward = _read(f"{place} forward", config["layer"], own)
        if "backward_layer" in config:
            other = _read(f"{place} backward", config["backward_layer"], own, backward=True)
            _check_same(f"{place} backward", other, forward, f"{place} forward")
        return {**forward, "bidirectional": True}
    if name not in KERAS_LAYERS.values():
        raise ValueError(f"{place}: {name} has no counterpart, expected LSTM, GRU, SimpleRNN or Bidirectional of one")
    activation = "relu" if name == "SimpleRNN" and config.get("activation") == "relu" else "tanh"
    for key, expected in {**SETTINGS, "activation": activation, "go_backwards": backward}.items():
        if key not in own and config.get(key, expected) != expected:
            instead = INSTEAD.get(key, "")
            raise ValueError(
                f"{place}: {name}'s {key}={config[key]!r} has no counterpart, expected {expected!r}{instead}"
            )
    mode = f"rnn_{activation}" if name == "SimpleRNN" else name.lower()
    settings = {name: config.get(name) for name in own}
    return {"mode": mode, "units": config["units"], "bidirectional": False, **settings}


def _check_same(place: str, given: Mapping, expected: Mapping, where: str) -> None:
    for field, value in expected.items():
        if given[field] != value:
            raise ValueError(f"{place}: {field}={given[field]!r} given, expected {value!r} as in {where}")


def _innermost(serialized: Mapping) -> Mapping:
    config = serialized["config"]
    return config["layer"]["config"] if serialized["class_name"] == "Bidirectional" else config
