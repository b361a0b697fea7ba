"""The software bill of a run: every package of a Python that ran, the code and its lock.

It stands once per run and environment, in software/<name>.json; each record's environment names its own under
"software". Only the standard library is imported.

    PYTHON -m harness.record.software    # prints the bill of that Python
"""

import hashlib
import json
import platform
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.record import machine, records

FOLDER = "software"
STAMP = "lstm-bench-installed"  # harness/run/setup_env.sh writes it last into each environment that it makes


def bill() -> dict[str, Any]:
    """{"python", "platform", "commit", "dirty", "lock": {file: sha256} or null, "packages": {name: version}}.

    packages: every installed distribution that this Python finds; of one that it finds twice the one that it imports. Not what
    `pip install .` leaves in a checkout.
    """
    from importlib import metadata  # a tenth of what --list takes

    found: dict[str, str] = {}
    for distribution in metadata.distributions():
        if Path(str(distribution.locate_file(""))).resolve() == machine.PROJECT:
            continue
        found.setdefault(re.sub(r"[-_.]+", "-", str(distribution.name)).lower(), str(distribution.version))
    return {
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "platform": platform.platform(),
        **machine.commit(),
        "lock": lock(Path(sys.prefix)),
        "packages": dict(sorted(found.items())),
    }


def lock(environment: Path) -> dict[str, str] | None:
    """{lock's name: hex sha256} that run_all.sh installed the environment from; None where it is another's."""
    stamp = environment / STAMP  # "tensorflow for cpu, …", or "torch for cuda12, …", and the lock
    build = re.match(r"(\w+) for (\w+), ", stamp.read_text()) if stamp.is_file() else None
    if build is None:
        return None
    name = build[2] if build[1] == "tensorflow" else f"{build[1]}-{build[2]}"
    path = machine.PROJECT / f"requirements-{name}.lock"
    if not path.is_file() or not stamp.read_text().rstrip().endswith(path.read_text().rstrip()):
        return None
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest()}


def write(run: Path, content: Mapping[str, Any]) -> str:
    """Writes a bill into the run's folder and returns its name: 12 hex digits of its sha256."""
    name = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]
    path = run / FOLDER / f"{name}.json"
    if not path.exists():  # its name says what it holds
        records.write_json(path, content)
    return name


if __name__ == "__main__":
    json.dump(bill(), sys.stdout)
