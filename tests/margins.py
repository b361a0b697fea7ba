"""The worst margin of every proof in committed records, as the table of docs/proof.md: error / limit, by precision.

    python tests/margins.py                  # of results/
    python tests/margins.py results/mine     # of these runs

A margin above 1 is a failed row. Limits are those that the record was compared with; a record of several processes has the
worst error of all.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness.record import records, schema

RESULTS = Path(__file__).resolve().parents[1] / "results"


def margins(runs: Sequence[Path]) -> dict[tuple[str, str], list[tuple[float, float, float, str]]]:
    """(precision, proof) → (margin, error, limit, where) of every proven record, the worst first."""
    found: dict[tuple[str, str], list] = {}
    for run in runs:
        for record in records.read_run(run)[0]:
            proof = record["proof"] or {}
            for key in schema.ERRORS:
                name = key.removesuffix("_err")
                error, limit = proof.get(key), proof.get("limit", {}).get(name)
                if record["status"] == "ok" and error is not None and limit:
                    kind = "spread with dropout" if name == "spread" and limit > 0.1 else name
                    where = f"{run.name}: {records.record_name(record)}"
                    found.setdefault((record["precision"], kind), []).append((error / limit, error, limit, where))
    return {key: sorted(values, reverse=True) for key, values in found.items()}


def table(runs: Sequence[Path]) -> str:
    lines = [
        "| precision | proof | records | worst margin | error | limit | where |",
        "|---|---|---:|---:|---:|---:|---|",
    ]
    kinds = [key.removesuffix("_err") for key in schema.ERRORS] + ["spread with dropout"]
    found = margins(runs)
    for precision, kind in sorted(found, key=lambda key: (schema.PRECISIONS.index(key[0]), kinds.index(key[1]))):
        values = found[precision, kind]
        margin, error, limit, where = values[0]
        lines.append(f"| {precision} | {kind} | {len(values)} | {margin:.2g} | {error:.2g} | {limit:.2g} | {where} |")
    return "\n".join(lines)


if __name__ == "__main__":
    given = [Path(name) for name in sys.argv[1:]]
    print(table(given or sorted(path for path in RESULTS.iterdir() if records.has_records(path))))
