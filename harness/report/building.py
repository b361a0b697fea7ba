"""Builds the tables of a layout from records: which rows and columns, their cells, and the lines underneath."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from harness.record import schema, settings
from harness.record.stopping_rule import is_time_up
from harness.report import plots, warnings, what_ran
from harness.report.cells import (
    NONE,
    Notes,
    cell,
    markdown,
    ours,
    paragraphs,
    plain,
    speedup,
    split_format,
    times_as_fast,
    value_at,
    verdicts,
)
from harness.report.curves import Curve
from harness.report.provenance import (
    data_of,
    differences,
    in_words,
    is_embedded,
    listed,
    machine_line,
    name_by,
    parts_apart,
    spread,
    throttling,
    title_of,
)

GPU_ONLY = ("gpu_utilisation", "memory_peak_bytes", "share_of_matmul")  # columns that a CPU table does without
MAY_LACK = ("latency.joules", "latency.p999_ms")  # columns that go where no row has any: no GPU, few requests
# Columns that a table does without where its records lack them: of an earlier commit, or of another mode.
SINCE = ("joules", "one_step", "gpu_utilisation")
ACCURACY = ("outputs_err", "gradients_err", "update_err", "loss_err")
FASTEST_PEER = "fastest peer"  # speedup against the fastest proven row that is not one of the layout's "ours"
LONG_REASON = 100  # characters of a reason in its cell


class Table(NamedTuple):
    """One drawn table: cells are escaped; `bars` or `curves`, and `picture` (file name), where the layout asks for a plot."""

    title: str
    headings: list[str]
    right: list[bool]  # per column: figures stand right
    lines: list[list[str]]
    foot: list[str]
    picture: str = ""
    drawn: str = ""  # the picture's title, where it is not the table's
    bars: Sequence[plots.Bar] = ()
    axis: str = ""
    caption: str = ""
    curves: Sequence[Curve] = ()  # instead of bars, over `across`
    across: str = ""


Group = tuple[str, str, str]  # config, device, precision


def group_of(record: Mapping) -> Group:
    return record["config"]["CONFIG"], record["device"], record["precision"]


def in_groups(rows: Sequence[Mapping]) -> dict[Group, list[Mapping]]:
    """Records by (config, device, precision): GPU first, configs as the script's CONFIGS has them."""
    configs = [name for record in rows for name in record["config"].get("CONFIGS") or []]
    configs = list(dict.fromkeys([*configs, *(record["config"]["CONFIG"] for record in rows)]))

    def order(group: Group) -> tuple[int, int, int]:
        return schema.DEVICES.index(group[1]), configs.index(group[0]), schema.PRECISIONS.index(group[2])

    groups = sorted({group_of(record) for record in rows}, key=order)
    return {group: [record for record in rows if group_of(record) == group] for group in groups}


def place(layout: Mapping, row: str) -> int:
    """Where a row comes in its tables: as in the script; one that the script has no longer, last."""
    return [*layout["rows"], row].index(row)


