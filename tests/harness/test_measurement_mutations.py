"""No row is "ok" without its proof: whichever check the ways of a row leave out (harness/measure: steps.py, requests.py, fit.py,
training.py, and what they share, row_process.py), a row with that mistake comes out ok.

The row is proof_cases.FakeRow as a trial of its own framework, which counts no time: a case takes milliseconds.
"""

import ast
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from harness.frameworks import runtimes
from harness.measure import (
    clocks,
    fit,
    latency,
    measurement,
    references,
    requests,
    row_process,
    steps,
    training,
    training_proof,
)
from harness.measure.proof import CURVE_STEPS, TO_HOST_LIMIT, UPDATE_STEPS, Kernel
from harness.record import machine
from tests.harness import mutants
from tests.harness.proof_cases import PROFILE, REFERENCE, FakeRow

FILES = (row_process, steps, requests, fit, training, measurement)  # each after those that it imports
EXPECTED_OPS = {"ops": {r"_?\w*MatMul": 4}, "rest_ops": {"Softmax": 1}}  # a stack alone has no softmax
WITHOUT_SOFTMAX = {"ops": {"MatMul": 5}, "kernels": {}}


class OnDevice:
    """A loss that is no number before it is brought to the host."""

    made = 0  # of all

    def __init__(self, value):
        self.value = value
        OnDevice.made += 1

    def __float__(self):
        return float(self.value)


class FakeRuntime:
    """A framework in which everything happens at once."""

    name, to_host_bytes, profile_of, read_s, tensor_type = "tensorflow", 0, PROFILE, 0.0, OnDevice
    waits = ()
    does_half = 1  # 2: of every two steps in a row only one does its work

    def on_device(self, tensor):
        return True

    def sync(self):
        pass

    def to_numpy(self, losses):
        time.sleep(self.read_s * (len(losses) == 1))
        return np.array([getattr(loss, "value", loss) for loss in losses])

    def reset_memory_peak(self):
        pass

    def profile(self, function):
        before = OnDevice.made
        loss = function()
        launches = 10 * (OnDevice.made - before)
        launches //= self.does_half if launches > 10 else 1
        alone = isinstance(loss, OnDevice) and loss.value == REFERENCE["stack_losses"][0]
        return {
            **(WITHOUT_SOFTMAX if alone else self.profile_of),
            "to_host_bytes": self.to_host_bytes,
            "launches": launches,
        }

    def environment(self):
        return {}


class Trial(FakeRow):
    """FakeRow as what is timed, too: batch k has the k-th loss, in whatever mode."""

    batches = stack_batches = np.arange(CURVE_STEPS)
    inputs, labels = np.zeros((5 * 4, 100), np.float32), np.zeros(5 * 4, np.int64)  # of five batches

    def __init__(self):
        super().__init__()
        self.timed = {"train": self.losses, "forward": self.forward_curve(), "stack": self.alone_losses}
        self.server = Server()
        self.differs = {}  # of a whole training from the configured one: by the check that finds it
        self.returns, self.traces, self.epochs, self.perplexity = OnDevice, 1, [2.0, 1.0], 9.0

    def forward_curve(self):
        return REFERENCE["forward_losses"].astype(np.float32)

    def __getattribute__(self, name):
        if name in ("train", "forward", "stack_alone"):  # FakeRow has losses under one of these names
            curve = self.timed[name.removesuffix("_alone")]
            return lambda k: [self.returns(curve[k])] if "_" in name else self.returns(curve[k])
        return super().__getattribute__(name)

    def forward_losses(self, count):
        return vars(self)["forward"][:count]

    def timed_steps(self, count):
        pass

    def reference_step(self, setup, number, update):
        return self.losses[0], {name: array / UPDATE_STEPS for name, array in REFERENCE["updates"].items()}

    def train_epoch(self, batches, rate):
        pass

    def numpy(self, tensor):
        return tensor


