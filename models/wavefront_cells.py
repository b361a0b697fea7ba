"""The arithmetic of one step of an LSTM, forward and backward, for any number of lanes at once; see wavefront_schedule.py."""

from collections.abc import Sequence

import tensorflow as tf

EPSILON = 1e-3  # of layer normalisation, as in keras.layers.LayerNormalization


class LSTMCell:
    """The LSTM of Keras and cuDNN. It has no parameters of its own: the bias comes with `upper`."""

    kept = 4  # arrays that a step keeps for its backward pass
    one_gradient = True  # whether the gradients by `own` and by `upper` are one

    def forward(self, own, upper, c, parameters):
        """One step.

        Args:
            own, upper: what the gates are made of, from the lane's own h and from its input, each [lanes, batch, 4·units].
            c: [lanes, batch, units].
            parameters: of the cell, the first axis being the lanes.

        Returns:
            h, c, and the arrays [lanes, batch, units] to keep.
        """
        gates = tf.split(own + upper, 4, axis=-1)
        i, f, g, o = _activations(gates)
        c = f * c + i * g
        return o * tf.tanh(c), c, gates

    def backward(self, kept, c, d_h, d_c, parameters):
        """The gradients of one step.

        Args:
            kept: what `forward` kept.
            c: before the step.
            d_h, d_c: gradients by the step's results.

        Returns:
            the gradients by own and by upper, each [4, lanes, batch, units]; by c; and by each of the parameters.
        """
        i, f, g, o = _activations(kept)
        tanh_c = tf.tanh(f * c + i * g)
        d_c += d_h * o * (1 - tanh_c * tanh_c)
        d_gates = tf.stack(
            [d_c * g * i * (1 - i), d_c * c * f * (1 - f), d_c * i * (1 - g * g), d_h * tanh_c * o * (1 - o)]
        )
        return d_gates, d_gates, d_c * f, []


class NormalizedLSTMCell:
    """The LSTM with layer normalisation of Ba, Kiros and Hinton 2016 (equations 20 to 22).

        z = LN(own) · own_gain + LN(upper) · upper_gain + bias,   h = o ∘ tanh(LN(c) · c_gain + c_bias)

    Its parameters are own_gain, upper_gain and bias [lanes, 4·units], c_gain and c_bias [lanes, units]. Mean and variance are
    over the 4·units (units) of a lane. Its gradients are those of a tape around `forward`.
    """

    kept = 8
    one_gradient = False

    def forward(self, own, upper, c, parameters):
        """As of LSTMCell."""
        own_gain, upper_gain, bias, c_gain, c_bias = (p[:, tf.newaxis] for p in parameters)
        gates = _normalized(own) * own_gain + _normalized(upper) * upper_gain + bias
        i, f, g, o = _activations(tf.split(gates, 4, axis=-1))
        c = f * c + i * g
        return o * tf.tanh(_normalized(c) * c_gain + c_bias), c, tf.split(own, 4, axis=-1) + tf.split(upper, 4, axis=-1)

    def backward(self, kept, c, d_h, d_c, parameters):
        """As of LSTMCell."""
        own, upper = tf.concat(kept[:4], -1), tf.concat(kept[4:], -1)
        sources = [own, upper, c, *parameters]
        with tf.GradientTape() as tape:
            tape.watch(sources)
            results = self.forward(own, upper, c, parameters)[:2]
        d_own, d_upper, d_c, *d_parameters = tape.gradient(results, sources, output_gradients=[d_h, d_c])
        return tf.stack(tf.split(d_own, 4, axis=-1)), tf.stack(tf.split(d_upper, 4, axis=-1)), d_c, d_parameters


def _activations(gates: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """i, f, g, o of the four gates' sums, in Keras' order."""
    return [activation(z) for activation, z in zip((tf.sigmoid, tf.sigmoid, tf.tanh, tf.sigmoid), gates, strict=True)]


def _normalized(x: tf.Tensor) -> tf.Tensor:
    mean = tf.reduce_mean(x, axis=-1, keepdims=True)
    centred = x - mean
    return centred * tf.math.rsqrt(tf.reduce_mean(centred * centred, axis=-1, keepdims=True) + EPSILON)