def build(
    layout: Mapping, index: int, group: Group, rows: Sequence[Mapping], notes: Notes, brief: bool = False
) -> Table | None:
    """Table `index` of the layout for one group's records; None where none of them belongs into it."""
    spec = layout["tables"][index]
    config, device, precision = group
    by_row = {record["row"]: record for record in rows if record["mode"] == spec["mode"]}
    if not by_row or spec.get("device") not in (None, device):
        return None
    members = [by_row.pop(row) for row in layout["rows"] if row in by_row] + list(by_row.values())
    # Skipped rows stand in one line under the table, unless there are no others.
    present = [record for record in members if record["status"] != "skipped"] or members
    present.sort(key=_place)
    extra = [
        row for row in layout.get("extra_rows", [])
        if row["table"] == index and row.get("config", config) == config and row.get("device", device) == device
        and (row.get("published") or not brief)
    ]  # fmt: skip
    # Another protocol, or embedded data: no published figure stands beside it.
    if any(_departs(record) for record in present):
        extra = []
    about = [note for note in layout.get("footnotes", []) if isinstance(note, Mapping)]
    ok = {record["row"]: record for record in present if record["status"] == "ok"}
    bases = ok | fastest_peer(ok, layout.get("ours", []))
    columns = [
        column for column in spec["columns"] if _is_shown(column, present, extra, device, layout.get("ours", []))
    ]
    shared = [note for note in present[0]["notes"] if all(note in record["notes"] for record in present[1:])]
    shared = [note for note in shared if len(present) > 1 and not is_time_up(note)]
    lines, bars = [], []
    for record in present:
        marks, figures = {"": ""}, [_figure(record, column, bases) for column in columns]
        shown = {column[0] for column, figure in zip(columns, figures, strict=True) if figure != NONE}
        for note in about:
            here = {"row": record["row"], "mode": record["mode"], "device": device, "config": config}
            if all(note.get(key, value) == value for key, value in here.items()):
                column = note.get("column", "")
                marks[column] = marks.get(column, "")
                if not column or column in shown:
                    marks[column] += notes.mark(ours(note["text"]))
        for text in (note for note in record["notes"] if not is_time_up(note) and note not in shared):
            marks[""] += notes.mark(plain(text))
        figures = [figure + marks.get(column[0], "") for column, figure in zip(columns, figures, strict=True)]
        description = ours(layout["rows"].get(record["row"], ""))
        lines.append([plain(record["row"]) + marks[""], description, *figures, verdict(record, notes)])
        # A published figure that a note has to explain is in the table alone: a plot has no room for the note.
        explained = {path for heading, path, _ in columns if marks.get(heading)}
        bars += [_bar(record, spec, explained, kind_of(layout, record["row"]))] if spec.get("plot") else []
    for row in extra:
        figures = [
            cell(value_at(row, path), form) if path.startswith("published.") else NONE for _, path, form in columns
        ]
        lines.append([ours(row["row"]), ours(row.get("description", "")), *figures, ours(row["reason"])])
    device_name = device.upper()
    title = f"{spec['title']}: {config}, {device_name}, {precision}"
    if any(note.startswith(schema.DEPARTS) for record in present for note in record["notes"]):
        title += f" ({schema.DEPARTS})"
    table = Table(
        title=title,
        headings=["row", "what it is", *(ours(heading) for heading, _, _ in columns), "proof"],
        right=[False, False, *(split_format(form)[0] != "str" for _, _, form in columns), False],
        lines=lines,
        foot=[
            *(f"All rows: {plain(note)}." for note in shared),
            *verdicts(lines),
            *foot(layout, spec, present, rows, brief),
            *skipped(record for record in members if record not in present),
        ],
    )
    if not spec.get("plot"):
        return table
    units = [record["throughput"]["unit"] for record in ok.values() if record["throughput"]]
    axis = spec.get("plot_unit") or (units[0] if spec["plot"] == "throughput.value" and units else spec["plot"])
    return table._replace(
        drawn=title_of_picture(spec, title),
        picture=picture_of(layout, index, group),
        # A published row none of whose figures is drawn is in the table alone.
        bars=bars + [bar for row in extra if (bar := _bar(row, spec)).published or not row.get("published")],
        axis=axis,
        caption=machine_line(present),
    )


def title_of_picture(spec: Mapping, title: str) -> str:
    """Where it is not the table's title, which is of a whole training's time: the picture shows how fast the steps were."""
    of_steps = (spec["mode"], spec.get("plot")) == ("fit", "throughput.value")
    return title.replace(spec["title"], "Speed of the training's steps", 1) if of_steps else ""


def kind_of(layout: Mapping, row: str) -> str:
    """One of plots.KINDS. The vanilla LSTM is the row that the layout describes so."""
    if row in layout.get("ours", []):
        return plots.OURS
    return plots.VANILLA if "vanilla LSTM" in layout["rows"].get(row, "") else plots.PEER


def _place(record: Mapping) -> tuple[bool, float]:
    """Where a row stands: the fastest first, what has no figures last."""
    throughput = record["throughput"] if record["status"] == "ok" else None
    return not throughput, -throughput["value"] if throughput else 0.0


