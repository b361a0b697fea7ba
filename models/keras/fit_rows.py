"""The classifier's rows, whole trainings, by name: Keras models through `fit`, and the peers' own training loops.

Each builds its trial (`classifier`) and says what can be seen when it really runs (`evidence`). Imports no framework.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from models.jax.jax_rows import JAX_IMPLEMENTATIONS, JaxImplementation
from models.pytorch.torch_rows import TORCH_IMPLEMENTATIONS, TorchImplementation
from models.tf.stacks import CUDNN_KERNEL, CUDNN_OP, MATMUL, PERSISTENT_KERNEL, PRECISIONS, PTX_OP, WAVEFRONT_OP

STEPS_PER_EXECUTION = 50  # of `wavefront`, whose steps TensorFlow's executor runs
STEPS_PER_LOOP = 375  # of the rows in a CompiledLoop: a fifth of MNIST's 1875, so that a call's own cost hardly counts
UPDATE_OP = r"Assign(Add|Sub)?VariableOp"  # of weights, the optimizer's variables and the metrics


class FitImplementation(NamedTuple):
    """A Keras model trained by `fit`, by name: arguments of models.keras.classifier.build_classifier.

    Attributes:
        peer: where it is Keras on another backend than TensorFlow, the language model's row of that name: framework,
            precisions and evidence are the same.
    """

    what: str
    use_cudnn: bool | str
    jit_compile: bool | str
    needs_gpu: bool = False
    peer: JaxImplementation | None = None
    steps_per_execution: int = 1
    compiled_loop: bool = False

    @property
    def framework(self) -> str:
        return self.peer.framework if self.peer else "tensorflow"

    @property
    def precisions(self) -> Sequence[str]:
        return self.peer.precisions if self.peer else PRECISIONS

    def evidence(self, num_layers: int, time_steps: int, device: str, steps: int) -> dict[str, object]:
        """What has to be seen running in `steps` training steps: the arguments of harness.measure.proof.Kernel."""
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
            weights: canonical weights of a classifier (models.weights.canonical.classifier_shapes), whose sizes are the model's.
            inputs, labels: of the proof, [batches · batch_size, time, features] and [batches · batch_size] NumPy arrays.
            optimizer: ("Adam", learning rate, decay): the rate at step t is learning rate / (1 + decay · t).
            lstm_dropout, dense_dropout: rates behind each LSTM layer, and behind every relu layer.
            precision, loss_scale: as of models.keras.classifier.build_classifier.
            device: in the framework's own words; Keras finds it by itself.
            capacity: sequences of the largest data set to train on, for a trial that keeps it on the device.
            seed: of the order of the sequences and the dropout masks.

        Raises:
            ValueError: a precision that the row has not.
        """
        _check_precision(self.what, precision, self.peer)
        os.environ["KERAS_BACKEND"] = self.framework
        import keras

        from models.keras.classifier import ClassifierTrial, build_classifier
        from models.weights.canonical import stack_size

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
            jit_compile=self.jit_compile, steps_per_execution=self.steps_per_execution,
            compiled_loop=self.compiled_loop, bidirectional=bidirectional, precision=precision, loss_scale=loss_scale,
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
    "wavefront": FitImplementation(
        f"WavefrontLSTM, jit_compile=True, steps_per_execution={STEPS_PER_EXECUTION}",
        "wavefront",
        True,
        steps_per_execution=STEPS_PER_EXECUTION,
    ),
    "wavefront_loop": FitImplementation(
        f"WavefrontLSTM in a CompiledLoop: up to {STEPS_PER_LOOP} steps in one XLA program (steps_per_execution)",
        "wavefront",
        True,
        steps_per_execution=STEPS_PER_LOOP,
        compiled_loop=True,
    ),
    "wavefront_persistent": FitImplementation(
        "wavefront_loop with implementation='persistent': its layers in CUDA kernels called from XLA",
        "persistent",
        True,
        needs_gpu=True,
        steps_per_execution=STEPS_PER_LOOP,
        compiled_loop=True,
    ),
}


