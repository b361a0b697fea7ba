"""WavefrontLSTM from and to keras.layers.LSTM and torch.nn.LSTM, with the same weights.

    layer = from_keras_layers(model.layers[1:4])     # a list of keras.layers.LSTM becomes one WavefrontLSTM
    keras_layers = to_keras_layers(layer)            # and back
    module = to_torch(layer)                         # torch.nn.LSTM

Each function makes new objects. What has no counterpart is a ValueError that says so. torch is imported only where it is used.
"""

from collections.abc import Mapping, Sequence

import keras
import numpy as np

from .keras_config import KERAS_LAYERS, PENALTIES, from_keras_config
from .layer import WavefrontLSTM
from .spec import StackSpec, Weights
from .stack_layer import StackLayer

OWN = ("recurrent_dropout", *PENALTIES)  # settings of keras.layers.LSTM that WavefrontLSTM has too
TORCH_DTYPES = ("float16", "float32", "float64")


def from_keras_layers(layers: keras.layers.Layer | Sequence[keras.layers.Layer], **kwargs) -> WavefrontLSTM:
    """One layer in place of a list of Keras' layers, the lowest first.

    Args:
        layers: built keras.layers.LSTM, or Bidirectional of it, all with the same units; or one of them.
        kwargs: arguments of the new layer, before those that it takes from `layers`: return_sequences of the last one, and the
            dtype policy, trainable, recurrent_dropout, regularizers and constraints of all. Layers with return_state=True or
            stateful=True ask for that argument here, since states of a stack have another form and a stateful one a batch size.

    Returns:
        A built WavefrontLSTM.

    Raises:
        ValueError: layers that are not built, have different dtype policies or other settings, or are no such stack
            (keras_config.py); or return_state or stateful as above.
    """
    layers = [layers] if isinstance(layers, keras.layers.Layer) else layers
    for k, layer in enumerate(layers):
        inner = layer.forward_layer if isinstance(layer, keras.layers.Bidirectional) else layer
        if not isinstance(inner, keras.layers.LSTM):
            given = f"{getattr(layer, 'name', repr(layer))}, a {type(inner).__name__}, given"
            expected = "expected keras.layers.LSTM or Bidirectional of it"
            if type(inner) is keras.layers.Dropout and inner.noise_shape is None:
                between = f"add dropout={inner.rate:g} as an argument, one rate between all layers"
                instead = between if 0 < k < len(layers) - 1 else "keep it before or after the new layer"
                expected += f"; leave it out and {instead}"
            if isinstance(inner, keras.Model):
                expected += "; give a list of the model's own"
            raise ValueError(f"layer {k}: {given}, {expected}")
    fields, arrays, own = read_keras_layers(layers, OWN)
    del fields["mode"]
    for k, layer in enumerate(layers):
        for name in ("return_state", "stateful"):
            if getattr(layer, name) and name not in kwargs:
                raise ValueError(
                    f"layer {k}: {name}=True given, which is not taken over; add {name}=True or False as an argument"
                )
    spec = StackSpec(input_size=arrays[0][0].shape[0], **fields)
    flat = [array for of_layer in arrays for array in of_layer]
    return with_weights(WavefrontLSTM, spec, dict(zip(spec.shapes(), flat, strict=True)), {**own, **kwargs})


def to_keras_layers(layer: StackLayer) -> list[keras.layers.Layer]:
    """A built keras.layers.LSTM (or Bidirectional of it) for each layer of the stack, the lowest first.

    The last one has the stack's return_sequences and activity_regularizer, and all have its recurrent_dropout, regularizers,
    constraints and trainable. They are batch-major and stateless, return no states, and there is no dropout between them: to
    train on with the stack's, put keras.layers.Dropout there.

    Args:
        layer: a WavefrontLSTM, or another StackLayer: then they are of its kind.

    Raises:
        ValueError: the layer is not built, or layer-normalised.
    """
    _check_plain(layer, "keras.layers.LSTM")
    arrays, spec = list(layer.get_canonical().values()), layer.spec
    per_layer = len(arrays) // spec.num_layers
    policy = layer.dtype_policy
    options = {name: getattr(layer, name) for name in OWN if hasattr(layer, name)}
    if spec.mode.startswith("rnn"):
        options["activation"] = spec.mode.removeprefix("rnn_")
    keras_layers = []
    for k in range(spec.num_layers):
        return_sequences = layer.return_sequences or k < spec.num_layers - 1
        new = getattr(keras.layers, KERAS_LAYERS[spec.mode])(
            spec.units, return_sequences=return_sequences, dtype=policy, **options
        )
        new = keras.layers.Bidirectional(new, dtype=policy) if spec.bidirectional else new
        new.build((None, None, spec.layer_input_size(k)))
        new.set_weights(arrays[k * per_layer : (k + 1) * per_layer])
        new.trainable = layer.trainable
        keras_layers.append(new)
    keras_layers[-1].activity_regularizer = layer.activity_regularizer
    return keras_layers


