"""What machine this is: processor, GPU, driver, clocks. From nvidia-ml-py, psutil and py-cpuinfo; no framework."""

import contextlib
import datetime
import functools
import hashlib
import itertools
import os
import platform
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from harness.record.frameworks import FRAMEWORKS

PROJECT = Path(__file__).resolve().parents[2]
PACKAGES = (*(package for framework in FRAMEWORKS.values() for package in framework.packages), "keras", "numpy", "pandas",
            "tabulate", "tqdm", "matplotlib", "nvidia-ml-py", "psutil", "py-cpuinfo", "scikit-learn")  # fmt: skip
CPUINFO = Path("/proc/cpuinfo")  # Linux; with the processor's name on x86
# Environment variables that change what the frameworks and their libraries do. Which GPU is used is in a record anyway; of
# those that begin with TF_ most are Terraform's. Folders, versions and secrets are nothing that a record should hold.
STEERING = re.compile(
    r"(?!\w*_(HOME|DIR|DIRECTORY|PATH|VERSION|PYTHON|RUN_ID|TOKEN|KEY|PASSWORD|SECRET)$)"
    rf"(({'|'.join(sorted({prefix for f in FRAMEWORKS.values() for prefix in f.prefixes} - {'TF_'}))})\w+"
    r"|(CUDNN|CUBLAS[A-Z]*|NVIDIA_TF32|OMP|GOMP|KMP|MKL|ONEDNN|DNNL|OPENBLAS)_\w+"
    r"|TF_(XLA|ENABLE|DISABLE|CUDNN|CUBLAS|GPU|FORCE|NUM|USE|MLIR|MKL|ONEDNN|AUTOTUNE|DETERMINISTIC)_\w+"
    r"|WAVEFRONT_LSTM_\w+"
    r"|CUDA_(CACHE|DEVICE_MAX|DISABLE|FORCE|LAUNCH|MODULE|MPS)_\w+|LD_PRELOAD)"
)
OWN = "LSTM_BENCH_OWN"  # names, by commas, the variables that the suite itself has set for a child
# Read before a framework is imported, which may add its own.
VARIABLES = {
    name: value
    for name, value in sorted(os.environ.items())
    if STEERING.fullmatch(name) and name not in os.environ.get(OWN, "").split(",")
}
HIDDEN = ("", "-1", "NoDevFiles")  # values of CUDA_VISIBLE_DEVICES that name no GPU
NO_GPU = "--device=gpu: found no NVIDIA GPU; expected one that nvidia-smi lists, or --device=cpu"
OTHERS_PERCENT = 10.0  # of the processors: from here on a CPU row says that it was not alone
OTHERS_NOTE = f"other processes took over {OTHERS_PERCENT:g} % of the processors meanwhile: times are upper bounds"
SAMPLE_S = 0.1  # between two NVML samples
# Throttle reasons that say that a clock was held down; idle and application settings do not count (nvml.h).
THROTTLE_REASONS = {0x4: "software power cap", 0x8: "hardware slowdown", 0x20: "software thermal slowdown",
                    0x40: "hardware thermal slowdown", 0x80: "hardware power brake"}  # fmt: skip


