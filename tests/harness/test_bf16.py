"""A CPU that announces AMX and does not let TensorFlow use it, planted: the run goes on without AMX and says so."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from harness.record import machine
from harness.run import bf16, suite

PROJECT = Path(__file__).resolve().parents[2]
# Stands for TensorFlow's product: dies while the variable allows more than ALLOWED.
DIES = "import os, signal\nif os.environ.get({variable!r}) not in {lives}: os.kill(os.getpid(), signal.{signal})"


def product(*lives: str, by: str = "SIGILL") -> str:
    return DIES.format(variable=bf16.VARIABLE, lives=lives, signal=by)


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """A function: what the product does, and what the CPU announces, from here on."""

    def plant(does: str, flags: str = "fpu avx512_bf16 amx_bf16 amx_tile") -> None:
        cpuinfo = tmp_path / "cpuinfo"
        cpuinfo.write_text(f"processor\t: 0\nflags\t\t: {flags}\n")
        monkeypatch.setattr(bf16, "CPUINFO", cpuinfo)
        monkeypatch.setattr(bf16, "PRODUCT", does)

    monkeypatch.setattr(machine, "VARIABLES", dict(machine.VARIABLES))
    for name in (bf16.SETTLED, *bf16.OWN_CHOICE):
        monkeypatch.setenv(name, "")  # to be there no longer when the test has ended
        monkeypatch.delenv(name)
        machine.VARIABLES.pop(name, None)
    return plant


@pytest.mark.parametrize("lives, value", [
    (("AVX512_CORE_BF16", "AVX512_CORE"), "AVX512_CORE_BF16"), (("AVX512_CORE",), "AVX512_CORE"),
])  # fmt: skip
def test_where_a_bf16_product_dies_the_most_instructions_with_which_it_lives_are_set_and_said(planted, lives, value):
    planted(product(*lives))
    line = bf16.settle()
    assert os.environ[bf16.VARIABLE] == machine.VARIABLES[bf16.VARIABLE] == value
    assert "SIGILL" in line and line.endswith(f"; going on with ONEDNN_MAX_CPU_ISA={value}") and "\n" not in line


def test_where_it_dies_with_every_instruction_set_that_is_said_and_nothing_set(planted):
    planted(product("none"))
    assert bf16.settle().endswith("with ONEDNN_MAX_CPU_ISA=AVX512_CORE too: rows and tests in bf16 will crash")
    assert bf16.VARIABLE not in os.environ


@pytest.mark.parametrize("does", ["", "raise ImportError('no TensorFlow')", product(by="SIGKILL")])
def test_where_it_lives_or_fails_for_another_reason_nothing_is_set_or_said(planted, does):
    planted(does)
    assert bf16.settle() == "" and bf16.VARIABLE not in os.environ


@pytest.mark.parametrize("name", bf16.OWN_CHOICE)
def test_a_choice_of_the_users_is_left_alone(planted, name):
    planted(product("none"))
    os.environ[name] = "AVX2"
    assert bf16.settle() == "" and os.environ[name] == "AVX2"


def test_only_a_cpu_that_announces_amx_is_probed_and_only_once_per_command(planted, tmp_path):
    asked = f"open({str(tmp_path / 'asked')!r}, 'a').write('x')"
    planted(asked, flags="fpu avx512_bf16")
    assert bf16.settle() == "" and not (tmp_path / "asked").exists()
    planted(asked)
    assert bf16.settle() == "" and (tmp_path / "asked").read_text() == "x"
    assert bf16.settle() == "" and (tmp_path / "asked").read_text() == "x", "a child inherits the answer"


def test_tensorflows_bf16_product_is_what_the_probe_computes():
    wrong = bf16.PRODUCT.replace("== 256", "== 255")  # in the same process: TensorFlow takes seconds to import
    code = f"{bf16.PRODUCT}\nprint('right')\n{wrong}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) in ((1, "right\n"), (-signal.SIGILL, "")), (done.returncode, done.stderr)
    assert done.returncode < 0 or done.stderr.rstrip().endswith("AssertionError")


def test_a_script_says_it_and_the_variable_is_among_those_that_its_rows_record(planted, stub, capfd):
    planted(product("AVX512_CORE_BF16"))
    assert stub.main("--rows=first") == 0
    assert capfd.readouterr().err.count("going on with ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16\n") == 1
    code = "from harness.record import machine; print(machine.facts('cpu')['variables'])"
    of_a_child = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True)
    assert "'ONEDNN_MAX_CPU_ISA': 'AVX512_CORE_BF16'" in of_a_child.stdout, of_a_child.stderr


def test_the_suite_says_it_once_and_its_scripts_inherit_it(planted, tmp_path, monkeypatch, capfd):
    for script in (PROJECT / "benchmarks").glob("*.py"):
        _, header, _ = re.split(r"^# -{5,}$", script.read_text(), maxsplit=2, flags=re.MULTILINE)
        plan = '{"script": "x", "rows": {"keras": "tensorflow"}, "processes": 1, "points": 1, "budget_s": 1.0, '
        plan += '"at_once": 1, "gpus": 1, "left_out": "", "alone": ""}'
        body = f"import os, sys\nprint({plan!r} if '--plan' in sys.argv else 'inherits ' + os.environ[{bf16.VARIABLE!r}])\n"
        body += f"reads = {re.findall('^[A-Z][A-Z0-9_]*', header, re.MULTILINE)}\n"
        (tmp_path / script.name).write_text(f"# -----\n{header}# -----\n{body}")
    monkeypatch.setattr(suite, "report", lambda *_: None)
    planted(product("AVX512_CORE_BF16"))
    assert suite.main(["--quick", "--device=cpu", "--only=mnist,ptb", f"--out={tmp_path / 'out'}"], tmp_path) == 0
    printed = capfd.readouterr().out
    assert printed.count("going on with ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16\n") == 1
    assert printed.count("inherits AVX512_CORE_BF16\n") >= 2


def test_the_tests_say_it_and_go_on_without_amx(planted):
    planted(product("AVX512_CORE_BF16"))
    code = (
        "import sys; from pathlib import Path; import pytest; from harness.run import bf16\n"
        f"bf16.CPUINFO, bf16.PRODUCT = Path({str(bf16.CPUINFO)!r}), {bf16.PRODUCT!r}\n"
        "sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', sys.argv[1]]))"
    )
    passes_there = f"{Path(__file__).relative_to(PROJECT)}::test_tests_run_in_what_the_probe_left"
    command = [sys.executable, "-c", code, passes_there]
    environment = {**os.environ, "LSTM_BENCH_TEST_BF16": "AVX512_CORE_BF16"}
    done = subprocess.run(command, cwd=PROJECT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout + done.stderr
    assert done.stdout.count("going on with ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16\n") == 1


def test_tests_run_in_what_the_probe_left():
    """The test above runs this one where bf16 products die, and says what it has to find."""
    wanted = os.environ.get("LSTM_BENCH_TEST_BF16")
    if wanted is None:
        pytest.skip("run by test_the_tests_say_it_and_go_on_without_amx")
    assert os.environ[bf16.VARIABLE] == wanted
