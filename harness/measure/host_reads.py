"""How often a step brings a tensor to the host or waits for the device, by the frameworks' own ways to do so, on any device.

On a GPU the profiler sees each copy besides. On a CPU there is none to be seen, since the tensor lies there already; but the
same step on a GPU would wait for it. A bool() that looks for a NaN and an int() of a counter wait as much as a float() does, so
the dtype does not matter: `on_device` of the row's runtime says which tensors count.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator

import numpy as np

from harness.frameworks.runtimes import Runtime

WAYS = ("numpy", "item", "tolist", "cpu", "to", "__array__", "__float__", "__int__", "__bool__", "__index__")


@contextlib.contextmanager
def counted(runtime: Runtime) -> Iterator[list[str]]:
    """Collects the ways by which tensors of the row's framework, and no other's, were read inside, or the host waited for the
    device without reading one: one entry each, "item" or "synchronize"."""
    reads: list[str] = []
    owner = runtime.tensor_type
    with contextlib.ExitStack() as stack:
        for way in WAYS:
            if hasattr(owner, way):
                _replace(stack, owner, way, _noting(getattr(owner, way), way, reads, runtime))
        for way in ("asarray", "array"):  # of TensorFlow and JAX they read the memory itself
            _replace(stack, np, way, _noting(getattr(np, way), f"numpy.{way}", reads, runtime))
        for holder, way in runtime.waits:
            _replace(stack, holder, way, _waiting(getattr(holder, way), way, reads))
        yield reads


def _waiting(function: Callable, way: str, reads: list[str]) -> Callable:
    def waiting(*arguments, **keywords):
        before = len(reads)
        result = function(*arguments, **keywords)
        reads[before:] = [way]  # whatever it called in its turn
        return result

    return waiting


def _noting(function: Callable, way: str, reads: list[str], runtime: Runtime) -> Callable:
    def counts(value: object) -> bool:
        return isinstance(value, runtime.tensor_type) and runtime.on_device(value)

    @functools.wraps(function)
    def noting(*arguments, **keywords):
        if not arguments or not counts(arguments[0]):
            return function(*arguments, **keywords)
        before = len(reads)
        result = function(*arguments, **keywords)
        if way != "to" or not counts(result):  # it may have gone to another dtype, or device, alone
            reads[before:] = [way]  # whatever ways it took in its turn
        return result

    return noting


def _replace(stack: contextlib.ExitStack, owner: object, name: str, value: object) -> None:
    """Set an attribute until the stack ends; one that `owner` inherits is inherited again afterwards."""
    own = vars(owner).get(name)
    setattr(owner, name, value)
    stack.callback(setattr, owner, name, own) if own is not None else stack.callback(delattr, owner, name)
