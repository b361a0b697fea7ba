"""What harness.compare says of measured runs: pairs of the same code, and of code with one row slowed by 5 % on purpose.

    python -m tests.harness.measured_pairs OUT                   # NumPy, one run after the other: 8 minutes on an idle machine
    python -m tests.harness.measured_pairs OUT --cores=auto      # the pairs at a time, each on processors of its own: 2 minutes
    python -m tests.harness.measured_pairs OUT --cores=0-1,2-3,4-5,6-7,8-9
    python -m tests.harness.measured_pairs OUT --device=gpu      # PyTorch's nn.LSTM on the first GPU: 5 to 9 minutes
    python -m tests.harness.measured_pairs OUT --device=cpu      # the same rows, small, on a CPU: only whether they run
    python -m tests.harness.measured_pairs --draw results/compare-validation/*.json > README.md

On a CPU each of five pairs is a plain run, a slowed one and another plain one, of four rows in five processes: the plain ones
are compared with each other (20 rows of the same code), the slowed one with both (10 tries). With --cores the runs of a pair
follow each other on one group of processors, each process with one thread.

Rows of PyTorch take seconds to start, and there is one GPU: plain and slowed runs of three rows take turns, --runs of them, and
every two are compared.

What an earlier call has measured with this code on this machine is kept. Writes OUT/compared.json, which holds every process's
median and every verdict, and OUT/compared.md, drawn from it. Exit status: 0 what is promised was kept, 1 it was not, 2 wrong
input or a run that failed, 130 Ctrl-C.
"""

import argparse
import contextlib
import io
import itertools
import json
import math
import os
import re
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from harness.compare import __main__ as compare
from harness.compare import verdicts
from harness.compare.pairing import NOT_ALONE
from harness.errors import UserError
from harness.record import machine, records
from tests.harness.measured_benchmark import CORES, ROUNDS, SIZES, SLOWED_ROUNDS, SLOWED_ROW

SCRIPT = Path(__file__).with_name("measured_benchmark.py")
PAIRS = 5
RUNS = 7  # of PyTorch's rows: 4 plain and 3 slowed ones are 12 tries, and 9 pairs of the same code
PYTORCH = {  # blocks of a GPU lie closer together, so that fewer and shorter ones do
    "gpu": ("--device=gpu", "--config=large", "--precision=fp32", "--blocks=3", "--min-block-s=0.1"),
    "cpu": ("--device=cpu", "--units=16", "--blocks=3", "--min-block-s=0.1"),
}
MOST_DIFFERENT, LEAST_FOUND = 0.05, 0.9  # of the rows of the same code, of the tries: what is promised
DIFFERENT = (verdicts.SLOWER, verdicts.FASTER)
ONE_THREAD = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
SIBLINGS = Path("/sys/devices/system/cpu")  # cpuN/topology/thread_siblings_list below it


class Plan(NamedTuple):
    """What is measured and compared.

    Attributes:
        rows: names; the third is the one that a slowed run slows.
        options: of measured_benchmark.py.
        lanes: names of runs. Those of a lane follow each other, on the lane's processors.
        comparisons: (before, after), by name.
        sharing: which runs stand in several comparisons.
    """

    rows: Sequence[str]
    options: Sequence[str]
    lanes: Sequence[Sequence[str]]
    comparisons: Sequence[tuple[str, str]]
    sharing: str

    @property
    def slowed(self) -> str:
        return self.rows[2]


def is_slowed(run: str) -> bool:
    return run.startswith("slowed")


def plan_of(device: str | None, runs: int) -> Plan:
    """NumPy's pairs; or, with a device, the runs of PyTorch's rows, which take turns."""
    framework = "torch" if device else "lstm"
    rows = [row for row in SIZES if row.startswith(framework)]
    if not device:
        lanes = [(f"plain-{k}", f"slowed-{k}", f"again-{k}") for k in range(PAIRS)]
        sharing = "Each pair has runs of its own; its slowed run is compared with both of its plain ones."
        options = ("--device=cpu",)
    else:
        lanes = [tuple(f"{'slowed' if k % 2 else 'plain'}-{k}" for k in range(runs))]
        sharing = f"Every two of {runs} runs are compared, so that the comparisons are not independent."
        options = PYTORCH[device]
    both = [sorted(pair, key=is_slowed) for lane in lanes for pair in itertools.combinations(lane, 2)]
    return Plan(rows, options, lanes, [tuple(pair) for pair in both], sharing)  # a slowed run after a plain one


