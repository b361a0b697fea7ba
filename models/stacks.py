"""The LSTM stacks that TensorFlow can run, by name: how each is built, and what can be seen when it really runs.

The names are those of the tables' rows. `ops` are what one step shows at least, as regular expressions of op types; ops
inside a while loop's body stand as "loop:MatMul" (once per layer at least, since a graph holds a body once), those run
eagerly as "eager:MatMul". The graph optimizer renames products (_FusedMatMul, …), so MATMUL takes all of them.
"""

import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

MATMUL = r"\w*MatMul"
CUDNN_KERNEL = r"elemWiseRNNcell|LSTM_elementWise|RNN_blockPersist|cudnn\w*rnn"
BLOCK_KERNEL = r"lstm_gates"
CUDNN_OP = r"(\w+:)?CudnnRNN\w*"
LSTM_OP = r"(\w+:)?(CudnnRNN|\w*LSTM)\w*"  # any op that is an LSTM: a row of primitive ops may run none


class Implementation(NamedTuple):
    """A stack by name.

    Attributes:
        what: one line for a table.
        stack: (weights, num_layers, dtype) → models.stack.Stack; imports TensorFlow when it is called.
        ops: (num_layers, time_steps) → {op: launches in one step, at least; or the pair of least and most}.
        not_ops: regular expression of ops that must not run.
        kernels, not_kernels: regular expressions of GPU kernels, one of which must run, and none of which may.
        eager: run op by op.
        needs_gpu: has no CPU version.
        own_dropout: `stack` takes a further argument, the rate of the dropout between its layers.
        compile_rest: XLA compiles the rest of the language model (models.language_model.LanguageModel).
        rest_ops: launches, at least, in what is not the stack.
    """

    what: str
    stack: Callable
    ops: Callable[[int, int], Mapping[str, int | tuple[int, int]]]
    not_ops: str = CUDNN_OP
    kernels: str = ""
    not_kernels: str = CUDNN_KERNEL
    eager: bool = False
    needs_gpu: bool = False
    own_dropout: bool = False
    compile_rest: bool = False
    rest_ops: Mapping[str, int] = {}

    framework = "tensorflow"

    def evidence(self, num_layers: int, time_steps: int, device: str) -> dict[str, object]:
        """What has to be seen running: the arguments of harness.proof.Kernel. device: "gpu" or "cpu", here alike."""
        return {
            "ops": dict(self.ops(num_layers, time_steps)),
            "rest_ops": dict(self.rest_ops),
            "not_ops": self.not_ops,
            "kernels": self.kernels,
            "not_kernels": self.not_kernels,
        }

    def language_model(
        self, weights, states, batches, optimizer: tuple[str, float], *, precision: str, device: str = "", **options
    ):
        """The row's models.language_model.LanguageModel; imports TensorFlow.

        Args:
            weights, states, batches, options: as there.
            optimizer: ("SGD" or "Adam", learning rate): Keras' own.
            precision: "fp32", "tf32" or "fp16".
            device: TensorFlow finds it by itself.
        """
        import keras

        from models.language_model import COMPUTE_DTYPE, LanguageModel
        from models.weights import stack_size

        kind, learning_rate = optimizer
        dropout = {"dropout": 1.0 - options.get("keep_prob", 1.0)} if self.own_dropout else {}
        stack = self.stack(weights, stack_size(weights)[0], COMPUTE_DTYPE[precision], **dropout)
        made = {"SGD": keras.optimizers.SGD, "Adam": keras.optimizers.Adam}[kind](learning_rate)
        options |= {"eager": self.eager, "compile_rest": self.compile_rest}
        return LanguageModel(stack, weights, states, batches, made, **options)


def _stack(name: str, **options) -> Callable:
    """The constructor of a stack, "module.Class" of this folder; TensorFlow is imported when it is called."""
    module, kind = name.split(".")

    def build(*arguments, **keywords):
        return getattr(importlib.import_module(f"models.{module}"), kind)(*arguments, **options, **keywords)

    return build


_NO_EAGER_CELLS = r"eager:(MatMul|LSTMBlockCell)"  # a graph row may not run its cells op by op

