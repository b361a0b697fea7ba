"""A row whose steps run inside `fit`: proven through `fit` itself, then the whole training once."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from harness.measure import clocks, latency, training_proof
from harness.measure.proof import TO_HOST_LIMIT, UPDATE_STEPS, Proof
from harness.measure.row_process import UTILISATION_S, RowProcess, digest, noted

AROUND_SHARE = 0.1  # of a fit's time, outside of its steps: from here on a row says so
AROUND_NOTE = "over a tenth of the fit's time lies around its steps and validations: see docs/reading-tables.md"


class FitMeasurement(RowProcess):
    """A row whose steps run inside `fit`."""

    def fit(
        self,
        trial: Any,
        train: Callable[[Any, training_proof.Plan], Mapping[str, Any]],
        train_on: Callable[[int], Any],
        *,
        plan: training_proof.Plan,
        batch_size: int,
        flops: int,
        unit: str,
    ) -> dict[str, dict]:
        """Prove a trial whose steps run inside `fit`, then run the whole training once.

        Args:
            trial: harness.measure.proof.Trial; its `train_steps` go through the same `fit` as the training, and feed a
                clocks.EpochClock where that is Keras' own; its `timed_steps` run the very function that is timed, its `traces`
                counts how often a step was traced, and its `inputs` and `labels` are what those steps are handed.
            train: given a clocks.EpochClock to feed and a plan, runs that training; returns {"losses": per epoch,
                "accuracy": {…}, "epoch_accuracy": {"acc", "val_acc": per epoch}}.
            plan: of the timed training; what ran is held to it, and `train` runs a small one of training_proof.py before.
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
            told = training_proof.tells_steps(self.precision, batch_size)
            if not self.process and not proof.failures and told:
                proof.whole_training(training_proof.differs_in_an_epoch(trial, train, plan, batch_size))
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
                proof.whole_training(training_proof.differs_in_counts(trial, result, clock, plan, batch_size))
                if not self.process:
                    found = result["accuracy"]
                    proof.whole_training(
                        training_proof.differs_in_accuracy(trial, found, plan, proof.limit, batch_size)
                    )
                    proof.whole_training(training_proof.differs_in_rate(trial, plan))
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
