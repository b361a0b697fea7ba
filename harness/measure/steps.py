"""A row that is timed step by step: traced and called first, proven, timed in blocks, and held to the end of its blocks."""

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from harness.measure import after_blocks, clocks, host_reads, latency
from harness.measure.proof import CURVE_STEPS, UPDATE_STEPS, Proof
from harness.measure.row_process import UTILISATION_S, RowProcess, digest, noted

LOSSES_KEPT = 100
CURVES = {"train": "losses", "forward": "forward_losses", "stack": "stack_losses"}  # of the reference, by mode


def timed_of(trial: Any, mode: str) -> tuple[Callable, Sequence]:
    """(what is timed, the batches that it is timed on) of a trial in one mode; it returns its loss, a device scalar."""
    if mode == "stack":
        return lambda batch: trial.stack_alone(batch)[0], trial.stack_batches
    return getattr(trial, mode), trial.batches


class StepMeasurement(RowProcess):
    """The way of such a row: its modes one after another, each step of them the callable that was proven."""

    def steps(
        self,
        trial: Any,
        modes: Mapping[str, int],
        items_per_batch: int | Sequence[int],
        unit: str,
        details: bool = True,
        batches: Sequence[tuple] = (),
    ) -> dict[str, dict]:
        """Prove and time a trial step by step.

        Args:
            trial: harness.measure.proof.Trial, and what is timed: `train(batch)`, `forward(batch)`, on `batches` that lie on
                the device; `stack_alone(batch)` on `stack_batches`. `trace(mode)`, where there is one, traces that without
                running it; `notes(mode)`, where there is one, says for the tables how it ran, where the row leaves that open.
                Where `tunes_anew` is true, every process chooses kernels by their times, whatever an earlier one has compiled.
            modes: "forward", "train" and "stack" → floating-point operations per batch.
            items_per_batch, unit: what throughput counts, such as 128 and "sequences/s"; a number per staged batch where the
                batches differ.
            details: whether to time single steps too (harness.measure.latency.STEPS), and to sample a GPU's utilisation by
                training steps, for UTILISATION_S.
            batches: the script's of a language model, which every staged one has to hold: the reference's curve is of the first
                few alone, and later steps are held to what the trial itself has staged.

        Returns:
            one part per mode for harness.record.schema.merge_process; a part whose proof failed has no times.

        Raises:
            ValueError: a staged batch does not hold the words of its own of `batches`.
        """
        if batches:
            trial.require_words(batches)
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
                if getattr(trial, "shapes_vary", False) and self.device == "gpu":
                    # What is traced or captured for the other shapes takes memory of its own.
                    self._round(step, batches)
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

    def _memory_of(self, step: Callable, batches: Sequence) -> dict | None:
        """The peak of a round of steps."""
        if self.device != "gpu":
            return None
        self.runtime.reset_memory_peak()
        self._round(step, batches)
        return self._memory()

    def _round(self, step: Callable, batches: Sequence) -> None:
        for batch in batches:
            step(batch)
        self.runtime.sync()

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
        sequences = self._protocol["BATCH_SIZE"] if kernel.calls_copying_lengths else 0
        steps = math.prod(batches[0][1].shape) if kernel.copies_mask else 0
        lengths_bytes = kernel.lengths_bytes(mode, sequences, steps)
        proof.stays_on_device(loss, len(reads), profile["to_host_bytes"], lengths_bytes)
        proof.what_ran(profile, kernel, self.device)
        self._phases.over("proof: profile")
        if mode == "train":
            self._prove_dropout(trial, proof, profile["ops"], steps=1)
            self._phases.over("proof: dropout")
        return proof, profile

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
            notes.append(f"{size} batches per block: one took over {timed.slow_s:g} s in a process")
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
        limit_s = min(latency.STEPS_LIMIT_S, self._protocol["WARMUP_LIMIT_S"])
        sync, restore = self.runtime.sync, trial.restore
        return latency.steps_of(
            clocks.time_single_steps(step, batches, sync=sync, restore=restore, most=latency.STEPS, limit_s=limit_s)
        )

    def _agree(self, value: Any) -> Any:
        """What all processes that take a step together go by, of what each has found (harness/measure/replicas.py)."""
        return value

    def _losses(self, block: Sequence) -> np.ndarray:
        """Losses [n] of what a block's steps returned."""
        return self.runtime.to_numpy(block)

    def _after_blocks(
        self, trial: Any, mode: str, proof: Proof, profile: dict, size: int
    ) -> tuple[Mapping[str, Any], int]:
        """See harness.measure.after_blocks; what its hold_block returns."""
        training = mode == "train"
        moved = trial.weights() if training and "dropout_losses" not in self.reference else None
        if training:
            after_blocks.hold_next_steps(proof, trial, self.reference, size)
            self._phases.over("proof: next steps")
        return after_blocks.hold_block(self.runtime, proof, trial, (*timed_of(trial, mode), size), profile, moved)
