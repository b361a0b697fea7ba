"""TensorFloat-32's products by factors of float16 in the persistent kernels: as precise, whatever the numbers' sizes are."""

import itertools
import runpy
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import tensorflow as tf

from models.wavefront import nvrtc, persistent, products, softmax, tiling
from models.wavefront.halves import largest, powers
from models.wavefront.persistent import persistent_bidirectional_stack, persistent_stack
from models.wavefront.softmax_head import SoftmaxHead
from models.wavefront.softmax_loss import padded
from models.wavefront.stack import LayerWeights, bidirectional_stack, lstm_stack
from models.wavefront.tiling import best_tiling, by_factors
from models.wavefront.work import DTYPE_CODES, HALVES, PAIRS, Work, padded_units
from tests.models.emulated_kernels import H200, emulated
from tests.models.test_wavefront_persistent import CHIPS, PUBLISHED, SHAPES, needs_compiler, results, worst

ALLOWED = "models.wavefront.work.HALVES_ALLOWED"
ALWAYS = dict.fromkeys((False, True), -1e9)  # us of a launch


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture
def taken(monkeypatch):
    monkeypatch.setattr(ALLOWED, True)
    monkeypatch.setattr(tiling, "HALVES_CALL_US", ALWAYS)


def dot_of_float16(a, b, of_a, of_b):
    """products.dot without XLA."""
    assert a.dtype == b.dtype == tf.float16
    return tf.matmul(tf.cast(a, tf.float32), tf.cast(b, tf.float32), transpose_a=of_a == -2, transpose_b=of_b == -1)


def product_of_tf32(a, b, transpose_a=False, transpose_b=False):
    """products.product as a GPU has it."""
    a, b = (persistent._rounded(DTYPE_CODES["tf32"], x) for x in (a, b))
    return tf.matmul(a, b, transpose_a, transpose_b)


@pytest.fixture(params=[True, False], ids=["kept", "in a ring"])
def kept(request, monkeypatch):
    """Whether factors stay for the weights' gradients, or not, as where one way alone has such."""
    if not request.param:
        launches = persistent._launches
        monkeypatch.setattr(
            persistent, "_launches", lambda *given: [way._replace(keeps_factors=False) for way in launches(*given)]
        )
    return request.param


@pytest.fixture
def in_both(kept, monkeypatch, folder):
    """Callable: (function that runs a stack) → what it returns with factors of float16, and without."""
    monkeypatch.setattr(products, "dot", dot_of_float16)
    monkeypatch.setattr(persistent, "product", product_of_tf32)
    monkeypatch.setattr(persistent, "over_rows", lambda xs, y: [product_of_tf32(x, y, transpose_a=True) for x in xs])

    def run(function):
        found, codes, launch = [], [], persistent._launch
        monkeypatch.setattr(
            persistent, "_launch", lambda work, *rest: codes.append(work.dtype_code) or launch(work, *rest)
        )
        monkeypatch.setattr(tiling, "HALVES_CALL_US", ALWAYS)
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
    assert 0 < halves < 1.3 * tf32 < 2e-3


@needs_compiler
@pytest.mark.parametrize("forward", [True, False])
@pytest.mark.parametrize("tf32", [True, False])
def test_one_way_alone_has_them(monkeypatch, folder, forward, tf32):
    """As each is decided by itself: what stays is what the other way reads then."""
    *shape, together = SHAPES["three layers along the diagonal, three tiles of sequences"]
    expected, ran, launch = results(lstm_stack, "float64", *shape, lengths=True), [], persistent._launch
    monkeypatch.setattr(persistent, "_launch", lambda work, *rest: ran.append(work) or launch(work, *rest))
    monkeypatch.setattr(ALLOWED, True)
    monkeypatch.setattr(tiling, "HALVES_CALL_US", {not forward: -1e9, forward: 1e9})
    with emulated(monkeypatch, folder, tf32=tf32):
        found = results(persistent_stack, "float32", *shape, together=together, lengths=True)
    assert {work.backward: work.scaled for work in ran} == {False: forward, True: not forward}
    assert not any(work.keeps_factors for work in ran)
    assert 0 < worst(found, expected) < (4e-3 if tf32 else 4e-6)


