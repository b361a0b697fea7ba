"""The language model of the stacked LM and of PTB, in JAX, around any LSTM stack of models/jax/stacks.py.

    tokens [batch, time] → embedding → LSTM stack → dense_0 → softmax over the vocabulary

The counterpart of models/tf/language_model.py, with its methods: the same weights, batches, losses, clipping and
updates. A training
step, optimizer included, is one jitted function, which is given weights and moments to overwrite (donated).
"""

import functools
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from models import trial
from models.jax.optimizers import OPTIMIZERS
from models.jax.stacks import JaxStack, add_bias
from models.reference.expected import SHOWN, upstream
from models.weights.canonical import stack_size

Array = jax.Array
COMPUTE_DTYPE = {"fp32": "float32", "tf32": "float32", "fp16": "float16", "fp64": "float64"}


class JaxLanguageModel:
    """One callable for a forward pass and one for a training step, both on batches that lie on the device.

    A time-major stack makes the whole network time-major. Learning rate and dropout rate are arguments of the jitted step, so the
    proof runs the very executable that is timed.

    Args:
        stack: the LSTM stack; its dtype is the compute dtype of the whole network.
        weights: canonical weights to start from; `restore` comes back to them.
        states: canonical initial states; `restore` comes back to them.
        batches: (tokens, targets) pairs of NumPy arrays [batch, time]; staged on the device once.
        optimizer: ("SGD" or "Adam", learning rate), of models/jax/optimizers.py; it receives float32 gradients, unscaled
            and clipped.
        reduction: "mean" over all tokens, or "sum_over_time": summed over steps, averaged over the batch (PTB).
        clip_norm: bound of the gradients' global norm, or None.
        keep_prob: 1 − dropout on the embedding and on every layer's output, the last included; 1: no dropout ops at all.
        loss_scale: static, of a float16 stack, as in models/tf/language_model.py. Gradients are divided by it before they
            are clipped.
        carry_states: whether a step starts from the final states of the one before.
        seed: of the dropout masks.
    """

    def __init__(
        self,
        stack: JaxStack,
        weights: Mapping[str, np.ndarray],
        states: Sequence,
        batches: Sequence[tuple[np.ndarray, np.ndarray]],
        optimizer: tuple[str, float],
        *,
        reduction: str = "mean",
        clip_norm: float | None = None,
        keep_prob: float = 1.0,
        loss_scale: float = 1.0,
        carry_states: bool = False,
        seed: int = 1,
    ) -> None:
        self.stack = stack
        self.reduction, self.clip_norm, self.carry_states = reduction, clip_norm, carry_states
        self.dtype = jnp.dtype("float64" if stack.dtype == "float64" else "float32")  # of parameters, softmax and loss
        self.loss_scale = loss_scale if stack.dtype == "float16" else 1.0
        self.has_dropout = keep_prob < 1
        kind, learning_rate = optimizer
        self.optimizer = OPTIMIZERS[kind]()
        self.set_rates(learning_rate, 1.0 - keep_prob)
        self.batches = [self.stage(*batch) for batch in batches]
        # XLA's own generator: the default one, threefry, takes several times as long
        self._key = jax.random.key(seed, impl="rbg")
        self._forward, self._stack_alone = jax.jit(self._forward_step), jax.jit(self._stack_step)
        self._train = jax.jit(self._train_step, donate_argnums=(0, 1))
        self._traces = 0  # of the training step
        self.start_from(weights, states)

    # -- what is timed -------------------------------------------------------------------------------------------------

    def forward(self, batch: tuple[Array, Array]) -> Array:
        """Logits and loss without dropout; returns the loss, a device scalar."""
        return self._forward(self.parameters, *batch, self.states)[0]

    def train(self, batch: tuple[Array, Array]) -> Array:
        """One optimizer step; returns its loss (before the update), a device scalar."""
        loss, states, self.parameters, self.slots, self._key = self._train(
            self.parameters, self.slots, self._key, self._rates, *batch, self.states
        )
        if self.carry_states:
            self.states = states
        return loss

    def stack_alone(self, batch: tuple[Array, Array]) -> Array:
        """The stack's forward pass, without dropout, and its backward pass; returns mean(outputs²).

        Args:
            batch: one of `stack_batches`: inputs [batch, time, embedding] and the gradient by the outputs.
        """
        return self._stack_alone(self.parameters[1:-2], *batch, self.initial_states)[0]

    # -- what the proof needs ------------------------------------------------------------------------------------------

    @functools.cached_property
    def stack_batches(self) -> list[tuple[Array, Array]]:
        """What `stack_alone` is timed on: the embedded tokens of every batch by the start's embedding, and `upstream`."""
        table = self._start[0].astype(self.stack.dtype)
        batch_size, time_steps = self._batch_major(np.asarray(self.batches[0][0])).shape
        gradient = self._batch_major(upstream((batch_size, time_steps, self.stack.units)))
        gradient = jnp.asarray(gradient, self.stack.dtype)
        return [(table[tokens], gradient) for tokens, _ in self.batches]

    def stack_results(self) -> dict[str, np.ndarray]:
        """`stack_alone` on the first of its batches: "hidden", and the gradients by "inputs" and the stack's weights."""
        _, hidden, d_inputs, gradients = self._stack_alone(
            self.parameters[1:-2], *self.stack_batches[0], self.initial_states
        )
        found = {name: self._batch_major(np.asarray(x)) for name, x in (("hidden", hidden), ("inputs", d_inputs))}
        return found | self.stack.to_canonical([np.asarray(gradient) for gradient in gradients])

    def restore(self) -> None:
        """Weights, optimizer and states as they were at the start; copies on the device, since a step overwrites them."""
        self.parameters = [jnp.copy(array) for array in self._start]
        self.slots = self.optimizer.slots(self.parameters)
        self.states = self.initial_states

    def outputs(self) -> dict[str, np.ndarray]:
        """The timed forward pass on the first batch: loss, hidden [batch, time, units], logits of SHOWN sequences."""
        loss, hidden, logits, _ = self._forward(self.parameters, *self.batches[0], self.states)
        hidden, logits = (self._batch_major(np.asarray(x)) for x in (hidden, logits))
        return {"loss": np.asarray(loss), "hidden": hidden, "logits": logits[:SHOWN]}

    def forward_losses(self, count: int) -> np.ndarray:
        """Losses [count] of forward passes over the first batches."""
        return np.array([np.asarray(self.forward(self.batches[k % len(self.batches)])) for k in range(count)])

    def train_steps(self, count: int) -> np.ndarray:
        """Losses [count] of that many training steps, with dropout off."""
        with self.without_dropout():
            return np.array([np.asarray(self.train(self.batches[k % len(self.batches)])) for k in range(count)])

    def unproven(self) -> str:
        """Why the timed step may be another than the proven one: it was traced more than once; "" where it was not."""
        return "" if self._traces == 1 else f"the training step was traced {self._traces} times, expected once"

    def without_dropout(self):
        """Context in which the dropout rate, an argument of the step, is 0."""
        return trial.dropout_off(self)

    def set_dropout_rate(self, rate: float) -> None:
        """For all steps from now on, by the same executable."""
        self.set_rates(self.learning_rate, rate)

    def set_rates(self, learning_rate: float, dropout_rate: float) -> None:
        """For all steps from now on; staged on the device, since a Python number would be copied there at every step."""
        self.learning_rate, self.dropout_rate = learning_rate, dropout_rate
        self._rates = tuple(jnp.asarray(rate, self.dtype) for rate in (learning_rate, dropout_rate))

    def first_gradients(self) -> dict[str, np.ndarray]:
        """After exactly one step since `restore`: the gradients that the optimizer applied."""
        return self._canonical(self.optimizer.applied(self._start, self.parameters, self.slots, self.learning_rate))

    def weights(self) -> dict[str, np.ndarray]:
        """All weights now, in the canonical form."""
        return self._canonical(self.parameters)

    def _canonical(self, arrays: Sequence[Array]) -> dict[str, np.ndarray]:
        return trial.canonical_of(self.stack, [np.array(array) for array in arrays])

    # -- a whole training ----------------------------------------------------------------------------------------------

    def start_from(self, weights: Mapping[str, np.ndarray], states: Sequence) -> None:
        """From now on `restore` comes back to these weights and states, with a fresh optimizer; restores them."""
        arrays = trial.arrays_of(self.stack, weights)
        self._start = [jnp.array(array, self.dtype) for array in arrays]
        self.initial_states = self.stack.stage_states(states)
        self.restore()

    def train_epoch(self, batches: Sequence, learning_rate: float) -> float:
        """One pass over staged batches from the initial states; returns the mean loss per token."""
        self.set_rates(learning_rate, self.dropout_rate)
        self.states = self.initial_states
        return self._mean_loss(batches, [self.train(batch) for batch in batches])

    def evaluate(self, batches: Sequence, states: Sequence) -> float:
        """Mean loss per token over staged batches, states carried from `states` (canonical) on, dropout off."""
        staged, losses = self.stack.stage_states(states), []
        for tokens, targets in batches:
            loss, _, _, staged = self._forward(self.parameters, tokens, targets, staged)
            losses.append(loss)
        return self._mean_loss(batches, losses)

    def _mean_loss(self, batches, losses) -> float:
        """Per token, each batch weighted by its steps."""
        steps = [tokens.shape[self._time_axis] for tokens, _ in batches]
        return trial.mean_loss(np.asarray(jnp.stack(losses)), steps, self.reduction)

    # -- the network ---------------------------------------------------------------------------------------------------

    def stage(self, tokens: np.ndarray, targets: np.ndarray) -> tuple[Array, Array]:
        """Put one batch, given as [batch, time], on the device."""
        return tuple(jnp.asarray(self._batch_major(ids), jnp.int32) for ids in (tokens, targets))

    @property
    def _time_axis(self) -> int:
        return 0 if self.stack.time_major else 1

    def _batch_major(self, array: np.ndarray) -> np.ndarray:
        """[batch, time, …] from the network's own order, and the other way round: they differ in the first two axes."""
        return array.swapaxes(0, 1) if self.stack.time_major else array

    def _network(self, parameters, tokens, targets, states, dropout=None):
        """(loss, hidden, logits, final states). Shapes are a batch-major stack's; a time-major one has time first."""
        embedding, *own, kernel, bias = parameters
        inputs = embedding[tokens].astype(self.stack.dtype)  # [batch, time, embedding]
        if dropout:
            inputs = dropout(inputs)
        hidden, final_states = self.stack(own, inputs, states, dropout)  # [batch, time, units]
        dropped = dropout(hidden) if dropout else hidden
        logits = add_bias(dropped @ kernel.astype(dropped.dtype), bias)  # [batch, time, vocabulary]
        return self._loss(logits.astype(self.dtype), targets), hidden, logits, final_states

    def _loss(self, logits, targets):
        # The target's logit by comparison, not by a gather, whose gradient would be a scatter into an array of all logits.
        words = jnp.arange(logits.shape[-1], dtype=targets.dtype)
        given = jnp.sum(jnp.where(words == targets[..., None], logits, 0), axis=-1)
        losses = jax.nn.logsumexp(logits, axis=-1) - given  # [batch, time]
        return jnp.mean(losses if self.reduction == "mean" else jnp.sum(losses, axis=self._time_axis))

    def _forward_step(self, parameters, tokens, targets, states):
        return self._network(parameters, tokens, targets, states)

    def _train_step(self, parameters, slots, key, rates, tokens, targets, states):
        self._traces += 1
        learning_rate, dropout_rate = rates
        dropout = None
        if self.has_dropout:
            key, own = jax.random.split(key)
            dropout = _Dropout(own, dropout_rate)

        def scaled_loss(parameters):
            loss, _, _, final_states = self._network(parameters, tokens, targets, states, dropout)
            return loss * self.loss_scale, (loss, final_states)

        gradients, (loss, final_states) = jax.grad(scaled_loss, has_aux=True)(parameters)
        gradients = [g * (1.0 / self.loss_scale) for g in gradients]
        if self.clip_norm is not None:
            norm = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in gradients))  # no product, which would run in TF32
            gradients = [g * (self.clip_norm / jnp.maximum(norm, self.clip_norm)) for g in gradients]
        parameters, slots = self.optimizer.update(parameters, gradients, slots, learning_rate)
        return loss, final_states, parameters, slots, key

    def _stack_step(self, parameters, inputs, gradient, states):
        """mean(outputs²), the outputs, and the gradients by the inputs and the stack's parameters."""
        outputs, pull = jax.vjp(lambda own, inputs: self.stack(own, inputs, states)[0], parameters, inputs)
        gradients, d_inputs = pull(gradient)
        return jnp.mean(jnp.square(outputs.astype(self.dtype))), outputs, d_inputs, gradients


