"""What describes a stack, and what is said of arrays that do not belong to it."""

from dataclasses import replace

import numpy as np
import pytest

from models.weights import layouts
from models.weights.layouts import StackSpec, canonical_shapes, cudnn_biases, cudnn_matrices, cudnn_size

MODES = ["lstm", "gru", "rnn_tanh", "rnn_relu"]
SPEC = StackSpec("lstm", num_layers=2, units=3, input_size=2, bidirectional=True)
WEIGHTS = {name: np.random.default_rng(1).uniform(-1, 1, shape) for name, shape in canonical_shapes(SPEC).items()}


def test_the_canonical_shapes_are_those_of_the_mode():
    assert canonical_shapes(StackSpec("lstm", 1, units=3, input_size=2)) == {
        "lstm_0/forward/kernel": (2, 12),
        "lstm_0/forward/recurrent_kernel": (3, 12),
        "lstm_0/forward/bias": (12,),
    }
    assert canonical_shapes(StackSpec("gru", 2, units=3, input_size=3, bidirectional=True, skip_input=True)) == {
        "gru_0/forward/recurrent_kernel": (3, 9),
        "gru_0/forward/bias": (2, 9),
        "gru_0/backward/recurrent_kernel": (3, 9),
        "gru_0/backward/bias": (2, 9),
        "gru_1/forward/kernel": (6, 9),
        "gru_1/forward/recurrent_kernel": (3, 9),
        "gru_1/forward/bias": (2, 9),
        "gru_1/backward/kernel": (6, 9),
        "gru_1/backward/recurrent_kernel": (3, 9),
        "gru_1/backward/bias": (2, 9),
    }
    assert canonical_shapes(StackSpec("rnn_relu", 1, units=3, input_size=2))["rnn_relu_0/forward/bias"] == (3,)


def test_pseudo_layers_are_counted_layer_by_layer_and_forward_first():
    assert SPEC.directions == ("forward", "backward") and SPEC.num_pseudo_layers == 4
    assert SPEC.pseudo_layers == [(0, "forward"), (0, "backward"), (1, "forward"), (1, "backward")]
    assert [SPEC.layer_input_size(layer) for layer in (0, 1)] == [2, 6]
    assert [StackSpec("gru", 2, 3, 3, skip_input=True).has_kernel(layer) for layer in (0, 1)] == [False, True]


def test_the_list_has_the_counts_and_names_of_its_mode():
    names = {mode: [name for name, _ in cudnn_matrices(StackSpec(mode, 1, 2, 2))] for mode in MODES}
    assert names["lstm"] == [
        f"layer 0 forward {name}" for name in ("W_i", "W_f", "W_c", "W_o", "R_i", "R_f", "R_c", "R_o")
    ]
    assert names["gru"] == [f"layer 0 forward {name}" for name in ("W_r", "W_z", "W_h", "R_r", "R_z", "R_h")]
    assert names["rnn_tanh"] == names["rnn_relu"] == ["layer 0 forward W", "layer 0 forward R"]
    assert [name for name, _ in cudnn_biases(StackSpec("rnn_relu", 1, 2, 2))] == [
        "layer 0 forward b_W", "layer 0 forward b_R",
    ]  # fmt: skip
    assert cudnn_biases(StackSpec("lstm", 1, 2, 2))[0] == ("layer 0 forward b_Wi", (2,))
    skip = StackSpec("lstm", 2, 2, 2, skip_input=True)
    assert [shape for _, shape in cudnn_matrices(skip)] == [(2, 0)] * 4 + [(2, 2)] * 12
    assert cudnn_size(skip) == 12 * 4 + 16 * 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(mode="LSTM"), "mode: 'LSTM' given, expected one of lstm, gru, rnn_tanh, rnn_relu"),
        (dict(num_layers=0), "num_layers: 0 given, expected a positive integer"),
        (dict(units=-3), "units: -3 given, expected a positive integer"),
        (dict(units=True), "units: True given, expected a positive integer"),
        (dict(input_size=2.0), r"input_size: 2\.0 given, expected a positive integer"),
        (dict(skip_input=True), "skip_input: input_size 2 with units 3 given, expected the two to be equal"),
    ],
)
def test_a_spec_that_describes_no_stack_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(SPEC, **change)


