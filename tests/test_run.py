"""The run folder: lock, name, heartbeat, speed, and a terminal that goes away."""

import json
import os
import resource
import signal
import subprocess
import sys
import time

import pytest
from conftest import ROOT, read_scalars
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import common.run
import ppo_atari
from common.args import SharedArgs, default_run_name
from common.cost import Clock
from common.errors import UsageError
from common.files import replacing, write_json
from common.mirror import Mirror
from common.run import Run, Terminal, duration, hyperparameters

CONFIG = {"args": {"seed": 1}, "device": "cpu", "amp_dtype": "torch.float32"}


def claim_run(runs_dir, name: str = "a", total_timesteps: int = 1000, **flags) -> Run:
    args = SharedArgs(runs_dir=str(runs_dir), **flags)
    return Run(
        args,
        Clock(args, "script"),
        Mirror(None, name, None),
        "script",
        name,
        total_timesteps,
        {**CONFIG, "args": vars(args)},
    )


def make_run(runs_dir, **kwargs) -> Run:
    run = claim_run(runs_dir, **kwargs)
    run.start()
    run.ready()
    return run


def log_iteration(run: Run, global_step: int) -> None:
    run.progress.global_step = global_step
    run.log_iteration({})


def episode(*games):
    """A step's info with the given (return, length), None for a game that goes on."""
    return {
        "_episode": [game is not None for game in games],
        "episode": {"r": [game and game[0] for game in games], "l": [game and game[1] for game in games]},
    }


def test_an_existing_folder_is_refused_and_left_alone(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "mine").write_text("precious")
    with pytest.raises(UsageError, match=r"is there already and no run's: .*--run-name"):
        make_run(tmp_path)
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["mine"]
    assert (tmp_path / "a" / "mine").read_text() == "precious"


def test_a_finished_run_says_so_and_is_left_alone(tmp_path, capsys):
    with make_run(tmp_path) as run:
        run.finish()
    before = {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir() if path.name != ".lock"}
    with claim_run(tmp_path) as run:
        assert run.complete
        assert run.summary()["global_step"] == 0
    assert {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir() if path.name != ".lock"} == before
    assert "complete already: " in capsys.readouterr().out


@pytest.mark.parametrize("damage", ["", "[1", "null", '{"seconds": "x", "args": 3, "last_checkpoint": null}'])
def test_damaged_json_is_no_obstacle(tmp_path, damage):
    with write_points(tmp_path, 8):
        pass
    for name in ("status.json", "config.json"):
        (tmp_path / "a" / name).write_text(damage)
    (tmp_path / "a" / "events.out.tfevents.backup").write_text("x")
    with write_points(tmp_path, 8, 16):
        pass


def test_a_folder_copied_without_its_lock_is_a_run(tmp_path):
    with make_run(tmp_path):
        pass
    (tmp_path / "a" / ".lock").unlink()
    with make_run(tmp_path):
        pass


def test_resume_never_sets_the_old_folder_aside(tmp_path, capsys):
    for number in range(3):
        with make_run(tmp_path, resume="never") as run:
            run.progress.global_step = number
            run.finish()
    steps = {path.name: json.loads((path / "summary.json").read_text())["global_step"] for path in tmp_path.iterdir()}
    assert steps == {"a.old-1": 0, "a.old-2": 1, "a": 2}
    assert f"the old one is now {tmp_path / 'a.old-2'}" in capsys.readouterr().out


def test_a_run_in_use_is_not_set_aside(tmp_path):
    with make_run(tmp_path), pytest.raises(UsageError, match="is in use by process"):
        claim_run(tmp_path, resume="never")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize(("flags", "words"), [({"seed": 2}, "--seed 2: "), ({"amp": True}, "--amp True: ")])
def test_a_given_name_with_other_flags_than_the_folders_is_refused(tmp_path, flags, words):
    with make_run(tmp_path):
        pass
    before = (tmp_path / "a" / "config.json").read_bytes()
    with pytest.raises(UsageError, match=words + r".* choose another --run-name"):
        claim_run(tmp_path, **flags)
    assert (tmp_path / "a" / "config.json").read_bytes() == before
    with claim_run(tmp_path, device="cpu", checkpoint_minutes=1.0):  # these don't change the result
        pass


