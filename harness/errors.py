"""The exceptions that end a command in one line: what a user caused and can mend, and what came to nothing all the same."""

import importlib.util
import sys


class UserError(Exception):
    """Wrong input: the message says in one line what was wrong, what was expected and what to do.

    A script's `main` prints it as `error: <message>` and exits with status 2; no traceback.
    """


class CrashError(UserError):
    """What nothing can go on without came to nothing, whatever the input: a process that crashed, a full disk. Status 1."""


def require(*modules: str) -> None:
    """UserError where this Python lacks one of these modules: before anything is written, and without importing them."""
    if missing := [name for name in modules if importlib.util.find_spec(name) is None]:
        raise UserError(
            f"{sys.executable}: the module {missing[0]} is not installed; use .venv/bin/python of run_all.sh"
        )
