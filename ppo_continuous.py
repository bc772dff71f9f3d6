"""Proximal policy optimisation on continuous control.

Schulman et al. 2017, https://arxiv.org/abs/1707.06347: the clipped objective (eq. 7) with a value loss and an entropy
bonus (eq. 9), advantages by GAE (eq. 11, 12; Schulman et al. 2016, https://arxiv.org/abs/1506.02438). A Gaussian policy
with a standard deviation that is the same in every state. Flags, defaults and TensorBoard tags are those of CleanRL's
ppo_continuous_action.py.

Stopped anywhere, any number of times, the same command ends with the weights of a run that was never stopped: a
checkpoint holds the state of everything in `state`, as it was at the beginning of an iteration.

Deviations from CleanRL: a truncated episode bootstraps from the value of its true last observation; the discounted
return behind the reward's scale begins anew with each episode and counts its last reward; running statistics begin
empty, are shared by all environments and count last observations too; logged losses are means over all minibatches.
"""

import common.preemption  # isort: skip  (first: signals count from here on)
import common.cpu  # noqa: F401  isort: skip  (has to come before torch)

import math
from contextlib import closing
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn as nn

from common.amp import Amp
from common.args import SharedArgs, default_run_name, run_script
from common.checkpoint import Checkpoints, Rng
from common.control import ControlEnvs
from common.cost import Clock
from common.gpu import Monitor, choose_device, require_memory, set_numerics
from common.graphs import adam, captured, compiled, set_learning_rate
from common.mirror import Mirror
from common.preemption import StopSignals
from common.run import Run
from common.running import Normalizer
from common.spot import SpotWatch
from common.tiny import clip, flatten, in_numpy
from common.transfer import upload


@dataclass
class Args(SharedArgs):
    env_id: str = "HalfCheetah-v5"
    """gymnasium id of an environment with flat continuous observations and actions"""
    total_timesteps: int = 1_000_000
    """agent steps, all environments together, as many as whole rollouts have"""
    learning_rate: float = 3e-4
    """of Adam"""
    num_envs: int = 1
    """parallel environments"""
    async_envs: bool = False
    """a process for each environment, for heavy simulators"""
    num_steps: int = 2048
    """steps of each environment per rollout"""
    anneal_lr: bool = True
    """lower the learning rate linearly to 0 over total-timesteps"""
    gamma: float = 0.99
    """discount"""
    gae_lambda: float = 0.95
    """lambda of generalised advantage estimation"""
    num_minibatches: int = 32
    """minibatches per epoch"""
    update_epochs: int = 10
    """passes over a rollout's batch"""
    norm_adv: bool = True
    """normalise advantages, each minibatch by itself"""
    clip_coef: float = 0.2
    """epsilon of the clipped objective"""
    clip_vloss: bool = True
    """clip the change of the value as well"""
    ent_coef: float = 0.0
    """weight of the entropy bonus"""
    vf_coef: float = 0.5
    """weight of the value loss"""
    max_grad_norm: float = 0.5
    """largest norm of all gradients together"""
    target_kl: float | None = None
    """stop the epochs of an update when the approximate KL divergence exceeds this"""

    FIXED: ClassVar = (*SharedArgs.FIXED, "num_envs", "num_steps")

    @property
    def batch_size(self) -> int:
        return self.num_envs * self.num_steps

    @property
    def minibatch_size(self) -> int:
        return self.batch_size // self.num_minibatches

    def check(self) -> None:
        super().check()
        self.require_positive("learning_rate", "num_envs", "num_steps", "num_minibatches", "update_epochs")
        self.require_positive("clip_coef", "max_grad_norm")
        for name in ("ent_coef", "vf_coef"):
            self.require(name, getattr(self, name) >= 0, "must not be negative")
        for name in ("gamma", "gae_lambda"):
            self.require(name, 0 <= getattr(self, name) <= 1, "must be 0 to 1")
        self.require("target_kl", self.target_kl is None or self.target_kl > 0, "must be positive")
        divides = self.batch_size % self.num_minibatches == 0
        self.require("num_minibatches", divides, f"must divide num-envs x num-steps = {self.batch_size}")
        one = self.minibatch_size == 1 and (self.norm_adv or self.batch_size == 1)
        self.require("num_minibatches", not one, "leaves one sample a minibatch, which has no variance")
        enough = self.total_timesteps >= self.batch_size
        self.require("total_timesteps", enough, f"less than one rollout of num-envs x num-steps = {self.batch_size}")


