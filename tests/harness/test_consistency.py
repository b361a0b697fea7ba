"""Edited records are found when they are read: figures that do not fit together, errors over their limit, other settings."""

import contextlib
import copy
import json
import shutil
from pathlib import Path

import pytest

from harness.record import consistency, records, schema
from harness.record.schema import RecordError
from tests.harness import mutants
from tests.record_cases import ERRORS, LATENCY, RUNS, make, proof_of, training_of

WARMUP = {"seconds": 0.3, "batches": 31, "settled": True}
TWO = [[10.0, 11.0], [10.4, 10.6]]
TWO_DEVICES = dict(gpus=2, workers=2, hosts=["a"], names=[], link=None, nccl=None, communication_ms=None)
ONE_STEP = {"p50_ms": 10.6, "p99_ms": 12.0, "steps": 200}
CONFIG = {"CONFIG": "large", "UNITS": 8, "BATCH_SIZE": 5, "TIME_STEPS": 20, "PROCESSES": 3, "BLOCKS": 2, "EPOCHS": 2}


def honest(mode="train", device="cpu", **changes):
    """A record of two processes as they would leave it; of a whole training of one."""
    blocks = TWO[:1] if mode == "fit" else TWO
    record = make(mode=mode, device=device, blocks_ms=[], step_ms=None, proof=None, config=CONFIG)
    del record["items_per_batch"]
    for process, own in enumerate(blocks):
        part = dict(blocks_ms=own, items_per_batch=100, unit="words/s", proof=proof_of(mode, device))
        part["clocks"] = [{"process": process, "when": "timed"}]
        if mode == "request":
            part |= {"latency": LATENCY, "items_per_batch": 1, "unit": "requests/s"}
        part |= {"one_step": ONE_STEP} if mode in ("train", "forward", "stack") else {}
        if device == "gpu" and mode != "request":
            part["joules"] = {"training": 63.0, "epoch": 31.5} if mode == "fit" else {"batch": 3.15}
        part |= training_of(blocks) if mode == "fit" else {"warmup": [{"process": process, **WARMUP}], "losses": [1.0]}
        record = schema.merge_process(record, part)
    return {**record, **changes}


def change(record, path, value):
    """A copy with another value at "proof.limit.loss"; without that key where the value is `...`."""
    changed = copy.deepcopy(record)
    *way, last = path.split(".")
    holder = changed
    for key in way:
        holder = holder[key]
    if value is ...:
        del holder[last]
    else:
        holder[last] = value(holder[last]) if callable(value) else value
    return changed


def on_two_devices():
    return change(honest(replicas=TWO_DEVICES), "config.REPLICAS", 2)


def problem(record):
    """Why the record is refused, and whether in one line with file, what was found, what was expected, and what to do."""
    with pytest.raises(RecordError) as error:
        schema.validate(record, "rows/x.json")
    line = str(error.value)
    assert line.startswith("rows/x.json: ") and "\n" not in line
    assert (
        ": found " in line and ", expected " in line and line.endswith("move the file away and run again with --resume")
    )
    return line


