"""The language model on several devices of one process, in JAX: the step of each device in jax.shard_map, with psum.

Each device computes the gradients of its part of the batch, as a single one does. One lax.pmean (a psum, divided) takes the mean
of these and of the losses, before gradients are clipped; then every device makes the same update, of weights of its own.
"""

from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from models.jax.language_model import COMPUTE_DTYPE, JaxLanguageModel
from models.jax.stacks import JaxStack
from models.replicas import Group, ShardedReplica, part_of, states_of
from models.weights.canonical import stack_size

Array = jax.Array
AXIS = "replicas"  # of the mesh


def mesh_of(replicas: int) -> Mesh:
    """That many devices of this process in a row; ValueError where it has another number."""
    devices = jax.local_devices()
    if len(devices) != replicas:
        raise ValueError(
            f"this process has {len(devices)} devices of JAX, expected one for each of {replicas} replicas"
        )
    return Mesh(np.array(devices), (AXIS,))


def _part_along(axis: int) -> PartitionSpec:
    """Of tensors whose `axis` is the batch."""
    return PartitionSpec(*[None] * axis, AXIS)


class ShardedModel(ShardedReplica, JaxLanguageModel):
    """A JaxLanguageModel whose steps run in shard_map over a mesh.

    Args:
        stack: of JaxLanguageModel, as the others, which are of the whole batch.
        mesh: of the replicas.
        group: of this process alone.
    """

    def __init__(
        self,
        stack: JaxStack,
        weights: Mapping[str, np.ndarray],
        states: Sequence,
        batches: Sequence,
        optimizer: tuple[str, float],
        *,
        mesh: Mesh,
        group: Group,
        **options,
    ) -> None:
        self.mesh, self.group = mesh, group
        self.replicas = mesh.size
        super().__init__(stack, weights, states, batches, optimizer, **options)
        self._key = self._everywhere(self._key)
        whole, words, of_states = PartitionSpec(), _part_along(1 - self._time_axis), _part_along(1)
        batch = words, words, of_states
        forward = self._mapped(self._forward_step, (whole, *batch), (whole, *batch))
        train = self._mapped(self._train_step, (*[whole] * 4, *batch), (whole, of_states, *[whole] * 3))
        self._forward, self._train = jax.jit(forward), jax.jit(train, donate_argnums=(0, 1))

    # -- where tensors lie ---------------------------------------------------------------------------------------------

    def _mapped(self, step: Callable, inputs: tuple, outputs: tuple) -> Callable:
        # With JAX's own check of what is the same on every device, jax.grad would add up gradients by itself, one by one.
        return jax.shard_map(step, mesh=self.mesh, in_specs=inputs, out_specs=outputs, check_vma=False)

    def _everywhere(self, tensors):
        """The same on every device."""
        return jax.device_put(tensors, NamedSharding(self.mesh, PartitionSpec()))

    def _in_parts(self, make: Callable[[int], Sequence], axis: int) -> tuple[Array, ...]:
        """Arrays of all replicas' parts along an axis, each on its replica's device.

        make: number of a replica → its part of each array.
        """
        parts = [jax.device_put(tuple(make(number)), device) for number, device in enumerate(self.mesh.devices)]
        sharding, found = NamedSharding(self.mesh, _part_along(axis)), []
        for of_array in zip(*parts, strict=True):
            shape = list(of_array[0].shape)
            shape[axis] *= self.replicas
            found.append(jax.make_array_from_single_device_arrays(tuple(shape), sharding, list(of_array)))
        return tuple(found)

    def stage(self, tokens, targets):
        def part(number):
            own = (part_of(ids, number, self.replicas) for ids in (tokens, targets))
            return [self._batch_major(ids).astype(np.int32) for ids in own]

        return self._in_parts(part, 1 - self._time_axis)

    def _set_start(self, arrays, states):
        super()._set_start(arrays, states)
        self._start = self._everywhere(self._start)
        if states is not None:
            make = self.stack.stage_states
            self.initial_states = self._in_parts(lambda number: make(states_of(states, number, self.replicas)), 1)

    def set_rates(self, learning_rate, dropout_rate):
        super().set_rates(learning_rate, dropout_rate)
        self._rates = self._everywhere(self._rates)

    def restore(self):
        super().restore()
        self.slots = self._everywhere(self.slots)

    # -- on each device ------------------------------------------------------------------------------------------------

    def _forward_step(self, parameters, tokens, targets, states):
        loss, *others = super()._forward_step(parameters, tokens, targets, states)
        return lax.pmean(loss, AXIS), *others

    def _dropout(self, key, rate):
        return super()._dropout(jax.random.fold_in(key, lax.axis_index(AXIS)), rate)

    def _gradients(self, *arguments):
        gradients, loss, final_states = super()._gradients(*arguments)
        *gradients, loss = self._added_up([*gradients, loss])
        return gradients, loss, final_states

    def _added_up(self, own: list[Array]) -> list[Array]:
        """The mean of what the replicas have."""
        return lax.pmean(own, AXIS)


def build(
    weights: Mapping[str, np.ndarray],
    states: Sequence,
    batches: Sequence,
    optimizer: tuple[str, float],
    *,
    stack: Callable[..., JaxStack],
    precision: str,
    group: Group,
    replicas: int,
    device: str = "",
    **options,
) -> ShardedModel:
    """The language model of a row; arguments as of models.jax.language_model.build, of the whole batch.

    Args:
        group: this process alone.
        replicas: all its devices.
    """
    has_dropout = options.get("keep_prob", 1.0) < 1
    made = stack(weights, stack_size(weights)[0], COMPUTE_DTYPE[precision], has_dropout)
    return ShardedModel(made, weights, states, batches, optimizer, mesh=mesh_of(replicas), group=group, **options)
