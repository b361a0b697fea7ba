"""Who imports whom: the rooms of models/ and harness/ and the arrows between them, read from the imports of every file.

An import inside a function counts like one at the head of a file, and so does a module's name in a string, which something
imports later (models/rows.py).
"""

import ast
import functools
import re
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[1]
TREES = ("models", "harness", "benchmarks")
NAME = re.compile(rf"({'|'.join(TREES)})(\.\w+)+\.?")  # of a module, or how one begins
NETWORKS = {"models.weights", "models.reference", "models.trial", "models.replicas", "models.wavefront", "models.cudnn"}
ALLOWED = {
    "models.wavefront": set(),
    "models.weights": set(),
    "models.reference": {"models.weights"},
    "models.trial": {"models.weights", "models.reference"},
    "models.replicas": {"models.trial", "models.reference"},
    "models.cudnn": {"models.weights", "models.wavefront"},
    **dict.fromkeys(("models.tf", "models.pytorch", "models.jax", "models.keras", "models.onnx"), NETWORKS),
    "models.rows": {"models.tf", "models.pytorch", "models.jax", "models.keras", "models.onnx"},  # LAZY
    "harness.errors": set(),
    "harness.data": {"harness.errors"},
    "harness.record": {"harness.errors"},
    "harness.frameworks": {"harness.errors", "harness.record"},
    "harness.measure": {"harness.errors", "harness.record", "harness.frameworks"},
    "harness.report": {"harness.errors", "harness.record"},
    "harness.compare": {"harness.errors", "harness.record", "harness.report"},
    # Looks at a user's model, and tries this suite's layers in it: the one room of the harness that knows models.
    "harness.doctor": {
        *("harness.errors", "harness.record", "harness.frameworks", "harness.measure", "harness.run"),
        *("models.wavefront", "models.cudnn"),
    },
    "harness.run": {
        *("harness.errors", "harness.record", "harness.frameworks", "harness.measure", "harness.report", "harness.data")
    },
}
LAZY = "models.rows"  # imports what builds a row in the process that needs it, and nothing at its head
EXCEPTED = {
    ("harness.frameworks.tensorflow", "models.wavefront.nvrtc")
}  # --check tries the very way by which rows launch CUDA kernels


def modules(project: Path = PROJECT) -> dict[str, Path]:
    """Every module of the three trees by its dotted name."""
    files = [path for tree in TREES for path in sorted((project / tree).rglob("*.py"))]
    names = [path.relative_to(project).with_suffix("").parts for path in files]
    return {".".join(parts).removesuffix(".__init__"): path for parts, path in zip(names, files, strict=True)}


def imports(name: str, path: Path, known: dict[str, Path], nodes=ast.walk) -> set[str]:
    """The modules of the project that a module imports; nodes: ast → the nodes to look at."""
    found = set()
    package = name if path.stem == "__init__" else name.rpartition(".")[0]
    for node in nodes(_parsed(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package.split(".")[: len(package.split(".")) + 1 - node.level]) if node.level else ""
            base = ".".join(filter(None, [base, node.module]))
            found |= {f"{base}.{alias.name}" if f"{base}.{alias.name}" in known else base for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and NAME.fullmatch(node.value):
            found.add(_module_of(node.value.rstrip("."), known))
    return {module for module in found if module.partition(".")[0] in TREES} - {name}


_parsed = functools.cache(ast.parse)


def _module_of(path: str, known: dict[str, Path]) -> str:
    while path not in known and "." in path:
        path = path.rpartition(".")[0]
    return path


def room(module: str) -> str:
    """models.tf.stack → models.tf; models.rows is a room of its own; a script → benchmarks."""
    parts = module.split(".")
    return parts[0] if parts[0] == "benchmarks" else ".".join(parts[:2])


def broken(known: dict[str, Path]) -> set[tuple[str, str]]:
    """Every (file, import) that no arrow allows."""
    found = set()
    for name, path in known.items():
        for target in imports(name, path, known):
            own, other = room(name), room(target)
            if own == "benchmarks":
                allowed = other.partition(".")[0] in ("models", "harness")
            else:
                allowed = other == own or other in ALLOWED.get(own, set())
            if not allowed:
                found.add((name, target))
    return found


def circles(known: dict[str, Path]) -> set[frozenset[str]]:
    """Sets of files each of which imports, by way of others, all others of its set."""
    arrows = {name: imports(name, path, known) for name, path in known.items()}

    def reached(start: str) -> set[str]:
        seen, todo = set(), [start]
        while todo:
            for target in arrows.get(todo.pop(), ()):
                if target not in seen:
                    seen.add(target)
                    todo.append(target)
        return seen

    reach = {name: reached(name) for name in arrows}
    found = {frozenset(other for other in reach[name] if name in reach.get(other, ())) for name in arrows}
    return {members for members in found if members}


def test_every_import_follows_an_arrow_of_the_house():
    found = broken(modules())
    assert sorted(found - EXCEPTED) == [], "arrows that are not allowed"
    assert sorted(EXCEPTED - found) == [], "gone: take them out of EXCEPTED"


def test_no_file_imports_itself_by_way_of_others():
    assert [sorted(members) for members in circles(modules())] == []


def test_every_room_is_one_of_the_house():
    assert {room(name) for name in modules()} - {"models", "harness", "benchmarks"} == set(ALLOWED)


def test_the_registry_imports_nothing_of_the_project_until_a_row_is_built():
    def head(tree):
        return [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]

    known = modules()
    assert imports(LAZY, known[LAZY], known, head) == set()


@pytest.mark.parametrize(
    "file, line",
    [
        ("models/weights/canonical.py", "import models.wavefront.layer"),
        ("models/weights/canonical.py", "def later():\n    from models.tf import stack"),
        ("models/jax/stacks.py", "from ..pytorch import stacks"),
        ("models/tf/stack.py", "from harness import errors"),
        ("harness/record/schema.py", "from harness.run.options import parse"),
        ("models/tf/stack.py", "WHERE = 'models.rows.LANGUAGE_MODEL'"),
    ],
)
def test_an_arrow_that_is_not_allowed_is_found(tmp_path, file, line):
    assert broken(_with(tmp_path, file, line)) - broken(modules())


def test_a_circle_is_found(tmp_path):
    known = _with(tmp_path, "models/weights/layouts.py", "def later():\n    from models.weights import stack_spec")
    (tmp_path / "models/weights/stack_spec.py").write_text("from models.weights import layouts\n")
    assert any("models.weights.layouts" in members for members in circles(known))


def _with(folder: Path, file: str, lines: str) -> dict[str, Path]:
    """The modules of a copy of the project whose file has these lines too."""
    for path in modules().values():
        copy = folder / path.relative_to(PROJECT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(path.read_text())
    (folder / file).write_text((folder / file).read_text() + f"\n{lines}\n")
    return modules(folder)