def skipped(absent: Iterable[Mapping]) -> list[str]:
    """One line per reason for which the rows of these records are not in a table."""
    reasons: dict[str, dict[str, None]] = {}
    for record in absent:
        reasons.setdefault(record["reason"], {})[record["row"]] = None
    return [f"Skipped, {plain(reason)}: {listed(list(rows), at_most=len(rows))}." for reason, rows in reasons.items()]


def picture_of(layout: Mapping, index: int, group: Group) -> str:
    """The file name of the picture of table `index`; "" where the layout asks for none."""
    spec, (config, device, precision) = layout["tables"][index], group
    if not spec.get("plot"):
        return ""
    same = [other for other in layout["tables"][:index] if other.get("plot") and other["mode"] == spec["mode"]]
    number = f"-{len(same) + 1}" if same else ""
    return f"{layout['benchmark']}.{config}.{spec['mode']}{number}.{device}.{precision}.png"


def _departs(record: Mapping) -> bool:
    """Whether published figures do not stand beside a record: as harness.run.parent decides for the row's own."""
    noted = any(note.startswith(schema.DEPARTS) for note in record["notes"])
    return noted or is_embedded(record) or record["precision"] in schema.SIXTEEN_BITS


def _is_shown(
    column: Sequence[str], rows: Sequence[Mapping], extra: Sequence[Mapping], device: str, ours: Sequence[str]
) -> bool:
    """Whether a column has something to show: published figures are there, and so is a speedup's row, proven or not."""
    root = column[1].split(".")[0]
    kind, _, base = split_format(column[2])[0].partition(":")
    if kind == "speedup":
        names = {record["row"] for record in rows}
        return base in names or (base == FASTEST_PEER and not names <= set(ours))
    optional = root in ("published", *SINCE) or (device == "cpu" and root in GPU_ONLY) or column[1] in MAY_LACK
    return not optional or any(value_at(record, column[1]) is not None for record in (*rows, *extra))


def fastest_peer(ok: Mapping[str, Mapping], ours: Sequence[str]) -> dict[str, Mapping]:
    """{FASTEST_PEER: the proven record of the highest throughput that is not one of ours}; {} where there is none."""
    peers = [record for row, record in ok.items() if row not in ours and record["throughput"]]
    return {FASTEST_PEER: max(peers, key=lambda record: record["throughput"]["value"])} if peers else {}


def _figure(record: Mapping, column: Sequence[str], bases: Mapping[str, Mapping]) -> str:
    """A row's cell: the figures of a row that was not proven are not shown, published ones always."""
    _, path, form = column
    if record["status"] != "ok" and not path.startswith("published."):
        return NONE
    kind, _ = split_format(form)
    if kind.startswith("speedup:"):
        base = bases.get(kind.partition(":")[2])
        ratio = speedup(record, base, path)
        if ratio is None:
            return NONE
        shown, slower = times_as_fast(record, base, ratio, path), record if ratio < 1 else base
        return shown if record is base else shown + warnings.not_judged(slower)
    if path == "share_of_matmul" and kind == "percent":
        form = "percent*100"  # the one figure that a record keeps as 0..1
    return cell(value_at(record, path), form)


def verdict(record: Mapping, notes: Notes) -> str:
    """The last column: proven with the worst error, or why there are no figures; a long reason goes on in a note."""
    if record["status"] == "ok":
        proof = record["proof"]
        errors = [proof[key] for key in ACCURACY if proof.get(key) is not None] if proof else []
        text = "not proven" if not proof else f"proven, errors ≤ {max(errors):.1e}" if errors else "proven"
        text = "; ".join(filter(None, [text, record["reason"]]))
    else:
        text = f"{record['status']}: {what_ran.reason_in_words(record['reason'])}"
    if len(text) <= LONG_REASON:
        return plain(text)
    return plain(text[:LONG_REASON]) + "..." + notes.mark(plain(text))


