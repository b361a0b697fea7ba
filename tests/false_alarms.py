"""How often a right row fails its proof on a CPU: seeds × data × scripts × instruction sets × threads. Not part of the tests.

    python tests/false_alarms.py --out=/tmp/alarms --data=../shared/data --limit-s=3000
    python tests/false_alarms.py --out=/tmp/alarms --sizes=quick --only=ptb      # the quick presets' own sizes
    python tests/false_alarms.py --out=/tmp/alarms --report                      # what there is so far
    python tests/false_alarms.py --out=/tmp/alarms-tf32 --tf32 --sizes=quick --data=../shared/data   # PTB as a GPU computes it

Every row of every script is run once for each seed and each data set, in turn under AVX2 and AVX-512 code paths and 1, 2 and 4
threads. The rows are the scripts' own (`run_row`, with the proof and the timed blocks of harness.measure.measurement), several
after one another in a process; timed blocks are long enough for every step that the proof compares. What is done stands
in OUT/runs.jsonl; the same command goes on from there. Exit status: 1 if a row failed.

With --sizes=small, layers are narrower and texts shorter than in the quick presets; learning rates, clipping, initialisation,
vocabulary, layers, batch sizes and optimizers are theirs. --sizes=tiny is for a look whether this file still works.
"""

import argparse
import collections
import hashlib
import importlib.util
import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

PROJECT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(PROJECT))

from harness.run import child, references  # noqa: E402
from harness.run.parent import Parent  # noqa: E402

SCRIPTS = ("ptb", "ptb_sentences", "stacked_lm", "mnist", "synthetic", "scaling")
DATA = ("embedded", "real")
NO_FILES = ("synthetic", "scaling")  # their data are generated: the same for either
BRIEF = ["--warmup-batches=1", "--warmup-limit-s=0", "--timed-batches=12", "--blocks=2", "--min-block-s=0"]
BRIEF_FIT = ["--epochs=1"]
SMALL = {
    "ptb": ["--units=64"],
    "ptb_sentences": ["--units=64", "--max-words=30"],
    "stacked_lm": ["--units=64", "--embedding=64", "--time-steps=10"],
    "mnist": ["--units=32", "--train-sequences=320"],
    "synthetic": ["--units=32", "--num-sequences=800"],
    "scaling": ["--units=64"],
}
TINY = {
    **SMALL,
    "ptb": ["--units=8", "--time-steps=5", "--train-words=8000"],
    "synthetic": ["--units=8", "--num-sequences=160"],
}
SIZES = {"tiny": TINY, "small": SMALL, "quick": {}}
ISA = {
    "avx2": {"ONEDNN_MAX_CPU_ISA": "AVX2", "OPENBLAS_CORETYPE": "Haswell", "ATEN_CPU_CAPABILITY": "avx2",
             "MKL_ENABLE_INSTRUCTIONS": "AVX2", "XLA_FLAGS": "--xla_cpu_max_isa=AVX2"},
    "avx512": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE", "OPENBLAS_CORETYPE": "SkylakeX", "ATEN_CPU_CAPABILITY": "avx512",
               "MKL_ENABLE_INSTRUCTIONS": "AVX512", "XLA_FLAGS": "--xla_cpu_max_isa=AVX512"},
}  # fmt: skip
SETTINGS = list(itertools.product(ISA, (1, 2, 4)))
PROOFS = ("outputs", "gradients", "update", "loss", "spread")
AT_ONCE = 30  # rows in one process: TensorFlow keeps the graphs of all


class Run(NamedTuple):
    """One row to run, and how."""

    script: str
    data: str
    seed: int
    row: str
    process: str  # what may share a process: the framework, and Keras' backend
    isa: str
    threads: int
    sizes: str
    precision: str = "fp32"

    @property
    def key(self) -> str:
        return " ".join(map(str, self))


def arguments(script: str, seed: int, sizes: str) -> list[str]:
    """A script's command line, without its data."""
    brief = BRIEF_FIT if script in ("mnist", "synthetic") else BRIEF
    return [f"--seed={seed}", "--quick", "--device=cpu", *brief, *SIZES[sizes].get(script, [])]


