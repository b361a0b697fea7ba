"""An LSTM stack, forward and backward, in float64 NumPy: the reference that every implementation is compared with.

The LSTM of Hochreiter & Schmidhuber 1997 with the forget gate of Gers, Schmidhuber & Cummins 2000, no peepholes. With
the kernel W, recurrent kernel R and bias b split into the gates i, f, c, o, and * elementwise:

    i_t = sigmoid(x_t W_i + h_{t-1} R_i + b_i)      input gate
    f_t = sigmoid(x_t W_f + h_{t-1} R_f + b_f)      forget gate
    g_t = tanh   (x_t W_c + h_{t-1} R_c + b_c)      candidate
    o_t = sigmoid(x_t W_o + h_{t-1} R_o + b_o)      output gate
    c_t = f_t * c_{t-1} + i_t * g_t                 cell state
    h_t = o_t * tanh(c_t)                           output

Backward through time, with dv for the loss's derivative by v and dz for those by the arguments of the four
nonlinearities (sigmoid' = s(1-s), tanh' = 1-g²):

    dh_t = dout_t + dz_{t+1} R'
    dc_t = f_{t+1} * dc_{t+1} + dh_t * o_t * (1 - tanh(c_t)²)
    dz_t = [dc_t g_t i_t(1-i_t),  dc_t c_{t-1} f_t(1-f_t),  dc_t i_t (1-g_t²),  dh_t tanh(c_t) o_t(1-o_t)]
    dW = Σ x_t' dz_t,   dR = Σ h_{t-1}' dz_t,   db = Σ dz_t,   dx_t = dz_t W'

What does not depend on the step before is one matmul over all steps: x W before the loop, dW, dR, dx after it.
Arrays are batch-major, [batch, time, features], at the door; time-major inside, so that a step is contiguous.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from models.reference.products import product
from models.weights.canonical import States, Weights, directions


class LayerCache(NamedTuple):
    """What one direction of one layer keeps for its backward pass; time runs in the direction's own order."""

    inputs: np.ndarray  # [time, batch, input]
    gates: np.ndarray  # [time, batch, 4*units], after the nonlinearities
    h: np.ndarray  # [time + 1, batch, units], from the initial state on
    c: np.ndarray  # [time + 1, batch, units]
    tanh_c: np.ndarray  # [time, batch, units]
    kernel: np.ndarray
    recurrent_kernel: np.ndarray


class LayerGradients(NamedTuple):
    """The loss's derivatives by everything that entered one direction of one layer."""

    inputs: np.ndarray  # [time, batch, input]
    kernel: np.ndarray
    recurrent_kernel: np.ndarray
    bias: np.ndarray
    h: np.ndarray  # [batch, units], by the initial state
    c: np.ndarray


def lstm_stack_forward(
    inputs: np.ndarray,
    weights: Mapping[str, np.ndarray],
    states: States,
    num_layers: int,
    bidirectional: bool = False,
    dtype: type = np.float64,
    between: Callable[[int, np.ndarray], np.ndarray] | None = None,
) -> tuple[np.ndarray, States, list[list[LayerCache]]]:
    """Run the stack.

    Args:
        inputs: [batch, time, input].
        weights: canonical (models/weights/canonical.py); all else than the stack's tensors is ignored.
        states: initial (h, c) of each layer and direction. The backward direction starts from the last step.
        dtype: in which everything is computed.
        between: (layer, its outputs [time, batch, units]) → what the next layer reads: dropout. The backward pass has none.

    Returns:
        outputs [batch, time, units] (bidirectional: [batch, time, 2*units]), the final states in the form of
        `states`, and the cache for `lstm_stack_backward`.
    """
    _check_states(states, num_layers, len(directions(bidirectional)))
    x = np.ascontiguousarray(np.asarray(inputs, dtype).transpose(1, 0, 2))
    final_states, cache = [], []
    for layer in range(num_layers):
        if between and layer:
            x = between(layer - 1, x)
        caches = []
        for k, direction in enumerate(directions(bidirectional)):
            tensors = (weights[f"lstm_{layer}/{direction}/{part}"] for part in ("kernel", "recurrent_kernel", "bias"))
            arrays = [np.asarray(array, dtype) for array in (*tensors, *states[layer][k])]
            caches.append(_layer_forward(_in_order(x, direction), *arrays))
        x = np.concatenate(
            [_in_order(own.h[1:], d) for own, d in zip(caches, directions(bidirectional), strict=True)], -1
        )
        final_states.append([(own.h[-1], own.c[-1]) for own in caches])
        cache.append(caches)
    return np.ascontiguousarray(x.transpose(1, 0, 2)), final_states, cache


