"""One row's process: prove the callable, time it, say what was found. Knows no particular LSTM."""

import contextlib
import functools
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from harness.frameworks import runtimes
from harness.measure import after_blocks, clocks, dropout, fits, host_reads, latency
from harness.measure.proof import CURVE_STEPS, TO_HOST_LIMIT, UPDATE_STEPS, Kernel, Proof
from harness.measure.references import load_reference, wait_for
from harness.record import machine

UTILISATION_S = 2.0  # a timed block is too short for NVML
LOSSES_KEPT = 100
AROUND_SHARE = 0.1  # of a fit's time, outside of its steps: from here on a row says so
AROUND_NOTE = "over a tenth of the fit's time lies around its steps and validations: see docs/reading-tables.md"
CURVE_NOTE = (
    "the losses of {0} of {1} steps were compared with the reference's: from there on one rounding moves them too far"
)
CURVES = {"train": "losses", "forward": "forward_losses", "stack": "stack_losses"}  # of the reference, by mode


def digest(weights: Mapping[str, np.ndarray]) -> str:
    """Of weights in the canonical form: the same for the same numbers."""
    found = hashlib.sha256()
    for name in sorted(weights):
        found.update(name.encode() + np.ascontiguousarray(weights[name]).tobytes())
    return found.hexdigest()[:16]


def timed_of(trial: Any, mode: str) -> tuple[Callable, Sequence]:
    """(what is timed, the batches that it is timed on) of a trial in one mode; it returns its loss, a device scalar."""
    if mode == "stack":
        return lambda batch: trial.stack_alone(batch)[0], trial.stack_batches
    return getattr(trial, mode), trial.batches


class Turns(Protocol):
    """How the processes of a run share the device: harness.run.processes.Turns."""

    def device(self, alone: bool = False) -> contextlib.AbstractContextManager:
        """To use it, beside a few others or, for what tunes itself by its own times, alone."""

    def timed(self) -> contextlib.AbstractContextManager:
        """To time, with everything else at rest."""


class Alone:
    """Of a process that shares it with none."""

    def device(self, alone: bool = False) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()

    timed = device