@needs_compiler
@pytest.mark.parametrize(
    "options",
    [{"lengths": True}, *(pytest.param(o, marks=pytest.mark.slow) for o in ({}, {"lengths": True, "keep": True}))],
)
def test_errors_of_two_directions_are_tf32s(in_both, options):
    shape = (2, 3, 50, 10, 5)
    expected = results(bidirectional_stack, "float64", *shape, directions=2, **options)
    stack = persistent_bidirectional_stack
    found = in_both(lambda: results(stack, "float32", *shape, directions=2, **options))
    halves, tf32 = (worst(each, expected) for each in found)
    assert 0 < halves < 1.1 * tf32 < 4e-3


# -- numbers of any size -----------------------------------------------------------------------------------------------------


def stack_of(
    stack, dtype, layers=3, units=32, time=6, weights=0.3, h_0=0.5, upstream=1.0, last=False, poison=None, apart=1
):
    """Outputs, states and gradients by x, h, c and every weight; the arguments: sizes of numbers.

    last: of the gradients from above that of the last step's output alone. poison: one of them is that. apart: times as large as
    the others the first sequence's are.
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
    for array in above:
        array[:, 0] *= apart
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
@pytest.mark.parametrize("layers", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_gradients_that_vanish_on_their_way_back_are_as_precise_at_every_step(in_both, layers):
    """By five orders of magnitude and more over 90 steps: where one layer is by itself by nine."""
    sizes = dict(layers=layers, time=90, weights=0.05, upstream=1e-10, last=True)
    expected = stack_of(lstm_stack, "float64", **sizes)[3]
    assert np.abs(expected[0]).max() < (1e-9 if layers == 1 else 1e-5) * np.abs(expected[-1]).max()
    for found in in_both(lambda: stack_of(persistent_stack, "float32", **sizes)):
        for step, exact in zip(found[3], expected, strict=True):
            assert worst([step], [exact]) < 1.5e-3


@needs_compiler
def test_gradients_of_a_sequence_are_as_precise_beside_one_whose_are_ten_thousand_times_as_large(in_both):
    def of_others(stack, dtype):
        return [array[:, 1:] for array in stack_of(stack, dtype, apart=1e4)[3:6]]  # by x, h and c

    expected = of_others(lstm_stack, "float64")
    halves, tf32 = (worst(found, expected) for found in in_both(lambda: of_others(persistent_stack, "float32")))
    assert halves < 1.5 * tf32 < 2e-3


@pytest.fixture
def alike(monkeypatch, folder, taken):
    """Callable → gradients by x, h and c of a stack whose numbers are all alike, so that no sum cancels.

    size: of the weights; bias: of the gates; x_0: of the first step, and 0 later; c_0; above: of the last output, h and c.
    """

    def run(layers, time, size, bias, x_0=0.0, c_0=0.0, above=(0.0, 0.0, 0.0), stack=persistent_stack, dtype="float32"):
        x = tf.concat([tf.fill([1, 8, 32], tf.cast(x_0, dtype)), tf.zeros([time - 1, 8, 32], dtype)], 0)
        h, c = tf.zeros([layers, 8, 32], dtype), tf.fill([layers, 8, 32], tf.cast(c_0, dtype))
        kernel = tf.fill([32, 128], tf.cast(size, dtype))
        given = [LayerWeights(kernel, kernel, tf.repeat(tf.constant(bias, dtype), 32))] * layers
        with tf.GradientTape() as tape:
            tape.watch([x, h, c])
            outputs, *ends = stack(x, given, h, c)
            total = tf.add_n([k * tf.reduce_sum(y) for k, y in zip(above, (outputs[-1], *ends), strict=True)])
        return [np.float64(y) for y in tape.gradient(total, [x, h, c])]

    with emulated(monkeypatch, folder):
        yield run


LARGER = dict(time=5, size=1.0, bias=[2.0, 0.0, 0.0, 2.0])
CASES_OF_BOUNDS = {
    "weights make it larger": dict(layers=1, above=(1, 0, 0)) | LARGER,
    "weights make it larger, three layers": dict(layers=3, above=(1, 0, 0)) | LARGER,
    "by the last h alone": dict(layers=3, above=(0, 1, 0)) | LARGER,
    "a large c": dict(layers=1, time=4, size=1e-3, bias=[0.0] * 4, c_0=1e4, above=(0, 0, 1)),
    "a c that grows by one a step": dict(layers=1, time=300, size=1e-3, bias=[9.0, 9.0, 9.0, -9.0], above=(0, 0, 1)),
    "by c alone, until the first step's gates open": dict(
        layers=1, time=5, size=1.0, bias=[-20.0, 20.0, -20.0, 0.0], x_0=20 / 32, above=(0, 0, 1)
    ),
}


@needs_compiler
@pytest.mark.parametrize("name", CASES_OF_BOUNDS)
def test_no_gradient_is_beyond_its_bound(alike, name):
    expected = alike(**CASES_OF_BOUNDS[name], stack=lstm_stack, dtype="float64")
    assert worst(alike(**CASES_OF_BOUNDS[name]), expected) < 2e-3


@needs_compiler
def test_a_launch_finds_nothing_of_the_one_before(alike):
    first, _, again = (alike(layers=3, above=(size, 0, 0), **LARGER) for size in (1.0, 1e20, 1.0))
    for one, other in zip(first, again, strict=True):
        np.testing.assert_array_equal(one, other)


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
    for one, other in zip(halves[3:6], tf32[3:6], strict=True):  # by x, h and c, whose middle axis is the batch
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


@needs_compiler
def test_features_of_very_different_sizes_and_what_is_past_a_sequences_end_cost_no_bits(in_both):
    """One of 1e6 and one of 1e-3 beside ordinary ones, whose weights make up for it, and 1e30 where no step is."""
    sizes, lengths = np.array([1e6, 1e-3, 1, 1, 1]), tf.constant([6, 3, 0, 5, 1, 6, 2, 4, 6], tf.int32)
    rng = np.random.default_rng(4)
    x = rng.normal(size=(6, 9, 5)) * sizes + 1e30 * (
        np.arange(6)[:, np.newaxis, np.newaxis] >= lengths.numpy()[:, np.newaxis]
    )
    arrays = [rng.normal(size=(5, 128)) / sizes[:, np.newaxis], rng.normal(size=(32, 128)) * 0.3, rng.normal(size=128)]

    def gradients(stack, dtype):
        inputs, *weights = (tf.constant(array, dtype) for array in (x, *arrays))
        zeros = tf.zeros([1, 9, 32], dtype)
        with tf.GradientTape() as tape:
            tape.watch([inputs, weights])
            outputs, *_ = stack(inputs, [LayerWeights(*weights)], zeros, zeros, lengths=lengths)
            total = tf.reduce_sum(outputs**2)
        by_x, by_kernel, by_recurrent, _ = tf.nest.flatten(tape.gradient(total, [inputs, weights]))
        return [*np.float64(by_kernel), *np.moveaxis(np.float64(by_x), -1, 0), np.float64(by_recurrent)]  # by feature

    expected = gradients(lstm_stack, "float64")
    halves, tf32 = (worst(found, expected) for found in in_both(lambda: gradients(persistent_stack, "float32")))
    assert 0 < halves < 1.5 * tf32 < 1e-2


# -- pairs -------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def by_pairs(kept, monkeypatch, folder):
    """Callable: (function that runs a stack of float32) → what it returns with pairs of float16, and with three products of
    TensorFloat-32."""
    monkeypatch.setattr(products, "dot", dot_of_float16)

    def run(function):
        found, codes, launch = [], set(), persistent._launch
        monkeypatch.setattr(
            persistent, "_launch", lambda work, *rest: codes.add(work.dtype_code) or launch(work, *rest)
        )
        monkeypatch.setattr(tiling, "HALVES_CALL_US", ALWAYS)
        for allowed in (True, False):
            monkeypatch.setattr(ALLOWED, allowed)
            with emulated(monkeypatch, folder, tf32=False):
                found.append(function())
            assert codes == {PAIRS if allowed else DTYPE_CODES["float32"]}
            codes.clear()
        return found

    return run


@needs_compiler
@pytest.mark.parametrize("lengths", [None, True])
@pytest.mark.parametrize("name", SHAPES)
def test_pairs_err_as_three_products_of_tf32_do(by_pairs, name, lengths):
    *shape, together = SHAPES[name]
    expected = results(lstm_stack, "float64", *shape, lengths=lengths)
    found = by_pairs(lambda: results(persistent_stack, "float32", *shape, together=together, lengths=lengths))
    pairs, three = (worst(each, expected) for each in found)

    assert 0 < pairs < 1.5 * three + 2e-7 < 4e-6


@needs_compiler
def test_pairs_of_two_directions_err_as_three_products_of_tf32_do(by_pairs):
    shape, options = (2, 3, 50, 10, 5), {"directions": 2, "lengths": True}
    expected = results(bidirectional_stack, "float64", *shape, **options)
    found = by_pairs(lambda: results(persistent_bidirectional_stack, "float32", *shape, **options))
    pairs, three = (worst(each, expected) for each in found)
    assert 0 < pairs < 1.5 * three + 2e-7 < 4e-6


@needs_compiler
@pytest.mark.parametrize(
    "sizes",
    [{"upstream": 1e-20}, {"upstream": 1e15}, {"weights": 1e-4, "h_0": 1e4}],
    ids=str,
)
def test_errors_of_pairs_are_those_of_three_products_whatever_the_numbers_sizes_are(by_pairs, sizes):
    expected = stack_of(lstm_stack, "float64", **sizes)
    pairs, three = (
        worst(found, expected) for found in by_pairs(lambda: stack_of(persistent_stack, "float32", **sizes))
    )

    assert pairs < 1.5 * three + 1e-6 < 1e-5


@needs_compiler
def test_pairs_of_gradients_that_vanish_on_their_way_back_are_as_precise_at_every_step(by_pairs):
    sizes = dict(layers=1, time=90, weights=0.05, upstream=1e-10, last=True)
    expected = stack_of(lstm_stack, "float64", **sizes)[3]
    for found in by_pairs(lambda: stack_of(persistent_stack, "float32", **sizes)):
        worst_of_all = max(worst([step], [exact]) for step, exact in zip(found[3], expected, strict=True))

        assert worst_of_all < 1e-5


@needs_compiler
@pytest.mark.parametrize("apart", [1e4, 1e6])
def test_pairs_of_a_sequence_are_as_precise_beside_one_whose_gradients_are_larger(by_pairs, apart):
    def of_others(stack, dtype):
        return [array[:, 1:] for array in stack_of(stack, dtype, apart=apart)[3:6]]  # by x, h and c

    expected = of_others(lstm_stack, "float64")
    pairs, three = (worst(found, expected) for found in by_pairs(lambda: of_others(persistent_stack, "float32")))
    assert 0 < pairs < 1.5 * three + 2e-7 < 4e-6


@needs_compiler
@pytest.mark.parametrize("poison", [np.inf, np.nan])
def test_what_is_not_finite_stays_in_its_sequence_with_pairs(by_pairs, poison):
    for found in by_pairs(lambda: stack_of(persistent_stack, "float32", poison=poison)):
        assert np.isfinite(found[3]).all((0, 2)).tolist() == [k != 2 for k in range(10)]


# -- where they are taken ----------------------------------------------------------------------------------------------------


def works():
    for layers, units, batch, time in PUBLISHED:
        for lanes, backward, keep, lengths in itertools.product((1, layers), *[(False, True)] * 3):
            yield Work(lanes, batch, padded_units(units, 2), DTYPE_CODES["tf32"], backward, keep, lengths), time


def test_they_are_of_float32_alone_and_of_none_where_they_are_not_allowed(monkeypatch):
    large = Work(1, 20, 1504, DTYPE_CODES["tf32"], False)
    replaced = {DTYPE_CODES["tf32"]: HALVES, DTYPE_CODES["float32"]: PAIRS}
    for code in (*DTYPE_CODES.values(), HALVES, PAIRS):
        assert by_factors(large._replace(dtype_code=code), 35, H200).dtype_code == replaced.get(code, code)
    assert by_factors(large, tiling.HALVES_STEPS + 1, H200) is large
    assert by_factors(large._replace(units=1520), 35, H200).dtype_code == DTYPE_CODES["tf32"]
    monkeypatch.setattr(ALLOWED, False)
    assert all(by_factors(work, time, H200) is work for work, time in works())


@pytest.mark.parametrize(
    ("layers", "units", "batch", "time", "padded", "lanes", "codes"),
    [
        (3, 256, 128, 50, 256, 3, [HALVES, HALVES]),
        (2, 1500, 20, 35, 1504, 1, [HALVES, HALVES]),
        (2, 650, 20, 35, 672, 2, [HALVES, HALVES]),
        (2, 650, 20, 1, 656, 1, [0, 0]),  # a launch would not pay for finding how large its numbers are
        (1, 650, 8, tiling.HALVES_STEPS + 1, 656, 1, [0, 0]),
        (2, 200, 20, 20, 208, 2, [0, 0]),
        (2, 128, 32, 28, 128, 2, [0, 0]),
    ],
)
def test_they_are_taken_where_a_launch_should_take_less_time(
    monkeypatch, layers, units, batch, time, padded, lanes, codes
):
    chip = H200._replace(clusters=((2, 66), (4, 30), (8, 15)))  # as one H200 said
    monkeypatch.setattr(nvrtc, "chip", lambda: chip)
    monkeypatch.setattr(tf.config.experimental, "tensor_float_32_execution_enabled", lambda: True)
    given = [LayerWeights(None, tf.TensorSpec([units, 4 * units]), None)] * layers
    work, together = persistent.planned(tf.TensorSpec([time, batch, units]), given, False, False, False)
    ways = [work._replace(lanes=together, backward=backward) for backward in (False, True)]
    assert (work.units, together) == (padded, lanes)
    assert [by_factors(way, time, chip).dtype_code for way in ways] == codes


@pytest.mark.parametrize(("value", "allowed"), [("0", False), ("Off", False), ("1", True), (None, True)])
def test_a_variable_of_the_environment_turns_them_off(monkeypatch, value, allowed):
    monkeypatch.delenv("WAVEFRONT_LSTM_BY_FLOAT16", raising=False)
    if value is not None:
        monkeypatch.setenv("WAVEFRONT_LSTM_BY_FLOAT16", value)
    module = runpy.run_path(str(Path(tiling.__file__).with_name("work.py")))
    assert module["halves_allowed"](DTYPE_CODES["tf32"]) == allowed


@pytest.mark.usefixtures("taken")
def test_recurrent_dropout_has_them_but_no_pairs():
    plain, dropping = (Work(1, 20, 1504, 0, False, recurrent_dropout=dropout) for dropout in (False, True))
    for tf32, of_plain, of_dropping in ((True, HALVES, HALVES), (False, PAIRS, DTYPE_CODES["float32"])):
        code = DTYPE_CODES["tf32" if tf32 else "float32"]
        found = [by_factors(work._replace(dtype_code=code), 35, H200).dtype_code for work in (plain, dropping)]
        assert found == [of_plain, of_dropping]


@pytest.mark.usefixtures("taken")
@pytest.mark.parametrize(
    ("units", "batch", "layers", "lengths", "multiprocessors"), [(384, 272, 3, False, 132), (640, 392, 1, True, 108)]
)
def test_what_fits_without_them_fits(monkeypatch, units, batch, layers, lengths, multiprocessors):
    chip = H200._replace(multiprocessors=multiprocessors)
    monkeypatch.setattr(nvrtc, "chip", lambda: chip)
    monkeypatch.setattr(tf.config.experimental, "tensor_float_32_execution_enabled", lambda: True)
    given = [LayerWeights(None, tf.TensorSpec([units, 4 * units]), None)] * layers
    work, together = persistent.planned(tf.TensorSpec([50, batch, units]), given, False, False, lengths)
    for backward in (False, True):
        each = by_factors(work._replace(lanes=together, backward=backward), 50, chip)
        assert tiling.fitting(each, chip) in [*tiling.tilings(each, chip)]


def test_a_trace_with_them_serves_no_other(monkeypatch):
    monkeypatch.setattr(nvrtc, "chip", lambda: H200)
    monkeypatch.setattr(nvrtc, "ptx", lambda source, defines, capability: repr(defines))
    monkeypatch.setattr(tf.config.experimental, "tensor_float_32_execution_enabled", lambda: True)
    monkeypatch.setattr(tiling, "HALVES_CALL_US", ALWAYS)
    for allowed, code in ((True, HALVES), (False, 0), (True, HALVES)):
        monkeypatch.setattr(ALLOWED, allowed)

        @tf.function
        def traced(x):
            layer = LayerWeights(tf.zeros([4, 256]), tf.zeros([64, 256]), tf.zeros([256]))
            return persistent_stack(x, [layer], tf.zeros([1, 5, 64]), tf.zeros([1, 5, 64]))

        graph = traced.get_concrete_function(tf.TensorSpec([7, 5, 4])).graph
        calls = [op for f in graph._functions.values() for op in f.graph.get_operations() if "CustomCall" in op.type]
        assert [f"'DTYPE_CODE', {code}" in call.get_attr("backend_config").decode() for call in calls] == [True]


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
        for halves in (work._replace(dtype_code=code) for code in (HALVES, PAIRS)):
            found = best_tiling(halves, chip)
            if found is None or (halves.dtype_code == PAIRS and halves.recurrent_dropout):
                continue
            code = persistent.ptx(halves, time, halves.units, found, chip)
            assert f".entry {persistent.kernel_name(halves, found)}" in code
            assert "f32.f16.f16.f32" in code and "tf32" not in code and f".target sm_{chip.capability}" in code
            compiled += 1
    assert compiled > 3


# -- the softmax and the products around it ----------------------------------------------------------------------------------


def losses_and_gradients(dtype, size_of_x, size_of_kernel, scale, targets, head, features=20):
    """Of 63 words of 130: losses, and gradients of scale · their sum by x, kernel and bias."""
    rng = np.random.default_rng(5)
    x = tf.constant(rng.normal(size=[63, features]) * size_of_x, dtype)
    kernel = tf.constant(rng.normal(size=[features, 130]) * size_of_kernel, dtype)
    kernel, bias = padded(kernel, tf.constant(rng.normal(size=130), dtype))
    with tf.GradientTape() as tape:
        tape.watch([x, kernel, bias])
        total, losses = head(x, kernel, bias, targets, scale)
    return [np.float64(y) for y in (losses, *tape.gradient(total, [x, kernel, bias], tf.constant(2.0, dtype)))]


def in_float64(x, kernel, bias, targets, scale):
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(targets, x @ kernel + bias)
    return scale * tf.reduce_sum(losses), losses


class ByFactors(NamedTuple):
    """softmax.scaled_loss_by_factors, its kernel on the emulator or without it, its products in NumPy.

    features, and how long a sum is in one piece: with 20 and 1280 logits of pairs are one product, with 100 a gradient is large.
    """

    by_kernel: bool
    code: int
    features: int = 20
    longest: int = 16

    def __call__(self, x, kernel, bias, targets, scale):
        return softmax.scaled_loss_by_factors(self.code, x, kernel, bias, targets, 130, scale)


HEADS = [ByFactors(*each) for each in itertools.product((True, False), (HALVES, PAIRS))]
HEADS += [ByFactors(False, PAIRS, features, 1280) for features in (20, 100)]


@pytest.fixture(params=HEADS, ids=str)
def head(request, monkeypatch, folder):
    monkeypatch.setattr(products, "dot", dot_of_float16)
    monkeypatch.setattr(products, "LONGEST", request.param.longest)
    if request.param.by_kernel:
        monkeypatch.setattr(softmax, "LARGE", 0)
        monkeypatch.setattr(softmax, "FEW_THREADS", 0)
    monkeypatch.setattr(softmax, "FACTORS_FLOPS", 0)
    with emulated(monkeypatch, folder, tf32=request.param.code == HALVES):
        yield request.param


@needs_compiler
@pytest.mark.parametrize(
    ("of_x", "of_kernel", "scale"), [(1.0, 0.3, 1 / 63), (1e-4, 3e3, 1e-12), (1e6, 3e-7, 1e12), (1e-6, 1e-6, 1.0)]
)
def test_softmax_and_its_products_err_as_what_they_replace(head, of_x, of_kernel, scale):
    targets = tf.constant(np.random.default_rng(6).integers(0, 130, 63), tf.int64)
    given = of_x, of_kernel, scale, targets
    expected = losses_and_gradients("float64", *given, in_float64, head.features)
    found = losses_and_gradients("float32", *given, head, head.features)
    least, most = {HALVES: (1e-5, 2e-3), PAIRS: (0, 3e-6)}[head.code]
    assert least < worst(found, expected) < most


@needs_compiler
def test_words_that_are_never_likely_have_gradients_of_float32(head):
    """Of about 1e-9 in every row, and of 1e-12: all that is in the gradients by these words' kernel."""
    targets = tf.constant(np.random.default_rng(6).integers(0, 100, 63), tf.int64)

    def unlikely(run):
        def with_bias(x, kernel, bias, *rest):
            far = tf.concat([tf.zeros([100]), tf.fill([15], -16.0), tf.fill([15], -23.0), tf.zeros([62])], 0)
            return run(x, kernel, bias + tf.cast(far, bias.dtype), *rest)

        return with_bias

    given = 1.0, 1.3 / head.features**0.5, 1.0, targets
    expected = losses_and_gradients("float64", *given, unlikely(in_float64), head.features)[2]
    found = losses_and_gradients("float32", *given, unlikely(head), head.features)[2]
    rare, rarest = slice(100, 115), slice(115, 130)  # of which float16 alone holds nothing
    for words, most in {HALVES: [(rare, 2e-2)], PAIRS: [(rare, 5e-6), (rarest, 1e-2)]}[head.code]:
        assert worst([found[:, words]], [expected[:, words]]) < most


