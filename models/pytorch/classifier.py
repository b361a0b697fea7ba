"""The classifier of MNIST in PyTorch, around any LSTM stack of models/pytorch/stacks.py, with a training loop of its own.

    sequences [time, batch, features] → LSTM stack → last output → Dense(relu) … → Dense → softmax over the classes

The counterpart of models/keras/classifier.py, with its methods: the same weights, losses and updates. Time-major,
PyTorch's own order.
The whole data set lies on the device, every epoch draws its order there, and a step gathers its own batch: PyTorch at its
best, where Keras' `fit` feeds every batch from the host. Nothing waits for the device but the end of an epoch.
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
from models.pytorch.language_model import COMPUTE_DTYPE
from models.pytorch.optimizers import OPTIMIZERS
from models.pytorch.stacks import TorchStack
from models.weights.canonical import stack_size, zero_states


class TorchClassifier(trial.ClassifierTrial):
    """One callable for a training step and one for a forward pass; `fit` is a plain loop over both.

    Args:
        stack: the LSTM stack; its dtype is the compute dtype of the whole network, its device the device. What it has
            compiled is compiled.
        weights: canonical weights to start from; `restore` comes back to them.
        inputs, labels: [batches · batch_size, time, features] and [batches · batch_size] NumPy arrays: what the proof's steps
            walk in order.
        batch_size: sequences in a step.
        optimizer: ("Adam", learning rate, decay): the rate at step t = 0, 1, … is learning rate / (1 + decay · t).
        rates: of the dropout between the LSTM layers, after the last one, and after every relu layer; 0: no dropout ops.
        loss_scale: static, of a float16 stack, as in models/tf/language_model.py.
        capacity: sequences in the largest data set that `fit` will be given; None: as many as `inputs`.
        seed: of the order of the sequences and the dropout masks.

    Attributes:
        parameters: the tensors that the network multiplies with: the stack's, then kernel and bias of every dense layer.
        masters: the same tensors, or in 16 bits the float32 ones that the optimizer moves.
        traces: how often a step was compiled or captured as a CUDA graph in this process, as far as this model can see.
    """

    _captured = False

    def __init__(
        self,
        stack: TorchStack,
        weights: Mapping[str, np.ndarray],
        inputs: np.ndarray,
        labels: np.ndarray,
        batch_size: int,
        optimizer: tuple[str, float, float],
        *,
        rates: tuple[float, float, float] = trial.NO_DROPOUT,
        loss_scale: float = 1.0,
        capacity: int | None = None,
        seed: int = 0,
    ) -> None:
        torch.manual_seed(seed)
        self.stack, self.device, self.dtype = stack, stack.device, stack.dtype
        self.inputs, self.labels, self.batch_size = inputs, labels, batch_size
        self._half = self.dtype.itemsize == 2
        self.loss_scale = loss_scale if self.dtype == torch.float16 else 1.0
        self._dense_names = [name for name in weights if name.startswith("dense_")]
        dense = [self._master(weights[name]) for name in self._dense_names]
        own = [master.detach().to(self.dtype).requires_grad_() for master in dense] if self._half else dense
        self.parameters, self.masters = [*stack.parameters, *own], [*stack.masters, *dense]
        self._float32_gradients = [torch.zeros_like(master) for master in self.masters] if self._half else []

        self.rates = self._rates = rates
        self._rate_tensors = [torch.tensor(rate, device=self.device) for rate in rates]
        # fullgraph: an error where a part cannot be compiled, not that part op by op
        self._head_of = torch.compile(self._head, dynamic=False, fullgraph=True) if stack.compiled else self._head

        kind, self.learning_rate, self.decay = optimizer
        self.optimizer = OPTIMIZERS[kind](self.masters, self.learning_rate, captured=self._captured)
        _, time_steps, features = inputs.shape
        self._zeros = stack.stage_states(zero_states(stack.num_layers, batch_size, stack.units))
        capacity = max(capacity or 0, len(inputs))
        self._x = torch.zeros(time_steps, capacity, features, dtype=self.dtype, device=self.device)
        self._y = torch.zeros(capacity, dtype=torch.int64, device=self.device)
        wide = torch.float64
        self._loss_sum, self._correct = (torch.zeros((), dtype=wide, device=self.device) for _ in range(2))
        self._start = [master.detach().clone() for master in self.masters]

    # -- what is timed -------------------------------------------------------------------------------------------------

    def _epoch(self, data, count):
        order = torch.randperm(count, device=self.device)
        self._loss_sum.zero_(), self._correct.zero_()
        for index in order.split(self.batch_size):
            self._train(index)
        loss, correct = torch.stack((self._loss_sum, self._correct)).tolist()
        return loss / (len(order) // self.batch_size), correct / len(order)

    def _evaluate(self, batches):
        self._correct.zero_()
        for batch in batches:
            self._correct.add_(self._forward(batch)[1])
        return self._correct.item()

    def _logits(self, batch):
        return self._forward(batch)[2]

    def _train(self, index: Tensor) -> Tensor:
        """One step on the staged sequences of these numbers [batch]; returns its loss (before the update)."""
        self._advance()
        return self._train_step(index)

    def _forward(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """(loss, number of labels that are the likeliest class, logits [batch, classes]), without dropout."""
        with torch.no_grad():
            return self._network(*batch, False)

    # -- what the proof needs ------------------------------------------------------------------------------------------

    def restore(self) -> None:
        """Weights and optimizer as they were at the start."""
        with torch.no_grad():
            torch._foreach_copy_(self.masters, self._start)
            self._round_parameters()
        self.optimizer.reset()

    def outputs(self) -> dict[str, np.ndarray]:
        """The timed forward pass on the first batch: logits and loss."""
        batch = self._batches(self.inputs[: self.batch_size], self.labels[: self.batch_size])[0]
        loss, _, logits = self._forward(batch)
        return {"loss": self.numpy(loss), "logits": self.numpy(logits)}

    def timed_steps(self, count: int) -> np.ndarray:
        size = count * self.batch_size
        self._stage(self.inputs[:size], self.labels[:size])
        order = torch.arange(size, device=self.device)
        return np.array([self.numpy(self._train(index)) for index in order.split(self.batch_size)])

    def _set_rates(self, rates: tuple[float, float, float]) -> None:
        self._rates = rates
        for tensor, rate in zip(self._rate_tensors, rates, strict=True):
            tensor.fill_(rate)

    @property
    def traces(self) -> int:
        return torch._dynamo.utils.counters["stats"]["unique_graphs"] if self.stack.compiled else 0

    def notes(self, mode: str) -> list[str]:
        """Of the stack: sentences for the tables on how it ran in "train", "forward", "stack" or "fit"."""
        return self.stack.notes(mode)

    def _applied(self):
        with torch.no_grad():
            return self.optimizer.applied(self._start)

    def _moments(self):
        return self.optimizer.iterations, *self.optimizer.moments()

    def _weights(self):
        return self.masters

    def numpy(self, tensor: Tensor) -> np.ndarray:
        tensor = tensor.detach().cpu()  # NumPy has no bfloat16
        return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy().copy()

    def _set_start(self, arrays):
        for start, array in zip(self._start, arrays, strict=True):
            start.copy_(torch.from_numpy(array))

    # -- data on the device --------------------------------------------------------------------------------------------

    def _stage(self, x: np.ndarray, y: np.ndarray) -> None:
        """Copy a data set into the tensors that the steps gather from, time first, in the compute dtype."""
        n = len(x)
        self._check_size(n, len(self._y))
        self._x[:, :n].copy_(torch.from_numpy(x).to(self.device).transpose(0, 1))
        self._y[:n].copy_(torch.from_numpy(np.int64(y)))

    def _batches(self, x: np.ndarray, y: np.ndarray) -> list[tuple[Tensor, Tensor]]:
        """(x [time, batch, features], y [batch]) on the device, the last batch with what is left."""
        inputs = torch.from_numpy(x).to(self.device, self.dtype).split(self.batch_size)
        labels = torch.from_numpy(np.int64(y)).to(self.device).split(self.batch_size)
        return [(part.transpose(0, 1).contiguous(), own) for part, own in zip(inputs, labels, strict=True)]

    def _wait(self, data, batches, count):
        if self._x.is_cuda:
            torch.cuda.synchronize()

    # -- the network ---------------------------------------------------------------------------------------------------

    def _master(self, array: np.ndarray) -> Tensor:
        dtype = torch.float64 if self.dtype == torch.float64 else torch.float32
        return torch.tensor(array, dtype=dtype, device=self.device, requires_grad=True)

    def _drop(self, x: Tensor, place: int, training: bool) -> Tensor:
        """By PyTorch's own op; what torch.compile sees takes the rate as a tensor, with which one graph does."""
        if not (training and self.rates[place]):
            return x
        if self.stack.compiled:
            return dropout(x, self._rate_tensors[place])
        return functional.dropout(x, self._rates[place])

    def _stack_rate(self, training: bool) -> float | Tensor:
        if not (training and self.rates[0]):
            return 0.0
        return self._rate_tensors[0] if self.stack.takes_rate_tensor else self._rates[0]

    def _network(self, x: Tensor, y: Tensor, training: bool) -> tuple[Tensor, Tensor, Tensor]:
        """(loss, number of labels that are the likeliest class, logits) of x [time, batch, features] and y [batch]."""
        states = tuple(zeros[:, : x.shape[1]].contiguous() for zeros in self._zeros)
        _, (h, _) = self.stack(x, states, self._stack_rate(training), training)
        return self._head_of(h[-1], y, self.parameters[len(self.stack.parameters) :], training)

    def _head(
        self, hidden: Tensor, y: Tensor, dense: Sequence[Tensor], training: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The rest of it, from the last output [batch, units] on; softmax and loss in float32 at least."""
        hidden = self._drop(hidden, 1, training)
        *hidden_layers, last = zip(dense[::2], dense[1::2], strict=True)
        for kernel, bias in hidden_layers:
            hidden = self._drop(torch.relu(torch.addmm(bias, hidden, kernel)), 2, training)
        kernel, bias = last
        logits = torch.addmm(bias, hidden, kernel)
        loss = functional.cross_entropy(logits.float() if self._half else logits, y)
        return loss, (logits.argmax(dim=1) == y).sum(), logits

    def _advance(self) -> None:
        self.optimizer.learning_rate = self.learning_rate / (1.0 + self.decay * self.optimizer.iterations)
        self.optimizer.advance()

    def _train_step(self, index: Tensor) -> Tensor:
        x, y = self._x.index_select(1, index), self._y.index_select(0, index)
        loss, correct, _ = self._network(x, y, True)
        gradients = list(
            torch.autograd.grad(loss if self.loss_scale == 1.0 else loss * self.loss_scale, self.parameters)
        )
        with torch.no_grad():
            self._loss_sum.add_(loss.detach())
            self._correct.add_(correct)
            self._update(gradients)
        return loss.detach()

    def _update(self, gradients: list[Tensor]) -> None:
        """Unscale, move the masters, and round them into the parameters."""
        if self._half:
            torch._foreach_copy_(self._float32_gradients, gradients)
            gradients = self._float32_gradients
            if self.loss_scale != 1.0:
                torch._foreach_mul_(gradients, 1.0 / self.loss_scale)
        else:  # of a compiled head they may come transposed in memory, which the fused optimizers refuse
            gradients = [gradient.contiguous() for gradient in gradients]
        for master, gradient in zip(self.masters, gradients, strict=True):
            master.grad = gradient
        self.optimizer.step()
        self._round_parameters()

    def _round_parameters(self) -> None:
        """The masters' values into the parameters, in place, so that cuDNN's flat weights stay flat."""
        if self._half:
            torch._foreach_copy_(self.parameters, self.masters)


class CapturedClassifier(TorchClassifier):
    """The same with the whole training step, and the forward pass of a whole batch, as one CUDA graph each.

    A training graph gathers the batch, and holds the forward and backward pass, unscaling, the optimizer and the sums of
    loss and correct labels. Before each replay the batch's sequence numbers are copied into it, and the step's rate. As in
    models.pytorch.language_model.CapturedLanguageModel, a rate of cuDNN's own dropout is baked in: the proof's steps replay a
    second graph of the same code, and `graph_mismatch` compares the ops of the two.

    Args:
        record: as in models.pytorch.graph.captured.
        others: as of TorchClassifier.
    """

    _captured = True

    def __init__(self, *arguments, record: Callable | None = None, **options) -> None:
        super().__init__(*arguments, **options)
        self._record = record
        self._graphs: dict[tuple, tuple[Callable, list[Tensor], list[Tensor]]] = {}

    def _train(self, index):
        self._advance()
        rate = self._rates[0] if self.stack.own_dropout else None
        [loss] = self._replay(("train", rate), lambda index: [self._train_step(index)], [index])
        return loss.clone()

    def _forward(self, batch):
        """As there; of a smaller last batch op by op. The tensors of a whole one are those that the next replay writes."""
        step = super()._forward
        if len(batch[1]) != self.batch_size:
            return step(batch)
        return self._replay(("forward",), lambda *batch: list(step(batch)), list(batch))

    def _replay(self, key: tuple, step: Callable[..., list[Tensor]], given: list[Tensor]) -> list[Tensor]:
        """Copy `given` in and replay `step(*given)`; returns the tensors that every replay writes."""
        if key not in self._graphs:
            inputs, written = [torch.clone(tensor) for tensor in given], []

            def function():
                written[:] = step(*inputs)

            changed = [*self.masters, *self.optimizer.tensors, self._loss_sum, self._correct]
            changed += self.parameters if self._half else []
            self._graphs[key] = captured(function, changed, self._record), inputs, written
        replay, inputs, written = self._graphs[key]
        torch._foreach_copy_(inputs, given)
        replay()
        return written

    def graph_mismatch(self):
        if not (self.stack.own_dropout and self.rates[0]):
            return ""
        step = functools.partial(self._train_step, torch.arange(self.batch_size, device=self.device))
        timed = ops_of(step)
        with self.without_dropout():
            proven = ops_of(step)
        self.restore()
        return step_difference(timed, proven)

    @property
    def traces(self) -> int:
        return len(self._graphs)


def build(
    weights: Mapping[str, np.ndarray],
    inputs: np.ndarray,
    labels: np.ndarray,
    batch_size: int,
    optimizer: tuple[str, float, float],
    *,
    stack: Callable[..., TorchStack],
    precision: str = "fp32",
    device: str = "cpu",
    captured: bool = False,
    lstm_dropout: Sequence[float] = (),
    dense_dropout: float = 0.0,
    **options,
) -> TorchClassifier:
    """The classifier of a row.

    Args:
        weights, inputs, labels, batch_size, optimizer, options: of TorchClassifier.
        stack, precision, device, captured: of models.pytorch.language_model.build.
        lstm_dropout, dense_dropout: rates after each LSTM layer, and after every relu layer.

    Raises:
        ValueError: rates that differ between the layers of the stack.
    """
    layers, _ = stack_size(weights)
    made = stack(weights, layers, COMPUTE_DTYPE[precision], device)
    kind = CapturedClassifier if captured and device != "cpu" else TorchClassifier
    rates = (*trial.rates_of_stack(lstm_dropout, layers), dense_dropout)
    return kind(made, weights, inputs, labels, batch_size, optimizer, rates=rates, **options)
