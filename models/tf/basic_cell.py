"""An LSTM of primitive operations, cell by cell: what TensorFlow calls BasicLSTMCell.

Equations: Hochreiter and Schmidhuber 1997 with the forget gate of Gers et al. 2000, gates in Keras' order i, f, c, o:

    z = [x_t, h_{t-1}] W + b            W [input + units, 4·units], z [batch, 4·units]
    c_t = σ(z_f) ∘ c_{t-1} + σ(z_i) ∘ tanh(z_c)
    h_t = σ(z_o) ∘ tanh(c_t)
"""

import tensorflow as tf

from models.tf.stack import Stack


def lstm_cell(x, h, c, kernel, bias):
    """One step: x [batch, input], h and c [batch, units] → the new (h, c)."""
    z = tf.matmul(tf.concat([x, h], axis=1), kernel) + bias
    i, f, candidate, o = tf.split(z, 4, axis=1)
    c = tf.sigmoid(f) * c + tf.sigmoid(i) * tf.tanh(candidate)
    return tf.sigmoid(o) * tf.tanh(c), c


class UnrolledLSTM(Stack):
    """The cells written out over time: depth in the outer loop, time in the inner one. Eager, or one large graph."""

    cell = staticmethod(lstm_cell)

    def __call__(self, inputs, states, dropout, training):
        outputs = tf.unstack(inputs, axis=1)  # time × [batch, features]
        finals = []
        for layer, (h, c) in enumerate(states):
            kernel, bias = (self._cast(v) for v in self.variables[2 * layer : 2 * layer + 2])
            if dropout and layer:
                outputs = tf.unstack(dropout(tf.stack(outputs)))
            for t, x in enumerate(outputs):
                h, c = self.cell(x, h, c, kernel, bias)
                outputs[t] = h
            finals.append((h, c))
        return tf.stack(outputs, axis=1), finals


class WhileLoopLSTM(Stack):
    """The cell in a symbolic tf.while_loop over time, one loop per layer; any number of steps with one graph."""

    def __call__(self, inputs, states, dropout, training):
        outputs = tf.transpose(inputs, [1, 0, 2])  # [time, batch, features]
        finals = []
        for layer, (h, c) in enumerate(states):
            kernel, bias = (self._cast(v) for v in self.variables[2 * layer : 2 * layer + 2])
            if dropout and layer:
                outputs = dropout(outputs)
            outputs, h, c = self._loop(outputs, h, c, kernel, bias)
            finals.append((h, c))
        return tf.transpose(outputs, [1, 0, 2]), finals

    def _loop(self, inputs, h, c, kernel, bias):
        time_steps = tf.shape(inputs)[0]
        inputs = tf.TensorArray(inputs.dtype, time_steps, element_shape=inputs.shape[1:]).unstack(inputs)
        outputs = tf.TensorArray(h.dtype, time_steps, element_shape=h.shape)

        def step(t, h, c, outputs):
            h, c = lstm_cell(inputs.read(t), h, c, kernel, bias)
            return t + 1, h, c, outputs.write(t, h)

        _, h, c, outputs = tf.while_loop(
            lambda t, *_: t < time_steps, step, (0, h, c, outputs), maximum_iterations=time_steps
        )
        return outputs.stack(), h, c
