"""Every row of the tables, by name: what it is, how it is built, and which ops must run when it does. Imports no framework.

LANGUAGE_MODEL are the rows of the language models, FIT those of the classifiers, which train whole. To add a row, write its
stack in the folder of its framework and name it here: every script whose tables take all rows then has it.

Ops are named as the runtimes of harness/frameworks name them: "MatMul" in a TensorFlow graph, "loop:MatMul" inside the body
of a while loop (once per layer at least, since a graph holds a body once), "eager:MatMul" run op by op, "xla:…" in what XLA
compiles, "aten::mm" in PyTorch, "dot" in a program of JAX. All are regular expressions: TensorFlow's graph optimizer renames
products (_FusedMatMul, …), so MATMUL takes all of them.
"""

import functools
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

PRECISIONS = ("fp32", "tf32", "fp16", "bf16")
WITHOUT_BF16 = PRECISIONS[:3]  # TensorFlow's cell ops have no bfloat16, and its op for cuDNN computes in float32 then
Expected = Callable[[int, int, str], dict[str, Any]]  # (num_layers, time_steps, "gpu" or "cpu") → arguments of Kernel
Counts = Callable[[int, int], Mapping[str, Any]]  # (num_layers, time_steps) → {op: least number, or (least, most)}


@dataclass(frozen=True)
class Row:
    """One implementation in one way to execute it.

    Attributes:
        what: one line for the tables.
        framework: "tensorflow", "torch" or "jax".
        factory: what `build` calls: "module.function", imported by the row's process alone.
        expected: (num_layers, time_steps, device) → what must run in a training step, and in a forward pass too.
        arguments: of the factory, besides those of `build`.
        ours: this suite's own implementation; the others are peers.
        needs_gpu: has no CPU version.
        precisions: those that the row has.
    """

    what: str
    framework: str
    factory: str
    expected: Expected
    arguments: Mapping[str, Any] = field(default_factory=dict)
    ours: bool = False
    needs_gpu: bool = False
    precisions: tuple[str, ...] = PRECISIONS

    def build(self, *arguments: Any, precision: str = "fp32", **options: Any) -> Any:
        """The row's model: arguments, options and methods are those of models/trial.py. Imports the framework.

        Args:
            precision: one of `precisions`, or "fp64", which tests on a CPU use.

        Raises:
            ValueError: a precision that the row does not have.
        """
        if precision not in (*self.precisions, "fp64"):
            raise ValueError(f"{self.what}: has no {precision}, expected one of {', '.join(self.precisions)}")
        return imported(self.factory)(*arguments, precision=precision, **self.arguments, **options)

    def expected_ops(self, num_layers: int, time_steps: int, device: str, steps: int = 1) -> dict[str, Any]:
        """What must run in `steps` training steps: the arguments of harness.measure.proof.Kernel.

        PyTorch's profile counts launches; the others' count the ops of a graph or program, however often it runs.
        """
        found = self.expected(num_layers, time_steps, device)
        # What stages the data of several steps are programs, and may have loops.
        if self.framework == "jax" and steps > 1:
            ops = {op: count for op, count in found["ops"].items() if op != JAX_PROGRAM}
            found = {**found, "ops": ops, "passes": {}}
        if self.framework != "torch":
            return found
        return _of_steps(found, steps)


def _of_steps(expected: Mapping[str, Any], steps: int) -> dict[str, Any]:
    """The same of so many steps."""
    counted = {key: expected[key] for key in ("ops", "train_ops", "passes") if key in expected}
    scaled = {key: {op: _times(steps, count) for op, count in own.items()} for key, own in counted.items()}
    return {**expected, **scaled}


def _times(steps: int, count: int | tuple[int, int]) -> int | tuple[int, ...]:
    return tuple(n * steps for n in count) if isinstance(count, tuple) else count * steps


def imported(path: str, **options: Any) -> Callable:
    """A function that calls what stands at "module.name" with these options too; the module is imported when it is called."""
    return functools.partial(_call, path, **options)


def _call(path: str, *arguments: Any, **options: Any) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)(*arguments, **options)


def ours(table: Mapping[str, Row]) -> list[str]:
    """Names of this suite's own rows among those of a table."""
    return [name for name, row in table.items() if row.ours]


def _ops(counts: Counts, not_ops: str, kernels: str = "", not_kernels: str = "", **rest: Any) -> Expected:
    """`expected` of a row that runs the same on every device."""
    found = {"not_ops": not_ops, "kernels": kernels, "not_kernels": not_kernels, **rest}
    return lambda num_layers, time_steps, device: {"ops": dict(counts(num_layers, time_steps)), **found}


# --- TensorFlow ---------------------------------------------------------------------------------------------------------

MATMUL = r"\w*MatMul"
CUDNN_KERNEL = r"elemWiseRNNcell|LSTM_elementWise|RNN_(blockP|p)ersist|cudnn\w*rnn"
BLOCK_KERNEL = r"lstm_gates"
PERSISTENT_KERNEL = r"lstm_(wavefront|cluster)_(forward|backward)"
CUDNN_OP = r"(\w+:)?CudnnRNN\w*"
LSTM_OP = r"(\w+:)?(CudnnRNN|\w*LSTM)\w*"  # any op that is an LSTM: a row of primitive ops may run none
WAVEFRONT_OP = r"xla:(loop:)?(BatchMatMulV2|Einsum)"  # products of all layers or of one, which no other row has
PTX_OP = r"xla:(loop:)?XlaCustomCallV2"
UPDATE_OP = r"Assign(Add|Sub)?VariableOp"  # of weights, the optimizer's variables and the metrics
_NO_EAGER_CELLS = r"eager:(MatMul|LSTMBlockCell)"  # a graph row may not run its cells op by op
_WAVEFRONT_NOT = f"{LSTM_OP}|loop:.*|{_NO_EAGER_CELLS}|{MATMUL}"


