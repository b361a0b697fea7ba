"""Every JAX row, and Keras on JAX and PyTorch, on an NVIDIA GPU: it computes what the reference does, as its name says."""

import importlib.util

import numpy as np
import pytest

from harness.measure.proof import Proof
from harness.record import machine
from models import rows
from tests import cases, jax_cases

pytestmark = pytest.mark.gpu

jax = pytest.importorskip("jax")
ROWS = [(row, p) for row, made in (rows.JAX | rows.KERAS).items() for p in made.precisions]
OWN = [(row, precision) for row, precision in ROWS if row.startswith("jax")]
KERAS = [(row, precision) for row, precision in ROWS if row.startswith("keras")]


@pytest.fixture(scope="module", autouse=True)
def gpu():
    if not machine.gpu_count() or jax.default_backend() != "gpu":
        pytest.skip("needs an NVIDIA GPU and a build of JAX for it")
    before = jax.config.jax_default_matmul_precision
    yield
    jax.config.update("jax_default_matmul_precision", before)


@pytest.mark.parametrize(("row", "precision"), OWN)
def test_row_computes_what_the_reference_does_by_the_kernels_it_names(row, precision):
    runtime = jax_cases.make_runtime("gpu", precision)
    for ptb in (False, True):
        trial, reference = jax_cases.language_model(row, precision, ptb), cases.language_model_reference(ptb)
        for mode in ("train", "forward", "stack"):
            proof = cases.prove(trial, mode, precision, reference, jax_cases.kernel_of(row, "gpu"), runtime)
            assert proof.record()["ok"], f"{mode}{', ptb' * ptb}: {proof.record()['reason']}"
            assert proof.kernel["kernels"], f"{mode}: the profiler saw no kernel"


def test_loop_is_seen_where_there_are_more_steps_than_one_iteration_has(monkeypatch):
    from models.jax import stacks

    runtime = jax_cases.make_runtime("gpu", "fp32")
    monkeypatch.setitem(stacks.UNROLL, "gpu", 2)
    trial, reference = jax_cases.language_model("jax_scan", "fp32"), cases.language_model_reference()
    kernel = jax_cases.kernel_of("jax_scan", "cpu")  # the expected ops of loops
    for mode in ("train", "forward", "stack"):
        proof = cases.prove(trial, mode, "fp32", reference, kernel, runtime)
        assert proof.record()["ok"], f"{mode}: {proof.record()['reason']}"


@pytest.mark.parametrize(("row", "precision"), KERAS)
def test_keras_row_computes_what_the_reference_does_by_the_kernels_it_names(row, precision):
    if not importlib.util.find_spec(rows.LANGUAGE_MODEL[row].framework):
        pytest.skip("not installed")
    found = jax_cases.proofs_of(row, "gpu", precision)
    found.pop("behaviour")
    for case, record in found.items():
        assert record["ok"], f"{case}: {record['reason']}"


@pytest.mark.parametrize(("label", "executed_in", "caught"), [
    ("tf32", "fp32", "precision"), ("fp32", "tf32", "outputs"), ("fp16", "tf32", "precision"), ("tf32", "fp16", "precision"),
])  # fmt: skip
@pytest.mark.parametrize("row", ["jax_scan", "jax_cudnn"])
def test_precision_mistaken_for_another_fails(row, label, executed_in, caught):
    if executed_in not in rows.LANGUAGE_MODEL[row].precisions:
        pytest.skip(f"has no {executed_in}")
    jax_cases.make_runtime("gpu", executed_in)
    proof = Proof(label)
    proof.outputs(jax_cases.language_model(row, executed_in).outputs(), cases.language_model_reference()["outputs"])
    assert caught in proof.record()["failed"]


@pytest.mark.parametrize(("named", "ran"), [("jax_scan", "jax_cudnn"), ("jax_cudnn", "jax_scan")])
def test_row_that_runs_something_else_than_it_names_is_caught(named, ran):
    runtime = jax_cases.make_runtime("gpu", "fp32")
    trial, reference = jax_cases.language_model(ran, "fp32"), cases.language_model_reference()
    proof = cases.prove(trial, "train", "fp32", reference, jax_cases.kernel_of(named, "gpu"), runtime)
    assert proof.record()["failed"] == ["kernel"]


def test_sync_waits_for_programs_whose_results_nobody_keeps():
    runtime = jax_cases.make_runtime("gpu", "fp32")

    @jax.jit
    def products(a):
        return jax.lax.fori_loop(0, 200, lambda _, b: a @ b / 4096.0, a)

    a = jax.numpy.ones((4096, 4096))
    for _ in range(2):
        kept = products(a)
        for _ in range(3):
            products(a)
        runtime.sync()
        assert kept.is_ready()
    held = runtime.memory_peak()
    assert held > 3 * a.nbytes
    assert np.isfinite(runtime.to_numpy([kept[0, 0]])).all()
