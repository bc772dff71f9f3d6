"""Checkpoints: what is kept, what is noticed, what is refused, and that nothing good is ever lost."""

import contextlib
import json
import os
import random
import resource
import shutil
import time
import zipfile

import numpy as np
import pytest
import torch
import torch.nn as nn

import common.checkpoint
from common.args import SharedArgs
from common.checkpoint import LEAVING, Checkpoints, Damaged, Rng, newest_first, read
from common.cost import Clock
from common.errors import Interrupted, LimitReached, SaveError, UsageError
from common.mirror import Mirror
from common.preemption import StopSignals
from common.run import Run

CPU = torch.device("cpu")


class Training:
    """A run with one small network, whose iteration adds one to every weight."""

    def __init__(self, runs_dir, name="a", script="script", net=None, config=None, **flags) -> None:
        self.args = SharedArgs(runs_dir=str(runs_dir), run_name=name, **flags)
        self.args.check()
        self.signals = StopSignals().__enter__()
        config = {"device": "cpu", "amp_dtype": "torch.float32", "args": vars(self.args), **(config or {})}
        mirror = Mirror(self.args.mirror, name, self.signals)
        try:
            self.run = Run(self.args, Clock(self.args, script), mirror, script, name, self.args.total_timesteps, config)
        except BaseException:
            self.signals.__exit__(None, None, None)
            raise
        self.net = net or nn.Linear(300, 300, bias=False)
        nn.init.zeros_(self.net.weight)

    def __enter__(self) -> "Training":
        self.run.__enter__()
        state = {"progress": self.run.progress, "net": self.net, "rng": Rng(1, CPU)}
        try:
            self.checkpoints = Checkpoints(
                self.run, state | {"clock": self.run.clock, "events": self.run.events}, self.signals
            )
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def __exit__(self, *exception) -> None:
        self.run.__exit__(*exception)
        self.signals.__exit__(*exception)

    def iterate(self, times: int = 1, returns: float | None = None) -> None:
        for _ in range(times):
            self.checkpoints.boundary()
            with torch.no_grad():
                self.net.weight += 1
            self.run.progress.global_step += 10
            if returns is not None:
                self.run.progress.returns.append(returns)

    def weight(self) -> float:
        (value,) = self.net.weight.unique().tolist()
        return value


EVERY_BOUNDARY = {"checkpoint_minutes": 1e-9}


def names(tmp_path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "a" / "checkpoints").iterdir())


def contents(folder) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def begun(tmp_path, iterations: int = 3) -> list:
    """A run that saved at each boundary and then died. Returns its checkpoints, the newest first."""
    with Training(tmp_path, **EVERY_BOUNDARY) as training:
        training.iterate(iterations)
    return newest_first(tmp_path / "a" / "checkpoints")


# ---- saving and restoring


def test_the_same_command_goes_on_from_the_last_boundary(tmp_path, capsys):
    with Training(tmp_path, **EVERY_BOUNDARY) as training:
        training.iterate(3)
        drawn = torch.rand(3), np.random.rand(3), random.random()  # noqa: NPY002
    capsys.readouterr()
    with Training(tmp_path) as training:
        assert (training.weight(), training.run.progress.global_step) == (2.0, 20)
        again = torch.rand(3), np.random.rand(3), random.random()  # noqa: NPY002
    assert torch.equal(drawn[0], again[0])
    assert (drawn[1] == again[1]).all()
    assert drawn[2] == again[2]
    assert (
        f"resumed at step 20 from {tmp_path / 'a' / 'checkpoints' / 'step-000000000020.pt'}" in capsys.readouterr().out
    )


def test_a_checkpoint_is_an_ordinary_archive_of_plain_values(tmp_path):
    newest = begun(tmp_path)[0]
    content = torch.load(newest, weights_only=True)
    assert zipfile.ZipFile(newest).testzip() is None
    assert content.keys() == {"about", "progress", "net", "rng", "clock", "events"}
    assert content["net"]["weight"].unique().tolist() == [2.0]
    assert content["about"]["global_step"] == 20


