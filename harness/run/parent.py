"""A script's own process: picks rows, has their processes started, keeps their records, and has the tables drawn.

A record is rewritten, whole, after each of its row's processes.
"""

import contextlib
import functools
import json
import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.data.location import locate
from harness.errors import CrashError, UserError, require
from harness.record import machine, records, schema, settings, software
from harness.record.stopping_rule import StoppingRule
from harness.run import bf16, environments, estimate, folders, options, processes, references, resume, sizes
from harness.run.script import Benchmark, Row

PREPARATION_LIMIT_S = 3600.0  # for finding or fetching the data, and for the reference
MATMUL_TRIES = 2  # a row that is finished without it would stay without its share
AT_ONCE = 8  # processes that prepare side by side on a GPU, at most
GPU_BYTES, HOST_BYTES = 2 * 10**9, 6 * 10**9  # what a framework takes of either memory before it computes
HELD_TIMES = 4  # as many numbers as a step has at the least: what a step of primitive ops holds
NO_REASON = "the process gave no reason"


def require_gpus(option: str, count: int, device: str) -> list[str]:
    """UUIDs of the first so many GPUs that are visible, all of one kind. Raises UserError, which names the option."""
    if device == "cpu":
        raise UserError(f"{option}: this run is on a CPU; leave it out, or run where there are {count} GPUs")
    found = machine.gpus()
    if len(found) < count:
        name, number = option.split("=")[0], len(found)
        give = f"give {name}={number}, or " if found else ""
        raise UserError(f"{option}: {number} GPU{'s' * (number != 1)} visible; {give}show more by CUDA_VISIBLE_DEVICES")
    kinds = list(dict.fromkeys(gpu.name for gpu in found[:count]))
    if len(kinds) > 1:
        one = "choose GPUs of one kind by CUDA_VISIBLE_DEVICES"
        raise UserError(f"{option}: {' and '.join(kinds)}: a table is of one kind of GPU; {one}")
    return [gpu.uuid for gpu in found[:count]]


def _missing(name: str, row: Row) -> str:
    """What the row's environment lacks, or ""; Keras' rows, known by their name, need Keras too."""
    return environments.missing(row.framework, *(["keras"] if name.startswith("keras") else []))


def _told(reasons: Mapping[str, Sequence[str]]) -> str:
    return "; ".join(f"{', '.join(rows)}: {reason}" for reason, rows in reasons.items())


