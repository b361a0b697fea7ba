"""A benchmark of requests, measured at points: how long a request is, and how many sequences it has. `points.main(BENCHMARK)`.

A point is written STEPS:BATCH, such as 50:8, or stream:BATCH: one step at a time, each going on where the last one ended. Its
constants are TIME_STEPS, BATCH_SIZE and STREAM; its name in records is ptb_medium-steps_50-batch_8, or ptb_medium-stream-batch_8.
Otherwise as harness.run.sweep: a row runs all of its points in one process.
"""

from collections.abc import Sequence

from harness.errors import UserError
from harness.run import benchmark, sweep
from harness.run.limits import LIMITS
from harness.run.script import Benchmark


def main(script: Benchmark, argv: Sequence[str] | None = None) -> int:
    """As harness.run.benchmark.main."""
    return benchmark.main(script, argv, Points)


def read_points(text: str) -> dict[str, dict[str, int | bool]]:
    """{end of a point's name: its constants}, once each, of a text such as "stream:1 50:8". Raises UserError."""
    found: dict[str, dict[str, int | bool]] = {}
    for part in text.split():
        steps, _, batch = part.partition(":")
        stream = steps == "stream"
        try:
            shape = {
                "TIME_STEPS": 1 if stream else LIMITS["TIME_STEPS"].read(steps),
                "BATCH_SIZE": LIMITS["BATCH_SIZE"].read(batch),
            }
        except ValueError as error:
            expected = f"STEPS:BATCH such as 50:8, or stream:8; each has to be {error}"
            raise UserError(f"--points: {part[:60]!r}: expected {expected}") from None
        name = "stream" if stream else f"steps_{shape['TIME_STEPS']}"
        found[f"{name}-batch_{shape['BATCH_SIZE']}"] = {**shape, "STREAM": stream}
    if not found:
        raise UserError("--points: none is given; expected such as 'stream:1 50:8'")
    return found


class Points(sweep.Sweep):
    """Runs each row at all points."""

    def _shapes(self):
        points = read_points(self.constants["POINTS"])
        return {f"{self.constants['CONFIG']}-{name}": shape for name, shape in points.items()}

    def _matmul(self):
        """No share is taken: one request of a small batch is far from any."""
