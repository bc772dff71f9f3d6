"""One training run on disk and on the terminal: folder, lock, events, heartbeat, progress line, summary."""

import contextlib
import dataclasses
import fcntl
import importlib.metadata
import io
import itertools
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard.summary import scalar, text

from common.errors import Interrupted, LimitReached, SaveError, UsageError, WorkerError
from common.files import read_json, replacing, write_json
from common.track import Tracker

# seconds
HEARTBEAT = 5.0  # between two status.json
LEAST_SHARE = 0.05  # of a restore, from which its whole time is guessed
BRIEF = 0.1  # the same, for phases that take milliseconds
TERMINAL_LINE = 0.5  # between two changes of the progress line
PLAIN_LINE = 10.0  # between two lines where there is no terminal


@dataclass
class Progress:
    """How far a run has come. All of it is saved, and none of it measures the clock."""

    global_step: int = 0  # agent steps, all environments together
    updates: int = 0  # minibatches
    games: int = 0
    returns: deque[float] = field(default_factory=lambda: deque(maxlen=100))  # of the last games
    scalars: dict[str, float] = field(default_factory=dict)  # of the last iteration

    def state_dict(self) -> dict[str, Any]:
        return {**vars(self), "returns": list(self.returns), "scalars": dict(self.scalars)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state, returns=deque(state["returns"], maxlen=100), scalars=dict(state["scalars"]))


