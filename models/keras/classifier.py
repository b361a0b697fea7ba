"""The classifier of MNIST and of the synthetic task: a Keras model, trained by `model.fit`, on any of Keras' backends.

sequences [batch, time, features] → LSTM stack → last output → Dense(relu) … → Dense → softmax over the classes
"""

import functools
from collections.abc import Callable, Mapping, Sequence

import keras
import numpy as np

from models import trial
from models.cudnn.graph_difference import graph_difference
from models.weights import layouts

POLICIES = {p: "float32" for p in ("fp32", "tf32")} | {
    "fp16": "mixed_float16",
    "bf16": "mixed_bfloat16",
    "fp64": "float64",
}


@keras.saving.register_keras_serializable("lstm_benchmarks")
class Dropout(keras.layers.Layer):
    """Dropout whose rate is a variable: it can be switched off for a proof and on again without a new graph.

    keras.layers.Dropout bakes the rate into the compiled step, so that what is proven with dropout 0 would be another
    callable than the one that is timed.
    """

    def __init__(self, rate: float, seed: int | None = None, **kwargs) -> None:
        super().__init__(**kwargs)
        self.initial_rate, self.seed = rate, seed
        self.seed_generator = keras.random.SeedGenerator(seed)
        self.rate = self.add_weight(shape=(), initializer=keras.initializers.Constant(rate), trainable=False, name="rate",
                                    autocast=False)  # fmt: skip
        self.supports_masking = True
        self.built = True

    def call(self, inputs, training=False):
        if not training:
            return inputs
        drawn = keras.random.uniform(
            keras.ops.shape(inputs), dtype="float32", seed=self.seed_generator
        )  # [0, 1): rate 0 keeps all
        rate = keras.ops.cast(self.rate, "float32")
        scale = keras.ops.where(drawn >= rate, 1.0 / (1.0 - rate), 0.0)
        return inputs * keras.ops.cast(scale, inputs.dtype)

    def get_config(self):
        return {**super().get_config(), "rate": self.initial_rate, "seed": self.seed}


def build_classifier(
    input_shape: tuple[int, int],
    units: int,
    num_layers: int,
    num_classes: int,
    *,
    dense_units: Sequence[int] = (),
    lstm_dropout: Sequence[float] = (),
    dense_dropout: float = 0.0,
    use_cudnn: bool | str = "auto",
    jit_compile: bool | str = "auto",
    steps_per_execution: int = 1,
    compiled_loop: bool = False,
    bidirectional: bool = False,
    precision: str = "fp32",
    loss_scale: float = 1.0,
    optimizer: keras.optimizers.Optimizer,
    seed: int = 0,
) -> keras.Model:
    """A compiled keras.Sequential with logits as its output.

    Args:
        input_shape: (time, features).
        lstm_dropout: rate after each LSTM layer, in order; layers beyond have none.
        use_cudnn: of every keras.layers.LSTM: True (cuDNN or an error), False (Keras' while loop), "auto". "stack": no
            keras.layers.LSTM but one CudnnLSTMLayer, the whole stack in one call, with cuDNN where there is a GPU; "wavefront"
            and "persistent": one WavefrontLSTM of that implementation. These three have one dropout rate for all places between
            their layers, and are on TensorFlow alone.
        jit_compile: of the model: True (XLA), False, or "auto" (what a user gets who sets nothing).
        steps_per_execution: of the model: training steps of one call of TensorFlow; on JAX ScannedTrial sets it.
        compiled_loop: whether those are one XLA program: models.wavefront.compiled_loop.CompiledLoop, a keras.Sequential.
        precision: "fp32", "tf32" (set in the framework, the same model), "fp16" or "bf16" (mixed) or "fp64".
        loss_scale: static, of fp16; see models/tf/language_model.py.
    """
    policy = POLICIES[precision]
    model = (_compiled_loop() if compiled_loop else keras.Sequential)([keras.Input(input_shape)])
    whole_stack = use_cudnn in ("stack", "wavefront", "persistent")
    if whole_stack:
        between, after = trial.rates_of_stack(lstm_dropout, num_layers)
        direction = "bidirectional" if bidirectional else "unidirectional"
        kind = _stack_makers()[use_cudnn]
        model.add(kind(units, num_layers, direction=direction, dropout=between, seed=seed, dtype=policy))
        if after:
            model.add(Dropout(after, seed=seed + num_layers - 1, dtype=policy))
    for layer in range(0 if whole_stack else num_layers):
        lstm = keras.layers.LSTM(units, return_sequences=layer < num_layers - 1, use_cudnn=use_cudnn, dtype=policy)
        model.add(keras.layers.Bidirectional(lstm, dtype=policy) if bidirectional else lstm)
        if layer < len(lstm_dropout) and lstm_dropout[layer]:
            model.add(Dropout(lstm_dropout[layer], seed=seed + layer, dtype=policy))
    for width in dense_units:
        model.add(keras.layers.Dense(width, activation="relu", dtype=policy))
        if dense_dropout:
            model.add(Dropout(dense_dropout, seed=seed + num_layers, dtype=policy))
    model.add(keras.layers.Dense(num_classes, dtype=policy))
    if precision == "fp16":
        model.add(keras.layers.Activation("linear", dtype="float32"))  # the softmax is computed in float32
        never = 2**31 - 1  # steps until Keras would raise the scale: it stays static
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=loss_scale, dynamic_growth_steps=never)
    model.compile(
        optimizer=optimizer,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        jit_compile=jit_compile,
        steps_per_execution=steps_per_execution,
        auto_scale_loss=False,
    )
    return model


