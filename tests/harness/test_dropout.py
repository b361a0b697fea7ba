"""Dropout that is not drawn as it has to be, planted in the models of every framework: the row comes out failed, and says why."""

import re
from collections.abc import Sequence

import numpy as np
import pytest

from harness.measure import dropout, references
from harness.measure.proof import UPDATE_STEPS, Proof
from models import rows
from models.reference import expected
from models.reference.dropout import OF_CLASSIFIER, OF_LANGUAGE_MODEL
from models.reference.networks import SGD, Adam
from models.weights import canonical
from tests import cases

VOCABULARY, UNITS, LAYERS, BATCH, TIME, KEEP_PROB, CLIP_NORM = 1200, 64, 2, 24, 24, 0.5, 1.0
WEIGHTS = canonical.large_random(canonical.language_model_shapes(VOCABULARY, UNITS, UNITS, LAYERS), seed=1)
STATES = canonical.random_states(LAYERS, BATCH, UNITS, seed=1)
BATCHES = [tuple(pair) for pair in np.random.default_rng(4).integers(0, VOCABULARY, (4, 2, BATCH, TIME))]
ROWS = {"tensorflow": "while_loop", "torch": "torch_cells", "jax": "jax_scan"}


@pytest.fixture(scope="module")
def reference_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("reference") / "dropout.npz"
    optimizer = SGD(1.0, clip_norm=CLIP_NORM)
    found = expected.language_model("sum_over_time", optimizer, WEIGHTS, STATES, BATCHES, True, KEEP_PROB)
    references.save_reference(path, found)
    return path


@pytest.fixture
def process_of(monkeypatch, tensorflow_runtime):
    """Callable: (row, path of its reference) → the Measurement of a row's process."""

    def run(made, path, layers: int, steps: int, process: int = 0, precision: str = "fp32"):
        expected_ops, job = made.expected_ops(layers, steps, "cpu"), {"precision": precision, "process": process}
        return cases.row_process(monkeypatch, made.framework, expected_ops, path, blocks_of=5, **job)

    return run


def language_model(row: str, precision: str = "fp32"):
    return rows.LANGUAGE_MODEL[row].build(
        WEIGHTS, STATES, BATCHES, ("SGD", 1.0), precision=precision, reduction="sum_over_time", clip_norm=CLIP_NORM,
        keep_prob=KEEP_PROB, carry_states=True, loss_scale=64.0,
    )  # fmt: skip


@pytest.fixture
def part_of(reference_path, process_of):
    """Callable: (row, what is planted in its model) → the part of its training steps, from a row's way."""

    def run(row: str, plant=lambda model: None, precision: str = "fp32", process: int = 0) -> dict:
        row_process = process_of(rows.LANGUAGE_MODEL[row], reference_path, LAYERS, TIME, process, precision)
        row_process.runtime.seed(1)
        model = language_model(row, precision)
        plant(model)
        return row_process.steps(model, {"train": 1}, BATCH, "words/s")["train"]

    return run


@pytest.fixture
def wrong(reference_path, process_of):
    """Callable: (row, what is planted in its model) → what the proof of its dropout says; "" for nothing wrong."""

    def run(row: str, plant=lambda model: None) -> str:
        row_process, proof = process_of(rows.LANGUAGE_MODEL[row], reference_path, LAYERS, TIME), Proof("fp32")
        model = language_model(row)
        plant(model)
        model.train(model.batches[0])
        profile = row_process.runtime.profile(lambda: model.train(model.batches[0]))
        row_process._prove_dropout(model, proof, profile["ops"], steps=1)
        return proof.record()["reason"]

    return run


def failed_by_dropout(part: dict, says: str) -> None:
    assert part["status"] == "failed" and "dropout" in part["proof"]["failed"], part["reason"]
    assert "blocks_ms" not in part and says in part["reason"], part["reason"]


@pytest.mark.parametrize("row", ["while_loop", pytest.param("torch_lstm", marks=pytest.mark.slow), "jax_scan"])
def test_row_as_it_is_is_proven_and_its_start_is_put_back(part_of, row):
    models = []
    part = part_of(row, models.append)
    assert part["status"] == "ok", part["reason"]
    [model] = models
    model.restore()
    for name, array in model.weights().items():
        np.testing.assert_array_equal(array, WEIGHTS[name])
    assert model._learning_rate() == 1.0


