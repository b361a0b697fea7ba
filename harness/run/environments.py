"""Which Python the rows of each framework run with, and what is installed there.

TensorFlow's rows run with this Python. PyTorch and JAX have an environment of their own below it, .venv/torch and .venv/jax, with
their own CUDA; or TORCH_PYTHON and JAX_PYTHON name a Python whose PyTorch or JAX is used as it is; or they are installed here, in
a Python of the user's own. What ./run_tests.sh installs into .venv is for the tests: it makes no row run that did not run before.
"""

import functools
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.errors import UserError
from harness.record import machine, software
from harness.record.frameworks import FRAMEWORKS

MODULES = {
    "numpy": "numpy",
    "psutil": "psutil",
    "cpuinfo": "py-cpuinfo",
    "pynvml": "nvidia-ml-py",
}  # that every row needs
PEERS = "not installed: ./run_all.sh --peers"
LOOK_S = 60
# Prints which of the modules named as arguments cannot be found.
LOOK = """import sys
from importlib.util import find_spec
print(*(name for name in sys.argv[1:] if find_spec(name) is None), *sys.version_info[:2])"""


def python(framework: str) -> str:
    """The Python that the framework's rows are started with."""
    if named := _named(framework):
        return os.path.abspath(shutil.which(named) or named)
    own = Path(sys.prefix, framework)
    return str(own / "bin" / "python") if (own / software.STAMP).is_file() else sys.executable


def _named(framework: str) -> str:
    return os.environ.get(_variable(framework), "") if framework != "tensorflow" else ""


def _variable(framework: str) -> str:
    return f"{framework.upper()}_PYTHON"


def missing(framework: str, *also: str) -> str:
    """Why rows of a framework that import `also` too cannot run here, or ""; of TensorFlow the child itself says so."""
    if framework == "tensorflow":
        return ""
    found = python(framework)
    where = f"{_variable(framework)}={found}: " if _named(framework) else ""
    if not where and found == sys.executable and Path(sys.prefix, software.STAMP).is_file():
        return PEERS
    try:
        lacking, version = _lacking(found, (framework, *MODULES, *also))
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return f"{where or f'{found}: '}does not run: {' '.join(str(error).split())[:200]}"
    if version < (oldest := FRAMEWORKS[framework].python):
        return f"needs Python {'.'.join(map(str, oldest))}"
    if not lacking:
        return ""
    if not where:
        return PEERS
    names = " ".join(MODULES.get(name, name) for name in lacking)
    return f"{where}{' and '.join(lacking)} not installed there; {found} -m pip install {names}"


def lacks(framework: str, folder: str | None, requirements: str) -> str:
    """Why a row cannot run that imports from a folder of the framework's environment, or ""; None: from no such folder.

    requirements: the file that says what the folder holds.
    """
    if folder is None:
        return ""
    found = Path(python(framework))
    place = found.parent.parent / folder
    if place.is_dir():
        return ""
    if not _named(framework):
        return f"{requirements} {PEERS}"
    how = f"{found} -m pip install --no-deps --target={place} -r {requirements}"
    return f"{requirements} not installed in the environment of {_variable(framework)}; {how}"


def _lacking(found: str, modules: Sequence[str]) -> tuple[list[str], tuple[int, int]]:
    """(the modules that this Python does not find, its version)."""
    if found == sys.executable:
        return [name for name in modules if importlib.util.find_spec(name) is None], sys.version_info[:2]
    *lacking, major, minor = _look(found, modules)
    return lacking, (int(major), int(minor))


@functools.cache
def _look(found: str, modules: Sequence[str]) -> list[str]:
    return _output([found, "-c", LOOK, *modules]).split()


def require() -> None:
    """UserError where TORCH_PYTHON or JAX_PYTHON names a Python that lacks what rows need."""
    for framework in FRAMEWORKS:
        if _named(framework) and (reason := missing(framework)):
            raise UserError(reason)


def about(framework: str) -> dict[str, Any]:
    """{"python": version, "packages": of harness.record.machine.PACKAGES} of the framework's environment, for harness.resume."""
    found = python(framework)
    if found == sys.executable:
        return {"python": platform.python_version(), "packages": machine.packages()}
    installed = _bill_of(found)
    packages = {name: installed["packages"][name] for name in machine.PACKAGES if name in installed["packages"]}
    return {"python": installed["python"].rpartition(" ")[2], "packages": packages}


def bill(framework: str) -> dict[str, Any]:
    """harness.record.software.bill of the framework's Python."""
    found = python(framework)
    return software.bill() if found == sys.executable else _bill_of(found)


@functools.cache
def _bill_of(found: str) -> dict[str, Any]:
    return json.loads(_output([found, "-m", "harness.record.software"]))


def _output(command: Sequence[str]) -> str:
    done = subprocess.run(
        command, cwd=machine.PROJECT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LOOK_S
    )
    if done.returncode:
        raise ValueError((done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1])
    return done.stdout