def lstm_stack_backward(d_outputs: np.ndarray, cache: list[list[LayerCache]]) -> tuple[np.ndarray, Weights, States]:
    """Derivatives of a loss, given its derivatives by the stack's outputs.

    Args:
        d_outputs: [batch, time, units], or [batch, time, 2*units] for a bidirectional stack.
        cache: from `lstm_stack_forward`.

    Returns:
        d_inputs [batch, time, input], the gradients of the stack's tensors under their canonical names, and the
        derivatives by the initial states in the form of states.
    """
    dx = np.ascontiguousarray(np.asarray(d_outputs, cache[0][0].h.dtype).transpose(1, 0, 2))
    gradients: Weights = {}
    d_states: States = []
    for layer in reversed(range(len(cache))):
        names = directions(len(cache[layer]) == 2)
        d_own = np.split(dx, len(names), axis=-1)
        results = [
            _layer_backward(_in_order(d, direction), own)
            for d, direction, own in zip(d_own, names, cache[layer], strict=True)
        ]
        for direction, result in zip(names, results, strict=True):
            gradients[f"lstm_{layer}/{direction}/kernel"] = result.kernel
            gradients[f"lstm_{layer}/{direction}/recurrent_kernel"] = result.recurrent_kernel
            gradients[f"lstm_{layer}/{direction}/bias"] = result.bias
        d_states.insert(0, [(result.h, result.c) for result in results])
        dx = sum(_in_order(result.inputs, direction) for direction, result in zip(names, results, strict=True))
    return np.ascontiguousarray(dx.transpose(1, 0, 2)), gradients, d_states


def _layer_forward(inputs, kernel, recurrent_kernel, bias, h_0, c_0) -> LayerCache:
    """One direction of one layer; inputs [time, batch, input], in the order in which they are read."""
    time_steps, batch, _ = inputs.shape
    units = recurrent_kernel.shape[0]
    gates = product(_flat(inputs), kernel)
    gates += bias
    gates = gates.reshape(time_steps, batch, 4 * units)
    h = np.empty((time_steps + 1, batch, units), gates.dtype)
    c, tanh_c = np.empty_like(h), np.empty_like(h[1:])
    h[0], c[0] = h_0, c_0
    for t in range(time_steps):
        z = gates[t]
        z += h[t] @ recurrent_kernel
        _sigmoid(z[:, : 2 * units])
        np.tanh(z[:, 2 * units : 3 * units], out=z[:, 2 * units : 3 * units])
        _sigmoid(z[:, 3 * units :])
        i, f, g, o = np.split(z, 4, axis=1)
        np.multiply(f, c[t], out=c[t + 1])
        c[t + 1] += i * g
        np.tanh(c[t + 1], out=tanh_c[t])
        np.multiply(o, tanh_c[t], out=h[t + 1])
    return LayerCache(inputs, gates, h, c, tanh_c, kernel, recurrent_kernel)


def _layer_backward(d_outputs: np.ndarray, cache: LayerCache) -> LayerGradients:
    """One direction of one layer; d_outputs [time, batch, units], in the order in which the inputs were read."""
    d_gates = np.empty_like(cache.gates)
    dh, dc = np.zeros_like(cache.h[0]), np.zeros_like(cache.c[0])
    for t in reversed(range(len(d_gates))):
        i, f, g, o = np.split(cache.gates[t], 4, axis=1)
        di, df, dg, do = np.split(d_gates[t], 4, axis=1)  # views: written in place
        tanh_c = cache.tanh_c[t]
        dh += d_outputs[t]
        dc += dh * o * (1 - tanh_c**2)
        di[:] = dc * g * i * (1 - i)
        df[:] = dc * cache.c[t] * f * (1 - f)
        dg[:] = dc * i * (1 - g**2)
        do[:] = dh * tanh_c * o * (1 - o)
        dh = d_gates[t] @ cache.recurrent_kernel.T
        dc *= f
    dz = _flat(d_gates)
    return LayerGradients(
        inputs=product(dz, cache.kernel.T).reshape(cache.inputs.shape),
        kernel=product(_flat(cache.inputs).T, dz),
        recurrent_kernel=product(_flat(cache.h[:-1]).T, dz),
        bias=dz.sum(axis=0),
        h=dh,
        c=dc,
    )


def _sigmoid(x: np.ndarray) -> None:
    """1/(1 + exp(-x)) in place, as (1 + tanh(x/2))/2, which never overflows."""
    x *= 0.5
    np.tanh(x, out=x)
    x += 1.0
    x *= 0.5


def _in_order(x: np.ndarray, direction: str) -> np.ndarray:
    """[time, batch, …] in a direction's own order, and back: the backward direction reads the last step first."""
    return x[::-1] if direction == "backward" else x


def _flat(x: np.ndarray) -> np.ndarray:
    return x.reshape(-1, x.shape[-1])


def _check_states(states: States, num_layers: int, num_directions: int) -> None:
    given = [len(layer) for layer in states]
    if given != [num_directions] * num_layers:
        raise ValueError(
            f"states: {len(given)} layers of {given} directions given, expected {num_layers} layers of {num_directions}"
        )
