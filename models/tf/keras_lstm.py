"""keras.layers.LSTM, layer by layer: Keras' own while loop ("vanilla"), or cuDNN (what CuDNNLSTM became).

`use_cudnn=True` insists: Keras raises where it cannot use cuDNN, and never falls back. `use_cudnn` is not part of the layer's
get_config, so a model that was saved and loaded again has lost the choice.
"""

import keras
import tensorflow as tf

from models.tf.stack import POLICIES, Stack
from models.weights import layouts


class KerasLSTM(Stack):
    """A stack of keras.layers.LSTM layers.

    Args:
        use_cudnn: True (cuDNN or an error), False (Keras' while loop) or "auto" (what a user gets who sets nothing).
    """

    to_layout = staticmethod(layouts.to_keras)
    from_layout = staticmethod(layouts.from_keras)

    def __init__(self, weights, num_layers, dtype="float32", use_cudnn=False):
        self.num_layers, self.dtype, self.repeats_last = num_layers, dtype, not use_cudnn
        self.units = weights["lstm_0/forward/recurrent_kernel"].shape[0]
        self.layers = []
        for layer in range(num_layers):
            inputs, _ = weights[f"lstm_{layer}/forward/kernel"].shape
            units, _ = weights[f"lstm_{layer}/forward/recurrent_kernel"].shape
            lstm = keras.layers.LSTM(
                units, return_sequences=True, return_state=True, use_cudnn=use_cudnn, dtype=POLICIES[dtype]
            )
            lstm.build((None, None, inputs))
            lstm.set_weights(self.to_layout(weights, layer))
            self.layers.append(lstm)
        self.variables = [variable for lstm in self.layers for variable in lstm.trainable_variables]

    def __call__(self, inputs, states, dropout, training, sequence_lengths=None):
        """As in Stack. sequence_lengths: models.cudnn.checks.Lengths, of which Keras is given a mask, or None."""
        outputs, finals, mask = inputs, [], None
        if sequence_lengths is not None:
            mask = tf.sequence_mask(sequence_lengths.on_device, inputs.shape[1])
        for layer, (lstm, state) in enumerate(zip(self.layers, states, strict=True)):
            if dropout and layer:
                outputs = dropout(outputs)
            outputs, h, c = lstm(outputs, mask=mask, initial_state=list(state), training=training)
            finals.append((h, c))
        return outputs, finals
