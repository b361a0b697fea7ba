"""Layouts of one layer's weights, compared with the ops that read them. Whole stacks: test_cudnn_layouts.py."""

import numpy as np
import pytest

from models.reference.lstm import lstm_stack_backward, lstm_stack_forward
from models.weights import layouts
from models.weights.canonical import large_random, lstm_shapes, random_states
from tests.comparing import error

INPUT, UNITS, BATCH, TIME = 5, 7, 3, 6
WEIGHTS = large_random(lstm_shapes(INPUT, UNITS, num_layers=2), seed=1)
BIDIRECTIONAL = large_random(lstm_shapes(INPUT, UNITS, num_layers=2, bidirectional=True), seed=1)
STATES = random_states(1, BATCH, UNITS, seed=2)
INPUTS = np.random.default_rng(3).uniform(-2, 2, (BATCH, TIME, INPUT)).astype(np.float32)
D_OUTPUTS = np.random.default_rng(4).uniform(-1, 1, (BATCH, TIME, UNITS)).astype(np.float32)
FLOAT32 = 1e-6  # max|a - b| / max|b|: a few float32 roundings; a swapped gate gives more than 0.1

BLOCK_CELL, BLOCK_V2 = layouts.LSTM_BLOCK_CELL_GATES, layouts.BLOCK_LSTM_V2_GATES


def layer_of(weights, layer):
    return {name: array for name, array in weights.items() if name.startswith(f"lstm_{layer}/")}


def assert_same(given, expected):
    assert set(given) == set(expected)
    for name, array in expected.items():
        np.testing.assert_array_equal(given[name], array)
        assert given[name].dtype == array.dtype and given[name].flags.c_contiguous


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_every_layout_gives_back_the_canonical_form(layer, dtype):
    weights = {name: array.astype(dtype) for name, array in WEIGHTS.items()}
    both = {name: array.astype(dtype) for name, array in BIDIRECTIONAL.items()}
    assert_same(layouts.from_keras(layouts.to_keras(weights, layer), layer), layer_of(weights, layer))
    assert_same(layouts.from_keras(layouts.to_keras(both, layer, True), layer, True), layer_of(both, layer))
    for gates in (BLOCK_CELL, BLOCK_V2):
        assert_same(layouts.from_block(layouts.to_block(weights, layer, gates), layer, gates), layer_of(weights, layer))


def test_keras_lists_the_forward_direction_first():
    arrays = layouts.to_keras(BIDIRECTIONAL, 1, bidirectional=True)
    np.testing.assert_array_equal(arrays[0], BIDIRECTIONAL["lstm_1/forward/kernel"])
    np.testing.assert_array_equal(arrays[5], BIDIRECTIONAL["lstm_1/backward/bias"])


def test_a_wrong_list_or_gate_order_is_refused():
    with pytest.raises(ValueError, match=r"layer 0: 3 arrays given, expected Bidirectional\(LSTM\)'s 6"):
        layouts.from_keras(layouts.to_keras(WEIGHTS, 0), 0, bidirectional=True)
    with pytest.raises(ValueError, match=r"layer 1: w \[12, 28\] and b \[24\] given"):
        layouts.from_block((np.zeros((12, 28)), np.zeros(24)), 1)
    with pytest.raises(ValueError, match="'ifco' cannot be put in the order 'ifc'"):
        layouts.reorder_gates(np.zeros(12), "ifco", "ifc")
    with pytest.raises(ValueError, match=r"shape \[2, 10\] does not divide into the 4 gates"):
        layouts.reorder_gates(np.zeros((2, 10)), "ifco", "icfo")


def test_keras_lists_of_other_layers_are_refused():
    gru = [np.zeros((5, 21)), np.zeros((7, 21)), np.zeros((2, 21))]
    with pytest.raises(ValueError, match=r"layer 0: 2 arrays given, expected GRU's 3: gru_0/forward/kernel, "):
        layouts.from_keras(gru[:2], 0, mode="gru")
    with pytest.raises(
        ValueError, match=r"layer 0: 3 arrays given, expected Bidirectional\(SimpleRNN\)'s 6: rnn_relu_0/"
    ):
        layouts.from_keras(gru, 0, bidirectional=True, mode="rnn_relu")
    with pytest.raises(
        ValueError,
        match=r"gru_2/forward/bias is \[21\], expected \[2, 21\] \(GRU\(reset_after=False\) has no counterpart",
    ):
        layouts.from_keras([*gru[:2], np.zeros(21)], 2, mode="gru")
    with pytest.raises(ValueError, match=r"layer 1: gru_1/forward/kernel is \[5, 28\], expected \[5, 21\]"):
        layouts.from_keras([np.zeros((5, 28)), *gru[1:]], 1, mode="gru")
    with pytest.raises(ValueError, match=r"layer 0: lstm_0/forward/bias is \[2, 21\], expected \[28\]"):
        layouts.from_keras([np.zeros((5, 28)), np.zeros((7, 28)), gru[2]], 0)
    with pytest.raises(ValueError, match="mode: 'rnn' given, expected one of lstm, gru, rnn_tanh, rnn_relu"):
        layouts.from_keras(gru, 0, mode="rnn")
    with pytest.raises(ValueError, match="weights: gru_0/forward/kernel is missing; given: lstm_0/forward/kernel, "):
        layouts.to_keras(WEIGHTS, 0, mode="gru")


