"""Continuous-control environments: the same as gymnasium's, and brought back to the same state."""

import os
import signal
import subprocess
import sys
import warnings

import gymnasium as gym
import numpy as np
import psutil
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from common.control import ControlEnvs, Replayable, make_env
from common.errors import UsageError, WorkerError


class Toy(gym.Env):
    """Noise from the environment's own generator, ends after a drawn number of steps."""

    def __init__(self, low=-1.0, high=1.0, box=None, obs=None):
        self.action_space = box or gym.spaces.Box(np.float32(low), np.float32(high), (2,))
        self.observation_space = obs or gym.spaces.Box(-np.inf, np.inf, (3,))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = self.np_random.integers(3, 30)
        return self.np_random.normal(size=3).astype(np.float32), {}

    def step(self, action):
        self.left -= 1
        noise = self.np_random.normal(size=3).astype(np.float32)
        return noise + action.sum(), float(noise[0]), bool(self.left == 0), False, {}


class Moody(Toy):
    """Draws from a generator of its own, which nobody can save."""

    def step(self, action):
        obs, *rest = super().step(action)
        return obs + np.float32(int.from_bytes(os.urandom(2))), *rest


class Sloppy(gym.Env):
    """Observations of another type than its space's, in one array that it uses again; actions of half precision."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = gym.spaces.Box(-1, 1, (2,), np.float16)
    obs = None

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.obs = np.zeros(2) if self.obs is None else self.obs
        self.obs[:] = self.np_random.normal(size=2)
        self.left = 12
        return self.obs, {}

    def step(self, action):
        self.left -= 1
        self.obs *= 1.1
        self.obs += action
        return self.obs, float(action[0]), self.left == 0, False, {}


class Parent(Toy):
    """A simulator with a process of its own, which holds what its parent has open."""

    def reset(self, **kwargs):
        if not hasattr(self, "child"):
            self.child = os.fork()
            if self.child == 0:
                signal.pause()
        return super().reset(**kwargs)

    def close(self):
        if hasattr(self, "child"):
            os.kill(self.child, signal.SIGKILL)


gym.register("Sloppy-v0", Sloppy)
gym.register("Parent-v0", Parent)


class OwnNoise(Toy):
    """Rewards from a generator that nobody can save; observations are the same."""

    def step(self, action):
        obs, reward, *rest = super().step(action)
        return obs, reward + int.from_bytes(os.urandom(2)), *rest


gym.register("OwnNoise-v0", OwnNoise)
gym.register("Toy-v0", Toy, max_episode_steps=20)
gym.register("Moody-v0", Moody, nondeterministic=True)
gym.register("Lying-v0", Moody)
gym.register("Dict-v0", lambda: Toy(obs=gym.spaces.Dict(a=gym.spaces.Box(-1, 1, (3,)))))
gym.register("Images-v0", lambda: Toy(obs=gym.spaces.Box(0, 255, (84, 84, 3), np.uint8)))
gym.register("Many-v0", lambda: Toy(box=gym.spaces.MultiDiscrete([2, 3])))
gym.register("Whole-v0", lambda: Toy(box=gym.spaces.Box(-3, 3, (2,), np.int64)))


def random_actions(envs, steps: int) -> np.ndarray:
    return np.random.default_rng(0).uniform(-1, 1, (steps, *envs.action_space.shape)).astype(np.float32)


@pytest.mark.parametrize("env_id", ["Hopper-v5", "Pendulum-v1", "Toy-v0", "Sloppy-v0"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_it_is_gymnasiums_vector_environment_with_statistics(env_id, asynchronous):
    envs = ControlEnvs(env_id, 2, asynchronous)
    theirs = SyncVectorEnv(
        [lambda i=i: Replayable(make_env(env_id), i) for i in range(2)], autoreset_mode=AutoresetMode.SAME_STEP
    )
    obs, _ = envs.reset(seed=3)
    seeds = [history["seed"] for history in envs.envs.ask("call", "history")]
    np.testing.assert_array_equal(obs, theirs.reset(seed=seeds)[0])
    returns, lengths, episodes = np.zeros(2), np.zeros(2, int), 0
    for actions in random_actions(envs, 450):
        obs, rewards, terminations, truncations, info = envs.step(actions)
        expected = theirs.step(actions)
        for ours, other in zip((obs, rewards, terminations, truncations), expected[:4], strict=True):
            np.testing.assert_array_equal(ours, other)
        returns, lengths = returns + rewards, lengths + 1
        ended = terminations | truncations
        assert ("_episode" in info) == ended.any()
        for i in ended.nonzero()[0]:
            np.testing.assert_array_equal(info["final_obs"][i], expected[4]["final_obs"][i])
            assert (info["episode"]["r"][i], info["episode"]["l"][i]) == (returns[i], lengths[i])
            returns[i], lengths[i] = 0.0, 0
            episodes += 1
    assert episodes > 1
    envs.close()
    theirs.close()


def test_environments_of_a_run_and_of_neighbouring_seeds_differ():
    seeds = set()
    for seed in range(10):
        envs = ControlEnvs("Toy-v0", 3)
        envs.reset(seed=seed)
        seeds |= {history["seed"] for history in envs.envs.ask("call", "history")}
    assert len(seeds) == 30


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("env_id", ["HalfCheetah-v5", "Hopper-v5", "MountainCarContinuous-v0", "Toy-v0", "Sloppy-v0"])
def test_a_restored_simulator_goes_on_as_if_nothing_had_happened(env_id, asynchronous):
    steps = 330
    first, second = ControlEnvs(env_id, 2, asynchronous), ControlEnvs(env_id, 2, not asynchronous)
    first.reset(seed=1)
    second.reset(seed=2)
    actions = random_actions(first, 2 * steps)
    for row in actions[:steps]:
        first.step(row)
    shares = []
    second.replay_tick = shares.append
    second.load_state_dict(first.state_dict())
    assert second.restore_note == ""
    assert shares[0] == 0.0
    assert shares == sorted(shares)
    np.testing.assert_array_equal(first.obs, second.obs)
    for row in actions[steps:]:
        for one, other in zip(first.step(row), second.step(row), strict=True):
            if isinstance(one, np.ndarray):
                np.testing.assert_array_equal(one, other)
            elif "_episode" in one:
                for key in ("r", "l"):
                    np.testing.assert_array_equal(one["episode"][key], other["episode"][key])
                np.testing.assert_array_equal(one["final_obs"], other["final_obs"])
    first.close()
    second.close()


def test_long_episodes_are_kept_whole():
    env = Replayable(make_env("Pendulum-v1"), 0)
    env.reset(seed=1)
    actions = np.random.default_rng(0).uniform(-2, 2, (3000, 1)).astype(np.float32)
    for action in actions:
        env.step(action)
    np.testing.assert_array_equal(env.history()["actions"], actions)


@pytest.mark.parametrize("env_id", ["Lying-v0", "OwnNoise-v0"])
def test_what_cannot_be_restored_is_announced_and_begins_anew(env_id):
    assert "not deterministic" in ControlEnvs("Moody-v0", 1).note
    envs = ControlEnvs(env_id, 1)
    assert envs.note == ""
    envs.reset(seed=1)
    envs.step(np.zeros((1, 2), np.float32))
    envs.load_state_dict(envs.state_dict())
    assert envs.restore_note.endswith("the learner is exact, episodes restart")
    assert envs.episode_lengths.tolist() == [0]


def test_the_state_of_another_number_of_environments_is_refused():
    two, three = ControlEnvs("Toy-v0", 2), ControlEnvs("Toy-v0", 3)
    two.reset(seed=1)
    three.reset(seed=1)
    with pytest.raises(ValueError, match="the state of 2 environments, not 3"):
        three.load_state_dict(two.state_dict())


REFUSED = {
    "HalfCheetah-v2": "no longer loads; use HalfCheetah-v5",
    "HalfCheetah-v3": "no longer loads; use HalfCheetah-v5",
    "HalfCheetah-v9": "did you mean HalfCheetah-v5",
    "Halfcheeta-v5": "did you mean HalfCheetah-v5",
    "HalfCheetah": "did you mean HalfCheetah-v5",
    "Pendulum-v0": "did you mean Pendulum-v1",
    "nothing of the kind": "unknown",
    "CartPole-v1": "has 2 discrete actions; this script plays continuous ones",
    "BreakoutNoFrameskip-v4": "an Atari game; ppo_atari.py plays those",
    "ALE/Pong-v5": "an Atari game; ppo_atari.py plays those",
    "BipedalWalker-v3": "Box2D is not installed",
    "Dict-v0": "its observations are Dict",
    "Images-v0": "its observations are Box(0, 255, (84, 84, 3), uint8)",
    "Many-v0": "its actions are MultiDiscrete",
    "Whole-v0": "its actions are Box(-3, 3, (2,), int64)",
}


@pytest.mark.parametrize("env_id", REFUSED)
def test_what_does_not_fit_is_refused_in_one_line(env_id):
    with warnings.catch_warnings(), pytest.raises(UsageError) as refused:
        warnings.simplefilter("error")
        ControlEnvs(env_id, 1)
    assert str(refused.value).startswith(f"--env-id {env_id}: ")
    assert REFUSED[env_id] in str(refused.value)
    assert "\n" not in str(refused.value)


def test_an_id_may_name_the_module_that_registers_it(tmp_path, monkeypatch):
    (tmp_path / "my_envs.py").write_text(
        "import gymnasium as gym\n"
        "from gymnasium.envs.classic_control.pendulum import PendulumEnv\n"
        "gym.register('Mine-v0', PendulumEnv, kwargs={'g': 9.81}, max_episode_steps=100)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    settings = ControlEnvs("my_envs:Mine-v0", 1).describe()
    assert (settings["g"], settings["max_episode_steps"]) == (9.81, 100)


def test_a_simulators_start_is_not_disturbed_by_signals():
    class Starting(Toy):
        """Ends a process of its own group, as a terminal's Ctrl-C does, and needs it."""

        def __init__(self):
            super().__init__()
            child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
            child.send_signal(signal.SIGINT)
            child.send_signal(signal.SIGTERM)
            child.communicate(b"\n")
            if child.returncode:
                raise ImportError("the helper was killed")

    gym.register("Starting-v0", Starting)
    ControlEnvs("Starting-v0", 1)


