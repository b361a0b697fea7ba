"""A record as a row's process leaves it, for the tests of what reads and writes records."""

from pathlib import Path

from harness.record import schema

TESTS = Path(__file__).resolve().parent
# Runs whose records have to stay readable: those of results/, and samples of what earlier commits wrote.
RUNS = sorted(
    path.parent for folder in (TESTS.parent / "results", TESTS / "records") for path in folder.glob("*/run.json")
)


def make(**changes):
    """An "ok" record with a step time and a proof, so that it validates."""
    given = dict(
        benchmark="ptb",
        row="keras",
        mode="train",
        device="cpu",
        precision="fp32",
        config={"CONFIG": "small", "UNITS": 200},
        blocks_ms=[[10.0, 11.0]],
        step_ms={"median": 10.5, "min": 10.0, "max": 11.0},
        proof={"ok": True, "outputs_err": 1e-6},
    )
    return schema.new_record(**{**given, **changes})
