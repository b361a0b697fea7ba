"""Two ways to compute a cuDNN RNN stack from cuDNN's flat buffer: cuDNN's one call, and TensorFlow's own ops for elsewhere.

The equations are cuDNN's (its API reference, cudnnRNNMode_t), with x the layer's input, h the state one step before, W and R the
input and recurrent matrices, b_W and b_R the two biases, σ the logistic sigmoid and * elementwise:

    rnn_relu   h' = relu(W x + R h + b_W + b_R)             rnn_tanh: tanh instead of relu
    lstm       i, f, o = σ(W_ifo x + R_ifo h + b_W + b_R)   g = tanh(W_c x + R_c h + b_W + b_R)
               c' = f * c + i * g                           h' = o * tanh(c')
    gru        r, z = σ(W_rz x + R_rz h + b_W + b_R)        n = tanh(W_h x + b_W + r * (R_h h + b_R))
               h' = (1 - z) * n + z * h

With skip_input the lowest layer has no W: x itself goes into every gate. The gates of a layer stand one after another in the
buffer, so that a layer's W is one matrix [gates·units, input] and takes one product over all steps before the loop over time.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from models.cudnn.checks import Lengths
from models.weights.stack_spec import CUDNN_GATES, StackSpec

State = tuple[tf.Tensor, ...]  # (h, c) of an LSTM, (h,) of the others; each [batch, units]

DIRECTIONS = ("unidirectional", "bidirectional")  # as the op names them; [spec.bidirectional]
INPUT_MODES = ("linear_input", "skip_input")  # [spec.skip_input]
UNPADDED, PADDED = 0, 1  # seed2 of the op: see run_cudnn


class Direction(NamedTuple):
    """The parameters of one direction of one layer, gates in cuDNN's order."""

    kernel: tf.Tensor | None  # [gates·units, input]; None where the input skips it
    recurrent_kernel: tf.Tensor  # [gates·units, units]
    input_bias: tf.Tensor  # [gates·units], b_W
    recurrent_bias: tf.Tensor  # [gates·units], b_R


def run_cudnn(
    spec: StackSpec,
    inputs: tf.Tensor,
    states: Sequence[tf.Tensor],
    params: tf.Tensor,
    sequence_lengths: Lengths | None = None,
    dropout: float = 0.0,
    seed: int = 0,
    is_training: bool = True,
) -> tuple[tf.Tensor, list[tf.Tensor]]:
    """Run the stack with one CudnnRNNV3. Arguments and results are those of `run`; gradients need is_training.

    From call to call the op keeps a cuDNN descriptor per number of steps, made for padded data or not, as the first batch
    wanted it (not padded where all its sequences are full); a later batch of the other kind would get the wrong one. So with
    sequence_lengths there is one more step, which no sequence reaches: such a batch always counts as padded. And its seed2 is
    another than without, since eager calls that differ in their tensors only share one kernel.
    """
    if sequence_lengths is None:
        lengths = _full_lengths(inputs)
    else:
        inside = _inside(inputs, sequence_lengths)
        inputs = _within(inside, inputs)
        inputs = tf.pad(inputs, [[0, 1], [0, 0], [0, 0]])
        lengths = tf.maximum(sequence_lengths.on_host, 1)  # cuDNN takes no empty sequence
    results = tf.raw_ops.CudnnRNNV3(
        input=inputs,
        input_h=states[0],
        input_c=states[1] if len(states) == 2 else tf.zeros([], inputs.dtype),  # read by an LSTM only
        params=params,
        sequence_lengths=lengths,
        rnn_mode=spec.mode,
        input_mode=INPUT_MODES[spec.skip_input],
        direction=DIRECTIONS[spec.bidirectional],
        dropout=dropout,
        seed=seed,
        seed2=UNPADDED if sequence_lengths is None else PADDED,
        num_proj=0,
        is_training=is_training,
        time_major=True,
    )
    output, finals = results.output, [results.output_h, results.output_c][: len(states)]
    if sequence_lengths is not None:
        # The op's own filling of the padding is a float32 zero, of which float64 reads eight bytes.
        output = _within(inside, output[:-1])
        started = (sequence_lengths.on_device > 0)[:, tf.newaxis]
        finals = [tf.where(started, final, state) for final, state in zip(finals, states, strict=True)]
    return output, finals


