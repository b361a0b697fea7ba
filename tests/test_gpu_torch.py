"""Every PyTorch row on an NVIDIA GPU: it computes what the reference does, in the precision and by the kernels that it names.

Of the language models, and of mnist.py's classifier, whose peers on other backends have a process each.
"""

import re

import numpy as np
import pytest

from harness.measure.clocks import EpochClock
from harness.measure.proof import UPDATE_STEPS, Kernel, Proof
from harness.record import machine
from models import rows
from models.weights import canonical
from tests import cases, torch_cases
from tests.models import test_keras_backends

pytestmark = pytest.mark.gpu

torch = pytest.importorskip("torch")

from models.pytorch import cudnn_rnn  # noqa: E402 (PyTorch may be missing)

ROWS = list(rows.PYTORCH)
CAPTURED = [row for row, made in rows.PYTORCH.items() if made.arguments["captured"]]
IN_ONE_PROCESS_EACH = [
    (row, precision)
    for row, made in rows.FIT.items()
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


def model(row: str, precision: str, ptb: bool = False, **options):
    return torch_cases.language_model(row, precision, ptb, device="cuda:0", **options)


def classifier(row: str, precision: str, dropout: float = 0.2, **options):
    """As mnist.py makes it, at the size of tests.cases."""
    torch.compiler.reset()
    return cases.build_classifier_of(rows.FIT[row], precision, dropout, device="cuda:0", **options)


@pytest.mark.parametrize("precision", rows.PRECISIONS)
@pytest.mark.parametrize("row", ROWS)
def test_row_computes_what_the_reference_does_by_the_kernels_it_names(row, precision):
    runtime = torch_cases.make_runtime("gpu", precision)
    trial = model(row, precision)
    for mode in ("train", "forward", "stack"):
        trial.train(trial.batches[0])  # TorchScript and torch.compile build their kernels here
        proof = cases.prove(
            trial, mode, precision, cases.language_model_reference(), torch_cases.kernel_of(row, "gpu"), runtime
        )
        assert proof.record()["ok"], f"{mode}: {proof.record()['reason']}"


@pytest.mark.parametrize("precision", rows.PRECISIONS)
@pytest.mark.parametrize("row", ROWS)
def test_ptb_row_computes_what_the_reference_does(row, precision):
    runtime = torch_cases.make_runtime("gpu", precision)
    trial = model(row, precision, ptb=True)
    trial.train(trial.batches[0])
    reference, kernel = cases.language_model_reference(ptb=True), torch_cases.kernel_of(row, "gpu")
    proof = cases.prove(trial, "train", precision, reference, kernel, runtime)
    assert proof.record()["ok"], proof.record()["reason"]


@pytest.mark.parametrize("precision", rows.PRECISIONS)
@pytest.mark.parametrize(("row", "runs_as"), [("torch_packed", "torch_lstm"), ("torch_lstm_graph", "torch_lstm_graph")])
def test_sentences_are_proven(row, runs_as, precision):
    runtime = torch_cases.make_runtime("gpu", precision)
    trial, reference = torch_cases.sentence_model(row, precision, "cuda:0")
    proof = cases.prove(trial, "train", precision, reference, torch_cases.kernel_of(runs_as, "gpu"), runtime)
    assert proof.record()["ok"], proof.record()["reason"]


@pytest.mark.parametrize("precision", rows.PRECISIONS)
@pytest.mark.parametrize("row", ROWS)
def test_classifier_computes_what_the_reference_does_by_the_kernels_it_names(row, precision):
    runtime = torch_cases.make_runtime("gpu", precision)
    trial = classifier(row, precision)
    kernel = Kernel(**rows.FIT[row].expected_ops(cases.LAYERS, cases.STEPS, "gpu", UPDATE_STEPS))
    proof = cases.prove_fit(trial, precision, kernel, runtime)
    assert proof.record()["ok"], proof.record()["reason"]


@pytest.mark.parametrize(("row", "precision"), IN_ONE_PROCESS_EACH)
def test_peer_in_a_process_of_its_own_is_proven_and_learns(row, precision):
    pytest.importorskip(rows.FIT[row].framework)
    test_keras_backends.check(test_keras_backends.found_of(row, "gpu", precision))


@pytest.mark.parametrize(("label", "executed_in", "caught"), [
    ("tf32", "fp32", "precision"), ("fp32", "tf32", "outputs"), ("fp16", "tf32", "precision"), ("tf32", "fp16", "precision"),
])  # fmt: skip
@pytest.mark.parametrize(
    ("make", "row"),
    [
        *((model, row) for row in ("torch_cells", "torch_lstm", *CAPTURED)),
        *((classifier, row) for row in ("torch_lstm", "torch_lstm_graph")),
    ],
)
def test_precision_mistaken_for_another_fails(make, row, label, executed_in, caught):
    torch_cases.make_runtime("gpu", executed_in)
    proof = Proof(label)
    reference = cases.language_model_reference() if make is model else cases.classifier_reference()
    proof.outputs(make(row, executed_in).outputs(), reference["outputs"])
    assert caught in proof.record()["failed"]


@pytest.mark.parametrize("row", CAPTURED)
def test_graph_follows_the_same_step_run_op_by_op_over_restores(row):
    torch_cases.make_runtime("gpu", "fp32")
    captured, eager = model(row, "fp32", ptb=True, keep_prob=1.0), model("torch_lstm", "fp32", ptb=True, keep_prob=1.0)
    wanted = eager.train_steps(12)
    for _ in range(3):
        np.testing.assert_allclose(captured.train_steps(12), wanted, rtol=1e-4)
        for given, state in zip(captured.states, eager.states, strict=True):
            np.testing.assert_allclose(given.cpu(), state.cpu(), rtol=0, atol=1e-3)
        captured.forward_losses(2)
        captured.restore()


@pytest.mark.parametrize("row", CAPTURED)
def test_graph_of_a_classifier_follows_the_same_step_run_op_by_op_over_restores(row):
    torch_cases.make_runtime("gpu", "fp32")
    captured, eager = (classifier(name, "fp32") for name in (row, "torch_lstm"))
    wanted = eager.train_steps(6)
    for _ in range(3):
        np.testing.assert_allclose(captured.train_steps(6), wanted, rtol=1e-4)
        captured.outputs(), captured.timed_steps(2), captured.restore()


def test_batch_whose_embedding_gradient_is_sorted_is_captured():
    """Over 3072 tokens PyTorch sorts them, by library calls that have waited for the device in older versions."""
    torch_cases.make_runtime("gpu", "fp32")
    start, batch_size = cases.language_model_start()[0], 400
    states = canonical.random_states(cases.LAYERS, batch_size, cases.UNITS, seed=2)
    tokens = np.random.default_rng(5).integers(0, cases.VOCABULARY, (3, 2, batch_size, cases.STEPS))
    losses = [
        rows.PYTORCH[row]
        .build(start, states, [tuple(pair) for pair in tokens], ("Adam", 1e-3), precision="fp32", device="cuda:0")
        .train_steps(3)
        for row in ("torch_lstm", "torch_lstm_graph")
    ]
    np.testing.assert_allclose(*losses, rtol=1e-5)


@pytest.mark.parametrize("row", CAPTURED)
def test_rate_that_falls_reaches_the_captured_optimizer(row):
    torch_cases.make_runtime("gpu", "fp32")
    captured, eager = (model(name, "fp32", ptb=True, keep_prob=1.0) for name in (row, "torch_lstm"))
    for rate in (1.0, 0.5, 0.25):
        given, wanted = (trial.train_epoch(trial.batches, rate) for trial in (captured, eager))
        assert given == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize("make", [model, classifier])
@pytest.mark.parametrize("row", CAPTURED)
def test_replayed_dropout_draws_new_masks(row, make):
    torch_cases.make_runtime("gpu", "fp32")
    trial, losses = make(row, "fp32") if make is classifier else model(row, "fp32", ptb=True, carry_states=False), set()
    for _ in range(4):
        trial.restore()
        losses.add((trial.timed_steps(1) if make is classifier else trial.train(trial.batches[0])).item())
    assert len(losses) == 4


@pytest.mark.parametrize("precision", rows.PRECISIONS)
def test_cudnn_best_says_which_setting_ran_and_why_others_did_not(precision):
    torch_cases.make_runtime("gpu", precision)
    trial = model("cudnn_best", precision)
    for mode, step in (("train", trial.train), ("forward", trial.forward)):
        step(trial.batches[0])
        [note] = trial.notes(mode)
        settings = r"(STANDARD|PERSIST_\w+), \w+_MATH, (padded|packed), the fastest of \d+ settings"
        assert re.match(rf"cuDNN 9\.\S+ ran {settings}(; not run: .*CUDNN_STATUS_\w+.*)?$", note)
    for choice in trial.stack.module.choices.values():
        assert {*choice.times_ms, *choice.refused} == set(cudnn_rnn.settings(precision))
        assert choice.times_ms[choice.setting] <= min(choice.times_ms.values()) / cudnn_rnn.CLEARLY


def assert_waits_for_nothing(step):
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("row", CAPTURED)
def test_timed_step_waits_for_nothing(row):
    torch_cases.make_runtime("gpu", "fp32")
    trial = model(row, "fp32", ptb=True)
    for step in (trial.train, trial.forward):
        step(trial.batches[0])
        assert_waits_for_nothing(lambda step=step: step(trial.batches[1]))


@pytest.mark.parametrize("row", ["torch_lstm", *CAPTURED])
def test_timed_step_of_a_classifier_waits_for_nothing(row):
    torch_cases.make_runtime("gpu", "fp32")
    trial = classifier(row, "fp32")
    trial.timed_steps(1), trial.outputs()
    index = torch.arange(cases.BATCH, device="cuda:0")
    [batch] = trial._batches(trial.inputs[: cases.BATCH], trial.labels[: cases.BATCH])
    assert_waits_for_nothing(lambda: (trial._train(index), trial._forward(batch)))


def test_weights_of_nn_lstm_stay_one_chunk_over_float16_steps(recwarn):
    torch_cases.make_runtime("gpu", "fp16")
    trial = model("torch_lstm", "fp16")
    trial.train_steps(3)
    assert not [w for w in recwarn if "contiguous chunk" in str(w.message)]


@pytest.mark.parametrize("row", CAPTURED)
def test_fit_is_one_launch_of_a_graph_per_step(row):
    """Training steps and whole batches of the validation; its last batch, a smaller one, runs op by op."""
    runtime = torch_cases.make_runtime("gpu", "fp32")
    trial = classifier(row, "fp32", capacity=len(cases.classifier_start()[1]))
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
    trial = classifier(row, precision)
    place = np.arange(cases.STEPS * cases.FEATURES) % cases.CLASSES
    x = np.float32(place == trial.labels[:, np.newaxis]).reshape(trial.inputs.shape)
    result = trial.fit(x, trial.labels, 20, (x[:40], trial.labels[:40]), EpochClock())
    assert result["losses"][-1] < 0.5 * result["losses"][0] and result["accuracy"]["val_acc"] > 0.8
