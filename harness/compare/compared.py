"""A comparison of two runs as markdown and as JSON: what `python -m harness.compare` prints and writes."""

import argparse
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from harness.compare import verdicts
from harness.compare.pairing import NOT_ALONE, Pair, lost
from harness.record.schema import MODES
from harness.report import provenance
from harness.report.cells import NONE, markdown, paragraphs, plain

FOOT = (
    "Before, after: geometric mean over processes of their medians (number of processes). After/before: of "
    "these, above 1 is slower; judged without the common shift where one was taken off. Same: the interval lies "
    f"within ±{verdicts.SAME_PERCENT:g} %. Faster, slower: Welch's t with variances shrunk across rows, Holm over all "
    f"rows, {100 * verdicts.ALPHA:g} %. Inconclusive: neither."
)
DISTURBED = (
    f"**{NOT_ALONE[0].upper()}{NOT_ALONE[1:]}**: other processes ran on the row's processors or GPU, before or after; "
    "a difference may be theirs."
)
COUNTED = (verdicts.SLOWER, verdicts.FASTER, verdicts.SAME, verdicts.INCONCLUSIVE)


def label(pair: Pair) -> str:
    """One line about a judged row, for the terminal."""
    judged = pair.judged
    return f"{'.'.join(pair.name.values())}: {judged.ratio:.3f} [{judged.low:.3f}, {judged.high:.3f}]{_marks(pair)}"


def _marks(pair: Pair) -> str:
    return f" ({', '.join(pair.marks)})" if pair.marks else ""


def verdict_of(pair: Pair) -> str:
    """The verdict, with what else differs; or why there is none."""
    if pair.judged:
        return pair.judged.verdict + _marks(pair)
    processes = "1 process" if pair.processes == 1 else f"{pair.processes} processes"
    return f"cannot judge: {processes}, at least {verdicts.MIN_PROCESSES} needed"


def _ms(medians: Sequence[float]) -> str:
    """The geometric mean over processes to four digits, with their number."""
    return f"{statistics.geometric_mean(medians):.4g} ({len(medians)})" if medians else NONE


def differing(pairs: Sequence[Pair]) -> list[dict]:
    """What differs, each once with the rows that it is true of, those that differ in every row first."""
    found: dict[tuple, list[str]] = {}
    compared = [pair for pair in pairs if not pair.reason]
    for pair in compared:
        for kind, what, before, after, _ in pair.differences:
            names = found.setdefault((kind, what, before, after), [])
            names.append(" ".join(pair.name[key] for key in ("benchmark", "row", "mode")))
    every = sorted(found.items(), key=lambda item: -len(item[1]))
    return [
        {"kind": kind, "what": what, "before": before, "after": after, "all_rows": len(names) == len(compared),
         "rows": names}
        for (kind, what, before, after), names in every
    ]  # fmt: skip


def shift_line(device: str, shift: verdicts.Shift, drift: float) -> str:
    """What all rows of a device did together, and what was made of it."""
    option = f"--drift={100 * drift:g}%"
    together = f"all rows together shifted to {shift.ratio:.3f} [{shift.low:.3f}, {shift.high:.3f}]"
    allowed = f"so that every interval allows for a drift of the machine ({option})"
    if shift.removed:
        text = (
            f"{together}, which a machine may drift by between two runs ({option}): taken off before judging. "
            "A change that slows every row by as much looks the same; --drift=0% judges without."
        )
    elif shift.groups == 1:
        text = (
            f"rows of one implementation only: two runs cannot separate its change from the machine's drift, {allowed}."
        )
    elif abs(shift.ratio - 1) > drift:
        text = f"{together}, which is too far for a drift: left in, {allowed}."
    else:
        text = f"what all rows shifted by together is unknown, because of noise or of different changes, {allowed}."
    return f"{device.upper()}: {text}"


def page(
    options: argparse.Namespace,
    runs: Sequence[Sequence[Mapping]],
    pairs: Sequence[Pair],
    shifts: Mapping[str, verdicts.Shift],
    means: Mapping[tuple[str, str], tuple[int, float, float, float]],
) -> str:
    """The comparison in markdown."""
    lines = [f"# {plain(options.before)} → {plain(options.after)}", ""]
    for when, run, own in zip(("before", "after"), (options.before, options.after), runs, strict=True):
        code = provenance.run_in_words(own, provenance.code_of)
        lines.append(f"- {when}: {plain(run)}: {provenance.machine_line(own)}" + (f", {code}" if code else ""))
    lines += ["", "## What differs", "", *what_differs(pairs), ""]
    counts = {verdict: sum(bool(p.judged) and p.judged.verdict == verdict for p in pairs) for verdict in COUNTED}
    counts["cannot be judged"] = sum(not pair.reason and not pair.judged for pair in pairs)
    counts["not compared"] = sum(bool(pair.reason) for pair in pairs)
    parts = [f"{count} {what}" for what, count in counts.items() if count]
    lines += ["## Rows", "", f"Of {len(pairs)} rows: {', '.join(parts)}.", ""]
    lines += paragraphs(shift_line(device, shift, options.drift) for device, shift in shifts.items())
    lines += tables(pairs)
    if means:
        headings = ["benchmark", "device", "rows", "after/before [95 %]"]
        cells = [
            [plain(benchmark), device, str(count), f"{ratio:.3f} [{low:.3f}, {high:.3f}]"]
            for (benchmark, device), (count, ratio, low, high) in means.items()
        ]
        lines += ["## Geometric means", "", markdown(headings, [False, False, True, True], cells), ""]
        drift = f"; a drift of {100 * options.drift:g} % is in the interval" if options.drift else ""
        lines += [f"Of the rows that were judged, the common shift left in{drift}.", ""]
    left_out = [pair for pair in pairs if pair.reason]
    if left_out:
        lines += ["## Not compared", "", markdown(["rows", "why"], [False, False], not_compared(left_out)), ""]
    return "\n".join(lines).rstrip()


