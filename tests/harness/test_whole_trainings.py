"""Whole trainings that did less than they say, or otherwise, come out failed by what ran; honest ones come out ok.

Every case is a real model of the suite on a CPU and goes through harness.measure.measurement.Measurement, as a row's process
does.
"""

import functools
import importlib.util
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from harness.frameworks import runtimes
from harness.measure import measurement, references, training_proof
from harness.record import machine
from models import rows
from models.reference import expected, networks
from models.weights import canonical
from tests import cases, jax_cases, torch_cases

BATCH, TIME, FEATURES, UNITS, LAYERS, CLASSES = 8, 5, 6, 8, 2, 10
RATE, DECAY, EPOCHS, COUNT, TESTED = 1e-3, 1e-3, 3, 12 * BATCH, 37
SHAPES = canonical.classifier_shapes(FEATURES, UNITS, LAYERS, (12,), CLASSES)
WEIGHTS = canonical.large_random(SHAPES, seed=1)
RANDOM = np.random.default_rng(3)
X, Y = RANDOM.random((COUNT, TIME, FEATURES), np.float32), RANDOM.integers(0, CLASSES, COUNT)
TEST = RANDOM.random((TESTED, TIME, FEATURES), np.float32), RANDOM.integers(0, CLASSES, TESTED)
PROVEN = 4 * BATCH
MAKERS = {"tensorflow": cases.make_runtime, "torch": torch_cases.make_runtime, "jax": jax_cases.make_runtime}


@pytest.fixture(scope="module")
def made(tensorflow_runtime, tmp_path_factory):
    """Callables that make a row's model once, and a Measurement of its process on a CPU in fp32."""
    pytest.importorskip("torch"), pytest.importorskip("jax")
    folder = tmp_path_factory.mktemp("references")

    runtime = functools.cache(lambda framework: MAKERS[framework]("cpu", "fp32"))
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(machine, "facts", lambda device: {})

    def measured(row: rows.Row, reference: dict, name: str, process: int = 0):
        path = folder / f"{name}.npz"
        if not path.exists():
            references.save_reference(path, reference)
        job = {"device": "cpu", "precision": "fp32", "process": process, "matmul_flops": None, "reference": path,
               "protocol": {"BATCH_SIZE": BATCH}}  # fmt: skip
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(runtimes, "make", lambda framework, *_: runtime(framework))
            expected_ops = row.expected_ops(LAYERS, TIME, "cpu", 3 if name == "classifier" else 1)
            return measurement.Measurement(job, SimpleNamespace(facts={}), expected_ops, row.framework)

    yield SimpleNamespace(measured=measured, classifier=functools.cache(classifier), language=functools.cache(language))
    monkeypatch.undo()


# --- fit ------------------------------------------------------------------------------------------------------------------


def classifier(name: str, seed: int = 1):
    trial = rows.FIT[name].build(
        WEIGHTS, X[:PROVEN], Y[:PROVEN], BATCH, ("Adam", RATE, DECAY), lstm_dropout=(0.2, 0.1), dense_dropout=0.2,
        device="cpu", capacity=COUNT, seed=seed,
    )  # fmt: skip
    trial.warm_up(TEST)
    return trial


@functools.cache
def classifier_reference() -> dict:
    batches = [(X[k : k + BATCH], Y[k : k + BATCH]) for k in range(0, PROVEN, BATCH)]
    states = canonical.zero_states(LAYERS, BATCH, UNITS)
    return expected.classifier(networks.Adam(RATE, decay=DECAY), WEIGHTS, states, batches)


