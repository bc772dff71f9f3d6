"""PPO of RLlib's under Tune, on CartPole-v1 until 20 games have a mean return of 480.

The article that this repository grew out of does it with 8 workers of 5 environments, one GPU for the learner, and Ray
2.9.3. What is called how, there and in Ray 2.60, in the order of this file:

    .rollouts(num_rollout_workers=8, num_envs_per_worker=5)  .env_runners(num_env_runners=8, num_envs_per_env_runner=5)
    .resources(num_gpus=1)                                   .learners(num_gpus_per_learner=1)
    .training(train_batch_size, sgd_minibatch_size, num_sgd_iter)
                                              .training(train_batch_size_per_learner, minibatch_size, num_epochs)
    model={"fcnet_hiddens": [64, 64]}                        .rl_module(model_config=DefaultModelConfig(...))
    tune.run("PPO", ...), air.RunConfig                      tune.Tuner(PPO, run_config=tune.RunConfig(...)).fit()
    episode_reward_mean, timesteps_total                     env_runners/episode_return_mean, num_env_steps_...

One meaning changed too: `episode_reward_mean` was over the last 100 games, `env_runners/episode_return_mean` is over
those that ended in this iteration, here four when they are long, so that a few lucky ones would stop a run. `LastGames`
below asks for 20; 100 would be another 40,000 steps.
"""

import argparse
import os
import sys
from collections import deque
from pathlib import Path

# before Ray is imported: nothing is sent home, and without a cluster to join, Ray listens on loopback only
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
ADDRESS = os.environ.get("RAY_ADDRESS", "local")
if ADDRESS == "local":
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"

import ray  # noqa: E402
from ray import tune  # noqa: E402
from ray.rllib.algorithms.ppo import PPO, PPOConfig  # noqa: E402
from ray.rllib.callbacks.callbacks import RLlibCallback  # noqa: E402
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig  # noqa: E402

GAMES = 20
MEAN_RETURN, STEPS = "mean_return_of_last_games", "num_env_steps_sampled_lifetime"


class LastGames(RLlibCallback):
    """The mean return over the newest iterations that have `GAMES` games together."""

    def __init__(self) -> None:
        self.iterations: deque[tuple[int, float]] = deque()  # games, their mean return

    def on_train_result(self, *, result: dict, **kwargs) -> None:
        played = result["env_runners"]
        if played.get("num_episodes"):
            self.iterations.append((played["num_episodes"], played["episode_return_mean"]))
        total = sum(games for games, _ in self.iterations)
        while self.iterations and total - self.iterations[0][0] >= GAMES:
            total -= self.iterations.popleft()[0]
        result[MEAN_RETURN] = sum(games * mean for games, mean in self.iterations) / max(total, 1)


def main() -> int:
    """Returns 0 if the return was reached, 1 if not."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--num-env-runners", type=int, default=min(max(cores - 1, 1), 8), help="processes that play")
    parser.add_argument("--num-envs-per-env-runner", type=int, default=5, help="environments in each of them")
    parser.add_argument("--stop-return", type=float, default=480.0, help=f"enough: the mean of {GAMES} games")
    parser.add_argument("--max-steps", type=int, default=300_000, help="environment steps after which it gives up")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--num-gpus", type=float, default=0, help="GPUs of the learner; 0.25: four runs share one")
    parser.add_argument("--storage", type=Path, default=Path("runs/rllib"), help="on a cluster: shared by all nodes")
    args = parser.parse_args()

    # for Ray a process is a core, but there may be more of them
    local = dict(num_cpus=args.num_env_runners + 1, include_dashboard=False) if ADDRESS == "local" else {}
    ray.init(address=ADDRESS, logging_level="ERROR", log_to_driver=False, **local)
    gpus = ray.cluster_resources().get("GPU", 0)
    if args.num_gpus > gpus:  # Tune would wait for them
        parser.error(f"--num-gpus {args.num_gpus:g}: Ray has {gpus:g}")

    config = (
        PPOConfig()
        .environment("CartPole-v1")
        .env_runners(num_env_runners=args.num_env_runners, num_envs_per_env_runner=args.num_envs_per_env_runner)
        .learners(num_learners=0, num_gpus_per_learner=args.num_gpus)  # 0: it learns in the trial's own process
        .training(
            train_batch_size_per_learner=2000,
            minibatch_size=250,
            num_epochs=10,
            lr=[[0, 1e-3], [60_000, 1e-4]],  # [environment step, learning rate]
            gamma=0.98,
            lambda_=0.9,
            vf_clip_param=float("inf"),  # by default 10: a value that is wrong by more than its root learns nothing
        )
        .rl_module(
            model_config=DefaultModelConfig(
                fcnet_hiddens=[64, 64],
                fcnet_activation="tanh",
                vf_share_layers=False,  # shared, the value's large loss drowns the policy's
            )
        )
        .callbacks(LastGames)
        .debugging(seed=args.seed)
    )
    tuner = tune.Tuner(
        PPO,  # the name "PPO" would import all of RLlib's algorithms and what they need
        param_space=config,
        run_config=tune.RunConfig(
            storage_path=str(args.storage.resolve()),
            stop={MEAN_RETURN: args.stop_return, STEPS: args.max_steps},
            checkpoint_config=tune.CheckpointConfig(checkpoint_frequency=10, num_to_keep=2, checkpoint_at_end=True),
            verbose=0,
        ),
    )
    (result,) = tuner.fit()
    if result.error:
        raise result.error
    mean, steps, seconds = (result.metrics[key] for key in (MEAN_RETURN, STEPS, "time_total_s"))
    print(f"mean return {mean:.1f} after {steps:,.0f} steps and {seconds:.0f} s: {result.checkpoint.path}")
    return int(mean < args.stop_return)


if __name__ == "__main__":
    sys.exit(main())
