"""SoftmaxHead: a dense layer and its cross-entropy, against Keras' own two."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from models.wavefront import SoftmaxHead, softmax
from tests.models.emulated_kernels import H200

pytestmark = pytest.mark.usefixtures("on_the_cpu")

VOCABULARY, FEATURES, SHAPE = 10, 4, (3, 5)


def random(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


HIDDEN, TARGETS = random(*SHAPE, FEATURES), np.random.default_rng(1).integers(0, VOCABULARY, SHAPE)


def head(**kwargs):
    made = SoftmaxHead(VOCABULARY, **kwargs)
    made.build((None, None, FEATURES))
    made.set_weights([random(FEATURES, VOCABULARY, seed=2), random(VOCABULARY, seed=3)])
    return made


def model_of(made):
    hidden, targets = keras.Input((SHAPE[1], FEATURES)), keras.Input((SHAPE[1],), dtype="int64")
    return keras.Model([hidden, targets], made(hidden, targets))


@pytest.mark.parametrize(("policy", "limit"), [("float32", 1e-6), ("mixed_float16", 5e-3), ("mixed_bfloat16", 4e-2)])
def test_logits_losses_and_gradients_are_those_of_dense_and_keras_loss(policy, limit):
    made = head(dtype=policy)
    dense = keras.layers.Dense(VOCABULARY)
    dense.build((None, None, FEATURES))
    dense.set_weights(made.get_weights())
    found, hidden = [], tf.constant(HIDDEN)
    for layer in (made, dense):
        variables = [v.value for v in layer.trainable_variables]
        with tf.GradientTape() as tape:
            tape.watch(hidden)
            if layer is made:
                losses = layer(hidden, TARGETS, training=True)
                [loss] = layer.losses
            else:
                losses = keras.losses.sparse_categorical_crossentropy(TARGETS, layer(hidden), from_logits=True)
                loss = tf.reduce_mean(losses)
        found.append([layer(hidden), losses, loss, *tape.gradient(loss, [hidden, *variables])])
    for given, expected in zip(*found, strict=True):
        np.testing.assert_allclose(tf.cast(given, "float32"), expected, rtol=0, atol=limit)


def test_a_model_of_it_trains_and_is_saved(tmp_path):
    model = model_of(head())
    model.compile(keras.optimizers.SGD(1.0), jit_compile=True)
    losses = model.fit([HIDDEN, TARGETS], epochs=5, verbose=0).history["loss"]
    assert losses[-1] < 0.8 * losses[0]
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(again.predict_on_batch([HIDDEN, TARGETS]), model.predict_on_batch([HIDDEN, TARGETS]))


def test_shapes_and_dtypes_are_known_before_the_call():
    made = head(dtype="mixed_float16")
    hidden, targets = keras.Input((None, FEATURES)), keras.Input((None,), dtype="int64")
    logits, losses = made(hidden), made(hidden, targets)
    assert (logits.shape, logits.dtype) == ((None, None, VOCABULARY), "float16")
    assert (losses.shape, losses.dtype) == ((None, None), "float32")


@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_the_kernels_gradient_is_that_of_the_mean(policy, monkeypatch):
    """With the kernel's loss computed by TensorFlow: what is checked is the scale around it."""

    def scaled_loss(logits, bias, targets, vocabulary, scale):
        scales.append(float(scale))
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(targets, tf.cast(logits, "float32") + bias)
        return scale * tf.reduce_sum(losses), losses

    scales = []
    monkeypatch.setattr(softmax, "scaled_loss", scaled_loss)
    monkeypatch.setattr(softmax, "pays", lambda *_: True)
    monkeypatch.setattr(softmax.nvrtc, "chip", lambda: H200)
    monkeypatch.setattr("models.wavefront.work.HALVES_ALLOWED", False)
    gradients = []
    for fused in (False, True):
        made = head(fused=fused, dtype=policy)
        with tf.GradientTape() as tape:
            made(HIDDEN, TARGETS, training=True)
            [loss] = made.losses
        gradients.append([loss, *tape.gradient(loss, [v.value for v in made.trainable_variables])])
    assert scales == [2.0**15 if policy == "mixed_float16" else pytest.approx(1 / 15)]
    for given, expected in zip(*reversed(gradients), strict=True):
        np.testing.assert_allclose(given, expected, rtol=0, atol=1e-6 if policy == "float32" else 5e-3)


