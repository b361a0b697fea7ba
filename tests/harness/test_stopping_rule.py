"""How many processes a row gets: PROCESSES, or --repeat-until its interval is narrow, while its time lasts."""

import importlib.util

import pytest

from harness.errors import UserError
from harness.record import intervals, stopping_rule
from harness.record.stopping_rule import AT_LEAST, BUDGET_NOTE, StoppingRule
from harness.run import options, suite

MS = "ms = 10.0 + measurement.process"  # of the stub's rows: each process slower than the one before
STEADY = 'ms = {"second": 10.4 if measurement.process == 0 else 10.0}.get(row, 10.0 + 0.01 * (measurement.process % 2))'


@pytest.fixture
def steady(stub):
    """The stub with a row `first` that is narrow at once and a row `second` whose first process is 4 % slower."""
    text = stub.script.read_text()
    assert text.count(MS) == 1
    stub.script.write_text(text.replace(MS, STEADY))
    return stub


def record_of(medians, notes=()):
    return {
        "blocks_ms": [[ms] for ms in medians],
        "step_ms": intervals.step_of([[ms] for ms in medians]),
        "notes": notes,
    }


def test_row_has_enough_processes_when_every_mode_has_them():
    three = StoppingRule(3, 30.0)
    assert three.enough([record_of([1.0, 2.0, 3.0])] * 2)
    assert not three.enough([record_of([1.0, 2.0, 3.0]), record_of([1.0, 2.0])])


def test_row_that_repeats_goes_on_until_the_interval_of_every_mode_is_narrow():
    narrow, wide = record_of([10.0, 10.01] * 3), record_of([10.0, 10.5] * 3)
    until = StoppingRule(3, 30.0, 0.01)
    assert intervals.half_width(narrow["step_ms"]) < 0.01 < intervals.half_width(wide["step_ms"])
    assert until.enough([narrow, narrow]) and not until.enough([narrow, wide])
    few = record_of([10.0] * (AT_LEAST - 1))
    assert not until.enough([few]), "of few processes an interval is narrow by chance"
    assert not StoppingRule(8, 30.0, 0.01).enough([narrow]), "PROCESSES are the least"
    assert (until.limit_s, StoppingRule(3, 30.0).limit_s) == (300.0, 30.0)


def test_notes_of_an_earlier_end_go_when_the_row_goes_on():
    until, plain = StoppingRule(1, 30.0, 0.005), StoppingRule(3, 30.0)
    ended = plain.noted({"notes": ["a", until.note]}, True)
    assert ended["notes"] == ["a", BUDGET_NOTE] and plain.ended([{**record_of([1.0]), **ended}])
    assert not until.ended([{**record_of([1.0]), **ended}]), "another limit has ended it"
    assert until.noted(ended, False)["notes"] == ["a"]
    assert "0.5 %" in until.note and stopping_rule.is_time_up(until.note) and not stopping_rule.is_time_up("a")


def test_rows_repeat_in_turn_until_each_is_narrow(steady):
    assert steady.main("--processes=1", "--repeat-until=2%") == 0
    turns = [f"{row} {process}" for process in range(5) for row in ("first", "second")]
    assert steady.rows_started() == [*turns, "second 5", "second 6"], "of six processes 2.3 %, of seven 1.9 %"
    assert intervals.half_width(steady.record("second")["step_ms"]) <= 0.02
    assert len(steady.record("first")["blocks_ms"]) == AT_LEAST and steady.record("first")["notes"] == []
    page = (steady.out / "stub.md").read_text()
    assert "| 10.25 ±1.9 % (7)" in page and "(5)" in page


def test_row_that_stays_wide_ends_with_its_time_and_says_so(steady):
    assert steady.main("--rows=second", "--repeat-until=0.01%", "--row-budget-s=0.0001") == 0
    assert steady.rows_started() == ["second 0"]
    note = "interval wider than the 0.01 % asked for: its time was up"
    assert steady.record("second")["notes"] == [note]
    assert f"I{note[1:]}: `second`." in (steady.out / "stub.md").read_text()
    same = ("--rows=second", "--repeat-until=0.01%", "--row-budget-s=0.0001", "--resume")
    assert steady.main(*same) == 0 and steady.rows_started() == [], "it has ended"


