"""Draw the return of runs against agent steps, hours and dollars, read from their event files.

    python benchmark/curves.py runs/BREAKOUT_RUN --reference benchmark/results/CleanRL_ppo_atari.csv

Runs of one environment, script and flags that differ in their seeds are one line, their mean, in a band from the lowest
to the highest. Each point is the mean return of the games that ended in one window of steps. Hours are those that the
run's processes have lived, work that was done twice included; dollars are what the run counted itself, or hours times
`--price-per-hour`. A reference is a CSV file of points by steps.
"""

import argparse
import csv
import json
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

try:
    import matplotlib as mpl
except ImportError:
    raise SystemExit("error: pictures need matplotlib: pip install -r requirements.txt") from None

sys.path.insert(0, str(Path(__file__).parent.parent))

mpl.use("Agg")  # draws to files, without a screen

import matplotlib.pyplot as plt

from benchmark.command_line import Parser, refuse
from common.args import RESULT_STAYS

SPS = "charts/SPS"


@dataclass
class Curve:
    """Points of one run, `[P]` each."""

    steps: np.ndarray  # the middle of each window, agent steps
    returns: np.ndarray  # mean return of the games that ended in it
    hours: np.ndarray | None  # at those steps; None where a run logged no time
    dollars: np.ndarray | None


def read_run(folder: Path, window: int, price_per_hour: float | None = None) -> Curve:
    """Exits with one line if the folder is none, or holds no finished game."""
    if not folder.is_dir():
        refuse(f"{folder} is no folder of a run")
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    tags = events.Tags()["scalars"]
    if "charts/episodic_return" not in tags:
        refuse(f"{folder} holds no finished game")
    games = np.array([(event.step, event.value) for event in events.Scalars("charts/episodic_return")])
    # a game that ends on the last step of a window belongs to it
    windows = (games[:, 0] - 1) // window
    numbers = np.unique(windows)
    means = np.array([games[windows == number, 1].mean() for number in numbers])
    last = max(event.step for event in events.Scalars(SPS if SPS in tags else "charts/episodic_return"))
    steps = (numbers * window + np.minimum((numbers + 1) * window, last)) / 2

    def at_steps(tag: str) -> np.ndarray | None:
        if tag not in tags:
            return None
        points = [(event.step, event.value) for event in events.Scalars(tag)]
        return np.interp(steps, *zip((0, 0.0), *points, strict=True))

    hours = at_steps("cost/hours")
    dollars = at_steps("cost/usd") if price_per_hour is None else None if hours is None else hours * price_per_hour
    return Curve(steps, means, hours, dollars)


def last_step(folder: Path) -> int:
    try:
        return int(json.loads((folder / "status.json").read_text())["global_step"])
    except (OSError, ValueError, KeyError, TypeError):
        return 10**9


def read_reference(path: Path) -> Curve:
    """Exits with one line if the file holds no points."""
    try:
        with open(path) as file:
            rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
        middles = [(float(row["first_step"]) + float(row["last_step"])) / 2 for row in rows]
        return Curve(np.array(middles), np.array([float(row["mean_return"]) for row in rows]), None, None)
    except (OSError, KeyError, TypeError, ValueError) as error:
        refuse(f"{path} holds no points first_step, last_step, mean_return: {error!r}")


def group_of(run: Path) -> tuple[str, str]:
    """What runs that differ only in their seeds have in common, and a name for it."""
    try:
        config = json.loads((run / "config.json").read_text())
        flags = {name: value for name, value in config["args"].items() if name not in NOT_THE_TASK}
        return json.dumps([config["script"], flags], sort_keys=True), f"{flags['env_id']} {config['script']}"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return str(run), run.name


NOT_THE_TASK = RESULT_STAYS | {"seed"}


def band(curves: list[Curve], x: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Mean, lowest and highest return of several runs where all of them have points, `[P]` each."""
    axes = [getattr(curve, x) for curve in curves]
    grid = axes[0]
    grid = grid[(grid >= max(axis[0] for axis in axes)) & (grid <= min(axis[-1] for axis in axes))]
    returns = np.array([np.interp(grid, axis, curve.returns) for axis, curve in zip(axes, curves, strict=True)])
    return grid, returns.mean(0), returns.min(0), returns.max(0)


AXES = {"steps": ("agent steps (millions)", 1e-6), "hours": ("hours", 1.0), "dollars": ("US dollars", 1.0)}


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="run folders")
    parser.add_argument("--labels", nargs="+", help="one a line in the picture")
    parser.add_argument("--reference", type=Path, nargs="*", default=[], help="CSV files")
    parser.add_argument(
        "--window", type=int, help="agent steps a point; by default 50,000, or a twentieth of the shortest"
    )
    parser.add_argument("--price-per-hour", type=float, help="US dollars, instead of what the runs counted")
    parser.add_argument("--title", default="")
    parser.add_argument("--out", type=Path, default=Path("curves.png"))
    args = parser.parse_args()
    for name in ("window", "price_per_hour"):
        value = getattr(args, name)
        if value is not None and not 0 < value < float("inf"):
            refuse("--window and --price-per-hour must be positive")
    groups: dict[str, list[Path]] = defaultdict(list)
    names = {}
    for run in args.runs:
        key, name = group_of(run)
        groups[key].append(run)
        names[key] = run.name if len(groups[key]) == 1 else f"{name}, {len(groups[key])} seeds"
    labels = args.labels or list(names.values())
    if len(labels) != len(groups):
        refuse(f"{len(groups)} lines need as many labels, got {len(labels)}")

    if not args.out.parent.is_dir() or args.out.suffix not in (".png", ".svg", ".pdf"):
        refuse(f"--out {args.out}: must be a .png, .svg or .pdf in a folder that is there")
    window = args.window or min(50_000, *(max(1, last_step(run) // 20) for run in args.runs))
    lines = [[read_run(run, window, args.price_per_hour) for run in group] for group in groups.values()]
    references = {path: read_reference(path) for path in args.reference}
    used = [x for x in AXES if any(all(getattr(curve, x) is not None for curve in curves) for curves in lines)]
    figure, panels = plt.subplots(
        1, len(used), figsize=(3 + 5 * len(used), 4.5), layout="constrained", sharey=True, squeeze=False
    )
    for x, axes in zip(used, panels[0], strict=True):
        for label, curves in zip(labels, lines, strict=True):
            if any(getattr(curve, x) is None for curve in curves):
                axes.plot([], [])  # the next line keeps its colour
                continue
            grid, mean, low, high = band(curves, x)
            (line,) = axes.plot(grid * AXES[x][1], mean, ".-", linewidth=2, markersize=5, label=label)
            if len(curves) > 1:
                axes.fill_between(grid * AXES[x][1], low, high, color=line.get_color(), alpha=0.2, linewidth=0)
            if x == "steps":
                points = "  ".join(f"{step:.0f} {value:.2f}" for step, value in zip(grid, mean, strict=True))
                print(f"{label}: {points}")
        if x == "steps":
            for path, curve in references.items():
                name = path.stem.replace("_", " ")
                axes.plot(curve.steps / 1e6, curve.returns, "--", color="black", linewidth=1.5, label=name)
        axes.set(xlabel=AXES[x][0])
        axes.grid(alpha=0.3)
    panels[0, 0].set(ylabel="mean return of whole games", title=args.title)
    panels[0, 0].legend()
    try:
        figure.savefig(args.out, dpi=130)
    except (OSError, ValueError) as error:
        refuse(f"cannot write {args.out}: {error}")
    print(f"written to {args.out}")


if __name__ == "__main__":
    main()