def without(weights, name):
    return {key: array for key, array in weights.items() if key != name}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: without(w, "lstm_1/backward/bias"), r"weights: lstm_1/backward/bias is missing, expected \[12\]; given: "),
        (lambda w: {**w, "embedding": np.zeros(3)}, "weights: embedding was given, expected only lstm_0/forward/kernel, "),
        (lambda w: {**w, "lstm_1/forward/kernel": np.zeros((3, 12))},
         r"weights: lstm_1/forward/kernel is \[3, 12\], expected \[6, 12\]"),
        (lambda w: {name: array.astype(np.int32) for name, array in w.items()},
         "weights: lstm_0/forward/kernel is int32, expected float16, float32 or float64"),
        (lambda w: {**w, "lstm_1/backward/bias": np.zeros(12, np.float32)},
         "weights: lstm_1/backward/bias is float32, expected float64 as the arrays before it"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("to_layout", [layouts.to_cudnn_list, layouts.to_cudnn_flat, layouts.to_torch])
def test_weights_of_another_stack_are_refused_by_name(to_layout, change, message):
    with pytest.raises(ValueError, match=message):
        to_layout(change(WEIGHTS), SPEC)


@pytest.mark.parametrize("from_list", [layouts.from_cudnn_list, layouts.cudnn_list_to_flat])
def test_a_wrong_list_is_refused_by_pseudo_layer_and_matrix(from_list):
    matrices, biases = layouts.to_cudnn_list(WEIGHTS, SPEC)
    with pytest.raises(ValueError, match="matrices: 31 arrays given, expected 32: 8 for each of 4 pseudo-layers"):
        from_list(matrices[:-1], biases, SPEC)
    with pytest.raises(ValueError, match="biases: 33 arrays given, expected 32: 8 for each of 4 pseudo-layers"):
        from_list(matrices, [*biases, biases[0]], SPEC)
    transposed = [*matrices[:9], matrices[9].T, *matrices[10:]]
    with pytest.raises(
        ValueError, match=r"matrices: pseudo-layer 1, layer 0 backward W_f is \[2, 3\], expected \[3, 2\]"
    ):
        from_list(transposed, biases, SPEC)
    with pytest.raises(ValueError, match=r"biases: pseudo-layer 3, layer 1 backward b_Ro is \[4\], expected \[3\]"):
        from_list(matrices, [*biases[:-1], np.zeros(4)], SPEC)
    with pytest.raises(ValueError, match="biases: pseudo-layer 0, layer 0 forward b_Wi is float32, expected float64"):
        from_list(matrices, [array.astype(np.float32) for array in biases], SPEC)


@pytest.mark.parametrize("from_flat", [layouts.from_cudnn_flat, layouts.cudnn_flat_to_list])
def test_a_flat_buffer_of_another_size_is_refused(from_flat):
    size = cudnn_size(SPEC)
    assert size == 2 * 12 * (2 + 3) + 2 * 12 * (6 + 3) + 4 * 24
    for given_size, place in [
        (6, "pseudo-layer 0, layer 0 forward W_f"),
        (12 * 5, "pseudo-layer 1, layer 0 backward W_i"),
        (size - 97, "pseudo-layer 3, layer 1 backward R_o"),
        (size - 96, "pseudo-layer 0, layer 0 forward b_Wi"),
        (size - 1, "pseudo-layer 3, layer 1 backward b_Ro"),
    ]:
        with pytest.raises(ValueError, match=rf"flat is \[{given_size}\], expected \[{size}\]: cut short in {place}$"):
            from_flat(np.zeros(given_size), SPEC)
    with pytest.raises(ValueError, match=rf"flat is \[{size + 1}\], expected \[{size}\]"):
        from_flat(np.zeros(size + 1), SPEC)
    with pytest.raises(ValueError, match=rf"flat is \[1, {size}\], expected \[{size}\]"):
        from_flat(np.zeros((1, size)), SPEC)
    with pytest.raises(ValueError, match="flat is int64, expected float16, float32 or float64"):
        from_flat(np.zeros(size, np.int64), SPEC)


def test_arrays_of_another_pytorch_module_are_refused_by_name():
    arrays = layouts.to_torch(WEIGHTS, SPEC)
    with pytest.raises(ValueError, match=r"arrays: bias_hh_l1_reverse is missing, expected \[12\]; given: "):
        layouts.from_torch(without(arrays, "bias_hh_l1_reverse"), SPEC)
    with pytest.raises(ValueError, match="arrays: weight_hr_l0 was given, expected only weight_ih_l0, "):
        layouts.from_torch({**arrays, "weight_hr_l0": np.zeros((2, 3))}, SPEC)
    with pytest.raises(ValueError, match=r"arrays: weight_ih_l1 is \[6, 12\], expected \[12, 6\]"):
        layouts.from_torch({**arrays, "weight_ih_l1": arrays["weight_ih_l1"].T}, SPEC)
