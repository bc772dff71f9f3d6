"""Result files: what `run.py` measured on one machine, in a form that others can send in.

    {"schema": "spotrl-benchmark", "version": 3, "measured_on": "2026-12-02", "command": [...],
     "machine": {"cpu", "cores", "available_cores", "torch_threads", "gpu", "driver", "packages", ...},
     "settings": [{"name", "kind": "script" | "peer" | "floor", "script", "precision", "num_envs", "command",
                   "rounds": [{"windows": [agent steps/s], "shares": {"environment": 0.2, ...}, "peak_memory_mib",
                               "gpu_memory_mib", "power_w", "microseconds_per_agent_step"}]}]}

Peers and floors say one speed a round, scripts one a window. A setting that failed has `error` and no rounds.
"""

import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SCHEMA, VERSION = "spotrl-benchmark", 3
FRAME_SKIP = 4  # emulator frames an agent step, on Atari
ATARI = ("ppo_atari", "dqn_atari")


class ForeignFile(Exception):
    """Not a result file that can be used; one line says why."""


@dataclass(frozen=True)
class Spread:
    low: float
    median: float
    high: float


def spread(values: list[float]) -> Spread:
    return Spread(min(values), statistics.median(values), max(values))


@dataclass(frozen=True)
class Setting:
    """One program with its flags, as measured."""

    name: str
    kind: str
    script: str
    precision: str
    num_envs: int
    command: str
    rounds: list[dict[str, Any]]

    @property
    def sps(self) -> Spread:
        """Agent steps a second over all windows of all rounds."""
        return spread([window for one in self.rounds for window in one["windows"]])

    @property
    def frames(self) -> float | None:
        """Emulator frames a second; None where there is no emulator."""
        return self.sps.median * FRAME_SKIP if self.script in ATARI else None

    def share(self, part: str) -> float | None:
        """Of the loop's time: `environment`, `inference`, `learning`; the median of the rounds."""
        shares = [one["shares"][part] for one in self.rounds if part in one.get("shares", {})]
        return statistics.median(shares) if shares else None

    def largest(self, key: str) -> float | None:
        values = [one[key] for one in self.rounds if one.get(key) is not None]
        return max(values) if values else None


@dataclass(frozen=True)
class Result:
    machine: dict[str, Any]
    measured_on: str
    settings: dict[str, Setting]
    failed: dict[str, str]

    def ratio(self, name: str, other: str) -> Spread | None:
        """Of two settings' speeds, each round by itself."""
        if name not in self.settings or other not in self.settings:
            return None
        pairs = zip(self.settings[name].rounds, self.settings[other].rounds, strict=False)
        return spread([statistics.median(a["windows"]) / statistics.median(b["windows"]) for a, b in pairs])

    def name(self) -> str:
        """Of the machine, for tables."""
        cores = self.machine["available_cores"]
        gpu = self.machine.get("gpu")
        units = self.machine.get("cpu_capability")
        return f"{f'{gpu}, ' if gpu else ''}{cores} cores of {self.machine['cpu']}{f' ({units})' if units else ''}"


def parse(content: Any) -> Result:
    """Raises ForeignFile."""
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        raise ForeignFile(f"is no result file: its schema is not {SCHEMA}")
    if content.get("version") != VERSION:
        raise ForeignFile(f"is of version {content.get('version')}, this program reads {VERSION}: measure again")
    try:
        machine, settings, failed = content["machine"], {}, {}
        if not content["settings"]:
            raise ForeignFile("holds no settings")
        for one in content["settings"]:
            if not all(isinstance(one[field], str) for field in ("name", "kind", "script", "precision")):
                raise ForeignFile(f"has a setting without a name that is a word: {one['name']}")
            if "error" in one:
                failed[str(one["name"])] = str(one["error"])
                continue
            rounds = one["rounds"]
            for windows in [each["windows"] for each in rounds]:
                if not windows or not all(isinstance(x, int | float) and 0 < x < 1e9 for x in windows):
                    raise ForeignFile(f"has no speeds of {one['name']}")
            if not rounds:
                raise ForeignFile(f"has no rounds of {one['name']}")
            fields = ("name", "kind", "script", "precision", "num_envs", "command", "rounds")
            settings[one["name"]] = Setting(**{field: one[field] for field in fields})
            for shares in [each.get("shares") or {} for each in rounds]:
                if not all(isinstance(x, int | float) and 0 <= x < 1 for x in shares.values()):
                    raise ForeignFile(f"has no shares of time of {one['name']}")
                if shares.get("environment", 0) + shares.get("inference", 0) >= 1:
                    raise ForeignFile(f"has shares of time of {one['name']} that leave none for learning")
            if not isinstance(one["num_envs"], int) or one["num_envs"] < 1:
                raise ForeignFile(f"has no number of environments of {one['name']}")
        if not isinstance(machine["cpu"], str) or not machine["available_cores"] >= 1:
            raise ForeignFile("does not say on which processor")
        for name in ("torch_threads", "cuda", "gpu"):
            machine[name]
        for name in ("torch", "ale-py"):
            machine["packages"][name]
        return Result(machine, str(content["measured_on"]), settings, failed)
    except (KeyError, TypeError, AttributeError) as error:
        raise ForeignFile(f"is damaged: {type(error).__name__} {error}") from None


def read(path: Path) -> Result:
    """Raises ForeignFile, with the file's name in front."""
    try:
        return parse(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise ForeignFile(f"{path} cannot be read: {error}") from None
    except ForeignFile as error:
        raise ForeignFile(f"{path} {error}") from None
