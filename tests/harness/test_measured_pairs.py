"""The tool that measures what harness.compare finds: what it compares, how it counts, and that it measures at all."""

import json
import os
import re
import zlib
from collections import Counter

import pytest

from harness.compare import pairing
from harness.errors import UserError
from harness.record import machine, records, schema
from tests.harness import measured_benchmark, measured_pairs
from tests.record_cases import make, proof_of

needs_affinity = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system pins no process")


def test_pairs_of_numpy_have_runs_of_their_own_and_ten_tries():
    plan = measured_pairs.plan_of(None, runs=0)
    every = [run for lane in plan.lanes for run in lane]
    same = [pair for pair in plan.comparisons if not any(map(measured_pairs.is_slowed, pair))]
    tries = [pair for pair in plan.comparisons if pair not in same]
    assert len(set(every)) == len(every) == 15 and len(plan.rows) * len(same) == 20 and len(tries) == 10
    assert max(Counter(run for pair in same for run in pair).values()) == 1, "no plain run is in two pairs"
    assert all(any(set(pair) < set(lane) for lane in plan.lanes) for pair in plan.comparisons), "of one lane each"
    assert [measured_pairs.is_slowed(after) for _, after in tries] == [True] * 10


def test_runs_of_pytorch_take_turns_and_every_two_are_compared():
    plan = measured_pairs.plan_of("gpu", runs=7)
    (lane,) = plan.lanes
    assert [measured_pairs.is_slowed(run) for run in lane] == [False, True, False, True, False, True, False]
    assert len(set(map(frozenset, plan.comparisons))) == len(plan.comparisons) == 21
    tries = [pair for pair in plan.comparisons if len(set(map(measured_pairs.is_slowed, pair))) == 2]
    assert len(tries) == 12 and all(measured_pairs.is_slowed(after) for _, after in tries)
    assert len(plan.rows) * (21 - 12) == 27 and "not independent" in plan.sharing


def test_a_slowed_row_does_five_percent_more_of_the_same_work():
    assert measured_benchmark.SLOWED_ROUNDS / measured_benchmark.ROUNDS == 1.05
    assert {measured_pairs.plan_of(device, 3).slowed for device in (None, "gpu", "cpu")} == {"lstm_c", "torch_c"}


@pytest.fixture
def processors(tmp_path, monkeypatch):
    """Callable: {processor: its siblings} → what this process may use."""

    def set_up(siblings: dict[int, str]) -> None:
        for number, listed in siblings.items():
            folder = tmp_path / f"cpu{number}" / "topology"
            folder.mkdir(parents=True)
            (folder / "thread_siblings_list").write_text(f"{listed}\n")
        monkeypatch.setattr(measured_pairs, "SIBLINGS", tmp_path)
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(siblings))

    return set_up


@needs_affinity
@pytest.mark.parametrize(
    ("siblings", "groups"),
    [
        ({n: str(n) for n in range(16)}, [[6, 7], [8, 9], [10, 11], [12, 13], [14, 15]]),
        ({n: f"{n % 8},{n % 8 + 8}" for n in range(16)}, [[3, 11], [4, 12], [5, 13], [6, 14], [7, 15]]),
        ({n: str(n) for n in range(2)}, [[0], [1]]),
        ({n: f"{n // 2 * 2}-{n // 2 * 2 + 1}" for n in range(4)}, [[0, 1], [2, 3]]),
    ],
)
def test_automatic_groups_share_no_physical_core(processors, siblings, groups):
    processors(siblings)
    assert measured_pairs.groups_of("auto") == groups


@needs_affinity
def test_groups_are_read_as_they_are_written(processors):
    processors({n: str(n) for n in range(8)})
    assert measured_pairs.groups_of("0-1,4,6-7") == [[0, 1], [4], [6, 7]]


@needs_affinity
@pytest.mark.parametrize("text", ["", "a", "0-", "1-0", "0,,1", "0-1,1-2", "0-8", "8", "-1", "0;1", "99999"])
def test_groups_that_are_none_are_one_line(processors, text):
    processors({n: str(n) for n in range(8)})
    with pytest.raises(UserError, match=r"^--cores=.*: .*expected "):
        measured_pairs.groups_of(text)


