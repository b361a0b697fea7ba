"""The worker processes of one row: started together, watched together, and ended together where one of them fails.

Each is a Child (processes.py) with the environment that Slurm or torchrun would give it: TF_CONFIG; MASTER_ADDR, MASTER_PORT,
RANK, LOCAL_RANK and WORLD_SIZE; JAX_COORDINATOR_ADDRESS. Where one ends without a result, or hangs, the others wait for it for
ever: they are ended, and the row's one-line reason names the worker.
"""

import contextlib
import json
import secrets
import socket
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from harness.errors import CrashError
from harness.measure.beats import BEATS, STARTS, STEPS
from harness.run.processes import Child, Outcome

HANG_S = 45.0  # without getting on, before a worker is said to hang
IDLE = 0.1  # of a processor: one that takes less does not compile
LOOK_S = 0.1  # less than a process takes to end: of two that fail, the first one is known
AFTER_S = 2.0  # after the first failure, for that of another worker, which may have been its cause
GRACE_S = 30.0  # after the first result, for all others


class Place(NamedTuple):
    """Where a worker runs: its host's address, its number among the workers there, and its GPU in CUDA_VISIBLE_DEVICES' words."""

    host: str
    local: int
    gpu: str | None = None


def places(hosts: Sequence[str], workers: int, gpus: Sequence[str]) -> list[Place]:
    """`workers` workers spread evenly over hosts, in order; of a host's each has a GPU of its own, where there are any."""
    found = []
    for rank in range(workers):
        host = hosts[rank * len(hosts) // workers]
        local = sum(place.host == host for place in found)
        found.append(Place(host, local, gpus[rank] if gpus else None))
    return found


def environments(where: Sequence[Place], ports: Sequence[int]) -> list[dict[str, str]]:
    """What each worker's environment says to TensorFlow, PyTorch and JAX; ports: a free one of each worker, and one more."""
    cluster = [f"{place.host}:{port}" for place, port in zip(where, ports, strict=False)]
    shared = {
        "MASTER_ADDR": where[0].host,
        "MASTER_PORT": str(ports[-1]),
        "WORLD_SIZE": str(len(where)),
        "JAX_COORDINATOR_ADDRESS": f"{where[0].host}:{ports[-1]}",
    }
    if all(
        place.host.startswith("127.") for place in where
    ):  # gloo and NCCL look for an interface with the host's own name
        shared |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    found = []
    for rank, place in enumerate(where):
        own = {"RANK": str(rank), "LOCAL_RANK": str(place.local)}
        own["TF_CONFIG"] = json.dumps({"cluster": {"worker": cluster}, "task": {"type": "worker", "index": rank}})
        if place.gpu is not None:
            own["CUDA_VISIBLE_DEVICES"] = place.gpu
        found.append({**shared, **own})
    return found


def free_ports(hosts: Sequence[str]) -> list[int]:
    """A port of each host that nobody listens on now."""
    with contextlib.ExitStack() as stack:
        found = []
        for host in hosts:
            listener = stack.enter_context(socket.socket())
            listener.bind((host, 0))
            found.append(listener.getsockname()[1])
        return found


class _Worker:
    """A worker of a row, and how it gets on.

    `count`: of the calls that it has come to; `since`: when that became so; `works_s`: the processor time that it had then.
    """

    def __init__(self, child: Child, name: str, beats: Path, log: Path) -> None:
        self.child, self.name, self._beats, self.log = child, name, beats, f"{log.parent.name}/{log.name}"
        self.began = self.since = time.monotonic()
        self.count, self.stage, self._works_s = 0, STARTS, 0.0

    def look(self) -> None:
        self.child.look()
        count, stage = BEATS.unpack(self._beats.read_bytes())
        if count != self.count:
            self.count, self.stage, self.since = count, stage, time.monotonic()
            self._works_s = self.child.processor_s()

    @property
    def stays_s(self) -> float:
        """Seconds in which it has not got on."""
        return time.monotonic() - self.since

    def is_idle(self) -> bool:
        """Whether it took no processor meanwhile."""
        return self.child.processor_s() - self._works_s < IDLE * self.stays_s


def hanging(workers: Sequence[Any], hang_s: float) -> list[Any]:
    """Of workers none of which gets on, those that the others wait for: those that have come least far; [] while one gets on.

    One that is busy may be compiling, unless it only takes steps: else those that have come least far all have to be idle. While
    all of them start they may wait for a disk.
    """
    if any(worker.stays_s < hang_s for worker in workers):
        return []
    last = [worker for worker in workers if worker.count == min(worker.count for worker in workers)]
    if all(worker.stage == STARTS for worker in workers) and len(last) == len(workers):
        return []
    if not all(worker.stage == STEPS or worker.is_idle() for worker in last):
        return []
    return last


def run(child: Mapping[str, Any], where: Sequence[Place], replicas: int, link: str | None = None) -> Outcome:
    """Run a row's workers to their end; what the first one's result is, or the reason for which a worker has none.

    Args:
        child: arguments of processes.Child for a worker; each gets an environment and a log of its own.
        where: of each worker.
        replicas: over how many devices they train together.
        link: how these are linked, for the record.
    """
    hosts = [place.host for place in where]
    names = [f"worker {rank} of {len(where)} ({host})" for rank, host in enumerate(hosts)]
    ports = free_ports([*hosts, hosts[0], hosts[0]])
    told = {
        "size": len(where),
        "hosts": hosts,
        "address": [hosts[0], ports[-2]],
        "token": secrets.token_hex(),
        "gpus": replicas,
        "link": link,
    }
    log: Path = child["log"]
    workers: list[_Worker] = []
    with contextlib.ExitStack() as stack:
        try:
            folder = stack.enter_context(
                tempfile.TemporaryDirectory(prefix=".workers-", suffix=".tmp", dir=log.absolute().parent.parent)
            )
            for rank, environment in enumerate(environments(where, [*ports[: len(where)], ports[-1]])):
                beats = Path(folder, str(rank))
                beats.write_bytes(bytes(BEATS.size))
                own = {**child, "job": {**child["job"], "replicas": {**told, "rank": rank, "beats": str(beats)}}}
                if len(where) == 1:  # one process is no cluster
                    environment = {key: environment[key] for key in ("CUDA_VISIBLE_DEVICES",) if key in environment}
                own["env"] = {**(child.get("env") or {}), **environment}
                own["log"] = log.with_suffix(f".worker{rank}.log") if rank else log
                workers.append(_Worker(stack.enter_context(Child(**own)), names[rank], beats, own["log"]))
        except OSError as error:
            raise CrashError(f"{log.parent}: workers cannot be started ({error.strerror or error})") from error
        return _watched(workers)


def _watched(workers: Sequence[_Worker]) -> Outcome:
    """What becomes of workers that have been started."""
    last_s = None  # when what is still running is ended
    in_turn: list[_Worker] = []  # those that have ended, the first one first
    while True:
        for worker in workers:
            if not worker.child.outcome:
                worker.look()
                in_turn += [worker] if worker.child.outcome else []
        outcomes = [worker.child.outcome for worker in workers]
        ended = [outcome for outcome in outcomes if outcome]
        if len(ended) == len(workers):
            break
        if ended and last_s is None:
            last_s = time.monotonic() + (AFTER_S if any(map(_failed, ended)) else GRACE_S)
        if last_s is not None and time.monotonic() > last_s:
            break
        if not ended and len(workers) > 1 and (found := hanging(workers, HANG_S)):
            return _hangs(workers, found)
        time.sleep(LOOK_S)
    if len(workers) == 1:
        return outcomes[0]
    failed = [worker for worker in in_turn if _failed(worker.child.outcome)]
    if not failed:
        late = [worker.name for worker in workers if not worker.child.outcome]
        if not late:
            return outcomes[0]._replace(seconds=max(outcome.seconds for outcome in outcomes))
        why = f"{', '.join(late)} did not end within {GRACE_S:g} s after the others"
        return Outcome(None, why, max(outcome.seconds for outcome in ended), workers[0].log)
    # One that was killed or crashed is the cause of the errors that the others then have, such as that it has gone.
    worst = min(
        failed, key=lambda worker: (worker.child.outcome.result is not None, _reason(worker).startswith("worker "))
    )
    outcome, reason = worst.child.outcome, _reason(worst)
    proven = [part for part in (outcome.result or {}).values() if "proof" in part]
    if (
        proven and outcomes[0] and outcomes[0].result
    ):  # a proof that failed has failed in all of them, and names its worker
        return outcomes[0]
    named = reason if reason.startswith("worker ") else f"{worst.name}: {reason}"
    return Outcome(None, named, outcome.seconds, worst.log)


def _reason(worker: _Worker) -> str:
    outcome = worker.child.outcome
    reasons = [outcome.reason, *(part.get("reason", "") for part in (outcome.result or {}).values())]
    return next(filter(None, reasons), "no reason")


def _failed(outcome: Outcome) -> bool:
    return outcome.result is None or any(part.get("status") == "failed" for part in outcome.result.values())


def _hangs(workers: Sequence[_Worker], last: Sequence[_Worker]) -> Outcome:
    names, seconds = ", ".join(worker.name for worker in last), min(worker.stays_s for worker in last)
    what = "has not started" if not last[0].count else f"has not got on from its call {last[0].count}"
    others = "; the others wait for it" if len(last) < len(workers) else ""
    return Outcome(None, f"{names} {what} for {seconds:.0f} s{others}", time.monotonic() - last[0].began, last[0].log)
