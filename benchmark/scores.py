"""Table and curves of complete runs, several seeds of each environment, beside CleanRL's published scores.

    python benchmark/scores.py runs/* --out docs/ppo_continuous.png

A score is the mean return of a run's last 100 episodes, as summary.json has it; the table gives mean and standard
deviation over the seeds. The curves are means over the seeds, against agent steps and against the time that the runs'
processes lived, with the range of the seeds behind them.
"""

import argparse
import json
import logging
import statistics
from collections import defaultdict
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")  # draws to files, without a screen

import matplotlib.pyplot as plt
import numpy as np
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

# https://docs.cleanrl.dev/rl-algorithms/ppo/ , ppo_continuous_action.py, MuJoCo v4, 1M steps, mean and deviation
PUBLISHED = {
    "HalfCheetah": (1442.64, 46.03),
    "Hopper": (2382.86, 271.74),
    "Walker2d": (2287.95, 571.78),
    "InvertedPendulum": (963.09, 22.20),
}
OFF = 60.0  # seconds without an episode that the machine was off


def episodes(folder: Path) -> np.ndarray:
    """`[E, 3]`: agent step, seconds that the run had lived, return."""
    logging.getLogger("tensorboard").setLevel(logging.ERROR)  # it warns of each restart
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    found = events.Scalars("charts/episodic_return")
    between = np.diff([event.wall_time for event in found], prepend=found[0].wall_time)
    seconds = np.where(between < OFF, between, 0.0).cumsum()
    return np.array([(event.step, at, event.value) for event, at in zip(found, seconds, strict=True)])


def smooth(x: np.ndarray, y: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """Means of `y` in the cells that end at `grid`; where no episode ended, the mean before."""
    cells = np.searchsorted(grid, x)
    means = [y[cells == cell].mean() if (cells == cell).any() else np.nan for cell in range(len(grid))]
    for cell in range(1, len(means)):
        means[cell] = means[cell - 1] if np.isnan(means[cell]) else means[cell]
    return np.array(means)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="folders of complete runs")
    parser.add_argument("--out", type=Path, help="a picture of the curves")
    args = parser.parse_args()

    groups: dict[str, dict[int, Path]] = defaultdict(dict)
    for run in args.runs:
        if not (run / "summary.json").exists():
            raise SystemExit(f"error: {run} is no complete run")
        flags = json.loads((run / "config.json").read_text())["args"]
        groups[flags["env_id"]][flags["seed"]] = run

    print("| environment | seeds | return | CleanRL, v4 | each seed | agent steps/s |\n|---|---|---|---|---|---|")
    for env_id, runs in sorted(groups.items()):
        summaries = [json.loads((runs[seed] / "summary.json").read_text()) for seed in sorted(runs)]
        scores = [summary["mean_return"] for summary in summaries]
        deviation = f" +- {statistics.stdev(scores):.0f}" if len(scores) > 1 else ""
        published = PUBLISHED.get(env_id.split("-")[0])
        print(
            f"| {env_id} | {', '.join(map(str, sorted(runs)))} | {statistics.mean(scores):.0f}{deviation} "
            f"| {'{:.2f} +- {:.2f}'.format(*published) if published else ''} | {', '.join(f'{x:.0f}' for x in scores)} "
            f"| {statistics.median(summary['sps'] for summary in summaries):,.0f} |"
        )
    if args.out is None:
        return

    figure, axes = plt.subplots(2, len(groups), figsize=(4 * len(groups), 6), squeeze=False, layout="constrained")
    for column, (env_id, runs) in enumerate(sorted(groups.items())):
        all_episodes = [episodes(runs[seed]) for seed in sorted(runs)]
        for row, (unit, name) in enumerate([(1e6, "million agent steps"), (60.0, "minutes")]):
            end = min(found[-1, row] for found in all_episodes)
            grid = np.linspace(0, end, 41)[1:]
            curves = np.array([smooth(found[:, row], found[:, 2], grid) for found in all_episodes])
            panel = axes[row, column]
            panel.fill_between(grid / unit, curves.min(0), curves.max(0), alpha=0.2, linewidth=0)
            panel.plot(grid / unit, curves.mean(0), linewidth=2)
            if env_id.split("-")[0] in PUBLISHED:
                panel.axhline(PUBLISHED[env_id.split("-")[0]][0], color="gray", linestyle="--", linewidth=1)
            panel.set_xlabel(name)
            panel.grid(alpha=0.3)
        axes[0, column].set_title(env_id)
    for row in range(2):
        axes[row, 0].set_ylabel("return of an episode")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.out, dpi=110)
    print(f"written to {args.out}")


if __name__ == "__main__":
    main()
