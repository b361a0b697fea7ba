"""Feeds one target with many inputs in a process of bounded memory: python -m tests.fuzz.drive TARGET COUNT SEED

Prints one JSON object: how many inputs there were, how many were accepted and refused and in which words, the
slowest. The first input that ends in anything but an answer or a refusal ends it with status 1.
"""

import json
import random
import re
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

from harness.errors import UserError

MEMORY = 256 * 2**20  # bytes that the inputs may take on top of what the process has before the first one
INPUT_S = 5.0  # of the processor, for one input


class TooLong(BaseException):
    """One input took more than INPUT_S."""


def _too_long(*_: object) -> None:
    raise TooLong


def address_space() -> int:
    """Bytes of virtual memory that this process has mapped."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def shape_of(message: str) -> str:
    """A refusal without what the input put into it: its first words."""
    return re.sub(r"^\S*/\S*:?(\d+:)?\s*", "", message)[:20]


def main(name: str, count: int, seed: int) -> int:
    from tests.fuzz import targets

    chance = random.Random(f"{name} {seed}")
    accepted, refused, slowest = 0, Counter(), 0.0
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None  # ten thousand files need no disk
    with tempfile.TemporaryDirectory(prefix="fuzz-", dir=memory) as folder:
        target = targets.TARGETS[name](Path(folder))
        before = address_space()
        resource.setrlimit(resource.RLIMIT_AS, (before + MEMORY,) * 2)
        signal.signal(signal.SIGPROF, _too_long)
        for number in range(count):
            content = target.make(chance)
            begun = time.process_time()
            signal.setitimer(signal.ITIMER_PROF, INPUT_S)
            try:
                target.feed(content)
                accepted += 1
            except (UserError, *target.refusals) as error:
                message = str(error)
                if not message or "\n" in message or len(message) > 4000:
                    print(f"input {number} of {name}: not one line: {message[:300]!r}")
                    return 1
                refused[shape_of(message)] += 1
            except BaseException as error:
                signal.setitimer(signal.ITIMER_PROF, 0)
                traceback.print_exc(file=sys.stdout)
                print(f"input {number} of {name}, seed {seed}: {type(error).__name__}\n{target.show(content)[:3000]}")
                return 1
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
            slowest = max(slowest, time.process_time() - begun)
    print(json.dumps(dict(inputs=count, accepted=accepted, refused=refused, slowest_s=round(slowest, 3))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
