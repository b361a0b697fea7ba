"""What machine this is: with a stand-in NVML, and without any."""

import contextlib
import datetime
import json
import os
import re
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import psutil
import pytest

from harness.record import machine


class FakeNvml:
    """The part of pynvml that harness.record.machine reads, with the answers of one H200; counts what is opened and closed."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    def __init__(self, gpus: int = 1, text=str):
        self.gpus, self.text, self.reasons, self.opened, self.asked, self.sessions = gpus, text, 0, 0, 0, 0
        self.utilisation = [0]
        self.own_memory = []

    def nvmlInit(self):
        self.opened += 1
        self.sessions += 1

    def nvmlShutdown(self):
        self.opened -= 1

    def nvmlDeviceGetCount(self):
        return self.gpus

    def nvmlDeviceGetHandleByIndex(self, index):
        assert index in range(self.gpus)
        return "handle" if index == 0 else f"handle {index}"

    def nvmlDeviceGetName(self, gpu):
        return self.text("NVIDIA H200")

    def nvmlDeviceGetUUID(self, gpu):
        return self.text("GPU-1234")

    def nvmlSystemGetDriverVersion(self):
        return self.text("580.159.03")

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, gpu):
        return self.reasons

    def nvmlDeviceGetClockInfo(self, gpu, clock):
        return {self.NVML_CLOCK_SM: 1830, self.NVML_CLOCK_MEM: 3201}[clock]

    def nvmlDeviceGetMaxClockInfo(self, gpu, clock):
        return {self.NVML_CLOCK_SM: 1980, self.NVML_CLOCK_MEM: 3202}[clock]

    def nvmlDeviceGetTemperature(self, gpu, sensor):
        assert sensor == self.NVML_TEMPERATURE_GPU
        return 41

    def nvmlDeviceGetPowerUsage(self, gpu):
        return 243_600  # mW

    def nvmlDeviceGetComputeRunningProcesses(self, gpu):
        return self.own_memory

    def nvmlDeviceGetMemoryInfo(self, gpu):
        return SimpleNamespace(used=5 << 30, total=139 << 30)

    def nvmlDeviceGetUtilizationRates(self, gpu):
        self.asked += 1
        return SimpleNamespace(gpu=self.utilisation[min(self.asked, len(self.utilisation)) - 1])


@pytest.fixture
def nvml(monkeypatch):
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    yield fake
    assert fake.opened == 0, "NVML was initialised and not shut down"


@pytest.fixture(params=["no module", "no driver"])
def no_nvml(request, monkeypatch):
    def fail():
        raise RuntimeError("NVML Shared Library Not Found")

    module = None if request.param == "no module" else SimpleNamespace(nvmlInit=fail)  # None: import raises
    monkeypatch.setitem(sys.modules, "pynvml", module)


# -- several GPUs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status, link", [(0, "NVLink"), (1, "PCIe"), (None, "PCIe")])
def test_how_gpus_are_linked(nvml, monkeypatch, status, link):
    nvml.gpus, nvml.NVML_P2P_CAPS_INDEX_NVLINK, nvml.NVML_P2P_STATUS_OK = 3, 2, 0
    nvml.nvmlDeviceGetP2PStatus = lambda a, b, what: status if a != b and what == 2 else pytest.fail("asked for itself")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert machine.gpu_link(["0", "1", "2"]) == link and machine.gpu_link(["2"]) is None


# -- without a GPU -----------------------------------------------------------------------------------------------------


def test_machine_without_nvml_has_no_gpu_and_no_figures_of_one(no_nvml):
    assert machine.gpu_count() == 0
    assert machine.gpu_name() is None and machine.gpu_state() is None and machine.gpu_memory_used() is None
    with machine.UtilisationSampler() as sampler:
        pass
    assert sampler.percent is None


def test_driver_without_a_gpu_counts_as_none(nvml):
    nvml.gpus = 0
    assert machine.gpu_count() == 0
    assert machine.gpu_name() is None and machine.gpu_state() is None and machine.gpu_memory_used() is None
    with machine.UtilisationSampler() as sampler:
        pass
    assert sampler.percent is None


@pytest.fixture(params=["", "processor\t: 0\nmodel name\t: Some CPU\nflags\t\t: fpu\n"], ids=["py-cpuinfo", "/proc"])
def fresh_facts(request, tmp_path, monkeypatch):
    """Facts are read once per process: here once per test. Some systems do not name the processor in /proc."""
    (tmp_path / "cpuinfo").write_text(request.param)
    monkeypatch.setattr(machine, "CPUINFO", tmp_path / "cpuinfo")
    asked = SimpleNamespace(get_cpu_info=lambda: {"brand_raw": "Some CPU"})
    monkeypatch.setitem(sys.modules, "cpuinfo", None if request.param else asked)  # None: import raises
    machine.facts.cache_clear()
    yield
    machine.facts.cache_clear()


def test_facts_of_a_machine_without_a_gpu(no_nvml, fresh_facts):
    found = machine.facts("cpu")
    assert found["gpu"] is None and found["driver"] is None
    assert found["cores"] == machine.physical_cores() and found["cpu"] == "Some CPU"
    assert found["packages"] == machine.packages()
    assert datetime.datetime.fromisoformat(found["date"]).utcoffset() == datetime.timedelta(0)


STEERING = (
    "XLA_FLAGS", "TF_XLA_FLAGS", "TF_ENABLE_ONEDNN_OPTS", "NVIDIA_TF32_OVERRIDE", "WAVEFRONT_LSTM_BY_FLOAT16",
    "TORCHINDUCTOR_MAX_AUTOTUNE",
    "CUDA_LAUNCH_BLOCKING", "CUBLASLT_WORKSPACE_SIZE", "LD_PRELOAD", "OMP_NUM_THREADS", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
    "JAX_PLATFORMS",
)  # fmt: skip
OTHERS = (
    "TF_VAR_password", "TF_TOKEN_app_terraform_io", "TF_LOG", "TF_CPP_MIN_LOG_LEVEL", "PYTORCH_TOKEN", "TORCH_HOME",
    "TRITON_CACHE_DIR", "CUDNN_VERSION", "CUDA_HOME", "AXLA_FLAGS",
)  # fmt: skip


def test_variables_that_steer_a_framework_are_facts_and_secrets_are_not():
    """In a process of its own: they are read once, before a framework may have added its own."""
    code = "import json; from harness.record import machine; print(json.dumps(machine.facts('cpu')['variables']))"
    steering = dict.fromkeys(STEERING, "1") | {"LD_PRELOAD": ""}  # of a library that is not there the loader complains
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(machine.PROJECT),
        **dict.fromkeys(OTHERS, "1"),
        **steering,
    }
    found = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    ).stdout
    assert json.loads(found) == steering


# -- with one ----------------------------------------------------------------------------------------------------------


def test_processes_on_the_gpu_are_counted_once_each_and_not_by_their_numbers(nvml):
    listed = [SimpleNamespace(pid=pid, usedGpuMemory=None) for pid in (os.getpid(), 4_000_002, os.getpid())]
    nvml.own_memory = listed
    assert machine.gpu_state()["gpu_processes"] == 2


@pytest.mark.parametrize("listed", [[], [4_000_001], [4_000_001, 4_000_002]])
def test_processes_are_unknown_where_nvml_does_not_list_this_one(nvml, listed):
    nvml.own_memory = [SimpleNamespace(pid=pid, usedGpuMemory=None) for pid in listed]
    assert machine.gpu_state()["gpu_processes"] is None


def test_state_is_of_one_session_with_nvml(nvml):
    assert machine.gpu_state() and nvml.sessions == 1


QUERIES = {
    "nvmlDeviceGetCurrentClocksThrottleReasons": {"throttle_reasons"},
    "nvmlDeviceGetClockInfo": {"sm_mhz", "memory_mhz"},
    "nvmlDeviceGetMaxClockInfo": {"sm_max_mhz"},
    "nvmlDeviceGetTemperature": {"temperature_c"},
    "nvmlDeviceGetPowerUsage": {"power_w"},
    "nvmlDeviceGetComputeRunningProcesses": {"gpu_processes"},
}


def refuse(*_):
    raise RuntimeError("Not Supported")


@pytest.mark.parametrize("query", QUERIES)
def test_query_that_nvml_refuses_is_none_and_the_others_are_told(nvml, query):
    nvml.own_memory = [SimpleNamespace(pid=os.getpid(), usedGpuMemory=None)]
    setattr(nvml, query, refuse)
    assert {key for key, value in machine.gpu_state().items() if value is None} == QUERIES[query]


def test_gpu_that_refuses_whatever_is_asked_of_it_stops_nobody(nvml, fresh_facts, monkeypatch):
    monkeypatch.setattr(machine, "SAMPLE_S", 0.001)
    others = (
        "nvmlDeviceGetMemoryInfo",
        "nvmlDeviceGetUtilizationRates",
        "nvmlDeviceGetName",
        "nvmlDeviceGetUUID",
        "nvmlSystemGetDriverVersion",
    )
    for query in (*QUERIES, *others):
        setattr(nvml, query, refuse)
    assert set(machine.gpu_state().values()) == {None} and machine.gpu_count() == 1
    assert machine.gpu_memory_used() is None and machine.gpu_name() is None and machine.facts("gpu")["gpu"] is None
    with machine.UtilisationSampler() as sampler:
        time.sleep(0.02)
        assert sampler._thread.is_alive()
    assert sampler.percent is None
    nvml.nvmlDeviceGetHandleByIndex = refuse
    assert machine.gpu_state() is None


def test_gpu_state_holds_clocks_temperature_and_power_in_their_units(nvml):
    assert machine.gpu_state() == {
        "sm_mhz": 1830,
        "sm_max_mhz": 1980,
        "memory_mhz": 3201,
        "temperature_c": 41,
        "power_w": 244,
        "throttle_reasons": [],
        "gpu_processes": None,  # this process has not used it yet
    }


@pytest.mark.parametrize(
    ("reasons", "named"),
    [
        (0x0, []),
        (0x1 | 0x2, []),  # idle, application clocks: nothing is held down
        (0x4, ["software power cap"]),
        (0x8 | 0x40, ["hardware slowdown", "hardware thermal slowdown"]),
        (0x20, ["software thermal slowdown"]),
        (0x80 | 0x1, ["hardware power brake"]),
    ],
)
def test_throttle_reasons_are_named_where_a_clock_was_held_down(nvml, reasons, named):
    nvml.reasons = reasons
    assert machine.gpu_state()["throttle_reasons"] == named


@pytest.mark.parametrize("text", [str, str.encode], ids=["str", "bytes"])
def test_gpu_and_driver_are_named_in_the_facts_of_a_gpu_row_alone(nvml, fresh_facts, text):
    nvml.text = text
    on_gpu, on_cpu = machine.facts("gpu"), machine.facts("cpu")
    assert (on_gpu["gpu"], on_gpu["gpu_uuid"], on_gpu["driver"]) == ("NVIDIA H200", "GPU-1234", "580.159.03")
    assert (on_cpu["gpu"], on_cpu["gpu_uuid"], on_cpu["driver"]) == (None, None, None)


def test_memory_is_this_process_own_or_all_where_nvml_cannot_tell(nvml):
    other = SimpleNamespace(pid=os.getpid() + 1, usedGpuMemory=7)
    nvml.own_memory = [other, SimpleNamespace(pid=os.getpid(), usedGpuMemory=3 << 30)]
    assert machine.gpu_memory_used() == 3 << 30
    nvml.own_memory = [other, SimpleNamespace(pid=os.getpid(), usedGpuMemory=None)]
    assert machine.gpu_memory_used() == 5 << 30
    nvml.own_memory = [other]
    assert machine.gpu_memory_used() == 5 << 30


def test_utilisation_is_the_mean_of_the_later_half_of_the_samples(nvml, monkeypatch):
    monkeypatch.setattr(machine, "SAMPLE_S", 0.001)
    nvml.utilisation = [0, 0, 90, 100]
    enough = threading.Event()
    ask = nvml.nvmlDeviceGetUtilizationRates

    def ask_four_times(gpu):
        rates = ask(gpu)
        if nvml.asked == 4:
            enough.set()
            threading.Event().wait(0.05)  # until the sampler has been stopped
        return rates

    nvml.nvmlDeviceGetUtilizationRates = ask_four_times
    with machine.UtilisationSampler() as sampler:
        assert enough.wait(300)
        sampler._stop.set()
    assert nvml.asked == 4 and sampler.percent == 95.0
    assert not sampler._thread.is_alive()


def test_utilisation_of_a_block_shorter_than_a_sample_is_none(nvml, monkeypatch):
    monkeypatch.setattr(machine, "SAMPLE_S", 30.0)
    with machine.UtilisationSampler() as sampler:
        pass
    assert sampler.percent is None and not sampler._thread.is_alive()


# -- names and versions ------------------------------------------------------------------------------------------------


def test_run_is_named_after_its_machine_and_date(nvml, monkeypatch):
    monkeypatch.setattr(machine, "physical_cores", lambda: 2)
    date = datetime.date(2026, 1, 31)
    assert machine.run_name("gpu", date) == "nvidia-h200-20260131"
    assert machine.run_name("cpu", date) == "cpu-2-core-20260131"
    nvml.text = lambda name: "NVIDIA GeForce RTX 2080 Ti (Rev. A)"
    assert machine.run_name("gpu", date) == "nvidia-geforce-rtx-2080-ti-rev-a-20260131"
    nvml.gpus = 0
    assert machine.run_name("gpu", date) == "cpu-2-core-20260131"
    assert re.fullmatch(r"cpu-2-core-\d{8}", machine.run_name("cpu"))


def test_cores_are_those_that_this_process_may_use(monkeypatch):
    cases = [((8, 16), 8), ((8, 4), 4), ((None, 3), 3), ((2, 1), 1)]
    for (there, allowed), cores in cases:
        monkeypatch.setattr(psutil, "cpu_count", lambda logical, there=there: there)
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, allowed=allowed: set(range(allowed)), raising=False)
        assert machine.physical_cores() == cores


def test_installed_packages_alone_have_versions():
    found = machine.packages()
    assert found["psutil"] == psutil.__version__
    assert set(found) <= set(machine.PACKAGES) and all(found.values())


def test_commit_outside_a_checkout_or_without_git_is_what_the_environment_says_or_none(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "PROJECT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.delenv("LSTM_BENCH_COMMIT", raising=False)
    assert machine.commit() == {"commit": None, "dirty": None}
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.commit() == {"commit": None, "dirty": None}
    monkeypatch.setenv("LSTM_BENCH_COMMIT", "0123abc")
    assert machine.commit() == {"commit": "0123abc", "dirty": None}


def test_commit_is_dirty_for_a_changed_source_but_not_for_results(tmp_path, monkeypatch):
    def git(*arguments):
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        done = subprocess.run(
            ["git", "-C", tmp_path, *identity, *arguments], check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    monkeypatch.setattr(machine, "PROJECT", tmp_path)
    (tmp_path / "results").mkdir()
    for name in ("source.py", "results/table.md"):
        (tmp_path / name).write_text("old")
    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    clean = {"commit": git("rev-parse", "HEAD"), "dirty": False}
    assert machine.commit() == clean
    (tmp_path / "results/table.md").write_text("new")
    (tmp_path / "untracked").write_text("new")
    assert machine.commit() == clean
    (tmp_path / "source.py").write_text("new")
    assert machine.commit() == {**clean, "dirty": True}


def test_diff_is_another_for_every_uncommitted_change_of_the_code_and_for_nothing_else(tmp_path, monkeypatch):
    def git(*arguments):
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        subprocess.run(["git", "-C", tmp_path, *identity, *arguments], check=True, capture_output=True)

    monkeypatch.setattr(machine, "PROJECT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert machine.diff() is None
    for name in ("harness", "harness/run", "results"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.py").write_text("old")
    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    (tmp_path / "results" / "a.py").write_text("new")
    (tmp_path / "untracked.py").write_text("new")
    found = [machine.diff()]
    for name in ("harness/a.py", "harness/run/new ü.py"):
        for text in ("1", "2"):
            (tmp_path / name).write_text(text)
            found.append(machine.diff())
    assert found[0] is None and all(found[1:]) and len(set(found)) == 5 and machine.diff() == found[-1]


# -- who else uses the processors --------------------------------------------------------------------------------------


def test_cpu_share_of_others_is_what_was_busy_less_what_is_our_own(monkeypatch):
    readings = iter([(100.0, 50.0, 3.0), (120.0, 58.0, 5.0)])  # of 20 s: 8 s busy, 2 s of them ours
    monkeypatch.setattr(machine.CpuShare, "_now", lambda self: next(readings))
    assert machine.CpuShare().others_percent() == pytest.approx(30.0)


def test_cpu_share_counts_only_the_processors_that_are_ours(monkeypatch):
    times = psutil.cpu_times()._replace(**dict.fromkeys(psutil.cpu_times()._fields, 0.0))
    idle, busy = times._replace(idle=10.0), times._replace(user=10.0, guest=4.0)  # user holds guest
    monkeypatch.setattr(psutil, "cpu_times", lambda percpu: [idle, busy, busy])
    for allowed, expected in (({0, 1}, (20.0, 10.0)), ({1, 2}, (20.0, 20.0)), ({0}, (10.0, 0.0))):
        monkeypatch.setattr(machine, "_allowed_processors", lambda allowed=allowed: allowed)
        assert machine.CpuShare._now()[:2] == expected


def test_cpu_share_sees_a_busy_process_that_is_not_ours():
    endless = subprocess.Popen([sys.executable, "-c", "print(flush=True)\nwhile True: pass"], stdout=subprocess.PIPE)
    try:
        endless.stdout.readline()
        share = machine.CpuShare()
        time.sleep(1.0)
        assert share.others_percent() > 30.0 / len(os.sched_getaffinity(0))
    finally:
        endless.kill()
        endless.communicate()


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, "ABC"),
        ("2,0", "CA"),
        ("GPU-B", "B"),
        ("", ""),
        ("-1", ""),
        ("-1,0", ""),
        ("1,-1,2", "B"),
        ("GPU-B, 7,0", "BA"),
    ],
)
def test_gpus_are_those_that_cuda_shows_in_its_order(monkeypatch, visible, expected):
    known = ["GPU-A", "GPU-B", "GPU-C"]
    nvml = SimpleNamespace(
        nvmlDeviceGetCount=lambda: 3,
        nvmlDeviceGetHandleByIndex=lambda k: known[k],
        nvmlDeviceGetHandleByUUID=lambda uuid: known[known.index(uuid)],
        nvmlDeviceGetUUID=lambda gpu: gpu[:5],
        nvmlDeviceGetName=lambda gpu: f"NVIDIA {gpu[4]}".encode(),
    )
    monkeypatch.setattr(machine, "_nvml", lambda: contextlib.nullcontext(nvml))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert machine.gpus() == [(f"GPU-{letter}", f"NVIDIA {letter}") for letter in expected]
    assert bool(machine.gpu_count()) == bool(expected)
    assert machine.gpu_name() == (f"NVIDIA {expected[0]}" if expected else None)