STEPS = [np.full((1, 1, 3), value, np.float32) for value in (1.0, 2.0, 4.0, 8.0)]  # requests of a stream
ANSWERS = {"answers": np.cumsum(STEPS, axis=0)}


class Server:
    """Adds up what it is asked, whoever asks, unless `change` makes another answer of that."""

    def __init__(self):
        self.restore()
        self.before, self.was_timed = self.sum, False
        self.change = lambda server, request, answer: answer

    def restore(self):
        self.sum = np.zeros((1, 1, 3), np.float32)

    def answer(self, request):
        self.asked_by = sys._getframe(1).f_code.co_name
        self.was_timed |= self.asked_by == "time_requests"
        self.sum = self.sum + request
        found, self.before = self.change(self, request, self.sum), self.sum
        return found


def answering(change):
    return lambda trial, runtime: setattr(trial.server, "change", change)


def change_at(array: np.ndarray, step: int, by: float) -> np.ndarray:
    changed = array.copy()
    changed[step] *= by
    return changed


# mistake: (way, mode, the proof that it fails, how it is planted in the trial and the runtime)
MISTAKES = {
    "an earlier answer": ("requests", "request", "outputs", answering(lambda s, request, answer: s.before)),
    "a state that is dropped": ("requests", "request", "outputs", answering(lambda s, request, answer: request)),
    "an earlier answer while the clock runs": (
        "requests", "request", "outputs", answering(lambda s, r, a: s.before if s.asked_by == "time_requests" else a)),
    "an earlier answer after timing": (
        "requests", "request", "outputs",
        answering(lambda s, r, a: s.before if s.was_timed and s.asked_by != "time_requests" else a)),
    "an answer on the device": ("requests", "request", "host", answering(lambda s, r, answer: answer.view(np.ma.MaskedArray))),
    "another kernel of a server": (
        "requests", "request", "kernel", lambda t, r: setattr(r, "profile_of", {"ops": {}, "kernels": {}})),
    "a server that goes on after its answer": (
        "requests", "request", "clock", lambda t, r: setattr(r, "sync", lambda: time.sleep(1.5 * clocks.SHORT_LAG_LIMIT_S))),
    "logits": ("steps", "forward", "outputs", lambda t, r: t.shown.update(logits=t.shown["logits"] * 2)),
    "forward losses": ("steps", "forward", "loss", lambda t, r: vars(t).update(forward=change_at(LOSSES_OF(t), 4, 2.0))),
    "timed losses": ("steps", "forward", "loss", lambda t, r: t.timed.update(forward=change_at(t.timed["forward"], 4, 2.0))),
    "the stack": ("steps", "stack", "outputs", lambda t, r: t.alone["hidden"].put(7, 1.0)),
    "gradients": ("steps", "train", "gradients", lambda t, r: t.gradients.pop("dense_0/bias")),
    "another callable": ("steps", "train", "callable", lambda t, r: setattr(t, "difference", "node 3")),
    "a number for a loss": ("steps", "train", "host", lambda t, r: setattr(t, "returns", np.float32)),
    "a loss that is read": ("steps", "train", "host", lambda t, r: setattr(t, "returns", read_and_returned)),
    "copies": ("steps", "train", "host", lambda t, r: setattr(r, "to_host_bytes", 10**6)),
    "another kernel": ("steps", "train", "kernel", lambda t, r: setattr(r, "profile_of", {"ops": {}, "kernels": {}})),
    "another head": ("steps", "train", "kernel", lambda t, r: setattr(r, "profile_of", WITHOUT_SOFTMAX)),
    "the same masks": ("steps", "train", "dropout", lambda t, r: with_dropout(t, r, losses=lambda n: np.ones((1, n)))),
    "masks of no op": ("steps", "train", "dropout", lambda t, r: with_dropout(t, r, profile=PROFILE)),
    "one mask in all blocks": ("steps", "train", "dropout", lambda t, r: with_dropout(t, r, blocks_differ=False)),
    "masks of no op in fit": ("fit", "fit", "dropout", lambda t, r: with_dropout(t, r, profile=PROFILE)),
    "every second step": ("steps", "forward", "work", lambda t, r: setattr(r, "does_half", 2)),
    "a clock too early": ("steps", "train", "clock", lambda t, r: setattr(r, "read_s", 1.5 * clocks.SHORT_LAG_LIMIT_S)),
    "logits of fit": ("fit", "fit", "outputs", lambda t, r: t.shown.update(logits=t.shown["logits"] * 2)),
    "an update of fit": ("fit", "fit", "update", lambda t, r: t.updates.pop("dense_0/bias")),
    "a later process": ("later", "train", "loss", lambda t, r: setattr(t, "train_steps", lambda count: 2 * t.losses[:count])),
    "another callable later": ("later", "train", "callable", lambda t, r: setattr(t, "difference", "node 3")),
    "a later stack": ("later", "stack", "loss", lambda t, r: distort_what_is_read_first(r)),
    "copies in fit": ("fit", "fit", "host", lambda t, r: setattr(r, "to_host_bytes", IN_FIT + 1)),
    "another kernel in fit": ("fit", "fit", "kernel", lambda t, r: setattr(r, "profile_of", {"ops": {}, "kernels": {}})),
    "another callable in fit": ("fit", "fit", "callable", lambda t, r: setattr(t, "difference", "node 3")),
    "a fit traced anew": ("fit", "fit", "callable", lambda t, r: setattr(t, "retraces", True)),
    "NaN in fit": ("fit", "fit", "loss", lambda t, r: setattr(t, "epochs", [2.0, np.nan])),
    "an epoch of fit": ("fit", "fit", "training", lambda t, r: t.differs.update(differs_in_an_epoch="half of the data")),
    "counts of fit": ("fit", "fit", "training", lambda t, r: t.differs.update(differs_in_counts="an epoch less")),
    "accuracies of fit": ("fit", "fit", "training", lambda t, r: t.differs.update(differs_in_accuracy="half of the test")),
    "the rate of fit": ("fit", "fit", "training", lambda t, r: t.differs.update(differs_in_rate="no decay")),
    "the rate of a training": ("training", "fit", "training", lambda t, r: t.differs.update(differs_in_step="no decay")),
    "a training's schedule": ("training", "fit", "training", lambda t, r: t.differs.update(differs_in_schedule="a half")),
    "perplexities": ("training", "fit", "training", lambda t, r: t.differs.update(differs_in_perplexity="a half")),
    "gradients of a training": ("training", "fit", "gradients", lambda t, r: t.gradients.pop("dense_0/bias")),
    "NaN in a training": ("training", "fit", "loss", lambda t, r: setattr(t, "epochs", [2.0, np.nan])),
    "NaN in its perplexity": ("training", "fit", "loss", lambda t, r: setattr(t, "perplexity", np.inf)),
}  # fmt: skip