def fitted(made, name: str, plant=None, seed: int = 1, process: int = 0) -> dict:
    """The part of a row's whole training in which `plant(monkeypatch, trial)` has planted a mistake."""
    trial = made.classifier(name, seed)
    row_process = made.measured(rows.FIT[name], classifier_reference(), "classifier", process)

    def train(clock, plan):
        trial.load(plan.start)
        return trial.fit(plan.x, plan.y, plan.epochs, plan.scored["val_acc"], clock)

    plan = training_proof.Plan(
        canonical.keras_default(SHAPES, seed), X, Y, EPOCHS, {"val_acc": TEST}, training_proof.inverse_time(RATE, DECAY)
    )
    trial.load(WEIGHTS)
    with pytest.MonkeyPatch.context() as patched:
        if plant:
            plant(patched, trial)
        return row_process.fit(trial, train, None, plan=plan, batch_size=BATCH, flops=1, unit="images/s")["fit"]


def failed(part: dict, says: str) -> None:
    assert part["status"] == "failed" and part["proof"]["failed"] == ["training"], part["reason"]
    assert says in part["reason"] and "fit_s" not in part, part["reason"]


LOOPS = ("torch_lstm", "jax_scan")


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("wavefront", "wavefront_loop", "torch_cells")]


@pytest.mark.parametrize("name", ["keras", *LOOPS, *SLOW])
def test_honest_fit_is_ok_every_time(made, name):
    for _ in range(3):  # the order and the masks go on from one to the next
        part = fitted(made, name)
        assert part["status"] == "ok" and part["fit_s"], part["reason"]


def in_fit(change):
    """A mistake around the trial's own fit: change(x, y, epochs, validation) → what it is called with instead."""

    def plant(patched, trial):
        fit = trial.fit
        patched.setattr(trial, "fit", lambda *given: fit(*change(*given[:-1]), given[-1]))

    return plant