@contextlib.contextmanager
def _nvml() -> Iterator:
    """The initialised pynvml module, or None where there is no NVIDIA driver."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # ImportError, or any of pynvml's own: no driver, no library, no permission
        yield None
        return
    try:
        yield pynvml
    finally:
        _asked(pynvml.nvmlShutdown)


@contextlib.contextmanager
def _first_gpu() -> Iterator[tuple]:
    """(pynvml, NVML's handle of the GPU that the frameworks see first), or (None, None): no driver, none visible.

    CUDA_VISIBLE_DEVICES may name it by number or by UUID.
    """
    with _nvml() as nvml:
        gpu = _handle(nvml, _names(nvml)[0]) if nvml and _names(nvml) else None
        yield (nvml, gpu) if gpu is not None else (None, None)


def _asked(query: Callable, *arguments: Any) -> Any:
    """What NVML answers; None where it has no answer: parts of a GPU (MIG), virtual GPUs and WSL answer some queries only."""
    try:
        return query(*arguments)
    except Exception:  # pynvml makes a class of its own for every error: NotSupported, NoPermission, Unknown, GpuIsLost
        return None


def _text(value: str | bytes | None) -> str | None:
    return value.decode() if isinstance(value, bytes) else value


def gpu_count() -> int:
    """NVIDIA GPUs that the driver shows and CUDA_VISIBLE_DEVICES does not hide; 0 without a driver. No framework."""
    with _nvml() as nvml:
        return len(_names(nvml)) if nvml else 0


def _names(nvml) -> list[str]:
    """What CUDA_VISIBLE_DEVICES calls the GPUs that it shows, as for CUDA none after a hidden one; unset, all numbers."""
    every = [str(number) for number in range(_asked(nvml.nvmlDeviceGetCount) or 0)]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = every if visible is None else [name.strip() for name in visible.split(",")]
    return list(itertools.takewhile(lambda name: name not in HIDDEN, names))[: len(every)]


class Gpu(NamedTuple):
    uuid: str
    name: str


def gpus() -> list[Gpu]:
    """The NVIDIA GPUs that CUDA_VISIBLE_DEVICES shows, in its order; without those that NVML cannot name."""
    with _nvml() as nvml:
        if not nvml:
            return []
        found = []
        for name in _names(nvml):
            gpu = _handle(nvml, name)
            found.append(Gpu(*(_text(_asked(ask, gpu)) for ask in (nvml.nvmlDeviceGetUUID, nvml.nvmlDeviceGetName))))
        return [gpu for gpu in found if all(gpu)]


def _handle(nvml, name: str) -> Any:
    query = nvml.nvmlDeviceGetHandleByIndex if name.isdecimal() else nvml.nvmlDeviceGetHandleByUUID
    return _asked(query, int(name) if name.isdecimal() else name)


def gpu_name() -> str | None:
    """Name of the first NVIDIA GPU, such as "NVIDIA H200", or None."""
    with _first_gpu() as (nvml, gpu):
        return _text(_asked(nvml.nvmlDeviceGetName, gpu)) if nvml else None


def gpu_link(uuids: Sequence[str]) -> str | None:
    """How GPUs of this host are linked: "NVLink" where each reaches each other by it, else "PCIe"; None for fewer than two."""
    if len(uuids) < 2:
        return None
    with _nvml() as nvml:
        found = [_handle(nvml, uuid) for uuid in uuids] if nvml else []
        if len(found) < 2 or None in found:
            return None
        capability = nvml.NVML_P2P_CAPS_INDEX_NVLINK
        pairs = [(a, b) for k, a in enumerate(found) for b in found[k + 1 :]]
        status = [_asked(nvml.nvmlDeviceGetP2PStatus, a, b, capability) for a, b in pairs]
        return "NVLink" if all(one == nvml.NVML_P2P_STATUS_OK for one in status) else "PCIe"


RUN = "LSTM_BENCH_RUN"  # environment variable of a run's processes: the number of the process that started them


def run_name(device: str, date: datetime.date | None = None) -> str:
    """Default name of a run's folder, such as "nvidia-h200-20260131" or "cpu-2-core-20260131"."""
    name = (gpu_name() if device == "gpu" else None) or f"cpu-{physical_cores()}-core"
    date = date or datetime.date.today()
    return f"{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}-{date:%Y%m%d}"


def physical_cores() -> int:
    """Physical cores that this process may use (an affinity mask or a container may allow fewer than there are)."""
    import psutil

    allowed = len(_allowed_processors())
    return max(1, min(psutil.cpu_count(logical=False) or allowed, allowed))


def _allowed_processors() -> set[int]:
    """Numbers of the logical processors that this process may use."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


@functools.lru_cache
def facts(device: str) -> dict:
    """The machine's part of a record's environment; the frameworks add theirs.

    Once per process, never near a timed region.
    """
    found = {
        "gpu": None,
        "gpu_uuid": None,
        "driver": None,
        "cpu": _processor(),
        "cores": physical_cores(),
        "os": platform.platform(terse=True),
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "packages": packages(),
        "variables": VARIABLES,
        **commit(),
        "diff": diff(),
    }
    if device == "gpu":
        with _first_gpu() as (nvml, gpu):
            if nvml:
                found["gpu"] = _text(_asked(nvml.nvmlDeviceGetName, gpu))
                found["gpu_uuid"] = _text(_asked(nvml.nvmlDeviceGetUUID, gpu))
                found["driver"] = _text(_asked(nvml.nvmlSystemGetDriverVersion))
    return found


def _processor() -> str | None:
    """Its name, from where py-cpuinfo looks first; py-cpuinfo itself takes a second of every row's process."""
    with contextlib.suppress(OSError):
        if found := re.search(r"^model name\s*: (.+)", CPUINFO.read_text(), re.MULTILINE):
            return found[1].strip()
    import cpuinfo

    return cpuinfo.get_cpu_info().get("brand_raw")


def packages() -> dict[str, str]:
    """Versions of the packages that a run may depend on, of those installed."""
    from importlib import metadata  # a tenth of what --list takes

    found = {}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def commit() -> dict:
    """{"commit": hash, "dirty": whether tracked files outside results/ differ from it}.

    In a copy without .git the hash is what LSTM_BENCH_COMMIT says, and nobody knows whether it is dirty: None.
    """

    def git(*args: str) -> str:
        command = ["git", "-C", str(PROJECT), *args]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()

    try:
        changes = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!results")
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(changes)}
    except (OSError, subprocess.SubprocessError):
        return {"commit": os.environ.get("LSTM_BENCH_COMMIT"), "dirty": None}