EDITED = [  # mode, device, what is edited, to what, what is said of it
    *[(mode, "cpu", f"proof.{name}_err", None, f"without {name}_err") for mode in ERRORS for name in ERRORS[mode]],
    *[("train", "cpu", f"proof.{name}_err", 0.02, f"a {name}_err of 0.02") for name in ERRORS["train"]],
    ("request", "cpu", "latency", ..., "latency: found a request record with latency None"),
    ("train", "cpu", "latency", LATENCY, "latency: found a train record with latency"),
    ("request", "cpu", "latency.p50_ms", 11.5, "percentiles that rise to max_ms"),
    ("request", "cpu", "latency.max_ms", 10.9, "percentiles that rise to max_ms"),
    ("request", "cpu", "latency", LATENCY | {"p50_ms": 22.0, "p99_ms": 23.0, "max_ms": 24.0}, "times whose mean is 10.5 ms"),
    ("request", "cpu", "latency", LATENCY | {"p50_ms": 9.0, "p99_ms": 9.5, "max_ms": 10.0}, "times whose mean is 10.5 ms"),
    ("request", "cpu", "throughput.value", lambda value: 1.01 * value, "expected 1, the items of a batch"),
    ("fit", "cpu", "proof.loss_err", -1e-6, "a loss_err of -1e-06"),
    ("train", "cpu", "proof.limit.loss", ..., "a limit of loss that is None"),
    ("train", "cpu", "proof.limit.spread", ..., "a limit of spread that is None"),
    ("train", "cpu", "proof.limit.update", 1.0, "a limit of update that is 1.0"),
    ("train", "cpu", "proof.limit.update", 0.0, "a limit of update that is 0.0"),
    ("train", "cpu", "proof.limit", ..., "a limit of outputs that is None"),
    ("train", "cpu", "throughput.value", lambda value: 1.01 * value, "throughput: found a throughput that is 101 items"),
    ("fit", "cpu", "throughput.value", lambda value: 0.99 * value, "expected 100, the items of a batch"),
    ("stack", "cpu", "throughput", None, "without blocks_ms, step_ms or throughput"),
    ("stack", "cpu", "step_ms", None, "without blocks_ms, step_ms or throughput"),
    ("forward", "cpu", "step_ms", {"median": 10.5, "min": 10.0, "max": 11.5}, 'step_ms: found a {"median": 10.5'),
    ("forward", "cpu", "step_ms", {"median": 10.4, "min": 10.0, "max": 11.0}, 'step_ms: found a {"median": 10.4'),
    ("train", "cpu", "items_per_batch", 101, "expected 101, the items of a batch"),
    ("train", "cpu", "items_per_batch", ..., "items_per_batch: found a record without it"),
    ("train", "cpu", "config.BATCH_SIZE", 6, "expected 120, the items of a batch"),
    ("train", "cpu", "config.TIME_STEPS", 10, "expected 50, the items of a batch"),
    ("train", "cpu", "config.PROCESSES", 1, "a row of 2 processes, expected at most PROCESSES=1"),
    ("train", "cpu", "config.BLOCKS", 3, "a process of 2 blocks, expected BLOCKS=3"),
    ("fit", "cpu", "config.EPOCHS", 3, "a process of 2 blocks, expected EPOCHS=3"),
    ("train", "cpu", "warmup", lambda own: own[:1], "warmup: found a list of processes [0]"),
    ("train", "cpu", "warmup", lambda own: [own[0], own[0]], "warmup: found a list of processes [0, 0]"),
    ("train", "cpu", "clocks", [{"process": 2}], "clocks: found a list of processes [2]"),
    *[("train", "cpu", key, value, f"a train record with {key}")
      for key, value in (("fit_s", 3.0), ("epoch_s", [1.0]), ("accuracy", {"a": 0.5}), ("perplexity", {"a": 80.0}),
                         ("test_perplexity_by_seed", {"1": 80.0}))],
    ("fit", "cpu", "losses", [1.0], "a training of 2 epochs, 2 blocks and 1 losses"),
    ("fit", "cpu", "epoch_s", ..., "a training of 0 epochs, 2 blocks"),
    ("fit", "cpu", "epoch_s", [0.1], "a training of 1 epochs, 2 blocks"),
    ("fit", "cpu", "epoch_s", [0.1, 0.111], "a training of 10 batches in an epoch"),
    ("fit", "cpu", "epoch_s", [0.105, 0.1155], "a training of 10.5 batches in an epoch"),
    ("fit", "cpu", "fit_s", 0.2, "fit_s: found a training of 0.2 s"),
    ("fit", "cpu", "fit_s", ..., "fit_s: found a training of None s"),
    ("fit", "cpu", "accuracy", ..., "a training without accuracy or perplexity"),
    ("fit", "cpu", "accuracy.test", 1.2, "accuracy: found a list of [1.2]"),
    ("fit", "cpu", "perplexity", {"test": 0.9}, "perplexity: found a list of [0.9]"),
    ("fit", "cpu", "test_perplexity_by_seed", {"1": 90.0}, "found a training of seeds 1, the first with 90.0, expected seeds 1"),
    ("fit", "cpu", "test_perplexity_by_seed", {"1": None, "2": 90.0}, "found a training of seeds 1, 2, the first with None"),
    ("fit", "cpu", "test_perplexity_by_seed", {"2": None}, "found a training of seeds 2, the first with None, expected seeds 1"),
    ("fit", "cpu", "test_perplexity_by_seed", {"1": 0.9}, "perplexity: found a list of [0.9]"),
    ("fit", "cpu", "one_step", ONE_STEP, "a fit record with one_step"),
    ("request", "cpu", "one_step", ONE_STEP, "a request record with one_step"),
    ("stack", "cpu", "one_step.p99_ms", 10.5, "a p99_ms of 10.5 below a p50_ms of 10.6"),
    ("train", "cpu", "one_step.p99_ms", None, "a p99_ms of None of 200 steps"),
    ("train", "cpu", "one_step.steps", 99, "a p99_ms of 12.0 of 99 steps"),
    ("forward", "cpu", "one_step.steps", 2, "a p99_ms of 12.0 of 2 steps"),
    ("train", "cpu", "joules", {"batch": 3.15}, "a train record on a cpu with Joules of batch"),
    ("train", "gpu", "joules", {"training": 3.15, "epoch": 3.15}, "a train record on a gpu with Joules of training and epoch"),
    ("fit", "gpu", "joules", {"batch": 3.15}, "a fit record on a gpu with Joules of batch"),
    ("request", "gpu", "joules", {"batch": 3.15}, "a request record on a gpu with Joules of batch"),
    ("train", "gpu", "joules.batch", 0.0104, "a mean power of 0.99"),
    ("stack", "gpu", "joules.batch", 52.6, "a mean power of 5009"),
    ("fit", "gpu", "joules", {"training": 0.2, "epoch": 0.1}, "a mean power of 0.95"),
    ("fit", "gpu", "joules.epoch", 63.0, "of 2 epochs"),
    ("train", "cpu", "replicas", TWO_DEVICES, "a row on 2 devices, expected REPLICAS=1"),
    ("train", "cpu", "config.REPLICAS", 2, "a row on 1 device, expected REPLICAS=2"),
    ("train", "cpu", "proof.kernel.launches", ..., "a kernel with launches None"),
    ("train", "cpu", "proof.kernel.launches", 0, "a kernel with launches 0"),
    ("train", "gpu", "proof.kernel.launches", 2.5, "a kernel with launches 2.5"),
    ("train", "gpu", "proof.kernel.syncs", None, "a kernel with syncs None"),
    ("train", "gpu", "proof.kernel.syncs", -1, "a kernel with syncs -1"),
    ("train", "cpu", "proof.kernel.syncs", 0, "a kernel with syncs 0"),
    ("train", "cpu", "proof.kernel", ..., "a kernel with launches None"),
]  # fmt: skip
TRAINED = {"perplexity": {"test": 90.0}, "accuracy": {}, "test_perplexity_by_seed": {"1": 90.0}}
FEW = [{"p99_ms": None, "steps": 99}, {"p99_ms": None, "steps": 2}, {"p99_ms": 10.6, "steps": 1}, {"steps": 100}]
SEEN_BEFORE = [  # by a rule of the schema
    ("train", "cpu", "blocks_ms", [], "without blocks_ms, step_ms or throughput"),
    ("fit", "cpu", "blocks_ms", [], "a training of 2 epochs, 0 blocks"),
]
FIRST = [  # of schema 1, which kept no counts, and of its first records no limit of the spread
    ("proof.kernel.launches", ...), ("items_per_batch", ...), ("proof.limit.spread", ...), ("proof.spread_err", 0.6),
]  # fmt: skip


