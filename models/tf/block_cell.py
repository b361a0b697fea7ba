"""The C++ cell of TensorFlow (op LSTMBlockCell) unrolled over time: document "Static LSTM", and LSTMBlockCell of TF 1.

The op computes one step with fused pointwise work. Three of its traits have to be undone or supplied to compute a plain
LSTM: it clips the cell state at 3 (not with cell_clip=0), adds 1 to the forget gate (forget_bias=0), and has no
registered gradient. Its gates stand in the order i, c, f, o. Its backward op LSTMBlockCellGrad returns the gradient of the
pre-activations; what follows from it is two matrix products.
"""

import functools

import tensorflow as tf

from models.tf.basic_cell import UnrolledLSTM
from models.weights import layouts


@tf.custom_gradient
def block_cell(x, h_prev, c_prev, kernel, bias):
    """One step by the C++ op: x [batch, input], h and c [batch, units], kernel [input + units, 4·units] → (h, c)."""
    peephole = tf.zeros_like(bias[: bias.shape[0] // 4])  # unused (use_peephole=False), but has to be there
    step = tf.raw_ops.LSTMBlockCell(
        x=x, cs_prev=c_prev, h_prev=h_prev, w=kernel, wci=peephole, wcf=peephole, wco=peephole, b=bias,
        forget_bias=0.0, cell_clip=0.0, use_peephole=False,
    )  # fmt: skip

    def gradient(h_grad, c_grad):
        back = tf.raw_ops.LSTMBlockCellGrad(
            x=x, cs_prev=c_prev, h_prev=h_prev, w=kernel, wci=peephole, wcf=peephole, wco=peephole, b=bias,
            i=step.i, cs=step.cs, f=step.f, o=step.o, ci=step.ci, co=step.co, cs_grad=c_grad, h_grad=h_grad,
            use_peephole=False,
        )  # fmt: skip
        z_grad = back.dicfo  # [batch, 4·units]
        xh_grad = tf.matmul(z_grad, kernel, transpose_b=True)
        kernel_grad = tf.matmul(tf.concat([x, h_prev], axis=1), z_grad, transpose_a=True)
        inputs = x.shape[1]
        return xh_grad[:, :inputs], xh_grad[:, inputs:], back.cs_prev_grad, kernel_grad, tf.reduce_sum(z_grad, axis=0)

    return (step.h, step.cs), gradient


class StaticBlockLSTM(UnrolledLSTM):
    """LSTMBlockCell written out over time, as the cell of primitive ops is. Eager, or one graph."""

    cell = staticmethod(block_cell)
    to_layout = staticmethod(functools.partial(layouts.to_block, gates=layouts.LSTM_BLOCK_CELL_GATES))
    from_layout = staticmethod(functools.partial(layouts.from_block, gates=layouts.LSTM_BLOCK_CELL_GATES))
