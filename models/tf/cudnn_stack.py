"""CudnnLSTM as the stack of a language model: all layers in one CudnnRNNV3 call, time-major, from one flat buffer.

What a user of the TensorFlow 1 class did, and what keras.layers.LSTM does not do: Keras calls cuDNN once per layer,
batch-major with padded I/O, and repacks the weights into cuDNN's layout at every step. Here the trained variable is
cuDNN's buffer itself.

The buffer holds two biases per gate (models/weights/layouts.py). The second one starts at 0 and its gradient is held at
0, so that the
stack has one bias per gate, as every other LSTM of this folder has, and an optimizer moves it once per step, not twice.
"""

from collections.abc import Mapping, Sequence

import keras
import numpy as np
import tensorflow as tf

from models.cudnn.rnn import CudnnLSTM
from models.tf.stack import Stack
from models.weights import layouts


class CudnnStack(Stack):
    """A stack of LSTM layers in one call.

    Inputs and outputs are time-major, [time, batch, features], and the states of all layers are one pair (h, c), each
    [layers, batch, units].

    Args:
        dropout: between the layers, in training; an attribute of the op, so that it cannot be switched off in a graph.
        seed: of the dropout masks.
        use_cudnn: True (cuDNN or an error), or False: the same numbers from TensorFlow ops, for a machine without a GPU.
    """

    time_major = True
    own_dropout = True

    def __init__(
        self,
        weights: Mapping[str, np.ndarray],
        num_layers: int,
        dtype: str = "float32",
        dropout: float = 0.0,
        seed: int = 0,
        use_cudnn: bool = True,
    ) -> None:
        self.num_layers, self.dtype, self.dropout = num_layers, dtype, dropout
        input_size, self.units = (weights[f"lstm_0/forward/{part}"].shape[0] for part in ("kernel", "recurrent_kernel"))
        self.spec = layouts.StackSpec("lstm", num_layers, self.units, input_size)

        def model(rate: float) -> CudnnLSTM:
            return CudnnLSTM(
                num_layers,
                self.units,
                input_size,
                dtype=tf.as_dtype(dtype),
                dropout=rate,
                seed=seed,
                use_cudnn=use_cudnn,
            )

        self._models = {rate: model(rate) for rate in {0.0, dropout}}
        variable_dtype = "float64" if dtype == "float64" else "float32"
        self.variables = [keras.Variable(array, dtype=variable_dtype) for array in self.from_canonical(weights)]

    @property
    def uses_cudnn(self) -> bool:
        """Whether a call runs cuDNN."""
        return self._models[0.0].uses_cudnn

    def from_canonical(self, weights: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        own = {name: weights[name] for name in layouts.canonical_shapes(self.spec)}
        return [layouts.to_cudnn_flat(own, self.spec)]

    def to_canonical(self, arrays: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        (flat,) = arrays
        return layouts.from_cudnn_flat(flat, self.spec)

    def stage_states(self, states: Sequence) -> tuple[tf.Tensor, tf.Tensor]:
        pairs = [layer[0] for layer in states]
        return tuple(tf.identity(tf.constant(np.stack(part), self.dtype)) for part in zip(*pairs, strict=True))

    def __call__(self, inputs, states, dropout, training, sequence_lengths=None):
        """As in Stack. sequence_lengths: [batch], or None: outputs after a sequence's end are 0."""
        model = self._models[self.dropout if dropout else 0.0]
        params = model.single_bias(self._cast(self.variables[0]))
        outputs, h, c = model(inputs, *states, params, is_training=training, sequence_lengths=sequence_lengths)
        return outputs, (h, c)
