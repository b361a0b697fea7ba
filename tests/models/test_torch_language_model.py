"""The language model in PyTorch alone: its rows' proofs, dropout and captured steps. The rest: test_language_models.py."""

import functools
import itertools
import math
import subprocess
import sys

import numpy as np
import pytest
import torch

from harness.record.machine import PROJECT
from models import rows
from models.pytorch import sentence_model
from models.pytorch.language_model import COMPUTE_DTYPE
from models.pytorch.sentence_model import CapturedSentenceModel, TorchSentenceModel
from models.reference import networks
from models.reference.networks import IGNORED
from tests import cases, torch_cases
from tests.comparing import error
from tests.language_models import (
    LAYERS,
    STATES,
    TOKENS,
    WEIGHTS,
    assert_same,
    follows_the_reference_to_rounding,
    of_ptb,
    run_eagerly,
)
from tests.language_models import in_pytorch as model_of

ptb_model = functools.partial(of_ptb, model_of)

ROWS = [name for name, made in rows.PYTORCH.items() if not made.needs_gpu]
EAGER = [name for name in ROWS if name != "torch_compile"]
CAPTURED = ["captured", "captured cells"]
# Rows of ptb_sentences.py, and those of ptb.py that they run as.
SENTENCES = [("torch_packed", "torch_lstm"), ("torch_lstm_graph", "torch_lstm_graph")]


# --- against the reference ----------------------------------------------------------------------------------------------


PROOFS = [
    pytest.param(row, ptb, id=f"{row}, {'ptb' if ptb else 'stacked lm'}") for row in ROWS for ptb in (False, True)
]


@pytest.mark.parametrize(("row", "ptb"), PROOFS)
def test_row_passes_its_proof(row, ptb):
    runtime = torch_cases.make_runtime("cpu", "fp32")
    trial, reference = torch_cases.language_model(row, "fp32", ptb), cases.language_model_reference(ptb)
    for mode in ("train",) if ptb else ("train", "forward", "stack"):
        for k in range(3):  # TorchScript runs twice before it optimizes
            trial.train(trial.batches[k]), trial.forward(trial.batches[k])
        proof = cases.prove(trial, mode, "fp32", reference, torch_cases.kernel_of(row, "cpu"), runtime)
        assert proof.record()["ok"], f"{mode}: {proof.record()['reason']}"


@pytest.mark.parametrize(
    ("row", "precision"),
    [pytest.param(row, "fp16", marks=[pytest.mark.slow] * (row in ("torch_cells", "torch_static"))) for row in EAGER]
    + [pytest.param(row, "bf16", marks=[pytest.mark.slow] * (row != "torch_cells")) for row in EAGER],
)
def test_16_bit_row_passes_its_proof_and_fails_that_of_fp32(row, precision):
    runtime = torch_cases.make_runtime("cpu", precision)
    trial, reference = torch_cases.language_model(row, precision), cases.language_model_reference()
    for label, failed in ((precision, []), ("fp32", ["outputs", "precision", "gradients"])):
        proof = cases.prove(trial, "train", label, reference, torch_cases.kernel_of(row, "cpu"), runtime)
        assert set(failed) <= set(proof.record()["failed"]) and proof.record()["ok"] == (label == precision), label


