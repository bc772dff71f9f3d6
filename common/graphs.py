"""Functions of tensors, compiled by inductor (`--compile`) or captured as CUDA graphs (`--cuda-graphs`).

On a fast GPU a small network's arithmetic takes less time than the launches of its kernels. Compiled code has fewer of
them; a graph launches all of a function's kernels at once, with the addresses that they had when it was captured. Hence
the rules for such a function: what it reads beside its inputs stays where it is and changes in place, what it draws at
random is an input, and it never waits for the GPU. Rehearsed on a CPU only (docs/gpu.md).
"""

import contextlib
import hashlib
import os
import platform
import shutil
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from torch.utils._pytree import tree_map

from common.errors import CaptureError, UsageError
from common.signals import signals_blocked

CACHE = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or None  # the user's word: torch itself sets it when it looks


def adam(
    parameters: Iterable[nn.Parameter], learning_rate: float, device: torch.device, cuda_graphs: bool, eps: float
) -> torch.optim.Adam:
    """Fused Adam whose learning rate is a tensor that stays where it is, after a restore too: a captured step goes on
    with what `set_learning_rate` puts there."""
    lr, capturable = torch.tensor(learning_rate, device=device), cuda_graphs and device.type == "cuda"
    if capturable:  # the steps before the capture are no mistake
        warnings.filterwarnings("ignore", message=".*constructed with capturable=True")
    optimizer = torch.optim.Adam(parameters, lr=lr, eps=eps, fused=True, capturable=capturable)

    def keep_in_place(optimizer: torch.optim.Optimizer) -> None:
        (group,) = optimizer.param_groups
        lr.copy_(torch.as_tensor(group["lr"]))
        group.update(lr=lr, capturable=capturable)  # another process's, maybe without a GPU

    optimizer.register_load_state_dict_post_hook(keep_in_place)
    return optimizer


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Of an optimiser that `adam` made."""
    optimizer.param_groups[0]["lr"].fill_(learning_rate)


def pick(x: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
    """`x[b, actions[b]]`: `[B, A]` and `[B]` -> `[B]`. The gradient of a `gather`, where it has to be deterministic, is
    an `index_put` that in some versions of torch waits for the GPU (_scatter_via_index_put in its
    TensorAdvancedIndexing.cpp), and can't be captured then."""
    return torch.where(actions[:, None] == torch.arange(x.shape[1], device=x.device), x, 0.0).sum(1)


# ---- compiled


def compile_cache(runs_dir: str) -> Path:
    """Where compiled code is kept beside the runs, `<runs_dir>/.compile_cache`, so that it outlives the process and, if
    that folder does, the machine. A folder for each kind of processor, as code that was built for one may end another
    one's process with SIGILL."""
    words = [platform.machine(), torch.backends.cpu.get_cpu_capability()]
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        words += [next(line for line in lines if line.lower().startswith(("flags", "features")))]
    kind = hashlib.sha256(" ".join(words).encode()).hexdigest()[:8]
    return Path(runs_dir).absolute() / ".compile_cache" / kind


def compiled(run: Any, function: Callable[..., Any], *example: torch.Tensor) -> Callable[..., Any]:
    """`torch.compile` of a function, and of its gradient if its first result has one, done at once for one set of
    sizes. Signals wait until it is done: they would end the compilers, which are processes of their own.

    Args:
        run: the `Run` that it is for, beside which compiled code is kept.

    Raises:
        UsageError: it can't be compiled here, for want of a C++ compiler say.
    """
    cache = compile_cache(run.args.runs_dir)
    new = CACHE is None and not cache.parent.exists()
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = CACHE or str(cache)
    run.terminal.line(f"compiling {function.__name__}: a minute or more the first time, an interruption waits for it")
    result = torch.compile(function)
    try:
        with signals_blocked():
            first = next(iter(result(*example)))
            if first.requires_grad:
                first.backward()
    except (RuntimeError, OSError) as error:
        if new and len(list(cache.parent.parent.iterdir())) == 2:  # nobody else's run is here that may use it
            shutil.rmtree(cache.parent, ignore_errors=True)
        said = getattr(getattr(error, "inner_exception", error), "output", "") or str(error)  # the compiler's own words
        raise UsageError(f"--compile: torch can't compile here: {first_line(said) or type(error).__name__}") from None
    run.lap("compile")
    return result


def first_line(text: str) -> str:
    return next((line for line in text.splitlines() if line.strip()), "")


# ---- captured


class Graph:
    """A function of tensors as a CUDA graph. Called as the function is, with tensors of the same shapes each time.

    The first calls are ordinary ones, on a stream of their own, in which libraries choose their kernels and optimisers
    make their state; then the function is captured, which runs nothing, and from there on replayed
    (https://docs.pytorch.org/docs/stable/notes/cuda.html, "Whole-network capture"). Results are new tensors, as the
    function's own would be.

    Raises:
        CaptureError: something in it can't be captured.
    """

    WARM_UP = 3  # calls

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.calls = 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.inputs: list[torch.Tensor] = []
        self.outputs: Any = None

    def __call__(self, *inputs: torch.Tensor) -> Any:
        self.calls += 1
        if self.calls <= self.WARM_UP:
            return self._warm_up(inputs)
        if self.graph is None:
            self._capture(inputs)
        for static, x in zip(self.inputs, inputs, strict=True):
            static.copy_(x, non_blocking=True)
        self.graph.replay()
        return tree_map(torch.clone, self.outputs)

    def _warm_up(self, inputs: tuple[torch.Tensor, ...]) -> Any:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            outputs = self.function(*inputs)
        torch.cuda.current_stream().wait_stream(stream)
        return outputs

    def _capture(self, inputs: tuple[torch.Tensor, ...]) -> None:
        self.inputs = [x.clone() for x in inputs]
        self.graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(self.graph):
                self.outputs = self.function(*self.inputs)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            # what ended the capture, not that it has ended
            reason = first_line(str(error.__context__ or error)) or type(error).__name__
            raise CaptureError(f"--cuda-graphs: {reason}; without it the same command goes on") from None


def captured(
    cuda_graphs: bool, device: torch.device, say: Callable[[str], None], *functions: Callable[..., Any]
) -> tuple[Callable[..., Any], ...]:
    """Each as a `Graph`; as they are without `--cuda-graphs`, and where there is no GPU, which is said."""
    if cuda_graphs and device.type == "cuda":
        return tuple(Graph(function) for function in functions)
    if cuda_graphs:
        say(f"--cuda-graphs: there are none on {device}: plain calls")
    return functions
