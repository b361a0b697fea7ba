"""CUDA C++ inside a function that XLA compiles: source → PTX by NVRTC → XLA's custom call for PTX.

NVRTC, NVIDIA's run-time compiler, is a library that tensorflow[and-cuda] installs: nothing is built at installation, and a kernel
is compiled for the very shapes of a model, in about a second, when the function around it is traced.
"""

import ctypes
import functools
import importlib.util
import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import ClassVar, NamedTuple

import tensorflow as tf

TARGET = "__gpu$xla.gpu.ptx"  # xla/service/gpu/custom_kernel_emitter_cuda.cc
LIBRARIES = ("libnvrtc.so.12", "libnvrtc.so.13")
CLUSTERS = (2, 4, 8)  # sizes of clusters that are asked for; 8 is the largest that every chip with clusters has
EMPTY_KERNEL = b".version 7.8\n.target sm_90\n.address_size 64\n.visible .entry empty() { ret; }\n"
PACKAGES = ("nvidia.cuda_nvrtc", "nvidia.cu13")  # that hold them, of CUDA 12 and 13


class Chip(NamedTuple):
    """What a launch has to fit on.

    Attributes:
        multiprocessors: thread blocks that surely run at the same time, where one fills a multiprocessor.
        shared_bytes: of shared memory, at most, of one thread block.
        capability: compute capability, times ten: 90 for an H100.
        name: the GPU's, as its driver says it.
        clusters: (thread blocks of a cluster, how many such clusters surely run at the same time), for each size that there is.
    """

    multiprocessors: int
    shared_bytes: int
    capability: int
    name: str = ""
    clusters: tuple[tuple[int, int], ...] = ()

    def blocks(self, of_cluster: int) -> int:
        """Thread blocks, in clusters of so many, that surely run at the same time."""
        return of_cluster * dict(self.clusters).get(of_cluster, 0) if of_cluster > 1 else self.multiprocessors


def chip() -> Chip:
    """What every GPU that TensorFlow may use has.

    Raises:
        ValueError: there is none, or some differ in compute capability, or the driver is older than NVRTC.
    """
    visible = tf.config.get_visible_devices("GPU")
    if not visible:
        raise ValueError(
            "no NVIDIA GPU that TensorFlow sees, expected one for CUDA kernels, such as those of "
            "implementation='persistent'; use implementation='xla'"
        )
    return _chip(tuple(int(device.name.rpartition(":")[2]) for device in visible))


@functools.cache
def _chip(ordinals: tuple[int, ...]) -> Chip:
    driver, value = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    _check(driver.cuInit(0), "cuInit")
    _check(driver.cuDriverGetVersion(ctypes.byref(value)), "cuDriverGetVersion")
    _check_driver(value.value, *_nvrtc_version())
    device = ctypes.c_int()

    def ask(attribute: int) -> int:
        _check(driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device), "cuDeviceGetAttribute")
        return value.value

    chips, name = [], ctypes.create_string_buffer(256)
    for ordinal in ordinals:
        _check(driver.cuDeviceGet(ctypes.byref(device), ordinal), "cuDeviceGet")
        _check(driver.cuDeviceGetName(name, len(name), device), "cuDeviceGetName")
        # CU_DEVICE_ATTRIBUTE_: MULTIPROCESSOR_COUNT, MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, COMPUTE_CAPABILITY_MAJOR and _MINOR
        found = Chip(ask(16), ask(97), 10 * ask(75) + ask(76), name.value.decode())
        chips.append(found._replace(clusters=_clusters(driver, device, found) if found.capability >= 90 else ()))
    return common(chips)


class _LaunchAttribute(ctypes.Structure):  # CUlaunchAttribute
    _fields_: ClassVar = [("id", ctypes.c_uint64), ("value", ctypes.c_uint32 * 16)]


