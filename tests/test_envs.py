"""AtariEnvs against two independent ways to play the same games: gymnasium's wrappers and the bare emulator."""

import ale_py
import gymnasium as gym
import numpy as np
import pytest
from ale_py import roms
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation

import common.envs
from common.envs import AtariEnvs, atari_settings, emulator_seeds
from common.errors import UsageError

PLAIN = {"noop_max": 0, "use_fire_reset": False}  # a reset that does nothing else


def random_actions(envs: AtariEnvs, steps: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, envs.single_action_space.n, (steps, envs.num_envs))


# ---- what a step returns


@pytest.mark.parametrize(
    "game",
    ["Breakout", "Pong", *(pytest.param(x, marks=pytest.mark.slow) for x in ("Seaquest", "SpaceInvaders", "MsPacman"))],
)
def test_observations_equal_gymnasiums_preprocessing(game):
    envs = AtariEnvs(f"{game}NoFrameskip-v4", 1, **PLAIN)
    theirs = FrameStackObservation(
        AtariPreprocessing(gym.make(f"{game}NoFrameskip-v4"), noop_max=0, frame_skip=4, screen_size=84),
        stack_size=4,
        padding_type="zero",
    )
    obs, _ = envs.reset(seed=3)
    expected, _ = theirs.reset(seed=3)
    games = 0
    for action in random_actions(envs, 1000):
        assert np.abs(obs[0].astype(int) - expected).max() <= 2
        obs, _, _, _, info = envs.step(action)
        expected, _, terminated, truncated, _ = theirs.step(action[0])
        if terminated or truncated:
            assert info["_episode"][0]
            expected, _ = theirs.reset()
            games += 1
    assert games > 0 or game == "Pong"
    envs.close()
    theirs.close()


class BareGame:
    """The same game through ale-py's plain interface: frame skip 4, ends after `max_frames`."""

    def __init__(self, game: str, seed: int, sticky: float, max_frames: int) -> None:
        self.ale = ale_py.ALEInterface()
        self.ale.setFloat("repeat_action_probability", sticky)
        self.ale.setInt("random_seed", seed)
        self.ale.loadROM(roms.get_rom_path(game))
        self.actions = self.ale.getMinimalActionSet()
        self.max_frames = max_frames
        self.reset()

    def reset(self) -> None:
        self.ale.reset_game()
        self.frames, self.total, self.length, self.lives = 0, 0.0, 0, self.ale.lives()

    def step(self, action: int) -> tuple[float, bool, bool, tuple[float, int] | None]:
        """Reward, termination, truncation, and (return, length) if the game ended."""
        reward, over, full = 0.0, False, False
        for _ in range(4):
            reward += self.ale.act(self.actions[action])
            self.frames += 1
            over, full = self.ale.game_over(), self.frames >= self.max_frames
            if over or full:
                break
        life_lost = 0 < self.ale.lives() < self.lives
        self.lives = self.ale.lives()
        self.total += reward
        self.length += 1
        ended = (self.total, self.length) if over or full else None
        if ended:
            self.reset()
        return reward, over or life_lost, full and not (over or life_lost), ended


