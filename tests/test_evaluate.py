"""evaluate.py: the agents of all three scripts, as they were trained, in whole games; film, data set, weights."""

import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys

import ale_py
import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import ROOT, wait_until

import dqn_atari
import evaluate
import ppo_atari
import ppo_continuous
from common.checkpoint import newest_good, pack, read
from common.envs import AtariEnvs
from common.errors import UsageError

CPU = torch.device("cpu")
ATARI = ("--total-timesteps=64", "--num-envs=2", "--num-steps=16", "--num-minibatches=2", "--update-epochs=1")
DQN = ("--total-timesteps=64", "--num-envs=2", "--learning-starts=16", "--buffer-size=100", "--batch-size=4")
CONTROL = ("--env-id=InvertedPendulum-v5", "--total-timesteps=256", "--num-steps=128", "--num-minibatches=4")
needs_minari = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("minari", "h5py")), reason="needs requirements-extras.txt"
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """One short run of each script, all called by the script's name."""
    from common.args import parse

    folder = tmp_path_factory.mktemp("runs")
    for module, flags in ((ppo_atari, ATARI), (dqn_atari, DQN), (ppo_continuous, CONTROL)):
        flags = (*flags, f"--runs-dir={folder}", f"--run-name={module.__name__}", "--device=cpu")
        module.train(parse(module.Args, flags, ""))
    for path in folder.glob("*_atari/checkpoints/*.pt"):  # untrained agents play for long
        content = read(path)
        content["about"]["env"]["max_num_frames_per_episode"] = 600
        path.write_bytes(pack(content))
    return folder


@pytest.fixture
def call(monkeypatch, capsys):
    """The program in this process: exit status, standard output, standard error."""

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["evaluate.py", *map(str, words)])
        status = evaluate.main()
        return status, *capsys.readouterr()

    return call


def content_of(run_dir):
    return newest_good(run_dir / "checkpoints")[1]


# ---- whole games, each environment its share


class Clockwork:
    """Environment i plays games of i + 1 steps, and its k-th game scores 10 i + k."""

    num_envs = 4

    def reset(self, seed):
        self.seed, self.steps, self.games = seed, np.zeros(4, int), np.zeros(4, int)
        return np.zeros((4, 1)), {}

    def step(self, actions):
        self.steps += 1
        ended = self.steps == np.arange(4) + 1
        info = {"final_obs": np.full((4, 1), 7.0)}
        scores = 10 * np.arange(4) + self.games
        if ended.any():
            info |= {
                "_episode": ended,
                "episode": {"r": np.where(ended, scores, 0), "l": np.where(ended, self.steps, 0)},
            }
        self.games += ended
        self.steps[ended] = 0
        lost_a_life = np.array([True, False, False, True])
        return np.zeros((4, 1)), np.ones(4), lost_a_life, np.zeros(4, bool), info


def test_each_environment_plays_its_share_so_that_short_games_count_no_more():
    lines = []
    games = evaluate.play(Clockwork(), lambda obs: np.zeros(4, int), 10, 3, lines.append, [])
    assert sorted(game.score for game in games) == [0, 1, 2, 10, 11, 12, 20, 21, 30, 31]
    assert {game.length for game in games} == {1, 2, 3, 4}
    assert len(lines) == 10
    assert lines[0] == "game 1 of 10: 0.00 in 1 steps"


def test_long_games_are_not_silent(monkeypatch):
    monkeypatch.setattr(evaluate, "SILENCE", -1.0)
    lines = []
    evaluate.play(Clockwork(), lambda obs: np.zeros(4, int), 4, 3, lines.append, [])
    assert lines[0] == "0 of 4 games are over, 0 steps each so far"


