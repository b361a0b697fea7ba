"""cuDNN's own RNN functions, called by ctypes: a whole LSTM stack forward and backward, by the algorithm that is fastest here.

nn.LSTM takes cuDNN's standard algorithm but for one layer in half precision. cuDNN has three more, all of them persistent
kernels that keep the recurrent weights on the chip, and takes some for some shapes, types and devices alone. `choose` runs all
of them on the tensors at hand and names the fastest one whose results are those of the standard algorithm.

The functions work on the libcudnn that PyTorch has loaded, on the current stream; a CUDA graph captures all but the making
of a `Plan`. Every sequence of a batch has the same length, so that packed and padded data lie in memory alike.

Sources: cuDNN's reference of its cudnn_adv library (cudnnSetRNNDescriptor_v8, cudnnRNNForward, cudnnRNNBackwardData_v8,
cudnnRNNBackwardWeights_v8, cudnnGetRNNWeightParams, cudnnBuildRNNDynamic), and its header cudnn_adv.h.
"""

import contextlib
import ctypes
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from ctypes import POINTER, c_char_p, c_float, c_int, c_int32, c_size_t, c_uint32, c_ulonglong, c_void_p
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from models.pytorch.graph import cuda_graph
from models.weights.stack_spec import StackSpec

LIBRARY = "libcudnn.so.9"
ALGORITHMS = {"STANDARD": 0, "PERSIST_STATIC": 1, "PERSIST_DYNAMIC": 2, "PERSIST_STATIC_SMALL_H": 3}
MATH_TYPES = {"DEFAULT_MATH": 0, "TENSOR_OP_MATH": 1, "TENSOR_OP_MATH_ALLOW_CONVERSION": 2, "FMA_MATH": 3}
DTYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 9}
LSTM, UNIDIRECTIONAL, LINEAR_INPUT, DOUBLE_BIAS, WGRAD_ADD = 2, 0, 0, 2, 0  # persistent kernels take two biases alone
PADDED_IO, UNPACKED, PACKED = 1, 0, 1
INFERENCE, TRAINING = 0, 1
TINY = 1e-30  # of a tensor that is 0 everywhere
GATES = 8  # matrices of a layer: of the input and of the state, gates i, f, c, o each

# Of what each function takes, by its header. All return a status but cudnnGetErrorString, cudnnGetLastErrorString and
# cudnnGetVersion, which `Library` calls itself.
_OUT = POINTER(c_void_p)  # where a function writes a handle, a descriptor or an address
_INTS = POINTER(c_int)
_SIZE = POINTER(c_size_t)
SIGNATURES = {
    "cudnnCreate": (_OUT,),
    "cudnnSetStream": (c_void_p, c_void_p),
    "cudnnCreateRNNDescriptor": (_OUT,),
    "cudnnDestroyRNNDescriptor": (c_void_p,),
    "cudnnSetRNNDescriptor_v8": (c_void_p, *[c_int] * 8, *[c_int32] * 4, c_void_p, c_uint32),
    "cudnnBuildRNNDynamic": (c_void_p, c_void_p, c_int),
    "cudnnCreateRNNDataDescriptor": (_OUT,),
    "cudnnDestroyRNNDataDescriptor": (c_void_p,),
    "cudnnSetRNNDataDescriptor": (c_void_p, *[c_int] * 5, _INTS, c_void_p),
    "cudnnCreateTensorDescriptor": (_OUT,),
    "cudnnDestroyTensorDescriptor": (c_void_p,),
    "cudnnSetTensorNdDescriptor": (c_void_p, c_int, c_int, _INTS, _INTS),
    "cudnnGetTensorNdDescriptor": (c_void_p, c_int, _INTS, _INTS, _INTS, _INTS),
    "cudnnCreateDropoutDescriptor": (_OUT,),
    "cudnnDestroyDropoutDescriptor": (c_void_p,),
    "cudnnDropoutGetStatesSize": (c_void_p, _SIZE),
    "cudnnSetDropoutDescriptor": (c_void_p, c_void_p, c_float, c_void_p, c_size_t, c_ulonglong),
    "cudnnGetRNNWeightSpaceSize": (c_void_p, c_void_p, _SIZE),
    "cudnnGetRNNTempSpaceSizes": (c_void_p, c_void_p, c_int, c_void_p, _SIZE, _SIZE),
    "cudnnGetRNNWeightParams": (
        *(c_void_p, c_void_p, c_int32, c_size_t, c_void_p, c_int32),  # handle, RNN, layer, the weights, which of them
        *(c_void_p, _OUT, c_void_p, _OUT),  # descriptor and address of the matrix, of the bias
    ),
    "cudnnRNNForward": (
        *(c_void_p, c_void_p, c_int, c_void_p),  # handle, RNN, mode, lengths
        *[c_void_p] * 4,  # descriptor and data of x, of y
        *[c_void_p] * 6,  # descriptor, first and last of h, of c
        *[c_size_t, c_void_p] * 3,  # weights, work space, reserve space
    ),
    "cudnnRNNBackwardData_v8": (
        *[c_void_p] * 3,  # handle, RNN, lengths
        *[c_void_p] * 5,  # descriptor of y, y, dy, descriptor of x, dx
        *[c_void_p] * 8,  # descriptor, first, gradient of the last and of the first h; of c
        *[c_size_t, c_void_p] * 3,
    ),
    "cudnnRNNBackwardWeights_v8": (
        *(c_void_p, c_void_p, c_int, c_void_p),  # handle, RNN, mode, lengths
        *[c_void_p] * 6,  # descriptor and data of x, of the first h, of y
        *[c_size_t, c_void_p] * 3,  # gradient of the weights, work space, reserve space
    ),
}


