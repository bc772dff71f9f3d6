"""Plays a trained agent and reports its scores: whole games with all their lives, rewards as the game gives them.

    python evaluate.py runs/BreakoutNoFrameskip-v4__ppo_atari__1__f55d307e --episodes 30 --video breakout.mp4

Algorithm, environment, preprocessing, network and the statistics of normalisation come from the checkpoint; there is no
flag with which they could be others. Arithmetic is float32, whatever the training used, on any machine.

Each of up to 8 environments plays its share of the games to their ends, so that short games count no more than long
ones. Human-normalised scores are (score - random) / (human - random), with the scores of Wang et al. 2016,
https://arxiv.org/abs/1511.06581 (table 2: up to 30 no-ops at the start, no sticky actions).
"""

import common.cpu  # noqa: F401  isort: skip  (has to come before torch)

import contextlib
import csv
import glob
import importlib.metadata
import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
import tyro
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation
from safetensors.torch import save

import dqn_atari
import ppo_atari
import ppo_continuous
from common.args import parse
from common.checkpoint import Damaged, newest_first, newest_good, read
from common.control import ControlEnvs, make_env
from common.envs import AtariEnvs
from common.errors import SaveError, UsageError
from common.files import replacing
from common.gpu import choose_device, free_memory
from common.running import Normalizer
from common.tiny import clip

MAX_ENVS = 8
SILENCE = 10.0  # seconds, at most
STUCK = 3_000  # steps of a game after which a greedy agent may wait for ever
EPSILON = 0.05  # of a DQN agent that is not greedy, as in Mnih et al. 2015
HUMAN_SCORES = Path(__file__).parent / "benchmark" / "human_scores.csv"
ATARI_SCALE = 3  # of a video's pixels
CPU = torch.device("cpu")


