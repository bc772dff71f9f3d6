"""What a rented GPU machine has to show of the GPU path: right first, then fast, in parts of at most 8 minutes.

    python benchmark/gpu_check.py correctness --out check
    python benchmark/gpu_check.py speed --out check           and so on, see --help
    python benchmark/gpu_check.py score --out check           again, on new machines too, until it says complete
    python benchmark/gpu_check.py --device cpu --quick        the rehearsal of all parts, some minutes without a GPU

Needs no network: what is not installed comes from a folder of wheels (`--wheels`). Each part prints its commands first
and its table last, and writes `<part>.json` into the folder. A command that the time does not suffice for is ended as a
machine would be, by SIGTERM, and its speed is that of the windows so far.
"""

import argparse
import importlib.metadata
import json
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
BREAKOUT = ["ppo_atari.py", "--env-id", "BreakoutNoFrameskip-v4"]
DQN = ["dqn_atari.py", "--env-id", "BreakoutNoFrameskip-v4"]
CHEETAH = ["ppo_continuous.py", "--env-id", "HalfCheetah-v5"]
FREE = ["--no-torch-deterministic"]  # what speed is measured with
FAST = {"eager": [], "compiled": ["--compile"], "graphs": ["--cuda-graphs"], "both": ["--compile", "--cuda-graphs"]}
TUNED = ["--num-steps", "32", "--learning-rate", "5e-4", "--amp"]  # README's, with 64 environments
LEAVING = 30.0  # seconds for a command to end after SIGTERM
NOT_BEGUN = {"global_step": 0, "mean_return": None, "phase": "start", "seconds": 0.0}
LEAST = 5.0  # seconds that are worth beginning a command for


@dataclass
class Check:
    """A command, and what became of it.

    Attributes:
        kind: `passes` has to end with status 0; `trains` is a script whose speed is read from its curves; `prints` ends
            with a line of JSON; `goes on` may end with status 75, to be continued.
        least: mean return of the last 100 games that it has to reach.
    """

    name: str
    command: list[str]
    kind: str = "trains"
    least: float | None = None
    result: dict[str, Any] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        return "error" in self.result


def trains(name: str, script: list[str], *flags: str, steps: int) -> Check:
    return Check(name, [*script, *flags, "--total-timesteps", str(steps)])


def correctness(device: str, quick: bool) -> list[Check]:
    """Tests marked gpu; drills with deterministic algorithms."""
    found = [Check("tests marked gpu", ["-m", "pytest", "-m", "gpu", "-rs", "tests"], "passes")]
    few = ["--kills", "1", "--terms", "1"] if quick else ["--kills", "2", "--terms", "2"]
    sizes = {
        "ppo_atari": [*BREAKOUT, "--num-steps", "32", "--total-timesteps", "2048" if quick else "40960"],
        "ppo_continuous": [*CHEETAH, "--num-steps", "256", "--total-timesteps", "2048" if quick else "10240"],
        "dqn_atari": [*DQN, "--buffer-size", "2000", "--learning-starts", "400", "--total-timesteps"],
    }
    sizes["dqn_atari"] += ["1200" if quick else "8000"]
    for name, command in sizes.items():
        for how in ("eager", "graphs"):
            drilled = ["drill.py", *few, *command, "--device", device, *FAST[how]]
            found.append(Check(f"drill {name}, {how}", drilled, "passes"))
    return found


def learning(device: str, quick: bool) -> list[Check]:
    """Reduced precision has to learn: returns that a policy which does not learn is far from."""
    pendulum = ["ppo_continuous.py", "--env-id", "InvertedPendulum-v5", "--device", device, "--cuda-graphs"]
    found = []
    for dtype in ("fp32", "bf16", "fp16"):
        amp = ["--amp", "--amp-dtype", dtype]
        found.append(trains(f"pendulum in {dtype}", pendulum, *amp, steps=4096 if quick else 51200))
        found[-1].least = None if quick else 100.0  # 6 at the start
    for dtype in ("bf16", "fp16"):
        amp = ["--device", device, "--cuda-graphs", "--amp", "--amp-dtype", dtype]
        found.append(trains(f"Breakout in {dtype}", BREAKOUT, *amp, steps=2048 if quick else 200_000))
        found[-1].least = None if quick else 4.0  # 1.3 at the start
    return found


