"""Versions of the CUDA libraries that this process has loaded, which need not be those that its framework was built for."""

import ctypes


def cudnn() -> str | None:
    """Of cuDNN, such as "9.19.0"; None where none is loaded, as in the functions below."""
    library = _loaded("libcudnn")
    return library and _dotted(library.cudnnGetVersion())


def cublas() -> str | None:
    """Of cuBLAS, such as "13.1.0"."""
    library = _loaded("libcublasLt")
    return library and _dotted(library.cublasLtGetVersion())


def cuda_runtime() -> str | None:
    """Of the CUDA runtime, such as "12.9"."""
    library, version = _loaded("libcudart"), ctypes.c_int()
    if library is None or library.cudaRuntimeGetVersion(ctypes.byref(version)):
        return None
    return f"{version.value // 1000}.{version.value // 10 % 100}"


def nccl() -> str | None:
    """Of NCCL, such as "2.29.7"; TensorFlow has it built in where no file of it is loaded: None then."""
    library, version = _loaded("libnccl"), ctypes.c_int()
    if library is None or library.ncclGetVersion(ctypes.byref(version)):
        return None
    return _dotted(version.value)


def _dotted(version: int) -> str:
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def _loaded(library: str) -> ctypes.CDLL | None:
    """The shared library of that name that this process has mapped already, or None; loads nothing new."""
    with open("/proc/self/maps", encoding="utf-8") as maps:
        paths = sorted({line.split()[-1] for line in maps if f"/{library}.so" in line})
    return ctypes.CDLL(paths[0]) if paths else None
