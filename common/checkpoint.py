"""Checkpoints: the whole state of a run at a boundary, from which it goes on bit for bit.

Everything that owns state has `state_dict()` and `load_state_dict()`; the script lists the owners in one dict, and that
dict is what a checkpoint holds. `boundary()` copies it, so that the state can be written later, when the loop has moved
on: a signal in the middle of a rollout or an update writes the boundary's state, and the work since is done again.

A file is an ordinary `torch.save` archive of Python numbers, strings, containers and tensors, readable with
`weights_only=True`. The archive's comment is the SHA-256 of all bytes before it.
"""

import contextlib
import copy
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

from common.errors import Interrupted, LimitReached, SaveError, UsageError
from common.files import SHA256_DIGITS, is_sealed, replacing, sealed, sync

FORMAT = 1
# Entries that belong to the process and not to the training: two checkpoints of one step may differ in them.
OF_THE_PROCESS = ("clock", "events")
# In the description of the environments: how they run here.
OF_THE_MACHINE = ("threads", "processes", "emulator_seeds")
RETRY = 60.0  # seconds after a save that failed
CUT_RESTORES = 5  # in a row, after which a run stops by itself
LEAVING = 1.0  # seconds from a save to the end of the process, at most
SEEN = 6.0  # seconds from a cloud's notice until it is seen, at most
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
    return sealed(packed)


def unpack(packed: bytes | bytearray) -> dict[str, Any]:
    """The content, all tensors on the CPU.

    Raises:
        Damaged: it is not what `pack` once returned.
    """
    if not is_sealed(packed):
        whole = packed[:2] == b"PK" and packed[-SHA256_DIGITS:].isalnum()
        raise Damaged("its checksum is wrong" if whole else "it is no checkpoint, or no whole one")
    return torch.load(io.BytesIO(packed), map_location="cpu", weights_only=True)


def read(path: Path) -> dict[str, Any]:
    """A checkpoint.

    Raises:
        Damaged: it is none, or no longer.
        UsageError: it can't be read at the moment, or another version wrote it.
    """
    try:
        content = unpack(path.read_bytes())
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    if content["about"]["format"] != FORMAT:
        raise UsageError(f"{path} has format {content['about']['format']}, this version reads {FORMAT}")
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
    raise UsageError(
        f"none of {names} in {folder} can be read ({reason}); training with --resume never sets them aside"
    )


