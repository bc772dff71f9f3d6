"""The mirror: what survives the loss of machine and disk, against a folder and against stores that misbehave."""

import hashlib
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import types
import uuid

import fsspec
import pytest
from conftest import read_scalars, wait_until
from fsspec.implementations.memory import MemoryFileSystem
from test_checkpoint import Training

import common.mirror
import dqn_atari
import ppo_atari
from common.errors import Interrupted, LimitReached, UsageError
from common.files import is_sealed, sealed
from common.mirror import Mirror, is_dead, process_identity
from common.preemption import StopSignals
from drill import MirrorView, compare

SMALL = dict(num_envs=2, num_steps=16, num_minibatches=2, update_epochs=1, total_timesteps=320, checkpoint_minutes=1e-6)


class Moody(MemoryFileSystem):
    """An object store that looks at each request, and may be slow, dead or damaged."""

    protocol = "moody"
    cachable = False
    store: dict = {}  # noqa: RUF012
    pseudo_dirs: list = [""]  # noqa: RUF012
    before = staticmethod(lambda what, path: None)
    after = staticmethod(lambda what, path: None)

    @classmethod
    def _strip_protocol(cls, path):
        return MemoryFileSystem._strip_protocol(path.replace("moody://", "memory://"))

    def pipe_file(self, path, value, **kwargs):
        Moody.before("put", path)
        super().pipe_file(path, value)
        Moody.after("put", path)

    def cat_file(self, path, start=None, end=None, **kwargs):
        Moody.before("get", path)
        return super().cat_file(path)

    def rm_file(self, path):
        Moody.before("remove", path)
        super().rm_file(path)
        Moody.after("remove", path)

    def ls(self, path, detail=True, **kwargs):
        Moody.before("list", path)
        return super().ls(path, detail=detail)


fsspec.register_implementation("moody", Moody, clobber=True)
URL = "moody://bucket/runs"


@pytest.fixture
def store(monkeypatch):
    """An empty object store; `store.before` and `store.after` look at requests."""
    monkeypatch.setattr(Moody, "store", {})
    monkeypatch.setattr(Moody, "pseudo_dirs", [""])
    monkeypatch.setattr(Moody, "before", staticmethod(lambda what, path: None))
    monkeypatch.setattr(Moody, "after", staticmethod(lambda what, path: None))
    monkeypatch.setattr(common.mirror, "SETTLE", 0.01)
    monkeypatch.setattr(common.mirror, "RETRY", 0.05)
    return Moody


def hook(store, name: str, function) -> None:
    setattr(store, name, staticmethod(function))


def mortal(store) -> threading.Event:
    """While it is set, the store is out of reach."""
    dead = threading.Event()

    def fail(what, path):
        if dead.is_set():
            raise ConnectionError("no route to the store")

    hook(store, "before", fail)
    return dead


def at(name: str) -> str:
    return f"/bucket/runs/a/{name}"


def train(tmp_path, name: str = "a", **flags):
    return ppo_atari.train(ppo_atari.Args(runs_dir=str(tmp_path), run_name=name, **{**SMALL, **flags}))


def interrupt_after(monkeypatch, script, looks: int) -> None:
    class Asking(StopSignals):
        number = 0

        @property
        def asked(self):
            self.number += 1
            return "the test" if self.number >= looks else None

        @property
        def asked_at(self):
            return None

    monkeypatch.setattr(script, "StopSignals", Asking)


# ---- the same command on a new machine


@pytest.mark.parametrize("kind", [pytest.param("folder", marks=pytest.mark.slow), "store"])
def test_a_run_that_loses_its_disk_ends_as_an_undisturbed_one(tmp_path, monkeypatch, store, kind):
    url = URL if kind == "store" else str(tmp_path / "mirror")
    train(tmp_path, "whole", total_timesteps=480)
    for looks in (45, 80, 75):  # each look is a step or half a minibatch
        with monkeypatch.context() as patch:
            interrupt_after(patch, ppo_atari, looks)
            with pytest.raises(Interrupted):
                train(tmp_path, mirror=url, total_timesteps=480)
        shutil.rmtree(tmp_path / "a")
    assert train(tmp_path, mirror=url, total_timesteps=480)["global_step"] == 480
    assert json.loads((tmp_path / "a" / "status.json").read_text())["resumed_from"] is not None
    assert compare(tmp_path / "whole", tmp_path / "a") == []
    manifest, left = MirrorView(url).look()
    assert (manifest["step"], manifest["complete"], left) == (480, True, [])
    # and once more on a new machine: it is complete there too
    shutil.rmtree(tmp_path / "a")
    assert train(tmp_path, mirror=url, total_timesteps=480)["global_step"] == 480
    assert compare(tmp_path / "whole", tmp_path / "a") == []
    assert (tmp_path / "a" / "agent.pt").exists()


