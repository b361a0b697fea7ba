"""jax_cudnn without a GPU: cuDNN's call is replaced by JAX's own reference of it, which reads the same flat weights."""

import numpy as np
import pytest

from harness.measure.proof import Kernel
from models import rows
from models.weights import canonical, layouts
from tests import cases, jax_cases

jax = pytest.importorskip("jax")
rnn = pytest.importorskip("jax.experimental.rnn")
pytestmark = pytest.mark.usefixtures("jax_runtime")

SHAPES = canonical.language_model_shapes(11, 5, 4, 3)
WEIGHTS = canonical.large_random(SHAPES, seed=1)


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    """The arguments of every call that cuDNN would have had: input size, units, layers, dropout, bidirectional, precision."""
    seen = []

    def lstm(x, h, c, flat, lengths, *sizes):
        seen.append(sizes)
        input_size, units, num_layers, dropout, bidirectional, _ = sizes
        assert flat.shape == (rnn.get_num_params_in_lstm(input_size, units, num_layers, bidirectional),)
        unpacked = rnn.unpack_lstm_weights(flat, input_size, units, num_layers, bidirectional)
        return rnn.lstm_ref(x, h, c, *unpacked, lengths, input_size, units, num_layers, dropout, bidirectional)

    monkeypatch.setattr(rnn, "lstm", lstm)
    return seen


def failed(trial, mode, ptb, jax_runtime, kernel=None):
    reference = cases.language_model_reference(ptb)
    return set(cases.prove(trial, mode, "fp32", reference, kernel or Kernel(), jax_runtime).record()["failed"])


@pytest.mark.parametrize("ptb", [False, True], ids=["one call", "a call per layer, with dropout between them"])
def test_row_passes_its_proof(ptb, jax_runtime, calls):
    trial = jax_cases.language_model("jax_cudnn", "fp32", ptb)
    for mode in ("train", "forward", "stack"):
        assert failed(trial, mode, ptb, jax_runtime) == set()
    assert {sizes[2] for sizes in calls} == ({1} if ptb else {cases.LAYERS})
    assert {sizes[3:5] for sizes in calls} == {(0.0, False)}


def test_what_runs_without_cudnn_is_not_what_the_row_names(jax_runtime):
    trial = jax_cases.language_model("jax_cudnn", "fp32")
    assert failed(trial, "train", False, jax_runtime, jax_cases.kernel_of("jax_cudnn", "gpu")) == {"kernel"}


@pytest.mark.parametrize(("precision", "tf32"), [("fp32", False), ("tf32", True)])
def test_cudnn_runs_in_tf32_under_tf32_alone(precision, tf32, calls):
    trial = jax_cases.language_model("jax_cudnn", precision)
    jax_cases.make_runtime("cpu", precision)
    try:
        trial.forward(trial.batches[0])
    finally:
        jax_cases.make_runtime("cpu", "fp32")
    assert [rnn._lstm_cudnn_allow_tf32(sizes[5]) for sizes in calls] == [tf32]


@pytest.mark.parametrize("layer_by_layer", [False, True])
def test_canonical_weights_come_back_and_calls_cover_the_stack(layer_by_layer):
    from models.jax.stacks import CudnnLSTM

    stack = CudnnLSTM(WEIGHTS, 3, layer_by_layer=layer_by_layer)
    flats = stack.from_canonical(WEIGHTS)
    assert [spec.num_layers for spec in stack.calls] == ([1, 1, 1] if layer_by_layer else [3])
    back = stack.to_canonical(flats)
    assert set(back) == {name for name in WEIGHTS if name.startswith("lstm_")}
    for name, array in back.items():
        np.testing.assert_array_equal(array, WEIGHTS[name], err_msg=name)


@pytest.mark.slow
def test_second_bias_is_0_for_ever_whatever_the_buffer_holds():
    trial = jax_cases.language_model("jax_cudnn", "fp32")
    units = cases.UNITS

    def second_biases():
        return np.asarray(trial.parameters[1])[-8 * units * cases.LAYERS :].reshape(cases.LAYERS, 2, -1)[:, 1]

    trial.train_steps(2)
    assert not second_biases().any()
    trial.restore()
    wanted = trial.outputs()["hidden"]
    trial.parameters[1] = trial.parameters[1].at[-1].set(3.0)  # the last number of the last b_hh
    np.testing.assert_array_equal(trial.outputs()["hidden"], wanted)
    trial.train_steps(1)
    assert second_biases()[-1, -1] == 3.0


@pytest.mark.slow
def test_gates_in_another_order_are_caught(jax_runtime):
    trial = jax_cases.language_model("jax_cudnn", "fp32")
    start, _, _ = cases.language_model_start()
    swapped = {name: layouts.reorder_gates(x, "ifco", "icfo") for name, x in start.items() if name.startswith("lstm_")}
    trial._start[1:2] = map(jax.numpy.asarray, trial.stack.from_canonical(swapped))
    assert failed(trial, "train", False, jax_runtime) >= {"outputs", "gradients", "loss"}


def test_dropout_inside_one_call_and_half_precision_are_refused():
    from models.jax.stacks import CudnnLSTM

    stack = CudnnLSTM(WEIGHTS, 3)
    with pytest.raises(ValueError, match="layer_by_layer"):
        stack(
            stack.from_canonical(WEIGHTS), np.zeros((2, 3, 5)), stack.stage_states(canonical.zero_states(3, 2, 4)), abs
        )
    with pytest.raises(ValueError, match="float16 given, expected float32"):
        CudnnLSTM(WEIGHTS, 3, "float16")
    assert rows.LANGUAGE_MODEL["jax_cudnn"].precisions == ("fp32", "tf32")
