"""What figures of a record have to fit together, and the records of a page: found when they are read.

A record may be edited, or put together of several, and be of the right keys and kinds still. Only the standard library is
imported.
"""

import json
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from harness.record import settings

_TIMED = ("outputs", "loss", "spread")
NEEDED = {  # by mode: the errors that its proof has (harness/measure: steps.py, fit.py, training.py, requests.py)
    "fit": ("outputs", "gradients", "update", "loss"),
    "train": (*_TIMED, "gradients", "update"),
    "forward": _TIMED,
    "stack": (*_TIMED, "gradients"),
    "request": ("outputs",),
}
PER_SEQUENCE = {"words/s": "TIME_STEPS"}  # unit: the constant that says how many a sequence has; of others it is one
REQUESTS = "requests/s"  # the unit of which a batch is one
WATTS = (1.0, 5000.0)  # between which a GPU's mean power lies
FIRST_SPREAD_LIMIT = 0.7  # the widest there was: the first records of schema 1 kept no limit of the spread
Contradiction = tuple[str, str, str]  # what is wrong, what was found, what was expected


def contradictions(record: Mapping[str, Any]) -> Iterator[Contradiction]:
    """What cannot all be true in a record of the schema's keys that says "ok"; others have no figures."""
    if record["status"] == "ok":
        yield from _errors(record)
        yield from _times(record)
        yield from _counts(record)
        yield from _training(record) if record["mode"] == "fit" else _steps(record)
        yield from _requests(record)
        yield from _single_steps(record)
        yield from _energy(record)
        yield from _devices(record)
        if record["schema"] > 1:
            yield from _since_2(record)


def _errors(record: Mapping) -> Iterator[Contradiction]:
    """No error is missing that the mode needs, or over its limit; a layer that is left out errs by 1."""
    proof, needed = record["proof"], NEEDED[record["mode"]]
    limits = proof.get("limit") or {}
    for name in needed:
        if proof.get(f"{name}_err") is None:
            yield "proof", f"a {record['mode']} record without {name}_err", f"errors of {', '.join(needed)}"
    for name in ("outputs", "gradients", "update", "loss", "spread"):
        error, limit = proof.get(f"{name}_err"), limits.get(name)
        if limit is None and name == "spread" and record["schema"] == 1:
            limit = FIRST_SPREAD_LIMIT
        if error is None:
            continue
        if limit is None or not 0 < limit < 1:
            yield "proof", f"a limit of {name} that is {limit}", "one between 0 and 1 for each error"
        elif not 0 <= error <= limit:
            yield "proof", f"a {name}_err of {error:g} in a record that is ok", f"at most its limit, {limit:g}"


def _times(record: Mapping) -> Iterator[Contradiction]:
    """Blocks, the time of a step and the throughput are of each other."""
    step, throughput = record["step_ms"], record["throughput"]
    every = [ms for blocks in record["blocks_ms"] for ms in blocks]
    if not (every and step and throughput):
        yield "throughput", "a record without blocks_ms, step_ms or throughput", "all three in a record that is ok"
        return
    if not {"processes", "interval"} & step.keys():  # of an earlier commit's rule; today's is held by the schema
        figures = {"median": statistics.median(every), "min": min(every), "max": max(every)}
        if not all(_same(step[key], figure) for key, figure in figures.items()):
            yield "step_ms", f"a {json.dumps(step)}", f"what its blocks_ms come to, {figures}"
    items, unit = throughput["value"] * step["median"] / 1e3, throughput["unit"]
    known = [record.get("items_per_batch"), _items(record["config"], unit)]
    for expected in known:
        if expected is not None and not _same(items, expected):
            found = f"a throughput that is {items:g} items in each {step['median']:g} ms"
            yield "throughput", found, f"{expected:g}, the items of a batch"


def _items(config: Mapping, unit: str) -> int | None:
    """Items of a batch by the constants; None where they do not say it."""
    if unit == REQUESTS:
        return 1
    names = ["BATCH_SIZE", *filter(None, [PER_SEQUENCE.get(unit)])]
    counts = [config.get(name) for name in names]
    return math.prod(counts) if all(type(count) is int for count in counts) else None


