"""Atari games as one gymnasium vector environment with whole-game statistics.

The emulators, their threads and the usual preprocessing (Machado et al. 2018, https://arxiv.org/abs/1709.06009:
no-op starts, frame skip with max-pooling, 84 x 84 grey frames, stacks of 4) are ale-py's `AtariVectorEnv`.
"""

import difflib
import os
import time
from collections.abc import Callable
from typing import Any

import ale_py
import gymnasium as gym
import numpy as np
import torch
from ale_py.vector_env import AtariVectorEnv
from gymnasium.vector import AutoresetMode, VectorEnv

from common.errors import UsageError

gym.register_envs(ale_py)

ATARI = "ale_py.env:AtariEnv"

# The usual preprocessing, all of it by name: what defaults leave open has changed between versions before.
PREPROCESSING: dict[str, Any] = {
    "noop_max": 30,
    "use_fire_reset": True,  # pressed once after a reset of games that have it, not after a lost life
    "maxpool": True,
    "grayscale": True,
    "img_height": 84,
    "img_width": 84,
    "stack_num": 4,
}


def atari_settings(env_id: str) -> dict[str, Any]:
    """What a registered id says about its game, as keyword arguments of `AtariVectorEnv`.

    A `NoFrameskip` id is registered with a frame skip of 1 because the preprocessing does the usual 4.

    Raises:
        UsageError: an unknown id, not an Atari game, or a frame skip that is drawn at random.
    """
    try:
        spec = gym.spec(env_id)
    except (gym.error.Error, ImportError) as error:
        raise UsageError(f"--env-id {env_id}: {unknown_id(env_id, error)}") from None
    if spec.entry_point != ATARI:
        raise UsageError(f"--env-id {env_id}: not an Atari game; this script plays ids such as BreakoutNoFrameskip-v4")
    settings = {key: value for key, value in spec.kwargs.items() if value is not None}
    frameskip = settings["frameskip"]
    if not isinstance(frameskip, int):
        base = spec.name
        raise UsageError(
            f"--env-id {env_id}: skips {frameskip[0]} to {frameskip[1] - 1} frames at random, which does not fit the "
            f"fixed skip of 4; use {base}NoFrameskip-v4 or ALE/{base}-v5"
        )
    if frameskip == 1 and "NoFrameskip" in spec.name:
        settings["frameskip"] = 4
    known = {"game", "repeat_action_probability", "full_action_space", "frameskip", "max_num_frames_per_episode"}
    extra = sorted(settings.keys() - known) + ["max_episode_steps"] * (spec.max_episode_steps is not None)
    extra += ["additional_wrappers"] * bool(spec.additional_wrappers)
    if extra:
        raise UsageError(f"--env-id {env_id}: the vector environment has no setting for its {', '.join(extra)}")
    return settings


def unknown_id(env_id: str, error: Exception) -> str:
    usable = [
        spec.id
        for spec in gym.registry.values()
        if spec.entry_point == ATARI and isinstance(spec.kwargs["frameskip"], int)
    ]
    by_lower = {name.lower(): name for name in usable}
    close = difflib.get_close_matches(env_id.lower(), by_lower, n=3, cutoff=0.5)
    if not close:
        return f"{error} Ids look like BreakoutNoFrameskip-v4 or ALE/Breakout-v5"
    return f"unknown; did you mean {' or '.join(by_lower[name] for name in close)}?"


# A restore resets an emulator as often as since its last seed, or, with sticky actions, plays everything since. A new
# seed loads the game's ROM again (0.1 s) and is given at the end of a game.
GAMES_PER_SEED = 50
STICKY_STEPS_PER_SEED = 2_000


def emulator_seeds(seed: int, reseeds: np.ndarray, first: int = 0) -> np.ndarray:
    """Seeds of environments `first`, `first + 1` ..., that were reseeded so often each, `[num_envs]` -> `[num_envs]`, 0
    to 2^31 - 1.

    ale-py takes negative seeds for none. With plain `seed + i` runs of neighbouring seeds would share most games.
    """
    children = [np.random.SeedSequence(seed, spawn_key=(first + i,)) for i in range(len(reseeds))]
    words = [child.generate_state(count + 1)[count] for child, count in zip(children, reseeds, strict=True)]
    return np.array([word >> 1 for word in words], dtype=np.int64)


class ActionLog:
    """The last actions of each environment, of some more than of others, one byte each."""

    def __init__(self, num_envs: int) -> None:
        self.rows = np.zeros((1024, num_envs), dtype=np.uint8)
        self.starts = np.zeros(num_envs, dtype=np.int64)
        self.end = 0

    def append(self, actions: np.ndarray) -> None:
        if self.end == len(self.rows):
            first = self.starts.min()
            kept = self.rows[first : self.end]
            self.rows = np.zeros((max(1024, 2 * len(kept)), kept.shape[1]), dtype=np.uint8)
            self.rows[: len(kept)] = kept
            self.starts -= first
            self.end -= first
        self.rows[self.end] = actions
        self.end += 1

    def restart(self, mask: np.ndarray) -> None:
        self.starts[mask] = self.end

    def lengths(self) -> np.ndarray:
        return self.end - self.starts

    def of(self, i: int) -> np.ndarray:
        return self.rows[self.starts[i] : self.end, i]