def test_the_boundarys_state_is_saved_although_the_loop_has_moved_on(tmp_path):
    with pytest.raises(Interrupted, match="interrupted by the test"), Training(tmp_path) as training:
        training.iterate(3)
        torch.rand(100)
        training.signals.ask("the test")
        training.checkpoints.stop_if_asked()
    assert names(tmp_path) == ["step-000000000000.pt", "step-000000000020.pt"]
    content = read(tmp_path / "a" / "checkpoints" / "step-000000000020.pt")
    assert content["net"]["weight"].unique().tolist() == [2.0]
    assert content["progress"]["global_step"] == 20
    torch.manual_seed(1)
    assert torch.equal(content["rng"]["torch"], torch.get_rng_state())
    assert json.loads((tmp_path / "a" / "status.json").read_text())["phase"] == "interrupted"


def test_a_boundary_that_is_on_the_disk_is_not_written_again(tmp_path):
    with pytest.raises(Interrupted), Training(tmp_path) as training:
        training.iterate()
        before = contents(tmp_path / "a" / "checkpoints")
        training.signals.ask("the test")
        training.checkpoints.stop_if_asked()
    assert contents(tmp_path / "a" / "checkpoints") == before


def test_without_minutes_only_the_first_boundary_and_the_end_are_saved(tmp_path):
    with Training(tmp_path, checkpoint_minutes=0) as training:
        training.iterate(5)
        assert names(tmp_path) == ["step-000000000000.pt"]
        training.checkpoints.finish()
    assert names(tmp_path) == ["step-000000000000.pt", "step-000000000050.pt"]


def test_the_newest_are_kept_and_some_for_good(tmp_path):
    with Training(tmp_path, keep_checkpoints=3, keep_every=25, **EVERY_BOUNDARY) as training:
        training.iterate(8)
    with Training(tmp_path, keep_checkpoints=3, keep_every=25, **EVERY_BOUNDARY) as training:
        training.iterate(4)
    rolling = [name for name in names(tmp_path) if name.startswith("step")]
    assert rolling == [f"step-{step:012d}.pt" for step in (80, 90, 100)]
    # the first boundary at or past each multiple of 25
    assert [name for name in names(tmp_path) if name.startswith("keep")] == [
        f"keep-{step:012d}.pt" for step in (30, 50, 80, 100)
    ]
    assert read(tmp_path / "a" / "checkpoints" / "keep-000000000030.pt")["net"]["weight"].unique().tolist() == [3.0]


def test_keeping_some_for_good_does_not_wait_for_the_minutes(tmp_path):
    with Training(tmp_path, keep_every=20, checkpoint_minutes=0) as training:
        training.iterate(6)
    assert [name for name in names(tmp_path) if name.startswith("keep")] == [
        f"keep-{step:012d}.pt" for step in (20, 40)
    ]


def test_the_best_is_the_one_with_the_highest_mean_return(tmp_path):
    def best():
        return read(tmp_path / "a" / "checkpoints" / "best.pt")["about"]["global_step"]

    with Training(tmp_path, **EVERY_BOUNDARY) as training:
        training.iterate(100, returns=1.0)  # fewer than 100 games: more games count more
        assert best() == 990
        training.run.progress.returns.extend([5.0] * 100)
        training.iterate(1)
        assert best() == 1000
        training.run.progress.returns.extend([4.0] * 100)
        training.iterate(1)
    with Training(tmp_path, **EVERY_BOUNDARY) as training:
        training.iterate(2)
        assert best() == 1000
        training.run.progress.returns.extend([6.0] * 100)
        training.iterate(1)
        assert best() == 1030


def test_the_names_of_a_compiled_module_are_those_of_the_module(tmp_path):
    class Compiled(nn.Module):
        """What torch.compile returns, as far as names go."""

        def __init__(self, module):
            super().__init__()
            self._orig_mod = module
            self.weight = module.weight

    with Training(tmp_path, net=Compiled(nn.Linear(3, 3, bias=False))) as training:
        training.iterate(1)
    assert list(read(newest_first(tmp_path / "a" / "checkpoints")[0])["net"]) == ["weight"]
    for _ in range(2):  # and not only on the first resume
        with Training(tmp_path, net=Compiled(nn.Linear(3, 3, bias=False)), **EVERY_BOUNDARY) as training:
            training.iterate(2)


