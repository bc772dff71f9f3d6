"""Any training script over seeds, environments and hyperparameters, on Ray Tune.

    python sweep.py ppo_atari.py --env-id BreakoutNoFrameskip-v4 PongNoFrameskip-v4 --seed 1 2 3 \\
        --learning-rate 1e-4 2.5e-4 --cpus-per-trial 4 --gpus-per-trial 0.25

Flags that are not listed below are the script's. One with several values is swept: all combinations, or with
`--samples N` so many random ones, in which `1e-4..1e-3` is a range, `log:1e-4..1e-3` a logarithmic one and `8..64` one
of whole numbers; environments and seeds are always crossed. A trial is the script as users start it, in a process of
its own, and leaves an ordinary run folder. The same command goes on with a sweep that was interrupted. Exit status: 0
all trials are complete, 75 interrupted, 3 a trial reached `--max-cost`, 2 refused, 1 a trial failed for good.
"""

import argparse
import contextlib
import fcntl
import hashlib
import itertools
import json
import math
import os
import pickle
import shlex
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import common.cluster
from common.cost import PRICES, dollars_per_hour, find_instance, read_prices
from common.errors import UsageError
from common.files import read_json, write_json
from common.ranking import report, table
from common.signals import SIGNALS
from common.trial import EXITS, NO_GAME, Training, check, end_with

GIVES_UP = EXITS + 10.0  # seconds after a signal, whatever Ray does
TABLE = 10.0  # seconds between two tables
PRICED = ["--price-per-hour", "1"]  # for --max-cost, where a command line is only looked at
SWEEP = "SPOTRL_SWEEP"  # variable with the sweep's process id, which the trials of its own Ray watch

CHOSEN = ("--runs-dir", "--run-name", "--resume", "--mirror")
CROSSED = ("--env-id", "--seed")


# ---- the command line


@dataclass(frozen=True)
class Range:
    """Numbers between two ends, both included; whole ones if both ends are."""

    low: float
    high: float
    log: bool

    @staticmethod
    def read(text: str) -> "Range | None":
        """`8..64`, `log:1e-4..1e-3`; None: it is something else.

        Raises:
            UsageError: a range without room.
        """
        low, _, high = text.removeprefix("log:").partition("..")
        for kind in (int, float):
            with contextlib.suppress(ValueError):
                found = Range(kind(low), kind(high), text.startswith("log:"))
                if not -math.inf < found.low < found.high < math.inf or (found.log and found.low <= 0):
                    raise UsageError(f"{text}: the lower end first, and above zero for log:")
                return found
        return None

    def domain(self) -> Any:
        from ray import tune

        if isinstance(self.low, int):
            return (tune.lograndint if self.log else tune.randint)(self.low, self.high + 1)
        return (tune.loguniform if self.log else tune.uniform)(self.low, self.high)


