"""One table says what each constant of a header changes; a constant without an entry counts as one that changes everything."""

import ast
from pathlib import Path
from types import SimpleNamespace

import pytest

from harness.measure import references
from harness.record import settings
from harness.record.settings import Changes
from harness.run import child, options

SCRIPTS = sorted(
    path for path in (Path(__file__).resolve().parents[2] / "benchmarks").glob("*.py") if path.stem != "__init__"
)


def test_a_constant_without_an_entry_changes_the_reference():
    assert settings.changed_by("HIGHWAY_GATES") == Changes.REFERENCE
    assert settings.of({"HIGHWAY_GATES": 2, "ROWS": "all", "BLOCKS": 5}, Changes.REFERENCE) == {"HIGHWAY_GATES": 2}
    assert settings.of({"HIGHWAY_GATES": 2, "ROWS": "all", "BLOCKS": 5}) == {"HIGHWAY_GATES": 2, "BLOCKS": 5}


def test_a_numbered_constant_changes_what_its_name_does():
    assert settings.changed_by("EPOCHS_3") == settings.changed_by("EPOCHS") == Changes.RESULT
    assert settings.changed_by("EPOCHSES") == settings.changed_by("LAYER_3") == Changes.REFERENCE


def test_every_entry_has_a_reason_and_is_of_a_constant_that_a_script_has():
    names = {name for script in SCRIPTS for name in options.read_header(script).constants}
    known = {name for name in settings.EXCEPTIONS if any(n == name or n.startswith(f"{name}_") for n in names)}
    assert known == settings.EXCEPTIONS.keys()
    assert all(reason and changes < Changes.REFERENCE for changes, reason in settings.EXCEPTIONS.values())


def read_by(tree: ast.Module, start: str) -> set[str]:
    """The constants, attributes of `c`, that a function of a script reads, itself or in the script's functions that it uses."""
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    due, seen, found = [start], set(), set()
    while due:
        name = due.pop()
        seen.add(name)
        for node in ast.walk(functions[name]):
            if isinstance(node, ast.Name) and node.id in functions and node.id not in seen:
                due.append(node.id)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "c":
                found.add(node.attr)
    return found


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_what_the_scripts_read_for_the_reference_changes_it(script):
    tree = ast.parse(script.read_text())
    read = read_by(tree, "load") | read_by(tree, "reference")
    # The rows of options.py compute their own, in their own process.
    assert {"UNITS", "SEED"} <= read or script.stem == "options"
    assert {name for name in read if settings.changed_by(name) < Changes.REFERENCE} == set()


@pytest.mark.parametrize("name", ["LOSS_SCALE", "ROWS", "BLOCKS"])
def test_reference_that_reads_a_constant_that_does_not_change_it_fails_by_name(tmp_path, name):
    def reference(constants, data):
        return {"losses": [constants.UNITS * getattr(constants, name)]}

    benchmark = SimpleNamespace(load=lambda constants, location: None, reference=reference)
    job = {"task": "reference", "constants": {"UNITS": 2, name: 3}, "flags": [], "device": "cpu",
           "data": {"embedded": "asked for"}, "path": str(tmp_path / "reference.npz")}  # fmt: skip
    expected = f"AttributeError: the reference reads {name}, which does not change it (harness/record/settings.py)"
    assert child._result(benchmark, job) == {"error": expected, "wrong_input": False}
    name = "UNITS"
    assert child._result(benchmark, job) == {}
    assert references.load_reference(tmp_path / "reference.npz")["losses"].tolist() == [4]
