"""Checks a machine before money is spent on it: each check is ok, warn or fail, with the cure in one line.

    python doctor.py --num-envs 16 --runs-dir /data/runs

Status 1 if anything fails, 2 for flags that make no sense, else 0. It takes less than half a minute, writes about 20 MB
into the folder of the runs, and leaves nothing there. Run it on every new machine, in the environment that will train.

Drivers: https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html
V100: CUDA 12.8 builds of torch dropped it at 2.11 (pytorch issue 172352). bf16 by emulation: pytorch issue 148322.
A wrong cuDNN on LD_LIBRARY_PATH: pytorch issue 80637.
"""

import contextlib
import faulthandler
import fcntl
import importlib.metadata
import ipaddress
import json
import os
import platform
import queue
import shutil
import signal
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

try:
    import common.cpu  # noqa: F401  isort: skip  (has to come before torch)

    import tomllib  # isort: skip  (an older Python has none)

    import numpy as np
    import psutil
    import torch
    import torch.nn as nn
    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet
    from packaging.version import Version
    from torch.utils import collect_env

    from common.amp import Amp, cpu_has_bf16
    from common.args import parse
    from common.checkpoint import LEAVING, SEEN, pack
    from common.errors import UsageError
    from common.files import replacing
    from common.gpu import architecture_is_built, cuda_failure, free_memory, require_memory
    from common.mirror import EXIT
    from common.replay import free_disk, require_room
    from common.spot import CLOUDS, detect, maker
except (ImportError, OSError) as error:  # OSError: a library that torch loads
    missing = isinstance(error, ModuleNotFoundError)
    cure = f"with Python 3.11 to 3.13: {sys.executable} -m pip install -r requirements.txt"
    cure = cure if missing else "unset LD_LIBRARY_PATH, or install it again"
    finding = " ".join(str(error).split())
    if "--json" in sys.argv:
        row = {"name": "packages", "status": "fail", "finding": finding, "cure": cure}
        print(json.dumps({"checks": [row], "totals": {"ok": 0, "warn": 0, "fail": 1}, "status": 1}, indent=2))
        sys.exit(1)
    sys.exit(f"fail  {finding}\n      -> {cure}")


ROOT = Path(__file__).parent
# seconds
BUDGET = 24.0  # for all checks; imports and `machine` not counted
LIMIT = 12.0  # for one of them
WATCHDOG = 40.0  # until the process is ended from outside Python, which a driver that hangs may have stopped
FACTS = 3.0  # for `machine`
CPU = torch.device("cpu")


