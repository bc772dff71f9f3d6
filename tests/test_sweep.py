"""The sweep: what it reads, what it refuses, how trials fail and go on, what it reports."""

import csv
import json
import os
import signal
import subprocess
import sys
from collections import Counter

import numpy as np
import psutil
import pytest
from conftest import ROOT, run_script, wait_until

import sweep
from common import ranking
from common.errors import UsageError

# A run that keeps the contract in a few lines, and ends in the way that its flag names.
SCRIPT = f"""
import json, os, signal, sys, time
from dataclasses import dataclass
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
from common.args import SharedArgs, default_run_name, parse

@dataclass
class Args(SharedArgs):
    env_id: str = "Game-v0"
    end: str = "well"
    rate: float = 1.0
    size: int = 1
    switch: bool = False

    def check(self):
        super().check()
        self.require("rate", self.rate <= 10, "must be at most 10")

if __name__ == "__main__":
    args = parse(Args, sys.argv[1:], "")
    folder = Path(args.runs_dir) / default_run_name(args, "theirs")
    folder.mkdir(parents=True, exist_ok=True)
    starts = len(list(folder.glob("start-*"))) + 1
    environment = dict((key, os.environ.get(key)) for key in ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"))
    (folder / f"start-{{starts}}").write_text(json.dumps(environment))
    result = dict(pid=os.getpid(), phase="rollout", global_step=10, total_timesteps=20, games=1,
                  mean_return=args.rate + args.seed, sps=5.0, seconds=36.0, usd=args.price_per_hour)
    (folder / "status.json").write_text(json.dumps(result))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
    if args.end == "again" and starts < 3:
        sys.exit(75)
    if args.end == "dies twice" and starts < 3:
        os.kill(os.getpid(), signal.SIGKILL)
    if args.end == "fails":
        sys.exit("something is wrong")
    if args.end == "limit":
        sys.exit(3)
    if args.end == "refused":
        print("error: no room", file=sys.stderr)
        sys.exit(2)
    while args.end == "waits" and not (Path(__file__).parent / "go").exists():
        time.sleep(0.05)
    (folder / "summary.json").write_text(json.dumps(result | dict(global_step=20)))
"""


@pytest.fixture
def theirs(tmp_path):
    (tmp_path / "theirs.py").write_text(SCRIPT)
    return tmp_path


def call(folder, *words: str, **kwargs) -> subprocess.CompletedProcess:
    return run_script("sweep.py", *words, cwd=folder, **kwargs)


def results(runs) -> list[dict[str, str]]:
    (path,) = runs.glob("*/results.csv")
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


# ---- reading the command line


def test_a_word_behind_a_flag_is_its_value_and_several_are_swept():
    flags = sweep.read_flags(
        ["--seed", "1", "2", "--rate=0.5", "--amp", "--norm_adv", "True", "False", "--stop-at-return", "-21"]
    )
    assert flags == {
        "--seed": ["1", "2"],
        "--rate": ["0.5"],
        "--amp": [],
        "--norm-adv": ["True", "False"],
        "--stop-at-return": ["-21"],
    }
    assert sweep.varied(flags) == ["--seed", "--norm-adv"]
    lines = [sweep.command_line(combination) for combination in sweep.grid(flags)]
    assert len(lines) == 4
    assert lines[1] == ["--seed", "1", "--rate", "0.5", "--amp", "--norm-adv", "False", "--stop-at-return", "-21"]


def test_own_flags_may_stand_anywhere_and_are_never_abbreviated():
    args, rest = sweep.make_parser().parse_known_args(
        ["x.py", "--seed", "1", "2", "--gpus-per-trial", "0.25", "--rate", "-1", "--sample", "3"]
    )
    assert (args.script, args.gpus_per_trial, args.samples) == ("x.py", 0.25, None)
    assert rest == ["--seed", "1", "2", "--rate", "-1", "--sample", "3"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1e-4..1e-3", sweep.Range(1e-4, 1e-3, False)),
        ("log:1e-4..1e-3", sweep.Range(1e-4, 1e-3, True)),
        ("8..64", sweep.Range(8, 64, False)),
        ("-1..0.5", sweep.Range(-1.0, 0.5, False)),
        ("../runs", None),
        ("1.5", None),
    ],
)
def test_ranges(text, expected):
    found = sweep.Range.read(text)
    assert found == expected
    assert found is None or type(found.low) is type(expected.low)


