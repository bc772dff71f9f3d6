"""The fire drill: it passes what keeps the contract and finds what breaks it."""

import subprocess
import sys

import psutil
import pytest
import torch
from conftest import ROOT, run_script, wait_until

import drill

# A run that keeps the contract in a few lines, and breaks it in one way that the drill should find.
SCRIPT = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
import torch

fault, folder = sys.argv[1], Path(sys.argv[sys.argv.index("--runs-dir") + 1]) / "run"
(folder / "checkpoints").mkdir(parents=True, exist_ok=True)
stopped = []
signal.signal(signal.SIGTERM, lambda number, frame: stopped.append(number))
saved = sorted((folder / "checkpoints").glob("step-*.pt"))
state = {"step": 0, "sum": torch.zeros(1), "clock": time.time()}
resumed = str(saved[-1]) if saved and fault != "starts from zero" else None

def status(phase):
    beside = folder / "status.tmp"
    beside.write_text(json.dumps(dict(phase=phase, pid=os.getpid(), global_step=state["step"], resumed_from=resumed)))
    beside.replace(folder / "status.json")

def save():
    status("save")
    time.sleep(0.05)
    beside = folder / "new.tmp"
    torch.save({**state, "clock": time.time()}, beside)
    beside.replace(folder / "checkpoints" / f"step-{state['step']:012d}.pt")

if resumed:
    status("restore")
    time.sleep(0.2)
    state = torch.load(resumed, weights_only=True)
if fault == "leaves a child":
    subprocess.Popen(["sleep", "60"])
while state["step"] < (5 if fault == "short" else 40):
    save()
    for phase in ("rollout", "update"):
        status(phase)
        time.sleep(0.05)
        if stopped:
            sys.exit(0 if fault == "pretends" else 1 if fault == "wrong status" else 75)
    state["step"] += 1
    state["sum"] += state["step"]
    if fault == "forgets":
        state["sum"] += resumed is not None
save()
"""


def run_drill(tmp_path, fault: str, *flags: str):
    script = tmp_path / "theirs.py"
    script.write_text(SCRIPT)
    return run_script("drill.py", *flags, "--dir", "drill", str(script), fault, cwd=tmp_path)


@pytest.mark.slow
def test_a_script_that_keeps_the_contract_passes(tmp_path):
    done = run_drill(tmp_path, "none", "--kills", "2", "--terms", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("PASS")
    for phase in drill.PHASES:
        assert f" in {phase} at step" in done.stdout
    assert "from SIGTERM to the exit: median" in done.stdout


FAULTS = {
    "forgets": "checkpoint.sum: 1 of 1 elements",
    "starts from zero": "started from zero although a checkpoint was there",
    "wrong status": "status 1, not 75",
    "leaves a child": "outlived theirs by 5 s",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault", [pytest.param(name, marks=[] if name == "forgets" else pytest.mark.extended) for name in FAULTS]
)
def test_a_script_that_breaks_the_contract_fails(tmp_path, fault):
    done = run_drill(tmp_path, fault, "--kills", "1", "--terms", "1")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "FAIL" in done.stdout
    assert FAULTS[fault] in done.stdout


@pytest.mark.slow
def test_a_run_that_is_too_short_is_no_pass(tmp_path):
    done = run_drill(tmp_path, "short", "--kills", "30", "--terms", "0")
    assert done.returncode == 1
    assert "make the run longer" in done.stdout


def test_differences_are_found_bit_for_bit():
    one = {"a": torch.tensor([1.0, float("nan"), 0.0]), "b": [1, {"c": "x"}], "d": None}
    assert drill.differences(one, {**one, "a": one["a"].clone()}, "") == []
    assert drill.differences(one, {**one, "a": torch.tensor([1.0, float("nan"), -0.0])}, "") != []
    assert drill.differences(one, {**one, "a": one["a"].double()}, "") != []
    assert drill.differences(one, {**one, "b": [1, {"c": "y"}]}, "s") == ["s.b[1].c: x, y"]
    assert drill.differences(one, {**one, "b": (1,)}, "") != []
    assert drill.differences(one, {"a": one["a"]}, "") != []
    assert drill.differences({"a": float("nan")}, {"a": float("nan")}, "") == []
    assert drill.differences({"a": 1}, {"a": 1.0}, "") != []
    assert drill.differences(torch.tensor(1), torch.tensor(1), "") == []
    assert drill.differences(torch.tensor(1.0), torch.tensor(2.0), "s") == ["s: 1 of 1 elements"]


BAD = {
    "no script": ([], "name a script that is there, got nothing"),
    "a script that is not there": (["nowhere.py"], "name a script that is there, got nowhere.py"),
    "nothing to do": (["--kills", "0", "--terms", "0", str(ROOT / "ppo_atari.py")], "at least one interruption"),
    "a mirror of another run": (["--mirror", str(ROOT / "tests"), str(ROOT / "ppo_atari.py")], "is not empty"),
    "a mirror that is none": (["--mirror", "foo://x", str(ROOT / "ppo_atari.py")], "Protocol not known: foo"),
    "a flag of the drill": ([str(ROOT / "ppo_atari.py"), "--runs-dir", "x"], "--runs-dir: the drill chooses it"),
}


@pytest.mark.parametrize(
    "case", [pytest.param(x, marks=[] if x == "a flag of the drill" else pytest.mark.slow) for x in BAD]
)
def test_bad_input_is_refused(tmp_path, case):
    flags, words = BAD[case]
    done = run_script("drill.py", *flags, cwd=tmp_path)
    assert done.returncode == 2
    assert words in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_drill_that_is_killed_leaves_no_training_behind(tmp_path):
    script = tmp_path / "theirs.py"
    script.write_text("import os, time\nopen('pid', 'w').write(str(os.getpid()))\ntime.sleep(300)\n")
    words = [sys.executable, str(ROOT / "drill.py"), "--dir", "drill", str(script)]
    process = subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.DEVNULL)
    wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    process.kill()
    process.wait()
    pid = int((tmp_path / "pid").read_text())
    wait_until(lambda: not psutil.pid_exists(pid), seconds=5)
