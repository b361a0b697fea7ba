"""WavefrontLSTM from and to keras.layers.LSTM, CudnnLSTMLayer and torch.nn.LSTM, with the same weights.

    layer = from_keras_layers(model.layers[1:4])     # a list of keras.layers.LSTM becomes one WavefrontLSTM
    keras_layers = to_keras_layers(layer)            # and back
    layer = from_cudnn(cudnn_lstm_layer)
    module = to_torch(layer)                         # torch.nn.LSTM

Each function makes new objects. What has no counterpart is a ValueError that says so. torch is imported only where it is used.
"""

from collections.abc import Sequence

import keras

from models.cudnn import convert
from models.cudnn.layers import CudnnLSTMLayer
from models.wavefront.layer import WavefrontLSTM
from models.weights import layouts


def from_keras_layers(layers: Sequence[keras.layers.Layer], **kwargs) -> WavefrontLSTM:
    """One layer in place of a list of Keras' layers, the lowest first.

    Args:
        layers: built keras.layers.LSTM, or Bidirectional of it, all with the same units.
        kwargs: arguments of the new layer beyond return_sequences and the dtype policy, which it takes from `layers`.

    Raises:
        ValueError: layers that are not built, have different dtype policies, or are no such stack (keras_config.py).
    """
    return _layer(*convert.read_keras_layers(layers), kwargs)


def to_keras_layers(layer: WavefrontLSTM) -> list[keras.layers.Layer]:
    """A built keras.layers.LSTM (or Bidirectional of it) for each layer of the stack, as cudnn_convert.to_keras_layers.

    Raises:
        ValueError: the layer is not built, or layer-normalised.
    """
    _check_plain(layer, "keras.layers.LSTM")
    return convert.to_keras_layers(layer)


def from_cudnn(layer: CudnnLSTMLayer, **kwargs) -> WavefrontLSTM:
    """The layer with the weights of a CudnnLSTMLayer.

    Args:
        layer: its direction, dropout, return_sequences, return_state and dtype policy are taken over. The new layer is
            batch-major in any case.
        kwargs: arguments of the new layer, before those.

    Raises:
        ValueError: another layer, or one that is not built.
    """
    if not isinstance(layer, CudnnLSTMLayer):
        raise ValueError(f"layer: a {type(layer).__name__} given, expected CudnnLSTMLayer")
    weights = layer.get_canonical()
    return _layer(layer.spec, weights, _shared(layer), kwargs)


def to_cudnn(layer: WavefrontLSTM, **kwargs) -> CudnnLSTMLayer:
    """The CudnnLSTMLayer with the same weights and arguments; kwargs: arguments of it, before those.

    Raises:
        ValueError: the layer is not built, or layer-normalised, or computes in bfloat16.
    """
    _check_plain(layer, "cuDNN")
    weights = layer.get_canonical()
    return convert.with_weights(CudnnLSTMLayer, layer.spec, weights, {**_shared(layer), **kwargs})


def from_torch(module, **kwargs) -> WavefrontLSTM:
    """The layer with the weights of a torch.nn.LSTM.

    Args:
        module: its double bias is summed. dropout is taken over, and it returns all steps and the final states as the module
            does: (outputs, h, c) for torch's (outputs, (h, c)). The new layer is batch-major whatever batch_first says.
        kwargs: arguments of the new layer, before those.

    Raises:
        ValueError: another module, one without biases or with a projection, or of another type than float16, float32, float64.
    """
    spec, weights, own = convert.read_torch(module)
    del own["time_major"]
    return _layer(spec, weights, own, kwargs)


def to_torch(layer: WavefrontLSTM):
    """A torch.nn.LSTM (batch_first) with the layer's weights, as cudnn_convert.to_torch.

    Raises:
        ValueError: the layer is not built, or layer-normalised.
    """
    _check_plain(layer, "torch.nn.LSTM")
    return convert.to_torch(layer)


def _layer(spec: layouts.StackSpec, weights: layouts.Weights, own: dict, kwargs: dict) -> WavefrontLSTM:
    if spec.mode != "lstm":
        raise ValueError(f"a stack of mode {spec.mode} given, expected lstm; use models/cudnn/convert.py")
    return convert.with_weights(WavefrontLSTM, spec, weights, {**own, **kwargs})


def _shared(layer: WavefrontLSTM | CudnnLSTMLayer) -> dict:
    """The arguments that the two layers share, beyond what `spec` says."""
    names = ("dropout", "return_sequences", "return_state")
    return {**{name: getattr(layer, name) for name in names}, "dtype": layer.dtype_policy.name}


def _check_plain(layer: WavefrontLSTM, other: str) -> None:
    if layer.layer_normalization:
        raise ValueError(f"{layer.name}: layer_normalization=True given, {other} has no counterpart, expected False")
