"""Layouts of whole stacks, cuDNN's and PyTorch's: compared with printed numbers, PyTorch, Keras and a few lines of NumPy."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.reference.lstm import lstm_stack_forward
from models.weights import layouts
from models.weights.layouts import StackSpec, canonical_shapes, cudnn_biases, cudnn_matrices, cudnn_size

MODES = ["lstm", "gru", "rnn_tanh", "rnn_relu"]
BATCH, TIME = 2, 4
FLOAT64 = 1e-13  # max|a - b| / max|b|: a few float64 roundings

# A GRU of 3 units on 2 inputs: what Keras holds, and the 63 numbers that cuDNN gets (document 003).
KERAS_KERNEL = """
 0.01492912 -0.08340913 -0.13510555 0.7274594  0.27867514 -0.22769517 -0.09443533 0.14927697 -0.06407022
 0.3732596  -0.46085864  0.0720188  0.07225263 0.0731563  -0.32511705 -0.5776096  0.19336885  0.5521658"""
KERAS_RECURRENT_KERNEL = """
-0.1763835  -0.34464398 -0.68863446 -0.26089588 -0.07611549 -0.3227275  0.27895766  0.00449633  0.34646943
-0.20453213  0.10408226 -0.31350893  0.49217793  0.2363063   0.1172057  0.5199497  -0.08515472 -0.50953877
 0.30824518  0.0503802  -0.25397384 -0.538845    0.24127854  0.4379759 -0.03005415 -0.50177294 -0.2118314"""
KERAS_BIAS = """
-0.02635479 -0.02612267  0.00036312  0.02735401 0.01107747 0.03721783 -0.02271527  0.01183162 -0.02974842
 0.03700757 -0.00075941 -0.00030701 -0.04698812 0.01857647 0.01315722 -0.02921613 -0.00608767 -0.03110452"""
CUDNN_BUFFER = """
 0.727459  0.072253  0.278675  0.073156 -0.227695 -0.325117  0.014929  0.373260 -0.083409 -0.460859
-0.135106  0.072019 -0.094435 -0.577610  0.149277  0.193369 -0.064070  0.552166 -0.260896  0.492178
-0.538845 -0.076115  0.236306  0.241279 -0.322728  0.117206  0.437976 -0.176383 -0.204532  0.308245
-0.344644  0.104082  0.050380 -0.688634 -0.313509 -0.253974  0.278958  0.519950 -0.030054  0.004496
-0.085155 -0.501773  0.346469 -0.509539 -0.211831  0.027354  0.011077  0.037218 -0.026355 -0.026123
 0.000363 -0.022715  0.011832 -0.029748 -0.046988  0.018576  0.013157  0.037008 -0.000759 -0.000307
