"""Ray, for `sweep.py` and `ppo_atari_ray.py`: a cluster of this machine alone, or one that is named."""

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from common.errors import UsageError

PATIENCE = 10.0  # seconds for a cluster to answer
ROOT = Path(__file__).parent.parent
# of the working tree, what other nodes have no use for
LEFT_HERE = [".git", ".venv", "runs", "docs", "tests", "benchmark/out", "benchmark/results", "__pycache__"]


@contextlib.contextmanager
def connected(address: str | None, revision: str | None = None) -> Iterator[None]:
    """Be the driver of a Ray cluster.

    Args:
        address: `host:port`, or `auto` for the one that `ray start` began here; None: `RAY_ADDRESS` if it is set, else
            one that begins and ends with this process, has this machine's cores and GPUs (`CUDA_VISIBLE_DEVICES`), and
            listens on loopback only.
        revision: of the code, for `config.json` on nodes that get a copy of it.

    Raises:
        UsageError: Ray is not installed, or no cluster answers there.
    """
    if find_spec("ray") is None:
        raise UsageError("this needs Ray: pip install -r requirements-ray.txt")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    address = address or os.environ.get("RAY_ADDRESS")
    if address is None:
        # else Ray's ports are open to the network, its dashboard off or not; the name is of where this is the default
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        settings = dict(address="local", include_dashboard=False)
    else:
        code = dict(working_dir=str(ROOT), excludes=LEFT_HERE)
        if revision:
            code["env_vars"] = {"SPOTRL_REVISION": revision}
        settings = dict(address=address, runtime_env=code)
        require_listener(address)
    import ray

    with own_signals():
        try:
            ray.init(logging_level="ERROR", log_to_driver=False, **settings)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise UsageError(f"--address {address}: no Ray cluster there: {' '.join(str(error).split())}") from None
    try:
        yield
    finally:
        with own_signals():
            ray.shutdown()


def require_listener(address: str) -> None:
    """Ray would ask an address where nobody is for minutes.

    Raises:
        UsageError
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if address == "auto":
        return
    try:
        socket.create_connection((host, int(port)), timeout=PATIENCE).close()
    except (OSError, ValueError) as error:
        raise UsageError(f"--address {address}: no Ray cluster there: {error}") from None


@contextlib.contextmanager
def own_signals() -> Iterator[None]:
    """Ray puts its own handler of SIGTERM in place of whoever's is there."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