class Checkpoints:
    """The checkpoints of one run, in `<run folder>/checkpoints`.

    Creating it restores the state if there is something to restore, and starts the run's own files either way.

    Args:
        run: a `Run` that holds its folder.
        state: owners of state by name; loaded in this order.
        signals: `StopSignals`.

    Raises:
        UsageError: no good checkpoint among those that are there, or one that does not fit this command.
        Interrupted: a signal came while the state was being restored.
        LimitReached: all that may be spent was spent before.
    """

    def __init__(self, run: Any, state: dict[str, Any], signals: Any) -> None:
        self.run, self.args, self.signals = run, run.args, signals
        # a compiled module has the names of the module that it wraps
        self.state = {name: getattr(owner, "_orig_mod", owner) for name, owner in state.items()}
        self.folder = run.dir / "checkpoints"
        self.origin: str | None = None  # the PATH of --resume PATH that the run began from
        self.best = (0, -float("inf"))
        self.last: Path | None = None
        self.snapshot: dict[str, Any] | None = None
        self._saved_at: float | None = None  # time of the last save or attempt; None: the first boundary is to be saved
        self._failed = False  # the last save
        self._noticed = False  # whether a cloud's notice is long enough for a save has been looked at
        self._kept = 0  # multiples of keep_every that the checkpoints kept for good have passed

        path, content, damaged = self._find()
        notes = self._check(path, content) if path else []
        self._boundary_seconds = 0.0  # what the work between the last two boundaries took
        self._boundary_at: float | None = None
        if path and run.clock.exceeds(run.clock.needed):
            raise LimitReached(self._limit(f"{path} is saved"))
        own = path is not None and path.parent == self.folder
        if path:
            run.progress.load_state_dict(content["progress"])  # for status.json, from the start of the restore on
        if own:
            self.last = run.last_checkpoint = path
            self._saved_at = time.perf_counter()
        run.start(resumed_from=path and str(path))
        for half in self.folder.glob("*.tmp"):
            half.unlink()
        for newer, reason in damaged.items():
            notes.append(f"{newer} is damaged ({reason}): going on from {path.name}")
            if own:
                newer.rename(newer.with_suffix(".damaged"))
        if self.run.machine["device"] == "cuda" and not self.args.torch_deterministic:
            notes.append("--no-torch-deterministic: after an interruption the learner is exact, later bits may differ")
        for note in notes:
            run.terminal.line(note)
        if run.barren > 1:
            run.terminal.line(
                f"the last {run.barren} processes of this run saved nothing new: the first checkpoint is made sooner"
            )
        if (cut := run.cut_restores)["count"] >= CUT_RESTORES:
            run.restore, run.cut_restores = None, {"count": 0, "seconds": 0.0}  # started again by hand, it tries again
            raise LimitReached(
                f"stopped: the last {cut['count']} processes were ended while they restored {path}, which takes about "
                f"{cut['seconds']:.0f} s: it needs a machine that lives longer, where the same command goes on"
            )
        run.rescue = self._rescue
        for owner in self._owners("waiting"):
            owner.waiting = self.stop_if_asked
        if path:
            self._restore(path, content, own)
            run.ready(f"resumed at step {run.progress.global_step:,} from {path}")
            if own:
                self._push(step_of(path))
        else:
            run.ready()

    def _owners(self, attribute: str) -> list[Any]:
        return [owner for owner in self.state.values() if hasattr(owner, attribute)]

    # ---- what to restore

    def _find(self) -> tuple[Path | None, dict[str, Any] | None, dict[Path, str]]:
        """What to go on from: the run's own newest checkpoint, else what --resume names, else nothing."""
        given = self.args.resume if self.args.resume not in ("auto", "never") else None
        if newest_first(self.folder):
            path, content, damaged = newest_good(self.folder)
            self.origin = content["about"]["origin"]
            if given and self.origin != given:
                raise UsageError(f"--resume {given}: {self.run.dir} was not begun from it; choose another --run-name")
            return path, content, damaged
        if self.run.had_checkpoint:
            raise UsageError(f"{self.run.dir} had a checkpoint and has none now: --resume never sets it aside")
        if not given:
            return None, None, {}
        self.origin, path = given, Path(given)
        folder = path / "checkpoints" if os.path.isdir(path / "checkpoints") else path
        if not os.path.exists(path) or (path.is_dir() and not newest_first(folder)):
            raise UsageError(f"--resume {given}: no checkpoint there")
        if path.is_dir():
            return newest_good(folder)
        try:
            return path, read(path), {}
        except Damaged as error:
            raise UsageError(f"--resume {given}: {error}") from None

    def _check(self, path: Path, content: dict[str, Any]) -> list[str]:
        """Compare a checkpoint with this command and this machine. Returns a line for each difference that is allowed.

        Raises:
            UsageError: it does not fit.
        """
        about, machine = content["about"], self.run.machine
        if about["script"] != self.run.script:
            raise UsageError(f"{path} is a checkpoint of {about['script']}.py, not of {self.run.script}.py")
        lines = []
        for name, now, was in self.args.changed(about["args"]):
            if name in self.args.FIXED:
                raise UsageError(f"{now}: {path} has {was}, which can't be changed on the way")
            lines.append(f"{now} from here on, {was} before")
        missing = self.state.keys() - content.keys()
        if missing:
            raise UsageError(f"{path} holds no {', '.join(sorted(missing))}: another version wrote it")
        if path.parent != self.folder and about["global_step"] >= self.run.total_timesteps:
            raise UsageError(f"--total-timesteps {self.args.total_timesteps}: {path} is at step {about['global_step']}")
        changed = [
            f"{name} {machine.get(name)} instead of {was}"
            for name, was in about["machine"].items()
            if machine.get(name) != was and (name != "git_revision" or (was and machine.get(name)))
        ]
        if changed:
            lines.append(f"{'; '.join(changed)}: the learner is exact, but no longer bit for bit an undisturbed run's")
        return lines

    def _restore(self, path: Path, content: dict[str, Any], own: bool) -> None:
        self._restoring = path
        for name, owner in self.state.items():
            if name == "events" and not own:
                continue
            if hasattr(owner, "replay_tick"):
                owner.replay_tick = self._replay_tick
            if hasattr(owner, "source"):
                owner.source = path.parent.parent / owner.FOLDER
            try:
                owner.load_state_dict(content[name])
            except (KeyError, RuntimeError, TypeError, ValueError) as error:
                reason = " ".join(str(error).split())
                raise UsageError(f"{path}: its {name} does not fit this program: {reason}") from None
            self.run.terminal.line(getattr(owner, "restore_note", ""))
        if own:
            if (self.folder / BEST).exists():
                with contextlib.suppress(Damaged):  # the next one replaces it
                    self.best = tuple(read(self.folder / BEST)["about"]["rank"])
            kept = [step_of(kept) for kept in newest_first(self.folder) if kept.name.startswith("keep-")]
            self._kept = self._multiples(max(kept, default=0))
            self._name(path, content["about"])  # a kill may have come between the file and its names

    def _replay_tick(self, share: float) -> None:
        if self.signals.asked:
            if not self.signals.asked.startswith("SIG"):
                self.run.restore = None  # a cloud's notice says nothing of how long machines live
            what = f"while restoring {self._restoring}"
            raise Interrupted(f"interrupted by {self.signals.asked} {what}: {self._goes_on()}")
        if self.run.clock.exceeds(LEAVING):
            raise LimitReached(self._limit(f"{self._restoring} is saved"))
        self.run.restoring(share)

    def _goes_on(self) -> str:
        without = " without --resume never" if self.args.resume == "never" else ""
        return f"the same command{without} goes on from there"

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
        self._warn_of_short_notice()
        # what would come until the next boundary is not worth beginning if the money ends before
        now = time.perf_counter()
        self._boundary_seconds, self._boundary_at = now - (self._boundary_at or now), now
        self.stop_if_asked(self._boundary_seconds)

    def between_steps(self) -> None:
        """As `boundary`, for loops that can stop after each step, where nothing is on the way: nothing is copied."""
        self._warn_of_short_notice()
        if self._saved_at is None or self.signals.asked or self._is_due() or self.run.clock.exceeds(self._reserve()):
            self._boundary_at = time.perf_counter()  # a step's work is next to nothing
            self.boundary()
            self.snapshot = None  # the next step changes what it holds

    def _is_due(self) -> bool:
        since = time.perf_counter() - self._saved_at
        # a process that is killed before it saves anything leaves the next one less time to try
        minutes = self.args.checkpoint_minutes / 2 ** min(self.run.barren, 10)
        on_time = minutes > 0 and since >= 60 * minutes
        to_keep = self._multiples(self.run.progress.global_step) > self._kept
        newest = step_of(self.last) if self.last else 0
        by_owner = any(owner.save_due(newest, self.args.keep_checkpoints) for owner in self._owners("save_due"))
        return (on_time or to_keep or by_owner or self.signals.advised) and (not self._failed or since >= RETRY)

    def _multiples(self, step: int) -> int:
        return step // self.args.keep_every if self.args.keep_every else 0

    def stop_if_asked(self, work: float = 0.0) -> None:
        """Look whether a signal came, or the money ends within so many seconds of `work` and a save. If so, save the
        last boundary's state and leave.

        Raises:
            Interrupted, LimitReached: a good checkpoint is on the disk.
            SaveError: none could be written, and the last one is gone.
            OSError: none could be written, and there is none.
        """
        clock = self.run.clock
        at_limit = clock.exceeds(self._reserve() + work)
        if not (self.signals.asked or at_limit) or self.snapshot is None:
            return
        now = self.snapshot["progress"]["global_step"]
        if self.last is None or step_of(self.last) < now:
            self._try_to_write()
        if not self.last.exists():
            raise SaveError(f"step {now:,} could not be saved, and {self.last} is gone")
        saved = step_of(self.last)
        how = f"{self.last} is saved" if saved == now else f"only {self.last} is saved, not step {now:,}"
        if self.signals.asked is None:
            clock.needed = self._reserve() + work
            raise LimitReached(self._limit(how))
        raise Interrupted(f"interrupted by {self.signals.asked}: {how}, {self._goes_on()}")

    def _reserve(self) -> float:
        """Seconds for one more save and the way out."""
        # later ones are larger than the first
        return 3 * self.run.clock.save_seconds + self.run.mirror.exit_seconds() + LEAVING

    def _limit(self, how: str) -> str:
        clock = self.run.clock
        spent = f"${clock.dollars():,.4f} of --max-cost {clock.max_cost:g} spent"
        return f"stopped at the limit, {spent}: {how}, the same command with a higher one goes on from there"

    def _rescue(self) -> None:
        """After an error that is no fault of the state: save the last boundary's if it is not on the disk."""
        if self.snapshot and self.last and step_of(self.last) < self.snapshot["progress"]["global_step"]:
            self._try_to_write()

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
            self._saved_at, self._failed = time.perf_counter(), True
            gone = any(owner.overtakes(step_of(self.last)) for owner in self._owners("overtakes"))
            note = ", but its replay memory is being overwritten" if gone else ""
            self.run.terminal.line(
                f"cannot save a checkpoint ({error.strerror}): the last good one is {self.last}{note}"
            )

    def _write(self) -> None:
        """Write the last boundary's state.

        Raises:
            FloatingPointError: a network holds infinities or NaNs.
            OSError
        """
        began = time.perf_counter()
        self.run.drain()
        progress = self.snapshot["progress"]
        progress["scalars"] = self.run.progress.scalars  # the iteration's before the boundary, read since
        step = progress["global_step"]
        for name, owner in self.state.items():
            if isinstance(owner, nn.Module):
                for weight in self.snapshot[name].values():
                    if weight.is_floating_point() and not weight.isfinite().all():
                        raise FloatingPointError(f"{name} is not finite at step {step}: try a lower --learning-rate")
        phase = self.run.phase
        self.run.set_phase("save")
        self.run.events.flush(durable=True)  # first: the checkpoint counts them
        for owner in self._owners("sync"):
            owner.sync()
        returns = progress["returns"]
        # of two means the one of more games counts, until there are 100
        rank = [len(returns), sum(returns) / len(returns)] if returns else [0, -float("inf")]
        about = {
            "format": FORMAT,
            "script": self.run.script,
            "args": self.args.result_flags(),
            "machine": self.run.machine,
            "env": {key: x for key, x in self.run.config.get("env", {}).items() if key not in OF_THE_MACHINE},
            "origin": self.origin,
            "global_step": step,
            "rank": rank,
        }
        process = {name: self.state[name].state_dict() for name in OF_THE_PROCESS}
        packed = pack({"about": about, **self.snapshot, **process})
        if self.last is None:
            unpack(packed)  # what can't be read back is better found now than after the loss of the machine
            self._warn_of_full_disk(len(packed))
        if not self.folder.exists():
            self.folder.mkdir()
            sync(self.run.dir)
            sync(self.run.dir.parent)
        path = self.folder / ROLLING.format(step)
        with replacing(path) as file:
            file.write(packed)
        self.last = self.run.last_checkpoint = path
        self._saved_at, self._failed, self.run.barren = time.perf_counter(), False, 0
        self.run.clock.save_seconds = self._saved_at - began
        self._name(path, about)
        rolling = [old for old in newest_first(self.folder) if old.name.startswith("step-")]
        for old in rolling[self.args.keep_checkpoints :]:
            old.unlink(missing_ok=True)
        self._push(step)
        self.signals.advised = False
        self.run.set_phase(phase)

    def _push(self, step: int) -> None:
        self.run.mirror.push(step, [part for owner in self._owners("parts") for part in owner.parts()])

    def _warn_of_short_notice(self) -> None:
        """Once, as soon as the cloud is known, which takes longer than the first checkpoint."""
        lead = self.signals.lead
        if lead is None or self._noticed or self._saved_at is None:
            return
        self._noticed, needed = True, SEEN + self._reserve()
        if needed > lead:
            self.run.terminal.line(
                f"a save took {self.run.clock.save_seconds:.1f} s: until a notice is seen and a later save is written "
                f"{needed:.0f} s may pass, and this cloud gives {lead:.0f}; what is trained after the last checkpoint "
                f"would be lost. A faster disk for --runs-dir or a smaller --buffer-size helps, and "
                f"--checkpoint-minutes below {self.args.checkpoint_minutes:g} loses less"
            )

    def _warn_of_full_disk(self, size: int) -> None:
        """The first checkpoint has no optimiser's averages yet: later ones are up to three times as large."""
        free, needed = shutil.disk_usage(self.run.dir).free, 3 * size * (self.args.keep_checkpoints + 2)
        if free < needed:
            self.run.terminal.line(
                f"{free / 2**20:,.0f} MiB of disk are free below {self.run.dir}, checkpoints will need "
                f"{needed / 2**20:,.0f}: make room, or what is trained can't be saved"
            )

    def _name(self, path: Path, about: dict[str, Any]) -> None:
        """Give a checkpoint the names of the best one, and of one that is kept for good, if it is."""
        if tuple(about["rank"]) > self.best:
            self._also(path, self.folder / BEST)
            self.best = tuple(about["rank"])
        multiples = self._multiples(about["global_step"])
        if multiples > self._kept:
            self._also(path, self.folder / KEPT.format(about["global_step"]))
            self._kept = multiples

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
