"""What was measured, and where: the facts of records that stand above and under their tables."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from harness.record import frameworks, schema, settings
from harness.report.cells import plain, value_at

# Title: key of a record's environment.
SOFTWARE = {"TensorFlow": "tensorflow", "Keras": "keras"} | {f.title: name for name, f in frameworks.FRAMEWORKS.items()}
PARTS = ("benchmark", "config", "row", "mode", "device", "precision")  # of a record's name
AT_MOST = 3  # records that are named one by one
ENVIRONMENT = ("gpu", "driver", "cuda", "cudnn", *SOFTWARE.values(), "numpy", "python", "cpu", "cores", "os")


def spread(
    rows: Iterable[Mapping], value_of: Callable[[Mapping], Any], name_of: Callable[[Mapping], str] = lambda r: r["row"]
) -> dict[str, list[str]]:
    """{value as text: names of the records that have it}, without those that do not know it."""
    found: dict[str, list[str]] = {}
    for record in rows:
        value = value_of(record)
        if value is not None and value not in ("", [], {}):
            names = found.setdefault(plain(value), [])
            if name_of(record) not in names:
                names.append(name_of(record))
    return found


def in_words(found: Mapping[str, Sequence[str]]) -> str:
    """One value, or each of several with the rows that have it."""
    if len(found) == 1:
        return next(iter(found))
    return "; ".join(f"{value} ({listed(names)})" for value, names in found.items())


def parts_apart(rows: Sequence[Mapping], always: Collection[str] = ()) -> list[str]:
    """Those of PARTS in which the records differ, and `always`: what all have in common tells none of them."""
    return [part for part in PARTS if part in always or len({name_by([part])(record) for record in rows}) > 1]


def name_by(parts: Sequence[str]) -> Callable[[Mapping], str]:
    """A record's name of these of PARTS."""
    return lambda record: " ".join(
        str(record["config"].get("CONFIG", "")) if part == "config" else record[part] for part in parts
    )


def run_in_words(rows: Sequence[Mapping], value_of: Callable[[Mapping], Any]) -> str:
    """The commonest value, then the others with the records that have them; "" where no record knows it.

    Of more than AT_MOST records it names the frameworks, the benchmarks or the tables, where it is all of their records.
    """
    told = parts_apart(rows, ("row", "mode"))
    found = spread(rows, value_of, name_by(told))
    common, *others = sorted(found, key=lambda value: -len(found[value])) or [""]
    groupings = [_framework_of]
    for left_out in (set(PARTS) - {"benchmark"}, {"row", "mode"}, {"row"}):
        groupings.append(name_by([part for part in told if part not in left_out]))

    def where(value: str) -> str:
        if len(found[value]) <= AT_MOST:
            return listed(found[value])
        for group_of in groupings:
            groups = spread(rows, value_of, group_of)
            elsewhere = {name for other in groups if other != value for name in groups[other]}
            if elsewhere.isdisjoint(groups[value]) and "" not in groups[value]:
                return (
                    f"the rows of {' and '.join(groups[value])}" if group_of is _framework_of else listed(groups[value])
                )
        return listed(found[value], AT_MOST)

    return "; ".join([common, *(f"but {value} in {where(value)}" for value in others)])


def _framework_of(record: Mapping) -> str:
    return " and ".join(
        framework.title for name, framework in frameworks.FRAMEWORKS.items() if value_at(record, f"environment.{name}")
    )


def _of_several(rows: Sequence[Mapping]) -> bool:
    """Whether these records are of several benchmarks."""
    return len({record["benchmark"] for record in rows}) > 1


def listed(names: Sequence[str], at_most: int = 6) -> str:
    more = f" and {len(names) - at_most} more" if len(names) > at_most else ""
    return ", ".join(f"`{name}`" for name in names[:at_most]) + more


def environment(key: str) -> Callable[[Mapping], Any]:
    return lambda record: value_at(record, f"environment.{key}")


def title_of(record: Mapping) -> str | None:
    """The data set's title."""
    data = value_at(record, "environment.data") or {}
    return data.get("title") or data.get("name")


def data_of(record: Mapping) -> str | None:
    """The data set's title, and what it is where it is not the published one."""
    data, name = value_at(record, "environment.data") or {}, title_of(record)
    if not name or data.get("source") == "real":
        return name
    reason = f": {data['reason']}" if data.get("reason") else ""
    return f"{name} ({data.get('source', 'source unknown')}{reason})"


def is_embedded(record: Mapping) -> bool:
    return value_at(record, "environment.data.source") == "embedded"


def sums_of(record: Mapping) -> str | None:
    """The data's files with the beginning of their sha256."""
    sums = value_at(record, "environment.data.sha256") or {}
    return ", ".join(f"{file} {str(digest)[:12]}" for file, digest in sums.items())


def code_of(record: Mapping) -> str | None:
    commit = value_at(record, "environment.commit")
    dirty = value_at(record, "environment.dirty")
    return commit and f"commit {str(commit)[:10]}" + (" with uncommitted changes" if dirty else "")


def variables_of(record: Mapping) -> str | None:
    """The environment's variables that may steer the row's framework; None where nobody looked."""
    variables = value_at(record, "environment.variables")
    if variables is None:
        return None
    ran = [name for name in frameworks.FRAMEWORKS if value_at(record, f"environment.{name}")]
    variables = frameworks.variables_of(ran or frameworks.FRAMEWORKS, variables)
    return "; ".join(f"{name}={value}" for name, value in variables.items()) or "none set"


