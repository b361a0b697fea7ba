"""A row with a training loop of its own: proven step by step, then the whole training once (perplexity)."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from harness.measure import clocks, latency, training_proof
from harness.measure.row_process import digest, noted
from harness.measure.steps import StepMeasurement


class TrainingMeasurement(StepMeasurement):
    """A row with a training loop of its own."""

    def training(
        self, trial: Any, train: Callable[[Callable], Mapping[str, Any]], schedule: training_proof.Schedule
    ) -> dict[str, dict]:
        """Prove a trial step by step, then run a whole training of its own once (perplexity).

        Args:
            train: given a function that times an epoch, `timed(function) -> (seconds, result)`, runs the training; returns
                {"losses": …, "perplexity": {…}, "test_perplexity_by_seed": {seed: …}, "epoch_s": […],
                "batches_per_epoch": n, "items_per_batch": n, "unit": …}.
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
                proof.whole_training(
                    training_proof.differs_in_step(trial, self.reference["gradients"], schedule, proof.limit)
                )
        part: dict[str, Any] = {"first_call_s": first_call_s}
        if not proof.failures:
            self.runtime.reset_memory_peak()
            # All rows are watched, since that costs each step a little.
            with training_proof.Watched(trial) as watched, self._turns.timed():

                def timed(function):
                    return clocks.seconds_of(function, self.runtime.sync)

                self._phases.over("waiting")
                fit_s, result, joules = clocks.metered(lambda: train(timed), self.runtime.sync, self._meter)
                self._phases.over("timed")
            memory, result = self._memory(), dict(result)
            watched.read(self.runtime.to_numpy)
            proof.whole_training(
                training_proof.differs_in_schedule(watched, result, schedule, proof.limit, trial.numpy)
            )
            proof.whole_training(training_proof.differs_in_perplexity(trial, result, schedule, proof.limit))
            batches = result.pop("batches_per_epoch")
            if not np.isfinite([*result["losses"], *result["perplexity"].values()]).all():
                proof.failures["loss"] = "NaN or infinite loss in the training"
            part |= {**result, "fit_s": fit_s, "memory_peak_bytes": memory}
            part |= latency.joules_of_training(joules, fit_s, len(result["epoch_s"]))
            part["blocks_ms"] = [1e3 * seconds / batches for seconds in result["epoch_s"]]
            self._phases.over("proof: after")
        print(self._phases, flush=True)
        return {"fit": self._finish(noted(part, trial, "fit"), proof)}
