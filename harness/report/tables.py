"""Draws a run's tables, plots and index from its records and layouts alone, without any framework.

    python -m harness.report.tables results/RUN                        # every page and plot of the run
    python -m harness.report.tables results/RUN --headline             # and prints the headline tables, above the files' names

A layout (layout/<benchmark>.json, written by the benchmark script) holds `title`, `question`, `rows` {row: what it is},
`tables`, `footnotes`, `extra_rows`, `headline` {"table": index, "columns": [headings]}, `ours` [rows] and, of a benchmark
that is measured along axes, `axes` (harness/report/axes.py). A table is

    {"title", "mode", "device" (null: one per device), "columns": [[heading, dotted path, format], ...], "note",
     "plot" (dotted path or null), "plot_unit", "plot_published": {label: dotted path}}

Formats: Python's (".1f", "d", ",.0f", ".0%"), "str", "median_range", "pair", "each", "bytes", "percent" and "speedup:<row>":
that row's figure against this one's, the larger the faster; "speedup:fastest peer" takes the row of the highest
throughput that is not one of `ours`. "median_range" shows step_ms with its interval, or of one process with its range,
and the number of processes; "each" shows every number of an object, by its name. A list is shown by its median.
"*<factor>" after any format multiplies first: ["wall time (s)", "step_ms.median", ".4f*0.001"].
Columns of published figures, of Joules and of single steps go where no row has any, and speedups against a row that the
table does not have.
An extra row is {"row", "description", "published", "reason", "table": index} and may name a "config" and a "device".
A footnote is a string, or {"text"} with any of "row", "mode", "device", "config" that it is about and "column", a
heading.
"""

import argparse
import itertools
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from harness.errors import UserError, require
from harness.record import records, schema
from harness.record.machine import PROJECT
from harness.report import axes, building, curves, latency, launches, options, plots, replicas, what_ran
from harness.report.building import Group, Table, build, in_groups, picture_of, proof_table, title_of_picture
from harness.report.cells import Notes, markdown, paragraphs, plain, value_at
from harness.report.layouts import read_layout
from harness.report.provenance import head, machine_line


def page(layout: Mapping, rows: Sequence[Mapping], help_line: str = "") -> tuple[str, list[Table]]:
    """(markdown of one benchmark, its tables that have a plot)."""
    notes = Notes()
    tables = options.tables(layout, rows, notes)
    tables += [
        table
        for index in range(len(layout["tables"]))
        for group, members in in_groups(rows).items()
        if (table := build(layout, index, group, members, notes))
    ] + [*axes.tables(layout, rows, notes), *replicas.tables(layout, rows, notes)]
    lines = [
        f"# {layout['title']}",
        "",
        layout["question"],
        "",
        *head(rows),
        "",
        *paragraphs(filter(None, [help_line])),
    ]
    lines += paragraphs([*axes.left_out(layout, rows), *latency.advice(rows)])
    for table in tables:
        lines += [f"## {table.title}", "", *_with_foot(table)]
    footnotes = [f"- {note}" for note in layout.get("footnotes", []) if isinstance(note, str)]
    if footnotes or notes.texts:
        lines += ["## Notes", "", *notes.lines(), *footnotes, ""]
    lines += ["## Proof", "", *proof_table(layout, rows)]
    drawn = [table for table in tables if table.picture]
    if drawn:
        lines += ["## Plots", "", *paragraphs(f"![{table.drawn or table.title}]({table.picture})" for table in drawn)]
    return "\n".join(lines).rstrip() + "\n", drawn


def help_of(run: Path) -> str:
    """Where it stands how a run's pages are read: links where the run lies in the project."""
    run, docs = run.resolve(), PROJECT / "docs"
    there = f"{os.path.relpath(docs, run)}/" if run.is_relative_to(PROJECT) else ""
    words = {"reading-tables.md": "how to read these tables", "proof.md": 'what "proven" means'}
    shown = [f"[{what}]({there}{name})" if there else f"{what}: docs/{name}" for name, what in words.items()]
    of_results = run.parent / "README.md"
    if (
        run.parent == PROJECT / "results"
        and of_results.exists()
        and f"({run.name}/README.md)" in of_results.read_text()
    ):
        shown.append("[on which hosts, with which kernels](../README.md)")
    return f"Help: {', '.join(shown)}."


def _with_foot(table: Table) -> list[str]:
    return [markdown(table.headings, table.right, table.lines), "", *paragraphs(table.foot)]


def load(run: str | os.PathLike) -> tuple[dict[str, tuple[dict, list[dict]]], list[str]]:
    """({benchmark: (layout, its records)}, one line per file that could not be used)."""
    rows, problems = records.read_run(run)
    rows = launches.with_known([schema.timed_by_process(record) for record in rows], Path(run))
    found: dict[str, tuple[dict, list[dict]]] = {}
    for benchmark in dict.fromkeys(record["benchmark"] for record in rows):
        path = Path(run) / "layout" / f"{benchmark}.json"
        try:
            found[benchmark] = read_layout(path), [record for record in rows if record["benchmark"] == benchmark]
        except UserError as error:
            problems.append(f"{error}; without it the records of {benchmark} are not drawn")
    return found, problems