@pytest.mark.parametrize(
    ("env_id", "game", "sticky"),
    [
        ("BreakoutNoFrameskip-v4", "breakout", 0.0),
        pytest.param("SeaquestNoFrameskip-v4", "seaquest", 0.0, marks=pytest.mark.slow),
        ("PongNoFrameskip-v4", "pong", 0.0),  # no lives
        ("ALE/Breakout-v5", "breakout", 0.25),
        pytest.param("BreakoutNoFrameskip-v0", "breakout", 0.25, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("max_frames", [*(pytest.param(x, marks=pytest.mark.slow) for x in (8, 16)), 100, 108_000])
def test_rewards_ends_returns_and_lengths_equal_the_bare_emulator(env_id, game, sticky, max_frames):
    num_envs, steps = 3, 60 if max_frames < 1000 else 700
    envs = AtariEnvs(env_id, num_envs, max_num_frames_per_episode=max_frames, **PLAIN)
    obs, _ = envs.reset(seed=5)
    bare = [BareGame(game, int(seed), sticky, max_frames) for seed in envs.describe()["emulator_seeds"]]
    assert len(bare[0].actions) == envs.single_action_space.n
    games = truncated_games = 0
    for actions in random_actions(envs, steps):
        previous = obs
        obs, rewards, terminations, truncations, info = envs.step(actions)
        ended = info.get("_episode", np.zeros(num_envs, dtype=bool))
        for i, plain in enumerate(bare):
            reward, terminated, truncated, episode = plain.step(actions[i])
            assert (reward, terminated, truncated) == (rewards[i], terminations[i], truncations[i])
            assert ended[i] == (episode is not None)
            if episode:
                assert (info["episode"]["r"][i], info["episode"]["l"][i]) == episode
                games += 1
                truncated_games += truncated
            else:
                assert info["lives"][i] == plain.lives
            if terminated or truncated:
                assert info["_final_obs"][i]
                final = info["final_obs"][i]
                # one frame on from the observation before, whatever the reset made of the next one
                np.testing.assert_array_equal(final[:3], previous[i][1:])
                if episode:
                    assert not obs[i][:3].any()
                    assert obs[i][3].any()
                else:
                    np.testing.assert_array_equal(final, obs[i])
    if max_frames < 1000:
        assert games >= num_envs * (steps * 4 // max_frames)
        assert truncated_games > 0
    else:
        assert games > 0 or game == "pong"
    envs.close()


def test_rewards_are_not_clipped():
    envs = AtariEnvs("SpaceInvadersNoFrameskip-v4", 2)
    envs.reset(seed=1)
    largest = max(envs.step(actions)[1].max() for actions in random_actions(envs, 300))
    assert largest >= 5
    envs.close()


def test_a_life_lost_on_the_step_of_a_truncation_is_a_termination_and_its_game_is_reported():
    envs = AtariEnvs("BreakoutNoFrameskip-v4", 1)
    envs.reset(seed=1)
    for lost_at in range(1, 200):  # FIRE and then no move loses the ball
        if envs.step(np.array([1 if lost_at == 1 else 0]))[2][0]:
            break
    envs.close()
    envs = AtariEnvs("BreakoutNoFrameskip-v4", 1, max_num_frames_per_episode=4 * lost_at)
    envs.reset(seed=1)
    for step in range(1, lost_at + 1):
        _, _, terminations, truncations, info = envs.step(np.array([1 if step == 1 else 0]))
        assert terminations[0] == (step == lost_at)
        assert not truncations[0]
    assert info["_episode"][0]
    assert info["episode"]["l"][0] == lost_at
    envs.close()


@pytest.mark.parametrize("env_id", ["BreakoutNoFrameskip-v4", "PongNoFrameskip-v4", "ALE/Seaquest-v5"])
@pytest.mark.parametrize("max_frames", [8, pytest.param(16, marks=pytest.mark.slow), 100])
def test_the_no_ops_of_a_reset_hide_no_end_of_a_short_game(env_id, max_frames):
    envs = AtariEnvs(env_id, 2, max_num_frames_per_episode=max_frames)
    envs.reset(seed=2)
    length = max_frames // 4
    for step, actions in enumerate(random_actions(envs, 4 * length), start=1):
        _, _, _, truncations, info = envs.step(actions)
        assert (truncations == (step % length == 0)).all()
        assert ("_episode" in info) == (step % length == 0)
        if "_episode" in info:
            assert info["_episode"].all()
            assert (info["episode"]["l"] == length).all()
    envs.close()


# ---- what an id means


@pytest.mark.parametrize("every", [20, pytest.param(1, marks=[pytest.mark.slow, pytest.mark.extended])])
def test_every_registered_game_loads_and_steps(every):
    ids = [name for name in gym.registry if name.endswith("NoFrameskip-v4") or name.startswith("ALE/")]
    assert sum(name.startswith("ALE/") for name in ids) == 104
    assert len(ids) == 166
    for env_id in ids[::every]:
        envs = AtariEnvs(env_id, 1)
        obs, _ = envs.reset(seed=1)
        assert obs.shape == (1, 4, 84, 84)
        seen = obs[0, -1].any()
        for action in [*range(envs.single_action_space.n), *[0] * 80]:
            seen |= envs.step(np.array([action]))[0].any()
            if seen and action == envs.single_action_space.n - 1:
                break
        assert seen, env_id  # a few games start on a dark screen
        envs.close()


@pytest.mark.parametrize(
    ("env_id", "sticky"), [("PongNoFrameskip-v4", 0.0), ("PongNoFrameskip-v0", 0.25), ("ALE/Pong-v5", 0.25)]
)
def test_an_id_keeps_its_own_settings(env_id, sticky):
    envs = AtariEnvs(env_id, 2)
    envs.reset(seed=1)
    settings = envs.describe()
    assert settings["repeat_action_probability"] == sticky
    assert settings["frameskip"] == 4
    assert settings["actions"] == ["NOOP", "FIRE", "RIGHT", "LEFT", "RIGHTFIRE", "LEFTFIRE"]
    assert settings["emulator_seeds"] == emulator_seeds(1, np.zeros(2, int)).tolist()
    envs.close()


def test_a_registered_variant_keeps_its_own_settings():
    kwargs = dict(gym.spec("ALE/Pong-v5").kwargs, full_action_space=True, frameskip=2, repeat_action_probability=0.0)
    gym.register("Variant/Pong-v0", entry_point="ale_py.env:AtariEnv", kwargs=kwargs)
    gym.register("Variant/Mode-v0", entry_point="ale_py.env:AtariEnv", kwargs=kwargs | {"mode": 1})
    gym.register("Variant/Limit-v0", entry_point="ale_py.env:AtariEnv", kwargs=kwargs, max_episode_steps=10)
    try:
        envs = AtariEnvs("Variant/Pong-v0", 1)
        assert envs.single_action_space.n == 18
        assert envs.describe()["frameskip"] == 2
        envs.close()
        with pytest.raises(UsageError, match="no setting for its mode"):
            atari_settings("Variant/Mode-v0")
        with pytest.raises(UsageError, match="no setting for its max_episode_steps"):
            atari_settings("Variant/Limit-v0")
    finally:
        for name in ("Pong", "Mode", "Limit"):
            del gym.registry[f"Variant/{name}-v0"]


@pytest.mark.parametrize(
    ("env_id", "words"),
    [
        ("Breakout-v4", "use BreakoutNoFrameskip-v4 or ALE/Breakout-v5"),
        ("MsPacman-v0", "use MsPacmanNoFrameskip-v4 or ALE/MsPacman-v5"),
        ("CartPole-v1", "not an Atari game"),
        ("breakout", "did you mean .*BreakoutNoFrameskip-v4"),
        ("BreakoutNoFrameskip-v5", "did you mean BreakoutNoFrameskip-v4"),
        ("Pong-v5", "did you mean ALE/Pong-v5"),
        ("nowhere:Pong-v0", "nowhere"),
        ("", "--env-id"),
    ],
)
def test_an_id_that_does_not_fit_is_refused_with_a_way_out(env_id, words):
    with pytest.raises(UsageError, match=words):
        atari_settings(env_id)


# ---- seeds


def test_environments_of_a_run_differ_and_runs_share_no_seed():
    seeds = [emulator_seeds(seed, np.zeros(64, int)) for seed in range(30)]
    flat = np.concatenate(seeds)
    assert len(set(flat.tolist())) == len(flat)
    assert flat.min() >= 0
    assert flat.max() < 2**31
    np.testing.assert_array_equal(emulator_seeds(7, np.zeros(64, int)), seeds[7])
    np.testing.assert_array_equal(emulator_seeds(7, np.zeros(5, int), first=8), seeds[7][8:13])
    np.testing.assert_array_equal(
        emulator_seeds(7, np.zeros(8, int)), seeds[7][:8]
    )  # more environments leave the first as they are


@pytest.mark.parametrize("env_id", [pytest.param("BreakoutNoFrameskip-v4", marks=pytest.mark.slow), "ALE/Breakout-v5"])
def test_a_seed_fixes_the_games_and_the_games_differ(env_id):
    def play(seed):
        envs = AtariEnvs(env_id, 4)
        frames = [envs.reset(seed=seed)[0]]
        frames += [envs.step(actions)[0] for actions in np.repeat(random_actions(envs, 200)[:, :1], 4, axis=1)]
        envs.close()
        return np.stack(frames)

    first = play(1)
    np.testing.assert_array_equal(first, play(1))
    assert (first != play(2)).any()
    assert all((first[:, 0] != first[:, i]).any() for i in range(1, 4))


# ---- bad calls


@pytest.mark.parametrize("action", [-1, 4, 2**40])
def test_an_invalid_action_raises_instead_of_hanging(action):
    envs = AtariEnvs("BreakoutNoFrameskip-v4", 2)
    envs.reset(seed=1)
    with pytest.raises(ValueError, match="actions must be 0 to 3"):
        envs.step(np.array([0, action]))
    envs.step(np.array([0, 3]))  # and the environment goes on
    envs.close()


@pytest.mark.parametrize("actions", [np.zeros(3, dtype=np.int64), np.zeros(2), np.zeros((2, 1), dtype=np.int64)])
def test_actions_of_another_shape_or_type_raise(actions):
    envs = AtariEnvs("BreakoutNoFrameskip-v4", 2)
    envs.reset(seed=1)
    with pytest.raises(ValueError, match="actions must be 2 integers"):
        envs.step(actions)
    envs.close()


def test_reset_options_are_refused():
    envs = AtariEnvs("BreakoutNoFrameskip-v4", 1)
    with pytest.raises(ValueError, match="no options"):
        envs.reset(options={"reset_mask": np.array([True])})
    envs.close()


# ---- state


SHORT_GAMES = {"max_num_frames_per_episode": 40}  # 10 steps


@pytest.fixture
def often_reseeded(monkeypatch):
    """New seeds after few games and steps: the same code, sooner."""
    monkeypatch.setattr(common.envs, "GAMES_PER_SEED", 5)
    monkeypatch.setattr(common.envs, "STICKY_STEPS_PER_SEED", 100)


STATES = {
    "games with lives": ("BreakoutNoFrameskip-v4", 500, {}),
    "no game ended yet": ("PongNoFrameskip-v4", 150, {}),
    "no step yet": ("PongNoFrameskip-v4", 0, {}),
    "sticky actions": ("ALE/Breakout-v5", 80, {}),
    "sticky actions, reseeded": ("ALE/Breakout-v5", 130, SHORT_GAMES),
    "many games": ("SpaceInvadersNoFrameskip-v4", 80, SHORT_GAMES),
    "a game without FIRE": ("MsPacmanNoFrameskip-v4", 300, {}),
}
SLOW_STATES = ("games with lives", "no game ended yet", "a game without FIRE", "sticky actions, reseeded", "many games")


def assert_equal_futures(first: AtariEnvs, second: AtariEnvs, steps: int) -> None:
    """Both play on with the same actions and return the same."""
    for action in random_actions(first, steps, seed=7):
        ours, theirs = first.step(action), second.step(action)
        for x, y in zip(ours[:4], theirs[:4], strict=True):
            np.testing.assert_array_equal(x, y)
        assert ours[4].keys() == theirs[4].keys()
        if "_final_obs" in ours[4]:
            done = ours[4]["_final_obs"]
            np.testing.assert_array_equal(ours[4]["final_obs"][done], theirs[4]["final_obs"][done])
        if "_episode" in ours[4]:
            for key in ("r", "l"):
                np.testing.assert_array_equal(ours[4]["episode"][key], theirs[4]["episode"][key])
        np.testing.assert_array_equal(first.reseeds, second.reseeds)


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW_STATES else []) for name in STATES]
)
def test_restored_emulators_play_on_as_if_nothing_had_happened(case, often_reseeded):
    env_id, steps, overrides = STATES[case]
    envs = AtariEnvs(env_id, 3, **overrides)
    envs.reset(seed=5)
    for action in random_actions(envs, steps):
        envs.step(action)
    assert (envs.reseeds.max() > 0) == (case in ("sticky actions, reseeded", "many games"))
    again = AtariEnvs(env_id, 3, **overrides)
    again.reset(seed=9)
    again.step(np.array([1, 1, 1]))
    again.load_state_dict(envs.state_dict())
    assert again.restore_note == ""
    np.testing.assert_array_equal(again.obs, envs.obs)
    assert_equal_futures(envs, again, 200)
    # the restored state is as good as the first one
    third = AtariEnvs(env_id, 3, **overrides)
    third.load_state_dict(again.state_dict())
    assert_equal_futures(again, third, 50)
    for one in (envs, again, third):
        one.close()


def test_a_state_stays_what_it_was_while_the_games_go_on():
    envs = AtariEnvs("BreakoutNoFrameskip-v4", 2)
    envs.reset(seed=1)
    for action in random_actions(envs, 50):
        envs.step(action)
    state = envs.state_dict()
    before = str(state)
    for action in random_actions(envs, 2000):
        envs.step(action)
    assert str(state) == before
    envs.close()


@pytest.mark.slow
def test_reseeding_keeps_what_has_to_be_played_again_short(often_reseeded):
    for env_id, most in (("BreakoutNoFrameskip-v4", 10), ("ALE/Breakout-v5", 100 + 10)):
        envs = AtariEnvs(env_id, 2, **SHORT_GAMES)
        envs.reset(seed=1)
        longest = 0
        for action in random_actions(envs, 250):
            envs.step(action)
            longest = max(longest, envs.log.lengths().max())
        assert longest <= most
        assert envs.resets.max() <= 11
        assert envs.reseeds.min() > 0
        assert len(envs.log.rows) == 1_024
        envs.close()


def test_stacks_and_statistics_begin_anew_where_a_game_is_reseeded(often_reseeded):
    envs = AtariEnvs("BreakoutNoFrameskip-v4", 2, **SHORT_GAMES)
    envs.reset(seed=1)
    seen = 0
    for action in random_actions(envs, 130):
        before = envs.reseeds.copy()
        obs, _, _, truncated, info = envs.step(action)
        for i in np.flatnonzero(envs.reseeds != before):
            seen += 1
            assert truncated[i]
            assert info["_episode"][i]
            assert info["episode"]["l"][i] <= 10
            assert not obs[i, 0].any()  # zero-padded
            assert info["final_obs"][i, 0].any()  # the true last observation
            assert envs.episode_lengths[i] == 0
    assert seen >= 4
    envs.close()


def test_other_emulators_begin_new_games_and_say_so():
    envs = AtariEnvs("BreakoutNoFrameskip-v4", 2)
    envs.reset(seed=1)
    for action in random_actions(envs, 100):
        envs.step(action)
    state = envs.state_dict()
    state["obs"] = state["obs"].clone()
    state["obs"][1, 3, 40, 40] += 1  # what another ale-py might draw
    again = AtariEnvs("BreakoutNoFrameskip-v4", 2)
    again.load_state_dict(state)
    assert again.restore_note == "the emulators play differently now: the learner is exact, games restart"
    assert again.episode_lengths.tolist() == [0, 0]
    assert again.reseeds.tolist() == [1, 1]
    assert not again.obs[:, 0].any()
    for one in (envs, again):
        one.close()


def test_a_log_with_an_action_that_the_game_does_not_have_raises_instead_of_hanging():
    envs = AtariEnvs("BreakoutNoFrameskip-v4", 2)
    envs.reset(seed=1)
    envs.step(np.array([1, 2]))
    state = envs.state_dict()
    state["actions"][0][0] = 4
    with pytest.raises(ValueError, match="action 4 in a game with 4"):
        envs.load_state_dict(state)
    envs.close()


def test_the_state_of_another_number_of_environments_raises():
    envs, three = AtariEnvs("PongNoFrameskip-v4", 2), AtariEnvs("PongNoFrameskip-v4", 3)
    envs.reset(seed=1)
    with pytest.raises(ValueError, match="the state of 2 environments, not 3"):
        three.load_state_dict(envs.state_dict())
    for one in (envs, three):
        one.close()


def test_an_exception_from_the_tick_ends_a_restore():
    envs = AtariEnvs("PongNoFrameskip-v4", 2)
    envs.reset(seed=1)
    for action in random_actions(envs, 20):
        envs.step(action)
    shares = []

    def tick(share):
        shares.append(share)
        if share > 0.5:
            raise KeyboardInterrupt

    envs.replay_tick = tick
    with pytest.raises(KeyboardInterrupt):
        envs.load_state_dict(envs.state_dict())
    assert shares[0] == 0
    assert len(shares) == 12
    envs.close()


@pytest.mark.slow
@pytest.mark.parametrize("game", ["Pong", "Qbert", "Seaquest", "Tennis", "MontezumaRevenge", "UpNDown", "Skiing"])
@pytest.mark.parametrize("kind", ["{}NoFrameskip-v4", pytest.param("ALE/{}-v5", marks=pytest.mark.extended)])
def test_restored_emulators_of_many_games_play_on(game, kind):
    envs, again = (AtariEnvs(kind.format(game), 2) for _ in range(2))
    envs.reset(seed=3)
    for action in random_actions(envs, 800):
        envs.step(action)
    again.load_state_dict(envs.state_dict())
    assert again.restore_note == ""
    assert_equal_futures(envs, again, 400)
    for one in (envs, again):
        one.close()