IMPLEMENTATIONS = {
    "eager": Implementation(
        "LSTM cell of primitive ops, unrolled, op by op (TF eager)",
        _stack("basic_cell.UnrolledLSTM"),
        lambda layers, steps: {"eager:MatMul": layers * steps},
        not_ops=LSTM_OP,
        eager=True,
    ),
    "unrolled": Implementation(
        "LSTM cell of primitive ops, unrolled into one graph",
        _stack("basic_cell.UnrolledLSTM"),
        lambda layers, steps: {MATMUL: layers * steps},
        not_ops=f"{LSTM_OP}|loop:.*|{_NO_EAGER_CELLS}",
    ),
    "while_loop": Implementation(
        "LSTM cell of primitive ops in tf.while_loop (BasicLSTMCell)",
        _stack("basic_cell.WhileLoopLSTM"),
        lambda layers, steps: {f"loop:{MATMUL}": layers},
        not_ops=f"{LSTM_OP}|{_NO_EAGER_CELLS}",
    ),
    "static_eager": Implementation(
        "C++ cell op LSTMBlockCell, unrolled, op by op (TF eager)",
        _stack("block_cell.StaticBlockLSTM"),
        lambda layers, steps: {"eager:LSTMBlockCell": layers * steps},
        kernels=BLOCK_KERNEL,
        eager=True,
    ),
    "static_graph": Implementation(
        "C++ cell op LSTMBlockCell, unrolled into one graph",
        _stack("block_cell.StaticBlockLSTM"),
        lambda layers, steps: {"LSTMBlockCell": layers * steps},
        not_ops=f"{CUDNN_OP}|{_NO_EAGER_CELLS}",
        kernels=BLOCK_KERNEL,
    ),
    "block_fused": Implementation(
        "BlockLSTMV2, one op per layer (LSTMBlockFusedCell)",
        _stack("block_fused.FusedBlockLSTM"),
        lambda layers, steps: {"BlockLSTMV2": layers},
        kernels=BLOCK_KERNEL,
    ),
    "keras": Implementation(
        "keras.layers.LSTM(use_cudnn=False), without XLA: vanilla LSTM",
        _stack("keras_lstm.KerasLSTM", use_cudnn=False),
        lambda layers, steps: {f"loop:{MATMUL}": layers},
        not_ops=LSTM_OP,
    ),
    "keras_cudnn_eager": Implementation(
        "keras.layers.LSTM(use_cudnn=True), op by op (TF eager)",
        _stack("keras_lstm.KerasLSTM", use_cudnn=True),
        lambda layers, steps: {"eager:CudnnRNNV3": layers},
        not_ops=f"loop:{MATMUL}",
        kernels=CUDNN_KERNEL,
        not_kernels="",
        eager=True,
        needs_gpu=True,
    ),
    "keras_cudnn": Implementation(
        "keras.layers.LSTM(use_cudnn=True), layer by layer: CuDNNLSTM today",
        _stack("keras_lstm.KerasLSTM", use_cudnn=True),
        lambda layers, steps: {"CudnnRNNV3": layers},
        not_ops=f"loop:{MATMUL}",
        kernels=CUDNN_KERNEL,
        not_kernels="",
        needs_gpu=True,
    ),
    "cudnn_stack": Implementation(
        "CudnnLSTM: the whole stack in one cuDNN call, time-major",
        _stack("cudnn_stack.CudnnStack"),
        lambda layers, steps: {"CudnnRNNV3": (1, 1)},
        not_ops=f"loop:{MATMUL}|xla",
        kernels=CUDNN_KERNEL,
        not_kernels="",
        needs_gpu=True,
        own_dropout=True,
    ),
    "cudnn_stack_xla": Implementation(
        "cudnn_stack, with dense layer, loss and optimizer compiled by XLA",
        _stack("cudnn_stack.CudnnStack"),
        lambda layers, steps: {"CudnnRNNV3": (1, 1)},
        not_ops=f"loop:{MATMUL}|{MATMUL}",
        kernels=CUDNN_KERNEL,
        not_kernels="",
        needs_gpu=True,
        own_dropout=True,
        compile_rest=True,
        rest_ops={"xla": 1},
    ),
}


