"""The Keras classifier: its dropout, its compilation, and the trial that the proof puts through `fit`."""

import time

import keras
import numpy as np
import pytest
import tensorflow as tf

from harness.measure.clocks import EpochClock
from harness.measure.proof import UPDATE_STEPS, Kernel, Proof
from models import rows
from models.cudnn import rnn
from models.keras.classifier import (
    ClassifierTrial,
    Dropout,
    build_classifier,
    dense_layers,
    lstm_layers,
    set_weights,
    to_canonical,
)
from models.reference import expected, networks
from models.weights import canonical
from tests import cases
from tests.comparing import error

TIME, FEATURES, UNITS, LAYERS, DENSE, CLASSES, BATCH = 5, 4, 6, 2, (8,), 3, 7
INPUTS = np.random.default_rng(1).uniform(-1, 1, (4 * BATCH, TIME, FEATURES)).astype(np.float32)
LABELS = np.random.default_rng(2).integers(0, CLASSES, 4 * BATCH)
ROWS = [name for name, made in rows.FIT_TENSORFLOW.items() if not made.needs_gpu]


def shapes(bidirectional=False):
    return canonical.classifier_shapes(FEATURES, UNITS, LAYERS, DENSE, CLASSES, bidirectional)


def model_of(bidirectional=False, **options):
    settings = dict(dense_units=DENSE, use_cudnn=False, jit_compile=False, optimizer=keras.optimizers.Adam(1e-2))
    return build_classifier((TIME, FEATURES), UNITS, LAYERS, CLASSES, bidirectional=bidirectional, **settings | options)


def trial_of(bidirectional=False, **options):
    start = canonical.large_random(shapes(bidirectional), seed=3)
    return ClassifierTrial(model_of(bidirectional, **options), start, INPUTS, LABELS, BATCH)


def reference_of(bidirectional=False):
    start = canonical.large_random(shapes(bidirectional), seed=3)
    states = canonical.zero_states(LAYERS, BATCH, UNITS, bidirectional)
    batches = [(INPUTS[k : k + BATCH], LABELS[k : k + BATCH]) for k in range(0, len(INPUTS), BATCH)]
    return expected.classifier(networks.Adam(1e-2), start, states, batches)


def assert_same(given, wanted):
    assert set(given) == set(wanted)
    for name, array in wanted.items():
        np.testing.assert_array_equal(given[name], array, err_msg=name)


# --- the proof ----------------------------------------------------------------------------------------------------------


KERNELS = {
    row: Kernel(**rows.FIT_TENSORFLOW[row].expected_ops(cases.LAYERS, cases.STEPS, "cpu", UPDATE_STEPS)) for row in ROWS
}
ALIKE = {"keras": {"keras", "keras_default"}, "keras_default": {"keras", "keras_default"}}  # Keras' loop on a CPU


@pytest.mark.parametrize(
    ("row", "precision"),
    [
        # By default not the loop of keras again or under XLA, nor the program of wavefront_loop without its loop.
        *(
            pytest.param(row, "fp32", marks=[pytest.mark.slow] * (row in ("keras_default", "keras_xla", "wavefront")))
            for row in ROWS
        ),
        # Of 16 bits: tests/harness/test_planted_mistakes_in_fit.py.
        *(pytest.param("keras", precision, marks=pytest.mark.slow) for precision in ("fp16", "bf16")),
    ],
)
def test_row_passes_its_proof_and_no_other_rows(row, precision, tensorflow_runtime):
    trial = cases.classifier(row, precision)
    proof = cases.prove_fit(trial, precision, KERNELS[row], tensorflow_runtime)
    assert proof.record()["ok"], proof.record()["reason"]
    cases.assert_outputs_are_of(precision, trial)
    profile = tensorflow_runtime.profile(lambda: trial.train_steps(1))
    accepted = set()
    for named, kernel in KERNELS.items():
        proof = Proof(precision)
        proof.what_ran(profile, kernel, "cpu")
        accepted |= set() if proof.failures else {named}
    assert accepted == ALIKE.get(row, {row})


