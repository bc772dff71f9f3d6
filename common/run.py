"""One training run on disk and on the terminal: folder, lock, events, heartbeat, progress line, summary."""

import contextlib
import fcntl
import importlib.metadata
import json
import math
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch.utils.tensorboard import SummaryWriter

from common.errors import UsageError

# seconds
HEARTBEAT = 5.0  # between two status.json
TERMINAL_LINE = 0.5  # between two changes of the progress line
PLAIN_LINE = 10.0  # between two lines where there is no terminal


class Run:
    """The run folder `<runs_dir>/<name>` and everything that is written there.

    Use as a context manager around the whole of training. An exception inside leaves `status.json` with phase
    `failed`; one in `__init__` leaves no folder.

    Raises:
        UsageError: the folder is in use by another process, exists already, or cannot be written.
    """

    def __init__(
        self, runs_dir: str, name: str, total_timesteps: int, config: dict[str, Any], device: torch.device
    ) -> None:
        self.dir = Path(runs_dir) / name
        self.total_timesteps = total_timesteps
        self.returns: deque[float] = deque(maxlen=100)
        self.games = 0
        self.global_step = 0
        self.sps: float | None = None
        self.phase = "start"
        self.started = self._lap_time = time.perf_counter()
        self.laps: dict[str, float] = {}
        self._warm: tuple[int, float] | None = None  # step and time at the end of the warm-up iteration
        self._last_status = self._last_line = self.started
        config = {**config, "machine": describe_machine(device)}
        self._lock = claim(self.dir)
        try:
            write_json(self.dir / "config.json", config)
            self.write_status()
            self.writer = SummaryWriter(str(self.dir))
            rows = "".join(f"|{key}|{value}|\n" for key, value in config["args"].items())
            self.writer.add_text("hyperparameters", f"|param|value|\n|-|-|\n{rows}")
        except BaseException as error:
            shutil.rmtree(self.dir, ignore_errors=True)  # claimed empty
            os.close(self._lock)
            if isinstance(error, OSError):
                raise UsageError(f"--runs-dir: cannot write into {self.dir}: {error.strerror}") from None
            raise
        self.terminal = Terminal()
        self.terminal.line(f"run {self.dir}")

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any) -> None:
        try:
            if error is not None:
                self.set_phase("failed")
            self.terminal.end_progress()
            self.writer.close()
        finally:
            os.close(self._lock)

    # ---- time

    def set_phase(self, phase: str) -> None:
        """`rollout`, `update` ...: named in status.json at once."""
        self.phase = phase
        self.write_status()

    def tick(self, global_step: int) -> None:
        """Keep heartbeat and progress line fresh. Call at each environment step and minibatch; costs a microsecond."""
        self.global_step = global_step
        now = time.perf_counter()
        if now - self._last_status >= HEARTBEAT:
            self.write_status()
        if now - self._last_line >= (TERMINAL_LINE if self.terminal.is_tty else PLAIN_LINE):
            self._last_line = now
            self.terminal.progress(self.progress_line())

    def lap(self, part: str) -> None:
        """Add the time since the last lap to a part of the loop (`environment`, `inference`, `learning`)."""
        now = time.perf_counter()
        self.laps[part] = self.laps.get(part, 0.0) + now - self._lap_time
        self._lap_time = now

    # ---- what happens in training

    def log_episodes(self, info: dict[str, Any], global_step: int) -> None:
        """Log the games that ended in one environment step, from gymnasium's `info["episode"]` layout."""
        for i in np.flatnonzero(info.get("_episode", ())):
            episodic_return = float(info["episode"]["r"][i])
            self.writer.add_scalar("charts/episodic_return", episodic_return, global_step)
            self.writer.add_scalar("charts/episodic_length", int(info["episode"]["l"][i]), global_step)
            self.returns.append(episodic_return)
            self.games += 1

    def log_iteration(self, scalars: dict[str, float], global_step: int) -> None:
        """Log one iteration's scalars, with the speed and the shares of wall time.

        The speed counts this process's agent steps over its own time; the first iteration warms up and is left out as
        soon as there is another.
        """
        now = time.perf_counter()
        step, since = self._warm or (0, self.started)
        self.sps = (global_step - step) / max(now - since, 1e-9)
        self._warm = self._warm or (global_step, now)
        elapsed = sum(self.laps.values()) or 1.0
        shares = {f"time/{part}": seconds / elapsed for part, seconds in self.laps.items()}
        self.laps = {}
        for tag, value in {**scalars, "charts/SPS": self.sps, **shares}.items():
            self.writer.add_scalar(tag, value, global_step)
        self.tick(global_step)

    def mean_return(self) -> float | None:
        """Of the last 100 games, or of all while they are fewer."""
        return sum(self.returns) / len(self.returns) if self.returns else None

    def reached(self, stop_at_return: float | None) -> bool:
        """Whether the mean of the last 100 games, all 100 of them, reaches a return."""
        full = len(self.returns) == self.returns.maxlen
        return stop_at_return is not None and full and self.mean_return() >= stop_at_return

    # ---- what others read

    def seconds_left(self) -> float | None:
        return (self.total_timesteps - self.global_step) / self.sps if self.sps else None

    def progress_line(self) -> str:
        mean, left = self.mean_return(), self.seconds_left()
        return (
            f"step {self.global_step:,}/{self.total_timesteps:,} ({self.global_step / self.total_timesteps:.1%})"
            f"  return {'-' if mean is None else f'{mean:.2f}'}  SPS {f'{self.sps:,.0f}' if self.sps else '-'}"
            f"  left {'-' if left is None else duration(left)}"
        )

    def results(self) -> dict[str, Any]:
        return {
            "global_step": self.global_step,
            "total_timesteps": self.total_timesteps,
            "games": self.games,
            "mean_return": self.mean_return(),
            "sps": self.sps,
            "seconds": time.perf_counter() - self.started,
            "written_at": time.time(),
        }

    def write_status(self) -> None:
        """Rewrite status.json. A full disk must not end a run for its heartbeat: it goes on without."""
        self._last_status = time.perf_counter()
        left = None if self.phase in ("complete", "failed") else self.seconds_left()
        status = {"phase": self.phase, "pid": os.getpid(), **self.results(), "seconds_left": left}
        with contextlib.suppress(OSError):
            write_json(self.dir / "status.json", status, durable=False)

    def save(self, name: str, state: dict[str, torch.Tensor]) -> None:
        """Write a network's state dict into the folder, as CPU tensors, beside first, then in place."""
        with replacing(self.dir / name) as file:
            torch.save({key: value.cpu() for key, value in state.items()}, file)

    def finish(self, results: dict[str, Any]) -> dict[str, Any]:
        """Write summary.json, say the last lines, and return the summary."""
        summary = {**self.results(), "peak_memory_mib": peak_memory_mib(), "run_dir": str(self.dir), **results}
        write_json(self.dir / "summary.json", summary)
        self.set_phase("complete")
        self.terminal.progress(self.progress_line())
        self.terminal.line(f"complete in {duration(summary['seconds'])}: {self.dir}")
        return summary


