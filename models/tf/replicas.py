"""The language model on several devices, in TensorFlow: as a user of tf.distribute has it, and one compiled step per device.

    StrategyModel   variables and optimizer of a tf.distribute.Strategy, the step in its `run`; what is compiled, on each device
    BucketModel     the model of a single device on this process' only one; collectives inside the step add up its gradients, the
                    small ones in one flat tensor: on a GPU the whole step, NCCL included, is one XLA program

Both give the optimizer the mean of all replicas' gradients, before they are clipped. (Keras' own `clipnorm` and `global_clipnorm`
clip each replica's before they are added up.)
"""

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.compiler.tf2xla.ops import gen_xla_ops

from models.replicas import Group, Replica, part_of, states_of
from models.tf.language_model import COMPUTE_DTYPE, LanguageModel, _Traced
from models.weights.canonical import stack_size

TIMEOUT_S = 50.0  # of one collective
KEY = 7001  # of BucketModel's collectives; tf.distribute counts its own from 1
LARGE = 2**20  # elements; a gradient of as many takes, by reckoning, as long to copy as NCCL needs for one more call


def mirrored(replicas: int, device: str) -> tf.distribute.Strategy:
    """tf.distribute.MirroredStrategy over that many GPUs of this process or, on a CPU, logical devices, which are made here.

    Before anything else of TensorFlow runs. NCCL adds up on GPUs, a ring on a CPU.
    """
    if "GPU" in device:
        return tf.distribute.MirroredStrategy([f"/GPU:{k}" for k in range(replicas)])
    [cpu] = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * replicas)
    return tf.distribute.MirroredStrategy([f"/CPU:{k}" for k in range(replicas)])


def multi_worker(replicas: int, device: str) -> tf.distribute.Strategy:
    """tf.distribute.MultiWorkerMirroredStrategy of the processes that TF_CONFIG names, a device each; made as early."""
    kinds = tf.distribute.experimental.CommunicationImplementation
    options = tf.distribute.experimental.CommunicationOptions(
        implementation=kinds.NCCL if "GPU" in device else kinds.RING, timeout_seconds=TIMEOUT_S
    )
    found = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
    if found.num_replicas_in_sync != replicas:
        raise ValueError(f"TF_CONFIG names {found.num_replicas_in_sync} devices, expected {replicas}")
    return found


STRATEGIES = {"mirrored": mirrored, "multi_worker": multi_worker}


class _OfStrategy(Replica):
    """What both have of a strategy."""

    strategy: tf.distribute.Strategy

    def __init__(self, strategy: tf.distribute.Strategy, group: Group) -> None:
        self.strategy, self.group = strategy, group
        self.size = strategy.num_replicas_in_sync
        self.replicas = self.size // group.size

    def _each(self, make: Callable[[int], Any]) -> Any:
        """A value of each replica of this process, by its number among all."""
        first = self.group.rank * self.replicas
        found = self.strategy.experimental_distribute_values_from_function
        return found(lambda context: make(first + context.replica_id_in_sync_group % self.replicas))

    def _local(self, tensor: Any) -> tuple:
        return self.strategy.experimental_local_results(tensor)

    def own_parts(self, tensor):
        return [self.numpy(part) for part in self._local(tensor)]


