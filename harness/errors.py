"""How a command ends: in one line by wrong input or an internal failure, and quietly where nobody reads its output any more."""

import importlib.util
import os
import select
import sys
from types import TracebackType


class UserError(Exception):
    """Wrong input: the message says in one line what was wrong, what was expected and what to do.

    A script's `main` prints it as `error: <message>` and exits with status 2; no traceback.
    """


class CrashError(UserError):
    """Internal failure that stops the run, whatever the input: a process that crashed, a full disk. Exit status 1."""


def require(*modules: str) -> None:
    """UserError where this Python lacks one of these modules: before anything is written, and without importing them."""
    if missing := [name for name in modules if importlib.util.find_spec(name) is None]:
        raise UserError(
            f"{sys.executable}: the module {missing[0]} is not installed; use .venv/bin/python of run_all.sh"
        )


def _ended(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """Without a traceback where the reader of the output has left, as `head` does; of every command, whatever it prints."""
    if issubclass(kind, BrokenPipeError) and sys.__stdout__ and _reader_has_left(sys.__stdout__.fileno()):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stdout__.fileno())  # or Python writes what is left at its end
    else:
        sys.__excepthook__(kind, error, traceback)


def _reader_has_left(pipe: int) -> bool:
    poll = select.poll()
    poll.register(pipe, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


sys.excepthook = _ended