def _counts(record: Mapping) -> Iterator[Contradiction]:
    """Processes, blocks and warm-ups are as many as the settings say."""
    c, blocks = record["config"], record["blocks_ms"]
    most = math.inf if record.get("repeat_until") else c.get("PROCESSES")  # fewer where a row's time was up
    if isinstance(most, int) and len(blocks) > most:
        yield "blocks_ms", f"a row of {len(blocks)} processes", f"at most PROCESSES={c['PROCESSES']}"
    name = "EPOCHS" if record["mode"] == "fit" else "BLOCKS"
    for own in blocks if isinstance(c.get(name), int) else []:
        if len(own) != c[name]:
            yield "blocks_ms", f"a process of {len(own)} blocks", f"{name}={c[name]} in each"
    warmups = [warmup["process"] for warmup in record.get("warmup", [])]
    if warmups and warmups != list(range(len(blocks))):
        yield "warmup", f"a list of processes {warmups}", f"one of each of {len(blocks)} processes"
    processes = {state["process"] for state in record["clocks"] if isinstance(state.get("process"), int)}
    if processes - set(range(len(blocks))):
        yield "clocks", f"a list of processes {sorted(processes)}", f"those of {len(blocks)} processes"


def _devices(record: Mapping) -> Iterator[Contradiction]:
    """A row trained on as many devices as its settings say."""
    devices, replicas = (record.get("replicas") or {"gpus": 1})["gpus"], record["config"].get("REPLICAS", 1)
    if devices != replicas:
        yield "replicas", f"a row on {devices} device{'s' * (devices > 1)}", f"REPLICAS={replicas}"


def _steps(record: Mapping) -> Iterator[Contradiction]:
    """Steps that were timed have nothing of a whole training."""
    for key in ("fit_s", "epoch_s", "accuracy", "perplexity", "test_perplexity_by_seed"):
        if record.get(key):
            yield key, f"a {record['mode']} record with {key}", "it in a record of a whole training alone"


def _requests(record: Mapping) -> Iterator[Contradiction]:
    """Requests have the times of single ones, which fit their means; nothing else has."""
    found = record.get("latency")
    if (record["mode"] == "request") != bool(found):
        yield (
            "latency",
            f"a {record['mode']} record with latency {found}",
            "it in records of requests, and in them alone",
        )
        return
    if not found:
        return
    times = [found[key] for key in ("p50_ms", "p99_ms", "p999_ms", "max_ms") if found[key] is not None]
    if times != sorted(times):
        yield "latency", f"a latency of {times} ms", "percentiles that rise to max_ms"
    every = [ms for blocks in record["blocks_ms"][:1] for ms in blocks]  # it is of the first process
    mean = sum(every) / max(1, len(every))
    if not times[0] / 2 <= mean * 1.01 or not mean <= times[-1] * 1.01:  # half of them take p50 at the least
        yield "latency", f"a latency of {times} ms", f"times whose mean is {mean:g} ms"


def _single_steps(record: Mapping) -> Iterator[Contradiction]:
    """Steps that were timed one by one are those of a mode whose blocks are of steps; of fewer than a hundred no p99 is known."""
    found = record.get("one_step")
    if not found:
        return
    if record["mode"] not in ("train", "forward", "stack"):
        yield "one_step", f"a {record['mode']} record with one_step", "it in records of steps alone"
    median, high = found["p50_ms"], found["p99_ms"]
    if high is not None and high < median:
        yield "one_step", f"a p99_ms of {high} below a p50_ms of {median}", "percentiles that rise"
    if (high is None) != (1 < found["steps"] < 100):
        yield "one_step", f"a p99_ms of {high} of {found['steps']} steps", "one where a step of a hundred lies above it"


def _energy(record: Mapping) -> Iterator[Contradiction]:
    """Joules are a GPU's, of what the mode times, at a power that a GPU may have."""
    found = record.get("joules")
    if not found:
        return
    mode, whole = record["mode"], "training" in found
    if record["device"] != "gpu" or whole != (mode == "fit") or mode == "request":
        has = " and ".join(found)
        yield (
            "joules",
            f"a {mode} record on a {record['device']} with Joules of {has}",
            "a GPU's, of what the mode times",
        )
        return
    seconds = record["fit_s"] if whole else statistics.median(record["blocks_ms"][0]) / 1e3
    watts = found["training" if whole else "batch"] / seconds
    if not WATTS[0] <= watts <= WATTS[1]:
        yield "joules", f"a mean power of {watts:g} W", f"one between {WATTS[0]:g} and {WATTS[1]:g} W"
    if whole and not _same(found["epoch"] * len(record["epoch_s"]), found["training"]):
        yield (
            "joules",
            f"a {json.dumps(found)} of {len(record['epoch_s'])} epochs",
            "an epoch's, that many times, in all",
        )


