"""ppo_atari.py as users run it: what it logs, that it repeats itself, and how it refuses."""

import json
import math

import numpy as np
import pytest
import torch
from conftest import read_scalars, run_script

import ppo_atari
from ppo_atari import Agent, Args

LOSSES = {f"losses/{name}" for name in (*ppo_atari.LOSSES, "explained_variance")}
TAGS = LOSSES | {f"charts/{name}" for name in ("episodic_return", "episodic_length", "SPS", "learning_rate")}
TAGS |= {f"time/{name}" for name in ("checkpoint", "environment", "inference", "learning")}
TAGS |= {"system/cpu_percent", "system/ram_mib", "cost/hours"}

SMALL = {"num_envs": 4, "num_steps": 16, "num_minibatches": 2, "update_epochs": 2, "total_timesteps": 128}


def train(tmp_path, name: str, **flags) -> dict:
    return ppo_atari.train(Args(runs_dir=str(tmp_path), run_name=name, **{**SMALL, **flags}))


def short_games(monkeypatch, frames: int) -> None:
    real = ppo_atari.AtariEnvs  # as it is now, watched or not
    monkeypatch.setattr(ppo_atari, "AtariEnvs", lambda *args: real(*args, max_num_frames_per_episode=frames))


def test_the_command_line_trains_finishes_games_and_logs_every_tag(tmp_path):
    done = run_script("ppo_atari.py", "--amp", "--total-timesteps", "2500", "--seed", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert run_dir.name.startswith("BreakoutNoFrameskip-v4__ppo_atari__2__")

    scalars = read_scalars(run_dir, timed=True)
    assert set(scalars) == TAGS
    assert [step for step, _ in scalars["losses/value_loss"]] == [1024, 2048]
    assert scalars["charts/learning_rate"] == [
        (1024, pytest.approx(2.5e-4)),
        (2048, pytest.approx(2.5e-4 * (1 - 1024 / 2500))),
    ]
    assert all(math.isfinite(value) for tag in TAGS for _, value in scalars[tag])
    games = scalars["charts/episodic_length"]
    assert len(games) > 0
    assert all(step % 8 == 0 and 20 < length <= step / 8 for step, length in games)

    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["global_step"] == 2048
    assert summary["updates"] == 2 * 4 * 4
    assert summary["games"] == len(games)
    assert summary["peak_memory_mib"] < 1200
    config = json.loads((run_dir / "config.json").read_text())
    assert config["args"]["seed"] == 2
    assert config["env"]["repeat_action_probability"] == 0.0
    assert config["machine"]["packages"]["torch"] == torch.__version__
    assert json.loads((run_dir / "status.json").read_text())["phase"] == "complete"
    assert "step 2,048/2,048 (100.0%)" in done.stdout

    weights = torch.load(run_dir / "agent.pt", weights_only=True)
    Agent(4).load_state_dict(weights)
    assert {weight.device.type for weight in weights.values()} == {"cpu"}

    again = run_script("ppo_atari.py", "--amp", "--total-timesteps", "2500", "--seed", "2", cwd=tmp_path)
    assert again.returncode == 0
    assert "complete already" in again.stdout
    assert json.loads((run_dir / "summary.json").read_text()) == summary


def test_the_ratio_is_one_in_the_first_minibatch_of_the_first_epoch(tmp_path, monkeypatch):
    ratios = []
    real = ppo_atari.ppo_loss

    def watched(args, log_probs, newvalue, actions, logprobs, advantages, returns, values):
        ratios.append((log_probs.gather(1, actions[:, None]).flatten() - logprobs).exp().detach())
        assert newvalue.shape == values.shape == returns.shape == advantages.shape
        if len(ratios) == 1:
            torch.testing.assert_close(newvalue, values, rtol=0, atol=1e-5)
        return real(args, log_probs, newvalue, actions, logprobs, advantages, returns, values)

    monkeypatch.setattr(ppo_atari, "ppo_loss", watched)
    train(tmp_path, "ratio", num_envs=8, num_steps=32, total_timesteps=256, learning_rate=0.01)
    assert len(ratios) == 4
    assert (ratios[0] - 1).abs().max() < 1e-5
    assert (ratios[1] - 1).abs().max() > 1e-3


@pytest.mark.slow
def test_one_seed_gives_identical_scalars_and_weights_and_another_seed_others(tmp_path):
    runs = {
        name: train(tmp_path, name, seed=seed, num_steps=128, total_timesteps=1024)
        for name, seed in (("first", 1), ("again", 1), ("other", 2))
    }
    first, again, other = (read_scalars(tmp_path / name) for name in runs)
    assert len(first["charts/episodic_return"]) > 0
    assert first == again
    assert all(first[f"losses/{name}"] != other[f"losses/{name}"] for name in ("value_loss", "entropy"))
    weights = [torch.load(tmp_path / name / "agent.pt", weights_only=True) for name in ("first", "again")]
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])


