"""What interruption costs on this machine: size and time of a checkpoint, share of training time, time of a restore.

Runs ppo_atari.py with its default sizes, saving at every iteration, and reads what it logs. Restores are timed with
emulators whose games are so many steps old and which were reset as often as they ever are between two seeds.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import common.cpu  # noqa: E402, F401  isort: skip  (before torch)

import torch  # noqa: E402
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # noqa: E402

from common.envs import GAMES_PER_SEED, AtariEnvs  # noqa: E402


def checkpoint_cost(steps: int, minutes: str) -> dict[str, float]:
    """Medians over the iterations of one run, the first one apart."""
    with tempfile.TemporaryDirectory() as folder:
        flags = [
            "--total-timesteps",
            str(steps),
            "--checkpoint-minutes",
            minutes,
            "--run-name",
            "run",
            "--device",
            "cpu",
        ]
        command = [sys.executable, str(ROOT / "ppo_atari.py"), *flags, "--run-name", "run", "--runs-dir", folder]
        print("$ python ppo_atari.py", *flags, flush=True)
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=os.environ)
        run_dir = Path(folder) / "run"
        events = EventAccumulator(str(run_dir), size_guidance={"scalars": 0})
        events.Reload()
        shares = [event.value for event in events.Scalars("time/checkpoint")][1:]
        times = [event.wall_time for event in events.Scalars("charts/SPS")]
        iterations = [after - before for before, after in itertools.pairwise(times)]
        return {
            "share": statistics.median(shares),
            "seconds": statistics.median(a * b for a, b in zip(shares, iterations, strict=True)),
            "mib": max(path.stat().st_size for path in run_dir.glob("checkpoints/step-*.pt")) / 2**20,
        }


def restore_seconds(env_id: str, num_envs: int, steps: int) -> float:
    envs = AtariEnvs(env_id, num_envs)
    envs.reset(seed=1)
    # Breakout waits for FIRE after a lost life: without an action a game goes on for ever
    state = envs.state_dict() | {
        "actions": [torch.zeros(steps, dtype=torch.uint8)] * num_envs,
        "resets": [GAMES_PER_SEED - 1] * num_envs,
    }
    ticks: list[float] = []
    envs.replay_tick = lambda share: ticks.append(time.perf_counter())
    start = time.perf_counter()
    envs.load_state_dict(state)
    envs.close()
    return ticks[-1] - start  # the made-up state is not the one that was saved: new games begin after the last tick


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--total-timesteps", type=int, default=12_288)
    parser.add_argument("--num-envs", type=int, default=8)
    parser.add_argument("--lengths", type=int, nargs="*", default=[500, 6_000, 27_000], help="steps of the games")
    args = parser.parse_args()
    saved, copied = checkpoint_cost(args.total_timesteps, "0.000001"), checkpoint_cost(args.total_timesteps, "0")
    print(f"a checkpoint of {saved['mib']:.1f} MiB: copied and saved in {saved['seconds'] * 1e3:.0f} ms", flush=True)
    print(f"copied at each iteration: {copied['seconds'] * 1e3:.1f} ms, {copied['share']:.2%} of training", flush=True)
    restores = {}
    for steps in args.lengths:
        restores[steps] = restore_seconds("BreakoutNoFrameskip-v4", args.num_envs, steps)
        print(f"restore of {args.num_envs} games {steps:,} steps old: {restores[steps]:.1f} s", flush=True)
    print(json.dumps({"saved": saved, "copied": copied, "restore_seconds": restores}))


if __name__ == "__main__":
    main()
