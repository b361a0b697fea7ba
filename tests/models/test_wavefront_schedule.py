"""The schedule of the wavefront: what it computes and its hand-written backward pass, compared with the float64 reference."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from models.reference.lstm import lstm_stack_backward, lstm_stack_forward
from models.wavefront.schedule import UNROLL, advance
from models.wavefront.stack import TURNS_FROM_BYTES, LayerWeights, bidirectional_stack, layers_together, lstm_stack
from models.weights import layouts
from tests import sizes
from tests.comparing import error
from tests.cudnn_layer_cases import random
from tests.wavefront_cases import along, numpy_stack, parameters

pytestmark = pytest.mark.usefixtures("on_the_cpu")

BATCH, FEATURES, UNITS = 3, 2, 4
FLOAT64 = 1e-12  # between two ways to compute the same; measured: up to 3e-15
# Largest error of outputs, states and gradients over 20 steps; measured: 3.1e-7, 1.7e-3, 9.3e-3, and with layer normalisation,
# which divides by small deviations, 6.0e-6, 3.5e-2, 0.47
ROUNDING = {"float32": 1e-6, "float16": 5e-3, "bfloat16": 3e-2}
LAYER_NORMALIZATION = 20  # times as much
STEPS = (1, 2, UNROLL - 1, UNROLL, UNROLL + 1, 2 * UNROLL, 40)  # around one body of the loop and two


class Case:
    """A stack's weights, inputs, states and the loss Σ outputs·a + h·b + c·d, in float64."""

    def __init__(
        self,
        num_layers,
        time,
        bidirectional=False,
        normalized=False,
        lengths=None,
        rate=0.0,
        units=UNITS,
        recurrent=False,
    ):
        self.spec = layouts.StackSpec("lstm", num_layers, units, FEATURES, bidirectional)
        self.weights = parameters(self.spec, normalized, seed=num_layers)
        self.normalized, self.lengths = normalized, lengths
        pseudo_layers, width = self.spec.num_pseudo_layers, units * len(self.spec.directions)
        self.arrays = {
            "x": random(BATCH, time, FEATURES, seed=1),
            "h": random(pseudo_layers, BATCH, units, seed=2),
            "c": random(pseudo_layers, BATCH, units, seed=3),
            **self.weights,
        }
        self.factors = [
            random(BATCH, time, width, seed=4),
            *(random(pseudo_layers, BATCH, units, seed=k) for k in (5, 6)),
        ]
        kept = np.random.default_rng(7).uniform(size=(num_layers - 1, BATCH, time, width)) >= rate
        keep = np.random.default_rng(8).uniform(size=(pseudo_layers, 4, BATCH, units)) < 0.7
        self.keep = keep if recurrent else None
        self.masks = kept / (1 - rate) if rate else None  # of layer k + 1

    def expected(self, arrays):
        weights = {name: arrays[name] for name in self.weights}
        return numpy_stack(arrays["x"], weights, arrays["h"], arrays["c"], self.lengths, self.masks, self.keep)

    def loss(self, arrays):
        return sum(np.sum(result * factor) for result, factor in zip(self.expected(arrays), self.factors, strict=True))

    def run(self, arrays, **kwargs):
        """The stack on tensors by name: outputs [batch, time, units·directions], h, c."""
        tensors = [arrays[name] for name in self.weights]
        size = 7 if self.normalized else 3
        parts = [tensors[k : k + size] for k in range(0, len(tensors), size)]
        layers = [LayerWeights(*part[:3], part[3:]) for part in parts]
        stack = lstm_stack
        if self.spec.bidirectional:
            layers, stack = list(zip(layers[::2], layers[1::2], strict=True)), bidirectional_stack
        inputs = tf.transpose(arrays["x"], [1, 0, 2])
        lengths = None if self.lengths is None else tf.constant(self.lengths, tf.int32)
        outputs, h, c = stack(inputs, layers, arrays["h"], arrays["c"], lengths=lengths, keep=self.keep, **kwargs)
        return tf.transpose(outputs, [1, 0, 2]), h, c

    def gradients(self, arrays, **kwargs):
        """(results, gradients by name) of the stack on tensors."""
        with tf.GradientTape() as tape:
            tape.watch(arrays)
            results = self.run(arrays, **kwargs)
            loss = tf.add_n([tf.reduce_sum(r * f) for r, f in zip(results, self.factors, strict=True)])
        return results, tape.gradient(loss, arrays)

    def fixed_masks(self, together):
        """The case's masks in the place of `dropout`, which draws for a group of layers step by step of the wavefront."""
        above = iter(range(len(self.masks)))
        masks = np.transpose(self.masks, [0, 2, 1, 3])  # [layer, time, batch, width]

        def dropout(x):
            if x.shape.rank == 3:  # from one group of layers to the next
                return x * masks[next(above)]
            steps, links, *_ = x.shape
            drawn = np.full(x.shape, np.nan)  # where no layer reads
            for link in range(links):
                mask = masks[next(above)]
                drawn[link + 1 : link + 1 + len(mask), link] = mask
            assert steps == drawn.shape[0] == masks.shape[1] + links
            return x * tf.constant(np.nan_to_num(drawn, nan=3.0))

        return dropout

    def check(self, results, gradients, limit=FLOAT64):
        """Values element by element, gradients along one random direction of each tensor."""
        for result, expected in zip(results, self.expected(self.arrays), strict=True):
            assert error(result, expected) < limit
        directions = {name: random(*array.shape, seed=9) for name, array in self.arrays.items()}
        derivatives = along(self.loss, self.arrays, directions)
        for name, direction in directions.items():
            gradient = np.asarray(gradients[name])
            given, scale = np.sum(gradient * direction), np.abs(gradient * direction).sum()
            assert abs(given - derivatives[name]) < limit * scale, name

    def tensors(self):
        return {name: tf.constant(array) for name, array in self.arrays.items()}


