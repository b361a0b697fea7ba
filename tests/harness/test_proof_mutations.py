"""No row is "ok" without its proof: whichever check of harness/measure/proof.py is skipped, a planted "
"mistake is caught no more."""

import ast
import math
from pathlib import Path

import pytest

from harness.measure import proof
from tests.harness import mutants
from tests.harness.proof_cases import complaints, complaints_of_modes

SOURCE = Path(proof.__file__)
MUTANTS = list(mutants.mutants(SOURCE))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    "tree_of",
    [
        pytest.param(tree_of, id=ascii(missing), marks=[pytest.mark.slow] * (k % 2))
        for k, (missing, tree_of) in enumerate(MUTANTS)
    ],
)
def test_a_check_that_is_skipped_lets_a_mistake_through(tree_of, tmp_path):
    mutant = mutants.load(tree_of(), tmp_path / "mutant.py")
    assert any(complaints(mutant.Proof)) or complaints_of_modes(mutant.Kernel)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_the_copy_without_a_change_has_nothing_to_complain_of(tmp_path):
    unchanged = mutants.load(ast.parse(SOURCE.read_text()), tmp_path / "mutant.py")
    assert [*complaints(unchanged.Proof), *complaints_of_modes(unchanged.Kernel)] == []


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", ["SPREAD_LIMIT", "DROPOUT_SPREAD_LIMIT", "MEANS_LIMIT"])
def test_a_limit_on_the_spread_that_is_lifted_lets_a_mistake_through(name, monkeypatch):
    monkeypatch.setattr(proof, name, math.inf)
    assert any(complaints())


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("field", ["outputs", "gradients", "update", "loss", "outputs_at_least"])
def test_a_limit_of_the_errors_that_is_lifted_lets_a_mistake_through(field, monkeypatch):
    lifted = 0.0 if field == "outputs_at_least" else math.inf
    monkeypatch.setattr(proof, "LIMITS", {p: limit._replace(**{field: lifted}) for p, limit in proof.LIMITS.items()})
    assert any(complaints())
