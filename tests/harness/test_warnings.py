"""What stands in and under a table about its times: processes, intervals, and every warning, given and not given."""

import shutil

import pytest

from harness.record import machine, records
from harness.record.stopping_rule import BUDGET_NOTE
from harness.report import cells, launches, plots, tables, warnings
from harness.report.provenance import throttling
from tests.record_cases import RUNS
from tests.table_cases import LAYOUT, PROOF, lines_of, make, page_of, run_of


def test_a_training_that_ran_once_says_so(tmp_path):
    columns = [["s", "fit_s", ".1f"], ["ms", "step_ms", "median_range"], ["acc", "accuracy", "pair"]]
    spec = {"title": "Fit", "mode": "fit", "device": None, "columns": columns}
    trained = dict(
        mode="fit", fit_s=30.0, epoch_s=[9.0, 11.0], accuracy={"acc": 0.97, "val_acc": 0.98}, losses=[2.0, 1.0]
    )
    record = make(processes=(1.0,), **trained)
    text = page_of(tmp_path / "run", record, layout={**LAYOUT, "tables": [spec], "headline": {}})
    row = lines_of(text, "Fit")[0]
    assert (row["s"], row["ms"], row["acc"]) == ("30.0", "10.00 [9.00, 11.00] (1)", "(0.9700, 0.9800)")
    foot = "in brackets their range, which says nothing about another process.\n\nEach training ran once"
    assert f"Time per step: median of 2 epochs in one process (1), {foot}" in text
    twice = make(**trained)
    text = page_of(tmp_path / "twice", twice, layout={**LAYOUT, "tables": [spec], "headline": {}})
    assert "accuracy and perplexity are of a row's first process;" in text and "ran once" not in text


def test_rows_of_one_process_show_a_range_that_is_said_to_be_within_it(tmp_path):
    text = page_of(tmp_path / "run", make(processes=(1.0,)), make("keras_cudnn", processes=(1.0, 1.01)))
    rows = lines_of(text, "Speed")
    assert [row["ms"] for row in rows[:2]] == ["10.00 [9.00, 11.00] (1)", "10.05 ±6.5 % (2)"]
    assert "over 1 to 2 processes" in text and "in brackets: range within a single process, which says nothing" in text


def test_ratios_of_single_processes_are_said_to_have_no_interval(tmp_path):
    hint = "Ratios have no interval, and another run's may differ: `--resume --processes=3{}` gives them one."
    for processes, said in (((1.0,), True), ((1.0, 1.01), False)):
        rows = [make(processes=processes), make("keras_cudnn", processes=processes)]
        assert (hint.format("") in page_of(tmp_path / str(said), *rows)) == said
        for row in rows:
            row["config"]["ROW_BUDGET_S"] = 30.0
        assert (hint.format(" --row-budget-s=120") in page_of(tmp_path / f"{said} budget", *rows)) == said
    assert "no interval" not in page_of(tmp_path / "one", make(processes=(1.0,))), "one row has no ratio"


def test_records_of_earlier_commits_are_drawn_by_todays_rule(tmp_path):
    old = make("keras_cudnn", processes=(1.0, 1.2, 1.05))
    old["step_ms"] = {"median": 10.9, "min": 9.0, "max": 13.2}  # of all blocks
    old["throughput"]["value"] = 100 / 0.0109
    old["notes"] = ["fewer processes: its time was up (ROW_BUDGET_S)"]
    text = page_of(tmp_path / "run", old)
    row = lines_of(text, "Speed")[0]
    assert (row["row"], row["ms"], row["words/s"]) == ("keras_cudnn", "10.50 ±30 % (3)", "9,524")
    assert "Fewer processes: its time was up (ROW_BUDGET_S): `keras_cudnn`. --resume" in text and "- [1]" not in text


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_every_committed_run_is_drawn_with_a_line_for_each_record(tmp_path, run, monkeypatch):
    if run.name != "nvidia-h100":  # its pictures are enough: most of the time goes into turning figures into pixels
        monkeypatch.setattr(plots, "_in_few_colours", lambda figure: b"")
    drawn = shutil.copytree(run, tmp_path / run.name)
    _, problems = tables.render(drawn)
    assert problems == []
    found, _ = records.read_run(drawn)
    for layout in run.glob("layout/*.json"):
        page = (drawn / f"{layout.stem}.md").read_text()
        own = [record for record in found if record["benchmark"] == layout.stem]
        assert own and all(f"| {r['row']}" in page for r in own if r["status"] != "skipped")
        assert all(f"`{r['row']}`" in page or f"| {r['row']}" in page for r in own if r["status"] == "skipped")


