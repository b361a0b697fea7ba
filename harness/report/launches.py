"""How many kernels or ops a row launches against the record of the same row that stands in results/.

A peer that does more than it did, by an optimizer that is not fused or a second pass, launches more; so may another version.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

from harness.errors import UserError
from harness.record import frameworks, machine, records, settings

RATIO = 1.05  # from here on, either way, a page says so
COMMITTED = machine.PROJECT / "results"
KNOWN = "committed"  # key of a record as it is drawn: {"run", "launches", "syncs"} of that other record


def _kernel(record: Mapping) -> Mapping:
    return (record["proof"] or {}).get("kernel") or {}


def is_same_row(record: Mapping, other: Mapping) -> bool:
    """Whether both are of one row, workload, data, kind of device, precision and versions of its frameworks."""
    keys = ("benchmark", "row", "mode", "device", "precision")
    if any(record[key] != other[key] for key in keys):
        return False
    versions = ("gpu", "keras", *frameworks.FRAMEWORKS)
    if any(record["environment"].get(key) != other["environment"].get(key) for key in versions):
        return False
    if _data(record) != _data(other):  # sentences of another text have other lengths
        return False
    first, second = (settings.of(own["config"], settings.Changes.RESULT) for own in (record, other))
    return first == second


def _data(record: Mapping) -> object:
    return (record["environment"].get("data") or {}).get("sha256")


def with_known(rows: Iterable[Mapping], run: Path, committed: Path | None = None) -> list[dict]:
    """The records, each with the counts of the same row in another run of `committed` (results/), where there is one."""
    folders = [
        path for path in sorted((committed or COMMITTED).glob("*/rows")) if path.parent.resolve() != run.resolve()
    ]
    return [{**record, KNOWN: _known(record, folders)} for record in rows]


def _known(record: Mapping, folders: Iterable[Path]) -> dict | None:
    if record["status"] != "ok" or not _kernel(record).get("launches"):
        return None
    for folder in folders:
        path = folder / f"{records.record_name(record)}.json"
        try:
            other = records.read_record(path) if path.exists() else None
        except UserError:  # its own run's page says so
            continue
        if other and other["status"] == "ok" and _kernel(other).get("launches") and is_same_row(record, other):
            return {"run": folder.parent.name, **{key: _kernel(other).get(key) for key in ("launches", "syncs")}}
    return None


def changed(record: Mapping) -> str | None:
    """Both counts where they lie over RATIO apart, or where the host waits more often than it did."""
    known, found = record.get(KNOWN), _kernel(record)
    if not known:
        return None
    differences = []
    if not 1 / RATIO <= found["launches"] / known["launches"] <= RATIO:
        differences.append(f"{found['launches']:,} launches against {known['launches']:,} in {known['run']}")
    if (found.get("syncs") or 0) > (known["syncs"] or 0):
        differences.append(f"{found['syncs']} waits for the GPU against {known['syncs'] or 0} in {known['run']}")
    return ", ".join(differences) or None
