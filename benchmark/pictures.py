"""The report's pictures: solid is measured, hatched projected, grey published, dotted outlines recomputed."""

import csv
import io
from typing import Any

import matplotlib as mpl

mpl.use("Agg")  # draws to files, without a screen

import matplotlib.pyplot as plt

from benchmark.results import FRAME_SKIP
from common.cost import dollars_per_hour

LOOKS = {
    "published": dict(facecolor="#d1d5db", edgecolor="#6b7280", linewidth=1),
    "recomputed": dict(facecolor="white", edgecolor="#8a4b00", linewidth=1.5, linestyle=":"),
    "measured": dict(facecolor="#15803d", edgecolor="#15803d", linewidth=1),
    "projected": dict(facecolor="#dbeafe", edgecolor="#1d4ed8", linewidth=1, hatch="///"),
}
Bar = tuple[str, float, str]  # name, value, kind


def bars(title: str, label: str, values: list[Bar], error: float | None, money: bool) -> bytes:
    figure, axes = plt.subplots(figsize=(9, 1.4 + 0.42 * len(values)), layout="constrained")
    for place, (_, value, kind) in enumerate(reversed(values)):
        spread = value * error if kind == "projected" and error else None
        axes.barh(place, value, xerr=spread, ecolor="#1d4ed8", capsize=3, height=0.7, **LOOKS[kind])
        text = f"${value:,.2f}" if money else f"{value:,.0f}"
        axes.annotate(text, (value + (spread or 0), place), (6, 0), textcoords="offset points", va="center", fontsize=9)
    axes.set_yticks(range(len(values)), [name for name, *_ in reversed(values)], fontsize=9)
    axes.set(title=title, xlabel=label)
    axes.margins(x=0.14)
    axes.set_xlim(left=0)
    axes.spines[["top", "right"]].set_visible(False)
    present = [kind for kind in LOOKS if any(kind == bar[2] for bar in values)]
    handles = [plt.Rectangle((0, 0), 1, 1, **LOOKS[kind]) for kind in present]
    axes.legend(handles, present, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=4, frameon=False)
    return png(figure)


def png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    # no date, no version: the same figures are the same file
    figure.savefig(buffer, dpi=130, format="png", metadata={"Software": None})
    plt.close(figure)
    return buffer.getvalue()


def draw(report: Any) -> dict[str, bytes]:
    """File name -> PNG."""
    speeds: list[Bar] = [(f"{row['device']}, the article", float(row["fps"]), "published") for row in report.published]
    costs: list[Bar] = []
    for row in report.published:
        costs.append((f"{row['device']}, the article", float(row["cost"]), "published"))
        if row["rate"]:
            again = report.hours(float(row["fps"])) * float(row["rate"])
            costs.append((f"{row['device']}, the article's FPS and rate", again, "recomputed"))
    lines: list[tuple[str, float, str]] = []  # name, dollars a million agent steps with 8 environments, kind
    for default in report.priced():
        name = f"here, {default.script}, {default.num_envs} environments"
        speeds.append((name, default.frames, "measured"))
        if (price := report.money.dollars_per_hour) is not None:
            costs.append((f"here, {default.script}", report.hours(default.frames) * price, "recomputed"))
            if default.script == "ppo_atari":
                lines.append(("here", price / 3600 / default.sps.median * 1e6, "recomputed"))
    if report.model:
        for row, host in report.hosts:
            num_envs, sps, _ = report.project(host)
            speeds.append((f"{host.name}, {host.gpu}, {num_envs} environments", sps * FRAME_SKIP, "projected"))
            for kind, spot in (("on demand", False), ("spot", True)):
                if (price := dollars_per_hour(row, spot)) is not None:
                    name = f"{host.name}, {kind}"
                    costs.append((name, report.hours(sps * FRAME_SKIP) * price, "projected"))
                    lines.append(
                        (name, price / 3600 / report.model.on(host.vcpus, host.tflops).sps(8) * 1e6, "projected")
                    )
    words = f"PPO on Atari, {report.frames / 1e6:,.0f} million frames"
    pictures = {
        "frames_per_second.png": bars("PPO on Atari, frames a second", "frames/s", speeds, report.error, False),
        "dollars.png": bars(f"Dollars for the job: {words}", "US dollars", costs, report.error, True),
    }
    if lines:
        pictures["return_against_dollars.png"] = return_against_dollars(lines)
    return pictures


def return_against_dollars(lines: list[tuple[str, float, str]]) -> bytes:
    from benchmark.report import LEARNING_CURVE

    with open(LEARNING_CURVE, encoding="utf-8") as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    steps = [(float(row["first_step"]) + float(row["last_step"])) / 2e6 for row in rows]
    returns = [float(row["mean_return"]) for row in rows]
    figure, axes = plt.subplots(figsize=(9, 4.8), layout="constrained")
    for name, dollars, kind in lines:
        style = "-" if kind == "recomputed" else "--"
        axes.plot([step * dollars for step in steps], returns, style, linewidth=2, label=f"{name} ({kind})")
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: f"${value:g}")
    axes.set(
        xlabel="US dollars (logarithmic)",
        ylabel="mean return of whole games",
        title="Breakout: CleanRL's return at each step (measured, seed 1), times what a step costs with 8 environments",
    )
    axes.title.set_fontsize(10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    return png(figure)
