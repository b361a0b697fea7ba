"""An LSTM stack that answers requests, in JAX: from a NumPy array on the host to one, as models/tf/serving.py says."""

from collections.abc import Callable, Mapping

import jax
import numpy as np

from models.jax.stacks import JaxStack
from models.weights.canonical import stack_size, zero_states


class JaxServer:
    """A stack of this folder in one jitted function. Weights and states stay on the device.

    Args:
        stack: a class of this folder.
        weights: canonical, of the stack.
        shape: [batch, steps, features] of a request.
        stream: whether states are carried.
        last: whether the answer is of the last step alone.
    """

    def __init__(
        self,
        stack: Callable[..., JaxStack],
        weights: Mapping[str, np.ndarray],
        shape: tuple[int, int, int],
        stream: bool,
        last: bool,
    ) -> None:
        num_layers, _ = stack_size(weights)
        self._stream, own = stream, stack(weights, num_layers)
        self._parameters = [jax.device_put(array) for array in own.from_canonical(weights)]
        self._zeros = own.stage_states(zero_states(num_layers, shape[0], own.units))
        self._states = self._zeros

        @jax.jit
        def outputs_of(parameters, inputs, states):
            outputs, finals = own(parameters, inputs.swapaxes(0, 1) if own.time_major else inputs, states)
            if last:
                return outputs[-1] if own.time_major else outputs[:, -1], finals
            return outputs.swapaxes(0, 1) if own.time_major else outputs, finals

        self._outputs_of = outputs_of

    def restore(self) -> None:
        """A stream starts anew."""
        self._states = self._zeros

    def answer(self, request: np.ndarray) -> np.ndarray:
        """See models/tf/serving.py."""
        outputs, states = self._outputs_of(self._parameters, request, self._states)
        if self._stream:
            self._states = states
        return np.asarray(outputs)


def build(weights, shape, stream, last=False, *, stack, precision="fp32", device=None):
    """The server of a row, on JAX' default device, in float32; its products as the process has set their precision."""
    return JaxServer(stack, weights, shape, stream, last)
