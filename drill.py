"""A fire drill: interrupts a training command at random and compares the result with an undisturbed run's.

    python drill.py --kills 10 --terms 3 ppo_atari.py --env-id PongNoFrameskip-v4 --total-timesteps 50000

It runs the command to the end once, then again, ending it with SIGKILL and SIGTERM at random moments of all phases
(restore, rollout, update, save) and starting the same command until it completes. Then it compares final checkpoints
and curves and prints PASS, or what differs. It knows nothing of the script but its contract: `--runs-dir`, the phase in
`status.json` (with `pid`, `global_step` and `resumed_from`), `checkpoints/step-*.pt` that `torch.load` reads, and exit
status 75. With `--mirror URL` the disk is lost too: the run folder is deleted after each interruption, some land in
a copy to the mirror, and nothing but the run may be left there at the end.
"""

import argparse
import ctypes
import json
import logging
import os
import random
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import torch
from fsspec.core import url_to_fs
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from common.files import is_sealed

# what may differ between two equal runs: entries of a checkpoint, and curves that measure the machine or the clock
OF_THE_PROCESS = ("clock", "events")
TIMED = ("charts/SPS", "time/", "system/", "gpu/", "cost/")

PHASES = ("restore", "rollout", "update", "save")
COPY = "copy"  # to the mirror, beside all of these
POLL = 0.002  # seconds between two looks at status.json
ORPHANS_END = 5.0  # seconds that children of a killed process have
EXITS = 300.0  # seconds that a process has to leave after a signal
PATIENCE = 1800.0  # seconds to wait for a phase


class Failed(Exception):
    """The drill found something. Its text is the report."""


# ---- comparing


def differences(ours: Any, theirs: Any, where: str) -> list[str]:
    """Where two nested structures of tensors, containers and plain values are not the same bit for bit."""
    if isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor):
        if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
            return [f"{where}: {ours.dtype} {list(ours.shape)}, {theirs.dtype} {list(theirs.shape)}"]
        # as bytes: NaN equals NaN, and 0.0 is not -0.0
        x, y = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (ours, theirs))
        return [] if torch.equal(x, y) else [f"{where}: {(ours != theirs).sum()} of {ours.numel()} elements"]
    if isinstance(ours, dict) and isinstance(theirs, dict) and ours.keys() == theirs.keys():
        return [line for key in ours for line in differences(ours[key], theirs[key], f"{where}.{key}")]
    if isinstance(ours, list | tuple) and isinstance(theirs, list | tuple) and len(ours) == len(theirs):
        pairs = enumerate(zip(ours, theirs, strict=True))
        return [line for i, (x, y) in pairs for line in differences(x, y, f"{where}[{i}]")]
    if type(ours) is type(theirs) and (ours == theirs or (ours != ours and theirs != theirs)):
        return []
    return [f"{where}: {str(ours)[:60]}, {str(theirs)[:60]}"]


def final_checkpoint(run_dir: Path) -> dict[str, Any]:
    path = max((run_dir / "checkpoints").glob("step-*.pt"), default=None)
    if path is None:
        raise Failed(f"no step-*.pt in {run_dir / 'checkpoints'}")
    content = torch.load(path, map_location="cpu", weights_only=True)
    return {name: entry for name, entry in content.items() if name not in OF_THE_PROCESS}


def curves(run_dir: Path) -> dict[str, list[tuple[int, float]]]:
    """`tag -> [(step, value), ...]`, as TensorBoard reads them, without the timed ones."""
    logging.getLogger("tensorboard").setLevel(logging.ERROR)  # it warns of each restart
    events = EventAccumulator(str(run_dir), size_guidance={"scalars": 0})
    events.Reload()
    tags = [tag for tag in events.Tags()["scalars"] if not tag.startswith(TIMED)]
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in tags}


def compare(undisturbed: Path, disturbed: Path) -> list[str]:
    """What differs between two complete runs: every entry of the last checkpoint, and every point of every curve."""
    lines = differences(final_checkpoint(undisturbed), final_checkpoint(disturbed), "checkpoint")
    ours, theirs = curves(undisturbed), curves(disturbed)
    for tag in sorted(ours.keys() | theirs.keys()):
        x, y = ours.get(tag, []), theirs.get(tag, [])
        unequal = len(differences(x[: len(y)], y[: len(x)], tag))
        if unequal or len(x) != len(y):
            lines.append(f"curve {tag}: {len(x)} and {len(y)} points, {unequal} of them differ")
    return lines


# ---- running


