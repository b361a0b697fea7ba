"""The frameworks that rows run in, each one configured for a row. Imports none of them itself."""

import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from harness.frameworks.profiles import Draws
from harness.record.frameworks import FRAMEWORKS


class Runtime(Protocol):
    """A framework as a row's process needs it: configured before its first tensor, once per process.

    Attributes:
        name: of harness.record.frameworks.FRAMEWORKS.
        device, precision: as given to `make`.
        device_name: the device in the framework's own words, such as "/GPU:0" or "cuda:0".
        tensor_type: the class of its tensors, those that a step is run on.
        keeps_compiled: environment variables, read when it is imported, that let it keep what it compiles in the folder "{}".
        draws: by which ops of its profiles random numbers are drawn.
        waits: (owner, name) of the functions by which a step would wait for the device, besides reading a tensor.
    """

    name: str
    device: str
    precision: str
    device_name: str
    tensor_type: type
    keeps_compiled: Mapping[str, str]
    draws: Draws
    waits: Sequence[tuple[Any, str]]

    def seed(self, seed: int) -> None:
        """Start the framework's own random numbers, such as dropout masks, anew."""

    def sync(self) -> None:
        """Return once everything launched on the device has ended."""

    def on_device(self, tensor: Any) -> bool:
        """Whether reading this one makes the host wait for the device; on a CPU, whether it would on a GPU."""

    def to_numpy(self, scalars: Sequence[Any]) -> Any:
        """What steps returned, [n], as a NumPy array on the host. Never inside a timed region."""

    def reset_memory_peak(self) -> None:
        """Let `memory_peak` begin anew."""

    def memory_peak(self) -> int | None:
        """Bytes at the allocator's peak since the last reset; None on a CPU."""

    def profile(self, function: Callable[[], object]) -> dict[str, Any]:
        """Run `function` and say what ran.

        {"ops": {op: count}, "kernels": {kernel name: ms on the device}, "to_host_bytes": copied from the device to the host, in
        copies of over profiles.SMALL_COPY bytes, "launches": how many kernels ran on a GPU, or ops on a CPU, copies left out,
        "syncs": how often the host waited for a GPU, by CUDA's own calls; None on a CPU}. A loop of unknown length has its
        condition copied in every step.
        """

    def small_steps(self) -> list[tuple[str, Callable[[], str | None]]]:
        """What a row needs of a machine, a step of each kind: (its name, a function that raises or returns a note)."""

    def environment(self) -> dict:
        """Versions of what is loaded, for the record: the framework's own, "cuda", "cudnn", "notes"."""


def make(framework: str, device: str, precision: str, threads: int, compiled: str | None = None) -> Runtime:
    """Import the framework and configure it for one row.

    Args:
        framework: of FRAMEWORKS; ValueError for another.
        device: "gpu" or "cpu".
        precision: "fp32", "tf32", "fp16" or "bf16".
        threads: of the operators on a CPU; the number of physical cores.
        compiled: folder for what XLA, Inductor and Triton compile, which a later process takes from there; None: no such folder.
            Where the user has set one of these variables, they stay as they are.
    """
    found = kind(framework)
    if finds_compiled(framework, compiled):
        os.environ.update({variable: value.format(compiled) for variable, value in found.keeps_compiled.items()})
    return found(device, precision, threads)


def finds_compiled(framework: str, compiled: str | None) -> bool:
    """Whether `make` gives the framework that folder; to be asked before. What lies there needs no compiling."""
    return bool(compiled) and not kind(framework).keeps_compiled.keys() & os.environ.keys()


def kind(framework: str) -> type[Runtime]:
    """The class that configures a framework of FRAMEWORKS; ValueError for another. Imports no framework."""
    if framework not in FRAMEWORKS:
        raise ValueError(f"framework {framework!r}: expected one of {', '.join(FRAMEWORKS)}")
    file, _, name = FRAMEWORKS[framework].runtime.partition(".")
    return getattr(importlib.import_module(f"harness.frameworks.{file}"), name)