def _compiled_loop() -> type:
    """The class; imports TensorFlow."""
    from models.wavefront.compiled_loop import CompiledLoop

    return CompiledLoop


@functools.cache
def _stack_makers() -> dict[str, Callable]:
    """What makes a layer that is a whole stack, by `use_cudnn`; imports TensorFlow."""
    from models.cudnn.layers import CudnnLSTMLayer
    from models.wavefront import nvrtc, tiling
    from models.wavefront.layer import WavefrontLSTM

    class ProvenWavefrontLSTM(WavefrontLSTM):
        """WavefrontLSTM whose rate of dropout is a variable, that of `between`, for the reason of the Dropout above."""

        def __init__(self, *arguments, **keywords) -> None:
            super().__init__(*arguments, **keywords)
            self.between = Dropout(self.dropout, seed=self.seed, dtype=self.dtype_policy)

        def drop(self, x):
            return self._dropped(x, keras.ops.cast(self.between.rate, x.dtype))

        def notes(self) -> list[str]:
            return tiling.notes(nvrtc.chip()) if self.implementation == "persistent" else []

    xla, persistent = (functools.partial(ProvenWavefrontLSTM, implementation=kind) for kind in ("xla", "persistent"))
    return {"stack": CudnnLSTMLayer, "wavefront": xla, "persistent": persistent}


def stack_layer(model: keras.Model) -> keras.layers.Layer | None:
    """The layer that is the whole LSTM stack of a model, CudnnLSTMLayer or WavefrontLSTM, if it has one."""
    if keras.backend.backend() != "tensorflow":
        return None
    from models.wavefront.stack_layer import StackLayer

    return next((layer for layer in model.layers if isinstance(layer, StackLayer)), None)


def lstm_layers(model: keras.Model) -> list[keras.layers.Layer]:
    """The LSTM (or Bidirectional) layers of a model, in order."""
    return [layer for layer in model.layers if isinstance(layer, keras.layers.LSTM | keras.layers.Bidirectional)]


def dense_layers(model: keras.Model) -> list[keras.layers.Dense]:
    return [layer for layer in model.layers if isinstance(layer, keras.layers.Dense)]


