"""One training run on disk and on the terminal: folder, lock, events, heartbeat, progress line, summary."""

import contextlib
import fcntl
import importlib.metadata
import json
import os
import platform
import re
import resource
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.tensorboard import SummaryWriter

from common.errors import UsageError

HEARTBEAT = 5.0  # seconds between two status.json
PLAIN_LINE = 10.0  # seconds between two lines where there is no terminal


class Run:
    """The run folder `<runs_dir>/<name>` and everything that is written there.

    Use as a context manager around the whole of training. Nothing is on disk before `__init__` returns without an
    error; an exception inside leaves `status.json` with phase `failed`.

    Raises:
        UsageError: the folder is in use by another process, exists already, or cannot be written.
    """

    def __init__(self, runs_dir: str, name: str, total_timesteps: int, config: dict[str, Any]) -> None:
        self.dir = Path(runs_dir) / name
        self.total_timesteps = total_timesteps
        self._lock = self._claim()
        write_json(self.dir / "config.json", {**config, "machine": describe_machine()})
        self.writer = SummaryWriter(str(self.dir))
        rows = "".join(f"|{key}|{value}|\n" for key, value in config["args"].items())
        self.writer.add_text("hyperparameters", f"|param|value|\n|-|-|\n{rows}")
        self.returns: deque[float] = deque(maxlen=100)
        self.games = 0
        self.global_step = 0
        self.phase = "start"
        self.started = self._lap_time = time.perf_counter()
        self.laps: dict[str, float] = {}
        self._warm: tuple[int, float] | None = None  # step and time at the end of the warm-up iteration
        self._last_status = self._last_line = 0.0
        self.terminal = Terminal()
        self.terminal.line(f"run {self.dir}")
        self.set_phase("start")

    def _claim(self) -> int:
        if self.dir.exists():
            with contextlib.suppress(OSError):
                os.close(self._flock())
            raise UsageError(f"{self.dir} is there already: move it away or choose another --run-name")
        try:
            self.dir.mkdir(parents=True)
        except OSError as error:
            raise UsageError(f"--runs-dir: cannot make {self.dir}: {error.strerror}") from None
        return self._flock()

    def _flock(self) -> int:
        """Take the folder's lock, which the kernel releases when this process ends, however it ends."""
        lock = os.open(self.dir / ".lock", os.O_CREAT | os.O_RDWR, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            owner = os.read(lock, 32).decode().strip()
            os.close(lock)
            raise UsageError(f"{self.dir} is in use by process {owner}") from None
        os.ftruncate(lock, 0)
        os.write(lock, f"{os.getpid()}\n".encode())
        return lock

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any) -> None:
        if error is not None:
            self.set_phase("failed")
        self.writer.close()
        self.terminal.close()
        os.close(self._lock)

    # ---- time

    def set_phase(self, phase: str) -> None:
        """`rollout`, `update` ...: named in status.json at once."""
        self.phase = phase
        self.write_status()

    def lap(self, part: str) -> None:
        """Add the time since the last lap to a part of the loop (`environment`, `inference`, `learning`)."""
        now = time.perf_counter()
        self.laps[part] = self.laps.get(part, 0.0) + now - self._lap_time
        self._lap_time = now

    def sps(self) -> float:
        """Agent steps a second of this process, the warm-up iteration left out once there is another."""
        step, since = (0, self.started) if self._warm is None else self._warm
        if self.global_step == step:
            step, since = 0, self.started
        return (self.global_step - step) / max(time.perf_counter() - since, 1e-9)

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
        """Log one iteration's scalars, with speed and shares of wall time, and refresh progress line and heartbeat."""
        self.global_step = global_step
        elapsed = sum(self.laps.values()) or 1.0
        shares = {f"time/{part}": seconds / elapsed for part, seconds in self.laps.items()}
        self.laps = {}
        for tag, value in {**scalars, "charts/SPS": self.sps(), **shares}.items():
            self.writer.add_scalar(tag, value, global_step)
        if self._warm is None:
            self._warm = (global_step, time.perf_counter())
        now = time.perf_counter()
        if self.terminal.is_tty or now - self._last_line >= PLAIN_LINE:
            self._last_line = now
            self.terminal.progress(self.progress_line())
        if now - self._last_status >= HEARTBEAT:
            self.write_status()

    def mean_return(self) -> float | None:
        """Of the last 100 games, or of all while they are fewer."""
        return sum(self.returns) / len(self.returns) if self.returns else None

    def reached(self, stop_at_return: float | None) -> bool:
        """Whether the mean of the last 100 games, all 100 of them, reaches a return."""
        full = len(self.returns) == self.returns.maxlen
        return stop_at_return is not None and full and self.mean_return() >= stop_at_return

    # ---- what others read

    def progress_line(self) -> str:
        mean, sps = self.mean_return(), self.sps()
        return (
            f"step {self.global_step:,}/{self.total_timesteps:,} ({self.global_step / self.total_timesteps:.1%})"
            f"  return {'-' if mean is None else f'{mean:.2f}'}  SPS {sps:,.0f}"
            f"  left {duration((self.total_timesteps - self.global_step) / max(sps, 1e-9))}"
        )

    def status(self) -> dict[str, Any]:
        sps = self.sps()
        return {
            "phase": self.phase,
            "pid": os.getpid(),
            "global_step": self.global_step,
            "total_timesteps": self.total_timesteps,
            "games": self.games,
            "mean_return": self.mean_return(),
            "sps": sps,
            "seconds": time.perf_counter() - self.started,
            "seconds_left": (self.total_timesteps - self.global_step) / sps if sps > 0 else None,
            "written_at": time.time(),
        }

    def write_status(self) -> None:
        self._last_status = time.perf_counter()
        write_json(self.dir / "status.json", self.status(), durable=False)

    def save(self, name: str, state: dict[str, Any]) -> None:
        """Write a state dict into the folder, beside first, then in place."""
        beside = self.dir / f"{name}.tmp"
        torch.save(state, beside)
        os.replace(beside, self.dir / name)

    def finish(self, results: dict[str, Any]) -> dict[str, Any]:
        """Write summary.json, say the last lines, and return the summary."""
        self.set_phase("complete")
        summary = {
            **{key: value for key, value in self.status().items() if key not in ("phase", "pid", "seconds_left")},
            # ru_maxrss is in KiB on Linux, in bytes on macOS
            "peak_memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            / (2**20 if sys.platform == "darwin" else 2**10),
            "run_dir": str(self.dir),
            **results,
        }
        write_json(self.dir / "summary.json", summary)
        self.terminal.progress(self.progress_line())
        self.terminal.end_progress()
        self.terminal.line(f"complete in {duration(summary['seconds'])}: {self.dir}")
        return summary


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
            self._write(f"\r\x1b[K{text}")
            self._open_line = True
        else:
            self._write(text + "\n")

    def end_progress(self) -> None:
        if self._open_line:
            self._write("\n")
            self._open_line = False

    close = end_progress


def duration(seconds: float) -> str:
    """`h:mm:ss`"""
    seconds = int(seconds)
    return f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"


def write_json(path: Path, content: dict[str, Any], durable: bool = True) -> None:
    """Write beside, then replace: a reader sees the old file or the new one, never half of one."""
    beside = path.with_name(path.name + ".tmp")
    with open(beside, "w") as file:
        json.dump(content, file, indent=2)
        file.write("\n")
        if durable:
            file.flush()
            os.fsync(file.fileno())
    os.replace(beside, path)


def describe_machine() -> dict[str, Any]:
    """Versions, git revision, processor and threads, for config.json."""
    packages = ("torch", "gymnasium", "ale-py", "numpy", "tensorboard")
    return {
        "packages": {name: importlib.metadata.version(name) for name in packages},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
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
