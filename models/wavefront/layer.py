"""WavefrontLSTM: a stack of LSTM layers that advances along its diagonal. Made for XLA.

    >>> import keras
    >>> from wavefront_lstm import WavefrontLSTM
    >>> model = keras.Sequential([
    ...     keras.Input((None, 64)),
    ...     WavefrontLSTM(32, num_layers=3, dropout=0.2, return_sequences=True),
    ...     keras.layers.Dense(10),
    ... ])
    >>> model.compile("adam", "mse", jit_compile=True)
    >>> model.output_shape
    (None, None, 10)

One such layer is a whole stack. It computes, and trains like, as many keras.layers.LSTM with their default activations, with
these differences:

- A mask has to be right-padded (`keras.utils.pad_sequences(…, padding="post")`; its default pads in front). Under XLA, where
  nothing can raise, another one makes the outputs NaN. Past the end of a sequence outputs are 0 (Keras repeats the last one).
- `dropout` acts between the layers, on every step anew; one layer alone has none. `recurrent_dropout` is Keras': each gate of
  each layer has one mask [batch, units] on h as it enters the recurrent product, the same at all steps of a call.
- States are [layers, batch, units], those of all layers in one tensor, and c is float32 where the layer computes in 16 bits.
  `training` is a Python bool. In place of keras.layers.Bidirectional: direction="bidirectional".

Keras compiles by itself on a GPU; jit_compile=True says so. Without XLA the layer gives the same numbers, slower; what dropout
draws, TensorFlow draws differently under XLA.

It has two implementations. "xla" is pure TensorFlow, does all of the above and runs everywhere. "persistent" runs the same
schedule in two CUDA kernels (with dropout one layer at a time). It needs an NVIDIA GPU of compute capability 8.0 or later,
float16, bfloat16 or float32, and batches that all have one size, which is the data's: len(x) a multiple of batch_size, a data
set with drop_remainder=True, or `fit` and `evaluate` of a CompiledLoop with steps_per_execution above 1. Layer normalization
is not supported. "auto", the default, takes "persistent" where that runs, in a call that is not eager, else "xla"
(choice.py has the rule); layer.chosen says which. Of the others, what one cannot do is a ValueError.

Where to read on: stack.py chooses what of the stack advances together (on a CPU under XLA one layer at a time), schedule.py is
the schedule, forward and backward, cells.py the arithmetic of one step; persistent.py and kernels/ are the persistent
kernels. convert.py goes to and from keras.layers.LSTM and torch.nn.LSTM. `.keras` and `.weights.h5` hold the canonical
tensors of spec.py.
"""

import functools
import inspect
import logging
import warnings
from collections.abc import Callable, Mapping

import keras
import numpy as np
import tensorflow as tf

from . import checks, choice, tracing
from .persistent import persistent_bidirectional_stack, persistent_stack
from .spec import Shapes, StackSpec, check_weights
from .stack import CPU_UNROLL, LayerWeights, bidirectional_stack, lstm_stack
from .stack_layer import StackLayer

NORMALIZATION = {"recurrent_gain": 4, "kernel_gain": 4, "cell_gain": 1, "cell_bias": 1}  # of a layer: sizes in units
IMPLEMENTATIONS = ("auto", "xla", "persistent")
DTYPES = ("float16", "bfloat16", "float32", "float64")
PARTS = {"kernel": "kernel", "recurrent_kernel": "recurrent", "bias": "bias"}  # of a layer: prefix of arguments
LOGGER = logging.getLogger("wavefront_lstm")
INSTEAD = {"go_backwards": "use direction='bidirectional', or reverse the inputs"}


