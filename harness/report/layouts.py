"""Reads layout/<benchmark>.json: which tables the benchmark script wants; harness/report/tables.py says what the keys mean."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.record import records, schema
from harness.record.schema import RecordError, dict_of, is_text, list_of, one_of, or_null
from harness.report.cells import split_format

Rules = dict[str, tuple[str, Callable[[Any], bool]]]  # key: (what is expected, test)


def _replicas(value: Any) -> bool:
    """As harness/report/replicas.py has it."""
    if not isinstance(value, dict) or value.get("mode") not in schema.MODES or not _list(value.get("published", [])):
        return False
    texts, figures = ("row", "description", "reason", "config"), ("gpus", "words", "speedup")
    return all(
        isinstance(row, dict)
        and all(is_text(row.get(key)) for key in texts)
        and all(key in row and schema.number_or_null(row[key]) for key in figures)
        for row in value.get("published", [])
    )


def _list(value: Any) -> bool:
    return isinstance(value, list)


_texts = list_of(is_text)
_TEXT, _NAMED_TEXTS = ("a text", is_text), ("an object of texts", dict_of(is_text))
LAYOUT: Rules = {
    "benchmark": ("a name of letters, digits, _ and -", schema.is_name),
    "title": _TEXT,
    "question": _TEXT,
    "rows": _NAMED_TEXTS,
    "tables": ("a list", _list),
}
LAYOUT_OPTIONAL: Rules = {
    "footnotes": ("a list", _list),
    "extra_rows": ("a list", _list),
    "headline": ("an object", lambda value: isinstance(value, dict | None)),
    "ours": ("a list of texts", _texts),
    "axes": ("a list", _list),
    "replicas": ("an object with the mode of its records, and published rows", lambda value: _replicas(value)),
}
TABLE: Rules = {
    "title": _TEXT,
    "mode": one_of(*schema.MODES),
    "columns": ("a list of [heading, path, format]", list_of(lambda column: _texts(column) and len(column) == 3)),
}
TABLE_OPTIONAL: Rules = {
    **dict.fromkeys(("device", "note", "plot", "plot_unit"), ("a text or null", or_null(is_text))),
    "plot_published": ("null or an object of texts", or_null(dict_of(is_text))),
}
AXIS: Rules = {
    "name": ("a name of letters, digits, _ and -", schema.is_name),
    "constant": _TEXT,
    "title": _TEXT,
    "label": _TEXT,
    "mode": TABLE["mode"],
}
EXTRA_ROW: Rules = {"row": _TEXT, "reason": _TEXT, "table": ("an index", lambda value: type(value) is int)}
EXTRA_ROW_OPTIONAL: Rules = {
    **dict.fromkeys(("description", "config", "device"), _TEXT),
    "published": ("an object of figures", schema.is_published),
}
FOOTNOTE: Rules = {"text": _TEXT}
FOOTNOTE_OPTIONAL: Rules = dict.fromkeys(("row", "mode", "device", "config", "column"), _TEXT)


def read_layout(path: Path) -> dict:
    """A benchmark's layout, checked; RecordError or UserError names the file and what is wrong."""
    layout = records.read_json(path)
    if not isinstance(layout, dict) or layout.get("schema") != schema.SCHEMA:
        found = layout.get("schema") if isinstance(layout, dict) else layout
        raise RecordError(path, "schema", found, str(schema.SCHEMA))
    _check(path, "layout", layout, LAYOUT, LAYOUT_OPTIONAL)
    for table in layout["tables"]:
        _check(path, "tables", table, TABLE, TABLE_OPTIONAL)
        for column in table["columns"]:
            split_format(column[2])
    for axis in layout.get("axes", []):
        _check(path, "axes", axis, AXIS, {})
    for row in layout.get("extra_rows", []):
        _check(path, "extra_rows", row, EXTRA_ROW, EXTRA_ROW_OPTIONAL)
    for note in layout.get("footnotes", []):
        if not isinstance(note, str):
            _check(path, "footnotes", note, FOOTNOTE, FOOTNOTE_OPTIONAL)
    if headline := layout.get("headline"):
        _check_headline(path, headline, layout["tables"])
    return layout


def _check(path: Path, what: str, found: Any, rules: Rules, optional: Rules) -> None:
    if not isinstance(found, dict):
        raise RecordError(path, what, found, "an object")
    for key, (expected, test) in {**rules, **optional}.items():
        if key not in found and key in rules:
            raise RecordError(path, what, f"a value without {key!r}", f"{expected} under {key!r}")
        if key in found and not test(found[key]):
            raise RecordError(path, f"{what}: {key}", found[key], expected)


def _check_headline(path: Path, headline: dict, tables: list[dict]) -> None:
    index, wanted = headline.get("table"), headline.get("columns", [])
    if type(index) is not int or index not in range(len(tables)):
        raise RecordError(path, "headline", index, "the index of a table")
    headings = [column[0] for column in tables[index]["columns"]]
    if not _texts(wanted) or not set(wanted) <= set(headings):
        raise RecordError(path, "headline", wanted, f"columns of its table: {', '.join(headings)}")
