"""The canonical form of weights and states, and the four ways to start them. NumPy only.

Every implementation loads its weights from this form and hands its weights and gradients back in it:

    "embedding"                              [vocabulary, embedding]
    "lstm_{layer}/{direction}/kernel"           [input, 4*units]      direction: "forward" or "backward"
    "lstm_{layer}/{direction}/recurrent_kernel" [units, 4*units]      gates in Keras' order i, f, c, o
    "lstm_{layer}/{direction}/bias"             [4*units]
    "dense_{k}/kernel" [in, out], "dense_{k}/bias" [out]

A flat dict of C-contiguous float32 arrays. A bidirectional layer concatenates its forward and backward outputs, so the
layer above it has 2*units inputs. States are a list over layers of a list over directions of (h, c), each of
[batch, units].
"""

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np

Shapes = dict[str, tuple[int, ...]]
Weights = dict[str, np.ndarray]
States = list[list[tuple[np.ndarray, np.ndarray]]]


def directions(bidirectional: bool) -> tuple[str, ...]:
    """Names of a layer's directions, in the order in which their outputs are concatenated."""
    return ("forward", "backward") if bidirectional else ("forward",)


def lstm_shapes(input_size: int, units: int, num_layers: int, bidirectional: bool = False) -> Shapes:
    """Shapes of an LSTM stack's tensors, from the lowest layer up."""
    shapes: Shapes = {}
    for layer in range(num_layers):
        for direction in directions(bidirectional):
            name = f"lstm_{layer}/{direction}"
            shapes[f"{name}/kernel"] = (input_size, 4 * units)
            shapes[f"{name}/recurrent_kernel"] = (units, 4 * units)
            shapes[f"{name}/bias"] = (4 * units,)
        input_size = units * len(directions(bidirectional))
    return shapes


def language_model_shapes(vocabulary: int, embedding: int, units: int, num_layers: int) -> Shapes:
    """Embedding, LSTM stack, and the projection to the vocabulary (dense_0)."""
    return {
        "embedding": (vocabulary, embedding),
        **lstm_shapes(embedding, units, num_layers),
        "dense_0/kernel": (units, vocabulary),
        "dense_0/bias": (vocabulary,),
    }


def classifier_shapes(
    input_size: int,
    units: int,
    num_layers: int,
    dense: Sequence[int] = (32,),
    num_classes: int = 10,
    bidirectional: bool = False,
) -> Shapes:
    """LSTM stack, hidden dense layers of the given widths, and the dense layer that gives the logits."""
    shapes = lstm_shapes(input_size, units, num_layers, bidirectional)
    width = units * len(directions(bidirectional))
    for k, size in enumerate((*dense, num_classes)):
        shapes[f"dense_{k}/kernel"] = (width, size)
        shapes[f"dense_{k}/bias"] = (size,)
        width = size
    return shapes


def stack_size(weights: Mapping[str, object]) -> tuple[int, bool]:
    """(num_layers, bidirectional) of the LSTM stack that these weights or shapes describe."""
    layers = {name.split("/")[0] for name in weights if name.startswith("lstm_")}
    return len(layers), "lstm_0/backward/kernel" in weights


def large_random(shapes: Shapes, seed: int) -> Weights:
    """The proof's starting point: weights large enough that every gate, bias and state matters in every output.

    Kernels are uniform in ±sqrt(3/fan_in) (standard deviation 1/sqrt(fan_in)), the embedding is uniform with standard
    deviation 1, biases are uniform in ±0.5. The same bytes on every machine, whatever the order of `shapes`.
    """

    def tensor(name: str, shape: tuple[int, ...]) -> np.ndarray:
        if name.endswith("bias"):
            return _uniform(name, shape, 0.5, seed)
        return _uniform(name, shape, np.sqrt(3.0 / (1 if name == "embedding" else shape[0])), seed)

    return {name: tensor(name, shape) for name, shape in shapes.items()}


