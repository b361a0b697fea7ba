"""WavefrontLSTM over shapes, lengths and types that hypothesis draws, against a stack in plain NumPy."""

from typing import NamedTuple

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import example, given, settings
from hypothesis import strategies as st

from models.wavefront.layer import WavefrontLSTM
from tests import sizes
from tests.cudnn_layer_cases import DIRECTIONS, random
from tests.wavefront_cases import along, numpy_stack, parameters

pytestmark = pytest.mark.usefixtures("on_the_cpu")

LIMITS = {"float64": 1e-13, "float32": 1e-6, "mixed_float16": 5e-3, "mixed_bfloat16": 4e-2}  # of numbers up to about 1


class Case(NamedTuple):
    units: int
    num_layers: int
    direction: str
    normalized: bool
    features: int
    batch: int
    time: int
    lengths: list[int] | None
    dtype: str
    seed: int

    def layer(self) -> WavefrontLSTM:
        made = WavefrontLSTM(
            self.units, self.num_layers, direction=self.direction, layer_normalization=self.normalized, dtype=self.dtype,
            return_sequences=True, return_state=True,
        )  # fmt: skip
        made.build((None, None, self.features))
        made.set_canonical(parameters(made.spec, self.normalized, self.seed))
        return made

    def arrays(self, made) -> dict[str, np.ndarray]:
        shape = made.spec.num_pseudo_layers, self.batch, self.units
        return {
            "x": random(self.batch, self.time, self.features, seed=self.seed + 1),
            "h": random(*shape, seed=self.seed + 2),
            "c": random(*shape, seed=self.seed + 3),
            **parameters(made.spec, self.normalized, self.seed),
        }

    def run(self, made, x, h, c):
        mask = None if self.lengths is None else np.arange(x.shape[1]) < np.array(self.lengths)[:, np.newaxis]
        return made(x, initial_state=[h, c], mask=mask)

    def expected(self, arrays):
        weights = {name: array for name, array in arrays.items() if "/" in name}
        return numpy_stack(arrays["x"], weights, arrays["h"], arrays["c"], self.lengths)

    def rounding(self, arrays) -> float:
        """How far the plain stack's own results move where all that enters is off by one rounding: layer normalisation of
        few units that are nearly equal magnifies it without a bound."""
        signs = np.random.default_rng(self.seed)
        off = {name: array * (1 + 2.0**-52 * signs.choice([-1, 1], array.shape)) for name, array in arrays.items()}
        pairs = zip(self.expected(off), self.expected(arrays), strict=True)
        return max(np.abs(moved - expected).max() for moved, expected in pairs)


@st.composite
def cases(draw, dtypes=("float64",)):
    batch, time = draw(st.integers(1, 4)), draw(st.integers(1, 30))
    normalized = draw(st.booleans())
    return Case(
        units=draw(st.integers(1, 5)),
        num_layers=draw(st.integers(1, 4)),
        direction=draw(st.sampled_from(DIRECTIONS)),
        normalized=normalized,
        features=draw(st.integers(1, 4)),
        batch=batch,
        time=time,
        lengths=draw(st.none() | st.lists(st.integers(0, time), min_size=batch, max_size=batch)),
        # Layer normalisation of so few units blows rounding up without a bound.
        dtype="float64" if normalized else draw(st.sampled_from(dtypes)),
        seed=draw(st.integers(0, 99)),
    )


@settings(derandomize=True, deadline=None, max_examples=sizes.cases(12, 60))
@given(cases(tuple(LIMITS)))
@example(Case(3, 2, "unidirectional", True, 3, 1, 11, None, "float64", 27))  # 1.8e-12 off, where 1e-13 is usual
def test_outputs_and_states_are_those_of_a_plain_stack(case):
    made = case.layer()
    arrays = case.arrays(made)
    results = case.run(made, *(arrays[name] for name in "xhc"))
    limit = LIMITS[case.dtype] + (10 * case.rounding(arrays) if case.normalized else 0)
    # Outputs and h in the compute dtype; c in float32 at least.
    dtypes = [made.compute_dtype] * 2 + [
        "float32" if made.compute_dtype in ("float16", "bfloat16") else made.compute_dtype
    ]
    for result, dtype, expected in zip(results, dtypes, case.expected(arrays), strict=True):
        assert result.dtype == dtype and result.shape == expected.shape
        assert np.abs(tf.cast(result, "float64") - expected).max() < limit


@settings(derandomize=True, deadline=None, max_examples=sizes.cases(6, 30))
@given(cases())
def test_gradients_are_derivatives_of_a_plain_stack(case):
    made = case.layer()
    arrays = case.arrays(made)
    tensors = [tf.constant(arrays[name]) for name in "xhc"]
    with tf.GradientTape() as tape:
        tape.watch(tensors)
        results = case.run(made, *tensors)
        factors = [random(*result.shape, seed=seed) for seed, result in enumerate(results, start=5)]
        loss = tf.add_n([tf.reduce_sum(r * f) for r, f in zip(results, factors, strict=True)])
    gradients = tape.gradient(loss, [*tensors, *(v.value for v in made.trainable_variables)])

    def plain(arrays):
        return sum(np.sum(result * factor) for result, factor in zip(case.expected(arrays), factors, strict=True))

    directions = {name: random(*array.shape, seed=9) for name, array in arrays.items()}
    derivatives = along(plain, arrays, directions)
    for gradient, (name, direction) in zip(gradients, directions.items(), strict=True):
        terms = np.asarray(gradient) * direction
        assert abs(terms.sum() - derivatives[name]) <= 1e-11 * np.abs(terms).sum() + 1e-13, name


@settings(derandomize=True, deadline=None, max_examples=sizes.cases(5, 20))
@given(cases(), st.integers(1, 5))
def test_what_stands_after_a_sequence_changes_nothing(case, padding):
    case = case._replace(lengths=case.lengths or [case.time] * case.batch)
    made = case.layer()
    x, h, c = (case.arrays(made)[name] for name in "xhc")
    padded = np.concatenate([x, np.full((case.batch, padding, case.features), np.inf)], axis=1)
    (outputs, *finals), (expected, *wanted) = case.run(made, padded, h, c), case.run(made, x, h, c)
    assert not np.any(outputs[:, case.time :])
    for result, without in zip((outputs[:, : case.time], *finals), (expected, *wanted), strict=True):
        assert np.abs(result - without).max() < 1e-12