def test_a_greedy_agent_that_may_wait_for_ever_is_said(monkeypatch):
    monkeypatch.setattr(evaluate, "SILENCE", 0.0)
    monkeypatch.setattr(evaluate, "STUCK", -1)
    for greedy in (False, True):
        lines = []
        evaluate.play(Clockwork(), lambda obs: np.zeros(4, int), 1, 3, lines.append, [], greedy)
        evaluate.play(Clockwork(), lambda obs: np.zeros(4, int), 4, 3, lines.append, [], greedy)
        assert any("never press FIRE" in line for line in lines) == greedy


def test_a_game_that_is_cut_while_a_life_is_lost_is_cut_and_not_over():
    def fire(obs):
        return np.ones(1, dtype=np.int64)

    envs = AtariEnvs("BreakoutNoFrameskip-v4", 1)
    envs.reset(seed=3)
    steps, lost = 0, False
    while not lost:
        _, _, terminations, _, info = envs.step(fire(None))
        steps, lost = steps + 1, bool(terminations[0])
    assert "_episode" not in info  # a life, not the game
    seen = []

    class Witness:
        def see(self, obs, actions, rewards, ended, truncated, final_obs, playing):
            seen.append((bool(ended[0]), bool(truncated[0])))

    envs = AtariEnvs("BreakoutNoFrameskip-v4", 1, max_num_frames_per_episode=4 * steps)
    (game,) = evaluate.play(envs, fire, 1, 3, lambda line: None, [Witness()])
    assert (game.length, game.truncated) == (steps, True)
    assert seen[-1] == (True, True)
    assert not any(ended for ended, _ in seen[:-1])


# ---- the agents


@pytest.mark.parametrize("script", ["ppo_atari", "dqn_atari", "ppo_continuous"])
def test_every_scripts_checkpoint_is_played_and_reported(runs, call, script):
    flags = (runs / script, "--episodes", 3, "--json")
    status, out, err = call(*flags)
    result = json.loads(out)
    assert status == 0
    assert (result["script"], result["greedy"], result["device"]) == (script, False, "cpu")
    assert len(result["scores"]) == len(result["lengths"]) == 3
    assert min(result["lengths"]) > 1
    if script == "dqn_atari":  # it forgets to press FIRE
        assert result["truncated"] == [True] * 3
    assert result["mean"] == pytest.approx(np.mean(result["scores"]))
    assert result["median"] == np.median(result["scores"])
    assert result["std"] == pytest.approx(np.std(result["scores"], ddof=1))
    assert ("human_normalised" in result) == (script != "ppo_continuous")
    if script != "ppo_continuous":
        assert result["human_normalised"] == pytest.approx((result["mean"] - 1.7) / (30.5 - 1.7))
    assert "3 games, sampled" in err

    again = json.loads(call(*flags)[1])
    assert (again["scores"], again["lengths"]) == (result["scores"], result["lengths"])
    if script != "dqn_atari":
        other = json.loads(call(*flags, "--seed", 2)[1])
        assert (other["scores"], other["lengths"]) != (result["scores"], result["lengths"])


def test_a_folder_plays_its_newest_checkpoint_and_a_file_itself(runs, call):
    folder = runs / "ppo_atari"
    newest = max((folder / "checkpoints").glob("step-*.pt"))
    for given, played, step in [
        (folder, newest, 64),
        (newest, newest, 64),
        (min((folder / "checkpoints").glob("step-*.pt")), None, 0),
    ]:
        result = json.loads(call(given, "--episodes", 0, "--json")[1])
        assert result["checkpoint"] == str(played or given)
        assert result["global_step"] == step