BAD_FLAGS = {
    "--seed 1 --seed 2": "given twice",
    "--amp --no-amp": "given twice",
    "--no-amp --amp": "given twice",
    "--rate 3..1": "the lower end first",
    "--rate log:0..1": "above zero",
    "stray --seed 1": "the script comes first",
    **{f"{name} x": "the sweep chooses it" for name in sweep.CHOSEN},
    "--runs_dir=x": "the sweep chooses it",
}


@pytest.mark.parametrize("words", BAD_FLAGS)
def test_flags_that_make_no_sense_are_refused(words):
    with pytest.raises(UsageError, match=BAD_FLAGS[words]):
        sweep.read_flags(words.split())


BAD_OPTIONS = {
    "--cpus-per-trial 0": "must be positive",
    "--gpus-per-trial 1.5": "a share below 1, or whole GPUs",
    "--samples 0": "must be positive",
    "--search optuna": "needs --samples",
    "--search grid --samples 3": "means nothing in a grid",
    "--grace-steps 5": "without --asha",
    "--max-failures -1": "must not be negative",
    "--name ../x": "must be one folder name",
    "--address ray://x:1": "on a machine of the cluster",
    "--price-per-hour 0": "must be positive",
    "--price-per-hour 1 --instance a:b": "with --instance",
    "--spot": "without --instance",
    "--samples many": "invalid int value",
    "nowhere.py": "no such script",
}


