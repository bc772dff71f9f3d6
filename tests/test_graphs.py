"""Compiled and captured loop bodies. There is no GPU here, so that a graph is played by a recording: what is captured
are operations on tensors, and a replay does them again, on the same tensors. As with a GPU's graphs, whatever Python
did besides is not done again, and an operation that would wait for the GPU can't be captured."""

import contextlib
import itertools

import pytest
import torch
from conftest import read_scalars, run_script
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import common.graphs
import dqn_atari
import drill
import ppo_atari
import ppo_continuous
from common.checkpoint import read
from common.errors import CaptureError, Interrupted, UsageError
from common.graphs import Graph, adam, compile_cache, set_learning_rate
from common.preemption import StopSignals

WAITS = {"_local_scalar_dense", "nonzero", "equal"}
# not that a graph can't draw, but it has been got wrong
RANDOM = {"exponential_", "multinomial", "bernoulli_", "uniform_", "normal_", "rand", "randn", "randint", "randperm"}
TO_PYTHON = ("cpu", "numpy", "tolist")  # no operations on a CPU
ATARI = dict(env_id="BreakoutNoFrameskip-v4", device="cpu", num_envs=2, num_steps=8, num_minibatches=2)
ATARI |= dict(update_epochs=2, total_timesteps=96)
DQN = dict(env_id="BreakoutNoFrameskip-v4", device="cpu", num_envs=3, buffer_size=200, batch_size=4)
DQN |= dict(learning_starts=20, total_timesteps=96, target_network_frequency=24, exploration_fraction=0.1)
CONTROL = dict(env_id="InvertedPendulum-v5", device="cpu", num_steps=64, num_minibatches=4, update_epochs=2)
CONTROL |= dict(total_timesteps=384)


class Recording(TorchDispatchMode):
    """Plays `torch.cuda.CUDAGraph`."""

    made: list["Recording"] = []  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.calls = []
        self.replays = 0
        self.made.append(self)

    @staticmethod
    def refuse(what) -> None:
        raise RuntimeError(f"operation not permitted when stream is capturing: {what}\nand many more lines")

    def __enter__(self):
        self.patch = pytest.MonkeyPatch()
        for name in TO_PYTHON:
            self.patch.setattr(torch.Tensor, name, lambda *_, name=name: self.refuse(name))
        return super().__enter__()

    def __exit__(self, *error):
        self.patch.undo()
        return super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        mask = name.startswith("index") and any(
            x.dtype is torch.bool for x in tree_leaves(args[1:2]) if isinstance(x, torch.Tensor)
        )
        if name in WAITS | RANDOM or mask:  # a mask is counted first
            self.refuse(func)
        out = func(*args, **(kwargs or {}))
        if func.namespace != "profiler":
            self.calls.append((func, args, kwargs or {}, out))
        return out

    def replay(self) -> None:
        self.replays += 1
        if self.replays == 1:
            return  # capturing runs nothing on a GPU, but has just run everything here
        with torch.no_grad():
            for func, args, kwargs, out in self.calls:
                again = func(*args, **kwargs)
                for old, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                    if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)


class Stream:
    def wait_stream(self, stream):
        pass


