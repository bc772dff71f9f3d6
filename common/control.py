"""Continuous-control environments as one gymnasium vector environment with whole-episode statistics and a saved state.

Any id registered with gymnasium that has flat `Box` observations and flat `Box` actions: MuJoCo, classic control, your
own. They are stepped in this process, or with `--async-envs` in one of gymnasium's worker processes each.
"""

import atexit
import contextlib
import ctypes
import difflib
import importlib
import os
import signal
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.envs.registration import EnvSpec
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from common.errors import UsageError, WorkerError
from common.signals import SIGNALS, signals_blocked

ATARI = "ale_py.env:AtariEnv"
REPLAY_CHUNK = 200  # steps that a restore plays between two looks for a signal
LOOK_AFTER_WORKERS = 1.0  # seconds without an answer after which a worker may be dead
POLITE_CLOSE = 2.0  # seconds that worker processes have to close their simulators


def spec_of(env_id: str) -> EnvSpec:
    """What an id is registered with. `MODULE:ID` imports a module first, which registers it.

    Raises:
        UsageError: an unknown id, or an Atari game's.
    """
    with contextlib.suppress(ImportError):
        import ale_py

        gym.register_envs(ale_py)  # to know an Atari game when it is asked for
    module, _, name = env_id.rpartition(":")
    if module:
        try:
            importlib.import_module(module)
        except (ImportError, SyntaxError, TypeError, ValueError) as error:  # TypeError: a path is no module
            raise UsageError(f"--env-id {env_id}: {error}") from None
    try:
        spec = gym.spec(name)
    except (gym.error.Error, ImportError) as error:
        newest = {newest_version(spec) for spec in gym.registry.values() if spec.entry_point != ATARI}
        close = difflib.get_close_matches(name, sorted(newest), n=3, cutoff=0.7)
        known = f"did you mean {' or '.join(close)}?" if close else str(error).splitlines()[0]
        raise UsageError(f"--env-id {env_id}: unknown; {known}") from None
    if spec.entry_point == ATARI:
        raise UsageError(f"--env-id {env_id}: an Atari game; ppo_atari.py plays those")
    return spec


