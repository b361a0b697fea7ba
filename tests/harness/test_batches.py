"""A text cut into batches: rows that go on, and whole sentences; every word once, and its successor as its target."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.data.batches import language_model_batches, language_model_tail, sentence_batches
from harness.errors import UserError


@given(length=st.integers(2, 300), batch_size=st.integers(1, 6), time_steps=st.integers(1, 20))
def test_batches_go_on_where_the_last_one_ended_and_targets_are_the_next_words(length, batch_size, time_steps):
    tokens = np.arange(length, dtype=np.int32)
    row = length // batch_size
    if row < time_steps + 1:
        with pytest.raises(UserError, match=f"expected {batch_size * (time_steps + 1)} or more"):
            language_model_batches(tokens, batch_size, time_steps)
        return
    inputs, targets = language_model_batches(tokens, batch_size, time_steps)
    rest_inputs, rest_targets = language_model_tail(tokens, batch_size, time_steps)
    assert inputs.shape == targets.shape == ((row - 1) // time_steps, batch_size, time_steps)
    assert inputs.dtype == np.int32 and inputs.flags.c_contiguous and targets.flags.c_contiguous
    assert rest_inputs.shape[1] < time_steps
    for number in range(batch_size):
        whole = np.concatenate([*inputs[:, number], rest_inputs[number]])
        assert np.array_equal(whole, np.arange(number * row, number * row + row - 1))
        assert np.array_equal(np.concatenate([*targets[:, number], rest_targets[number]]), whole + 1)


@pytest.mark.parametrize(("batch_size", "time_steps"), [(0, 5), (5, 0), (-1, 5)])
def test_batches_of_nothing_are_a_user_error(batch_size, time_steps):
    with pytest.raises(UserError, match="expected 1 or more of each"):
        language_model_batches(np.arange(100), batch_size, time_steps)


def test_sentence_batches_hold_whole_sentences_of_like_length_from_all_of_the_text():
    rng = np.random.default_rng(1)
    eos, lengths = 1, rng.integers(1, 30, 400)
    lengths[:3] = (0, 31, 200)  # empty, and two that are too long
    text = np.concatenate([np.append(rng.integers(2, 50, n), eos) for n in lengths] + [rng.integers(2, 50, 5)])
    batches = sentence_batches(text.astype(np.int32), eos, batch_size=4, count=9, max_words=30)
    found = []
    for inputs, targets, ends in batches:
        assert inputs.shape == targets.shape == (4, ends.max()) and np.ptp(ends) <= 1
        for row, end in enumerate(ends):
            assert inputs[row, 0] == eos == targets[row, end - 1]
            np.testing.assert_array_equal(inputs[row, 1:end], targets[row, : end - 1])
            assert not inputs[row, end:].any() and (targets[row, end:] == -1).all()
            found.append(targets[row, :end].tolist())
    sentences = [part.tolist() for part in np.split(text, np.flatnonzero(text == eos) + 1)]
    assert all(sentence in sentences for sentence in found)
    longest = [int(ends.max()) for _, _, ends in batches]
    assert min(longest) <= 4 and 27 <= max(longest) <= 31 and longest != sorted(longest)
    assert np.mean(longest) == pytest.approx(np.mean(lengths[(lengths > 0) & (lengths <= 30)] + 1), rel=0.1)


@pytest.mark.parametrize("text", [[], [5, 6, 7], [5, 1, 6, 7, 1, 1]])
def test_text_of_too_few_sentences_is_a_user_error(text):
    with pytest.raises(UserError, match="sentences are too few for 2 batches of 2; expected 4 or more"):
        sentence_batches(np.array(text, np.int32), 1, batch_size=2, count=2, max_words=30)
