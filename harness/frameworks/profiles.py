"""What the profiles of several frameworks have in common: which copies from the device to the host count, and their bytes."""

import re

SCRATCH = "LSTM_BENCH_SCRATCH"  # environment variable of a row's process: a folder for profiles, which goes with it
SMALL_COPY = 64  # bytes: the condition of a loop, or its counter, that XLA brings to the host step by step


def counted(size: int) -> int:
    """The bytes of one copy to the host; 0 for one of at most SMALL_COPY bytes."""
    return size if size > SMALL_COPY else 0


def bytes_to_host(details: str) -> int:
    """Of what XLA's profiler, TensorFlow's and JAX', says of a copy: "kind_src:device kind_dst:pinned size:400 …"."""
    found = re.search(r"kind_src:device kind_dst:(?:pinned|pageable|host)\b.*\bsize:(\d+)", details)
    return counted(int(found[1])) if found else 0
