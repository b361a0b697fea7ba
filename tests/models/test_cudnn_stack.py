"""The stack in one cuDNN call, computed here without cuDNN: the same buffer, time-major, proven as the row is."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from harness.measure.proof import Kernel
from models import rows
from models.cudnn import rnn
from models.reference.lstm import lstm_stack_backward, lstm_stack_forward
from models.tf.cudnn_stack import CudnnStack
from models.tf.language_model import LanguageModel
from models.weights import canonical, layouts
from tests import cases
from tests.comparing import error

FEATURES, UNITS, LAYERS, BATCH, TIME = 5, 7, 3, 4, 6
WEIGHTS = canonical.large_random(canonical.lstm_shapes(FEATURES, UNITS, LAYERS), seed=1)
STATES = canonical.random_states(LAYERS, BATCH, UNITS, seed=2)
LIMITS = {"float64": 1e-13, "float32": 5e-6, "float16": 1e-2}  # max|a - b| / max|b|
WITHOUT_CUDNN = Kernel(ops={r"loop:\w*MatMul": cases.LAYERS}, not_ops="CudnnRNN.*")


def uniform(seed, *shape):
    return np.random.default_rng(seed).uniform(-1, 1, shape).astype(np.float32)


INPUTS, D_OUTPUTS = uniform(3, BATCH, TIME, FEATURES), uniform(4, BATCH, TIME, UNITS)


def time_major(array):
    return np.swapaxes(array, 0, 1)


def language_model(precision="fp32", ptb=False, network=LanguageModel, compile_rest=False):
    """The row's model as tests/cases.py builds it, without cuDNN."""
    start, dtype = cases.language_model_start(), {"fp32": "float32", "fp16": "float16"}[precision]
    if not ptb:
        stack = CudnnStack(start[0], cases.LAYERS, dtype, use_cudnn=False)
        adam = keras.optimizers.Adam(1e-3)
        return network(stack, *start, adam, loss_scale=cases.LOSS_SCALE, compile_rest=compile_rest)
    stack = CudnnStack(start[0], cases.LAYERS, dtype, dropout=0.5, use_cudnn=False)
    return network(
        stack, *start, keras.optimizers.SGD(1.0), loss_scale=cases.LOSS_SCALE / cases.STEPS, reduction="sum_over_time",
        clip_norm=cases.CLIP_NORM, keep_prob=0.5, carry_states=True, compile_rest=compile_rest,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", LIMITS)
def test_outputs_states_and_all_gradients_match_the_reference(dtype):
    stack = CudnnStack(WEIGHTS, LAYERS, dtype, use_cudnn=False)
    inputs, states = tf.constant(time_major(INPUTS), dtype), stack.stage_states(STATES)
    flat = stack.variables[0].value
    with tf.GradientTape() as tape:
        tape.watch([inputs, *states])
        outputs, finals = tf.function(lambda x, s: stack(x, s, None, training=True))(inputs, states)
        loss = tf.reduce_sum(tf.cast(outputs, tf.float64) * time_major(D_OUTPUTS).astype(np.float64))
    d_inputs, d_states, d_flat = tape.gradient(loss, [inputs, states, flat])

    expected, expected_finals, cache = lstm_stack_forward(INPUTS, WEIGHTS, STATES, LAYERS)
    expected_d_inputs, expected_d_weights, expected_d_states = lstm_stack_backward(D_OUTPUTS, cache)
    assert outputs.dtype == dtype and error(time_major(outputs), expected) < LIMITS[dtype]
    assert error(time_major(d_inputs), expected_d_inputs) < LIMITS[dtype]
    for given, wanted in ((finals, expected_finals), (d_states, expected_d_states)):
        for part in (0, 1):  # h, c
            assert error(given[part], np.stack([layer[0][part] for layer in wanted])) < LIMITS[dtype]
    gradients = stack.to_canonical([d_flat.numpy()])
    assert set(gradients) == set(expected_d_weights)
    for name, gradient in expected_d_weights.items():
        assert error(gradients[name], gradient) < LIMITS[dtype], name


@pytest.mark.parametrize("ptb", [False, True], ids=["adam, mean", "sgd, clipped, dropout, states carried"])
def test_row_passes_its_proof(ptb, tensorflow_runtime):
    trial, reference = language_model(ptb=ptb), cases.language_model_reference(ptb)
    for mode in ("train", "forward", "stack"):
        proof = cases.prove(trial, mode, "fp32", reference, WITHOUT_CUDNN, tensorflow_runtime)
        assert proof.record()["ok"], f"{mode}: {proof.record()['reason']}"


def test_float16_row_passes_its_proof(tensorflow_runtime):
    proof = cases.prove(
        language_model("fp16"), "train", "fp16", cases.language_model_reference(), WITHOUT_CUDNN, tensorflow_runtime
    )
    assert proof.record()["ok"], proof.record()["reason"]


@pytest.mark.slow
@pytest.mark.parametrize("ptb", [False, True], ids=["adam, mean", "sgd, clipped, dropout, states carried"])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_row_with_the_rest_under_xla_passes_its_proof(precision, ptb, tensorflow_runtime):
    trial, reference = language_model(precision, ptb, compile_rest=True), cases.language_model_reference(ptb)
    clusters = {"train": 2, "forward": 1}  # dense layer with loss, and the update; the backward pass may be a third
    for mode, least in clusters.items():
        kernel = WITHOUT_CUDNN._replace(rest_ops={"xla": (least, 3)}, not_ops="CudnnRNN.*|SparseSoftmax.*|Apply.*")
        proof = cases.prove(trial, mode, precision, reference, kernel, tensorflow_runtime)
        assert proof.record()["ok"], f"{mode}: {proof.record()['reason']}"


def test_what_runs_without_cudnn_is_not_what_the_row_names(tensorflow_runtime):
    trial, reference = language_model(), cases.language_model_reference()
    proof = cases.prove(trial, "train", "fp32", reference, cases.kernel_of("cudnn_stack"), tensorflow_runtime)
    assert proof.record()["failed"] == ["kernel"]


@pytest.mark.skipif(bool(tf.config.list_physical_devices("GPU")), reason="there is a GPU")
def test_the_row_itself_insists_on_cudnn():
    with pytest.raises(ValueError, match="use_cudnn"):
        rows.TENSORFLOW["cudnn_stack"].arguments["stack"](WEIGHTS, LAYERS, "float32")


def test_weights_come_back_bit_by_bit_and_the_second_bias_stays_zero():
    model = language_model()
    stack, (start, *_) = model.stack, cases.language_model_start()
    for name, array in model.weights().items():
        np.testing.assert_array_equal(array, start[name], err_msg=name)
    model.train_steps(3)
    _, biases = layouts.cudnn_flat_to_list(stack.variables[0].numpy(), stack.spec)
    names = [name for name, _ in layouts.cudnn_biases(stack.spec)]
    recurrent = [bias for name, bias in zip(names, biases, strict=True) if " b_R" in name]
    assert len(recurrent) == 4 * cases.LAYERS and not np.any(recurrent)
    assert all((array != start[name]).any() for name, array in model.weights().items())


def test_timed_steps_draw_dropout_masks_and_those_of_the_proof_do_not():
    keras.utils.set_random_seed(1)
    model = language_model(ptb=True)
    expected = np.array(cases.language_model_reference(ptb=True)["losses"][:3])
    losses = []
    for steps in (lambda: [float(model.train(batch)) for batch in model.batches[:3]], lambda: model.train_steps(3)):
        model.restore()
        losses.append(np.abs(np.array(steps()) / expected - 1).max())
    assert losses[0] > 1e-3 and losses[1] < 1e-5


# --- with dropout the timed graph is a second one -----------------------------------------------------------------------


class NeverUpdates(LanguageModel):
    """Wrong with dropout only, where the proof's steps do not look."""

    def _train_step(self, tokens, targets, states, stack_dropout=True):
        if not stack_dropout:
            return super()._train_step(tokens, targets, states, stack_dropout)
        _, hidden, finals = self._network(tokens, states, training=True)
        return self._head(hidden, targets, self.kernel.value, self.bias.value)[1], finals


class OtherTargets(LanguageModel):
    def _train_step(self, tokens, targets, states, stack_dropout=True):
        return super()._train_step(tokens, tf.zeros_like(targets) if stack_dropout else targets, states, stack_dropout)


@pytest.mark.parametrize(("network", "alike"), [(LanguageModel, True), (NeverUpdates, False), (OtherTargets, False)])
def test_timed_graph_differs_from_the_proven_one_in_cudnns_dropout_alone(network, alike, monkeypatch):
    """Traced as on a GPU, and never run."""
    monkeypatch.setattr(rnn, "_resolve", lambda use_cudnn: True)
    model = language_model(ptb=True, network=network)
    graph = model._train.get_concrete_function(*model.batches[0], model.states).graph
    rates = [op.get_attr("dropout") for op in graph.get_operations() if op.type == "CudnnRNNV3"]
    assert rates == [0.5] and sum(op.type == "RandomUniform" for op in graph.get_operations()) == 2
    assert (model.graph_mismatch() == "") == alike


def test_held_bias_costs_no_copy_between_host_and_device(monkeypatch):
    """TensorFlow's scatter has no float16 on a GPU, and int32 indices live on the host."""
    monkeypatch.setattr(rnn, "_resolve", lambda use_cudnn: True)
    for precision in ("fp32", "fp16"):
        model = language_model(precision)
        graph = model._train.get_concrete_function(*model.batches[0], model.states).graph
        scatters = [op for op in graph.get_operations() if op.type == "TensorScatterUpdate"]
        assert [[tensor.dtype for tensor in op.inputs] for op in scatters] == [[tf.float32, tf.int64, tf.float32]]


def test_states_are_carried_and_one_graph_serves_all_steps():
    model = language_model(ptb=True)
    for batch in model.batches[:3]:
        model.train(batch)
    assert model._train.experimental_get_tracing_count() == 1
    assert [state.shape.as_list() for state in model.states] == [[cases.LAYERS, cases.BATCH, cases.UNITS]] * 2
    assert error(model.states[0], model.initial_states[0].numpy()) > 0.01
