"""What several scripts print, from one process: python -m harness.run.listing '[["benchmarks/ptb.py", "--list"], …]'

Each is asked as a user would, with --list, or with --plan (harness/run/benchmark.py).

Writes one JSON list of [exit status, what the script printed, why it failed or ""]. A process per script would take most
of its time to start, and to import what they all share.
"""

import contextlib
import io
import json
import runpy
import sys
from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    answers = [_ask(command) for command in json.loads(argv[0])]
    json.dump(answers, sys.stdout)
    return 0


def _ask(command: Sequence[str]) -> tuple[int, str, str]:
    """Run one script as a user would; what it does to end, to fail or to refuse stays its own."""
    sys.argv = list(command)
    printed, errors = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(errors):
            runpy.run_path(command[0], run_name="__main__")
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except Exception as error:
        return 1, printed.getvalue(), f"{type(error).__name__}: {error}"
    return status, printed.getvalue(), (errors.getvalue().strip().splitlines() or [f"exit status {status}"])[-1]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