def set_weights(model: keras.Model, weights: Mapping[str, np.ndarray]) -> None:
    """Load canonical weights into the model's layers."""
    if stack := stack_layer(model):
        stack.set_canonical({name: array for name, array in weights.items() if name.startswith("lstm_")})
    for index, layer in enumerate(lstm_layers(model)):
        layer.set_weights(layouts.to_keras(weights, index, isinstance(layer, keras.layers.Bidirectional)))
    for index, layer in enumerate(dense_layers(model)):
        layer.set_weights([weights[f"dense_{index}/kernel"], weights[f"dense_{index}/bias"]])


def to_canonical(model: keras.Model, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Arrays by variable path (weights, gradients, moments of the trainable variables) under canonical names."""
    canonical = {}
    if stack := stack_layer(model):
        if hasattr(stack, "params"):  # cuDNN's one flat buffer
            canonical |= layouts.from_cudnn_flat(arrays[stack.params.path], stack.spec)
        else:
            canonical |= {name: arrays[variable.path] for name, variable in stack.parameters.items()}
    for index, layer in enumerate(lstm_layers(model)):
        own = [arrays[v.path] for v in layer.trainable_variables]
        canonical |= layouts.from_keras(own, index, isinstance(layer, keras.layers.Bidirectional))
    for index, layer in enumerate(dense_layers(model)):
        canonical |= {
            f"dense_{index}/kernel": arrays[layer.kernel.path],
            f"dense_{index}/bias": arrays[layer.bias.path],
        }
    return canonical


class ClassifierTrial:
    """A compiled model as the proof needs it: the same `predict` and `fit` functions that are timed, on batches of proof.

    The one exception is a CudnnLSTMLayer with dropout, whose rate is baked into the graph: the proof's steps are traced from the
    same code with the rate 0, and `graph_mismatch` compares them node by node with those that are timed.

    A CompiledLoop runs any number of steps, up to steps_per_execution, in one call of one program; how many is an argument.
    So the proof's `fit` over one or three batches runs the very program that the timed `fit` runs, neither traced nor
    compiled anew, and over three its loop goes round three times; that it was one call is part of the row's expected ops
    (models.rows).

    Args:
        model: from `build_classifier`; its optimizer is a keras Adam (possibly under a LossScaleOptimizer).
        weights: canonical weights that `restore` loads.
        inputs, labels: [batches · batch_size, time, features] and [batches · batch_size]; fit walks them in order.
    """

    def __init__(self, model, weights, inputs: np.ndarray, labels: np.ndarray, batch_size: int) -> None:
        self.model, self.batch_size = model, batch_size
        self._weights, self.inputs, self.labels = weights, inputs, labels
        # Of the training step: Keras calls `train_step` only to trace it, but on PyTorch, which traces nothing.
        self.traces = 0
        train_step, traced = model.train_step, keras.backend.backend() != "torch"

        def counted(*arguments, **keywords):
            self.traces += traced
            result = train_step(*arguments, **keywords)
            if self._stack_rate:
                self._keep_graph()
            return result

        model.train_step = counted
        self.optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
        model.optimizer.build(model.trainable_variables)
        self._optimizer_start = [v.numpy() for v in model.optimizer.variables]
        self.dropouts = [layer for layer in model._flatten_layers() if isinstance(layer, Dropout)]
        stack = stack_layer(model)
        self._stack = stack if hasattr(stack, "uses_cudnn") else None  # one that draws its masks itself
        self._stack_rate = self._stack.dropout if self._stack else 0.0
        self._graphs: dict[float, object] = {}  # the last traced step by the stack's rate

    def fit(
        self, x: np.ndarray, y: np.ndarray, epochs: int, validation: tuple[np.ndarray, np.ndarray] | None, clock
    ) -> dict[str, object]:
        """`model.fit`, from the weights as they are, in an order of its own every epoch.

        Args:
            validation: (x, y) of the validation after every epoch, or None.
            clock: harness.measure.clocks.EpochClock.

        Returns:
            {"losses": of each epoch, "accuracy": {"acc", "val_acc"} of the last one, "epoch_accuracy": the same of each}.
        """
        history = self.model.fit(
            x, y, batch_size=self.batch_size, epochs=epochs, validation_data=validation, callbacks=[clock.callback()],
            verbose=2,
        ).history  # fmt: skip
        clock.returned()
        names = {"acc": "accuracy", "val_acc": "val_accuracy"}
        by_epoch = {short: history[name] for short, name in names.items() if name in history}
        accuracy = {name: values[-1] for name, values in by_epoch.items()}
        return {"losses": history["loss"], "accuracy": accuracy, "epoch_accuracy": by_epoch}

    def notes(self, mode: str) -> list[str]:
        """Of a WavefrontLSTM: sentences for the tables on how it ran."""
        layer = stack_layer(self.model)
        return layer.notes() if hasattr(layer, "notes") else []

    def warm_up(self, validation: tuple[np.ndarray, np.ndarray]) -> None:
        """Trace before the clock starts what a validation runs: a whole batch and the last one are two shapes."""
        rest = self.batch_size + len(validation[0]) % self.batch_size
        self.model.evaluate(*(array[-rest:] for array in validation), batch_size=self.batch_size, verbose=0)

    def restore(self) -> None:
        """Weights and optimizer as they were at the start."""
        set_weights(self.model, self._weights)
        for variable, start in zip(self.model.optimizer.variables, self._optimizer_start, strict=True):
            variable.assign(start)

    def load(self, weights: Mapping[str, np.ndarray]) -> None:
        """From now on `restore` loads these weights: the ones that a training starts from."""
        self._weights = weights
        self.restore()

    def outputs(self) -> dict[str, np.ndarray]:
        """Logits of the first batch through the model's own predict function, and the loss through its test function."""
        first = self.inputs[: self.batch_size], self.labels[: self.batch_size]
        tested = self.model.evaluate(*first, batch_size=self.batch_size, verbose=0, return_dict=True)
        return {"logits": self.model.predict_on_batch(first[0]), "loss": np.asarray(tested["loss"])}

    def train_steps(self, count: int, clock=None) -> np.ndarray:
        """Mean loss [1] of a `fit` over the first `count` batches, in order, with dropout off; `clock` as of `fit`, or None."""
        for layer in self.dropouts:
            layer.rate.assign(0.0)
        losses = self._fit(count, 0.0, clock)
        for layer in self.dropouts:
            layer.rate.assign(layer.initial_rate)
        return losses

    dropout_losses = trial.dropout_losses_of_fit

    def timed_steps(self, count: int) -> np.ndarray:
        """The same by the very function that is timed afterwards, with dropout."""
        return self._fit(count, self._stack_rate)

    def graph_mismatch(self) -> str:
        """How the timed step differs from the one that the proof ran, but for cuDNN's dropout rate; "" where it does not.

        Both have to have run. Without cuDNN the masks of a stack are ops of its graph; no row is such a model.
        """
        if not self._stack_rate or not self._stack.uses_cudnn:
            return ""
        return graph_difference(self._graphs[self._stack_rate], self._graphs[0.0])

    def _keep_graph(self) -> None:
        import tensorflow as tf

        if not tf.executing_eagerly():
            self._graphs[self._stack.dropout] = tf.compat.v1.get_default_graph().as_graph_def()

    def _fit(self, count: int, stack_rate: float, clock=None) -> np.ndarray:
        if self._stack and self._stack.dropout != stack_rate:
            self._stack.dropout = stack_rate
            self.model.make_train_function(force=True)
        size = count * self.batch_size
        history = self.model.fit(
            self.inputs[:size], self.labels[:size], batch_size=self.batch_size, epochs=1, shuffle=False, verbose=0,
            callbacks=[clock.callback()] if clock else None,
        )  # fmt: skip
        return np.array(history.history["loss"])

    def first_gradients(self) -> dict[str, np.ndarray]:
        """After exactly one step since `restore`: Adam's first moments / (1 − β₁), the gradients that it received."""
        scale = 1.0 / (1.0 - self.optimizer.beta_1)
        moments = zip(self.model.trainable_variables, self.optimizer._momentums, strict=True)
        return to_canonical(self.model, {v.path: m.numpy() * scale for v, m in moments})

    def moments(self) -> tuple[int, dict[str, np.ndarray], dict[str, np.ndarray]]:
        """The optimizer now: steps that it has taken since `restore`, Adam's first and second moments."""
        variables, own = self.model.trainable_variables, (self.optimizer._momentums, self.optimizer._velocities)
        found = ({v.path: m.numpy() for v, m in zip(variables, moments, strict=True)} for moments in own)
        return int(self.optimizer.iterations.numpy()), *(to_canonical(self.model, arrays) for arrays in found)

    def logits(self, x: np.ndarray) -> np.ndarray:
        """[n, classes] of x [n, time, features] by the model's own predict function, on whole batches."""
        rest = -len(x) % self.batch_size
        filled = np.concatenate([x, np.zeros((rest, *x.shape[1:]), x.dtype)])
        parts = np.split(filled, len(filled) // self.batch_size)
        return np.concatenate([self.model.predict_on_batch(part) for part in parts])[: len(x)]

    def weights(self) -> dict[str, np.ndarray]:
        """All weights now, in the canonical form."""
        return to_canonical(self.model, {v.path: v.numpy() for v in self.model.trainable_variables})


class ScannedTrial(ClassifierTrial):
    """The same on JAX by a Keras whose steps_per_execution is the length of one jitted lax.scan over the training step.

    A scan of another length is another program, around the same traced step: jax.jit keeps what it has traced, and that it did so
    is what `graph_mismatch` asks. So what is proven in scans of one and three steps is the step of the timed scans. A `fit` of
    fewer batches than those have takes all of them in one scan.

    Args:
        batches: of an epoch of the training to be timed. Its scans take as many steps as divide them, since Keras takes the rest
            step by step.
        most: steps of a scan.
    """

    def __init__(self, model, weights, inputs, labels, batch_size: int, batches: int, most: int) -> None:
        super().__init__(model, weights, inputs, labels, batch_size)
        self._scan = max(steps for steps in range(1, min(batches, most) + 1) if batches % steps == 0)
        self._functions: dict[int, tuple] = {}  # Keras' jitted functions by the length of their scans

    def _takes(self, steps: int) -> None:
        """From now on a call of Keras' functions takes so many steps."""
        model = self.model
        if steps != model.steps_per_execution:
            self._functions[model.steps_per_execution] = model.train_function, model.test_function
            model.steps_per_execution = steps
            model.train_function, model.test_function = self._functions.get(steps, (None, None))

    def fit(self, x, y, epochs, validation, clock):
        self._takes(min(len(x) // self.batch_size, self._scan))
        return super().fit(x, y, epochs, validation, clock)

    def _fit(self, count, stack_rate, clock=None):
        self._takes(min(count, self._scan))
        return super()._fit(count, stack_rate, clock)

    def train_steps(self, count, clock=None):
        """As of ClassifierTrial; with a clock, which the first call alone has, over as many batches as a timed scan takes."""
        if clock is None:
            return super().train_steps(count)
        shape = (self._scan * self.batch_size, *self.inputs.shape[1:])
        own = self.inputs, self.labels
        self.inputs, self.labels = np.resize(self.inputs, shape), np.resize(self.labels, shape[:1])
        losses = super().train_steps(self._scan, clock)
        self.inputs, self.labels = own
        return losses

    def warm_up(self, validation):
        """All of the validation: its scans, and what is left of it step by step."""
        self._takes(self._scan)
        self.model.evaluate(*validation, batch_size=self.batch_size, verbose=0)

    def outputs(self):
        self._takes(1)  # predict_on_batch would take a batch of as many sequences for a scan's batches
        return super().outputs()

    def logits(self, x):
        self._takes(1)
        return super().logits(x)

    def graph_mismatch(self):
        """Why the timed scans may be of another step than the proven one: it was traced more than once; "" where it was not."""
        return (
            "" if self.traces == 1 else f"the training step was traced {self.traces} times, expected once for all scans"
        )
