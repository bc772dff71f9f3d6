"""The commands for a rented GPU machine: each is one that the scripts take, and what becomes of it is said."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from conftest import ROOT, run_script, wait_until

import dqn_atari
import ppo_atari
import ppo_continuous
from benchmark import gpu_check
from benchmark.gpu_check import PARTS, Check, run, table
from common.args import parse

SCRIPTS = {f"{script.__name__}.py": script for script in (ppo_atari, ppo_continuous, dqn_atari)}


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("part", PARTS)
def test_every_command_is_one_that_its_script_takes(part, device, quick):
    checks = PARTS[part](device, quick)
    assert len({check.name for check in checks}) == len(checks)
    for check in checks:
        assert check.command[0] == "-m" or (ROOT / check.command[0]).is_file()
        if (script := next((word for word in check.command if word in SCRIPTS), None)) is not None:
            words = check.command[check.command.index(script) + 1 :]
            args = parse(SCRIPTS[script].Args, words, "")
            args.check()
            assert args.device in (device, "cpu")
    assert [check.least for check in checks] == [None] * len(checks) or part == "learning"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["everything"], "everything: must be one of correctness, learning, speed, tuned, dqn, continuous, score"),
        (["--device", "tpu"], "--device tpu: must be cpu, cuda or cuda:N"),
        (["speed", "--device", "cpu", "--only", "nonsense"], "--only nonsense: none of 8 x 128, fp32, eager; "),
        (["--device", "cpu", "--minutes", "nan"], "--minutes nan: must be positive"),
        (["--device", "cpu", "--minutes", "0"], "--minutes 0.0: must be positive"),
        (["--device", "cpu", "--wheels", "nowhere"], "--wheels nowhere: no such folder"),
        (["--device", "cpu", "--out", "/dev/null/x"], "--out /dev/null/x: Not a directory"),
        (["--device", "cpu", "--out", ""], "argument --out: must name a folder; see --help"),
        (["--device", "cuda:7"], "--device cuda:7: torch "),
    ],
)
def test_bad_input_is_refused_in_one_line(flags, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--out", str(tmp_path / "out"), *flags])
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit) as stop:
        gpu_check.main()
    assert stop.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"error: {message}")
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def program(tmp_path, lines: str) -> str:
    path = tmp_path / "program.py"
    path.write_text(f"import sys, time\n{lines}\n")
    return str(path)


@pytest.mark.parametrize(
    ("kind", "lines", "error"),
    [
        ("passes", "print('good')", None),
        ("passes", "sys.exit('bad')", "status 1: bad"),
        ("passes", "time.sleep(100)", "status -15, cut short: no word"),
        ("prints", "print('words'); print('{\"sps\": 5}')", None),
        ("passes", "import os; os.fork() or time.sleep(100); time.sleep(100)", "status -15, cut short: no word"),
        ("trains", "pass", "nothing was measured: no word"),
        ("goes on", "sys.exit(75)", None),
        ("goes on", "sys.exit('bad')", "status 1: bad"),
    ],
)
def test_what_becomes_of_a_command(kind, lines, error, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_check, "LEAVING", 5.0)
    monkeypatch.setattr(gpu_check, "LEAST", 0.0)
    check = Check("a", [program(tmp_path, lines)], kind)
    run(check, tmp_path, until=time.monotonic() + 5.0 + (1.0 if "sleep" in lines else 60.0))
    assert check.result.get("error") == error
    assert check.failed is (error is not None)
    assert check.result.get("sps") == (5 if kind == "prints" else None)


def test_what_there_is_no_time_for_is_not_begun(tmp_path):
    check = Check("a", [program(tmp_path, "open('begun', 'w')")], "passes")
    run(check, tmp_path, until=time.monotonic() + gpu_check.LEAVING)
    assert check.result == {"error": "no time left: run the part again with more --minutes, or with --only"}


def test_the_table_compares_with_the_emulators_alone():
    alone, loop = Check("alone", [], "prints", result={"sps": 1000.0}), Check("loop", [])
    loop.result = dict(sps=850.0, lowest=800.0, highest=900.0, mean_return=None, gpu_memory_mib=None)
    going = Check("score", [], "goes on", result=dict(phase="interrupted", run_seconds=90.0, mean_return=3.5))
    going.result |= dict(global_step=1000, note="")
    assert table([alone, loop, going])[2:] == [
        "| alone | 1,000 |  |  |  |  |  |",
        "| loop | 850 | 800 to 900 | 0.85 |  |  |  |",
        "| score |  |  |  |  | 3.5 at 1,000 | to be continued: run this part again, 1.5 minutes so far |",
    ]


@pytest.mark.slow
def test_a_rehearsal_writes_its_table_and_goes_on_with_the_score(tmp_path):
    flags = ["--device", "cpu", "--quick", "--out", "out"]
    for number in range(2):
        done = run_script("benchmark/gpu_check.py", "score", *flags, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "complete" in done.stdout.splitlines()[-1]
        (check,) = json.loads((tmp_path / "out" / "score.json").read_text())["checks"]
        assert (check["phase"], check["global_step"]) == ("complete", 2048)
        assert number == 0 or "complete already" in (tmp_path / "out" / "log.txt").read_text()


@pytest.mark.slow
def test_a_signal_ends_the_command_too_and_keeps_what_was_measured(tmp_path):
    words = ["benchmark/gpu_check.py", "continuous", "--device", "cpu", "--quick", "--out", str(tmp_path)]
    process = subprocess.Popen(
        [sys.executable, *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )
    try:
        wait_until(lambda: list(tmp_path.glob("tmp*/run/status.json")), seconds=60)
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 143
    assert "interrupted" in out.splitlines()[-1]
    assert json.loads((tmp_path / "continuous.json").read_text())["checks"][0]["error"] == "interrupted"
    assert not list(tmp_path.glob("tmp*"))