@pytest.mark.parametrize("device", ["cpu", "gpu"])
@pytest.mark.parametrize("mode", ERRORS)
def test_honest_record_is_read(mode, device):
    assert schema.validate(honest(mode, device), "x.json")["schema"] == 2


@pytest.mark.parametrize(
    "changes",
    [
        TRAINED,
        {"accuracy": {"acc": 0.5, "val_acc": None}},
        {"clocks": [{}]},
    ],
)
def test_training_with_other_figures_is_read(changes):
    assert schema.validate(honest("fit", **changes), "x.json")


def test_row_on_as_many_devices_as_its_settings_say_is_read():
    assert schema.validate(on_two_devices(), "x.json")


def test_times_that_say_no_items_or_are_of_sequences_are_read():
    """Sentences differ in length: constants do not say what a batch holds."""
    assert schema.validate(change(honest(), "config.TIME_STEPS", None), "x.json")
    sequences = change(change(honest(), "throughput.unit", "sequences/s"), "config.BATCH_SIZE", 100)
    assert schema.validate(sequences, "x.json")
    assert schema.validate(change(honest(), "config", {"CONFIG": "large"}), "x.json")


@pytest.mark.parametrize(("mode", "device", "path", "value", "said"), EDITED)
def test_edited_record_is_refused(mode, device, path, value, said):
    record = honest(mode, device)
    assert said in problem(change(record, path, value))


