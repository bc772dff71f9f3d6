"""What a run costs: seconds that its processes have lived, the price of its machine, a limit in dollars.

Prices stand in benchmark/prices.csv, never in code.
"""

import csv
import datetime
import difflib
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from common.errors import UsageError

PRICES = Path(__file__).parent.parent / "benchmark" / "prices.csv"
COLUMNS = ("provider", "instance", "gpu", "gpus", "vcpus", "region", "currency", "on_demand", "spot", "usd_per_unit")
COLUMNS += ("rate_as_of", "as_of", "source")
OLD = 365  # days after which a price is said to be old
CLOSE_ENOUGH = 0.5  # similarity of a name that is suggested


def read_prices(path: Path) -> list[dict[str, str]]:
    """The rows of a file of prices.

    Raises:
        UsageError: it is not there, or is not such a file.
    """
    try:
        with open(path, encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"cannot read prices from {path}: {error}") from None
    if not rows or not set(COLUMNS) <= rows[0].keys():
        raise UsageError(f"{path} is no file of prices: its columns must be {', '.join(COLUMNS)}")
    for row in rows:
        if reason := fault_of(row):
            raise UsageError(f"{path}: {row['provider']}:{row['instance']}: {reason}")
    return rows


def fault_of(row: dict[str, str]) -> str:
    """What is wrong with a row, or nothing."""
    if None in row or None in row.values():
        return "another number of fields than the first line has"
    for name in ("as_of", "rate_as_of"):
        if row[name]:
            try:
                datetime.date.fromisoformat(row[name])
            except ValueError:
                return f"{name} {row[name]} is no date such as 2026-12-02"
    if row["currency"] == "USD" and row["usd_per_unit"] != "1":
        return "a US dollar is 1 US dollar: usd_per_unit must be 1"
    if row["currency"] != "USD" and not row["rate_as_of"]:
        return f"the rate of {row['currency']} has no date: rate_as_of is missing"
    if row["vcpus"] and not (row["vcpus"].isdecimal() and int(row["vcpus"]) > 0):
        return f"vcpus {row['vcpus']} must be a number, or empty where nobody knows"
    return ""


def find_instance(name: str, rows: list[dict[str, str]]) -> dict[str, str]:
    """The first row of `provider:instance`, or of `provider:instance@region`.

    Raises:
        UsageError: there is none; with close matches.
    """
    machine, _, region = name.partition("@")
    known = {f"{row['provider']}:{row['instance']}" for row in rows}
    if machine not in known:
        close = difflib.get_close_matches(machine, known, n=3, cutoff=CLOSE_ENOUGH)
        close += [other for other in sorted(known) if machine and other.endswith(f":{machine}") and other not in close]
        hint = f"did you mean {' or '.join(close)}?" if close else f"known are {', '.join(sorted(known))}"
        raise UsageError(f"--instance {name}: not in {PRICES.name}; {hint}")
    places = [row for row in rows if f"{row['provider']}:{row['instance']}" == machine]
    here = [row for row in places if not region or row["region"] == region]
    if not here:
        raise UsageError(f"--instance {name}: no price there, but in {', '.join(row['region'] for row in places)}")
    return here[0]


def dollars_per_hour(row: dict[str, str], spot: bool) -> float | None:
    """US dollars; None where the file has no price.

    Raises:
        UsageError: what stands there is no price.
    """
    kind = "spot" if spot else "on_demand"
    if not row[kind]:
        return None
    try:
        price = float(row[kind]) * float(row["usd_per_unit"] or "nan")
    except ValueError:
        price = float("nan")
    if not 0 < price < float("inf"):
        name = f"{row['provider']}:{row['instance']}"
        raise UsageError(f"{PRICES.name}: {kind} {row[kind]} {row['currency']} of {name} is no price in US dollars")
    return price


def age_of(row: dict[str, str], today: datetime.date | None = None) -> str:
    """`as of 2025-03-06`, and that it is old or that nobody knows how old it is."""
    try:
        as_of = datetime.date.fromisoformat(row["as_of"])
    except ValueError:
        return "undated"
    days = ((today or datetime.date.today()) - as_of).days
    return f"as of {as_of}" + (f", {days * 12 // 365} months old" if days > OLD else "")


class Clock:
    """Seconds and dollars of all processes of a run, also of those that were killed and whose work was done again.

    The time between a process's end and the next one's start is in none of them. Time for which no price was known
    costs what it costs by now; a price that changes from one process to the next counts for its own time only.

    Attributes:
        note: what to say about the price, or nothing.
        max_cost: dollars at which the run has to stop.
    """

    def __init__(self, args: Any, script: str) -> None:
        """Raises UsageError: no price under this name."""
        self.dollars_per_hour, self.note = args.price_per_hour, ""
        if args.instance is not None:
            row = find_instance(args.instance, read_prices(PRICES))
            self.dollars_per_hour = dollars_per_hour(row, args.spot)
            kind = "spot" if args.spot else "on demand"
            if self.dollars_per_hour is None:
                raise UsageError(f"--instance {args.instance}: {PRICES.name} has no {kind} price; use --price-per-hour")
            self.note = (
                f"{row['provider']}:{row['instance']} {kind} in {row['region']}: ${self.dollars_per_hour:.3f} an hour, "
                f"{age_of(row)} ({row['source']})"
            )
        self.max_cost = args.max_cost
        self.before = self.dollars_before = self.unpriced_before = 0.0
        self.save_seconds = 0.0  # what the last save took
        self.needed = 0.0  # seconds that were left when a limit stopped the run, and were too few
        self.since = time.perf_counter()
        if Path(getattr(sys.modules["__main__"], "__file__", None) or "").stem == script:  # its imports cost money too
            self.since -= time.time() - psutil.Process().create_time()

    def seconds(self) -> float:
        return self.before + time.perf_counter() - self.since

    def dollars(self, more: float = 0.0) -> float | None:
        """So far, or in so many more seconds; None without a price."""
        if self.dollars_per_hour is None:
            return None
        seconds = self.unpriced_before + time.perf_counter() - self.since + more
        return self.dollars_before + seconds / 3600 * self.dollars_per_hour

    def exceeds(self, more: float = 0.0) -> bool:
        """Whether so many more seconds would cost more than may be spent."""
        return self.max_cost is not None and self.dollars(more) >= self.max_cost

    def state_dict(self) -> dict[str, float]:
        priced = self.dollars_per_hour is not None
        unpriced = 0.0 if priced else self.unpriced_before + time.perf_counter() - self.since
        dollars = self.dollars() if priced else self.dollars_before
        kept = {"save_seconds": self.save_seconds, "needed": self.needed}
        return {"seconds": self.seconds(), "dollars": dollars, "unpriced_seconds": unpriced, **kept}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Of whom knows of the later time: the heartbeat or the checkpoint."""
        if state["seconds"] > self.before:
            self.before = state["seconds"]
            self.dollars_before = state.get("dollars", 0.0)
            self.unpriced_before = state.get("unpriced_seconds", state["seconds"])
            self.save_seconds, self.needed = state.get("save_seconds", 0.0), state.get("needed", 0.0)
