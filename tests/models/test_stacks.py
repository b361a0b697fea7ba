"""Every LSTM stack, compared with the float64 reference: outputs, final states, and the gradients of all that enters it."""

import re

import numpy as np
import pytest
import tensorflow as tf

from harness.measure.proof import Proof
from models import rows
from models.reference.lstm import lstm_stack_backward, lstm_stack_forward
from models.weights.canonical import large_random, lstm_shapes, random_states
from tests import cases, sizes
from tests.comparing import error

FEATURES, UNITS, LAYERS, BATCH, TIME = 5, 7, 2, 4, 5
WEIGHTS = large_random(lstm_shapes(FEATURES, UNITS, LAYERS), seed=1)
STATES = random_states(LAYERS, BATCH, UNITS, seed=2)
ROWS = [name for name, made in rows.TENSORFLOW.items() if not made.needs_gpu and name != "keras_xla"]  # keras' stack
EXACT = ("unrolled", "while_loop", "keras", "wavefront")  # whose operations exist in float64
LIMITS = {"float64": 1e-13, "float32": 5e-6, "float16": 1e-2}  # max|a - b| / max|b|; measured: 7e-16, 8e-7, 3e-3


def uniform(seed, *shape):
    return np.random.default_rng(seed).uniform(-1, 1, shape).astype(np.float32)


INPUTS, D_OUTPUTS = uniform(3, BATCH, TIME, FEATURES), uniform(4, BATCH, TIME, UNITS)


class BatchMajor:
    """A time-major stack with one pair of states, called as the others are."""

    def __init__(self, stack):
        self.stack = stack

    def __getattr__(self, name):
        return getattr(self.stack, name)

    def __call__(self, inputs, states, dropout, training):
        h, c = (tf.stack(part) for part in zip(*states, strict=True))
        wide = tf.float32 if self.dtype == "float16" else self.dtype
        outputs, finals = self.stack(tf.transpose(inputs, [1, 0, 2]), (h, tf.cast(c, wide)), dropout, training)
        h, c = finals[0], tf.cast(finals[1], outputs.dtype)
        return tf.transpose(outputs, [1, 0, 2]), list(zip(tf.unstack(h), tf.unstack(c), strict=True))


def build(row, dtype="float32", weights=WEIGHTS, num_layers=LAYERS):
    stack = rows.TENSORFLOW[row].arguments["stack"](weights, num_layers, dtype)
    return BatchMajor(stack) if stack.time_major else stack


def tensors(states, dtype):
    return [tuple(tf.constant(array, dtype) for array in layer[0]) for layer in states]


def flat(states):
    return [array for pair in states for array in pair]


def run(stack, inputs=INPUTS, states=STATES, dropout=None, compiled=False):
    """Outputs, final states, and the derivatives of Σ outputs · D_OUTPUTS by inputs, initial states and weights."""
    inputs, states = tf.constant(inputs, stack.dtype), tensors(states, stack.dtype)
    values = [variable.value for variable in stack.variables]

    def forward(inputs, states):
        return stack(inputs, states, dropout, training=True)

    with tf.GradientTape() as tape:
        tape.watch([inputs, *flat(states)])
        outputs, finals = (tf.function(forward) if compiled else forward)(inputs, states)
        loss = tf.reduce_sum(tf.cast(outputs, tf.float64) * D_OUTPUTS.astype(np.float64))
    d_inputs, d_states, d_values = tape.gradient(loss, [inputs, flat(states), values])
    return outputs, flat(finals), d_inputs, d_states, stack.to_canonical([d.numpy() for d in d_values])


def reference(inputs=INPUTS, states=STATES):
    """The same in float64 by models/reference/lstm.py."""
    outputs, finals, cache = lstm_stack_forward(inputs, WEIGHTS, states, LAYERS)
    d_inputs, d_weights, d_states = lstm_stack_backward(D_OUTPUTS, cache)
    return outputs, flat([f[0] for f in finals]), d_inputs, flat([d[0] for d in d_states]), d_weights


def assert_close(given, expected, limit):
    for name, a, b in zip(("outputs", "final states", "d_inputs", "d_states"), given[:4], expected[:4], strict=True):
        for k, (x, y) in enumerate(zip(a, b, strict=True)):
            assert error(x, y) < limit, f"{name} {k}"
    assert set(given[4]) == set(expected[4])
    for name, gradient in expected[4].items():
        assert error(given[4][name], gradient) < limit, name