@pytest.mark.parametrize("script", ["ppo_atari", "dqn_atari"])
def test_greedy_takes_the_best_action_and_sampled_does_not_always(runs, script):
    content = content_of(runs / script)
    envs = AtariEnvs("BreakoutNoFrameskip-v4", 8)
    module = {"ppo_atari": ppo_atari, "dqn_atari": dqn_atari}[script]
    net = ppo_atari.Agent(4) if script == "ppo_atari" else dqn_atari.QNetwork(4)
    # an output that prefers one action in all states
    state = content["agent" if script == "ppo_atari" else "q_network"]
    (last,) = (name for name in state if name.endswith(".bias") and state[name].shape == (4,))
    state[last] = torch.tensor([0.0, 0.0, 1.0, 0.0])
    net.load_state_dict(state)
    obs = torch.randint(256, (400, 4, 84, 84), dtype=torch.uint8).numpy()
    with torch.no_grad():
        torch.manual_seed(0)
        best = evaluate.POLICIES[script](content, envs, True, CPU)(obs)
        drawn = np.stack([evaluate.POLICIES[script](content, envs, False, CPU)(obs) for _ in range(3)])
        outputs = net(module.channels_last(torch.from_numpy(obs)))
        outputs = outputs[0] if script == "ppo_atari" else outputs
    assert (best == outputs.argmax(1).numpy()).all()
    if script == "dqn_atari":  # 5% random, a quarter of which is the best one
        assert (drawn != best).mean() == pytest.approx(0.05 * 3 / 4, abs=0.018)
    else:
        assert (drawn == best).mean() == pytest.approx(outputs.exp().max(1).values.mean().item(), abs=0.05)


def test_observations_are_normalised_as_in_training_and_the_statistics_stay(runs):
    content = content_of(runs / "ppo_continuous")
    envs = evaluate.make_envs(content["about"], 2)
    policy = evaluate.ppo_continuous_policy(content, envs, True, CPU)
    saved = content["normalizer"]
    mean = saved["obs_mean"].numpy()
    std = np.sqrt(saved["obs_squares"].numpy() / saved["obs_count"].item() + 1e-8)
    assert std.min() < 0.5  # else it would not matter
    agent = ppo_continuous.Agent(4, 1)
    agent.load_state_dict(content["agent"])
    for shift in (0.0, 1000.0):
        obs = np.random.default_rng(0).normal(size=(2, 4)) + shift
        normalised = torch.from_numpy(np.clip((obs - mean) / std, -10, 10)).float()
        with torch.no_grad():
            expected = np.clip(agent.actor_mean(normalised).numpy(), -3, 3)
            np.testing.assert_allclose(policy(obs), expected, rtol=1e-6)
    assert content["normalizer"]["obs_count"] == content_of(runs / "ppo_continuous")["normalizer"]["obs_count"]


def test_actions_are_within_the_bounds_and_sampled_with_the_policys_deviation(runs):
    content = content_of(runs / "ppo_continuous")
    content["agent"]["actor_logstd"] += 5
    envs = evaluate.make_envs(content["about"], 2)
    torch.manual_seed(0)
    with torch.no_grad():
        actions = evaluate.ppo_continuous_policy(content, envs, False, CPU)(np.zeros((500, 4)))
    assert actions.min() == -3.0
    assert actions.max() == 3.0
    content["agent"]["actor_logstd"] -= 7
    with torch.no_grad():
        drawn = evaluate.ppo_continuous_policy(content, envs, False, CPU)(np.zeros((4000, 4)))
    assert drawn.std() == pytest.approx(np.exp(content["agent"]["actor_logstd"].item()), rel=0.05)


# ---- the environment


def test_preprocessing_is_the_checkpoints_own(runs):
    about = content_of(runs / "ppo_atari")["about"]
    assert about["env"]["noop_max"] == 30
    about["env"] |= {"noop_max": 7, "repeat_action_probability": 0.25}
    envs = evaluate.make_envs(about, 1)
    assert (envs.settings["noop_max"], envs.settings["repeat_action_probability"], envs.sticky) == (7, 0.25, True)
    assert evaluate.differences(about, envs) == []
    about["env"]["actions"] = ["NOOP"]
    about["env"]["new"] = 1
    with pytest.raises(UsageError, match="new"):
        evaluate.make_envs(about, 1)
    del about["env"]["new"]
    (line,) = evaluate.differences(about, envs)
    assert "the environment's actions is ['NOOP', 'FIRE', 'RIGHT', 'LEFT'], in training it was ['NOOP']" in line