# What the profiler sees of wavefront_persistent on a GPU (a step of its program has so many ops of the kinds that count).
PERSISTENT = {
    "ops": {
        "xla": 209,
        "xla:While": 1,
        "xla:loop:XlaCustomCallV2": 4,
        "xla:loop:MatMul": 11,
        "xla:loop:AssignVariableOp": 38,
    },
    "kernels": {"lstm_wavefront_forward": 0.3, "lstm_wavefront_backward": 0.3, "gemm_fusion_dot_2": 0.04},
}


@pytest.mark.parametrize("row", rows.FIT_TENSORFLOW)
def test_persistent_kernels_pass_for_their_own_row_alone(row):
    proof = Proof("tf32")
    kernel = Kernel(**rows.FIT_TENSORFLOW[row].expected_ops(LAYERS, 28, "gpu"))
    proof.what_ran(PERSISTENT, kernel, "gpu")
    assert (not proof.failures) == (row == "wavefront_persistent")


@pytest.mark.parametrize(
    "missing", ["xla:While", "xla:loop:XlaCustomCallV2", "xla:loop:AssignVariableOp", "lstm_wavefront"]
)
def test_persistent_row_without_its_kernels_or_its_loop_fails(missing):
    kernel = Kernel(**rows.FIT_TENSORFLOW["wavefront_persistent"].expected_ops(LAYERS, 28, "gpu"))
    seen = {part: {name: n for name, n in found.items() if missing not in name} for part, found in PERSISTENT.items()}
    proof = Proof("tf32")
    proof.what_ran(seen, kernel, "gpu")
    assert "kernel" in proof.failures


@pytest.mark.parametrize("bidirectional", [False, True])
def test_trial_follows_the_reference_where_the_proof_looks(bidirectional):
    trial, reference = trial_of(bidirectional), reference_of(bidirectional)
    trial.restore()
    start = trial.weights()
    outputs = trial.outputs()
    assert error(outputs["logits"], reference["outputs"]["logits"]) < 2e-6
    assert error(outputs["loss"], reference["outputs"]["loss"]) < 1e-6
    assert error(trial.train_steps(1), reference["losses"][:1]) < 1e-6
    gradients = trial.first_gradients()
    assert set(gradients) == set(reference["gradients"]) == set(start)
    for name, gradient in reference["gradients"].items():
        assert error(gradients[name], gradient) < 5e-6, name
    trial.restore()
    assert error(trial.train_steps(3), np.mean(reference["losses"][:3])) < 1e-6
    for name, change in reference["updates"].items():
        assert error(trial.weights()[name] - start[name], change) < 1e-3, name


def test_restore_is_exact_and_load_makes_other_weights_the_start():
    trial = trial_of(lstm_dropout=(0.5, 0.5), dense_dropout=0.5)
    trial.restore()
    assert_same(trial.weights(), canonical.large_random(shapes(), seed=3))
    losses = trial.train_steps(3)
    assert trial.optimizer.iterations.numpy() == 3
    trial.restore()
    assert trial.optimizer.iterations.numpy() == 0
    assert not any(moment.numpy().any() for moment in trial.optimizer._momentums)
    np.testing.assert_allclose(trial.train_steps(3), losses, rtol=1e-6)  # a GPU may sum in another order
    others = canonical.keras_default(shapes(), seed=4)
    trial.load(others)
    assert_same(trial.weights(), others)
    trial.train_steps(1)
    trial.restore()
    assert_same(trial.weights(), others)