def diff() -> str | None:
    """12 hex digits of the code's uncommitted changes, new files among them; None without any, or in a copy without .git."""

    def git(*args: str) -> bytes:
        command = ["git", "-C", str(PROJECT), *args, "--", "benchmarks", "harness", "models"]
        return subprocess.run(command, capture_output=True, check=True, timeout=20).stdout

    try:
        changes = [git("diff", "HEAD")]
        for name in git("ls-files", "-z", "--others", "--exclude-standard").split(b"\0")[:-1]:
            changes += [name, hashlib.sha256((PROJECT / os.fsdecode(name)).read_bytes()).digest()]
    except (OSError, subprocess.SubprocessError):
        return None
    return hashlib.sha256(b"\0".join(changes)).hexdigest()[:12] if any(changes) else None


def gpu_state() -> dict | None:
    """Clocks (MHz), temperature (°C), power (W) and throttle reasons of the first GPU now; None without one.

    What NVML does not know is None.
    """
    with _first_gpu() as (nvml, gpu):
        if not nvml:
            return None
        reasons = _asked(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, gpu)
        power_mw = _asked(nvml.nvmlDeviceGetPowerUsage, gpu)
        named = None if reasons is None else [name for bit, name in THROTTLE_REASONS.items() if reasons & bit]
        return {
            "sm_mhz": _asked(nvml.nvmlDeviceGetClockInfo, gpu, nvml.NVML_CLOCK_SM),
            "sm_max_mhz": _asked(nvml.nvmlDeviceGetMaxClockInfo, gpu, nvml.NVML_CLOCK_SM),
            "memory_mhz": _asked(nvml.nvmlDeviceGetClockInfo, gpu, nvml.NVML_CLOCK_MEM),
            "temperature_c": _asked(nvml.nvmlDeviceGetTemperature, gpu, nvml.NVML_TEMPERATURE_GPU),
            "power_w": None if power_mw is None else round(power_mw / 1000),
            "throttle_reasons": named,
            "gpu_processes": _processes(nvml, gpu),
        }


def _processes(nvml, gpu) -> int | None:
    """Processes that compute on the GPU now, this one among them.

    None where NVML does not list this process: before it has used the GPU, or in a container whose processes have other
    numbers outside it. How many of those that are listed are others is not known then.
    """
    listed = {process.pid for process in _asked(nvml.nvmlDeviceGetComputeRunningProcesses, gpu) or ()}
    return len(listed - _siblings()) if os.getpid() in listed else None


def _siblings() -> set[int]:
    """The other processes of the run that this one is of: they wait while one of them times."""
    if not (parent := os.environ.get(RUN)):
        return set()
    import psutil

    with contextlib.suppress(psutil.Error):
        return {process.pid for process in psutil.Process(int(parent)).children(recursive=True)} - {os.getpid()}
    return set()


