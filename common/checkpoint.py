"""Checkpoints: the whole state of a run at a boundary, from which it goes on bit for bit.

Everything that owns state has `state_dict()` and `load_state_dict()`; the script lists the owners in one dict, and that
dict is what a checkpoint holds. `boundary()` copies it, so that the state can be written later, when the loop has moved
on: a signal in the middle of a rollout or an update writes the boundary's state, and the work since is done again.

A file is an ordinary `torch.save` archive of Python numbers, strings, containers and tensors, readable with
`weights_only=True`. The archive's comment is the SHA-256 of all bytes before it.
"""

import contextlib
import copy
import hashlib
import io
import os
import random
import re
import shutil
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn as nn

from common.errors import Interrupted, SaveError, UsageError
from common.files import replacing, sync

FORMAT = 1
SHA256_DIGITS = 64
# Entries that belong to the process and not to the training: two checkpoints of one step may differ in them.
OF_THE_PROCESS = ("clock", "events")
ROLLING, KEPT, BEST = "step-{:012d}.pt", "keep-{:012d}.pt", "best.pt"


class Damaged(Exception):
    """A file is not what was once written."""


class Rng:
    """The generators that belong to no object: Python's, NumPy's, torch's on the CPU and on the run's GPU."""

    def __init__(self, seed: int, device: torch.device) -> None:
        """Seeds all of them."""
        self.device = device
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002  (somebody's change may use it)
        torch.manual_seed(seed)

    def state_dict(self) -> dict[str, Any]:
        kind, keys, *rest = np.random.get_state()  # noqa: NPY002
        return {
            "python": random.getstate(),
            "numpy": [kind, keys.tolist(), *rest],  # the array would need NumPy's pickles
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        version, internal, gauss = state["python"]
        random.setstate((version, tuple(internal), gauss))
        np.random.set_state(tuple(state["numpy"]))  # noqa: NPY002
        torch.set_rng_state(state["torch"])
        if self.device.type == "cuda" and state["cuda"] is not None:
            torch.cuda.set_rng_state(state["cuda"], self.device)


def pack(content: dict[str, Any]) -> bytearray:
    """What `torch.save` makes of it, its SHA-256 as the archive's comment (the zip format's APPNOTE.TXT, 4.3.16)."""
    archive = io.BytesIO()
    torch.save(content, archive)
    packed = bytearray(archive.getbuffer())
    packed[-2:] = struct.pack("<H", SHA256_DIGITS)  # the length of the comment, 0 before
    return packed + hashlib.sha256(packed).hexdigest().encode()


def unpack(packed: bytes | bytearray) -> dict[str, Any]:
    """The content, all tensors on the CPU.

    Raises:
        Damaged: it is not what `pack` once returned.
    """
    body, digest = memoryview(packed)[:-SHA256_DIGITS], bytes(packed[-SHA256_DIGITS:])
    if hashlib.sha256(body).hexdigest().encode() != digest:
        raise Damaged("its checksum is wrong")
    return torch.load(io.BytesIO(packed), map_location="cpu", weights_only=True)


def read(path: Path) -> dict[str, Any]:
    """A checkpoint.

    Raises:
        Damaged: it cannot be read, or is none.
    """
    try:
        content = unpack(path.read_bytes())
    except OSError as error:
        raise Damaged(error.strerror) from None
    if content["about"]["format"] != FORMAT:
        raise Damaged(f"its format is {content['about']['format']}, not {FORMAT}")
    return content


def step_of(path: Path) -> int:
    return int(re.fullmatch(r"\w+-(\d+)", path.stem)[1])


def newest_first(folder: Path) -> list[Path]:
    """The rolling and kept checkpoints of a run's `checkpoints` folder."""
    found = [path for path in folder.glob("*.pt") if re.fullmatch(r"(step|keep)-\d+", path.stem)]
    return sorted(found, key=lambda path: (step_of(path), path.name), reverse=True)


def newest_good(folder: Path) -> tuple[Path, dict[str, Any], dict[Path, str]]:
    """The newest checkpoint that can be read, its content, and the newer ones that can't, each with the reason.

    Raises:
        UsageError: there are checkpoints and none is good.
    """
    damaged: dict[Path, str] = {}
    for path in newest_first(folder):
        try:
            return path, read(path), damaged
        except Damaged as error:
            damaged[path] = str(error)
    names = ", ".join(path.name for path in damaged)
    reason = next(iter(damaged.values()))
    raise UsageError(f"none of {names} in {folder} can be read ({reason}): --resume never sets them aside")


class Checkpoints:
    """The checkpoints of one run, in `<run folder>/checkpoints`.

    Creating it restores the state if there is something to restore, and starts the run's own files either way.

    Args:
        run: a `Run` that holds its folder.
        state: owners of state by name; loaded in this order.
        signals: `StopSignals`, or anything with `asked`.

    Raises:
        UsageError: no good checkpoint among those that are there, or one that does not fit this command.
        Interrupted: a signal came while the state was being restored.
    """

    def __init__(self, run: Any, state: dict[str, Any], signals: Any) -> None:
        self.run, self.args, self.signals = run, run.args, signals
        # a compiled module has the names of the module that it wraps
        self.state = {name: getattr(owner, "_orig_mod", owner) for name, owner in state.items()}
        self.folder = run.dir / "checkpoints"
        self.origin: str | None = None  # what --resume PATH began from
        self.best = (0, -float("inf"))
        self.last: Path | None = None
        self.snapshot: dict[str, Any] | None = None
        self._saved_at: float | None = None  # time of the last save or attempt; None: the first boundary is to be saved
        self._kept = 0  # multiples of keep_every so far

        path, content, damaged = self._find()
        notes = self._check(path, content) if path else []
        if path:
            run.progress.load_state_dict(content["progress"])  # for status.json, from the start of the restore on
        if path and path.parent == self.folder:
            self.last = run.last_checkpoint = path
            self._saved_at = time.perf_counter()
        run.start(resumed_from=path and str(path))
        for half in self.folder.glob("*.tmp"):
            half.unlink()
        for newer, reason in damaged.items():
            newer.rename(newer.with_suffix(".damaged"))
            notes.append(f"{newer} is damaged ({reason}): renamed to .damaged, going on from {path.name}")
        if self.run.machine["device"] == "cuda" and not self.args.torch_deterministic:
            notes.append("--no-torch-deterministic: after an interruption the learner is exact, later bits may differ")
        for note in notes:
            run.terminal.line(note)
        if path:
            if self.last is None:
                del content["events"]  # of another folder
            self._restore(content)
            run.ready(f"resumed at step {run.progress.global_step:,} from {path}")
        else:
            run.ready()

    # ---- what to restore

    def _find(self) -> tuple[Path | None, dict[str, Any] | None, dict[Path, str]]:
        """What to go on from: the run's own newest checkpoint, else what --resume names, else nothing."""
        given = self.args.resume if self.args.resume not in ("auto", "never") else None
        self.origin = str(Path(given).resolve()) if given else None
        if newest_first(self.folder):
            path, content, damaged = newest_good(self.folder)
            origin = content["about"]["origin"]
            if given and origin != self.origin:
                raise UsageError(f"--resume {given}: {self.run.dir} was not begun from it; choose another --run-name")
            self.origin = origin
            return path, content, damaged
        if self.run.had_checkpoint:
            raise UsageError(f"{self.run.dir} had a checkpoint and has none now: --resume never sets it aside")
        if not given:
            return None, None, {}
        path = Path(given)
        if path.is_dir():
            folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
            if not newest_first(folder):
                raise UsageError(f"--resume {given}: no checkpoint there")
            path, content, _ = newest_good(folder)
            return path, content, {}
        try:
            return path, read(path), {}
        except Damaged as error:
            raise UsageError(f"--resume {given}: {error}") from None

    def _check(self, path: Path, content: dict[str, Any]) -> list[str]:
        """Compare a checkpoint with this command and this machine. Returns a line for each difference that is allowed.

        Raises:
            UsageError: it does not fit.
        """
        about = content["about"]
        if about["script"] != self.run.script:
            raise UsageError(f"{path} is a checkpoint of {about['script']}.py, not of {self.run.script}.py")
        missing = self.state.keys() - content.keys()
        if missing:
            raise UsageError(f"{path} holds no {', '.join(sorted(missing))}: another version wrote it")
        lines = []
        for name, now in self.args.result_flags().items():
            was, flag = about["args"].get(name, now), "--" + name.replace("_", "-")
            if was != now and name in self.args.FIXED:
                raise UsageError(f"{flag} {now}: {path} has {was}, which can't be changed on the way")
            if was != now:
                lines.append(f"{flag} {now} from here on, {was} before")
        machine = self.run.machine
        changed = [
            f"{name} {machine.get(name)} instead of {about['machine'].get(name)}"
            for name in about["machine"]
            if about["machine"][name] != machine.get(name)
        ]
        if changed:
            lines.append(f"{'; '.join(changed)}: the learner is exact, but no longer bit for bit an undisturbed run's")
        return lines

    def _restore(self, content: dict[str, Any]) -> None:
        for name, owner in self.state.items():
            if hasattr(owner, "replay_tick"):
                owner.replay_tick = self._replay_tick
            if name in content:
                owner.load_state_dict(content[name])
            self.run.terminal.line(getattr(owner, "restore_note", ""))
        self._kept = self.run.progress.global_step // (self.args.keep_every or 1)
        with contextlib.suppress(Damaged):  # or none: the next save writes one
            self.best = tuple(read(self.folder / BEST)["about"]["rank"])

    def _replay_tick(self, share: float) -> None:
        if self.signals.asked:
            raise Interrupted(f"interrupted by {self.signals.asked} while restoring: the same command continues")
        self.run.restoring(share)

    # ---- in the loop

    def boundary(self) -> None:
        """Copy the state as it is now. Saves it if it is the first one or time to; leaves if a signal came."""
        self.snapshot = {
            name: copy.deepcopy(owner.state_dict()) for name, owner in self.state.items() if name not in OF_THE_PROCESS
        }
        if self._saved_at is None:
            try:
                self._write()
            except OSError as error:
                raise UsageError(f"--runs-dir: cannot save a checkpoint into {self.folder}: {error.strerror}") from None
        elif self._is_due():
            self._try_to_write()
        self.stop_if_asked()

    def _is_due(self) -> bool:
        minutes = self.args.checkpoint_minutes
        on_time = minutes > 0 and time.perf_counter() - self._saved_at >= 60 * minutes
        return on_time or self._multiples() > self._kept

    def _multiples(self) -> int:
        return self.run.progress.global_step // self.args.keep_every if self.args.keep_every else 0

    def stop_if_asked(self) -> None:
        """Look whether a signal came. If so, save the last boundary's state and leave.

        Raises:
            Interrupted: a good checkpoint is on the disk.
            OSError: none could be written, and there is none.
        """
        if self.signals.asked is None:
            return
        if self.last is None or step_of(self.last) < self.snapshot["progress"]["global_step"]:
            self._try_to_write()
        raise Interrupted(
            f"interrupted by {self.signals.asked}: {self.last} is saved, the same command goes on from there"
        )

    def finish(self) -> None:
        """Save the end.

        Raises:
            SaveError: it could not be written.
        """
        self.snapshot = {name: owner.state_dict() for name, owner in self.state.items() if name not in OF_THE_PROCESS}
        try:
            self._write()
        except OSError as error:
            raise SaveError(f"cannot save the end into {self.folder}: {error.strerror}") from None

    # ---- writing

    def _try_to_write(self) -> None:
        try:
            self._write()
        except OSError as error:
            if self.last is None:
                raise
            self._saved_at = time.perf_counter()
            self.run.terminal.line(f"cannot save a checkpoint ({error.strerror}): the last good one is {self.last}")

    def _write(self) -> None:
        """Write the last boundary's state.

        Raises:
            FloatingPointError: a network holds infinities or NaNs.
            OSError
        """
        progress = self.snapshot["progress"]
        step = progress["global_step"]
        for name, owner in self.state.items():
            if isinstance(owner, nn.Module):
                for weight in self.snapshot[name].values():
                    if weight.is_floating_point() and not weight.isfinite().all():
                        raise FloatingPointError(f"{name} is not finite at step {step}: try a lower --learning-rate")
        phase = self.run.phase
        self.run.set_phase("save")
        self.run.events.flush(durable=True)  # first: the checkpoint counts them
        returns = progress["returns"]
        rank = (
            [len(returns), sum(returns) / len(returns)] if returns else [0, -float("inf")]
        )  # a full window counts more
        about = {
            "format": FORMAT,
            "script": self.run.script,
            "args": self.args.result_flags(),
            "machine": self.run.machine,
            "origin": self.origin,
            "global_step": step,
            "rank": rank,
        }
        process = {name: self.state[name].state_dict() for name in OF_THE_PROCESS}
        packed = pack({"about": about, **self.snapshot, **process})
        if self.last is None:
            unpack(
                packed
            )  # now and not after the first loss of the machine: is there anything that can't be read back?
        self.folder.mkdir(exist_ok=True)
        path = self.folder / ROLLING.format(step)
        with replacing(path) as file:
            file.write(packed)
        self.last = self.run.last_checkpoint = path
        self._saved_at = time.perf_counter()

        if tuple(rank) > self.best:
            self.best = tuple(rank)
            self._also(path, self.folder / BEST)
        if self.args.keep_every and self._multiples() > self._kept:
            self._kept = self._multiples()
            self._also(path, self.folder / KEPT.format(step))
        rolling = [old for old in newest_first(self.folder) if old.name.startswith("step-")]
        for old in rolling[self.args.keep_checkpoints :]:
            old.unlink(missing_ok=True)
        self.run.set_phase(phase)

    def _also(self, path: Path, name: Path) -> None:
        """The same file under a second name."""
        beside = name.with_suffix(".tmp")
        beside.unlink(missing_ok=True)
        try:
            os.link(path, beside)
        except OSError:  # a file system without links
            shutil.copyfile(path, beside)
        os.replace(beside, name)
        sync(self.folder)