class FitImplementation(NamedTuple):
    """A Keras model trained by `fit`, by name: arguments of models.classifier.build_classifier.

    Attributes:
        peer: where it is Keras on another backend than TensorFlow, the language model's row of that name: framework,
            precisions and evidence are the same.
    """

    what: str
    use_cudnn: bool | str
    jit_compile: bool | str
    needs_gpu: bool = False
    peer: "JaxImplementation | None" = None

    @property
    def framework(self) -> str:
        return self.peer.framework if self.peer else "tensorflow"

    def evidence(self, num_layers: int, time_steps: int, device: str, steps: int) -> dict[str, object]:
        """What has to be seen running in `steps` training steps: the arguments of harness.proof.Kernel."""
        if not self.peer:
            return fit_evidence(self, num_layers, device)
        return _in_steps(self.peer.evidence(num_layers, time_steps, device), self.framework, steps)

    def classifier(
        self,
        weights: Mapping,
        inputs,
        labels,
        batch_size: int,
        optimizer: tuple[str, float, float],
        *,
        lstm_dropout: Sequence[float] = (),
        dense_dropout: float = 0.0,
        precision: str = "fp32",
        device: str = "",
        loss_scale: float = 1.0,
        capacity: int | None = None,
        seed: int = 0,
    ):
        """The row's trial: `fit`, and what the proof needs; imports Keras on the row's backend.

        Args:
            weights: canonical weights of a classifier (models.weights.classifier_shapes), whose sizes are the model's.
            inputs, labels: of the proof, [batches · batch_size, time, features] and [batches · batch_size] NumPy arrays.
            optimizer: ("Adam", learning rate, decay): the rate at step t is learning rate / (1 + decay · t).
            lstm_dropout, dense_dropout: rates behind each LSTM layer, and behind every relu layer.
            precision, loss_scale: as of models.classifier.build_classifier.
            device: in the framework's own words; Keras finds it by itself.
            capacity: sequences of the largest data set to train on, for a trial that keeps it on the device.
            seed: of the order of the sequences and the dropout masks.

        Raises:
            ValueError: a precision that the row has not.
        """
        _check_precision(self.what, precision, self.peer)
        os.environ["KERAS_BACKEND"] = self.framework
        import keras

        from models.classifier import ClassifierTrial, build_classifier
        from models.weights import stack_size

        if keras.backend.backend() != self.framework:
            raise RuntimeError(f"Keras runs on {keras.backend.backend()} in this process, expected {self.framework}")
        keras.utils.set_random_seed(seed)
        _, rate, decay = optimizer
        schedule = keras.optimizers.schedules.InverseTimeDecay(rate, 1, decay) if decay else rate
        layers, bidirectional = stack_size(weights)
        biases = [array for name, array in weights.items() if name.startswith("dense_") and name.endswith("bias")]
        *dense, classes = map(len, biases)
        model = build_classifier(
            inputs.shape[1:], len(weights["lstm_0/forward/recurrent_kernel"]), layers, classes, dense_units=dense,
            lstm_dropout=lstm_dropout, dense_dropout=dense_dropout, use_cudnn=self.use_cudnn,
            jit_compile=self.jit_compile, bidirectional=bidirectional, precision=precision, loss_scale=loss_scale,
            optimizer=keras.optimizers.Adam(schedule), seed=seed,
        )  # fmt: skip
        return ClassifierTrial(model, weights, inputs, labels, batch_size)


FIT_IMPLEMENTATIONS = {
    "keras": FitImplementation("LSTM(use_cudnn=False), jit_compile=False: vanilla LSTM", False, False),
    "keras_cudnn": FitImplementation("LSTM(use_cudnn=True): CuDNNLSTM today", True, False, needs_gpu=True),
    "keras_xla": FitImplementation("LSTM(use_cudnn=False), jit_compile=True", False, True),
    "keras_default": FitImplementation("LSTM(), nothing set: what a user gets", "auto", "auto"),
    "cudnn_stack": FitImplementation(
        "CudnnLSTMLayer: the whole stack in one cuDNN call", "stack", False, needs_gpu=True
    ),
}


