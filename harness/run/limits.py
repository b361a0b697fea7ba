"""What each hyperparameter of a benchmark's header may be: its type, range, an example and its unit."""

import dataclasses
import math
import operator
import re
from dataclasses import dataclass

_BOUNDS = {
    "above": ("above", operator.gt),
    "low": ("of at least", operator.ge),
    "below": ("below", operator.lt),
    "high": ("at most", operator.le),
}
_TRUTH = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
_MAX_INT = 2**31 - 1  # sizes and indices are int32 in TensorFlow and cuDNN
_MAX_CHARACTERS = 1000


@dataclass(frozen=True)
class Limit:
    """What a constant may be: its type (int, float, str or bool) and range; `above` and `below` exclude their bound."""

    type: type
    low: float | None = None
    high: float | None = None
    above: float | None = None
    below: float | None = None
    choices: tuple[str, ...] = ()
    example: object = None
    unit: str = ""

    def expected(self, bounds: bool = True) -> str:
        """Describe it as in "an integer of at least 1, such as 256"."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        text = {int: "an integer", float: "a number", bool: "true or false", str: "a text"}[self.type]
        named = [f"{word} {getattr(self, key)}" for key, (word, _) in _BOUNDS.items() if getattr(self, key) is not None]
        text += " " + " and ".join(named) if bounds and named else ""
        return text if self.example is None or self.type is bool else f"{text}, such as {self.example}"

    def read(self, text: str) -> object:
        """The value that an option's text stands for. Raises ValueError, as `check` does, with what was expected."""
        if len(text) > _MAX_CHARACTERS:
            raise ValueError(f"at most {_MAX_CHARACTERS} characters")
        try:
            value = _TRUTH[text.lower()] if self.type is bool else self.type(text)
        except (ValueError, KeyError):
            raise ValueError(self.expected(bounds=False)) from None
        return self.check(value)

    def check(self, value: object) -> object:
        """The value itself, when it is of the type and in the range; an integer passes for a float."""
        if type(value) is not self.type and (type(value), self.type) != (int, float):
            raise ValueError(self.expected(bounds=False))
        if self.type is str and not value.isprintable():
            raise ValueError("printable characters only")
        if self.type is str and not (value and value in (self.choices or (value,))):
            raise ValueError(self.expected())
        if type(value) is float and not math.isfinite(value):
            raise ValueError(self.expected().replace("a number", "a finite number"))
        if type(value) is int and value > (self.high or _MAX_INT):
            raise ValueError(dataclasses.replace(self, high=self.high or _MAX_INT).expected())
        for key, (_, holds) in _BOUNDS.items():
            if getattr(self, key) is not None and not holds(value, getattr(self, key)):
                raise ValueError(self.expected())
        return value


@dataclass(frozen=True)
class Percentage(Limit):
    """A percentage on the command line, such as 1% or 0.5%; low, high and the value itself are fractions."""

    def expected(self, bounds: bool = True) -> str:
        return "a percentage" + (f" from {self.low:.2%} to {self.high:.0%}" if bounds else "") + ", such as 1%"

    def read(self, text: str) -> object:
        if not (match := re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,9})?) ?%", text)):
            raise ValueError(self.expected(bounds=False))
        return self.check(float(match[1]) / 100)


def _count(example: int, unit: str = "", low: int = 1) -> Limit:
    return Limit(int, low=low, example=example, unit=unit)


LIMITS = {
    "CONFIG": Limit(str, example="small"),
    "ROWS": Limit(str, example="keras,keras_cudnn"),
    "POINTS": Limit(str, example='"stream:1 50:8"'),
    "AXES": Limit(str, example='"units=64,128 batch=1,32"'),
    "REPLICAS": Limit(str, example="1,2"),
    "SCALING": Limit(str, example="weak,strong"),
    "HOSTS": Limit(str, example="127.0.0.1,127.0.0.2"),
    "PROTOCOL": Limit(str, choices=("stacked_lm", "ptb")),
    "PRECISION": Limit(str, choices=("fp32", "tf32", "fp16", "bf16")),
    "SEED": Limit(int, low=0, high=2**32 - 1, example=1),
    # networks
    "UNITS": _count(256),
    "DENSE_UNITS": _count(32),
    "NUM_LAYERS": _count(2),
    "EMBEDDING": _count(128),
    "FEATURES": _count(650),
    "OUTPUTS": _count(10),
    "VOCABULARY": _count(10000, "words", low=2),
    "BIDIRECTIONAL": Limit(bool),
    "INIT_SCALE": Limit(float, above=0, example=0.1),
    # data
    "BATCH_SIZE": _count(32, "sequences"),
    "TIME_STEPS": _count(35, "steps"),
    "NUM_SEQUENCES": _count(10000, "sequences"),
    "TRAIN_WORDS": _count(929589, "words", low=100),
    "EVAL_WORDS": _count(73760, "words", low=100),
    "RANDOM_WORDS": Limit(bool),
    "LAST_STEP": Limit(bool),
    "MAX_WORDS": _count(100, "words", low=2),
    "BUCKET_STEPS": _count(10, "steps"),
    "TRAIN_SEQUENCES": _count(60000, "sequences"),
    # training
    "EPOCHS": _count(3, "epochs"),
    "FLAT_EPOCHS": _count(4, "epochs", low=0),
    "LEARNING_RATE": Limit(float, above=0, example=0.001),
    "LR_DECAY": Limit(float, above=0, high=1, example=0.5),
    "DECAY": Limit(float, low=0, example=1e-05),
    "CLIP_NORM": Limit(float, above=0, example=5),
    "KEEP_PROB": Limit(float, above=0, high=1, example=0.5),
    "DROPOUT": Limit(float, low=0, below=1, example=0.2),
    "LOSS_SCALE": Limit(float, low=1, example=65536),
    # timing; fewer than 8 staged batches could stay in a cache
    "WARMUP_BATCHES": _count(10, "batches"),
    "WARMUP_LIMIT_S": Limit(float, low=0, high=30, example=3, unit="s"),
    "TIMED_BATCHES": _count(50, "batches per block"),
    "STAGED_BATCHES": _count(8, "batches", low=8),
    "REQUESTS": _count(10000, "requests", low=100),
    "STAGED_REQUESTS": _count(4, "requests", low=2),
    "STREAM_STEPS": _count(50, "steps", low=2),
    "BLOCKS": _count(5, "blocks per process"),
    "PROCESSES": _count(3, "processes"),
    "MIN_BLOCK_S": Limit(float, low=0, example=0.25, unit="s"),
    "ROW_BUDGET_S": Limit(float, above=0, example=60, unit="s"),
    "ROW_LIMIT_S": Limit(float, above=0, example=600, unit="s"),
}


def known_limit(name: str) -> Limit | None:
    """Find a name in LIMITS; DROPOUT_1 has the limit of DROPOUT."""
    return LIMITS.get(name) or LIMITS.get(re.sub(r"_\d+$", "", name))