def run(
    spec: StackSpec,
    inputs: tf.Tensor,
    states: Sequence[tf.Tensor],
    params: tf.Tensor,
    sequence_lengths: Lengths | None = None,
    dropout: float = 0.0,
    seed: int = 0,
) -> tuple[tf.Tensor, list[tf.Tensor]]:
    """Run the stack with TensorFlow's ops.

    float16 is computed in float32 and rounded at the end, as cuDNN accumulates it.

    Args:
        spec: the stack.
        inputs: [time, batch, input]; time and batch may be unknown.
        states: [h] or, for an LSTM, [h, c], each [layers·directions, batch, units].
        params: cuDNN's flat buffer, [layouts.cudnn_size(spec)].
        sequence_lengths: of the batch, or None: all are as long as `inputs`. Outputs past a sequence's end are 0, its final
            state is the one at its end, and its backward direction starts there.
        dropout: share of every layer's outputs, but for the last layer's, that is set to 0; the others are divided by
            1 - dropout.
        seed: of dropout.

    Returns:
        outputs [time, batch, directions·units], and the final states in the form of `states`.
    """
    dtype = inputs.dtype
    if dtype == tf.float16:
        inputs, params, *states = (tf.cast(tensor, tf.float32) for tensor in (inputs, params, *states))
    if sequence_lengths is not None:
        inputs = _within(_inside(inputs, sequence_lengths), inputs)
    parameters = split(params, spec)
    initial = list(zip(*(tf.unstack(state, spec.num_pseudo_layers) for state in states), strict=True))

    outputs, finals = inputs, []
    for layer in range(spec.num_layers):
        if layer and dropout:
            outputs = _dropout(outputs, dropout, _layer_seed(seed, layer))
        of_directions = []
        for direction in spec.directions:
            pseudo_layer = len(finals)
            backward = direction == "backward"
            x = _reverse(outputs, sequence_lengths) if backward else outputs
            h, final = _run_direction(spec, x, initial[pseudo_layer], parameters[pseudo_layer], sequence_lengths)
            of_directions.append(_reverse(h, sequence_lengths) if backward else h)
            finals.append(final)
        outputs = tf.concat(of_directions, axis=-1)
    final_states = [tf.cast(tf.stack(state), dtype) for state in zip(*finals, strict=True)]
    return tf.cast(outputs, dtype), final_states


def split(params: tf.Tensor, spec: StackSpec) -> list[Direction]:
    """The flat buffer cut into the parameters of each pseudo-layer, in one op: its gradient is one concatenation."""
    rows = spec.units * gates(spec)
    matrices = []
    for layer, _ in spec.pseudo_layers:
        matrices += [(rows, spec.layer_input_size(layer) * spec.has_kernel(layer)), (rows, spec.units)]
    sizes = [int(np.prod(shape)) for shape in matrices]
    pieces = tf.split(params, sizes + [rows] * len(matrices))  # two matrices and two biases per pseudo-layer
    kernels = [tf.reshape(piece, shape) for piece, shape in zip(pieces, matrices, strict=False)]
    biases = pieces[len(matrices) :]
    return [
        Direction(kernels[k] if matrices[k][1] else None, kernels[k + 1], biases[k], biases[k + 1])
        for k in range(0, len(matrices), 2)
    ]


def gates(spec: StackSpec) -> int:
    """Gates per cell: 4 of an LSTM, 3 of a GRU, 1 of a plain RNN."""
    return len(CUDNN_GATES[spec.mode])


def _run_direction(
    spec: StackSpec, x: tf.Tensor, state: State, parameters: Direction, sequence_lengths: Lengths | None
) -> tuple[tf.Tensor, State]:
    """One direction of one layer over x [time, batch, input] → h of all steps [time, batch, units], final state."""
    time_steps, batch = tf.shape(x)[0], tf.shape(x)[1]
    width = spec.units * gates(spec)
    if parameters.kernel is None:
        projected = tf.tile(x, [1, 1, gates(spec)])
    else:  # one matrix product: tf.matmul of [time, batch, input] would make its gradient time products
        rows = tf.matmul(tf.reshape(x, [-1, x.shape[-1]]), parameters.kernel, transpose_b=True)
        projected = tf.reshape(rows, [time_steps, batch, width])
    projected += parameters.input_bias
    if spec.mode != "gru":  # a GRU's recurrent bias is inside the reset gate's product
        projected += parameters.recurrent_bias
    cell = _cell(spec.mode, tf.transpose(parameters.recurrent_kernel), parameters.recurrent_bias)

    steps = tf.TensorArray(x.dtype, size=time_steps, element_shape=[x.shape[1], width]).unstack(projected)
    outputs = tf.TensorArray(x.dtype, size=time_steps, element_shape=[x.shape[1], spec.units])

    def step(t, state, outputs):
        new = cell(steps.read(t), state)
        output = new[0]
        if sequence_lengths is not None:
            inside = (tf.cast(t, tf.int64) < sequence_lengths.on_device)[:, tf.newaxis]
            new = tuple(tf.where(inside, a, b) for a, b in zip(new, state, strict=True))
            output = tf.where(inside, output, tf.zeros_like(output))
        return t + 1, new, outputs.write(t, output)

    _, final, outputs = tf.while_loop(
        lambda t, *_: t < time_steps, step, (0, state, outputs), maximum_iterations=time_steps
    )
    outputs = tf.ensure_shape(outputs.stack(), [x.shape[0], x.shape[1], spec.units])
    return outputs, final


