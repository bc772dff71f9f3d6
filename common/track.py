"""The curves of a run in Weights & Biases too."""

import contextlib
import hashlib
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.errors import UsageError
from common.signals import signals_blocked

# seconds to hand over what is not uploaded yet; the rest stays in the folder's wandb/, for `wandb sync`
LAST_WORDS = 3.0
AT_THE_END = 60.0  # of a run that nobody interrupts


class Tracker:
    """One W&B run for any number of processes. What goes wrong after its start ends tracking, never training.

    The x axis is `global_step`. Work that is done again after an interruption is logged again: W&B can't take back
    points as TensorBoard's files can, and shows the same ones twice.
    """

    def __init__(self, on: bool, say: Callable[[str], None]) -> None:
        self.on, self.say = on, say
        self.run: Any = None

    def start(self, folder: Path, config: dict[str, Any]) -> None:
        """
        Args:
            folder: of the run, with its first event file, by whose name W&B knows the run again.

        Raises:
            UsageError: W&B refuses, for want of a key say.
        """
        if not self.on:
            return
        first = min(path.name for path in folder.glob("events.out.tfevents.*"))
        try:
            with signals_blocked():  # its service must not see them
                import wandb

                self.run = wandb.init(
                    project=os.environ.get("WANDB_PROJECT", "spotrl"),
                    id=hashlib.sha256(first.encode()).hexdigest()[:16],
                    name=folder.name,
                    dir=str(folder),
                    config=config,
                    resume="allow",
                    settings=wandb.Settings(silent=True, console="off"),
                )
        except Exception as error:
            raise UsageError(f"--track: {' '.join(str(error).split())} (WANDB_MODE=offline needs no account)") from None
        self.run.define_metric("global_step")
        self.run.define_metric("*", step_metric="global_step")

    def log(self, scalars: dict[str, float], step: int) -> None:
        if self.run is None:
            return
        try:
            self.run.log({**scalars, "global_step": step})
        except Exception as error:
            self.run = None
            self.say(f"W&B fails ({' '.join(str(error).split())}): training goes on without")

    def close(self, interrupted: bool) -> None:
        """Hand over what is left."""
        if self.run is None:
            return

        def finish() -> None:
            with contextlib.suppress(Exception):
                if interrupted:
                    run.mark_preempting()
                run.finish(exit_code=os.EX_TEMPFAIL if interrupted else 0)

        run, self.run = self.run, None
        thread = threading.Thread(target=finish, name="tracker", daemon=True)
        thread.start()
        thread.join(LAST_WORDS if interrupted else AT_THE_END)
        if thread.is_alive():
            self.say("not all is uploaded to W&B: `wandb sync` copies the rest")
