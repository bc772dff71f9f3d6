"""The doctor finds what is wrong with a machine: every failure and warning with its condition played."""

import errno
import importlib.metadata
import ipaddress
import json
import os
import socket
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
import torch
from conftest import ROOT, run_script
from test_gpu import play_gpu

import common.control
import common.envs
import doctor
from common.errors import UsageError
from doctor import Args, Result

GB = 10**9


def only(results: list[Result], name: str) -> Result:
    (found,) = [result for result in results if result.name == name]
    return found


def is_ok(result: Result) -> bool:
    assert not result.cure or result.status != "ok"
    return result.status == "ok"


# ---- Python and packages


def play_versions(monkeypatch, **others: str | None) -> None:
    """Installed versions as in requirements.txt, except for `others`; None: not installed."""
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    versions = {
        line.split("==")[0].split("[")[0]: line.split("==")[1] for line in lines if line and not line.startswith("#")
    }
    versions |= {name.replace("_", "-"): version for name, version in others.items()}

    def version(name):
        if versions[name] is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "version", version)


def test_pinned_versions_are_ok_and_a_builds_own_suffix_is_none_of_them(monkeypatch):
    play_versions(monkeypatch, torch="2.13.0+cpu")
    assert all(map(is_ok, doctor.packages(Args())))


def test_the_versions_for_a_v100_are_ok_too(monkeypatch):
    play_versions(monkeypatch, torch="2.10.0+cu128")
    result = only(doctor.packages(Args()), "packages")
    assert is_ok(result)
    assert result.finding == "as in requirements-v100.txt"


def test_a_version_that_nobody_ran(monkeypatch):
    play_versions(monkeypatch, torch="2.9.1", ale_py="0.11.0")
    result = only(doctor.packages(Args()), "packages")
    assert result.status == "warn"
    assert result.finding in (f"torch 2.9.1 is not ==2.{minor}.0, ale-py 0.11.0 is not ==0.12.1" for minor in (10, 13))
    assert "pip install -r requirements" in result.cure


def test_a_missing_package_fails_and_one_that_only_tests_need_warns(monkeypatch):
    play_versions(monkeypatch, ruff=None)
    result = only(doctor.packages(Args()), "packages")
    assert (result.status, result.finding) == ("warn", "no ruff, which tests and benchmarks want")
    play_versions(monkeypatch, mujoco=None, ruff=None)
    result = only(doctor.packages(Args()), "packages")
    assert (result.status, result.finding) == ("fail", "missing: mujoco")
    assert result.cure.endswith("-m pip install -r requirements.txt")


def test_a_python_that_is_too_new(monkeypatch):
    monkeypatch.setattr(doctor.platform, "python_version", lambda: "3.14.2")
    result = only(doctor.packages(Args()), "python")
    assert (result.status, result.finding) == ("fail", "3.14.2, not >=3.11,<3.14")


@pytest.mark.parametrize(
    ("line", "finding", "cure"),
    [
        ("raise ModuleNotFoundError(\"No module named 'torch'\")", "No module named 'torch'", "pip install -r requir"),
        ("raise OSError('libcudart.so.13: cannot open')", "libcudart.so.13: cannot open", "unset LD_LIBRARY_PATH"),
    ],
)
def test_without_torch_one_line_says_how_to_get_it(tmp_path, line, finding, cure):
    (tmp_path / "torch.py").write_text(line)
    path = {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, ROOT / "doctor.py"], capture_output=True, text=True, env=os.environ | path)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.splitlines()[0] == f"fail  {finding}"
    assert cure in done.stderr.splitlines()[1]
    assert len(done.stderr.splitlines()) == 2


