"""The peers of mnist.py on an NVIDIA GPU: each computes what the reference does, by the kernels that it names, and learns."""

import numpy as np
import pytest

from harness.measure.clocks import EpochClock
from harness.measure.proof import UPDATE_STEPS, Kernel, Proof
from harness.record import machine
from models import rows
from tests import cases, torch_cases
from tests.models import test_keras_backends

pytestmark = pytest.mark.gpu

torch = pytest.importorskip("torch")
PEERS = rows.FIT
ROWS = list(rows.PYTORCH)
CAPTURED = [row for row in ROWS if PEERS[row].arguments["captured"]]
IN_ONE_PROCESS_EACH = [
    (row, precision)
    for row, made in PEERS.items()
    for precision in rows.PRECISIONS
    if row in rows.JAX | rows.KERAS and precision in made.precisions
]


@pytest.fixture(scope="module", autouse=True)
def gpu():
    if not machine.gpu_count() or not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU and a build of PyTorch for it")
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32, matmul.allow_fp16_reduced_precision_reduction
    yield
    matmul.allow_tf32, cudnn.allow_tf32, matmul.allow_fp16_reduced_precision_reduction = before


def trial_of(row: str, precision: str, dropout: float = 0.2, **options):
    """As mnist.py makes it, at the size of tests.cases."""
    torch.compiler.reset()
    return cases.build_classifier_of(PEERS[row], precision, dropout, device="cuda:0", **options)


@pytest.mark.parametrize("precision", rows.PRECISIONS)
@pytest.mark.parametrize("row", ROWS)
def test_row_computes_what_the_reference_does_by_the_kernels_it_names(row, precision):
    runtime = torch_cases.make_runtime("gpu", precision)
    trial = trial_of(row, precision)
    kernel = Kernel(**PEERS[row].expected_ops(cases.LAYERS, cases.STEPS, "gpu", UPDATE_STEPS))
    proof = cases.prove_fit(trial, precision, kernel, runtime)
    assert proof.record()["ok"], proof.record()["reason"]


@pytest.mark.parametrize(("row", "precision"), IN_ONE_PROCESS_EACH)
def test_peer_in_a_process_of_its_own_is_proven_and_learns(row, precision):
    pytest.importorskip(PEERS[row].framework)
    test_keras_backends.check(test_keras_backends.found_of(row, "gpu", precision))


@pytest.mark.parametrize(("label", "executed_in", "caught"), [
    ("tf32", "fp32", "precision"), ("fp32", "tf32", "outputs"), ("fp16", "tf32", "precision"), ("tf32", "fp16", "precision"),
])  # fmt: skip
@pytest.mark.parametrize("row", ["torch_lstm", "torch_lstm_graph"])
def test_precision_mistaken_for_another_fails(row, label, executed_in, caught):
    torch_cases.make_runtime("gpu", executed_in)
    proof = Proof(label)
    proof.outputs(trial_of(row, executed_in).outputs(), cases.classifier_reference()["outputs"])
    assert caught in proof.record()["failed"]


@pytest.mark.parametrize("row", CAPTURED)
def test_graph_follows_the_same_step_run_op_by_op_over_restores(row):
    torch_cases.make_runtime("gpu", "fp32")
    captured, eager = (trial_of(name, "fp32") for name in (row, "torch_lstm"))
    wanted = eager.train_steps(6)
    for _ in range(3):
        np.testing.assert_allclose(captured.train_steps(6), wanted, rtol=1e-4)
        captured.outputs(), captured.timed_steps(2), captured.restore()


@pytest.mark.parametrize("row", CAPTURED)
def test_replayed_dropout_draws_new_masks(row):
    torch_cases.make_runtime("gpu", "fp32")
    trial, losses = trial_of(row, "fp32"), set()
    for _ in range(4):
        trial.restore()
        losses.add(trial.timed_steps(1).item())
    assert len(losses) == 4


@pytest.mark.parametrize("row", ["torch_lstm", *CAPTURED])
def test_timed_step_waits_for_nothing(row):
    torch_cases.make_runtime("gpu", "fp32")
    trial = trial_of(row, "fp32")
    trial.timed_steps(1), trial.outputs()
    index = torch.arange(cases.BATCH, device="cuda:0")
    [batch] = trial._batches(trial.inputs[: cases.BATCH], trial.labels[: cases.BATCH])
    torch.cuda.set_sync_debug_mode("error")
    try:
        trial._train(index), trial._forward(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("row", CAPTURED)
def test_fit_is_one_launch_of_a_graph_per_step(row):
    """Training steps and whole batches of the validation; its last batch, a smaller one, runs op by op."""
    runtime = torch_cases.make_runtime("gpu", "fp32")
    trial = trial_of(row, "fp32", capacity=len(cases.classifier_start()[1]))
    test = trial.inputs[:40], trial.labels[:40]
    trial.warm_up(test), trial.timed_steps(1)
    traces, clock = trial.traces, EpochClock()
    seen = runtime.profile(lambda: trial.fit(trial.inputs, trial.labels, 2, test, clock))
    assert seen["ops"][rows.GRAPH_LAUNCH] == 2 * (cases.BATCHES + 1)
    assert trial.traces == traces and len(clock.train_s) == len(clock.validation_s) == 2


@pytest.mark.parametrize("row", ["torch_lstm", "torch_lstm_graph"])
@pytest.mark.parametrize("precision", ["tf32", "fp16"])
def test_fit_learns(row, precision):
    torch_cases.make_runtime("gpu", precision)
    trial = trial_of(row, precision)
    place = np.arange(cases.STEPS * cases.FEATURES) % cases.CLASSES
    x = np.float32(place == trial.labels[:, np.newaxis]).reshape(trial.inputs.shape)
    result = trial.fit(x, trial.labels, 20, (x[:40], trial.labels[:40]), EpochClock())
    assert result["losses"][-1] < 0.5 * result["losses"][0] and result["accuracy"]["val_acc"] > 0.8
