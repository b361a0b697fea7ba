"""An LSTM stack that answers requests, in PyTorch: from a NumPy array on the host to one, as models/tf/serving.py says."""

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from models.pytorch import graph
from models.pytorch.stacks import TorchStack
from models.weights.canonical import stack_size, zero_states


class TorchServer:
    """A stack of this folder, call by call.

    Args:
        stack: a class of this folder.
        weights: canonical, of the stack.
        shape: [batch, steps, features] of a request.
        stream: whether states are carried.
        last: whether the answer is of the last step alone.
        device: "cpu" or "cuda:0".
        compiled: whether torch.compile is given the stack.
    """

    def __init__(
        self,
        stack: Callable[..., TorchStack],
        weights: Mapping[str, np.ndarray],
        shape: tuple[int, int, int],
        stream: bool,
        last: bool,
        device: str,
        compiled: bool = False,
    ) -> None:
        num_layers, _ = stack_size(weights)
        self._stack, self._device = stack(weights, num_layers, device=device), device
        self._stream, self._last = stream, last
        if compiled:
            self._stack.module = torch.compile(self._stack.module)
        self._zeros = self._stack.stage_states(zero_states(num_layers, shape[0], self._stack.units))
        self._states = self._zeros

    def restore(self) -> None:
        """A stream starts anew."""
        self._states = self._zeros

    @torch.inference_mode()
    def answer(self, request: np.ndarray) -> np.ndarray:
        """See the module."""
        outputs, states = self._outputs_of(torch.from_numpy(request).to(self._device), self._states)
        if self._stream:
            self._states = states
        return outputs.cpu().numpy()

    def _outputs_of(self, inputs: Tensor, states: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Batch-major [batch, steps, …] on either side, or of the last step [batch, units]; the outputs are contiguous."""
        outputs, finals = self._stack(inputs.transpose(0, 1).contiguous(), states, 0.0, False)
        return (outputs[-1] if self._last else outputs.transpose(0, 1)).contiguous(), finals


class CapturedServer(TorchServer):
    """The same as one CUDA graph, between pinned buffers of the host."""

    def __init__(self, stack, weights, shape, stream, last, device, compiled=False):
        super().__init__(stack, weights, shape, stream, last, device, compiled)
        self._inputs = torch.zeros(shape, device=device)
        self._outputs = torch.zeros((*shape[: 1 if last else 2], self._stack.units), device=device)
        self._host = [torch.zeros(tensor.shape, pin_memory=True) for tensor in (self._inputs, self._outputs)]
        self._states = tuple(zeros.clone() for zeros in self._zeros)

        @torch.no_grad()
        def answer():
            outputs, states = self._outputs_of(self._inputs, self._states)
            self._outputs.copy_(outputs)
            if stream:
                for state, final in zip(self._states, states, strict=True):
                    state.copy_(final)

        self._replay = graph.captured(answer, self._states)

    def restore(self) -> None:
        for state, zeros in zip(self._states, self._zeros, strict=True):
            state.copy_(zeros)

    def answer(self, request):
        inputs, outputs = self._host
        inputs.numpy()[...] = request
        self._inputs.copy_(inputs, non_blocking=True)
        self._replay()
        outputs.copy_(self._outputs, non_blocking=True)
        torch.cuda.current_stream().synchronize()
        return outputs.numpy().copy()


def build(weights, shape, stream, last=False, *, stack, captured=False, compiled=False, precision="fp32", device="cpu"):
    """The server of a row, on `device`, in float32; its products as the process has set their precision.

    On a GPU what torch.compile made is captured too.
    """
    kind = CapturedServer if captured or (compiled and device != "cpu") else TorchServer
    return kind(stack, weights, shape, stream, last, device, compiled)
