"""The exceptions that end a command in one line: what a user caused and can mend, and what came to nothing all the same."""


class UserError(Exception):
    """Wrong input: the message says in one line what was wrong, what was expected and what to do.

    A script's `main` prints it as `error: <message>` and exits with status 2; no traceback.
    """


class CrashError(UserError):
    """What nothing can go on without came to nothing, whatever the input: a process that crashed, a full disk. Status 1."""