@pytest.mark.parametrize("status", ["failed", "skipped"])
def test_record_that_is_not_ok_may_err(status):
    wrong = change(honest(status=status, reason="why"), "proof.loss_err", 0.5)
    assert schema.validate(wrong, "x.json")


@pytest.mark.parametrize(("path", "value"), FIRST)
def test_what_the_first_records_lack_is_asked_of_those_of_schema_2_alone(path, value):
    record = change(change(honest(), "schema", 1), "proof.limit.spread", ...)
    assert schema.validate(change(record, path, value) if "limit" not in path else record, "x.json")
    if path == "proof.spread_err":
        assert "a spread_err of 0.8" in problem(change(record, path, 0.8))
    else:
        assert problem(change(honest(), path, value))


# Those of other settings on one page


def written(run, *changes):
    """Problems of a run with a record for each of these changes of settings."""
    with records.open_run(run):
        for number, own in enumerate(changes):
            date = own.pop("date", f"2026-01-0{number + 1}")
            about = {key: own.pop(key) for key in ("status", "reason", "precision") if key in own}
            record = honest(row=f"row_{number}", environment={"date": date}, **about)
            records.write_record(run, {**record, "config": {**CONFIG, **own}})
    found, problems = records.read_run(run)
    assert len(found) + len(problems) == len(changes)
    return problems


ONE_PAGE = [
    [{}, {}, {}],
    [{}, {"WARMUP_BATCHES": 3, "PROCESSES": 2}],  # how long it is timed
    [{}, {"CONFIG": "small", "UNITS": 9}],  # a table of its own
    [{}, {"precision": "fp16", "UNITS": 9}],
    [{}, {"UNITS": 9, "status": "failed", "reason": "why"}],  # has no figures
    [{"LATER": 3}, {}],  # a constant that an earlier commit did not have
]


@pytest.mark.parametrize("changes", ONE_PAGE)
def test_records_of_one_configuration_are_read(changes, tmp_path):
    assert written(tmp_path / "run", *map(dict, changes)) == []


OTHER_PAGES = [
    ([{}, {"UNITS": 9}, {}], 1, "a UNITS of 9 beside 2 records of 8"),
    ([{"KEEP_PROB": 1.0}, {"KEEP_PROB": 0.5, "UNITS": 9}, {"KEEP_PROB": 1.0}], 1, "a UNITS of 9 beside 2 records of 8"),
    ([{"UNITS": 9}, {}], 0, "a UNITS of 9 beside 1 records of 8"),  # of as many the later ones are right
    ([{"date": "2026-01-09"}, {"UNITS": 9}], 1, "a UNITS of 9 beside 1 records of 8"),
    ([{"LR": 1.0}, {"LR": 0.5}, {"LR": 0.5}], 0, "a LR of 1.0 beside 2 records of 0.5"),
]


@pytest.mark.parametrize(("changes", "row", "said"), OTHER_PAGES)
def test_record_of_another_configuration_is_one_line_and_not_drawn(changes, row, said, tmp_path):
    [problem] = written(tmp_path / "run", *map(dict, changes))
    assert f"row_{row}.train" in problem and said in problem and "expected one configuration in a table" in problem