def make_env(env_id: str, **settings: Any) -> gym.Env:
    """A registered environment. `settings`: of `gym.make`.

    Raises:
        UsageError: see `spec_of`; a package that is missing, or spaces that a Gaussian policy has no use for.
    """
    spec = spec_of(env_id)
    try:
        # MuJoCo's bindings start a process while they are imported; a signal to the group would end it, and the import
        with signals_blocked(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of old versions, which `note` names in one line
            # the checker would only slow each step down
            env = gym.make(spec, disable_env_checker=True, **settings)
    except (gym.error.Error, ImportError) as error:
        newest = newest_version(spec)
        reason = str(error).splitlines()[0] if newest == spec.id else f"no longer loads; use {newest}"
        raise UsageError(f"--env-id {env_id}: {reason}") from None
    observations, actions = env.observation_space, env.action_space
    if isinstance(actions, Discrete):
        raise UsageError(f"--env-id {env_id}: has {actions.n} discrete actions; this script plays continuous ones")
    if not isinstance(actions, Box) or len(actions.shape) != 1 or actions.dtype.kind != "f":
        raise UsageError(f"--env-id {env_id}: its actions are {actions}; this script needs one flat Box of floats")
    if not isinstance(observations, Box) or len(observations.shape) != 1:
        kind = observations if isinstance(observations, Box) else type(observations).__name__
        raise UsageError(f"--env-id {env_id}: its observations are {kind}; this script needs one flat Box")
    return env


def newest_version(spec: EnvSpec) -> str:
    """The id of the newest registered version of an environment."""
    same = [other for other in gym.registry.values() if (other.namespace, other.name) == (spec.namespace, spec.name)]
    return max(same, key=lambda other: other.version or 0).id


class Replayable(gym.Wrapper):
    """A simulator that can be brought to the same state again: it keeps the state that its generator had when the
    episode began, or the seed, and the actions since."""

    def __init__(self, env: gym.Env, index: int) -> None:
        super().__init__(env)
        self.index = index  # in the vector environment
        self.obs_dtype, self.action_dtype = env.observation_space.dtype, env.action_space.dtype
        self.seed: int | None = None
        self.generator: dict[str, Any] | None = None
        self.actions = np.zeros((1024, *env.action_space.shape), dtype=self.action_dtype)
        self.length = 0
        self.rewards = 0.0  # of the episode
        self.obs: np.ndarray | None = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        self.seed, self.generator = seed, None
        if seed is None:
            self.generator = self.unwrapped.np_random.bit_generator.state
        self.length, self.rewards = 0, 0.0
        self.obs = self._own(self.env.reset(seed=seed, options=options)[0])
        return self.obs, {}  # what simulators report besides costs more to gather than a step, and nobody reads it

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        if self.length == len(self.actions):
            self.actions = np.concatenate([self.actions, np.zeros_like(self.actions)])
        action = action.astype(self.action_dtype, copy=False)  # the simulator gets what the log holds
        self.actions[self.length] = action
        self.length += 1
        obs, reward, terminated, truncated, _ = self.env.step(action)
        self.obs = self._own(obs)
        self.rewards += float(reward)
        return self.obs, reward, terminated, truncated, {}

    def _own(self, obs: np.ndarray) -> np.ndarray:
        """A copy, since simulators may use the same array again, in the type that the space promises."""
        return np.array(obs, dtype=self.obs_dtype)

    def history(self) -> dict[str, Any]:
        return {"seed": self.seed, "generator": self.generator, "actions": self.actions[: self.length].copy()}

    def begin_replay(self, histories: list[dict[str, Any]]) -> None:
        """Begin the episode of one of them, this environment's, again."""
        history = histories[self.index]
        self._rest = history["actions"]
        if history["generator"] is not None:
            self.unwrapped.np_random.bit_generator.state = history["generator"]
        self.reset(seed=history["seed"])

    def replay(self, steps: int) -> int:
        """Play up to so many steps again. Returns how many are left."""
        for action in self._rest[:steps]:
            self.step(action)
        self._rest = self._rest[steps:]
        return len(self._rest)


class Local:
    """Environments in this process. Gymnasium's `SyncVectorEnv` takes most of a simulator's own time for its copies and
    infos; what both return is the same (a test compares them)."""

    def __init__(self, makers: list[Callable[[], gym.Env]]) -> None:
        self.envs = [make() for make in makers]
        self.single_observation_space = self.envs[0].observation_space
        self.single_action_space = self.envs[0].action_space

    def ask(self, what: str, *args: Any) -> Any:
        return getattr(self, what)(*args)

    def reset(self, seeds: list[int] | None, options: dict[str, Any] | None) -> tuple[np.ndarray, dict]:
        seeds = seeds or [None] * len(self.envs)
        pairs = zip(self.envs, seeds, strict=True)
        return np.stack([env.reset(seed=seed, options=options)[0] for env, seed in pairs]), {}

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict]:
        num_envs = len(self.envs)
        obs = np.empty((num_envs, *self.single_observation_space.shape), self.single_observation_space.dtype)
        rewards, info = np.empty(num_envs), {}
        terminations, truncations = np.empty(num_envs, dtype=bool), np.empty(num_envs, dtype=bool)
        for i, env in enumerate(self.envs):
            obs[i], rewards[i], terminated, truncated, _ = env.step(actions[i])
            terminations[i], truncations[i] = terminated, truncated
            if terminated or truncated:
                info.setdefault("final_obs", {})[i] = obs[i].copy()
                obs[i], _ = env.reset()
        return obs, rewards, terminations, truncations, info

    def call(self, name: str, *args: Any) -> list[Any]:
        found = [getattr(env, name) for env in self.envs]
        return [one(*args) if callable(one) else one for one in found]

    def close(self) -> None:
        for env in self.envs:
            env.close()


