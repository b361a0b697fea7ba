"""Recurrent layers beyond the LSTM of lstm.py, forward and backward, in float64 NumPy: what an option of Keras' layers changes.

    LSTM       as in lstm.py, with other nonlinearities; gates in the order i, f, c, o
    GRU        z, r = sigmoid(x W_zr + b_zr + h R_zr + d_zr)      (Cho et al. 2014, reset after the product, as cuDNN has it)
               g    = tanh(x W_g + b_g + r * (h R_g + d_g));  h' = z * h + (1 - z) * g
    SimpleRNN  h'   = tanh(x W + h R + b)

A step that its mask leaves out keeps the state. Dropout masks are factors, given from outside: `drop` [batch, input] on what
enters a layer, the same at every step, `keep` [gates, batch, units] on the h that enters each gate's recurrent product.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from models.reference.networks import COARSE, DRAWS


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 0.5 * (1.0 + np.tanh(0.5 * x))


# name: (function, its derivative by its argument, from its value)
NONLINEARITIES = {
    "tanh": (np.tanh, lambda y: 1 - y**2),
    "sigmoid": (_sigmoid, lambda y: y * (1 - y)),
    "relu": (lambda x: np.maximum(x, 0.0), lambda y: (y > 0).astype(y.dtype)),
    "hard_sigmoid": (lambda x: np.clip(x / 6 + 0.5, 0.0, 1.0), lambda y: ((y > 0) & (y < 1)) / 6),
}
GATES = {"lstm": 4, "gru": 3, "simple": 1}


class Layer(NamedTuple):
    """One direction of one layer."""

    cell: str = "lstm"
    activation: str = "tanh"
    recurrent_activation: str = "sigmoid"
    backwards: bool = False  # reads the last step first, and returns its outputs in that order


def forward(
    layer: Layer,
    x: np.ndarray,
    weights: Sequence[np.ndarray],
    states: Sequence[np.ndarray],
    mask: np.ndarray | None = None,
    drop: np.ndarray | None = None,
    keep: np.ndarray | None = None,
) -> tuple[np.ndarray, list[np.ndarray], list]:
    """(outputs [time, batch, units], final states, what `backward` needs).

    Args:
        x: [time, batch, input].
        weights: kernel, recurrent kernel, and the bias; of a GRU [2, 3·units].
        states: h, and of an LSTM c, [batch, units].
        mask: booleans [time, batch].
    """
    kernel, recurrent, bias = weights
    if layer.backwards:
        x, mask = x[::-1], None if mask is None else mask[::-1]
    entered = x if drop is None else x * drop
    projected = entered @ kernel + (bias[0] if layer.cell == "gru" else bias)
    h, c = states[0], states[-1]
    outputs, steps = [], []
    for t in range(len(x)):
        z, before = projected[t], (h, c)
        if keep is None:
            product = h @ recurrent
        else:
            products = [(h * k) @ r for k, r in zip(keep, np.split(recurrent, len(keep), axis=1), strict=True)]
            product = np.concatenate(products, 1)
        new_h, new_c, local = _step(layer, z, product, bias, h, c)
        on = None if mask is None else mask[t][:, None]
        h = new_h if on is None else np.where(on, new_h, h)
        c = new_c if on is None else np.where(on, new_c, c)
        outputs.append(h)
        steps.append((before, local, on))
    return np.array(outputs), [h, c][: len(states)], [layer, entered, weights, drop, keep, steps]


def _step(layer: Layer, z, product, bias, h, c):
    act, gate = NONLINEARITIES[layer.activation][0], NONLINEARITIES[layer.recurrent_activation][0]
    if layer.cell == "simple":
        new = act(z + product)
        return new, new, (new,)
    if layer.cell == "gru":
        product = product + bias[1]
        (xz, xr, xg), (hz, hr, hg) = np.split(z, 3, 1), np.split(product, 3, 1)
        update, reset = gate(xz + hz), gate(xr + hr)
        g = act(xg + reset * hg)
        new = update * h + (1 - update) * g
        return new, new, (update, reset, g, hg)
    i, f, g, o = np.split(z + product, 4, 1)
    i, f, g, o = gate(i), gate(f), act(g), gate(o)
    new = f * c + i * g
    shown = act(new)
    return o * shown, new, (i, f, g, o, shown)


def backward(
    cache: Sequence, d_outputs: np.ndarray, d_states: Sequence[np.ndarray]
) -> tuple[np.ndarray, list[np.ndarray]]:
    """(derivatives by x [time, batch, input], those by kernel, recurrent kernel and bias).

    Args:
        d_outputs: [time, batch, units], by the outputs of `forward`.
        d_states: by the final states.
    """
    layer, x, (kernel, recurrent, bias), drop, keep, steps = cache
    dh, dc = d_states[0].copy(), (d_states[1] if layer.cell == "lstm" else np.zeros_like(d_states[0])).copy()
    d_z, products, d_recurrent, d_bias = [], [], np.zeros_like(recurrent), np.zeros_like(bias)
    for t in reversed(range(len(steps))):
        (h, c), local, on = steps[t]
        dh = dh + d_outputs[t]
        own_h, own_c = (dh, dc) if on is None else (dh * on, dc * on)
        dz, d_product, direct_h, direct_c = _step_back(layer, local, h, c, own_h, own_c)
        if layer.cell == "gru":
            d_bias[1] += d_product.sum(0)
        if keep is None:
            products.append((h, d_product))
            through = d_product @ recurrent.T
        else:
            parts = list(zip(keep, np.split(d_product, len(keep), 1), np.split(recurrent, len(keep), 1), strict=True))
            d_recurrent += np.concatenate([(h * k).T @ d for k, d, _ in parts], 1)
            through = sum((d @ r.T) * k for k, d, r in parts)
        past_h, past_c = (0.0, 0.0) if on is None else (dh * ~on, dc * ~on)
        dh, dc = through + direct_h + past_h, direct_c + past_c
        d_z.append(dz)
    if products:
        entered_h, d_products = (np.concatenate(parts) for parts in zip(*products, strict=True))
        d_recurrent = entered_h.T @ d_products
    d_z = np.array(d_z[::-1])
    total = d_z.sum((0, 1))
    if layer.cell == "gru":
        d_bias[0] = total
    else:
        d_bias[:] = total
    flat = x.reshape(-1, x.shape[-1])
    d_x = d_z @ kernel.T
    d_x = d_x if drop is None else d_x * drop
    gradients = [flat.T @ d_z.reshape(-1, d_z.shape[-1]), d_recurrent, d_bias]
    return (d_x[::-1] if layer.backwards else d_x), gradients


def _step_back(layer: Layer, local, h, c, dh, dc):
    """Derivatives by x W + b, by h R, and by h and c directly."""
    act, gate = NONLINEARITIES[layer.activation][1], NONLINEARITIES[layer.recurrent_activation][1]
    if layer.cell == "simple":
        dz = dh * act(local[0])
        return dz, dz, 0.0, 0.0
    if layer.cell == "gru":
        update, reset, g, hg = local
        d_g = dh * (1 - update) * act(g)
        d_update, d_reset = dh * (h - g) * gate(update), d_g * hg * gate(reset)
        return (
            np.concatenate([d_update, d_reset, d_g], 1),
            np.concatenate([d_update, d_reset, d_g * reset], 1),
            dh * update,
            0.0,
        )
    i, f, g, o, shown = local
    dc = dc + dh * o * act(shown)
    dz = np.concatenate([dc * g * gate(i), dc * c * gate(f), dc * i * act(g), dh * shown * gate(o)], 1)
    return dz, dz, 0.0, dc * f


class Network(NamedTuple):
    """Two layers, of which the second returns its last output, and a dense layer on that; its loss is the mean squared error.

    Its weights are a list: the embedding where tokens come in, of each layer and direction its kernel, recurrent kernel and
    (`use_bias`) bias, and the dense layer's kernel and bias.
    """

    layer: Layer = Layer()
    bidirectional: bool = False
    use_bias: bool = True
    adds_cell: bool = False  # the dense layer reads h + c
    carries: bool = False  # a batch starts from the final states of the one before

    def directions(self) -> list[Layer]:
        return [self.layer, self.layer._replace(backwards=True)] if self.bidirectional else [self.layer]

    def layer_shapes(self, features: int, units: int) -> list[tuple[int, ...]]:
        """Of kernel, recurrent kernel and bias of one direction of a layer that reads `features`."""
        size = GATES[self.layer.cell] * units
        bias = (2, size) if self.layer.cell == "gru" else (size,)
        return [(features, size), (units, size), *([bias] if self.use_bias else [])]

    def shapes(self, features: int, units: int, outputs: int, vocabulary: int = 0) -> list[tuple[int, ...]]:
        """Of all weights."""
        ways = len(self.directions())
        layers = [features, ways * units]
        own = [shape for size in layers for _ in range(ways) for shape in self.layer_shapes(size, units)]
        return [*([(vocabulary, features)] if vocabulary else []), *own, (ways * units, outputs), (outputs,)]


class Batch(NamedTuple):
    """inputs: [batch, time, features] or tokens [batch, time]; targets: [batch, outputs]; mask: booleans [batch, time].

    states: of each layer [h, c], or None: zeros. drop, keep: of each layer the dropout masks of `forward`, or None.
    """

    inputs: np.ndarray
    targets: np.ndarray
    mask: np.ndarray | None = None
    states: Sequence | None = None
    drop: Sequence | None = None
    keep: Sequence | None = None


def _predict(network: Network, weights: Sequence[np.ndarray], batch: Batch, states: Sequence | None):
    """(predictions [batch, outputs], what the dense layer read, final states, and of each layer and direction its cache)."""
    tokens = batch.inputs.ndim == 2
    embedding, rest = (weights[0], weights[1:]) if tokens else (None, weights)
    x = np.asarray(embedding[batch.inputs] if tokens else batch.inputs, np.float64).transpose(1, 0, 2)
    mask = None if batch.mask is None else batch.mask.T
    ways, per = network.directions(), 3 if network.use_bias else 2
    finals, caches = [], []
    for number in range(2):
        outputs = []
        for way, layer in enumerate(ways):
            own = rest[per * (number * len(ways) + way) :][:per]
            units = own[1].shape[0]
            own = own if network.use_bias else [*own, np.zeros(own[1].shape[1])]
            start = (states or batch.states or [None, None])[number]
            start = [np.zeros((x.shape[1], units))] * (2 if layer.cell == "lstm" else 1) if start is None else start
            drop, keep = (given[number] if given else None for given in (batch.drop, batch.keep))
            out, final, cache = forward(layer, x, own, start, mask, drop, keep)
            outputs.append(out[::-1] if way else out)
            finals.append(final)
            caches.append(cache)
        if number == 0:
            x = np.concatenate(outputs, -1)
    own = finals[len(ways) :]
    seen = own[0][0] + own[0][1] if network.adds_cell else np.concatenate([final[0] for final in own], -1)
    kernel, bias = weights[-2:]
    predicted = seen @ kernel + bias
    return predicted, seen, finals, caches


def step(network: Network, weights: Sequence[np.ndarray], batch: Batch, states: Sequence | None = None):
    """(loss, gradients of all weights, final states of each layer and direction)."""
    weights = [np.asarray(array, np.float64) for array in weights]
    predicted, seen, finals, caches = _predict(network, weights, batch, states)
    tokens, ways, per = batch.inputs.ndim == 2, network.directions(), 3 if network.use_bias else 2
    kernel = weights[-2]
    error = predicted - batch.targets
    d_predicted = 2 * error / error.size
    d_seen = np.split(d_predicted @ kernel.T, len(ways), axis=1)
    gradients = [seen.T @ d_predicted, d_predicted.sum(0)]
    d_x = None
    for number in (1, 0):
        below, found = 0.0, []
        for way in range(len(ways)):
            cache = caches[number * len(ways) + way]
            zero = np.zeros_like(finals[0][0])
            if number:
                d_final = [d_seen[way], d_seen[way] if network.adds_cell else zero]
                d_outputs = np.zeros((batch.inputs.shape[1], *zero.shape))
            else:
                d_final, d_outputs = [zero, zero], np.split(d_x, len(ways), axis=-1)[way]
                d_outputs = d_outputs[::-1] if way else d_outputs
            d_below, own = backward(cache, d_outputs, d_final)
            below = below + d_below
            found += own[:per]
        gradients, d_x = found + gradients, below
    if tokens:
        d_embedding = np.zeros_like(weights[0])
        np.add.at(d_embedding, batch.inputs, d_x.transpose(1, 0, 2))
        gradients = [d_embedding, *gradients]
    return float(np.mean(error**2)), gradients, finals


def walk(network: Network, weights: Sequence[np.ndarray], batches: Iterable[Batch], rate: float):
    """Yields (loss, the weights after it) of a step of SGD on each batch."""
    weights, states = [np.asarray(array, np.float64) for array in weights], None
    for batch in batches:
        loss, gradients, finals = step(network, weights, batch, states)
        weights = [array - rate * gradient for array, gradient in zip(weights, gradients, strict=True)]
        states = finals if network.carries else None
        yield loss, weights


def rounded(network: Network, weights: Sequence[np.ndarray], batches: Sequence[Batch], rate: float):
    """Of each weight the largest errors of trainings from coarsely rounded weights: (of the first step's change, of all steps').

    As models.reference.networks.rounded, and for its reason: max|a - b| / max|b|, and the same in the 2-norm.
    """
    exact = [after for _, after in walk(network, weights, batches, rate)]
    found = np.zeros((2, len(weights)))
    for draw in range(DRAWS):
        random = np.random.default_rng(draw)
        start = [np.float64(array) * (1 + COARSE * random.uniform(-1, 1, np.shape(array))) for array in weights]
        after = [own for _, own in walk(network, start, batches, rate)]
        for kind, (place, order) in enumerate(((0, np.inf), (-1, 2))):
            for k, array in enumerate(weights):
                change = (exact[place][k] - array).ravel()
                moved = (after[place][k] - start[k]).ravel() - change
                norm = np.linalg.norm(change, order)
                found[kind, k] = max(found[kind, k], np.linalg.norm(moved, order) / norm if norm else 0.0)
    return found


def predict(network: Network, weights: Sequence[np.ndarray], batches: Iterable[Batch]):
    """Yields the predictions [batch, outputs] of each batch, without dropout."""
    weights, states = [np.asarray(array, np.float64) for array in weights], None
    for batch in batches:
        predicted, _, finals, _ = _predict(network, weights, batch._replace(drop=None, keep=None), states)
        states = finals if network.carries else None
        yield predicted
