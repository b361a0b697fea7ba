"""What runs in one's own Keras model, and what would be faster: `python -m harness.doctor my_model.keras`.

The model is loaded in processes of its own, in safe mode, and never written.
"""

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from harness.doctor import model_files
from harness.errors import CrashError, UserError, require
from harness.record import machine, records
from harness.run import bf16, processes
from harness.run.estimate import minutes

CHILD = Path(__file__).with_name("child.py")
NO_TF32 = "--precision=tf32: a CPU has no TensorFloat-32; expected fp32, or leave it out"


class Parser(argparse.ArgumentParser):
    """A wrong command line is a UserError."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see --help")


def positive(text: str) -> int:
    value = int(text)
    if not 1 <= value <= 10**9:
        raise argparse.ArgumentTypeError(f"{text}: expected a positive number")
    return value


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line; UserError for a wrong one."""
    parser = Parser(
        prog="python -m harness.doctor",
        description="What do the recurrent layers of a Keras model run on this machine, why not cuDNN, and what would be faster? "
        "Markdown on standard output.",
        epilog="Exit status: 0 reported; 1 an internal failure; 2 wrong input. The model's file is never written.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a .keras or .h5 file; or module:function or file.py:function, which returns a model, (model, inputs) or "
        "(model, inputs, targets)",
    )
    add = parser.add_argument
    add("--batch-size", type=positive, metavar="N", help="sequences, where the model leaves it open (32)")
    add("--time-steps", type=positive, metavar="N", help="steps, where the model leaves them open (50)")
    add(
        "--input-shape", action="append", default=[], metavar="[NAME=]N,N", help="of an input, without the batch's size"
    )
    add("--padding", choices=("post", "pre", "none"), default="post", help="where masked sequences are padded (post)")
    add("--device", choices=("gpu", "cpu"), help="by default the GPU, where there is one")
    add(
        "--precision",
        choices=("fp32", "tf32"),
        help="of float32 products; by default tf32 on a GPU, as TensorFlow does",
    )
    add("--steps-per-execution", type=positive, default=20, metavar="N", help="the number to try (20)")
    add("--try", dest="tried", default="all", metavar="NAMES", help="all, none, or names of the report, separated by ;")
    add("--limit-s", type=positive, default=300, metavar="N", help="s after which a process is stopped (300)")
    add(
        "--import",
        dest="imports",
        action="append",
        default=[],
        metavar="MODULE",
        help="with the classes that a file needs",
    )
    add("--out", metavar="FILE", help="also write the report there")
    options = parser.parse_args(arguments)
    options.device = options.device or ("gpu" if machine.gpu_count() else "cpu")
    if options.precision == "tf32" and options.device == "cpu":
        raise UserError(NO_TF32)
    options.precision = options.precision or ("tf32" if options.device == "gpu" else "fp32")
    return options


def check(options: argparse.Namespace) -> None:
    """Everything that can be refused before TensorFlow is started. Raises UserError."""
    require("numpy", "psutil", "tensorflow", "keras")
    if options.device == "gpu" and not machine.gpu_count():
        raise UserError(machine.NO_GPU)
    config: dict[str, Any] = {}
    function = model_files.is_function(options.model)
    if not function:
        config = model_files.check(options.model)
    if options.out:
        out = Path(options.out)
        if out.suffix in model_files.SUFFIXES or (out.exists() and not out.is_file()):
            raise UserError(f"--out={options.out}: expected a file for the report, such as report.md")
        if not out.absolute().parent.is_dir():
            raise UserError(f"--out={options.out}: no such folder: {out.absolute().parent}")
    if options.device == "cpu" and (function or model_files.mentions_bfloat16(config)) and (warning := bf16.settle()):
        print(warning, file=sys.stderr)


def run(options: argparse.Namespace) -> int:
    """Look and print, try and print the rest; what was found is printed when it is interrupted, too. Raises UserError."""
    check(options)
    from harness.doctor import report

    parts: list[str] = []

    def tell(part: str) -> None:
        print("\n" * bool(parts) + part, end="", flush=True)
        parts.append(part)
        if options.out:
            records.write_bytes(options.out, "\n".join(parts).encode("utf-8"))

    with tempfile.TemporaryDirectory(prefix="lstm-doctor-") as folder:

        def child(task: str, **job: Any) -> dict[str, Any]:
            return _child(options, Path(folder, "logs", f"{len(os.listdir(folder))}.log"), {"task": task, **job})

        limit = f"at most {options.limit_s} s (--limit-s)"
        print(f"looking at {options.model}, {limit}", file=sys.stderr)
        found = child("look")
        if "error" in found:
            raise UserError(found["error"]) if _is_wrong_input(found) else CrashError(found["error"])
        wanted, tried, status = _wanted(options.tried, [each["name"] for each in found["candidates"]]), {}, 0
        tell(report.found_part(options.model, options, found))
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        began = time.monotonic()
        try:
            for number, name in enumerate(wanted, 1):
                left = _left(number - 1, len(wanted), time.monotonic() - began, options.limit_s)
                print(f"trying {name} ({number} of {len(wanted)}), {limit}; {left}", file=sys.stderr)
                tried[name] = child("try", candidate=name)
        except KeyboardInterrupt:
            status = 130
    tell(report.advice_part(found, tried, [name for name in wanted if name not in tried]))
    return status


def _left(done: int, count: int, took_s: float, limit_s: int) -> str:
    """How long the candidates that are left take: as long each as those before, or before the first one their limit."""
    if not done:
        return f"all together at most {minutes(count * limit_s)}"
    return f"about {minutes(took_s / done * (count - done))} left, if each takes as long as those before"


def _child(options: argparse.Namespace, log: Path, job: dict[str, Any]) -> dict[str, Any]:
    """What a process found, or {"error": why it found nothing, in a line}."""
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if options.device == "cpu" else {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    outcome = processes.run_child(
        CHILD,
        {**job, "options": vars(options)},
        limit_s=options.limit_s,
        log=log,
        env={
            **hidden,
            "TF_CPP_MIN_LOG_LEVEL": os.environ.get("TF_CPP_MIN_LOG_LEVEL", "2"),
            "KERAS_BACKEND": "tensorflow",
        },
    )
    if outcome.result is not None:
        return outcome.result
    reason = outcome.reason.replace("(ROW_LIMIT_S)", "(--limit-s); a smaller --batch-size or --time-steps takes less")
    if "SIGILL" in reason:
        reason += (
            f": an instruction that this CPU lacks; try another dtype policy, or {bf16.VARIABLE}={bf16.BELOW_AMX[-1]}"
        )
    return {"error": reason, "died": True}


def _is_wrong_input(found: dict[str, Any]) -> bool:
    """A model that cannot be run here as it was asked for: not a failure of the doctor's own."""
    return bool(found.get("wrong_input") or found.get("died")) or "out of memory" in found["error"]


def _wanted(tried: str, names: Sequence[str]) -> list[str]:
    if tried in ("all", "none"):
        return list(names) if tried == "all" else []
    wanted = [name.strip() for name in tried.split(";") if name.strip()]
    for name in wanted:
        if name not in names:
            raise UserError(f"--try={name}: no such candidate for this model; expected all, none or {'; '.join(names)}")
    return wanted


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        return run(parse(arguments))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1 if isinstance(error, CrashError) else 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
