"""Ray, for `sweep.py` and `ppo_atari_ray.py`: a cluster of this machine alone, or one that is named."""

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from common.errors import UsageError, WorkerError

PATIENCE = 10.0  # seconds for a cluster to answer
LOOK = 0.2  # seconds between two looks at signals while actors work
LOST = 10  # times in a row that one actor is lost, after which a run fails
SILENCE = 30.0  # seconds without an answer, after which it is said what is waited for
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
    if address in (None, "local"):
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
        except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
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


class Actors:
    """Processes on any node of a Ray cluster which hold a part of a run's state each.

    Every method of theirs that is called returns what it is called for, and the actor's state after it, as
    `load_state_dict` takes it. So an actor that is lost, with its node or alone, is replaced: the new one gets the last
    state and is asked the same again.

    Attributes:
        waiting: called five times a second while actors work; may raise.
        replay_tick: the same while `load_state_dict` works, with the share of actors that are done.
        restore_note: what the user should know of the last `load_state_dict`, else empty.
        states: of each actor after its last answer.
    """

    def __init__(self, address: str | None, cpus: float, actor: type, arguments: Sequence[tuple]) -> None:
        """
        Args:
            address: of the cluster, see `connected`.
            cpus: that an actor takes.
            actor: its class.
            arguments: of each actor's constructor.

        Raises:
            UsageError: see `connected`; or this machine has too few CPUs.
        """
        self.cluster = contextlib.ExitStack()
        self.cluster.enter_context(connected(address))
        import ray

        self.ray, self.arguments = ray, arguments
        options = dict(num_cpus=cpus, scheduling_strategy="SPREAD", max_restarts=0, max_task_retries=0)
        self.actor = ray.remote(**options)(actor)
        self.cpus = cpus * len(arguments)
        there = ray.cluster_resources().get("CPU", 0)
        if there < self.cpus and address is None and "RAY_ADDRESS" not in os.environ:  # others may grow
            self.cluster.close()
            raise UsageError(f"{len(arguments)} actors of {cpus:g} CPUs each: this machine has {there:g} CPUs")
        self.waiting: Callable[[], None] = lambda: None
        self.replay_tick: Callable[[float], None] = lambda share: None
        self.restore_note = ""
        self._in_a_row = [0] * len(arguments)  # losses of each since its last answer
        self._notes: dict[int, Any] = {}  # what replaced actors say of the state that they were given
        self.share = 0.0  # of the actors that have answered
        self.states: list[Any] = [None] * len(arguments)
        self.actors = [self.actor.remote(*words) for words in arguments]

    def __enter__(self) -> "Actors":
        return self

    def __exit__(self, *error: Any) -> None:
        self.cluster.close()

    def call(
        self,
        method: str,
        arguments: Sequence[tuple],
        say: Callable[[str], None] = print,
        tick: Callable[[], None] = lambda: None,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> list[Any]:
        """Call a method of every actor, with its own arguments, and wait for all.

        Args:
            say: is told of actors that are lost.
            tick: called five times a second.
            meanwhile: called once, when all have their work.

        Returns:
            their answers, in the order of the actors.

        Raises:
            WorkerError: actors are lost again and again, or one raised something.
        """
        answers: list[Any] = [None] * len(self.actors)
        asked = {getattr(self.actors[i], method).remote(*words): i for i, words in enumerate(arguments)}
        meanwhile()
        heard, said = time.monotonic(), False
        while asked:
            self.share = 1 - len(asked) / len(self.actors)
            done, _ = self.ray.wait(list(asked), timeout=LOOK)
            self.waiting()
            tick()
            heard = time.monotonic() if done else heard
            if time.monotonic() - heard > SILENCE and not said:
                there = self.ray.cluster_resources().get("CPU", 0)
                said = there < self.cpus
                if said:
                    say(f"waiting for {self.cpus:g} CPUs for the actors: the cluster has {there:g}")
            for answer in done:
                i = asked.pop(answer)
                try:
                    if i in self._notes:
                        note, _ = self.ray.get(self._notes[i])
                        say(f"actor {i}: {note}" if note else f"actor {i} goes on where the lost one was")
                        del self._notes[i]
                    answers[i], self.states[i] = self.ray.get(answer)
                    self._in_a_row[i] = 0
                except self.ray.exceptions.RayTaskError as error:
                    raise WorkerError(f"an actor failed: {' '.join(str(error.cause).split())}") from error
                except self.ray.exceptions.RayError as error:
                    self._replace(i, error, say)
                    asked[getattr(self.actors[i], method).remote(*arguments[i])] = i
        return answers

    def put(self, value: Any) -> Any:
        """Something large that several actors get: it is sent to each node once."""
        return self.ray.put(value)

    def _replace(self, i: int, error: Exception, say: Callable[[str], None]) -> None:
        self._in_a_row[i] += 1
        if self._in_a_row[i] > LOST:
            raise WorkerError(
                f"actor {i} was lost {LOST} times in a row: {' '.join(str(error).split())[:200]}"
            ) from error
        say(f"actor {i} is lost ({type(error).__name__}): a new one does its share again")
        self.actors[i] = self.actor.remote(*self.arguments[i])
        self._notes.pop(i, None)
        if self.states[i] is not None:
            self._notes[i] = self.actors[i].load_state_dict.remote(self.states[i])

    def state_dict(self) -> dict[str, Any]:
        return {"actors": list(self.states)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """
        Raises:
            ValueError: of another number of actors.
            WorkerError: see `call`.
        """
        if len(state["actors"]) != len(self.actors):
            raise ValueError(f"the state of {len(state['actors'])} actors, not {len(self.actors)}")
        notes = self.call(
            "load_state_dict", [(one,) for one in state["actors"]], tick=lambda: self.replay_tick(self.share)
        )
        self.restore_note = next(filter(None, notes), "")
