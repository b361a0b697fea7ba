"""PyTorch as a row's process has it: its precision, its profile, its memory, and a trial that is measured in it."""

import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from harness.errors import UserError
from harness.frameworks import profiles, runtimes
from harness.frameworks.pytorch import TorchRuntime, _what_ran
from harness.measure import measurement, references
from harness.measure.proof import CURVE_STEPS, UPDATE_STEPS, count_of
from harness.record import machine, schema

torch = pytest.importorskip("torch")
TIME_STEPS, BATCH, UNITS = 5, 3, 8


@pytest.fixture(autouse=True)
def restored():
    """Threads and precision are the process's, and other tests' too."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = torch.get_num_threads(), matmul.allow_tf32, cudnn.allow_tf32, matmul.allow_fp16_reduced_precision_reduction
    yield
    threads, matmul.allow_tf32, cudnn.allow_tf32, matmul.allow_fp16_reduced_precision_reduction = before
    torch.set_num_threads(threads)


@pytest.fixture
def gpu():
    if not machine.gpu_count():
        pytest.skip("needs an NVIDIA GPU")
    return TorchRuntime("gpu", "fp32", 1)


def lstm_step(device: str = "cpu"):
    """A training step of nn.LSTM: forward, backward, Adam."""
    lstm = torch.nn.LSTM(UNITS, UNITS).to(device)
    optimizer = torch.optim.Adam(lstm.parameters(), fused=True, capturable=device != "cpu")
    inputs = torch.randn(TIME_STEPS, BATCH, UNITS, device=device)

    def step():
        optimizer.zero_grad(set_to_none=False)
        lstm(inputs)[0].sum().backward()
        optimizer.step()

    step()
    return step


# -- what is configured ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "tf32", "fp16", "bf16"])
def test_tf32_is_on_everywhere_under_tf32_and_off_everywhere_else(precision):
    TorchRuntime("cpu", precision, 1)
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    assert (matmul.allow_tf32, cudnn.allow_tf32) == (precision == "tf32",) * 2
    assert torch.get_float32_matmul_precision() == ("high" if precision == "tf32" else "highest")
    assert not matmul.allow_fp16_reduced_precision_reduction and not matmul.allow_bf16_reduced_precision_reduction


def test_runtime_has_the_threads_and_the_device_that_were_asked_for():
    runtime = runtimes.make("torch", "cpu", "fp32", 2)
    assert torch.get_num_threads() == 2
    assert (runtime.name, runtime.device, runtime.precision, runtime.device_name) == ("torch", "cpu", "fp32", "cpu")
    assert torch.zeros(1, device=runtime.device_name).device.type == "cpu"
    public = {name for name in vars(runtimes.Runtime) if not name.startswith("_")}
    assert {"sync", "profile", "environment"} <= public and all(hasattr(runtime, name) for name in public)


def test_build_without_cuda_on_a_gpu_is_refused_in_one_line(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match=re.escape("./run_all.sh --peers")) as refused:
        TorchRuntime("gpu", "fp32", 1)
    assert "\n" not in str(refused.value)


def test_environment_on_a_cpu_names_pytorch_and_no_cuda():
    found = TorchRuntime("cpu", "fp32", 1).environment()
    assert ("keras" in found) == ("keras" in sys.modules)  # other tests of this process may have imported it
    found.pop("keras", None)
    assert found == {"torch": torch.__version__, "cuda": None, "cudnn": None, "notes": []}
    assert type(found["torch"]) is str


@pytest.mark.gpu
def test_environment_on_a_gpu_names_the_loaded_cuda_and_cudnn(gpu):
    lstm_step("cuda:0")
    found = gpu.environment()
    assert re.fullmatch(r"\d+\.\d+ \(cuBLAS \d+\.\d+\.\d+\)", found["cuda"])
    version = torch.backends.cudnn.version()
    assert found["cudnn"] == f"{version // 10000}.{version // 100 % 100}.{version % 100}"


# -- what ran ----------------------------------------------------------------------------------------------------------


def test_ops_count_once_per_call_backward_pass_and_optimizer_included():
    profile = TorchRuntime("cpu", "fp32", 1).profile(lstm_step())
    ops = profile["ops"]
    assert (ops["aten::lstm"], ops["aten::_fused_adam_"]) == (1, 1)
    assert count_of(r"\w*RnnLayerBackward0|AddmmBackward0", ops) >= 1
    assert not any(name.startswith("Optimizer") for name in ops), "a mark, not an op"
    assert profile["kernels"] == {}


def test_cell_unrolled_over_time_counts_each_of_its_steps():
    cell, inputs = torch.nn.LSTMCell(UNITS, UNITS), torch.randn(TIME_STEPS, BATCH, UNITS)

    def unrolled():
        state = None
        for step in inputs:
            state = cell(step, state)

    ops = TorchRuntime("cpu", "fp32", 1).profile(unrolled)["ops"]
    assert ops["aten::lstm_cell"] == TIME_STEPS and "aten::lstm" not in ops


def event(name, device="cpu", us=0.0, annotation=False, start=0.0):
    return SimpleNamespace(
        name=name,
        device_type=device,
        is_user_annotation=annotation,
        time_range=SimpleNamespace(elapsed_us=lambda: us, start=start, end=start + us),
    )


def test_profile_of_a_gpu_has_kernels_and_of_the_runtimes_calls_only_graph_launches():
    events = [
        event("aten::mm"), event("aten::mm"), event("CompiledFunction"), event("cudaLaunchKernel"), event("cuLaunchKernelEx"),
        event("cudaGraphLaunch_v10000"), event("cudaGraphLaunch"), event("Optimizer.step#Adam.step", annotation=True),
        event("gemm", "gpu", 1500.0), event("gemm", "gpu", 500.0), event("Optimizer.step#Adam.step", "gpu", 9.0, True),
        event("Memcpy DtoH (Device -> Pinned)", "gpu", 1.0), event("Memset (Device)", "gpu", 1.0),
        event(profiles.PROFILED, us=100.0, annotation=True), event(profiles.PROFILED, "gpu", 900.0, True),
        event("cudaStreamSynchronize", us=5.0, start=50.0), event("cuStreamSynchronize", us=3.0, start=51.0),
        event("cudaEventSynchronize", us=5.0, start=60.0), event("cudaDeviceSynchronize", us=5.0, start=101.0),
    ]  # fmt: skip
    assert _what_ran(events, "gpu") == {
        "ops": {"aten::mm": 2, "CompiledFunction": 1, "cudaGraphLaunch": 2},
        "kernels": {"gemm": 2.0, "Memcpy DtoH (Device -> Pinned)": 0.001, "Memset (Device)": 0.001},
        "launches": 2,
        "syncs": 2,  # not the profiler's own, which comes after
    }


@pytest.mark.gpu
def test_profile_on_a_gpu_names_cudnns_ops_and_kernels(gpu):
    profile = gpu.profile(lstm_step("cuda:0"))
    assert (profile["ops"]["aten::_cudnn_rnn"], profile["ops"]["aten::_cudnn_rnn_backward"]) == (1, 1)
    assert profile["kernels"] and all(ms > 0 for ms in profile["kernels"].values())
    assert not any(name.startswith("cuda") for name in profile["ops"])


@pytest.mark.gpu
def test_replay_of_a_graph_shows_its_kernels_and_counts_as_a_launch_and_its_memory_is_counted(gpu):
    a = torch.randn(1024, 1024, device=gpu.device_name)
    (a @ a).sum()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        product = (a @ a @ a).sum()
    gpu.sync()
    gpu.reset_memory_peak()
    profile = gpu.profile(graph.replay)
    assert profile["ops"]["cudaGraphLaunch"] == 1 and "aten::mm" not in profile["ops"]
    assert any(re.search("gemm|cutlass|sm[0-9]+_", name) for name in profile["kernels"])
    assert gpu.memory_peak() >= 2 * a.nbytes, "the operand, and what the graph writes on its way"
    assert np.isfinite(gpu.to_numpy([product])).all()


# -- memory and losses -------------------------------------------------------------------------------------------------


def test_memory_of_a_graphs_own_pool_is_counted_though_the_allocator_calls_it_free():
    runtime = TorchRuntime("cpu", "fp32", 1)
    assert runtime.memory_peak() is None
    runtime.reset_memory_peak()
    parts = [
        {"segment_pool_id": (0, 0), "total_size": 1000, "allocated_size": 0},
        {"segment_pool_id": (0, 1), "total_size": 400, "allocated_size": 100},
    ]
    cuda = SimpleNamespace(memory_snapshot=lambda: parts, max_memory_allocated=lambda: 600)
    runtime.device, runtime._torch = "gpu", SimpleNamespace(cuda=cuda)
    assert runtime.memory_peak() == 900


def test_losses_come_to_the_host_as_one_array_also_where_they_have_a_gradient():
    losses = TorchRuntime("cpu", "fp32", 1).to_numpy([torch.tensor(1.5, requires_grad=True), torch.tensor(2.5)])
    assert losses.tolist() == [1.5, 2.5] and losses.dtype == np.float32


# -- a row -------------------------------------------------------------------------------------------------------------


INPUTS = np.random.default_rng(1).normal(size=(8, BATCH, UNITS))
WEIGHTS = np.random.default_rng(2).normal(size=(UNITS, UNITS))
RATE = 0.1


class Products:
    """A trial: y = x·W, mean of squares, SGD. `learns`: whether the gradient reaches the weights."""

    has_dropout = False

    def __init__(self, learns: bool = True):
        self.batches = [torch.tensor(batch, dtype=torch.float32) for batch in INPUTS]
        self.learns = learns
        self.restore()

    def restore(self):
        self.kernel = torch.tensor(WEIGHTS, dtype=torch.float32, requires_grad=True)

    def _loss(self, batch):
        return (batch @ self.kernel).square().mean()

    def forward(self, batch):
        with torch.no_grad():
            return self._loss(batch)

    def train(self, batch):
        loss = self._loss(batch)
        (self.gradient,) = torch.autograd.grad(loss, self.kernel)
        with torch.no_grad():
            self.kernel -= RATE * self.gradient if self.learns else 0.0
        return loss

    def outputs(self):
        with torch.no_grad():
            return {"products": (self.batches[0] @ self.kernel).numpy(), "loss": self.forward(self.batches[0]).numpy()}

    def forward_losses(self, count):
        return np.array([self.forward(batch) for batch in self.batches[:count]])

    def train_steps(self, count, first=0):
        return np.array([self.train(self.batches[(first + k) % len(INPUTS)]).detach() for k in range(count)])

    def reference_step(self, setup, number, update):
        kernel, batch = np.float64(self.weights()["kernel"]), INPUTS[number % len(INPUTS)]
        products = batch @ kernel
        gradient = 2 * batch.T @ products / (BATCH * UNITS)
        return np.mean(products**2), {"kernel": -setup["learning_rate"] * gradient} if update else {}

    def first_gradients(self):
        return {"kernel": self.gradient.numpy()}

    def weights(self):
        return {"kernel": self.kernel.detach().numpy().copy()}

    def graph_mismatch(self):
        return ""


@pytest.fixture
def reference_path(tmp_path):
    kernel, losses, gradients, updates = WEIGHTS.copy(), [], [], []
    for batch in INPUTS[:CURVE_STEPS]:
        losses.append(np.mean((batch @ kernel) ** 2))
        gradients.append(2 * batch.T @ (batch @ kernel) / (BATCH * UNITS))
        kernel -= RATE * gradients[-1]
        updates.append(kernel - WEIGHTS)
    references.save_reference(
        tmp_path / "reference.npz",
        {
            "outputs": {"products": INPUTS[0] @ WEIGHTS, "loss": losses[0]},
            "losses": losses,
            "gradients": {"kernel": gradients[0]},
            "updates": {"kernel": updates[UPDATE_STEPS - 1]},
            "loss_sensitivity": np.zeros(CURVE_STEPS),
            "update_sensitivity": {"kernel": 1.0},
            "rounded_losses": np.zeros(CURVE_STEPS),
            "rounded_length": 0.0,
            "clip_bias": np.zeros(0),
            "setup": {"learning_rate": RATE},
            "rounded_gradients": {"kernel": 0.0},
            "rounded_updates": {"kernel": 0.0},
            "gradient_step": RATE,
            "forward_losses": [np.mean((batch @ WEIGHTS) ** 2) for batch in INPUTS[:CURVE_STEPS]],
        },
    )
    return tmp_path / "reference.npz"


@pytest.mark.parametrize("learns", [True, False])
def test_row_of_pytorch_is_proven_timed_and_recorded_in_its_own_framework(reference_path, learns):
    job = {
        "device": "cpu", "precision": "fp32", "process": 0, "matmul_flops": 1e9, "reference": reference_path,
        "protocol": {"WARMUP_BATCHES": 1, "WARMUP_LIMIT_S": 0.0, "TIMED_BATCHES": 7, "BLOCKS": 2, "MIN_BLOCK_S": 0.0},
    }  # fmt: skip
    expected_ops = {"ops": {"aten::mm": (1, 3)}, "not_ops": "aten::lstm"}
    row = measurement.Measurement(job, SimpleNamespace(facts={}), expected_ops, "torch")
    assert row.runtime.name == "torch"
    parts = row.steps(Products(learns), {"forward": 1, "train": 3}, BATCH, "sequences/s")
    assert parts["forward"]["status"] == "ok", parts["forward"]["reason"]
    assert parts["train"]["proof"]["failed"] == ([] if learns else ["loss", "update"])
    made = dict(benchmark="ptb", row="torch_lstm", device="cpu", precision="fp32", config={"CONFIG": "small"})
    for mode, part in parts.items():
        record = schema.validate(schema.merge_process(schema.new_record(mode=mode, **made), part), "a record")
        assert record["environment"]["torch"] == torch.__version__ and "tensorflow" not in record["environment"]
        assert len(record["losses"]) == (7 if part["status"] == "ok" else 0)
