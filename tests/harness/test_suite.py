"""The suite: which benchmarks it starts with which options, what it does when one fails, and how it ends them."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from harness.errors import UserError
from harness.record import machine, records, settings
from harness.run import jobs, options, suite
from tests import record_cases

PROJECT = Path(__file__).resolve().parents[2]
NAMES = ["mnist", "ptb", "ptb_sentences", "scaling", "stacked_lm", "synthetic"]
HEADER = '''"""A stand-in for a benchmark script."""
# -----
CONFIG = "{config}"
CONFIGS = {configs}
UNITS = None  # per layer
EPOCHS = 1
PROCESSES = 2
{runs}
{more}
ROWS = "all"
PRECISION = "fp32"
# -----
READS = "UNITS", "EPOCHS", "NOISE"
'''
# Notes how it was started; then does what the file <name>.does beside it says.
BODY = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
here = Path(__file__)
if "--list" in sys.argv:
    print("keras   vanilla")
    print("{row}   only here")
    sys.exit()
if "--plan" in sys.argv:
    rows = {"keras": "tensorflow", "{row}": "torch"}
    no_bf16 = (here.stem in ("mnist", "scaling") or "--train" in sys.argv) and "--precision=bf16" in sys.argv
    left_out = f"--precision=bf16: no row of {here.stem} has it" if no_bf16 else ""
    config = next((a for a in reversed(sys.argv) if a.startswith("--config=")), "--config=own")
    processes = next((int(a.split("=")[1]) for a in reversed(sys.argv) if a.startswith("--processes=")), 2)
    plan = {"script": f"{here.stem} {config}", "rows": rows, "processes": processes, "points": 1, "budget_s": 1000.0}
    plan |= {"at_once": 1, "gpus": 1, "left_out": left_out}
    plan["alone"] = "keras" if here.with_suffix(".alone").exists() else ""
    if plan["alone"]:
        del rows["{row}"]
    print(json.dumps(plan))
    sys.exit()
with open(here.with_name("started"), "a") as file:
    file.write(json.dumps([here.stem, time.time(), *sys.argv[1:]]) + "\\n")
references = Path(next(a for a in sys.argv if a.startswith("--out="))[6:]) / "references"
references.mkdir(exist_ok=True)
(references / f"{here.stem}.0.npz").touch()
does = here.with_suffix(".does").read_text() if here.with_suffix(".does").exists() else ""
if does in ("hang", "ignore"):
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", str(here)], start_new_session=True)
    if does == "ignore":
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    here.with_name("hanging").touch()
    try:
        time.sleep(600)
    except KeyboardInterrupt:
        here.with_name("ended").touch()
        sys.exit(130)
if does == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(int(does or 0))
"""


