"""The one exception that a user caused and a user can mend."""


class UserError(Exception):
    """Wrong input: the message says in one line what was wrong, what was expected and what to do.

    A script's `main` prints it as `error: <message>` and exits with status 2; no traceback.
    """