def half(array):
    return array[: len(array) // 2 // BATCH * BATCH]


def only_when_timed(change):
    """By somebody who knows the proof's sizes."""
    return lambda x, *rest: change(x, *rest) if len(x) == COUNT else (x, *rest)


def twice_half(x, y, *rest):
    return np.concatenate([half(x)] * 2), np.concatenate([half(y)] * 2), *rest


ANYWHERE = {
    "half of the data": (in_fit(lambda x, y, e, v: (half(x), half(y), e, v)), "optimizer steps"),
    "half of the data, when it is timed": (
        in_fit(only_when_timed(lambda x, y, e, v: (half(x), half(y), e, v))), "18 optimizer steps of 8 sequences, expected 36"),
    "half of the data twice": (in_fit(twice_half), "did not train on every sequence of its data once"),
    "an epoch less": (in_fit(lambda x, y, e, v: (x, y, e - 1, v)), "optimizer steps, expected"),
    "an epoch less, when it is timed": (in_fit(only_when_timed(lambda x, y, e, v: (x, y, e - 1, v))), "24 optimizer steps"),
    "half of the validation": (in_fit(lambda x, y, e, v: (x, y, e, tuple(a[::2] for a in v))), "val_acc by epoch"),
    "half of the validation, when it is timed": (
        in_fit(only_when_timed(lambda x, y, e, v: (x, y, e, tuple(a[: TESTED // 2] for a in v)))), "val_acc: "),
    "no validation": (in_fit(lambda x, y, e, v: (x, y, e, None)), "0 validations in 3 epochs"),
    "no validation, when it is timed": (in_fit(only_when_timed(lambda x, y, e, v: (x, y, e, None))), "val_acc: 0 epochs"),
    "batches of the training for the validation": (in_fit(lambda x, y, e, v: (x, y, e, (x[:TESTED], y[:TESTED]))), "val_acc"),
}  # fmt: skip


IN_EVERY_FRAMEWORK = ("half of the data, when it is timed", "an epoch less", "half of the validation, when it is timed")


@pytest.mark.parametrize(
    ("name", "mistake"),
    [("jax_scan", mistake) for mistake in ANYWHERE]
    + [(name, mistake) for name in ("keras", "torch_lstm") for mistake in IN_EVERY_FRAMEWORK],
)
def test_fit_that_does_less_is_failed(made, name, mistake):
    plant, says = ANYWHERE[mistake]
    failed(fitted(made, name, plant), says)


def test_second_process_counts_what_costs_nothing_to_count(made):
    failed(
        fitted(made, "torch_lstm", ANYWHERE["half of the data, when it is timed"][0], process=1), "18 optimizer steps"
    )
    assert fitted(made, "torch_lstm", process=1)["status"] == "ok"


def torch_order(draw):
    def plant(patched, trial):
        import torch

        patched.setattr(torch, "randperm", lambda count, **_: torch.tensor(draw(count)))

    return plant


def jax_order(draw):
    def plant(patched, trial):
        import jax.numpy as jnp

        patched.setattr(trial, "_drawn_order", lambda count: trial._filled(jnp.array(draw(count))))

    return plant


def batches_only(count):
    return np.random.permutation(count // BATCH).repeat(BATCH) * BATCH + np.tile(np.arange(BATCH), count // BATCH)


def half_drawn_twice(count):
    return np.concatenate([np.random.permutation(count // 2) for _ in range(2)])


ORDERS = {
    "in order": (np.arange, "3 of 3 epochs took the data in the same order"),
    "one order for all": (lambda n: np.random.default_rng(0).permutation(n), "3 of 3 epochs took the data in the same order"),
    "the order of the batches only": (batches_only, "of 3 epochs"),
    "half of it twice": (half_drawn_twice, "did not train on every sequence"),
    "with replacement": (lambda n: np.random.randint(0, n, n), "did not train on every sequence"),
}  # fmt: skip


@pytest.mark.parametrize(("name", "of"), [("torch_lstm", torch_order), ("jax_scan", jax_order)])
@pytest.mark.parametrize("order", ORDERS)
def test_order_that_is_not_drawn_anew_is_failed(made, name, of, order):
    draw, says = ORDERS[order]
    failed(fitted(made, name, of(draw)), says)


def in_keras_fit(**options):
    def plant(patched, trial):
        fit = trial.model.fit
        patched.setattr(trial.model, "fit", lambda *given, **named: fit(*given, **named | options))

    return plant


def seeded(patched, trial):
    """As Keras' users do, whose tf.data then draws one order for every epoch."""
    import keras

    load = trial.load
    patched.setattr(trial, "load", lambda start: (keras.utils.set_random_seed(1), load(start)))


IN_KERAS = {
    "in order": (in_keras_fit(shuffle=False), "epochs took the data in the same order"),
    "the order within each batch only": (in_keras_fit(shuffle="batch"), "epochs took the data in the same order"),
    "a seed": (seeded, "epochs took the data in the same order"),
    "a validation in every second epoch": (in_keras_fit(validation_freq=2), "1 validations in 3 epochs"),
    "half of the validation": (in_keras_fit(validation_steps=1), "val_acc"),
}


IN_KERAS_BY_DEFAULT = ("in order", "a seed", "half of the validation")


@pytest.mark.parametrize(
    "mistake", [pytest.param(name, marks=[pytest.mark.slow] * (name not in IN_KERAS_BY_DEFAULT)) for name in IN_KERAS]
)
def test_mistake_in_what_keras_is_told_is_failed(made, mistake):
    plant, says = IN_KERAS[mistake]
    try:
        failed(fitted(made, "keras", plant), says)
    finally:
        import tensorflow as tf

        tf.random.set_seed(None)


def replaced(method, by):
    """A method of the trial: by(the trial's own, *arguments)."""
    return lambda patched, trial: patched.setattr(trial, method, functools.partial(by, getattr(trial, method)))


def every_second(evaluate, batches, calls=[]):  # noqa: B006  (kept from call to call)
    calls.append(evaluate(batches) if len(calls) % 2 == 0 else calls[-1])
    return calls[-1]


LOOP_MISTAKES = {
    "half of the validation, of which all is said": (
        replaced("_evaluate", lambda evaluate, batches: 2 * evaluate(batches[: len(batches) // 2])), "val_acc"),
    "a validation left out in every second epoch": (replaced("_evaluate", every_second), "val_acc by epoch"),
    "accuracy over half of the data": (
        replaced("_epoch", lambda epoch, data, n: (lambda loss, acc: (loss, acc / 2))(*epoch(data, n))), "acc by epoch"),
    "a loss over other steps": (
        replaced("_epoch", lambda epoch, data, n: (lambda loss, acc: (loss / 2, acc))(*epoch(data, n))), "losses of 3 epochs"),
}  # fmt: skip


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("mistake", LOOP_MISTAKES)
def test_mistake_in_a_loop_of_its_own_is_failed(made, name, mistake):
    plant, says = LOOP_MISTAKES[mistake]
    failed(fitted(made, name, plant), says)


def test_half_of_each_batch_is_failed(made):
    """Once the proof of the step is over, whose gradients show it too."""

    def plant(patched, trial):
        step, graph_mismatch = trial._train, trial.graph_mismatch
        halve = lambda: patched.setattr(trial, "_train", lambda index: step(index[: BATCH // 2]))  # noqa: E731
        patched.setattr(trial, "graph_mismatch", lambda: halve() or graph_mismatch())

    failed(fitted(made, "torch_lstm", plant), "did not train on every sequence")


def torch_rate(rate):
    def plant(patched, trial):
        def advance():
            trial.optimizer.learning_rate = rate(trial.optimizer.iterations)
            trial.optimizer.advance()

        patched.setattr(trial, "_advance", advance)

    return plant


LATE = 3  # steps, after which the proof of an update sees nothing
RATES = {
    "no decay": lambda t: RATE,
    "a step late": lambda t: RATE / (1 + DECAY * max(t - 1, 0)),
    "half of the decay": lambda t: RATE / (1 + DECAY / 2 * t),
    "1.2 times as high later on": lambda t: (1.2 if t >= LATE else 1) * RATE / (1 + DECAY * t),
}


@pytest.mark.parametrize("mistake", RATES)
def test_rate_that_does_not_decay_as_told_is_failed(made, mistake):
    failed(fitted(made, "torch_lstm", torch_rate(RATES[mistake])), "the learning rate of step 37 was")


def test_rate_that_does_not_decay_is_failed_in_jax_and_keras(made):
    def jax_plant(patched, trial):
        rate, decay = trial._rate_and_decay
        patched.setattr(trial, "_rate_and_decay", (rate, decay / 2))

    def keras_plant(patched, trial):
        patched.setattr(trial.optimizer._learning_rate, "decay_rate", DECAY / 2)
        trial.model.make_train_function(force=True)

    failed(fitted(made, "jax_scan", jax_plant), "the learning rate of step 37 was")
    try:
        failed(fitted(made, "keras", keras_plant), "the learning rate of step 37 was")
    finally:
        made.classifier("keras", 1).model.make_train_function(force=True)


@pytest.mark.parametrize(("batch_size", "classes", "steps"), [(7, 3, 2), (64, 2, 4), (1, 4, 4), (9, 10, 1)])
def test_probe_fits_any_batch_size_and_number_of_classes(made, batch_size, classes, steps):
    shapes = canonical.classifier_shapes(FEATURES, UNITS, 1, (), classes)
    count = steps * batch_size
    x, y = RANDOM.random((count, TIME, FEATURES), np.float32), RANDOM.integers(0, classes, count)
    for precision in ("fp32", "fp16", *["bf16"] * training_proof.tells_steps("bf16", batch_size)):
        trial = rows.FIT["torch_lstm"].build(
            canonical.large_random(shapes, 1), x, y, batch_size, ("Adam", RATE, 0.0), precision=precision, device="cpu",
            loss_scale=1024.0,
        )  # fmt: skip
        plan = training_proof.Plan(
            canonical.keras_default(shapes, 1), x, y, 1, {"val_acc": (x, y)}, training_proof.inverse_time(RATE)
        )

        def train(clock, plan, trial=trial):
            return trial.load(plan.start) or trial.fit(plan.x, plan.y, plan.epochs, plan.scored["val_acc"], clock)

        assert training_proof.differs_in_an_epoch(trial, train, plan, batch_size) == ""
        if steps > 1:
            with pytest.MonkeyPatch.context() as patched:
                torch_order(np.arange)(patched, trial)
                assert "in the same order" in training_proof.differs_in_an_epoch(trial, train, plan, batch_size)


# --- PTB's schedule -------------------------------------------------------------------------------------------------------


def ptb_script():
    path = Path(__file__).resolve().parents[2] / "benchmarks" / "ptb.py"
    spec = importlib.util.spec_from_file_location("script_ptb", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PTB = ptb_script()
C = SimpleNamespace(
    VOCABULARY=30, UNITS=UNITS, NUM_LAYERS=LAYERS, TIME_STEPS=TIME, BATCH_SIZE=BATCH, STAGED_BATCHES=4, SEED=1,
    LEARNING_RATE=1.0, LR_DECAY=0.8, FLAT_EPOCHS=2, EPOCHS=4, CLIP_NORM=5.0, KEEP_PROB=0.5, INIT_SCALE=0.1,
    TRAIN_WORDS=None, EVAL_WORDS=None,
)  # fmt: skip
TEXT = SimpleNamespace(
    train=RANDOM.integers(0, 30, BATCH * (12 * TIME + 1)), valid=RANDOM.integers(0, 30, BATCH * (6 * TIME + 1)),
    test=RANDOM.integers(0, 30, 63),
)  # fmt: skip
LANGUAGE_ROWS = ("keras", "torch_lstm", "jax_scan")


def language(name: str):
    return rows.LANGUAGE_MODEL[name].build(
        *PTB.start(C, TEXT), ("SGD", C.LEARNING_RATE), device="cpu", reduction="sum_over_time", clip_norm=C.CLIP_NORM,
        keep_prob=C.KEEP_PROB, carry_states=True, precision="fp32",
    )  # fmt: skip


@functools.cache
def language_reference() -> dict:
    return PTB.reference(C, TEXT)


def trained(made, name: str, plant=None, train=PTB.train, **of_config) -> dict:
    """The part of PTB's whole training; of_config: what `train` is given instead."""
    trial = made.language(name)
    row_process = made.measured(rows.LANGUAGE_MODEL[name], language_reference(), "language")
    config = SimpleNamespace(**vars(C) | of_config)
    trial._set_learning_rate(C.LEARNING_RATE)  # the one of a fresh process
    trial.start_from(*PTB.start(C, TEXT)[:2])
    with pytest.MonkeyPatch.context() as patched:
        if plant:
            plant(patched, trial)
        run = lambda timed: train(config, trial, TEXT, C.SEED, timed)  # noqa: E731
        return row_process.training(trial, run, PTB.schedule_of(C, TEXT))["fit"]


@pytest.mark.parametrize("name", LANGUAGE_ROWS)
def test_honest_training_is_ok_and_leaves_the_model_as_it_was(made, name):
    part = trained(made, name)
    assert part["status"] == "ok" and part["perplexity"]["test"] > 1, part["reason"]
    assert not {"train", "train_epoch"} & vars(made.language(name)).keys()


def best_of_all(c, model, text, seed, timed):
    result = PTB.train(c, model, text, seed, timed)
    return result | {"perplexity": result["perplexity"] | {"train": float(np.exp(max(result["losses"])))}}


def of_the_epoch_before(c, model, text, seed, timed):
    """Validation and test of the weights before the last epoch."""
    evaluate, epoch_of, kept = model.evaluate, model.train_epoch, []

    def train_epoch(batches, rate):
        kept[:] = [model.weights()]
        return epoch_of(batches, rate)

    def evaluated(batches, states):
        now = model.weights()
        model.start_from(kept[0], canonical.zero_states(LAYERS, BATCH, UNITS))
        loss = evaluate(batches, states)
        model.start_from(now, canonical.zero_states(LAYERS, BATCH, UNITS))
        return loss

    model.train_epoch, model.evaluate = train_epoch, evaluated
    try:
        return PTB.train(c, model, text, seed, timed)
    finally:
        model.train_epoch = epoch_of
        del model.evaluate


def half_after_first(patched, trial):
    epoch_of, calls = trial.train_epoch, []

    def train_epoch(batches, rate):
        calls.append(len(batches))
        return epoch_of(batches if calls.count(12) < 2 else batches[:6], rate)

    patched.setattr(trial, "train_epoch", train_epoch)


def late_rate(patched, trial):
    epoch_of, rates = trial.train_epoch, [C.LEARNING_RATE]
    patched.setattr(trial, "train_epoch", lambda batches, rate: (rates.append(rate), epoch_of(batches, rates[-2]))[1])


SCHEDULES = {
    "half of the text": (dict(TRAIN_WORDS=len(TEXT.train) // 2), None, "epoch 1 took 5 batches, expected 12"),
    "half of the batches": (
        {}, replaced("train_epoch", lambda of, batches, rate: of(batches[: (len(batches) + 1) // 2], rate)),
        "epoch 1 took 6 batches, expected 12"),
    "half of the batches after the first epoch": ({}, half_after_first, "epoch 2 took 6 batches, expected 12"),
    "half of the text twice": (
        {}, replaced("train_epoch", lambda of, batches, rate: of((batches[:6] * 2)[: len(batches)], rate)),
        "batch 7 of epoch 1 is not that of the text"),
    "epochs left out": (dict(EPOCHS=3), None, "3 epochs ran"),
    "half of the texts evaluated": (
        {}, replaced("evaluate", lambda of, batches, states: of(batches[: len(batches) // 2], states)), "perplexity valid"),
    "half of the texts read": (dict(EVAL_WORDS=BATCH * (3 * TIME + 1)), None, "perplexity"),
    "no decay": (dict(LR_DECAY=1.0), None, "epoch 3 trained at rate 1, expected 0.8"),
    "an epoch late": (dict(FLAT_EPOCHS=3), None, "epoch 3 trained at rate 1, expected 0.8"),
    "another factor": (dict(LR_DECAY=0.75), None, "epoch 3 trained at rate 0.75, expected 0.8"),
    "a rate that is not set": (
        {}, replaced("_set_learning_rate", lambda of, rate: of(rate) if rate in (0.0, 1.0) else None), "the learning rate of"),
    "a rate that is set an epoch late": ({}, late_rate, "the learning rate of an epoch at 0.8 was 1"),
    "1.2 times the rate": (
        {}, replaced("_set_learning_rate", lambda of, rate: of(1.2 * rate)), "the learning rate of an epoch at 1 was 1.2"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "mistake"),
    [("jax_scan", mistake) for mistake in SCHEDULES]
    + [(name, f"half of the {what}") for name in ("keras", "torch_lstm") for what in ("batches", "texts evaluated")]
    + [
        (name, mistake)
        for name in ("keras", "torch_lstm")
        for mistake in SCHEDULES
        if mistake.startswith("a rate that")
    ],
)
def test_training_by_another_schedule_is_failed(made, name, mistake):
    config, plant, says = SCHEDULES[mistake]
    failed(trained(made, name, plant, **config), says)


@pytest.mark.parametrize(
    ("train", "says"), [(best_of_all, "perplexity train"), (of_the_epoch_before, "perplexity valid")]
)
def test_perplexity_of_another_epoch_is_failed(made, train, says):
    failed(trained(made, "jax_scan", train=train), says)
