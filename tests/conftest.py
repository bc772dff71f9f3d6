"""Helpers of the tests: run a script as users do, read back what it logged."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import common.cpu  # noqa: E402, F401  (before torch, as the scripts do)

# Scalars that measure the machine or the clock: the only ones that two equal runs may differ in.
TIMED = ("charts/SPS", "time/", "system/", "gpu/", "cost/")


def run_script(script: str, *flags: str, cwd: Path, **kwargs) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, str(ROOT / script), *flags],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"PYTHONPATH": ""},
        **kwargs,
    )


def read_scalars(run_dir: Path, timed: bool = False) -> dict[str, list[tuple[int, float]]]:
    """`tag -> [(step, value), ...]`, read back from the event files, without the timed ones unless asked for."""
    events = EventAccumulator(str(run_dir), size_guidance={"scalars": 0})
    events.Reload()
    tags = [tag for tag in events.Tags()["scalars"] if timed or not tag.startswith(TIMED)]
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in tags}


def wait_until(condition: Callable[[], object], seconds: float = 20.0) -> float:
    """Returns the seconds that it took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds, "never happened"
        time.sleep(0.002)
    return time.monotonic() - began


@pytest.fixture
def main_guard(monkeypatch, capsys):
    """Call a script's main guard in this process; returns exit status, standard output, standard error."""
    from common.args import run_script as run

    monkeypatch.setattr(os, "_exit", sys.exit)

    def call(module, *flags: str):
        monkeypatch.setattr(sys, "argv", [module.__name__ + ".py", *flags])
        try:
            run(module.Args, module.train, module.__doc__)
            status = 0
        except SystemExit as stop:
            status = stop.code or 0
        out, err = capsys.readouterr()
        return status, out, err

    return call