@pytest.mark.parametrize(("script", "package"), [("ppo_atari", "ale-py"), ("ppo_continuous", "mujoco")])
def test_another_simulator_is_said(runs, tmp_path, call, script, package):
    content = content_of(runs / script)
    content["about"]["machine"]["packages"][package] = "0.1"
    if script == "ppo_continuous":
        content["about"]["env"]["max_episode_steps"] = 123
    (tmp_path / "x.pt").write_bytes(pack(content))
    _, out, _ = call(tmp_path / "x.pt", "--episodes", 1)
    assert f"{package} is {importlib.metadata.version(package)}, in training it was 0.1: games may differ" in out
    _, out, _ = call(tmp_path / "x.pt", "--episodes", 1, "--json")
    result = json.loads(out)
    assert [note.split(" is ")[0] for note in result["notes"]] == [package]
    if script == "ppo_continuous":  # the training's own limit, though the id is registered with another one
        assert result["lengths"][0] <= 123


def test_a_checkpoint_from_a_gpu_with_fp16_plays_without_one(runs, tmp_path, call):
    content = content_of(runs / "ppo_atari")
    content["about"]["machine"] |= {"device": "cuda", "gpu": "NVIDIA A100", "amp_dtype": "torch.float16"}
    content["rng"]["cuda"] = torch.zeros(16, dtype=torch.uint8)
    (tmp_path / "x.pt").write_bytes(pack(content))
    assert json.loads(call(tmp_path / "x.pt", "--episodes", 1, "--json")[1])["device"] == "cpu"


def test_games_are_others_than_those_of_a_training_with_the_same_seed(runs, call, monkeypatch):
    seeds = []
    monkeypatch.setattr(AtariEnvs, "reset", lambda self, seed=None: seeds.append(seed) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        call(runs / "ppo_atari", "--seed", 1)
    assert seeds
    assert seeds[0] != 1


def test_published_scores_are_of_games_that_exist():
    gym.register_envs(ale_py)
    games = {spec.kwargs["game"] for spec in gym.registry.values() if spec.entry_point == "ale_py.env:AtariEnv"}
    rows = evaluate.HUMAN_SCORES.read_text().split()[1:]
    assert len(rows) == 57
    assert {row.split(",")[0] for row in rows} <= games
    assert evaluate.human_scores("pong") == (-20.7, 14.6)
    assert evaluate.human_scores("adventure") is None


# ---- refusals


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["nowhere"], "nowhere: not there; give a run folder or a checkpoint"),
        (["{runs}/ppo_a"], "{runs}/ppo_a: not there; did you mean {runs}/ppo_atari?"),
        (["{runs}"], "{runs}: no checkpoint there"),
        (["{runs}/ppo_atari/agent.pt"], "give the run's folder, agent.pt holds weights alone"),
        (["{runs}/ppo_atari/config.json"], "it is no checkpoint, or no whole one"),
        (["{runs}/ppo_atari", "--episodes=-1"], "--episodes -1: must not be negative"),
        (["{runs}/ppo_atari", "--seed=-1"], "--seed -1: must be 0 to 2^63 - 1"),
        (["{runs}/ppo_atari", "--device=cuda:7"], "--device cuda:7"),
        (["{runs}/ppo_atari", "--video=x.gif"], "--video x.gif: must end in .mp4"),
        (["{runs}/ppo_atari", "--video=nowhere/x.mp4"], "--video nowhere/x.mp4: cannot be written there"),
        (["{runs}/ppo_atari", "--export=x.pt"], "--export x.pt: must end in .safetensors"),
        (["{runs}/ppo_atari", "--video=x.mp4", "--episodes=0"], "--video: means nothing with --episodes 0"),
        (["{runs}/ppo_atari", "--greedy=maybe"], "--greedy maybe: write --greedy or --no-greedy"),
        (["{runs}/ppo_atari", "--env-id=Pong"], "--env-id"),
    ],
)
def test_bad_input_is_one_line_and_status_2(runs, call, tmp_path, monkeypatch, words, line):
    monkeypatch.chdir(tmp_path)
    status, out, err = call(*(word.format(runs=runs) for word in words))
    assert status == 2
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert line.format(runs=runs) in err
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_of_an_unknown_script_or_of_another_network_is_refused(runs, tmp_path, call):
    content = content_of(runs / "ppo_atari")
    (tmp_path / "a.pt").write_bytes(pack(content | {"about": content["about"] | {"script": "a2c"}}))
    status, _, err = call(tmp_path / "a.pt")
    assert status == 2
    assert "a checkpoint of a2c.py, which this program does not know" in err
    content["about"]["args"]["env_id"] = "PongNoFrameskip-v4"
    content["about"]["env"]["game"] = "pong"
    (tmp_path / "b.pt").write_bytes(pack(content))
    status, _, err = call(tmp_path / "b.pt")
    assert status == 2
    assert "does not fit this environment" in err


