"""The defects that LSTM benchmarks were published with: each has a wrong implementation here that the suite marks failed.

DEFECTS says where. Those that no proof of numbers can see have theirs below: a clock that stops too early, a step that
brings tensors to the host, an id that is no word. Every model goes through harness.measure.measurement.Measurement, as a row's
process does, in the framework that the defect was found in.
"""

import importlib
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

from harness.measure import clocks, references
from harness.measure.proof import TO_HOST_LIMIT, Proof
from harness.record import schema
from models import rows
from models.reference import expected
from tests import cases, jax_cases, torch_cases
from tests.harness.test_planted_mistakes import MISTAKES

# Defect: the tests that plant it. "mistake_…" is a case of test_planted_mistakes, with the proofs that it fails.
DEFECTS = {
    "training rows that ran forward only": [
        "test_planted_mistakes.mistake_training_that_runs_forward_only",
        "test_torch_mistakes.test_training_that_runs_forward_only_is_caught",
        "test_jax_mistakes.test_training_that_runs_forward_only_is_caught",
    ],
    "a scripted LSTM that never updated its state, so that no gradient reached it": [
        "test_known_defects.test_scripted_lstm_that_never_updates_its_state_is_failed",
        "test_planted_mistakes.mistake_state_never_updated",
        "test_planted_mistakes.mistake_no_gradient_through_time",
        "test_torch_mistakes.test_weights_without_a_gradient_stop_the_row",
        "test_jax_mistakes.test_gradient_that_is_cut_off_is_caught",
    ],
    "a clock stopped without a device sync": [
        "test_known_defects.test_clock_that_stops_before_the_device_does_is_failed",
        "test_clocks.test_device_is_synchronised_around_a_block_and_never_inside",
    ],
    "all logits copied to the host inside the timed region": [
        "test_known_defects.test_step_that_brings_its_logits_to_the_host_is_failed",
        "test_known_defects.test_step_that_returns_its_loss_as_a_number_is_failed",
        "test_gpu_host_copies.test_copy_of_the_logits_is_seen_and_the_rows_own_steps_copy_nothing",
    ],
    "time-major outputs flattened against batch-major labels": [
        "test_planted_mistakes.mistake_time_major_outputs_against_batch_major_labels",
        "test_torch_mistakes.test_batch_major_labels_against_time_major_outputs_are_caught",
        "test_jax_mistakes.test_batch_major_labels_against_time_major_outputs_are_caught",
    ],
    "the final state of layer n fed as the initial state of layer n+1": [
        "test_planted_mistakes.mistake_state_of_one_layer_fed_to_the_next",
        "test_torch_mistakes.test_state_leaked_from_a_layer_into_the_next_is_caught",
        "test_jax_mistakes.test_state_leaked_from_a_layer_into_the_next_is_caught",
    ],
    "another optimizer or learning rate: Adam at 1.0 against 1e-3": [
        "test_planted_mistakes.mistake_learning_rate_of_one",
        "test_planted_mistakes.mistake_another_optimizer",
        "test_planted_mistakes_in_fit.test_learning_rate_of_one_fails_the_update_and_the_losses",
        "test_torch_mistakes.test_another_learning_rate_is_caught",
        "test_jax_mistakes.test_another_learning_rate_is_caught",
    ],
    "an out-of-range token id": [
        "test_known_defects.test_id_that_is_no_word_stops_the_reference_and_so_every_row",
        "test_known_defects.test_words_numbered_from_one_are_failed",
    ],
    "a dense layer left out of the update": [
        "test_planted_mistakes.test_layer_outside_the_update_fails_it_with_an_error_of_exactly_one",
        "test_planted_mistakes_in_fit.test_layer_outside_the_update_of_fit_errs_by_exactly_one",
        "test_torch_mistakes.test_tensor_left_out_of_the_update_is_caught",
        "test_jax_mistakes.test_tensor_left_out_of_the_update_is_caught",
    ],
}
ROOMS = {"test_torch_mistakes": "tests.models", "test_jax_mistakes": "tests.models", "test_gpu_host_copies": "tests"}


@pytest.mark.parametrize("defect", DEFECTS)
def test_every_known_defect_is_planted_somewhere(defect):
    for name in DEFECTS[defect]:
        module, test = name.split(".")
        found = getattr(importlib.import_module(f"{ROOMS.get(module, 'tests.harness')}.{module}"), test)
        assert not test.startswith("mistake_") or {f.__name__: failed for f, failed in MISTAKES.items()}[found.__name__]


@pytest.fixture(scope="module")
def reference_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("reference") / "small.npz"
    references.save_reference(path, cases.language_model_reference())
    return path


