"""A row whose replicas train together: every worker goes through the way of a row (steps.py), in step with all others.

What a worker decides by its own clock all of them have to decide alike, or they wait for each other for ever. So the first
worker's times count; a row fails in all workers where it fails in one; and a block took as long as it did where it took longest.
After the timed blocks every replica's weights have to be the same, bit by bit.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from harness.frameworks import cuda_libraries
from harness.frameworks.profiles import ALL_REDUCE, COMMUNICATION
from harness.measure.beats import STEPS, WORKS
from harness.measure.group import Group
from harness.measure.proof import Proof
from harness.measure.row_process import digest
from harness.measure.steps import StepMeasurement
from harness.record import machine


class ReplicatedMeasurement(StepMeasurement):
    """The same for replicas.

    Attributes:
        group: this row's workers.
        gpus: over how many devices the row trains.
    """

    def __init__(self, job: Mapping[str, Any], *arguments: Any) -> None:
        self.gpus, self._link = job["replicas"]["gpus"], job["replicas"]["link"]
        self.group = Group.of_job(job)
        self._communication_ms: float | None = None  # of a step; measured in a row's first process
        super().__init__(job, *arguments)
        getattr(self.runtime, "over_all_devices", lambda: None)()  # of one process that has several

    def steps(self, trial: Any, *arguments: Any) -> dict[str, dict]:
        """As of StepMeasurement, of one mode, "train"; the part says what the replicas are."""
        self.group.at(WORKS)
        parts = super().steps(trial, *arguments, details=False)
        for part in parts.values():
            part["replicas"] = self._about()
        return parts

    def _about(self) -> dict[str, Any]:
        """Of the record: every GPU, how they are linked, the library that adds up, and the hosts."""
        found = machine.gpus() if self.device == "gpu" else []
        everywhere = self.group.told([gpu.name for gpu in found])
        return {
            "gpus": self.gpus,
            "workers": self.group.size,
            "hosts": self.group.hosts,
            "names": [name for own in everywhere for name in own],
            "link": self._link,
            "nccl": cuda_libraries.nccl() if self.device == "gpu" else None,
            "communication_ms": self._communication_ms,
        }

    # -- in step -------------------------------------------------------------------------------------------------------

    def _agree(self, value: Any) -> Any:
        return self.group.agree(value)

    def _meter(self) -> None:
        """Not read: it counts one GPU."""

    def _losses(self, block: Sequence) -> np.ndarray:
        return self.group.mean(super()._losses(block))

    def _shared(self, proof: Proof) -> None:
        """What has failed in one worker has failed in all."""
        found: dict[str, str] = {}
        for rank, failures in enumerate(self.group.told(proof.failures)):
            for check, why in failures.items():
                named = self.group.size > 1 and not why.startswith("worker ")
                found.setdefault(check, f"{self.group.named(rank)}: {why}" if named else why)
        proof.failures = found

    def _prove(self, trial: Any, mode: str) -> tuple[Proof, dict]:
        proof, profile = super()._prove(trial, mode)
        kernels = profile["kernels"]
        if self.device == "gpu" and self.gpus > 1 and not any(map(ALL_REDUCE.search, kernels)):
            proof.failures.setdefault(
                "kernel", f"no kernel on the GPU matches {ALL_REDUCE.pattern}: nothing was added up"
            )
        self._shared(proof)
        return proof, {**profile, "launches": self._agree(profile["launches"])}

    def _time(self, trial: Any, mode: str, proof: Proof, *arguments: Any) -> tuple[dict, int]:
        self.group.at(STEPS)
        times, size = super()._time(trial, mode, proof, *arguments)
        self.group.at(WORKS)
        times["blocks_ms"] = [max(block) for block in zip(*self.group.told(times["blocks_ms"]), strict=True)]
        self._hold_weights(trial, proof)
        self._shared(proof)
        return times, size

    def _after_blocks(self, trial: Any, mode: str, proof: Proof, *arguments: Any) -> tuple[Mapping[str, Any], int]:
        profile, steps = super()._after_blocks(trial, mode, proof, *arguments)
        self._shared(proof)
        if self.device == "gpu":
            # A kernel of NCCL's waits for the other GPUs: what it takes itself is what it takes where it waits least.
            own = sum(ms for name, ms in profile["kernels"].items() if COMMUNICATION.search(name))
            self._communication_ms = min(self.group.told(own / (self.gpus // self.group.size) / steps))
        return profile, steps

    # -- what only replicas are held to --------------------------------------------------------------------------------

    def _hold_weights(self, trial: Any, proof: Proof) -> None:
        """Fail where a replica's weights are not the first one's, bit by bit."""
        own: Sequence = getattr(trial, "own_weights", list)()
        every = [weights for worker in self.group.told([_digests(weights) for weights in own]) for weights in worker]
        for number, weights in enumerate(every[1:], 1):
            other = [k for k, pair in enumerate(zip(every[0], weights, strict=True)) if pair[0] != pair[1]]
            if other:
                by = max(self._difference(own, k, number) for k in other)
                why = f"replica {number} has other weights than replica 0: tensors {other}, by up to {by:.2g}"
                proof.failures.setdefault("replicas", f"after the timed blocks {why}")

    def _difference(self, own: Sequence, tensor: int, number: int) -> float:
        """Of a replica's tensor from the first one's, by the largest of its elements."""
        every = np.concatenate(self.group.gather(np.stack([weights[tensor] for weights in own]).astype(np.float64)))
        return np.abs(every[number] - every[0]).max() / max(np.abs(every[0]).max(), np.finfo(float).tiny)


def _digests(weights: Sequence[np.ndarray]) -> list[str]:
    return [digest({"": array}) for array in weights]