def parent_of(script: str, seed: int, sizes: str) -> Parent:
    """What the script's own parent process knows: its constants and rows."""
    path = PROJECT / "benchmarks" / f"{script}.py"
    spec = importlib.util.spec_from_file_location(script, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return Parent(module.BENCHMARK, arguments(script, seed, sizes))


def plan(seeds: int, scripts: list[str], rows: set[str], sizes: str, data: list[str]) -> list[Run]:
    """All runs. A row's setting changes from seed to seed and from row to row."""
    runs = []
    for script in scripts:
        parent = parent_of(script, 1, sizes)
        named = [row for row in parent.rows if not parent._cannot_run(row) and (not rows or row in rows)]
        for number, row in enumerate(named):
            process = parent.benchmark.rows[row].framework + (row if row.startswith("keras_") else "")
            for seed, (place, source) in itertools.product(range(1, seeds + 1), enumerate(data)):
                if script in NO_FILES and place:
                    continue
                isa, threads = SETTINGS[(number + seed + 3 * place) % len(SETTINGS)]
                runs.append(Run(script, source, seed, row, process, isa, threads, sizes))
    return runs


def in_turn(runs: list[Run]) -> list[list[Run]]:
    """Cut into what one process does: alike in setting and framework, seeds in turn over all scripts."""
    groups: dict[tuple, list[Run]] = collections.defaultdict(list)
    for run in sorted(runs, key=lambda run: (run.seed, hashlib.sha256(run.key.encode()).digest())):
        groups[run.process, run.isa, run.threads].append(run)
    parts = [group[k : k + AT_ONCE] for group in groups.values() for k in range(0, len(group), AT_ONCE)]
    return sorted(parts, key=lambda part: (part[0].seed, hashlib.sha256(part[0].key.encode()).digest()))


def work(path: Path, out: Path, data: str) -> None:
    """In a process of its own: run the rows that stand in `path`, one line to runs.jsonl after each."""
    import functools
    import gc

    from harness.data import sets
    from harness.record import machine

    sets.ptb, sets.mnist = functools.cache(sets.ptb), functools.cache(sets.mnist)
    for fields in json.loads(path.read_text()):
        run, started = Run(*fields), time.monotonic()
        machine.physical_cores = lambda threads=run.threads: threads
        note(out, run, status="started")
        parent = parent_of(run.script, run.seed, run.sizes)
        source = "embedded" if run.data == "embedded" else data
        content = [references.code_digest(Path(parent.benchmark.script)), run.script, run.data, run.seed, run.sizes]
        name = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]
        reference = out / "references" / f"{run.script}.{name}.npz"
        parent.constants["PRECISION"] = run.precision
        if run.precision == "tf32":
            import tensorflow as tf

            from tests import emulated_tf32

            tf.matmul = emulated_tf32.matmul
        job = {
            "task": "row", "row": run.row, "constants": parent.constants, "protocol": parent.constants, "device": "cpu",
            "precision": run.precision, "flags": [], "process": 0, "matmul_flops": None,
            "data": {"option": source, "embedded": ""}, "reference": str(reference),
        }  # fmt: skip
        if not reference.exists():
            failure = child._result(parent.benchmark, {**job, "task": "reference", "path": str(reference)})
            if failure:
                raise SystemExit(f"{run.key}: the reference: {failure['error']}")
        parts = child._result(parent.benchmark, job)
        proofs = {mode: part.get("proof") for mode, part in parts.items()}
        reason = "; ".join(f"{mode}: {part['reason']}" for mode, part in parts.items() if part["status"] != "ok")
        kept = {
            mode: {
                key: proof[key] for key in proof if key.endswith("_err") or key in ("limit", "worst_at", "curve_steps")
            }
            for mode, proof in proofs.items()
            if proof
        }
        status, seconds = "failed" if reason else "ok", round(time.monotonic() - started, 1)
        note(out, run, status=status, reason=reason, proofs=kept, seconds=seconds)
        gc.collect()


def note(out: Path, run: Run, **what: Any) -> None:
    with (out / "runs.jsonl").open("a") as file:
        file.write(json.dumps({"key": run.key, **run._asdict(), **what}) + "\n")