class _LaunchConfig(ctypes.Structure):  # CUlaunchConfig
    _fields_: ClassVar = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_LaunchAttribute)),
        ("num_attributes", ctypes.c_uint),
    ]


def _clusters(driver: ctypes.CDLL, device: ctypes.c_int, found: Chip) -> tuple[tuple[int, int], ...]:
    """Chip.clusters: GPUs of one kind differ in how their multiprocessors are grouped, so the driver is asked."""
    context, module, function, most = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int()
    _check(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), "cuDevicePrimaryCtxRetain")
    _check(driver.cuCtxPushCurrent_v2(context), "cuCtxPushCurrent")
    try:
        _check(driver.cuModuleLoadData(ctypes.byref(module), EMPTY_KERNEL), "cuModuleLoadData")
        _check(driver.cuModuleGetFunction(ctypes.byref(function), module, b"empty"), "cuModuleGetFunction")
        # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _check(driver.cuFuncSetAttribute(function, 8, found.shared_bytes), "cuFuncSetAttribute")
        sizes = []
        for size in CLUSTERS:
            attribute = _LaunchAttribute(4, (size, 1, 1))  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            attributes = ctypes.pointer(attribute)
            config = _LaunchConfig((size, 1, 1), (1024, 1, 1), found.shared_bytes, None, attributes, 1)
            if not driver.cuOccupancyMaxActiveClusters(ctypes.byref(most), function, ctypes.byref(config)):
                sizes.append((size, most.value))  # an error: the chip has none of this size
        return tuple(sizes)
    finally:
        driver.cuModuleUnload(module)
        driver.cuCtxPopCurrent_v2(ctypes.byref(context))
        driver.cuDevicePrimaryCtxRelease_v2(device)


def common(chips: Sequence[Chip]) -> Chip:
    """What all of them have; a ValueError where one program cannot serve them."""
    if len({found.capability for found in chips}) > 1:
        raise ValueError(
            f"GPUs of compute capabilities {', '.join(str(found.capability / 10) for found in chips)} given, expected one: hide "
            "the others by tf.config.set_visible_devices"
        )
    return chips[0]._replace(
        multiprocessors=min(c.multiprocessors for c in chips),
        shared_bytes=min(c.shared_bytes for c in chips),
        clusters=tuple((size, min(c.blocks(size) // size for c in chips)) for size, _ in chips[0].clusters),
    )


def _check_driver(driver: int, major: int, minor: int) -> None:
    """The driver compiles NVRTC's PTX, and knows none that is newer; `driver` as of cuDriverGetVersion."""
    if driver < 1000 * major + 10 * minor:
        raise ValueError(
            f"an NVIDIA driver of CUDA {driver // 1000}.{driver % 1000 // 10} and NVRTC {major}.{minor} given, expected a driver "
            f"no older: update it, or pip install nvidia-cuda-nvrtc-cu{driver // 1000} of its version"
        )


def _nvrtc_version() -> tuple[int, int]:
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(_nvrtc().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)), "nvrtcVersion")
    return major.value, minor.value


_ahead: dict[tuple, Future[str]] = {}  # by the arguments of `ptx`
_asked: set[tuple] = set()
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_ahead.clear)  # whose threads are not there


@functools.cache
def ptx(source: str, defines: tuple[tuple[str, int], ...], capability: int) -> str:
    """The PTX of CUDA C++ `source`, with macros defined; it may include this folder's headers.

    Raises:
        ValueError: the source does not compile, and the message holds the compiler's log; or there is no NVRTC.
    """
    _asked.add(key := (source, defines, capability))
    ahead = _ahead.pop(key, None)
    return ahead.result() if ahead else _ptx(*key)


