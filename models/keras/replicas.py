"""The language model on several devices of one process, as Keras on JAX has it: keras.distribution.DataParallel.

Weights lie on every device as a whole, a batch in equal parts; the step is the single device's, of the whole batch, and XLA's
partitioner finds out where to add up. As in Keras' own `fit`, what a step leaves is laid out as what it was given. To be imported
after Keras' backend has been chosen (models/keras/build.py).
"""

from collections.abc import Mapping, Sequence

import keras
import numpy as np

from models.keras.language_model import JaxKerasLanguageModel
from models.replicas import Group, ShardedReplica


class DataParallelModel(ShardedReplica, JaxKerasLanguageModel):
    """A JaxKerasLanguageModel under keras.distribution.DataParallel over all devices of this process.

    Args:
        replicas: how many devices these are; ValueError for another number.
        group: of this process alone.
        others: as of KerasLanguageModel, of the whole batch.
    """

    def __init__(
        self,
        weights: Mapping[str, np.ndarray],
        states: Sequence,
        batches: Sequence,
        optimizer: tuple[str, float],
        *,
        group: Group,
        replicas: int,
        **options,
    ) -> None:
        self.group, self.replicas = group, replicas
        self._distribution = keras.distribution.DataParallel()
        if (found := self._distribution.num_model_replicas) != replicas:
            raise ValueError(f"Keras has {found} devices in this process, expected one for each of {replicas} replicas")
        keras.distribution.set_distribution(self._distribution)
        mesh = self._distribution.device_mesh
        self._part = keras.distribution.TensorLayout([self._distribution.batch_dim_name], mesh).backend_layout
        self._whole = keras.distribution.TensorLayout([], mesh).backend_layout
        super().__init__(weights, states, batches, optimizer, **options)
        part, whole = self._part, self._whole
        self._jitted_forward = self._jax.jit(self._forward_step, out_shardings=(whole, part, part, part))
        self._jitted_train = self._jax.jit(self._train_step, donate_argnums=0, out_shardings=(whole, part, whole))

    def restore(self):
        super().restore()
        self._values = self._jax.device_put(self._values, self._whole)

    def stage(self, tokens, targets):
        return self._in_parts(super().stage(tokens, targets))

    def _in_parts(self, tensors):
        """Tensors [batch, …], a part of each on each device."""
        return self._jax.device_put(tensors, self._part)

    def _set_start(self, arrays, states):
        super()._set_start(arrays, states)
        if states is not None:
            self.initial_states = self._in_parts(self.initial_states)

    def _set(self, variable, value):
        super()._set(variable, value)
        self._values = self._jax.device_put(self._values, self._whole)

    def _tensors(self):
        return self._values[0]