def test_a_bare_python_is_told_what_to_install():
    command = [sys.executable, "-S", ROOT / "doctor.py"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert "pip install -r requirements.txt" in done.stderr
    done = subprocess.run([*command, "--json"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "")
    (row,) = json.loads(done.stdout)["checks"]
    assert (row["name"], row["status"]) == ("packages", "fail")
    assert "pip install -r requirements.txt" in row["cure"]


@pytest.mark.slow
def test_what_keeps_python_itself_from_going_on_does_not_keep_the_doctor(tmp_path):
    source = (ROOT / "doctor.py").read_text()
    hung = source.replace("WATCHDOG = 40.0", "WATCHDOG = 4.0").replace(
        "def packages(args: Args) -> list[Result]:", HANG
    )
    (tmp_path / "doctor.py").write_text(hung)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, tmp_path / "doctor.py"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 1
    assert "Timeout" in done.stderr


HANG = """def packages(args):
    import ctypes
    ctypes.PyDLL(None).sleep(100)  # it keeps Python's lock, as a driver may


def unused(args):
"""


# ---- GPU


def play_nvidia(monkeypatch, cards=("GPU 0: NVIDIA A100",), driver="580.95.05", **gpu) -> None:
    """What nvidia-smi says; `gpu`: what torch says, see `play_gpu`."""
    answers = {"nvidia-smi -L": "\n".join(cards), "nvidia-smi": driver and f"| Driver Version: {driver}   CUDA |"}

    def run(command):
        return (0, answers[command], "") if answers.get(command) else (127, "", "not found")

    play_gpu(monkeypatch, **gpu)
    monkeypatch.setattr(doctor.collect_env, "run", run)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: types.SimpleNamespace(total_memory=80 * GB))
    monkeypatch.setattr(doctor, "PCI", Path("/nonexistent"))
    monkeypatch.setitem(sys.modules, "pynvml", None)  # its import fails
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_a_good_gpu(monkeypatch):
    play_nvidia(monkeypatch)
    results = doctor.gpu(Args())
    assert [(result.name, result.status) for result in results] == [
        ("gpu", "ok"),
        ("architecture", "ok"),
        ("driver", "ok"),
    ]
    assert results[0].finding == "0: NVIDIA A100, 80 GB"
    assert results[2].finding == "580.95.05 for CUDA 13.0"


def test_no_gpu_is_a_warning_unless_one_was_asked_for(monkeypatch):
    play_nvidia(monkeypatch, cards=(), driver=None, count=0)
    (result,) = doctor.gpu(Args())
    assert result.status == "warn"
    assert "no NVIDIA card" in result.finding
    assert doctor.gpu(Args(device="cuda"))[0].status == "fail"
    assert is_ok(doctor.gpu(Args(device="cpu"))[0])


def test_a_card_on_the_bus_that_no_driver_knows(monkeypatch, tmp_path):
    play_nvidia(monkeypatch, cards=(), driver=None, count=0)
    monkeypatch.setattr(doctor, "PCI", tmp_path)
    monkeypatch.setattr(doctor, "DEV", tmp_path)
    for number, (vendor, kind) in enumerate([("0x10de", "0x040300"), ("0x8086", "0x030000")]):  # sound; Intel
        (tmp_path / f"0000:0{number}").mkdir()
        (tmp_path / f"0000:0{number}" / "vendor").write_text(vendor + "\n")
        (tmp_path / f"0000:0{number}" / "class").write_text(kind + "\n")
    assert doctor.gpu(Args())[0].status == "warn"
    (tmp_path / "0000:01" / "vendor").write_text("0x10de\n")
    (result,) = doctor.gpu(Args())
    assert result.status == "fail"
    assert result.finding == "an NVIDIA card (PCI 0000:01) is here and torch cannot use it: there is no /dev/nvidia0"
    assert "--gpus all" in result.cure


def test_a_driver_that_nvidia_smi_does_not_name_is_asked_through_nvml(monkeypatch):
    play_nvidia(monkeypatch, driver=None)
    nvml = types.SimpleNamespace(nvmlInit=lambda: None, nvmlSystemGetDriverVersion=lambda: "590.1")
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert only(doctor.gpu(Args()), "driver").finding == "590.1 for CUDA 13.0"


def test_a_cpu_build_beside_a_card(monkeypatch):
    play_nvidia(monkeypatch, count=0)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")
    (result,) = doctor.gpu(Args())
    assert result.status == "fail"
    assert "NVIDIA A100 is here and torch cannot use it: torch 2.13.0+cpu is built without CUDA" in result.finding
    assert result.cure == "pip install --force-reinstall torch==2.13.0"


@pytest.mark.parametrize("value", ["", "-1"])
def test_a_variable_that_hides_the_card(monkeypatch, value):
    play_nvidia(monkeypatch, count=0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    (result,) = doctor.gpu(Args())
    assert (result.status, result.cure) == ("fail", "unset CUDA_VISIBLE_DEVICES")


@pytest.mark.parametrize(
    ("cuda", "driver", "fits"),
    [
        ("13.0", "580.65.06", True),
        ("13.0", "575.57.08", False),
        ("12.8", "525.60.13", True),
        ("12.8", "580.65.06", True),
        ("12.8", "470.256.02", False),
        ("11.8", "450.80.02", True),
        ("11.8", "450.51.06", False),
        ("14.0", "600.1", True),  # nothing is known of it
        (None, "580.65.06", True),  # ROCm
    ],
)
def test_drivers_and_builds(monkeypatch, cuda, driver, fits):
    play_nvidia(monkeypatch, driver=driver)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    # a card that torch reaches all the same has NVIDIA's package for it
    assert only(doctor.gpu(Args()), "driver").status == ("ok" if fits else "warn")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor, "cuda_failure", lambda: "something else")
    monkeypatch.setattr(doctor, "DEV", Path("/nonexistent"))
    (result,) = doctor.gpu(Args())
    assert result.status == "fail"
    assert (f"driver {driver} is too old for CUDA {cuda}" in result.finding) == (not fits)
    assert ("install a newer driver" in result.cure) == (not fits)


def test_a_card_that_does_not_start_is_told_in_torchs_words(monkeypatch, tmp_path):
    play_nvidia(monkeypatch, count=0)
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(doctor, "DEV", tmp_path)
    monkeypatch.setattr(doctor, "cuda_failure", lambda: "CUDA unknown error")
    (result,) = doctor.gpu(Args())
    assert (result.status, "torch cannot use it: CUDA unknown error" in result.finding) == ("fail", True)


def test_a_container_without_nvidia_smi(monkeypatch):
    play_nvidia(monkeypatch, cards=(), driver=None)
    result = only(doctor.gpu(Args()), "driver")
    assert (result.status, "NVIDIA_DRIVER_CAPABILITIES" in result.cure) == ("warn", True)


@pytest.mark.parametrize(
    ("capability", "cure"), [((7, 0), "requirements-v100.txt"), ((12, 1), "install a build that has it")]
)
def test_a_card_that_the_build_has_no_code_for(monkeypatch, capability, cure):
    play_nvidia(monkeypatch, capability=capability, archs=("sm_75", "sm_80", "sm_90"), name="Tesla V100")
    result = only(doctor.gpu(Args()), "architecture")
    assert result.status == "fail"
    assert f"Tesla V100 is sm_{capability[0]}{capability[1]}, torch" in result.finding
    assert cure in result.cure
    assert doctor.devices(Args()) == [torch.device("cpu")]


def test_the_convolution_runs_in_all_precisions_and_is_right():
    results = doctor.convolution(Args(device="cpu"))
    assert [result.name for result in results] == ["fp32 cpu", "fp16 cpu", "bf16 cpu"]
    assert all(map(is_ok, results))
    assert float(results[0].finding.split()[-1]) < 1e-4


@pytest.mark.parametrize("faulty", ["forward", "backward", "nan"])
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_a_convolution_that_computes_something_else(monkeypatch, precision, faulty):
    true = torch.nn.functional.conv2d

    def conv2d(x, weight, stride):
        out = true(x, weight, stride=stride)
        if x.dtype == torch.float64:  # the reference
            return out
        if faulty == "nan":
            return out * float("nan")
        scale = 1.1 if faulty == "forward" else 1.0
        if faulty == "backward" and stride == 4:
            out.register_hook(lambda gradient: gradient * 1.1)
        return out * scale

    monkeypatch.setattr(doctor.nn.functional, "conv2d", conv2d)
    result = doctor.convolve(doctor.CPU, precision)
    assert result.status == "fail"
    assert "the convolution is wrong by" in result.finding


def test_fp32_is_not_taken_for_tf32(monkeypatch):
    true, seen = torch.nn.functional.conv2d, []

    def conv2d(*args, **kwargs):
        seen.append(torch.backends.cudnn.conv.fp32_precision)
        return true(*args, **kwargs)

    monkeypatch.setattr(doctor.nn.functional, "conv2d", conv2d)
    before = torch.backends.cudnn.conv.fp32_precision
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    try:
        doctor.convolution_error(doctor.CPU, "fp32")
        assert seen == ["tf32", "tf32", "ieee", "ieee"]  # the reference is float64
        assert torch.backends.cudnn.conv.fp32_precision == "tf32"
    finally:
        torch.backends.cudnn.conv.fp32_precision = before


def failing(error):
    def convolution_error(device, precision):
        raise error

    return convolution_error


def test_convolutions_that_raise(monkeypatch):
    card = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    kernel = RuntimeError("CUDA error: no kernel image is available\nmore lines")
    monkeypatch.setattr(doctor, "convolution_error", failing(kernel))
    for precision in ("fp32", "fp16", "bf16"):
        result = doctor.convolve(card, precision)
        assert (result.name, result.status) == (f"{precision} cuda:0", "fail")
        assert "no kernel image is available more lines" in result.finding
    assert is_ok(doctor.convolve(doctor.CPU, "fp16"))  # nothing takes it there
    assert doctor.convolve(doctor.CPU, "fp32").status == "fail"
    monkeypatch.setattr(doctor, "convolution_error", failing(torch.OutOfMemoryError("CUDA out of memory")))
    result = doctor.convolve(card, "fp32")
    assert (result.status, "nvidia-smi" in result.cure) == ("fail", True)


def test_bf16_that_a_card_only_emulates_is_said(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: including_emulation)
    monkeypatch.setattr(doctor, "convolution_error", failing(RuntimeError("not to be run")))
    result = doctor.convolve(torch.device("cuda", 0), "bf16")
    assert is_ok(result)
    assert "--amp takes fp16" in result.finding


def test_every_card_that_the_build_fits_is_tried(monkeypatch):
    play_nvidia(monkeypatch, count=2)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    monkeypatch.setattr(doctor, "convolution_error", lambda device, precision: float(device.index))
    results = doctor.convolution(Args())
    assert {(result.name, result.status) for result in results} == {
        (f"{precision} cuda:{i}", "fail" if i else "ok") for i in (0, 1) for precision in doctor.TOLERANCE
    }


@pytest.fixture
def cuda_build(monkeypatch):
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)