def test_resumed_run_repeats_where_the_earlier_one_stopped(steady, monkeypatch):
    assert steady.main("--full", "--row-budget-s=0.0001", "--rows=first") == 0
    assert steady.record("first")["notes"] == [BUDGET_NOTE]
    steady.starts()
    assert steady.main("--full", "--row-budget-s=0.0001", "--rows=first", "--resume") == 0
    assert steady.rows_started() == []
    monkeypatch.setattr(stopping_rule, "BUDGETS", 1e9)
    assert steady.main("--full", "--row-budget-s=0.0001", "--rows=first", "--resume", "--repeat-until=2%") == 0
    assert steady.rows_started() == [f"first {process}" for process in range(1, AT_LEAST)]
    assert steady.record("first")["notes"] == [] and len(steady.record("first")["blocks_ms"]) == AT_LEAST


def test_row_that_fails_while_it_repeats_is_not_tried_again(stub):
    text = stub.script.read_text()
    stub.script.write_text(text.replace(MS, f'if measurement.process == 2: raise ValueError("no")\n        {MS}'))
    assert stub.main("--rows=first", "--repeat-until=1%") == 1
    assert stub.rows_started() == ["first 0", "first 1", "first 2"]
    assert "ValueError: no" in stub.record("first")["reason"]


@pytest.mark.parametrize(("written", "count"), [((), 1), (("--processes=2",), 2), (("--repeat-until=90%",), AT_LEAST)])
def test_whole_training_runs_once_unless_more_are_asked_for(stub, written, count):
    text = stub.script.read_text()
    assert text.count('("forward", "train")') == 3
    whole = "    parts['fit'] |= dict(epoch_s=[0.1, 0.105], fit_s=1.0, losses=[0.5, 0.4], accuracy={'acc': 0.5})\n"
    text = text.replace("    return parts\n", f"{whole}    return parts\n")
    stub.script.write_text(text.replace('("forward", "train")', '("fit",)').replace(MS, "ms = 10.0"))
    spec = importlib.util.spec_from_file_location("stub", stub.script)
    stub.module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(stub.module)
    assert stub.main("--full", "--rows=first", *written) == 0  # whose preset says three processes
    assert stub.rows_started() == [f"first {process}" for process in range(count)]
    assert len(stub.record("first", "fit")["blocks_ms"]) == count


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("=abc", "--repeat-until=abc: expected a percentage, such as 1%"),
        ("=0.01", "--repeat-until=0.01: expected a percentage, such as 1%"),
        ("=1e-3%", "--repeat-until=1e-3%: expected a percentage, such as 1%"),
        ("=0%", "--repeat-until=0%: expected a percentage from 0.01% to 100%, such as 1%"),
        ("=150%", "--repeat-until=150%: expected a percentage from 0.01% to 100%, such as 1%"),
        ("", "--repeat-until: a value is missing; expected a percentage from 0.01% to 100%, such as 1%"),
    ],
)
def test_what_is_no_percentage_is_refused(stub, written, message, capsys):
    assert stub.main(f"--repeat-until{written}") == 2
    assert capsys.readouterr().err == f"error: {message}\n" and stub.starts() == []


@pytest.mark.parametrize(("written", "fraction"), [("1%", 0.01), ("0.5 %", 0.005), ("0.01%", 1e-4), ("100%", 1.0)])
def test_percentage_is_read_as_a_fraction_and_handed_on_by_the_suite(stub, monkeypatch, written, fraction):
    header = options.read_header(stub.script)
    found = options.parse(header, ["--repeat-until", written, "--device=cpu", f"--out={stub.out}"])
    assert found.repeat_until == pytest.approx(fraction)
    handed = []
    monkeypatch.setattr(suite, "plan", lambda *_: [])
    monkeypatch.setattr(suite, "run_jobs", lambda jobs, common, *_: handed.extend(common) or (2, []))
    assert suite.run(found, [], {}, stub.folder) == 2
    (option,) = [argument for argument in handed if argument.startswith("--repeat-until")]
    assert options.parse(header, [option]).repeat_until == pytest.approx(fraction)
    with pytest.raises(UserError):
        options.parse(header, [option.replace("%", "")])