@pytest.fixture
def parts_of(reference_path, monkeypatch, tensorflow_runtime):
    """Callable: (trial of tests.cases' size, framework, expected_ops) → the parts of its modes, from a row's way."""

    def run(trial, framework: str, expected_ops: dict, modes=("forward", "train")) -> dict[str, dict]:
        row_process = cases.row_process(monkeypatch, framework, expected_ops, reference_path, blocks_of=7)
        monkeypatch.setattr(clocks, "WINDOW_S", 1e-4)  # of steps that seem to take no time, many fill a window
        return row_process.steps(trial, dict.fromkeys(modes, 1), cases.BATCH, "sequences/s")

    return run


def failed(part: dict) -> set[str]:
    """The proofs that a part failed; it has no times then, and its reason says which."""
    names = set(part["proof"]["failed"])
    assert part["status"] == ("failed" if names else "ok"), part["reason"]
    assert ("blocks_ms" in part) == (not names) and all(f"{name}: " in part["reason"] for name in names)
    return names


def tensorflow_trial():
    return cases.language_model("while_loop", "fp32"), rows.TENSORFLOW["while_loop"]


def torch_trial(row: str = "torch_lstm"):
    from models import rows

    return torch_cases.language_model(row, "fp32"), rows.PYTORCH[row]


def jax_trial():
    from models import rows

    pytest.importorskip("jax")
    return jax_cases.language_model("jax_scan", "fp32"), rows.LANGUAGE_MODEL["jax_scan"]


TRIALS = {"tensorflow": tensorflow_trial, "torch": torch_trial, "jax": jax_trial}


def expected_ops_of(made) -> dict:
    return made.expected_ops(cases.LAYERS, cases.STEPS, "cpu")


@pytest.mark.parametrize("framework", TRIALS)
def test_row_as_it_is_reads_nothing_and_leaves_nothing_running(parts_of, framework):
    trial, made = TRIALS[framework]()
    for mode, part in parts_of(trial, framework, expected_ops_of(made), ("forward", "train", "stack")).items():
        assert failed(part) == set()
        new = schema.new_record(
            benchmark="ptb", row="its_row", mode=mode, device="cpu", precision="fp32", config={"CONFIG": "small"}
        )
        record = schema.validate(schema.merge_process(new, part), "a record")
        assert set(TRIALS) & record["environment"].keys() == {framework} and len(record["losses"]) == 7


def test_scripted_lstm_that_never_updates_its_state_is_failed(parts_of, monkeypatch):
    from models.pytorch.stacks import ScriptedPrimitiveStack
    from tests.models.test_torch_mistakes import ForgetfulLSTM

    monkeypatch.setattr(ScriptedPrimitiveStack, "unrolled", ForgetfulLSTM)
    trial, made = torch_trial("torch_jit")
    parts = parts_of(trial, "torch", expected_ops_of(made))
    assert failed(parts["forward"]) == {"outputs", "loss"}
    assert failed(parts["train"]) == {"outputs", "loss", "gradients", "update"}


# The clock


class Queue:
    """What a GPU is to its host: steps are put into a queue, and a loss is there once the queue has come to it."""

    def __init__(self, trial, takes_s: float):
        self._trial, self._takes_s, self._line = trial, takes_s, ThreadPoolExecutor(max_workers=1)
        self.wait()

    def __getattr__(self, name):
        return getattr(self._trial, name)

    def forward(self, batch):
        return Pending(self._line.submit(self._step, batch))

    def _step(self, batch):
        time.sleep(self._takes_s)
        return self._trial.forward(batch)

    def wait(self):
        self._line.submit(int).result()


class Pending(SimpleNamespace):
    """A loss on its way."""

    def __init__(self, future):
        super().__init__(future=future, dtype="float32")

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self.future.result(), dtype)


@pytest.mark.parametrize("waits", [True, False])
def test_clock_that_stops_before_the_device_does_is_failed(parts_of, monkeypatch, waits):
    model, made = tensorflow_trial()
    queue = Queue(model, takes_s=2 * clocks.SHORT_LAG_LIMIT_S)
    runtime = type(cases.make_runtime("cpu", "fp32"))
    monkeypatch.setattr(runtime, "sync", lambda self: queue.wait() if waits else None)
    profile = runtime.profile

    def waiting(self, function):
        queue.wait()  # an earlier step that runs in this one's profile would fail by its ops alone
        return profile(self, lambda: (function(), queue.wait()))

    monkeypatch.setattr(runtime, "profile", waiting)
    part = parts_of(queue, "tensorflow", expected_ops_of(made), ["forward"])["forward"]
    assert failed(part) == (set() if waits else {"clock"})


def test_noise_in_one_block_is_no_unfinished_work_and_a_nan_is_no_excuse():
    for lags, fails in (
        ([0.0, 5.0], False),
        ([0.01, 0.003], False),
        ([0.011, 0.0031], True),
        ([0.0031, 0.0031], False),
    ):
        proof = Proof("fp32")
        proof.clock(lags, [0.01, 0.003], ["", ""])
        assert list(proof.failures) == ["clock"] * fails, lags
    proof.clock([float("nan")], [0.01], [""])
    assert "clock" in proof.failures