class Measurement:
    """What `run_row` of a benchmark is given: the configured framework, the data, the reference, and the way of one row.

    Attributes:
        runtime: the row's framework, configured for it (harness/frameworks/runtimes.py).
        data: what the benchmark's `load` returned.
        reference: {"outputs": {name: array}, "losses": [n], "gradients": {…}, "updates": {…}, "forward_losses": [n]}.
        device, precision: of this row.
        process: number of this process among the row's, from 0. The first one is held to the whole reference; the others time the
            same weights by the same ops and kernels, and are held to the reference's losses.

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
        found = load_reference(wait_for(self._reference_path))
        self._phases.over("reference")
        return found

    def steps(
        self,
        trial: Any,
        modes: Mapping[str, int],
        items_per_batch: int | Sequence[int],
        unit: str,
        details: bool = True,
    ) -> dict[str, dict]:
        """Prove and time a trial step by step.

        Args:
            trial: harness.measure.proof.Trial, and what is timed: `train(batch)`, `forward(batch)`, on `batches` that
            lie on the device;
                `stack_alone(batch)` on `stack_batches`. `trace(mode)`, where there is one, traces that without running it;
                `notes(mode)`, where there is one, says for the tables how it ran, where the row leaves that open. Where
                `tunes_anew` is true, every process chooses kernels by their times, whatever an earlier one has compiled.
            modes: "forward", "train" and "stack" → floating-point operations per batch.
            items_per_batch, unit: what throughput counts, such as 128 and "sequences/s"; a number per staged batch where the
                batches differ.
            details: whether to time single steps too (harness.measure.latency.STEPS), and to sample a GPU's utilisation by
                training steps, for UTILISATION_S.

        Returns:
            one part per mode for harness.record.schema.merge_process; a part whose proof failed has no times.
        """
        # Before anything is timed, what the modes' first batches run: TensorFlow numbers what it traces by all that it has made
        # so far, XLA looks up by these numbers what an earlier process has compiled, and a timed loop takes as many steps as
        # there is time for.
        self._phases.over("model")
        traced_s = {mode: self._traced_s(trial, mode) for mode in modes}
        self._phases.over("tracing")
        parts: dict[str, dict] = {}
        proofs: dict[str, Proof] = {}
        profiles = {}
        with self._turns.device(alone=self._compiles or getattr(trial, "tunes_anew", False)):
            self._phases.over("waiting")
            for mode, flops in modes.items():
                step, batches = timed_of(trial, mode)
                trial.restore()
                called_s, _ = clocks.seconds_of(lambda step=step, batch=batches[0]: step(batch), self.runtime.sync)
                parts[mode] = {"first_call_s": traced_s[mode] + called_s, "flops_per_batch": flops}
                parts[mode]["memory_peak_bytes"] = self._memory_of(step, batches)  # another mode has none yet
            self._phases.over("first call")
        _ = self.reference  # waited for before the device is asked for
        with self._turns.device():
            self._phases.over("waiting")
            trial.restore()
            self._start = digest(trial.weights())
            self._phases.over("proof: start")
            for mode in modes:
                proofs[mode], profiles[mode] = self._prove(trial, mode)
        # The training comes last: what it leaves of the weights is held to the reference.
        proven = sorted((mode for mode in modes if not proofs[mode].failures), key=lambda mode: mode == "train")
        sizes = {}
        with self._turns.timed() if proven else contextlib.nullcontext():
            self._phases.over("waiting")
            # Before all blocks: the proof goes on from their end, and the training's come last.
            if details and "train" in proven and self.device == "gpu" and not self.process:
                trial.restore()
                parts["train"]["gpu_utilisation"] = self._utilisation(
                    lambda: clocks.run_for(UTILISATION_S, *timed_of(trial, "train"), self.runtime.sync)
                )
                self._phases.over("utilisation")
            for mode in proven:
                if details and not self.process:  # before the blocks, whose end the proof goes on from
                    parts[mode] |= self._single_steps(trial, mode)
                    self._phases.over("single steps")
                times, sizes[mode] = self._time(trial, mode, proofs[mode], items_per_batch)
                share = self._share(modes[mode], times["blocks_ms"])
                parts[mode] |= times | {"unit": unit, "share_of_matmul": share}
                self._phases.over("timed")
        self._phases.over("waiting")
        if not self.process:
            with self._turns.device():
                self._phases.over("waiting")
                for mode in [mode for mode in reversed(proven) if not proofs[mode].failures]:
                    self._after_blocks(trial, mode, proofs[mode], profiles[mode], sizes[mode])
                self._phases.over("proof: block")
        finished = {mode: self._finish(noted(part, trial, mode), proofs[mode]) for mode, part in parts.items()}
        self._phases.over("waiting")
        print(self._phases, flush=True)
        return finished

    def _traced_s(self, trial: Any, mode: str) -> float:
        """Seconds of tracing what is timed, where that can be done without running it; else it is part of the first call."""
        return clocks.seconds_of(lambda: trial.trace(mode), self.runtime.sync)[0] if hasattr(trial, "trace") else 0.0

    def _prove(self, trial: Any, mode: str) -> tuple[Proof, dict]:
        """The proof, and the profile of one step."""
        proof, first = Proof(self.precision), not self.process
        trial.restore()
        proof.start = self._start
        step, batches = timed_of(trial, mode)
        if mode == "stack":
            losses = self.runtime.to_numpy([step(batches[k % len(batches)]) for k in range(CURVE_STEPS)])
            if first:
                proof.stack(trial, losses, self.reference)
            else:
                proof.losses("the stack's passes", losses, self.reference["stack_losses"])
        else:
            proof.outputs(trial.outputs(), self.reference["outputs"])
        self._phases.over("proof: outputs")
        if mode == "train":
            if first:
                proof.training(trial, self.reference)
            else:
                proof.follows(trial, self.reference)
                trial.restore()
                proof.training_losses(trial.train_steps(UPDATE_STEPS), self.reference)
            proof.callable(trial.graph_mismatch())
        elif mode == "forward":
            proof.losses("the forward passes", trial.forward_losses(CURVE_STEPS), self.reference["forward_losses"])
        self._phases.over("proof: training")
        kernel = self.kernel.of_mode(mode, trial)
        step(batches[0])  # a step of the proof may have taken the place of the timed one's graph
        with host_reads.counted(self.runtime) as reads:
            loss = step(batches[0])
        profile = self.runtime.profile(lambda: step(batches[0]))
        calls = kernel.calls_copying_lengths * {"forward": 1}.get(mode, 2)
        lengths_bytes = 4 * calls * self._protocol["BATCH_SIZE"] if calls else 0
        proof.stays_on_device(loss, len(reads), profile["to_host_bytes"], lengths_bytes)
        proof.what_ran(profile, kernel, self.device)
        self._phases.over("proof: profile")
        if mode == "train":
            self._prove_dropout(trial, proof, profile["ops"], steps=1)
            self._phases.over("proof: dropout")
        return proof, profile

    def _prove_dropout(self, trial: Any, proof: Proof, ops: Mapping[str, float], steps: int) -> None:
        """Where the workload has it: by the ops of so many profiled steps, and in the first process by losses."""
        if "dropout_losses" not in self.reference:
            return
        places = int(self.reference["dropout_places"])
        proof.dropout(dropout.masks_not_drawn(ops, self.runtime.name, places, steps))
        if self.process == 0:
            losses = trial.dropout_losses(int(self.reference["dropout_draws"]))
            proof.dropout(dropout.wrong_losses(losses, self.reference["dropout_losses"], proof.limit.loss))

    def _time(
        self,
        trial: Any,
        mode: str,
        proof: Proof,
        items_per_batch: int | Sequence[int],
    ) -> tuple[dict, int]:
        """The part's times, and the batches of a block."""
        c = self._protocol
        step, batches = timed_of(trial, mode)
        timed = clocks.time_blocks(
            step,
            batches,
            sync=self.runtime.sync,
            restore=trial.restore,
            read=lambda loss: self.runtime.to_numpy([loss]),
            warmup_batches=c["WARMUP_BATCHES"],
            warmup_limit_s=c["WARMUP_LIMIT_S"],
            timed_batches=c["TIMED_BATCHES"],
            blocks=c["BLOCKS"],
            min_block_s=c["MIN_BLOCK_S"],
            whole_rounds=isinstance(items_per_batch, Sequence),
            agree=self._agree,
            meter=self._meter,
        )
        proof.clock(timed.lag_s, timed.lag_limit_s, timed.at_work)
        after = self._clock("timed")
        losses = [self._losses(block) for block in timed.losses]
        curve = self.reference[CURVES[mode]]
        proof.timed_losses(losses, curve, dropout=mode == "train" and "dropout_losses" in self.reference)
        notes = []
        size = timed.batches_per_block
        if size < c["TIMED_BATCHES"]:
            notes.append(f"{size} batches per block: one takes over {timed.slow_s:g} s")
        return {
            "blocks_ms": timed.ms,
            "warmup": [{"process": self.process, **timed.warmup._asdict()}],
            "clocks": [after],
            "losses": losses[0][:LOSSES_KEPT].tolist(),
            "items_per_batch": float(np.mean(items_per_batch)),
            "notes": notes,
            **latency.joules_of_batch(timed.energy),
        }, size

    def _single_steps(self, trial: Any, mode: str) -> dict:
        """Of the part: how long steps take that are timed one by one."""
        step, batches = timed_of(trial, mode)
        limit_s = min(latency.STEPS_LIMIT_S, self._protocol["WARMUP_LIMIT_S"] / 2)
        sync, restore = self.runtime.sync, trial.restore
        return latency.steps_of(
            clocks.time_single_steps(step, batches, sync=sync, restore=restore, most=latency.STEPS, limit_s=limit_s)
        )

    def _meter(self) -> float | None:
        """Joules that the GPU has taken so far; None without one, or where it does not count them."""
        return machine.gpu_joules() if self.device == "gpu" else None

    def _agree(self, value: Any) -> Any:
        """What all processes that take a step together go by, of what each has found (harness/measure/replicas.py)."""
        return value

    def _losses(self, block: Sequence) -> np.ndarray:
        """Losses [n] of what a block's steps returned."""
        return self.runtime.to_numpy(block)

    def _after_blocks(self, trial: Any, mode: str, proof: Proof, profile: dict, size: int) -> None:
        """See harness.measure.after_blocks."""
        training = mode == "train"
        moved = trial.weights() if training and "dropout_losses" not in self.reference else None
        if training:
            after_blocks.hold_next_steps(proof, trial, self.reference, size)
            self._phases.over("proof: next steps")
        after_blocks.hold_block(self.runtime, proof, trial, (*timed_of(trial, mode), size), profile, moved)

    def requests(self, server: Any, requests: Sequence[np.ndarray]) -> dict[str, dict]:
        """Prove and time a server, request by request: from the request on the host to the answer there.

        Args:
            server: `answer(request)`, which returns a NumPy array of its own, and `restore()`, which starts a stream anew;
                `profile(function)`, as of a Runtime, where another program than the row's framework answers.
            requests: float32 [batch, steps, features] each, taken in turn; `restore` is called before the first of a round.
                What they come to is reference["answers"] [requests, batch, steps, units].

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

    def fit(
        self,
        trial: Any,
        train: Callable[[Any, fits.Plan], Mapping[str, Any]],
        train_on: Callable[[int], Any],
        *,
        plan: fits.Plan,
        batch_size: int,
        flops: int,
        unit: str,
    ) -> dict[str, dict]:
        """Prove a trial whose steps run inside `fit`, then run the whole training once.

        Args:
            trial: harness.measure.proof.Trial; its `train_steps` go through the same `fit` as the training, and feed a
            clocks.EpochClock
                where that is Keras' own; its `timed_steps` run the very function that is timed, its `traces` counts how often
                a step was traced, and its `inputs` and `labels` are what those steps are handed.
            train: given a clocks.EpochClock to feed and a plan, runs that training; returns {"losses": per epoch,
                "accuracy": {…}, "epoch_accuracy": {"acc", "val_acc": per epoch}}.
            plan: of the timed training; what ran is held to it, and `train` runs a small one of harness.measure.fits before.
            train_on: runs `fit` on that many batches; GPU utilisation is sampled beside it, after everything that is timed.
        """
        self._phases.over("model")
        with self._turns.device(alone=True):
            self._phases.over("waiting")
            first_call_s = clocks.first_call(lambda clock: trial.train_steps(1, clock), self.runtime.sync)
            trial.timed_steps(1)  # compiled too, where it is another graph than that of the proof's steps
            self._phases.over("first call")
        _ = self.reference  # waited for before the device is asked for
        with self._turns.device():
            self._phases.over("waiting")
            proof = Proof(self.precision)
            trial.restore()
            proof.start = digest(trial.weights())
            proof.outputs(trial.outputs(), self.reference["outputs"])
            proof.training(trial, self.reference)
            trial.timed_steps(1)  # a step of the proof may have taken the place of the timed one's graph
            profile = self.runtime.profile(lambda: trial.timed_steps(UPDATE_STEPS))
            # Twice: Keras copies small tensors besides (outside of XLA, 1280 bytes a step of 32 sequences and 10 classes).
            proof.copies(profile["to_host_bytes"], UPDATE_STEPS * TO_HOST_LIMIT + 2 * handed_to_fit(trial, batch_size))
            proof.what_ran(profile, self.kernel.of_mode("fit", trial), self.device)
            self._prove_dropout(trial, proof, profile["ops"], UPDATE_STEPS)
            proof.callable(trial.graph_mismatch())
            told = fits.tells_steps(self.precision, batch_size)
            if not self.process and not proof.failures and told:
                proof.whole_training(fits.differs_in_an_epoch(trial, train, plan, batch_size))
        part: dict[str, Any] = {"first_call_s": first_call_s, "flops_per_batch": flops}
        self._phases.over("proof")
        if not proof.failures:
            self.runtime.reset_memory_peak()
            clock = clocks.EpochClock()
            proven, batches_per_epoch = trial.traces, len(plan.x) // batch_size
            with self._turns.timed():
                self._phases.over("waiting")
                fit_s, result, joules = clocks.metered(lambda: train(clock, plan), self.runtime.sync, self._meter)
                memory = self._memory()
                self._phases.over("timed")
            self._phases.over("waiting")
            with self._turns.device():
                self._phases.over("waiting")
                proof.whole_training(fits.differs_in_counts(trial, result, clock, plan, batch_size))
                if not self.process:
                    found = result["accuracy"]
                    proof.whole_training(fits.differs_in_accuracy(trial, found, plan, proof.limit, batch_size))
                    proof.whole_training(fits.differs_in_rate(trial, plan))
                    self._phases.over("proof: after")
            result = {name: value for name, value in result.items() if name != "epoch_accuracy"}
            if trial.traces != proven:
                proof.callable("the timed fit traced its step anew: it did not run the function that was proven")
            if not np.isfinite(result["losses"]).all():
                proof.failures["loss"] = "NaN or infinite loss in the training"
            blocks = [1e3 * seconds / batches_per_epoch for seconds in clock.train_s]
            part |= {
                **result,
                "fit_s": fit_s,
                "epoch_s": clock.train_s,
                "blocks_ms": blocks,
                "items_per_batch": batch_size,
                "unit": unit,
                "notes": [AROUND_NOTE] if self.runtime.name == "tensorflow" and much_around(clock) else [],
                "memory_peak_bytes": memory,
                "share_of_matmul": self._share(flops, blocks),
                **latency.joules_of_training(joules, fit_s, plan.epochs),
            }
            if self.device == "gpu" and not self.process:
                with self._turns.device(alone=True):
                    self._phases.over("waiting")
                    batches = math.ceil(1e3 * UTILISATION_S / min(blocks))
                    part["gpu_utilisation"] = self._utilisation(lambda: train_on(batches))
                    self._phases.over("utilisation")
        self._phases.over("waiting")
        print(self._phases, flush=True)
        return {"fit": self._finish(noted(part, trial, "fit"), proof)}

    def training(
        self, trial: Any, train: Callable[[Callable], Mapping[str, Any]], schedule: fits.Schedule
    ) -> dict[str, dict]:
        """Prove a trial step by step, then run a whole training of its own once (perplexity).

        Args:
            train: given a function that times an epoch, `timed(function) -> (seconds, result)`, runs the training; returns
                {"losses": …, "perplexity": {…}, "epoch_s": […], "batches_per_epoch": n, "items_per_batch": n, "unit": …}.
            schedule: of that training; what ran is held to it.
        """
        self._phases.over("model")
        with self._turns.device(alone=True):
            self._phases.over("waiting")
            first_call_s, _ = clocks.seconds_of(lambda: trial.train(trial.batches[0]), self.runtime.sync)
            self._phases.over("first call")
        _ = self.reference  # waited for before the device is asked for
        with self._turns.device():
            self._phases.over("waiting")
            trial.restore()
            self._start = digest(trial.weights())
            proof, _ = self._prove(trial, "train")
            if not proof.failures:
                proof.whole_training(fits.differs_in_step(trial, self.reference["gradients"], schedule, proof.limit))
        part: dict[str, Any] = {"first_call_s": first_call_s}
        if not proof.failures:
            self.runtime.reset_memory_peak()
            with fits.Watched(trial) as watched, self._turns.timed():  # of all rows, since it costs each step a little

                def timed(function):
                    return clocks.seconds_of(function, self.runtime.sync)

                self._phases.over("waiting")
                fit_s, result, joules = clocks.metered(lambda: train(timed), self.runtime.sync, self._meter)
                self._phases.over("timed")
            memory, result = self._memory(), dict(result)
            watched.read(self.runtime.to_numpy)
            proof.whole_training(fits.differs_in_schedule(watched, result, schedule, proof.limit, trial.numpy))
            proof.whole_training(fits.differs_in_perplexity(trial, result, schedule, proof.limit))
            batches = result.pop("batches_per_epoch")
            if not np.isfinite([*result["losses"], *result["perplexity"].values()]).all():
                proof.failures["loss"] = "NaN or infinite loss in the training"
            part |= {**result, "fit_s": fit_s, "memory_peak_bytes": memory}
            part |= latency.joules_of_training(joules, fit_s, len(result["epoch_s"]))
            part["blocks_ms"] = [1e3 * seconds / batches for seconds in result["epoch_s"]]
            self._phases.over("proof: after")
        print(self._phases, flush=True)
        return {"fit": self._finish(noted(part, trial, "fit"), proof)}

    def _finish(self, part: dict, proof: Proof) -> dict:
        part["proof"] = proof.record()
        part["status"] = "failed" if proof.failures else "ok"
        part["reason"] = part["proof"]["reason"]
        part["losses"] = [loss if math.isfinite(loss) else None for loss in part.get("losses", [])]
        if (compared := part["proof"]["curve_steps"]) < CURVE_STEPS:
            part["notes"] = [*part.get("notes", []), CURVE_NOTE.format(compared, CURVE_STEPS)]
        if self.device == "cpu" and self._cpu.others_percent() > machine.OTHERS_PERCENT:
            part["notes"] = [*part.get("notes", []), machine.OTHERS_NOTE]
        part["clocks"] = [clock for clock in (*self._clocks, *part.get("clocks", []), self._clock("end")) if clock]
        part["environment"] = {**machine.facts(self.device), **self.runtime.environment(), "data": self.data.facts}
        if proof.failures:  # an unproven row has no figures
            for key in (
                "blocks_ms",
                "warmup",
                "items_per_batch",
                "unit",
                "fit_s",
                "epoch_s",
                "accuracy",
                "perplexity",
                "share_of_matmul",
                "latency",
                "one_step",
                "joules",
            ):
                part.pop(key, None)
        return part

    def _clock(self, when: str) -> dict | None:
        state = machine.gpu_state() if self.device == "gpu" else None
        return state and {"process": self.process, "when": when, **state}

    def _memory_of(self, step: Callable, batches: Sequence) -> dict | None:
        """The peak of a round of steps."""
        if self.device != "gpu":
            return None
        self.runtime.reset_memory_peak()
        for batch in batches:
            step(batch)
        self.runtime.sync()
        return self._memory()

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


def noted(part: dict, trial: Any, mode: str) -> dict:
    """A part with what the trial says of itself, where it does."""
    notes = trial.notes(mode) if hasattr(trial, "notes") else []
    return {**part, "notes": [*part.get("notes", []), *notes]}


def much_around(clock: clocks.EpochClock) -> bool:
    """Whether much of a Keras `fit` lies outside of its steps."""
    if clock.whole_s is None:
        return False
    return clock.whole_s - sum(clock.train_s) - sum(clock.validation_s) > AROUND_SHARE * clock.whole_s


def handed_to_fit(trial: Any, batch_size: int) -> int:
    """Bytes of the inputs and labels of the steps in `fit`'s profile, a measure of what it may copy to the host.

    On a GPU Keras makes tensors there of the arrays that it is handed, and copies them back for tf.data, which lives on the host
    (https://github.com/tensorflow/tensorflow/issues/71744): once per fit, whatever it trains, and no step waits for it.
    """
    return sum(np.asarray(array[: UPDATE_STEPS * batch_size]).nbytes for array in (trial.inputs, trial.labels))


def matmul_flops(runtime: runtimes.Runtime, size: int, repeats: int) -> float:
    """FLOP/s of a plain [size, size] × [size, size] product on this device, at the runtime's precision; the best of four.

    Random numbers, since zeros draw less power and run faster. In 16 bits at fp16 and bf16. TensorFlow's product is the measure
    for every row, whatever its framework, so that their shares are of one number.
    """
    import tensorflow as tf

    dtype = {"fp16": tf.float16, "bf16": tf.bfloat16}.get(runtime.precision, tf.float32)
    a, b = (tf.cast(tf.random.normal([size, size], seed=seed), dtype) for seed in (1, 2))

    def products():
        for _ in range(repeats):
            tf.matmul(a, b)

    seconds = min(clocks.seconds_of(products, runtime.sync)[0] for _ in range(4))
    return 2.0 * math.pow(size, 3) * repeats / seconds