def test_a_damaged_newest_checkpoint_is_said_and_the_one_before_plays(runs, tmp_path, call):
    shutil.copytree(runs / "ppo_atari", tmp_path / "a")
    *_, before, newest = sorted((tmp_path / "a" / "checkpoints").glob("step-*.pt"))
    newest.write_bytes(newest.read_bytes()[:1000])
    status, out, _ = call(tmp_path / "a", "--episodes", 0)
    assert status == 0
    assert f"{newest} is damaged (it is no checkpoint, or no whole one): {before.name} plays" in out
    before.write_bytes(b"")
    status, _, err = call(tmp_path / "a", "--episodes", 0)
    assert status == 2
    assert "can be read" in err


# ---- the film


def frames_of(path) -> list[np.ndarray]:
    import imageio.v3

    return list(imageio.v3.imiter(path, plugin="pyav"))


def test_the_film_shows_the_first_game_from_its_start_to_its_end(runs, call, tmp_path):
    _, out, _ = call(runs / "ppo_atari", "--episodes", 1, "--json", "--video", tmp_path / "x.mp4")
    result = json.loads(out)
    frames = frames_of(tmp_path / "x.mp4")
    assert result["video"] == str(tmp_path / "x.mp4")
    assert len(frames) == result["lengths"][0]  # its first picture, and one after each step but the last
    assert frames[0].shape == (630, 480, 3)
    assert not np.array_equal(frames[0], frames[-1])
    # Breakout's rows of bricks in their colours
    assert frames[0][175, 300].tolist() == pytest.approx([200, 72, 72], abs=25)
    assert os.listdir(tmp_path) == ["x.mp4"]


def renders_here(monkeypatch) -> bool:
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    evaluate.choose_renderer(None)
    return "MUJOCO_GL" in os.environ