class Workers(AsyncVectorEnv):
    """Gymnasium's worker processes, one an environment, which leave signals to their parent and die with it."""

    def __init__(self, makers: list[Callable[[], gym.Env]]) -> None:
        """
        Raises:
            WorkerError: a worker could not make its environment.
        """
        parent = os.getpid()

        def in_worker(maker: Callable[[], gym.Env]) -> Callable[[], gym.Env]:
            def make() -> gym.Env:
                if os.getpid() != parent:  # gymnasium makes the first one here too, to ask for its spaces
                    become_worker(parent)
                return maker()

            return make

        self.waiting: Callable[[], None] = lambda: None
        makers = [in_worker(maker) for maker in makers]
        with signals_blocked(), dead_workers_named():  # until workers ignore them
            super().__init__(makers, context="fork", autoreset_mode=AutoresetMode.SAME_STEP)
        # multiprocessing's own end would send SIGTERM, which workers ignore, and wait for ever
        this = weakref.ref(self)
        atexit.register(lambda: this() and this().close())

    def ask(self, what: str, *args: Any) -> Any:
        """Gymnasium's `WHAT_async` and `WHAT_wait`, without waiting for the dead.

        Raises:
            WorkerError: a worker process has died.
        """
        with dead_workers_named():
            getattr(self, f"{what}_async")(*args)
            for pipe, process in zip(self.parent_pipes, self.processes, strict=True):
                # a simulator's own children may hold the pipe of a dead worker open
                while not pipe.poll(LOOK_AFTER_WORKERS):
                    if not process.is_alive():
                        raise EOFError
                    self.waiting()
            return getattr(self, f"{what}_wait")()

    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """Ask, then kill: a worker that hangs must not keep the run from ending."""
        for pipe in self.parent_pipes:
            with contextlib.suppress(OSError, AttributeError):
                pipe.send(("close", None))
        deadline = time.monotonic() + POLITE_CLOSE
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.join()
        for pipe in self.parent_pipes:
            if pipe is not None:
                pipe.close()


@contextlib.contextmanager
def dead_workers_named() -> Iterator[None]:
    """Say in one line what a broken pipe means.

    Raises:
        WorkerError
    """
    try:
        yield
    except (EOFError, ConnectionError):
        raise WorkerError("the worker process of an environment has died") from None