def test_the_kernel_is_not_asked_for_where_it_does_not_pay(monkeypatch):
    with pytest.raises(ValueError, match=r"no NVIDIA GPU that TensorFlow sees"):
        head(fused=True).runs_kernel(15)
    monkeypatch.setattr(softmax.nvrtc, "chip", lambda: H200)
    assert not head(fused=True).runs_kernel(15) and not head(fused=False).runs_kernel(15)
    assert SoftmaxHead(10_000, fused=True).runs_kernel(4096) and not SoftmaxHead(10_000, fused=True).runs_kernel(None)


@pytest.mark.parametrize(
    ("arguments", "message"), [({"vocabulary": 0}, "vocabulary: 0 given"), ({"fused": 1}, "fused: 1 given")]
)
def test_a_bad_argument_is_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        SoftmaxHead(**{"vocabulary": 3, **arguments})


MASK = np.arange(SHAPE[1]) < np.array([[2], [5], [3]])


@pytest.mark.parametrize("given", ["of the inputs", "as an argument"])
def test_masked_steps_do_not_count_in_the_loss(given):
    """As with keras.losses. What stands in the padding, such as no word at all, is not looked at."""
    made, hidden = head(), tf.constant(HIDDEN)
    targets = np.where(MASK, TARGETS, -1)
    if given == "of the inputs":
        hidden._keras_mask = tf.constant(MASK)
    with tf.GradientTape() as tape:
        tape.watch(hidden)
        losses = made(hidden, targets) if given == "of the inputs" else made(hidden, targets, inputs_mask=MASK)
        [loss] = made.losses
    expected = head()(HIDDEN, TARGETS).numpy()
    np.testing.assert_array_equal(losses, np.where(MASK, expected, 0))
    assert float(loss) == pytest.approx(expected[MASK].mean(), rel=1e-6)
    gradient = tape.gradient(loss, hidden).numpy()
    assert not gradient[~MASK].any() and np.all(gradient[MASK].any(-1)) and np.isfinite(gradient).all()


def test_a_mask_goes_through_a_model():
    tokens, targets = keras.Input((None,), dtype="int64"), keras.Input((None,), dtype="int64")
    embedded = keras.layers.Embedding(VOCABULARY, FEATURES, mask_zero=True)(tokens)
    model = keras.Model([tokens, targets], head()(embedded, targets))
    x = np.where(MASK, 1 + TARGETS % (VOCABULARY - 1), 0)
    np.testing.assert_array_equal(np.asarray(model([x, TARGETS])) != 0, MASK)


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (TARGETS[:, :1], r"targets: \[3, 1\] given, expected \[3, 5\]: one for each"),
        (TARGETS[..., np.newaxis], r"targets: \[3, 5, 1\] given, expected \[3, 5\]"),
        (TARGETS.astype("float32"), r"targets: float32 given, expected integers"),
    ],
)
def test_bad_targets_are_named(targets, message):
    made = head()
    with pytest.raises(ValueError, match=message):
        made(HIDDEN, targets)
    with pytest.raises(ValueError, match=message):
        made(keras.KerasTensor(HIDDEN.shape), keras.KerasTensor(targets.shape, targets.dtype))


def test_targets_of_unknown_size_are_not_broadcast():
    unknown = tf.TensorSpec([None, None], tf.int64)
    losses = tf.function(lambda targets: head_of_all(HIDDEN, targets), input_signature=[unknown])
    head_of_all = head()
    assert losses(TARGETS).shape == SHAPE
    with pytest.raises(tf.errors.InvalidArgumentError, match="reshape"):
        losses(TARGETS[:, :1])


def test_the_gradient_of_the_bias_is_not_rounded_to_16_bits():
    made = head(dtype="mixed_float16")
    with tf.GradientTape() as tape:
        made(HIDDEN, TARGETS)
        [loss] = made.losses
    gradient = tape.gradient(loss, made.bias.value).numpy()
    assert (gradient != gradient.astype(np.float16)).any()


def test_fused_says_what_it_cannot_do_in_training(monkeypatch):
    monkeypatch.setattr(softmax.nvrtc, "chip", lambda: H200)
    made = head(fused=True)
    made(HIDDEN, TARGETS, inputs_mask=MASK)  # without training there is no kernel
    with pytest.raises(ValueError, match="inputs_mask: given, not supported by fused=True; use fused=False"):
        made(HIDDEN, TARGETS, inputs_mask=MASK, training=True)
    unknown = [tf.TensorSpec([None, *array.shape[1:]], array.dtype) for array in (HIDDEN, TARGETS)]
    with pytest.raises(ValueError, match=r"targets: \[None, 5\] given, expected batches of one size for fused=True"):
        tf.function(lambda x, y: made(x, y, training=True)).get_concrete_function(*unknown)
