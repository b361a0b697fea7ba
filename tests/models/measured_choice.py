"""Times of both implementations of WavefrontLSTM in results/; where the constants of models/wavefront/choice.py come from.

python -m tests.models.measured_choice     # prints the constants of a fit, and every point: measured and estimated ms
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from models.wavefront import choice, tiling
from models.wavefront.tiling import DTYPE_CODES, Work

RESULTS = Path(__file__).resolve().parents[2] / "results"
CHIPS = {
    "NVIDIA H200": (132, 232448, 90)
}  # by the name in a record, what nvrtc.chip() finds: of other GPUs no point is read
DTYPES = {"tf32": "tf32", "fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
SIZES = ("NUM_LAYERS", "UNITS", "BATCH_SIZE", "TIME_STEPS")


class Point(NamedTuple):
    """A size at which both were measured.

    Attributes:
        name: of the records, without their row.
        num_layers, time: of the stack; steps.
        work: of one forward step of all layers.
        stack: whether the stack alone was timed, forward and backward.
        dropout: whether there is some between the layers.
        ms: of a step, by implementation; None: it failed.
    """

    name: str
    num_layers: int
    time: int
    work: Work
    stack: bool
    dropout: bool
    ms: dict[str, float | None]


def points(results: Path = RESULTS) -> Iterator[Point]:
    for path in sorted(results.glob("*/rows/*.wavefront_persistent.*.gpu.*.json")):
        other = path.with_name(path.name.replace(".wavefront_persistent.", ".wavefront."))
        if not other.exists():
            continue
        ours, xla = (json.loads(each.read_text()) for each in (path, other))
        config = xla["config"]
        if xla["environment"].get("gpu") not in CHIPS or not all(name in config for name in SIZES):
            continue
        num_layers, units, batch, time = (config[name] for name in SIZES)
        dtype_code = DTYPE_CODES[DTYPES[xla["precision"]]]
        padded = tiling.padded_units(units, Work(1, batch, units, dtype_code, False).itemsize)
        ms = {
            name: record["step_ms"]["median"] if record["status"] == "ok" else None
            for name, record in (("xla", xla), ("persistent", ours))
        }
        dropout = xla["mode"] == "train" and config.get("KEEP_PROB", 1) < 1
        work = Work(num_layers, batch, padded, dtype_code, False)
        yield Point(f"{path.parts[-3]} {other.name}", num_layers, time, work, xla["mode"] == "stack", dropout, ms)


def estimates(point: Point) -> dict[str, float]:
    """ms of the stack, forward and backward, by implementation; inf where the kernels do not fit."""
    together = min(
        (1,) if point.dropout else (1, point.num_layers),
        key=lambda lanes: tiling.stack_us(
            point.num_layers, point.time, point.work._replace(lanes=lanes), choice.nvrtc.chip()
        ),
    )
    sizes = point.num_layers, point.time, point.work
    return {"xla": choice.xla_us(*sizes) / 1e3, "persistent": choice.persistent_us(*sizes, together) / 1e3}


def fit(measured: list[Point]) -> dict[str, dict[str, float]]:
    """Both tables of constants, none below 0, with the least mean square of relative errors."""
    from scipy.optimize import nnls  # comes with scikit-learn

    def solved(names, amounts, us):
        amounts, us = np.array(amounts), np.array(us)
        return dict(zip(names, nnls(amounts / us[:, None], np.ones(len(us)))[0], strict=True))

    stacks = [point for point in measured if point.stack]
    xla = [choice.terms(point.num_layers, point.time, point.work) for point in stacks]
    ours = [point for point in stacks if point.ms["persistent"]]
    rest, amounts = [], []
    for point in ours:
        by_hand, kernels = dict(choice.PERSISTENT_US), 1e3 * estimates(point)["persistent"]
        gradients = choice.gradients_us(point.num_layers, point.time, point.work)
        kernels -= by_hand["call"] + by_hand["gradients"] * gradients
        us = 1e3 * point.ms["persistent"]
        amounts.append([1 / us, gradients / us])
        rest.append(1 - kernels / us)
    return {
        "XLA_US": solved(choice.XLA_US, [list(each.values()) for each in xla], [1e3 * p.ms["xla"] for p in stacks]),
        "PERSISTENT_US": dict(zip(choice.PERSISTENT_US, nnls(np.array(amounts), np.array(rest))[0], strict=True)),
    }


def main() -> int:
    choice.nvrtc.chip = lambda: choice.nvrtc.Chip(*CHIPS["NVIDIA H200"])
    measured = list(points())
    for name, constants in fit(measured).items():
        print(name, {key: round(float(us), 3) for key, us in constants.items()})
    for point in measured:
        found = estimates(point)
        print(point.name, {name: (point.ms[name], round(ms, 3)) for name, ms in found.items()})
    return 0


if __name__ == "__main__":
    sys.exit(main())