def test_the_further_one_of_folder_and_mirror_counts(tmp_path, store, capsys):
    with Training(tmp_path, mirror=URL, checkpoint_minutes=1e-9) as training:
        training.iterate(3)
    shutil.copytree(tmp_path / "a", tmp_path / "old")
    with Training(tmp_path, mirror=URL, checkpoint_minutes=1e-9) as training:
        assert training.run.progress.global_step == 20
        training.iterate(3)
    capsys.readouterr()
    # the folder is as far as the mirror: nothing is fetched
    with Training(tmp_path, mirror=URL) as training:
        assert training.run.progress.global_step == 40
    assert "fetching" not in capsys.readouterr().out
    # a disk of long ago comes back
    shutil.rmtree(tmp_path / "a")
    shutil.copytree(tmp_path / "old", tmp_path / "a")
    with Training(tmp_path, mirror=URL) as training:
        assert training.run.progress.global_step == 40
    assert "fetching step 40" in capsys.readouterr().out
    # its newest checkpoint is damaged
    newest = max((tmp_path / "a" / "checkpoints").glob("step-*.pt"))
    newest.write_bytes(newest.read_bytes()[:-70])
    with Training(tmp_path, mirror=URL) as training:
        assert training.run.progress.global_step == 40
    assert "fetching step 40" in capsys.readouterr().out
    # the folder is further: the mirror was out of reach for a while
    with Training(tmp_path, checkpoint_minutes=1e-9) as training:
        training.iterate(4)
    with Training(tmp_path, mirror=URL) as training:
        assert training.run.progress.global_step == 70
    assert "fetching" not in capsys.readouterr().out
    assert MirrorView(URL).look()[0]["step"] == 70


def test_a_damaged_checkpoint_in_the_mirror_falls_back_to_the_one_before(tmp_path, store, capsys):
    with Training(tmp_path, mirror=URL, checkpoint_minutes=1e-9) as training:
        training.iterate(3)
    shutil.rmtree(tmp_path / "a")
    (newest,) = [path for path in store.store if "step-000000000020" in path]
    fsspec.filesystem("moody").pipe_file(newest, b"rubbish")
    with Training(tmp_path, mirror=URL, checkpoint_minutes=1e-9) as training:
        assert training.run.progress.global_step == 10
        assert f"{newest.rpartition('/')[2]} is damaged in the mirror" in capsys.readouterr().out
        training.iterate(2)
        wait_until(lambda: training.run.mirror.step == 20)
    assert MirrorView(URL).look()[1] == []
    assert newest not in store.store
    shutil.rmtree(tmp_path / "a")
    for path in [path for path in store.store if "/step-" in path]:
        del store.store[path]
    with pytest.raises(UsageError, match="no checkpoint there is whole"), Training(tmp_path, mirror=URL):
        pass
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("kind", ["events", "status", "frames"])
def test_other_damage_in_the_mirror_is_said_and_stops_nothing(tmp_path, monkeypatch, store, capsys, kind):
    with monkeypatch.context() as patch:
        interrupt_after(patch, dqn_atari, 100)
        with pytest.raises(Interrupted):
            train_dqn(tmp_path, mirror=URL, total_timesteps=400)
    shutil.rmtree(tmp_path / "a")
    for path in [path for path in store.store if f"/objects/{kind}" in path]:
        fsspec.filesystem("moody").pipe_file(path, b"rubbish")
    assert train_dqn(tmp_path, mirror=URL, total_timesteps=400)["global_step"] == 400
    out = capsys.readouterr().out
    assert "is damaged in the mirror" in out
    assert "resumed at step" in out
    said = {"events": "the tail of", "frames": "it is filled again before learning goes on"}
    assert said.get(kind, "") in out


def test_a_half_written_manifest_does_not_count(tmp_path, store):
    with Training(tmp_path, mirror=URL) as training:
        training.iterate(2)
    shutil.rmtree(tmp_path / "a")
    names = [path for path in store.store if "/manifest-" in path]
    half = fsspec.filesystem("moody").cat_file(names[0])[:-10]
    fsspec.filesystem("moody").pipe_file(at("manifest-000000009999-aaaaaaaa.json"), half)
    with Training(tmp_path, mirror=URL) as training:
        assert training.run.progress.global_step == 0
        training.iterate(1)
    assert MirrorView(URL).look()[1] == []  # it is gone


def test_resume_never_sets_the_mirror_aside_too(tmp_path, store, capsys):
    with Training(tmp_path, mirror=URL, checkpoint_minutes=1e-9) as training:
        training.iterate(3)
    shutil.rmtree(tmp_path / "a")
    with Training(tmp_path, mirror=URL, resume="never") as training:
        assert training.run.progress.global_step == 0
        training.iterate(1)
    assert "the mirror's old run is now /bucket/runs/a.old-1" in capsys.readouterr().out
    assert MirrorView(f"{URL}/a").look()[0]["step"] == 0
    assert MirrorView(f"{URL}/a").look()[1] == []
    assert MirrorView(f"{URL}/a.old-1").look()[0]["step"] == 20
    assert MirrorView(f"{URL}/a.old-1").look()[1] == []
    # set aside under its name it can be gone on from
    with Training(tmp_path, name="a.old-1", mirror=URL) as training:
        assert training.run.progress.global_step == 20


# ---- what stands there at any time