def _tensorflow(what: str, stack: str, expected: Expected, stack_options: Mapping = {}, *, ours: bool = False,
                needs_gpu: bool = False, precisions: tuple[str, ...] = PRECISIONS, **arguments: Any) -> Row:  # fmt: skip
    """stack: "module.Class" of models/tf; arguments: of models.tf.language_model.build."""
    arguments = {"stack": imported(f"models.tf.{stack}", **stack_options), **arguments}
    return Row(what, "tensorflow", "models.tf.language_model.build", expected, arguments, ours, needs_gpu, precisions)


def _passes(expected: Expected, op: str, forward: Callable[[int, int], int], training: int) -> Expected:
    """The same, with how often an op runs in a forward pass of the stack, and how many times that in a training step."""

    def bounded(num_layers: int, time_steps: int, device: str) -> dict[str, Any]:
        found = expected(num_layers, time_steps, device)
        times = forward(num_layers, time_steps)
        return {**found, "passes": {op: (times, training * times)}}

    return bounded


def _of_cudnn(counts: Counts, not_ops: str = f"loop:{MATMUL}", **rest: Any) -> Expected:
    return _ops(counts, not_ops, CUDNN_KERNEL, **rest)


def _once(times: int) -> tuple[int, int]:
    """So often in one pass over the stack, and not twice that."""
    return times, max(times, 2 * times - 1)


def _cells(num_layers: int, time_steps: int) -> int:
    return num_layers * time_steps


def _without_cudnn(counts: Counts, not_ops: str, kernels: str = "") -> Expected:
    return _ops(counts, not_ops, kernels, CUDNN_KERNEL)


