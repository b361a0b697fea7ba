"""Stacks of LSTM layers in terms of schedule.py: what of a stack advances together."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import tensorflow as tf

from .schedule import UNROLL, advance

# Bytes of one recurrent kernel from which on the layers take turns: a step then waits for the weights to come from memory,
# and a product of all layers at once would read the kernels of the links at every step too.
TURNS_FROM_BYTES = 16 * 2**20
# Under XLA on a CPU: with a body of one step schedule.py reads ahead, and a longer body is compiled two to four times as long.
CPU_UNROLL = 1


class LayerWeights(NamedTuple):
    """The weights of one layer and direction.

    Attributes:
        kernel, recurrent_kernel, bias: [input, 4·units], [units, 4·units] and [4·units], gates in Keras' order.
        normalization: recurrent_gain and kernel_gain [4·units], cell_gain and cell_bias [units] of a
            layer-normalised layer; else none.
    """

    kernel: tf.Tensor
    recurrent_kernel: tf.Tensor
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
    layers: Sequence[LayerWeights],
    h: tf.Tensor,
    c: tf.Tensor,
    *,
    lengths: tf.Tensor | None = None,
    dropout: Callable[[tf.Tensor], tf.Tensor] | None = None,
    keep: tf.Tensor | None = None,
    together: int | None = None,
    unroll: int = UNROLL,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Run a stack of unidirectional layers.

    Args:
        inputs: [time, batch, features] of a float dtype, that of all weights too.
        layers: from the lowest up.
        h, c: initial states [layers, batch, units]; c is float32 where inputs are float16 or bfloat16.
        lengths: steps [batch] int32 of each sequence, or None: all of time.
        dropout: applied to what goes from one layer to the next, or None.
        keep: booleans [layers, 4, batch, units], which of a layer's own h each gate sees at every step, elsewhere 0: recurrent
            dropout, whose factor is in the recurrent kernels. None: all.
        together: layers that advance together; None: by layers_together.

    Returns:
        outputs [time, batch, units], 0 past a sequence's end, and the states h, c at each sequence's end.
    """
    units = layers[0].recurrent_kernel.shape[0]
    together = together or layers_together(len(layers), units, inputs.dtype.size)
    finals = []
    for first in range(0, len(layers), together):
        group = layers[first : first + together]
        if first and dropout:
            inputs = dropout(inputs)
        own = slice(first, first + together)
        kept = None if keep is None else keep[own]
        inputs, *final = _group(inputs, group, h[own], c[own], lengths, dropout, kept, unroll)
        finals.append(final)
    h, c = (tf.concat(states, 0) for states in zip(*finals, strict=True))
    return inputs, h, c


def bidirectional_stack(
    inputs: tf.Tensor,
    layers: Sequence[tuple[LayerWeights, LayerWeights]],
    h: tf.Tensor,
    c: tf.Tensor,
    *,
    lengths: tf.Tensor | None = None,
    dropout: Callable[[tf.Tensor], tf.Tensor] | None = None,
    keep: tf.Tensor | None = None,
    unroll: int = UNROLL,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Run a stack of bidirectional layers: the two directions of a layer together, the layers in turn.

    A layer reads the whole of the one below, its first step needs that one's last, so no wavefront crosses layers.

    Args:
        layers: (forward, backward) of each layer, from the lowest up.
        h, c, keep: of 2·layers, the directions of a layer side by side.
        Otherwise as of lstm_stack.

    Returns:
        outputs [time, batch, 2·units] and the states h, c, as of lstm_stack. The backward direction ends at the first step.
    """
    finals = []
    for k, pair in enumerate(layers):
        if k and dropout:
            inputs = dropout(inputs)
        time, batch, features = _sizes(inputs)
        both = tf.reshape(tf.stack([inputs, reversed_steps(inputs, lengths)]), [2, -1, features])
        projected = tf.matmul(both, tf.stack([layer.kernel for layer in pair]))
        projected = tf.reshape(projected, [2, time, batch, projected.shape[-1]])
        states = h[2 * k : 2 * k + 2], c[2 * k : 2 * k + 2]
        kept = None if keep is None else keep[2 * k : 2 * k + 2]
        outputs, *final = _advance(projected, pair, None, *states, lengths=lengths, keep=kept, unroll=unroll)
        inputs = tf.concat([outputs[0], reversed_steps(outputs[1], lengths)], -1)
        finals.append(final)
    h, c = (tf.concat(states, 0) for states in zip(*finals, strict=True))
    return inputs, h, c


def _group(inputs, group, h, c, lengths, dropout, keep, unroll):
    """The layers of `group` together: their outputs [time, batch, units] and final states."""
    time, batch, features = _sizes(inputs)
    projected = tf.matmul(tf.reshape(inputs, [-1, features]), group[0].kernel)
    projected = tf.reshape(projected, [1, time, batch, projected.shape[-1]])
    links = masks = None
    if len(group) > 1:
        links = tf.stack([layer.kernel for layer in group[1:]])
        if dropout:
            units = links.shape[1]
            masks = dropout(tf.ones([time + len(group) - 1, len(group) - 1, batch, units], inputs.dtype))
    options = dict(lengths=lengths, masks=masks, keep=keep, unroll=unroll)
    outputs, h, c = _advance(projected, group, links, h, c, **options)
    return outputs[0], h, c


def _advance(projected, layers, links, h, c, **options):
    return advance(
        projected,
        tf.stack([layer.recurrent_kernel for layer in layers]),
        links,
        tf.stack([layer.bias for layer in layers]),
        h,
        c,
        normalization=[tf.stack(parts) for parts in zip(*(layer.normalization for layer in layers), strict=True)],
        **options,
    )


def reversed_steps(x: tf.Tensor, lengths: tf.Tensor | None) -> tf.Tensor:
    """x [time, batch, …] with the steps of each sequence the other way round, its padding where it was."""
    return tf.reverse(x, [0]) if lengths is None else tf.reverse_sequence(x, lengths, seq_axis=0, batch_axis=1)


def _sizes(x: tf.Tensor) -> list[int | tf.Tensor]:
    """Of x [time, batch, features], as integers where they are known."""
    return [x.shape[k] if x.shape[k] is not None else tf.shape(x)[k] for k in range(3)]
