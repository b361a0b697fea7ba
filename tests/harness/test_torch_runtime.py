"""PyTorch as a row's process has it: its precision, its profile, its memory. The rest: test_runtimes.py."""

import re
from types import SimpleNamespace

import numpy as np
import pytest

from harness.frameworks import profiles, pytorch
from harness.frameworks.pytorch import TorchRuntime, _what_ran
from harness.measure.proof import count_of
from harness.record import machine

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


def test_runtime_has_the_threads_that_were_asked_for():
    TorchRuntime("cpu", "fp32", 2)
    assert torch.get_num_threads() == 2


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


def both_lists(runtime, monkeypatch, function):
    """The profile's events: ours, and PyTorch's own."""
    seen = []
    monkeypatch.setattr(pytorch, "_events_of", lambda profile: seen.append(profile) or [])
    runtime.profile(function)
    monkeypatch.undo()
    ours = [(e.name, e.device_type, e.is_user_annotation, (e.end_ns - e.start_ns) / 1e3)
            for e in pytorch._events_of(seen[0])]  # fmt: skip
    theirs = [(e.name, e.device_type, e.is_user_annotation, e.time_range.elapsed_us()) for e in seen[0].events()]
    return tuple(
        sorted(((name, str(kind), mark, round(us * 1e3)) for name, kind, mark, us in found), key=str)
        for found in (ours, theirs)
    )


def several_steps(device):
    """With ops that run themselves again on their way through the dispatcher, aten::sum and aten::add_."""
    step, scale = lstm_step(device), torch.ones(3, device=device, requires_grad=True)

    def steps():
        for _ in range(3):
            step()
            (scale * 2.0).sum().backward()

    return steps


def test_events_are_those_of_pytorchs_own_list(monkeypatch):
    ours, theirs = both_lists(TorchRuntime("cpu", "fp32", 1), monkeypatch, several_steps("cpu"))
    assert ours == theirs and len(ours) > 60
    assert sum(name == "aten::sum" for name, *_ in ours) == 6, "not also what each ran itself"


def test_call_of_the_runtime_lies_in_the_op_that_it_is_linked_to_and_not_in_another():
    """An op that runs itself and nothing else is one; with a call besides they are two. A call without an op is none's."""
    cpu = torch.autograd.DeviceType.CPU

    def raw(name, number, start, end, linked=0, thread=2, external=None):
        values = {"name": name, "device_type": cpu, "is_user_annotation": False, "start_ns": start, "end_ns": end,
                  "is_async": False, "start_thread_id": thread, "end_thread_id": thread, "correlation_id": number,
                  "linked_correlation_id": linked, "external_id": number if external is None else external}  # fmt: skip
        return SimpleNamespace(**{key: lambda value=value: value for key, value in values.items()})

    def names(*events):
        results = SimpleNamespace(events=lambda: events)
        found = pytorch._events_of(SimpleNamespace(profiler=SimpleNamespace(kineto_results=results)))
        return sorted(event.name for event in found)

    twice = raw("aten::sum", 1, 0, 100), raw("aten::sum", 2, 10, 90)
    assert names(*twice) == ["aten::sum"]
    assert names(*twice, raw("cudaLaunchKernel", 7, 20, 30, linked=2, thread=1)) == ["aten::sum", "cudaLaunchKernel"]
    both = ["aten::sum", "aten::sum", "cudaLaunchKernel"]
    assert names(*twice, raw("cudaLaunchKernel", 7, 92, 95, linked=1, thread=1)) == both
    free = raw("cudaLaunchKernel", 1, 20, 30, thread=1, external=0)  # with an op's number
    assert names(*twice, free, raw("cudaLaunchKernel", 7, 92, 95, linked=1, thread=1)) == sorted([*both, free.name()])


@pytest.mark.gpu
def test_events_of_a_gpu_are_those_of_pytorchs_own_list(gpu, monkeypatch):
    ours, theirs = both_lists(gpu, monkeypatch, several_steps("cuda:0"))
    assert ours == theirs and len(ours) > 100


def event(name, device="cpu", us=0.0, annotation=False, start=0.0):
    return pytorch.Event(name, device, annotation, 1000 * start, 1000 * (start + us))


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


# -- memory -------------------------------------------------------------------------------------------------


def test_memory_of_a_graphs_own_pool_is_counted_though_the_allocator_calls_it_free():
    runtime = TorchRuntime("cpu", "fp32", 1)
    parts = [
        {"segment_pool_id": (0, 0), "total_size": 1000, "allocated_size": 0},
        {"segment_pool_id": (0, 1), "total_size": 400, "allocated_size": 100},
    ]
    cuda = SimpleNamespace(memory_snapshot=lambda: parts, max_memory_allocated=lambda: 600)
    runtime.device, runtime._torch = "gpu", SimpleNamespace(cuda=cuda)
    assert runtime.memory_peak() == 900
