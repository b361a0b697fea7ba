"""The schema: nothing but its keys and kinds is a record, and several processes make one of them."""

import math

import pytest

from harness import schema
from harness.schema import RecordError
from tests.record_cases import make


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
        ("row", "a/b"),
        ("mode", "training"),
        ("device", ["gpu"]),
        ("precision", "int8"),
        ("status", "done"),
        ("reason", "two\nlines"),
        ("reason", None),
        ("config", {"UNITS": 3}),
        ("config", []),
        ("blocks_ms", [1.0]),
        ("blocks_ms", [[0.0]]),
        ("blocks_ms", [[True]]),
        ("blocks_ms", [["1.0"]]),
        ("step_ms", 10.0),
        ("step_ms", {"median": 1.0, "min": 2.0, "max": 3.0}),
        ("step_ms", {"median": 1.0, "min": 1.0}),
        ("first_call_s", "1.0"),
        ("throughput", {"value": 3}),
        ("losses", {"0": 1.0}),
        ("proof", {"outputs_err": 0.0}),
        ("proof", {"ok": True, "outputs_err": "small"}),
        ("proof", {"ok": True, "kernel": []}),
        ("memory_peak_bytes", 3),
        ("gpu_utilisation", True),
        ("clocks", [None]),
        ("notes", "one"),
        ("published", {"K80": {"time": 3}}),
        ("environment", {"data": "mnist"}),
        ("environment", {"notes": [1]}),
        ("accuracy", {"acc": "high"}),
        ("epoch_s", [None]),
        ("colour", "red"),
    ],
)
def test_a_value_of_the_wrong_kind_is_an_error_that_names_its_key(key, value):
    with pytest.raises(RecordError, match=key):
        schema.validate({**make(), key: value}, "x.json")


def test_a_record_may_not_contradict_itself():
    with pytest.raises(RecordError, match="failed"):
        schema.validate(make(proof={"ok": False}), "x.json")
    with pytest.raises(RecordError, match="why the row is skipped"):
        schema.validate(make(status="skipped"), "x.json")
    with pytest.raises(RecordError, match="a time or an accuracy"):
        schema.validate(make(step_ms=None), "x.json")


# Several processes of one row


def part(blocks, **rest):
    proof = {"ok": True, "outputs_err": 1e-6, "gradients_err": None, "update_err": 1e-3, "loss_err": 1e-7}
    return dict(blocks_ms=blocks, items_per_batch=100, unit="words/s", proof=proof) | rest


def fresh(**changes):
    return make(**(dict(blocks_ms=[], step_ms=None) | changes))


def test_merging_computes_step_and_throughput_over_all_blocks():
    record = fresh()
    for blocks in ([10.0, 12.0], [20.0, 30.0], [11.0]):
        record = schema.merge_process(record, part(blocks))
    assert record["blocks_ms"] == [[10.0, 12.0], [20.0, 30.0], [11.0]]
    assert record["step_ms"] == {"median": 12.0, "min": 10.0, "max": 30.0}
    assert record["throughput"] == {"value": pytest.approx(100 / 0.012), "unit": "words/s"}
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
    assert record["share_of_matmul"] == pytest.approx(0.25)  # measured at 10 ms, the median is 20 ms
    assert empty == fresh()


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
    assert (proof["ok"], proof["outputs_err"], proof["gradients_err"], proof["loss_err"]) == (False, 0.5, None, 1e-7)
    assert proof["update_err"] is None, "a failed proof without a number must not show the other process's"
    assert proof["kernel"] == {"ops": {"a": 1}}
    record = schema.merge_process(record, part([8.0]))
    assert (record["status"], record["proof"]["ok"]) == ("failed", False)


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
