"""ppo_continuous.py: its mathematics, what it logs, how it refuses, and the promise."""

import inspect
import json
import math
import os
import re
import signal
import subprocess
import sys
import time

import gymnasium as gym
import numpy as np
import psutil
import pytest
import torch
from conftest import ROOT, read_scalars, run_script

import drill
import ppo_atari
import ppo_continuous
from common.errors import Interrupted
from common.preemption import StopSignals
from common.running import Normalizer, RunningMeanStd
from common.tiny import flatten, in_numpy
from ppo_continuous import Agent, Args, log_prob

SMALL = {"num_steps": 64, "num_minibatches": 4, "update_epochs": 2, "total_timesteps": 320}


@pytest.fixture(autouse=True)
def threads():
    """The script takes one; other tests get theirs back."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def train(tmp_path, name: str, **flags) -> dict:
    return ppo_continuous.train(Args(runs_dir=str(tmp_path), run_name=name, **{**SMALL, **flags}))


class Toy(gym.Env):
    """Reward 1 a step, the number of steps is the observation. May end by itself. Checks its actions."""

    def __init__(self, ends_after=math.inf, low=-np.inf, high=np.inf, counts=True):
        self.counts = counts
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (1,))
        self.action_space = gym.spaces.Box(np.float32(low), np.float32(high), (3,))
        self.ends_after = ends_after

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        self.steps += 1
        return np.full(1, self.steps * self.counts, np.float32), 1.0, self.steps >= self.ends_after, False, {}


class Target(gym.Env):
    """The best action is the observation."""

    observation_space = gym.spaces.Box(-1, 1, (1,))
    action_space = gym.spaces.Box(-2, 2, (1,))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.target = self.np_random.uniform(-1, 1, 1).astype(np.float32)
        return self.target, {}

    def step(self, action):
        reward = -float((action - self.target)[0] ** 2)
        return *self.reset()[:1], reward, False, False, {}


gym.register("Truncated-v0", Toy, max_episode_steps=8)
gym.register("Endless-v0", lambda: Toy(counts=False), max_episode_steps=50)
gym.register("Terminated-v0", lambda: Toy(ends_after=50))
gym.register("Bounded-v0", lambda: Toy(low=[-0.5, -np.inf, 0.0], high=[2.0, 0.1, 0.0]), max_episode_steps=8)
gym.register("Target-v0", Target, max_episode_steps=10)


# ---- mathematics


def test_gae_is_the_siblings_line_by_line():
    assert inspect.getsource(ppo_continuous.compute_gae) == inspect.getsource(ppo_atari.compute_gae)


def test_running_statistics_equal_numpys_over_the_whole_history():
    samples = np.random.default_rng(0).normal(5.0, [0.01, 1.0, 1000.0], (1000, 3))
    rms = RunningMeanStd(3)
    start = 0
    for size in (1, 2, 7, 90, 900):
        rms.update(samples[start : start + size])
        start += size
    np.testing.assert_allclose(rms.mean, samples.mean(0), rtol=1e-12)
    np.testing.assert_allclose(rms.std(), samples.std(0), rtol=1e-3)  # 1e-8 is added below the root
    other = RunningMeanStd(3)
    other.load_state_dict(rms.state_dict())
    assert drill.differences(rms.state_dict(), other.state_dict(), "") == []


def test_rewards_are_scaled_by_the_returns_of_whole_episodes():
    g = np.random.default_rng(0)
    normalizer = Normalizer(2, 1, gamma=0.9)
    history, current = [], [0.0, 0.0]
    for _ in range(300):
        rewards, ended = g.normal(size=2), g.random(2) < 0.1
        scaled = normalizer.rewards(rewards, ended)
        for i in range(2):
            current[i] = current[i] * 0.9 + rewards[i]
            history.append(current[i])
            current[i] *= not ended[i]
        std = math.sqrt(np.var(history) + 1e-8)
        np.testing.assert_allclose(scaled, np.clip(rewards / std, -10, 10), rtol=1e-9)


def test_evaluation_leaves_the_statistics_as_they_are():
    normalizer = Normalizer(1, 3, gamma=0.9)
    normalizer.observe(np.random.default_rng(0).normal(size=(10, 3)))
    before = normalizer.state_dict()
    assert np.abs(normalizer.observations(np.array([[1e9, -1e9, 0.0]]))).max() == 10
    assert drill.differences(before, normalizer.state_dict(), "") == []


@pytest.mark.parametrize("env_id", ["Hopper-v5", "Truncated-v0"])
def test_every_observation_and_reward_counts_once_in_the_statistics(tmp_path, monkeypatch, env_id):
    seen, returns, current = [], [], np.zeros(2)

    class Watched(ppo_continuous.ControlEnvs):
        def reset(self, **kwargs):
            result = super().reset(**kwargs)
            seen.extend(result[0])
            return result

        def step(self, actions):
            result = super().step(actions)
            current[:] = 0.99 * current + result[1]
            returns.extend(current)
            if "_episode" in result[4]:
                ended = result[4]["_episode"]
                seen.extend(result[4]["final_obs"][ended])
                current[ended] = 0.0
            seen.extend(result[0])
            return result

    monkeypatch.setattr(ppo_continuous, "ControlEnvs", Watched)
    summary = train(tmp_path, "a", env_id=env_id, num_envs=2)
    assert summary["games"] > 5
    assert len(seen) == 2 + summary["global_step"] + summary["games"]
    seen = np.array(seen, dtype=np.float64)
    state = drill.final_checkpoint(tmp_path / "a")["normalizer"]
    assert state["obs_count"] == len(seen)
    np.testing.assert_allclose(state["obs_mean"], np.mean(seen, 0), rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(state["obs_squares"] / len(seen), np.var(seen, 0), rtol=1e-9, atol=1e-9)
    assert state["return_mean"].item() == pytest.approx(np.mean(returns))
    assert state["return_squares"].item() == pytest.approx(np.var(returns) * len(returns))
    weights = torch.load(tmp_path / "a" / "agent.pt", weights_only=True)
    assert drill.differences(weights["normalizer.obs_mean"], state["obs_mean"], "") == []


@pytest.mark.parametrize(("env_id", "horizon"), [("Endless-v0", math.inf), ("Terminated-v0", 50)])
def test_values_converge_to_the_infinite_horizon_with_truncations_and_to_the_finite_with_terminations(
    tmp_path, env_id, horizon
):
    gamma = 0.99
    flags = {"num_envs": 4, "num_steps": 64, "update_epochs": 10, "learning_rate": 3e-3, "clip_vloss": False}
    flags["anneal_lr"] = False
    train(tmp_path, "toy", env_id=env_id, gamma=gamma, total_timesteps=30 * 256, **flags)
    saved = drill.final_checkpoint(tmp_path / "toy")
    agent, normalizer = Agent(1, 3), Normalizer(4, 1, gamma)
    agent.load_state_dict(saved["agent"])
    normalizer.load_state_dict(saved["normalizer"])
    steps = np.arange(50.0) * (env_id == "Terminated-v0")
    obs = torch.from_numpy(normalizer.observations(steps[:, None])).float()
    values = agent(obs)[1].detach().numpy() * normalizer.return_rms.std()
    left = horizon - steps
    np.testing.assert_allclose(values, (1 - gamma**left) / (1 - gamma), atol=4)


def test_log_probabilities_are_those_of_torchs_normal_distribution():
    g = torch.Generator().manual_seed(0)
    actions, mean, logstd = (torch.randn(*shape, generator=g) for shape in ((50, 4), (50, 4), (4,)))
    normal = torch.distributions.Normal(mean, logstd.exp())
    torch.testing.assert_close(log_prob(actions, mean, logstd), normal.log_prob(actions).sum(1), rtol=1e-5, atol=1e-5)
    args = Args(ent_coef=1.0)
    zeros = torch.zeros(50)
    _, (_, _, entropy, _) = ppo_continuous.ppo_loss(args, mean, logstd, zeros, actions, zeros, zeros, zeros, zeros)
    torch.testing.assert_close(entropy, normal.entropy().sum(1)[0])


@pytest.mark.parametrize("norm_adv", [True, False])
@pytest.mark.parametrize("clip_vloss", [True, False])
def test_the_loss_equals_the_papers_sample_by_sample(norm_adv, clip_vloss):
    g = torch.Generator().manual_seed(0)
    args = Args(norm_adv=norm_adv, clip_vloss=clip_vloss, ent_coef=0.3, vf_coef=0.7)
    mean, actions, logstd = torch.randn(64, 2, generator=g), torch.randn(64, 2, generator=g), torch.tensor([0.1, -0.2])
    now = torch.distributions.Normal(mean, logstd.exp()).log_prob(actions).sum(1)
    logprobs = now + 0.2 * torch.randn(64, generator=g)
    newvalue, advantages, returns = (torch.randn(64, generator=g) for _ in range(3))
    values = newvalue + 0.2 * torch.randn(64, generator=g)

    loss, stats = ppo_continuous.ppo_loss(args, mean, logstd, newvalue, actions, logprobs, advantages, returns, values)

    if norm_adv:
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    objective = value_loss = k1 = k3 = clipped = 0.0
    low, high = 1 - args.clip_coef, 1 + args.clip_coef
    for i in range(64):
        logratio = (now[i] - logprobs[i]).item()
        ratio, advantage = math.exp(logratio), advantages[i].item()
        objective += min(ratio * advantage, min(max(ratio, low), high) * advantage) / 64
        error = (newvalue[i] - returns[i]).item() ** 2
        if clip_vloss:
            change = (newvalue[i] - values[i]).clamp(-args.clip_coef, args.clip_coef)
            error = max(error, (values[i] + change - returns[i]).item() ** 2)
        value_loss += 0.5 * error / 64
        k1, k3 = k1 - logratio / 64, k3 + (ratio - 1 - logratio) / 64
        clipped += (abs(ratio - 1) > args.clip_coef) / 64
    entropy = torch.distributions.Normal(mean, logstd.exp()).entropy().sum(1)[0].item()
    assert loss.item() == pytest.approx(-objective + 0.7 * value_loss - 0.3 * entropy, abs=1e-5)
    expected = [value_loss, -objective, entropy, k1, k3, clipped]
    assert ppo_continuous.loss_stats(args, *stats).tolist() == pytest.approx(expected, abs=1e-5)
    assert 0.1 < clipped < 0.9
    # two minibatches: means over both
    twice = [torch.stack([x, 2 * x]) for x in stats]
    assert ppo_continuous.loss_stats(args, *twice)[0].item() == pytest.approx(1.5 * value_loss, abs=1e-5)


def test_one_tensor_holds_all_weights_and_gradients():
    torch.manual_seed(0)
    agent, apart = Agent(5, 2), Agent(5, 2)
    apart.load_state_dict(agent.state_dict())
    weights = flatten(agent)
    ours = torch.optim.Adam([weights], lr=0.01, eps=1e-5)
    theirs = torch.optim.Adam(apart.parameters(), lr=0.01, eps=1e-5)
    for _ in range(3):
        obs = torch.randn(8, 5)
        for network, optimizer, parameters in ((agent, ours, [weights]), (apart, theirs, list(apart.parameters()))):
            mean, value = network(obs)
            optimizer.zero_grad(set_to_none=False)
            (mean.square().sum() + value.sum() + network.actor_logstd.exp().sum()).backward()
            torch.nn.utils.clip_grad_norm_(parameters, 0.5)
            optimizer.step()
    for one, other in zip(agent.parameters(), apart.parameters(), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("activation", [torch.nn.Tanh, torch.nn.ELU])
def test_a_network_is_the_same_in_numpy(activation):
    network = torch.nn.Sequential(torch.nn.Linear(5, 8), activation(), torch.nn.Linear(8, 2))
    obs = torch.randn(3, 5)
    result = in_numpy(network)(obs.numpy())
    assert result.dtype == np.float32
    np.testing.assert_allclose(result, network(obs).detach().numpy(), rtol=1e-5, atol=1e-6)
    assert network[0].weight.requires_grad


# ---- a run


TAGS = {f"losses/{name}" for name in (*ppo_continuous.LOSSES, "explained_variance")}
TAGS |= {f"charts/{name}" for name in ("episodic_return", "episodic_length", "SPS", "learning_rate")}
TAGS |= {f"time/{name}" for name in ("checkpoint", "environment", "inference", "learning")}
TAGS |= {"system/cpu_percent", "system/ram_mib", "cost/hours"}


@pytest.mark.slow
def test_the_command_line_trains_ends_episodes_and_logs_every_tag(tmp_path):
    flags = ["--env-id", "Pendulum-v1", "--total-timesteps", "4096", "--update-epochs", "2", "--amp"]
    done = run_script("ppo_continuous.py", *flags, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert run_dir.name.startswith("Pendulum-v1__ppo_continuous__1__")
    scalars = read_scalars(run_dir, timed=True)
    assert set(scalars) == TAGS
    assert scalars["charts/learning_rate"] == [(2048, pytest.approx(3e-4)), (4096, pytest.approx(1.5e-4))]
    assert all(math.isfinite(value) for tag in TAGS for _, value in scalars[tag])
    assert scalars["charts/episodic_length"] == [(step, 200) for step in range(200, 4097, 200)]
    assert all(-2000 < value < 0 for _, value in scalars["charts/episodic_return"])
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["updates"], summary["games"]) == (2 * 2 * 32, 20)
    config = json.loads((run_dir / "config.json").read_text())
    assert config["machine"]["torch_threads"] == 1
    assert config["env"]["max_episode_steps"] == 200
    assert "complete already" in run_script("ppo_continuous.py", *flags, cwd=tmp_path).stdout


def test_one_seed_gives_identical_scalars_and_weights_with_workers_too_and_another_seed_others(tmp_path):
    flags = {"env_id": "Hopper-v5", "num_envs": 2, "total_timesteps": 512}
    for name, more in (("first", {}), ("again", {}), ("workers", {"async_envs": True}), ("other", {"seed": 2})):
        train(tmp_path, name, **flags, **more)
    assert len(read_scalars(tmp_path / "first")["charts/episodic_return"]) > 0
    assert drill.compare(tmp_path / "first", tmp_path / "again") == []
    assert drill.compare(tmp_path / "first", tmp_path / "workers") == []
    first, other = (read_scalars(tmp_path / name)["losses/value_loss"] for name in ("first", "other"))
    assert first != other


def test_the_ratio_is_one_in_the_first_minibatch_of_the_first_epoch(tmp_path, monkeypatch):
    ratios, actions = [], []
    real = ppo_continuous.ppo_loss

    def watched(*args):
        result = real(*args)
        actions.append(args[4])
        ratios.append(result[1][3].exp())
        if len(ratios) == 1:
            torch.testing.assert_close(args[3], args[8], rtol=0, atol=1e-5)  # values
        return result

    monkeypatch.setattr(ppo_continuous, "ppo_loss", watched)
    train(tmp_path, "ratio", learning_rate=0.01, total_timesteps=64)
    assert len(ratios) == 8
    assert (ratios[0] - 1).abs().max() < 1e-5
    assert (ratios[1] - 1).abs().max() > 1e-3
    assert not torch.equal(actions[0], actions[4])  # each epoch has an order of its own


def test_a_truncated_episode_bootstraps_from_the_value_of_its_last_observation(tmp_path, monkeypatch):
    agents, last, seen = [], [], []

    class WatchedAgent(Agent):
        def __init__(self, *sizes):
            super().__init__(*sizes)
            agents.append(self)

    class WatchedNormalizer(Normalizer):
        def observations(self, obs):
            result = super().observations(obs)
            if obs[0, 0] == 8:  # only as the last one of an episode
                last.append(result)
            return result

    def watched(rewards, terminations, truncations, values, next_value, final_values, *rest):
        seen.append((terminations, truncations))
        with torch.no_grad():  # before the first update
            expected = agents[0].critic(torch.from_numpy(np.concatenate(last)).float()).flatten()
        torch.testing.assert_close(final_values[truncations], expected)
        return real(rewards, terminations, truncations, values, next_value, final_values, *rest)

    real = ppo_continuous.compute_gae
    monkeypatch.setattr(ppo_continuous, "compute_gae", watched)
    monkeypatch.setattr(ppo_continuous, "Agent", WatchedAgent)
    monkeypatch.setattr(ppo_continuous, "Normalizer", WatchedNormalizer)
    train(tmp_path, "a", env_id="Truncated-v0", total_timesteps=64, update_epochs=1)
    ((terminations, truncations),) = seen
    assert not terminations.any()
    assert truncations.flatten().nonzero().flatten().tolist() == list(range(7, 64, 8))


def test_advantages_are_computed_from_what_a_slow_rollout_gives(tmp_path, monkeypatch):
    history, agents, seen = [], [], []

    class WatchedEnvs(ppo_continuous.ControlEnvs):
        def reset(self, **kwargs):
            result = super().reset(**kwargs)
            history.append(result[0].copy())
            return result

        def step(self, actions):
            result = super().step(actions)
            history.append((result[0].copy(), result[1], result[2], result[3], result[4].get("final_obs")))
            return result

    class WatchedAgent(Agent):
        def __init__(self, *sizes):
            super().__init__(*sizes)
            agents.append(self)

    def value(obs):
        with torch.no_grad():
            return agents[0].critic(torch.from_numpy(np.asarray(obs)).float())[:, 0].numpy()

    def watched(*inputs):
        samples, discounted, current = list(history[0]), [], np.zeros(2)

        def normalised(obs):
            scale = np.sqrt(np.var(samples, 0, dtype=np.float64) + 1e-8)
            return ((obs - np.mean(samples, 0, dtype=np.float64)) / scale).clip(-10, 10)

        values, rewards, final_values = [value(normalised(history[0]))], [], []
        for obs, reward, terminated, truncated, final_obs in history[1:]:
            current = 0.9 * current + reward
            discounted.extend(current)
            rewards.append((reward / np.sqrt(np.var(discounted) + 1e-8)).clip(-10, 10))
            ended = terminated | truncated
            current[ended] = 0.0
            final_values.append(np.zeros(2))
            if ended.any():
                samples.extend(final_obs[ended])
                final_values[-1] = value(normalised(final_obs))
            samples.extend(obs)
            values.append(value(normalised(obs)))
        terminations, truncations = (np.array([row[index] for row in history[1:]]) for index in (2, 3))
        expected = (np.array(rewards), terminations, truncations, np.array(values[:-1]), values[-1])
        for index, (ours, theirs) in enumerate(zip(inputs[:5], expected, strict=True)):
            np.testing.assert_allclose(ours.numpy(), theirs, rtol=1e-3, atol=1e-3, err_msg=str(index))
        final = inputs[5].numpy()[truncations]
        np.testing.assert_allclose(final, np.array(final_values)[truncations], rtol=1e-3, atol=1e-3)
        assert inputs[6:] == (0.9, 0.7)
        seen.append(truncations.sum())
        return real(*inputs)

    real = ppo_continuous.compute_gae
    monkeypatch.setattr(ppo_continuous, "ControlEnvs", WatchedEnvs)
    monkeypatch.setattr(ppo_continuous, "Agent", WatchedAgent)
    monkeypatch.setattr(ppo_continuous, "compute_gae", watched)
    gym.register("Short-v0", "gymnasium.envs.classic_control.pendulum:PendulumEnv", max_episode_steps=11)
    train(tmp_path, "a", env_id="Short-v0", num_envs=2, total_timesteps=128, gamma=0.9, gae_lambda=0.7)
    assert seen == [2 * (64 // 11)]


def test_target_kl_ends_the_epochs_early_and_gradients_are_clipped(tmp_path, monkeypatch):
    norms = []
    real = torch.optim.Adam.step

    def watched(optimizer, *args, **kwargs):
        norms.append(optimizer.param_groups[0]["params"][0].grad.norm().item())
        return real(optimizer, *args, **kwargs)

    monkeypatch.setattr(torch.optim.Adam, "step", watched)
    flags = {"learning_rate": 0.01, "update_epochs": 4, "total_timesteps": 64, "vf_coef": 100.0}
    assert train(tmp_path, "all", **flags)["updates"] == 16
    assert train(tmp_path, "early", target_kl=1e-6, **flags)["updates"] == 4
    assert len(norms) == 20
    assert max(norms) == pytest.approx(0.5, abs=1e-4)


@pytest.mark.parametrize("env_id", ["Bounded-v0", "Truncated-v0"])
def test_bounds_hold_for_the_environment_and_not_for_what_is_learned(tmp_path, monkeypatch, env_id):
    stored = []
    real = ppo_continuous.ppo_loss
    monkeypatch.setattr(ppo_continuous, "ppo_loss", lambda *args: stored.append(args[4]) or real(*args))
    assert train(tmp_path, "a", env_id=env_id)["games"] == 40  # the toy checks what it gets
    actions = torch.cat(stored)
    assert (actions[:, 2] != 0).all()
    assert (actions[:, 0] < -0.5).any()
    assert (actions[:, 1] > 0.1).any()


def test_it_learns_a_small_problem(tmp_path):
    flags = {"num_envs": 4, "num_steps": 128, "num_minibatches": 8, "update_epochs": 10, "learning_rate": 3e-3}
    train(tmp_path, "target", env_id="Target-v0", total_timesteps=20 * 512, **flags)
    returns = [value for _, value in read_scalars(tmp_path / "target")["charts/episodic_return"]]
    assert np.mean(returns[:50]) < -10  # a deviation of 1 costs 1 a step
    assert np.mean(returns[-50:]) > -4


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_mixed_precision_trains(tmp_path, dtype):
    assert train(tmp_path, "a", amp=True, amp_dtype=dtype)["updates"] == 5 * 2 * 4


BAD = {
    "discrete actions": (["--env-id", "CartPole-v1"], "has 2 discrete actions"),
    "an Atari game": (["--env-id", "PongNoFrameskip-v4"], "ppo_atari.py plays those"),
    "an id that no longer loads": (["--env-id", "Hopper-v2"], "use Hopper-v5"),
    "an unknown id": (["--env-id", "Hoper-v5"], "did you mean Hopper-v5"),
    "sizes that do not divide": (["--num-minibatches", "33"], "must divide num-envs x num-steps = 2048"),
    "zero updates": (["--total-timesteps", "2000"], "less than one rollout"),
    "more than the memory": (["--num-envs", "1", "--num-steps", "40960000000", "--total-timesteps", "9" * 12], "GB"),
    "more processes than memory": (["--num-envs", "10000", "--async-envs", "--total-timesteps", "9" * 12], "GB"),
    "more simulators than memory": (
        ["--num-envs", "9000000", "--num-steps", "32", "--total-timesteps", "9" * 12],
        "GB",
    ),
    "a path for a module": (["--env-id", "./x:Hopper-v5"], "--env-id ./x:Hopper-v5"),
    "a module that is not there": (["--env-id", "nowhere:Hopper-v5"], "No module named 'nowhere'"),
    "no environments": (["--num-envs", "0"], "must be positive"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_gets_one_line_and_status_2_and_leaves_nothing(case, tmp_path, monkeypatch, main_guard):
    flags, words = BAD[case]
    monkeypatch.chdir(tmp_path)
    status, out, err = main_guard(ppo_continuous, *flags)
    assert (status, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert words in err
    assert list(tmp_path.iterdir()) == []


# ---- the promise


KINDS = {
    "falls": {"env_id": "Hopper-v5"},
    "time limits": {"env_id": "Pendulum-v1", "total_timesteps": 960},
    "two workers": {"env_id": "Hopper-v5", "num_envs": 2, "async_envs": True, "total_timesteps": 640},
    "longer than a rollout": {"env_id": "HalfCheetah-v5"},
    "early stopping": {"env_id": "Hopper-v5", "target_kl": 1e-3, "learning_rate": 0.01},
}


@pytest.mark.parametrize("kind", KINDS)
def test_interrupted_at_many_places_it_ends_bit_for_bit_as_undisturbed(tmp_path, monkeypatch, kind):
    train(tmp_path, "whole", **KINDS[kind])
    looks_an_iteration = 64 + 2 * 4
    for look in (5, looks_an_iteration, looks_an_iteration + 2, looks_an_iteration - 3, 2, 2 * looks_an_iteration + 30):

        class Asking(StopSignals):
            looks = 0
            at = look

            @property
            def asked(self):
                self.looks += 1
                return "the test" if self.looks >= self.at else None

        with monkeypatch.context() as patch:
            patch.setattr(ppo_continuous, "StopSignals", Asking)
            with pytest.raises(Interrupted):
                train(tmp_path, "pieces", **KINDS[kind])
    train(tmp_path, "pieces", **KINDS[kind])
    assert drill.compare(tmp_path / "whole", tmp_path / "pieces") == []
    end = drill.final_checkpoint(tmp_path / "pieces")
    assert end.keys() == {"about", "progress", "agent", "optimizer", "amp", "normalizer", "envs", "rng"}


def start(tmp_path, *flags: str, **kwargs) -> subprocess.Popen:
    command = [sys.executable, str(ROOT / "ppo_continuous.py"), "--run-name", "a", "--async-envs", "--num-envs", "2"]
    process = subprocess.Popen([*command, "--env-id", "Hopper-v5", *flags], cwd=tmp_path, text=True, **kwargs)
    status = tmp_path / "runs" / "a" / "status.json"
    deadline = time.monotonic() + 120
    while not status.exists() or json.loads(status.read_text())["phase"] != "rollout":
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return process


def workers_of(process: subprocess.Popen) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


@pytest.mark.slow
def test_a_killed_worker_ends_the_run_with_status_1_and_a_named_checkpoint(tmp_path):
    sizes = ("--num-steps", "128", "--total-timesteps", "5120")
    process = start(tmp_path, *sizes, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    workers = workers_of(process)
    assert len(workers) == 2
    status = tmp_path / "runs" / "a" / "status.json"
    seen = {"global_step": 0}
    while seen["global_step"] < 256 or seen["phase"] != "rollout":
        assert process.poll() is None
        time.sleep(0.01)
        seen = json.loads(status.read_text())
    workers[0].kill()
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert err == "error: the worker process of an environment has died\n"
    step = re.search(r"checkpoints/step-0*(\d+)\.pt is good, the same command goes on from there", out)
    assert step
    again = run_script(
        *("ppo_continuous.py", "--run-name", "a", "--async-envs", "--num-envs", "2", "--env-id", "Hopper-v5"),
        *("--num-steps", "128", "--total-timesteps", "5120"),
        cwd=tmp_path,
    )
    assert again.returncode == 0, again.stderr
    assert f"resumed at step {int(step[1]):,} from" in again.stdout
    assert int(step[1]) > 0  # the boundary before, which no periodic save had written
    assert not any(worker.is_running() for worker in workers)


@pytest.mark.slow
def test_a_signal_to_the_whole_group_is_one_stop_and_no_worker_is_left(tmp_path):
    process = start(tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
    workers = workers_of(process)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (75, "")
    assert "interrupted by SIGINT: runs/a/checkpoints/step-" in out
    psutil.wait_procs(workers, timeout=5)
    assert not any(worker.is_running() for worker in workers)


@pytest.mark.slow
def test_no_worker_outlives_a_killed_run(tmp_path):
    process = start(tmp_path, stdout=subprocess.DEVNULL)
    workers = workers_of(process)
    for worker in workers:
        worker.suspend()  # a simulator that hangs would not notice that its pipe is closed
    process.kill()
    process.wait()
    assert psutil.wait_procs(workers, timeout=5)[1] == []


@pytest.mark.slow
@pytest.mark.extended
@pytest.mark.parametrize("env_id", ["HalfCheetah-v5", "Hopper-v5", "Pendulum-v1"])
def test_the_drill_passes(tmp_path, env_id):
    sizes = ["--num-steps", "256", "--total-timesteps", "3840"]
    done = run_script(
        "drill.py",
        "--kills",
        "2",
        "--terms",
        "1",
        "--dir",
        "drill",
        str(ROOT / "ppo_continuous.py"),
        "--env-id",
        env_id,
        *sizes,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("PASS")


@pytest.mark.slow
@pytest.mark.parametrize(("compiler", "reason"), [("none", "InvalidCxxCompiler: "), ("broken", "no such header\n")])
def test_without_a_compiler_compile_is_refused_in_one_line(compiler, reason, tmp_path, monkeypatch):
    broken = tmp_path / "broken"
    broken.write_text('#!/bin/sh\ncase "$*" in *--version*) echo c++ 1;; *) echo no such header >&2; exit 1;; esac\n')
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(tmp_path / compiler))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    (tmp_path / "work").mkdir()
    done = run_script("ppo_continuous.py", "--compile", cwd=tmp_path / "work")
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: --compile: torch can't compile here: {reason}")
    assert done.stderr.count("\n") == 1
    assert list((tmp_path / "work").iterdir()) == []


@pytest.mark.slow
def test_compiled_and_uncompiled_runs_go_on_from_each_other(tmp_path, monkeypatch, capsys):
    def interrupted(name, **flags):
        class Asking(StopSignals):
            looks = 0

            @property
            def asked(self):
                self.looks += 1
                return "the test" if self.looks >= 64 + 8 + 30 else None

        with monkeypatch.context() as patch:
            patch.setattr(ppo_continuous, "StopSignals", Asking)
            with pytest.raises(Interrupted):
                train(tmp_path, name, **flags)

    train(tmp_path, "whole", compile=True)
    interrupted("pieces", compile=True)
    train(tmp_path, "pieces", compile=True)
    assert drill.compare(tmp_path / "whole", tmp_path / "pieces") == []
    interrupted("switched", compile=True)
    capsys.readouterr()
    train(tmp_path, "switched")
    assert "compiled False instead of True: the learner is exact" in capsys.readouterr().out
    end, plain = drill.final_checkpoint(tmp_path / "switched"), drill.final_checkpoint(tmp_path / "whole")
    assert end["agent"].keys() == plain["agent"].keys()
    assert not any("_orig_mod" in key for key in end["agent"])
