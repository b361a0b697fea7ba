"""models/reference/recurrent.py: an LSTM is that of lstm.py, and every gradient is the loss's own, by central differences."""

import numpy as np
import pytest

from models.reference.lstm import lstm_stack_forward
from models.reference.recurrent import Batch, Layer, Network, predict, step, walk

BATCH, TIME, FEATURES, UNITS, OUTPUTS = 3, 5, 4, 6, 2
RANDOM = np.random.default_rng(1)
MASK = np.array([[1, 1, 0, 1, 1], [1, 1, 1, 0, 0], [0, 0, 0, 0, 0]], bool)
DROPS = [RANDOM.uniform(0, 2, (BATCH, size)) for size in (FEATURES, UNITS)]
KEEPS = [RANDOM.uniform(0, 2, (4, BATCH, UNITS)) for _ in range(2)]
STATES = [[RANDOM.normal(size=(BATCH, UNITS)) for _ in "hc"] for _ in range(2)]


def problem(network, tokens=False, **rest):
    shapes = network.shapes(FEATURES, UNITS, OUTPUTS, vocabulary=7 if tokens else 0)
    weights = [RANDOM.uniform(-0.6, 0.6, shape) for shape in shapes]
    inputs = RANDOM.integers(0, 7, (BATCH, TIME)) if tokens else RANDOM.normal(size=(BATCH, TIME, FEATURES))
    return weights, Batch(inputs, RANDOM.normal(size=(BATCH, OUTPUTS)), **rest)


CASES = {
    "lstm": (Network(), {}),
    "relu": (Network(Layer(activation="relu")), {}),
    "hard_sigmoid": (Network(Layer(recurrent_activation="hard_sigmoid")), {}),
    "gru": (Network(Layer("gru")), {}),
    "simple": (Network(Layer("simple")), {}),
    "backwards": (Network(Layer(backwards=True)), {"mask": MASK}),
    "bidirectional": (Network(bidirectional=True), {}),
    "no bias": (Network(use_bias=False), {}),
    "cell": (Network(adds_cell=True), {"states": STATES}),
    "mask": (Network(), {"mask": MASK}),
    "tokens": (Network(), {"tokens": True, "mask": MASK}),
    "dropout": (Network(), {"drop": DROPS}),
    "recurrent dropout": (Network(), {"keep": KEEPS}),
}


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_the_losss_own(name):
    network, rest = CASES[name]
    weights, batch = problem(network, **rest)
    _, gradients, _ = step(network, weights, batch)
    for k, gradient in enumerate(gradients):
        direction = RANDOM.normal(size=gradient.shape)

        def loss(by, k=k, direction=direction):
            return step(network, [w + by * direction if j == k else w for j, w in enumerate(weights)], batch)[0]

        assert (loss(1e-6) - loss(-1e-6)) / 2e-6 == pytest.approx(np.sum(gradient * direction), rel=1e-6, abs=1e-9), k


@pytest.mark.parametrize("bidirectional", [False, True])
def test_an_lstm_is_that_of_the_other_reference(bidirectional):
    network = Network(bidirectional=bidirectional)
    weights, batch = problem(network)
    ways = ["forward", "backward"] if bidirectional else ["forward"]
    parts = ("kernel", "recurrent_kernel", "bias")
    names = [f"lstm_{layer}/{way}/{part}" for layer in range(2) for way in ways for part in parts]
    named = dict(zip(names, weights, strict=False))
    states = [[(np.zeros((BATCH, UNITS)),) * 2 for _ in ways] for _ in range(2)]
    _, finals, _ = lstm_stack_forward(batch.inputs, named, states, 2, bidirectional)
    last = np.concatenate([final[0] for final in finals[-1]], -1)
    assert np.allclose(next(predict(network, weights, [batch])), last @ weights[-2] + weights[-1], rtol=1e-12)


def test_a_stateful_network_goes_on_from_the_batch_before():
    weights, batch = problem(Network(carries=True))
    first, second = predict(Network(carries=True), weights, [batch, batch])
    assert np.abs(first - second).max() > 1e-3
    losses = [loss for loss, _ in walk(Network(carries=True), weights, [batch, batch], 0.1)]
    assert (
        losses[0] == step(Network(), weights, batch)[0]
        and losses[1] != list(walk(Network(), weights, [batch] * 2, 0.1))[1][0]
    )
