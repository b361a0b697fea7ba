"""The one place that reads and writes the records of a run.

A run is a folder: `run.json`, `rows/<record name>.json`, `layout/<benchmark>.json`, `logs/<record name>.log`, and
the tables and plots drawn from them. A record name is `<benchmark>.<config>.<row>.<mode>.<device>.<precision>`; what
a record holds is harness/record/schema.py's. Files are written whole or not at all. Only the standard library is imported,
so that `--help` stays fast.
"""

import contextlib
import errno
import fcntl
import json
import math
import os
import re
import shutil
import stat
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from harness.errors import CrashError, UserError
from harness.record import consistency
from harness.record.schema import SCHEMA, RecordError, is_name, number_or_null, validate

MAX_BYTES = 4 * 1024**2
MAX_DEPTH = 16
FOLDERS = ("rows", "layout", "logs")
NO_REFERENCE = ".failed.tmp"  # instead of the ".npz" of a reference that could not be computed: the reason
LOCK = "LSTM_BENCH_LOCK"  # environment variable: the descriptor of the lock that the parent lends, see Run.lent
# Of a process that was killed: what it wrote, and the folders in which its rows' processes handed over their results.
LEFT_OVER = (".*.tmp", "*/.*.tmp", "references/*.tmp")


def record_name(record: Mapping[str, Any]) -> str:
    """<benchmark>.<config>.<row>.<mode>.<device>.<precision>; `config` is the record's dict or the name alone."""
    config = record["config"]["CONFIG"] if isinstance(record["config"], Mapping) else record["config"]
    parts = {**{key: record[key] for key in ("benchmark", "row", "mode", "device", "precision")}, "config": config}
    for key, part in parts.items():
        if not is_name(part):
            raise UserError(f"{key}={part!r}: expected up to 64 letters, digits, _ and -, such as ptb_large")
    return ".".join(parts[key] for key in ("benchmark", "config", "row", "mode", "device", "precision"))


def path_of(run: str | os.PathLike, record: Mapping[str, Any]) -> Path:
    """Where the record of that name stands in the run's folder."""
    return Path(run) / "rows" / f"{record_name(record)}.json"


def _cannot(path: str | os.PathLike, verb: str, error: OSError) -> str:
    what_to_do = "choose another folder with --out"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        what_to_do = f"free some space, or {what_to_do}"
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        what_to_do = f"allow writing there, or {what_to_do}"
    return f"{os.fspath(path)}: cannot be {verb} ({error.strerror or error}); {what_to_do}"


def write_bytes(path: str | os.PathLike, content: bytes) -> None:
    """Writes the file whole or not at all; CrashError where the disk refuses it, and then an older file stays."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:  # Ctrl-C too must not leave half a file behind
        with contextlib.suppress(OSError):  # the folder itself cannot be reached: the first error says why
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise CrashError(_cannot(path, "written", error)) from error
        raise


def _plain(value: Any, where: str, not_finite: list[str]) -> Any:
    """value in JSON's own types; floats that JSON has no form for become null and are named in not_finite."""
    if hasattr(value, "tolist"):  # NumPy scalars and arrays, without importing NumPy
        value = value.tolist()
    if isinstance(value, float) and not math.isfinite(value):
        not_finite.append(where)
        return None
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")  # half a surrogate pair cannot be stored
    if isinstance(value, Mapping):
        prefix = f"{where}." if where else ""
        return {str(key): _plain(item, f"{prefix}{key}", not_finite) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{where}[{index}]", not_finite) for index, item in enumerate(value)]
    return value


def write_json(path: str | os.PathLike, content: Any) -> list[str]:
    """Writes JSON, one line per key; returns the dotted paths where a NaN or infinity was written as null."""
    not_finite: list[str] = []
    plain = _plain(content, "", not_finite)

    def dump(value: Any) -> str:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)

    text = dump(plain)
    if isinstance(plain, dict) and plain:
        text = "{\n" + ",\n".join(f" {dump(key)}: {dump(value)}" for key, value in plain.items()) + "\n}"
    write_bytes(path, (text + "\n").encode("utf-8"))
    return not_finite


def _strict_number(text: str) -> int | float:
    number = float(text) if re.search(r"[.eEnN]", text) else int(text)
    if abs(number) >= 1e300 or not math.isfinite(number):  # in this order: isfinite fails for an integer over 1e308
        raise ValueError(f"the number {text[:20]}, which is not finite or too large")
    return number


