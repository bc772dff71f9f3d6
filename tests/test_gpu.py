"""Choice of the device and the machine's scalars, with GPUs played where none is."""

import types
import warnings

import pytest
import torch

import common.gpu
from common.errors import UsageError
from common.gpu import Monitor, architecture_is_built, choose_device, free_memory, require_memory


def play_gpu(monkeypatch, capability=(8, 0), archs=("sm_70", "sm_80", "sm_90"), count=1, name="NVIDIA A100"):
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: name)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: list(archs))
    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    return chosen


def test_auto_takes_the_gpu_if_there_is_one(monkeypatch):
    play_gpu(monkeypatch)
    assert choose_device("auto") == torch.device("cuda", 0)
    assert choose_device("cpu") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == torch.device("cpu")


def test_the_chosen_gpu_is_the_one_whose_streams_are_taken(monkeypatch):
    chosen = play_gpu(monkeypatch, count=2)
    assert choose_device("cuda:1") == torch.device("cuda", 1)
    assert chosen == [torch.device("cuda", 1)]


def test_a_second_gpu_that_is_not_there(monkeypatch):
    play_gpu(monkeypatch)
    with pytest.raises(UsageError, match=r"--device cuda:1: this machine shows 1 GPU"):
        choose_device("cuda:1")


def test_a_build_without_cuda_and_a_machine_without_driver(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    with pytest.raises(UsageError, match="built without CUDA"):
        choose_device("cuda")
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)

    def no_driver():
        raise RuntimeError("Found no NVIDIA driver on your system.\nMore words")

    monkeypatch.setattr(torch.cuda, "init", no_driver)
    with pytest.raises(UsageError, match=r"no usable GPU \(Found no NVIDIA driver on your system\.\)$"):
        choose_device("cuda")


@pytest.mark.parametrize("name", ["gpu", "cuda:x", "cuda:-1", "", "mps"])
def test_a_name_that_is_none(name):
    with pytest.raises(UsageError, match="must be auto, cpu, cuda or cuda:N"):
        choose_device(name)


@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_a_v100_and_a_build_that_dropped_it(monkeypatch, name):
    play_gpu(monkeypatch, capability=(7, 0), archs=("sm_75", "sm_80", "sm_90", "sm_120"), name="Tesla V100-SXM2-16GB")
    with pytest.raises(UsageError, match=r"V100.* is sm_70, but torch .*requirements-v100\.txt"):
        choose_device(name)
    assert choose_device("cpu").type == "cpu"


@pytest.mark.parametrize(
    ("capability", "archs", "built"),
    [
        ((8, 6), ["sm_80"], True),  # RTX 3090 runs binaries of its major version's lower minor ones
        ((8, 0), ["sm_86"], False),
        ((9, 0), ["sm_80", "sm_86"], False),
        ((9, 0), ["sm_80", "compute_80"], True),  # PTX is compiled for newer cards
        ((7, 0), ["sm_75", "compute_120"], False),
        ((12, 0), ["sm_90", "sm_120"], True),
        ((9, 0), ["sm_90a"], True),
        ((9, 4), ["gfx942"], True),
    ],
)
def test_architectures(capability, archs, built):
    assert architecture_is_built(capability, archs) == built


def test_a_cpu_run_logs_the_process_and_nothing_of_a_gpu():
    values = Monitor(torch.device("cpu")).scalars()
    assert set(values) == {"system/cpu_percent", "system/ram_mib"}
    assert 50 < values["system/ram_mib"] < 100_000


class NvmlError(Exception):
    pass


def play_nvml(monkeypatch, power=lambda handle: 250_000, init=lambda: None):
    monkeypatch.setattr(
        common.gpu,
        "pynvml",
        types.SimpleNamespace(
            NVMLError=NvmlError,
            NVML_TEMPERATURE_GPU=0,
            nvmlInit=init,
            nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
            nvmlDeviceGetUtilizationRates=lambda handle: types.SimpleNamespace(gpu=93),
            nvmlDeviceGetTemperature=lambda handle, sensor: 61,
            nvmlDeviceGetPowerUsage=power,
        ),
    )
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda device: 3 * 2**20)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(uuid="12-34"))


