"""The language model in PyTorch: every row against the reference, what the proof asks of it, and a whole training."""

import math

import numpy as np
import pytest
import torch

from models import rows
from models.pytorch.language_model import COMPUTE_DTYPE, CapturedLanguageModel, TorchLanguageModel
from models.reference import expected, networks
from models.weights import canonical
from tests import cases, torch_cases

VOCABULARY, UNITS, LAYERS, BATCH, TIME = 13, 6, 2, 3, 5
SHAPES = canonical.language_model_shapes(VOCABULARY, UNITS, UNITS, LAYERS)
WEIGHTS = canonical.large_random(SHAPES, seed=1)
STATES = canonical.random_states(LAYERS, BATCH, UNITS, seed=2)
TOKENS = np.random.default_rng(3).integers(0, VOCABULARY, (4, 2, BATCH, TIME))
TOKENS[0, 0] = 7  # one word, many times: the rows of the embedding's gradient overlap
BATCHES = [tuple(pair) for pair in TOKENS]
FLOAT32 = 1e-5  # max|a - b| / max|b| of a few steps
ROWS = [name for name, made in rows.PYTORCH.items() if not made.needs_gpu]
EAGER = [name for name in ROWS if name != "torch_compile"]


def run_eagerly(function):
    """In place of a CUDA graph: warm-up calls that change everything, then the function itself, called at every replay."""
    for _ in range(2):
        function()
    return function


def error(a, b):
    return np.abs(np.asarray(a, np.float64) - b).max() / np.abs(b).max()


def assert_close(given, wanted, limit=FLOAT32):
    assert set(given) == set(wanted)
    for name, array in wanted.items():
        assert error(given[name], array) < limit, name


def assert_same(given, wanted):
    assert set(given) == set(wanted)
    for name, array in wanted.items():
        np.testing.assert_array_equal(given[name], array, err_msg=name)


def model_of(row="torch_lstm", precision="fp32", optimizer=("Adam", 1e-2), states=STATES, batches=BATCHES, **options):
    """`row` as on a CPU; "captured" is torch_lstm_graph, "captured cells" the network of torch_compile, each captured."""
    torch.compiler.reset()
    name = {"captured": "torch_lstm_graph", "captured cells": "torch_compile"}.get(row, row)
    kind = rows.PYTORCH[name].arguments["stack"]
    stack = kind(WEIGHTS, LAYERS, COMPUTE_DTYPE[precision])
    arguments = (stack, WEIGHTS, states, batches, optimizer)
    if row.startswith("captured"):
        return CapturedLanguageModel(*arguments, record=run_eagerly, **options)
    return TorchLanguageModel(*arguments, **options)


def ptb_model(rate=0.5, **options):
    return model_of(optimizer=("SGD", rate), reduction="sum_over_time", carry_states=True, **options)


def reference_of(ptb, clip_norm=None):
    optimizer = networks.SGD(0.5, clip_norm) if ptb else networks.Adam(1e-2)
    return expected.language_model("sum_over_time" if ptb else "mean", optimizer, WEIGHTS, STATES, BATCHES, ptb)


# --- against the reference ----------------------------------------------------------------------------------------------


PROOFS = [
    (row, ptb) for row in ROWS for ptb in (False, True) if (row, ptb) != ("torch_compile", True)
]  # 1 min to compile


@pytest.mark.parametrize(
    ("row", "ptb"), PROOFS, ids=[f"{row}, {'ptb' if ptb else 'stacked lm'}" for row, ptb in PROOFS]
)
def test_row_passes_its_proof(row, ptb):
    runtime = torch_cases.make_runtime("cpu", "fp32")
    trial, reference = torch_cases.language_model(row, "fp32", ptb), cases.language_model_reference(ptb)
    for mode in ("train",) if ptb else ("train", "forward", "stack"):
        for k in range(3):  # TorchScript runs twice before it optimizes
            trial.train(trial.batches[k]), trial.forward(trial.batches[k])
        proof = cases.prove(trial, mode, "fp32", reference, torch_cases.kernel_of(row, "cpu"), runtime)
        assert proof.record()["ok"], f"{mode}: {proof.record()['reason']}"