def test_lstm_block_cell_reads_its_layout_as_the_reference_does():
    tf = pytest.importorskip("tensorflow")
    w, b = layouts.to_block(WEIGHTS, 0, BLOCK_CELL)
    peephole = np.zeros(UNITS, np.float32)
    h, c = STATES[0][0]
    outputs = []
    with tf.device("CPU:0"):
        for t in range(TIME):
            step = tf.raw_ops.LSTMBlockCell(
                x=INPUTS[:, t], cs_prev=c, h_prev=h, w=w, b=b, wci=peephole, wcf=peephole, wco=peephole,
                forget_bias=0.0, cell_clip=0.0, use_peephole=False,
            )  # fmt: skip
            h, c = step.h, step.cs
            outputs.append(h.numpy())
    expected, final_states, _ = lstm_stack_forward(INPUTS, WEIGHTS, STATES, num_layers=1)
    assert error(np.stack(outputs, axis=1), expected) < FLOAT32
    assert error(c, final_states[0][0][1]) < FLOAT32


def test_block_lstm_v2_reads_its_layout_and_gives_the_references_gradients():
    tf = pytest.importorskip("tensorflow")
    w, b = layouts.to_block(WEIGHTS, 0)
    h, c = STATES[0][0]
    peephole = np.zeros(UNITS, np.float32)
    shared = dict(
        seq_len_max=np.int64(TIME), x=INPUTS.transpose(1, 0, 2), cs_prev=c, h_prev=h, w=w, b=b,
        wci=peephole, wcf=peephole, wco=peephole, use_peephole=False,
    )  # fmt: skip
    with tf.device("CPU:0"):
        run = tf.raw_ops.BlockLSTMV2(cell_clip=0.0, **shared)
        # Called by its name: the gradient that TensorFlow 2.21 registers for BlockLSTMV2 is that of the first version.
        back = tf.raw_ops.BlockLSTMGradV2(
            **{name: getattr(run, name) for name in ("i", "cs", "f", "o", "ci", "co", "h")},
            cs_grad=tf.zeros_like(run.cs), h_grad=D_OUTPUTS.transpose(1, 0, 2), **shared,
        )  # fmt: skip

    expected, _, cache = lstm_stack_forward(INPUTS, WEIGHTS, STATES, num_layers=1)
    d_inputs, gradients, d_states = lstm_stack_backward(D_OUTPUTS, cache)
    assert error(run.h.numpy().transpose(1, 0, 2), expected) < FLOAT32
    assert error(back.x_grad.numpy().transpose(1, 0, 2), d_inputs) < FLOAT32
    assert error(back.h_prev_grad, d_states[0][0][0]) < FLOAT32
    assert error(back.cs_prev_grad, d_states[0][0][1]) < FLOAT32
    given = layouts.from_block((back.w_grad.numpy(), back.b_grad.numpy()), 0)
    assert set(given) == set(gradients)
    for name, gradient in gradients.items():
        assert error(given[name], gradient) < FLOAT32, name


@pytest.mark.parametrize("bidirectional", [False, True])
def test_keras_layer_reads_its_layout_as_the_reference_does(bidirectional):
    keras = pytest.importorskip("keras")
    layer = keras.layers.LSTM(UNITS, return_sequences=True, use_cudnn=False)
    weights = BIDIRECTIONAL if bidirectional else WEIGHTS
    layer = keras.layers.Bidirectional(layer) if bidirectional else layer
    layer.build(INPUTS.shape)
    layer.set_weights(layouts.to_keras(weights, 0, bidirectional))
    states = random_states(1, BATCH, UNITS, seed=2, bidirectional=bidirectional)
    outputs = layer(INPUTS, initial_state=[array for pair in states[0] for array in pair])
    expected, _, _ = lstm_stack_forward(INPUTS, weights, states, 1, bidirectional)
    assert error(outputs, expected) < FLOAT32
    assert_same(layouts.from_keras(layer.get_weights(), 0, bidirectional), layer_of(weights, 0))
