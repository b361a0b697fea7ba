"""The canonical form of a recurrent stack's weights, turned into each framework's own layout and back. NumPy only.

A layout is a pair of functions, `to_<layout>` and `from_<layout>`. They permute, transpose, stack and split, in any float
dtype, so the way there and back gives the same bits; the double bias (below) is the one place where numbers are added.

u: units; I: features that a layer reads; G: gates, side by side along the last axis of a canonical tensor.

| mode               | G | gates: canonical, Keras | gates: cuDNN, PyTorch | as their manuals write them             |
|--------------------|---|-------------------------|-----------------------|-----------------------------------------|
| lstm               | 4 | i, f, c, o              | i, f, c, o            | cuDNN i, f, c', o; PyTorch i, f, g, o   |
| gru                | 3 | z, r, h                 | r, z, h               | cuDNN r, i, h'; PyTorch r, z, n         |
| rnn_tanh, rnn_relu | 1 | no name                 | no name               |                                         |

One layer, `to_<layout>(weights, layer, …)`:

| layout        | arrays                                                                        | gates of lstm |
|---------------|-------------------------------------------------------------------------------|---------------|
| canonical     | kernel [I, G·u], recurrent_kernel [u, G·u], bias [G·u] (gru: [2, 3u])         | i, f, c, o    |
| Keras         | the same; Bidirectional: the forward three, then the backward                 | i, f, c, o    |
| LSTMBlockCell | w [I + u, 4u], b [4u]                                                         | i, c, f, o    |
| BlockLSTMV2   | w [I + u, 4u], b [4u]                                                         | i, f, c, o    |
| CuDNNLSTM     | kernel [I, 4u], recurrent_kernel [u, 4u], bias [8u]: Keras 2's layer, only read | i, f, c, o  |

CuDNNLSTM and CuDNNGRU hold in each gate's block [I, u] the numbers of cuDNN's matrix [u, I] row by row, and in the bias the
b_ih of all gates, then the b_hh (both below). The block ops' orders are those which the ops of TensorFlow 2.21 show when they
run. BlockLSTM, the first version, has LSTMBlockCell's.

A whole stack, `to_<layout>(weights, spec)`: one pseudo-layer after the other, layer 0 forward, layer 0 backward, layer 1
forward, …; number = layer · directions + direction. I is input_size in layer 0 and directions · u above. A pseudo-layer has

    W_ih [G·u, I] = kernel'              multiplies the input x_t         b_ih [G·u]  is added to W_ih x_t
    W_hh [G·u, u] = recurrent_kernel'    multiplies the state h_{t-1}     b_hh [G·u]  is added to W_hh h_{t-1}

where ' transposes and the gates, now one block of u rows each, are in cuDNN's order. cuDNN takes the blocks one by one and
calls them W_i, …, R_i, …, b_Wi, …, b_Ri, …: W_ih is the W's on top of each other, W_hh the R's, b_ih the b_W's, b_hh the b_R's.

| layout     | arrays                                                                                             |
|------------|----------------------------------------------------------------------------------------------------|
| cuDNN list | matrices: of each pseudo-layer the blocks W [u, I], then the R [u, u]; biases: the b_W [u], then the b_R [u] |
| cuDNN flat | one vector: all matrices of all pseudo-layers in the list's order, each row by row; then all biases |
| PyTorch    | weight_ih_l0 = W_ih, weight_hh_l0 = W_hh, bias_ih_l0 = b_ih, bias_hh_l0 = b_hh; backward: …_l0_reverse |

So the list has 8 matrices and 8 biases per pseudo-layer for lstm, 6 and 6 for gru, 2 and 2 for rnn; `cudnn_matrices` and
`cudnn_biases` (models/weights/stack_spec.py) name each with its shape.

Double bias. In gru both count, since the reset gate multiplies W_hh h + b_hh: bias[0] is b_ih, bias[1] is b_hh. In the other
modes only their sum does, and that is the canonical bias: it becomes b_ih, with b_hh = 0, and comes back as b_ih + b_hh.
Gradients take the same ways but here: b_ih and b_hh each have the canonical bias's gradient, so set b_hh's to 0 before.

Skip input, a mode of cuDNN: the input, of u features, enters every gate of layer 0 as it is. That layer has no canonical
kernel, arrays [u, 0] for its W in the list, and nothing in the flat buffer. Keras and PyTorch have no such mode, so there it
is a kernel of one identity matrix per gate; no other kernel is taken back.

Sources: cuDNN's reference for cudnnRNNMode_t and cudnnGetRNNWeightParams; PyTorch's for LSTM, GRU and RNN; Keras' for GRU.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from models.weights.canonical import Weights, directions
from models.weights.stack_spec import (
    CANONICAL_GATES,
    CUDNN_GATES,
    KERAS_LAYERS,
    StackSpec,
    canonical_shapes,
    check_arrays,
    check_lists,
    check_mode,
    check_names,
    cudnn_biases,
    cudnn_matrices,
    cudnn_size,
    torch_shapes,
)

PARTS = ("kernel", "recurrent_kernel", "bias")
LSTM_BLOCK_CELL_GATES = "icfo"
BLOCK_LSTM_V2_GATES = "ifco"


def to_cudnn_list(weights: Mapping[str, np.ndarray], spec: StackSpec) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """(matrices, biases) in the order and the shapes of `cudnn_matrices` and `cudnn_biases`.

    Raises:
        ValueError: `weights` are not the tensors of `canonical_shapes`, all in one float dtype.
    """
    gates = len(CUDNN_GATES[spec.mode])
    pseudo_layers = _to_pseudo_layers(weights, spec, lambda recurrent_kernel: recurrent_kernel[:0])
    matrices = [block for w_ih, w_hh, _, _ in pseudo_layers for w in (w_ih, w_hh) for block in np.split(w, gates)]
    biases = [block for _, _, b_ih, b_hh in pseudo_layers for b in (b_ih, b_hh) for block in np.split(b, gates)]
    return matrices, biases


def from_cudnn_list(matrices: Sequence[np.ndarray], biases: Sequence[np.ndarray], spec: StackSpec) -> Weights:
    """The canonical tensors from cuDNN's list.

    Raises:
        ValueError: another number of arrays, or one of another shape or dtype, named by its pseudo-layer and matrix.
    """
    matrices, biases = check_lists(matrices, biases, spec)
    gates = len(CUDNN_GATES[spec.mode])
    w, b = (  # W_ih, W_hh, W_ih, … and b_ih, b_hh, b_ih, …
        [np.concatenate(arrays[k : k + gates]) for k in range(0, len(arrays), gates)] for arrays in (matrices, biases)
    )
    return _from_pseudo_layers(zip(w[::2], w[1::2], b[::2], b[1::2], strict=True), spec)


def cudnn_list_to_flat(matrices: Sequence[np.ndarray], biases: Sequence[np.ndarray], spec: StackSpec) -> np.ndarray:
    """cuDNN's flat buffer [cudnn_size(spec)] from its list. Raises as `from_cudnn_list`."""
    matrices, biases = check_lists(matrices, biases, spec)
    return np.concatenate([array.ravel() for array in matrices + biases])


