"""A text, ids of words, cut into batches: rows that go on from batch to batch, or whole sentences. NumPy only."""

import itertools
from collections.abc import Sequence

import numpy as np

from harness.errors import UserError


def language_model_batches(tokens: np.ndarray, batch_size: int, time_steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets [n, batch_size, time_steps] by PTB's protocol (Zaremba et al. 2014).

    The text is cut into batch_size equal rows; batch i + 1 goes on, row by row, where batch i ended, so that states can
    be carried. Targets are the inputs one word later. What does not fill a row or a last batch is left out (see
    `language_model_tail`). UserError when the text is too short for one batch.
    """
    rows, n = _rows(tokens, batch_size, time_steps)

    def cut(part: np.ndarray) -> np.ndarray:  # [batch, n * time] to [n, batch, time]
        return np.ascontiguousarray(part.reshape(batch_size, n, time_steps).swapaxes(0, 1))

    return cut(rows[:, : n * time_steps]), cut(rows[:, 1 : n * time_steps + 1])


def language_model_tail(tokens: np.ndarray, batch_size: int, time_steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets [batch_size, rest] after the last of `language_model_batches`; 0 <= rest < time_steps."""
    rows, n = _rows(tokens, batch_size, time_steps)
    return rows[:, n * time_steps : -1].copy(), rows[:, n * time_steps + 1 :].copy()


def sentence_batches(
    tokens: np.ndarray, eos: int, batch_size: int, count: int, max_words: int
) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """`count` batches of whole sentences: inputs and targets [batch_size, longest of the batch], lengths [batch_size].

    A batch holds sentences of like length: the text's sentences are sorted by length and cut into batches, and of these the
    wanted ones are taken at even distances, each for an equal part of the text; their order is shuffled. Every input
    begins with <eos>, every target ends with it. After a sentence's end inputs are 0 and targets -1. Sentences of more than
    `max_words` words are left out. UserError when too few are left.
    """
    ends = np.flatnonzero(tokens == eos)
    sentences = [tokens[start : end + 1] for start, end in itertools.pairwise([-1, *ends])]  # <eos> at both ends
    sentences[:1] = [np.append(eos, tokens[: ends[0] + 1])] if len(ends) else []
    sentences = sorted((sentence for sentence in sentences if 2 < len(sentence) <= max_words + 2), key=len)
    found = len(sentences) // batch_size
    if found < count:
        raise UserError(
            f"{len(sentences)} sentences are too few for {count} batches of {batch_size}; expected "
            f"{count * batch_size} or more: give a smaller batch size or fewer batches"
        )
    middles = (np.arange(count) + 0.5) * found / count  # of as many equal parts
    chosen = np.random.default_rng(0).permutation(middles.astype(int))
    return [_padded(sentences[k * batch_size : (k + 1) * batch_size]) for k in chosen]


def _padded(sentences: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    lengths = np.array([len(sentence) - 1 for sentence in sentences], np.int32)
    inputs = np.zeros((len(sentences), lengths.max()), np.int32)
    targets = np.full_like(inputs, -1)
    for row, (sentence, length) in enumerate(zip(sentences, lengths, strict=True)):
        inputs[row, :length], targets[row, :length] = sentence[:-1], sentence[1:]
    return inputs, targets, lengths


def check_length(words: int, batch_size: int, time_steps: int) -> None:
    """UserError where a text of so many words has no batch of this size."""
    if batch_size < 1 or time_steps < 1:
        raise UserError(f"batch size {batch_size}, time steps {time_steps}: expected 1 or more of each")
    if words < (needed := batch_size * (time_steps + 1)):
        raise UserError(
            f"{words} words are too few for {batch_size} sequences of {time_steps} steps; expected {needed} or "
            "more: give a smaller batch size or fewer time steps"
        )


def _rows(tokens: np.ndarray, batch_size: int, time_steps: int) -> tuple[np.ndarray, int]:
    check_length(len(tokens), batch_size, time_steps)
    length = len(tokens) // batch_size
    return tokens[: batch_size * length].reshape(batch_size, length), (length - 1) // time_steps
