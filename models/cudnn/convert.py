"""The layers of this folder from and to keras.layers, torch.nn and WavefrontLSTM, with the same weights.

    layer = from_keras_layers(model.layers[1:4])     # a list of keras.layers.LSTM becomes one CudnnLSTMLayer
    keras_layers = to_keras_layers(layer)            # and back
    module = to_torch(layer)                         # torch.nn.LSTM
    cells = to_cells(layer)                          # to run it step by step
    wavefront = to_wavefront(layer)                  # WavefrontLSTM
    layer = from_wavefront(wavefront)

Each function makes new objects. What has no counterpart is a ValueError that says so, but for initializers: the new layer has its
weights, and would draw others by the initializers of its own class. torch is imported only where it is used.
"""

from collections.abc import Sequence

import keras

from models.cudnn.cells import CudnnCompatibleGRUCell, CudnnCompatibleLSTMCell
from models.cudnn.layers import CudnnGRULayer, CudnnLayer, CudnnLSTMLayer, CudnnRNNReluLayer, CudnnRNNTanhLayer
from models.wavefront.convert import read_keras_layers, read_torch, to_keras_layers, torch_module, with_weights
from models.wavefront.keras_config import PENALTIES
from models.wavefront.layer import WavefrontLSTM
from models.wavefront.spec import StackSpec as LSTMSpec
from models.wavefront.stack_layer import StackLayer
from models.weights import layouts

__all__ = [
    "LAYERS", "from_keras_layers", "from_torch", "from_wavefront", "to_cells", "to_keras_layers", "to_torch", "to_wavefront",
]  # fmt: skip

LAYERS = {"lstm": CudnnLSTMLayer, "gru": CudnnGRULayer, "rnn_tanh": CudnnRNNTanhLayer, "rnn_relu": CudnnRNNReluLayer}


def from_keras_layers(layers: keras.layers.Layer | Sequence[keras.layers.Layer], **kwargs) -> CudnnLayer:
    """One layer in place of a list of Keras' layers, the lowest first.

    Args:
        layers: built keras.layers.LSTM, GRU or SimpleRNN, or Bidirectional of one of them; all of one kind, with the same
            units; or one of them.
        kwargs: arguments of the new layer, before return_sequences, trainable and the dtype policy, which it takes from `layers`.
            `return_state` and `stateful` of Keras' layers are not taken over: their states come layer by layer.

    Returns:
        A built layer of the kind that fits. On masked sequences its outputs are 0 past the end.

    Raises:
        ValueError: layers that are not built, have different dtype policies, or are no such stack (keras_config.py).
    """
    layers = [layers] if isinstance(layers, keras.layers.Layer) else layers
    fields, arrays, own = read_keras_layers(layers)
    weights = {}
    for k, of_layer in enumerate(arrays):
        weights |= layouts.from_keras(of_layer, k, fields["bidirectional"], mode=fields["mode"])
    spec = layouts.StackSpec(input_size=arrays[0][0].shape[0], **fields)
    return _layer(spec, weights, own, kwargs)


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
    fields, arrays, own = read_torch(module)
    spec = layouts.StackSpec(**fields)
    return _layer(spec, layouts.from_torch(arrays, spec), own, kwargs)


def to_torch(layer: StackLayer):
    """A torch.nn.LSTM, GRU or RNN with the layer's weights, on the CPU. It returns all steps and the final states, as torch does.

    Raises:
        ValueError: the layer is not built.
    """
    arrays, mode = layouts.to_torch(layer.get_canonical(), layer.spec), layer.spec.mode
    if mode.startswith("rnn"):
        return torch_module("RNN", layer, arrays, nonlinearity=mode.removeprefix("rnn_"))
    return torch_module(mode.upper(), layer, arrays)


def to_wavefront(layer: CudnnLSTMLayer, **kwargs) -> WavefrontLSTM:
    """The WavefrontLSTM with the weights of a CudnnLSTMLayer.

    Args:
        layer: its direction, dropout, return_sequences, return_state, time_major, trainable, activity_regularizer and dtype
            policy are taken over.
        kwargs: arguments of the new layer, before those.

    Raises:
        ValueError: another layer, one that is not built, or a stateful one without stateful=False among the arguments.
    """
    if not isinstance(layer, CudnnLSTMLayer):
        raise ValueError(f"layer: a {type(layer).__name__} given, expected CudnnLSTMLayer")
    weights, spec = layer.get_canonical(), layer.spec
    spec = LSTMSpec(spec.num_layers, spec.units, spec.input_size, spec.bidirectional)
    return with_weights(WavefrontLSTM, spec, weights, {**_shared(layer), **kwargs})


def from_wavefront(layer: WavefrontLSTM, **kwargs) -> CudnnLSTMLayer:
    """The CudnnLSTMLayer with the same weights and arguments; kwargs: arguments of it, before those.

    Raises:
        ValueError: the layer is not built, or layer-normalised, or computes in bfloat16; it has recurrent_dropout; it has
            regularizers or constraints of its weights, which CudnnLSTMLayer has in one buffer; or it is stateful, without
            stateful=False among the arguments.
    """
    for name in PENALTIES:
        if given := getattr(layer, name):
            raise ValueError(
                f"{layer.name}: {name}={type(given).__name__} given, CudnnLSTMLayer has no counterpart, expected None"
            )
    if rate := layer.recurrent_dropout:
        raise ValueError(f"{layer.name}: recurrent_dropout={rate} given, cuDNN has no counterpart, expected 0")
    if layer.layer_normalization:
        raise ValueError(f"{layer.name}: layer_normalization=True given, cuDNN has no counterpart, expected False")
    weights = layer.get_canonical()
    return with_weights(CudnnLSTMLayer, layer.spec, weights, {**_shared(layer), **kwargs})


def _shared(layer: WavefrontLSTM | CudnnLSTMLayer) -> dict:
    """The arguments that the two layers share, beyond what `spec` says."""
    names = (
        "dropout", "return_sequences", "return_state", "time_major", "stateful", "trainable", "activity_regularizer",
    )  # fmt: skip
    return {**{name: getattr(layer, name) for name in names}, "dtype": layer.dtype_policy.name}


def _layer(spec: layouts.StackSpec, weights: layouts.Weights, own: dict, kwargs: dict) -> CudnnLayer:
    return with_weights(LAYERS[spec.mode], spec, weights, {**own, **kwargs})
