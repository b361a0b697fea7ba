"""Which frameworks there are, and which packages and environment variables concern the rows of one of them alone."""

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import NamedTuple


class Framework(NamedTuple):
    """What is different about the rows of one framework.

    Attributes:
        title: its name in tables.
        runtime: the class that configures it for a row, as file.Class of harness/frameworks/.
        packages: those whose versions concern its own rows alone.
        prefixes: how the environment variables begin that steer it; variables of no framework steer all.
        python: the oldest that it runs on here.
        cpu_devices: environment variables by which one process of it has "{}" devices on a CPU, where it can.
    """

    title: str
    runtime: str
    packages: tuple[str, ...]
    prefixes: tuple[str, ...]
    python: tuple[int, int] = (3, 10)
    cpu_devices: Mapping[str, str] = MappingProxyType({})


# By the name of the module that a row imports, which is also the name of its version in a record's environment.
FRAMEWORKS = {
    "tensorflow": Framework(
        "TensorFlow", "tensorflow.TensorFlowRuntime", ("tensorflow", "tensorflow-cpu"), ("TF_", "XLA_")
    ),
    "torch": Framework("PyTorch", "pytorch.TorchRuntime", ("torch",), ("TORCH", "PYTORCH_", "TRITON_")),
    "jax": Framework(
        "JAX",
        "jax.JaxRuntime",
        ("jax", "jaxlib"),
        ("JAX_", "XLA_"),
        (3, 11),
        {"XLA_FLAGS": "--xla_force_host_platform_device_count={}"},
    ),
}


def variables_of(frameworks: Collection[str], variables: Mapping[str, str]) -> dict[str, str]:
    """The variables of the environment that may steer a row of these frameworks: all but those of the others alone."""
    own = {prefix for name in frameworks for prefix in FRAMEWORKS[name].prefixes}
    others = tuple({prefix for framework in FRAMEWORKS.values() for prefix in framework.prefixes} - own)
    return {name: value for name, value in variables.items() if not name.startswith(others)}


def packages_of(framework: str, packages: Mapping[str, str]) -> dict[str, str]:
    """The packages on which a row of that framework depends: all but those of the other frameworks."""
    others = packages_without([framework])
    return {name: version for name, version in packages.items() if name not in others}


def packages_without(frameworks: Collection[str]) -> set[str]:
    """The packages that concern the rows of other frameworks alone."""
    return {package for name, other in FRAMEWORKS.items() if name not in frameworks for package in other.packages}