def gpu_memory_used() -> int | None:
    """Bytes in use on the first GPU by this process, or by all where NVML does not know whose they are.

    None where they may be those of other processes of the run.
    """
    with _first_gpu() as (nvml, gpu):
        if not nvml:
            return None
        listed = _asked(nvml.nvmlDeviceGetComputeRunningProcesses, gpu) or ()
        own = [process.usedGpuMemory for process in listed if process.pid == os.getpid()]
        if own and own[0]:
            return int(own[0])
        memory = None if _siblings() else _asked(nvml.nvmlDeviceGetMemoryInfo, gpu)
        return memory and int(memory.used)


def gpu_joules() -> float | None:
    """What the first GPU has taken since its driver was loaded (NVML's counter); None without one, or where it has none."""
    with _first_gpu() as (nvml, gpu):
        millijoules = _asked(nvml.nvmlDeviceGetTotalEnergyConsumption, gpu) if nvml else None
        return None if millijoules is None else millijoules / 1e3


def gpu_is_exclusive() -> bool:
    """Whether the first GPU is set to take one process at a time."""
    with _first_gpu() as (nvml, gpu):
        mode = _asked(nvml.nvmlDeviceGetComputeMode, gpu) if nvml else None
        return mode is not None and mode != nvml.NVML_COMPUTEMODE_DEFAULT


def memory_bytes() -> int:
    """Bytes of memory that a process of this machine may have at most: RAM and swap, less where a container allows less."""
    import psutil

    found = psutil.virtual_memory().total + psutil.swap_memory().total
    with contextlib.suppress(OSError, ValueError):  # no container of this kind, or "max": no limit
        found = min(found, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return found


def gpu_memory_bytes() -> int | None:
    """Bytes of memory of the first GPU; None without one, or where NVML cannot tell."""
    with _first_gpu() as (nvml, gpu):
        memory = _asked(nvml.nvmlDeviceGetMemoryInfo, gpu) if nvml else None
        return memory and int(memory.total)


def resident_bytes() -> int:
    """Bytes of the host's memory in use by this process."""
    import psutil

    return int(psutil.Process().memory_info().rss)


class CpuShare:
    """How much of the processors that this process may use others took since it was made."""

    def __init__(self) -> None:
        self._start = self._now()

    @staticmethod
    def _now() -> tuple[float, float, float]:
        """(s that these processors had, s that they were busy, a hypervisor's stolen time included, s of this process)."""
        import psutil

        allowed = _allowed_processors()
        times = [t for processor, t in enumerate(psutil.cpu_times(percpu=True)) if processor in allowed]
        idle = sum(t.idle + getattr(t, "iowait", 0.0) for t in times)
        guests = sum(getattr(t, "guest", 0.0) + getattr(t, "guest_nice", 0.0) for t in times)  # user and nice hold them
        total, own = sum(map(sum, times)) - guests, os.times()
        return total, total - idle, own.user + own.system + own.children_user + own.children_system

    def others_percent(self) -> float:
        """Percent of these processors' time, 0 to 100."""
        total, busy, own = (after - before for after, before in zip(self._now(), self._start, strict=True))
        return min(100.0, max(0.0, 100.0 * (busy - own) / total)) if total > 0 else 0.0


class UtilisationSampler:
    """Mean GPU utilisation in percent (NVML: share of the time in which a kernel ran) while the block runs."""

    def __enter__(self) -> "UtilisationSampler":
        self.percent: float | None = None
        self._samples: list[int] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def _sample(self) -> None:
        with _first_gpu() as (nvml, gpu):
            while nvml and not self._stop.wait(SAMPLE_S):
                if rates := _asked(nvml.nvmlDeviceGetUtilizationRates, gpu):
                    self._samples.append(rates.gpu)

    def __exit__(self, *_) -> None:
        self._stop.set()
        self._thread.join(timeout=5 + time.get_clock_info("monotonic").resolution)
        late = self._samples[len(self._samples) // 2 :]  # NVML averages over up to a second: the first samples are old
        self.percent = sum(late) / len(late) if late else None