@dataclass
class Args:
    num_envs: int = 8
    """parallel environments that will train"""
    buffer_size: int = 1_000_000
    """transitions of dqn_atari.py's replay memory; 0 if it will not run"""
    runs_dir: str = "runs"
    """folder of all runs"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """cuda: a machine without a usable GPU fails; cpu: GPUs are not looked at"""
    json: bool = False
    """print one JSON object instead of lines"""
    peer: str | None = None
    """host:port of a Ray cluster, or auto: latency and bandwidth to its other nodes, instead of all other checks"""

    def check(self) -> None:
        """Raises UsageError: values that no run can have."""
        if self.num_envs < 1:
            raise UsageError(f"--num-envs {self.num_envs}: must be positive")
        if self.buffer_size < 0:
            raise UsageError(f"--buffer-size {self.buffer_size}: must not be negative")
        if not self.runs_dir or Path(self.runs_dir).is_file():
            raise UsageError(f"--runs-dir {self.runs_dir}: must name a folder")


@dataclass
class Result:
    name: str
    status: Literal["ok", "warn", "fail"]
    finding: str
    cure: str = ""


def ok(name: str, finding: str) -> Result:
    return Result(name, "ok", finding)


def warn(name: str, finding: str, cure: str) -> Result:
    return Result(name, "warn", finding, cure)


def warn_if(bad: bool, name: str, finding: str, cure: str) -> Result:
    return warn(name, finding, cure) if bad else ok(name, finding)


def fail(name: str, finding: str, cure: str) -> Result:
    return Result(name, "fail", finding, cure)


# ---- Python and packages

TRAINING_ENDS = "# tests"  # the line of requirements.txt below which nothing is needed to train


def packages(args: Args) -> list[Result]:
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    version = platform.python_version()
    results = [ok("python", version)]
    if not SpecifierSet(wanted).contains(version, prereleases=True):
        results = [fail("python", f"{version}, not {wanted}", f"make the environment with Python {wanted}")]
    compared = [compare(ROOT / name) for name in ("requirements.txt", "requirements-v100.txt")]
    path, missing, optional, changed = min(compared, key=lambda row: sum(map(len, row[1:])))
    cure = f"{sys.executable} -m pip install -r {path.name}"
    if missing:
        return [*results, fail("packages", f"missing: {', '.join(missing)}", cure)]
    if optional or changed:
        differences = changed + [f"no {name}, which tests and benchmarks want" for name in optional]
        return [*results, warn("packages", ", ".join(differences), f"{cure} (these versions ran together)")]
    return [*results, ok("packages", f"as in {path.name}")]


def compare(path: Path) -> tuple[Path, list[str], list[str], list[str]]:
    """What a file of pinned requirements names and is missing, to train and for the rest, or is another version."""
    missing, optional, changed = [], [], []
    absent = missing
    for line in path.read_text().splitlines():
        if line.startswith("#"):
            absent = optional if line.startswith(TRAINING_ENDS) else absent
            continue
        requirement = Requirement(line)
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            absent.append(requirement.name)
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            changed.append(f"{requirement.name} {version} is not {requirement.specifier}")
    return path, missing, optional, changed


# ---- GPU

# by CUDA's major version, "Table 1" of the page above: minor versions are compatible with each other
OLDEST_DRIVER = {"11": "450.80.02", "12": "525", "13": "580"}
DRIVER_CURE = "install a newer driver, or a torch that was built for an older CUDA"
PCI, DEV = Path("/sys/bus/pci/devices"), Path("/dev")
NVIDIA, DISPLAY = "0x10de", "0x03"  # a vendor, and the class of display controllers, in PCI's numbers
GPU_LIBRARIES = ("libcudnn", "libcublas", "libcudart", "libnccl", "libnvrtc")
# relative error of a norm, about ten times what rounding was seen to make; fp32 leaves room for other algorithms
TOLERANCE = {"fp32": 1e-4, "fp16": 1e-2, "bf16": 5e-2}


def gpu(args: Args) -> list[Result]:
    if args.device == "cpu":
        return [ok("gpu", "not looked at: --device cpu")]
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    cards, driver = nvidia()
    if count == 0 and not cards:
        cure = "nothing for a machine without one; else choose an instance with a card (docs/report/report.md)"
        status = "fail" if args.device == "cuda" else "warn"
        return [Result("gpu", status, f"no NVIDIA card: torch {torch.__version__} trains on the CPU", cure)]
    if count == 0:
        why, cure = why_unusable(driver)
        return [fail("gpu", f"{cards[0]} is here and torch cannot use it: {why}", cure)]
    results = []
    for i in range(count):
        name, capability = torch.cuda.get_device_name(i), torch.cuda.get_device_capability(i)
        sm = f"sm_{capability[0]}{capability[1]}"
        results.append(ok("gpu", f"{i}: {name}, {torch.cuda.get_device_properties(i).total_memory / 1e9:.0f} GB"))
        if architecture_is_built(capability, archs := torch.cuda.get_arch_list()):
            results.append(ok("architecture", f"torch {torch.__version__} has code for {sm}"))
        else:
            cure = "pip install -r requirements-v100.txt" if capability == (7, 0) else "install a build that has it"
            finding = f"{name} is {sm}, torch {torch.__version__} was built for {' '.join(archs)}"
            results.append(fail("architecture", finding, cure))
    if driver is None:
        cure = "in a container: NVIDIA_DRIVER_CAPABILITIES=compute,utility"
        return [*results, warn("driver", "nvidia-smi and NVML do not answer: no load, power and temperature", cure)]
    if fault := driver_fault(driver):  # works all the same with NVIDIA's package for forward compatibility
        return [*results, warn("driver", fault, DRIVER_CURE)]
    return [*results, ok("driver", f"{driver} for CUDA {torch.version.cuda}")]


def nvidia() -> tuple[list[str], str | None]:
    """NVIDIA's cards as the driver names them, or else as the bus shows them, and the driver's version."""
    cards = (collect_env.get_gpu_info(collect_env.run) or "").splitlines()
    driver = collect_env.get_nvidia_driver_version(collect_env.run)
    if driver is None:
        with contextlib.suppress(Exception):  # the package or the driver's library may be missing
            import pynvml

            pynvml.nvmlInit()
            driver = pynvml.nvmlSystemGetDriverVersion()
    for device in [] if cards else sorted(PCI.glob("*")):
        with contextlib.suppress(OSError):
            if (device / "vendor").read_text().strip() == NVIDIA and (device / "class").read_text().startswith(DISPLAY):
                cards.append(f"an NVIDIA card (PCI {device.name})")
    return cards, driver


def driver_fault(driver: str) -> str:
    """That it is too old for the CUDA of this torch, or nothing."""
    oldest = OLDEST_DRIVER.get((torch.version.cuda or "").split(".")[0])
    if oldest is None or Version(driver) >= Version(oldest):
        return ""
    return f"driver {driver} is too old for CUDA {torch.version.cuda}, which wants {oldest} or newer"


def why_unusable(driver: str | None) -> tuple[str, str]:
    """Why torch cannot use a card that is there, and the cure."""
    if not torch.backends.cuda.is_built():
        cure = f"pip install --force-reinstall torch=={torch.__version__.split('+')[0]}"
        return f"torch {torch.__version__} is built without CUDA", cure
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1", "NoDevFiles"):
        return "CUDA_VISIBLE_DEVICES hides it", "unset CUDA_VISIBLE_DEVICES"
    if driver and (fault := driver_fault(driver)):
        return fault, DRIVER_CURE
    if not any(DEV.glob("nvidia[0-9]*")):
        cure = "container: docker run --gpus all (Kubernetes: nvidia.com/gpu: 1); else install the driver and reboot"
        return "there is no /dev/nvidia0", cure
    return cuda_failure(), "make nvidia-smi work, unset LD_LIBRARY_PATH, reboot, or give the machine back"


def devices(args: Args) -> list[torch.device]:
    """The cards that this torch has code for, or the CPU."""
    count = torch.cuda.device_count() if args.device != "cpu" and torch.cuda.is_available() else 0
    archs = torch.cuda.get_arch_list()
    built = [i for i in range(count) if architecture_is_built(torch.cuda.get_device_capability(i), archs)]
    return [torch.device("cuda", i) for i in built] or [CPU]


def convolution(args: Args) -> list[Result]:
    """The first layers of the scripts' network, forward and backward, against float64 on the CPU."""
    return [convolve(device, precision) for device in devices(args) for precision in TOLERANCE]