-0.029216 -0.006088 -0.031105"""


def random_weights(spec, seed=1, dtype=np.float64):
    rng = np.random.default_rng(seed)
    return {name: rng.uniform(-0.5, 0.5, shape).astype(dtype) for name, shape in canonical_shapes(spec).items()}


def random_bits(shape, dtype, rng):
    """Any float there is: negative zeros, subnormals, infinities and NaNs of every kind among them."""
    return np.frombuffer(rng.bytes(int(np.prod(shape)) * dtype().itemsize), dtype).reshape(shape)


def assert_same_bits(given_arrays, expected):
    assert len(given_arrays) == len(expected)
    for k, (array, other) in enumerate(zip(given_arrays, expected, strict=True)):
        assert (array.dtype, array.shape) == (other.dtype, other.shape), k
        assert array.flags.c_contiguous and array.tobytes() == other.tobytes(), k


def assert_same_weights(given_weights, expected):
    assert list(given_weights) == list(expected)
    assert_same_bits(list(given_weights.values()), list(expected.values()))


def assert_close(a, b):
    a, b = np.asarray(a), np.asarray(b)
    assert a.shape == b.shape
    assert np.abs(a - b).max() <= FLOAT64 * np.abs(b).max()


def numpy_step(mode, x, h, recurrent_kernel, bias):
    """The state after a step; x [batch, G*units] has been through the kernel."""
    if mode != "gru":
        z = x + h @ recurrent_kernel + bias
        return np.tanh(z) if mode == "rnn_tanh" else np.maximum(z, 0)
    (x_z, x_r, x_h), (h_z, h_r, h_h) = (np.split(a, 3, axis=1) for a in (x + bias[0], h @ recurrent_kernel + bias[1]))
    z, r = 1 / (1 + np.exp(-x_z - h_z)), 1 / (1 + np.exp(-x_r - h_r))
    return z * h + (1 - z) * np.tanh(x_h + r * h_h)


def numpy_stack(weights, spec, x, h_0, c_0):
    """Outputs [time, batch, directions*units] and final states h of canonical weights; x [time, batch, input]."""
    if spec.mode == "lstm":
        if spec.skip_input:
            for direction in spec.directions:
                weights = {**weights, f"lstm_0/{direction}/kernel": np.hstack([np.eye(spec.units)] * 4)}
        states = list(zip(h_0, c_0, strict=True))
        states = [states[k : k + len(spec.directions)] for k in range(0, len(states), len(spec.directions))]
        outputs, final, _ = lstm_stack_forward(x.swapaxes(0, 1), weights, states, spec.num_layers, spec.bidirectional)
        return outputs.swapaxes(0, 1), np.stack([h for layer in final for h, _ in layer])
    final, h_0 = [], iter(h_0)
    for layer in range(spec.num_layers):
        outputs = []
        for direction in spec.directions:
            name = f"{spec.mode}_{layer}/{direction}"
            recurrent_kernel, bias = weights[f"{name}/recurrent_kernel"], weights[f"{name}/bias"]
            gates = recurrent_kernel.shape[1] // spec.units
            z = x @ weights[f"{name}/kernel"] if spec.has_kernel(layer) else np.concatenate([x] * gates, axis=-1)
            h, steps = next(h_0), []
            for step in z if direction == "forward" else z[::-1]:
                h = numpy_step(spec.mode, step, h, recurrent_kernel, bias)
                steps.append(h)
            final.append(h)
            outputs.append(np.stack(steps if direction == "forward" else steps[::-1]))
        x = np.concatenate(outputs, axis=-1)
    return x, np.stack(final)


def torch_module(spec):
    torch = pytest.importorskip("torch")
    kind = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU}.get(spec.mode, torch.nn.RNN)
    options = {"nonlinearity": spec.mode[4:]} if spec.mode.startswith("rnn_") else {}
    module = kind(spec.input_size, spec.units, spec.num_layers, bidirectional=spec.bidirectional, **options)
    return torch, module.double()


def run_torch(torch, module, x, h_0, c_0):
    h_0, c_0 = torch.from_numpy(h_0), torch.from_numpy(c_0)
    with torch.no_grad():
        outputs, final = module(torch.from_numpy(x), (h_0, c_0) if isinstance(module, torch.nn.LSTM) else h_0)
    return outputs.numpy(), (final[0] if isinstance(final, tuple) else final).numpy()


def inputs_and_states(spec, seed=2):
    rng = np.random.default_rng(seed)
    states = (spec.num_pseudo_layers, BATCH, spec.units)
    return rng.uniform(-1, 1, (TIME, BATCH, spec.input_size)), rng.uniform(-1, 1, states), rng.uniform(-1, 1, states)


def numbers(text, rows):
    return np.array(text.split(), np.float64).reshape(rows, -1)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_printed_gru_becomes_the_printed_63_numbers(dtype):
    keras_arrays = [numbers(text, 2 if text != KERAS_RECURRENT_KERNEL else 3).astype(dtype)
                    for text in (KERAS_KERNEL, KERAS_RECURRENT_KERNEL, KERAS_BIAS)]  # fmt: skip
    weights = layouts.from_keras(keras_arrays, 0, mode="gru")
    spec = StackSpec("gru", num_layers=1, units=3, input_size=2)
    flat = layouts.to_cudnn_flat(weights, spec)
    assert [f"{number:.6f}" for number in flat] == CUDNN_BUFFER.split()
    back = layouts.from_cudnn_flat(flat, spec)
    assert_same_bits(layouts.to_keras(back, 0, mode="gru"), keras_arrays)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("skip_input", [False, True])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=8, deadline=None)
@given(
    num_layers=st.integers(1, 3), units=st.integers(1, 4), input_size=st.integers(1, 5), seed=st.integers(0, 2**32 - 1)
)
def test_every_layout_gives_back_the_same_bits(
    mode, bidirectional, skip_input, dtype, num_layers, units, input_size, seed
):
    spec = StackSpec(mode, num_layers, units, units if skip_input else input_size, bidirectional, skip_input)
    rng = np.random.default_rng(seed)
    weights = {name: random_bits(shape, dtype, rng) for name, shape in canonical_shapes(spec).items()}

    matrices, biases = layouts.to_cudnn_list(weights, spec)
    assert [array.shape for array in matrices] == [shape for _, shape in cudnn_matrices(spec)]
    assert [array.shape for array in biases] == [shape for _, shape in cudnn_biases(spec)]
    assert_same_weights(layouts.from_cudnn_list(matrices, biases, spec), weights)

    flat = layouts.cudnn_list_to_flat(matrices, biases, spec)
    assert flat.shape == (cudnn_size(spec),)
    for arrays, expected in zip(layouts.cudnn_flat_to_list(flat, spec), (matrices, biases), strict=True):
        assert_same_bits(arrays, expected)
    assert_same_bits([layouts.to_cudnn_flat(weights, spec)], [flat])
    assert_same_weights(layouts.from_cudnn_flat(flat, spec), weights)

    assert_same_weights(layouts.from_torch(layouts.to_torch(weights, spec), spec), weights)

    back = {}
    for layer in range(num_layers):
        arrays = layouts.to_keras(weights, layer, bidirectional, mode=mode, skip_input=skip_input)
        back |= layouts.from_keras(arrays, layer, bidirectional, mode=mode, skip_input=skip_input)
    assert_same_weights(back, weights)


@pytest.mark.parametrize("mode", MODES)
def test_any_flat_buffer_comes_back_from_its_list(mode):
    spec = StackSpec(mode, num_layers=2, units=3, input_size=2, bidirectional=True)
    flat = random_bits((cudnn_size(spec),), np.float32, np.random.default_rng(1))
    assert_same_bits([layouts.cudnn_list_to_flat(*layouts.cudnn_flat_to_list(flat, spec), spec)], [flat])
    if mode == "gru":  # which keeps both biases
        assert_same_bits([layouts.to_cudnn_flat(layouts.from_cudnn_flat(flat, spec), spec)], [flat])


def test_matrices_and_biases_are_those_of_their_names():
    spec = StackSpec("gru", num_layers=2, units=3, input_size=2, bidirectional=True)
    weights = random_weights(spec)
    matrices, biases = layouts.to_cudnn_list(weights, spec)
    matrix = dict(zip([name for name, _ in cudnn_matrices(spec)], matrices, strict=True))
    bias = dict(zip([name for name, _ in cudnn_biases(spec)], biases, strict=True))
    assert (len(matrix), len(bias)) == (4 * 6, 4 * 6)
    for k, gate in enumerate("zrh"):
        columns = slice(3 * k, 3 * k + 3)
        np.testing.assert_array_equal(
            matrix[f"layer 0 backward W_{gate}"].T, weights["gru_0/backward/kernel"][:, columns]
        )
        recurrent_kernel = weights["gru_1/forward/recurrent_kernel"][:, columns]
        np.testing.assert_array_equal(matrix[f"layer 1 forward R_{gate}"].T, recurrent_kernel)
        np.testing.assert_array_equal(bias[f"layer 1 backward b_W{gate}"], weights["gru_1/backward/bias"][0, columns])
        np.testing.assert_array_equal(bias[f"layer 1 backward b_R{gate}"], weights["gru_1/backward/bias"][1, columns])


@pytest.mark.parametrize("mode", MODES)
def test_the_flat_buffer_is_pytorchs_weights_one_after_the_other_and_then_its_biases(mode):
    spec = StackSpec(mode, num_layers=2, units=3, input_size=2, bidirectional=True)
    weights = random_weights(spec)
    arrays = layouts.to_torch(weights, spec)
    in_order = [array for kind in ("weight", "bias") for name, array in arrays.items() if name.startswith(kind)]
    np.testing.assert_array_equal(layouts.to_cudnn_flat(weights, spec), np.concatenate([a.ravel() for a in in_order]))


@pytest.mark.parametrize("mode", ["lstm", "rnn_tanh", "rnn_relu"])
def test_two_biases_become_their_sum(mode):
    spec = StackSpec(mode, num_layers=1, units=3, input_size=2)
    matrices, biases = layouts.to_cudnn_list(random_weights(spec), spec)
    biases = [np.random.default_rng(k).uniform(-1, 1, 3) for k in range(len(biases))]
    half = len(biases) // 2
    expected = np.concatenate([w + r for w, r in zip(biases[:half], biases[half:], strict=True)])
    back = layouts.from_cudnn_list(matrices, biases, spec)
    assert_same_bits([back[f"{mode}_0/forward/bias"]], [expected])


@pytest.mark.parametrize("mode", MODES)
def test_what_comes_back_shares_no_memory_with_what_was_given(mode):
    spec = StackSpec(mode, num_layers=2, units=1, input_size=1)  # where a transposed array is contiguous as it is
    weights = random_weights(spec)
    matrices, biases = layouts.to_cudnn_list(weights, spec)
    flat, arrays = layouts.to_cudnn_flat(weights, spec), layouts.to_torch(weights, spec)
    made = [*matrices, *biases, flat, *arrays.values()]
    back = (layouts.from_cudnn_list(matrices, biases, spec), layouts.from_torch(arrays, spec))
    for other in (*weights.values(), *back[0].values(), *back[1].values()):
        assert not any(np.shares_memory(own, other) for own in made)
    assert not any(np.shares_memory(flat, own) for half in layouts.cudnn_flat_to_list(flat, spec) for own in half)


@pytest.mark.parametrize("skip_input", [False, True])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_pytorch_computes_from_its_layout_what_the_canonical_weights_mean(mode, bidirectional, skip_input):
    spec = StackSpec(
        mode, 3, units=5, input_size=5 if skip_input else 4, bidirectional=bidirectional, skip_input=skip_input
    )
    torch, module = torch_module(spec)
    weights, (x, h_0, c_0) = random_weights(spec), inputs_and_states(spec)
    arrays = layouts.to_torch(weights, spec)
    assert list(arrays) == list(module.state_dict())
    module.load_state_dict({name: torch.from_numpy(array) for name, array in arrays.items()})
    for result, expected in zip(
        run_torch(torch, module, x, h_0, c_0), numpy_stack(weights, spec, x, h_0, c_0), strict=True
    ):
        assert_close(result, expected)
    assert_same_weights(layouts.from_torch(module.state_dict(), spec), weights)


@pytest.mark.parametrize("mode", MODES)
def test_a_pytorch_module_with_two_biases_of_its_own_is_read_as_it_computes(mode):
    spec = StackSpec(mode, num_layers=2, units=5, input_size=4, bidirectional=True)
    torch, module = torch_module(spec)
    for k, parameter in enumerate(module.parameters()):
        parameter.data = torch.from_numpy(np.random.default_rng(k).uniform(-0.5, 0.5, tuple(parameter.shape)))
    x, h_0, c_0 = inputs_and_states(spec)
    weights = layouts.from_torch(module.state_dict(), spec)
    for result, expected in zip(
        run_torch(torch, module, x, h_0, c_0), numpy_stack(weights, spec, x, h_0, c_0), strict=True
    ):
        assert_close(result, expected)


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_keras_layers_compute_what_pytorch_does(mode, bidirectional):
    spec = StackSpec(mode, 2, units=4, input_size=4, bidirectional=bidirectional, skip_input=mode == "gru")
    torch, module = torch_module(spec)
    keras = pytest.importorskip("keras")
    weights, (x, h_0, c_0) = random_weights(spec), inputs_and_states(spec)
    kind, options = {
        "lstm": (keras.layers.LSTM, {"use_cudnn": False}),
        "gru": (keras.layers.GRU, {"use_cudnn": False}),
    }.get(mode, (keras.layers.SimpleRNN, {"activation": mode[4:]}))
    outputs = x.swapaxes(0, 1)
    for layer in range(spec.num_layers):
        keras_layer = kind(spec.units, return_sequences=True, unroll=True, dtype="float64", **options)
        if bidirectional:
            keras_layer = keras.layers.Bidirectional(keras_layer, dtype="float64")
        keras_layer.build(outputs.shape)
        keras_layer.set_weights(layouts.to_keras(weights, layer, bidirectional, mode=mode, skip_input=spec.skip_input))
        outputs = keras_layer(outputs)
    module.load_state_dict({name: torch.from_numpy(array) for name, array in layouts.to_torch(weights, spec).items()})
    expected, _ = run_torch(torch, module, x, np.zeros_like(h_0), np.zeros_like(c_0))
    assert_close(np.asarray(outputs).swapaxes(0, 1), expected)


def test_under_skip_input_only_identity_kernels_are_taken_back():
    spec = StackSpec("gru", num_layers=1, units=3, input_size=3, bidirectional=True, skip_input=True)
    arrays = layouts.to_torch(random_weights(spec), spec)
    arrays["weight_ih_l0_reverse"] = 2 * arrays["weight_ih_l0_reverse"]
    with pytest.raises(
        ValueError, match="arrays: weight_ih_l0_reverse is a kernel of its own, expected with skip_input"
    ):
        layouts.from_torch(arrays, spec)
    keras_arrays = layouts.to_keras(random_weights(spec), 0, True, mode="gru", skip_input=True)
    keras_arrays[0] = np.roll(keras_arrays[0], 1, axis=1)
    with pytest.raises(ValueError, match="gru_0/forward/kernel is a kernel of its own, expected with skip_input"):
        layouts.from_keras(keras_arrays, 0, True, mode="gru", skip_input=True)


# --- Keras 2's cuDNN layers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["lstm", "gru"])
def test_keras_2_layer_hands_cudnn_its_gates_row_by_row(mode):
    """What that layer did at every call: cut out the gates, flatten each as it lies, and put them into cuDNN's order."""
    spec = StackSpec(mode, 1, units=3, input_size=5)
    gates, rng = len(layouts.CANONICAL_GATES[mode]), np.random.default_rng(1)
    kernel, recurrent, bias = (rng.uniform(-1, 1, shape) for shape in ((5, 3 * gates), (3, 3 * gates), 6 * gates))
    order = {"lstm": range(4), "gru": (1, 0, 2)}[mode]
    pieces = [array[:, 3 * k : 3 * k + 3].ravel() for array in (kernel, recurrent) for k in order]
    pieces += [half[3 * k : 3 * k + 3] for half in np.split(bias, 2) for k in order]
    weights = layouts.from_keras_cudnn([kernel, recurrent, bias], 0, mode)
    assert_same_weights(weights, layouts.from_cudnn_flat(np.concatenate(pieces), spec))


@pytest.mark.parametrize(
    "shapes", [[(5, 12), (3, 12), (12,)], [(5, 12), (3, 9), (24,)], [(12,), (3, 12), (24,)], [(5, 12)]]
)
def test_arrays_that_are_no_keras_2_layer_are_refused(shapes):
    with pytest.raises(ValueError, match=r"layer 2: arrays .* given, expected kernel \[input, 4\*units\]"):
        layouts.from_keras_cudnn([np.zeros(shape) for shape in shapes], 2)
    with pytest.raises(ValueError, match="mode: 'rnn_tanh' given"):
        layouts.from_keras_cudnn([np.zeros(shape) for shape in shapes], 2, "rnn_tanh")
