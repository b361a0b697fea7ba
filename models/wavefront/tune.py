"""Measures the persistent kernels on this GPU, so that "persistent" divides its work by this chip's own times:

    python -m wavefront_lstm.tune                     # with nothing else on the GPU: some minutes
    python -m wavefront_lstm.tune --out=FILE          # also keeps what was measured
    python -m wavefront_lstm.tune --fit=FILE          # fits what was measured before; needs no GPU

In a checkout of the suite it is python -m models.wavefront.tune. The constants that tiling.py comes with, COST_US, are an H100's.
What is found here is kept in a file (tiling.costs_path) that every later process on such a GPU reads; without it, they are the
H100's again. Of some shapes the tilings that seem best are launched through CUDA's driver, on zeros, at most two of the same
tile sizes; the constants are a fit to their times. PRODUCTS_PER_US and BYTES_PER_US, which also say whether layers run together
or in turn, stay as they are, and so do HALVES_US and HALVES_CALL_US.
"""

import argparse
import ctypes
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from . import tiling
from .clusters import ClusterTiling
from .nvrtc import Chip
from .tiling import COST_US, Tiling
from .work import DTYPE_CODES, WARPS, Work, padded_units

SHAPES = {  # layers, units, batch, steps, by how many layers at a time
    "mnist": (2, 128, 32, 28, (1, 2)),
    "small": (2, 200, 20, 20, (1, 2)),
    "medium": (2, 650, 20, 35, (1,)),
    "large": (2, 1500, 20, 35, (1,)),
    "stacked": (3, 256, 128, 50, (1, 3)),
}
PRECISIONS = {"stacked": ("tf32", "float16", "float32")}  # of the others the first two
TRIED, ALIKE = 10, 2  # tilings of each; of them with the same tiles
BUFFER_BYTES = 160 << 20
LAUNCHES, REPEATS = 3, 4
SWEEPS = 20_000  # of the fit, over all constants


class Measured(NamedTuple):
    """us of a step of `work` by `tiling`, among the others of `shape`."""

    shape: str
    work: Work
    tiling: Tiling | ClusterTiling
    us: float


def works() -> Iterator[tuple[str, Work, int]]:
    """(shape, work, steps) of what is measured."""
    for name, (_, units, batch, steps, together) in SHAPES.items():
        for precision in PRECISIONS.get(name, ("tf32", "float16")):
            dtype_code = DTYPE_CODES[precision]
            padded = padded_units(units, Work(1, batch, units, dtype_code, False).itemsize)
            for lanes in together:
                for backward in (False, True):
                    yield name, Work(lanes, batch, padded, dtype_code, backward), steps


def tried(work: Work, chip: Chip) -> list[Tiling | ClusterTiling]:
    """The tilings that seem best by the present constants."""
    found, seen, costs = [], Counter(), tiling.costs(chip)
    every = tiling.tilings(work, chip)
    for candidate in sorted(every, key=lambda candidate: tiling.step_us(work, candidate, costs)):
        seen[kind := (candidate.kernel, *candidate[:3])] += 1
        if seen[kind] <= ALIKE and len(found) < TRIED:
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
        self.buffers = [ctypes.c_uint64() for _ in range(18)]  # more than a kernel has parameters
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


def measure(chip: Chip, say: Callable[[str], None]) -> list[Measured]:
    """How long a step takes by each tiling that is tried, on the first GPU, which is a `chip`."""
    from . import persistent

    driver = Driver()
    jobs = [(name, work, steps, candidate) for name, work, steps in works() for candidate in tried(work, chip)]
    say(f"{len(jobs)} kernels of {len({job[1] for job in jobs})} shapes and precisions: compiling")

    def load(job):
        _, work, steps, candidate = job
        code = persistent.ptx(work, steps, work.units, candidate, chip)
        return driver.load(code, persistent.kernel_name(work, candidate), candidate.shared_bytes(work))

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        functions = list(pool.map(load, jobs))
    say("measuring")
    found = []
    for (name, work, steps, candidate), function in zip(jobs, functions, strict=True):
        us = driver.us(function, candidate.grid(work), candidate.shared_bytes(work)) / (steps + work.lanes - 1)
        found.append(Measured(name, work, candidate, round(us, 3)))
    return found


