"""Which reads of a tensor count: the row's own framework's, of whatever dtype, where a GPU would have to be waited for."""

import importlib.util
import json
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from harness.frameworks import profiles
from harness.measure import host_reads
from harness.record import machine
from tests import cases, jax_cases, torch_cases


def tensorflow_tensor(value, dtype):
    import tensorflow as tf

    return tf.constant(value, dtype)


def torch_tensor(value, dtype):
    import torch

    return torch.tensor(value, dtype=getattr(torch, dtype))


def jax_tensor(value, dtype):
    import jax

    return jax.numpy.asarray(value, dtype)


MADE = {
    "tensorflow": (cases.make_runtime, tensorflow_tensor, "int64"),
    "torch": (torch_cases.make_runtime, torch_tensor, "int64"),
    "jax": (jax_cases.make_runtime, jax_tensor, "int32"),  # its widest
}


@pytest.fixture(params=MADE)
def framework(request, tensorflow_runtime):
    """(runtime, a function that makes a tensor, the dtype of a counter) of each framework on a CPU."""
    pytest.importorskip(request.param)
    make, tensor, counter = MADE[request.param]
    return make("cpu", "fp32"), tensor, counter


WAYS = {
    "float": float,
    "int": int,
    "bool": bool,
    "__array__": lambda tensor: tensor.__array__(),
    "asarray": lambda tensor: np.asarray(tensor),  # looked up where it is called
    "array": lambda tensor: np.array(tensor),
}


@pytest.mark.filterwarnings("ignore:__array__ implementation")
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bool", "counter"])
def test_every_way_and_dtype_counts_once(framework, way, dtype):
    runtime, tensor, counter = framework
    value = tensor(dtype == "bool" or 1, counter if dtype == "counter" else dtype)
    with host_reads.counted(runtime) as reads:
        assert way(value) == 1
        assert len(reads) == 1
        bool(value), np.float32(1.0), np.asarray([1.0])
    assert len(reads) == 2
    bool(value)
    assert len(reads) == 2, "what is read after the step does not count"


def test_search_for_a_nan_counts(framework):
    runtime, tensor, _ = framework
    loss = tensor(1.0, "float32")
    with host_reads.counted(runtime) as reads:
        assert not bool(loss != loss)
    assert reads == ["__bool__"]


def test_what_runs_on_the_device_alone_counts_nothing(framework):
    runtime, tensor, _ = framework
    a = tensor([1.0, 2.0], "float32")
    with host_reads.counted(runtime) as reads:
        (a * a + 1.0)[0:1]
    assert reads == []


def test_int32_of_tensorflow_lies_on_the_host_on_every_device(tensorflow_runtime):
    with host_reads.counted(tensorflow_runtime) as reads:
        assert int(tensorflow_tensor(3, "int32")) == 3
    assert reads == []


def test_tensors_of_another_framework_do_not_count(tensorflow_runtime):
    pytest.importorskip("torch")
    with host_reads.counted(tensorflow_runtime) as reads:
        assert float(torch_tensor(1.0, "float32")) == 1.0
    assert reads == []


def test_of_a_gpu_the_tensors_that_lie_there_count_whatever_their_dtype():
    """Stand-ins for tensors of a GPU, with the attributes by which each framework tells."""
    torch_runtime = torch_cases.make_runtime("cpu", "fp32")
    tensorflow_runtime, jax_runtime = cases.make_runtime("cpu", "fp32"), None
    if importlib.util.find_spec("jax"):
        jax_runtime = jax_cases.make_runtime("cpu", "fp32")
    for there in (True, False):
        where = "GPU:0" if there else "CPU:0"
        platform = "gpu" if there else "cpu"
        tensors = [
            (tensorflow_runtime, SimpleNamespace(backing_device=f"/job:localhost/replica:0/task:0/device:{where}")),
            (torch_runtime, SimpleNamespace(device=SimpleNamespace(type="cuda" if there else "cpu"))),
            (jax_runtime, SimpleNamespace(devices=lambda platform=platform: [SimpleNamespace(platform=platform)])),
        ]
        for runtime, tensor in tensors:
            if runtime:
                runtime.device = "gpu"
                assert runtime.on_device(tensor) == there, runtime.name


def test_torchs_to_counts_where_a_tensor_leaves_the_gpu_and_for_another_dtype_does_not():
    import torch

    class OnGpu(torch.Tensor):
        """Of a tensor of a CPU; a copy of it has lost the mark, as if it had come to the host."""

        @property
        def device(self):
            return torch.device("cuda" if vars(self).get("there") else "cpu")

    def made():
        tensor = torch.zeros(3).as_subclass(OnGpu)
        tensor.there = True
        return tensor

    runtime = torch_cases.make_runtime("cpu", "fp32")
    runtime.device = "gpu"
    with host_reads.counted(runtime) as reads:
        made().to("cpu", copy=True)
        assert reads == ["to"]
        made().cpu()
        assert reads == ["to", "cpu"]
        made().to(torch.float32)  # itself
        torch.zeros(3).to("cpu"), torch.zeros(3).numpy(), torch.zeros(3).sum().item()  # lie on the host
    assert reads == ["to", "cpu"]


