"""WavefrontLSTM, a Keras layer that is a whole stack of LSTM layers, and what goes with it. README.md shows how to use it.

This folder stands alone: it imports TensorFlow, Keras, NumPy and its own files. `pip install .` in the checkout installs it as
`wavefront_lstm`; a copy of it works under any name. TensorFlow is imported when one of the names below is first used, and Keras
then knows all of the classes, so that it can open saved models.
"""

import importlib

_HOMES = {
    "WavefrontLSTM": "layer",
    "CompiledLoop": "compiled_loop",
    "SoftmaxHead": "softmax_head",
    "from_keras_layers": "convert",
    "to_keras_layers": "convert",
    "from_torch": "convert",
    "to_torch": "convert",
}
__all__ = list(_HOMES)
_CLASSES = ("layer", "compiled_loop", "softmax_head")  # modules that register a class with Keras


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    for module in _CLASSES:
        importlib.import_module(f".{module}", __name__)
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