def become_worker(parent: int) -> None:
    """Leave signals to the parent, die with it, and compute with one thread."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1  # prctl(2)
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before that
        os._exit(1)
    torch.set_num_threads(1)


class ControlEnvs(VectorEnv):
    """`num_envs` copies of a simulator in SAME_STEP autoreset mode.

    Observations are `[num_envs, D]` in the space's own type, rewards `[num_envs]` float64. When an episode ended
    (`info["_episode"]`), `info["episode"]` holds its return `r`, its length `l` in steps and its duration `t` in
    seconds, and `info["final_obs"]`, `[num_envs, D]`, its true last observation; other rows are the ones returned.

    A simulator is a function of its generator's state at the start of an episode and the actions since, which is what
    `state_dict` holds; `load_state_dict` plays them again.

    Attributes:
        obs: the last observations.
        waiting: called each second while a worker process has not answered; may raise.
        replay_tick: called with the share that is done while `load_state_dict` plays; may raise.
        restore_note: what the user should know of the last `load_state_dict`, else empty.
        note: what the user should know of this environment, else empty.
    """

    def __init__(self, env_id: str, num_envs: int, asynchronous: bool = False, **settings: Any) -> None:
        """
        Args:
            asynchronous: each in a process of its own.
            settings: of `gym.make`.

        Raises:
            UsageError: see `make_env`.
            WorkerError: a worker process could not make its environment.
        """
        self.closed = True  # there is nothing to close yet
        make_env(env_id, **settings).close()  # refuse here what a worker could only die of
        makers: list[Callable[[], gym.Env]] = [
            lambda i=i: Replayable(make_env(env_id, **settings), i) for i in range(num_envs)
        ]
        self.asynchronous = asynchronous
        self.envs = Workers(makers) if asynchronous else Local(makers)
        self.closed = False
        self.spec, self.settings = spec_of(env_id), settings
        self.num_envs = num_envs
        self.single_observation_space = self.envs.single_observation_space
        self.single_action_space = self.envs.single_action_space
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
        newest = newest_version(self.spec)
        self.note = f"{env_id} is out of date: {newest} is there" if newest != self.spec.id else ""
        if self.spec.nondeterministic:
            self.note = f"{env_id} is not deterministic: after an interruption the learner is exact, episodes restart"
        self.restore_note = ""
        self.replay_tick: Callable[[float], None] = lambda share: None
        self.obs: np.ndarray | None = None
        self.episode_returns = np.zeros(num_envs)
        self.episode_lengths = np.zeros(num_envs, dtype=np.int64)
        self.episode_starts = np.zeros(num_envs)  # seconds

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        """Begin new episodes. Neighbouring seeds share no simulator's seed."""
        seeds = None
        if seed is not None:
            children = np.random.SeedSequence(seed).spawn(self.num_envs)
            seeds = [int(child.generate_state(1)[0]) >> 1 for child in children]
        self.obs, info = self.envs.ask("reset", seeds, options)
        self._begin(np.ones(self.num_envs, dtype=bool))
        return self.obs, info

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict]:
        """`actions`: `[num_envs, A]`, within the bounds.

        Raises:
            WorkerError: a worker process has died.
        """
        obs, rewards, terminations, truncations, info = self.envs.ask("step", actions)
        self.obs = obs
        self.episode_returns += rewards
        self.episode_lengths += 1
        ended = terminations | truncations
        if ended.any():
            final_obs = obs.copy()
            for i in ended.nonzero()[0]:
                final_obs[i] = info["final_obs"][i]
            info = {
                "final_obs": final_obs,
                "_final_obs": ended,
                "episode": {
                    "r": np.where(ended, self.episode_returns, 0.0),
                    "l": np.where(ended, self.episode_lengths, 0),
                    "t": np.where(ended, time.perf_counter() - self.episode_starts, 0.0),
                },
                "_episode": ended,
            }
            self._begin(ended)
        return self.obs, rewards, terminations, truncations, info

    @property
    def waiting(self) -> Callable[[], None]:
        return getattr(self.envs, "waiting", lambda: None)

    @waiting.setter
    def waiting(self, call: Callable[[], None]) -> None:
        self.envs.waiting = call

    def _begin(self, mask: np.ndarray) -> None:
        self.episode_returns[mask] = 0.0
        self.episode_lengths[mask] = 0
        self.episode_starts[mask] = time.perf_counter()

    def state_dict(self) -> dict[str, Any]:
        histories = self.envs.ask("call", "history")
        return {
            "histories": [{**one, "actions": torch.from_numpy(one["actions"])} for one in histories],
            "obs": torch.from_numpy(self.obs.copy()),
            "episode_returns": self.episode_returns.tolist(),
            "episode_lengths": self.episode_lengths.tolist(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Play the current episodes up to where they were. Where the observations differ then, because the simulator is
        another version or not deterministic, new episodes begin.

        Raises:
            ValueError: of another number of environments.
            WorkerError: a worker process has died.
        """
        histories = [{**one, "actions": one["actions"].numpy()} for one in state["histories"]]
        if len(histories) != self.num_envs:
            raise ValueError(f"the state of {len(histories)} environments, not {self.num_envs}")
        self.envs.ask("call", "begin_replay", histories)
        most = max(len(one["actions"]) for one in histories)
        left = most
        while left:
            self.replay_tick(1 - left / most)
            left = max(self.envs.ask("call", "replay", REPLAY_CHUNK))
        self.obs = np.stack(self.envs.ask("call", "obs"))
        same = np.array_equal(self.obs, state["obs"].numpy())
        if not same or list(self.envs.ask("call", "rewards")) != state["episode_returns"]:
            self.restore_note = "the simulator plays differently now: the learner is exact, episodes restart"
            self.reset()
            return
        self.restore_note = ""
        self._begin(np.ones(self.num_envs, dtype=bool))
        self.episode_returns = np.array(state["episode_returns"])
        self.episode_lengths = np.array(state["episode_lengths"])

    def close_extras(self, **kwargs: Any) -> None:
        self.envs.close()

    def describe(self) -> dict[str, Any]:
        """Settings for config.json: what the id is registered with, its spaces, where the simulators run."""
        kwargs = {**self.spec.kwargs, **self.settings}.items()
        return {
            "max_episode_steps": self.spec.max_episode_steps,
            **{key: value if type(value) in (int, float, str, bool) else str(value) for key, value in kwargs},
            "observation_space": str(self.single_observation_space),
            "action_space": str(self.single_action_space),
            "processes": self.num_envs if self.asynchronous else 0,
        }
