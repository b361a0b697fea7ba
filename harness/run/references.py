"""The float64 references that a run computes: where each is kept, and when it is computed."""

import contextlib
import functools
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from harness.record import machine, records, settings
from harness.record.settings import Changes
from harness.run import processes
from harness.run.script import Benchmark

# What a reference comes from besides the script: another commit has its own. Patterns below the project.
REFERENCE_CODE = ("models/reference/*.py", "models/weights/*.py", "harness/data/*.py", "harness/measure/references.py")


@functools.cache
def code_digest(script: Path) -> str:
    """Of the code that computes the script's reference."""
    files = [script, *(path for pattern in REFERENCE_CODE for path in sorted(machine.PROJECT.glob(pattern)))]
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in files)).hexdigest()


def path_of(out: Path, benchmark: Benchmark, constants: Mapping[str, Any], data: Mapping[str, Any]) -> Path:
    """One reference per data, constants that change it and code: `<out>/references/<benchmark>.<hash of all>.npz`."""
    computed = settings.of(constants, Changes.REFERENCE)
    code = code_digest(Path(benchmark.script))
    content = json.dumps([code, computed, data["sha256"], data["embedded"]], sort_keys=True)
    key = hashlib.sha256(content.encode()).hexdigest()[:16]
    return (out / "references" / f"{benchmark.name}.{key}.npz").resolve()


def discard(out: Path) -> None:
    """Remove those of a complete run, 0.75 GB for PTB's large model: where --resume adds a row, its own is computed again."""
    shutil.rmtree(out / "references", ignore_errors=True)


class NeedsReference(Protocol):
    """Whose rows are held to one: harness.run.parent.Parent."""

    constants: Mapping[str, Any]

    def reference_path(self) -> Path: ...

    def reference_child(self, path: Path) -> dict[str, Any]: ...


class References:
    """The float64 references of parents, those that are not there yet: computed while rows start, which wait for theirs.

    Attributes:
        failed: {CONFIG: what became of one that could not be computed}; a process that waits for it is told by a file beside it.
    """

    def __init__(self, parents: Iterable[NeedsReference], bar: Any) -> None:
        self.failed: dict[str, processes.Outcome] = {}
        self._bar = bar
        self._rest: dict[Path, list[NeedsReference]] = {}  # several may have the same one
        for parent in parents:
            if not _is_there(path := parent.reference_path()):
                self._rest.setdefault(path, []).append(parent)

    def next_work(self) -> processes.Work | None:
        """The process that computes the next one; None: all have been started."""
        if not self._rest:
            return None
        path, parents = next(iter(self._rest.items()))
        del self._rest[path]

        def ended(outcome: processes.Outcome) -> None:
            if not path.exists():
                reason = f"the float64 reference: {(outcome.result or {}).get('error') or outcome.reason}"
                failed = outcome._replace(result=None, reason=reason)
                self.failed |= {parent.constants["CONFIG"]: failed for parent in parents}
                path.parent.mkdir(exist_ok=True)
                path.with_suffix(records.NO_REFERENCE).write_text(reason)

        self._bar.starts("float64 reference")
        return processes.Work(parents[0].reference_child(path), ended)


def _is_there(path: Path) -> bool:
    """Whether a reference has been computed; where another run beside this one has the same, it becomes this one's too."""
    if not path.exists() and (others := sorted(path.parents[2].glob(f"*/references/{path.name}"))):
        path.parent.mkdir(exist_ok=True)
        with contextlib.suppress(OSError):  # such as of another file system
            os.link(others[0], path)
    return path.exists()
