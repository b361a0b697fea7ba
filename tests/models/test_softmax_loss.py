"""The cross-entropy of models/wavefront/softmax_loss.py against TensorFlow's own."""

import numpy as np
import pytest


@pytest.fixture(scope="module")
def given(tensorflow):
    rng = np.random.default_rng(1)
    hidden, kernel, bias = rng.normal(size=(6, 4)), rng.normal(size=(4, 10)), rng.normal(size=10)
    return hidden, kernel, bias, rng.integers(0, 10, 6)


@pytest.fixture(scope="module")
def tensorflow():
    import tensorflow as tf

    return tf


def losses_and_gradients(tf, given, dtype, head):
    hidden, kernel, bias, targets = given
    sources = [tf.constant(x, dtype) for x in (hidden, kernel, bias)]
    upstream = tf.constant(np.linspace(0.5, 2, 6), "float64" if dtype == "float64" else "float32")
    with tf.GradientTape() as tape:
        tape.watch(sources)
        losses = head(*sources, tf.constant(targets))
    return [losses, *tape.gradient(losses, sources, upstream)]


@pytest.mark.parametrize(("dtype", "limit"), [("float64", 1e-14), ("float32", 1e-6), ("float16", 5e-3)])
@pytest.mark.parametrize("jit_compile", [False, True])
def test_losses_and_gradients_are_those_of_the_op_without_padding(tensorflow, given, dtype, limit, jit_compile):
    from models.wavefront.softmax_loss import padded, softmax_losses

    tf = tensorflow

    @tf.function(jit_compile=jit_compile)
    def own(hidden, kernel, bias, targets):
        kernel, bias = padded(kernel, bias)
        assert kernel.shape == (4, 64)
        return softmax_losses(hidden @ kernel + bias, targets, 10)

    def expected(hidden, kernel, bias, targets):
        return tf.nn.sparse_softmax_cross_entropy_with_logits(targets, hidden @ kernel + bias)

    found = losses_and_gradients(tf, given, dtype, own)
    wanted = losses_and_gradients(tf, given, "float64", expected)
    assert found[0].dtype == ("float64" if dtype == "float64" else "float32")
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=limit, atol=limit)


def test_a_vocabulary_of_whole_16_bytes_is_left_as_it_is_and_another_made_of_whole_lines(tensorflow):
    from models.wavefront.softmax_loss import padded

    for words, wanted in ((24, 24), (10_000, 10_000), (10_001, 10_048), (20, 64)):
        kernel, bias = padded(tensorflow.ones([2, words]), tensorflow.ones([words]))
        assert kernel.shape == (2, wanted) and bias.shape == (wanted,)
        assert np.all(bias.numpy()[:words] == 1) and np.all(bias.numpy()[words:] < -1e4)


def test_targets_that_are_no_words_are_nan_and_those_of_rank_two_are_taken(tensorflow):
    from models.wavefront.softmax_loss import padded, softmax_losses

    tf = tensorflow
    kernel, bias = padded(tf.ones([2, 10]), tf.zeros([10]))
    logits = tf.ones([2, 3, 2]) @ kernel + bias
    losses = softmax_losses(logits, tf.constant([[0, 9, 10], [-1, 63, 64]], tf.int64), 10).numpy()
    np.testing.assert_allclose(losses[0, :2], np.log(10), rtol=1e-6)
    assert np.isnan(losses[0, 2]) and np.isnan(losses[1]).all()