RANDOM = {**PROFILE, "ops": {**PROFILE["ops"], "RandomUniform": 3}}


def with_dropout(trial, runtime, losses=None, profile=RANDOM, blocks_differ=True) -> None:
    """Make it a trial of a workload with dropout."""
    normal = np.random.default_rng(1).normal
    trial.reference = REFERENCE | {"dropout_losses": normal(size=(1, 32)), "dropout_draws": 32, "dropout_places": 3}
    trial.dropout_losses, runtime.profile_of = losses or (lambda count: normal(size=(1, count))), profile
    if blocks_differ:
        generator = np.random.default_rng(2)
        trial.returns = lambda value: OnDevice(value * np.float32(generator.uniform(0.9, 1.1)))


def distort_what_is_read_first(runtime) -> None:
    """The losses of several steps that are brought to the host before any others."""
    read, once = runtime.to_numpy, [2.0]
    runtime.to_numpy = lambda losses: read(losses) * (once.pop() if len(losses) > 1 and once else 1.0)


BATCH_SIZE = 4
IN_FIT = UPDATE_STEPS * (TO_HOST_LIMIT + 2 * BATCH_SIZE * (100 * 4 + 8))  # what a fit of those steps may copy


def read_and_returned(value):
    loss = OnDevice(value)
    return loss if float(loss) else None


