"""From the machine's memory to a GPU's without waiting for what the GPU is doing."""

import numpy as np
import torch


class Upload:
    """Moves arrays of one shape to the device, on a GPU through pinned memory that is allocated once. On the CPU an
    array is taken as it is, without a copy."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.device = device
        self.pinned, self.free = None, None
        if device.type == "cuda":
            self.pinned, self.free = torch.empty(shape, dtype=dtype, pin_memory=True), torch.cuda.Event()

    def __call__(self, array: np.ndarray) -> torch.Tensor:
        if self.pinned is None:
            return torch.from_numpy(array)
        self.free.synchronize()  # the copy before has left the buffer
        self.pinned.copy_(torch.from_numpy(array))
        moved = self.pinned.to(self.device, non_blocking=True)
        self.free.record()
        return moved


def upload(x: np.ndarray | torch.Tensor, device: torch.device) -> torch.Tensor:
    """As `Upload` for any shape: torch keeps pinned memory that is no longer used, and uses it again. What is on the
    device is taken as it is."""
    x = torch.from_numpy(x) if isinstance(x, np.ndarray) else x
    return x if x.device == device else x.pin_memory().to(device, non_blocking=True)
