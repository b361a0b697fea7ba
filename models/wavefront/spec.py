"""Names and shapes of an LSTM stack's weights: the canonical form. NumPy only.

    "lstm_{layer}/{direction}/kernel"           [input, 4·units]      direction: "forward" or "backward"
    "lstm_{layer}/{direction}/recurrent_kernel" [units, 4·units]      gates in Keras' order i, f, c, o
    "lstm_{layer}/{direction}/bias"             [4·units]

A layer and direction is called a pseudo-layer: layer 0 forward, layer 0 backward, layer 1 forward, …. The outputs of the two
directions are concatenated, so the layer above has 2·units inputs. The three tensors of a pseudo-layer are those of
keras.layers.LSTM.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

Shapes = dict[str, tuple[int, ...]]
Weights = dict[str, np.ndarray]


@dataclass(frozen=True)
class StackSpec:
    """A stack of LSTM layers, the output of one being the input of the next.

    Attributes:
        num_layers: layers in the stack.
        units: units per layer and direction.
        input_size: features of the stack's input.
        bidirectional: whether every layer has a backward direction too.
        mode: "lstm", the prefix of the names.
    """

    num_layers: int
    units: int
    input_size: int
    bidirectional: bool = False
    mode: ClassVar[str] = "lstm"

    @property
    def directions(self) -> tuple[str, ...]:
        """("forward",) or ("forward", "backward")."""
        return ("forward", "backward") if self.bidirectional else ("forward",)

    @property
    def num_pseudo_layers(self) -> int:
        """Layers times directions."""
        return self.num_layers * len(self.directions)

    def layer_input_size(self, layer: int) -> int:
        """Features that `layer` reads."""
        return self.units * len(self.directions) if layer else self.input_size

    def shapes(self) -> Shapes:
        """Canonical names and shapes, from the lowest layer up."""
        shapes: Shapes = {}
        for layer in range(self.num_layers):
            for direction in self.directions:
                name = f"lstm_{layer}/{direction}"
                shapes[f"{name}/kernel"] = (self.layer_input_size(layer), 4 * self.units)
                shapes[f"{name}/recurrent_kernel"] = (self.units, 4 * self.units)
                shapes[f"{name}/bias"] = (4 * self.units,)
        return shapes


def check_weights(weights: Mapping[str, np.ndarray], shapes: Shapes) -> Weights:
    """The weights in the order of `shapes`.

    Raises:
        ValueError: a name is missing or does not belong, a shape is another, or they are not all of one float dtype.
    """
    for name, shape in shapes.items():
        if name not in weights:
            raise ValueError(f"weights: {name} is missing, expected {list(shape)}; given: {', '.join(weights)}")
    for name in weights:
        if name not in shapes:
            raise ValueError(f"weights: {name} was given, expected only {', '.join(shapes)}")
    checked: Weights = {}
    for name, shape in shapes.items():
        array = np.asarray(weights[name])
        if array.shape != shape:
            raise ValueError(f"weights: {name} is {list(array.shape)}, expected {list(shape)}")
        if not np.issubdtype(array.dtype, np.floating):
            raise ValueError(f"weights: {name} is {array.dtype}, expected float16, float32 or float64")
        first = next(iter(checked.values()), array)
        if array.dtype != first.dtype:
            raise ValueError(f"weights: {name} is {array.dtype}, expected {first.dtype} as the arrays before it")
        checked[name] = array
    return checked
