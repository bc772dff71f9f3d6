"""Proximal policy optimisation on Atari games, whose games are played by actors on any number of machines.

Schulman et al. 2017, https://arxiv.org/abs/1707.06347: the clipped objective (eq. 7) with a value loss and an entropy
bonus (eq. 9), advantages by GAE (eq. 11, 12; Schulman et al. 2016, https://arxiv.org/abs/1506.02438). Network and
preprocessing of Mnih et al. 2015. Flags, defaults and TensorBoard tags are those of CleanRL's ppo_atari.py.

The sibling of ppo_atari.py on Ray. Each actor has some environments and, for one rollout, a copy of the policy; the one
learner waits for all of them, so that the mathematics is that of one machine with all environments: they draw actions
from random numbers that the learner sends with the weights, and environment i has the same games on whichever actor.

Stopped anywhere, any number of times, the same command ends with the weights of a run that was never stopped: a
checkpoint holds the state of everything in `state`, as it was at the beginning of an iteration. An actor that is lost
is replaced, and its share of the rollout played again.

Deviations from CleanRL: a truncated game bootstraps from the value of its true last observation; FIRE is not pressed
for the agent after a lost life; stacks start with zeros after a reset; logged losses are means over all minibatches.
Actors compute in float32 on the CPU, whatever the learner does.
"""

import common.preemption  # isort: skip  (first: signals count from here on)
import common.cpu  # noqa: F401  isort: skip  (has to come before torch)

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

from common.amp import Amp
from common.args import SharedArgs, default_run_name, run_script
from common.checkpoint import Checkpoints, Rng
from common.cluster import Actors
from common.cost import Clock
from common.envs import AtariEnvs, atari_settings
from common.errors import Interrupted
from common.gpu import Monitor, choose_device, require_memory, set_numerics
from common.graphs import adam, captured, compiled, pick, set_learning_rate
from common.mirror import Mirror
from common.preemption import StopSignals
from common.run import Run
from common.spot import SpotWatch


@dataclass
class Args(SharedArgs):
    env_id: str = "BreakoutNoFrameskip-v4"
    """gymnasium id of an Atari game"""
    total_timesteps: int = 10_000_000
    """agent steps, all environments together, as many as whole rollouts have; times 4 in frames"""
    learning_rate: float = 2.5e-4
    """of Adam"""
    num_actors: int = 2
    """processes that play"""
    envs_per_actor: int = 8
    """parallel games of each of them"""
    cpus_per_actor: int = 1
    """cores that each of them takes"""
    address: str | None = None
    """host:port of a Ray cluster, or auto; by default one of this machine alone"""
    num_steps: int = 128
    """steps of each game per rollout"""
    anneal_lr: bool = True
    """lower the learning rate linearly to 0 over total-timesteps"""
    gamma: float = 0.99
    """discount"""
    gae_lambda: float = 0.95
    """lambda of generalised advantage estimation"""
    num_minibatches: int = 4
    """minibatches per epoch"""
    update_epochs: int = 4
    """passes over a rollout's batch"""
    norm_adv: bool = True
    """normalise advantages, each minibatch by itself"""
    clip_coef: float = 0.1
    """epsilon of the clipped objective"""
    clip_vloss: bool = True
    """clip the change of the value as well"""
    ent_coef: float = 0.01
    """weight of the entropy bonus"""
    vf_coef: float = 0.5
    """weight of the value loss"""
    max_grad_norm: float = 0.5
    """largest norm of all gradients together"""
    target_kl: float | None = None
    """stop the epochs of an update when the approximate KL divergence exceeds this"""

    FIXED: ClassVar = (*SharedArgs.FIXED, "num_actors", "envs_per_actor", "num_steps")

    @property
    def num_envs(self) -> int:
        return self.num_actors * self.envs_per_actor

    @property
    def batch_size(self) -> int:
        return self.num_envs * self.num_steps

    @property
    def minibatch_size(self) -> int:
        return self.batch_size // self.num_minibatches

    def check(self) -> None:
        super().check()
        self.require_positive("learning_rate", "num_actors", "envs_per_actor", "cpus_per_actor", "num_steps")
        self.require_positive("num_minibatches", "update_epochs", "clip_coef", "max_grad_norm")
        for name in ("ent_coef", "vf_coef"):
            self.require(name, getattr(self, name) >= 0, "must not be negative")
        for name in ("gamma", "gae_lambda"):
            self.require(name, 0 <= getattr(self, name) <= 1, "must be 0 to 1")
        self.require("target_kl", self.target_kl is None or self.target_kl > 0, "must be positive")
        divides = self.batch_size % self.num_minibatches == 0
        self.require("num_minibatches", divides, f"must divide actors x envs x steps = {self.batch_size}")
        one = self.minibatch_size == 1 and (self.norm_adv or self.batch_size == 1)
        self.require("num_minibatches", not one, "leaves one sample a minibatch, which has no variance")
        enough = self.total_timesteps >= self.batch_size
        self.require("total_timesteps", enough, f"less than one rollout of actors x envs x steps = {self.batch_size}")


