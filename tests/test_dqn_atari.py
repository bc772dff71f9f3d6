"""dqn_atari.py: its mathematics, counts, what it logs, how it refuses, and the promise."""

import json
import os
import signal
from collections import Counter

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, read_scalars, run_script
from gymnasium.spaces import Discrete

import common.checkpoint
import common.replay
import dqn_atari
import drill
from common.checkpoint import Checkpoints
from common.errors import Interrupted, SaveError, UsageError
from common.replay import bytes_needed
from dqn_atari import Args, Batch, dqn_loss, linear_schedule, multiples, td_targets

SMALL = {
    "num_envs": 2,
    "buffer_size": 80,
    "learning_starts": 40,
    "total_timesteps": 200,
    "batch_size": 4,
    "target_network_frequency": 20,
    "exploration_fraction": 0.5,
    "checkpoint_minutes": 0,
}


class Corridor:
    """Five cells in a row, with the face of AtariEnvs. Action 1 steps to the right, any other one to the left. A game
    begins in a random cell; leaving it on the right pays 1, on the left nothing. It is cut after 20 steps. The frame
    shows the cell as a bright column.
    """

    CELLS, CUT = 5, 20
    interrupt_at: int | None = None  # steps after which a signal arrives
    made: "Corridor"

    def __init__(self, env_id: str, num_envs: int) -> None:
        type(self).made = self
        self.num_envs = num_envs
        self.single_action_space = Discrete(3)
        self.restore_note = ""
        self.taken = Counter()
        self.steps = 0

    def describe(self) -> dict:
        return {}

    def close(self) -> None:
        pass

    def reset(self, seed: int) -> tuple[np.ndarray, dict]:
        self.rng = np.random.default_rng(seed)
        self.cells, self.lengths = np.zeros(self.num_envs, int), np.zeros(self.num_envs, int)
        self.obs = np.zeros((self.num_envs, 4, 84, 84), np.uint8)
        for i in range(self.num_envs):
            self.begin(i)
        return self.obs, {}

    def begin(self, i: int) -> None:
        self.cells[i], self.lengths[i] = self.rng.integers(self.CELLS), 0
        self.obs[i] = 0
        self.obs[i, -1] = self.frame(self.cells[i])

    def frame(self, cell: int) -> np.ndarray:
        frame = np.zeros((84, 84), np.uint8)
        if 0 <= cell < self.CELLS:
            frame[:, 16 * cell : 16 * cell + 16] = 200
        return frame

    def send(self, actions: np.ndarray) -> None:
        assert actions.shape == (self.num_envs,)
        self.sent = actions.copy()

    def recv(self):
        actions = self.sent
        self.steps += 1
        if self.steps == self.interrupt_at:
            os.kill(os.getpid(), signal.SIGTERM)
        self.taken.update(actions.tolist())
        self.cells += np.where(actions == 1, 1, -1)
        self.lengths += 1
        rewards = (self.cells == self.CELLS).astype(np.float32) * 7  # to be clipped
        terminations = (self.cells < 0) | (self.cells == self.CELLS)
        truncations = (self.lengths == self.CUT) & ~terminations
        frames = np.stack([self.frame(cell) for cell in self.cells])
        final = np.concatenate([self.obs[:, 1:], frames[:, None]], 1)
        self.obs = final.copy()
        ended, info = terminations | truncations, {}
        if ended.any():
            episode = {"r": rewards.copy(), "l": self.lengths.copy(), "t": np.zeros(self.num_envs)}
            info = {"final_obs": final, "_final_obs": ended, "episode": episode, "_episode": ended}
        for i in np.flatnonzero(ended):
            self.begin(i)
        return self.obs, rewards, terminations, truncations, info

    def state_dict(self) -> dict:
        arrays = {name: torch.from_numpy(getattr(self, name).copy()) for name in ("cells", "lengths", "obs")}
        return {**arrays, "rng": self.rng.bit_generator.state}

    def load_state_dict(self, state: dict) -> None:
        for name in ("cells", "lengths", "obs"):
            setattr(self, name, state[name].numpy().copy())
        self.rng.bit_generator.state = state["rng"]


@pytest.fixture
def corridor(monkeypatch):
    monkeypatch.setattr(dqn_atari, "AtariEnvs", Corridor)
    monkeypatch.setattr(Corridor, "interrupt_at", None)
    return Corridor


