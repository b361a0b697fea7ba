"""Whole trainings are held to what the configuration says by what ran: `fit` of a classifier, and PTB's schedule.

A classifier's `fit` runs a second time, untimed and on few batches, by the very function that is timed, from weights that are all
zero but for the last bias. The stack's outputs are zero then, so every prediction is the class of the largest bias, the loss
is GAP times the share of the other labels, and the bias' gradient in a step is that step's count of labels. Adam's first moment
sums these gradients with weights 0.9^(steps since): after an epoch it says in which step each labelled sequence was. So
the share of the data, the order of each epoch, and what every accuracy and loss is counted over are read off exactly, in every
precision, and dropout (of zeros) is no matter.

Of the timed training itself: the optimizer's step count; accuracies, recomputed from the final weights by the forward pass that
was proven, in batches of this module's own; and the rate of one more step, from the change of the weights and Adam's moments.

Of PTB's training: what each epoch was run on, batch by batch; every epoch's mean loss; the rate that each epoch was given, and
that a step of `train_epoch` moves the weights by it; and perplexities, recomputed from the final weights.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from harness.measure.proof import STORED, Limit, norm_2

BETA_1, BETA_2, EPSILON = 0.9, 0.999, 1e-7  # of Adam, in every row
GAP = 1000.0  # between the largest bias and the others: a softmax of exactly 1 and 0, and a number of float16 and bfloat16
STEPS, FEWEST_EPOCHS = 4, 3  # of the small training: steps of an epoch, epochs
TAGS = 3  # sequences of a class, which follow each other in one batch of the data
CHANCE = 1e-6  # with which an honest order may look like one that was not drawn
# In sequences: float16's rounding of 1 / batch makes 3e-3; two patterns of TAGS differ by 9e-3 or more.
MOMENT_LIMIT = 4e-3
RATE_LIMIT = 1e-4  # relative; float32's 1 − β₂^t is off by up to 3e-5


def tells_steps(precision: str, batch_size: int) -> bool:
    """Whether a gradient tells how many sequences of a class were in a step.

    Of bfloat16's 8 bits, 1 / batch_size and sums of it have to need no more: it is a power of two then, and 256 at most.
    """
    return precision != "bf16" or batch_size in [2**k for k in range(9)]


class Plan(NamedTuple):
    """What a classifier's whole training is configured to be.

    Attributes:
        start: canonical weights.
        x, y: [n, time, features] and [n]; n is a multiple of the batch size.
        epochs: passes over them, each in an order of its own.
        scored: name of an accuracy → (x, y) that it is counted over, after training; "val_acc" after every epoch.
        rate: number of steps taken → the learning rate of the next one.
    """

    start: Mapping[str, np.ndarray]
    x: np.ndarray
    y: np.ndarray
    epochs: int
    scored: Mapping[str, tuple[np.ndarray, np.ndarray]]
    rate: Callable[[int], float]


def inverse_time(rate: float, decay: float = 0.0) -> Callable[[int], float]:
    """rate / (1 + decay · t) after t steps."""
    return lambda t: rate / (1.0 + decay * t)


# --- a classifier's fit, on labels that say what was read ----------------------------------------------------------------


class Probe:
    """Stands in for a clock: at the end of each epoch's training reads the optimizer, and sets the validation's prediction.

    Every epoch starts from the same weights and a fresh optimizer. `fit` on Keras calls `callback`.
    """

    def __init__(self, trial: Any, start: Mapping[str, np.ndarray], bias: str) -> None:
        self._trial, self._start, self._bias = trial, dict(start), bias
        self.moments: list[np.ndarray] = []  # of the bias after each epoch, [classes], over 1 − β₁
        self.steps: list[int] = []
        self.validations = 0

    def begin(self) -> None:
        self._trial.load(self._start)

    def trained(self) -> None:
        self.moments.append(self._trial.first_gradients()[self._bias])
        self.steps.append(self._trial.moments()[0])
        if len(self.moments) % 2 == 0:  # the other class is predicted in every second validation
            self._trial.load({**self._start, self._bias: self._start[self._bias][::-1].copy()})

    def validated(self) -> None:
        self.validations += 1

    def returned(self) -> None:
        pass

    def callback(self):
        """A keras.callbacks.Callback that calls these."""
        import keras

        probe = self

        class Reports(keras.callbacks.Callback):
            def on_epoch_begin(self, epoch, logs=None):
                self.epoch = len(probe.moments)
                probe.begin()

            def on_test_begin(self, logs=None):
                probe.trained()

            def on_test_end(self, logs=None):
                probe.validated()

            def on_epoch_end(self, epoch, logs=None):
                if len(probe.moments) == self.epoch:  # no validation
                    probe.trained()

        return Reports()


def differs_in_an_epoch(trial: Any, train: Callable[[Any, Plan], Mapping], plan: Plan, batch_size: int) -> str:
    """How epochs of `train` differ from passes over all of the data, each in an order of its own, with all of the validation.

    Args:
        train: (clock, plan) → {"losses": per epoch, "epoch_accuracy": {"acc", "val_acc": per epoch}}, the function that is timed.

    Returns:
        "" where they do not.
    """
    bias = [name for name in plan.start if name.startswith("dense_") and name.endswith("/bias")][-1]
    classes, steps = len(plan.start[bias]), min(STEPS, len(plan.x) // batch_size)
    most, each = classes - 1, min(TAGS, batch_size)  # most: the class that is predicted
    tagged = range(min(most, steps * (batch_size // each)))
    labels = np.full((steps, batch_size), most, plan.y.dtype)
    for c in tagged:
        first = c // steps * each
        labels[c % steps, first : first + each] = c
    patterns = _patterns(steps, each)
    epochs = FEWEST_EPOCHS
    while steps > 1 and _chance([max(patterns.values())] * len(tagged), len(patterns), epochs, epochs) >= CHANCE:
        epochs += 1
    start = {name: np.zeros_like(array) for name, array in plan.start.items()}
    start[bias] = np.where(np.arange(classes) == most, 0.0, -GAP).astype(start[bias].dtype)
    xv, yv = plan.scored["val_acc"]
    size = min(len(xv), len(xv) % batch_size + 2 * batch_size)
    yv = np.full(size, most, yv.dtype)
    yv[-1] = 0
    probe = Probe(trial, start, bias)
    small = plan._replace(
        start=start, x=plan.x[: labels.size], y=labels.reshape(-1), epochs=epochs, scored={"val_acc": (xv[:size], yv)}
    )
    result = train(probe, small)

    if probe.steps != [steps] * epochs:
        return f"epochs of {steps} batches took {probe.steps} optimizer steps, expected {epochs} of them"
    seen = []  # per epoch: in which steps each class was
    for number, moment in enumerate(probe.moments, 1):
        found = [_pattern(-batch_size * moment[c], patterns) for c in tagged]
        if None in found or _off(batch_size * moment[most], _sum_of(np.sum(found, axis=0))):
            return f"epoch {number} did not train on every sequence of its data once, in steps of {batch_size}"
        seen.append(tuple(found))
    if steps > 1 and (why := _not_drawn(seen, patterns)):
        return why
    others = len(tagged) * each / labels.size
    accuracy, losses = result["epoch_accuracy"], result["losses"]
    if len(losses) != epochs or not np.allclose(losses, GAP * others, rtol=0, atol=GAP / labels.size / 4):
        return f"losses of {epochs} epochs: {_shown(losses)}, expected {GAP * others:.6g} of each"
    if why := _unlike("acc", accuracy, [1 - others] * epochs, labels.size):
        return why
    right = [size - 1 if k % 2 == 0 else 1 for k in range(epochs)]
    if probe.validations != epochs:
        return f"{probe.validations} validations in {epochs} epochs"
    return _unlike("val_acc", accuracy, [count / size for count in right], size)


def _patterns(steps: int, each: int) -> dict[tuple[int, ...], float]:
    """How often sequences of a class may be in each step of an epoch → how likely that is in an order drawn by chance."""
    found = [counts for counts in itertools.product(range(each + 1), repeat=steps) if sum(counts) == each]
    ways = [math.factorial(each) / math.prod(map(math.factorial, counts)) for counts in found]
    return {counts: number / steps**each for counts, number in zip(found, ways, strict=True)}


def _sum_of(counts: Sequence[float]) -> float:
    """What Adam's first moment, over 1 − β₁, keeps of them."""
    return sum(count * BETA_1 ** (len(counts) - 1 - t) for t, count in enumerate(counts))