@needs_compiler
def test_a_target_that_is_no_word_and_a_number_that_is_not_finite_stay_in_their_rows(head):
    targets = tf.constant([130, *range(62)], tf.int64)
    losses, d_x, d_kernel, d_bias = losses_and_gradients("float32", 1.0, 0.3, 1.0, targets, head, head.features)
    assert np.isnan(losses).tolist() == [True] + [False] * 62
    assert not d_x[0].any() and d_x[1:].any(1).all() and np.isfinite(d_kernel).all() and np.isfinite(d_bias).all()

    def with_infinity(x, *rest):
        return head(tf.tensor_scatter_nd_update(x, [[3, 7]], [np.inf]), *rest)

    targets = tf.constant(range(63), tf.int64)
    losses, d_x, *_ = losses_and_gradients("float32", 1.0, 0.3, 1.0, targets, with_infinity, head.features)
    assert np.isfinite(losses).tolist() == np.isfinite(d_x).all(1).tolist() == [k != 3 for k in range(63)]


@needs_compiler
@pytest.mark.usefixtures("taken")
def test_the_fused_head_trains_by_them(monkeypatch, head):
    rng, found, made = np.random.default_rng(7), [], softmax.scaled_loss_by_factors
    monkeypatch.setattr(softmax, "scaled_loss_by_factors", lambda *given: found.append(given[0]) or made(*given))
    x, targets = tf.constant(rng.normal(size=[3, 7, 20]), tf.float32), tf.constant(rng.integers(0, 130, [3, 7]))
    gradients, heads = [], [SoftmaxHead(130, fused=fused) for fused in (True, False)]
    for layer in heads:
        layer.build(x.shape)
        layer.kernel.assign(heads[0].kernel)
        with tf.GradientTape() as tape:
            tape.watch(x)
            layer(x, targets, training=True)
            (loss,) = layer.losses
        sources = x, layer.kernel.value, layer.bias.value
        gradients.append([np.float64(y) for y in (loss, *tape.gradient(loss, sources))])
    assert found == [head.code]
    assert worst(*gradients) < {HALVES: 2e-3, PAIRS: 3e-6}[head.code]


