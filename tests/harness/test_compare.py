"""Two runs compared from the command line: which rows are paired, what is said, what is refused, the exit status."""

import itertools
import json
import math
import os
import random
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from harness.compare import __main__ as compare
from harness.record import intervals, machine, records, schema
from tests import record_cases

PROJECT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {
    "gpu": None,
    "driver": None,
    "cpu": "Xeon",
    "cores": 16,
    "os": "Linux-6.1",
    "python": "3.11.7",
    "tensorflow": "2.21.0",
    "keras": "3.15.1",
    "date": "2026-01-31T10:00:00+00:00",
    "commit": "a" * 40,
    "dirty": False,
    "packages": {"tensorflow-cpu": "2.21.0", "numpy": "2.4.6", "torch": "2.13.0"},
    "data": {"name": "ptb", "title": "Penn Treebank", "source": "real", "sha256": {"ptb.train.txt": "fcea919f"}},
}
NAMES = ("keras", "block_fused", "static_graph", "while_loop")
seeds = itertools.count(1)


@pytest.fixture(autouse=True)
def same_noise_in_whatever_order():
    global seeds
    seeds = itertools.count(1000)


def make(row="keras", ms=10.0, processes=5, mode="train", noise=0.003, environment=None, config=None, **changes):
    """A proven record of so many processes of three blocks around `ms`, the processes about 0.3 % apart."""
    draw = random.Random(next(seeds))
    own = [ms * math.exp(draw.gauss(0, noise)) for _ in range(processes)]
    blocks = changes.pop("blocks_ms", [[0.99 * middle, middle, 1.02 * middle] for middle in own])
    given = dict(
        benchmark="ptb",
        row=row,
        mode=mode,
        device="cpu",
        precision="fp32",
        config={
            "CONFIG": "small",
            "UNITS": 200,
            "PROCESSES": max(5, processes),
            "ROWS": "all",
            "PRECISION": "fp32",
            **(config or {}),
        },
        blocks_ms=blocks,
        step_ms=intervals.step_of(list(filter(None, blocks))) if any(blocks) else None,
        proof=record_cases.proof_of(mode),
        items_per_batch=100,
        environment={**ENVIRONMENT, **(environment or {})},
    )
    given |= changes
    if "throughput" not in given and given["step_ms"]:
        given["throughput"] = {"value": 100 / given["step_ms"]["median"] * 1e3, "unit": "words/s"}
    return schema.new_record(**given)


def run_of(path, *rows):
    with records.open_run(path) as run:
        for record in rows:
            records.write_record(run, record)
    return str(path)


def four(factor=1.0, slow=1.0, **changes):
    """Records of four rows; all times multiplied by `factor`, those of keras by `slow` too."""
    return [make(row, (10 + k) * factor * (slow if row == "keras" else 1), **changes) for k, row in enumerate(NAMES)]


@pytest.fixture
def compared(tmp_path, capsys):
    """(before, after, *options) → (exit status, markdown, errors, JSON) of a comparison of two runs of these records."""

    def run(before, after, *options):
        for name, rows in (("before", before), ("after", after)):
            shutil.rmtree(tmp_path / name, ignore_errors=True)
            run_of(tmp_path / name, *rows)
        file = tmp_path / "compared.json"
        file.unlink(missing_ok=True)
        status = compare.main([str(tmp_path / "before"), str(tmp_path / "after"), f"--json={file}", *options])
        out, errors = capsys.readouterr()
        return status, out, errors, json.loads(file.read_text()) if file.exists() else None

    return run


def section(markdown, title):
    return markdown.split(f"## {title}\n\n")[1].split("\n## ")[0]


def row_of(markdown, row):
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in markdown.splitlines() if f"| {row} " in line]


# What a comparison says


