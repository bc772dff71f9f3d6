"""doctor.py --peer: what it makes of its measurements, and, slowly, a cluster of two nodes on this machine."""

import contextlib
import json
import os
import subprocess
import sys

import pytest
from conftest import ROOT

import common.cluster
import common.peers
import doctor
from common.errors import UsageError
from common.peers import Peer


@pytest.fixture
def cluster(monkeypatch):
    """Play a cluster: its other nodes."""

    def play(*found: Peer) -> None:
        monkeypatch.setattr(common.cluster, "connected", lambda address: contextlib.nullcontext())
        monkeypatch.setattr(common.peers, "peers", lambda: iter(found))

    return play


@pytest.mark.parametrize(
    ("peer", "status"),
    [
        (Peer("10.0.0.2", 0.4e-3, 1.1e9), "ok"),
        (Peer("10.0.0.2", 5e-3, 125e6), "ok"),
        (Peer("10.0.0.2", 5.1e-3, 1.1e9), "warn"),
        (Peer("10.0.0.2", 0.4e-3, 124e6), "warn"),
        (Peer("10.0.0.2", silence="GetTimeoutError: no answer"), "fail"),
    ],
)
def test_a_node_that_is_far_away_or_thinly_connected_is_a_warning(cluster, peer, status):
    cluster(peer, Peer("10.0.0.3", 1e-3, 1e9))
    found, other = doctor.peers(doctor.Args(peer="10.0.0.1:6379"))
    assert (found.name, found.status) == ("peer 10.0.0.2", status)
    assert (other.name, other.status) == ("peer 10.0.0.3", "ok")
    assert bool(found.cure) == (status != "ok")
    if status != "fail":
        assert f"{1e3 * peer.seconds:.2f} ms" in found.finding
        assert f"{peer.rate / 1e6:,.0f} MB/s ({peer.rate * 8e-9:.1f} Gbit/s)" in found.finding


def test_a_cluster_of_one_node_has_nothing_to_measure(cluster):
    cluster()
    (found,) = doctor.peers(doctor.Args(peer="auto"))
    assert found.status == "warn"


def test_only_the_nodes_are_looked_at_and_a_silent_one_is_status_1(cluster, monkeypatch, capsys):
    cluster(Peer("10.0.0.2", 1e-3, 1e9), Peer("10.0.0.3", silence="ActorDiedError: gone"))
    monkeypatch.setattr(doctor, "run", None)
    monkeypatch.setattr(doctor, "machine", lambda args: {})
    monkeypatch.setattr(doctor.faulthandler, "dump_traceback_later", lambda *args, **kwargs: None)
    monkeypatch.setattr(sys, "argv", ["doctor.py", "--peer", "auto", "--json"])
    assert doctor.main() == 1
    said = json.loads(capsys.readouterr().out)
    assert [row["status"] for row in said["checks"]] == ["ok", "fail"]


@pytest.mark.parametrize("error", ["--address x:1: no Ray cluster there: refused", "this needs Ray: pip install ..."])
def test_no_cluster_is_one_line_and_status_2(monkeypatch, capsys, error):
    @contextlib.contextmanager
    def connected(address):
        raise UsageError(error)
        yield

    monkeypatch.setattr(common.cluster, "connected", connected)
    monkeypatch.setattr(doctor.faulthandler, "dump_traceback_later", lambda *args, **kwargs: None)
    monkeypatch.setattr(sys, "argv", ["doctor.py", "--peer", "x:1"])
    assert doctor.main() == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"error: {error.replace('--address', '--peer')}\n"


# ---- with Ray

PROGRAM = """
import subprocess, sys
from ray.cluster_utils import Cluster
node = dict(num_cpus=1, object_store_memory=200 * 2**20)
cluster = Cluster(initialize_head=True, head_node_args=dict(include_dashboard=False, **node))
cluster.add_node(**node)
try:
    print(subprocess.run([sys.executable, "doctor.py", "--peer", cluster.address, "--json"], timeout=100).returncode)
finally:
    cluster.shutdown()
"""


@pytest.mark.slow
def test_two_nodes_of_this_machine_are_measured(tmp_path):
    pytest.importorskip("ray", reason="comes with requirements-ray.txt")
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    env |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64, "HOME": str(tmp_path), "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, env=env, capture_output=True, text=True, timeout=150
    )
    text, _, status = done.stdout.strip().rpartition("\n")
    assert status == "0", done.stdout + done.stderr
    (row,) = json.loads(text)["checks"]  # one of two: this node is not its own peer
    assert row["status"] in ("ok", "warn")  # this machine may be busy
    milliseconds, mbytes = float(row["finding"].split()[0]), float(row["finding"].split()[5].replace(",", ""))
    assert 0.01 < milliseconds < 1000
    assert 1 < mbytes < 100_000