@pytest.mark.parametrize("row", EAGER)
def test_float16_row_passes_its_proof_and_fails_that_of_fp32(row):
    runtime = torch_cases.make_runtime("cpu", "fp16")
    trial, reference = torch_cases.language_model(row, "fp16"), cases.language_model_reference()
    for label, failed in (("fp16", []), ("fp32", ["outputs", "precision", "gradients"])):
        proof = cases.prove(trial, "train", label, reference, torch_cases.kernel_of(row, "cpu"), runtime)
        assert set(failed) <= set(proof.record()["failed"]) and proof.record()["ok"] == (label == "fp16"), label


@pytest.mark.parametrize("ptb", [False, True], ids=["adam, mean", "sgd, clipped, states carried"])
@pytest.mark.parametrize("row", [*EAGER, "captured", "captured cells"])
def test_float64_model_follows_the_reference_to_rounding(row, ptb):
    clip_norm = 0.1 if ptb else None
    model = (ptb_model if ptb else model_of)(row=row, precision="fp64", clip_norm=clip_norm)
    reference = reference_of(ptb, clip_norm)
    assert error(model.train_steps(6), reference["losses"]) < 1e-13
    model.restore()
    outputs = model.outputs()
    assert max(error(outputs[name], array) for name, array in reference["outputs"].items()) < 1e-13
    model.train_steps(1)
    assert_close(model.first_gradients(), reference["gradients"], 1e-10)
    model.restore()
    model.train_steps(3)
    assert_close({name: array - WEIGHTS[name] for name, array in model.weights().items()}, reference["updates"], 1e-10)
    model.restore()
    alone = dict(model.stack_results())
    assert error(alone.pop("hidden"), reference["stack_outputs"]["hidden"]) < 1e-13
    assert_close(alone, reference["stack_gradients"], 1e-13)
    losses = [model.stack_alone(model.stack_batches[k % len(BATCHES)]).item() for k in range(6)]
    assert error(losses, reference["stack_losses"]) < 1e-13


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


# --- restore ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [model_of, ptb_model], ids=["adam", "sgd"])
@pytest.mark.parametrize("row", ["torch_lstm", "captured"])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_restore_is_exact_for_weights_optimizer_and_states(make, row, precision):
    model = make(row=row, precision=precision, loss_scale=64.0)
    assert_same(model.weights(), WEIGHTS)
    losses, trained = model.train_steps(3), model.weights()
    assert all((trained[name] != WEIGHTS[name]).any() for name in WEIGHTS)
    model.restore()
    assert_same(model.weights(), WEIGHTS)
    assert model.optimizer.iterations == 0
    assert not any(tensor.any() for tensor in model.optimizer.tensors)
    for given, k in zip(model.states, range(2), strict=True):
        for state, layer in zip(given, STATES, strict=True):
            np.testing.assert_array_equal(state, layer[0][k].astype(state.numpy().dtype))
    np.testing.assert_array_equal(model.train_steps(3), losses)


def test_forward_pass_changes_nothing():
    model = model_of(carry_states=True, keep_prob=0.5)
    first = model.outputs()
    losses = model.forward_losses(6)
    assert losses[0] == losses[4] == first["loss"] and losses[0] != losses[1]  # four batches, taken in turn
    assert_same(model.weights(), WEIGHTS)
    assert_same(model.outputs(), first)
    assert first["hidden"].shape == (BATCH, TIME, UNITS) and first["logits"].shape == (2, TIME, VOCABULARY)


# --- one step -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", ["torch_lstm", "torch_cells", "captured"])
def test_states_are_carried_from_step_to_step_only_where_asked(row):
    reference = networks.LanguageModel("mean").forward(WEIGHTS, *BATCHES[0], STATES)
    for carry_states, wanted in ((True, reference.final_states), (False, STATES)):
        model = model_of(row=row, carry_states=carry_states)
        model.train(model.batches[0])
        for k, given in enumerate(model.states):
            assert error(given.numpy(), np.stack([layer[0][k] for layer in wanted])) < FLOAT32


