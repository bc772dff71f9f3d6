"""Process-wide settings for the CPU's share of the work. Import before torch.

Emulator threads and torch's OpenMP threads take turns on the same cores, and libgomp reads how long an
idle thread spins only once, when torch loads it. docs/performance.md has the figures.
"""

import ctypes
import os
import platform
import sys

# Long enough to span the gaps between the kernels of one forward pass, short enough to leave the cores to
# the emulators right after it.
os.environ.setdefault("GOMP_SPINCOUNT", "20000")

# NumPy's own products (of few rows, in rollouts) round differently with another number of threads. torch has its own
# library for them on x86.
if platform.machine() in ("x86_64", "AMD64"):
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def keep_freed_memory() -> None:
    """Make glibc keep large freed blocks, which it otherwise hands back to the kernel at each free.

    Constants from malloc.h; mallopt(3). Nothing happens where the C library is another one.
    """
    M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(M_MMAP_THRESHOLD, 32 * 2**20)
            mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


keep_freed_memory()