def convolve(device: torch.device, precision: str) -> Result:
    name, on_gpu = f"{precision} {device}", device.type == "cuda"
    if precision == "bf16" and on_gpu and not torch.cuda.is_bf16_supported(including_emulation=False):
        return ok(name, "this card only emulates it, slowly: --amp takes fp16")
    try:
        error = convolution_error(device, precision)
    except torch.OutOfMemoryError:
        return fail(name, "the card's memory is full", "another process fills it: nvidia-smi names it")
    except RuntimeError as reason:
        if precision == "fp16" and not on_gpu:
            return ok(name, "torch has no such convolution on this CPU, and --amp takes none")
        cure = "see driver, architecture and cudnn here; if these are right, take another machine"
        return fail(name, f"convolution: {brief(reason)}", cure)
    if not error <= TOLERANCE[precision]:  # a NaN is not either
        finding = f"the convolution is wrong by {error:.1g}, where {TOLERANCE[precision]:.0e} is allowed"
        cure = "unset LD_LIBRARY_PATH and install torch again; if it stays, the hardware is faulty"
        return fail(name, finding, cure)
    emulated = precision == "bf16" and not on_gpu and not cpu_has_bf16()
    note = ", without bf16 units: --amp stays in fp32" if emulated else ""
    return ok(name, f"convolution forward and backward, error {error:.0e}{note}")