# The warnings


def state(process=0, when="timed", **changes):
    """What NVML says of a GPU that nothing disturbs."""
    quiet = {"sm_mhz": 1980, "sm_max_mhz": 1980, "temperature_c": 45, "throttle_reasons": [], "gpu_processes": 1}
    return {"process": process, "when": when, **quiet, **changes}


def warmup(settled, process=0):
    return {"process": process, "seconds": 3.0, "batches": 40, "settled": settled}


def counts(launches, syncs):
    return {"proof": {**PROOF, "kernel": {"launches": launches, "syncs": syncs}}}


def known(launches, syncs):
    return {"committed": {"run": "nvidia", "launches": launches, "syncs": syncs}}


QUIET = [[10.0, 10.0, 10.1], [10.0, 10.1, 10.0]]
# What a record has, and what is said of it: "" for nothing.
CASES = {
    "spread": [
        ({"blocks_ms": [[10.0, 11.5, 10.0], [10.0, 11.5, 10.0]]}, "**Spread over 5 %", "7 %"),
        ({"blocks_ms": [[10.0, 10.4, 10.0], [10.0, 10.0, 10.4]]}, "", ""),
        ({"blocks_ms": [[10.0, 20.0]]}, "", ""),  # two blocks are no spread
    ],
    "drift": [
        ({"blocks_ms": [[10.0] * 3, [10.1] * 3, [10.3] * 3]}, "**Drift over 2 %", "+3 %"),
        ({"blocks_ms": [[10.3] * 3, [10.1] * 3, [10.0] * 3]}, "**Drift over 2 %", "-3 %"),
        ({"blocks_ms": [[10.0] * 3, [10.3] * 3, [10.1] * 3]}, "", ""),  # back again
        ({"blocks_ms": [[10.0] * 3, [10.05] * 3, [10.1] * 3]}, "", ""),  # 1 %
        ({"blocks_ms": [[10.0] * 3, [10.3] * 3]}, "", ""),  # of two every pair goes one way
    ],
    "slow_start": [
        ({"blocks_ms": [[10.3, 10.0, 10.0], [10.4, 10.0, 10.0]]}, "**First block over 2 % slower", "+4 %"),
        ({"blocks_ms": [[10.3, 10.0, 10.0], [10.0, 10.0, 10.0], [10.0, 10.0, 10.0]]}, "", ""),  # one of three
        ({"blocks_ms": [[9.6, 10.0, 10.0]]}, "", ""),
        ({"blocks_ms": [[10.3, 10.0]]}, "", ""),
    ],
    "shared_gpu": [
        ({"clocks": [state(gpu_processes=1), state(1, gpu_processes=3)]}, "**Another process on the GPU", "2"),
        ({"clocks": [state(when="start", gpu_processes=2), state()]}, "", ""),  # gone before anything was timed
        ({"clocks": [state(gpu_processes=None)]}, "", ""),
        ({"clocks": [state(gpu_processes=0)]}, "", ""),  # of an earlier commit, in a container that hides every process
    ],
    "low_clock": [
        ({"clocks": [state(), state(1, sm_mhz=1755)]}, "**SM clock under its maximum", "1755 of 1980 MHz"),
        ({"clocks": [state(when="end", sm_mhz=1200)]}, "**SM clock under its maximum", "1200 of 1980 MHz"),
        ({"clocks": [state(when="start", sm_mhz=345), state(sm_mhz=1965), state(when="end", sm_mhz=345)]}, "", ""),
    ],
    "throttled": [
        ({"clocks": [state(throttle_reasons=["hardware slowdown"])]}, "**Clocks throttled", "hardware slowdown"),
        ({"clocks": [state()]}, "", ""),
        ({"clocks": [state(throttle_reasons=None)]}, "", ""),
    ],
    "hot": [
        ({"clocks": [state(temperature_c=60), state(1, temperature_c=81)]}, "**Temperature over 80", "81 °C"),
        ({"clocks": [state(temperature_c=40), state(1, temperature_c=56)]}, "**Temperature over 80", "40 to 56 °C"),
        ({"clocks": [state(temperature_c=65), state(1, temperature_c=80)]}, "", ""),
    ],
    "changed": [  # launches and waits: those of the record, and of the committed one
        (counts(206, 0) | known(200, 0), "", ""),
        (counts(211, 0) | known(200, 0), "**Launches over 5 % off the committed", "211 launches against 200 in nvidia"),
        (counts(190, 0) | known(200, 0), "**Launches over 5 % off the committed", "190 launches against 200 in nvidia"),
        (counts(200, 2) | known(200, 1), "**Launches over 5 % off the", "2 waits for the GPU against 1 in nvidia"),
        (counts(200, 1) | known(200, 2), "", ""),
        (counts(200, None) | known(200, None), "", ""),
        (counts(400, 0), "", ""),
    ],
    "not_settled": [
        ({"warmup": [warmup(True), warmup(False, 1)]}, "**Warm-up not settled", "1 of 2 processes"),
        ({"warmup": [warmup(True), warmup(True, 1)]}, "", ""),
        ({}, "", ""),  # of an earlier commit, or a whole training
    ],
}


