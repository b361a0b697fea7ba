"""The language model on sentences of their own lengths, padded to a common one.

After a sentence's end inputs are 0 and targets are -1, which add nothing to the loss. How far a batch is padded, and whether
the stack is given the lengths, changes the time and not the result: a unidirectional LSTM does not look ahead.
"""

from collections.abc import Callable

import numpy as np
import tensorflow as tf

from models.cudnn.checks import Lengths
from models.reference.expected import without_padding
from models.reference.networks import IGNORED
from models.tf.language_model import LanguageModel
from models.trial import padded


class SentenceModel(LanguageModel):
    """A LanguageModel whose batches are (tokens, targets, lengths) of NumPy arrays [batch, longest] twice and [batch].

    Args:
        pad: steps of a batch's longest sentence → steps that the batch is padded to.
        give_lengths: whether the stack is given the lengths.
        arguments, options: of LanguageModel; the reduction is "sum_over_time".
    """

    shapes_vary = True

    def __init__(self, *arguments, pad: Callable[[int], int], give_lengths: bool, **options) -> None:
        self.pad, self.give_lengths = pad, give_lengths
        super().__init__(*arguments, reduction="sum_over_time", **options)

    def stage(self, tokens: np.ndarray, targets: np.ndarray, lengths: np.ndarray) -> tuple:
        """Pad one batch and put it on the device: ((tokens, lengths), targets)."""
        tokens, targets = super().stage(self._padded(tokens, 0), self._padded(targets, IGNORED))
        staged = Lengths(tf.constant(lengths, tf.int32), tf.identity(tf.constant(lengths, tf.int64)))
        return (tokens, staged), targets

    def _padded(self, ids: np.ndarray, value: int) -> np.ndarray:
        return padded(ids, self.pad(ids.shape[1]), value)

    def _staged_targets(self, targets):
        targets = self._padded(targets, IGNORED)
        return super().stage(targets, targets)[1]

    def outputs(self) -> dict[str, np.ndarray]:
        """As LanguageModel's, cut to the first batch's longest sentence; 0 after each sentence's end.

        A stack that is given the lengths has to give these zeros itself, or its last output again, as it says.
        """
        lengths = self.batches[0][0][1].on_host.numpy()
        found = super().outputs()
        hidden = found["hidden"][:, : lengths.max()]
        if not self.give_lengths:
            hidden = without_padding(hidden, lengths)
        elif self.stack.repeats_last:
            ends = np.minimum(np.arange(hidden.shape[1]), lengths[:, np.newaxis] - 1)
            if np.array_equal(hidden, np.take_along_axis(hidden, ends[..., np.newaxis], 1)):
                hidden = without_padding(hidden, lengths)
        return found | {"hidden": hidden, "logits": without_padding(found["logits"], lengths)}

    def _network(self, tokens, states, training, stack_dropout=True):
        tokens, lengths = tokens
        lengths = {"sequence_lengths": lengths} if self.give_lengths else {}
        return super()._network(tokens, states, training, stack_dropout, **lengths)

    def _losses(self, logits, targets):
        losses = super()._losses(logits, tf.maximum(targets, 0))
        return losses * tf.cast(targets != IGNORED, losses.dtype)
