"""Whether two steps launch the same ops but for cuDNN's dropout rate, which is baked into a captured step."""

import re
from collections.abc import Callable

import torch
from torch import distributed
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Arguments of aten::_cudnn_rnn and its backward that follow from the rate: itself, the generator that a rate of 0 does
# without, and what the forward pass keeps for the backward one, masks among it.
RATE_ARGUMENTS = ("dropout", "dropout_state", "reserve")
# Not of the step: cuDNN's random generator, made once in a process, and marks for a profiler, which print their address.
NOT_OF_THE_STEP = r"_cudnn_init_dropout_state|^profiler\."

Ops = list[tuple[str, dict[str, str]]]  # (op, {argument: value}), in the order of their launches


class _Recorder(TorchDispatchMode):
    """Writes down every aten op: its name, the numbers it is given, and the shapes and dtypes of its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: Ops = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        names = [argument.name for argument in function._schema.arguments]
        given = dict(zip(names, args, strict=False)) | kwargs
        if re.search(r"_cudnn_rnn(_backward)?\b", str(function)):
            given = {name: value for name, value in given.items() if name not in RATE_ARGUMENTS}
        if not re.search(NOT_OF_THE_STEP, str(function)):
            self.ops.append((str(function), {name: _described(value) for name, value in given.items()}))
        return function(*args, **kwargs)


def _described(value: object) -> str:
    return ", ".join(map(_leaf, tree_leaves(value)))


def _leaf(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {list(value.shape)}"
    if isinstance(value, torch.UntypedStorage):  # of cuDNN's flat weights; its text would hold an address
        return f"{value.nbytes()} bytes on {value.device}"
    if isinstance(value, torch.ScriptObject):  # likewise
        return _boxed(value)
    return repr(value)


def _boxed(value: torch.ScriptObject) -> str:
    """What a collective is given: the reduction by its name, a group of processes by its own."""
    kind = value._type().name()
    if kind == "ReduceOp":
        if not hasattr(distributed.ReduceOp, "unbox"):  # an older PyTorch's stays closed
            return kind
        op = distributed.ReduceOp.unbox(value)
        return next(name for name, known in distributed.ReduceOp.RedOpType.__members__.items() if op == known)
    if kind == "ProcessGroup":
        return distributed.ProcessGroup.unbox(value).group_name
    raise TypeError(f"{kind}: what tells two of them apart is not known: see models/pytorch/difference.py")


def ops_of(step: Callable[[], object]) -> Ops:
    """The aten ops that `step` dispatches, run op by op: without torch.compile, and in no CUDA graph.

    It runs twice: what is made in a first run and kept, such as cuDNN's generator of dropout masks, is not of the step.
    """
    with torch.compiler.set_stance("force_eager"):
        step()
        with _Recorder() as recorder:
            step()
    return recorder.ops


def step_difference(timed: Ops, proven: Ops) -> str:
    """The first op in which two steps differ, in words; "" where only _cudnn_rnn's dropout is another."""
    for number, ((op, given), (proven_op, proven_given)) in enumerate(zip(timed, proven, strict=False)):
        if op != proven_op:
            return f"op {number} of the timed step is {op}, of the proven one {proven_op}"
        if given != proven_given:
            changed = [name for name in {**given, **proven_given} if given.get(name) != proven_given.get(name)]
            return f"op {number}, {op}, differs between the timed and the proven step in {', '.join(changed)}"
    if len(timed) != len(proven):
        return f"the timed step has {len(timed)} ops, the proven one {len(proven)}"
    return ""