def from_torch(module, **kwargs) -> WavefrontLSTM:
    """The layer with the weights of a torch.nn.LSTM.

    Args:
        module: its double bias is summed. dropout is taken over, and it returns all steps and the final states as the module
            does: (outputs, h, c) for torch's (outputs, (h, c)). The new layer is batch-major whatever batch_first says.
        kwargs: arguments of the new layer, before those.

    Returns:
        A built WavefrontLSTM.

    Raises:
        ValueError: another module, one without biases or with a projection, or of another type than float16, float32, float64.
        ImportError: PyTorch is not installed.
    """
    fields, arrays, own = read_torch(module)
    if (mode := fields.pop("mode")) != "lstm":
        raise ValueError(f"module: a stack of mode {mode} given, expected lstm: WavefrontLSTM has no GRU or RNN")
    spec, weights = StackSpec(**fields), {}
    shapes = list(spec.shapes())
    for name, suffix in zip(shapes[::3], _torch_suffixes(spec), strict=True):
        place = name.removesuffix("kernel")
        weights[f"{place}kernel"] = arrays[f"weight_ih_{suffix}"].T
        weights[f"{place}recurrent_kernel"] = arrays[f"weight_hh_{suffix}"].T
        weights[f"{place}bias"] = arrays[f"bias_ih_{suffix}"] + arrays[f"bias_hh_{suffix}"]
    del own["time_major"]
    return with_weights(WavefrontLSTM, spec, weights, {**own, **kwargs})


def to_torch(layer: WavefrontLSTM):
    """A torch.nn.LSTM with the layer's weights, on the CPU. It returns all steps and the final states, as torch does.

    torch.nn.LSTM has no recurrent_dropout, regularizers, constraints or trainable: the module has none of the layer's.

    Raises:
        ValueError: the layer is not built, or layer-normalised.
        ImportError: PyTorch is not installed.
    """
    _check_plain(layer, "torch.nn.LSTM")
    weights, spec = layer.get_canonical(), layer.spec
    state = {}
    for name, suffix in zip(list(weights)[::3], _torch_suffixes(spec), strict=True):
        place = name.removesuffix("kernel")
        bias = weights[f"{place}bias"]
        state[f"weight_ih_{suffix}"] = weights[f"{place}kernel"].T
        state[f"weight_hh_{suffix}"] = weights[f"{place}recurrent_kernel"].T
        state[f"bias_ih_{suffix}"], state[f"bias_hh_{suffix}"] = bias, np.zeros_like(bias)
    return torch_module("LSTM", layer, state)


# --- for other layers of this kind ------------------------------------------------------------------------------------------


def torch_module(kind: str, layer: StackLayer, arrays: Mapping[str, np.ndarray], **options):
    """The torch.nn module of the class `kind` and the size of `layer`, with these arrays as its state_dict.

    Args:
        options: further arguments of the module.
    """
    import torch

    spec = layer.spec
    module = getattr(torch.nn, kind)(
        spec.input_size,
        spec.units,
        spec.num_layers,
        batch_first=not layer.time_major,
        dropout=layer.dropout,
        bidirectional=spec.bidirectional,
        dtype=getattr(torch, layer.variable_dtype),
        **options,
    )
    module.load_state_dict({name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()})
    return module