def groups_of(text: str) -> list[list[int]]:
    """Groups of processors from "0-1,2-3" or "auto"; UserError where they overlap or are not this process's to use."""
    if not hasattr(os, "sched_setaffinity"):
        raise UserError("--cores: this system keeps no process to its processors; leave the option out")
    allowed = os.sched_getaffinity(0)
    if text == "auto":
        return automatic_groups(allowed)
    groups = []
    for part in text.split(","):
        ends = re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", part)
        group = list(range(int(ends[1]), int(ends[2] or ends[1]) + 1)) if ends else []
        if not group:
            raise UserError(f"--cores={text[:40]}: expected groups of processors, such as --cores=0-1,2-3, or auto")
        groups.append(group)
    every = list(itertools.chain(*groups))
    if wrong := [n for n, times in Counter(every).items() if times > 1 or n not in allowed]:
        raise UserError(f"--cores={text[:40]}: processor {wrong[0]}: expected each once, of {sorted(allowed)}")
    return groups


def automatic_groups(allowed: set[int]) -> list[list[int]]:
    """A group for each pair, or as many as there are physical cores: of one or two whole ones, with all their threads."""
    cores: dict[str, list[int]] = {}
    for number in sorted(allowed):
        path = SIBLINGS / f"cpu{number}" / "topology" / "thread_siblings_list"
        cores.setdefault(path.read_text() if path.exists() else str(number), []).append(number)
    count = min(PAIRS, len(cores))
    each = min(2, len(cores) // count)
    physical = list(cores.values())[-count * each :]  # the first core serves most interrupts
    return [sorted(itertools.chain(*physical[k * each : (k + 1) * each])) for k in range(count)]


def measure(run: Path, plan: Plan, cores: Sequence[int] | None) -> None:
    """One run in processes of its own; its output goes to <run>.log. UserError where it did not measure every row."""
    env = {**os.environ, SLOWED_ROW: plan.slowed if is_slowed(run.name) else ""}
    if cores:
        env |= {CORES: ",".join(map(str, cores)), **ONE_THREAD}
    rows = f"--rows={','.join(plan.rows)}"
    command = [sys.executable, str(SCRIPT), *plan.options, rows, "--data=embedded", f"--out={run}"]
    command += ["--resume"] if (run / "run.json").exists() else []
    started, log = time.monotonic(), run.with_suffix(".log")
    with log.open("ab") as output:
        status = subprocess.run(command, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output).returncode
    if status:
        raise UserError(f"{run}: the run ended with status {status}, expected 0; see the end of {log}")
    print(f"{run.name}: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)


def measure_all(out: Path, plan: Plan, groups: Sequence[Sequence[int]] | None) -> None:
    """Every run of the plan: one lane after the other, or with groups of processors one lane on each at a time."""
    free = list(groups or [None])

    def measure_lane(lane: Sequence[str]) -> None:
        cores = free.pop()
        for name in lane:
            measure(out / name, plan, cores)
        free.append(cores)

    with ThreadPoolExecutor(len(free)) as pool:
        try:
            list(pool.map(measure_lane, plan.lanes))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def medians_of(run: Path, plan: Plan) -> dict[str, list[float]]:
    """{row: ms, one median per process}; UserError where a row is not there, or not whole."""
    found, problems = records.read_run(run)
    medians = {record["row"]: [statistics.median(blocks) for blocks in record["blocks_ms"]] for record in found}
    short = [row for row in plan.rows if len(medians.get(row, [])) < verdicts.MIN_PROCESSES]
    if problems or short:
        why = problems[0] if problems else f"row {short[0]} has too few processes, expected {verdicts.MIN_PROCESSES}"
        raise UserError(f"{run}: {why}; see {run / 'logs'}")
    return {row: medians[row] for row in plan.rows}


def compared(out: Path, before: str, after: str) -> dict:
    """What harness.compare says of two runs: {"before", "after", "slowed", "common_shift", "rows"}."""
    path = out / "comparisons" / f"{before}.{after}.json"
    with contextlib.redirect_stdout(io.StringIO()):
        compare.compare(compare.parse([str(out / before), str(out / after), f"--json={path}"]))
    document = json.loads(path.read_text())
    kept = ("row", "verdict", "marks", "raw_ratio", "ratio", "interval", "p_holm")
    rows = [{key: row[key] for key in kept} for row in document["rows"]]
    slowed = is_slowed(before) != is_slowed(after)
    return {"before": before, "after": after, "slowed": slowed, "common_shift": document["common_shift"], "rows": rows}


def count(comparisons: Sequence[Mapping], slowed_row: str) -> dict:
    """How often compare was right: {"same": …, "tries": …, "others": …}, a count per verdict each."""
    found: dict[str, Counter] = {"same": Counter(), "tries": Counter(), "others": Counter()}
    for comparison in comparisons:
        for row in comparison["rows"]:
            kind = "same" if not comparison["slowed"] else "tries" if row["row"] == slowed_row else "others"
            found[kind][row["verdict"]] += 1
    return {kind: dict(counter) for kind, counter in found.items()}


def _different(counts: Mapping[str, int]) -> int:
    return sum(counts.get(verdict, 0) for verdict in DIFFERENT)


def is_kept(found: Mapping[str, Mapping[str, int]]) -> bool:
    """Whether the counts are as good as is promised."""
    same, tries = found["same"], found["tries"]
    few = _different(same) <= MOST_DIFFERENT * sum(same.values())
    return few and tries.get(verdicts.SLOWER, 0) >= LEAST_FOUND * sum(tries.values())


def paragraph(result: Mapping) -> str:
    """One paragraph of markdown from the content of compared.json."""
    found, about, runs = result["counts"], result["machine"], result["runs"]
    name = about["gpu"] or f"{about['cpu']}, {about['cores']} cores"
    packages = ", ".join(f"{package} {version}" for package, version in result["packages"].items())
    logs = [[math.log(ms) for ms in medians] for run in runs.values() for medians in run["medians_ms"].values()]
    spread = 100 * statistics.median(map(statistics.stdev, logs))
    ratios = {kind: [] for kind in ("same", "tries")}
    for comparison in result["comparisons"]:
        for row in comparison["rows"]:
            if not comparison["slowed"]:
                ratios["same"].append(abs(math.log(row["raw_ratio"])))
            elif row["row"] == result["slowed_row"]:
                ratios["tries"].append(row["raw_ratio"])
    verdicts_of = {
        kind: ", ".join(f"{number} {verdict}" for verdict, number in sorted(counts.items()))
        for kind, counts in found.items()
    }
    sums = {kind: sum(counts.values()) for kind, counts in found.items()}
    every = [row for comparison in result["comparisons"] for row in comparison["rows"]]
    disturbed = sum(NOT_ALONE in row["marks"] for row in every)
    alone = (
        f" In {disturbed} of all {len(every)} comparisons of a row other processes ran beside it." if disturbed else ""
    )
    pinned = result["cores"] and f", on processors of their own, at most {len(result['cores'])} at a time"
    slowed_runs = sum(run["slowed"] for run in runs.values())
    return (
        f"**{name}** ({packages}; {result['made'][:10]}, commit {(about['commit'] or 'unknown')[:7]}"
        f"{' with uncommitted changes' if about['dirty'] else ''}): {len(runs) - slowed_runs} plain runs and {slowed_runs} with "
        f"`{result['slowed_row']}` doing {100 * result['slowed_by']:g} % more of the same work, of {len(result['rows'])} rows in "
        f"{result['processes']} processes each{pinned or ''}. {result['sharing']} "
        f"Of {sums['same']} rows of the same code **{_different(found['same'])}** came out as different "
        f"({verdicts_of['same']}); at most {100 * MOST_DIFFERENT:g} % are promised. "
        f"Of {sums['tries']} tries the slowed row was found in **{found['tries'].get(verdicts.SLOWER, 0)}** "
        f"({verdicts_of['tries']}); {10 * LEAST_FOUND:g} of 10 are promised. Of the {sums['others']} other rows of these tries "
        f"{_different(found['others'])} came out as different. Processes of a row lay {spread:.2f} % apart (standard deviation, "
        f"median over rows and runs), rows of the same code up to {100 * max(ratios['same']):.1f} %; the slowed row took "
        f"{100 * (statistics.median(ratios['tries']) - 1):.1f} % longer in the median.{alone}"
    )


def page(results: Sequence[Mapping]) -> str:
    return "\n\n".join(["# What harness.compare says of measured runs", *map(paragraph, results)]) + "\n"


def run(out: Path, device: str | None, runs: int, cores: str | None) -> bool:
    """Measure, compare, write; whether what is promised was kept."""
    if device and cores:
        raise UserError("--cores: rows of PyTorch run one at a time; expected it without --device")
    plan, groups = plan_of(device, runs), groups_of(cores) if cores else None
    out.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    measure_all(out, plan, groups)
    seconds = time.monotonic() - started
    names = list(itertools.chain(*plan.lanes))
    made = {name: {"slowed": is_slowed(name), "medians_ms": medians_of(out / name, plan)} for name in names}
    comparisons = [compared(out, *pair) for pair in plan.comparisons]  # once all is measured
    about = machine.facts("gpu" if device == "gpu" else "cpu")
    result = {
        "schema": 1,
        "made": about["date"],
        "machine": {key: about[key] for key in ("gpu", "driver", "cpu", "cores", "os", "python", "commit", "dirty")},
        "packages": {name: about["packages"][name] for name in (["numpy", "torch"] if device else ["numpy"])},
        "options": list(plan.options),
        "cores": groups,
        "seconds": round(seconds),
        "rows": list(plan.rows),
        "slowed_row": plan.slowed,
        "slowed_by": round(SLOWED_ROUNDS / ROUNDS - 1, 6),
        "processes": min(len(medians) for run in made.values() for medians in run["medians_ms"].values()),
        "sharing": plan.sharing,
        "counts": count(comparisons, plan.slowed),
        "runs": made,
        "comparisons": comparisons,
    }
    records.write_json(out / "compared.json", result)
    (out / "compared.md").write_text(page([result]))
    print(page([result]), end="")
    return is_kept(result["counts"])


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line; UserError for a wrong one."""
    parser = compare.Parser(
        prog="python -m tests.harness.measured_pairs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("paths", metavar="OUT", nargs="+", help="folder for runs and result; with --draw, JSON files")
    parser.add_argument("--cores", metavar="0-1,2-3|auto", help="groups of processors, one for each pair at a time")
    parser.add_argument("--device", choices=tuple(PYTORCH), help="measure PyTorch's rows there instead of NumPy's")
    parser.add_argument("--runs", type=int, default=RUNS, help=f"of PyTorch's rows, 3 to 20 ({RUNS})")
    parser.add_argument("--draw", action="store_true", help="print the paragraphs of earlier results")
    options = parser.parse_args(arguments)
    if not 3 <= options.runs <= 20:
        raise UserError(f"--runs={options.runs}: expected 3 to 20 runs, such as --runs={RUNS}")
    if len(options.paths) > 1 and not options.draw:
        raise UserError(f"{options.paths[1]}: expected one folder, or --draw")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        options = parse(arguments)
        if options.draw:
            print(page([records.read_json(path) for path in options.paths]), end="")
            return 0
        return 0 if run(Path(options.paths[0]), options.device, options.runs, options.cores) else 1
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted: what was measured is kept; the same command goes on from there", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
