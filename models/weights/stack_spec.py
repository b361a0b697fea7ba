"""What fixes a recurrent stack's tensors: its spec, and their names and shapes in every layout of a whole stack.

NumPy only. models/weights/layouts.py states the layouts and holds the ways between them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from models.weights.canonical import Shapes, Weights, directions

CANONICAL_GATES = {"lstm": "ifco", "gru": "zrh", "rnn_tanh": "h", "rnn_relu": "h"}
CUDNN_GATES = {"lstm": "ifco", "gru": "rzh", "rnn_tanh": "h", "rnn_relu": "h"}  # PyTorch's too
KERAS_LAYERS = {"lstm": "LSTM", "gru": "GRU", "rnn_tanh": "SimpleRNN", "rnn_relu": "SimpleRNN"}


@dataclass(frozen=True)
class StackSpec:
    """A stack of recurrent layers, the output of one being the input of the next.

    Args:
        mode: "lstm", "gru", "rnn_tanh" or "rnn_relu".
        num_layers: layers in the stack.
        units: units per layer and direction.
        input_size: features of the stack's input.
        bidirectional: whether every layer has a backward direction too; their outputs are concatenated.
        skip_input: whether the input enters every gate of layer 0 as it is, without a kernel.

    Raises:
        ValueError: an unknown mode, a size that is no positive integer, or skip_input with input_size other than units.
    """

    mode: str
    num_layers: int
    units: int
    input_size: int
    bidirectional: bool = False
    skip_input: bool = False

    def __post_init__(self) -> None:
        check_mode(self.mode)
        for name in ("num_layers", "units", "input_size"):
            size = getattr(self, name)
            if isinstance(size, bool) or not isinstance(size, int | np.integer) or size < 1:
                raise ValueError(f"{name}: {size!r} given, expected a positive integer")
        if self.skip_input and self.input_size != self.units:
            raise ValueError(
                f"skip_input: input_size {self.input_size} with units {self.units} given, expected the two to be equal"
            )

    @property
    def directions(self) -> tuple[str, ...]:
        """("forward",) or ("forward", "backward")."""
        return directions(self.bidirectional)

    @property
    def pseudo_layers(self) -> list[tuple[int, str]]:
        """(layer, direction) of each pseudo-layer, in order."""
        return [(layer, direction) for layer in range(self.num_layers) for direction in self.directions]

    @property
    def num_pseudo_layers(self) -> int:
        """Layers times directions."""
        return self.num_layers * len(self.directions)

    def layer_input_size(self, layer: int) -> int:
        """Features that `layer` reads, whether or not a kernel multiplies them."""
        return self.units * len(self.directions) if layer else self.input_size

    def has_kernel(self, layer: int) -> bool:
        """Whether a kernel multiplies the input of `layer`: not in layer 0 under skip_input."""
        return layer > 0 or not self.skip_input


def check_mode(mode: str) -> None:
    """Raise ValueError unless `mode` is one of the four."""
    if mode not in CANONICAL_GATES:
        raise ValueError(f"mode: {mode!r} given, expected one of {', '.join(CANONICAL_GATES)}")


def canonical_shapes(spec: StackSpec) -> Shapes:
    """Canonical names and shapes, from the lowest layer up. Under skip_input there is no kernel of layer 0."""
    width = len(CANONICAL_GATES[spec.mode]) * spec.units
    shapes: Shapes = {}
    for layer, direction in spec.pseudo_layers:
        name = f"{spec.mode}_{layer}/{direction}"
        if spec.has_kernel(layer):
            shapes[f"{name}/kernel"] = (spec.layer_input_size(layer), width)
        shapes[f"{name}/recurrent_kernel"] = (spec.units, width)
        shapes[f"{name}/bias"] = (2, width) if spec.mode == "gru" else (width,)
    return shapes


def cudnn_matrices(spec: StackSpec) -> list[tuple[str, tuple[int, int]]]:
    """(name, shape) of every matrix of cuDNN's list, in order, such as ("layer 0 forward W_i", (units, input_size))."""
    return [
        (f"layer {layer} {direction} {letter}{gate and '_' + gate}", (spec.units, size))
        for layer, direction in spec.pseudo_layers
        for letter, size in (("W", spec.layer_input_size(layer) * spec.has_kernel(layer)), ("R", spec.units))
        for gate in _cudnn_gate_names(spec.mode)
    ]


