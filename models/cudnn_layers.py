"""CudnnLSTMLayer, CudnnGRULayer, CudnnRNNTanhLayer and CudnnRNNReluLayer: the stacks of cudnn_rnn.py as Keras layers.

    model = keras.Sequential([
        keras.Input((None, 64)),
        CudnnLSTMLayer(256, num_layers=3, direction="bidirectional", dropout=0.2, return_sequences=True),
        keras.layers.Dense(10),
    ])

One such layer is a whole stack of recurrent layers, and one cuDNN call where there is a GPU. It computes, and trains like, as
many keras.layers.LSTM (GRU with reset_after=True, SimpleRNN) with their default arguments; models/cudnn_convert.py goes to and
from those and torch.nn's. What is different:

- Its one weight, `params`, is cuDNN's flat buffer, so an optimizer that looks at a weight as a whole (`clipnorm`, Lamb, Muon)
  sees the stack as one.
- A mask has to be right-padded, and past the end of a sequence the outputs are 0 (Keras repeats the last one, but in
  Bidirectional).
- `dropout` acts between the layers, on every step anew.

`.keras` and `.weights.h5` hold the canonical tensors of models/layouts.py, not the buffer: a file opens wherever Keras runs. A
tf.train.Checkpoint of a model holds the buffer itself.
"""

import functools
import types
from collections.abc import Mapping

import keras
import numpy as np
import tensorflow as tf

from models import cudnn_checks, layouts
from models.cudnn_rnn import CudnnGRU, CudnnLSTM, CudnnRNNRelu, CudnnRNNTanh

register = keras.saving.register_keras_serializable("lstm_benchmarks")
FORGET_BIAS = 1.0  # of an LSTM at the start, as in keras.layers.LSTM (unit_forget_bias)