def cudnn_flat_to_list(flat: np.ndarray, spec: StackSpec) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """(matrices, biases), cuDNN's list from its flat buffer.

    Raises:
        ValueError: `flat` is not a vector of cudnn_size(spec) floating point numbers.
    """
    flat, size = np.array(flat), cudnn_size(spec)
    matrices, biases = cudnn_matrices(spec), cudnn_biases(spec)
    ends = np.cumsum([int(np.prod(shape)) for _, shape in matrices + biases])
    if flat.ndim == 1 and flat.size < size:
        k = int(np.searchsorted(ends, flat.size, side="right"))
        name, _ = (matrices + biases)[k]
        pseudo_layer = k % len(matrices) * spec.num_pseudo_layers // len(matrices)
        raise ValueError(f"flat is [{flat.size}], expected [{size}]: cut short in pseudo-layer {pseudo_layer}, {name}")
    [flat] = check_arrays([("flat", flat, (size,))])
    arrays = [
        piece.reshape(shape) for piece, (_, shape) in zip(np.split(flat, ends[:-1]), matrices + biases, strict=True)
    ]
    return arrays[: len(matrices)], arrays[len(matrices) :]


def to_cudnn_flat(weights: Mapping[str, np.ndarray], spec: StackSpec) -> np.ndarray:
    """cuDNN's flat buffer [cudnn_size(spec)]. Raises as `to_cudnn_list`."""
    return cudnn_list_to_flat(*to_cudnn_list(weights, spec), spec)


