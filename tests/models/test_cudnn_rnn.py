"""The classes of cudnn/rnn.py without cuDNN: compared with PyTorch, finite differences, and what their arguments promise."""

import functools
import types

import numpy as np
import pytest
import tensorflow as tf

from models.cudnn import rnn as cudnn_rnn
from models.cudnn import rnn_ops
from models.cudnn.checks import Lengths
from models.cudnn.rnn import CudnnGRU, CudnnLSTM, CudnnRNNRelu, CudnnRNNTanh
from models.weights import layouts
from models.weights.stack_spec import cudnn_biases, cudnn_matrices
from tests import cudnn_cases, sizes
from tests.comparing import error
from tests.cudnn_cases import BATCH, CLASSES, DIRECTIONS, INPUT, LENGTHS, TIME, UNITS

pytestmark = pytest.mark.usefixtures("on_the_cpu")

MODES = tuple(CLASSES)
FLOAT64 = 1e-10  # against PyTorch and between two ways to run; measured: 2e-15
model = functools.partial(cudnn_cases.model, use_cudnn=False)


# --- against PyTorch ----------------------------------------------------------------------------------------------------


def torch_module(torch, stack, params):
    """torch's module of the same stack, with params read into it piece by piece; and the same for its gradient's way back."""
    features, layers, both = stack.input_size, stack.num_layers, stack.spec.bidirectional
    kinds = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU, "rnn_tanh": torch.nn.RNN, "rnn_relu": torch.nn.RNN}
    options = {"nonlinearity": stack.rnn_mode[4:]} if stack.rnn_mode.startswith("rnn") else {}
    module = kinds[stack.rnn_mode](features, UNITS, layers, bidirectional=both, dtype=torch.float64, **options)
    suffixes = [f"l{layer}{end}" for layer in range(layers) for end in ("", "_reverse")[: 1 + both]]
    names = [f"weight_{part}_{suffix}" for suffix in suffixes for part in ("ih", "hh")]
    names += [f"bias_{part}_{suffix}" for suffix in suffixes for part in ("ih", "hh")]
    if stack.spec.skip_input:
        skipped = [f"weight_ih_l0{end}" for end in ("", "_reverse")[: 1 + both]]
        names = [name for name in names if name not in skipped]
        for name in skipped:
            kernel = getattr(module, name)
            kernel.data = torch.eye(UNITS, dtype=torch.float64).repeat(kernel.shape[0] // UNITS, 1)
    parameters = [getattr(module, name) for name in names]
    ends = np.cumsum([parameter.numel() for parameter in parameters])
    assert ends[-1] == params.size
    for parameter, piece in zip(parameters, np.split(params, ends[:-1]), strict=True):
        parameter.data = torch.tensor(piece).reshape(parameter.shape)
    return module, parameters


def torch_run(stack, given, sequence_lengths=None):
    """As cudnn_cases.run, by torch.nn in float64."""
    torch = pytest.importorskip("torch")
    from torch.nn.utils import rnn

    module, parameters = torch_module(torch, stack, given["params"])
    leaves = {n: torch.tensor(a, requires_grad=True) for n, a in given.items() if n != "params"}
    inputs, *initial = leaves.values()
    if sequence_lengths is not None:
        inputs = rnn.pack_padded_sequence(inputs, sequence_lengths, enforce_sorted=False)
    output, finals = module(inputs, tuple(initial) if len(initial) == 2 else initial[0])
    if sequence_lengths is not None:
        output, _ = rnn.pad_packed_sequence(output, total_length=TIME)
    results = [output, *(finals if len(initial) == 2 else [finals])]
    as_tensorflow = [tf.constant(r.detach().numpy()) for r in results]
    weights = cudnn_cases.upstream(as_tensorflow)
    sum((r * torch.tensor(w)).sum() for r, w in zip(results, weights, strict=True)).backward()
    gradients = {name: leaf.grad.numpy() for name, leaf in leaves.items()}
    gradients["params"] = np.concatenate([parameter.grad.numpy().ravel() for parameter in parameters])
    names = ("output", "output_h", "output_c")
    return dict(zip(names, (r.numpy() for r in as_tensorflow), strict=False)), gradients


def assert_same(given, expected, limit):
    for of_given, of_expected in zip(given, expected, strict=True):
        assert set(of_given) == set(of_expected)
        for name, array in of_expected.items():
            assert of_given[name].shape == array.shape
            assert error(of_given[name], array) < limit, name


@pytest.mark.parametrize(
    ("mode", "num_layers", "direction", "skip", "lengths"),
    sizes.half(MODES, (1, 3), DIRECTIONS, (False, True), (None, LENGTHS)),
)
def test_outputs_states_and_gradients_are_those_of_torch(mode, num_layers, direction, skip, lengths):
    stack = model(mode, num_layers, skip, direction=direction, dtype=tf.float64)
    given = cudnn_cases.arguments(stack)
    assert_same(cudnn_cases.run(stack, given, lengths), torch_run(stack, given, lengths), FLOAT64)


@pytest.mark.parametrize("mode", MODES)
def test_skip_input_is_a_linear_input_by_identity_matrices(mode):
    skipping = model(mode, skip=True, dtype=tf.float64)
    linear = CLASSES[mode](2, UNITS, UNITS, dtype=tf.float64, use_cudnn=False)
    given = cudnn_cases.arguments(skipping)
    weights, biases = skipping.params_to_canonical(given["params"])
    assert weights[0].shape == [UNITS, 0]
    weights = [w if w.shape[1] else tf.eye(UNITS, dtype=tf.float64) for w in weights]
    same = given | {"params": linear.canonical_to_params(weights, biases).numpy()}
    assert_same(cudnn_cases.run(skipping, given)[:1], cudnn_cases.run(linear, same)[:1], FLOAT64)


# --- gradients ----------------------------------------------------------------------------------------------------------


# By default of one mode: those of all are compared with PyTorch's above.
@pytest.mark.parametrize("lengths", [pytest.param(None, marks=pytest.mark.slow), (2, 1)], ids=["full", "lengths"])
@pytest.mark.parametrize("mode", [pytest.param(m, marks=[pytest.mark.slow] * (m != "lstm")) for m in MODES])
def test_gradients_are_those_of_finite_differences(mode, lengths):
    stack = CLASSES[mode](2, 2, 1, direction="bidirectional", dtype=tf.float64, use_cudnn=False)
    given = cudnn_cases.arguments(stack, time=2, batch=2)

    @tf.function
    def loss(*values):
        results = stack(**dict(zip(given, values, strict=True)), sequence_lengths=lengths)
        return tf.add_n([tf.reduce_sum(r * (k + tf.sin(r))) for k, r in enumerate(results)])

    exact, numeric = tf.test.compute_gradient(loss, list(given.values()), delta=1e-5)
    for name, a, b in zip(given, exact, numeric, strict=True):
        assert np.abs(a - b).max() < 1e-8, name


def test_is_training_changes_neither_results_nor_gradients_without_dropout():
    stack = model("lstm", dtype=tf.float64)
    given = cudnn_cases.arguments(stack)
    assert_same(cudnn_cases.run(stack, given, is_training=False), cudnn_cases.run(stack, given), 1e-15)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_single_bias_holds_the_second_bias_and_nothing_else(mode, direction):
    stack = model(mode, 2, direction=direction, dtype=tf.float64)
    given = cudnn_cases.arguments(stack)
    params = tf.constant(given["params"])

    def gradient(of):
        with tf.GradientTape() as tape:
            tape.watch(params)
            loss = tf.reduce_sum(stack(**given | {"params": of(params)})[0] ** 2)
        return stack.params_to_canonical(tape.gradient(loss, params))

    np.testing.assert_array_equal(stack.single_bias(params), params)
    (weights, biases), (free_weights, free_biases) = gradient(stack.single_bias), gradient(tf.identity)
    for (name, _), held, free in zip(cudnn_biases(stack.spec), biases, free_biases, strict=True):
        expected = tf.zeros_like(free) if "b_R" in name and mode != "gru" else free
        np.testing.assert_array_equal(held, expected, err_msg=name)
    for held, free in zip(weights, free_weights, strict=True):
        np.testing.assert_array_equal(held, free)


# --- precisions, graphs and lengths ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "limit"), [(tf.float32, 1e-5), (tf.float16, 1e-2)])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("mode", MODES)
def test_lower_precisions_agree_with_float64(mode, direction, dtype, limit):
    stack, exact = (model(mode, direction=direction, dtype=d) for d in (dtype, tf.float64))
    given = cudnn_cases.arguments(stack)
    same = {name: value.astype(np.float64) for name, value in given.items()}
    outputs, gradients = cudnn_cases.run(stack, given, LENGTHS)
    assert all(array.dtype == dtype.as_numpy_dtype for array in (*outputs.values(), *gradients.values()))
    assert_same((outputs, gradients), cudnn_cases.run(exact, same, LENGTHS), limit)


@pytest.mark.parametrize(
    ("mode", "with_lengths", "known"),
    sizes.half(("lstm", "gru"), (False, True), ("nothing", "batch of the state", "time")),
)
def test_a_graph_of_unknown_sizes_computes_what_the_call_does(mode, with_lengths, known):
    stack = model(mode, direction="bidirectional", dtype=tf.float64)
    given = cudnn_cases.arguments(stack)
    time, batch = (TIME if known == "time" else None), (BATCH if known == "batch of the state" else None)
    specs = {
        name: tf.TensorSpec(
            {"params": [None], "input_data": [time, None, None]}.get(name, [None, batch, None]), tf.float64
        )
        for name in given
    }
    traced = tf.function(
        lambda lengths, **values: stack(**values, sequence_lengths=lengths if with_lengths else None)
    ).get_concrete_function(tf.TensorSpec([None], tf.int32), **specs)
    lengths = LENGTHS if with_lengths else None
    for shorter in (TIME, TIME) if known == "time" else (TIME, TIME - 1):
        values = given | {"input_data": given["input_data"][:shorter]}
        cut = None if lengths is None else np.minimum(lengths, shorter)
        results = traced(
            tf.constant(LENGTHS if cut is None else cut, tf.int32), **{n: tf.constant(v) for n, v in values.items()}
        )
        for a, b in zip(results, stack(**values, sequence_lengths=cut), strict=True):
            assert error(a, b) < 1e-14


@pytest.mark.parametrize("mode", MODES)
def test_nothing_past_a_sequences_end_matters_and_an_empty_one_keeps_its_state(mode):
    stack = model(mode, direction="bidirectional", dtype=tf.float64)
    given = cudnn_cases.arguments(stack)
    lengths = (0, 2, TIME, 4)
    outputs, gradients = cudnn_cases.run(stack, given, lengths)
    for sequence, length in enumerate(lengths):
        assert not outputs["output"][length:, sequence].any()
        assert not gradients["input_data"][length:, sequence].any()
        assert outputs["output"][:length, sequence].any() == (length > 0)
        given["input_data"][length:, sequence] = np.nan
    for name in cudnn_cases.states_of(stack):
        np.testing.assert_array_equal(outputs[name.replace("input", "output")][:, 0], given[name][:, 0])
    for same, before in zip(cudnn_cases.run(stack, given, lengths), (outputs, gradients), strict=True):
        for name, array in before.items():
            np.testing.assert_array_equal(same[name], array)


def test_lengths_may_be_int64_and_a_list():
    stack = model("gru", dtype=tf.float64)
    given = cudnn_cases.arguments(stack)
    expected = stack(**given, sequence_lengths=tf.constant(LENGTHS, tf.int64))[0]
    np.testing.assert_array_equal(stack(**given, sequence_lengths=list(LENGTHS))[0], expected)


# --- dropout ------------------------------------------------------------------------------------------------------------


def test_dropout_keeps_the_mean_and_half_of_the_numbers_doubled():
    inputs, output = cudnn_cases.dropout_of_positive_inputs(0.5, use_cudnn=False)
    kept = output != 0
    np.testing.assert_allclose(output[kept], 2 * inputs[kept], rtol=1e-6)
    assert abs(kept.mean() - 0.5) < 0.01  # 5 standard deviations
    assert abs(output.mean() / inputs.mean() - 1) < 0.03


def test_dropout_of_1_leaves_nothing():
    assert not cudnn_cases.dropout_of_positive_inputs(1.0, use_cudnn=False)[1].any()


def test_dropout_does_nothing_outside_training():
    inputs, output = cudnn_cases.dropout_of_positive_inputs(0.5, is_training=False, use_cudnn=False)
    np.testing.assert_array_equal(output, inputs)


def dropout_mask(seed):
    tf.random.set_seed(1)  # drops the eager kernels, which otherwise go on with their random numbers
    return cudnn_cases.dropout_of_positive_inputs(0.5, seed, use_cudnn=False)[1] != 0


def test_dropout_repeats_with_its_seed_and_differs_between_seeds():
    np.testing.assert_array_equal(dropout_mask(0), dropout_mask(0))
    for other in (1, -1):
        assert abs((dropout_mask(0) == dropout_mask(other)).mean() - 0.5) < 0.01  # independent masks


def test_dropout_differs_from_call_to_call_and_from_layer_to_layer():
    stack = CudnnRNNRelu(3, 16, 16, dropout=0.5, use_cudnn=False)
    weights, biases = stack.params_to_canonical(np.zeros(stack.params_size(), np.float32))
    params = stack.canonical_to_params([tf.eye(16) if k % 2 == 0 else w for k, w in enumerate(weights)], biases)
    call = tf.function(lambda: stack(tf.ones([40, 20, 16]), tf.zeros([3, 20, 16]), params)[0])
    first, second = call().numpy(), call().numpy()
    assert abs((first != 0).mean() - 0.25) < 0.02  # two masks: one and the same would leave 0.5
    assert (first != second).any()


def test_dropout_lies_between_layers_only():
    stack = model("lstm", num_layers=1, dropout=0.9)
    given = cudnn_cases.arguments(stack)
    np.testing.assert_array_equal(stack(**given)[0], stack(**given, is_training=False)[0])


def test_gradients_pass_through_the_same_dropout():
    stack = CudnnRNNRelu(2, 3, 3, dropout=0.5, use_cudnn=False)
    weights, biases = stack.params_to_canonical(np.zeros(stack.params_size(), np.float32))
    params = stack.canonical_to_params([tf.eye(3) if k % 2 == 0 else w for k, w in enumerate(weights)], biases)
    inputs = tf.ones([20, 4, 3])
    with tf.GradientTape() as tape:
        tape.watch(inputs)
        output, _ = stack(inputs, tf.zeros([2, 4, 3]), params)
    np.testing.assert_array_equal(tape.gradient(output, inputs), output)  # both are 0 or 2 per number
    assert 0 < (output.numpy() != 0).mean() < 1


# --- the call of cuDNN, without one ----------------------------------------------------------------------------------------


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(cudnn_rnn, "_resolve", lambda use_cudnn: bool(use_cudnn))
    return functools.partial(cudnn_cases.model, use_cudnn=True)


@pytest.mark.parametrize("with_lengths", [False, True])
@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_the_graph_holds_one_cudnn_op_for_the_whole_stack_and_one_for_its_gradient(
    as_on_a_gpu, mode, skip, with_lengths
):
    stack = as_on_a_gpu(mode, 3, skip, direction="bidirectional", dropout=0.25, seed=7)

    @tf.function
    def step(lengths, **values):
        with tf.GradientTape() as tape:
            tape.watch(values)
            results = stack(**values, sequence_lengths=lengths if with_lengths else None)
        return results, tape.gradient(results, values)

    given = cudnn_cases.arguments(stack)
    specs = {name: tf.TensorSpec([None] * value.ndim, value.dtype) for name, value in given.items()}
    graph = step.get_concrete_function(tf.TensorSpec([None], tf.int32), **specs)
    results, gradients = graph.structured_outputs
    assert [len(r.shape) for r in results] == [3] * len(results)
    assert all(gradient is not None for gradient in gradients.values())
    ops = [op for op in graph.graph.get_operations() if op.type.startswith("CudnnRNN")]
    assert [op.type for op in ops] == ["CudnnRNNV3", "CudnnRNNBackpropV3"]
    for op in ops:
        assert op.get_attr("rnn_mode") == mode.encode()
        assert op.get_attr("input_mode") == (b"skip_input" if skip else b"linear_input")
        assert op.get_attr("direction") == b"bidirectional"
        assert (op.get_attr("dropout"), op.get_attr("seed"), op.get_attr("seed2")) == (0.25, 7, int(with_lengths))
        assert op.get_attr("time_major") and op.get_attr("num_proj") == 0


def cudnn_that_leaves_rubbish_in_the_padding(stack, seen):
    """CudnnRNNV3 by TensorFlow's ops; output and gradient are NaN past a sequence's end, which is more than it promises."""

    @tf.custom_gradient
    def rubbish_backward(x, inside):
        return tf.identity(x), lambda gradient: (tf.where(inside, gradient, np.nan), None)

    def op(input, input_h, input_c, params, sequence_lengths, is_training, **attributes):
        seen.append(sequence_lengths.numpy())
        states = [input_h, input_c] if attributes["rnn_mode"] == "lstm" else [input_h]
        inside = (tf.range(len(input))[:, tf.newaxis] < sequence_lengths)[:, :, tf.newaxis]
        x = rubbish_backward(input, inside)
        lengths = Lengths(sequence_lengths, tf.cast(sequence_lengths, tf.int64))
        output, finals = rnn_ops.run(stack.spec, x, states, params, lengths)
        results = types.SimpleNamespace(
            output=tf.where(inside, output, np.nan), output_h=finals[0], output_c=finals[-1]
        )
        return results

    return op


@pytest.mark.parametrize(
    "lengths", [None, LENGTHS, (TIME,) * BATCH, (0, 2, TIME, 4)], ids=["none", "some", "full", "empty"]
)
@pytest.mark.parametrize("mode", MODES)
def test_what_surrounds_the_cudnn_op_hides_its_padding_and_empty_sequences(as_on_a_gpu, monkeypatch, mode, lengths):
    stack, without = (make(mode, direction="bidirectional", dtype=tf.float64) for make in (as_on_a_gpu, model))
    assert stack.uses_cudnn and not without.uses_cudnn
    given, seen = cudnn_cases.arguments(stack), []
    monkeypatch.setattr(tf.raw_ops, "CudnnRNNV3", cudnn_that_leaves_rubbish_in_the_padding(stack, seen))
    assert_same(cudnn_cases.run(stack, given, lengths), cudnn_cases.run(without, given, lengths), 1e-14)
    np.testing.assert_array_equal(seen[0], np.maximum(lengths or [TIME] * BATCH, 1))


# --- properties and conversions -------------------------------------------------------------------------------------------


def test_properties_tell_what_was_given():
    stack = CudnnLSTM(2, 5, 3, "auto_select", "bidirectional", "float64", 0.25, 7, use_cudnn=False)
    assert (stack.num_layers, stack.num_units, stack.input_size) == (2, 5, 3)
    assert (stack.input_mode, stack.direction, stack.rnn_mode) == ("auto_select", "bidirectional", "lstm")
    assert (stack.dtype, stack.dropout, stack.seed, stack.uses_cudnn) == (tf.float64, 0.25, 7, False)
    assert [c(1, 2, 2).rnn_mode for c in (CudnnGRU, CudnnRNNTanh, CudnnRNNRelu)] == ["gru", "rnn_tanh", "rnn_relu"]
    assert CudnnGRU(1, 2, 2, "auto_select").spec.skip_input and not stack.spec.skip_input
    assert repr(stack) == "CudnnLSTM(lstm, 2 layers × 5 units, input 3, linear_input, bidirectional, float64)"


@pytest.mark.parametrize(("mode", "direction", "skip"), sizes.half(MODES, DIRECTIONS, (False, True)))
def test_conversions_agree_with_layouts_and_go_back_bit_by_bit(mode, direction, skip):
    stack = model(mode, 3, skip, direction=direction)
    params = cudnn_cases.arguments(stack)["params"]
    weights, biases = tf.function(stack.params_to_canonical)(params)
    matrices, expected_biases = layouts.cudnn_flat_to_list(params, stack.spec)
    for given, expected in zip([*weights, *biases], [*matrices, *expected_biases], strict=True):
        assert given.shape == expected.shape
        np.testing.assert_array_equal(given, expected)
    np.testing.assert_array_equal(tf.function(stack.canonical_to_params)(weights, biases), params)
    assert stack.params_size() == params.size
    per_layer = {"lstm": 8, "gru": 6}.get(mode, 2)
    assert len(weights) == len(biases) == per_layer * stack.spec.num_pseudo_layers


def test_conversions_pass_gradients_on():
    stack = model("gru", 2, direction="bidirectional")
    params = tf.constant(cudnn_cases.arguments(stack)["params"])
    with tf.GradientTape() as tape:
        tape.watch(params)
        weights, biases = stack.params_to_canonical(params)
        loss = tf.reduce_sum(stack.canonical_to_params(weights, biases) ** 2)
    np.testing.assert_allclose(tape.gradient(loss, params), 2 * params, rtol=1e-6)


def test_a_variable_trains_in_a_function():
    stack = model("lstm", 2, direction="bidirectional")
    given = cudnn_cases.arguments(stack)
    params = tf.Variable(given.pop("params"))

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((stack(**given, params=params)[0] - 0.1) ** 2)
        params.assign_sub(0.5 * tape.gradient(loss, params))
        return loss

    losses = [float(step()) for _ in range(5)]
    assert losses == sorted(losses, reverse=True)


# --- what is refused ----------------------------------------------------------------------------------------------------

GOOD = dict(num_layers=2, num_units=5, input_size=3)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (dict(direction="both"), r"direction: 'both' given, expected one of 'unidirectional', 'bidirectional'"),
        (dict(direction=None), r"direction: None given"),
        (
            dict(input_mode="skip"),
            r"input_mode: 'skip' given, expected one of 'linear_input', 'skip_input', 'auto_select'",
        ),
        (dict(input_mode="skip_input"), r"input_mode: 'skip_input' given with input_size 3 and num_units 5"),
        (dict(dtype=tf.bfloat16), r"dtype: bfloat16 given, expected float16 or float32 or float64"),
        (dict(dtype=tf.int32), r"dtype: int32 given"),
        (dict(dtype="half a float"), r"dtype: 'half a float' given"),
        (dict(dropout=1.5), r"dropout: 1.5 given, expected a number from 0 to 1"),
        (dict(dropout=-0.1), r"dropout: -0.1 given"),
        (dict(dropout=float("nan")), r"dropout: nan given"),
        (dict(dropout="0.5"), r"dropout: '0.5' given"),
        (dict(seed=1.0), r"seed: 1.0 given, expected an integer from -2147483648 to 2147483647"),
        (dict(seed=None), r"seed: None given"),
        (dict(seed=2**31), r"seed: 2147483648 given"),
        (dict(num_layers=0), r"num_layers: 0 given, expected an integer from 1"),
        (dict(num_units=2.0), r"num_units: 2.0 given"),
        (dict(input_size=True), r"input_size: True given"),
        (dict(use_cudnn="yes"), r"use_cudnn: 'yes' given, expected True, False or 'auto'"),
    ],
)
def test_a_wrong_constructor_argument_is_named(wrong, message):
    with pytest.raises(ValueError, match=message):
        CudnnLSTM(**GOOD | wrong)


