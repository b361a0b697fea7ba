"""What stands in a table's cells: figures in their formats, texts that cannot break the table, numbered notes."""

import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from harness.errors import UserError
from harness.record import intervals

NONE = "-"
INCONCLUSIVE, NOT_JUDGED = "inconclusive", "not judged"
VERDICTS = {  # what stands after a ratio: what it means
    INCONCLUSIVE: "the ratio's interval includes 1",
    NOT_JUDGED: "other processes ran beside the slower of the two, so that its time is an upper bound",
}
FORMATS = ("str", "median_range", "pair", "each", "bytes", "percent")  # besides speedup:<row> and Python's own
OF_STEPS = ("throughput.value", "step_ms", "step_ms.median")
SPECIAL = re.compile(r"[\\|<`*]|(?<=_)_|_(?=_)")


class Notes:
    """Numbers footnotes in the order in which they are first needed; equal texts share a number."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def mark(self, text: str) -> str:
        if text not in self.texts:
            self.texts.append(text)
        return f" [{self.texts.index(text) + 1}]"

    def lines(self) -> list[str]:
        return [f"- [{number}] {text}" for number, text in enumerate(self.texts, 1)]


def plain(text: Any) -> str:
    """A record's text as one line of markdown that cannot end a cell, open a tag or start emphasis."""
    line = str(text).encode("utf-8", "replace").decode("utf-8")
    line = " ".join("".join(character if character.isprintable() else " " for character in line).split())
    return SPECIAL.sub(lambda match: "\\" + match.group(), line)


def ours(text: str) -> str:
    """A layout's text, which may hold markdown: one line, and no pipe that ends a cell."""
    return re.sub(r"(?<!\\)\|", r"\\|", " ".join(str(text).split()))


def value_at(record: Any, path: str) -> Any:
    """The value under a dotted path such as "step_ms.median", or None."""
    for key in path.split("."):
        if not isinstance(record, Mapping):
            return None
        record = record.get(key)
    return record


def split_format(form: str) -> tuple[str, float]:
    """(format, factor) of a column's format such as ".4f*0.001"; UserError where it is none."""
    name, _, factor = form.partition("*")
    try:
        multiplier = float(factor) if factor else 1.0
        if name not in FORMATS and not re.fullmatch("speedup:.+", name):
            format(1 if name.endswith("d") else 1.0, name)
    except ValueError:
        raise UserError(
            f"column format {form!r:.60}: expected {', '.join(FORMATS)}, speedup:<row> or Python's, such as .1f"
        ) from None
    return name, multiplier


def cell(value: Any, form: str) -> str:
    """A figure in a column's format; a dash for None, a string as it is; UserError where they do not go together."""
    name, factor = split_format(form)
    if value is None or value in ([], {}):
        return NONE
    if isinstance(value, str):
        return plain(value)
    try:
        return _cell(value, name, factor)
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise UserError(
            f"column format {form!r:.60}: found {value!r:.60}: expected a path to what the format is for"
        ) from error


def _cell(value: Any, name: str, factor: float) -> str:
    if name == "str":
        return ", ".join(plain(item) for item in (value if isinstance(value, list) else [value]))
    if name == "pair":
        numbers = value.values() if isinstance(value, Mapping) else value
        return "(" + ", ".join(NONE if number is None else f"{number:.4f}" for number in numbers) + ")"
    if name == "each":
        return ", ".join(f"{key}: {NONE if number is None else format(number, '.2f')}" for key, number in value.items())
    if name == "median_range":
        if isinstance(value, list):
            value = {"median": statistics.median(value), "min": min(value), "max": max(value)}
        median, low, high = (value[key] * factor for key in ("median", "min", "max"))
        digits = min(4, max(0, 3 - math.floor(math.log10(median)))) if median > 0 else 1  # four significant ones
        processes = f" ({value['processes']})" if "processes" in value else ""
        if (width := intervals.half_width(value)) is not None:
            return f"{median:.{digits}f} ±{_percent(width)}{processes}"
        ranged = f" [{low:.{digits}f}, {high:.{digits}f}]" if low < high else ""
        return f"{median:.{digits}f}{ranged}{processes}"
    number = statistics.median(value) if isinstance(value, list) else value
    number = number * factor if factor != 1 else number
    if name == "bytes":
        return f"{number / 2**30:.2f} GiB" if number >= 2**30 else f"{number / 2**20:.1f} MiB"
    if name == "percent":
        return f"{number:.0f} %"
    return format(round(number) if name.endswith("d") else number, name)


def _percent(fraction: float) -> str:
    percent = 100 * fraction
    return ">100 %" if percent > 100 else f"{percent:.0f} %" if percent >= 9.95 else f"{percent:.1f} %"


def speedup(record: Mapping, base: Mapping | None, path: str) -> float | None:
    """How many times faster than `base`: the ratio of throughputs, or of times the other way round."""
    own, other = value_at(record, path), value_at(base, path)
    if isinstance(own, Mapping) and isinstance(other, Mapping):
        own, other = (figure.get("median", figure.get("value")) for figure in (own, other))
    if isinstance(own, list) and isinstance(other, list) and own and other:
        own, other = statistics.median(own), statistics.median(other)
    if not isinstance(own, int | float) or not isinstance(other, int | float) or not own or not other:
        return None
    is_time = path.startswith("step_ms") or path.endswith("_s")
    return other / own if is_time else own / other


def times_as_fast(record: Mapping, base: Mapping, ratio: float, path: str) -> str:
    """A speedup, of steps with the 95 % interval over the processes of both rows, and INCONCLUSIVE where that includes 1."""
    is_known = path in OF_STEPS and record is not base
    shown = f"{ratio:.1g}x" if ratio < 0.05 else f"{ratio:.{2 if ratio < 9.995 else 1 if ratio < 99.95 else 0}f}x"
    if not is_known or not (found := intervals.ratio(base["blocks_ms"], record["blocks_ms"])):
        return shown
    width = max(found[1] / ratio, ratio / found[0])
    includes_1 = ratio / width <= 1 <= ratio * width
    if shown == "1.00x" and not includes_1:
        shown = f"{ratio:.3f}x"
    return f"{shown} ±{_percent(width - 1)}{f', {INCONCLUSIVE}' * includes_1}"


def verdicts(lines: Iterable[Sequence[str]]) -> list[str]:
    """One line with what the verdicts after ratios mean; none where a table's rows of cells have none among their figures."""
    figures = [text for line in lines for text in line[2:-1]]
    found = [f"*{word}*: {what}" for word, what in VERDICTS.items() if any(f", {word}" in text for text in figures)]
    return [f"{'; '.join(found)}."] if found else []


def markdown(headings: Sequence[str], right: Sequence[bool], lines: Sequence[Sequence[str]]) -> str:
    """A table in GitHub's markdown; cells are shown as they are."""
    import pandas

    frame = pandas.DataFrame(lines, columns=list(headings), dtype=object)
    alignment = ["right" if figures else "left" for figures in right]
    return frame.to_markdown(index=False, tablefmt="github", disable_numparse=True, colalign=alignment)


def paragraphs(lines: Iterable[str]) -> list[str]:
    return [part for line in lines for part in (line, "")]