def from_cudnn_flat(flat: np.ndarray, spec: StackSpec) -> Weights:
    """The canonical tensors from cuDNN's flat buffer. Raises as `cudnn_flat_to_list`."""
    return from_cudnn_list(*cudnn_flat_to_list(flat, spec), spec)


def to_torch(weights: Mapping[str, np.ndarray], spec: StackSpec) -> Weights:
    """The arrays of torch.nn.LSTM, GRU or RNN under the names of its state_dict. Raises as `to_cudnn_list`."""
    pseudo_layers = _to_pseudo_layers(weights, spec, _identities)
    return dict(zip(torch_shapes(spec), (array for arrays in pseudo_layers for array in arrays), strict=True))


def from_torch(arrays: Mapping[str, np.ndarray], spec: StackSpec) -> Weights:
    """The canonical tensors from the arrays of torch.nn.LSTM, GRU or RNN, named as in its state_dict.

    Raises:
        ValueError: a name that is missing or does not belong (bias=False, proj_size), another shape or dtype, or with
            skip_input a weight_ih_l0 that is not made of identity matrices.
    """
    arrays = check_names("arrays", arrays, torch_shapes(spec))
    names = list(arrays)
    if spec.skip_input:
        for k in range(0, 4 * len(spec.directions), 4):
            _check_identities(f"arrays: {names[k]}", arrays[names[k]].T, arrays[names[k + 1]].T)
    fours = ([arrays[name] for name in names[k : k + 4]] for k in range(0, len(names), 4))
    return _from_pseudo_layers(fours, spec)


def to_keras(
    weights: Mapping[str, np.ndarray],
    layer: int,
    bidirectional: bool = False,
    *,
    mode: str = "lstm",
    skip_input: bool = False,
) -> list[np.ndarray]:
    """One layer's arrays in the order of its `get_weights()`.

    Args:
        weights: canonical; all else than this layer's tensors is ignored.
        bidirectional: for Bidirectional(LSTM) and so on, otherwise the forward layer alone.
        mode: "lstm" for LSTM, "gru" for GRU(reset_after=True), "rnn_tanh" and "rnn_relu" for SimpleRNN with that activation.
        skip_input: whether layer 0's kernel, which is not in `weights`, is to be made of identity matrices.

    Raises:
        ValueError: a tensor is missing, or an unknown mode.
    """
    names = _names(layer, bidirectional, mode)
    skipped = dict(zip(names[::3], names[1::3], strict=True)) if skip_input and layer == 0 else {}
    for name in names:
        if name not in weights and name not in skipped:
            raise ValueError(f"weights: {name} is missing; given: {', '.join(weights)}")
    return [_identities(weights[skipped[name]]) if name in skipped else weights[name] for name in names]


