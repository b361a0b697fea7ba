"""The language model of the stacked LM and of PTB, in TensorFlow, around any LSTM stack of this folder.

    tokens [batch, time] → embedding → LSTM stack → dense_0 → softmax over the vocabulary

Tokens travel as int64: TensorFlow keeps int32 tensors in host memory even where the model is on a GPU, which would put a
copy into every step.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence

import keras
import numpy as np
import tensorflow as tf

from models import trial
from models.cudnn.graph_difference import graph_difference
from models.tf.stack import POLICIES, Stack
from models.wavefront import products, softmax
from models.wavefront.softmax_head import SoftmaxHead
from models.wavefront.softmax_loss import add_bias
from models.weights.canonical import stack_size

COMPUTE_DTYPE = {"fp32": "float32", "tf32": "float32", "fp16": "float16", "bf16": "bfloat16", "fp64": "float64"}


class LanguageModel(trial.LanguageModelTrial):
    """One callable for a forward pass and one for a training step, both on batches that lie on the device.

    A time-major stack makes the whole network time-major: its batches are staged as [time, batch].

    Where the stack draws its own dropout masks (`own_dropout`), the rate is baked into the graph: the steps of the proof then
    run a second graph of the same code, and `graph_mismatch` compares the two node by node.

    Args:
        stack: the LSTM stack; its dtype is the compute dtype of the whole network.
        weights: canonical weights to start from; `restore` comes back to them.
        states: canonical initial states; `restore` comes back to them.
        batches: (tokens, targets) pairs of NumPy arrays [batch, time]; staged on the device once.
        optimizer: keras optimizer, "SGD" or "Adam" kind; it receives float32 gradients, unscaled and clipped.
        reduction: "mean" over all tokens, or "sum_over_time": summed over steps, averaged over the batch (PTB).
        clip_norm: bound of the gradients' global norm, or None.
        keep_prob: 1 − dropout on the embedding and on every layer's output, the last included; 1: no dropout ops at all.
        loss_scale: static, of a float16 stack: large enough that small gradients do not vanish (non-target logit
            gradients of the stacked LM are 1.6e-8), small enough that sums over a batch stay below 65504. Gradients are
            divided by it before they are clipped.
        carry_states: whether a step starts from the final states of the one before.
        eager: run op by op instead of as one tf.function.
        compile_rest: compile what is not the stack with XLA: dense layer and loss as one cluster, clipping and optimizer as
            another. For a stack that XLA cannot compile, cuDNN's.
        jit_compile: compile each step as a whole with XLA, with models.wavefront.SoftmaxHead as its dense layer and softmax,
            unless plain_head is given.
        plain_head: with dense layer and softmax as they are without jit_compile; not together with fused_loss.
        fused_loss: with jit_compile on a GPU: that SoftmaxHead has fused=True.
    """

    def __init__(
        self,
        stack: Stack,
        weights: Mapping[str, np.ndarray],
        states: Sequence,
        batches: Sequence[tuple[np.ndarray, np.ndarray]],
        optimizer: keras.optimizers.Optimizer,
        *,
        reduction: str = "mean",
        clip_norm: float | None = None,
        keep_prob: float = 1.0,
        loss_scale: float = 1.0,
        carry_states: bool = False,
        eager: bool = False,
        compile_rest: bool = False,
        jit_compile: bool = False,
        plain_head: bool = False,
        fused_loss: bool = False,
    ) -> None:
        self.stack, self.optimizer, self.jit_compile, self.fused_loss = stack, optimizer, jit_compile, fused_loss
        self.reduction, self.clip_norm, self.carry_states = reduction, clip_norm, carry_states
        dtype = "float64" if stack.dtype == "float64" else "float32"
        self.embedding = keras.Variable(weights["embedding"], dtype=dtype)
        self.head = None
        if plain_head and fused_loss:
            raise ValueError("plain_head and fused_loss exclude each other: give one of them")
        if (jit_compile and not plain_head) or fused_loss:
            self.head = SoftmaxHead(len(weights["dense_0/bias"]), fused=fused_loss, dtype=POLICIES[stack.dtype])
            self.head.build((None, stack.units))
            self.head.set_weights([weights["dense_0/kernel"], weights["dense_0/bias"]])
            self.kernel, self.bias = self.head.kernel, self.head.bias
        else:
            self.kernel = keras.Variable(weights["dense_0/kernel"], dtype=dtype)
            self.bias = keras.Variable(weights["dense_0/bias"], dtype=dtype)
        self.variables = [self.embedding, *stack.variables, self.kernel, self.bias]
        self.loss_scale = loss_scale if stack.dtype == "float16" else 1.0
        self.has_dropout, self.dropout_rate, self.time_major = keep_prob < 1, 1.0 - keep_prob, stack.time_major
        self._rate = tf.Variable(self.dropout_rate, dtype=tf.float32, trainable=False)
        optimizer.build(self.variables)
        self.batches = [self.stage(*batch) for batch in batches]
        self.initial_states = self.stack.stage_states(states)
        self.states = self.initial_states
        self._start = [tf.identity(v.value) for v in (*self.variables, *optimizer.variables)]
        if compile_rest:
            self._head, self._update = (tf.function(f, jit_compile=True) for f in (self._head, self._update))
        compiled = functools.partial(_Traced, jit_compile=jit_compile)
        if eager:
            compiled = lambda function: function  # noqa: E731
        self._forward, self._train = compiled(self._forward_step), compiled(self._train_step)
        self._stack = compiled(self._stack_step)
        self._train_without_dropout = None  # where that is another graph
        if stack.own_dropout and self.has_dropout:
            self._train_without_dropout = compiled(functools.partial(self._train_step, stack_dropout=False))

    # -- what is timed -------------------------------------------------------------------------------------------------

    def forward(self, batch: tuple[tf.Tensor, tf.Tensor]) -> tf.Tensor:
        """Logits and loss with training=False; returns the loss, a device scalar."""
        return self._forward(*batch, self.states)[0]

    def train(self, batch: tuple[tf.Tensor, tf.Tensor]) -> tf.Tensor:
        """One optimizer step; returns its loss (before the update), a device scalar."""
        loss, states = self._train(*batch, self.states)
        if self.carry_states:
            self.states = states
        return loss

    def stack_alone(self, batch: tuple[tf.Tensor, tf.Tensor]) -> list[tf.Tensor]:
        """As of LanguageModelTrial."""
        loss, outputs, gradients = self._stack(*batch, self.initial_states)
        return [loss, outputs, *gradients]

    def trace(self, mode: str) -> None:
        """Trace what "forward", "train" or "stack" runs on its first batch; op by op there is nothing to trace."""
        tokens, targets = self.batches[0]
        arguments = tokens, targets, self.states
        if mode == "stack":
            widths = self.embedding.shape[-1], self.stack.units
            specs = (tf.TensorSpec([*tokens.shape, width], self.stack.dtype) for width in widths)
            arguments = *specs, self.initial_states
        step = {"forward": self._forward, "train": self._train, "stack": self._stack}[mode]
        if isinstance(step, _Traced):
            step.trace(*arguments)

    # -- what the proof needs ------------------------------------------------------------------------------------------

    def notes(self, mode: str) -> list[str]:
        """Sentences for the tables on how the stack ran, and the SoftmaxHead's products."""
        of_head = products.notes(self.stack.dtype) if self.head is not None and mode != "stack" else []
        if mode not in ("forward", "stack") and self._takes_scaled_loss():
            of_head = softmax.notes(tf.as_dtype(self.stack.dtype)) or of_head
        return list(dict.fromkeys([*self.stack.notes(mode), *of_head]))

    def restore(self) -> None:
        """Weights, optimizer and states as they were at the start; copies on the device."""
        for variable, start in zip((*self.variables, *self.optimizer.variables), self._start, strict=True):
            variable.value.assign(start)
        self.states = self.initial_states

    def outputs(self) -> dict[str, np.ndarray]:
        """As of LanguageModelTrial, without the words that a SoftmaxHead adds."""
        found = super().outputs()
        return found | {"logits": found["logits"][..., : self.bias.shape[0]]}

    @contextlib.contextmanager
    def without_dropout(self) -> Iterator[None]:
        """As of LanguageModelTrial; the same graph unless the stack has its own dropout."""
        timed, self._train = self._train, self._train_without_dropout or self._train
        try:
            with super().without_dropout():
                yield
        finally:
            self._train = timed

    def graph_mismatch(self) -> str:
        """How the timed step differs from the one that the proof ran, but for cuDNN's dropout rate; "" where it does not.

        Without cuDNN the masks of a stack are ops of its graph; such a stack is no row's, and not looked at here.
        """
        if self._train_without_dropout is None or not self.stack.uses_cudnn:
            return ""
        steps = (self._train, self._train_without_dropout)
        graphs = [step.get_concrete_function(*self.batches[0], self.states).graph.as_graph_def() for step in steps]
        return graph_difference(*graphs)

    def set_dropout_rate(self, rate: float) -> None:
        self.dropout_rate = rate
        self._rate.assign(rate)

    def _applied(self):
        """Adam's first moment is (1 − β₁) g after one step; SGD moved every weight by −learning_rate · g."""
        if isinstance(self.optimizer, keras.optimizers.Adam):
            return [m.value / (1.0 - self.optimizer.beta_1) for m in self.optimizer._momentums]
        rate = self._learning_rate()
        starts = self._start[: len(self.variables)]
        return [(start - v.value) / rate for start, v in zip(starts, self.variables, strict=True)]

    def _weights(self):
        return [v.value for v in self.variables]

    def numpy(self, tensor: tf.Tensor) -> np.ndarray:
        return (tf.cast(tensor, tf.float32) if tensor.dtype == tf.bfloat16 else tensor).numpy()  # NumPy has no bfloat16

    def stacked(self, losses: Sequence) -> np.ndarray:
        return tf.stack(losses).numpy()

    def _staged(self, array):
        return tf.identity(tf.constant(array, self.stack.dtype))

    def _pass(self, tokens, targets, states):
        return self._forward(tokens, targets, states)

    def _moments(self):
        own = self.optimizer
        if not isinstance(own, keras.optimizers.Adam):
            return None
        return own.iterations.numpy(), [m.value for m in own._momentums], [v.value for v in own._velocities]

    def _learning_rate(self):
        return float(self.optimizer.learning_rate)

    def _set_learning_rate(self, rate):
        self.optimizer.learning_rate = rate

    def _set_start(self, arrays, states):
        self._start[: len(arrays)] = [tf.constant(array, self._start[0].dtype) for array in arrays]
        self.initial_states = self.initial_states if states is None else self.stack.stage_states(states)

    @property
    def softmax_kernel(self) -> str:
        """Name of the GPU kernel that is the softmax of a training step; "" where XLA or TensorFlow makes its own."""
        if not self.fused_loss:
            return ""
        return softmax.KERNEL if self.head.runs_kernel(self._words_of_a_step()) else ""

    def _takes_scaled_loss(self) -> bool:
        return self.fused_loss and self.head.takes_scaled_loss(self._words_of_a_step())

    def _words_of_a_step(self) -> int:
        """Of one device."""
        return self.batches[0][0].shape.num_elements()

    # -- the network ---------------------------------------------------------------------------------------------------

    def stage(self, tokens: np.ndarray, targets: np.ndarray) -> tuple[tf.Tensor, tf.Tensor]:
        """Put one batch, given as [batch, time], on the device."""
        return tuple(tf.identity(tf.constant(self._batch_major(ids), tf.int64)) for ids in (tokens, targets))

    def _dropout(self, x: tf.Tensor) -> tf.Tensor:
        return tf.nn.dropout(x, tf.cast(self._rate, x.dtype))

    def _network(self, tokens, states, training, stack_dropout=True, **of_stack):
        """Comments give the shapes of a batch-major stack; a time-major one has time first throughout."""
        dropout = self._dropout if training and self.has_dropout else None
        inputs = tf.cast(tf.gather(self.embedding.value, tokens), self.stack.dtype)  # [batch, time, embedding]
        if dropout:
            inputs = dropout(inputs)
        hidden, final_states = self.stack(
            inputs, states, dropout if stack_dropout else None, training, **of_stack
        )  # [batch, time, units]
        final_states = tf.nest.pack_sequence_as(states, tf.nest.flatten(final_states))  # one form: one trace
        return hidden, dropout(hidden) if dropout else hidden, final_states

    def _head(self, hidden, targets, kernel, bias):
        """Logits [batch, time, vocabulary] and the loss, from what the stack put out, after its dropout.

        With a SoftmaxHead the vocabulary is padded.
        """
        if self.head is not None:
            logits = self.head.padded_logits(hidden)
            return logits, self._loss(logits, targets)
        flat = tf.reshape(hidden, [-1, self.stack.units])
        logits = add_bias(tf.matmul(flat, tf.cast(kernel, flat.dtype)), bias)
        logits = tf.reshape(logits, [*targets.shape, -1])
        return logits, self._loss(logits, targets)

    def _training_loss(self, hidden, targets):
        """The loss times `loss_scale`, whose gradients are taken, and the loss; `hidden` as of `_head`."""
        if self._takes_scaled_loss():
            terms = targets.shape.num_elements() if self.reduction == "mean" else targets.shape[1 - self._time_axis]
            scaled_loss, losses = self.head.scaled_loss(hidden, targets, self.loss_scale / terms)
            return scaled_loss, self._reduced(losses)
        _, loss = self._head(hidden, targets, self.kernel.value, self.bias.value)
        return loss * self.loss_scale, loss

    def _loss(self, logits, targets):
        return self._reduced(self._losses(logits, targets))

    def _losses(self, logits, targets):
        """[batch, time]"""
        if self.head is not None:
            return self.head.cross_entropy(logits, targets)
        logits = tf.cast(logits, tf.float32) if logits.dtype.size == 2 else logits
        return tf.nn.sparse_softmax_cross_entropy_with_logits(targets, logits)

    def _reduced(self, losses):
        return tf.reduce_mean(losses if self.reduction == "mean" else tf.reduce_sum(losses, axis=self._time_axis))

    def _forward_step(self, tokens, targets, states):
        hidden, _, final_states = self._network(tokens, states, training=False)
        logits, loss = self._head(hidden, targets, self.kernel.value, self.bias.value)
        return loss, hidden, logits, final_states

    def _train_step(self, tokens, targets, states, stack_dropout=True):
        gradients, loss, final_states = self._gradients(tokens, targets, states, stack_dropout)
        self._update(gradients)
        return loss, final_states

    def _gradients(self, tokens, targets, states, stack_dropout=True):
        """(gradients of the scaled loss, the loss, final states)"""
        values = [v.value for v in self.variables]
        with tf.GradientTape() as tape:
            _, dropped, final_states = self._network(tokens, states, training=True, stack_dropout=stack_dropout)
            scaled_loss, loss = self._training_loss(dropped, targets)
        gradients = tape.gradient(scaled_loss, values)
        _require_all(gradients, self.variables)
        return gradients, loss, final_states

    def _stack_step(self, inputs, gradient, states):
        variables = [v.value for v in self.stack.variables]
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            outputs, _ = self.stack(inputs, states, None, True)
        gradients = tape.gradient(outputs, [inputs, *variables], output_gradients=gradient)
        _require_all(gradients[1:], self.stack.variables)
        # All are returned, so that none is left out as unused.
        return tf.reduce_mean(tf.square(tf.cast(outputs, tf.float32))), outputs, gradients

    def _update(self, gradients):
        """One step of the optimizer, by gradients of the scaled loss."""
        # The embedding's sparse gradient is made dense: clipping its slices one by one would count repeated words twice.
        gradients = [tf.convert_to_tensor(g) * (1.0 / self.loss_scale) for g in gradients]
        if self.clip_norm is not None:
            gradients, _ = tf.clip_by_global_norm(gradients, self.clip_norm)
        self.optimizer.apply(gradients, self.variables)


