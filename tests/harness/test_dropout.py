"""Dropout that is not drawn as it has to be, planted in the models of every framework: the row comes out failed, and says why."""

from types import SimpleNamespace

import numpy as np
import pytest

from harness.frameworks import runtimes
from harness.measure import dropout, measurement, references
from models import rows, trial
from models.reference import dropout as telling
from models.reference import expected
from models.reference.networks import SGD
from models.weights import canonical
from tests import cases, jax_cases, torch_cases

VOCABULARY, UNITS, LAYERS, BATCH, TIME, KEEP_PROB, CLIP_NORM = 60, 16, 2, 8, 6, 0.5, 1.0
WEIGHTS = canonical.large_random(canonical.language_model_shapes(VOCABULARY, UNITS, UNITS, LAYERS), seed=1)
STATES = canonical.random_states(LAYERS, BATCH, UNITS, seed=1)
BATCHES = [tuple(pair) for pair in np.random.default_rng(4).integers(0, VOCABULARY, (4, 2, BATCH, TIME))]
ROWS = {"tensorflow": "unrolled", "torch": "torch_lstm", "jax": "jax_scan"}


@pytest.fixture(scope="module")
def reference_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("reference") / "dropout.npz"
    optimizer = SGD(1.0, clip_norm=CLIP_NORM)
    found = expected.language_model("sum_over_time", optimizer, WEIGHTS, STATES, BATCHES, True, KEEP_PROB)
    references.save_reference(path, found)
    return path


@pytest.fixture
def part_of(reference_path, monkeypatch, tensorflow_runtime):
    """Callable: (row, what is planted in its model) → the part of its training steps, from a row's way."""

    def run(row: str, plant=lambda model: None, process: int = 0, precision: str = "fp32", seed: int = 1) -> dict:
        made = rows.LANGUAGE_MODEL[row]
        make = {"torch": torch_cases.make_runtime, "jax": jax_cases.make_runtime, "tensorflow": cases.make_runtime}
        monkeypatch.setattr(runtimes, "make", lambda *_: make[made.framework]("cpu", precision))
        job = {
            "device": "cpu", "precision": precision, "process": process, "matmul_flops": None, "reference": reference_path,
            "protocol": {"WARMUP_BATCHES": 1, "WARMUP_LIMIT_S": 0.0, "TIMED_BATCHES": 5, "BLOCKS": 2, "MIN_BLOCK_S": 0.0},
        }  # fmt: skip
        row_process = measurement.Measurement(
            job, SimpleNamespace(facts={}), made.expected_ops(LAYERS, TIME, "cpu"), made.framework
        )
        row_process.runtime.seed(seed)
        model = made.build(
            WEIGHTS, STATES, BATCHES, ("SGD", 1.0), precision=precision, reduction="sum_over_time", clip_norm=CLIP_NORM,
            keep_prob=KEEP_PROB, carry_states=True, loss_scale=64.0,
        )  # fmt: skip
        plant(model)
        return row_process.steps(model, {"train": 1}, BATCH, "words/s")["train"]

    return run


def failed_by_dropout(part: dict, says: str = "") -> None:
    assert part["status"] == "failed" and "dropout" in part["proof"]["failed"], part["reason"]
    assert "blocks_ms" not in part and says in part["reason"], part["reason"]


@pytest.mark.parametrize("row", [*ROWS.values(), "torch_cells", "while_loop", "wavefront"])
def test_row_as_it_is_is_proven_and_its_start_is_put_back(part_of, row):
    models = []
    part = part_of(row, models.append)
    assert part["status"] == "ok", part["reason"]
    [model] = models
    model.restore()
    for name, array in model.weights().items():
        np.testing.assert_array_equal(array, WEIGHTS[name])
    assert model._learning_rate() == 1.0


def test_row_in_half_precision_is_proven(part_of):
    part = part_of("unrolled", precision="fp16")
    assert part["status"] == "ok", part["reason"]


# -- what is planted: by one function `uniform(shape)`, and how its numbers become a mask ----------------------------------------

MISTAKES = {
    "never drawn": "deviate by 0",
    "drawn by 0.7 of the rate": "on average",
    "drawn by 1.3 of the rate": "on average",
    "not scaled": "on average",
    "one mask for all steps": "masks are not drawn anew",
    "one mask a block": "masks are not drawn anew",
    "one mask for all time steps": "masks are shared",
    "one mask for all sequences": "masks are shared",
    "none between the layers": "",
    "none on the words": "",
    "none after the last layer": "",
}


def shared_shape(mistake: str, shape: list[int], time_axis: int) -> list[int]:
    axis = {"one mask for all time steps": time_axis, "one mask for all sequences": 1 - time_axis}.get(mistake)
    return [1 if k == axis else n for k, n in enumerate(shape)]


def plant_in_tensorflow(mistake: str, model, monkeypatch) -> None:
    import tensorflow as tf

    masks, calls = {}, []

    def drop(x):
        calls.append(x)  # the step is traced once: words, between the layers, after the last one
        skipped = {"none on the words": 1, "none between the layers": 2, "none after the last layer": 3}.get(mistake)
        if mistake == "never drawn" or len(calls) == skipped:
            return x
        rate = model._rate * {"drawn by 0.7 of the rate": 0.7, "drawn by 1.3 of the rate": 1.3}.get(mistake, 1.0)
        if mistake in ("one mask for all steps", "one mask a block"):
            with tf.init_scope():
                masks[len(calls)] = tf.Variable(np.random.default_rng(len(calls)).random(x.shape, np.float32))
            drawn = masks[len(calls)]
        else:
            drawn = tf.random.uniform(shared_shape(mistake, x.shape, 1))
        kept = tf.cast(drawn >= rate, x.dtype)
        return x * kept if mistake == "not scaled" else x * kept / (1.0 - rate)

    restore = model.restore

    def restore_and_draw():
        restore()
        for number, mask in masks.items():
            mask.assign(np.random.default_rng().random(mask.shape, np.float32))

    model._dropout = drop
    if mistake == "one mask a block":
        model.restore = restore_and_draw


def plant_in_torch(mistake: str, model, monkeypatch) -> None:
    import torch

    masks, places = {}, []

    def drop(x, rate, place):
        skipped = {"none on the words": 0, "none between the layers": 1, "none after the last layer": 2}.get(mistake)
        if mistake == "never drawn" or place == skipped:
            return x
        rate = rate * {"drawn by 0.7 of the rate": 0.7, "drawn by 1.3 of the rate": 1.3}.get(mistake, 1.0)
        shape = shared_shape(mistake, list(x.shape), 0)
        if mistake in ("one mask for all steps", "one mask a block"):
            if place not in masks:
                masks[place] = torch.rand(shape)
            drawn = masks[place]
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
        rate = self.rate * {"drawn by 0.7 of the rate": 0.7, "drawn by 1.3 of the rate": 1.3}.get(mistake, 1.0)
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


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("framework", PLANTS)
def test_mistake_in_a_language_model_fails_and_says_so(part_of, monkeypatch, framework, mistake):
    row = {"tensorflow": "while_loop", "torch": "torch_cells", "jax": "jax_scan"}[framework]
    part = part_of(row, lambda model: PLANTS[framework](mistake, model, monkeypatch))
    failed_by_dropout(part)