def _pattern(moment: float, patterns: Mapping[tuple[int, ...], float]) -> tuple[int, ...] | None:
    return next((counts for counts in patterns if not _off(moment, _sum_of(counts))), None)


def _off(moment: float, expected: float) -> bool:
    return not abs(moment - expected) <= MOMENT_LIMIT * max(1.0, abs(expected) / TAGS)


def _not_drawn(seen: Sequence[tuple], patterns: Mapping[tuple[int, ...], float]) -> str:
    """Whether one order comes too often, or sequences stay together too often, for orders drawn by chance."""
    chance_together = Counter()
    for counts, chance in patterns.items():
        chance_together[tuple(sorted(counts))] += chance
    together = [tuple(tuple(sorted(counts)) for counts in order) for order in seen]
    for orders, chances, what in (
        (seen, patterns, "{} of {} epochs took the data in the same order"),
        (
            together,
            chance_together,
            "in {} of {} epochs sequences that follow each other in the data shared their batches",
        ),
    ):
        for order, times in Counter(orders).items():
            if times > 1 and _chance([chances[counts] for counts in order], len(chances), times, len(seen)) < CHANCE:
                return f"{what.format(times, len(seen))}, expected an order of its own for each"
    return ""


def _chance(order: Sequence[float], kinds: int, times: int, epochs: int) -> float:
    """How likely some order as rare as this one is to come so many times: one factor per class, of so many kinds each."""
    return math.comb(epochs, times) * math.prod(kinds * one**times for one in order)


