"""A row that is an option of a Keras layer: what ran, by the profile; its proof; its time alone and in `fit`.

What Keras raises is what the row has found: such a part is "skipped", with the error's first line. Everything else that goes
wrong fails as anywhere. An option is proven like a row of a language model, with two differences: an option's model may be of any
kernel, and what ran is what is asked; and an option that changes no figure has to show itself otherwise (`not_applied`).
"""

import re
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from harness.measure import clocks
from harness.measure.proof import COARSE, UPDATE_STEPS, WIDEST, Kernel, Limit, Proof, max_error, norm_error, worst
from harness.measure.row_process import RowProcess

MODES = ("train", "forward")
ERROR = "error"
WITH_LENGTHS = "cuDNN with lengths"
FLOAT64 = Limit(
    outputs=1e-11, gradients=1e-6, update=1e-6, loss=1e-6
)  # Keras' loss is float32 under every dtype policy
FIT_S, FIT_CALLS = 0.2, (3, 100)  # of the timed `fit`: how long, and the least and the most calls
LONGEST = 240  # characters of an error's line
UNITS = "sequences/s"


# What stands around the message in the errors of TensorFlow's graphs, of AutoGraph and of Keras.
AROUND = (
    "Graph execution error",
    "Detected at",
    "<stack traces",
    "in user code:",
    "File ",
    "Traceback",
    "Exception enc",
    "[[",
)
BOLD = re.compile(r"\x1b\[\d*m")


def first_line(error: BaseException) -> str:
    """An error's type and the first line of its message."""
    lines, kind = BOLD.sub("", str(error)).splitlines(), type(error).__name__
    pairs = zip(["", *lines], lines, strict=False)
    code = [before.lstrip().startswith("File ") and line[:1].isspace() for before, line in pairs]
    said = [" ".join(line.split()) for line, is_code in zip(lines, code, strict=True) if not is_code]
    said = [line for line in said if line and not line.startswith(AROUND)]
    text = said[0].removeprefix(f"{kind}: ") if said else ""
    return f"{kind}: {text}"[:LONGEST].rstrip(": ")


