"""The language model on several devices, in PyTorch, a process for each: DistributedDataParallel, and flat buckets by hand.

    DistributedModel    torch.nn.parallel.DistributedDataParallel, which adds up while the backward pass goes on
    BucketModel         all gradients in one flat tensor for each dtype, added up before the update; on a GPU inside the step's
                        CUDA graph

The optimizer receives the mean of all replicas' gradients, which is clipped after it has been formed.
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta

import numpy as np
import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from models.pytorch.language_model import COMPUTE_DTYPE, CapturedLanguageModel, TorchLanguageModel
from models.pytorch.stacks import TorchStack
from models.replicas import Group, Replica, parts_of, states_of
from models.weights.canonical import stack_size

TIMEOUT_S = 50.0  # of one collective


def join(device: str) -> None:
    """Join the processes that MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE name; NCCL on GPUs, gloo on a CPU."""
    if not distributed.is_initialized():
        timeout = timedelta(seconds=TIMEOUT_S)
        distributed.init_process_group("gloo" if device == "cpu" else "nccl", timeout=timeout)


class _OfProcesses(Replica):
    """What both have: this process' part of the batches."""

    def __init__(self, stack, weights, states, batches, optimizer, *, group: Group, **options) -> None:
        self.group = group
        own = states_of(states, group.rank, group.size), parts_of(batches, group.rank, group.size)
        super().__init__(stack, weights, *own, optimizer, **options)

    def _set_start(self, arrays, states):
        super()._set_start(arrays, None if states is None else states_of(states, self.group.rank, self.group.size))


class _Network(nn.Module):
    """A function of these parameters, as DistributedDataParallel takes it."""

    def __init__(self, parameters: Sequence[nn.Parameter], function: Callable) -> None:
        super().__init__()
        self.held, self.function = nn.ParameterList(parameters), function

    def forward(self, *arguments):
        return self.function(*arguments)


class DistributedModel(_OfProcesses, TorchLanguageModel):
    """A TorchLanguageModel whose loss is computed by DistributedDataParallel."""

    def __init__(self, *arguments, **options) -> None:
        super().__init__(*arguments, **options)
        self.parameters = [self._as_parameter(tensor) for tensor in self.parameters]
        self._distributed = DistributedDataParallel(
            _Network(self.parameters, self._training), gradient_as_bucket_view=True
        )

    def _master(self, array):
        return nn.Parameter(super()._master(array))

    @staticmethod
    def _as_parameter(tensor: Tensor) -> nn.Parameter:
        return tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor)

    def _training(self, tokens, targets, *states):
        loss, _, _, final_states = self._loss(tokens, targets, states, True)
        return loss, *final_states

    def _train_step(self, tokens, targets, states):
        for parameter in self.parameters:
            parameter.grad = None
        loss, *final_states = self._distributed(tokens, targets, *states)
        (loss * self.loss_scale if self._half else loss).backward()
        with torch.no_grad():
            self._update([parameter.grad for parameter in self.parameters])
            return loss.detach(), tuple(state.detach() for state in final_states)


class _Bucket(_OfProcesses):
    def _update(self, gradients):
        super()._update(self._added_up(gradients))

    def _added_up(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """The mean of all replicas' gradients, by one all-reduce for each dtype."""
        found = list(gradients)
        for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
            places = [k for k, gradient in enumerate(gradients) if gradient.dtype == dtype]
            flat = torch.cat([gradients[k].reshape(-1) for k in places]).mul_(1.0 / self.group.size)
            distributed.all_reduce(flat)
            parts = flat.split([gradients[k].numel() for k in places])
            for k, part in zip(places, parts, strict=True):
                found[k] = part.view(gradients[k].shape)
        return found


class BucketModel(_Bucket, TorchLanguageModel):
    """A TorchLanguageModel that adds up before its update."""


class CapturedBucketModel(_Bucket, CapturedLanguageModel):
    """The same in one CUDA graph."""


def build(
    weights: Mapping[str, np.ndarray],
    states: Sequence,
    batches: Sequence,
    optimizer: tuple[str, float],
    *,
    stack: Callable[..., TorchStack],
    precision: str,
    group: Group,
    replicas: int,
    device: str = "cpu",
    captured: bool = False,
    bucket: bool = False,
    **options,
) -> TorchLanguageModel:
    """The language model of a row; arguments as of models.pytorch.language_model.build, of the whole batch.

    Args:
        group: the processes of the row, one for each of the `replicas`.
        captured: with bucket, on a GPU: each step is a CUDA graph, NCCL's kernels in it.
        bucket: add up flat buckets, instead of by DistributedDataParallel.
    """
    if group.size != replicas:
        raise ValueError(f"{group.size} processes given, expected one for each of {replicas} replicas")
    join(device)
    kind = DistributedModel
    if bucket:
        kind = CapturedBucketModel if captured and device != "cpu" else BucketModel
    made = stack(weights, stack_size(weights)[0], COMPUTE_DTYPE[precision], device)
    return kind(made, weights, states, batches, optimizer, group=group, **options)