@pytest.fixture
def graphs(monkeypatch):
    """Graphs on the CPU. Returns the list of those that are made."""
    Recording.made = []
    monkeypatch.setattr(common.graphs.torch.cuda, "CUDAGraph", Recording)
    monkeypatch.setattr(common.graphs.torch.cuda, "graph", lambda recording: recording)
    monkeypatch.setattr(common.graphs.torch.cuda, "Stream", Stream)
    monkeypatch.setattr(common.graphs.torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(common.graphs.torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    for script in (ppo_atari, ppo_continuous, dqn_atari):
        monkeypatch.setattr(script, "captured", lambda wanted, device, say, *x: tuple(map(Graph, x)) if wanted else x)
    return Recording.made


def train(script, tmp_path, name: str, **flags):
    return script.train(script.Args(runs_dir=str(tmp_path), run_name=name, **flags))


def interrupt_at(patch, script, step: int) -> None:
    """Let a signal arrive at a step of the next run."""
    runs, real = [], script.Run.start
    patch.setattr(script.Run, "start", lambda run, *args, **flags: (runs.append(run), real(run, *args, **flags)))

    class Asking(StopSignals):
        @property
        def asked(self):
            return "the test" if runs and runs[-1].progress.global_step >= step else None

    patch.setattr(script, "StopSignals", Asking)


# ---- a graph


def test_a_graph_is_called_as_the_function_is(graphs):
    """Warm-up, capture and replays give what the function gives, and results that a later call leaves alone."""
    weight = torch.ones(3)

    def function(x, y):
        weight.add_(1)  # its state changes in place, once a call
        return x * weight, (y.sum(),)

    graph, calls = Graph(function), []
    for i in range(8):
        x = torch.full((3,), float(i))
        calls.append((i, graph(x, x + 1)))
    assert weight.tolist() == [9.0] * 3
    for i, (product, (total,)) in calls:
        assert product.tolist() == [i * (2.0 + i)] * 3
        assert total.item() == 3 * (i + 1)
    assert [made.replays for made in graphs] == [8 - Graph.WARM_UP]


def test_two_replays_draw_different_actions(graphs):
    log_probs = torch.zeros(64, 6).log_softmax(1)
    graph = Graph(ppo_atari.sample)
    torch.manual_seed(1)
    drawn = [graph(log_probs, torch.empty(64, 6).exponential_()) for _ in range(40)]
    assert all((one != other).any() for one, other in itertools.pairwise(drawn))
    counts = torch.stack(drawn[Graph.WARM_UP :]).flatten().bincount(minlength=6) / (64 * (40 - Graph.WARM_UP))
    assert (counts - 1 / 6).abs().max() < 0.03  # five standard deviations


def test_actions_are_drawn_with_their_probabilities():
    torch.manual_seed(1)
    probs = torch.tensor([0.6, 0.3, 0.1, 0.0])
    noise = torch.empty(100_000, 4).exponential_()
    drawn = ppo_atari.sample(probs.log().expand(100_000, 4), noise).bincount(minlength=4) / 100_000
    assert drawn.tolist() == pytest.approx(probs.tolist(), abs=0.008)
    assert drawn[3] == 0


@pytest.mark.parametrize(
    "body",
    [
        lambda x: x * x.sum().item(),
        lambda x: x[x > 0],
        lambda x: x if x.sum() > 0 else -x,
        lambda x: x * x.tolist()[0],
        lambda x: torch.from_numpy(x.numpy() + 1),
        lambda x: x.cpu(),
        lambda x: x.exp().multinomial(1),
        lambda x: x / torch.empty_like(x).exponential_(),
    ],
)
def test_what_waits_or_draws_cannot_be_captured_and_is_said_in_one_line(body, graphs):
    graph = Graph(body)
    for _ in range(Graph.WARM_UP):
        graph(torch.ones(2))
    with pytest.raises(CaptureError, match=r"^--cuda-graphs: operation not .*; without it the same command goes on$"):
        graph(torch.ones(2))


def test_the_learning_rate_stays_one_tensor_after_a_restore_too():
    device, weight = torch.device("cpu"), torch.nn.Parameter(torch.ones(3))
    optimizer = adam([weight], 0.5, device, False, eps=1e-5)
    lr = optimizer.param_groups[0]["lr"]
    set_learning_rate(optimizer, 0.25)
    assert lr.item() == 0.25
    weight.sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    for stored in (torch.tensor(0.125), 0.125):  # of this version, and of one with plain numbers
        state["param_groups"][0]["lr"] = stored
        state["param_groups"][0]["capturable"] = True  # another device's
        optimizer.load_state_dict(state)
        assert optimizer.param_groups[0]["lr"] is lr
        assert lr.item() == 0.125
        assert optimizer.param_groups[0]["capturable"] is False
    set_learning_rate(optimizer, 0.0)
    before = weight.detach().clone()
    optimizer.step()
    assert torch.equal(weight, before)


# ---- captured training

CAPTURED = {
    "ppo_atari": (ppo_atari, ATARI, 3),
    "ppo_atari, annealed to nothing, a KL that stops, fp16": (
        ppo_atari,
        ATARI | dict(target_kl=1e-9, amp=True, amp_dtype="fp16", learning_rate=1e-3),
        3,
    ),
    "ppo_continuous": (ppo_continuous, CONTROL, 2),
    "dqn_atari": (dqn_atari, DQN, 2),
    "dqn_atari, all options": (dqn_atari, DQN | dict(double_q=True, n_step=3, prioritized=True), 2),
}
PLAIN = ("ppo_atari", "dqn_atari")  # of which others show more


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in PLAIN else []) for name in CAPTURED]
)
def test_captured_training_ends_with_the_same_bits(name, graphs, tmp_path):
    script, flags, functions = CAPTURED[name]
    train(script, tmp_path, "plain", **flags)
    assert graphs == []
    train(script, tmp_path, "captured", **flags, cuda_graphs=True)
    assert len(graphs) == functions
    assert all(made.replays > 1 for made in graphs)
    assert drill.compare(tmp_path / "plain", tmp_path / "captured") == []


@pytest.mark.slow
def test_a_captured_run_is_interrupted_and_goes_on_as_any_other(graphs, tmp_path, monkeypatch):
    train(ppo_atari, tmp_path, "whole", **ATARI)

    with monkeypatch.context() as patch:
        interrupt_at(patch, ppo_atari, 60)
        with pytest.raises(Interrupted):
            train(ppo_atari, tmp_path, "pieces", **ATARI, cuda_graphs=True)
    train(ppo_atari, tmp_path, "pieces", **ATARI, cuda_graphs=True)
    assert drill.compare(tmp_path / "whole", tmp_path / "pieces") == []
    assert len(graphs) >= 4  # captured anew


