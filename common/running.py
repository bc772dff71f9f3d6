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


class Mean:
    """Of tensors of one shape, summed up on their device and read once in a while."""

    def __init__(self, *shape: int, device: torch.device) -> None:
        self.sum = torch.zeros(shape, device=device)
        self.count = 0

    def add(self, x: torch.Tensor) -> None:
        self.sum += x
        self.count += 1

    def take(self) -> list[float]:
        """The means of all since the last call; NaN where there were none."""
        means = (self.sum / self.count).tolist() if self.count else [float("nan")] * len(self.sum)
        self.sum.zero_()
        self.count = 0
        return means

    def state_dict(self) -> dict[str, Any]:
        return {"sum": self.sum, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sum.copy_(state["sum"])
        self.count = state["count"]