def claim(folder: Path) -> int:
    """Make a run folder and take its lock, which the kernel releases when this process ends, however it ends.

    Returns:
        the lock's file descriptor.

    Raises:
        UsageError: a process holds the folder, it holds something already, or it cannot be made or locked.
    """
    try:
        if folder.exists() and any(folder.iterdir()) and not (folder / ".lock").exists():
            raise UsageError(f"{folder} is there already: move it away or choose another --run-name")
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / ".lock", os.O_CREAT | os.O_RDWR, 0o644)
    except OSError as error:
        raise UsageError(f"--runs-dir: cannot make {folder}: {error.strerror}") from None
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
    if len(list(folder.iterdir())) > 1:
        os.close(lock)
        raise UsageError(f"{folder} is there already: move it away or choose another --run-name")
    os.ftruncate(lock, 0)
    os.write(lock, f"{os.getpid()}\n".encode())
    return lock


class Terminal:
    """Standard output: one updating line on a terminal, plain lines elsewhere. One that goes away is not an error."""

    def __init__(self) -> None:
        self.is_tty = sys.stdout is not None and sys.stdout.isatty()
        self.gone = sys.stdout is None
        self._open_line = False

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
        self.end_progress()
        self._write(text + "\n")

    def progress(self, text: str) -> None:
        if self.is_tty:
            # a longer line would wrap, and only its last row be overwritten
            self._write(f"\r\x1b[K{text[: shutil.get_terminal_size().columns - 1]}")
            self._open_line = True
        else:
            self._write(text + "\n")

    def end_progress(self) -> None:
        if self._open_line:
            self._write("\n")
            self._open_line = False


def duration(seconds: float) -> str:
    """`h:mm:ss`"""
    seconds = int(seconds)
    return f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"


@contextlib.contextmanager
def replacing(path: Path, durable: bool = True) -> Iterator[BinaryIO]:
    """Write beside, then replace: a reader sees the old file or the new one, never half of one.

    `durable`: it is on the disk when this returns, and survives a loss of power.
    """
    beside = path.with_name(path.name + ".tmp")
    try:
        with open(beside, "wb") as file:
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)  # on a full disk its space is needed
        raise
    if durable:
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)


def write_json(path: Path, content: dict[str, Any], durable: bool = True) -> None:
    """JSON has no NaN and no infinity: they become null."""
    content = {key: None if isinstance(x, float) and not math.isfinite(x) else x for key, x in content.items()}
    text = json.dumps(content, indent=2, allow_nan=False) + "\n"
    with replacing(path, durable) as file:
        file.write(text.encode())


def peak_memory_mib() -> float:
    """The largest resident size of this process so far (VmHWM: getrusage would count what it was before exec)."""
    with contextlib.suppress(OSError):
        match = re.search(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
        if match:
            return int(match[1]) / 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Versions, git revision, processor and threads, for config.json."""
    packages = ("gymnasium", "ale-py", "numpy", "tensorboard")
    return {
        # torch's own word names its build too: cpu, cu130
        "packages": {"torch": torch.__version__, **{name: importlib.metadata.version(name) for name in packages}},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "available_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
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
        return subprocess.run(git, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    return None