def test_a_state_that_could_not_be_read_back_is_noticed_at_the_first_boundary(tmp_path):
    with pytest.raises(Exception, match=r"[Ww]eights"), Training(tmp_path) as training:
        training.run.progress.scalars = {"a": np.float64(1.0)}
        training.iterate(1)


def test_time_is_charged_for_work_done_twice_and_not_for_the_time_switched_off(tmp_path):
    with Training(tmp_path) as training:
        training.iterate(1)
        training.run.clock.before = 100.0  # as if it had trained so long since
    status = tmp_path / "a" / "status.json"
    content = json.loads(status.read_text())
    content["clock"]["seconds"] = 160.0  # the last sign of life before a SIGKILL
    status.write_text(json.dumps(content))
    os.utime(status, (1, 1))
    with Training(tmp_path) as training:
        assert 160.0 <= training.run.clock.seconds() < 161.0
        assert training.run.progress.global_step == 0


# ---- damage


def test_every_flipped_bit_is_noticed(tmp_path):
    newest = begun(tmp_path)[0]
    whole = newest.read_bytes()
    for position in [*range(0, len(whole), 997), *range(0, 600, 7), *range(len(whole) - 1500, len(whole), 7)]:
        newest.write_bytes(whole[:position] + bytes([whole[position] ^ 0x10]) + whole[position + 1 :])
        with pytest.raises(Damaged):
            read(newest)
    newest.write_bytes(whole)
    read(newest)


@pytest.mark.parametrize("damage", ["empty", "truncated", "flipped", "another file"])
def test_a_damaged_newest_file_falls_back_to_the_one_before_and_says_so(tmp_path, capsys, damage):
    newest, before = begun(tmp_path)
    whole = newest.read_bytes()
    bad = {
        "empty": b"",
        "truncated": whole[:-100],
        "flipped": whole[:50_000] + bytes([whole[50_000] ^ 1]) + whole[50_001:],
        "another file": b"hello\n",
    }[damage]
    newest.write_bytes(bad)
    capsys.readouterr()
    with Training(tmp_path, **EVERY_BOUNDARY) as training:
        assert training.weight() == 1.0
        out = capsys.readouterr().out
        assert f"{newest} is damaged" in out
        assert f"resumed at step 10 from {before}" in out
        training.iterate(2)
        assert training.weight() == 3.0
    assert newest.with_suffix(".damaged").read_bytes() == bad
    assert read(newest)["net"]["weight"].unique().tolist() == [2.0]


def test_nothing_is_touched_where_no_checkpoint_is_good(tmp_path):
    for path in begun(tmp_path):
        path.write_bytes(path.read_bytes()[:-1])
    before = contents(tmp_path / "a")
    del before[".lock"]  # the number of the process
    with pytest.raises(UsageError, match=r"none of step-0+20.pt, step-0+10.pt in .* can be read"), Training(tmp_path):
        pass
    after = contents(tmp_path / "a")
    del after[".lock"]
    assert after == before
    with Training(tmp_path, resume="never") as training:
        assert training.weight() == 0.0
    assert (tmp_path / "a.old-1" / "checkpoints" / "step-000000000020.pt").exists()


@pytest.mark.parametrize("lost", ["all", "all but the best, and status.json is empty"])
def test_lost_checkpoints_are_not_taken_for_a_new_run(tmp_path, lost):
    with Training(tmp_path, **EVERY_BOUNDARY) as training:
        training.iterate(3, returns=1.0)
    for path in (tmp_path / "a" / "checkpoints").iterdir():
        if lost == "all" or path.name != "best.pt":
            path.unlink()
    if lost != "all":
        (tmp_path / "a" / "status.json").write_text("")
    with pytest.raises(UsageError, match="had a checkpoint and has none now"), Training(tmp_path):
        pass


def test_a_file_that_cannot_be_read_at_the_moment_is_not_taken_for_damaged(tmp_path, monkeypatch):
    newest = begun(tmp_path)[0]
    before = contents(tmp_path / "a" / "checkpoints")
    real = type(newest).read_bytes

    def fail(path):
        if path == newest:
            raise OSError(5, "Input/output error")
        return real(path)

    with monkeypatch.context() as patch:
        patch.setattr(type(newest), "read_bytes", fail)
        with pytest.raises(UsageError, match=r"cannot read .*: Input/output error"), Training(tmp_path):
            pass
    assert contents(tmp_path / "a" / "checkpoints") == before


