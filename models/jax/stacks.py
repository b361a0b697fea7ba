"""The LSTM stacks that JAX can run: a scan over time per layer, and cuDNN.

A stack holds no weights: it is a function of them, for jax.jit and jax.grad, and knows their layout.
"""

from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import rnn

from models.weights import layouts
from models.weights.stack_spec import StackSpec, canonical_shapes

Array = jax.Array
# Steps written out in one iteration of a loop, by jax.default_backend(). On a GPU an iteration costs launches of its own; on
# a CPU forward and backward pass of 3 layers of 256 units took 166 ms at 1, 187 at 5 and 263 at 10.
UNROLL = {"gpu": 10, "cpu": 1}


class JaxStack:
    """A stack of unidirectional LSTM layers, the output of one being the input of the next.

    A subclass is one way to execute it, and names the layout of its weights.

    Args:
        weights: canonical weights (models/weights/canonical.py), for their shapes; tensors of other parts of a network
        are left alone.
        num_layers: layers in the stack.
        dtype: "float32", "float64", "float16" or "bfloat16", of inputs, states and products. Parameters are float32 at least.
        layer_by_layer: whether there will be dropout between the layers, for a stack that runs otherwise in one call.
    """

    time_major = False  # whether inputs and outputs are [time, batch, features]

    def __init__(
        self, weights: Mapping[str, np.ndarray], num_layers: int, dtype: str = "float32", layer_by_layer: bool = False
    ) -> None:
        input_size, units = (weights[f"lstm_0/forward/{name}"].shape[0] for name in ("kernel", "recurrent_kernel"))
        self.spec = StackSpec("lstm", num_layers, units, input_size)
        self.num_layers, self.units, self.dtype = num_layers, units, jnp.dtype(dtype)

    def from_canonical(self, weights: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """The canonical weights as arrays in the order and the shapes of the parameters."""
        raise NotImplementedError

    def to_canonical(self, arrays: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        """Such arrays (weights, gradients or an optimizer's moments) under canonical names."""
        raise NotImplementedError

    def stage_states(self, states: Sequence) -> tuple[Array, Array]:
        """Canonical states (layers × directions × (h, c)) as `__call__` takes them: h and c [layers, batch, units]."""
        return tuple(jnp.asarray(np.stack([layer[0][k] for layer in states]), self.dtype) for k in range(2))

    def __call__(
        self,
        parameters: Sequence[Array],
        inputs: Array,
        states: tuple[Array, Array],
        dropout: Callable[[Array], Array] | None = None,
    ) -> tuple[Array, tuple[Array, Array]]:
        """Run all layers.

        Args:
            parameters: as `from_canonical` orders them.
            inputs: [batch, time, features]; [time, batch, features] where `time_major`.
            states: initial h and c, each [layers, batch, units].
            dropout: applied between layers (not after the last one), or None.

        Returns:
            outputs of the last layer [batch, time, units] (or time-major), and the final states.
        """
        raise NotImplementedError


class ScanLSTM(JaxStack):
    """One lax.scan over time per layer: jax_scan.

    What does not depend on the step before is one product over all steps: x W before the loop, and after the loop of the
    backward pass dW, dR and dx. JAX's own derivative of a scan takes dR step by step, so `_recur` has its backward pass written
    out, that of models/reference/lstm.py: on a CPU 166 ms a pass against 210, at float16 112 against 209, with dR
    summed in float32.
    """

    time_major = True

    def from_canonical(self, weights):
        return [array for layer in range(self.num_layers) for array in layouts.to_keras(weights, layer)]

    def to_canonical(self, arrays):
        canonical = {}
        for layer in range(self.num_layers):
            canonical |= layouts.from_keras(arrays[3 * layer : 3 * layer + 3], layer)
        return canonical

    def __call__(self, parameters, inputs, states, dropout=None):
        finals = []
        for layer, h, c in zip(range(self.num_layers), *states, strict=True):
            kernel, recurrent_kernel, bias = parameters[3 * layer : 3 * layer + 3]
            if dropout and layer:
                inputs = dropout(inputs)
            z = add_bias(inputs @ kernel.astype(self.dtype), bias)  # [time, batch, 4·units]
            inputs, h, c = _recur(z, recurrent_kernel.astype(self.dtype), h, c)
            finals.append((h, c))
        return inputs, tuple(map(jnp.stack, zip(*finals, strict=True)))


class CudnnLSTM(JaxStack):
    """jax.experimental.rnn.lstm, which is cuDNN's, on an NVIDIA GPU: jax_cudnn.

    A parameter is the flat buffer of one cuDNN call: of the whole stack, or of one layer. cuDNN adds two biases; the canonical
    one is b_ih, and b_hh is 0 without a gradient, so that an optimizer moves the bias once, as in every other stack.

    Args:
        layer_by_layer: one call per layer, so that there can be dropout in between: JAX hands cuDNN a dropout descriptor without
            a random state (jaxlib/gpu/rnn_kernels.cc), so cuDNN's own dropout is none.

    Raises:
        ValueError: another dtype than float32: JAX has this call in no half precision.
    """

    def __init__(self, weights, num_layers, dtype="float32", layer_by_layer=False):
        super().__init__(weights, num_layers, dtype)
        if dtype != "float32":
            raise ValueError(
                f"{dtype} given, expected float32: jax.experimental.rnn has cuDNN's LSTM in no half precision"
            )
        sizes = [self.spec.layer_input_size(layer) for layer in range(num_layers)]
        one_each = [StackSpec("lstm", 1, self.units, size) for size in sizes]
        self.calls = one_each if layer_by_layer else [self.spec]  # a spec per call of cuDNN

    def from_canonical(self, weights):
        flats, first = [], 0
        for spec in self.calls:
            own = {name: weights[_shifted(name, first)] for name in canonical_shapes(spec)}
            flats.append(layouts.to_cudnn_flat(own, spec))
            first += spec.num_layers
        return flats

    def to_canonical(self, arrays):
        canonical, first = {}, 0
        for flat, spec in zip(arrays, self.calls, strict=True):
            own = layouts.from_cudnn_flat(flat, spec)
            canonical |= {_shifted(name, first): array for name, array in own.items()}
            first += spec.num_layers
        return canonical

    def __call__(self, parameters, inputs, states, dropout=None):
        if dropout and len(self.calls) < self.num_layers:
            raise ValueError("dropout between the layers of one cuDNN call given, expected layer_by_layer=True")
        # cuDNN has a switch of its own: its TF32 is on unless the highest precision is asked for
        highest = jax.config.jax_default_matmul_precision == "highest"
        precision = lax.Precision.HIGHEST if highest else lax.Precision.HIGH
        lengths = jnp.full(inputs.shape[:1], inputs.shape[1], jnp.int32)
        finals, first = [], 0
        for flat, spec in zip(parameters, self.calls, strict=True):
            if dropout and first:
                inputs = dropout(inputs)
            start = (state[first : first + spec.num_layers] for state in states)
            inputs, *final = rnn.lstm(
                inputs, *start, _without_second_bias(flat, spec), lengths, spec.input_size, spec.units, spec.num_layers,
                0.0, False, precision,
            )  # fmt: skip
            finals.append(final)
            first += spec.num_layers
        return inputs, tuple(map(jnp.concatenate, zip(*finals, strict=True)))


def _shifted(name: str, layers: int) -> str:
    """A canonical name that many layers higher up."""
    layer, rest = name.removeprefix("lstm_").split("/", 1)
    return f"lstm_{int(layer) + layers}/{rest}"


def _without_second_bias(flat: Array, spec: StackSpec) -> Array:
    """A flat buffer with every b_hh 0, whatever it holds; so its gradient there is 0 too."""
    matrices, biases = jnp.split(flat, [flat.size - 8 * spec.units * spec.num_layers])
    biases = biases.reshape(spec.num_layers, 2, 4 * spec.units) * jnp.array([[1.0], [0.0]], flat.dtype)
    return jnp.concatenate([matrices, biases.ravel()])


def add_bias(product: Array, bias: Array) -> Array:
    """product [..., n] + bias [n], in the product's dtype. The bias' gradient is summed in its own: float16 loses a third."""
    return (product.astype(bias.dtype) + bias).astype(product.dtype)


@jax.custom_vjp
def _recur(z: Array, recurrent_kernel: Array, h: Array, c: Array) -> tuple[Array, Array, Array]:
    """One layer from its inputs' part of the gates on.

    Args:
        z: x W + b [time, batch, 4·units], gates i, f, c, o.
        recurrent_kernel: [units, 4·units].
        h, c: initial states [batch, units].

    Returns:
        outputs [time, batch, units], and the final h and c.
    """
    return _forward(z, recurrent_kernel, h, c)[0]


def _forward(z, recurrent_kernel, h, c):
    def step(state, z):
        h, c = state
        i, f, g, o = jnp.split(z + h @ recurrent_kernel, 4, axis=1)
        i, f, g, o = jax.nn.sigmoid(i), jax.nn.sigmoid(f), jnp.tanh(g), jax.nn.sigmoid(o)
        next_c = f * c + i * g
        next_h = o * jnp.tanh(next_c)
        return (next_h, next_c), (next_h, h, c, next_c, i, f, g, o)

    (last_h, last_c), (outputs, *kept) = lax.scan(step, (h, c), z, unroll=UNROLL[jax.default_backend()])
    return (outputs, last_h, last_c), (recurrent_kernel, *kept)


def _backward(residuals, upstream):
    """Derivatives by z, the recurrent kernel and the initial states."""
    recurrent_kernel, previous_h, *kept = residuals
    d_outputs, dh, dc = upstream

    def step(carry, at_t):
        dh, dc = carry
        d_output, previous_c, c, i, f, g, o = at_t
        tanh_c = jnp.tanh(c)
        dh = dh + d_output
        dc = dc + dh * o * (1 - tanh_c**2)
        dz = [dc * g * i * (1 - i), dc * previous_c * f * (1 - f), dc * i * (1 - g**2), dh * tanh_c * o * (1 - o)]
        dz = jnp.concatenate(dz, axis=1)
        return (dz @ recurrent_kernel.T, dc * f), dz

    unroll = UNROLL[jax.default_backend()]
    (dh, dc), dz = lax.scan(step, (dh, dc), (d_outputs, *kept), reverse=True, unroll=unroll)
    d_kernel = jnp.einsum("tbu,tbz->uz", previous_h, dz)
    return dz, d_kernel, dh, dc


_recur.defvjp(_forward, _backward)
