"""A record as a row's process leaves it, for the tests of what reads and writes records."""

from pathlib import Path

from harness.record import schema

ERRORS = {  # by mode
    "fit": ("outputs", "gradients", "update", "loss"),
    "train": ("outputs", "gradients", "update", "loss", "spread"),
    "forward": ("outputs", "loss", "spread"),
    "stack": ("outputs", "gradients", "loss", "spread"),
    "request": ("outputs",),
}
LATENCY = {"p50_ms": 10.4, "p99_ms": 11.0, "p999_ms": None, "max_ms": 12.0, "requests": 200, "joules": None}
TESTS = Path(__file__).resolve().parent
# Runs whose records have to stay readable: those of results/, and samples of what earlier commits wrote.
RUNS = sorted(
    path.parent for folder in (TESTS.parent / "results", TESTS / "records") for path in folder.glob("*/run.json")
)


def proof_of(mode="train", device="cpu", **changes):
    """A proof that held, with every error that a record of this mode has."""
    kernel = {"ops": {}, "kernels": {}, "launches": 7, "syncs": 0 if device == "gpu" else None}
    errors = {f"{name}_err": 1e-6 for name in ERRORS[mode]}
    return {"ok": True, **errors, "limit": dict.fromkeys(ERRORS["train"], 1e-2), "kernel": kernel, **changes}


def training_of(blocks_ms):
    """What a whole training has besides, with ten batches in each of its epochs."""
    epoch_s = [10 * ms / 1e3 for ms in blocks_ms[0]]
    losses, accuracy = [1.0 for _ in epoch_s], {"test": 0.9}
    return {"epoch_s": epoch_s, "fit_s": sum(epoch_s), "losses": losses, "accuracy": accuracy}


def make(**changes):
    """An "ok" record with a step time and a proof, so that it validates; its throughput is that of its step_ms."""
    given = dict(
        benchmark="ptb",
        row="keras",
        mode="train",
        device="cpu",
        precision="fp32",
        config={"CONFIG": "small", "UNITS": 200},
        blocks_ms=[[10.0, 11.0]],
        step_ms={"median": 10.5, "min": 10.0, "max": 11.0},
        proof=proof_of(changes.get("mode", "train"), changes.get("device", "cpu")),
        items_per_batch=100,
    )
    if changes.get("mode") == "request":
        given |= {"latency": LATENCY, "items_per_batch": 1, "throughput": {"value": 1e3 / 10.5, "unit": "requests/s"}}
    given |= changes
    if isinstance(given["step_ms"], dict) and isinstance(given["step_ms"].get("median"), int | float):
        given.setdefault("throughput", {"value": 100 / given["step_ms"]["median"] * 1e3, "unit": "words/s"})
    return schema.new_record(**given)