def _require_all(gradients: Sequence, variables: Sequence) -> None:
    if unused := [v.path for v, gradient in zip(variables, gradients, strict=True) if gradient is None]:
        raise ValueError(f"no gradient of {', '.join(unused)}: does the stack use it?")


def build(
    weights: Mapping[str, np.ndarray],
    states: Sequence,
    batches: Sequence,
    optimizer: tuple[str, float],
    *,
    stack: Callable[..., Stack],
    precision: str,
    device: str = "",
    own_dropout: bool = False,
    **options,
) -> LanguageModel:
    """The language model of a row.

    Args:
        weights, states, batches, options: of LanguageModel.
        optimizer: ("SGD" or "Adam", learning rate): Keras' own.
        stack: (weights, num_layers, dtype) → the stack.
        precision: "fp32", "tf32", "fp16", "bf16" or "fp64".
        device: TensorFlow finds it by itself.
        own_dropout: `stack` takes a further argument, the rate of the dropout between its layers.
    """
    kind, learning_rate = optimizer
    dropout = {"dropout": 1.0 - options.get("keep_prob", 1.0)} if own_dropout else {}
    made = stack(weights, stack_size(weights)[0], COMPUTE_DTYPE[precision], **dropout)
    kinds = {"SGD": keras.optimizers.SGD, "Adam": keras.optimizers.Adam}
    return LanguageModel(made, weights, states, batches, kinds[kind](learning_rate), **options)


