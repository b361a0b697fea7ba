"""The schema: nothing but its keys and kinds is a record, and several processes make one of them."""

import math

import pytest

from harness.record import intervals, records, schema
from harness.record.schema import RecordError
from tests.record_cases import LATENCY, RUNS, make, proof_of

BLOCKS = [[1.0, 2.0], [2.0, 3.0]]
STEP = intervals.step_of(BLOCKS)
STEP_OF_ONE = intervals.step_of(BLOCKS[:1])
ONE_STEP = {"p50_ms": 10.6, "p99_ms": 12.0, "steps": 200}
OPTION = {"ran": "cuDNN", "error": "", "fit_ms": None}
REPLICAS = {
    "gpus": 2,
    "workers": 2,
    "hosts": ["a", "b"],
    "names": [],
    "link": None,
    "nccl": None,
    "communication_ms": 0.1,
}
WARMUP = {"process": 0, "seconds": 0.3, "batches": 31, "settled": True}


def test_new_records_share_no_lists_and_refuse_unknown_keys():
    first, second = make(), make()
    first["notes"].append("mine")
    assert second["notes"] == []
    with pytest.raises(TypeError, match="perplexitty"):
        make(perplexitty={"test": 1.0})


@pytest.mark.parametrize("key", list(schema.RULES))
def test_every_key_of_the_schema_is_required(key):
    record = make()
    del record[key]
    with pytest.raises(RecordError, match=key):
        schema.validate(record, "x.json")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("schema", True),
        ("benchmark", ""),
        ("row", "a/b"),
        ("mode", "training"),
        ("device", ["gpu"]),
        ("precision", "int8"),
        ("status", "done"),
        ("reason", "two\nlines"),
        ("reason", None),
        ("config", {"UNITS": 3}),
        ("config", []),
        ("config", {"CONFIG": "small", "CONFIGS": ["small"]}),
        ("config", {"CONFIG": "small", "REPLICAS": [2]}),
        ("config", {"CONFIG": "small", "REPLICAS": 0}),
        ("config", {"CONFIG": "small", "ROW_LIMIT_S": "600"}),
        ("config", {"CONFIG": "small", "SEED": "1"}),
        ("blocks_ms", [1.0]),
        ("blocks_ms", [[0.0]]),
        ("blocks_ms", [[True]]),
        ("blocks_ms", [["1.0"]]),
        ("step_ms", 10.0),
        ("step_ms", {"median": 1.0, "min": 2.0, "max": 3.0}),
        ("step_ms", {"median": 1.0, "min": 1.0}),
        ("step_ms", {**STEP, "processes": 0}),
        ("step_ms", {**STEP, "processes": 1}),  # with an interval
        ("step_ms", {**STEP, "processes": True}),
        ("step_ms", {**STEP, "interval": [2.5, 3.0]}),
        ("step_ms", {**STEP, "interval": [0.0, 3.0]}),
        ("step_ms", {**STEP, "interval": [1.5]}),
        ("step_ms", {**STEP, "interval": [None, None]}),
        ("step_ms", {**STEP, "mean": 2.0}),
        ("step_ms", {**STEP_OF_ONE, "processes": True}),
        ("step_ms", {**STEP_OF_ONE, "processes": 1.0}),
        ("step_ms", {key: value for key, value in STEP.items() if key != "processes"}),
        ("step_ms", dict.fromkeys(("median", "min", "max"), "1.0")),
        ("warmup", {"seconds": 1.0}),
        ("warmup", [{**WARMUP, "settled": 1}]),
        ("warmup", [{**WARMUP, "batches": 0}]),
        ("warmup", [{**WARMUP, "seconds": -1.0}]),
        ("warmup", [{**WARMUP, "seconds": "1.0"}]),
        ("warmup", [{"process": 0}]),
        ("warmup", [list(WARMUP)]),
        ("first_call_s", "1.0"),
        ("first_call_s", math.nan),
        ("first_call_s", -math.inf),
        ("throughput", {"value": 3}),
        ("throughput", {"value": "3", "unit": "words/s"}),
        ("throughput", ["value", "unit"]),
        ("losses", {"0": 1.0}),
        ("proof", {"outputs_err": 0.0}),
        ("proof", {"ok": True, "outputs_err": "small"}),
        ("proof", {"ok": True, "kernel": []}),
        ("proof", {"ok": True, "kernel": {"kernels": 3}}),
        ("proof", {"ok": True, "kernel": {"kernels": [3]}}),
        ("proof", {"ok": True, "failed": [3]}),
        ("proof", {"ok": True, "limit": {"outputs": "small"}}),
        ("proof", {"ok": 1}),
        ("proof", ["ok"]),
        ("memory_peak_bytes", 3),
        ("gpu_utilisation", True),
        ("flops_per_batch", "many"),
        ("share_of_matmul", "half"),
        ("clocks", [None]),
        ("clocks", [{"throttle_reasons": "hot"}]),
        ("clocks", [{"throttle_reasons": 0}]),
        ("clocks", [{"before": {"throttle_reasons": "hot"}}]),
        ("notes", "one"),
        ("published", {"K80": {"time": 3}}),
        ("published", ["K80"]),
        ("environment", {"data": "mnist"}),
        ("environment", {"data": {"sha256": "00"}}),
        ("environment", ["data"]),
        ("environment", {"notes": [1]}),
        ("environment", {"notes": 0}),
        ("environment", {"data": ""}),
        ("environment", {"data": {"sha256": 0}}),
        ("environment", {"packages": False}),
        ("environment", {"variables": 0}),
        ("environment", {"variables": ["XLA_FLAGS"]}),
        ("environment", {"variables": {"XLA_FLAGS": 1}}),
        ("accuracy", {"acc": "high"}),
        ("perplexity", {"test": "high"}),
        ("test_perplexity_by_seed", {"1": "high"}),
        ("fit_s", "long"),
        ("spent_s", "long"),
        ("spent_s", -1.0),
        ("latency", list(LATENCY)),
        ("latency", {**LATENCY, "more": 1}),
        ("latency", {**LATENCY, "p99_ms": "1"}),
        ("latency", {**LATENCY, "max_ms": None}),
        ("latency", {**LATENCY, "requests": 0}),
        ("one_step", list(ONE_STEP)),
        ("one_step", {**ONE_STEP, "more": 1}),
        ("one_step", {**ONE_STEP, "p50_ms": None}),
        ("one_step", {**ONE_STEP, "p50_ms": "1"}),
        ("one_step", {**ONE_STEP, "p99_ms": 0}),
        ("one_step", {**ONE_STEP, "steps": 0}),
        ("joules", 3.0),
        ("joules", {}),
        ("joules", {"batch": None}),
        ("joules", {"batch": 0.0}),
        ("joules", {"batch": True}),
        ("joules", {"batch": 1.0, "epoch": 1.0}),
        ("joules", {"training": 1.0}),
        ("option", list(OPTION)),
        ("option", {**OPTION, "more": 1}),
        ("option", {**OPTION, "ran": 1}),
        ("option", {**OPTION, "fit_ms": "1"}),
        ("replicas", REPLICAS["gpus"]),
        ("replicas", {**REPLICAS, "more": 1}),
        ("replicas", {**REPLICAS, "gpus": 0}),
        ("replicas", {**REPLICAS, "workers": 1.5}),
        ("replicas", {**REPLICAS, "hosts": [1]}),
        ("replicas", {**REPLICAS, "names": "A"}),
        ("replicas", {**REPLICAS, "link": 1}),
        ("replicas", {**REPLICAS, "nccl": 2}),
        ("replicas", {**REPLICAS, "communication_ms": "1"}),
        ("repeat_until", 0.0),
        ("repeat_until", 2.0),
        ("repeat_until", "1%"),
        ("epoch_s", [None]),
        ("items_per_batch", 0),
        ("items_per_batch", "many"),
        ("colour", "red"),
    ],
)
def test_a_value_of_the_wrong_kind_is_an_error_that_names_its_key(key, value):
    with pytest.raises(RecordError, match=key):
        schema.validate({**make(), key: value}, "x.json")
    for _, rule, *_ in filter(None, [schema.RULES.get(key) or schema.OPTIONAL.get(key)]):
        assert rule(value) is False, "by its own rule, and not only since it contradicts another key"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("published", {"K80": 984.2, "P100": None, "as printed": "0.921 s", "of both": [0.97, None]}),
        ("clocks", [{"throttle_reasons": None}, {"before": {"throttle_reasons": ["hot"]}, "when": "end"}]),
        ("proof", proof_of(kernel={"kernels": None, "launches": 1, "syncs": None})),
        ("proof", proof_of(kernel={"kernels": ["gemm"], "launches": 1, "syncs": None})),
        ("proof", proof_of(kernel={"kernels": {"gemm": 0.1}, "launches": 1, "syncs": None})),
        ("environment", {"data": None, "packages": None, "notes": None, "variables": None}),
        ("environment", {"variables": {"XLA_FLAGS": "--xla"}}),
        ("config", {"CONFIG": "small", "CONFIGS": None}),
        ("config", {"CONFIG": "small", "REPLICAS": 1}),
        ("spent_s", 0),
        ("one_step", ONE_STEP),
        ("one_step", {**ONE_STEP, "p99_ms": None, "steps": 20}),
        ("repeat_until", 0.02),
        ("repeat_until", 1.0),
    ],
)
def test_values_that_earlier_and_other_rows_have_are_read(key, value):
    assert schema.validate({**make(), key: value}, "x.json")[key] == value


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ([], r"record: found \[\], expected a JSON object"),
        ("ok", r"record: found 'ok', expected a JSON object"),
        ({}, "schema: found a record without one, expected 1 or 2"),
        ({"schema": 3}, "schema: found 3, expected 1 or 2"),  # and no word of the keys that it lacks
    ],
)
def test_what_is_no_record_of_this_schema_is_reported_before_anything_else(record, message):
    with pytest.raises(RecordError, match=f"^x.json: {message}; "):
        schema.validate(record, "x.json")


