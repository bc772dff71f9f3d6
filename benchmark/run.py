"""How fast the training scripts are on this machine: beside Stable-Baselines3, and against their own floors.

Each round runs the programs of one script in turn, every other one backwards, so that a machine whose speed drifts
treats them alike. The figures are medians over the rounds, and ratios are taken within each round. The first iteration
of each program warms up and is left out.
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

# learning starts early, and the memory is written and read as a large one is
SMALL_MEMORY = ["--buffer-size", "10000", "--learning-starts", "1000"]

# script -> flags that all of its programs take, the programs, and agent steps a program and round
SCRIPTS: dict[str, tuple[list[str], dict[str, list[str]], int]] = {
    "ppo_atari": (
        ["--env-id", "BreakoutNoFrameskip-v4"],
        {
            "ours": ["ppo_atari.py", "--device", "cpu"],
            "sb3": ["benchmark/sb3_ppo_atari.py"],
            "floor": ["benchmark/floor.py"],
        },
        10_240,
    ),
    "ppo_continuous": (
        ["--env-id", "HalfCheetah-v5"],
        {
            "ours": ["ppo_continuous.py", "--device", "cpu"],
            "compiled": ["ppo_continuous.py", "--device", "cpu", "--compile"],
            "sb3": ["benchmark/sb3_ppo_continuous.py"],
            "floor": ["benchmark/floor_continuous.py"],
        },
        20_480,
    ),
    "dqn_atari": (
        ["--env-id", "BreakoutNoFrameskip-v4"],
        {
            "ours": ["dqn_atari.py", "--device", "cpu", *SMALL_MEMORY],
            "one_env": ["dqn_atari.py", "--device", "cpu", *SMALL_MEMORY, "--num-envs", "1"],
            "sb3": ["benchmark/sb3_dqn_atari.py", *SMALL_MEMORY],
            "floor": ["benchmark/floor_dqn.py"],
        },
        5_000,
    ),
}


def run(command: list[str], cwd: Path) -> str:
    """Run a command, printed first, and return its standard output. Exits with its errors and status 1 if it fails."""
    print("$", shlex.join(["python", *command]), flush=True)
    absolute = [sys.executable, str(ROOT / command[0]), *command[1:]]
    done = subprocess.run(absolute, cwd=cwd, capture_output=True, text=True)
    if done.returncode != 0:
        print(done.stderr, file=sys.stderr)
        sys.exit(f"error: {command[0]} ended with status {done.returncode}")
    return done.stdout


def measure(name: str, command: list[str], flags: list[str], steps: int) -> dict:
    """Run one program and return what it says of itself: our summary.json, or the last line of another's output."""
    command = [command[0], *flags, *command[1:]]
    if name == "floor":
        return json.loads(run(command, ROOT).splitlines()[-1])
    command += ["--total-timesteps", str(steps)]
    if name == "sb3":
        return json.loads(run(command, ROOT).splitlines()[-1])
    with tempfile.TemporaryDirectory() as folder:
        run([*command, "--run-name", "ours", "--runs-dir", "."], Path(folder))
        return json.loads((Path(folder) / "ours" / "summary.json").read_text())


def spread(values: list[float]) -> dict[str, float]:
    return {"min": min(values), "median": statistics.median(values), "max": max(values)}


def figures_of(rounds: list[dict]) -> dict[str, dict[str, float]]:
    """Speeds, and the ratio of ours to every other program's, each round by itself."""
    figures = {f"{name}_sps": spread([one[name]["sps"] for one in rounds]) for name in rounds[0]}
    for name in rounds[0]:
        if name != "ours":
            figures[f"ours_over_{name}"] = spread([one["ours"]["sps"] / one[name]["sps"] for one in rounds])
    if "sps_in_turn" in rounds[0]["floor"]:
        in_turn = [one["ours"]["sps"] / one["floor"]["sps_in_turn"] for one in rounds]
        figures["ours_over_floor_in_turn"] = spread(in_turn)
    for name in {"compiled", "one_env"} & rounds[0].keys():
        if "sb3" in rounds[0]:
            figures[f"{name}_over_sb3"] = spread([one[name]["sps"] / one["sb3"]["sps"] for one in rounds])
    figures["ours_peak_memory_mib"] = spread([one["ours"]["peak_memory_mib"] for one in rounds])
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scripts", nargs="+", choices=list(SCRIPTS), default=list(SCRIPTS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--steps", type=int, help="agent steps a program and round; by default 10,240, 20,480 and 5,000"
    )
    parser.add_argument("--no-peers", action="store_true", help="leave Stable-Baselines3 out")
    parser.add_argument(
        "--json", type=Path, default=ROOT / "benchmark" / "results" / "speed.json", help="where to write"
    )
    args = parser.parse_args()
    least = max({"ppo_atari": 2048, "ppo_continuous": 4096, "dqn_atari": 4000}[script] for script in args.scripts)
    if args.rounds < 1 or (args.steps is not None and args.steps < least):
        parser.error(f"--rounds must be at least 1, --steps at least {least}: one iteration warms up")
    if not os.access(args.json.parent if args.json.parent.exists() else args.json.parent.parent, os.W_OK):
        parser.error(f"--json: cannot write into {args.json.parent}")

    machine = describe_machine(torch.device("cpu"))
    result = {"schema": 2, "command": sys.argv[1:], "machine": machine, "scripts": {}}
    print(f"{machine['cpu']}, {machine['cores']} cores, torch {machine['packages']['torch']}, fp32")
    for script in args.scripts:
        flags, programs, steps = SCRIPTS[script]
        names = [name for name in programs if not (args.no_peers and name == "sb3")]
        rounds = []
        for number in range(1, args.rounds + 1):
            order = names if number % 2 else names[::-1]
            rounds.append({name: measure(name, programs[name], flags, args.steps or steps) for name in order})
            rates = "  ".join(f"{name} {values['sps']:.0f}" for name, values in rounds[-1].items())
            print(f"round {number}/{args.rounds}, agent steps/s: {rates}", flush=True)
        figures = figures_of([{name: one[name] for name in names} for one in rounds])
        result["scripts"][script] = {"figures": figures, "rounds": rounds}
        print(f"{script}.py {shlex.join(flags)}")
        for name, values in figures.items():
            digits = 2 if "_over_" in name else 0
            low, median, high = (f"{values[key]:.{digits}f}" for key in ("min", "median", "max"))
            print(f"{name:24} median {median:>6}  (min {low}, max {high})")
    args.json.parent.mkdir(parents=True, exist_ok=True)
    write_json(args.json, result)
    print(f"written to {args.json}")


if __name__ == "__main__":
    main()
