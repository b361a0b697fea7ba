"""What a record is: its keys and their rules, new ones, and how the results of several processes become one.

A record's keys are those of RULES and OPTIONAL, schema 1 or 2. Of 2 are those whose proof counts launches, and which say how
many items a batch has. Only the standard library is imported.
"""

import copy
import math
import os
import re
import statistics
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from harness.errors import UserError
from harness.record import consistency, intervals, settings

DEPARTS = "departs from the published protocol"  # how the note begins that names the settings which do
SCHEMA = 1  # of a run's folder and its layouts
RECORDS = (1, 2)  # of a record; a new one has the last
MODES = ("fit", "train", "forward", "stack", "request")
DEVICES = ("gpu", "cpu")
PRECISIONS = ("fp32", "tf32", "fp16", "bf16")
SIXTEEN_BITS = PRECISIONS[2:]
STATUSES = ("ok", "skipped", "failed")
ERRORS = ("outputs_err", "gradients_err", "update_err", "loss_err", "spread_err")


NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


class RecordError(UserError):
    """A file of a run that does not hold what it should: names the file, what was found and what was expected."""

    def __init__(self, path: str | os.PathLike, what: str, found: Any, expected: str):
        found = found if isinstance(found, str) and found.startswith("a ") else repr(found)
        found, expected = (text if len(text) <= length else text[: length - 3] + "..."
                           for text, length in ((found, 80), (expected, 300)))  # fmt: skip
        text = f"{os.fspath(path)}: {what}: found {found}, expected {expected}; move the file away and run again with --resume"
        super().__init__("".join(character if character.isprintable() else " " for character in text))


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def number_or_null(value: Any) -> bool:
    return value is None or _number(value)


def is_name(value: Any) -> bool:
    return isinstance(value, str) and NAME.fullmatch(value) is not None


def is_text(value: Any) -> bool:
    return isinstance(value, str)


