"""How often a peer's ops may run: the bounds let every committed record through, and no sandbagged step."""

import pytest

from harness.measure.proof import Kernel, bounds, not_seen
from harness.record import records
from models import rows
from tests import cases, jax_cases, torch_cases
from tests.record_cases import RUNS


def recorded():
    for run in (run for run in RUNS if run.parent.name == "results"):  # samples of earlier commits count otherwise
        for record in records.read_run(run)[0]:
            c = record["config"]
            if record["status"] == "ok" and record["mode"] != "fit" and "NUM_LAYERS" in c and "TIME_STEPS" in c:
                yield run, record


def test_every_committed_record_of_a_row_is_within_the_bounds_of_today():
    held = 0
    for run, record in recorded():
        row, c = rows.LANGUAGE_MODEL.get(record["row"]), record["config"]
        if row is None or c["TIME_STEPS"] is None:
            continue
        kernel = Kernel(**row.expected_ops(c["NUM_LAYERS"], c["TIME_STEPS"], record["device"]))
        kernel = kernel.of_mode(record["mode"], None)
        for op, times in {**kernel.ops, **kernel.rest_ops}.items():
            if op in record["proof"]["kernel"]["ops"]:  # an earlier commit may have named others
                least, most = bounds(times)
                where = f"{run.name} {records.record_name(record)}: {op}"
                assert least <= record["proof"]["kernel"]["ops"][op] <= most, where
                held += 1
    assert held > 500


def reason(trial, row, made, mode="train"):
    """Why the proof fails; "" where it holds."""
    runtime = made.make_runtime("cpu", "fp32")
    reference = cases.language_model_reference()
    return cases.prove(trial, mode, "fp32", reference, made.kernel_of(row, "cpu"), runtime).record()["reason"]


def test_ops_of_a_pass_have_room_for_one_and_not_for_two():
    kernel = Kernel(
        ops={"MatMul": 10, "Other": 2}, passes={"MatMul": (10, 30)}, train_ops={"Adam": (1, 1)}, rest_ops={"x": 1}
    )
    train, forward, stack, fit = (kernel.of_mode(mode, None) for mode in ("train", "forward", "stack", "fit"))
    assert [own.ops["MatMul"] for own in (train, forward, stack, fit)] == [(10, 39), (10, 19), (10, 39), (10, 39)]
    assert [bool(own.train_ops) for own in (train, forward, stack, fit)] == [True, False, False, True]
    assert train.ops["Other"] == 2 and train.rest_ops and not stack.rest_ops
    runs = {"ops": {"MatMul": 40, "Other": 2, "Adam": 1, "x": 1}, "kernels": {}}
    assert not_seen(runs, train, "cpu") == ["op MatMul ran 40 times, expected 10 to 39"]
    runs["ops"] |= {"MatMul": 31, "Adam": 9}
    assert not_seen(runs, train, "cpu") == ["op Adam ran 9 times, expected 1 to 1"]


# -- PyTorch ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def torch_trial():
    pytest.importorskip("torch")
    return torch_cases.language_model("torch_lstm", "fp32")


def in_pytorch(trial, mode="train", row="torch_lstm"):
    return reason(trial, row, torch_cases, mode)


@pytest.mark.parametrize("mode", ["train", "forward", "stack"])
def test_honest_peer_in_pytorch_passes(torch_trial, mode):
    assert in_pytorch(torch_trial, mode) == ""


@pytest.mark.parametrize("way", [{"foreach": False}, {"foreach": True}])
def test_optimizer_that_is_not_fused_is_caught(torch_trial, way, monkeypatch):
    [group] = torch_trial.optimizer._optimizer.param_groups
    for name, value in {"fused": False, "foreach": False, **way}.items():
        monkeypatch.setitem(group, name, value)
    assert "kernel: op aten::_fused_(adam|sgd)_ ran 0 times, expected 1 to 1" in in_pytorch(torch_trial)


def test_optimizer_that_is_called_tensor_by_tensor_is_caught(torch_trial, monkeypatch):
    optimizer = torch_trial.optimizer
    [group], step = optimizer._optimizer.param_groups, optimizer._optimizer.step

    def one_by_one():
        every = group["params"]
        for own in every:
            group["params"] = [own]
            step()
        group["params"] = every

    monkeypatch.setattr(optimizer, "step", one_by_one)
    assert "op aten::_fused_(adam|sgd)_ ran 9 times, expected 1 to 1" in in_pytorch(torch_trial)