def from_reference(case):
    """Results and gradients of Σ outputs·a from models/reference/lstm.py, by name."""
    pseudo, per = case.spec.num_pseudo_layers, len(case.spec.directions)
    h, c = case.arrays["h"], case.arrays["c"]
    states = [[(h[k + d], c[k + d]) for d in range(per)] for k in range(0, pseudo, per)]
    outputs, finals, cache = lstm_stack_forward(
        case.arrays["x"], case.weights, states, case.spec.num_layers, case.spec.bidirectional
    )
    d_x, d_weights, d_states = lstm_stack_backward(case.factors[0], cache)
    flat = lambda states, part: np.stack([pair[part] for of_layer in states for pair in of_layer])  # noqa: E731
    results = outputs, flat(finals, 0), flat(finals, 1)
    return results, {"x": d_x, "h": flat(d_states, 0), "c": flat(d_states, 1), **d_weights}


def of_outputs(case, arrays, **kwargs):
    with tf.GradientTape() as tape:
        tape.watch(arrays)
        results = case.run(arrays, **kwargs)
        loss = tf.reduce_sum(results[0] * case.factors[0][:, : results[0].shape[1]])
    return results, tape.gradient(loss, arrays)


def assert_same(given, expected, limit=FLOAT64):
    (results, gradients), (expected_results, expected_gradients) = given, expected
    for result, wanted in zip(results, expected_results, strict=True):
        assert result.shape == wanted.shape and error(result, wanted) < limit
    assert set(gradients) == set(expected_gradients)
    for name, wanted in expected_gradients.items():
        assert error(gradients[name], wanted) < limit, name


def schedules(num_layers):
    return sorted({1, num_layers})


@pytest.mark.parametrize("num_layers", [*(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 3)), 4])
def test_outputs_states_and_all_gradients_match_the_reference_at_every_number_of_steps(num_layers):
    """In a graph that knows no sizes: its loop's bodies are all of UNROLL steps, the last one idle after the end; or of one."""
    case = Case(num_layers, 40)
    for options in [dict(together=1, unroll=1), *(dict(together=k) for k in schedules(num_layers))]:

        @functools.partial(tf.function, autograph=False)
        def run(x, factor, options=options):
            arrays = {**case.tensors(), "x": x}
            with tf.GradientTape() as tape:
                tape.watch(arrays)
                results = case.run(arrays, **options)
                loss = tf.reduce_sum(results[0] * factor)
            return results, tape.gradient(loss, arrays)

        unknown = [tf.TensorSpec([None, None, size], tf.float64) for size in (FEATURES, UNITS)]
        run = run.get_concrete_function(*unknown)
        whole = case.arrays["x"], case.factors[0]
        for time in range(1, 41) if sizes.ALL else STEPS:
            part = Case(num_layers, 40)
            part.arrays["x"], part.factors[0] = (array[:, :time] for array in whole)
            given = run(*(tf.constant(array[:, :time]) for array in whole))
            assert_same(given, from_reference(part))