@pytest.mark.slow
def test_a_film_of_mujoco(runs, tmp_path, monkeypatch):
    if not renders_here(monkeypatch):
        pytest.skip("nothing here renders without a screen (libosmesa6, or EGL)")
    monkeypatch.delenv("MUJOCO_GL")
    command = [sys.executable, str(ROOT / "evaluate.py"), str(runs / "ppo_continuous"), "--episodes=1", "--json"]
    done = subprocess.run([*command, "--video=x.mp4"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    result = json.loads(done.stdout)
    assert result["video"] == "x.mp4", done.stderr
    frames = frames_of(tmp_path / "x.mp4")
    assert len(frames) == result["lengths"][0]
    assert frames[0].std() > 10
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("when", "script"),
    [("open", "ppo_atari"), ("frame", "ppo_atari"), ("mute", "ppo_atari"), ("open", "ppo_continuous")],
)
def test_a_film_that_fails_is_said_and_scores_are_reported(runs, call, tmp_path, monkeypatch, script, when):
    import imageio.v3

    monkeypatch.setattr(evaluate, "choose_renderer", lambda given: None)

    class Mute(Exception):
        def __str__(self):
            raise TypeError

    def fail(*args, **kwargs):
        raise Mute if when == "mute" else RuntimeError("no\nroom")

    plain = json.loads(call(runs / script, "--episodes", 2, "--json")[1])
    if when == "frame":
        shots = []
        real = evaluate.Film._shoot
        monkeypatch.setattr(
            evaluate.Film, "_shoot", lambda film: fail() if len(shots) > 1 else shots.append(real(film))
        )
    else:
        monkeypatch.setattr(imageio.v3, "imopen", fail)
    status, out, err = call(runs / script, "--episodes", 2, "--json", "--video", tmp_path / "x.mp4")
    result = json.loads(out)
    assert (status, result["scores"], result["video"]) == (0, plain["scores"], None)
    reason = {"mute": "no video: Mute\n"}.get(when, "no video: no room\n")
    if script == "ppo_continuous":
        reason = "no video: neither EGL nor OSMesa works here"
    assert reason in err
    assert os.listdir(tmp_path) == []


def test_a_game_that_cannot_be_played_again_is_not_filmed(runs, call, tmp_path, monkeypatch):
    real = evaluate.make_envs
    monkeypatch.setattr(evaluate, "make_envs", lambda about, n, **settings: Other(real(about, n, **settings), settings))

    class Other:
        def __init__(self, envs, settings):
            self.__dict__ |= {"envs": envs, "filming": bool(settings)}

        def __getattr__(self, name):
            return getattr(self.__dict__["envs"], name)

        def step(self, actions):
            obs, rewards, *rest = self.envs.step(actions)
            return obs, rewards + self.filming, *rest

    status, out, err = call(runs / "ppo_atari", "--episodes", 1, "--json", "--video", tmp_path / "x.mp4")
    assert (status, json.loads(out)["video"]) == (0, None)
    assert "no video: the game can't be played again, the environment is not deterministic" in err
    assert os.listdir(tmp_path) == []


def test_the_renderer_is_the_first_that_works_or_the_users_choice(monkeypatch):
    tried = []

    def run(command, env, **kwargs):
        tried.append(env["MUJOCO_GL"])
        if env["MUJOCO_GL"] == "egl":
            raise subprocess.TimeoutExpired(command, 60)
        return subprocess.CompletedProcess(command, works != env["MUJOCO_GL"])

    monkeypatch.setattr(evaluate.subprocess, "run", run)
    for given, works, screen, expected, trials in [  # noqa: B007  (run reads works)
        (None, "osmesa", "", "osmesa", ["egl", "osmesa"]),
        (None, "osmesa", ":0", "osmesa", ["egl", "osmesa"]),
        (None, "glfw", "", None, ["egl", "osmesa"]),
        (None, "glfw", ":0", "glfw", ["egl", "osmesa", "glfw"]),
        ("osmesa", "osmesa", "", "osmesa", ["osmesa"]),
        ("mine", "osmesa", "", None, ["mine"]),
    ]:
        tried.clear()
        monkeypatch.delenv("MUJOCO_GL", raising=False)
        monkeypatch.setenv("DISPLAY", screen)
        evaluate.choose_renderer(given)
        assert os.environ.get("MUJOCO_GL") == expected
        assert tried == trials


@pytest.mark.slow
def test_a_renderer_that_does_not_work_costs_the_film_and_no_score(runs, tmp_path):
    command = [sys.executable, str(ROOT / "evaluate.py"), str(runs / "ppo_continuous"), "--episodes=1", "--json"]
    for more in ([], ["--video=x.mp4"]):
        done = subprocess.run(
            [*command, *more],
            cwd=tmp_path,
            env=os.environ | {"MUJOCO_GL": "nonsense"},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert len(json.loads(done.stdout)["scores"]) == 1, done.stderr
        assert ("no video: neither EGL nor OSMesa works here" in done.stderr) == bool(more)


@pytest.mark.slow
@pytest.mark.parametrize("script", ["evaluate.py", "doctor.py"])
def test_a_reader_that_goes_away_is_no_traceback(runs, tmp_path, script):
    words = [str(runs / "ppo_continuous")] if script == "evaluate.py" else ["--device=cpu"]
    command = [sys.executable, str(ROOT / script), *words]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(60) == 1


@pytest.mark.slow
@pytest.mark.parametrize("script", ["evaluate.py", "doctor.py"])
def test_a_full_disk_below_the_output_is_one_line(runs, tmp_path, script):
    words = [str(runs / "ppo_continuous")] if script == "evaluate.py" else ["--device=cpu"]
    with open("/dev/full", "w") as full:
        command = [sys.executable, str(ROOT / script), *words]
        done = subprocess.run(command, cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (1, "error: cannot print: No space left on device\n")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interruption_leaves_one_line_and_no_half_film(runs, tmp_path, number):
    def heed() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # shells start programs in the background without

    command = [sys.executable, "-u", str(ROOT / "evaluate.py"), str(runs / "ppo_atari"), "--episodes=100000"]
    with open(tmp_path / "said", "w") as said:
        process = subprocess.Popen([*command, "--video=x.mp4"], cwd=tmp_path, stdout=said, stderr=said, preexec_fn=heed)
        try:
            wait_until(lambda: "game 2 of" in (tmp_path / "said").read_text(), 60)
            process.send_signal(number)
            assert process.wait(20) == 130
        finally:
            process.kill()
    text = (tmp_path / "said").read_text()
    assert text.endswith("interrupted: no result\n")
    assert "Traceback" not in text
    assert set(os.listdir(tmp_path)) <= {"said", "x.mp4"}


# ---- the data set


@pytest.fixture
def minari(tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    return pytest.importorskip("minari", reason="needs requirements-extras.txt")


@needs_minari
@pytest.mark.parametrize("script", ["ppo_atari", "ppo_continuous"])
def test_the_data_set_holds_the_games_as_they_were_played(runs, call, minari, script):
    episodes = 3 if script == "ppo_atari" else 11  # three environments play twice
    status, out, _ = call(runs / script, "--episodes", episodes, "--json", "--dataset", "xy/ppo-v0")
    result = json.loads(out)
    assert (status, result["dataset"]) == (0, "xy/ppo-v0")
    dataset = minari.load_dataset("xy/ppo-v0")
    assert dataset.total_episodes == episodes
    assert [game.rewards.sum() for game in dataset] == pytest.approx(result["scores"])
    assert [len(game.rewards) for game in dataset] == result["lengths"]
    for game in dataset:
        assert len(game.observations) == len(game.actions) + 1
        ends = np.flatnonzero(game.terminations | game.truncations)
        assert ends.tolist() == [len(game.rewards) - 1]  # lost lives are none
    env = dataset.recover_environment()
    assert env.observation_space == dataset.observation_space
    assert env.action_space == dataset.action_space
    # played again from what is stored
    content = content_of(runs / script)
    again = evaluate.make_envs(content["about"], 1)
    seed = int(np.random.SeedSequence([1, 1]).generate_state(1)[0])
    obs, _ = again.reset(seed=seed)
    (first,) = [game for game in dataset if np.array_equal(game.observations[0], obs[0])][:1]
    for step, action in enumerate(first.actions):
        obs, rewards, *_, info = again.step(action[None])
        last = step == len(first.actions) - 1
        assert rewards[0] == first.rewards[step]
        assert np.array_equal((info["final_obs"] if last else obs)[0], first.observations[step + 1])


@needs_minari
def test_a_data_sets_name_is_looked_at_before_anything_is_played(runs, call, minari):
    flags = (runs / "ppo_continuous", "--episodes", 1, "--dataset")
    assert call(*flags, "xy/ppo-v0")[0] == 0
    status, out, err = call(*flags, "xy/ppo-v0")
    assert status == 2
    assert "--dataset xy/ppo-v0: is there already, in " in err
    assert "game" not in out
    for name in ("a name", "breakout/ppo"):
        status, _, err = call(*flags, name, "--export", runs / "x.safetensors")
        assert status == 2
        assert not (runs / "x.safetensors").exists()
        assert f"--dataset {name}: no name such as breakout/ppo-v0" in err


@needs_minari
def test_a_data_sets_folder_may_be_relative_and_a_full_disk_is_status_1(runs, call, minari, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MINARI_DATASETS_PATH", "here")
    flags = (runs / "ppo_continuous", "--episodes", 2, "--dataset")
    assert call(*flags, "one-v0")[0] == 0
    assert (tmp_path / "here" / "one-v0" / "data").is_dir()

    real = evaluate.Dataset._write

    def full(dataset, *game):
        if dataset.dataset is not None:
            raise OSError(28, "No space left on device")
        real(dataset, *game)

    monkeypatch.setattr(evaluate.Dataset, "_write", full)
    status, _, err = call(*flags, "two-v0")
    assert (status, err) == (1, "error: --dataset two-v0: [Errno 28] No space left on device\n")
    assert minari.load_dataset("two-v0").total_episodes == 1


@needs_minari
def test_a_game_that_outgrows_the_memory_ends_the_data_set_in_one_line(runs, call, minari, monkeypatch):
    monkeypatch.setattr(evaluate, "free_memory", lambda device: 0)
    status, _, err = call(runs / "ppo_atari", "--episodes", 1, "--dataset", "one-v0")
    assert status == 1
    assert err.startswith("error: --dataset one-v0: a game of 100 steps so far needs 3 MB of memory more, 0 MB")


def test_a_data_set_without_minari_is_refused(runs, call, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "minari" else real(name, *rest)
    )
    status, _, err = call(runs / "ppo_continuous", "--dataset", "x-v0")
    assert status == 2
    assert "needs Minari: pip install -r requirements-extras.txt" in err


# ---- the weights


@pytest.mark.parametrize("script", ["ppo_atari", "dqn_atari", "ppo_continuous"])
def test_exported_weights_are_the_checkpoints_and_say_what_they_are(runs, call, tmp_path, script):
    from safetensors import safe_open

    status, out, _ = call(runs / script, "--episodes", 0, "--export", tmp_path / "x.safetensors", "--json")
    assert (status, json.loads(out)["export"]) == (0, str(tmp_path / "x.safetensors"))
    content = content_of(runs / script)
    expected = content["q_network" if script == "dqn_atari" else "agent"]
    with safe_open(tmp_path / "x.safetensors", "pt") as file:
        about = {name: json.loads(text) for name, text in file.metadata().items()}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert about["script"] == script
    assert about["args"]["env_id"] == content["about"]["args"]["env_id"]
    if script == "ppo_continuous":
        saved = content["normalizer"]
        assert torch.equal(tensors.pop("obs_mean"), saved["obs_mean"])
        std = torch.sqrt(saved["obs_squares"] / saved["obs_count"] + 1e-8)
        assert torch.allclose(tensors.pop("obs_std"), std)
        assert about["normalisation"] == "clip((obs - obs_mean) / obs_std, -10, 10)"
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)


def test_readmes_example_loads_and_plays_exported_weights(runs, call, tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(code.splitlines()) <= 14
    call(runs / "ppo_atari", "--episodes", 0, "--export", tmp_path / "agent.safetensors")
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"[\d.]+ points\n", done.stdout)


def test_a_disk_that_is_full_leaves_the_file_that_was_there(runs, call, tmp_path, monkeypatch):
    (tmp_path / "x.safetensors").write_text("mine")

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(evaluate, "save", full)
    status, _, err = call(runs / "ppo_atari", "--export", tmp_path / "x.safetensors")
    assert status == 2
    assert "No space left on device" in err
    assert (tmp_path / "x.safetensors").read_text() == "mine"
    assert os.listdir(tmp_path) == ["x.safetensors"]


def test_what_it_refuses_in_python_is_a_usage_error():
    with pytest.raises(UsageError):
        evaluate.Args("x", episodes=-1).check()
