"""How far a run is, and how long it will take: one bar over all scripts, and what it goes by."""

import fcntl
import importlib
import json
import os
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from harness.record import machine, records
from harness.run import benchmark, estimate, jobs, progress, suite
from harness.run.rows_in_turn import RowsInTurn
from tests.harness.test_suite import run, started, write_scripts

PROJECT = Path(__file__).resolve().parents[2]
PARTS = [progress.Part("a", 10.0, 60.0, 3), progress.Part("b", 10.0, 20.0, 1)]


@pytest.fixture
def scripts(tmp_path):
    return write_scripts(tmp_path / "bench marks")


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_time_left_is_what_was_expected_and_then_follows_what_is_measured(clock):
    bar = progress.Whole(PARTS, slowness=2.0)
    bar.begins(0)
    assert bar.left_s() == pytest.approx(200.0)  # before anything has ended: twice what the table says
    clock[0] = 30.0
    bar.hears(json.dumps(["total", 60.0, 3]))
    for number in range(1, 4):
        bar.hears(json.dumps(["starts", "row"]))
        clock[0] = 30.0 + 60.0 * number
        bar.hears(json.dumps(["ends", 20.0, 1]))
    expected = (210.0 + 2.0 * progress.BELIEF_S) / (70.0 + progress.BELIEF_S) * 30.0
    assert bar.left_s() == pytest.approx(expected)
    clock[0] += 10.0
    assert bar.left_s() == pytest.approx(expected - 10.0)
    clock[0] += 1e6
    assert bar.left_s() == 0.0


def test_processes_that_have_prepared_beside_the_one_that_ends_count_for_what_they_have_done(clock):
    """Rows of two trainings: 50 s beside others, later 20, and 100 s alone each."""
    bar = progress.Progress()
    left = progress.Left(bar, dict.fromkeys("abcd", estimate.Seconds(50.0, 100.0)), dict.fromkeys("abcd", 2))
    later, part = 100.0 + 50.0 * estimate.LATER, progress.PREPARED

    def expected(done):
        total = 4 * (150.0 + later)
        return pytest.approx((100.0 + progress.BELIEF_S) / (done + progress.BELIEF_S) * (total - done))

    clock[0] = 100.0
    left.ends("d", goes_on=True)  # such as one that crashed, while no other had prepared
    assert bar.left_s() == expected(150.0)
    for row in "abc":
        left.prepared(row, 0)
    for row in "ac":
        left.timed(row, 0)
    left.ends("a", True, 0)  # before b has timed
    assert bar.left_s() == expected(300.0 + 2 * part * 50.0 + 100.0)
    left.begins_anew("c", 0)
    left.ends("b", goes_on=False)  # nor will its second process run
    assert bar.left_s() == expected(450.0 + later)
    left.prepared("a", 1)
    left.ends("c", True, 0)  # which had not prepared beside others
    assert bar.left_s() == expected(600.0 + later + part * 50.0 * estimate.LATER)
    left.ends("a", True, 1)
    assert bar.left_s() == expected(600.0 + 2 * later)
    left.ends("c", False, 1)
    left.ends("d", False, 1)
    assert bar.left_s() == 0.0


def test_rows_that_resume_has_kept_are_taken_out_and_a_script_that_crashed_counts_as_done(clock, capsys, monkeypatch):
    monkeypatch.setattr(progress, "LINE_S", 0.0)
    bar = progress.Whole(PARTS, slowness=1.0)
    bar.begins(0)
    bar.hears(json.dumps(["total", 20.0, 1]))
    assert "0/2 a preparation" in capsys.readouterr().err
    clock[0] = 30.0
    bar.begins(1)
    assert "1/2 b preparation, about 30 s left" in capsys.readouterr().err
    bar.begins(2)
    assert "2/2" in capsys.readouterr().err


def test_what_takes_longer_than_expected_has_not_0_s_left(clock, capsys, monkeypatch):
    monkeypatch.setattr(progress, "LINE_S", 0.0)
    with progress.Progress("synthetic") as bar:
        bar.total(20.0, 1)
        assert "0/1 synthetic, about 20 s left" in capsys.readouterr().err
        clock[0] = 30.0
        bar.starts("keras")
        assert "0/1 synthetic keras, longer than expected" in capsys.readouterr().err
        bar.ends(20.0)
        assert "1/1 synthetic keras\n" in capsys.readouterr().err


