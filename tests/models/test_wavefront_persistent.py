"""The persistent kernels, on an emulator of CUDA's threads, against the schedule in TensorFlow, which is tested by itself."""

import functools
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import ClassVar

import keras
import numpy as np
import pytest
import tensorflow as tf

from models.wavefront import clusters, nvrtc, persistent, tune
from models.wavefront import tiling as wavefront_tiling
from models.wavefront.clusters import ClusterTiling
from models.wavefront.layer import WavefrontLSTM
from models.wavefront.nvrtc import Chip
from models.wavefront.persistent import persistent_bidirectional_stack, persistent_stack
from models.wavefront.stack import LayerWeights, bidirectional_stack, lstm_stack
from models.wavefront.tiling import COST_US, best_tiling, layers_together
from models.wavefront.work import DTYPE_CODES, WARPS, Work, padded_units
from tests import sizes
from tests.models.emulated_kernels import ARRIVALS, CHIP, H200, build, emulated

LIMIT = {"tf32": 4e-3, "float16": 8e-3, "bfloat16": 6e-2, "float32": 4e-6}  # over a few steps
PUBLISHED = [  # layers, units, batch, steps
    (3, 256, 128, 50), (2, 200, 20, 20), (2, 650, 20, 35), (2, 1500, 20, 35), (2, 128, 32, 28),
]  # fmt: skip

CHIPS = (
    H200, Chip(108, 166912, 80, "A100"), Chip(82, 101376, 86, "RTX 3090"), Chip(142, 101376, 89, "L40S"),
)  # fmt: skip

SMALL = dict(  # a tiling of one block of 16 units and 8 sequences
    unit_tile=16, batch_tile=8, split=1, column_warps=1, in_registers=1, in_shared=0, prefetch_depth=1, chunk=1
)
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")