TENSORFLOW = {
    "eager": _tensorflow(
        "LSTM cell of primitive ops, unrolled, op by op (TF eager)",
        "basic_cell.UnrolledLSTM",
        _passes(
            _without_cudnn(lambda layers, steps: {"eager:MatMul": layers * steps}, LSTM_OP), "eager:MatMul", _cells, 3
        ),
        eager=True,
    ),
    "unrolled": _tensorflow(
        "LSTM cell of primitive ops, unrolled into one graph",
        "basic_cell.UnrolledLSTM",
        _passes(
            _without_cudnn(lambda layers, steps: {MATMUL: layers * steps}, f"{LSTM_OP}|loop:.*|{_NO_EAGER_CELLS}"),
            MATMUL,
            _cells,
            3,
        ),
    ),
    "while_loop": _tensorflow(
        "LSTM cell of primitive ops in tf.while_loop (BasicLSTMCell)",
        "basic_cell.WhileLoopLSTM",
        _passes(
            _without_cudnn(lambda layers, steps: {f"loop:{MATMUL}": layers}, f"{LSTM_OP}|{_NO_EAGER_CELLS}"),
            f"loop:{MATMUL}",
            lambda layers, steps: layers,
            3,
        ),
    ),
    "static_eager": _tensorflow(
        "C++ cell op LSTMBlockCell, unrolled, op by op (TF eager)",
        "block_cell.StaticBlockLSTM",
        _without_cudnn(lambda layers, steps: {"eager:LSTMBlockCell": _once(layers * steps)}, CUDNN_OP, BLOCK_KERNEL),
        eager=True,
        precisions=WITHOUT_BF16,
    ),
    "static_graph": _tensorflow(
        "C++ cell op LSTMBlockCell, unrolled into one graph",
        "block_cell.StaticBlockLSTM",
        _without_cudnn(
            lambda layers, steps: {"LSTMBlockCell": _once(layers * steps)},
            f"{CUDNN_OP}|{_NO_EAGER_CELLS}",
            BLOCK_KERNEL,
        ),
        precisions=WITHOUT_BF16,
    ),
    "block_fused": _tensorflow(
        "BlockLSTMV2, one op per layer (LSTMBlockFusedCell)",
        "block_fused.FusedBlockLSTM",
        _without_cudnn(lambda layers, steps: {"BlockLSTMV2": _once(layers)}, CUDNN_OP, BLOCK_KERNEL),
        precisions=WITHOUT_BF16,
    ),
    "keras": _tensorflow(
        "keras.layers.LSTM(use_cudnn=False), without XLA: vanilla LSTM",
        "keras_lstm.KerasLSTM",
        _passes(  # a product of the inputs, and one of the state
            _without_cudnn(lambda layers, steps: {f"loop:{MATMUL}": layers}, LSTM_OP),
            f"loop:{MATMUL}",
            lambda layers, steps: 2 * layers,
            3,
        ),
        {"use_cudnn": False},
    ),
    "keras_xla": _tensorflow(
        "keras.layers.LSTM(use_cudnn=False), the whole step compiled by XLA",
        "keras_lstm.KerasLSTM",
        _passes(  # as of keras
            _without_cudnn(
                lambda layers, steps: {"xla": 1, f"xla:loop:{MATMUL}": 2 * layers},
                f"{_WAVEFRONT_NOT}|{WAVEFRONT_OP}|{PTX_OP}",
            ),
            f"xla:loop:{MATMUL}",
            lambda layers, steps: 2 * layers,
            3,
        ),
        {"use_cudnn": False},
        jit_compile=True,
        plain_head=True,
    ),
    "keras_cudnn_eager": _tensorflow(
        "keras.layers.LSTM(use_cudnn=True), op by op (TF eager)",
        "keras_lstm.KerasLSTM",
        _of_cudnn(lambda layers, steps: {"eager:CudnnRNNV3": _once(layers)}),
        {"use_cudnn": True},
        needs_gpu=True,
        precisions=WITHOUT_BF16,
        eager=True,
    ),
    "keras_cudnn": _tensorflow(
        "keras.layers.LSTM(use_cudnn=True), layer by layer: CuDNNLSTM today",
        "keras_lstm.KerasLSTM",
        _of_cudnn(lambda layers, steps: {"CudnnRNNV3": _once(layers)}),
        {"use_cudnn": True},
        needs_gpu=True,
        precisions=WITHOUT_BF16,
    ),
    "cudnn_stack": _tensorflow(
        "CudnnLSTM: the whole stack in one cuDNN call, time-major",
        "cudnn_stack.CudnnStack",
        _of_cudnn(lambda layers, steps: {"CudnnRNNV3": (1, 1)}, f"loop:{MATMUL}|xla"),
        ours=True,
        needs_gpu=True,
        precisions=WITHOUT_BF16,
        own_dropout=True,
    ),
    "cudnn_stack_xla": _tensorflow(
        "cudnn_stack, with dense layer, loss and optimizer compiled by XLA",
        "cudnn_stack.CudnnStack",
        _of_cudnn(lambda layers, steps: {"CudnnRNNV3": (1, 1)}, f"loop:{MATMUL}|{MATMUL}", rest_ops={"xla": 1}),
        ours=True,
        needs_gpu=True,
        precisions=WITHOUT_BF16,
        own_dropout=True,
        compile_rest=True,
    ),
    "wavefront": _tensorflow(
        "all layers together along the diagonal (wide ones, and all on a CPU, in turn), in TensorFlow, the whole step compiled "
        "by XLA",
        "wavefront_stack.WavefrontStack",
        _without_cudnn(lambda layers, steps: {"xla": 1, WAVEFRONT_OP: 1}, _WAVEFRONT_NOT),
        ours=True,
        jit_compile=True,
    ),
    "wavefront_persistent": _tensorflow(
        "the stack in persistent CUDA kernels called from XLA, its layers together along the diagonal or in turn; in training "
        "a large softmax in one kernel",
        "wavefront_stack.PersistentWavefrontStack",
        _without_cudnn(lambda layers, steps: {"xla": 1, PTX_OP: 1}, _WAVEFRONT_NOT, PERSISTENT_KERNEL),
        ours=True,
        needs_gpu=True,
        jit_compile=True,
        fused_loss=True,
    ),
}

# --- PyTorch ------------------------------------------------------------------------------------------------------------

TORCH_LSTM_OP = r"aten::(lstm|_cudnn_rnn|mkldnn_rnn_layer)"
TORCH_CELL_OP = r"aten::(lstm_cell|_thnn_fused_lstm_cell)"
CUDNN_RNN_OP = "lstm_benchmarks::_cudnn_rnn"  # of models/pytorch/cudnn_rnn.py
TORCH_SCRIPT = "forward"  # a scripted module's call; an eager one leaves no such mark
TORCH_COMPILED = r"## Call CompiledFxGraph.*"
TORCH_MATMUL = r"aten::(add)?mm"
TORCH_OPTIMIZER = r"aten::_fused_(adam|sgd)_"  # one call for all tensors
# One of each in a step, where torch.compile has not made others of them.
TORCH_LOSS = r"aten::nll_loss(2d)?_(forward|backward)"
KERAS_TORCH_UPDATE = "aten::_foreach_add_"  # Keras' optimizers on PyTorch: some calls for all tensors together
GRAPH_LAUNCH = "cudaGraphLaunch"
_INSIDE_A_GRAPH = rf"{TORCH_LSTM_OP}|{CUDNN_RNN_OP}\w*|{TORCH_CELL_OP}|{TORCH_MATMUL}|aten::_fused_\w+"
_NOT_BESIDE_A_GRAPH = rf"{_INSIDE_A_GRAPH}|{TORCH_SCRIPT}|{TORCH_COMPILED}"


def _torch(what: str, stack: str, expected: Expected, *, needs_gpu: bool = False, captured: bool = False) -> Row:
    """stack: a class of models/pytorch/stacks.py.

    captured: on a GPU a step is the replay of a CUDA graph, which shows one launch, its kernels, and none of its ops.
    """

    def of_device(num_layers: int, time_steps: int, device: str) -> dict[str, Any]:
        found = {**expected(num_layers, time_steps, device), "train_ops": {TORCH_OPTIMIZER: (1, 1), TORCH_LOSS: (0, 2)}}
        if captured and device == "gpu":
            found |= {"ops": {GRAPH_LAUNCH: (1, 1)}, "not_ops": _NOT_BESIDE_A_GRAPH, "train_ops": {}, "passes": {}}
        return found

    arguments = {"stack": imported(f"models.pytorch.stacks.{stack}"), "captured": captured}
    return Row(what, "torch", "models.pytorch.language_model.build", of_device, arguments, needs_gpu=needs_gpu)


