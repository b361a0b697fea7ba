"""What a stack of recurrent layers needs to be one Keras layer, whatever computes it.

Checks of arguments, inputs and initial states, right-padded masks, kept states, shapes, and files that hold the canonical
tensors (spec.py). A subclass creates the weights and runs the stack.
"""

import types
from collections.abc import Callable, Mapping

import keras
import numpy as np
import tensorflow as tf

from . import checks

INITIALIZERS = {  # as in keras.layers.LSTM
    "kernel": keras.initializers.GlorotUniform,
    "recurrent_kernel": keras.initializers.Orthogonal,
    "bias": keras.initializers.Zeros,
}


class StackLayer(keras.layers.Layer):
    """The base of WavefrontLSTM, whose docstring explains the arguments, and of other layers that are a whole stack.

    Attributes:
        spec: what fixes the weights' shapes; None until the layer is built.
        states: of a stateful layer, the variables [h, c] (h alone, but for an LSTM).
    """

    mode = "lstm"  # the kind of layer; a subclass may be of "gru", "rnn_tanh" or "rnn_relu"
    time_major = False
    unit_forget_bias = True
    go_backwards = False  # keras.layers.Bidirectional asks for it

    def __init__(
        self, units, num_layers, direction, dropout, return_sequences, return_state, stateful, **kwargs
    ) -> None:
        super().__init__(**kwargs)
        self.autocast = False  # `call` casts; Keras would round initial states to the inputs' dtype
        if keras.backend.backend() != "tensorflow":
            raise ValueError(
                f"backend: {keras.backend.backend()} given, expected tensorflow, in KERAS_BACKEND; use keras.layers.LSTM"
            )
        self.units = checks.integer("units", units, 1, 2**31 - 1)
        self.num_layers = checks.integer("num_layers", num_layers, 1, 2**31 - 1)
        checks.choice("direction", direction, ("unidirectional", "bidirectional"))
        self.direction = direction
        self.dropout = checks.probability("dropout", dropout)
        self.return_sequences = checks.boolean("return_sequences", return_sequences)
        self.return_state = checks.boolean("return_state", return_state)
        self.stateful = checks.boolean("stateful", stateful)
        self.supports_masking = True
        self.input_spec = keras.InputSpec(ndim=3)
        self.spec = None
        self._held = types.SimpleNamespace(states=None)  # out of Keras' sight: states are no weights

    # --- what a subclass gives ----------------------------------------------------------------------------------------------

    def _make_spec(self, input_size: int):
        """The stack for inputs of `input_size` features: an object like spec.StackSpec."""
        raise NotImplementedError

    def _create_weights(self) -> None:
        """Add the weights of `self.spec`."""
        raise NotImplementedError

    def _run(
        self, x: tf.Tensor, states: list[tf.Tensor], lengths: tf.Tensor | None, training: bool
    ) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """Run the stack on x [time, batch, features].

        Returns:
            outputs [time, batch, units·directions], 0 past a sequence's end, and the final states.
        """
        raise NotImplementedError

    def get_canonical(self) -> dict[str, np.ndarray]:
        """The weights in the canonical form (spec.py)."""
        raise NotImplementedError

    def set_canonical(self, weights: Mapping[str, np.ndarray]) -> None:
        """Load weights in the canonical form: float16, float32 or float64, all arrays alike.

        Raises:
            ValueError: a name is missing or does not belong, a shape is another, or the arrays are not all of one such dtype. The
                layer keeps its weights.
        """
        raise NotImplementedError

    def _state_dtypes(self, compute: tf.DType) -> list[tf.DType]:
        """In which `_run` takes its states, where it computes in `compute`."""
        return [compute] * len(self._state_shapes(None))

    # --- as a Keras layer ---------------------------------------------------------------------------------------------------

    @property
    def states(self) -> list[keras.Variable] | None:
        """[h, c] (h alone, but for an LSTM) of a stateful layer, each [num_layers·directions, batch, units]; None until built."""
        return self._held.states

    def build(self, inputs_shape, initial_state_shape=None) -> None:
        """Create the weights for inputs of this shape."""
        input_size = inputs_shape[-1]
        if input_size is None:
            raise ValueError(f"inputs: {list(inputs_shape)} given, expected a known number of features, the last axis")
        self.spec = self._make_spec(input_size)
        self.input_spec = keras.InputSpec(ndim=3, axes={-1: input_size})
        self._create_weights()
        if self.stateful:
            batch = inputs_shape[1 if self.time_major else 0]
            if batch is None:
                raise ValueError(
                    f"inputs: {list(inputs_shape)} given to a stateful layer, expected a known batch size, "
                    "as keras.Input(batch_shape=…) or Input(…, batch_size=…) fixes"
                )
            dtypes = self._state_dtypes(tf.as_dtype(self.variable_dtype))
            self._held.states = [
                keras.Variable(  # autocast=False: Keras would round a float32 c to the compute dtype wherever it is read
                    shape=shape,
                    initializer="zeros",
                    trainable=False,
                    dtype=dtype.name,
                    autocast=False,
                    name="rnn_state",
                )
                for shape, dtype in zip(self._state_shapes(batch), dtypes, strict=True)
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
            initial_state: those at each sequence's end. An empty sequence keeps its states, and its last output is 0. States
            have layers first: `predict` and `fit`, which cut and join batches along the first axis, take them only as
            keras.ops.transpose(state, (1, 0, 2)). Their dtype is the compute dtype, but for the c of a WavefrontLSTM that
            computes in 16 bits: it is float32.

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
                nan = float("nan")
                states = [tf.where(right_padded[:, tf.newaxis], s, tf.constant(nan, s.dtype)) for s in states]

        outputs, finals = self._run(x, states, lengths, training)
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

    def compute_output_spec(self, *args, **kwargs):
        """As Keras', with the states' own dtypes."""
        found = super().compute_output_spec(*args, **kwargs)
        if not self.return_state:
            return found
        dtypes = [dtype.name for dtype in self._state_dtypes(tf.as_dtype(self.compute_dtype))]
        states = [keras.KerasTensor(state.shape, dtype) for state, dtype in zip(found[1:], dtypes, strict=True)]
        return (found[0], *states)

    def compute_mask(self, inputs, mask=None):
        mask = mask if self.return_sequences else None
        return [mask, *(None for _ in self._state_shapes(None))] if self.return_state else mask

    def get_initial_state(self, batch_size: int | tf.Tensor) -> list[tf.Tensor]:
        """Zeros in the form of `initial_state`, for a batch of this size."""
        shapes, dtypes = self._state_shapes(batch_size), self._state_dtypes(tf.as_dtype(self.compute_dtype))
        return [tf.zeros(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]

    def reset_state(self) -> None:
        """Set the states of a stateful layer to 0."""
        for state in self.states or ():
            state.assign(tf.zeros(state.shape, state.dtype))

    def reset_states(self) -> None:
        """reset_state, by the name that keras.layers.LSTM has too."""
        self.reset_state()

    def get_config(self) -> dict:
        own = ("units", "num_layers", "direction", "dropout", "return_sequences", "return_state", "stateful")
        return {**super().get_config(), **{name: getattr(self, name) for name in own}}

    @classmethod
    def from_config(cls, config: dict):
        """As Keras'. keras.layers.Bidirectional makes its backward layer by it, which this layer cannot be."""
        if config.get("go_backwards"):
            raise ValueError(
                f"keras.layers.Bidirectional around {cls.__name__} is not supported; use direction='bidirectional'"
            )
        return super().from_config(config)

    # --- files --------------------------------------------------------------------------------------------------------------

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
        if self.spec is None:
            raise ValueError(f"{self.name}: not built yet, expected a call or build((None, None, features)) before")

    def _initial_weight(self, name: str, shape: tuple[int, ...], dtype) -> np.ndarray:
        """The canonical tensor `name` as Keras' layers start: matrices orthogonal or in range as a whole, not per gate."""
        initializer = self._initializer(name.rpartition("/")[2])
        forget_bias = self.mode == "lstm" and self.unit_forget_bias and name.endswith("/bias")
        with tf.init_scope():  # values, also where a layer is built inside a tf.function
            if not forget_bias:
                return np.array(initializer(shape, dtype=dtype))
            first, rest = (np.array(initializer((size * self.units,), dtype=dtype)) for size in (1, 2))
            return np.concatenate([first, np.ones_like(first), rest])

    def _initializer(self, part: str) -> Callable:
        """An initializer for one tensor. Every tensor has its own: one object draws the same numbers at every call."""
        return INITIALIZERS[part]()

    # --- states and masks ---------------------------------------------------------------------------------------------------

    def _state_shapes(self, batch: int | None) -> list[tuple[int | None, ...]]:
        """Of [h, c], or [h]."""
        pseudo_layers = self.num_layers * (2 if self.direction == "bidirectional" else 1)
        return [(pseudo_layers, batch, self.units)] * (2 if self.mode == "lstm" else 1)

    def _initial_state(self, given, x: tf.Tensor) -> list[tf.Tensor]:
        """[h, c] or [h] for x [time, batch, features], in the dtypes of `_run`."""
        shapes, dtypes = self._state_shapes(x.shape[1]), self._state_dtypes(x.dtype)
        if self.stateful and x.shape[1] not in (None, self.states[0].shape[1]):
            expected = self.states[0].shape[1]
            raise ValueError(
                f"inputs: a batch of {x.shape[1]} given, expected {expected}, of which the layer keeps states"
            )
        if given is None:
            if self.stateful:
                kept = zip(self.states, dtypes, strict=True)
                return [tf.cast(tf.convert_to_tensor(state), dtype) for state, dtype in kept]
            return self.get_initial_state(tf.shape(x)[1])
        given = list(given) if isinstance(given, list | tuple) else [given]
        if len(given) != len(shapes):
            expected = "2, h and c" if len(shapes) == 2 else "1, h"
            raise ValueError(f"initial_state: {len(given)} tensors given, expected {expected}")
        states = []
        for k, (state, shape, dtype) in enumerate(zip(given, shapes, dtypes, strict=True)):
            state = state.value if isinstance(state, keras.Variable) else state
            axes = [axis or "batch" for axis in shape]
            checked = checks.tensor(f"initial_state[{k}]", state, axes, dtype, (*checks.FLOATS, tf.bfloat16))
            states.append(tf.cast(checked, dtype))
        return states


def _sequence_lengths(mask: tf.Tensor, x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor | None]:
    """(lengths, right_padded), both [batch], of a mask [batch, time] for x [time, batch, features].

    right_padded is None where it is known to hold for all sequences.
    """
    expected = [x.shape[1], x.shape[0]]
    if not mask.shape.is_compatible_with(expected):
        raise ValueError(
            f"mask: {list(mask.shape)} given, expected {expected}: one boolean for each step of the inputs"
        )
    mask = tf.ensure_shape(mask, expected)
    right_padded = tf.reduce_all(mask[:, :-1] | ~mask[:, 1:], axis=1)
    lengths = tf.reduce_sum(tf.cast(mask, tf.int32), axis=1)
    wrong = (
        "is not right-padded, expected True up to a sequence's end and False past it (pad_sequences(…, padding='post')); "
        "keras.layers.LSTM takes any mask"
    )
    if tf.executing_eagerly():
        if not np.all(right_padded):
            raise ValueError(f"mask: sequence {np.argmin(right_padded)} {wrong}")
        return lengths, None
    steps, batch = tf.unstack(tf.shape(x)[:2])
    same_shape = tf.debugging.assert_equal(tf.shape(mask), [batch, steps], "mask: of another shape than the inputs")
    padded = tf.debugging.assert_equal(tf.reduce_all(right_padded), True, f"mask: a sequence {wrong}")
    with tf.control_dependencies([same_shape, padded]):
        return tf.identity(lengths), right_padded
