"""The classes of models/cudnn/rnn.py on an NVIDIA GPU: cuDNN computes what TensorFlow's ops compute from the same flat buffer."""

import functools
import itertools

import numpy as np
import pytest
import tensorflow as tf

from models.cudnn.saveable import CudnnLSTMSaveable, restore
from tests import cases, cudnn_cases
from tests.comparing import error
from tests.cudnn_cases import BATCH, CLASSES, DIRECTIONS, LENGTHS, TIME, UNITS

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu_runtime")]

LIMITS = {"float64": 1e-10, "float32": 1e-4, "float16": 3e-2}  # max|a - b| / max|b|
INPUT_MODES = ("linear_input", "skip_input", "auto_select")
cudnn = functools.partial(cudnn_cases.model, use_cudnn=True)
without = functools.partial(cudnn_cases.model, use_cudnn=False)


@pytest.fixture(autouse=True)
def fresh_kernels(gpu_runtime):
    """cuDNN descriptors live as long as their kernels, and hold the precision and the dropout's random numbers."""
    cases.execute_in("fp32")


def on_the_cpu(function, *args, **kwargs):
    with tf.device("CPU:0"):
        return function(*args, **kwargs)


def assert_same(given, expected, limit):
    for of_given, of_expected in zip(given, expected, strict=True):
        assert set(of_given) == set(of_expected)
        for name, array in of_expected.items():
            assert of_given[name].shape == array.shape and of_given[name].dtype == array.dtype
            assert error(of_given[name], array) < limit, name


# --- cuDNN against TensorFlow's ops ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["full", "lengths"])
@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("input_mode", INPUT_MODES)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("mode", CLASSES)
def test_cudnn_computes_outputs_states_and_gradients_of_the_tensorflow_ops(mode, direction, input_mode, dtype, lengths):
    arguments = (3, UNITS, 3 if input_mode == "linear_input" else UNITS, input_mode, direction, dtype)
    stack, reference = (CLASSES[mode](*arguments, use_cudnn=use) for use in (True, False))
    given = cudnn_cases.arguments(reference)
    expected = on_the_cpu(cudnn_cases.run, reference, given, lengths)
    assert_same(cudnn_cases.run(stack, given, lengths), expected, LIMITS[dtype])


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("mode", CLASSES)
def test_inference_computes_the_outputs_of_the_tensorflow_ops(mode, dtype):
    stack, reference = (make(mode, direction="bidirectional", dtype=dtype) for make in (cudnn, without))
    given = cudnn_cases.arguments(reference)
    for lengths in (None, LENGTHS):
        results = stack(**given, is_training=False, sequence_lengths=lengths)
        expected = on_the_cpu(reference, **given, is_training=False, sequence_lengths=lengths)
        for a, b in zip(results, expected, strict=True):
            assert error(a, b) < LIMITS[dtype]


@pytest.mark.parametrize("mode", CLASSES)
def test_sizes_as_of_a_language_model_agree_too(mode):
    stack, reference = (CLASSES[mode](2, 96, 48, direction="bidirectional", use_cudnn=use) for use in (True, False))
    given = cudnn_cases.arguments(reference, time=20, batch=16)
    given["params"] *= 0.2  # relu would grow beyond measure
    lengths = [20, *range(5, 20)]
    expected = on_the_cpu(cudnn_cases.run, reference, given, lengths)
    assert_same(cudnn_cases.run(stack, given, lengths), expected, LIMITS["float32"])


def test_one_cudnn_call_runs_the_whole_stack(gpu_runtime):
    stack = cudnn("lstm", 3, direction="bidirectional")
    given = {name: tf.constant(value) for name, value in cudnn_cases.arguments(stack).items()}
    assert stack.uses_cudnn
    assert gpu_runtime.profile(lambda: stack(**given))["ops"]["eager:CudnnRNNV3"] == 1


def test_auto_takes_cudnn():
    assert cudnn_cases.model("lstm").uses_cudnn
    assert not without("lstm").uses_cudnn


