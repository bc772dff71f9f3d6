"""How fast the training scripts are on this machine, and what a job costs here and elsewhere.

    python benchmark/run.py                         everything, some minutes
    python benchmark/run.py --quick                 the three scripts, a minute
    python benchmark/run.py --peers --rounds 5      with Stable-Baselines3 in the same rounds

Each script runs as a process of its own, its command printed first. Speeds are those of windows between two points of
its curves, at least five of them (two with `--quick`) after one that warms up; figures are medians with the lowest and
the highest. With more rounds, every other one runs backwards, so that a machine whose speed drifts treats all programs
alike, and ratios are taken within a round. One result file a machine, and a report beside it (see report.py).
"""

import argparse
import datetime
import itertools
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import psutil  # noqa: E402
import torch  # noqa: E402
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # noqa: E402

from benchmark.command_line import Parser, refuse  # noqa: E402
from benchmark.projection import SWEEP  # noqa: E402
from benchmark.report import add_money_flags, build, money_of  # noqa: E402
from benchmark.results import SCHEMA, VERSION, ForeignFile, parse, read  # noqa: E402
from common.cost import PRICES, read_prices  # noqa: E402
from common.errors import UsageError  # noqa: E402
from common.files import write_json  # noqa: E402
from common.run import describe_machine  # noqa: E402

WINDOWS, QUICK_WINDOWS = 5, 2
ENVS_A_CORE = (1, 2, 4, 8)
MINIBATCH = 256  # samples, in all short settings
BREAKOUT, CHEETAH = ["--env-id", "BreakoutNoFrameskip-v4"], ["--env-id", "HalfCheetah-v5"]
# learning starts early, and the memory is written and read as a large one is
SMALL_MEMORY = ["--buffer-size", "10000", "--learning-starts", "500"]


@dataclass
class Program:
    """What is measured: a script with flags, a peer, or a floor.

    Attributes:
        window: agent steps between two points of its curves, so that a run of so many windows can be asked for.
    """

    name: str
    script: str
    command: list[str]
    kind: str = "script"
    precision: str = "fp32"
    num_envs: int = 8
    window: int = 0
    rounds: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""

    def full_command(self, windows: int) -> list[str]:
        if self.kind == "floor":
            return self.command
        return [*self.command, "--total-timesteps", str((windows + 1) * self.window)]

    def description(self, windows: int) -> dict[str, Any]:
        about = {name: getattr(self, name) for name in ("name", "kind", "script", "precision", "num_envs")}
        about["command"] = shlex.join(["python", *self.full_command(windows)])
        return {**about, "error": self.error} if self.error else {**about, "rounds": self.rounds}