class StrategyModel(_OfStrategy, LanguageModel):
    """A LanguageModel under a strategy: variables mirrored on each device, the step in `strategy.run`.

    Args:
        make_stack: () → the stack; its variables are made in the strategy's scope.
        strategy, group: of the replicas.
        others: as of LanguageModel, of the whole batch.
    """

    def __init__(self, make_stack, weights, states, batches, optimizer, *, strategy, group, **options):
        _OfStrategy.__init__(self, strategy, group)
        with strategy.scope():
            LanguageModel.__init__(self, make_stack(), weights, states, batches, optimizer(), **options)
        if self.clip_norm is not None:  # its gradients have been added up before they were clipped
            self.optimizer._all_reduce_sum_gradients = list
        self.initial_states = self._staged_states(states)
        self.states = self.initial_states
        if self.jit_compile:  # the optimizer adds up over the replicas, which XLA does not compile
            self._forward_step, self._gradients = (
                tf.function(function, jit_compile=True) for function in (self._forward_step, self._gradients)
            )
        self._forward, self._train = (self._run(step) for step in (self._forward_step, self._train_step))

    def _run(self, step: Callable) -> Callable:
        """A step in the strategy, in one graph; a loss comes from it as the mean of this process' replicas."""

        @tf.function
        def run(*arguments):
            # A function of its own: what is compiled itself, `strategy.run` would call on the first device alone.
            loss, *others = self.strategy.run(lambda *of_replica: step(*of_replica), args=arguments)
            local = self._local(loss)
            return tf.add_n(local) / len(local), *others

        return run

    def _staged_states(self, states: Sequence) -> Any:
        return self._each(lambda number: self.stack.stage_states(states_of(states, number, self.size)))

    def stage(self, tokens, targets):
        return tuple(
            self._each(
                lambda number, ids=ids: super(StrategyModel, self).stage(*[part_of(ids, number, self.size)] * 2)[0]
            )
            for ids in (tokens, targets)
        )

    def _words_of_a_step(self):
        return self._local(self.batches[0][0])[0].shape.num_elements()

    def trace(self, mode):
        """Nothing is traced ahead: strategies trace at the first call."""

    def own_weights(self):
        of_replicas = zip(*(self._local(v.value) for v in self.variables), strict=True)
        return [[part.numpy() for part in parts] for parts in of_replicas]

    def _learning_rate(self):
        return float(self._local(self.optimizer.learning_rate.value)[0])

    def _set_start(self, arrays, states):
        super()._set_start(arrays, None)
        if states is not None:
            self.initial_states = self._staged_states(states)

    def _staged_targets(self, targets):
        return self.stage(targets, targets)[1]

    def _update(self, gradients):
        scale = 1.0 / (self.loss_scale * self.size)
        gradients = [tf.convert_to_tensor(gradient) * scale for gradient in gradients]
        if self.clip_norm is None:
            self.optimizer.apply(gradients, self.variables)  # which adds up over the replicas
            return
        gradients = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, gradients)
        gradients, _ = tf.clip_by_global_norm(gradients, self.clip_norm)
        self.optimizer.apply(gradients, self.variables)


class BucketModel(_OfStrategy, LanguageModel):
    """A LanguageModel on this process' only device, whose step adds up its gradients with those of all other processes.

    Args:
        stack: of LanguageModel, as the others, which are of the whole batch.
        strategy, group: of the replicas.
        on_gpu: whether that device is one.
    """

    def __init__(self, stack, weights, states, batches, optimizer, *, strategy, group, on_gpu, **options):
        _OfStrategy.__init__(self, strategy, group)
        if self.replicas != 1:
            raise ValueError(f"{self.replicas} devices in a process given, expected one")
        own = states_of(states, group.rank, group.size)
        LanguageModel.__init__(self, stack, weights, own, batches, optimizer, **options)
        half = functools.partial(tf.function, jit_compile=True) if self.jit_compile else lambda function: function
        self._first_half, self._second_half = half(self._to_parts), half(self._from_parts)
        # XLA has collectives on GPUs alone: on a CPU the two halves are programs of their own, and a ring adds up between them.
        self._hint, self._whole = "nccl" if on_gpu else "ring", self.jit_compile and on_gpu
        # The embedding's gradient has a row for each word of the batch, or of the vocabulary: what is less is added up.
        self._by_rows = self.size * self.batches[0][0].shape.num_elements() < self.embedding.shape[0]
        self._train = _Traced(self._train_step, jit_compile=self._whole)

    def stage(self, tokens, targets):
        return super().stage(*(part_of(ids, self.group.rank, self.group.size) for ids in (tokens, targets)))

    def _staged_targets(self, targets):
        return self.stage(targets, targets)[1]

    def own_parts(self, tensor):
        return [self.numpy(tensor)]

    def _set_start(self, arrays, states):
        super()._set_start(arrays, None if states is None else states_of(states, self.group.rank, self.group.size))

    def _train_step(self, tokens, targets, states, stack_dropout=True):
        words = self._of_all(tf.reshape(tokens, [-1])) if self._by_rows else None
        parts, final_states = self._first_half(tokens, targets, states, words)
        return self._second_half(self._added_up(parts, words), words), final_states

    def _to_parts(self, tokens, targets, states, words):
        """(what is added up, in the order in which the backward pass has it: each large gradient, the last layer's first, then
        the bucket, which has the embedding's; final states); words: of all replicas, for `_by_rows`."""
        [embedding, *gradients], loss, final_states = self._gradients(tokens, targets, states)
        if self._by_rows:
            places = tf.gather(_first_places(words, self.embedding.shape[0]), embedding.indices)
            embedding = tf.math.unsorted_segment_sum(embedding.values, places, words.shape[0])
        gradients = [*map(tf.convert_to_tensor, [embedding, *gradients])]
        parts = [*gradients, tf.cast(loss, gradients[0].dtype)]
        bucket = tf.concat([tf.reshape(part, [-1]) for part in parts if not _is_large(part.shape)], 0)
        return [*(part for part in reversed(parts) if _is_large(part.shape)), bucket], final_states

    def _added_up(self, parts: Sequence[tf.Tensor], before: tf.Tensor | None = None) -> list[tf.Tensor]:
        """Each the sum of all replicas'; before: what has been added up already."""
        sums: list[tf.Tensor] = []
        for number, part in enumerate(parts, 1):
            if before is not None and self._whole:  # in one order in all processes, each of which compiles for itself
                _, part = gen_xla_ops.xla_optimization_barrier([before, part])
            before = self._collective(part, number)
            sums.append(before)
        return sums

    def _collective(self, own: tf.Tensor, number: int) -> tf.Tensor:
        """The sum of all replicas' tensors of that number."""
        return tf.raw_ops.CollectiveReduceV2(
            input=own,
            group_size=self.size,
            group_key=KEY,
            instance_key=KEY + number,
            ordering_token=[],
            merge_op="Add",
            final_op="Id",
            communication_hint=self._hint,
            timeout_seconds=TIMEOUT_S,
        )

    def _of_all(self, tokens: tf.Tensor) -> tf.Tensor:
        """The words of all replicas, in the order of their ranks, added up: XLA has no CollectiveGatherV2 in TensorFlow 2.21."""
        words, after = tokens.shape[0], self.size - self.group.rank - 1
        placed = tf.pad(tokens, [[self.group.rank * words, after * words]])
        return self._collective(placed, 0)

    def _from_parts(self, parts, words):
        """The update by the sums of all replicas' parts; the mean of their losses."""
        shapes = [*(v.shape for v in self.variables), tf.TensorShape([])]
        if self._by_rows:
            shapes[0] = tf.TensorShape([words.shape[0], shapes[0][1]])
        *large, bucket = (part * (1.0 / self.size) for part in parts)
        small = iter(tf.split(bucket, [shape.num_elements() for shape in shapes if not _is_large(shape)]))
        large = reversed(large)
        *gradients, loss = (tf.reshape(next(large if _is_large(shape) else small), shape) for shape in shapes)
        if self._by_rows:  # a word has one row that is not 0: in whatever order they are added up, the sum is the same
            gradients[0] = tf.math.unsorted_segment_sum(gradients[0], words, self.embedding.shape[0])
        self._update(gradients)
        return loss


