"""Scaling on paper: its arithmetic, and that docs/cluster.md quotes it."""

import re
import shlex
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import ROOT

from benchmark import cluster, projection
from benchmark.cluster import Cluster
from benchmark.projection import Model
from benchmark.report import read_gpus

# an actor of 2 cores: 500 us of emulation a step of one, 100 us a call, 50 us an observation
MODEL = Model(emulation=500.0, call=100.0, observation=50.0, rate=1e5, cores=2)
NODES = Cluster(MODEL, cores=16, num_steps=128, envs_per_actor=4)


def test_a_node_is_as_many_actors_as_its_cores_hold():
    # 4 environments on 2 cores: 2 x 500 us of emulation and 100 + 4 x 50 of inference make 4 steps in 1,300 us
    assert NODES.actors == 8
    assert NODES.node == pytest.approx(8 * 4 / 1300e-6)
    assert NODES.batch(3) == 3 * 8 * 4 * 128


def test_the_learner_does_arithmetic_and_launches():
    peak = 100.0
    arithmetic = projection.PPO / (peak * 1e6 * projection.EFFICIENCY)
    launches = 16 * projection.LAUNCH * projection.MINIBATCH_OPERATIONS
    for nodes in (1, 7):
        batch = nodes * 8 * 4 * 128
        assert NODES.learner(peak, nodes) == pytest.approx(1e6 / (arithmetic + launches / batch))


def test_rollout_and_update_take_turns():
    bits = 8 * (7056 + 39 + 2 * 4 * 7056 / 128 + cluster.WEIGHTS / (8 * 4 * 128))
    seconds = 1 / (5 * NODES.node) + bits / 2e9 + 1 / NODES.learner(100.0, 5)
    assert NODES.together(100.0, 5, gbit=2.0) == pytest.approx(1 / seconds)
    assert NODES.together(100.0, 5, gbit=2.0) < min(5 * NODES.node, NODES.learner(100.0, 5))


@pytest.mark.parametrize("peak", [15.7, 35.6, 156.0])
def test_saturated_is_the_first_number_of_nodes_that_keeps_up(peak):
    nodes = NODES.saturated(peak)
    assert nodes * NODES.node >= NODES.learner(peak, nodes)
    assert (nodes - 1) * NODES.node < NODES.learner(peak, max(nodes - 1, 1))
    # rollout and update are about the same then: half of the learner's own rate
    assert 0.5 <= NODES.together(peak, nodes, gbit=1e9) / NODES.learner(peak, nodes) < 0.7


def test_a_learner_that_no_cluster_feeds_is_said_so():
    slow = Cluster(Model(5e7, 0.0, 0.0, 1e5, 2), cores=2, num_steps=128, envs_per_actor=1)
    assert slow.saturated(100.0) is None
    assert all("more than 1000" in line for line in cluster.table(slow, read_gpus())[2:])


def test_bytes_are_those_of_the_network_and_of_a_frame():
    from ppo_atari import Agent

    with torch.device("meta"):
        agent = Agent(4)
    assert sum(parameter.numel() for parameter in agent.parameters()) == cluster.PARAMETERS
    # whatever the number of nodes: each brings its share of the batch and takes the weights once
    assert NODES.weights(1) == NODES.weights(9) == cluster.WEIGHTS / (8 * 4 * 128)


def test_numbers_are_those_that_an_actor_sends():
    from ppo_atari_ray import Actor, Agent

    actor = Actor("ALE/Breakout-v5", 1, 0, 1)
    actor.reset(1)
    weights = {name: x.numpy() for name, x in Agent(4).state_dict().items()}
    share, state = actor.rollout(weights, np.full((2, 1), 0.5, dtype=np.float32))
    sizes = {name: x.nbytes for name, x in share.items()}
    assert sizes["frames"] == 2 * cluster.FRAME
    assert sizes["stacks"] + state["obs"].numpy().nbytes == cluster.STACKS
    assert sum(sizes.values()) - sizes["frames"] - sizes["stacks"] == 2 * cluster.NUMBERS


def run(*flags: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "benchmark" / "cluster.py"), *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_the_page_quotes_what_the_script_prints():
    page = (ROOT / "docs" / "cluster.md").read_text()
    (line,) = re.findall(r"^\.venv/bin/python benchmark/cluster\.py(.*)$", page, re.MULTILINE)
    done = run(*shlex.split(line))
    assert done.returncode == 0, done.stderr
    said, table = done.stdout.split("\n\n")
    assert table.strip() in page
    assert " ".join(said.split()) in " ".join(page.split())
    assert done.stdout.count("projected") == 2
    assert done.stdout.count("| V100") == done.stdout.count("| A100") == done.stdout.count("| RTX 3090") == 2


@pytest.mark.parametrize(
    "flags",
    [["--cores", "15"], ["--cores", "0"], ["--num-steps", "0"], ["--envs-per-actor", "-1"], ["no.json"]],
    ids=" ".join,
)
def test_what_makes_no_sense_is_one_line_and_status_2(monkeypatch, capsys, flags):
    monkeypatch.setattr(sys, "argv", ["cluster.py", *flags])
    with pytest.raises(SystemExit) as stop:
        cluster.main()
    assert stop.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