def test_actions_are_drawn_anew_for_what_the_emulators_show(tmp_path, monkeypatch):
    inputs, drawn = [], []

    class WatchedAgent(Agent):
        def forward(self, x):
            inputs.append(x.clone())
            return super().forward(x)

    class WatchedEnvs(ppo_atari.AtariEnvs):
        def send(self, actions):
            np.testing.assert_array_equal(inputs[-1].numpy(), self.obs.transpose(0, 2, 3, 1))
            drawn.extend(actions.tolist())
            super().send(actions)

    monkeypatch.setattr(ppo_atari, "Agent", WatchedAgent)
    monkeypatch.setattr(ppo_atari, "AtariEnvs", WatchedEnvs)
    train(tmp_path, "a", learning_rate=1e-9)
    assert len(drawn) == 128
    assert min(np.bincount(drawn, minlength=4)) > 12  # of 32 expected: the policy is almost uniform at the start


def test_learning_sees_each_sample_of_the_rollout_once_an_epoch(tmp_path, monkeypatch):
    estimated, learned = [], []
    real_gae, real_loss = ppo_atari.compute_gae, ppo_atari.ppo_loss

    def watched_gae(*outcome):
        estimated.append([x.clone().flatten() for x in (*real_gae(*outcome), outcome[3])])
        return real_gae(*outcome)

    def watched_loss(args, log_probs, newvalue, actions, logprobs, *rest):
        learned.append([x.clone() for x in rest])
        return real_loss(args, log_probs, newvalue, actions, logprobs, *rest)

    monkeypatch.setattr(ppo_atari, "compute_gae", watched_gae)
    monkeypatch.setattr(ppo_atari, "ppo_loss", watched_loss)
    train(tmp_path, "a", update_epochs=1)
    assert len(estimated) == 2
    for i, rollout in enumerate(estimated):
        minibatches = zip(*learned[2 * i : 2 * i + 2], strict=True)
        for x, parts in zip(rollout, minibatches, strict=True):  # advantages, returns, values
            assert torch.equal(x.sort().values, torch.cat(parts).sort().values)
            assert x.std() > 0


