"""The language model of the stacked LM and of PTB, in JAX, around any LSTM stack of models/jax/stacks.py.

    tokens [batch, time] → embedding → LSTM stack → dense_0 → softmax over the vocabulary

The counterpart of models/tf/language_model.py, with its methods: the same weights, batches, losses, clipping and
updates. A training
step, optimizer included, is one jitted function, which is given weights and moments to overwrite (donated).
"""

from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from models import trial
from models.jax.optimizers import OPTIMIZERS
from models.jax.stacks import JaxStack, add_bias
from models.weights.canonical import stack_size

Array = jax.Array
COMPUTE_DTYPE = {"fp32": "float32", "tf32": "float32", "fp16": "float16", "bf16": "bfloat16", "fp64": "float64"}


class JaxLanguageModel(trial.LanguageModelTrial):
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
        self.stack, self.time_major = stack, stack.time_major
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

    def stack_alone(self, batch: tuple[Array, Array]) -> list[Array]:
        """As of LanguageModelTrial."""
        loss, outputs, d_inputs, gradients = self._stack_alone(self.parameters[1:-2], *batch, self.initial_states)
        return [loss, outputs, d_inputs, *gradients]

    # -- what the proof needs ------------------------------------------------------------------------------------------

    def restore(self) -> None:
        """Weights, optimizer and states as they were at the start; copies on the device, since a step overwrites them."""
        self.parameters = [jnp.copy(array) for array in self._start]
        self.slots = self.optimizer.slots(self.parameters)
        self.states = self.initial_states

    def graph_mismatch(self) -> str:
        """Why the timed step may be another than the proven one: it was traced more than once; "" where it was not."""
        return "" if self._traces == 1 else f"the training step was traced {self._traces} times, expected once"

    def set_dropout_rate(self, rate: float) -> None:
        """For all steps from now on, by the same executable."""
        self.set_rates(self.learning_rate, rate)

    def set_rates(self, learning_rate: float, dropout_rate: float) -> None:
        """For all steps from now on; staged on the device, since a Python number would be copied there at every step."""
        self.learning_rate, self.dropout_rate = learning_rate, dropout_rate
        self._rates = tuple(jnp.asarray(rate, self.dtype) for rate in (learning_rate, dropout_rate))

    def _applied(self):
        return self.optimizer.applied(self._start, self.parameters, self.slots, self.learning_rate)

    def _weights(self):
        return self.parameters

    def numpy(self, tensor: Array) -> np.ndarray:
        return np.array(tensor)

    def stacked(self, losses: Sequence[Array]) -> np.ndarray:
        return np.asarray(jnp.stack(losses))

    def _staged(self, array):
        return jnp.asarray(array, self.stack.dtype)

    def _pass(self, tokens, targets, states):
        return self._forward(self.parameters, tokens, targets, states)

    def _moments(self):
        return self.optimizer.moments(self.slots)

    def _learning_rate(self):
        return self.learning_rate

    def _set_learning_rate(self, rate):
        self.set_rates(rate, self.dropout_rate)

    def _set_start(self, arrays, states):
        self._start = [jnp.array(array, self.dtype) for array in arrays]
        self.initial_states = self.initial_states if states is None else self.stack.stage_states(states)

    # -- the network ---------------------------------------------------------------------------------------------------

    def stage(self, tokens: np.ndarray, targets: np.ndarray) -> tuple[Array, Array]:
        """Put one batch, given as [batch, time], on the device."""
        return tuple(jnp.asarray(self._batch_major(ids), jnp.int32) for ids in (tokens, targets))

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
            dropout = self._dropout(own, dropout_rate)
        gradients, loss, final_states = self._gradients(parameters, tokens, targets, states, dropout)
        if self.clip_norm is not None:
            norm = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in gradients))  # no product, which would run in TF32
            gradients = [g * (self.clip_norm / jnp.maximum(norm, self.clip_norm)) for g in gradients]
        parameters, slots = self.optimizer.update(parameters, gradients, slots, learning_rate)
        return loss, final_states, parameters, slots, key

    def _dropout(self, key, rate):
        return _Dropout(key, rate)

    def _gradients(self, parameters, tokens, targets, states, dropout):
        """(unscaled gradients, loss, final states)"""

        def scaled_loss(parameters):
            loss, _, _, final_states = self._network(parameters, tokens, targets, states, dropout)
            return loss * self.loss_scale, (loss, final_states)

        gradients, (loss, final_states) = jax.grad(scaled_loss, has_aux=True)(parameters)
        return [g * (1.0 / self.loss_scale) for g in gradients], loss, final_states

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
        precision: "fp32", "tf32", "fp16", "bf16" or "fp64".
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
