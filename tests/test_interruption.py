"""The promise: ppo_atari.py interrupted anywhere ends as if it had not been."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from conftest import ROOT, run_script

import drill
import ppo_atari
from common.errors import Interrupted, SaveError, UsageError
from common.preemption import StopSignals
from ppo_atari import Args

SMALL = {"num_envs": 4, "num_steps": 16, "num_minibatches": 2, "update_epochs": 2, "total_timesteps": 320}
LOOKS = 16 + 2 * 2 * 2  # how often an iteration looks for a signal, the boundary apart


def train(tmp_path, name: str, **flags) -> dict:
    return ppo_atari.train(Args(runs_dir=str(tmp_path), run_name=name, **{**SMALL, **flags}))


def interrupt_at(monkeypatch, look: int | None) -> None:
    """Let a signal arrive before a process looks for one for the `look`-th time."""

    class Asking(StopSignals):
        looks = 0

        @property
        def asked(self):
            self.looks += 1
            return "the test" if look is not None and self.looks >= look else None

    monkeypatch.setattr(ppo_atari, "StopSignals", Asking)


def train_in_pieces(tmp_path, monkeypatch, name: str, looks: list[int], **flags) -> list[str]:
    """Interrupt a run once for each number, then let it complete. Returns the phases in which it was interrupted."""
    phases = []
    real = ppo_atari.Run.set_phase

    def noting(run, phase):
        if phase == "interrupted":
            phases.append(before[0])
        elif phase != "save":
            before[0] = phase
        real(run, phase)

    for look in looks:
        before = ["restore"]
        interrupt_at(monkeypatch, look)
        with monkeypatch.context() as patch:
            patch.setattr(ppo_atari.Run, "set_phase", noting)
            with pytest.raises(Interrupted):
                train(tmp_path, name, **flags)
    interrupt_at(monkeypatch, None)
    train(tmp_path, name, **flags)
    return phases


KINDS = {
    "Breakout": {},
    "sticky actions": {"env_id": "ALE/Breakout-v5"},
    "fp16 with loss scaling": {"amp": True, "amp_dtype": "fp16"},
    "early stopping": {"target_kl": 1e-4, "learning_rate": 0.01},
}


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[] if kind == "Breakout" else [pytest.mark.slow]) for kind in KINDS],
)
def test_interrupted_at_many_places_it_ends_bit_for_bit_as_undisturbed(tmp_path, monkeypatch, kind):
    train(tmp_path, "whole", **KINDS[kind])
    looks = [5, LOOKS, LOOKS - 1, LOOKS + 2, 2, 3 * LOOKS - 3]
    phases = train_in_pieces(tmp_path, monkeypatch, "pieces", looks, **KINDS[kind])
    if kind == "Breakout":
        # the fourth at a boundary, when the phase still has its name from before
        assert phases == ["rollout", "update", "update", "update", "restore", "rollout"]
    assert drill.compare(tmp_path / "whole", tmp_path / "pieces") == []
    end = drill.final_checkpoint(tmp_path / "pieces")
    assert end.keys() == {"about", "progress", "agent", "optimizer", "amp", "envs", "rng"}
    if kind == "early stopping":
        assert end["progress"]["updates"] < 5 * 2 * 2
    if kind == "fp16 with loss scaling":
        assert end["amp"]["_growth_tracker"] == end["progress"]["updates"] > 0  # of all processes


@pytest.mark.slow
def test_games_that_end_and_restart_everywhere_are_no_obstacle(tmp_path, monkeypatch):
    real = ppo_atari.AtariEnvs
    monkeypatch.setattr(ppo_atari, "AtariEnvs", lambda *args: real(*args, max_num_frames_per_episode=20))
    flags = {"total_timesteps": 1280}
    train(tmp_path, "whole", **flags)
    train_in_pieces(tmp_path, monkeypatch, "pieces", [9 * LOOKS, 7 * LOOKS + 5], **flags)
    assert drill.compare(tmp_path / "whole", tmp_path / "pieces") == []
    assert json.loads((tmp_path / "pieces" / "summary.json").read_text())["games"] > 200


@pytest.mark.slow
def test_a_run_with_precision_switched_goes_on_and_says_so(tmp_path, monkeypatch, capsys):
    interrupt_at(monkeypatch, LOOKS + 5)
    for name, flags in (("fp16", {"amp": True, "amp_dtype": "fp16"}), ("fp32", {})):
        with pytest.raises(Interrupted):
            train(tmp_path, name, **flags)
    interrupt_at(monkeypatch, None)
    capsys.readouterr()
    summary = train(tmp_path, "to fp32".replace(" ", "-"), resume=str(tmp_path / "fp16"))
    assert summary["global_step"] == 320
    assert "--amp False from here on, True before" in capsys.readouterr().out
    train(tmp_path, "to-fp16", resume=str(tmp_path / "fp32"), amp=True, amp_dtype="fp16")
    assert "amp_dtype torch.float16 instead of torch.float32" in capsys.readouterr().out


@pytest.mark.slow
def test_a_longer_run_goes_on_from_a_complete_one(tmp_path, capsys):
    train(tmp_path, "short", total_timesteps=128)
    summary = train(tmp_path, "long", total_timesteps=256, resume=str(tmp_path / "short"))
    assert summary["global_step"] == 256
    assert "--total-timesteps 256 from here on, 128 before" in capsys.readouterr().out
    rates = drill.curves(tmp_path / "long")["charts/learning_rate"]
    assert rates == [(192, pytest.approx(2.5e-4 * 0.5)), (256, pytest.approx(2.5e-4 * 0.25))]


@pytest.mark.parametrize("flags", [{"num_envs": 2}, {"num_steps": 32}, {"env_id": "PongNoFrameskip-v4"}, {"seed": 2}])
def test_what_cannot_be_carried_over_is_refused_in_one_line(tmp_path, flags):
    train(tmp_path, "first", total_timesteps=64)
    with pytest.raises(UsageError, match="which can't be changed on the way"):
        train(tmp_path, "second", resume=str(tmp_path / "first"), **flags)
    assert [path.name for path in tmp_path.iterdir()] == ["first"]


def test_a_signal_reaches_a_run_in_a_thread(tmp_path):
    outcome = []

    def work():
        try:
            train(tmp_path, "thread", total_timesteps=640_000)
        except Interrupted as stop:
            outcome.append(str(stop))

    with ppo_atari.StopSignals():  # whoever owns the main thread
        thread = threading.Thread(target=work)
        thread.start()
        wait_for_phase(tmp_path / "thread", "update")
        os.kill(os.getpid(), signal.SIGTERM)
        thread.join(60)
    assert outcome
    assert outcome[0].startswith("interrupted by SIGTERM: ")


@pytest.mark.slow
def test_an_error_in_the_loop_names_the_last_good_checkpoint_and_the_run_goes_on(tmp_path, monkeypatch, capsys):
    real = ppo_atari.ppo_loss
    calls = []

    def out_of_memory(*args):
        calls.append(1)
        if len(calls) == 7:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(ppo_atari, "ppo_loss", out_of_memory)
        with pytest.raises(torch.OutOfMemoryError):
            train(tmp_path, "failed", checkpoint_minutes=1e-9)
    assert "checkpoints/step-000000000064.pt is good, the same command goes on from there" in capsys.readouterr().out
    train(tmp_path, "failed", checkpoint_minutes=1e-9)
    train(tmp_path, "whole")
    assert drill.compare(tmp_path / "whole", tmp_path / "failed") == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["agent.pt", "summary.json"])
def test_an_end_that_cannot_be_written_is_one_line_and_the_next_start_writes_it(tmp_path, monkeypatch, name):
    import common.files

    real = os.replace

    def full(source, target):
        if str(target).endswith(name):
            raise OSError(28, "No space left on device")
        real(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(common.files.os, "replace", full)
        with pytest.raises(SaveError, match=f"cannot write .*{name}.*No space left on device"):
            train(tmp_path, "a", total_timesteps=64)
    assert train(tmp_path, "a", total_timesteps=64)["global_step"] == 64
    assert (tmp_path / "a" / name).exists()


# ---- real processes


def wait_for_phase(run_dir, phase: str, seconds: float = 120) -> dict:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            status = json.loads((run_dir / "status.json").read_text())
        except (OSError, ValueError):
            status = {"phase": None}
        if status["phase"] == phase:
            return status
        time.sleep(0.01)
    raise AssertionError(f"never in phase {phase}, last {status}")


def start(tmp_path, *flags: str, **kwargs) -> subprocess.Popen:
    command = [sys.executable, str(ROOT / "ppo_atari.py"), "--run-name", "a", "--num-steps", "16", *flags]
    return subprocess.Popen(command, cwd=tmp_path, **kwargs)


def test_a_signal_ends_a_process_with_status_75_and_one_line(tmp_path):
    process = start(tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    wait_for_phase(tmp_path / "runs" / "a", "update")
    os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C reaches every process of a terminal
    sent = time.monotonic()
    while process.poll() is None:  # until it is gone, also while Python shuts down
        os.killpg(process.pid, signal.SIGTERM)
        time.sleep(0.002)
    assert time.monotonic() - sent < 5
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (75, "")
    (line,) = [line for line in out.splitlines() if line.startswith("interrupted")]
    saved = next((tmp_path / "runs" / "a" / "checkpoints").glob("step-*.pt"))
    # of two signals so close together the kernel may deliver the second one first, to another thread
    assert re.match(r"interrupted by SIG(INT|TERM): runs/a/checkpoints/step-", line)
    assert line.endswith(" is saved, the same command goes on from there")
    torch.load(saved, weights_only=True)


@pytest.mark.slow
def test_a_signal_during_the_imports_counts(tmp_path):
    process = start(tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    maps = f"/proc/{process.pid}/maps"
    while "libtorch" not in open(maps).read():  # noqa: SIM115
        time.sleep(0.001)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (75, "")
    assert "checkpoints/step-000000000000.pt is saved" in out


@pytest.mark.slow
def test_a_dropped_connection_is_a_stop_and_under_nohup_it_is_not(tmp_path):
    for nohup in (False, True):
        name = "nohup" if nohup else "plain"
        main, side = pty.openpty()
        handler = signal.SIG_IGN if nohup else signal.SIG_DFL  # whatever these tests run under
        prepare = lambda handler=handler: signal.signal(signal.SIGHUP, handler)  # noqa: E731
        flags = ["--total-timesteps", "768", "--run-name", name]
        process = start(
            tmp_path, *flags, stdin=side, stdout=side, stderr=side, start_new_session=True, preexec_fn=prepare
        )
        os.close(side)
        wait_for_phase(tmp_path / "runs" / name, "update")
        os.close(main)  # the terminal is gone: writing raises EIO from here on
        process.send_signal(signal.SIGHUP)
        assert process.wait(120) == (0 if nohup else 75)
    summary = json.loads((tmp_path / "runs" / "nohup" / "summary.json").read_text())
    assert summary["global_step"] == 768


@pytest.mark.slow
def test_a_second_process_is_refused_and_a_killed_one_is_no_obstacle(tmp_path):
    flags = ["--run-name", "a", "--num-steps", "16", "--total-timesteps", "256"]
    process = start(tmp_path, "--total-timesteps", "256", stdout=subprocess.DEVNULL)
    wait_for_phase(tmp_path / "runs" / "a", "rollout")
    process.send_signal(signal.SIGSTOP)  # or it would end before the second one begins
    second = run_script("ppo_atari.py", *flags, cwd=tmp_path)
    assert second.returncode == 2
    assert second.stderr == f"error: runs/a is in use by process {process.pid}\n"
    process.kill()
    process.wait()
    third = run_script("ppo_atari.py", *flags, cwd=tmp_path)
    assert third.returncode == 0, third.stderr
    assert "resumed at step" in third.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("phase", "sizes"),
    # minibatches of the same size: the second rollout is over sooner
    [("rollout", ["--num-steps", "4096"]), ("update", ["--num-steps", "1024", "--num-minibatches", "1"])],
)
def test_a_signal_in_a_long_rollout_or_a_large_minibatch_ends_within_5_seconds(tmp_path, phase, sizes):
    process = start(tmp_path, *sizes, "--total-timesteps", "65536", stdout=subprocess.PIPE, text=True)
    wait_for_phase(tmp_path / "runs" / "a", phase, seconds=300)
    time.sleep(3.0)  # into the middle of it
    sent = time.monotonic()
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    seconds = time.monotonic() - sent
    assert process.returncode == 75
    assert seconds < 5
    assert "checkpoints/step-000000000000.pt is saved" in out


@pytest.mark.slow
@pytest.mark.extended
def test_the_drill_passes_on_sticky_actions(tmp_path):
    flags = ["--env-id", "ALE/Pong-v5", "--num-steps", "32", "--total-timesteps", "2048"]
    done = run_script(
        "drill.py", "--kills", "2", "--terms", "1", "--dir", "drill", str(ROOT / "ppo_atari.py"), *flags, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PASS" in done.stdout
