"""What a process measures comes into its record: how long it warmed up, and the GPU's state right after the timed blocks."""

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest

from harness.errors import CrashError
from harness.measure import clocks, fit, references, row_process, steps
from harness.measure.proof import Proof
from harness.record import machine, schema
from tests.record_cases import make

PROTOCOL = {"WARMUP_BATCHES": 4, "WARMUP_LIMIT_S": 0.0, "TIMED_BATCHES": 3, "BLOCKS": 2, "MIN_BLOCK_S": 0.0}


class Anything:
    """A proof that finds nothing wrong."""

    failures = ()

    def __getattr__(self, name):
        return lambda *_, **__: None


@pytest.fixture
def measured(monkeypatch):
    """The timed part of a row's second process on a GPU of which NVML says what is in `states`, and what happened in order."""
    happened = []
    runtime = SimpleNamespace(
        sync=lambda: None,
        reset_memory_peak=lambda: None,
        memory_peak=lambda: happened.append("memory") or 7,
        to_numpy=lambda losses: np.array(losses, float),
    )
    monkeypatch.setattr(row_process.runtimes, "make", lambda *_: runtime)
    monkeypatch.setattr(row_process, "load_reference", lambda path: {"forward_losses": [1.0]})
    monkeypatch.setattr(machine, "gpu_state", lambda: happened.append("state") or {"sm_mhz": 1980, "gpu_processes": 1})
    monkeypatch.setattr(machine, "gpu_memory_used", lambda: 9)
    job = dict(device="gpu", precision="tf32", process=1, matmul_flops=None, reference=__file__, protocol=PROTOCOL)
    expected_ops = dict(ops={}, kernels="")
    row = steps.StepMeasurement(job, SimpleNamespace(facts={}), expected_ops)
    trial = SimpleNamespace(
        forward=lambda batch: happened.append("step") or 1.0,
        batches=["a", "b"],
        restore=lambda: None,
        has_dropout=False,
    )
    return row._time(trial, "forward", Anything(), 8), happened


def test_warm_up_of_a_process_comes_into_its_record(measured):
    (part, size), happened = measured
    assert size == 3
    (warmup,) = part["warmup"]
    assert warmup["process"] == 1 and warmup["batches"] >= PROTOCOL["WARMUP_BATCHES"]
    assert happened.count("step") == warmup["batches"] + 2 * 3
    record = schema.merge_process(make(blocks_ms=[], step_ms=None), {**part, "unit": "words/s"})
    assert schema.validate(record, "x.json")["warmup"] == [warmup]


def test_gpu_is_looked_at_right_after_the_timed_blocks(measured):
    (part, _), happened = measured
    assert part["clocks"] == [{"process": 1, "when": "timed", "sm_mhz": 1980, "gpu_processes": 1}]
    assert happened[0] == happened[-1] == "state"
    assert "state" not in happened[1:-1], "never between two steps"


class Entered:
    """Turns that are noted when they begin and end."""

    def __init__(self, happened):
        self.happened = happened

    @contextlib.contextmanager
    def noted(self, what):
        self.happened.append(what)
        yield
        self.happened.append(f"end: {what}")

    def device(self, alone=False):
        return self.noted("device alone" if alone else "device")

    def waiting(self):
        return self.noted("waits")

    def timed(self):
        return self.noted("its turn")


