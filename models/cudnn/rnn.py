"""CudnnLSTM, CudnnGRU, CudnnRNNTanh and CudnnRNNRelu: a whole stack in one cuDNN call, from one flat buffer of parameters.

The classes of tf.contrib.cudnn_rnn (TensorFlow 1; its API page of November 2017) on today's TensorFlow and cuDNN 9:

    lstm = CudnnLSTM(num_layers=2, num_units=256, input_size=128, direction="bidirectional", dropout=0.2)
    params = tf.Variable(tf.random.uniform([lstm.params_size()], -0.05, 0.05))
    output, output_h, output_c = lstm(input_data, input_h, input_c, params, is_training=True)

Everything is time-major. models/weights/layouts.py states the buffer's layout, and the conversions follow it:
TensorFlow's own ops for
them fail on cuDNN 9. Without a GPU the same call computes the same numbers from the same buffer with TensorFlow's ops (both in
models/cudnn/rnn_ops.py); `uses_cudnn` says which of the two runs. Where that page's conversions return a function, these return
tensors: TensorFlow 1's graph functions are gone.
"""

import functools
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from models.cudnn import checks, rnn_ops
from models.cudnn.checks import Lengths
from models.weights.stack_spec import StackSpec, cudnn_biases, cudnn_matrices, cudnn_size

DIRECTIONS = rnn_ops.DIRECTIONS
INPUT_MODES = (*rnn_ops.INPUT_MODES, "auto_select")

Tensors = tuple[tf.Tensor, ...]


