"""The published comparison of three GPUs, computed again from its own figures: what agrees and what does not.

python benchmark/audit.py
"""

import csv
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmark.figures import Number
from common.cost import PRICES, dollars_per_hour, find_instance, read_prices
from common.errors import UsageError

PUBLISHED = Path(__file__).parent / "published.csv"
SAME = 0.01  # relative difference up to which two figures agree: the article rounds
COFFEE = 5.0  # dollars; the article names no price for its cup
FASTER_WITH_AMP = 1.3  # the article: about 30% on Ampere


@dataclass(frozen=True)
class Finding:
    """One figure or claim of the article beside what follows from its other figures."""

    what: str
    published: Number
    recomputed: Number
    agrees: bool | None  # None: nothing to agree with, beside it for comparison
    words: str

    @property
    def verdict(self) -> str:
        return {True: "agrees", False: "does not agree", None: "for comparison"}[self.agrees]


def read_published(path: Path = PUBLISHED) -> list[dict[str, str]]:
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


def agree(a: float, b: float) -> bool:
    return abs(a - b) <= SAME * abs(b)


def find(instance: str, prices: list[dict[str, str]]) -> dict[str, str] | None:
    """Its row, or None: somebody's own file of prices need not have the article's machines."""
    try:
        return find_instance(instance, prices)
    except UsageError:
        return None


def frames_of(row: dict[str, str]) -> float:
    """Frames of one row: its speed times its time."""
    return float(row["fps"]) * float(row["hours"]) * 3600


def audit(rows: list[dict[str, str]], prices: list[dict[str, str]]) -> list[Finding]:
    """All findings. `prices`: as `read_prices` returns them, for what machines cost as a whole."""
    findings = []
    job = frames_of(rows[0])
    for row in rows:
        device, hours, cost = row["device"], float(row["hours"]), float(row["cost"])
        frames = frames_of(row)
        if row is not rows[0]:
            words = f"{row['fps']} x {hours:g} h are as many frames as {rows[0]['device']}'s"
            if not agree(frames, job):
                needed = job / float(row["fps"]) / 3600
                words = f"not the same work: {rows[0]['device']}'s frames would take {needed:.1f} h"
            base = Number(job / 1e6, "recomputed", 1, unit=" M")
            findings.append(
                Finding(
                    f"{device}: frames, {rows[0]['device']} has",
                    base,
                    Number(frames / 1e6, "recomputed", 1, unit=" M"),
                    agree(frames, job),
                    words,
                )
            )
        published = Number(cost, "published", prefix="$")
        if row["rate"]:
            rate = float(row["rate"])
            recomputed = Number(hours * rate, "recomputed", 2, prefix="$")
            same = agree(cost, hours * rate)
            words = f"{hours:g} h x ${rate}" + ("" if same else f"; ${cost:g} would be ${cost / hours:.2f} an hour")
            findings.append(Finding(f"{device}: cost", published, recomputed, same, words))
            whole = find(row["instance"], prices)
            price = whole and dollars_per_hour(whole, spot=False)
            if price is not None and not agree(rate, price):
                words = f"the instance with its host is ${price} an hour ({whole['source']}), ${rate} is the GPU alone"
                findings.append(
                    Finding(
                        f"{device}: cost at the whole machine's price",
                        published,
                        Number(hours * price, "recomputed", 2, prefix="$"),
                        agree(cost, hours * price),
                        words,
                    )
                )
            spot = whole and dollars_per_hour(whole, spot=True)
            if spot is not None:
                findings.append(
                    Finding(
                        f"{device}: cost on spot",
                        published,
                        Number(hours * spot, "recomputed", 2, prefix="$"),
                        None,
                        f"{hours:g} h x ${spot}, {whole['region']}, if it is never taken away",
                    )
                )
        else:
            kwh = hours * float(row["watts"]) / 1000
            words = f"{hours:g} h x {row['watts']} W, so ${cost:g} means ${cost / kwh:.2f} a kWh"
            findings.append(
                Finding(
                    f"{device}: electricity",
                    published,
                    Number(kwh, "recomputed", 1, unit=" kWh"),
                    None,
                    words + "; the card alone, the rest of the machine not counted",
                )
            )
    for kind, spot in (("on demand", False), ("spot", True)):
        row = find("aws:p3.2xlarge", prices)
        if row is None or (price := dollars_per_hour(row, spot)) is None:
            continue
        words = f"a cup taken for ${COFFEE:g}, the machine at ${price} an hour {kind}; 8 h would be ${8 * price:.2f}"
        findings.append(
            Finding(
                f"a cup of coffee buys 8 hours of a V100, {kind}",
                Number(8, "published", unit=" h"),
                Number(COFFEE / price, "recomputed", 1, unit=" h"),
                COFFEE / price >= 8,
                words + ("" if COFFEE / price < 8 else ", in the cheapest region and at the price of one day"),
            )
        )
    return findings


def main() -> None:
    try:
        findings = audit(read_published(), read_prices(PRICES))
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    for one in findings:
        figures = f"{one.published.plain():>10} {one.recomputed.plain():>12}"
        print(f"{one.what:48} {figures}  {one.verdict:14}  {one.words}")


if __name__ == "__main__":
    main()