def test_torchs_to_of_another_dtype_stays_where_it_is():
    torch = pytest.importorskip("torch")
    with host_reads.counted(torch_cases.make_runtime("cpu", "fp32")) as reads:
        torch.zeros(3).to(torch.float64), torch.zeros(3).to("cpu")  # of a CPU nobody knows what the second one means
    assert reads == []


def test_waiting_for_the_device_counts_whatever_it_calls_in_its_turn(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: torch.zeros(()).item())
    with host_reads.counted(torch_cases.make_runtime("cpu", "fp32")) as reads:
        torch.cuda.synchronize()
        torch.zeros(()) + 1
    assert reads == ["synchronize"]


def test_everything_is_as_it_was_after_the_step(framework):
    runtime, _, _ = framework
    before = {way: getattr(runtime.tensor_type, way, None) for way in host_reads.WAYS}, np.asarray, np.array
    with host_reads.counted(runtime):
        assert np.asarray is not before[1]
    assert ({way: getattr(runtime.tensor_type, way, None) for way in host_reads.WAYS}, np.asarray, np.array) == before


@pytest.mark.parametrize("name", [pytest.param("tensorflow", marks=pytest.mark.slow), "torch"])
def test_jax_is_not_woken_by_the_rows_of_other_frameworks(name):
    """Its backend would be a second client of the GPU, opened right before the timing."""
    pytest.importorskip("jax"), pytest.importorskip(name)
    code = (
        "import json, os, sys\n"
        "from harness.measure import host_reads; from harness.frameworks import runtimes\n"
        f"runtime = runtimes.make({name!r}, 'cpu', 'fp32', 1)\n"
        "import jax\n"
        "from jax._src import xla_bridge\n"
        "with host_reads.counted(runtime):\n"
        "    pass\n"
        "before = xla_bridge.backends_are_initialized()\n"
        "jax.numpy.zeros(())\n"
        "print(json.dumps([before, xla_bridge.backends_are_initialized(), os.environ['XLA_PYTHON_CLIENT_PREALLOCATE']]))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=machine.PROJECT, timeout=600
    )
    assert not found.returncode, found.stderr
    assert json.loads(found.stdout) == [False, True, "false"]


def test_user_who_asks_jax_to_preallocate_is_heard(monkeypatch):
    import os

    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "true")
    torch_cases.make_runtime("cpu", "fp32")
    assert os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] == "true"


# -- bytes that the profiler saw ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, profiles.SMALL_COPY, profiles.SMALL_COPY + 1, 10**6])
def test_conditions_of_loops_are_no_bytes_and_tensors_are(size):
    from harness.frameworks.profiles import bytes_to_host
    from harness.frameworks.pytorch import _bytes_to_host

    def write(path):
        events = [{"name": "Memcpy DtoH (Device -> Pinned)", "args": {"bytes": size}}] * 2
        with open(path, "w") as file:
            json.dump({"traceEvents": [*events, {"name": "Memcpy HtoD", "args": {"bytes": 10**6}}]}, file)

    counted = size if size > profiles.SMALL_COPY else 0
    assert bytes_to_host(f"kind_src:device kind_dst:pinned size:{size} dest:0 async:1") == counted
    assert bytes_to_host(f"kind_src:pinned kind_dst:device size:{size} dest:0 async:1") == 0
    assert _bytes_to_host(SimpleNamespace(export_chrome_trace=write)) == 2 * counted


def test_jax_counts_the_copies_of_the_device_once(tmp_path):
    """The host's plane tells of the same copy, by its call."""
    pytest.importorskip("jax")
    (tmp_path / "a.xplane.pb").touch()
    copy = SimpleNamespace(
        name="MemcpyD2H", duration_ns=1e6, stats=[("memcpy_details", "kind_src:device kind_dst:pinned size:4096")]
    )
    lines = [SimpleNamespace(name="Stream #7(MemcpyD2H)", events=[copy])]
    planes = [SimpleNamespace(name=name, lines=lines) for name in ("/device:GPU:0", "/host:CPU")]
    runtime = jax_cases.make_runtime("cpu", "fp32")
    profiles = SimpleNamespace(from_file=lambda path: SimpleNamespace(planes=planes))
    runtime._jax = SimpleNamespace(profiler=SimpleNamespace(ProfileData=profiles))
    about = {"to_host_bytes": 4096, "launches": 0, "syncs": 0}
    assert runtime._read_profile(str(tmp_path)) == ({"MemcpyD2H": 1.0}, {}, {}, about)