def convolution_error(device: torch.device, precision: str) -> float:
    """The largest relative error, in the Euclidean norm, of the output and all gradients.

    No ReLU: values near 0 that change sides would hide the error of the arithmetic.
    """
    generator = torch.Generator().manual_seed(1)
    frames = torch.rand(8, 4, 84, 84, generator=generator, dtype=torch.float64)
    weights = [
        torch.randn(shape, generator=generator, dtype=torch.float64) * (shape[1] * shape[2] ** 2) ** -0.5
        for shape in ((32, 4, 8, 8), (64, 32, 4, 4))
    ]
    upstream = torch.randn(8, 64, 9, 9, generator=generator, dtype=torch.float64)

    def pass_through(device: torch.device, dtype: torch.dtype, autocast: Any) -> list[torch.Tensor]:
        leaves = [tensor.to(device, dtype, copy=True).requires_grad_() for tensor in (frames, *weights)]
        with autocast:
            hidden = nn.functional.conv2d(leaves[0], leaves[1], stride=4)
            out = nn.functional.conv2d(hidden, leaves[2], stride=2)
        out.backward(upstream.to(device, out.dtype))
        return [tensor.detach().to("cpu", torch.float64) for tensor in (out, *(leaf.grad for leaf in leaves))]

    expected = pass_through(CPU, torch.float64, contextlib.nullcontext())
    before = torch.backends.cudnn.conv.fp32_precision
    torch.backends.cudnn.conv.fp32_precision = "ieee"  # TF32 would hide errors of fp32
    try:
        got = pass_through(device, torch.float32, Amp(precision != "fp32", precision, device).autocast())
    finally:
        torch.backends.cudnn.conv.fp32_precision = before
    errors = [(x - y).norm() / y.norm() for x, y in zip(got, expected, strict=True)]
    return torch.stack(errors).max().item()  # NaN if any is


def libraries(args: Args) -> list[Result]:
    """Which cuDNN torch takes, and what LD_LIBRARY_PATH puts before it. After `convolution`, which loads it."""
    if args.device == "cpu" or not torch.backends.cuda.is_built():
        return [ok("cudnn", "not needed on the CPU")]
    cure = "unset LD_LIBRARY_PATH: torch brings its own"
    try:
        version = torch.backends.cudnn.version()
    except RuntimeError as error:  # built with one, found another
        return [fail("cudnn", brief(error), cure)]
    if version is None:
        return [fail("cudnn", f"torch {torch.__version__} finds none", "install torch again")]
    own = Path(torch.__file__).parent.parent
    before = []
    for folder in [Path(word) for word in os.environ.get("LD_LIBRARY_PATH", "").split(":") if word]:
        files = sorted(file.name for file in folder.glob("lib*.so*") if file.name.startswith(GPU_LIBRARIES))
        files += ["libcuda.so"] if folder.name == "stubs" else []  # for linkers: every call of it fails
        if files and not folder.resolve().is_relative_to(own):
            before.append(f"{folder} ({files[0]}{', ...' if len(files) > 1 else ''})")
    loaded = {Path(entry.path).parent for entry in psutil.Process().memory_maps() if "/libcudnn" in entry.path}
    where = f" from {', '.join(map(str, sorted(loaded)))}" if loaded else ""
    if before:
        finding = f"LD_LIBRARY_PATH puts {', '.join(before)} before torch's own; cuDNN {version}{where}"
        return [warn("cudnn", finding, cure)]
    return [ok("cudnn", f"{version}{where}")]


# ---- CPU, memory

CGROUP = Path("/sys/fs/cgroup")
ENVS_A_CORE = 4  # more wait for each other
TRAINS = 10**9  # bytes that a training process takes beside the replay memory
SHM = 2**28  # bytes; Docker gives 2**26
SLOW_ATARI = 500  # agent steps/s of one core; half of an EPYC of the Zen 3 kind (docs/performance.md)
SLOW_MUJOCO = 1_000  # steps/s of one HalfCheetah


def usable_cores() -> tuple[int, float]:
    """Cores that this process may run on, and how many of them the container's quota allows at a time."""
    visible = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else psutil.cpu_count() or 1
    quota = float("inf")
    with contextlib.suppress(OSError, ValueError):  # absent, or "max"
        share, period = (CGROUP / "cpu.max").read_text().split()
        quota = int(share) / int(period)
    with contextlib.suppress(OSError, ValueError):  # version 1; -1 is no limit
        share, period = ((CGROUP / "cpu" / f"cpu.cfs_{word}_us").read_text() for word in ("quota", "period"))
        quota = int(share) / int(period) if int(share) > 0 else quota
    return visible, min(visible, quota)