def read(path: Path) -> list[Measured]:
    """What was kept by --out."""
    rows = json.loads(path.read_text())["tilings"]
    if any(not isinstance(row["tiling"], dict) for row in rows):
        raise ValueError(f"{path}: measured with another version's tilings, expected this one's: measure again")
    kinds = {Tiling._fields: Tiling, ClusterTiling._fields: ClusterTiling}
    return [
        Measured(row["shape"], Work(*row["work"]), kinds[tuple(row["tiling"])](**row["tiling"]), row["us"])
        for row in rows
    ]


def write(path: Path, head: Mapping, measured: Sequence[Measured]) -> None:
    lines = ",\n".join(json.dumps(row._asdict() | {"tiling": row.tiling._asdict()}) for row in measured)
    path.write_text(json.dumps(head)[:-1] + f', "tilings": [\n{lines}\n]}}\n')


def fit(measured: Sequence[Measured]) -> dict[str, float]:
    """The constants, none below 0, with the least mean square of relative errors: by coordinates in turn."""
    amounts = np.array([[row.tiling.terms(row.work).get(name, 0) for name in COST_US] for row in measured])
    amounts /= np.array([row.us for row in measured])[:, None]
    products, wanted = amounts.T @ amounts, amounts.sum(0)
    found = np.zeros(len(COST_US))
    for _ in range(SWEEPS):
        before = found.copy()
        for k in range(len(found)):
            if products[k, k]:
                found[k] = max(0.0, found[k] + (wanted[k] - products[k] @ found) / products[k, k])
        if np.abs(found - before).max() < 1e-9:
            break
    return dict(zip(COST_US, map(float, found), strict=True))


def loss(measured: Sequence[Measured], costs: Mapping[str, float]) -> float:
    """How many times as long as by the best measured tiling a step takes by the one that is chosen, in the mean."""
    ratios = []
    for work in dict.fromkeys(row.work for row in measured):
        own = [row for row in measured if row.work == work]
        chosen = min(own, key=lambda row: tiling.step_us(row.work, row.tiling, costs))
        ratios.append(chosen.us / min(row.us for row in own))
    return float(np.mean(ratios))


def tune(chip: Chip, head: Mapping, measured: Sequence[Measured], say: Callable[[str], None]) -> None:
    """Fit the constants, and keep them where they choose no worse than those that there are."""
    costs, present = fit(measured), tiling.costs(chip)
    found, before = (loss(measured, own) for own in (costs, present))
    say(
        f"a step by the tiling that is chosen takes {found:.3f} times the best measured one, by the present ones {before:.3f}"
    )
    if found > before:
        say("nothing is kept: the present constants choose better")
        return
    path = tiling.costs_path(chip)
    whole = path.with_suffix(f".{os.getpid()}.tmp")  # another process may be reading
    whole.write_text(json.dumps({**head, "costs_us": costs}) + "\n")
    whole.replace(path)
    say(f"kept in {path}; remove that file to go back to the constants of an H100")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=tiling.TUNE, description=__doc__.split("\n")[0].rstrip(":"))
    parser.add_argument("--out", type=Path, metavar="FILE", help="also keep what was measured there, as JSON")
    parser.add_argument("--fit", type=Path, metavar="FILE", help="print the constants of what was measured before")
    given = parser.parse_args(arguments)
    try:
        if given.fit:
            print(json.dumps({name: round(us, 4) for name, us in fit(read(given.fit)).items()}))
        else:
            _measure_and_keep(given.out)
    except KeyError as error:
        print(f"error: {given.fit}: no {error}; expected a file that --out has written", file=sys.stderr)
        return 2
    except (ValueError, TypeError, OSError, RuntimeError) as error:  # no GPU; no CUDA; a file; a call of the driver
        print(f"error: {str(error).partition('; use implementation=')[0]}", file=sys.stderr)
        return 2
    return 0


def _measure_and_keep(out: Path | None) -> None:
    from . import nvrtc

    chip = nvrtc.chip()
    if chip.capability < 80:
        raise ValueError(f"a GPU of compute capability {chip.capability / 10} given, expected 8.0 or later")
    tiling.costs_path(chip).parent.mkdir(parents=True, exist_ok=True)  # before minutes of measuring
    if out:
        out.touch()
    measured = measure(chip, print)
    head = {"gpu": chip.name, "chip": chip, "date": time.strftime("%Y-%m-%d")}
    if out:
        write(out, head, measured)
    tune(chip, head, measured, print)


if __name__ == "__main__":
    sys.exit(main())
