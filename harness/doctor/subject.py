"""A model under the clock: its outputs, its forward pass, its training step in `fit`, and the profile of one.

Times are those of harness/measure/clocks.py. The forward pass is a graph, as `predict` runs it; the training step is one of
`fit`, with all that Keras does around it, so that steps_per_execution and loops show.
"""

import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from harness.doctor import inputs
from harness.measure import clocks

FORWARD = {"warmup_batches": 3, "warmup_limit_s": 0.5, "timed_batches": 10, "blocks": 1, "min_block_s": 0.2}
EPOCH_S = 0.3  # of a timed `fit`
STEPS = (4, 400)  # of a timed `fit`: the least, the most


class Times(NamedTuple):
    """ms of each block, per batch."""

    ms: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.ms)


class Subject:
    """A built model with batches.

    Args:
        model: of the TensorFlow backend.
        batches: of inputs.batches.
        runtime: harness.frameworks.tensorflow.TensorFlowRuntime.
        targets: a list of as many labels; None: made for the model's loss.
    """

    def __init__(self, model: keras.Model, batches: Sequence[Any], runtime: Any, targets: Sequence[Any] | None = None):
        self.model, self.batches, self.runtime = model, batches, runtime
        self.given, self._forward, self._steps = targets, None, 0

    def outputs(self) -> dict[str, np.ndarray]:
        """Of the first batch without dropout: {name: array, float64}, steps that the model masks set to 0.

        A stateful model starts from zeros.
        """
        reset_states(self.model)
        found = self._function()(self._staged()[0])[1]
        reset_states(self.model)
        leaves = keras.tree.flatten(found)
        return {f"output {k}": np.asarray(leaf, "float64") for k, leaf in enumerate(leaves)}

    def mask(self) -> np.ndarray | None:
        """The mask [batch, steps] that the model's only output carries, of the first batch; None: none."""
        reset_states(self.model)
        found = self.model(self._staged()[0], training=False)
        reset_states(self.model)
        leaves = keras.tree.flatten(found)
        mask = getattr(leaves[0], "_keras_mask", None) if len(leaves) == 1 else None
        return None if mask is None else np.asarray(mask)

    def _staged(self) -> list[Any]:
        if not hasattr(self, "_on_device"):
            with tf.device(self.runtime.device_name):
                self._on_device = [keras.tree.map_structure(tf.convert_to_tensor, batch) for batch in self.batches]
        return self._on_device

    def _function(self) -> Callable:
        """batch → (a scalar of its outputs, the outputs), as `predict` runs the model."""
        if self._forward is None:

            def forward(batch):
                outputs = self.model(batch, training=False)
                return tf.reshape(keras.tree.flatten(outputs)[0], [-1])[0], outputs

            eager = bool(getattr(self.model, "run_eagerly", False))
            compiled = bool(self.model.jit_compile)
            self._forward = forward if eager else tf.function(forward, jit_compile=compiled, reduce_retracing=True)
        return self._forward

    def forward(self, rounds: int = 1) -> Times:
        """Time the forward pass: a warm-up and a block, `rounds` times."""
        return Times([self._forward_ms() for _ in range(rounds)])

    def _forward_ms(self) -> float:
        function, staged = self._function(), self._staged()
        blocks = clocks.time_blocks(
            lambda batch: function(batch)[0],
            staged,
            sync=self.runtime.sync,
            restore=lambda: None,
            read=lambda scalar: scalar.numpy(),
            **FORWARD,
        )
        return blocks.ms[0]

    # --- training -----------------------------------------------------------------------------------------------------------

    def prepare(self) -> str:
        """Have labels for the model's loss, or compile it where it has none; a note on what was done, or "".

        Raises whatever the first training step raises.
        """
        note = ""
        if not getattr(self.model, "compiled", False):
            self.model.compile("adam", "mse")
            note = "The model came without a loss: timed with Adam and the mean squared error."
        if self.given is None:
            structure = self._function()(self._staged()[0])[1]
            outputs = keras.tree.map_structure(np.asarray, structure)
            self.given = [inputs.targets(self.model, outputs, seed) for seed in range(len(self.batches))]
        self.fit(self.per_call)
        return note

    @property
    def per_call(self) -> int:
        return max(1, int(self.model.steps_per_execution or 1))

    def fit(self, steps: int) -> clocks.EpochClock:
        """`steps` steps of `fit`, without a pause between them."""
        clock = clocks.EpochClock()
        reset_states(self.model)
        self.model.fit(self._data().take(steps), epochs=1, shuffle=False, verbose=0, callbacks=[clock.callback()])
        return clock

    def _data(self) -> tf.data.Dataset:
        def stacked(parts):
            made = keras.tree.map_structure(lambda *arrays: np.stack(arrays), *parts)
            return tuple(made) if isinstance(made, list) else made  # tf.data takes a list for one array

        data = tf.data.Dataset.from_tensor_slices((stacked(self.batches), stacked(self.given)))
        return data.repeat().prefetch(tf.data.AUTOTUNE)

    def training(self, rounds: int) -> Times:
        """Time the training step: `rounds` times `fit`; the first call and a first `fit` are warm-up."""
        if not self._steps:
            begin = self.fit(2 * self.per_call)
            step_s = begin.train_s[-1] / (2 * self.per_call)
            wanted = min(max(round(EPOCH_S / max(step_s, 1e-6)), STEPS[0]), STEPS[1])
            calls = max(-(-wanted // self.per_call), 2 if self.per_call > 1 else 1)
            self._steps = calls * self.per_call
        return Times([1e3 * self.fit(self._steps).train_s[-1] / self._steps for _ in range(rounds)])

    def profile(self, scopes: str) -> dict[str, Any]:
        """harness.frameworks.tensorflow's of one call of `fit`'s step; of the forward pass, where there is no training."""
        if self.given is None:
            return self.runtime.profile(lambda: self._function()(self._staged()[0]), scopes)
        return self.runtime.profile(lambda: self.fit(self.per_call), scopes)


def reset_states(model: keras.Model) -> None:
    """Set the states of stateful layers to 0."""
    for layer in model._flatten_layers(include_self=False):
        if getattr(layer, "stateful", False) and hasattr(layer, "reset_state"):
            layer.reset_state()


def difference(found: dict[str, np.ndarray], expected: dict[str, np.ndarray], mask: np.ndarray | None) -> float:
    """max|a − b| / max|b|, the largest over the outputs; infinite where a shape differs or a number is not finite."""
    worst = 0.0
    if found.keys() != expected.keys():
        return float("inf")
    for name, b in expected.items():
        a = found[name]
        if a.shape != b.shape:
            return float("inf")
        if mask is not None and a.shape[:2] == mask.shape:
            a, b = a[mask], b[mask]
        if not (np.isfinite(a).all() and np.isfinite(b).all()):
            return float("inf")
        worst = max(worst, float(np.max(np.abs(a - b), initial=0) / max(np.max(np.abs(b), initial=0), 1e-30)))
    return worst