@pytest.mark.slow
def test_row_in_half_precision_is_proven(part_of):
    part = part_of("while_loop", precision="fp16")
    assert part["status"] == "ok", part["reason"]


# -- what is planted: by one function `uniform(shape)`, and how its numbers become a mask ----------------------------------------

MISTAKES = {  # what its reason says
    "never drawn": "random numbers were drawn 0 times in 1 steps",
    "drawn by 0.8 of the rate": "on average, expected",
    "drawn by 1.2 of the rate": "on average, expected",
    "not scaled": "on average, expected",
    "one mask for all steps": "random numbers were drawn|masks are not drawn anew",
    "one mask a block": "random numbers were drawn|masks are not drawn anew",
    "one mask for all time steps": "masks are shared",
    "one mask for all sequences": "masks are shared",
    "one mask for all places": "on average, expected|deviate",
    "none on the words": "random numbers were drawn 2 times|on average",
    "none between the layers": "random numbers were drawn 2 times|on average",
    "none after the last layer": "random numbers were drawn 2 times|on average",
}
FACTORS = {"drawn by 0.8 of the rate": 0.8, "drawn by 1.2 of the rate": 1.2}


def shared_shape(mistake: str, shape: Sequence[int], time_axis: int) -> list[int]:
    axis = {"one mask for all time steps": time_axis, "one mask for all sequences": 1 - time_axis}.get(mistake)
    return [1 if k == axis else n for k, n in enumerate(shape)]


def plant_in_tensorflow(mistake: str, model, monkeypatch) -> None:
    import tensorflow as tf

    calls = []

    def drop(x):
        calls.append(x)  # the step is traced once: words, between the layers, after the last one
        skipped = {"none on the words": 1, "none between the layers": 2, "none after the last layer": 3}.get(mistake)
        if mistake == "never drawn" or len(calls) == skipped:
            return x
        shape, axis = ((TIME, BATCH, UNITS), 0) if len(calls) == 2 else ((BATCH, TIME, UNITS), 1)
        drawn = tf.random.uniform(shared_shape(mistake, shape, axis))
        if mistake == "one mask for all steps":
            drawn = tf.constant(np.random.default_rng(len(calls)).random(shape, np.float32))
        kept = tf.cast(drawn >= model._rate * FACTORS.get(mistake, 1.0), x.dtype)
        return x * kept if mistake == "not scaled" else x * kept / (1.0 - model._rate * FACTORS.get(mistake, 1.0))

    model._dropout = drop


def plant_in_torch(mistake: str, model, monkeypatch) -> None:
    import torch

    masks, places = {}, []

    def drop(x, rate, place):
        skipped = {"none on the words": 0, "none between the layers": 1, "none after the last layer": 2}.get(mistake)
        if mistake == "never drawn" or place == skipped:
            return x
        rate = rate * FACTORS.get(mistake, 1.0)
        shape = shared_shape(mistake, list(x.shape), 0)
        if mistake in ("one mask for all steps", "one mask a block"):
            if place not in masks:
                masks[place] = torch.rand(shape)
            drawn = masks[place]
        elif mistake == "one mask for all places":  # as layers of one seed draw it
            masks[0] = drawn = torch.rand(shape) if place == 0 else torch.rand(shape) * 0 + masks[0]
        else:
            drawn = torch.rand(shape)
        kept = (drawn >= rate).to(x.dtype)
        return x * kept if mistake == "not scaled" else x * kept / (1.0 - rate)

    def of_network(x):
        places.append(0)
        return drop(x, model.dropout_rate, 0 if len(places) % 2 else 2)

    restore = model.restore

    def restore_and_draw():
        restore()
        masks.clear()

    model._drop = model._dropout = of_network
    model.stack.module.drop = lambda x, rate: drop(x, rate, 1)
    if mistake == "one mask a block":
        model.restore = restore_and_draw