class OptionMeasurement(RowProcess):
    """The way of such a row."""

    def option(self, make: Callable[[], Any], layers: Any) -> dict[str, dict]:
        """Find out what runs, prove and time it.

        Args:
            make: the trial (models.keras.option_models.OptionTrial); what it raises is Keras'.
            layers: what tells what a layer ran (harness.doctor.layers).

        Returns:
            one part per mode of MODES.
        """
        parts: dict[str, dict] = {}
        try:
            trial = make()
        except Exception as error:
            traceback.print_exc()
            return {mode: self._raised(error) for mode in MODES}
        self._phases.over("model")
        found = layers.recurrent(trial.model)
        first_s = {}
        with layers.scoped(found):
            for mode in ("train", "forward"):
                try:
                    first_s[mode], _ = clocks.seconds_of(lambda mode=mode: trial.first(mode), self.runtime.sync)
                except Exception as error:
                    traceback.print_exc()
                    parts[mode] = self._raised(error)
            self._phases.over("first call")
            trial.restore()
            for mode in [mode for mode in MODES if mode in first_s]:
                parts[mode] = self._part(trial, mode, layers, found) | {"first_call_s": first_s[mode]}
        print(self._phases, flush=True)
        return {mode: parts[mode] for mode in MODES}

    def _raised(self, error: Exception) -> dict:
        line = first_line(error)
        return {
            "status": "skipped",
            "reason": f"Keras raises {line}",
            "option": {"ran": ERROR, "error": line, "fit_ms": None},
            "environment": self._finish({}, Proof(self.precision))["environment"],
        }

    def _part(self, trial: Any, mode: str, layers: Any, found: Any) -> dict:
        proof = Proof("fp32" if trial.precision == "fp64" else trial.precision)
        # What runs in float32 where tf32 is allowed is no mistake of an option.
        proof.limit = FLOAT64 if trial.precision == "fp64" else proof.limit._replace(outputs_at_least=0.0)
        proof.limits = proof.limit._asdict()
        step = getattr(trial, mode)
        profile = self.runtime.profile(step, layers.SCOPES)
        proof.what_ran(profile, Kernel(), self.device)
        ran = self._what_ran(trial, mode, layers, found, profile, proof)
        self._phases.over("profile")
        self._prove(trial, proof) if mode == "train" else self._prove_forward(trial, proof)
        self._phases.over("proof")
        part: dict[str, Any] = {"option": {"ran": ran, "error": "", "fit_ms": None}}
        if not proof.failures:
            part |= self._times(trial, mode, proof)
            self._phases.over("timed")
        if mode == "train" and not proof.failures:
            part["option"]["fit_ms"] = self._fit_ms(trial, part["blocks_ms"])
            self._phases.over("fit")
        return self._finish(part, proof)

    def _what_ran(self, trial: Any, mode: str, layers: Any, found: Any, profile: Mapping, proof: Proof) -> str:
        """Of the layers; where they ran different things, all of them."""
        kinds, words = {}, []
        for number, layer in enumerate(found):
            seen = layers.seen(profile, number)
            kinds[WITH_LENGTHS if seen.kind == layers.CUDNN and layer.masked else seen.kind] = None
            words.append(seen.words)
        proof.kernel["layers"] = words
        if layers.NOTHING in kinds or not kinds:
            proof.failures.setdefault("kernel", "the profile does not show what a layer ran")
        why = trial.not_applied(mode, next(iter(kinds), ""), "; ".join(words), profile["ops"])
        if why:
            proof.failures.setdefault("option", why)
        return ", ".join(kinds)

    # -- the proof ---------------------------------------------------------------------------------------------------------

    def _prove(self, trial: Any, proof: Proof) -> None:
        """A call of `fit`'s function, and then as many more as make UPDATE_STEPS steps; outputs before."""
        self._prove_forward(trial, proof)
        calls = max(2, -(-UPDATE_STEPS // trial.per_call))
        curve, after = trial.walked(calls)
        trial.restore()
        start, losses, weights = trial.weights_now(), [], []
        for _ in range(calls):
            losses.append(float(np.asarray(trial.train())))
            weights.append(trial.weights_now())
        coarse = COARSE[proof.precision]
        kinks = coarse * trial.rounded(calls * trial.per_call) if coarse else np.zeros((2, len(start)))
        checks = (("gradients", 0, max_error), ("update", -1, norm_error))
        for (check, place, error), explained in zip(checks, np.minimum(kinks, WIDEST[proof.precision]), strict=True):
            expected, usual = _changes(after[place], start), getattr(proof.limit, check)
            limits = {name: max(usual, float(limit)) for name, limit in zip(expected, explained, strict=True)}
            proof.hold(check, *worst(_changes(weights[place], start), expected, error, limits))
        proof.losses("the proof's steps", np.array(losses), curve)

    def _prove_forward(self, trial: Any, proof: Proof) -> None:
        trial.restore()
        expected, found = trial.predicted(2), [_flat(trial.forward()) for _ in range(2)]
        losses = [[_loss(outputs, trial.targets(k)) for k, outputs in enumerate(those)] for those in (found, expected)]
        for k in range(2):
            proof.outputs({f"outputs {k}": found[k], "loss": np.array(losses[0][k])},
                          {f"outputs {k}": expected[k], "loss": np.array(losses[1][k])})  # fmt: skip

    # -- times -------------------------------------------------------------------------------------------------------------

    def _times(self, trial: Any, mode: str, proof: Proof) -> dict:
        c = self._protocol
        timed = clocks.time_blocks(
            lambda _: getattr(trial, mode)(),
            [0],
            sync=self.runtime.sync,
            restore=trial.restore,
            read=np.asarray,
            warmup_batches=c["WARMUP_BATCHES"],
            warmup_limit_s=c["WARMUP_LIMIT_S"],
            timed_batches=max(1, c["TIMED_BATCHES"] // trial.per_call),
            blocks=c["BLOCKS"],
            min_block_s=c["MIN_BLOCK_S"],
        )
        proof.clock(timed.lag_s, timed.lag_limit_s, timed.at_work)
        losses = [[self._loss_of(trial, mode, k, value) for k, value in enumerate(block)] for block in timed.losses]
        curve = (
            trial.walked(2)[0]
            if mode == "train"
            else [_loss(out, trial.targets(k)) for k, out in enumerate(trial.predicted(2))]
        )
        proof.timed_losses([np.array(block) for block in losses], np.array(curve), dropout=False)
        return {
            "blocks_ms": [ms / trial.per_call for ms in timed.ms],
            "warmup": [{"process": self.process, **timed.warmup._asdict()}],
            "losses": losses[0][:10],
            "items_per_batch": float(c["BATCH_SIZE"]),
            "unit": UNITS,
        }

    def _loss_of(self, trial: Any, mode: str, call: int, value: Any) -> float:
        if mode == "train":
            return float(np.asarray(value))
        return _loss(_flat(value), trial.targets(call))

    def _fit_ms(self, trial: Any, blocks_ms: list[float]) -> float:
        """ms a step in Keras' `fit`: the least of three."""
        calls = round(1e3 * FIT_S / (min(blocks_ms) * trial.per_call))
        calls = min(max(calls, FIT_CALLS[0]), FIT_CALLS[1])
        found = []
        for _ in range(3):
            clock = clocks.EpochClock()
            trial.fit(calls, clock.callback())
            found.append(1e3 * clock.train_s[-1] / (calls * trial.per_call))
        return float(np.median(found))


def _flat(outputs: Any) -> np.ndarray:
    """[sequences, outputs] in float32, or float64 where the row computes in that."""
    array = np.asarray(outputs)
    array = array if array.dtype in (np.float32, np.float64) else array.astype(np.float32)
    return array.reshape(-1, array.shape[-1])


def _loss(outputs: np.ndarray, targets: np.ndarray) -> float:
    return float(np.mean((np.float64(outputs) - targets) ** 2))


def _changes(weights: list, start: list) -> dict[str, np.ndarray]:
    return {f"weight {k}": array - start[k] for k, array in enumerate(weights)}
