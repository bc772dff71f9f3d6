"""The run folder: lock, name, heartbeat, speed, and a terminal that goes away."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from conftest import ROOT, read_scalars

import common.run
from common.args import SharedArgs, default_run_name
from common.errors import UsageError
from common.run import Run, Terminal, duration, write_json

CONFIG = {"args": {"seed": 1}}
CPU = torch.device("cpu")


def make_run(runs_dir, name: str = "a", total_timesteps: int = 1000) -> Run:
    return Run(str(runs_dir), name, total_timesteps, CONFIG, CPU)


def episode(*games):
    """A step's info with the given (return, length), None for a game that goes on."""
    return {
        "_episode": [game is not None for game in games],
        "episode": {"r": [game and game[0] for game in games], "l": [game and game[1] for game in games]},
    }


def test_an_existing_folder_is_refused_and_left_alone(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "mine").write_text("precious")
    with pytest.raises(UsageError, match=r"is there already: .*--run-name"):
        make_run(tmp_path)
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["mine"]
    assert (tmp_path / "a" / "mine").read_text() == "precious"


def test_a_finished_run_is_refused_and_left_alone(tmp_path):
    with make_run(tmp_path) as run:
        run.finish({})
    before = {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    with pytest.raises(UsageError, match="is there already"):
        make_run(tmp_path)
    assert {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()} == before


def test_a_failure_at_the_start_leaves_no_folder_and_no_lock(tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(common.run, "write_json", full)
        with pytest.raises(UsageError, match="No space left on device"):
            make_run(tmp_path)
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
        run.finish({})
    before = {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()}

    def unsupported(*args):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(common.run.fcntl, "flock", unsupported)
    with pytest.raises(UsageError, match="no locks on the file system"):
        make_run(tmp_path)
    assert {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()} == before


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
import torch
from common.run import Run
with Run({runs!r}, "a", 100, {{"args": {{}}}}, torch.device("cpu")):
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
        with pytest.raises(UsageError, match="is there already"):  # the kernel released a dead owner's lock
            make_run(tmp_path, total_timesteps=100)
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
        run.log_iteration({}, 100)
        assert run.sps == pytest.approx(2.0)  # nothing else is known yet
        clock[0] += 10.0
        run.log_iteration({}, 200)
        assert run.sps == pytest.approx(10.0)
        clock[0] += 7.0  # in the middle of an iteration the speed is the last one known
        run.tick(290)
        assert run.seconds_left() == pytest.approx(71.0)
        clock[0] += 3.0
        run.log_iteration({}, 300)
    assert read_scalars(tmp_path / "a", timed=True)["charts/SPS"] == [(100, 2.0), (200, 10.0), (300, 10.0)]


def test_the_heartbeat_goes_on_within_a_long_iteration(tmp_path, monkeypatch):
    clock = [1000.0]
    monkeypatch.setattr(common.run.time, "perf_counter", lambda: clock[0])
    with make_run(tmp_path) as run:
        for step in range(1, 20):
            clock[0] += 1.0
            run.tick(step)
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
        run.log_iteration({}, 100)
    scalars = read_scalars(tmp_path / "a", timed=True)
    assert sum(scalars[f"time/{part}"][0][1] for part in ("inference", "environment", "learning")) == pytest.approx(1)


def test_whole_games_are_logged_where_they_ended(tmp_path):
    with make_run(tmp_path) as run:
        run.log_episodes({}, 8)
        run.log_episodes(episode(None, (7.0, 33), None, (9.0, 44)), 16)
        assert run.games == 2
        assert run.mean_return() == 8.0
    scalars = read_scalars(tmp_path / "a")
    assert scalars["charts/episodic_return"] == [(16, 7.0), (16, 9.0)]
    assert scalars["charts/episodic_length"] == [(16, 33.0), (16, 44.0)]


def test_stopping_at_a_return_wants_a_hundred_games(tmp_path):
    with make_run(tmp_path) as run:
        for _ in range(99):
            run.log_episodes(episode((50.0, 9)), 8)
        assert not run.reached(50.0)
        run.log_episodes(episode((50.0, 9)), 8)
        assert run.reached(50.0)
        assert not run.reached(50.1)
        assert not run.reached(None)


def test_a_summary_is_written_and_returned(tmp_path):
    with make_run(tmp_path, total_timesteps=100) as run:
        run.log_iteration({}, 100)
        summary = run.finish({"updates": 3})
    assert json.loads((tmp_path / "a" / "summary.json").read_text()) == summary
    assert summary["updates"] == 3
    assert summary["global_step"] == 100
    assert 10 < summary["peak_memory_mib"] < 100_000
    assert json.loads((tmp_path / "a" / "status.json").read_text())["phase"] == "complete"


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "status.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    with pytest.raises(OSError, match="full"), common.run.replacing(path):
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
