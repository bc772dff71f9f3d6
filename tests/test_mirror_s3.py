"""The mirror against a real S3 interface: moto's server on this machine (requirements-cloud.txt)."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
from conftest import ROOT, run_script, wait_until
from test_interruption import start
from test_mirror import interrupt_after, train

import ppo_atari
from common.errors import Interrupted, UsageError
from drill import MirrorView, compare

pytest.importorskip("s3fs", reason="requirements-cloud.txt is not installed")
pytest.importorskip("moto", reason="requirements-cloud.txt is not installed")

pytestmark = pytest.mark.slow


@pytest.fixture
def server(tmp_path):
    """A process that plays S3."""
    words = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
    with open(tmp_path / "moto.log", "w") as log:
        process = subprocess.Popen(words, stdout=log, stderr=log)
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def bucket(monkeypatch, tmp_path, server):
    """The address of an empty bucket."""
    wait_until(lambda: "Running on http" in (tmp_path / "moto.log").read_text(), seconds=60)
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    address = re.search(r"Running on (http://127.0.0.1:\d+)", (tmp_path / "moto.log").read_text())[1]
    monkeypatch.setenv("AWS_ENDPOINT_URL", address)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    MirrorView("s3://bucket").fs.mkdir("bucket")
    return "s3://bucket/runs"


def test_a_run_goes_on_from_a_bucket_bit_for_bit(tmp_path, monkeypatch, bucket):
    train(tmp_path, "whole")
    for looks in (45, 80):
        with monkeypatch.context() as patch:
            interrupt_after(patch, ppo_atari, looks)
            with pytest.raises(Interrupted):
                train(tmp_path, mirror=bucket)
        shutil.rmtree(tmp_path / "a")
    train(tmp_path, mirror=bucket)
    assert compare(tmp_path / "whole", tmp_path / "a") == []
    manifest, left = MirrorView(bucket).look()
    assert (manifest["step"], manifest["complete"], left) == (320, True, [])
    assert not MirrorView(bucket).fs.exists(f"{bucket}/a/lease.json")
    # set aside, not lost
    train(tmp_path, mirror=bucket, resume="never")
    assert MirrorView(f"{bucket}/a.old-1").look()[0]["step"] == 320
    assert MirrorView(f"{bucket}/a").look()[0]["step"] == 320


@pytest.mark.parametrize(("address", "reason"), [("s3://nowhere/runs", "bucket does not exist")])
def test_a_bucket_that_is_not_there_is_refused_in_one_line(tmp_path, bucket, address, reason):
    with pytest.raises(UsageError, match=reason) as error:
        train(tmp_path, mirror=address)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "a").exists()


def test_a_store_that_hangs_delays_the_exit_of_a_process_below_ten_seconds(tmp_path, bucket, server):
    flags = ["--mirror", bucket, "--total-timesteps", "100000", "--checkpoint-minutes", "0.01"]
    process = start(tmp_path, *flags, stdout=subprocess.PIPE, text=True)
    wait_until(lambda: (MirrorView(bucket).look()[0].get("step") or 0) > 0, seconds=60)
    server.send_signal(signal.SIGSTOP)
    process.send_signal(signal.SIGTERM)
    sent = time.monotonic()
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 75
    assert time.monotonic() - sent < 10
    assert "not all is copied" in out
    # the same command copies the rest when the store is back
    server.send_signal(signal.SIGCONT)
    process = start(tmp_path, *flags, stdout=subprocess.PIPE, text=True)
    wait_until(lambda: json.loads((tmp_path / "runs" / "a" / "status.json").read_text())["pid"] == process.pid, 60)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 75
    assert "not all is copied" not in out


def test_a_drill_that_loses_the_disk_each_time(tmp_path, bucket):
    flags = ["--num-steps", "32", "--total-timesteps", "3072"]
    plan = ["--kills", "5", "--terms", "0", "--mirror", bucket, "--dir", str(tmp_path / "drill")]
    done = run_script("drill.py", *plan, str(ROOT / "ppo_atari.py"), *flags, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^SIGKILL( +\d){5}$", done.stdout, re.MULTILINE)
    assert "PASS" in done.stdout