class Parent:
    """What all ways to run a script's rows have in common; each of them has a `_run_rows` of its own."""

    def __init__(self, benchmark: Benchmark, argv: Sequence[str]) -> None:
        self.benchmark = benchmark
        self.header = options.read_header(benchmark.script)
        self.options = options.parse(self.header, argv, benchmark.flags)
        self.flags = self.options.flags
        if {"help", "list"} & self.flags:
            return
        self.device = self.options.device or ("gpu" if machine.gpu_count() else "cpu")
        self.preset = self.options.preset or ("full" if self.device == "gpu" else "quick")
        self.constants = self._resolve()
        self.rows = options.rows(self.constants["ROWS"], benchmark.rows)
        self.modes = benchmark.modes(self.flags)
        self.stopping_rule = self._stopping_rule()

    def _resolve(self) -> dict[str, Any]:
        constants = options.resolve(self.header, self.options, self.preset)
        self.echo = options.echo(constants, self.header, self.preset)  # before the device decides on the precision
        constants["PRECISION"] = constants["PRECISION"] or ("tf32" if self.device == "gpu" else "fp32")
        if constants["PRECISION"] == "tf32" and self.device == "cpu":
            raise UserError(options.NO_TF32)
        return constants

    def _stopping_rule(self) -> StoppingRule:
        """A whole training runs once, unless the user asks for more; a preset's PROCESSES are those of the timed blocks."""
        processes = self.constants["PROCESSES"]
        if "fit" in self.modes:
            processes = self.options.values.get("PROCESSES") or self.header.constants["PROCESSES"].default or 1
        budget_s = self.constants.get("ROW_BUDGET_S") or self.constants["ROW_LIMIT_S"]
        return StoppingRule(processes, budget_s, self.options.repeat_until)

    def run(self) -> int:
        if "help" in self.flags:
            print(options.help_text(self.header, self.benchmark.doc, self.benchmark.flags))
            return 0
        if "list" in self.flags:
            width = max(map(len, self.benchmark.rows))
            for name, row in self.benchmark.rows.items():
                needs = ["needs an NVIDIA GPU" if row.needs_gpu else "", _missing(name, row) or row.cannot({})]
                print(f"{name:{width}}  {row.what}", *(f"({need})" for need in needs if need))
            return 0
        out = self._check()
        if nothing := self._nothing_can_run():
            raise UserError(nothing)
        if self.echo:
            print(self.echo)
        if "resume" in self.flags:
            none = f"{out}: no run there" if self.options.out else "no run of today with these settings in results/"
            resume.require_run(out, none)
            if others := resume.of_other_machines(out, self.device):
                kept = f"{len(others)} records of other rows are another machine's and stay as they are"
                print(f"--resume: {out}: {kept}: {others[0]}", file=sys.stderr)
        if warning := bf16.settle():
            print(warning, file=sys.stderr)
        with records.open_run(out) as run:
            self.out = run.path
            try:
                embedded = self._data()["embedded"]  # found, fetched or refused before any row starts
                if "resume" in self.flags:
                    resume.refuse_embedded(self.out, self._names(), embedded)
            except CrashError:
                raise
            except UserError:
                run.discard()
                raise
            if embedded:
                print(f"{self.benchmark.name}: on embedded data, not on the real set: {embedded}", file=sys.stderr)
            try:
                self._write_layout()
                self._write_software()
                self._say_what_is_skipped()
                self._run_rows()
            except (CrashError, KeyboardInterrupt):
                # No space for a record, or Ctrl-C: what there is can be drawn, perhaps.
                with contextlib.suppress(UserError):
                    self._draw()
                raise
            return self._draw()

    def _check(self) -> Path:
        """The run's folder, when everything that can be refused before it is opened has been looked at. Raises UserError."""
        require("numpy", "pandas", "psutil", "tqdm")
        locate(self.options.data)
        if self.device == "gpu" and not machine.gpu_count():
            raise UserError(machine.NO_GPU)
        _ = self.gpus  # as many as asked for
        gpu_bytes = machine.gpu_memory_bytes() if self.device == "gpu" else None
        for constants in self._points():
            if impossible := self.benchmark.impossible(constants):
                raise UserError(impossible)
            sizes.check(constants, self.benchmark.values(constants), machine.memory_bytes(), gpu_bytes)
        out = Path(os.path.expanduser(self.options.out or "") or self._default_out())
        resume.refuse_other_device(out, self.device)
        if "resume" in self.flags:
            resume.refuse_other_machine(out, self._names(), self.device)
            if found := self._contradicts(out, (), self.options.values):
                raise UserError(f"--resume: {out}: {found}; leave that option out, or choose another folder with --out")
        if found := self._contradicts(out, self._names()):
            raise UserError(f"{out}: {found}: one configuration in a table; choose another folder with --out")
        return out

    def _default_out(self) -> Path:
        """Today's latest run, where it has none of these records yet and no other settings; with --resume today's latest that has
        some of them."""
        results = machine.PROJECT / "results"
        today = [out for out in folders.of_today(self.device, results) if not self._contradicts(out, ())]
        names = self._names()
        begun = [out for out in today if any((out / "rows" / f"{name}.json").exists() for name in names)]
        if "resume" in self.flags and begun:
            return begun[-1]
        latest = folders.of_today(self.device, results)[-1:]
        return (
            latest[0] if latest and latest[0] in today and latest[0] not in begun else folders.new(self.device, results)
        )

    def _contradicts(self, out: Path, replaced: Collection[str], of: Collection[str] | None = None) -> str:
        """In what a record of this script, config, device and precision differs from this run, or ""; replaced: names of some.

        of: the constants that are looked at; None: all.
        """
        names = (self.benchmark.name, self.constants["CONFIG"], "*", self.device, self.constants["PRECISION"])
        constants = {name: value for name, value in self.constants.items() if of is None or name in of}
        return resume.other_settings(out / "rows", ".".join(names), replaced, constants)

    def _points(self) -> list[dict[str, Any]]:
        """The constants that are measured with."""
        return [self.constants]

    def plan(self) -> dict[str, Any]:
        """What would run: the "script" as benchmarks/seconds.json names it, the rows that can, the processes of each within
        "budget_s", and the points that each process measures; "at_once" of them prepare side by side, on so many "gpus".

        "left_out": why the suite goes without this script, or "". "alone": the only row that can run, of a script whose tables
        compare rows along axes: the suite goes without it unless it is asked for; else "". Raises UserError for whatever else
        `run` would refuse.
        """
        self._check()
        rows = {row: self.benchmark.rows[row].framework for row in self._by_reason().get("", ())}
        return {
            "script": self._timed_name(),
            "rows": rows,
            "processes": self.stopping_rule.least,
            "points": len(self._points()),
            "budget_s": self.stopping_rule.limit_s,
            **self._side_by_side(len(rows)),
            "left_out": self._nothing_can_run(),
            "alone": next(iter(rows)) if "axes" in self.benchmark.layout and len(rows) == 1 else "",
        }

    def _without_precision(self) -> str:
        """That none of the rows has the precision, or ""."""
        precision, rows = self.constants["PRECISION"], [self.benchmark.rows[row] for row in self.rows]
        known = [name for name in schema.PRECISIONS if any(name in row.precisions for row in rows)]
        if precision in known:
            return ""
        expected = " or ".join(name for name in known if name != "tf32" or self.device == "gpu")
        return f"--precision={precision}: no row of {self.benchmark.name} that is asked for has it; expected {expected}"

    def _nothing_can_run(self) -> str:
        """Why none of the rows can, or ""; with --resume they may have been measured where they could."""
        reasons = self._by_reason()
        if (without := self._without_precision()) or "" in reasons or "resume" in self.flags:
            return without
        return f"{self.benchmark.name}: none of these rows can be measured here: {_told(reasons)}"

    def _say_what_is_skipped(self) -> None:
        reasons = self._by_reason()
        some = reasons.pop("", None)
        if reasons:
            what = "skipped" if some else "none of these rows can be measured here"
            print(f"{self.benchmark.name}: {what}: {_told(reasons)}", file=sys.stderr)

    def _by_reason(self) -> dict[str, list[str]]:
        """{why rows cannot run, or "": those rows}"""
        rows_of: dict[str, list[str]] = {}
        for row in self.rows:
            rows_of.setdefault(self._cannot_run_anywhere(row), []).append(row)
        return rows_of

    def _cannot_run_anywhere(self, row: str) -> str:
        """Why a row cannot run at any point, or ""."""
        return self._cannot_run(row)

    def _write_layout(self) -> None:
        rows = {name: row.what for name, row in self.benchmark.rows.items()}
        ours = [name for name, row in self.benchmark.rows.items() if row.ours]
        layout = {"schema": schema.SCHEMA, "benchmark": self.benchmark.name, "rows": rows, "ours": ours}
        layout |= self.benchmark.layout
        records.write_json(self.out / "layout" / f"{self.benchmark.name}.json", layout)

    def _write_software(self) -> None:
        frameworks = {self.benchmark.rows[row].framework for row in self.rows}
        able = {name: "tensorflow" if environments.missing(name) else name for name in frameworks}
        self.software = {name: software.write(self.out, environments.bill(runs_in)) for name, runs_in in able.items()}

    def _timed_name(self) -> str:
        """The script as benchmarks/seconds.json names it, such as "ptb --train --config=small"; a point by its config."""
        flags = (f"--{flag}" for flag in sorted(self.benchmark.flags.keys() & self.flags))
        return " ".join([self.benchmark.name, *flags, f"--config={self.constants['CONFIG'].partition('-')[0]}"])

    def _expected(self, rows: Collection[str]) -> tuple[dict[str, estimate.Seconds], dict[str, int]]:
        """{row: what its first process adds to a run of these rows}, {row: processes that it will get}."""
        expected, rule = estimate.Estimate(self.preset, self.device), self.stopping_rule
        first = {row: self._first(expected, row) for row in rows}
        counts = {row: expected.processes_of(seconds, rule.least, rule.limit_s) for row, seconds in first.items()}
        return {row: seconds.spread(**self._side_by_side(len(rows))) for row, seconds in first.items()}, counts

    def _first(self, expected: estimate.Estimate, row: str) -> estimate.Seconds:
        return expected.first(self._timed_name(), row, self.benchmark.rows[row].framework)

    def _side_by_side(self, rows: int) -> dict[str, float]:
        """How many processes prepare side by side in a run of so many rows, and on how many GPUs."""
        at_once = max(1, min(self.at_once, rows))
        return {"at_once": at_once, "gpus": max(1, min(len(self.gpus), at_once))}

    def _say_if_nothing_is_left(self, wanted: Sequence[object]) -> None:
        if not wanted and "resume" in self.flags:
            what = "nothing is left to measure; a row whose time was up goes on with a larger --row-budget-s"
            print(f"{self.benchmark.name} {self.constants['CONFIG']}: {what}", file=sys.stderr)

    def _due(self) -> tuple[dict[str, int], dict[str, float]]:
        """({row that is to be measured: its processes of an earlier run}, {row: the seconds that these took})"""
        wanted = [row for row in self.rows if not self._settled(row)]
        self._say_if_nothing_is_left(wanted)
        earlier = {row: self._earlier(row) for row in wanted}
        self._say_what_is_replaced((self, row) for row in wanted if not earlier[row])
        done = {row: min((len(record["blocks_ms"]) for record in earlier[row]), default=0) for row in wanted}
        spent = {row: max((record.get("spent_s", 0.0) for record in earlier[row]), default=0.0) for row in wanted}
        return done, spent

    def _run_rows(self) -> None:
        """Start the rows' processes and keep what each comes to."""
        raise NotImplementedError

    def _shown(self, row: str, process: int) -> str:
        least = self.stopping_rule.least
        return f"{row}, process {process + 1} of {max(least, process + 1)}" if least > 1 else row

    @functools.cached_property
    def at_once(self) -> int:
        """Processes of rows that prepare side by side. On a CPU one: preparing takes the processors that another one times on."""
        if self.options.at_once or self.device == "cpu" or machine.gpu_is_exclusive():
            return self.options.at_once or 1
        needs = GPU_BYTES + HELD_TIMES * 4 * max(self.benchmark.values(constants) for constants in self._points())
        room, gpus = [machine.physical_cores() // 2, machine.memory_bytes() // HOST_BYTES], max(1, len(self.gpus))
        if gpu_bytes := machine.gpu_memory_bytes():
            room.append(gpus * (gpu_bytes // needs))
        return int(max(gpus, min(gpus * AT_ONCE, *room)))

    @functools.cached_property
    def gpus(self) -> list[str]:
        """UUIDs of the GPUs that --gpus asks for; [] without it. Raises UserError."""
        count = self.options.gpus or 1
        if count == 1:
            return []
        return require_gpus(f"--gpus={count}", count, self.device)

    def _gpu_of(self, row: str) -> str | None:
        """All processes of a row are on one GPU."""
        return self._gpus_of_rows.get(row)

    @functools.cached_property
    def _gpus_of_rows(self) -> dict[str, str]:
        """Each row, the longest first, goes where the least is to do; {} where a run has one GPU.

        Rows that cannot run have one too: they may at another point, and when they can, the others stay where they are.
        """
        expected, loads, found = estimate.Estimate(self.preset, self.device), dict.fromkeys(self.gpus, 0.0), {}
        firsts = {row: self._first(expected, row) for row in self.rows if self.gpus}
        for row in sorted(firsts, key=lambda row: -sum(firsts[row])):
            found[row] = min(loads, key=loads.get)
            loads[found[row]] += firsts[row].alone or firsts[row].shared
        return found

    def _replaced_because(self, row: str) -> str:
        """What to say of a row that is measured anew though it has measured records; "" where it has none."""
        resumed = "resume" in self.flags
        if not any(resume.was_measured(path, resumed) for path in self._paths(row).values()):
            return ""
        if not resumed:
            return f"{self.out} has records of these rows, which are replaced (--out=DIR keeps both)"
        why = resume.why_anew(self._paths(row), self.benchmark.rows[row].framework, self._today(row))
        return f"--resume: measured anew: {why}"

    def _say_what_is_replaced(self, rows: Iterable[tuple["Parent", str]]) -> None:
        """One line for each reason, with the rows that have it; rows: (the parent at a point, row)."""
        rows_of: dict[str, dict[str, None]] = {}
        for parent, row in rows:
            if reason := parent._replaced_because(row):
                rows_of.setdefault(reason, {})[row] = None
        for reason, names in rows_of.items():
            print(f"{reason}: {', '.join(names)}", file=sys.stderr)

    def _settled(self, row: str) -> bool:
        """Write the record of a row that cannot run here; or find that an earlier run has finished it (--resume)."""
        reason = self._cannot_run(row)
        if not reason:
            earlier = self._earlier(row)
            return bool(earlier) and self.stopping_rule.ended(earlier)
        skipped = [self._new_record(row, mode, status="skipped", reason=reason) for mode in self.modes]
        if kept := resume.write_skipped(self.out, skipped, "resume" in self.flags):
            print(f"{row}: {reason}; its earlier record stays ({', '.join(kept)})", file=sys.stderr)
        return True

    def _cannot_run(self, row: str) -> str:
        if self.benchmark.rows[row].needs_gpu and self.device == "cpu":
            return "needs an NVIDIA GPU"
        if (precision := self.constants["PRECISION"]) not in self.benchmark.rows[row].precisions:
            return f"has no {precision}"
        cannot = self.benchmark.rows[row].cannot({**self.constants, "DEVICE": self.device})
        return cannot or _missing(row, self.benchmark.rows[row])

    def _earlier(self, row: str) -> list[dict]:
        """With --resume: this row's records of an earlier run that today's processes may be added to; else []."""
        if "resume" not in self.flags:
            return []
        return resume.earlier(self._paths(row), self.benchmark.rows[row].framework, self._today(row))

    def _paths(self, row: str) -> dict[str, Path]:
        """Of the row's records, by mode."""
        return {mode: records.path_of(self.out, self._new_record(row, mode)) for mode in self.modes}

    def _today(self, row: str) -> resume.Today:
        variables = {**machine.VARIABLES, **self._added(row)}
        return resume.Today(self.constants, self.device, self._data()["sha256"], variables)

    def _added(self, row: str) -> dict[str, str]:
        """Variables of the environment that the suite adds for a row, and that its records have."""
        return {}

    def _new_record(self, row: str, mode: str, **rest: Any) -> dict:
        protocol = self.benchmark.protocol(self.constants)
        departs = options.departs_from_protocol(self.constants, protocol)
        notes = [f"{schema.DEPARTS}: {', '.join(f'{n}={self.constants[n]}' for n in departs)}"] if departs else []
        notes += (
            [f"--gpus={len(self.gpus)}: timed beside a row on another GPU"] if self.gpus and self.at_once > 1 else []
        )
        # The published figures are of float32 arithmetic; on today's GPUs tf32 stands for it, 16 bits do not.
        differs = departs or self._data()["embedded"] or self.constants["PRECISION"] in schema.SIXTEEN_BITS
        published = {} if differs else self.benchmark.published(self.constants, row, mode, self.device)
        return schema.new_record(
            notes=notes,
            benchmark=self.benchmark.name, row=row, mode=mode, device=self.device, precision=self.constants["PRECISION"],
            config=json.loads(json.dumps(self.constants)), published=dict(published),
            environment={"software": self.software[self.benchmark.rows[row].framework], "at_once": self.at_once}, **rest,
        )  # fmt: skip

    def _job(self, process: int) -> dict[str, Any]:
        """What a row's process is told, besides its row."""
        return {"process": process, "data": self._data(), "reference": str(self.reference_path()),
                "protocol": self.constants, "matmul_flops": self._matmul()}  # fmt: skip

    def _data(self) -> dict:
        """Have the data sets found, or fetched, once; {"facts", "embedded": why the embedded ones serve, or ""}."""
        if not hasattr(self, "_data_found"):
            outcome = self._task("data", data={"option": self.options.data, "embedded": ""}, log="data")
            failure = outcome.result or {"error": outcome.reason}
            if failure.get("wrong_input"):
                raise UserError(failure["error"])
            if "error" in failure:
                raise CrashError(f"the data could not be loaded: {failure['error']}; see {self.out / outcome.log}")
            facts = outcome.result["facts"]
            embedded = facts.get("reason", "") if facts.get("source") == "embedded" else ""
            self._data_found = {"option": self.options.data, "embedded": embedded, "sha256": facts.get("sha256")}
        return self._data_found

    def reference_child(self, path: Path) -> dict[str, Any]:
        """The arguments of processes.Child for computing the reference."""
        return self._child("reference", data=self._data(), path=str(path))

    def reference_path(self) -> Path:
        """Of these constants and this data."""
        return references.path_of(self.out, self.benchmark, self.constants, self._data())

    def _matmul(self) -> float | None:
        """FLOP/s of a large matmul on this device at this precision, measured once per run (matmul.json)."""
        if not hasattr(self, "_matmul_found"):
            path, key = self.out / "matmul.json", f"{self.device}.{self.constants['PRECISION']}"
            known = records.read_figures(path) if path.exists() else {}
            for _ in range(MATMUL_TRIES):
                if not known.get(key):
                    known[key] = (self._task("matmul").result or {}).get("flops")
            records.write_json(path, known)
            self._matmul_found = known[key]
        return self._matmul_found

    def _task(self, task: str, log: str = "", **job: Any) -> processes.Outcome:
        return processes.run_child(**self._child(task, log, **job))

    def _child(self, task: str, log: str = "", watch: Callable | None = None, **job: Any) -> dict[str, Any]:
        """The arguments of processes.Child for a task."""
        # NVML counts GPUs by their place on the bus; so does CUDA, then.
        variables = {"CUDA_VISIBLE_DEVICES": ""} if self.device == "cpu" else {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        # Side by side OpenBLAS' own threads wait for each other: one, and those of models/reference/products.py.
        if self.at_once > 1 and (name := "OPENBLAS_NUM_THREADS") not in os.environ:
            variables |= {name: "1", machine.OWN: name}
        return {
            "script": Path(self.benchmark.script),
            "job": {"task": task, "constants": self.constants, "device": self.device,
                    "precision": self.constants["PRECISION"], "flags": sorted(self.flags), **job},
            "limit_s": self.constants["ROW_LIMIT_S"] if task in ("row", "points") else PREPARATION_LIMIT_S,
            "log": self._log_of(job.get("row", task)),
            "python": environments.python(self.benchmark.rows[job["row"]].framework) if "row" in job else sys.executable,
            "gpu": self._gpu_of(job["row"]) if "row" in job else None,
            "env": {**variables, "TF_CPP_MIN_LOG_LEVEL": os.environ.get("TF_CPP_MIN_LOG_LEVEL", "2")},
            "watch": watch,
        }  # fmt: skip

    def _log_of(self, row: str) -> Path:
        parts = (self.benchmark.name, self.constants["CONFIG"], row, self.device, self.constants["PRECISION"])
        return self.out / "logs" / f"{'.'.join(parts)}.log"

    def _keep(self, row: str, outcome: processes.Outcome, process: int, spent_s: float) -> bool:
        """Merge a process's result into the row's records, which the first one begins anew; whether the row goes on."""
        merged = []
        for mode in self.modes:
            path = records.path_of(self.out, self._new_record(row, mode))
            record = self._new_record(row, mode)
            if process:
                earlier = records.read_record(path)  # of a run that may have been asked for another number of them
                todays = {name: record["config"][name] for name in settings.HOW_MANY if name in record["config"]}
                record = {**earlier, "config": {**earlier["config"], **todays}}
            part = (outcome.result or {}).get(mode) or {"status": "failed", "reason": outcome.reason or NO_REASON}
            if part.get("status") == "failed":
                part["reason"] = f"{part['reason']}; see {outcome.log}"
            notes = [*part.get("notes", []), *filter(None, [outcome.note])]
            merged.append({**schema.merge_process(record, {**part, "notes": notes}), "spent_s": spent_s})
        failed = [record["mode"] for record in merged if record["status"] == "failed"]
        going_on = all(record["status"] == "ok" for record in merged) and not self.stopping_rule.enough(merged)
        time_is_up = going_on and spent_s > self.stopping_rule.limit_s
        for record in merged:
            if record["status"] == "failed":
                record = schema.without_results(record)
            elif failed and not self.stopping_rule.enough([record]):
                record["notes"].append(f"stopped: {', '.join(failed)} failed")
            try:
                records.write_record(self.out, self.stopping_rule.noted(record, time_is_up))
            except schema.RecordError as error:  # what it holds cannot be: no reason to lose the other rows
                bad = {**record, "status": "failed", "proof": None}
                bad["reason"] = (
                    f"its record cannot be: {str(error).split('; move')[0].split(': ', 1)[-1]}; see {outcome.log}"
                )
                records.write_record(self.out, schema.without_results(bad))
                going_on = False
        return going_on and not time_is_up

    def _draw(self) -> int:
        written = processes.draw(self.out)
        names = self._names()
        found, _ = records.read_run(self.out)
        failed = [r for r in found if r["status"] == "failed" and records.record_name(r) in names]
        for record in failed:
            print(f"failed: {records.record_name(record)}: {record['reason']}", file=sys.stderr)
        page = self.out / f"{self.benchmark.name}.md"
        if str(page.absolute()) in written:
            print(page)
        return 1 if failed else 0

    def _names(self) -> set[str]:
        """Of the records that this run is about."""
        same = {"benchmark": self.benchmark.name, "config": self.constants["CONFIG"], "device": self.device,
                "precision": self.constants["PRECISION"]}  # fmt: skip
        return {records.record_name({**same, "row": row, "mode": mode}) for row in self.rows for mode in self.modes}