def test_a_slowed_row_is_slower_and_the_others_are_the_same(compared):
    status, markdown, errors, found = compared(four(), four(slow=1.05))
    shown = {row["row"]: row["verdict"] for row in found["rows"]}
    assert shown == {"keras": "slower", "block_fused": "same", "static_graph": "same", "while_loop": "same"}
    (keras,) = [row for row in found["rows"] if row["row"] == "keras"]
    assert keras["interval"][0] < keras["ratio"] < keras["interval"][1] and keras["ratio"] == pytest.approx(
        1.05, abs=0.01
    )
    assert keras["p_holm"] < 0.05 and keras["processes"] == [5, 5]
    assert "Of 4 rows: 1 slower, 3 same." in markdown
    (cells,) = row_of(markdown, "keras")
    assert cells[1] == "train" and cells[-1] == "slower" and cells[4] == f"{keras['raw_ratio']:.3f}"
    assert cells[2] == f"{keras['before_ms']:.4g} (5)" and (status, errors) == (0, "")


def test_a_row_made_faster_is_faster(compared):
    _, _, _, found = compared(four(), four(slow=0.9))
    assert [row["verdict"] for row in found["rows"] if row["row"] == "keras"] == ["faster"]


def test_the_unit_is_the_process_so_that_more_blocks_change_nothing(compared):
    before, after = four(), four(slow=1.05)
    *_, found = compared(before, after)
    for record in (*before, *after):
        record["blocks_ms"] = [blocks * 10 for blocks in record["blocks_ms"]]
    *_, again = compared(before, after)
    assert again["rows"] == found["rows"]


def test_the_ratio_is_of_geometric_means_of_the_processes_medians(compared):
    before, after = four(), four(slow=1.05)
    *_, found = compared(before, after, "--drift=0%")
    for first, second in zip(before, after, strict=True):
        (row,) = [row for row in found["rows"] if row["row"] == first["row"]]
        sides = [[statistics.median(blocks) for blocks in record["blocks_ms"]] for record in (first, second)]
        ratio = statistics.geometric_mean(sides[1]) / statistics.geometric_mean(sides[0])
        assert row["ratio"] == row["raw_ratio"] == pytest.approx(ratio)
        assert [row["before_ms"], row["after_ms"]] == [pytest.approx(statistics.geometric_mean(side)) for side in sides]


def test_a_shift_of_all_rows_is_told_and_taken_off_and_left_in_without_drift(compared):
    before, after = four(), four(factor=1.025)
    _, markdown, _, found = compared(before, after)
    assert {row["verdict"] for row in found["rows"]} <= {"same", "inconclusive"}
    (shift,) = found["common_shift"]
    assert shift["device"] == "cpu" and shift["removed"] and shift["ratio"] == pytest.approx(1.025, abs=0.005)
    assert f"CPU: all rows together shifted to {shift['ratio']:.3f} [" in markdown and "taken off" in markdown
    _, markdown, _, found = compared(before, after, "--drift=0%")
    assert {row["verdict"] for row in found["rows"]} == {"slower"} and found["common_shift"] == []
    assert "shifted" not in markdown


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ([make(), make(mode="forward")], [make(), make(mode="forward")], "rows of one implementation only"),
        (four(), four(factor=1.05), "too far for a drift: left in"),
        (four(noise=0.3), four(noise=0.3), "shifted by together is unknown"),
    ],
)
def test_why_a_common_shift_was_not_taken_off_is_said(compared, before, after, expected):
    _, markdown, _, found = compared(before, after)
    assert expected in section(markdown, "Rows") and not found["common_shift"][0]["removed"]


def test_each_benchmark_has_its_geometric_mean_with_an_interval(compared):
    def both(slow):
        return [*four(slow=slow), *four(factor=2.0, benchmark="stacked_lm")]

    _, markdown, _, found = compared(both(1), both(1.3))
    first, second = found["geometric_means"]
    assert (first["benchmark"], first["rows"], second["benchmark"]) == ("ptb", 4, "stacked_lm")
    assert first["ratio"] == pytest.approx(1.3**0.25, abs=0.01) and second["ratio"] == pytest.approx(1, abs=0.01)
    assert all(mean["interval"][0] < mean["ratio"] < mean["interval"][1] for mean in (first, second))
    assert f"{first['ratio']:.3f} [{first['interval'][0]:.3f}, " in section(markdown, "Geometric means")


