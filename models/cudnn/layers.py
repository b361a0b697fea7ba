"""CudnnLSTMLayer, CudnnGRULayer, CudnnRNNTanhLayer and CudnnRNNReluLayer: the stacks of models/cudnn/rnn.py as Keras layers.

    model = keras.Sequential([
        keras.Input((None, 64)),
        CudnnLSTMLayer(256, num_layers=3, direction="bidirectional", dropout=0.2, return_sequences=True),
        keras.layers.Dense(10),
    ])

One such layer is a whole stack of recurrent layers, and one cuDNN call where there is a GPU. It computes, and trains like, as
many keras.layers.LSTM (GRU with reset_after=True, SimpleRNN) with their default arguments; models/cudnn/convert.py goes to and
from those and torch.nn's. What is different:

- Its one weight, `params`, is cuDNN's flat buffer, so an optimizer that looks at a weight as a whole (`clipnorm`, Lamb, Muon)
  sees the stack as one.
- A mask has to be right-padded, and past the end of a sequence the outputs are 0 (Keras repeats the last one, but in
  Bidirectional).
- `dropout` acts between the layers, on every step anew.

`.keras` and `.weights.h5` hold the canonical tensors of models/weights/layouts.py, not the buffer: a file opens
wherever Keras runs. A
tf.train.Checkpoint of a model holds the buffer itself.
"""

import functools
from collections.abc import Mapping

import keras
import numpy as np
import tensorflow as tf

from models.cudnn import checks
from models.cudnn.rnn import CudnnGRU, CudnnLSTM, CudnnRNNRelu, CudnnRNNTanh
from models.wavefront.stack_layer import StackLayer
from models.weights import layouts

register = keras.saving.register_keras_serializable("lstm_benchmarks")


class CudnnLayer(StackLayer):
    """What the four layers share; each names its class of models/cudnn/rnn.py in `model_class`.

    Args:
        units: units of every layer (and of each of its directions).
        num_layers: layers in the stack.
        direction: "unidirectional" or "bidirectional", which runs every layer both ways and concatenates the outputs.
        dropout: share of each layer's outputs that is set to 0 on the way to the next layer in training, 0 to 1.
        return_sequences: whether to return the outputs of all steps, or only what the last layer has at a sequence's end (its
            backward direction: at the beginning).
        return_state: whether to return the final states too.
        stateful: whether a batch starts from the final states of the one before. The batch size must be fixed then.
        time_major: whether inputs, masks and outputs are [time, batch, …]; else [batch, time, …]. Keras' `fit` and `predict` cut
            arrays into batches along their first axis, so this is for layers inside of a model.
        seed: of dropout, an int32; None is 0. On an H200 cuDNN 9.19 drew masks of one seed that differed in few elements.
        use_cudnn: True (cuDNN, or an error where TensorFlow sees no NVIDIA GPU), False (TensorFlow's ops) or "auto" (cuDNN where
            TensorFlow sees an NVIDIA GPU). get_config says "auto" for True, so that a file opens on a CPU.
        kwargs: name, dtype, trainable and so on of keras.layers.Layer.

    Attributes:
        params: the flat buffer, float32 (float64, float16 under a policy of that name); None until the layer is built.
        spec: layouts.StackSpec of the stack; None until the layer is built.
        states: of a stateful layer, the variables [h, c] (h alone, but for an LSTM).
        uses_cudnn: whether a call runs cuDNN (else TensorFlow's ops).

    Raises:
        ValueError: an argument is not one of these; the message names it, what was given and what is allowed.
    """

    model_class: type

    def __init__(
        self,
        units: int,
        num_layers: int = 1,
        direction: str = "unidirectional",
        dropout: float = 0.0,
        return_sequences: bool = False,
        return_state: bool = False,
        stateful: bool = False,
        time_major: bool = False,
        seed: int | None = None,
        use_cudnn: bool | str = "auto",
        **kwargs,
    ) -> None:
        super().__init__(units, num_layers, direction, dropout, return_sequences, return_state, stateful, **kwargs)
        self.time_major = checks.boolean("time_major", time_major)
        self.seed = 0 if seed is None else seed
        model = self._model(1, use_cudnn)  # checks the other arguments
        self.seed = model.seed
        self.use_cudnn, self.uses_cudnn = use_cudnn, model.uses_cudnn
        self.supports_jit = not self.uses_cudnn  # cuDNN's op has no kernel for XLA
        self.params = None

    @property
    def mode(self) -> str:
        return self.model_class.rnn_mode

    def get_config(self) -> dict:
        return {
            **super().get_config(),
            "time_major": self.time_major,
            "seed": self.seed,
            "use_cudnn": "auto" if self.use_cudnn is True else self.use_cudnn,
        }

    def get_canonical(self) -> dict[str, np.ndarray]:
        """The weights in the canonical form (models/weights/layouts.py)."""
        self._check_built()
        return layouts.from_cudnn_flat(self.params.numpy(), self.spec)

    def set_canonical(self, weights: Mapping[str, np.ndarray]) -> None:
        """Load weights in the canonical form, of any float dtype.

        Raises:
            ValueError: a name is missing or does not belong, or a shape or dtype is another. The layer keeps its weights.
        """
        self._check_built()
        self.params.assign(layouts.to_cudnn_flat(weights, self.spec))

    def _make_spec(self, input_size: int) -> layouts.StackSpec:
        return layouts.StackSpec(self.mode, self.num_layers, self.units, input_size, self.direction == "bidirectional")

    def _create_weights(self) -> None:
        self.params = self.add_weight(
            shape=(layouts.cudnn_size(self.spec),), initializer=self._initial_params, name="params"
        )

    def _initial_params(self, shape, dtype) -> np.ndarray:
        shapes = layouts.canonical_shapes(self.spec)
        weights = {name: self._initial_weight(name, shape, dtype) for name, shape in shapes.items()}
        return layouts.to_cudnn_flat(weights, self.spec)

    def _run(self, x, states, lengths, training):
        model = self._model(self.spec.input_size, self.uses_cudnn, self.dropout if training else 0.0)
        params = model.single_bias(tf.cast(tf.convert_to_tensor(self.params), x.dtype))
        run = functools.partial(model, is_training=True) if training else functools.partial(infer, model)
        outputs, *finals = run(x, *states, params, sequence_lengths=lengths)
        return outputs, finals

    def _model(self, input_size: int, use_cudnn: bool | str, dropout: float | None = None):
        """The stack of models/cudnn/rnn.py. It holds no numbers, so every call makes its own."""
        return self.model_class(
            self.num_layers,
            self.units,
            input_size,
            direction=self.direction,
            dtype=self.compute_dtype,
            dropout=self.dropout if dropout is None else dropout,
            seed=self.seed,
            use_cudnn=use_cudnn,
        )