def test_without_a_terminal_there_is_a_line_now_and_then_and_no_flood(clock, capsys):
    with progress.Progress("mnist") as bar:
        bar.total(300.0, 300)
        for number in range(300):
            clock[0] += 1.0
            bar.starts(f"row_{number}")
            bar.ends(1.0)
    seen = capsys.readouterr().err.splitlines()
    assert len(seen) == 300 // progress.LINE_S and "mnist row_" in seen[0]
    assert all("\r" not in line for line in seen)


def test_one_bar_spans_the_whole_run_on_a_terminal_and_what_scripts_print_stays_whole(scripts):
    tell = (
        "\nimport os\npipe = os.fdopen(int(os.environ['LSTM_BENCH_PROGRESS']), 'w')\n"
        "print(json.dumps(['starts', 'the_row']), file=pipe, flush=True)\nprint('printed by', here.stem)\n"
        "print(json.dumps(['ends', 20.0, 4]), file=pipe, flush=True)\n"
    )
    for script in scripts.glob("*.py"):
        text = script.read_text()
        script.write_text(text.replace("sys.exit(int(does or 0))", tell + "sys.exit(int(does or 0))"))
    code = (
        "import sys; from pathlib import Path; from harness.run import suite\n"
        "sys.exit(suite.main(['--quick', '--device=cpu', '--out=' + sys.argv[2]], Path(sys.argv[1])))"
    )
    own, terminal = os.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 200, 0, 0))
    command = [sys.executable, "-c", code, str(scripts), str(scripts.parent / "out")]
    process = subprocess.Popen(command, cwd=PROJECT, stdout=terminal, stderr=terminal, stdin=subprocess.DEVNULL)
    os.close(terminal)
    seen = b""
    while True:
        try:
            part = os.read(own, 65536)
        except OSError:  # nobody has the terminal open any longer
            break
        if not part:
            break
        seen += part
    assert process.wait() == 0, seen.decode()
    text = seen.decode()
    counts = [tuple(map(int, found)) for found in re.findall(r"\| (\d+)/(\d+) ", text)]
    assert {total for _, total in counts} == {28} and [done for done, _ in counts] == sorted(done for done, _ in counts)
    assert counts[0][0] == 0 and counts[-1][0] == 28
    assert "the_row, about" in text
    for name in jobs.scripts(scripts):
        assert re.search(rf"(^|[\r\n\x1b]|\x1b\[A)\s*printed by {name}\r?\n", text), name


def test_script_reports_to_the_suite_instead_of_drawing_a_bar_of_its_own(stub, monkeypatch, capfd):
    reports, own = os.pipe()
    monkeypatch.setenv(progress.REPORTS, str(own))
    assert stub.main("--rows=first,flaky", "--processes=2") == 1
    with os.fdopen(reports) as pipe:
        seen = [json.loads(line) for line in pipe]
    assert seen[0] == ["total", pytest.approx(2 * (1 + estimate.LATER) * estimate.UNKNOWN_S), 4]
    assert ["starts", "first, process 1 of 2"] in seen
    ended = [rest for kind, *rest in seen if kind == "ends"]
    assert sum(processes for _, processes, _ in ended) == 4, (
        "flaky fails in its first process: its second is over as well"
    )
    assert "left" not in capfd.readouterr().err


