"""Round trips and bandwidth between this node of a Ray cluster and each other one, for `doctor.py --peer`."""

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

PINGS, BLOCKS = 50, 3
BLOCK = 64 * 2**20  # bytes
PATIENCE = 30.0  # seconds for a node to start a process, or to send a block


@dataclass(frozen=True)
class Peer:
    """Another node; `silence`: why nothing could be measured there."""

    address: str
    seconds: float = 0.0  # of a round trip, the median
    rate: float = 0.0  # bytes a second, the median
    silence: str = ""


def peers() -> Iterator[Peer]:
    """Measures one after the other: they share this node's network. Inside of `common.cluster.connected`."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    class Echo:
        def ping(self) -> None:
            pass

        def block(self, size: int):
            import numpy as np

            return np.zeros(size, np.uint8)

    here = ray.get_runtime_context().get_node_id()
    others = [node for node in ray.nodes() if node["Alive"] and node["NodeID"] != here]
    remote, echoes = ray.remote(num_cpus=0)(Echo), []
    for node in others:  # all at once: they take seconds to start
        pinned = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        echoes.append(remote.options(scheduling_strategy=pinned).remote())
    for node, echo in zip(others, echoes, strict=True):
        try:
            yield measure(node["NodeManagerAddress"], echo)
        except ray.exceptions.RayError as error:  # a timeout, a node that went away
            yield Peer(node["NodeManagerAddress"], silence=f"{type(error).__name__}: {error}")


def measure(address: str, echo) -> Peer:
    """`echo`: an actor on the node."""
    import ray

    def seconds(reference) -> float:
        began = time.perf_counter()
        ray.get(reference, timeout=PATIENCE)
        return time.perf_counter() - began

    ray.get(echo.ping.remote(), timeout=PATIENCE)  # it starts, and both ends connect
    trips = [seconds(echo.ping.remote()) for _ in range(PINGS)]
    blocks = []
    for _ in range(BLOCKS + 1):
        reference = echo.block.remote(BLOCK)
        ray.wait([reference], timeout=PATIENCE, fetch_local=False)  # it is made there; only its way is timed
        blocks.append(seconds(reference))
    return Peer(address, statistics.median(trips), BLOCK / statistics.median(blocks[1:]))  # the first one connects
