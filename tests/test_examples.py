"""examples/: they are apart from the project, and learn what they say."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT, wait_until
from test_layout import imports, project_imports

EXAMPLE, PINS = ROOT / "examples" / "rllib_cartpole.py", ROOT / "examples" / "requirements.txt"
PAGE = ROOT / "examples" / "README.md"


def processes_of(environment: Path) -> set[int]:
    """All that have a library or program of this environment in memory: Ray's daemons, and workers, which rename
    themselves."""
    found = set()
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # somebody else's, or it has ended meanwhile
            if f"{environment}/" in Path("/proc", entry, "maps").read_text():
                found.add(int(entry))
    return found


def test_an_example_needs_nothing_of_the_project():
    assert {name.split(".")[0] for name in imports(EXAMPLE)} <= {*sys.stdlib_module_names, "ray"}
    assert project_imports(EXAMPLE) == set()


def test_requirements_of_the_examples_are_pinned_to_exact_versions():
    lines = [line for line in PINS.read_text().splitlines() if line and not line.startswith("#")]
    assert [line for line in lines if not re.fullmatch(r"[a-z0-9-]+(\[[a-z0-9,]+\])?==[0-9][0-9.]*", line)] == []
    versions = dict(line.split("==") for line in lines)
    assert {"ray[rllib]", "torch", "gymnasium"} <= versions.keys()
    ours = dict(line.split("==") for line in (ROOT / "requirements.txt").read_text().splitlines() if "==" in line)
    assert versions["torch"] == ours["torch"]
    assert versions["numpy"] == ours["numpy"]


def test_the_page_of_the_examples_names_flags_that_exist():
    named = set(re.findall(r"--[a-z][a-z-]+", PAGE.read_text()))
    assert named
    assert named <= set(re.findall(r'add_argument\(\s*"(--[a-z-]+)"', EXAMPLE.read_text()))


@pytest.mark.slow
@pytest.mark.extended
def test_rllib_reaches_480_on_cartpole(tmp_path):
    environment, output = tmp_path / "venv", tmp_path / "output.txt"
    python = environment / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", environment], check=True, timeout=60)
    install = [python, "-m", "pip", "install", "-q", "-r", PINS]
    done = subprocess.run(install, capture_output=True, text=True, timeout=300)
    if done.returncode:
        pytest.skip(f"its environment can't be installed: {done.stderr.strip().splitlines()[-1]}")
    with open(output, "w") as file:  # not a pipe, which Ray's daemons would hold open
        process = subprocess.Popen(
            [python, EXAMPLE, "--storage", tmp_path / "runs"],
            cwd=tmp_path,
            stdout=file,
            stderr=file,
            env={key: value for key, value in os.environ.items() if not key.startswith(("RAY_", "PYTHONPATH"))},
            start_new_session=True,
        )
    try:
        status = process.wait(180)
        said = output.read_text()
        assert status == 0, said
        mean = re.search(r"^mean return ([\d.]+) after ([\d,]+) steps and \d+ s: (.+)$", said, re.MULTILINE)
        assert mean, said
        assert 480 <= float(mean[1]) <= 500
        assert int(mean[2].replace(",", "")) < 300_000
        assert (Path(mean[3]) / "rllib_checkpoint.json").is_file()
        wait_until(lambda: not processes_of(environment))
    finally:  # whatever has happened, nothing of Ray's stays
        with contextlib.suppress(AssertionError):
            wait_until(lambda: not processes_of(environment), seconds=5)
        for _ in range(20):
            for pid in processes_of(environment):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)
        process.wait(10)