def _training(record: Mapping) -> Iterator[Contradiction]:
    """The epochs of a whole training are as many as its losses, and no longer than all of it."""
    epochs, blocks = record.get("epoch_s") or [], (record["blocks_ms"] or [[]])[0]
    if not len(epochs) == len(blocks) == len(record["losses"]):
        found = f"a training of {len(epochs)} epochs, {len(blocks)} blocks and {len(record['losses'])} losses"
        yield "epoch_s", found, "as many of each"
        return
    batches = [1e3 * seconds / ms for seconds, ms in zip(epochs, blocks, strict=True)]
    if not all(_same(count, round(batches[0]), 1e-6) for count in batches):
        yield "epoch_s", f"a training of {batches[0]:g} batches in an epoch", "one whole number: epoch_s over blocks_ms"
    if not isinstance(record.get("fit_s"), int | float) or record["fit_s"] < sum(epochs) * (1 - 1e-9):
        yield "fit_s", f"a training of {record.get('fit_s')} s", f"at least that of its epochs, {sum(epochs):g} s"
    found = [(record.get(key) or {}).values() for key in ("accuracy", "perplexity", "test_perplexity_by_seed")]
    accuracy, perplexity, by_seed = ([figure for figure in own if figure is not None] for own in found)
    if not accuracy and not perplexity:
        yield "accuracy", "a training without accuracy or perplexity", "what it came to"
    if not all(0 <= figure <= 1 for figure in accuracy):
        yield "accuracy", f"a list of {accuracy}", "shares between 0 and 1"
    if not all(figure >= 1 for figure in (*perplexity, *by_seed)):
        yield "perplexity", f"a list of {[*perplexity, *by_seed]}", "figures of at least 1"
    of_seeds = record.get("test_perplexity_by_seed")
    first, test = record["config"].get("SEED", 1), (record.get("perplexity") or {}).get("test")
    seeds = [str(first + process) for process in range(len(record["blocks_ms"]))]
    if of_seeds and ([*of_seeds] != seeds or of_seeds[seeds[0]] != test):
        found = f"a training of seeds {', '.join(of_seeds)}, the first with {next(iter(of_seeds.values()))}"
        yield "test_perplexity_by_seed", found, f"seeds {', '.join(seeds)}, the first with {test}"


def _since_2(record: Mapping) -> Iterator[Contradiction]:
    """What records of schema 1 did not have, or not all."""
    kernel = record["proof"].get("kernel") or {}
    if not _whole(kernel.get("launches"), least=1):
        yield "proof", f"a kernel with launches {kernel.get('launches')}", "how many were launched in what was profiled"
    if (kernel.get("syncs") is None) != (record["device"] == "cpu") or not _whole(kernel.get("syncs") or 0):
        yield (
            "proof",
            f"a kernel with syncs {kernel.get('syncs')}",
            "how often the host waited for a GPU; null on a CPU",
        )
    if not record.get("items_per_batch"):
        yield "items_per_batch", "a record without it", "the items of a batch"


def _whole(value: Any, least: int = 0) -> bool:
    return type(value) is int and value >= least


def _same(found: float, expected: float, tolerance: float = 1e-9) -> bool:
    return math.isclose(found, expected, rel_tol=tolerance)


def other_settings(records: Iterable[Mapping[str, Any]]) -> Iterator[tuple[Mapping, Contradiction]]:
    """(record, what is wrong) of those whose settings are not those of most others beside them in the tables of a page.

    Of two settings that are as common that of the later records counts. What changes the timing alone may differ, and so may
    what an earlier commit did not record.
    """
    pages: dict[tuple, list[Mapping]] = {}
    for record in records:
        if record["status"] == "ok":
            key = record["benchmark"], record["config"]["CONFIG"], record["device"], record["precision"]
            pages.setdefault(key, []).append(record)
    for page in pages.values():
        page.sort(key=lambda record: str(record["environment"].get("date", "")), reverse=True)
        chosen = [settings.of(record["config"], settings.Changes.RESULT) for record in page]
        wrong = set()
        for name in dict.fromkeys(name for constants in chosen for name in constants):
            values = [json.dumps(own[name]) if name in own else None for own in chosen]
            [(most, times)] = Counter(filter(None, values)).most_common(1)
            for number, value in enumerate(values):
                if value not in (None, most) and number not in wrong:
                    wrong.add(number)
                    found = f"a {name} of {value:.40} beside {times} records of {most:.40}"
                    yield page[number], ("config", found, "one configuration in a table")