@pytest.mark.parametrize(
    ("traces", "compiles", "tunes"), [(True, True, False), (False, False, False), (False, False, True)]
)
def test_all_modes_are_traced_and_proven_before_any_is_timed(monkeypatch, traces, compiles, tunes):
    happened = []
    row = object.__new__(steps.StepMeasurement)
    row.runtime, row.process, row.device = SimpleNamespace(sync=lambda: None), 1, "cpu"
    row._turns, row._phases, row._compiles = Entered(happened), Anything(), compiles
    row._reference_path = None
    monkeypatch.setattr(row_process, "wait_for", lambda _: happened.append("reference"))
    monkeypatch.setattr(row_process, "load_reference", lambda _: {})
    now = [0.0]
    monkeypatch.setattr(clocks.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(
        row,
        "_prove",
        lambda trial, mode: happened.append(f"prove {mode}") or (SimpleNamespace(failures={}), {}),
        raising=False,
    )
    timed = {"blocks_ms": [1.0]}
    monkeypatch.setattr(
        row, "_time", lambda trial, mode, *_: happened.append(f"time {mode}") or (timed, 1), raising=False
    )
    monkeypatch.setattr(row, "_memory_of", lambda *_: happened.append("memory"), raising=False)
    monkeypatch.setattr(row, "_share", lambda *_: None, raising=False)
    monkeypatch.setattr(row, "_finish", lambda part, proof: part, raising=False)

    def takes(seconds, what):
        now[0] += seconds
        happened.append(what)

    trial = SimpleNamespace(
        train=lambda batch: takes(4, "call train"),
        forward=lambda batch: takes(2, "call forward"),
        batches=["a"],
        restore=lambda: None,
        weights=dict,
        tunes_anew=tunes,
    )
    if traces:
        trial.trace = lambda mode: takes(1, f"trace {mode}")
    parts = row.steps(trial, {"train": 3, "forward": 1}, 8, "words/s")
    how = "device alone" if compiles or tunes else "device"  # what chooses kernels by their times has it alone
    called = [how, "call train", "memory", "call forward", "memory", f"end: {how}"]
    proven = [*called, "waits", "reference", "end: waits", "device", "prove train", "prove forward", "end: device"]
    timed = ["its turn", "time forward", "time train", "end: its turn"]
    assert happened == ["trace train", "trace forward"] * traces + proven + timed
    assert [parts[mode]["first_call_s"] for mode in ("train", "forward")] == [4 + traces, 2 + traces]


@pytest.mark.parametrize(("device", "process", "sampled"), [("gpu", 0, True), ("gpu", 1, False), ("cpu", 0, False)])
def test_utilisation_is_sampled_once_of_the_training_before_anything_is_timed(monkeypatch, device, process, sampled):
    happened = []
    row = object.__new__(steps.StepMeasurement)
    row.runtime, row.process, row.device = SimpleNamespace(sync=lambda: None), process, device
    row._turns, row._phases, row._compiles, row._reference_path = Entered(happened), Anything(), True, None
    monkeypatch.setattr(row_process, "wait_for", lambda _: None)
    monkeypatch.setattr(row_process, "load_reference", lambda _: {})
    stands_in = {
        "_prove": lambda trial, mode: (SimpleNamespace(failures={}), {}),
        "_time": lambda trial, mode, *_: happened.append(f"time {mode}") or ({"blocks_ms": [1.0]}, 1),
        "_single_steps": lambda trial, mode: {},
        "_utilisation": lambda work: happened.append("utilisation") or 90.0,
        "_after_blocks": lambda *_: None,
        "_memory_of": lambda *_: None,
        "_share": lambda *_: None,
        "_finish": lambda part, proof: part,
    }
    for name, stand_in in stands_in.items():
        monkeypatch.setattr(row, name, stand_in, raising=False)
    trial = SimpleNamespace(train=print, forward=print, batches=["a"], restore=lambda: None, weights=dict)
    parts = row.steps(trial, {"train": 3, "forward": 1}, 8, "words/s")
    turn = happened[happened.index("its turn") + 1 : happened.index("end: its turn")]
    assert turn == ["utilisation"] * sampled + ["time forward", "time train"]
    assert (parts["train"].get("gpu_utilisation"), "gpu_utilisation" in parts["forward"]) == (
        90.0 if sampled else None,
        False,
    )


@pytest.mark.parametrize(("whole_s", "much"), [(None, False), (54.0, False), (56.0, True)])
def test_a_fit_of_which_over_a_tenth_is_no_step_says_so(whole_s, much):
    clock = clocks.EpochClock()
    clock.train_s, clock.validation_s, clock.whole_s = [20.0, 20.0], [5.0, 5.0], whole_s
    assert fit.much_around(clock) == much


def test_what_a_trial_says_of_itself_joins_the_notes_of_its_mode():
    trial = SimpleNamespace(notes=lambda mode: [f"{mode} by A"])
    assert row_process.noted({"notes": ["10 batches per block"]}, trial, "train") == {
        "notes": ["10 batches per block", "train by A"]
    }
    assert row_process.noted({}, trial, "fit")["notes"] == ["fit by A"]
    assert row_process.noted({"unit": "words/s"}, SimpleNamespace(), "train") == {"unit": "words/s", "notes": []}


def test_a_reference_that_never_comes_ends_the_wait(monkeypatch, tmp_path):
    monkeypatch.setattr(references, "WAIT_LIMIT_S", 0.1)
    with pytest.raises(CrashError, match=r"stub.1.npz: not there after 0.1 s, .*--resume"):
        references.wait_for(tmp_path / "stub.1.npz")


@pytest.mark.parametrize("by", ["", *row_process.OF_KERNELS])
def test_a_record_says_that_kernels_multiplied_float16_in_tf32s_place(by):
    row = object.__new__(row_process.RowProcess)
    row.device, row._clocks, row._cpu = "cpu", [], SimpleNamespace(others_percent=lambda: 0)
    row._clock, row.data = lambda when: None, SimpleNamespace(facts={})
    row.runtime = SimpleNamespace(environment=dict)
    proof = Proof("tf32")
    proof.kernel = {"kernels": {"gemm": 0.2, f"lstm_wavefront_forward{by}": 0.1}}
    notes = row._finish({}, proof).get("notes", [])
    assert [note for note in notes if "float16" in note] == [
        note for end, note in row_process.OF_KERNELS.items() if end == by
    ]
