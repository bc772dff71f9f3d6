"""The programs in benchmark/: what they compute from runs, and that they run whole."""

import json
import sys
import time

import pytest
from conftest import run_script

from benchmark import curves
from common.args import SharedArgs
from common.cost import Clock
from common.mirror import Mirror
from common.run import Run

CONFIG = {"args": {}, "device": "cpu", "amp_dtype": ""}


def run_arguments(runs_dir, **flags):
    args = SharedArgs(runs_dir=str(runs_dir), **flags)
    return args, Clock(args, "script"), Mirror(None, "a", None), "script", "a", 1000, CONFIG


def run_with_games(runs_dir, games):
    with Run(*run_arguments(runs_dir)) as run:
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
    assert "ours: 50 2.00  150 10.00  325 20.00" in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_curves_of_several_seeds_are_a_mean_in_a_band_against_steps_hours_and_dollars(tmp_path):
    for seed, value in ((1, 10.0), (2, 30.0)):
        run = run_with_games(tmp_path / str(seed), [(100, value), (200, value + 2)])
        args = {"env_id": "Hopper-v5", "seed": seed, "runs_dir": str(seed), "price_per_hour": None}
        (run / "config.json").write_text(json.dumps({"script": "ppo_continuous", "args": args}))
    runs = [str(tmp_path / str(seed) / "a") for seed in (1, 2)]
    flags = ["--window", "100", "--out", str(tmp_path / "curves.png")]
    done = run_script("benchmark/curves.py", *runs, *flags, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Hopper-v5 ppo_continuous, 2 seeds: 50 20.00  150 22.00" in done.stdout

    curve = curves.read_run(tmp_path / "1" / "a", 100, price_per_hour=2.0)
    assert curve.hours is None, "a run that logged no time"
    with Run(*run_arguments(tmp_path / "timed", price_per_hour=3600.0)) as run:
        run.start()
        run.ready()
        for step, seconds in ((100, 50.0), (200, 150.0)):
            run.clock.since = time.perf_counter() - seconds
            run.progress.global_step = step
            run.log_episodes({"_episode": [True], "episode": {"r": [1.0], "l": [3]}})
            run.log_iteration({})
    curve = curves.read_run(tmp_path / "timed" / "a", 100)
    assert curve.hours.tolist() == pytest.approx([25 / 3600, 100 / 3600], rel=0.02)
    assert curve.dollars.tolist() == pytest.approx([25, 100], rel=0.02)
    assert curves.read_run(tmp_path / "timed" / "a", 100, 7200.0).dollars.tolist() == pytest.approx([50, 200], rel=0.02)
    grid, mean, low, high = curves.band([curve, curves.read_run(tmp_path / "2" / "a", 100)], "steps")
    assert (grid.tolist(), mean.tolist(), low.tolist(), high.tolist()) == ([50, 150], [15.5, 16.5], [1, 1], [30, 32])


def test_curves_of_a_run_without_games_end_with_one_line(tmp_path):
    done = run_script("benchmark/curves.py", str(run_with_games(tmp_path, [])), cwd=tmp_path)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert done.stderr.endswith("holds no finished game\n")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["nowhere"], "nowhere is no folder of a run"),
        (["RUN", "--out", "x.xyz"], "must be a .png"),
        (["RUN", "--out", "no/where.png"], "in a folder that is there"),
        (["RUN", "--window", "0"], "must be positive"),
        (["RUN", "--price-per-hour", "nan"], "must be positive"),
        (["RUN", "--reference", "nowhere.csv"], "nowhere.csv holds no points"),
        (["RUN", "--labels", "a", "b"], "1 lines need as many labels, got 2"),
    ],
)
def test_bad_input_of_curves_is_one_line(tmp_path, flags, words, monkeypatch, capsys):
    run = run_with_games(tmp_path, [(8, 1.0)])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["curves.py", *(str(run) if flag == "RUN" else flag for flag in flags)])
    capsys.readouterr()
    with pytest.raises(SystemExit, match="2"):
        curves.main()
    err = capsys.readouterr().err
    assert words in err
    assert len(err.splitlines()) == 1


def test_a_short_run_has_points_and_none_of_them_lies_beyond_its_end(tmp_path):
    run = run_with_games(tmp_path, [(step, 1.0) for step in range(40, 401, 40)])
    done = run_script("benchmark/curves.py", str(run), "--out", str(tmp_path / "curves.png"), cwd=tmp_path)
    points = [int(word) for word in done.stdout.splitlines()[0].split(": ")[1].split()[::2]]
    assert len(points) == 10
    assert max(points) <= 400


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