def test_an_error_is_one_short_line_of_what_can_be_printed():
    error = schema.RecordError("a\nb.json", "row", "x\x1b" + 300 * "y", 400 * "z")
    assert str(error).startswith("a b.json: row: found 'x") and str(error).isprintable()
    assert "yyy..., expected zzz" in str(error) and "zzz...; move" in str(error) and len(str(error)) < 500
    assert "found 'abc', expected z;" in str(schema.RecordError("x", "row", "abc", "z")), "short ones whole"
    assert "found a depth of 9, expected" in str(schema.RecordError("x", "nesting", "a depth of 9", "z"))


@pytest.mark.parametrize(
    ("step", "blocks"),
    [
        (STEP, BLOCKS),
        (STEP, [*BLOCKS, []]),
        (intervals.step_of(BLOCKS[:1]), BLOCKS[:1]),
        ({"median": 2, "min": 1, "max": 3}, BLOCKS),
    ],
)
def test_steps_of_this_and_of_earlier_commits_are_read(step, blocks):
    warmup = [{**WARMUP, "process": process} for process in range(len(blocks))]
    assert schema.validate(make(step_ms=step, blocks_ms=blocks, warmup=warmup), "x.json")["step_ms"] == step


@pytest.mark.parametrize(
    ("step", "blocks"),
    [
        ({**STEP, "interval": [STEP["interval"][0], 1.01 * STEP["interval"][1]]}, BLOCKS),
        ({**STEP, "interval": [0.99 * STEP["interval"][0], STEP["interval"][1]]}, BLOCKS),
        ({**STEP, "median": 1.01 * STEP["median"]}, BLOCKS),
        ({**STEP, "min": 0.9}, BLOCKS),
        ({**STEP, "max": 3.1}, BLOCKS),
        ({**STEP, "interval": None}, BLOCKS),
        ({**STEP, "processes": 3}, BLOCKS),
        (STEP, BLOCKS[:1]),
        (STEP, [*BLOCKS, [2.0]]),
        (STEP, []),
        (STEP, [[]]),
    ],
)
def test_a_step_that_its_blocks_do_not_come_to_is_refused(step, blocks):
    with pytest.raises(RecordError, match="step_ms"):
        schema.validate(make(step_ms=step, blocks_ms=blocks), "x.json")