def read(out: Path) -> dict[str, dict]:
    """The last line of every run."""
    path = out / "runs.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return {line["key"]: line for line in map(json.loads, lines)}


def report(out: Path) -> list[dict]:
    """Print what was run, the worst margins and the failed runs; returns those."""
    done = [line for line in read(out).values() if line["status"] != "started"]
    failed = [line for line in done if line["status"] != "ok"]
    proofs = sum(len(line.get("proofs", {})) for line in done)
    print(f"{len(done)} rows run, {proofs} proofs, {len(failed)} rows failed\n")
    for field in ("script", "data", "isa", "threads", "process", "sizes"):
        counts = collections.Counter(str(line[field]) for line in done)
        print(f"{field}: " + ", ".join(f"{name} {count}" for name, count in sorted(counts.items())))
    print(f"seeds: {len({line['seed'] for line in done})}")
    shorter = [line for line in done if any((p.get("curve_steps") or 6) < 6 for p in line.get("proofs", {}).values())]
    print(f"rows whose loss curve ended early: {len(shorter)}\n\n| proof | error / limit | error | limit | where |")
    print("|---|---|---|---|---|")
    for name in PROOFS:
        found = [
            (proof[f"{name}_err"] / proof["limit"][name], proof[f"{name}_err"], proof["limit"][name], line, mode)
            for line in done
            for mode, proof in line.get("proofs", {}).items()
            if proof.get(f"{name}_err") is not None
        ]
        if found:
            margin, error, limit, line, mode = max(found, key=lambda one: one[0])
            print(f"| {name} | {margin:.2g} | {error:.2g} | {limit:.2g} | {line['key']}, {mode} |")
    for line in failed:
        print(f"\nfailed: {line['key']}: {line['reason']}")
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of what is done")
    parser.add_argument("--data", default=os.environ.get("LSTM_BENCH_DATA"), help="folder of mnist/ and ptb/")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--only", default=",".join(SCRIPTS), help="scripts")
    parser.add_argument("--rows", default="", help="rows; all")
    parser.add_argument("--sizes", choices=SIZES, default="small")
    parser.add_argument(
        "--tf32", action="store_true", help="PTB's while_loop alone, its products rounded to TensorFloat-32"
    )
    parser.add_argument("--limit-s", type=float, default=3600.0, help="no row is started after that")
    parser.add_argument("--report", action="store_true", help="only tell what there is")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    if given.work:
        work(given.work, given.out, given.data)
        return 0
    if not given.report:
        sources = [source for source in DATA if source == "embedded" or given.data]
        rows, scripts = {row for row in given.rows.split(",") if row}, given.only.split(",")
        if given.tf32:
            rows, scripts = {"while_loop"}, ["ptb"]
        runs = plan(given.seeds, scripts, rows, given.sizes, sources)
        run_all(given, [run._replace(precision="tf32") for run in runs] if given.tf32 else runs)
    return 1 if report(given.out) else 0


def run_all(given: argparse.Namespace, runs: list[Run]) -> None:
    os.nice(19)
    ends = time.monotonic() + given.limit_s
    done = {key for key, line in read(given.out).items() if line["status"] != "started"}
    for part in in_turn([run for run in runs if run.key not in done]):
        left = ends - time.monotonic()
        if left <= 0:
            return
        job = given.out / "job.json"
        job.write_text(json.dumps(part))
        command = [sys.executable, str(Path(__file__)), f"--out={given.out}", f"--work={job}"]
        command += [f"--data={given.data}"] if given.data else []
        threads = str(part[0].threads)
        environment = {
            **os.environ, **ISA[part[0].isa], "CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "2",
            "OMP_NUM_THREADS": threads, "OPENBLAS_NUM_THREADS": threads,
        }  # fmt: skip
        with (given.out / "log").open("a") as log:
            try:
                status = subprocess.run(command, env=environment, stdout=log, stderr=log, timeout=left).returncode
            except subprocess.TimeoutExpired:
                return
        if status:
            found = read(given.out)
            for run in part:
                if found.get(run.key, {}).get("status") == "started":
                    note(given.out, run, status="crashed", reason=f"its process ended with status {status}; see log")


if __name__ == "__main__":
    sys.exit(main())
