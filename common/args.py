"""The flags that every training script shares, and how a command line becomes an `Args`."""

import contextlib
import dataclasses
import hashlib
import io
import json
import os
import re
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, ClassVar, Literal, TypeVar

import tyro

from common.errors import CaptureError, Interrupted, LimitReached, SaveError, UsageError, WorkerError


@dataclass
class SharedArgs:
    env_id: str = ""
    """gymnasium id of the environment"""
    seed: int = 1
    """everything random derives from it"""
    total_timesteps: int = 1_000_000
    """agent steps, all environments together"""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N; one that is not there is an error"""
    amp: bool = False
    """automatic mixed precision"""
    amp_dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """auto: bf16 where the hardware has it natively, else fp16 on a GPU and fp32 on a CPU"""
    gpu_memory_fraction: float | None = None
    """share of the GPU's memory, 0 to 1, that this process may take, where several runs share a card"""
    torch_deterministic: bool = True
    """bit-identical results, on CUDA too"""
    tf32: bool = True
    """TF32 matrix products and convolutions on GPUs that have them"""
    compile: bool = False
    """compile the networks with their losses; takes a C++ compiler, and most of a minute at the first start"""
    cuda_graphs: bool = False
    """launch a policy step, or an update, as one CUDA graph; rehearsed without a GPU only"""
    resume: str = "auto"
    """auto: go on where an earlier process of this run stopped; never: set its folder aside and start afresh; or a
    checkpoint or run folder to begin from"""
    checkpoint_minutes: float = 5.0
    """minutes between two checkpoints; 0: only at the start, at the end and when interrupted"""
    keep_checkpoints: int = 2
    """how many of the newest to keep"""
    keep_every: int | None = None
    """agent steps after which one more checkpoint is kept for good"""
    stop_at_return: float | None = None
    """stop, complete, when the mean return of the last 100 games reaches this"""
    price_per_hour: float | None = None
    """US dollars that this machine costs an hour"""
    instance: str | None = None
    """what this machine is, provider:name or provider:name@region, with its price from benchmark/prices.csv"""
    spot: bool = False
    """with --instance: its spot price"""
    max_cost: float | None = None
    """US dollars after which the run stops with a checkpoint and status 3"""
    spot_watch: Literal["auto", "off", "aws", "gcp", "azure", "alibaba"] = "auto"
    """the cloud whose notice of taking this machine away stops the run with a checkpoint; auto finds out which"""
    mirror: str | None = None
    """folder or address (s3://bucket/runs, see docs/spot.md) for a copy of the run, with which new machines go on"""
    track: bool = False
    """log to Weights & Biases too, into the project WANDB_PROJECT (spotrl); needs requirements-extras.txt"""
    run_name: str | None = None
    """folder below runs-dir; by default derived from the flags that change the result"""
    runs_dir: str = "runs"
    """folder of all runs"""

    # result-changing flags that a checkpoint can't go on with when they change
    FIXED: ClassVar[tuple[str, ...]] = ("env_id", "seed")

    def result_flags(self) -> dict[str, Any]:
        """The flags that change the result."""
        return {name: value for name, value in vars(self).items() if name not in RESULT_STAYS}

    def changed(self, stored: dict[str, Any]) -> list[tuple[str, str, Any]]:
        """Result-changing flags that were others: the field's name, the flag with its value now, the value then."""
        flags = self.result_flags().items()
        return [(name, f"{flag(name)} {x}", stored[name]) for name, x in flags if name in stored and stored[name] != x]

    def check(self) -> None:
        """Raise `UsageError` for values that no run can have. Scripts add their own and call this one."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, float) and not abs(value) < FLOAT32_MAX:
                raise UsageError(f"{flag(field.name)} {value}: must be a finite number that float32 can hold")
        self.require("seed", 0 <= self.seed < 2**63, "must be 0 to 2^63 - 1")
        self.require("amp_dtype", self.amp or self.amp_dtype == "auto", "means nothing without --amp")
        self.require_positive("total_timesteps", "keep_checkpoints")
        fraction = self.gpu_memory_fraction
        self.require("gpu_memory_fraction", fraction is None or 0 < fraction <= 1, "must be above 0, and 1 at most")
        self.require("runs_dir", self.runs_dir != "", "must name a folder")
        self.require("track", not self.track or find_spec("wandb") is not None, "needs requirements-extras.txt")
        self.require("mirror", self.mirror != "", "must name a folder or an address")
        self.require("checkpoint_minutes", self.checkpoint_minutes >= 0, "must not be negative")
        self.require("keep_every", self.keep_every is None or self.keep_every > 0, "must be positive")
        self.require("resume", self.resume != "", "must be auto, never, or a checkpoint or run folder")
        for name in ("price_per_hour", "max_cost"):
            self.require(name, getattr(self, name) is None or getattr(self, name) > 0, "must be positive")
        priced = self.price_per_hour is not None
        self.require("instance", self.instance is None or not priced, "means nothing with --price-per-hour")
        self.require("spot", not self.spot or self.instance is not None, "means nothing without --instance")
        has_price = priced or self.instance is not None
        self.require("max_cost", self.max_cost is None or has_price, "needs --price-per-hour or --instance")
        if self.run_name is not None:
            ok = re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,199}", self.run_name) is not None
            self.require("run_name", ok, "must be one folder name of at most 200 letters, digits and _ . + -")

    def require_positive(self, *names: str) -> None:
        for name in names:
            self.require(name, getattr(self, name) > 0, "must be positive")

    def require(self, name: str, condition: bool, reason: str) -> None:
        if not condition:
            value = getattr(self, name)
            raise UsageError(f"{flag(name)}{'' if value is True else f' {value}'}: {reason}")


FLOAT32_MAX = 3.4e38

# Flags that leave the result as it is.
RESULT_STAYS = {"device", "run_name", "runs_dir", "resume", "checkpoint_minutes", "keep_checkpoints", "keep_every"}
RESULT_STAYS |= {"compile", "cuda_graphs", "async_envs", "buffer_device", "save_buffer", "gpu_memory_fraction"}
RESULT_STAYS |= {"address"}
RESULT_STAYS |= {"price_per_hour", "instance", "spot", "max_cost", "spot_watch", "mirror", "track"}
IN_THE_NAME = {"env_id", "seed"}


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def default_run_name(args: SharedArgs, script: str) -> str:
    """`<env_id>__<script>__<seed>`, plus a hash of the result-changing flags that differ from their defaults.

    No time in it: the same command is the same run.
    """
    changed = {
        field.name: getattr(args, field.name)
        for field in dataclasses.fields(args)
        if field.name not in RESULT_STAYS | IN_THE_NAME and getattr(args, field.name) != field.default
    }
    name = f"{args.env_id.replace('/', '-')}__{script}__{args.seed}"
    if not changed:
        return name
    return f"{name}__{hashlib.sha256(json.dumps(changed, sort_keys=True).encode()).hexdigest()[:8]}"


ArgsT = TypeVar("ArgsT", bound=SharedArgs)


def parse(args_class: type[ArgsT], argv: Sequence[str], description: str) -> ArgsT:
    """Read a command line.

    Raises:
        UsageError: an unknown flag, a value of the wrong type, a missing value.
    """
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            return tyro.cli(args_class, args=obey_true_and_false(args_class, argv), description=description)
    except SystemExit as stop:
        if stop.code in (0, None):  # --help
            raise
        # tyro draws a box, of ASCII where the terminal has no other characters, with a title in its first line
        lines = printed.getvalue().strip().splitlines()[1:]
        text = " ".join(re.sub(r"[─-╿]+|-{5,}", " ", " ".join(lines)).split())
        text = re.sub(r" ?(Argument helptext|For full helptext).*", "", text)
        text = re.sub(r" Perhaps you meant: (--[a-z-]+).*", r"; did you mean \1?", text)
        raise UsageError(f"{text.removeprefix('Error parsing ')}; see --help") from None


def obey_true_and_false(args_class: type, argv: Sequence[str]) -> list[str]:
    """`--amp False` and `--amp=false` mean `--no-amp`, as people coming from argparse write it.

    Raises:
        UsageError: a switch with another value.
    """
    switches = {flag(field.name) for field in dataclasses.fields(args_class) if field.type is bool}
    result: list[str] = []
    words = deque(argv)
    while words:
        word = words.popleft()
        name, equals, value = word.partition("=")
        value = value if equals else None
        name = name.replace("_", "-")
        switch = name.replace("--no-", "--", 1)
        if switch not in switches:
            result.append(word)
            continue
        if value is None and words and not words[0].startswith("-"):
            value = words.popleft()
        if value is not None and (value.lower() not in ("true", "false") or name != switch):
            raise UsageError(f"{name} {value}: write {switch} or --no-{switch[2:]}")
        result.append(f"--no-{switch[2:]}" if value is not None and value.lower() == "false" else name)
    return result


def run_script(args_class: type[ArgsT], train: Callable[[ArgsT], dict[str, Any]], doc: str) -> None:
    """The main guard of every script: parse, train, leave with the right exit status (see README)."""
    status = 0
    try:
        train(parse(args_class, sys.argv[1:], doc))
    except UsageError as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        status = 2
    except Interrupted:
        status = os.EX_TEMPFAIL
    except LimitReached:
        status = 3
    except (FloatingPointError, SaveError, WorkerError, CaptureError) as error:
        print("error:", error, file=sys.stderr)
        status = 1
    # All is written. Python and torch would take most of a second to shut down, and a machine may be gone by then; they
    # would wait for a mirror or W&B that does not answer, too.
    if status == os.EX_TEMPFAIL or any(t.name.startswith(("mirror", "tracker")) for t in threading.enumerate()):
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        os._exit(status)
    if status:
        sys.exit(status)