def test_proof_trains_without_dropout_and_puts_the_rates_back_without_a_new_graph():
    dropping, plain = trial_of(lstm_dropout=(0.5, 0.4), dense_dropout=0.3), trial_of()
    for trial in (dropping, plain):
        trial.restore()
    np.testing.assert_allclose(dropping.train_steps(3), plain.train_steps(3), rtol=1e-6)
    assert [round(float(layer.rate.numpy()), 6) for layer in dropping.dropouts] == [0.5, 0.4, 0.3]
    function = dropping.model.train_function
    dropping.restore()
    fitted = dropping.model.fit(INPUTS, LABELS, batch_size=BATCH, shuffle=False, verbose=0).history["loss"]
    plain.restore()
    assert error(fitted, plain.train_steps(4)) > 1e-3
    assert dropping.model.train_function is function


def test_first_call_tells_its_clock_when_its_step_ended():
    trial, clock, begun = trial_of(), EpochClock(), time.perf_counter()
    trial.train_steps(1, clock)
    (step_s,) = clock.train_s
    assert begun + step_s < clock.ended < time.perf_counter()
    assert clock.validation_s == []


def test_fit_follows_the_weights_labels_and_clock_that_it_is_given(capsys):
    trial, test = trial_of(), (INPUTS[:10], LABELS[:10])  # a whole batch and a smaller one
    trial.warm_up(test), trial.timed_steps(1)
    trial.load(canonical.keras_default(shapes(), seed=4))
    traces, clock = trial.traces, EpochClock()
    result = trial.fit(INPUTS, LABELS, 2, test, clock)
    assert trial.traces == traces == 1
    assert len(result["losses"]) == len(clock.train_s) == len(clock.validation_s) == 2
    assert clock.whole_s > sum(clock.train_s) + sum(clock.validation_s)
    predicted = trial.model.predict_on_batch(INPUTS[:10]).argmax(axis=1)
    assert result["accuracy"]["val_acc"] == pytest.approx((predicted == LABELS[:10]).mean(), abs=1e-6)
    without = trial.fit(INPUTS, LABELS, 1, None, EpochClock())
    assert set(result["accuracy"]) == {"acc", "val_acc"} and set(without["accuracy"]) == {"acc"}
    assert "val_loss" in capsys.readouterr().out  # Keras' line per epoch, in the row's log


# --- by name ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bidirectional", [pytest.param(False, marks=pytest.mark.slow), True])
def test_implementation_makes_the_model_of_the_weights_sizes(bidirectional, tensorflow_runtime):
    start = canonical.large_random(shapes(bidirectional), seed=3)
    trial = rows.FIT_TENSORFLOW["keras"].build(
        start, INPUTS, LABELS, BATCH, ("Adam", 1e-2, 0.0), lstm_dropout=(0.2, 0.1), dense_dropout=0.3
    )
    trial.restore()
    assert_same(trial.weights(), start)
    assert [layer.initial_rate for layer in trial.dropouts] == [0.2, 0.1, 0.3]
    reference = reference_of(bidirectional)
    assert error(trial.outputs()["logits"], reference["outputs"]["logits"]) < 2e-6
    trial.train_steps(3)
    for name, change in reference["updates"].items():
        assert error(trial.weights()[name] - start[name], change) < 1e-3, name


def test_implementation_without_dense_layers_and_with_a_falling_rate(tensorflow_runtime):
    start = canonical.large_random(canonical.classifier_shapes(FEATURES, UNITS, 1, (), CLASSES), seed=3)
    made = rows.FIT_TENSORFLOW["keras_xla"]
    model = made.build(start, INPUTS, LABELS, BATCH, ("Adam", 1e-2, 0.5)).model
    assert [type(layer).__name__ for layer in model.layers] == ["LSTM", "Dense"] and model.jit_compile
    schedule = model.optimizer._learning_rate
    assert [float(schedule(step)) for step in (0, 2)] == pytest.approx([1e-2, 5e-3])


# --- the model ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bidirectional", [False, True])
def test_weights_come_back_bit_by_bit(bidirectional):
    model = model_of(bidirectional, lstm_dropout=(0.1, 0.1), dense_dropout=0.1)
    given = canonical.large_random(shapes(bidirectional), seed=5)
    set_weights(model, given)
    assert_same(to_canonical(model, {v.path: v.numpy() for v in model.trainable_variables}), given)
    assert len(lstm_layers(model)) == LAYERS and len(dense_layers(model)) == len(DENSE) + 1
    assert model.count_params() - sum(array.size for array in given.values()) == 3  # the rates