def most_rows(rows: Sequence[Mapping]) -> dict[Group, list[Mapping]]:
    """The groups of in_groups, of one config's and device's precisions only the one with the most records."""
    groups = in_groups(rows)
    sizes = {group: len(members) for group, members in groups.items()}
    most = {group: max(size for other, size in sizes.items() if other[:2] == group[:2]) for group in groups}
    return {group: members for group, members in groups.items() if sizes[group] == most[group]}


def headline_of(layout: Mapping, rows: Sequence[Mapping], pictures: str = "") -> list[str]:
    """The headline tables of one benchmark, with what has to be known to read them.

    Of one config's and device's precisions only the one with the most rows; the others stand on the benchmark's page. Rows
    that were skipped are named below the table. `pictures`: the folder from which each table's picture is linked, if any.
    """
    headline = layout.get("headline")
    if not headline:  # of requests and along axes, in words
        advice = axes.advice(layout, rows) if layout.get("axes") else latency.advice(rows)
        return [f"**{layout['title']}**", "", *paragraphs(advice)] if advice else []
    spec = layout["tables"][headline["table"]]
    wanted = headline.get("columns") or [column[0] for column in spec["columns"]]
    spec = {**spec, "columns": [column for column in spec["columns"] if column[0] in wanted], "plot": None}
    tables = [spec if index == headline["table"] else table for index, table in enumerate(layout["tables"])]
    lines = []
    for group, members in most_rows(rows).items():
        notes = Notes()
        table = build({**layout, "tables": tables}, headline["table"], group, members, notes, brief=True)
        if table:
            lines += [f"**{layout['title']}. {table.title}**", "", *_with_foot(table)]
            lines += [*notes.lines(), ""] if notes.texts else []
            picture = picture_of(layout, headline["table"], group)
            title = title_of_picture(layout["tables"][headline["table"]], table.title)
            lines += [f"![{title or table.title}]({pictures}/{picture})", ""] if pictures and picture else []
    return lines


def headline(run: str | os.PathLike, pictures: str = "") -> str:
    """Markdown of every benchmark's headline tables, for the terminal; with `pictures`, that folder's pictures below them."""
    found, _ = load(run)
    every = [record for _, rows in found.values() for record in rows]
    somewhere = any(value_at(record, "environment.cpu") for record in every)
    lines = [f"Measured on {machine_line(every)}.", ""] if somewhere else ["Nothing has been measured.", ""]
    for layout, rows in found.values():
        lines += headline_of(layout, rows, pictures)
    return "\n".join(lines).rstrip() + "\n"


def index_page(run: Path, found: Mapping[str, tuple[dict, list[dict]]], problems: Sequence[str]) -> str:
    """README.md of the run: where, which benchmarks, the headline, and what has no figures."""
    every = [record for _, rows in found.values() for record in rows]
    lines = [f"# {run.resolve().name}", "", *(head(every) if every else ["No records yet."]), "", help_of(run), ""]
    lines += ["## Benchmarks", ""]
    lines += [
        f"- [{layout['title']}]({benchmark}.md): {layout['question']}" for benchmark, (layout, _) in found.items()
    ]
    headlines = [line for layout, rows in found.values() for line in headline_of(layout, rows)]
    lines += ["", "## Headline", "", *headlines] if headlines else [""]
    failed = [record for record in every if record["status"] == "failed"]
    skipped = [record for record in every if record["status"] == "skipped"]
    if failed or skipped or problems:
        lines += ["## Rows without figures", ""]
        lines += [f"- {records.record_name(r)}: failed: {plain(what_ran.reason_in_words(r['reason']))}" for r in failed]
        for benchmark, rows in itertools.groupby(skipped, key=lambda record: record["benchmark"]):
            lines += [f"- {benchmark}: {line}" for line in building.skipped(rows)]
        lines += [f"- {plain(problem.replace(f'{run}{os.sep}', ''))}" for problem in problems]
    return "\n".join(lines).rstrip() + "\n"


def render(run: str | os.PathLike) -> tuple[list[Path], list[str]]:
    """Draws everything of a run: (paths of the pages, README.md first; one line per file that could not be used)."""
    run = Path(run)
    found, problems = load(run)
    written = [run / "README.md"]
    for benchmark, (layout, rows) in found.items():
        text, drawn = page(layout, rows, help_of(run))
        for table in drawn:
            title = f"{layout['title']}. {table.drawn or table.title}"
            if table.curves:
                picture = curves.draw(title, table.across, table.axis, table.curves, table.caption)
            else:
                picture = plots.draw(title, table.axis, table.bars, table.caption)
            records.write_bytes(run / table.picture, picture)
        written.append(run / f"{benchmark}.md")
        records.write_bytes(written[-1], text.encode("utf-8"))
    records.write_bytes(written[0], index_page(run, found, problems).encode("utf-8"))
    return written, problems


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m harness.report.tables", description="Draw a run's tables and plots."
    )
    parser.add_argument("run", metavar="results/RUN", help="a run's folder")
    parser.add_argument("--headline", action="store_true", help="also print the headline tables, first")
    given = parser.parse_args(arguments)
    try:
        require("pandas", "tabulate", "matplotlib")
        written, problems = render(given.run)
        if given.headline:
            print(headline(given.run))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for problem in problems:
        print(f"warning: {problem}", file=sys.stderr)
    for path in written:
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
