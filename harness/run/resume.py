"""What stays of an earlier run in the same folder: finished rows with --resume, and measured rows that cannot run now."""

import contextlib
import json
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from harness.errors import UserError
from harness.record import frameworks, machine, records, settings
from harness.record.schema import RecordError
from harness.run import environments

LONGEST = 60  # characters of a value in a message


class Today(NamedTuple):
    """What an earlier record has to be of for its blocks to stand beside today's.

    Attributes:
        constants: of the script, as they are resolved.
        device: "gpu" or "cpu".
        sha256: {file: sum} of the data; None where there is none.
        variables: of the row's environment, those that steer its framework.
    """

    constants: Mapping[str, Any]
    device: str
    sha256: Mapping[str, str] | None
    variables: Mapping[str, str]


def require_run(out: Path, none: str) -> None:
    """UserError where there is no run in a folder that --resume is to go on with; none: which run is missing."""
    if not (out / "run.json").is_file():
        raise UserError(f"--resume: {none}; name a run's folder by --out=DIR, or leave --resume out to begin one")


def refuse_other_device(run: Path, device: str) -> None:
    """UserError where a run's folder, which need not be there, holds records of the other device: its pages are of one."""
    other = "gpu" if device == "cpu" else "cpu"
    if next((run / "rows").glob(f"*.*.*.*.{other}.*.json"), None):
        held, this = other.upper(), device.upper()
        raise UserError(
            f"{run}: holds a run on a {held}, and this one is on a {this}; choose another folder with --out"
        )


def refuse_other_machine(run: Path, names: Collection[str], device: str) -> None:
    """UserError where a row's earlier record is another machine's, which --resume would replace.

    Args:
        run: the run's folder, which need not be there.
        names: of the records that are to be kept or made.
    """
    for name in sorted(names):
        path = run / "rows" / f"{name}.json"
        if path.exists() and (difference := other_machine(records.read_record(path), device)):
            what_to_do = (
                "choose another folder with --out, or leave --resume out to measure these rows anew in its place"
            )
            raise UserError(f"--resume: {path}: {difference}; {what_to_do}")


def refuse_embedded(run: Path, names: Collection[str], embedded: str) -> None:
    """UserError where a row was measured on the real data set, and --resume would put one on embedded data in its place.

    Args:
        run, names: as of `refuse_other_machine`.
        embedded: why embedded data serve now, or "".
    """
    for name in sorted(names) if embedded else ():
        path = run / "rows" / f"{name}.json"
        record = records.read_record(path) if path.exists() else {"status": ""}
        if record["status"] == "ok" and (data := record["environment"].get("data", {})).get("source") == "real":
            then = f"measured on {data.get('title')} from {data.get('where')}"
            what_to_do = "name its folder by LSTM_BENCH_DATA or --data as before, or another run by --out"
            raise UserError(f"--resume: {path}: {then}, now there are embedded data alone ({embedded}); {what_to_do}")


def of_other_machines(run: Path, device: str) -> list[str]:
    """What tells the measured records of a run that another machine has made, one line each."""
    found, _ = records.read_run(run) if (run / "run.json").is_file() else ([], [])
    return [difference for record in found if (difference := other_machine(record, device))]


def other_machine(record: Mapping, device: str) -> str:
    """On which other machine a record was measured, as far as it says: "" for this one. Skipped rows have none."""
    facts = machine.facts(device)
    for key, title in {"gpu": "GPU", "cpu": "CPU", "cores": "cores"}.items():
        then = record["environment"].get(key)
        if record["status"] == "ok" and then is not None and then != facts[key]:
            return f"measured with {title} {then!s:.60}, this machine has {facts[key] or 'none'}"
    return ""


def earlier(paths: Mapping[str, Path], framework: str, today: Today) -> list[dict]:
    """A row's earlier records, where today's processes may be added to them; else []. Arguments and errors: `why_anew`."""
    return [] if why_anew(paths, framework, today) else [records.read_record(path) for path in paths.values()]


def why_anew(paths: Mapping[str, Path], framework: str, today: Today) -> str:
    """Why a row's earlier records cannot go on today, "" where they can.

    All have to be "ok", without a `difference`, and of one number of processes: of others where one was killed as it wrote them.

    Args:
        paths: mode → path of its record.
        framework: the row's, of harness.record.frameworks.FRAMEWORKS.

    Raises:
        RecordError: a file that is no good record.
    """
    counts = {}
    for mode, path in paths.items():
        if not path.exists():
            return f"there is no record of {mode}"
        record = records.read_record(path)
        if record["status"] != "ok":
            return f"{mode} {record['status']}"
        if why := difference(record, framework, today):
            return why
        counts[mode] = len(record["blocks_ms"])
    differ = len(set(counts.values())) > 1
    return f"processes of {', '.join(f'{mode} {count}' for mode, count in counts.items())}" if differ else ""


