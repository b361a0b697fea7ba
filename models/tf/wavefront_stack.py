"""The wavefront as the stack of a language model: time-major, all layers' states in one pair (h, c)."""

import numpy as np
import tensorflow as tf

from models.tf.stack import Stack
from models.wavefront.persistent import persistent_stack
from models.wavefront.stack import LayerWeights, lstm_stack
from models.weights import layouts


class WavefrontStack(Stack):
    """lstm_stack of wavefront_stacking.py on the variables of a Stack: kernel, recurrent kernel and bias per layer, as in Keras.

    States are one pair (h, c), each [layers, batch, units]; c is float32 where the stack is float16.
    """

    time_major = True
    to_layout = staticmethod(layouts.to_keras)
    from_layout = staticmethod(layouts.from_keras)
    run = staticmethod(lstm_stack)

    def stage_states(self, states) -> tuple[tf.Tensor, tf.Tensor]:
        pairs = [layer[0] for layer in states]
        h, c = (np.stack(part) for part in zip(*pairs, strict=True))
        wide = "float32" if self.dtype == "float16" else self.dtype
        return tf.identity(tf.constant(h, self.dtype)), tf.identity(tf.constant(c, wide))

    def __call__(self, inputs, states, dropout, training):
        arrays = [self._cast(variable) for variable in self.variables]
        layers = [LayerWeights(*arrays[3 * k : 3 * k + 3]) for k in range(self.num_layers)]
        outputs, h, c = self.run(inputs, layers, *states, dropout=dropout)
        return outputs, (h, c)


class PersistentWavefrontStack(WavefrontStack):
    """The same on the persistent CUDA kernels of wavefront_persistent.py."""

    run = staticmethod(persistent_stack)