PYTORCH = {
    "torch_cells": _torch(
        "PyTorch: LSTM cell of primitive ops, unrolled, op by op",
        "PrimitiveStack",
        _ops(
            lambda layers, steps: {"aten::addmm": _once(layers * steps)},
            f"{TORCH_LSTM_OP}|{TORCH_CELL_OP}|{TORCH_SCRIPT}|{TORCH_COMPILED}|{GRAPH_LAUNCH}",
            not_kernels=f"{CUDNN_KERNEL}|lstm_cell",
        ),
    ),
    "torch_jit": _torch(
        "PyTorch: LSTM cell of primitive ops, unrolled, under TorchScript",
        "ScriptedPrimitiveStack",
        _passes(
            _ops(
                lambda layers, steps: {TORCH_SCRIPT: (1, 1), TORCH_MATMUL: layers * steps},
                f"{TORCH_LSTM_OP}|{TORCH_CELL_OP}|{TORCH_COMPILED}|{GRAPH_LAUNCH}",
                not_kernels=f"{CUDNN_KERNEL}|lstm_cell",
            ),
            TORCH_MATMUL,
            _cells,
            3,
        ),
    ),
    "torch_static": _torch(
        "PyTorch: nn.LSTMCell unrolled, op by op",
        "StaticStack",
        _ops(
            lambda layers, steps: {"aten::lstm_cell": (layers * steps, layers * steps)},
            f"{TORCH_LSTM_OP}|{TORCH_SCRIPT}|{TORCH_COMPILED}|{GRAPH_LAUNCH}",
            "lstm_cell",
            CUDNN_KERNEL,
        ),
    ),
    "torch_static_jit": _torch(
        "PyTorch: nn.LSTMCell unrolled, under TorchScript",
        "ScriptedStaticStack",
        _ops(
            lambda layers, steps: {TORCH_SCRIPT: (1, 1), "aten::lstm_cell": (layers * steps, layers * steps)},
            f"{TORCH_LSTM_OP}|{TORCH_COMPILED}|{GRAPH_LAUNCH}",
            "lstm_cell",
            CUDNN_KERNEL,
        ),
    ),
    "torch_lstm": _torch(
        "PyTorch: nn.LSTM, the whole stack in one call",
        "LSTMStack",
        _ops(
            lambda layers, steps: {"aten::lstm": (1, 1)},
            f"{TORCH_CELL_OP}|{TORCH_SCRIPT}|{TORCH_COMPILED}|{GRAPH_LAUNCH}",
            CUDNN_KERNEL,
        ),
    ),
    "torch_lstm_graph": _torch(
        "PyTorch: nn.LSTM, the step in one CUDA graph, head and loss compiled",
        "CapturedLSTMStack",
        _ops(
            lambda layers, steps: {"aten::lstm": (1, 1), TORCH_COMPILED: 1},
            f"{TORCH_CELL_OP}|{TORCH_SCRIPT}",
            CUDNN_KERNEL,
            rest_kernels="triton_",  # what torch.compile made of dense layer and loss
        ),
        needs_gpu=True,
        captured=True,
    ),
    "cudnn_best": _torch(
        "PyTorch: cuDNN's RNN functions called directly, by the fastest of its algorithms, the step as torch_lstm_graph's",
        "CudnnStack",
        # Its own ops in a step that is not captured; on a GPU the graph is, and cuDNN's kernels in it.
        _ops(lambda layers, steps: {CUDNN_RNN_OP: (1, 1)}, TORCH_LSTM_OP, CUDNN_KERNEL, rest_kernels="triton_"),
        needs_gpu=True,
        captured=True,
    ),
    "torch_compile": _torch(
        "PyTorch: LSTM cell of primitive ops, unrolled, some steps at a time under torch.compile; on a GPU all in one CUDA graph",
        "CompiledPrimitiveStack",
        _passes(
            _ops(
                lambda layers, steps: {TORCH_COMPILED: 1, TORCH_MATMUL: layers * steps},
                rf"{TORCH_LSTM_OP}|{TORCH_CELL_OP}|{TORCH_SCRIPT}|aten::(sigmoid|tanh)",
                "triton_",
                rf"{CUDNN_KERNEL}|lstm_cell|(sigmoid|tanh)(_backward)?_kernel_cuda",
            ),
            TORCH_MATMUL,
            _cells,
            3,
        ),
        captured=True,
    ),
}

# --- JAX, and Keras on JAX and on PyTorch -------------------------------------------------------------------------------

JAX_PROGRAM = "program"  # a jitted function's call; an op outside of one is another
JAX_MATMUL = r"(dot|custom-call:__(cublas|onednn)\S*)"
JAX_CUDNN = r"(loop:)?custom-call:\S*cudnn\S*rnn\S*"


