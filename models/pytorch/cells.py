"""An LSTM cell by cell in PyTorch: the cell of primitive ops, and any cell unrolled over time. TorchScript takes both.

Equations and gates are those of models/tf/basic_cell.py:

    z = [x_t, h_{t-1}] W + b            W [input + units, 4·units], z [batch, 4·units], gates i, f, c, o
    c_t = σ(z_f) ∘ c_{t-1} + σ(z_i) ∘ tanh(z_c)
    h_t = σ(z_o) ∘ tanh(c_t)
"""

import torch
from torch import Tensor, nn


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


class CompilableLSTM(UnrolledLSTM):
    """The same for torch.compile, which would make a graph of its own for every rate that is a Python number."""

    def drop(self, x, rate):
        """x itself where `rate` is 0.0, no tensor: no dropout at all."""
        return x if isinstance(rate, float) else dropout(x, rate)


def dropout(x: Tensor, rate: Tensor) -> Tensor:
    """Dropout by a rate that is a tensor [] on the device: changing it takes neither another graph nor a sync."""
    kept = torch.rand_like(x, dtype=torch.float32) >= rate
    return torch.where(kept, x / (1.0 - rate).to(x.dtype), 0.0)
