"""cuDNN called by ctypes: what each function is given, where the weights lie, and which setting is chosen; of a library that
computes nothing (fake_cudnn.c). What cuDNN itself computes is held on a GPU: tests/test_gpu_torch.py."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from models.weights import canonical
from models.weights.stack_spec import StackSpec
from tests.language_models import run_eagerly

torch = pytest.importorskip("torch")

from models.pytorch import cudnn_rnn, difference, stacks  # noqa: E402 (PyTorch may be missing)

SPEC = StackSpec("lstm", num_layers=2, units=4, input_size=3)
SHAPE = cudnn_rnn.Shape(SPEC, torch.float32, steps=5, batch=6)
SETTING = cudnn_rnn.Setting("PERSIST_DYNAMIC", "FMA_MATH", "packed")
STANDARD = cudnn_rnn.Setting("STANDARD", "FMA_MATH", "padded")
SIZE = 4 * (4 * (4 * (3 + 4 + 2) + 4 * (4 + 4 + 2)) + 2 * 16)  # bytes: two layers, each with a gap of 16 numbers


class FakeLibrary(cudnn_rnn.Library):
    """On the host, where there are no streams."""

    def on_stream(self):
        self("cudnnSetStream", self.handle, None)
        return self.handle

    def log(self) -> list[str]:
        """What was called since the last time."""
        self._library.fake_log.restype = ctypes.c_char_p
        lines = self._library.fake_log().decode().splitlines()
        self._library.fake_clear()
        return lines


@pytest.fixture(scope="session")
def path(tmp_path_factory):
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    made = tmp_path_factory.mktemp("cudnn") / "libfake.so"
    source = Path(__file__).with_name("fake_cudnn.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-Wall", "-Werror", "-o", made, source], check=True)
    return str(made)


@pytest.fixture
def fake(path, monkeypatch):
    """The process' own library for a test; graphs are calls, each of which takes 1 ms."""
    library = FakeLibrary(path)
    library.log()
    monkeypatch.setattr(cudnn_rnn, "library", lambda: library)
    monkeypatch.setattr(cudnn_rnn, "cuda_graph", run_eagerly)
    monkeypatch.setattr(cudnn_rnn, "_round_ms", lambda replay, replays: replay() or 1.0)
    monkeypatch.setattr(
        torch.backends.cudnn, "allow_tf32", True
    )  # PyTorch's default, which other tests may have changed
    cudnn_rnn._plan.cache_clear(), cudnn_rnn.weight_space.cache_clear()
    yield library
    cudnn_rnn._plan.cache_clear(), cudnn_rnn.weight_space.cache_clear()


def full(value, *shape):
    return torch.full(shape, value)