def test_suite_says_at_its_start_how_long_it_will_take(scripts, capsys, monkeypatch):
    monkeypatch.setattr(estimate, "slowness", lambda: 1.5)
    assert run(scripts, "--quick", "--device=cpu", "--only=synthetic") == 0
    expected = estimate.Estimate("quick", "cpu")
    rows_s = (1 + estimate.LATER) * (sum(expected.first("synthetic", "keras", "tensorflow")) + estimate.UNKNOWN_S)
    seconds = 1.5 * (expected.preparation_s("synthetic") + rows_s)
    assert f"4 processes in 1 run, about {estimate.minutes(seconds)}\n" in capsys.readouterr().out
    assert run(scripts, "--quick", "--device=cpu", "--only=synthetic", "--processes=3") == 0
    assert "6 processes in 1 run, about" in (line := capsys.readouterr().out) and "without your" not in line
    assert run(scripts, "--quick", "--device=cpu", "--only=synthetic", "--epochs=9") == 0
    assert "about" in (line := capsys.readouterr().out) and "without your --epochs" in line
    for config, known in (("small", True), ("large", False)):
        assert run(scripts, "--quick", "--device=cpu", "--only=ptb", "--rows=keras", f"--config={config}") == 0
        assert ("without your --config" in capsys.readouterr().out) is not known
    assert run(scripts, "--full", "--device=cpu", "--only=synthetic") == 0
    assert "about" not in (line := capsys.readouterr().out.splitlines()[0]) and "progress says" in line


def test_what_rows_took_is_printed_with_how_slow_the_machine_was(scripts, capsys, monkeypatch):
    monkeypatch.setattr(estimate, "slowness", lambda: 1.234)
    out = scripts.parent / "out"
    assert run(scripts, "--quick", "--device=cpu", "--only=synthetic", f"--out={out}") == 0
    capsys.readouterr()
    assert estimate.main([str(out)]) == 0
    assert json.loads(capsys.readouterr().out)["slowness"] == {str(out): 1.23}
    assert estimate.main([]) == 2


def test_what_a_row_took_is_the_mean_of_a_runs_points_and_the_median_of_runs(capsys, monkeypatch):
    def record(row, spent_s, **more):
        return {
            "status": "ok",
            "benchmark": "b",
            "mode": "m",
            "row": row,
            "spent_s": spent_s,
            "blocks_ms": [[1.0]],
            "config": {"CONFIG": "c"},
            **more,
        }

    runs = {
        "a": [record("swept", 1.0), record("swept", 1.0), record("swept", 10.0), record("trains", 9.0, fit_s=4.0)],
        "b": [record("swept", 5.0), record("failed", 99.0) | {"status": "failed"}],
        "c": [record("swept", 60.0)],
    }
    monkeypatch.setattr(estimate.records, "read_run", lambda run: (runs[run], []))
    monkeypatch.setattr(estimate.records, "check_run", lambda run: {"slowness": 1.5})
    assert estimate.main(list(runs)) == 0
    assert json.loads(capsys.readouterr().out) == {
        "slowness": dict.fromkeys(runs, 1.5),
        "b --config=c": {"swept": 5.0, "trains": [9.0, 4.0]},
    }


def test_every_config_and_row_of_the_table_of_seconds_is_one_of_its_script():
    frameworks = {"preparation", "tensorflow", "torch", "jax"}
    for key, scripts_of in json.loads(estimate.TABLE.read_text()).items():
        for name, seconds in scripts_of.items() if key != "about" else ():
            if name in ("machine", "slowness"):
                continue
            script, *flags, config = name.split(" ")
            module = importlib.import_module(f"benchmarks.{script}")
            assert config.removeprefix("--config=") in module.CONFIGS and flags in ([], ["--train"]), (key, name)
            assert set(seconds) <= frameworks | set(module.ROWS_TABLE), (key, name)
            for value in seconds.values():
                whole, timed = value if isinstance(value, list) else (value, 0)
                assert 0 <= timed < whole, (key, name)


def test_what_a_script_would_refuse_is_refused_by_the_suite_before_anything_is_written(scripts, capsys):
    script = scripts / "synthetic.py"
    refuses = (
        "if '--plan' in sys.argv:\n    print('error: too large', file=sys.stderr)\n    sys.exit(2)\nif '--plan' in"
    )
    script.write_text(script.read_text().replace('if "--plan" in', refuses))
    assert "too large" in script.read_text()
    assert run(scripts, "--quick", "--device=cpu") == 2
    assert capsys.readouterr().err == "error: too large\n"
    assert not started(scripts) and not (scripts.parent / "out").exists()