def speed(device: str, quick: bool) -> list[Check]:
    """PPO with CleanRL's 8 environments x 128 steps."""
    steps = 3 * 1024 if quick else 100 * 1024
    found = []
    for how, flags in FAST.items():
        precisions = {"fp32": ["--no-tf32"], "tf32": [], "amp": ["--amp"]}
        for precision in ("fp32",) if quick else precisions:
            words = [*FREE, "--device", device, *precisions[precision], *flags]
            found.append(trains(f"8 x 128, {precision}, {how}", BREAKOUT, *words, steps=steps))
    for how in ("eager", "graphs"):
        words = ["--device", device, *FAST[how]]
        found.append(trains(f"8 x 128, tf32, {how}, deterministic", BREAKOUT, *words, steps=steps))
    return found


def tuned(device: str, quick: bool) -> list[Check]:
    """More environments, and how near emulation alone the loop runs with them."""
    found = []
    for num_envs in (16,) if quick else (64, 128, 256):
        envs = ["--num-envs", str(num_envs)]
        alone = ["benchmark/floor.py", "--environment", *envs, "--num-steps", "32"]
        found.append(Check(f"{num_envs} environments alone", alone, "prints"))
        for how in ("eager", "both") if quick else FAST:
            words = [*envs, *TUNED, *FREE, "--device", device, *FAST[how]]
            steps = 32 * num_envs * (3 if quick else 40)
            found.append(trains(f"{num_envs} environments, {how}", BREAKOUT, *words, steps=steps))
    return found


def dqn(device: str, quick: bool) -> list[Check]:
    """Four agent steps an update, and a memory of a million transitions on the card."""
    some = ["--buffer-size", "10000", "--learning-starts", "1000", *FREE, "--device", device]
    steps = 3000 if quick else 40_000
    found = [trains(f"DQN, {how}", DQN, *some, *flags, steps=steps) for how, flags in FAST.items()]
    found.append(trains("DQN, prioritised, graphs", DQN, *some, "--prioritized", "--cuda-graphs", steps=steps))
    million = [] if quick else ["--buffer-size", "1000000", "--no-save-buffer", "--learning-starts", "1000"]
    million = [*(million or some), "--buffer-device", "auto", "--device", device, "--cuda-graphs"]
    found.append(trains("DQN, memory of the default size", DQN, *million, steps=steps))
    return found


def continuous(device: str, quick: bool) -> list[Check]:
    """HalfCheetah, whose networks are so small that the CPU may be the better place."""
    steps = 3 * 2048 if quick else 20 * 2048
    found = [trains("HalfCheetah on the CPU", CHEETAH, "--device", "cpu", steps=steps)]
    words = [*FREE, "--device", device]
    found += [trains(f"HalfCheetah, {how}", CHEETAH, *words, *flags, steps=steps) for how, flags in FAST.items()]
    return found


def score(device: str, quick: bool) -> list[Check]:
    """Breakout to 400 points. Its run outlives the machine in the folder's mirror."""
    envs = ["--num-envs", "16" if quick else "64", *TUNED, "--total-timesteps", "2048" if quick else "50000000"]
    until = ["--stop-at-return", "400", "--checkpoint-minutes", "1", "--spot-watch", "off"]
    command = [*BREAKOUT, *envs, *until, *FREE, "--device", device, "--cuda-graphs"]
    return [Check("Breakout to 400", command, "goes on")]


PARTS = {
    "correctness": correctness,
    "learning": learning,
    "speed": speed,
    "tuned": tuned,
    "dqn": dqn,
    "continuous": continuous,
    "score": score,
}


def install(wheels: Path) -> None:
    """What requirements.txt names and this Python lacks, from a folder and without a network. torch stays as it is."""
    lines = [line for line in (ROOT / "requirements.txt").read_text().splitlines() if line and line[0] != "#"]
    missing = []
    for line in lines:
        name, _, version = line.partition("==")
        try:
            there = importlib.metadata.version(name.partition("[")[0])
        except importlib.metadata.PackageNotFoundError:
            there = None
        if there is None or (there != version and name != "torch"):
            missing.append(line)
    if missing:
        command = ["-m", "pip", "install", "-q", "--no-index", "--find-links", str(wheels), *missing]
        print("$ python", shlex.join(command), flush=True)
        if status := subprocess.run([sys.executable, *command]).returncode:
            sys.exit(f"error: --wheels {wheels}: pip ended with status {status}")