def test_a_truncated_game_bootstraps_from_the_value_of_its_last_observation(tmp_path, monkeypatch):
    last_observations, agents, seen = [], [], []

    class WatchedEnvs(ppo_atari.AtariEnvs):
        def recv(self):
            result = super().recv()
            last_observations.append(result[4].get("final_obs"))
            return result

    class WatchedAgent(Agent):
        def __init__(self, num_actions):
            super().__init__(num_actions)
            agents.append(self)

    def watched(rewards, terminations, truncations, values, next_value, final_values, *rest):
        if not seen:  # before the first update
            seen.append(truncations)
            for step in truncations.any(1).nonzero().flatten():
                with torch.no_grad():
                    expected = agents[0](ppo_atari.channels_last(torch.from_numpy(last_observations[step])))[1]
                torch.testing.assert_close(final_values[step], expected)
        return real(rewards, terminations, truncations, values, next_value, final_values, *rest)

    real = ppo_atari.compute_gae
    monkeypatch.setattr(ppo_atari, "compute_gae", watched)
    monkeypatch.setattr(ppo_atari, "AtariEnvs", WatchedEnvs)
    monkeypatch.setattr(ppo_atari, "Agent", WatchedAgent)
    short_games(monkeypatch, frames=20)
    summary = train(tmp_path, "short")
    assert summary["games"] == 4 * (32 // 5)
    assert seen[0].sum() == 4 * (16 // 5)


def slow_ppo_loss(args, log_probs, newvalue, actions, logprobs, advantages, returns, values) -> tuple[float, list]:
    """eq. 7 and 9 sample by sample, in Python's own numbers."""
    size = len(actions)
    if args.norm_adv:
        mean = sum(advantages) / size
        std = math.sqrt(sum((a - mean) ** 2 for a in advantages) / (size - 1))
        advantages = [(a - mean) / (std + 1e-8) for a in advantages]
    objective = value_loss = entropy = k1 = k3 = clipped = 0.0
    low, high = 1 - args.clip_coef, 1 + args.clip_coef
    for i in range(size):
        logratio = log_probs[i][actions[i]] - logprobs[i]
        ratio = math.exp(logratio)
        objective += min(ratio * advantages[i], min(max(ratio, low), high) * advantages[i])
        error = (newvalue[i] - returns[i]) ** 2
        if args.clip_vloss:
            change = min(max(newvalue[i] - values[i], -args.clip_coef), args.clip_coef)
            error = max(error, (values[i] + change - returns[i]) ** 2)
        value_loss += 0.5 * error
        entropy -= sum(math.exp(x) * x for x in log_probs[i])
        k1 -= logratio
        k3 += ratio - 1 - logratio
        clipped += abs(ratio - 1) > args.clip_coef
    loss = -objective + args.vf_coef * value_loss - args.ent_coef * entropy
    return loss / size, [x / size for x in (value_loss, -objective, entropy, k1, k3, clipped)]


@pytest.mark.parametrize("norm_adv", [True, False])
@pytest.mark.parametrize("clip_vloss", [True, False])
def test_the_loss_equals_the_papers_sample_by_sample(norm_adv, clip_vloss):
    g = torch.Generator().manual_seed(0)
    args = Args(norm_adv=norm_adv, clip_vloss=clip_vloss, ent_coef=0.3, vf_coef=0.7)
    log_probs = torch.randn(64, 5, generator=g).log_softmax(1)
    actions = torch.randint(0, 5, (64,), generator=g)
    logprobs = log_probs.gather(1, actions[:, None]).flatten() + 0.2 * torch.randn(64, generator=g)
    newvalue, advantages, returns = (torch.randn(64, generator=g) for _ in range(3))
    values = newvalue + 0.2 * torch.randn(64, generator=g)
    inputs = (log_probs, newvalue, actions, logprobs, advantages, returns, values)

    loss, stats = ppo_atari.ppo_loss(args, *inputs)

    expected_loss, expected_stats = slow_ppo_loss(args, *(x.tolist() for x in inputs))
    assert loss.item() == pytest.approx(expected_loss, abs=1e-5)
    assert stats.tolist() == pytest.approx(expected_stats, abs=1e-5)
    assert 0.1 < stats[ppo_atari.LOSSES.index("clipfrac")] < 0.9  # both sides of the range were met


@pytest.mark.slow
def test_rewards_are_clipped_for_learning_only(tmp_path, monkeypatch):
    seen = []
    real = ppo_atari.compute_gae
    monkeypatch.setattr(ppo_atari, "compute_gae", lambda rewards, *rest: seen.append(rewards) or real(rewards, *rest))
    flags = {"env_id": "SpaceInvadersNoFrameskip-v4", "num_steps": 512, "update_epochs": 1, "total_timesteps": 2048}
    train(tmp_path, "invaders", **flags)
    assert set(seen[0].unique().tolist()) == {0.0, 1.0}
    assert max(value for _, value in read_scalars(tmp_path / "invaders")["charts/episodic_return"]) >= 5


@pytest.mark.slow
def test_target_kl_ends_the_epochs_early(tmp_path):
    flags = {"learning_rate": 0.01, "update_epochs": 4, "total_timesteps": 64}
    assert train(tmp_path, "all", **flags)["updates"] == 8
    assert train(tmp_path, "early", target_kl=1e-6, **flags)["updates"] < 8


@pytest.mark.slow
def test_no_annealing_keeps_the_learning_rate(tmp_path):
    train(tmp_path, "flat", anneal_lr=False)
    rates = [value for _, value in read_scalars(tmp_path / "flat")["charts/learning_rate"]]
    assert rates == [pytest.approx(2.5e-4)] * 2


def test_a_policy_that_diverges_ends_with_one_line_and_status_1(tmp_path, monkeypatch, main_guard):
    monkeypatch.chdir(tmp_path)
    sizes = ["--num-envs", "2", "--num-steps", "16", "--total-timesteps", "64"]
    status, _, err = main_guard(ppo_atari, "--learning-rate", "1e30", "--run-name", "diverged", *sizes)
    assert status == 1
    assert err == "error: losses are not finite at step 32: try a lower --learning-rate\n"
    assert json.loads((tmp_path / "runs" / "diverged" / "status.json").read_text())["phase"] == "failed"
    assert not (tmp_path / "runs" / "diverged" / "agent.pt").exists()


@pytest.mark.slow
def test_stops_at_a_return(tmp_path, monkeypatch):
    short_games(monkeypatch, frames=20)
    summary = train(tmp_path, "stop", num_envs=8, total_timesteps=1_000_000, update_epochs=1, stop_at_return=0.0)
    # each iteration of 16 steps ends about 3 games of 5 steps in each of 8 environments
    assert summary["global_step"] == 5 * 128
    assert summary["games"] >= 100


def test_a_network_of_the_published_size_and_initialisation():
    torch.manual_seed(0)
    agent = Agent(6)
    assert sum(p.numel() for p in agent.network.parameters()) == 8224 + 32832 + 36928 + 1606144
    first = agent.network[0].weight.flatten(1)
    torch.testing.assert_close(first @ first.T, 2 * torch.eye(32), atol=1e-4, rtol=0)
    log_probs, values = agent(torch.randint(0, 256, (5, 84, 84, 4), dtype=torch.uint8))
    assert log_probs.shape == (5, 6)
    assert values.shape == (5,)
    torch.testing.assert_close(log_probs.exp().sum(1), torch.ones(5))
    assert (log_probs + math.log(6)).abs().max() < 0.05  # std 0.01: every action about as likely at the start


def test_frames_reach_the_network_channels_last():
    frames = np.random.default_rng(0).integers(0, 256, (3, 4, 84, 84), dtype=np.uint8)
    np.testing.assert_array_equal(
        ppo_atari.channels_last(torch.from_numpy(frames)).numpy(), frames.transpose(0, 2, 3, 1)
    )


ONE_SAMPLE = ["--num-envs", "1", "--num-steps", "1", "--num-minibatches", "1"]
BAD = {
    "an unknown flag": (["--learnig-rate", "1"], "--learnig-rate, 1; did you mean --learning-rate?"),
    "a stray word": (["fast"], "fast"),
    "a missing value": (["--seed"], "--seed"),
    "a word for a number": (["--num-envs", "eight"], "--num-envs"),
    "an unknown choice": (["--amp-dtype", "fp8"], "'auto', 'bf16', 'fp16', 'fp32'"),
    "a switch that is neither true nor false": (["--amp", "maybe"], "write --amp or --no-amp"),
    "a switch denied twice": (["--no-amp", "False"], "write --amp or --no-amp"),
    "a dtype without its switch": (["--amp-dtype", "bf16"], "--amp"),
    "a seed that torch cannot hold": (["--seed", str(2**64)], "must be 0 to 2^63 - 1"),
    "a batch of one": (
        ["--num-envs", "1", "--num-steps", "1", "--num-minibatches", "1", "--no-norm-adv"],
        "no variance",
    ),
    "a name that no file system takes": (["--run-name", "x" * 300], "at most 200"),
    "a line feed": (["--env-id", "a\nb"], "--env-id a b"),
    "more emulators than memory": (["--num-envs", "9000000", "--num-steps", "1", "--num-minibatches", "1"], "GB"),
    "an unknown game": (["--env-id", "BreakoutNoFrameskip-v9"], "did you mean BreakoutNoFrameskip-v4"),
    "another kind of environment": (["--env-id", "CartPole-v1"], "not an Atari game"),
    "a random frame skip": (["--env-id", "Pong-v4"], "PongNoFrameskip-v4"),
    "sizes that do not divide": (["--num-minibatches", "3"], "must divide num-envs x num-steps = 1024"),
    "minibatches of one": (["--num-minibatches", "1024"], "one sample a minibatch"),
    "more minibatches than samples": (["--num-minibatches", "2048"], "must divide"),
    "zero updates": (["--total-timesteps", "1000"], "less than one rollout"),
    "no steps": (["--total-timesteps", "0"], "must be positive"),
    "no environments": (["--num-envs", "0"], "--num-envs 0: must be positive"),
    "a negative number": (["--num-steps", "-5"], "--num-steps -5: must be positive"),
    "a negative seed": (["--seed", "-1"], "must be 0 to 2^63 - 1"),
    "no epochs": (["--update-epochs", "0"], "must be positive"),
    "a negative rate": (["--learning-rate", "-1e-4"], "must be positive"),
    "a discount above one": (["--gamma", "1.5"], "must be 0 to 1"),
    "not a number": (["--ent-coef", "nan"], "finite"),
    "a negative target": (["--target-kl", "-0.1"], "must be positive"),
    "more than float32 holds": (["--clip-coef", "1e300"], "float32"),
    "a switch with nothing after its sign": (["--amp="], "write --amp or --no-amp"),
    "a word after a switch's value": (["--amp", "True", "False"], "False"),
    "a folder without a name": (["--runs-dir", ""], "must name a folder"),
    "a device that is not there": (["--device", "cuda:77"], "--device cuda:77"),
    "a device that is none": (["--device", "tpu"], "must be auto, cpu, cuda or cuda:N"),
    "a run name that leaves the folder": (["--run-name", "../x"], "one folder name"),
    "more than the memory": (["--num-envs", "4000000", "--total-timesteps", "1000000000"], "GB"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_gets_one_line_and_status_2_and_leaves_nothing(case, tmp_path, monkeypatch, main_guard):
    flags, words = BAD[case]
    if "cuda:77" in flags and torch.cuda.device_count() > 77:
        pytest.skip("this machine has that device")
    monkeypatch.chdir(tmp_path)
    status, out, err = main_guard(ppo_atari, *flags)
    assert status == 2
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert words in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_command_line_itself_refuses_in_one_line(tmp_path):
    done = run_script("ppo_atari.py", "--env-id", "Breakout-v4", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("encoding", ["ascii", pytest.param("utf-8", marks=pytest.mark.slow)])
def test_a_mistyped_flag_is_named_with_the_right_one_on_every_terminal(tmp_path, monkeypatch, encoding):
    monkeypatch.setenv("PYTHONIOENCODING", encoding)
    done = run_script("ppo_atari.py", "--learnig-rate", "1", cwd=tmp_path)
    assert done.stderr == "error: Unrecognized options: --learnig-rate, 1; did you mean --learning-rate?; see --help\n"


def test_a_runs_folder_that_cannot_be_made(tmp_path, main_guard):
    (tmp_path / "file").write_text("")
    status, _, err = main_guard(ppo_atari, "--runs-dir", str(tmp_path / "file"))
    assert status == 2
    assert err.startswith("error: --runs-dir")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "amp", "anneal_lr"),
    [
        (["--amp", "--no-anneal-lr"], True, False),
        (["--amp", "True", "--anneal-lr", "False"], True, False),
        (["--amp=true", "--anneal_lr=false"], True, False),
        (["--no-amp", "--no-anneal_lr"], False, False),
        (["--amp", "--anneal-lr", "--seed", "3"], True, True),
        ([], False, True),
    ],
)
def test_switches_are_obeyed_in_either_style(flags, amp, anneal_lr):
    from common.args import parse

    args = parse(Args, flags, "")
    assert (args.amp, args.anneal_lr) == (amp, anneal_lr)
