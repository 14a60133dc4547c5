"""Host memory for the slots: how much to ask for, what to fall back to, and what to say when it cannot be had."""

from __future__ import annotations

import os
from pathlib import Path

from staging._device import Memory

_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_UNLIMITED = 1 << 60


def wished(memory: Memory) -> Memory:
    """The kind of memory to use: the argument, or for "auto" what STAGING_MEMORY says. `ValueError` for other words."""
    if memory not in ("auto", "pinned", "pageable"):
        raise ValueError(f"StagingPool(memory={memory!r}): 'auto', 'pinned' or 'pageable'")
    if memory != "auto":
        return memory
    said = os.environ.get("STAGING_MEMORY", "") or "auto"
    if said not in ("auto", "pinned", "pageable"):
        raise ValueError(f"STAGING_MEMORY={said!r}: 'auto', 'pinned' or 'pageable'")
    return said  # type: ignore[return-value]


def limits() -> str:
    """The limits of this process that locking memory runs into, for messages."""
    try:
        import resource  # not on Windows

        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        locked = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft} bytes"
    except ImportError:
        locked = "unknown"
    return f"RLIMIT_MEMLOCK is {locked}, the cgroup's memory limit {_cgroup_limit()}"


def _cgroup_limit() -> str:
    for path in _CGROUP_LIMITS:
        try:
            text = Path(path).read_text().strip()
        except OSError:
            continue
        if text == "max" or (text.isdigit() and int(text) >= _UNLIMITED):
            return "unlimited"
        return f"{text} bytes"
    return "unknown"
