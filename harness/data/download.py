"""Gets published files whose size and sha256 are known: from a folder, a cache, or one of several mirrors.

A corrupt file is set aside in the project's own folder; anywhere else it is left alone. A downloaded file gets its
name only after every byte has been checked; until then it lies beside it under a temporary name. No server is
trusted: a body that is longer, shorter, slower or other than expected is dropped and the next mirror asked. A network
that is not there is noticed within `Limits.no_answer_s`.

By hand, since pooch 1.9 waits without end for a body that trickles, and keeps writing one that never ends.
"""

import contextlib
import errno
import hashlib
import http.client
import io
import os
import queue
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from harness.errors import UserError

ATTEMPTS = 2  # per mirror and file: one try, one retry
CHUNK = 1 << 16  # bytes
READ_LIMIT = 1 << 26  # bytes of a file whose size is not published; the largest has 11.5 MB


class File(NamedTuple):
    """One published file: its name (the last part of its URL), its size in bytes and the hex sha256 of its bytes."""

    name: str
    size: int
    sha256: str


class Published(NamedTuple):
    """A data set: the sub-folder it is kept in, its files, and the base URLs that each serve all of them."""

    name: str
    files: tuple[File, ...]
    mirrors: tuple[str, ...]


class Limits(NamedTuple):
    """How long a server may take."""

    answer_s: float = 3.0  # from the name look-up to the headers of one answer, redirects included
    no_answer_s: float = 9.0  # with no answer from any server for so long, there is no network
    stall_s: float = 5.0  # between two pieces of a body, and before `bytes_per_s` counts
    bytes_per_s: float = 50_000.0  # a slower mirror is left for the next one


class DataError(UserError):
    """A file is not what it should be. Attributes: path, found (str) and expected (str)."""

    def __init__(self, path: Path, found: str, expected: str):
        self.path, self.found, self.expected = path, found, expected
        super().__init__(f"{path}: {found}; expected {expected}")


class Unavailable(Exception):
    """No mirror handed out a file; the message says in one line what each of them did."""


class _Refused(Exception):
    """This mirror, this time: the message says why."""


def find(
    wanted: Published,
    parse: Callable[[Path, bytes, File], Any],
    folder: Path | None,
    where: str,
    own: Path,
    notes: list[str],
    cache: Callable[[list[str]], tuple[list, dict[str, str]] | None] | None = None,
) -> tuple[list, str, dict[str, str]]:
    """What `parse` makes of every file of `wanted`, in order; where they were found; the sha256 of each file.

    folder: the only place to look (named by `where`), or None: the folder `own` (data/), the cache, a download into
    `own`. parse raises DataError; cache returns contents and sums, or None. Both it and this function append to
    notes what is worth reporting. Raises DataError, UserError (files are missing in `folder`) and Unavailable.
    """
    sha256 = {file.name: file.sha256 for file in wanted.files}
    if folder is not None:
        places = {file: _place(folder, wanted.name, file) for file in wanted.files}
        missing = [file.name for file, path in places.items() if not os.path.isfile(path)]
        if missing:
            raise UserError(
                f"{where}: {folder} lacks {', '.join(missing)}; expected {', '.join(sha256)} in {folder / wanted.name} "
                f"or in {folder} itself"
            )
        return [_load(path, file, parse) for file, path in places.items()], where, sha256
    found = {}
    for file in wanted.files:
        path = own / wanted.name / file.name
        if os.path.isfile(path):
            try:
                found[file] = _load(path, file, parse)
            except DataError as error:
                notes.append(f"data/{wanted.name}/{file.name}: {error.found}; set aside as {_set_aside(path)}")
    missing = [file for file in wanted.files if file not in found]
    if missing:
        cached = cache(notes) if cache else None
        if cached is not None:
            return cached[0], "keras cache", cached[1]
        fetch(missing, wanted.mirrors, own / wanted.name)
        found |= {file: _load(own / wanted.name / file.name, file, parse) for file in missing}
    return [found[file] for file in wanted.files], "download" if missing else "data/", sha256


def read_bytes(path: Path, limit: int = READ_LIMIT) -> bytes:
    """The whole file, or DataError when it cannot be read or has more than `limit` bytes."""
    try:
        with path.open("rb") as stream:
            raw = stream.read(limit + 1)
    except OSError as error:
        raise DataError(path, f"cannot be read ({error.strerror})", "a readable file") from None
    if len(raw) > limit:
        raise DataError(path, f"more than {limit} bytes", f"at most {limit}")
    return raw


def _place(folder: Path, name: str, file: File) -> Path:
    nested = folder / name / file.name
    return nested if os.path.isfile(nested) else folder / file.name


def _load(path: Path, file: File, parse: Callable[[Path, bytes, File], Any]) -> Any:
    """The content of a published file. Parsed before its sum is taken: what is wrong says more than that the sum is.

    A file larger than the published one is not parsed: so the size bounds the memory, whatever is in it.
    """
    raw = read_bytes(path, file.size)
    content = parse(path, raw, file)
    digest = hashlib.sha256(raw).hexdigest()
    if digest != file.sha256:
        raise DataError(path, f"sha256 {digest}", f"{file.sha256}, the published {file.name}")
    return content


def _set_aside(path: Path) -> str:
    """Rename a corrupt file of ours so that it can be looked at; returns its new name."""
    number = 1
    while (aside := path.with_name(f"{path.name}.corrupt-{number}")).exists():
        number += 1
    try:
        path.rename(aside)
    except OSError as error:
        raise UserError(f"{path} is corrupt and cannot be renamed ({error.strerror}); move it away") from None
    return aside.name


