"""What sweep.py shows of its trials: the table, the ranking over seeds, the picture, files of them."""

import csv
from pathlib import Path
from typing import Any


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


def interquartile_mean(returns: Any, axis: int = -1) -> Any:
    """Mean without the lowest and highest quarter (whole values are left out: none of fewer than 4)."""
    from scipy.stats import trim_mean

    return trim_mean(returns, 0.25, axis=axis)


def rank(rows: list[dict[str, Any]], labels: list[str]) -> list[dict[str, Any]]:
    """Interquartile mean over seeds of each configuration's complete trials, best first in each environment.

    Configurations of which not all trials are complete stand behind the others: where bad seeds were stopped, the rest
    is no fair sample. `low` and `high` are the ends of a 95% percentile bootstrap interval, None for fewer than two
    seeds.
    """
    from scipy.stats import bootstrap

    by_config: dict[tuple, list[float]] = {}
    trials: dict[tuple, int] = {}
    names = [label for label in labels if label not in ("env-id", "seed")]
    for row in rows:
        key = (row.get("env-id", ""), *(row[name] for name in names))
        trials[key] = trials.get(key, 0) + 1
        if row["state"] == "complete" and row["mean_return"] is not None:
            by_config.setdefault(key, []).append(row["mean_return"])
    ranking = []
    for (env_id, *values), returns in by_config.items():
        low = high = None
        if len(returns) > 1:
            interval = bootstrap((returns,), interquartile_mean, method="percentile", rng=0).confidence_interval
            low, high = float(interval.low), float(interval.high)
        config = " ".join(f"{name} {value}" for name, value in zip(names, values, strict=True)) or "all"
        mean = float(interquartile_mean(returns))
        ranking.append(dict(env_id=env_id, config=config, seeds=len(returns), iqm=mean, low=low, high=high))
        ranking[-1]["trials"] = trials[env_id, *values]
        ranking[-1]["returns"] = returns
    return sorted(ranking, key=lambda place: (place["env_id"], place["seeds"] < place["trials"], -place["iqm"]))


def ranking_table(ranking: list[dict[str, Any]]) -> str:
    lines = [["environment", "configuration", "seeds", "IQM of returns", "95% interval"]]
    for place in ranking:
        interval = "none of one seed" if place["low"] is None else f"{place['low']:.2f} to {place['high']:.2f}"
        lines.append([place["env_id"], place["config"], seeds_of(place), f"{place['iqm']:.2f}", interval])
    return align(lines)


def seeds_of(place: dict[str, Any]) -> str:
    return f"{place['seeds']} of {place['trials']}" if place["seeds"] < place["trials"] else str(place["seeds"])


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
        axes.set(title=env_id)
        axes.grid(alpha=0.3)
    figure.supxlabel("mean return of whole games: interquartile mean, 95% interval, each seed", fontsize="medium")
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