class Events:
    """TensorBoard's curves of one run over any number of processes, each of which writes one file.

    A new file begins with the step from which points of earlier files are hidden: readers then see the curves of a run
    that was never stopped. What a full disk refuses is kept and written when there is room.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path: Path | None = None
        self.restore_note = ""
        self._descriptor: int | None = None
        self._pending = io.BytesIO()  # records that are not in the file yet
        self._records = RecordWriter(self._pending)

    def open(self, purge_step: int) -> None:
        """Begin a file, which hides earlier points from `purge_step` on.

        Raises:
            OSError: it cannot be made.
        """
        # Readers take files in the order of their names, which begin with the time; clocks of machines differ.
        names = (re.match(r"events\.out\.tfevents\.(\d+)", path.name) for path in self.folder.iterdir())
        others = [int(name[1]) for name in names if name]
        when = max([int(time.time()), *(other + 1 for other in others)])
        self.path = self.folder / f"events.out.tfevents.{when:010d}.{socket.gethostname()}.{os.getpid()}"
        self._descriptor = os.open(self.path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
        self._write(file_version="brain.Event:2")
        self._write(step=purge_step, session_log=SessionLog(status=SessionLog.START))

    def _write(self, **what: Any) -> None:
        self._records.write(Event(wall_time=time.time(), **what).SerializeToString())

    def add_text(self, tag: str, words: str) -> None:
        self._write(summary=text(tag, words))

    def add(self, tag: str, value: float, step: int) -> None:
        self._write(summary=scalar(tag, value), step=step)

    def flush(self, durable: bool = False) -> None:
        """Write what is pending. `durable`: it is on the disk when this returns.

        Raises:
            OSError: the rest is still pending.
        """
        rest = self._pending.getvalue()
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        finally:
            self._pending.seek(0)
            self._pending.truncate()
            self._pending.write(rest)
        if durable:
            os.fsync(self._descriptor)

    def close(self) -> None:
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                self.flush()
            os.close(self._descriptor)
            self._descriptor = None

    def state_dict(self) -> dict[str, Any]:
        """The position up to which this process has written."""
        return {"file": self.path.name, "bytes": self.path.stat().st_size}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        path = self.folder / state["file"]
        size = path.stat().st_size if path.exists() else 0
        if size < state["bytes"]:
            self.restore_note = f"the tail of {path} is lost: {size} of {state['bytes']} bytes are there"


class Run:
    """The run folder `<runs_dir>/<name>` and everything that is written there.

    Creating it takes the folder's lock and changes nothing else; `start` writes the first files. Use as a context
    manager around the whole of training. An exception inside leaves `status.json` with phase `failed`, or
    `interrupted`, and one before `start` leaves no folder that was not there before.

    Attributes:
        complete: the run ended in an earlier process; `summary()` has its results.
        had_checkpoint: an earlier process saved one.
        progress, clock, events: owners of state.

    Raises:
        UsageError: the folder is in use by another process, is something else than a run of this script, or cannot be
            made.
    """

    def __init__(
        self, args: Any, clock: Any, mirror: Any, script: str, name: str, total_timesteps: int, config: dict[str, Any]
    ) -> None:
        self.args, self.clock, self.mirror, self.script = args, clock, mirror, script
        self.dir = Path(args.runs_dir) / name
        self.total_timesteps = total_timesteps
        self.progress, self.events = Progress(), Events(self.dir)
        self.terminal = Terminal()
        self.tracker = Tracker(args.track, self.terminal.line)
        self.sps: float | None = None
        self.phase = "start"
        self.rescue: Callable[[], None] = lambda: None  # saves what is not saved yet
        self.last_checkpoint: Path | None = None
        self.resumed_from: str | None = None
        self.restore: dict[str, float] | None = None  # seconds and share of the restore that is going on
        self.cut_restores = {"count": 0, "seconds": 0.0}  # in a row; the time that a whole one would have taken
        self.barren = 0  # processes in a row that saved nothing newer than what they began with
        self.laps: dict[str, float] = {}
        self._lap_time = self._last_status = self._last_line = time.perf_counter()
        self._warm: tuple[int, float] | None = None  # step and time from which the speed counts
        self._measured = False  # an iteration has ended since
        self._later: tuple[dict[str, Any], dict[str, Any], Callable[[], dict[str, float]]] | None = None
        self._started = False
        machine = describe_machine(torch.device(config["device"]))
        self.config = {"script": script, **config, "machine": machine}
        # what the bits of a result depend on, besides the flags
        bits = ("packages", "python", "cpu", "cpu_capability", "torch_threads", "gpu", "cuda", "git_revision")
        self.machine = {key: machine[key] for key in bits} | {
            "device": torch.device(config["device"]).type,
            "amp_dtype": config["amp_dtype"],
            "compiled": args.compile,
            "cuda_graphs": args.cuda_graphs and torch.device(config["device"]).type == "cuda",
        }
        self._new_parent = not self.dir.parent.exists()
        self._lock, self._new, self._old = claim(self.dir, set_aside=args.resume == "never")
        try:
            self._refuse_another_run(read_json(self.dir / "config.json"))
            mirror.attach(self.dir, args.resume == "never", self._refuse_another_run, self.terminal.line)
        except BaseException as error:
            mirror.close(copy=False)
            if isinstance(error, Interrupted | LimitReached):
                self.terminal.line(str(error))
            if self._new and isinstance(error, UsageError):
                self._discard()
            os.close(self._lock)
            raise
        status = read_json(self.dir / "status.json")
        self.complete = (self.dir / "summary.json").exists()
        remains = [path for path in self.dir.glob("checkpoints/*") if path.suffix != ".tmp"]
        self.had_checkpoint = bool(remains) or status.get("last_checkpoint") is not None
        self._learn_from(status)
        with contextlib.suppress(KeyError, TypeError):  # the heartbeat knows of later times than a checkpoint
            self.clock.load_state_dict(status.get("clock") or {"seconds": status["seconds"]})

    def _learn_from(self, status: dict[str, Any]) -> None:
        """How the processes before ended."""
        with contextlib.suppress(KeyError, TypeError):
            if status["resumed_from"] and status["resumed_from"] == status["last_checkpoint"]:
                self.barren = status["barren"] + 1
            if cut := status["restore"]:
                seconds = cut["seconds"] / max(cut["share"], LEAST_SHARE)
                before = status["cut_restores"]
                self.cut_restores = {"count": before["count"] + 1, "seconds": max(before["seconds"], seconds)}

    def _refuse_another_run(self, config: dict[str, Any]) -> None:
        script = config.get("script", self.script)
        if script != self.script:
            raise UsageError(f"{self.dir} is a run of {script}.py: choose another --run-name")
        flags = config.get("args")
        for _, now, was in self.args.changed(flags if isinstance(flags, dict) else {}):
            raise UsageError(f"{now}: {self.dir} has {was}; choose another --run-name")

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any) -> None:
        try:
            if self._started:
                self._stop(error)
            else:
                if isinstance(error, LimitReached):
                    self.terminal.line(str(error))
                if not self.mirror.close(copy=error is None):
                    raise SaveError(f"{self.dir} is complete, its mirror is not")
                if self._new and not self.complete:
                    self._discard()
        finally:
            os.close(self._lock)

    def _discard(self) -> None:
        """Leave nothing of a run that was refused, nor of the folder of runs if it was made for it."""
        shutil.rmtree(self.dir, ignore_errors=True)
        if self._new_parent:
            with contextlib.suppress(OSError):
                self.dir.parent.rmdir()

    def _stop(self, error: BaseException | None) -> None:
        self.terminal.end_progress()
        if not isinstance(error, Interrupted):
            self.restore = None  # it was not cut short
        if isinstance(error, UsageError):
            self.tracker.finish("failed")
            self.mirror.close(copy=False)
            self.tracker.wait()
            if self._new and self.last_checkpoint is None:
                self.events.close()
                self._discard()
                return
        if isinstance(error, Interrupted | LimitReached):
            self.set_phase("interrupted" if isinstance(error, Interrupted) else "limit")
            self._close()
            self.terminal.line(self.bill())
            self.terminal.line(str(error))
        elif error is not None:
            if isinstance(error, WorkerError):
                self.rescue()
            self.set_phase("failed")
            self._close()
            at_fault = not self._warm and not isinstance(error, WorkerError)  # an error while restoring it
            if self.last_checkpoint and not at_fault:
                at = f"failed at step {self.progress.global_step:,}"
                self.terminal.line(f"{at}: {self.last_checkpoint} is good, the same command goes on from there")
        elif not self._close() and self.phase == "complete":
            raise SaveError(f"{self.dir} is complete, its mirror is not")

    def _close(self) -> bool:
        """Returns whether the mirror, if there is one, has all."""
        self.events.close()
        self.tracker.finish(self.phase)
        copied = self.mirror.close()
        self.tracker.wait()
        return copied

    def start(self, resumed_from: str | None = None) -> None:
        """Write what stands at the beginning of a process.

        Raises:
            UsageError: it cannot be written.
        """
        self.resumed_from = resumed_from
        self._started = True
        self.phase = "restore" if resumed_from else "start"
        self._restore_began = time.perf_counter()
        self.restore = {"seconds": 0.0, "share": 0.0} if resumed_from else None
        try:
            write_json(self.dir / "config.json", self.config)
            self.write_status()
        except OSError as error:
            raise UsageError(f"--runs-dir: cannot write into {self.dir}: {error.strerror}") from None
        self.terminal.line(f"run {self.dir}" + (f", the old one is now {self._old}" if self._old else ""))
        self.terminal.line(self.clock.note)
        self.mirror.start()

    def ready(self, note: str = "") -> None:
        """The state is restored, or a new one is complete: open the event file, start the clocks of this process."""
        self.restore, self.cut_restores = None, {"count": 0, "seconds": 0.0}
        purge_step = self.progress.global_step + 1 if self.resumed_from else 0
        try:
            self.events.open(purge_step)
            if self.last_checkpoint is None:
                self.events.add_text("hyperparameters", hyperparameters(self.args))
            self.events.flush()
        except OSError as error:
            raise UsageError(f"--runs-dir: cannot write into {self.dir}: {error.strerror}") from None
        self.tracker.start(self.dir, {"script": self.script, **self.config["args"]}, resumed=bool(self.resumed_from))
        self.terminal.line(note)
        self.write_status()  # that the restore is over
        self._lap_time = time.perf_counter()
        self._warm = self.progress.global_step, self._lap_time

    def restoring(self, share: float) -> None:
        """Keep heartbeat and progress line fresh while emulators play again or a replay memory is read."""
        self.restore = {"seconds": time.perf_counter() - self._restore_began, "share": share}
        self._beat(lambda: f"restoring: {share:.0%}")

    # ---- time

    def set_phase(self, phase: str, brief: bool = False) -> None:
        """`rollout`, `update` ...: named in status.json at once. `brief` ones change with each step: ten times a second
        the file says which it is."""
        self.phase = phase
        if not brief or time.perf_counter() - self._last_status >= BRIEF:
            self.write_status()

    def tick(self) -> None:
        """Keep heartbeat, curves and progress line fresh. Call at each environment step and minibatch; costs a
        microsecond."""
        if self._beat(self.progress_line):
            self._flush()
            self.mirror.look()

    def _beat(self, line: Callable[[], str]) -> bool:
        now = time.perf_counter()
        due = now - self._last_status >= HEARTBEAT
        if due:
            self.write_status()
        if now - self._last_line >= (TERMINAL_LINE if self.terminal.is_tty else PLAIN_LINE):
            self._last_line = now
            self.terminal.progress(line())
        return due

    def _flush(self) -> None:
        try:
            self.events.flush()
        except OSError as error:
            self.terminal.line(f"cannot write curves ({error.strerror}): they are kept in memory until it works again")

    def lap(self, part: str) -> None:
        """Add the time since the last lap to a part of the loop (`environment`, `inference`, `learning`)."""
        now = time.perf_counter()
        self.laps[part] = self.laps.get(part, 0.0) + now - self._lap_time
        self._lap_time = now

    # ---- what happens in training

    def log_episodes(self, info: dict[str, Any]) -> None:
        """Log the games that ended in one environment step, from gymnasium's `info["episode"]` layout."""
        if "_episode" not in info:
            return
        progress = self.progress
        for i in np.flatnonzero(info["_episode"]):
            episodic_return = float(info["episode"]["r"][i])
            game = {"charts/episodic_return": episodic_return, "charts/episodic_length": int(info["episode"]["l"][i])}
            self._add(game)
            progress.returns.append(episodic_return)
            progress.games += 1

    def _add(self, scalars: dict[str, float]) -> None:
        for tag, value in scalars.items():
            self.events.add(tag, value, self.progress.global_step)
        self.tracker.log(scalars, self.progress.global_step)

    def require_finite(self, losses: dict[str, float]) -> None:
        """Raises FloatingPointError."""
        if not np.isfinite(list(losses.values())).all():
            step = self.progress.global_step
            raise FloatingPointError(f"losses are not finite at step {step}: try a lower --learning-rate")

    def log_later(
        self, losses: dict[str, torch.Tensor], others: dict[str, Any], timed: Callable[[], dict[str, float]]
    ) -> None:
        """As `log_iteration`, at the next `drain`: reading a tensor waits for all that a GPU has been told to do, which
        costs nothing once the next actions were read."""
        self._later = losses, others, timed

    def drain(self) -> None:
        """Log what `log_later` was told, if it was. Call when the next step of the environments is on its way;
        a checkpoint calls it before it is written.

        Raises:
            FloatingPointError: losses are not finite.
        """
        if self._later is None:
            return
        (losses, others, timed), self._later = self._later, None
        both = losses | others
        tensors = [name for name, x in both.items() if isinstance(x, torch.Tensor)]
        if tensors:
            both |= zip(tensors, torch.stack([both[name] for name in tensors]).tolist(), strict=True)  # read at once
        self.require_finite({name: both[name] for name in losses})
        self.log_iteration(both, timed())

    def log_iteration(self, scalars: dict[str, float], timed: dict[str, float] | None = None) -> None:
        """Log one iteration's scalars, with the speed and the shares of wall time.

        The speed counts this process's agent steps over its own time; the first iteration warms up and is left out as
        soon as there is another. `timed` scalars measure the machine: they are no part of the state.
        """
        now = time.perf_counter()
        global_step = self.progress.global_step
        step, since = self._warm
        self.sps = (global_step - step) / max(now - since, 1e-9)
        if not self._measured:
            self._warm, self._measured = (global_step, now), True
        elapsed = sum(self.laps.values()) or 1.0
        shares = {f"time/{part}": seconds / elapsed for part, seconds in self.laps.items()}
        self.laps = {}
        self.progress.scalars = scalars
        self._add({**scalars, **(timed or {}), "charts/SPS": self.sps, **shares, **self.cost()})
        self._flush()
        self.tick()

    def warm_up(self) -> None:
        """The loop does something else from here on: the speed counts from the end of the next iteration."""
        self._measured = False

    def mean_return(self) -> float | None:
        """Of the last 100 games, or of all while they are fewer."""
        returns = self.progress.returns
        return sum(returns) / len(returns) if returns else None

    def reached(self, stop_at_return: float | None) -> bool:
        """Whether the mean of the last 100 games, all 100 of them, reaches a return."""
        full = len(self.progress.returns) == self.progress.returns.maxlen
        return stop_at_return is not None and full and self.mean_return() >= stop_at_return

    # ---- what others read

    def cost(self) -> dict[str, float]:
        """As TensorBoard scalars: hours lived, and with a price the dollars so far, those that a million agent steps
        have cost, and those that the whole run will have cost."""
        dollars, steps = self.clock.dollars(), self.progress.global_step
        scalars = {"cost/hours": self.clock.seconds() / 3600}
        if dollars is not None:
            scalars["cost/usd"] = dollars
            if steps:
                scalars["cost/usd_per_million_steps"] = dollars / steps * 1e6
            if (left := self.seconds_left()) is not None:
                scalars["cost/projected_usd"] = self.clock.dollars(left)
        return scalars

    def bill(self) -> str:
        """What this run has taken so far, in one line."""
        dollars, step = self.clock.dollars(), self.progress.global_step
        words = f"{step:,} steps in {duration(self.clock.seconds())}"
        if self.sps:
            words += f", the loop at {self.sps:,.0f} steps/s"
        if dollars is not None:
            words += f", ${dollars:,.4f} at ${self.clock.dollars_per_hour:,.3f} an hour"
            words += f", ${dollars / step * 1e6:,.2f} a million steps" if step else ""
        return words

    def seconds_left(self) -> float | None:
        return (self.total_timesteps - self.progress.global_step) / self.sps if self.sps else None

    def progress_line(self) -> str:
        mean, left, step = self.mean_return(), self.seconds_left(), self.progress.global_step
        return (
            f"step {step:,}/{self.total_timesteps:,} ({step / self.total_timesteps:.1%})"
            f"  return {'-' if mean is None else f'{mean:.2f}'}  SPS {f'{self.sps:,.0f}' if self.sps else '-'}"
            f"  left {'-' if left is None else duration(left)}{self._money(left)}"
        )

    def _money(self, seconds_left: float | None) -> str:
        if (dollars := self.clock.dollars()) is None:
            return ""
        whole = "" if seconds_left is None else f" of {self.clock.dollars(seconds_left):,.2f}"
        return f"  ${dollars:,.2f}{whole}"

    def results(self) -> dict[str, Any]:
        return {
            "global_step": self.progress.global_step,
            "total_timesteps": self.total_timesteps,
            "updates": self.progress.updates,
            "games": self.progress.games,
            "mean_return": self.mean_return(),
            "sps": self.sps,
            "seconds": self.clock.seconds(),
            **{tag.removeprefix("cost/"): value for tag, value in self.cost().items() if "usd" in tag},
            "price_per_hour": self.clock.dollars_per_hour,
            "written_at": time.time(),
        }

    def write_status(self) -> None:
        """Rewrite status.json. A full disk must not end a run for its heartbeat: it goes on without."""
        self._last_status = time.perf_counter()
        training = self.phase in ("rollout", "update", "save")
        status = {
            "phase": self.phase,
            "pid": os.getpid(),
            **self.results(),
            "seconds_left": self.seconds_left() if training else None,
            "clock": self.clock.state_dict(),
            "resumed_from": self.resumed_from,
            "last_checkpoint": self.last_checkpoint and str(self.last_checkpoint),
            "mirror": self.mirror.status(),
            "restore": self.restore,
            "cut_restores": self.cut_restores,
            "barren": self.barren,
        }
        with contextlib.suppress(OSError):
            write_json(self.dir / "status.json", status, durable=False)

    def save(self, name: str, state: dict[str, torch.Tensor]) -> None:
        """Write a network's state dict into the folder, as CPU tensors, beside first, then in place.

        Raises:
            SaveError: it could not be written.
        """
        try:
            with replacing(self.dir / name) as file:
                torch.save({key: value.cpu() for key, value in state.items()}, file)
        except (OSError, RuntimeError) as error:  # the second one is torch's, raised while it handles the first
            raise SaveError(f"cannot write {self.dir / name}: {error}") from None

    def finish(self) -> dict[str, Any]:
        """Write summary.json, say the last lines, and return the summary. The run is complete then.

        Raises:
            SaveError: it could not be written.
        """
        peak = {"peak_memory_mib": peak_memory_mib(), "run_dir": str(self.dir)}
        summary = {**self.results(), **peak, **self.progress.scalars}
        try:
            write_json(self.dir / "summary.json", summary)
        except OSError as error:
            raise SaveError(f"cannot write {self.dir / 'summary.json'}: {error.strerror}") from None
        self.set_phase("complete")
        self.terminal.progress(self.progress_line())
        self.terminal.line(f"complete: {self.dir}")
        self.terminal.line(self.bill())
        return summary

    def summary(self) -> dict[str, Any]:
        """Of a run that an earlier process completed."""
        self.terminal.line(f"complete already: {self.dir}; --resume never sets it aside and starts afresh")
        return read_json(self.dir / "summary.json")