def fit_evidence(made: FitImplementation, num_layers: int, device: str) -> dict[str, object]:
    """What has to be seen running in `fit`. Keras' "auto" is cuDNN on a GPU, and its while loop without XLA on a CPU."""
    if made.use_cudnn == "stack" and device == "gpu":
        return {"ops": {"CudnnRNNV3": (1, 1)}, "not_ops": f"xla|loop:{MATMUL}", "kernels": CUDNN_KERNEL}
    if made.use_cudnn is True or (made.use_cudnn == "auto" and device == "gpu"):
        return {"ops": {"CudnnRNNV3": num_layers}, "not_ops": f"xla|loop:{MATMUL}", "kernels": CUDNN_KERNEL}
    if made.compiled_loop:  # one loop around all steps, which runs once, however many they are; no update outside of it
        ops = {"xla": 1, "xla:While": (1, 1), f"xla:loop:{UPDATE_OP}": 1}
        found = {"not_ops": f"{CUDNN_OP}|xla:{UPDATE_OP}", "not_kernels": CUDNN_KERNEL}
        if made.use_cudnn == "persistent":
            return {"ops": ops | {PTX_OP: 2}, "kernels": PERSISTENT_KERNEL, **found}
        return {"ops": ops | {WAVEFRONT_OP: 1}, **found}
    if made.use_cudnn == "wavefront":  # Keras' own loop is outside of XLA
        return {"ops": {"xla": 1, WAVEFRONT_OP: 1}, "not_ops": f"{CUDNN_OP}|xla:While", "not_kernels": CUDNN_KERNEL}
    if made.jit_compile is True:
        ops = {"xla": 1, f"xla:loop:{MATMUL}": num_layers}
        wrong = f"{CUDNN_OP}|{WAVEFRONT_OP}|{PTX_OP}|xla:loop:{UPDATE_OP}"
        return {"ops": ops, "not_ops": wrong, "not_kernels": CUDNN_KERNEL}
    return {"ops": {f"loop:{MATMUL}": num_layers}, "not_ops": f"{CUDNN_OP}|xla", "not_kernels": CUDNN_KERNEL}


@dataclass(frozen=True)
class _PeerFit:
    """A stack of another framework under a training loop of its own; members and methods as of FitImplementation.

    Attributes:
        made: the language model's row of that name.
    """

    made: TorchImplementation | JaxImplementation

    @property
    def what(self) -> str:
        return self.made.what

    @property
    def needs_gpu(self) -> bool:
        return self.made.needs_gpu

    @property
    def framework(self) -> str:
        return self.made.framework

    @property
    def precisions(self) -> Sequence[str]:
        return self.made.precisions

    def evidence(self, num_layers: int, time_steps: int, device: str, steps: int) -> dict[str, object]:
        return _in_steps(self.made.evidence(num_layers, time_steps, device), self.framework, steps)


class TorchFit(_PeerFit):
    """A PyTorch stack, by models.pytorch.classifier."""

    def classifier(
        self, weights, inputs, labels, batch_size, optimizer, *, precision="fp32", device="cpu", lstm_dropout=(),
        dense_dropout=0.0, **options,
    ):  # fmt: skip
        """As of FitImplementation; imports PyTorch. Raises ValueError for rates that differ between the layers."""
        from models.pytorch import classifier as torch_classifier
        from models.pytorch import stacks
        from models.pytorch.language_model import COMPUTE_DTYPE
        from models.weights.canonical import stack_size

        layers, _ = stack_size(weights)
        stack = getattr(stacks, self.made.stack)(weights, layers, COMPUTE_DTYPE[precision], device)
        captured = self.made.captured and device != "cpu"
        kind = torch_classifier.CapturedClassifier if captured else torch_classifier.TorchClassifier
        rates = (*rates_of_stack(lstm_dropout, layers), dense_dropout)
        return kind(stack, weights, inputs, labels, batch_size, optimizer, rates=rates, **options)


@dataclass(frozen=True)
class JaxFit(_PeerFit):
    """A JAX stack, by models.jax.classifier.

    Attributes:
        stack: (weights, num_layers, dtype, layer_by_layer) → a stack of models/jax/stacks.py; imports JAX. layer_by_layer:
            whether there is dropout between the layers.
    """

    stack: Callable

    def classifier(
        self, weights, inputs, labels, batch_size, optimizer, *, precision="fp32", device="", lstm_dropout=(),
        dense_dropout=0.0, **options,
    ):  # fmt: skip
        """As of FitImplementation; imports JAX. Raises ValueError for rates that differ between the layers, too."""
        _check_precision(self.what, precision, self.made)
        from models.jax.classifier import JaxClassifier
        from models.jax.language_model import COMPUTE_DTYPE
        from models.weights.canonical import stack_size

        layers, _ = stack_size(weights)
        rates = (*rates_of_stack(lstm_dropout, layers), dense_dropout)
        stack = self.stack(weights, layers, COMPUTE_DTYPE[precision], bool(rates[0]))
        return JaxClassifier(stack, weights, inputs, labels, batch_size, optimizer, rates=rates, **options)


def _scan_stack(weights, num_layers, dtype, layer_by_layer):
    from models.jax.stacks import ScanLSTM

    return ScanLSTM(weights, num_layers, dtype)


def _cudnn_stack(weights, num_layers, dtype, layer_by_layer):
    from models.jax.stacks import CudnnLSTM

    return CudnnLSTM(weights, num_layers, dtype, layer_by_layer=layer_by_layer)


def _in_steps(evidence: Mapping, framework: str, steps: int) -> dict[str, object]:
    """The evidence of one step for `steps` of them. PyTorch's profile counts launches, JAX' the ops of a program."""

    def times(count):
        return tuple(n * steps for n in count) if isinstance(count, tuple) else count * steps

    if framework != "torch":
        return dict(evidence)
    return {**evidence, "ops": {op: times(count) for op, count in evidence["ops"].items()}}


def _check_precision(what: str, precision: str, made: JaxImplementation | None) -> None:
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