def test_the_tables_are_per_benchmark_config_device_and_precision(compared):
    rows = [make(), make(config={"CONFIG": "large"}), make(precision="fp16"), make(mode="forward"), make("keras_xla")]
    _, markdown, _, _ = compared(
        rows, [make(row["row"], mode=row["mode"], precision=row["precision"], config=row["config"]) for row in rows]
    )
    titles = [line for line in markdown.splitlines() if line.startswith("### ")]
    assert titles == ["### ptb: large, CPU, fp32", "### ptb: small, CPU, fp32", "### ptb: small, CPU, fp16"]
    lines = markdown.split(titles[1])[1].split("### ")[0].splitlines()
    modes = [line.split("|")[2].strip() for line in lines if "| keras" in line]
    assert modes == ["train", "train", "forward"]


# What cannot be judged or compared


@pytest.mark.parametrize(
    ("first", "second", "said"), [(4, 5, "4 processes"), (9, 4, "4 processes"), (1, 5, "1 process")]
)
def test_fewer_than_5_processes_are_never_a_verdict(compared, first, second, said):
    before, after = [make(processes=first), *four()[1:]], [make(ms=20, processes=second), *four()[1:]]
    status, markdown, _, found = compared(before, after)
    (cells,) = row_of(markdown, "keras")
    assert cells[-1] == f"cannot judge: {said}, at least 5 needed" and cells[4:6] == ["-", "-"]
    (row,) = [row for row in found["rows"] if row["row"] == "keras"]
    assert row["verdict"] is None and "ratio" not in row and row["reason"] == cells[-1] and status == 0
    assert "1 cannot be judged" in markdown and {r["verdict"] for r in found["rows"] if r is not row} == {"same"}


def test_a_process_without_blocks_is_none(compared):
    blocks = make()["blocks_ms"]
    lost = make(blocks_ms=[*blocks[:2], [], *blocks[3:]])
    _, markdown, _, _ = compared([lost], [make()])
    assert "cannot judge: 4 processes" in markdown


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (
            make(status="failed", reason="out of | memory", blocks_ms=[], step_ms=None, proof=None),
            "failed: out of \\| memory",
        ),
        (
            make(status="skipped", reason="needs an NVIDIA GPU", blocks_ms=[], step_ms=None),
            "skipped: needs an NVIDIA GPU",
        ),
        (make(status="failed", reason="proof failed: update"), "failed: proof failed: update"),
        (make("torch_lstm"), "no such row"),
    ],
)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_row_that_failed_or_was_skipped_or_is_missing_is_listed_and_not_compared(compared, when, record, reason):
    runs = {"before": four(), "after": four(), when: [record, *four()[1:]]}
    _, markdown, errors, found = compared(runs["before"], runs["after"])
    assert f"{when}: {reason}" in section(markdown, "Not compared") and not row_of(section(markdown, "Rows"), "keras")
    (row,) = [row for row in found["rows"] if row["row"] == "keras"]
    assert row["verdict"] is None and f"{when}: " in row["reason"] and "ratio" not in row
    ran_before = when == "after" or record["status"] == "ok"
    assert errors == ("warning: 1 rows that ran before are not compared; see Not compared\n" if ran_before else "")
    assert {r["verdict"] for r in found["rows"] if r["row"] in NAMES[1:]} == {"same"}


def test_a_record_copied_from_the_other_run_is_not_called_the_same(compared):
    before = four()
    _, markdown, _, found = compared(before, [before[0], *four()[1:]])
    assert "the very same measurement stands in both runs" in section(markdown, "Not compared")
    assert [row["verdict"] for row in found["rows"] if row["row"] == "keras"] == [None]


# What differs


def test_runs_of_one_machine_and_code_differ_in_nothing(compared):
    _, markdown, _, found = compared(four(), four())
    assert section(markdown, "What differs").strip() == "Nothing but when they ran."
    assert found["differences"] == [] and {tuple(row["marks"]) for row in found["rows"]} == {()}


