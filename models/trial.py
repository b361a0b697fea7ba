"""What the language models of all frameworks have in common outside of their steps: names, means, dropout off. NumPy only."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np


def arrays_of(stack: Any, weights: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """Canonical weights in the order of a language model's variables: embedding, the stack's, dense_0's kernel and bias."""
    return [weights["embedding"], *stack.from_canonical(weights), weights["dense_0/kernel"], weights["dense_0/bias"]]


def canonical_of(stack: Any, arrays: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    """Arrays in that order (weights, gradients or an optimizer's moments) under canonical names."""
    embedding, *own, kernel, bias = arrays
    return {"embedding": embedding, **stack.to_canonical(own), "dense_0/kernel": kernel, "dense_0/bias": bias}


def mean_loss(losses: np.ndarray, steps: Sequence[int], reduction: str) -> float:
    """Per token, over batches [n] of so many steps each; their losses are means, or sums over time ("sum_over_time")."""
    losses, steps = np.asarray(losses, np.float64), np.asarray(steps)
    return float(np.sum(losses if reduction == "sum_over_time" else losses * steps) / steps.sum())


def rates_of_stack(lstm_dropout: Sequence[float], num_layers: int) -> tuple[float, float]:
    """(rate between the layers, rate behind the last one) of rates behind each layer; ValueError where the former differ."""
    rates = (*lstm_dropout, *[0.0] * num_layers)[:num_layers]
    if len(set(rates[:-1])) > 1:
        raise ValueError(f"lstm_dropout: {list(lstm_dropout)} given, expected one rate between all layers of a stack")
    return (rates[0] if num_layers > 1 else 0.0), rates[-1]


@contextlib.contextmanager
def dropout_off(model: Any) -> Iterator[None]:
    """A context in which `model.set_dropout_rate` has set the rate to 0; `model.dropout_rate` comes back behind it."""
    rate = model.dropout_rate
    model.set_dropout_rate(0.0)
    try:
        yield
    finally:
        model.set_dropout_rate(rate)
