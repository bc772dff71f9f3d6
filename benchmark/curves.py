"""Draw return against agent steps for runs, read from their event files.

    python benchmark/curves.py runs/BREAKOUT_RUN --reference benchmark/results/CleanRL_ppo_atari.csv

Each point is the mean return of the games that ended in one window of steps. A reference is a CSV file of such points.
"""

import argparse
import csv
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")  # draws to files, without a screen

import matplotlib.pyplot as plt
import numpy as np
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

Curve = tuple[np.ndarray, np.ndarray]  # middles of the windows (agent steps), mean returns


def read_run(folder: Path, window: int) -> Curve:
    """Raises SystemExit with one line if the folder holds no finished game."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    if "charts/episodic_return" not in events.Tags()["scalars"]:
        raise SystemExit(f"error: {folder} holds no finished game")
    games = np.array([(event.step, event.value) for event in events.Scalars("charts/episodic_return")])
    # a game that ends on the last step of a window belongs to it
    windows = (games[:, 0] - 1) // window
    numbers = np.unique(windows)
    means = np.array([games[windows == number, 1].mean() for number in numbers])
    return (numbers + 0.5) * window, means


def read_reference(path: Path) -> Curve:
    with open(path) as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    middles = [(float(row["first_step"]) + float(row["last_step"])) / 2 for row in rows]
    return np.array(middles), np.array([float(row["mean_return"]) for row in rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="run folders")
    parser.add_argument("--labels", nargs="+", help="one a run; by default the folders' names")
    parser.add_argument("--reference", type=Path, nargs="*", default=[], help="CSV files")
    parser.add_argument("--window", type=int, default=50_000, help="agent steps a point")
    parser.add_argument("--title", default="")
    parser.add_argument("--out", type=Path, default=Path("curves.png"))
    args = parser.parse_args()
    labels = args.labels or [run.name for run in args.runs]
    if len(labels) != len(args.runs):
        parser.error(f"{len(args.runs)} runs need as many labels, got {len(labels)}")

    curves = [read_run(run, args.window) for run in args.runs]
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for label, (steps, returns) in zip(labels, curves, strict=True):
        axes.plot(steps / 1e6, returns, linewidth=2, label=label)
        points = "  ".join(f"{step:.0f} {value:.2f}" for step, value in zip(steps, returns, strict=True))
        print(f"{label}: {points}")
    for path in args.reference:
        steps, returns = read_reference(path)
        axes.plot(steps / 1e6, returns, "--", color="black", linewidth=1.5, label=path.stem.replace("_", " "))
    axes.set(xlabel="agent steps (millions)", ylabel="mean return of whole games", title=args.title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(args.out, dpi=130)
    print(f"written to {args.out}")


if __name__ == "__main__":
    main()