def dates(rows: Iterable[Mapping]) -> str:
    days = sorted({str(day)[:10] for record in rows if (day := value_at(record, "environment.date"))})
    return plain(" to ".join(dict.fromkeys([days[0], days[-1]]))) if days else ""


def machine_line(rows: Sequence[Mapping]) -> str:
    """One line for a caption: machine, frameworks, date."""
    device = "gpu" if any(value_at(record, "environment.gpu") for record in rows) else "cpu"
    parts = [" / ".join(spread(rows, environment(device))) or "machine unknown"]
    if device == "cpu":
        parts += [f"{cores} cores" for cores in [" / ".join(spread(rows, environment("cores")))] if cores]
    for label, key in {"driver": "driver", "cuDNN": "cudnn", **SOFTWARE}.items():
        if found := spread(rows, environment(key)):
            parts.append(f"{label} {' / '.join(found)}")
    return ", ".join(filter(None, [*parts, dates(rows)]))


def head(rows: Sequence[Mapping]) -> list[str]:
    """What stands above the tables: machine, software, precision, date, data, code."""

    def line(label: str, *facts: tuple[str, str]) -> list[str]:
        known = [f"{before}{value}" for before, key in facts if (value := run_in_words(rows, environment(key)))]
        return [f"- {label}: {', '.join(known)}"] if known else []

    lines = line("GPU", ("", "gpu"), ("driver ", "driver")) or ["- GPU: none"]
    lines += line("CUDA", ("", "cuda"), ("cuDNN (as loaded) ", "cudnn"))
    lines += line("CPU", ("", "cpu"), ("cores: ", "cores"), ("", "os"))
    software = [(f"{name} ", key) for name, key in {**SOFTWARE, "NumPy": "numpy", "Python": "python"}.items()]
    lines += line("Software", *software)
    precisions = sorted({record["precision"] for record in rows}, key=schema.PRECISIONS.index)
    lines.append(f"- Precision: {', '.join(precisions)}")
    lines += [f"- Date: {day}" for day in [dates(rows)] if day]
    if not _of_several(rows):  # else each page says its own
        lines += [f"- Data: {value}" for value in [run_in_words(rows, data_of)] if value]
    lines += [f"- Code: {value}" for value in [run_in_words(rows, code_of)] if value]
    lines += [f"- Variables of the environment: {value}" for value in [run_in_words(rows, variables_of)] if value]
    bills = list(spread(rows, environment("software")))
    lines += [f"- Every package: {', '.join(f'software/{name}.json' for name in bills)}"] if bills else []
    notes = {note: None for record in rows for note in value_at(record, "environment.notes") or []}
    return lines + [f"- {plain(note)}" for note in notes]


def variables_of_all(record: Mapping) -> str | None:
    """Those variables of the environment that steer no one framework."""
    variables = value_at(record, "environment.variables")
    return None if variables is None else str(frameworks.variables_of((), variables))


def differences(rows: Sequence[Mapping]) -> list[str]:
    """One line each for what makes the rows of one table hard to compare: machine, data, code or settings.

    How many processes a row has, and the limits that decide it (settings.HOW_MANY), do not: it stands with each time per step.
    """
    names = dict.fromkeys(name for record in rows for name in value_at(record, "environment.packages") or {})
    facts = {key: environment(key) for key in ENVIRONMENT}
    # Each framework may have a Python of its own: other packages there are no difference between its rows.
    alike = [[record for record in rows if value_at(record, f"environment.{name}")] for name in frameworks.FRAMEWORKS]
    facts |= {
        name: environment_package(name)
        for name in names
        if name not in ENVIRONMENT and any(len(spread(group, environment_package(name))) > 1 for group in alike)
    }
    facts |= {"data": data_of, "data (sha256)": sums_of, "code": code_of}
    if any(len(spread(group, variables_of)) > 1 for group in alike) or len(spread(rows, variables_of_all)) > 1:
        facts["variables of the environment"] = variables_of
    different = [f"{key} {_by_framework(rows, fact)}" for key, fact in facts.items() if len(spread(rows, fact)) > 1]
    lines = [f"**Not one environment**: {'; '.join(different)}."] if different else []
    names = dict.fromkeys(
        name for record in rows for name in settings.of(record["config"]) if name not in settings.HOW_MANY
    )
    found = {name: spread(rows, lambda record, name=name: repr(record["config"].get(name))) for name in names}
    different = [f"{name} = {in_words(values)}" for name, values in found.items() if len(values) > 1]
    return lines + ([f"**Not one setting**: {'; '.join(different)}."] if different else [])


def _by_framework(rows: Sequence[Mapping], value_of: Callable[[Mapping], Any]) -> str:
    """As in_words; of many rows with the frameworks alone, where these have one value each."""
    found, of_frameworks = spread(rows, value_of), spread(rows, value_of, _framework_of)
    names = [name for of in of_frameworks.values() for name in of]
    if len(names) > len(set(names)) or "" in names or max(map(len, found.values())) <= AT_MOST:
        return in_words(found)
    return "; ".join(f"{value} ({' and '.join(of)})" for value, of in of_frameworks.items())


def environment_package(name: str) -> Callable[[Mapping], Any]:
    return lambda record: (value_at(record, "environment.packages") or {}).get(name)


def throttling(record: Mapping) -> list[str] | None:
    """Reasons for which the clocks were held down before or after a process; None where nobody looked."""
    states = [state for entry in record["clocks"] for state in (entry, *entry.values()) if isinstance(state, Mapping)]
    seen = [state["throttle_reasons"] for state in states if state.get("throttle_reasons") is not None]
    return list(dict.fromkeys(str(reason) for reasons in seen for reason in reasons)) if seen else None
