"""Stable-Baselines3's DQN on the same game with dqn_atari.py's hyperparameters, timed. Prints one JSON line.

Its environment, wrappers, policy, memory and loop are its own: one environment, as its documentation has it. Timed
after learning has started.
"""

import argparse
import json
import time

import ale_py
import gymnasium as gym
from stable_baselines3 import DQN
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_atari_env
from stable_baselines3.common.vec_env import VecFrameStack

gym.register_envs(ale_py)


class StartOfLearning(BaseCallback):
    """Agent steps and time at the first step after `start`, and at the last one."""

    def __init__(self, start: int) -> None:
        super().__init__()
        self.start, self.first, self.last = start, None, None

    def _on_step(self) -> bool:
        now = self.num_timesteps, time.perf_counter()
        if self.first is None and self.num_timesteps > self.start:
            self.first = now
        self.last = now
        return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--env-id", default="BreakoutNoFrameskip-v4")
    parser.add_argument("--total-timesteps", type=int, default=5_000)
    parser.add_argument("--buffer-size", type=int, default=10_000)
    parser.add_argument("--learning-starts", type=int, default=1_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()

    model = DQN(
        "CnnPolicy",
        VecFrameStack(make_atari_env(args.env_id, n_envs=1, seed=args.seed), n_stack=4),
        learning_rate=1e-4,
        buffer_size=args.buffer_size,
        learning_starts=args.learning_starts,
        batch_size=32,
        gamma=0.99,
        train_freq=4,
        gradient_steps=1,
        target_update_interval=1000,
        exploration_fraction=0.10,
        exploration_initial_eps=1.0,
        exploration_final_eps=0.01,
        seed=args.seed,
        device=args.device,
    )
    callback = StartOfLearning(args.learning_starts + 1_000)  # the first thousand steps warm up, as in ours
    model.learn(args.total_timesteps, callback)
    (first, since), (last, until) = callback.first, callback.last
    print(json.dumps({"sps": (last - first) / (until - since)}))


if __name__ == "__main__":
    main()