def plant_in_jax(mistake: str, model, monkeypatch) -> None:
    import jax
    import jax.numpy as jnp

    from models.jax import language_model

    def drop(self, x):
        self.calls += 1
        skipped = {"none on the words": 1, "none between the layers": 2, "none after the last layer": 3}.get(mistake)
        if mistake == "never drawn" or self.calls == skipped:
            return x
        rate = self.rate * FACTORS.get(mistake, 1.0)
        key = jax.random.key(3) if mistake == "one mask for all steps" else self.key
        shape = shared_shape(mistake, x.shape, 0)
        kept = jax.random.uniform(jax.random.fold_in(key, self.calls), shape) >= rate
        return jnp.where(kept, x if mistake == "not scaled" else x / (1.0 - rate), 0)

    monkeypatch.setattr(language_model._Dropout, "__call__", drop)
    if mistake == "one mask a block":
        train, restore = model.train, model.restore
        kept = {}

        def same_key(batch):
            key = kept.setdefault("key", model._key)
            model._key = jax.random.wrap_key_data(jax.random.key_data(key), impl="rbg")
            return train(batch)

        def restore_and_draw():
            restore()
            kept.clear()

        model.train, model.restore = same_key, restore_and_draw


PLANTS = {"tensorflow": plant_in_tensorflow, "torch": plant_in_torch, "jax": plant_in_jax}


OF_GRAPHS = {  # every one is planted in PyTorch; some here, where each takes a trace; most of all with --all alone
    "tensorflow": ("never drawn", "one mask for all steps", "one mask for all time steps", "none between the layers"),
    "jax": ("drawn by 1.2 of the rate", "one mask a block", "not scaled", "one mask for all sequences"),
}
BY_DEFAULT = {"one mask for all steps", "none between the layers", "drawn by 1.2 of the rate", "one mask a block"}


@pytest.mark.parametrize(
    ("framework", "mistake"),
    [
        *(pytest.param("torch", mistake, marks=[pytest.mark.slow] * (k % 2)) for k, mistake in enumerate(MISTAKES)),
        *(
            pytest.param(framework, mistake, marks=[pytest.mark.slow] * (mistake not in BY_DEFAULT))
            for framework, some in OF_GRAPHS.items()
            for mistake in some
        ),
    ],
)
def test_mistake_in_a_language_model_says_what_it_is(wrong, monkeypatch, framework, mistake):
    reason = wrong(ROWS[framework], lambda model: PLANTS[framework](mistake, model, monkeypatch))
    assert reason.startswith("dropout: ") and re.search(MISTAKES[mistake], reason), reason


def test_row_that_never_drops_is_failed_in_every_process(part_of, monkeypatch):
    for process in (0, 1):
        part = part_of("torch_cells", lambda model: plant_in_torch("never drawn", model, monkeypatch), process=process)
        failed_by_dropout(part, "random numbers were drawn 0 times")


def test_row_that_says_it_has_no_dropout_is_failed_all_the_same(part_of):
    failed_by_dropout(part_of("torch_lstm", lambda model: setattr(model, "has_dropout", False)), "random numbers")


def test_row_that_draws_the_same_masks_in_every_block_is_failed(part_of):
    import torch

    def plant(model):
        restore = model.restore
        model.restore = lambda: (restore(), torch.manual_seed(1))

    failed_by_dropout(part_of("torch_cells", plant), "timed blocks 1 and 2 have the same losses")


# -- classifiers -----------------------------------------------------------------------------------------------------------------

FEATURES, DENSE, CLASSES, RATES = 6, (24,), 5, (0.25, 0.25, 0.25)
CLASSIFIER = canonical.large_random(canonical.classifier_shapes(FEATURES, UNITS, LAYERS, DENSE, CLASSES), seed=1)
INPUTS = np.random.default_rng(1).random((4 * BATCH, TIME, FEATURES), np.float32)
LABELS = np.random.default_rng(2).integers(0, CLASSES, 4 * BATCH)
FIT_ROWS = {"tensorflow": "keras", "torch": "torch_lstm", "jax": "jax_scan"}


