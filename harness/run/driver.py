"""What the NVIDIA driver allows: which build of each framework runs with it, and what to do where none does.

    python -m harness.run.driver [--device=cpu]    # prints "cuda cuda12": TensorFlow's build, then that of PyTorch and JAX

run_all.sh asks before it installs anything, so this module needs the standard library alone and asks nvidia-smi.
"""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from harness.errors import UserError

OLDEST = 525  # driver for CUDA 12, in which TensorFlow is built
# Driver for CUDA 13, in which PyTorch and JAX are built; requirements-*-cuda12.txt serve the drivers before it.
NEWER = 580
LEAST = (6, 0)  # compute capability that TensorFlow is built for
NEWER_LEAST = (7, 5)  # that CUDA 13 still knows
LIMIT_S = 30  # a driver that hangs does not answer
PCI = Path("/sys/bus/pci/devices")
INSTEAD = "or measure the CPU with --device=cpu"


class Gpu(NamedTuple):
    """One GPU as nvidia-smi lists it; capability (0, 0) where the driver is too old to tell."""

    name: str
    driver: str
    capability: tuple[int, int]


def gpus() -> list[Gpu]:
    """Every GPU of the driver, whether CUDA_VISIBLE_DEVICES hides it or not; [] where nvidia-smi does not answer."""
    for fields in ("driver_version,name,compute_cap", "driver_version,name"):
        lines = [[part.strip() for part in line.split(",")] for line in _ask(fields).splitlines()]
        if found := [line for line in lines if len(line) > 1 and re.match(r"\d+(\.\d+)+$", line[0])]:
            return [Gpu(line[1], line[0], _version(line[2]) if len(line) > 2 else (0, 0)) for line in found]
    return []


def _ask(fields: str) -> str:
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        answer = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT_S, errors="replace"
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout if answer.returncode == 0 else ""


def _version(text: str) -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def builds(found: Sequence[Gpu]) -> tuple[str, str]:
    """(TensorFlow's build, that of PyTorch and JAX): "cuda" or "cpu"; "cuda", "cuda12" or "cpu".

    Raises:
        UserError: the driver or every GPU is too old.
    """
    if not found:
        return "cpu", "cpu"
    version = found[0].driver
    if int(version.split(".")[0]) < OLDEST:
        raise UserError(
            f"NVIDIA driver {version}: TensorFlow's CUDA 12 needs {OLDEST} or later; update the driver, {INSTEAD}"
        )
    known = [gpu for gpu in found if gpu.capability != (0, 0)]
    if known and all(gpu.capability < LEAST for gpu in known):
        best = max(known, key=lambda gpu: gpu.capability)
        raise UserError(
            f"{best.name}: compute capability {_dotted(best.capability)}, expected {_dotted(LEAST)} or later; use another GPU, "
            f"{INSTEAD}"
        )
    newer = int(version.split(".")[0]) >= NEWER and all(gpu.capability >= NEWER_LEAST for gpu in known)
    return "cuda", "cuda" if newer else "cuda12"


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def hardware() -> str:
    """The PCI address of an NVIDIA GPU in this machine, driver or not; "" without one, or where nobody can tell."""
    for device in sorted(PCI.glob("*")):
        try:
            vendor, kind = (device / "vendor").read_text().strip(), (device / "class").read_text().strip()
        except OSError:
            continue
        if vendor == "0x10de" and kind.startswith("0x03"):
            return device.name
    return ""


def require_driver() -> None:
    """UserError where there is a GPU that nobody hides, and no driver that answers for it."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") is None and (place := hardware()):
        raise UserError(
            f"an NVIDIA GPU (PCI {place}) but nvidia-smi lists none: install NVIDIA's driver, {NEWER} or later, or reload it "
            f"after an update, {INSTEAD}"
        )


def main(argv: Sequence[str]) -> int:
    try:
        print(*builds(gpus()))
    except UserError as error:
        if "--device=cpu" not in argv:
            print(f"error: {error}", file=sys.stderr)
            return 2
        print("cpu cpu")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