def test_where_there_is_no_gpu_cuda_graphs_fall_back_and_say_so(tmp_path, capsys):
    train(ppo_continuous, tmp_path, "a", **CONTROL, cuda_graphs=True)
    assert "--cuda-graphs: there are none on cpu: plain calls" in capsys.readouterr().out


# ---- logging


def test_losses_are_read_after_the_next_step_was_sent(tmp_path, monkeypatch):
    order = []
    real_send, real_read = ppo_atari.AtariEnvs.send, ppo_atari.Run.log_iteration
    monkeypatch.setattr(ppo_atari.AtariEnvs, "send", lambda envs, x: (order.append("send"), real_send(envs, x)))
    monkeypatch.setattr(ppo_atari.Run, "log_iteration", lambda run, *x: (order.append("read"), real_read(run, *x)))
    train(ppo_atari, tmp_path, "a", **ATARI, checkpoint_minutes=0)
    words = "send " * 8 + "send read send send send send send send send " * 5 + "read"
    assert order == words.split()  # the last ones before the last checkpoint


def test_a_checkpoint_has_the_losses_of_the_iteration_before_it(tmp_path):
    train(ppo_atari, tmp_path, "a", **ATARI, checkpoint_minutes=1e-9, keep_checkpoints=99)
    points = read_scalars(tmp_path / "a")["losses/value_loss"]
    assert [step for step, _ in points] == [16, 32, 48, 64, 80, 96]
    for step, value in points:
        saved = read(tmp_path / "a" / "checkpoints" / f"step-{step:012d}.pt")
        assert saved["progress"]["scalars"]["losses/value_loss"] == pytest.approx(value)


# ---- compiled


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ppo_atari", "ppo_continuous", "dqn_atari, all options"])
def test_compiled_training_agrees_with_plain_and_goes_on_from_it(name, tmp_path, monkeypatch, capsys):
    """Over some dozens of updates; interrupted half-way it goes on without the compiler, and back."""
    script, flags, _ = CAPTURED[name]
    monkeypatch.setattr(common.graphs, "CACHE", None)
    train(script, tmp_path, "plain", **flags)
    for how in (True, False):
        with monkeypatch.context() as patch:
            interrupt_at(patch, script, flags["total_timesteps"] // 2)
            with pytest.raises(Interrupted):
                train(script, tmp_path, f"{how}", **flags, compile=how)
        torch._dynamo.reset()
        counters.clear()
        train(script, tmp_path, f"{how}", **flags, compile=not how)
        assert f"compiled {not how} instead of {how}: the learner is exact" in capsys.readouterr().out
    assert counters["stats"]["unique_graphs"] == (1 if script is ppo_continuous else 2)  # once each, none in the loop
    assert counters["inductor"]["fxgraph_cache_hit"] >= 1  # the process before had compiled it
    assert counters["inductor"]["fxgraph_cache_miss"] == 0
    assert any((tmp_path / ".compile_cache").iterdir())
    network = "q_network" if script is dqn_atari else "agent"
    plain, *others = (drill.final_checkpoint(tmp_path / run)[network] for run in ("plain", "True", "False"))
    for other in others:
        assert other.keys() == plain.keys()
        assert not any("_orig_mod" in key for key in other)
        for key, weight in plain.items():
            torch.testing.assert_close(other[key], weight, rtol=1e-4, atol=1e-5)


def test_the_cache_of_compiled_code_is_of_one_kind_of_processor(tmp_path, monkeypatch):
    first = compile_cache(str(tmp_path / "runs"))
    assert first.parent == tmp_path / "runs" / ".compile_cache"
    monkeypatch.setattr(common.graphs.torch.backends.cpu, "get_cpu_capability", lambda: "another")
    assert compile_cache(str(tmp_path / "runs")) != first


def test_a_command_that_is_refused_compiles_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(ppo_continuous, "compiled", lambda *x: pytest.fail("compiled"))
    with pytest.raises(UsageError, match="no checkpoint there"):
        train(ppo_continuous, tmp_path / "runs", "a", **CONTROL, compile=True, resume="nowhere")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("given", [False, pytest.param(True, marks=pytest.mark.extended)])
def test_a_process_keeps_compiled_code_beside_the_runs_or_where_it_is_told(given, tmp_path, monkeypatch):
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    if given:
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "given"))
    flags = [
        "--num-steps",
        "64",
        "--num-minibatches",
        "4",
        "--total-timesteps",
        "64",
        "--env-id",
        "InvertedPendulum-v5",
    ]
    done = run_script("ppo_continuous.py", "--compile", *flags, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    cache = tmp_path / "given" if given else tmp_path / "runs" / ".compile_cache"
    assert list(cache.rglob("*.so"))
    assert not list((tmp_path / "tmp").rglob("*.so"))
    assert (tmp_path / "runs" / ".compile_cache").exists() is not given