def given(row="keras", blocks_ms=QUIET, clocks=(), **changes):
    drawn = {key: changes.pop(key) for key in ("committed",) if key in changes}
    record = make(row, processes=(), **changes) if "proof" in changes else make(row, **changes)
    return {**record, **drawn, "blocks_ms": blocks_ms, "clocks": list(clocks)}


@pytest.mark.parametrize(("reasons", "seen"), [(None, None), ([], []), (["hardware slowdown"], ["hardware slowdown"])])
def test_nobody_says_that_clocks_were_not_throttled_where_nvml_could_not_tell(reasons, seen):
    assert throttling(given(clocks=[state(throttle_reasons=reasons)])) == seen


def test_every_warning_has_cases_in_which_it_is_given_and_in_which_it_is_not():
    assert CASES.keys() == {mark.__name__ for mark in warnings.WARNINGS.values()}
    assert all({bool(said) for _, said, _ in cases} == {True, False} for cases in CASES.values())


@pytest.mark.parametrize(("changes", "said", "figure"), [case for cases in CASES.values() for case in cases])
def test_warning_is_given_where_it_is_due_and_nowhere_else(changes, said, figure):
    lines = warnings.lines([given(**changes)], brief=False)
    if not said:
        assert lines == []
    else:
        assert len(lines) == 1 and lines[0].startswith(said) and lines[0].endswith(f"**: `keras` {figure}.")


def test_warnings_name_every_row_in_one_line_and_few_in_a_headline():
    rows = [given(f"row_{k}", warmup=[warmup(False)]) for k in range(8)] + [given("settled", warmup=[warmup(True)])]
    (line,) = warnings.lines(rows, brief=False)
    assert all(f"`row_{k}`" in line for k in range(8)) and "settled`" not in line and "1 of 1" not in line
    (line,) = warnings.lines(rows, brief=True)
    assert line.endswith("`row_5` and 2 more.")


def test_a_ratio_whose_slower_time_is_an_upper_bound_is_not_judged(tmp_path):
    def ratio(**beside):
        """Of `keras`, twice as fast as `while_loop`; beside: the notes of a row."""
        rows = [make(row, ms, notes=beside.get(row, [])) for row, ms in (("while_loop", 2.0), ("keras", 1.0))]
        page = page_of(tmp_path / f"{len([*tmp_path.iterdir()])}", *rows)
        shown = next(line["speedup"] for line in lines_of(page, "Speed") if line["row"].startswith("keras"))
        assert ("*not judged*: other processes ran beside the slower" in page) == ("not judged" in shown)
        return shown

    assert ratio() == ratio(keras=[machine.OTHERS_NOTE]) and ratio().startswith("2.00x") and "not judged" not in ratio()
    assert ratio(while_loop=[machine.OTHERS_NOTE]) == f"{ratio()}, not judged"


