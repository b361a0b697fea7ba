"""Inputs that nearly fit: a good file with a few things changed, the same ones for the same seed."""

import json
import random
from collections.abc import Callable
from typing import Any

Random = random.Random

TEXTS = ["", " ", "\0", "a\nb", "\r", "../../etc/passwd", "/etc/passwd", "..", "x" * 70_000, "\ud800", "\u202e", "|a|", "`a`",
         "<b>", "$x^2$", "[a](b)", "{0}", "%s", "*", "1", "nan", "null", "speedup:keras", ".1f*0.001", "d", "pair", "bytes",
         "step_ms", "step_ms.median", "environment.packages", "throughput.value", "ok", "failed", "gpu", "fit", "٣", "=", "-",
         "2026-01-01", "<!-- headline:a -->"]  # fmt: skip
NUMBERS = [0, 1, -1, 2, 3, 0.5, -0.0, 1e-300, 5e-324, 1e299, 1e300, 1e308, 2**31, 2**53, 2**64, 10**299, 10**400, -(10**299),
           float("nan"), float("inf"), -float("inf"), True, False]  # fmt: skip
HOLDERS = [
    None,
    [],
    {},
    [[]],
    [None],
    [{}],
    [""],
    [0],
    {"": {}},
    {"a": {"b": None}},
    {"median": 1},
    [1e-300, 1e299],
    list(range(300)),
]


def nested(depth: int) -> Any:
    value: Any = 1
    for level in range(depth):
        value = [value] if level % 2 else {"a": value}
    return value


def nasty(chance: Random) -> Any:
    """A value that hardly any key expects."""
    kind = chance.randrange(10)
    if kind == 0:
        return nested(chance.choice([3, 12, 15, 17, 40]))
    return json_copy(chance.choice(TEXTS if kind < 4 else NUMBERS if kind < 8 else HOLDERS))


def json_copy(value: Any) -> Any:
    """A copy of JSON's own types; deepcopy takes ten times as long."""
    if isinstance(value, dict):
        return {key: json_copy(item) for key, item in value.items()}
    return [json_copy(item) for item in value] if isinstance(value, list) else value


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (holder, key or index) of a JSON value."""
    found, level = [], [value]
    while level:
        holder = level.pop()
        items = holder.items() if isinstance(holder, dict) else enumerate(holder)
        for key, item in items:
            found.append((holder, key))
            if isinstance(item, dict | list):
                level.append(item)
    return found


def changed_json(chance: Random, good: Any, changes: int = 3) -> Any:
    """A copy with one or a few values replaced, nudged, taken out, doubled or exchanged."""
    value = json_copy(good)
    for _ in range(chance.randint(1, changes)):
        every = places(value)
        if not every:
            return nasty(chance)
        top = [(value, key) for key in (value if isinstance(value, dict) else range(len(value)))]
        holder, key = chance.choice(top if top and chance.random() < 0.4 else every)
        kind, item = chance.randrange(9), holder[key]
        if kind < 4:
            holder[key] = nasty(chance)
        elif kind == 4:
            del holder[key]
        elif kind == 5 and isinstance(holder, dict):
            holder[chance.choice([*TEXTS, "extra", str(key) + "x"])] = item
        elif kind == 5:
            holder.insert(key, json_copy(item))
        elif kind == 6:
            other, there = chance.choice(every)
            if not isinstance(item, dict | list) and (
                there in other if isinstance(other, dict) else there < len(other)
            ):
                other[there] = item
        elif kind == 7 and isinstance(item, int | float) and abs(item) < 1e300:
            holder[key] = chance.choice([-item, item * 1e6, item / 3, str(item), [item]])
        else:
            holder[key] = chance.choice([[item], {"a": item}, str(item), None])
    return value


def json_bytes(chance: Random, value: Any) -> bytes:
    """The value as JSON, sometimes with NaN, keys that stand there twice, a byte order mark, or broken bytes."""
    text = json.dumps(value, ensure_ascii=chance.random() < 0.5)
    kind = chance.randrange(20)
    if kind == 0 and text.startswith("{") and len(text) > 2:  # the first of two counts nowhere, the last one does
        text = '{"schema": 7, "benchmark": "../x", ' + text[1:]
    elif kind == 1:
        text = "[" * 5000 + text + "]" * 5000
    elif kind == 2:
        text = "\ufeff" + text
    raw = text.encode("utf-8", "surrogatepass")
    return changed_bytes(chance, raw) if kind in (3, 4) else raw


def changed_bytes(chance: Random, good: bytes) -> bytes:
    """Bits turned, bytes put in or taken out, parts doubled or cut off, and fields of four bytes set to extremes."""
    raw = bytearray(good)
    for _ in range(chance.choice([1, 1, 1, 2, 5])):
        at, kind = chance.randrange(len(raw) + 1), chance.randrange(9)
        if kind < 3 and at < len(raw):
            raw[at] ^= 1 << chance.randrange(8)
        elif kind == 3:
            raw[at:at] = chance.choice(
                [b"\0", b"\xff", b"\xc3", b"\xed\xa0\x80", b"\n", b"{", b'"', chance.randbytes(4)]
            )
        elif kind == 4:
            del raw[at : at + chance.choice([1, 1, 4, 100])]
        elif kind == 5:
            del raw[at:]
        elif kind == 6:
            raw += raw[at : at + 1000]
        elif kind == 7:
            number = chance.choice([0, 1, 2**16, 2**31 - 1, 2**31, 2**32 - 1])
            raw[at : at + 4] = number.to_bytes(4, chance.choice(["big", "little"]))
        else:
            other = chance.randrange(len(raw) + 1)
            raw[at : at + 8] = raw[other : other + 8]
    return bytes(raw)


def near(chance: Random, good: Callable[[], bytes], share: float = 0.1) -> bytes:
    """The good bytes themselves now and then, so that what must be accepted is seen to be; else changed ones."""
    raw = good()
    return raw if chance.random() < share else changed_bytes(chance, raw)