class CudnnLayer(keras.layers.Layer):
    """What the four layers share; each names its class of cudnn_rnn.py in `model_class`.

    Args:
        units: units of every layer (and of each of its directions).
        num_layers: layers in the stack.
        direction: "unidirectional" or "bidirectional", which runs every layer both ways and concatenates the outputs.
        dropout: share of each layer's outputs that is set to 0 on the way to the next layer in training, 0 to 1.
        return_sequences: whether to return the outputs of all steps, or only what the last layer has at a sequence's end (its
            backward direction: at the beginning).
        return_state: whether to return the final states too.
        stateful: whether a batch starts from the final states of the one before. The batch size must be fixed then.
        time_major: whether inputs, masks and outputs are [time, batch, …]; else [batch, time, …]. Keras' `fit` and `predict` cut
            arrays into batches along their first axis, so this is for layers inside of a model.
        seed: of dropout, an int32; None is 0.
        use_cudnn: True (cuDNN, or an error where TensorFlow sees no NVIDIA GPU), False (TensorFlow's ops) or "auto" (cuDNN where
            TensorFlow sees an NVIDIA GPU). get_config says "auto" for True, so that a file opens on a CPU.
        kwargs: name, dtype, trainable and so on of keras.layers.Layer.

    Attributes:
        params: the flat buffer, float32 (float64, float16 under a policy of that name); None until the layer is built.
        spec: layouts.StackSpec of the stack; None until the layer is built.
        states: of a stateful layer, the variables [h, c] (h alone, but for an LSTM).
        uses_cudnn: whether a call runs cuDNN (else TensorFlow's ops).

    Raises:
        ValueError: an argument is none of these; the message names it, what was given and what is allowed.
    """

    model_class: type

    def __init__(
        self,
        units: int,
        num_layers: int = 1,
        direction: str = "unidirectional",
        dropout: float = 0.0,
        return_sequences: bool = False,
        return_state: bool = False,
        stateful: bool = False,
        time_major: bool = False,
        seed: int | None = None,
        use_cudnn: bool | str = "auto",
        **kwargs,
    ) -> None:
        super().__init__(**kwargs)
        self.units = cudnn_checks.integer("units", units, 1, 2**31 - 1)
        self.num_layers, self.direction, self.dropout = num_layers, direction, dropout
        self.seed = 0 if seed is None else seed
        model = self._model(1, use_cudnn)  # checks these arguments
        self.num_layers, self.dropout, self.seed = model.num_layers, model.dropout, model.seed
        self.use_cudnn, self.uses_cudnn = use_cudnn, model.uses_cudnn
        self.return_sequences = cudnn_checks.boolean("return_sequences", return_sequences)
        self.return_state = cudnn_checks.boolean("return_state", return_state)
        self.stateful = cudnn_checks.boolean("stateful", stateful)
        self.time_major = cudnn_checks.boolean("time_major", time_major)
        self.supports_masking = True
        self.supports_jit = not self.uses_cudnn  # cuDNN's op has no kernel for XLA
        self.input_spec = keras.InputSpec(ndim=3)
        self.params = self.spec = None
        self._held = types.SimpleNamespace(states=None)  # out of Keras' sight: states are no weights

    @property
    def states(self) -> list[keras.Variable] | None:
        return self._held.states

    def build(self, inputs_shape, initial_state_shape=None) -> None:
        """Create the weight for inputs of this shape."""
        input_size = inputs_shape[-1]
        if input_size is None:
            raise ValueError(f"inputs: {list(inputs_shape)} given, expected a known number of features, the last axis")
        self.spec = self._model(input_size, self.uses_cudnn).spec
        self.input_spec = keras.InputSpec(ndim=3, axes={-1: input_size})
        self.params = self.add_weight(
            shape=(layouts.cudnn_size(self.spec),), initializer=self._initial_params, name="params"
        )
        if self.stateful:
            batch = inputs_shape[1 if self.time_major else 0]
            if batch is None:
                raise ValueError(
                    f"inputs: {list(inputs_shape)} given to a stateful layer, expected a known batch size, "
                    "as keras.Input(batch_shape=…) or Input(…, batch_size=…) fixes"
                )
            self._held.states = [
                keras.Variable(
                    shape=shape, initializer="zeros", trainable=False, dtype=self.variable_dtype, name="rnn_state"
                )
                for shape in self._state_shapes(batch)
            ]

    def call(self, inputs, initial_state=None, mask=None, training=False):
        """Run the stack.

        Args:
            inputs: [batch, time, features], or [time, batch, features] where time_major.
            initial_state: [h, c] (h alone, but for an LSTM), each [num_layers·directions, batch, units], the directions of a
                layer side by side; None is zeros, or where the layer is stateful the final states of the batch before.
            mask: booleans [batch, time] ([time, batch] where time_major), False past a sequence's end and only there; or None:
                all sequences fill the inputs, if no mask comes with them.
            training: whether dropout acts.

        Returns:
            The outputs of all steps [batch, time, units·directions] (time_major: [time, batch, …]), 0 past a sequence's end; or
            the last ones [batch, units·directions]. With return_state a tuple of these and the final states, in the form of
            initial_state: those at each sequence's end. An empty sequence keeps its states, and its last output is 0.

        Raises:
            ValueError: a mask that is not right-padded, or an argument of another type or shape. In a graph, which knows no
                values, a mask is a tf.errors.InvalidArgumentError, and under XLA, which drops that, an output of NaN.
        """
        if mask is None:  # Keras hands a mask over only to a call that has no other tensor, such as an initial state
            mask = getattr(inputs, "_keras_mask", None)
        x = tf.cast(inputs, self.compute_dtype)
        x = x if self.time_major else tf.transpose(x, [1, 0, 2])
        states = self._initial_state(initial_state, x)
        lengths = None
        if mask is not None:
            mask = tf.cast(mask, tf.bool)
            lengths, right_padded = _sequence_lengths(tf.transpose(mask) if self.time_major else mask, x)
            if right_padded is not None:  # XLA drops the assertion: no number may come of such a sequence
                nan = tf.constant(float("nan"), x.dtype)
                states = [tf.where(right_padded[:, tf.newaxis], state, nan) for state in states]

        model = self._model(self.spec.input_size, self.uses_cudnn, self.dropout if training else 0.0)
        params = model.single_bias(tf.cast(tf.convert_to_tensor(self.params), x.dtype))
        run = functools.partial(model, is_training=True) if training else functools.partial(infer, model)
        outputs, *finals = run(x, *states, params, sequence_lengths=lengths)
        if self.stateful:
            for kept, final in zip(self.states, finals, strict=True):
                kept.assign(final)
        if not self.return_sequences:
            outputs = tf.concat(tf.unstack(finals[0][-len(self.spec.directions) :]), axis=-1)
            if lengths is not None:
                outputs = tf.where((lengths > 0)[:, tf.newaxis], outputs, tf.zeros([], outputs.dtype))
        elif not self.time_major:
            outputs = tf.transpose(outputs, [1, 0, 2])
        return (outputs, *finals) if self.return_state else outputs

    def compute_output_shape(self, inputs_shape, initial_state_shape=None):
        batch = inputs_shape[1 if self.time_major else 0]
        width = self.units * (2 if self.direction == "bidirectional" else 1)
        shape = (*inputs_shape[:2], width) if self.return_sequences else (batch, width)
        return (shape, *self._state_shapes(batch)) if self.return_state else shape

    def compute_mask(self, inputs, mask=None):
        mask = mask if self.return_sequences else None
        return [mask, *(None for _ in self._state_shapes(None))] if self.return_state else mask

    def reset_state(self) -> None:
        """Set the states of a stateful layer to 0."""
        for state in self.states or ():
            state.assign(tf.zeros(state.shape, state.dtype))

    def get_config(self) -> dict:
        return {
            **super().get_config(),
            "units": self.units,
            "num_layers": self.num_layers,
            "direction": self.direction,
            "dropout": self.dropout,
            "return_sequences": self.return_sequences,
            "return_state": self.return_state,
            "stateful": self.stateful,
            "time_major": self.time_major,
            "seed": self.seed,
            "use_cudnn": "auto" if self.use_cudnn is True else self.use_cudnn,
        }

    # --- weights in the canonical form --------------------------------------------------------------------------------------

    def get_canonical(self) -> dict[str, np.ndarray]:
        """The weights in the canonical form (models/layouts.py)."""
        self._check_built()
        return layouts.from_cudnn_flat(self.params.numpy(), self.spec)

    def set_canonical(self, weights: Mapping[str, np.ndarray]) -> None:
        """Load weights in the canonical form, of any float dtype.

        Raises:
            ValueError: a name is missing or does not belong, or a shape or dtype is another. The layer keeps its weights.
        """
        self._check_built()
        self.params.assign(layouts.to_cudnn_flat(weights, self.spec))

    def save_own_variables(self, store) -> None:
        """What `.keras` and `.weights.h5` hold: the canonical tensors, "lstm_0.forward.kernel" and so on."""
        for name, array in self.get_canonical().items() if self.built else ():
            store[name.replace("/", ".")] = array  # HDF5 would read a slash as a group

    def load_own_variables(self, store) -> None:
        """Load what save_own_variables stored; raises as set_canonical."""
        arrays = {key.replace(".", "/"): np.asarray(store[key]) for key in tuple(store.keys())}
        if arrays or self.built:
            self.set_canonical(arrays)

    def _check_built(self) -> None:
        if self.params is None:
            raise ValueError(f"{self.name}: not built yet, expected a call or build((None, None, features)) before")

    def _initial_params(self, shape, dtype) -> np.ndarray:
        """Per layer and direction as Keras' layers start: their matrices are orthogonal or in range as a whole, not per gate."""
        weights = {}
        with tf.init_scope():  # values, also where a layer is built inside a tf.function
            for name, shape in layouts.canonical_shapes(self.spec).items():
                initializer = {
                    "kernel": keras.initializers.GlorotUniform,
                    "recurrent_kernel": keras.initializers.Orthogonal,
                    "bias": keras.initializers.Zeros,
                }[name.rpartition("/")[2]]
                # One object for each tensor: it draws the same numbers at every call.
                weights[name] = np.array(initializer()(shape, dtype=dtype))
                if self.spec.mode == "lstm" and name.endswith("/bias"):
                    weights[name][self.units : 2 * self.units] = FORGET_BIAS
        return layouts.to_cudnn_flat(weights, self.spec)

    # --- the call -----------------------------------------------------------------------------------------------------------

    def _model(self, input_size: int, use_cudnn: bool | str, dropout: float | None = None):
        """The stack of cudnn_rnn.py. It holds no numbers, so every call makes its own."""
        return self.model_class(
            self.num_layers,
            self.units,
            input_size,
            direction=self.direction,
            dtype=self.compute_dtype,
            dropout=self.dropout if dropout is None else dropout,
            seed=self.seed,
            use_cudnn=use_cudnn,
        )

    def _state_shapes(self, batch: int | None) -> list[tuple[int | None, ...]]:
        """Of [h, c], or [h]."""
        pseudo_layers = self.num_layers * (2 if self.direction == "bidirectional" else 1)
        return [(pseudo_layers, batch, self.units)] * (2 if self.model_class.rnn_mode == "lstm" else 1)

    def _initial_state(self, given, x: tf.Tensor) -> list[tf.Tensor]:
        """[h, c] or [h] for x [time, batch, features], in its dtype."""
        shapes = self._state_shapes(x.shape[1])
        if self.stateful and x.shape[1] not in (None, self.states[0].shape[1]):
            expected = self.states[0].shape[1]
            raise ValueError(
                f"inputs: a batch of {x.shape[1]} given, expected {expected}, of which the layer keeps states"
            )
        if given is None:
            if self.stateful:
                return [tf.cast(tf.convert_to_tensor(state), x.dtype) for state in self.states]
            pseudo_layers, _, units = shapes[0]
            return [tf.zeros([pseudo_layers, tf.shape(x)[1], units], x.dtype) for _ in shapes]
        given = list(given) if isinstance(given, list | tuple) else [given]
        if len(given) != len(shapes):
            expected = "2, h and c" if len(shapes) == 2 else "1, h"
            raise ValueError(f"initial_state: {len(given)} tensors given, expected {expected}")
        return [
            cudnn_checks.tensor(
                f"initial_state[{k}]", tf.cast(state, x.dtype), [a or "batch" for a in shape], x.dtype, [x.dtype]
            )
            for k, (state, shape) in enumerate(zip(given, shapes, strict=True))
        ]


