"""The mirror against a real S3 interface: moto's server on this machine (requirements-cloud.txt)."""

import os
import re
import shutil
import uuid

import pytest
from conftest import ROOT, run_script
from test_mirror import interrupt_after, train

import ppo_atari
from common.errors import Interrupted, UsageError
from drill import MirrorView, compare

pytest.importorskip("s3fs", reason="requirements-cloud.txt is not installed")
moto_server = pytest.importorskip("moto.server", reason="requirements-cloud.txt is not installed")

pytestmark = pytest.mark.slow


@pytest.fixture
def bucket(monkeypatch):
    """The address of an empty bucket."""
    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    name = f"bucket-{uuid.uuid4().hex}"  # what moto keeps outlives its server
    MirrorView(f"s3://{name}").fs.mkdir(name)
    yield f"s3://{name}/runs"
    server.stop()


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


def test_a_drill_that_loses_the_disk_each_time(tmp_path, bucket):
    flags = ["--num-steps", "32", "--total-timesteps", "3072"]
    plan = ["--kills", "5", "--terms", "0", "--mirror", bucket, "--dir", str(tmp_path / "drill")]
    done = run_script("drill.py", *plan, str(ROOT / "ppo_atari.py"), *flags, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^SIGKILL( +\d){5}$", done.stdout, re.MULTILINE)
    assert "PASS" in done.stdout
