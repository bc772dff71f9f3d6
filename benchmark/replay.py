"""What a replay memory of a million transitions costs: priorities, a save, a restore. Prints one JSON line.

Priorities: microseconds to draw a batch of 32 and to set it again, with all that dqn_atari.py does around it, and to
admit the transitions of one step, on one thread. Save: seconds to have the files of a full memory on the disk, its
checksums together, and the priorities packed, right after so many new transitions as a checkpoint's interval brings.
Restore: seconds to read the memory and compare its checksums. Memory: what the process grew by. It takes 7.4 GB of
memory and of disk.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import common.cpu  # noqa: F401  isort: skip  (before torch)

import numpy as np
import psutil
import torch

from common.checkpoint import pack
from common.replay import Storage, SumTree

BATCH_SIZE, NUM_ENVS = 32, 8


def microseconds(body: Callable[[], object], calls: int = 1000, windows: int = 6) -> float:
    """Median over the windows, the first one apart."""
    times = []
    for _ in range(windows):
        start = time.perf_counter()
        for _ in range(calls):
            body()
        times.append((time.perf_counter() - start) / calls * 1e6)
    return statistics.median(times[1:])


def time_priorities(size: int) -> dict[str, float]:
    torch.set_num_threads(1)
    torch.manual_seed(1)
    tree = SumTree(size)
    tree[np.arange(size)] = np.random.default_rng(1).random(size)
    td_errors = torch.rand(BATCH_SIZE)

    def draw_and_update() -> None:
        shares = (np.arange(BATCH_SIZE) + torch.rand(BATCH_SIZE, dtype=torch.float64).numpy()) / BATCH_SIZE
        leaves = tree.find(shares)
        slots, envs = leaves // NUM_ENVS, leaves % NUM_ENVS
        _ = size - (size - slots) % size, envs
        weights = (tree[leaves] / tree.total) ** -0.5
        torch.from_numpy((weights / weights.max()).astype(np.float32))
        priorities = (td_errors.abs().cpu().numpy().astype(np.float64) + 1e-6) ** 0.6
        tree[leaves[np.isfinite(priorities)]] = priorities

    at = iter(range(10**9))

    def admit() -> None:
        first = next(at) * NUM_ENVS % (size - 2 * NUM_ENVS)
        tree[np.arange(first, first + 2 * NUM_ENVS)] = np.repeat([0.0, 1.0], NUM_ENVS)

    return {"draw_and_update_us": microseconds(draw_and_update), "admit_us": microseconds(admit)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--buffer-size", type=int, default=1_000_000)
    parser.add_argument("--since", type=int, default=20_000, help="transitions since the last save (default: 20,000)")
    parser.add_argument("--dir", type=Path, help="where the files go for the time (default: the temporary folder)")
    args = parser.parse_args()
    result = time_priorities(args.buffer_size)

    rng = np.random.default_rng(1)
    # as hard to compress as they come; the frames of a game are not
    obs = [rng.integers(0, 256, (NUM_ENVS, 4, 84, 84), dtype=np.uint8) for _ in range(20)]
    zeros, no = np.zeros(NUM_ENVS), np.zeros(NUM_ENVS, bool)
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        before = psutil.Process().memory_info().rss
        memory = Storage(NUM_ENVS, args.buffer_size)
        memory.open(Path(folder) / "replay", torch.device("cpu"))
        memory.begin(obs[0])

        def write(steps: int) -> None:
            for step in range(steps):
                memory.add(zeros, zeros, no, no, obs[step % len(obs)], {})

        write(memory.length)
        memory.sync()
        result["grown_gb"] = (psutil.Process().memory_info().rss - before) / 1e9
        write(args.since // NUM_ENVS)
        tree = SumTree(memory.length * NUM_ENVS)
        start = time.perf_counter()
        memory.sync()
        state = memory.state_dict()
        packed = pack({"memory": state, "priorities": tree.state_dict()})
        (Path(folder) / "checkpoint").write_bytes(packed)
        result["save_s"] = time.perf_counter() - start
        result["checkpoint_mb"] = len(packed) / 1e6
        start = time.perf_counter()
        memory.load_state_dict(state)
        result["restore_s"] = time.perf_counter() - start
        assert memory.restore_note == "", memory.restore_note
        memory.close()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
