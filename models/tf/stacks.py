"""The language model's rows of TensorFlow, by name: how each is built, and what can be seen when it really runs.

The names are those of the tables' rows. `ops` are what one step shows at least, as regular expressions of op types; ops
inside a while loop's body stand as "loop:MatMul" (once per layer at least, since a graph holds a body once), those run
eagerly as "eager:MatMul". The graph optimizer renames products (_FusedMatMul, …), so MATMUL takes all of them.
"""

import importlib
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import NamedTuple

PRECISIONS = ("fp32", "tf32", "fp16")
MATMUL = r"\w*MatMul"
CUDNN_KERNEL = r"elemWiseRNNcell|LSTM_elementWise|RNN_(blockP|p)ersist|cudnn\w*rnn"
BLOCK_KERNEL = r"lstm_gates"
CUDNN_OP = r"(\w+:)?CudnnRNN\w*"
WAVEFRONT_OP = r"xla:(loop:)?BatchMatMulV2"  # the product of all layers, which no other row has
PTX_OP = r"xla:(loop:)?XlaCustomCallV2"
PERSISTENT_KERNEL = r"lstm_wavefront_(forward|backward)"
LSTM_OP = r"(\w+:)?(CudnnRNN|\w*LSTM)\w*"  # any op that is an LSTM: a row of primitive ops may run none


class Implementation(NamedTuple):
    """A stack by name.

    Attributes:
        what: one line for a table.
        stack: (weights, num_layers, dtype) → models.tf.stack.Stack; imports TensorFlow when it is called.
        ops: (num_layers, time_steps) → {op: launches in one step, at least; or the pair of least and most}.
        not_ops: regular expression of ops that must not run.
        kernels, not_kernels: regular expressions of GPU kernels, one of which must run, and none of which may.
        eager: run op by op.
        needs_gpu: has no CPU version.
        own_dropout: `stack` takes a further argument, the rate of the dropout between its layers.
        compile_rest: XLA compiles the rest of the language model (models.tf.language_model.LanguageModel).
        rest_ops: launches, at least, in what is not the stack.
        jit_compile: XLA compiles each step as a whole.
        fused_loss: in training, a large softmax in one CUDA kernel (models/wavefront/softmax.py).
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
    jit_compile: bool = False
    fused_loss: bool = False

    framework = "tensorflow"
    precisions = PRECISIONS

    def evidence(self, num_layers: int, time_steps: int, device: str) -> dict[str, object]:
        """What has to be seen running: the arguments of harness.measure.proof.Kernel. device: "gpu" or "cpu", here alike."""
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
        """The row's models.tf.language_model.LanguageModel; imports TensorFlow.

        Args:
            weights, states, batches, options: as there.
            optimizer: ("SGD" or "Adam", learning rate): Keras' own.
            precision: "fp32", "tf32" or "fp16".
            device: TensorFlow finds it by itself.
        """
        import keras

        from models.tf.language_model import COMPUTE_DTYPE, LanguageModel
        from models.weights.canonical import stack_size

        kind, learning_rate = optimizer
        dropout = {"dropout": 1.0 - options.get("keep_prob", 1.0)} if self.own_dropout else {}
        stack = self.stack(weights, stack_size(weights)[0], COMPUTE_DTYPE[precision], **dropout)
        made = {"SGD": keras.optimizers.SGD, "Adam": keras.optimizers.Adam}[kind](learning_rate)
        options |= {"eager": self.eager, "compile_rest": self.compile_rest, "jit_compile": self.jit_compile}
        options["fused_loss"] = self.fused_loss
        return LanguageModel(stack, weights, states, batches, made, **options)


def _stack(name: str, **options) -> Callable:
    """The constructor of a stack, "module.Class" of this folder; TensorFlow is imported when it is called."""
    module, kind = name.split(".")

    def build(*arguments, **keywords):
        return getattr(importlib.import_module(f"models.tf.{module}"), kind)(*arguments, **options, **keywords)

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
    "wavefront": Implementation(
        "all layers advance together along the diagonal, in TensorFlow, the whole step compiled by XLA",
        _stack("wavefront_stack.WavefrontStack"),
        lambda layers, steps: {"xla": 1, WAVEFRONT_OP: 1},
        not_ops=f"{LSTM_OP}|loop:.*|{_NO_EAGER_CELLS}|{MATMUL}",
        jit_compile=True,
    ),
    "wavefront_persistent": Implementation(
        "the stack in persistent CUDA kernels called from XLA, its layers together along the diagonal or in turn; in training "
        "a large softmax in one kernel",
        _stack("wavefront_stack.PersistentWavefrontStack"),
        lambda layers, steps: {"xla": 1, PTX_OP: 1},
        not_ops=f"{LSTM_OP}|loop:.*|{_NO_EAGER_CELLS}|{MATMUL}",
        kernels=PERSISTENT_KERNEL,
        needs_gpu=True,
        jit_compile=True,
        fused_loss=True,
    ),
}


def flops_of_modes(c, embedding: int) -> dict[str, int]:
    """Floating-point operations per batch of a language model's script, by mode, in the order in which they run.

    Forward comes first: the others' proofs call it, and its first call would no longer be one.

    Args:
        c: the script's constants.
        embedding: width of the embedding.
    """
    whole, stack = (
        language_model_flops(c.BATCH_SIZE * c.TIME_STEPS, vocabulary, embedding, c.UNITS, c.NUM_LAYERS)
        for vocabulary in (c.VOCABULARY, 0)
    )
    return {"forward": whole, "train": 3 * whole, "stack": 3 * stack}


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