def layer_init(layer: nn.Module, std: float = np.sqrt(2), bias_const: float = 0.0) -> nn.Module:
    nn.init.orthogonal_(layer.weight, std)
    nn.init.constant_(layer.bias, bias_const)
    return layer


class Agent(nn.Module):
    """The convolutional network of Mnih et al. 2015 with a policy head and a value head.

    Observations are `[B, 84, 84, 4]` uint8, channels last: the layout in which CPU and GPU convolutions are fast.
    """

    def __init__(self, num_actions: int) -> None:
        super().__init__()
        self.network = nn.Sequential(
            layer_init(nn.Conv2d(4, 32, 8, stride=4)),
            nn.ReLU(),
            layer_init(nn.Conv2d(32, 64, 4, stride=2)),
            nn.ReLU(),
            layer_init(nn.Conv2d(64, 64, 3, stride=1)),
            nn.ReLU(),
            nn.Flatten(),
            layer_init(nn.Linear(64 * 7 * 7, 512)),
            nn.ReLU(),
        )
        self.actor = layer_init(nn.Linear(512, num_actions), std=0.01)
        self.critic = layer_init(nn.Linear(512, 1), std=1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`[B, 84, 84, 4]` uint8 -> log-probabilities `[B, A]` and values `[B]`, both float32 under autocast too."""
        hidden = self.network(x.permute(0, 3, 1, 2).float().mul_(1 / 255))
        return F.log_softmax(self.actor(hidden).float(), dim=1), self.critic(hidden).flatten().float()


def compute_gae(
    rewards: torch.Tensor,
    terminations: torch.Tensor,
    truncations: torch.Tensor,
    values: torch.Tensor,
    next_value: torch.Tensor,
    final_values: torch.Tensor,
    gamma: float,
    gae_lambda: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalised advantage estimation (https://arxiv.org/abs/1506.02438, eq. 16).

    A termination stops the bootstrap. A truncation bootstraps from the value of the true last observation. Both at
    once is a termination. Either one ends the sum over time.

    Args:
        rewards: `[T, N]`.
        terminations, truncations: `[T, N]` bool, of the step that earned the reward.
        values: `[T, N]`, of the observation before the step.
        next_value: `[N]`, of the observation after the last step.
        final_values: `[T, N]`, of the true last observation where a step was truncated, unused elsewhere.

    Returns:
        advantages and returns, `[T, N]`.
    """
    next_values = torch.where(truncations, final_values, torch.cat([values[1:], next_value[None]]))
    # where, not a product: what is left out may be infinite
    deltas = rewards + gamma * torch.where(terminations, 0.0, next_values) - values
    decay = gamma * gae_lambda * (~(terminations | truncations)).float()
    lastgaelam = torch.zeros_like(next_value)
    backwards = []
    for delta_t, decay_t in zip(reversed(deltas.unbind()), reversed(decay.unbind()), strict=True):
        lastgaelam = delta_t + decay_t * lastgaelam
        backwards.append(lastgaelam)
    advantages = torch.stack(backwards).flip(0)
    return advantages, advantages + values


LOSSES = ("value_loss", "policy_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac")


def ppo_loss(
    args: Args,
    log_probs: torch.Tensor,
    newvalue: torch.Tensor,
    actions: torch.Tensor,
    logprobs: torch.Tensor,
    advantages: torch.Tensor,
    returns: torch.Tensor,
    values: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of one minibatch (https://arxiv.org/abs/1707.06347, eq. 7 and 9), to be minimised.

    Args:
        log_probs, newvalue: `[B, A]` and `[B]`, of the network as it is now.
        actions, logprobs, advantages, returns, values: `[B]`, of the rollout.

    Returns:
        the loss, and what `LOSSES` names as a detached tensor.
    """
    newlogprob = pick(log_probs, actions)
    logratio = newlogprob - logprobs
    ratio = logratio.exp()  # one in the first minibatch of the first epoch

    if args.norm_adv:
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    pg_loss1 = -advantages * ratio
    pg_loss2 = -advantages * ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
    pg_loss = torch.max(pg_loss1, pg_loss2).mean()

    v_loss = (newvalue - returns) ** 2
    if args.clip_vloss:
        v_clipped = values + (newvalue - values).clamp(-args.clip_coef, args.clip_coef)
        v_loss = torch.max(v_loss, (v_clipped - returns) ** 2)
    v_loss = 0.5 * v_loss.mean()

    entropy_loss = -(log_probs.exp() * log_probs).sum(1).mean()
    loss = pg_loss - args.ent_coef * entropy_loss + args.vf_coef * v_loss
    with torch.no_grad():
        # http://joschu.net/blog/kl-approx.html: estimators k1 and k3
        old_approx_kl, approx_kl = -logratio.mean(), (ratio - 1 - logratio).mean()
        clipfrac = ((ratio - 1).abs() > args.clip_coef).float().mean()
        return loss, torch.stack([v_loss, pg_loss, entropy_loss, old_approx_kl, approx_kl, clipfrac])


def channels_last(frames: torch.Tensor) -> torch.Tensor:
    """`[N, 4, 84, 84]` -> a view `[N, 84, 84, 4]`, both uint8: moving bytes is far cheaper than moving floats."""
    return frames.permute(0, 2, 3, 1)


# what actors send of a rollout, beside the first stacks
BATCH = ("rewards", "terminations", "truncations", "final_values", "actions", "logprobs", "values")
BATCH += ("frames", "ended", "episode_returns", "episode_lengths")


class Actor:
    """Plays its share of each rollout: environments `first` to `first + num_envs - 1` of the run."""

    def __init__(self, env_id: str, num_envs: int, first: int, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        self.envs = AtariEnvs(env_id, num_envs, num_threads, first)
        self.agent = Agent(self.envs.single_action_space.n).to(memory_format=torch.channels_last)

    def reset(self, seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Begin new games. The answer: settings of the environments, and the number of actions."""
        self.envs.reset(seed=seed)
        return self.envs.describe() | {"num_actions": int(self.envs.single_action_space.n)}, self.envs.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """The answer: what the user should know of it."""
        self.envs.load_state_dict(state)
        return self.envs.restore_note, self.envs.state_dict()

    @torch.no_grad()
    def rollout(
        self, weights: dict[str, np.ndarray], noise: np.ndarray
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Play with these weights.

        Args:
            noise: `[T, n]`, uniform between 0 and 1, from which actions are drawn.

        Returns:
            arrays `[T, n]`, but `stacks` `[n, 4, 84, 84]`, the first observations, and `frames` `[T, n, 84, 84]`, the
            newest one after each step, of which the learner makes stacks; and the state of the environments.
        """
        self.agent.load_state_dict({name: torch.from_numpy(x) for name, x in weights.items()})
        num_steps, num_envs = noise.shape
        share = {"stacks": self.envs.obs.copy(), "frames": np.empty((num_steps, num_envs, 84, 84), dtype=np.uint8)}
        share |= {name: np.zeros(noise.shape, dtype=np.int64) for name in ("actions", "episode_lengths")}
        floats = ("logprobs", "values", "final_values", "rewards", "episode_returns")
        share |= {name: np.zeros(noise.shape, dtype=np.float32) for name in floats}
        share |= {name: np.zeros(noise.shape, dtype=bool) for name in ("terminations", "truncations", "ended")}
        for step in range(num_steps):
            log_probs, value = self.agent(channels_last(torch.from_numpy(self.envs.obs)))
            action = draw(log_probs, torch.from_numpy(noise[step]))
            self.envs.send(action.numpy())
            share["actions"][step], share["values"][step] = action, value
            share["logprobs"][step] = log_probs.gather(1, action[:, None]).flatten()
            frames, reward, terminated, truncated, info = self.envs.recv()

            share["frames"][step] = frames[:, -1]
            if truncated.any():
                share["final_values"][step] = self.agent(channels_last(torch.from_numpy(info["final_obs"])))[1]
            share["rewards"][step] = np.sign(reward)
            share["terminations"][step], share["truncations"][step] = terminated, truncated
            if "_episode" in info:
                share["ended"][step] = info["_episode"]
                share["episode_returns"][step] = info["episode"]["r"]
                share["episode_lengths"][step] = info["episode"]["l"]
        return share, self.envs.state_dict()


def draw(log_probs: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Actions from uniform numbers, by the inverse of the cumulative distribution: `[n, A]`, `[n]` -> `[n]`."""
    below = log_probs.exp().cumsum(1) <= noise[:, None]
    return below.sum(1).clamp_(max=log_probs.shape[1] - 1)  # rounding may leave the last sum below one


def stack_frames(obs: torch.Tensor, stacks: torch.Tensor, frames: torch.Tensor, ended: torch.Tensor) -> None:
    """Write the observations of a rollout, whose stacks start with zeros after the end of a game.

    Args:
        obs: `[T + 1, N, 84, 84, 4]`, is written.
        stacks: `[N, 4, 84, 84]`, the first observations.
        frames: `[T, N, 84, 84]`, the newest one after each step.
        ended: `[T, N]` bool, where a step ended a whole game.
    """
    obs[0].copy_(stacks.permute(0, 2, 3, 1))
    for step in range(len(frames)):
        obs[step + 1, ..., :3] = torch.where(ended[step, :, None, None, None], 0, obs[step, ..., 1:])
        obs[step + 1, ..., 3] = frames[step]


def train(args: Args) -> dict[str, Any]:
    """Train one agent and return what stands in summary.json.

    Seeds torch's generators, which the whole process shares: one run at a time is repeatable.

    Raises:
        UsageError: see `Args.check`, `choose_device`, `atari_settings`, `Actors`, `Run` and `Checkpoints`.
        Interrupted, LimitReached: a signal came, or the money is spent, and a checkpoint is saved.
        FloatingPointError: losses or weights became infinite or NaN.
        SaveError: the end could not be saved.
        WorkerError: actors are lost again and again, or one raised something.
    """
    args.check()
    clock = Clock(args, "ppo_atari_ray")
    device = choose_device(args.device, args.gpu_memory_fraction)
    set_numerics(args.torch_deterministic, args.tf32)
    amp = Amp(args.amp, args.amp_dtype, device)
    rollout_bytes = (args.num_steps + 1) * args.num_envs * 84 * 84 * 4
    require_memory(device, rollout_bytes, f"a rollout of {args.num_envs} environments x --num-steps {args.num_steps}")
    atari_settings(args.env_id)  # refused before anything is started
    own = [
        (args.env_id, args.envs_per_actor, i * args.envs_per_actor, args.cpus_per_actor) for i in range(args.num_actors)
    ]
    envs = Actors(args.address, args.cpus_per_actor, Actor, own)
    monitor = Monitor(device)

    rng = Rng(args.seed, device)
    with StopSignals() as signals:  # a cluster may take minutes to have room

        def stop_if_asked() -> None:
            if signals.asked:
                raise Interrupted(f"interrupted by {signals.asked} before anything began")

        settings = envs.call("reset", [(args.seed,)] * args.num_actors, tick=stop_if_asked)[0]
    agent = Agent(settings.pop("num_actions")).to(device, memory_format=torch.channels_last)
    optimizer = adam(agent.parameters(), args.learning_rate, device, args.cuda_graphs, eps=1e-5)

    shape = (args.num_steps, args.num_envs)
    obs = torch.zeros((args.num_steps + 1, args.num_envs, 84, 84, 4), dtype=torch.uint8, device=device)
    actions = torch.zeros(shape, dtype=torch.int64, device=device)
    logprobs, values, advantages, returns = (torch.zeros(shape, device=device) for _ in range(4))
    b_obs = obs[:-1].flatten(0, 1)
    batch = [x.flatten() for x in (actions, logprobs, advantages, returns, values)]  # views, as b_obs

    # --- the loop's bodies, functions of tensors; what they read beside their inputs stays where it is
    def loss_of(mb_inds: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with amp.autocast():
            log_probs, newvalue = agent(b_obs.index_select(0, mb_inds))  # b_obs[mb_inds] copies slower
        return ppo_loss(args, log_probs, newvalue, *(x[mb_inds] for x in batch))

    def update(mb_inds: torch.Tensor) -> torch.Tensor:
        loss, stats = loss_of(mb_inds)
        if device.type == "cpu":  # where a large minibatch takes seconds
            checkpoints.stop_if_asked()
        optimizer.zero_grad()
        amp.step(loss, optimizer, args.max_grad_norm)
        return stats

    def gae(*outcome: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return compute_gae(*outcome, args.gamma, args.gae_lambda)

    config = dict(args=vars(args), env=settings, device=str(device), amp_dtype=str(amp.dtype))
    run_name = args.run_name or default_run_name(args, "ppo_atari_ray")
    total_timesteps = args.total_timesteps // args.batch_size * args.batch_size  # whole rollouts
    with (
        envs,
        StopSignals() as signals,
        Run(
            args, clock, Mirror(args.mirror, run_name, signals), "ppo_atari_ray", run_name, total_timesteps, config
        ) as run,
        SpotWatch(args.spot_watch, signals, run.terminal.line),
    ):
        if run.complete:
            return run.summary()
        progress = run.progress
        state = dict(progress=progress, agent=agent, optimizer=optimizer, amp=amp, envs=envs, rng=rng)
        checkpoints = Checkpoints(run, state | dict(clock=run.clock, events=run.events), signals)
        run.terminal.line(amp.note)
        if args.compile:
            loss_of = compiled(run, loss_of, torch.arange(args.minibatch_size, device=device))
        update, gae = captured(args.cuda_graphs, device, run.terminal.line, update, gae)
        while progress.global_step < total_timesteps and not run.reached(args.stop_at_return):
            checkpoints.boundary()
            run.lap("checkpoint")
            frac = 1.0 - progress.global_step / args.total_timesteps if args.anneal_lr else 1.0
            set_learning_rate(optimizer, frac * args.learning_rate)

            # --- rollout
            run.set_phase("rollout")
            noise = torch.rand(shape).split(args.envs_per_actor, dim=1)
            weights = envs.put({name: x.cpu().numpy() for name, x in agent.state_dict().items()})
            shares = envs.call("rollout", [(weights, x.numpy()) for x in noise], run.terminal.line, run.tick, run.drain)
            run.lap("environment")

            # --- from the actors' shares to one batch
            stored = {name: torch.from_numpy(np.concatenate([x[name] for x in shares], axis=1)) for name in BATCH}
            stacks = torch.from_numpy(np.concatenate([x["stacks"] for x in shares]))
            ended, frames = stored["ended"].to(device), stored["frames"].to(device)
            stack_frames(obs, stacks.to(device), frames, ended)
            for step in range(args.num_steps):
                progress.global_step += args.num_envs
                if stored["ended"][step].any():
                    lengths, episodic = stored["episode_lengths"][step].numpy(), stored["episode_returns"][step].numpy()
                    run.log_episodes(
                        {"_episode": stored["ended"][step].numpy(), "episode": {"r": episodic, "l": lengths}}
                    )
            *outcome, final_values = (stored[name].to(device) for name in BATCH[:4])
            for x, name in ((actions, "actions"), (logprobs, "logprobs"), (values, "values")):
                x.copy_(stored[name])
            run.lap("transfer")

            # --- advantages
            run.set_phase("update")
            with torch.no_grad(), amp.autocast():
                next_value = agent(obs[-1])[1]
            advantages[:], returns[:] = gae(*outcome, values, next_value, final_values)

            # --- update
            losses = torch.zeros(len(LOSSES), device=device)  # sums over minibatches, read once
            num_losses = 0
            for _ in range(args.update_epochs):
                for mb_inds in torch.randperm(args.batch_size, device=device).split(args.minibatch_size):
                    checkpoints.stop_if_asked()
                    stats = update(mb_inds)
                    losses += stats
                    num_losses += 1
                    run.tick()
                if args.target_kl is not None and stats[LOSSES.index("approx_kl")] > args.target_kl:
                    break
            progress.updates += num_losses

            # --- logging: read when the next step is on its way, or before a checkpoint
            means = {f"losses/{name}": x for name, x in zip(LOSSES, losses / num_losses, strict=True)}
            others = {"losses/explained_variance": 1 - (returns - values).var() / returns.var()}
            others["charts/learning_rate"] = frac * args.learning_rate
            run.lap("learning")
            run.log_later(means, others, monitor.scalars)

        checkpoints.finish()
        run.save("agent.pt", agent.state_dict())
        return run.finish()


if __name__ == "__main__":
    run_script(Args, train, __doc__)