def layer_init(layer: nn.Module, std: float = np.sqrt(2), bias_const: float = 0.0) -> nn.Module:
    nn.init.orthogonal_(layer.weight, std)
    nn.init.constant_(layer.bias, bias_const)
    return layer


class Agent(nn.Module):
    """Two networks of two hidden layers: the mean of a Gaussian policy, and the value."""

    def __init__(self, num_observations: int, num_actions: int) -> None:
        super().__init__()
        self.critic = mlp(num_observations, 1, std=1.0)
        self.actor_mean = mlp(num_observations, num_actions, std=0.01)
        self.actor_logstd = nn.Parameter(torch.zeros(num_actions))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`[B, D]` normalised observations -> means `[B, A]` and values `[B]`, both float32 under autocast too."""
        return self.actor_mean(x).float(), self.critic(x).flatten().float()


def mlp(num_inputs: int, num_outputs: int, std: float) -> nn.Sequential:
    return nn.Sequential(
        layer_init(nn.Linear(num_inputs, 64)),
        nn.Tanh(),
        layer_init(nn.Linear(64, 64)),
        nn.Tanh(),
        layer_init(nn.Linear(64, num_outputs), std=std),
    )


def log_prob(actions: torch.Tensor, mean: torch.Tensor, logstd: torch.Tensor) -> torch.Tensor:
    """Of independent Gaussians: actions and mean `[B, A]`, logstd `[A]` -> `[B]`."""
    squares = ((actions - mean) / logstd.exp()).square().sum(1)
    return -0.5 * squares - (logstd.sum() + 0.5 * len(logstd) * math.log(2 * math.pi))


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
APPROX_KL = LOSSES.index("approx_kl")


def ppo_loss(
    args: Args,
    mean: torch.Tensor,
    logstd: torch.Tensor,
    newvalue: torch.Tensor,
    actions: torch.Tensor,
    logprobs: torch.Tensor,
    advantages: torch.Tensor,
    returns: torch.Tensor,
    values: torch.Tensor,
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """The loss of one minibatch (https://arxiv.org/abs/1707.06347, eq. 7 and 9), to be minimised.

    Args:
        mean, logstd, newvalue: `[B, A]`, `[A]` and `[B]`, of the networks as they are now.
        actions, logprobs, advantages, returns, values: `[B, A]` and `[B]`, of the rollout.

    Returns:
        the loss, and what `loss_stats` takes, detached.
    """
    logratio = log_prob(actions, mean, logstd) - logprobs
    ratio = logratio.exp()  # one in the first minibatch of the first epoch

    if args.norm_adv:
        adv_std, adv_mean = torch.std_mean(advantages)
        advantages = (advantages - adv_mean) / (adv_std + 1e-8)
    pg_loss1 = -advantages * ratio
    pg_loss2 = -advantages * ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
    pg_loss = torch.max(pg_loss1, pg_loss2).mean()

    v_loss = (newvalue - returns).square()
    if args.clip_vloss:
        v_clipped = newvalue.clamp(values - args.clip_coef, values + args.clip_coef)
        v_loss = torch.max(v_loss, (v_clipped - returns).square())
    v_loss = 0.5 * v_loss.mean()

    entropy_loss = (logstd + 0.5 * math.log(2 * math.pi * math.e)).sum()  # the same in every state
    loss = pg_loss + args.vf_coef * v_loss
    if args.ent_coef:
        loss = loss - args.ent_coef * entropy_loss
    return loss, tuple(x.detach() for x in (v_loss, pg_loss, entropy_loss, logratio))


def loss_stats(
    args: Args, v_loss: torch.Tensor, pg_loss: torch.Tensor, entropy_loss: torch.Tensor, logratio: torch.Tensor
) -> torch.Tensor:
    """What `LOSSES` names, as means over minibatches: `[M]`, `[M]`, `[M]` and `[M, B]` -> `[6]`. One minibatch may come
    without its `M`.
    """
    # http://joschu.net/blog/kl-approx.html: estimators k1 and k3
    ratio = logratio.exp()
    old_approx_kl, approx_kl = -logratio, ratio - 1 - logratio
    clipfrac = ((ratio - 1).abs() > args.clip_coef).float()
    return torch.stack([x.mean() for x in (v_loss, pg_loss, entropy_loss, old_approx_kl, approx_kl, clipfrac)])


def train(args: Args) -> dict[str, Any]:
    """Train one agent and return what stands in summary.json.

    Seeds torch's generators, which the whole process shares: one run at a time is repeatable.

    Raises:
        UsageError: see `Args.check`, `choose_device`, `ControlEnvs`, `Run` and `Checkpoints`.
        Interrupted, LimitReached: a signal came, or the money is spent, and a checkpoint is saved.
        FloatingPointError: losses or weights became infinite or NaN.
        SaveError: the end could not be saved.
        WorkerError: with `--async-envs`, a process of theirs has died.
    """
    args.check()
    clock = Clock(args, "ppo_continuous")
    device = choose_device(args.device, args.gpu_memory_fraction)
    set_numerics(args.torch_deterministic, args.tf32)
    torch.set_num_threads(1)  # networks this small only get slower with more
    amp = Amp(args.amp, args.amp_dtype, device)
    simulator_bytes = args.num_envs * (32 * 2**20 if args.async_envs else 2**16)
    require_memory(torch.device("cpu"), simulator_bytes, f"--num-envs {args.num_envs}: as many simulators")
    envs = ControlEnvs(args.env_id, args.num_envs, args.async_envs)
    num_observations, num_actions = envs.single_observation_space.shape[0], envs.single_action_space.shape[0]
    low, high = envs.single_action_space.low, envs.single_action_space.high
    rollout_bytes = (args.num_steps + 1) * args.num_envs * (2 * num_observations + 2 * num_actions) * 4
    require_memory(device, rollout_bytes, f"a rollout of --num-envs {args.num_envs} x --num-steps {args.num_steps}")
    monitor = Monitor(device)

    rng = Rng(args.seed, device)
    envs.reset(seed=args.seed)
    agent = Agent(num_observations, num_actions).to(device)
    weights = flatten(agent)
    optimizer = adam([weights], args.learning_rate, device, args.cuda_graphs, eps=1e-5)
    normalizer = Normalizer(args.num_envs, num_observations, args.gamma)
    normalizer.observe(envs.obs)

    # a rollout stays with the environments, on the CPU
    shape = (args.num_steps, args.num_envs)
    obs = np.zeros((args.num_steps + 1, args.num_envs, num_observations), dtype=np.float32)
    final_obs = np.zeros((*shape, num_observations), dtype=np.float32)
    actions = np.zeros((*shape, num_actions), dtype=np.float32)
    rewards, terminations, truncations = np.zeros(shape, np.float32), np.zeros(shape, bool), np.zeros(shape, bool)

    # --- the loop's bodies, functions of tensors; what they read beside their inputs stays where it is
    def loss_of(mb_obs: torch.Tensor, *stored: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        with amp.autocast():
            mean, newvalue = agent(mb_obs)
        return ppo_loss(args, mean, agent.actor_logstd, newvalue, *stored)

    def update(*minibatch: torch.Tensor) -> tuple[torch.Tensor, ...]:
        loss, mb_stats = loss_of(*minibatch)
        weights.grad.zero_()
        amp.step(loss, optimizer, args.max_grad_norm)
        return mb_stats

    def gae(*outcome: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return compute_gae(*outcome, args.gamma, args.gae_lambda)

    config = dict(args=vars(args), env=envs.describe(), device=str(device), amp_dtype=str(amp.dtype))
    run_name = args.run_name or default_run_name(args, "ppo_continuous")
    total_timesteps = args.total_timesteps // args.batch_size * args.batch_size  # whole rollouts
    with (
        StopSignals() as signals,
        Run(
            args, clock, Mirror(args.mirror, run_name, signals), "ppo_continuous", run_name, total_timesteps, config
        ) as run,
        SpotWatch(args.spot_watch, signals, run.terminal.line),
        closing(envs),
    ):
        if run.complete:
            return run.summary()
        progress = run.progress
        owners = dict(agent=agent, optimizer=optimizer, amp=amp, normalizer=normalizer, envs=envs, rng=rng)
        state = dict(progress=progress, **owners)
        checkpoints = Checkpoints(run, state | dict(clock=run.clock, events=run.events), signals)
        run.terminal.line(amp.note)
        run.terminal.line(envs.note)
        if args.compile:
            sizes = ((num_observations,), (num_actions,), (), (), (), ())
            example = (torch.ones(args.minibatch_size, *size, device=device) for size in sizes)
            loss_of = compiled(run, loss_of, *example)
        update, gae = captured(args.cuda_graphs, device, run.terminal.line, update, gae)
        while progress.global_step < total_timesteps and not run.reached(args.stop_at_return):
            checkpoints.boundary()
            run.lap("checkpoint")
            frac = 1.0 - progress.global_step / args.total_timesteps if args.anneal_lr else 1.0
            set_learning_rate(optimizer, frac * args.learning_rate)

            # --- rollout
            run.set_phase("rollout")
            std = agent.actor_logstd.detach().exp()
            noise = (std * torch.randn((*shape, num_actions), device=device)).cpu().numpy()  # of all steps at once
            actor_mean = in_numpy(agent.actor_mean)
            run.drain()  # a GPU has done all of it by now
            obs[0] = normalizer.observations(envs.obs)
            for step in range(args.num_steps):
                checkpoints.stop_if_asked()
                actions[step] = actor_mean(obs[step]) + noise[step]
                run.lap("inference")

                next_obs, reward, terminated, truncated, info = envs.step(clip(actions[step], low, high))
                ended = terminated | truncated
                if ended.any():
                    normalizer.observe(info["final_obs"][ended])
                    final_obs[step] = normalizer.observations(info["final_obs"])
                normalizer.observe(next_obs)
                obs[step + 1] = normalizer.observations(next_obs)
                rewards[step] = normalizer.rewards(reward, ended)
                terminations[step], truncations[step] = terminated, truncated
                progress.global_step += args.num_envs
                run.log_episodes(info)
                run.tick()
                run.lap("environment")

            # --- advantages: the weights have not moved since, so values and log-probabilities come in one batch
            run.set_phase("update")
            stored = (obs, actions, final_obs, rewards, terminations, truncations)
            t_obs, t_actions, t_final_obs, *outcome = (upload(x, device) for x in stored)
            with torch.no_grad(), amp.autocast():
                means, values = agent(t_obs.flatten(0, 1))
                final_values = agent.critic(t_final_obs).squeeze(2).float()
            b_obs, b_actions = t_obs[:-1].flatten(0, 1), t_actions.flatten(0, 1)
            b_logprobs = log_prob(b_actions, means[: args.batch_size], agent.actor_logstd.detach())
            values, next_value = values[: args.batch_size].view(shape), values[args.batch_size :]
            advantages, returns = gae(*outcome, values, next_value, final_values)
            b_values, b_returns = values.flatten(), returns.flatten()
            batch = (b_obs, b_actions, b_logprobs, advantages.flatten(), b_returns, b_values)

            # --- update
            stats = []  # of each minibatch, read once
            for _ in range(args.update_epochs):
                mb_inds = torch.randperm(args.batch_size, device=device)
                shuffled = (x[mb_inds].split(args.minibatch_size) for x in batch)
                for minibatch in zip(*shuffled, strict=True):
                    checkpoints.stop_if_asked()
                    mb_stats = update(*minibatch)
                    stats.append(mb_stats)
                    run.tick()
                if args.target_kl is not None and loss_stats(args, *mb_stats)[APPROX_KL] > args.target_kl:
                    break
            progress.updates += len(stats)

            # --- logging: read when the next noise is there, or before a checkpoint
            losses = loss_stats(args, *(torch.stack(x) for x in zip(*stats, strict=True)))
            means = {f"losses/{name}": x for name, x in zip(LOSSES, losses, strict=True)}
            others = {"losses/explained_variance": 1 - (b_returns - b_values).var() / b_returns.var()}
            others["charts/learning_rate"] = frac * args.learning_rate
            run.lap("learning")
            run.log_later(means, others, monitor.scalars)

        checkpoints.finish()
        run.save("agent.pt", agent.state_dict() | {f"normalizer.{k}": x for k, x in normalizer.state_dict().items()})
        return run.finish()


if __name__ == "__main__":
    run_script(Args, train, __doc__)