def test_torchs_own_cudnn(monkeypatch, cuda_build, tmp_path):
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{tmp_path}:/nonexistent:")
    (tmp_path / "libcuda.so.1").touch()  # the driver's own
    (result,) = doctor.libraries(Args())
    assert is_ok(result)
    assert result.finding == "91900"


@pytest.mark.parametrize("name", ["libcudnn.so.8", "libcublas.so.12", "libcudart.so"])
def test_a_library_before_torchs_own(monkeypatch, cuda_build, tmp_path, name):
    (tmp_path / name).touch()
    monkeypatch.setenv("LD_LIBRARY_PATH", f"/nonexistent:{tmp_path}")
    (result,) = doctor.libraries(Args())
    assert result.status == "warn"
    assert f"{tmp_path} ({name})" in result.finding
    assert result.cure.startswith("unset LD_LIBRARY_PATH")
    assert is_ok(doctor.libraries(Args(device="cpu"))[0])


def test_stubs_before_the_drivers_library(monkeypatch, cuda_build, tmp_path):
    (tmp_path / "stubs").mkdir()
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path / "stubs"))
    assert doctor.libraries(Args())[0].status == "warn"


def test_where_the_loaded_cudnn_lies_is_said(monkeypatch, cuda_build):
    maps = [types.SimpleNamespace(path=path) for path in ("[heap]", "/opt/cudnn/libcudnn.so.9", "/lib/libc.so.6")]
    monkeypatch.setattr(doctor.psutil.Process, "memory_maps", lambda process: maps)
    assert doctor.libraries(Args())[0].finding == "91900 from /opt/cudnn"