def test_no_manifest_ever_names_what_is_not_there_and_no_object_is_written_twice(tmp_path, monkeypatch, store):
    written, problems, looks = set(), [], [0]

    def look(what, path):
        """After each change: a machine that starts now finds a whole run."""
        looks[0] += 1
        if what == "put" and "/objects/" in path:
            problems.extend([f"{path} written again"] if path in written else [])
            written.add(path)
        if what == "remove":
            written.discard(path)
        for name in sorted((name for name in store.store if "/manifest-" in name), reverse=True)[:1]:
            content = store.store[name].getvalue()
            assert is_sealed(content)
            for file in json.loads(content.splitlines()[0])["files"].values():
                for _, _, piece, sha256, _ in file["pieces"]:
                    found = store.store.get(at(f"objects/{piece}"))
                    if found is None or hashlib.sha256(found.getvalue()).hexdigest() != sha256:
                        problems.append(f"after {what} {path}: {piece}")

    hook(store, "after", look)
    train(tmp_path, mirror=URL, checkpoint_minutes=1e-6)
    assert problems == []
    assert looks[0] > 40


def test_what_has_not_changed_does_not_travel_again(tmp_path, monkeypatch, store):
    puts = []
    monkeypatch.setattr(common.mirror, "EVENTS_PIECE", 500)
    hook(store, "before", lambda what, path: puts.append(path.rpartition("/")[2]) if what == "put" else None)
    with Training(tmp_path, mirror=URL, checkpoint_minutes=1e-9) as training:
        for _ in range(6):
            training.iterate(1)
            before = training.run.mirror._manifest
            training.run.mirror._wake.set()
            wait_until(lambda: training.run.mirror._manifest > before)  # noqa: B023
            training.run.log_iteration({f"losses/{name}": 1.0 for name in "abcdefgh"})
    names = [name.rpartition(".")[0] for name in puts]
    assert max(names.count(name) for name in names if name.startswith("step-")) == 1
    assert "best.pt" not in names  # a second name of what is there
    assert names.count("config.json") == 1
    events = [name for name in puts if name.startswith("events.")]
    assert len(events) == len(set(events)) > 6
    size = next((tmp_path / "a").glob("events.*")).stat().st_size
    assert size > 2000


def test_what_a_killed_copy_left_is_removed_by_the_next_process(tmp_path, store):
    with Training(tmp_path, mirror=URL) as training:
        training.iterate(2)
    fs = fsspec.filesystem("moody")
    fs.pipe_file(at("objects/step-000000000999.pt.0123456789abcdef"), b"half of it")
    shutil.rmtree(tmp_path / "a")
    with Training(tmp_path, mirror=URL) as training:
        training.iterate(1)
    assert MirrorView(URL).look()[1] == []


def test_a_copy_into_a_folder_that_a_kill_cut_short_leaves_no_file(tmp_path):
    folder = tmp_path / "mirror"
    with Training(tmp_path, mirror=str(folder)) as training:
        training.iterate(2)
    (folder / "a" / "objects" / "step-000000000010.pt.0123456789abcdef.tmp").write_bytes(b"half")
    (folder / "a" / "manifest-000000000099-00000000.json.tmp").write_bytes(b"half")
    with Training(tmp_path, mirror=str(folder)) as training:
        training.iterate(1)
    assert list(folder.rglob("*.tmp")) == []


# ---- a store that is slow or dead


def test_a_dead_store_stops_nothing_and_is_reported_once_and_copied_to_when_it_is_back(
    tmp_path, monkeypatch, store, capsys
):
    monkeypatch.setattr(common.mirror, "PERIOD", 0.01)
    dead = mortal(store)
    with Training(tmp_path, mirror=URL, checkpoint_minutes=1e-9) as training:
        training.iterate(2)
        wait_until(lambda: training.run.mirror.step == 10)
        dead.set()
        training.iterate(5)
        wait_until(lambda: training.run.mirror._trouble)
        training.iterate(5)
        dead.clear()
        wait_until(lambda: training.run.mirror.step == 110)
    out = capsys.readouterr().out
    assert out.count("cannot copy to") == 1
    assert f"cannot copy to {URL} (no route to the store): training goes on, it has step 10\n" in out
    assert f"{URL} is copied to again\n" in out


@pytest.mark.parametrize("how", ["hangs", "fails"])
def test_a_dead_store_delays_no_exit_past_ten_seconds(tmp_path, monkeypatch, store, capsys, how):
    monkeypatch.setattr(common.mirror, "EXIT", 1.0)
    release, dead = threading.Event(), threading.Event()

    def fail(what, path):
        if dead.is_set():
            if how == "hangs":
                release.wait(60)
            raise ConnectionError

    hook(store, "before", fail)
    training = Training(tmp_path, mirror=URL, checkpoint_minutes=1e-9).__enter__()
    training.iterate(2)
    wait_until(lambda: training.run.mirror.step == 10)
    dead.set()
    training.iterate(3)
    began = time.monotonic()
    training.__exit__(None, None, None)
    assert time.monotonic() - began < 5
    release.set()
    said = "not all is copied to moody://bucket/runs, it has step 10: the same command copies the rest"
    assert said in capsys.readouterr().out


def test_the_ten_seconds_count_from_the_signal_and_not_from_the_save(tmp_path, store, monkeypatch):
    monkeypatch.setattr(common.mirror, "EXIT", 3.0)
    release = threading.Event()
    with Training(tmp_path, mirror=URL) as training:
        training.iterate(1)
        wait_until(lambda: training.run.mirror.step == 0)
        hook(store, "before", lambda what, path: release.wait(60))
        training.signals.ask("the test")
        time.sleep(2.0)  # a slow save
        began = time.monotonic()
        training.run.mirror.close()
        assert time.monotonic() - began < 2.5
        release.set()
        assert training.signals.asked == "the test"


