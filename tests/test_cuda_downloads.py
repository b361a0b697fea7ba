"""The loader finds each CUDA library that TensorFlow, PyTorch and JAX open, in environments made of the locks. Needs no GPU.

Left out by default, since it downloads 12 GB and keeps 25 GB in .pytest_cache:

    ./run_tests.sh -m downloads tests/test_cuda_downloads.py
"""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[1]
pytestmark = [
    pytest.mark.downloads,
    pytest.mark.skipif(sys.platform != "linux", reason="the CUDA packages are built for Linux"),
]
# What tsl's DsoLoader, the part of TensorFlow that opens CUDA's libraries by their names, says of each: 1 is a handle.
TENSORFLOW = """
import ctypes, pathlib, tensorflow
library = ctypes.CDLL(str(pathlib.Path(tensorflow.__file__).with_name("libtensorflow_framework.so.2")))
for name in ("CudaRuntime", "Cublas", "CublasLt", "Cudnn", "Cufft", "Cusolver", "Cusparse", "Cupti", "Nccl"):
    method = f"Get{name}DsoHandle"
    handle = getattr(library, f"_ZN3tsl8internal9DsoLoader{len(method)}{method}Ev")
    status = (ctypes.c_void_p * 4)()  # absl::StatusOr, through a hidden pointer
    handle.restype, handle.argtypes = None, [ctypes.c_void_p]
    handle(ctypes.addressof(status))
    print(name, "found" if status[0] == 1 else "missing")
"""
# libtorch_cuda.so is loaded by the import, with all that it names; the others when they are first used.
TORCH = """
import ctypes, pathlib, torch
for name in ("libtorch_cuda.so", "libtorch_cuda_linalg.so", "libtorch_nvshmem.so"):
    ctypes.CDLL(str(pathlib.Path(torch.__file__).parent / "lib" / name))
    print(name, "found")
import triton
print("cuDNN", "found" if torch.backends.cudnn.version() else "missing")
"""
# XLA's plugin opens them by their names, in the folders of its own RPATH; what else it needs, its Python module loads before.
JAX = """
import ctypes, importlib, pathlib, re, subprocess
module = importlib.import_module("jax_plugins.xla_cuda{0}")
module._load_nvidia_libraries()
plugin = pathlib.Path(module.__file__).with_name("xla_cuda_plugin.so")
dynamic = subprocess.run(["readelf", "-d", plugin], capture_output=True, text=True, check=True).stdout
folders = re.search(r"R(?:UN)?PATH.*\\[(.*)\\]", dynamic)[1].replace("$ORIGIN", str(plugin.parent)).split(":")
for name in ("libcudart.so.{0}", "libcublas.so.{0}", "libcublasLt.so.{0}", "libcudnn.so.9", "libcufft.so.{1}",
             "libcusolver.so.{1}", "libcusparse.so.12", "libcupti.so.{0}", "libnccl.so.2", "libnvJitLink.so.{0}",
             "libnvshmem_host.so.3"):
    places = [place for folder in folders if (place := pathlib.Path(folder, name)).exists()]
    try:
        ctypes.CDLL(str(places[0]) if places else name)
    except OSError:
        print(name, "missing")
    else:
        print(name, "found")
"""


def environment(cache: Path, lock: str) -> Path:
    """The Python of an environment made of a lock as run_all.sh makes it, kept for the next run of these tests."""
    path = PROJECT / f"requirements-{lock}.lock"
    folder = cache / f"{lock}-{hashlib.sha256(path.read_bytes()).hexdigest()[:12]}"
    made = folder / "made"
    if not made.exists():
        script = f'set -euo pipefail; root=$1; . "$root/harness/run/setup_env.sh"; venv=$2; "$3" -m venv --clear "$venv"; ' \
                 f'install_into "$venv" {lock}{"; link_cusolver" * (lock == "cuda")}'  # fmt: skip
        subprocess.run(["bash", "-c", script, "bash", PROJECT, folder, sys.executable], check=True, timeout=3600)
        made.touch()
    return folder / "bin" / "python"


@pytest.mark.parametrize(
    "lock, code",
    [
        ("cuda", TENSORFLOW),
        ("torch-cuda", TORCH),
        ("torch-cuda12", TORCH),
        ("jax-cuda", JAX.format(13, 12)),
        ("jax-cuda12", JAX.format(12, 11)),
    ],
    ids=lambda value: value if "\n" not in value else "",
)
def test_loader_finds_every_cuda_library_that_a_framework_opens(request, lock, code):
    python = environment(Path(request.config.cache.mkdir("cuda")), lock)
    clean = {name: value for name, value in os.environ.items() if name not in ("LD_LIBRARY_PATH", "PYTHONPATH")}
    done = subprocess.run([python, "-c", code], env=clean, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    found = [line.rsplit(" ", 1) for line in done.stdout.splitlines() if line.endswith((" found", " missing"))]
    assert len(found) >= 4 and [name for name, state in found if state == "missing"] == []
    if lock == "cuda":  # once this fails, TensorFlow looks there itself and link_cusolver can go
        (link,) = python.parents[1].glob("lib/python3.*/site-packages/nvidia/cublas/lib/libcusolver.so.11")
        target = os.readlink(link)
        link.unlink()
        try:
            without = subprocess.run([python, "-c", code], env=clean, capture_output=True, text=True, timeout=600)
        finally:
            link.symlink_to(target)
        assert "Cusolver missing" in without.stdout