class _CudnnRNN:
    """What the four classes share; each names its cell in `rnn_mode`."""

    rnn_mode: str  # "lstm", "gru", "rnn_tanh" or "rnn_relu"

    def __init__(
        self,
        num_layers: int,
        num_units: int,
        input_size: int,
        input_mode: str = "linear_input",
        direction: str = "unidirectional",
        dtype: tf.DType | str = tf.float32,
        dropout: float = 0.0,
        seed: int = 0,
        use_cudnn: bool | str = "auto",
    ) -> None:
        """A stack of layers; its parameters are arguments of the call.

        Args:
            num_layers: layers in the stack.
            num_units: units of every layer (and of each of its directions).
            input_size: features of the input.
            input_mode: "linear_input" multiplies the input by a matrix; "skip_input" puts it into every gate of the lowest layer
                as it is, for which input_size must be num_units; "auto_select" is "skip_input" where that is so, and else
                "linear_input".
            direction: "unidirectional" or "bidirectional", which runs every layer both ways and concatenates the outputs.
            dtype: of inputs, states, params and outputs: tf.float16, tf.float32 or tf.float64.
            dropout: share of each layer's outputs that is set to 0 on the way to the next layer in training, 0 to 1; the others
                are divided by 1 - dropout.
            seed: of dropout, an int32. The random numbers go on from call to call; each traced function starts them anew.
            use_cudnn: True (cuDNN, or an error where TensorFlow sees no NVIDIA GPU), False (TensorFlow's ops) or "auto" (cuDNN
                where TensorFlow sees an NVIDIA GPU).

        Raises:
            ValueError: an argument is not one of these; the message names it, what was given and what is allowed.
        """
        checks.choice("direction", direction, DIRECTIONS)
        checks.choice("input_mode", input_mode, INPUT_MODES)
        num_layers = checks.integer("num_layers", num_layers, 1, 2**31 - 1)
        num_units = checks.integer("num_units", num_units, 1, 2**31 - 1)
        input_size = checks.integer("input_size", input_size, 1, 2**31 - 1)
        if input_mode == "skip_input" and input_size != num_units:
            raise ValueError(
                f"input_mode: 'skip_input' given with input_size {input_size} and num_units {num_units}, expected equal sizes"
            )
        skip_input = input_mode != "linear_input" and input_size == num_units
        self.spec = StackSpec(
            self.rnn_mode, num_layers, num_units, input_size, direction == "bidirectional", skip_input
        )
        self.dtype = checks.dtype("dtype", dtype)
        self.dropout = checks.probability("dropout", dropout)
        self.seed = checks.integer("seed", seed, -(2**31), 2**31 - 1)
        self._input_mode = input_mode
        self._uses_cudnn = _resolve(use_cudnn)

    @property
    def num_layers(self) -> int:
        return self.spec.num_layers

    @property
    def num_units(self) -> int:
        return self.spec.units

    @property
    def input_size(self) -> int:
        return self.spec.input_size

    @property
    def input_mode(self) -> str:
        """As given; `spec.skip_input` says what "auto_select" became."""
        return self._input_mode

    @property
    def direction(self) -> str:
        return DIRECTIONS[self.spec.bidirectional]

    @property
    def uses_cudnn(self) -> bool:
        """Whether a call runs cuDNN (else TensorFlow's ops)."""
        return self._uses_cudnn

    def params_size(self) -> int:
        """Numbers in the flat buffer."""
        return cudnn_size(self.spec)

    def params_to_canonical(self, params: tf.Tensor) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """The flat buffer as cuDNN's lists of matrices and biases. Differentiable, and usable in a tf.function.

        Args:
            params: [params_size()], float16, float32 or float64.

        Returns:
            weights, biases: per pseudo-layer (layer·directions + direction) 8 + 8 tensors of an LSTM, 6 + 6 of a GRU, 2 + 2 of
            a plain RNN: those that go with the input, then the recurrent ones. Weights are [units, inputs], biases [units];
            with skip_input, the lowest layer's input weights are [units, 0]. layouts.cudnn_matrices and layouts.cudnn_biases name
            all in this order.

        Raises:
            ValueError: params of another type or size.
        """
        params = self._params(params)
        matrices, biases = cudnn_matrices(self.spec), cudnn_biases(self.spec)
        shapes = [shape for _, shape in [*matrices, *biases]]
        sizes = [int(np.prod(shape)) for shape in shapes]
        pieces = tf.split(params, sizes)  # one op, so its gradient is one concatenation
        tensors = [tf.reshape(piece, shape) for piece, shape in zip(pieces, shapes, strict=True)]
        return tensors[: len(matrices)], tensors[len(matrices) :]

    def canonical_to_params(self, weights: Sequence[tf.Tensor], biases: Sequence[tf.Tensor]) -> tf.Tensor:
        """The way back: cuDNN's lists as a flat buffer [params_size()]. Differentiable, and usable in a tf.function.

        Raises:
            ValueError: another number of tensors, or one of another shape or type than its place in the list has.
        """
        pieces = []
        for argument, given, expected in (
            ("weights", weights, cudnn_matrices(self.spec)),
            ("biases", biases, cudnn_biases(self.spec)),
        ):
            if len(given) != len(expected):
                raise ValueError(f"{argument}: {len(given)} given, expected {len(expected)} ({self.describe()})")
            for k, (value, (name, shape)) in enumerate(zip(given, expected, strict=True)):
                allowed = (pieces[0].dtype,) if pieces else checks.FLOATS
                tensor = checks.tensor(f"{argument}[{k}] ({name})", value, shape, self.dtype, allowed)
                pieces.append(tf.reshape(tensor, [-1]))
        return tf.concat(pieces, axis=0)

    def single_bias(self, params: tf.Tensor) -> tf.Tensor:
        """params as they are, for a model that trains like one with a single bias.

        cuDNN adds two biases, b_W and b_R, where other libraries have one; trained alike, their sum moves twice as far. After
        this identity the gradient by b_R is 0, so b_R stays where it starts: at 0, for a single bias. A GRU's two biases do not
        simply add up, and its params come back as they are.
        """
        params = self._params(params)
        if self.rnn_mode == "gru":
            return params
        indices = self._recurrent_bias_indices

        @tf.custom_gradient
        def hold(params):
            def gradient(upstream):
                # The scatter reuses its operand's memory. On a GPU it has no float16: that would go through the host.
                wide = tf.cast(upstream, tf.float32) if upstream.dtype == tf.float16 else upstream
                held = tf.tensor_scatter_nd_update(wide, indices, tf.zeros(len(indices), wide.dtype))
                return tf.cast(held, upstream.dtype)

            return tf.identity(params), gradient

        return hold(params)

    def describe(self) -> str:
        """What the flat buffer is of, in one line: two models with the same line take each other's params."""
        input_mode = INPUT_MODES[self.spec.skip_input]
        layers = f"{self.num_layers} layer{'s' * (self.num_layers > 1)}"
        return f"{self.rnn_mode}, {layers} × {self.num_units} units, input {self.input_size}, {input_mode}, {self.direction}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.describe()}, {self.dtype.name})"

    @functools.cached_property
    def _recurrent_bias_indices(self) -> np.ndarray:
        """Where b_R lies in the flat buffer, [numbers, 1]; int64, since TensorFlow keeps int32 on the host."""
        end = self.params_size()
        pairs = np.arange(end - 2 * self.spec.num_pseudo_layers * self._width, end, dtype=np.int64)
        return pairs.reshape(-1, 2, self._width)[:, 1].reshape(-1, 1)  # b_W and b_R of each pseudo-layer in turn

    @property
    def _width(self) -> int:
        return self.num_units * rnn_ops.gates(self.spec)

    def _params(self, params: tf.Tensor, allowed: Sequence[tf.DType] = checks.FLOATS) -> tf.Tensor:
        note = f"the size for {self.describe()}"
        return checks.tensor("params", params, [self.params_size()], self.dtype, allowed, note)

    def _run(
        self,
        input_data: tf.Tensor,
        states: dict[str, tf.Tensor],
        params: tf.Tensor,
        is_training: bool,
        sequence_lengths: tf.Tensor | Lengths | None,
    ) -> Tensors:
        """Check the arguments, run the stack and return (output, final states …)."""
        is_training = checks.boolean("is_training", is_training)
        params = self._params(params, [self.dtype])
        axes = {
            "input_data": ["time", "batch", self.input_size],
            **{name: [self.spec.num_pseudo_layers, "batch", self.num_units] for name in states},
        }
        tensors = {
            name: checks.tensor(name, value, axes[name], self.dtype, [self.dtype])
            for name, value in {"input_data": input_data, **states}.items()
        }
        inputs, *initial = checks.same_batch(tensors).values()
        inputs = checks.not_empty("input_data", inputs)
        if sequence_lengths is not None:
            sequence_lengths = checks.sequence_lengths(sequence_lengths, inputs)
        dropout = self.dropout if is_training else 0.0
        arguments = (self.spec, inputs, initial, params, sequence_lengths, dropout, self.seed)
        if self.uses_cudnn:
            output, finals = rnn_ops.run_cudnn(*arguments, is_training)
        else:
            output, finals = rnn_ops.run(*arguments)
        return (output, *finals)


