"""The layers of models/cudnn/layers.py on an NVIDIA GPU: cuDNN computes what TensorFlow's ops compute, as a Keras layer."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from models.cudnn.convert import LAYERS
from tests import cases
from tests.comparing import error
from tests.cudnn_layer_cases import BATCH, DIRECTIONS, FEATURES, INPUTS, MASK, MODES, UNITS, random, weights

pytestmark = pytest.mark.gpu

LIMITS = {"float64": 1e-10, "float32": 1e-4, "mixed_float16": 2e-2}


@pytest.fixture(autouse=True)
def in_fp32(gpu_runtime):
    cases.execute_in("fp32")


def pair(mode, direction="unidirectional", **kwargs):
    """The same layer by cuDNN and by TensorFlow's ops."""
    made = [LAYERS[mode](UNITS, 2, direction, use_cudnn=use_cudnn, **kwargs) for use_cudnn in (True, False)]
    for each in made:
        each.build((BATCH, None, FEATURES))
        each.set_canonical(weights(each.spec))
    assert [each.uses_cudnn for each in made] == [True, False]
    return made


def run(made, training, mask, start):
    """Outputs, final states and gradients."""
    tensors = [tf.constant(t, made.compute_dtype) for t in (INPUTS, *start)]
    with tf.GradientTape() as tape:
        tape.watch(tensors)
        results = made(tensors[0], initial_state=tensors[1:], mask=mask, training=training)
        loss = tf.add_n([tf.reduce_sum(tf.cast(r, "float64") * random(*r.shape, seed=3)) for r in results])
    return [*results, *tape.gradient(loss, [*tensors, made.params.value])]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("mask", [None, MASK], ids=["whole", "masked"])
@pytest.mark.parametrize("policy", LIMITS)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("mode", MODES)
def test_cudnn_computes_what_tensorflow_ops_compute(mode, direction, policy, mask, training):
    layers = pair(mode, direction, dtype=policy, return_sequences=True, return_state=True)
    start = [random(*shape, seed=7) for shape in layers[0]._state_shapes(BATCH)]
    given, expected = (run(each, training, mask, start) for each in layers)
    in_a_graph = tf.function(lambda: run(layers[0], training, mask, start))() if policy == "float32" else given
    for results in (given, in_a_graph):
        for result, wanted in zip(results, expected, strict=True):
            assert result.dtype == wanted.dtype and error(result, wanted) < LIMITS[policy]


@pytest.mark.parametrize("mode", MODES)
def test_fit_and_predict_are_those_of_tensorflow_ops(mode):
    x, y = random(3 * BATCH, 6, FEATURES).astype("float32"), random(3 * BATCH, UNITS).astype("float32")
    models = [keras.Sequential([keras.Input((None, FEATURES)), each]) for each in pair(mode)]
    for model in models:
        model.compile(keras.optimizers.Adam(0.01), "mse")
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    assert not models[0].jit_compile  # "auto" sees that cuDNN and XLA do not go together
    assert error(*(model.predict(x, verbose=0) for model in models)) < 1e-3
    for name, array in models[0].layers[0].get_canonical().items():
        np.testing.assert_allclose(array, models[1].layers[0].get_canonical()[name], atol=1e-3, err_msg=name)


def test_a_stateful_layer_goes_on_where_the_batch_before_ended():
    made, whole = pair("lstm", return_sequences=True, stateful=True)
    x = INPUTS.astype("float32")
    halves = [made(half) for half in np.split(x, 2, axis=1)]
    assert error(np.concatenate(halves, axis=1), whole(x)) < 1e-4


@pytest.mark.parametrize("mode", MODES)
def test_a_file_written_with_cudnn_opens_on_a_cpu(mode, tmp_path):
    made, other = pair(mode, "bidirectional")
    model = keras.Sequential([keras.Input((None, FEATURES)), made])
    model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "model.weights.h5")
    assert keras.models.load_model(tmp_path / "model.keras").layers[0].uses_cudnn
    with tf.device("CPU:0"):
        loaded = keras.Sequential([keras.Input((None, FEATURES)), other])
        other.params.assign(tf.zeros(other.params.shape))
        loaded.load_weights(tmp_path / "model.weights.h5")
        np.testing.assert_array_equal(other.params, made.params)
        assert error(loaded(INPUTS), model(INPUTS)) < 1e-4