class CudnnError(RuntimeError):
    """cuDNN is missing or is too old, or a function of it returned a status.

    Attributes:
        status: by its name, such as "CUDNN_STATUS_NOT_SUPPORTED"; "" where nothing was called.
    """

    def __init__(self, message: str, status: str = "") -> None:
        super().__init__(message)
        self.status = status


class Library:
    """The functions of a libcudnn: `library(name, *arguments)`.

    Args:
        path: of the shared library, or its name; where the process has one of that name, that one.

    Raises:
        CudnnError: it cannot be loaded, or lacks a function.
    """

    def __init__(self, path: str = LIBRARY) -> None:
        try:
            self._library = ctypes.CDLL(path)
        except OSError as error:
            raise CudnnError(
                f"cuDNN: {error}; expected cuDNN 9, which PyTorch's build with CUDA brings: ./run_all.sh --peers installs it"
            ) from None
        missing = [name for name in SIGNATURES if not hasattr(self._library, name)]
        if missing:
            raise CudnnError(f"cuDNN: {path} has no {missing[0]}; expected cuDNN 9: ./run_all.sh --peers installs it")
        for name, arguments in SIGNATURES.items():
            getattr(self._library, name).argtypes = arguments
        self._library.cudnnGetErrorString.restype = c_char_p
        self._library.cudnnGetLastErrorString.argtypes = (c_char_p, c_size_t)
        self._library.cudnnGetLastErrorString.restype = None
        self._library.cudnnGetVersion.restype = c_size_t

    def __call__(self, name: str, *arguments: object) -> None:
        """Call a function of SIGNATURES; CudnnError, with cuDNN's own words, where its status is not success."""
        number = getattr(self._library, name)(*arguments)
        if number:
            status, words = self._library.cudnnGetErrorString(number).decode(), ctypes.create_string_buffer(1024)
            self._library.cudnnGetLastErrorString(words, len(words))
            reason = " ".join(words.value.decode(errors="replace").split())
            raise CudnnError(f"{name}: {status}{reason and f' ({reason})'}", status)

    @functools.cached_property
    def version(self) -> str:
        """Such as "9.19.0"."""
        number = self._library.cudnnGetVersion()
        return f"{number // 10000}.{number // 100 % 100}.{number % 100}"

    @functools.cached_property
    def handle(self) -> c_void_p:
        """cuDNN's context on the current device, one for the process; what runs goes to PyTorch's current stream."""
        handle = c_void_p()
        self("cudnnCreate", ctypes.byref(handle))
        return handle

    def on_stream(self) -> c_void_p:
        """`handle`, what it launches next being sent to the current stream."""
        self("cudnnSetStream", self.handle, torch.cuda.current_stream().cuda_stream)
        return self.handle


@functools.cache
def library() -> Library:
    """The one of this process."""
    return Library()


