"""What the small steps share by which each framework tries a machine: harness/run/check.py."""

from typing import Any

import numpy as np

from harness.errors import UserError
from harness.record import machine

SIZE = 64  # of every product, batch and layer


def expect(what: str, found: Any, wanted: Any) -> None:
    """ValueError where two arrays differ."""
    if not np.allclose(found, wanted, rtol=1e-3, atol=1e-3):
        raise ValueError(f"{what}: wrong result, by up to {np.max(np.abs(np.asarray(found) - wanted)):.2g}")


def numbers() -> np.ndarray:
    """[SIZE, SIZE] float32."""
    return np.random.default_rng(0).uniform(-1, 1, (SIZE, SIZE)).astype(np.float32)


def all_gpus(seen: int) -> str:
    """How many GPUs a framework sees; UserError where the driver shows more."""
    shown = machine.gpu_count()
    if seen < shown:
        raise UserError(
            f"the driver shows {shown} GPUs but it sees {seen}; hide the others with CUDA_VISIBLE_DEVICES, such as "
            "CUDA_VISIBLE_DEVICES=0"
        )
    return str(seen)