def ppo(name: str, precision: str, num_envs: int, flags: list[str]) -> Program:
    """PPO on Atari with one minibatch of 256 an epoch: short windows whose agent steps cost what they always do."""
    num_steps = max(MINIBATCH // num_envs, 1)
    sizes = ["--num-envs", str(num_envs), "--num-steps", str(num_steps), "--num-minibatches", "1"]
    command = ["ppo_atari.py", *BREAKOUT, *sizes, *flags]
    return Program(name, "ppo_atari", command, "script", precision, num_envs, num_envs * num_steps)


def programs(gpu: bool, cores: int, quick: bool, peers: bool) -> list[Program]:
    """All settings for a machine, the plain ones first."""
    device = ["--device", "cuda" if gpu else "cpu"]
    fp32 = [*device, *(["--no-tf32"] if gpu else [])]
    atari = Program("ppo_atari fp32", "ppo_atari", ["ppo_atari.py", *BREAKOUT, *fp32], window=1024)
    dqn = Program("dqn_atari fp32", "dqn_atari", ["dqn_atari.py", *BREAKOUT, *SMALL_MEMORY, *fp32], window=1000)
    control = ["ppo_continuous.py", *CHEETAH, "--device", "cpu"]
    continuous = Program("ppo_continuous fp32", "ppo_continuous", control, num_envs=1, window=2048)
    if quick:
        return [ppo(SWEEP.format(8), "fp32", 8, fp32), dqn, continuous]
    reduced = [("tf32", device), ("amp", [*device, "--amp"])] if gpu else [("bf16", [*fp32, "--amp", *BF16])]
    found = [atari, dqn, continuous]
    found += [ppo(SWEEP.format(cores * n), "fp32", cores * n, fp32) for n in ENVS_A_CORE]
    if 8 not in [cores * n for n in ENVS_A_CORE]:
        found.append(ppo(SWEEP.format(8), "fp32", 8, fp32))  # what other precisions are compared with
    found += [ppo(f"ppo_atari {precision}", precision, 8, flags) for precision, flags in reduced]
    if peers:
        one = ["dqn_atari.py", *BREAKOUT, *SMALL_MEMORY, *fp32, "--num-envs", "1"]
        found.append(Program("dqn_atari fp32, 1 env", "dqn_atari", one, num_envs=1, window=1000))
        found.append(
            Program("ppo_continuous compiled", "ppo_continuous", [*control, "--compile"], "script", "fp32", 1, 2048)
        )
        # theirs have iterations of their own: as many steps as ours, the first one left out
        theirs = {"ppo_atari": (BREAKOUT, 8, 853), "ppo_continuous": (CHEETAH, 1, 2048)}
        for script, (flags, num_envs, window) in theirs.items():
            command = [f"benchmark/sb3_{script}.py", *flags, *(device if script == "ppo_atari" else [])]
            found.append(Program(f"sb3 {script}", script, command, "peer", "fp32", num_envs, window))
        command = ["benchmark/sb3_dqn_atari.py", *BREAKOUT, *SMALL_MEMORY, *device]
        found.append(Program("sb3 dqn_atari", "dqn_atari", command, "peer", "fp32", 1, 667))
    if not gpu:
        floors = {"ppo_atari": ["--num-steps", "32", "--num-minibatches", "1"], "dqn_atari": [], "ppo_continuous": []}
        names = {"ppo_atari": "floor", "dqn_atari": "floor_dqn", "ppo_continuous": "floor_continuous"}
        for script, flags in floors.items():
            found.append(Program(f"floor {script}", script, [f"benchmark/{names[script]}.py", *flags], "floor"))
    return found


BF16 = ["--amp-dtype", "bf16"]  # by name: `auto` stays in fp32 on a CPU without such units


class Failed(Exception):
    """A program ended with another status than 0."""


def execute(command: list[str], cwd: Path) -> str:
    """Run a command, printed first, and return its standard output.

    Raises:
        Failed: with its status and the last line that it wrote to standard error, all of which is printed.
    """
    print("$", shlex.join(["python", *command]), flush=True)
    absolute = [sys.executable, str(ROOT / command[0]), *command[1:]]
    done = subprocess.run(absolute, cwd=cwd, capture_output=True, text=True)
    if done.returncode != 0:
        print(done.stderr, file=sys.stderr, flush=True)
        last = (done.stderr.strip().splitlines() or ["no word"])[-1]
        raise Failed(f"{command[0]} ended with status {done.returncode}: {last}")
    return done.stdout


def windows_of(folder: Path) -> dict[str, Any]:
    """Speeds of a run's windows, the first one left out, and the shares of time in them; from its event files."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    points = [(event.step, event.wall_time) for event in events.Scalars("charts/SPS")]
    pairs = itertools.pairwise(points)
    speeds = [(step - before) / (time - since) for (before, since), (step, time) in pairs]
    tags = events.Tags()["scalars"]
    shares = {}
    for tag in tags:
        if tag.startswith("time/"):
            values = [event.value for event in events.Scalars(tag)][1:]
            shares[tag.removeprefix("time/")] = sum(values) / max(len(values), 1)
    about = {"windows": speeds, "shares": shares}
    for tag, key, choose in (
        ("gpu/memory_peak_mib", "gpu_memory_mib", max),
        ("gpu/power_w", "power_w", lambda values: sum(values) / len(values)),
    ):
        about[key] = choose([event.value for event in events.Scalars(tag)]) if tag in tags else None
    return about


def measure(program: Program, windows: int) -> dict[str, Any]:
    """One round of one program.

    Raises:
        Failed: it ended with an error, or measured nothing.
    """
    command = program.full_command(windows)
    if program.kind != "script":
        said = json.loads(execute(command, ROOT).splitlines()[-1])
        return {"windows": [said.pop("sps")], **said}
    with tempfile.TemporaryDirectory() as folder:
        execute([*command, "--run-name", "run", "--runs-dir", "."], Path(folder))
        run = Path(folder) / "run"
        about = windows_of(run)
        if len(about["windows"]) < windows:
            raise Failed(f"{program.name}: {len(about['windows'])} windows instead of {windows}")
        summary = json.loads((run / "summary.json").read_text())
        return {**about, "peak_memory_mib": summary["peak_memory_mib"]}


def describe() -> dict[str, Any]:
    """This machine, without its name."""
    gpu = torch.cuda.is_available()
    machine = describe_machine(torch.device("cuda" if gpu else "cpu"))
    machine.pop("platform")
    driver = None
    if gpu:
        import pynvml

        pynvml.nvmlInit()
        driver = pynvml.nvmlSystemGetDriverVersion()
    physical = psutil.cpu_count(logical=False)
    return {**machine, "physical_cores": physical, "driver": driver, "memory_gb": psutil.virtual_memory().total / 1e9}


def writable(folder: Path) -> bool:
    """Whether files can be written there; it is made if need be, and not left behind."""
    try:
        made = [parent for parent in (folder, *folder.parents) if not parent.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        for parent in made:
            parent.rmdir()
    except OSError:
        return False
    return True


def main() -> int:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the three scripts in fp32 only, two windows each")
    parser.add_argument("--only", nargs="+", metavar="WORDS", help="settings whose names contain one of these")
    parser.add_argument("--peers", action="store_true", help="Stable-Baselines3 in the same rounds")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--frames", type=float, default=311_040_000, help="emulator frames of the job that is priced")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmark" / "out", help="folder of result.json and report")
    add_money_flags(parser)
    args = parser.parse_args()
    if args.rounds < 1 or not 0 < args.frames < 1e15:
        refuse("--rounds and --frames must be positive")
    if not writable(args.out):
        refuse(f"--out: cannot write into {args.out}")
    try:
        prices = read_prices(PRICES)
        money_of(args, prices)  # refused before anything runs
    except UsageError as error:
        refuse(str(error))

    machine = describe()
    gpu = machine["gpu"] is not None
    chosen = programs(gpu, machine["available_cores"], args.quick, args.peers)
    if args.only:
        names = [program.name for program in chosen]
        chosen = [program for program in chosen if any(words in program.name for words in args.only)]
        if not chosen:
            refuse(f"--only {' '.join(args.only)}: none of {'; '.join(names)}")
    print(f"{machine['gpu'] or 'no GPU'}, {machine['available_cores']} cores of {machine['cpu']}, ", end="")
    print(f"torch {machine['packages']['torch']}; {len(chosen)} settings, {args.rounds} round(s)", flush=True)

    windows = QUICK_WINDOWS if args.quick else WINDOWS
    for number in range(args.rounds):
        for program in chosen if number % 2 == 0 else chosen[::-1]:
            if program.error:
                continue
            try:
                program.rounds.append(measure(program, windows))
            except (Failed, OSError, ValueError, KeyError) as error:
                program.error = str(error)
                print(f"error: {error}", file=sys.stderr, flush=True)
                continue
            median = statistics.median(program.rounds[-1]["windows"])
            print(f"  {program.name}: {median:,.0f} agent steps/s", flush=True)

    content = {
        "schema": SCHEMA,
        "version": VERSION,
        "measured_on": datetime.date.today().isoformat(),
        # no paths: others read this file
        "command": [
            "python",
            "benchmark/run.py",
            *(word for word in sys.argv[1:] if "/" not in word and word != "--out"),
        ],
        "machine": machine,
        "settings": [program.description(windows) for program in chosen],
    }
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "result.json"
    write_json(path, content)
    print(f"written to {path}")
    powers = [one["power_w"] for program in chosen for one in program.rounds if one.get("power_w")]
    money = money_of(args, prices, max(powers, default=None))
    here = parse(content)
    try:
        build(
            [here, *(one for one in others(args.out) if one.name() != here.name())],
            args.out,
            prices,
            args.frames,
            money,
        )
    except (UsageError, OSError) as error:
        print(f"error: no report: {error}", file=sys.stderr)
        return 1
    return 1 if any(program.error for program in chosen) else 0


def others(out: Path) -> list[Any]:
    """Result files of other machines that the project has; broken ones are named and left out."""
    found = []
    for path in sorted((ROOT / "benchmark" / "results").glob("*.json")):
        if out.resolve() == path.parent.resolve():
            continue
        try:
            found.append(read(path))
        except ForeignFile as error:
            print(f"left out: {error}", file=sys.stderr)
    return found


if __name__ == "__main__":
    sys.exit(main())