def _loops(unroll: int, forward: int, training: int) -> Expected:
    """A loop per layer with products in it; where a GPU's program has all steps written out, products alone.

    forward, training: products that the loops of one layer hold in a forward pass and in a training step on a CPU. On a GPU XLA
    writes out as many steps as it likes: there the count of kernels is held to the record's.
    """

    def expected(num_layers: int, time_steps: int, device: str) -> dict[str, Any]:
        ops = {"while": num_layers, f"loop:{JAX_MATMUL}": num_layers}
        passes = {f"loop:{JAX_MATMUL}": (forward * num_layers, training * num_layers)}
        if device == "gpu":
            passes = {}
            ops = {JAX_MATMUL: num_layers * time_steps} if time_steps <= unroll else ops
        if time_steps == 1:  # a loop of one step is none
            ops, passes = {JAX_MATMUL: num_layers}, {}
        ops[JAX_PROGRAM] = (1, 1) if device == "cpu" else 1
        return {"ops": ops, "passes": passes, "not_ops": JAX_CUDNN, "not_kernels": CUDNN_KERNEL}

    return expected


def _calls_of_cudnn(of_each_layer: bool) -> Expected:
    """One call for each layer, or one at least for the stack; each layer copies the sequences' lengths to the host."""
    return lambda num_layers, time_steps, device: {
        "ops": {JAX_CUDNN: num_layers if of_each_layer else 1},
        "not_ops": f"loop:{JAX_MATMUL}",
        "kernels": CUDNN_KERNEL,
        "calls_copying_lengths": num_layers,
    }


def _keras_torch(num_layers: int, time_steps: int, device: str) -> dict[str, Any]:
    train_ops = {KERAS_TORCH_UPDATE: (1, 10), TORCH_LOSS: (0, 2)}
    if device == "gpu":
        return {"ops": {"aten::lstm": (num_layers, num_layers)}, "kernels": CUDNN_KERNEL, "train_ops": train_ops}
    products = num_layers * time_steps
    return {
        "ops": {TORCH_MATMUL: products},
        "passes": {TORCH_MATMUL: (products, 3 * products)},
        "not_ops": f"{TORCH_LSTM_OP}|{TORCH_CELL_OP}",
        "train_ops": train_ops,
    }


def _jax(what: str, stack: str, expected: Expected, **rest: Any) -> Row:
    """stack: a class of models/jax/stacks.py."""
    arguments = {"stack": imported(f"models.jax.stacks.{stack}")}
    return Row(what, "jax", "models.jax.language_model.build", expected, arguments, **rest)


def _keras(what: str, backend: str, use_cudnn: bool | str, expected: Expected, **rest: Any) -> Row:
    arguments = {"backend": backend, "use_cudnn": use_cudnn}
    return Row(what, backend, "models.keras.build.language_model", expected, arguments, **rest)


JAX = {
    "jax_scan": _jax(
        "JAX: a lax.scan over time per layer, its backward pass written out; the whole step jitted",
        "ScanLSTM",
        _loops(unroll=10, forward=1, training=2),  # models.jax.stacks.UNROLL
    ),
    "jax_cudnn": _jax(
        "JAX: jax.experimental.rnn.lstm (cuDNN), the whole stack in one call; with dropout layer by layer",
        "CudnnLSTM",
        _calls_of_cudnn(of_each_layer=False),
        needs_gpu=True,
        precisions=("fp32", "tf32"),
    ),
}
KERAS = {
    "keras_jax": _keras(
        "Keras on JAX: keras.layers.LSTM(use_cudnn=False), the whole step jitted",
        "jax",
        False,
        _loops(unroll=1, forward=2, training=6),
    ),
    "keras_jax_cudnn": _keras(
        "Keras on JAX: keras.layers.LSTM(use_cudnn=True), layer by layer, the whole step jitted",
        "jax",
        True,
        _calls_of_cudnn(of_each_layer=True),
        needs_gpu=True,
        precisions=("fp32", "tf32"),  # at fp16 Keras' call of cuDNN fails when it is compiled
    ),
    "keras_torch": _keras(
        "Keras on PyTorch: keras.layers.LSTM, op by op (cuDNN, layer by layer, on a GPU)", "torch", "auto", _keras_torch
    ),
}

LANGUAGE_MODEL: dict[str, Row] = TENSORFLOW | PYTORCH | JAX | KERAS

# --- several replicas that train one batch together --------------------------------------------------------------------

COLLECTIVE_REDUCE = r"(\w+:)*CollectiveReduceV[23]"
JAX_ALL_REDUCE = r"(loop:)?all-reduce(-start)?"
TORCH_ALL_REDUCE = r"c10d::allreduce_|gloo:all_reduce|nccl:all_reduce|ncclDevKernel_AllReduce\w*"