def test_an_old_version_that_still_loads_is_named():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ControlEnvs("HalfCheetah-v4", 1).note == "HalfCheetah-v4 is out of date: HalfCheetah-v5 is there"


def test_workers_leave_signals_to_their_parent_and_a_dead_one_is_named():
    envs = ControlEnvs("Toy-v0", 2, asynchronous=True)
    envs.reset(seed=1)
    for process in envs.envs.processes:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
            os.kill(process.pid, number)
    envs.step(np.zeros((2, 2), np.float32))
    victim = envs.envs.processes[1]
    os.kill(victim.pid, signal.SIGKILL)
    victim.join()
    with pytest.raises(WorkerError, match="the worker process of an environment has died"):
        envs.step(np.zeros((2, 2), np.float32))
    envs.close()
    assert not any(process.is_alive() for process in envs.envs.processes)


def test_a_dead_worker_is_noticed_though_its_own_child_holds_the_pipe():
    envs = ControlEnvs("Parent-v0", 1, asynchronous=True)
    envs.reset(seed=1)
    (worker,) = envs.envs.processes
    children = psutil.Process(worker.pid).children()
    assert len(children) == 1
    worker.kill()
    worker.join()
    try:
        with pytest.raises(WorkerError):
            envs.step(np.zeros((1, 2), np.float32))
    finally:
        children[0].kill()
        envs.close()


@pytest.mark.slow
def test_a_worker_that_hangs_does_not_hide_a_signal():
    class Stopped(Exception):
        pass

    def look():
        raise Stopped

    envs = ControlEnvs("Toy-v0", 2, asynchronous=True)
    envs.reset(seed=1)
    envs.waiting = look
    os.kill(envs.envs.processes[0].pid, signal.SIGSTOP)
    with pytest.raises(Stopped):
        envs.step(np.zeros((2, 2), np.float32))
    envs.close()


def test_workers_compute_with_one_thread():
    class Asking(Toy):
        def threads(self):
            return torch.get_num_threads()

    gym.register("Asking-v0", Asking)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    envs = ControlEnvs("Asking-v0", 1, asynchronous=True)
    assert list(envs.envs.ask("call", "threads")) == [1]
    torch.set_num_threads(before)
    envs.close()


def test_closing_ends_a_worker_that_hangs():
    envs = ControlEnvs("Toy-v0", 2, asynchronous=True)
    envs.reset(seed=1)
    pids = [process.pid for process in envs.envs.processes]
    os.kill(pids[0], signal.SIGSTOP)
    envs.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)
