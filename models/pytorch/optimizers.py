"""SGD and Adam as Keras computes them, by PyTorch's fused optimizers.

Keras adds Adam's epsilon to sqrt(v), PyTorch to sqrt(v) / sqrt(1 − β₂^t):

    Keras     w −= rate_t m / (sqrt(v) + ε)                   rate_t = rate · sqrt(1 − β₂^t) / (1 − β₁^t)
    PyTorch   w −= rate_t m / (sqrt(v) + ε sqrt(1 − β₂^t))

At step 1 that is an ε 32 times smaller, and a language model has gradients of ε's size (those of rare words): by the plain
class such a weight moves several times as far. No constant ε corrects that. So PyTorch's own step count is set so high that both
of its corrections are exactly 1, and rate_t is handed over as its learning rate: Keras' update, by the same fused kernel.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

LAST_STEP = 2.0**24  # float32 cannot count further: adding 1 leaves it; β^(2²⁴) is 0


class SGD:
    """Plain gradient descent.

    Args:
        masters: the tensors to move, float32 or float64; `step` reads their gradients from `.grad`.
        learning_rate: may be set to another value between steps.
        captured: whether `step` runs inside a CUDA graph: the rate is then a tensor on the device, which `advance`, outside
            of the graph, fills.

    Attributes:
        tensors: what a step changes besides the masters.
    """

    def __init__(self, masters: Sequence[Tensor], learning_rate: float, captured: bool = False) -> None:
        self.masters, self.learning_rate, self.iterations = list(masters), learning_rate, 0
        self._rate = None
        if captured:
            self._rate = torch.tensor(learning_rate, dtype=masters[0].dtype, device=masters[0].device)
        self._optimizer = self._make(learning_rate if self._rate is None else self._rate)
        self.tensors: list[Tensor] = []

    def _make(self, rate: float | Tensor) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.masters, lr=rate, fused=True)

    def step_size(self) -> float:
        """What the next step multiplies the direction with."""
        return self.learning_rate

    def advance(self) -> None:
        """Before every `step`: hand over the step's rate. Launches at most one kernel and waits for nothing."""
        size = self.step_size()
        self.iterations += 1
        if self._rate is None:
            self._optimizer.param_groups[0]["lr"] = size
        else:
            self._rate.fill_(size)

    def step(self) -> None:
        """Move the masters along their gradients."""
        self._optimizer.step()

    def reset(self) -> None:
        """Back to a fresh optimizer; in place, so that a CUDA graph keeps its addresses."""
        self.iterations = 0

    def moments(self) -> tuple[list[Tensor], list[Tensor]] | None:
        """First and second ones of Adam, of every master; None here."""
        return None

    def applied(self, starts: Sequence[Tensor]) -> list[Tensor]:
        """The gradients that exactly one step from `starts` applied: SGD moved every weight by −learning_rate · g."""
        return [(start - master) / self.learning_rate for start, master in zip(starts, self.masters, strict=True)]


class Adam(SGD):
    """Adam (Kingma & Ba 2015) in Keras' form, with Keras' constants. Arguments and attributes as of SGD."""

    beta_1, beta_2, epsilon = 0.9, 0.999, 1e-7

    def __init__(self, masters: Sequence[Tensor], learning_rate: float, captured: bool = False) -> None:
        super().__init__(masters, learning_rate, captured)
        self._moments = []
        for master in self.masters:  # what the first step would make, but for the step count
            step = torch.tensor(LAST_STEP, dtype=torch.float32, device=master.device)
            state = {"step": step, "exp_avg": torch.zeros_like(master), "exp_avg_sq": torch.zeros_like(master)}
            self._optimizer.state[master] = state
            self._moments.append(state["exp_avg"])
            self.tensors += [state["exp_avg"], state["exp_avg_sq"]]

    def _make(self, rate: float | Tensor) -> torch.optim.Optimizer:
        betas, capturable = (self.beta_1, self.beta_2), self._rate is not None and self._rate.is_cuda
        return torch.optim.Adam(self.masters, lr=rate, betas=betas, eps=self.epsilon, fused=True, capturable=capturable)

    def step_size(self) -> float:
        """Keras' rate_t."""
        t = self.iterations + 1
        return self.learning_rate * math.sqrt(1.0 - self.beta_2**t) / (1.0 - self.beta_1**t)

    def reset(self) -> None:
        super().reset()
        torch._foreach_zero_(self.tensors)

    def moments(self):
        return self.tensors[::2], self.tensors[1::2]

    def applied(self, starts: Sequence[Tensor]) -> list[Tensor]:
        """Adam's first moment is (1 − β₁) g after one step."""
        return [moment / (1.0 - self.beta_1) for moment in self._moments]


OPTIMIZERS = {"SGD": SGD, "Adam": Adam}