@dataclass(frozen=True)
class ReplicatedRow:
    """A row that trains on several devices; on one it is the row `single`.

    Attributes:
        what: one line for the tables.
        single: of LANGUAGE_MODEL.
        factory: as of Row; it takes `group` and `replicas` besides, and the arguments of the single row's that it names.
        collective: the op that has to run in a step on a CPU, once for each replica of a process whose ops are counted.
        one_process: one process has all devices, instead of one each.
        environment: what is added to these variables of each of several processes on GPUs.
    """

    what: str
    single: str
    factory: str
    collective: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    one_process: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def row(self) -> Row:
        return LANGUAGE_MODEL[self.single]

    def build(self, *arguments: Any, group: Any, replicas: int, **options: Any) -> Any:
        """The row's model; arguments and options as of Row.build, of the whole batch."""
        if replicas == 1:
            return self.row.build(*arguments, **options)
        given = {**self.row.arguments, **self.arguments, "group": group, "replicas": replicas}
        return imported(self.factory)(*arguments, **given, **options)

    def expected_ops(self, num_layers: int, time_steps: int, device: str, replicas: int) -> dict[str, Any]:
        """What must run in one step of one process: the arguments of harness.measure.proof.Kernel."""
        found = self.row.expected_ops(num_layers, time_steps, device)
        if replicas == 1:
            return found
        if device == "cpu":  # on a GPU its kernels are looked for (harness/measure/replicas.py)
            found = {**found, "train_ops": {**found.get("train_ops", {}), self.collective: 1}}
        # A graph of TensorFlow has every replica's ops; JAX compiles one program, which runs on every device.
        return _of_steps(found, replicas) if self.one_process and self.row.framework == "tensorflow" else found


def _of_strategy(what: str, single: str, strategy: str, **rest: Any) -> ReplicatedRow:
    arguments = {"strategy": strategy, **rest.pop("arguments", {})}
    return ReplicatedRow(what, single, "models.tf.replicas.build", COLLECTIVE_REDUCE, arguments, **rest)


# Each process compiles for itself. Where XLA chooses by times which of its generators makes a fusion, sums of a gradient's norm
# may be taken in another order on another GPU, and the weights come to differ.
UNTUNED = "--xla_gpu_experimental_enable_fusion_autotuner=false"


def _of_bucket(single: str) -> ReplicatedRow:
    what = (
        "a process for each, gradients added up inside the step; on GPUs all of it, NCCL included, is one XLA program"
    )
    return _of_strategy(
        f"{single}, {what}", single, "multi_worker", arguments={"bucket": True}, environment={"XLA_FLAGS": UNTUNED}
    )


def _of_torch(what: str, single: str, **rest: Any) -> ReplicatedRow:
    return ReplicatedRow(what, single, "models.pytorch.replicas.build", TORCH_ALL_REDUCE, **rest)


_MIRRORED, _WORKERS = "MirroredStrategy", "MultiWorkerMirroredStrategy, a process for each"
_RECIPE = "MirroredStrategy, forward and backward pass compiled: the recipe of docs/several-gpus.md"
REPLICATED: dict[str, ReplicatedRow] = {
    "keras_mirrored": _of_strategy(
        f"keras.layers.LSTM(use_cudnn=False), {_MIRRORED}", "keras", "mirrored", one_process=True
    ),
    "keras_workers": _of_strategy(f"keras.layers.LSTM(use_cudnn=False), {_WORKERS}", "keras", "multi_worker"),
    "keras_cudnn_mirrored": _of_strategy(
        f"keras.layers.LSTM(use_cudnn=True), {_MIRRORED}", "keras_cudnn", "mirrored", one_process=True
    ),
    "keras_cudnn_workers": _of_strategy(
        f"keras.layers.LSTM(use_cudnn=True), {_WORKERS}", "keras_cudnn", "multi_worker"
    ),
    "wavefront_mirrored": _of_strategy(f"wavefront, {_RECIPE}", "wavefront", "mirrored", one_process=True),
    "wavefront_persistent_mirrored": _of_strategy(
        f"wavefront_persistent, {_RECIPE}", "wavefront_persistent", "mirrored", one_process=True
    ),
    "wavefront_workers": _of_bucket("wavefront"),
    "wavefront_persistent_workers": _of_bucket("wavefront_persistent"),
    "torch_ddp": _of_torch("PyTorch: nn.LSTM, DistributedDataParallel", "torch_lstm"),
    "torch_bucket": _of_torch(
        "PyTorch: nn.LSTM, all gradients added up in one tensor, op by op", "torch_lstm", arguments={"bucket": True}
    ),
    "torch_bucket_graph": _of_torch(
        "PyTorch: nn.LSTM, all gradients added up in one tensor, the step with NCCL in one CUDA graph",
        "torch_lstm_graph",
        arguments={"bucket": True},
    ),
    "jax_sharded": ReplicatedRow(
        "JAX: jax_scan in shard_map, all gradients added up by one psum, the whole step jitted",
        "jax_scan",
        "models.jax.replicas.build",
        JAX_ALL_REDUCE,
        one_process=True,
    ),
    "keras_jax_parallel": ReplicatedRow(
        "Keras on JAX: keras.layers.LSTM(use_cudnn=False), keras.distribution.DataParallel, the whole step jitted",
        "keras_jax",
        "models.keras.build.language_model",
        JAX_ALL_REDUCE,
        one_process=True,
    ),
}

# --- whole trainings: Keras' `fit`, and the peers' own loops ------------------------------------------------------------

STEPS_PER_EXECUTION = 50  # of `wavefront`, whose steps TensorFlow's executor runs
STEPS_PER_LOOP = 375  # of the rows in a CompiledLoop: a fifth of MNIST's 1875, so that a call's own cost hardly counts

_KERAS_LOOP = _without_cudnn(lambda layers, steps: {f"loop:{MATMUL}": layers}, f"{CUDNN_OP}|xla")
_KERAS_CUDNN = _of_cudnn(lambda layers, steps: {"CudnnRNNV3": layers}, f"xla|loop:{MATMUL}")
_CUDNN_STACK = _of_cudnn(lambda layers, steps: {"CudnnRNNV3": (1, 1)}, f"xla|loop:{MATMUL}")