def test_a_table_explains_the_verdicts_after_its_ratios_and_no_other_text():
    row = ["keras", "a row, not judged", "1.00x ±2.0 %, inconclusive", "failed: it is, not judged"]
    assert cells.verdicts([row]) == ["*inconclusive*: the ratio's interval includes 1."]
    row[2] += ", not judged [1]"
    (line,) = cells.verdicts([row])
    assert line.startswith("*inconclusive*: ") and "; *not judged*: " in line
    assert cells.verdicts([["keras", "", "1.00x", "proven"]]) == []


def test_row_without_figures_is_not_warned_of():
    failed = given(status="failed", reason="x", warmup=[warmup(False)], clocks=[state(temperature_c=90)])
    assert warnings.lines([failed], brief=False) == []


def test_warnings_stand_under_the_table_and_in_the_headline(tmp_path):
    hot = make(clocks=[state(temperature_c=84)], warmup=[warmup(False), warmup(True, 1)])
    text = page_of(tmp_path / "run", hot, make("keras_cudnn", clocks=[state()]))
    for said in ("apart**: `keras` 84 °C.", "limit**: `keras` 1 of 2 processes."):
        assert said in text and said in tables.headline(tmp_path / "run")
    assert "Clocks were not throttled." in text


def test_throttled_clocks_are_said(tmp_path):
    slow = make(clocks=[state(), state(throttle_reasons=["software power cap"])])
    text = page_of(tmp_path / "slow", slow)
    assert "**Clocks throttled**: `keras` software power cap." in text and "not throttled" not in text
    assert "Clocks were not throttled." in page_of(tmp_path / "steady", make(clocks=[state()]))
    assert "throttled" not in page_of(tmp_path / "cpu", make(device="cpu", precision="fp32"))


def test_rows_whose_time_was_up_stand_in_one_line_and_have_no_mark(tmp_path):
    rows = [make(row, notes=[BUDGET_NOTE, "another note"]) for row in ("while_loop", "keras")]
    text = page_of(tmp_path / "run", *rows, make("keras_cudnn"))
    assert [row["row"] for row in lines_of(text, "Speed")[:3]] == ["while_loop [1]", "keras [1]", "keras_cudnn"]
    assert "Fewer processes: its time was up (ROW_BUDGET_S): `while_loop`, `keras`." in text
    assert text.count("its time was up") == 1 and "- [1] another note" in text


def test_launches_are_compared_with_the_committed_record_of_the_same_row_and_versions(tmp_path, monkeypatch):
    def of(launches, environment=None, **changes):
        record = make("torch_lstm", environment={"torch": "2.13.0", **(environment or {})}, **changes)
        record["proof"] = {**record["proof"], "kernel": {"launches": launches, "syncs": 0}}
        return record

    def seen(mine, name):
        return "torch_lstm` 300 launches against 200 in h200" in page_of(tmp_path / name, mine)

    run_of(tmp_path / "results" / "h200", of(200))
    monkeypatch.setattr("harness.report.launches.COMMITTED", tmp_path / "results")
    assert seen(of(300), "more") and not seen(of(205), "same")
    others = [{"torch": "2.14.0"}, {"gpu": "NVIDIA A100"}, {"data": {"name": "ptb", "sha256": {"ptb.train.txt": "0"}}}]
    assert not any(seen(of(300, other), str(k)) for k, other in enumerate(others)), "they may launch others"
    config = {"CONFIG": "large", "UNITS": 650}
    assert not seen(of(300, config=config), "units") and not seen(of(300, precision="fp16"), "precision")
    assert launches.with_known([of(200)], tmp_path / "results" / "h200")[0]["committed"] is None, "not with itself"
