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
import csv
import ctypes
import fcntl
import hashlib
import itertools
import json
import os
import pickle
import shlex
import shutil
import signal
import subprocess
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

NO_GAME = -1e30  # mean return before a game is over; finite, for ASHA interpolates between returns
# seconds
POLL = 1.0  # after which Tune may stop a trial
AGAIN = 3.0  # between status 75, or a folder in use, and the next start
EXITS = 20.0  # that a trial has to save a checkpoint
GIVES_UP = EXITS + 10.0  # after a signal, whatever Ray does
TABLE = 10.0  # between two tables
MARK = "-- interrupted, status 75"  # in a trial's log

CHOSEN = ("--runs-dir", "--run-name", "--resume", "--mirror")
CROSSED = ("--env-id", "--seed")

# Reads script and command lines from stdin: names of runs and what is wrong, without a word of the script being run.
CHECK = """
import importlib, json, sys
from pathlib import Path
root, script, lines = json.load(sys.stdin)
sys.path[:0] = [str(Path(script).resolve().parent), root]
module = importlib.import_module(Path(script).stem)
from common import args as common_args
if not hasattr(module, "Args"):
    sys.exit(f"{script} is no training script: it has no Args")

def environment(env_id, known={}):
    if env_id not in known:
        try:
            if hasattr(module, "AtariEnvs"):
                from common.envs import atari_settings
                atari_settings(env_id)
            if hasattr(module, "ControlEnvs"):
                from common.control import make_env
                make_env(env_id).close()
            known[env_id] = None
        except common_args.UsageError as error:
            known[env_id] = error
    if known[env_id]:
        raise known[env_id]

def look(words):
    try:
        args = common_args.parse(module.Args, words, "")
        args.check()
        environment(args.env_id)
        name = common_args.default_run_name(args, Path(script).stem)
        return {"name": name, "steps": args.total_timesteps, "env_id": args.env_id, "seed": args.seed}
    except common_args.UsageError as error:
        return {"error": " ".join(str(error).split())}

run = sys.modules.get("common.run")  # of all scripts of ours
print()
print(json.dumps({"revision": run and run.git_revision(), "runs": [look(words) for words in lines]}))
"""


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
                if not found.low < found.high or (found.log and found.low <= 0):
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
    rng = np.random.default_rng(int(digest(flags), 16))
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


def check(script: str, lines: list[list[str]]) -> tuple[list[dict[str, Any]], str | None]:
    """What the script makes of command lines, in one process of its own.

    Returns:
        for each `name` of the run, `steps`, `env_id` and `seed`, or `error`; and the revision of the code.

    Raises:
        UsageError: it cannot be imported.
    """
    done = subprocess.run(
        [sys.executable, "-c", CHECK],
        input=json.dumps([str(common.cluster.ROOT), script, lines]),
        capture_output=True,
        text=True,
        preexec_fn=die_with_parent,
    )
    if done.returncode:
        raise UsageError(f"{script}: {(done.stderr.strip() or 'it ended').splitlines()[-1]}")
    answer = json.loads(done.stdout.splitlines()[-1])
    return answer["runs"], answer["revision"]


# ---- a trial


