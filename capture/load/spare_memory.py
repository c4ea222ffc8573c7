"""How much host memory may be taken for a short time without harm to anybody: half of what is free."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

__all__ = ["spare_bytes"]

_NAMES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}
"""By version of control groups: the files with the limit and the use of a group, and the line of `memory.stat` with
what the kernel drops first."""


def spare_bytes(processes: int, *, proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes that this process may take for a short time while `processes` of the host do so at once.

    Half of what the host has available, or each control group that the process is in, if that is less, shared equally.
    0 where the host does not say what it has.
    """
    try:
        free = _numbers(proc / "meminfo")["MemAvailable:"] * 1024
    except (OSError, KeyError):
        return 0
    return max(0, min([free, *_free_of_groups(proc, groups)])) // 2 // processes


def _free_of_groups(proc: Path, groups: Path) -> Iterator[int]:
    with contextlib.suppress(OSError):
        for line in (proc / "self/cgroup").read_text().splitlines():
            _, controllers, name = line.split(":", 2)
            if not controllers:
                yield from _free_along(groups, name, version=2)
            elif "memory" in controllers.split(","):
                yield from _free_along(groups / "memory", name, version=1)


def _free_along(root: Path, name: str, *, version: int) -> Iterator[int]:
    """Yield what is free in a group and in those around it. In a container its own group may stand at the root."""
    limit, used, dropped_first = _NAMES[version]
    folder = root / name.lstrip("/")
    for group in (folder, *folder.parents):
        with contextlib.suppress(OSError, ValueError):  # ValueError: "max", which is no limit
            free = int((group / limit).read_text()) - int((group / used).read_text())
            yield free + _numbers(group / "memory.stat").get(dropped_first, 0)
        if group == root:
            return


def _numbers(path: Path) -> dict[str, int]:
    rows = map(str.split, path.read_text().splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}