def from_keras(
    arrays: Sequence[np.ndarray],
    layer: int,
    bidirectional: bool = False,
    *,
    mode: str = "lstm",
    skip_input: bool = False,
) -> Weights:
    """The canonical tensors of one layer from Keras' list.

    Raises:
        ValueError: another number of arrays than such a layer has, shapes that do not belong together, or with skip_input a
            kernel of layer 0 that is not made of identity matrices.
    """
    names = _names(layer, bidirectional, mode)
    if len(arrays) != len(names):
        kind = f"Bidirectional({KERAS_LAYERS[mode]})" if bidirectional else KERAS_LAYERS[mode]
        raise ValueError(
            f"layer {layer}: {len(arrays)} arrays given, expected {kind}'s {len(names)}: {', '.join(names)}"
        )
    weights = {name: np.ascontiguousarray(array) for name, array in zip(names, arrays, strict=True)}
    input_size, units = weights[names[0]].shape[0], weights[names[1]].shape[0]
    width = len(CANONICAL_GATES[mode]) * units
    shapes = [(input_size, width), (units, width), (2, width) if mode == "gru" else (width,)]
    for k, (name, array) in enumerate(weights.items()):
        if array.shape != shapes[k % 3]:
            reset_before = mode == "gru" and k % 3 == 2 and array.shape == (width,)
            hint = " (GRU(reset_after=False) has no counterpart)" if reset_before else ""
            raise ValueError(f"layer {layer}: {name} is {list(array.shape)}, expected {list(shapes[k % 3])}{hint}")
    if skip_input and layer == 0:
        for kernel, recurrent_kernel in zip(names[::3], names[1::3], strict=True):
            _check_identities(kernel, weights.pop(kernel), weights[recurrent_kernel])
    return weights


def from_keras_cudnn(arrays: Sequence[np.ndarray], layer: int, mode: str = "lstm") -> Weights:
    """The canonical tensors of one forward layer from the three arrays of Keras 2's CuDNNLSTM (mode "gru": CuDNNGRU).

    Raises:
        ValueError: another mode, or arrays that are not such a layer's [I, G·u], [u, G·u] and [2·G·u].
    """
    if mode not in ("lstm", "gru"):
        raise ValueError(f"mode: {mode!r} given, expected 'lstm' or 'gru': Keras had no other such layer")
    gates = len(CANONICAL_GATES[mode])
    shapes = [np.shape(array) for array in arrays]
    units = shapes[1][0] if len(shapes) == 3 and len(shapes[1]) == 2 else 0
    if (
        not units
        or len(shapes[0]) != 2
        or shapes != [(shapes[0][0], gates * units), (units, gates * units), (2 * gates * units,)]
    ):
        raise ValueError(
            f"layer {layer}: arrays {', '.join(str(list(shape)) for shape in shapes)} given, expected kernel "
            f"[input, {gates}*units], recurrent_kernel [units, {gates}*units] and bias [{2 * gates}*units]"
        )

    def transposed(matrix: np.ndarray) -> np.ndarray:
        blocks = np.split(np.asarray(matrix), gates, axis=1)
        return np.concatenate([np.ascontiguousarray(block).reshape(units, -1).T for block in blocks], axis=1)

    biases = np.asarray(arrays[2]).reshape(2, gates * units)
    bias = biases if mode == "gru" else biases.sum(axis=0)
    return from_keras([*map(transposed, arrays[:2]), bias], layer, mode=mode)


def to_block(
    weights: Mapping[str, np.ndarray], layer: int, gates: str = BLOCK_LSTM_V2_GATES
) -> tuple[np.ndarray, np.ndarray]:
    """(w [input + units, 4*units], b [4*units]) of TensorFlow's BlockLSTMV2 op, or of LSTMBlockCell by its gates."""
    kernel, recurrent_kernel, bias = to_keras(weights, layer)
    w = np.concatenate([kernel, recurrent_kernel])  # the ops multiply [x, h]
    return reorder_gates(w, CANONICAL_GATES["lstm"], gates), reorder_gates(bias, CANONICAL_GATES["lstm"], gates)


