"""The CUDA kernels on a CPU: cuda_source.ptx and launch on tests/models/cuda_emulator.h, compiled by g++."""

import contextlib
import ctypes
import functools
import hashlib
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tensorflow as tf

from models.wavefront import nvrtc
from models.wavefront.nvrtc import Chip

HEADER = Path(__file__).with_name("cuda_emulator.h")
CHIP = Chip(
    multiprocessors=8, shared_bytes=64 * 1024, capability=90, clusters=((2, 4), (4, 2), (8, 1))
)  # small, so that there are several tiles of everything
H200 = Chip(
    multiprocessors=132, shared_bytes=232448, capability=90, name="NVIDIA H200", clusters=((2, 66), (4, 32), (8, 16))
)
MAIN = """
#include "{source}"
template <typename... P> void call(void (*kernel)(P...), void** pointers) {{
  emulator::call(kernel, pointers, std::index_sequence_for<P...>());
}}
static void entry(void** pointers) {{ call({kernel}, pointers); }}
extern "C" int launch(int blocks, int threads, int bytes, void** pointers) {{
  emulator::arrivals = 0;
  return emulator::launch(blocks, threads, bytes, pointers, entry);
}}
extern "C" int arrivals() {{ return emulator::arrivals; }}
"""
ARRIVALS: list[int] = []  # of blocks at barriers, of each launch


def build(folder: Path, name: str, source: str, defines: Sequence[tuple[str, int]]) -> Path:
    """The kernel of that name, with these defines, as a library, built once."""
    models = Path(nvrtc.__file__).with_name("kernels")
    headers = [path.read_text() for path in (HEADER, *models.glob("*.cuh"))]
    key = hashlib.sha256(repr((name, source, headers, tuple(defines))).encode()).hexdigest()[:16]
    made = folder / f"{key}.so"
    if not made.exists():
        kernels, text = folder / f"{key}.cu", folder / f"{key}.cpp"
        kernels.write_text(source)
        text.write_text(MAIN.format(source=kernels, kernel=name))
        flags = ["-std=c++17", "-O2", "-w", "-shared", "-fPIC", "-DEMULATED"]
        flags += [f"-I{models}", f"-I{HEADER.parent}", "-include", str(HEADER)]
        subprocess.run(["g++", *flags, *(f"-D{k}={v}" for k, v in defines), str(text), "-o", str(made)], check=True)
    return made


def launch(folder, name, code, operands, results, grid, threads, shared_bytes) -> list[tf.Tensor]:
    """As cuda_source.launch, on eager tensors; `code`: source and defines. Results are NaN where the kernel writes nothing."""
    arrays = [np.ascontiguousarray(tf.convert_to_tensor(x).numpy()) for x in operands]
    for spec in results:
        empty = np.full(spec.shape, np.nan, "float32")
        arrays.append(np.ascontiguousarray(tf.cast(empty, spec.dtype).numpy()))
    pointers = (ctypes.c_void_p * len(arrays))(*(array.ctypes.data for array in arrays))
    library = ctypes.CDLL(str(build(folder, name, *code)))
    assert library.launch(grid, threads, shared_bytes, pointers) == 1, f"{name} hangs"
    ARRIVALS.append(library.arrivals())
    return [tf.constant(array) for array in arrays[len(operands) :]]


@contextlib.contextmanager
def emulated(monkeypatch, folder: Path, chip: Chip = CHIP, tf32: bool = True):
    """Inside, the kernels of models/*.cu run on the emulator, op by op, as on a GPU of `chip`."""
    with monkeypatch.context() as patch:
        patch.setattr(nvrtc, "chip", lambda: chip)
        patch.setattr(nvrtc, "ptx", lambda source, defines, capability: (source, defines))
        patch.setattr(nvrtc, "compile_ahead", lambda source, defines, capability: None)
        patch.setattr(nvrtc, "launch", functools.partial(launch, folder))
        patch.setattr(tf.config.experimental, "tensor_float_32_execution_enabled", lambda: tf32)
        patch.setattr(tf.config, "functions_run_eagerly", lambda: False)  # of what implementation="auto" asks
        tf.config.run_functions_eagerly(True)
        try:
            yield
        finally:
            tf.config.run_functions_eagerly(False)