def test_a_checkpoint_of_another_format_is_not_taken_for_damaged(tmp_path, monkeypatch):
    begun(tmp_path)
    before = contents(tmp_path / "a" / "checkpoints")
    monkeypatch.setattr(common.checkpoint, "FORMAT", 2)
    with pytest.raises(UsageError, match="has format 1, this version reads 2"), Training(tmp_path):
        pass
    assert contents(tmp_path / "a" / "checkpoints") == before


def test_names_that_a_kill_prevented_are_given_at_the_next_start(tmp_path):
    with Training(tmp_path, keep_every=25, **EVERY_BOUNDARY) as training:
        training.iterate(4, returns=1.0)
    for name in ("keep-000000000030.pt", "best.pt"):
        (tmp_path / "a" / "checkpoints" / name).unlink()
    with Training(tmp_path, keep_every=25, **EVERY_BOUNDARY):
        assert names(tmp_path)[:2] == ["best.pt", "keep-000000000030.pt"]


def test_a_signal_beyond_a_multiple_keeps_no_boundary_before_it(tmp_path):
    with pytest.raises(Interrupted), Training(tmp_path, keep_every=25) as training:
        training.iterate(3)  # the last boundary was 20, the step is 30
        training.signals.ask("the test")
        training.checkpoints.stop_if_asked()
    assert not any(name.startswith("keep") for name in names(tmp_path))


def test_half_written_files_of_a_killed_process_are_removed(tmp_path):
    begun(tmp_path)
    (tmp_path / "a" / "checkpoints" / "step-000000000030.pt.tmp").write_bytes(b"half")
    with Training(tmp_path):
        assert not any(name.endswith(".tmp") for name in names(tmp_path))


class FullDisk:
    """No file of this process may grow beyond some bytes."""

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def __enter__(self) -> None:
        self.before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (self.limit, self.before[1]))

    def __exit__(self, *exception) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self.before)


def test_a_periodic_save_that_fails_warns_and_training_goes_on(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(common.checkpoint, "RETRY", 0.0)
    with Training(tmp_path, **EVERY_BOUNDARY) as training:
        training.iterate(2)
        before = contents(tmp_path / "a" / "checkpoints")
        with FullDisk(200_000):
            training.iterate(2)
        assert contents(tmp_path / "a" / "checkpoints") == before
        assert capsys.readouterr().out.count("cannot save a checkpoint (File too large): the last good one is ") == 2
        training.iterate(1)
        assert training.weight() == 5.0
    assert names(tmp_path)[-1] == "step-000000000040.pt"


def test_a_full_disk_is_not_asked_again_at_every_boundary(tmp_path, capsys):
    with Training(tmp_path, keep_every=10, **EVERY_BOUNDARY) as training:
        training.iterate(2)
        with FullDisk(200_000):
            training.iterate(5)
        assert capsys.readouterr().out.count("cannot save a checkpoint") == 1


def test_a_stop_on_a_full_disk_leaves_the_last_good_one(tmp_path):
    with Training(tmp_path) as training:
        training.iterate(2)
        training.signals.ask("the test")
        with FullDisk(200_000), pytest.raises(Interrupted, match=r"only .*step-0+\.pt is saved, not step \d\d"):
            training.checkpoints.stop_if_asked()
    with Training(tmp_path) as training:
        assert training.weight() == 0.0


def test_a_stop_after_the_folder_is_gone_does_not_say_that_anything_is_saved(tmp_path):
    with (
        pytest.raises(SaveError, match=r"could not be saved, and .*step-0+\.pt is gone"),
        Training(tmp_path) as training,
    ):
        training.iterate(2)
        shutil.rmtree(tmp_path / "a")
        training.signals.ask("the test")
        training.checkpoints.stop_if_asked()


def test_a_disk_on_which_later_checkpoints_will_not_fit_is_warned_of_at_the_first_one(tmp_path, monkeypatch, capsys):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1_000_000))
    with Training(tmp_path) as training:
        training.iterate(2)
    assert "1 MiB of disk are free below" in capsys.readouterr().out
    monkeypatch.undo()
    with Training(tmp_path, name="b") as training:
        training.iterate(2)
    assert "of disk are free" not in capsys.readouterr().out


