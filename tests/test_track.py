"""`--track`: Weights & Biases gets the same curves, offline here; its failures end no training."""

import importlib.util
import json
import os
import signal
import struct
import subprocess
import sys
import threading

import pytest
from conftest import ROOT, read_scalars, wait_until
from test_checkpoint import Training

import common.track
import ppo_atari
from common.errors import UsageError
from common.files import read_json
from common.track import Tracker

needs_wandb = pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="needs requirements-extras.txt")
FLAGS = ["--num-envs=2", "--num-steps=16", "--num-minibatches=2", "--update-epochs=1", "--run-name=a", "--track"]


def records(path):
    """Of a `.wandb` file: LevelDB's log format behind a header of 7 bytes."""
    content, position, record = path.read_bytes(), 7, b""
    while position + 7 <= len(content):
        left = 32768 - position % 32768  # of this block
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, position)
        record += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


def points(run_dir) -> tuple[dict[str, list[tuple[int, float]]], set[str]]:
    """What W&B's files of a run hold, `tag -> [(global_step, value), ...]`, and the ids of its runs."""
    from wandb.proto import wandb_internal_pb2

    found, ids = {}, set()
    for path in sorted(run_dir.glob("wandb/offline-run-*/*.wandb")):
        for content in records(path):
            record = wandb_internal_pb2.Record.FromString(content)
            if record.HasField("run"):
                ids.add(record.run.run_id)
            items = {(x.key or x.nested_key[0]): json.loads(x.value_json) for x in record.history.item}
            for tag in items.keys() - {"global_step", "_step", "_runtime", "_timestamp"}:
                found.setdefault(tag, []).append((items["global_step"], items[tag]))
    return found, ids