def test_cudnn_is_refused_where_there_is_no_gpu_and_not_chosen():
    if tf.config.get_visible_devices("GPU"):
        pytest.skip("TensorFlow sees a GPU")
    with pytest.raises(
        ValueError, match="use_cudnn: True given, expected False or 'auto' where TensorFlow sees no NVIDIA GPU"
    ):
        CudnnLSTM(**GOOD, use_cudnn=True)
    assert not CudnnLSTM(**GOOD).uses_cudnn


def shaped(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


BFLOAT16 = tf.bfloat16.as_numpy_dtype


SIZE = 2 * 4 * UNITS * (UNITS + 2) + 4 * UNITS * (INPUT + UNITS)  # two LSTM layers


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (dict(params=shaped(SIZE - 1)), rf"params: \[{SIZE - 1}\] given, expected \[{SIZE}\] \(the size for lstm, 2 layers"),
        (dict(params=shaped(1, SIZE)), rf"params: \[1, {SIZE}\] given, expected \[{SIZE}\]"),
        (dict(params=shaped(SIZE, dtype=np.float64)), r"params: float64 given, expected float32"),
        (dict(input_data=shaped(TIME, BATCH)), r"input_data: \[6, 4\] given, expected \[time, batch, 3\]"),
        (dict(input_data=shaped(TIME, BATCH, INPUT + 1)), r"input_data: \[6, 4, 4\] given, expected \[time, batch, 3\]"),
        (dict(input_data=shaped(TIME, BATCH, INPUT, dtype=np.int32)), r"input_data: int32 given, expected float32"),
        (dict(input_data=shaped(TIME, BATCH, INPUT, dtype=BFLOAT16)), r"input_data: bfloat16 given, expected float32"),
        (dict(input_data="text"), r"input_data: a str given, expected a float32 tensor \[time, batch, 3\]"),
        (dict(input_data=shaped(0, BATCH, INPUT)), r"input_data: \[0, 4, 3\] given, expected at least one step"),
        (dict(input_h=shaped(2, BATCH + 1, UNITS)), r"input_h: a batch of 5 given, expected 4, the batch of input_data"),
        (dict(input_c=shaped(2, 1, UNITS)), r"input_c: a batch of 1 given, expected 4, the batch of input_data"),
        (dict(input_h=shaped(1, BATCH, UNITS)), r"input_h: \[1, 4, 5\] given, expected \[2, batch, 5\]"),
        (dict(input_c=shaped(BATCH, UNITS)), r"input_c: \[4, 5\] given, expected \[2, batch, 5\]"),
        (dict(sequence_lengths=[1, 2, 3, 7]), r"sequence_lengths\[3\]: 7 given, expected 0 to 6, the steps of input_data"),
        (dict(sequence_lengths=[1, -1, 3, 6]), r"sequence_lengths\[1\]: -1 given"),
        (dict(sequence_lengths=[1, 2, 3]), r"sequence_lengths: \[3\] given, expected \[4\]"),
        (dict(sequence_lengths=[[1, 2, 3, 4]]), r"sequence_lengths: \[1, 4\] given, expected \[4\]"),
        (dict(sequence_lengths=shaped(BATCH)), r"sequence_lengths: float32 given, expected int32 or int64"),
        (dict(sequence_lengths=[1.5, 2, 3, 4]), r"sequence_lengths: a list given, expected a int32 tensor"),
        (dict(is_training=None), r"is_training: None given, expected True or False"),
        (dict(is_training=1), r"is_training: 1 given"),
    ],
)  # fmt: skip
def test_a_wrong_argument_of_the_call_is_named(wrong, message):
    stack = model("lstm")
    with pytest.raises(ValueError, match=message) as caught:
        stack(**cudnn_cases.arguments(stack) | wrong)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (dict(params=shaped(SIZE - 1)), "params"),
        (dict(input_data=shaped(TIME, BATCH, INPUT + 1)), "input_data"),
        (dict(input_data=shaped(0, BATCH, INPUT)), "input_data: empty"),
        (dict(input_h=shaped(2, BATCH + 1, UNITS)), "input_h: another batch given than input_data has"),
        (dict(input_c=shaped(2, 1, UNITS)), "input_c: another batch given than input_data has"),
        (dict(input_h=shaped(1, BATCH, UNITS)), "input_h"),
        (dict(sequence_lengths=np.array([1, 2, 3, 7])), "sequence_lengths: expected 0 to the steps of input_data"),
        (dict(sequence_lengths=np.array([1, -1, 3, 6])), "sequence_lengths: expected 0 to the steps of input_data"),
        (dict(sequence_lengths=np.array([1, 2, 3])), "sequence_lengths: another batch given than input_data has"),
    ],
)
def test_a_graph_that_learns_of_a_wrong_size_only_when_it_runs_refuses_it(wrong, message):
    stack = model("lstm")
    given = cudnn_cases.arguments(stack) | {"sequence_lengths": np.array(LENGTHS)} | wrong
    specs = {name: tf.TensorSpec([None] * value.ndim, value.dtype) for name, value in given.items()}
    traced = tf.function(lambda **values: stack(**values)).get_concrete_function(**specs)
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        traced(**{name: tf.constant(value) for name, value in given.items()})


