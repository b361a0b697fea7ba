"""The column "what ran" has words, no regular expressions and no mangled names."""

import re

import pytest

from harness.record import records
from harness.report import what_ran
from tests.record_cases import RUNS

PATTERN = re.compile(r"[\\*?|<>{}()\[\]]|::")


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        (r"\w*MatMul", "matrix product"),
        (r"eager:MatMul", "matrix product, eager"),
        (r"loop:(dot|custom-call:__(cublas|onednn)\S*)", "matrix product in a loop"),
        (r"(\w+:)?CudnnRNN\w*", "cuDNN LSTM call"),
        (r"xla:(loop:)?XlaCustomCallV2", "CUDA kernel called by XLA"),
        (r"## Call CompiledFxGraph.*", "torch.compile graph"),
        (r"NewOp\w*", "NewOp"),
    ],
)
def test_an_expected_op_is_told_in_words(pattern, words):
    assert what_ran.op_in_words(pattern) == words


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("lstm_wavefront_backward", "our persistent kernel, backward"),
        ("lstm_cluster_forward", "our persistent kernel, forward"),
        ("lstm_wavefront_forward_by_float16", "our persistent kernel, forward, by float16"),
        ("lstm_wavefront_backward_by_pairs_of_float16", "our persistent kernel, backward, by pairs of float16"),
        ("softmax_cross_entropy_by_pairs_of_float16", "our softmax kernel, by pairs of float16"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_64x64_32x6_tn_align4>(x)", "matrix product (cuBLAS)"),
        ("void elemWiseRNNcell<float, float>(int)", "cuDNN's LSTM gates"),
        ("gemm_fusion_dot_2", "matrix product (Triton)"),
        ("void some::unknown_kernel<float, 4>(int, float*)", "unknown_kernel"),
    ],
)
def test_a_kernel_is_told_by_what_it_does(name, words):
    assert what_ran.kernel_in_words(name) == words


def test_ops_come_with_how_often_and_equal_kernels_once():
    kernel = {"ops": {"CudnnRNNV3": 2}, "kernels": {"nvjet_a": 2.0, "nvjet_b": 1.0, "lstm_gates": 0.1}}
    assert what_ran.in_words(kernel) == "cuDNN LSTM call × 2; longest: matrix product (cuBLAS)"
    assert what_ran.in_words({}) == what_ran.in_words(None) == ""


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        (r"kernel: op loop:(dot|custom-call:__(cublas|onednn)\S*) ran 0 times, expected 2 to 4",
         "kernel: matrix product in a loop ran 0 times, expected 2 to 4"),
        ("kernel: no kernel on the GPU matches RNN_(block)?[Pp]ersist|elemWiseRNNcell; loss: NaN",
         "kernel: no kernel on the GPU is cuDNN's LSTM gates; loss: NaN"),
        ("out of memory", "out of memory"),
    ],
)  # fmt: skip
def test_why_a_row_failed_is_told_without_expressions(reason, words):
    assert what_ran.reason_in_words(reason) == words


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_of_every_committed_record_it_is_words(run):
    kernels = [(record["proof"] or {}).get("kernel") or {} for record in records.read_run(run)[0]]
    shown = {what_ran.op_in_words(op) for kernel in kernels for op in kernel.get("ops", {})}
    shown |= {what_ran.kernel_in_words(name) for kernel in kernels for name in kernel.get("kernels", {})}
    shown = {re.sub(r" \((cuBLAS|Triton|XLA|PyTorch)\)$", "", words) for words in shown}
    assert "" not in shown and not [words for words in shown if PATTERN.search(words)]
