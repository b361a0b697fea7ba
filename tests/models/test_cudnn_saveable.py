"""models/cudnn/saveable.py: what is saved comes back bit by bit, and a file that does not fit changes nothing."""

import numpy as np
import pytest
import tensorflow as tf

from models.cudnn.saveable import (
    CudnnGRUSaveable,
    CudnnLSTMSaveable,
    CudnnRNNReluSaveable,
    CudnnRNNTanhSaveable,
    restore,
)
from models.weights import layouts
from tests import cudnn_cases
from tests.cudnn_cases import CLASSES, DIRECTIONS

SAVEABLES = {
    "lstm": CudnnLSTMSaveable,
    "gru": CudnnGRUSaveable,
    "rnn_tanh": CudnnRNNTanhSaveable,
    "rnn_relu": CudnnRNNReluSaveable,
}


def saveable(mode="lstm", num_layers=2, name="encoder", seed=0, skip=False, params_dtype=None, **kwargs):
    """A saveable whose params are random; params_dtype: where they have another type than the model."""
    model = cudnn_cases.model(mode, num_layers, skip, use_cudnn=False, **kwargs)
    params = cudnn_cases.arguments(model, seed)["params"]
    return SAVEABLES[mode](model, tf.Variable(params, dtype=params_dtype or model.dtype), name)


def change(*saveables):
    for each in saveables:
        each.params.assign_add(3 * tf.ones_like(each.params))  # they were between -0.5 and 0.5


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("skip", [False, True], ids=["linear", "skip"])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("mode", CLASSES)
def test_changed_params_come_back_bit_by_bit(tmp_path, mode, direction, skip, dtype):
    saved = saveable(mode, skip=skip, direction=direction, dtype=dtype)
    before = saved.params.numpy()
    checkpoint = tf.train.Checkpoint(rnn=saved)
    path = checkpoint.save(tmp_path / "model")
    change(saved)
    assert (saved.params.numpy() != before).all()
    restore(checkpoint, path).assert_consumed()
    np.testing.assert_array_equal(saved.params, before)


def test_several_in_one_checkpoint_go_into_other_objects_beside_other_variables(tmp_path):
    def checkpoint(seed):
        return tf.train.Checkpoint(
            encoder=saveable(name="encoder", seed=seed, direction="bidirectional"),
            decoder=tf.train.Checkpoint(rnn=saveable("gru", name="decoder", seed=seed)),
            head=tf.Variable([float(seed)] * 3),
        )

    saved, fresh = checkpoint(1), checkpoint(2)
    path = saved.save(tmp_path / "model")
    fresh.restore(path).assert_consumed()  # TensorFlow's own restore does it, too
    np.testing.assert_array_equal(fresh.encoder.params, saved.encoder.params)
    np.testing.assert_array_equal(fresh.decoder.rnn.params, saved.decoder.rnn.params)
    assert list(fresh.head) == [1.0] * 3


def test_a_file_holds_the_named_tensors_of_the_list_and_not_the_buffer(tmp_path):
    saved = saveable("gru", 1, name="rnn", direction="bidirectional")
    path = tf.train.Checkpoint(here=saved).save(tmp_path / "model")
    matrices, biases = layouts.cudnn_flat_to_list(saved.params.numpy(), saved.model.spec)
    names = [name for name, _ in layouts.cudnn_matrices(saved.model.spec) + layouts.cudnn_biases(saved.model.spec)]
    reader = tf.train.load_checkpoint(path)
    for name, array in zip(names, [*matrices, *biases], strict=True):
        np.testing.assert_array_equal(reader.get_tensor(f"here/.ATTRIBUTES/rnn:{name.replace(' ', '_')}"), array)
    others = [key for key in reader.get_variable_to_shape_map() if not key.startswith("here/.ATTRIBUTES/rnn:")]
    assert sorted(others) == ["_CHECKPOINTABLE_OBJECT_GRAPH", "save_counter/.ATTRIBUTES/VARIABLE_VALUE"]


def test_params_may_have_another_type_than_the_model(tmp_path):
    saved = saveable(dtype="float16", params_dtype="float32")
    before = saved.params.numpy()
    checkpoint = tf.train.Checkpoint(rnn=saved)
    path = checkpoint.save(tmp_path / "model")
    change(saved)
    restore(checkpoint, path)
    np.testing.assert_array_equal(saved.params, before)


# --- what is refused ----------------------------------------------------------------------------------------------------