def test_dropout_stands_after_the_layers_it_was_asked_for():
    kinds = [type(layer).__name__ for layer in model_of(lstm_dropout=(0.2, 0.0), dense_dropout=0.1).layers]
    assert kinds == ["LSTM", "Dropout", "LSTM", "Dense", "Dropout", "Dense"]


@pytest.mark.parametrize("use_cudnn", [True, False, "auto"])
@pytest.mark.parametrize("jit_compile", [True, False])
def test_choices_of_cudnn_and_xla_reach_keras(use_cudnn, jit_compile):
    model = model_of(use_cudnn=use_cudnn, jit_compile=jit_compile)
    assert model.jit_compile is jit_compile
    assert all(layer.use_cudnn == use_cudnn for layer in lstm_layers(model))


def test_cudnn_that_cannot_be_had_is_an_error_and_no_fallback(tensorflow_runtime):
    trial = trial_of(use_cudnn=True)
    with pytest.raises(Exception, match=r"(?i)cudnn"):
        trial.train_steps(1)


def test_loss_scale_of_float16_is_static():
    trial = trial_of(precision="fp16", loss_scale=256.0)
    optimizer = trial.model.optimizer
    assert isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    assert trial.optimizer is optimizer.inner_optimizer
    trial.restore()
    for _ in range(3):
        trial.train_steps(4)
        assert optimizer.dynamic_scale.numpy() == 256.0
    assert trial.optimizer.iterations.numpy() == 12  # no step was skipped
    assert {v.dtype for v in trial.model.trainable_variables} == {"float32"}
    assert trial.outputs()["logits"].dtype == np.float32


# --- dropout ------------------------------------------------------------------------------------------------------------


def test_dropout_keeps_the_mean_and_drops_by_its_rate():
    dropped = np.asarray(Dropout(0.25, seed=1)(np.ones((200, 500), "float32"), training=True))
    assert set(np.unique(dropped.round(5))) == {np.float32(0.0), np.float32(1 / 0.75).round(5)}
    assert abs(np.mean(dropped == 0) - 0.25) < 0.007  # five standard deviations of 100,000 draws
    assert abs(dropped.mean() - 1) < 0.01


def test_dropout_of_rate_0_and_outside_training_is_the_identity():
    x = np.random.default_rng(1).normal(size=(50, 60)).astype("float32")
    layer = Dropout(0.5, seed=1)
    np.testing.assert_array_equal(layer(x, training=False), x)
    assert (np.asarray(layer(x, training=True)) != x).any()
    layer.rate.assign(0.0)
    np.testing.assert_array_equal(layer(x, training=True), x)
    assert not layer.trainable_variables


def test_dropout_draws_a_new_mask_at_every_call_and_the_same_ones_from_the_same_seed():
    x = np.ones((40, 50), "float32")
    first, second = (Dropout(0.5, seed=seed) for seed in (1, 1))
    masks = [np.asarray(first(x, training=True)) for _ in range(2)]
    assert (masks[0] != masks[1]).any()
    for mask in masks:
        np.testing.assert_array_equal(second(x, training=True), mask)


def test_dropout_keeps_its_dtype_under_float16():
    layer = Dropout(0.5, seed=1, dtype="mixed_float16")
    dropped = np.asarray(layer(np.ones((40, 50), "float32"), training=True))
    assert dropped.dtype == np.float16 and set(np.unique(dropped)) == {0.0, 2.0}
    assert layer.rate.dtype == "float32"


