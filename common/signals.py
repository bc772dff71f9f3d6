"""The signals that mean "save and leave", for whoever has to hold them back."""

import contextlib
import signal
from collections.abc import Iterator

# what schedulers, clouds, terminals and people send
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


@contextlib.contextmanager
def signals_blocked() -> Iterator[None]:
    """Hold them back in this thread and in the processes that it starts; they arrive afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
