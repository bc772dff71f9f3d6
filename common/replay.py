"""Storage of a replay memory: each frame once, in files that a checkpoint can count on, and a sum tree for priorities.

Time counts steps of all environments together from the beginning of the run. Step t holds the newest frame of each
environment's observation before the step, and what came of the step. Steps lie in a ring of `length` slots, t in slot
t % length; the newest `size` of them can be sampled. The slots beyond these are spare: what is written after a
checkpoint takes them first, so that going back to it finds all that it counts on (`save_due`).

The ring is cut into segments. A full one stays as it is until the ring comes round, and its SHA-256 stands in every
checkpoint that needs it.
"""

import ctypes
import functools
import hashlib
import mmap
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common.errors import UsageError
from common.files import sync
from common.transfer import upload

SEGMENTS = 400  # of the steps that can be sampled
SPARE = 20  # one slot in so many
REST = 2 * 10**9  # bytes that networks and libraries take on a GPU, amply
STACK = 4  # frames of an observation
FRAME = (84, 84)  # pixels
# what a step holds beside the frame; `age`: how many older frames of its stack are of the same game
STEP = np.dtype([("reward", "<f4"), ("action", "u1"), ("age", "u1"), ("termination", "?"), ("unused", "u1")])
ARRAYS = {"frames": (FRAME, np.dtype("u1")), "steps": ((), STEP)}  # by file: shape and type of an entry