def test_a_mirror_that_somebody_empties_is_filled_again(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(common.mirror, "PERIOD", 0.05)
    folder = tmp_path / "mirror"
    with Training(tmp_path, mirror=str(folder), checkpoint_minutes=1e-9) as training:
        training.iterate(3)
        wait_until(lambda: training.run.mirror.step == 20)
        folder.rename(tmp_path / "gone")  # at once: the copying thread deletes there too
        training.iterate(1)
        wait_until(lambda: training.run.mirror.step == 30)
    assert f"{folder}/a" not in capsys.readouterr().out  # neither lost nor out of reach
    manifest, left = MirrorView(str(folder)).look()
    assert (manifest["step"], left) == (30, [])
    shutil.rmtree(tmp_path / "a")
    with Training(tmp_path, mirror=str(folder)) as training:
        assert training.run.progress.global_step == 30


@pytest.mark.slow
def test_a_complete_run_with_a_dead_mirror_is_status_1_and_the_same_command_copies_the_rest(
    tmp_path, monkeypatch, store, main_guard
):
    monkeypatch.setattr(common.mirror, "EXIT", 0.5)
    monkeypatch.setattr(common.mirror, "LEASE", 0.2)  # of the first process, which here is still alive
    flags = ["--num-envs=2", "--num-steps=16", "--num-minibatches=2", "--update-epochs=1", "--total-timesteps=64"]
    flags += ["--run-name=a", f"--mirror={URL}", f"--runs-dir={tmp_path}"]
    dead = mortal(store)
    real = ppo_atari.Run.finish
    monkeypatch.setattr(ppo_atari.Run, "finish", lambda run: (dead.set(), real(run))[1])
    status, out, err = main_guard(ppo_atari, *flags)
    assert (status, err) == (1, f"error: {tmp_path / 'a'} is complete, its mirror is not\n")
    assert "the same command copies the rest" in out
    monkeypatch.setattr(common.mirror, "PATIENCE", 0.2)
    status, out, err = main_guard(ppo_atari, *flags)  # out of reach from the start
    assert (status, err) == (1, f"error: {tmp_path / 'a'} is complete, its mirror is not\n")
    assert "complete already" in out
    dead.clear()
    status, _, err = main_guard(ppo_atari, *flags)
    assert (status, err) == (0, "")
    assert MirrorView(URL).look()[0]["complete"]


def test_a_store_that_does_not_answer_is_reported_by_the_loop(tmp_path, monkeypatch, store, capsys):
    release = threading.Event()
    with Training(tmp_path, mirror=URL) as training:
        training.iterate(1)
        wait_until(lambda: training.run.mirror.step == 0)
        hook(store, "before", lambda what, path: release.wait(60))
        training.run.mirror._wake.set()
        monkeypatch.setattr(common.mirror, "PATIENCE", 0.05)
        monkeypatch.setattr(common.run, "HEARTBEAT", 0.01)
        wait_until(lambda: training.run.tick() or training.run.mirror._trouble)
        release.set()
    assert "no answer in 0 s): training goes on, it has step 0" in capsys.readouterr().out


def test_training_does_not_wait_for_a_slow_store(tmp_path, store):
    release = threading.Event()
    slow = lambda what, path: release.wait(30) if "/objects/" in path else None  # noqa: E731
    with Training(tmp_path, mirror=URL, checkpoint_minutes=1e-9) as training:
        hook(store, "before", slow)
        began = time.monotonic()
        training.iterate(20)
        assert time.monotonic() - began < 5
        assert training.run.mirror.step is None
        release.set()


def test_a_copy_that_takes_longer_than_an_exit_waits_for_is_said(tmp_path, monkeypatch, store, capsys):
    monkeypatch.setattr(common.mirror, "EXIT", 0.2)
    hook(store, "before", lambda what, path: time.sleep(0.3) if "/objects/" in path else None)
    with Training(tmp_path, mirror=URL) as training:
        training.iterate(1)
        wait_until(lambda: training.run.mirror.step == 0)
    said = r"copying step 0 to moody://bucket/runs took \d s, an exit waits for 0: after the loss"
    assert re.search(said, capsys.readouterr().out)


def test_without_a_mirror_nobody_knows_how_far_a_new_machine_is_with_its_folder_it_goes_on(
    tmp_path, monkeypatch, store, capsys
):
    monkeypatch.setattr(common.mirror, "PATIENCE", 0.3)
    monkeypatch.setattr(common.mirror, "PERIOD", 0.05)
    dead = mortal(store)
    with Training(tmp_path, mirror=URL, checkpoint_minutes=1e-9) as training:
        training.iterate(3)
    dead.set()
    with Training(tmp_path, mirror=URL, checkpoint_minutes=1e-9) as training:
        assert training.run.progress.global_step == 20
        training.iterate(1)
        dead.clear()
        training.iterate(2)
        wait_until(lambda: training.run.mirror.step == 40)  # found late, and not fetched from
    assert "without knowing whether moody://bucket/runs is further" in capsys.readouterr().out
    dead.set()
    shutil.rmtree(tmp_path / "a")
    with pytest.raises(UsageError, match="no route to the store"), Training(tmp_path, mirror=URL):
        pass
    assert not (tmp_path / "a").exists()


def test_a_silent_store_at_the_start_is_given_up_and_its_late_answer_changes_nothing(
    tmp_path, monkeypatch, store, capsys
):
    monkeypatch.setattr(common.mirror, "PATIENCE", 0.3)
    with Training(tmp_path, mirror=URL, checkpoint_minutes=1e-9) as training:
        training.iterate(3)
    shutil.copytree(tmp_path / "a", tmp_path / "old")
    with Training(tmp_path, mirror=URL, checkpoint_minutes=1e-9) as training:
        training.iterate(3)
    shutil.rmtree(tmp_path / "a")
    shutil.move(tmp_path / "old", tmp_path / "a")
    release = threading.Event()
    steps = []

    def note(what, path):
        if what == "put" and "/manifest-" in path:
            steps.append(MirrorView(URL).look()[0]["step"])

    hook(store, "before", lambda what, path: release.wait(60))
    hook(store, "after", note)
    with Training(tmp_path, mirror=URL, checkpoint_minutes=1e-9) as training:
        assert training.run.progress.global_step == 20
        release.set()
        wait_until(lambda: training.run.mirror.step == 40)
        wait_until(lambda: not any(thread.name == "mirror-start" for thread in threading.enumerate()))
        training.iterate(4)
        wait_until(lambda: training.run.mirror.step == 50)
    out = capsys.readouterr().out
    assert "without knowing whether moody://bucket/runs is further" in out
    assert "fetching" not in out
    assert min(steps) >= 40  # a run is never replaced by one that is not as far


def test_a_folder_that_is_not_as_far_owes_the_mirror_nothing(tmp_path, monkeypatch, store):
    monkeypatch.setattr(common.mirror, "PATIENCE", 0.2)
    with Training(tmp_path, mirror=URL, checkpoint_minutes=1e-9) as training:
        training.iterate(3)
    (tmp_path / "a" / "checkpoints" / "step-000000000020.pt").unlink()
    dead, lines = mortal(store), []
    with StopSignals() as signals:
        mirror = Mirror(URL, "a", signals)
        dead.set()
        mirror.attach(tmp_path / "a", False, lambda config: None, lines.append)
        dead.clear()
        mirror.start()
        mirror.push(10, [])
        assert mirror.close()
    assert not any("not all is copied" in line for line in lines)
    assert MirrorView(URL).look()[0]["step"] == 20


def test_a_network_that_comes_up_late_is_waited_for(tmp_path, store):
    tries = []

    def fail(what, path):
        tries.append(path)
        if len(tries) < 4:
            raise ConnectionError("network is unreachable")

    with Training(tmp_path, mirror=URL, checkpoint_minutes=1e-9) as training:
        training.iterate(3)
    shutil.rmtree(tmp_path / "a")
    hook(store, "before", fail)
    with Training(tmp_path, mirror=URL) as training:
        assert training.run.progress.global_step == 20


def test_a_fetch_that_fails_once_is_tried_again_and_one_that_fails_for_long_is_status_75(
    tmp_path, monkeypatch, store, capsys
):
    with Training(tmp_path, mirror=URL, checkpoint_minutes=1e-9) as training:
        training.iterate(3)
    shutil.rmtree(tmp_path / "a")
    failures = [2]

    def fail(what, path):
        if what == "get" and "/step-" in path and failures[0]:
            failures[0] -= 1
            raise ConnectionError("reset by peer")

    hook(store, "before", fail)
    with Training(tmp_path, mirror=URL) as training:
        assert training.run.progress.global_step == 20
    monkeypatch.setattr(common.mirror, "PATIENCE", 0.3)
    failures[0] = 10**9
    for _ in range(5):
        shutil.rmtree(tmp_path / "a")
        with pytest.raises(Interrupted, match=r"cannot fetch from .* \(reset by peer\): the same command tries again"):
            Training(tmp_path, mirror=URL)
    # a machine that always ends while it fetches goes round in circles
    shutil.rmtree(tmp_path / "a")
    with pytest.raises(LimitReached, match="the last 5 processes were ended while they fetched step 20 from"):
        Training(tmp_path, mirror=URL)
    assert "it needs a machine that lives longer" in capsys.readouterr().out
    failures[0] = 0  # by hand it tries again
    with Training(tmp_path, mirror=URL) as training:
        assert training.run.progress.global_step == 20
    assert MirrorView(URL).look()[1] == []


def test_machines_that_die_soon_after_a_restore_were_not_cut_short_in_it(tmp_path, store):
    with Training(tmp_path, mirror=URL) as training:
        training.iterate(2)
    for _ in range(7):
        before = training.run.mirror._manifest  # the copying thread may make the next one at once
        shutil.rmtree(tmp_path / "a")
        with Training(tmp_path, mirror=URL) as training:
            assert training.run.cut_restores["count"] == 0
            wait_until(lambda: training.run.mirror._manifest > before)  # noqa: B023
            training.run.mirror._with_copy = False  # the last that anybody hears of it


@pytest.mark.slow
def test_a_run_that_gets_a_mirror_later_is_copied_with_its_memory_at_once(tmp_path, monkeypatch, store, capsys):
    train_dqn(tmp_path, "whole", total_timesteps=600)
    with monkeypatch.context() as patch:
        interrupt_after(patch, dqn_atari, 150)
        with pytest.raises(Interrupted):
            train_dqn(tmp_path, total_timesteps=600)
    manifests = []

    def note(what, path):
        if what == "put" and "/manifest-" in path:
            manifests.append(MirrorView(URL).look()[0])

    hook(store, "after", note)
    with monkeypatch.context() as patch:
        interrupt_after(patch, dqn_atari, 60)
        with pytest.raises(Interrupted):
            train_dqn(tmp_path, mirror=URL, total_timesteps=600)
    assert all((manifest["step"] is None) == ("replay/frames.bin" not in manifest["files"]) for manifest in manifests)
    shutil.rmtree(tmp_path / "a")
    assert train_dqn(tmp_path, mirror=URL, total_timesteps=600)["global_step"] == 600
    assert "filled again" not in capsys.readouterr().out
    assert compare(tmp_path / "whole", tmp_path / "a") == []


def test_a_fetch_puts_events_aside_that_another_machines_work_has_superseded(tmp_path, monkeypatch, store):
    """Machine one went on for a while with a mirror out of reach, and machine two further."""

    def go_on(runs_dir, times, **flags):
        monkeypatch.setattr(common.run.socket, "gethostname", lambda: runs_dir.name)
        with Training(runs_dir, checkpoint_minutes=1e-9, **flags) as training:
            for _ in range(times):
                training.iterate(1)
                training.run.log_iteration({"losses/x": float(training.run.progress.global_step)})

    go_on(tmp_path / "one", 2, mirror=URL)
    go_on(tmp_path / "two", 5, mirror=URL)
    go_on(tmp_path / "one", 2)
    go_on(tmp_path / "one", 1, mirror=URL)
    go_on(tmp_path / "three", 1, mirror=URL)
    steps = [step for step, _ in read_scalars(tmp_path / "three" / "a")["losses/x"]]
    assert steps == sorted(set(steps))
    assert steps == list(range(10, 10 * len(steps) + 1, 10))
    assert len(list((tmp_path / "one" / "a").glob("superseded*"))) == 1


# ---- two machines


def other_machine(monkeypatch) -> None:
    """Processes of this machine look like those of another one."""
    real = process_identity()
    monkeypatch.setattr(common.mirror, "process_identity", lambda: {**real, "boot": uuid.uuid4().hex, "host": "other"})


def test_a_lease_that_is_renewed_refuses_the_second_machine(tmp_path, monkeypatch, store, capsys):
    monkeypatch.setattr(common.mirror, "RENEWAL", 0.2)
    with Training(tmp_path / "one", mirror=URL) as training:
        training.iterate(1)
        other_machine(monkeypatch)
        with pytest.raises(UsageError, match=rf"a is in use by process {os.getpid()} on "):
            Training(tmp_path / "two", mirror=URL)
        assert not (tmp_path / "two" / "a").exists()
        assert "waiting up to 60 s for a sign of life" in capsys.readouterr().out
        training.iterate(1)
    assert not any(path.endswith("lease.json") for path in store.store)


def test_a_lease_is_renewed_while_a_run_is_fetched(tmp_path, monkeypatch, store):
    monkeypatch.setattr(common.mirror, "RENEWAL", 0.05)
    with Training(tmp_path, mirror=URL) as training:
        training.iterate(2)
    shutil.rmtree(tmp_path / "a")
    puts = []
    hook(store, "before", lambda what, path: puts.append(path) if what == "put" and "lease" in path else None)
    slow = threading.Event()

    def get(what, path):
        puts.extend([path] if what == "put" and "lease" in path else [])
        if what == "get" and "/step-" in path and not slow.is_set():
            slow.set()
            before = len(puts)
            wait_until(lambda: len(puts) > before + 2)

    hook(store, "before", get)
    with Training(tmp_path, mirror=URL) as training:
        assert slow.is_set()
        assert training.run.progress.global_step == 0


def test_a_lease_that_was_written_but_not_read_back_is_ours(tmp_path, monkeypatch, store):
    monkeypatch.setattr(common.mirror, "RENEWAL", 0.05)
    puts, fails = [], [1]

    def look(what, path):
        puts.extend([path] if what == "put" and "lease" in path else [])
        if what == "get" and "lease" in path and puts and fails[0]:
            fails[0] = 0
            raise ConnectionError

    hook(store, "before", look)
    with Training(tmp_path, mirror=URL) as training:
        training.iterate(1)
        wait_until(lambda: len(puts) > 5)
        # and one that somebody removed is written again
        store.store.pop(at("lease.json"), None)
        wait_until(lambda: at("lease.json") in store.store)


def test_a_lease_that_is_not_renewed_is_taken_over(tmp_path, monkeypatch, store, capsys):
    monkeypatch.setattr(common.mirror, "LEASE", 1.5)
    monkeypatch.setattr(common.mirror, "PERIOD", 0.05)
    with Training(tmp_path / "one", mirror=URL, checkpoint_minutes=1e-9) as first:
        first.iterate(3)
        wait_until(lambda: first.run.mirror.step == 20)
        # the first one hangs: nothing is renewed for ten seconds
        other_machine(monkeypatch)
        began = time.monotonic()
        with Training(tmp_path / "two", mirror=URL, checkpoint_minutes=1e-9) as second:
            assert time.monotonic() - began > 1.5
            assert second.run.progress.global_step == 20
            first.iterate(2)  # and wakes up again
            wait_until(lambda: "another process has taken /bucket/runs/a: training goes on" in capsys.readouterr().out)
            second.iterate(2)
            wait_until(lambda: second.run.mirror.step == 30)
            # what the first one put when it had lost the lease and did not know
            fsspec.filesystem("moody").pipe_file(at("objects/step-000000000030.pt.0123456789abcdef"), b"its own")
        first.iterate(1)
    assert MirrorView(URL).look()[0]["step"] == 30
    assert MirrorView(URL).look()[1] == []


def test_a_machine_that_wakes_up_after_another_one_has_finished_harms_nothing(tmp_path, monkeypatch, store, capsys):
    monkeypatch.setattr(common.mirror, "LEASE", 1.0)
    with Training(tmp_path / "one", mirror=URL, checkpoint_minutes=1e-9) as first:
        first.iterate(3)
        wait_until(lambda: first.run.mirror.step == 20)
        with monkeypatch.context() as patch:
            other_machine(patch)
            with Training(tmp_path / "two", mirror=URL, checkpoint_minutes=1e-9) as second:
                second.iterate(4)
        assert at("lease.json") not in store.store
        first.iterate(1)
    assert "another process has had /bucket/runs/a meanwhile" in capsys.readouterr().out
    assert MirrorView(URL).look()[0]["step"] == 50
    assert MirrorView(URL).look()[1] == []
    with Training(tmp_path / "three", mirror=URL) as third:
        assert third.run.progress.global_step == 50


def test_of_two_that_take_a_lease_at_once_one_gets_it(tmp_path, monkeypatch, store):
    monkeypatch.setattr(common.mirror, "SETTLE", 0.3)
    monkeypatch.setattr(common.mirror, "LEASE", 0.1)
    fsspec.filesystem("moody").pipe_file(at("lease.json"), b'{"owner": "gone", "host": "x", "pid": 1}')
    outcomes, done = [], threading.Event()

    def take(name):
        with StopSignals() as signals:
            mirror = Mirror(URL, "a", signals)
            try:
                mirror.attach(tmp_path / name, False, lambda config: None, lambda line: None)
                outcomes.append("has it")
                done.wait()
            except UsageError as error:
                outcomes.append(str(error))
                done.set()
            mirror.close(copy=False)

    threads = [threading.Thread(target=take, args=[name]) for name in ("one", "two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes)[1] == "has it"
    assert "another process has just taken a" in sorted(outcomes)[0]


def test_a_process_of_this_machine_that_is_gone_is_not_waited_for(tmp_path, store):
    alive = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    lease = {**process_identity(), "pid": alive.pid, "began": common.mirror.start_time(alive.pid), "owner": "x"}
    assert not is_dead(lease)
    assert is_dead({**lease, "began": "1"})  # the number is another process's now
    assert not is_dead({**lease, "boot": "another"})
    alive.communicate(b"\n")
    assert is_dead(lease)
    fsspec.filesystem("moody").pipe_file(at("lease.json"), json.dumps(lease).encode())
    began = time.monotonic()
    with Training(tmp_path, mirror=URL) as training:
        training.iterate(1)
    assert time.monotonic() - began < 3


def test_a_signal_while_a_lease_is_waited_for_counts(tmp_path, monkeypatch, store):
    fsspec.filesystem("moody").pipe_file(at("lease.json"), b'{"owner": "gone", "host": "x", "pid": 1}')
    looks = []

    def look(what, path):
        looks.extend([path] if path.endswith("lease.json") else [])
        if len(looks) == 2:  # it waits
            os.kill(os.getpid(), signal.SIGTERM)

    hook(store, "before", look)
    with pytest.raises(Interrupted, match="interrupted by SIGTERM before the start"):
        train(tmp_path, mirror=URL)


# ---- refused


def test_another_run_of_the_same_name_is_refused_and_nothing_is_written(tmp_path, store, main_guard):
    train(tmp_path / "one", mirror=URL, total_timesteps=32)
    before = {path: file.getvalue() for path, file in store.store.items()}
    flags = ["--num-envs=2", "--num-steps=16", "--num-minibatches=2", "--run-name=a", f"--mirror={URL}"]
    flags += ["--update-epochs=1", "--total-timesteps=32", f"--runs-dir={tmp_path / 'two'}", "--seed=2"]
    status, _, err = main_guard(ppo_atari, *flags)
    assert status == 2
    assert "--seed 2" in err
    assert len(err.splitlines()) == 1
    assert not (tmp_path / "two").exists()
    assert {path: file.getvalue() for path, file in store.store.items()} == before


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("foo://bucket", "Protocol not known: foo"),
        ("sftp://me:secret@host/runs", "no password in the address"),
        ("gs://bucket/runs", "requirements-cloud.txt"),
        ("runs", "is where the run itself is"),
        ("runs/a/mirror", "is in the run's own folder"),
        ("s3:/bucket/runs", "an address has two slashes"),
        ("/etc/passwd", "Not a directory"),
        ("", "must name a folder"),
        ("/proc/nowhere", "/proc/nowhere"),
    ],
)
def test_an_address_that_is_none_is_refused_in_one_line(tmp_path, monkeypatch, main_guard, url, reason):
    monkeypatch.chdir(tmp_path)
    status, _, err = main_guard(ppo_atari, "--mirror", url, "--run-name", "a")
    assert status == 2
    assert reason in err
    assert len(err.splitlines()) == 1
    assert "secret" not in err
    assert not (tmp_path / "runs").exists()


# ---- the replay memory


DQN = dict(num_envs=2, buffer_size=400, learning_starts=64, batch_size=8, train_frequency=16, checkpoint_minutes=0.0)


def train_dqn(tmp_path, name: str = "a", **flags):
    return dqn_atari.train(dqn_atari.Args(runs_dir=str(tmp_path), run_name=name, **{**DQN, **flags}))


@pytest.mark.slow
def test_a_replay_memory_travels_in_segments_and_comes_back_bit_for_bit(tmp_path, monkeypatch, store, capsys):
    flags = dict(total_timesteps=1040, prioritized=True)  # the memory goes round more than twice
    puts = []
    hook(store, "before", lambda what, path: puts.append(path.rpartition("/")[2]) if what == "put" else None)
    train_dqn(tmp_path, "whole", **flags)
    for looks in (150, 300):
        with monkeypatch.context() as patch:
            interrupt_after(patch, dqn_atari, looks)
            with pytest.raises(Interrupted):
                train_dqn(tmp_path, mirror=URL, **flags)
        shutil.rmtree(tmp_path / "a")
    assert train_dqn(tmp_path, mirror=URL, **flags)["global_step"] == 1040
    assert compare(tmp_path / "whole", tmp_path / "a") == []
    assert "filled again" not in capsys.readouterr().out
    assert MirrorView(URL).look()[1] == []
    frames = [name for name in puts if name.startswith("frames.bin")]
    assert len(frames) == len(set(frames)) > 520 // 16
    last = store.store[next(name for name in store.store if "/manifest-" in name)].getvalue()
    pieces = json.loads(last.splitlines()[0])["files"]["replay/frames.bin"]["pieces"]
    ends = sorted((offset, offset + size) for offset, size, *_ in pieces)
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(ends))  # none overlaps another