def _unlike(name: str, accuracy: Mapping[str, Sequence[float]], expected: Sequence[float], size: int) -> str:
    found = accuracy.get(name, [])
    if len(found) == len(expected) and np.allclose(found, expected, rtol=0, atol=0.1 / size):
        return ""
    return f"{name} by epoch: {_shown(found)}, expected {_shown(expected)} over {size} sequences"


def _shown(numbers: Sequence[float]) -> str:
    return ", ".join(f"{number:.6g}" for number in numbers) or "none"


# --- the timed training --------------------------------------------------------------------------------------------------


def differs_in_counts(trial: Any, result: Mapping[str, Any], clock: Any, plan: Plan, batch_size: int) -> str:
    """How many steps, epochs and validations ran and were reported, where it is not what `plan` says. Reads two scalars."""
    steps, taken = plan.epochs * (len(plan.x) // batch_size), trial.moments()[0]
    if taken != steps:
        return f"{taken} optimizer steps of {batch_size} sequences, expected {steps}: {plan.epochs} epochs of {len(plan.x)}"
    accuracy = result["epoch_accuracy"]
    reported = {
        "losses": result["losses"],
        "trained epochs": clock.train_s,
        "validations": clock.validation_s,
        **accuracy,
    }
    for name, values in {"acc": (), "val_acc": (), **reported}.items():
        if len(values) != plan.epochs:
            return f"{name}: {len(values)} epochs, expected {plan.epochs}"
    for name, value in result["accuracy"].items():
        if name in accuracy and value != accuracy[name][-1]:
            return f"{name} {value:.4f} is not of the last epoch, {accuracy[name][-1]:.4f}"
    return ""


def differs_in_accuracy(trial: Any, accuracy: Mapping[str, float], plan: Plan, limit: Limit, batch_size: int) -> str:
    """Accuracies against those of the final weights, but for sequences whose two likeliest classes a rounding may turn."""
    for name, (x, y) in plan.scored.items():
        logits = np.float64(trial.logits(x))  # [n, classes]
        if logits.shape[:1] != np.shape(y):
            return f"{name}: {len(logits)} sequences were evaluated, expected {len(y)}"
        own = np.take_along_axis(logits, np.int64(y)[:, np.newaxis], axis=1)[:, 0]
        others = logits.copy()
        np.put_along_axis(others, np.int64(y)[:, np.newaxis], -np.inf, axis=1)
        margin, rounding = own - others.max(axis=1), 2 * limit.outputs * np.abs(logits).max()
        least, most = int(np.sum(margin > rounding)), int(np.sum(margin >= -rounding))
        right = accuracy.get(name, math.nan) * len(y)
        if not least - 0.1 <= right <= most + 0.1 or abs(right - round(right)) > 0.1:
            return f"{name}: {right:.6g} of {len(y)} right were reported, the final weights give {least} to {most}"
    return ""


def differs_in_rate(trial: Any, plan: Plan) -> str:
    """The rate of one more step, w −= rate · √(1 − β₂^t) / (1 − β₁^t) · m / (√v + ε), from what it did to the weights."""
    before = trial.weights()
    trial.timed_steps(1)
    after, (t, first, second) = trial.weights(), trial.moments()
    t = max(t, 1)
    scale = math.sqrt(1 - BETA_2**t) / (1 - BETA_1**t)
    step = np.concatenate([np.ravel(scale * first[k] / (np.sqrt(np.float64(second[k])) + EPSILON)) for k in before])
    moved = np.concatenate([np.ravel(np.float64(before[name]) - after[name]) for name in before])
    return _off_rate(f"step {t}", moved, step, before, plan.rate(t - 1), RATE_LIMIT)


def _off_rate(where: str, moved: np.ndarray, step: np.ndarray, weights: Mapping, expected: float, limit: float) -> str:
    """`moved` has to be `expected` times `step`, as far as stored float32 weights show it."""
    rate = float(moved @ step / (step @ step)) if step.any() else math.nan
    size = math.sqrt(sum(float(norm_2(array)) ** 2 for array in weights.values()))
    limit += STORED * size / max(expected * float(norm_2(step)), 1e-300)
    if abs(rate - expected) <= limit * expected:
        return ""
    return f"the learning rate of {where} was {rate:.6g}, expected {expected:.6g}"


# --- PTB's training -------------------------------------------------------------------------------------------------------


class Schedule(NamedTuple):
    """What PTB's whole training is configured to be.

    Attributes:
        rates: learning rate of each epoch.
        train: inputs and targets [n, batch, time] of an epoch.
        texts: name of a perplexity → (batches, states): (inputs, targets) [batch, time] in their order, and the canonical states
            that the first of them starts from.
        sum_over_time: whether a batch's loss is summed over its steps; else it is their mean.
    """

    rates: Sequence[float]
    train: tuple[np.ndarray, np.ndarray]
    texts: Mapping[str, tuple[Sequence[tuple[np.ndarray, np.ndarray]], Sequence]]
    sum_over_time: bool = True

    def mean_loss(self, losses: np.ndarray, steps: Sequence[int]) -> float:
        """Per token, of the losses [n] of batches of so many steps."""
        sums = np.float64(losses) if self.sum_over_time else np.float64(losses) * steps
        return float(np.sum(sums) / np.sum(steps))


def flat_then_decaying(rate: float, epochs: int, flat_epochs: int, decay: float) -> list[float]:
    """Rate of each epoch: `flat_epochs` at the full one, then each `decay` times the one before."""
    return [rate] * min(flat_epochs, epochs) + [rate * decay ** (k + 1) for k in range(epochs - flat_epochs)]


class Watched:
    """A language model whose `train` and `train_epoch` note what they are called with, while it is used as a context.

    A step costs two appends to a list more.
    """

    def __init__(self, trial: Any) -> None:
        self._trial = trial
        self.rates: list[float] = []
        self.batches: list[list] = []  # per epoch, in their order, as they were staged
        self.losses: list[list] = []  # per epoch, on the device until `read`

    def __enter__(self) -> "Watched":
        trial, epoch_of, step = self._trial, self._trial.train_epoch, self._trial.train

        def train(batch):
            loss = step(batch)
            if self.batches:
                self.batches[-1].append(batch)
                self.losses[-1].append(loss)
            return loss

        def train_epoch(batches, learning_rate):
            self.rates.append(learning_rate), self.batches.append([]), self.losses.append([])
            return epoch_of(batches, learning_rate)

        self._own = {name: vars(trial)[name] for name in ("train", "train_epoch") if name in vars(trial)}
        trial.train, trial.train_epoch = train, train_epoch
        return self

    def __exit__(self, *_) -> None:
        del self._trial.train, self._trial.train_epoch
        vars(self._trial).update(self._own)

    def read(self, to_numpy: Callable) -> None:
        """Bring the losses to the host; after the clock stopped."""
        self.losses = [to_numpy(epoch) if epoch else np.zeros(0) for epoch in self.losses]


def differs_in_schedule(
    watched: Watched, result: Mapping[str, Any], schedule: Schedule, limit: Limit, numpy: Callable
) -> str:
    """How the epochs that ran, and what was reported of them, differ from the schedule."""
    epochs = len(schedule.rates)
    if not len(watched.rates) == len(result["losses"]) == len(result["epoch_s"]) == epochs:
        reported = f"{len(result['losses'])} losses and {len(result['epoch_s'])} times reported"
        return f"{len(watched.rates)} epochs ran, {reported}, expected {epochs}"
    for number, (rate, expected) in enumerate(zip(watched.rates, schedule.rates, strict=True), 1):
        if not abs(rate - expected) <= 1e-9 * expected:
            return f"epoch {number} trained at rate {rate:.6g}, expected {expected:.6g}"
    known: dict[int, tuple] = {}  # the arrays of a batch on the device
    steps = [schedule.train[0].shape[2]] * len(schedule.train[0])
    for number, (batches, losses) in enumerate(zip(watched.batches, watched.losses, strict=True), 1):
        if len(batches) != len(steps):
            return f"epoch {number} took {len(batches)} batches, expected {len(steps)}"
        for k, batch in enumerate(batches):
            if id(batch) not in known:
                known[id(batch)] = tuple(numpy(array) for array in batch)
            for array, expected in zip(known[id(batch)], schedule.train, strict=True):
                if not (np.array_equal(array, expected[k]) or np.array_equal(array.T, expected[k])):
                    return f"batch {k + 1} of epoch {number} is not that of the text"
        mean = schedule.mean_loss(losses, steps)
        if not abs(result["losses"][number - 1] - mean) <= limit.loss * mean:
            return f"loss {result['losses'][number - 1]:.6g} of epoch {number}, its steps gave {mean:.6g}"
    return ""


def differs_in_perplexity(trial: Any, result: Mapping[str, Any], schedule: Schedule, limit: Limit) -> str:
    """Perplexities against those of the final weights on the whole texts, that of the training against its last epoch."""
    expected = {"train": result["losses"][-1]}
    for name, (batches, states) in schedule.texts.items():
        losses = trial.stacked(trial.losses_of([trial.stage(*batch) for batch in batches], states))
        if np.shape(losses) != (len(batches),):
            return f"{name}: {len(losses)} batches were evaluated, expected {len(batches)}"
        expected[name] = schedule.mean_loss(losses, [inputs.shape[1] for inputs, _ in batches])
    for name, loss in expected.items():
        if not abs(math.log(result["perplexity"].get(name, math.inf)) - loss) <= limit.loss * loss:
            found = result["perplexity"].get(name, math.nan)
            return f"perplexity {name}: {found:.6g} was reported, the whole text gives {math.exp(loss):.6g}"
    return ""


def differs_in_step(trial: Any, gradients: Mapping[str, np.ndarray], schedule: Schedule, limit: Limit) -> str:
    """Whether a step of `train_epoch`, of plain SGD from where the proof began, moves the weights by each of the rates."""
    step = np.concatenate([np.ravel(np.float64(gradient)) for gradient in gradients.values()])
    for rate in dict.fromkeys([schedule.rates[0], *schedule.rates[-2:]]):
        trial.restore()
        before = trial.weights()
        with trial.without_dropout():
            trial.train_epoch(trial.batches[:1], rate)
        after = trial.weights()
        moved = np.concatenate([np.ravel(np.float64(before[name]) - after[name]) for name in gradients])
        if why := _off_rate(f"an epoch at {rate:.6g}", moved, step, before, rate, limit.gradients):
            trial.restore()
            return why
    trial.restore()
    return ""
