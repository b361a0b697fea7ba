"""What a script of benchmarks/ does when it is started: `benchmark.main(BENCHMARK)`.

    parent   reads the header, picks rows, never imports a framework, nor NumPy: the tables are drawn in a process too
    child    `python SCRIPT --child JOB`: one task — load the data, compute the reference, measure the matmul, run a row

How rows get their processes is the parent's kind: rows_in_turn.py, together.py, sweep.py and points.py, replicas.py.
"""

import json
import os
import sys
from collections.abc import Sequence

from harness.errors import CrashError, UserError
from harness.run import child, processes, progress
from harness.run.parent import Parent
from harness.run.rows_in_turn import RowsInTurn
from harness.run.script import Benchmark

PLAN_FLAG = "--plan"  # of the suite, before a script's other options: say what would run, and whether it can


def main(benchmark: Benchmark, argv: Sequence[str] | None = None, parent: type[Parent] = RowsInTurn) -> int:
    """Run the script. Exit status 0, 1 (a row failed, none could start, a file was not written), 2 wrong input, 130 Ctrl-C.

    parent: how the rows are run, where that is not in turn with a process for each.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    of_suite = progress.REPORTS in os.environ  # looked up before progress.of_script takes it out
    if argv[:1] == [processes.CHILD_FLAG]:
        return child.run(benchmark, argv[1])
    try:
        if argv[:1] == [PLAN_FLAG]:
            print(json.dumps(parent(benchmark, argv[1:]).plan()))
            return 0
        return parent(benchmark, argv).run()
    except CrashError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        if not of_suite:  # the suite says itself how to go on
            print("\ninterrupted: every finished row is kept; --resume goes on from there", file=sys.stderr)
        return 130