def _bar(record: Mapping, spec: Mapping, left_out: Collection[str] = (), kind: str = plots.PEER) -> plots.Bar:
    drawn = {label: path for label, path in (spec.get("plot_published") or {}).items() if path not in left_out}
    published = [(label, value_at(record, path)) for label, path in drawn.items()]
    published = [(label, figure) for label, figure in published if isinstance(figure, int | float)]
    value = value_at(record, spec["plot"]) if record.get("status") == "ok" else None
    if not isinstance(value, int | float):
        reason = what_ran.reason_in_words(record["reason"])
        note = reason if "status" not in record else f"{record['status']}: {reason}".rstrip(": ")
        return plots.Bar(record["row"], None, note=note, published=published, kind=kind)
    step = record["step_ms"]
    low = high = None
    if step and spec["plot"] == "throughput.value":  # the quickest block is the highest throughput
        low, high = value * step["median"] / step["max"], value * step["median"] / step["min"]
    elif step and spec["plot"] == "step_ms.median":
        low, high = step["min"], step["max"]
    elif spec["plot"] == "latency.p50_ms" and (p99 := value_at(record, "latency.p99_ms")):
        low, high = value, p99
    return plots.Bar(record["row"], value, low, high, "", published, kind)


def _count(numbers: Iterable[int], what: str, plural: str) -> str:
    numbers = sorted(set(numbers))
    text = str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"
    return f"{text} {what if numbers == [1] else plural}"


def foot(
    layout: Mapping, spec: Mapping, present: Sequence[Mapping], group: Sequence[Mapping], brief: bool
) -> list[str]:
    """The lines under a table: data, environment, how it was measured; unless brief, clocks, settings, rows not run."""
    lines = []
    embedded = spread(filter(is_embedded, present), data_of if brief else title_of)  # the head of a page says why
    if embedded:
        lines.append(f"**Embedded data, not the published set**: {in_words(embedded)}.")
    lines += differences(present)
    timed = [record for record in present if record["status"] == "ok" and record["blocks_ms"]]
    lines += [how_measured(timed, spec)] if timed else []
    if trained := [record for record in present if record["status"] == "ok" and "fit_s" in record]:
        once = all(len(record["blocks_ms"]) == 1 for record in trained)
        of_first = "Training time, seconds per epoch, accuracy and perplexity are of a row's first process; "
        of_first += "times per step, throughput and what stands by seed of all."
        lines.append("Each training ran once: its time has no range." if once else of_first)
    lines += warnings.lines(present, brief)
    measured = {record["row"] for record in group}
    absent = [row for row in layout["rows"] if row not in measured]
    asked_for = {row.strip() for record in group for row in str(record["config"].get("ROWS")).split(",")}
    if waiting := [row for row in absent if row in asked_for]:
        what = "**Asked for, without a record here** (`--resume` measures them)"
        lines.append(f"{what}: {listed(waiting, at_most=len(waiting))}.")
    if brief:
        return lines
    states = [throttling(record) for record in present]
    if any(reasons is not None for reasons in states) and not any(states):
        lines.append("Clocks were not throttled.")
    said = []
    for name, value in settings.of(present[0]["config"]).items():
        values = [record["config"].get(name) for record in present]
        if not isinstance(value, list | dict | None) and all(other == value for other in values):
            said.append(f"{name}={plain(value)}")
        elif name in settings.HOW_MANY and None not in values:
            said.append(f"{name}={min(values)} to {max(values)}")
    if said:
        lines.append(f"Settings: {', '.join(said)}.")
    if others := [row for row in absent if row not in asked_for]:
        lines.append(f"Not among the rows of this run: {listed(others, at_most=len(others))}.")
    return lines + ([spec["note"]] if spec.get("note") else [])


