"""A stack of LSTM layers that advances along its diagonal: pure TensorFlow, fast under XLA (jit_compile=True).

models/wavefront_schedule.py is the schedule, models/wavefront_cells.py the arithmetic of one step. This module chooses what
advances together.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import tensorflow as tf

from models.wavefront_schedule import UNROLL, advance

# Bytes of one recurrent kernel from which on the layers take turns: a step then waits for the weights to come from memory,
# and a product of all layers at once would read the kernels of the links at every step too.
TURNS_FROM_BYTES = 16 * 2**20


class Layer(NamedTuple):
    """The weights of one layer and direction.

    Attributes:
        kernel, recurrent, bias: [input, 4·units], [units, 4·units] and [4·units], gates in Keras' order.
        normalization: own_gain and upper_gain [4·units], c_gain and c_bias [units] of a layer-normalised layer; else none.
    """

    kernel: tf.Tensor
    recurrent: tf.Tensor
    bias: tf.Tensor
    normalization: Sequence[tf.Tensor] = ()


def layers_together(num_layers: int, units: int, itemsize: int) -> int:
    """How many layers advance together: all of them, or one at a time where a step waits for its weights.

    Args:
        itemsize: bytes of a number in the products.
    """
    return 1 if 4 * units * units * itemsize >= TURNS_FROM_BYTES else num_layers


def lstm_stack(
    inputs: tf.Tensor,
    layers: Sequence[Layer],
    h: tf.Tensor,
    c: tf.Tensor,
    *,
    lengths: tf.Tensor | None = None,
    dropout: Callable[[tf.Tensor], tf.Tensor] | None = None,
    together: int | None = None,
    unroll: int = UNROLL,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Run a stack of unidirectional layers.

    Args:
        inputs: [time, batch, features], float16, float32 or float64, the dtype of all weights too.
        layers: from the lowest up.
        h, c: initial states [layers, batch, units]; c is float32 where inputs are float16.
        lengths: steps [batch] int32 of each sequence, or None: all of time.
        dropout: applied to what goes from one layer to the next, or None.
        together: layers that advance together; None: by layers_together.

    Returns:
        outputs [time, batch, units], 0 behind a sequence's end, and the states h, c at each sequence's end.
    """
    units = layers[0].recurrent.shape[0]
    together = together or layers_together(len(layers), units, inputs.dtype.size)
    finals = []
    for first in range(0, len(layers), together):
        group = layers[first : first + together]
        if first and dropout:
            inputs = dropout(inputs)
        inputs, *final = _group(
            inputs, group, h[first : first + together], c[first : first + together], lengths, dropout, unroll
        )
        finals.append(final)
    h, c = (tf.concat(states, 0) for states in zip(*finals, strict=True))
    return inputs, h, c


def _group(inputs, group, h, c, lengths, dropout, unroll):
    """The layers of `group` together: their outputs [time, batch, units] and final states."""
    time, batch, features = (inputs.shape[k] if inputs.shape[k] is not None else tf.shape(inputs)[k] for k in range(3))
    projected = tf.matmul(tf.reshape(inputs, [-1, features]), group[0].kernel)
    links = masks = None
    if len(group) > 1:
        links = tf.stack([layer.kernel for layer in group[1:]])
        if dropout:
            units = links.shape[1]
            masks = dropout(tf.ones([time + len(group) - 1, len(group) - 1, batch, units], inputs.dtype))
    outputs, h, c = advance(
        tf.reshape(projected, [1, time, batch, projected.shape[-1]]),
        tf.stack([layer.recurrent for layer in group]),
        links,
        tf.stack([layer.bias for layer in group]),
        h,
        c,
        lengths=lengths,
        masks=masks,
        normalization=[tf.stack(parts) for parts in zip(*(layer.normalization for layer in group), strict=True)],
        unroll=unroll,
    )
    return outputs[0], h, c
