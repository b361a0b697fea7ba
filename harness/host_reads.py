"""How often a step brings a tensor to the host, by the frameworks' own ways to do so, on any device.

On a GPU the profiler sees each copy besides. On a CPU there is none to be seen, since the tensor lies there already; but the
same step on a GPU would wait for it. Floating-point tensors count: integers are what frameworks themselves look at, such
as the axes of a sum.
"""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator

import numpy as np

WAYS = ("numpy", "item", "tolist", "cpu", "__array__", "__float__", "__int__", "__bool__", "__index__")


def _tensors() -> list[type]:
    """The classes of the tensors of the frameworks that are loaded."""
    found = []
    if "tensorflow" in sys.modules:
        found.append(type(sys.modules["tensorflow"].constant(0)))
    if "torch" in sys.modules:
        found.append(sys.modules["torch"].Tensor)
    if "jax" in sys.modules:
        found.append(type(sys.modules["jax"].numpy.zeros(())))
    return found


@contextlib.contextmanager
def counted() -> Iterator[list[str]]:
    """Collects the ways by which floating-point tensors were read inside: one entry each, such as "item"."""
    reads: list[str] = []
    tensors = tuple(_tensors())
    with contextlib.ExitStack() as stack:
        for owner in tensors:
            for way in WAYS:
                if hasattr(owner, way):
                    _replace(stack, owner, way, _noting(getattr(owner, way), way, reads, tensors))
        for way in ("asarray", "array"):  # of TensorFlow and JAX they read the memory itself
            _replace(stack, np, way, _noting(getattr(np, way), f"numpy.{way}", reads, tensors))
        yield reads


def _noting(function: Callable, way: str, reads: list[str], tensors: tuple) -> Callable:
    @functools.wraps(function)
    def noting(*arguments, **keywords):
        if not arguments or not isinstance(arguments[0], tensors) or "float" not in str(arguments[0].dtype):
            return function(*arguments, **keywords)
        before = len(reads)
        result = function(*arguments, **keywords)
        reads[before:] = [way]  # whatever ways it took in its turn
        return result

    return noting


def _replace(stack: contextlib.ExitStack, owner: object, name: str, value: object) -> None:
    """Set an attribute until the stack ends; one that `owner` inherits is inherited again behind it."""
    own = vars(owner).get(name)
    setattr(owner, name, value)
    stack.callback(setattr, owner, name, own) if own is not None else stack.callback(delattr, owner, name)
