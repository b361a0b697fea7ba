"""Which benchmarks a run of the suite starts, and with which options: those of their headers, and what the user wrote.

Reads the scripts' headers, never executes them; only the standard library is imported.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.data.location import EMBEDDED
from harness.errors import UserError
from harness.record import machine
from harness.run import options
from harness.run.options import Constant, Header, Options

# Scripts that run where --only names them; the first, too, where more than one GPU is visible.
WITH_SEVERAL_GPUS, ASKED_FOR = ("multi_gpu",), ("latency", "options")
PRESETS = ("quick", "full")
SCRIPT_FLAGS = {"ptb": {"train": "ptb: the whole training schedule of --config, with test perplexity"}}
OWN_FLAGS = {
    "check": "only try what each framework needs here (--peers: PyTorch and JAX too; --gpus: so many GPUs), in under a minute",
    "peers": "run_all.sh: install PyTorch and JAX too, into .venv/torch and .venv/jax; without them their rows are skipped",
    "no_install": "run_all.sh: use this Python as it is (PYTHON=... names another), install nothing",
    "dry_run_install": "run_all.sh: print what would be installed on this machine, and stop",
}
# What a run's run.json does not note, since it says neither what runs nor how it is timed.
NOT_NOTED = ("--out", "--resume", *(f"--{name.replace('_', '-')}" for name in OWN_FLAGS))


@dataclass(frozen=True)
class Job:
    """One start of one script."""

    name: str
    arguments: tuple[str, ...]  # the job's own, without --out and the like

    def __str__(self) -> str:
        """What tells it from the suite's other jobs; the script itself echoes every constant that was overridden."""
        return " ".join([self.name, *(a for a in self.arguments if a.startswith("--config=") or "=" not in a)])


def scripts(folder: Path) -> list[str]:
    """The names of the benchmarks in a folder, in the order in which they run: a script that is put there is one."""
    return sorted(path.stem for path in folder.glob("[!_]*.py"))


def read_headers(folder: Path) -> dict[str, Header]:
    """The headers of the suite's scripts by name, in the order in which they run. Raises UserError."""
    names = scripts(folder)
    if not names:
        raise UserError(f"{folder}: holds no script, expected the benchmarks; restore them from the repository")
    return {name: options.read_header(folder / f"{name}.py") for name in names}


def parse(argv: Sequence[str], headers: Mapping[str, Header]) -> tuple[Options, list[str]]:
    """(the command line, the chosen benchmarks). Raises UserError, also for a value that one of them would refuse."""
    merged: dict[str, Constant] = {"ONLY": Constant("mnist,ptb", "", 0)}
    configs: dict[str, dict] = {}
    for header in headers.values():
        configs |= header.configs
        merged = {**header.constants, **merged}
    everything = Header("the scripts of benchmarks/", {**merged, "CONFIGS": Constant(configs, "", 0)})
    script_flags = {flag: text for flags in SCRIPT_FLAGS.values() for flag, text in flags.items()}
    found = options.parse(everything, argv, {**OWN_FLAGS, **script_flags})
    if {"peers", "no_install"} <= found.flags:
        by_hand = "name Pythons that have them, TORCH_PYTHON=... and JAX_PYTHON=..."
        raise UserError(f"--peers and --no-install: expected one of them; leave --no-install out, or {by_hand}")
    left_out: set[str] = set()
    if not {"help", "list"} & found.flags:  # which import nothing that counts GPUs
        kinds = [gpu.name for gpu in machine.gpus()[:2]]
        several = found.device != "cpu" and len(kinds) == 2 and kinds[0] == kinds[1]
        left_out = {*ASKED_FOR, *(() if several else WITH_SEVERAL_GPUS)}
    usual = ",".join(name for name in headers if name not in left_out)
    chosen = _choose(str(found.values.pop("ONLY", usual)), list(headers))
    for name in [*found.values, *(found.flags & script_flags.keys())]:
        having = [
            script for script in headers if name in headers[script].constants or name in SCRIPT_FLAGS.get(script, {})
        ]
        if not set(having) & set(chosen):
            option = f"--{name.lower().replace('_', '-')}"
            raise UserError(f"{option}: only in {', '.join(having)}; leave it out, or add {having[0]} to --only")
    config = found.values.get("CONFIG")
    if config is not None and not any(config in headers[name].configs for name in chosen):
        having = [name for name in headers if config in headers[name].configs]
        raise UserError(
            f"--config={config}: only in {', '.join(having)}; name another config, or add {having[0]} to --only"
        )
    return found, chosen


def noted(found: Options) -> list[str]:
    """The options that a run's run.json notes, from which --resume goes on; each once, as it was written last."""
    written = [f"--data={data_of(found)}" if option.startswith("--data=") else option for option in found.written]
    return [option for option in last_of_each(written) if option.partition("=")[0] not in NOT_NOTED]