@pytest.mark.parametrize("row", ["torch_lstm", "torch_cells"])
def test_second_forward_pass_is_caught(row, torch_trial, monkeypatch):
    trial = torch_trial if row == "torch_lstm" else torch_cases.language_model(row, "fp32")
    train, forward = trial.train, trial.forward
    monkeypatch.setattr(trial, "train", lambda batch: (forward(batch), train(batch))[1])
    assert in_pytorch(trial, row=row).startswith("kernel: op aten::")
    monkeypatch.setattr(trial, "forward", lambda batch: (forward(batch), forward(batch))[1])
    assert in_pytorch(trial, "forward", row).startswith("kernel: op aten::")


def test_second_backward_pass_is_caught(torch_trial, monkeypatch):
    import torch

    grad = torch.autograd.grad
    twice = lambda loss, *rest: (grad(loss, *rest, retain_graph=True), grad(loss, *rest))[1]  # noqa: E731
    monkeypatch.setattr(torch.autograd, "grad", twice)
    assert in_pytorch(torch_trial).startswith("kernel: op aten::nll_loss")


def test_waiting_for_the_device_in_a_step_is_caught(torch_trial, monkeypatch):
    import torch

    trial, train = torch_trial, torch_trial.train
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)  # there is no GPU to wait for
    monkeypatch.setattr(trial, "train", lambda batch: (train(batch), torch.cuda.synchronize())[0])
    assert in_pytorch(torch_trial) == "host: a step reads a tensor to the host, or waits for the device, 1 times"
    monkeypatch.setattr(trial, "train", lambda batch: (loss := train(batch), loss.item())[0])
    assert in_pytorch(torch_trial) == "host: a step reads a tensor to the host, or waits for the device, 1 times"


# -- JAX -------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def jax_trial():
    jax = pytest.importorskip("jax")
    before = jax.config.jax_default_matmul_precision
    jax_cases.make_runtime("cpu", "fp32")
    trial = jax_cases.language_model("jax_scan", "fp32")
    trial.train(trial.batches[0])
    yield trial
    jax.config.update("jax_default_matmul_precision", before)


def in_jax(trial, mode="train"):
    trial._traces = 1  # of one of several mistakes in one model
    return reason(trial, "jax_scan", jax_cases, mode)


@pytest.mark.parametrize("mode", ["train", "forward", "stack"])
def test_honest_peer_in_jax_passes(jax_trial, mode):
    assert in_jax(jax_trial, mode) == ""


def test_update_outside_of_jit_is_caught(jax_trial, monkeypatch):
    import jax

    def gradients(parameters, tokens, targets, states):
        return jax.value_and_grad(lambda own: jax_trial._network(own, tokens, targets, states)[0])(parameters)

    gradients = jax.jit(gradients)
    update = jax.jit(jax_trial.optimizer.update)

    def train_with(update):
        def train(parameters, slots, key, rates, tokens, targets, states):
            loss, own = gradients(parameters, tokens, targets, states)
            parameters, slots = update(parameters, own, slots, rates[0])
            return loss, states, parameters, slots, key

        return train

    monkeypatch.setattr(jax_trial, "_train", train_with(jax_trial.optimizer.update))
    assert "kernel: op program ran" in in_jax(jax_trial)
    monkeypatch.setattr(jax_trial, "_train", train_with(update))
    assert "kernel: op program ran 2 times, expected 1 to 1" in in_jax(jax_trial)


def test_second_pass_in_the_program_is_caught(jax_trial, monkeypatch):
    import jax

    network = jax_trial._network

    def twice(parameters, tokens, targets, states, dropout=None):
        loss, *others = network(parameters, tokens, targets, states, dropout)
        again = network(jax.lax.optimization_barrier((parameters, loss))[0], tokens, targets, states, dropout)[0]
        return (loss + again) / 2, *others

    monkeypatch.setattr(jax_trial, "_network", twice)
    step = jax_trial._train_step
    monkeypatch.setattr(jax_trial, "_train", jax.jit(lambda *arguments: step(*arguments)))
    assert "kernel: op loop:" in in_jax(jax_trial)


@pytest.mark.parametrize("way", ["function", "method"])
def test_waiting_for_the_program_in_a_step_is_caught(jax_trial, way, monkeypatch):
    import jax

    train = jax_trial.train

    def waiting(batch):
        loss = train(batch)
        return jax.block_until_ready(loss) if way == "function" else loss.block_until_ready()

    monkeypatch.setattr(jax_trial, "train", waiting)
    assert in_jax(jax_trial) == "host: a step reads a tensor to the host, or waits for the device, 1 times"
