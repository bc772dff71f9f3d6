"""Running statistics."""

from typing import Any

import numpy as np
import torch


class RunningMeanStd:
    """Mean and variance of all samples so far (Welford 1962, https://doi.org/10.1080/00401706.1962.10490022)."""

    def __init__(self, *shape: int) -> None:
        self.count = 0
        self.mean = np.zeros(shape)
        self.squares = np.zeros(shape)  # sum of squared distances from the mean

    def update(self, x: np.ndarray) -> None:
        """`x`: `[B, *shape]`."""
        for sample in x:
            self.count += 1
            delta = sample - self.mean
            self.mean = self.mean + delta / self.count
            self.squares = self.squares + delta * (sample - self.mean)

    def std(self) -> np.ndarray:
        return np.sqrt(self.squares / max(self.count, 1) + 1e-8)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {name: torch.as_tensor(value).clone() for name, value in vars(self).items()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.count = state["count"].item()
        self.mean, self.squares = state["mean"].numpy().copy(), state["squares"].numpy().copy()


class Normalizer:
    """Observations to mean 0 and variance 1, rewards to discounted returns of variance 1, both clipped to +-10.

    The statistics move with `observe` and `rewards` only: evaluation, which calls neither, leaves them as they are.
    """

    def __init__(self, num_envs: int, num_observations: int, gamma: float) -> None:
        self.gamma = gamma
        self.obs_rms = RunningMeanStd(num_observations)
        self.return_rms = RunningMeanStd()
        self.returns = np.zeros(num_envs)  # discounted sums of the current episodes' rewards

    def observe(self, obs: np.ndarray) -> None:
        """`[B, D]`, each observation once."""
        self.obs_rms.update(obs)

    def observations(self, obs: np.ndarray) -> np.ndarray:
        """`[B, D]` -> `[B, D]`"""
        return np.minimum(np.maximum((obs - self.obs_rms.mean) / self.obs_rms.std(), -10), 10)

    def rewards(self, rewards: np.ndarray, ended: np.ndarray) -> np.ndarray:
        """`[N]` -> `[N]`; `ended`: the step that earned the reward was its episode's last."""
        self.returns = self.returns * self.gamma + rewards
        self.return_rms.update(self.returns)
        self.returns[ended] = 0.0
        return np.minimum(np.maximum(rewards / self.return_rms.std(), -10), 10)

    def state_dict(self) -> dict[str, torch.Tensor]:
        parts = {"obs": self.obs_rms, "return": self.return_rms}
        state = {f"{name}_{key}": value for name, rms in parts.items() for key, value in rms.state_dict().items()}
        return state | {"returns": torch.from_numpy(self.returns.copy())}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        for name, rms in {"obs": self.obs_rms, "return": self.return_rms}.items():
            rms.load_state_dict({key: state[f"{name}_{key}"] for key in vars(rms)})
        self.returns = state["returns"].numpy().copy()


class Mean:
    """Of tensors of one shape, summed up on their device and read once in a while."""

    def __init__(self, *shape: int, device: torch.device) -> None:
        self.sum = torch.zeros(shape, device=device)
        self.count = 0

    def add(self, x: torch.Tensor) -> None:
        self.sum += x
        self.count += 1

    def take(self) -> torch.Tensor:
        """The means of all since the last call."""
        means = self.sum / self.count
        self.sum.zero_()
        self.count = 0
        return means

    def state_dict(self) -> dict[str, Any]:
        return {"sum": self.sum, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sum.copy_(state["sum"])
        self.count = state["count"]