@dataclass
class Args:
    checkpoint: tyro.conf.Positional[str]
    """a run folder, whose newest checkpoint plays, or a checkpoint, such as checkpoints/best.pt in it"""
    episodes: int = 10
    """whole games; 0: play none"""
    seed: int = 1
    """of the games, which are others than those that a training with this seed plays, and of the agent's draws"""
    greedy: bool = False
    """take the best action; without, PPO draws from its policy, and 5% of DQN's actions are random"""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N"""
    json: bool = False
    """print one JSON object and nothing else"""
    video: str | None = None
    """file (.mp4) for a film of the first game; where nothing can be rendered, scores are reported without it"""
    dataset: str | None = None
    """name of a Minari data set for the games, such as breakout/ppo-v0; needs requirements-extras.txt"""
    export: str | None = None
    """file (.safetensors) for the weights"""

    def check(self) -> None:
        if self.episodes < 0:
            raise UsageError(f"--episodes {self.episodes}: must not be negative")
        if not 0 <= self.seed < 2**63:
            raise UsageError(f"--seed {self.seed}: must be 0 to 2^63 - 1")
        for name, path, suffix in (("video", self.video, ".mp4"), ("export", self.export, ".safetensors")):
            if path is None:
                continue
            if not path.endswith(suffix):
                raise UsageError(f"--{name} {path}: must end in {suffix}")
            if not os.access(Path(path).parent, os.W_OK) or Path(path).is_dir():
                raise UsageError(f"--{name} {path}: cannot be written there")
        for name in ("video", "dataset"):
            if getattr(self, name) is not None and self.episodes == 0:
                raise UsageError(f"--{name}: means nothing with --episodes 0")
        if self.dataset == "":
            raise UsageError("--dataset: no name such as breakout/ppo-v0")
        if self.checkpoint == "":
            raise UsageError("give a run folder or a checkpoint")


def find(given: str, say: Callable[[str], None]) -> tuple[Path, dict[str, Any]]:
    """The checkpoint that was meant, and its content.

    Raises:
        UsageError: there is none, or none that can be read.
    """
    path = Path(given)
    if path.is_dir():
        folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
        if not newest_first(folder):
            raise UsageError(f"{given}: no checkpoint there")
        path, content, damaged = newest_good(folder)
        for newer, reason in damaged.items():
            say(f"{newer} is damaged ({reason}): {path.name} plays")
        return path, content
    if not path.exists():
        near = [str(other) for other in sorted(path.parent.glob(f"{glob.escape(path.name)}*"))[:3]]
        hint = f"did you mean {' or '.join(near)}?" if near else "give a run folder or a checkpoint"
        raise UsageError(f"{given}: not there; {hint}")
    try:
        return path, read(path)
    except Damaged as error:
        hint = "; give the run's folder, agent.pt holds weights alone" if path.name == "agent.pt" else ""
        raise UsageError(f"{given}: {error}{hint}") from None


# ---- the agents


# observations of all environments -> their actions
Policy = Callable[[np.ndarray], np.ndarray]


def ppo_atari_policy(content: dict[str, Any], envs: AtariEnvs, greedy: bool, device: torch.device) -> Policy:
    """`[N, 4, 84, 84]` -> `[N]`"""
    agent = ppo_atari.Agent(envs.single_action_space.n).to(device, memory_format=torch.channels_last)
    agent.load_state_dict(content["agent"])

    def act(obs: np.ndarray) -> np.ndarray:
        log_probs, _ = agent(ppo_atari.channels_last(torch.from_numpy(obs)).to(device))
        actions = log_probs.argmax(1) if greedy else log_probs.exp().multinomial(1).flatten()
        return actions.cpu().numpy()

    return act


def dqn_atari_policy(content: dict[str, Any], envs: AtariEnvs, greedy: bool, device: torch.device) -> Policy:
    """`[N, 4, 84, 84]` -> `[N]`"""
    num_actions = envs.single_action_space.n
    q_network = dqn_atari.QNetwork(num_actions).to(device, memory_format=torch.channels_last)
    q_network.load_state_dict(content["q_network"])
    epsilon = 0.0 if greedy else EPSILON

    def act(obs: np.ndarray) -> np.ndarray:
        best = q_network(dqn_atari.channels_last(torch.from_numpy(obs)).to(device)).argmax(1).cpu()
        random = torch.randint(num_actions, best.shape)
        return torch.where(torch.rand(best.shape) < epsilon, random, best).numpy()

    return act


def ppo_continuous_policy(content: dict[str, Any], envs: ControlEnvs, greedy: bool, device: torch.device) -> Policy:
    """`[N, D]` -> `[N, A]`"""
    space = envs.single_action_space
    num_observations, num_actions = envs.single_observation_space.shape[0], space.shape[0]
    agent = ppo_continuous.Agent(num_observations, num_actions).to(device)
    agent.load_state_dict(content["agent"])
    normalizer = Normalizer(1, num_observations, gamma=1.0)
    normalizer.load_state_dict(content["normalizer"])
    std = agent.actor_logstd.exp()

    def act(obs: np.ndarray) -> np.ndarray:
        mean, _ = agent(torch.from_numpy(normalizer.observations(obs)).float().to(device))
        actions = mean if greedy else mean + std * torch.randn(mean.shape).to(device)
        return clip(actions.cpu().numpy(), space.low, space.high)

    return act


POLICIES = {"ppo_atari": ppo_atari_policy, "dqn_atari": dqn_atari_policy, "ppo_continuous": ppo_continuous_policy}
POLICIES["ppo_atari_ray"] = ppo_atari_policy  # the same network


def make_envs(about: dict[str, Any], num_envs: int, **settings: Any) -> AtariEnvs | ControlEnvs:
    """The environments that a checkpoint was trained on.

    Args:
        about: of the checkpoint.
        settings: that differ from those of the training.

    Raises:
        UsageError: this machine does not have it.
    """
    env_id = about["args"]["env_id"]
    trained_with = about.get("env", {})
    try:
        if about["script"] == "ppo_continuous":  # what is no number may stand for an object
            numbers = {
                name: x for name, x in trained_with.items() if isinstance(x, int | float) and name != "processes"
            }
            return ControlEnvs(env_id, num_envs, **{**numbers, **settings})
        without_actions = {name: x for name, x in trained_with.items() if name != "actions"}
        return AtariEnvs(env_id, num_envs, **{**without_actions, **settings})
    except TypeError as error:  # a setting of another version
        raise UsageError(f"{env_id}: {error}") from None


def differences(about: dict[str, Any], envs: AtariEnvs | ControlEnvs) -> list[str]:
    """What is not as it was in training, though it may change the scores."""
    here = json.loads(json.dumps(envs.describe()))
    lines = [
        f"the environment's {name} is {here.get(name)}, in training it was {was}"
        for name, was in about.get("env", {}).items()
        if here.get(name) != was
    ]
    simulator = "mujoco" if about["script"] == "ppo_continuous" else "ale-py"
    was = about["machine"]["packages"].get(simulator)
    if was and was != (now := importlib.metadata.version(simulator)):
        lines.append(f"{simulator} is {now}, in training it was {was}: games may differ")
    return lines


# ---- playing


@dataclass
class Game:
    score: float
    length: int  # agent steps
    truncated: bool  # by a time limit


def play(
    envs: AtariEnvs | ControlEnvs,
    policy: Policy,
    episodes: int,
    seed: int,
    say: Callable[[str], None],
    witnesses: list[Any],
    greedy: bool = False,
) -> list[Game]:
    """Play games to their ends.

    Args:
        seed: of the environments.
        greedy: whether the policy is, for what is said of games that do not end.
        witnesses: are shown each step of all environments, and which of them still play for the result.

    Returns:
        `episodes` games, in the order in which they ended.
    """
    num_envs = envs.num_envs
    left = np.full(num_envs, episodes // num_envs)
    left[: episodes % num_envs] += 1
    games: list[Game] = []
    obs, _ = envs.reset(seed=seed)
    steps, said_at = 0, time.monotonic()
    while left.any():
        if time.monotonic() - said_at > SILENCE:
            said_at = time.monotonic()
            stuck = " (a greedy agent may never press FIRE)" if greedy and steps > STUCK and not games else ""
            say(f"{len(games)} of {episodes} games are over, {steps:,} steps each so far{stuck}")
        with torch.no_grad():
            actions = policy(obs)
        next_obs, rewards, terminations, truncations, info = envs.step(actions)
        ended = info.get("_episode", np.zeros(num_envs, dtype=bool))  # not where a life was lost
        final_obs, truncated = next_obs, truncations & ~terminations
        if ended.any():
            final_obs = info["final_obs"]
            truncated |= at_the_limit(envs, info["episode"]["l"])
        for witness in witnesses:
            witness.see(obs, actions, rewards, ended, truncated, final_obs, left > 0)
        obs = next_obs
        steps += 1
        for i in np.flatnonzero(ended & (left > 0)):
            left[i] -= 1
            game = Game(float(info["episode"]["r"][i]), int(info["episode"]["l"][i]), bool(truncated[i]))
            games.append(game)
            cut = ", cut by the time limit" if game.truncated else ""
            said_at = time.monotonic()
            say(f"game {len(games)} of {episodes}: {game.score:,.2f} in {game.length:,} steps{cut}")
    return games


def at_the_limit(envs: AtariEnvs | ControlEnvs, lengths: np.ndarray) -> np.ndarray:
    """Which games were cut: ale-py says nothing of it where a life was lost on the same step. `[N]` -> `[N]`"""
    if not isinstance(envs, AtariEnvs):
        return np.zeros(len(lengths), dtype=bool)
    return lengths * envs.settings["frameskip"] >= envs.settings.get("max_num_frames_per_episode", np.inf)


def human_scores(game: str) -> tuple[float, float] | None:
    """Of a random player and a human one, where they were published."""
    with open(HUMAN_SCORES, newline="") as file:
        for row in csv.DictReader(file):
            if row["game"] == game:
                return float(row["random"]), float(row["human"])
    return None


# ---- the film


PROBE = """
import mujoco
model = mujoco.MjModel.from_xml_string("<mujoco><worldbody><light/><geom size='1'/></worldbody></mujoco>")
data = mujoco.MjData(model)
mujoco.mj_forward(model, data)
renderer = mujoco.Renderer(model, 64, 64)
renderer.update_scene(data)
assert renderer.render().std() > 0
"""


def choose_renderer(given: str | None) -> None:
    """Set `MUJOCO_GL` to what renders here without a window, if anything does.

    Tried in processes of their own: a library that does not fit may end the process that tries it. EGL needs a GPU's
    driver or Mesa, OSMesa the library of that name; GLFW, MuJoCo's default, a screen.

    Args:
        given: the user's choice, instead of these.
    """
    screen = ["glfw"] if os.environ.get("DISPLAY") else []
    for name in [given] if given else ["egl", "osmesa", *screen]:
        environment = os.environ | {"MUJOCO_GL": name}
        try:
            done = subprocess.run([sys.executable, "-c", PROBE], env=environment, capture_output=True, timeout=60)
        except subprocess.TimeoutExpired:
            continue
        if done.returncode == 0:
            os.environ["MUJOCO_GL"] = name
            return


class Film:
    """Of the first game: one more environment, which can be looked at, plays the same actions again.

    Whatever goes wrong ends the film and nothing else.
    """

    def __init__(self, path: str, about: dict[str, Any], seed: int, say: Callable[[str], None]) -> None:
        self.path, self.say = Path(path), say
        self.beside = self.path.with_name(f".{self.path.stem}.{os.getpid()}.partial.mp4")
        self.done, self.frames = False, 0
        self.film: Any = None
        self.envs: Any = None
        try:
            self._open(about, seed)
        except Exception as error:
            self._fail(error)

    def _open(self, about: dict[str, Any], seed: int) -> None:
        import imageio.v3

        if about["script"] == "ppo_continuous":
            self.envs = make_envs(about, 1, render_mode="rgb_array")
            if "MUJOCO_GL" not in os.environ and "mujoco" in sys.modules:
                raise RuntimeError("neither EGL nor OSMesa works here; on Debian and Ubuntu: apt install libosmesa6")
            self.look = lambda: self.envs.envs.call("render")[0]
            fps = self.envs.envs.envs[0].metadata.get("render_fps", 30)
        else:
            colour = dict(grayscale=False, img_height=210, img_width=160, stack_num=1)
            self.envs = make_envs(about, 1, **colour)
            self.look = lambda: self.envs.obs[0, 0].repeat(ATARI_SCALE, 0).repeat(ATARI_SCALE, 1)
            fps = 60 / self.envs.settings["frameskip"]
        self.envs.reset(seed=seed)
        self.film = imageio.v3.imopen(self.beside, "w", plugin="pyav")
        self.film.init_video_stream("libx264", fps=round(fps))
        self._shoot()

    def _shoot(self) -> None:
        frame = np.asarray(self.look(), dtype=np.uint8)
        self.film.write_frame(frame[: len(frame) // 2 * 2, : frame.shape[1] // 2 * 2])  # the codec wants even sizes
        self.frames += 1

    def see(self, obs: Any, actions: np.ndarray, rewards: np.ndarray, ended: np.ndarray, *rest: Any) -> None:
        if self.done:
            return
        try:
            _, reward, _, _, info = self.envs.step(actions[:1])
            if reward[0] != rewards[0] or ("_episode" in info) != bool(ended[0]):
                raise RuntimeError("the game can't be played again, the environment is not deterministic")
            if ended[0]:
                self._end()
            else:
                self._shoot()
        except Exception as error:
            self._fail(error)

    def _end(self) -> None:
        self.film.close()
        os.replace(self.beside, self.path)
        self.say(f"{self.path}: {self.frames:,} frames of the first environment's first game")
        self.close()

    def _fail(self, error: Exception) -> None:
        self.close()
        self.path = None
        reason = ""
        with contextlib.suppress(Exception):  # PyOpenGL's errors can't always be printed
            reason = " ".join(str(error).split())
        self.say(f"no video: {reason or type(error).__name__}")

    def close(self) -> None:
        """Leave nothing half."""
        self.done = True
        for part in (self.film, self.envs):
            if part is not None:
                with contextlib.suppress(Exception):
                    part.close()
        self.film = self.envs = None
        self.beside.unlink(missing_ok=True)


# ---- the data set


class Dataset:
    """The games as a Minari data set, below `MINARI_DATASETS_PATH` or in `~/.minari/datasets`: observations before any
    normalisation, actions, and rewards as the game gives them.

    Each game is written when it has ended; until then it is in memory, 28 kB a step on Atari, as much as on the disk.

    Raises:
        UsageError: Minari is missing, or the name is none or taken.
    """

    def __init__(self, name: str, about: dict[str, Any], envs: AtariEnvs | ControlEnvs) -> None:
        if not all(importlib.util.find_spec(package) for package in ("minari", "h5py")):
            raise UsageError(f"--dataset {name}: needs Minari: pip install -r requirements-extras.txt")
        from minari.dataset.minari_dataset import parse_dataset_id
        from minari.storage import get_dataset_path

        if root := os.environ.get("MINARI_DATASETS_PATH"):  # Minari takes a relative one in two ways
            os.environ["MINARI_DATASETS_PATH"] = os.path.abspath(root)
        try:
            parse_dataset_id(name)
        except (ValueError, TypeError):
            raise UsageError(f"--dataset {name}: no name such as breakout/ppo-v0") from None
        if get_dataset_path(name).exists():
            raise UsageError(f"--dataset {name}: is there already, in {get_dataset_path(name)}")
        self.name, self.about, self.envs = name, about, envs
        self.steps: list[list[tuple]] = [[] for _ in range(envs.num_envs)]
        self.dataset: Any = None

    def see(
        self,
        obs: np.ndarray,
        actions: np.ndarray,
        rewards: np.ndarray,
        ended: np.ndarray,
        truncated: np.ndarray,
        final_obs: np.ndarray,
        playing: np.ndarray,
    ) -> None:
        for i in np.flatnonzero(playing):
            self.steps[i].append((obs[i].copy(), actions[i].copy(), float(rewards[i])))
            # to be written the game is copied into one block
            needed = len(self.steps[i]) * obs[i].nbytes
            if len(self.steps[i]) % 100 == 0 and needed > (free := free_memory(CPU)):
                raise SaveError(
                    f"--dataset {self.name}: a game of {len(self.steps[i]):,} steps so far needs "
                    f"{needed / 1e6:,.0f} MB of memory more, {free / 1e6:,.0f} MB are free; "
                    "with fewer --episodes fewer are played at once"
                )
            if ended[i]:
                try:
                    self._write(i, final_obs[i], bool(truncated[i]))
                except (OSError, RuntimeError, ValueError) as error:  # h5py's, when a disk is full
                    raise SaveError(f"--dataset {self.name}: {error}") from None
                self.steps[i] = []

    def _write(self, i: int, final_obs: np.ndarray, truncated: bool) -> None:
        from minari import create_dataset_from_buffers
        from minari.data_collector import EpisodeBuffer

        observations, actions, rewards = zip(*self.steps[i], strict=True)
        last = np.arange(len(rewards)) == len(rewards) - 1
        game = EpisodeBuffer(
            observations=np.stack([*observations, final_obs]),
            actions=np.stack(actions),
            rewards=np.array(rewards),
            terminations=last & (not truncated),
            truncations=last & truncated,
        )
        if self.dataset is not None:
            self.dataset.storage.update_episodes([game])
            return
        human = human_scores(self.envs.settings["game"]) if isinstance(self.envs, AtariEnvs) else None
        reference = dict(zip(("ref_min_score", "ref_max_score"), human, strict=True)) if human else {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of an author and the like, which it does not know
            self.dataset = create_dataset_from_buffers(
                self.name,
                [game],
                env=offline_env(self.about, self.envs),
                algorithm_name=self.about["script"],
                description=f"{self.about['script']}.py, {self.about['global_step']:,} steps of training",
                jpeg_encoding=False,  # pixels as the agent saw them
                **reference,
            )


def offline_env(about: dict[str, Any], envs: AtariEnvs | ControlEnvs) -> gym.Env:
    """One environment with the spaces of the data set, for whoever recovers it from there. On Atari it does not press
    FIRE at the start of a game."""
    if isinstance(envs, ControlEnvs):
        return make_env(about["args"]["env_id"])
    settings = envs.settings
    env = AtariPreprocessing(
        gym.make(about["args"]["env_id"], frameskip=1),
        noop_max=settings["noop_max"],
        frame_skip=settings["frameskip"],
        screen_size=settings["img_height"],
    )
    return FrameStackObservation(env, settings["stack_num"], padding_type="zero")


# ---- the weights


def export(path: str, content: dict[str, Any]) -> None:
    """Weights as a safetensors file, with what it takes to use them as its metadata (strings, JSON inside).

    Raises:
        UsageError: it cannot be written.
    """
    about = content["about"]
    tensors = dict(content["q_network" if about["script"] == "dqn_atari" else "agent"])
    metadata = {name: json.dumps(about[name]) for name in ("script", "args", "global_step")}
    metadata["env"] = json.dumps(about.get("env", {}))
    if "normalizer" in content:
        normalizer = Normalizer(1, len(content["normalizer"]["obs_mean"]), gamma=1.0)
        normalizer.load_state_dict(content["normalizer"])
        tensors["obs_mean"] = torch.from_numpy(normalizer.obs_rms.mean)
        tensors["obs_std"] = torch.from_numpy(normalizer.obs_rms.std())
        metadata["normalisation"] = json.dumps("clip((obs - obs_mean) / obs_std, -10, 10)")
    try:
        with replacing(Path(path)) as file:
            file.write(save({name: x.contiguous() for name, x in tensors.items()}, metadata))
    except OSError as error:
        raise UsageError(f"--export {path}: {error.strerror}") from None


# ---- all of it


def evaluate(args: Args) -> dict[str, Any]:
    """What `--json` prints.

    Raises:
        UsageError: see `Args.check`, `find`, `make_envs`, `Dataset`, `export`.
        SaveError: the data set could not be written; the games before are in it.
    """
    began = time.perf_counter()

    def say(line: str) -> None:
        print(line, file=sys.stderr if args.json else sys.stdout, flush=True)

    args.check()
    device = choose_device(args.device)
    path, content = find(args.checkpoint, say)
    about = content["about"]
    if about["script"] not in POLICIES:
        raise UsageError(f"{path}: a checkpoint of {about['script']}.py, which this program does not know")
    say(f"{path}: {about['script']}.py on {about['args']['env_id']}, step {about['global_step']:,}")
    result = {
        "checkpoint": str(path),
        "script": about["script"],
        "env_id": about["args"]["env_id"],
        "global_step": about["global_step"],
        "episodes": args.episodes,
        "seed": args.seed,
        "greedy": args.greedy,
        "device": str(device),
    }

    def export_if_asked() -> None:  # when nothing can be refused any more
        if args.export:
            export(args.export, content)
            result["export"] = args.export
            say(f"{args.export}: the weights")

    if args.episodes == 0:
        export_if_asked()
        return result

    given = os.environ.pop("MUJOCO_GL", None)  # with one that does not work here MuJoCo can't be imported
    if about["script"] == "ppo_continuous" and args.video:
        choose_renderer(given)
    envs = make_envs(about, min(args.episodes, MAX_ENVS))
    result["notes"] = differences(about, envs)
    for line in result["notes"]:
        say(line)
    torch.manual_seed(args.seed)
    try:
        policy = POLICIES[about["script"]](content, envs, args.greedy, device)
    except RuntimeError as error:
        raise UsageError(f"{path}: does not fit this environment: {' '.join(str(error).split())}") from None
    # a training seeds its games with the seed itself
    seed = int(np.random.SeedSequence([args.seed, 1]).generate_state(1)[0])
    dataset = Dataset(args.dataset, about, envs) if args.dataset else None
    export_if_asked()
    film = Film(args.video, about, seed, say) if args.video else None
    witnesses = [witness for witness in (film, dataset) if witness]
    try:
        games = play(envs, policy, args.episodes, seed, say, witnesses, args.greedy and isinstance(envs, AtariEnvs))
    finally:
        envs.close()
        if film:
            film.close()

    scores = [game.score for game in games]
    result |= {
        "scores": scores,
        "lengths": [game.length for game in games],
        "truncated": [game.truncated for game in games],
        "mean": statistics.fmean(scores),
        "median": statistics.median(scores),
        "std": statistics.stdev(scores) if len(scores) > 1 else None,
        "min": min(scores),
        "max": max(scores),
        "video": str(film.path) if film and film.path else None,
        "dataset": args.dataset,
        "seconds": time.perf_counter() - began,
    }
    spread = "" if result["std"] is None else f", standard deviation {result['std']:,.2f}"
    how = "greedy" if args.greedy else "sampled"
    say(
        f"{args.episodes} {'game' if args.episodes == 1 else 'games'}, {how}: mean {result['mean']:,.2f}, "
        f"median {result['median']:,.2f}{spread}, "
        f"from {result['min']:,.2f} to {result['max']:,.2f}"
    )
    if isinstance(envs, AtariEnvs) and (published := human_scores(envs.settings["game"])):
        result["random_score"], result["human_score"] = random, human = published
        result["human_normalised"] = (result["mean"] - random) / (human - random)
        sticky = ", these without sticky actions" if envs.sticky else ""
        say(f"human-normalised {result['human_normalised']:.3f} (random {random:g}, human {human:g}{sticky})")
    if dataset:
        say(f"data set {args.dataset}: {dataset.dataset.spec.data_path}")
    return result


def main() -> int:
    try:
        args = parse(Args, sys.argv[1:], __doc__)
        result = evaluate(args)
        if args.json:
            print(json.dumps(result, indent=2), flush=True)
    except UsageError as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    except SaveError as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: no result", file=sys.stderr)
        return 130
    except BrokenPipeError:  # nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:  # a full disk below the output
        print(f"error: cannot print: {error.strerror}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 0


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
            signal.signal(number, signal.default_int_handler)  # a film that is half done goes
    sys.exit(main())