@pytest.mark.parametrize(
    ("changes", "line", "mark"),
    [
        (dict(environment={"cpu": "EPYC"}), "- cpu: Xeon → EPYC", "other machine"),
        (dict(environment={"cores": 8}), "- cores: 16 → 8", "other machine"),
        (dict(environment={"tensorflow": "2.22.0"}), "- tensorflow: 2.21.0 → 2.22.0", "other software"),
        (dict(environment={"packages": {"numpy": "2.5.0"}}), "- numpy: 2.4.6 → 2.5.0", "other software"),
        (dict(environment={"driver": "580"}), "- driver: unknown → 580", None),
        (
            dict(environment={"variables": {"XLA_FLAGS": "--a --b"}}),
            "- variables of the environment: unknown → XLA_FLAGS=--a --b",
            None,
        ),
        (
            dict(
                environment={"data": {"name": "ptb", "title": "Penn Treebank", "source": "embedded", "reason": "none"}}
            ),
            "- data: Penn Treebank → Penn Treebank (embedded: none)",
            "other data",
        ),
        (dict(config={"UNITS": 256}), "- UNITS: 200 → 256", "other settings"),
        (dict(config={"UNITS": None}), "- UNITS: 200 → None", "other settings"),
        (dict(config={"SEED": 1}), "- SEED: unknown → 1", None),
        (dict(config={"PROCESSES": 9}), "- PROCESSES: 5 → 9", None),
        (dict(environment={"commit": "b" * 40}), "- code: commit aaaaaaaaaa → commit bbbbbbbbbb", None),
        (
            dict(environment={"dirty": True}),
            "- code: commit aaaaaaaaaa → commit aaaaaaaaaa with uncommitted changes",
            None,
        ),
    ],
)
def test_what_differs_is_spelled_out_at_the_top_and_marked_at_the_verdict(compared, changes, line, mark):
    _, markdown, _, found = compared(four(), four(**changes))
    assert line in section(markdown, "What differs").splitlines()
    assert markdown.index("## What differs") < markdown.index("## Rows")
    assert {tuple(row["marks"]) for row in found["rows"]} == {(mark,) if mark else ()}
    if mark:
        (cells,) = row_of(markdown, "keras")
        assert cells[-1].endswith(f" ({mark})")


def test_another_variable_of_the_environment_is_other_software(compared):
    before, after = (
        [make(environment={"variables": variables}), *four()[1:]] for variables in ({}, {"NVIDIA_TF32_OVERRIDE": "0"})
    )
    _, markdown, _, found = compared(before, after)
    said = "- variables of the environment: none set → NVIDIA_TF32_OVERRIDE=0 (`ptb keras train`)"
    marks = {row["row"]: row["marks"] for row in found["rows"]}
    assert said in markdown and marks.pop("keras") == ["other software"] and not any(marks.values())


def test_a_difference_of_some_rows_names_them(compared):
    _, markdown, _, found = compared(four(), [make(environment={"cpu": "EPYC"}), *four()[1:]])
    assert "- cpu: Xeon → EPYC (`ptb keras train`)" in markdown
    assert [row["row"] for row in found["rows"] if row["marks"]] == ["keras"]
    assert found["differences"][0] | {"all_rows": False, "rows": ["ptb keras train"]} == found["differences"][0]


def test_a_package_of_a_framework_that_the_row_did_not_run_on_does_not_count(compared):
    newer = {"packages": {**ENVIRONMENT["packages"], "torch": "2.14.0"}}
    _, markdown, _, _ = compared(four(), four(environment=newer))
    assert "torch" not in section(markdown, "What differs")
    _, markdown, _, _ = compared(four(environment={"torch": "2.13.0"}), four(environment={"torch": "2.14.0", **newer}))
    assert "- torch: 2.13.0 → 2.14.0" in section(markdown, "What differs")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"commit": None}, "some records do not know their commit"),
        ({"dirty": True}, "equal commits may be different code"),
    ],
)
def test_code_that_may_differ_unseen_is_told(compared, changes, said):
    _, markdown, _, _ = compared(four(environment=changes), four(environment=changes))
    assert said in section(markdown, "What differs")