@pytest.mark.parametrize("with_lengths", [False, True])
@pytest.mark.parametrize("mode", CLASSES)
def test_a_graph_of_unknown_sizes_computes_what_the_call_does(mode, with_lengths):
    stack = cudnn(mode, direction="bidirectional")
    given = cudnn_cases.arguments(stack)
    specs = {name: tf.TensorSpec([None] * value.ndim, value.dtype) for name, value in given.items()}

    @tf.function
    def traced(lengths, **values):
        with tf.GradientTape() as tape:
            tape.watch(values)
            output, *_ = stack(**values, sequence_lengths=lengths if with_lengths else None)
            loss = tf.reduce_sum(output**2)
        return output, tape.gradient(loss, values)["params"]

    traced = traced.get_concrete_function(tf.TensorSpec([None], tf.int32), **specs)
    output, gradient = traced(tf.constant(LENGTHS), **{name: tf.constant(value) for name, value in given.items()})
    with tf.GradientTape() as tape:
        params = tf.constant(given["params"])
        tape.watch(params)
        expected, *_ = stack(**given | {"params": params}, sequence_lengths=LENGTHS if with_lengths else None)
        loss = tf.reduce_sum(expected**2)
    assert error(output, expected) < 1e-6
    assert error(gradient, tape.gradient(loss, params)) < 1e-5


@pytest.mark.parametrize("mode", CLASSES)
def test_training_a_variable_follows_the_tensorflow_ops(mode):
    def losses(stack):
        given = cudnn_cases.arguments(stack)
        params = tf.Variable(given.pop("params"))

        @tf.function
        def step():
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((stack(**given, params=stack.single_bias(params))[0] - 0.1) ** 2)
            params.assign_sub(0.1 * tape.gradient(loss, params))
            return loss

        return [float(step()) for _ in range(5)]

    stack, reference = (make(mode, direction="bidirectional") for make in (cudnn, without))
    assert error(losses(stack), on_the_cpu(losses, reference)) < LIMITS["float32"]


# --- lengths ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_a_graph", [False, True])
@pytest.mark.parametrize("mode", CLASSES)
def test_full_and_shorter_batches_may_follow_one_another(mode, in_a_graph):
    """The op keeps one cuDNN descriptor per sequence length, with padding or without, whichever batch comes first."""
    stack, reference = (make(mode, direction="bidirectional") for make in (cudnn, without))
    given = cudnn_cases.arguments(reference)
    longer = given | {"input_data": np.concatenate([given["input_data"], given["input_data"][:1]])}
    call = tf.function(stack) if in_a_graph else stack
    full = [TIME] * BATCH
    for values, lengths in itertools.product((given, longer), (None, full, LENGTHS, full, None, LENGTHS)):
        tensors = {name: tf.constant(value) for name, value in values.items()}
        sequence_lengths = None if lengths is None else tf.constant(lengths)
        results = call(**tensors, sequence_lengths=sequence_lengths)
        expected = on_the_cpu(reference, **values, sequence_lengths=lengths)
        for a, b in zip(results, expected, strict=True):
            assert error(a, b) < LIMITS["float32"]


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("mode", CLASSES)
def test_nothing_past_a_sequences_end_matters_and_an_empty_one_keeps_its_state(mode, dtype):
    stack, reference = (make(mode, direction="bidirectional", dtype=dtype) for make in (cudnn, without))
    given = cudnn_cases.arguments(reference)
    lengths = (0, 2, TIME, 4)
    expected = on_the_cpu(cudnn_cases.run, reference, given, lengths)
    for sequence, length in enumerate(lengths):
        given["input_data"][length:, sequence] = np.nan
    outputs, gradients = cudnn_cases.run(stack, given, lengths)
    assert_same((outputs, gradients), expected, LIMITS[dtype])
    for sequence, length in enumerate(lengths):
        assert not outputs["output"][length:, sequence].any()
        assert not gradients["input_data"][length:, sequence].any()
    for name in cudnn_cases.states_of(stack):
        np.testing.assert_array_equal(outputs[name.replace("input", "output")][:, 0], given[name][:, 0])


def test_a_graph_refuses_lengths_beyond_the_sequence_and_params_of_another_size():
    stack = cudnn("lstm")
    given = {name: tf.constant(value) for name, value in cudnn_cases.arguments(stack).items()}
    specs = {name: tf.TensorSpec([None] * len(value.shape), value.dtype) for name, value in given.items()}
    specs["sequence_lengths"] = tf.TensorSpec([None], tf.int32)
    traced = tf.function(lambda **values: stack(**values)).get_concrete_function(**specs)
    traced(**given, sequence_lengths=tf.constant(LENGTHS))
    with pytest.raises(tf.errors.InvalidArgumentError, match="sequence_lengths: expected 0 to the steps of input_data"):
        traced(**given, sequence_lengths=tf.constant([1, 2, 3, TIME + 1]))
    with pytest.raises(tf.errors.InvalidArgumentError, match="params"):
        traced(**given | {"params": given["params"][1:]}, sequence_lengths=tf.constant(LENGTHS))