# What is brought to the host


def hidden_to_host(trial, framework: str):
    """A step that reads a large tensor besides: here the embedding, in place of logits which no step gives away."""
    read = {
        "tensorflow": lambda: trial.embedding.value.numpy(),
        "torch": lambda: trial.masters[0].detach().cpu().numpy(),
        "jax": lambda: np.asarray(trial.parameters[0]),
    }[framework]
    step = trial.train

    def reading(batch):
        loss = step(batch)
        assert read().size > TO_HOST_LIMIT
        return loss

    trial.train = reading


@pytest.mark.parametrize("framework", TRIALS)
def test_step_that_brings_its_logits_to_the_host_is_failed(parts_of, framework):
    trial, made = TRIALS[framework]()
    hidden_to_host(trial, framework)
    parts = parts_of(trial, framework, expected_ops_of(made))
    assert failed(parts["forward"]) == set() and failed(parts["train"]) == {"host"}
    assert "host: a step reads a tensor to the host" in parts["train"]["reason"]


@pytest.mark.parametrize("framework", TRIALS)
def test_step_that_looks_for_a_nan_on_the_host_is_failed(parts_of, framework):
    trial, made = TRIALS[framework]()
    step = trial.forward

    def looking(batch):
        loss = step(batch)
        return None if bool(loss != loss) else loss

    trial.forward = looking
    part = parts_of(trial, framework, expected_ops_of(made), ["forward"])["forward"]
    assert failed(part) == ({"host", "kernel"} if framework == "jax" else {"host"}), (
        "JAX compares in a program of its own"
    )


@pytest.mark.parametrize(
    "way", [float, lambda loss: loss.numpy(), lambda loss: np.frombuffer(memoryview(loss), np.float32)]
)
def test_step_that_returns_its_loss_as_a_number_is_failed(parts_of, way):
    """Each step waits for the device then; the last way is one that no framework can tell."""
    model, made = tensorflow_trial()
    step = model.forward
    model.forward = lambda batch: way(step(batch))
    model.forward_losses = lambda count: np.array(
        [float(step(model.batches[k % len(model.batches)])) for k in range(count)]
    )
    assert failed(parts_of(model, "tensorflow", expected_ops_of(made), ["forward"])["forward"]) == {"host"}


@pytest.mark.parametrize(("copied", "fails"), [(0, False), (TO_HOST_LIMIT, False), (TO_HOST_LIMIT + 1, True)])
def test_copies_that_the_profiler_saw_fail_the_row_from_a_kilobyte_on(copied, fails):
    proof = Proof("fp32")
    proof.copies(copied, TO_HOST_LIMIT)
    assert list(proof.failures) == ["host"] * fails


# Ids that are no words


def test_id_that_is_no_word_stops_the_reference_and_so_every_row():
    start, states, batches = cases.language_model_start()
    wrong = [(np.where(tokens == tokens.max(), cases.VOCABULARY, tokens), targets) for tokens, targets in batches]
    from models.reference.networks import Adam

    with pytest.raises(ValueError, match=f"token {cases.VOCABULARY} given"):
        expected.language_model("mean", Adam(1e-3), start, states, wrong, carry_states=False)


@pytest.mark.parametrize("framework", ["jax", "tensorflow"])
def test_words_numbered_from_one_are_failed(parts_of, framework):
    """JAX takes an id beyond the end for the last one, or for NaN; TensorFlow on a CPU stops, and on a GPU takes zeros."""
    trial, made = TRIALS[framework]()
    trial.batches = [(tokens + 1, targets) for tokens, targets in trial.batches]
    if framework == "tensorflow":
        with pytest.raises(Exception, match=rf"= {cases.VOCABULARY} is not in \[0, {cases.VOCABULARY}\)"):
            parts_of(trial, framework, expected_ops_of(made))
    else:
        parts = parts_of(trial, framework, expected_ops_of(made))
        assert failed(parts["forward"]) >= {"outputs", "loss"}
        assert failed(parts["train"]) >= {"outputs", "loss", "gradients", "update"}


# A loss that is none


def test_loss_that_turns_nan_in_the_timed_steps_is_failed(parts_of):
    model, made = tensorflow_trial()
    step, restore, done = model.train, model.restore, [0]

    def forget():
        restore()
        done[0] = 0

    def failing(batch):
        done[0] += 1
        return step(batch) * (np.nan if done[0] > cases.BATCHES else 1.0)

    model.restore, model.train = forget, failing
    part = parts_of(model, "tensorflow", expected_ops_of(made))["train"]
    assert (
        failed(part) == {"loss", "spread"}
        and f"NaN or infinite loss at step {cases.BATCHES + 1} of timed" in part["reason"]
    )