def LOSSES_OF(trial: Trial) -> np.ndarray:
    return vars(trial)["forward"]


@pytest.fixture
def parts(tmp_path, monkeypatch):
    """Callable: (module with a Measurement, way, how a mistake is planted) → the parts of all modes."""
    path = tmp_path / "reference.npz"
    references.save_reference(path, REFERENCE | ANSWERS)
    monkeypatch.setattr(machine, "facts", lambda device: {})
    monkeypatch.setattr(clocks, "WINDOW_S", 1e-5)
    job = {
        "device": "cpu", "precision": "fp32", "process": 0, "matmul_flops": None, "reference": path,
        "protocol": {"WARMUP_BATCHES": 1, "WARMUP_LIMIT_S": 0.0, "TIMED_BATCHES": 6, "BLOCKS": 2, "MIN_BLOCK_S": 0.0,
                     "BATCH_SIZE": BATCH_SIZE, "REQUESTS": 20},
    }  # fmt: skip

    def run(module, way: str, plant, **expected_ops) -> dict[str, dict]:
        trial, runtime = Trial(), FakeRuntime()
        plant(trial, runtime)
        monkeypatch.setattr(runtimes, "make", lambda *_: runtime)
        for check in (name for name in vars(training_proof) if name.startswith("differs_in_")):
            monkeypatch.setattr(training_proof, check, lambda *_, check=check: trial.differs.get(check, ""))
        process = {**job, "process": int(way == "later")}
        row_process = module.Measurement(process, SimpleNamespace(facts={}), {**EXPECTED_OPS, **expected_ops})
        if trial.reference is not REFERENCE:  # of another case
            row_process.reference = trial.reference
        if way in ("steps", "later"):
            return row_process.steps(trial, {"forward": 1, "train": 3, "stack": 2}, 4, "sequences/s")

        if way == "requests":
            return row_process.requests(trial.server, STEPS)

        def train_keras(clock, plan):
            clock.begin(), clock.trained()
            trial.traces += hasattr(trial, "retraces")
            return {"losses": trial.epochs, "accuracy": {"acc": 0.5}, "epoch_accuracy": {"acc": [0.5]}}

        def train_once(timed):
            epoch_s = [timed(lambda: None)[0] + 1e-3 for _ in trial.epochs]
            return {"losses": trial.epochs, "perplexity": {"test": trial.perplexity}, "epoch_s": epoch_s,
                    "batches_per_epoch": 2, "items_per_batch": 4, "unit": "words/s"}  # fmt: skip

        if way == "fit":
            plan = training_proof.Plan({}, np.zeros((8, 1)), np.zeros(8), 1, {}, None)
            about = dict(plan=plan, batch_size=4, flops=1, unit="images/s")
            return row_process.fit(trial, train_keras, None, **about)
        return row_process.training(trial, train_once, None)

    return run