def _depth(value: Any) -> int:
    """Levels of nesting, counted level by level: no recursion, however deep."""
    depth, level = 0, [value]
    while level := [item for item in level if isinstance(item, list | dict)]:
        depth += 1
        level = [item for holder in level for item in (holder.values() if isinstance(holder, dict) else holder)]
    return depth


def read_json(path: str | os.PathLike) -> Any:
    """The content of a JSON file of at most 4 MiB and 16 levels, without NaN; RecordError otherwise."""
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            raise RecordError(path, "file", "a folder or device", "a file")
        if status.st_size > MAX_BYTES:
            raise RecordError(path, "size", f"a file of {status.st_size} bytes", f"at most {MAX_BYTES}")
        text = Path(path).read_bytes().decode("utf-8")
        content = json.loads(text, parse_constant=_strict_number, parse_float=_strict_number, parse_int=_strict_number)
    except OSError as error:
        raise UserError(f"{os.fspath(path)}: cannot be read ({error.strerror or error}); check the path") from error
    except UnicodeDecodeError as error:
        raise RecordError(path, "text", f"a byte at {error.start} that is not UTF-8", "JSON in UTF-8") from error
    except json.JSONDecodeError as error:
        raise RecordError(
            path, "JSON", f"a mistake at line {error.lineno}: {error.msg}", "one whole JSON value"
        ) from error
    except ValueError as error:
        raise RecordError(path, "number", f"a bad one: {error}", "finite numbers") from error
    except RecursionError as error:
        raise RecordError(path, "nesting", "a depth beyond Python's limit", f"at most {MAX_DEPTH} levels") from error
    if (depth := _depth(content)) > MAX_DEPTH:
        raise RecordError(path, "nesting", f"a depth of {depth}", f"at most {MAX_DEPTH} levels")
    return content


def read_figures(path: str | os.PathLike) -> dict[str, float | None]:
    """A JSON object of numbers and nulls, such as matmul.json; RecordError otherwise."""
    content = read_json(path)
    if not isinstance(content, dict) or not all(number_or_null(figure) for figure in content.values()):
        raise RecordError(path, "figures", content, "an object of numbers or nulls")
    return content


def write_record(run: str | os.PathLike, record: Mapping[str, Any]) -> Path:
    """Checks and writes one record and returns its path; where a figure is not finite, the record's reason says so."""
    path = path_of(run, record)
    not_finite: list[str] = []
    plain = _plain(record, "", not_finite)
    if not_finite:
        shown = ", ".join(not_finite[:4]) + (f" and {len(not_finite) - 4} more" if len(not_finite) > 4 else "")
        plain["reason"] = "; ".join(filter(None, [plain["reason"], f"not finite, written as null: {shown}"]))
    write_json(path, validate(plain, path))
    return path


def read_record(path: str | os.PathLike) -> dict:
    """One record, checked; RecordError names the file, what was found and what was expected."""
    return validate(read_json(path), path)


def read_run(run: str | os.PathLike) -> tuple[list[dict], list[str]]:
    """(records by name, one line per file that is no good record, or is not of the settings of its page's others).

    UserError where `run` is not a run's folder.
    """
    check_run(run)
    records, problems = [], []
    for path in sorted((Path(run) / "rows").glob("[!.]*.json")):
        try:
            record = read_record(path)
            if record_name(record) != path.stem:
                raise RecordError(path, "name", path.stem, f"{record_name(record)}, the name of the record in it")
            records.append(record)
        except UserError as error:
            problems.append(str(error))
    for record, (what, found, expected) in list(consistency.other_settings(records)):
        records.remove(record)
        problems.append(str(RecordError(path_of(run, record), what, found, expected)))
    return records, problems


def check_run(run: str | os.PathLike) -> dict:
    """The content of run.json; UserError where the folder is none of a run, or of one with another schema."""
    path = Path(run) / "run.json"
    if not path.is_file():
        raise UserError(f"{os.fspath(run)}: no run.json: expected a run's folder, such as results/cpu-2-core")
    facts = read_json(path)
    if not isinstance(facts, dict) or facts.get("schema") != SCHEMA:
        schema = facts.get("schema") if isinstance(facts, dict) else facts
        raise UserError(f"{path}: schema {schema!r:.60}: expected {SCHEMA}; choose another folder with --out")
    return facts