class CudnnLSTM(_CudnnRNN):
    """A stack of LSTM layers."""

    rnn_mode = "lstm"

    def __call__(
        self,
        input_data: tf.Tensor,
        input_h: tf.Tensor,
        input_c: tf.Tensor,
        params: tf.Tensor,
        is_training: bool = True,
        sequence_lengths: tf.Tensor | Lengths | None = None,
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Run the stack.

        Args:
            input_data: [time, batch, input_size].
            input_h: initial hidden states [num_layers·directions, batch, num_units], the directions of a layer side by side.
            input_c: initial cell states, likewise.
            params: the flat buffer [params_size()].
            is_training: whether dropout acts. On cuDNN, gradients need True.
            sequence_lengths: integers [batch] from 0 to time, or None: all sequences fill input_data. As checks.Lengths
                they cost no copy between host and device.

        Returns:
            output [time, batch, num_units·directions], 0 past a sequence's end; output_h and output_c, the states at each
            sequence's end (of a backward direction: at its beginning), in the form of input_h. An empty sequence keeps its
            states.

        Raises:
            ValueError: an argument of another type or shape, a batch of another size, or lengths beyond the sequence. What is
                known only when a graph runs is a tf.errors.InvalidArgumentError there.
        """
        return self._run(input_data, {"input_h": input_h, "input_c": input_c}, params, is_training, sequence_lengths)


class _CudnnRNNWithoutC(_CudnnRNN):
    def __call__(
        self,
        input_data: tf.Tensor,
        input_h: tf.Tensor,
        params: tf.Tensor,
        is_training: bool = True,
        sequence_lengths: tf.Tensor | Lengths | None = None,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Run the stack.

        Args, returns and errors are those of CudnnLSTM, without the cell states: (output, output_h).
        """
        return self._run(input_data, {"input_h": input_h}, params, is_training, sequence_lengths)


class CudnnGRU(_CudnnRNNWithoutC):
    """A stack of GRU layers, whose reset gate comes after the recurrent product (Keras: reset_after=True)."""

    rnn_mode = "gru"


class CudnnRNNTanh(_CudnnRNNWithoutC):
    """A stack of plain RNN layers with tanh."""

    rnn_mode = "rnn_tanh"


class CudnnRNNRelu(_CudnnRNNWithoutC):
    """A stack of plain RNN layers with relu."""

    rnn_mode = "rnn_relu"


def _resolve(use_cudnn: bool | str) -> bool:
    if not isinstance(use_cudnn, bool) and use_cudnn != "auto":
        raise ValueError(f"use_cudnn: {use_cudnn!r} given, expected True, False or 'auto'")
    # As Keras does: built with CUDA and a GPU in sight. This starts no device, so memory growth can still be set afterwards.
    available = tf.test.is_built_with_cuda() and bool(tf.config.get_visible_devices("GPU"))
    if not available and use_cudnn is True:
        raise ValueError("use_cudnn: True given, expected False or 'auto' where TensorFlow sees no NVIDIA GPU")
    return available if use_cudnn == "auto" else use_cudnn
