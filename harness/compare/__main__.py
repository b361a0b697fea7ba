"""Compares two runs row by row: which rows are faster or slower after than before, and which are the same.

    python -m harness.compare results/before results/after                        # markdown
    python -m harness.compare results/before results/after --json=compared.json --fail-if-slower=5%
    python -m harness.compare results/fp32 results/fp16 --across=precision

Rows are paired by the names of their records: benchmark, config, row, mode, device and precision. Every row needs 5
processes or more in both runs (--processes=5). What differs between the runs is said first, and at the verdicts of the
rows that it may have changed. How rows are judged: harness/compare/verdicts.py.

Exit status: 0 compared; 1 with --fail-if-slower: a row is slower by more than that (its verdict is "slower" and its ratio,
not only an end of the interval, lies beyond), or a row that was ok before is failed or missing after; 2 wrong input, or
--fail-if-slower with no row that could be judged.
"""

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from harness.errors import UserError, require
from harness.record import records

ACROSS = ("precision", "config", "device")


def percentage(option: str, text: str, most: float) -> float:
    """0.05 of "5%"; UserError otherwise."""
    if not re.fullmatch(r"\d{1,4}(\.\d{1,6})?\s?%", text) or float(text.rstrip("% ")) > most:
        shown = text if text.isprintable() and len(text) <= 30 else repr(text[:30])
        raise UserError(f"{option}={shown}: expected a percentage of at most {most:g}%, such as {option}=5%")
    return float(text.rstrip("% ")) / 100


class Parser(argparse.ArgumentParser):
    """A wrong command line is a UserError."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see --help")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line, with percentages as fractions; UserError for a wrong one."""
    parser = Parser(
        prog="python -m harness.compare",
        description="Which rows are faster or slower after than before? Markdown on standard output.",
        epilog="Exit status: 0 compared; 1 with --fail-if-slower: a row is slower by more than that, or failed or is missing "
        "after; 2 wrong input, or that option and no row that could be judged.",
        allow_abbrev=False,
    )
    parser.add_argument("before", metavar="BEFORE", help="a run's folder, such as results/before")
    parser.add_argument("after", metavar="AFTER", help="the other run's folder")
    parser.add_argument("--json", metavar="FILE", help="also write everything as JSON")
    parser.add_argument(
        "--fail-if-slower", metavar="5%", help="exit with status 1 if a row is slower by more than this, or lost"
    )
    parser.add_argument("--across", metavar="|".join(ACROSS), choices=ACROSS, help="pair rows that differ in this")
    parser.add_argument(
        "--drift",
        metavar="3%",
        default="3%",
        help="how far all rows together may shift from run to run without a change; 0%% takes every shift for a change",
    )
    options = parser.parse_args(arguments)
    options.drift = percentage("--drift", options.drift, most=20)
    if options.fail_if_slower is not None:
        options.fail_if_slower = percentage("--fail-if-slower", options.fail_if_slower, most=1000)
    return options


def load(run: str) -> list[dict]:
    """The records of a run; UserError where it is none, has none, or one of its files is no good record."""
    if not Path(run).is_dir():
        raise UserError(f"{run}: no such folder: expected a run's, such as results/cpu-2-core")
    found, problems = records.read_run(run)
    if problems:
        more = f" (and {len(problems) - 1} more files)" if len(problems) > 1 else ""
        raise UserError(f"{problems[0]}{more}")
    if not found:
        raise UserError(f"{run}: a run without records; expected one with rows")
    return found


def compare(options: argparse.Namespace) -> int:
    """Compare and print; the exit status. Raises UserError."""
    require("numpy", "scipy", "pandas")
    runs = (options.before, options.after)
    before, after = map(load, runs)
    if os.path.samefile(*runs):
        raise UserError(f"{options.before} and {options.after} are the same folder: expected two runs")

    from harness.compare import compared, pairing, verdicts

    pairs = pairing.pair(before, after, options.across, runs)
    both = [made for made in pairs if made.before and made.after]
    if both and all(made.reason == pairing.COPIED for made in both):
        raise UserError(f"{options.after} holds the measurements of {options.before}: a copy; expected two runs")
    shifts, means = pairing.judge(pairs, options.drift)
    slow = None if options.fail_if_slower is None else pairing.too_slow(pairs, options.fail_if_slower)
    if options.json:
        content = compared.document(options, (before, after), pairs, shifts, means, slow)
        try:
            records.write_json(options.json, content)
        except UserError as error:
            raise UserError(str(error).replace("--out", "--json")) from error
    print(compared.page(options, (before, after), pairs, shifts, means))
    ran = [made for made in pairs if made.reason and made.before and made.before["status"] == "ok"]
    if ran:
        print(f"warning: {len(ran)} rows that ran before are not compared; see Not compared", file=sys.stderr)
    if slow is None:
        return 0
    lost = pairing.lost(pairs)
    for made in lost:
        print(f"lost: {'.'.join(made.name.values())}: {made.reason}", file=sys.stderr)
    judged = sum(bool(made.judged) for made in pairs)
    if not judged and not lost:
        raise UserError(
            f"--fail-if-slower: no row could be judged, so that none could fail; expected rows of {verdicts.MIN_PROCESSES} "
            "processes or more in both runs, see the table"
        )
    unjudged = sum(not made.reason and not made.judged for made in pairs)
    if unjudged:
        print(f"warning: {unjudged} rows cannot be judged, {judged} were; see the tables", file=sys.stderr)
    for made in slow:
        print(f"slower by over {100 * options.fail_if_slower:g} %: {compared.label(made)}", file=sys.stderr)
    return 1 if slow or lost else 0


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        return compare(parse(arguments))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
