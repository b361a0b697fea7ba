"""SoftmaxHead: a dense layer over a large vocabulary, with the softmax's cross-entropy of its logits."""

import keras
import tensorflow as tf

from . import softmax
from .checks import boolean, integer
from .products import product
from .softmax_loss import add_bias, padded, padded_size, softmax_losses

LARGEST = 2.0**15  # a power of two: gradients of float16 logits, times it, stay below float16's 65504


@keras.saving.register_keras_serializable("lstm_benchmarks")
class SoftmaxHead(keras.layers.Layer):
    """keras.layers.Dense(vocabulary), and its cross-entropy without a pass over the logits that is not needed.

        >>> import keras
        >>> from wavefront_lstm import SoftmaxHead, WavefrontLSTM
        >>> tokens, targets = (keras.Input((35,), dtype="int64") for _ in range(2))
        >>> hidden = WavefrontLSTM(20, num_layers=2, return_sequences=True)(keras.layers.Embedding(1000, 20)(tokens))
        >>> losses = SoftmaxHead(1000)(hidden, targets)  # [batch, 35]; the model trains by their mean
        >>> model = keras.Model([tokens, targets], losses)
        >>> model.compile("sgd", jit_compile=True)

    and `model.fit([x, y])`, without labels. To predict, call a model of the same head without targets: it gives logits.

    Inside, a vocabulary that is no multiple of 8 is padded to one of 64, and the gradient is written by hand (softmax_loss.py).
    Under XLA on a GPU its products are those of products.py: without TensorFloat-32, float32 too is on the tensor cores (compute
    capability 8.0 and later). With fused=True a training step on an NVIDIA GPU takes loss and gradients from one CUDA kernel
    (softmax.py) where the logits are so many that this is the faster way; and its products of float32 multiply float16 times
    powers of two in TensorFloat-32's place, or pairs of them in float32's (halves.py), but for small ones.

    Args:
        vocabulary: words, the width of the logits.
        fused: whether to use the CUDA kernel, and float16, where they pay. They need an NVIDIA GPU of compute capability 8.0 or
            later, XLA, batches that all have one size (len(x) a multiple of batch_size, or a data set with drop_remainder=True)
            and no mask; there are no second derivatives.
        kernel_initializer, bias_initializer: as of keras.layers.Dense.
        kwargs: name, dtype, trainable and so on of keras.layers.Layer.

    Call arguments:
        inputs: [..., features] of any float dtype; they are cast to the compute dtype.
        targets: word of each, integers [...]; None: the logits are asked for.
        training: whether a gradient will be taken, for which the CUDA kernel is.
        inputs_mask: booleans [...], which Keras takes from the inputs; where it is False the loss is 0 and does not count in the
            mean. None: all count.

    Returns:
        Without targets the logits [..., vocabulary], in the compute dtype. With them the losses [...]
        -log softmax(logits)[target], float32 (float64 under that policy); their mean is added to the model's loss. A target that
        is no word has the loss NaN.

    Raises:
        ValueError: an argument is not one of these, or targets are no integers or of another shape than the inputs; or
            fused=True without a GPU, or in training with a mask or batches of unknown size.
    """

    def __init__(
        self,
        vocabulary: int,
        *,
        fused: bool = False,
        kernel_initializer="glorot_uniform",
        bias_initializer="zeros",
        **kwargs,
    ) -> None:
        super().__init__(**kwargs)
        self.vocabulary = integer("vocabulary", vocabulary, 1, 2**31 - 1)
        self.fused = boolean("fused", fused)
        self.kernel_initializer = keras.initializers.get(kernel_initializer)
        self.bias_initializer = keras.initializers.get(bias_initializer)
        self.autocast = False  # the kernel is cast for its product, the bias is added in float32
        self.supports_masking = True

    def build(self, inputs_shape, targets_shape=None) -> None:
        """Create the weights for inputs of this shape."""
        features = inputs_shape[-1]
        own = {"autocast": False}  # or Keras rounds the bias, and its gradient, to the compute dtype
        self.kernel = self.add_weight((features, self.vocabulary), self.kernel_initializer, name="kernel", **own)
        self.bias = self.add_weight((self.vocabulary,), self.bias_initializer, name="bias", **own)

    def call(self, inputs, targets=None, training=False, inputs_mask=None):
        if targets is None:
            return self.padded_logits(inputs)[..., : self.vocabulary]
        targets = tf.convert_to_tensor(targets)
        _check_targets(targets, inputs)
        # A reshape, since sizes that are unknown here have to be the inputs' too, and would broadcast.
        targets = tf.reshape(tf.cast(targets, tf.int64), _leading(inputs))
        if training and self.fused:
            _check_fused(targets, inputs_mask)
        if not (training and self.takes_scaled_loss(targets.shape.num_elements())):
            losses = self.cross_entropy(self.padded_logits(inputs), targets)
            if inputs_mask is None:
                self.add_loss(tf.reduce_mean(losses))
                return losses
            inside = tf.cast(inputs_mask, tf.bool)
            losses = tf.where(inside, losses, tf.zeros([], losses.dtype))
            count = tf.reduce_sum(tf.cast(inside, losses.dtype))
            self.add_loss(tf.math.divide_no_nan(tf.reduce_sum(losses), count))
            return losses
        # Float16 holds no gradient of a mean over many words. What Keras scales the loss by comes too late for them.
        terms = targets.shape.num_elements()
        scale = LARGEST if self.compute_dtype == "float16" else 1 / terms
        scaled_loss, losses = self.scaled_loss(inputs, targets, scale)
        self.add_loss(scaled_loss if scale == 1 / terms else scaled_loss / (scale * terms))
        return losses

    def compute_output_spec(self, inputs, targets=None, training=False, inputs_mask=None):
        if targets is None:
            return keras.KerasTensor((*inputs.shape[:-1], self.vocabulary), self.compute_dtype)
        _check_targets(targets, inputs)
        return keras.KerasTensor(targets.shape, "float64" if self.compute_dtype == "float64" else "float32")

    def get_config(self) -> dict:
        return {
            **super().get_config(),
            "vocabulary": self.vocabulary,
            "fused": self.fused,
            "kernel_initializer": keras.initializers.serialize(self.kernel_initializer),
            "bias_initializer": keras.initializers.serialize(self.bias_initializer),
        }

    # --- for a training loop of one's own -------------------------------------------------------------------------------------

    def runs_kernel(self, rows: int | None) -> bool:
        """Whether `scaled_loss` of so many rows (None: unknown before the step runs) is the CUDA kernel's.

        Raises:
            ValueError: fused=True, and there is no GPU.
        """
        if not self.fused or rows is None:
            return False
        return softmax.pays(rows, padded_size(self.vocabulary), tf.as_dtype(self.compute_dtype))

    def takes_scaled_loss(self, rows: int | None) -> bool:
        """Whether `scaled_loss` of so many rows is the faster way: by the CUDA kernel, or without it by factors of float16.

        Raises:
            ValueError: as of runs_kernel.
        """
        if self.runs_kernel(rows):
            return True
        size = *self.kernel.shape[:1], padded_size(self.vocabulary), tf.as_dtype(self.compute_dtype)
        return self.fused and rows is not None and softmax.factors_pay(rows, *size)

    def padded_logits(self, inputs: tf.Tensor) -> tf.Tensor:
        """Logits [..., padded vocabulary] of inputs [..., features]; words that do not exist are never predicted."""
        kernel, bias = padded(self.kernel.value, self.bias.value)
        logits = add_bias(self._product(inputs, kernel), bias)
        return tf.reshape(logits, [*_leading(inputs), logits.shape[-1]])

    def cross_entropy(self, logits: tf.Tensor, targets: tf.Tensor) -> tf.Tensor:
        """-log softmax(logits)[target], [...], of padded logits and targets [...] int64."""
        return softmax_losses(logits, targets, self.vocabulary)

    def scaled_loss(
        self, inputs: tf.Tensor, targets: tf.Tensor, scale: float | tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """scale · Σ losses with its gradients, as takes_scaled_loss has it, and the losses [...], which have no gradient.

        Args:
            inputs: [..., features], of a static shape.
            targets: [...] int64.
            scale: of each loss. With float16 the gradients by the logits are stored times it: a loss scale belongs in here.
        """
        kernel, bias = padded(self.kernel.value, self.bias.value)
        of_words = tf.cast(bias, tf.float32), tf.reshape(targets, [-1]), self.vocabulary, scale
        if code := softmax.factors(tf.as_dtype(self.compute_dtype)):
            total, losses = softmax.scaled_loss_by_factors(code, self._flat(inputs), kernel, *of_words)
        else:
            total, losses = softmax.scaled_loss(self._product(inputs, kernel), *of_words)
        return total, tf.reshape(losses, targets.shape)

    def _product(self, inputs: tf.Tensor, kernel: tf.Tensor) -> tf.Tensor:
        """[rows, padded vocabulary], in the compute dtype."""
        flat = self._flat(inputs)
        return product(flat, tf.cast(kernel, flat.dtype))

    def _flat(self, inputs: tf.Tensor) -> tf.Tensor:
        """[rows, features], in the compute dtype."""
        return tf.reshape(tf.cast(inputs, self.compute_dtype), [-1, inputs.shape[-1]])


def _check_targets(targets, inputs) -> None:
    """Integers, one for each of the inputs [..., features]; tensors or KerasTensors."""
    if not tf.as_dtype(targets.dtype).is_integer:
        raise ValueError(
            f"targets: {tf.as_dtype(targets.dtype).name} given, expected integers, as of keras.Input(…, dtype='int64')"
        )
    if not tf.TensorShape(targets.shape).is_compatible_with(inputs.shape[:-1]):
        raise ValueError(
            f"targets: {list(targets.shape)} given, expected {list(inputs.shape[:-1])}: one for each of the inputs"
        )


def _check_fused(targets: tf.Tensor, mask: tf.Tensor | None) -> None:
    if mask is not None:
        raise ValueError("inputs_mask: given, not supported by fused=True; use fused=False")
    if not targets.shape.is_fully_defined():
        raise ValueError(
            f"targets: {list(targets.shape)} given, expected batches of one size for fused=True: len(x) a multiple of "
            "batch_size, or a data set with drop_remainder=True; or use fused=False"
        )


def _leading(x: tf.Tensor) -> list[int | tf.Tensor]:
    """All sizes of x but the last one, as integers where they are known."""
    return [size if size is not None else tf.shape(x)[axis] for axis, size in enumerate(x.shape[:-1])]
