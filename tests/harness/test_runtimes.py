"""Which frameworks there are, which are installed, and that nothing imports one before a row needs it."""

import ast
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from harness.frameworks import profiles, runtimes
from harness.measure import dropout
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


def test_a_framework_is_told_from_others_in_its_own_file_and_its_entry_alone():
    """So a new one is a folder of rows, a file of harness/frameworks/ and its entry in harness/record/frameworks.py."""
    own = {f"harness/frameworks/{found.runtime.partition('.')[0]}.py" for found in frameworks.FRAMEWORKS.values()}
    allowed = {*own, "harness/record/frameworks.py"}
    allowed |= {
        "harness/measure/measurement.py"
    }  # HELD_ON: what is held after the timed steps; a new one is held to less
    peers = frameworks.FRAMEWORKS.keys() - {"tensorflow"}  # which is the environment that all others are beside
    for path in sorted((PROJECT / "harness").rglob("*.py")):
        name = path.relative_to(PROJECT).as_posix()
        tree = ast.parse(path.read_text())
        named = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)} & peers
        imported = {
            alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names
        } & peers
        assert name in allowed or not named | imported, f"{name} names {named | imported}"


def test_a_framework_of_one_file_and_one_entry_has_its_python_its_runtime_and_what_steers_it(monkeypatch):
    class Runtime:
        draws = profiles.Draws("draw")

        def __init__(self, *arguments):
            self.arguments = arguments

    module = SimpleNamespace(Runtime=Runtime)
    monkeypatch.setitem(sys.modules, "harness.frameworks.theano", module)
    entry = frameworks.Framework("Theano", "theano.Runtime", ("theano",), ("THEANO_",), (3, 99))
    monkeypatch.setitem(frameworks.FRAMEWORKS, "theano", entry)
    assert runtimes.make("theano", "cpu", "fp32", 1).arguments == ("cpu", "fp32", 1)
    assert dropout.masks_not_drawn({"draw": 2}, "theano", 3, 1).startswith("random numbers were drawn 2 times")
    monkeypatch.setenv("THEANO_PYTHON", sys.executable)
    assert environments.python("theano") == sys.executable and environments.missing("theano") == "needs Python 3.99"
    assert frameworks.variables_of(["torch"], {"THEANO_FLAGS": "x", "TORCH_LOGS": "y"}) == {"TORCH_LOGS": "y"}


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
