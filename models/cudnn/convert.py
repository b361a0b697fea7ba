"""The layers of cudnn_layers.py from and to keras.layers and torch.nn, with the same weights.

    layer = from_keras_layers(model.layers[1:4])     # a list of keras.layers.LSTM becomes one CudnnLSTMLayer
    keras_layers = to_keras_layers(layer)            # and back
    module = to_torch(layer)                         # torch.nn.LSTM
    cells = to_cells(layer)                          # to run it step by step

Each function makes new objects. What has no counterpart is a ValueError that says so. torch is imported only where it is used.
"""

from collections.abc import Sequence

import keras

from models.cudnn.cells import CudnnCompatibleGRUCell, CudnnCompatibleLSTMCell
from models.cudnn.keras_config import from_keras_config
from models.cudnn.layers import CudnnGRULayer, CudnnLayer, CudnnLSTMLayer, CudnnRNNReluLayer, CudnnRNNTanhLayer
from models.wavefront.stack_layer import StackLayer
from models.weights import layouts
from models.weights.stack_spec import KERAS_LAYERS

LAYERS = {
    "lstm": CudnnLSTMLayer,
    "gru": CudnnGRULayer,
    "rnn_tanh": CudnnRNNTanhLayer,
    "rnn_relu": CudnnRNNReluLayer,
}
TORCH_DTYPES = ("float16", "float32", "float64")


def from_keras_layers(layers: Sequence[keras.layers.Layer], **kwargs) -> CudnnLayer:
    """One layer in place of a list of Keras' layers, the lowest first.

    Args:
        layers: built keras.layers.LSTM, GRU or SimpleRNN, or Bidirectional of one of them; all of one kind, with the same units.
        kwargs: arguments of the new layer beyond return_sequences and the dtype policy, which it takes from `layers`.
            `return_state` and `stateful` of Keras' layers are not taken over: their states come layer by layer.

    Returns:
        A built layer of the kind that fits. On masked sequences its outputs are 0 past the end.

    Raises:
        ValueError: layers that are not built, have different dtype policies, or are no such stack (keras_config.py).
    """
    return _layer(*read_keras_layers(layers), kwargs)


def read_keras_layers(layers: Sequence[keras.layers.Layer]) -> tuple[layouts.StackSpec, layouts.Weights, dict]:
    """(spec, canonical weights, arguments of a layer that go with them) of a list of Keras' layers; as from_keras_layers."""
    fields = from_keras_config([keras.layers.serialize(layer) for layer in layers])
    policy = layers[0].dtype_policy.name
    weights = {}
    for k, layer in enumerate(layers):
        if not layer.built:
            raise ValueError(f"layer {k}: {layer.name} is not built, expected layers that have weights")
        if layer.dtype_policy.name != policy:
            raise ValueError(f"layer {k}: policy {layer.dtype_policy.name} given, expected {policy} as in layer 0")
        weights |= layouts.from_keras(layer.get_weights(), k, fields["bidirectional"], mode=fields["mode"])
    input_size = weights[f"{fields['mode']}_0/forward/kernel"].shape[0]
    spec = layouts.StackSpec(input_size=input_size, **fields)
    return spec, weights, {"return_sequences": layers[-1].return_sequences, "dtype": policy}


def to_keras_layers(layer: StackLayer) -> list[keras.layers.Layer]:
    """A built keras.layers.LSTM, GRU or SimpleRNN (or Bidirectional of one) for each layer of the stack, the lowest first.

    The last one has the stack's return_sequences. They are batch-major and stateless, return no states, and there is no dropout
    between them: to train on with the stack's, put keras.layers.Dropout there.

    Raises:
        ValueError: the layer is not built.
    """
    weights, spec = layer.get_canonical(), layer.spec
    policy = layer.dtype_policy
    options = {"activation": spec.mode.removeprefix("rnn_")} if spec.mode.startswith("rnn") else {}
    keras_layers = []
    for k in range(spec.num_layers):
        return_sequences = layer.return_sequences or k < spec.num_layers - 1
        new = getattr(keras.layers, KERAS_LAYERS[spec.mode])(
            spec.units, return_sequences=return_sequences, dtype=policy, **options
        )
        new = keras.layers.Bidirectional(new, dtype=policy) if spec.bidirectional else new
        new.build((None, None, spec.layer_input_size(k)))
        new.set_weights(layouts.to_keras(weights, k, spec.bidirectional, mode=spec.mode))
        keras_layers.append(new)
    return keras_layers