def _by_device(gpu: Expected, cpu: Expected) -> Expected:
    return lambda num_layers, time_steps, device: (gpu if device == "gpu" else cpu)(num_layers, time_steps, device)


def _compiled_loop(op: str, least: int, kernels: str = "") -> Expected:
    """One loop around all steps, which runs once, however many they are; no update outside of it."""
    ops = {"xla": 1, "xla:While": (1, 1), f"xla:loop:{UPDATE_OP}": 1, op: least}
    return _without_cudnn(lambda layers, steps: ops, f"{CUDNN_OP}|xla:{UPDATE_OP}", kernels)


def _fit(what: str, use_cudnn: bool | str, jit_compile: bool | str, expected: Expected, *, ours: bool = False,
         needs_gpu: bool = False, precisions: tuple[str, ...] = PRECISIONS, **arguments: Any) -> Row:  # fmt: skip
    """A Keras model on TensorFlow; arguments: of models.keras.classifier.build_classifier."""
    arguments = {"backend": "tensorflow", "use_cudnn": use_cudnn, "jit_compile": jit_compile, **arguments}
    return Row(what, "tensorflow", "models.keras.build.classifier", expected, arguments, ours, needs_gpu, precisions)


FIT_TENSORFLOW = {
    "keras": _fit("LSTM(use_cudnn=False), jit_compile=False: vanilla LSTM", False, False, _KERAS_LOOP),
    "keras_cudnn": _fit(
        "LSTM(use_cudnn=True): CuDNNLSTM today", True, False, _KERAS_CUDNN, needs_gpu=True, precisions=WITHOUT_BF16
    ),
    "keras_xla": _fit(
        "LSTM(use_cudnn=False), jit_compile=True",
        False,
        True,
        _without_cudnn(
            lambda layers, steps: {"xla": 1, f"xla:loop:{MATMUL}": layers},
            f"{CUDNN_OP}|{WAVEFRONT_OP}|{PTX_OP}|xla:loop:{UPDATE_OP}",
        ),
    ),
    "keras_default": _fit(
        "LSTM(), nothing set: what a user gets", "auto", "auto", _by_device(_KERAS_CUDNN, _KERAS_LOOP)
    ),
    "cudnn_stack": _fit(
        "CudnnLSTMLayer: the whole stack in one cuDNN call",
        "stack",
        False,
        _by_device(_CUDNN_STACK, _KERAS_LOOP),
        ours=True,
        needs_gpu=True,
        precisions=WITHOUT_BF16,
    ),
    "wavefront": _fit(
        f"WavefrontLSTM, jit_compile=True, steps_per_execution={STEPS_PER_EXECUTION}",
        "wavefront",
        True,
        # Keras' own loop is outside of XLA
        _without_cudnn(lambda layers, steps: {"xla": 1, WAVEFRONT_OP: 1}, f"{CUDNN_OP}|xla:While"),
        ours=True,
        steps_per_execution=STEPS_PER_EXECUTION,
    ),
    "wavefront_loop": _fit(
        f"WavefrontLSTM in a CompiledLoop: up to {STEPS_PER_LOOP} steps in one XLA program (steps_per_execution)",
        "wavefront",
        True,
        _compiled_loop(WAVEFRONT_OP, 1),
        ours=True,
        steps_per_execution=STEPS_PER_LOOP,
        compiled_loop=True,
    ),
    "wavefront_persistent": _fit(
        "wavefront_loop with implementation='persistent': its layers in CUDA kernels called from XLA",
        "persistent",
        True,
        _compiled_loop(PTX_OP, 2, PERSISTENT_KERNEL),
        ours=True,
        needs_gpu=True,
        steps_per_execution=STEPS_PER_LOOP,
        compiled_loop=True,
    ),
}


def _keras_fit(name: str, what: str, **more: Any) -> Row:
    arguments = {**KERAS[name].arguments, "jit_compile": "auto", **more}
    return replace(KERAS[name], what=what, factory="models.keras.build.classifier", arguments=arguments)


def _scanned(num_layers: int, time_steps: int, device: str) -> dict[str, Any]:
    """One loop around all steps; the LSTMs' loops are in it, or, of one time step, products alone."""
    loops = {"loop:while": num_layers} if time_steps > 1 else {}
    ops = {"while": 1, **loops, f"loop:{JAX_MATMUL}": num_layers}
    return {"ops": ops, "not_ops": JAX_CUDNN, "not_kernels": CUDNN_KERNEL}


# Keras has steps_per_execution as one lax.scan on JAX since https://github.com/keras-team/keras/pull/23527, after 3.15.1.
KERAS_NIGHTLY = "keras-nightly"  # folder in JAX' environment, of requirements-jax-keras-nightly.txt
KERAS_JAX_LOOP = replace(
    _keras_fit(
        "keras_jax",
        f"Keras on JAX: up to {STEPS_PER_LOOP} steps in one lax.scan (steps_per_execution), by Keras' nightly",
        scan=STEPS_PER_LOOP,
        keras_folder=KERAS_NIGHTLY,
    ),
    expected=_scanned,
)