def difference(record: Mapping, framework: str, today: Today) -> str:
    """The first thing for which its blocks may not stand beside today's in one row, then and now; "" where they may.

    Needed are the same packages, code, machine, variables of the environment and data, and the same settings but for
    settings.HOW_MANY.
    """
    environment, there, facts = record["environment"], environments.about(framework), machine.facts(today.device)
    config = json.loads(json.dumps(today.constants))
    # Of the packages those of its own framework: a row that was measured before the peers were installed is as good.
    then = frameworks.packages_of(framework, environment.get("packages") or {})
    packages = frameworks.packages_of(framework, there["packages"])
    pairs = [
        (name, record["config"].get(name), config[name])
        for name in settings.of(config)
        if name not in settings.HOW_MANY
    ]
    pairs += [(name, then.get(name), packages.get(name)) for name in sorted({*then, *packages})]
    pairs += [("GPU", environment.get("gpu"), machine.gpu_name() if today.device == "gpu" else None)]
    if not is_todays_code(environment):
        code = machine.commit()
        commit, now = (str(of or "unknown")[:10] for of in (environment.get("commit"), code["commit"]))
        changes = "with other" if code.get("dirty") else "without"
        pairs += [("code", commit, now if now != commit else f"{now} {changes} uncommitted changes")]
    # What an earlier commit did not note is taken for the same.
    known = {
        name: environment[name] for name in ("cpu", "cores", "driver", "python") if environment.get(name) is not None
    }
    pairs += [(name, value, {**facts, "python": there["python"]}[name]) for name, value in known.items()]
    if environment.get("variables") is not None:
        before, after = (
            frameworks.variables_of([framework], own) for own in (environment["variables"], today.variables)
        )
        pairs += [(name, before.get(name), after.get(name)) for name in sorted({*before, *after})]
    pairs += [("data", (environment.get("data") or {}).get("sha256"), today.sha256)]
    return next((_in_words(*pair) for pair in pairs if pair[1] != pair[2]), "")


def _in_words(name: str, then: Any, now: Any) -> str:
    if name == "data":
        return "other data"
    both = ["none" if value is None else " ".join(str(value).split()) for value in (then, now)]
    differ = next((place for place, (a, b) in enumerate(zip(*both, strict=False)) if a != b), min(map(len, both)))
    begin = max(0, differ - LONGEST // 3)
    then, now = (f"{'…' * bool(begin)}{text[begin : begin + LONGEST]}" for text in both)
    return f"{name} {then}, now {now}"


def is_todays_code(environment: Mapping) -> bool:
    """Whether a record was made by the code that is here now, uncommitted changes included where it knows its own."""
    now = machine.commit()
    if environment.get("commit") != now["commit"]:
        return False
    if "diff" in environment:
        return environment["diff"] == machine.diff()
    return not (environment.get("dirty") or now.get("dirty"))


def write_skipped(run: str | os.PathLike, skipped: Sequence[Mapping], resumed: bool) -> list[str]:
    """Write the records of a row that cannot run here, but over none that was measured; the modes of those that stay.

    resumed: whether RecordError is raised for a file that is no good record, as for a row that can run; else it is replaced.
    """
    kept = []
    for record in skipped:
        if was_measured(records.path_of(run, record), resumed):
            kept.append(record["mode"])
        else:
            records.write_record(run, record)
    return kept


def was_measured(path: Path, resumed: bool) -> bool:
    """Whether there is a record, and with figures; `resumed` as for `write_skipped`."""
    try:
        return path.exists() and records.read_record(path)["status"] == "ok"
    except RecordError:
        if resumed:
            raise
        return False


def other_settings(rows: Path, pattern: str, replaced: Collection[str], constants: Mapping[str, Any]) -> str:
    """In what a measured record has other settings than these, those that records of one table share; "" where none has.

    Args:
        pattern: of the records' names; those in `replaced` are not looked at.
    """
    today = settings.of(constants, settings.Changes.RESULT)
    for path in sorted(rows.glob(f"{pattern}.json")):
        with contextlib.suppress(UserError):  # the report says what is wrong with such a file
            record = records.read_record(path)
            if record["status"] != "ok" or records.record_name(record) in replaced:
                continue
            for name, then in settings.of(record["config"], settings.Changes.RESULT).items():
                if name in today and json.dumps(then) != json.dumps(today[name]):
                    return f"{path.name} has {name}={then!s:.40}, this run {today[name]!s:.40}"
    return ""
