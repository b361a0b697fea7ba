"""The column "what ran": the ops and GPU kernels of a record's profile, in words.

A record keeps ops under the regular expressions that its row expects, and kernels under their mangled names.
"""

import re
from collections.abc import Mapping, Sequence

LONGEST = 2  # kernels that are named
# The first that is found in a record's text gives the words.
OPS = (
    (r"cudnn\S*rnn|CudnnRNN", "cuDNN LSTM call"),
    (r"XlaCustomCall", "CUDA kernel called by XLA"),
    (r"BatchMatMulV2\|Einsum", "product of all layers or of one"),
    (r"BatchMatMul", "batched matrix product"),
    (r"BlockLSTM", "BlockLSTMV2 op"),
    (r"LSTMBlockCell", "LSTMBlockCell op"),
    (r"lstm_cell", "LSTM cell op"),
    (r"LSTM\(Sequence\|Cell\)", "OpenVINO's LSTM op"),
    (r"aten::lstm", "nn.LSTM call"),
    (r"cudaGraphLaunch", "CUDA graph launch"),
    (r"CompiledFxGraph", "torch.compile graph"),
    (r"CollectiveReduce", "sum over all replicas"),
    (r"MatMul|mm$|\bdot\b", "matrix product"),
    (r"AssignVariableOp|Assign\(", "update of a variable"),
    (r"^(xla:)?[Ww]hile$", "loop"),
    (r"^xla$", "XLA program"),
    (r"^forward$", "TorchScript graph"),
    (r"^program$", "jitted call"),
    (r"_fused_\(adam", "fused optimizer"),
    (r"_foreach_add", "optimizer over all tensors"),
    (r"nll_loss", "loss, both passes"),
)
COUNTS = {"launches": "launches", "syncs": "waits for the GPU"}  # of kernels on a GPU, of ops on a CPU
PLACES = (("eager:", ", eager"), ("loop:", " in a loop"))
KERNELS = (
    (r"lstm_wavefront_forward_by_float16", "our persistent kernel, forward, by float16"),
    (r"lstm_wavefront_forward_by_pairs_of_float16", "our persistent kernel, forward, by pairs of float16"),
    (r"lstm_wavefront_backward_by_float16", "our persistent kernel, backward, by float16"),
    (r"lstm_wavefront_backward_by_pairs_of_float16", "our persistent kernel, backward, by pairs of float16"),
    (r"lstm_(wavefront|cluster)_forward", "our persistent kernel, forward"),
    (r"lstm_(wavefront|cluster)_backward", "our persistent kernel, backward"),
    (r"softmax_cross_entropy_by_float16", "our softmax kernel, by float16"),
    (r"softmax_cross_entropy_by_pairs_of_float16", "our softmax kernel, by pairs of float16"),
    (r"softmax_cross_entropy", "our softmax kernel"),
    (r"RNN_(block)?[Pp]ersist", "cuDNN's persistent LSTM kernel"),
    (r"elemWiseRNNcell|elementWise_|cudnn\w*rnn", "cuDNN's LSTM gates"),
    (r"lstm_gates", "BlockLSTM's gates"),
    (r"lstm_cell_(forward|backward)", "PyTorch's LSTM cell"),
    (r"gemm_fusion|triton\w*(dot|gemm)", "matrix product (Triton)"),
    (r"cutlass|gemm|nvjet|cublas|gemv", "matrix product (cuBLAS)"),
    (r"[Ss]oft[Mm]ax", "softmax"),
    (r"[Mm]emcpy", "copy"),
    (r"^(fused_|triton_)", "fused kernel (PyTorch)"),
    (r"fusion|^wrapped_", "fused kernel (XLA)"),
    (r"at::native", "PyTorch's kernel of one op"),
    (r"tensorflow::|Eigen::|_GPU_DT_", "TensorFlow's kernel of one op"),
)


def in_words(kernel: Mapping | None) -> str:
    """What a proof's `kernel` says that ran: ops with how often, and the kinds of the longest GPU kernels; "" for nothing."""
    kernel = kernel or {}
    ops = kernel.get("ops")
    seen = [f"{op_in_words(op)} × {count}" for op, count in ops.items()] if isinstance(ops, Mapping) else []
    names = dict.fromkeys(kernel_in_words(name) for name in list(kernel.get("kernels") or ())[:LONGEST])
    if names:
        seen.append(f"longest: {', '.join(names)}")
    for key, what in COUNTS.items():
        if isinstance(kernel.get(key), int) and kernel[key]:
            seen.append(f"{kernel[key]:,} {what}")
    return "; ".join(seen) or "; ".join(
        f"{key}: {value}" for key, value in kernel.items() if key not in ("ops", "kernels", *COUNTS)
    )


def op_in_words(pattern: str) -> str:
    """An expected op, such as `loop:\\w*MatMul`, in words: "matrix product in a loop"."""
    bare = re.sub(r"\([^()]*:\)\?", "", pattern)  # (loop:)? and (\w+:)? say that the op may stand anywhere
    words = _words(bare, OPS) or re.sub(r"\\[wS][*+]?|\.\*|[()?^$\\]", "", bare).rpartition(":")[2]
    return "".join([words, *(place for prefix, place in PLACES if prefix in bare)])


def reason_in_words(reason: str) -> str:
    """Why a row failed, with the ops and kernels that it expected in words; its record and log have the expressions."""
    text = re.sub(r"\bop (\S+) ran (\d+ times)", lambda found: f"{op_in_words(found[1])} ran {found[2]}", reason)
    return re.sub(
        r"(no kernel on the GPU )matches ([^\s;]+)",
        lambda found: f"{found[1]}is {_words(found[2], KERNELS) or 'of this row'}",
        text,
    )


def kernel_in_words(name: str) -> str:
    """A kernel by what it does; of an unknown one its name without types."""
    bare = re.sub(r"^void |<.*|\(.*", "", name).rpartition("::")[2]
    return _words(name, KERNELS) or bare[:40] or name[:40]


def _words(text: str, table: Sequence[tuple[str, str]]) -> str:
    return next((words for pattern, words in table if re.search(pattern, text)), "")