UNPROVEN = [None, {}, {"ok": False}, proof_of(failed=["loss"])]


@pytest.mark.parametrize("proof", UNPROVEN)
def test_no_record_is_ok_without_a_proof_that_held(proof):
    with pytest.raises(RecordError):
        schema.validate(make(proof=proof), "x.json")
    if proof != {}:  # a proof without "ok" is none at all, whatever the status
        assert schema.validate(make(proof=proof, status="failed", reason="why"), "x.json")


@pytest.mark.parametrize("proof", [*UNPROVEN, {"outputs_err": 1e-6}, {"ok": None}, {"ok": 1}])
@pytest.mark.parametrize("earlier", [0, 1])
def test_a_process_without_a_proof_that_held_makes_the_row_failed_with_a_reason(proof, earlier):
    record = fresh()
    for _ in range(earlier):
        record = schema.merge_process(record, part([10.0]))
    record = schema.merge_process(record, part([10.0], status="ok", proof=proof))
    why = {"not proven: the process gave no proof", "proof failed: loss", "proof failed: it does not say that it held"}
    assert record["status"] == "failed" and record["reason"] in why
    assert not proof or record["proof"]["ok"] is False
    bad = {"ok": False, "failed": ["update"], "reason": "update: error 0.5"}
    for later in (part([10.0]), part([10.0], proof=None), part([10.0], proof=bad), {"status": "failed", "reason": "b"}):
        again = schema.merge_process(record, later)
        assert (again["status"], again["reason"]) == ("failed", record["reason"]), "a later process mends nothing"


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_every_committed_record_is_read_without_a_warning(run):
    found, problems = records.read_run(run)
    assert problems == [] and len(found) == len(list((run / "rows").glob("*.json"))) > 0