def first_step(model):
    model.restore()
    model.train_steps(1)
    return model.first_gradients()


def test_clipping_is_by_the_global_norm_of_dense_gradients():
    """A word that comes up many times counts once, with the sum of its gradients."""
    gradients = networks.LanguageModel("mean").loss_and_gradients(WEIGHTS, *BATCHES[0], STATES).gradients
    norm = math.sqrt(sum(np.square(gradient).sum() for gradient in gradients.values()))
    for clip_norm, scale in ((norm / 3, 1 / 3), (norm * 1.01, 1.0)):
        wanted = {name: gradient * scale for name, gradient in gradients.items()}
        assert_close(first_step(model_of(clip_norm=clip_norm)), wanted)


def test_loss_scale_saves_small_gradients_of_float16():
    tokens = np.random.default_rng(1).integers(0, VOCABULARY, (2, 2000, TIME))
    tokens[1] %= 3  # few words are targets: the others' gradients are small
    states = canonical.random_states(LAYERS, 2000, UNITS, seed=2)
    reference = networks.LanguageModel("mean").loss_and_gradients(WEIGHTS, *tokens, states).gradients
    typical = {}
    for scale in (1.0, 1024.0):
        given = first_step(model_of(precision="fp16", states=states, batches=[tuple(tokens)], loss_scale=scale))
        off = {name: np.median(np.abs(given[name] - array) / np.abs(array)) for name, array in reference.items()}
        typical[scale] = max(off.values())
    assert typical[1024.0] < 0.005 and typical[1.0] > 2 * typical[1024.0]


@pytest.mark.parametrize("precision", ["fp16", "fp32", "fp64"])
@pytest.mark.parametrize("row", EAGER)
def test_loss_and_master_weights_are_float32_or_better(row, precision):
    model = model_of(row=row, precision=precision, loss_scale=64.0)
    wanted = torch.float64 if precision == "fp64" else torch.float32
    assert {master.dtype for master in model.masters} == {wanted}
    assert model.train(model.batches[0]).dtype == wanted
    assert model.outputs()["hidden"].dtype == COMPUTE_DTYPE[precision]
    assert model.loss_scale == (64.0 if precision == "fp16" else 1.0)


@pytest.mark.parametrize("row", ["torch_static", "torch_lstm"])
def test_second_bias_stays_zero_and_out_of_the_optimizer(row):
    model = model_of(row=row)
    model.train_steps(3)
    fixed = [p for name, p in model.stack.module.named_parameters() if "bias_hh" in name]
    assert len(fixed) == LAYERS and not any(p.any() or p.requires_grad for p in fixed)
    assert len(model.masters) == 3 + 3 * LAYERS


# --- dropout ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", [*EAGER, "captured", "captured cells"])
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
    model._head_of, model._loss_of = model._head, model._loss
    model.train(model.batches[0])
    assert len(calls) == 1 + LAYERS  # embedding, between the layers, behind the last one


def test_captured_step_with_the_librarys_own_dropout_is_another_graph_at_another_rate():
    model = model_of(row="captured", keep_prob=0.5)
    model.train(model.batches[0])
    assert set(model._graphs) == {("train", 0.5)}
    model.train_steps(1)
    assert set(model._graphs) == {("train", 0.0)}, "one at a time, since each keeps its memory"
    assert model.unproven()  # on a CPU the stack's dropout is ops, which the proven step does not have
    assert_same(model.weights(), WEIGHTS)
    assert model_of(row="captured").unproven() == model_of(row="captured cells", keep_prob=0.5).unproven() == ""


def test_unproven_step_is_told_by_its_first_other_op():
    from models.pytorch.difference import ops_of, step_difference

    x = torch.ones(3)
    same, other = ops_of(lambda: (x + 1).sin()), ops_of(lambda: (x + 2).sin())
    assert step_difference(same, same) == ""
    assert step_difference(same, other) == (
        "op 0, aten.add.Tensor, differs between the timed and the proven step in other"
    )
    assert "aten.sin" in step_difference(same, ops_of(lambda: (x + 1).cos()))
    assert step_difference(same, same[:1]) == "the timed step has 2 ops, the proven one 1"