@pytest.fixture(autouse=True)
def without_float16(monkeypatch):
    """It rounds ties to the even number, TensorFloat-32 away from 0: not the very same. test_wavefront_halves.py has it."""
    monkeypatch.setattr("models.wavefront.work.HALVES_ALLOWED", False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("kernels")


def results(stack, dtype, layers, features, units, batch, time, rounded=False, directions=1, **options):
    """Outputs, states and every gradient of a random stack, as float64 arrays.

    rounded: the weights that the kernels read are tf32 numbers. directions: 2 of a bidirectional stack. options: of the stack;
    keep=True: masks of recurrent dropout; lengths=True: all there are, one after the other, from none to `time`, or as given.
    """
    rng = np.random.default_rng(1)
    if options.get("keep"):
        options["keep"] = tf.constant(
            np.random.default_rng(2).uniform(size=(layers * directions, 4, batch, units)) < 0.6
        )
    if options.get("lengths") is not None:
        given = np.arange(batch) % (time + 1) if options["lengths"] is True else options["lengths"]
        options["lengths"] = tf.constant(given, tf.int32)

    def some(*shape, scale=1.0, dtype=dtype):
        return tf.cast(rng.normal(size=shape) * scale, dtype)

    x, h = some(time, batch, features), some(layers * directions, batch, units, scale=0.5)
    c = some(layers * directions, batch, units, dtype="float32" if tf.as_dtype(dtype).size == 2 else dtype)
    weights = [
        (
            some(units * directions if k >= directions else features, 4 * units, scale=0.3),
            some(units, 4 * units, scale=0.3),
            some(4 * units),
        )
        for k in range(layers * directions)
    ]
    if rounded:
        tf32 = functools.partial(persistent._rounded, DTYPE_CODES["tf32"])
        weights = [
            (tf32(kernel) if k else kernel, tf32(recurrent), bias)
            for k, (kernel, recurrent, bias) in enumerate(weights)
        ]
    sources = [x, h, c, *(array for layer in weights for array in layer)]
    with tf.GradientTape() as tape:
        tape.watch(sources)
        given = [LayerWeights(*layer) for layer in weights]
        given = given if directions == 1 else list(zip(given[::2], given[1::2], strict=True))
        found = stack(x, given, h, c, **options)
    upstream = [some(*y.shape, dtype=y.dtype) for y in found]
    gradients = tape.gradient(found, sources, output_gradients=upstream)
    return [np.asarray(tf.cast(y, "float64")) for y in (*found, *gradients)]


def worst(found, expected) -> float:
    """The largest error, relative to each array's largest number; NaN where there is one."""
    errors = [np.abs(a - b).max() / max(np.abs(b).max(), 1e-30) for a, b in zip(found, expected, strict=True)]
    return float(np.max(errors))


SHAPES = {  # layers, features, units, batch, steps, layers together
    "one layer, a batch that is no whole tile": (1, 5, 16, 3, 4, None),
    "three layers along the diagonal, three tiles of sequences": (3, 7, 32, 18, 3, 3),
    "one step, padded units": (2, 24, 24, 9, 1, 2),
    "layers in turn, padded units": (2, 3, 50, 2, 5, 1),
}


def some_by_default(names, precisions, keeps, rarer=1):
    """Every combination; by default each shape, or one in so many, with two precisions, with and without masks in turn."""
    return [
        pytest.param(
            name, precision, keep, marks=[pytest.mark.slow] * (i % rarer or (i + j) % 2 or (i // 2 + j // 2 + k) % 2)
        )
        for i, name in enumerate(names)
        for j, precision in enumerate(precisions)
        for k, keep in enumerate(keeps)
    ]


@needs_compiler
@pytest.mark.parametrize(("name", "precision", "keep"), some_by_default(SHAPES, LIMIT, (None, True)))
def test_outputs_states_and_every_gradient_are_those_of_the_schedule(monkeypatch, folder, name, precision, keep):
    *shape, together = SHAPES[name]
    expected = results(lstm_stack, "float64", *shape, keep=keep)
    with emulated(monkeypatch, folder, tf32=precision == "tf32"):
        found = results(
            persistent_stack, "float32" if precision == "tf32" else precision, *shape, together=together, keep=keep
        )
    assert worst(found, expected) < LIMIT[precision]


@needs_compiler
@pytest.mark.parametrize(("name", "precision", "keep"), some_by_default(SHAPES, LIMIT, (None, True), rarer=2))
def test_sequences_end_at_their_own_lengths(monkeypatch, folder, name, precision, keep):
    *shape, together = SHAPES[name]
    options = dict(keep=keep, lengths=True)
    expected = results(lstm_stack, "float64", *shape, **options)
    with emulated(monkeypatch, folder, tf32=precision == "tf32"):
        dtype = "float32" if precision == "tf32" else precision
        found = results(persistent_stack, dtype, *shape, together=together, **options)
    assert worst(found, expected) < LIMIT[precision]
    time, batch = shape[4], shape[3]
    past = np.arange(time)[:, np.newaxis] >= np.arange(batch) % (time + 1)
    assert (
        past.any() and not found[0][past].any() and not found[3][past].any()
    )  # outputs, and the gradient by the inputs


@needs_compiler
@pytest.mark.parametrize(("layers", "together"), [(1, None), (3, 3), pytest.param(2, 1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("longest", [(0, 2, 5), (3, 0, 0), (0, 0, 0), (7, 4, 1)])
def test_a_group_of_sequences_ends_with_its_longest_one(monkeypatch, folder, layers, together, longest):
    """Groups of 8 sequences that end at different steps, some before the first; what would be read past them is NaN here.

    A block passes a barrier a step forward, with the first states; backward one a step with the states' gradients.
    """
    lengths = np.concatenate([np.minimum(np.arange(8), most) for most in longest])
    shape, choose, groups = (layers, 5, 16, 24, 7), wavefront_tiling.best_tiling, []

    def of_small_tiles(work, chip):
        tiling = choose(work, chip._replace(clusters=()))._replace(
            batch_tile=8, unit_tile=16, split=1, column_warps=1, chunk=1
        )
        groups.append(tiling.groups(work))
        return tiling

    expected = results(lstm_stack, "float64", *shape, lengths=lengths)
    ARRIVALS.clear()
    with emulated(monkeypatch, folder, CHIP._replace(multiprocessors=16)):
        monkeypatch.setattr(wavefront_tiling, "best_tiling", of_small_tiles)
        found = results(persistent_stack, "float32", *shape, together=together, lengths=lengths)
    assert set(groups) == {3}
    lanes = together or 1
    of_launch = (
        lanes * sum(max(1, most + lanes - 1) for most in longest),
        lanes * sum(most + lanes - 1 for most in longest),
    )
    assert sorted(ARRIVALS) == sorted(of_launch * (layers // lanes))
    assert worst(found, expected) < LIMIT["tf32"]


@needs_compiler
@pytest.mark.parametrize(
    ("layers", "directions", "split", "keep"),
    [(1, 1, 2, None), (1, 2, 2, True)]
    + [pytest.param(*case, marks=pytest.mark.slow) for case in ((3, 1, 2, None), (1, 2, 1, None))],
)
def test_groups_end_with_their_longest_sequences_in_clusters_and_two_directions_too(
    monkeypatch, folder, layers, directions, split, keep
):
    lengths = np.concatenate([np.minimum(np.arange(8)[::-1], most) for most in (3, 0, 5)])
    shape, choose = (layers, 5, 32, 24, 7), wavefront_tiling.best_tiling
    small = SMALL | dict(unit_tile=16 // split, split=split)
    options = dict(lengths=lengths, keep=keep)
    xla, ours, together = (lstm_stack, persistent_stack, dict(together=layers))
    if directions == 2:
        xla, ours, together = bidirectional_stack, persistent_bidirectional_stack, {}
    expected = results(xla, "float64", *shape, directions=directions, **options)
    with emulated(monkeypatch, folder, CHIP._replace(multiprocessors=64)):
        monkeypatch.setattr(
            wavefront_tiling,
            "best_tiling",
            lambda work, chip: choose(work, chip._replace(clusters=()))._replace(**small),
        )
        found = results(ours, "float32", *shape, directions=directions, **together, **options)
    assert worst(found, expected) < 2 * LIMIT["tf32"]


@needs_compiler
@pytest.mark.parametrize(("lengths", "keep"), [(None, None), (True, True)])
@pytest.mark.parametrize(
    ("shape", "precision"),
    [
        ((1, 5, 16, 3, 4), "tf32"),
        pytest.param((2, 7, 32, 18, 3), "float32", marks=pytest.mark.slow),
        ((2, 3, 50, 10, 5), "float16"),
    ],
)
def test_two_directions_are_those_of_the_schedule(monkeypatch, folder, shape, precision, lengths, keep):
    """A tile of sequences and several, padded units, dropout between layers."""
    options = dict(lengths=lengths, keep=keep, dropout=lambda x: 2 * x)
    expected = results(bidirectional_stack, "float64", *shape, directions=2, **options)
    with emulated(monkeypatch, folder, tf32=precision == "tf32"):
        dtype = "float32" if precision == "tf32" else precision
        found = results(persistent_bidirectional_stack, dtype, *shape, directions=2, **options)
    assert worst(found, expected) < 2 * LIMIT[precision]  # of two layers in turn


@needs_compiler
def test_two_directions_that_find_no_place_together_run_one_after_the_other(monkeypatch, folder):
    shape, chip = (2, 4, 16, 10, 3), CHIP._replace(multiprocessors=1, clusters=())
    directions = []
    launched = persistent._launch
    monkeypatch.setattr(
        persistent, "_launch", lambda work, *rest: directions.append(work.directions) or launched(work, *rest)
    )
    expected = results(bidirectional_stack, "float64", *shape, directions=2, lengths=True)
    for own, given in ((CHIP, [2] * 4), (chip, [1] * 8)):  # two layers, forward and backward
        directions.clear()
        with emulated(monkeypatch, folder, own):
            found = results(persistent_bidirectional_stack, "float32", *shape, directions=2, lengths=True)
        assert directions == given
        assert worst(found, expected) < 2 * LIMIT["tf32"]


@needs_compiler
@pytest.mark.parametrize(
    ("precision", "options"),
    [
        (
            "tf32",
            dict(lengths=[3, 0, 2, 1, 3, 3, 1, 0, 2, 2, 3] * 12 + [1]),
        ),  # no slice as another
        pytest.param("float32", dict(keep=True), marks=pytest.mark.slow),
        pytest.param("float16", dict(dropout=lambda x: 2 * x), marks=pytest.mark.slow),
        ("bfloat16", dict(directions=2, lengths=[2, 3, 0, 1, 3, 1, 2] * 19, keep=True)),
    ],
)
def test_a_batch_that_finds_no_place_together_goes_in_slices(monkeypatch, folder, precision, options):
    """Whole tiles of 8 and a rest, on a GPU of one multiprocessor."""
    shape, batches = (2, 5, 32, 133, 3), []
    launched = persistent._launch
    monkeypatch.setattr(persistent, "_launch", lambda work, *rest: batches.append(work.batch) or launched(work, *rest))
    xla, ours = (lstm_stack, persistent_stack)
    if "directions" in options:
        xla, ours = bidirectional_stack, persistent_bidirectional_stack
    expected = results(xla, "float64", *shape, **options)
    with emulated(monkeypatch, folder, CHIP._replace(multiprocessors=1, clusters=()), tf32=precision == "tf32"):
        found = results(ours, "float32" if precision == "tf32" else precision, *shape, **options)
    assert worst(found, expected) < 2 * LIMIT[precision]
    *whole, rest = sorted(set(batches), reverse=True)
    assert [batch % 8 for batch in whole] == [0] and rest == 133 % whole[0]


@needs_compiler
@pytest.mark.parametrize("capability", [80, 86, 89])
def test_chips_without_clusters_compute_the_same(monkeypatch, folder, capability):
    shape = (2, 5, 48, 11, 4)
    expected = results(lstm_stack, "float64", *shape, lengths=True)
    with emulated(monkeypatch, folder, CHIP._replace(capability=capability)):
        found = results(persistent_stack, "float32", *shape, lengths=True)
    assert worst(found, expected) < 2 * LIMIT["tf32"]


PLACES_BY_DEFAULT = {("streamed", 1, 1, True), ("in_shared", 4, 2, None)}  # the shapes above have theirs in registers


@needs_compiler
@pytest.mark.parametrize(
    ("kept", "split", "column_warps", "keep"),
    [
        pytest.param(*case, marks=[pytest.mark.slow] * (case not in PLACES_BY_DEFAULT))
        for case in [*itertools.product(("in_registers", "in_shared", "streamed"), (1, 2), (1,), (None,)),
                     *itertools.product(("in_shared", "streamed"), (1, 4, 8), (2, 8), (None,)),
                     ("in_registers", 2, 1, True), ("in_registers", 4, 4, True), ("streamed", 1, 1, True)]
    ],
)  # fmt: skip
def test_weights_in_registers_in_shared_memory_and_from_memory_give_the_same(
    monkeypatch, folder, kept, split, column_warps, keep
):
    """Every place that a weight can be in, at sizes whose blocks of k are several a warp; alone and in clusters, with one team of
    warps and several.

    In each it comes rounded to the nearest tf32: one that is a tf32 number already gives the very same.
    """
    choose = wavefront_tiling.best_tiling

    def placed(work, chip):
        tiling = choose(work, chip._replace(clusters=()))._replace(
            unit_tile=16 if split < 4 else 4,
            batch_tile=16 * column_warps,
            split=split,
            column_warps=column_warps,
            chunk=1,
        )
        count = wavefront_tiling._count(work, tiling)
        in_registers, in_shared = {
            "in_registers": (count, 0),
            "in_shared": (0, count),
            "streamed": (count // 3, count // 3),
        }[kept]
        return tiling._replace(in_registers=in_registers, in_shared=in_shared, prefetch_depth=min(2, count))

    shape = (2, 8, 336, 4 if column_warps == 1 else 13, 2)
    expected = results(lstm_stack, "float64", *shape, keep=keep)
    chip = H200._replace(multiprocessors=176, shared_bytes=2048 * 1024, clusters=((2, 88), (4, 44), (8, 22)))
    with emulated(monkeypatch, folder, chip):
        monkeypatch.setattr(wavefront_tiling, "best_tiling", placed)
        found = results(persistent_stack, "float32", *shape, together=2, keep=keep)
        of_rounded = results(persistent_stack, "float32", *shape, together=2, rounded=True, keep=keep)
    assert worst(found, expected) < LIMIT["tf32"]
    for a, b in zip(found, of_rounded, strict=True):
        np.testing.assert_array_equal(a, b)


@needs_compiler
@pytest.mark.parametrize(
    ("units", "precision", "lengths", "tiling"),
    [
        (
            208,
            "tf32",
            None,
            ClusterTiling(32, 8, 8, 100, 2, 1, 1, 1),
        ),  # one block has half of its units, the last one none
        (72, "float16", True, ClusterTiling(32, 16, 4, 1, 1, 2, 1, 1)),
        pytest.param(208, "float32", True, ClusterTiling(64, 8, 4, 5, 2, 1, 1, 1), marks=pytest.mark.slow),
        pytest.param(80, "bfloat16", None, ClusterTiling(64, 24, 2, 0, 1, 1, 1, 1), marks=pytest.mark.slow),
    ],
)
def test_a_layer_whose_weights_a_cluster_holds(monkeypatch, folder, units, precision, lengths, tiling):
    """Weights in registers, in shared memory and in both; one sum of a product and two; clusters of every size; both ways."""
    shape, named, kernels = (2, 5, units, 18, 5), persistent.kernel_name, []

    def placed(work, chip):
        return tiling._replace(in_registers=min(tiling.in_registers, tiling.count(work)))

    monkeypatch.setattr(wavefront_tiling, "best_tiling", placed)
    monkeypatch.setattr(persistent, "kernel_name", lambda *given: kernels.append(named(*given)) or kernels[-1])
    expected = results(lstm_stack, "float64", *shape, lengths=lengths)
    with emulated(monkeypatch, folder, H200, tf32=precision == "tf32"):
        dtype = "float32" if precision == "tf32" else precision
        found = results(persistent_stack, dtype, *shape, together=1, lengths=lengths)
    assert kernels == ["lstm_cluster_forward"] * 2 + ["lstm_cluster_backward"] * 2
    assert worst(found, expected) < 2 * LIMIT[precision]


@needs_compiler
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("units", "precision", "directions", "batch", "steps", "lengths", "tiling"),
    [
        (80, "tf32", 2, 18, 5, [0] * 16 + [3, 1], ClusterTiling(32, 16, 4, 2, 2, 1, 1, 1)),
        (40, "float16", 2, 9, 1, [0, 1, 1, 0, 1, 0, 0, 0, 0], ClusterTiling(64, 8, 2, 1, 1, 1, 1, 1)),
        pytest.param(200, "bfloat16", 1, 5, 6, None, ClusterTiling(32, 8, 8, 3, 2, 1, 1, 1), marks=pytest.mark.slow),
        pytest.param(
            200, "float32", 1, 5, 4, [4, 0, 2, 1, 3], ClusterTiling(64, 8, 4, 3, 2, 1, 1, 1), marks=pytest.mark.slow
        ),
    ],
)
def test_a_cluster_waits_for_what_comes_late(
    monkeypatch, tmp_path, units, precision, directions, batch, steps, lengths, tiling, seed
):
    """Blocks far ahead of others and far behind, also those without units; what is sent arrives in any order."""
    monkeypatch.setenv("EMULATOR_SEED", str(seed))

    def placed(work, chip):
        return tiling._replace(in_registers=min(tiling.in_registers, tiling.count(work)))

    monkeypatch.setattr(wavefront_tiling, "best_tiling", placed)
    shape, options = (1, 5, units, batch, steps), dict(directions=directions, lengths=lengths)
    xla, ours, together = lstm_stack, persistent_stack, dict(together=1)
    if directions == 2:
        xla, ours, together = bidirectional_stack, persistent_bidirectional_stack, {}
    expected = results(xla, "float64", *shape, **options)
    with emulated(monkeypatch, tmp_path, H200, tf32=precision == "tf32"):
        found = results(ours, "float32" if precision == "tf32" else precision, *shape, **options, **together)
    assert worst(found, expected) < 2 * LIMIT[precision]


@needs_compiler
@pytest.mark.parametrize("late", [0, 3])
def test_a_block_that_is_late_holds_up_its_cluster_and_no_more(monkeypatch, folder, late):
    """The first block, and the last one, which has no units."""
    monkeypatch.setenv("EMULATOR_SEED", "1")
    monkeypatch.setenv("EMULATOR_LATE", str(late))
    tiling = ClusterTiling(32, 8, 4, 2, 1, 1, 1, 1)
    monkeypatch.setattr(wavefront_tiling, "best_tiling", lambda work, chip: tiling)
    shape = (1, 5, 80, 8, 8)
    expected = results(lstm_stack, "float64", *shape)
    with emulated(monkeypatch, folder, H200):
        found = results(persistent_stack, "float32", *shape, together=1)
    assert worst(found, expected) < 2 * LIMIT["tf32"]


@needs_compiler
@pytest.mark.parametrize("kind", ["lstm_wavefront", "lstm_cluster"])
@pytest.mark.parametrize(("forward", "backward"), [(8, 16), (16, 8), (16, 24)])
def test_sequences_end_in_the_one_kernel_as_in_the_other_whatever_their_tiles(
    monkeypatch, folder, kind, forward, backward
):
    """What the forward kernel does not write past its own tile's longest sequence is not read by the backward kernel."""
    lengths = np.array([2, 1, 0, 2, 1, 2, 0, 1, 5, 3, 0, 5, 4, 1, 2, 5, 1, 0, 3, 1, 1, 2, 0, 3])
    shape, choose = (1, 5, 16, 24, 5), wavefront_tiling.best_tiling

    def placed(work, chip):
        tile = backward if work.backward else forward
        if kind == "lstm_cluster":
            return ClusterTiling(32, tile, 2, 1, 1, 1, 1, 1)
        return choose(work, chip._replace(clusters=()))._replace(**SMALL | dict(batch_tile=tile))

    expected = results(lstm_stack, "float64", *shape, lengths=lengths)
    with emulated(monkeypatch, folder, H200):
        monkeypatch.setattr(wavefront_tiling, "best_tiling", placed)
        found = results(persistent_stack, "float32", *shape, together=1, lengths=lengths)
    assert worst(found, expected) < LIMIT["tf32"]


def test_every_cluster_tiling_fits_on_its_chip():
    found = [(work, candidate) for work in works() for candidate in clusters.tilings(work, H200)]
    assert {(candidate.split, candidate.own) for _, candidate in found} == {(8, 32), (4, 32), (4, 64), (2, 64)}
    for work, candidate in found:
        assert work.lanes == 1 and candidate.split * candidate.own >= work.units
        assert candidate.groups(work) * candidate.batch_tile >= work.directions * work.batch
        assert candidate.shared_bytes(work) * candidate.per_multiprocessor <= H200.shared_bytes
        assert 0 <= candidate.in_registers <= candidate.count(work)
        at_once = dict(H200.clusters)[candidate.split] * candidate.per_multiprocessor
        assert (candidate.waves - 1) * at_once < candidate.groups(work) <= candidate.waves * at_once
        assert 1 <= candidate.sharing <= candidate.per_multiprocessor


@needs_compiler
def test_full_float32_rounds_no_weight(monkeypatch, folder):
    shape = (2, 4, 16, 10, 3)
    with emulated(monkeypatch, folder, tf32=False):
        found, of_rounded = (results(persistent_stack, "float32", *shape, rounded=rounded) for rounded in (False, True))
    assert worst(found, of_rounded) > 10 * LIMIT["float32"]


@needs_compiler
def test_a_second_launch_finds_the_barriers_as_the_first_did(monkeypatch, folder):
    shape = (2, 4, 16, 10, 3)
    with emulated(monkeypatch, folder):
        first, second = (results(persistent_stack, "float32", *shape, together=2) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)


@needs_compiler
@pytest.mark.parametrize("missing", [0, 1])
def test_a_block_that_waits_for_one_that_never_starts_ends_the_launch(folder, missing):
    """What would otherwise hang, such as beside another kernel that holds a multiprocessor. After 1,000 looks here."""
    work = Work(2, 4, 16, 0, False)
    tiling_ = best_tiling(work, CHIP)
    assert tiling_.grid(work) > tiling_.split == 1
    defines = (*tiling_.defines(work, 3, 16), ("MOST_LOOKS", 1000))
    library = build(folder, "lstm_wavefront_forward", (persistent.KERNELS / tiling_.source).read_text(), defines)
    arguments = f"{tiling_.grid(work) - missing}, {32 * WARPS}, {tiling_.shared_bytes(work)}"
    code = f"""
import ctypes
buffers = [ctypes.create_string_buffer(1 << 20) for _ in range(16)]
pointers = (ctypes.c_void_p * 16)(*(ctypes.addressof(buffer) for buffer in buffers))
assert ctypes.CDLL({str(library)!r}).launch({arguments}, pointers) == 1
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True)
    assert done.returncode == (-signal.SIGABRT if missing else 0), done.stderr  # __trap of the emulator is abort


@needs_compiler
@pytest.mark.parametrize("bits", [0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000])
@pytest.mark.parametrize("where", ["weights", "state", "gradient"])
def test_nan_stays_nan_whatever_its_bits(monkeypatch, folder, where, bits):
    """CUDA's own NaN has all bits set: half a unit more, for rounding, would make it a zero."""
    nan = np.full([1, 2, 64], bits, np.uint32).view(np.float32)
    kernel, recurrent = (
        tf.ones([4, 64]),
        tf.constant(nan[0, :1].repeat(16, 0) if where == "weights" else np.ones([16, 64], "f4")),
    )
    h = tf.constant(nan[..., :16] if where == "state" else np.zeros([1, 2, 16], "f4"))
    x = tf.ones([2, 2, 4])
    with emulated(monkeypatch, folder), tf.GradientTape() as tape:
        tape.watch(h)
        outputs, *_ = persistent_stack(x, [LayerWeights(kernel, recurrent, tf.zeros([64]))], h, tf.zeros([1, 2, 16]))
        upstream = (
            tf.constant(np.broadcast_to(nan[..., :16], [2, 2, 16])) if where == "gradient" else tf.ones([2, 2, 16])
        )
        gradient = tape.gradient(outputs, h, output_gradients=upstream)
    assert np.isnan(gradient if where == "gradient" else outputs).all()


@needs_compiler
def test_dropout_acts_between_layers_alone(monkeypatch, folder):
    shape = (2, 4, 16, 4, 3)
    seen = []

    def dropout(x):
        seen.append(x.shape)
        return x * 2

    with emulated(monkeypatch, folder):
        found = results(persistent_stack, "float32", *shape, dropout=dropout)
        with pytest.raises(ValueError, match="dropout: given with together=2, expected together=1"):
            results(persistent_stack, "float32", *shape, dropout=dropout, together=2)
    assert seen == [(3, 4, 16)]
    assert worst(found, results(lstm_stack, "float64", *shape, dropout=lambda x: x * 2)) < LIMIT["tf32"]


@needs_compiler
@pytest.mark.parametrize(
    ("rate", "direction"), [(0, "unidirectional"), (0.4, "unidirectional"), (0.4, "bidirectional")]
)
def test_the_layer_trains_as_with_xla(monkeypatch, folder, rate, direction):
    """With recurrent dropout too: with one seed both draw the same masks."""
    x = np.random.default_rng(0).normal(size=(4, 5, 6)).astype("float32")
    layers = [
        WavefrontLSTM(
            16, 2, direction=direction, return_sequences=True, seed=1, recurrent_dropout=rate, implementation=kind
        )
        for kind in ("xla", "persistent")
    ]
    for layer in layers:
        layer.build(x.shape)
    layers[1].set_canonical(layers[0].get_canonical())
    gradients = []
    with emulated(monkeypatch, folder):
        for layer in layers:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.square(layer(x, training=True)))
            gradients.append([np.asarray(g) for g in tape.gradient(loss, [v.value for v in layer.trainable_variables])])
    assert worst(gradients[1], gradients[0]) < LIMIT["tf32"]
    assert WavefrontLSTM.from_config(layers[1].get_config()).implementation == "persistent"


# -- the choice of a tiling --------------------------------------------------------------------------------------------------


def works():
    for layers, units, batch, _ in PUBLISHED:
        for itemsize in (4, 2):
            padded = padded_units(units, itemsize)
            for dtype_code in (0, 3) if itemsize == 4 else (1, 2):
                for lanes in (1, layers):
                    for backward, *options in itertools.product((False, True), repeat=3):
                        yield Work(lanes, batch, padded, dtype_code, backward, *options)
            yield Work(1, batch, padded, dtype_code, layers == 2, False, False, 2)


@pytest.mark.parametrize("chip", [H200, CHIP])
def test_every_tiling_fits_on_its_chip(chip):
    found = [(work, candidate) for work in works() for candidate in wavefront_tiling._tilings(work, chip)]
    assert found
    for work, candidate in found:
        assert not work.recurrent_dropout or work.backward or candidate.split * candidate.unit_tile % 16 == 0
        assert candidate.grid(work) <= chip.blocks(candidate.split) <= chip.multiprocessors, (
            "or a barrier waits for ever"
        )
        assert candidate.shared_bytes(work) <= chip.shared_bytes
        count = wavefront_tiling._count(work, candidate)
        assert candidate.in_registers + candidate.in_shared <= count
        assert 1 <= candidate.prefetch_depth <= count and candidate.batch_tile // 8 % candidate.chunk == 0


def test_other_chips_make_no_clusters():
    for chip in CHIPS[1:]:
        assert {candidate.split for work in works() for candidate in wavefront_tiling._tilings(work, chip)} == {1}


@pytest.mark.parametrize("dtype_code", [0, 1, 3])
@pytest.mark.parametrize("units", [256, 1504])
def test_a_smaller_batch_fits_where_a_larger_one_does(dtype_code, units):
    fitting = [wavefront_tiling.fits(Work(1, batch, units, dtype_code, False), 50, H200) for batch in range(8, 264, 8)]
    assert fitting == sorted(fitting, reverse=True) and fitting[0]


@pytest.mark.parametrize(
    ("units", "batch", "slices"), [(1024, 128, 1), (2048, 128, 1), (1024, 1024, 2), (2048, 512, 3)]
)
def test_wide_layers_go_in_as_many_slices_on_an_h200_as_the_document_says(monkeypatch, units, batch, slices):
    monkeypatch.setattr(nvrtc, "chip", lambda: H200)
    monkeypatch.setattr(tf.config.experimental, "tensor_float_32_execution_enabled", lambda: True)
    layers = [LayerWeights(None, tf.TensorSpec([units, 4 * units]), None)] * 3
    work, _ = persistent.planned(tf.TensorSpec([50, batch, units]), layers, False, False, False)
    assert -(-batch // work.batch) == slices


def test_published_shapes_have_a_tiling_on_an_h200():
    for work in works():
        together = layers_together(work.lanes, 50, work._replace(backward=False), H200)
        for backward in (False, True):
            assert best_tiling(work._replace(lanes=together, backward=backward), H200) is not None


MEASURED = Path(__file__).with_name("tilings_h100.json")


def test_the_choice_is_nearly_the_best_of_those_measured_on_an_h100():
    """Within 3 % in the mean, and within a fifth each; its estimates are a tenth off in the mean at most."""
    measured = tune.read(MEASURED)
    works = list(dict.fromkeys(row.work for row in measured))
    losses = [tune.loss([row for row in measured if row.work == work], COST_US) for work in works]
    errors = [abs(wavefront_tiling.step_us(row.work, row.tiling) / row.us - 1) for row in measured]
    assert len(losses) > 60 and tune.loss(measured, COST_US) < 1.03 and max(losses) < 1.2
    assert np.mean(errors) < 0.1


def test_the_costs_are_those_of_the_fit():
    found = tune.fit(tune.read(MEASURED))
    for name, us in COST_US.items():
        assert us == pytest.approx(found[name], rel=0.1, abs=0.01)


def test_the_fit_is_that_of_non_negative_least_squares():
    optimize = pytest.importorskip("scipy.optimize")
    measured = tune.read(MEASURED)
    amounts = np.array([[row.tiling.terms(row.work).get(name, 0) for name in COST_US] for row in measured])
    us = np.array([row.us for row in measured])
    expected, _ = optimize.nnls(amounts / us[:, None], np.ones(len(us)))
    np.testing.assert_allclose(list(tune.fit(measured).values()), expected, rtol=1e-2, atol=1e-3)


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """A folder of constants that are measured, empty; what was read of another one is forgotten before and after."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for read in (wavefront_tiling.costs, best_tiling):
        read.cache_clear()
    yield tmp_path
    for read in (wavefront_tiling.costs, best_tiling):
        read.cache_clear()


class SlowReads:
    """A driver of a GPU whose steps cost as an H100's, but for what comes from memory, which takes ten times as long."""

    COSTS: ClassVar = {
        name: us * (10 if name in ("streamed", "traffic", "operand") else 1) for name, us in COST_US.items()
    }

    def load(self, job, name, shared_bytes):
        return dict(job)

    def us(self, defines, grid, shared_bytes):
        work = Work(defines.get("LANES", 1), *(defines[name] for name in ("BATCH", "UNITS", "DTYPE_CODE", "BACKWARD")))
        [made] = [
            candidate
            for candidate in wavefront_tiling.tilings(work, H200)
            if dict(candidate.defines(work, defines["TIME"], work.units)) == defines
        ]
        assert (grid, shared_bytes) == (made.grid(work), made.shared_bytes(work))
        return wavefront_tiling.step_us(work, made, self.COSTS) * (defines["TIME"] + work.lanes - 1)


def test_tune_finds_what_a_step_costs_on_another_chip_and_later_processes_go_by_it(monkeypatch, cache, capsys):
    monkeypatch.setattr(nvrtc, "chip", lambda: H200)
    monkeypatch.setattr(nvrtc, "ptx", lambda source, defines, capability: defines)
    monkeypatch.setattr(tune, "Driver", SlowReads)
    assert tune.main([f"--out={cache / 'measured.json'}"]) == 0
    path = wavefront_tiling.costs_path(H200)
    assert path.parent.parent == cache and f"kept in {path}" in capsys.readouterr().out
    wavefront_tiling.costs.cache_clear()
    found, measured = wavefront_tiling.costs(H200), tune.read(cache / "measured.json")
    assert tune.loss(measured, found) < 1.02 < tune.loss(measured, COST_US)
    assert found["streamed"] > 5 * COST_US["streamed"]
    for other in (H200._replace(multiprocessors=114), H200._replace(name="NVIDIA GH200")):
        assert wavefront_tiling.costs(other) == COST_US, "of another chip"
    best_tiling.cache_clear()
    moved = [
        row.work
        for row in measured
        if best_tiling(row.work, H200) != best_tiling(row.work, H200._replace(capability=91))
    ]
    assert moved, "the choice goes by them"
    assert wavefront_tiling.notes(H200) == [
        "the kernels' work is divided by times measured on this kind of GPU (python -m models.wavefront.tune)"
    ]
    path.unlink()
    wavefront_tiling.costs.cache_clear()
    assert wavefront_tiling.notes(H200) == []


def test_constants_that_choose_worse_are_not_kept(monkeypatch, cache, capsys):
    monkeypatch.setattr(tune, "fit", lambda measured: dict.fromkeys(COST_US, 0.0) | {"wait": 1.0})
    tune.tune(H200, {}, tune.read(MEASURED), print)
    assert "nothing is kept" in capsys.readouterr().out and list(cache.iterdir()) == []


WRONG = [json.dumps({"costs_us": dict.fromkeys(COST_US, us)}) for us in (-1, "1", 0, float("nan"), None)]


@pytest.mark.parametrize("text", [*WRONG, "", "{", "[]", "{}", '{"costs_us": {"step": 1}}', '{"costs_us": 3}', "null"])
def test_a_file_of_constants_that_cannot_be_used_is_a_warning_and_an_h100s_are_taken(cache, caplog, text):
    path = wavefront_tiling.costs_path(H200)
    path.parent.mkdir()
    path.write_text(text)
    assert wavefront_tiling.costs(H200) == COST_US
    [line] = [record.getMessage() for record in caplog.records]
    assert "cannot be used" in line and "run python -m models.wavefront.tune again" in line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--fit={cache}/absent"], "No such file or directory"),
        (["--fit={cache}/empty"], "Expecting value"),
        (["--fit={cache}/other"], "no 'tilings'; expected a file that --out has written"),
        (["--fit={cache}/older"], "measured with another version's tilings, expected this one's: measure again"),
        (["--out={cache}/empty/file"], "Not a directory"),
        ([], "Not a directory"),
    ],
)
def test_what_tune_cannot_read_or_write_is_one_line_before_anything_is_measured(
    monkeypatch, cache, capsys, arguments, words
):
    monkeypatch.setattr(nvrtc, "chip", lambda: H200)
    monkeypatch.setattr(tune, "measure", lambda *_: pytest.fail("measured"))
    (cache / "empty").touch()
    (cache / "other").write_text("{}")
    older = {"shape": "mnist", "work": [1, 32, 128, 0, False], "tiling": [8, 8, 1, 0, 2, 1, 1], "us": 2.0}
    (cache / "older").write_text(json.dumps({"tilings": [older]}))
    if not arguments:
        monkeypatch.setenv("XDG_CACHE_HOME", str(cache / "empty"))
    assert tune.main([argument.format(cache=cache) for argument in arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and words in error and error.count("\n") == 1


def test_without_a_gpu_tune_says_so_in_one_line(capsys):
    if tf.config.list_physical_devices("GPU"):
        pytest.skip("there is a GPU")
    assert tune.main([]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: no NVIDIA GPU that TensorFlow sees") and error.count("\n") == 1


def test_sizes_that_fit_nowhere_are_refused():
    with pytest.raises(
        ValueError, match=r"1 layers at a time of 4096 units \(padded\) and batch 512 given: .*implementation='xla'"
    ):
        layers_together(1, 10, Work(1, 512, 4096, 0, False), H200)


@pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: f"sm_{chip.capability}")
def test_kernels_of_the_published_shapes_compile(chip):
    """By NVRTC; needs no GPU."""
    pytest.importorskip("nvidia.cuda_nvrtc", reason="NVRTC is not installed: pip install nvidia-cuda-nvrtc-cu12")
    compiled = set()
    for work in itertools.islice(works(), None, None, sizes.cases(7 if chip == H200 else 23, 1)):
        tiling = best_tiling(work, chip)
        if tiling is None or (work.recurrent_dropout and work.lanes == 1):
            continue
        code = persistent.ptx(work, 9, work.units, tiling, chip)
        assert f".entry {persistent.kernel_name(work, tiling)}" in code
        assert "mma.sync.aligned" in code and f".target sm_{chip.capability}" in code
        assert ("barrier.cluster" in code) == (tiling.split > 1)
        compiled.add(work.dtype_code)
    assert len(compiled) > 1


def test_a_trace_of_one_precision_serves_no_other(monkeypatch):
    """TensorFlow's switch for TensorFloat-32 is no argument of a traced function, and would be baked into its first trace."""
    monkeypatch.setattr(nvrtc, "chip", lambda: H200)
    monkeypatch.setattr(nvrtc, "ptx", lambda source, defines, capability: repr(defines))
    found = {}
    for tf32 in (True, False):
        monkeypatch.setattr(tf.config.experimental, "tensor_float_32_execution_enabled", lambda tf32=tf32: tf32)

        @tf.function
        def traced(x):
            layer = LayerWeights(tf.zeros([4, 64]), tf.zeros([16, 64]), tf.zeros([64]))
            return persistent_stack(x, [layer], tf.zeros([1, 5, 16]), tf.zeros([1, 5, 16]))

        graph = traced.get_concrete_function(tf.TensorSpec([7, 5, 4])).graph
        calls = [op for f in graph._functions.values() for op in f.graph.get_operations() if "CustomCall" in op.type]
        found[tf32] = [call.get_attr("backend_config").decode() for call in calls]
    assert ["'DTYPE_CODE', 0" in config for config in found[True]] == [True]
    assert ["'DTYPE_CODE', 3" in config for config in found[False]] == [True]


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("implementation", ["auto", "persistent"])
def test_both_kernels_are_compiled_once_and_the_backward_one_ahead(monkeypatch, implementation, trained):
    made = []

    def ptx(source, defines, capability):
        made.append((threading.current_thread().name, dict(defines)["BACKWARD"]))
        return repr(defines)

    nvrtc.ptx.cache_clear()
    monkeypatch.setattr(nvrtc, "_asked", set())
    monkeypatch.setattr(nvrtc, "_ptx", ptx)
    monkeypatch.setattr(nvrtc, "chip", lambda: H200)
    monkeypatch.setattr("models.wavefront.choice._elsewhere", lambda devices: "")
    layer, time = (
        WavefrontLSTM(32, implementation=implementation),
        70 + 2 * trained + (implementation == "auto"),
    )  # untraced yet
    layer.build((5, time, 4))

    @tf.function(jit_compile=True, autograph=False)
    def step(x):
        if not trained:
            return layer(x)
        with tf.GradientTape() as tape:
            total = tf.reduce_sum(layer(x, training=True))
        return tape.gradient(total, [variable.value for variable in layer.trainable_variables])

    step.get_concrete_function(tf.TensorSpec([5, time, 4]))
    assert sorted(made) == sorted([("MainThread", 0)] + [("nvrtc", 1)] * trained)
    nvrtc.ptx.cache_clear()


def test_what_fails_ahead_is_told_where_it_is_needed_and_tried_again(monkeypatch):
    def fails(*key):
        raise ValueError("no NVRTC found")

    monkeypatch.setattr(nvrtc, "_asked", set())
    monkeypatch.setattr(nvrtc, "_ptx", fails)
    nvrtc.compile_ahead("source", (), 90)
    with pytest.raises(ValueError, match="no NVRTC found"):
        nvrtc.ptx("source", (), 90)
    monkeypatch.setattr(nvrtc, "_ptx", lambda *key: "PTX")
    assert nvrtc.ptx("source", (), 90) == "PTX"
    nvrtc.ptx.cache_clear()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_fork_waits_for_no_thread_of_its_parent(monkeypatch):
    monkeypatch.setattr(nvrtc, "_asked", set())
    monkeypatch.setattr(nvrtc, "_ptx", lambda *key: "PTX")
    nvrtc._ahead["source", (), 90] = Future()  # of a thread that is not in the child
    try:
        child = os.fork()
        if not child:
            os._exit(nvrtc.ptx("source", (), 90) != "PTX")
        for _ in range(500):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                break
            time.sleep(0.01)
        else:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            pytest.fail("the child waits for ever")
        assert status == 0
    finally:
        nvrtc._ahead.clear()


def test_where_no_thread_can_be_had_it_is_compiled_when_needed(monkeypatch):
    def no_thread(*_, **__):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(nvrtc, "_asked", set())
    monkeypatch.setattr(nvrtc.threading, "Thread", no_thread)
    monkeypatch.setattr(nvrtc, "_ptx", lambda *key: "PTX")
    nvrtc.compile_ahead("source", (), 90)
    assert nvrtc.ptx("source", (), 90) == "PTX"
    nvrtc.ptx.cache_clear()


def test_source_that_does_not_compile_is_an_error_with_the_compilers_words():
    pytest.importorskip("nvidia.cuda_nvrtc", reason="NVRTC is not installed: pip install nvidia-cuda-nvrtc-cu12")
    with pytest.raises(ValueError, match=r"does not compile[\s\S]*nonsense"):
        nvrtc.ptx("nonsense;", (), 90)


# -- what is refused ---------------------------------------------------------------------------------------------------------


def stack_on(monkeypatch, chip=H200, dtype="float32", batch=2, **options):
    """One layer of 16 units for 4 features over 3 steps, on a GPU of `chip`."""
    monkeypatch.setattr(nvrtc, "chip", lambda: chip)
    layer = LayerWeights(*(tf.zeros(shape, dtype) for shape in ([4, 64], [16, 64], [64])), **options)

    @tf.function(input_signature=[tf.TensorSpec([3, batch, 4], dtype)])
    def traced(x):
        return persistent_stack(x, [layer], tf.zeros([1, 2, 16], dtype), tf.zeros([1, 2, 16]))

    return traced.get_concrete_function


def test_a_machine_without_a_gpu_is_refused():
    if tf.config.list_physical_devices("GPU"):
        pytest.skip("there is a GPU")
    with pytest.raises(ValueError, match=r"no NVIDIA GPU that TensorFlow sees.*use implementation='xla'"):
        nvrtc.chip()


def test_gpus_are_taken_for_the_smallest_and_refused_where_they_differ_in_kind():
    assert nvrtc.common([H200, H200._replace(multiprocessors=114)]) == H200._replace(multiprocessors=114)
    fewer = H200._replace(clusters=((2, 66), (4, 30), (8, 15)))  # as of one H100
    assert nvrtc.common([H200, fewer]) == nvrtc.common([fewer, H200]) == fewer
    with pytest.raises(ValueError, match=r"GPUs of compute capabilities 9\.0, 8\.0 given, expected one: hide"):
        nvrtc.common([H200, H200._replace(capability=80)])


def test_a_driver_older_than_nvrtc_is_refused():
    nvrtc._check_driver(12090, 12, 9)
    with pytest.raises(ValueError, match=r"driver of CUDA 12\.4 and NVRTC 12\.9 given, expected a driver no older"):
        nvrtc._check_driver(12040, 12, 9)


@needs_compiler
def test_states_of_another_shape_are_refused(monkeypatch, folder):
    layer = LayerWeights(tf.zeros([4, 64]), tf.zeros([16, 64]), tf.zeros([64]))
    with emulated(monkeypatch, folder), pytest.raises((ValueError, tf.errors.InvalidArgumentError), match="shape"):
        persistent_stack(tf.zeros([3, 3, 4]), [layer], tf.zeros([1, 1, 16]), tf.zeros([1, 1, 16]))


def test_an_old_gpu_is_refused(monkeypatch):
    with pytest.raises(ValueError, match=r"compute capability 7\.0 given, expected 8\.0 or later"):
        stack_on(monkeypatch, H200._replace(capability=70))()


def test_float64_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="float64 given, expected float16, bfloat16 or float32"):
        stack_on(monkeypatch, dtype="float64")()


def test_layer_normalisation_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="layer normalisation given"):
        stack_on(monkeypatch, normalization=[tf.zeros([64])])()


def test_sizes_that_are_not_known_are_refused(monkeypatch):
    with pytest.raises(ValueError, match=r"inputs of shape \(3, None, 4\) given, expected sizes that are known"):
        stack_on(monkeypatch, batch=None)()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (dict(implementation="cuda"), "implementation: 'cuda' given, expected one of auto, xla, persistent"),
        (
            dict(layer_normalization=True),
            "layer_normalization: True given, not supported by implementation='persistent'",
        ),
    ],
)
def test_what_the_layer_cannot_do_persistently_is_refused_when_it_is_made(given, message):
    with pytest.raises(ValueError, match=message):
        WavefrontLSTM(16, **{"implementation": "persistent", **given})


@pytest.mark.parametrize("compiled", [False, True])
def test_weights_are_rounded_to_the_nearest_tf32_and_of_the_other_numbers_not(compiled):
    def rounded(bits):
        x = tf.constant(np.asarray(bits, np.uint32).view(np.float32))
        return function(x).numpy().view(np.uint32)

    function = functools.partial(persistent._rounded, DTYPE_CODES["tf32"])
    function = tf.function(function, jit_compile=True) if compiled else function
    x = np.random.default_rng(1).normal(size=1000).astype(np.float32)
    found = rounded(x.view(np.uint32))
    assert not (found & 0x1FFF).any(), "ten bits after the point"
    assert (np.abs(found.view(np.float32) - x) <= 2.0**-11 * np.abs(x)).all()
    same = [0x00000000, 0x80000000, 0x7F800000, 0xFF800000, 0x7F7FE000]  # zeros, infinities, tf32's largest
    assert rounded(same).tolist() == same
    half = [0x3F800FFF, 0x3F801000, 0xBF801000, 0x7F7FEFFF, 0x7F7FF000]
    assert rounded(half).tolist() == [0x3F800000, 0x3F802000, 0xBF802000, 0x7F7FE000, 0x7F800000]
    nan = rounded([0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000, 0x7F800001, 0xFF801FFF])
    truncated = nan & np.uint32(0xFFFFE000)  # as the tensor cores see it
    assert np.isnan(truncated.view(np.float32)).all()
    for name in ("float32", "float16", "bfloat16"):
        given = tf.cast(x[:9], name)
        assert persistent._rounded(DTYPE_CODES[name], given) is given


def test_fit_gives_the_kernels_one_batch_size_where_it_divides_the_data(monkeypatch):
    """The data's size counts, not that of keras.Input."""
    seen = []

    def stack(x, *arguments, **options):
        persistent._check(x, [], H200)
        seen.append(x.shape[1])
        return lstm_stack(x, *arguments, **options)

    monkeypatch.setattr("models.wavefront.layer.persistent_stack", stack)
    for inputs in (keras.Input((3, 4)), keras.Input(batch_shape=(4, 3, 4))):
        model = keras.Sequential([inputs, WavefrontLSTM(5, implementation="persistent")])
        model.compile("sgd", "mse", jit_compile=False)
        x, y = np.zeros((10, 3, 4), "float32"), np.zeros((10, 5), "float32")
        model.fit(x[:8], y[:8], batch_size=4, verbose=0)
        with pytest.raises(
            ValueError, match=r"\(3, None, 4\) given, .*len\(x\) a multiple of batch_size.*CompiledLoop"
        ):
            model.fit(x, y, batch_size=4, verbose=0)
    assert set(seen) == {4}
