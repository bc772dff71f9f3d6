"""The curves of a run in Weights & Biases too."""

import contextlib
import hashlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.errors import UsageError

# seconds to hand over what is not uploaded yet; the rest stays in the folder's wandb/, for `wandb sync`
LAST_WORDS = 3.0
AT_THE_END = 20.0  # of a run that is complete
START = 15.0  # seconds that W&B has to answer
EXIT_CODES = {"complete": 0, "interrupted": os.EX_TEMPFAIL, "limit": 3}


class Tracker:
    """One W&B run for any number of processes. What goes wrong after its start ends tracking, never training.

    The x axis is `global_step`. Work that is done again after an interruption is logged again: W&B can't take back
    points as TensorBoard's files can, and shows the same ones twice.
    """

    def __init__(self, on: bool, say: Callable[[str], None]) -> None:
        self.on, self.say = on, say
        self.run: Any = None
        self._finishing: threading.Thread | None = None
        self._until = 0.0

    def start(self, folder: Path, config: dict[str, Any], resumed: bool) -> None:
        """
        Args:
            folder: of the run, with its first event file, by whose name W&B knows the run again.
            resumed: training goes on without W&B if it refuses.

        Raises:
            UsageError: W&B refuses a new run, for want of a key say.
        """
        if not self.on:
            return
        first = min(path.name for path in folder.glob("events.out.tfevents.*"))
        try:
            import wandb

            self.run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "spotrl"),
                id=hashlib.sha256(f"{folder.name}/{first}".encode()).hexdigest()[:16],
                name=folder.name,
                dir=str(folder),
                config=config,
                resume="allow",
                reinit="create_new",
                settings=wandb.Settings(silent=True, console="off", init_timeout=START),
            )
            self.run.define_metric("global_step")
            self.run.define_metric("*", step_metric="global_step")
        except Exception as error:
            reason = " ".join(str(error).split())
            if not resumed:
                raise UsageError(f"--track: {reason} (WANDB_MODE=offline needs no account)") from None
            self.say(f"W&B refuses ({reason}): this process trains without")

    def log(self, scalars: dict[str, float], step: int) -> None:
        if self.run is None:
            return
        try:
            self.run.log({**scalars, "global_step": step})
        except Exception as error:
            self.run = None
            self.say(f"W&B fails ({' '.join(str(error).split())}): training goes on without")

    def finish(self, phase: str) -> None:
        """Begin to hand over what is left. `phase`: in which the run ended."""
        if self.run is None:
            return

        def work() -> None:
            with contextlib.suppress(Exception):
                if phase == "interrupted":
                    run.mark_preempting()
                run.finish(exit_code=EXIT_CODES.get(phase, 1))

        run, self.run = self.run, None
        self._until = time.monotonic() + (AT_THE_END if phase == "complete" else LAST_WORDS)
        self._finishing = threading.Thread(target=work, name="tracker", daemon=True)
        self._finishing.start()

    def wait(self) -> None:
        """Until it is handed over, or for as long as that may take."""
        if self._finishing is None:
            return
        self._finishing.join(max(0.0, self._until - time.monotonic()))
        if self._finishing.is_alive():
            self.say("not all is uploaded to W&B: `wandb sync` copies the rest")
        self._finishing = None
