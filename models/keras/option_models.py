"""The Keras model of an option (options.py), and what it has to show: Keras' own training and prediction functions.

    inputs → layer → layer, its last output → Dense

`train` is one call of the function that `fit` calls for its steps, `forward` one of `predict`'s: what is proven is what both run.
"""

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.framework import config  # Keras asks there too whether op determinism is on

from models.keras.options import Option
from models.reference import recurrent
from models.reference.recurrent import Batch, Layer, Network

PARTS = 2  # that TimeDistributed runs over
VOCABULARY = 1000  # of Embedding
BUCKETS = (1.0, 0.25, 0.75, 0.5)  # of the time steps
HOLES = 0.2
KEPT = 4  # results of the reference, which most options share
PRECISIONS = {"mixed_float16": "fp16", "mixed_bfloat16": "bf16", "float64": "fp64"}


def network_of(option: Option) -> Network:
    layer = {name: value for name, value in option.mathematics.items() if name in Layer._fields}
    rest = {name: value for name, value in option.mathematics.items() if name in Network._fields}
    return Network(Layer(**layer), **rest)


def weights_of(option: Option, features: int, units: int, outputs: int, seed: int) -> list[np.ndarray]:
    """float32, uniform within 1/sqrt(units), biases too."""
    random, bound = np.random.default_rng(seed), 1 / np.sqrt(units)
    vocabulary = VOCABULARY if option.data == "tokens" else 0
    shapes = network_of(option).shapes(features, units, outputs, vocabulary)
    return [random.uniform(-bound, bound, shape).astype(np.float32) * (1 if len(shape) > 1 else 2) for shape in shapes]