@keras.saving.register_keras_serializable("lstm_benchmarks")
class WavefrontLSTM(StackLayer):
    """A stack of LSTM layers.

    Args:
        units: units of every layer (and of each of its directions).
        num_layers: layers in the stack.
        direction: "unidirectional" or "bidirectional", which runs every layer both ways and concatenates the outputs. Then the
            two directions of a layer advance together, and the layers in turn.
        dropout: share of each layer's outputs that is set to 0 on the way to the next layer in training, from 0 to below 1.
        recurrent_dropout: share of h that each gate's recurrent product does not see in training, from 0 to below 1.
        layer_normalization: whether the layers are normalised as in Ba, Kiros and Hinton 2016 (equations 20 to 22).
        implementation: "xla", "persistent", or "auto": "persistent" where it does what a traced call asks for, by the rule of
            choice.py, on the device where it is traced, else "xla". The logger "wavefront_lstm" says which and why, once, at
            level INFO.
        return_sequences: whether to return the outputs of all steps, or only what the last layer has at a sequence's end (its
            backward direction: at the beginning).
        return_state: whether to return the final states too.
        stateful: whether a batch starts from the final states of the one before. The batch size must be fixed then.
        time_major: whether inputs, masks and outputs are [time, batch, …]; else [batch, time, …]. Keras' `fit` and `predict` cut
            arrays into batches along their first axis, so this is for layers inside of a model, and for training loops.
        seed: of both dropouts, a non-negative integer; None draws one.
        kernel_initializer, recurrent_initializer, bias_initializer, unit_forget_bias: as of keras.layers.LSTM, for every layer.
            A random one without a seed draws each layer's tensor anew; with a seed, layers of one shape start alike.
        kernel_regularizer, recurrent_regularizer, bias_regularizer, kernel_constraint, recurrent_constraint, bias_constraint:
            as of keras.layers.LSTM, for every layer.
        kwargs: name, dtype, trainable, activity_regularizer (of batch-major outputs alone) and so on of keras.layers.Layer; and
            arguments of keras.layers.LSTM that say what this layer does anyway, such as activation="tanh" or
            zero_output_for_mask=True. dtype is a policy: float32, float64, float16, mixed_float16 or mixed_bfloat16.

    Call arguments:
        inputs: [batch, time, features], or [time, batch, features] where time_major.
        initial_state: [h, c], each [num_layers·directions, batch, units]; None is zeros, or where the layer is stateful the final
            states of the batch before.
        mask: booleans [batch, time] ([time, batch] where time_major), right-padded; None: that of the inputs, if they have one.
        training: whether dropout and recurrent_dropout act.

    Returns:
        The outputs of all steps [batch, time, units·directions] (time_major: [time, batch, …]) or the last ones
        [batch, units·directions], in the compute dtype. With return_state a tuple (outputs, h, c), the states as initial_state; c
        is float32 where the layer computes in 16 bits. help(WavefrontLSTM.call) has the details.

    Attributes:
        parameters: the weights under their canonical names; empty until the layer is built.
        spec: StackSpec of the stack; None until the layer is built.
        states: of a stateful layer, the variables [h, c], each [num_layers·directions, batch, units]; None until it is built.
        chosen: the implementation of the latest trace of a call, "xla" or "persistent"; None before the first.

    Raises:
        ValueError: an argument is not one of these, or one of keras.layers.LSTM that has no counterpart here.
    """

    def __init__(
        self,
        units: int,
        num_layers: int = 1,
        *,
        direction: str = "unidirectional",
        dropout: float = 0.0,
        recurrent_dropout: float = 0.0,
        layer_normalization: bool = False,
        implementation: str = "auto",
        return_sequences: bool = False,
        return_state: bool = False,
        stateful: bool = False,
        time_major: bool = False,
        seed: int | None = None,
        kernel_initializer="glorot_uniform",
        recurrent_initializer="orthogonal",
        bias_initializer="zeros",
        unit_forget_bias: bool = True,
        kernel_regularizer=None,
        recurrent_regularizer=None,
        bias_regularizer=None,
        kernel_constraint=None,
        recurrent_constraint=None,
        bias_constraint=None,
        **kwargs,
    ) -> None:
        kwargs = _without_defaults_of_keras(kwargs)
        checks.probability("dropout", dropout, "nothing would reach the next layer")
        super().__init__(units, num_layers, direction, dropout, return_sequences, return_state, stateful, **kwargs)
        self.recurrent_dropout = checks.probability("recurrent_dropout", recurrent_dropout, "no gate would see any h")
        if self.dropout and self.num_layers == 1:
            warnings.warn(
                "dropout: acts between layers, and there is one; add keras.layers.Dropout before or after it",
                stacklevel=2,
            )
        self.layer_normalization = checks.boolean("layer_normalization", layer_normalization)
        self.implementation = _implementation(implementation, self)
        self.time_major = checks.boolean("time_major", time_major)
        if self.activity_regularizer is not None and (self.return_state or self.time_major):
            raise ValueError(
                "activity_regularizer: given with return_state=True or time_major=True, not supported: Keras divides it by the "
                "first axis, which is no batch there; use keras.layers.ActivityRegularization"
            )
        self.seed = None if seed is None else checks.integer("seed", seed, 0, 2**31 - 1)
        if self.compute_dtype not in DTYPES or self.variable_dtype == "bfloat16":
            raise ValueError(
                f"dtype: policy {self.dtype_policy.name} given, expected float32, float64, float16, mixed_float16 or "
                "mixed_bfloat16"
            )
        self.unit_forget_bias = checks.boolean("unit_forget_bias", unit_forget_bias)
        self.kernel_initializer = keras.initializers.get(kernel_initializer)
        self.recurrent_initializer = keras.initializers.get(recurrent_initializer)
        self.bias_initializer = keras.initializers.get(bias_initializer)
        self.kernel_regularizer = keras.regularizers.get(kernel_regularizer)
        self.recurrent_regularizer = keras.regularizers.get(recurrent_regularizer)
        self.bias_regularizer = keras.regularizers.get(bias_regularizer)
        self.kernel_constraint = keras.constraints.get(kernel_constraint)
        self.recurrent_constraint = keras.constraints.get(recurrent_constraint)
        self.bias_constraint = keras.constraints.get(bias_constraint)
        self.seed_generator = keras.random.SeedGenerator(self.seed)
        self.parameters = {}
        self._held.chosen, self._held.said = None, set()

    @property
    def chosen(self) -> str | None:
        """The implementation of the latest trace of a call, "xla" or "persistent"; None before the first."""
        return self._held.chosen

    def get_config(self) -> dict:
        own = ("recurrent_dropout", "layer_normalization", "implementation", "time_major", "seed", "unit_forget_bias")
        config = {**super().get_config(), **{name: getattr(self, name) for name in own}}
        for prefix in PARTS.values():
            for kind in ("initializer", "regularizer", "constraint"):
                name = f"{prefix}_{kind}"
                config[name] = getattr(keras, f"{kind}s").serialize(getattr(self, name))
        return config

    def get_canonical(self) -> dict[str, np.ndarray]:
        """The weights under their canonical names (spec.py), "lstm_0/forward/kernel" and so on.

        Those of layer normalisation follow their layer's bias: "lstm_0/forward/recurrent_gain" and so on.
        """
        self._check_built()
        return {name: variable.numpy() for name, variable in self.parameters.items()}

    def set_canonical(self, weights: Mapping[str, np.ndarray]) -> None:
        """Load weights in that form: float16, float32 or float64, all arrays alike.

        Raises:
            ValueError: a name is missing or does not belong, a shape is another, or the arrays are not all of one such dtype. The
                layer keeps its weights.
        """
        self._check_built()
        for name, array in check_weights(weights, self._shapes()).items():
            self.parameters[name].assign(array)

    def _shapes(self) -> Shapes:
        """Of `parameters`: each pseudo-layer's three tensors, then its layer normalisation."""
        shapes: Shapes = {}
        for name, shape in self.spec.shapes().items():
            shapes[name] = shape
            if self.layer_normalization and name.endswith("/bias"):
                place = name.removesuffix("bias")
                shapes |= {place + part: (size * self.units,) for part, size in NORMALIZATION.items()}
        return shapes

    def _make_spec(self, input_size: int) -> StackSpec:
        return StackSpec(self.num_layers, self.units, input_size, self.direction == "bidirectional")

    def _create_weights(self) -> None:
        self.parameters = {}
        for name, shape in self._shapes().items():
            prefix = PARTS.get(name.rpartition("/")[2])  # None: of layer normalisation
            self.parameters[name] = self.add_weight(
                shape=shape,
                initializer=functools.partial(self._initial_weight, name),
                regularizer=prefix and getattr(self, f"{prefix}_regularizer"),
                constraint=prefix and getattr(self, f"{prefix}_constraint"),
                name=name.replace("/", "."),  # Keras takes no slash
            )

    def _initial_weight(self, name, shape, dtype):
        part = name.rpartition("/")[2]
        if part in NORMALIZATION:
            return np.full(shape, part.endswith("gain"), dtype)
        return super()._initial_weight(name, shape, dtype)

    def _initializer(self, part):
        given = getattr(self, f"{PARTS[part]}_initializer")
        if given is None:  # as Keras' add_weight
            return keras.initializers.GlorotUniform()
        # One that inherits get_config may not say in it what it was made with.
        base = keras.initializers.Initializer
        return given.clone() if isinstance(given, base) and type(given).get_config is not base.get_config else given

    def _state_dtypes(self, compute: tf.DType) -> list[tf.DType]:
        return [compute, tf.float32 if compute.size == 2 else compute]

    def drop(self, x: tf.Tensor) -> tf.Tensor:
        """Dropout as it acts between the layers in training, on x of any shape and float dtype; the result has the same."""
        return self._dropped(x, self.dropout)

    def _between(self, training: bool) -> Callable[[tf.Tensor], tf.Tensor] | None:
        """What acts between the layers in a call; None: nothing."""
        return self.drop if training and self.dropout and self.num_layers > 1 else None

    def recurrent_keep(self, batch: int | tf.Tensor) -> tf.Tensor:
        """What recurrent_dropout keeps in a call on `batch` sequences: booleans [num_layers·directions, 4, batch, units]."""
        ones = tf.ones([self.spec.num_pseudo_layers, 4, batch, self.units])
        return self._dropped(ones, self.recurrent_dropout) > 0

    def _dropped(self, x: tf.Tensor, rate: float | tf.Tensor) -> tf.Tensor:
        """As keras.random.dropout. On a CPU Philox is named: what XLA draws there unasked takes sixty times as long.

        Keras' function takes no tensor as a rate.
        """
        seed = tf.cast(tf.math.floormod(self.seed_generator.next(), tf.int32.max - 1), tf.int32)  # as Keras does
        rng_alg = "philox" if tracing.on("CPU") else "auto_select"
        return tf.nn.experimental.stateless_dropout(x, rate, seed, rng_alg=rng_alg)

    def _run(self, x, states, lengths, training):
        x = _with_steps(x)
        arrays, keep = {name: tf.convert_to_tensor(variable) for name, variable in self.parameters.items()}, None
        if training and self.recurrent_dropout:
            keep = self.recurrent_keep(x.shape[1] or tf.shape(x)[1])
            for name in arrays:  # Keras' factor of h stands in the kernel that h is multiplied with
                if name.endswith("/recurrent_kernel"):
                    arrays[name] /= 1 - self.recurrent_dropout
        arrays = [tf.cast(array, x.dtype) for array in arrays.values()]
        size = len(arrays) // self.spec.num_pseudo_layers
        own = [arrays[k : k + size] for k in range(0, len(arrays), size)]
        layers = [LayerWeights(*parts[:3], parts[3:]) for parts in own]
        dropout = self._between(training)
        chosen = self._choose(x, layers, lengths, dropout, keep)
        if lengths is not None:  # no gradient may come of what stands in the padding, such as NaN
            within = tf.transpose(tf.sequence_mask(lengths, x.shape[0] or tf.shape(x)[0]))
            x = tf.where(within[..., tf.newaxis], x, tf.zeros([], x.dtype))
        run, options = persistent_stack if chosen == "persistent" else lstm_stack, {}
        # On a CPU layers take turns: a step of one layer keeps its cores busy.
        if chosen == "xla" and tracing.compiled_for("CPU"):
            options = {"unroll": CPU_UNROLL} | ({} if self.spec.bidirectional else {"together": 1})
        if self.spec.bidirectional:
            run = persistent_bidirectional_stack if chosen == "persistent" else bidirectional_stack
            layers = list(zip(layers[::2], layers[1::2], strict=True))
        outputs, *finals = run(x, layers, *states, lengths=lengths, dropout=dropout, keep=keep, **options)
        return outputs, finals

    def _choose(self, x, layers, lengths, dropout, keep) -> str:
        """The implementation of this trace. One for shapes alone leaves no word of it."""
        if tracing.in_scratch():
            return "xla" if self.implementation == "auto" else self.implementation
        if self.implementation != "auto":
            self._held.chosen = self.implementation
            return self.implementation
        chosen, why = choice.chosen(
            x,
            layers,
            [getattr(variable.value, "device", None) or "" for variable in self.parameters.values()],
            lengths=lengths,
            bidirectional=self.spec.bidirectional,
            dropout=bool(dropout),
            keep=keep is not None,
        )
        self._held.chosen = chosen
        if (line := f"{self.name}: {chosen}: {why}") not in self._held.said:
            self._held.said.add(line)
            LOGGER.info(line)
        return chosen  # not what another thread's call has chosen meanwhile