def _cell(mode: str, recurrent_kernel: tf.Tensor, recurrent_bias: tf.Tensor) -> Callable[[tf.Tensor, State], State]:
    """The step (projected input [batch, gates·units], state) → state; recurrent_kernel is [units, gates·units]."""

    def lstm(x, state):
        h, c = state
        i, f, g, o = tf.split(x + tf.matmul(h, recurrent_kernel), 4, axis=-1)
        c = tf.sigmoid(f) * c + tf.sigmoid(i) * tf.tanh(g)
        return tf.sigmoid(o) * tf.tanh(c), c

    def gru(x, state):
        (h,) = state
        x_r, x_z, x_h = tf.split(x, 3, axis=-1)
        h_r, h_z, h_h = tf.split(tf.matmul(h, recurrent_kernel) + recurrent_bias, 3, axis=-1)
        z = tf.sigmoid(x_z + h_z)
        return ((1.0 - z) * tf.tanh(x_h + tf.sigmoid(x_r + h_r) * h_h) + z * h,)

    def rnn(x, state):
        nonlinearity = tf.tanh if mode == "rnn_tanh" else tf.nn.relu
        return (nonlinearity(x + tf.matmul(state[0], recurrent_kernel)),)

    return {"lstm": lstm, "gru": gru}.get(mode, rnn)


def _full_lengths(inputs: tf.Tensor) -> tf.Tensor:
    """The steps of inputs [time, batch, …] for each sequence, int32 [batch]."""
    time_steps, batch, _ = inputs.shape
    if time_steps is None or batch is None:
        return tf.fill([tf.shape(inputs)[1]], tf.shape(inputs)[0])
    return tf.constant(time_steps, tf.int32, [batch])


def _inside(inputs: tf.Tensor, sequence_lengths: Lengths) -> tf.Tensor:
    """Whether a step belongs to its sequence, [time, batch, 1]."""
    steps = tf.range(tf.shape(inputs, tf.int64)[0])  # int64: TensorFlow compares int32 on the host, wherever it lives
    return (steps[:, tf.newaxis] < sequence_lengths.on_device)[:, :, tf.newaxis]


def _within(inside: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    """x, and its gradient, with zeros in the padding, whatever stands there: NaN, too."""
    return tf.where(inside, x, tf.zeros([], x.dtype))


def _reverse(x: tf.Tensor, sequence_lengths: Lengths | None) -> tf.Tensor:
    """x [time, batch, …] with each sequence read from its end; what lies past the end stays where it is."""
    if sequence_lengths is None:
        return tf.reverse(x, [0])
    return tf.reverse_sequence(x, sequence_lengths.on_device, seq_axis=0, batch_axis=1)


def _dropout(x: tf.Tensor, rate: float, seed: int) -> tf.Tensor:
    """x with a share of `rate` set to 0 and the rest scaled; unlike tf.nn.dropout it takes a rate of 1, as cuDNN does."""
    kept = tf.cast(tf.random.uniform(tf.shape(x), dtype=x.dtype, seed=seed) >= rate, x.dtype)
    return x * (kept * (1.0 / (1.0 - rate) if rate < 1.0 else 0.0))


def _layer_seed(seed: int, layer: int) -> int:
    """A seed for one layer: ops with one and the same seed draw the same numbers."""
    return int(np.random.SeedSequence([seed % 2**32, layer]).generate_state(1)[0] % 2**31)