def test_model_with_dropout_comes_back_from_a_file(tmp_path):
    model = model_of(lstm_dropout=(0.2,), dense_dropout=0.3)
    set_weights(model, canonical.large_random(shapes(), seed=3))
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras", compile=False)
    np.testing.assert_array_equal(loaded.predict_on_batch(INPUTS), model.predict_on_batch(INPUTS))
    rates = [(layer.initial_rate, layer.seed, float(layer.rate.numpy())) for layer in loaded.layers
             if isinstance(layer, Dropout)]  # fmt: skip
    assert [(rate, seed) for rate, seed, _ in rates] == [(0.2, 0), (0.3, LAYERS)]
    assert all(value == np.float32(rate) for rate, _, value in rates)


# --- the whole stack as one layer ---------------------------------------------------------------------------------------


def test_stack_in_one_call_passes_the_proof_and_is_timed_with_its_dropout(tensorflow_runtime):
    """On a CPU without cuDNN, so that what runs is Keras' loop as far as the proof can see."""
    trial = cases.classifier("cudnn_stack", "fp32")
    proof = cases.prove_fit(trial, "fp32", KERNELS["keras"], tensorflow_runtime)
    assert proof.record()["ok"], proof.record()["reason"]
    trial.restore()
    proven = trial.train_steps(3)
    trial.restore()
    timed = trial.timed_steps(3)
    assert error(timed, proven) > 1e-3
    traces, function = trial.traces, trial.model.train_function
    trial.timed_steps(3)
    assert trial.traces == traces and trial.model.train_function is function
    trial.restore()
    np.testing.assert_allclose(trial.train_steps(3), proven, rtol=1e-6)


@pytest.mark.parametrize("bidirectional", [pytest.param(False, marks=pytest.mark.slow), True])
def test_stack_in_one_call_follows_the_reference(bidirectional):
    trial, reference = trial_of(bidirectional, use_cudnn="stack"), reference_of(bidirectional)
    trial.restore()
    assert_same(trial.weights(), canonical.large_random(shapes(bidirectional), seed=3))
    assert error(trial.outputs()["logits"], reference["outputs"]["logits"]) < 2e-6
    trial.train_steps(1)
    for name, gradient in reference["gradients"].items():
        assert error(trial.first_gradients()[name], gradient) < 5e-6, name
    trial.restore()
    start = trial.weights()
    trial.train_steps(3)
    for name, change in reference["updates"].items():
        assert error(trial.weights()[name] - start[name], change) < 1e-3, name


def test_dropout_of_a_stack_stands_between_its_layers_and_after_it():
    model = model_of(use_cudnn="stack", lstm_dropout=(0.2, 0.1))
    assert [type(layer).__name__ for layer in model.layers] == ["CudnnLSTMLayer", "Dropout", "Dense", "Dense"]
    assert (model.layers[0].dropout, model.layers[1].initial_rate) == (0.2, 0.1)
    with pytest.raises(ValueError, match="one rate between all layers"):
        build_classifier(
            (TIME, FEATURES), UNITS, 3, CLASSES, use_cudnn="stack", lstm_dropout=(0.2, 0.1), optimizer="adam"
        )


@pytest.mark.parametrize("wrong", [False, True])
def test_timed_fit_with_a_stacks_dropout_is_the_proven_one_node_by_node(wrong, monkeypatch):
    """Traced as on a GPU, and never run; wrong: a training step that forgets the loss where there is dropout."""
    monkeypatch.setattr(rnn, "_resolve", lambda use_cudnn: True)
    trial = trial_of(use_cudnn="stack", lstm_dropout=(0.2, 0.1), dense_dropout=0.2)
    train_step = trial.model.train_step
    for rate in (0.2, 0.0):
        trial._stack.dropout = rate
        if wrong and rate:
            trial.model.compute_loss = lambda x, y, y_pred, *rest, **options: keras.ops.sum(y_pred)
        tf.function(train_step).get_concrete_function((tf.constant(INPUTS[:BATCH]), tf.constant(LABELS[:BATCH])))
        vars(trial.model).pop("compute_loss", None)
    assert (trial.graph_mismatch() == "") != wrong
