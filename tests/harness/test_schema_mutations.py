"""No file that is no record is read as one: whichever check of harness/record/schema.py is missing, a test "
"of test_schema.py fails."""

import ast
import inspect
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from harness.record import schema
from tests import record_cases
from tests.harness import mutants, test_schema

SOURCE = Path(schema.__file__)
MUTANTS = list(mutants.mutants(SOURCE))
RULES = [*schema.RULES, *schema.OPTIONAL]


def cases(test: Callable) -> Iterator[dict]:
    """The arguments of every case of a test: the product of its marks `parametrize`."""
    choices = []
    for mark in getattr(test, "pytestmark", []):
        names, values = mark.args
        names = [name.strip() for name in names.split(",")] if isinstance(names, str) else names
        choices.append([dict(zip(names, value if len(names) > 1 else [value], strict=True)) for value in values])
    for chosen in itertools.product(*choices):
        yield {name: value for part in chosen for name, value in part.items()}


def complaint(monkeypatch, module: ModuleType) -> str:
    """The first test of test_schema.py that fails where the schema is this module; "" where all pass."""
    for place in (test_schema, record_cases):
        monkeypatch.setattr(place, "schema", module)
    monkeypatch.setattr(test_schema, "RecordError", module.RecordError)
    for name, test in inspect.getmembers(test_schema, inspect.isfunction):
        # The records of all committed runs: many, and read through harness.record.records.
        if not name.startswith("test_") or name == "test_every_committed_record_is_read_without_a_warning":
            continue
        for arguments in cases(test):
            try:
                test(**arguments)
            except (Exception, pytest.fail.Exception) as error:
                return f"{name}({arguments}): {error!r}"
    return ""


@pytest.mark.parametrize("tree_of", [tree_of for _, tree_of in MUTANTS], ids=[ascii(missing) for missing, _ in MUTANTS])
def test_a_check_that_is_missing_makes_a_test_fail(tree_of, tmp_path, monkeypatch):
    assert complaint(monkeypatch, mutants.load(tree_of(), tmp_path / "mutant.py"))


@pytest.mark.parametrize("key", RULES)
def test_a_rule_that_takes_every_value_makes_a_test_fail(key, tmp_path, monkeypatch):
    mutant = mutants.load(ast.parse(SOURCE.read_text()), tmp_path / "mutant.py")
    rules = mutant.RULES if key in mutant.RULES else mutant.OPTIONAL
    rules[key] = (rules[key][0], lambda value: True, *rules[key][2:])
    assert complaint(monkeypatch, mutant)


def test_the_copy_without_a_change_passes_every_test(tmp_path, monkeypatch):
    assert complaint(monkeypatch, mutants.load(ast.parse(SOURCE.read_text()), tmp_path / "mutant.py")) == ""
