"""Small layers of models/cudnn/layers.py with random weights and biases, and Keras' own layers with the same ones."""

import keras
import numpy as np

from models.cudnn.convert import LAYERS
from models.weights import layouts

MODES = tuple(LAYERS)
DIRECTIONS = ("unidirectional", "bidirectional")
BATCH, TIME, UNITS, FEATURES = 4, 6, 5, 3
LENGTHS = (3, 6, 1, 4)  # one of them full
MASK = np.arange(TIME) < np.array(LENGTHS)[:, np.newaxis]  # [batch, time]


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(-1, 1, shape)


INPUTS = random(BATCH, TIME, FEATURES, seed=1)


def weights(spec: layouts.StackSpec, seed: int = 0) -> dict[str, np.ndarray]:
    """Canonical, biases too; those of float32 and float64 are the same numbers."""
    rng = np.random.default_rng(seed)
    spec = layouts.StackSpec(spec.mode, spec.num_layers, spec.units, spec.input_size, spec.bidirectional)
    shapes = layouts.canonical_shapes(spec)
    return {name: rng.uniform(-0.5, 0.5, shape).astype("float32").astype("float64") for name, shape in shapes.items()}


def layer(mode: str, num_layers: int = 2, direction: str = "unidirectional", dtype: str = "float64", **kwargs):
    """A built layer of UNITS units for FEATURES features."""
    made = LAYERS[mode](UNITS, num_layers, direction, dtype=dtype, use_cudnn=False, **kwargs)
    batch = BATCH if kwargs.get("stateful") else None
    made.build((None, batch, FEATURES) if kwargs.get("time_major") else (batch, None, FEATURES))
    made.set_canonical(weights(made.spec))
    return made


def keras_layers(spec: layouts.StackSpec, return_sequences: bool = False, dtype: str = "float64", **kwargs) -> list:
    """The same stack in Keras' own layers, with the same weights."""
    made = []
    for k in range(spec.num_layers):
        options = {"return_sequences": return_sequences or k < spec.num_layers - 1, "dtype": dtype, **kwargs}
        if spec.mode.startswith("rnn"):
            new = keras.layers.SimpleRNN(spec.units, activation=spec.mode[4:], **options)
        else:
            kind = keras.layers.LSTM if spec.mode == "lstm" else keras.layers.GRU
            new = kind(spec.units, use_cudnn=False, **options)
        new = keras.layers.Bidirectional(new, dtype=dtype) if spec.bidirectional else new
        new.build((None, None, spec.layer_input_size(k)))
        new.set_weights(layouts.to_keras(weights(spec), k, spec.bidirectional, mode=spec.mode))
        made.append(new)
    return made


def through(layers, x):
    for each in layers:
        x = each(x)
    return x


def initial_state(made, seed: int = 5) -> list[np.ndarray]:
    """Of a batch of BATCH sequences, in the form that a call of the layer takes."""
    return [random(*shape, seed=seed + k) for k, shape in enumerate(made._state_shapes(BATCH))]


def assert_same(given, expected) -> None:
    """Arrays by name, in one order."""
    assert list(given) == list(expected)
    for name, array in expected.items():
        np.testing.assert_array_equal(given[name], array, err_msg=name)


def recurrent_biases(made) -> np.ndarray:
    """cuDNN's second bias of each gate, which the layers keep at 0 but for a GRU's."""
    _, biases = layouts.cudnn_flat_to_list(made.params.numpy(), made.spec)
    names = [name for name, _ in layouts.cudnn_biases(made.spec)]
    return np.concatenate([bias for name, bias in zip(names, biases, strict=True) if " b_R" in name])