@pytest.mark.parametrize("precision", ["fp32", pytest.param("fp16", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("row", "runs_as"), SENTENCES)
def test_sentences_pass_their_proof(row, runs_as, precision):
    runtime = torch_cases.make_runtime("cpu", precision)
    trial, reference = torch_cases.sentence_model(row, precision)
    trial.require_words(cases.sentences()[0][2])
    proof = cases.prove(trial, "train", precision, reference, torch_cases.kernel_of(runs_as, "cpu"), runtime)
    assert proof.record()["ok"], proof.record()["reason"]


@pytest.mark.parametrize(("row", "runs_as"), SENTENCES)
def test_sentences_that_end_a_word_early_fail_their_proof(row, runs_as, monkeypatch):
    runtime = torch_cases.make_runtime("cpu", "fp32")
    packed, padded = TorchSentenceModel.stage, CapturedSentenceModel.stage

    def short(self, tokens, targets, lengths):
        made = hasattr(self, "batches")  # then these lengths are the short ones
        return packed(self, tokens, targets, lengths if made else np.maximum(lengths - 1, 1))

    def without_last_words(self, tokens, targets, lengths):
        after = np.pad(targets[:, 1:], ((0, 0), (0, 1)), constant_values=IGNORED)
        return padded(self, tokens, np.where(after == IGNORED, IGNORED, targets), lengths)

    monkeypatch.setattr(TorchSentenceModel, "stage", short)
    monkeypatch.setattr(CapturedSentenceModel, "stage", without_last_words)
    trial, reference = torch_cases.sentence_model(row, "fp32")
    proof = cases.prove(trial, "train", "fp32", reference, torch_cases.kernel_of(runs_as, "cpu"), runtime)
    assert {"outputs", "loss", "gradients"} <= set(proof.record()["failed"])
    assert "kernel" not in proof.record()["failed"]


@pytest.mark.usefixtures("op_by_op")
def test_padded_sentences_have_a_graph_for_each_length_and_leave_the_padding_out():
    trial, _ = torch_cases.sentence_model("torch_lstm_graph", "fp32")
    losses = trial.train_steps(6)
    lengths = [tokens.shape[1] for tokens, *_ in cases.sentences()[0][2]]
    assert len(set(lengths)) == cases.BATCHES and [*trial._graphs] == [(length + 3, cases.BATCH) for length in lengths]
    packed, _ = torch_cases.sentence_model("torch_packed", "fp32")
    np.testing.assert_allclose(losses, packed.train_steps(6), rtol=1e-5)


@pytest.mark.usefixtures("op_by_op")
def test_graphs_of_padded_sentences_share_their_memory_while_one_of_them_lives(monkeypatch):
    """PyTorch takes no pool again whose graphs are all gone: those of another kind of step have memory of their own."""
    used, made = [], itertools.count()
    monkeypatch.setattr(sentence_model, "SharedMemory", lambda: next(made))
    monkeypatch.setattr(
        sentence_model, "cuda_graph", lambda function, shared: used.append(shared) or run_eagerly(function)
    )
    trial, _ = torch_cases.sentence_model("torch_lstm_graph", "fp32", record=None)
    trial.train_steps(6), trial.forward_losses(6), trial.train_steps(6)
    assert used == [kind for kind in range(3) for _ in trial.batches]


@pytest.mark.slow
def test_one_compiled_head_serves_padded_sentences_of_all_lengths():
    trial, _ = torch_cases.sentence_model("torch_lstm_graph", "fp32")
    torch._dynamo.utils.counters.clear()
    trial.train_steps(6)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    trial.forward_losses(6)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2, "that of an evaluation draws no gradients"


@pytest.mark.parametrize("ptb", [False, True], ids=["adam, mean", "sgd, clipped, states carried"])
@pytest.mark.parametrize("row", [*EAGER, *CAPTURED])
@pytest.mark.usefixtures("op_by_op")
def test_float64_model_follows_the_reference_to_rounding(row, ptb):
    follows_the_reference_to_rounding(functools.partial(model_of, row=row), ptb)


def test_plain_adam_of_pytorch_misses_keras_update_and_ours_does_not():
    """Gradients of epsilon's size: PyTorch's own epsilon is up to 32 times smaller."""
    from models.pytorch.optimizers import Adam

    gradient = np.array([1e-7, -3e-7, 1e-6, 1e-2])
    keras = networks.Adam(1e-3)
    by_numpy = {"w": np.zeros(4)}
    ours, plain = (torch.zeros(4, dtype=torch.float64) for _ in range(2))
    optimizer = Adam([ours], 1e-3)
    torch_adam = torch.optim.Adam([plain], lr=1e-3, eps=1e-7)
    for _ in range(3):
        keras.update(by_numpy, {"w": gradient})
        ours.grad, plain.grad = torch.tensor(gradient), torch.tensor(gradient)
        optimizer.advance()
        optimizer.step()
        torch_adam.step()
    assert error(ours.numpy(), by_numpy["w"]) < 1e-12
    assert error(plain.numpy(), by_numpy["w"]) > 0.3


# --- one step -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32", "fp64"])
@pytest.mark.parametrize("row", EAGER)
def test_loss_and_master_weights_are_float32_or_better(row, precision):
    model = model_of(row=row, precision=precision, loss_scale=64.0)
    wanted = torch.float64 if precision == "fp64" else torch.float32
    assert {master.dtype for master in model.masters} == {wanted}
    assert model.train(model.batches[0]).dtype == wanted
    assert model.outputs()["hidden"].dtype == COMPUTE_DTYPE[precision].replace("bfloat16", "float32")  # NumPy has none
    assert model.loss_scale == (64.0 if precision == "fp16" else 1.0)


@pytest.mark.parametrize("row", ["torch_static", "torch_lstm"])
def test_second_bias_stays_zero_and_out_of_the_optimizer(row):
    model = model_of(row=row)
    model.train_steps(3)
    fixed = [p for name, p in model.stack.module.named_parameters() if "bias_hh" in name]
    assert len(fixed) == LAYERS and not any(p.any() or p.requires_grad for p in fixed)
    assert len(model.masters) == 3 + 3 * LAYERS


# --- dropout ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", [*EAGER, *CAPTURED])
@pytest.mark.usefixtures("op_by_op")
def test_proof_runs_the_step_with_the_dropout_rate_at_0_and_puts_it_back(row):
    model, plain = model_of(row=row, keep_prob=0.5), model_of()
    np.testing.assert_allclose(model.train_steps(3), plain.train_steps(3), rtol=1e-5)
    assert model.has_dropout and model.dropout_rate == 0.5
    model.restore()
    plain.restore()
    dropped = [model.train(batch).item() for batch in model.batches[:3]]
    assert error(dropped, plain.train_steps(3)) > 1e-3
    with pytest.raises(KeyboardInterrupt), model.without_dropout():
        assert model.dropout_rate == 0.0
        raise KeyboardInterrupt
    assert model.dropout_rate == 0.5


@pytest.mark.parametrize("row", ["torch_cells", "torch_compile"])
def test_dropout_reaches_the_embedding_and_every_layer_with_the_mean_kept(row):
    """Ones in, so that what is not 0 is 1 / keep_prob; the stack's own dropout in its forward pass."""
    model = model_of(row=row, keep_prob=0.25)
    x = torch.ones(400, 10)
    for drop in (model._dropout, lambda x: model.stack.module.drop(x, model._stack_rate(True))):
        assert set(drop(x).unique().tolist()) == {0.0, 4.0}
        assert 0.2 < (drop(x) > 0).float().mean() < 0.3
    calls = []
    model._drop = model._dropout = lambda x: calls.append(x.shape) or x
    model.stack.module.drop = lambda x, rate: calls.append(x.shape) or x
    model._head_of = model._head
    model.train(model.batches[0])
    assert len(calls) == 1 + LAYERS  # embedding, between the layers, after the last one


@pytest.mark.usefixtures("op_by_op")
def test_captured_step_with_the_librarys_own_dropout_is_another_graph_at_another_rate():
    model = model_of(row="captured", keep_prob=0.5)
    model.train(model.batches[0])
    assert model._kind == ("train", 0.5)
    model.train_steps(1)
    assert model._kind == ("train", 0.0) and len(model._graphs) == 1, "one at a time, since each keeps its memory"
    assert model.graph_mismatch()  # on a CPU the stack's dropout is ops, which the proven step does not have
    assert_same(model.weights(), WEIGHTS)
    assert (
        model_of(row="captured").graph_mismatch()
        == model_of(row="captured cells", keep_prob=0.5).graph_mismatch()
        == ""
    )


def test_graph_mismatch_names_the_first_other_op():
    from models.pytorch.difference import ops_of, step_difference

    x = torch.ones(3)
    same, other = ops_of(lambda: (x + 1).sin()), ops_of(lambda: (x + 2).sin())
    assert step_difference(same, same) == ""
    assert step_difference(same, other) == (
        "op 0, aten.add.Tensor, differs between the timed and the proven step in other"
    )
    assert "aten.sin" in step_difference(same, ops_of(lambda: (x + 1).cos()))
    assert step_difference(same, same[:1]) == "the timed step has 2 ops, the proven one 1"


COLLECTIVES = """
import torch, torch.distributed as distributed
from models.pytorch.difference import ops_of, step_difference

distributed.init_process_group("gloo", init_method="file://{file}", rank=0, world_size=1)
x, other = torch.ones(3), distributed.new_group([0])
once, again = (ops_of(lambda: distributed.all_reduce(x)) for _ in range(2))
print(step_difference(once, again) or "same")
print(step_difference(once, ops_of(lambda: distributed.all_reduce(x, group=other))) or "same")
if hasattr(distributed.ReduceOp, "unbox"):
    assert "reduce_op" in step_difference(once, ops_of(lambda: distributed.all_reduce(x, distributed.ReduceOp.MAX)))
"""


def test_collectives_are_told_apart_by_group_and_reduction_and_not_by_an_address(tmp_path):
    code = COLLECTIVES.format(file=tmp_path / "meeting")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PROJECT, timeout=120)
    assert done.stdout.splitlines()[-2:] == [
        "same",
        "op 0, c10d.allreduce_.default, differs between the timed and the proven step in process_group",
    ], done.stderr


# --- captured steps -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "precision"),
    [
        pytest.param(model_of, "fp32", id="adam-fp32"),
        pytest.param(ptb_model, "fp16", id="sgd-fp16"),
        pytest.param(model_of, "fp16", id="adam-fp16", marks=pytest.mark.slow),
        pytest.param(ptb_model, "fp32", id="sgd-fp32", marks=pytest.mark.slow),
    ],
)
def test_captured_step_keeps_every_address_and_follows_the_eager_one(make, precision):
    model, eager = (make(row=row, precision=precision, loss_scale=64.0) for row in ("captured", "torch_lstm"))

    def addresses():
        kept = [*model.masters, *model.parameters, *model.optimizer.tensors, *model.states, *model.initial_states]
        return [tensor.data_ptr() for tensor in [*kept, *model.stack.module.parameters()]]

    before = addresses()
    limit = 1e-5 if precision == "fp32" else 2e-3  # compiled code rounds to float16 in fewer places
    np.testing.assert_allclose(model.train_steps(6), eager.train_steps(6), rtol=limit)
    (proven,) = model._graphs.values()
    model.restore(), model.train_steps(2)
    assert [*model._graphs.values()] == [proven], "the timed step is the proven graph"
    model.forward_losses(2), model.restore(), model.train_steps(2)
    model.start_from(WEIGHTS, STATES)
    assert addresses() == before
    assert len(model._graphs) == 1


