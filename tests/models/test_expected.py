"""What a proof is compared with: the reference's trajectory under the names that harness/measure/proof.py reads."""

import functools

import numpy as np
import pytest

from harness.measure.proof import CURVE_STEPS, UPDATE_STEPS
from models.reference import expected, networks
from models.weights import canonical

VOCABULARY, EMBEDDING, UNITS, LAYERS, BATCH, TIME, CLASSES = 11, 4, 5, 2, 3, 6, 3
WEIGHTS = canonical.large_random(canonical.language_model_shapes(VOCABULARY, EMBEDDING, UNITS, LAYERS), seed=1)
STATES = canonical.random_states(LAYERS, BATCH, UNITS, seed=2)
BATCHES = [tuple(pair) for pair in np.random.default_rng(3).integers(0, VOCABULARY, (4, 2, BATCH, TIME))]
CLIP_NORM = 0.1


@functools.cache
def language_model(ptb: bool) -> dict:
    reduction, optimizer = ("mean", networks.Adam(1e-2))
    if ptb:
        reduction, optimizer = "sum_over_time", networks.SGD(0.5, clip_norm=CLIP_NORM)
    return expected.language_model(reduction, optimizer, WEIGHTS, STATES, BATCHES, carry_states=ptb)


OF_TRAINING = {"losses", "gradients", "updates", "loss_sensitivity", "update_sensitivity", "gradient_step"}
OF_TRAINING |= {"rounded_losses", "rounded_gradients", "rounded_updates", "rounded_length"}
OF_CLIPPING = {"clip_bias", "clip_targets", "clip_gradients"}


def test_as_many_steps_as_the_proof_asks_for():
    assert expected.STEPS >= CURVE_STEPS >= UPDATE_STEPS == 3


@pytest.mark.parametrize("ptb", [False, True])
def test_language_model_has_all_that_the_proof_compares(ptb):
    found = language_model(ptb)
    of_stack = {"stack_outputs", "stack_gradients", "stack_losses"}
    assert set(found) == {"outputs", "forward_losses", "setup"} | OF_TRAINING | OF_CLIPPING | of_stack
    outputs = {name: np.shape(array) for name, array in found["outputs"].items()}
    shown = (expected.SHOWN, TIME, VOCABULARY)
    assert outputs == {"loss": (), "hidden": (BATCH, TIME, UNITS), "logits": shown}
    for part in ("gradients", "updates"):
        assert {name: array.shape for name, array in found[part].items()} == {n: a.shape for n, a in WEIGHTS.items()}
        assert all(array.any() and array.dtype == np.float64 for array in found[part].values())
    assert found["losses"].shape == found["forward_losses"].shape == (expected.STEPS,)
    assert found["losses"][0] == found["forward_losses"][0] == found["outputs"]["loss"]
    assert (found["losses"][1:] != found["forward_losses"][1:]).all()  # the weights have moved
    network = networks.LanguageModel("sum_over_time" if ptb else "mean")
    last = network.forward(WEIGHTS, *BATCHES[(expected.STEPS - 1) % len(BATCHES)], STATES)
    assert found["forward_losses"][-1] == last.loss  # states are not carried between forward passes


def test_gradients_of_the_stack_alone_match_finite_differences():
    inputs = [WEIGHTS["embedding"][tokens].astype(np.float64) for tokens, _ in BATCHES]
    found = language_model(ptb=False)
    assert [found["stack_losses"][k] for k in (0, 1)] == [
        expected.stack(WEIGHTS, STATES, inputs[k : k + 1])["stack_losses"][0] for k in (0, 1)
    ]
    gradients = found["stack_gradients"]
    assert set(gradients) == {"inputs", *(name for name in WEIGHTS if name.startswith("lstm"))}
    weighting, rng, step = expected.upstream((BATCH, TIME, UNITS)), np.random.default_rng(7), 1e-6
    for name in gradients:
        direction = rng.normal(size=gradients[name].shape)
        along = []
        for sign in (1, -1):
            change = sign * step * direction
            moved = {n: a.astype(np.float64) + (change if n == name else 0) for n, a in WEIGHTS.items()}
            x = inputs[0] + (change if name == "inputs" else 0)
            along.append(np.sum(expected.stack(moved, STATES, [x])["stack_outputs"]["hidden"] * weighting))
        np.testing.assert_allclose(np.sum(gradients[name] * direction), (along[0] - along[1]) / (2 * step), rtol=1e-7)


def test_gradients_are_those_after_clipping():
    raw = networks.LanguageModel("sum_over_time").loss_and_gradients(WEIGHTS, *BATCHES[0], STATES).gradients
    norm = np.sqrt(sum(np.square(gradient).sum() for gradient in raw.values()))
    assert norm > CLIP_NORM
    for name, gradient in language_model(ptb=True)["gradients"].items():
        np.testing.assert_allclose(gradient, raw[name] * CLIP_NORM / norm, rtol=1e-12, atol=0)