@pytest.mark.parametrize(
    ("row", "dtype"), [*((row, "float64") for row in EXACT), *((row, d) for row in ROWS for d in ("float32", "float16"))]
)  # fmt: skip
def test_outputs_states_and_all_gradients_match_the_reference(row, dtype):
    given = run(build(row, dtype), compiled=not rows.TENSORFLOW[row].arguments.get("eager"))
    assert given[0].dtype == dtype and all(state.dtype == dtype for state in given[1])
    assert_close(given, reference(), LIMITS[dtype])


@pytest.mark.parametrize("row", ROWS)
def test_cell_states_beyond_3_are_not_clipped(row):
    """The block ops clip them there unless they are asked not to."""
    states = [[(h, 8 * c)] for layer in STATES for h, c in layer]
    _, _, cache = lstm_stack_forward(INPUTS, WEIGHTS, states, LAYERS)
    assert np.abs(cache[0][0].c[1:]).max() > 4
    assert_close(run(build(row), states=states), reference(states=states), LIMITS["float32"])


@pytest.mark.parametrize("row", ROWS)
def test_one_sequence_of_one_step(row):
    states = [[(h[:1], c[:1])] for layer in STATES for h, c in layer]
    expected, finals, _ = lstm_stack_forward(INPUTS[:1, :1], WEIGHTS, states, LAYERS)
    outputs, given = build(row)(tf.constant(INPUTS[:1, :1]), tensors(states, "float32"), None, training=False)
    assert error(outputs, expected) < LIMITS["float32"]
    assert error(flat(given), flat([layer[0] for layer in finals])) < LIMITS["float32"]


@pytest.mark.parametrize("row", ["while_loop", "block_fused", "keras"])
def test_one_graph_runs_any_number_of_steps(row):
    stack = build(row)
    states = tensors(STATES, "float32")

    @tf.function(input_signature=[tf.TensorSpec([BATCH, None, FEATURES])])
    def outputs_of(inputs):
        return stack(inputs, states, None, training=False)[0]

    for steps in (1, TIME):
        expected, _, _ = lstm_stack_forward(INPUTS[:, :steps], WEIGHTS, STATES, LAYERS)
        assert error(outputs_of(tf.constant(INPUTS[:, :steps])), expected) < LIMITS["float32"]
    assert outputs_of.experimental_get_tracing_count() == 1


# --- weights ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", ROWS)
def test_variables_are_the_canonical_weights_and_come_back_bit_by_bit(row):
    others = {"embedding": uniform(1, 3, FEATURES), "dense_0/kernel": uniform(2, UNITS, 3)}
    stack = build(row, weights={**WEIGHTS, **others})
    arrays = stack.from_canonical(WEIGHTS)
    for variable, array in zip(stack.variables, arrays, strict=True):
        np.testing.assert_array_equal(variable.numpy(), array)
    canonical = stack.to_canonical([variable.numpy() for variable in stack.variables])
    assert list(canonical) == list(WEIGHTS)
    for name, array in WEIGHTS.items():
        np.testing.assert_array_equal(canonical[name], array)
    assert stack.units == UNITS and stack.num_layers == LAYERS


@pytest.mark.parametrize("row", ROWS)
def test_variables_of_a_float16_stack_are_float32(row):
    assert {variable.dtype for variable in build(row, "float16").variables} == {"float32"}


# --- dropout ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", ROWS)
def test_dropout_is_called_between_layers_and_on_no_other_tensor(row):
    seen = []

    def dropout(x):
        seen.append(sorted(x.shape))
        return x

    given = run(build(row), dropout=dropout)
    one = sorted((BATCH, TIME, UNITS))
    if row == "wavefront":  # the masks of all layers at once, by step of the schedule
        one = sorted((TIME + LAYERS - 1, LAYERS - 1, BATCH, UNITS))
    assert seen == [one] * (LAYERS - 1)
    assert_close(given, reference(), LIMITS["float32"])


@pytest.mark.parametrize("row", ROWS)
def test_dropout_cuts_what_a_layer_hands_to_the_next(row):
    """With everything dropped, the last layer sees no inputs: only its recurrent half gets a gradient."""
    *_, gradients = run(build(row), dropout=lambda x: 0.0 * x)
    top = f"lstm_{LAYERS - 1}/forward"
    silent = {name for name, gradient in gradients.items() if not gradient.any()}
    assert silent == set(WEIGHTS) - {f"{top}/recurrent_kernel", f"{top}/bias"}