def die_with_parent() -> None:
    """In the child: the kernel ends it when the drill ends, however that does (prctl(2), PR_SET_PDEATHSIG)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


class MirrorView:
    """What stands in the mirror of the only run below an address (see common/mirror.py)."""

    def __init__(self, url: str) -> None:
        self.fs, self.base = url_to_fs(url, use_listings_cache=False, skip_instance_cache=True)

    def names(self) -> list[str]:
        return [path for path in self.fs.find(self.base) if not path.endswith(".tmp")]  # none where nothing is

    def look(self) -> tuple[dict[str, Any], list[str]]:
        """The newest manifest, empty if there is none, and the files that it does not name."""
        names = self.names()
        for path in sorted((name for name in names if "/manifest-" in name), reverse=True):
            try:
                content = self.fs.cat_file(path)
            except FileNotFoundError:  # a newer one is there by now
                return self.look()
            if is_sealed(content):
                manifest = json.loads(content.splitlines()[0])
                folder = path.rpartition("/")[0]
                named = {
                    f"{folder}/objects/{piece[2]}" for file in manifest["files"].values() for piece in file["pieces"]
                }
                return manifest, [name for name in names if name not in named | {path, f"{folder}/lease.json"}]
        return {}, [name for name in names if not name.endswith("/lease.json")]


class Command:
    """The command under drill, with a folder of its own for its runs."""

    def __init__(self, words: list[str], runs_dir: Path, mirror: str | None = None) -> None:
        """`mirror`: the run folder is lost with each interruption, and the command has this one."""
        self.words = [sys.executable, *words, "--runs-dir", str(runs_dir)]
        self.words += ["--mirror", mirror] if mirror else []
        self.mirror = MirrorView(mirror) if mirror else None
        self.runs_dir = runs_dir
        self.process: subprocess.Popen | None = None
        self.log = runs_dir.with_suffix(".log")

    def start(self) -> None:
        with self.log.open("ab") as log:
            # a session of its own, so that what it leaves behind can be found
            self.process = subprocess.Popen(
                self.words,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )

    def run_dir(self) -> Path | None:
        found = [path.parent for path in self.runs_dir.glob("*/status.json")]
        return found[0] if found else None

    def status(self) -> dict[str, Any]:
        """Of the process that runs now; empty before it wrote one."""
        folder = self.run_dir()
        if folder is None:
            return {}
        try:
            status = json.loads((folder / "status.json").read_text())
        except (OSError, ValueError):
            return {}
        missing = {"pid", "phase", "global_step", "resumed_from"} - status.keys()
        if missing:
            raise Failed(f"status.json has no {', '.join(sorted(missing))}")
        return status if status["pid"] == self.process.pid else {}

    def lose_disk(self) -> None:
        if self.mirror:
            shutil.rmtree(self.runs_dir, ignore_errors=True)

    def phases(self) -> tuple[str, ...]:
        return (*PHASES, COPY) if self.mirror else PHASES

    def is_copying(self) -> bool:
        return bool(self.mirror.look()[1])

    def has_checkpoint(self) -> bool:
        if self.mirror:
            return self.mirror.look()[0].get("step") is not None
        return any(self.runs_dir.glob("*/checkpoints/*.pt"))

    def leftovers(self) -> list[int]:
        """Processes of this command's session, its own process apart."""
        found = []
        for pid in psutil.pids():
            try:
                if pid != self.process.pid and os.getsid(pid) == self.process.pid:
                    found.append(pid)
            except OSError:
                continue
        return found

    def require_no_leftovers(self) -> None:
        deadline = time.monotonic() + ORPHANS_END
        while left := self.leftovers():
            if time.monotonic() > deadline:
                raise Failed(f"processes {left} outlived theirs by {ORPHANS_END:.0f} s")
            time.sleep(0.05)

    def tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])


def run_undisturbed(command: Command) -> dict[str, float]:
    """Run to the end. Returns the mean seconds of each phase."""
    command.start()
    spent, seen = Counter(), Counter()
    phase, since = None, time.monotonic()
    while command.process.poll() is None:
        now = command.status().get("phase")
        if now != phase:
            if phase:
                spent[phase] += time.monotonic() - since
                seen[phase] += 1
            phase, since = now, time.monotonic()
        time.sleep(POLL)
    if command.process.returncode != 0:
        raise Failed(f"the undisturbed run ended with status {command.process.returncode}:\n{command.tail()}")
    return {name: spent[name] / seen[name] for name in seen}