@needs_wandb
def test_wandb_gets_tensorboards_curves_over_an_interruption_as_one_run(tmp_path):
    flags = [*FLAGS, "--checkpoint-minutes=0", f"--runs-dir={tmp_path}"]
    offline = os.environ | {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    command = [sys.executable, str(ROOT / "ppo_atari.py"), "--total-timesteps=2048", *flags]
    process = subprocess.Popen(command, cwd=tmp_path, env=offline, stdout=subprocess.DEVNULL)
    wait_until(lambda: read_json(tmp_path / "a" / "status.json").get("games", 0) > 2, 60)
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == os.EX_TEMPFAIL
    assert subprocess.run(command, cwd=tmp_path, env=offline, stdout=subprocess.DEVNULL, timeout=60).returncode == 0

    theirs, ids = points(tmp_path / "a")
    ours = read_scalars(tmp_path / "a", timed=True)
    assert len(ids) == 1
    assert theirs.keys() == ours.keys() >= {"charts/episodic_return", "losses/value_loss", "charts/SPS"}
    for tag in ours:
        again = [(step, pytest.approx(value, rel=1e-6, abs=1e-9)) for step, value in ours[tag]]
        assert all(point in theirs[tag] for point in again), tag
        if not tag.startswith(("charts/SPS", "time/", "cost/", "system/")):  # what was done again has the same values
            assert all(point in again for point in theirs[tag]), tag


@needs_wandb
def test_without_an_account_it_is_refused_in_one_line_and_leaves_nothing(tmp_path):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    done = subprocess.run(
        [sys.executable, str(ROOT / "ppo_atari.py"), *FLAGS, f"--runs-dir={tmp_path / 'runs'}"],
        cwd=tmp_path,
        env=environment | {"HOME": str(tmp_path), "WANDB_BASE_URL": "http://127.0.0.1:9"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    line = done.stderr.strip().splitlines()[-1]
    assert line.startswith("error: --track: ")
    assert line.endswith("(WANDB_MODE=offline needs no account)")
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()


def test_without_the_package_it_is_refused(tmp_path, monkeypatch, main_guard):
    monkeypatch.setattr("common.args.find_spec", lambda name: None)
    status, _, err = main_guard(ppo_atari, *FLAGS, f"--runs-dir={tmp_path / 'runs'}")
    assert (status, err) == (2, "error: --track: needs requirements-extras.txt\n")
    assert not (tmp_path / "runs").exists()


def test_tracking_does_not_change_the_runs_name(tmp_path):
    from common.args import default_run_name

    assert default_run_name(ppo_atari.Args(track=True), "x") == default_run_name(ppo_atari.Args(), "x")


class Fake:
    """What `wandb.init` returns."""

    def __init__(self, finish=lambda: None) -> None:
        self.logged, self.ended, self.slow = [], [], finish

    def log(self, row):
        if len(self.logged) == 2:
            raise RuntimeError("the service\nis gone")
        self.logged.append(row)

    def mark_preempting(self):
        self.ended.append("preempting")

    def finish(self, exit_code):
        self.slow()
        self.ended.append(exit_code)


def test_a_failure_while_training_is_said_once_and_ends_tracking_only(tmp_path, capsys):
    fake = Fake()
    with Training(tmp_path, checkpoint_minutes=1e-9) as training:
        training.run.tracker.run = fake
        for _ in range(4):
            training.iterate(1)
            training.run.log_iteration({"losses/x": 1.0})
    assert [row["global_step"] for row in fake.logged] == [10, 20]
    assert capsys.readouterr().out.count("W&B fails (the service is gone): training goes on without\n") == 1
    assert [step for step, _ in read_scalars(tmp_path / "a")["losses/x"]] == [10, 20, 30, 40]


@pytest.mark.parametrize(
    ("phase", "ended"), [("interrupted", ["preempting", 75]), ("complete", [0]), ("limit", [3]), ("failed", [1])]
)
def test_wandb_hears_how_a_run_ended(phase, ended):
    tracker = Tracker(True, print)
    fake = tracker.run = Fake()
    for _ in range(2):
        tracker.finish(phase)
        tracker.wait()
    assert fake.ended == ended


def test_an_upload_that_hangs_does_not_delay_an_exit(monkeypatch):
    monkeypatch.setattr(common.track, "LAST_WORDS", 0.1)
    release, lines = threading.Event(), []
    tracker = Tracker(True, lines.append)
    tracker.run = Fake(lambda: release.wait(60))
    tracker.finish("interrupted")
    tracker.wait()
    release.set()
    assert lines == ["not all is uploaded to W&B: `wandb sync` copies the rest"]


HANGING = """
import sys, types, threading
class Run:
    define_metric = lambda *args, **kwargs: None
    log = lambda *args: None
    finish = lambda self, exit_code: threading.Event().wait()
wandb = types.SimpleNamespace(init=lambda **kwargs: Run(), Settings=dict)
sys.modules["wandb"] = wandb
import common.args, common.track, ppo_atari, atexit, time
common.args.find_spec = lambda name: True
common.track.AT_THE_END = 0.1
atexit.register(time.sleep, 100)  # as W&B waits for its service
common.args.run_script(ppo_atari.Args, ppo_atari.train, "")
"""


@pytest.mark.slow
def test_a_service_that_hangs_at_the_end_does_not_keep_a_complete_run_from_ending(tmp_path):
    command = [sys.executable, "-c", HANGING, "--total-timesteps=32", f"--runs-dir={tmp_path}", *FLAGS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "not all is uploaded to W&B" in done.stdout
    assert (tmp_path / "a" / "summary.json").exists()


def test_what_wandb_raises_at_the_start_is_one_line(tmp_path, monkeypatch):
    class Wandb:
        Settings = dict

        @staticmethod
        def init(**kwargs):
            raise RuntimeError("no\nkey")

    monkeypatch.setitem(sys.modules, "wandb", Wandb)
    (tmp_path / "events.out.tfevents.1").touch()
    with pytest.raises(UsageError, match=r"^--track: no key \("):
        Tracker(True, print).start(tmp_path, {}, resumed=False)
    lines = []
    Tracker(True, lines.append).start(tmp_path, {}, resumed=True)  # paid for already: it trains
    assert lines == ["W&B refuses (no key): this process trains without"]


def test_without_the_flag_nothing_is_imported():
    code = "import sys, ppo_atari; print('wandb' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout == "False\n"