def mask_of(kind: str, batch: int, steps: int, random: np.random.Generator) -> np.ndarray | None:
    """Booleans [batch, steps]; None: no mask."""
    if kind in ("plain", "buckets"):
        return None
    if kind == "holes":
        mask = random.random((batch, steps)) >= HOLES
        mask[:, 0] = True
        return mask
    lengths = random.integers(steps // 2, steps, batch)
    lengths[0] = 0 if kind == "all_masked" else steps
    mask = np.arange(steps) < lengths[:, None]
    return mask[:, ::-1] if kind == "left" else mask


def batches_of(option: Option, count: int, batch: int, steps: int, features: int, units: int, outputs: int, seed: int):
    """`count` batches: models.reference.recurrent.Batch, float32."""
    found = []
    for number in range(count):
        random = np.random.default_rng([seed, number])
        time = max(2, round(steps * BUCKETS[number % len(BUCKETS)])) if option.data == "buckets" else steps
        inputs = random.normal(size=(batch, time, features)).astype(np.float32)
        mask = mask_of(option.data, batch, time, random)
        if option.data == "tokens":
            inputs = random.integers(1, VOCABULARY, (batch, time)) * mask
        elif mask is not None:
            inputs *= mask[..., None]
        states = None
        if option.also == "states":
            states = [[random.normal(size=(batch, units)).astype(np.float32) for _ in "hc"] for _ in range(2)]
        targets = random.normal(size=(batch, outputs)).astype(np.float32)
        found.append(Batch(inputs, targets, mask, states))
    return found


def build(option: Option, batch: int, steps: int, features: int, units: int, outputs: int, seed: int) -> keras.Model:
    """The model, not compiled."""
    size = None if option.unknown == "batch" else batch
    time = None if option.unknown == "time" else steps
    if option.kind == "time_distributed":
        inputs = keras.Input((PARTS, time, features), batch_size=size // PARTS)
    elif option.data == "tokens":
        inputs = keras.Input((time,), batch_size=size, dtype="int32")
    else:
        inputs = keras.Input((time, features), batch_size=size)
    x = inputs
    if option.data == "tokens":
        x = keras.layers.Embedding(VOCABULARY, features, mask_zero=True)(x)
    elif option.data not in ("plain", "buckets"):
        x = keras.layers.Masking()(x)
    given = [keras.Input((units,), batch_size=size) for _ in range(4)] if option.also == "states" else []
    own = dict(option.layer)
    if any("dropout" in name for name in own):
        own["seed"] = seed
    if option.kind == "wavefront":
        from models.wavefront.layer import WavefrontLSTM

        x = WavefrontLSTM(units, num_layers=2, **own)(x)
    elif option.kind == "stacked_cells":
        cells = [keras.layers.LSTMCell(units, **own) for _ in range(2)]
        x = keras.layers.RNN(keras.layers.StackedRNNCells(cells))(x)
    else:
        for number in range(2):
            layer = _layer(option.kind, units, {**own, "return_sequences": number == 0})
            x = layer(x, initial_state=given[2 * number : 2 * number + 2]) if given else layer(x)
            if option.also == "cell":
                x = keras.layers.Add()(x[1:]) if number else x[0]
    x = keras.layers.Dense(outputs)(x)
    return keras.Model([inputs, *given] if given else inputs, x)


def _layer(kind: str, units: int, arguments: dict[str, Any]) -> keras.layers.Layer:
    if kind == "rnn_cell":
        sequences = arguments.pop("return_sequences")
        return keras.layers.RNN(keras.layers.LSTMCell(units, **arguments), return_sequences=sequences)
    plain = {"gru": keras.layers.GRU, "simple": keras.layers.SimpleRNN}.get(kind, keras.layers.LSTM)
    layer = plain(units, **arguments)
    wrapper = {"bidirectional": keras.layers.Bidirectional, "time_distributed": keras.layers.TimeDistributed}.get(kind)
    return wrapper(layer) if wrapper else layer


class Known:
    """What an endless iterator yields, each computed once."""

    def __init__(self, iterator: Iterator) -> None:
        self._iterator, self._known = iterator, []

    def first(self, count: int) -> list:
        self._known += itertools.islice(self._iterator, max(0, count - len(self._known)))
        return self._known[:count]


KNOWN: dict[str, Known] = {}  # by what it is computed of


class OptionTrial:
    """An option's model with its batches, from where the proof begins.

    Raises whatever Keras raises when the model is built.

    Attributes:
        model: compiled with SGD and the mean squared error.
        per_call: steps of one call.
        precision: whose limits hold.
    """

    def __init__(self, option: Option, *, batch: int, steps: int, features: int, units: int, outputs: int, rate: float,
                 staged: int, seed: int, precision: str) -> None:  # fmt: skip
        self.option, self.rate, self.seed = option, option.rate_share * rate, seed
        self.precision = PRECISIONS.get(option.policy, precision)
        self.per_call, self.network = option.per_call, network_of(option)
        self.weights = weights_of(option, features, units, outputs, seed)
        self.batches = batches_of(option, staged, batch, steps, features, units, outputs, seed)
        if option.also == "determinism":
            keras.utils.set_random_seed(seed)
            tf.config.experimental.enable_op_determinism()
        before = keras.config.dtype_policy()
        try:
            keras.config.set_dtype_policy(option.policy)
            self.model = build(option, batch, steps, features, units, outputs, seed)
            self.initial = [np.asarray(variable) for variable in self.model.trainable_variables]
            self.model.compile(keras.optimizers.SGD(self.rate), "mse", **option.compiled)
        finally:
            keras.config.set_dtype_policy(before)
        with tf.device("/CPU:0"):
            self._train_data, self._forward_data = self._data(True), self._data(False)
        self._seeds = [(layer.seed_generator.state, np.array(layer.seed_generator.state)) for layer in self._drawing()]

    def _drawing(self) -> list:
        """What draws dropout masks: Keras' cells, and our layer."""
        if self.option.ours:
            return [layer for layer in self.model.layers if hasattr(layer, "recurrent_keep")]
        return [
            layer.cell
            for layer in self.model.layers
            if getattr(layer, "dropout", 0) or getattr(layer, "recurrent_dropout", 0)
        ]

    def _data(self, targets: bool) -> tf.data.Dataset:
        """All batches again and again, the last one first, which `restore` takes."""
        parts = []
        for batch in [self.batches[-1], *self.batches[:-1]]:
            x, y = batch.inputs, batch.targets
            if self.option.kind == "time_distributed":
                x, y = x.reshape(-1, PARTS, *x.shape[1:]), y.reshape(-1, PARTS, y.shape[-1])
            x = x.astype("int32" if x.ndim == 2 else "float32")
            x = (x, *(state for layer in batch.states for state in layer)) if batch.states else x
            parts.append((x, y) if targets else (x,))
        data = tf.data.Dataset.from_tensors(parts[0])
        for part in parts[1:]:
            data = data.concatenate(tf.data.Dataset.from_tensors(part))
        if self.option.unknown:  # that the data's shape does not say it either
            axis = 1 if self.option.unknown == "time" else 0
            other = keras.tree.map_structure(
                lambda array: np.concatenate([array, array], axis) if array.ndim > axis + (axis == 1) else array,
                parts[0],
            )
            data = data.concatenate(tf.data.Dataset.from_tensors(other).take(0))
        return data.cache().repeat().prefetch(2)

    # -- what is timed -----------------------------------------------------------------------------------------------------

    def first(self, mode: str) -> None:
        """The first call, which traces."""
        if mode == "train":
            self.model.fit(self._train_data.take(self.per_call), verbose=0)
        else:
            self.model.make_predict_function()
            self._predict(iter(self._forward_data))

    def train(self) -> Any:
        """One call of `fit`'s function: the mean loss of all steps since `restore`, on the device."""
        return self.model.train_function(self._training)["loss"]

    def forward(self) -> Any:
        """One call of `predict`'s function: predictions [per_call·batch, outputs], on the device."""
        return self._predict(self._predicting)

    def _predict(self, iterator: Any) -> Any:
        return self.model.predict_function([next(iterator) for _ in range(self.per_call)])

    def fit(self, calls: int, callback: Any) -> None:
        """So many calls in Keras' `fit`."""
        self._reset_states()
        self.model.fit(self._train_data.take(calls * self.per_call), verbose=0, callbacks=[callback])

    def restore(self) -> None:
        """Put weights, optimizer, metrics, states, random numbers and data back to where the proof begins."""
        for variable, array in zip(self.model.trainable_variables, self.weights, strict=True):
            variable.assign(array)
        if not hasattr(self, "_optimizer"):
            self._optimizer = [np.asarray(variable) for variable in self._optimizer_variables()]
        for variable, array in zip(self._optimizer_variables(), self._optimizer, strict=True):
            variable.assign(array)
        self.model.reset_metrics()
        self._reset_states()
        self._restore_seeds()
        with tf.device("/CPU:0"):
            self._training, self._predicting = iter(self._train_data), iter(self._forward_data)
        next(self._training), next(self._predicting)  # so that both are at work before the clock starts

    def _optimizer_variables(self) -> list:
        return [] if not self.model.optimizer.built else self.model.optimizer.variables

    def _restore_seeds(self) -> None:
        for variable, array in self._seeds:
            variable.assign(array)

    def _reset_states(self) -> None:
        for layer in self.model.layers:
            if getattr(layer, "stateful", False):
                layer.reset_state()

    # -- what is proven ----------------------------------------------------------------------------------------------------

    def weights_now(self) -> list[np.ndarray]:
        return [np.asarray(variable, "float64") for variable in self.model.trainable_variables]

    def walked(self, calls: int) -> tuple[np.ndarray, list[list[np.ndarray]]]:
        """(the mean loss of all steps up to the end of each call, the weights after it), by the float64 reference."""
        count = calls * self.per_call
        if self._drawing():
            batches = self._masked([self.batches[k % len(self.batches)] for k in range(count)])
            steps = list(recurrent.walk(self.network, self.weights, batches, self.rate))
        else:
            steps = self._shared("walk", self.rate).first(count)
        losses, after = zip(*steps, strict=True)
        means = np.cumsum(losses) / np.arange(1, count + 1)
        return means[self.per_call - 1 :: self.per_call], after[self.per_call - 1 :: self.per_call]

    def rounded(self, steps: int) -> np.ndarray:
        """[2, weights]: how far coarse rounding moves each weight's change by the first step and by so many; 0 without a relu.

        One that is on in one precision and off in another changes gradients by far more than the rounding itself.
        """
        if self.network.layer.activation != "relu":
            return np.zeros((2, len(self.weights)))
        return recurrent.rounded(
            self.network, self.weights, [self.batches[k % len(self.batches)] for k in range(steps)], self.rate
        )

    def predicted(self, calls: int) -> list[np.ndarray]:
        """Predictions of each call by the float64 reference."""
        found = self._shared("predict").first(calls * self.per_call)
        return [np.concatenate(found[k : k + self.per_call]) for k in range(0, len(found), self.per_call)]

    def _shared(self, function: str, *arguments: float) -> "Known":
        """What a function of the reference yields on these batches in turn, which most options have in common."""
        digest = hashlib.sha256(repr((function, self.network, arguments)).encode())
        for leaf in tf.nest.flatten((self.weights, self.batches)):
            digest.update(b"none" if leaf is None else f"{leaf.dtype} {leaf.shape}".encode() + leaf.tobytes())
        key = digest.hexdigest()
        if key not in KNOWN:
            yields = getattr(recurrent, function)
            KNOWN[key] = Known(yields(self.network, self.weights, itertools.cycle(self.batches), *arguments))
        KNOWN[key] = KNOWN.pop(key)  # those that were asked for last stay
        for old in list(KNOWN)[:-KEPT]:
            del KNOWN[old]
        return KNOWN[key]

    def targets(self, call: int) -> np.ndarray:
        """[per_call·batch, outputs] of a call of `forward`."""
        numbers = range(call * self.per_call, (call + 1) * self.per_call)
        return np.concatenate([self.batches[k % len(self.batches)].targets for k in numbers])

    def _masked(self, batches: Sequence[Batch]) -> list[Batch]:
        """The batches with the dropout masks that the steps after `restore` draw: of the same generators in the same states."""
        drawing = self._drawing()
        if not drawing:
            return list(batches)
        self._restore_seeds()
        rate = next(value for name, value in self.option.layer.items() if "dropout" in name)
        size, units = len(batches[0].inputs), self.weights[1].shape[0]
        widths = [batches[0].inputs.shape[-1], units]

        @tf.function(jit_compile=bool(self.model.jit_compile))
        def draw():
            if self.option.ours:
                kept = tf.cast(drawing[0].recurrent_keep(size), tf.float32) / (1 - rate)
                return [kept[0], kept[1]]
            if "dropout" in self.option.layer:
                return [
                    cell._create_dropout_mask(tf.ones([size, width]), rate)
                    for cell, width in zip(drawing, widths, strict=True)
                ]
            return [tf.stack(cell._create_dropout_mask(tf.ones([size, units]), rate)) for cell in drawing]

        which = "drop" if "dropout" in self.option.layer else "keep"
        found = [batch._replace(**{which: [np.asarray(m, "float64") for m in draw()]}) for batch in batches]
        self._restore_seeds()
        return found

    def not_applied(self, mode: str, kind: str, words: str, ops: dict[str, int]) -> str:
        """Why the option cannot have been applied, where the figures do not tell; "" where it was."""
        option, model = self.option, self.model
        if (option.layer.get("dropout") or option.layer.get("recurrent_dropout")) and not self._drawing():
            return "no layer draws dropout masks"
        if option.layer.get("unroll") and (kind == "while loop" or "loop over" in words):
            return f"unroll=True ran {words}"
        if "jit_compile" in option.compiled and bool(model.jit_compile) != any(op.startswith("xla") for op in ops):
            return f"jit_compile is {model.jit_compile}, and the profile shows the contrary"
        if option.compiled.get("run_eagerly") and kind != "eager":
            return f"run_eagerly=True ran {words}"
        if option.layer.get("use_cudnn") is False and kind.startswith("cuDNN"):
            return f"use_cudnn=False ran {words}"
        if option.unknown and not any(None in tensor.shape for tensor in model.inputs):
            return f"the model knows its {option.unknown}"
        if option.layer.get("unit_forget_bias") is False and any((a != 0).any() for a in self.initial if a.ndim == 1):
            return "the initial bias is not 0"
        if option.also == "determinism" and not config.is_op_determinism_enabled():
            return "op determinism is off"
        return ""
