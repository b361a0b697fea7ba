"""Mistakes that comparisons with PyTorch have had, planted one by one: the proof catches each."""

import pytest
import torch

from models import rows
from models.pytorch import difference
from models.pytorch.cells import PrimitiveCell, UnrolledLSTM
from models.weights import layouts
from tests import cases, torch_cases


def failed(trial, row, mode="train"):
    """The proofs that fail."""
    runtime = torch_cases.make_runtime("cpu", "fp32")
    reference, kernel = cases.language_model_reference(), torch_cases.kernel_of(row, "cpu")
    return set(cases.prove(trial, mode, "fp32", reference, kernel, runtime).record()["failed"])


def model(row):
    return torch_cases.language_model(row, "fp32")


@pytest.mark.parametrize("row", ["torch_cells", "torch_static", "torch_lstm"])
def test_gates_in_another_order_are_caught(row, monkeypatch):
    reorder = layouts.reorder_gates
    monkeypatch.setattr(layouts, "reorder_gates", lambda array, given, wanted: reorder(array, "ifco", "icfo"))
    trial = model(row)
    monkeypatch.undo()
    assert failed(trial, row) >= {"outputs", "gradients", "loss"}


def test_transposed_recurrent_weights_are_caught():
    trial = model("torch_lstm")
    start = trial._start[2]  # weight_hh_l0 [4·units, units]
    units = start.shape[1]
    start.copy_(start.reshape(4, units, units).transpose(1, 2).reshape(4 * units, units).clone())
    assert failed(trial, "torch_lstm") >= {"outputs", "gradients"}


def test_state_leaked_from_a_layer_into_the_next_is_caught(monkeypatch):
    """The final state of layer n as the initial state of layer n + 1."""

    def leaking(self, inputs, h, c, rate):
        state = (h[0], c[0])
        for cell in self.cells:
            outputs = []
            for x in inputs.unbind(0):
                state = cell(x, state)
                outputs.append(state[0])
            inputs = torch.stack(outputs)
        return inputs, h, c

    monkeypatch.setattr(UnrolledLSTM, "forward", leaking)
    for row in ("torch_cells", "torch_static"):
        assert failed(model(row), row) >= {"outputs", "gradients", "loss"}


class ForgetfulLSTM(UnrolledLSTM):
    """Every step starts from the initial state: what a scripted LSTM was that beat cuDNN."""

    def forward(self, inputs: torch.Tensor, h: torch.Tensor, c: torch.Tensor, rate: float):
        for layer, cell in enumerate(self.cells):
            outputs: list[torch.Tensor] = []
            for x in inputs.unbind(0):
                outputs.append(cell(x, (h[layer], c[layer]))[0])
            inputs = torch.stack(outputs)
        return inputs, h, c


def test_scripted_lstm_that_does_not_carry_its_state_is_caught(monkeypatch):
    from models.pytorch.stacks import ScriptedPrimitiveStack

    monkeypatch.setattr(ScriptedPrimitiveStack, "unrolled", ForgetfulLSTM)
    assert failed(model("torch_jit"), "torch_jit") >= {"outputs", "gradients", "loss", "update"}
    assert failed(model("torch_jit"), "torch_jit", "stack") >= {"outputs", "gradients", "loss"}


def test_weights_without_a_gradient_stop_the_row(monkeypatch):
    """A recurrent kernel that nothing depends on raises; one whose gradient is cut off is caught."""

    class Detached(PrimitiveCell):
        def forward(self, x, state):
            h, c = state
            return super().forward(x, (h.detach(), c.detach()))

    monkeypatch.setattr("models.pytorch.stacks.PrimitiveCell", Detached)
    assert failed(model("torch_cells"), "torch_cells") >= {"gradients", "update"}
    monkeypatch.undo()
    trial = model("torch_cells")
    trial.parameters[1] = trial.parameters[1].detach().requires_grad_()
    with pytest.raises(RuntimeError, match="not have been used"):
        trial.train(trial.batches[0])


def test_training_that_runs_forward_only_is_caught():
    trial = model("torch_lstm")
    trial.train = trial.forward
    assert failed(trial, "torch_lstm") >= {"gradients", "update", "loss"}


@pytest.mark.parametrize("number", [0, 3, -1], ids=["embedding", "bias of layer 0", "bias of dense_0"])
def test_tensor_left_out_of_the_update_is_caught(number):
    trial = model("torch_lstm")
    del trial.optimizer._optimizer.param_groups[0]["params"][number]
    assert "update" in failed(trial, "torch_lstm")


def test_bias_that_is_moved_twice_is_caught():
    """b_ih and b_hh both trained: their sum moves by twice the step."""
    trial = model("torch_lstm")
    step, masters = trial.optimizer.step, trial.masters

    def moved_twice():
        before = masters[3].detach().clone()
        step()
        masters[3].add_(masters[3] - before)

    trial.optimizer.step = moved_twice
    assert "update" in failed(trial, "torch_lstm")


def test_another_learning_rate_is_caught():
    trial = torch_cases.language_model("torch_lstm", "fp32")
    trial.optimizer.learning_rate = 1e-2
    assert failed(trial, "torch_lstm") >= {"update"}


def test_batch_major_labels_against_time_major_outputs_are_caught():
    trial = model("torch_lstm")
    shape = trial.batches[0][1].shape
    trial.batches = [(tokens, targets.T.reshape(shape)) for tokens, targets in trial.batches]
    assert failed(trial, "torch_lstm") >= {"gradients", "loss"}


@pytest.mark.parametrize(
    ("named", "ran"),
    [("torch_cells", "torch_jit"), ("torch_jit", "torch_cells"), ("torch_static", "torch_static_jit"),
     ("torch_static_jit", "torch_static"), ("torch_lstm", "torch_static"), ("torch_static", "torch_lstm"),
     ("torch_cells", "torch_lstm"), ("torch_compile", "torch_cells"), ("torch_cells", "torch_static")],
)  # fmt: skip
def test_row_that_runs_something_else_than_it_names_is_caught(named, ran):
    assert failed(model(ran), named) == {"kernel"}


def test_every_row_of_a_gpu_is_told_by_what_it_launches():
    """Of a captured step: one launch of a graph, and none of the ops inside it."""
    for row, made in rows.PYTORCH.items():
        kernel = torch_cases.kernel_of(row, "gpu")
        assert (
            ("cudaGraphLaunch" in kernel.ops)
            == made.arguments["captured"]
            == (row in ("torch_lstm_graph", "cudnn_best", "torch_compile"))
        )
        assert "cudaGraphLaunch" not in torch_cases.kernel_of(row, "cpu").ops


def test_difference_of_two_steps_sees_sizes_and_no_addresses():
    """nn.LSTM on a GPU hands cuDNN the storage of its flat weights."""
    described = [difference._described([torch.zeros(n).untyped_storage(), torch.zeros(n)]) for n in (3, 3, 4)]
    assert described[0] == described[1] != described[2]