def not_compared(pairs: Sequence[Pair]) -> list[list[str]]:
    """Table cells [rows, why]: a line per benchmark, config, device, precision and reason, with all rows and modes of these."""
    lines: dict[tuple[str, ...], dict[str, list[str]]] = {}
    for pair in pairs:
        key = (*(pair.name[part] for part in ("benchmark", "config", "device", "precision")), pair.reason)
        lines.setdefault(key, {}).setdefault(pair.name["row"], []).append(pair.name["mode"])
    cells = []
    for (*where, reason), rows in lines.items():
        named = ", ".join(f"{row} ({', '.join(modes)})" for row, modes in rows.items())
        cells.append([plain(f"{' '.join(where)}: {named}"), plain(reason)])
    return cells


def what_differs(pairs: Sequence[Pair]) -> list[str]:
    """One line per fact that is another one after than before."""
    if all(pair.reason for pair in pairs):
        return ["Unknown: no row could be compared."]
    lines = []
    for found in differing(pairs):
        rows = "" if found["all_rows"] else f" ({provenance.listed(found['rows'], at_most=3)})"
        lines.append(f"- {plain(found['what'])}: {plain(found['before'])} → {plain(found['after'])}{rows}")
    codes = {provenance.code_of(record) for pair in pairs if not pair.reason for record in (pair.before, pair.after)}
    if None in codes:
        lines.append("- code: some records do not know their commit; it may be another one")
    elif any("uncommitted" in code for code in codes):
        lines.append("- code: where changes were uncommitted, equal commits may be different code")
    return lines or ["Nothing but when they ran."]


def tables(pairs: Sequence[Pair]) -> list[str]:
    """One table per benchmark, config, device and precision, with what has to be known to read it underneath."""
    groups: dict[tuple[str, ...], list[Pair]] = {}
    for pair in pairs:
        if not pair.reason:
            key = tuple(pair.name[key] for key in ("benchmark", "config", "device", "precision"))
            groups.setdefault(key, []).append(pair)
    lines = []
    headings = ["row", "mode", "before, ms", "after, ms", "after/before", "ratio judged [95 %]", "verdict"]
    for (benchmark, config, device, precision), own in groups.items():
        cells = []
        for pair in sorted(own, key=lambda pair: MODES.index(pair.name["mode"])):
            judged = pair.judged
            ratios = [NONE, NONE]
            if judged:
                ratios = [f"{judged.raw:.3f}", f"{judged.ratio:.3f} [{judged.low:.3f}, {judged.high:.3f}]"]
            times = [_ms(medians) for medians in pair.medians]
            cells.append([plain(pair.name["row"]), pair.name["mode"], *times, *ratios, verdict_of(pair)])
        title = f"### {plain(benchmark)}: {plain(config)}, {device.upper()}, {precision}"
        lines += [title, "", markdown(headings, [False, False, True, True, True, True, False], cells), ""]
    if groups:
        alone = not any(NOT_ALONE in pair.marks for own in groups.values() for pair in own)
        lines += [FOOT, ""] if alone else [FOOT, "", DISTURBED, ""]
    return lines


def document(
    options: argparse.Namespace,
    runs: Sequence[Sequence[Mapping]],
    pairs: Sequence[Pair],
    shifts: Mapping[str, verdicts.Shift],
    means: Mapping[tuple[str, str], tuple[int, float, float, float]],
    slow: Sequence[Pair] | None,
) -> dict[str, Any]:
    """The comparison as what JSON holds; `slower_than` and `too_slow` are null without --fail-if-slower."""
    sides = [
        {"run": run, "machine": provenance.machine_line(own), "code": provenance.run_in_words(own, provenance.code_of)}
        for run, own in zip((options.before, options.after), runs, strict=True)
    ]
    rows = []
    for pair in pairs:
        record = {**pair.name, "verdict": None, "reason": pair.reason, "marks": pair.marks}
        if not pair.reason:
            record["before_ms"], record["after_ms"] = (
                statistics.geometric_mean(own) if own else None for own in pair.medians
            )
            record["processes"] = [len(own) for own in pair.medians]
            record["reason"] = "" if pair.judged else verdict_of(pair)
        if pair.judged:
            judged = pair.judged
            record |= {"verdict": judged.verdict, "raw_ratio": judged.raw, "ratio": judged.ratio,
                       "interval": [judged.low, judged.high], "p_holm": judged.p}  # fmt: skip
        rows.append(record)
    return {
        "schema": 1,
        "before": sides[0],
        "after": sides[1],
        "across": options.across,
        "drift": options.drift,
        "differences": differing(pairs),
        "common_shift": [
            {"device": device, "ratio": shift.ratio, "interval": [shift.low, shift.high], "removed": shift.removed}
            for device, shift in shifts.items()
        ],
        "rows": rows,
        "geometric_means": [
            {"benchmark": benchmark, "device": device, "rows": count, "ratio": ratio, "interval": [low, high]}
            for (benchmark, device), (count, ratio, low, high) in means.items()
        ],
        "fail_if_slower": options.fail_if_slower,
        "too_slow": None if slow is None else [".".join(pair.name.values()) for pair in slow],
        "lost": [".".join(pair.name.values()) for pair in lost(pairs)],
    }