# --- dropout ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_dropout_keeps_the_mean_and_half_of_the_numbers_doubled(dtype):
    inputs, output = (np.float64(a) for a in cudnn_cases.dropout_of_positive_inputs(0.5, use_cudnn=True, dtype=dtype))
    kept = output != 0
    np.testing.assert_allclose(output[kept], 2 * inputs[kept], rtol=2e-3)
    assert abs(kept.mean() - 0.5) < 0.01  # 5 standard deviations
    assert abs(output.mean() / inputs.mean() - 1) < 0.03


def test_dropout_of_1_leaves_nothing():
    assert not cudnn_cases.dropout_of_positive_inputs(1.0, use_cudnn=True)[1].any()


def test_dropout_does_nothing_outside_training():
    inputs, output = cudnn_cases.dropout_of_positive_inputs(0.5, is_training=False, use_cudnn=True)
    np.testing.assert_allclose(output, inputs, rtol=1e-6)


def test_dropout_nearly_repeats_with_its_seed_and_differs_between_seeds_and_calls():
    def mask(seed):
        return cudnn_cases.dropout_of_positive_inputs(0.5, seed, use_cudnn=True)[1] != 0

    first, next_call = mask(0), mask(0)
    assert (first != next_call).any()
    cases.execute_in("fp32")  # drops the kernels
    # Not to the last number: on an H200 cuDNN 9.19's own masks differed in few elements.
    assert (mask(0) != first).mean() < 0.01
    for other in (1, -1):
        assert abs((mask(other) == first).mean() - 0.5) < 0.01  # independent masks


def test_gradients_pass_through_the_same_dropout():
    stack = cudnn("rnn_relu", skip=True, dropout=0.5)
    weights, biases = stack.params_to_canonical(np.zeros(stack.params_size(), np.float32))
    weights = [w if k % 2 or not w.shape[1] else tf.eye(UNITS) for k, w in enumerate(weights)]
    params, inputs = stack.canonical_to_params(weights, biases), tf.ones([20, BATCH, UNITS])
    with tf.GradientTape() as tape:
        tape.watch(inputs)
        output, _ = stack(inputs, tf.zeros([2, BATCH, UNITS]), params)
    np.testing.assert_allclose(tape.gradient(output, inputs), output, rtol=1e-5)  # both are 0 or 2 per number
    assert 0 < (output.numpy() != 0).mean() < 1


# --- params -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("input_mode", INPUT_MODES)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("mode", CLASSES)
def test_params_size_is_what_cudnn_says(mode, direction, input_mode, dtype):
    for num_layers, units, input_size in ((1, 1, 1), (1, 5, 3), (3, 5, 3), (2, 64, 64), (2, 200, 128), (4, 33, 7)):
        if input_mode == "skip_input":
            input_size = units
        size = tf.raw_ops.CudnnRNNParamsSize(
            num_layers=num_layers, num_units=units, input_size=input_size, T=tf.as_dtype(dtype), S=tf.int32,
            rnn_mode=mode, input_mode=input_mode, direction=direction,
        )  # fmt: skip
        stack = CLASSES[mode](num_layers, units, input_size, input_mode, direction, dtype)
        assert stack.params_size() == int(np.squeeze(size))


def test_params_trained_and_saved_with_cudnn_are_restored_without(tmp_path):
    stack, other = (make("lstm", direction="bidirectional") for make in (cudnn, without))
    given = cudnn_cases.arguments(stack)
    params = tf.Variable(given.pop("params"))
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(stack(**given, params=params)[0] ** 2)
    params.assign_sub(tape.gradient(loss, params))
    path = tf.train.Checkpoint(rnn=CudnnLSTMSaveable(stack, params, "rnn")).save(tmp_path / "model")
    with tf.device("CPU:0"):
        restored = tf.Variable(tf.zeros_like(params))
        checkpoint = tf.train.Checkpoint(rnn=CudnnLSTMSaveable(other, restored, "rnn"))
        restore(checkpoint, path).assert_existing_objects_matched()
        output = other(**given, params=restored)[0]
    np.testing.assert_array_equal(restored, params)
    assert error(output, stack(**given, params=params)[0]) < LIMITS["float32"]
