"""How fast PPO and DQN on Atari would be on a machine that is not here: a model with four numbers.

Time of an agent step, in microseconds, with N environments on C cores:

    T(N) = e * ceil(N / C) / N  +  (a + b * N) / N  +  F / R

emulation (e: one emulator's step on one core; the emulators of a step run C at a time, and the slowest is waited for),
inference (a: what a call costs whatever its size; b: each observation in it) and learning (F: floating-point operations
an agent step, counted from the layers; R: operations a second).

The **sum**, not the larger one: in these scripts emulators wait for actions, actions for frames, and learning for the
rollout's end. `max` would be a loop that does them at once.

`calibrate` takes e, a, b and R from the shares of time in runs of `ppo_atari.py` with the fewest and the most
environments. Everything else in a result file is then a test: other numbers of environments, and `dqn_atari.py`, whose
operations are counted in the same way and whose updates have an eighth of the samples. The largest of these errors is
what `error` says, and what is printed with every projection.

For a card that is not here R is its peak times EFFICIENCY, and a and the cost of a minibatch are launches of kernels:
assumptions, not measurements. No result file of a GPU exists yet, so nobody knows their error; it is at least that of
the model on CPUs.
"""

import math
import statistics
from dataclasses import dataclass, replace

from benchmark.results import Result

# [output positions, multiply-adds a position] of the network of Mnih et al. 2015 on 84 x 84 x 4
LAYERS = [(20 * 20 * 32, 8 * 8 * 4), (9 * 9 * 64, 4 * 4 * 32), (7 * 7 * 64, 3 * 3 * 64), (512, 7 * 7 * 64)]
FORWARD = 2 * sum(positions * adds for positions, adds in LAYERS)  # operations a sample
# gradients of weights and of inputs, which nobody needs of the frames
BACKWARD = 2 * FORWARD - 2 * LAYERS[0][0] * LAYERS[0][1]
EPOCHS, MINIBATCHES, ROLLOUT = 4, 4, 1024  # ppo_atari.py's defaults
PPO = EPOCHS * (FORWARD + BACKWARD)  # operations of learning, an agent step
DQN = 32 * (2 * FORWARD + BACKWARD) / 4  # an update of 32, with its targets, every 4 agent steps
DQN_ENVS = 8

EFFICIENCY = 0.25  # share of a card's peak that small convolutions reach; assumed
LAUNCH = 10.0  # microseconds for one operation of eager PyTorch; assumed
CALL_OPERATIONS, MINIBATCH_OPERATIONS = 40, 250  # of one inference, of one minibatch with clipping and Adam; assumed


@dataclass(frozen=True)
class Model:
    """`emulation`, `call`, `observation`: e, a, b in microseconds; `rate`: operations a microsecond; `minibatch`:
    microseconds a minibatch besides its arithmetic."""

    emulation: float
    call: float
    observation: float
    rate: float
    cores: int
    minibatch: float = 0.0

    def parts(self, num_envs: int, script: str = "ppo_atari") -> dict[str, float]:
        """Microseconds an agent step of each part."""
        operations = PPO if script == "ppo_atari" else DQN
        minibatches = EPOCHS * MINIBATCHES / ROLLOUT if script == "ppo_atari" else 1 / 4
        return {
            "environment": self.emulation * math.ceil(num_envs / self.cores) / num_envs,
            "inference": self.call / num_envs + self.observation,
            "learning": operations / self.rate + minibatches * self.minibatch,
        }

    def sps(self, num_envs: int, script: str = "ppo_atari") -> float:
        """Agent steps a second."""
        return 1e6 / sum(self.parts(num_envs, script).values())

    def on(self, cores: int, peak_tflops: float) -> "Model":
        """The same emulators on another host, the network on a card."""
        return replace(
            self,
            cores=cores,
            call=LAUNCH * CALL_OPERATIONS,
            observation=FORWARD / (peak_tflops * 1e6 * EFFICIENCY),
            rate=peak_tflops * 1e6 * EFFICIENCY,
            minibatch=LAUNCH * MINIBATCH_OPERATIONS,
        )


@dataclass(frozen=True)
class Check:
    """A setting that the model had not seen."""

    name: str
    measured: float  # agent steps a second
    predicted: float

    @property
    def error(self) -> float:
        """Relative."""
        return self.predicted / self.measured - 1


SWEEP = "ppo_atari fp32, {} envs"  # the settings of run.py with one minibatch of 256 an epoch


def sweep(result: Result) -> dict[int, str]:
    """Number of environments -> name of the setting, fewest first."""
    found = {one.num_envs: name for name, one in result.settings.items() if name == SWEEP.format(one.num_envs)}
    return dict(sorted(found.items()))


def calibrate(result: Result) -> Model | None:
    """From the fewest and the most environments; None where there are fewer than two such settings."""
    settings = [result.settings[name] for name in sweep(result).values()]
    settings = [one for one in settings if one.share("environment") is not None and one.share("inference") is not None]
    if len(settings) < 2:
        return None
    cores = result.machine["available_cores"]
    few, many = settings[0], settings[-1]

    def microseconds(setting, part: str) -> float:  # an agent step
        return setting.share(part) * 1e6 / setting.sps.median

    emulations = [microseconds(x, "environment") * x.num_envs / math.ceil(x.num_envs / cores) for x in (few, many)]
    # inference a call: a + b N
    calls = [microseconds(x, "inference") * x.num_envs for x in (few, many)]
    slope = (calls[1] - calls[0]) / (many.num_envs - few.num_envs)
    observation = min(max(slope, 0.0), calls[1] / many.num_envs)
    call = max(statistics.mean([calls[0] - observation * few.num_envs, calls[1] - observation * many.num_envs]), 0.0)
    # what is left belongs to no rollout: learning, checkpoints, logging
    rest = [1e6 / x.sps.median * (1 - x.share("environment") - x.share("inference")) for x in (few, many)]
    return Model(statistics.mean(emulations), call, observation, PPO / statistics.mean(rest), cores)


def check(result: Result, model: Model) -> list[Check]:
    """The settings that `calibrate` did not see: numbers of environments between, the default sizes, DQN."""
    names = list(sweep(result).values())[1:-1]
    checks = [
        Check(name, result.settings[name].sps.median, model.sps(result.settings[name].num_envs)) for name in names
    ]
    for script in ("ppo_atari", "dqn_atari"):
        if setting := result.settings.get(f"{script} fp32"):
            checks.append(Check(setting.name, setting.sps.median, model.sps(setting.num_envs, script)))
    return checks


def error(checks: list[Check]) -> float | None:
    """The largest relative error, without sign; None where nothing could be checked."""
    return max(abs(one.error) for one in checks) if checks else None
