"""The language model in JAX alone: the proof of its row, its program and its dropout. The rest: test_language_models.py."""

import numpy as np
import pytest

from models.weights import canonical
from tests import cases, jax_cases
from tests.comparing import error
from tests.language_models import (
    BATCH,
    BATCHES,
    LAYERS,
    TIME,
    UNITS,
    VOCABULARY,
    follows_the_reference_to_rounding,
)
from tests.language_models import in_jax as model_of

jax = pytest.importorskip("jax")
pytestmark = pytest.mark.usefixtures("jax_runtime")


@pytest.fixture(params=[1, 2, 10], ids=lambda steps: f"unroll {steps}")
def unroll(request, monkeypatch):
    """Steps per iteration; 2 does not divide the 5 steps, 10 leaves no loop."""
    from models.jax import stacks

    monkeypatch.setitem(stacks.UNROLL, "cpu", request.param)
    return request.param


# --- against the reference ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("precision", "ptb"),
    [
        ("fp32", True),
        ("fp16", False),
        pytest.param("bf16", False, marks=pytest.mark.slow),
        pytest.param(
            "fp32", False, marks=pytest.mark.slow
        ),  # test_planted_after_the_proof.py has it too, in every mode
        pytest.param("fp16", True, marks=pytest.mark.slow),
    ],
)
def test_jax_scan_passes_its_proof(precision, ptb, jax_runtime):
    trial = jax_cases.language_model("jax_scan", precision, ptb)
    reference, kernel = cases.language_model_reference(ptb), jax_cases.kernel_of("jax_scan", "cpu")
    for mode in ("train", "forward", "stack"):
        proof = cases.prove(trial, mode, precision, reference, kernel, jax_runtime)
        assert proof.record()["ok"], f"{mode}: {proof.record()['reason']}"


def test_float16_fails_the_proof_of_fp32(jax_runtime):
    trial, kernel = jax_cases.language_model("jax_scan", "fp16"), jax_cases.kernel_of("jax_scan", "cpu")
    proof = cases.prove(trial, "train", "fp32", cases.language_model_reference(), kernel, jax_runtime)
    assert set(proof.record()["failed"]) >= {"outputs", "precision", "gradients"}


@pytest.mark.slow
@pytest.mark.parametrize("ptb", [False, True], ids=["adam, mean", "sgd, clipped, states carried"])
def test_float64_model_follows_the_reference_to_rounding(ptb, unroll, jax_float64):
    model = follows_the_reference_to_rounding(model_of, ptb)
    assert {str(array.dtype) for array in model.parameters} == {"float64"}


@pytest.mark.slow
def test_written_backward_pass_is_jaxs_own_derivative(unroll, jax_float64):
    """By the initial states and with gradients of the final ones too, which no language model asks for."""
    from models.jax import stacks

    rng = np.random.default_rng(1)
    arguments = [
        rng.normal(size=shape) for shape in ((TIME, BATCH, 4 * UNITS), (UNITS, 4 * UNITS), *[(BATCH, UNITS)] * 2)
    ]
    upstream = tuple(rng.normal(size=shape) for shape in ((TIME, BATCH, UNITS), *[(BATCH, UNITS)] * 2))

    def by(function):
        outputs, pull = jax.vjp(function, *arguments)
        return [*outputs, *pull(tuple(map(jax.numpy.asarray, upstream)))]

    ours = by(stacks._recur)
    for given, wanted in zip(ours, by(lambda *a: stacks._forward(*a)[0]), strict=True):
        assert error(given, wanted) < 1e-13


# --- one step -----------------------------------------------------------------------------------------------------------


def test_a_step_overwrites_the_weights_it_is_given():
    model = model_of()
    before = [*model.parameters, *jax.tree.leaves(model.slots)]
    model.train(model.batches[0])
    assert all(array.is_deleted() for array in before)
    assert not any(array.is_deleted() for array in model._start)


# --- dropout ------------------------------------------------------------------------------------------------------------


def test_dropout_rate_is_an_argument_of_the_one_program():
    model = model_of(keep_prob=0.5)
    model.train_steps(1), model.train(model.batches[0])
    assert model._train._cache_size() == 1 and model.graph_mismatch() == ""
    with model.without_dropout():
        assert float(model._rates[1]) == 0.0
    assert float(model._rates[1]) == 0.5


@pytest.mark.slow
def test_a_step_that_is_traced_again_is_not_the_proven_one():
    model = model_of()
    model.train_steps(1)
    model.train(model.stage(*(ids[:, :-1] for ids in BATCHES[0])))
    assert "traced 2 times" in model.graph_mismatch()


def test_model_without_dropout_draws_no_numbers():
    def program(model):
        arguments = (model.parameters, model.slots, model._key, model._rates, *model.batches[0], model.states)
        return str(model._train.trace(*arguments).jaxpr)

    assert not model_of().has_dropout and "random" not in program(model_of())
    assert model_of(keep_prob=0.5).has_dropout and "random" in program(model_of(keep_prob=0.5))


@pytest.mark.slow
def test_dropout_reaches_the_embedding_and_every_layer_with_the_mean_kept():
    from models.jax.language_model import _Dropout

    seen = []

    class Watched(_Dropout):
        def __call__(self, x):
            seen.append((x, super().__call__(x)))
            return seen[-1][1]

    model = model_of(keep_prob=0.25, states=canonical.random_states(LAYERS, 40, UNITS, 1), batches=[
        tuple(np.random.default_rng(1).integers(0, VOCABULARY, (2, 40, TIME)))
    ])  # fmt: skip
    dropout = Watched(jax.random.key(1), jax.numpy.float32(0.75))
    model._network(model.parameters, *model.batches[0], model.states, dropout)
    assert len(seen) == 1 + LAYERS  # embedding, between the layers, after the last one
    masks = []
    for before, after in seen:
        ratio = np.asarray(after) / np.asarray(before)
        assert set(np.unique(ratio.round(4))) == {0.0, 4.0}
        assert 0.2 < np.mean(ratio > 0) < 0.3
        masks.append(ratio > 0)
    assert (masks[0] != masks[1]).any()