def cudnn_biases(spec: StackSpec) -> list[tuple[str, tuple[int]]]:
    """(name, shape) of every bias of cuDNN's list, in order, such as ("layer 0 forward b_Wi", (units,))."""
    return [
        (f"layer {layer} {direction} b_{letter}{gate}", (spec.units,))
        for layer, direction in spec.pseudo_layers
        for letter in "WR"
        for gate in _cudnn_gate_names(spec.mode)
    ]


def cudnn_size(spec: StackSpec) -> int:
    """Numbers in cuDNN's flat buffer, which holds nothing but the arrays of the list."""
    return sum(int(np.prod(shape)) for _, shape in cudnn_matrices(spec) + cudnn_biases(spec))


def torch_shapes(spec: StackSpec) -> Shapes:
    """Names and shapes in the state_dict of torch.nn.LSTM, GRU or RNN, in its order."""
    width = len(CUDNN_GATES[spec.mode]) * spec.units
    shapes: Shapes = {}
    for layer, direction in spec.pseudo_layers:
        suffix = f"l{layer}_reverse" if direction == "backward" else f"l{layer}"
        shapes[f"weight_ih_{suffix}"] = (width, spec.layer_input_size(layer))
        shapes[f"weight_hh_{suffix}"] = (width, spec.units)
        shapes[f"bias_ih_{suffix}"] = shapes[f"bias_hh_{suffix}"] = (width,)
    return shapes


def check_names(argument: str, arrays: Mapping[str, np.ndarray], shapes: Shapes) -> Weights:
    """The arrays in the order of `shapes`, if they are exactly those."""
    for name, shape in shapes.items():
        if name not in arrays:
            raise ValueError(f"{argument}: {name} is missing, expected {list(shape)}; given: {', '.join(arrays)}")
    for name in arrays:
        if name not in shapes:
            raise ValueError(f"{argument}: {name} was given, expected only {', '.join(shapes)}")
    checked = check_arrays([(f"{argument}: {name}", arrays[name], shape) for name, shape in shapes.items()])
    return dict(zip(shapes, checked, strict=True))


def check_lists(
    matrices: Sequence[np.ndarray], biases: Sequence[np.ndarray], spec: StackSpec
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """cuDNN's list as two lists of arrays, if they are as many as `spec` has, of its shapes and of one float dtype."""
    labelled = []
    for argument, arrays, expected in (
        ("matrices", matrices, cudnn_matrices(spec)),
        ("biases", biases, cudnn_biases(spec)),
    ):
        per = len(expected) // spec.num_pseudo_layers
        if len(arrays) != len(expected):
            raise ValueError(
                f"{argument}: {len(arrays)} arrays given, expected {len(expected)}: {per} for each of "
                f"{spec.num_pseudo_layers} pseudo-layers"
            )
        for k, (array, (name, shape)) in enumerate(zip(arrays, expected, strict=True)):
            labelled.append((f"{argument}: pseudo-layer {k // per}, {name}", array, shape))
    checked = check_arrays(labelled)
    return checked[: len(matrices)], checked[len(matrices) :]


def check_arrays(labelled: Iterable[tuple[str, np.ndarray, tuple[int, ...]]]) -> list[np.ndarray]:
    """The arrays, if each has its shape and all have one float dtype."""
    checked: list[np.ndarray] = []
    for label, given, shape in labelled:
        array = np.asarray(given)
        if array.shape != tuple(shape):
            raise ValueError(f"{label} is {list(array.shape)}, expected {list(shape)}")
        if not np.issubdtype(array.dtype, np.floating):
            raise ValueError(f"{label} is {array.dtype}, expected float16, float32 or float64")
        if checked and array.dtype != checked[0].dtype:
            raise ValueError(f"{label} is {array.dtype}, expected {checked[0].dtype} as the arrays before it")
        checked.append(array)
    return checked


def _cudnn_gate_names(mode: str) -> Sequence[str]:
    """Suffixes of W and R; a mode of one gate has none."""
    return CUDNN_GATES[mode] if len(CUDNN_GATES[mode]) > 1 else ("",)
