"""How sensitive a training is to rounding, on words that are drawn: what the proof's limits follow from."""

import functools

import numpy as np
import pytest

from harness.data.batches import language_model_batches
from harness.measure.proof import LIMITS, ROUNDING, SLACK, Proof
from models.reference import expected, networks
from models.weights import canonical

UNITS, VOCABULARY, BATCH, TIME, CLIP_NORM = (
    200,
    3000,
    10,
    20,
    5.0,
)  # as PTB's small config, with fewer words and sequences
SHAPES = canonical.language_model_shapes(VOCABULARY, UNITS, UNITS, 2)
WEIGHTS = canonical.large_random(SHAPES, seed=1)
STATES = canonical.random_states(2, BATCH, UNITS, seed=1)


@pytest.fixture(scope="module")
def batches():
    """Words as often as in a text, the same with every Python; of the embedded one each Python has its own."""
    often = np.arange(1, VOCABULARY + 1) ** -1.2
    words = np.random.default_rng(4).choice(VOCABULARY, 10_000, p=often / often.sum())
    inputs, targets = language_model_batches(words, BATCH, TIME)
    return [(inputs[k], targets[k]) for k in range(expected.STEPS)]


@pytest.fixture(scope="module")
def reference(batches):
    optimizer = networks.SGD(1.0, clip_norm=CLIP_NORM)
    return expected.language_model("sum_over_time", optimizer, WEIGHTS, STATES, batches, carry_states=True)


class Off(networks.SGD):
    """SGD whose clipped gradients are `factor` times what they should be."""

    def __init__(self, learning_rate: float, factor: float):
        super().__init__(learning_rate, clip_norm=CLIP_NORM)
        self.factor = factor

    def _apply(self, weights):
        self.gradients = networks.scaled(self.gradients, self.factor)
        super()._apply(weights)


@pytest.fixture(scope="module")
def losses(batches):
    """Callable: learning rate, factor of the gradients → the losses of that training."""

    @functools.cache
    def of(rate: float, factor: float) -> np.ndarray:
        model, states = networks.LanguageModel("sum_over_time"), STATES
        path = networks.trajectory(
            model, Off(rate, factor), WEIGHTS, batches, states, expected.STEPS, carry_states=True
        )
        return np.array(path.losses)

    return of


def failed(losses: np.ndarray, reference, precision: str = "fp32") -> bool:
    """Whether these losses of a training fail."""
    proof = Proof(precision)
    proof.losses("the steps", losses, reference["losses"], proof._loss_limits(reference))
    return "loss" in proof.failures


def test_loss_moves_as_far_as_its_sensitivity_says_and_the_limit_lets_a_rounding_pass(losses, reference):
    """Four roundings of the clipped norm: what no float32 row can help."""
    part = 4 * 2.0**-24
    moved = np.maximum.accumulate(np.abs(losses(1.0, 1.0 + part) / reference["losses"] - 1))
    np.testing.assert_allclose(moved, part * reference["loss_sensitivity"], rtol=1e-2, atol=1e-12)
    assert reference["loss_sensitivity"][-1] > 10, "the words are a sensitive case"
    assert SLACK * ROUNDING["fp32"] * reference["loss_sensitivity"][-1] > LIMITS["fp32"].loss
    assert not failed(losses(1.0, 1.0 + part), reference)


def test_gradients_off_by_a_thousandth_fail_the_losses_of_a_sensitive_case(losses, reference):
    assert failed(losses(1.0, 1.001), reference)


@pytest.mark.parametrize("precision", LIMITS)
def test_rate_off_by_a_fifth_fails_the_losses_in_every_precision(losses, reference, precision):
    assert failed(losses(1.2, 1.0), reference, precision)


def test_sensitivity_of_a_step_is_never_below_that_of_an_earlier_one_and_none_before_the_first_update(reference):
    sensitivity = reference["loss_sensitivity"]
    assert sensitivity[0] == 0 and (np.diff(sensitivity) >= 0).all()


@pytest.mark.parametrize("carry_states", [False, True])
def test_sensitivity_is_that_of_the_same_training_with_a_larger_rate(carry_states):
    shapes = canonical.language_model_shapes(11, 4, 4, 1)
    start, states = canonical.large_random(shapes, seed=3), canonical.random_states(1, 3, 4, seed=3)
    ids = np.random.default_rng(3).integers(0, 11, (5, 2, 3, 4))
    pairs = [tuple(pair) for pair in ids]
    for optimizer in (lambda rate: networks.SGD(rate, clip_norm=0.5), networks.Adam):
        arguments = (start, pairs, states)
        model = networks.LanguageModel("mean")
        path, off = (
            networks.trajectory(model, optimizer(rate), *arguments, 6, carry_states) for rate in (0.1, 0.1 * (1 + 1e-5))
        )
        found = networks.sensitivity(model, optimizer(0.1), *arguments, path, carry_states)
        moved = np.maximum.accumulate(np.abs(np.array(off.losses) / path.losses - 1)) / 1e-5
        np.testing.assert_allclose(found.losses, moved, rtol=1e-3, atol=1e-9)
        for name, update in path.updates.items():
            apart = np.linalg.norm(off.updates[name] - update) / np.linalg.norm(update) / 1e-5
            assert found.updates[name] == pytest.approx(apart, rel=1e-3)


def test_rounded_finds_the_unit_that_turns_on_or_off():
    """A relu just below 0 for one image: the rounded weights turn it on, and its gradients are no longer 0."""
    shapes = canonical.classifier_shapes(3, 4, 1, (2,), 3)
    start = canonical.large_random(shapes, seed=5)
    inputs, labels = np.random.default_rng(5).uniform(-1, 1, (1, 2, 3)), np.array([1])
    states, batches = canonical.zero_states(1, 1, 4), [(inputs, labels)]
    model = networks.Classifier()

    def found(below: float) -> float:
        hidden = model.forward(start, inputs, labels, states).hidden[0]
        bias = np.array(start["dense_0/bias"], np.float64)
        bias[:] = -(hidden @ np.asarray(start["dense_0/kernel"], np.float64)) + [-below, 1.0]
        own = start | {"dense_0/bias": bias}
        path = networks.trajectory(model, networks.SGD(1e-3), own, batches, states, 6, carry_states=False)
        return networks.rounded(model, networks.SGD(1e-3), own, batches, states, path, False).gradients["dense_0/bias"]

    assert found(1e-6) > 0.1 > 0.01 > found(0.1)