def test_a_restore_stops_at_the_limit_too(tmp_path):
    begun(tmp_path)
    with pytest.raises(LimitReached, match=r"step-0+20\.pt is saved"), Training(tmp_path) as training:
        tick = training.checkpoints._replay_tick
        tick(0.5)
        training.run.clock.dollars_per_hour, training.run.clock.max_cost = 3600.0, LEAVING / 2
        tick(0.5)


@pytest.mark.parametrize("left", [50, 200])
def test_an_iteration_that_could_not_be_paid_to_its_end_is_not_begun(tmp_path, left):
    with Training(tmp_path) as training:
        training.iterate(2)
        checkpoints, clock = training.checkpoints, training.run.clock
        clock.dollars_per_hour = 3600.0
        clock.max_cost = clock.dollars() + left
        checkpoints._boundary_at = time.perf_counter() - 100  # what the last one took
        with pytest.raises(LimitReached) if left < 100 else contextlib.nullcontext():
            checkpoints.boundary()


def test_a_file_that_is_no_checkpoint_is_called_that_and_not_a_wrong_checksum(tmp_path):
    weights = tmp_path / "agent.pt"
    torch.save({}, weights)
    words = tmp_path / "README.md"
    words.write_text("# words\n" * 50)
    for path in (weights, words):
        with pytest.raises(UsageError, match="it is no checkpoint"), Training(tmp_path, resume=str(path)):
            pass


def test_an_end_that_cannot_be_saved_is_an_error(tmp_path):
    with FullDisk(200_000_000), Training(tmp_path) as training:
        training.iterate(2)
        with FullDisk(200_000), pytest.raises(SaveError, match=r"cannot save the end into .*: File too large"):
            training.checkpoints.finish()
    assert names(tmp_path) == ["step-000000000000.pt"]


def test_a_first_boundary_that_cannot_be_saved_leaves_nothing(tmp_path):
    training = Training(tmp_path)
    with FullDisk(200_000), pytest.raises(UsageError, match="cannot save a checkpoint into"), training:
        training.iterate()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_never_replace_good_ones(tmp_path, value):
    error = pytest.raises(FloatingPointError, match="net is not finite at step 20")
    with error, Training(tmp_path, **EVERY_BOUNDARY) as training:
        training.iterate(2)
        before = contents(tmp_path / "a" / "checkpoints")
        with torch.no_grad():
            training.net.weight[0, 0] = value
        training.iterate(1)
    assert contents(tmp_path / "a" / "checkpoints") == before


def test_an_error_in_the_loop_names_the_last_good_checkpoint(tmp_path, capsys):
    with pytest.raises(RuntimeError, match="out of memory"), Training(tmp_path, **EVERY_BOUNDARY) as training:
        training.iterate(3)
        raise RuntimeError("CUDA out of memory")
    last = tmp_path / "a" / "checkpoints" / "step-000000000020.pt"
    assert f"failed at step 30: {last} is good, the same command goes on from there" in capsys.readouterr().out
    assert json.loads((tmp_path / "a" / "status.json").read_text())["phase"] == "failed"


# ---- --resume PATH


@pytest.mark.parametrize("what", ["checkpoint", "run folder", "folder of checkpoints"])
def test_another_run_begins_from_a_path_and_goes_on_by_itself(tmp_path, what, capsys):
    newest = begun(tmp_path)[0]
    path = {"checkpoint": newest, "run folder": newest.parent.parent, "folder of checkpoints": newest.parent}[what]
    before = contents(tmp_path / "a")
    flags = {"name": "b", "resume": str(path), "total_timesteps": 500, **EVERY_BOUNDARY}
    with Training(tmp_path, **flags) as training:
        assert training.weight() == 2.0
        training.iterate(3)
    out = capsys.readouterr().out
    assert "--total-timesteps 500 from here on, 1000000 before" in out
    assert "is lost" not in out
    with Training(tmp_path, **flags) as training:  # the same command after an interruption
        assert training.weight() == 4.0
    assert contents(tmp_path / "a") == before


def test_a_folder_of_another_run_is_not_overwritten_from_a_path(tmp_path):
    newest = begun(tmp_path)[0]
    with Training(tmp_path, name="b") as training:
        training.iterate()
    with pytest.raises(UsageError, match="was not begun from it"), Training(tmp_path, name="b", resume=str(newest)):
        pass