@pytest.mark.parametrize(
    "changes",
    [dict(notes=[machine.OTHERS_NOTE]), dict(clocks=[{"process": 0, "when": "timed", "gpu_processes": 2}])],
    ids=["processors", "gpu"],
)
@pytest.mark.parametrize("when", [0, 1])
def test_a_row_that_was_not_alone_on_its_machine_is_marked(compared, changes, when):
    runs = [four(), four()]
    runs[when][0] = make(**changes)
    _, markdown, _, found = compared(*runs)
    assert {row["row"]: row["marks"] for row in found["rows"] if row["marks"]} == {"keras": ["not alone"]}
    (cells,) = row_of(markdown, "keras")
    assert cells[-1].endswith(" (not alone)") and "a difference may be theirs" in section(markdown, "Rows")
    assert "(not alone)" not in compared(four(), four())[1]


def test_rows_of_another_machine_keep_their_shift_and_say_nothing_of_a_drift(compared):
    _, markdown, _, found = compared(four(), four(factor=1.025, environment={"cpu": "EPYC"}))
    assert found["common_shift"] == [] and "shifted" not in markdown
    assert all(row["ratio"] == row["raw_ratio"] for row in found["rows"])
    assert {row["verdict"] for row in found["rows"]} == {"inconclusive"}  # 2.5 % may be the drift of either machine


def test_rows_of_two_precisions_are_paired_only_when_asked(compared):
    half = four(slow=0.5, precision="fp16", config={"PRECISION": "fp16"})
    _, markdown, _, found = compared(four(), half)
    assert {row["verdict"] for row in found["rows"]} == {None} and len(found["rows"]) == 8
    assert "Unknown: no row could be compared." in markdown
    _, markdown, _, found = compared(four(), half, "--across=precision")
    assert len(found["rows"]) == 4 and found["rows"][0]["precision"] == "fp32 → fp16"
    assert (
        "- precision: fp32 → fp16" in section(markdown, "What differs")
        and "### ptb: small, CPU, fp32 → fp16" in markdown
    )
    (cells,) = row_of(markdown, "keras")
    assert cells[-1] == "faster (other precision)"


def test_two_precisions_in_one_run_are_refused_across_precision(compared):
    status, out, errors, _ = compared([make(), make(precision="fp16")], [make()], "--across=precision")
    assert (status, out) == (2, "") and errors.count("\n") == 1
    assert "has ptb small keras train cpu in fp16 and fp32" in errors


# Exit status


@pytest.mark.parametrize(
    ("slow", "limit", "expected"), [(1.0, "5%", 0), (1.10, "5%", 1), (1.10, "15%", 0), (1.04, "5%", 0), (0.8, "0%", 0)]
)
def test_fail_if_slower_is_exit_status_1_where_the_ratio_of_a_slower_row_is_beyond(compared, slow, limit, expected):
    status, markdown, errors, found = compared(four(), four(slow=slow), f"--fail-if-slower={limit}")
    assert status == expected and found["fail_if_slower"] == float(limit[:-1]) / 100
    assert found["too_slow"] == (["ptb.small.keras.train.cpu.fp32"] if expected else []) and "## Rows" in markdown
    assert errors.startswith("slower by over 5 %: ptb.small.keras.train.cpu.fp32: 1.") if expected else errors == ""


FAILED = dict(status="failed", reason="out of memory", blocks_ms=[], step_ms=None, proof=None)


@pytest.mark.parametrize(
    ("after", "reason"),
    [(make(**FAILED), "after: failed: out of memory"), (None, "after: no such row")],
    ids=["failed", "missing"],
)
def test_a_row_that_was_ok_and_is_lost_fails_the_gate_by_name(compared, after, reason):
    rows = [*([after] if after else []), *four()[1:]]
    status, _, errors, found = compared(four(), rows, "--fail-if-slower=50%")
    assert status == 1 and f"lost: ptb.small.keras.train.cpu.fp32: {reason}\n" in errors
    assert found["lost"] == ["ptb.small.keras.train.cpu.fp32"] and found["too_slow"] == []
    assert compared(four(), rows)[0] == 0, "without the gate it is a warning"
    assert compared(rows, four(), "--fail-if-slower=50%")[0] == 0, "it runs now"
    skipped = make(**{**FAILED, "status": "skipped"})
    assert compared(four(), [skipped, *four()[1:]], "--fail-if-slower=50%")[0] == 0


def test_a_gate_for_which_every_row_is_lost_does_not_pass(compared):
    status, _, errors, _ = compared([make()], [make(**FAILED)], "--fail-if-slower=5%")
    assert status == 1 and "lost: " in errors