def test_a_record_may_not_contradict_itself():
    with pytest.raises(RecordError, match="failed"):
        schema.validate(make(proof={"ok": False}), "x.json")
    with pytest.raises(RecordError, match="why the row is skipped"):
        schema.validate(make(status="skipped"), "x.json")
    with pytest.raises(RecordError, match="a time or an accuracy"):
        schema.validate(make(step_ms=None, warmup=[WARMUP]), "x.json")


# Several processes of one row


def part(blocks, **rest):
    proof = proof_of(update_err=1e-3)
    return dict(blocks_ms=blocks, items_per_batch=100, unit="words/s", proof=proof) | rest


def fresh(**changes):
    return make(**(dict(blocks_ms=[], step_ms=None, proof=None) | changes))


def test_merging_computes_step_and_throughput_over_all_blocks():
    record = fresh()
    for blocks in ([10.0, 12.0], [20.0, 30.0], [11.0]):
        record = schema.merge_process(record, part(blocks))
    assert record["blocks_ms"] == [[10.0, 12.0], [20.0, 30.0], [11.0]]
    step = record["step_ms"]
    assert (step["median"], step["min"], step["max"], step["processes"]) == (11.0, 10.0, 30.0, 3), "of 11, 25 and 11"
    assert step["interval"] == pytest.approx(intervals.interval([11.0, 25.0, 11.0])) and step["interval"][1] > 30.0
    assert record["throughput"] == {"value": pytest.approx(100 / 0.011), "unit": "words/s"}
    assert schema.validate(record, "x.json")["status"] == "ok"


def test_merging_keeps_the_first_of_what_is_told_once_and_all_of_the_rest():
    first = part([10.0], losses=[3.0], first_call_s=7.0, clocks=[{"sm_mhz": 1}], notes=["a"], share_of_matmul=0.5)
    first |= dict(memory_peak_bytes={"allocator": 5, "nvml": None}, environment={"gpu": "H200", "cudnn": None})
    second = part([20.0, 20.0], losses=[9.0], first_call_s=1.0, clocks=[{"sm_mhz": 2}], notes=["a", "b"])
    second |= dict(memory_peak_bytes={"allocator": 4, "nvml": 8}, environment={"gpu": "A100", "cudnn": "9.19"})
    empty = fresh()
    record = schema.merge_process(schema.merge_process(empty, first), second)
    assert (record["losses"], record["first_call_s"], record["notes"]) == ([3.0], 7.0, ["a", "b"])
    assert record["clocks"] == [{"sm_mhz": 1}, {"sm_mhz": 2}]
    assert record["memory_peak_bytes"] == {"allocator": 5, "nvml": 8}
    assert record["environment"] == {"gpu": "H200", "cudnn": "9.19"}
    assert record["share_of_matmul"] == pytest.approx(1 / 3)  # measured at 10 ms, the median is 15 ms
    assert empty == fresh()


def test_the_largest_memory_of_all_processes_is_kept():
    assert schema.merge_process(fresh(), part([10.0]))["memory_peak_bytes"] is None
    record = fresh()
    for allocator, nvml in ((5, 7), (None, 8), (6, None)):
        record = schema.merge_process(record, part([10.0], memory_peak_bytes={"allocator": allocator, "nvml": nvml}))
    assert record["memory_peak_bytes"] == {"allocator": 6, "nvml": 8}


