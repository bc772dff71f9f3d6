"""What DQN on Atari cannot be faster than on this machine: its three parts, each alone. Prints one JSON line.

Environment alone (the emulators with random actions), acting alone (frames to greedy actions for all environments), and
the update alone (targets, forward and backward passes and Adam on one batch), timed in turn in one process, in the
memory layout that dqn_atari.py uses. No replay memory, no bookkeeping, no logging. An update serves 4 agent steps.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import common.cpu  # noqa: F401  isort: skip  (before torch)

import numpy as np
import torch
import torch.nn as nn

from common.envs import AtariEnvs

BATCH_SIZE, TRAIN_FREQUENCY = 32, 4


class Part:
    """One part of the work, run for a window at a time."""

    def __init__(self, body: Callable[[], object], agent_steps: int) -> None:
        """A call of `body` does the part's work for `agent_steps`."""
        self.body, self.agent_steps = body, agent_steps
        self.windows: list[float] = []  # microseconds an agent step

    def run(self, calls: int) -> None:
        start = time.perf_counter()
        for _ in range(calls):
            self.body()
        self.windows.append((time.perf_counter() - start) / calls / self.agent_steps * 1e6)

    def microseconds(self) -> float:
        return statistics.median(self.windows[1:])  # the first one warms up


def network(num_actions: int) -> nn.Sequential:
    """The convolutional network of Mnih et al. 2015."""
    return nn.Sequential(
        *(nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, num_actions)),
    ).to(memory_format=torch.channels_last)


def values(net: nn.Module, frames: torch.Tensor) -> torch.Tensor:
    return net(frames.permute(0, 3, 1, 2).float().mul_(1 / 255))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--env-id", default="BreakoutNoFrameskip-v4")
    parser.add_argument("--num-envs", type=int, default=8)
    parser.add_argument("--windows", type=int, default=5)
    args = parser.parse_args()

    envs = AtariEnvs(args.env_id, args.num_envs)
    envs.reset(seed=1)
    num_actions = envs.single_action_space.n
    random_actions = np.random.default_rng(1).integers(0, num_actions, (997, args.num_envs))
    steps = iter(range(10**9))

    torch.manual_seed(1)
    q_network, target_network = network(num_actions), network(num_actions)
    optimizer = torch.optim.Adam(q_network.parameters(), lr=1e-4, fused=True)
    seen = torch.randint(0, 256, (args.num_envs, 84, 84, 4), dtype=torch.uint8)
    obs, next_obs = (torch.randint(0, 256, (BATCH_SIZE, 84, 84, 4), dtype=torch.uint8) for _ in range(2))

    def act() -> torch.Tensor:
        with torch.no_grad():
            return values(q_network, seen).argmax(1)

    def update() -> None:
        with torch.no_grad():
            target = values(target_network, next_obs).max(1).values
        loss = (target - values(q_network, obs)[:, 0]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    parts = {
        "environment": Part(lambda: envs.step(random_actions[next(steps) % 997]), args.num_envs),
        "acting": Part(act, args.num_envs),
        "update": Part(update, TRAIN_FREQUENCY),
    }
    for _ in range(args.windows + 1):
        for part in parts.values():
            part.run(60)
    envs.close()
    us = {name: part.microseconds() for name, part in parts.items()}
    print(json.dumps({"sps": 1e6 / sum(us.values()), "microseconds_per_agent_step": us}))


if __name__ == "__main__":
    main()
