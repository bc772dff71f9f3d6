"""Errors that a script turns into one line and an exit status."""


class UsageError(Exception):
    """Refused before anything started: one line on stderr, exit status 2."""


class Interrupted(Exception):
    """Stopped by a signal, a good checkpoint is on the disk: one line, exit status 75 (EX_TEMPFAIL of sysexits.h)."""


class LimitReached(Exception):
    """Stopped by a limit such as --max-cost, a good checkpoint is on the disk: one line, exit status 3."""


class SaveError(Exception):
    """The end of a run could not be saved: one line, exit status 1."""


class CaptureError(Exception):
    """A function could not be captured as a CUDA graph: one line, exit status 1."""


class WorkerError(Exception):
    """A process that simulates an environment has died: one line, exit status 1."""