def cores(args: Args) -> list[Result]:
    visible, usable = usable_cores()
    results = []
    if usable < visible:
        finding = f"{visible} are visible, the container's quota is {usable:g}: as many threads will be held up"
        cure = f"taskset the command to {max(1, int(usable))} of them, or a larger quota (docker run --cpus)"
        results.append(warn("cores", finding, cure))
    if args.num_envs > ENVS_A_CORE * usable:
        finding = f"--num-envs {args.num_envs} for {usable:g} of them: environments wait for each other"
        most, wanted = max(1, int(ENVS_A_CORE * usable)), -(-args.num_envs // ENVS_A_CORE)
        results.append(warn("cores", finding, f"--num-envs {most}, or a machine with {wanted} cores"))
    idle = f", {visible - args.num_envs} of them without an emulator" if visible > args.num_envs else ""
    return results or [ok("cores", f"{visible} for --num-envs {args.num_envs}{idle}")]


def memory(args: Args) -> list[Result]:
    free, total = free_memory(CPU), psutil.virtual_memory().total
    results = [ok("memory", f"{free / 1e9:.3g} of {total / 1e9:.3g} GB free")]
    training = TRAINS + args.num_envs * 2 * 2**20
    try:
        require_memory(CPU, training, "a training process")
    except UsageError as error:
        results = [fail("memory", str(error), "end what fills it, or take a larger machine")]
    return results + room("replay memory", args, max(0, free - training), "memory beside training")


def room(name: str, args: Args, free: int, what: str) -> list[Result]:
    """Whether dqn_atari.py's memory fits, by its own rule. `free`: bytes."""
    if args.buffer_size == 0:
        return []
    try:
        require_room(args.buffer_size, args.num_envs, free, what)
    except UsageError as error:
        finding, _, cure = str(error).rpartition(": ")
        return [fail(name, finding, f"{cure}; --buffer-size 0 here if dqn_atari.py will not run")]
    return [ok(name, f"--buffer-size {args.buffer_size} fits")]


def shared_memory(args: Args) -> list[Result]:
    cure = "docker run --shm-size 1g; in Kubernetes an emptyDir with medium: Memory at /dev/shm"
    try:
        free = psutil.disk_usage("/dev/shm").free
    except OSError as error:
        return [warn("/dev/shm", f"{error.strerror}: --async-envs has to do without", cure)]
    little = free < SHM
    finding = f"{free / 2**20:,.0f} MiB free" + (": little for the worker processes of --async-envs" if little else "")
    return [warn_if(little, "/dev/shm", finding, cure)]


# ---- the folder of the runs

NETWORK = ("nfs", "cifs", "smb", "9p", "fuse", "ceph", "gluster", "lustre", "gpfs", "beegfs", "afs", "virtiofs")
PASSING = ("tmpfs", "ramfs", "overlay", "aufs", "fuse.fuse-overlayfs")  # gone with the machine, or the container
FULL, NEARLY_FULL = 10**9, 10**10  # bytes
SLOW_FSYNC = 0.1  # seconds
LOCAL = "a local SSD for --runs-dir, with a copy by --mirror"
CHECKPOINT = 20 * 10**6  # bytes of ppo_atari.py's: weights, and Adam's two averages of them


def run_folder(args: Args) -> list[Result]:
    folder = Path(args.runs_dir).absolute()
    free = free_disk(folder)
    disk = ("disk", f"{free / 1e9:,.3g} GB free", "a disk with more room for --runs-dir; old runs take some (du -sh)")
    results = [file_system(folder), fail(*disk) if free < FULL else warn_if(free < NEARLY_FULL, *disk)]
    results += room("replay files", args, free, f"disk for {args.runs_dir}")
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".doctor-", dir=folder) as scratch:
            locks(Path(scratch))
            fsync, save = fsync_seconds(Path(scratch)), checkpoint_seconds(Path(scratch))
    except OSError as error:
        cure = "another --runs-dir: a local disk, this user's, with room"
        return [*results, fail("run folder", f"{folder} cannot be used: {error}", cure)]
    finally:
        for path in made:
            with contextlib.suppress(OSError):  # not made, or a run has begun in it
                path.rmdir()
    results.append(warn_if(fsync > SLOW_FSYNC, "fsync", f"{fsync * 1000:.1f} ms", LOCAL))
    return results + notice(save)