def refuse(*args):
    raise NvmlError


def test_a_gpu_run_logs_memory_and_load(monkeypatch):
    play_nvml(monkeypatch)
    monitor = Monitor(torch.device("cuda", 0))
    values = monitor.scalars()
    assert monitor.handle == "GPU-12-34"
    assert values["gpu/memory_allocated_mib"] == values["gpu/memory_reserved_mib"] == values["gpu/memory_peak_mib"] == 3
    assert (values["gpu/utilization_percent"], values["gpu/temperature_c"], values["gpu/power_w"]) == (93, 61, 250)


def test_a_card_without_a_power_sensor_still_logs_the_rest(monkeypatch):
    play_nvml(monkeypatch, power=refuse)
    values = Monitor(torch.device("cuda", 0)).scalars()
    assert "gpu/power_w" not in values
    assert values["gpu/temperature_c"] == 61


def test_no_nvml_leaves_torchs_own_figures(monkeypatch):
    play_nvml(monkeypatch, init=refuse)
    values = Monitor(torch.device("cuda", 0)).scalars()
    assert "gpu/memory_peak_mib" in values
    assert not any("utilization" in tag for tag in values)


def test_memory_that_is_not_there(monkeypatch):
    monkeypatch.setattr(common.gpu.psutil, "virtual_memory", lambda: types.SimpleNamespace(available=2_000_000_000))
    cpu = torch.device("cpu")
    require_memory(cpu, 1_900_000_000, "a rollout")
    with pytest.raises(UsageError, match=r"a rollout needs 2\.1 GB of memory, 2\.0 GB are free"):
        require_memory(cpu, 2_100_000_000, "a rollout")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1_000_000_000, 8_000_000_000))
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 1.0)
    with pytest.raises(UsageError, match=r"1\.0 GB are free"):
        require_memory(torch.device("cuda", 0), 1_900_000_000, "a rollout")


def test_a_share_of_the_gpus_memory_is_set_and_is_all_that_is_free(monkeypatch):
    play_gpu(monkeypatch)
    shares = {}
    set_share = lambda share, device: shares.update({device: share})  # noqa: E731
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", set_share)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: shares.get(device, 1.0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (7_000_000_000, 8_000_000_000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 500_000_000)
    gpu = choose_device("cuda")
    assert shares == {}
    assert free_memory(gpu) == 7_000_000_000
    assert choose_device("cuda", 0.25) == gpu
    assert shares == {gpu: 0.25}
    assert free_memory(gpu) == 1_500_000_000
    assert choose_device("cpu", 0.25) == torch.device("cpu")


def test_a_containers_limit_counts_and_its_cached_files_do_not(monkeypatch):
    files = {"/sys/fs/cgroup/memory.max": "1000000000\n", "/sys/fs/cgroup/memory.current": "999999999\n"}

    def read_text(path):
        if str(path) not in files:
            raise FileNotFoundError
        return files[str(path)]

    monkeypatch.setattr(common.gpu.Path, "read_text", read_text)
    monkeypatch.setattr(common.gpu.psutil, "virtual_memory", lambda: types.SimpleNamespace(available=2_000_000_000))
    cpu = torch.device("cpu")
    require_memory(cpu, 900_000_000, "a rollout")
    with pytest.raises(UsageError, match=r"1\.0 GB are free"):
        require_memory(cpu, 1_100_000_000, "a rollout")
    files["/sys/fs/cgroup/memory.max"] = "max\n"
    require_memory(cpu, 1_100_000_000, "a rollout")


def test_torchs_own_warnings_do_not_stand_beside_our_line(monkeypatch, recwarn):
    play_gpu(monkeypatch, capability=(7, 0), archs=("sm_80",))

    def warning_count():
        warnings.warn("pages about a card that is too old", stacklevel=1)
        return 1

    monkeypatch.setattr(torch.cuda, "device_count", warning_count)
    with pytest.raises(UsageError):
        choose_device("cuda")
    assert len(recwarn) == 0