def test_a_checkpoint_is_named_with_the_memory_that_it_counts_on_and_not_before(tmp_path, store):
    """The second checkpoint is finished while the first one is copied."""
    folder = tmp_path / "a"
    (folder / "checkpoints").mkdir(parents=True)
    for step in (10, 20):
        (folder / "checkpoints" / f"step-{step:012d}.pt").write_bytes(sealed(f"state {step}".encode()))

    def parts(step):
        return [("replay/frames.bin", 0, 100, f"key {step}", lambda: f"frames of {step}".encode())]

    with StopSignals() as signals:
        mirror = Mirror(URL, "a", signals)
        mirror.attach(folder, False, lambda config: None, lambda line: None)
        mirror.push(10, parts(10))
        mirror._copy(closing=False)
        files = MirrorView(URL).look()[0]["files"]
        assert [name for name in files if "step-" in name] == ["checkpoints/step-000000000010.pt"]
        assert store.store[at(f"objects/{files['replay/frames.bin']['pieces'][0][2]}")].getvalue() == b"frames of 10"
        mirror.push(20, parts(20))
        mirror._copy(closing=False)
        manifest, left = MirrorView(URL).look()
        assert (manifest["step"], left) == (20, [])
        assert f"frames.bin.{hashlib.sha256(b'frames of 20').hexdigest()[:16]}" in str(manifest["files"])
        mirror.close()


