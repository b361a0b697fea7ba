"""What the networks of all frameworks have in common outside of their steps: what the proof asks of them, and whole trainings.

NumPy only. A framework's class adds the network, its steps, and the hooks by which these methods read and move its tensors.
"""

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from models.reference import dropout, expected
from models.reference.expected import SHOWN, upstream
from models.reference.networks import IGNORED


def arrays_of(stack: Any, weights: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """Canonical weights in the order of a language model's variables: embedding, the stack's, dense_0's kernel and bias."""
    return [weights["embedding"], *stack.from_canonical(weights), weights["dense_0/kernel"], weights["dense_0/bias"]]


def canonical_of(stack: Any, arrays: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    """Arrays in that order (weights, gradients or an optimizer's moments) under canonical names."""
    embedding, *own, kernel, bias = arrays
    return {"embedding": embedding, **stack.to_canonical(own), "dense_0/kernel": kernel, "dense_0/bias": bias}


def mean_loss(losses: np.ndarray, steps: Sequence[int], reduction: str) -> float:
    """Per token, over batches [n] of so many steps each; their losses are means, or sums over time ("sum_over_time")."""
    losses, steps = np.asarray(losses, np.float64), np.asarray(steps)
    return float(np.sum(losses if reduction == "sum_over_time" else losses * steps) / steps.sum())


def rates_of_stack(lstm_dropout: Sequence[float], num_layers: int) -> tuple[float, float]:
    """(rate between the layers, rate after the last one) of rates after each layer; ValueError where the former differ."""
    rates = (*lstm_dropout, *[0.0] * num_layers)[:num_layers]
    if len(set(rates[:-1])) > 1:
        raise ValueError(f"lstm_dropout: {list(lstm_dropout)} given, expected one rate between all layers of a stack")
    return (rates[0] if num_layers > 1 else 0.0), rates[-1]


def layers_of(states: Sequence[np.ndarray]) -> list:
    """Canonical states (layers × directions × (h, c)) of h and c of all layers [layers, batch, units], or of each in turn."""
    if states[0].ndim == 3:
        return [[pair] for pair in zip(*states, strict=True)]
    return [[pair] for pair in zip(states[::2], states[1::2], strict=True)]


@contextlib.contextmanager
def dropout_off(model: Any) -> Iterator[None]:
    """A context in which `model.set_dropout_rate` has set the rate to 0; `model.dropout_rate` comes back after it."""
    rate = model.dropout_rate
    model.set_dropout_rate(0.0)
    try:
        yield
    finally:
        model.set_dropout_rate(rate)


class Trial:
    """What the proof asks of every network, in terms of what each framework does."""

    # -- of each framework ---------------------------------------------------------------------------------------------

    def restore(self) -> None:
        """Weights, optimizer and states as they were at the start; copies on the device."""
        raise NotImplementedError

    def numpy(self, tensor: Any) -> np.ndarray:
        """A copy on the host."""
        raise NotImplementedError

    def _weights(self) -> Sequence:
        """All weights now, in the order of `_canonical`; so is `_applied`."""
        raise NotImplementedError

    def _applied(self) -> Sequence:
        """The gradients that the one step since `restore` applied."""
        raise NotImplementedError

    def _canonical(self, tensors: Sequence) -> dict[str, np.ndarray]:
        """Tensors in the order of the weights (gradients, an optimizer's moments) under canonical names."""
        raise NotImplementedError

    # -- what the proof needs ------------------------------------------------------------------------------------------

    def graph_mismatch(self) -> str:
        """How the timed step differs from the one that the proof ran; "" where they are one callable."""
        return ""

    def first_gradients(self) -> dict[str, np.ndarray]:
        """After exactly one step since `restore`: the gradients that the optimizer applied."""
        return self._canonical(self._applied())

    def weights(self) -> dict[str, np.ndarray]:
        """All weights now, in the canonical form."""
        return self._canonical(self._weights())


class LanguageModelTrial(Trial):
    """A language model as the proof needs it: the same callables that are timed, on batches that lie on the device.

    Attributes of a subclass:
        stack: with units, from_canonical, to_canonical and stage_states.
        batches: staged (tokens, targets) pairs.
        states, initial_states: of the next step, and those that `restore` comes back to.
        reduction, carry_states: as given to it.
        has_dropout, dropout_rate: whether the timed steps draw dropout masks, and by which rate now.
        time_major: whether its tensors are [time, batch, …].
        shapes_vary: whether its batches have several lengths, for each of which something may be traced or captured.
        _start: the weights that `restore` comes back to, the embedding first.
    """

    time_major = False
    shapes_vary = False
    # By how large a part the framework's own clipping makes all updates too large, where that is known.
    update_rounding = 0.0

    # -- of each framework ---------------------------------------------------------------------------------------------

    def train(self, batch: Any) -> Any:
        """One optimizer step; returns its loss (before the update), a device scalar."""
        raise NotImplementedError

    def forward(self, batch: Any) -> Any:
        """Logits and loss with training=False; returns the loss, a device scalar."""
        raise NotImplementedError

    def set_dropout_rate(self, rate: float) -> None:
        """For all steps from now on, by the same callable."""
        raise NotImplementedError

    def stacked(self, losses: Sequence) -> np.ndarray:
        """Device scalars as one array [n] on the host, in one copy."""
        raise NotImplementedError

    def _staged(self, array: np.ndarray) -> Any:
        """On the device in the compute dtype."""
        raise NotImplementedError

    def _pass(self, tokens: Any, targets: Any, states: Any) -> tuple:
        """(loss, hidden, logits, final states) of a forward pass."""
        raise NotImplementedError

    def stack_alone(self, batch: tuple) -> Sequence:
        """The stack's forward pass in training mode, without dropout, and its backward pass.

        Args:
            batch: one of `stack_batches`: inputs [batch, time, embedding] and the gradient by the outputs.

        Returns:
            mean(outputs²), a device scalar, the outputs, and the gradients by the inputs and by each of the stack's parameters:
            all are results of what is timed, so that none can be left out as unused.
        """
        raise NotImplementedError

    def _moments(self) -> tuple[float, Sequence, Sequence] | None:
        """Adam's steps so far, and its first and second moments of all weights; None of SGD."""
        raise NotImplementedError

    def _learning_rate(self) -> float:
        raise NotImplementedError

    def _set_learning_rate(self, rate: float) -> None:
        raise NotImplementedError

    def _set_start(self, arrays: Sequence[np.ndarray], states: Sequence | None) -> None:
        """Put both where `restore` finds them; None: the states that it has."""
        raise NotImplementedError

    # -- what the proof needs ------------------------------------------------------------------------------------------

    @functools.cached_property
    def stack_batches(self) -> list[tuple]:
        """What `stack_alone` is timed on: the embedded tokens of every batch by the start's embedding, and `upstream`."""
        table, tokens = self.numpy(self._start[0]), [self.numpy(tokens) for tokens, _ in self.batches]
        gradient = self._staged(self._batch_major(upstream((*self._batch_major(tokens[0]).shape, self.stack.units))))
        return [(self._staged(table[ids]), gradient) for ids in tokens]

    def stack_results(self, number: int = 0) -> dict[str, np.ndarray]:
        """`stack_alone` on one of its batches: "hidden", and the gradients by "inputs" and the stack's weights."""
        _, *tensors = (self.numpy(x) for x in self.stack_alone(self.stack_batches[number]))
        found = {name: self._batch_major(x) for name, x in zip(("hidden", "inputs"), tensors, strict=False)}
        return found | (self.stack.to_canonical(tensors[2:]) if tensors[2:] else {})

    def outputs(self) -> dict[str, np.ndarray]:
        """The timed forward pass on the first batch: loss, hidden [batch, time, units], logits of SHOWN sequences."""
        loss, hidden, logits = (self.numpy(x) for x in self._run_forward(self.batches[0]))
        return {"loss": loss, "hidden": self._batch_major(hidden), "logits": self._batch_major(logits)[:SHOWN]}

    def _run_forward(self, batch: tuple) -> Sequence:
        """(loss, hidden, logits) by the callable that `forward` times."""
        return self._pass(*batch, self.states)[:3]

    def forward_losses(self, count: int) -> np.ndarray:
        """Losses [count] of forward passes over the first batches."""
        return np.array([self.numpy(self.forward(self.batches[k % len(self.batches)])) for k in range(count)])

    def train_steps(self, count: int, first: int = 0) -> np.ndarray:
        """Losses [count] of that many training steps from batch `first` on, with dropout off."""
        batches = [self.batches[k % len(self.batches)] for k in range(first, first + count)]
        with self.without_dropout():
            return np.array([self.numpy(self.train(batch)) for batch in batches])

    def reference_step(
        self, setup: Mapping[str, float], number: int, update: bool
    ) -> tuple[float, dict[str, np.ndarray]]:
        """(loss, update of every weight) of the float64 reference's step from the weights, states and optimizer as they are now.

        Args:
            setup: as the reference file has it (models.reference.expected.language_model).
            number: of the batch.
            update: False: the loss alone, and {}.
        """
        made = self._moments()
        moments = made and (int(made[0]), *(self._canonical(part) for part in made[1:]))
        return expected.step(setup, self.weights(), self._states_now(), self._words(number), moments, update)

    def _states_now(self) -> list:
        """The canonical states that the next step starts from."""
        return layers_of([self.numpy(state) for state in flat(self.states)])

    def _words(self, number: int) -> list[np.ndarray]:
        """Tokens and targets [batch, time] of a batch."""
        tokens, targets = self.batches[number % len(self.batches)]
        return [self._batch_major(self.numpy(ids)) for ids in (flat(tokens)[0], targets)]

    def require_words(self, batches: Sequence[tuple]) -> None:
        """ValueError where a staged batch has other words than its own of these: (tokens, targets, …), arrays [batch, time].

        It may be padded further, by tokens of 0 and targets of IGNORED.
        """
        if len(batches) != len(self.batches):
            raise ValueError(f"{len(self.batches)} batches staged, {len(batches)} given")
        for number, given in enumerate(batches):
            for name, staged, wanted, padding in zip(
                ("tokens", "targets"), self._words(number), given, (0, IGNORED), strict=False
            ):
                if wanted.shape[1] <= staged.shape[1]:
                    wanted = padded(wanted, staged.shape[1], padding)
                if not np.array_equal(staged, wanted):
                    raise ValueError(f"batch {number + 1}: the row has other {name} than the script gave it")

    def gradients_elsewhere(self, bias: np.ndarray, targets: np.ndarray) -> dict[str, np.ndarray]:
        """What `first_gradients` gives from another head, dense_0's kernel 0 and this bias, on other targets [batch, time]."""
        self.restore()
        weights, batches = self.weights(), self.batches
        kernel = np.zeros_like(weights["dense_0/kernel"])
        self.start_from(weights | {"dense_0/kernel": kernel, "dense_0/bias": bias.astype(kernel.dtype)}, None)
        try:
            self.batches = [(batches[0][0], self._staged_targets(targets))]
            self.train_steps(1)
            return self.first_gradients()
        finally:
            self.batches = batches
            self.start_from(weights, None)

    def _staged_targets(self, targets: np.ndarray) -> Any:
        """Targets [batch, time] as a staged batch has them."""
        return self.stage(targets, targets)[1]

    def dropout_losses(self, count: int) -> np.ndarray:
        """Losses [1, count] of consecutive timed steps on the first batch, from weights that tell the dropout's rates.

        The learning rate is 0 and these weights forget the states, so each step has the same loss but for its masks.
        """
        self.restore()
        start, rate = self.weights(), self._learning_rate()
        telling = dropout.language_model_weights(start, self._words(0)[1])
        try:
            self.start_from(telling, None)
            self._set_learning_rate(0.0)
            return self.stacked([self.train(self.batches[0]) for _ in range(count)])[np.newaxis]
        finally:
            self._set_learning_rate(rate)
            self.start_from(start, None)

    def without_dropout(self) -> contextlib.AbstractContextManager:
        """Context in which the dropout rate, a variable of the step, is 0."""
        return dropout_off(self)

    def _canonical(self, tensors: Sequence) -> dict[str, np.ndarray]:
        return canonical_of(self.stack, [self.numpy(tensor) for tensor in tensors])

    # -- a whole training ----------------------------------------------------------------------------------------------

    def start_from(self, weights: Mapping[str, np.ndarray], states: Sequence | None) -> None:
        """From now on `restore` comes back to these weights and states (None: its own), with a fresh optimizer; restores."""
        self._set_start(arrays_of(self.stack, weights), states)
        self.restore()

    def train_epoch(self, batches: Sequence, learning_rate: float) -> float:
        """One pass over staged batches from the initial states; returns the mean loss per token."""
        self._set_learning_rate(learning_rate)
        self._restore_states()
        return self._mean_loss(batches, [self.train(batch) for batch in batches])

    def _restore_states(self) -> None:
        self.states = self.initial_states

    def evaluate(self, batches: Sequence, states: Sequence) -> float:
        """Mean loss per token over staged batches, states carried from `states` (canonical) on, dropout off."""
        return self._mean_loss(batches, self.losses_of(batches, states))

    def losses_of(self, batches: Sequence, states: Sequence) -> list:
        """Losses of forward passes over staged batches, on the device; states as of `evaluate`."""
        staged, losses = self.stack.stage_states(states), []
        for tokens, targets in batches:
            loss, _, _, staged = self._pass(tokens, targets, staged)
            losses.append(loss)
        return losses

    def _mean_loss(self, batches: Sequence, losses: Sequence) -> float:
        """Per token, each batch weighted by its steps."""
        return mean_loss(self.stacked(losses), [tokens.shape[self._time_axis] for tokens, _ in batches], self.reduction)

    @property
    def _time_axis(self) -> int:
        return 0 if self.time_major else 1

    def _batch_major(self, array: np.ndarray) -> np.ndarray:
        """[batch, time, …] from the network's own order, and the other way round: they differ in the first two axes."""
        return array.swapaxes(0, 1) if self.time_major else array


def padded(ids: np.ndarray, steps: int, value: int) -> np.ndarray:
    """Words [batch, time] as [batch, steps], with `value` after them."""
    return np.pad(ids, ((0, 0), (0, steps - ids.shape[1])), constant_values=value)


def flat(states: Any) -> list:
    """The tensors of nested tuples and lists, in their order."""
    return [tensor for part in states for tensor in flat(part)] if isinstance(states, tuple | list) else [states]


def dropout_losses_of_fit(trial: Any, count: int) -> np.ndarray:
    """Losses [weights, count] of the timed step on the first batch, from two sets of weights that tell the dropout's rates."""
    trial.restore()
    start = trial.weights()

    def first_loss() -> float:
        trial.restore()
        [loss] = trial.timed_steps(1)
        return loss

    found = []
    for telling in dropout.classifier_weights(start, trial.labels[: trial.batch_size]):
        trial.load(telling)
        found.append([first_loss() for _ in range(count)])
    trial.load(start)
    return np.array(found)


NO_DROPOUT = (0.0, 0.0, 0.0)  # between the LSTM layers, after the last one, after every relu layer


class ClassifierTrial(Trial):
    """A classifier with a training loop of its own, as the proof needs it: the steps that `fit` times, on its own batches.

    Attributes of a subclass:
        stack: with from_canonical and to_canonical.
        inputs, labels, batch_size: of the proof; its steps walk them in order.
        rates: of dropout in the three places of NO_DROPOUT; 0: no dropout ops.
        _dense_names: the canonical names of what is not the stack, in the order of the weights.
    """

    # -- of each framework ---------------------------------------------------------------------------------------------

    def timed_steps(self, count: int) -> np.ndarray:
        """Losses [count] of training on the first `count` batches, in order, with dropout."""
        raise NotImplementedError

    def _stage(self, x: np.ndarray, y: np.ndarray) -> Any:
        """Put a data set where the steps gather from; ValueError for a size that is not whole batches, or has no room."""
        raise NotImplementedError

    def _batches(self, x: np.ndarray, y: np.ndarray) -> list:
        """(x, y) of each batch on the device, the last batch with what is left."""
        raise NotImplementedError

    def _wait(self, data: Any, batches: list, count: int) -> None:
        """Until all of it lies on the device, and what draws an order of `count` sequences is compiled."""
        raise NotImplementedError

    def _epoch(self, data: Any, count: int) -> tuple[float, float]:
        """(mean loss, accuracy) of one pass in an order of its own; reading them waits for the device."""
        raise NotImplementedError

    def _evaluate(self, batches: list) -> int:
        """Labels that are the likeliest class, over staged batches."""
        raise NotImplementedError

    def _logits(self, batch: Any) -> Any:
        """[batch, classes] of a staged batch, by the forward pass of `_evaluate`."""
        raise NotImplementedError

    def _moments(self) -> tuple[int, Sequence, Sequence]:
        """As `moments`, in the order of the weights."""
        raise NotImplementedError

    def _set_rates(self, rates: tuple[float, float, float]) -> None:
        """Of dropout, for all steps from now on."""
        raise NotImplementedError

    def _set_start(self, arrays: Sequence[np.ndarray]) -> None:
        """Put the weights where `restore` finds them."""
        raise NotImplementedError

    # -- a whole training ----------------------------------------------------------------------------------------------

    def fit(
        self, x: np.ndarray, y: np.ndarray, epochs: int, validation: tuple[np.ndarray, np.ndarray] | None, clock: Any
    ) -> dict[str, object]:
        """Train on x [n, time, features] and y [n] in an order of its own every epoch, from the weights as they are.

        Args:
            validation: (x, y), whose accuracy is taken after every epoch, or None. Its last batch may be a smaller one.
            clock: harness.measure.clocks.EpochClock, or anything with begin(), trained() and validated().

        Returns:
            {"losses": mean over the steps of each epoch, "accuracy": {"acc", "val_acc"} of the last epoch, "epoch_accuracy": the
            same of each epoch}, with "acc" counted during training, under dropout, as Keras counts it.

        Raises:
            ValueError: n is no multiple of the batch size, whose rest would take another step than the proven one.
        """
        data = self._stage(x, y)
        batches = self._batches(*validation) if validation else []
        losses, accuracy, by_epoch = [], {}, {}
        self._wait(data, batches, len(x))
        for epoch in range(epochs):
            clock.begin()
            loss, accuracy["acc"] = self._epoch(data, len(x))
            clock.trained()  # the device is idle: its sums have been read
            losses.append(loss)
            if batches:
                accuracy["val_acc"] = self._evaluate(batches) / len(validation[0])
                clock.validated()
            for name, value in accuracy.items():
                by_epoch.setdefault(name, []).append(value)
            shown = ", ".join(f"{name} {value:.4f}" for name, value in {"loss": loss, **accuracy}.items())
            print(f"epoch {epoch + 1}/{epochs}: {shown}", flush=True)
        return {"losses": losses, "accuracy": accuracy, "epoch_accuracy": by_epoch}

    def warm_up(self, validation: tuple[np.ndarray, np.ndarray]) -> None:
        """Build before the clock starts what a validation runs: a whole batch and the last one are two shapes."""
        rest = self.batch_size + len(validation[0]) % self.batch_size
        self._evaluate(self._batches(*(array[-rest:] for array in validation)))

    def load(self, weights: Mapping[str, np.ndarray]) -> None:
        """From now on `restore` loads these weights: the ones that a training starts from."""
        self._set_start([*self.stack.from_canonical(weights), *(weights[name] for name in self._dense_names)])
        self.restore()

    # -- what the proof needs ------------------------------------------------------------------------------------------

    dropout_losses = dropout_losses_of_fit

    def train_steps(self, count: int, clock: Any = None) -> np.ndarray:
        """As `timed_steps`, with dropout off; `clock` is not called."""
        with self.without_dropout():
            return self.timed_steps(count)

    @contextlib.contextmanager
    def without_dropout(self) -> Iterator[None]:
        """Context in which every dropout rate, a variable of the step, is 0."""
        self._set_rates(NO_DROPOUT)
        try:
            yield
        finally:
            self._set_rates(self.rates)

    def moments(self) -> tuple[int, dict[str, np.ndarray], dict[str, np.ndarray]]:
        """The optimizer now: steps that it has taken since `restore`, Adam's first and second moments."""
        steps, first, second = self._moments()
        return int(steps), self._canonical(first), self._canonical(second)

    def logits(self, x: np.ndarray) -> np.ndarray:
        """[n, classes] of x [n, time, features] by the forward pass that is timed, without dropout."""
        return np.concatenate(
            [self.numpy(self._logits(batch)) for batch in self._batches(x, np.zeros(len(x), np.int64))]
        )

    def _canonical(self, tensors: Sequence) -> dict[str, np.ndarray]:
        arrays, own = [self.numpy(tensor) for tensor in tensors], len(tensors) - len(self._dense_names)
        return self.stack.to_canonical(arrays[:own]) | dict(zip(self._dense_names, arrays[own:], strict=True))

    def _check_size(self, count: int, room: int) -> None:
        if count % self.batch_size or count > room:
            raise ValueError(
                f"{count} sequences given, expected a multiple of the batch size {self.batch_size}, "
                f"at most {room} (`capacity`)"
            )
