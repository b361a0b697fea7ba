"""TensorFloat-32's products by factors of float16 in the persistent kernels: as precise, whatever the numbers' sizes are."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from models.wavefront import nvrtc, persistent, products, softmax, tiling
from models.wavefront.halves import largest, powers
from models.wavefront.persistent import persistent_bidirectional_stack, persistent_stack
from models.wavefront.softmax_loss import padded
from models.wavefront.stack import LayerWeights, bidirectional_stack, lstm_stack
from models.wavefront.tiling import best_tiling, by_halves
from models.wavefront.work import DTYPE_CODES, HALVES, Work, padded_units
from tests.models.emulated_kernels import H200, emulated
from tests.models.test_wavefront_persistent import CHIPS, PUBLISHED, SHAPES, needs_compiler, results, worst

ALLOWED = "models.wavefront.work.HALVES_ALLOWED"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture
def taken(monkeypatch):
    monkeypatch.setattr(ALLOWED, True)
    monkeypatch.setattr(tiling, "HALVES_US", -1e9)


@pytest.fixture
def in_both(monkeypatch, folder):
    """Callable: (function that runs a stack) → what it returns with factors of float16, and without."""

    def run(function):
        found, codes, launch = [], [], persistent._launch
        monkeypatch.setattr(
            persistent, "_launch", lambda work, *rest: codes.append(work.dtype_code) or launch(work, *rest)
        )
        monkeypatch.setattr(tiling, "HALVES_US", -1e9)
        for allowed in (True, False):
            monkeypatch.setattr(ALLOWED, allowed)
            with emulated(monkeypatch, folder):
                found.append(function())
            assert set(codes) == {HALVES if allowed else DTYPE_CODES["tf32"]}
            codes.clear()
        return found

    return run


# -- as precise as TensorFloat-32 --------------------------------------------------------------------------------------------

OPTIONS = [{}, {"lengths": True}, {"keep": True}, {"lengths": True, "keep": True}]
CASES = [
    pytest.param(name, options, marks=[pytest.mark.slow] * ((i + j) % 4 > 0))
    for i, name in enumerate(SHAPES)
    for j, options in enumerate(OPTIONS)
]


@needs_compiler
@pytest.mark.parametrize(("name", "options"), CASES)
def test_errors_are_tf32s(in_both, name, options):
    *shape, together = SHAPES[name]
    expected = results(lstm_stack, "float64", *shape, **options)
    found = in_both(lambda: results(persistent_stack, "float32", *shape, together=together, **options))
    halves, tf32 = (worst(each, expected) for each in found)
    assert 0 < halves < 1.1 * tf32 < 2e-3


@needs_compiler
@pytest.mark.parametrize("options", [{"lengths": True, "keep": True}, pytest.param({}, marks=pytest.mark.slow)])
def test_errors_of_two_directions_are_tf32s(in_both, options):
    shape = (2, 3, 50, 10, 5)
    expected = results(bidirectional_stack, "float64", *shape, directions=2, **options)
    stack = persistent_bidirectional_stack
    found = in_both(lambda: results(stack, "float32", *shape, directions=2, **options))
    halves, tf32 = (worst(each, expected) for each in found)
    assert 0 < halves < 1.1 * tf32 < 4e-3


# -- numbers of any size -----------------------------------------------------------------------------------------------------


def stack_of(stack, dtype, layers=3, units=32, time=6, weights=0.3, h_0=0.5, upstream=1.0, last=False, poison=None):
    """Outputs, states and gradients by x, h, c and every weight; the arguments: sizes of numbers.

    last: of the gradients from above that of the last step's output alone. poison: one of them is that.
    """
    rng = np.random.default_rng(3)

    def some(*shape, size=1.0):
        return tf.cast(rng.normal(size=shape) * size, dtype)

    x, h, c = some(time, 10, 7), some(layers, 10, units, size=h_0), some(layers, 10, units)
    of_layers = [
        (some(units if k else 7, 4 * units, size=weights), some(units, 4 * units, size=weights), some(4 * units))
        for k in range(layers)
    ]
    sources = [x, h, c, *itertools.chain(*of_layers)]
    with tf.GradientTape() as tape:
        tape.watch(sources)
        found = stack(x, [LayerWeights(*layer) for layer in of_layers], h, c)
    above = [some(*y.shape, size=upstream).numpy() for y in found]
    if last:
        above = [above[0] * (np.arange(time) == time - 1)[:, np.newaxis, np.newaxis], 0 * above[1], 0 * above[2]]
    if poison is not None:
        above[0][-1, 2, 5] = poison
    gradients = tape.gradient(found, sources, output_gradients=[tf.constant(y, dtype) for y in above])
    return [np.float64(y) for y in (*found, *gradients)]


@needs_compiler
@pytest.mark.parametrize(
    "sizes",
    [
        {"upstream": 1e-20}, {"upstream": 1e15}, {"weights": 1e-4}, {"weights": 1e-4, "h_0": 1e4},
        {"weights": 1e-25, "h_0": 1e24}, {"upstream": 0.0},
    ],
    ids=str,
)  # fmt: skip
def test_errors_are_tf32s_whatever_the_numbers_sizes_are(in_both, sizes):
    expected = stack_of(lstm_stack, "float64", **sizes)
    found = in_both(lambda: stack_of(persistent_stack, "float32", **sizes))
    halves, tf32 = (worst(each, expected) for each in found)
    assert halves < 1.1 * tf32 + 1e-6 < 4e-3


@needs_compiler
def test_gradients_that_vanish_on_their_way_back_are_as_precise_at_every_step(in_both):
    """By five orders of magnitude and more over 60 steps."""
    sizes = dict(layers=1, time=60, weights=0.05, upstream=1e-10, last=True)
    expected = stack_of(lstm_stack, "float64", **sizes)[3]
    assert np.abs(expected[0]).max() < 1e-5 * np.abs(expected[-1]).max()
    for found in in_both(lambda: stack_of(persistent_stack, "float32", **sizes)):
        for step, exact in zip(found[3], expected, strict=True):
            assert worst([step], [exact]) < 1e-3


@needs_compiler
@pytest.mark.parametrize("weights", [1.0, 3.0, 30.0])
def test_gradients_that_grow_without_bounds_stay_in_float16s_range(in_both, weights):
    """Their first step's is up to a million times the last one's; rounding has made other numbers of it by then."""
    sizes = dict(time=25, weights=weights, last=True)
    halves, tf32 = in_both(lambda: stack_of(persistent_stack, "float32", **sizes))
    assert all(np.isfinite(array).all() for array in halves)
    for one, other in zip(halves[3:6], tf32[3:6], strict=True):
        assert 0.1 < np.abs(one).max() / np.abs(other).max() < 10


@needs_compiler
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_what_is_not_finite_stays_in_its_sequence(in_both, poison):
    halves, tf32 = in_both(lambda: stack_of(persistent_stack, "float32", poison=poison))
    for one, other in zip(
        halves[3:6], tf32[3:6], strict=True
    ):  # by x, h and c: the other axes are the batch, and units
        bad = [not np.isfinite(one[:, k]).all() for k in range(10)]
        assert bad == [not np.isfinite(other[:, k]).all() for k in range(10)] == [k == 2 for k in range(10)]
        rest = np.arange(10) != 2
        assert worst([one[:, rest]], [other[:, rest]]) < 2e-3


def test_powers_of_two_bring_every_number_into_float16s_range():
    numbers = np.float32([1e-30, 2.0**-60, 1e-5, 1.0, 1.5, 2.0, 1e4, 3.4e38])
    scale, undone = (x.numpy() for x in powers(tf.constant(numbers)))
    np.testing.assert_array_equal(scale * undone, 1)
    np.testing.assert_array_equal(np.frexp(scale)[0], 0.5)
    scaled = np.float64(numbers) * scale
    assert (scaled < 2**15).all() and (scaled[1:] >= 2**14).all()
    assert float(largest(tf.constant([-3.0, np.inf, np.nan, 2.0]))) == 3


# -- where they are taken ----------------------------------------------------------------------------------------------------


def works():
    for layers, units, batch, time in PUBLISHED:
        for lanes, backward, keep, lengths in itertools.product((1, layers), *[(False, True)] * 3):
            yield Work(lanes, batch, padded_units(units, 2), DTYPE_CODES["tf32"], backward, keep, lengths), time


def test_they_are_off_and_of_tf32_alone_where_they_are_on(monkeypatch):
    assert all(by_halves(work, time, H200) is work for work, time in works())
    monkeypatch.setattr(ALLOWED, True)
    large = Work(1, 20, 1504, DTYPE_CODES["tf32"], False)
    assert by_halves(large, 35, H200) == large._replace(dtype_code=HALVES)
    for other in (large._replace(dtype_code=code) for code in (*DTYPE_CODES.values(), HALVES) if code):
        assert by_halves(other, 35, H200) is other
    assert by_halves(large, tiling.HALVES_STEPS + 1, H200) is large
    assert by_halves(large._replace(units=1520), 35, H200).dtype_code == DTYPE_CODES["tf32"]


def test_they_are_taken_where_a_step_should_take_less_time(monkeypatch):
    monkeypatch.setattr(ALLOWED, True)
    taken = set()
    for work, time in works():
        if best_tiling(work, H200) is None:
            continue
        chosen, halves = by_halves(work, time, H200), work._replace(dtype_code=HALVES)
        us = [tiling.step_us(each, best_tiling(each, H200)) for each in (work, halves)]
        assert (chosen == halves) == (us[1] + tiling.HALVES_US < us[0])
        assert best_tiling(halves, H200).shared_bytes(halves) <= H200.shared_bytes
        taken.add(chosen == halves)
    assert taken == {True, False}


@pytest.mark.usefixtures("taken")
def test_units_are_padded_for_them_where_they_may_be_taken(monkeypatch):
    monkeypatch.setattr(nvrtc, "chip", lambda: H200)
    for tf32, units in ((True, 672), (False, 656)):
        monkeypatch.setattr(tf.config.experimental, "tensor_float_32_execution_enabled", lambda tf32=tf32: tf32)
        layer = LayerWeights(None, tf.TensorSpec([650, 2600]), None)
        work, _ = persistent.planned(tf.TensorSpec([35, 20, 650]), [layer], False, False, False)
        assert work.units == units


@pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: f"sm_{chip.capability}")
def test_kernels_of_the_published_shapes_compile(chip):
    """By NVRTC; needs no GPU."""
    pytest.importorskip("nvidia.cuda_nvrtc", reason="NVRTC is not installed: pip install nvidia-cuda-nvrtc-cu12")
    compiled = 0
    for work, time in itertools.islice(works(), None, None, 5 if chip == H200 else 17):
        halves = work._replace(dtype_code=HALVES)
        found = best_tiling(halves, chip)
        if found is None:
            continue
        code = persistent.ptx(halves, time, halves.units, found, chip)
        assert f".entry {persistent.kernel_name(halves, found)}" in code
        assert "f32.f16.f16.f32" in code and "tf32" not in code and f".target sm_{chip.capability}" in code
        compiled += 1
    assert compiled > 3


# -- the softmax and the products around it ----------------------------------------------------------------------------------


def losses_and_gradients(dtype, size_of_x, size_of_kernel, scale, targets, head):
    """Of 21 words of 130, 24 features: losses, and gradients of scale · their sum by x, kernel and bias."""
    rng = np.random.default_rng(5)
    x = tf.constant(rng.normal(size=[21, 24]) * size_of_x, dtype)
    kernel, bias = padded(
        tf.constant(rng.normal(size=[24, 130]) * size_of_kernel, dtype), tf.constant(rng.normal(size=130), dtype)
    )
    with tf.GradientTape() as tape:
        tape.watch([x, kernel, bias])
        total, losses = head(x, kernel, bias, targets, scale)
    return [np.float64(y) for y in (losses, *tape.gradient(total, [x, kernel, bias], tf.constant(2.0, dtype)))]


def in_float64(x, kernel, bias, targets, scale):
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(targets, x @ kernel + bias)
    return scale * tf.reduce_sum(losses), losses


@pytest.fixture
def by_float16(monkeypatch, folder):
    """softmax.scaled_loss_by_halves, its kernel on the emulator and its products in NumPy."""

    def dot(a, b, of_a, of_b):
        assert a.dtype == b.dtype == tf.float16
        return tf.matmul(tf.cast(a, tf.float32), tf.cast(b, tf.float32), transpose_a=of_a == -2, transpose_b=of_b == -1)

    monkeypatch.setattr(products, "dot", dot)
    with emulated(monkeypatch, folder):
        yield lambda x, kernel, bias, targets, scale: softmax.scaled_loss_by_halves(
            x, kernel, bias, targets, 130, scale
        )


@needs_compiler
@pytest.mark.parametrize(
    ("of_x", "of_kernel", "scale"), [(1.0, 0.3, 1 / 21), (1e-4, 3e3, 1e-12), (1e6, 3e-7, 1e12), (1e-6, 1e-6, 1.0)]
)
def test_softmax_and_its_products_err_as_tf32_does(by_float16, of_x, of_kernel, scale):
    targets = tf.constant(np.random.default_rng(6).integers(0, 130, 21), tf.int64)
    given = of_x, of_kernel, scale, targets
    expected = losses_and_gradients("float64", *given, in_float64)
    found = losses_and_gradients("float32", *given, by_float16)
    assert 1e-8 < worst(found, expected) < 2e-3


@needs_compiler
def test_a_target_that_is_no_word_and_a_number_that_is_not_finite_stay_in_their_rows(by_float16):
    targets = tf.constant([130, *range(20)], tf.int64)
    losses, d_x, d_kernel, d_bias = losses_and_gradients("float32", 1.0, 0.3, 1.0, targets, by_float16)
    assert np.isnan(losses).tolist() == [True] + [False] * 20
    assert not d_x[0].any() and d_x[1:].any(1).all() and np.isfinite(d_kernel).all() and np.isfinite(d_bias).all()

    def with_infinity(x, *rest):
        return by_float16(tf.tensor_scatter_nd_update(x, [[3, 7]], [np.inf]), *rest)

    targets = tf.constant(range(21), tf.int64)
    losses, d_x, *_ = losses_and_gradients("float32", 1.0, 0.3, 1.0, targets, with_infinity)
    assert np.isfinite(losses).tolist() == np.isfinite(d_x).all(1).tolist() == [k != 3 for k in range(21)]


@pytest.mark.usefixtures("taken")
def test_the_head_takes_them_by_tf32_of_whole_16_bytes_alone(monkeypatch):
    given = {"features": 24, "dtype": tf.float32}
    for tf32 in (True, False):
        monkeypatch.setattr(tf.config.experimental, "tensor_float_32_execution_enabled", lambda tf32=tf32: tf32)
        assert softmax.takes_halves(**given) == tf32
        assert not softmax.takes_halves(**given | {"features": 20})
        assert not softmax.takes_halves(**given | {"dtype": tf.float16})
    monkeypatch.setattr(ALLOWED, False)
    monkeypatch.setattr(tf.config.experimental, "tensor_float_32_execution_enabled", lambda: True)
    assert not softmax.takes_halves(**given)