def build(
    weights: Mapping[str, np.ndarray],
    states: Sequence,
    batches: Sequence,
    optimizer: tuple[str, float],
    *,
    stack: Callable[..., JaxStack],
    precision: str,
    device: str = "",
    **options,
) -> JaxLanguageModel:
    """The language model of a row.

    Args:
        weights, states, batches, optimizer, options: of JaxLanguageModel.
        stack: (weights, num_layers, dtype, whether there is dropout between the layers) → the stack.
        precision: "fp32", "tf32", "fp16" or "fp64".
        device: JAX finds it by itself.
    """
    has_dropout = options.get("keep_prob", 1.0) < 1
    made = stack(weights, stack_size(weights)[0], COMPUTE_DTYPE[precision], has_dropout)
    return JaxLanguageModel(made, weights, states, batches, optimizer, **options)


class _Dropout:
    """Dropout by a rate that is an array; each call draws a mask of its own."""

    def __init__(self, key: Array, rate: Array) -> None:
        self.key, self.rate, self.calls = key, rate, 0

    def __call__(self, x: Array) -> Array:
        self.calls += 1
        kept = jax.random.bernoulli(jax.random.fold_in(self.key, self.calls), 1.0 - self.rate, x.shape)
        return jnp.where(kept, x / (1.0 - self.rate).astype(x.dtype), 0)