@pytest.mark.parametrize("row", ROWS)
def test_dropout_rate_is_a_variable_of_the_graph(row):
    stack, rate = build(row), tf.Variable(0.5)
    inputs, states = tf.constant(INPUTS), tensors(STATES, "float32")

    @tf.function
    def outputs_of(inputs):
        return stack(inputs, states, lambda x: tf.nn.dropout(x, rate), training=True)[0]

    dropped = [outputs_of(inputs).numpy() for _ in range(2)]
    assert error(dropped[0], dropped[1]) > 0.01
    rate.assign(0.0)
    assert error(outputs_of(inputs), reference()[0]) < LIMITS["float32"]
    assert outputs_of.experimental_get_tracing_count() == 1


# --- BlockLSTMV2 --------------------------------------------------------------------------------------------------------


def test_registered_gradient_of_block_lstm_v2_is_wrong_and_the_row_does_not_use_it():
    """Why models/tf/block_fused.py brings its own: when this fails, TensorFlow has corrected it."""
    kernel, bias = (tf.constant(array) for array in build("block_fused", num_layers=1).from_canonical(WEIGHTS))
    (h, c), zeros = tensors(STATES[:1], "float32")[0], tf.zeros(UNITS)
    expected, _, cache = lstm_stack_forward(INPUTS, WEIGHTS, STATES[:1], 1)
    with tf.GradientTape() as tape:
        tape.watch(kernel)
        layer = tf.raw_ops.BlockLSTMV2(
            seq_len_max=TIME, x=tf.transpose(INPUTS, [1, 0, 2]), cs_prev=c, h_prev=h, w=kernel, wci=zeros, wcf=zeros,
            wco=zeros, b=bias, cell_clip=0.0, use_peephole=False,
        )  # fmt: skip
        loss = tf.reduce_sum(tf.transpose(layer.h, [1, 0, 2]) * D_OUTPUTS)
    assert error(tf.transpose(layer.h, [1, 0, 2]), expected) < LIMITS["float32"]
    _, gradients, _ = lstm_stack_backward(D_OUTPUTS, cache)
    right = gradients["lstm_0/forward/kernel"]
    assert error(tape.gradient(loss, kernel)[:FEATURES], right) > 0.1
    stack = build("block_fused", num_layers=1)
    *_, own = run(stack, states=STATES[:1], compiled=True)
    assert error(own["lstm_0/forward/kernel"], right) < LIMITS["float32"]


# --- what is seen running -----------------------------------------------------------------------------------------------

ALIKE = {"while_loop": {"while_loop", "keras"}, "keras": {"while_loop", "keras"}}  # both a loop of products


@pytest.mark.parametrize("row", sizes.half(ROWS))
def test_row_is_seen_to_run_what_it_names_and_nothing_that_another_names(row, tensorflow_runtime):
    trial = cases.language_model(row, "fp32")
    for step in (trial.train, trial.forward):
        step(trial.batches[0])
        profile = tensorflow_runtime.profile(lambda step=step: step(trial.batches[0]))
        accepted = set()
        for named in rows.TENSORFLOW:
            proof = Proof("fp32")
            proof.what_ran(profile, cases.kernel_of(named), "cpu")
            accepted |= set() if proof.failures else {named}
        assert accepted == ALIKE.get(row, {row})


@pytest.mark.parametrize(
    "kernel",
    [
        "void elemWiseRNNcell<float, float, float, (cudnnRNNMode_t)2, (cudnnRNNBiasMode_t)2>(int, int, int, int, in",
        "void LSTM_elementWise_bp1<__half, __half, float>(int, int, __half*, __half*, __half*",
        "void RNN_blockPersist_fp_LSTM<float, float, float, 128>(float const*, float*, float const*, float*, ",
        "void RNN_persist_fp<__half, __half, float, (cudnnRNNMode_t)2, true, 256, 2, 1, 4, 32, 0, 32, 32, 4, 1, 8, 2, 8",
        "void RNN_persist_bp<__half, __half, float, (cudnnRNNMode_t)2, true, 256, 8, 2, 2, 32, 0, 64, 32, 2",
    ],
)
def test_kernels_that_cudnn_was_seen_to_run_on_a_gpu_are_known_as_its(kernel):
    assert re.search(rows.CUDNN_KERNEL, kernel)


@pytest.mark.parametrize(
    "kernel", ["lstm_wavefront_forward", "lstm_gates", "lstm_cell_forward", "loop_add_tanh_fusion"]
)
def test_kernels_of_others_are_not_taken_for_cudnns(kernel):
    assert not re.search(rows.CUDNN_KERNEL, kernel)
