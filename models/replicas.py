"""A language model that is one of several replicas, as the proof needs it: together they train one batch.

Each replica has an equal part of every batch's sequences, and of the states. The mean of the replicas' gradients is that of the
whole batch, since every sequence has as many steps. What is held to the reference of the whole batch is joined here from all
replicas; weights and gradients are each replica's own. NumPy only; a framework's class comes after `Replica` in the order of
methods.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from models import trial
from models.reference.expected import SHOWN


class Group(Protocol):
    """The processes that hold the replicas: harness/measure/group.py."""

    rank: int
    size: int

    def beat(self) -> None:
        """This process has come to its next step."""

    def gather(self, array: Any) -> list[np.ndarray]:
        """What every process has given."""

    def mean(self, array: Any) -> np.ndarray:
        """The mean of what every process has given."""

    def barrier(self) -> None:
        """Return once every process has come here."""


def part_of(array: np.ndarray, rank: int, size: int) -> np.ndarray:
    """The sequences [batch / size, …] of a replica among those of a batch [batch, …]; ValueError where they are not even."""
    if len(array) % size:
        raise ValueError(f"a batch of {len(array)} sequences given, expected a multiple of {size} replicas")
    own = len(array) // size
    return array[rank * own : (rank + 1) * own]


def parts_of(batches: Sequence, rank: int, size: int) -> list[tuple]:
    """Of (tokens, targets) pairs [batch, time], those of a replica."""
    return [tuple(part_of(array, rank, size) for array in batch) for batch in batches]


def states_of(states: Sequence, rank: int, size: int) -> list:
    """Of canonical states (layers × directions × (h, c)), those of a replica."""
    return [[tuple(part_of(state, rank, size) for state in pair) for pair in layer] for layer in states]


class Replica(trial.LanguageModelTrial):
    """What of a trial is of all replicas. A process holds one, or several on devices of its own.

    Attributes of a subclass:
        group: the processes.
    """

    group: Group
    replicas = 1  # of this process

    def own_parts(self, tensor: Any) -> list[np.ndarray]:
        """A tensor of each replica of this process, on the host."""
        return [self.numpy(tensor)]

    def own_weights(self) -> list[list[np.ndarray]]:
        """All weights of each replica of this process, on the host."""
        return [[self.numpy(tensor) for tensor in self._weights()]]

    def joined(self, tensor: Any, shown: int | None = None) -> np.ndarray:
        """A tensor of the whole batch [batch, time, …], of every replica's at most the first `shown` sequences."""
        return self._joined([self._batch_major(part)[:shown] for part in self.own_parts(tensor)], 0)

    def _joined(self, own: Sequence[np.ndarray], axis: int) -> np.ndarray:
        """The parts of all replicas, joined along an axis; own: those of this process."""
        stacked = np.stack(own)
        if stacked.dtype.kind == "V":  # bfloat16, which NumPy's format of files does not know
            stacked = stacked.astype(np.float32)
        return np.concatenate([part for parts in self.group.gather(stacked) for part in parts], axis)

    def train(self, batch: Any) -> Any:
        self.group.beat()
        return super().train(batch)

    def restore(self) -> None:
        """As of Trial, in all processes: they go on together."""
        super().restore()
        self.group.barrier()

    def outputs(self) -> dict[str, np.ndarray]:
        loss, hidden, logits = self._run_forward(self.batches[0])
        losses = self.group.mean(np.mean(self.own_parts(loss)))
        words = len(self.numpy(self._start[0]))
        logits = self.joined(logits, SHOWN)[:SHOWN, ..., :words]
        return {"loss": losses, "hidden": self.joined(hidden), "logits": logits}

    def train_steps(self, count: int, first: int = 0) -> np.ndarray:
        return self.group.mean(super().train_steps(count, first))

    def stacked(self, losses: Sequence) -> np.ndarray:
        return self.group.mean(super().stacked(losses))

    def reference_step(self, setup, number, update):
        """As of LanguageModelTrial; the first process computes it for all, whose weights are the same."""
        if self.group.rank:
            self._states_now(), self._words(number)  # of all replicas: everybody has a part of them
            loss, updates = 0.0, {}
        else:
            loss, updates = super().reference_step(setup, number, update)
        if self.group.size == 1:
            return loss, updates
        [loss, *_] = self.group.gather(loss)
        names = self.weights() if update else ()
        return float(loss), {name: self.group.gather(updates.get(name, 0.0))[0] for name in names}

    def _words(self, number: int) -> list[np.ndarray]:
        return [self.joined(ids) for ids in self.batches[number % len(self.batches)]]

    def _states_now(self) -> list:
        leaves = [self.own_parts(state) for state in trial.flat(self.states)]
        return trial.layers_of([self._joined(parts, parts[0].ndim - 2) for parts in leaves])

    def _staged_targets(self, targets: np.ndarray) -> Any:
        return super()._staged_targets(part_of(targets, self.group.rank, self.group.size))


class ShardedReplica(Replica):
    """The same where this process has all replicas, each on a device, and a tensor is one jax.Array over all of these devices.

    A tensor of the batch has an equal part of it on each device, in the order of the replicas; a weight lies on each as a whole.
    """

    def own_parts(self, tensor):
        return [np.array(shard.data) for shard in tensor.addressable_shards]

    def own_weights(self):
        return [list(own) for own in zip(*map(self.own_parts, self._tensors()), strict=True)]

    def _tensors(self) -> Sequence:
        """All weights now, on the devices."""
        return self._weights()
