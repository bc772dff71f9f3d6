"""What only a GPU can show of the GPU path (`python benchmark/gpu_check.py correctness`)."""

import linecache
import warnings

import pytest
import torch
from test_graphs import CAPTURED, interrupt_at, train

import drill
import ppo_atari
from common.errors import Interrupted
from common.graphs import Graph

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")]
DEVICE = "cuda"


@pytest.mark.parametrize("name", CAPTURED)
def test_graphs_agree_with_plain_calls(name, tmp_path):
    script, flags, _ = CAPTURED[name]
    flags = flags | dict(device=DEVICE)
    train(script, tmp_path, "plain", **flags)
    train(script, tmp_path, "captured", **flags, cuda_graphs=True)
    ends = [drill.final_checkpoint(tmp_path / run) for run in ("plain", "captured")]
    network = "q_network" if "q_network" in ends[0] else "agent"
    for ours, theirs in zip(*(end[network].values() for end in ends), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("how", [{}, {"cuda_graphs": True}, {"compile": True, "cuda_graphs": True}])
def test_a_run_on_a_gpu_is_interrupted_and_ends_bit_for_bit(how, tmp_path, monkeypatch):
    _, flags, _ = CAPTURED["ppo_atari"]
    flags = flags | how | dict(device=DEVICE)
    train(ppo_atari, tmp_path, "whole", **flags)

    with monkeypatch.context() as patch:
        interrupt_at(patch, ppo_atari, 60)
        with pytest.raises(Interrupted):
            train(ppo_atari, tmp_path, "pieces", **flags)
    train(ppo_atari, tmp_path, "pieces", **flags)
    assert drill.compare(tmp_path / "whole", tmp_path / "pieces") == []


def test_two_replays_on_a_gpu_draw_different_actions():
    graph = Graph(ppo_atari.sample)
    log_probs = torch.zeros(64, 6, device=DEVICE).log_softmax(1)
    drawn = [graph(log_probs, torch.empty(64, 6, device=DEVICE).exponential_()) for _ in range(10)]
    assert all((one != other).any().item() for i, one in enumerate(drawn) for other in drawn[:i])


@pytest.mark.parametrize("how", [{}, {"cuda_graphs": True}])
def test_nothing_in_the_loop_waits_for_the_gpu_but_reading_actions(how, tmp_path, monkeypatch):
    """torch warns of each operation that waits (https://docs.pytorch.org/docs/stable/generated/
    torch.cuda.set_sync_debug_mode.html). Checkpoints wait, and so do the losses, read once the next step is sent."""
    _, flags, _ = CAPTURED["ppo_atari"]
    boundaries = 0

    def boundary(checkpoints):
        nonlocal boundaries
        boundaries += 1
        torch.cuda.set_sync_debug_mode("default")
        real(checkpoints)
        # the first iterations warm up and capture; the last one ends with a checkpoint
        torch.cuda.set_sync_debug_mode("warn" if 5 <= boundaries < 8 else "default")

    real = ppo_atari.Checkpoints.boundary
    monkeypatch.setattr(ppo_atari.Checkpoints, "boundary", boundary)
    flags = flags | how | dict(device=DEVICE, total_timesteps=144, checkpoint_minutes=0)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            train(ppo_atari, tmp_path, "a", **flags)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = [one for one in caught if "called a synchronizing" in str(one.message)]
    lines = [linecache.getline(one.filename, one.lineno).strip() for one in waits]
    actions, losses = ([line for line in lines if words in line] for words in ("action_on_cpu.copy_", ".tolist()"))
    assert len(actions) == 3 * flags["num_steps"]
    assert len(losses) <= 3  # read at once
    assert len(lines) == len(actions) + len(losses), lines
