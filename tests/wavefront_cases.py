"""Small wavefront stacks with random weights, and an LSTM stack in plain NumPy that is written from the equations alone.

The NumPy stack takes complex numbers too, and so gives derivatives without a backward pass: the complex step, Im f(x + ih·v) / h,
is the derivative along v to the last digit (Squire and Trapp 1998), where a difference of two values loses half of them.
"""

from collections.abc import Mapping

import numpy as np

from models.wavefront.layer import WavefrontLSTM
from models.weights import layouts
from tests import cudnn_layer_cases
from tests.cudnn_layer_cases import BATCH, FEATURES, MODES, UNITS, random, weights

NORMALIZED = "wavefront, normalized"
KINDS = ("wavefront", NORMALIZED, *MODES)  # of layers that are a whole stack
STEP = 1e-30
EPSILON = 1e-3  # of layer normalisation, as in keras.layers.LayerNormalization


def layer(num_layers: int = 2, direction: str = "unidirectional", dtype: str = "float64", **kwargs) -> WavefrontLSTM:
    """A built layer of UNITS units for FEATURES features, with the weights of cudnn_layer_cases.layer("lstm", …)."""
    made = WavefrontLSTM(UNITS, num_layers, direction=direction, dtype=dtype, **kwargs)
    made.build((BATCH if kwargs.get("stateful") else None, None, FEATURES))
    made.set_canonical(parameters(made.spec, made.layer_normalization))
    return made


def stack_layer(kind: str, *arguments, **kwargs):
    """A layer of one of KINDS: `layer` of this file, or that of cudnn_layer_cases."""
    if kind in MODES:
        return cudnn_layer_cases.layer(kind, *arguments, **kwargs)
    return layer(*arguments, layer_normalization=kind == NORMALIZED, **kwargs)


def parameters(spec: layouts.StackSpec, normalized: bool = False, seed: int = 0) -> dict[str, np.ndarray]:
    """Canonical float64 weights, gains around 1."""
    found: dict[str, np.ndarray] = {}
    for name, array in weights(spec, seed).items():
        found[name] = array
        if normalized and name.endswith("/bias"):
            place, units, k = name.removesuffix("bias"), spec.units, seed + len(found)
            found[f"{place}recurrent_gain"] = 1 + 0.5 * random(4 * units, seed=k)
            found[f"{place}kernel_gain"] = 1 + 0.5 * random(4 * units, seed=k + 1)
            found[f"{place}cell_gain"] = 1 + 0.5 * random(units, seed=k + 2)
            found[f"{place}cell_bias"] = 0.5 * random(units, seed=k + 3)
    return found


def numpy_stack(x, parameters: Mapping[str, np.ndarray], h, c, lengths=None, masks=None, recurrent_masks=None):
    """An LSTM stack, sequence by sequence and step by step.

    Args:
        x: [batch, time, features].
        parameters: canonical; with recurrent_gain and so on the layers are normalised (Ba, Kiros and Hinton 2016, 20 to 22).
        h, c: [layers·directions, batch, units].
        lengths: [batch]; None: all of time.
        masks: by layer from 1 on, factors [batch, time, units·directions] on what the layer below gives it.
        recurrent_masks: [layers·directions, 4, batch, units], factors of h in each gate's recurrent product, at all steps.

    Returns:
        outputs [batch, time, units·directions], 0 past a sequence's end; final h and c.
    """
    batch, time, _ = x.shape
    lengths = [time] * batch if lengths is None else lengths
    names = list(dict.fromkeys(name.rpartition("/")[0] for name in parameters))
    directions = ["forward", "backward"][: 1 + any("backward" in name for name in names)]
    dtype = np.result_type(x, h, c, *parameters.values())
    h, c = h.astype(dtype), c.astype(dtype)
    for k, name in enumerate(names):
        part = {key.rpartition("/")[2]: array for key, array in parameters.items() if key.startswith(f"{name}/")}
        if k % len(directions) == 0:
            inputs = x if not k or masks is None else x * masks[k // len(directions) - 1]
            outputs = []
        own = np.zeros((batch, time, h.shape[2]), dtype)
        for b in range(batch):
            steps = range(lengths[b])
            for t in steps if name.endswith("forward") else reversed(steps):
                seen = None if recurrent_masks is None else recurrent_masks[k, :, b]
                h[k, b], c[k, b] = numpy_step(inputs[b, t], h[k, b], c[k, b], seen, **part)
                own[b, t] = h[k, b]
        outputs.append(own)
        x = np.concatenate(outputs, axis=-1)
    return x, h, c


def numpy_step(
    x, h, c, seen, kernel, recurrent_kernel, bias, recurrent_gain=None, kernel_gain=None, cell_gain=None, cell_bias=None
):  # one sequence: all are vectors but for the two kernels
    if seen is None:
        from_h = h @ recurrent_kernel
    else:
        from_h = np.concatenate(
            [(h * of_gate) @ r for of_gate, r in zip(seen, np.split(recurrent_kernel, 4, 1), strict=True)]
        )
    if recurrent_gain is None:
        z = x @ kernel + from_h + bias
    else:
        z = standardized(from_h) * recurrent_gain + standardized(x @ kernel) * kernel_gain + bias
    i, f, g, o = np.split(z, 4)
    c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
    return sigmoid(o) * np.tanh(c if recurrent_gain is None else standardized(c) * cell_gain + cell_bias), c


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def standardized(x):
    return (x - x.mean()) / np.sqrt(((x - x.mean()) ** 2).mean() + EPSILON)


def along(loss, arrays: Mapping[str, np.ndarray], directions: Mapping[str, np.ndarray]) -> dict[str, float]:
    """The derivative of loss(arrays) along directions[name] in each of the arrays."""
    return {
        name: float(np.imag(loss({**arrays, name: arrays[name] + 1j * STEP * direction})) / STEP)
        for name, direction in directions.items()
    }
