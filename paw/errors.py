"""What a user hears: of a mistake by the one exception that ends the command with code 2, of the rest on stderr."""

import sys


class UserError(Exception):
    """A mistake the user can mend. The message names the value, where it came from and the fix, in one line."""

    exit_code = 2


def to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
