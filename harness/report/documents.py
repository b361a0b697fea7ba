"""Fills the tables of README.md and results/README.md from the records of the runs that they name.

    python -m harness.report.documents README.md results/README.md             # fill what stands between the markers
    python -m harness.report.documents README.md results/README.md --check     # exit status 1 where one would change

A document holds pairs of markers, each on a line of its own; RUN is a run's folder relative to the document:

    <!-- overview RUN: keras_cudnn keras torch_lstm -->       one line per workload, one column per row named;
    <!-- /overview RUN -->                                    the first one named is the base of the ratios
    <!-- headline RUN -->                                     the run's headline tables and their pictures
    <!-- /headline RUN -->

What stands between two markers is replaced, nothing else. So every figure of these documents is a committed record's.
"""

import argparse
import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from harness.errors import UserError, require
from harness.record import records, schema
from harness.report import tables, warnings
from harness.report.cells import NONE, markdown, times_as_fast, value_at
from harness.report.provenance import machine_line

BLOCK = re.compile(
    r"^<!-- (?P<kind>overview|headline) (?P<run>[\w./-]+)(?:: (?P<rows>[\w ]+))? -->\n"
    r"(?P<body>.*?)^<!-- /(?P=kind) (?P=run) -->$",
    re.MULTILINE | re.DOTALL,
)
MARKER = re.compile(r"^<!-- /?(?:overview|headline) .*-->$", re.MULTILINE)
WARNED, DEPARTS = "~", "*"  # at a time; at a workload
NOTES = {
    DEPARTS: f"\\{DEPARTS} departs from the published protocol; the page says how.",
    WARNED: f"{WARNED} the page warns of this time: spread, drift, warm-up, clocks or another process.",
}


def filled(document: Path) -> str:
    """The document's text with every block drawn from its run; UserError where a marker or a run is not as expected."""
    try:
        text = document.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{document}: cannot be read ({error}); expected a text file with markers") from error
    blocks = list(BLOCK.finditer(text))
    if not blocks or 2 * len(blocks) != len(MARKER.findall(text)):
        raise UserError(
            f"{document}: expected pairs of lines <!-- headline RUN --> and <!-- /headline RUN -->, or "
            "<!-- overview RUN: row row --> and <!-- /overview RUN -->"
        )
    return BLOCK.sub(lambda block: _drawn(document, block), text)


def _drawn(document: Path, block: re.Match) -> str:
    run = document.parent / block["run"]
    if not run.is_dir():
        raise UserError(f"{document}: {block['run']}: expected a run's folder, with rows/ and layout/")
    begin, _, rest = block[0].partition("\n")
    end = rest.rpartition("\n")[2]
    if block["kind"] == "headline":
        body = tables.headline(run, pictures=block["run"])
    elif block["rows"]:
        body = overview(run, block["rows"].split())
    else:
        raise UserError(
            f"{document}: {begin}: expected the names of rows, as in <!-- overview RUN: keras torch_lstm -->"
        )
    return f"{begin}\n\n{body.rstrip()}\n\nEvery table, picture and record: [{run.name}]({block['run']}/README.md).\n\n{end}"


