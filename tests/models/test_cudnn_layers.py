"""The layers of models/cudnn/layers.py: compared with stacks of Keras' own, and what a Keras layer has to do."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from models.cudnn import layers as cudnn_layers
from models.cudnn import rnn
from models.cudnn.layers import CudnnLSTMLayer, CudnnRNNReluLayer
from models.weights import layouts
from tests.comparing import error
from tests.cudnn_layer_cases import (
    BATCH,
    DIRECTIONS,
    FEATURES,
    INPUTS,
    LENGTHS,
    MODES,
    TIME,
    UNITS,
    initial_state,
    keras_layers,
    layer,
    random,
    recurrent_biases,
)

pytestmark = pytest.mark.usefixtures("on_the_cpu")

FLOAT64 = 1e-12  # between two ways to compute the same; measured: 1e-15


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(rnn, "_resolve", lambda use_cudnn: use_cudnn is not False)


# --- what it computes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("mode", MODES)
def test_states_go_in_and_come_out_layer_by_layer(mode, direction):
    made = layer(mode, 2, direction, return_sequences=True, return_state=True)
    start = initial_state(made)
    outputs, *finals = made(INPUTS, initial_state=start)
    directions, x, expected = len(made.spec.directions), INPUTS, []
    for k, own in enumerate(keras_layers(made.spec, True, return_state=True)):
        states = [s[k * directions + d] for d in range(directions) for s in start]
        x, *states = own(x, initial_state=states)
        expected += [states[d * len(start) : (d + 1) * len(start)] for d in range(directions)]
    assert error(outputs, x) < FLOAT64
    for final, of_layers in zip(finals, zip(*expected, strict=True), strict=True):
        assert error(final, np.stack(of_layers)) < FLOAT64
    if mode != "lstm":  # its one state may come without a list
        np.testing.assert_array_equal(made(INPUTS, start[0])[0], outputs)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_less_precision_gives_the_same_within_its_rounding(dtype):
    policy = {"float32": "float32", "float16": "mixed_float16"}[dtype]
    made = layer("lstm", 2, "bidirectional", dtype=policy, return_state=True)
    outputs, *finals = made(INPUTS.astype("float32"))
    assert made.params.dtype == "float32" and {t.dtype.name for t in (outputs, *finals)} == {dtype}
    exact, *_ = layer("lstm", 2, "bidirectional", return_state=True)(INPUTS)
    assert error(outputs, exact) < {"float32": 1e-6, "float16": 2e-3}[dtype]


def test_mixed_float16_trains_a_float32_weight():
    made = layer("lstm", 2, dtype="mixed_float16")
    model = keras.Sequential([keras.Input((TIME, FEATURES)), made, keras.layers.Dense(1, dtype="float32")])
    model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()), "mse")
    start = made.get_canonical()
    losses = model.fit(INPUTS, random(BATCH, 1), epochs=3, verbose=0).history["loss"]
    assert losses[2] < losses[0]
    assert all((array != start[name]).any() for name, array in made.get_canonical().items())
    assert made.params.dtype == "float32" and not recurrent_biases(made).any()


# --- masks --------------------------------------------------------------------------------------------------------------


# --- stateful -----------------------------------------------------------------------------------------------------------


def test_a_stateful_model_is_that_of_keras():
    made = layer("gru", 2, dtype="float32", stateful=True)
    inputs = keras.Input(batch_shape=(BATCH, None, FEATURES))
    own = [keras.layers.GRU(UNITS, return_sequences=k < 1, stateful=True, use_cudnn=False) for k in range(2)]
    models = [keras.Sequential([inputs, *stack]) for stack in ([made], own)]
    for k, each in enumerate(own):
        each.set_weights(layouts.to_keras(made.get_canonical(), k, mode="gru"))
    for model in models:
        model.compile("sgd", "mse", jit_compile=False)
    halves = np.split(INPUTS, 2, axis=1)
    for _ in range(2):  # the second time from zeros again
        results = [[model.predict(half, verbose=0) for half in halves] for model in models]
        assert error(results[0][1], results[1][1]) < 1e-5
        for each in (made, *own):
            each.reset_state()
    assert error(made(INPUTS), models[1](INPUTS)) < 1e-5
    models[0].fit(INPUTS, random(BATCH, UNITS), batch_size=BATCH, verbose=0)


# --- as a Keras layer ---------------------------------------------------------------------------------------------------


def test_xla_runs_what_tensorflow_ops_compute():
    x, y = INPUTS.astype("float32"), random(BATCH, UNITS).astype("float32")
    losses = []
    for jit_compile in (False, True):
        made = layer("lstm", 2, dtype="float32")
        assert made.supports_jit
        model = keras.Sequential([keras.Input((TIME, FEATURES)), made])
        model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=jit_compile)
        losses.append(model.fit(x, y, epochs=3, verbose=0).history["loss"])
    assert error(*losses) < 1e-5 and losses[0][2] < losses[0][0]


def test_a_config_does_not_insist_on_cudnn(as_on_a_gpu):
    assert CudnnLSTMLayer(2, use_cudnn=True).get_config()["use_cudnn"] == "auto"


class LikeCudnn:
    """A model without cuDNN that has gradients in training only, as cuDNN has; `runs` lists is_training of every call."""

    uses_cudnn = True

    def __init__(self, model):
        self.model, self.runs = model, []

    def __call__(self, *tensors, is_training, sequence_lengths):
        self.runs.append(is_training)
        results = self.model(*tensors, is_training=is_training, sequence_lengths=sequence_lengths)
        return results if is_training else tuple(tf.raw_ops.PreventGradient(input=result) for result in results)


@pytest.mark.parametrize(("lengths", "in_a_graph"), [(None, False), (LENGTHS, False), (LENGTHS, True)])
@pytest.mark.parametrize("mode", ["lstm", "gru"])
def test_gradients_outside_of_training_come_from_a_second_run(mode, lengths, in_a_graph):
    made = layer(mode, 2)
    model = made._model(FEATURES, use_cudnn=False)
    tensors = [tf.constant(t) for t in (np.swapaxes(INPUTS, 0, 1), *initial_state(made), made.params.numpy())]
    gradients, cudnn = [], LikeCudnn(model)
    for each in (model, cudnn):

        def run(*tensors, model=each):
            return cudnn_layers.infer(model, *tensors, sequence_lengths=lengths)

        with tf.GradientTape() as tape:
            tape.watch(tensors)
            outputs = (tf.function(run) if in_a_graph else run)(*tensors)
            loss = tf.add_n([tf.reduce_sum(o * random(*o.shape, seed=k)) for k, o in enumerate(outputs[1:])])
        assert cudnn.runs == [False] * (each is cudnn) or in_a_graph, (
            "nothing runs twice before a gradient is asked for"
        )
        gradients.append([loss, *tape.gradient(loss, tensors)])
    assert set(cudnn.runs) == {False, True}
    for given, expected in zip(*gradients, strict=True):
        np.testing.assert_allclose(given, expected, atol=FLOAT64)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_a_graph_on_a_gpu_holds_one_cudnn_op_and_another_only_for_a_gradient_outside_of_training(
    as_on_a_gpu, policy, masked
):
    made = CudnnLSTMLayer(UNITS, 2, "bidirectional", dropout=0.25, return_sequences=True, seed=7, dtype=policy)
    made.build((None, None, FEATURES))

    def ops(training, with_gradient):
        @tf.function
        def run(x, mask):
            with tf.GradientTape() as tape:
                results = made(x, mask=mask if masked else None, training=training)
            return tape.gradient(results, made.params.value) if with_gradient else results

        specs = tf.TensorSpec([None, None, FEATURES], tf.float32), tf.TensorSpec([None, None], tf.bool)
        operations = run.get_concrete_function(*specs).graph.get_operations()
        found = [op for op in operations if op.type.startswith("CudnnRNN")]
        return [(op.type[8:], op.get_attr("dropout"), op.get_attr("seed")) for op in found], [
            op.get_attr("is_training") for op in found if op.type == "CudnnRNNV3"
        ]

    assert ops(training=False, with_gradient=False) == ([("V3", 0.0, 7)], [False])
    assert ops(training=True, with_gradient=False) == ([("V3", 0.25, 7)], [True])
    assert ops(training=True, with_gradient=True) == ([("V3", 0.25, 7), ("BackpropV3", 0.25, 7)], [True])
    assert ops(training=False, with_gradient=True) == (
        [("V3", 0.0, 7), ("V3", 0.0, 7), ("BackpropV3", 0.0, 7)],
        [False, True],
    )


def test_cudnn_and_xla_do_not_go_together(as_on_a_gpu):
    made = CudnnLSTMLayer(UNITS)
    assert made.uses_cudnn and not made.supports_jit
    model = keras.Sequential([keras.Input((None, FEATURES)), made])
    with pytest.warns(UserWarning, match="doesn't support `jit_compile=True`"):
        model.compile("sgd", "mse", jit_compile=True)
    assert not model.jit_compile


# --- bad arguments ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"use_cudnn": "always"}, r"use_cudnn: 'always' given, expected True, False or 'auto'"),
        ({"dtype": "mixed_bfloat16"}, r"dtype: bfloat16 given, expected float16 or float32 or float64"),
    ],
)
def test_a_bad_argument_is_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        CudnnRNNReluLayer(**{"units": 3, **arguments})


@pytest.mark.skipif(bool(tf.config.list_physical_devices("GPU")), reason="there is a GPU")
def test_cudnn_where_there_is_none_is_refused_and_not_chosen():
    with pytest.raises(ValueError, match="use_cudnn: True given"):
        CudnnLSTMLayer(3, use_cudnn=True)
    assert CudnnLSTMLayer(3).uses_cudnn is False