def test_a_failure_at_the_start_leaves_no_folder_and_no_lock(tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(common.run, "write_json", full)
        with pytest.raises(UsageError, match="No space left on device"), claim_run(tmp_path) as run:
            run.start()
    assert not (tmp_path / "a").exists()
    with make_run(tmp_path):
        pass


def test_a_file_system_without_locks_is_said_to_be_one(tmp_path, monkeypatch):
    def unsupported(*args):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(common.run.fcntl, "flock", unsupported)
    with pytest.raises(UsageError, match=r"no locks on the file system .*: Operation not supported"):
        make_run(tmp_path)
    assert not (tmp_path / "a").exists()


def test_a_finished_run_outlives_a_file_system_that_lost_its_locks(tmp_path, monkeypatch):
    with make_run(tmp_path) as run:
        run.finish()
    before = {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()}

    def unsupported(*args):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(common.run.fcntl, "flock", unsupported)
    with pytest.raises(UsageError, match="no locks on the file system"):
        make_run(tmp_path)
    assert {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()} == before


@pytest.mark.slow
def test_of_many_starts_at_once_exactly_one_gets_the_folder(tmp_path):
    code = HOLDER.format(root=str(ROOT), runs=str(tmp_path))
    starts = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    try:
        # the losers end by themselves, the winner waits for the end of its input
        deadline = time.monotonic() + 120
        while sum(start.poll() is not None for start in starts) < 3 and time.monotonic() < deadline:
            time.sleep(0.05)
        held = [start for start in starts if start.poll() is None]
        assert len(held) == 1
        for start in starts:
            if start not in held:
                assert "is in use by" in start.communicate()[1].splitlines()[-1]
        assert held[0].communicate("")[0].endswith("held\n")
    finally:
        for start in starts:
            start.kill()
            start.wait()


HOLDER = """
import sys; sys.path.insert(0, {root!r})
from common.args import SharedArgs
from common.cost import Clock
from common.mirror import Mirror
from common.run import Run
args = SharedArgs(runs_dir={runs!r})
config = {{"device": "cpu", "amp_dtype": "", "args": {{}}}}
with Run(args, Clock(args, "script"), Mirror(None, "a", None), "script", "a", 100, config) as run:
    run.start()
    run.ready()
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_process_is_told_which_one_holds_the_folder(tmp_path):
    code = HOLDER.format(root=str(ROOT), runs=str(tmp_path))
    holder = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline().startswith("run ")
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(UsageError, match=f"in use by process {holder.pid}$"):
            make_run(tmp_path, total_timesteps=100)
        holder.send_signal(signal.SIGKILL)
        holder.wait(10)
        with make_run(tmp_path, total_timesteps=100):  # the kernel released a dead owner's lock
            pass
    finally:
        holder.kill()
        holder.communicate()


def test_status_names_the_phase_at_once_and_a_failure(tmp_path):
    def status():
        return json.loads((tmp_path / "a" / "status.json").read_text())

    run = make_run(tmp_path, total_timesteps=100)
    assert status()["phase"] == "start"
    run.set_phase("rollout")
    assert status()["phase"] == "rollout"
    assert status()["pid"] == os.getpid()
    with pytest.raises(RuntimeError, match="lost"), run:
        raise RuntimeError("lost")
    assert status()["phase"] == "failed"


def test_speed_leaves_the_warm_up_out_and_counts_this_process_only(tmp_path, monkeypatch):
    clock = [1000.0]
    monkeypatch.setattr(common.run.time, "perf_counter", lambda: clock[0])
    with make_run(tmp_path) as run:
        assert run.seconds_left() is None
        clock[0] += 50.0  # a slow first iteration
        log_iteration(run, 100)
        assert run.sps == pytest.approx(2.0)  # nothing else is known yet
        clock[0] += 10.0
        log_iteration(run, 200)
        assert run.sps == pytest.approx(10.0)
        clock[0] += 7.0  # in the middle of an iteration the speed is the last one known
        run.progress.global_step = 290
        run.tick()
        assert run.seconds_left() == pytest.approx(71.0)
        clock[0] += 3.0
        log_iteration(run, 300)
    assert read_scalars(tmp_path / "a", timed=True)["charts/SPS"] == [(100, 2.0), (200, 10.0), (300, 10.0)]


def test_the_heartbeat_goes_on_within_a_long_iteration(tmp_path, monkeypatch):
    clock = [1000.0]
    monkeypatch.setattr(common.run.time, "perf_counter", lambda: clock[0])
    with make_run(tmp_path) as run:
        for step in range(1, 20):
            clock[0] += 1.0
            run.progress.global_step = step
            run.tick()
            status = json.loads((tmp_path / "a" / "status.json").read_text())
            assert step - status["global_step"] < common.run.HEARTBEAT


def test_a_heartbeat_that_cannot_be_written_does_not_end_the_run(tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    with make_run(tmp_path) as run:
        monkeypatch.setattr(common.run.os, "replace", full)
        run.set_phase("rollout")


def test_shares_of_time_add_up_to_one(tmp_path):
    with make_run(tmp_path) as run:
        for part in ("inference", "environment", "learning"):
            time.sleep(0.01)
            run.lap(part)
        log_iteration(run, 100)
    scalars = read_scalars(tmp_path / "a", timed=True)
    assert sum(scalars[f"time/{part}"][0][1] for part in ("inference", "environment", "learning")) == pytest.approx(1)


def test_whole_games_are_logged_where_they_ended(tmp_path):
    with make_run(tmp_path) as run:
        run.log_episodes({})
        run.progress.global_step = 16
        run.log_episodes(episode(None, (7.0, 33), None, (9.0, 44)))
        assert run.progress.games == 2
        assert run.mean_return() == 8.0
    scalars = read_scalars(tmp_path / "a")
    assert scalars["charts/episodic_return"] == [(16, 7.0), (16, 9.0)]
    assert scalars["charts/episodic_length"] == [(16, 33.0), (16, 44.0)]


def test_stopping_at_a_return_wants_a_hundred_games(tmp_path):
    with make_run(tmp_path) as run:
        for _ in range(99):
            run.log_episodes(episode((50.0, 9)))
        assert not run.reached(50.0)
        run.log_episodes(episode((50.0, 9)))
        assert run.reached(50.0)
        assert not run.reached(50.1)
        assert not run.reached(None)


def test_a_summary_is_written_and_returned(tmp_path):
    with make_run(tmp_path, total_timesteps=100) as run:
        run.progress.updates = 3
        run.progress.global_step = 100
        run.log_iteration({"losses/entropy": 0.5})
        summary = run.finish()
    assert json.loads((tmp_path / "a" / "summary.json").read_text()) == summary
    assert summary["updates"] == 3
    assert summary["losses/entropy"] == 0.5
    assert summary["global_step"] == 100
    assert 10 < summary["peak_memory_mib"] < 100_000
    assert json.loads((tmp_path / "a" / "status.json").read_text())["phase"] == "complete"


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "status.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    with pytest.raises(OSError, match="full"), replacing(path):
        raise OSError("full")
    assert json.loads(path.read_text()) == {"a": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]


class Hung:
    """A terminal behind a dropped connection: each write raises EIO."""

    writes = 0

    def isatty(self):
        return True

    def write(self, text):
        self.writes += 1
        raise OSError(5, "Input/output error")

    def flush(self):
        pass


@pytest.mark.parametrize("stdout", [Hung(), None])
def test_a_terminal_that_goes_away_is_no_error(monkeypatch, stdout):
    monkeypatch.setattr(sys, "stdout", stdout)
    terminal = Terminal()
    terminal.line("run")
    terminal.progress("step 1")
    terminal.end_progress()
    assert stdout is None or stdout.writes == 1


def test_a_terminal_gets_one_updating_line(monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    terminal = Terminal()
    terminal.line("run")
    terminal.progress("step 1")
    terminal.progress("step 2")
    terminal.line("complete")
    assert capsys.readouterr().out == "run\n\r\x1b[Kstep 1\r\x1b[Kstep 2\ncomplete\n"


def test_a_progress_line_never_wraps(monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "20")
    Terminal().progress("x" * 50)
    assert capsys.readouterr().out == "\r\x1b[K" + "x" * 19


def test_numbers_that_json_has_not_become_null(tmp_path):
    write_json(tmp_path / "a.json", {"a": float("nan"), "b": float("inf"), "c": 1.5})
    assert json.loads((tmp_path / "a.json").read_text()) == {"a": None, "b": None, "c": 1.5}


@pytest.mark.slow
def test_peak_memory_is_this_processs_own():
    ballast = bytearray(300 * 2**20)
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import common.run; print(common.run.peak_memory_mib())"
    child = float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    assert common.run.peak_memory_mib() > 300 + 50
    assert child < common.run.peak_memory_mib() - 100
    del ballast


def test_duration():
    assert [duration(s) for s in (0, 61.9, 3600 * 30 + 59)] == ["0:00:00", "0:01:01", "30:00:59"]


def test_the_same_command_is_the_same_run_and_changed_hyperparameters_another():
    def name(**flags):
        return default_run_name(SharedArgs(env_id="ALE/Pong-v5", **flags), "ppo_atari")

    assert name() == "ALE-Pong-v5__ppo_atari__1"
    assert name(seed=3) == "ALE-Pong-v5__ppo_atari__3"
    assert name(device="cpu", runs_dir="elsewhere") == name()
    assert name(amp=True) == name(amp=True) != name()
    assert len({name(amp=True), name(total_timesteps=5), name(amp=True, total_timesteps=5), name(tf32=False)}) == 4


# ---- curves over several processes


def write_points(tmp_path, *steps: int, resume_at: int | None = None) -> Run:
    """One process of a run that logs its step as a scalar, and two games at each step."""
    run = claim_run(tmp_path)
    run.start(resumed_from=None if resume_at is None else "somewhere")
    run.progress.global_step = resume_at or 0
    run.ready()
    for step in steps:
        run.progress.global_step = step
        run.log_episodes(episode((1.0 * step, 1), (2.0 * step, 1)))
        run.log_iteration({"losses/entropy": 3.0 * step})
    return run


def expected(*steps: int) -> dict:
    games = [(step, value) for step in steps for value in (1.0 * step, 2.0 * step)]
    return {
        "charts/episodic_return": games,
        "charts/episodic_length": [(step, 1.0) for step, _ in games],
        "losses/entropy": [(step, 3.0 * step) for step in steps],
    }


def test_curves_of_a_run_in_pieces_equal_those_of_one_piece(tmp_path):
    for steps, resume_at in (((8, 16, 24), None), ((16, 24, 32), 8), ((32, 40), 24), ((32, 40, 48), 24)):
        with write_points(tmp_path, *steps, resume_at=resume_at):
            pass
    assert len(list((tmp_path / "a").glob("events*"))) == 4
    assert read_scalars(tmp_path / "a") == expected(8, 16, 24, 32, 40, 48)


def test_a_run_killed_before_its_first_checkpoint_leaves_no_points(tmp_path):
    with write_points(tmp_path, 8, 16):
        pass
    with write_points(tmp_path, 8):
        pass
    assert read_scalars(tmp_path / "a") == expected(8)


def test_the_half_record_of_a_killed_process_hides_nothing(tmp_path):
    with write_points(tmp_path, 8, 16, 24):
        pass
    (events,) = (tmp_path / "a").glob("events*")
    events.write_bytes(events.read_bytes()[:-5])
    with write_points(tmp_path, 24, resume_at=16):
        pass
    assert read_scalars(tmp_path / "a") == expected(8, 16, 24)


def test_curves_are_right_although_the_next_machines_clock_is_behind(tmp_path, monkeypatch):
    for ahead, steps, resume_at in ((5000, (8, 16, 24), None), (0, (16, 24, 32), 8), (0, (24, 32), 16)):
        monkeypatch.setattr(common.run.time, "time", lambda ahead=ahead: 1_700_000_000 + ahead)
        with write_points(tmp_path, *steps, resume_at=resume_at):
            pass
    assert read_scalars(tmp_path / "a") == expected(8, 16, 24, 32)


def test_points_that_a_full_disk_refused_are_written_when_there_is_room_again(tmp_path, capsys):
    with write_points(tmp_path, 8) as run:
        size = max(path.stat().st_size for path in (tmp_path / "a").iterdir())
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, before[1]))
        try:
            for step in (16, 24):
                run.progress.global_step = step
                run.log_episodes(episode((1.0 * step, 1), (2.0 * step, 1)))
                run.log_iteration({"losses/entropy": 3.0 * step})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert "cannot write curves (File too large)" in capsys.readouterr().out
    assert read_scalars(tmp_path / "a") == expected(8, 16, 24)


def test_a_lost_tail_of_the_curves_is_said(tmp_path):
    with write_points(tmp_path, 8) as run:
        position = run.events.state_dict()
    (tmp_path / "a" / position["file"]).write_bytes(b"")
    with make_run(tmp_path) as run:
        run.events.load_state_dict(position)
        assert "is lost: 0 of" in run.events.restore_note


def test_tensorboards_text_page_shows_changed_flags_first_with_their_defaults(tmp_path):
    with make_run(tmp_path, seed=7, mirror=None, run_name="a", max_cost=2.0, price_per_hour=1.0):
        pass
    events = EventAccumulator(str(tmp_path / "a"))
    events.Reload()
    (event,) = events.Tensors("hyperparameters/text_summary")
    table = event.tensor_proto.string_val[0].decode().splitlines()
    assert table[:2] == ["|flag|value|default|", "|-|-|-|"]
    assert table[2:7] == [
        "|seed|7|1|",
        "|price_per_hour|1.0|None|",
        "|max_cost|2.0|None|",
        "|run_name|a|None|",
        f"|runs_dir|{tmp_path}|runs|",
    ]
    assert table[7] == "|env_id|||"
    assert "|total_timesteps|1000000||" in table
    assert len(table) == 2 + len(vars(SharedArgs()))
    rows = hyperparameters(ppo_atari.Args(seed=7, num_envs=4)).splitlines()
    assert rows[2:4] == ["|num_envs|4|8|", "|seed|7|1|"]
    assert rows[4:7] == ["|env_id|BreakoutNoFrameskip-v4||", "|total_timesteps|10000000||", "|learning_rate|0.00025||"]
    assert rows[-1] == "|runs_dir|runs||"
    assert "|mirror|a&#124;b|None|" in hyperparameters(SharedArgs(mirror="a|b"))
