"""WavefrontLSTM, a Keras layer that is a whole stack of LSTM layers, and what goes with it. README.md shows how to use it.

This folder stands alone: it imports TensorFlow, Keras, NumPy and its own files. `pip install .` in the checkout installs it as
`wavefront_lstm`; a copy of it works under any name. Once it has been imported Keras knows all of its classes, and opens saved
models that have them.
"""

try:
    from .compiled_loop import CompiledLoop
    from .convert import from_keras_layers, from_torch, to_keras_layers, to_torch
    from .layer import WavefrontLSTM
    from .softmax_head import SoftmaxHead
except ModuleNotFoundError as error:
    lacking = str(error.name).partition(".")[0]
    if lacking not in ("keras", "tensorflow"):
        raise
    needed = "pip install 'tensorflow>=2.21', on NVIDIA GPUs 'tensorflow[and-cuda]>=2.21'"
    raise ImportError(f"no {lacking} here, which wavefront_lstm needs: {needed}") from error

__all__ = [
    "CompiledLoop",
    "SoftmaxHead",
    "WavefrontLSTM",
    "from_keras_layers",
    "from_torch",
    "to_keras_layers",
    "to_torch",
]