def given(size=SIZE // 4):
    """x, h, c and weights, each of one number."""
    return full(0.1, 5, 6, 3), full(0.2, 2, 6, 4), full(0.3, 2, 6, 4), full(0.4, size)


def stack() -> stacks.CudnnStack:
    return stacks.CudnnStack(weights(), SPEC.num_layers)


def weights():
    return canonical.large_random(canonical.language_model_shapes(7, 3, 4, 2), seed=1)


def test_every_function_gets_what_its_prototype_says(fake):
    torch.manual_seed(5)
    plan = cudnn_rnn.Plan(SETTING, SHAPE, 0.5, "cpu", fake)
    assert plan.size == SIZE // 4
    y, *_, reserve = plan.forward(*given(), training=True)
    plan.backward(*given(), y, reserve, full(0.5, *y.shape), full(0.6, 2, 6, 4), full(0.7, 2, 6, 4))
    plan.backward(*given(), y, reserve, None)
    assert plan.forward(*given(), training=False)[3].numel() == 0
    plan.close()
    state = "create TensorDescriptor"
    passed = f"length 5 x 0.1 of width 3 hx 0.2 cx 0.3 weights 0.4 of {SIZE}"
    adds = f"backward weights mode 0 length 5 x 0.1 hx 0.2 y 1.0001 dweights 0 of {SIZE} work 65 reserve 8 of 128"
    assert fake.log() == [
        "cudnnCreate",
        "cudnnSetStream",
        "create RNNDescriptor",
        "create DropoutDescriptor",
        "dropout 0.5, states of 48 bytes, seed 5",
        # LSTM, two biases, one direction, linear input, float32 in float32 by FMA, no projection, packed
        "rnn algorithm 2 cell 2 bias 2 direction 0 input_mode 0 dtype 0 precision 0 math 3 input 3 units 4 projection 4 "
        "layers 2 flags 0",
        *["create RNNDataDescriptor"] * 2,
        *(f"data dtype 0 layout 1 steps 5 batch 6 width {width} lengths 5 to 5" for width in (3, 4)),
        state,
        "tensor dtype 0 [2 6 4] strides [24 4 1]",
        "build for 6",
        *[state] * 2,
        "cudnnSetStream",
        f"forward mode 1 {passed} work 65 reserve 128 rate 0.5",
        "cudnnSetStream",
        f"backward data length 5 y 1.0001 of width 4 dy 0.5 hx 0.2 dhy 0.6 cx 0.3 dcy 0.7 weights 0.4 of {SIZE} work 65 "
        "reserve 4 of 128",
        adds,
        "cudnnSetStream",
        f"backward data length 5 y 1.0001 of width 4 dy 0 hx 0.2 dhy -1 cx 0.3 dcy -1 weights 0.4 of {SIZE} work 65 "
        "reserve 8 of 128",
        adds,
        "cudnnSetStream",
        f"forward mode 0 {passed} work 64 reserve 0 rate 0.5",
        *["destroy TensorDescriptor"] * 3,
        *["destroy RNNDataDescriptor"] * 2,
        "destroy DropoutDescriptor",
        "destroy RNNDescriptor",
    ]


def test_padded_data_says_so_in_both_places_and_no_dropout_has_no_states(fake):
    cudnn_rnn.Plan(STANDARD, SHAPE, 0.0, "cpu", fake)
    log = "\n".join(fake.log())
    assert "math 3 input 3 units 4 projection 4 layers 2 flags 1" in log and "layout 0 steps 5" in log
    assert "dropout 0, states of 0 bytes nowhere" in log and "build for" not in log


@pytest.mark.parametrize(("dtype", "number"), [(torch.float32, 0), (torch.float16, 2), (torch.bfloat16, 9)])
def test_products_of_every_dtype_add_up_in_float32(fake, dtype, number):
    cudnn_rnn.Plan(STANDARD, cudnn_rnn.Shape(SPEC, dtype, 5, 6), 0.0, "cpu", fake)
    assert any(f"dtype {number} precision 0 math 3" in line for line in fake.log())


def test_weights_lie_where_cudnn_says_and_come_back(fake):
    made = stack()
    [flat] = made.parameters
    flat = flat.detach().numpy()
    own = {name: array for name, array in weights().items() if name.startswith("lstm_")}
    back = made.to_canonical([flat])
    assert set(back) == set(own)
    for name, array in own.items():
        np.testing.assert_array_equal(back[name], array, err_msg=name)
    # fake_cudnn.c: the last layer first, of each the biases, a gap, the matrices [units, input] of i, f, c, o.
    second = 4 * 4 * (4 + 4 + 2) + 16
    candidate = flat[second + 8 * 4 + 16 :][2 * 4 * 3 : 3 * 4 * 3].reshape(4, 3)
    np.testing.assert_array_equal(candidate, own["lstm_0/forward/kernel"][:, 8:12].T)
    np.testing.assert_array_equal(flat[:16], own["lstm_1/forward/bias"])
    np.testing.assert_array_equal(flat[16:48], 0)  # second biases, gap


def test_module_is_differentiated_by_cudnn_and_a_second_bias_has_no_gradient(fake):
    made = stack()
    x, h, c = (tensor.requires_grad_() for tensor in given()[:3])
    outputs, (last_h, last_c) = made(x, (h, c), 0.0, True)
    found = torch.autograd.grad((outputs.sum() + last_h.sum()), [x, h, c, *made.parameters])
    assert [round(tensor.min().item(), 3) for tensor in (outputs, last_h, last_c)] == [1, 2, 3]
    assert [tensor.unique().tolist() for tensor in found] == [[5], [6], [7], [0, 9]]
    for name, array in made.to_canonical([found[3].numpy()]).items():
        np.testing.assert_array_equal(array, 9, err_msg=name)


def test_gradient_by_the_final_state_alone_reaches_cudnn(fake):
    made = stack()
    x, h, c = (tensor.requires_grad_() for tensor in given()[:3])
    _, (last_h, _) = made(x, (h, c), 0.0, True)
    fake.log()
    torch.autograd.grad(last_h.sum(), [x])
    assert [line for line in fake.log() if "y 1.0001 of width 4 dy 0 hx 0.2 dhy 1 cx 0.3 dcy -1" in line]


def test_ops_of_two_rates_differ_in_nothing_else(fake):
    made = stack()
    x, h, c = given()[:3]

    def ops(rate, training=True):
        return difference.ops_of(lambda: made(x.requires_grad_(), (h, c), rate, training)[0].sum().backward())

    assert any("_cudnn_rnn_backward" in op for op, _ in ops(0.0))
    assert difference.step_difference(ops(0.5), ops(0.0)) == ""
    assert "_cudnn_rnn" in difference.step_difference(ops(0.5), ops(0.5, training=False))


# --- which setting ------------------------------------------------------------------------------------------------------


def choose(precision="fp32", training=True):
    return cudnn_rnn.choose(cudnn_rnn.settings(precision), SHAPE, given(), precision, training, "cpu")


def test_settings_are_every_algorithm_in_both_layouts_by_the_precisions_own_products():
    found = {precision: cudnn_rnn.settings(precision) for precision in ("fp32", "tf32", "fp16", "bf16")}
    assert [len(made) for made in found.values()] == [8, 16, 16, 16]
    assert {setting.math for setting in found["fp32"]} == {"FMA_MATH"}
    assert {setting.math for setting in found["tf32"]} == {"DEFAULT_MATH", "TENSOR_OP_MATH_ALLOW_CONVERSION"}
    assert {setting.math for setting in found["fp16"]} == {"DEFAULT_MATH", "TENSOR_OP_MATH"}
    for made in found.values():
        assert made[0].algorithm == "STANDARD" and len(set(made)) == len(made)
        assert {setting.algorithm for setting in made} == set(cudnn_rnn.ALGORITHMS)


def test_refused_settings_are_named_with_their_status(fake, monkeypatch):
    monkeypatch.setenv("FAKE_CUDNN_REFUSES", "1,3")
    found = choose()
    assert found.setting == STANDARD and len(found.times_ms) == 4
    assert {setting.algorithm for setting in found.refused} == {"PERSIST_STATIC", "PERSIST_STATIC_SMALL_H"}
    assert str(found) == (
        "cuDNN 9.19.0 ran STANDARD, FMA_MATH, padded, the fastest of 4 settings; not run: PERSIST_STATIC, "
        "PERSIST_STATIC_SMALL_H: CUDNN_STATUS_NOT_SUPPORTED"
    )


def test_descriptors_of_what_is_not_chosen_are_given_back(fake, monkeypatch):
    monkeypatch.setenv("FAKE_CUDNN_REFUSES", "1")
    choose()
    log = fake.log()
    for kind in ("RNN", "RNNData", "Tensor", "Dropout"):
        assert log.count(f"create {kind}Descriptor") == log.count(f"destroy {kind}Descriptor") > 0


def test_all_settings_refused_is_one_line(fake, monkeypatch):
    cudnn_rnn.weight_space(SPEC, torch.float32, "cpu")
    monkeypatch.setenv("FAKE_CUDNN_REFUSES", "0,1,2,3")
    with pytest.raises(
        cudnn_rnn.CudnnError, match="in no setting: STANDARD, FMA_MATH, padded: CUDNN_STATUS_NOT_SUP"
    ) as raised:
        choose()
    assert "\n" not in str(raised.value)


def test_setting_that_computes_something_else_is_not_chosen(fake, monkeypatch):
    monkeypatch.setenv("FAKE_CUDNN_WRONG", "1")
    found = choose()
    assert {setting.algorithm for setting in found.times_ms} == {"STANDARD"}
    assert set(found.refused.values()) == {"other outputs than the standard algorithm"}
    assert len(choose("tf32", training=False).times_ms) == 2


def test_products_in_float16_are_not_tf32_and_tried_once(fake, monkeypatch):
    monkeypatch.setenv("FAKE_CUDNN_REFUSES", "3")
    found = choose("tf32")
    assert {setting.math for setting in found.times_ms} == {"DEFAULT_MATH"} and len(found.times_ms) == 6
    assert len([line for line in fake.log() if "math 2" in line]) == 1
    assert str(found).endswith(
        "; not run: TENSOR_OP_MATH_ALLOW_CONVERSION: rounds to float16; "
        "PERSIST_STATIC_SMALL_H with DEFAULT_MATH: CUDNN_STATUS_NOT_SUPPORTED"
    )


def test_weights_in_another_order_are_not_run(fake, monkeypatch):
    cudnn_rnn.weight_space(SPEC, torch.float32, "cpu")
    pieces = cudnn_rnn.Plan._pieces
    monkeypatch.setattr(cudnn_rnn.Plan, "_pieces", lambda self, handle: [made[::-1] for made in pieces(self, handle)])
    with pytest.raises(cudnn_rnn.CudnnError, match="PERSIST_STATIC, FMA_MATH, packed: the weights in another order"):
        choose()
    assert not [line for line in fake.log() if line.startswith("forward")]


def test_setting_far_behind_the_best_is_replayed_once_more_alone():
    taken, replays = iter([9.0, 8.0]), []

    def replay():
        replays.append(next(taken, 1.0))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cudnn_rnn, "_round_ms", lambda replay, times: replay() or replays[-1])
        assert cudnn_rnn._replays_ms(replay, hopeless_ms=7.0) == 8.0 and len(replays) == 2
        assert cudnn_rnn._replays_ms(replay, hopeless_ms=7.0) == 1.0 and len(replays) == 4 + cudnn_rnn.ROUNDS