@pytest.mark.slow
def test_a_segment_that_is_overwritten_while_it_is_copied_does_not_count(tmp_path, monkeypatch, store, capsys):
    """The store is so slow that the ring comes round: what stands there stays whole, and a later copy succeeds."""
    monkeypatch.setattr(common.mirror, "PERIOD", 0.01)
    release = threading.Event()
    blocked = []

    def slow(what, path):
        if what == "put" and "/frames.bin" in path and not release.is_set():
            blocked.append(path)
            release.wait(60)

    hook(store, "before", slow)
    real = dqn_atari.Run.tick

    def tick(run):
        if run.mirror.store and run.progress.global_step == 1200:
            wait_until(lambda: blocked)
            assert not run.mirror.step
            release.set()  # the first copy goes on, and the segments that it would read are others by now
        if run.mirror.store and run.progress.global_step == 1300:
            run.mirror.signals.ask("the test")
        real(run)

    monkeypatch.setattr(dqn_atari.Run, "tick", tick)
    train_dqn(tmp_path, "whole", total_timesteps=1600)
    with pytest.raises(Interrupted):
        train_dqn(tmp_path, mirror=URL, total_timesteps=1600)
    shutil.rmtree(tmp_path / "a")
    assert train_dqn(tmp_path, mirror=URL, total_timesteps=1600)["global_step"] == 1600
    assert "filled again" not in capsys.readouterr().out
    assert compare(tmp_path / "whole", tmp_path / "a") == []
    assert MirrorView(URL).look()[1] == []


def test_drivers_leave_pythons_generator_alone(monkeypatch, store):
    driver = types.ModuleType("s3fs.retries")
    driver.random = random
    monkeypatch.setitem(sys.modules, "s3fs.retries", driver)
    real = common.mirror.url_to_fs

    def importing(*args, **kwargs):
        random.random()  # as rich does, which the S3 driver imports
        return real(*args, **kwargs)

    monkeypatch.setattr(common.mirror, "url_to_fs", importing)
    before = random.getstate()
    Mirror(URL, "a", None)
    assert random.getstate() == before
    driver.random.random()
    assert random.getstate() == before