def _is_large(shape: tf.TensorShape) -> bool:
    """Whether a gradient is added up by itself instead of being copied into the bucket."""
    return shape.num_elements() >= LARGE


def _first_places(words: tf.Tensor, vocabulary: int) -> tf.Tensor:
    """Where each word [vocabulary] comes first in `words` [n]; anything for one that does not."""
    return tf.math.unsorted_segment_min(tf.range(words.shape[0]), words, vocabulary)


def build(
    weights: Mapping[str, np.ndarray],
    states: Sequence,
    batches: Sequence,
    optimizer: tuple[str, float],
    *,
    stack: Callable,
    precision: str,
    group: Group,
    strategy: str,
    replicas: int,
    bucket: bool = False,
    device: str = "/CPU:0",
    **options,
) -> LanguageModel:
    """The language model of a row; arguments as of models.tf.language_model.build, of the whole batch.

    Args:
        group: the processes of the row.
        strategy: of STRATEGIES.
        replicas: devices in all.
        bucket: a BucketModel instead of a StrategyModel.
        device: in TensorFlow's words, such as "/GPU:0" or "/CPU:0".
    """
    made = STRATEGIES[strategy](replicas, device)
    kind, learning_rate = optimizer
    kinds = {"SGD": keras.optimizers.SGD, "Adam": keras.optimizers.Adam}
    make_stack = functools.partial(stack, weights, stack_size(weights)[0], COMPUTE_DTYPE[precision])
    make_optimizer = functools.partial(kinds[kind], learning_rate)
    options |= {"strategy": made, "group": group}
    if bucket:
        on_gpu = "GPU" in device
        if on_gpu:  # where XLA's communicators of several processes meet; NCCL reads it when the first one is made
            os.environ["NCCL_COMM_ID"] = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        return BucketModel(make_stack(), weights, states, batches, make_optimizer(), on_gpu=on_gpu, **options)
    return StrategyModel(make_stack, weights, states, batches, make_optimizer, **options)
