"""Mistakes that comparisons with other frameworks have had, planted one by one in the JAX row: the proof catches each."""

import numpy as np
import pytest

from harness.measure.proof import Kernel
from models.weights import layouts
from tests import cases, jax_cases

jax = pytest.importorskip("jax")
pytestmark = pytest.mark.usefixtures("jax_runtime")


@pytest.fixture
def failed(jax_runtime):
    """trial → the proofs that fail."""

    def run(trial, mode="train", kernel=None):
        kernel = kernel or jax_cases.kernel_of("jax_scan", "cpu")
        return set(
            cases.prove(trial, mode, "fp32", cases.language_model_reference(), kernel, jax_runtime).record()["failed"]
        )

    return run


def model(stack=None):
    trial = jax_cases.language_model("jax_scan", "fp32")
    trial.stack.__class__ = stack or trial.stack.__class__
    return trial


def scan_lstm():
    from models.jax.stacks import ScanLSTM

    return ScanLSTM


def test_gates_in_another_order_are_caught(failed, monkeypatch):
    to_keras = layouts.to_keras

    def reordered(weights, layer):
        return [layouts.reorder_gates(array, "ifco", "icfo") for array in to_keras(weights, layer)]

    monkeypatch.setattr(layouts, "to_keras", reordered)
    trial = model()
    monkeypatch.undo()
    assert failed(trial) >= {"outputs", "gradients", "loss"}


def test_transposed_recurrent_kernel_is_caught(failed):
    trial = model()
    blocks = np.split(np.asarray(trial._start[2]), 4, axis=1)
    trial._start[2] = jax.numpy.asarray(np.concatenate([block.T for block in blocks], axis=1))
    assert failed(trial) >= {"outputs", "gradients"}


@pytest.mark.slow
def test_state_leaked_from_a_layer_into_the_next_is_caught(failed):
    """The final state of layer n as the initial state of layer n + 1."""

    class Leaking(scan_lstm()):
        def __call__(self, parameters, inputs, states, dropout=None):
            from models.jax import stacks

            h, c = (state[0] for state in states)
            for layer in range(self.num_layers):
                kernel, recurrent_kernel, bias = parameters[3 * layer : 3 * layer + 3]
                inputs, h, c = stacks._recur(inputs @ kernel + bias, recurrent_kernel, h, c)
            return inputs, states

    for mode in ("train", "stack"):
        assert failed(model(Leaking), mode) >= {"outputs", "gradients", "loss"}


@pytest.mark.slow
def test_initial_states_left_out_are_caught(failed):
    class Stateless(scan_lstm()):
        def __call__(self, parameters, inputs, states, dropout=None):
            return super().__call__(parameters, inputs, tuple(jax.numpy.zeros_like(state) for state in states), dropout)

    assert failed(model(Stateless)) >= {"outputs", "gradients"}


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 2, 3], ids=["kernel", "recurrent kernel", "bias"])
def test_gradient_that_is_cut_off_is_caught(failed, number):
    class Detached(scan_lstm()):
        def __call__(self, parameters, *others):
            cut = [jax.lax.stop_gradient(p) if k == number - 1 else p for k, p in enumerate(parameters)]
            return super().__call__(cut, *others)

    assert failed(model(Detached)) == {"gradients", "update"}
    assert failed(model(Detached), "stack") == {"gradients"}


def test_training_that_runs_forward_only_is_caught(failed):
    trial = model()
    trial.train = trial.forward
    assert failed(trial) >= {"gradients", "update", "loss"}


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 3, -1], ids=["embedding", "bias of layer 0", "bias of dense_0"])
def test_tensor_left_out_of_the_update_is_caught(failed, number):
    trial = model()
    update = trial.optimizer.update

    def partial(parameters, *others):
        moved, slots = update(parameters, *others)
        moved[number] = jax.numpy.copy(parameters[number])
        return moved, slots

    trial.optimizer.update = partial
    assert "update" in failed(trial)


@pytest.mark.slow
def test_another_learning_rate_is_caught(failed):
    trial = model()
    trial.set_rates(1e-2, trial.dropout_rate)
    assert "update" in failed(trial)


@pytest.mark.slow
def test_batch_major_labels_against_time_major_outputs_are_caught(failed):
    trial = model()
    shape = trial.batches[0][1].shape
    trial.batches = [(tokens, targets.T.reshape(shape)) for tokens, targets in trial.batches]
    assert failed(trial) >= {"gradients", "loss"}


@pytest.mark.slow
def test_timed_step_that_is_another_program_is_caught(failed):
    trial = model()
    trial.train(trial.stage(*(np.zeros((cases.BATCH, 3), int) for _ in range(2))))
    assert failed(trial) == {"callable"}


@pytest.mark.slow
def test_steps_written_out_where_a_loop_is_named_are_caught(failed, monkeypatch):
    from models.jax import stacks

    monkeypatch.setitem(stacks.UNROLL, "cpu", cases.STEPS)
    for mode in ("train", "forward", "stack"):
        assert failed(model(), mode) == {"kernel"}
    written_out = jax_cases.kernel_of("jax_scan", "gpu")  # STEPS are few enough for one iteration there
    assert failed(model(), kernel=written_out._replace(not_kernels="")) == set()
    assert failed(model(), kernel=Kernel(not_ops="dot")) == {"kernel"}