def write_scripts(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in NAMES:
        config, configs = ("large", {"small": {"UNITS": 8}, "large": {"UNITS": 16}}) if name == "ptb" else ("only", {})
        configs = configs or {"only": {"UNITS": 8}}
        more = "NOISE = 0.1" if name == "synthetic" else ""
        runs = {
            preset: [f"--config={c}", "--config=small --train"] for preset, c in (("full", "large"), ("quick", "small"))
        }
        header = HEADER.format(
            config=config, configs=configs, more=more, runs=f"RUNS = {runs}" if name == "ptb" else ""
        )
        (folder / f"{name}.py").write_text(header + BODY.replace("{row}", f"row_of_{name}"))
    return folder


@pytest.fixture
def scripts(tmp_path, drawn_here):
    return write_scripts(tmp_path / "bench marks")


def started(folder: Path) -> list[list[str]]:
    """[script, its options …] of every start, without the options that all have."""
    if not (folder / "started").exists():
        return []
    lines = [json.loads(line) for line in (folder / "started").read_text().splitlines()]
    return [
        [name, *(a for a in rest if a.split("=")[0] not in ("--out", "--quick", "--full", "--device"))]
        for name, _, *rest in lines
    ]


def planned(folder: Path, *argv: str, preset: str = "full") -> list[str]:
    headers = jobs.read_headers(folder)
    found, chosen = jobs.parse(argv, headers)
    plan = jobs.plan(found, chosen, headers, preset)
    return [" ".join([job.name, *(a for a in job.arguments if not a.startswith("--rows="))]) for job in plan]


def run(folder: Path, *argv: str) -> int:
    return suite.main([*argv, f"--out={folder.parent / 'out'}"], folder)


@pytest.mark.parametrize(
    "gpus, argv, runs",
    [
        ("A", [], False),
        ("AA", [], True),
        ("AB", [], False),
        ("AA", ["--device=cpu"], False),
        ("", ["--only=multi_gpu"], True),
    ],
)
def test_several_gpus_are_benchmarked_where_there_are_several_or_only_names_it(tmp_path, monkeypatch, gpus, argv, runs):
    folder = write_scripts(tmp_path)
    (folder / "multi_gpu.py").write_text((folder / "mnist.py").read_text())
    monkeypatch.setattr(machine, "gpus", lambda: [machine.Gpu(str(number), kind) for number, kind in enumerate(gpus)])
    _, chosen = jobs.parse(argv, jobs.read_headers(folder))
    assert ("multi_gpu" in chosen) == runs


@pytest.mark.parametrize("argv, runs", [([], False), (["--full"], False), (["--only=options"], True)])
def test_options_are_benchmarked_where_only_names_them(tmp_path, argv, runs):
    folder = write_scripts(tmp_path)
    (folder / "options.py").write_text((folder / "mnist.py").read_text())
    _, chosen = jobs.parse(argv, jobs.read_headers(folder))
    assert ("options" in chosen) == runs


def test_full_preset_measures_large_ptb_and_trains_the_small_one(scripts):
    ptb = ["ptb --config=large", "ptb --config=small --train"]
    expected = ["mnist", *ptb, "ptb_sentences", "scaling", "stacked_lm", "synthetic"]
    assert planned(scripts) == expected


def test_rows_that_the_user_named_are_trained_too(scripts):
    headers = jobs.read_headers(scripts)
    found, chosen = jobs.parse(["--rows=keras", "--only=ptb"], headers)
    plan = jobs.plan(found, chosen, headers, "full", {"ptb": ["keras", "keras_cudnn"]})
    assert [("--rows=keras" in job.arguments, "--train" in job.arguments) for job in plan] == [
        (True, False),
        (True, True),
    ]


def test_written_config_replaces_the_presets_and_drops_the_job_that_it_contradicts(scripts):
    assert planned(scripts, "--config=large", "--only=ptb", preset="quick") == ["ptb --config=large"]
    assert planned(scripts, "--config=small", "--only=ptb") == ["ptb --config=small", "ptb --config=small --train"]
    assert planned(scripts, "--config=large", "--train", "--only=ptb") == ["ptb --config=large --train"]


def test_config_of_one_script_leaves_the_others_as_they_are(scripts):
    assert planned(scripts, "--config=small")[0] == "mnist"


def test_constant_goes_to_every_script_that_knows_it_and_to_no_other(scripts):
    found = planned(scripts, "--noise", "0.5", "--UNITS=64", preset="quick")
    assert [line for line in found if "--noise=0.5" in line] == ["synthetic --noise=0.5 --units=64"]
    assert all("--units=64" in line for line in found)


def test_order_of_only_is_the_suites(scripts):
    assert planned(scripts, "--only=synthetic,mnist") == ["mnist", "synthetic"]


@pytest.mark.parametrize(
    "argv, words",
    [
        (["--unitz=3"], ["--unitz", "--units"]),
        (["--units=0"], ["--units=0", "at least 1"]),
        (["--units"], ["--units", "missing"]),
        (["--precision=int8"], ["int8", "fp32, tf32, fp16, bf16"]),
        (["--config=huge"], ["huge", "small", "large", "only"]),
        (["--config=small", "--only=mnist"], ["--config=small", "ptb"]),
        (["--noise=1", "--only=mnist,ptb"], ["--noise", "synthetic"]),
        (["--train", "--only=mnist"], ["--train", "ptb"]),
        (["--only=mnits"], ["--only=mnits", "mnist"]),
        (["--rows=kers"], ["--rows=kers", "keras"]),
        (["--data=no/such/folder"], ["--data=no/such/folder", "embedded"]),
        (["--device=tpu"], ["tpu", "gpu, cpu"]),
        (["--quick", "--full"], ["--quick", "--full"]),
        (["mnist"], ["mnist", "--"]),
    ],
)
def test_wrong_option_is_one_line_and_status_2_before_anything_runs(scripts, capsys, argv, words):
    assert run(scripts, *argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert all(word in error for word in words)
    assert not started(scripts) and not (scripts.parent / "out").exists()
    assert suite.check(argv, scripts) == 2  # what run_all.sh asks before it installs
    assert capsys.readouterr().err == error


def test_results_of_another_schema_are_refused_before_anything_runs(scripts, capsys):
    out = scripts.parent / "out"
    out.mkdir()
    (out / "run.json").write_text('{"schema": 99}')
    assert run(scripts) == 2
    assert "schema 99" in capsys.readouterr().err and not started(scripts)


def test_every_job_runs_in_order_with_the_runs_folder(scripts, capsys):
    assert run(scripts, "--quick", "--device=cpu") == 0
    assert [name for name, *_ in started(scripts)] == [
        "mnist",
        "ptb",
        "ptb",
        "ptb_sentences",
        "scaling",
        "stacked_lm",
        "synthetic",
    ]
    output = capsys.readouterr().out
    assert "[2/7] ptb --config=small\n" in output and "README.md" in output
    assert f"--out={scripts.parent / 'out'}" in (scripts / "started").read_text()


def test_rows_go_to_the_scripts_that_have_them_and_the_others_are_named(scripts, capsys):
    assert run(scripts, "--quick", "--rows=row_of_ptb,row_of_synthetic", "--only=mnist,synthetic,ptb") == 0
    ptb = ["ptb", "--config=small", "--rows=row_of_ptb"]
    expected = [ptb, [*ptb, "--train"], ["synthetic", "--rows=row_of_synthetic"]]
    assert [[entry[0], *sorted(entry[1:])] for entry in started(scripts)] == expected
    assert "left out, having none of --rows: mnist" in capsys.readouterr().out


def test_a_row_of_a_script_that_is_not_asked_for_is_said_to_be_there(scripts, capsys):
    assert run(scripts, "--only=mnist,ptb", "--rows=row_of_scaling,keras") == 2
    known = "Known: keras, row_of_mnist, row_of_ptb"
    error = f"error: --rows=row_of_scaling: no such row. {known}; --only=scaling has row_of_scaling\n"
    assert capsys.readouterr().err == error
    assert started(scripts) == []


@pytest.mark.parametrize("asks", ["", "--only=ptb,scaling", "--rows=keras"])
def test_script_that_compares_goes_with_a_single_row_where_it_is_asked_for(scripts, capsys, asks):
    (scripts / "scaling.alone").touch()
    assert run(scripts, *filter(None, [asks])) == 0
    assert ("scaling" in {name for name, *_ in started(scripts)}) == bool(asks)
    said = "left out: scaling: keras is all that can run here, and is compared with nothing; --only=scaling runs it"
    assert (said in capsys.readouterr().out) != bool(asks)


ALONE = "is all that can run here"


def test_script_that_compares_goes_with_a_single_row_by_a_constant_that_it_alone_has_or_rows_in_its_header(
    scripts, capsys
):
    (scripts / "synthetic.alone").touch()
    assert run(scripts, "--noise=0.2") == 0 and "synthetic" in {name for name, *_ in started(scripts)}
    script = scripts / "scaling.py"
    (scripts / "scaling.alone").touch()
    script.write_text(script.read_text().replace('ROWS = "all"', 'ROWS = "keras"'))
    assert run(scripts, "--noise=0.2") == 0 and "scaling" in {name for name, *_ in started(scripts)}
    assert ALONE not in capsys.readouterr().out


@pytest.mark.parametrize("argv", [[], ["--resume"]])
def test_folder_of_a_run_on_another_device_is_left_as_it_is(scripts, capsys, argv):
    out = scripts.parent / "out"
    with records.open_run(out, {"options": ["--full"]}) as run_:
        records.write_record(run_, record_cases.make(device="gpu", precision="tf32"))
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert run(scripts, "--device=cpu", *argv) == 2 and not (scripts / "started").exists()
    assert (
        "out: holds a run on a GPU, and this one is on a CPU; choose another folder with --out"
        in capsys.readouterr().err
    )
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


def test_a_row_or_config_may_be_named_as_a_device(scripts):
    assert run(scripts, "--device=cpu", "--only=mnist") == 0
    (scripts.parent / "out" / "rows").mkdir(exist_ok=True)
    (scripts.parent / "out" / "rows" / "ptb.gpu.gpu.train.cpu.fp32.json").write_text("{}")
    assert run(scripts, "--device=cpu", "--only=mnist") == 0


def test_resumed_run_goes_on_with_a_script_that_it_has_records_of(scripts, capsys):
    (scripts / "scaling.alone").touch()
    assert run(scripts) == 0 and "scaling" not in {name for name, *_ in started(scripts)}
    (scripts.parent / "out" / "rows").mkdir(exist_ok=True)
    (scripts.parent / "out" / "rows" / "scaling.only.keras.stack.cpu.fp32.json").write_text("{}")
    assert run(scripts, "--resume") == 0 and "scaling" in {name for name, *_ in started(scripts)}
    assert capsys.readouterr().out.count(ALONE) == 1


def test_scripts_that_compare_run_with_a_single_row_where_there_are_no_others(scripts, capsys):
    for name in NAMES:
        (scripts / f"{name}.alone").touch()
    assert run(scripts) == 0
    assert {name for name, *_ in started(scripts)} == {*NAMES} and ALONE not in capsys.readouterr().out


def test_scripts_without_the_config_asked_for_are_named(scripts, capsys):
    assert run(scripts, "--quick", "--config=large", "--only=ptb,synthetic") == 0
    assert "in their own configs, having no large: synthetic" in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("does, words", [("1", "ended with status 1"), ("kill", "ended by SIGKILL")])
def test_failing_script_leaves_the_others_running_and_makes_status_1(scripts, capsys, does, words):
    (scripts / "ptb.does").write_text(does)
    assert run(scripts, "--quick", "--device=cpu") == 1
    assert started(scripts)[-1] == ["synthetic"]
    assert f"[2/7] ptb --config=small: {words}" in capsys.readouterr().out


@pytest.mark.parametrize("does", ["0", "1"])
def test_references_stay_for_resume_until_the_run_is_complete(scripts, does):
    (scripts / "ptb.does").write_text(does)
    assert run(scripts, "--quick", "--device=cpu") == int(does)
    assert (scripts.parent / "out" / "references" / "mnist.0.npz").exists() == (does == "1")


def test_script_that_refuses_its_input_ends_the_suite_with_status_2(scripts):
    (scripts / "ptb.does").write_text("2")
    assert run(scripts, "--quick", "--device=cpu") == 2
    assert [name for name, *_ in started(scripts)] == ["mnist", "ptb"]


@pytest.mark.parametrize("gpu, argv, expected", [
    (True, [], ["--full", "--device=gpu"]), (True, ["--device=cpu"], ["--quick", "--device=cpu"]),
    (True, ["--quick"], ["--quick", "--device=gpu"]), (False, [], ["--quick", "--device=cpu"]),
    (False, ["--full"], ["--full", "--device=cpu"]),
])  # fmt: skip
def test_preset_and_device_follow_the_machine_where_the_user_wrote_none(scripts, monkeypatch, gpu, argv, expected):
    monkeypatch.setattr(suite, "has_gpu", lambda: gpu)
    monkeypatch.setattr(suite.preflight, "once", lambda *_: None)
    assert run(scripts, "--only=mnist", *argv) == 0
    arguments = json.loads((scripts / "started").read_text())
    assert [a for a in arguments if a in ("--full", "--quick", "--device=gpu", "--device=cpu")] == expected


def test_hidden_gpu_is_no_gpu(monkeypatch):
    monkeypatch.setattr(machine, "gpu_count", lambda: 1)
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert not suite.has_gpu()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert suite.has_gpu()


def test_relative_folders_are_those_of_the_callers_directory(scripts, monkeypatch):
    monkeypatch.chdir(scripts.parent)
    (scripts.parent / "sets").mkdir()
    assert suite.main(["--only=mnist", "--out=here", "--data=sets"], scripts) == 0
    arguments = json.loads((scripts / "started").read_text())
    assert f"--out={scripts.parent / 'here'}" in arguments and f"--data={scripts.parent / 'sets'}" in arguments


def test_default_folder_is_new_and_resume_takes_the_latest(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "run_name", lambda device: "cpu-2-core-20260102")
    assert suite.default_out("cpu", False, tmp_path).name == "cpu-2-core-20260102"
    assert suite.default_out("cpu", True, tmp_path).name == "cpu-2-core-20260102"
    for name in ("cpu-2-core", "cpu-2-core-20260101", "cpu-2-core-20260101-2", "nvidia-h200-20260103"):
        (tmp_path / name / "rows").mkdir(parents=True)
    assert suite.default_out("cpu", True, tmp_path).name == "cpu-2-core-20260102", "no row was recorded in any of them"
    for name in ("cpu-2-core-20260101", "cpu-2-core-20260101-2"):
        (tmp_path / name / "rows" / "ptb.small.keras.train.cpu.fp32.json").touch()
    (tmp_path / "cpu-2-core-20260101-3" / "rows").mkdir(parents=True)
    assert suite.default_out("cpu", True, tmp_path).name == "cpu-2-core-20260101-2"
    (tmp_path / "cpu-2-core-20260102").mkdir()
    assert suite.default_out("cpu", False, tmp_path).name == "cpu-2-core-20260102-2"


def resumed(folder: Path, *argv: str) -> list[list[str]]:
    """What --resume starts."""
    (folder / "started").unlink()
    assert run(folder, "--resume", *argv) == 0
    return [[name, *(option for option in rest if option != "--resume")] for name, *rest in started(folder)]


def test_resume_goes_on_with_the_options_that_the_run_was_begun_with(scripts, monkeypatch, capsys):
    monkeypatch.chdir(scripts.parent)
    (scripts.parent / "sets").mkdir()
    begun = [
        "--quick",
        "--device=cpu",
        "--only",
        "ptb",
        "--rows=row_of_ptb",
        "--units=4",
        "--data=sets",
        "--no-install",
    ]
    assert run(scripts, *begun) == 0
    before = started(scripts)
    monkeypatch.chdir(scripts)
    assert resumed(scripts, "--no-install") == before and len(before) == 2
    sets = scripts.parent / "sets"
    line = f"--resume: as begun, with --quick --device=cpu --only=ptb --rows=row_of_ptb --units=4 --data={sets}"
    assert line in capsys.readouterr().out.splitlines()
    [[_, *options]] = resumed(scripts, "--only=mnist", "--rows=row_of_mnist")
    assert "--units=4" in options and "--rows=row_of_mnist" in options, "options beside --resume change those"
    assert "--resume: as begun and as said now, with --quick" in capsys.readouterr().out
    assert resumed(scripts) == before, "and are none that the run was begun with"
    for said in (["--processes=3"], []):
        ran = resumed(scripts, *said)
        assert ran and all("--processes=3" in options for options in ran), "how many: said once"
    assert run(scripts, "--only=synthetic") == 0 and resumed(scripts) == [["synthetic"]], "begun anew in its folder"
    assert resumed(scripts, "--full") == [["synthetic"]] and "--full" in (scripts / "started").read_text()


def test_resume_finds_what_the_suite_has_begun_on_the_other_device_too(scripts, monkeypatch, tmp_path):
    """And passes over a folder that a script alone has made."""
    results = tmp_path / "results"
    monkeypatch.setattr(machine, "run_name", lambda device: f"{device}-20260102")
    monkeypatch.setattr(suite, "has_gpu", lambda: True)
    find = suite.default_out
    monkeypatch.setattr(suite, "default_out", lambda *given, **options: find(*given, results, **options))
    assert suite.main(["--device=cpu", "--only=mnist"], scripts) == 0
    for alone in ("cpu-20260102-2", "gpu-20260101"):
        with records.open_run(results / alone) as run_:
            records.write_record(run_, record_cases.make())
    for argv in (["--resume"], ["--resume", "--device=cpu"]):
        (scripts / "started").unlink()
        assert suite.main(argv, scripts) == 0
        assert [name for name, *_ in started(scripts)] == ["mnist"]
        assert f"--out={results / 'cpu-20260102'}" in (scripts / "started").read_text()


def test_what_is_asked_before_anything_is_installed_needs_no_package(scripts):
    project = str(Path(__file__).resolve().parents[2])
    code = f"import sys; sys.path.insert(0, {project!r}); from pathlib import Path; from harness.run import suite"
    env = {name: value for name, value in os.environ.items() if name not in ("TORCH_PYTHON", "JAX_PYTHON")}
    for argv, status in (([], 0), (["--resume"], 0), (["--resume", f"--out={scripts / 'none'}"], 2)):
        asked = f"{code}; sys.exit(suite.check({['--device=cpu', *argv]!r}, Path({str(scripts)!r})))"
        ran = subprocess.run([sys.executable, "-S", "-c", asked], capture_output=True, text=True, env=env)
        assert ran.returncode == status and "Traceback" not in ran.stderr, ran.stderr


def test_resume_of_a_run_without_options_or_without_their_note_runs_everything(scripts, capsys):
    path = scripts.parent / "out" / "run.json"
    assert run(scripts, "--resume") == 2 and not path.parent.exists()
    assert f"--resume: {path.parent}: no run there; name a run's folder by --out=DIR" in capsys.readouterr().err
    assert run(scripts) == 0
    whole = [[name, *(option for option in rest if option != "--resume")] for name, *rest in started(scripts)]
    assert json.loads(path.read_text())["options"] == ["--quick", "--device=cpu"] and resumed(scripts) == whole
    facts = json.loads(path.read_text())
    del facts["options"]
    path.write_text(json.dumps(facts))
    capsys.readouterr()
    assert resumed(scripts, "--only=mnist") == [["mnist"]] and "as begun" not in capsys.readouterr().out
    assert json.loads(path.read_text())["options"] == ["--quick", "--device=cpu", "--only=mnist"], "noted from then on"


@pytest.mark.parametrize("noted", ["--only=ptb", ["--only=gone"], [3], {"only": "ptb"}, ["--units=x"]])
def test_noted_options_that_are_none_are_one_line_and_status_2(scripts, capsys, noted):
    assert run(scripts, "--only=mnist") == 0
    path = scripts.parent / "out" / "run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "options": noted}))
    capsys.readouterr()
    (scripts / "started").unlink()
    assert run(scripts, "--resume") == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {path}: ") and line.endswith(
        "; leave --resume out, or choose another folder with --out"
    )
    assert not started(scripts)


def test_folder_without_scripts_is_refused(tmp_path):
    with pytest.raises(UserError, match="holds no script, expected the benchmarks"):
        jobs.read_headers(tmp_path)


def test_script_that_is_put_into_the_folder_runs_with_the_others(scripts):
    (scripts / "translation.py").write_text((scripts / "stacked_lm.py").read_text())
    assert planned(scripts)[-1] == "translation" and planned(scripts, "--only=translation") == ["translation"]


def test_constant_written_into_a_header_is_by_that_alone_an_option_with_help_and_changes_the_reference(tmp_path):
    text = (suite.BENCHMARKS / "ptb.py").read_text()
    last = "ROW_BUDGET_S ="
    assert last in text
    text = text.replace(last, f"HIGHWAY_GATES = 2  # gates beside each layer\n{last}", 1)
    (tmp_path / "ptb.py").write_text(text)
    with pytest.raises(UserError, match="nothing reads HIGHWAY_GATES"):
        jobs.read_headers(tmp_path)
    (tmp_path / "ptb.py").write_text(text + "gates = c.HIGHWAY_GATES\n")
    header = jobs.read_headers(tmp_path)["ptb"]
    found = options.parse(header, ["--highway-gates=3"])
    constants = options.resolve(header, found, "full")
    assert constants["HIGHWAY_GATES"] == 3 and "overriding HIGHWAY_GATES = 3 (was 2)" in options.echo(
        constants, header, "full"
    )
    assert re.search(r"--highway-gates=N +2 +gates beside each layer", options.help_text(header, ""))
    assert settings.of(constants, settings.Changes.REFERENCE)["HIGHWAY_GATES"] == 3
    with pytest.raises(UserError, match="--highway-gates=two: expected an integer, such as 2"):
        options.parse(header, ["--highway-gates=two"])


@pytest.mark.parametrize("option", ["--help", "--list"])
def test_help_and_list_import_only_the_standard_library(scripts, option):
    code = (
        "import sys; from pathlib import Path; before = set(sys.modules); from harness.run import suite\n"
        f"status = suite.main([{option!r}], Path({str(scripts)!r}))\n"
        "imported = {name.partition('.')[0] for name in sys.modules.keys() - before}\n"
        "sys.exit(status or ' '.join(imported - sys.stdlib_module_names - {'harness'}) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    wanted = (
        ["row_of_ptb", "mnist"] if option == "--list" else ["--only", "--resume", "--no-install", "--units", "--noise"]
    )
    assert all(word in done.stdout for word in wanted)


def test_every_option_of_the_scripts_stands_in_the_help(scripts):
    text = suite.help_text(jobs.read_headers(scripts))
    assert all(f"--{name.replace('_', '-')}" in text for name in (*options.FLAGS, *options.SETTINGS))


def start_hanging(scripts: Path, does: str, grace_s: float) -> subprocess.Popen:
    (scripts / "ptb.does").write_text(does)
    code = (
        "import sys; from pathlib import Path; from harness.run import suite\n"
        f"suite.GRACE_S = {grace_s}\nsys.exit(suite.main(sys.argv[2:], Path(sys.argv[1])))"
    )
    command = [sys.executable, "-c", code, str(scripts), "--quick", "--device=cpu", f"--out={scripts.parent / 'out'}"]
    process = subprocess.Popen(
        command, cwd=PROJECT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    deadline = time.monotonic() + 300
    while not (scripts / "hanging").exists():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)
    return process


def left_over(scripts: Path) -> list[int]:
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        if any(str(scripts) in word for word in process.info["cmdline"] or []) and process.info["status"] != "zombie":
            found.append(process.pid)
    return found


@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupt_is_handed_on_once_and_says_how_to_go_on(scripts, number, status):
    process = start_hanging(scripts, "hang", 20)
    os.killpg(process.pid, number)  # as a terminal does: every process of the foreground group
    output, errors = process.communicate(timeout=300)
    assert process.returncode == status
    assert (scripts / "ended").exists(), "the script was killed before it could keep its rows"
    assert "--resume" in output and "Traceback" not in errors
    assert left_over(scripts) == []
    assert [name for name, *_ in started(scripts)] == ["mnist", "ptb"]


def test_no_process_is_left_of_a_script_that_ignores_the_interrupt(scripts):
    process = start_hanging(scripts, "ignore", 0.5)
    assert len(left_over(scripts)) == 3  # the suite, the script, and a process of its own session
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=300)
    assert process.returncode == 130
    assert left_over(scripts) == []


