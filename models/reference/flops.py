"""Floating-point operations of the networks' matrix products, per batch. Plain numbers, imports nothing."""

from itertools import pairwise


def flops_of_modes(c, embedding: int) -> dict[str, int]:
    """Floating-point operations per batch of a language model's script, by mode, in the order in which they run.

    Forward comes first: the others' proofs call it, and its first call would no longer be one.

    Args:
        c: the script's constants.
        embedding: width of the embedding.
    """
    whole, stack = (
        language_model_flops(c.BATCH_SIZE * c.TIME_STEPS, vocabulary, embedding, c.UNITS, c.NUM_LAYERS)
        for vocabulary in (c.VOCABULARY, 0)
    )
    return {"forward": whole, "train": 3 * whole, "stack": 3 * stack}


def language_model_flops(tokens: int, vocabulary: int, embedding: int, units: int, num_layers: int) -> int:
    """Floating-point operations of the matrix products of one forward pass; a training step takes three times as many."""
    inputs = [embedding] + [units] * (num_layers - 1)
    per_token = sum(2 * (i + units) * 4 * units for i in inputs) + 2 * units * vocabulary
    return tokens * per_token


def classifier_flops(
    sequences: int,
    time_steps: int,
    input_size: int,
    units: int,
    num_layers: int,
    dense: tuple[int, ...],
    directions: int = 1,
) -> int:
    """The same for a classifier; `dense` are the widths of its dense layers, the classes last."""
    inputs = [input_size] + [directions * units] * (num_layers - 1)
    per_step = directions * sum(2 * (i + units) * 4 * units for i in inputs)
    widths = [directions * units, *dense]
    return sequences * (time_steps * per_step + sum(2 * a * b for a, b in pairwise(widths)))