def run(check: Check, out: Path, until: float) -> None:
    """Run a command until it ends or its time does, and note what became of it."""
    left = until - time.monotonic() - LEAVING
    print("$ python", shlex.join(check.command), flush=True)
    if left < LEAST:
        check.result["error"] = "no time left: run the part again with more --minutes, or with --only"
        return
    with tempfile.TemporaryDirectory() as folder:
        command = list(check.command)
        if check.kind in ("trains", "goes on"):
            command += ["--run-name", "run", "--runs-dir", folder]
        if check.kind == "goes on":
            command += ["--mirror", str(out / "mirror")]
        words = command if command[0] == "-m" else [str(ROOT / command[0]), *command[1:]]
        began = time.monotonic()
        with (out / "log.txt").open("a+") as log:
            log.write(f"\n$ python {shlex.join(command)}\n")
            log.flush()
            start = log.tell()
            process = subprocess.Popen(
                [sys.executable, *words],
                cwd=ROOT,
                env={"TORCHINDUCTOR_CACHE_DIR": str(out.with_name(f"{out.name}.compile_cache")), **os.environ},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # what it starts is ended with it
            )
            try:
                cut = wait(process, left)
            except BaseException:  # Ctrl-C, SIGTERM
                check.result["error"] = "interrupted"
                wait(process, 0)
                raise
            log.seek(start)
            said = log.read()
        check.result["seconds"] = time.monotonic() - began
        read_result(check, said, process.returncode, cut, Path(folder) / "run")


def wait(process: subprocess.Popen, seconds: float) -> bool:
    """End a process, and all that it has started, after a time. Returns whether it was cut short."""
    try:
        process.wait(seconds)
        return False
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(LEAVING)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return True


def read_result(check: Check, said: str, status: int, cut: bool, folder: Path) -> None:
    result, lines = check.result, said.strip().splitlines() or ["no word"]
    allowed = {0, 75} if check.kind == "goes on" or (cut and check.kind == "trains") else {0}
    if check.kind == "passes" and check.command[:2] == ["-m", "pytest"]:
        allowed = {0, 5}  # 5: none was found
        result["note"] = lines[-1].strip("= ")
    if status not in allowed or (cut and check.kind in ("passes", "prints")):
        result["error"] = f"status {status}{', cut short' if cut else ''}: {lines[-1]}"
    elif check.kind == "prints":
        result["sps"] = json.loads(lines[-1])["sps"]
    elif check.kind in ("trains", "goes on"):
        # what these import may have come as wheels
        from tensorboard.backend.event_processing.directory_watcher import DirectoryDeletedError

        from benchmark.run import windows_of

        try:
            about = windows_of(folder)
        except (KeyError, DirectoryDeletedError):  # no point of a curve, no folder
            if status != 75 or check.kind != "goes on":
                result["error"] = f"{'cut short before anything' if cut else 'nothing'} was measured: {lines[-1]}"
                return
            about = {"windows": [], "shares": {}, "gpu_memory_mib": None, "power_w": None}
        result |= {key: about[key] for key in ("shares", "gpu_memory_mib", "power_w")}
        speeds = about["windows"][1:] or about["windows"]
        if speeds:
            result |= {"sps": statistics.median(speeds), "lowest": min(speeds), "highest": max(speeds)}
        status_file = folder / "status.json"
        about = json.loads(status_file.read_text()) if status_file.exists() else dict(NOT_BEGUN)
        result |= {key: about[key] for key in ("global_step", "mean_return", "phase")}
        result["run_seconds"] = about["seconds"]
        fallback = [line for line in lines if line.startswith(("--cuda-graphs", "--amp"))]
        result["note"] = "; ".join(fallback)
        if check.least is not None and not (result["mean_return"] or -float("inf")) >= check.least:
            result["error"] = f"a mean return of {check.least:g} was asked for"


