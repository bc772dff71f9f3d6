"""Signals that mean "save and leave". Their handler sets a flag; the loop looks at it where it can stop.

Import before torch: a training script that is stopped while it still imports leaves as it would later on.
"""

import signal
import sys
import threading
from pathlib import Path
from types import FrameType, TracebackType

# what schedulers, clouds, terminals and people send
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)

# Programs beside the training scripts that import them, or this, and stop at once.
NOT_TRAINING = ("evaluate", "doctor", "drill", "sweep")

_asked: list[str] = []  # the names of the signals that arrived, oldest first


def _note(number: int, frame: FrameType | None) -> None:
    _asked.append(signal.Signals(number).name)


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
    """Catch the signals for the time of a `with` block.

    In a thread, where Python allows no handlers, nothing is caught and whoever started the thread has to `ask`.
    """

    def __enter__(self) -> "StopSignals":
        self._before = listen()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        _asked.clear()

    @property
    def asked(self) -> str | None:
        """The name of the first signal that arrived. Later ones change nothing."""
        return _asked[0] if _asked else None

    def ask(self, reason: str) -> None:
        """As if a signal had arrived; from any thread."""
        _asked.append(reason)


def _is_training_script() -> bool:
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    if main is None:
        return False
    path = Path(main).resolve()
    return path.parent == Path(__file__).resolve().parent.parent and path.stem not in NOT_TRAINING


if _is_training_script():
    listen()
