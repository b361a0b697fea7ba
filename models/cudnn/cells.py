"""CudnnCompatibleLSTMCell and CudnnCompatibleGRUCell: one step of one layer, for keras.layers.RNN.

With them a stack that was trained in one cuDNN call runs step by step, as a decoder does:

    cells = cudnn_convert.to_cells(layer)                  # of a CudnnLSTMLayer, with its weights
    rnn = keras.layers.RNN(cells, return_sequences=True)   # or cell by cell: h, states = cells[0](x, states)

They are Keras' own cells held to the cell that cuDNN computes: what it has not is refused. Their weights kernel,
recurrent_kernel and bias are the canonical tensors of models/weights/layouts.py.
"""

from collections.abc import Mapping

import keras

register = keras.saving.register_keras_serializable("lstm_benchmarks")


@register
class CudnnCompatibleLSTMCell(keras.layers.LSTMCell):
    """The LSTM cell of cuDNN.

    Args:
        units: of the cell.
        kwargs: of keras.layers.LSTMCell: initializers, unit_forget_bias, name, dtype and so on.

    Raises:
        ValueError: an argument that makes it another cell than cuDNN's: other activations than tanh and sigmoid,
            use_bias=False, or dropout inside of the cell.
    """

    def __init__(self, units: int, **kwargs) -> None:
        _check(kwargs)
        super().__init__(units, **kwargs)


@register
class CudnnCompatibleGRUCell(keras.layers.GRUCell):
    """The GRU cell of cuDNN, whose reset gate comes after the recurrent product.

    Args:
        units: of the cell.
        kwargs: of keras.layers.GRUCell: initializers, name, dtype and so on.

    Raises:
        ValueError: an argument that makes it another cell than cuDNN's: reset_after=False, other activations than tanh and
            sigmoid, use_bias=False, or dropout inside of the cell.
    """

    def __init__(self, units: int, **kwargs) -> None:
        _check(kwargs, reset_after=True)
        super().__init__(units, **kwargs)


def _check(given: Mapping[str, object], **flags: bool) -> None:
    """Raise ValueError unless what is given of these settings is what cuDNN computes."""
    for name, expected in (("activation", "tanh"), ("recurrent_activation", "sigmoid")):
        if name in given and keras.activations.get(given[name]) is not keras.activations.get(expected):
            raise ValueError(f"{name}: {given[name]!r} given, expected {expected!r}, cuDNN's")
    for name, expected in {"use_bias": True, **flags}.items():
        if given.get(name, expected) is not expected:
            raise ValueError(f"{name}: {given[name]!r} given, expected {expected}: cuDNN has no other")
    for name in ("dropout", "recurrent_dropout"):
        if given.get(name, 0) != 0:
            raise ValueError(f"{name}: {given[name]!r} given, expected 0: cuDNN has no dropout inside of a layer")
