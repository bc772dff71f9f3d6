"""Proximal policy optimisation on Atari games.

Schulman et al. 2017, https://arxiv.org/abs/1707.06347: the clipped objective (eq. 7) with a value loss and an entropy
bonus (eq. 9), advantages by GAE (eq. 11, 12; Schulman et al. 2016, https://arxiv.org/abs/1506.02438). Network and
preprocessing of Mnih et al. 2015. Flags, defaults and TensorBoard tags are those of CleanRL's ppo_atari.py.

Stopped anywhere, any number of times, the same command ends with the weights of a run that was never stopped: a
checkpoint holds the state of everything in `state`, as it was at the beginning of an iteration.

Deviations from CleanRL: a truncated game bootstraps from the value of its true last observation; FIRE is not pressed
for the agent after a lost life; stacks start with zeros after a reset; logged losses are means over all minibatches.
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
from common.cost import Clock
from common.envs import AtariEnvs
from common.gpu import Monitor, choose_device, require_memory, set_numerics
from common.graphs import adam, captured, compiled, pick, set_learning_rate
from common.mirror import Mirror
from common.preemption import StopSignals
from common.run import Run
from common.spot import SpotWatch
from common.transfer import Upload, upload


@dataclass
class Args(SharedArgs):
    env_id: str = "BreakoutNoFrameskip-v4"
    """gymnasium id of an Atari game"""
    total_timesteps: int = 10_000_000
    """agent steps, all environments together, as many as whole rollouts have; times 4 in frames"""
    learning_rate: float = 2.5e-4
    """of Adam"""
    num_envs: int = 8
    """parallel games"""
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


def sample(log_probs: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Actions by an exponential race, which i wins with probability p_i: `[B, A]`, `[B, A]` -> `[B]`. The noise is an
    input, so that no two replays of a captured graph draw the same.
    """
    return (log_probs.exp() / noise).argmax(1)


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


def train(args: Args) -> dict[str, Any]:
    """Train one agent and return what stands in summary.json.

    Seeds torch's generators, which the whole process shares: one run at a time is repeatable.

    Raises:
        UsageError: see `Args.check`, `choose_device`, `atari_settings`, `Run` and `Checkpoints`.
        Interrupted, LimitReached: a signal came, or the money is spent, and a checkpoint is saved.
        FloatingPointError: losses or weights became infinite or NaN.
        SaveError: the end could not be saved.
    """
    args.check()
    clock = Clock(args, "ppo_atari")
    device = choose_device(args.device, args.gpu_memory_fraction)
    set_numerics(args.torch_deterministic, args.tf32)
    amp = Amp(args.amp, args.amp_dtype, device)
    rollout_bytes = (args.num_steps + 1) * args.num_envs * 84 * 84 * 4
    require_memory(device, rollout_bytes, f"a rollout of --num-envs {args.num_envs} x --num-steps {args.num_steps}")
    require_memory(torch.device("cpu"), args.num_envs * 2 * 2**20, f"--num-envs {args.num_envs}: as many emulators")
    envs = AtariEnvs(args.env_id, args.num_envs)
    monitor = Monitor(device)

    rng = Rng(args.seed, device)
    envs.reset(seed=args.seed)
    num_actions = int(envs.single_action_space.n)
    agent = Agent(num_actions).to(device, memory_format=torch.channels_last)
    optimizer = adam(agent.parameters(), args.learning_rate, device, args.cuda_graphs, eps=1e-5)

    # what the network reads or writes at each step stays on its device, what the emulators report on the CPU
    shape = (args.num_steps, args.num_envs)
    upload_frames = Upload(envs.obs.shape, torch.uint8, device)
    obs = torch.zeros((args.num_steps + 1, args.num_envs, 84, 84, 4), dtype=torch.uint8, device=device)
    actions = torch.zeros(shape, dtype=torch.int64, device=device)
    logprobs, values, final_values, advantages, returns = (torch.zeros(shape, device=device) for _ in range(5))
    rewards, terminations, truncations = np.zeros(shape, np.float32), np.zeros(shape, bool), np.zeros(shape, bool)
    action_on_cpu = torch.zeros(args.num_envs, dtype=torch.int64, pin_memory=device.type == "cuda")
    b_obs = obs[:-1].flatten(0, 1)
    batch = [x.flatten() for x in (actions, logprobs, advantages, returns, values)]  # views, as b_obs

    # --- the loop's bodies, functions of tensors; what they read beside their inputs stays where it is
    @torch.no_grad()
    def policy(next_obs: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with amp.autocast():
            log_probs, value = agent(next_obs)
        action = sample(log_probs, noise)
        return action, pick(log_probs, action), value

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

    config = dict(args=vars(args), env=envs.describe(), device=str(device), amp_dtype=str(amp.dtype))
    run_name = args.run_name or default_run_name(args, "ppo_atari")
    total_timesteps = args.total_timesteps // args.batch_size * args.batch_size  # whole rollouts
    with (
        StopSignals() as signals,
        Run(args, clock, Mirror(args.mirror, run_name, signals), "ppo_atari", run_name, total_timesteps, config) as run,
        SpotWatch(args.spot_watch, signals, run.terminal.line),
    ):
        if run.complete:
            return run.summary()
        progress = run.progress
        state = dict(progress=progress, agent=agent, optimizer=optimizer, amp=amp, envs=envs, rng=rng)
        checkpoints = Checkpoints(run, state | dict(clock=run.clock, events=run.events), signals)
        run.terminal.line(amp.note)
        if args.compile:
            policy = compiled(run, policy, obs[0], torch.ones(args.num_envs, num_actions, device=device))
            loss_of = compiled(run, loss_of, torch.arange(args.minibatch_size, device=device))
        policy, update, gae = captured(args.cuda_graphs, device, run.terminal.line, policy, update, gae)
        obs[-1].copy_(channels_last(upload_frames(envs.obs)))
        while progress.global_step < total_timesteps and not run.reached(args.stop_at_return):
            checkpoints.boundary()
            run.lap("checkpoint")
            frac = 1.0 - progress.global_step / args.total_timesteps if args.anneal_lr else 1.0
            set_learning_rate(optimizer, frac * args.learning_rate)

            # --- rollout
            run.set_phase("rollout")
            obs[0].copy_(obs[-1])
            noise = torch.empty((*shape, num_actions), device=device).exponential_()  # of all steps at once
            for step in range(args.num_steps):
                checkpoints.stop_if_asked()
                action, logprob, value = policy(obs[step], noise[step])
                action_on_cpu.copy_(action)  # on a GPU the only thing that is waited for
                run.lap("inference")

                envs.send(action_on_cpu.numpy())
                # while the emulators work, and nothing that would take a second core from them
                run.drain()
                actions[step], logprobs[step], values[step] = action, logprob, value
                frames, reward, terminated, truncated, info = envs.recv()

                obs[step + 1].copy_(channels_last(upload_frames(frames)))
                if truncated.any():
                    with torch.no_grad(), amp.autocast():
                        final_values[step] = agent(channels_last(upload(info["final_obs"], device)))[1]
                rewards[step], terminations[step], truncations[step] = np.sign(reward), terminated, truncated
                progress.global_step += args.num_envs
                run.log_episodes(info)
                run.tick()
                run.lap("environment")

            # --- advantages
            run.set_phase("update")
            with torch.no_grad(), amp.autocast():
                next_value = agent(obs[-1])[1]
            outcome = (upload(x, device) for x in (rewards, terminations, truncations))
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
        envs.close()
        run.save("agent.pt", agent.state_dict())
        return run.finish()


if __name__ == "__main__":
    run_script(Args, train, __doc__)
