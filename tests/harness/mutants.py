"""Copies of a module from which one check is missing, made from its source: for tests of whether each check is needed."""

import ast
import functools
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType


def mutants(source: Path, wanted=lambda function, node: True) -> Iterator[tuple[str, Callable[[], ast.Module]]]:
    """(what is missing, a function that returns the module's tree without it) of every function that the module has.

    A call that stands alone does nothing; a condition does not hold; of "and" and "or" one side is missing; of a
    choice one side is always taken. `wanted(name of the function, node)` picks.
    """
    text = source.read_text()
    tree = ast.parse(text)
    functions = _functions(tree)
    for number, node in enumerate(ast.walk(tree)):
        function = functions.get(node, "")
        if not function or not wanted(function, node):
            continue
        for what, change in _changes(node):
            where = f"{function}: {' '.join(ast.unparse(getattr(node, 'test', node)).split())[:60]}"
            yield f"{where}: {what}", functools.partial(_changed, text, number, change)


def _changed(text: str, number: int, change: Callable[[ast.AST], None]) -> ast.Module:
    tree = ast.parse(text)
    change(list(ast.walk(tree))[number])
    return ast.fix_missing_locations(tree)


def load(tree: ast.Module, path: Path) -> ModuleType:
    """The tree as a module of its own, written to `path`."""
    path.write_text(ast.unparse(tree))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _functions(tree: ast.Module) -> dict[ast.AST, str]:
    """Name of the function of the module or of its classes that a node stands in, of those that stand in one."""
    holders = [tree, *(part for part in tree.body if isinstance(part, ast.ClassDef))]
    functions = [part for holder in holders for part in holder.body if isinstance(part, ast.FunctionDef)]
    return {node: function.name for function in functions for node in ast.walk(function)}


def _changes(node: ast.AST) -> list:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        return [("does nothing", lambda n: setattr(n, "value", ast.Constant(None)))]
    if isinstance(node, ast.If):
        return [("never holds", lambda n: setattr(n, "test", ast.Constant(False)))]
    if isinstance(node, ast.IfExp):
        return [(f"is always {v}", lambda n, v=v: setattr(n, "test", ast.Constant(v))) for v in (True, False)]
    if isinstance(node, ast.BoolOp):
        return [
            (f"without {ast.unparse(node.values[k])[:40]}", lambda n, k=k: n.values.pop(k))
            for k in range(len(node.values))
        ]
    return []
