"""The parameters of models/cudnn/rnn.py's models in a tf.train.Checkpoint, in cuDNN's canonical form.

    encoder = CudnnLSTMSaveable(encoder_lstm, encoder_params, name="encoder")
    decoder = CudnnLSTMSaveable(decoder_lstm, decoder_params, name="decoder")
    checkpoint = tf.train.Checkpoint(encoder=encoder, decoder=decoder)
    path = checkpoint.save("/tmp/run/model")
    restore(checkpoint, path)  # checkpoint.restore(path) does the same, with TensorFlow's own words for a damaged file

A file holds each matrix and each bias of cuDNN's list as a tensor of its own, whatever the flat buffer looked like on the machine
that wrote it; a restore puts them together into the flat buffer of the machine that reads it. Their keys, for
tf.train.load_checkpoint, are the saveable's path in the checkpoint, "/.ATTRIBUTES/", and "encoder:layer_0_forward_W_i" and so on,
[units, inputs]; "encoder:model" is one line of text on what they are of. The variable itself is not part of the file unless it
is put into the checkpoint besides. A SavedModel cannot hold a saveable: keep it out of the module that is exported.

A restore looks at every saveable's names, shapes and types before anything in the checkpoint gets a new value.
"""

import re

import tensorflow as tf

from models.cudnn.rnn import CudnnGRU, CudnnLSTM, CudnnRNNRelu, CudnnRNNTanh
from models.weights.stack_spec import cudnn_biases, cudnn_matrices

MODEL = "model"  # the tensor that says what the others are of


class _CudnnSaveable(tf.__internal__.tracking.Trackable):  # a tf.Module would save its attribute `params` besides
    """The params of one model, as an object that tf.train.Checkpoint saves and restores.

    Args:
        model: whose params they are.
        params: the flat buffer, a variable [model.params_size()] of float16, float32 or float64.
        name: letters, digits, - and _; stands before the tensors' names in the file and tells a checkpoint's saveables apart.

    Raises:
        ValueError: a model of another class, params that are no variable or of another size, or another name.
    """

    model_class: type

    def __init__(self, model, params: tf.Variable, name: str) -> None:
        if not isinstance(model, self.model_class):
            raise ValueError(f"model: a {type(model).__name__} given, expected a {self.model_class.__name__}")
        if not hasattr(params, "assign"):
            raise ValueError(f"params: a {type(params).__name__} given, expected a tf.Variable [{model.params_size()}]")
        if not isinstance(name, str) or not re.fullmatch(r"[\w-]+", name, re.ASCII):
            raise ValueError(
                f"name: {name!r} given, expected letters, digits, - and _ (TensorFlow's keys give others a meaning)"
            )
        model.params_to_canonical(params)  # raises where the size is another
        self.model, self.params, self.name = model, params, name

    def tensors(self) -> dict[str, tf.Tensor]:
        """What a file holds: the model's line, then cuDNN's list, matrices before biases."""
        weights, biases = self.model.params_to_canonical(self.params)
        values = [tf.constant(self.model.describe()), *weights, *biases]
        return dict(zip(self._shapes(), values, strict=True))

    def check(self, path: str) -> None:
        """Raise ValueError, with what does not fit, unless the file holds these params in their names, shapes and types."""
        reader = tf.train.load_checkpoint(path)
        shapes, dtypes = reader.get_variable_to_shape_map(), reader.get_variable_to_dtype_map()
        keys = [key for key in shapes if key.endswith(f".ATTRIBUTES/{self.name}:{MODEL}")]
        if not keys:
            found = sorted({key.rpartition("/")[2].partition(":")[0] for key in shapes if key.endswith(f":{MODEL}")})
            raise ValueError(f"{path}: holds no params of the name {self.name!r}, only of {', '.join(found) or 'none'}")
        mistakes = [self._mistake(reader, key.removesuffix(f"{self.name}:{MODEL}"), shapes, dtypes) for key in keys]
        if all(mistakes):
            raise ValueError(f"{path}: {self.name!r} {mistakes[0]}")

    def _mistake(self, reader, prefix: str, shapes: dict, dtypes: dict) -> str | None:
        """What of the file's tensors under `prefix` does not fit, or None."""
        given, expected = reader.get_tensor(f"{prefix}{self.name}:{MODEL}").decode(), self.model.describe()
        if given != expected:
            return f"holds the params of {given}; this model is {expected}"
        dtype = tf.as_dtype(self.params.dtype)
        for name, shape in self._shapes().items():
            key = prefix + name
            if key not in shapes:
                return f"lacks {name}"
            if shapes[key] != list(shape):
                return f"holds {name} {shapes[key]}, expected {list(shape)}"
            if shape and dtypes[key] != dtype:
                return f"holds {dtypes[key].name}, expected {dtype.name}, the type of the params"
        return None

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        spec = self.model.spec
        canonical = cudnn_matrices(spec) + cudnn_biases(spec)
        named = [(MODEL, ()), *((name.replace(" ", "_"), shape) for name, shape in canonical)]
        return {f"{self.name}:{name}": shape for name, shape in named}

    # --- what tf.train.Checkpoint calls ---------------------------------------------------------------------------------

    def _serialize_to_tensors(self) -> dict[str, tf.Tensor]:
        return self.tensors()

    def _restore_from_tensors(self, restored_tensors: dict[str, tf.Tensor]) -> None:
        _, *values = (restored_tensors[name] for name in self._shapes())
        matrices = len(cudnn_matrices(self.model.spec))
        self.params.assign(self.model.canonical_to_params(values[:matrices], values[matrices:]))

    def _checkpoint_adapter(self, path: str) -> None:
        """Called for every object of a restore before its first value is read: the place to refuse a file."""
        self.check(path)


class CudnnLSTMSaveable(_CudnnSaveable):
    """The params of a CudnnLSTM in a checkpoint."""

    model_class = CudnnLSTM


class CudnnGRUSaveable(_CudnnSaveable):
    """The params of a CudnnGRU in a checkpoint."""

    model_class = CudnnGRU


class CudnnRNNTanhSaveable(_CudnnSaveable):
    """The params of a CudnnRNNTanh in a checkpoint."""

    model_class = CudnnRNNTanh


class CudnnRNNReluSaveable(_CudnnSaveable):
    """The params of a CudnnRNNRelu in a checkpoint."""

    model_class = CudnnRNNRelu


def restore(checkpoint: tf.train.Checkpoint, path: str):
    """`checkpoint.restore(path)`, with one line of our own on a file that does not fit or cannot be read.

    Returns:
        The status object of checkpoint.restore, for its assert_consumed.

    Raises:
        ValueError: a file that is missing, cut short or damaged, or that does not hold the params of every saveable in the
            checkpoint. All variables keep their values.
    """
    try:
        for part in tf.train.TrackableView(checkpoint).descendants():
            if isinstance(part, _CudnnSaveable):
                part.check(path)
        return checkpoint.restore(path)
    except (tf.errors.OpError, IndexError, RuntimeError) as error:  # what the C++ reader's errors come as
        line = re.sub(r"{{.*?}} ", "", " ".join(str(error).split()))
        raise ValueError(f"{path}: missing, cut short or damaged: {line}") from error
