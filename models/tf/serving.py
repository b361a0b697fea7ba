"""An LSTM stack that answers requests, in TensorFlow: from a NumPy array on the host to one.

A server has `answer(request)` and `restore()`. A request is float32 [batch, steps, features], its answer the outputs of the top
layer [batch, steps, units], or those of the last step alone [batch, units], in memory of its own. A server of a stream carries
the states of all layers from one request to the next; `restore` puts them back to zeros, where a sequence starts.
"""

from collections.abc import Callable, Mapping

import keras
import numpy as np
import tensorflow as tf

from models.tf.stack import Stack
from models.weights import layouts
from models.weights.canonical import stack_size, zero_states


class StackServer:
    """A stack of this folder in one tf.function. The states stay on the device.

    Args:
        stack: a class of this folder.
        weights: canonical, of the stack.
        shape: [batch, steps, features] of a request.
        stream: whether states are carried.
        last: whether the answer is of the last step alone.
        jit_compile: compile the function with XLA.
    """

    def __init__(
        self,
        stack: Callable[..., Stack],
        weights: Mapping[str, np.ndarray],
        shape: tuple[int, int, int],
        stream: bool,
        last: bool,
        jit_compile: bool,
    ) -> None:
        num_layers, _ = stack_size(weights)
        self._stack, self._stream = stack(weights, num_layers), stream
        self._zeros = self._stack.stage_states(zero_states(num_layers, shape[0], self._stack.units))
        self._states = self._zeros

        @tf.function(jit_compile=jit_compile)
        def outputs_of(inputs, states):
            inputs = tf.transpose(inputs, [1, 0, 2]) if self._stack.time_major else inputs
            outputs, finals = self._stack(inputs, states, None, training=False)
            if last:
                return outputs[-1] if self._stack.time_major else outputs[:, -1], finals
            return tf.transpose(outputs, [1, 0, 2]) if self._stack.time_major else outputs, finals

        self._outputs_of = outputs_of

    def restore(self) -> None:
        """A stream starts anew."""
        self._states = self._zeros

    def answer(self, request: np.ndarray) -> np.ndarray:
        """See the module."""
        outputs, states = self._outputs_of(tf.constant(request), self._states)
        if self._stream:
            self._states = states
        return outputs.numpy()


class KerasServer:
    """A keras.Model of keras.layers.LSTM layers, of stateful ones for a stream.

    Args:
        call: "predict", "predict_on_batch", "call" (op by op), "function" (the model in a tf.function) or "xla" (that compiled).
        use_cudnn: of the layers. It is not part of what a model file keeps, and "auto" where that is loaded.
        Others: as of StackServer.
    """

    def __init__(
        self,
        weights: Mapping[str, np.ndarray],
        shape: tuple[int, int, int],
        stream: bool,
        last: bool,
        call: str,
        use_cudnn: bool | str,
    ) -> None:
        self.model, batch = keras_model(weights, shape, stream, last, use_cudnn), shape[0]
        self.model.compile(jit_compile=False)
        in_function = tf.function(lambda x: self.model(x, training=False), jit_compile=call == "xla")
        self.answer: Callable[[np.ndarray], np.ndarray] = {
            "predict": lambda request: self.model.predict(request, batch_size=batch, verbose=0),
            "predict_on_batch": self.model.predict_on_batch,
            "call": lambda request: self.model(request, training=False).numpy(),
        }.get(call, lambda request: in_function(tf.constant(request)).numpy())

    def restore(self) -> None:
        """A stream starts anew."""
        for layer in self.model.layers:
            if getattr(layer, "stateful", False):
                layer.reset_state()


def keras_model(
    weights: Mapping[str, np.ndarray],
    shape: tuple[int, int, int],
    stream: bool,
    last: bool = False,
    use_cudnn: bool | str = "auto",
) -> keras.Model:
    """A functional model of an LSTM stack: [batch, steps, features] → [batch, steps, units], of the last step [batch, units]."""
    outputs = inputs = keras.Input(batch_shape=shape)
    num_layers, _ = stack_size(weights)
    units = weights["lstm_0/forward/recurrent_kernel"].shape[0]
    for k in range(num_layers):
        sequences = not last or k < num_layers - 1
        outputs = keras.layers.LSTM(units, return_sequences=sequences, stateful=stream, use_cudnn=use_cudnn)(outputs)
    model = keras.Model(inputs, outputs)
    for number, layer in enumerate(model.layers[1:]):
        layer.set_weights(layouts.to_keras(weights, number))
    return model


def build(
    weights,
    shape,
    stream,
    last=False,
    *,
    stack=None,
    jit_compile=False,
    call="",
    use_cudnn=False,
    precision="fp32",
    device="",
):
    """The server of a row, on `device`, in float32; its products as the process has set their precision.

    A KerasServer where `call` is named, else a StackServer.
    """
    with tf.device(device):
        if call:
            return KerasServer(weights, shape, stream, last, call, use_cudnn)
        return StackServer(stack, weights, shape, stream, last, jit_compile)