def overview(run: str | os.PathLike, names: Sequence[str]) -> str:
    """One table of a run: a line per workload, a column per row named, and the fastest row against the others.

    Times are those of the headline tables' modes: of `fit` the whole training in s, else a training step in ms. Of a config's
    precisions the one with the most rows, as in the headline tables. A workload is named with layers x units.
    """
    found, problems = tables.load(run)
    if problems:
        raise UserError(f"{run}: {problems[0]}")
    every, lines = [], []
    for benchmark, (layout, rows) in found.items():
        headline = layout.get("headline")
        mode = layout["tables"][headline["table"]]["mode"] if headline else None
        for (config, _, precision), members in tables.most_rows(rows).items():
            by_row = {record["row"]: record for record in members if record["mode"] == mode}
            if any(name in by_row for name in names):
                every += by_row.values()
                departs = any(note.startswith(schema.DEPARTS) for r in by_row.values() for note in r["notes"])
                unit = f"{'s' if mode == 'fit' else 'ms'}{DEPARTS if departs else ''}"
                what = ", ".join([f"`{benchmark}` {config}", *_size(by_row), precision, unit])
                times = [_time(by_row.get(name), mode) for name in names]
                lines.append([what, *times, *_ratios(by_row, names[0], mode, layout.get("ours", []))])
    if not lines:
        raise UserError(f"{run}: expected records of at least one of the rows {', '.join(names)}")
    headings = [
        "workload, layers x units",
        *(f"`{name}`" for name in names),
        f"fastest, against `{names[0]}`",
        "against the fastest peer",
    ]
    drawn = markdown(headings, [False, *(True for _ in names), False, False], lines)
    notes = [text for mark, text in NOTES.items() if any(cell.endswith(mark) for line in lines for cell in line)]
    return "\n".join([f"{machine_line(every)}.", "", drawn, "", " ".join(notes)])


def _size(by_row: Mapping[str, Mapping]) -> list[str]:
    """["3x256"], layers and units; [] where the records do not say both."""
    config = next(iter(by_row.values()))["config"]
    sizes = [config.get(name) for name in ("NUM_LAYERS", "UNITS")]
    return ["x".join(map(str, sizes))] if all(isinstance(size, int) for size in sizes) else []


def _path(mode: str) -> str:
    return "fit_s" if mode == "fit" else "step_ms.median"


def _figure(record: Mapping | None, mode: str) -> float | None:
    value = value_at(record, _path(mode)) if record and record["status"] == "ok" else None
    return value[0] if isinstance(value, list) else value


def _time(record: Mapping | None, mode: str) -> str:
    value = _figure(record, mode)
    if value is None:
        return "failed" if record and record["status"] == "failed" else NONE
    return f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}" + (WARNED if _is_warned(record) else "")


def _is_warned(record: Mapping) -> bool:
    judged = (warnings.spread, warnings.drift, warnings.slow_start, warnings.throttled, warnings.not_settled)
    return warnings.was_disturbed(record) or any(mark(record) is not None for mark in judged)


def _ratios(by_row: Mapping[str, Mapping], base: str, mode: str, ours: Sequence[str]) -> list[str]:
    """The fastest proven row, how many times as fast as the base and as the fastest peer it is; marked as these times are."""
    times = {name: value for name, record in by_row.items() if (value := _figure(record, mode))}
    if not times:
        return [NONE] * 2
    fastest = min(times, key=times.__getitem__)

    def against_row(slower: str) -> str:
        warned = any(_is_warned(by_row[name]) for name in (slower, fastest))
        ratio = times_as_fast(by_row[fastest], by_row[slower], times[slower] / times[fastest], _path(mode))
        return ratio + warnings.not_judged(by_row[slower]) + (WARNED if warned else "")

    against = f" {against_row(base)}" if base in times else ""
    peers = {name: value for name, value in times.items() if name not in ours}
    if not peers or fastest in peers:
        return [f"`{fastest}`{against}", "is a peer" if peers else NONE]
    peer = min(peers, key=peers.__getitem__)
    return [f"`{fastest}`{against}", f"`{peer}` {against_row(peer)}"]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m harness.report.documents", description="Fill documents' tables from the records of runs."
    )
    parser.add_argument("documents", metavar="FILE", nargs="+", type=Path, help="a markdown file with markers")
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 where a file would change")
    options = parser.parse_args(arguments)
    try:
        require("pandas", "tabulate")
        texts = {document: filled(document) for document in options.documents}
        changed = [document for document, text in texts.items() if document.read_bytes() != text.encode("utf-8")]
        for document in () if options.check else changed:
            records.write_bytes(document, texts[document].encode("utf-8"))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for document in changed:
        print(f"{document}: {'differs from the records: run this without --check' if options.check else 'written'}")
    return 1 if options.check and changed else 0


if __name__ == "__main__":
    sys.exit(main())
