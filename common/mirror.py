"""A copy of a run that the loss of its machine and disk does not reach: in a folder elsewhere, or in an object store.

    <url>/<run name>/lease.json                the process that copies at the moment
    <url>/<run name>/manifest-<n>-<who>.json   of what the run consists, JSON and its SHA-256; the highest counts
    <url>/<run name>/objects/<file>.<the first digits of its SHA-256>

An object never changes. A manifest is written when all that it names is there, and what it does not name is deleted
afterwards: however a writer ends, a reader finds a whole run. Long files lie in pieces; a piece that is there already
does not travel again.

Threads of their own do all of this. The loop hands over and does not wait.
"""

import contextlib
import hashlib
import json
import os
import random
import re
import shutil
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fsspec.core import url_to_fs

from common.errors import Interrupted, LimitReached, UsageError
from common.files import is_sealed, replacing, sealed

FORMAT = 1
# seconds
PERIOD = 30.0  # from one copy to the next, while there is no new checkpoint
RENEWAL = 10.0  # of the lease
LEASE = 60.0  # without renewal, until another process may take it
SETTLE = 1.0  # until it is clear which of two took it
PATIENCE = 60.0  # without an answer
RETRY = 5.0  # from one try to read a mirror to the next
EXIT = 9.0  # from a signal on: what is not copied by then stays behind
# bytes
PIECE = 64 * 2**20
EVENTS_PIECE = 2**20  # event files grow at their end, and all other pieces of them stay
OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "az", "abfs", "adl", "oss"}  # need no folders
DRIVERS = {"botocore", "aiobotocore", "s3fs", "gcsfs", "adlfs", "ossfs", "aiohttp", "urllib3"}  # and what they stand on
LOCAL = {"file", "local"}
FETCHES = "fetches.json"  # counts those in a row that were not finished
CUT_FETCHES = 5  # in a row, after which a run stops by itself


# a piece of a large file that goes on changing: path below the run folder, offset and size of the whole file in bytes,
# a key of the content, and what returns the content, or None if it has changed since
Part = tuple[str, int, int, str, Callable[[], bytes | None]]


class Changed(Exception):
    """What is being copied is no longer what should be copied."""


class GaveUp(Exception):
    """An answer was waited for in vain."""


class LeaseLost(Exception):
    """Another process copies to this place."""


class Damaged(UsageError):
    """What is in the mirror is not what was once copied to it."""


class Store:
    """Files below an address that fsspec understands. What its drivers raise may be anything."""

    def __init__(self, url: str, name: str) -> None:
        """`name`: of a folder below the address.

        Raises:
            UsageError: fsspec or a missing driver, or a password in the address.
        """
        if urlsplit(url).password:
            raise UsageError("--mirror: no password in the address, it belongs into the driver's own configuration")
        generator = random.getstate()  # packages that drivers import draw from it
        try:
            # a driver of our own, and no listings from its memory: other machines write too
            self.fs, parent = url_to_fs(url, use_listings_cache=False, skip_instance_cache=True)
        except ImportError as error:
            raise UsageError(f"--mirror {url}: {reason(error)} (see requirements-cloud.txt)") from None
        except Exception as error:
            raise UsageError(f"--mirror {url}: {reason(error)}") from None
        finally:
            random.setstate(generator)
        keep_from_random()
        protocol = self.fs.protocol
        protocols = {protocol} if isinstance(protocol, str) else set(protocol)
        self.local, self.has_folders = bool(protocols & LOCAL), not protocols & OBJECT_STORES
        if self.local and re.match(r"(?!(file|local):)[A-Za-z][\w+.-]+:/", url):
            raise UsageError(f"--mirror {url}: no folder, and an address has two slashes")
        self.parent, self.base = parent.rstrip("/"), f"{parent.rstrip('/')}/{name}"

    def make(self, base: str) -> None:
        if self.has_folders:
            self.fs.makedirs(f"{base}/objects", exist_ok=True)

    def put(self, name: str, content: bytes) -> None:
        if self.local:
            with replacing(Path(f"{self.base}/{name}")) as file:
                file.write(content)
        else:
            self.fs.pipe_file(f"{self.base}/{name}", content)

    def get(self, name: str) -> bytes:
        return self.fs.cat_file(f"{self.base}/{name}")

    def names(self, folder: str) -> list[str]:
        """Of the files in a folder, an absolute path."""
        try:
            return [path.rstrip("/").rpartition("/")[2] for path in self.fs.ls(folder, detail=False)]
        except FileNotFoundError:
            return []

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.fs.rm_file(f"{self.base}/{name}")