class AtariEnvs(VectorEnv):
    """`num_envs` copies of a game in SAME_STEP autoreset mode.

    Observations are `[num_envs, 4, 84, 84]` uint8, the newest frame last; a stack is zero-padded after a reset.
    Rewards are the game's own, not clipped, float32. A lost life is a termination although the game goes on, as in
    Mnih et al. 2015. When a whole game ended (`info["_episode"]`), `info["episode"]` holds its return `r`, its
    length `l` in agent steps and its duration `t` in seconds. Where a row terminated or was truncated
    (`info["_final_obs"]`), `info["final_obs"]` holds its true last observation; all rows of it can be read.

    `send` and `recv` are the two halves of `step`, to do something else while the emulators work.

    The emulators can't be saved, but they can be brought to the same state again: a game is a function of its
    emulator's seed, the number of resets since it was seeded, and the actions since the last reset. With sticky
    actions, which draw a random number each frame, it is one of the seed and all actions since. `state_dict` holds
    these, and `load_state_dict` plays them again. Emulators are reseeded now and then, which keeps that short.

    Attributes:
        obs: the last observations, `[num_envs, 4, 84, 84]` uint8.
        replay_tick: called with the share that is done while `load_state_dict` plays; may raise.
        restore_note: what the user should know of the last `load_state_dict`, else empty.
    """

    def __init__(self, env_id: str, num_envs: int, num_threads: int = 0, first: int = 0, **overrides: Any) -> None:
        """
        Args:
            env_id: id of an Atari game.
            num_threads: of emulation; 0: one a core, at most one an environment.
            first: number of its first environment, where others have those before it.
            overrides: of `AtariVectorEnv`'s keyword arguments.

        Raises:
            UsageError: see `atari_settings`.
        """
        self.settings = PREPROCESSING | atari_settings(env_id) | overrides
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.num_threads = num_threads or min(num_envs, cores)
        self.envs = AtariVectorEnv(
            num_envs=num_envs,
            num_threads=self.num_threads,
            autoreset_mode=AutoresetMode.SAME_STEP,
            episodic_life=False,  # this would reset the whole game at each lost life
            life_loss_info=True,
            reward_clipping=False,
            **self.settings,
        )
        self.num_envs, self.first = num_envs, first
        self.single_observation_space = self.envs.single_observation_space
        self.single_action_space = self.envs.single_action_space
        self.observation_space = self.envs.observation_space
        self.action_space = self.envs.action_space
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
        self.sticky = self.settings["repeat_action_probability"] > 0
        self.obs: np.ndarray | None = None
        self.replay_tick: Callable[[float], None] = lambda share: None
        self.restore_note = ""
        self.seed: int | None = None
        self.reseeds = np.zeros(num_envs, dtype=np.int64)
        self.resets = np.zeros(num_envs, dtype=np.int64)  # without a seed, since the last one with a seed
        self.log = ActionLog(num_envs)  # since the last reset; with sticky actions since the last seed
        self.episode_returns = np.zeros(num_envs)
        self.episode_lengths = np.zeros(num_envs, dtype=np.int64)
        self.episode_starts = np.zeros(num_envs)  # seconds
        self.reset_frames = np.zeros(num_envs, dtype=np.int64)  # of the emulator when the current game began

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        """Begin new games. Without a seed they go on in the sequence of games that the last seed began."""
        if options:
            raise ValueError(f"no options are known to this environment, got {sorted(options)}")
        if seed is None and self.seed is not None:
            self.reseeds += 1
        else:
            self.seed = np.random.SeedSequence().generate_state(1)[0].item() if seed is None else seed
            self.reseeds[:] = 0
        everyone = np.ones(self.num_envs, dtype=bool)
        info = self._seed(everyone)
        self._begin(everyone)
        return self.obs, info

    def _seed(self, mask: np.ndarray) -> dict[str, Any]:
        """Begin new games with new seeds in some environments. Returns the info of all."""
        seeds = emulator_seeds(self.seed, self.reseeds, self.first)[mask]
        self.obs, info = self.envs.reset(seed=seeds, options=None if mask.all() else {"reset_mask": mask})
        self.resets[mask] = 0
        self.log.restart(mask)
        self.reset_frames = info["frame_number"] - info["episode_frame_number"]
        return info

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict]:
        self.send(actions)
        return self.recv()

    def send(self, actions: np.ndarray) -> None:
        """Start a step. `actions`: `[num_envs]` integers.

        Raises:
            ValueError: an action that the game does not have; ale-py's `recv` would wait for ever.
        """
        actions = np.asarray(actions)
        num_actions = self.single_action_space.n
        if actions.shape != (self.num_envs,) or actions.dtype.kind not in "iu":
            raise ValueError(f"actions must be {self.num_envs} integers, got {actions.dtype} {actions.shape}")
        if actions.min() < 0 or actions.max() >= num_actions:
            raise ValueError(f"actions must be 0 to {num_actions - 1}, got {actions}")
        self.log.append(actions)
        self.envs.send(actions.astype(np.int64, copy=False))

    def recv(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict]:
        """Finish the step that `send` started."""
        obs, rewards, terminations, truncations, info = self.envs.recv()
        self.obs = obs
        self.episode_returns += rewards
        self.episode_lengths += 1
        # not the flags: a life may be lost, and not every restarted game reports its end
        reset_frames = info["frame_number"] - info["episode_frame_number"]
        ended = reset_frames != self.reset_frames
        self.reset_frames = reset_frames
        done = terminations | truncations
        if done.any():
            # rows of games that go on are uninitialised memory
            info["final_obs"][~ended] = obs[~ended]
            info["_final_obs"] = done
        if ended.any():
            info["episode"] = {
                "r": np.where(ended, self.episode_returns, 0.0),
                "l": np.where(ended, self.episode_lengths, 0),
                "t": np.where(ended, time.perf_counter() - self.episode_starts, 0.0),
            }
            info["_episode"] = ended
            self._begin(ended)
            self.resets[ended] += 1
            if self.sticky:
                due = ended & (self.log.lengths() >= STICKY_STEPS_PER_SEED)
            else:
                self.log.restart(ended)
                due = ended & (self.resets >= GAMES_PER_SEED)
            if due.any():
                self.reseeds[due] += 1
                self._seed(due)
        return self.obs, rewards.astype(np.float32), terminations, truncations, info

    def _begin(self, mask: np.ndarray) -> None:
        self.episode_returns[mask] = 0.0
        self.episode_lengths[mask] = 0
        self.episode_starts[mask] = time.perf_counter()

    def state_dict(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "reseeds": self.reseeds.tolist(),
            "resets": self.resets.tolist(),
            "actions": [torch.from_numpy(self.log.of(i).copy()) for i in range(self.num_envs)],
            "obs": torch.from_numpy(self.obs.copy()),
            "episode_returns": self.episode_returns.tolist(),
            "episode_lengths": self.episode_lengths.tolist(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Play until every emulator is in the saved state.

        All step together, the one with the longest log first; each is seeded and reset when as many steps are left as
        its own log has. Where the observations differ then, from another ale-py say, new games begin.

        Raises:
            ValueError: of another number of environments, or actions that the game does not have.
        """
        if len(state["actions"]) != self.num_envs:
            raise ValueError(f"the state of {len(state['actions'])} environments, not {self.num_envs}")
        lengths = np.array([len(actions) for actions in state["actions"]])
        steps = lengths.max()
        actions = np.zeros((steps, self.num_envs), dtype=np.int64)
        for i, log in enumerate(state["actions"]):
            actions[steps - lengths[i] :, i] = log.numpy()
        if actions.size and actions.max() >= self.single_action_space.n:  # ale-py's recv would wait for ever
            raise ValueError(f"action {actions.max()} in a game with {self.single_action_space.n}")
        self.seed, self.reseeds = state["seed"], np.array(state["reseeds"])
        resets = np.zeros(self.num_envs, dtype=np.int64) if self.sticky else np.array(state["resets"])

        info = self._seed(np.ones(self.num_envs, dtype=bool))
        for step in range(steps + 1):
            begins = lengths == steps - step
            if begins.any():
                if step:
                    info = self._seed(begins)
                for number in range(resets[begins].max()):
                    self.replay_tick(step / (steps + 1))
                    self.obs, info = self.envs.reset(options={"reset_mask": begins & (resets > number)})
            if step < steps:
                self.replay_tick(step / (steps + 1))
                self.envs.send(actions[step])
                self.obs, *_, info = self.envs.recv()

        if not np.array_equal(self.obs, state["obs"].numpy()):
            self.restore_note = "the emulators play differently now: the learner is exact, games restart"
            self.reset()
            return
        self.restore_note = ""
        self.resets = np.array(state["resets"])
        self.log = ActionLog(self.num_envs)
        for row in actions:
            self.log.append(row)
        self.log.starts = self.log.end - lengths
        self.reset_frames = info["frame_number"] - info["episode_frame_number"]
        self._begin(np.ones(self.num_envs, dtype=bool))
        self.episode_returns = np.array(state["episode_returns"])
        self.episode_lengths = np.array(state["episode_lengths"])

    def close_extras(self, **kwargs: Any) -> None:
        del self.envs  # its destructor ends the threads

    def describe(self) -> dict[str, Any]:
        """Settings for config.json: preprocessing, sticky actions, frame skip, action set, emulator seeds, threads."""
        return self.settings | {
            "threads": self.num_threads,
            "actions": [action.name for action in self.envs.ale.get_action_set()],
            "emulator_seeds": emulator_seeds(self.seed, self.reseeds, self.first).tolist(),
        }
