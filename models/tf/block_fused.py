"""A whole layer in one C++ op (BlockLSTMV2): LSTMBlockFusedCell of TF 1.

The op loops over time inside itself, time-major; gates in the order i, f, c, o. Unlike LSTMBlockCell it adds no forget
bias, but it too clips the cell state at 3 unless cell_clip=0. TensorFlow 2.21 registers the gradient of BlockLSTM for it,
which takes the gates in the order i, c, f, o and so returns wrong gradients without an error (tests/models/
test_stacks.py shows it); the op's own backward op BlockLSTMGradV2 is right, and is what runs here.
"""

import tensorflow as tf

from models.tf.stack import Stack


@tf.custom_gradient
def block_lstm(inputs, h_0, c_0, kernel, bias):
    """One layer: inputs [time, batch, input], h_0 and c_0 [batch, units] → h and c of all steps, [time, batch, units]."""
    peephole = tf.zeros_like(bias[: bias.shape[0] // 4])  # unused (use_peephole=False), but has to be there
    shared = dict(
        seq_len_max=tf.cast(tf.shape(inputs)[0], tf.int64), x=inputs, cs_prev=c_0, h_prev=h_0, w=kernel,
        wci=peephole, wcf=peephole, wco=peephole, b=bias, use_peephole=False,
    )  # fmt: skip
    layer = tf.raw_ops.BlockLSTMV2(cell_clip=0.0, **shared)

    def gradient(h_grad, c_grad):
        back = tf.raw_ops.BlockLSTMGradV2(
            i=layer.i, cs=layer.cs, f=layer.f, o=layer.o, ci=layer.ci, co=layer.co, h=layer.h,
            cs_grad=c_grad, h_grad=h_grad, **shared,
        )  # fmt: skip
        return back.x_grad, back.h_prev_grad, back.cs_prev_grad, back.w_grad, back.b_grad

    return (layer.h, layer.cs), gradient


class FusedBlockLSTM(Stack):
    """One BlockLSTMV2 op per layer."""

    def __call__(self, inputs, states, dropout, training):
        outputs = tf.transpose(inputs, [1, 0, 2])  # [time, batch, features]
        finals = []
        for layer, (h_0, c_0) in enumerate(states):
            kernel, bias = (self._cast(v) for v in self.variables[2 * layer : 2 * layer + 2])
            if dropout and layer:
                outputs = dropout(outputs)
            outputs, cell_states = block_lstm(outputs, h_0, c_0, kernel, bias)
            finals.append((outputs[-1], cell_states[-1]))
        return tf.transpose(outputs, [1, 0, 2]), finals
