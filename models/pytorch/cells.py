"""An LSTM cell by cell in PyTorch: the cell of primitive ops, and any cell unrolled over time. TorchScript takes both.

Equations and gates are those of models/tf/basic_cell.py:

    z = [x_t, h_{t-1}] W + b            W [input + units, 4·units], z [batch, 4·units], gates i, f, c, o
    c_t = σ(z_f) ∘ c_{t-1} + σ(z_i) ∘ tanh(z_c)
    h_t = σ(z_o) ∘ tanh(c_t)
"""

import torch
from torch import Tensor, nn

GRAPHS = 64  # that torch.compile makes of one function at the most
STEPS = 5  # in one graph: of many torch.compile takes minutes, of one weights' gradients are added up op by op


class PrimitiveCell(nn.Module):
    """One step of an LSTM layer, of PyTorch's primitive ops; called like nn.LSTMCell.

    Attributes:
        kernel: [input + units, 4·units], of [x, h].
        bias: [4·units].
    """

    def __init__(self, input_size: int, units: int, dtype: torch.dtype, device: str) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.zeros(input_size + units, 4 * units, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.zeros(4 * units, dtype=dtype, device=device))

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """x [batch, input], state (h, c) each [batch, units] → the new (h, c)."""
        h, c = state
        z = torch.addmm(self.bias, torch.cat([x, h], dim=1), self.kernel)
        i, f, candidate, o = z.chunk(4, dim=1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(candidate)
        return torch.sigmoid(o) * torch.tanh(c), c


class UnrolledLSTM(nn.Module):
    """Cells written out over time: depth in the outer loop, time in the inner one.

    Args:
        cells: one per layer, PrimitiveCell or nn.LSTMCell.
    """

    def __init__(self, cells: list[nn.Module]) -> None:
        super().__init__()
        self.cells = nn.ModuleList(cells)

    def forward(self, inputs: Tensor, h: Tensor, c: Tensor, rate: float) -> tuple[Tensor, Tensor, Tensor]:
        """inputs [time, batch, features], h and c [layers, batch, units], rate of the dropout between the layers.

        Returns:
            outputs of the last layer [time, batch, units], and the final h and c [layers, batch, units].
        """
        finals_h: list[Tensor] = []
        finals_c: list[Tensor] = []
        for layer, cell in enumerate(self.cells):
            if layer > 0:
                inputs = self.drop(inputs, rate)
            state = (h[layer], c[layer])
            outputs: list[Tensor] = []
            for x in inputs.unbind(0):
                state = cell(x, state)
                outputs.append(state[0])
            inputs = torch.stack(outputs)
            finals_h.append(state[0])
            finals_c.append(state[1])
        return inputs, torch.stack(finals_h), torch.stack(finals_c)

    def drop(self, x: Tensor, rate: float) -> Tensor:
        """Dropout in PyTorch's own op; none where the rate is 0."""
        return torch.dropout(x, rate, True) if rate > 0.0 else x  # TorchScript would run it at a rate of 0 too


class CompiledLSTM(UnrolledLSTM):
    """The same, some steps of a layer at a time under torch.compile, and dropout: each Python number would take a graph."""

    def __init__(self, cells: list[nn.Module]) -> None:
        super().__init__(cells)
        # A graph for each shape, each dtype, and inputs with and without a gradient. The limit holds for this thread alone.
        torch._dynamo.config.recompile_limit = max(GRAPHS, torch._dynamo.config.recompile_limit)
        self._steps, self._dropout = (
            torch.compile(function, dynamic=False, fullgraph=True) for function in (_steps, dropout)
        )

    def forward(self, inputs, h, c, rate):
        finals = []
        for layer, cell in enumerate(self.cells):
            if layer > 0:
                inputs = self.drop(inputs, rate)
            state, parts = (h[layer], c[layer]), []
            if torch.is_grad_enabled():  # as the states of later steps: else the first ones took a graph of their own
                state = [initial.detach().requires_grad_() for initial in state]
            for part in inputs.split(_together(len(inputs))):
                outputs, *state = self._steps(cell, part, *state)
                parts.append(outputs)
            inputs = torch.cat(parts)
            finals.append(state)
        return inputs, *(torch.stack(of_layers) for of_layers in zip(*finals, strict=True))

    def drop(self, x, rate):
        """x itself where `rate` is 0.0, no tensor: no dropout at all."""
        return x if isinstance(rate, float) else self._dropout(x, rate)


def _steps(cell: nn.Module, inputs: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(outputs [steps, batch, units], h, c) of a cell, some steps of a layer: h and c [batch, units]."""
    outputs = []
    for x in inputs.unbind(0):
        h, c = cell(x, (h, c))
        outputs.append(h)
    return torch.stack(outputs), h, c


def _together(steps: int) -> int:
    """How many steps are one graph: as many as divide them all, STEPS at the most."""
    return max(count for count in range(1, STEPS + 1) if steps % count == 0)


def dropout(x: Tensor, rate: Tensor) -> Tensor:
    """Dropout by a rate that is a tensor [] on the device: changing it takes neither another graph nor a sync."""
    kept = torch.rand_like(x, dtype=torch.float32) >= rate
    return torch.where(kept, x / (1.0 - rate).to(x.dtype), 0.0)