def complaints(parts, module) -> Iterator[str]:
    """What is not as it has to be, where the module's Measurement makes the parts; the mistakes first, which find most."""
    for mistake, (way, mode, proof, plant) in MISTAKES.items():
        part = parts(module, way, plant)[mode]
        if part["status"] != "failed" or proof not in part["proof"]["failed"] or f"{proof}: " not in part["reason"]:
            yield f"{mistake}: {part['status']}, {part['reason']}"
        if {"blocks_ms", "fit_s", "perplexity", "accuracy", "latency", "one_step", "joules"} & part.keys():
            yield f"{mistake}: has figures"
    for way in ("steps", "later", "fit", "training", "requests"):
        for mode, part in parts(module, way, lambda trial, runtime: None).items():
            if part["status"] != "ok" or not part["blocks_ms"]:
                yield f"{way}, {mode}: {part['reason']}"
    chaotic = {"loss_sensitivity": np.array([0.0, 1.0, 1.0, 2000.0, 2000.0, 2000.0])}
    for way in ("steps", "later"):
        for mode, part in parts(module, way, lambda t, r: setattr(t, "reference", REFERENCE | chaotic)).items():
            noted = any("losses of 3 of 6 steps" in note for note in part["notes"])
            if part["status"] != "ok" or noted != (mode == "train"):
                yield f"chaotic, {way}, {mode}: {part['notes']}"
    by_float16 = PROFILE | {"kernels": {**PROFILE["kernels"], "lstm_wavefront_forward_by_float16": 1.0}}
    for mode, part in parts(module, "steps", lambda t, r: setattr(r, "profile_of", by_float16)).items():
        if mode != "stack" and not any("float16" in note for note in part["notes"]):  # a stack has a profile of its own
            yield f"by float16, {mode}: {part['notes']}"
    for way in ("steps", "fit", "training"):
        for mode, part in parts(module, way, with_dropout).items():
            if part["status"] != "ok" and mode not in ("forward", "stack"):
                yield f"with dropout, {way}, {mode}: {part['reason']}"


def is_check(function: str, node: ast.AST) -> bool:
    """A call of the proof, or a condition on it."""
    if isinstance(node, ast.Expr):
        return ast.unparse(node).startswith("proof.")
    conditions = ("proof", "np.isfinite", "mode ==")
    return isinstance(node, ast.If | ast.IfExp) and any(word in ast.unparse(node.test) for word in conditions)


MUTANTS = [(file, *mutant) for file in FILES for mutant in mutants.mutants(Path(file.__file__), is_check)]


@pytest.fixture
def measurement_with(tmp_path, monkeypatch):
    """Callable: (one of FILES, a tree in place of its own) → measurement.py anew on top of that."""

    def load(changed: ModuleType, tree: ast.Module) -> ModuleType:
        for file in FILES[FILES.index(changed) :]:
            own = tree if file is changed else ast.parse(Path(file.__file__).read_text())
            copy = mutants.load(own, tmp_path / Path(file.__file__).name)
            monkeypatch.setitem(sys.modules, file.__name__, copy)
        return copy

    return load


def test_joules_are_of_what_is_timed_and_a_row_that_fails_has_none(parts, monkeypatch):
    monkeypatch.setattr(latency, "JOULES_S", 0.0)
    monkeypatch.setattr(latency, "BUSY", 0.0)
    for way in ("steps", "fit", "training"):
        assert not any("joules" in part for part in parts(measurement, way, lambda trial, runtime: None).values()), way
    readings = iter(range(0, 10**6, 12))
    monkeypatch.setattr(measurement.Measurement, "_meter", lambda self: next(readings))
    batches = 2 * 6 + 6  # of two blocks, and one more where both are late
    for mode, part in parts(measurement, "steps", lambda trial, runtime: None).items():
        assert part["joules"]["batch"] in (1.0, 12 / batches), mode
    [whole] = parts(measurement, "fit", lambda trial, runtime: None).values()
    assert whole["joules"] == {"training": 12, "epoch": 12.0}
    [whole] = parts(measurement, "training", lambda trial, runtime: None).values()
    assert whole["joules"] == {"training": 12, "epoch": 12 / len(whole["epoch_s"])}
    for mistake in ("timed losses", "NaN in fit", "NaN in a training"):
        way, mode, _, plant = MISTAKES[mistake]
        failed = parts(measurement, way, plant)[mode]
        assert failed["status"] == "failed" and "joules" not in failed