def test_rows_that_the_gate_cannot_judge_are_counted(compared):
    _, _, errors, _ = compared([make(processes=4), *four()[1:]], four(), "--fail-if-slower=5%")
    assert errors == "warning: 1 rows cannot be judged, 3 were; see the tables\n"


def test_rows_that_are_not_compared_share_a_line_per_reason(compared):
    before = [make(row, mode=mode) for row in ("a", "b") for mode in ("train", "forward")]
    _, markdown, _, found = compared(
        [*before, make(**FAILED)], [make("c", precision="fp16"), make("c", benchmark="mnist")]
    )
    lines = section(markdown, "Not compared").rstrip().splitlines()[2:]
    shown = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert shown == [
        ["ptb small cpu fp32: a (forward, train), b (forward, train)", "after: no such row"],
        ["ptb small cpu fp32: keras (train)", "before: failed: out of memory; after: no such row"],
        ["mnist small cpu fp32: c (train)", "before: no such row"],
        ["ptb small cpu fp16: c (train)", "before: no such row"],
    ]
    assert len(found["rows"]) == 7


def test_a_row_slower_by_chance_alone_does_not_fail(compared):
    times = [7.0, 9.0, 10.0, 12.0, 15.0]
    before, after = ([make(blocks_ms=[[factor * ms] for ms in times])] for factor in (1, 1.2))
    status, _, _, found = compared(before, after, "--fail-if-slower=5%")
    assert status == 0 and {row["verdict"] for row in found["rows"]} == {"inconclusive"}


def test_without_fail_if_slower_a_slower_row_is_exit_status_0(compared):
    status, _, _, found = compared(four(), four(slow=1.5))
    assert status == 0 and found["fail_if_slower"] is found["too_slow"] is None


def test_a_gate_through_which_nothing_could_be_judged_does_not_pass(compared):
    status, markdown, errors, _ = compared([make(processes=4)], [make(processes=4)], "--fail-if-slower=5%")
    assert status == 2 and "cannot judge: 4 processes" in markdown
    assert errors.startswith("error: --fail-if-slower: no row could be judged") and errors.count("\n") == 1


# Refused, in one line


def refused(capsys, *arguments):
    assert compare.main(list(map(str, arguments))) == 2
    out, errors = capsys.readouterr()
    assert out == "" and errors.startswith("error: ") and errors.count("\n") == 1
    return errors


def test_folders_that_are_no_two_runs_are_refused(tmp_path, capsys):
    good = run_of(tmp_path / "good", *four())
    (tmp_path / "empty").mkdir()
    assert "no such folder" in refused(capsys, good, tmp_path / "none")
    assert "no run.json" in refused(capsys, tmp_path / "empty", good)
    assert "no such folder" in refused(capsys, good, tmp_path / "good" / "run.json")
    assert "a run without records" in refused(capsys, good, run_of(tmp_path / "bare"))
    assert "the same folder" in refused(capsys, good, f"{good}/../good")
    os.symlink(good, tmp_path / "link")
    assert "the same folder" in refused(capsys, tmp_path / "link", good)
    shutil.copytree(good, tmp_path / "copy")
    assert "a copy; expected two runs" in refused(capsys, good, tmp_path / "copy")


@pytest.mark.parametrize("part", [0.0, 0.5, 0.999])
def test_half_a_record_is_refused_with_its_name(tmp_path, capsys, part):
    good, other = run_of(tmp_path / "good", *four()), run_of(tmp_path / "other", *four())
    torn = Path(other) / "rows" / "ptb.small.keras.train.cpu.fp32.json"
    content = torn.read_bytes()
    torn.write_bytes(content[: int(part * len(content))])
    assert torn.name in refused(capsys, good, other)
    (Path(other) / "rows" / "ptb.small.block_fused.train.cpu.fp32.json").write_text("{")
    assert "(and 1 more files)" in refused(capsys, good, other)


