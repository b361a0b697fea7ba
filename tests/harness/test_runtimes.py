"""Which frameworks there are, which are installed, and that nothing imports one before a row needs it."""

import ast
import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest

from harness.errors import UserError
from harness.frameworks import profiles, runtimes, tensorflow
from harness.measure import dropout
from harness.record import frameworks, machine
from harness.run import environments
from tests import cases, jax_cases, torch_cases

PROJECT = Path(__file__).resolve().parents[2]


def run(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


@pytest.fixture(params=frameworks.FRAMEWORKS)
def framework(request, tensorflow_runtime):
    pytest.importorskip(request.param)
    return request.param


def made(framework: str, device: str = "cpu"):
    return {"tensorflow": cases, "torch": torch_cases, "jax": jax_cases}[framework].make_runtime(device, "fp32")


def scalar(framework: str, value: float):
    if framework == "tensorflow":
        return importlib.import_module("tensorflow").constant(value)
    if framework == "torch":  # a loss has a gradient
        return importlib.import_module("torch").tensor(value, requires_grad=True)
    return importlib.import_module("jax.numpy").float32(value)


def test_every_framework_is_what_a_rows_process_needs(framework):
    runtime = made(framework)
    needed = {name for name in (*vars(runtimes.Runtime), *runtimes.Runtime.__annotations__) if name[0] != "_"}
    assert len(needed) > 15 and [name for name in sorted(needed) if not hasattr(runtime, name)] == []
    assert (runtime.name, runtime.device, runtime.precision) == (framework, "cpu", "fp32") and runtime.draws.ops
    assert all(callable(getattr(*function)) for function in runtime.waits)
    runtime.reset_memory_peak()
    assert runtime.memory_peak() is None and runtime.sync() is None
    losses = [scalar(framework, value) for value in (1.5, 2.5)]
    assert all(isinstance(loss, runtime.tensor_type) and runtime.on_device(loss) for loss in losses)
    assert runtime.to_numpy(losses).tolist() == [1.5, 2.5] and runtime.to_numpy(losses).dtype == "float32"
    nothing = {"ops": {}, "kernels": {}, "to_host_bytes": 0, "launches": 0, "syncs": None}
    assert runtime.profile(lambda: None) == nothing
    for step, run in runtime.small_steps():
        assert not run(), step
    found = runtime.environment()
    assert found[framework] == importlib.import_module(framework).__version__ and type(found[framework]) is str
    assert found["cuda"] is found["cudnn"] is None and found["notes"] == []
    assert found.keys() <= {framework, "keras", "jaxlib", "cuda", "cudnn", "notes"}


def test_gpu_that_a_framework_does_not_see_is_refused_in_one_line(framework, monkeypatch):
    monkeypatch.setattr(tensorflow, "why_no_gpu", lambda: "why")  # asks a process: test_check.py
    if machine.gpu_count():
        pytest.skip("there is a GPU")
    with pytest.raises(UserError, match=f"{frameworks.FRAMEWORKS[framework].title} [^ ]+ does not") as refused:
        made(framework, "gpu")
    assert "\n" not in str(refused.value)


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
        keeps_compiled: ClassVar = {"THEANO_CACHE": "{}"}

        def __init__(self, *arguments):
            self.arguments = arguments

    module = SimpleNamespace(Runtime=Runtime)
    monkeypatch.setitem(sys.modules, "harness.frameworks.theano", module)
    entry = frameworks.Framework("Theano", "theano.Runtime", ("theano",), ("THEANO_",), (3, 99))
    monkeypatch.setitem(frameworks.FRAMEWORKS, "theano", entry)
    monkeypatch.delenv("THEANO_CACHE", raising=False)
    assert runtimes.make("theano", "cpu", "fp32", 1, "/a/folder").arguments == ("cpu", "fp32", 1)
    assert os.environ["THEANO_CACHE"] == "/a/folder"
    monkeypatch.setenv("THEANO_CACHE", "")  # and gone after the test
    assert dropout.masks_not_drawn({"draw": 2}, "theano", 3, 1).startswith("random numbers were drawn 2 times")
    monkeypatch.setenv("THEANO_PYTHON", sys.executable)
    assert environments.python("theano") == sys.executable and environments.missing("theano") == "needs Python 3.99"
    assert frameworks.variables_of(["torch"], {"THEANO_FLAGS": "x", "TORCH_LOGS": "y"}) == {"TORCH_LOGS": "y"}


def test_unknown_framework_is_refused_by_name():
    with pytest.raises(ValueError, match="'theano': expected one of tensorflow, torch"):
        runtimes.make("theano", "cpu", "fp32", 1)


@pytest.mark.parametrize("found, reason", [(None, "not installed: ./run_all.sh --peers"), (object(), "")])
def test_peer_that_is_not_installed_is_missing(monkeypatch, found, reason):
    monkeypatch.delenv("TORCH_PYTHON", raising=False)
    monkeypatch.setattr("harness.record.software.STAMP", "not-of-run_all.sh")  # a Python of the user's own
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
def test_framework_is_given_where_to_keep_what_it_compiles_unless_the_user_has_said_it(monkeypatch, framework):
    kind = runtimes.kind(framework)
    monkeypatch.setattr(kind, "__init__", lambda *_: None)
    for users in ({}, {next(iter(kind.keeps_compiled)): "mine"}):
        monkeypatch.setattr(runtimes.os, "environ", dict(users))
        assert runtimes.finds_compiled(framework, "/a/folder") == (not users)
        assert not runtimes.finds_compiled(framework, None)
        runtimes.make(framework, "cpu", "fp32", 1, "/a/folder")
        given = {name: value.format("/a/folder") for name, value in kind.keeps_compiled.items()}
        assert runtimes.os.environ == (users or given)
        assert users or any("/a/folder" in value for value in given.values())
