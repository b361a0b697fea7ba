"""Models of different make for tests of the doctor, each a function that builds it; also as harness.doctor takes them."""

import os
import signal

import keras
import numpy as np

L = keras.layers


def stacked():
    model = keras.Sequential(
        [
            keras.Input((6, 4)),
            L.LSTM(5, return_sequences=True, name="low"),
            L.Dropout(0.25),
            L.LSTM(5, return_sequences=True, name="middle"),
            L.Dropout(0.25),
            L.LSTM(5, name="high"),
            L.Dense(3, activation="softmax"),
        ]
    )
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def settings():
    """Every LSTM of its own setting, side by side."""
    x = keras.Input((6, 4))
    branches = [
        L.LSTM(3, name="plain"),
        L.LSTM(3, recurrent_dropout=0.2, name="dropping"),
        L.LSTM(3, unroll=True, name="unrolled"),
        L.LSTM(3, activation="relu", name="relu"),
        L.RNN(L.LSTMCell(3), name="cell"),
        L.GRU(3, name="gru"),
        L.SimpleRNN(3, name="simple"),
    ]
    model = keras.Model(x, L.Dense(1)(L.Concatenate()([branch(x) for branch in branches])))
    model.compile("adam", "mse")
    return model


def two_inputs():
    tokens, signal_ = keras.Input((None,), dtype="int32", name="tokens"), keras.Input((None, 4), name="signal")
    embedded = L.Embedding(20, 4)(tokens)
    lower = L.LSTM(5, return_sequences=True, name="lower")(embedded)
    upper = L.LSTM(5, name="upper")(lower)
    gru = L.GRU(3, name="gru")(signal_)
    model = keras.Model([tokens, signal_], L.Dense(1)(L.Concatenate()([upper, gru])))
    model.compile("adam", "mse")
    return model


@keras.saving.register_keras_serializable("doctor_tests")
class Tagger(keras.Model):
    def __init__(self, units=5, **kwargs):
        super().__init__(**kwargs)
        self.units = units
        self.embed = L.Embedding(20, 4)
        self.lower, self.upper = (L.LSTM(units, return_sequences=True, name=name) for name in ("lower", "upper"))
        self.head = L.Dense(3)

    def call(self, tokens):
        return self.head(self.upper(self.lower(self.embed(tokens))))

    def get_config(self):
        return {**super().get_config(), "units": self.units}


def subclassed():
    model = Tagger()
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model(np.zeros((2, 6), "int32"))
    return model


def masked():
    """Bidirectional below a plain stack, with a mask from the Embedding, which reaches the outputs."""
    model = keras.Sequential(
        [
            keras.Input((None,)),
            L.Embedding(20, 4, mask_zero=True),
            L.Bidirectional(L.LSTM(4, return_sequences=True, name="both"), name="two_ways"),
            L.LSTM(5, return_sequences=True, name="above"),
            L.Dense(2),
        ]
    )
    model.compile("adam", "mse")
    return model


def stateful():
    model = keras.Sequential(
        [
            keras.Input(batch_shape=(4, 6, 3)),
            L.LSTM(5, stateful=True, return_sequences=True, name="low"),
            L.LSTM(5, stateful=True, name="high"),
            L.Dense(2),
        ]
    )
    model.compile("sgd", "mse")
    return model


def nested():
    layers = [keras.Input((6, 4)), L.LSTM(5, return_sequences=True, name="low"), L.LSTM(5, name="high")]
    encoder = keras.Sequential(layers, name="encoder")
    x = keras.Input((6, 4))
    model = keras.Model(x, L.Dense(1)(encoder(x)))
    model.compile("adam", "mse")
    return model


MAKES = (stacked, settings, two_inputs, subclassed, masked, stateful, nested)
BY_DEFAULT = (stateful, two_inputs, masked, nested)
BUILT = []


def dies_when_built_again():
    """What a candidate's process builds twice: the model and the copy that is changed."""
    BUILT.append(True)
    if len(BUILT) > 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    model = keras.Sequential([keras.Input((6, 4)), L.LSTM(5, name="middle"), L.Dense(3)])
    model.compile("adam", "mse")
    return model


def nothing_recurrent():
    return keras.Sequential([keras.Input((4,)), L.Dense(2)])


def with_a_lambda():
    return keras.Sequential([keras.Input((6, 4)), L.Lambda(lambda x: 2 * x, name="twice"), L.LSTM(3)])


def needs_an_argument(units):
    return units


def returns_no_model():
    return 3
