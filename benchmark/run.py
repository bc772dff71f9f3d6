"""How fast ppo_atari.py is on this machine: beside Stable-Baselines3's PPO, and against its own floor.

Each round runs the programs in turn, every other one backwards, so that a machine whose speed drifts treats them
alike. The figures are medians over the rounds, and ratios are taken within each round. The first iteration of each
program warms up and is left out.
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from common.files import write_json  # noqa: E402
from common.run import describe_machine  # noqa: E402

FLAGS = ["--env-id", "BreakoutNoFrameskip-v4"]


def run(command: list[str], cwd: Path) -> str:
    """Run a command, printed first, and return its standard output. Exits with its errors and status 1 if it fails."""
    print("$", shlex.join(["python", *command]), flush=True)
    absolute = [sys.executable, str(ROOT / command[0]), *command[1:]]
    done = subprocess.run(absolute, cwd=cwd, capture_output=True, text=True)
    if done.returncode != 0:
        print(done.stderr, file=sys.stderr)
        sys.exit(f"error: {command[0]} ended with status {done.returncode}")
    return done.stdout


def measure_ours(steps: int, folder: Path) -> dict:
    run(
        [
            "ppo_atari.py",
            *FLAGS,
            "--device",
            "cpu",
            "--total-timesteps",
            str(steps),
            "--run-name",
            "ours",
            "--runs-dir",
            ".",
        ],
        folder,
    )
    return json.loads((folder / "ours" / "summary.json").read_text())


def measure(script: str, *flags: str) -> dict:
    return json.loads(run([f"benchmark/{script}", *FLAGS, *flags], ROOT).splitlines()[-1])


def spread(values: list[float]) -> dict[str, float]:
    return {"min": min(values), "median": statistics.median(values), "max": max(values)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10_240, help="agent steps a program and round")
    parser.add_argument("--no-peers", action="store_true", help="leave Stable-Baselines3 out")
    parser.add_argument(
        "--json", type=Path, default=ROOT / "benchmark" / "results" / "speed.json", help="where to write"
    )
    args = parser.parse_args()
    if args.rounds < 1 or args.steps < 2048:
        parser.error("--rounds must be at least 1, --steps at least 2048: one iteration warms up")
    if not os.access(args.json.parent if args.json.parent.exists() else args.json.parent.parent, os.W_OK):
        parser.error(f"--json: cannot write into {args.json.parent}")

    rounds = []
    for number in range(1, args.rounds + 1):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            programs = {
                "ours": lambda folder=folder: measure_ours(args.steps, folder),
                "sb3": lambda: measure("sb3_ppo_atari.py", "--total-timesteps", str(args.steps)),
                "floor": lambda: measure("floor.py"),
            }
            if args.no_peers:
                del programs["sb3"]
            order = list(programs) if number % 2 else list(programs)[::-1]
            result = {program: programs[program]() for program in order}
        rounds.append(result)
        rates = "  ".join(f"{name} {values['sps']:.0f}" for name, values in result.items())
        print(f"round {number}/{args.rounds}, agent steps/s: {rates}", flush=True)

    ours = [one["ours"]["sps"] for one in rounds]
    figures = {f"{name}_sps": spread([one[name]["sps"] for one in rounds]) for name in sorted(rounds[0])}
    for name in sorted(rounds[0].keys() - {"ours"}):
        figures[f"ours_over_{name}"] = spread([a / one[name]["sps"] for a, one in zip(ours, rounds, strict=True)])
    in_turn = [a / one["floor"]["sps_in_turn"] for a, one in zip(ours, rounds, strict=True)]
    figures["ours_over_floor_in_turn"] = spread(in_turn)
    figures["ours_peak_memory_mib"] = spread([one["ours"]["peak_memory_mib"] for one in rounds])
    args.json.parent.mkdir(parents=True, exist_ok=True)
    machine = describe_machine(torch.device("cpu"))
    write_json(
        args.json, {"schema": 1, "command": sys.argv[1:], "machine": machine, "figures": figures, "rounds": rounds}
    )

    print(f"{machine['cpu']}, {machine['cores']} cores, torch {machine['packages']['torch']}, fp32, Breakout, 8 x 128")
    for name, values in figures.items():
        digits = 2 if "_over_" in name else 0
        low, median, high = (f"{values[key]:.{digits}f}" for key in ("min", "median", "max"))
        print(f"{name:24} median {median:>6}  (min {low}, max {high})")
    print(f"written to {args.json}")


if __name__ == "__main__":
    main()
