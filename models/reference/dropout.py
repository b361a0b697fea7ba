"""Dropout in the reference: masks drawn by NumPy, and weights by which a loss tells how much was dropped, and where."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from models.weights.canonical import Weights

# Losses of a row, and of the reference, that are compared. A classifier has more: its batches are smaller, and its rates lower.
OF_LANGUAGE_MODEL, OF_CLASSIFIER = (48, 32), (64, 128)


class Rates(NamedTuple):
    """Where a network drops, and by which rate; 0: not there."""

    inputs: float = 0.0  # of the stack: a language model's embedded words
    lstm: Sequence[float] = ()  # after each LSTM layer, in order; layers beyond have none
    dense: float = 0.0  # after every relu layer

    def after_layer(self, layer: int) -> float:
        return self.lstm[layer] if layer < len(self.lstm) else 0.0


class Masks:
    """Dropout by these rates: an element is 0 with the probability `rate`, else divided by 1 − rate.

    Every array gets a mask of its own, with a number of its own for every element.
    """

    def __init__(self, rates: Rates, generator: np.random.Generator | None = None) -> None:
        self._rates, self._generator = rates, generator

    def on_inputs(self, x: np.ndarray) -> np.ndarray:
        return self._drop(x, self._rates.inputs)

    def after_layer(self, layer: int, x: np.ndarray) -> np.ndarray:
        return self._drop(x, self._rates.after_layer(layer))

    def after_relu(self, x: np.ndarray) -> np.ndarray:
        return self._drop(x, self._rates.dense)

    def _drop(self, x: np.ndarray, rate: float) -> np.ndarray:
        if not rate:
            return x
        kept = self._generator.random(x.shape, np.float32) >= rate
        return np.where(kept, x / (1.0 - rate), 0.0).astype(x.dtype)


NO_MASKS = Masks(Rates())


def losses_of(loss: Callable[[Masks], float], rates: Rates, draws: int) -> np.ndarray:
    """Losses [draws] of forward passes, each with masks of its own."""
    generator = np.random.default_rng(1)
    return np.array([loss(Masks(rates, generator)) for _ in range(draws)])


# From large random weights a loss hardly depends on the rate: it comes from sums over many elements, whose mean dropout leaves
# as it is. Here every unit reads one element of a mask, by a nonlinearity: a tanh, a relu, or the softmax's exponential. What
# enters a mask is the same for all sequences and steps, so a mask that these share shows in the deviation of the losses.
# Arguments of a gate (0.9997, 0.0003, and 0.73 of a forget gate, 0.27 of its input gate), of a candidate whose input was kept,
# before the division by 1 − rate (its tanh begins to saturate), and of the softmax, likewise.
OPEN, SHUT, SLOW = 8.0, -8.0, 1.0
CANDIDATE = 1.5
WORD, CLASS = 3.0, 6.0
OUTPUT = float(np.tanh(np.tanh(CANDIDATE)))  # of a unit with that candidate


def language_model_weights(weights: Weights, targets: np.ndarray) -> Weights:
    """Weights of a language model whose loss tells the rates of all places. Its states have no influence.

    Args:
        weights: canonical, for the shapes.
        targets: of the batch. These words' logits stay 0 (of half the vocabulary at most): their own masks would be noise.
    """
    found = {name: np.zeros_like(array) for name, array in weights.items()}
    found["embedding"] += 1.0
    for name, array in found.items():
        if name.startswith("lstm_"):
            lowest = name.startswith("lstm_0/")
            _set_lstm(name, array, (OPEN, SHUT), CANDIDATE / (1.0 if lowest else OUTPUT), 0.0)
    kernel = found["dense_0/kernel"]
    words = np.arange(kernel.shape[1])
    words = np.setdiff1d(words, np.unique(targets)[: len(words) // 2])
    _read(kernel, WORD / OUTPUT, np.arange(len(words)), words)
    return found


def classifier_weights(weights: Weights, labels: np.ndarray) -> list[Weights]:
    """Weights of a classifier whose loss shows the rates of all places but the last one, and of the last one.

    The last one lies before the logits. A logit is linear in what it reads, so there the loss has to show which elements are
    dropped, which is a noise that the other rates are seen without. An LSTM averages over some steps, since only its last output
    is read.

    Args:
        weights: canonical, for the shapes.
        labels: of the batch. The rarest class has the one logit that is not 0 in the weights for all places but the last.
    """
    last = max(name for name in weights if name.startswith("dense_") and name.endswith("/kernel"))
    rarest = int(np.bincount(labels, minlength=weights[last].shape[1]).argmin())
    both = []
    for of_last in (False, True):
        found = {name: np.zeros_like(array) for name, array in weights.items()}
        for name, array in found.items():
            if name.startswith("lstm_"):
                constant = name.startswith("lstm_0/") or of_last  # whatever its inputs are
                scale, bias = (0.0, CANDIDATE) if constant else (CANDIDATE / OUTPUT, 0.0)
                _set_lstm(name, array, (-SLOW, SLOW), scale, bias)
            elif name == last and of_last:
                _read(array, CLASS / (1.0 if last > "dense_0/kernel" else OUTPUT))
            elif name == last:
                array[:, rarest] = CLASS / len(array)
            elif name.endswith("/kernel") and not of_last:
                _read(array, 2.0 / OUTPUT)
            elif name != last.replace("kernel", "bias") and name.endswith("/bias"):
                array += 1.0 if of_last else -1.0  # a relu that is always on, or off where its input was dropped
        both.append(found)
    return both


def _set_lstm(name: str, array: np.ndarray, gates: tuple[float, float], scale: float, bias: float) -> None:
    """One tensor of a layer: input and forget gates from their biases alone, candidates from `scale` times one input each."""
    units = array.shape[-1] // 4
    if name.endswith("/bias"):
        array[:] = np.repeat([*gates, bias, OPEN], units)
    elif not name.endswith("/recurrent_kernel"):
        first = units if "/backward/" in name else 0  # together they read all inputs of a bidirectional layer
        _read(array[:, 2 * units : 3 * units], scale, np.arange(first, first + units))


def _read(
    kernel: np.ndarray, scale: float, inputs: np.ndarray | None = None, columns: np.ndarray | None = None
) -> None:
    """Let each of `columns` (None: all) read one of `inputs` (None: in turn), modulo their number."""
    columns = np.arange(kernel.shape[1]) if columns is None else columns
    inputs = np.arange(len(columns)) if inputs is None else inputs
    kernel[inputs % len(kernel), columns] = scale