def last_of_each(options: Sequence[str]) -> list[str]:
    """Options, of each name the last."""
    return list({option.partition("=")[0]: option for option in options}.values())


def data_of(found: Options) -> str | Path:
    """What --data says, from whatever folder a script is started."""
    return found.data if found.data == EMBEDDED else Path(os.path.expanduser(found.data)).absolute()


def _choose(only: str, known: list[str]) -> list[str]:
    try:
        return options.rows(only, known)
    except UserError as error:
        raise UserError(str(error).replace("--rows", "--only").replace("no such row", "no such benchmark")) from None


def plan(found: Options, chosen: Sequence[str], headers: Mapping[str, Header], preset: str,
         rows: Mapping[str, Sequence[str]] | None = None) -> list[Job]:  # fmt: skip
    """The jobs of a preset, changed as the user wishes. Raises UserError.

    What the user wrote replaces the job's own option. A later job of the same script that it contradicts falls away:
    `--config=large` replaces the first PTB job's config, and the training of the small one is not what was asked for.
    Rows are no contradiction: the rows that the user named are trained.

    rows: the rows of each script; one that has none of those that the user named falls away. None: not looked at.
    """
    jobs: list[Job] = []
    starts = [(name, own.split()) for name in headers if name in chosen for own in runs_of(headers[name], preset)]
    for name, own in starts:
        header, flags = headers[name], SCRIPT_FLAGS.get(name, {})
        written = {key: value for key, value in found.values.items() if key in header.constants}
        if written.get("CONFIG", "") not in ("", *header.configs):
            del written["CONFIG"]
        if "ROWS" in written and rows is not None:
            known = [row for row in _named(written["ROWS"]) if row in ("all", *rows[name])]
            if not known:
                continue
            written["ROWS"] = ",".join(known)
        preset_options = options.parse(header, own, flags)
        kept = {key: value for key, value in preset_options.values.items() if key not in written}
        given = {key: value for key, value in preset_options.values.items() if key != "ROWS"}
        contradicted = any(written.get(key, value) != value for key, value in given.items())
        if contradicted and any(job.name == name for job in jobs):
            continue
        values = {**kept, **written}
        arguments = [f"--{key.lower().replace('_', '-')}={_text(value)}" for key, value in values.items()]
        arguments += [f"--{flag}" for flag in flags if flag in found.flags | preset_options.flags]
        options.parse(header, arguments, flags)  # what this script would refuse is refused before the first one runs
        job = Job(name, tuple(arguments))
        jobs += [job] if job not in jobs else []
    return jobs


def runs_of(header: Header, preset: str) -> list[str]:
    """The options of each start of a script, from the table RUNS of its header; without one, a single start."""
    runs = header.constants["RUNS"].default if "RUNS" in header.constants else {}
    return runs.get(preset, [""])


def _named(rows: object) -> list[str]:
    return [name.strip() for name in str(rows).split(",") if name.strip()]


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def list_rows(folder: Path, names: Sequence[str]) -> dict[str, str]:
    """What each script prints for --list. Raises UserError."""
    return dict(zip(names, _ask(folder, [[name, "--list"] for name in names]), strict=True))


def plans(folder: Path, jobs: Sequence[Job], common: Sequence[str]) -> list[dict]:
    """What each job would run (harness.run.parent.Parent.plan). Raises UserError for what its script would refuse."""
    return [
        json.loads(answer) for answer in _ask(folder, [[job.name, "--plan", *job.arguments, *common] for job in jobs])
    ]


def _ask(folder: Path, commands: Sequence[Sequence[str]]) -> list[str]:
    """What each script prints; `commands`: its name, then its options."""
    project = str(Path(__file__).resolve().parents[2])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [project, os.environ.get("PYTHONPATH")]))}
    asked = json.dumps([[str(folder / f"{name}.py"), *rest] for name, *rest in commands])
    command = [sys.executable, "-m", "harness.run.listing", asked]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=environment)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise UserError(f"{commands[0][1]} of benchmarks/ failed: {last}")
    found = []
    for (name, what, *_), (status, printed, why) in zip(commands, json.loads(done.stdout), strict=True):
        if status == 2 and why.startswith("error: "):
            raise UserError(why.removeprefix("error: "))
        if status:
            raise UserError(f"benchmarks/{name}.py {what} failed: {why}")
        found.append(printed)
    return found


def row_names(listing: str) -> list[str]:
    """The first word of each line of a script's --list, where it can be the name of a row."""
    return [match[1] for match in re.finditer(r"^\s*([a-z][a-z0-9_]*)(?:\s.*)?$", listing, re.MULTILINE)]