@pytest.mark.parametrize("time", STEPS)
@pytest.mark.parametrize("num_layers", [1, 2, pytest.param(3, marks=pytest.mark.slow), 4])
def test_known_sizes_are_cut_into_bodies_without_a_rest(num_layers, time):
    case = Case(num_layers, time)
    expected = from_reference(case)
    for together in schedules(num_layers):
        assert_same(of_outputs(case, case.tensors(), together=together), expected)


@pytest.mark.parametrize("unroll", [1, 3, 100])
def test_the_size_of_a_body_changes_nothing(unroll):
    case = Case(3, 7)
    assert_same(of_outputs(case, case.tensors(), together=3, unroll=unroll), from_reference(case))


@pytest.mark.parametrize(
    ("lengths", "bidirectional", "normalized"), sizes.half((None, (5, 2, 0)), (False, True), (False, True))
)
def test_gradients_by_outputs_and_final_states_match_derivatives_of_a_plain_stack(lengths, bidirectional, normalized):
    case = Case(3, 5, bidirectional, normalized, lengths)
    options = [{}] if bidirectional else [dict(together=k) for k in schedules(3)]
    for kwargs in [dict(unroll=2, **option) for option in options]:
        case.check(*case.gradients(case.tensors(), **kwargs))


@pytest.mark.parametrize(("together", "lengths", "normalized"), sizes.half((1, 2, 3), (None, (5, 2, 4)), (False, True)))
def test_gradients_through_fixed_dropout_masks_match_derivatives_of_a_plain_stack(together, lengths, normalized):
    case = Case(3, 5, normalized=normalized, lengths=lengths, rate=0.4)
    given = case.gradients(case.tensors(), together=together, dropout=case.fixed_masks(together), unroll=3)
    case.check(*given)


def test_gradients_through_fixed_dropout_masks_of_a_bidirectional_stack():
    case = Case(3, 5, bidirectional=True, lengths=(5, 2, 4), rate=0.4)
    case.check(*case.gradients(case.tensors(), dropout=case.fixed_masks(1), unroll=3))


@pytest.mark.parametrize(
    ("together", "rate", "normalized"), sizes.half((1, 2, 3, "bidirectional"), (0.0, 0.4), (False, True))
)
def test_gradients_through_fixed_recurrent_masks_match_derivatives_of_a_plain_stack(together, rate, normalized):
    both = together == "bidirectional"
    case = Case(3, 5, both, normalized, lengths=(5, 2, 4), rate=rate, recurrent=True)
    options = {} if both else {"together": together}
    if rate:
        options["dropout"] = case.fixed_masks(1 if both else together)
    case.check(*case.gradients(case.tensors(), unroll=3, **options))


@pytest.mark.parametrize("bidirectional", [False, True])
def test_the_plain_stack_is_the_reference(bidirectional):
    case = Case(3, 4, bidirectional)
    results, gradients = from_reference(case)
    for given, expected in zip(case.expected(case.arrays), results, strict=True):
        assert error(given, expected) < 1e-14
    case.factors[1:] = [np.zeros_like(factor) for factor in case.factors[1:]]
    directions = {name: random(*array.shape, seed=9) for name, array in case.arrays.items()}
    for name, derivative in along(case.loss, case.arrays, directions).items():
        assert abs(np.sum(gradients[name] * directions[name]) - derivative) < 1e-13 * np.abs(gradients[name]).sum(), (
            name
        )