def table(checks: list[Check]) -> list[str]:
    """One line a check; `share of emulation`: of the last environments alone before it."""
    head = "| | agent steps/s | lowest to highest | of emulation | GPU MiB | return | |"
    lines, alone = [head, "|---|---|---|---|---|---|---|"], None
    for check in checks:
        result = check.result
        if check.kind == "prints":
            alone = result.get("sps")
        sps, mean = result.get("sps"), result.get("mean_return")
        cells = [check.name, f"{sps:,.0f}" if sps else ""]
        cells.append(f"{result['lowest']:,.0f} to {result['highest']:,.0f}" if "lowest" in result else "")
        cells.append(f"{sps / alone:.2f}" if alone and sps and check.kind == "trains" else "")
        cells.append(f"{result['gpu_memory_mib']:,.0f}" if result.get("gpu_memory_mib") else "")
        cells.append("" if mean is None else f"{mean:.1f} at {result['global_step']:,}")
        words = result.get("error") or result.get("note") or ("passed" if check.kind == "passes" else "")
        if check.kind == "goes on" and not check.failed:
            ended = "complete" if result["phase"] == "complete" else "to be continued: run this part again"
            words = f"{ended}, {result['run_seconds'] / 60:.1f} minutes so far"
        lines.append(f"| {' | '.join([*cells, words])} |")
    return lines


def folder(words: str) -> Path:
    if not words:
        raise argparse.ArgumentTypeError("must name a folder")
    return Path(words)


def chosen(part: str, args: argparse.Namespace) -> list[Check]:
    checks = PARTS[part](args.device, args.quick)
    return [check for check in checks if not args.only or any(words in check.name for words in args.only)]


def check_part(part: str, args: argparse.Namespace) -> bool:
    """Whether all of it went well."""
    checks = chosen(part, args)
    print(f"== {part}: {len(checks)} commands", flush=True)
    until = time.monotonic() + 60 * args.minutes
    try:
        for check in checks:
            run(check, args.out, until)
            if check.failed:
                print(f"error: {check.result['error']}", file=sys.stderr, flush=True)
    finally:
        report(part, args, [check for check in checks if check.result])  # what there is, after Ctrl-C too
    return not any(check.failed for check in checks)


def report(part: str, args: argparse.Namespace, checks: list[Check]) -> None:
    from benchmark.run import describe
    from common.files import write_json

    lines = [{"name": check.name, "command": shlex.join(check.command), **check.result} for check in checks]
    content = {"part": part, "device": args.device, "quick": args.quick, "machine": describe(), "checks": lines}
    write_json(args.out / f"{part}{'-some' if args.only else ''}.json", content)
    print("\n".join(table(checks)), flush=True)


def main() -> int:
    from benchmark.command_line import Parser, refuse

    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)} (default: all)")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N, or cpu for a rehearsal")
    parser.add_argument("--quick", action="store_true", help="as little as possible of each")
    parser.add_argument("--only", nargs="+", metavar="WORDS", help="commands whose names contain one of these")
    parser.add_argument("--minutes", type=float, default=8.0, help="at most, for each part")
    parser.add_argument("--wheels", type=folder, help="folder of wheels for what is missing")
    parser.add_argument(
        "--out", type=folder, default=ROOT / "benchmark" / "out" / "gpu_check", help="folder of results"
    )
    args = parser.parse_args()
    if unknown := [part for part in args.parts if part not in PARTS]:
        refuse(f"{unknown[0]}: must be one of {', '.join(PARTS)}")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", args.device):
        refuse(f"--device {args.device}: must be cpu, cuda or cuda:N")
    parts = [part for part in dict.fromkeys(args.parts or PARTS) if chosen(part, args)]
    if not parts:
        names = [check.name for part in args.parts or PARTS for check in PARTS[part](args.device, args.quick)]
        refuse(f"--only {' '.join(args.only)}: none of {'; '.join(names)}")
    if not 0 < args.minutes < 1e6:
        refuse(f"--minutes {args.minutes}: must be positive")
    if args.wheels:
        if not args.wheels.is_dir():
            refuse(f"--wheels {args.wheels}: no such folder")
        install(args.wheels)
    if args.device != "cpu":
        import torch

        if not torch.cuda.is_available():
            refuse(f"--device {args.device}: torch {torch.__version__} sees no GPU; --device cpu rehearses")
    try:
        args.out = args.out.absolute()
        args.out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=args.out).close()
    except OSError as error:
        refuse(f"--out {args.out}: {error.strerror}")
    good = [check_part(part, args) for part in parts]
    return 0 if all(good) else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the command that runs is ended on the way out
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