class Drill:
    """Interruptions of one command until it completes."""

    def __init__(self, command: Command, plan: list[tuple[int, str]], seconds: dict[str, float], seed: int) -> None:
        """`plan`: a signal and the phase in which it should land, for each interruption. `seconds`: of a phase."""
        self.command, self.plan, self.seconds = command, plan, seconds
        self.rng = random.Random(seed)
        self.landed: Counter[tuple[str, str]] = Counter()  # signal and phase
        phases = len(command.phases())
        self.tries = 3 * phases if len(plan) >= phases else 0  # more interruptions, for phases that all missed
        self.exit_seconds: list[float] = []  # from SIGTERM to the end of the process

    def run(self) -> None:
        """Raises `Failed` when the command breaks its contract."""
        delivered = 0
        while True:
            self.command.lose_disk()
            had_checkpoint = self.command.has_checkpoint()
            self.command.start()
            if delivered == len(self.plan) and self.missed() and self.tries:
                self.tries -= 1
                self.plan.append((signal.SIGKILL, self.missed()[0]))
            number, phase = self.plan[delivered] if delivered < len(self.plan) else (None, None)
            before = self.wait_for(phase) if number else None
            if before:
                delivered += self.interrupt(number, before, had_checkpoint, delivered)
                continue
            status = self.command.process.wait()
            if status != 0:
                raise Failed(f"ended with status {status}, not 0:\n{self.command.tail()}")
            if self.command.status():  # empty: it was complete already and wrote nothing
                self.require_resumed(had_checkpoint)
            if delivered < len(self.plan):
                raise Failed(f"complete after {delivered} of {len(self.plan)} interruptions: make the run longer")
            return

    def wait_for(self, phase: str) -> dict[str, Any] | None:
        """Wait for a random moment of a phase. Returns the status then, None if the process ended before."""
        if phase == "restore" and not self.command.has_checkpoint():
            phase = "save"  # there is nothing to restore yet
        visits = 1 if phase == "restore" else self.rng.randint(1, 3)
        now, since = None, time.monotonic()
        deadline = since + PATIENCE
        while self.command.process.poll() is None:
            before, now = now, self.command.status().get("phase")
            if phase == COPY:
                if now in PHASES[1:] and self.command.is_copying():
                    return self.command.status()
            elif now != before:
                if before == "restore":  # the undisturbed run had none
                    self.seconds["restore"] = time.monotonic() - since
                since = time.monotonic()
                visits -= now == phase
                if visits == 0 and now == phase:
                    time.sleep(self.rng.uniform(0, self.seconds.get(phase, 0.1)))
                    return self.command.status()
            if time.monotonic() > deadline:
                raise Failed(f"no phase {phase} within {PATIENCE:.0f} s:\n{self.command.tail()}")
            time.sleep(POLL)
        return None

    def interrupt(self, number: int, before: dict[str, Any], had_checkpoint: bool, delivered: int) -> bool:
        """Send the signal and look at what it did. Whether it counts: it reached a process that had begun."""
        process = self.command.process
        sent = time.monotonic()
        process.send_signal(number)
        try:
            status = process.wait(EXITS)
        except subprocess.TimeoutExpired:
            raise Failed(f"{signal.Signals(number).name} in {before['phase']}: still there after {EXITS} s") from None
        seconds = time.monotonic() - sent
        if status == 0:  # it was done before the signal reached it
            return False
        name = signal.Signals(number).name
        expected = -signal.SIGKILL if number == signal.SIGKILL else 75
        if status != expected:
            raise Failed(f"{name} in {before['phase']}: status {status}, not {expected}:\n{self.command.tail()}")
        self.command.require_no_leftovers()
        after = self.command.status() or before
        phase = after["phase"] if number == signal.SIGKILL else before["phase"]
        if phase not in PHASES:
            return False
        if self.command.mirror and number == signal.SIGKILL and self.command.is_copying():
            phase = COPY
        self.require_resumed(had_checkpoint)
        if number != signal.SIGKILL:
            self.exit_seconds.append(seconds)
        self.landed[name, phase] += 1
        gone = "" if number == signal.SIGKILL else f", gone in {seconds:.2f} s"
        print(f"{delivered + 1}/{len(self.plan)} {name} in {phase} at step {after['global_step']:,}{gone}", flush=True)
        return True

    def missed(self) -> list[str]:
        hit = {phase for _, phase in self.landed}
        return [phase for phase in self.command.phases() if phase not in hit]

    def require_resumed(self, had_checkpoint: bool) -> None:
        if had_checkpoint and self.command.status().get("resumed_from") is None:
            raise Failed(f"started from zero although a checkpoint was there:\n{self.command.tail()}")

    def report(self) -> str:
        phases = self.command.phases()
        lines = [f"{'':8}" + "".join(f"{phase:>9}" for phase in phases)]
        for name in sorted({name for name, _ in self.landed}):
            lines.append(f"{name:8}" + "".join(f"{self.landed[name, phase]:9}" for phase in phases))
        if self.exit_seconds:
            median, worst = statistics.median(self.exit_seconds), max(self.exit_seconds)
            lines.append(f"from SIGTERM to the exit: median {median:.2f} s, worst {worst:.2f} s")
        return "\n".join(lines)


