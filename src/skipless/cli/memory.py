"""Whether a network fits into this machine's memory, asked before it is built."""

import math
import os
import re
from contextlib import suppress
from pathlib import Path

_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")  # a container's


def check_fits(parameters: int, asked: str) -> None:
    """Refuse a network whose float32 weights alone are more than the memory that is free."""
    need, free = 4 * parameters, free_memory()
    if need > free:
        raise ValueError(
            f"{asked} has {parameters / 1e9:,.2f} billion parameters, which take {need / 1e9:,.1f} GB, and "
            f"{free / 1e9:,.1f} GB of memory are free; make it smaller, e.g. with --width 256"
        )


def free_memory() -> float:
    """Bytes that can be had at most, by what the kernel and a container's limit say; ∞ where nothing does."""
    bounds = [math.inf]
    with suppress(AttributeError, ValueError, OSError):  # not POSIX
        bounds.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    with suppress(OSError):
        found = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
        bounds += [1024 * int(found[1])] if found else []
    for file in _LIMITS:
        with suppress(OSError, ValueError):  # "max"
            bounds.append(int(Path(file).read_text()))
    return min(bounds)
