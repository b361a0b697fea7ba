"""Whether a tiny run is whole: every row ok or skipped, a page per benchmark, on the data it should have: check_run.py RUN DATA

DATA: real or embedded. Exit status: 0 it is, 1 it is not, and every reason is a line.
"""

import sys
from collections import Counter
from pathlib import Path

from harness.errors import UserError
from harness.record import records
from harness.report import provenance
from harness.run import jobs, suite

HAS_BOTH = ("mnist", "ptb")  # the benchmarks whose data sets have an embedded stand-in


def complaints(run: Path, data: str) -> list[str]:
    """What is wrong with the run, one line each; empty where nothing is."""
    try:
        found, wrong = records.read_run(run)
    except UserError as error:
        return [str(error)]
    for benchmark in {*jobs.scripts(suite.BENCHMARKS)} - {*jobs.WITH_SEVERAL_GPUS, *jobs.ASKED_FOR}:
        own = [record for record in found if record["benchmark"] == benchmark]
        measured = [record for record in own if record["status"] == "ok"]
        wrong += [f"{records.record_name(r)}: {r['reason']}" for r in own if r["status"] == "failed"]
        if not measured:
            wrong.append(f"{benchmark}: no row was measured")
        if benchmark in HAS_BOTH and any(provenance.is_embedded(r) != (data == "embedded") for r in measured):
            wrong.append(f"{benchmark}: expected {data} data, found other")
        if not (run / f"{benchmark}.md").is_file():
            wrong.append(f"{benchmark}.md: missing")
    if not (run / "README.md").is_file():
        wrong.append("README.md: missing")
    counts = Counter(record["status"] for record in found)
    print(f"tiny run on {data} data:", ", ".join(f"{count} rows {status}" for status, count in counts.items()))
    return wrong


if __name__ == "__main__":
    sys.exit("\n".join(complaints(Path(sys.argv[1]), sys.argv[2])) or 0)
