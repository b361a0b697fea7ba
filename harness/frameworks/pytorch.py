"""PyTorch as a row's process needs it: configured before the first tensor, synchronised, profiled, asked what it is."""

import json
import os
import random
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from harness.errors import UserError
from harness.frameworks import cuda_libraries, profiles
from harness.frameworks.small_steps import SIZE, all_gpus, expect, numbers

# Calls of the CUDA runtime and driver; of these the profile keeps launches of graphs alone.
RUNTIME_CALL = re.compile(r"cu(da)?[A-Z]\w*")
GRAPH_LAUNCH = "cudaGraphLaunch"
TO_HOST = "Memcpy DtoH"  # how a copy to the host begins its name


class TorchRuntime:
    """Configures PyTorch for one row; made once, before the first tensor exists.

    Args:
        device: "gpu" or "cpu". On "cpu" the parent hides the GPUs (CUDA_VISIBLE_DEVICES).
        precision: "tf32" switches TensorFloat-32 on for matrix products and for cuDNN, everything else switches both off
            (PyTorch's own default is on for cuDNN alone). Under "fp16" and "bf16" products accumulate in float32 throughout.
        threads: of the operators' pool; the number of physical cores.
    """

    name = "torch"
    keeps_compiled: ClassVar = {"TORCHINDUCTOR_CACHE_DIR": "{}", "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "0"}
    draws = profiles.Draws(
        r"aten::(bernoulli_?|native_dropout|_fused_dropout|rand|rand_like|randint)",  # randint: a seed for compiled code
        within=r"aten::_cudnn_rnn",
        together=r"## Call CompiledFxGraph.*",
        each_step=True,
    )

    def __init__(self, device: str, precision: str, threads: int) -> None:
        # What Inductor compiled in an earlier process would make the first call of this one look cheap.
        os.environ.setdefault("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1")
        # Keras on PyTorch may import TensorFlow, and that JAX, which would take three quarters of a GPU once it opens it.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        import torch

        self.device, self.precision, self._torch = device, precision, torch
        self.device_name = "cuda:0" if device == "gpu" else "cpu"
        self.tensor_type = torch.Tensor
        owners = torch.cuda, torch.cuda.Stream, torch.cuda.Event, getattr(torch, "accelerator", None)
        self.waits = [(owner, "synchronize") for owner in owners if hasattr(owner, "synchronize")]
        torch.set_num_threads(threads)
        torch.backends.cudnn.allow_tf32 = precision == "tf32"
        matmul = torch.backends.cuda.matmul
        matmul.allow_tf32 = precision == "tf32"
        # On by default: the parts of a split product would be summed in 16 bits.
        matmul.allow_fp16_reduced_precision_reduction = matmul.allow_bf16_reduced_precision_reduction = False
        if device == "gpu" and not torch.cuda.is_available():
            raise UserError(
                f"the driver shows an NVIDIA GPU but PyTorch {torch.__version__} does not: ./run_all.sh --peers "
                "installs the build with CUDA"
            )

    def seed(self, seed: int) -> None:
        """Start PyTorch's random numbers anew, on all devices, and Python's, from which Keras draws its seeds."""
        random.seed(seed)
        self._torch.manual_seed(seed)

    def sync(self) -> None:
        """Return once everything launched on the device has ended."""
        if self.device == "gpu":
            self._torch.cuda.synchronize()

    def on_device(self, tensor: object) -> bool:
        """Whether reading this one makes the host wait; on a CPU every one."""
        return self.device == "cpu" or tensor.device.type != "cpu"

    def to_numpy(self, scalars: Sequence[object]) -> np.ndarray:
        """What steps returned, [n], on the host. Never inside a timed region."""
        return self._torch.stack([scalar.detach() for scalar in scalars]).cpu().numpy()

    def reset_memory_peak(self) -> None:
        if self.device == "gpu":
            self._torch.cuda.reset_peak_memory_stats()

    def memory_peak(self) -> int | None:
        """Bytes at the allocator's peak since the last reset; None on a CPU, where PyTorch keeps no such count.

        What a CUDA graph writes between its first and last kernel lies in a pool of its own, which stays taken but
        which the allocator counts as free: it is added.
        """
        if self.device != "gpu":
            return None
        pools = [part for part in self._torch.cuda.memory_snapshot() if tuple(part["segment_pool_id"]) != (0, 0)]
        in_graphs = sum(part["total_size"] - part["allocated_size"] for part in pools)
        return self._torch.cuda.max_memory_allocated() + in_graphs

    def profile(self, function: Callable[[], object]) -> dict[str, Any]:
        """Run `function` under PyTorch's profiler and say what ran.

        Returns:
            {"ops": {op: count}, "kernels": {kernel name: ms on the device}, "to_host_bytes": as Runtime says}. Ops
            count once per call, by the names under which PyTorch runs them: "aten::lstm" and, inside it,
            "aten::_cudnn_rnn"; nodes of the backward pass such as "AddmmBackward0"; a compiled region as "Torch-Compiled
            Region: …" and "CompiledFunction". The replay of a CUDA graph runs kernels and no op: it counts as
            "cudaGraphLaunch". On a CPU there are no kernels.
        """
        from torch import profiler

        activities = [profiler.ProfilerActivity.CPU]
        if self.device == "gpu":
            activities.append(profiler.ProfilerActivity.CUDA)
        self.sync()
        with profiler.profile(activities=activities) as profile:
            with profiler.record_function(profiles.PROFILED):
                function()
            self.sync()
        found = _what_ran(_events_of(profile), self._torch.autograd.DeviceType.CUDA)
        if self.device == "cpu":
            found["launches"], found["syncs"] = sum(found["ops"].values()), None
        copies = any(name.startswith(TO_HOST) for name in found["kernels"])
        return {**found, "to_host_bytes": _bytes_to_host(profile) if copies else 0}

    def small_steps(self) -> list[tuple[str, Callable[[], str | None]]]:
        """What a row needs of a machine, a step of each kind: (its name, a function that raises or returns a note)."""
        import torch

        gpu, host = self.device == "gpu", numbers()
        x = torch.tensor(host, device=self.device_name)

        def lstm() -> None:
            layer = torch.nn.LSTM(SIZE, SIZE, device=self.device_name)
            layer(x[:, None, :])[0].square().sum().backward()
            self.sync()

        def graph() -> None:
            y, stream = x.clone(), torch.cuda.Stream()
            with torch.cuda.stream(stream):
                y @ y
            torch.cuda.current_stream().wait_stream(stream)
            captured = torch.cuda.CUDAGraph()
            with torch.cuda.graph(captured):
                z = y + y
            captured.replay()
            expect("the graph", z.cpu().numpy(), 2 * host)

        def compiled() -> None:
            expect(
                "the kernel",
                torch.compile(lambda a: torch.tanh(a) + 1)(x).cpu().numpy(),
                torch.tanh(x).cpu().numpy() + 1,
            )

        steps = [("matrix product", lambda: expect("product", (x @ x).cpu().numpy(), host @ host))]
        if gpu:
            steps = [("GPUs", lambda: all_gpus(torch.cuda.device_count())), *steps, ("cuDNN LSTM", lstm)]
            return [*steps, ("CUDA graph", graph), ("torch.compile", compiled)]
        return [*steps, ("LSTM", lstm)]

    def environment(self) -> dict:
        """Versions of what is loaded (not what it was built with), for the record."""
        found = {"torch": str(self._torch.__version__), "cuda": None, "cudnn": None, "notes": []}
        if "keras" in sys.modules:
            found["keras"] = sys.modules["keras"].__version__
        if self.device == "gpu":
            cublas, built = cuda_libraries.cublas(), self._torch.version.cuda or ""
            found["cuda"] = f"{cuda_libraries.cuda_runtime()} (cuBLAS {cublas})"
            found["cudnn"] = cuda_libraries.cudnn()
            if cublas and built and cublas.split(".")[0] != built.split(".")[0]:
                found["notes"].append(f"PyTorch relinked to CUDA {cublas.split('.')[0]} (built for {built})")
        return found


def _bytes_to_host(profile: object) -> int:
    """Of all copies to the host of over profiles.SMALL_COPY bytes; only the trace that PyTorch writes holds their sizes."""
    with tempfile.TemporaryDirectory(prefix="lstm-profile-", dir=os.environ.get(profiles.SCRATCH)) as folder:
        path = os.path.join(folder, "trace.json")
        profile.export_chrome_trace(path)
        with open(path, encoding="utf-8") as file:
            events = json.load(file)["traceEvents"]
    copies = [event for event in events if str(event.get("name", "")).startswith(TO_HOST)]
    sizes = [event["args"]["bytes"] for event in copies if "bytes" in event.get("args", {})]
    return sum(map(profiles.counted, sizes))


class Event(NamedTuple):
    """What is asked of an event of a profile; times in ns, on the profiler's clock."""

    name: str
    device_type: object
    is_user_annotation: bool
    start_ns: int
    end_ns: int


def _events_of(profile: Any) -> list[Event]:
    """The events of torch.profiler.profile.events(), which takes ten times as long: it makes a tree of objects of them all.

    An op that runs itself once more and nothing else, on its way through the dispatcher, is one event there, and so here.
    """
    from torch.autograd.profiler_util import StringTable, _filter_name

    names = StringTable()  # demangles
    shown = [
        event
        for event in profile.profiler.kineto_results.events()
        if not (_filter_name(event.name()) or getattr(event, "is_hidden_event", bool)())
    ]
    events = [Event(names[e.name()], e.device_type(), e.is_user_annotation(), e.start_ns(), e.end_ns()) for e in shown]
    parents = _parents([*zip(shown, events, strict=True)])
    children = Counter(parents.values())
    again = {k for k, of in parents.items() if children[of] == 1 and events[k].name == events[of].name}
    return [event for k, event in enumerate(events) if k not in again]


def _parents(found: Sequence[tuple[Any, Event]]) -> dict[int, int]:
    """{number of an event of the host: number of the one within which it ran, on the same thread}

    A call of CUDA's runtime is put on the thread of the op that it is linked to, whatever thread it reports, as PyTorch does.
    """
    from torch.autograd import DeviceType

    threads: dict[int, int] = {}  # of ops, by their number
    own: dict[int, int] = {}
    for k, (raw, event) in enumerate(found):
        if event.device_type == DeviceType.CPU and not raw.is_async() and raw.start_thread_id() == raw.end_thread_id():
            own[k] = raw.start_thread_id()
            # Not of runtime calls without an op, which CUPTI numbers by itself.
            if not raw.linked_correlation_id() and getattr(raw, "external_id", raw.correlation_id)():
                threads[raw.correlation_id()] = own[k]
    parents, within = {}, {}
    for k in sorted(own, key=lambda k: (found[k][1].start_ns, -found[k][1].end_ns)):
        raw, event = found[k]
        around = within.setdefault(threads.get(raw.linked_correlation_id(), own[k]), [])
        while around and not _lies_in(event, found[around[-1]][1]):
            around.pop()
        if around:
            parents[k] = around[-1]
        around.append(k)
    return parents


def _lies_in(event: Event, other: Event) -> bool:
    return event.start_ns < other.end_ns and event.end_ns <= other.end_ns


def _what_ran(events: Iterable[Event], cuda: object) -> dict[str, Any]:
    """What a profile's events come to; `cuda` is the device type of kernels."""
    ops, kernels, launches, marks, syncs = Counter(), Counter(), 0, [], []
    for event in events:
        when = event.start_ns, event.end_ns
        if event.is_user_annotation:  # marks such as Optimizer.step#Adam.step, on the host and on the device
            if event.name == profiles.PROFILED and event.device_type != cuda:
                marks.append(when)
            continue
        if event.device_type == cuda:
            kernels[event.name] += (event.end_ns - event.start_ns) / 1e6
            launches += profiles.is_kernel(event.name)
        elif profiles.SYNC.fullmatch(event.name):
            syncs.append(when)
        elif event.name.startswith(GRAPH_LAUNCH):  # followed by the driver's version: cudaGraphLaunch_v10000
            ops[GRAPH_LAUNCH] += 1
        elif not RUNTIME_CALL.fullmatch(event.name):
            ops[event.name] += 1
    counts = {"launches": launches, "syncs": profiles.syncs_within(marks, syncs)}
    return {"ops": dict(ops), "kernels": dict(kernels), **counts}
