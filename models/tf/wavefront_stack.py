"""WavefrontLSTM as the stack of a language model: time-major, all layers' states in one pair (h, c)."""

from collections.abc import Callable, Mapping

import numpy as np
import tensorflow as tf

from models.tf.stack import HALVES, POLICIES, Stack
from models.wavefront import nvrtc, products, tiling
from models.wavefront.layer import WavefrontLSTM
from models.weights import layouts


class ModelsDropout(WavefrontLSTM):
    """WavefrontLSTM with the model's dropout between its layers: the rate is a variable, so that a proof can set it to 0."""

    given: Callable[[tf.Tensor], tf.Tensor] | None = None

    def _between(self, training):
        return self.given


class WavefrontStack(Stack):
    """The layer, with its weights as the variables of a Stack: kernel, recurrent kernel and bias per layer, as in Keras.

    States are one pair (h, c), each [layers, batch, units]; c is float32 where the stack has 16 bits.
    """

    time_major = True
    to_layout = staticmethod(layouts.to_keras)
    from_layout = staticmethod(layouts.from_keras)
    implementation = "xla"

    def __init__(self, weights: Mapping[str, np.ndarray], num_layers: int, dtype: str = "float32") -> None:
        self.num_layers, self.dtype = num_layers, dtype
        self.units = weights["lstm_0/forward/recurrent_kernel"].shape[0]
        self.layer = ModelsDropout(
            self.units,
            num_layers,
            implementation=self.implementation,
            time_major=True,
            return_sequences=True,
            return_state=True,
            dtype=POLICIES[dtype],
        )
        self.layer.build((None, None, weights["lstm_0/forward/kernel"].shape[0]))
        self.layer.set_weights(self.from_canonical(weights))
        self.variables = self.layer.trainable_variables

    def stage_states(self, states) -> tuple[tf.Tensor, tf.Tensor]:
        pairs = [layer[0] for layer in states]
        h, c = (np.stack(part) for part in zip(*pairs, strict=True))
        wide = "float32" if self.dtype in HALVES else self.dtype
        return tf.identity(tf.constant(h, self.dtype)), tf.identity(tf.constant(c, wide))

    def __call__(self, inputs, states, dropout, training, sequence_lengths=None):
        """As in Stack. sequence_lengths: Lengths [batch], or None: outputs after a sequence's end are 0."""
        self.layer.given, mask = dropout, None
        if sequence_lengths is not None:
            mask = tf.transpose(tf.sequence_mask(sequence_lengths.on_device, inputs.shape[0]))
        outputs, h, c = self.layer(inputs, initial_state=list(states), mask=mask, training=training)
        return outputs, (h, c)


class PersistentWavefrontStack(WavefrontStack):
    """The same with the persistent CUDA kernels."""

    implementation = "persistent"

    def notes(self, mode):
        return tiling.notes(nvrtc.chip()) + products.notes(self.dtype)
