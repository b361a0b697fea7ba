"""The classifier of MNIST in JAX, around any LSTM stack of models/jax/stacks.py, with a training loop of its own.

    sequences [batch, time, features] → LSTM stack → last output → Dense(relu) … → Dense → softmax over the classes

The counterpart of models/pytorch/classifier.py, with its methods: the whole data set lies on the device, every epoch draws its
order there, and a step gathers its own batch. A step is one jitted function, optimizer included, which is given all that it
changes to overwrite (donated). Nothing waits for the device but the end of an epoch.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from models import trial
from models.jax.language_model import COMPUTE_DTYPE
from models.jax.optimizers import OPTIMIZERS
from models.jax.stacks import JaxStack, add_bias
from models.weights.canonical import stack_size

Array = jax.Array


class State(NamedTuple):
    """What a step changes."""

    parameters: list[Array]
    slots: dict  # of the optimizer
    key: Array  # of the dropout masks
    position: Array  # in the order of the sequences
    loss_sum: Array
    correct: Array  # labels that were the likeliest class


class JaxClassifier(trial.ClassifierTrial):
    """One callable for a training step and one for a forward pass; `fit` is a plain loop over both.

    Every dropout rate is an argument of the jitted step, so the proof runs the very executable that is timed.

    Args:
        stack: the LSTM stack; its dtype is the compute dtype of the whole network.
        weights: canonical weights to start from; `restore` comes back to them.
        inputs, labels: [batches · batch_size, time, features] and [batches · batch_size] NumPy arrays: what the proof's steps
            walk in order.
        batch_size: sequences in a step.
        optimizer: ("Adam", learning rate, decay): the rate at step t = 0, 1, … is learning rate / (1 + decay · t).
        rates: of the dropout between the LSTM layers, after the last one, and after every relu layer; 0: no dropout ops.
        loss_scale: static, of a float16 stack, as in models/tf/language_model.py.
        capacity: sequences in the largest data set that `fit` will be given; None: as many as `inputs`. Smaller ones are
            filled up to it, since another size would be another executable.
        seed: of the order of the sequences and the dropout masks.

    Attributes:
        traces: how often the training step was traced.
    """

    def __init__(
        self,
        stack: JaxStack,
        weights: Mapping[str, np.ndarray],
        inputs: np.ndarray,
        labels: np.ndarray,
        batch_size: int,
        optimizer: tuple[str, float, float],
        *,
        rates: tuple[float, float, float] = trial.NO_DROPOUT,
        loss_scale: float = 1.0,
        capacity: int | None = None,
        seed: int = 0,
    ) -> None:
        self.stack, self.rates = stack, rates
        self.inputs, self.labels, self.batch_size = inputs, labels, batch_size
        self.dtype = jnp.dtype("float64" if stack.dtype == "float64" else "float32")  # of parameters, softmax and loss
        self.loss_scale = loss_scale if stack.dtype == "float16" else 1.0
        self._dense_names = [name for name in weights if name.startswith("dense_")]
        kind, *rate_and_decay = optimizer
        self.optimizer = OPTIMIZERS[kind]()
        self._rate_and_decay = tuple(jnp.asarray(number, self.dtype) for number in rate_and_decay)
        self._room = max(capacity or 0, len(inputs))
        self._batch_axis = 1 if stack.time_major else 0
        # XLA's own generator: the default one, threefry, takes several times as long
        self._key, self._order_key = jax.random.split(jax.random.key(seed, impl="rbg"))
        self.traces = 0
        self._train = jax.jit(self._train_step, donate_argnums=0)
        self._forward = jax.jit(self._forward_step)
        self._set_rates(rates)
        self._state: State | None = None
        self.load(weights)

    # -- what is timed -------------------------------------------------------------------------------------------------

    def _wait(self, data, batches, count):
        jax.block_until_ready((data, batches, self._drawn_order(count)))

    def _epoch(self, data, count):
        order = self._drawn_order(count)
        self._begin()
        steps = count // self.batch_size
        for _ in range(steps):
            _, self._state = self._train(self._state, self._rates, self._rate_and_decay, *data, order)
        loss, correct = jax.device_get((self._state.loss_sum, self._state.correct))
        return float(loss) / steps, int(correct) / count

    def _drawn_order(self, size: int) -> Array:
        self._order_key, own = jax.random.split(self._order_key)
        return self._filled(jax.random.permutation(own, size))

    def _begin(self) -> None:
        """At the head of an order, with nothing summed up: new arrays, since a step overwrites them."""
        self._state = self._state._replace(
            position=jnp.zeros((), jnp.int32), loss_sum=jnp.zeros((), self.dtype), correct=jnp.zeros((), jnp.int32)
        )

    def _evaluate(self, batches):
        correct = jnp.zeros((), jnp.int32)
        for batch in batches:
            _, _, correct = self._forward(self._state.parameters, correct, *batch)
        return int(correct)

    def _logits(self, batch):
        return self._forward(self._state.parameters, jnp.zeros((), jnp.int32), *batch)[1]

    # -- what the proof needs ------------------------------------------------------------------------------------------

    def restore(self) -> None:
        """Weights and optimizer as they were at the start; copies on the device, since a step overwrites them.

        Masks are drawn on from where they were.
        """
        parameters = [jnp.copy(array) for array in self._start]
        sums = jnp.zeros((), jnp.int32), jnp.zeros((), self.dtype), jnp.zeros((), jnp.int32)
        key = jnp.copy(self._key) if self._state is None else self._state.key
        self._state = State(parameters, self.optimizer.slots(parameters), key, *sums)

    def outputs(self) -> dict[str, np.ndarray]:
        """The timed forward pass on the first batch: logits and loss."""
        [batch] = self._batches(self.inputs[: self.batch_size], self.labels[: self.batch_size])
        loss, logits, _ = self._forward(self._state.parameters, jnp.zeros((), jnp.int32), *batch)
        return {"loss": np.asarray(loss), "logits": np.asarray(logits)}

    def timed_steps(self, count: int) -> np.ndarray:
        size, losses = count * self.batch_size, []
        data = self._stage(self.inputs[:size], self.labels[:size])
        order = self._filled(jnp.arange(size))
        self._begin()
        for _ in range(count):
            loss, self._state = self._train(self._state, self._rates, self._rate_and_decay, *data, order)
            losses.append(loss)
        return np.array(jax.device_get(losses))

    def _applied(self):
        rate = float(self._rate_and_decay[0])
        return self.optimizer.applied(self._start, self._state.parameters, self._state.slots, rate)

    def _moments(self):
        slots = self._state.slots
        return slots["iterations"], slots["m"], slots["v"]

    def _weights(self):
        return self._state.parameters

    def numpy(self, tensor: Array) -> np.ndarray:
        return np.array(tensor)

    def _set_start(self, arrays):
        self._start = [jnp.array(array, self.dtype) for array in arrays]

    def _set_rates(self, rates: tuple[float, float, float]) -> None:
        """Of dropout, as device scalars: a Python number would be copied there at every step."""
        self._rates = tuple(jnp.asarray(rate, jnp.float32) for rate in rates)

    # -- data on the device --------------------------------------------------------------------------------------------

    def _stage(self, x: np.ndarray, y: np.ndarray) -> tuple[Array, Array]:
        """A data set that the steps gather from, filled up to the capacity, in the stack's order of axes and its dtype."""
        self._check_size(len(x), self._room)
        inputs = self._filled(jnp.asarray(x, self.stack.dtype))
        return jnp.swapaxes(inputs, 0, self._batch_axis), self._filled(jnp.asarray(y, jnp.int32))

    def _filled(self, array: Array) -> Array:
        """Zeros after it, up to the capacity."""
        return jnp.pad(array, [(0, self._room - len(array))] + [(0, 0)] * (array.ndim - 1))

    def _batches(self, x: np.ndarray, y: np.ndarray) -> list[tuple[Array, Array]]:
        """(x, y) of each batch on the device, x in the stack's order of axes; the last batch with what is left."""
        starts = range(0, len(x), self.batch_size)
        parts = [(x[k : k + self.batch_size], y[k : k + self.batch_size]) for k in starts]
        return [
            (jnp.asarray(part.swapaxes(0, self._batch_axis), self.stack.dtype), jnp.asarray(own, jnp.int32))
            for part, own in parts
        ]

    # -- the network ---------------------------------------------------------------------------------------------------

    def _network(self, parameters, x, y, masks=None):
        """(loss, logits [batch, classes], labels that are the likeliest class); softmax and loss in float32 at least."""
        drop = masks or (lambda place, array: array)
        own = len(parameters) - len(self._dense_names)
        shape = self.stack.num_layers, len(y), self.stack.units
        states = (jnp.zeros(shape, self.stack.dtype),) * 2
        between = functools.partial(drop, 0) if masks and self.rates[0] else None
        _, (h, _) = self.stack(parameters[:own], x, states, between)
        hidden = drop(1, h[-1])  # [batch, units]
        *hidden_layers, last = zip(parameters[own::2], parameters[own + 1 :: 2], strict=True)
        for kernel, bias in hidden_layers:
            hidden = drop(2, jax.nn.relu(add_bias(hidden @ kernel.astype(hidden.dtype), bias)))
        kernel, bias = last
        logits = add_bias(hidden @ kernel.astype(hidden.dtype), bias)
        wide = logits.astype(self.dtype)
        given = jnp.sum(jnp.where(jnp.arange(wide.shape[1]) == y[:, None], wide, 0), axis=1)
        loss = jnp.mean(jax.nn.logsumexp(wide, axis=1) - given)
        return loss, logits, jnp.sum(jnp.argmax(wide, axis=1) == y, dtype=jnp.int32)

    def _forward_step(self, parameters, total, x, y):
        loss, logits, correct = self._network(parameters, x, y)
        return loss, logits, total + correct

    def _train_step(self, state: State, rates, rate_and_decay, x, y, order):
        """(loss before the update, the next state)."""
        self.traces += 1  # Python runs this only to trace it
        index = lax.dynamic_slice(order, (state.position,), (self.batch_size,))
        # Every index is inside; by default a gather would look for those that are not, to fill in NaN.
        x, y = jnp.take(x, index, axis=self._batch_axis, mode="clip"), jnp.take(y, index, mode="clip")
        key, own = jax.random.split(state.key)

        def scaled_loss(parameters):
            loss, _, correct = self._network(parameters, x, y, _Masks(own, self.rates, rates))
            return loss * self.loss_scale, (loss, correct)

        gradients, (loss, correct) = jax.grad(scaled_loss, has_aux=True)(state.parameters)
        gradients = [gradient * (1.0 / self.loss_scale) for gradient in gradients]
        learning_rate, decay = rate_and_decay
        rate = learning_rate / (1 + decay * state.slots["iterations"])
        parameters, slots = self.optimizer.update(state.parameters, gradients, state.slots, rate)
        sums = state.loss_sum + loss, state.correct + correct
        return loss, State(parameters, slots, key, state.position + self.batch_size, *sums)


