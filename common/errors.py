"""The one exception that all of the project shares."""


class UsageError(ValueError):
    """Bad input, in one line that names the flag. A command line ends with it and status 2."""