class _Traced:
    """A tf.function that is called by its trace, with its arguments flattened.

    Otherwise TensorFlow looks for the trace that fits and binds the arguments to its signature, in Python, at every call: on a
    CPU 0.3 of 0.5 ms of a small step. `_call_flat` is TensorFlow 2.21's own way on from there, gradient tapes included.

    Its arguments are tensors, nested alike in every call.
    """

    def __init__(self, function: Callable, jit_compile: bool) -> None:
        def step(*arguments):  # without the function's own defaults, which a trace would ask for
            return function(*arguments)

        self._function, self._traces = tf.function(step, jit_compile=jit_compile or None), {}

    def __call__(self, *arguments):
        flat = tf.nest.flatten(arguments)
        shapes = tuple([x._shape_tuple() for x in flat])
        if shapes not in self._traces:
            self.trace(*arguments)
        trace, captured = self._traces[shapes]
        return trace._call_flat(flat, captured)

    def trace(self, *arguments) -> None:
        """Trace for arguments like these, tensors or tf.TensorSpecs."""
        trace = self.get_concrete_function(*arguments)
        self._traces[tuple(tuple(x.shape) for x in tf.nest.flatten(arguments))] = trace, trace.captured_inputs

    def get_concrete_function(self, *arguments):
        """The trace for arguments like these."""
        return self._function.get_concrete_function(*arguments)

    def experimental_get_tracing_count(self) -> int:
        return self._function.experimental_get_tracing_count()