def test_the_head_takes_them_in_place_of_float32_where_they_pay(monkeypatch):
    monkeypatch.setattr(nvrtc, "chip", lambda: H200)
    monkeypatch.setattr(softmax, "FACTORS_FLOPS", 2 * 15 * 24 * 192)
    heads = [
        SoftmaxHead(130, fused=fused, dtype=dtype)
        for fused, dtype in ((True, "float32"), (True, "mixed_float16"), (False, None))
    ]
    for head in heads:
        head.build([None, 24])
    for tf32, allowed in itertools.product((True, False), repeat=2):
        monkeypatch.setattr(tf.config.experimental, "tensor_float_32_execution_enabled", lambda tf32=tf32: tf32)
        monkeypatch.setattr(ALLOWED, allowed)
        code = (HALVES if tf32 else PAIRS) if allowed else None
        assert softmax.factors(tf.float32) == code and softmax.factors(tf.float16) is None
        assert ["float16" in note for note in softmax.notes(tf.float32)] == [True] * allowed
        assert [head.takes_scaled_loss(15) for head in heads] == [allowed, False, False]
        assert not any(head.takes_scaled_loss(rows) for head in heads for rows in (14, None))
    monkeypatch.setattr(nvrtc, "chip", lambda: H200._replace(capability=75))
    assert softmax.factors(tf.float32) is None and not any(head.takes_scaled_loss(15) for head in heads)
