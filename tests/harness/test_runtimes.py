"""Which frameworks there are, which are installed, and that nothing imports one before a row needs it."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from harness.frameworks import runtimes
from harness.record import frameworks, machine
from harness.run import environments

PROJECT = Path(__file__).resolve().parents[2]


def run(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


def test_nothing_imports_a_framework_before_a_row_needs_it():
    run(
        "import sys\n"
        "import harness.run.child, harness.measure.measurement, harness.run.environments, "
        "harness.frameworks.tensorflow, harness.frameworks.pytorch\n"
        "assert harness.run.environments.missing('torch') in ('', harness.run.environments.PEERS)\n"
        "assert not {'tensorflow', 'keras', 'torch'} & sys.modules.keys()"
    )


def test_row_of_pytorch_imports_no_tensorflow():
    pytest.importorskip("torch")
    run(
        "import sys\nfrom harness.measure import measurement; from harness.frameworks import runtimes\n"
        "runtime = runtimes.make('torch', 'cpu', 'fp32', 1)\n"
        "runtime.environment(), runtime.profile(lambda: None)\n"
        "assert not {'tensorflow', 'keras'} & sys.modules.keys()"
    )


def test_unknown_framework_is_refused_by_name():
    with pytest.raises(ValueError, match="'theano': expected one of tensorflow, torch"):
        runtimes.make("theano", "cpu", "fp32", 1)


@pytest.mark.parametrize("found, reason", [(None, "not installed: ./run_all.sh --peers"), (object(), "")])
def test_peer_that_is_not_installed_is_missing(monkeypatch, found, reason):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: found)
    monkeypatch.setattr(environments, "python", lambda framework: sys.executable)
    assert environments.missing("torch") == reason
    assert environments.missing("tensorflow") == ""


def test_row_depends_on_every_package_but_those_of_the_other_frameworks():
    installed = {"tensorflow": "2.21.0", "keras": "3.15.1", "torch": "2.13.0", "jax": "0.10.2", "numpy": "2.4.6"}
    assert frameworks.packages_of("torch", installed) == {"torch": "2.13.0", "keras": "3.15.1", "numpy": "2.4.6"}
    assert frameworks.packages_of("tensorflow", installed).keys() == {"tensorflow", "keras", "numpy"}
    assert {name for found in frameworks.FRAMEWORKS.values() for name in found.packages} <= set(machine.PACKAGES)


@pytest.mark.parametrize("framework", frameworks.FRAMEWORKS)
def test_framework_is_told_where_to_keep_what_it_compiles_unless_the_user_has_said_it(monkeypatch, framework):
    monkeypatch.setattr(runtimes.importlib, "import_module", lambda _: SimpleNamespace(**{name: lambda *_: None for name in
                        ("TensorFlowRuntime", "TorchRuntime", "JaxRuntime")}))  # fmt: skip
    variables = runtimes.KEEPS_COMPILED[framework]
    for users in ({}, {next(iter(variables)): "mine"}):
        monkeypatch.setattr(runtimes.os, "environ", dict(users))
        runtimes.make(framework, "cpu", "fp32", 1, "/a/folder")
        told = {name: value.format("/a/folder") for name, value in variables.items()}
        assert runtimes.os.environ == (users or told)
        assert users or any("/a/folder" in value for value in told.values())
