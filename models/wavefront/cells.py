"""The arithmetic of one step of an LSTM, forward and backward, for any number of lanes at once; see schedule.py."""

from collections.abc import Sequence

import tensorflow as tf

EPSILON = 1e-3  # of layer normalisation, as in keras.layers.LayerNormalization


class LSTMCell:
    """The LSTM of Keras and cuDNN. It has no parameters of its own: the bias comes with `from_input`.

    A step keeps what its backward pass multiplies with, so that the chain of backward steps computes no gate anew.
    """

    one_gradient = True  # whether the gradients by `from_h` and by `from_input` are one

    def forward(self, from_h, from_input, c, parameters, active=None):
        """One step.

        Args:
            from_h, from_input: the gates' two summands, from the lane's own h and from its input, each [lanes, batch, 4·units].
            c: [lanes, batch, units].
            parameters: of the cell, the first axis being the lanes.
            active: booleans [lanes, 1 or batch, 1]: elsewhere c stays as it is, and h means nothing; None: everywhere.

        Returns:
            h, c, and the arrays [lanes, batch, units] to keep.
        """
        i, f, g, o = _activations(tf.split(from_h + from_input, 4, axis=-1), active)
        next_c = f * c + i * g
        tanh_c = tf.tanh(next_c)
        # What the gradients by c (thrice) and by h become in the gates i, f, g and o, and that by h in c.
        factors = [g * i * (1 - i), c * f * (1 - f), i * (1 - g * g), tanh_c * o * (1 - o), o * (1 - tanh_c * tanh_c)]
        if active is not None:  # those of i, f and g are 0 already
            factors[3:] = (tf.where(active, x, tf.zeros([], x.dtype)) for x in factors[3:])
        # 1 - f and not f, whose distance to 1 would be lost in 16 bits, and compounds over the steps.
        return o * tanh_c, next_c, [*factors, 1 - f]

    def backward(self, kept, d_h, d_c, parameters, active=None):
        """The gradients of one step.

        Args:
            kept: what `forward` kept, [kept, lanes, batch, units].
            d_h, d_c: gradients by the step's results. Where not active, all of d_c and nothing of d_h goes on.
            parameters, active: as in `forward`.

        Returns:
            the gradients by from_h and by from_input, each [4, lanes, batch, units]; by c; and by each of the parameters.
        """
        d_c += d_h * kept[4]
        # One product of arrays of one shape, which XLA makes one kernel; a stack of four products it would not.
        of_h = tf.reshape(tf.constant([False, False, False, True]), [4, 1, 1, 1])
        d_gates = kept[:4] * tf.where(of_h, d_h, d_c)
        return d_gates, d_gates, d_c - d_c * kept[5], []


class NormalizedLSTMCell:
    """The LSTM with layer normalisation of Ba, Kiros and Hinton 2016 (equations 20 to 22).

        z = LN(from_h) · recurrent_gain + LN(from_input) · kernel_gain + bias,   h = o ∘ tanh(LN(c) · cell_gain + cell_bias)

    Its parameters are recurrent_gain, kernel_gain and bias [lanes, 4·units], cell_gain and cell_bias [lanes, units]. Mean and
    variance are over the 4·units (units) of a lane. Its gradients are those of a tape around `forward`.
    """

    one_gradient = False

    def forward(self, from_h, from_input, c, parameters, active=None):
        """As of LSTMCell."""
        recurrent_gain, kernel_gain, bias, cell_gain, cell_bias = (p[:, tf.newaxis] for p in parameters)
        gates = _normalized(from_h) * recurrent_gain + _normalized(from_input) * kernel_gain + bias
        i, f, g, o = _activations(tf.split(gates, 4, axis=-1), active)
        next_c = f * c + i * g
        h = o * tf.tanh(_normalized(next_c) * cell_gain + cell_bias)
        return h, next_c, [*tf.split(from_h, 4, axis=-1), *tf.split(from_input, 4, axis=-1), c]

    def backward(self, kept, d_h, d_c, parameters, active=None):
        """As of LSTMCell."""
        *gates, c = tf.unstack(kept)
        from_h, from_input = tf.concat(gates[:4], -1), tf.concat(gates[4:], -1)
        if active is not None:
            d_h = tf.where(active, d_h, tf.zeros([], d_h.dtype))
        sources = [from_h, from_input, c, *parameters]
        with tf.GradientTape() as tape:
            tape.watch(sources)
            results = self.forward(from_h, from_input, c, parameters, active)[:2]
        d_from_h, d_from_input, d_c, *d_parameters = tape.gradient(results, sources, output_gradients=[d_h, d_c])
        return tf.stack(tf.split(d_from_h, 4, axis=-1)), tf.stack(tf.split(d_from_input, 4, axis=-1)), d_c, d_parameters


def _activations(gates: Sequence[tf.Tensor], active: tf.Tensor | None = None) -> list[tf.Tensor]:
    """i, f, g, o of the four gates' sums, in Keras' order; i = 0 and f = 1 where not active.

    So c needs no choice between its old and its new value, of which XLA would carry a growing chain from step to step.
    """
    i, f, g, o = (kind(z) for kind, z in zip((tf.sigmoid, tf.sigmoid, tf.tanh, tf.sigmoid), gates, strict=True))
    if active is None:
        return [i, f, g, o]
    return [tf.where(active, i, tf.zeros([], i.dtype)), tf.where(active, f, tf.ones([], f.dtype)), g, o]


def _normalized(x: tf.Tensor) -> tf.Tensor:
    mean = tf.reduce_mean(x, axis=-1, keepdims=True)
    centred = x - mean
    return centred * tf.math.rsqrt(tf.reduce_mean(centred * centred, axis=-1, keepdims=True) + EPSILON)