def test_scripts_without_a_row_in_the_precision_are_left_out_and_refused_where_no_other_is_asked_for(scripts, capsys):
    options = ("--device=cpu", "--precision=bf16", "--rows=keras")
    assert run(scripts, *options, "--only=mnist,scaling") == 2
    printed = capsys.readouterr()
    assert printed.err == "error: --precision=bf16: no row of mnist has it\n" and printed.out == ""
    assert not (scripts.parent / "out").exists() and started(scripts) == []
    assert run(scripts, *options, "--only=mnist,ptb") == 0
    printed = capsys.readouterr().out
    for job, name in (("mnist", "mnist"), ("ptb --config=small --train", "ptb")):
        assert f"left out: {job}: --precision=bf16: no row of {name} " in printed
    assert [(name, "--train" in rest) for name, *rest in started(scripts)] == [("ptb", False)]


def test_tf32_on_a_cpu_is_refused_before_anything_is_written(scripts, capsys):
    assert run(scripts, "--device=cpu", "--precision=tf32", "--only=mnist") == 2
    printed = capsys.readouterr()
    assert printed.err == f"error: {options.NO_TF32}\n" and printed.out == ""
    assert not (scripts.parent / "out").exists()


def test_check_of_gpus_that_are_not_there_fails(scripts, capsys):
    assert run(scripts, "--check", "--device=cpu", "--gpus=2") == 2
    assert capsys.readouterr().err == (
        "error: --gpus=2: this run is on a CPU; leave it out, or run where there are 2 GPUs\n"
    )
