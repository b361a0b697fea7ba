"""One row's process: its framework, device, clocks and reference, and what every part of its record has. Knows no kind of row."""

import contextlib
import functools
import hashlib
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from harness.frameworks import runtimes
from harness.measure import clocks, dropout
from harness.measure.proof import CURVE_STEPS, Kernel, Proof
from harness.measure.references import load_reference, wait_for
from harness.record import machine

UTILISATION_S = 2.0  # a timed block is too short for NVML
CURVE_NOTE = (
    "the losses of {0} of {1} steps were compared with the reference's: from there on one rounding moves them too far"
)
BY_FLOAT16 = (
    "in TensorFloat-32's place our kernels multiplied float16 times powers of two, of as many bits: "
    "docs/wavefront-kernels.md"
)
BY_PAIRS = "our kernels multiplied sums of two float16 times powers of two, of 23 bits: docs/wavefront-kernels.md"
OF_KERNELS = {"_by_float16": BY_FLOAT16, "_by_pairs_of_float16": BY_PAIRS}  # by the end of a kernel's name
FIGURES = ("blocks_ms", "warmup", "items_per_batch", "unit", "fit_s", "epoch_s", "accuracy", "perplexity",
           "test_perplexity_by_seed", "share_of_matmul", "latency", "one_step", "joules")  # fmt: skip


def digest(weights: Mapping[str, np.ndarray]) -> str:
    """Of weights in the canonical form: the same for the same numbers."""
    found = hashlib.sha256()
    for name in sorted(weights):
        found.update(name.encode() + np.ascontiguousarray(weights[name]).tobytes())
    return found.hexdigest()[:16]


def noted(part: dict, trial: Any, mode: str) -> dict:
    """A part with what the trial says of itself, where it does."""
    notes = trial.notes(mode) if hasattr(trial, "notes") else []
    return {**part, "notes": [*part.get("notes", []), *notes]}


class Turns(Protocol):
    """How the processes of a run share the device: harness.run.processes.Turns."""

    def device(self, alone: bool = False) -> contextlib.AbstractContextManager:
        """To use it, beside a few others or, for what tunes itself by its own times, alone."""

    def waiting(self) -> contextlib.AbstractContextManager:
        """For what another process computes."""

    def timed(self) -> contextlib.AbstractContextManager:
        """To time, with everything else at rest."""


class Alone:
    """Of a process that shares it with none."""

    def device(self, alone: bool = False) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()

    timed = waiting = device


class RowProcess:
    """What all kinds of measurement start from and finish with.

    Attributes:
        runtime: the row's framework, configured for it (harness/frameworks/runtimes.py).
        data: what the benchmark's `load` returned.
        reference: {"outputs": {name: array}, "losses": [n], "gradients": {…}, "updates": {…}, "forward_losses": [n]}.
        device, precision: of this row.
        process: number of this process among the row's, from 0. The first one is held to the whole reference; the others time the
            same weights by the same ops and kernels, and are held to the reference's losses. A whole training of PTB is proven
            on these weights too, and begins with those of its own seed.

    Args:
        turns: of a process beside which others of the run prepare; None: it is alone.
    """

    def __init__(
        self,
        job: Mapping[str, Any],
        data: Any,
        expected_ops: Mapping[str, Any],
        framework: str = "tensorflow",
        turns: "Turns | None" = None,
    ) -> None:
        self.device, self.precision, self.process = job["device"], job["precision"], job["process"]
        self._turns = turns or Alone()
        self._phases = clocks.Phases(job.get("started"))
        self._phases.over("start and data")
        self.data, self.kernel = data, Kernel(**expected_ops)
        self._protocol = job["protocol"]
        self._matmul_flops = job["matmul_flops"]
        cores, compiled = machine.physical_cores(), job.get("compiled")
        # Compilers choose kernels by how fast they are: a process that finds nothing compiled has the device alone meanwhile.
        self._compiles = not (self.process and runtimes.finds_compiled(framework, compiled))
        self.runtime = runtimes.make(framework, self.device, self.precision, cores, compiled)
        self._phases.over("framework")
        self._reference_path = Path(job["reference"])
        self._clocks = [self._clock("start")]
        self._cpu = machine.CpuShare()

    @functools.cached_property
    def reference(self) -> dict[str, Any]:
        """When it is there: another process may be computing it."""
        with self._turns.waiting():
            path = wait_for(self._reference_path)
        found = load_reference(path)
        self._phases.over("reference")
        return found

    def _prove_dropout(self, trial: Any, proof: Proof, ops: Mapping[str, float], steps: int) -> None:
        """Where the workload has it: by the ops of so many profiled steps, and in the first process by losses."""
        if "dropout_losses" not in self.reference:
            return
        places = int(self.reference["dropout_places"])
        proof.dropout(dropout.masks_not_drawn(ops, self.runtime.name, places, steps))
        if self.process == 0:
            losses = trial.dropout_losses(int(self.reference["dropout_draws"]))
            proof.dropout(dropout.wrong_losses(losses, self.reference["dropout_losses"], proof.limit.loss))

    def _meter(self) -> float | None:
        """Joules that the GPU has taken so far; None without one, or where it does not count them."""
        return machine.gpu_joules() if self.device == "gpu" else None

    def _clock(self, when: str) -> dict | None:
        state = machine.gpu_state() if self.device == "gpu" else None
        return state and {"process": self.process, "when": when, **state}

    def _memory(self) -> dict | None:
        if self.device != "gpu":
            return None
        return {"allocator": self.runtime.memory_peak(), "nvml": machine.gpu_memory_used()}

    def _utilisation(self, work: Callable[[], Any]) -> float | None:
        """Percent of the time in which a kernel ran, during `work` of about UTILISATION_S."""
        with machine.UtilisationSampler() as sampler:
            work()
        return sampler.percent

    def _share(self, flops: int, blocks_ms: list[float]) -> float | None:
        if not self._matmul_flops or not blocks_ms:
            return None
        return flops / (np.median(blocks_ms) / 1e3) / self._matmul_flops

    def _finish(self, part: dict, proof: Proof) -> dict:
        part["proof"] = proof.record()
        part["status"] = "failed" if proof.failures else "ok"
        part["reason"] = part["proof"]["reason"]
        part["losses"] = [loss if math.isfinite(loss) else None for loss in part.get("losses", [])]
        if (compared := part["proof"]["curve_steps"]) < CURVE_STEPS:
            part["notes"] = [*part.get("notes", []), CURVE_NOTE.format(compared, CURVE_STEPS)]
        for end, note in OF_KERNELS.items():
            if any(name.endswith(end) for name in proof.kernel.get("kernels", ())):
                part["notes"] = [*part.get("notes", []), note]
        if self.device == "cpu" and self._cpu.others_percent() > machine.OTHERS_PERCENT:
            part["notes"] = [*part.get("notes", []), machine.OTHERS_NOTE]
        part["clocks"] = [clock for clock in (*self._clocks, *part.get("clocks", []), self._clock("end")) if clock]
        part["environment"] = {**machine.facts(self.device), **self.runtime.environment(), "data": self.data.facts}
        if proof.failures:  # an unproven row has no figures
            for key in FIGURES:
                part.pop(key, None)
        return part
