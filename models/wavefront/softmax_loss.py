"""Cross-entropy over a large vocabulary as XLA runs it best: on a padded vocabulary, with the gradient written out.

TensorFlow's own op gives the loss and the gradient in its forward pass. Compiled by XLA that is a softmax written to memory and
read again, and where the vocabulary is no multiple of 8 its gradient is copied once more, into a padded array, for the
products after it. Padding the kernel instead, which is small, keeps every product aligned.
"""

import tensorflow as tf

MULTIPLE = 64  # of a padded vocabulary: lines of 128 bytes at float16
ALIGNED = 8  # a vocabulary that is a multiple of this needs no padding: 16 bytes at float16
NEVER = -6e4  # logit of a word that does not exist: its probability is 0 as long as another logit is above -5.9e4


def padded_size(vocabulary: int) -> int:
    """Words of a padded vocabulary."""
    return vocabulary if vocabulary % ALIGNED == 0 else vocabulary + -vocabulary % MULTIPLE


def padded(kernel: tf.Tensor, bias: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """A dense layer's kernel [units, vocabulary] and bias [vocabulary] with words that are never predicted, after the others."""
    more = padded_size(kernel.shape[1]) - kernel.shape[1]
    return tf.pad(kernel, [[0, 0], [0, more]]), tf.pad(bias, [[0, more]], constant_values=NEVER)


def softmax_losses(logits: tf.Tensor, targets: tf.Tensor, vocabulary: int) -> tf.Tensor:
    """-log softmax(logits)[target] and its gradient by the logits, from float32 (float64) arithmetic.

    Args:
        logits: [..., words], the first `vocabulary` of which exist.
        targets: [...] int64.

    Returns:
        [...] float32 (float64); NaN where a target is no word, as TensorFlow's own op has it on a GPU.
    """
    losses = _softmax_losses(logits, targets)
    is_word = (targets >= 0) & (targets < vocabulary)
    return tf.where(is_word, losses, tf.constant(float("nan"), losses.dtype))


@tf.custom_gradient
def _softmax_losses(logits: tf.Tensor, targets: tf.Tensor) -> tf.Tensor:
    wide = logits if logits.dtype == tf.float64 else tf.cast(logits, tf.float32)
    chosen, normalizer, losses = _of_logits(wide, targets)

    def gradient(upstream):
        d_logits = _gradients(wide, normalizer, chosen) * upstream[..., tf.newaxis]
        return tf.cast(d_logits, logits.dtype), None

    return losses, gradient


def _of_logits(logits: tf.Tensor, targets: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Which logits [..., words] are the targets', the logarithm of the sum of their exponentials, and the losses [...]."""
    chosen = tf.range(logits.shape[-1], dtype=targets.dtype) == targets[..., tf.newaxis]
    normalizer = tf.reduce_logsumexp(logits, axis=-1)
    return chosen, normalizer, normalizer - tf.reduce_sum(tf.where(chosen, logits, tf.zeros([], logits.dtype)), axis=-1)


def _gradients(logits: tf.Tensor, normalizer: tf.Tensor, chosen: tf.Tensor) -> tf.Tensor:
    return tf.exp(logits - normalizer[..., tf.newaxis]) - tf.cast(chosen, logits.dtype)


def losses_and_gradients(logits: tf.Tensor, targets: tf.Tensor, vocabulary: int) -> tuple[tf.Tensor, tf.Tensor]:
    """The losses as of softmax_losses, and the gradient of each by its logits: 1 at most, 0 where the target is no word.

    Args, returns: as of softmax_losses, logits and gradients [rows, words] float32.
    """
    is_word = (targets >= 0) & (targets < vocabulary)
    chosen, normalizer, losses = _of_logits(logits, targets)
    gradients = tf.where(is_word[:, tf.newaxis], _gradients(logits, normalizer, chosen), 0.0)
    return tf.where(is_word, losses, float("nan")), gradients


def add_bias(logits: tf.Tensor, bias: tf.Tensor) -> tf.Tensor:
    """logits [n, words] + bias [words], in the logits' dtype. The bias' gradient is summed in float32 at least."""
    if logits.dtype.size > 2:
        return tf.nn.bias_add(logits, tf.cast(bias, logits.dtype))
    return _add_bias_in_16_bits(logits, tf.cast(bias, tf.float32))


@tf.custom_gradient
def _add_bias_in_16_bits(logits, bias):
    """The same of a float32 bias.

    TensorFlow's own two ways fail here: the gradient of "+" sums float16 in float16 (over 10,000 tokens a third of it was
    lost), and that of bias_add runs a naive kernel at float16, which took most of a training step on an H200.
    """

    def gradient(upstream):
        return upstream, tf.reduce_sum(tf.cast(upstream, tf.float32), axis=0)

    return logits + tf.cast(bias, logits.dtype), gradient