def build(
    weights: Mapping[str, np.ndarray],
    inputs: np.ndarray,
    labels: np.ndarray,
    batch_size: int,
    optimizer: tuple[str, float, float],
    *,
    stack: Callable[..., JaxStack],
    precision: str = "fp32",
    device: str = "",
    lstm_dropout: Sequence[float] = (),
    dense_dropout: float = 0.0,
    **options,
) -> JaxClassifier:
    """The classifier of a row.

    Args:
        weights, inputs, labels, batch_size, optimizer, options: of JaxClassifier.
        stack, precision, device: of models.jax.language_model.build.
        lstm_dropout, dense_dropout: rates after each LSTM layer, and after every relu layer.

    Raises:
        ValueError: rates that differ between the layers of the stack.
    """
    layers, _ = stack_size(weights)
    rates = (*trial.rates_of_stack(lstm_dropout, layers), dense_dropout)
    made = stack(weights, layers, COMPUTE_DTYPE[precision], bool(rates[0]))
    return JaxClassifier(made, weights, inputs, labels, batch_size, optimizer, rates=rates, **options)


class _Masks:
    """Dropout by rates that are arrays, but for those that are never on; each call draws a mask of its own."""

    def __init__(self, key: Array, configured: Sequence[float], rates: Sequence[Array]) -> None:
        self.key, self.configured, self.rates, self.calls = key, configured, rates, 0

    def __call__(self, place: int, x: Array) -> Array:
        if not self.configured[place]:
            return x
        self.calls += 1
        kept = jax.random.bernoulli(jax.random.fold_in(self.key, self.calls), 1.0 - self.rates[place], x.shape)
        return jnp.where(kept, x / (1.0 - self.rates[place]).astype(x.dtype), 0)
