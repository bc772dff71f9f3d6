"""Agent steps a second of ppo_atari_ray.py's actors beside ppo_atari.py with as many environments, in turn.

python benchmark/actors.py --num-actors 2 --envs-per-actor 8 --rounds 5
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent


def speed(words: list[str], folder: str) -> float:
    """`charts/SPS` of a whole run: the first iteration left out."""
    line = [sys.executable, str(ROOT / words[0]), *words[1:], "--runs-dir", folder, "--run-name", "a"]
    done = subprocess.run([*line, "--resume", "never", "--spot-watch", "off"], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(words)} left with {done.returncode}: {done.stderr.strip()}")
    return json.loads((Path(folder) / "a" / "summary.json").read_text())["sps"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-actors", type=int, default=2)
    parser.add_argument("--envs-per-actor", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=6, help="rollouts of 128 steps and updates a run")
    args = parser.parse_args()
    num_envs = args.num_actors * args.envs_per_actor
    total = ["--total-timesteps", str(args.iterations * 128 * num_envs)]
    alone = ["ppo_atari.py", "--num-envs", str(num_envs), *total]
    actors = ["--num-actors", str(args.num_actors), "--envs-per-actor", str(args.envs_per_actor)]
    spread = ["ppo_atari_ray.py", *actors, *total]
    for words in (alone, spread):
        print("$ python", *words)
    ratios, speeds = [], {"alone": [], "actors": []}
    for number in range(args.rounds):
        with tempfile.TemporaryDirectory() as folder:
            one, other = speed(alone, f"{folder}/1"), speed(spread, f"{folder}/2")
        speeds["alone"].append(one)
        speeds["actors"].append(other)
        ratios.append(other / one)
        print(f"round {number + 1}: {one:,.0f} alone, {other:,.0f} with actors, {ratios[-1]:.2f}", flush=True)
    middle = {name: statistics.median(values) for name, values in speeds.items()}
    print(
        f"medians: {middle['alone']:,.0f} alone, {middle['actors']:,.0f} with actors; "
        f"ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    )


if __name__ == "__main__":
    main()