def test_single_steps_are_timed_in_the_first_process_alone_and_a_row_that_fails_has_none(parts, monkeypatch):
    monkeypatch.setattr(clocks, "time_single_steps", lambda *_, **__: [0.25] * 100)
    for part in parts(measurement, "steps", lambda trial, runtime: None).values():
        assert part["one_step"] == {"p50_ms": 250.0, "p99_ms": 250.0, "steps": 100}
    assert not any("one_step" in part for part in parts(measurement, "later", lambda trial, runtime: None).values())
    way, mode, _, plant = MISTAKES["timed losses"]
    failed = parts(measurement, way, plant)[mode]
    assert failed["status"] == "failed" and "one_step" not in failed


@pytest.mark.parametrize(("copied", "failed"), [(IN_FIT, []), (IN_FIT + 1, ["host"])])
def test_fit_may_copy_twice_what_it_was_handed_for_these_steps_and_no_more(parts, copied, failed):
    part = parts(measurement, "fit", lambda trial, runtime: setattr(runtime, "to_host_bytes", copied))["fit"]
    assert part["proof"]["failed"] == failed
    assert not failed or f"{copied} bytes were copied to the host, limit {IN_FIT}" in part["reason"]


@pytest.mark.parametrize(("copied", "failed"), [(TO_HOST_LIMIT, []), (TO_HOST_LIMIT + 1, ["host"])])
def test_step_may_copy_its_metrics_and_no_input(parts, copied, failed):
    for part in parts(measurement, "steps", lambda trial, runtime: setattr(runtime, "to_host_bytes", copied)).values():
        assert part["proof"]["failed"] == failed


@pytest.mark.parametrize("more", [0, 1])
@pytest.mark.parametrize(("mode", "passes"), [("forward", 1), ("train", 2), ("stack", 2)])
def test_step_may_copy_the_lengths_that_its_expected_ops_name_once_per_pass(parts, mode, passes, more):
    allowed = TO_HOST_LIMIT + 3 * passes * 4 * BATCH_SIZE
    part = parts(
        measurement,
        "steps",
        lambda trial, runtime: setattr(runtime, "to_host_bytes", allowed + more),
        calls_copying_lengths=3,
    )[mode]
    assert part["proof"]["failed"] == (["host"] if more else [])
    assert not more or f"limit {allowed}" in part["reason"]


def test_a_row_that_copies_its_mask_may_copy_no_more_than_that():
    """The int32 mask of 20 sequences of 20 steps, and nothing for the lengths beyond what any step may copy."""
    assert Kernel(copies_mask=True).lengths_bytes("train", 20, 400) == 1600
    assert Kernel().lengths_bytes("train", 20, 400) == 0


@pytest.mark.parametrize(
    ("row", "calls"), [("jax_cudnn", 3), ("keras_jax_cudnn", 3), ("jax_scan", 0), ("keras_jax", 0)]
)
def test_rows_that_call_cudnn_under_jax_may_copy_the_lengths_in_every_layer(row, calls):
    from models import rows

    assert Kernel(**rows.LANGUAGE_MODEL[row].expected_ops(3, 50, "gpu")).calls_copying_lengths == calls


def test_planted_mistakes_fail_by_name_and_honest_rows_pass(parts):
    assert list(complaints(parts, measurement)) == []


@pytest.mark.parametrize("file", FILES)
def test_the_copy_without_a_change_has_nothing_to_complain_of(file, parts, measurement_with):
    copy = measurement_with(file, ast.parse(Path(file.__file__).read_text()))
    assert copy.Measurement is not measurement.Measurement and list(complaints(parts, copy)) == []


@pytest.mark.parametrize(
    ("file", "tree_of"),
    [
        pytest.param(file, tree_of, id=ascii(missing), marks=[pytest.mark.slow] * (k % 3 > 0))
        for k, (file, missing, tree_of) in enumerate(MUTANTS)
    ],
)
def test_a_row_whose_check_is_left_out_comes_out_ok(file, tree_of, parts, measurement_with):
    mutant = measurement_with(file, tree_of())
    try:
        found = any(complaints(parts, mutant))
    except Exception:  # a part without its proof cannot be put together
        found = True
    assert found
