"""Mixed precision: the choice of the dtype, the order of a minibatch, what stays in float32."""

import pytest
import torch

import common.amp
import ppo_atari
from common.amp import Amp

CPU = torch.device("cpu")
SMALL = {"num_envs": 2, "num_steps": 8, "num_minibatches": 2, "update_epochs": 2, "total_timesteps": 16}


def small_run(tmp_path, **flags):
    return ppo_atari.train(ppo_atari.Args(runs_dir=str(tmp_path), **{**SMALL, **flags}))


def test_off_is_fp32_and_no_scaling():
    amp = Amp(False, "bf16", CPU)
    assert amp.dtype is torch.float32
    assert not amp.scaler.is_enabled()
    with amp.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32


@pytest.mark.parametrize(
    ("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)]
)
def test_an_explicit_dtype_is_obeyed_and_only_fp16_is_scaled(name, dtype):
    amp = Amp(True, name, CPU)
    with amp.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is dtype
    assert amp.scaler.is_enabled() == (name == "fp16")
    assert amp.note == ""


@pytest.mark.parametrize(("native", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_auto_on_a_cpu_follows_its_units(monkeypatch, native, dtype):
    monkeypatch.setattr(common.amp, "cpu_has_bf16", lambda: native)
    amp = Amp(True, "auto", CPU)
    assert amp.dtype is dtype
    assert bool(amp.note) != native


@pytest.mark.parametrize(("native", "dtype"), [(True, torch.bfloat16), (False, torch.float16)])
def test_auto_on_a_gpu_takes_emulated_bf16_for_none(monkeypatch, native, dtype):
    def supported(including_emulation=True):
        return native or including_emulation

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert Amp(True, "auto", torch.device("cuda")).dtype is dtype


@pytest.mark.parametrize("dtype", [pytest.param("bf16", marks=pytest.mark.slow), "fp16", "fp32"])
def test_trains_and_keeps_log_probabilities_values_and_losses_in_fp32(tmp_path, monkeypatch, dtype):
    seen = []

    def watched(args, log_probs, newvalue, *stored):
        seen.extend(x.dtype for x in (log_probs, newvalue, *stored) if x.is_floating_point())
        loss, stats = real(args, log_probs, newvalue, *stored)
        seen.extend([loss.dtype, stats.dtype])
        return loss, stats

    real = ppo_atari.ppo_loss
    monkeypatch.setattr(ppo_atari, "ppo_loss", watched)
    convolutions = []
    hook = torch.nn.modules.module.register_module_forward_hook(
        lambda module, _, output: convolutions.append(output.dtype) if isinstance(module, torch.nn.Conv2d) else None
    )
    try:
        summary = small_run(tmp_path, amp=True, amp_dtype=dtype)
    finally:
        hook.remove()

    assert summary["updates"] == 4
    assert set(seen) == {torch.float32}
    assert set(convolutions) == {common.amp.DTYPES[dtype]}


def test_a_minibatch_unscales_clips_steps_and_updates_in_this_order(tmp_path, monkeypatch):
    calls = []

    def note(owner, name):
        real = getattr(owner, name)

        def noted(*args, **kwargs):
            calls.append(name)
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, noted)

    for name in ("scale", "unscale_", "step", "update"):
        note(torch.amp.GradScaler, name)
    note(torch.nn.utils, "clip_grad_norm_")
    small_run(tmp_path, amp=True, amp_dtype="fp16")
    assert calls == ["scale", "unscale_", "clip_grad_norm_", "step", "update"] * 4


def test_gradients_are_clipped_unscaled(tmp_path, monkeypatch):
    norms = []
    real = torch.nn.utils.clip_grad_norm_

    def watched(parameters, max_norm):
        norms.append(real(parameters, max_norm).item())

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", watched)
    for dtype in ("fp16", "fp32"):
        small_run(tmp_path, amp=True, amp_dtype=dtype)
    # the scale of 65,536 would show
    assert norms[0] == pytest.approx(norms[4], rel=0.05)


def test_an_overflow_skips_the_step_and_lowers_the_scale():
    amp = Amp(True, "fp16", CPU)
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([weight], fused=True)
    scale = amp.scaler.get_scale()
    amp.step(weight.sum() * float("inf"), optimizer, 0.5)
    assert weight.tolist() == [1, 1, 1]
    assert amp.scaler.get_scale() < scale