REFUSED = {
    "another seed": ({"seed": 2}, "script", "--seed 2: .* has 1, which can't be changed on the way"),
    "another environment": ({"env_id": "x"}, "script", "--env-id x: "),
    "fewer steps than there are": ({"total_timesteps": 20}, "script", "--total-timesteps 20: .* is at step 20"),
    "another script": ({}, "other", "is a checkpoint of script.py, not of other.py"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_carried_over_is_refused_and_leaves_nothing(tmp_path, case):
    newest = begun(tmp_path)[0]
    flags, script, words = REFUSED[case]
    with pytest.raises(UsageError, match=words), Training(tmp_path, "b", script, resume=str(newest), **flags):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("content", [b"", b"hello", None])
def test_a_path_that_is_no_checkpoint_is_refused_and_leaves_nothing(tmp_path, content):
    path = tmp_path / "file.pt"
    if content is None:
        torch.save({"weights": torch.zeros(3)}, path)
    else:
        path.write_bytes(content)
    with pytest.raises(UsageError, match=f"--resume {path}: "), Training(tmp_path, resume=str(path)):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["file.pt"]


@pytest.mark.parametrize(
    ("path", "words"),
    [("nowhere.pt", "no checkpoint there"), ("a" * 300, "no checkpoint there"), ("", "must be auto, never, or")],
)
def test_a_path_that_is_not_there_is_refused(tmp_path, path, words):
    with pytest.raises(UsageError, match=words), Training(tmp_path, resume=path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_run_begun_from_a_path_goes_on_when_the_path_is_gone_or_the_runs_have_moved(tmp_path):
    begun(tmp_path / "there")
    (tmp_path / "link").symlink_to("there")
    flags = {"name": "b", "resume": str(tmp_path / "link" / "a"), **EVERY_BOUNDARY}
    with Training(tmp_path / "there", **flags) as training:
        training.iterate(3)
    shutil.rmtree(tmp_path / "there" / "a")
    (tmp_path / "there").rename(tmp_path / "elsewhere")
    with Training(tmp_path / "elsewhere", **flags) as training:
        assert training.weight() == 4.0


def test_a_fallback_within_a_path_is_said_and_leaves_it_alone(tmp_path, capsys):
    newest = begun(tmp_path)[0]
    newest.write_bytes(b"")
    before = contents(tmp_path / "a")
    with Training(tmp_path, "b", resume=str(tmp_path / "a")) as training:
        assert training.weight() == 1.0
    assert f"{newest} is damaged (it is no checkpoint, or no whole one): going on from" in capsys.readouterr().out
    assert contents(tmp_path / "a") == before


def test_a_checkpoint_of_another_network_is_refused_in_one_line(tmp_path):
    newest = begun(tmp_path)[0]
    net = nn.Linear(2, 2, bias=False)
    with pytest.raises(UsageError, match=r"its net does not fit this program: .*size mismatch"):  # noqa: SIM117
        with Training(tmp_path, "b", net=net, resume=str(newest)):
            pass
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_another_machine_or_precision_is_said_aloud(tmp_path, capsys):
    begun(tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        with Training(tmp_path, config={"amp_dtype": "torch.bfloat16"}):
            pass
    finally:
        torch.set_num_threads(threads)
    out = capsys.readouterr().out
    assert f"torch_threads {threads + 1} instead of {threads}; amp_dtype torch.bfloat16 instead of torch.float32" in out
    assert "the learner is exact, but no longer bit for bit an undisturbed run's" in out


class Slow:
    """An owner whose restore takes four steps; in the second one something may happen."""

    def __init__(self, happens) -> None:
        self.replay_tick = lambda share: None
        self.happens = happens

    def state_dict(self) -> dict:
        return {}

    def load_state_dict(self, state: dict) -> None:
        for number in range(1, 5):
            if number == 2:
                self.happens()
            self.replay_tick(number / 4)


class Killed(SystemError):
    """Stands for SIGKILL: the run's files stay as they are at that moment."""


def die() -> None:
    raise Killed


def restore(tmp_path, happens=lambda: None) -> Training:
    """One process of a run with a slow restore, and its first iteration. Returns what it was."""
    training = Training(tmp_path, checkpoint_minutes=1.0)
    state = {"progress": training.run.progress, "net": training.net, "slow": Slow(happens), "rng": Rng(1, CPU)}
    if happens in ("SIGTERM", "Google's notice"):
        state["slow"].happens = lambda: training.signals.ask(happens)
    training.run.__enter__()
    try:
        training.checkpoints = Checkpoints(
            training.run, state | {"clock": training.run.clock, "events": training.run.events}, training.signals
        )
        training.iterate(1)
        training.run.set_phase("update")
        training.__exit__(None, None, None)
    except Killed:
        training.run.write_status()  # the last heartbeat
        training.run.events.close()
        os.close(training.run._lock)
        training.signals.__exit__(None, None, None)
    except BaseException as error:
        training.__exit__(type(error), error, None)
        raise
    return training


def test_a_run_that_is_killed_faster_than_it_restores_says_so_and_stops(tmp_path, capsys):
    restore(tmp_path)
    for count in range(5):
        assert restore(tmp_path, die).run.cut_restores["count"] == count
    capsys.readouterr()
    with pytest.raises(LimitReached, match=r"the last 5 processes were ended while they restored .*000.pt, which"):
        restore(tmp_path)
    assert "it needs a machine that lives longer, where the same command goes on" in capsys.readouterr().out
    assert json.loads((tmp_path / "a" / "status.json").read_text())["phase"] == "limit"
    # by hand it tries again, and when it gets through all is forgotten
    restore(tmp_path, die)
    assert restore(tmp_path).run.cut_restores["count"] == 0
    assert json.loads((tmp_path / "a" / "status.json").read_text())["cut_restores"]["count"] == 0


def test_a_restore_that_fails_by_itself_was_not_cut_short(tmp_path):
    restore(tmp_path)

    def fail() -> None:
        raise ValueError("another program's")

    for _ in range(6):
        with pytest.raises(UsageError, match="its slow does not fit"):
            restore(tmp_path, fail)
    assert restore(tmp_path).run.cut_restores["count"] == 0


@pytest.mark.parametrize(("reason", "counts"), [("SIGTERM", True), ("Google's notice", False)])
def test_a_signal_cuts_a_restore_short_and_a_clouds_notice_says_nothing_of_later_machines(tmp_path, reason, counts):
    restore(tmp_path)
    for _ in range(5):
        with pytest.raises(Interrupted, match="while restoring"):
            restore(tmp_path, reason)
    if counts:
        with pytest.raises(LimitReached, match="the last 5 processes"):
            restore(tmp_path)
    else:
        assert restore(tmp_path).run.cut_restores["count"] == 0


def test_the_time_of_a_whole_restore_is_guessed_from_the_share_that_was_done(tmp_path):
    with Training(tmp_path) as training:
        training.iterate(1)
    status = json.loads((tmp_path / "a" / "status.json").read_text())
    status |= {"restore": {"seconds": 30.0, "share": 0.25}, "cut_restores": {"count": 1, "seconds": 100.0}}
    (tmp_path / "a" / "status.json").write_text(json.dumps(status))
    training = Training(tmp_path)
    assert training.run.cut_restores == {"count": 2, "seconds": 120.0}
    training.__exit__(None, None, None)


def test_processes_that_are_killed_before_they_save_leave_the_next_one_less_time(tmp_path, capsys):
    def killed(steps: int) -> Training:
        training = Training(tmp_path, checkpoint_minutes=1.0).__enter__()
        training.iterate(steps)
        training.run.write_status()
        training.run.events.close()
        os.close(training.run._lock)
        training.signals.__exit__(None, None, None)
        return training

    assert [killed(3).run.barren for _ in range(4)] == [0, 0, 1, 2]  # the first one saved the start
    training = killed(0)
    assert training.run.barren == 3
    assert "the last 3 processes of this run saved nothing new" in capsys.readouterr().out
    training.checkpoints._saved_at = time.perf_counter() - 8.0  # an eighth of a minute
    assert training.checkpoints._is_due()
    training.checkpoints._saved_at = time.perf_counter() - 7.0
    assert not training.checkpoints._is_due()
    with Training(tmp_path, checkpoint_minutes=1e-9) as training:
        training.iterate(2)
        assert training.run.barren == 0
