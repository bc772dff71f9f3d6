"""PPO with actors on Ray: the batch of one machine, exact restarts, lost actors and nodes.

All but the arithmetic wants requirements-ray.txt, and is left out where it is missing.
"""

import json
import os
import signal
import subprocess
import sys

import numpy as np
import psutil
import pytest
import torch
from conftest import ROOT, wait_until

from common.envs import AtariEnvs
from common.errors import UsageError
from drill import compare
from ppo_atari_ray import Actor, Agent, Args, draw, stack_frames

GAME = "BreakoutNoFrameskip-v4"
SMALL = ["--num-actors=2", "--envs-per-actor=2", "--num-steps=32", "--num-minibatches=2"]


# ---- without Ray


@pytest.fixture(autouse=True)
def threads():
    """An actor sets those of its process, which here is that of all tests."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_actions_are_drawn_with_the_policys_probabilities():
    probs = torch.tensor([[0.5, 0.0, 0.2, 0.3]]).expand(100_000, -1)
    noise = torch.rand(100_000, generator=torch.Generator().manual_seed(1))
    actions = draw(probs.log(), noise)
    assert torch.bincount(actions, minlength=4) / 100_000 == pytest.approx(torch.tensor([0.5, 0.0, 0.2, 0.3]), abs=0.01)
    ends = draw(torch.tensor([[0.5, 0.5]]).log().expand(2, -1), torch.tensor([0.0, 1.0]))
    assert ends.tolist() == [0, 1]


def test_stacks_are_those_of_the_environment():
    envs = AtariEnvs("ALE/Breakout-v5", 3, max_num_frames_per_episode=80)  # short games
    stacks = envs.reset(seed=1)[0].copy()
    rng = np.random.default_rng(1)
    observations, frames, ended = [], [], []
    for _ in range(60):
        obs, *_, info = envs.step(rng.integers(0, 4, 3))
        observations.append(obs.copy())
        frames.append(obs[:, -1].copy())
        ended.append(info.get("_episode", np.zeros(3, bool)))
    envs.close()
    assert np.sum(ended) >= 6
    made = torch.zeros((61, 3, 84, 84, 4), dtype=torch.uint8)
    stack_frames(made, *(torch.from_numpy(np.stack(x)) for x in (stacks, frames, ended)))
    np.testing.assert_array_equal(made[1:].permute(0, 1, 4, 2, 3).numpy(), np.stack(observations))
    np.testing.assert_array_equal(made[0].permute(0, 3, 1, 2).numpy(), stacks)


def test_two_actors_of_eight_play_the_batch_of_one_of_sixteen():
    torch.manual_seed(1)
    agent = Agent(4)
    with torch.no_grad():
        agent.actor.weight.mul_(100)  # a policy that prefers something
    weights = {name: x.numpy() for name, x in agent.state_dict().items()}
    noise = np.random.default_rng(1).random((16, 16), dtype=np.float32)

    def play(*sizes):
        shares, first = [], 0
        for size in sizes:
            actor = Actor(GAME, size, first, 1)
            actor.reset(7)
            shares.append(actor.rollout(weights, noise[:, first : first + size])[0])
            first += size
        return {name: np.concatenate([x[name] for x in shares], axis=int(name != "stacks")) for name in shares[0]}

    one, two = play(16), play(8, 8)
    assert len(np.unique(one["actions"])) > 1
    assert one["frames"].std() > 0
    for name in one:
        np.testing.assert_allclose(two[name], one[name], rtol=1e-4, atol=1e-5, err_msg=name)


def test_an_actor_goes_on_from_its_state():
    actor, other = Actor(GAME, 2, 3, 1), Actor(GAME, 2, 3, 1)
    weights = {name: x.numpy() for name, x in Agent(4).state_dict().items()}
    noise = np.random.default_rng(1).random((2, 20, 2), dtype=np.float32)
    actor.reset(1)
    _, state = actor.rollout(weights, noise[0])
    other.load_state_dict(state)
    (first, after), (second, after_too) = actor.rollout(weights, noise[1]), other.rollout(weights, noise[1])
    for name in first:
        np.testing.assert_array_equal(first[name], second[name])
    assert torch.equal(after["obs"], after_too["obs"])


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"num_actors": 0}, "--num-actors 0: must be positive"),
        ({"cpus_per_actor": 0}, "--cpus-per-actor 0: must be positive"),
        ({"num_minibatches": 3}, "must divide actors x envs x steps = 2048"),
        ({"gpu_memory_fraction": 0.0}, "--gpu-memory-fraction 0.0: must be above 0"),
    ],
)
def test_bad_flags_are_refused(flags, words):
    with pytest.raises(UsageError, match=words):
        Args(**flags).check()


# ---- with Ray


@pytest.fixture(scope="module")
def cluster():
    """Nodes on this machine, which listen on loopback only."""
    pytest.importorskip("ray", reason="needs requirements-ray.txt")
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    cluster.add_node(num_cpus=1)
    yield cluster
    cluster.shutdown()


def command(runs_dir, name, cluster, *more):
    words = [sys.executable, str(ROOT / "ppo_atari_ray.py"), *SMALL, "--total-timesteps=1664", "--spot-watch=off"]
    return [*words, f"--runs-dir={runs_dir}", f"--run-name={name}", f"--address={cluster.address}", *more]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, cluster):
    runs_dir = tmp_path_factory.mktemp("runs")
    done = subprocess.run(command(runs_dir, "whole", cluster), capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    summary = json.loads((runs_dir / "whole" / "summary.json").read_text())
    assert (summary["global_step"], summary["updates"]) == (1664, 104)
    assert summary["games"] > 0
    return runs_dir


def actors_of(node) -> list[psutil.Process]:
    raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
    return [child for child in raylet.children() if " ".join(child.cmdline()).startswith("ray::Actor")]


@pytest.mark.slow
def test_lost_actors_and_nodes_are_replaced_and_the_result_is_the_same(undisturbed, cluster):
    cluster.add_node(num_cpus=1)
    process = subprocess.Popen(command(undisturbed, "lost", cluster), stdout=subprocess.PIPE, text=True)
    try:

        def step_is(least):
            status = undisturbed / "lost" / "status.json"
            return lambda: status.exists() and json.loads(status.read_text())["global_step"] >= least

        wait_until(step_is(128), 60)
        (actor, *_) = [actor for node in cluster.list_all_nodes() for actor in actors_of(node)]
        actor.send_signal(signal.SIGKILL)
        wait_until(step_is(json.loads((undisturbed / "lost" / "status.json").read_text())["global_step"] + 256), 60)
        node = next(node for node in cluster.worker_nodes if actors_of(node))
        cluster.remove_node(node, allow_graceful=False)
        said, _ = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 0, said
    assert said.count(": a new one does its share again") >= 2, said
    assert compare(undisturbed / "whole", undisturbed / "lost") == []


@pytest.mark.slow
def test_interrupted_it_ends_bit_for_bit_as_undisturbed(undisturbed, cluster):
    line = command(undisturbed, "interrupted", cluster, "--checkpoint-minutes=0.01")
    process = subprocess.Popen(line, stdout=subprocess.PIPE, text=True)
    try:
        status = undisturbed / "interrupted" / "status.json"
        wait_until(lambda: status.exists() and json.loads(status.read_text())["global_step"] >= 512, 60)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 75
    done = subprocess.run(line, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert "resumed at step" in done.stdout
    assert compare(undisturbed / "whole", undisturbed / "interrupted") == []


@pytest.mark.slow
def test_too_few_cpus_or_no_cluster_are_refused_in_one_line(tmp_path, cluster):
    local = [word for word in command(tmp_path, "a", cluster) if "--address" not in word]
    for line, words in (
        ([*local, "--num-actors=50", "--num-steps=16"], "50 actors of 1 CPUs each: this machine has "),
        (
            [*local, "--address=127.0.0.1:1"],
            "--address 127.0.0.1:1: no Ray cluster there: [Errno 111] Connection refused",
        ),
    ):
        done = subprocess.run(line, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert words in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_cluster_of_its_own_ends_with_the_process(tmp_path):
    pytest.importorskip("ray", reason="needs requirements-ray.txt")
    line = [sys.executable, str(ROOT / "ppo_atari_ray.py"), *SMALL, f"--runs-dir={tmp_path}", "--run-name=a"]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, text=True)
    try:
        status = tmp_path / "a" / "status.json"
        wait_until(lambda: status.exists() and json.loads(status.read_text())["global_step"] > 0, 60)
        family = psutil.Process(process.pid).children(recursive=True)
        titles = {child.pid: " ".join(child.cmdline()) for child in family}
        assert sum("raylet" in title for title in titles.values()) >= 1
        assert sum("ray::Actor" in title for title in titles.values()) == 2
        sockets = [one for child in family for one in child.net_connections("tcp") if one.status == "LISTEN"]
        assert sockets
        assert {one.laddr.ip.removeprefix("::ffff:") for one in sockets} <= {"127.0.0.1", "::1"}
    finally:
        process.kill()
    process.wait(10)
    # Ray's own agents look after their parent once a minute
    _, alive = psutil.wait_procs([child for child in family if "Agent" not in titles[child.pid]], timeout=20)
    assert alive == []
