"""Work that a step leaves out later than the proof's first steps, or only while it is timed: the row comes out failed.

Each is planted in rows of TensorFlow, PyTorch and JAX by changing what is timed, `train` or `stack_alone` of a real model.
"""

import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from harness.measure import clocks, references
from models import rows
from models.reference import expected
from models.reference.networks import SGD, Adam
from tests import cases
from tests.harness.test_planted_mistakes import (
    BATCH_SIZE,
    BATCHES,
    LEARNING_RATE,
    LOSS_SCALE,
    NUM_LAYERS,
    STATES,
    TIME_STEPS,
    WEIGHTS,
)

START = (WEIGHTS, STATES, BATCHES)
FRAMEWORKS = {"tensorflow": "while_loop", "torch": "torch_lstm", "jax": "jax_scan"}
BLOCK = 17  # batches, of 8
CLIP_NORM = 1.0  # below the norm of the first gradients
HIGHER = 5.0  # above it
AFTER = 7  # steps of a block that are right
PTB = dict(reduction="sum_over_time", clip_norm=CLIP_NORM, carry_states=True)


def build(framework: str, optimizer=("Adam", LEARNING_RATE), precision="fp32", **options):
    options |= {"precision": precision, "device": "cpu", "loss_scale": LOSS_SCALE}
    return rows.LANGUAGE_MODEL[FRAMEWORKS[framework]].build(*START, optimizer, **options)


def saved(path, reference) -> str:
    references.save_reference(path, reference)
    return path


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """The reference files of the stacked LM and of PTB, and of PTB with a bound that its first gradients are below."""
    folder = tmp_path_factory.mktemp("references")
    found = {"stacked_lm": expected.language_model("mean", Adam(LEARNING_RATE), *START, carry_states=False)}
    for name, bound in (("ptb", CLIP_NORM), ("below", HIGHER)):
        found[name] = expected.language_model("sum_over_time", SGD(1.0, clip_norm=bound), *START, carry_states=True)
    return {name: saved(folder / f"{name}.npz", reference) for name, reference in found.items()}


@pytest.fixture(scope="module")
def trials():
    """The same models for all mistakes: framework and workload → trial, made when it is first asked for."""
    made = {}

    def of(framework: str, workload: str):
        if (framework, workload) not in made:
            options = {} if workload == "stacked_lm" else {"optimizer": ("SGD", 1.0), **PTB}
            made[framework, workload] = build(framework, **options)
        return made[framework, workload]

    return of


@pytest.fixture
def part_of(paths, monkeypatch, tensorflow_runtime):
    """Callable: the part of one mode of a trial, from a row's way."""

    def run(trial, framework: str, mode: str = "train", workload: str = "stacked_lm", precision: str = "fp32") -> dict:
        monkeypatch.setattr(clocks, "SLOW", {})  # a block of all batches, on a busy machine too
        expected_ops = rows.LANGUAGE_MODEL[FRAMEWORKS[framework]].expected_ops(NUM_LAYERS, TIME_STEPS, "cpu")
        job = {"blocks_of": BLOCK, "precision": precision}
        made = cases.row_process(monkeypatch, framework, expected_ops, paths[workload], **job)
        return made.steps(trial, {mode: 1}, BATCH_SIZE, "sequences/s")[mode]

    return run


@pytest.fixture
def planted(monkeypatch):
    """Callable: from step AFTER of a block on, the trial's `train` is instead(train, batch, number of the step)."""

    def plant(trial, instead) -> None:
        train, restore, done = trial.train, trial.restore, [0]

        def later(batch):
            done[0] += 1
            return train(batch) if done[0] <= AFTER else instead(train, batch, done[0])

        def anew():
            done[0] = 0
            restore()

        monkeypatch.setattr(trial, "train", later)
        monkeypatch.setattr(trial, "restore", anew)

    return plant


def every_second_step_left_out(trial):
    kept = []

    def instead(train, batch, number):
        if number % 2 or not kept:
            kept[:] = [train(batch)]
        return kept[0]

    return instead


def no_backward_pass_and_no_update(trial):
    return lambda train, batch, number: trial.forward(batch)


def part_of_the_batch(trial, change):
    batches = [tuple(change(array) for array in pair) for pair in BATCHES]
    others = [trial.stage(*pair) for pair in batches]
    return lambda train, batch, number: train(others[next(k for k, own in enumerate(trial.batches) if own is batch)])


