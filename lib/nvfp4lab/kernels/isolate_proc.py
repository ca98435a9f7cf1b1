"""What /proc tells about a worker and its descendants: is something compiling, and how much memory do they hold?"""

import os
from collections.abc import Iterator
from pathlib import Path

# A kernel that builds itself on first use is compiling, not hung: one Marlin build takes over seven minutes.
COMPILERS = frozenset({"nvcc", "cicc", "ptxas", "ninja", "cudafe++", "fatbinary", "nvlink", "cc1plus", "hipcc"})
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def children(pid: int) -> list[int]:
    """Children of `pid`, dead ones that nobody has waited for included; [] if it has ended."""
    try:
        return [int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()]
    except ProcessLookupError:
        return []
    except FileNotFoundError:  # it has ended, or the kernel was built without this file (as gVisor is): look at every process
        return [other for other in (int(folder.name) for folder in Path("/proc").glob("[0-9]*")) if _parent(other) == pid]


def _parent(pid: int) -> int | None:
    status = _read(pid, "status")
    found = [line for line in status.splitlines() if line.startswith("PPid:")]
    return int(found[0].split()[1]) if found else None


def tree(pid: int) -> Iterator[int]:
    """`pid` and all its living descendants. Processes that end meanwhile are left out."""
    yield pid
    for child in children(pid):
        yield from tree(child)


def is_compiling(pid: int) -> bool:
    """Whether a compiler runs below `pid`."""
    return any(_read(member, "comm").strip() in COMPILERS for member in tree(pid) if member != pid)


def rss_bytes(pid: int) -> int:
    """Resident bytes of `pid` and its descendants; pages that they share count once for each."""
    return sum(int(fields[1]) * _PAGE_BYTES for member in tree(pid) if (fields := _read(member, "statm").split()))


def oom_kills() -> int:
    """How many processes this kernel has killed for want of memory since it booted (0 where it does not count)."""
    lines = Path("/proc/vmstat").read_text().splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def _read(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