def read_keras_layers(
    layers: Sequence[keras.layers.Layer], settings: Sequence[str] = ()
) -> tuple[dict, list[list[np.ndarray]], dict]:
    """What a list of Keras' layers amounts to; raises as from_keras_layers.

    Args:
        settings: of keras_config.SETTINGS, which the new layer has too.

    Returns:
        (the stack's fields of keras_config.from_keras_config, `get_weights()` of each layer, arguments of a layer that go with
        them).
    """
    fields = from_keras_config([keras.layers.serialize(layer) for layer in layers], settings)
    first = getattr(layers[0], "forward_layer", layers[0])
    own = {"dtype": first.dtype_policy.name, "trainable": layers[0].trainable and first.trainable}
    for k, layer in enumerate(layers):
        if not layer.built:
            raise ValueError(f"layer {k}: {layer.name} is not built, expected layers that have weights")
        for half in (layer.forward_layer, layer.backward_layer) if hasattr(layer, "forward_layer") else (layer,):
            given = {"dtype": half.dtype_policy.name, "trainable": layer.trainable and half.trainable}
            for name, value in given.items():
                if value != own[name]:
                    raise ValueError(f"layer {k}: {name}={value!r} given, expected {own[name]!r} as in layer 0")
    own |= {name: getattr(first, name) for name in settings}
    return fields, [layer.get_weights() for layer in layers], {**own, "return_sequences": layers[-1].return_sequences}


def read_torch(module) -> tuple[dict, Weights, dict]:
    """What a torch.nn.LSTM, GRU or RNN amounts to; raises as from_torch.

    Returns:
        (mode, num_layers, units, input_size and bidirectional by name, the arrays of its state_dict, arguments of a layer that go
        with them).
    """
    import torch

    modes = {torch.nn.LSTM: "lstm", torch.nn.GRU: "gru", torch.nn.RNN: f"rnn_{getattr(module, 'nonlinearity', '')}"}
    mode = next((mode for kind, mode in modes.items() if isinstance(module, kind)), None)
    if mode is None:
        raise ValueError(f"module: a {type(module).__name__} given, expected torch.nn.LSTM, GRU or RNN")
    for name, allowed in (("bias", True), ("proj_size", 0)):
        if getattr(module, name) != allowed:
            raise ValueError(f"module: {name}={getattr(module, name)} has no counterpart, expected {allowed}")
    dtype = str(module.weight_hh_l0.dtype).removeprefix("torch.")
    if dtype not in TORCH_DTYPES:
        raise ValueError(f"module: {dtype} given, expected {' or '.join(TORCH_DTYPES)}")
    fields = {
        "mode": mode,
        "num_layers": module.num_layers,
        "units": module.hidden_size,
        "input_size": module.input_size,
        "bidirectional": module.bidirectional,
    }
    arrays = {name: tensor.detach().cpu().numpy() for name, tensor in module.state_dict().items()}
    own = {"dropout": module.dropout, "time_major": not module.batch_first, "dtype": dtype}
    return fields, arrays, own | {"return_sequences": True, "return_state": True}


def with_weights(kind: type, spec, weights: Mapping[str, np.ndarray], arguments: dict) -> StackLayer:
    """A built layer of the class `kind` for the stack `spec`, with these canonical weights.

    Raises:
        ValueError: stateful, since such a layer is built for one batch size, which no conversion knows.
    """
    if arguments.get("stateful"):
        raise ValueError(
            "stateful: True given, expected False; build a stateful layer for its batch size, and "
            "layer.set_canonical(converted.get_canonical())"
        )
    direction = "bidirectional" if spec.bidirectional else "unidirectional"
    layer = kind(spec.units, spec.num_layers, direction=direction, **arguments)
    layer.build((None, None, spec.input_size))
    layer.set_canonical(weights)
    return layer


def _torch_suffixes(spec: StackSpec) -> list[str]:
    """Of the arrays of each pseudo-layer in the state_dict of torch.nn.LSTM. Its gates have Keras' order, by other names."""
    endings = ("", "_reverse") if spec.bidirectional else ("",)
    return [f"l{layer}{ending}" for layer in range(spec.num_layers) for ending in endings]


def _check_plain(layer: StackLayer, other: str) -> None:
    if not isinstance(layer, StackLayer):
        raise ValueError(
            f"layer: a {type(layer).__name__} given, expected a WavefrontLSTM, or another layer of its kind"
        )
    if getattr(layer, "layer_normalization", False):
        raise ValueError(f"{layer.name}: layer_normalization=True given, {other} has no counterpart, expected False")