def test_wrong_canonical_tensors_are_named():
    stack = model("lstm")
    weights, biases = stack.params_to_canonical(cudnn_cases.arguments(stack)["params"])
    assert (len(weights), len(biases)) == (len(cudnn_matrices(stack.spec)), len(cudnn_biases(stack.spec)))
    with pytest.raises(ValueError, match=r"weights: 15 given, expected 16 \(lstm, 2 layers × 5 units"):
        stack.canonical_to_params(weights[1:], biases)
    with pytest.raises(ValueError, match=r"biases: 17 given, expected 16"):
        stack.canonical_to_params(weights, [*biases, biases[0]])
    with pytest.raises(ValueError, match=r"weights\[4\] \(layer 0 forward R_i\): \[5, 3\] given, expected \[5, 5\]"):
        stack.canonical_to_params(weights[:4] + weights[:1] + weights[5:], biases)
    with pytest.raises(ValueError, match=r"biases\[0\] \(layer 0 forward b_Wi\): float64 given, expected float32"):
        stack.canonical_to_params(weights, [tf.cast(biases[0], tf.float64), *biases[1:]])
    with pytest.raises(ValueError, match=r"params: \[3\] given"):
        stack.params_to_canonical(np.zeros(3, np.float32))
    with pytest.raises(ValueError, match=r"params: \[3\] given"):
        stack.single_bias(np.zeros(3, np.float32))


def test_staged_lengths_give_what_one_tensor_gives_and_are_checked_too():
    stack = CudnnLSTM(2, UNITS, INPUT, dtype=tf.float64, use_cudnn=False)
    given = cudnn_cases.arguments(stack)
    lengths = np.array(LENGTHS)
    staged = Lengths(tf.constant(lengths, tf.int32), tf.constant(lengths, tf.int64))
    for one, other in zip(
        stack(**given, sequence_lengths=lengths), stack(**given, sequence_lengths=staged), strict=True
    ):
        np.testing.assert_array_equal(one, other)
    with pytest.raises(ValueError, match=rf"sequence_lengths\[0\]: {TIME + 1} given"):
        stack(**given, sequence_lengths=staged._replace(on_host=tf.fill([BATCH], TIME + 1)))