def test_a_cudnn_of_another_version_or_none(monkeypatch, cuda_build):
    def version():
        raise RuntimeError("cuDNN version incompatibility: compiled against (9, 19, 0) but found (8, 5, 0)")

    monkeypatch.setattr(torch.backends.cudnn, "version", version)
    (result,) = doctor.libraries(Args())
    assert result.status == "fail"
    assert "found (8, 5, 0)" in result.finding
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: None)
    assert doctor.libraries(Args())[0].status == "fail"


# ---- CPU, memory


def play_cores(monkeypatch, tmp_path, visible: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(visible)))
    monkeypatch.setattr(doctor, "CGROUP", tmp_path)
    (tmp_path / "cpu").mkdir(exist_ok=True)


@pytest.mark.parametrize(
    ("files", "usable"),
    [
        ({}, 8),
        ({"cpu.max": "max 100000\n"}, 8),
        ({"cpu.max": "250000 100000\n"}, 2.5),
        ({"cpu.max": "1600000 100000\n"}, 8),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 8),
        ({"cpu/cpu.cfs_quota_us": "200000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2),
    ],
)
def test_a_containers_quota(monkeypatch, tmp_path, files, usable):
    play_cores(monkeypatch, tmp_path, 8)
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert doctor.usable_cores() == (8, usable)
    (result,) = doctor.cores(Args())
    if usable == 8:
        assert is_ok(result)
    else:
        assert result.status == "warn"
        assert f"8 are visible, the container's quota is {usable:g}" in result.finding
        assert f"taskset the command to {int(usable)} of them" in result.cure


def test_environments_and_cores(monkeypatch, tmp_path):
    play_cores(monkeypatch, tmp_path, 2)
    assert is_ok(doctor.cores(Args(num_envs=8))[0])
    (result,) = doctor.cores(Args(num_envs=9))
    assert (result.status, result.cure) == ("warn", "--num-envs 8, or a machine with 3 cores")
    play_cores(monkeypatch, tmp_path, 64)
    assert doctor.cores(Args(num_envs=8))[0].finding == "64 for --num-envs 8, 56 of them without an emulator"


def test_memory_against_the_replay_memory(monkeypatch):
    monkeypatch.setattr(common.gpu, "free_memory", lambda device: 9 * GB)
    monkeypatch.setattr(doctor, "free_memory", lambda device: 9 * GB)
    assert all(map(is_ok, doctor.memory(Args())))
    monkeypatch.setattr(doctor, "free_memory", lambda device: 8 * GB)  # both do not fit
    assert only(doctor.memory(Args()), "replay memory").status == "fail"
    monkeypatch.setattr(doctor, "free_memory", lambda device: 6 * GB)
    result = only(doctor.memory(Args()), "replay memory")
    assert result.status == "fail"
    assert result.finding == "--buffer-size 1000000 needs 7.42 GB of memory beside training, 4.98 GB are free"
    fits = int(result.cure.split()[1])
    assert result.cure.startswith(f"--buffer-size {fits} would fit; --buffer-size 0")
    assert all(map(is_ok, doctor.memory(Args(buffer_size=fits))))
    assert [result.name for result in doctor.memory(Args(buffer_size=0))] == ["memory"]


def test_memory_that_is_full(monkeypatch):
    free = types.SimpleNamespace(available=GB // 2, total=32 * GB)
    monkeypatch.setattr(doctor.psutil, "virtual_memory", lambda: free)
    result = only(doctor.memory(Args(buffer_size=0)), "memory")
    assert (result.status, "0.5 GB are free" in result.finding) == ("fail", True)


def test_shared_memory(monkeypatch):
    usage = types.SimpleNamespace(free=2**26)
    monkeypatch.setattr(doctor.psutil, "disk_usage", lambda path: usage)
    (result,) = doctor.shared_memory(Args())
    assert result.status == "warn"
    assert result.finding.startswith("64 MiB free")
    assert "--shm-size" in result.cure
    usage.free = 2**30
    assert is_ok(doctor.shared_memory(Args())[0])

    def none(path):
        raise FileNotFoundError(errno.ENOENT, "No such file or directory")

    monkeypatch.setattr(doctor.psutil, "disk_usage", none)
    assert doctor.shared_memory(Args())[0].status == "warn"


# ---- the folder of the runs


@pytest.fixture
def no_cloud(monkeypatch):
    monkeypatch.setattr(doctor, "detect", lambda: None)
    monkeypatch.setattr(doctor, "maker", lambda: None)


def mount(monkeypatch, *mounts: tuple[str, str]) -> None:
    disks = [types.SimpleNamespace(mountpoint=str(where), fstype=kind) for where, kind in mounts]
    monkeypatch.setattr(doctor.psutil, "disk_partitions", lambda all: disks)


def test_a_good_folder_and_nothing_is_left_in_it(monkeypatch, tmp_path, no_cloud):
    mount(monkeypatch, ("/", "ext4"))
    monkeypatch.setattr(doctor, "free_disk", lambda folder: 100 * GB)
    new = tmp_path / "data" / "runs"
    results = doctor.run_folder(Args(runs_dir=str(new)))
    assert all(map(is_ok, results))
    names = ["run folder", "disk", "replay files", "fsync", "spot notice", "checkpoint"]
    assert [result.name for result in results] == names
    assert list(tmp_path.iterdir()) == []

    (new / "a-run").mkdir(parents=True)
    (new / "a-run" / "status.json").write_text("{}")
    before = sorted(tmp_path.rglob("*"))
    doctor.run_folder(Args(runs_dir=str(new)))
    assert sorted(tmp_path.rglob("*")) == before


def test_a_checkpoint_is_written_whole_and_durably(monkeypatch, tmp_path):
    synced, sizes = [], []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_size))
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda old, new: sizes.append(os.path.getsize(old)) or replace(old, new))
    doctor.checkpoint_seconds(tmp_path)
    assert sizes[0] >= 20_000_000
    assert sizes[0] in synced


