"""The same for models that are trained by `fit`: the rows as they are pass, and planted mistakes fail by name."""

from types import SimpleNamespace

import numpy as np
import pytest

from harness.measure import measurement, references, training_proof
from harness.measure.proof import UPDATE_STEPS, Kernel, Proof
from models import rows
from models.reference import expected
from models.reference.networks import Adam
from models.weights import canonical

UNITS, NUM_LAYERS, BATCH_SIZE, TIME_STEPS, FEATURES, DENSE, CLASSES = 16, 2, 8, 5, 6, 12, 10
LEARNING_RATE, DECAY = 1e-3, 1e-5
WEIGHTS = canonical.large_random(canonical.classifier_shapes(FEATURES, UNITS, NUM_LAYERS, (DENSE,), CLASSES), seed=1)
STATES = canonical.zero_states(NUM_LAYERS, BATCH_SIZE, UNITS)
GENERATOR = np.random.default_rng(1)
INPUTS = GENERATOR.random((8 * BATCH_SIZE, TIME_STEPS, FEATURES), np.float32)
LABELS = GENERATOR.integers(0, CLASSES, size=8 * BATCH_SIZE)
ON_CPU = [name for name, made in rows.FIT_TENSORFLOW.items() if not made.needs_gpu]


@pytest.fixture(scope="module")
def reference():
    steps = range(0, len(INPUTS), BATCH_SIZE)
    batches = [(INPUTS[k : k + BATCH_SIZE], LABELS[k : k + BATCH_SIZE]) for k in steps]
    return expected.classifier(Adam(LEARNING_RATE, decay=DECAY), WEIGHTS, STATES, batches)


@pytest.fixture
def prove(tensorflow_runtime, reference):
    """Callable that proves a trial as a row of that name, in the order of a row's process; returns the record's proof."""

    def run(trial, row: str, precision: str = "fp32") -> dict:
        proof = Proof(precision)
        trial.train_steps(1)
        trial.restore()
        proof.outputs(trial.outputs(), reference["outputs"])
        proof.training(trial, reference)
        trial.timed_steps(1)
        profile = tensorflow_runtime.profile(lambda: trial.timed_steps(UPDATE_STEPS))
        proof.what_ran(profile, Kernel(**expected_ops_of(row)), "cpu")
        return proof.record()

    return run


def trial_of(row: str, *, optimizer=None, precision: str = "fp32", dropout: float = 0.2):
    """The row's own model and trial, with dropout, and with another optimizer where a mistake is planted there."""
    import keras

    from models.keras.classifier import ClassifierTrial, build_classifier

    arguments = {name: value for name, value in rows.FIT_TENSORFLOW[row].arguments.items() if name != "backend"}
    schedule = keras.optimizers.schedules.InverseTimeDecay(LEARNING_RATE, 1, DECAY)
    model = build_classifier(
        (TIME_STEPS, FEATURES), UNITS, NUM_LAYERS, CLASSES, dense_units=(DENSE,), lstm_dropout=(dropout, dropout),
        dense_dropout=dropout, **arguments, precision=precision, loss_scale=1024.0,
        optimizer=optimizer or keras.optimizers.Adam(schedule), seed=1,
    )  # fmt: skip
    return ClassifierTrial(model, WEIGHTS, INPUTS, LABELS, BATCH_SIZE)


def expected_ops_of(row: str) -> dict:
    return rows.FIT_TENSORFLOW[row].expected_ops(NUM_LAYERS, TIME_STEPS, "cpu")


@pytest.mark.slow
@pytest.mark.parametrize("row", ON_CPU)
def test_unmodified_fit_is_proven_under_its_own_name_alone(prove, row):
    trial = trial_of(row)
    record = prove(trial, row)
    assert record["ok"], record["reason"]
    assert all(record[f"{name}_err"] > 0 for name in ("outputs", "gradients", "update", "loss"))
    others = [named for named in rows.FIT_TENSORFLOW if expected_ops_of(named) != expected_ops_of(row)]
    assert {"keras": "keras_cudnn", "keras_default": "keras_xla"}.get(row, "keras") in others
    for named in others:
        assert prove(trial, named)["failed"] == ["kernel"], f"{row} passes as {named}"


def test_unmodified_fit_in_half_precision_is_proven_as_that_alone(prove):
    trial = trial_of("keras", precision="fp16")
    record = prove(trial, "keras", "fp16")
    assert record["ok"], record["reason"]
    assert {"outputs", "precision"} <= set(prove(trial, "keras", "fp32")["failed"])
    assert "precision" in prove(trial, "keras", "tf32")["failed"]


