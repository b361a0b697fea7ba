"""The language model on sentences of their own lengths, in PyTorch: their words packed, or padded to few lengths.

Packed, a batch is so from when it is put on the device, as a loader's collate function does it: embedding, softmax and loss see
the words alone, and nn.LSTM stops each sentence at its end. Padded, a step is a CUDA graph, one for each length. The counterpart
of models/tf/sentence_model.py.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from models.pytorch.graph import SharedMemory, cuda_graph
from models.pytorch.language_model import CapturedLanguageModel, TorchLanguageModel
from models.reference.expected import without_padding
from models.reference.networks import IGNORED
from models.trial import padded


class TorchSentenceModel(TorchLanguageModel):
    """A TorchLanguageModel around nn.LSTM whose batches are (tokens, targets, lengths) of NumPy arrays [batch, longest] twice and
    [batch].

    Staged, a batch is (tokens, targets): a PackedSequence of words [words], and a tensor [words] in the same order. It is timed
    and proven in training steps and forward passes: the stack alone and whole trainings need batches of one shape.

    Args:
        arguments, options: of TorchLanguageModel; the reduction is "sum_over_time".
    """

    shapes_vary = True

    def __init__(self, *arguments, **options) -> None:
        super().__init__(*arguments, reduction="sum_over_time", **options)

    def stage(self, tokens: np.ndarray, targets: np.ndarray, lengths: np.ndarray) -> tuple[PackedSequence, Tensor]:
        lengths = torch.from_numpy(lengths.astype(np.int64))
        tokens, targets = (
            pack_padded_sequence(
                torch.from_numpy(ids.astype(np.int64)), lengths, batch_first=True, enforce_sorted=False
            )
            for ids in (tokens, targets)
        )
        return tokens.to(self.device), targets.data.to(self.device)

    def _staged_targets(self, targets):
        lengths = pad_packed_sequence(self.batches[0][0])[1]
        return self.stage(targets, targets, lengths.numpy())[1]

    def _words(self, number):
        tokens, targets = self.batches[number % len(self.batches)]
        parts = ((tokens.data, 0), (targets, IGNORED))
        return [self.numpy(self._padded(part, tokens, value)).swapaxes(0, 1) for part, value in parts]

    @staticmethod
    def _padded(data: Tensor, like: PackedSequence, value: float = 0.0) -> Tensor:
        """[words, …] as [longest, batch, …]; `value` after each sentence's end."""
        return pad_packed_sequence(like._replace(data=data), padding_value=value)[0]

    def _hidden(self, tokens, states, training):
        """(outputs of the stack [words, units], final states)."""
        inputs = functional.embedding(tokens.data, self.parameters[0]).to(self.dtype)
        outputs, final_states = self.stack(tokens._replace(data=inputs), states, 0.0, training)
        return outputs.data, final_states

    def _run_forward(self, batch):
        loss, *others = super()._run_forward(batch)
        return loss, *(self._padded(of_words, batch[0]) for of_words in others)

    def _sequences(self, targets):
        return self.initial_states[0].shape[1]


class CapturedSentenceModel(CapturedLanguageModel):
    """A CapturedLanguageModel whose batches are those of TorchSentenceModel, padded, with a graph for each length.

    The stack computes the padding: a unidirectional LSTM does not look ahead, so it changes no word.

    Args:
        pad: steps of a batch's longest sentence → steps that the batch is padded to.
        arguments, options: of CapturedLanguageModel; the reduction is "sum_over_time".
    """

    shapes_vary = True
    _any_shape = True

    def __init__(self, *arguments, pad: Callable[[int], int], record: Callable | None = None, **options) -> None:
        self.pad = pad
        super().__init__(*arguments, reduction="sum_over_time", record=record or self._graph, **options)

    def _graph(self, function: Callable[[], None]) -> Callable[[], None]:
        """All graphs of a kind of step share their memory, since none runs at the same time as another."""
        if not self._graphs:
            self._memory = SharedMemory()
        return cuda_graph(function, self._memory)

    def stage(self, tokens: np.ndarray, targets: np.ndarray, lengths: np.ndarray) -> tuple[Tensor, Tensor]:
        return super().stage(self._padded_ids(tokens, 0), self._padded_ids(targets, IGNORED))

    def _padded_ids(self, ids: np.ndarray, value: int) -> np.ndarray:
        return padded(ids, self.pad(ids.shape[1]), value)

    def _staged_targets(self, targets):
        return self.stage(targets, targets, None)[1]

    def _loss(self, tokens, targets, states, training):
        torch._dynamo.mark_dynamic(targets, 0)
        return super()._loss(tokens, targets, states, training)

    def _hidden(self, tokens, states, training):
        hidden, final_states = super()._hidden(tokens, states, training)
        torch._dynamo.mark_dynamic(hidden, 0)  # one compiled head for all lengths
        return hidden, final_states

    def outputs(self) -> dict[str, np.ndarray]:
        """As CapturedLanguageModel's, cut to the first batch's longest sentence; 0 after each sentence's end."""
        lengths = (self._words(0)[1] != IGNORED).sum(1)
        found = super().outputs()
        return found | {name: without_padding(found[name], lengths) for name in ("hidden", "logits")}