@dataclass(frozen=True)
class Setting:
    """One way in which cuDNN may run a stack.

    Attributes:
        algorithm: of ALGORITHMS.
        math: of MATH_TYPES.
        layout: "packed" or "padded", of the inputs and outputs.
    """

    algorithm: str
    math: str
    layout: str

    def __str__(self) -> str:
        return f"{self.algorithm}, {self.math}, {self.layout}"


@dataclass(frozen=True)
class Shape:
    """What a plan is made for: a stack, of `dtype` throughout, and its batches."""

    stack: StackSpec
    dtype: torch.dtype
    steps: int
    batch: int


class Plan:
    """cuDNN's descriptors of a stack that one setting runs on batches of one shape.

    Args:
        setting, shape: what runs what.
        rate: of the dropout between the layers, which cuDNN draws anew at every forward pass and replay.
        device: of all tensors.
        cudnn: the library; None: the process' own.

    Attributes:
        size: numbers in the flat weights.
        pieces: (matrices, biases), each a list of (offset in the flat weights, shape), in the order of cuDNN's list as
            models/weights/layouts.py has it.

    Raises:
        CudnnError: cuDNN refuses the setting.
    """

    def __init__(
        self, setting: Setting, shape: Shape, rate: float = 0.0, device: str = "cuda:0", cudnn: Library | None = None
    ) -> None:
        self._cudnn, self._closing = cudnn or library(), contextlib.ExitStack()
        self._shape, self._device = shape, device
        stack, dtype = shape.stack, DTYPES[shape.dtype]
        handle = self._cudnn.on_stream()
        try:
            self._rnn = self._made("RNNDescriptor")
            self._cudnn(
                "cudnnSetRNNDescriptor_v8", self._rnn, ALGORITHMS[setting.algorithm], LSTM, DOUBLE_BIAS,
                UNIDIRECTIONAL, LINEAR_INPUT, dtype, DTYPES[torch.float32],  # which products add up in
                MATH_TYPES[setting.math], stack.input_size, stack.units, stack.units, stack.num_layers,
                self._dropout(rate, handle), PADDED_IO if setting.layout == "padded" else 0,
            )  # fmt: skip
            layout = PACKED if setting.layout == "packed" else UNPACKED
            lengths = (c_int * shape.batch)(*[shape.steps] * shape.batch)
            self._x, self._y = self._made("RNNDataDescriptor"), self._made("RNNDataDescriptor")
            for descriptor, width in ((self._x, stack.input_size), (self._y, stack.units)):
                sizes = layout, shape.steps, shape.batch, width
                self._cudnn("cudnnSetRNNDataDescriptor", descriptor, dtype, *sizes, lengths, None)
            self._state = self._made("TensorDescriptor")
            width = shape.batch * stack.units
            sizes = (c_int * 3)(stack.num_layers, shape.batch, stack.units), (c_int * 3)(width, stack.units, 1)
            self._cudnn("cudnnSetTensorNdDescriptor", self._state, dtype, 3, *sizes)
            if setting.algorithm == "PERSIST_DYNAMIC":  # compiled for this batch size
                self._cudnn("cudnnBuildRNNDynamic", handle, self._rnn, shape.batch)
            self._bytes = self._sizes("cudnnGetRNNWeightSpaceSize", handle, self._rnn, outputs=1)[0]
            self.size = self._bytes // shape.dtype.itemsize
            self._spaces = {  # (work space, reserve space) in bytes
                mode: self._sizes("cudnnGetRNNTempSpaceSizes", handle, self._rnn, mode, self._x, outputs=2)
                for mode in (INFERENCE, TRAINING)
            }
            self.pieces = self._pieces(handle)
        except RuntimeError:  # of cuDNN, or no memory
            self.close()
            raise
        self._lengths = torch.full((shape.batch,), shape.steps, dtype=torch.int32, device=device)
        seconds = [piece for k, piece in enumerate(self.pieces[1]) if k % GATES >= GATES // 2]
        places = [np.arange(offset, offset + np.prod(sizes)) for offset, sizes in seconds]
        self._second_biases = torch.from_numpy(np.concatenate(places)).to(device)

    def close(self) -> None:
        """Give the descriptors back; nothing that was captured with them may run after that."""
        self._closing.close()

    def forward(self, x: Tensor, h: Tensor, c: Tensor, weights: Tensor, training: bool) -> tuple[Tensor, ...]:
        """Run the stack.

        Args:
            x: [time, batch, input].
            h, c: initial states, each [layers, batch, units].
            weights: flat, [size].
            training: whether to keep what `backward` needs.

        Returns:
            y [time, batch, units], the final h and c, and cuDNN's reserve space, bytes [n], [0] unless `training`.
        """
        y, hy, cy = x.new_empty(*x.shape[:2], h.shape[2]), torch.empty_like(h), torch.empty_like(c)
        work, reserve = (self._space(size) for size in self._spaces[int(training)])
        self._cudnn(
            "cudnnRNNForward", self._cudnn.on_stream(), self._rnn, int(training), _at(self._lengths),
            self._x, _at(x), self._y, _at(y), self._state, _at(h), _at(hy), self._state, _at(c), _at(cy),
            self._bytes, _at(weights), work.numel(), _at(work), reserve.numel(), _at(reserve),
        )  # fmt: skip
        return y, hy, cy, reserve

    def backward(
        self, x: Tensor, h: Tensor, c: Tensor, weights: Tensor, y: Tensor, reserve: Tensor,
        dy: Tensor | None, dhy: Tensor | None = None, dcy: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        """Gradients by x, h, c and the flat weights from those by y and the final h and c; None: zero.

        Of a gate's two biases, which cuDNN adds up, the second one gets no gradient: it stays 0, and an optimizer moves the
        sum once, as in every other stack. `reserve` is that of the forward pass in training mode, and is written to.
        """
        dy = torch.zeros_like(y) if dy is None else dy
        dx, dh, dc, dweights = torch.empty_like(x), torch.empty_like(h), torch.empty_like(c), torch.zeros_like(weights)
        work, handle = self._space(self._spaces[TRAINING][0]), self._cudnn.on_stream()
        self._cudnn(
            "cudnnRNNBackwardData_v8", handle, self._rnn, _at(self._lengths), self._y, _at(y), _at(dy), self._x, _at(dx),
            self._state, _at(h), _at(dhy), _at(dh), self._state, _at(c), _at(dcy), _at(dc),
            self._bytes, _at(weights), work.numel(), _at(work), reserve.numel(), _at(reserve),
        )  # fmt: skip
        self._cudnn(  # after the other: it reads what that has put into the reserve space. It adds to the gradient.
            "cudnnRNNBackwardWeights_v8", handle, self._rnn, WGRAD_ADD, _at(self._lengths),
            self._x, _at(x), self._state, _at(h), self._y, _at(y),
            self._bytes, _at(dweights), work.numel(), _at(work), reserve.numel(), _at(reserve),
        )  # fmt: skip
        return dx, dh, dc, dweights.index_fill_(0, self._second_biases, 0)

    def _made(self, kind: str) -> c_void_p:
        descriptor = c_void_p()
        self._cudnn(f"cudnnCreate{kind}", ctypes.byref(descriptor))
        self._closing.callback(self._cudnn, f"cudnnDestroy{kind}", descriptor)
        return descriptor

    def _dropout(self, rate: float, handle: c_void_p) -> c_void_p:
        """A descriptor with random numbers of its own on the device, which every forward pass moves on."""
        descriptor = self._made("DropoutDescriptor")
        size = self._sizes("cudnnDropoutGetStatesSize", handle, outputs=1)[0] if rate else 0
        self._random = self._space(size)
        seed = torch.initial_seed() % 2**64
        self._cudnn("cudnnSetDropoutDescriptor", descriptor, handle, rate, _at(self._random), size, seed)
        return descriptor

    def _sizes(self, name: str, *arguments: object, outputs: int) -> list[int]:
        sizes = [c_size_t() for _ in range(outputs)]
        self._cudnn(name, *arguments, *map(ctypes.byref, sizes))
        return [size.value for size in sizes]

    def _space(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def _pieces(self, handle: c_void_p) -> tuple[list, list]:
        space, stack = self._space(self._bytes), self._shape.stack
        descriptors = self._made("TensorDescriptor"), self._made("TensorDescriptor")
        found = [], []
        for layer in range(stack.num_layers):
            for gate in range(GATES):
                at = c_void_p(), c_void_p()
                self._cudnn(
                    "cudnnGetRNNWeightParams", handle, self._rnn, layer, self._bytes, _at(space), gate,
                    descriptors[0], ctypes.byref(at[0]), descriptors[1], ctypes.byref(at[1]),
                )  # fmt: skip
                for pieces, address, descriptor in zip(found, at, descriptors, strict=True):
                    offset = (address.value - space.data_ptr()) // self._shape.dtype.itemsize
                    pieces.append((offset, self._dimensions(descriptor)))
        return found

    def _dimensions(self, descriptor: c_void_p) -> tuple[int, ...]:
        """Of a matrix or a bias, as cuDNN has it, with ones before and after."""
        dtype, count, sizes, strides = c_int(), c_int(), (c_int * 3)(), (c_int * 3)()
        into = ctypes.byref(dtype), ctypes.byref(count), sizes, strides
        self._cudnn("cudnnGetTensorNdDescriptor", descriptor, 3, *into)
        return tuple(sizes[: count.value])


def _at(tensor: Tensor | None) -> int | None:
    """Its address; none of what is not there or has no bytes."""
    return tensor.data_ptr() if tensor is not None and tensor.numel() else None


# --- which setting ------------------------------------------------------------------------------------------------------

# Of results against those of the standard algorithm: max|a - b| / max|b|, of outputs and of gradients. The proof of a row, which
# compares with float64, comes after this: these limits keep a setting that computes something else from being chosen.
LIMITS = {"fp32": (2e-5, 2e-4), "tf32": (5e-3, 1e-2), "fp16": (1e-2, 6e-2), "bf16": (8e-2, 5e-1)}
CLEARLY = 0.98  # of the best time so far: what is not that much faster is left, so that every process chooses alike
ROUNDS, REPLAYS = 5, 5  # the best round counts
ROUNDED = "rounds to float16"
HOPELESS = 2.0  # times the best time so far: a setting whose first replay takes longer gets no rounds


def settings(precision: str) -> list[Setting]:
    """All that may run a stack at "fp32", "tf32", "fp16" or "bf16", the standard algorithm first.

    TENSOR_OP_MATH_ALLOW_CONVERSION rounds float32 weights and states to float16: `choose` sees whether it did.
    """
    maths = {"fp32": ("FMA_MATH",), "tf32": ("DEFAULT_MATH", "TENSOR_OP_MATH_ALLOW_CONVERSION")}.get(
        precision, ("TENSOR_OP_MATH", "DEFAULT_MATH")
    )
    return [Setting(*one) for one in itertools.product(ALGORITHMS, maths, ("padded", "packed"))]


@dataclass(frozen=True)
class Choice:
    """What `choose` found.

    Attributes:
        setting: the fastest one.
        times_ms: of each that runs, of one replay.
        refused: of each that does not run, cuDNN's status or what else was wrong.
    """

    setting: Setting
    times_ms: Mapping[Setting, float]
    refused: Mapping[Setting, str]

    def __str__(self) -> str:
        """In words, without times, which are others in every process."""
        why: dict[str, list[Setting]] = {}
        for setting, reason in self.refused.items():
            why.setdefault(reason, []).append(setting)
        left_out = [f"{_listed(refused, [*self.times_ms, *self.refused])}: {reason}" for reason, refused in why.items()]
        taken = f"cuDNN {library().version} ran {self.setting}, the fastest of {len(self.times_ms)} settings"
        return "; not run: ".join([taken, *(["; ".join(left_out)] if left_out else [])])


def _listed(some: Sequence[Setting], every: Sequence[Setting]) -> str:
    """Settings in few words: an algorithm, a type of products, or both, stand for all of `every` that have them."""
    left, words = list(some), []
    ways = (
        lambda one: one.algorithm,
        lambda one: one.math,
        lambda one: f"{one.algorithm} with {one.math}",
        str,
    )
    for shorten in ways:
        for name in dict.fromkeys(map(shorten, left)):
            own = [setting for setting in every if shorten(setting) == name]
            if all(setting in left for setting in own):
                words.append(name)
                left = [setting for setting in left if setting not in own]
    return ", ".join(words)


@torch.no_grad()
def choose(
    tried: Sequence[Setting], shape: Shape, arguments: Sequence[Tensor], precision: str, training: bool, device: str
) -> Choice:
    """Time each setting in a CUDA graph of a forward pass, in training with its backward pass, and compare the results.

    Args:
        tried: the first that runs is what the others are compared with.
        arguments: of `Plan.forward`: x, h, c, weights.

    Raises:
        CudnnError: cuDNN refuses all of them; its statuses.
    """
    dy = torch.randn(shape.steps, shape.batch, shape.stack.units, device=device).to(shape.dtype)
    times, refused, expected = {}, {}, None
    space = weight_space(shape.stack, shape.dtype, device)
    for setting in tried:
        if any(other.math == setting.math and why == ROUNDED for other, why in refused.items()):
            refused[setting] = ROUNDED
            continue
        try:
            with contextlib.closing(Plan(setting, shape, device=device)) as plan:
                if (plan.size, plan.pieces) != space:
                    refused[setting] = "the weights in another order"
                    continue
                ms, found = _timed(plan, arguments, dy, training, HOPELESS * min(times.values(), default=math.inf))
        except RuntimeError as error:  # of cuDNN, or of a capture
            refused[setting] = getattr(error, "status", "") or f"{type(error).__name__}: {str(error).splitlines()[0]}"
            continue
        expected = expected or found
        wrong = _disagreement(found, expected, LIMITS[precision])
        if wrong:
            refused[setting] = wrong
        else:
            times[setting] = ms
    torch.cuda.empty_cache()  # of all graphs, which have pools of their own
    if not times:
        listed = "; ".join(f"{setting}: {why}" for setting, why in refused.items())
        raise CudnnError(f"cuDNN {library().version} runs this stack in no setting: {listed}")
    return Choice(fastest(times), times, refused)


def fastest(times: Mapping[Setting, float]) -> Setting:
    """Of the settings in turn, the last one that is clearly faster than the one chosen before it."""
    chosen, *others = times
    for setting in others:
        if times[setting] < CLEARLY * times[chosen]:
            chosen = setting
    return chosen


def _timed(
    plan: Plan, arguments: Sequence[Tensor], dy: Tensor, training: bool, hopeless_ms: float
) -> tuple[float, list[Tensor]]:
    """Milliseconds of a pass, and what it computes: outputs, last h and c, and in training the gradients."""
    found: list[Tensor] = []

    def run():
        *outputs, reserve = plan.forward(*arguments, training)
        gradients = plan.backward(*arguments, outputs[0], reserve, dy) if training else ()
        found[:] = [*outputs, *gradients]

    ms = _replays_ms(cuda_graph(run), hopeless_ms)
    return ms, [tensor.clone() for tensor in found]  # not those in the graph's own memory


def _replays_ms(replay: Callable[[], None], hopeless_ms: float) -> float:
    """Of one replay in the best round; where one alone takes longer than `hopeless_ms`, of that one."""
    _round_ms(replay, 1)
    once = _round_ms(replay, 1)
    return once if once > hopeless_ms else min(_round_ms(replay, REPLAYS) for _ in range(ROUNDS))


def _round_ms(replay: Callable[[], None], replays: int) -> float:
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begun.record()
    for _ in range(replays):
        replay()
    ended.record()
    ended.synchronize()
    return begun.elapsed_time(ended) / replays


def _disagreement(found: Sequence[Tensor], expected: Sequence[Tensor], limits: tuple[float, float]) -> str:
    """What disagrees, or ""; the first three are outputs, the others gradients."""
    for number, (given, wanted) in enumerate(zip(found, expected, strict=True)):
        kind = number >= 3
        error = (given.float() - wanted.float()).abs().max() / wanted.float().abs().max().clamp(min=TINY)
        if not error <= limits[kind]:  # NaN too
            return f"other {'gradients' if kind else 'outputs'} than the standard algorithm"
    outputs = found[0]
    return ROUNDED if outputs.itemsize > 2 and torch.equal(outputs, outputs.half().float()) else ""


# --- the stack ----------------------------------------------------------------------------------------------------------


@functools.cache
def weight_space(stack: StackSpec, dtype: torch.dtype, device: str) -> tuple[int, tuple[list, list]]:
    """(size, pieces) of a stack's flat weights, as of `Plan`; `choose` lets no setting run that has others."""
    setting, shape = Setting("STANDARD", "DEFAULT_MATH", "padded"), Shape(stack, dtype, steps=1, batch=1)
    with contextlib.closing(Plan(setting, shape, device=device)) as plan:
        return plan.size, plan.pieces


class CudnnLSTM(nn.Module):
    """A stack of LSTM layers, run by the setting that `choose` finds at the first call of each shape and mode.

    Args:
        stack: layers, units, inputs.
        dtype: of the weights and of all else: float32, float16 or bfloat16.
        device: "cuda:0".

    Attributes:
        weights: flat, as cuDNN keeps them (`weight_space`); zeros at first.
        choices: (time steps, batch, training) → its Choice.
    """

    def __init__(self, stack: StackSpec, dtype: torch.dtype, device: str) -> None:
        super().__init__()
        self._stack, self._device = stack, device
        self.weights = nn.Parameter(torch.zeros(weight_space(stack, dtype, device)[0], dtype=dtype, device=device))
        self.choices: dict[tuple[int, int, bool], Choice] = {}

    def forward(self, x: Tensor, h: Tensor, c: Tensor, rate: float, training: bool) -> tuple[Tensor, Tensor, Tensor]:
        """x [time, batch, input], h and c [layers, batch, units] → y [time, batch, units], the final h and c."""
        steps, batch = x.shape[:2]
        if (steps, batch, training) not in self.choices:
            precision = {torch.float16: "fp16", torch.bfloat16: "bf16"}.get(
                x.dtype, "tf32" if torch.backends.cudnn.allow_tf32 else "fp32"
            )
            shape = Shape(self._stack, x.dtype, steps, batch)
            given = [tensor.contiguous() for tensor in (x, h, c)] + [self.weights]
            found = choose(settings(precision), shape, given, precision, training, self._device)
            self.choices[steps, batch, training] = found
            times = "".join(f"\n  {setting}: {ms:.3f} ms" for setting, ms in found.times_ms.items())
            print(
                f"{steps} steps, batch {batch}, {'training' if training else 'inference'}: {found}", times, flush=True
            )
        setting = str(self.choices[steps, batch, training].setting)
        return _forward(x, h, c, self.weights, setting, float(rate), training)[:3]


@functools.cache
def _plan(setting: str, shape: Shape, rate: float, device: str) -> Plan:
    return Plan(Setting(*setting.split(", ")), shape, rate, device)


def _plan_of(setting: str, rate: float, x: Tensor, h: Tensor) -> Plan:
    stack = StackSpec("lstm", h.shape[0], h.shape[2], x.shape[2])
    return _plan(setting, Shape(stack, x.dtype, *x.shape[:2]), rate, str(x.device))


# Ops of PyTorch's, so that models/pytorch/difference.py sees them and autograd calls the one from the other; their names and
# arguments are those that it knows from PyTorch's own.
@torch.library.custom_op("lstm_benchmarks::_cudnn_rnn", mutates_args=())
def _forward(
    x: Tensor, h: Tensor, c: Tensor, weights: Tensor, setting: str, dropout: float, training: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, h, c = x.contiguous(), h.contiguous(), c.contiguous()
    return _plan_of(setting, dropout, x, h).forward(x, h, c, weights, training)


@torch.library.custom_op("lstm_benchmarks::_cudnn_rnn_backward", mutates_args=("reserve",))
def _backward(
    x: Tensor, h: Tensor, c: Tensor, weights: Tensor, y: Tensor, reserve: Tensor, dy: Tensor | None, dhy: Tensor | None,
    dcy: Tensor | None, setting: str, dropout: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    x, h, c = x.contiguous(), h.contiguous(), c.contiguous()
    gradients = [gradient if gradient is None else gradient.contiguous() for gradient in (dy, dhy, dcy)]
    return _plan_of(setting, dropout, x, h).backward(x, h, c, weights, y, reserve, *gradients)


def _keep(ctx, inputs, output) -> None:
    *tensors, ctx.setting, ctx.rate, _ = inputs
    y, _, _, reserve = output
    ctx.save_for_backward(*tensors, y, reserve)
    ctx.set_materialize_grads(False)


def _gradients(ctx, dy, dhy, dcy, _) -> tuple[Tensor | None, ...]:
    return *_backward(*ctx.saved_tensors, dy, dhy, dcy, ctx.setting, ctx.rate), None, None, None


_forward.register_autograd(_gradients, setup_context=_keep)
