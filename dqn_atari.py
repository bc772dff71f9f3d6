"""Deep Q-learning on Atari games.

Mnih et al. 2015, https://doi.org/10.1038/nature14236 (algorithm 1): Q-learning from a replay memory with a target
network. As options double Q-learning (van Hasselt et al. 2016, https://arxiv.org/abs/1509.06461), n-step returns
(Hessel et al. 2018, https://arxiv.org/abs/1710.02298) and proportional prioritisation (Schaul et al. 2016,
https://arxiv.org/abs/1511.05952). Flags, defaults and TensorBoard tags are those of CleanRL's dqn_atari.py.

Stopped anywhere, any number of times, the same command ends with the weights of a run that was never stopped: a
checkpoint holds the state of everything in `state`, as it was between two steps, and counts on the replay memory's
files.

Deviations from CleanRL: 8 games at a time, with as many updates an agent step; a truncated game bootstraps from its
true last observation; FIRE is not pressed for the agent after a lost life; stacks start with zeros after a reset;
logged losses are means over all updates.
"""

import common.preemption  # isort: skip  (first: signals count from here on)
import common.cpu  # noqa: F401  isort: skip  (has to come before torch)

from contextlib import closing
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
import torch.nn as nn

from common.amp import Amp
from common.args import SharedArgs, default_run_name, run_script
from common.checkpoint import Checkpoints, Rng
from common.cost import Clock
from common.envs import AtariEnvs
from common.gpu import Monitor, choose_device, free_memory, require_memory, set_numerics
from common.graphs import adam, captured, compiled, pick
from common.mirror import Mirror
from common.preemption import StopSignals
from common.replay import Storage, SumTree, bytes_needed, choose_buffer_device
from common.run import Run
from common.running import Mean
from common.spot import SpotWatch
from common.transfer import Upload, upload