# Committed records, and edits of them

RESULTS = [run for run in RUNS if run.parent.name == "results"]


@pytest.mark.parametrize("run", RESULTS, ids=lambda run: run.name)
def test_edits_of_committed_records_are_found(run, tmp_path):
    """One of each mode, in a copy of the run's folder."""
    (tmp_path / "rows").mkdir()
    shutil.copy(run / "run.json", tmp_path)
    every = [json.loads(path.read_text()) for path in sorted((run / "rows").glob("*.json"))]
    for record in {record["mode"]: record for record in every if record["status"] == "ok"}.values():
        limit = record["proof"]["limit"]["loss"]
        edits = [("throughput.value", lambda value: value * 1.02), ("proof.loss_err", 1.1 * limit)]
        edits += [("proof.outputs_err", None), ("blocks_ms", lambda blocks: [own[1:] for own in blocks])]
        for path, value in edits:
            records.write_json(records.path_of(tmp_path, record), change(record, path, value))
            found, [problem] = records.read_run(tmp_path)
            assert not found and records.record_name(record) in problem
        records.path_of(tmp_path, record).unlink()


# Each check is needed

MUTANTS = list(mutants.mutants(Path(consistency.__file__)))


def complaint(module, folder):
    """The first case that fails where `module` finds what contradicts itself; "" where all pass."""

    def reasons(record):
        return " | ".join(
            f"{what}: found {found}, expected {expected}" for what, found, expected in module.contradictions(record)
        )

    good = [honest(mode, device) for mode in ERRORS for device in ("cpu", "gpu")]
    good += [honest(config={**CONFIG, "PROCESSES": 1}, repeat_until=0.02)]
    good += [
        honest("fit", **TRAINED),
        honest("fit", accuracy={"a": 0.5, "b": None}),
    ]
    good += [
        honest(status="failed", throughput=None),
        honest(clocks=[{}]),
        change(honest(), "config", {"CONFIG": "large"}),
    ]
    good += [change(honest(), "config.TIME_STEPS", None), on_two_devices()]
    good += [change(honest(), "one_step", {**ONE_STEP, **few}) for few in FEW] + [
        change(honest(device="gpu"), "joules", ...)
    ]
    first = change(change(honest(), "schema", 1), "proof.limit.spread", ...)
    if "a spread_err of 0.1" not in reasons(change(change(first, "proof.limit.spread", 0.05), "proof.spread_err", 0.1)):
        return "the limit of the spread in schema 1"
    if "a limit of loss that is None" not in reasons(change(first, "proof.limit.loss", ...)):
        return "another limit in schema 1"
    good += [first] + [change(first, path, value) for path, value in FIRST if "limit" not in path]
    for number, record in enumerate(good):
        if found := reasons(record):
            return f"good {number}: {found}"
    for mode, device, path, value, said in EDITED + SEEN_BEFORE:
        record = honest(mode, device)
        if said not in reasons(change(record, path, value)):
            return f"{path}: {said}"
    for number, changes in enumerate(ONE_PAGE):
        if problems := written(folder / f"good_{number}", *map(dict, changes)):
            return f"{changes}: {problems}"
    for number, (changes, row, said) in enumerate(OTHER_PAGES):
        problems = written(folder / f"bad_{number}", *map(dict, changes))
        if len(problems) != 1 or f"row_{row}.train" not in problems[0] or said not in problems[0]:
            return f"{changes}: {problems}"
    return ""


@pytest.mark.parametrize("tree_of", [tree_of for _, tree_of in MUTANTS], ids=[ascii(missing) for missing, _ in MUTANTS])
def test_a_check_that_is_missing_makes_a_case_fail(tree_of, tmp_path, monkeypatch):
    module = mutants.load(tree_of(), tmp_path / "mutant.py")
    monkeypatch.setattr(records, "consistency", module)
    with contextlib.suppress(TypeError, KeyError, AttributeError, IndexError, ValueError):  # reached without the check
        assert complaint(module, tmp_path)


def test_the_copy_without_a_change_passes_every_case(tmp_path):
    assert complaint(consistency, tmp_path) == ""