def uniform(shapes: Shapes, scale: float, seed: int) -> Weights:
    """PTB's protocol: everything uniform in ±scale, biases 0. The same bytes on every machine."""
    return {
        name: np.zeros(shape, np.float32) if name.endswith("bias") else _uniform(name, shape, scale, seed)
        for name, shape in shapes.items()
    }


def keras_default(shapes: Shapes, seed: int) -> Weights:
    """Keras' default initialisers: what a user gets who sets nothing.

    LSTM and Dense kernels glorot_uniform over the whole [in, out] matrix, recurrent kernels orthogonal as one
    [units, 4*units] matrix, biases 0 but for the forget gate's 1, embedding uniform in ±0.05. The orthogonal
    matrices come from LAPACK, so their last bits may differ between machines; all other tensors are the same bytes.
    """

    def tensor(name: str, shape: tuple[int, ...]) -> np.ndarray:
        if name == "embedding":
            return _uniform(name, shape, 0.05, seed)
        if name.endswith("recurrent_kernel"):
            return _orthogonal(name, shape, seed)
        if name.endswith("kernel"):
            return _uniform(name, shape, np.sqrt(6.0 / sum(shape)), seed)
        bias = np.zeros(shape, np.float32)
        if name.startswith("lstm_"):
            units = shape[0] // 4
            bias[units : 2 * units] = 1.0  # unit_forget_bias
        return bias

    return {name: tensor(name, shape) for name, shape in shapes.items()}


def random_states(num_layers: int, batch: int, units: int, seed: int, bidirectional: bool = False) -> States:
    """Non-zero states: h uniform in ±0.5, c uniform in ±1; float32, the same bytes on every machine."""
    return [
        [
            (
                _uniform(f"states/{layer}/{direction}/h", (batch, units), 0.5, seed),
                _uniform(f"states/{layer}/{direction}/c", (batch, units), 1.0, seed),
            )
            for direction in directions(bidirectional)
        ]
        for layer in range(num_layers)
    ]


def zero_states(num_layers: int, batch: int, units: int, bidirectional: bool = False) -> States:
    """States of zeros, float32."""
    return [
        [
            (np.zeros((batch, units), np.float32), np.zeros((batch, units), np.float32))
            for _ in directions(bidirectional)
        ]
        for _ in range(num_layers)
    ]


def check(weights: Mapping[str, np.ndarray], shapes: Shapes) -> None:
    """Raise ValueError, naming the tensor, unless `weights` is the canonical form of `shapes` and finite."""
    for name, shape in shapes.items():
        if name not in weights:
            raise ValueError(f"weights: {name} is missing, expected float32 {list(shape)}; given: {', '.join(weights)}")
        array = weights[name]
        if not isinstance(array, np.ndarray):
            raise ValueError(f"weights: {name} is a {type(array).__name__}, expected a NumPy array (convert it first)")
        if array.shape != tuple(shape) or array.dtype != np.float32:
            raise ValueError(f"weights: {name} is {array.dtype} {list(array.shape)}, expected float32 {list(shape)}")
        if not array.flags.c_contiguous:
            raise ValueError(f"weights: {name} is a strided view, expected C-contiguous (np.ascontiguousarray)")
        if not np.isfinite(array).all():
            raise ValueError(f"weights: {name} holds NaN or infinity, expected finite numbers only")
    for name in weights:
        if name not in shapes:
            raise ValueError(f"weights: {name} was given, expected only {', '.join(shapes)}")


def _generator(name: str, seed: int) -> np.random.Generator:
    """A tensor's own stream, from the seed and its name: tensors may come and go without changing the others."""
    child = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, child])))


def _uniform(name: str, shape: tuple[int, ...], limit: float, seed: int) -> np.ndarray:
    # 2r - 1 is exact and one multiplication rounds: no libm, nothing that a compiler may contract.
    return ((2.0 * _generator(name, seed).random(shape) - 1.0) * limit).astype(np.float32)


def _orthogonal(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    rows, columns = shape
    q, r = np.linalg.qr(_generator(name, seed).standard_normal((max(shape), min(shape))))
    q *= np.sign(np.diag(r))
    return np.ascontiguousarray(q.T if rows < columns else q, dtype=np.float32)