def fetch(
    files: Iterable[File],
    mirrors: Sequence[str],
    folder: Path,
    limits: Limits = Limits(),  # noqa: B008 - immutable
) -> None:
    """Download every file of `files` into `folder`, which is made when the first answer comes.

    mirrors: base URLs; `<mirror>/<file name>` is asked for. All are tried once before any is tried again, and the
    one that worked comes first for the next file.
    Raises Unavailable when a file cannot be had or kept, UserError when the disk is full.
    """
    order = list(mirrors)
    given_up = time.monotonic() + limits.no_answer_s  # until a server has answered
    answered = False
    for file in files:
        failures: dict[str, str] = {}
        for mirror in order * ATTEMPTS:
            wait_s = limits.answer_s if answered else min(limits.answer_s, given_up - time.monotonic())
            if wait_s <= 0:
                failures.setdefault(mirror, "not asked, no server has answered")
                continue
            try:
                with _open(f"{mirror.rstrip('/')}/{file.name}", wait_s, limits) as response:
                    answered = True
                    _keep(response, file, folder, limits)
            except urllib.error.HTTPError as error:  # an answer, though not the one hoped for
                answered = True
                failures[mirror] = f"HTTP {error.code} {error.reason}"
                error.close()
            except (_Refused, OSError, http.client.HTTPException, ValueError) as error:
                failures[mirror] = _one_line(error)
            else:
                order.sort(key=lambda other, good=mirror: other != good)
                break
        else:
            raise Unavailable(f"{file.name} could not be downloaded: {_by_reason(failures)}")


def _open(url: str, wait_s: float, limits: Limits) -> http.client.HTTPResponse:
    """The answer to GET `url`, or TimeoutError after `wait_s`.

    In a thread of its own: urllib's time-out neither covers the name look-up nor counts the addresses of a host, the
    redirects and the header lines together.
    """
    answers: queue.SimpleQueue = queue.SimpleQueue()
    too_late = threading.Event()

    def ask() -> None:
        try:
            answer = urllib.request.urlopen(url, timeout=limits.stall_s)
        except Exception as error:  # raised again below, in the thread that asked
            answer = error
        if too_late.is_set() and hasattr(answer, "close"):
            answer.close()
        answers.put(answer)

    threading.Thread(target=ask, name=f"open {url}", daemon=True).start()
    try:
        answer = answers.get(timeout=wait_s)
    except queue.Empty:
        too_late.set()
        raise TimeoutError(f"no answer within {wait_s:.1f} s") from None
    if isinstance(answer, Exception):
        raise answer
    return answer


def _keep(response: http.client.HTTPResponse, file: File, folder: Path, limits: Limits) -> None:
    """Write the body to a temporary name, check it, give it its own. Raises _Refused, Unavailable or UserError."""
    announced = response.headers.get("Content-Length")
    if announced is not None and announced != str(file.size):
        raise _Refused(f"announced {announced} bytes, expected {file.size}")
    part = folder / f".{file.name}.part-{os.getpid()}"
    try:
        with _disk(folder):
            folder.mkdir(parents=True, exist_ok=True)
            out = part.open("wb", buffering=0)  # a full disk shows at the write, not on closing
        with out:
            digest = _copy(response, out, file, folder, limits)
        if digest != file.sha256:
            raise _Refused(f"sha256 {digest}, expected {file.sha256}")
        with _disk(folder):
            part.replace(folder / file.name)
    finally:
        with contextlib.suppress(OSError):  # gone already when it got its own name
            part.unlink()


def _copy(response: http.client.HTTPResponse, out: io.FileIO, file: File, folder: Path, limits: Limits) -> str:
    """Copy `file.size` bytes and return their hex sha256. Takes what has arrived, so that a trickle is noticed."""
    from tqdm import tqdm

    # Else a thread of tqdm's stays and wakes every 10 s, which the proof of a row that runs beside it takes for work.
    tqdm.monitor_interval = 0
    digest, received, begun = hashlib.sha256(), 0, time.monotonic()
    with tqdm(total=file.size, desc=file.name, unit="B", unit_scale=True, leave=False, disable=None) as bar:
        while received <= file.size:
            piece = response.read1(min(CHUNK, file.size + 1 - received))
            if not piece:
                break
            with _disk(folder):
                rest = memoryview(piece)
                while rest:
                    rest = rest[out.write(rest) :]
            digest.update(piece)
            received += len(piece)
            bar.update(len(piece))
            counted_s = time.monotonic() - begun - limits.stall_s
            if received < file.size and received < counted_s * limits.bytes_per_s:
                raise _Refused(f"too slow, {received} of {file.size} bytes in {counted_s + limits.stall_s:.0f} s")
    if received != file.size:
        found = f"more than {file.size}" if received > file.size else str(received)
        raise _Refused(f"sent {found} bytes, expected {file.size}")
    return digest.hexdigest()


@contextlib.contextmanager
def _disk(folder: Path):
    """Tells errors of this machine's disk, which no other mirror would cure, from errors of the network."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(f"{folder}: no space left for the data sets; free some, or give --data=DIR") from None
        raise Unavailable(f"{folder.name}/ cannot be written: {error.strerror}") from None  # no path: it is recorded


def _one_line(error: Exception) -> str:
    reason = getattr(error, "reason", None) or error  # URLError wraps what happened
    return " ".join(str(getattr(reason, "strerror", None) or reason).split()) or type(reason).__name__


def _by_reason(failures: dict[str, str]) -> str:
    """{mirror: reason} as "reason (host, host); reason (host)": with no network every host says the same."""
    hosts: dict[str, dict[str, None]] = {}
    for mirror, reason in failures.items():
        hosts.setdefault(reason, {})[urllib.parse.urlsplit(mirror).netloc] = None
    return "; ".join(f"{reason} ({', '.join(names)})" for reason, names in hosts.items())
