"""The replay memory: what is sampled against the whole history, files and checksums, priorities."""

import gc
import os
import shutil
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

import common.replay
from common.envs import AtariEnvs
from common.errors import Interrupted, UsageError
from common.replay import Storage, SumTree, bytes_needed, choose_buffer_device, free_disk, require_room
from dqn_atari import Priorities, draw, gather

CPU = torch.device("cpu")
GAMMA = 0.9


def opened(folder, num_envs: int, transitions: int) -> Storage:
    memory = Storage(num_envs, transitions)
    memory.open(folder, CPU)
    return memory


def numbered(env: int, count: int) -> np.ndarray:
    """A frame that says which it is: no two are equal, none is black."""
    frame = np.zeros((84, 84), dtype=np.uint8)
    frame[0, :4] = [1 + env, 1 + count % 251, 1 + count // 251 % 251, 1 + count // 63001]
    frame[-1, -1] = 1 + count % 251
    return frame


@dataclass
class Step:
    """What one environment saw, did and got, as it was."""

    obs: np.ndarray
    action: int
    reward: float
    terminated: bool
    truncated: bool
    next_obs: np.ndarray  # the true one, of the game that was played
    ended: bool  # the game


@dataclass
class Stream:
    """Environments that number their frames, with every kind of end, in AtariEnvs' format."""

    num_envs: int
    rng: np.random.Generator
    counts: list[int] = field(default_factory=list)
    history: list[list[Step]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.counts = [0] * self.num_envs
        self.obs = np.zeros((self.num_envs, 4, 84, 84), dtype=np.uint8)
        for i in range(self.num_envs):
            self.restart(i)

    def restart(self, i: int) -> None:
        self.obs[i] = 0
        self.obs[i, -1] = self.new_frame(i)

    def new_frame(self, i: int) -> np.ndarray:
        self.counts[i] += 1
        return numbered(i, self.counts[i])

    def step_into(self, memory: Storage) -> None:
        n = self.num_envs
        actions = self.rng.integers(0, 18, n)
        rewards = self.rng.integers(-1, 2, n).astype(np.float32)
        kinds = self.rng.choice(["on", "life", "over", "cut", "both"], n, p=[0.84, 0.04, 0.04, 0.04, 0.04])
        terminations, truncations = np.isin(kinds, ["life", "over", "both"]), np.isin(kinds, ["cut", "both"])
        ended = np.isin(kinds, ["over", "cut", "both"])
        before = self.obs.copy()
        true_next = np.concatenate([before[:, 1:], np.zeros((n, 1, 84, 84), np.uint8)], axis=1)
        for i in range(n):
            true_next[i, -1] = self.new_frame(i)
        self.obs = true_next.copy()
        for i in np.flatnonzero(ended):
            self.restart(i)
        info = {"final_obs": true_next, "_final_obs": ended}
        if ended.any():
            info["_episode"] = ended
        memory.add(actions, rewards, terminations, truncations, self.obs, info)
        flags = zip(actions, rewards, terminations, truncations, ended, strict=True)
        self.history.append([Step(before[i], a, r, x, y, true_next[i], e) for i, (a, r, x, y, e) in enumerate(flags)])

    def expected(self, step: int, env: int, n_step: int) -> tuple[np.ndarray, int, float, float, np.ndarray]:
        first = self.history[step][env]
        total, k = 0.0, 0
        while True:
            now = self.history[step + k][env]
            total += GAMMA**k * now.reward
            k += 1
            if now.terminated or now.truncated or k == n_step:
                return first.obs, first.action, total, 0.0 if now.terminated else GAMMA**k, now.next_obs


def check_all(stream: Stream, memory: Storage, n_step: int) -> int:
    """Compare every transition that can be drawn with the history. Returns how many."""
    steps = np.arange(memory.oldest, memory.position - n_step + 1)
    steps, envs = (x.flatten() for x in np.meshgrid(steps, np.arange(stream.num_envs), indexing="ij"))
    if len(steps) == 0:
        return 0
    batch = gather(memory, steps, envs, GAMMA, n_step)
    for row, (step, env) in enumerate(zip(steps, envs, strict=True)):
        obs, action, total, discount, next_obs = stream.expected(step, env, n_step)
        np.testing.assert_array_equal(batch.obs[row].permute(2, 0, 1).numpy(), obs)
        assert batch.actions[row] == action
        assert batch.returns[row].item() == pytest.approx(total, abs=1e-6)
        assert batch.discounts[row].item() == pytest.approx(discount, abs=1e-6)
        if discount:
            np.testing.assert_array_equal(batch.next_obs[row].permute(2, 0, 1).numpy(), next_obs)
    return len(steps)


@pytest.mark.parametrize(("num_envs", "n_step"), [(1, 1), (2, 3), (3, 1), (4, 2), (5, 3)])
def test_every_transition_is_what_happened(num_envs, n_step):
    stream = Stream(num_envs, np.random.default_rng(num_envs))
    memory = opened(None, num_envs, 40 * num_envs + num_envs - 1)  # a size that does not divide
    memory.begin(stream.obs)
    checked = 0
    for step in range(5 * memory.length):
        stream.step_into(memory)
        if step < 8 or step % 37 == 0:
            checked += check_all(stream, memory, n_step)
    assert memory.position == 5 * memory.length
    assert memory.size == 40
    assert memory.oldest == memory.position - 40
    assert checked > 550 * num_envs
    kinds = {(s.terminated, s.truncated, s.ended) for row in stream.history for s in row}
    assert len(kinds) == 5  # on, life, over, cut, both
    assert len(memory.finals) == memory.truncations.sum() < 0.3 * 40 * num_envs  # old ones are forgotten


def test_uniform_draws_reach_every_transition_equally():
    stream = Stream(3, np.random.default_rng(0))
    memory = opened(None, 3, 30)
    memory.begin(stream.obs)
    for _ in range(150):
        stream.step_into(memory)
    torch.manual_seed(1)
    steps, envs = draw(memory, 90_000, n_step=2)
    assert steps.min() == memory.oldest
    assert steps.max() == memory.position - 2
    counts = np.bincount((steps - memory.oldest) * 3 + envs)
    assert len(counts) == 27
    chi_squared = ((counts - 90_000 / 27) ** 2 / (90_000 / 27)).sum()
    assert chi_squared < 60  # 26 degrees of freedom: 1 in 10,000


@pytest.mark.parametrize(
    "env_id", ["BreakoutNoFrameskip-v4", pytest.param("ALE/SpaceInvaders-v5", marks=pytest.mark.slow)]
)
def test_rebuilt_stacks_are_the_emulators_own(env_id):
    """Games cut after 400 frames, so that starts, truncations and wrap-around come often."""
    envs = AtariEnvs(env_id, 3, max_num_frames_per_episode=400)
    obs, _ = envs.reset(seed=1)
    memory = opened(None, 3, 120)
    memory.begin(obs)
    rng = np.random.default_rng(0)
    seen, truncated = {}, 0
    for step in range(400):
        actions = rng.integers(0, envs.single_action_space.n, 3)
        before = obs.copy()
        obs, rewards, terminations, truncations, info = envs.step(actions)
        true_next = obs.copy()
        if "final_obs" in info:
            done = info["_final_obs"]
            true_next[done] = info["final_obs"][done]
        seen[step] = before, true_next
        truncated += truncations.sum()
        memory.add(actions, np.sign(rewards), terminations, truncations, obs, info)
        steps = np.repeat(np.arange(max(memory.oldest, memory.position - 3), memory.position), 3)
        batch = gather(memory, steps, np.tile(np.arange(3), len(steps) // 3), 0.99, 1)
        for row, at in enumerate(steps):
            np.testing.assert_array_equal(batch.obs[row].permute(2, 0, 1), seen[at][0][row % 3])
            if batch.discounts[row]:
                np.testing.assert_array_equal(batch.next_obs[row].permute(2, 0, 1), seen[at][1][row % 3])
    envs.close()
    assert truncated >= 6


# ---- files


def filled(folder, steps: int, transitions: int = 80, num_envs: int = 2) -> tuple[Storage, Stream]:
    stream = Stream(num_envs, np.random.default_rng(0))
    memory = opened(folder, num_envs, transitions)
    memory.begin(stream.obs)
    for _ in range(steps):
        stream.step_into(memory)
    return memory, stream


@pytest.mark.parametrize("steps", [0, 1, 15, 16, 17, 100, 400, 1003])
def test_another_process_finds_the_same_memory(tmp_path, steps):
    memory, stream = filled(tmp_path, steps)
    memory.sync()
    state = memory.state_dict()
    again = opened(tmp_path, 2, 80)
    again.load_state_dict(state)
    assert again.restore_note == ""
    again.begin(stream.obs)
    assert check_all(stream, again, 1) == min(steps, 40) * 2
    # and goes on as the first one does
    clone = Stream(2, np.random.default_rng(0))
    clone.obs, clone.counts, clone.history = stream.obs.copy(), list(stream.counts), list(stream.history)
    clone.rng.bit_generator.state = stream.rng.bit_generator.state
    other = opened(None, 2, 80)
    other.source = tmp_path
    other.load_state_dict(state)
    other.begin(stream.obs)
    assert check_all(stream, other, 1) == min(steps, 40) * 2
    for _ in range(200):
        stream.step_into(again)
        clone.step_into(other)
    assert check_all(stream, again, 1) == check_all(clone, other, 1) == 80


def test_two_ways_to_one_step_leave_equal_checksums(tmp_path):
    straight, _stream = filled(tmp_path / "a", 300)
    interrupted, other = filled(tmp_path / "b", 130)
    state = interrupted.state_dict()
    for _ in range(50):  # work that is lost
        other.step_into(interrupted)
    back = opened(tmp_path / "b", 2, 80)
    back.load_state_dict(state)
    assert back.restore_note == ""
    replayed = Stream(2, np.random.default_rng(0))
    scratch = opened(None, 2, 80)
    scratch.begin(replayed.obs)
    for _ in range(130):
        replayed.step_into(scratch)
    back.begin(replayed.obs)
    for _ in range(170):
        replayed.step_into(back)
    ours, theirs = straight.state_dict(), back.state_dict()
    assert ours.keys() == theirs.keys()
    for key in ours:
        equal = ours[key].equal(theirs[key]) if torch.is_tensor(ours[key]) else ours[key] == theirs[key]
        assert equal, key


def test_going_back_is_possible_until_overtakes_says_otherwise(tmp_path):
    """Steps written after a checkpoint take spare slots first; the first one that does not would be noticed."""
    memory, stream = filled(tmp_path, 500)
    state, at = memory.state_dict(), memory.position * 2
    more = 0
    while not memory.overtakes(at):
        stream.step_into(memory)
        more += 1
    assert more >= memory.spare
    back = opened(tmp_path, 2, 80)
    back.load_state_dict(state)
    assert back.restore_note == ""
    for _ in range(memory.segment + 1):
        stream.step_into(memory)
    back.load_state_dict(state)
    assert "newer than the checkpoint" in back.restore_note
    assert back.position * 2 == at


@pytest.mark.parametrize("keep", [1, 2, 5])
def test_checkpoints_that_are_made_when_due_never_lose_their_memory(keep):
    memory = opened(None, 8, 8 * 4000)
    memory.begin(np.zeros((8, 4, 84, 84), np.uint8))
    saved = [0]
    memory.first = 0
    while memory.position < 5 * memory.length:
        if memory.save_due(saved[-1], keep):
            saved.append(memory.position * 8)
        assert not any(memory.overtakes(step) for step in saved[-keep:])
        memory.position += 1
    gaps = np.diff(saved)
    assert saved[1] == 4000 * 8  # none before the memory is full
    assert (gaps[1:] == memory.spare // keep * 8).all()  # evenly, so that going back one is worth something


@pytest.mark.parametrize("damage", ["frame", "reward", "cut short", "removed", "all removed"])
def test_damage_is_noticed_and_said(tmp_path, damage):
    memory, stream = filled(tmp_path, 300)
    memory.sync()
    state = memory.state_dict()
    slot = (memory.oldest + 5) % memory.length
    if damage == "frame":
        memory.frames[slot, 1, 40, 40] ^= 1
    elif damage == "reward":
        memory.rewards[slot, 0] += 1
    elif damage == "cut short":
        (tmp_path / "frames.bin").write_bytes((tmp_path / "frames.bin").read_bytes()[:100_000])
    elif damage == "removed":
        (tmp_path / "steps.bin").unlink()
    else:
        shutil.rmtree(tmp_path)
    again = opened(tmp_path, 2, 80)
    again.load_state_dict(state)
    assert "the replay memory" in again.restore_note
    assert "filled again" in again.restore_note
    again.begin(stream.obs)
    assert again.oldest == again.position == 300  # empty, and in step with the run
    start = len(stream.history)
    for _ in range(130):
        stream.step_into(again)
        if again.position % 11 == 0:
            check_all(stream, again, 1)
    assert again.first == start
    assert check_all(stream, again, 2) == 2 * 39
    # and what it holds now survives the next interruption
    once_more = opened(tmp_path, 2, 80)
    once_more.load_state_dict(again.state_dict())
    assert once_more.restore_note == ""


def test_restarted_games_end_the_old_ones(tmp_path):
    """Where the emulators play differently after a restore, the last step's next observation stays the old game's."""
    memory, stream = filled(tmp_path, 100)
    state = memory.state_dict()
    again = opened(tmp_path, 2, 80)
    again.load_state_dict(state)
    stream.restart(1)
    last = stream.history[-1][1]
    assert not last.terminated
    assert not last.truncated
    again.begin(stream.obs)
    last.truncated = True
    check_all(stream, again, 1)
    for _ in range(20):
        stream.step_into(again)
    assert check_all(stream, again, 3) == 2 * 38
    third = opened(tmp_path, 2, 80)
    third.load_state_dict(again.state_dict())
    assert third.restore_note == ""
    third.begin(stream.obs)
    check_all(stream, third, 3)


def test_an_interruption_while_it_is_read_leaves(tmp_path):
    memory, _ = filled(tmp_path, 300)

    def stop(share: float) -> None:
        assert 0 <= share <= 1
        raise Interrupted

    again = opened(tmp_path, 2, 80)
    again.replay_tick = stop
    with pytest.raises(Interrupted):
        again.load_state_dict(memory.state_dict())


def test_a_memory_without_files_keeps_nothing():
    memory, stream = filled(None, 100)
    again = opened(None, 2, 80)
    again.load_state_dict(memory.state_dict())
    assert "--no-save-buffer" in again.restore_note
    again.begin(stream.obs)
    assert again.oldest == again.position == 100


def test_a_truncated_game_keeps_its_last_observation_when_games_restart(tmp_path):
    memory, stream = filled(tmp_path, 100)
    while not (stream.history[-1][0].truncated and not stream.history[-1][0].terminated):
        stream.step_into(memory)
    again = opened(tmp_path, 2, 80)
    again.load_state_dict(memory.state_dict())
    stream.restart(0)
    again.begin(stream.obs)
    check_all(stream, again, 1)


def test_files_of_another_size_are_left_alone(tmp_path):
    _memory, _ = filled(tmp_path, 10, transitions=80)
    content = (tmp_path / "frames.bin").read_bytes()
    with pytest.raises(UsageError, match=r"another --buffer-size or --num-envs"):
        opened(tmp_path, 1, 40)
    assert (tmp_path / "frames.bin").read_bytes() == content


def test_a_disk_that_cannot_be_read_is_said(tmp_path, monkeypatch):
    memory, _ = filled(tmp_path, 100)
    again = opened(tmp_path, 2, 80)

    def broken(self, name, slots, folder):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Storage, "_read", broken)
    again.load_state_dict(memory.state_dict())
    assert "can't be read (Input/output error)" in again.restore_note


def test_closing_gives_files_and_memory_back(tmp_path):
    gc.collect()  # what other tests left
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        memory = opened(tmp_path, 2, 80)
        assert len(os.listdir("/proc/self/fd")) > before
        memory.close()
    del memory
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


# ---- room


def test_a_million_transitions_fit_in_eight_gigabytes():
    assert 7.06e9 < bytes_needed(1_000_000, 8) < 7.45e9  # the process around it takes about half a gigabyte
    for num_envs in (1, 3, 8, 32):
        assert bytes_needed(1_000_000, num_envs) < 7.5e9


@pytest.mark.parametrize("num_envs", [1, 3])
def test_what_a_memory_takes_is_what_was_said(tmp_path, num_envs):
    memory = opened(tmp_path, num_envs, 2000)
    arrays = memory.frames.nbytes + memory.steps.nbytes + memory.truncations.nbytes
    assert arrays == bytes_needed(2000, num_envs)
    on_disk = sum(path.stat().st_size for path in tmp_path.iterdir())
    blocks = sum(512 * path.stat().st_blocks for path in tmp_path.iterdir())
    assert on_disk == memory.frames.nbytes + memory.steps.nbytes <= blocks  # reserved, not sparse


def test_what_does_not_fit_is_refused_with_a_size_that_does():
    with pytest.raises(UsageError, match=r"needs 7\.\d\d GB of memory, 3 GB are free: --buffer-size (\d+)") as error:
        require_room(1_000_000, 8, 3 * 10**9, "memory")
    fits = int(str(error.value).split("--buffer-size ")[2].split()[0])
    assert bytes_needed(fits, 8) <= 3 * 10**9 < bytes_needed(fits + 20_000, 8)
    require_room(fits, 8, 3 * 10**9, "memory")
    with pytest.raises(UsageError, match="none would fit"):
        require_room(1_000_000, 8, 1000, "memory")


def test_free_disk_counts_the_files_that_are_there(tmp_path):
    nothing = free_disk(tmp_path / "not" / "yet")
    memory, _ = filled(tmp_path / "replay", 10)
    size = memory.frames.nbytes + memory.steps.nbytes
    assert abs(free_disk(tmp_path / "replay") - nothing) < max(size, 2**26)  # others write too
    assert free_disk(tmp_path / "replay") - free_disk(tmp_path) == pytest.approx(size, abs=2**24)


def test_a_full_disk_is_one_line(tmp_path, monkeypatch):
    def full(*args: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(common.replay.os, "posix_fallocate", full)
    with pytest.raises(UsageError, match=r"frames\.bin: No space left"):
        opened(tmp_path, 2, 80)


def test_where_frames_are_read():
    cuda = torch.device("cuda", 0)
    assert choose_buffer_device("auto", CPU, 10, 10**12) == CPU
    assert choose_buffer_device("auto", cuda, 7 * 10**9, 24 * 10**9) == cuda
    assert choose_buffer_device("auto", cuda, 7 * 10**9, 8 * 10**9) == CPU
    assert choose_buffer_device("cuda", cuda, 7 * 10**9, 8 * 10**9) == cuda
    assert choose_buffer_device("cpu", cuda, 10, 10**12) == CPU
    with pytest.raises(UsageError, match="--buffer-device cuda"):
        choose_buffer_device("cuda", CPU, 10, 10**12)


# ---- priorities


@pytest.mark.parametrize("size", [1, 31, 32, 33, 1000, 40_000])
def test_sum_tree_finds_what_a_running_sum_finds(size):
    rng = np.random.default_rng(size)
    tree, priorities = SumTree(size), np.zeros(size)
    for _ in range(20):
        leaves = rng.integers(0, size, 50)  # with repetitions
        values = rng.random(50) * (rng.random(50) < 0.7)
        for leaf, value in zip(leaves, values, strict=True):
            priorities[leaf] = value
        tree[leaves] = values
    if priorities.sum() == 0:
        tree[np.array([0])] = priorities[0] = 1.0
    assert tree.total == pytest.approx(priorities.sum(), rel=1e-12)
    np.testing.assert_array_equal(tree[np.arange(size)], priorities)
    shares = np.concatenate([rng.random(2000), [0.0, 1.0]])
    sums, found = shares * tree.total, tree.find(shares)
    assert (priorities[found] > 0).all()
    running = priorities.cumsum()
    assert (running[found] >= sums - 1e-9).all()
    assert ((running - priorities)[found] <= sums + 1e-9).all()
    again = SumTree(size)
    again.load_state_dict(tree.state_dict())
    for ours, theirs in zip(tree.levels, again.levels, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_priorities_are_drawn_in_exact_proportion():
    """Against P(i) = p_i^alpha / sum, after the memory has wrapped around, for what can be drawn and nothing else."""
    stream = Stream(3, np.random.default_rng(0))
    memory = opened(None, 3, 30)
    memory.begin(stream.obs)
    priorities = Priorities(memory, alpha=0.5, n_step=2)
    for _ in range(200):
        stream.step_into(memory)
        priorities.admit()
    torch.manual_seed(1)
    leaves, steps, envs, weights = priorities.draw(64, beta=1.0)
    assert (weights == 1).all()
    assert steps.min() >= memory.oldest
    assert steps.max() <= memory.position - 2
    errors = torch.linspace(-4, 4, 27)
    every = np.arange(memory.oldest, memory.position - 1)
    all_leaves = ((every % memory.length)[:, None] * 3 + np.arange(3)).flatten()
    priorities.update(all_leaves, errors)
    probabilities = (errors.abs().numpy() + 1e-6) ** 0.5
    probabilities /= probabilities.sum()
    counts = np.zeros(memory.length * 3)
    for _ in range(3000):
        leaves, steps, envs, weights = priorities.draw(32, beta=0.7)
        np.add.at(counts, leaves, 1)
        np.testing.assert_array_equal(steps % memory.length * 3 + envs, leaves)
    assert counts.sum() == counts[all_leaves].sum()
    expected = 96_000 * probabilities
    chi_squared = ((counts[all_leaves] - expected) ** 2 / expected)[expected > 5].sum()
    assert chi_squared < 60
    chosen = np.array([np.flatnonzero(all_leaves == leaf)[0] for leaf in leaves])
    correction = (27 * probabilities[chosen]) ** -0.7
    np.testing.assert_allclose(weights, correction / correction.max(), rtol=1e-5)


def test_new_transitions_get_the_largest_priority_so_far():
    memory = opened(None, 1, 30)
    stream = Stream(1, np.random.default_rng(0))
    memory.begin(stream.obs)
    priorities = Priorities(memory, alpha=0.6, n_step=1)
    stream.step_into(memory)
    priorities.admit()
    assert priorities.tree.total == 1.0
    priorities.update(np.array([0]), torch.tensor([9.0]))
    priorities.update(np.array([0]), torch.tensor([0.5]))
    stream.step_into(memory)
    priorities.admit()
    assert priorities.tree[np.array([1])][0] == pytest.approx(9**0.6, rel=1e-5)
    largest, total = priorities.largest, priorities.tree.total
    priorities.update(np.array([0, 1]), torch.tensor([float("nan"), float("inf")]))  # what fp16 may bring
    assert priorities.largest == largest
    assert priorities.tree.total == total
    other = Priorities(memory, alpha=0.6, n_step=1)
    other.load_state_dict(priorities.state_dict())
    assert other.largest == priorities.largest
    assert other.tree.total == priorities.tree.total


def test_parts_for_a_mirror_are_what_a_checkpoint_counts_on_until_they_are_overwritten(tmp_path):
    stream = Stream(2, np.random.default_rng(1))
    memory = opened(tmp_path / "replay", 2, 400)
    memory.begin(stream.obs)
    for _ in range(300):  # the ring has come round
        stream.step_into(memory)
    state, parts = memory.state_dict(), memory.parts()
    contents = [read() for *_, read in parts]
    assert None not in contents
    # a copy made of them on another machine is what the checkpoint wants
    for (name, offset, size, _, _), content in zip(parts, contents, strict=True):
        path = tmp_path / "there" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "r+b" if path.exists() else "w+b") as file:
            file.truncate(size)
            file.seek(offset)
            file.write(content)
    there = opened(tmp_path / "there" / "replay", 2, 400)
    there.load_state_dict(state)
    assert there.restore_note == ""
    there.close()
    # afterwards each of them is the same or nothing, and the spare slots are used first
    left = []
    for _ in range(memory.length + 20):
        stream.step_into(memory)
        now = [read() for *_, read in parts]
        assert all(content in (None, before) for content, before in zip(now, contents, strict=True))
        left.append(sum(content is not None for content in now))
    assert left[memory.spare - 1] == len(parts)
    assert left[-1] == 0
    # the key tells whether a piece has to travel
    keys = {(name, offset, key) for name, offset, _, key, _ in memory.parts()}
    stream.step_into(memory)
    assert 1 <= len({(name, offset, key) for name, offset, _, key, _ in memory.parts()} - keys) <= 2
    memory.close()
