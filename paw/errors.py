"""The one exception a user's mistake raises; the command line prints it as one line and exits with code 2."""


class UserError(Exception):
    """A mistake the user can mend. The message names the value, where it came from and the fix, in one line."""