class Mirror:
    """The mirror of one run. Without an address it does nothing.

    Args:
        url: or None.
        name: of the run.
        signals: `StopSignals`.

    Attributes:
        step: of the newest checkpoint that is there.
        seconds: that copying one took.

    Raises:
        UsageError: see `Store`.
    """

    def __init__(self, url: str | None, name: str, signals: Any) -> None:
        self.url, self.name, self.signals = url, name, signals
        self.store = Store(url, name) if url else None
        self.folder = Path()
        self.say: Callable[[str], None] = lambda line: None
        self.identity = {**process_identity(), "owner": uuid.uuid4().hex, "renewed": 0}
        self.step: int | None = None
        self.seconds: float | None = None
        self._manifest = ""  # the name of the one that counts
        self._files: dict[str, dict[str, Any]] = {}  # what it says
        self._objects: dict[str, str] = {}  # names by SHA-256, of those that are there
        self._known: dict[tuple, list] = {}  # pieces, by what they were read from
        self._garbage: set[str] = set()
        self._pushed: tuple[int | None, list[Part]] = (None, [])
        self._asking: dict[int, float] = {}  # since when, by thread
        self._lease_lock = threading.Lock()
        self._held = self._read = False  # the lease, the manifest
        self._with_copy, self._copied_all, self._vanished = True, False, False
        self._check: Callable[[dict[str, Any]], None] = lambda config: None
        self._trouble = ""  # what the user has heard of
        self._thread: threading.Thread | None = None
        self._abandoned: threading.Thread | None = None  # whose answer may come too late
        self._wake, self._closing, self._done = threading.Event(), threading.Event(), threading.Event()

    # ---- at the start

    def attach(
        self, folder: Path, afresh: bool, check: Callable[[dict[str, Any]], None], say: Callable[[str], None]
    ) -> None:
        """Take the lease, and bring the folder to where the mirror is, if that is further.

        Args:
            folder: of the run; this process holds its lock.
            afresh: set aside what is in the mirror.
            check: called with the config.json that is there; raises for that of another run.
            say: called with lines for the user, from any thread.

        Raises:
            UsageError: in use, of another run, or out of reach while the folder has nothing to go on from.
            Interrupted: a signal came, or what is there could not be fetched to the end.
            LimitReached: nor could it by the processes before.
        """
        if self.store is None:
            return
        if self.store.local and folder.resolve().is_relative_to(Path(self.store.base).resolve()):
            raise UsageError(f"--mirror {self.url}: is where the run itself is")
        if self.store.local and Path(self.store.base).resolve().is_relative_to(folder.resolve()):
            raise UsageError(f"--mirror {self.url}: is in the run's own folder, and would be lost with it")
        self.folder, self.say, self._check = folder, say, check
        errors: list[BaseException] = []

        def work() -> None:
            try:
                self._patiently(self._open, afresh, True)  # a machine that has just started may have no network yet
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=work, name="mirror-start", daemon=True)
        thread.start()
        while thread.is_alive() and not errors:
            thread.join(0.1)
            if self.signals.asked:
                self._abandoned = thread
                self._closing.set()
                raise Interrupted(f"interrupted by {self.signals.asked} before the start: the same command starts it")
            if self._silent(10 if self._read else 1):  # pieces are large
                self._abandoned = thread
                errors.append(TimeoutError(f"no answer in {PATIENCE:.0f} s"))
        if not errors:
            return
        if isinstance(errors[0], UsageError | LimitReached):
            raise errors[0]
        if self._read:
            raise Interrupted(f"cannot fetch from {self.url} ({reason(errors[0])}): the same command tries again")
        if newest_step(folder) is None:
            raise UsageError(f"--mirror {self.url}: {reason(errors[0])}") from None
        say(f"going on from {folder}, without knowing whether {self.url} is further")

    def _patiently(self, call: Callable[..., Any], *args: Any) -> Any:
        deadline, said = time.monotonic() + PATIENCE, False
        while True:
            try:
                return call(*args)
            except (UsageError, LimitReached, Changed, GaveUp, FileNotFoundError, PermissionError):
                raise
            except Exception as error:
                if isinstance(error, NotADirectoryError) or "Credentials" in type(error).__name__:
                    raise UsageError(f"--mirror {self.url}: {reason(error)}") from None
                if time.monotonic() + RETRY > deadline:
                    raise GaveUp(reason(error)) from None
                if not said:
                    self.say(f"cannot read {self.url} ({reason(error)}): trying for {PATIENCE:.0f} s")
                said = True
                if self._closing.wait(RETRY):
                    raise Changed from None

    def _open(self, afresh: bool, fetch: bool) -> None:
        self._take_lease()
        manifest = self._newest_manifest()
        if manifest and afresh:
            self._set_aside()
            manifest = None
        if not manifest:
            self._read = True
            return
        self._files, self.step = manifest["files"], manifest["step"]
        for name, file in self._files.items():
            for offset, size, object_name, sha256, key in file["pieces"]:
                self._objects[sha256] = object_name
                if key:
                    self._known[name, offset, key] = [offset, size, object_name, sha256, key]
        if "config.json" in self._files:
            self._check(json.loads(b"".join(self._content(self._files["config.json"]))))
        self._read = True
        ours = newest_step(self.folder)
        ends = manifest["complete"] and not (self.folder / "summary.json").exists()
        further = self.step is not None and (ours is None or self.step > ours or (self.step == ours and ends))
        if fetch and further:
            self._fetch()

    def _manifests(self) -> list[str]:
        """Newest first."""
        names = self._ask(self.store.names, self.store.base)
        return sorted((name for name in names if name.startswith("manifest-")), reverse=True)

    def _newest_manifest(self) -> dict[str, Any] | None:
        names = self._manifests()
        for name in names:
            content = self._ask(self.store.get, name)
            if is_sealed(content):
                manifest = json.loads(content.splitlines()[0])
                if manifest["format"] != FORMAT:
                    raise UsageError(f"--mirror {self.url}: format {manifest['format']}, this version reads {FORMAT}")
                self._manifest = name
                return manifest
        if names:
            raise UsageError(f"--mirror {self.url}: no manifest of {self.name} is whole; --resume never sets it aside")
        return None

    def _set_aside(self) -> None:
        store = self.store
        taken, number = self._ask(store.names, store.parent), 1
        while f"{self.name}.old-{number}" in taken:
            if not any(
                "manifest-" in name for name in self._ask(store.names, f"{store.parent}/{self.name}.old-{number}")
            ):
                break  # another process was killed while it made it
            number += 1
        old = f"{store.parent}/{self.name}.old-{number}"
        store.make(old)
        manifests = self._manifests()
        objects = [f"objects/{name}" for name in self._ask(store.names, f"{store.base}/objects")]
        for name in objects + manifests:
            self._ask(store.fs.cp_file, f"{store.base}/{name}", f"{old}/{name}")
        for name in manifests:  # what they named is removed as all that no manifest names
            self._ask(store.remove, name)
        self.say(f"the mirror's old run is now {old}")

    def _fetch(self) -> None:
        size = sum(file["size"] for file in self._files.values())
        began = time.monotonic()
        self._count_fetches()
        self.say(f"fetching step {self.step:,} from {self.url}, {size / 2**20:,.0f} MiB")
        there = sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())
        free = shutil.disk_usage(self.folder).free + there
        if free < size:
            raise UsageError(f"--mirror: {size / 1e9:.3g} GB do not fit into {self.folder}, {free / 1e9:.3g} are free")
        for path in self.folder.glob("events.out.tfevents.*"):
            # of work that another machine has done again since: its points would hide theirs
            if path.name not in self._files:
                path.rename(path.with_name(path.name.replace("events.out.tfevents", "superseded")))
        # checkpoints last, the newest at the very end: until then the mirror is further than the folder
        for name, file in sorted(self._files.items(), key=lambda item: (item[0].startswith("checkpoints/"), item[0])):
            path = self.folder / name
            path.parent.mkdir(exist_ok=True)
            if any(piece[4] for piece in file["pieces"]):
                self._fetch_in_place(path, file)
            elif not self._is_there(path, file):
                try:
                    with replacing(path) as beside:
                        for content in self._content(file):
                            beside.write(content)
                except Damaged as error:
                    self.say(f"{name} can't be fetched: {error}")
        self.step = newest_step(self.folder)
        if self.step is None:
            raise UsageError(f"--mirror {self.url}: no checkpoint there is whole; --resume never sets the run aside")
        self._ask(self.store.remove, FETCHES)
        self.say(f"fetched in {time.monotonic() - began:.0f} s")

    def _count_fetches(self) -> None:
        """Raises LimitReached: machines don't live long enough to fetch the run."""
        try:
            cut = json.loads(self._ask(self.store.get, FETCHES))["count"]
        except (FileNotFoundError, ValueError):
            cut = 0
        if cut >= CUT_FETCHES:
            self._ask(self.store.remove, FETCHES)  # started again by hand, it tries again
            raise LimitReached(
                f"stopped: the last {cut} processes were ended while they fetched step {self.step:,} from {self.url}: "
                "it needs a machine that lives longer, where the same command goes on"
            )
        self._ask(self.store.put, FETCHES, json.dumps({"count": cut + 1}).encode())

    def _fetch_in_place(self, path: Path, file: dict[str, Any]) -> None:
        """A large file: what is right already is not fetched."""
        with open(path, "r+b" if path.exists() else "w+b") as there:
            there.truncate(file["size"])
            for offset, size, name, sha256, _ in file["pieces"]:
                there.seek(offset)
                if hashlib.sha256(there.read(size)).hexdigest() != sha256:
                    try:
                        content = self._object(name, sha256)
                    except Damaged as error:  # who reads the file will notice
                        self.say(f"part of {path} can't be fetched: {error}")
                        continue
                    there.seek(offset)
                    there.write(content)
            there.flush()
            os.fsync(there.fileno())

    def _is_there(self, path: Path, file: dict[str, Any]) -> bool:
        if not path.exists() or path.stat().st_size != file["size"]:
            return False
        with open(path, "rb") as there:
            return all(hashlib.sha256(there.read(piece[1])).hexdigest() == piece[3] for piece in file["pieces"])

    def _content(self, file: dict[str, Any]) -> Iterator[bytes]:
        return (self._object(name, sha256) for _, _, name, sha256, _ in file["pieces"])

    def _object(self, name: str, sha256: str) -> bytes:
        if threading.current_thread() is self._abandoned:
            raise Changed
        try:
            content = self._patiently(self._ask, self.store.get, f"objects/{name}")
        except FileNotFoundError:
            content = b""
        if hashlib.sha256(content).hexdigest() != sha256:
            raise Damaged(f"{name} is damaged in the mirror" if content else f"{name} is not in the mirror")
        return content

    # ---- the lease

    def _take_lease(self) -> None:
        if self._held:
            return
        other = self._lease()
        if other and not self._is_ours(other) and not is_dead(other):
            who = f"process {other.get('pid')} on {other.get('host')}"
            self.say(f"{self.store.base} is held by {who}: waiting up to {LEASE:.0f} s for a sign of life")
            deadline = time.monotonic() + LEASE
            while time.monotonic() < deadline and (now := self._lease()):
                if now != other:
                    raise UsageError(f"--mirror {self.url}: {self.name} is in use by {who}")
                if self._closing.wait(1.0):
                    raise Changed
        self._ask(self.store.make, self.store.base)
        self._write_lease()
        time.sleep(SETTLE)
        if not self._is_ours(self._lease()):
            raise UsageError(f"--mirror {self.url}: another process has just taken {self.name}")
        self._held = True
        threading.Thread(target=self._renew, name="mirror-lease", daemon=True).start()

    def _lease(self) -> dict[str, Any] | None:
        try:
            return json.loads(self._ask(self.store.get, "lease.json"))
        except FileNotFoundError:
            return None
        except ValueError:
            return {"half": time.monotonic()}  # of a store in which one can see a file being written

    def _write_lease(self) -> None:
        self.identity["renewed"] += 1
        self._ask(self.store.put, "lease.json", json.dumps(self.identity).encode())

    def _is_ours(self, lease: dict[str, Any] | None) -> bool:
        return lease is not None and lease.get("owner") == self.identity["owner"]

    def _signature(self) -> str:
        """How the names of this process's manifests end."""
        return f"-{self.identity['owner'][:8]}.json"

    def _require_lease(self) -> None:
        with self._lease_lock:
            lease = self._lease()
            if lease is None:  # somebody removed it, and who knows what else
                newest = next(iter(self._manifests()), self._manifest)
                if newest != self._manifest and not newest.endswith(self._signature()):
                    raise LeaseLost(f"another process has had {self.store.base} meanwhile")
                self._vanished = True
                self._ask(self.store.make, self.store.base)
                self._write_lease()
            elif "owner" in lease and not self._is_ours(lease):
                raise LeaseLost(f"another process has taken {self.store.base}")

    def _renew(self) -> None:
        while not self._closing.wait(RENEWAL):
            try:
                self._require_lease()
                with self._lease_lock:
                    if not self._closing.is_set():
                        self._write_lease()
            except Exception:  # the copying thread tells of it
                continue

    # ---- in the loop

    def start(self) -> None:
        """Copy what is in the folder from now on."""
        if self.store is None:
            return
        self._thread = threading.Thread(target=self._work, name="mirror", daemon=True)
        self._thread.start()

    def push(self, step: int, parts: list[Part]) -> None:
        """A checkpoint is finished. `parts`: of large files, that it counts on."""
        self._pushed = step, parts
        self._wake.set()

    def look(self) -> None:
        """Tell the user of a mirror that does not answer; the thread that asks it can't."""
        if self._silent():
            self._tell(f"no answer in {PATIENCE:.0f} s")

    def exit_seconds(self) -> float:
        """That the end of the process may have to wait."""
        return EXIT if self.store else 0.0

    def status(self) -> dict[str, Any] | None:
        """For status.json."""
        return {"url": self.url, "global_step": self.step, "seconds": self.seconds} if self.url else None

    def close(self, copy: bool = True) -> bool:
        """Copy what is left and give the lease back. `EXIT` seconds after the signal, or from now on if there was none,
        it is over in any case.

        Args:
            copy: else only the lease is given back.

        Returns:
            whether all is copied.
        """
        if self.store is None or not (copy or self._thread or self._held):
            return True
        self._with_copy = copy
        self._closing.set()
        self._wake.set()
        if self._thread is None:
            self.start()
        asked = self.signals.asked_at
        self._done.wait(max(0.0, (time.monotonic() if asked is None else asked) + EXIT - time.monotonic()))
        if copy and not self._copied_all:
            self.say(f"not all is copied to {self.url}, {self._has()}: the same command copies the rest")
        return self._copied_all or not copy

    # ---- copying

    def _work(self) -> None:
        stale, first = 0, True
        while True:
            self._wake.clear()
            closing = self._closing.is_set()
            try:
                if self._with_copy:
                    if not self._read:
                        self._open(afresh=False, fetch=False)
                    if first or closing:
                        self._find_garbage()
                        first = False
                    self._copy(closing)
                stale = 0
                if self._trouble:
                    self._trouble = ""
                    self.say(f"{self.url} is copied to again")
            except Changed:
                stale += not self._closing.is_set()
                if stale > 1:
                    self._tell("the replay memory changes faster than it can be copied")
                if self._closing.is_set() and not closing:
                    continue
            except (LeaseLost, UsageError) as error:
                self.say(f"{error}: training goes on without a mirror")
                self._copied_all = isinstance(error, LeaseLost)  # whatever is left to copy, the other one has
                break
            except Exception as error:
                self._tell(reason(error))
            if closing:
                break
            self._wake.wait(PERIOD)
        with contextlib.suppress(Exception), self._lease_lock:
            if self._is_ours(self._lease()):
                self._ask(self.store.remove, "lease.json")
        self._done.set()

    def _tell(self, what: str) -> None:
        if not self._trouble and not self._closing.is_set():
            self.say(f"cannot copy to {self.url} ({what}): training goes on, {self._has()}")
        self._trouble = what

    def _has(self) -> str:
        return "it has no checkpoint that we know of" if self.step is None else f"it has step {self.step:,}"

    def _find_garbage(self) -> None:
        """What a process left that was killed before its manifest."""
        objects = set(self._ask(self.store.names, f"{self.store.base}/objects")) - set(self._objects.values())
        self._garbage |= {f"objects/{name}" for name in objects}

    def _copy(self, closing: bool) -> None:
        """Copy what is in the folder.

        Raises:
            Changed: meanwhile it became out of date, or the process ends.
            LeaseLost
            Exception: whatever a driver raises.
        """
        began = time.monotonic()
        self._require_lease()
        if self._vanished:  # all of it is copied again
            self._objects, self._known, self._files, self.step, self._vanished = {}, {}, {}, None, False
        step, parts = self._pushed
        known: dict[tuple, list] = {}
        small = self._small_files(step, parts)
        if self.step is not None and max(steps_of(small), default=-1) < self.step:
            self._copied_all = closing
            return  # a run is never replaced by one that is not as far
        files = self._large_files(parts, known, closing)
        for name in small:
            try:
                files[name] = self._file(name, known, closing)
            except FileNotFoundError:
                if (self.folder / name).exists():
                    raise  # the mirror's
                # a checkpoint that was replaced by newer ones meanwhile
        newest = max(steps_of(files), default=None)
        content = {"format": FORMAT, "step": newest, "complete": "summary.json" in files, "files": files}
        self._require_lease()
        if self._vanished:
            raise Changed
        number = int(self._manifest.split("-")[1]) + 1 if self._manifest else 1
        name = f"manifest-{number:012d}{self._signature()}"
        self._ask(self.store.put, name, sealed(json.dumps(content).encode() + b"\n"))
        self._copied_all = closing
        if newest != self.step:
            self.seconds = time.monotonic() - began
            if self.seconds > EXIT and not closing:
                self.say(
                    f"copying step {newest:,} to {self.url} took {self.seconds:.0f} s, an exit waits for {EXIT:.0f}: "
                    "after the loss of this machine training goes on from the last one that was copied"
                )
        self._manifest, self._files, self.step, self._known = name, files, newest, known
        named = {piece[2] for file in files.values() for piece in file["pieces"]}
        self._garbage |= {f"objects/{name}" for name in self._objects.values() if name not in named}
        self._garbage |= set(self._manifests()) - {name}
        self._objects = {sha256: name for sha256, name in self._objects.items() if name in named}
        self._require_lease()  # or what another process has named meanwhile might go
        for name in sorted(self._garbage):
            self._ask(self.store.remove, name)
            self._garbage.discard(name)

    def _small_files(self, step: int | None, parts: list[Part]) -> list[str]:
        """Paths below the folder. A run that has ended is looked for before its last checkpoint, and checkpoints before
        the events that they count: what is found first implies what is found later."""
        ends = [name for name in ("summary.json", "agent.pt") if (self.folder / name).exists()]
        checkpoints = list(self.folder.glob("checkpoints/*.pt"))
        if "summary.json" not in ends and step is None:  # what they count on is not known yet
            checkpoints = [path for path in checkpoints if f"checkpoints/{path.name}" in self._files]
        elif parts:
            checkpoints = [path for path in checkpoints if path.name == "best.pt" or int(path.stem[5:]) <= step]
        events = sorted(self.folder.glob("events.out.tfevents.*"))
        others = [self.folder / name for name in ("config.json", "status.json") if (self.folder / name).exists()]
        return ends + [path.relative_to(self.folder).as_posix() for path in checkpoints + events + others]

    def _file(self, name: str, known: dict[tuple, list], closing: bool) -> dict[str, Any]:
        grows = name.startswith("events.")
        length = EVENTS_PIECE if grows else PIECE
        pieces = []
        with open(self.folder / name, "rb") as file:
            stat = os.fstat(file.fileno())
            for offset in range(0, stat.st_size, length):
                size = min(length, stat.st_size - offset)
                key = (stat.st_ino, offset, size, None if grows else stat.st_mtime_ns)
                if key in self._known:
                    known[key] = self._known[key]
                elif key not in known:
                    file.seek(offset)
                    known[key] = self._piece(name, offset, file.read(size), None, closing)
                pieces.append(known[key])
        return {"size": stat.st_size, "pieces": pieces}

    def _large_files(self, parts: list[Part], known: dict[tuple, list], closing: bool) -> dict[str, dict[str, Any]]:
        """Pieces of an earlier copy stay, as older checkpoints count on them, until they are overwritten."""
        sizes = {name: file["size"] for name, file in self._files.items()}
        pieces: dict[str, dict[int, list]] = {}  # by file and offset
        for name, file in self._files.items():
            if kept := {piece[0]: piece for piece in file["pieces"] if piece[4]}:
                pieces[name] = kept
        for name, offset, size, key, read in parts:
            piece = self._known.get((name, offset, key))
            if piece is None:
                if (content := read()) is None:
                    raise Changed
                # known even if this copy is not finished
                piece = self._known[name, offset, key] = self._piece(name, offset, content, key, closing)
            sizes[name] = size
            others = pieces.setdefault(name, {})
            if others.get(offset) != piece:
                end = piece[0] + piece[1]
                for old in [old for old in others.values() if old[0] < end and piece[0] < old[0] + old[1]]:
                    del others[old[0]]
                others[offset] = piece
        for name, by_offset in pieces.items():
            known.update({(name, offset, piece[4]): piece for offset, piece in by_offset.items()})
        return {name: {"size": sizes[name], "pieces": list(found.values())} for name, found in pieces.items()}

    def _piece(self, file: str, offset: int, content: bytes, key: str | None, closing: bool) -> list:
        """`[offset, size, object, SHA-256, key]`, and the object is there."""
        if self._closing.is_set() and not closing:
            raise Changed
        sha256 = hashlib.sha256(content).hexdigest()
        if sha256 not in self._objects:
            name = f"{file.rpartition('/')[2]}.{sha256[:16]}"
            self._ask(self.store.put, f"objects/{name}", content)
            self._objects[sha256] = name
            self._garbage.discard(f"objects/{name}")
        return [offset, len(content), self._objects[sha256], sha256, key]

    # ---- asking

    def _ask(self, call: Callable[..., Any], *args: Any) -> Any:
        thread = threading.get_ident()
        self._asking[thread] = time.monotonic()
        try:
            answer = call(*args)
        finally:
            self._asking.pop(thread, None)
        if threading.current_thread() is self._abandoned:
            raise Changed
        return answer

    def _silent(self, times: int = 1) -> bool:
        return any(time.monotonic() - since > times * PATIENCE for since in list(self._asking.values()))