def test_processes_within_a_budget_are_counted_as_the_rounds_do(monkeypatch):
    monkeypatch.setattr(estimate, "_table", dict)  # of a machine whose slowness is 1
    processes_of = estimate.Estimate("quick", "cpu").processes_of
    assert processes_of(estimate.Seconds(10.0), 3, 30.0) == 3
    assert processes_of(estimate.Seconds(20.0), 3, 30.0) == 3, "after the second it has taken 28 s"
    assert processes_of(estimate.Seconds(25.0), 3, 30.0) == 2
    assert processes_of(estimate.Seconds(40.0), 3, 30.0) == 1
    assert processes_of(estimate.Seconds(10.0, 10.0), 3, 30.0) == 2, "a second training takes as long as the first"


def test_seconds_of_a_slow_machine_are_fewer_on_one_that_is_not(monkeypatch):
    table = {"full gpu": {"slowness": 2.0, "ptb": {"preparation": 8, "torch": 40}}}
    monkeypatch.setattr(estimate, "_table", lambda: table)
    expected = estimate.Estimate("full", "gpu")
    assert (expected.preparation_s("ptb"), expected.first("ptb", "torch_lstm", "torch")) == (4.0, (20.0, 0.0))
    assert expected.processes_of(estimate.Seconds(20.0), 3, 50.0) == 2, "a budget is of that machine's seconds"


def test_a_machine_that_is_three_times_slower_stays_within_every_limit_of_a_row():
    headers, close = jobs.read_headers(PROJECT / "benchmarks"), []
    for name, scripts in json.loads(estimate.TABLE.read_text()).items():
        preset = name.partition(" ")[0]
        for script, rows in scripts.items() if isinstance(scripts, dict) else ():
            if not isinstance(rows, dict):  # the machine's name, its slowness
                continue
            header = headers[script.partition(" ")[0]]
            limit_s = header.constants["ROW_LIMIT_S"].default or header.presets[preset]["ROW_LIMIT_S"]
            for row, seconds in rows.items():
                took_s = seconds[0] if isinstance(seconds, list) else seconds
                if row != "preparation" and 3 * took_s > limit_s:
                    close.append(f"{name}, {script}, {row}: {took_s} s of {limit_s}")
    assert not close


def test_a_config_takes_what_it_took_and_another_one_what_its_script_did(monkeypatch):
    table = {
        "ptb --config=large": {"preparation": 60, "torch": 60, "torch_jit": 76},
        "ptb --train --config=small": {"jax": 5},
    }
    table["ptb --config=small"] = {"torch": 32, "torch_lstm": 31}
    monkeypatch.setattr(estimate, "_table", lambda: {"full gpu": table})
    expected = estimate.Estimate("full", "gpu")
    assert expected.first("ptb --config=small", "torch_lstm", "torch").shared == 31
    jit = expected.first("ptb --config=small", "torch_jit", "torch").shared
    assert jit == pytest.approx(76 * 32 / 60), "as much less as its framework's rows"
    assert expected.first("ptb --config=medium", "torch_jit", "torch").shared == 76
    assert expected.first("ptb --config=small", "jax_scan", "jax").shared == estimate.UNKNOWN_S, "a training is no step"
    assert expected.preparation_s("ptb --config=small") == 60
    assert [expected.takes_another(f"ptb --config={config}") for config in ("small", "medium")] == [False, True]
    assert not expected.takes_another("mnist --config=published"), "of which nothing is known"


def test_seconds_of_a_run_are_printed_for_each_config_of_which_points_are_parts():
    runs = (suite.BENCHMARKS.parent / "results" / name for name in ("nvidia-h100", "nvidia-h200"))
    found = {script for run in runs for script, _ in estimate._took(records.read_run(run)[0])}
    assert {f"ptb --config={name}" for name in ("large", "medium", "small")} | {"ptb --train --config=small"} <= found
    expected = {f"multi_gpu --config={name}" for name in ("ptb_large", "ptb_medium", "ptb_small", "stacked_lm")}
    assert {name for name in found if name.startswith("multi_gpu")} == expected


def test_what_rows_of_a_gpu_take_does_not_hang_on_how_fast_python_is_there():
    assert estimate.factor("cpu", 1.7) == 1.7 and estimate.factor("gpu", 1.7) == 1.0


