"""The frameworks that rows run in, each one configured for a row. Imports none of them itself."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

SMALL_COPY = 64  # bytes: the condition of a loop, or its counter, that XLA brings to the host step by step
# framework: the packages (of harness.record.machine.PACKAGES) whose versions concern its own rows alone.
FRAMEWORKS = {"tensorflow": ("tensorflow", "tensorflow-cpu"), "torch": ("torch",), "jax": ("jax", "jaxlib")}
# framework: how the variables of the environment begin (of harness.record.machine.STEERING) that steer it; the rest steer all.
PREFIXES = {"tensorflow": ("TF_", "XLA_"), "torch": ("TORCH", "PYTORCH_", "TRITON_"), "jax": ("JAX_", "XLA_")}


class Runtime(Protocol):
    """A framework as a row's process needs it: configured before its first tensor, once per process.

    Attributes:
        name: of FRAMEWORKS.
        device, precision: as given to `make`.
        device_name: the device in the framework's own words, such as "/GPU:0" or "cuda:0".
        tensor_type: the class of its tensors, those that a step is run on.
    """

    name: str
    device: str
    precision: str
    device_name: str
    tensor_type: type

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

    def profile(self, function: Callable[[], object]) -> dict[str, dict[str, float]]:
        """Run `function` and tell what ran.

        {"ops": {op: count}, "kernels": {kernel name: ms on the device}, "to_host_bytes": copied from the device to the host, in
        copies of over SMALL_COPY bytes: a loop whose length is not known beforehand has its condition copied in every step}.
        """

    def environment(self) -> dict:
        """Versions of what is loaded, for the record: the framework's own, "cuda", "cudnn", "notes"."""


def make(framework: str, device: str, precision: str, threads: int) -> Runtime:
    """Import the framework and configure it for one row.

    Args:
        framework: of FRAMEWORKS; ValueError for another.
        device: "gpu" or "cpu".
        precision: "fp32", "tf32" or "fp16".
        threads: of the operators on a CPU; the number of physical cores.
    """
    if framework == "tensorflow":
        from harness.frameworks.tensorflow import TensorFlowRuntime

        return TensorFlowRuntime(device, precision, threads)
    if framework == "torch":
        from harness.frameworks.pytorch import TorchRuntime

        return TorchRuntime(device, precision, threads)
    if framework == "jax":
        from harness.frameworks.jax import JaxRuntime

        return JaxRuntime(device, precision, threads)
    raise ValueError(f"framework {framework!r}: expected one of {', '.join(FRAMEWORKS)}")


def variables_of(frameworks: Collection[str], variables: Mapping[str, str]) -> dict[str, str]:
    """The variables of the environment that may steer a row of these frameworks: all but those of the others alone."""
    own = {prefix for name in frameworks for prefix in PREFIXES[name]}
    others = tuple({prefix for prefixes in PREFIXES.values() for prefix in prefixes} - own)
    return {name: value for name, value in variables.items() if not name.startswith(others)}


def packages_of(framework: str, packages: Mapping[str, str]) -> dict[str, str]:
    """The packages on which a row of that framework depends: all but those of the other frameworks."""
    others = {name for other, names in FRAMEWORKS.items() if other != framework for name in names}
    return {name: version for name, version in packages.items() if name not in others}