@pytest.fixture
def networks(monkeypatch) -> list[dqn_atari.QNetwork]:
    """Those of the runs, as they are made: the network, its target."""
    made: list[dqn_atari.QNetwork] = []

    class Noted(dqn_atari.QNetwork):
        def __init__(self, *args):
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr(dqn_atari, "QNetwork", Noted)
    return made


def train(tmp_path, name: str, **flags) -> dict:
    return dqn_atari.train(Args(device="cpu", runs_dir=str(tmp_path), run_name=name, **{**SMALL, **flags}))


# ---- mathematics


class Table(torch.nn.Module):
    """Action values that don't depend on the observation but on its first pixel: a row of a table."""

    def __init__(self, rows: list[list[float]]) -> None:
        super().__init__()
        self.rows = torch.tensor(rows)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rows[x[:, 0, 0, 0].long()]


def batch_of(returns: list[float], discounts: list[float]) -> Batch:
    obs = torch.zeros(len(returns), 84, 84, 4, dtype=torch.uint8)
    obs[:, 0, 0, 0] = torch.arange(len(returns))
    return Batch(obs, torch.zeros(len(returns)).long(), torch.tensor(returns), torch.tensor(discounts), obs)


def test_targets():
    online = Table([[1.0, 5.0, 0.0], [9.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    target = Table([[2.0, 3.0, 4.0], [1.0, 8.0, 0.0], [float("inf"), 0.0, 0.0]])
    batch = batch_of([1.0, -1.0, 0.5], [0.9, 0.81, 0.0])
    assert td_targets(Args(), online, target, batch).tolist() == pytest.approx([1 + 0.9 * 4, -1 + 0.81 * 8, 0.5])
    double = td_targets(Args(double_q=True), online, target, batch)
    assert double.tolist() == pytest.approx([1 + 0.9 * 3, -1 + 0.81 * 1, 0.5])


def test_the_loss_and_its_gradient():
    q_values = torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)
    actions, td_target = torch.tensor([1, 0]), torch.tensor([2.5, 1.0])
    loss, td_error, stats = dqn_loss(q_values, actions, td_target, None)
    assert loss.item() == pytest.approx(F.mse_loss(torch.tensor([2.0, 3.0]), td_target).item())
    assert td_error.tolist() == [0.5, -2.0]
    assert stats.tolist() == pytest.approx([2.125, 2.5])
    weighted, *_ = dqn_loss(q_values, actions, td_target, torch.tensor([1.0, 0.25]))
    weighted.backward()
    assert q_values.grad.tolist() == [[0.0, -0.5], [0.5, 0.0]]


def test_schedule():
    assert [linear_schedule(1.0, 0.1, 100, step) for step in (0, 50, 100, 1000)] == pytest.approx([1, 0.55, 0.1, 0.1])
    assert linear_schedule(0.4, 1.0, 10, 11) == 1.0  # beta never gets above
    assert linear_schedule(1.0, 0.1, 0, 0) == 0.1


def test_multiples():
    assert [multiples(4, at - 3, at) for at in range(3, 15, 3)] == [0, 1, 1, 1]
    assert multiples(4, 0, 8) == 2
    assert multiples(4, 4, 4) == 0


# ---- counts


@pytest.mark.parametrize("num_envs", [*(pytest.param(x, marks=pytest.mark.slow) for x in (1, 2, 5)), 3, 8])
def test_updates_an_agent_step_are_exact_for_any_number_of_environments(tmp_path, corridor, num_envs):
    summary = train(tmp_path, "run", num_envs=num_envs, buffer_size=400, total_timesteps=203)
    total = 203 // num_envs * num_envs
    assert summary["global_step"] == total
    assert summary["updates"] == total // 4 - 40 // 4  # each multiple of 4 after the 40th step
    assert summary["games"] > 0


@pytest.mark.slow
def test_only_every_fourth_step_changes_the_network_and_the_target_is_copied_on_time(
    tmp_path, corridor, monkeypatch, networks
):
    history = []

    def tick(run):
        weights = [torch.cat([w.detach().flatten().clone() for w in net.parameters()]) for net in networks]
        history.append((run.progress.global_step, *weights))

    monkeypatch.setattr(dqn_atari.Run, "tick", tick)
    train(tmp_path, "run", num_envs=1, total_timesteps=80, target_network_frequency=20)
    before = history[0]
    assert before[1].equal(before[2])  # they begin alike
    changed, copied = [], []
    for now in history[1:]:
        changed += [] if now[1].equal(before[1]) else [now[0]]
        copied += [] if now[2].equal(before[2]) else [now[0]]
        if copied and copied[-1] == now[0]:
            assert now[2].equal(now[1])
        before = now
    assert changed == list(range(44, 81, 4))
    assert copied == [60, 80]


@pytest.mark.parametrize(("num_envs", "frequency", "expected"), [(3, 20, 2), (5, 7, 9), (8, 2, 7)])
def test_targets_are_copied_for_each_multiple_of_their_frequency(
    tmp_path, corridor, monkeypatch, num_envs, frequency, expected
):
    """At most once a step of all environments, with the share of as many copies as were due."""
    shares, real = [], torch.Tensor.lerp_
    noting = lambda target, weight, share: shares.append(share) or real(target, weight, share)  # noqa: E731
    monkeypatch.setattr(torch.Tensor, "lerp_", noting)
    flags = dict(num_envs=num_envs, total_timesteps=100, learning_starts=40, target_network_frequency=frequency)
    train(tmp_path, "run", **flags, tau=0.5, buffer_size=400)
    tensors = 10  # of the network
    assert len(shares) == expected * tensors
    halvings = sum(-np.log2(1 - share) for share in shares) / tensors
    last = 100 // num_envs * num_envs
    assert halvings == pytest.approx(last // frequency - 40 // frequency)


def test_tau_moves_the_target_by_a_share(tmp_path, corridor, networks):
    train(tmp_path, "run", num_envs=1, total_timesteps=60, learning_starts=50, target_network_frequency=60, tau=0.25)
    torch.manual_seed(1)
    first = dqn_atari.QNetwork(3).network[9].weight
    now, target = networks[0].network[9].weight, networks[1].network[9].weight
    assert not now.equal(first)
    assert target.allclose(first + 0.25 * (now - first), atol=1e-7)


@pytest.mark.parametrize("epsilon", [*(pytest.param(x, marks=pytest.mark.slow) for x in (0.0, 0.5)), 1.0])
def test_epsilon_is_the_share_of_random_actions(tmp_path, corridor, epsilon):
    flags = dict(start_e=epsilon, end_e=epsilon, num_envs=8, learning_starts=3990, total_timesteps=4000)
    train(tmp_path, "run", **flags, buffer_size=160)  # on the last step, one update
    counts = sorted(corridor.made.taken[action] / 4000 for action in range(3))
    if epsilon == 0:
        assert counts[2] > 0.6  # the fresh network likes one action nearly everywhere
    else:
        assert counts[0] == pytest.approx(epsilon / 3, abs=0.035) or counts[1] == pytest.approx(epsilon / 3, abs=0.035)
    if epsilon == 1:
        assert counts == pytest.approx([1 / 3] * 3, abs=0.03)


# ---- interruption

WRAPS = dict(num_envs=3, buffer_size=100, total_timesteps=900, train_frequency=8)
EVERYTHING = dict(**WRAPS, double_q=True, n_step=3, prioritized=True)


def compare(tmp_path, ours: str, theirs: str) -> None:
    assert drill.compare(tmp_path / ours, tmp_path / theirs) == []


@pytest.mark.parametrize("kind", [pytest.param("plain", marks=pytest.mark.slow), "everything"])
def test_interrupted_anywhere_it_ends_bit_for_bit_as_undisturbed(tmp_path, corridor, monkeypatch, kind):
    """The memory wraps around twice; signals arrive before and after learning starts, and right after a restart."""
    flags = EVERYTHING if kind == "everything" else WRAPS
    betas: list[float] = []
    real = dqn_atari.Priorities.draw
    noting = lambda self, size, beta: betas.append(beta) or real(self, size, beta)  # noqa: E731
    monkeypatch.setattr(dqn_atari.Priorities, "draw", noting)
    monkeypatch.setattr(dqn_atari, "LOG_STEPS", 30)
    train(tmp_path, "undisturbed", **flags)
    undisturbed = betas.copy()
    betas.clear()
    for steps in (5, 20, 1, 90, 60, 77):
        monkeypatch.setattr(corridor, "interrupt_at", steps)
        with pytest.raises(Interrupted):
            train(tmp_path, "disturbed", **flags)
    monkeypatch.setattr(corridor, "interrupt_at", None)
    train(tmp_path, "disturbed", **flags)
    compare(tmp_path, "undisturbed", "disturbed")
    curves = read_scalars(tmp_path / "disturbed")
    assert [step for step, _ in curves["charts/epsilon"]] == list(range(30, 901, 30))
    assert curves["losses/td_loss"]
    assert betas == undisturbed
    if kind == "everything":
        assert betas == sorted(betas)
        assert 0.4 < betas[0] < betas[-1] <= 1.0


@pytest.mark.slow
def test_a_damaged_newest_checkpoint_falls_back_and_the_memory_of_then_is_whole(
    tmp_path, corridor, monkeypatch, capsys
):
    """Between the last two checkpoints the memory wrote over what it no longer samples, and over nothing else."""
    flags = dict(num_envs=2, buffer_size=100, total_timesteps=1000, train_frequency=16)
    train(tmp_path, "undisturbed", **flags)
    monkeypatch.setattr(corridor, "interrupt_at", 450)
    with pytest.raises(Interrupted):
        train(tmp_path, "disturbed", **flags)
    monkeypatch.setattr(corridor, "interrupt_at", None)
    newest, before, *_ = sorted((tmp_path / "disturbed" / "checkpoints").glob("step-*.pt"), reverse=True)
    assert int(newest.stem[5:]) > int(before.stem[5:]) > 0  # the second one is there because the memory asked for it
    newest.write_bytes(newest.read_bytes()[:-1000])
    capsys.readouterr()
    train(tmp_path, "disturbed", **flags)
    out = capsys.readouterr().out
    assert "is damaged" in out
    assert "replay memory" not in out
    compare(tmp_path, "undisturbed", "disturbed")


@pytest.mark.slow
@pytest.mark.parametrize("keep", [1, 3])
def test_no_step_is_made_that_a_kept_checkpoint_would_not_survive(tmp_path, corridor, monkeypatch, keep):
    looked, real = [], dqn_atari.Storage.add

    def add(self, *args):
        kept = [int(path.stem[5:]) for path in (tmp_path / "run" / "checkpoints").glob("step-*.pt")]
        looked.append(len(kept))
        assert not any(self.overtakes(step) for step in kept)
        real(self, *args)

    monkeypatch.setattr(dqn_atari.Storage, "add", add)
    flags = dict(num_envs=2, buffer_size=100, total_timesteps=2000, learning_starts=1990, keep_checkpoints=keep)
    train(tmp_path, "run", **flags)
    assert len(looked) == 1000
    assert looked[-1] == keep


@pytest.mark.slow
def test_a_full_disk_says_that_the_memory_of_the_last_checkpoint_goes(tmp_path, corridor, monkeypatch, capsys):
    real = Checkpoints._write

    def write(self):
        if self.run.progress.global_step > 300:
            raise OSError(28, "No space left on device")
        real(self)

    monkeypatch.setattr(Checkpoints, "_write", write)
    monkeypatch.setattr(common.checkpoint, "RETRY", 0.2)
    flags = dict(num_envs=2, buffer_size=100, total_timesteps=3000, learning_starts=2990)
    with pytest.raises(SaveError):
        train(tmp_path, "run", **flags)
    out = capsys.readouterr().out
    lines = [line for line in out.splitlines() if "cannot save a checkpoint (No space left on device)" in line]
    assert "overwritten" not in lines[0]
    assert "its replay memory is being overwritten" in lines[-1]


@pytest.mark.parametrize(
    "loss", ["damaged", *(pytest.param(x, marks=pytest.mark.slow) for x in ("removed", "not kept"))]
)
def test_a_lost_memory_is_said_and_filled_again_before_learning_goes_on(tmp_path, corridor, monkeypatch, capsys, loss):
    flags = dict(num_envs=2, buffer_size=100, total_timesteps=400, prioritized=True, save_buffer=loss != "not kept")
    monkeypatch.setattr(corridor, "interrupt_at", 100)
    with pytest.raises(Interrupted):
        train(tmp_path, "run", **flags)
    monkeypatch.setattr(corridor, "interrupt_at", None)
    replay = tmp_path / "run" / "replay"
    assert replay.exists() == (loss != "not kept")
    if loss == "damaged":
        frames = bytearray((replay / "frames.bin").read_bytes())
        frames[7056 * 120] ^= 255
        (replay / "frames.bin").write_bytes(frames)
    elif loss == "removed":
        (replay / "steps.bin").unlink()
    capsys.readouterr()
    drawn, real = [], dqn_atari.gather

    def gather(memory, steps, *args):
        drawn.append(steps.min() - memory.first)
        return real(memory, steps, *args)

    monkeypatch.setattr(dqn_atari, "gather", gather)
    updates = []
    monkeypatch.setattr(dqn_atari.Run, "tick", lambda run: updates.append(run.progress.updates))
    summary = train(tmp_path, "run", **flags)
    assert "the replay memory" in capsys.readouterr().out
    at = next(i for i, count in enumerate(updates) if count > updates[0])
    assert at + 1 == 20  # 40 transitions, as many as at the beginning
    assert summary["updates"] < 90
    assert min(drawn) >= 0  # nothing of what was lost


@pytest.mark.slow
def test_another_run_begins_with_the_memory_of_the_one_it_goes_on_from(tmp_path, corridor, capsys):
    train(tmp_path, "short", total_timesteps=200, train_frequency=20)
    longer = dict(total_timesteps=600, exploration_fraction=1 / 6, train_frequency=20)
    train(tmp_path, "long", **longer)
    capsys.readouterr()
    train(tmp_path, "goes-on", **longer, resume=str(tmp_path / "short"), keep_every=70)
    assert "replay memory" not in capsys.readouterr().out
    ours, theirs = (drill.final_checkpoint(tmp_path / name) for name in ("long", "goes-on"))
    for entry in ("q_network", "target_network", "optimizer", "memory", "rng"):
        assert drill.differences(ours[entry], theirs[entry], entry) == []
    kept = min((tmp_path / "goes-on" / "checkpoints").glob("keep-*.pt"))
    train(tmp_path, "from-kept", **longer, resume=str(kept))
    assert "the replay memory in" in capsys.readouterr().out  # those kept for good hold none


def test_restarted_games_are_no_obstacle(tmp_path, corridor, monkeypatch, capsys):
    """An emulator that plays differently now: the last transitions end as truncations."""
    monkeypatch.setattr(corridor, "interrupt_at", 60)
    with pytest.raises(Interrupted):
        train(tmp_path, "run")
    monkeypatch.setattr(corridor, "interrupt_at", None)
    real = corridor.load_state_dict

    def restart(self, state):
        real(self, state)
        self.begin(0)

    monkeypatch.setattr(corridor, "load_state_dict", restart)
    assert train(tmp_path, "run")["global_step"] == 200


# ---- learning


@pytest.mark.slow
def test_it_learns_the_values_of_a_corridor(tmp_path, corridor, networks):
    """Q*(cell, right) = gamma^(cells still to go) where clipped reward 1 waits, and left is worth less."""
    flags = dict(num_envs=8, buffer_size=2000, learning_starts=200, total_timesteps=3000, batch_size=16)
    flags |= dict(gamma=0.8, learning_rate=5e-4, target_network_frequency=40, train_frequency=4, end_e=0.5)
    train(tmp_path, "run", **flags, exploration_fraction=0.3)
    values = []
    for cell in range(Corridor.CELLS):
        obs = torch.zeros(1, 84, 84, 4, dtype=torch.uint8)
        obs[0, :, :, -1] = torch.from_numpy(corridor.made.frame(cell))
        values.append(networks[0](obs)[0].detach())
    for cell, value in enumerate(values):
        assert value[1].item() == pytest.approx(0.8 ** (Corridor.CELLS - 1 - cell), abs=0.12), values
        assert value.argmax() == 1 or cell == 0


# ---- the command


@pytest.mark.slow
def test_on_the_real_emulator(tmp_path):
    flags = ["--buffer-size", "400", "--learning-starts", "200", "--total-timesteps", "600", "--batch-size", "4"]
    flags += ["--num-envs", "2", "--end-e", "1"]
    done = run_script("dqn_atari.py", *flags, "--device", "cpu", "--amp", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (run_dir,) = (tmp_path / "runs").iterdir()
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["updates"] == 100
    assert summary["games"] > 0
    curves = read_scalars(run_dir, timed=True)
    for tag in ("losses/td_loss", "losses/q_values", "charts/epsilon", "charts/SPS", "charts/episodic_return"):
        assert curves[tag], tag
        assert np.isfinite([value for _, value in curves[tag]]).all()
    assert {"time/environment", "time/inference", "time/learning"} <= curves.keys()
    agent = torch.load(run_dir / "agent.pt", weights_only=True)
    network = dqn_atari.QNetwork(4)
    network.load_state_dict(agent)
    again = run_script("dqn_atari.py", *flags, "--device", "cpu", "--amp", cwd=tmp_path)
    assert again.returncode == 0
    assert "complete already" in again.stdout


BAD = {
    "too large": (["--buffer-size", "100000000"], "GB of memory on cpu"),
    "no update": (["--total-timesteps", "80000"], "--learning-starts 80000"),
    "no update yet": (
        ["--learning-starts", "0", "--train-frequency", "100", "--num-envs", "1", "--total-timesteps", "99"],
        "--total-timesteps 99",
    ),
    "no environments": (["--num-envs", "0"], "--num-envs 0"),
    "smaller than a return": (["--buffer-size", "8", "--n-step", "3"], "--n-step 3"),
    "a probability": (["--end-e", "1.5"], "--end-e 1.5"),
    "tau": (["--tau", "0"], "--tau 0"),
    "no such game": (["--env-id", "BreakoutNoFrameskip-v9"], "BreakoutNoFrameskip-v4"),
    "no gpu": (["--buffer-device", "cuda", "--device", "cpu"], "--buffer-device cuda"),
    "a batch of nothing": (["--batch-size", "0"], "--batch-size 0"),
    "a batch larger than the memory": (["--batch-size", "99999999"], "--batch-size 99999999 needs"),
    "alpha of nothing": (["--priority-alpha", "0.7"], "means nothing without --prioritized"),
}


def test_the_end_is_a_point_of_the_curves_although_it_is_no_multiple(tmp_path, corridor, monkeypatch):
    monkeypatch.setattr(dqn_atari, "LOG_STEPS", 64)
    train(tmp_path, "run", **dict(WRAPS, total_timesteps=100))
    last = read_scalars(tmp_path / "run")["charts/epsilon"][-1][0]
    assert last == json.loads((tmp_path / "run" / "summary.json").read_text())["global_step"]


@pytest.mark.slow
def test_priorities_that_a_checkpoint_lacks_are_refused_by_the_flags_name(tmp_path, corridor):
    train(tmp_path, "plain", **WRAPS)
    with pytest.raises(UsageError, match=r"--prioritized True: .* has False, which can't be changed on the way"):
        train(tmp_path, "other", **dict(WRAPS, prioritized=True, resume=str(tmp_path / "plain"), total_timesteps=2000))


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_status_2(tmp_path, monkeypatch, main_guard, case):
    flags, words = BAD[case]
    monkeypatch.chdir(tmp_path)
    status, _, err = main_guard(dqn_atari, *flags)
    assert status == 2
    assert words in err
    assert len(err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_disk_too_small_is_refused_before_anything_is_written(tmp_path, monkeypatch, main_guard):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(common.replay, "free_disk", lambda folder: 10**9)
    status, _, err = main_guard(dqn_atari, "--buffer-size", "500000")
    assert status == 2
    assert "GB of disk for runs/" in err
    assert "would fit" in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_memory_grows_by_what_was_said(tmp_path):
    """20,000 transitions, resident, against `bytes_needed`: a million need 50 times as much."""
    code = f"""
import sys; sys.path.insert(0, {str(ROOT)!r})
import numpy as np, torch, re, pathlib
from common.replay import Storage
def resident():
    return int(re.search(r"VmRSS:\\s+(\\d+)", pathlib.Path("/proc/self/status").read_text())[1]) * 1024
before = resident()
memory = Storage(8, 20_000)
memory.open(pathlib.Path("replay"), torch.device("cpu"))
obs, zeros, no = np.ones((8, 4, 84, 84), np.uint8), np.zeros(8, np.uint8), np.zeros(8, bool)
memory.begin(obs)
for _ in range(2 * memory.length):
    memory.add(zeros, zeros, no, no, obs, {{}})
print(resident() - before)
"""
    (tmp_path / "measure.py").write_text(code)
    done = run_script(str(tmp_path / "measure.py"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    grown, said = int(done.stdout), bytes_needed(20_000, 8)
    assert said <= grown + 2**20
    assert grown <= said + 16 * 2**20
    assert bytes_needed(1_000_000, 8) + 0.55e9 < 8.0e9


@pytest.mark.slow
def test_the_drill_passes(tmp_path):
    """On the real emulator, with every option and a memory that wraps around several times."""
    sizes = ["--buffer-size", "400", "--learning-starts", "200", "--batch-size", "4", "--num-envs", "4"]
    options = ["--prioritized", "--n-step", "3", "--double-q", "--total-timesteps", "1800"]
    flags = [str(ROOT / "dqn_atari.py"), *sizes, *options]
    done = run_script("drill.py", "--kills", "2", "--terms", "1", "--dir", "drill", *flags, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PASS" in done.stdout
