"""Automatic mixed precision with one code path: everything here is a no-op when it is off."""

import contextlib
import platform
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class Amp:
    """Autocast and loss scaling for one device.

    Attributes:
        dtype: what matrix products and convolutions run in.
        scaler: a `torch.amp.GradScaler`, enabled for fp16 only.
        note: one line for the user when the choice may surprise, else an empty string.
    """

    def __init__(self, enabled: bool, dtype: str, device: torch.device) -> None:
        self.device_type = device.type
        self.note = ""
        name = "fp32" if not enabled else dtype if dtype != "auto" else self._choose(device)
        self.dtype = DTYPES[name]
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.dtype is torch.float16)

    def state_dict(self) -> dict[str, Any]:
        """Of the loss scaler; empty where it is off."""
        return self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """A run may go on with the scaler switched on or off: it begins as a new one then."""
        if state and self.scaler.is_enabled():
            self.scaler.load_state_dict(state)

    def _choose(self, device: torch.device) -> str:
        if device.type == "cuda":
            # Emulated bf16 counts as supported by default: slow on V100 and T4 (pytorch issue 148322).
            return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
        if cpu_has_bf16():
            return "bf16"
        self.note = "--amp: this CPU has no bf16 units and would be slower in mixed precision: staying in fp32"
        return "fp32"

    def autocast(self) -> contextlib.AbstractContextManager:
        if self.dtype is torch.float32:
            return contextlib.nullcontext()  # torch's own takes microseconds when it is off, too
        return torch.autocast(self.device_type, dtype=self.dtype)

    def step(self, loss: torch.Tensor, optimizer: torch.optim.Optimizer, max_grad_norm: float | None = None) -> None:
        """The gradient of a loss, clipped to a norm if one is given, and a step of the optimiser, which is left out if
        fp16 has overflowed (https://docs.pytorch.org/docs/stable/notes/amp_examples.html, "Gradient clipping"). It is
        added to the gradients that are there."""
        self.scaler.scale(loss).backward()
        if max_grad_norm is not None:
            self.scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], max_grad_norm)
        self.scaler.step(optimizer)
        self.scaler.update()


def cpu_has_bf16() -> bool:
    """Whether the CPU multiplies bf16 natively (AVX512-BF16 or AMX on x86, the bf16 extension on Arm)."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    flags = {
        word for line in text.splitlines() if line.lower().startswith(("flags", "features")) for word in line.split()
    }
    native = {"bf16"} if platform.machine() == "aarch64" else {"avx512_bf16", "amx_bf16"}
    return bool(native & flags)