def fit_evidence(made: FitImplementation, num_layers: int, device: str) -> dict[str, object]:
    """What has to be seen running in `fit`. Keras' "auto" is cuDNN on a GPU, and its while loop without XLA on a CPU."""
    if made.use_cudnn == "stack" and device == "gpu":
        return {"ops": {"CudnnRNNV3": (1, 1)}, "not_ops": f"xla|loop:{MATMUL}", "kernels": CUDNN_KERNEL}
    if made.use_cudnn is True or (made.use_cudnn == "auto" and device == "gpu"):
        return {"ops": {"CudnnRNNV3": num_layers}, "not_ops": f"xla|loop:{MATMUL}", "kernels": CUDNN_KERNEL}
    if made.jit_compile is True:
        return {"ops": {"xla": 1}, "not_ops": CUDNN_OP, "not_kernels": CUDNN_KERNEL}
    return {"ops": {f"loop:{MATMUL}": num_layers}, "not_ops": f"{CUDNN_OP}|xla", "not_kernels": CUDNN_KERNEL}


class TorchImplementation(NamedTuple):
    """A stack of PyTorch by name, with the language model around it.

    Attributes:
        what, not_ops, kernels, not_kernels, needs_gpu: as in Implementation.
        stack: a class of models/torch_stacks.py.
        ops: (num_layers, time_steps) → {op: launches in one step}, under the names of harness.torch_runtime: "aten::lstm".
        captured: whether on a GPU a step is the replay of a CUDA graph, which shows its kernels but none of its ops.
    """

    what: str
    stack: str
    ops: Callable[[int, int], Mapping[str, int | tuple[int, int]]]
    not_ops: str
    kernels: str = ""
    not_kernels: str = CUDNN_KERNEL
    needs_gpu: bool = False
    captured: bool = False

    framework = "torch"

    def evidence(self, num_layers: int, time_steps: int, device: str) -> dict[str, object]:
        """As of Implementation. A captured step on a "gpu" shows one launch, and none of the ops that it holds."""
        ops, not_ops = dict(self.ops(num_layers, time_steps)), self.not_ops
        if self.captured and device == "gpu":
            ops, not_ops = {GRAPH_LAUNCH: (1, 1)}, NOT_BESIDE_A_GRAPH
        return {"ops": ops, "not_ops": not_ops, "kernels": self.kernels, "not_kernels": self.not_kernels}

    def language_model(
        self, weights, states, batches, optimizer: tuple[str, float], *, precision: str, device: str, **options
    ):
        """The row's models.torch_language_model.TorchLanguageModel; imports PyTorch.

        Args:
            weights, states, batches, optimizer, options: as there.
            precision: "fp32", "tf32", "fp16" or, on a CPU, "fp64".
            device: "cpu" or "cuda:0".
        """
        from models import torch_language_model, torch_stacks
        from models.weights import stack_size

        dtype = torch_language_model.COMPUTE_DTYPE[precision]
        stack = getattr(torch_stacks, self.stack)(weights, stack_size(weights)[0], dtype, device)
        captured = self.captured and device != "cpu"
        kind = torch_language_model.CapturedLanguageModel if captured else torch_language_model.TorchLanguageModel
        return kind(stack, weights, states, batches, optimizer, **options)


TORCH_LSTM_OP = r"aten::(lstm|_cudnn_rnn|mkldnn_rnn_layer)"
TORCH_CELL_OP = r"aten::(lstm_cell|_thnn_fused_lstm_cell)"
TORCH_SCRIPT = "forward"  # a scripted module's call; an eager one leaves no such mark
TORCH_COMPILED = r"## Call CompiledFxGraph.*"
TORCH_MATMUL = r"aten::(add)?mm"
GRAPH_LAUNCH = "cudaGraphLaunch"
NOT_BESIDE_A_GRAPH = rf"{TORCH_LSTM_OP}|{TORCH_CELL_OP}|{TORCH_MATMUL}|{TORCH_SCRIPT}|{TORCH_COMPILED}|aten::_fused_\w+"