def half_of_the_batch(trial):
    return part_of_the_batch(trial, lambda ids: np.tile(ids[: BATCH_SIZE // 2], (2, 1)))


def half_of_the_sequence(trial):
    return part_of_the_batch(trial, lambda ids: np.tile(ids[:, : TIME_STEPS // 2], (1, 3))[:, :TIME_STEPS])


def loss_of_an_earlier_block(trial):
    kept = {}

    def instead(train, batch, number):
        if number not in kept:
            kept[number] = train(batch)
        return kept[number]

    return instead


def step_left_out_while_timed(trial):
    left_out = every_second_step_left_out(trial)

    def instead(train, batch, number):
        callers = [sys._getframe(depth).f_code.co_name for depth in range(2, 5)]
        return left_out(train, batch, number) if "time_blocks" in callers else train(batch)

    return instead


MISTAKES = {
    every_second_step_left_out: {"work", "update", "loss"},
    no_backward_pass_and_no_update: {"work", "update"},
    half_of_the_batch: {"loss"},
    half_of_the_sequence: {"loss"},
    loss_of_an_earlier_block: {"work"},
    step_left_out_while_timed: {"replay"},
}


# ptb by default: test_clipping_is_held_on_both_sides_of_its_bound, where no clipping is wrong.
@pytest.mark.parametrize("workload", ["stacked_lm", pytest.param("ptb", marks=pytest.mark.slow)])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_row_as_it_is_holds_in_every_mode(part_of, trials, framework, workload):
    for mode in ("train", "forward", "stack"):
        part = part_of(trials(framework, workload), framework, mode, workload)
        assert part["status"] == "ok" and part["blocks_ms"], f"{mode}: {part['reason']}"


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_work_left_out_after_the_proven_steps_is_failed(part_of, trials, planted, framework, mistake):
    trial = trials(framework, "stacked_lm")
    planted(trial, mistake(trial))
    part = part_of(trial, framework)
    assert part["status"] == "failed" and "blocks_ms" not in part
    assert set(part["proof"]["failed"]) & MISTAKES[mistake], part["reason"]


@pytest.mark.parametrize("framework", ["tensorflow", "torch"])
def test_update_in_a_thread_that_the_clock_does_not_wait_for_is_failed(part_of, trials, planted, framework):
    trial, pool, update = trials(framework, "stacked_lm"), ThreadPoolExecutor(max_workers=1), [None]

    def instead(train, batch, number):
        if update[0]:
            update[0].result()
        loss, begun = trial.forward(batch), threading.Event()
        update[0] = pool.submit(lambda: (begun.set(), time.sleep(0.5 * (number == BLOCK)), train(batch)))
        begun.wait()  # a busy machine may take longer than THREAD_S to start it
        return loss

    own_restore = trial.restore
    trial.restore = lambda: (update[0] and update[0].result(), own_restore())  # else it shows in the proof already
    planted(trial, instead)
    part = part_of(trial, framework)
    assert "clock" in part["proof"]["failed"] and "a thread of Python was at work" in part["reason"]


# --- the stack alone ----------------------------------------------------------------------------------------------------


def stack_without_gradients(results):
    return lambda batch: results(batch)[:2]


def stack_with_the_inputs_gradient_alone(results):
    return lambda batch: results(batch)[:3]


def stack_with_the_gradients_of_its_first_call(results):
    kept = []

    def first(batch):
        loss, hidden, *gradients = results(batch)
        kept[:] = kept or gradients
        return [loss, hidden, *kept]

    return first


@pytest.mark.parametrize(
    "mistake",
    [stack_without_gradients, stack_with_the_inputs_gradient_alone, stack_with_the_gradients_of_its_first_call],
)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_stack_timed_without_its_backward_pass_is_failed(part_of, trials, monkeypatch, framework, mistake):
    trial = trials(framework, "stacked_lm")
    monkeypatch.setattr(trial, "stack_alone", mistake(trial.stack_alone))
    part = part_of(trial, framework, "stack")
    assert part["proof"]["failed"] == ["gradients"], part["reason"]


# --- clipping and rates -------------------------------------------------------------------------------------------------


def always_to_the_bound(framework, monkeypatch):
    """Gradients whose norm is below the bound are made longer."""
    import tensorflow as tf

    if framework == "tensorflow":
        clip = tf.clip_by_global_norm
        scaled = lambda gradients, bound: clip([1e6 * g for g in gradients], bound)  # noqa: E731
        monkeypatch.setattr(tf, "clip_by_global_norm", scaled)
    elif framework == "torch":
        import torch

        monkeypatch.setattr(torch.Tensor, "clamp", lambda norm, min: norm)
    else:
        import jax.numpy as jnp

        monkeypatch.setattr(jnp, "maximum", lambda norm, bound: norm)


def never(framework, monkeypatch):
    """Gradients whose norm is above the bound are left as they are."""
    import tensorflow as tf

    if framework == "tensorflow":
        monkeypatch.setattr(tf, "clip_by_global_norm", lambda gradients, bound: (gradients, None))
    elif framework == "torch":
        import torch

        monkeypatch.setattr(torch.Tensor, "clamp", lambda norm, min: norm.new_tensor(min))
    else:
        import jax.numpy as jnp

        monkeypatch.setattr(jnp, "maximum", lambda norm, bound: bound)


@pytest.mark.parametrize("workload, wrong", [("ptb", always_to_the_bound), ("below", never), ("below", None)])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_clipping_is_held_on_both_sides_of_its_bound(part_of, monkeypatch, framework, workload, wrong):
    trial = build(framework, ("SGD", 1.0), **PTB | {"clip_norm": CLIP_NORM if workload == "ptb" else HIGHER})
    if wrong:
        wrong(framework, monkeypatch)
    part = part_of(trial, framework, workload=workload)
    assert part["proof"]["failed"] == ["clipping"] * bool(wrong), part["reason"]


@pytest.mark.parametrize("factor, failed", [(1.0, []), (1.2, ["update"]), (0.8, ["update"])])
def test_rate_a_fifth_off_is_seen_at_fp16(part_of, factor, failed):
    part = part_of(build("tensorflow", ("Adam", factor * LEARNING_RATE), "fp16"), "tensorflow", precision="fp16")
    assert [name for name in part["proof"]["failed"] if name != "loss"] == failed, part["reason"]
