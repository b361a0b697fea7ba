"""The language model's rows of PyTorch, by name: how each is built, and what can be seen when it really runs. Imports no PyTorch.

The counterpart of models/tf/stacks.py. Ops are named as harness.frameworks.pytorch names them.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from models.tf.stacks import CUDNN_KERNEL, PRECISIONS


class TorchImplementation(NamedTuple):
    """A stack of PyTorch by name, with the language model around it.

    Attributes:
        what, not_ops, kernels, not_kernels, needs_gpu: as in Implementation.
        stack: a class of models/pytorch/stacks.py.
        ops: (num_layers, time_steps) → {op: launches in one step}, under the names of harness.frameworks.pytorch: "aten::lstm".
        rest_kernels: regular expression of a GPU kernel that has to run in what is not the stack.
        captured: whether on a GPU a step is the replay of a CUDA graph, which shows its kernels but none of its ops.
    """

    what: str
    stack: str
    ops: Callable[[int, int], Mapping[str, int | tuple[int, int]]]
    not_ops: str
    kernels: str = ""
    not_kernels: str = CUDNN_KERNEL
    rest_kernels: str = ""
    needs_gpu: bool = False
    captured: bool = False

    framework = "torch"
    precisions = PRECISIONS

    def evidence(self, num_layers: int, time_steps: int, device: str) -> dict[str, object]:
        """As of Implementation. A captured step on a "gpu" shows one launch, and none of the ops that it holds."""
        ops, not_ops = dict(self.ops(num_layers, time_steps)), self.not_ops
        if self.captured and device == "gpu":
            ops, not_ops = {GRAPH_LAUNCH: (1, 1)}, NOT_BESIDE_A_GRAPH
        return {
            "ops": ops,
            "not_ops": not_ops,
            "kernels": self.kernels,
            "not_kernels": self.not_kernels,
            "rest_kernels": self.rest_kernels,
        }

    def language_model(
        self, weights, states, batches, optimizer: tuple[str, float], *, precision: str, device: str, **options
    ):
        """The row's models.pytorch.language_model.TorchLanguageModel; imports PyTorch.

        Args:
            weights, states, batches, optimizer, options: as there.
            precision: "fp32", "tf32", "fp16" or, on a CPU, "fp64".
            device: "cpu" or "cuda:0".
        """
        from models.pytorch import language_model as torch_language_model
        from models.pytorch import stacks
        from models.weights.canonical import stack_size

        dtype = torch_language_model.COMPUTE_DTYPE[precision]
        stack = getattr(stacks, self.stack)(weights, stack_size(weights)[0], dtype, device)
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
        rest_kernels="triton_",  # what torch.compile made of dense layer and loss
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
