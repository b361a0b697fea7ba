"""The language model of the stacked LM and of PTB, in PyTorch, around any LSTM stack of models/pytorch/stacks.py.

    tokens [time, batch] → embedding → LSTM stack → dense_0 → softmax over the vocabulary

The counterpart of models/tf/language_model.py, with its methods: the same weights, batches, losses, clipping and updates.
Everything is time-major, PyTorch's own order. No step waits for the device or copies to the host.
"""

import functools
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from models import trial
from models.pytorch.cells import dropout
from models.pytorch.difference import ops_of, step_difference
from models.pytorch.graph import captured
from models.pytorch.optimizers import OPTIMIZERS
from models.pytorch.stacks import TorchStack
from models.reference.networks import IGNORED
from models.weights.canonical import stack_size

COMPUTE_DTYPE = {"fp32": "float32", "tf32": "float32", "fp16": "float16", "bf16": "bfloat16", "fp64": "float64"}


class TorchLanguageModel(trial.LanguageModelTrial):
    """One callable for a forward pass and one for a training step, both on batches that lie on the device.

    Args:
        stack: the LSTM stack; its dtype is the compute dtype of the whole network, its device the device. What it has
            compiled is compiled.
        weights: canonical weights to start from; `restore` comes back to them.
        states: canonical initial states; `restore` comes back to them.
        batches: (tokens, targets) pairs of NumPy arrays [batch, time]; staged on the device once.
        optimizer: ("SGD" or "Adam", learning rate), of models/pytorch/optimizers.py; it receives float32 gradients, unscaled
            and clipped.
        reduction: "mean" over all tokens, or "sum_over_time": summed over steps, averaged over the batch (PTB).
        clip_norm: bound of the gradients' global norm, or None.
        keep_prob: 1 − dropout on the embedding and on every layer's output, the last included; 1: no dropout ops at all.
        loss_scale: static, of a float16 stack, as in models/tf/language_model.py. Gradients are divided by it before they
            are clipped.
        carry_states: whether a step starts from the final states of the one before.

    Attributes:
        parameters: the tensors that the network multiplies with: embedding, the stack's, dense_0's kernel and bias.
        masters: the same tensors, or in 16 bits the float32 ones that the optimizer moves. The embedding is its own
            master in every precision: its rows are cast once they are gathered.
    """

    time_major = True
    _captured = False

    def __init__(
        self,
        stack: TorchStack,
        weights: Mapping[str, np.ndarray],
        states: Sequence,
        batches: Sequence[tuple[np.ndarray, np.ndarray]],
        optimizer: tuple[str, float],
        *,
        reduction: str = "mean",
        clip_norm: float | None = None,
        keep_prob: float = 1.0,
        loss_scale: float = 1.0,
        carry_states: bool = False,
    ) -> None:
        self.stack, self.device, self.dtype = stack, stack.device, stack.dtype
        self.reduction, self.clip_norm, self.carry_states = reduction, clip_norm, carry_states
        self._half = self.dtype.itemsize == 2
        self.loss_scale = loss_scale if self.dtype == torch.float16 else 1.0
        names = ("embedding", "dense_0/kernel", "dense_0/bias")
        embedding, kernel, bias = masters = [self._master(weights[name]) for name in names]
        if self._half:
            kernel, bias = (master.detach().to(self.dtype).requires_grad_() for master in masters[1:])
        self.parameters = [embedding, *stack.parameters, kernel, bias]
        self.masters = [embedding, *stack.masters, *masters[1:]]
        self._float32_gradients = [torch.zeros_like(master) for master in self.masters] if self._half else []

        self.has_dropout = keep_prob < 1
        self.dropout_rate = 1.0 - keep_prob
        self._rate = torch.tensor(self.dropout_rate, device=self.device) if stack.compiled else None
        self._head_of, self._drop = self._head, self._dropout
        if stack.compiled:  # fullgraph: an error where a part cannot be compiled, not that part op by op
            # Left to itself, Inductor decides by a timing of its own whether to pad a vocabulary of 10,001: not always alike.
            aligned = kernel.shape[1] * kernel.element_size() % 16 == 0
            options = {} if aligned else {"force_shape_pad": True}
            self._head_of, self._drop = (
                torch.compile(function, dynamic=False, fullgraph=True, options=options)
                for function in (self._head, self._dropout)
            )

        kind, learning_rate = optimizer
        self.optimizer = OPTIMIZERS[kind](self.masters, learning_rate, captured=self._captured)
        self.batches = [self.stage(*batch) for batch in batches]
        self.initial_states = stack.stage_states(states)
        self.states = self.initial_states
        self._start = [master.detach().clone() for master in self.masters]

    # -- what is timed -------------------------------------------------------------------------------------------------

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Logits and loss without dropout; returns the loss, a device scalar."""
        return self._forward_step(*batch, self.states)[0]

    def train(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """One optimizer step; returns its loss (before the update), a device scalar."""
        self.optimizer.advance()
        loss, states = self._train_step(*batch, self.states)
        if self.carry_states:
            self.states = states
        return loss

    def stack_alone(self, batch: tuple[Tensor, Tensor]) -> list[Tensor]:
        """As of LanguageModelTrial, all tensors with time first."""
        return self._stack_step(*batch)

    # -- what the proof needs ------------------------------------------------------------------------------------------

    def restore(self) -> None:
        """Weights, optimizer and states as they were at the start; copies on the device."""
        with torch.no_grad():
            torch._foreach_copy_(self.masters, self._start)
            self._round_parameters()
        self.optimizer.reset()
        self._restore_states()

    def set_dropout_rate(self, rate: float) -> None:
        self.dropout_rate = rate
        if self._rate is not None:
            self._rate.fill_(rate)

    @property
    def tunes_anew(self) -> bool:
        """Whether every process chooses the stack's kernels by their times."""
        return self.stack.tunes_anew

    def notes(self, mode: str) -> list[str]:
        """Of the stack: sentences for the tables on how it ran in "train", "forward", "stack" or "fit"."""
        return self.stack.notes(mode)

    def _applied(self):
        with torch.no_grad():
            return self.optimizer.applied(self._start)

    def _weights(self):
        return self.masters

    def _moments(self):
        moments = self.optimizer.moments()
        return moments and (self.optimizer.iterations, *moments)

    def numpy(self, tensor: Tensor) -> np.ndarray:
        tensor = tensor.detach().cpu()  # NumPy has no bfloat16
        return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy().copy()

    def stacked(self, losses: Sequence[Tensor]) -> np.ndarray:
        return self.numpy(torch.stack(losses))

    def _staged(self, array):
        return torch.tensor(np.ascontiguousarray(array), dtype=self.dtype, device=self.device)

    def _pass(self, tokens, targets, states):
        return self._forward_step(tokens, targets, states)

    def _learning_rate(self):
        return self.optimizer.learning_rate

    def _set_learning_rate(self, rate):
        self.optimizer.learning_rate = rate

    def _set_start(self, arrays, states):
        with torch.no_grad():  # in place: a CUDA graph knows both by their addresses
            for start, array in zip(self._start, arrays, strict=True):
                start.copy_(torch.from_numpy(array))
            if states is not None:
                torch._foreach_copy_(list(self.initial_states), list(self.stack.stage_states(states)))

    # -- the network ---------------------------------------------------------------------------------------------------

    def stage(self, tokens: np.ndarray, targets: np.ndarray) -> tuple[Tensor, Tensor]:
        """Put one batch, given as [batch, time], on the device as [time, batch]."""
        return tuple(
            torch.tensor(ids.swapaxes(0, 1).copy(), dtype=torch.int64, device=self.device) for ids in (tokens, targets)
        )

    def _master(self, array: np.ndarray) -> Tensor:
        dtype = torch.float64 if self.dtype == torch.float64 else torch.float32
        return torch.tensor(array, dtype=dtype, device=self.device, requires_grad=True)

    def _dropout(self, x: Tensor) -> Tensor:
        """By PyTorch's own op; what torch.compile sees takes the rate as a tensor, with which one graph does."""
        return functional.dropout(x, self.dropout_rate) if self._rate is None else dropout(x, self._rate)

    def _stack_rate(self, training: bool) -> float | Tensor:
        if not (training and self.has_dropout):
            return 0.0
        return self._rate if self.stack.takes_rate_tensor else self.dropout_rate

    def _hidden(self, tokens, states, training):
        """(outputs of the stack [time, batch, units], final states)."""
        inputs = functional.embedding(tokens, self.parameters[0]).to(self.dtype)  # [time, batch, embedding]
        if training and self.has_dropout:
            inputs = self._drop(inputs)
        return self.stack(inputs, states, self._stack_rate(training), training)

    def _head(self, hidden, kernel, bias, targets, training):
        """(loss, logits); softmax and loss in float32 at least. hidden: [time, batch, units], or [words, units] where packed."""
        if training and self.has_dropout:
            hidden = self._dropout(hidden)
        logits = torch.addmm(bias, hidden.flatten(0, -2), kernel)
        wide = logits.float() if self._half else logits
        if self.reduction == "sum_over_time":
            count, ignored = self._sequences(targets), {"ignore_index": IGNORED}
        else:
            count, ignored = targets.numel(), {}
        total = functional.cross_entropy(wide, targets.flatten(), reduction="sum", **ignored)
        return total / count, logits.unflatten(0, targets.shape)

    def _sequences(self, targets: Tensor) -> int:
        """How many a batch has."""
        return targets.shape[1]

    def _loss(self, tokens, targets, states, training):
        """(loss, hidden, logits, final states)."""
        hidden, final_states = self._hidden(tokens, states, training)
        loss, logits = self._head_of(hidden, *self.parameters[-2:], targets, training)
        return loss, hidden, logits, final_states

    def _forward_step(self, tokens, targets, states):
        with torch.no_grad():
            return self._loss(tokens, targets, states, False)

    def _train_step(self, tokens, targets, states):
        loss, _, _, final_states = self._loss(tokens, targets, states, True)
        gradients = list(
            torch.autograd.grad(loss if self.loss_scale == 1.0 else loss * self.loss_scale, self.parameters)
        )
        with torch.no_grad():
            self._update(gradients)
            return loss.detach(), tuple(state.detach() for state in final_states)

    def _stack_step(self, inputs, gradient):
        inputs = inputs.detach().requires_grad_()
        outputs, _ = self.stack(inputs, self.initial_states, 0.0, True)
        gradients = torch.autograd.grad(outputs, [inputs, *self.stack.parameters], gradient)
        outputs = outputs.detach()
        return [(outputs.float() if self._half else outputs).square().mean(), outputs, *gradients]

    def _update(self, gradients: list[Tensor]) -> None:
        """Unscale, clip by the global norm, move the masters, and round them into the parameters."""
        if self._half:
            torch._foreach_copy_(self._float32_gradients, gradients)
            gradients = self._float32_gradients
            if self.loss_scale != 1.0:
                torch._foreach_mul_(gradients, 1.0 / self.loss_scale)
        else:  # of a compiled head they may come transposed in memory, which the fused optimizers refuse
            gradients = [gradient.contiguous() for gradient in gradients]
        if self.clip_norm is not None:
            # On a CPU PyTorch adds up float32 squares one after the other: of 2 million, the norm of an embedding lost 3e-5.
            wide = torch.float64 if self.device == "cpu" else None
            norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients, 2, wide)))
            torch._foreach_mul_(gradients, (self.clip_norm / norm.clamp(min=self.clip_norm)).to(gradients[0].dtype))
        for master, gradient in zip(self.masters, gradients, strict=True):
            master.grad = gradient
        self.optimizer.step()
        self._round_parameters()

    def _round_parameters(self) -> None:
        """The masters' values into the parameters, in place, so that cuDNN's flat weights stay flat."""
        if self._half:
            torch._foreach_copy_(self.parameters[1:], self.masters[1:])


