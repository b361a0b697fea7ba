"""On a GPU: what a timed step copies to the host is seen in the profile, in every framework; and a clock without a sync.

One framework a process: python -m pytest tests/test_gpu_host_copies.py -k tensorflow, and so on. Two CUDA runtimes in one
do not agree on what a GPU looks like. ./run_tests.sh runs each in that framework's environment, where the others are missing.
"""

import pytest

from harness.measure import clocks
from harness.measure.proof import TO_HOST_LIMIT, Proof
from tests import cases, jax_cases, torch_cases

pytestmark = pytest.mark.gpu


def tensorflow_case(row: str = "keras_cudnn"):
    runtime = cases.make_runtime("gpu", "fp32")  # first: it bounds what TensorFlow takes of the GPU's memory
    trial = cases.language_model(row, "fp32")
    return trial, runtime, lambda: trial.embedding.value.numpy()


def torch_case(row: str = "torch_lstm"):
    pytest.importorskip("torch")
    runtime = torch_cases.make_runtime("gpu", "fp32")
    trial = torch_cases.language_model(row, "fp32", device=runtime.device_name)
    return trial, runtime, lambda: trial.masters[0].detach().cpu()


def jax_case(row: str = "jax_scan"):
    pytest.importorskip("jax")
    runtime = jax_cases.make_runtime("gpu", "fp32")
    trial = jax_cases.language_model(row, "fp32")
    return trial, runtime, lambda: trial.parameters[0].__array__()


@pytest.mark.parametrize("case", [tensorflow_case, torch_case, jax_case], ids=["tensorflow", "torch", "jax"])
def test_copy_of_the_logits_is_seen_and_the_rows_own_steps_copy_nothing(case):
    """The embedding stands for the logits, which no step gives away: 256 KB."""
    trial, runtime, read = case()
    trial.restore()
    trial.train(trial.batches[0])
    assert runtime.profile(lambda: trial.train(trial.batches[0]))["to_host_bytes"] <= TO_HOST_LIMIT
    seen = runtime.profile(lambda: (trial.train(trial.batches[0]), read()))["to_host_bytes"]
    assert seen >= 4 * cases.VOCABULARY * cases.EMBEDDING


def tensorflow_product():
    import tensorflow as tf

    runtime, a = cases.make_runtime("gpu", "fp32"), tf.random.uniform((8192, 8192))
    return runtime, lambda: tf.reduce_sum(a @ a)


def torch_product():
    torch = pytest.importorskip("torch")
    runtime = torch_cases.make_runtime("gpu", "fp32")
    a = torch.rand((8192, 8192), device=runtime.device_name)
    return runtime, lambda: (a @ a).sum()


def jax_product():
    jax = pytest.importorskip("jax")
    runtime = jax_cases.make_runtime("gpu", "fp32")
    a = jax.random.uniform(jax.random.key(1), (8192, 8192))
    step = jax.jit(lambda: (a @ a).sum())
    return runtime, step


@pytest.mark.parametrize(
    "product", [tensorflow_product, torch_product, jax_product], ids=["tensorflow", "torch", "jax"]
)
@pytest.mark.parametrize("synced", [True, False])
def test_reading_a_loss_waits_for_what_a_clock_without_a_sync_leaves_out(product, synced, monkeypatch):
    """20 products of about 20 ms each."""
    runtime, step = product()
    monkeypatch.setattr(clocks, "WINDOW_S", 1e-4)  # of steps that seem to take no time, thousands would fill a window
    found = clocks.time_blocks(
        lambda _: step(), [0], sync=runtime.sync if synced else lambda: None, restore=runtime.sync,
        read=lambda loss: runtime.to_numpy([loss]), warmup_batches=3, warmup_limit_s=0.0, timed_batches=20, blocks=3,
        min_block_s=0.0,
    )  # fmt: skip
    proof = Proof("fp32")
    proof.clock(found.lag_s, found.lag_limit_s, found.at_work)
    assert list(proof.failures) == ([] if synced else ["clock"])
    assert (min(found.lag_s) < clocks.LAG_LIMIT_S) == synced
