"""The workers of one row, a process for each GPU: what each has found, told to all others, beside the frameworks' collectives.

Every worker goes through the same calls in the same order. The first one listens; the others connect to it. What is told goes
over plain sockets as JSON and NumPy's own format.
"""

import io
import json
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from harness.errors import CrashError
from harness.measure.beats import Beats

JOIN_S = 50.0  # in which all workers have to have joined once the first one listens
RETRY_S = 0.2
LARGEST = 2**33  # bytes of one message


class Group:
    """One worker's way to all others; of a single worker there is nobody to tell.

    Args:
        rank, size: of this worker, and how many there are.
        hosts: of each worker, for messages.
        address: (host, port) where the first worker listens.
        token: of the run, which a stranger does not know.
        beats: of this worker.
        limit_s: how long the others are waited for in one call.

    Raises:
        CrashError: a worker that has not joined within JOIN_S, or that has gone; it is named.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        hosts: Sequence[str] = ("127.0.0.1",),
        address: tuple[str, int] = ("", 0),
        token: str = "",
        beats: Beats | None = None,
        limit_s: float = 3600.0,
    ) -> None:
        self.rank, self.size, self.hosts, self._limit_s = rank, size, list(hosts), limit_s
        self._beats = beats or Beats(None)
        self._others: dict[int, socket.socket] = {}
        self.beat()
        if size > 1:
            self._listen(address, token) if rank == 0 else self._connect(address, token)
        self.beat()

    @classmethod
    def of_job(cls, job: Mapping[str, Any]) -> "Group":
        """Of what the parent tells a worker ("replicas" of its job); of a row with one process alone, a group of one."""
        told = job.get("replicas") or {}
        beats = Beats(told.get("beats"))
        if told.get("size", 1) == 1:
            return cls(beats=beats)
        address = (told["address"][0], told["address"][1])
        return cls(told["rank"], told["size"], told["hosts"], address, told["token"], beats)

    def named(self, rank: int) -> str:
        return f"worker {rank} of {self.size} ({self.hosts[rank]})"

    def beat(self) -> None:
        """This worker has come to its next call."""
        self._beats.beat()

    def at(self, stage: int) -> None:
        """From here on this worker is at that stage."""
        self._beats.stage = stage
        self.beat()

    def gather(self, array: Any) -> list[np.ndarray]:
        """What every worker has given, in the order of their ranks; arrays may differ in shape."""
        written = io.BytesIO()
        np.save(written, np.asarray(array), allow_pickle=False)
        return [np.load(io.BytesIO(content), allow_pickle=False) for content in self._all(written.getvalue())]

    def told(self, value: Any) -> list[Any]:
        """What every worker has given, of what JSON can hold."""
        return [json.loads(content) for content in self._all(json.dumps(value).encode())]

    def agree(self, value: Any) -> Any:
        """What the first worker has given, of what JSON can hold."""
        return self.told(value)[0]

    def mean(self, array: Any) -> np.ndarray:
        """The mean over all workers of what each has given."""
        return np.mean(self.gather(np.asarray(array)), axis=0)

    def barrier(self) -> None:
        """Return once every worker has come here."""
        self._all(b"")

    def _all(self, content: bytes) -> list[bytes]:
        self.beat()
        if self.size == 1:
            return [content]
        if self.rank:
            _send(self._others[0], content)
            found = [self._from(0) for _ in range(self.size)]
        else:
            found = [content, *(self._from(rank) for rank in range(1, self.size))]
            for other in self._others.values():
                for part in found:
                    _send(other, part)
        self.beat()
        return found

    def _from(self, rank: int) -> bytes:
        try:
            return _receive(self._others[rank])
        except TimeoutError:
            raise CrashError(f"{self.named(rank)} has not answered for {self._limit_s:g} s") from None
        except (OSError, EOFError) as error:
            raise CrashError(f"{self.named(rank)} has gone ({error})") from None

    def _listen(self, address: tuple[str, int], token: str) -> None:
        end = time.monotonic() + JOIN_S
        with socket.create_server(address, backlog=self.size) as server:
            while len(self._others) < self.size - 1:
                server.settimeout(max(0.1, end - time.monotonic()))
                try:
                    found, _ = server.accept()
                    found.settimeout(max(0.1, end - time.monotonic()))
                    hello = json.loads(_receive(found, 1000))
                except (EOFError, ValueError):  # a stranger
                    continue
                except OSError:
                    missing = [self.named(rank) for rank in range(1, self.size) if rank not in self._others]
                    raise CrashError(f"{', '.join(missing)} did not join within {JOIN_S:g} s") from None
                if hello[:1] == [token] and hello[1] in range(1, self.size):
                    self._keep(hello[1], found)

    def _connect(self, address: tuple[str, int], token: str) -> None:
        end = time.monotonic() + JOIN_S
        while True:
            try:
                found = socket.create_connection(address, timeout=RETRY_S)
                break
            except OSError as error:
                if time.monotonic() > end:
                    why = f"{self.named(0)} was not there within {JOIN_S:g} s"
                    raise CrashError(f"{why}: {address[0]}:{address[1]}: {error.strerror or error}") from None
                time.sleep(RETRY_S)
        _send(found, json.dumps([token, self.rank]).encode())
        self._keep(0, found)

    def _keep(self, rank: int, found: socket.socket) -> None:
        found.settimeout(self._limit_s)
        found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._others[rank] = found


def _send(to: socket.socket, content: bytes) -> None:
    to.sendall(struct.pack("!Q", len(content)) + content)


def _receive(of: socket.socket, largest: int = LARGEST) -> bytes:
    [size] = struct.unpack("!Q", _exactly(of, 8))
    if size > largest:
        raise EOFError(f"a message of {size} bytes")
    return _exactly(of, size)


def _exactly(of: socket.socket, size: int) -> bytes:
    content = bytearray(size)
    view, got = memoryview(content), 0
    while got < size:
        count = of.recv_into(view[got:])
        if not count:
            raise EOFError("its connection has ended")
        got += count
    return bytes(content)