def hyperparameters(args: Any) -> str:
    """A Markdown table of all flags. TensorBoard shows its first dozen rows: those that are not as usual, then those of
    the algorithm."""
    rows = [(field.name, getattr(args, field.name), field.default) for field in dataclasses.fields(args)]
    rows.sort(key=lambda row: (row[1] == row[2], row[0] not in type(args).__annotations__))
    table = [("flag", "value", "default"), ("-", "-", "-")]
    table += [(name, value, default if value != default else "") for name, value, default in rows]
    return "\n".join(f"|{'|'.join(str(cell).replace('|', '&#124;') for cell in row)}|" for row in table)


def claim(folder: Path, set_aside: bool = False) -> tuple[int, bool, Path | None]:
    """Take the lock of a run folder, made if need be. The kernel releases it when this process ends, however it ends.

    Args:
        set_aside: a run that is there already is renamed, and a new folder made.

    Returns:
        the lock's file descriptor, whether the folder is new, and the new name of one that was set aside.

    Raises:
        UsageError: a process holds the folder, it is no run's, or it cannot be made or locked.
    """
    try:
        ours = any((folder / name).exists() for name in (".lock", "config.json"))
        if folder.exists() and any(folder.iterdir()) and not ours:
            raise UsageError(f"{folder} is there already and no run's: move it away or choose another --run-name")
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / ".lock", os.O_CREAT | os.O_RDWR, 0o644)
    except OSError as error:
        what = "write into" if folder.exists() else "make"
        raise UsageError(f"--runs-dir: cannot {what} {folder}: {error.strerror}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.read(lock, 32).decode().strip()
        os.close(lock)
        raise UsageError(f"{folder} is in use by {f'process {owner}' if owner else 'another process'}") from None
    except OSError as error:
        if len(list(folder.iterdir())) == 1:  # nothing but the lock: ours
            shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)
        raise UsageError(f"--runs-dir: no locks on the file system of {folder}: {error.strerror}") from None
    try:
        # another process may have renamed or removed the folder between open and lock
        if os.fstat(lock).st_ino != (folder / ".lock").stat().st_ino:
            raise FileNotFoundError
        new = len(list(folder.iterdir())) == 1
        if set_aside and not new:
            others = (folder.with_name(f"{folder.name}.old-{number}") for number in itertools.count(1))
            old = next(other for other in others if not other.exists())
            folder.rename(old)
            os.close(lock)
            return *claim(folder)[:2], old
        os.ftruncate(lock, 0)
        os.write(lock, f"{os.getpid()}\n".encode())
    except FileNotFoundError:
        os.close(lock)
        raise UsageError(f"{folder} is in use by another process") from None
    except OSError as error:
        os.close(lock)
        raise UsageError(f"--runs-dir: cannot write into {folder}: {error.strerror}") from None
    return lock, new, None


