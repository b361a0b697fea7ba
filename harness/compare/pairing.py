"""The rows of two runs, paired by name: what else differs between them, why some are not compared, and their verdicts."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from harness.compare import verdicts
from harness.errors import UserError
from harness.record import frameworks, settings
from harness.record.machine import PACKAGES
from harness.record.settings import Changes
from harness.report import provenance, warnings

NAME = ("benchmark", "config", "row", "mode", "device", "precision")
MACHINE = ("gpu", "cpu", "cores")
NOT_DRIFT = ("machine", "data", "settings", "precision", "config", "device")  # rows that differ here drift on their own
NOT_ALONE = "not alone"
COPIED = "the very same measurement stands in both runs: one was copied from the other"


class Difference(NamedTuple):
    """`kind`: machine, software, data, settings, code, or what --across names; what: its name; the values as text."""

    kind: str
    what: str
    before: str
    after: str
    marks: bool  # whether a verdict says so


@dataclass
class Pair:
    """One row of both runs. `reason`: why it is not compared, or ""; then medians are [processes], ms."""

    name: dict[str, str]
    before: Mapping | None
    after: Mapping | None
    reason: str = ""
    differences: list[Difference] = field(default_factory=list)
    medians: tuple[list[float], list[float]] = ((), ())
    judged: verdicts.Judged | None = None

    @property
    def processes(self) -> int:
        return min(map(len, self.medians))

    @property
    def marks(self) -> list[str]:
        marks = dict.fromkeys(f"other {found.kind}" for found in self.differences if found.marks)
        return [
            *marks,
            *[NOT_ALONE] * any(record and warnings.was_disturbed(record) for record in (self.before, self.after)),
        ]


def name_of(record: Mapping) -> dict[str, str]:
    return {key: record["config"]["CONFIG"] if key == "config" else record[key] for key in NAME}


def _by_key(run: str, rows: Sequence[Mapping], across: str | None) -> dict[tuple[str, ...], Mapping]:
    found: dict[tuple[str, ...], Mapping] = {}
    for record in rows:
        name = name_of(record)
        key = tuple(value for part, value in name.items() if part != across)
        if key in found:
            both = f"{name_of(found[key])[across]} and {name[across]}"
            raise UserError(
                f"--across={across}: {run} has {' '.join(key)} in {both}: expected one {across} in each run; "
                "measure them into folders of their own with --out"
            )
        found[key] = record
    return found


def pair(before: Sequence[Mapping], after: Sequence[Mapping], across: str | None, runs: Sequence[str]) -> list[Pair]:
    """Every row of either run, in the order of the first one's records, then the second's."""
    sides = [_by_key(run, rows, across) for run, rows in zip(runs, (before, after), strict=True)]
    pairs = []
    for key in dict.fromkeys([*sides[0], *sides[1]]):
        first, second = (side.get(key) for side in sides)
        name = name_of(first or second)
        if first and second and across:
            name[across] = " → ".join(dict.fromkeys([name[across], name_of(second)[across]]))
        made = Pair(name, first, second)
        reasons = {when: _unusable(record) for when, record in (("before", first), ("after", second))}
        made.reason = "; ".join(f"{when}: {reason}" for when, reason in reasons.items() if reason)
        if not made.reason and first["blocks_ms"] and first["blocks_ms"] == second["blocks_ms"]:
            made.reason = COPIED
        if not made.reason:
            made.differences = differences(first, second, across)
            made.medians = tuple(
                [statistics.median(blocks) for blocks in record["blocks_ms"] if blocks] for record in (first, second)
            )
        pairs.append(made)
    return pairs


def _unusable(record: Mapping | None) -> str:
    """Why a record's times are compared with nothing; "" where they may be."""
    if record is None:
        return "no such row"
    if record["status"] != "ok":
        return f"{record['status']}: {record['reason']}"
    return ""


def differences(before: Mapping, after: Mapping, across: str | None) -> list[Difference]:
    """What differs between two records besides their times. A verdict says so where both values are known."""
    facts: dict[tuple[str, str], Callable[[Mapping], Any]] = {}
    for name in dict.fromkeys([*provenance.ENVIRONMENT, *PACKAGES]):
        if name not in _of_other_frameworks(before, after):
            facts["machine" if name in MACHINE else "software", name] = partial(_version, name)
    facts |= {("data", "data"): provenance.data_of, ("data", "data (sha256)"): provenance.sums_of}
    facts["code", "code"] = provenance.code_of
    facts["software", "variables of the environment"] = provenance.variables_of
    for name in settings.of({**before["config"], **after["config"]}):
        if name != "PRECISION":  # which is in the row's name
            facts["settings", name] = partial(_setting, name)
    if across:
        facts[across, across] = lambda record: name_of(record)[across]
    found = []
    for (kind, what), fact in facts.items():
        first, second = fact(before), fact(after)
        if first != second:
            # Of a setting that changes how long is measured, and not what, no verdict says so.
            timing = kind == "settings" and settings.changed_by(what) == Changes.TIMING
            marks = kind != "code" and not timing and None not in (first, second)
            found.append(Difference(kind, what, *("unknown" if v is None else str(v) for v in (first, second)), marks))
    return found


def _version(name: str, record: Mapping) -> Any:
    """What was loaded, or else what was installed."""
    loaded = provenance.environment(name)(record)
    return provenance.environment_package(name)(record) if loaded is None else loaded


def _setting(name: str, record: Mapping) -> str | None:
    """The value as text, since None is one; None where the record does not know the setting."""
    return repr(record["config"][name]) if name in record["config"] else None


def _of_other_frameworks(before: Mapping, after: Mapping) -> set[str]:
    """Packages of the frameworks that neither record ran on."""
    names = frameworks.FRAMEWORKS
    return frameworks.packages_without([n for n in names if n in before["environment"] or n in after["environment"]])


def judge(pairs: Sequence[Pair], drift: float) -> tuple[dict, dict]:
    """Sets `judged` of every pair of enough processes; returns ({device: Shift}, {(benchmark, device): geometric mean})."""
    chosen = [pair for pair in pairs if not pair.reason and pair.processes >= verdicts.MIN_PROCESSES]
    rows = []
    for pair in chosen:
        together = tuple(value for part, value in pair.name.items() if part != "mode")  # the modes share processes
        alike = not any(found.marks and found.kind in NOT_DRIFT for found in pair.differences)
        rows.append(verdicts.Row(*pair.medians, together, pair.name["device"] if alike else None))
    judged, shifts = verdicts.judge(rows, drift)
    groups: dict[tuple[str, str], list[int]] = {}
    for index, (pair, result) in enumerate(zip(chosen, judged, strict=True)):
        pair.judged = result
        groups.setdefault((pair.name["benchmark"], pair.name["device"]), []).append(index)
    means = {group: (len(own), *verdicts.geometric_mean(rows, own, drift)) for group, own in groups.items()}
    return shifts, means


def too_slow(pairs: Sequence[Pair], limit: float) -> list[Pair]:
    """The rows that are judged slower, by more than the limit (0.05 for 5 %)."""
    slower = [pair for pair in pairs if pair.judged and pair.judged.verdict == verdicts.SLOWER]
    return [pair for pair in slower if pair.judged.ratio > 1 + limit]


def lost(pairs: Sequence[Pair]) -> list[Pair]:
    """The rows that ran before, and failed or are missing after."""
    ran = [pair for pair in pairs if pair.before and pair.before["status"] == "ok"]
    return [pair for pair in ran if not pair.after or pair.after["status"] == "failed"]