def _implementation(given: object, layer: WavefrontLSTM) -> str:
    if given not in IMPLEMENTATIONS:
        raise ValueError(f"implementation: {given!r} given, expected one of {', '.join(IMPLEMENTATIONS)}")
    if given == "persistent" and layer.layer_normalization:
        raise ValueError(
            "layer_normalization: True given, not supported by implementation='persistent'; use implementation='xla'"
        )
    return given


def _with_steps(x: tf.Tensor) -> tf.Tensor:
    """x [time, batch, features], which has a step at least."""
    wrong = "inputs: no steps given, expected one at least"
    if x.shape[0] == 0:
        raise ValueError(wrong)
    if x.shape[0] is not None:
        return x
    with tf.control_dependencies([tf.debugging.assert_positive(tf.shape(x)[0], wrong)]):
        return tf.identity(x)


def _without_defaults_of_keras(kwargs: Mapping) -> dict:
    """`kwargs` without arguments of keras.layers.LSTM that say what this layer does anyway; what it does not is an error."""
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(keras.layers.LSTM).parameters.items()
        if parameter.default is not parameter.empty and name != "activity_regularizer"  # of every layer
    }
    defaults["zero_output_for_mask"] = True  # Keras' own default is False
    for name, value in kwargs.items():
        if name in defaults and not _same(name, value, defaults[name]):
            instead = INSTEAD.get(name, f"use keras.layers.LSTM(…, {name}={value!r})")
            raise ValueError(f"{name}: {value!r} given, not supported, expected {defaults[name]!r}; {instead}")
    return {name: value for name, value in kwargs.items() if name not in defaults}


def _same(name: str, value, default) -> bool:
    """Whether an argument is the default; one that is an array or an object is not, but for a function of keras.activations."""
    if name.endswith("activation") and callable(value):
        return value is keras.activations.get(default)
    return value is default or (isinstance(value, str | bool | int | float) and value == default)