def infer(
    model, x: tf.Tensor, *states_and_params: tf.Tensor, sequence_lengths: tf.Tensor | None
) -> tuple[tf.Tensor, ...]:
    """The model outside of training, dropout 0, with gradients on cuDNN too.

    cuDNN keeps what its backward pass needs only in training. A model is often called outside of it, where nobody asks for
    gradients; where somebody does, the gradient runs the stack once more.
    """
    if not model.uses_cudnn:
        return model(x, *states_and_params, is_training=False, sequence_lengths=sequence_lengths)
    return infer_and_run_again(model, sequence_lengths, x, *states_and_params)


def infer_and_run_again(model, sequence_lengths: tf.Tensor | None, *tensors: tf.Tensor) -> tuple[tf.Tensor, ...]:
    """model(*tensors) outside of training, whose gradients come from a second run, in training."""

    @tf.custom_gradient
    def run(*tensors):
        def gradient(*upstream):
            with tf.GradientTape() as tape:
                tape.watch(tensors)
                results = model(*tensors, is_training=True, sequence_lengths=sequence_lengths)
            return tape.gradient(results, tensors, upstream)

        return model(*tensors, is_training=False, sequence_lengths=sequence_lengths), gradient

    return run(*tensors)


def _sequence_lengths(mask: tf.Tensor, x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor | None]:
    """(lengths, right_padded), both [batch], of a mask [batch, time] for x [time, batch, features].

    right_padded is None where it is known to hold for all sequences.
    """
    expected = [x.shape[1], x.shape[0]]
    if not mask.shape.is_compatible_with(expected):
        raise ValueError(
            f"mask: {list(mask.shape)} given, expected {expected}: one boolean for each step of the inputs"
        )
    right_padded = tf.reduce_all(mask[:, :-1] | ~mask[:, 1:], axis=1)
    lengths = tf.reduce_sum(tf.cast(mask, tf.int32), axis=1)
    wrong = "is not right-padded, expected True up to a sequence's end and False past it"
    if tf.executing_eagerly():
        if not np.all(right_padded):
            raise ValueError(f"mask: sequence {np.argmin(right_padded)} {wrong}")
        return lengths, None
    steps, batch = tf.unstack(tf.shape(x)[:2])
    same_shape = tf.debugging.assert_equal(tf.shape(mask), [batch, steps], "mask: of another shape than the inputs")
    padded = tf.debugging.assert_equal(tf.reduce_all(right_padded), True, f"mask: a sequence {wrong}")
    with tf.control_dependencies([same_shape, padded]):
        return tf.identity(lengths), right_padded


@register
class CudnnLSTMLayer(CudnnLayer):
    """A stack of LSTM layers. The arguments are those of CudnnLayer."""

    model_class = CudnnLSTM


@register
class CudnnGRULayer(CudnnLayer):
    """A stack of GRU layers (Keras: reset_after=True). The arguments are those of CudnnLayer."""

    model_class = CudnnGRU


@register
class CudnnRNNTanhLayer(CudnnLayer):
    """A stack of plain RNN layers with tanh. The arguments are those of CudnnLayer."""

    model_class = CudnnRNNTanh


@register
class CudnnRNNReluLayer(CudnnLayer):
    """A stack of plain RNN layers with relu. The arguments are those of CudnnLayer."""

    model_class = CudnnRNNRelu