# --- captured steps -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("make", [model_of, ptb_model], ids=["adam", "sgd"])
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


def test_captured_step_returns_a_loss_that_the_next_one_does_not_overwrite():
    model = model_of(row="captured")
    losses = [model.train(batch) for batch in model.batches]
    assert len({loss.item() for loss in losses}) == len(losses)
    passes = [model.forward(batch) for batch in model.batches]
    assert len({loss.item() for loss in passes}) == len(passes)


def test_captured_step_refuses_a_batch_of_another_shape():
    model = model_of(row="captured")
    model.train(model.batches[0])
    with pytest.raises(ValueError, match=r"\[4, 3\] given, \[5, 3\] was captured"):
        model.train(model.stage(TOKENS[0, 0][:, :4], TOKENS[0, 1][:, :4]))


def test_captured_adam_reads_its_rate_from_a_tensor_that_is_set_before_each_step():
    model = model_of(row="captured")
    rates = []
    for _ in range(2):
        model.train(model.batches[0])
        rates.append(model.optimizer._rate.item())
    keras = [1e-2 * math.sqrt(1 - 0.999**t) / (1 - 0.9**t) for t in (1, 2)]
    np.testing.assert_allclose(rates, keras, rtol=1e-6)


# --- a whole training ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", ["torch_lstm", "captured"])
def test_start_from_makes_other_weights_the_start_with_a_fresh_optimizer(row):
    model = model_of(row=row)
    model.train_steps(2)
    others = canonical.uniform(SHAPES, 0.1, seed=9)
    model.start_from(others, canonical.zero_states(LAYERS, BATCH, UNITS))
    for _ in range(2):
        assert_same(model.weights(), others)
        assert not any(state.any() for state in model.states)
        assert not any(tensor.any() for tensor in model.optimizer.tensors)
        model.train_steps(1)
        model.restore()


@pytest.mark.parametrize("row", ["torch_lstm", "captured"])
def test_epochs_of_training_follow_plain_numpy_with_falling_rate_and_states_from_the_start_of_each(row):
    model = ptb_model(row=row, clip_norm=1.0)
    staged = [model.stage(*batch) for batch in BATCHES]
    network, sgd = networks.LanguageModel("sum_over_time"), networks.SGD(0.0, 1.0)
    current = {name: array.astype(np.float64) for name, array in WEIGHTS.items()}
    for rate in (0.5, 0.25):
        sgd.learning_rate, states, total = rate, STATES, 0.0
        for batch in BATCHES:
            result = network.loss_and_gradients(current, *batch, states)
            sgd.update(current, result.gradients)
            states, total = result.final_states, total + result.loss
        assert model.train_epoch(staged, rate) == pytest.approx(total / (TIME * len(BATCHES)), rel=1e-5)
    assert_close(model.weights(), current, 1e-4)


@pytest.mark.parametrize("row", ["torch_lstm", "captured"])
@pytest.mark.parametrize("reduction", ["mean", "sum_over_time"])
def test_evaluation_is_the_mean_loss_per_token_with_states_carried_and_batches_of_any_length(row, reduction):
    model = model_of(row=row, reduction=reduction, keep_prob=0.5)
    text = np.random.default_rng(8).integers(0, VOCABULARY, 12)
    zero = canonical.zero_states(LAYERS, 1, UNITS)
    pieces = [(text[k : k + TIME][None], text[k + 1 : k + 1 + TIME][None]) for k in (0, 5)] + [
        (text[10:11][None], text[11:12][None])
    ]
    given = model.evaluate([model.stage(*piece) for piece in pieces], zero)
    network = networks.LanguageModel("mean")
    assert given == pytest.approx(network.forward(WEIGHTS, text[None, :-1], text[None, 1:], zero).loss, rel=1e-5)
    assert_same(model.weights(), WEIGHTS)
