"""What a list of Keras layers amounts to as one recurrent stack, read from their configs. No TensorFlow needed."""

from collections.abc import Mapping, Sequence

KERAS_LAYERS = {"lstm": "LSTM", "gru": "GRU", "rnn_tanh": "SimpleRNN", "rnn_relu": "SimpleRNN"}

# What else than this a stack has no counterpart for. Settings that neither a weight nor a result hangs on (unroll, stateful,
# initializers, dtype, …) may be any.
SETTINGS = {
    "recurrent_activation": "sigmoid",
    "reset_after": True,
    "use_bias": True,  # cuDNN's stack has biases, and training would move them
    "dropout": 0,  # Keras drops one mask in all steps of every layer's input; cuDNN draws anew, between layers
    "recurrent_dropout": 0,
    **{
        f"{part}_{kind}": None
        for part in ("kernel", "recurrent", "bias", "activity")
        for kind in ("regularizer", "constraint")
    },
}


def from_keras_config(configs: Sequence[Mapping]) -> dict[str, object]:
    """The size of the stack that is a list of Keras layers.

    Args:
        configs: of each layer, the lowest first, {"class_name": …, "config": layer.get_config()}: what
            keras.layers.serialize(layer) gives. LSTM, GRU, SimpleRNN, or Bidirectional of one of them.

    Returns:
        {"mode", "num_layers", "units", "bidirectional"}; mode is one of KERAS_LAYERS.

    Raises:
        ValueError: no layers; layers of different kinds, units or directions; a layer below another that returns its last
            step only; or a setting that has no counterpart in such a stack.
    """
    if not configs:
        raise ValueError("configs: no layers given, expected one at least")
    layers = [_read(f"layer {k}", config) for k, config in enumerate(configs)]
    for k, layer in enumerate(layers):
        _check_same(f"layer {k}", layer, layers[0], "layer 0")
        if k < len(layers) - 1 and not _innermost(configs[k]).get("return_sequences", False):
            raise ValueError(
                f"layer {k}: return_sequences=False given, expected True: the layer above reads every step"
            )
    return {"num_layers": len(layers), **layers[0]}


def _read(place: str, serialized: Mapping, backward: bool = False) -> dict[str, object]:
    """mode, units and bidirectional of one layer."""
    if "class_name" not in serialized or "config" not in serialized:
        given = ", ".join(serialized)
        raise ValueError(f"{place}: {given} given, expected class_name and config, as keras.layers.serialize gives")
    name, config = serialized["class_name"], serialized["config"]
    if name == "Bidirectional":
        if config["merge_mode"] != "concat":
            raise ValueError(f"{place}: merge_mode={config['merge_mode']!r} has no counterpart, expected 'concat'")
        forward = _read(f"{place} forward", config["layer"])
        if "backward_layer" in config:
            own = _read(f"{place} backward", config["backward_layer"], backward=True)
            _check_same(f"{place} backward", own, forward, f"{place} forward")
        return {**forward, "bidirectional": True}
    if name not in KERAS_LAYERS.values():
        raise ValueError(f"{place}: {name} has no counterpart, expected LSTM, GRU, SimpleRNN or Bidirectional of one")
    activation = "relu" if name == "SimpleRNN" and config.get("activation") == "relu" else "tanh"
    for key, expected in {**SETTINGS, "activation": activation, "go_backwards": backward}.items():
        if config.get(key, expected) != expected:
            raise ValueError(f"{place}: {name}'s {key}={config[key]!r} has no counterpart, expected {expected!r}")
    mode = f"rnn_{activation}" if name == "SimpleRNN" else name.lower()
    return {"mode": mode, "units": config["units"], "bidirectional": False}


def _check_same(place: str, given: Mapping, expected: Mapping, where: str) -> None:
    for field, value in expected.items():
        if given[field] != value:
            raise ValueError(f"{place}: {field}={given[field]!r} given, expected {value!r} as in {where}")


def _innermost(serialized: Mapping) -> Mapping:
    config = serialized["config"]
    return config["layer"]["config"] if serialized["class_name"] == "Bidirectional" else config
