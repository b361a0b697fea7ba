"""The canonical form of weights: shapes, starting points, and errors that name the tensor."""

import hashlib

import numpy as np
import pytest

from models.weights import canonical as canonical

SHAPES = canonical.language_model_shapes(vocabulary=40, embedding=6, units=8, num_layers=2)


def digest(weights):
    return hashlib.sha256(b"".join(weights[name].tobytes() for name in sorted(weights))).hexdigest()[:16]


def test_shapes_of_a_bidirectional_stack_double_the_next_layers_input():
    shapes = canonical.lstm_shapes(input_size=3, units=5, num_layers=2, bidirectional=True)
    assert shapes["lstm_0/backward/kernel"] == (3, 20)
    assert shapes["lstm_1/forward/kernel"] == (10, 20)
    assert shapes["lstm_1/backward/recurrent_kernel"] == (5, 20)
    assert len(shapes) == 12
    assert canonical.stack_size(shapes) == (2, True)


def test_shapes_of_the_two_networks():
    assert SHAPES["embedding"] == (40, 6)
    assert SHAPES["lstm_0/forward/kernel"] == (6, 32)
    assert SHAPES["lstm_1/forward/kernel"] == (8, 32)
    assert SHAPES["dense_0/kernel"] == (8, 40) and SHAPES["dense_0/bias"] == (40,)
    assert canonical.stack_size(SHAPES) == (2, False)
    shapes = canonical.classifier_shapes(28, 16, 2, dense=(32, 7), num_classes=10, bidirectional=True)
    dense = {name: shape for name, shape in shapes.items() if name.endswith("kernel") and name.startswith("dense")}
    assert dense == {"dense_0/kernel": (32, 32), "dense_1/kernel": (32, 7), "dense_2/kernel": (7, 10)}


def test_large_random_has_the_same_bytes_on_every_machine():
    weights = canonical.large_random(SHAPES, seed=1)
    assert digest(weights) == "3c3b5c597ed5c9f5"
    assert digest(canonical.uniform(SHAPES, 0.1, seed=1)) == "320f4224ed8e0b4e"
    states = canonical.random_states(2, 3, 4, seed=1, bidirectional=True)
    arrays = [array for layer in states for pair in layer for array in pair]
    assert hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()[:16] == "5e2013a3ad8b0398"


@pytest.mark.parametrize("start", [canonical.large_random, canonical.keras_default])
def test_a_tensor_depends_on_its_name_and_the_seed_alone(start):
    alone = start({"dense_0/kernel": (8, 40)}, seed=3)
    reordered = start(dict(reversed(SHAPES.items())), seed=3)
    np.testing.assert_array_equal(alone["dense_0/kernel"], reordered["dense_0/kernel"])
    assert (start(SHAPES, seed=4)["dense_0/kernel"] != alone["dense_0/kernel"]).any()
    same_shape = [reordered[f"lstm_{layer}/forward/recurrent_kernel"] for layer in (0, 1)]
    assert (same_shape[0] != same_shape[1]).any()


@pytest.mark.parametrize(
    "weights",
    [canonical.large_random(SHAPES, 1), canonical.uniform(SHAPES, 0.1, 1), canonical.keras_default(SHAPES, 1)],
    ids=["large_random", "uniform", "keras_default"],
)
def test_every_starting_point_is_canonical(weights):
    canonical.check(weights, SHAPES)
    assert list(weights) == list(SHAPES)


def test_large_random_has_the_stated_spread_and_no_zero_bias():
    weights = canonical.large_random(canonical.language_model_shapes(500, 100, 120, 2), seed=1)
    for name, array in weights.items():
        bound = 0.5 if name.endswith("bias") else np.sqrt(3 / (1 if name == "embedding" else array.shape[0]))
        assert 0.97 * bound < np.abs(array).max() <= np.float32(bound)
        assert array.std() == pytest.approx(bound / np.sqrt(3), rel=0.1)
        assert np.count_nonzero(array) == array.size


def test_uniform_stays_in_its_scale_with_zero_biases():
    for name, array in canonical.uniform(SHAPES, 0.04, seed=1).items():
        assert np.abs(array).max() <= np.float32(0.04)
        assert array.any() != name.endswith("bias")


def test_keras_default_is_drawn_from_keras_distributions():
    shapes = {
        **canonical.lstm_shapes(30, 50, 1),
        "embedding": (300, 20),
        "dense_0/kernel": (50, 70),
        "dense_0/bias": (70,),
    }
    weights = canonical.keras_default(shapes, seed=1)
    for name, limit in {
        "lstm_0/forward/kernel": np.sqrt(6 / (30 + 200)),
        "dense_0/kernel": np.sqrt(6 / 120),
        "embedding": 0.05,
    }.items():
        assert 0.98 * limit < np.abs(weights[name]).max() <= np.float32(limit)
    recurrent_kernel = weights["lstm_0/forward/recurrent_kernel"].astype(np.float64)
    np.testing.assert_allclose(
        recurrent_kernel @ recurrent_kernel.T, np.eye(50), atol=1e-6
    )  # rows: float32 orthonormal
    expected = np.zeros((4, 50), np.float32)
    expected[1] = 1
    np.testing.assert_array_equal(weights["lstm_0/forward/bias"].reshape(4, 50), expected)
    assert not weights["dense_0/bias"].any()


def test_states_have_one_pair_per_layer_and_direction():
    states = canonical.random_states(num_layers=2, batch=300, units=5, seed=1, bidirectional=True)
    assert [len(layer) for layer in states] == [2, 2]
    for h, c in (pair for layer in states for pair in layer):
        assert h.shape == c.shape == (300, 5) and h.dtype == c.dtype == np.float32
        assert 0.45 < np.abs(h).max() <= 0.5 < 0.9 < np.abs(c).max() <= 1
    assert (states[0][0][0] != states[1][0][0]).any() and (states[0][0][0] != states[0][1][0]).any()
    zeros = canonical.zero_states(2, 3, 5)
    assert [len(layer) for layer in zeros] == [1, 1]
    assert not any(array.any() for layer in zeros for pair in layer for array in pair)


def broken(name, array):
    return {**canonical.large_random(SHAPES, 1), name: array}


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (
            broken("lstm_1/forward/bias", np.zeros(31, np.float32)),
            r"lstm_1/forward/bias is float32 \[31\].*float32 \[32\]",
        ),
        (broken("embedding", np.zeros((40, 6))), r"embedding is float64 \[40, 6\].*float32 \[40, 6\]"),
        (broken("dense_0/bias", [0.0] * 40), "dense_0/bias is a list"),
        (broken("dense_0/kernel", np.zeros((40, 8), np.float32).T), "dense_0/kernel is a strided view"),
        (broken("dense_0/bias", np.full(40, np.nan, np.float32)), "dense_0/bias holds NaN"),
        (broken("dense_1/bias", np.zeros(40, np.float32)), "dense_1/bias was given, expected only embedding"),
        ({"embedding": np.zeros((40, 6), np.float32)}, r"lstm_0/forward/kernel is missing, expected float32 \[6, 32\]"),
    ],
    ids=["shape", "dtype", "list", "strided", "nan", "unexpected", "missing"],
)
def test_check_names_the_tensor_what_was_given_and_what_was_expected(weights, message):
    with pytest.raises(ValueError, match=message):
        canonical.check(weights, SHAPES)