def compile_ahead(source: str, defines: tuple[tuple[str, int], ...], capability: int) -> None:
    """Begin what `ptx` will be asked for, in a thread of its own; an error is for `ptx` to raise."""
    if (key := (source, defines, capability)) in _asked:
        return
    _asked.add(key)
    future: Future[str] = Future()

    def run() -> None:
        try:
            future.set_result(_ptx(*key))
        except Exception as error:
            future.set_exception(error)

    try:
        threading.Thread(target=run, name="nvrtc", daemon=True).start()
    except RuntimeError:  # the interpreter is about to end
        return
    _ahead[key] = future


def _ptx(source: str, defines: tuple[tuple[str, int], ...], capability: int) -> str:
    nvrtc, program = _nvrtc(), ctypes.c_void_p()
    options = [
        f"--gpu-architecture=compute_{capability}",
        "--std=c++17",
        "--device-as-default-execution-space",
        f"--include-path={Path(__file__).with_name('kernels')}",
        *(f"-D{name}={value}" for name, value in defines),
    ]
    _check(
        nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernels.cu", 0, None, None),
        "nvrtcCreateProgram",
    )
    try:
        failed = nvrtc.nvrtcCompileProgram(
            program, len(options), (ctypes.c_char_p * len(options))(*map(str.encode, options))
        )
        if failed:
            raise ValueError(
                f"CUDA source does not compile with {' '.join(options)}:\n{_text(nvrtc, program, 'ProgramLog')}"
            )
        return _text(nvrtc, program, "PTX")
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def launch(
    name: str,
    code: str,
    operands: Sequence[tf.Tensor],
    results: Sequence[tf.TensorSpec],
    grid: int,
    threads: int,
    shared_bytes: int,
) -> list[tf.Tensor]:
    """One launch of a kernel, in a function that XLA compiles.

    Args:
        name: of the kernel in `code`, PTX. Its parameters are pointers: the operands', then the results'.
        grid, threads: thread blocks; threads of each.
        shared_bytes: dynamic shared memory of a thread block.
    """
    from tensorflow.compiler.tf2xla.python import xla

    places = ", ".join(str(len(operands) + k) for k in range(len(results)))
    config = {
        "name": _quoted(name), "kernel_type": _quoted("ptx"), "kernel_data": _quoted(code),
        "grid_x": grid, "grid_y": 1, "grid_z": 1, "block_x": threads, "block_y": 1, "block_z": 1,
        "shared_mem_bytes": shared_bytes, "output_indices": f"[{places}]",
    }  # fmt: skip
    return list(xla.custom_call_v2(TARGET, operands, results, backend_config=_dictionary(config)))


def _dictionary(entries: Mapping[str, object]) -> str:
    """As an MLIR attribute."""
    return "{" + ", ".join(f"{name} = {value}" for name, value in entries.items()) + "}"


def _quoted(text: str) -> str:
    """As an MLIR string."""
    return '"' + "".join(c if c.isprintable() and c not in '"\\' else f"\\{ord(c):02X}" for c in text) + '"'


@functools.cache
def _nvrtc() -> ctypes.CDLL:
    for place in (*_folders(), Path()):
        for name in LIBRARIES:
            if not place.name or (place / name).exists():
                try:
                    return ctypes.CDLL(str(place / name))
                except OSError:
                    continue
    raise ValueError("no NVRTC found, expected libnvrtc.so.12 or .13: pip install nvidia-cuda-nvrtc-cu12")


def _folders() -> list[Path]:
    """Where packages keep their libraries."""
    found = []
    for package in PACKAGES:
        try:
            spec = importlib.util.find_spec(package)
        except ModuleNotFoundError:  # of the parent
            continue
        found += [Path(folder) / "lib" for folder in (spec.submodule_search_locations or ())] if spec else []
    return found


def _text(nvrtc: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> str:
    size = ctypes.c_size_t()
    _check(getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size)), what)
    text = ctypes.create_string_buffer(size.value)
    _check(getattr(nvrtc, f"nvrtcGet{what}")(program, text), what)
    return text.value.decode()


def _check(status: int, what: str) -> None:
    if status:
        raise ValueError(f"{what} failed with status {status}")
