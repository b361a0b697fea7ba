"""The LSTM stacks that PyTorch can run, one class per way to execute them, all time-major.

Each holds its weights in the layout of the module that runs them, and takes them from and gives them back in the canonical
form through models/weights/layouts.py. nn.LSTM and nn.LSTMCell add two biases, b_ih + b_hh: the canonical one is b_ih,
and b_hh stays
0 without a gradient, so that an optimizer moves the bias once, as in every other stack.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from models.pytorch.cells import CompiledLSTM, PrimitiveCell, UnrolledLSTM
from models.pytorch.cudnn_rnn import CudnnLSTM, weight_space
from models.weights import layouts
from models.weights.stack_spec import StackSpec, cudnn_biases, cudnn_matrices, torch_shapes


class TorchStack:
    """A stack of unidirectional LSTM layers, the output of one being the input of the next.

    A subclass is one way to execute it: it builds the module, and names the layout of its weights.

    Args:
        weights: canonical weights (models/weights/canonical.py); tensors of other parts of a network are left alone.
        num_layers: layers in the stack.
        dtype: "float32", "float64", "float16" or "bfloat16", of inputs, states and products.
        device: "cpu" or "cuda:0".

    Attributes:
        parameters: tensors of `dtype` that the module multiplies with and gradients are taken by.
        masters: tensors that an optimizer moves: the parameters themselves, or float32 ones of 16-bit parameters, which
            `models.pytorch.language_model` copies into them after every step.
        compiled: whether softmax and loss around this stack are given to torch.compile, and dropout in a form that it takes.
        captured: whether a whole step is one CUDA graph where there is a GPU.
        own_dropout: whether the rate of the dropout between layers is baked into a captured step.
        tunes_anew: whether every process chooses kernels by their times, whatever an earlier one has compiled.
    """

    compiled = False
    captured = False
    own_dropout = False
    tunes_anew = False

    def __init__(
        self, weights: Mapping[str, np.ndarray], num_layers: int, dtype: str = "float32", device: str = "cpu"
    ) -> None:
        input_size, units = (weights[f"lstm_0/forward/{name}"].shape[0] for name in ("kernel", "recurrent_kernel"))
        self.spec = StackSpec("lstm", num_layers, units, input_size)
        self.num_layers, self.units, self.device = num_layers, units, device
        self.dtype = getattr(torch, dtype)
        arrays = self.from_canonical(weights)
        module = self.build()
        self.parameters = self.moved(module)
        if self.dtype.itemsize == 2:
            self.masters = [torch.tensor(array, dtype=torch.float32, device=device) for array in arrays]
        else:
            self.masters = self.parameters
        with torch.no_grad():
            for parameter, array in zip(self.parameters, arrays, strict=True):
                parameter.copy_(torch.from_numpy(array))
        self.module = self.execute(module)

    @property
    def takes_rate_tensor(self) -> bool:
        """Whether dropout's rate is given as a tensor: torch.compile would make a number part of the code."""
        return self.compiled and not self.own_dropout

    def build(self) -> nn.Module:
        """The module with parameters of `dtype` on `device`, their values still to come."""
        raise NotImplementedError

    def moved(self, module: nn.Module) -> list[nn.Parameter]:
        """The parameters that training moves, in the order of `from_canonical`'s arrays."""
        raise NotImplementedError

    def execute(self, module: nn.Module) -> nn.Module:
        """The module as it runs: scripted, where it is."""
        return module

    def from_canonical(self, weights: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """The canonical weights as arrays that match `parameters`."""
        raise NotImplementedError

    def to_canonical(self, arrays: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        """Arrays that match `parameters` (weights, gradients or an optimizer's moments) under canonical names."""
        raise NotImplementedError

    def stage_states(self, states: Sequence) -> tuple[Tensor, Tensor]:
        """Canonical states (layers × directions × (h, c)) as `__call__` takes them: h and c [layers, batch, units]."""
        return tuple(
            torch.tensor(np.stack([layer[0][k] for layer in states]), dtype=self.dtype, device=self.device)
            for k in range(2)
        )

    def __call__(
        self, inputs: Tensor, states: tuple[Tensor, Tensor], rate: float | Tensor, training: bool
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Run all layers.

        Args:
            inputs: [time, batch, features].
            states: initial h and c, each [layers, batch, units].
            rate: of the dropout between the layers (not after the last one); 0.0: none. A tensor [] of a stack that is
                `compiled` and has no dropout of its own, a Python number otherwise.
            training: whether this is a training pass; only nn.LSTM looks at it, whose inference mode keeps nothing.

        Returns:
            outputs of the last layer [time, batch, units], and the final states.
        """
        outputs, h, c = self.module(inputs, *states, rate)
        return outputs, (h, c)

    def notes(self, mode: str) -> list[str]:
        """Sentences for the tables on how it ran in "train", "forward", "stack" or "fit", where the class leaves that open."""
        return []

    def _weights(self, weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The stack's own tensors among a network's."""
        return {name: array for name, array in weights.items() if name.startswith("lstm_")}


class PrimitiveStack(TorchStack):
    """LSTM of primitive ops, cell by cell: torch_cells."""

    unrolled = UnrolledLSTM

    def build(self):
        sizes = [self.spec.layer_input_size(layer) for layer in range(self.num_layers)]
        return self.unrolled([PrimitiveCell(size, self.units, self.dtype, self.device) for size in sizes])

    def moved(self, module):
        return [parameter for cell in module.cells for parameter in (cell.kernel, cell.bias)]

    def from_canonical(self, weights):
        return [array for layer in range(self.num_layers) for array in layouts.to_block(weights, layer)]

    def to_canonical(self, arrays):
        canonical = {}
        for layer in range(self.num_layers):
            canonical |= layouts.from_block(arrays[2 * layer : 2 * layer + 2], layer)
        return canonical


class ScriptedPrimitiveStack(PrimitiveStack):
    """The same under TorchScript on the outer scope, loops over layers and time included: torch_jit."""

    def execute(self, module):
        return torch.jit.script(module)


class CompiledPrimitiveStack(PrimitiveStack):
    """The same cells, some steps at a time under torch.compile, as softmax and loss are: torch_compile."""

    compiled = True
    captured = True
    unrolled = CompiledLSTM


class _TorchLayout(TorchStack):
    """Weights W_ih, W_hh, b_ih of each layer; b_hh is 0 for ever."""

    def from_canonical(self, weights):
        arrays = layouts.to_torch(self._weights(weights), self.spec)
        return [array for name, array in arrays.items() if not name.startswith("bias_hh")]

    def to_canonical(self, arrays):
        fours = []
        for w_ih, w_hh, b_ih in zip(arrays[::3], arrays[1::3], arrays[2::3], strict=True):
            fours += [w_ih, w_hh, b_ih, np.zeros_like(b_ih)]
        return layouts.from_torch(dict(zip(torch_shapes(self.spec), fours, strict=True)), self.spec)

    @staticmethod
    def _fix(bias_hh: nn.Parameter) -> None:
        nn.init.zeros_(bias_hh)
        bias_hh.requires_grad_(False)


class StaticStack(_TorchLayout):
    """nn.LSTMCell unrolled: torch_static."""

    def build(self):
        sizes = [self.spec.layer_input_size(layer) for layer in range(self.num_layers)]
        cells = [nn.LSTMCell(size, self.units, dtype=self.dtype, device=self.device) for size in sizes]
        for cell in cells:
            self._fix(cell.bias_hh)
        return UnrolledLSTM(cells)

    def moved(self, module):
        return [p for cell in module.cells for p in (cell.weight_ih, cell.weight_hh, cell.bias_ih)]


class ScriptedStaticStack(StaticStack):
    """The same under TorchScript on the outer scope: torch_static_jit."""

    def execute(self, module):
        return torch.jit.script(module)


class LSTMStack(_TorchLayout):
    """nn.LSTM, the whole stack in one call (cuDNN on a GPU): torch_lstm."""

    def build(self):
        spec = self.spec
        module = nn.LSTM(spec.input_size, spec.units, spec.num_layers, dtype=self.dtype, device=self.device)
        for layer in range(self.num_layers):
            self._fix(getattr(module, f"bias_hh_l{layer}"))
        return module

    def moved(self, module):
        return [p for name, p in module.named_parameters() if not name.startswith("bias_hh")]

    def __call__(self, inputs, states, rate, training):
        self.module.dropout, self.module.training = rate, training  # read at every call
        return self.module(inputs, states)


class CapturedLSTMStack(LSTMStack):
    """The same, for a step that is one CUDA graph with a compiled head and loss: torch_lstm_graph."""

    compiled = True
    captured = True
    own_dropout = True


class CudnnStack(TorchStack):
    """cuDNN called directly, by the algorithm that is the fastest one here, the step as torch_lstm_graph's: cudnn_best.

    One flat tensor holds all weights, where cuDNN wants them: each gate's matrix, its bias, and a second bias that is 0.
    """

    compiled = True
    captured = True
    own_dropout = True
    tunes_anew = True

    def build(self):
        return CudnnLSTM(self.spec, self.dtype, self.device)

    def moved(self, module):
        return [module.weights]

    def from_canonical(self, weights):
        size, pieces = weight_space(self.spec, self.dtype, self.device)
        flat = np.zeros(size, np.float32)
        for placed, arrays in zip(pieces, layouts.to_cudnn_list(self._weights(weights), self.spec), strict=True):
            for (offset, _), array in zip(placed, arrays, strict=True):
                flat[offset : offset + array.size] = array.ravel()
        return [flat]

    def to_canonical(self, arrays):
        [flat], (_, pieces) = arrays, weight_space(self.spec, self.dtype, self.device)
        shapes = cudnn_matrices(self.spec), cudnn_biases(self.spec)
        lists = [
            [
                flat[offset : offset + np.prod(shape)].reshape(shape)
                for (offset, _), (_, shape) in zip(*pair, strict=True)
            ]
            for pair in zip(pieces, shapes, strict=True)
        ]
        return layouts.from_cudnn_list(*lists, self.spec)

    def __call__(self, inputs, states, rate, training):
        outputs, h, c = self.module(inputs, *states, rate, training)
        return outputs, (h, c)

    def notes(self, mode):
        modes = {"forward": (False,), "fit": (False, True)}.get(mode, (True,))
        return [str(choice) for (_, _, training), choice in self.module.choices.items() if training in modes]