def list_of(test: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(test(item) for item in value)


def dict_of(test: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and all(test(item) for item in value.values())


def or_null(test: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or test(value)


def one_of(*choices: str) -> tuple[str, Callable[[Any], bool]]:
    return f"one of {', '.join(choices)}", lambda value: value in choices


def _config(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and is_name(value.get("CONFIG"))
        and isinstance(value.get("CONFIGS") or {}, dict)
        and _count(value.get("REPLICAS", 1))
        and isinstance(value.get("SEED", 1), int)
        and all(number_or_null(value.get(name)) for name in settings.HOW_MANY)
    )


def is_published(value: Any) -> bool:
    """{column: a text, a number, null, or a list of numbers and nulls}."""
    if not isinstance(value, dict):
        return False
    return all(isinstance(f, str) or number_or_null(f) or list_of(number_or_null)(f) for f in value.values())


def _clocks(value: Any) -> bool:
    """The states of the GPU's clocks (harness/record/machine.py), or named groups of them."""
    if not list_of(lambda item: isinstance(item, dict))(value):
        return False
    states = [state for entry in value for state in (entry, *entry.values()) if isinstance(state, dict)]
    return all(isinstance(state.get("throttle_reasons"), list | None) for state in states)


def _step(value: Any) -> bool:
    """{median, min, max}, as records of earlier commits have it, or with processes and interval (harness/record/intervals.py)."""
    if not isinstance(value, dict):
        return False
    figures = {**value}
    processes, interval = figures.pop("processes", 1), figures.pop("interval", None)
    if set(figures) != {"median", "min", "max"} or not all(map(_number, figures.values())) or not _count(processes):
        return False
    if interval is not None and not (list_of(_number)(interval) and len(interval) == 2 and processes > 1):
        return False
    low, high = interval or (value["median"], value["median"])
    return 0 < value["min"] <= value["median"] <= value["max"] and 0 < low <= value["median"] <= high


def _over_0(value: Any) -> bool:
    return _number(value) and value > 0


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _warmup(value: Any) -> bool:
    """How long the warm-up of one process took, in one mode: harness/measure/clocks.py."""
    return (
        isinstance(value, dict)
        and set(value) == {"process", "seconds", "batches", "settled"}
        and _count(value["batches"])
        and all(_number(value[key]) and value[key] >= 0 for key in ("process", "seconds"))
        and isinstance(value["settled"], bool)
    )


def _replicas(value: Any) -> bool:
    """Of a row that trains on several devices (harness/measure/replicas.py)."""
    return (
        isinstance(value, dict)
        and set(value) == {"gpus", "workers", "hosts", "names", "link", "nccl", "communication_ms"}
        and _count(value["gpus"])
        and _count(value["workers"])
        and all(list_of(is_text)(value[key]) for key in ("hosts", "names"))
        and all(or_null(is_text)(value[key]) for key in ("link", "nccl"))
        and number_or_null(value["communication_ms"])
    )


def _option(value: Any) -> bool:
    """Of a row that is an option of a Keras layer (harness/measure/options.py)."""
    return (
        isinstance(value, dict)
        and set(value) == {"ran", "error", "fit_ms"}
        and all(is_text(value[key]) for key in ("ran", "error"))
        and number_or_null(value["fit_ms"])
    )


LATENCY = {"p50_ms", "p99_ms", "p999_ms", "max_ms", "requests", "joules"}


def _latency(value: Any) -> bool:
    """Percentiles, null where so few requests have no such one; Joules of one request."""
    return (
        isinstance(value, dict)
        and set(value) == LATENCY
        and all(map(number_or_null, value.values()))
        and _number(value["max_ms"])
        and _count(value["requests"])
    )


def _one_step(value: Any) -> bool:
    """Percentiles of single steps, p99 null where so few have none."""
    return (
        isinstance(value, dict)
        and set(value) == {"p50_ms", "p99_ms", "steps"}
        and _over_0(value["p50_ms"])
        and or_null(_over_0)(value["p99_ms"])
        and _count(value["steps"])
    )


def _joules(value: Any) -> bool:
    """Of a GPU: of a batch, or of a whole training and an epoch of it, validation included."""
    return isinstance(value, dict) and set(value) in ({"batch"}, {"training", "epoch"}) and dict_of(_over_0)(value)


def _throughput(value: Any) -> bool:
    return isinstance(value, dict) and _number(value.get("value")) and isinstance(value.get("unit"), str)


def _proof(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("ok"), bool)
        and all(number_or_null(value.get(key)) for key in ERRORS)
        and all(isinstance(value.get(key, {}), dict) for key in ("limit", "kernel", "worst_at"))
        and list_of(is_text)(value.get("failed", []))
        and dict_of(_number)(value.get("limit", {}))
        and _kernels((value.get("kernel") or {}).get("kernels") or {})
    )


def _kernels(value: Any) -> bool:
    """Names, or {name: ms}."""
    return isinstance(value, dict) or list_of(is_text)(value)


def _environment(value: Any) -> bool:
    objects = ("data", "packages", "variables")
    if not isinstance(value, dict) or not all(isinstance(value.get(key), dict | None) for key in objects):
        return False
    if not all(isinstance(text, str) for text in (value.get("variables") or {}).values()):
        return False
    if not isinstance((value.get("data") or {}).get("sha256"), dict | None):
        return False
    return or_null(list_of(is_text))(value.get("notes"))


_NUMBER_OR_NULL = ("a number or null", number_or_null)
_STRINGS = ("a list of strings", list_of(is_text))
_FIGURES = ("an object of numbers or nulls", dict_of(number_or_null))

# key: (what is expected, test, default). A default of `...` means that new_record has to be given the value.
RULES: dict[str, tuple[str, Callable[[Any], bool], Any]] = {
    "schema": ("1 or 2", lambda value: value is not True and value in RECORDS, RECORDS[-1]),
    "benchmark": ("a name of letters, digits, _ and -", is_name, ...),
    "row": ("a name of letters, digits, _ and -", is_name, ...),
    "mode": (*one_of(*MODES), ...),
    "device": (*one_of(*DEVICES), ...),
    "precision": (*one_of(*PRECISIONS), ...),
    "status": (*one_of(*STATUSES), "ok"),
    "reason": ("one line of text", lambda value: isinstance(value, str) and "\n" not in value, ""),
    "config": (
        "an object whose CONFIG is a name, CONFIGS an object, REPLICAS a count, SEED whole and limits numbers",
        _config,
        ...,
    ),
    "blocks_ms": ("a list of lists of ms", list_of(list_of(lambda ms: _number(ms) and ms > 0)), []),
    "step_ms": ("null or {median, min, max, processes, interval} in ms, min <= median <= max", or_null(_step), None),
    "first_call_s": (*_NUMBER_OR_NULL, None),
    "throughput": ("null or {value, unit}", or_null(_throughput), None),
    "losses": ("a list of numbers or nulls", list_of(number_or_null), []),
    "proof": ("null or {ok, outputs_err, gradients_err, update_err, limit, kernel}", or_null(_proof), None),
    "memory_peak_bytes": ("null or an object of numbers", or_null(_FIGURES[1]), None),
    "gpu_utilisation": (*_NUMBER_OR_NULL, None),
    "flops_per_batch": (*_NUMBER_OR_NULL, None),
    "share_of_matmul": (*_NUMBER_OR_NULL, None),
    "clocks": ("a list of objects", _clocks, []),
    "notes": (*_STRINGS, []),
    "published": ("an object of figures", is_published, {}),
    "environment": (
        "an object with objects data (with sha256), packages and variables (of texts) and a list notes",
        _environment,
        {},
    ),
}
OPTIONAL: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "accuracy": _FIGURES,
    "perplexity": _FIGURES,
    "test_perplexity_by_seed": _FIGURES,  # test perplexity of each process's training, by its seed
    "fit_s": _NUMBER_OR_NULL,
    "items_per_batch": ("a number over 0", _over_0),
    "epoch_s": ("a list of numbers", list_of(_number)),
    "spent_s": ("seconds that the row's processes took", lambda value: _number(value) and value >= 0),
    "warmup": ("a list of {process, seconds, batches, settled}", list_of(_warmup)),
    "replicas": ("{gpus, workers, hosts, names, link, nccl, communication_ms}", _replicas),
    "option": ("{ran, error, fit_ms}", _option),
    "latency": ("{p50_ms, p99_ms, p999_ms, max_ms, requests, joules}", _latency),
    "one_step": ("{p50_ms, p99_ms, steps}", _one_step),
    "joules": ("{batch} or {training, epoch}, numbers over 0", _joules),
    # of --repeat-until
    "repeat_until": ("a fraction over 0, up to 1", lambda value: _number(value) and 0 < value <= 1),
}
RESULTS = ("step_ms", "throughput", "fit_s", "accuracy", "perplexity", "epoch_s")  # an "ok" row has one of them


def validate(record: Any, path: str | os.PathLike) -> dict:
    """Returns the record; raises RecordError where a key, a type or the sense of it is not that of its schema."""
    if not isinstance(record, dict):
        raise RecordError(path, "record", record, "a JSON object")
    if record.get("schema") not in RECORDS:  # first, since another schema explains every other difference
        raise RecordError(path, "schema", record.get("schema", "a record without one"), "1 or 2")
    for key, (expected, test, _) in RULES.items():
        if key not in record:
            raise RecordError(path, "record", f"a record without {key!r}", f"{expected} under {key!r}")
        if not test(record[key]):
            raise RecordError(path, key, record[key], expected)
    for key in [key for key in record if key not in RULES]:
        if key not in OPTIONAL:
            raise RecordError(path, "record", f"a key {key!r}", "only the keys of its schema")
        if not OPTIONAL[key][1](record[key]):
            raise RecordError(path, key, record[key], OPTIONAL[key][0])
    if record["status"] != "ok":
        if not record["reason"]:
            raise RecordError(path, "reason", "", f"why the row is {record['status']}")
    elif not _proven(record["proof"]):
        raise RecordError(path, "status", "ok", "failed, since the row has no proof that held")
    elif not any(record.get(key) for key in RESULTS):
        raise RecordError(path, "status", "ok", "a time or an accuracy in the record, or another status")
    if _contradicts(record["step_ms"], record["blocks_ms"]):
        raise RecordError(path, "step_ms", record["step_ms"], "what its blocks_ms come to")
    for what, found, expected in consistency.contradictions(record):
        raise RecordError(path, what, found, expected)
    return record


def _proven(proof: Mapping | None) -> bool:
    """Whether there is a proof, and it held."""
    return bool(proof) and proof.get("ok") is True and not proof.get("failed")


def _contradicts(step: Mapping | None, blocks_ms: list[list[float]]) -> bool:
    """Whether a step_ms with its processes or interval is not that of the blocks; without, an earlier commit's rule made it."""
    if not step or not {"processes", "interval"} & step.keys():
        return False
    blocks = list(filter(None, blocks_ms))
    if not blocks:
        return True
    known, found = ({**s, "interval": s.get("interval") or (0.0, 0.0)} for s in (step, intervals.step_of(blocks)))
    figures = [(known[key], found[key]) for key in ("median", "min", "max", "processes") if key in known]
    figures += zip(known["interval"], found["interval"], strict=True)
    return not all(math.isclose(*pair, rel_tol=1e-9) for pair in figures)


def new_record(*, benchmark: str, row: str, mode: str, device: str, precision: str, config: dict, **rest: Any) -> dict:
    """A record with every key of the schema, by default "ok" and without figures; unknown keys raise TypeError."""
    given = dict(benchmark=benchmark, row=row, mode=mode, device=device, precision=precision, config=config, **rest)
    unknown = given.keys() - RULES.keys() - OPTIONAL.keys()
    if unknown:
        raise TypeError(f"new_record: not keys of a record: {', '.join(sorted(unknown))}")
    defaults = {key: default for key, (_, _, default) in RULES.items()}
    return copy.deepcopy({**defaults, **given})  # records must not share the lists of the defaults


# What merge_process computes from all processes; of every other key the first process's value is kept.
MERGED = {"blocks_ms", "step_ms", "share_of_matmul", "status", "reason", "proof", "clocks", "notes", "environment",
          "memory_peak_bytes", "items_per_batch", "unit", "warmup", "test_perplexity_by_seed"}  # fmt: skip


def merge_process(record: dict, part: Mapping[str, Any]) -> dict:
    """Returns the record with the result of one more process added; the record itself is left as it was.

    part: any of the record's keys, where `blocks_ms` is this process's list (ms per batch, one per block), and
    `items_per_batch` with `unit` (such as 128, "sequences/s") from which throughput is computed anew.
    Blocks, clocks, warm-ups, test perplexities and notes of all processes are kept, errors and memory are the worst of all;
    losses, the first call and everything else are those of the first process that has them. A process that failed, or has no
    proof that held, makes the row failed.
    """
    known = RULES.keys() | OPTIONAL.keys() | {"unit"}
    if part.keys() - known:
        raise TypeError(f"merge_process: not keys of a process's result: {', '.join(sorted(part.keys() - known))}")
    merged = {**record}
    for key in part:  # in the order given, so that the same results give the same file
        if key not in MERGED and merged.get(key) in (None, [], {}):
            merged[key] = part[key]
    merged["clocks"] = [*record["clocks"], *(part.get("clocks") or [])]
    if part.get("warmup"):
        merged["warmup"] = [*record.get("warmup", []), *part["warmup"]]
    if part.get("test_perplexity_by_seed"):
        merged["test_perplexity_by_seed"] = {
            **record.get("test_perplexity_by_seed", {}),
            **part["test_perplexity_by_seed"],
        }
    merged["notes"] = list(dict.fromkeys([*record["notes"], *(part.get("notes") or [])]))
    known_facts = {key: value for key, value in record["environment"].items() if value is not None}
    merged["environment"] = {**part.get("environment", {}), **known_facts}
    merged["memory_peak_bytes"] = _largest([record["memory_peak_bytes"], part.get("memory_peak_bytes")])
    _merge_times(merged, record, part)
    if part.get("proof"):
        merged["proof"] = _worst_proof(record["proof"], part["proof"])
    if STATUSES.index(part.get("status", "ok")) > STATUSES.index(record["status"]):
        reason = part.get("reason") or (merged["proof"] or {}).get("reason") or "the process gave no reason"
        merged["status"], merged["reason"] = part["status"], " ".join(reason.split())
    elif merged["status"] == "ok" and not part.get("proof"):
        merged["status"], merged["reason"] = "failed", "not proven: the process gave no proof"
    elif merged["status"] == "ok" and not _proven(merged["proof"]):
        merged["status"] = "failed"
        failed = ", ".join(merged["proof"]["failed"]) or "it does not say that it held"
        merged["reason"] = merged["proof"]["reason"] or f"proof failed: {failed}"
    return merged


def _merge_times(merged: dict, record: dict, part: Mapping[str, Any]) -> None:
    """Adds the part's blocks and computes what follows from the time of a step: throughput and share."""
    blocks = list(part.get("blocks_ms") or [])
    if not blocks:
        return
    merged["blocks_ms"] = [*record["blocks_ms"], blocks]
    merged["step_ms"] = intervals.step_of(merged["blocks_ms"])
    median = merged["step_ms"]["median"]
    if part.get("items_per_batch"):
        merged["items_per_batch"] = part["items_per_batch"]
        merged["throughput"] = {"value": part["items_per_batch"] / (median / 1000), "unit": part["unit"]}
    # The share goes as 1/step: the first process's one, brought from the step it was measured at to the step of all.
    if record["share_of_matmul"] is not None and record["step_ms"]:
        merged["share_of_matmul"] = record["share_of_matmul"] * record["step_ms"]["median"] / median
    elif part.get("share_of_matmul") is not None:
        merged["share_of_matmul"] = part["share_of_matmul"] * statistics.median(blocks) / median


def timed_by_process(record: dict) -> dict:
    """The record with its times computed from its blocks by today's rule, whatever the rule when it was written."""
    blocks = list(filter(None, record["blocks_ms"]))
    if not record["step_ms"] or not blocks:
        return record
    step = intervals.step_of(blocks)
    faster = record["step_ms"]["median"] / step["median"]
    if not math.isfinite(faster):  # its figures are of no machine
        return record
    timed = {**record, "step_ms": step}
    if record["throughput"]:
        timed["throughput"] = {**record["throughput"], "value": record["throughput"]["value"] * faster}
    if record["share_of_matmul"] is not None:
        timed["share_of_matmul"] = record["share_of_matmul"] * faster
    return timed


def without_results(record: dict) -> dict:
    """The record of a row that failed after some of its processes: without their times, which nothing proves any more."""
    figures = (*RESULTS, "items_per_batch", "latency", "one_step", "joules", "test_perplexity_by_seed")
    kept = {key: value for key, value in record.items() if key in RULES or key not in figures}
    return {**kept, "blocks_ms": [], "step_ms": None, "throughput": None, "share_of_matmul": None}


def _largest(peaks: Iterable[Mapping | None]) -> dict | None:
    largest: dict = {}
    for peak in peaks:
        for key, value in (peak or {}).items():
            known = largest.get(key)
            largest[key] = value if known is None else known if value is None else max(known, value)
    return largest or None


def _worst_proof(first: Mapping | None, second: Mapping) -> dict:
    """One proof for several processes: ok where all are, the errors largest for their limits, the kernel of one that failed.

    An error that is not finite, or null in a process that failed this very proof, is worse than any number: null.
    """
    both = [proof for proof in (first, second) if proof]
    worst = {**both[0], "worst_at": {**both[0].get("worst_at", {})}, "limit": {**both[0].get("limit", {})}}
    if both[0].get("ok") and second.get("kernel") and not second.get("ok"):
        worst["kernel"] = second["kernel"]
    failed = dict.fromkeys(name for proof in both for name in proof.get("failed", []))
    reasons = dict.fromkeys(proof["reason"] for proof in both if proof.get("reason"))
    if len({proof["start"] for proof in both if proof.get("start")}) > 1:
        failed["start"], reasons["start: a process started from other weights than the first"] = None, None
    for key in ERRORS:
        name = key.removesuffix("_err")
        known = [proof for proof in both if proof.get(key) is not None]
        lost = any(proof.get(key) is None and name in proof.get("failed", []) for proof in both)
        if not all(math.isfinite(proof[key]) for proof in known):
            lost, failed[name], reasons[f"{name}: error is not finite"] = True, None, None
        most = max(known, key=lambda proof: proof[key] / (proof.get("limit", {}).get(name) or 1.0), default={})
        worst[key] = None if lost else most.get(key)
        for about in ("worst_at", "limit"):
            if name in most.get(about, {}):
                worst[about][name] = most[about][name]
    worst["ok"] = all(proof.get("ok") is True for proof in both) and not failed
    return {**worst, "failed": list(failed), "reason": "; ".join(reasons)}