class Terminal:
    """Standard output: one updating line on a terminal, plain lines elsewhere. One that goes away is not an error.

    For any thread.
    """

    def __init__(self) -> None:
        self.is_tty = sys.stdout is not None and sys.stdout.isatty()
        self.gone = sys.stdout is None
        self._open_line = False
        self._lock = threading.RLock()

    def _write(self, text: str) -> None:
        if self.gone:
            return
        try:
            sys.stdout.write(text)
            sys.stdout.flush()
        except (OSError, ValueError):  # EIO, EPIPE, closed
            self.gone = True

    def line(self, text: str) -> None:
        if not text:
            return
        with self._lock:
            self.end_progress()
            self._write(text + "\n")

    def progress(self, text: str) -> None:
        with self._lock:
            if self.is_tty:
                # a longer line would wrap, and only its last row be overwritten
                self._write(f"\r\x1b[K{text[: shutil.get_terminal_size().columns - 1]}")
                self._open_line = True
            else:
                self._write(text + "\n")

    def end_progress(self) -> None:
        with self._lock:
            if self._open_line:
                self._write("\n")
                self._open_line = False


def duration(seconds: float) -> str:
    """`h:mm:ss`"""
    seconds = int(seconds)
    return f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"


def peak_memory_mib() -> float:
    """The largest resident size of this process so far (VmHWM: getrusage would count what it was before exec)."""
    with contextlib.suppress(OSError):
        match = re.search(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
        if match:
            return int(match[1]) / 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Versions, git revision, processor and threads, for config.json."""
    packages = ["gymnasium", "ale-py", "numpy", "tensorboard"]
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("mujoco")
        packages.append("mujoco")
    return {
        # torch's own word names its build too: cpu, cu130
        "packages": {"torch": str(torch.__version__), **{name: importlib.metadata.version(name) for name in packages}},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "available_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),  # which of its kernels torch takes
        "torch_threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "cuda": torch.version.cuda,
        "git_revision": git_revision(),
    }


def cpu_model() -> str:
    with contextlib.suppress(OSError):
        match = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        if match:
            return match[1]
    return platform.processor()


def git_revision() -> str | None:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        where = Path(__file__).parent
        git = ["git", "-C", str(where), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        # a session of its own: Ctrl-C is not for it
        done = subprocess.run(git, capture_output=True, text=True, timeout=10, check=True, start_new_session=True)
        return done.stdout.strip()
    return os.environ.get("SPOTRL_REVISION") or None  # of an image, which has neither git nor history