def test_a_share_that_was_measured_at_no_step_stays_as_it_is():
    assert schema.merge_process(fresh(share_of_matmul=0.5), part([10.0]))["share_of_matmul"] == 0.5


def test_a_failed_row_keeps_what_it_is_and_loses_its_results_in_place():
    record = make(blocks_ms=BLOCKS, step_ms=STEP, share_of_matmul=0.5, throughput={"value": 3.0, "unit": "words/s"})
    record |= {"fit_s": 3.0, "spent_s": 4.0, "accuracy": {"acc": 0.9}, "perplexity": {"test": 80.0}, "epoch_s": [1.0]}
    record |= {"test_perplexity_by_seed": {"1": 80.0}}
    bare = schema.without_results(record)
    lost = {"blocks_ms": [], "step_ms": None, "throughput": None, "share_of_matmul": None}
    fresh = {key: value for key, value in make().items() if key != "items_per_batch"}
    assert bare == {**fresh, **lost, "spent_s": 4.0}
    assert list(bare) == [*schema.RULES, "spent_s"], "in the order of every record"


def test_merging_keeps_the_warm_up_of_every_process():
    record = fresh()
    for process in (0, 1):
        record = schema.merge_process(record, part([10.0], warmup=[{**WARMUP, "process": process}]))
    assert [warmup["process"] for warmup in schema.validate(record, "x.json")["warmup"]] == [0, 1]
    assert "warmup" not in schema.merge_process(fresh(), part([10.0])), "a whole training has none"


def test_merging_keeps_the_test_perplexity_of_every_seed():
    record = fresh()
    for seed, test in ((1, 80.0), (2, 81.0)):
        record = schema.merge_process(
            record, part([10.0], perplexity={"test": test}, test_perplexity_by_seed={str(seed): test})
        )
    assert (record["perplexity"], record["test_perplexity_by_seed"]) == ({"test": 80.0}, {"1": 80.0, "2": 81.0})
    assert "test_perplexity_by_seed" not in schema.merge_process(fresh(), part([10.0]))


def test_times_of_an_earlier_commit_are_computed_anew_from_its_blocks():
    old = fresh(
        blocks_ms=[[10.0, 12.0], [20.0, 30.0], [11.0]],
        step_ms={"median": 12.0, "min": 10.0, "max": 30.0},
        throughput={"value": 100 / 0.012, "unit": "words/s"},
        share_of_matmul=0.11,
    )
    new = fresh()
    for blocks in old["blocks_ms"]:
        new = schema.merge_process(new, part(blocks))
    timed = schema.timed_by_process(old)
    assert timed["step_ms"] == new["step_ms"] and timed["throughput"]["unit"] == "words/s"
    assert timed["throughput"]["value"] == pytest.approx(new["throughput"]["value"])
    assert timed["share_of_matmul"] == pytest.approx(0.12), "the step is 11 ms and not 12"
    assert schema.timed_by_process(new) == new and old["step_ms"]["median"] == 12.0
    far = {"median": 1e299, "min": 1e299, "max": 1e299}
    for blocks, step in (([], old["step_ms"]), ([[]], old["step_ms"]), ([[1.0]], None), ([[1e-20]], far)):
        bare = fresh(blocks_ms=blocks, step_ms=step)
        assert schema.timed_by_process(bare) == bare


def test_the_worst_proof_of_all_processes_counts():
    bad = {
        "ok": False,
        "outputs_err": 0.5,
        "update_err": None,
        "failed": ["outputs", "update"],
        "kernel": {"ops": {"a": 1}},
    }
    bad["reason"] = "outputs: error 0.5"
    record = schema.merge_process(schema.merge_process(fresh(), part([10.0])), part([9.0], proof=bad))
    assert (record["status"], record["reason"]) == ("failed", "outputs: error 0.5")
    proof = record["proof"]
    assert (proof["ok"], proof["outputs_err"], proof["gradients_err"], proof["loss_err"]) == (False, 0.5, 1e-6, 1e-6)
    assert proof["update_err"] is None, "a failed proof without a number must not show the other process's"
    assert proof["kernel"] == {"ops": {"a": 1}}
    record = schema.merge_process(record, part([8.0]))
    assert (record["status"], record["proof"]["ok"]) == ("failed", False)


