"""How long a step of the persistent kernels takes by tiling; where the constants of models/wavefront/tiling.py come from.

    python -m tests.models.measured_tilings OUT.json     # on a GPU, with nothing else on it: two minutes
    python -m tests.models.measured_tilings --fit OUT.json

Launches the kernels through CUDA's driver, on zeros, for the published shapes: of each the tilings that seem best by the present
constants, at most two that differ in how they keep their weights alone.
"""

import ctypes
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from models.wavefront import tiling
from models.wavefront.tiling import COST_US, DTYPE_CODES, WARPS, Tiling, Work

SHAPES = {  # layers, units, batch, steps, by how many layers at a time
    "mnist": (2, 128, 32, 28, (2,)),
    "small": (2, 200, 20, 20, (2,)),
    "medium": (2, 650, 20, 35, (1,)),
    "large": (2, 1500, 20, 35, (1,)),
    "stacked": (3, 256, 128, 50, (1, 3)),
}
PRECISIONS = {"stacked": ("tf32", "float16", "float32")}  # of the others the first two
TRIED, ALIKE = 10, 2  # tilings of each; of them with the same tiles
BUFFER_BYTES = 160 << 20
LAUNCHES, REPEATS = 3, 4


def works() -> Iterator[tuple[str, Work, int]]:
    for name, (_, units, batch, steps, together) in SHAPES.items():
        for precision in PRECISIONS.get(name, ("tf32", "float16")):
            dtype_code = DTYPE_CODES[precision]
            padded = tiling.padded_units(units, Work(1, batch, units, dtype_code, False).itemsize)
            for lanes in together:
                for backward in (False, True):
                    yield name, Work(lanes, batch, padded, dtype_code, backward), steps


def tried(work: Work, chip) -> list[Tiling]:
    found, seen = [], Counter()
    every = set(tiling._tilings(work, chip))
    for candidate in sorted(every, key=lambda candidate: tiling.step_us(work, candidate)):
        seen[candidate[:3]] += 1
        if seen[candidate[:3]] <= ALIKE and len(found) < TRIED:
            found.append(candidate)
    return found


class Driver:
    """CUDA's driver on the first GPU."""

    def __init__(self) -> None:
        self.cuda, device, self.context = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_void_p()
        self.call("cuInit", 0)
        self.call("cuDeviceGet", ctypes.byref(device), 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(self.context), device)
        self.call("cuCtxSetCurrent", self.context)
        self.buffers = [ctypes.c_uint64() for _ in range(14)]  # more than a kernel has parameters
        for buffer in self.buffers:
            self.call("cuMemAlloc_v2", ctypes.byref(buffer), ctypes.c_size_t(BUFFER_BYTES))
            self.call("cuMemsetD8_v2", buffer, 0, ctypes.c_size_t(BUFFER_BYTES))
        self.events = ctypes.c_void_p(), ctypes.c_void_p()
        for event in self.events:
            self.call("cuEventCreate", ctypes.byref(event), 0)

    def call(self, name: str, *arguments) -> None:
        if status := getattr(self.cuda, name)(*arguments):
            raise RuntimeError(f"{name} failed with status {status}")

    def load(self, code: str, name: str, shared_bytes: int) -> ctypes.c_void_p:
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self.call("cuCtxSetCurrent", self.context)  # of this thread
        self.call("cuModuleLoadData", ctypes.byref(module), code.encode())
        self.call("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
        self.call("cuFuncSetAttribute", function, 8, shared_bytes)  # MAX_DYNAMIC_SHARED_SIZE_BYTES
        return function

    def us(self, function, grid: int, shared_bytes: int) -> float:
        """The best of a few launches."""
        pointers = (ctypes.c_void_p * len(self.buffers))(
            *(ctypes.cast(ctypes.pointer(buffer), ctypes.c_void_p) for buffer in self.buffers)
        )
        best, ms = float("inf"), ctypes.c_float()
        for _ in range(REPEATS):
            self.call("cuEventRecord", self.events[0], None)
            for _ in range(LAUNCHES):
                sizes = (grid, 1, 1, 32 * WARPS, 1, 1, shared_bytes)
                self.call("cuLaunchKernel", function, *sizes, None, pointers, None)
            self.call("cuEventRecord", self.events[1], None)
            self.call("cuEventSynchronize", self.events[1])
            self.call("cuEventElapsedTime", ctypes.byref(ms), *self.events)
            best = min(best, 1e3 * ms.value / LAUNCHES)
        return best


def measure(out: Path) -> None:
    import tensorflow as tf

    from models.wavefront import nvrtc, persistent

    chip, driver, source = nvrtc.chip(), Driver(), persistent.SOURCE.read_text()
    jobs = [(name, work, steps, candidate) for name, work, steps in works() for candidate in tried(work, chip)]

    def load(job):
        _, work, steps, candidate = job
        code = nvrtc.ptx(source, tiling.defines(work, steps, candidate), chip.capability)
        kernel = f"lstm_wavefront_{'backward' if work.backward else 'forward'}"
        return driver.load(code, kernel, candidate.shared_bytes(work))

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        functions = list(pool.map(load, jobs))
    found = []
    for (name, work, steps, candidate), function in zip(jobs, functions, strict=True):
        us = driver.us(function, candidate.grid(work), candidate.shared_bytes(work)) / (steps + work.lanes - 1)
        found.append({"shape": name, "work": work, "tiling": candidate, "us": round(us, 3)})
    details = tf.config.experimental.get_device_details(tf.config.get_visible_devices("GPU")[0])
    head = {"gpu": details.get("device_name"), "chip": chip, "date": time.strftime("%Y-%m-%d")}
    lines = ",\n".join(map(json.dumps, found))
    out.write_text(json.dumps(head)[:-1] + f', "tilings": [\n{lines}\n]}}\n')


def read(path: Path) -> list[tuple[Work, Tiling, float]]:
    rows = json.loads(path.read_text())["tilings"]
    return [(Work(*row["work"]), Tiling(*row["tiling"]), row["us"]) for row in rows]


def fit(measured: Sequence[tuple[Work, Tiling, float]]) -> dict[str, float]:
    """The constants, none below 0, with the least mean square of relative errors."""
    from scipy.optimize import nnls  # comes with scikit-learn

    amounts = np.array([[tiling.terms(work, candidate)[name] for name in COST_US] for work, candidate, _ in measured])
    us = np.array([us for *_, us in measured])
    return dict(zip(COST_US, nnls(amounts / us[:, None], np.ones(len(us)))[0], strict=True))


def main(arguments: Sequence[str]) -> int:
    if arguments[:1] == ["--fit"]:
        print({name: round(float(us), 4) for name, us in fit(read(Path(arguments[1]))).items()})
    else:
        measure(Path(arguments[0]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