def keep_from_random() -> None:
    """Drivers draw the time until a retry from Python's own generator, whose state is part of a checkpoint."""
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] in DRIVERS and getattr(module, "random", None) is random:
            module.random = random.Random()


def steps_of(names: Iterable[str]) -> list[int]:
    """Of the checkpoints among paths below a run folder."""
    return [int(Path(name).stem[5:]) for name in names if name.startswith("checkpoints/step-")]


def newest_step(folder: Path) -> int | None:
    """Of a run folder's checkpoints, the damaged ones left out."""
    for path in sorted(folder.glob("checkpoints/step-*.pt"), reverse=True):
        if is_sealed(path.read_bytes()):
            return int(path.stem[5:])
    return None


def process_identity() -> dict[str, Any]:
    """This process: where another one on the same machine could find it."""
    who: dict[str, Any] = {"host": socket.gethostname(), "pid": os.getpid()}
    with contextlib.suppress(OSError):  # no Linux
        who["boot"] = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        who["pids"] = os.stat("/proc/self/ns/pid").st_ino
        who["began"] = start_time(os.getpid())
    return who


def start_time(pid: int) -> str:
    """In ticks since the machine was booted (proc(5), /proc/pid/stat, field 22)."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


def is_dead(other: dict[str, Any]) -> bool:
    """Whether a process is certainly gone: one of this machine, since it was booted."""
    here = process_identity()
    if "began" not in here or any(other.get(key) != here[key] for key in ("boot", "pids")):
        return False
    try:
        return start_time(other["pid"]) != other["began"]
    except OSError:
        return True


def reason(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
