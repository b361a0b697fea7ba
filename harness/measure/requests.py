"""A row that answers requests: proven and timed from the request on the host to the answer there."""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from harness.measure import clocks, latency
from harness.measure.proof import Proof
from harness.measure.row_process import RowProcess
from harness.record import machine


class RequestMeasurement(RowProcess):
    """A row that answers requests."""

    def requests(self, server: Any, requests: Sequence[np.ndarray]) -> dict[str, dict]:
        """Prove and time a server, request by request: from the request on the host to the answer there.

        Args:
            server: `answer(request)`, which returns a NumPy array of its own, and `restore()`, which starts a stream anew;
                `profile(function)`, as of a Runtime, where another program than the row's framework answers.
            requests: float32 [batch, steps, features] each, taken in turn; `restore` is called before the first of a round.
                What they come to is reference["answers"] [requests, …]: an answer each.

        Returns:
            {"request": its part}, as `steps` does.
        """
        c, proof = self._protocol, Proof(self.precision)
        self._phases.over("model")

        def hold(when: str) -> None:
            """Two rounds: the second one starts from what the first one has left."""
            for _ in range(2):
                server.restore()
                proof.answers(when, {k: server.answer(requests[k]) for k in range(len(requests))}, expected)

        with self._turns.device(alone=True):
            server.restore()
            called_s, _ = clocks.seconds_of(lambda: server.answer(requests[0]), self.runtime.sync)
            self._phases.over("first call")
        part: dict[str, Any] = {"first_call_s": called_s}
        expected = self.reference["answers"]
        with self._turns.device():
            hold("before timing")
            self._phases.over("proof: outputs")
        if not proof.failures:
            self.runtime.reset_memory_peak()
            with self._turns.timed():
                self._phases.over("waiting")
                timed = clocks.time_requests(
                    server.answer,
                    requests,
                    sync=self.runtime.sync,
                    restore=server.restore,
                    warmup_batches=c["WARMUP_BATCHES"],
                    warmup_limit_s=c["WARMUP_LIMIT_S"],
                    count=functools.partial(latency.requests_of, c["REQUESTS"]),
                    blocks=c["BLOCKS"],
                    kept=latency.sampled,
                    meter=self._meter,
                )
                memory = {"resident": machine.resident_bytes(), **(self._memory() or {})}
                self._phases.over("timed")
            proof.clock(timed.lag_s, timed.lag_limit_s, timed.at_work)
            proof.answers("while the clock ran", timed.answers, expected)
            with self._turns.device():
                hold("after timing")
                server.restore()
                profile = getattr(server, "profile", self.runtime.profile)(lambda: server.answer(requests[0]))
                kernel = self.kernel._replace(rest_ops={}, rest_kernels="").of_mode("forward", server)
                proof.what_ran(profile, kernel, self.device)
                self._phases.over("proof: after")
            found = latency.latency_of([s for own in timed.seconds for s in own], timed.joules)
            few = [f"fewer than {c['REQUESTS']:,} requests, which would take over {latency.LIMIT_S:g} s"]
            part |= {
                "blocks_ms": [1e3 * sum(own) / len(own) for own in timed.seconds],
                "latency": found,
                "items_per_batch": 1,
                "unit": "requests/s",
                "warmup": [{"process": self.process, **timed.warmup._asdict()}],
                "clocks": [self._clock("timed")],
                "memory_peak_bytes": memory,
                "notes": few if found["requests"] < c["REQUESTS"] else [],
            }
        self._phases.over("waiting")
        print(self._phases, flush=True)
        return {"request": self._finish(part, proof)}
