"""Choice of the device, its numerical settings, and what the machine does while a run trains."""

import contextlib
import os
import re
import warnings
from pathlib import Path
from typing import Any

import psutil
import torch

from common.errors import UsageError

with contextlib.suppress(ImportError):
    import pynvml

MIB = 2**20


def choose_device(name: str, memory_fraction: float | None = None) -> torch.device:
    """`auto`, `cpu`, `cuda` or `cuda:N` -> a device that works.

    Args:
        memory_fraction: of a GPU's memory, more than which torch does not give this process.

    Raises:
        UsageError: the device is not there, or this build of torch has no code for it.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's pages about old drivers and cards, which one line says here
        device = _choose_device(name)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # whose streams and events are taken where none is named
        if memory_fraction is not None:
            torch.cuda.set_per_process_memory_fraction(memory_fraction, device)
    return device


def _choose_device(name: str) -> torch.device:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", name):
        raise UsageError(f"--device {name}: must be auto, cpu, cuda or cuda:N")
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.backends.cuda.is_built() and not torch.cuda.is_available():
        raise UsageError(f"--device {name}: torch {torch.__version__} was built without CUDA; install a CUDA build")
    if not torch.cuda.is_available():
        raise UsageError(f"--device {name}: no usable GPU ({cuda_failure()})")
    device = torch.device("cuda" if name == "auto" else name)
    index = device.index if device.index is not None else torch.cuda.current_device()
    if index >= torch.cuda.device_count():
        raise UsageError(f"--device {name}: this machine shows {torch.cuda.device_count()} GPU(s), counted from 0")
    capability, archs = torch.cuda.get_device_capability(index), torch.cuda.get_arch_list()
    if not architecture_is_built(capability, archs):
        cure = (
            "pip install -r requirements-v100.txt" if capability == (7, 0) else "install a build of torch that has it"
        )
        raise UsageError(
            f"--device {name}: {torch.cuda.get_device_name(index)} is sm_{capability[0]}{capability[1]}, but torch "
            f"{torch.__version__} was built for {' '.join(archs)}: {cure}, or use --device cpu"
        )
    return torch.device("cuda", index)


def architecture_is_built(capability: tuple[int, int], archs: list[str]) -> bool:
    """Whether a build has code for a card: a binary of its major version and at most its minor one, or PTX
    (`compute_`) of at most its version (CUDA C++ Programming Guide, "Application Compatibility")."""
    if not archs:  # ROCm and others name their architectures differently
        return True
    for arch in archs:
        match = re.fullmatch(r"(sm|compute)_(\d+)(\d)[a-z]?", arch)
        if match is None:
            return True
        built = int(match[2]), int(match[3])
        if built <= capability and (match[1] == "compute" or built[0] == capability[0]):
            return True
    return False


def cuda_failure() -> str:
    """Why CUDA does not start, in torch's own words."""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error).strip().splitlines()[0]
    return "CUDA reports no device"


def require_memory(device: torch.device, needed: int, what: str) -> None:
    """Refuse what does not fit, `needed` bytes, before anything is allocated.

    Raises:
        UsageError: the GPU, the machine or the container has less.
    """
    free = free_memory(device)
    if needed > free:
        raise UsageError(f"{what} needs {needed / 1e9:.1f} GB of memory, {free / 1e9:.1f} GB are free")


def free_memory(device: torch.device) -> int:
    """Bytes, of the GPU, or of the machine or the container."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        # https://docs.pytorch.org/docs/stable/generated/torch.cuda.get_per_process_memory_fraction.html
        allowed = torch.cuda.get_per_process_memory_fraction(device) * total - torch.cuda.memory_reserved(device)
        return int(min(free, allowed))
    free = psutil.virtual_memory().available
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        # the container's limit; its usage says little, since it counts cached files. Absent or "max" elsewhere
        with contextlib.suppress(OSError, ValueError):
            free = min(free, int(Path(limit).read_text()))
    return free


def set_numerics(deterministic: bool, tf32: bool) -> None:
    """Determinism and TF32 for this process. Call before the first CUDA operation.

    Raises:
        UsageError: torch has no folder for compiled code, which it makes here even if nothing is compiled.
    """
    if deterministic:
        # https://docs.nvidia.com/cuda/cublas/#results-reproducibility
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    try:
        torch.use_deterministic_algorithms(deterministic)
    except OSError as error:
        raise UsageError(f"TORCHINDUCTOR_CACHE_DIR: cannot make {error.filename}: {error.strerror}") from None
    torch.utils.deterministic.fill_uninitialized_memory = False  # costs time and hides nothing here
    torch.backends.cudnn.benchmark = not deterministic
    precision = "tf32" if tf32 else "ieee"
    torch.backends.cuda.matmul.fp32_precision = precision
    torch.backends.cudnn.conv.fp32_precision = precision


class Monitor:
    """Memory and load of the machine, as TensorBoard scalars. Never raises where NVML does not answer."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.process = psutil.Process()
        self.process.cpu_percent()  # the first call only sets the start of the interval
        self.handle = self._nvml_handle() if device.type == "cuda" else None

    def _nvml_handle(self) -> Any:
        # by UUID: NVML's order is not CUDA's, and CUDA_VISIBLE_DEVICES renumbers only CUDA's
        with contextlib.suppress(Exception):
            pynvml.nvmlInit()
            return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(self.device).uuid}")
        return None

    def scalars(self) -> dict[str, float]:
        """`system/*`, and on a GPU `gpu/*`: MiB, percent, degrees Celsius, watts. Resets the peak."""
        values = {
            "system/cpu_percent": self.process.cpu_percent(),  # 100 is one core
            "system/ram_mib": self.process.memory_info().rss / MIB,
        }
        if self.device.type == "cuda":
            values["gpu/memory_allocated_mib"] = torch.cuda.memory_allocated(self.device) / MIB
            values["gpu/memory_reserved_mib"] = torch.cuda.memory_reserved(self.device) / MIB
            values["gpu/memory_peak_mib"] = torch.cuda.max_memory_allocated(self.device) / MIB
            torch.cuda.reset_peak_memory_stats(self.device)
        if self.handle is not None:
            # each by itself: cards and drivers leave single ones out
            with contextlib.suppress(pynvml.NVMLError):
                values["gpu/utilization_percent"] = pynvml.nvmlDeviceGetUtilizationRates(self.handle).gpu
            with contextlib.suppress(pynvml.NVMLError):
                values["gpu/temperature_c"] = pynvml.nvmlDeviceGetTemperature(self.handle, pynvml.NVML_TEMPERATURE_GPU)
            with contextlib.suppress(pynvml.NVMLError):
                values["gpu/power_w"] = pynvml.nvmlDeviceGetPowerUsage(self.handle) / 1000
        return values
