"""The programs in benchmark/: what they compute from runs, and that they run whole."""

import json
import subprocess
import sys

import pytest
from conftest import ROOT, run_script

from common.args import SharedArgs
from common.cost import Clock
from common.run import Run

CONFIG = {"args": {}, "device": "cpu", "amp_dtype": ""}


def run_with_games(runs_dir, games):
    args = SharedArgs(runs_dir=str(runs_dir))
    with Run(args, Clock(args, "script"), "script", "a", 1000, CONFIG) as run:
        run.start()
        run.ready()
        for step, value in games:
            run.progress.global_step = step
            run.log_episodes({"_episode": [True], "episode": {"r": [value], "l": [3]}})
    return runs_dir / "a"


def test_curves_average_the_games_of_each_window_and_draw_a_picture(tmp_path):
    run = run_with_games(tmp_path, [(8, 1.0), (100, 3.0), (101, 10.0), (350, 20.0)])
    reference = tmp_path / "other.csv"
    reference.write_text("# words\nfirst_step,last_step,mean_return\n0,100,2.5\n")
    picture = tmp_path / "curves.png"
    flags = ["--labels", "ours", "--reference", str(reference), "--window", "100", "--out", str(picture)]
    done = run_script("benchmark/curves.py", str(run), *flags, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "ours: 50 2.00  150 10.00  350 20.00" in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_curves_of_a_run_without_games_end_with_one_line(tmp_path):
    done = run_script("benchmark/curves.py", str(run_with_games(tmp_path, [])), cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith("holds no finished game")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("flags", [["--rounds", "0"], ["--steps", "1024"], ["--json", "/nowhere/at/all.json"]])
def test_the_benchmark_refuses_what_it_cannot_do(flags, monkeypatch, capsys):
    monkeypatch.syspath_prepend(ROOT / "benchmark")
    import run as benchmark

    monkeypatch.setattr(sys, "argv", ["run.py", *flags])
    with pytest.raises(SystemExit, match="2"):
        benchmark.main()
    assert flags[0] in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "env_id", "peers"),
    [
        ("ppo_atari", "BreakoutNoFrameskip-v4", ("sb3_ppo_atari", "floor")),
        ("ppo_continuous", "HalfCheetah-v5", ("sb3_ppo_continuous", "floor_continuous")),
    ],
)
def test_the_benchmark_measures_prints_its_commands_and_writes_json(tmp_path, script, env_id, peers):
    out = tmp_path / "speed.json"
    command = [
        sys.executable,
        str(ROOT / "benchmark" / "run.py"),
        "--rounds",
        "1",
        "--scripts",
        script,
        "--steps",
        "4096",
        "--json",
        str(out),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    for program in (f"{script}.py", *(f"benchmark/{peer}.py" for peer in peers)):
        assert f"$ python {program} --env-id {env_id}" in done.stdout
    result = json.loads(out.read_text())
    (one,) = result["scripts"][script]["rounds"]
    assert all(one[name]["sps"] > 10 for name in ("ours", "sb3", "floor"))
    figures = result["scripts"][script]["figures"]
    assert figures["ours_over_sb3"]["median"] == pytest.approx(one["ours"]["sps"] / one["sb3"]["sps"])
    assert figures["ours_over_floor"]["median"] == pytest.approx(one["ours"]["sps"] / one["floor"]["sps"])
    if script == "ppo_atari":
        in_turn = one["ours"]["sps"] / one["floor"]["sps_in_turn"]
        assert figures["ours_over_floor_in_turn"]["median"] == pytest.approx(in_turn)
    assert result["machine"]["cores"] >= 1


def test_a_program_that_fails_half_way_shows_its_error(tmp_path, capsys, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmark")
    import run as benchmark

    with pytest.raises(SystemExit, match="ended with status 2"):
        benchmark.run(["ppo_atari.py", "--num-envs", "0"], tmp_path)
    assert "--num-envs 0: must be positive" in capsys.readouterr().err


def test_scores_of_several_seeds_are_one_line_of_the_table_and_one_curve(tmp_path):
    for seed, value in ((1, 10.0), (2, 30.0)):
        folder = tmp_path / str(seed)
        run = run_with_games(folder, [(8, value), (100, value), (900, value)])
        (run / "config.json").write_text(json.dumps({"args": {"env_id": "Hopper-v5", "seed": seed}}))
        (run / "summary.json").write_text(json.dumps({"mean_return": value, "sps": 100.0 * seed}))
    picture = tmp_path / "scores.png"
    runs = [str(tmp_path / str(seed) / "a") for seed in (1, 2)]
    done = run_script("benchmark/scores.py", *runs, "--out", str(picture), cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "| Hopper-v5 | 1, 2 | 20 +- 14 | 2382.86 +- 271.74 | 10, 30 | 150 |" in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    (tmp_path / "1" / "a" / "summary.json").unlink()
    assert "is no complete run" in run_script("benchmark/scores.py", *runs, cwd=tmp_path).stderr
