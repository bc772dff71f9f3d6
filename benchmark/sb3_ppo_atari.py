"""Stable-Baselines3's PPO on the same game with ppo_atari.py's default hyperparameters, timed. Prints one JSON line.

Its environments, wrappers, policy and loop are its own, one subprocess an environment as its documentation advises.
"""

import argparse
import json
import time

import ale_py
import gymnasium as gym
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_atari_env
from stable_baselines3.common.vec_env import SubprocVecEnv, VecFrameStack

gym.register_envs(ale_py)  # here, for the worker processes too


class IterationTimes(BaseCallback):
    """(agent steps, seconds) at the start of each iteration."""

    def _on_training_start(self) -> None:
        self.times: list[tuple[int, float]] = []

    def _on_rollout_start(self) -> None:
        self.times.append((self.num_timesteps, time.perf_counter()))

    def _on_step(self) -> bool:
        return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--env-id", default="BreakoutNoFrameskip-v4")
    parser.add_argument("--num-envs", type=int, default=8)
    parser.add_argument("--total-timesteps", type=int, default=10_240)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()

    envs = make_atari_env(args.env_id, n_envs=args.num_envs, seed=args.seed, vec_env_cls=SubprocVecEnv)
    model = PPO(
        "CnnPolicy",
        VecFrameStack(envs, n_stack=4),
        learning_rate=lambda left: left * 2.5e-4,
        n_steps=128,
        batch_size=32 * args.num_envs,
        n_epochs=4,
        gamma=0.99,
        gae_lambda=0.95,
        clip_range=0.1,
        clip_range_vf=0.1,
        ent_coef=0.01,
        vf_coef=0.5,
        max_grad_norm=0.5,
        seed=args.seed,
        device=args.device,
    )
    callback = IterationTimes()
    model.learn(args.total_timesteps, callback)
    end = model.num_timesteps, time.perf_counter()
    envs.close()
    start = callback.times[1]  # the first iteration warms up
    print(json.dumps({"sps": (end[0] - start[0]) / (end[1] - start[1])}))


if __name__ == "__main__":
    main()
