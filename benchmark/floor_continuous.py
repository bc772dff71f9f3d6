"""What PPO on continuous control cannot be faster than on this machine: its parts, each alone. Prints one JSON line.

Simulator alone (random actions), inference alone (one observation to one mean, the network in NumPy), normalisation
alone (statistics of one observation and one reward), and forward and backward alone (both networks, the minibatches of
an iteration, the loss a plain sum), timed in turn in one process with one torch thread. No optimiser, no loss, no
bookkeeping, no logging.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import common.cpu  # noqa: F401  isort: skip  (before torch)

import numpy as np
import torch
import torch.nn as nn

from common.control import make_env
from common.running import RunningMeanStd
from common.tiny import in_numpy


def mlp(num_inputs: int, num_outputs: int) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Linear(num_inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, num_outputs))
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--env-id", default="HalfCheetah-v5")
    parser.add_argument("--num-steps", type=int, default=2048)
    parser.add_argument("--num-minibatches", type=int, default=32)
    parser.add_argument("--update-epochs", type=int, default=10)
    parser.add_argument("--windows", type=int, default=5)
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(1)
    env = make_env(args.env_id)
    env.reset(seed=1)
    num_observations, num_actions = env.observation_space.shape[0], env.action_space.shape[0]
    random_actions = np.random.default_rng(1).uniform(-1, 1, (997, num_actions)).astype(np.float32)
    steps = iter(range(10**9))
    actor, critic = mlp(num_observations, num_actions), mlp(num_observations, 1)
    actor_in_numpy = in_numpy(actor)
    row = np.zeros(num_observations, dtype=np.float32)
    minibatch = torch.randn(args.num_steps // args.num_minibatches, num_observations)
    obs_rms, return_rms = RunningMeanStd(num_observations), RunningMeanStd()
    samples, rewards = np.random.default_rng(2).normal(size=(1, num_observations)), np.ones(1)

    def simulate() -> None:
        *_, terminated, truncated, _ = env.step(random_actions[next(steps) % 997])
        if terminated or truncated:
            env.reset()

    def normalise() -> None:
        obs_rms.update(samples)
        return_rms.update(rewards)
        (samples - obs_rms.mean) / obs_rms.std()

    def learn() -> None:
        (actor(minibatch).sum() + critic(minibatch).sum()).backward()
        for parameter in (*actor.parameters(), *critic.parameters()):
            parameter.grad = None

    parts = {
        "simulator": (simulate, args.num_steps),
        "inference": (lambda: actor_in_numpy(row), args.num_steps),
        "normalisation": (normalise, args.num_steps),
        "learning": (learn, args.num_minibatches * args.update_epochs),
    }
    windows: dict[str, list[float]] = {name: [] for name in parts}
    for _ in range(args.windows + 1):
        for name, (body, calls) in parts.items():
            start = time.perf_counter()
            for _ in range(calls):
                body()
            windows[name].append((time.perf_counter() - start) / args.num_steps * 1e6)
    us = {name: statistics.median(values[1:]) for name, values in windows.items()}  # the first one warms up
    print(json.dumps({"sps": 1e6 / sum(us.values()), "microseconds_per_agent_step": us}))


if __name__ == "__main__":
    main()