class Run:
    """A run's folder, held for writing by this process alone; usable as a path, and in a `with` statement.

    Attributes:
        path: the folder.
        made: the folders that had to be made for it, outermost first; none where the run was there before.
    """

    def __init__(self, path: Path, lock: int, made: Sequence[Path], borrowed: bool):
        self.path, self.made = path, made
        self._lock: int | None = lock
        self._borrowed = borrowed  # the lock is the parent's, who goes on holding it

    def __fspath__(self) -> str:
        return os.fspath(self.path)

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def lent(self) -> dict[str, Any]:
        """Arguments of subprocess.Popen for a child that is to write into this folder, under this process's lock."""
        return {"pass_fds": [self._lock], "env": {**os.environ, LOCK: str(self._lock)}}

    def note(self, facts: Mapping[str, Any]) -> None:
        """Writes these keys of run.json anew; the others stay."""
        write_json(self.path / "run.json", {**check_run(self.path), **facts})

    def discard(self) -> None:
        """Removes the folder again, if it was made for this run and holds no record; then what was made above it, if empty."""
        if self.made and not has_records(self.path):
            shutil.rmtree(self.path)
            with contextlib.suppress(OSError):  # another run has come to stand there
                for folder in reversed(self.made[:-1]):
                    folder.rmdir()

    def close(self) -> None:
        """Lets go of the folder. The lock's file goes while the lock is still held, see _lock."""
        if self._lock is not None:
            if not self._borrowed:
                (self.path / ".lock").unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = None


def has_records(path: str | os.PathLike) -> bool:
    """Whether a folder is that of a run in which a row has been recorded."""
    return next((Path(path) / "rows").glob("[!.]*.json"), None) is not None


def open_run(path: str | os.PathLike, facts: Mapping[str, Any] | None = None) -> Run:
    """Makes or opens a run's folder and locks it until it is closed or the process ends.

    facts: more keys for run.json, written when the folder is new. UserError where the folder cannot be written, is a
    run of another schema, holds something else, or is being written by another process.
    """
    path = Path(path)
    made = [folder for folder in [*reversed(path.parents), path] if not folder.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True)
        names = sorted(name for name in os.listdir(path) if name != ".lock" and not name.endswith(".tmp"))
        if (path / "run.json").exists():  # asked last: whoever makes a run writes it before the folders
            check_run(path)
        elif names:
            raise UserError(f"{path}: holds {names[0]!r} and no run.json: no run; choose an empty folder with --out")
        borrowed = _borrowed_lock(path)
        lock = _lock(path) if borrowed is None else borrowed
    except OSError as error:
        raise UserError(_cannot(path, "used for results", error)) from error
    run = Run(path, lock, made, borrowed is not None)
    try:
        for left in (file for pattern in LEFT_OVER for file in path.glob(pattern)):
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        if not (path / "run.json").exists():
            created = datetime.now(timezone.utc).isoformat(timespec="seconds")
            write_json(path / "run.json", {"schema": SCHEMA, "created": created, **(facts or {})})
        for folder in FOLDERS:
            (path / folder).mkdir(exist_ok=True)
    except OSError as error:
        run.close()
        raise UserError(_cannot(path, "used for results", error)) from error
    except UserError:
        run.close()
        raise
    return run


def _borrowed_lock(folder: Path) -> int | None:
    """A descriptor of <folder>/.lock that the parent holds and has lent, see Run.lent; None without one."""
    with contextlib.suppress(OSError, ValueError):  # lent for another folder, or to the parent of this process
        descriptor = int(os.environ.get(LOCK, ""))
        if os.path.samestat(os.fstat(descriptor), os.stat(folder / ".lock")):
            return os.dup(descriptor)
    return None


def _lock(folder: Path) -> int:
    """The descriptor of <folder>/.lock, locked. Its owner removes the file, so it must be the one still there."""
    while True:
        descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.read(descriptor, 32).decode("ascii", "replace").strip() or "unknown"
            os.close(descriptor)
            who = f"{folder}: another run (process {owner}) is writing here"
            raise UserError(f"{who}; wait for it, or choose another folder with --out") from None
        except OSError:  # a file system without locks
            os.close(descriptor)
            raise
        try:
            if os.path.samestat(os.fstat(descriptor), os.stat(folder / ".lock")):
                os.truncate(descriptor, 0)
                os.write(descriptor, f"{os.getpid()}\n".encode())
                return descriptor
        except FileNotFoundError:  # removed by its owner between our open and our lock
            pass
        os.close(descriptor)