@pytest.mark.parametrize("unroll", [1, 3])
@pytest.mark.parametrize(
    "kwargs",
    [
        dict(),
        dict(lengths=(7, 3, 5), rate=0.4),
        dict(normalized=True),
        dict(bidirectional=True, lengths=(7, 3, 5)),
        dict(recurrent=True),
    ],
    ids=["plain", "dropout and lengths", "normalised", "bidirectional with lengths", "recurrent dropout"],
)
def test_xla_computes_the_same(kwargs, unroll):
    case = Case(2, 7, **kwargs)
    together = 2 if unroll > 1 else 1
    options = dict(unroll=unroll, **(dict(dropout=case.fixed_masks(together)) if "rate" in kwargs else {}))
    if "bidirectional" not in kwargs:
        options["together"] = together
    compiled = tf.function(functools.partial(case.gradients, **options), autograph=False, jit_compile=True)
    case.check(*compiled(case.tensors()))


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("normalized", [False, True])
def test_less_precision_gives_the_same_within_its_rounding(dtype, normalized):
    case = Case(3, 20, normalized=normalized, units=16)
    expected, exact = case.gradients(case.tensors())
    arrays = {name: tf.cast(array, "float32" if name == "c" else dtype) for name, array in case.arrays.items()}
    with tf.GradientTape() as tape:
        tape.watch(arrays)
        results = case.run(arrays, together=3)
        loss = tf.add_n([tf.reduce_sum(tf.cast(r, "float64") * f) for r, f in zip(results, case.factors, strict=True)])
    gradients = tape.gradient(loss, arrays)
    assert [result.dtype.name for result in results] == [dtype, dtype, "float32"]
    errors = {k: error(tf.cast(r, "float64"), e) for k, (r, e) in enumerate(zip(results, expected, strict=True))}
    errors |= {name: error(tf.cast(gradients[name], "float64"), wanted) for name, wanted in exact.items()}
    assert np.max(list(errors.values())) < (LAYER_NORMALIZATION if normalized else 1) * ROUNDING[dtype], errors
    assert all(gradients[name].dtype == arrays[name].dtype for name in arrays)


def test_layers_take_turns_where_a_step_waits_for_its_weights():
    units = int((TURNS_FROM_BYTES / 16) ** 0.5)  # float32
    assert [layers_together(3, u, 4) for u in (1, units - 1, units, 2 * units)] == [3, 3, 1, 1]
    assert layers_together(3, units, 2) == 3 and layers_together(3, units, 8) == 1


# --- what 16 bits must not lose -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "forget"), sizes.half(("float16", "bfloat16"), (0.9975, 0.9985, 0.9998)))
def test_a_gradient_survives_400_steps_of_a_forget_gate_near_one(dtype, forget):
    """d c_T / d c_0 is f^T; f itself, rounded to 16 bits, is another number, and 1 for the larger ones."""
    steps, bias = 400, np.log(forget / (1 - forget))
    gates = np.full((1, steps, 1, 4), [-99.0, bias, 0.0, 0.0])
    c = tf.zeros([1, 1, 1], tf.float32)
    zeros = [tf.zeros(shape, dtype) for shape in ([1, 1, 4], [1, 4], [1, 1, 1])]
    with tf.GradientTape() as tape:
        tape.watch(c)
        final = advance(tf.constant(gates, dtype), zeros[0], None, zeros[1], zeros[2], c)[2]
    rounded = 1 / (1 + np.exp(-float(tf.cast(tf.constant(bias, dtype), tf.float64))))
    assert tape.gradient(final, c).numpy().item() == pytest.approx(rounded**steps, rel=0.02)


@pytest.mark.parametrize("unroll", [1, 3])
def test_second_derivatives_match_central_differences(unroll):
    rng = np.random.default_rng(3)
    projected, recurrent, links, bias = (
        tf.constant(rng.normal(size=shape)) for shape in ((1, 5, 2, 12), (2, 3, 12), (1, 3, 12), (2, 12))
    )
    states = tf.zeros([2, 2, 3], tf.float64)

    def penalty(kernels):
        with tf.GradientTape() as tape:
            tape.watch(kernels)
            outputs = advance(projected, kernels, links, bias, states, states, unroll=unroll)[0]
            loss = tf.reduce_sum(outputs**2)
        return tf.reduce_sum(tape.gradient(loss, kernels) ** 2)

    @tf.function(autograph=False)
    def gradient_of_penalty(recurrent):
        with tf.GradientTape() as tape:
            tape.watch(recurrent)
            value = penalty(recurrent)
        return tape.gradient(value, recurrent)

    gradient = gradient_of_penalty(recurrent).numpy()
    direction = tf.constant(rng.normal(size=recurrent.shape))
    change = (penalty(recurrent + 1e-5 * direction) - penalty(recurrent - 1e-5 * direction)) / 2e-5
    assert np.sum(gradient * direction.numpy()) == pytest.approx(float(change), rel=1e-6)