def how_measured(timed: Sequence[Mapping], spec: Mapping) -> str:
    """What the times of a table are, and how to read what stands after them in its cells."""
    noun = "epoch" if spec["mode"] == "fit" else "block"
    each = _count((len(blocks) for record in timed for blocks in record["blocks_ms"]), noun, f"{noun}s")
    processes = [len(record["blocks_ms"]) for record in timed]
    hint = ""
    if max(processes) == 1 and len(timed) > 1 and any(form.startswith("speedup:") for _, _, form in spec["columns"]):
        budget_s = max(
            record["config"].get("ROW_BUDGET_S") or 0 for record in timed
        )  # which one process may have used up
        more = "--processes=3" + (f" --row-budget-s={4 * budget_s:g}" if budget_s else "")
        hint = f" Ratios have no interval, and another run's may differ: `--resume {more}` gives them one."
    if spec["mode"] == "request":
        return f"Percentiles are of all requests of a row's first process; requests/s: of the median of {each}.{hint}"
    ranged = any(form.startswith("median_range") and path == "step_ms" for _, path, form in spec["columns"])
    if max(processes) == 1:
        in_brackets = " (1)" if ranged else ""
        if ranged and any(len(record["blocks_ms"][0]) > 1 for record in timed):
            in_brackets += ", in brackets their range, which says nothing about another process"
        return f"Time per step: median of {each} in one process{in_brackets}.{hint}"
    text = f"Time per step: median over {_count(processes, 'process', 'processes')} of each one's median of {each}"
    if ranged:
        text += "; ±: 95 % interval over the processes, their number in parentheses"
    if ranged and min(processes) == 1:
        text += "; in brackets: range within a single process, which says nothing about another one"
    return f"{text}."


def _limits(precision: str, of: Mapping[str, Sequence[Mapping]]) -> list[str]:
    """The limits of a precision, those of the most records first, and whose the others are; of: limits → records."""
    most = max(of, key=lambda limit: len(of[limit]))
    lines = []
    for limit in sorted(filter(None, of), key=lambda limit: limit != most):
        modes = {record["mode"] for record in of[limit]}
        rest = [record for other, records in of.items() if other != limit for record in records]
        whose = ", ".join(sorted(modes))
        if modes & {record["mode"] for record in rest}:
            names = dict.fromkeys(map(name_by(parts_apart([*of[limit], *rest])), of[limit]))
            whose = listed(list(names), at_most=len(names))
        lines.append(f"Limits of {precision}{'' if limit == most else f' in {whose}'}: {plain(limit)}.")
    return lines


def proof_table(layout: Mapping, rows: Sequence[Mapping]) -> list[str]:
    """Every row's errors and the kernel that was seen, with the limits underneath."""
    groups = list(in_groups(rows))
    rows = [record for record in rows if record["proof"]]
    rows.sort(key=lambda record: (groups.index(group_of(record)), place(layout, record["row"])))
    if not rows:
        return ["No row was proven."]
    lines, limits, spreads = [], {}, set()
    for record in rows:
        proof = record["proof"]
        errors = [NONE if proof.get(key) is None else f"{proof[key]:.1e}" for key in schema.ERRORS]
        failed = plain(", ".join(proof.get("failed", []))) or "see the record"
        result = "proven" if proof["ok"] else f"failed: {failed}"
        ran = plain(what_ran.in_words(proof.get("kernel"))) or NONE
        lines.append([plain(record["row"]), record["mode"], ", ".join(group_of(record)), *errors, result, ran])
        limit = ", ".join(f"{key} {value:g}" if isinstance(value, float) else f"{key} {value}"
                          for key, value in proof.get("limit", {}).items() if value and key != "spread")  # fmt: skip
        limits.setdefault(record["precision"], {}).setdefault(limit, []).append(record)
        spreads |= {f"{value:g}" for key, value in proof.get("limit", {}).items() if key == "spread"}
    headings = ["row", "mode", "config", *(key.removesuffix("_err") for key in schema.ERRORS), "result", "what ran"]
    right = [False] * 3 + [True] * len(schema.ERRORS) + [False] * 2
    under = [line for precision, of in limits.items() for line in _limits(precision, of)]
    if spreads:
        between = " or, with dropout, " if len(spreads) == 2 else " or "
        of_spread = between.join(sorted(spreads, key=float))
        under.append(f"Limit of spread, the timed blocks' losses against each other: {of_spread}.")
    return [markdown(headings, right, lines), "", *paragraphs(under)]
