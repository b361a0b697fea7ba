"""Nothing that is read is ever executed: no pickle, exec, eval or shell in any Python file or script of the project."""

import ast
import re
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[1]
ROOMS = ("benchmarks", "harness", "models", "tests")
MODULES = {
    "pickle",
    "cPickle",
    "_pickle",
    "dill",
    "cloudpickle",
    "joblib",
    "marshal",
    "shelve",
    "copyreg",
    "code",
    "codeop",
}
MODULES |= {"commands", "pty", "yaml", "xmlrpc"}
BUILTINS = {"exec", "eval", "compile", "__import__", "execfile"}
# Of any object: names that mean the same wherever they are found.
METHODS = {"popen", "getoutput", "getstatusoutput", "create_subprocess_shell", "execfile"}
METHODS |= {"extract", "extractall", "unpack_archive"}  # the suite unpacks no archive
METHODS |= {"unsafe_load", "enable_unsafe_deserialization", "read_pickle", "to_pickle"}
METHODS |= {f"{kind}{how}" for kind in ("exec", "spawn") for how in ("l", "le", "lp", "lpe", "v", "ve", "vp", "vpe")}
LOADERS = {"numpy", "np", "torch", "keras", "tf"}  # whose load functions may run what a file holds


def name_of(node: ast.AST) -> str:
    """A dotted name, "" for anything else."""
    if isinstance(node, ast.Attribute):
        return f"{name_of(node.value)}.{node.attr}".lstrip(".")
    return node.id if isinstance(node, ast.Name) else ""


def imported(node: ast.AST) -> set[str]:
    if isinstance(node, ast.Import):
        return {alias.name.split(".")[0] for alias in node.names}
    return {(node.module or "").split(".")[0]} if isinstance(node, ast.ImportFrom) else set()


def is_false(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


def unsafe(source: str) -> list[str]:
    """One line per call or import that can execute what it reads."""
    found = []
    for node in ast.walk(ast.parse(source)):
        found += [f"{node.lineno}: import {name}" for name in sorted(imported(node) & MODULES)]
        if isinstance(node, ast.ImportFrom):
            names = {alias.name for alias in node.names} & (METHODS | {"load" if node.module in LOADERS else "system"})
            found += [f"{node.lineno}: from {node.module} import {name}" for name in sorted(names)]
        name = name_of(node)
        parent, _, last = name.rpartition(".")
        if isinstance(node, ast.Name) and name in BUILTINS:  # called, passed on or renamed
            found.append(f"{node.lineno}: {name}")
        elif isinstance(node, ast.Attribute) and (node.attr in METHODS or name in ("os.system", f"builtins.{last}")):
            found.append(f"{node.lineno}: {name or node.attr}")
        if isinstance(node, ast.Call):
            called = name_of(node.func)
            parent, _, last = called.rpartition(".")
            keywords = {keyword.arg: keyword.value for keyword in node.keywords}
            if "shell" in keywords and not is_false(keywords["shell"]):
                found.append(f"{node.lineno}: {called}(shell=...)")
            if "allow_pickle" in keywords and not is_false(keywords["allow_pickle"]):
                found.append(f"{node.lineno}: {called}(allow_pickle=...)")
            if last == "load" and parent.split(".")[0] in LOADERS and "allow_pickle" not in keywords:
                found.append(f"{node.lineno}: {called} without allow_pickle=False")
            if "safe_mode" in keywords:  # Keras' own guard against code in a saved model
                found.append(f"{node.lineno}: {called}(safe_mode=...)")
    return found


def python_files() -> list[Path]:
    return sorted(path for room in ROOMS for path in (PROJECT / room).rglob("*.py"))


def test_no_python_file_executes_what_it_reads():
    files = python_files()
    assert len(files) > 60
    found = {}
    for path in files:
        name = path.relative_to(PROJECT).as_posix()
        if lines := unsafe(path.read_text("utf-8")):
            found[name] = lines
    assert found == {}


@pytest.mark.parametrize("line", [
    "import pickle", "from pickle import loads", "import shelve as s",
    "exec('1')", "eval('1')", "run = eval", "compile('1', '', 'eval')",
    "os.system(x)", "os.popen(x)", "from os import system", "subprocess.run(x, shell=True)", "subprocess.Popen(x, shell=given)",
    "np.load(path)", "numpy.load(path, mmap_mode='r')", "np.load(path, allow_pickle=True)", "np.load(path, allow_pickle=a)",
    "torch.load(path)", "from numpy import load", "import yaml", "archive.extractall()", "shutil.unpack_archive(path)",
    "keras.models.load_model(path, safe_mode=False)", "os.execv(a, b)", "builtins.exec('1')", "__import__('pickle')",
])  # fmt: skip
def test_scan_sees(line):
    assert unsafe(line) != []


@pytest.mark.parametrize("line", [
    "np.load(path, allow_pickle=False)", "re.compile('a')", "model.compile(loss='mse')", "json.load(file)", "trial.load(weights)",
    "subprocess.run([a, b])", "subprocess.run([a], shell=False)", "spec.loader.exec_module(module)", "model.evaluate(x)",
])  # fmt: skip
def test_scan_lets_pass(line):
    assert unsafe(line) == []


def test_no_shell_script_evaluates_text():
    scripts = [*PROJECT.glob("*.sh"), *(PROJECT / "harness").rglob("*.sh"), PROJECT / ".ci" / "run"]
    assert {"run_all.sh", "run_tests.sh", "lock.sh", "setup_env.sh", "run"} <= {path.name for path in scripts}
    word = re.compile(
        r"""(^|[;&|(`{]|\bthen|\bdo|\belse)\s*(eval|exec\s+bash\s+-c|bash\s+-c|sh\s+-c)\b""", re.MULTILINE
    )
    assert word.search("then eval $1") and word.search('x; bash -c "$1"')
    assert [path.name for path in scripts if word.search(path.read_text())] == []