@pytest.fixture(scope="module")
def classifier_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("reference") / "classifier.npz"
    batches = [(INPUTS[k : k + BATCH], LABELS[k : k + BATCH]) for k in range(0, len(INPUTS), BATCH)]
    states = canonical.zero_states(LAYERS, BATCH, UNITS)
    references.save_reference(path, expected.classifier(Adam(1e-3), CLASSIFIER, states, batches, RATES[:2], RATES[2]))
    return path


@pytest.fixture
def wrong_in_fit(classifier_path, process_of):
    """As `wrong`, of a classifier that was built with these rates."""

    def run(framework: str, rates: Sequence[float] = RATES, plant=lambda trial: None) -> str:
        made, proof = rows.FIT[FIT_ROWS[framework]], Proof("fp32")
        row_process = process_of(made, classifier_path, LAYERS, TIME)
        if framework == "tensorflow":  # a Keras `fit` of one step takes long
            row_process.reference["dropout_draws"] = 24
        trial = made.build(
            CLASSIFIER, INPUTS, LABELS, BATCH, ("Adam", 1e-3, 0.0), lstm_dropout=rates[:2], dense_dropout=rates[2]
        )
        plant(trial)
        trial.restore()
        trial.timed_steps(1)
        ops = row_process.runtime.profile(lambda: trial.timed_steps(UPDATE_STEPS))["ops"]
        row_process._prove_dropout(trial, proof, ops, UPDATE_STEPS)
        for name, array in trial.weights().items():
            np.testing.assert_array_equal(array, CLASSIFIER[name])
        return proof.record()["reason"]

    return run


@pytest.mark.parametrize("framework", ["tensorflow", "torch", pytest.param("jax", marks=pytest.mark.slow)])
def test_classifier_as_it_is_has_nothing_wrong(wrong_in_fit, framework):
    assert wrong_in_fit(framework) == ""


@pytest.mark.parametrize("rates", [(0.0, 0.25, 0.25), (0.25, 0.15, 0.25), (0.35, 0.25, 0.25), (0.25, 0.25, 0.35)])
def test_another_rate_in_one_place_of_a_classifier_is_found(wrong_in_fit, rates):
    assert wrong_in_fit("torch", rates).startswith("dropout: ")


def test_classifier_without_dropout_is_failed_by_its_ops(wrong_in_fit):
    assert "random numbers were drawn 0 times" in wrong_in_fit("torch", (0.0, 0.0, 0.0))


@pytest.mark.slow
def test_keras_dropout_of_one_mask_for_all_steps_of_fit_is_failed(wrong_in_fit):
    def plant(trial):
        for layer in trial.dropouts:
            layer.seed_generator = 1  # a constant seed: the same numbers at every call

    assert "masks are not drawn anew" in wrong_in_fit("tensorflow", plant=plant)


# -- the limits ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "m"), [OF_LANGUAGE_MODEL, OF_CLASSIFIER])
def test_right_losses_pass_whatever_the_seed(n, m):
    """Skewed ones, more than those of the cases above (0.3)."""
    generator = np.random.default_rng(1)
    for _ in range(3000):
        losses, reference = (generator.gamma(15.0, size=(1, draws)) for draws in (n, m))
        assert dropout.wrong_losses(losses, reference, 0.0) == ""


@pytest.mark.parametrize(
    ("ops", "framework", "steps", "missing"),
    [
        ({"RandomUniform": 2, "CudnnRNNV3": 1}, "tensorflow", 1, False),
        ({"RandomUniform": 2, "MatMul": 1}, "tensorflow", 1, True),
        ({"xla:loop:StatelessRandomUniformV2": 3}, "tensorflow", 3, False),
        ({"aten::native_dropout": 8}, "torch", 3, True),
        ({"aten::native_dropout": 6, "aten::_cudnn_rnn": 3}, "torch", 3, False),
        ({"cudaGraphLaunch": 3}, "torch", 3, False),
        ({"## Call CompiledFxGraph f ##": 1, "aten::randint": 1}, "torch", 1, False),
        ({"dot": 3}, "jax", 1, True),
        ({"loop:xor": 3}, "jax", 1, False),
    ],
)
def test_random_numbers_are_counted_where_a_profile_shows_them(ops, framework, steps, missing):
    assert bool(dropout.masks_not_drawn(ops, framework, 3, steps)) == missing
