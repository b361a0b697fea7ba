"""Products of matrices for the reference: large ones by several threads.

OpenBLAS' own threads spin while they wait for each other: beside processes that compile, as on a GPU host, small products
take longer by several of them than by one. So a run gives OpenBLAS one thread there (harness/run/parent.py), and what is worth
several is divided here, among threads that sleep while they wait.
"""

import functools
import itertools
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np

LARGE = 5e8  # multiplications: some 50 ms by one thread


def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a @ b of matrices [m, k] and [k, n]."""
    (m, k), n = a.shape, b.shape[1]
    if THREADS == 1 or m * k * n < LARGE:
        return a @ b
    out = np.empty((m, n), np.result_type(a, b))
    if m > n:
        work = [(a[rows], b, out[rows]) for rows in _slices(m)]
    else:
        work = [(a, b[:, columns], out[:, columns]) for columns in _slices(n)]
    for _ in _pool().map(lambda part: np.matmul(part[0], part[1], out=part[2]), work):
        pass
    return out


def _threads() -> int:
    """Half of the processors; 1 where OpenBLAS has threads of its own."""
    return max(1, len(os.sched_getaffinity(0)) // 2) if os.environ.get("OPENBLAS_NUM_THREADS") == "1" else 1


THREADS = _threads()


def _slices(size: int) -> list[slice]:
    return [slice(*edge) for edge in itertools.pairwise(np.linspace(0, size, THREADS + 1, dtype=int))]


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(THREADS)