class CapturedLanguageModel(TorchLanguageModel):
    """The same with the whole training step, and the forward pass, as one CUDA graph each.

    A training graph holds the forward and backward pass, unscaling, clipping, the optimizer and the carrying of states. Before
    each replay the batch is copied into the graph's own inputs, and the rate of this step into the optimizer's. The graphs are
    captured at the first call, and kept until another kind of step runs. Weights, moments and states are changed in place
    alone, since a graph knows them by address.

    Where the stack's dropout is cuDNN's, its rate is baked into the graph. The proof's steps then replay a second graph,
    captured from the same code, and `graph_mismatch` compares the ops of the two.

    Args:
        record: as in models.pytorch.graph.captured.
        others: as of TorchLanguageModel.
    """

    _captured = True
    _any_shape = False  # whether a batch of another shape gets a graph of its own, or an error

    def __init__(self, *arguments, record: Callable | None = None, **options) -> None:
        super().__init__(*arguments, **options)
        self._record = record
        self.states = tuple(state.clone() for state in self.initial_states)
        self._kind: tuple = ()  # of the step that the graphs hold, each of another shape of the batch
        self._graphs: dict[tuple, tuple[Callable, list[Tensor], list[Tensor]]] = {}

    def forward(self, batch):
        return self._run_forward(batch)[0]

    def _run_forward(self, batch):
        """(loss, hidden, logits): the loss as a new tensor, the others as those that the next replay writes."""
        loss, hidden, logits = self._replay(("forward",), self._forward_into, batch)
        return loss.clone(), hidden, logits

    def train(self, batch):
        self.optimizer.advance()
        [loss] = self._replay(self._train_key(), self._train_into, batch)
        return loss.clone()

    def _train_key(self) -> tuple:
        return ("train", self.dropout_rate if self.stack.own_dropout else None)

    def stack_alone(self, batch):
        """As of LanguageModelTrial; all but the loss as the tensors that the next replay writes."""
        loss, *others = self._replay(("stack",), self._stack_step, batch)
        return [loss.clone(), *others]

    def _replay(self, key: tuple, step: Callable[..., list[Tensor]], batch) -> list[Tensor]:
        """Copy the batch in and replay `step(*batch)`; returns the tensors that every replay writes."""
        if key != self._kind:
            if self._graphs:  # each keeps its memory: one kind of step at a time, so that a mode's peak is its own
                if self.device != "cpu":
                    torch.cuda.synchronize()  # its memory goes to whatever comes next, on any stream
                self._graphs.clear()
            self._kind = key
        shape = tuple(batch[0].shape)
        if shape not in self._graphs:
            if self._graphs and not self._any_shape:
                [expected] = self._graphs
                raise ValueError(f"a batch of {[*shape]} given, {[*expected]} was captured; `evaluate` takes any shape")
            inputs, written = [torch.clone(tensor) for tensor in batch], []

            def function():
                written[:] = step(*inputs)

            changed = [*self.masters, *self.optimizer.tensors, *self.states]
            changed += self.parameters[1:] if self._half else []
            self._graphs[shape] = captured(function, changed, self._record), inputs, written
        replay, inputs, written = self._graphs[shape]
        torch._foreach_copy_(inputs, list(batch))
        replay()
        return written

    def _forward_into(self, tokens, targets) -> list[Tensor]:
        return list(self._forward_step(tokens, targets, self.states)[:3])

    def _train_into(self, tokens, targets) -> list[Tensor]:
        loss, final_states = self._train_step(tokens, targets, self.states)
        if self.carry_states:
            torch._foreach_copy_(list(self.states), list(final_states))
        return [loss]

    def _restore_states(self):
        torch._foreach_copy_(list(self.states), list(self.initial_states))

    def graph_mismatch(self):
        if not (self.stack.own_dropout and self.has_dropout):
            return ""
        step = functools.partial(self._train_into, *self.batches[0])
        timed = ops_of(step)
        with self.without_dropout():
            proven = ops_of(step)
        self.restore()
        return step_difference(timed, proven)


def build(
    weights: Mapping[str, np.ndarray],
    states: Sequence,
    batches: Sequence,
    optimizer: tuple[str, float],
    *,
    stack: Callable[..., TorchStack],
    precision: str,
    device: str = "cpu",
    captured: bool = False,
    **options,
) -> TorchLanguageModel:
    """The language model of a row.

    Args:
        weights, states, batches, optimizer, options: of TorchLanguageModel.
        stack: (weights, num_layers, dtype, device) → the stack.
        precision: "fp32", "tf32", "fp16", "bf16" or, on a CPU, "fp64".
        device: "cpu" or "cuda:0".
        captured: on a GPU each step is a CUDA graph.
    """
    made = stack(weights, stack_size(weights)[0], COMPUTE_DTYPE[precision], device)
    kind = CapturedLanguageModel if captured and device != "cpu" else TorchLanguageModel
    return kind(made, weights, states, batches, optimizer, **options)