def test_a_record_without_a_proof_that_held_is_refused(tmp_path, capsys):
    good, other = run_of(tmp_path / "good", *four()), run_of(tmp_path / "other", *four())
    path = Path(other) / "rows" / "ptb.small.keras.train.cpu.fp32.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "proof": None}))
    assert "no proof that held" in refused(capsys, good, other)


def test_a_run_of_another_schema_is_refused(tmp_path, capsys):
    good, other = run_of(tmp_path / "good", *four()), run_of(tmp_path / "other", *four())
    (Path(other) / "run.json").write_text('{"schema": 99}')
    assert "schema 99" in refused(capsys, good, other)


@pytest.mark.parametrize(
    "option",
    [
        *("--fail-if-slower=5", "--fail-if-slower=-5%", "--fail-if-slower=nan%", "--fail-if-slower=1e3%"),
        *(
            "--fail-if-slower=%",
            "--fail-if-slower=",
            "--fail-if-slower=5%%",
            "--fail-if-slower=99999%",
            "--fail-if-slower",
        ),
        *("--drift=0.03", "--drift=21%", "--drift=\n%", "--fail-if-slower=" + "9" * 10_000 + "%"),
        *("--across=row", "--across", "--fail=5%", "--no-such", "--json", "third"),
    ],
)
def test_a_wrong_option_is_refused_and_named(tmp_path, capsys, option):
    runs = run_of(tmp_path / "before", *four()), run_of(tmp_path / "after", *four())
    errors = refused(capsys, *runs, option)
    assert option.split("=")[0] in errors and len(errors) < 300


def test_one_folder_alone_is_refused(capsys):
    assert "AFTER" in refused(capsys, "results/before")


def test_a_json_file_that_cannot_be_written_is_refused_before_anything_is_printed(tmp_path, capsys):
    runs = run_of(tmp_path / "before", *four()), run_of(tmp_path / "after", *four())
    (tmp_path / "file").write_text("")
    assert "--json" in refused(capsys, *runs, f"--json={tmp_path / 'file' / 'x.json'}")


def test_a_percentage_is_read_as_it_is_written():
    assert [compare.percentage("--x", text, 1000) for text in ("5%", "0%", "2.5%", "1000 %")] == [0.05, 0, 0.025, 10]


def test_nothing_in_a_record_breaks_the_markdown(compared):
    hostile = {"cpu": "a | b\n# c <script>", "commit": "| d"}
    hostile_too = {"cpu": "<script> e | f\n## Rows", "commit": "g | <script>"}
    before = four(environment=hostile_too, config={"UNITS": "z|\n## Rows"})
    _, markdown, _, _ = compared(before, four(environment=hostile, config={"UNITS": "x|y\n## Rows"}))
    assert "<script>" not in markdown.replace("\\<script>", "") and markdown.count("\n## Rows") == 1
    tables = [line for line in markdown.splitlines() if line.startswith("|")]
    assert {line.replace("\\|", "").count("|") for line in tables} <= {8, 5, 3}


# As a command


def test_help_needs_the_standard_library_alone_and_a_comparison_no_framework(tmp_path):
    runs = run_of(tmp_path / "before", *four()), run_of(tmp_path / "after", *four(slow=1.2))
    code = (
        "import sys\nfrom harness.compare import __main__ as compare\nstatus = compare.main(sys.argv[1:])\n"
        "print(*sorted({'tensorflow', 'keras', 'torch', 'jax', 'numpy', 'scipy'} & set(sys.modules)), file=sys.stderr)\n"
        "sys.exit(status)"
    )

    def child(*arguments):
        command = [sys.executable, "-c", code, *arguments]
        return subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=600)

    assert child("--no-such").stderr.splitlines()[-1] == ""
    done = child(*runs, "--fail-if-slower=5%")
    assert done.returncode == 1 and done.stderr.splitlines()[-1] == "numpy scipy" and "## Rows" in done.stdout


def test_the_module_is_a_command_with_help_and_statuses(tmp_path):
    def command(*arguments):
        command = [sys.executable, "-m", "harness.compare", *arguments]
        return subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=600)

    done = command("--help")
    assert done.returncode == 0 and all(option in done.stdout for option in ("--json", "--fail-if-slower", "--across"))
    assert command(str(tmp_path), str(tmp_path)).returncode == 2