@pytest.mark.parametrize(("starts", "ok"), [(("a1", "a1"), True), (("a1", ""), True), (("a1", "b2"), False)])
def test_processes_that_start_from_other_weights_make_the_row_failed(starts, ok):
    record = fresh()
    for start in starts:
        record = schema.merge_process(record, part([10.0], proof=proof_of() | {"start": start}))
    assert (record["status"] == "ok") == ok and ("from other weights" in record["reason"]) != ok


def test_of_two_processes_the_error_that_is_worst_for_its_own_limit_is_kept_with_it():
    proofs = [
        {"ok": True, "loss_err": 9e-6, "limit": {"loss": 1e-5}, "worst_at": {"loss": "step 1"}},
        {"ok": True, "loss_err": 2e-5, "limit": {"loss": 1e-3}, "worst_at": {"loss": "step 5"}},
    ]
    for order in (proofs, proofs[::-1]):
        record = fresh()
        for proof in order:
            record = schema.merge_process(record, part([10.0], proof=proof))
        proof = record["proof"]
        assert (proof["loss_err"], proof["limit"]["loss"], proof["worst_at"]["loss"]) == (9e-6, 1e-5, "step 1")


@pytest.mark.parametrize(
    ("oks", "kept"), [((True, True), 0), ((True, False), 1), ((False, True), 0), ((False, False), 0)]
)
def test_the_kernels_of_the_first_process_that_failed_are_kept(oks, kept):
    record = fresh()
    kernels = [{"ops": {"a": 1}}, {"ops": {"b": 1}}]
    for ok, kernel in zip(oks, kernels, strict=True):
        failed = [] if ok else ["kernel"]
        record = schema.merge_process(record, part([10.0], proof={"ok": ok, "failed": failed, "kernel": kernel}))
    assert record["proof"]["kernel"] == kernels[kept]


def test_the_place_of_the_worst_error_is_that_of_the_process_that_had_it():
    errors = [(1e-3, "lstm_0/forward/kernel"), (5e-3, "embedding"), (2e-3, "dense_0/bias")]
    proofs = [{"ok": True, "update_err": error, "worst_at": {"update": name}} for error, name in errors]
    record = fresh()
    for proof in proofs:
        record = schema.merge_process(record, part([10.0], proof=proof))
    assert (record["proof"]["update_err"], record["proof"]["worst_at"]) == (5e-3, {"update": "embedding"})
    assert proofs[0]["worst_at"] == {"update": "lstm_0/forward/kernel"}


@pytest.mark.parametrize("order", [0, 1])
def test_a_nan_error_is_worse_than_any_number(order):
    parts = [part([10.0]), part([10.0], proof={"ok": True, "outputs_err": math.nan})]
    record = fresh()
    for process in parts[order:] + parts[:order]:
        record = schema.merge_process(record, process)
    assert record["status"] == "failed" and record["proof"]["outputs_err"] is None
    assert record["reason"] == "outputs: error is not finite"


def test_a_process_that_failed_makes_the_row_failed_and_keeps_the_blocks():
    record = schema.merge_process(fresh(), part([10.0]))
    record = schema.merge_process(record, {"status": "failed", "reason": "out of memory"})
    record = schema.merge_process(record, part([12.0]))
    assert (record["status"], record["reason"]) == ("failed", "out of memory")
    assert record["blocks_ms"] == [[10.0], [12.0]]


def test_a_failed_process_always_leaves_one_line_of_reason():
    proof = {"ok": False, "failed": ["kernel"], "reason": "kernel: op CudnnRNNV3 ran 0 times"}
    for result, reason in (
        ({"status": "failed", "reason": "a\nb"}, "a b"),
        ({"status": "failed", "proof": proof}, "kernel: op CudnnRNNV3 ran 0 times"),
        ({"proof": {"ok": False, "failed": ["kernel"]}}, "proof failed: kernel"),
        ({"status": "failed"}, "the process gave no reason"),
    ):
        record = schema.validate(schema.merge_process(fresh(), result), "x.json")
        assert (record["status"], record["reason"]) == ("failed", reason)


def test_merging_refuses_keys_that_no_record_has():
    with pytest.raises(TypeError, match="seconds"):
        schema.merge_process(fresh(), {"seconds": 3})