def infer(
    model, x: tf.Tensor, *states_and_params: tf.Tensor, sequence_lengths: tf.Tensor | None
) -> tuple[tf.Tensor, ...]:
    """The model outside of training, dropout 0, with gradients on cuDNN too.

    cuDNN keeps what its backward pass needs only in training. A model is often called outside of it, where nobody asks for
    gradients; where somebody does, the gradient runs the stack once more.
    """
    if not model.uses_cudnn:
        return model(x, *states_and_params, is_training=False, sequence_lengths=sequence_lengths)
    return infer_and_run_again(model, sequence_lengths, x, *states_and_params)


def infer_and_run_again(model, sequence_lengths: tf.Tensor | None, *tensors: tf.Tensor) -> tuple[tf.Tensor, ...]:
    """model(*tensors) outside of training, whose gradients come from a second run, in training."""

    @tf.custom_gradient
    def run(*tensors):
        def gradient(*upstream):
            with tf.GradientTape() as tape:
                tape.watch(tensors)
                results = model(*tensors, is_training=True, sequence_lengths=sequence_lengths)
            return tape.gradient(results, tensors, upstream)

        return model(*tensors, is_training=False, sequence_lengths=sequence_lengths), gradient

    return run(*tensors)


@register
class CudnnLSTMLayer(CudnnLayer):
    """A stack of LSTM layers. The arguments are those of CudnnLayer."""

    model_class = CudnnLSTM


@register
class CudnnGRULayer(CudnnLayer):
    """A stack of GRU layers (Keras: reset_after=True). The arguments are those of CudnnLayer."""

    model_class = CudnnGRU


@register
class CudnnRNNTanhLayer(CudnnLayer):
    """A stack of plain RNN layers with tanh. The arguments are those of CudnnLayer."""

    model_class = CudnnRNNTanh


@register
class CudnnRNNReluLayer(CudnnLayer):
    """A stack of plain RNN layers with relu. The arguments are those of CudnnLayer."""

    model_class = CudnnRNNRelu