WRONG = [
    (
        dict(num_layers=1),
        r"'decoder' holds the params of lstm, 2 layers × 5 units, input 3, .*; this model is lstm, 1 layer ×",
    ),
    (dict(num_layers=3), r"'decoder' holds the params of lstm, 2 layers .*; this model is lstm, 3 layers"),
    (
        dict(skip=True),
        r"'decoder' holds the params of .*, input 3, linear_input, .*; this model is .*, input 5, skip_input",
    ),
    (
        dict(direction="bidirectional"),
        r"'decoder' holds the params of .* unidirectional; this model is .* bidirectional",
    ),
    (dict(mode="gru"), r"'decoder' holds the params of lstm, .*; this model is gru"),
    (dict(dtype="float64"), r"'decoder' holds float32, expected float64, the type of the params"),
    (dict(name="other"), r"holds no params of the name 'other', only of decoder, encoder"),
]


@pytest.mark.parametrize("with_tensorflows_restore", [False, True])
@pytest.mark.parametrize(("wrong", "message"), WRONG)
def test_a_file_of_another_shape_is_refused_before_anything_changes(tmp_path, wrong, message, with_tensorflows_restore):
    def checkpoint(**decoder):
        return tf.train.Checkpoint(
            encoder=saveable(seed=4),
            decoder=saveable(**{"name": "decoder", "seed": 3, **decoder}),
            head=tf.Variable([1.0, 2.0]),
        )

    path = checkpoint().save(tmp_path / "model")
    fresh = checkpoint(**wrong)
    change(fresh.encoder)
    fresh.head.assign([5.0, 6.0])
    before = [fresh.encoder.params.numpy(), fresh.decoder.params.numpy(), fresh.head.numpy()]
    with pytest.raises(ValueError, match=message) as caught:
        fresh.restore(path) if with_tensorflows_restore else restore(fresh, path)
    assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value)
    for variable, values in zip([fresh.encoder.params, fresh.decoder.params, fresh.head], before, strict=True):
        np.testing.assert_array_equal(variable, values)


def cut(share):
    return lambda content: content[: int(share * len(content))]


def flip(content):
    return content[:50] + bytes([content[50] ^ 1]) + content[51:]


@pytest.mark.parametrize(
    ("suffix", "damage"),
    [(".data-00000-of-00001", cut(share)) for share in (0, 0.1, 0.5, 0.99)]
    + [(".data-00000-of-00001", flip), (".index", cut(0)), (".index", cut(0.5)), (".index", cut(0.99))],
)
def test_a_file_cut_short_or_damaged_is_refused_and_the_params_keep_their_values(tmp_path, suffix, damage):
    checkpoint = tf.train.Checkpoint(encoder=saveable(), decoder=saveable("gru", name="decoder"))
    path = checkpoint.save(tmp_path / "model")
    file = tmp_path / f"model-1{suffix}"
    file.write_bytes(damage(file.read_bytes()))
    saveables = [checkpoint.encoder, checkpoint.decoder]
    change(*saveables)
    before = [each.params.numpy() for each in saveables]
    with pytest.raises(ValueError, match="missing, cut short or damaged: ") as caught:
        restore(checkpoint, path)
    assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value)
    with pytest.raises((tf.errors.OpError, IndexError)):
        checkpoint.restore(path)
    for each, values in zip(saveables, before, strict=True):
        np.testing.assert_array_equal(each.params, values)


def test_a_missing_file_is_refused_in_one_line(tmp_path):
    with pytest.raises(ValueError, match=r"nothing-1: missing, cut short or damaged") as caught:
        restore(tf.train.Checkpoint(rnn=saveable()), str(tmp_path / "nothing-1"))
    assert "\n" not in str(caught.value)


def test_wrong_arguments_are_named():
    given = saveable()
    with pytest.raises(ValueError, match="model: a CudnnLSTM given, expected a CudnnGRU"):
        CudnnGRUSaveable(given.model, given.params, "rnn")
    with pytest.raises(ValueError, match=r"params: a EagerTensor given, expected a tf.Variable \[\d+\]"):
        CudnnLSTMSaveable(given.model, tf.constant(given.params), "rnn")
    with pytest.raises(ValueError, match=r"params: \[3\] given, expected"):
        CudnnLSTMSaveable(given.model, tf.Variable([0.0, 1.0, 2.0]), "rnn")
    for name in ("", "a/b", "a.b", 3):
        with pytest.raises(ValueError, match=r"name: .* given, expected letters, digits, - and _"):
            CudnnLSTMSaveable(given.model, given.params, name)
