"""A function of the device, captured once as a CUDA graph and replayed: one launch instead of hundreds."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

WARM_UP = 3  # calls before the capture: libraries pick algorithms and allocate, torch.compile compiles


def captured(
    function: Callable[[], None], changed: Sequence[Tensor], record: Callable[[Callable], Callable] | None = None
) -> Callable[[], None]:
    """Something to call instead of `function`, with all of its work in one CUDA graph.

    The graph reads and writes the very addresses that `function` touches now: its inputs have to be copied into the same
    tensors before every call, and what it changes must never be replaced by another tensor.

    Args:
        function: takes and returns nothing; launches the same kernels on the same tensors at every call, and waits for none.
        changed: every tensor that `function` changes and a later call reads. The calls before the capture change them
            too, so they are put back.
        record: turns the function into its replay; None: `cuda_graph`.
    """
    before = [tensor.detach().clone() for tensor in changed]
    replay = (record or cuda_graph)(function)
    with torch.no_grad():
        torch._foreach_copy_([tensor.detach() for tensor in changed], before)
    return replay


class SharedMemory:
    """Memory that graphs share which never run at once: what one of them has written the next one's replay may overwrite.

    PyTorch gives a freed block back to its own stream alone, so all of them are captured on one; and it takes no pool again whose
    graphs are all gone.
    """

    def __init__(self) -> None:
        self.pool, self.stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()


def cuda_graph(function: Callable[[], None], shared: SharedMemory | None = None) -> Callable[[], None]:
    """Warm up on a side stream, capture (which runs nothing), and return the graph's replay; as PyTorch's manual has it.

    Both on one stream: autograd sends each gradient back on the stream of its forward op, and a capture may not wait for another.

    Args:
        function: as of `captured`.
        shared: the graph's memory, with others; None: its own.
    """
    stream, pool = (shared.stream, shared.pool) if shared else (torch.cuda.Stream(), None)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=stream):
        function()
    return graph.replay
