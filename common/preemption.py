"""Signals that mean "save and leave". Their handler sets a flag; the loop looks at it where it can stop.

Import before torch: a training script that is stopped while it still imports leaves as it would later on.
"""

import atexit
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType, TracebackType

from common.signals import SIGNALS

# Programs beside the training scripts that import them, or this, and stop at once.
NOT_TRAINING = ("evaluate", "doctor", "drill", "sweep")

_asked: list[tuple[str, float]] = []  # name and time of all signals that arrived, oldest first
_answered = 0  # how many of them a run has looked at


def _note(number: int, frame: FrameType | None) -> None:
    _asked.append((signal.Signals(number).name, time.monotonic()))


def listen() -> dict[int, object]:
    """Install the handler. Returns the handlers that were there, none of them outside the main thread.

    A SIGHUP that is ignored stays ignored: that is what `nohup` asks for.
    """
    if threading.current_thread() is not threading.main_thread():
        return {}
    return {
        number: signal.signal(number, _note)
        for number in SIGNALS
        if not (number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN)
    }


class StopSignals:
    """Catch the signals for the time of a `with` block. A signal that came before, and that no run looked at, counts.

    In a thread, where Python allows no handlers, nothing is caught and whoever started the thread has to `ask`.

    Attributes:
        lead: the seconds that the cloud gives from its notice to the end; None where nobody knows.
        advised: somebody thinks that a checkpoint should be made now.
    """

    lead: float | None = None
    advised = False

    def __enter__(self) -> "StopSignals":
        self._first = self._seen = _answered
        self._before = listen()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        global _answered
        _answered = max(_answered, self._seen)
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    @property
    def asked(self) -> str | None:
        """The name of the first signal that arrived. Later ones change nothing."""
        self._seen = len(_asked)
        return _asked[self._first][0] if self._seen > self._first else None

    @property
    def asked_at(self) -> float | None:
        """When that was, `time.monotonic()`."""
        return _asked[self._first][1] if len(_asked) > self._first else None

    def ask(self, reason: str) -> None:
        """As if a signal had arrived; from any thread."""
        _asked.append((reason, time.monotonic()))

    def advise(self) -> None:
        """Have a checkpoint made at the next boundary; from any thread."""
        self.advised = True


def _is_training_script() -> bool:
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    if main is None:
        return False
    path = Path(main).resolve()
    return path.parent == Path(__file__).resolve().parent.parent and path.stem not in NOT_TRAINING


def _ignore() -> None:
    """While Python and torch shut down: a second signal must not change the exit status."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


if _is_training_script():
    listen()
    atexit.register(_ignore)