TORCH_IMPLEMENTATIONS = {
    "torch_cells": TorchImplementation(
        "PyTorch: LSTM cell of primitive ops, unrolled, op by op",
        "PrimitiveStack",
        lambda layers, steps: {"aten::addmm": layers * steps},
        not_ops=f"{TORCH_LSTM_OP}|{TORCH_CELL_OP}|{TORCH_SCRIPT}|{TORCH_COMPILED}|{GRAPH_LAUNCH}",
        not_kernels=f"{CUDNN_KERNEL}|lstm_cell",
    ),
    "torch_jit": TorchImplementation(
        "PyTorch: LSTM cell of primitive ops, unrolled, under TorchScript",
        "ScriptedPrimitiveStack",
        lambda layers, steps: {TORCH_SCRIPT: (1, 1), TORCH_MATMUL: layers * steps},
        not_ops=f"{TORCH_LSTM_OP}|{TORCH_CELL_OP}|{TORCH_COMPILED}|{GRAPH_LAUNCH}",
        not_kernels=f"{CUDNN_KERNEL}|lstm_cell",
    ),
    "torch_static": TorchImplementation(
        "PyTorch: nn.LSTMCell unrolled, op by op",
        "StaticStack",
        lambda layers, steps: {"aten::lstm_cell": (layers * steps, layers * steps)},
        not_ops=f"{TORCH_LSTM_OP}|{TORCH_SCRIPT}|{TORCH_COMPILED}|{GRAPH_LAUNCH}",
        kernels="lstm_cell",
    ),
    "torch_static_jit": TorchImplementation(
        "PyTorch: nn.LSTMCell unrolled, under TorchScript",
        "ScriptedStaticStack",
        lambda layers, steps: {TORCH_SCRIPT: (1, 1), "aten::lstm_cell": (layers * steps, layers * steps)},
        not_ops=f"{TORCH_LSTM_OP}|{TORCH_COMPILED}|{GRAPH_LAUNCH}",
        kernels="lstm_cell",
    ),
    "torch_lstm": TorchImplementation(
        "PyTorch: nn.LSTM, the whole stack in one call",
        "LSTMStack",
        lambda layers, steps: {"aten::lstm": (1, 1)},
        not_ops=f"{TORCH_CELL_OP}|{TORCH_SCRIPT}|{TORCH_COMPILED}|{GRAPH_LAUNCH}",
        kernels=CUDNN_KERNEL,
        not_kernels="",
    ),
    "torch_lstm_graph": TorchImplementation(
        "PyTorch: nn.LSTM, the step in one CUDA graph, head and loss compiled",
        "CapturedLSTMStack",
        lambda layers, steps: {"aten::lstm": (1, 1), TORCH_COMPILED: 1},
        not_ops=f"{TORCH_CELL_OP}|{TORCH_SCRIPT}",
        kernels=CUDNN_KERNEL,
        not_kernels="",
        needs_gpu=True,
        captured=True,
    ),
    "torch_compile": TorchImplementation(
        "PyTorch: LSTM cell of primitive ops, unrolled, under torch.compile; on a GPU in one CUDA graph",
        "CompiledPrimitiveStack",
        lambda layers, steps: {TORCH_COMPILED: 1, TORCH_MATMUL: layers * steps},
        not_ops=rf"{TORCH_LSTM_OP}|{TORCH_CELL_OP}|{TORCH_SCRIPT}|aten::(sigmoid|tanh)",
        kernels="triton_",
        not_kernels=f"{CUDNN_KERNEL}|lstm_cell",
        captured=True,
    ),
}


def flops_of_modes(c, embedding: int) -> dict[str, int]:
    """Floating-point operations per batch of a language model's script, by mode; c: its constants."""
    whole, stack = (
        language_model_flops(c.BATCH_SIZE * c.TIME_STEPS, vocabulary, embedding, c.UNITS, c.NUM_LAYERS)
        for vocabulary in (c.VOCABULARY, 0)
    )
    return {"train": 3 * whole, "forward": whole, "stack": 3 * stack}


class JaxImplementation(NamedTuple):
    """A language model in JAX, or a Keras model on another backend than TensorFlow, by name.

    Attributes:
        what, needs_gpu: as in Implementation.
        model: (weights, states, batches, optimizer, dtype, **options) → the language model; imports its framework.
        evidence: (num_layers, time_steps, device) → the arguments of harness.proof.Kernel, as Implementation's. Names of ops are
            those of harness.jax_runtime, "loop:dot", or of harness.torch_runtime where `framework` is "torch".
        framework: in which the row runs.
        precisions: those that it has.
    """

    what: str
    model: Callable
    evidence: Callable[[int, int, str], dict[str, object]]
    framework: str = "jax"
    needs_gpu: bool = False
    precisions: tuple[str, ...] = ("fp32", "tf32", "fp16")

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
    from models import jax_language_model, jax_stacks
    from models.weights import stack_size

    stack = jax_stacks.ScanLSTM(weights, stack_size(weights)[0], dtype)
    return jax_language_model.JaxLanguageModel(stack, weights, states, batches, optimizer, **options)


