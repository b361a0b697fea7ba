"""What every LSTM stack of this folder has in common: its variables, and the way from and to the canonical weights."""

from collections.abc import Callable, Mapping, Sequence

import keras
import numpy as np
import tensorflow as tf

from models.weights import layouts

HALVES = ("float16", "bfloat16")
POLICIES = {
    "float32": "float32",
    "float64": "float64",
    **{half: f"mixed_{half}" for half in HALVES},
}  # Keras', by dtype
State = tuple[tf.Tensor, tf.Tensor]  # (h, c), each [batch, units]


class Stack:
    """A stack of unidirectional LSTM layers, the output of one being the input of the next.

    A subclass is one way to execute it: it defines `__call__`, and names the layout that holds its weights where that is not
    one kernel [input + units, 4·units] and one bias [4·units] per layer with gates i, f, c, o.

    Args:
        weights: canonical weights (models/weights/canonical.py); tensors of other parts of a network are left alone.
        num_layers: layers in the stack.
        dtype: "float32", "float64", "float16" or "bfloat16". Variables are float32 at least; inputs arrive in `dtype`.
    """

    time_major = False  # whether inputs and outputs are [time, batch, features]
    repeats_last = False  # whether, given `sequence_lengths`, a sequence's last output follows its end, and not 0
    own_dropout = False  # whether the stack draws its dropout masks itself, by a rate that is baked into its graph

    to_layout: Callable = staticmethod(layouts.to_block)  # canonical → one layer's arrays, as in `variables`
    from_layout: Callable = staticmethod(layouts.from_block)

    def __init__(self, weights: Mapping[str, np.ndarray], num_layers: int, dtype: str = "float32") -> None:
        self.num_layers, self.dtype = num_layers, dtype
        self.units = weights["lstm_0/forward/recurrent_kernel"].shape[0]
        variable_dtype = "float64" if dtype == "float64" else "float32"
        self.variables = [keras.Variable(array, dtype=variable_dtype) for array in self.from_canonical(weights)]

    def from_canonical(self, weights: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """The canonical weights as arrays that match `variables`."""
        return [a for layer in range(self.num_layers) for a in self.to_layout(weights, layer)]

    def to_canonical(self, arrays: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        """Arrays that match `variables` (weights, gradients or an optimizer's moments) under canonical names."""
        per_layer = len(arrays) // self.num_layers
        canonical = {}
        for layer in range(self.num_layers):
            canonical |= self.from_layout(arrays[layer * per_layer : (layer + 1) * per_layer], layer)
        return canonical

    def notes(self, mode: str) -> list[str]:
        """Sentences for the tables on how it ran in "train", "forward" or "stack", where the class leaves that open."""
        return []

    def stage_states(self, states: Sequence) -> tuple:
        """Canonical states (layers × directions × (h, c)) as `__call__` takes them, on the device."""
        return tuple(tuple(tf.identity(tf.constant(s, self.dtype)) for s in layer[0]) for layer in states)

    def __call__(
        self,
        inputs: tf.Tensor,
        states: Sequence[State],
        dropout: Callable[[tf.Tensor], tf.Tensor] | None,
        training: bool,
    ) -> tuple[tf.Tensor, list[State]]:
        """Run all layers.

        Args:
            inputs: [batch, time, features]; [time, batch, features] where `time_major`.
            states: initial (h, c) per layer, from `stage_states`.
            dropout: applied between layers (not after the last one), or None. Where `own_dropout`, whether there is any.
            training: whether this is a training pass; only Keras' own layers look at it.

        Returns:
            outputs of the last layer [batch, time, units] and the final states, in the form of `states`.
        """
        raise NotImplementedError

    def _cast(self, variable: keras.Variable) -> tf.Tensor:
        return tf.cast(variable.value, self.dtype)
