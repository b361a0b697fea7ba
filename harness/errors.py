"""The exceptions that end a command in one line: wrong input, which a user can mend, and internal failures."""

import importlib.util
import sys


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