def test_fastest_is_clearly_faster_than_what_comes_before_it():
    names = [cudnn_rnn.Setting(name, "FMA_MATH", "packed") for name in cudnn_rnn.ALGORITHMS]
    chosen = [
        names.index(cudnn_rnn.fastest(dict(zip(names, times, strict=False))))
        for times in ([3.0], [3.0, 2.99, 2.0, 1.99], [1.0, 2.0, 3.0, 4.0], [4.0, 3.0, 2.0, 1.0])
    ]
    assert chosen == [0, 2, 0, 3]


def test_choice_is_made_once_for_a_shape_and_mode_and_its_record_says_so(fake, monkeypatch):
    made, asked = stack(), []
    monkeypatch.setattr(cudnn_rnn, "choose", lambda *a, whole=cudnn_rnn.choose: asked.append(a[4]) or whole(*a))
    x, h, c = given()[:3]
    assert made.notes("train") == made.notes("fit") == []
    for rate, training in ((0.0, True), (0.5, True), (0.0, False), (0.0, False)):
        made(x, (h, c), rate, training)
    assert asked == [True, False]
    monkeypatch.setenv("FAKE_CUDNN_REFUSES", "2")
    made(x[:, :2], (h[:, :2], c[:, :2]), 0.0, False)
    assert [len(made.notes(mode)) for mode in ("train", "stack", "forward", "fit")] == [1, 1, 2, 3]
    assert ["PERSIST_DYNAMIC with DEFAULT_MATH: CUDNN" in note for note in made.notes("forward")] == [False, True]


# --- without cuDNN ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "said"), [("libcudnn.so.0", "cannot open shared object file"), ("libm.so.6", "has no cudnnCreate")]
)
def test_library_that_is_missing_or_another_is_one_line(name, said):
    with pytest.raises(
        cudnn_rnn.CudnnError, match=f"cuDNN: .*{said}.*; expected cuDNN 9.*--peers installs it"
    ) as raised:
        cudnn_rnn.Library(name)
    assert "\n" not in str(raised.value)


def test_status_of_a_call_is_told_with_cudnns_own_words(fake, monkeypatch):
    monkeypatch.setenv("FAKE_CUDNN_REFUSES", "2")
    with pytest.raises(cudnn_rnn.CudnnError) as raised:
        cudnn_rnn.Plan(SETTING, SHAPE, 0.0, "cpu", fake)
    assert str(raised.value) == "cudnnSetRNNDescriptor_v8: CUDNN_STATUS_NOT_SUPPORTED (the fake says no)"
    assert raised.value.status == "CUDNN_STATUS_NOT_SUPPORTED"
