"""What PPO on Atari cannot be faster than on this machine: its three parts, each alone. Prints one JSON line.

Environment alone (the emulators with random actions), inference alone (frames to sampled actions for all
environments), and forward and backward alone (the minibatches of an iteration), timed in turn in one process, in the
fastest memory layout of those tried here. No optimiser, no bookkeeping, no logging. The sum is the floor of a loop
that does the parts one after the other.

Environment and inference are also timed in turn, step by step, as every loop has to run them: each then finds its
caches and its cores used by the other. `sps_in_turn` is the floor with that figure in place of the two alone.
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

LAYOUTS = {"channels last": torch.channels_last, "channels first": torch.contiguous_format}


class Part:
    """One part of the work, run for a window at a time."""

    def __init__(self, body: Callable[[], object], calls: int, agent_steps: int) -> None:
        """`calls` of `body` do the part's work for `agent_steps`."""
        self.body, self.calls, self.agent_steps = body, calls, agent_steps
        self.windows: list[float] = []  # microseconds an agent step

    def run(self) -> None:
        start = time.perf_counter()
        for _ in range(self.calls):
            self.body()
        self.windows.append((time.perf_counter() - start) / self.agent_steps * 1e6)

    def microseconds(self) -> float:
        return statistics.median(self.windows[1:])  # the first one warms up


def network(num_actions: int) -> nn.Sequential:
    """The convolutional network of Mnih et al. 2015 with all heads as one layer."""
    return nn.Sequential(
        *(nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, num_actions + 1)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--env-id", default="BreakoutNoFrameskip-v4")
    parser.add_argument("--num-envs", type=int, default=8)
    parser.add_argument("--num-steps", type=int, default=128)
    parser.add_argument("--num-minibatches", type=int, default=4)
    parser.add_argument("--update-epochs", type=int, default=4)
    parser.add_argument("--windows", type=int, default=5)
    parser.add_argument("--environment", action="store_true", help="the emulators only")
    args = parser.parse_args()

    batch_size = args.num_envs * args.num_steps
    envs = AtariEnvs(args.env_id, args.num_envs)
    frames, _ = envs.reset(seed=1)
    num_actions = envs.single_action_space.n
    random_actions = np.random.default_rng(1).integers(0, num_actions, (997, args.num_envs))
    steps = iter(range(10**9))
    parts = {"environment": Part(lambda: envs.step(random_actions[next(steps) % 997]), args.num_steps, batch_size)}

    torch.manual_seed(1)
    for layout, memory_format in LAYOUTS.items() if not args.environment else ():
        net = network(num_actions).to(memory_format=memory_format)
        # uint8 in the layout's own order, so that no float has to be moved
        obs = torch.randint(0, 256, (batch_size // args.num_minibatches, 4, 84, 84), dtype=torch.uint8)
        obs = obs.contiguous(memory_format=memory_format)

        def infer(net=net, memory_format=memory_format) -> torch.Tensor:
            with torch.no_grad():
                x = torch.from_numpy(frames).contiguous(memory_format=memory_format)
                logits = net(x.float().mul_(1 / 255))[:, :-1]
                return logits.softmax(1).multinomial(1)

        def learn(net=net, obs=obs) -> None:
            net(obs.float().mul_(1 / 255)).square().mean().backward()
            for parameter in net.parameters():
                parameter.grad = None

        def step(infer=infer) -> None:
            nonlocal frames
            envs.send(infer().flatten().numpy())
            frames = envs.recv()[0]

        parts[f"in turn, {layout}"] = Part(step, args.num_steps, batch_size)
        parts[f"inference, {layout}"] = Part(infer, args.num_steps, batch_size)
        parts[f"learning, {layout}"] = Part(learn, args.num_minibatches * args.update_epochs, batch_size)

    for _ in range(args.windows + 1):
        for part in parts.values():
            part.run()
    envs.close()

    us = {name: part.microseconds() for name, part in parts.items()}
    if args.environment:
        print(json.dumps({"sps": 1e6 / us["environment"], "microseconds_per_agent_step": us}))
        return
    names = ("inference", "in turn", "learning")
    best = {name: min(value for key, value in us.items() if key.startswith(name)) for name in names}
    alone = us["environment"] + best["inference"] + best["learning"]
    in_turn = best["in turn"] + best["learning"]
    print(json.dumps({"sps": 1e6 / alone, "sps_in_turn": 1e6 / in_turn, "microseconds_per_agent_step": us}))


if __name__ == "__main__":
    main()
