"""WavefrontLSTM, a Keras layer that is a whole stack of LSTM layers, and what goes with it. README.md shows how to use it.

This folder stands alone: it imports TensorFlow, Keras, NumPy and its own files. `pip install .` in the checkout installs it as
`wavefront_lstm`; a copy of it works under any name. TensorFlow is imported when one of the names below is first used. From then
on, or at once where Keras on TensorFlow has been imported before, Keras knows all of the classes and opens saved models.
"""

import importlib
import sys

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


def _register() -> None:
    try:
        for module in _CLASSES:
            importlib.import_module(f".{module}", __name__)
    except ModuleNotFoundError as error:
        lacking = str(error.name).partition(".")[0]
        if lacking not in ("keras", "tensorflow"):
            raise
        needed = "pip install 'tensorflow>=2.21', on NVIDIA GPUs 'tensorflow[and-cuda]>=2.21'"
        raise ImportError(f"no {lacking} here, which wavefront_lstm needs: {needed}") from error


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    _register()
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})


if {"keras", "tensorflow"} <= sys.modules.keys():
    _register()