def make_plan(kills: int, terms: int, phases: tuple[str, ...], rng: random.Random) -> list[tuple[int, str]]:
    """Every phase as often as the others, in random order, but no more than three restores in a row: after five a run
    gives up."""
    plan = [(signal.SIGKILL if i < kills else signal.SIGTERM, phases[i % len(phases)]) for i in range(kills + terms)]
    while True:
        rng.shuffle(plan)
        if all({phase for _, phase in plan[i : i + 4]} != {"restore"} for i in range(len(plan) - 3)):
            return plan


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="drill.py [options] SCRIPT [flags]",
    )
    parser.add_argument("--kills", type=int, default=10, help="SIGKILLs (default: 10)")
    parser.add_argument("--terms", type=int, default=3, help="SIGTERMs (default: 3)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--mirror", help="lose the disk too: empty folder or fsspec address for the command's --mirror")
    parser.add_argument("--dir", type=Path, help="folder for both runs, empty or new (default: a temporary one)")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="SCRIPT ...")
    args = parser.parse_args()
    if not args.command or not Path(args.command[0]).is_file():
        parser.error(f"name a script that is there, got {args.command[0] if args.command else 'nothing'}")
    if min(args.kills, args.terms) < 0 or args.kills + args.terms == 0:
        parser.error("--kills, --terms: at least one interruption")
    for word in args.command:
        if word.split("=")[0].replace("_", "-") in ("--runs-dir", "--run-name", "--resume", "--mirror"):
            parser.error(f"{word}: the drill chooses it")
    if args.dir and args.dir.exists() and not (args.dir.is_dir() and not any(args.dir.iterdir())):
        parser.error(f"--dir {args.dir}: is no empty folder")
    if args.mirror:
        try:
            taken = MirrorView(args.mirror).names()
        except Exception as error:  # of whichever driver
            parser.error(f"--mirror {args.mirror}: {' '.join(str(error).split())}")
        if taken:
            parser.error(f"--mirror {args.mirror}: is not empty")
    words = args.command
    if not any(word.split("=")[0].replace("_", "-") == "--checkpoint-minutes" for word in words):
        words = [*words, "--checkpoint-minutes", "0.02"]  # or each kill would throw minutes away

    folder = args.dir or Path(tempfile.mkdtemp(prefix="drill-"))
    folder.mkdir(parents=True, exist_ok=True)
    print("$ python", shlex.join(words), flush=True)
    undisturbed = Command(words, folder / "undisturbed")
    disturbed = Command(words, folder / "disturbed", args.mirror)
    drill = None
    try:
        seconds = run_undisturbed(undisturbed)
        print("undisturbed: " + ", ".join(f"{name} {seconds[name]:.2f} s" for name in PHASES if name in seconds))
        drill = Drill(
            disturbed,
            make_plan(args.kills, args.terms, disturbed.phases(), random.Random(args.seed)),
            seconds,
            args.seed,
        )
        drill.run()
        lines = compare(undisturbed.run_dir(), disturbed.run_dir())
        if disturbed.mirror and (left := disturbed.mirror.look()[1]):
            lines.append(f"the mirror has {len(left)} files that belong to nothing: {', '.join(left[:3])}")
        if drill.missed() and len(drill.plan) >= len(disturbed.phases()):
            lines.append(f"no interruption landed in {', '.join(drill.missed())}")
    except Failed as failed:
        lines = [str(failed)]
    finally:
        for command in (undisturbed, disturbed):
            if command.process and command.process.poll() is None:
                command.process.kill()
                command.process.wait()
    if drill:
        print(drill.report())
    if lines:
        print("FAIL", *lines[:20], f"both runs are in {folder}", sep="\n")
        sys.exit(1)
    print(f"PASS: weights, optimiser, generators, emulators and curves are the same bit for bit ({folder})")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
