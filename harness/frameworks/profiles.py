"""What the profiles of several frameworks have in common: which copies from the device to the host count, and their bytes;
which events are launches and synchronisations."""

import re
from collections.abc import Iterable
from typing import NamedTuple

SCRATCH = "LSTM_BENCH_SCRATCH"  # environment variable of a row's process: a folder for profiles, which goes with it
SMALL_COPY = 64  # bytes: the condition of a loop, or its counter, that XLA brings to the host step by step


class Draws(NamedTuple):
    """By which ops of a profile random numbers are drawn, as regular expressions.

    Attributes:
        ops: one that draws them.
        within: one that may draw the masks between the layers itself.
        together: one beside which a single draw may stand for all masks.
        each_step: whether ops are counted as launched, not once per graph or program, which may hold many steps.
    """

    ops: str
    within: str = "(?!)"
    together: str = "(?!)"
    each_step: bool = False


def counted(size: int) -> int:
    """The bytes of one copy to the host; 0 for one of at most SMALL_COPY bytes."""
    return size if size > SMALL_COPY else 0


def bytes_to_host(details: str) -> int:
    """Of what XLA's profiler, TensorFlow's and JAX', says of a copy: "kind_src:device kind_dst:pinned size:400 …"."""
    found = re.search(r"kind_src:device kind_dst:(?:pinned|pageable|host)\b.*\bsize:(\d+)", details)
    return counted(int(found[1])) if found else 0


PROFILED = "lstm_bench_profiled"  # the mark around what is profiled: what the profiler itself waits for lies outside
COMMUNICATION = re.compile(r"nccl", re.IGNORECASE)  # kernels by which GPUs communicate
ALL_REDUCE = re.compile(r"nccl\w*AllReduce")  # by which they add up: ncclDevKernel_AllReduce_Sum_f32_RING_LL
NO_KERNEL = re.compile(r"mem(cpy|set)", re.IGNORECASE)
SYNC = re.compile(r"cu(da)?(Stream|Device|Ctx|Context|Event)Synchronize(_\w+)?")  # of CUDA's runtime and driver


def is_kernel(name: str) -> bool:
    """Whether an event of a GPU's stream is a kernel, and no copy or memset."""
    return not NO_KERNEL.match(name)


def syncs_within(marks: Iterable[tuple[float, float]], calls: Iterable[tuple[float, float]]) -> int:
    """How many synchronisations the host made inside of the marks; each is (start, end) on the host's clock.

    One that calls another, as CUDA's runtime does its driver, counts once.
    """
    marks, seen, end = list(marks), 0, float("-inf")
    for start, stop in sorted(calls):
        if start >= end and any(first <= start <= last for first, last in marks):
            seen, end = seen + 1, stop
    return seen
