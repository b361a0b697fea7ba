"""Small language models of every framework, and what a test reads of each: its optimizer's moments, states and dtypes."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest

from models import rows
from models.reference import expected, networks
from models.weights import canonical
from tests.comparing import error, worst

VOCABULARY, UNITS, LAYERS, BATCH, TIME = 13, 6, 2, 3, 5
SHAPES = canonical.language_model_shapes(VOCABULARY, UNITS, UNITS, LAYERS)
WEIGHTS = canonical.large_random(SHAPES, seed=1)
STATES = canonical.random_states(LAYERS, BATCH, UNITS, seed=2)
TOKENS = np.random.default_rng(3).integers(0, VOCABULARY, (4, 2, BATCH, TIME))
TOKENS[0, 0] = 7  # one word, many times: the rows of the embedding's (in TensorFlow sparse) gradient overlap
BATCHES = [tuple(pair) for pair in TOKENS]
FLOAT32 = 1e-5  # max|a - b| / max|b| of a few steps; measured: up to 1.3e-6


def assert_close(given, wanted, limit=FLOAT32):
    assert set(given) == set(wanted)
    for name, array in wanted.items():
        assert error(given[name], array) < limit, name


def assert_same(given, wanted):
    assert set(given) == set(wanted)
    for name, array in wanted.items():
        np.testing.assert_array_equal(given[name], array, err_msg=name)


def in_tensorflow(
    row="while_loop", precision="fp32", optimizer=("Adam", 1e-2), states=STATES, batches=BATCHES, **options
):
    return rows.TENSORFLOW[row].build(WEIGHTS, states, batches, optimizer, precision=precision, **options)


def run_eagerly(function):
    """In place of a CUDA graph: warm-up calls that change everything, then the function itself, called at every replay."""
    for _ in range(2):
        function()
    return function


def in_pytorch(row="torch_lstm", precision="fp32", optimizer=("Adam", 1e-2), states=STATES, batches=BATCHES, **options):
    """`row` as on a CPU; "captured" is torch_lstm_graph, "captured cells" torch_compile, each captured."""
    torch = pytest.importorskip("torch")
    from models.pytorch.language_model import COMPUTE_DTYPE, CapturedLanguageModel

    torch.compiler.reset()
    name = {"captured": "torch_lstm_graph", "captured cells": "torch_compile"}.get(row, row)
    if name == row:
        return rows.PYTORCH[row].build(WEIGHTS, states, batches, optimizer, precision=precision, **options)
    stack = rows.PYTORCH[name].arguments["stack"](WEIGHTS, LAYERS, COMPUTE_DTYPE[precision])
    return CapturedLanguageModel(stack, WEIGHTS, states, batches, optimizer, record=run_eagerly, **options)


def in_jax(precision="fp32", optimizer=("Adam", 1e-2), states=STATES, batches=BATCHES, **options):
    pytest.importorskip("jax")
    return rows.JAX["jax_scan"].build(WEIGHTS, states, batches, optimizer, precision=precision, **options)


def of_ptb(model_of: Callable, rate=0.5, **options):
    """A model of PTB's kind."""
    return model_of(optimizer=("SGD", rate), reduction="sum_over_time", carry_states=True, **options)


def first_step(model):
    """The gradients of the first step."""
    model.restore()
    model.train_steps(1)
    return model.first_gradients()


def follows_the_reference_to_rounding(model_of: Callable, ptb: bool):
    """Assert it, in every mode of a float64 model: by Adam and the mean, or PTB's kind with clipping."""
    clip_norm = 0.1 if ptb else None
    reduction, optimizer = ("sum_over_time", networks.SGD(0.5, clip_norm)) if ptb else ("mean", networks.Adam(1e-2))
    model = (of_ptb if ptb else lambda make, **options: make(**options))(
        model_of, precision="fp64", clip_norm=clip_norm
    )
    reference = expected.language_model(reduction, optimizer, WEIGHTS, STATES, BATCHES, carry_states=ptb)
    assert error(model.train_steps(6), reference["losses"]) < 1e-13
    model.restore()
    outputs = model.outputs()
    assert worst((outputs[name], array) for name, array in reference["outputs"].items()) < 1e-13
    assert error(model.forward_losses(6), reference["forward_losses"]) < 1e-13
    assert_close(first_step(model), reference["gradients"], 1e-10)
    model.restore()
    model.train_steps(3)
    assert_close({name: array - WEIGHTS[name] for name, array in model.weights().items()}, reference["updates"], 1e-10)
    model.restore()
    alone = dict(model.stack_results())
    assert error(alone.pop("hidden"), reference["stack_outputs"]["hidden"]) < 1e-13
    assert_close(alone, reference["stack_gradients"], 1e-13)
    losses = [float(model.stack_alone(model.stack_batches[k % len(BATCHES)])[0]) for k in range(6)]
    assert error(losses, reference["stack_losses"]) < 1e-13
    assert outputs["hidden"].dtype == "float64"
    return model


class Way(NamedTuple):
    """A framework, or a way to run a step in it.

    Attributes:
        model_of: precision, optimizer, states, batches, options → the model.
        slots: model → the arrays that its optimizer keeps between steps.
        states: model → h and c of every layer, as the canonical states nest them.
        dtypes: model → names of the dtypes of what the optimizer moves.
        rtol: of the losses of the same steps again.
        off: of float16 gradients: relative error of any at most, the typical one with a loss scale, and how many times that
            without one.
    """

    model_of: Callable
    slots: Callable
    states: Callable
    dtypes: Callable
    rtol: float
    off: tuple[float, float, float]


def _stacked_states(model):
    return [[tuple(model.numpy(state[layer]) for state in model.states)] for layer in range(LAYERS)]


def _of_tensorflow(**options) -> Way:
    return Way(
        lambda **given: in_tensorflow(**given, **options),
        lambda model: [v.numpy() for v in model.optimizer.variables if v is not model.optimizer._learning_rate],
        lambda model: [[tuple(state.numpy() for state in layer)] for layer in model.states],
        lambda model: {variable.dtype for variable in model.variables},
        1e-6,  # a GPU may sum in another order
        (0.01, 0.0015, 2.0),  # measured: 0.0008, 0.0032
    )


def _of_pytorch(row: str) -> Way:
    return Way(
        lambda **given: in_pytorch(row, **given),
        lambda model: [np.array(model.optimizer.iterations), *(x.numpy().copy() for x in model.optimizer.tensors)],
        _stacked_states,
        lambda model: {str(master.dtype).removeprefix("torch.") for master in model.masters},
        0.0,
        (0.02, 0.005, 2.0),
    )


def _jax_slots(model) -> list[np.ndarray]:
    import jax

    return [np.array(x) for x in jax.tree.leaves(model.slots)]


WAYS = {
    "tensorflow": _of_tensorflow(),
    "tensorflow, eager": _of_tensorflow(row="eager"),
    "torch": _of_pytorch("torch_lstm"),
    "torch, cells": _of_pytorch("torch_cells"),
    "torch, captured": _of_pytorch("captured"),
    "jax": Way(
        in_jax, _jax_slots, _stacked_states, lambda model: {str(x.dtype) for x in model.parameters}, 0.0,
        (0.01, 0.002, 1.5),
    ),
}  # fmt: skip
