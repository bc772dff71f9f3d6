"""Stable-Baselines3's PPO with ppo_continuous.py's default hyperparameters, timed. Prints one JSON line.

Its environments, normalisation (`VecNormalize`), policy and loop are its own, with one torch thread.
"""

import argparse
import json
import time

import gymnasium as gym
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize


class Watch(BaseCallback):
    """(agent steps, seconds) at the start of each iteration, and the return of each episode."""

    def _on_training_start(self) -> None:
        self.times: list[tuple[int, float]] = []
        self.returns: list[float] = []

    def _on_rollout_start(self) -> None:
        self.times.append((self.num_timesteps, time.perf_counter()))

    def _on_step(self) -> bool:
        self.returns += [info["episode"]["r"] for info in self.locals["infos"] if "episode" in info]
        return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--env-id", default="HalfCheetah-v5")
    parser.add_argument("--num-envs", type=int, default=1)
    parser.add_argument("--total-timesteps", type=int, default=20_480)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()

    torch.set_num_threads(1)
    envs = DummyVecEnv([lambda: Monitor(gym.make(args.env_id))] * args.num_envs)
    model = PPO(
        "MlpPolicy",
        VecNormalize(envs, gamma=0.99),
        learning_rate=lambda left: left * 3e-4,
        n_steps=2048,
        batch_size=64 * args.num_envs,
        n_epochs=10,
        gamma=0.99,
        gae_lambda=0.95,
        clip_range=0.2,
        clip_range_vf=0.2,
        ent_coef=0.0,
        vf_coef=0.5,
        max_grad_norm=0.5,
        seed=args.seed,
        device="cpu",
    )
    watch = Watch()
    model.learn(args.total_timesteps, watch)
    end = model.num_timesteps, time.perf_counter()
    start = watch.times[1]  # the first iteration warms up
    last = watch.returns[-100:]
    mean_return = sum(last) / len(last) if last else None
    print(json.dumps({"sps": (end[0] - start[0]) / (end[1] - start[1]), "mean_return": mean_return}))


if __name__ == "__main__":
    main()
