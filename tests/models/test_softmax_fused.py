"""The softmax in one CUDA kernel, on an emulator of CUDA's threads, against TensorFlow's own op in float64."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
import tensorflow as tf

from models import rows
from models.wavefront import softmax
from models.wavefront.softmax_loss import NEVER, padded_size
from tests import cases, sizes
from tests.models.emulated_kernels import H200, emulated

# Of the gradients by logits, which are rounded once; the others are float32.
LIMIT = {"float32": 5e-7, "float16": 6e-4, "bfloat16": 5e-3}

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("kernels")


def changed(name, **arguments):
    """The row with other arguments of its factory."""
    row = rows.TENSORFLOW[name]
    return replace(row, arguments={**row.arguments, **arguments})


def given(rows, vocabulary, dtype, scale=3.0):
    """Logits as the kernel reads them, without their bias; bias; targets."""
    rng = np.random.default_rng(1)
    columns = padded_size(vocabulary)
    logits = np.zeros([rows, columns])
    logits[:, :vocabulary] = rng.normal(size=[rows, vocabulary]) * scale
    bias = np.full(columns, NEVER)
    bias[:vocabulary] = rng.normal(size=vocabulary)
    return (
        tf.cast(logits, dtype),
        tf.constant(bias, tf.float32),
        tf.constant(rng.integers(0, vocabulary, rows), tf.int64),
    )


def expected(logits, bias, targets, scale):
    """Losses, and gradients of scale · their sum, in float64."""
    sources = [tf.cast(logits, "float64"), tf.cast(bias, "float64")]
    with tf.GradientTape() as tape:
        tape.watch(sources)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(targets, sources[0] + sources[1])
        total = scale * tf.reduce_sum(losses)
    return [x.numpy() for x in (losses, *tape.gradient(total, sources))]


def found(logits, bias, targets, vocabulary, scale, upstream=1.0):
    with tf.GradientTape() as tape:
        tape.watch([logits, bias])
        total, losses = softmax.scaled_loss(logits, bias, targets, vocabulary, scale)
    np.testing.assert_allclose(total, scale * np.sum(losses), rtol=1e-6)
    d_logits, d_bias = tape.gradient(total, [logits, bias], tf.constant(upstream))
    assert d_logits.dtype == logits.dtype and d_bias.dtype == losses.dtype == tf.float32
    return [np.asarray(tf.cast(x, "float64")) for x in (losses, d_logits, d_bias)]


@needs_compiler
@pytest.mark.parametrize("dtype", LIMIT)
@pytest.mark.parametrize(
    ("rows", "vocabulary"),
    [
        pytest.param(3, 10, id="fewer words than a warp has threads"),
        pytest.param(21, 700, id="more rows than thread blocks"),
        pytest.param(2, 5001, id="several vectors a thread, the last of them not of all"),
    ],
)
def test_losses_and_gradients_are_those_of_the_op(monkeypatch, folder, dtype, rows, vocabulary):
    logits, bias, targets = given(rows, vocabulary, dtype)
    wanted = expected(logits, bias, targets, 0.75)
    with emulated(monkeypatch, folder):
        got = found(logits, bias, targets, vocabulary, 0.75)
        twice = found(logits, bias, targets, vocabulary, 0.75, upstream=2.0)
    np.testing.assert_allclose(got[0], wanted[0], rtol=2e-6)
    np.testing.assert_allclose(got[1], wanted[1], atol=LIMIT[dtype])
    np.testing.assert_allclose(got[2], wanted[2], atol=5e-7 * rows)  # a sum of what is not rounded yet
    for one, other in zip(twice[1:], got[1:], strict=True):
        np.testing.assert_allclose(one, 2 * other, rtol=1e-6)
    assert not got[1][:, vocabulary:].any() and not got[2][vocabulary:].any()


@needs_compiler
def test_a_factor_after_the_loss_is_taken_in_float32(monkeypatch, folder):
    logits, bias, targets = given(4, 100, "float16")
    with emulated(monkeypatch, folder):
        _, d_logits, _ = found(logits, bias, targets, 100, 2.0**-17, upstream=2.0**17)  # no float16 numbers
    np.testing.assert_allclose(d_logits, expected(logits, bias, targets, 1.0)[1], atol=5e-3)


@needs_compiler
def test_single_losses_have_no_gradient(monkeypatch, folder):
    logits, bias, targets = given(4, 100, "float32")
    with emulated(monkeypatch, folder), tf.GradientTape() as tape:
        tape.watch([logits, bias])
        losses = softmax.scaled_loss(logits, bias, targets, 100, 1.0)[1]
    assert tape.gradient(losses, [logits, bias]) == [None, None]


@needs_compiler
def test_logits_far_from_zero_neither_overflow_nor_vanish(monkeypatch, folder):
    logits, bias, targets = given(4, 100, "float32", scale=300.0)
    wanted = expected(logits, bias, targets, 1.0)
    with emulated(monkeypatch, folder):
        got = found(logits, bias, targets, 100, 1.0)
    for one, other in zip(got, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@needs_compiler
def test_target_that_is_no_word_makes_its_loss_nan_and_its_gradients_zero(monkeypatch, folder):
    logits, bias, _ = given(5, 10, "float32")
    with emulated(monkeypatch, folder):
        for wrong in (-1, 10, 63, 64, 2**32):
            losses, d_logits, d_bias = found(*_with_target(logits, bias, wrong), 10, 1.0)
            assert np.isnan(losses).tolist() == [False, False, True, False, False], wrong
            assert not d_logits[2].any() and np.isfinite(d_logits).all() and np.isfinite(d_bias).all(), wrong


def _with_target(logits, bias, wrong):
    return logits, bias, tf.constant([0, 9, wrong, 3, 4], tf.int64)


@needs_compiler
@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_logits_that_are_no_numbers_are_seen(monkeypatch, folder, wrong):
    logits, bias, targets = given(3, 100, "float32")
    logits = tf.tensor_scatter_nd_update(logits, [[1, 40]], [wrong])
    with emulated(monkeypatch, folder):
        losses, d_logits, _ = found(logits, bias, targets, 100, 1.0)
    assert np.isnan(losses).tolist() == [False, True, False]
    assert np.isnan(d_logits[1]).any() and np.isfinite(d_logits[[0, 2]]).all()


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize(
    ("rows", "vocabulary"), [(6400, 10_001), (400, 10_000), (896, 10), (700, 35_000), (1, 10), (6400, 30_000)]
)
def test_every_vocabulary_of_the_tables_fits(rows, vocabulary, itemsize):
    columns = padded_size(vocabulary)
    launch = softmax.launch_configuration(rows, columns, itemsize, H200)
    kept = -(-columns * itemsize // (16 * launch.threads)) * (16 // itemsize)
    assert kept <= softmax.REGISTERS and kept * launch.threads >= columns
    assert launch.blocks * (launch.shared_bytes + 1024) <= 233472 and launch.blocks * launch.threads <= 1024
    assert 1 <= launch.grid <= rows and launch.grid <= launch.blocks * 132


def test_it_is_taken_for_large_logits_whose_rows_fit(monkeypatch):
    monkeypatch.setattr(softmax.nvrtc, "chip", lambda: H200)
    assert softmax.pays(6400, 10048, tf.float32) and softmax.pays(6400, 10048, tf.float16)
    assert not softmax.pays(400, 10048, tf.float32), "XLA's way is faster in the cache"
    assert not softmax.pays(204800, 64, tf.float32), "two warps a multiprocessor"
    assert not softmax.pays(6400, 41024, tf.float32) and not softmax.pays(6400, 10001, tf.float32)
    assert not softmax.pays(6400, 10048, tf.float64)
    monkeypatch.setattr(softmax.nvrtc, "chip", lambda: H200._replace(capability=75))
    assert not softmax.pays(6400, 10048, tf.float32)


@pytest.mark.parametrize(
    ("columns", "dtypes", "vocabulary", "message"),
    [
        (60032, ("float32", "float32", "int64"), 100, "a row that fits"),
        (101, ("float32", "float32", "int64"), 100, "whole vectors of 16 bytes"),
        (128, ("float64", "float32", "int64"), 100, "of float64, float32 and int64 given"),
        (128, ("float32", "float16", "int64"), 100, "of float32, float16 and int64 given"),
        (128, ("float32", "float32", "int32"), 100, "of float32, float32 and int32 given"),
        (128, ("float32", "float32", "int64"), 129, "no more words than columns"),
    ],
)
def test_what_the_kernel_cannot_do_is_an_error(monkeypatch, columns, dtypes, vocabulary, message):
    monkeypatch.setattr(softmax.nvrtc, "chip", lambda: H200)
    given = [tf.zeros(shape, dtype) for shape, dtype in zip(([1, columns], [columns], [1]), dtypes, strict=True)]
    with pytest.raises(ValueError, match=message):
        softmax.scaled_loss(*given, vocabulary, 1.0)


def test_bias_of_another_size_is_an_error():
    with pytest.raises(ValueError, match="a bias for every column"):
        softmax.scaled_loss(tf.zeros([1, 128]), tf.zeros([64]), tf.zeros([1], tf.int64), 64, 1.0)


@needs_compiler
@pytest.mark.parametrize(
    ("row", "ptb", "precision"),
    sizes.half(("eager", "wavefront"), (False, True), ("fp32", "fp16")),  # batch-major, time-major
)
def test_language_model_trains_as_without_it(monkeypatch, folder, row, precision, ptb):
    """Losses, the first gradients and the weights after two steps: mean loss and Adam; sum over time and SGD."""
    monkeypatch.setattr(cases, "CLIP_NORM", 1e9)  # clipping would take a wrong factor off again
    kept, made = {}, changed(row, eager=True, jit_compile=False)
    monkeypatch.setattr(softmax, "LARGE", 0)
    monkeypatch.setattr(softmax, "FEW_THREADS", 0)
    monkeypatch.setattr(softmax, "_launch", _counted(softmax._launch, calls := []))
    with emulated(monkeypatch, folder, tf32=False):
        for fused in (False, True):
            monkeypatch.setitem(rows.TENSORFLOW, row, made)
            monkeypatch.setitem(rows.TENSORFLOW, row, changed(row, fused_loss=fused))
            trial = cases.language_model(row, precision, ptb=ptb)
            assert trial.softmax_kernel == ("softmax_cross_entropy" if fused else "")
            trial.train_steps(1)
            gradients = trial.first_gradients()
            trial.restore()
            losses = trial.train_steps(2)
            kept[fused] = {"losses": losses, **gradients, **{f"trained {k}": w for k, w in trial.weights().items()}}
            assert bool(calls) == fused
    for name, wanted in kept[False].items():
        error = np.linalg.norm(kept[True][name] - wanted) / np.linalg.norm(wanted)
        assert error < {"fp32": 3e-5, "fp16": 5e-3}[precision], name  # SGD's gradients are differences of weights


def test_compiled_training_step_holds_one_launch_of_it(monkeypatch):
    """As XLA gets it: traced, since only a GPU can compile it."""
    monkeypatch.setattr(softmax.nvrtc, "chip", lambda: H200)
    monkeypatch.setattr(softmax.nvrtc, "ptx", lambda *_: "PTX")
    monkeypatch.setattr(softmax, "LARGE", 0)
    monkeypatch.setattr(softmax, "FEW_THREADS", 0)
    monkeypatch.setitem(rows.TENSORFLOW, "wavefront", changed("wavefront", fused_loss=True))
    trial = cases.language_model("wavefront", "fp32")
    launches = {}
    for mode, step in (("train", trial._train), ("forward", trial._forward)):
        graph = step.get_concrete_function(*trial.batches[0], trial.states).graph.as_graph_def()
        nodes = [node for function in graph.library.function for node in function.node_def]
        launches[mode] = sum(node.op == "XlaCustomCallV2" for node in (*graph.node, *nodes))
    assert launches == {"train": 1, "forward": 0}


def _counted(function, calls):
    def run(*arguments):
        calls.append(function)
        return function(*arguments)

    return run