@pytest.mark.parametrize("bidirectional", [False, True])
def test_classifier_has_all_that_the_proof_compares(bidirectional):
    start = canonical.large_random(
        canonical.classifier_shapes(EMBEDDING, UNITS, LAYERS, (7,), CLASSES, bidirectional), seed=1
    )
    rng = np.random.default_rng(6)
    batches = [(rng.uniform(-1, 1, (BATCH, TIME, EMBEDDING)), rng.integers(0, CLASSES, BATCH)) for _ in range(2)]
    states = canonical.zero_states(LAYERS, BATCH, UNITS, bidirectional)
    found = expected.classifier(networks.Adam(1e-2), start, states, batches)
    assert set(found) == {"outputs", "clip_bias", *OF_TRAINING}
    assert set(found["outputs"]) == {"loss", "logits"}
    assert found["outputs"]["logits"].shape == (BATCH, CLASSES)
    for part in ("gradients", "updates"):
        assert {name: array.shape for name, array in found[part].items()} == {n: a.shape for n, a in start.items()}
    assert found["losses"].shape == (expected.STEPS,) and found["losses"][0] == found["outputs"]["loss"]


def test_updates_are_the_change_by_exactly_three_steps_of_the_optimizer():
    network, adam = networks.LanguageModel("mean"), networks.Adam(1e-2)
    current = {name: array.astype(np.float64) for name, array in WEIGHTS.items()}
    for batch in BATCHES[:3]:
        adam.update(current, network.loss_and_gradients(current, *batch, STATES).gradients)
    for name, change in language_model(ptb=False)["updates"].items():
        np.testing.assert_array_equal(change, current[name] - WEIGHTS[name], err_msg=name)


def test_reference_changes_nothing_that_it_was_given():
    given = {name: array.copy() for name, array in WEIGHTS.items()}
    states = canonical.random_states(LAYERS, BATCH, UNITS, seed=2)
    expected.language_model("mean", networks.SGD(0.1), given, states, BATCHES, carry_states=True)
    for name, array in WEIGHTS.items():
        np.testing.assert_array_equal(given[name], array)
    np.testing.assert_array_equal(np.array(states), np.array(STATES))


@pytest.mark.parametrize(
    ("place", "name", "word", "least"),
    [(0, "token", VOCABULARY, 0), (0, "token", -1, 0), (1, "target", VOCABULARY, -1), (1, "target", -2, -1)],
)
def test_a_word_beyond_the_vocabulary_is_refused_in_every_batch(place, name, word, least):
    """Of a batch that no step of the reference reads, and that the timed steps do."""
    batches = [tuple(ids.copy() for ids in BATCHES[k % len(BATCHES)]) for k in range(expected.STEPS + 2)]
    batches[-1][place][0, 0] = word
    with pytest.raises(
        ValueError, match=f"batch {len(batches) - 1}: {name} {word} given, expected {least} to 10, the vocabulary"
    ):
        expected.language_model("mean", networks.Adam(1e-2), WEIGHTS, STATES, batches, carry_states=False)


@pytest.mark.parametrize("bound", [CLIP_NORM, 5.0])
def test_the_other_side_of_clippings_bound_is_the_gradient_of_another_head(bound):
    network, tokens = networks.LanguageModel("sum_over_time"), BATCHES[0][0]
    found = expected.language_model(
        "sum_over_time", networks.SGD(0.5, clip_norm=bound), WEIGHTS, STATES, BATCHES, carry_states=True
    )
    head = {"dense_0/kernel": np.zeros_like(WEIGHTS["dense_0/kernel"]), "dense_0/bias": found["clip_bias"]}
    gradients = network.loss_and_gradients({**WEIGHTS, **head}, tokens, found["clip_targets"], STATES).gradients
    norm, start = networks.norm_of(gradients), networks.norm_of(found["gradients"])
    assert (norm < bound) == (start == pytest.approx(bound)) and abs(norm / bound - 1) > 0.1
    for name, array in found["clip_gradients"].items():
        np.testing.assert_allclose(array, gradients.pop(name) * min(1.0, bound / norm), rtol=1e-12)
    assert not any(array.any() for array in gradients.values())


def test_a_step_from_anywhere_is_the_trajectorys_next_one():
    for ptb in (False, True):
        found, model = language_model(ptb), networks.LanguageModel("sum_over_time" if ptb else "mean")
        optimizer = networks.SGD(0.5, clip_norm=CLIP_NORM) if ptb else networks.Adam(1e-2)
        weights, states = {name: np.array(w, np.float64) for name, w in WEIGHTS.items()}, STATES
        result = model.loss_and_gradients(weights, *BATCHES[0], states)
        optimizer.update(weights, result.gradients)
        states = result.final_states if ptb else states
        moments = None if ptb else (1, optimizer.m, optimizer.v)
        start = {name: array.copy() for name, array in weights.items()}
        loss, updates = expected.step(found["setup"], weights, states, BATCHES[1 % len(BATCHES)], moments, update=True)
        assert loss == pytest.approx(found["losses"][1], rel=1e-12)
        assert expected.step(found["setup"], weights, states, BATCHES[1 % len(BATCHES)], moments, update=False) == (
            loss,
            {},
        )
        optimizer.update(weights, model.loss_and_gradients(weights, *BATCHES[1 % len(BATCHES)], states).gradients)
        for name, array in weights.items():
            np.testing.assert_allclose(updates[name], array - start[name], rtol=1e-9, atol=1e-15)
