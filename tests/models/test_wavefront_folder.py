"""models/wavefront stands alone, and its documentation runs. tests/install_wheel.sh installs and trains it."""

import ast
import doctest
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from models.wavefront.keras_config import KERAS_LAYERS
from models.wavefront.spec import StackSpec
from models.weights import stack_spec

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "models" / "wavefront"
ALLOWED = {"tensorflow", "keras", "numpy", "torch"}  # torch: inside of the functions that convert from and to it


def imported(path: Path):
    """(line, level, module) of every import of a file, wherever it stands."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, 0, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, node.level, node.module or ""


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.name)
def test_it_imports_tensorflow_keras_numpy_and_itself_relatively(path):
    for line, level, module in imported(path):
        package = module.split(".")[0]
        assert level == 1 or (level == 0 and (package in ALLOWED or package in sys.stdlib_module_names)), (
            f"{path.name}:{line} imports {'.' * level}{module}"
        )


def test_a_program_that_imports_the_package_before_keras_opens_saved_models():
    code = """
import sys, models.wavefront as package
assert "torch" not in sys.modules
import keras
for name in package.__all__:
    assert getattr(package, name).__name__ == name
for registered in ("WavefrontLSTM", "SoftmaxHead", "CompiledLoop"):
    assert keras.saving.get_registered_object("lstm_benchmarks>" + registered) is getattr(package, registered)
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.mark.parametrize("lacking", ["keras", "tensorflow"])
def test_without_what_it_needs_it_says_how_to_install_that(lacking):
    code = f"import sys; sys.modules[{lacking!r}] = None; from models.wavefront import WavefrontLSTM"
    ended = subprocess.run([sys.executable, "-c", code], check=False, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 1
    line = ended.stderr.splitlines()[-1]
    assert line.startswith(f"ImportError: no {lacking} here, which wavefront_lstm needs: pip install 'tensorflow>=")


@pytest.mark.parametrize("bidirectional", [False, True])
def test_its_canonical_form_is_that_of_the_suite(bidirectional):
    own = StackSpec(3, 5, 7, bidirectional)
    suites = stack_spec.StackSpec("lstm", 3, 5, 7, bidirectional)
    assert list(own.shapes().items()) == list(stack_spec.canonical_shapes(suites).items())
    for name in ("mode", "directions", "num_pseudo_layers"):
        assert getattr(own, name) == getattr(suites, name)
    assert [own.layer_input_size(k) for k in range(3)] == [suites.layer_input_size(k) for k in range(3)]
    assert KERAS_LAYERS == stack_spec.KERAS_LAYERS


@pytest.fixture
def under_its_installed_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "wavefront_lstm", importlib.import_module("models.wavefront"))


def test_the_examples_of_its_readme_run(under_its_installed_name):
    result = doctest.testfile(str(FOLDER / "README.md"), module_relative=False, optionflags=doctest.ELLIPSIS)
    assert result.attempted > 5 and result.failed == 0


@pytest.mark.parametrize("module", ["layer", "softmax_head", "compiled_loop"])
def test_the_examples_of_its_docstrings_run(module, under_its_installed_name):
    result = doctest.testmod(importlib.import_module(f"models.wavefront.{module}"), optionflags=doctest.ELLIPSIS)
    assert result.attempted > 0 and result.failed == 0


def test_the_language_models_row_runs_the_public_layer_and_head(monkeypatch):
    import models.wavefront as package
    from tests import cases

    calls = []

    def count(kind, method):
        original = getattr(kind, method)

        def counted(*arguments, **keywords):
            calls.append(method)
            return original(*arguments, **keywords)

        monkeypatch.setattr(kind, method, counted)

    count(package.WavefrontLSTM, "_run")
    count(package.SoftmaxHead, "cross_entropy")
    trial = cases.language_model("wavefront", "fp16", ptb=True)
    assert type(trial.head) is package.SoftmaxHead and isinstance(trial.stack.layer, package.WavefrontLSTM)
    trial._forward.get_concrete_function(*trial.batches[0], trial.states)
    assert calls == ["_run", "cross_entropy"]