def segment_length(size: int) -> int:
    """Steps of a segment, for `size` steps that can be sampled."""
    return max(16, size // SEGMENTS)


def ring_length(size: int) -> int:
    """Slots of the ring, whole segments."""
    segment = segment_length(size)
    return -(-(size + max(size // SPARE, 4 * segment)) // segment) * segment


def bytes_needed(transitions: int, num_envs: int) -> int:
    """Of memory, and of disk, for so many transitions of all environments together."""
    return ring_length(transitions // num_envs) * num_envs * (FRAME[0] * FRAME[1] + STEP.itemsize + 1)


def require_room(transitions: int, num_envs: int, free: int, what: str) -> None:
    """Refuse a memory that does not fit.

    Args:
        free: bytes.
        what: they are of, for the message.

    Raises:
        UsageError: with the need and a size that would fit.
    """
    needed = bytes_needed(transitions, num_envs)
    if needed <= free:
        return
    fits = int(free / needed * transitions)
    fits -= fits % 1000
    while fits > 0 and bytes_needed(fits, num_envs) > free:
        fits -= 1000
    advice = f"--buffer-size {fits} would fit" if fits > 0 else "none would fit"
    raise UsageError(
        f"--buffer-size {transitions} needs {needed / 1e9:.3g} GB of {what}, {free / 1e9:.3g} GB are free: {advice}"
    )


def choose_buffer_device(name: str, device: torch.device, needed: int, free: int) -> torch.device:
    """Where frames are read, for `auto`, `cpu` or `cuda`: `auto` takes the device of the networks, which has `free`
    bytes, if all of them fit beside the rest, so that nothing has to be moved there.

    Raises:
        UsageError: `cuda`, and the networks are not there.
    """
    if name == "cuda" and device.type != "cuda":
        raise UsageError(f"--buffer-device cuda: the networks are on {device}")
    return device if name == "cuda" or (name == "auto" and needed + REST <= free) else torch.device("cpu")


def free_disk(folder: Path) -> int:
    """Bytes that a memory in a folder, which need not exist yet, may take: what is free, and what its files have."""
    exists = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    usage = os.statvfs(exists)
    own = sum(512 * path.stat().st_blocks for path in folder.glob("*.bin"))
    return usage.f_bavail * usage.f_frsize + own


class Storage:
    """The steps of `num_envs` environments, written in turn and read in any order.

    Attributes:
        size: steps of each environment that can be sampled.
        position: the step that comes next; its frame is there, what comes of it is not.
        first: the oldest step since the memory was empty.
        rewards, actions, ages, terminations, truncations: `[length, num_envs]`, by slot.
        finals: the newest frame of a truncated game's true last observation, by (step, environment).
        note: what the user should know of it, else empty.
        replay_tick: called with the share that is done while `load_state_dict` reads; may raise.
        restore_note: what the user should know of the last `load_state_dict`, else empty.
        source: the folder that `load_state_dict` reads from.
    """

    FOLDER = "replay"  # in the run's own

    def __init__(self, num_envs: int, transitions: int) -> None:
        """`transitions`: of all environments together. `open` makes the memory."""
        self.num_envs, self.size = num_envs, transitions // num_envs
        self.segment, self.length = segment_length(self.size), ring_length(self.size)
        # what can be written after a checkpoint before it takes a segment that the checkpoint counts on
        self.spare = self.length - self.size - self.segment - STACK
        self.folder: Path | None = None
        self.source: Path | None = None
        self.files: dict[str, int] = {}
        self.finals: dict[tuple[int, int], np.ndarray] = {}
        self.replay_tick: Callable[[float], None] = lambda share: None
        self.restore_note = self.note = ""
        self.position = self.first = 0
        self.age = np.zeros(num_envs, dtype=np.uint8)  # of the newest frames
        self.digests: dict[int, str] = {}  # of full segments, by step // segment
        self.hash = hashlib.sha256()  # of the segment that is being written
        self.began = False

    def require_room(self, folder: Path | None, device: torch.device, free: Callable[[torch.device], int]) -> None:
        """Refuse what `open` with this folder and device has no room for.

        Args:
            free: bytes of a device.

        Raises:
            UsageError
        """
        cpu, transitions = torch.device("cpu"), self.size * self.num_envs
        # frames lie in the machine's memory too, but where they have files the kernel may take it back
        for where in {device} if folder else {device, cpu}:
            require_room(transitions, self.num_envs, free(where), f"memory on {where.type}")
        if folder:
            require_room(transitions, self.num_envs, free_disk(folder), f"disk for {folder}")

    def open(self, folder: Path | None, device: torch.device) -> None:
        """Make the memory, or find the one that is there.

        Args:
            folder: of its files; None: nothing is kept for another process.
            device: where frames are read.

        Raises:
            UsageError: the files can't be made, or are of another size.
        """
        self.folder = self.source = folder
        if folder is None:
            self.note = "--no-save-buffer: after an interruption the learner is exact, the memory is filled again"
        self.arrays = {name: self._open(name, folder) for name in ARRAYS}
        self.frames, self.steps = self.arrays.values()  # [length, num_envs, 84, 84], [length, num_envs]
        self.rewards, self.actions, self.ages, self.terminations = (
            self.steps[name] for name in ("reward", "action", "age", "termination")
        )
        self.truncations = np.zeros((self.length, self.num_envs), dtype=bool)
        frames = torch.from_numpy(self.frames)
        self.readable = frames if device.type == "cpu" else torch.empty_like(frames, device=device)

    def _open(self, name: str, folder: Path | None) -> np.ndarray:
        shape, dtype = ARRAYS[name]
        shape = (self.length, self.num_envs, *shape)
        num_bytes = int(np.prod(shape)) * dtype.itemsize
        if folder is None:
            return np.frombuffer(mmap.mmap(-1, num_bytes), dtype).reshape(shape)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            descriptor = self.files[name] = os.open(folder / f"{name}.bin", os.O_CREAT | os.O_RDWR, 0o644)
            if os.fstat(descriptor).st_size > num_bytes:
                raise UsageError(f"{folder / name}.bin is of another --buffer-size or --num-envs")
            os.ftruncate(descriptor, num_bytes)
            # its blocks at once: a disk that is full later on would end the process with SIGBUS
            os.posix_fallocate(descriptor, 0, num_bytes)
            mapped = mmap.mmap(descriptor, num_bytes)
        except OSError as error:
            raise UsageError(f"--buffer-size: cannot make {folder / name}.bin: {error.strerror}") from None
        return np.frombuffer(mapped, dtype).reshape(shape)

    def close(self) -> None:
        """Give back files and memory."""
        for descriptor in self.files.values():
            os.close(descriptor)
        self.files, self.arrays = {}, {}
        self.frames = self.steps = self.readable = None
        self.rewards = self.actions = self.ages = self.terminations = None

    @property
    def oldest(self) -> int:
        """The oldest step that can be sampled."""
        return max(self.first, self.position - self.size)

    # ---- writing

    def begin(self, obs: np.ndarray) -> None:
        """Call with the observations that the first step starts from, `[num_envs, 4, 84, 84]`, also after a restore.

        Where they are not the stored ones, because games were restarted, the old games count as truncated.
        """
        if not self.began:
            self.began = True
            self.first, self.position = self.position, self.position - STACK + 1
            self.age[:] = 0
            for frame in obs.transpose(1, 0, 2, 3)[:-1]:  # the stack is in the middle of a game after a refill
                self._put(frame)
                self._complete(0, 0, False)
            self._put(obs[:, -1])
            self.age[:] = STACK - 1
            return
        back = np.arange(STACK)[::-1, None]
        frames = self.frames[(self.position - back) % self.length, np.arange(self.num_envs)]
        frames[back > self.age] = 0
        restarted = (frames != obs.transpose(1, 0, 2, 3)).any(axis=(0, 2, 3))
        last = (self.position - 1) % self.length
        for i in np.flatnonzero(restarted & ~self.terminations[last] & ~self.truncations[last]):
            self._truncate(self.position - 1, i, frames[-1, i])
        self.age[restarted] = 0
        self._put(obs[:, -1])

    def add(
        self,
        actions: np.ndarray,
        rewards: np.ndarray,
        terminations: np.ndarray,
        truncations: np.ndarray,
        next_obs: np.ndarray,
        info: dict[str, Any],
    ) -> None:
        """What came of step `position`, as the environments returned it; `info["_episode"]`: a new game has begun."""
        for i in np.flatnonzero(truncations & ~terminations):
            self._truncate(self.position, i, info["final_obs"][i, -1])
        self._complete(actions, rewards, terminations)
        started = info.get("_episode", False)
        self.age = np.where(started, 0, np.minimum(self.age + 1, STACK - 1)).astype(np.uint8)
        self._put(next_obs[:, -1])
        left = self.oldest - STACK
        if self.truncations[left % self.length].any():
            self.truncations[left % self.length] = False
            self.finals = {key: frame for key, frame in self.finals.items() if key[0] > left}

    def _truncate(self, step: int, i: int, final: np.ndarray) -> None:
        self.truncations[step % self.length, i] = True
        self.finals[step, int(i)] = final.copy()

    def _put(self, frame: np.ndarray) -> None:
        slot = self.position % self.length
        self.frames[slot] = frame
        if self.readable.device.type != "cpu":
            self.readable[slot].copy_(upload(self.frames[slot], self.readable.device))

    def _complete(self, actions: Any, rewards: Any, terminations: Any) -> None:
        slot = self.position % self.length
        self.rewards[slot], self.actions[slot] = rewards, actions
        self.terminations[slot], self.ages[slot] = terminations, self.age
        if self.files:
            for array in self.arrays.values():
                self.hash.update(array[slot].view(np.uint8).data)
        self.position += 1
        if self.position % self.segment == 0:
            number = self.position // self.segment - 1
            self.digests[number] = self.hash.hexdigest()
            self.digests.pop(number - self.length // self.segment, None)
            self.hash = hashlib.sha256()
            for name, descriptor in self.files.items():
                size = self.arrays[name][0].nbytes * self.segment
                start_writing(descriptor, number * self.segment % self.length // self.segment * size, size)

    # ---- reading

    def frames_of(self, steps: np.ndarray, envs: np.ndarray) -> torch.Tensor:
        """`[...]` steps and environments -> `[..., 84, 84]` uint8 on the device of the memory."""
        rows = steps % self.length * self.num_envs + envs
        found = self.readable.flatten(0, 1).index_select(0, upload(rows.flatten(), self.readable.device))
        return found.view(*rows.shape, *FRAME)

    # ---- interruption

    def save_due(self, newest: int, keep: int) -> bool:
        """Whether a checkpoint is to be made now, so that the `keep` newest ones always find what they count on.

        Args:
            newest: agent steps at which the newest one was made.
        """
        full = self.position >= self.first + self.size  # before that nothing is overwritten
        return full and self.position - newest // self.num_envs >= max(1, self.spare // keep)

    def overtakes(self, global_step: int) -> bool:
        """Whether the next step takes a slot that a checkpoint of then counts on."""
        needed = max(global_step // self.num_envs - self.size, self.first) - STACK + 1
        return self.position + 1 >= needed // self.segment * self.segment + self.length

    def sync(self) -> None:
        """Have the files on the disk.

        Raises:
            OSError
        """
        for descriptor in self.files.values():
            os.fdatasync(descriptor)
        if self.files:
            sync(self.folder)
            sync(self.folder.parent)

    def parts(self) -> list[tuple[str, int, int, str, Callable[[], bytes | None]]]:
        """What a checkpoint of now counts on, for a mirror: the file below the run folder, the offset in bytes, the
        size of the whole file, a key of the content, and a function that returns it, or None when it is overwritten."""
        if not self.files or not self.began:
            return []
        begins, found = self.oldest - STACK + 1, []
        for number in range(begins // self.segment, self.position // self.segment + 1):
            start = max(number * self.segment, self.first - STACK + 1)
            stop = min((number + 1) * self.segment, self.position)
            key = self.digests.get(number) or self.hash.hexdigest()
            for name, array in self.arrays.items():
                if stop > start:
                    read = functools.partial(self._read_back, name, start, stop)
                    offset = start % self.length * array[0].nbytes
                    found.append((f"{self.FOLDER}/{name}.bin", offset, array.nbytes, key, read))
        return found

    def _read_back(self, name: str, start: int, stop: int) -> bytes | None:
        content = self._read(
            name, slice(start % self.length, start % self.length + stop - start), self.folder
        ).tobytes()
        # looked at after reading, from another thread than the one that writes
        return content if self.position + 1 < start + self.length else None

    def state_dict(self) -> dict[str, Any]:
        """Positions and checksums of the files. Nothing but the position where there are none."""
        state = {"position": self.position, "segments": None}
        if not self.files:
            return state
        needed = (self.oldest - STACK + 1) // self.segment
        segments = {number: digest for number, digest in self.digests.items() if number >= needed}
        keys = sorted(key for key in self.finals if key[0] >= self.oldest)
        finals = np.stack([self.finals[key] for key in keys]) if keys else np.zeros((0, *FRAME), np.uint8)
        return state | {
            "segments": segments | {self.position // self.segment: self.hash.hexdigest()},
            "first": self.first,
            "age": self.age.tolist(),
            "newest": torch.from_numpy(self.frames[self.position % self.length].copy()),
            "final_keys": [list(key) for key in keys],
            "finals": torch.from_numpy(finals),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Read the steps from `source` and compare their checksums; what is not as it was leaves the memory empty."""
        self.position = state["position"]
        self.began, self.restore_note = False, ""
        self.digests, self.hash, self.finals = {}, hashlib.sha256(), {}
        self.truncations[:] = False
        if lost := self._load(state):
            self.restore_note = f"the replay memory {lost}: it is filled again before learning goes on"

    def _load(self, state: dict[str, Any]) -> str:
        """Returns what is wrong."""
        if state["segments"] is None or self.source is None:
            return "was not kept (--no-save-buffer)"
        self.first, self.age = state["first"], np.array(state["age"], dtype=np.uint8)
        begins = max(self.first, self.position - self.size) - STACK + 1
        current = self.position // self.segment
        for number in range(begins // self.segment, current + 1):
            start = max(number * self.segment, self.first - STACK + 1)
            self.replay_tick(max(0, start - begins) / max(1, self.position - begins))
            found = hashlib.sha256()
            stop = min((number + 1) * self.segment, self.position)
            slots = slice(start % self.length, start % self.length + stop - start)
            try:
                # not through the mapping: a disk that fails would end the process with SIGBUS
                read = [self._read(name, slots, self.source) for name in ARRAYS]
            except OSError as error:
                return f"in {self.source} can't be read ({error.strerror})"
            for entries in zip(*read, strict=False):
                for entry in entries:
                    found.update(entry.data)
            if found.hexdigest() != state["segments"].get(number):
                return f"in {self.source} is damaged, lost, or newer than the checkpoint"
            if self.source != self.folder:
                for array, entries in zip(self.arrays.values(), read, strict=True):
                    array[slots].view(np.uint8).reshape(entries.shape)[:] = entries
        self.digests = {number: digest for number, digest in state["segments"].items() if number < current}
        self.hash = found
        self.began = True
        if self.readable.device.type != "cpu":
            self.readable.copy_(torch.from_numpy(self.frames))
        self._put(state["newest"].numpy())
        for (step, i), final in zip(state["final_keys"], state["finals"], strict=True):
            self._truncate(step, i, final.numpy())
        return ""

    def _read(self, name: str, slots: slice, folder: Path) -> np.ndarray:
        """Bytes of a file, `[slots, bytes of a step]`, fewer where it is cut short."""
        step = self.arrays[name][0].nbytes
        with open(folder / f"{name}.bin", "rb", buffering=0) as file:
            file.seek(slots.start * step)
            content = np.fromfile(file, np.uint8, (slots.stop - slots.start) * step)
        return content[: len(content) // step * step].reshape(-1, step)


def start_writing(descriptor: int, offset: int, size: int) -> None:
    """Ask the kernel to begin writing part of a file to the disk, without waiting (sync_file_range(2)): a checkpoint
    then waits for little."""
    if sys.platform == "linux":
        write = 2  # SYNC_FILE_RANGE_WRITE
        ctypes.CDLL(None).sync_file_range(descriptor, ctypes.c_int64(offset), ctypes.c_int64(size), write)


class SumTree:
    """Priorities of `size` leaves, any number of which are set or drawn at once. `total` is the sum of all.

    A node is the last of its children's running sums, so that sums and drawing agree to the last bit and a leaf of
    priority 0 is never drawn. A million leaves make two levels of blocks below a top of a thousand nodes.
    """

    FANOUT = 32
    TOP = 2048  # nodes at most

    def __init__(self, size: int) -> None:
        # leaves first, [blocks, FANOUT] float64 each: priorities, and their running sums within a block
        self.levels: list[np.ndarray] = []
        while not self.levels or size > self.TOP:
            size = -(-size // self.FANOUT)
            self.levels.append(np.zeros((size, self.FANOUT)))
        self.running = [level.copy() for level in self.levels]
        self.top, self.running_top = np.zeros(size), np.zeros(size)
        self.total = 0.0

    def __getitem__(self, leaves: np.ndarray) -> np.ndarray:
        return self.levels[0].take(leaves)

    def __setitem__(self, leaves: np.ndarray, priorities: np.ndarray | float) -> None:
        nodes, values = leaves, priorities
        for level, running in zip(self.levels, self.running, strict=True):
            level.reshape(-1)[nodes] = values
            nodes = nodes // self.FANOUT
            sums = level.take(nodes, 0).cumsum(1)
            running[nodes] = sums
            values = sums[:, -1]
        self.top[nodes] = values
        self.running_top = self.top.cumsum()
        self.total = self.running_top[-1].item()

    def find(self, shares: np.ndarray) -> np.ndarray:
        """`[B]` of 0 to 1 -> `[B]` leaves: those where the running sum over all leaves passes that share of `total`."""
        sums = np.minimum(shares * self.total, np.nextafter(self.total, 0))
        nodes = self.running_top.searchsorted(sums, side="right")
        weights, passed = self.top.take(nodes), self.running_top.take(nodes)
        for level, running in zip(reversed(self.levels), reversed(self.running), strict=True):
            # what is left of it within the node; a difference is rounded
            sums = np.minimum(np.maximum(sums - (passed - weights), 0), np.nextafter(weights, 0))
            nodes = nodes * self.FANOUT + (running.take(nodes, 0) > sums[:, None]).argmax(1)
            weights, passed = level.take(nodes), running.take(nodes)
        return nodes

    def state_dict(self) -> dict[str, Any]:
        return {"leaves": torch.from_numpy(self.levels[0].copy())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self[np.arange(self.levels[0].size)] = state["leaves"].flatten().numpy()