FIT: dict[str, Row] = {
    **FIT_TENSORFLOW,
    **{name: replace(row, factory="models.pytorch.classifier.build") for name, row in PYTORCH.items()},
    **{name: replace(row, factory="models.jax.classifier.build") for name, row in JAX.items()},
    "keras_jax": _keras_fit("keras_jax", "Keras on JAX: LSTM(use_cudnn=False), jitted"),
    "keras_jax_loop": KERAS_JAX_LOOP,
    "keras_jax_cudnn": _keras_fit("keras_jax_cudnn", "Keras on JAX: LSTM(use_cudnn=True), jitted"),
    "keras_torch": _keras_fit("keras_torch", "Keras on PyTorch: LSTM(), op by op (cuDNN on a GPU)"),
}

# --- servers: one request after the other, from the host to the host ----------------------------------------------------

FLOAT32 = PRECISIONS[:2]
_EAGER_KERAS = _without_cudnn(lambda layers, steps: {"eager:MatMul": layers * steps}, LSTM_OP)
_EAGER_CUDNN = TENSORFLOW["keras_cudnn_eager"].expected


def _keras_server(what: str, call: str, expected: Expected, use_cudnn: bool | str = "auto", **rest: Any) -> Row:
    """A Keras model on TensorFlow; call: of models.tf.serving.KerasServer."""
    arguments = {"call": call, "use_cudnn": use_cudnn}
    return Row(what, "tensorflow", "models.tf.serving.build", expected, arguments, precisions=FLOAT32, **rest)


def _server(what: str, row: str, **arguments: Any) -> Row:
    """The stack of a row of LANGUAGE_MODEL as a server."""
    own, folder = LANGUAGE_MODEL[row], {"tensorflow": "tf", "torch": "pytorch", "jax": "jax"}
    factory = f"models.{folder[own.framework]}.serving.build"
    arguments = {"stack": own.arguments["stack"], **arguments}
    needs_gpu = own.needs_gpu or "captured" in arguments
    return replace(own, what=what, factory=factory, arguments=arguments, precisions=FLOAT32, needs_gpu=needs_gpu)


def _onnx_server(what: str, runtime: str, op: str) -> Row:
    """runtime: of models.onnx.serving; it runs in the environment of TensorFlow's rows, on the CPU alone."""
    expected = _ops(lambda layers, steps: {op: (layers, layers)}, MATMUL)
    return Row(what, "tensorflow", "models.onnx.serving.build", expected, {"runtime": runtime}, precisions=("fp32",))


def _graph_of_stack(num_layers: int, time_steps: int, device: str) -> dict[str, Any]:
    return {"ops": {GRAPH_LAUNCH: (1, 1)}, "not_ops": _NOT_BESIDE_A_GRAPH, "kernels": CUDNN_KERNEL}


_BY_CUDNN = _by_device(_of_cudnn(lambda layers, steps: {"CudnnRNNV3": _once(layers)}), TENSORFLOW["keras"].expected)
SERVERS: dict[str, Row] = {
    "keras_predict": _keras_server("Keras: model.predict of a request; cuDNN on a GPU", "predict", _BY_CUDNN),
    "keras_predict_on_batch": _keras_server(
        "Keras: model.predict_on_batch; cuDNN on a GPU", "predict_on_batch", _BY_CUDNN
    ),
    "keras_call": _keras_server(
        "Keras: model(request), op by op; cuDNN on a GPU", "call", _by_device(_EAGER_CUDNN, _EAGER_KERAS)
    ),
    "keras_function": _keras_server("Keras: the model in a tf.function; cuDNN on a GPU", "function", _BY_CUDNN),
    "keras_xla": _keras_server(
        "Keras: the model in a tf.function(jit_compile=True), use_cudnn=False", "xla", FIT["keras_xla"].expected, False
    ),
    "cudnn_stack": _server("CudnnLSTM in a tf.function: the stack in one cuDNN call", "cudnn_stack"),
    "wavefront": _server("WavefrontLSTM's stack under XLA", "wavefront", jit_compile=True),
    "wavefront_persistent": _server(
        "WavefrontLSTM's stack in a persistent CUDA kernel, called from XLA", "wavefront_persistent", jit_compile=True
    ),
    "torch_lstm": _server("PyTorch: nn.LSTM, op by op (cuDNN on a GPU)", "torch_lstm"),
    "torch_lstm_graph": replace(
        _server("PyTorch: nn.LSTM in a CUDA graph, between pinned buffers", "torch_lstm", captured=True),
        expected=_graph_of_stack,
    ),
    "torch_compile": replace(
        _server(
            "PyTorch: LSTM cell of primitive ops, unrolled, under torch.compile; on a GPU in one CUDA graph",
            "torch_cells",
            compiled=True,
        ),
        expected=LANGUAGE_MODEL["torch_compile"].expected,
    ),
    "jax_scan": _server("JAX: a lax.scan over time per layer, jitted", "jax_scan"),
    "jax_cudnn": _server("JAX: jax.experimental.rnn.lstm (cuDNN), jitted", "jax_cudnn"),
    "onnxruntime": _onnx_server("ONNX Runtime: the stack as an ONNX model, on the CPU", "onnxruntime", "LSTM"),
    "openvino": _onnx_server("OpenVINO: the same ONNX model, on the CPU", "openvino", r"LSTM(Sequence|Cell)"),
}