@dataclass
class Args(SharedArgs):
    env_id: str = "BreakoutNoFrameskip-v4"
    """gymnasium id of an Atari game"""
    total_timesteps: int = 10_000_000
    """agent steps, all environments together, as many as are whole; times 4 in frames"""
    learning_rate: float = 1e-4
    """of Adam"""
    num_envs: int = 8
    """parallel games; updates an agent step stay as many"""
    buffer_size: int = 1_000_000
    """transitions in the replay memory, 7 kB each, all environments together"""
    buffer_device: Literal["auto", "cpu", "cuda"] = "auto"
    """where frames are read; auto: on the GPU if they fit"""
    save_buffer: bool = True
    """keep the replay memory in the run's folder; without, it is filled again after an interruption"""
    gamma: float = 0.99
    """discount"""
    tau: float = 1.0
    """share of the network in a new target network"""
    target_network_frequency: int = 1000
    """agent steps between two new target networks"""
    batch_size: int = 32
    """transitions an update"""
    start_e: float = 1.0
    """epsilon at the beginning: the share of random actions"""
    end_e: float = 0.01
    """epsilon at the end"""
    exploration_fraction: float = 0.10
    """share of total-timesteps over which epsilon falls"""
    learning_starts: int = 80_000
    """agent steps before the first update"""
    train_frequency: int = 4
    """agent steps an update"""
    double_q: bool = False
    """the network chooses the next action, the target network values it"""
    n_step: int = 1
    """rewards a return sums up before it bootstraps"""
    prioritized: bool = False
    """draw transitions in proportion to their last error"""
    priority_alpha: float = 0.6
    """exponent of a priority; 0: all are alike"""
    priority_beta: float = 0.4
    """exponent of the correction for it at the beginning; 1 at the end"""

    FIXED: ClassVar = (*SharedArgs.FIXED, "num_envs", "buffer_size", "n_step", "prioritized", "priority_alpha")

    def check(self) -> None:
        super().check()
        self.require_positive("learning_rate", "num_envs", "buffer_size", "target_network_frequency", "batch_size")
        self.require_positive("train_frequency", "n_step")
        for name in ("gamma", "start_e", "end_e", "exploration_fraction", "priority_alpha", "priority_beta"):
            self.require(name, 0 <= getattr(self, name) <= 1, "must be 0 to 1")
        plain = self.prioritized or self.priority_alpha == type(self).priority_alpha
        self.require("priority_alpha", plain, "means nothing without --prioritized")
        self.require("tau", 0 < self.tau <= 1, "must be above 0, at most 1")
        self.require("learning_starts", self.learning_starts >= 0, "must not be negative")
        steps = self.buffer_size // self.num_envs
        self.require("buffer_size", steps >= self.n_step, f"must hold --n-step {self.n_step} of each environment")
        # the steps of all environments in which learning starts, and those that are made
        first = max(self.learning_starts // self.num_envs + 1, self.n_step) * self.num_envs
        last = self.total_timesteps // self.num_envs * self.num_envs
        updates = multiples(self.train_frequency, max(first - self.num_envs, self.learning_starts), last)
        self.require("total_timesteps", updates > 0, f"no update after --learning-starts {self.learning_starts}")


class QNetwork(nn.Module):
    """The convolutional network of Mnih et al. 2015.

    Observations are `[B, 84, 84, 4]` uint8, channels last: the layout in which CPU and GPU convolutions are fast.
    """

    def __init__(self, num_actions: int) -> None:
        super().__init__()
        self.network = nn.Sequential(
            nn.Conv2d(4, 32, 8, stride=4),
            nn.ReLU(),
            nn.Conv2d(32, 64, 4, stride=2),
            nn.ReLU(),
            nn.Conv2d(64, 64, 3, stride=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(64 * 7 * 7, 512),
            nn.ReLU(),
            nn.Linear(512, num_actions),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[B, 84, 84, 4]` uint8 -> action values `[B, A]`, float32 under autocast too."""
        return self.network(x.permute(0, 3, 1, 2).float().mul_(1 / 255)).float()


def linear_schedule(start: float, end: float, duration: float, step: int) -> float:
    """From `start` at step 0 to `end` at `duration` and later."""
    return end if step >= duration else start + (end - start) * step / duration


def channels_last(frames: torch.Tensor) -> torch.Tensor:
    """`[B, 4, 84, 84]` -> `[B, 84, 84, 4]`, both uint8: moving bytes is far cheaper than moving floats."""
    return frames.permute(0, 2, 3, 1).contiguous()


class Batch(NamedTuple):
    """Transitions, `[B]` unless said otherwise."""

    obs: torch.Tensor  # [B, 84, 84, 4] uint8
    actions: torch.Tensor
    returns: torch.Tensor  # R^n, the discounted sum of n rewards, fewer where the game ended
    discounts: torch.Tensor  # gamma^n, 0 where it terminated
    next_obs: torch.Tensor  # [B, 84, 84, 4] uint8


def stacks(memory: Storage, steps: np.ndarray, envs: np.ndarray, ages: np.ndarray) -> torch.Tensor:
    """The last 4 frames up to a step, `[B]` steps -> `[B, 4, 84, 84]` uint8; zeros before the start of the game.

    Args:
        ages: how many frames before the step are of the same game, 3 where there are more.
    """
    back = np.arange(4)[::-1]
    frames = memory.frames_of(steps[:, None] - back, envs[:, None])
    unused = back > ages[:, None]  # [B, 4]
    if unused.any():
        frames.flatten(0, 1).index_fill_(0, upload(np.flatnonzero(unused), frames.device), 0)
    return frames


def gather(memory: Storage, steps: np.ndarray, envs: np.ndarray, gamma: float, n_step: int) -> Batch:
    """The transitions that begin at `[B]` steps of `[B]` environments.

    A termination ends the return, and nothing follows. A truncation ends it, and the value of the game's true last
    observation follows. A lost life is a termination, but the stack of frames goes on.
    """
    returns, discounts = np.zeros(len(steps), dtype=np.float32), np.ones(len(steps), dtype=np.float32)
    last, going_on = steps, np.ones(len(steps), dtype=bool)
    for k in range(n_step):
        slots = (steps + k) % memory.length
        returns += np.where(going_on, gamma**k * memory.rewards[slots, envs], 0).astype(np.float32)
        discounts = np.where(going_on, gamma ** (k + 1), discounts).astype(np.float32)
        last = np.where(going_on, steps + k, last)
        terminated = going_on & memory.terminations[slots, envs]
        discounts[terminated] = 0
        going_on &= ~(terminated | memory.truncations[slots, envs])

    obs = stacks(memory, steps, envs, memory.ages[steps % memory.length, envs])
    ages = np.minimum(memory.ages[last % memory.length, envs] + 1, 3)
    next_obs = stacks(memory, last + 1, envs, ages)
    for row in np.flatnonzero(memory.truncations[last % memory.length, envs]):
        # what follows in the memory is the next game
        next_obs[row, -1] = upload(memory.finals[last[row], envs[row]], next_obs.device)
    actions = memory.actions[steps % memory.length, envs].astype(np.int64)
    outcome = (upload(x, obs.device) for x in (actions, returns, discounts))
    return Batch(channels_last(obs), *outcome, channels_last(next_obs))


def draw(memory: Storage, batch_size: int, n_step: int) -> tuple[np.ndarray, np.ndarray]:
    """Steps and environments of transitions, `[B]`, each as likely as any other. Those have n steps after them."""
    count = memory.position - n_step + 1 - memory.oldest
    drawn = torch.randint(count * memory.num_envs, (batch_size,)).numpy()
    return memory.oldest + drawn // memory.num_envs, drawn % memory.num_envs


class Priorities:
    """Proportional prioritisation (https://arxiv.org/abs/1511.05952, sections 3.3 and 3.4): P(i) ~ p_i^alpha.

    Leaf `slot * num_envs + environment` of the tree holds p^alpha of a transition, 0 if it can't be drawn.
    """

    def __init__(self, memory: Storage, alpha: float, n_step: int) -> None:
        self.memory, self.alpha, self.n_step = memory, alpha, n_step
        self.tree = SumTree(memory.length * memory.num_envs)
        self.largest = 1.0  # p^alpha so far, what new transitions get

    def admit(self) -> None:
        """After each step: the transitions that can be drawn from now on, and those that no longer can."""
        memory = self.memory
        new, old = memory.position - self.n_step, memory.oldest - 1
        slots = np.array([[old], [new]]) % memory.length
        leaves = slots * memory.num_envs + np.arange(memory.num_envs)  # [2, num_envs]
        self.tree[leaves.flatten()] = np.repeat([0.0, self.largest if new > old else 0.0], memory.num_envs)

    def draw(self, batch_size: int, beta: float) -> tuple[np.ndarray, np.ndarray, np.ndarray, torch.Tensor]:
        """Leaves, steps, environments and importance weights, `[B]`: one transition of each B-th of the sum."""
        memory = self.memory
        shares = (np.arange(batch_size) + torch.rand(batch_size, dtype=torch.float64).numpy()) / batch_size
        leaves = self.tree.find(shares)
        slots, envs = leaves // memory.num_envs, leaves % memory.num_envs
        steps = memory.position - (memory.position - slots) % memory.length
        weights = (self.tree[leaves] / self.tree.total) ** -beta  # (1/N * 1/P)^beta, N falls out with the largest
        return leaves, steps, envs, torch.from_numpy((weights / weights.max()).astype(np.float32))

    def update(self, leaves: np.ndarray, td_errors: torch.Tensor) -> None:
        priorities = (td_errors.abs().cpu().numpy().astype(np.float64) + 1e-6) ** self.alpha
        finite = np.isfinite(priorities)  # fp16 may overflow: the loss scaler skips that step
        if finite.any():
            self.tree[leaves[finite]] = priorities[finite]
            self.largest = max(self.largest, priorities[finite].max().item())

    def clear(self) -> None:
        self.tree = SumTree(self.memory.length * self.memory.num_envs)

    def state_dict(self) -> dict[str, Any]:
        return {**self.tree.state_dict(), "largest": self.largest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tree.load_state_dict(state)
        self.largest = state["largest"]


def td_targets(args: Args, q_network: nn.Module, target_network: nn.Module, batch: Batch) -> torch.Tensor:
    """R^n + gamma^n max_a Q'(s_n, a), `[B]`; with double Q-learning a is the best of Q instead of Q'."""
    next_q = target_network(batch.next_obs)
    best = (q_network(batch.next_obs) if args.double_q else next_q).argmax(1, keepdim=True)
    # where, not a product: what is left out may be infinite
    return batch.returns + torch.where(batch.discounts > 0, batch.discounts * next_q.gather(1, best).flatten(), 0.0)


LOSSES = ("td_loss", "q_values")


def dqn_loss(
    q_values: torch.Tensor, actions: torch.Tensor, td_target: torch.Tensor, weights: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The mean squared error of one batch, to be minimised.

    Args:
        q_values: `[B, A]`, of the network as it is now.
        actions, td_target: `[B]`.
        weights: `[B]`, of importance sampling.

    Returns:
        the loss, the errors `[B]`, and what `LOSSES` names, the last two as detached tensors.
    """
    old_val = pick(q_values, actions)
    td_error = td_target - old_val
    loss = td_error.square().mean() if weights is None else (weights * td_error.square()).mean()
    return loss, td_error.detach(), torch.stack([loss.detach(), old_val.detach().mean()])


def multiples(of: int, after: int, to: int) -> int:
    """How many multiples of a number lie in (after, to]."""
    return max(0, to // of - after // of)


LOG_STEPS = 1000  # agent steps between two points of a curve


def train(args: Args) -> dict[str, Any]:
    """Train one agent and return what stands in summary.json.

    Seeds torch's generators, which the whole process shares: one run at a time is repeatable.

    Raises:
        UsageError: see `Args.check`, `choose_device`, `Storage`, `atari_settings`, `Run` and `Checkpoints`.
        Interrupted, LimitReached: a signal came, or the money is spent, and a checkpoint is saved.
        FloatingPointError: losses or weights became infinite or NaN.
        SaveError: the end could not be saved.
    """
    args.check()
    clock = Clock(args, "dqn_atari")
    device = choose_device(args.device, args.gpu_memory_fraction)
    set_numerics(args.torch_deterministic, args.tf32)
    amp = Amp(args.amp, args.amp_dtype, device)
    needed = bytes_needed(args.buffer_size, args.num_envs)
    buffer_device = choose_buffer_device(args.buffer_device, device, needed, free_memory(device))
    memory = Storage(args.num_envs, args.buffer_size)
    require_memory(torch.device("cpu"), args.num_envs * 2 * 2**20, f"--num-envs {args.num_envs}: as many emulators")
    require_memory(device, args.batch_size * 2**20, f"--batch-size {args.batch_size}")
    envs = AtariEnvs(args.env_id, args.num_envs)
    monitor = Monitor(device)

    rng = Rng(args.seed, device)
    envs.reset(seed=args.seed)
    num_actions = envs.single_action_space.n
    q_network = QNetwork(num_actions).to(device, memory_format=torch.channels_last)
    target_network = QNetwork(num_actions).to(device, memory_format=torch.channels_last)
    target_network.load_state_dict(q_network.state_dict())
    optimizer = adam(q_network.parameters(), args.learning_rate, device, args.cuda_graphs, eps=1e-8)
    losses = Mean(len(LOSSES), device=device)
    upload_frames = Upload(envs.obs.shape, torch.uint8, device)

    # --- the loop's bodies, functions of tensors; what they read beside their inputs stays where it is
    @torch.no_grad()
    def policy(obs: torch.Tensor) -> torch.Tensor:
        with amp.autocast():
            return q_network(obs).argmax(1)

    def loss_of(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:  # of a Batch, and weights of prioritised ones
        batch, weights = Batch(*tensors[:5]), tensors[5] if args.prioritized else None
        with amp.autocast():
            with torch.no_grad():
                td_target = td_targets(args, q_network, target_network, batch)
            q_values = q_network(batch.obs)
        return dqn_loss(q_values, batch.actions, td_target, weights)

    def update(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        loss, td_error, stats = loss_of(*tensors)
        optimizer.zero_grad()
        amp.step(loss, optimizer)
        return td_error, stats

    config = dict(args=vars(args), env=envs.describe(), device=str(device), amp_dtype=str(amp.dtype))
    run_name = args.run_name or default_run_name(args, "dqn_atari")
    total_timesteps = args.total_timesteps // args.num_envs * args.num_envs  # whole steps of all environments
    with (
        StopSignals() as signals,
        closing(memory),
        Run(args, clock, Mirror(args.mirror, run_name, signals), "dqn_atari", run_name, total_timesteps, config) as run,
        SpotWatch(args.spot_watch, signals, run.terminal.line),
    ):
        if run.complete:
            return run.summary()
        progress = run.progress
        replay_dir = run.dir / Storage.FOLDER if args.save_buffer else None
        memory.require_room(replay_dir, buffer_device, free_memory)
        memory.open(replay_dir, buffer_device)
        state = dict(progress=progress, q_network=q_network, target_network=target_network, optimizer=optimizer)
        state |= dict(amp=amp, envs=envs, memory=memory, losses=losses, rng=rng)
        if args.prioritized:
            priorities = state["priorities"] = Priorities(memory, args.priority_alpha, args.n_step)
        checkpoints = Checkpoints(run, state | dict(clock=run.clock, events=run.events), signals)
        run.terminal.line(amp.note)
        if args.compile:
            some = channels_last(torch.zeros((args.batch_size, 4, 84, 84), dtype=torch.uint8, device=device))
            ones = torch.ones((2 + args.prioritized, args.batch_size), device=device)
            policy = compiled(run, policy, channels_last(upload_frames(envs.obs)))
            loss_of = compiled(run, loss_of, some, ones[0].long(), *ones[:2], some.clone(), *ones[2:])
        policy, update = captured(args.cuda_graphs, device, run.terminal.line, policy, update)
        run.terminal.line(memory.note)
        memory.begin(envs.obs)
        if args.prioritized and memory.position == memory.first:
            priorities.clear()  # of a memory that was lost
        was_learning = False
        while progress.global_step < total_timesteps and not run.reached(args.stop_at_return):
            checkpoints.between_steps()
            run.lap("checkpoint")

            # --- rollout
            run.set_phase("rollout", brief=True)
            duration = args.exploration_fraction * args.total_timesteps
            epsilon = linear_schedule(args.start_e, args.end_e, duration, progress.global_step)
            actions = torch.randint(num_actions, (args.num_envs,))
            greedy = torch.rand(args.num_envs) >= epsilon
            if greedy.any():
                best = policy(channels_last(upload_frames(envs.obs)))
                actions = torch.where(greedy, best.cpu(), actions)
            run.lap("inference")

            envs.send(actions.numpy())
            run.drain()  # while the emulators work
            next_obs, rewards, terminations, truncations, info = envs.recv()
            memory.add(actions.numpy(), np.sign(rewards), terminations, truncations, next_obs, info)
            before = progress.global_step
            progress.global_step += args.num_envs
            run.log_episodes(info)
            if args.prioritized:
                priorities.admit()
            run.lap("environment")

            # --- update
            stored = memory.position - memory.oldest  # steps; a lost memory is filled again first
            enough = max(args.n_step, min(args.learning_starts // args.num_envs, memory.size))
            learning = progress.global_step > args.learning_starts and stored >= enough
            if learning and not was_learning:
                run.warm_up()
            was_learning = learning
            before = max(before, args.learning_starts)
            for _ in range(multiples(args.train_frequency, before, progress.global_step) if learning else 0):
                run.set_phase("update", brief=True)
                weights = []
                if args.prioritized:
                    beta = linear_schedule(args.priority_beta, 1.0, total_timesteps, progress.global_step)
                    leaves, steps, of_envs, *weights = priorities.draw(args.batch_size, beta)
                else:
                    steps, of_envs = draw(memory, args.batch_size, args.n_step)
                batch = gather(memory, steps, of_envs, args.gamma, args.n_step)
                td_error, stats = update(*(upload(x, device) for x in (*batch, *weights)))
                if args.prioritized:
                    priorities.update(leaves, td_error)  # waits for a GPU: the next draw needs them
                losses.add(stats)
                progress.updates += 1
            if learning and (due := multiples(args.target_network_frequency, before, progress.global_step)):
                with torch.no_grad():
                    for target, weight in zip(target_network.parameters(), q_network.parameters(), strict=True):
                        target.lerp_(weight, 1 - (1 - args.tau) ** due)
            run.tick()
            run.lap("learning")

            # --- logging
            points = multiples(LOG_STEPS, progress.global_step - args.num_envs, progress.global_step)
            if points or progress.global_step == total_timesteps:
                means = {}
                if losses.count:
                    means = {f"losses/{name}": x for name, x in zip(LOSSES, losses.take(), strict=True)}
                run.log_later(means, {"charts/epsilon": epsilon}, monitor.scalars)

        checkpoints.finish()
        envs.close()
        run.save("agent.pt", q_network.state_dict())
        return run.finish()


if __name__ == "__main__":
    run_script(Args, train, __doc__)