def to_cells(layer: StackLayer) -> list[keras.layers.Layer]:
    """A built cell for each layer of the stack, the lowest first: to run it step by step, or in keras.layers.RNN.

    The states of cell k are [h[k], c[k]] ([h[k]]) of the layer's own states.

    Raises:
        ValueError: the layer is not built, or is bidirectional.
    """
    weights, spec = layer.get_canonical(), layer.spec
    if spec.bidirectional:
        raise ValueError(f"{layer.name}: bidirectional, expected one direction: the other needs the last step first")
    cells = []
    for k in range(spec.num_layers):
        if spec.mode.startswith("rnn"):
            activation = spec.mode.removeprefix("rnn_")
            cell = keras.layers.SimpleRNNCell(spec.units, activation=activation, dtype=layer.dtype_policy)
        else:
            kind = {"lstm": CudnnCompatibleLSTMCell, "gru": CudnnCompatibleGRUCell}[spec.mode]
            cell = kind(spec.units, dtype=layer.dtype_policy)
        cell.build((None, spec.layer_input_size(k)))
        cell.set_weights(layouts.to_keras(weights, k, mode=spec.mode))
        cells.append(cell)
    return cells


def from_torch(module, **kwargs) -> CudnnLayer:
    """The layer with the weights of a torch.nn.LSTM, GRU or RNN.

    Args:
        module: its double bias is summed, but for a GRU's. dropout and batch_first (time_major) are taken over, and it returns
            all steps and the final states as the module does: (outputs, h, c) for torch's (outputs, (h, c)).
        kwargs: arguments of the new layer, before those.

    Raises:
        ValueError: another module, one without biases or with a projection, or of another type than float16, float32, float64.
    """
    return _layer(*read_torch(module), kwargs)


def read_torch(module) -> tuple[layouts.StackSpec, layouts.Weights, dict]:
    """(spec, canonical weights, arguments of a layer that go with them) of a torch.nn.LSTM, GRU or RNN; as from_torch."""
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
    spec = layouts.StackSpec(mode, module.num_layers, module.hidden_size, module.input_size, module.bidirectional)
    arrays = {name: tensor.detach().cpu().numpy() for name, tensor in module.state_dict().items()}
    own = {"dropout": module.dropout, "time_major": not module.batch_first, "dtype": dtype}
    own |= {"return_sequences": True, "return_state": True}
    return spec, layouts.from_torch(arrays, spec), own


def to_torch(layer: StackLayer):
    """A torch.nn.LSTM, GRU or RNN with the layer's weights, on the CPU. It returns all steps and the final states, as torch does.

    Raises:
        ValueError: the layer is not built.
    """
    import torch

    weights, spec = layer.get_canonical(), layer.spec
    kind = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU}.get(spec.mode, torch.nn.RNN)
    options = {"nonlinearity": spec.mode.removeprefix("rnn_")} if kind is torch.nn.RNN else {}
    module = kind(
        spec.input_size,
        spec.units,
        spec.num_layers,
        batch_first=not layer.time_major,
        dropout=layer.dropout,
        bidirectional=spec.bidirectional,
        dtype=getattr(torch, layer.variable_dtype),
        **options,
    )
    arrays = layouts.to_torch(weights, spec)
    module.load_state_dict({name: torch.from_numpy(array) for name, array in arrays.items()})
    return module


def _layer(spec: layouts.StackSpec, weights: layouts.Weights, own: dict, kwargs: dict) -> CudnnLayer:
    return with_weights(LAYERS[spec.mode], spec, weights, {**own, **kwargs})


def with_weights(kind: type, spec: layouts.StackSpec, weights: layouts.Weights, arguments: dict) -> StackLayer:
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