def die_with_parent() -> None:
    """In the child: the kernel ends it when its parent ends, however that does (prctl(2), PR_SET_PDEATHSIG)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


class Training:
    """The process of one trial, started again as often as it leaves with status 75."""

    def __init__(self, job: dict[str, Any], words: list[str], name: str) -> None:
        """`job`: what all trials share, see `make_job`. `name`: of the run."""
        # of the copy of the code that this node has; a path that is none of ours is the same everywhere
        self.script = str(common.cluster.ROOT / job["script"])
        self.job, self.name = job, name
        self.run_dir = Path(job["runs_dir"]) / name
        self.words = [*words, "--runs-dir", job["runs_dir"]]
        if job["mirror"]:
            self.words += ["--mirror", job["mirror"]]
        if job["price_per_hour"]:
            self.words += ["--price-per-hour", repr(job["price_per_hour"] * share_of_node(job["cpus"], job["gpus"]))]
        self.log = Path(job["logs"]) / f"{name}.log"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.restarts = self.log.read_text(errors="replace").count(MARK) if self.log.exists() else 0
        self.process: subprocess.Popen | None = None
        self.start_at = 0.0

    def start(self) -> None:
        words = [sys.executable, self.script, *self.words]
        with self.log.open("a") as log:
            print("$", shlex.join(words), file=log, flush=True)
            # a session of its own: Ctrl-C is not for it
            self.process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | {"OMP_NUM_THREADS": str(max(1, int(self.job["cpus"])))},
                start_new_session=True,
                preexec_fn=die_with_parent,
            )

    def step(self) -> dict[str, Any]:
        """Wait a little and say how far it is.

        Raises:
            RuntimeError: it failed; the same command goes on from its last checkpoint.
        """
        if self.process is None:
            if (self.run_dir / "summary.json").exists():  # an earlier sweep's, or one by hand
                return self.result("complete")
            if time.monotonic() < self.start_at:
                time.sleep(min(POLL, self.start_at - time.monotonic()))
                return self.result()
            self.start()
        try:
            status = self.process.wait(POLL)
        except subprocess.TimeoutExpired:
            return self.result()
        self.process = None
        if status == 0:
            return self.result("complete")
        if status == 3:
            return self.result("limit")
        in_use = status == 2 and " is in use by " in self.last_line()
        if status == os.EX_TEMPFAIL or in_use:
            self.start_at = time.monotonic() + AGAIN
            if not in_use:
                self.restarts += 1
                with self.log.open("a") as log:
                    print(MARK, file=log)
            return self.result()
        if status == 2:
            return self.result("refused: " + self.last_line().removeprefix("error: "))
        raise RuntimeError(f"status {status}: {self.last_line()} ({self.log})")

    def last_line(self) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""

    def result(self, end: str = "") -> dict[str, Any]:
        """A line of the report. `end`: how the trial ended, if it did."""
        status = read_json(self.run_dir / "status.json") | read_json(self.run_dir / "summary.json")
        mean = status.get("mean_return")
        return {
            "mean_return": NO_GAME if mean is None else mean,
            "global_step": status.get("global_step") or 0,
            "total_timesteps": status.get("total_timesteps") or 0,
            "games": status.get("games") or 0,
            "sps": status.get("sps") or 0.0,
            "seconds": status.get("seconds") or 0.0,
            "usd": status.get("usd") or 0.0,
            "restarts": self.restarts,
            "run": self.name,
            "state": end or ("interrupted" if self.process is None else status.get("phase") or "start"),
            "done": bool(end),
        }

    def stop(self) -> None:
        """Have it save a checkpoint and leave."""
        if self.process is None:
            return
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(EXITS)
        self.process.kill()
        self.process.wait()


def share_of_node(cpus: float, gpus: float) -> float:
    """Of the machine on which this trial is, and whose price it pays."""
    import ray

    here = ray.get_runtime_context().get_node_id()
    (node,) = [node["Resources"] for node in ray.nodes() if node["NodeID"] == here]
    return max(cpus / node.get("CPU", cpus or 1), gpus / node.get("GPU", gpus or 1))


def make_trainable() -> type:
    from ray import tune

    class Trial(tune.Trainable):
        def setup(self, config: dict[str, Any]) -> None:
            self.training, job = None, config["job"]
            words = command_line(combination_of(config))
            (run,), _ = (
                check(str(common.cluster.ROOT / job["script"]), [words])
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

    search = OptunaSearch(metric="mean_return", mode="max", seed=int(digest(flags), 16))
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

            for number in (signal.SIGINT, signal.SIGTERM):
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


def blank(value: float | None, form: str) -> str:
    return format(value, form) if value else ""


def align(lines: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    pairs = [zip(line, widths, strict=True) for line in lines]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in pair).rstrip() for pair in pairs)


def table(rows: list[dict[str, Any]], labels: list[str], most: int = 10**9) -> str:
    """For the terminal; of trials that are too many, those that wait or are complete go first."""
    idle = ("waiting", "complete", "stopped early")
    shown = sorted(rows, key=lambda row: idle.index(row["state"]) + 1 if row["state"] in idle else 0)[: max(most, 3)]
    lines = [[*labels, "steps", "return", "steps/s", "cost", "state"]]
    for row in rows:
        if row in shown:
            failures = f", failed {row['failures']} times" if row["failures"] and row["state"] != "failed" else ""
            steps = f"{row['step']:,}/{row['total']:,}" if row["total"] else ""
            mean = "" if row["mean_return"] is None else f"{row['mean_return']:.2f}"
            cost, state = blank(row["usd"], ",.4f"), row["state"] + failures
            values = [str(row.get(label, "")) for label in labels]
            lines.append([*values, steps, mean, blank(row["sps"], ",.0f"), cost and f"${cost}", state])
    done = sum(row["state"] in ("complete", "stopped early") for row in rows)
    return f"{align(lines)}\n{len(rows)} trials, {done} done; {bill(rows)}"


def bill(rows: list[dict[str, Any]]) -> str:
    hours, dollars = sum(row["seconds"] for row in rows) / 3600, sum(row["usd"] for row in rows)
    return f"{hours:.2f} hours of trials" + (f", ${dollars:,.4f}" if dollars else "")


# ---- the report


def interquartile_mean(returns: Any, axis: int = -1) -> Any:
    """Mean without the lowest and highest quarter (whole values are left out: none of fewer than 4)."""
    from scipy.stats import trim_mean

    return trim_mean(returns, 0.25, axis=axis)


def rank(rows: list[dict[str, Any]], labels: list[str]) -> list[dict[str, Any]]:
    """Interquartile mean over seeds of each configuration's complete trials, best first in each environment.

    `low` and `high` are the ends of a 95% percentile bootstrap interval, None for fewer than two seeds.
    """
    from scipy.stats import bootstrap

    by_config: dict[tuple, list[float]] = {}
    names = [label for label in labels if label not in ("env-id", "seed")]
    for row in rows:
        if row["state"] == "complete" and row["mean_return"] is not None:
            by_config.setdefault((row.get("env-id", ""), *(row[name] for name in names)), []).append(row["mean_return"])
    ranking = []
    for (env_id, *values), returns in by_config.items():
        low = high = None
        if len(returns) > 1:
            interval = bootstrap((returns,), interquartile_mean, method="percentile", rng=0).confidence_interval
            low, high = float(interval.low), float(interval.high)
        config = " ".join(f"{name} {value}" for name, value in zip(names, values, strict=True)) or "all"
        mean = float(interquartile_mean(returns))
        ranking.append(dict(env_id=env_id, config=config, seeds=len(returns), iqm=mean, low=low, high=high))
        ranking[-1]["returns"] = returns
    return sorted(ranking, key=lambda place: (place["env_id"], -place["iqm"]))


def ranking_table(ranking: list[dict[str, Any]]) -> str:
    lines = [["environment", "configuration", "seeds", "IQM of returns", "95% interval"]]
    for place in ranking:
        interval = "none of one seed" if place["low"] is None else f"{place['low']:.2f} to {place['high']:.2f}"
        lines.append([place["env_id"], place["config"], str(place["seeds"]), f"{place['iqm']:.2f}", interval])
    return align(lines)


def write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def draw(ranking: list[dict[str, Any]], path: Path) -> None:
    """One panel an environment: interquartile means with their intervals, and each seed."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    by_env: dict[str, list] = {}
    for place in ranking:
        by_env.setdefault(place["env_id"], []).append(place)
    height = 1.2 + 0.4 * max(map(len, by_env.values()))
    figure, panels = plt.subplots(
        1, len(by_env), figsize=(2 + 4.5 * len(by_env), height), layout="constrained", squeeze=False
    )
    for axes, (env_id, places) in zip(panels[0], by_env.items(), strict=True):
        for y, place in enumerate(reversed(places)):
            axes.plot(place["returns"], [y] * place["seeds"], "o", color="tab:gray", alpha=0.5, markersize=4)
            axes.plot(place["iqm"], y, "D", color="tab:blue")
            if place["low"] is not None:
                axes.plot([place["low"], place["high"]], [y, y], color="tab:blue", linewidth=2)
        axes.set_yticks(range(len(places)), [place["config"] for place in reversed(places)])
        axes.set_ylim(-0.5, len(places) - 0.5)
        axes.set(title=env_id, xlabel="mean return of whole games: IQM, 95% interval, seeds")
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def report(rows: list[dict[str, Any]], labels: list[str], folder: Path) -> None:
    print(table(rows, labels))
    if not rows:
        return
    write_csv(folder / "results.csv", rows)
    if ranking := rank(rows, labels):
        print(ranking_table(ranking))
        write_csv(folder / "ranking.csv", [{k: v for k, v in place.items() if k != "returns"} for place in ranking])
        draw(ranking, folder / "returns.png")
    print(f"written to {folder}")


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
    priced = ["--price-per-hour", "1"] if price else []
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
    return 3 if states <= {"complete", "stopped early", "limit"} else 1


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # until trials begin, from when on they are Tune's
        signal.signal(number, lambda *_: os._exit(os.EX_TEMPFAIL))
    try:
        status = sweep(sys.argv[1:])
    except UsageError as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        status = 2
    sys.exit(status)


if __name__ == "__main__":
    main()