@pytest.mark.parametrize("words", BAD_OPTIONS)
def test_options_that_make_no_sense_are_refused(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    script = [] if words.endswith(".py") else [str(ROOT / "ppo_atari.py")]
    monkeypatch.setattr(sys, "argv", ["sweep.py", *script, *words.split()])
    with pytest.raises(SystemExit) as stop:
        sweep.main()
    assert stop.value.code == 2
    out, err = capsys.readouterr()
    assert (out, len(err.splitlines())) == ("", 1)
    assert err.startswith("error: ")
    assert BAD_OPTIONS[words] in err
    assert list(tmp_path.iterdir()) == []


# ---- what the script says


def trials_of(words: str, samples: str = ""):
    args, rest = sweep.make_parser().parse_known_args([*words.split(), *samples.split()])
    return sweep.make_trials(args, sweep.read_flags(rest), price=None)[0]


def test_every_combination_is_asked_of_the_script_and_named_as_it_names_it(theirs, monkeypatch):
    monkeypatch.chdir(theirs)
    trials = trials_of("theirs.py --seed 1 2 --rate 1 3 --env-id A-v0 B/C-v0")
    assert len({trial["name"] for trial in trials}) == 8
    assert trials[0]["name"] == "A-v0__theirs__1"  # as by hand with default flags
    assert trials[-1]["name"].startswith("B-C-v0__theirs__2__")
    assert trials[-1]["flags"] == {"--seed": "2", "--rate": "3", "--env-id": "B/C-v0"}
    refused = {
        "theirs.py --rate 1 11": r"--rate 11.0: must be at most 10 \(of: --rate 11\)",
        "theirs.py --rat 1 2": "Unrecognized",
        "theirs.py --size 1 x": "--size",
        "theirs.py --rate 1 1.0": "one run, Game-v0__theirs__1, is meant by --rate 1 and --rate 1.0",
        "theirs.py --device cpu auto": "one run",
        "theirs.py --rate 1..2": "a range needs --samples",
    }
    for words, reason in refused.items():
        with pytest.raises(UsageError, match=reason):
            trials_of(words)


def test_environments_are_looked_at_before_anything_starts():
    with pytest.raises(UsageError, match="did you mean BreakoutNoFrameskip-v4"):
        trials_of(f"{ROOT}/ppo_atari.py --env-id PongNoFrameskip-v4 BreakoutNoFrameskip-v5")


# ---- ranking


ROWS = [
    dict(state="complete", mean_return=value, **{"env-id": env, "seed": seed, "rate": rate})
    for env, rate, values in (
        ("A", "1", [1.0, 2.0, 3.0, 100.0]),
        ("A", "2", [9.0, 11.0]),
        ("B", "1", [5.0]),
        ("B", "2", [7.0, 7.0]),
    )
    for seed, value in enumerate(values)
]
OTHERS = [dict(ROWS[0], state="stopped early", mean_return=1e6), dict(ROWS[0], mean_return=None)]


def test_ranking():
    pytest.importorskip("scipy")
    places = ranking.rank(ROWS + OTHERS, ["env-id", "seed", "rate"])
    found = [(place["env_id"], place["config"], place["seeds"], place["iqm"]) for place in places]
    # of four the lowest and the highest are left out: (2 + 3) / 2
    assert found == [
        ("A", "rate 2", 2, 10.0),
        ("A", "rate 1", 4, 2.5),
        ("B", "rate 2", 2, 7.0),
        ("B", "rate 1", 1, 5.0),
    ]
    # of A's rate 1 there are two trials more, one of them stopped: what is left is no fair sample
    assert [ranking.seeds_of(place) for place in places] == ["2", "4 of 6", "2", "1"]
    best = ranking.rank([*ROWS, dict(ROWS[4], state="stopped early")], ["env-id", "seed", "rate"])
    assert [place["config"] for place in best[:2]] == ["rate 1", "rate 2"]
    assert [(place["low"], place["high"]) for place in places[2:]] == [(7.0, 7.0), (None, None)]
    # two seeds drawn from two: both low and both high have a quarter of the probability each
    assert (places[0]["low"], places[0]["high"]) == (9.0, 11.0)
    draws = np.array(np.meshgrid(*[[1, 2, 3, 100]] * 4)).reshape(4, -1)  # all 256
    exact = np.quantile(np.sort(draws, axis=0)[1:3].mean(0), [0.025, 0.975])
    np.testing.assert_allclose((places[1]["low"], places[1]["high"]), exact)
    assert "none of one seed" in ranking.ranking_table(places)


def test_picture_and_table(tmp_path):
    pytest.importorskip("scipy")
    pytest.importorskip("matplotlib")
    ranking.draw(ranking.rank(ROWS, ["env-id", "seed", "rate"]), tmp_path / "returns.png")
    assert (tmp_path / "returns.png").stat().st_size > 5000
    rows = [
        dict(rate="1", state="waiting", step=0, total=0, mean_return=None, sps=0, seconds=0, usd=0, failures=0),
        dict(rate="2", state="update", step=1000, total=2000, mean_return=0.0, sps=10, seconds=36, usd=2, failures=1),
    ]
    assert ranking.table(rows, ["rate"]).splitlines() == [
        "rate  steps        return  steps/s  cost     state",
        "1                                            waiting",
        "2     1,000/2,000  0.00    10       $2.0000  update, failed 1 times",
        "2 trials, 0 done; 0.01 hours of trials, $2.0000",
    ]


# ---- with Ray


@pytest.fixture
def cluster(monkeypatch):
    """Begins Ray's test cluster, whose head has no cores."""
    pytest.importorskip("ray")
    monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # listens on loopback only
    from ray.cluster_utils import Cluster

    begun = []

    def begin(**head) -> Cluster:
        begun.append(Cluster(initialize_head=True, head_node_args=dict(num_cpus=0, include_dashboard=False) | head))
        return begun[0]

    yield begin
    for one in begun:
        one.shutdown()


def processes(*words: str) -> list[psutil.Process]:
    """Those whose command line has all of these words."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = " ".join(process.info["cmdline"] or [])
        if all(word in line for word in words) and "sweep.py" not in line:
            found.append(process)
    return found


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


TINY = [
    "--num-envs",
    "2",
    "--num-steps",
    "16",
    "--num-minibatches",
    "2",
    "--total-timesteps",
    "512",
    "--checkpoint-minutes",
    "0.01",
]


@pytest.mark.slow
@pytest.mark.extended
def test_trials_of_a_node_that_dies_end_as_if_nothing_had_happened(cluster, tmp_path):
    import torch

    nodes = cluster()
    _, second = (nodes.add_node(num_cpus=1) for _ in range(2))
    words = [sys.executable, str(ROOT / "sweep.py"), str(ROOT / "ppo_atari.py"), "--seed", "1", "2"]
    words += ["--learning-rate", "1e-4", "1e-3", *TINY, "--address", nodes.address, "--storage", "shared"]
    with open(tmp_path / "said.txt", "w") as said:
        process = subprocess.Popen(words, cwd=tmp_path, stdout=said, stderr=said)
    runs = tmp_path / "shared"
    try:

        def half_way() -> bool:
            assert process.poll() is None, (tmp_path / "said.txt").read_text()
            steps = [json.loads(path.read_text())["global_step"] for path in runs.glob("*/status.json")]
            return sum(step > 100 for step in steps) >= 2

        wait_until(half_way, seconds=120)
        nodes.remove_node(second, allow_graceful=False)
        assert process.wait(200) == 0, (tmp_path / "said.txt").read_text()
    finally:
        process.kill()
    rows = results(runs)
    assert [row["state"] for row in rows] == ["complete"] * 4
    assert sum(int(row["failures"]) for row in rows) == 1
    for row in rows:
        flags = ["--seed", row["seed"], "--learning-rate", row["learning-rate"], *TINY]
        environment = os.environ | {"PYTHONPATH": "", "OMP_NUM_THREADS": "1"}
        plain = [sys.executable, str(ROOT / "ppo_atari.py"), *flags, "--runs-dir", "plain"]
        subprocess.run(plain, cwd=tmp_path, env=environment, check=True, capture_output=True)
        ours, undisturbed = (
            torch.load(folder / row["run"] / "agent.pt", weights_only=True) for folder in (runs, tmp_path / "plain")
        )
        assert ours.keys() == undisturbed.keys()
        assert all(torch.equal(ours[key], undisturbed[key]) for key in ours)
    restored = [log for log in runs.glob("*/logs/*.log") if "resumed at step" in log.read_text()]
    assert len(restored) == 1


@pytest.mark.slow
def test_what_becomes_of_trials_that_end_otherwise(theirs):
    pytest.importorskip("ray")
    ends = ["well", "again", "dies twice", "fails", "limit", "refused"]
    flags = ["--max-failures", "2", "--price-per-hour", "8", "--cpus-per-trial", "0.5"]
    done = call(theirs, "theirs.py", "--end", *ends, *flags)
    assert done.returncode == 1, done.stdout + done.stderr
    rows = {row["end"]: row for row in results(theirs / "runs")}
    states = {"well": "complete", "again": "complete", "dies twice": "complete", "fails": "failed", "limit": "limit"}
    assert {end: row["state"] for end, row in rows.items()} == states | {"refused": "refused: no room"}
    assert {end: (int(row["restarts"]), int(row["failures"])) for end, row in rows.items()} == {
        "well": (0, 0),
        "again": (2, 0),
        "dies twice": (0, 2),
        "fails": (0, 3),
        "limit": (0, 0),
        "refused": (0, 0),
    }
    share = 0.5 / os.cpu_count()
    assert float(rows["well"]["usd"]) == pytest.approx(8 * share)
    (well,) = (theirs / "runs" / rows["well"]["run"]).glob("start-*")
    assert json.loads(well.read_text())["CUDA_VISIBLE_DEVICES"] == "", "no card was asked for"
    starts = {end: len(list((theirs / "runs" / row["run"]).glob("start-*"))) for end, row in rows.items()}
    assert starts == {"well": 1, "again": 3, "dies twice": 3, "fails": 3, "limit": 1, "refused": 1}


@pytest.mark.slow
def test_a_sweep_that_is_stopped_or_killed_leaves_nothing_behind_and_goes_on(theirs):
    pytest.importorskip("ray")
    words = [sys.executable, str(ROOT / "sweep.py"), "theirs.py", "--end", "waits", "--seed", "1", "2", "3"]
    for number in (signal.SIGTERM, signal.SIGKILL):
        with open(theirs / "said.txt", "w") as said:
            process = subprocess.Popen(words, cwd=theirs, stdout=said, stderr=said)
        wait_until(lambda: len(processes("theirs.py", str(theirs))) == min(3, os.cpu_count()), seconds=60)
        family = psutil.Process(process.pid).children(recursive=True)
        # Ray's own agents look after their parent once a minute
        children = [child for child in family if "Agent" not in " ".join(child.cmdline())]
        process.send_signal(number)
        status = process.wait(40)
        assert status == (75 if number == signal.SIGTERM else -9), (theirs / "said.txt").read_text()
        wait_until(lambda: not any(is_alive(child) for child in children), seconds=20)  # noqa: B023
    (theirs / "go").touch()
    done = call(theirs, *words[2:])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "going on" in done.stdout
    assert [row["state"] for row in results(theirs / "runs")] == ["complete"] * 3
    assert len(list((theirs / "runs").glob("sweep__*"))) == 1


@pytest.mark.slow
def test_random_draws_are_crossed_with_seeds_and_another_limit_does_not_change_them(theirs):
    pytest.importorskip("ray")
    words = ["theirs.py", "--rate", "1.0..3.0", "--seed", "1", "2", "--samples", "2", "--cpus-per-trial", "0.5"]
    done = call(theirs, *words, "--price-per-hour", "1", "--max-cost", "5", "--asha", "--grace-steps", "1000")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = results(theirs / "runs")
    assert Counter(row["state"] for row in rows) == {"complete": 4}
    assert Counter(row["seed"] for row in rows) == {"1": 2, "2": 2}
    rates = {float(row["rate"]) for row in rows}
    assert len(rates) == 2
    assert all(1 <= rate <= 3 for rate in rates)
    again = trials_of(f"{theirs}/theirs.py --rate 1.0..3.0 --seed 1 2 3 --checkpoint-minutes 3", "--samples 2")
    assert {float(trial["flags"]["--rate"]) for trial in again} == rates


@pytest.mark.slow
@pytest.mark.extended
def test_optuna_draws_by_the_mean_over_seeds(theirs):
    pytest.importorskip("ray")
    words = ["theirs.py", "--rate", "1.0..3.0", "--seed", "1", "2", "--samples", "2", "--search", "optuna"]
    words += ["--price-per-hour", "1", "--max-cost", "5", "--cpus-per-trial", "0.5"]
    done = call(theirs, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = results(theirs / "runs")
    assert Counter(row["state"] for row in rows) == {"complete": 4}
    assert sorted(Counter(row["rate"] for row in rows).values()) == [2, 2]
    changed = call(theirs, *(word if word != "5" else "6" for word in words))
    assert changed.returncode == 2
    assert "goes on with the flags of its first start only" in changed.stderr


@pytest.mark.slow
def test_trials_share_gpus(cluster, theirs, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    nodes = cluster(num_cpus=4, num_gpus=2)
    words = [sys.executable, str(ROOT / "sweep.py"), "theirs.py", "--end", "waits", "--seed", "1", "2", "3", "4", "5"]
    words += ["--gpus-per-trial", "0.5", "--cpus-per-trial", "0.5", "--address", nodes.address]
    with open(theirs / "said.txt", "w") as said:
        process = subprocess.Popen(words, cwd=theirs, stdout=said, stderr=said)
    try:
        wait_until(lambda: len(list((theirs / "runs").glob("*/status.json"))) == 4, seconds=60)
        found = [json.loads(path.read_text()) for path in (theirs / "runs").glob("*/start-*")]
        assert Counter(start["CUDA_VISIBLE_DEVICES"] for start in found) == {"3": 2, "5": 2}
        assert {start["OMP_NUM_THREADS"] for start in found} == {"1"}
        (theirs / "go").touch()
        assert process.wait(60) == 0, (theirs / "said.txt").read_text()
    finally:
        process.kill()
    assert len(results(theirs / "runs")) == 5
