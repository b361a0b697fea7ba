"""Sizes that certainly cannot run: a batch larger than its data set, or than the machine's memory. Standard library only.

What is counted is the least that a training step holds at once: each layer's outputs, the logits, the weights. A row needs
several times as much, so what passes here may still run out of memory, and is then recorded as such.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from harness.errors import UserError
from harness.record.schema import SIXTEEN_BITS

PTB_WORDS, PTB_SENTENCES, MNIST_IMAGES = 929_589, 42_068, 60_000  # of the training sets; the embedded ones have fewer
REFERENCE_BYTES = 8  # the reference computes in float64, on the host
GIB = 1024**3


def stack_values(c: Mapping[str, Any], steps: int, directions: int = 1) -> int:
    """Numbers that an LSTM stack holds at the least: every layer's outputs of `steps` steps of a batch, and its weights."""
    per_layer = c["BATCH_SIZE"] * steps * c["UNITS"] + 8 * c["UNITS"] ** 2
    return c["NUM_LAYERS"] * directions * per_layer


def language_model_values(c: Mapping[str, Any], steps: int) -> int:
    """Those of the stack, the logits of a batch, and the softmax's weights."""
    return stack_values(c, steps) + c["VOCABULARY"] * (c["BATCH_SIZE"] * steps + c["UNITS"])


def too_few(what: str, c: Mapping[str, Any], needed: int, there: int, names: Sequence[str]) -> str:
    """Why no such batch can be made of a data set, or "": `needed` of `what` for a batch, `there` in the set.

    names: of the constants that a batch's size comes from.
    """
    if needed <= there:
        return ""
    return f"{_options(c, names)}: {needed:,} {what} are needed, there are at most {there:,}; {_smaller(names)}"


def words_too_few(c: Mapping[str, Any]) -> str:
    """Whether a batch of BATCH_SIZE sequences of TIME_STEPS words, and a word more each, can be cut out of PTB."""
    words = min(c.get("TRAIN_WORDS") or PTB_WORDS, PTB_WORDS)
    return too_few("words", c, c["BATCH_SIZE"] * (c["TIME_STEPS"] + 1), words, ("BATCH_SIZE", "TIME_STEPS"))


def check(c: Mapping[str, Any], values: int, host_bytes: int, gpu_bytes: int | None) -> None:
    """UserError where so many numbers at once do not fit into the machine.

    Args:
        c: the script's constants.
        values: the least that a training step holds at once.
        host_bytes, gpu_bytes: memory of the machine, and of the GPU that is to be used; None on a CPU.
    """
    names = [name for name in ("BATCH_SIZE", "TIME_STEPS", "UNITS", "NUM_LAYERS", "VOCABULARY") if c.get(name)]
    of_gpu = (2 if c["PRECISION"] in SIXTEEN_BITS else 4, gpu_bytes, "this GPU has")
    for size, there, whose in ((REFERENCE_BYTES, host_bytes, "this machine has"), of_gpu):
        if there is not None and size * values > there:
            needed = f"{size * values / GIB:,.0f} GiB of memory are needed at the least, {whose} {there / GIB:,.0f}"
            raise UserError(f"{_options(c, names)}: {needed}; {_smaller(names[:3])}")


def _options(c: Mapping[str, Any], names: Sequence[str]) -> str:
    return " ".join(f"{_option(name)}={c[name]}" for name in names)


def _smaller(names: Sequence[str]) -> str:
    *others, last = map(_option, names)
    return f"give a smaller {', '.join(others)}{' or ' * bool(others)}{last}"


def _option(name: str) -> str:
    return f"--{name.lower().replace('_', '-')}"
