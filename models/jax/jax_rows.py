"""The language model's rows of JAX, and of Keras on JAX and on PyTorch, by name. Imports none of them.

The counterpart of models/tf/stacks.py. Ops are named as harness.frameworks.jax names them, or harness.frameworks.pytorch.
"""

import os
from collections.abc import Callable
from typing import NamedTuple

from models.pytorch.torch_rows import TORCH_CELL_OP, TORCH_LSTM_OP, TORCH_MATMUL
from models.tf.stacks import CUDNN_KERNEL, PRECISIONS


class JaxImplementation(NamedTuple):
    """A language model in JAX, or a Keras model on another backend than TensorFlow, by name.

    Attributes:
        what, needs_gpu: as in Implementation.
        model: (weights, states, batches, optimizer, dtype, **options) → the language model; imports its framework.
        evidence: (num_layers, time_steps, device) → the arguments of harness.measure.proof.Kernel, as Implementation's.
        Names of ops are
            those of harness.frameworks.jax, "loop:dot", or of harness.frameworks.pytorch where `framework` is "torch".
        framework: in which the row runs.
        precisions: those that it has.
    """

    what: str
    model: Callable
    evidence: Callable[[int, int, str], dict[str, object]]
    framework: str = "jax"
    needs_gpu: bool = False
    precisions: tuple[str, ...] = PRECISIONS

    def language_model(
        self, weights, states, batches, optimizer: tuple[str, float], *, precision: str, device: str = "", **options
    ):
        """The row's model. Arguments as of TorchImplementation.language_model; its framework finds the device by itself.

        Raises:
            ValueError: a precision that the row has not.
        """
        if precision not in (*self.precisions, "fp64"):
            raise ValueError(f"{self.what}: has no {precision}, expected one of {', '.join(self.precisions)}")
        dtype = {"fp16": "float16", "fp64": "float64"}.get(precision, "float32")
        return self.model(weights, states, batches, optimizer, dtype, **options)


JAX_MATMUL = r"(dot|custom-call:__(cublas|onednn)\S*)"
JAX_CUDNN = r"(loop:)?custom-call:\S*cudnn\S*rnn\S*"
TORCH_ANY_LSTM = f"{TORCH_LSTM_OP}|{TORCH_CELL_OP}"


def _jax_scan(weights, states, batches, optimizer, dtype, **options):
    from models.jax import language_model as jax_language_model
    from models.jax import stacks
    from models.weights.canonical import stack_size

    stack = stacks.ScanLSTM(weights, stack_size(weights)[0], dtype)
    return jax_language_model.JaxLanguageModel(stack, weights, states, batches, optimizer, **options)


def _jax_cudnn(weights, states, batches, optimizer, dtype, **options):
    from models.jax import language_model as jax_language_model
    from models.jax import stacks
    from models.weights.canonical import stack_size

    has_dropout = options.get("keep_prob", 1.0) < 1
    stack = stacks.CudnnLSTM(weights, stack_size(weights)[0], dtype, layer_by_layer=has_dropout)
    return jax_language_model.JaxLanguageModel(stack, weights, states, batches, optimizer, **options)


def _keras(backend: str, use_cudnn: bool | str) -> Callable:
    """The Keras model on a backend, which Keras has to be imported with."""

    def build(weights, states, batches, optimizer, dtype, **options):
        os.environ["KERAS_BACKEND"] = backend
        from models.keras import language_model as keras_language_model

        options |= {"backend": backend, "dtype": dtype, "use_cudnn": use_cudnn}
        return keras_language_model.language_model(weights, states, batches, optimizer, **options)

    return build


def _loops_of(unroll: int) -> Callable:
    """Evidence of a loop per layer with products in it; where a GPU's program has all steps written out, of products alone."""

    def evidence(num_layers: int, time_steps: int, device: str) -> dict[str, object]:
        ops = {"while": num_layers, f"loop:{JAX_MATMUL}": num_layers}
        if device == "gpu" and time_steps <= unroll:
            ops = {JAX_MATMUL: num_layers * time_steps}
        return {"ops": ops, "not_ops": JAX_CUDNN, "not_kernels": CUDNN_KERNEL}

    return evidence


def _calls_of_cudnn(num_layers: int, time_steps: int, device: str) -> dict[str, object]:
    """Of one call for the stack, or with dropout one for each layer; each takes the sequences' lengths to the host."""
    return {
        "ops": {JAX_CUDNN: 1},
        "not_ops": f"loop:{JAX_MATMUL}",
        "kernels": CUDNN_KERNEL,
        "calls_copying_lengths": num_layers,
    }


def _calls_of_keras(num_layers: int, time_steps: int, device: str) -> dict[str, object]:
    """Of one such call for each layer."""
    return {**_calls_of_cudnn(num_layers, time_steps, device), "ops": {JAX_CUDNN: num_layers}}


def _keras_torch(num_layers: int, time_steps: int, device: str) -> dict[str, object]:
    if device == "gpu":
        return {"ops": {"aten::lstm": (num_layers, num_layers)}, "kernels": CUDNN_KERNEL}
    return {"ops": {TORCH_MATMUL: num_layers * time_steps}, "not_ops": TORCH_ANY_LSTM}


JAX_IMPLEMENTATIONS = {
    "jax_scan": JaxImplementation(
        "JAX: a lax.scan over time per layer, its backward pass written out; the whole step jitted",
        _jax_scan,
        _loops_of(unroll=10),  # models.jax.stacks.UNROLL
    ),
    "jax_cudnn": JaxImplementation(
        "JAX: jax.experimental.rnn.lstm (cuDNN), the whole stack in one call; with dropout layer by layer",
        _jax_cudnn,
        _calls_of_cudnn,
        needs_gpu=True,
        precisions=("fp32", "tf32"),
    ),
    "keras_jax": JaxImplementation(
        "Keras on JAX: keras.layers.LSTM(use_cudnn=False), the whole step jitted",
        _keras("jax", use_cudnn=False),
        _loops_of(unroll=1),
    ),
    "keras_jax_cudnn": JaxImplementation(
        "Keras on JAX: keras.layers.LSTM(use_cudnn=True), layer by layer, the whole step jitted",
        _keras("jax", use_cudnn=True),
        _calls_of_keras,
        needs_gpu=True,
        precisions=("fp32", "tf32"),  # at fp16 Keras' call of cuDNN fails when it is compiled
    ),
    "keras_torch": JaxImplementation(
        "Keras on PyTorch: keras.layers.LSTM, op by op (cuDNN, layer by layer, on a GPU)",
        _keras("torch", use_cudnn="auto"),
        _keras_torch,
        framework="torch",
    ),
}