def as_word(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def read_flags(words: list[str]) -> dict[str, list[str | Range]]:
    """The script's flags with their values, of which switches have none.

    Raises:
        UsageError: no flags, one that is given twice, or one that the sweep chooses.
    """
    flags: dict[str, list[str | Range]] = {}
    for word in words:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            name = name.replace("_", "-")
            if name in CHOSEN:
                raise UsageError(f"{name}: the sweep chooses it; --storage says where runs go, --name is the sweep's")
            if name in flags or name.replace("--no-", "--") in flags or name.replace("--", "--no-", 1) in flags:
                raise UsageError(f"{name}: given twice; several values stand behind one flag")
            flags[name] = [value] if equals else []
        elif not flags:
            raise UsageError(f"{word}: the script comes first, then flags, which begin with --")
        else:
            flags[name].append(Range.read(word) or word)
    return flags


def varied(flags: dict[str, list]) -> list[str]:
    """Names of the flags in which trials differ."""
    return [name for name, values in flags.items() if len(values) > 1 or any(isinstance(x, Range) for x in values)]


def drawn(flags: dict[str, list]) -> dict[str, list]:
    """The hyperparameters that random search and Optuna choose.

    Raises:
        UsageError: there are none, or one is both range and values.
    """
    space = {name: flags[name] for name in varied(flags) if name not in CROSSED}
    for name, values in space.items():
        if len(values) > 1 and any(isinstance(value, Range) for value in values):
            raise UsageError(f"{name}: one range, or several values")
    if not space:
        raise UsageError("--samples: no hyperparameter has several values or a range")
    return space


def domain(values: list[str | Range]) -> Any:
    from ray import tune

    return values[0].domain() if isinstance(values[0], Range) else tune.choice(values)


def grid(flags: dict[str, list]) -> Iterator[dict[str, str | None]]:
    """All combinations; None is the value of a switch."""
    for values in itertools.product(*(values or [None] for values in flags.values())):
        yield dict(zip(flags, values, strict=True))


def random_search(flags: dict[str, list], samples: int) -> Iterator[dict[str, str | None]]:
    """So many draws, which the flags determine, each with all environments and seeds.

    Raises:
        UsageError: there are not so many different ones.
    """
    import numpy as np

    space = {name: domain(values) for name, values in drawn(flags).items()}
    rng = np.random.default_rng(int(digest({name: flags[name] for name in space}), 16))
    found: list[dict[str, str]] = []
    for _ in range(100 * samples):
        sample = {name: as_word(one.sample(random_state=rng)) for name, one in space.items()}
        if sample not in found:
            found.append(sample)
        if len(found) == samples:
            for one in found:
                yield from grid({name: [one[name]] if name in one else values for name, values in flags.items()})
            return
    raise UsageError(f"--samples {samples}: there are only {len(found)} different ones")


def ends(flags: dict[str, list]) -> Iterator[dict[str, str | None]]:
    """All values, and both ends of all ranges."""
    both = {
        name: [end for x in values for end in ((as_word(x.low), as_word(x.high)) if isinstance(x, Range) else (x,))]
        for name, values in flags.items()
    }
    return grid(both)


def command_line(combination: dict[str, str | None]) -> list[str]:
    return [word for name, value in combination.items() for word in (name, value) if word is not None]


def digest(what: Any) -> str:
    return hashlib.sha256(json.dumps(what, sort_keys=True, default=vars).encode()).hexdigest()[:8]


# ---- a trial


def make_trainable() -> type:
    from ray import tune

    class Trial(tune.Trainable):
        def setup(self, config: dict[str, Any]) -> None:
            self.training, job = None, config["job"]
            end_with(int(os.environ.get(SWEEP, 0)))
            words = command_line(combination_of(config))
            (run,), _ = (
                check(str(common.cluster.ROOT / job["script"]), [words + PRICED * bool(job["price_per_hour"])])
                if "trial" not in config
                else ([config["trial"]], None)
            )
            if "error" in run:
                raise RuntimeError(run["error"])
            self.training = Training(job, words, run["name"])

        def step(self) -> dict[str, Any]:
            return self.training.step()

        def cleanup(self) -> None:
            if self.training:
                self.training.stop()

    return Trial


def combination_of(config: dict[str, Any]) -> dict[str, str | None]:
    """A trial's flags. Optuna chose some of them, and its repetitions are the seeds."""
    if "trial" in config:
        return config["trial"]["flags"]
    job = config["job"]
    flags = {name: as_word(config[name]) if name in config else (values or [None])[0] for name, values in job["flags"]}
    if len(job["seeds"]) > 1:
        flags["--seed"] = job["seeds"][config["__trial_index__"]]
    return flags


# ---- the sweep


def make_scheduler(steps: int, grace: int | None) -> Any:
    from ray.tune.schedulers import ASHAScheduler

    # a trial that comes to its end reports its last step more than once
    return ASHAScheduler(
        time_attr="global_step",
        metric="mean_return",
        mode="max",
        max_t=steps,
        grace_period=grace or max(1, steps // 10),
        stop_last_trials=False,
    )


def make_search(flags: dict[str, list], seeds: int) -> Any:
    from ray.tune.search import Repeater
    from ray.tune.search.optuna import OptunaSearch

    class Repeated(Repeater):
        """Its own save forgets which trials belong together."""

        def save(self, checkpoint_path: str) -> None:
            Path(checkpoint_path).write_bytes(pickle.dumps(vars(self)))

        def restore(self, checkpoint_path: str) -> None:
            vars(self).update(pickle.loads(Path(checkpoint_path).read_bytes()))

    search = OptunaSearch(metric="mean_return", mode="max", seed=int(digest(drawn(flags)), 16))
    return Repeated(search, repeat=seeds) if seeds > 1 else search


def make_callback(labels: list[str], stopped: list[int]) -> Any:
    """Shows the table, and notes signals, which Tune has stop the sweep."""
    from ray import tune

    class Table(tune.Callback):
        shown, lines = 0.0, 0

        def setup(self, **info: Any) -> None:
            tunes = signal.getsignal(signal.SIGINT)

            def stop(number: int, frame: Any) -> None:
                if not stopped:
                    print("stopping: trials save checkpoints", flush=True)
                    # Ray would wait for its own processes, which a signal to all of a job has ended
                    timer = threading.Timer(GIVES_UP, os._exit, [os.EX_TEMPFAIL])
                    timer.daemon = True
                    timer.start()
                    tunes(number, frame)
                stopped.append(number)

            for number in SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:  # a SIGHUP, under nohup
                    signal.signal(number, stop)

        def on_step_end(self, iteration: int, trials: list, **info: Any) -> None:
            every = 1.0 if sys.stdout.isatty() else TABLE
            if time.monotonic() - self.shown >= every and not stopped:
                self.shown = time.monotonic()
                text = table([row_of(trial) for trial in trials], labels, shutil.get_terminal_size().lines - 3)
                if sys.stdout.isatty() and self.lines:
                    print(f"\x1b[{self.lines}A\x1b[J", end="")
                self.lines = text.count("\n") + 1
                print(text, flush=True)

    return Table()


def row_of(trial: Any, interrupted: bool = False) -> dict[str, Any]:
    """A trial's line in tables and results.csv."""
    last = trial.last_result or {}
    mean = last.get("mean_return", NO_GAME)
    state = last.get("state", "waiting")
    if trial.status == "ERROR":
        state = "failed"
    elif trial.status == "PENDING":
        state = "waiting"
    elif not last.get("done"):
        state = "interrupted" if interrupted else "stopped early" if trial.status == "TERMINATED" else state
    flags = {name.removeprefix("--"): value for name, value in combination_of(trial.config).items()}
    return {
        "run": last.get("run") or trial.config.get("trial", {}).get("name", ""),
        **{name: "" if value is None else value for name, value in flags.items()},
        "state": state,
        "step": last.get("global_step", 0),
        "total": last.get("total_timesteps", 0),
        "games": last.get("games", 0),
        "mean_return": None if mean == NO_GAME else mean,
        "sps": last.get("sps", 0.0),
        "seconds": last.get("seconds", 0.0),
        "usd": last.get("usd", 0.0),
        "restarts": last.get("restarts", 0),
        "failures": trial.num_failures,
    }


# ---- putting it together


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        raise UsageError(f"{message}; see --help")


def make_parser() -> Parser:
    parser = Parser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="sweep.py SCRIPT [flags of the script] [options]",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("script", metavar="SCRIPT", help="a training script")
    add("--cpus-per-trial", type=float, default=1.0, help="cores, and threads of the script (default: 1)")
    add("--gpus-per-trial", type=float, default=0.0, help="GPUs or a share of one, such as 0.25 (default: 0)")
    add("--samples", type=int, help="this many random or Optuna's draws instead of a grid, each with all seeds")
    add("--search", choices=("grid", "random", "optuna"), help="random is what --samples means by itself")
    add("--asha", action="store_true", help="stop trials early whose mean return is behind the others' (ASHA)")
    add("--grace-steps", type=int, help="with --asha: agent steps that each trial may make (default: a tenth of all)")
    add("--max-failures", type=int, default=3, help="of a trial's process or node, before it is given up (default: 3)")
    add("--storage", default="runs", help="folder of runs, shared by all nodes, or an address (default: runs)")
    add("--name", help="folder of the sweep's report below it (default: derived from the command)")
    add("--address", help="Ray cluster, host:port or auto (default: this machine alone)")
    add("--price-per-hour", type=float, help="US dollars that a machine costs an hour; a trial pays its share")
    add("--instance", help="what a machine is, instead: provider:name[@region] from benchmark/prices.csv")
    add("--spot", action="store_true", help="with --instance: its spot price")
    return parser


def require_sense(args: argparse.Namespace) -> None:
    """Raises UsageError."""
    rules = {
        "--cpus-per-trial": args.cpus_per_trial > 0,
        "--gpus-per-trial": args.gpus_per_trial >= 0 and (args.gpus_per_trial < 1 or args.gpus_per_trial % 1 == 0),
        "--samples": (args.samples is None or args.samples > 0) and not (args.samples and args.search == "grid"),
        "--search": args.samples is not None or args.search in (None, "grid"),
        "--grace-steps": args.grace_steps is None or (args.asha and args.grace_steps > 0),
        "--max-failures": args.max_failures >= 0,
        "--storage": args.storage != "",
        "--name": args.name is None or (args.name == Path(args.name).name and not args.name.startswith(".")),
        "--address": not (args.address or "").startswith("ray://"),
        "--price-per-hour": args.price_per_hour is None or (args.price_per_hour > 0 and not args.instance),
        "--spot": not args.spot or args.instance is not None,
    }
    reasons = {
        "--cpus-per-trial": "must be positive",
        "--gpus-per-trial": "must be a share below 1, or whole GPUs",
        "--samples": "must be positive, and means nothing in a grid",
        "--search": "needs --samples",
        "--grace-steps": "must be positive, and means nothing without --asha",
        "--max-failures": "must not be negative",
        "--storage": "must name a folder or an address",
        "--name": "must be one folder name",
        "--address": "start the sweep on a machine of the cluster, with --address auto",
        "--price-per-hour": "must be positive, and means nothing with --instance",
        "--spot": "means nothing without --instance",
    }
    for name, sensible in rules.items():
        if not sensible:
            raise UsageError(f"{name} {getattr(args, name[2:].replace('-', '_'))}: {reasons[name]}")
    if not Path(args.script).is_file():
        raise UsageError(f"{args.script}: no such script; it comes first, then its flags")


def hourly_price(args: argparse.Namespace) -> float | None:
    """Of a machine, in US dollars. Raises UsageError: there is none under this name."""
    if args.instance is None:
        return args.price_per_hour
    price = dollars_per_hour(find_instance(args.instance, read_prices(PRICES)), args.spot)
    if price is None:
        raise UsageError(f"--instance {args.instance}: no such price in {PRICES.name}; use --price-per-hour")
    return price


def make_trials(args: argparse.Namespace, flags: dict[str, list], price: float | None) -> tuple[list[dict], str | None]:
    """All trials, or for Optuna those at the ends of its ranges, and the revision of the code.

    Raises:
        UsageError: the script refuses one, two are the same run, or the search does not fit.
    """
    if args.search == "optuna":
        drawn(flags)
        combinations = list(ends(flags))
    elif args.samples:
        combinations = list(random_search(flags, args.samples))
    else:
        for name in varied(flags):
            if any(isinstance(value, Range) for value in flags[name]):
                raise UsageError(f"{name}: a range needs --samples N")
        combinations = list(grid(flags))
    if any(isinstance(value, Range) for name in CROSSED for value in flags.get(name, [])):
        raise UsageError(f"{', '.join(CROSSED)}: name the values")
    lines = [command_line(flags) for flags in combinations]
    priced = PRICED * bool(price)
    runs, revision = check(args.script, [line + priced for line in lines])
    for line, run in zip(lines, runs, strict=True):
        if "error" in run:
            raise UsageError(f"{run['error']} (of: {shlex.join(line)})")
    names = [run["name"] for run in runs]
    for name in names:
        if names.count(name) > 1:
            same = " and ".join(shlex.join(line) for line, other in zip(lines, names, strict=True) if other == name)
            raise UsageError(f"one run, {name}, is meant by {same}")
    environments = {run["env_id"] for run in runs}
    if len(environments) > 1 and (args.asha or args.search == "optuna"):
        what = "--asha" if args.asha else "--search optuna"
        raise UsageError(f"{what}: compares returns, so of one --env-id, not {len(environments)}")
    if args.asha and args.search == "optuna" and len({run["seed"] for run in runs}) > 1:
        raise UsageError("--asha: with --search optuna only for one seed, because a mean over seeds needs all of them")
    return [{**run, "flags": flags} for run, flags in zip(runs, combinations, strict=True)], revision


def hold(folder: Path) -> int:
    """Take the lock of a sweep's folder for as long as this process lives.

    Raises:
        UsageError: another process has it, or the folder cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / ".lock", os.O_CREAT | os.O_RDWR, 0o644)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UsageError(f"{folder} is in use by another process") from None
    except OSError as error:
        raise UsageError(f"--storage: cannot write into {folder}: {error.strerror}") from None
    return lock


def require_room(args: argparse.Namespace) -> None:
    """Tune would wait for ever. Raises UsageError."""
    import ray

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if not any(n.get("CPU", 0) >= args.cpus_per_trial and n.get("GPU", 0) >= args.gpus_per_trial for n in nodes):
        have = "; ".join(f"{n.get('CPU', 0):g} CPUs, {n.get('GPU', 0):g} GPUs" for n in nodes)
        wanted = f"{args.cpus_per_trial:g} CPUs and {args.gpus_per_trial:g} GPUs"
        raise UsageError(f"--cpus-per-trial, --gpus-per-trial: no machine has {wanted} for a trial, but {have}")
    if not args.gpus_per_trial and any(n.get("GPU", 0) for n in nodes):
        print("trials see no GPU; --gpus-per-trial gives each one, or a share", flush=True)


def sweep(argv: list[str]) -> int:
    """Returns the exit status. Raises UsageError."""
    args, words = make_parser().parse_known_args(argv)
    require_sense(args)
    flags = read_flags(words)
    for package in ("ray", "optuna", "scipy"):
        if find_spec(package) is None:
            raise UsageError(f"this needs {package}: pip install -r requirements-ray.txt")
    price = hourly_price(args)
    trials, revision = make_trials(args, flags, price)
    script = Path(args.script).resolve()
    script = str(script.relative_to(common.cluster.ROOT) if script.is_relative_to(common.cluster.ROOT) else script)
    same = [script, [trial["name"] for trial in trials], args.search, args.samples, args.asha, args.grace_steps]
    name = args.name or f"sweep__{Path(script).stem}__{digest(same)}"
    is_address = "://" in args.storage
    runs_dir = Path("runs" if is_address else args.storage).absolute()
    folder = runs_dir / name
    seeds = list(dict.fromkeys(str(trial["seed"]) for trial in trials))
    job = {
        "script": script,
        "runs_dir": str(runs_dir),
        "logs": str(folder / "logs"),
        "mirror": args.storage if is_address else None,
        "price_per_hour": price,
        "cpus": args.cpus_per_trial,
        "gpus": args.gpus_per_trial,
        "flags": [(flag, [x for x in values if isinstance(x, str)]) for flag, values in flags.items()],
        "seeds": seeds,
    }
    # before Ray is imported: no logs and tables of Tune's own, and trials stay where relative paths are right
    settings = ("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS=1", "RAY_CHDIR_TO_TRIAL_DIR=0", "RAY_AIR_NEW_OUTPUT=0")
    os.environ |= dict(setting.split("=") for setting in settings)
    os.environ[SWEEP] = str(os.getpid())  # for a Ray that begins here
    with common.cluster.connected(args.address, revision):
        require_room(args)
        lock = hold(folder)
        try:
            return tune_and_report(args, flags, folder, job, trials, same)
        finally:
            os.close(lock)


def tune_and_report(
    args: argparse.Namespace,
    flags: dict[str, list],
    folder: Path,
    job: dict[str, Any],
    trials: list[dict[str, Any]],
    same: list[Any],
) -> int:
    """Returns the exit status. Raises UsageError: the folder is of another sweep."""
    from ray import tune

    labels = [flag.removeprefix("--") for flag in varied(flags)]
    optuna = args.search == "optuna"
    space = {flag: domain(values) for flag, values in drawn(flags).items()} if optuna else None
    before = read_json(folder / "sweep.json")
    if before and before["sweep"] != same:
        raise UsageError(f"{folder} is of another sweep: choose another --name")
    if before and optuna and before["job"] != digest(job):  # its trials keep what they were started with
        raise UsageError("--search optuna: goes on with the flags of its first start only; or choose another --name")
    # where it ended otherwise, all is asked again: complete runs answer at once, and others get their chances
    goes_on = bool(before) and (optuna or (before["job"] == digest(job) and before["ended"] != "other"))
    record = {"sweep": same, "job": digest(job), "ended": None}
    write_json(folder / "sweep.json", record)
    if before and not goes_on:
        shutil.rmtree(folder / "tune", ignore_errors=True)
    where: dict[str, Any] = {"storage_path": str(folder)}
    if job["mirror"]:
        import pyarrow.fs
        from fsspec.core import url_to_fs

        fs, path = url_to_fs(f"{job['mirror'].rstrip('/')}/{folder.name}")
        where = {
            "storage_path": path,
            "storage_filesystem": pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(fs)),
        }
    print(f"sweep {folder}" + (", going on" if goes_on else ""), flush=True)
    stopped: list[int] = []
    analysis = tune.run(
        make_trainable(),
        name="tune",
        config={"job": job, **(space or {"trial": tune.grid_search(trials)})},
        num_samples=args.samples * len(job["seeds"]) if optuna else 1,
        resources_per_trial={"cpu": args.cpus_per_trial, "gpu": args.gpus_per_trial},
        search_alg=make_search(flags, len(job["seeds"])) if optuna else None,
        scheduler=make_scheduler(max(trial["steps"] for trial in trials), args.grace_steps) if args.asha else None,
        max_failures=args.max_failures,
        resume="AUTO+ERRORED" if goes_on else False,
        raise_on_failed_trial=False,
        trial_dirname_creator=lambda trial: trial.trial_id,
        callbacks=[make_callback(labels, stopped)],
        verbose=0,
        **where,
    )
    rows = [row_of(trial, bool(stopped)) for trial in analysis.trials]
    for row in rows:  # what Tune saw last is a second or two older than what the trial did
        status = read_json(folder.parent / row["run"] / "status.json") if row["state"] == "interrupted" else {}
        names = {
            "step": "global_step",
            "games": "games",
            "mean_return": "mean_return",
            "seconds": "seconds",
            "usd": "usd",
        }
        row.update({name: status[key] for name, key in names.items() if status.get(key) is not None})
    order = {trial["name"]: number for number, trial in enumerate(trials)}
    rows.sort(key=lambda row: order.get(row["run"], 0))
    report(rows, labels, folder)
    states = {row["state"] for row in rows}
    if stopped and states & {"interrupted", "waiting"}:
        print("interrupted: the same command goes on")
        return os.EX_TEMPFAIL
    well = states <= {"complete", "stopped early"}
    write_json(folder / "sweep.json", {**record, "ended": "well" if well else "other"})
    if well:
        print("complete: all trials are done" + (" already" if before and before["ended"] == "well" else ""))
        return 0
    if states <= {"complete", "stopped early", "limit"}:
        print("stopped at a limit: the same command with a higher one goes on")
        return 3
    print("not complete: the states say why, more is in logs/; the same command tries again")
    return 1


def leave(number: int, frame: Any) -> None:
    print("interrupted before any trial began: the same command begins", flush=True)
    os._exit(os.EX_TEMPFAIL)


def main() -> None:
    for number in SIGNALS:  # until trials begin, from when on they are Tune's
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, leave)
    try:
        status = sweep(sys.argv[1:])
    except UsageError as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        status = 2
    sys.exit(status)


if __name__ == "__main__":
    main()