@pytest.mark.parametrize("kind", ["nfs4", "fuse.s3fs", "9p", "cifs", "lustre"])
def test_a_network_file_system(monkeypatch, tmp_path, kind):
    mount(monkeypatch, ("/", "ext4"), (tmp_path, kind))
    result = doctor.file_system(tmp_path / "runs")
    assert result.status == "warn"
    assert f"is on {kind}, a network file system" in result.finding
    assert "--mirror" in result.cure
    assert is_ok(doctor.file_system(tmp_path.parent))


@pytest.mark.parametrize("kind", ["tmpfs", "overlay"])
def test_a_file_system_that_goes_with_the_machine(monkeypatch, tmp_path, kind):
    mount(monkeypatch, (tmp_path, "ext4"), (tmp_path, kind), ("/", "nfs"))
    result = doctor.file_system(tmp_path)
    assert (result.status, "lost with the machine" in result.finding) == ("warn", True)


def test_a_disk_that_is_full_or_nearly(monkeypatch, tmp_path, no_cloud):
    mount(monkeypatch, ("/", "ext4"))
    args = Args(runs_dir=str(tmp_path))
    monkeypatch.setattr(doctor, "free_disk", lambda folder: 9 * GB)
    results = doctor.run_folder(args)
    assert (only(results, "disk").status, only(results, "replay files").status) == ("warn", "ok")
    monkeypatch.setattr(doctor, "free_disk", lambda folder: GB // 2)
    results = doctor.run_folder(args)
    assert (only(results, "disk").status, only(results, "replay files").status) == ("fail", "fail")
    assert "GB of disk for" in only(results, "replay files").finding


@pytest.mark.parametrize("call", ["write", "fsync", "lock"])
def test_a_folder_that_no_run_could_use(monkeypatch, tmp_path, no_cloud, call):
    def refuse(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    where = {"write": (doctor, "replacing"), "fsync": (os, "fsync"), "lock": (doctor.fcntl, "flock")}[call]
    monkeypatch.setattr(*where, refuse)
    result = doctor.run_folder(Args(runs_dir=str(tmp_path / "runs")))[-1]
    assert (result.name, result.status) == ("run folder", "fail")
    assert "No space left on device" in result.finding
    assert ("no locks" in result.finding) == (call == "lock")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made(tmp_path, no_cloud):
    (tmp_path / "file").write_text("mine")
    result = doctor.run_folder(Args(runs_dir=str(tmp_path / "file" / "runs")))[-1]
    assert (result.name, result.status) == ("run folder", "fail")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_slow_fsync(monkeypatch, tmp_path, no_cloud):
    monkeypatch.setattr(os, "fsync", lambda descriptor: time.sleep(0.02))
    assert is_ok(only(doctor.run_folder(Args(runs_dir=str(tmp_path))), "fsync"))
    monkeypatch.setattr(doctor, "SLOW_FSYNC", 0.015)
    result = only(doctor.run_folder(Args(runs_dir=str(tmp_path))), "fsync")
    assert result.status == "warn"
    assert float(result.finding.split()[0]) > 19


def test_a_checkpoint_against_the_notice(monkeypatch, no_cloud):
    (spot, result) = doctor.notice(1.0)
    assert is_ok(spot)
    assert is_ok(result)
    assert "19 of 30 s" in result.finding  # 6 s to see it, three times the save, 1 s to leave, 9 s for a mirror
    result = doctor.notice(8.0)[-1]
    assert (result.status, "40 of 30 s" in result.finding) == ("warn", True)
    monkeypatch.setattr(doctor, "detect", doctor.CLOUDS["aws"])
    (spot, result) = doctor.notice(8.0)
    assert spot.finding == "AWS answers and gives 120 s"
    assert (is_ok(result), "40 of 120 s" in result.finding) == (True, True)


def test_a_cloud_that_does_not_answer(monkeypatch, no_cloud):
    monkeypatch.setattr(doctor, "maker", lambda: "aws")
    (spot, result) = doctor.notice(8.0)
    assert (spot.status, "AWS does not answer at 169.254.169.254" in spot.finding) == ("warn", True)
    assert is_ok(result)


# ---- ports, tools


def listen(monkeypatch, *listeners: tuple[str, int, int | None], status="LISTEN") -> None:
    found = [
        types.SimpleNamespace(status=status, laddr=types.SimpleNamespace(ip=ip, port=port), pid=pid)
        for ip, port, pid in listeners
    ]
    monkeypatch.setattr(doctor.psutil, "net_connections", lambda kind: found)


@pytest.mark.parametrize("ip", ["0.0.0.0", "::", "10.1.2.3", "::ffff:10.1.2.3"])
@pytest.mark.parametrize(("port", "program"), [(6006, "TensorBoard"), (8888, "Jupyter")])
def test_a_port_that_is_open_to_the_network(monkeypatch, ip, port, program):
    listen(monkeypatch, (ip, port, os.getpid()))
    (result,) = doctor.ports(Args())
    assert result.status == "warn"
    assert f"({os.getpid()}) listens on {ipaddress.ip_address(ip)} port {port}" in result.finding
    assert f"bind {program} to 127.0.0.1" in result.cure
    assert f"ssh -L {port}:localhost:{port}" in result.cure


@pytest.mark.parametrize("pid", [None, 2**22 + 1])
def test_a_listener_that_cannot_be_named(monkeypatch, pid):
    listen(monkeypatch, ("0.0.0.0", 6006, pid))
    assert doctor.ports(Args())[0].finding.startswith("a process of another user listens on 0.0.0.0")


@pytest.mark.parametrize("ip", ["127.0.0.1", "::1", "::ffff:127.0.0.1"])
def test_a_port_that_only_this_machine_reaches(monkeypatch, ip):
    listen(monkeypatch, (ip, 6006, 1), ("0.0.0.0", 22, 1))
    assert is_ok(doctor.ports(Args())[0])
    listen(monkeypatch, ("0.0.0.0", 6006, 1), status="ESTABLISHED")
    assert is_ok(doctor.ports(Args())[0])


def test_a_real_listener_is_seen(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setattr(doctor, "PORTS", {port: "Test"})
        assert is_ok(doctor.ports(Args())[0])
        connections = doctor.psutil.net_connections

        def on_all_interfaces(kind):
            return [
                one._replace(laddr=one.laddr._replace(ip="0.0.0.0")) if one.laddr and one.laddr.port == port else one
                for one in connections(kind)
            ]

        monkeypatch.setattr(doctor.psutil, "net_connections", on_all_interfaces)
        (result,) = doctor.ports(Args())
    assert (result.status, f"({os.getpid()})" in result.finding) == ("warn", True)


def test_listeners_that_this_user_may_not_see(monkeypatch):
    def refuse(kind):
        raise doctor.psutil.AccessDenied

    monkeypatch.setattr(doctor.psutil, "net_connections", refuse)
    (result,) = doctor.ports(Args())
    assert (result.status, "sudo ss" in result.cure) == ("warn", True)


@pytest.mark.parametrize(
    ("gpu", "installed", "good"),
    [
        (False, {"top"}, True),
        (False, {"nvtop"}, False),
        (True, {"top"}, False),
        (True, {"htop", "nvidia-smi"}, True),
        (True, set(), False),
    ],
)
def test_monitoring_tools(monkeypatch, gpu, installed, good):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: name if name in installed else None)
    (result,) = doctor.monitoring(Args())
    assert result.status == ("ok" if good else "warn")
    assert good or result.cure.startswith("apt-get install htop")


def test_the_reminder_of_backups_leaves_a_good_machine_quiet():
    (result,) = doctor.backups(Args())
    assert is_ok(result)
    assert "snapshots" in result.finding


def test_a_compiler_that_is_missing_or_without_headers(monkeypatch, tmp_path):
    monkeypatch.delenv("CXX", raising=False)
    assert is_ok(doctor.compiler(Args())[0])
    monkeypatch.setattr(doctor.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    (result,) = doctor.compiler(Args())
    assert (result.status, "Python.h" in result.finding) == ("warn", True)
    monkeypatch.setenv("CXX", str(tmp_path / "g++"))
    (result,) = doctor.compiler(Args())
    assert (result.status, "No such file" in result.finding) == ("warn", True)
    assert "apt-get install g++ python3-dev" in result.cure


# ---- simulators


@pytest.fixture
def brief_rates(monkeypatch):
    rate = doctor.rate
    monkeypatch.setattr(doctor, "rate", lambda step, seconds: rate(step, 0.05))


def test_emulators_play_and_are_measured(monkeypatch, brief_rates):
    monkeypatch.setattr(doctor, "SLOW_ATARI", 1)
    monkeypatch.setattr(doctor, "usable_cores", lambda: (2, 0.5))
    (result,) = doctor.atari(Args(num_envs=64))
    assert is_ok(result)
    assert "with 2 Breakouts" in result.finding  # no more than a small machine has use for
    steps, frames = [float(word.replace(",", "")) for word in result.finding.split() if word[0].isdigit()][:2]
    assert frames == pytest.approx(4 * steps, rel=0.05)
    assert steps > 10


class Still:
    """A simulator whose step takes a given time, or whose place is nowhere."""

    single_action_space = types.SimpleNamespace(n=4)

    def __init__(self, *args, seconds=0.0, place=0.0):
        self.seconds, self.place, self.closed = seconds, place, False
        self.action_space = types.SimpleNamespace(seed=lambda seed: None, sample=lambda: None)

    def reset(self, seed):
        pass

    def step(self, actions):
        time.sleep(self.seconds)
        return [self.place], 0.0, False, False, {}

    def close(self):
        self.closed = True


@pytest.mark.parametrize(("seconds", "status"), [(0.02, "warn"), (0.0, "ok")])
def test_slow_emulators(monkeypatch, brief_rates, seconds, status):
    monkeypatch.setattr(common.envs, "AtariEnvs", lambda *args: Still(seconds=seconds))
    monkeypatch.setattr(doctor, "usable_cores", lambda: (2, 2.0))
    (result,) = doctor.atari(Args(num_envs=8))  # at least 1,000 steps/s are asked of two cores, so 8 ms for eight games
    assert result.status == status
    assert ("slow for 2 cores" in result.finding) == (status == "warn")


def test_mujoco_steps():
    (result,) = doctor.mujoco(Args())
    assert result.status != "fail"
    assert "steps/s of one HalfCheetah-v5" in result.finding


@pytest.mark.parametrize(
    ("seconds", "place", "status"), [(0.002, 0.0, "warn"), (0.0, 0.0, "ok"), (0.0, float("nan"), "fail")]
)
def test_a_mujoco_that_is_slow_or_nowhere(monkeypatch, brief_rates, seconds, place, status):
    env = Still(seconds=seconds, place=place)
    monkeypatch.setattr(common.control, "make_env", lambda env_id: env)
    assert doctor.mujoco(Args())[0].status == status
    assert env.closed


# ---- all of it


CHECKS = ("packages", "gpu", "convolution", "libraries", "cores", "memory", "shared_memory", "run_folder", "ports")
CHECKS += ("monitoring", "backups", "compiler", "mujoco", "atari")


@pytest.fixture
def doctors_main(monkeypatch, capsys):
    """Call `main` with checks that answer ok or as given; returns status, standard output, standard error."""

    def call(*flags: str, **checks):
        for name in CHECKS:
            check = checks.get(name, lambda args, name=name: [doctor.ok(name, "good")])
            monkeypatch.setattr(doctor, name, named(check, name))
        monkeypatch.setattr(sys, "argv", ["doctor.py", *flags])
        return doctor.main(), *capsys.readouterr()

    def named(check, name):
        def checked(args):
            return check(args)

        checked.__name__ = name
        return checked

    return call


def test_status_0_and_1(doctors_main):
    status, out, err = doctors_main()
    assert (status, err) == (0, "")
    assert out.splitlines()[-1] == f"{len(CHECKS)} ok, 0 warn, 0 fail: ready"
    status, out, _ = doctors_main(ports=lambda args: [doctor.warn("ports", "open", "close them")])
    assert status == 0
    assert "warn  ports          open\n      -> close them\n" in out
    assert out.splitlines()[-1] == f"{len(CHECKS) - 1} ok, 1 warn, 0 fail: ready, read the warnings"
    status, out, _ = doctors_main(memory=lambda args: [doctor.fail("memory", "full", "more")])
    assert status == 1
    assert out.splitlines()[-1].endswith("1 fail: cure what fails first")


@pytest.mark.parametrize(
    "error", [RuntimeError("two\nlines"), ImportError("No module named 'mujoco'"), UsageError("u")]
)
def test_a_check_that_raises_fails_and_the_others_go_on(doctors_main, error):
    def raises(args):
        raise error

    status, out, err = doctors_main(shared_memory=raises)
    assert (status, err) == (1, "")
    assert f"fail  shared memory  {type(error).__name__}: {' '.join(str(error).split())}\n      -> " in out
    assert "ok    atari          good" in out


def test_a_check_that_hangs_fails_and_the_others_go_on(monkeypatch, doctors_main):
    monkeypatch.setattr(doctor, "LIMIT", 0.2)
    status, out, _ = doctors_main(gpu=lambda args: time.sleep(20))
    assert status == 1
    assert "fail  gpu            no answer within" in out
    assert "ok    atari          good" in out


def test_all_checks_together_have_a_limit(monkeypatch, doctors_main):
    monkeypatch.setattr(doctor, "BUDGET", 0.3)
    began, begun = time.monotonic(), []
    status, out, _ = doctors_main(gpu=lambda args: time.sleep(20), run_folder=lambda args: begun.append(1) or [])
    assert time.monotonic() - began < doctor.FACTS + 3
    assert status == 1
    assert "fail  run folder     not begun" in out
    assert not begun


def test_json(doctors_main):
    status, out, err = doctors_main("--json", memory=lambda args: [doctor.fail("memory", "full", "more")])
    content = json.loads(out)
    assert (status, err) == (1, "")
    assert content["status"] == 1
    assert content["totals"] == {"ok": len(CHECKS) - 1, "warn": 0, "fail": 1}
    assert {"name": "memory", "status": "fail", "finding": "full", "cure": "more"} in content["checks"]
    assert content["machine"]["cores"] == os.cpu_count()
    assert content["machine"]["packages"]["torch"] == str(torch.__version__)


def test_a_machine_that_cannot_be_described_is_checked_all_the_same(monkeypatch, doctors_main):
    def raises(args):
        raise ImportError("No module named 'tensorboard'")

    monkeypatch.setattr(doctor, "machine", raises)
    assert doctors_main()[0] == 0
    status, out, _ = doctors_main("--json")
    assert (status, json.loads(out)["machine"]) == (0, {"error": "No module named 'tensorboard'"})


@pytest.mark.parametrize(
    "flags",
    [
        ("--num-envs", "0"),
        ("--num-envs", "many"),
        ("--buffer-size", "-1"),
        ("--runs-dir", ""),
        ("--runs-dir", __file__),
        ("--device", "tpu"),
        ("--amp",),
    ],
    ids=" ".join,
)
def test_bad_flags_are_one_line_and_status_2(monkeypatch, capsys, flags):
    monkeypatch.setattr(sys, "argv", ["doctor.py", *flags])
    assert doctor.main() == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert flags[0] in err
    assert len(err.splitlines()) == 1


@pytest.mark.slow
def test_the_whole_program_on_this_machine(tmp_path):
    began = time.monotonic()
    done = run_script("doctor.py", "--json", "--num-envs", "2", "--runs-dir", "new/runs", cwd=tmp_path)
    assert time.monotonic() - began < 30
    assert done.stderr == ""
    content = json.loads(done.stdout)
    assert done.returncode == content["status"] == int(content["totals"]["fail"] > 0)
    assert sum(content["totals"].values()) == len(content["checks"])
    ran = {row["name"]: row["status"] for row in content["checks"]}
    for name in ("python", "fp32 cpu", "run folder", "fsync", "checkpoint", "ports", "atari", "mujoco"):
        assert ran.get(name) in ("ok", "warn"), content
    assert all(bool(row["cure"]) == (row["status"] != "ok") for row in content["checks"])
    assert list(tmp_path.iterdir()) == []
