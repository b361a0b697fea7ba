"""The canonical form of an LSTM layer's weights, turned into each framework's own layout and back. NumPy only.

A layout is a pair of functions, `to_<layout>(weights, layer, …)` and `from_<layout>(arrays, layer, …)`, inverse to each
other. Both only permute, stack and split, so gradients go through the same functions as weights, in any dtype.

| layout         | arrays                                                        | gates      |
|----------------|---------------------------------------------------------------|------------|
| canonical      | kernel [input, 4u], recurrent_kernel [units, 4u], bias [4u]   | i, f, c, o |
| Keras          | the same; Bidirectional: the forward three, then the backward | i, f, c, o |
| LSTMBlockCell  | w [input + units, 4u], b [4u]                                 | i, c, f, o |
| BlockLSTMV2    | w [input + units, 4u], b [4u]                                 | i, f, c, o |

The block ops' orders are those which the ops of TensorFlow 2.21 show when they run. BlockLSTM, the first version, has
LSTMBlockCell's.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from models.weights import Weights, directions

PARTS = ("kernel", "recurrent_kernel", "bias")
CANONICAL_GATES = "ifco"
LSTM_BLOCK_CELL_GATES = "icfo"
BLOCK_LSTM_V2_GATES = "ifco"


def to_keras(weights: Mapping[str, np.ndarray], layer: int, bidirectional: bool = False) -> list[np.ndarray]:
    """One layer's arrays in the order of `LSTM.get_weights()` (or of `Bidirectional(LSTM).get_weights()`)."""
    return [weights[name] for name in _names(layer, bidirectional)]


def from_keras(arrays: Sequence[np.ndarray], layer: int, bidirectional: bool = False) -> Weights:
    """The canonical tensors of one layer from Keras' list.

    Raises:
        ValueError: another number of arrays than such a layer has.
    """
    names = _names(layer, bidirectional)
    if len(arrays) != len(names):
        kind = "Bidirectional(LSTM)" if bidirectional else "LSTM"
        raise ValueError(
            f"layer {layer}: {len(arrays)} arrays given, expected {kind}'s {len(names)}: {', '.join(names)}"
        )
    return {name: np.ascontiguousarray(array) for name, array in zip(names, arrays, strict=True)}


def to_lstm_block_cell(weights: Mapping[str, np.ndarray], layer: int) -> tuple[np.ndarray, np.ndarray]:
    """(w [input + units, 4*units], b [4*units]) of TensorFlow's LSTMBlockCell op, for a forward layer."""
    return _to_block(weights, layer, LSTM_BLOCK_CELL_GATES)


def from_lstm_block_cell(w: np.ndarray, b: np.ndarray, layer: int) -> Weights:
    """The canonical tensors of one forward layer from LSTMBlockCell's two."""
    return _from_block(w, b, layer, LSTM_BLOCK_CELL_GATES)


def to_block_lstm_v2(weights: Mapping[str, np.ndarray], layer: int) -> tuple[np.ndarray, np.ndarray]:
    """(w [input + units, 4*units], b [4*units]) of TensorFlow's BlockLSTMV2 op, for a forward layer."""
    return _to_block(weights, layer, BLOCK_LSTM_V2_GATES)


def from_block_lstm_v2(w: np.ndarray, b: np.ndarray, layer: int) -> Weights:
    """The canonical tensors of one forward layer from BlockLSTMV2's two."""
    return _from_block(w, b, layer, BLOCK_LSTM_V2_GATES)


def reorder_gates(array: np.ndarray, given: str, wanted: str) -> np.ndarray:
    """Permute the gate blocks along the last axis, [..., gates*units], from the order `given` to `wanted`.

    Raises:
        ValueError: the last axis does not divide into that many gates, or the orders name different gates.
    """
    if sorted(given) != sorted(wanted) or len(set(given)) != len(given):
        raise ValueError(f"gates {given!r} cannot be put in the order {wanted!r}: expected the same letters, each once")
    if array.shape[-1] % len(given):
        raise ValueError(f"an array of shape {list(array.shape)} does not divide into the {len(given)} gates {given!r}")
    if given == wanted:
        return np.ascontiguousarray(array)
    blocks = dict(zip(given, np.split(array, len(given), axis=-1), strict=True))
    return np.concatenate([blocks[gate] for gate in wanted], axis=-1)


def _names(layer: int, bidirectional: bool) -> list[str]:
    return [f"lstm_{layer}/{direction}/{part}" for direction in directions(bidirectional) for part in PARTS]


def _to_block(weights: Mapping[str, np.ndarray], layer: int, gates: str) -> tuple[np.ndarray, np.ndarray]:
    kernel, recurrent_kernel, bias = to_keras(weights, layer)
    w = np.concatenate([kernel, recurrent_kernel])  # the ops multiply [x, h]
    return reorder_gates(w, CANONICAL_GATES, gates), reorder_gates(bias, CANONICAL_GATES, gates)


def _from_block(w: np.ndarray, b: np.ndarray, layer: int, gates: str) -> Weights:
    units = b.shape[0] // 4
    if w.ndim != 2 or b.ndim != 1 or w.shape[1] != b.shape[0] or w.shape[0] <= units:
        raise ValueError(
            f"layer {layer}: w {list(w.shape)} and b {list(b.shape)} given, "
            "expected [input + units, 4*units] and [4*units]"
        )
    w = reorder_gates(w, gates, CANONICAL_GATES)
    return from_keras([w[:-units], w[-units:], reorder_gates(b, gates, CANONICAL_GATES)], layer)