def file_system(folder: Path) -> Result:
    inside = [disk for disk in psutil.disk_partitions(all=True) if folder.resolve().is_relative_to(disk.mountpoint)]
    # the last of those mounted at one place lies on top
    kind = max(reversed(inside), key=lambda disk: len(disk.mountpoint)).fstype if inside else "unknown"
    if kind.startswith(PASSING):
        cure = "mount a disk there (docker run -v /data/runs:/app/runs), or train with --mirror"
        return warn("run folder", f"{folder} is on {kind}: lost with the machine or the container", cure)
    if kind.startswith(NETWORK):
        return warn("run folder", f"{folder} is on {kind}, a network file system: slow saves", LOCAL)
    return ok("run folder", f"{folder} on {kind}")


def locks(folder: Path) -> None:
    """Raises OSError: no locks on this file system, without which no run begins."""
    with open(folder / "lock", "wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise OSError(error.errno, f"no locks on its file system ({error.strerror})") from None


def fsync_seconds(folder: Path) -> float:
    """Of a small file, the median of five."""
    seconds = []
    with open(folder / "small", "wb", buffering=0) as file:
        for _ in range(5):
            file.write(bytes(4096))
            began = time.perf_counter()
            os.fsync(file.fileno())
            seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def checkpoint_seconds(folder: Path) -> float:
    """As common/checkpoint.py makes one."""
    content = {"weights": torch.rand(CHECKPOINT // 4)}
    began = time.perf_counter()
    packed = pack(content)
    with replacing(folder / "checkpoint.pt") as file:
        file.write(packed)
    return time.perf_counter() - began


def notice(save: float) -> list[Result]:
    """Whether a checkpoint that takes `save` seconds is written between a cloud's notice and the end."""
    cloud, results = detect(), []
    if cloud is None and (name := maker()):
        cloud = CLOUDS[name]()
        reach = "open the way to that address, or train where it is open (docs/spot.md)"
        results.append(warn("spot notice", cloud.silence(), reach))
    elif cloud is None:
        results.append(ok("spot notice", "no cloud answers: the shortest notice that one publishes counts"))
    else:
        results.append(ok("spot notice", f"{cloud.name} answers and gives {cloud.lead:.0f} s"))
    lead = cloud.lead if cloud else min(kind.lead for kind in CLOUDS.values())
    needed = SEEN + 3 * save + LEAVING + EXIT  # as common/checkpoint.py reckons, with a mirror
    finding = (
        f"{CHECKPOINT / 1e6:.0f} MB in {save:.2f} s; {needed:.0f} of {lead:.0f} s from a notice to the end of its copy"
    )
    cure = "a faster disk for --runs-dir; a lower --checkpoint-minutes loses less"
    return [*results, warn_if(needed > lead, "checkpoint", finding, cure)]


# ---- ports, other nodes, tools

PORTS = {6006: "TensorBoard", 8888: "Jupyter"}


def ports(args: Args) -> list[Result]:
    try:
        connections = psutil.net_connections("tcp")
    except psutil.AccessDenied:
        return [warn("ports", "this user may not see who listens", "sudo ss -ltnp, and look for 6006 and 8888")]
    results = []
    for connection in connections:
        if connection.status != psutil.CONN_LISTEN or connection.laddr.port not in PORTS:
            continue
        address, port = ipaddress.ip_address(connection.laddr.ip), connection.laddr.port
        if (getattr(address, "ipv4_mapped", None) or address).is_loopback:
            continue
        owner = "a process of another user"
        with contextlib.suppress(psutil.Error):
            owner = f"{psutil.Process(connection.pid).name()} ({connection.pid})" if connection.pid else owner
        finding = f"{owner} listens on {address} port {port}: whoever reaches it uses it"
        cure = f"bind {PORTS[port]} to 127.0.0.1, and look through ssh -L {port}:localhost:{port} MACHINE"
        results.append(warn("ports", finding, cure))
    return results or [ok("ports", "6006 and 8888 are closed to the network")]


SLOW_TRIP, SLOW_NETWORK = 5e-3, 125e6  # seconds, bytes a second: ppo_atari_ray.py waits for frames and for weights


def peers(args: Args) -> list[Result]:
    """The other nodes of a cluster. Raises UsageError: there is none."""
    from common.cluster import connected  # here: nothing else needs Ray
    from common.peers import peers

    results, cure = [], "all nodes in one zone and network, machines with more bandwidth (docs/cluster.md)"
    with connected(args.peer):
        for peer in peers():
            name, rate = f"peer {peer.address}", f"{peer.rate / 1e6:,.0f} MB/s ({8e-9 * peer.rate:.1f} Gbit/s)"
            slow = peer.seconds > SLOW_TRIP or peer.rate < SLOW_NETWORK
            seen = warn_if(slow, name, f"{1e3 * peer.seconds:.2f} ms there and back, {rate}", cure)
            silent = fail(name, brief(peer.silence), "see `ray status`, and the rules between nodes")
            results.append(silent if peer.silence else seen)
    return results or [warn("peer", f"{args.peer} has no other node", "ray start --address on the others")]


def monitoring(args: Args) -> list[Result]:
    gpu = args.device != "cpu" and torch.cuda.is_available()
    groups = [("top", "htop")] + [("nvidia-smi", "nvtop")] * gpu
    found = [name for group in groups for name in group if shutil.which(name)]
    missing = [group for group in groups if not set(group) & set(found)]
    if missing:
        finding = f"neither {' nor '.join(' nor '.join(group) for group in missing)} is installed"
        return [warn("monitoring", finding, "apt-get install htop nvtop" if gpu else "apt-get install htop")]
    return [ok("monitoring", ", ".join(found))]


def backups(args: Args) -> list[Result]:
    # No machine can see whether its provider makes snapshots: a warning would never go away and teach people to read
    # over warnings, so this reminder is none.
    return [ok("backups", "cannot be seen from here: switch on the provider's snapshots, or train with --mirror")]


def compiler(args: Args) -> list[Result]:
    """Compiles what torch.compile compiles: C++ with Python's header and OpenMP."""
    command = os.environ.get("CXX", "g++")
    include = sysconfig.get_paths()["include"]
    cure = "apt-get install g++ python3-dev; without --compile nothing needs it"
    with tempfile.TemporaryDirectory() as folder:
        flags = ["-x", "c++", "-fopenmp", "-shared", "-fPIC", f"-I{include}", "-o", f"{folder}/out.so", "-"]
        source = "#include <Python.h>\n#include <omp.h>\nint threads() { return omp_get_max_threads(); }\n"
        try:
            done = subprocess.run([command, *flags], input=source, capture_output=True, text=True, timeout=LIMIT)
        except OSError as error:
            return [warn("compiler", f"{command}: {error.strerror}", cure)]
    if done.returncode:
        said = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr)
        return [warn("compiler", f"{command} fails: {brief(said)}", cure)]
    return [ok("compiler", f"{command} compiles with Python's header and OpenMP")]


# ---- simulators

FASTER = "see with top what else computes here; else a machine with more or faster cores"


def atari(args: Args) -> list[Result]:
    """Speed of emulation alone."""
    from common.envs import AtariEnvs  # here: its packages may be missing

    usable = usable_cores()[1]
    num_envs = min(args.num_envs, max(1, int(ENVS_A_CORE * usable)))  # more would only take longer to start
    envs = AtariEnvs("BreakoutNoFrameskip-v4", num_envs)
    try:
        envs.reset(seed=1)
        rng = np.random.default_rng(1)
        speed = num_envs * rate(lambda: envs.step(rng.integers(0, envs.single_action_space.n, num_envs)), seconds=2.0)
    finally:
        envs.close()
    finding = f"{speed:,.0f} agent steps/s, {4 * speed:,.0f} frames/s with {num_envs} Breakouts and no learning"
    slow = speed < SLOW_ATARI * min(num_envs, usable)
    return [warn_if(slow, "atari", finding + (f": slow for {usable:g} cores" if slow else ""), FASTER)]


def mujoco(args: Args) -> list[Result]:
    from common.control import make_env  # here: its packages may be missing

    env = make_env("HalfCheetah-v5")
    try:
        env.reset(seed=1)
        env.action_space.seed(1)
        obs = env.step(env.action_space.sample())[0]
        if not np.isfinite(obs).all():
            cure = "pip install --force-reinstall mujoco"
            return [fail("mujoco", "HalfCheetah-v5 is at no finite place after a step", cure)]
        speed = rate(lambda: env.step(env.action_space.sample()), seconds=0.5)
    finally:
        env.close()
    return [warn_if(speed < SLOW_MUJOCO, "mujoco", f"{speed:,.0f} steps/s of one HalfCheetah-v5", FASTER)]


def rate(step: Callable[[], Any], seconds: float) -> float:
    """Calls a second."""
    calls, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        step()
        calls += 1
    return calls / (time.perf_counter() - began)


# ---- all of it


def machine(args: Args) -> dict[str, Any]:
    from common.run import describe_machine  # here: its packages may be missing

    device = devices(args)[0]
    return describe_machine(device) | {"memory_gb": psutil.virtual_memory().total / 1e9}


def brief(text: object) -> str:
    return " ".join(str(text).split())[:300]


def bounded(check: Callable[[Args], Any], args: Args, seconds: float) -> Any:
    """What a check returns or raises.

    Raises:
        TimeoutError: it is left behind in its thread, or, without any seconds, was not begun.
    """
    if seconds <= 0:
        raise TimeoutError("not begun: the checks before it took all the time")
    answers: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()

    def work() -> None:
        try:
            answers.put((check(args), None))
        except Exception as error:
            answers.put((None, error))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        answer, error = answers.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(f"no answer within {seconds:.0f} s") from None
    except KeyboardInterrupt:
        thread.join(LIMIT)  # it may have files to take away
        raise
    if error:
        raise error
    return answer


def run(args: Args, say: Callable[[Result], None]) -> list[Result]:
    """All checks in turn. `say` hears of each result at once: a check that crashes the process is the next one."""
    checks = (packages, gpu, convolution, libraries, cores, memory, shared_memory, run_folder)
    checks += (ports, monitoring, backups, compiler, mujoco, atari)  # the longest last
    results: list[Result] = []
    ends = time.monotonic() + BUDGET
    for check in checks:
        name = check.__name__.replace("_", " ")
        try:
            found = bounded(check, args, min(LIMIT, ends - time.monotonic()))
        except TimeoutError as error:
            cure = "something hangs or is very slow here: try again, then take another machine"
            found = [fail(name, brief(error), cure)]
        except Exception as error:
            cure = "pip install -r requirements.txt; if it stays, report it with the output of --json"
            found = [fail(name, brief(f"{type(error).__name__}: {error}"), cure)]
        for result in found:
            say(result)
        results += found
    return results


def show(result: Result) -> None:
    print(f"{result.status:<6}{result.name:<15}{result.finding}", flush=True)
    if result.cure:
        print(f"      -> {result.cure}", flush=True)


def main() -> int:
    try:
        args = parse(Args, sys.argv[1:], __doc__)
        args.check()
        if args.peer is not None:
            faulthandler.dump_traceback_later(300, exit=True)  # a second or two a node
            found = peers(args)
    except UsageError as error:
        print("error:", brief(error).replace("--address", "--peer"), file=sys.stderr)
        return 2
    warnings.simplefilter("ignore")  # torch's pages about old drivers and cards, which one line says here
    try:
        facts = bounded(machine, args, FACTS)
    except Exception as error:
        facts = {"error": brief(error)}
    if not args.json and "error" not in facts:
        print(f"{facts['gpu'] or 'no GPU'}, {facts['cores']} cores of {facts['cpu']}, ", end="")
        print(f"{facts['memory_gb']:.3g} GB, torch {facts['packages']['torch']}, Python {facts['python']}", flush=True)
    say = (lambda result: None) if args.json else show
    results = run(args, say) if args.peer is None else [say(result) or result for result in found]
    totals = {status: sum(result.status == status for result in results) for status in ("ok", "warn", "fail")}
    status = int(totals["fail"] > 0)
    if args.json:
        rows = [asdict(result) for result in results]
        print(json.dumps({"machine": facts, "checks": rows, "totals": totals, "status": status}, indent=2))
        return status
    meaning = "cure what fails first" if status else "ready, read the warnings" if totals["warn"] else "ready"
    print(", ".join(f"{count} {kind}" for kind, count in totals.items()) + f": {meaning}")
    return status


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    faulthandler.dump_traceback_later(WATCHDOG, exit=True)  # status 1
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:  # a full disk below the output
        print(f"error: cannot print: {error.strerror}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
