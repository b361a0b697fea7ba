"""The language model as a Keras model on another backend than TensorFlow, with a training step of one's own.

    tokens [batch, time] → Embedding → LSTM × n → Dense → softmax over the vocabulary

One Keras model under KERAS_BACKEND: on JAX its step is one jitted function of stateless_call and stateless_apply, on PyTorch it
runs eagerly with zero_grad, backward and optimizer.apply, as Keras' guides for custom training loops have it. The methods are
those of models/tf/language_model.py. KERAS_BACKEND has to be set before Keras is imported, so before this module is.
"""

import functools
from collections.abc import Mapping, Sequence

import keras
import numpy as np
from keras import ops

from models import trial
from models.weights import layouts
from models.weights.canonical import stack_size

POLICIES = {"float32": "float32", "float64": "float64", "float16": "mixed_float16", "bfloat16": "mixed_bfloat16"}
OPTIMIZERS = {"SGD": keras.optimizers.SGD, "Adam": keras.optimizers.Adam}


class _Layers:
    """The LSTM layers' weights as Keras holds them: kernel, recurrent kernel and bias of each layer."""

    def __init__(self, weights: Mapping[str, np.ndarray], dtype: str) -> None:
        self.dtype = dtype
        self.num_layers, _ = stack_size(weights)
        self.units = weights["lstm_0/forward/recurrent_kernel"].shape[0]

    def from_canonical(self, weights: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        return [array for layer in range(self.num_layers) for array in layouts.to_keras(weights, layer)]

    def to_canonical(self, arrays: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        canonical = {}
        for layer in range(self.num_layers):
            canonical |= layouts.from_keras(arrays[3 * layer : 3 * layer + 3], layer)
        return canonical

    def stage_states(self, states: Sequence) -> list:
        """h and c of every layer in turn, each [batch, units]."""
        return [_tensor(state, self.dtype) for layer in states for state in layer[0]]


class KerasLanguageModel(trial.LanguageModelTrial):
    """What the backends have in common. models.keras.build.language_model makes the one of a backend.

    Args:
        dtype: "float32", "float64", "float16" or "bfloat16" (Keras' mixed policies).
        use_cudnn: of every LSTM layer; "auto" is what a user gets who sets nothing.
        weights, states, batches, optimizer, reduction, clip_norm, keep_prob, loss_scale, carry_states: as of
            models.jax.language_model.JaxLanguageModel. Clipping is the optimizer's own, global_clipnorm.

    Attributes:
        model: keras.Model: tokens and initial states → logits, outputs of the last LSTM and final states.
        stack_model: the same LSTM layers alone: their inputs and initial states → outputs of the last one.
    """

    def __init__(
        self,
        weights: Mapping[str, np.ndarray],
        states: Sequence,
        batches: Sequence[tuple[np.ndarray, np.ndarray]],
        optimizer: tuple[str, float],
        *,
        dtype: str = "float32",
        use_cudnn: bool | str = "auto",
        reduction: str = "mean",
        clip_norm: float | None = None,
        keep_prob: float = 1.0,
        loss_scale: float = 1.0,
        carry_states: bool = False,
    ) -> None:
        self.dtype, self.reduction, self.carry_states = dtype, reduction, carry_states
        self.wide = "float64" if dtype == "float64" else "float32"  # of variables, softmax and loss
        self.loss_scale = loss_scale if dtype == "float16" else 1.0
        self.stack = _Layers(weights, dtype)
        self.dropout_rate, self.has_dropout = 1.0 - keep_prob, keep_prob < 1
        self.model, self.stack_model = self._build(weights, use_cudnn)
        kind, rate = optimizer
        self.optimizer = OPTIMIZERS[kind](rate, global_clipnorm=clip_norm)
        self.optimizer.build(self.model.trainable_variables)
        self._fresh = [ops.copy(v.value) for v in self.optimizer.variables]
        self.batches = [self.stage(*batch) for batch in batches]
        self.start_from(weights, states)

    def _build(self, weights, use_cudnn) -> tuple[keras.Model, keras.Model]:
        policy = POLICIES[self.dtype]
        vocabulary, embedding = weights["embedding"].shape
        tokens = keras.Input((None,), dtype="int32")
        states = [keras.Input((self.stack.units,), dtype=self.dtype) for _ in range(2 * self.stack.num_layers)]
        lstms = [
            keras.layers.LSTM(
                self.stack.units, return_sequences=True, return_state=True, use_cudnn=use_cudnn, dtype=policy
            )
            for _ in range(self.stack.num_layers)
        ]
        self.dropouts = (
            [self._dropout_layer(policy, place) for place in range(self.stack.num_layers + 1)]
            if self.has_dropout
            else []
        )

        def stack(inputs, dropouts):
            finals = []
            for layer, lstm in enumerate(lstms):
                if dropouts:
                    inputs = dropouts[layer](inputs)
                inputs, *final = lstm(inputs, initial_state=states[2 * layer : 2 * layer + 2])
                finals += final
            return inputs, finals

        embedded = keras.layers.Embedding(vocabulary, embedding, dtype=policy)(tokens)  # [batch, time, embedding]
        hidden, finals = stack(embedded, self.dropouts)  # [batch, time, units]
        dropped = self.dropouts[-1](hidden) if self.dropouts else hidden
        logits = keras.layers.Dense(vocabulary, dtype=policy)(dropped)  # [batch, time, vocabulary]
        inputs = keras.Input((None, embedding), dtype=self.dtype)
        alone, _ = stack(inputs, [])
        return keras.Model([tokens, *states], [logits, hidden, *finals]), keras.Model([inputs, *states], alone)

    def _dropout_layer(self, policy: str, place: int) -> keras.layers.Layer:
        raise NotImplementedError

    # -- what is timed -------------------------------------------------------------------------------------------------

    def forward(self, batch: tuple):
        """Logits and loss with training=False; returns the loss, a device scalar."""
        return self._forward(*batch, self.states)[0]

    def train(self, batch: tuple):
        """One optimizer step; returns its loss (before the update), a device scalar."""
        loss, states = self._train(*batch, self.states)
        if self.carry_states:
            self.states = states
        return loss

    def stack_alone(self, batch: tuple):
        """As of LanguageModelTrial."""
        loss, outputs, gradients = self._stack_alone(*batch, self.initial_states)
        return [loss, outputs, *gradients]

    def _forward(self, tokens, targets, states) -> tuple:
        """(loss, hidden, logits, final states)."""
        raise NotImplementedError

    def _train(self, tokens, targets, states) -> tuple:
        """(loss, final states); changes weights and optimizer."""
        raise NotImplementedError

    def _stack_alone(self, inputs, gradient, states) -> tuple:
        """(mean(outputs²), outputs, gradients by the inputs and the layers' weights)."""
        raise NotImplementedError

    def _loss(self, logits, targets):
        logits = ops.cast(logits, self.wide)
        losses = keras.losses.sparse_categorical_crossentropy(targets, logits, from_logits=True)  # [batch, time]
        return ops.mean(losses if self.reduction == "mean" else ops.sum(losses, axis=1))

    # -- what the proof needs ------------------------------------------------------------------------------------------

    def _applied(self):
        if isinstance(self.optimizer, keras.optimizers.Adam):
            return [self._value_of(m) / (1.0 - self.optimizer.beta_1) for m in self.optimizer._momentums]
        rate = float(self._value_of(self.optimizer._learning_rate))
        return [(_numpy(start) - now) / rate for start, now in zip(self._start, self._weights(), strict=True)]

    def _weights(self):
        return [self._value_of(v) for v in self.model.trainable_variables]

    def _moments(self):
        own = self.optimizer
        if not isinstance(own, keras.optimizers.Adam):
            return None
        m, v = ([self._value_of(x) for x in part] for part in (own._momentums, own._velocities))
        return self._value_of(own.iterations), m, v

    def _value_of(self, variable: keras.Variable) -> np.ndarray:
        """What a variable of the model or the optimizer holds now."""
        raise NotImplementedError

    def _set(self, variable: keras.Variable, value: float) -> None:
        """Give a scalar variable of the model or the optimizer another value."""
        raise NotImplementedError

    def _learning_rate(self):
        return float(self._value_of(self.optimizer._learning_rate))

    def _set_learning_rate(self, rate):
        self._set(self.optimizer._learning_rate, rate)

    def _set_start(self, arrays, states):
        self._start = [_tensor(array, self.wide) for array in arrays]
        self.initial_states = self.initial_states if states is None else self.stack.stage_states(states)

    def numpy(self, tensor) -> np.ndarray:
        return _numpy(tensor)

    def stacked(self, losses: Sequence) -> np.ndarray:
        return _numpy(ops.stack(losses))

    def _staged(self, array):
        return _tensor(array, self.dtype)

    def _pass(self, tokens, targets, states):
        return self._forward(tokens, targets, states)

    def stage(self, tokens: np.ndarray, targets: np.ndarray) -> tuple:
        """Put one batch [batch, time] on the device."""
        return tuple(_tensor(ids, "int32") for ids in (tokens, targets))


class JaxKerasLanguageModel(KerasLanguageModel):
    """On JAX: the values of all variables are arguments and results of one jitted step, which is given them to overwrite."""

    def __init__(self, *arguments, **options) -> None:
        import jax

        self._jax = jax
        self._jitted_forward = jax.jit(self._forward_step)
        self._jitted_train = jax.jit(self._train_step, donate_argnums=0)
        self._jitted_stack = jax.jit(self._stack_step)
        self._traces = 0  # of the training step
        self._values: tuple[list, list, list] = ()  # of weights, other variables and optimizer
        super().__init__(*arguments, **options)

    def _dropout_layer(self, policy, place):
        return VariableDropout(self.dropout_rate, seed=place + 1, dtype=policy)

    def restore(self):
        self._values = ([ops.copy(x) for x in self._start], self._others, [ops.copy(x) for x in self._fresh])
        self.states = self.initial_states

    @property
    def _others(self) -> list:
        """Dropout's rates and seeds now; no start of them is kept."""
        return self._values[1] if self._values else [ops.copy(v.value) for v in self.model.non_trainable_variables]

    def _forward(self, tokens, targets, states):
        return self._jitted_forward(*self._values[:2], tokens, targets, states)

    def _train(self, tokens, targets, states):
        loss, states, self._values = self._jitted_train(self._values, tokens, targets, states)
        return loss, states

    def _stack_alone(self, inputs, gradient, states):
        return self._jitted_stack(self._values[0][1:-2], inputs, gradient, states)

    def _forward_step(self, trainable, others, tokens, targets, states):
        (logits, hidden, *finals), _ = self.model.stateless_call(trainable, others, [tokens, *states], training=False)
        return self._loss(logits, targets), hidden, logits, finals

    def _train_step(self, values, tokens, targets, states):
        self._traces += 1
        trainable, others, of_optimizer = values

        def scaled_loss(trainable):
            (logits, _, *finals), changed = self.model.stateless_call(
                trainable, others, [tokens, *states], training=True
            )
            loss = self._loss(logits, targets)
            return loss * self.loss_scale, (loss, finals, changed)

        gradients, (loss, finals, others) = self._jax.grad(scaled_loss, has_aux=True)(trainable)
        gradients = [g * (1.0 / self.loss_scale) for g in gradients]
        trainable, of_optimizer = self.optimizer.stateless_apply(of_optimizer, gradients, trainable)
        return loss, finals, (trainable, others, of_optimizer)

    def _stack_step(self, trainable, inputs, gradient, states):
        def run(inputs, trainable):
            return self.stack_model.stateless_call(trainable, seeds, [inputs, *states], training=True)[0]

        seeds = [
            v.value for v in self.stack_model.non_trainable_variables
        ]  # of the layers' dropout, which there is none of

        outputs, pull = self._jax.vjp(run, inputs, trainable)
        d_inputs, gradients = pull(gradient)
        return ops.mean(ops.square(ops.cast(outputs, self.wide))), outputs, [d_inputs, *gradients]

    def graph_mismatch(self):
        return "" if self._traces == 1 else f"the training step was traced {self._traces} times, expected once"

    def set_dropout_rate(self, rate):
        for layer in self.dropouts:
            self._set(layer.rate, rate)

    def _position(self, variable) -> tuple[int, int]:
        """Where the value of a variable stands in `_values`."""
        groups = self.model.trainable_variables, self.model.non_trainable_variables, self.optimizer.variables
        return next((g, k) for g, group in enumerate(groups) for k, own in enumerate(group) if own is variable)

    def _value_of(self, variable):
        group, k = self._position(variable)
        return _numpy(self._values[group][k])

    def _set(self, variable, value):
        group, k = self._position(variable)
        self._values[group][k] = _tensor(np.asarray(value), variable.dtype)


class TorchKerasLanguageModel(KerasLanguageModel):
    """On PyTorch: eager, op by op."""

    def __init__(self, *arguments, **options) -> None:
        import torch

        self._torch = torch
        super().__init__(*arguments, **options)

    def _dropout_layer(self, policy, place):
        return keras.layers.Dropout(self.dropout_rate, dtype=policy)  # reads its rate at every call

    @functools.cached_property
    def update_rounding(self) -> float:
        """What Keras' clipping by the global norm is wrong by: on a CPU PyTorch adds up float32 squares one after the other."""
        x = self._torch.randn(self._start[0].numel(), generator=self._torch.Generator().manual_seed(1))
        x = x.to(self._start[0])
        wide = self._torch.linalg.vector_norm(x, dtype=self._torch.float64)
        return float(abs(self._torch.linalg.vector_norm(x) / wide - 1.0))

    def restore(self):
        variables = [*self.model.trainable_variables, *self.optimizer.variables]
        for variable, start in zip(variables, [*self._start, *self._fresh], strict=True):
            variable.assign(start)
        self.states = self.initial_states

    def _forward(self, tokens, targets, states):
        with self._torch.no_grad():
            logits, hidden, *finals = self.model([tokens, *states], training=False)
            return self._loss(logits, targets), hidden, logits, finals

    def _train(self, tokens, targets, states):
        logits, _, *finals = self.model([tokens, *states], training=True)
        loss = self._loss(logits, targets)
        self.model.zero_grad()
        (loss * self.loss_scale).backward()
        variables = self.model.trainable_variables
        with self._torch.no_grad():
            gradients = [v.value.grad for v in variables]
            if self.loss_scale != 1.0:
                self._torch._foreach_mul_(gradients, 1.0 / self.loss_scale)
            self.optimizer.apply(gradients, variables)
        return loss.detach(), [state.detach() for state in finals]

    def _stack_alone(self, inputs, gradient, states):
        inputs = inputs.detach().requires_grad_()
        outputs = self.stack_model([inputs, *states], training=True)
        parameters = [v.value for v in self.stack_model.trainable_variables]
        gradients = self._torch.autograd.grad(outputs, [inputs, *parameters], gradient)
        outputs = outputs.detach()
        return outputs.to(getattr(self._torch, self.wide)).square().mean(), outputs, gradients

    def set_dropout_rate(self, rate):
        for layer in self.dropouts:
            layer.rate = rate

    def _value_of(self, variable):
        return _numpy(variable.value)

    def _set(self, variable, value):
        variable.assign(value)


class VariableDropout(keras.layers.Layer):
    """keras.layers.Dropout whose rate is a variable, so that a jitted step takes another rate without another program.

    Layers of one seed would draw the same masks.
    """

    def __init__(self, rate: float, seed: int, **options) -> None:
        super().__init__(**options)
        initial = keras.initializers.Constant(rate)
        self.rate = self.add_weight(shape=(), initializer=initial, trainable=False, dtype="float32", autocast=False)
        self.seed_generator = keras.random.SeedGenerator(seed)

    def call(self, inputs, training=False):
        if not training:
            return inputs
        kept = keras.random.uniform(ops.shape(inputs), seed=self.seed_generator) >= self.rate
        return ops.where(kept, inputs / ops.cast(1.0 - self.rate, inputs.dtype), ops.zeros_like(inputs))


def _numpy(tensor) -> np.ndarray:
    return np.array(ops.convert_to_numpy(tensor))


def _tensor(array: np.ndarray, dtype: str):
    return ops.convert_to_tensor(np.array(array), dtype)