@pytest.mark.usefixtures("op_by_op")
def test_captured_step_returns_a_loss_that_the_next_one_does_not_overwrite():
    model = model_of(row="captured")
    losses = [model.train(batch) for batch in model.batches]
    assert len({loss.item() for loss in losses}) == len(losses)
    passes = [model.forward(batch) for batch in model.batches]
    assert len({loss.item() for loss in passes}) == len(passes)


@pytest.mark.usefixtures("op_by_op")
def test_captured_step_refuses_a_batch_of_another_shape():
    model = model_of(row="captured")
    model.train(model.batches[0])
    with pytest.raises(ValueError, match=r"\[4, 3\] given, \[5, 3\] was captured"):
        model.train(model.stage(TOKENS[0, 0][:, :4], TOKENS[0, 1][:, :4]))


@pytest.mark.usefixtures("op_by_op")
def test_captured_adam_reads_its_rate_from_a_tensor_that_is_set_before_each_step():
    model = model_of(row="captured")
    rates = []
    for _ in range(2):
        model.train(model.batches[0])
        rates.append(model.optimizer._rate.item())
    keras = [1e-2 * math.sqrt(1 - 0.999**t) / (1 - 0.9**t) for t in (1, 2)]
    np.testing.assert_allclose(rates, keras, rtol=1e-6)