@pytest.mark.parametrize(
    "arguments",
    [[], ["a", "b"], ["a", "--runs=2"], ["a", "--runs=21"], ["a", "--device=tpu"], ["a", "--device=gpu", "--cores=auto"]],
)  # fmt: skip
def test_a_wrong_command_line_is_one_line(arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(measured_pairs, "measure", lambda *_: pytest.fail("nothing is to be measured"))
    assert measured_pairs.main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ") and printed.err.count("\n") == 1 and not printed.out


def written(run, rows: dict[str, float], processes: int = 5):
    """A run whose rows take so many ms, the processes 0.1 % apart."""
    config = {"CONFIG": "small", "UNITS": 8}
    with records.open_run(run):
        for row, ms in rows.items():
            blank = dict(
                benchmark="measured_benchmark", row=row, mode="forward", blocks_ms=[], step_ms=None, proof=None
            )
            record = make(**blank, config=config)
            for process in range(processes):
                blocks = [ms * (1 + 1e-3 * process), ms * (1 + 1.1e-3 * process)]
                part = {"blocks_ms": blocks, "items_per_batch": 1, "unit": "sequences/s", "proof": proof_of("forward")}
                record = schema.merge_process(record, part)
            records.write_record(run, record)


FACTS = {
    **{"gpu": None, "driver": None, "cpu": "A processor", "cores": 16, "os": "Linux", "python": "3.12.1"},
    **{"commit": "0123456789", "dirty": False, "date": "2026-01-31T00:00:00+00:00", "packages": {"numpy": "2.4.6"}},
}


def run_with(out, monkeypatch, capsys, slower: float, processes: int = 5):
    """Exit status, result and output of the tool where the slowed row takes so many times as long."""

    def measure(run, plan, cores):
        ms = 2.0 + 1e-6 * (zlib.crc32(run.name.encode()) % 1000)  # equal blocks would be a copy
        by = slower if measured_pairs.is_slowed(run.name) else 1.0
        written(run, dict.fromkeys(plan.rows, ms) | {plan.slowed: ms * by}, processes)

    monkeypatch.setattr(measured_pairs, "measure", measure)
    monkeypatch.setattr(machine, "facts", lambda device: FACTS)
    status = measured_pairs.main([str(out)])
    path = out / "compared.json"
    return status, json.loads(path.read_text()) if path.exists() else None, capsys.readouterr()


def test_rows_are_counted_by_what_was_done_to_them(tmp_path, monkeypatch, capsys):
    status, result, printed = run_with(tmp_path, monkeypatch, capsys, slower=1.05)
    assert status == 0
    assert result["counts"] == {"same": {"same": 20}, "tries": {"slower": 10}, "others": {"same": 30}}
    assert len(result["runs"]) == 15 and all(len(run["medians_ms"]["lstm_c"]) == 5 for run in result["runs"].values())
    assert printed.out == (tmp_path / "compared.md").read_text()
    assert "of the same code **0** came out" in printed.out and "was found in **10**" in printed.out
    assert "the slowed row took 5.0 % longer" in printed.out
    assert (
        "**A processor, 16 cores** (numpy 2.4.6; 2026-01-31, commit 0123456): 10 plain runs and 5 with `lstm_c`"
        in printed.out
    )


def test_a_row_that_is_not_found_breaks_the_promise(tmp_path, monkeypatch, capsys):
    status, result, printed = run_with(tmp_path, monkeypatch, capsys, slower=1.0)
    assert status == 1 and result["counts"]["tries"] == {"same": 10}
    assert "was found in **0** (10 same); 9 of 10 are promised" in printed.out


@pytest.mark.parametrize(
    ("same", "tries", "kept"),
    [
        ({"same": 19, "slower": 1}, {"slower": 9, "same": 1}, True),
        ({"same": 18, "slower": 1, "faster": 1}, {"slower": 10}, False),
        ({"same": 20}, {"slower": 8, "inconclusive": 2}, False),
        ({"inconclusive": 20}, {"slower": 9, "faster": 1}, True),
    ],
)
def test_the_promise_is_of_one_row_in_twenty_and_nine_tries_in_ten(same, tries, kept):
    assert measured_pairs.is_kept({"same": same, "tries": tries, "others": {}}) is kept


def test_paragraphs_are_drawn_from_committed_results_alone(tmp_path, monkeypatch, capsys):
    _, result, printed = run_with(tmp_path, monkeypatch, capsys, slower=1.05)
    path = tmp_path / "compared.json"
    assert measured_pairs.main(["--draw", str(path), str(path)]) == 0
    drawn = capsys.readouterr().out
    assert drawn.split("\n\n")[1].strip() == drawn.split("\n\n")[2].strip() == printed.out.split("\n\n")[1].strip()
    result["counts"]["tries"] = {"slower": 9, "inconclusive": 1}
    path.write_text(json.dumps(result))
    assert measured_pairs.main(["--draw", str(path)]) == 0
    assert "found in **9** (1 inconclusive, 9 slower)" in capsys.readouterr().out


def test_a_run_that_lacks_processes_is_named(tmp_path, monkeypatch, capsys):
    status, result, printed = run_with(tmp_path, monkeypatch, capsys, slower=1.05, processes=4)
    assert (status, result) == (2, None)
    assert re.fullmatch(r"error: \S+plain-0: row lstm_a has too few processes, expected 5; see \S+\n", printed.err)


@needs_affinity
@pytest.mark.parametrize("row", ["lstm_c", pytest.param("torch_c", marks=pytest.mark.slow)])
def test_slowed_runs_differ_from_plain_ones_in_their_work_alone(tmp_path, row):
    if row.startswith("torch"):
        pytest.importorskip("torch")
    core = min(os.sched_getaffinity(0))
    options = (
        "--device=cpu",
        "--units=4",
        "--processes=1",
        "--warmup-limit-s=0.01",
        "--blocks=1",
        "--min-block-s=0.01",
    )
    plan = measured_pairs.Plan((row, row, row), options, [], [], "")
    found = []
    for name, cores in (("plain-0", None), ("slowed-0", [core])):
        measured_pairs.measure(tmp_path / name, plan, cores)
        (record,), problems = records.read_run(tmp_path / name)
        assert (record["row"], record["status"], problems) == (row, "ok", [])
        found.append(record)
    assert [record["environment"]["rounds"] for record in found] == [20, 21]
    assert [record["environment"]["processors"] for record in found] == [None, [core]]
    # Where any fact differs, compare learns nothing of the machine's drift from the rows.
    assert pairing.differences(*found, None) == []


def test_a_run_that_fails_is_one_line_with_its_log(tmp_path):
    plan = measured_pairs.Plan(["none"] * 3, ("--device=cpu",), [], [], "")
    with pytest.raises(
        UserError, match=r"plain-0: the run ended with status 2, expected 0; see the end of \S+plain-0.log$"
    ):
        measured_pairs.measure(tmp_path / "plain-0", plan, None)
    assert "none" in (tmp_path / "plain-0.log").read_text()