def _jax_cudnn(weights, states, batches, optimizer, dtype, **options):
    from models import jax_language_model, jax_stacks
    from models.weights import stack_size

    has_dropout = options.get("keep_prob", 1.0) < 1
    stack = jax_stacks.CudnnLSTM(weights, stack_size(weights)[0], dtype, layer_by_layer=has_dropout)
    return jax_language_model.JaxLanguageModel(stack, weights, states, batches, optimizer, **options)


def _keras(backend: str, use_cudnn: bool | str) -> Callable:
    """The Keras model on a backend, which Keras has to be imported with."""

    def build(weights, states, batches, optimizer, dtype, **options):
        os.environ["KERAS_BACKEND"] = backend
        from models import keras_language_model

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
    return {"ops": {JAX_CUDNN: 1}, "not_ops": f"loop:{JAX_MATMUL}", "kernels": CUDNN_KERNEL}


def _keras_torch(num_layers: int, time_steps: int, device: str) -> dict[str, object]:
    if device == "gpu":
        return {"ops": {"aten::lstm": (num_layers, num_layers)}, "kernels": CUDNN_KERNEL}
    return {"ops": {TORCH_MATMUL: num_layers * time_steps}, "not_ops": TORCH_ANY_LSTM}


JAX_IMPLEMENTATIONS = {
    "jax_scan": JaxImplementation(
        "JAX: a lax.scan over time per layer, its backward pass written out; the whole step jitted",
        _jax_scan,
        _loops_of(unroll=10),  # models.jax_stacks.UNROLL
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
        lambda layers, steps, device: {**_calls_of_cudnn(layers, steps, device), "ops": {JAX_CUDNN: layers}},
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


class TorchFit(NamedTuple):
    """A PyTorch stack under models.torch_classifier's own training loop; members and methods as of FitImplementation."""

    made: TorchImplementation

    framework = "torch"

    @property
    def what(self) -> str:
        return self.made.what

    @property
    def needs_gpu(self) -> bool:
        return self.made.needs_gpu

    def evidence(self, num_layers: int, time_steps: int, device: str, steps: int) -> dict[str, object]:
        return _in_steps(self.made.evidence(num_layers, time_steps, device), self.framework, steps)

    def classifier(
        self, weights, inputs, labels, batch_size, optimizer, *, precision="fp32", device="cpu", lstm_dropout=(),
        dense_dropout=0.0, **options,
    ):  # fmt: skip
        """As of FitImplementation; imports PyTorch. Raises ValueError for rates that differ between the layers."""
        from models import torch_classifier, torch_stacks
        from models.torch_language_model import COMPUTE_DTYPE
        from models.weights import stack_size

        layers, _ = stack_size(weights)
        stack = getattr(torch_stacks, self.made.stack)(weights, layers, COMPUTE_DTYPE[precision], device)
        captured = self.made.captured and device != "cpu"
        kind = torch_classifier.CapturedClassifier if captured else torch_classifier.TorchClassifier
        rates = (*rates_of_stack(lstm_dropout, layers), dense_dropout)
        return kind(stack, weights, inputs, labels, batch_size, optimizer, rates=rates, **options)


class JaxFit(NamedTuple):
    """A JAX stack under models.jax_classifier's own training loop; members and methods as of FitImplementation.

    Attributes:
        made: the language model's row of that name.
        stack: (weights, num_layers, dtype, layer_by_layer) → a stack of models/jax_stacks.py; imports JAX. layer_by_layer:
            whether there is dropout between the layers.
    """

    made: JaxImplementation
    stack: Callable

    framework = "jax"

    @property
    def what(self) -> str:
        return self.made.what

    @property
    def needs_gpu(self) -> bool:
        return self.made.needs_gpu

    def evidence(self, num_layers: int, time_steps: int, device: str, steps: int) -> dict[str, object]:
        return _in_steps(self.made.evidence(num_layers, time_steps, device), self.framework, steps)

    def classifier(
        self, weights, inputs, labels, batch_size, optimizer, *, precision="fp32", device="", lstm_dropout=(),
        dense_dropout=0.0, **options,
    ):  # fmt: skip
        """As of FitImplementation; imports JAX. Raises ValueError for rates that differ between the layers, too."""
        _check_precision(self.what, precision, self.made)
        from models.jax_classifier import JaxClassifier
        from models.jax_language_model import COMPUTE_DTYPE
        from models.weights import stack_size

        layers, _ = stack_size(weights)
        rates = (*rates_of_stack(lstm_dropout, layers), dense_dropout)
        stack = self.stack(weights, layers, COMPUTE_DTYPE[precision], bool(rates[0]))
        return JaxClassifier(stack, weights, inputs, labels, batch_size, optimizer, rates=rates, **options)


def _scan_stack(weights, num_layers, dtype, layer_by_layer):
    from models.jax_stacks import ScanLSTM

    return ScanLSTM(weights, num_layers, dtype)


def _cudnn_stack(weights, num_layers, dtype, layer_by_layer):
    from models.jax_stacks import CudnnLSTM

    return CudnnLSTM(weights, num_layers, dtype, layer_by_layer=layer_by_layer)


def _in_steps(evidence: Mapping, framework: str, steps: int) -> dict[str, object]:
    """The evidence of one step for `steps` of them. PyTorch's profile counts launches, JAX' the ops of a program."""

    def times(count):
        return tuple(n * steps for n in count) if isinstance(count, tuple) else count * steps

    if framework != "torch":
        return dict(evidence)
    return {**evidence, "ops": {op: times(count) for op, count in evidence["ops"].items()}}


def _check_precision(what: str, precision: str, made: "JaxImplementation | None") -> None:
    if made and precision not in (*made.precisions, "fp64"):
        raise ValueError(f"{what}: has no {precision}, expected one of {', '.join(made.precisions)}")


def rates_of_stack(lstm_dropout: Sequence[float], num_layers: int) -> tuple[float, float]:
    """(rate between the layers, rate behind the last one) of rates behind each layer; ValueError where the former differ."""
    rates = (*lstm_dropout, *[0.0] * num_layers)[:num_layers]
    if len(set(rates[:-1])) > 1:
        raise ValueError(f"lstm_dropout: {list(lstm_dropout)} given, expected one rate between all layers of a stack")
    return (rates[0] if num_layers > 1 else 0.0), rates[-1]


def _keras_fit(name: str, what: str, use_cudnn: bool | str) -> FitImplementation:
    peer = JAX_IMPLEMENTATIONS[name]
    return FitImplementation(what, use_cudnn, "auto", peer.needs_gpu, peer)


PEER_FIT_IMPLEMENTATIONS = {
    **{name: TorchFit(made) for name, made in TORCH_IMPLEMENTATIONS.items()},
    "jax_scan": JaxFit(JAX_IMPLEMENTATIONS["jax_scan"], _scan_stack),
    "jax_cudnn": JaxFit(JAX_IMPLEMENTATIONS["jax_cudnn"], _cudnn_stack),
    "keras_jax": _keras_fit("keras_jax", "Keras on JAX: LSTM(use_cudnn=False), jitted", False),
    "keras_jax_cudnn": _keras_fit("keras_jax_cudnn", "Keras on JAX: LSTM(use_cudnn=True), jitted", True),
    "keras_torch": _keras_fit("keras_torch", "Keras on PyTorch: LSTM(), op by op (cuDNN on a GPU)", "auto"),
}


def language_model_flops(tokens: int, vocabulary: int, embedding: int, units: int, num_layers: int) -> int:
    """Floating-point operations of the matrix products of one forward pass; a training step takes three times as many."""
    inputs = [embedding] + [units] * (num_layers - 1)
    per_token = sum(2 * (i + units) * 4 * units for i in inputs) + 2 * units * vocabulary
    return tokens * per_token


def classifier_flops(
    sequences: int,
    time_steps: int,
    input_size: int,
    units: int,
    num_layers: int,
    dense: tuple[int, ...],
    directions: int = 1,
) -> int:
    """The same for a classifier; `dense` are the widths of its dense layers, the classes last."""
    inputs = [input_size] + [directions * units] * (num_layers - 1)
    per_step = directions * sum(2 * (i + units) * 4 * units for i in inputs)
    widths = [directions * units, *dense]
    return sequences * (time_steps * per_step + sum(2 * a * b for a, b in pairwise(widths)))