def from_block(arrays: Sequence[np.ndarray], layer: int, gates: str = BLOCK_LSTM_V2_GATES) -> Weights:
    """The canonical tensors of one forward layer from the w and b of such an op; ValueError for other shapes."""
    w, b = arrays
    units = b.shape[0] // 4
    if w.ndim != 2 or b.ndim != 1 or w.shape[1] != b.shape[0] or w.shape[0] <= units:
        raise ValueError(
            f"layer {layer}: w {list(w.shape)} and b {list(b.shape)} given, "
            "expected [input + units, 4*units] and [4*units]"
        )
    w, b = (reorder_gates(array, gates, CANONICAL_GATES["lstm"]) for array in (w, b))
    return from_keras([w[:-units], w[-units:], b], layer)


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


def _names(layer: int, bidirectional: bool, mode: str = "lstm") -> list[str]:
    check_mode(mode)
    return [f"{mode}_{layer}/{direction}/{part}" for direction in directions(bidirectional) for part in PARTS]


def _to_pseudo_layers(
    weights: Mapping[str, np.ndarray], spec: StackSpec, skipped: Callable[[np.ndarray], np.ndarray]
) -> list[list[np.ndarray]]:
    """New arrays W_ih, W_hh, b_ih, b_hh of each pseudo-layer; `skipped` makes layer 0's kernel under skip_input."""
    weights = check_names("weights", weights, canonical_shapes(spec))
    order = CANONICAL_GATES[spec.mode], CUDNN_GATES[spec.mode]
    pseudo_layers = []
    for layer, direction in spec.pseudo_layers:
        name = f"{spec.mode}_{layer}/{direction}"
        recurrent_kernel, bias = weights[f"{name}/recurrent_kernel"], weights[f"{name}/bias"]
        kernel = weights[f"{name}/kernel"] if spec.has_kernel(layer) else skipped(recurrent_kernel)
        b_ih, b_hh = bias if spec.mode == "gru" else (bias, np.zeros_like(bias))
        arrays = [reorder_gates(array, *order).T for array in (kernel, recurrent_kernel, b_ih, b_hh)]
        pseudo_layers.append([np.array(array, order="C") for array in arrays])
    return pseudo_layers


def _from_pseudo_layers(pseudo_layers: Iterable[Sequence[np.ndarray]], spec: StackSpec) -> Weights:
    """The canonical tensors, as new arrays, from W_ih, W_hh, b_ih, b_hh of each pseudo-layer."""
    order = CUDNN_GATES[spec.mode], CANONICAL_GATES[spec.mode]
    weights: Weights = {}
    for (layer, direction), arrays in zip(spec.pseudo_layers, pseudo_layers, strict=True):
        name = f"{spec.mode}_{layer}/{direction}"
        kernel, recurrent_kernel, b_ih, b_hh = (np.array(reorder_gates(a.T, *order), order="C") for a in arrays)
        if spec.has_kernel(layer):
            weights[f"{name}/kernel"] = kernel
        weights[f"{name}/recurrent_kernel"] = recurrent_kernel
        if spec.mode == "gru":
            weights[f"{name}/bias"] = np.stack([b_ih, b_hh])
        else:  # nothing is added where b_hh is 0: -0.0 would become 0.0
            weights[f"{name}/bias"] = np.add(b_ih, b_hh, out=b_ih, where=b_hh != 0)
    return weights


def _identities(recurrent_kernel: np.ndarray) -> np.ndarray:
    """The kernel [units, gates*units] that lets an input through as it is."""
    units, width = recurrent_kernel.shape
    return np.tile(np.eye(units, dtype=recurrent_kernel.dtype), (1, width // units))


def _check_identities(name: str, kernel: np.ndarray, recurrent_kernel: np.ndarray) -> None:
    if not np.array_equal(kernel, _identities(recurrent_kernel)):
        raise ValueError(f"{name} is a kernel of its own, expected with skip_input one identity matrix per gate")