@pytest.mark.parametrize("layer", ["lstm", pytest.param("dense", marks=pytest.mark.slow)])
def test_layer_outside_the_update_of_fit_errs_by_exactly_one(prove, layer):
    import keras

    class LeavesOut(keras.optimizers.Adam):
        """Keeps the moments of every variable, and applies none to the first layer of that kind."""

        left_out = ()

        def update_step(self, gradient, variable, learning_rate):
            rate = 0.0 if variable.name.removesuffix(":0") in self.left_out else learning_rate
            super().update_step(gradient, variable, rate)

    optimizer = LeavesOut(keras.optimizers.schedules.InverseTimeDecay(LEARNING_RATE, 1, DECAY))
    trial = trial_of("keras", optimizer=optimizer)
    found = next(known for known in trial.model.layers if layer in known.name)
    optimizer.left_out = tuple(variable.path for variable in found.trainable_variables)
    record = prove(trial, "keras")
    assert "update" in record["failed"] and "gradients" not in record["failed"]
    assert record["update_err"] == 1.0


def test_frozen_layer_is_refused_by_its_number(prove):
    trial = trial_of("keras")
    trial.model.layers[0].trainable = False
    with pytest.raises(ValueError, match="layer 0: 0 arrays given, expected LSTM's 3"):
        prove(trial, "keras")


def test_learning_rate_of_one_fails_the_update_and_the_losses(prove):
    import keras

    assert prove(trial_of("keras", optimizer=keras.optimizers.Adam(1.0)), "keras")["failed"] == ["loss", "update"]


def test_weight_decay_in_place_of_a_decaying_rate_fails_the_update(prove):
    import keras

    optimizer = keras.optimizers.Adam(LEARNING_RATE, weight_decay=1e-1)
    assert "update" in prove(trial_of("keras", optimizer=optimizer), "keras")["failed"]


def test_dropout_left_on_in_the_proof_fails_gradients_and_losses(prove):
    trial = trial_of("keras")
    for layer in trial.dropouts:
        layer.rate = type(layer.rate)(
            0.2, dtype="float32", trainable=False
        )  # not the variable that the proof sets to 0
        layer.rate.assign = lambda value: None
    assert {"gradients", "loss", "update"} <= set(prove(trial, "keras")["failed"])


def test_fp32_fit_labelled_otherwise_fails_its_precision_and_labels_of_another_order_the_loss(prove):
    trial = trial_of("keras")  # which takes seconds to trace
    for label in ("tf32", "fp16"):
        assert prove(trial, "keras", label)["failed"] == ["precision"]
    trial.labels = trial.labels[::-1]
    record = prove(trial, "keras")
    assert "outputs" not in record["failed"]
    assert {"loss", "gradients", "update"} <= set(record["failed"])


@pytest.mark.slow
@pytest.mark.parametrize("mistake", ["the first batch at every step", "a step too few"])
def test_compiled_loop_that_trains_on_the_wrong_batches_fails_losses_and_update(prove, monkeypatch, mistake):
    import tensorflow as tf

    from models.wavefront import compiled_loop

    stacked, program = compiled_loop._stacked, compiled_loop._program

    def first_only(rows, steps, count, size):
        whole = stacked(rows, steps, count, size)
        return tf.nest.map_structure(lambda array: tf.repeat(array[:1], steps, axis=0), whole)

    def one_less(step):
        right = program(step)
        return lambda batches, count: right(batches, tf.maximum(count - 1, 1))

    monkeypatch.setattr(compiled_loop, "_stacked", first_only if mistake.startswith("the first") else stacked)
    monkeypatch.setattr(compiled_loop, "_program", one_less if mistake.startswith("a step") else program)
    assert prove(trial_of("wavefront_loop"), "wavefront_loop")["failed"] == ["loss", "update"]


@pytest.mark.parametrize(
    ("dtype", "failed"), [pytest.param("int64", [], marks=pytest.mark.slow), ("uint8", ["callable"])]
)
@pytest.mark.slow
def test_timed_fit_that_is_traced_anew_is_not_the_proven_one(
    tensorflow_runtime, reference, tmp_path, monkeypatch, dtype, failed
):
    import tensorflow as tf

    path = tmp_path / "reference.npz"
    references.save_reference(path, reference)
    job = {"device": "cpu", "precision": "fp32", "process": 0, "protocol": {}, "matmul_flops": None, "reference": path}
    trial = trial_of("keras")
    row_process = measurement.Measurement(job, SimpleNamespace(facts={}), expected_ops_of("keras"))

    def train(clock, plan):
        trial.load(plan.start)
        labels = (
            plan.y.astype(dtype) if plan.epochs == 2 else plan.y
        )  # not of the few epochs that it is tried with before
        return trial.fit(plan.x, labels, plan.epochs, plan.scored["val_acc"], clock)

    monkeypatch.setattr(training_proof, "FEWEST_EPOCHS", 4)
    tf.random.set_seed(None)  # with one, every epoch has the same order
    plan = training_proof.Plan(
        WEIGHTS,
        INPUTS,
        LABELS,
        2,
        {"val_acc": (INPUTS[:20], LABELS[:20])},
        training_proof.inverse_time(LEARNING_RATE, DECAY),
    )
    part = row_process.fit(trial, train, None, plan=plan, batch_size=BATCH_SIZE, flops=1, unit="images/s")["fit"]
    assert part["proof"]["failed"] == failed
    assert ("fit_s" in part) == (not failed)