@pytest.mark.parametrize("gpus, alone", [(1, 120.0), (2, 80.0), (3, 80.0)])
def test_side_by_side_processes_prepare_sooner_and_no_training_is_divided(monkeypatch, gpus, alone):
    table = {"full gpu": {"mnist": {"preparation": 8, "keras": [100, 80], "wavefront": [70, 40], "jax": 30}}}
    monkeypatch.setattr(estimate, "_table", lambda: table)
    plan = {"rows": {"keras": "tensorflow", "wavefront": "tensorflow", "jax_scan": "jax"}, "processes": 1, "points": 1}
    plan |= {"budget_s": 999.0, "at_once": 3, "gpus": gpus}
    found = estimate.Estimate("full", "gpu").rows_of("mnist", plan)
    assert found == (pytest.approx(80.0 / 3**estimate.GAIN + alone), 3)


def test_later_processes_of_a_training_take_as_long_to_train(monkeypatch):
    monkeypatch.setattr(estimate, "_table", lambda: {"full gpu": {"mnist": {"keras": [100, 80]}}})
    plan = {"rows": {"keras": "tensorflow"}, "processes": 3, "points": 2, "budget_s": 999.0, "at_once": 1, "gpus": 1}
    expected = (pytest.approx(2 * (3 * 80.0 + 20.0 * (1 + 2 * estimate.LATER))), 6)
    assert estimate.Estimate("full", "gpu").rows_of("mnist", plan) == expected
    record = {"blocks_ms": [[1.0]] * 3, "fit_s": 80.0, "spent_s": 3 * 80.0 + 20.0 * (1 + 2 * estimate.LATER)}
    assert estimate._first_of(record) == pytest.approx((100.0, 80.0))


# Sizes


def parent_of(module):
    """How the script runs its rows."""
    if kind := getattr(module, "Parent", None):
        return kind
    rooms = (("sweep", "Sweep"), ("points", "Points"), ("replicas", "Parent"))
    return next((getattr(getattr(module, room), kind) for room, kind in rooms if hasattr(module, room)), RowsInTurn)


@pytest.mark.parametrize("option", ["--time-steps=99999999", "--batch-size=100000", "--units=10000000"])
@pytest.mark.parametrize("name", jobs.scripts(suite.BENCHMARKS))
def test_size_that_cannot_run_is_one_line_and_nothing_is_written(name, option, tmp_path, capsys):
    module = importlib.import_module(f"benchmarks.{name}")
    if not hasattr(module, option[2:].split("=")[0].upper().replace("-", "_")) or (
        (name, option.split("=")[0]) in (("mnist", "--time-steps"), ("options", "--batch-size"))
    ):
        pytest.skip("has no such option, or memory for it")
    arguments = ["--quick", "--device=cpu", f"--out={tmp_path / 'out'}", option]
    assert benchmark.main(module.BENCHMARK, arguments, parent_of(module)) == 2
    seen = capsys.readouterr().err
    assert seen.startswith("error: ") and seen.count("\n") == 1 and option in seen and "give a smaller" in seen
    assert not (tmp_path / "out").exists()


def test_memory_of_the_gpu_counts_where_a_gpu_is_asked_for(stub, monkeypatch, capfd, tmp_path):
    monkeypatch.setattr(machine, "gpu_count", lambda: 1)
    monkeypatch.setattr(machine, "gpu_memory_bytes", lambda: 2 * 1024**3)
    stub.module.BENCHMARK.values = lambda c: 1024**3
    assert benchmark.main(stub.module.BENCHMARK, ["--device=gpu", f"--out={tmp_path / 'new'}"]) == 2
    assert "4 GiB of memory are needed at the least, this GPU has 2" in capfd.readouterr().err
    assert not (tmp_path / "new").exists()


def test_presets_of_every_script_fit_into_a_small_machine(monkeypatch):
    monkeypatch.setattr(machine, "memory_bytes", lambda: 8 * 1024**3)
    for name in jobs.scripts(suite.BENCHMARKS):
        module = importlib.import_module(f"benchmarks.{name}")
        kind = parent_of(module)
        for preset in jobs.PRESETS:
            assert kind(module.BENCHMARK, [f"--{preset}", "--device=cpu"]).plan()["rows"]
