"""How much memory may be taken is half of what is free, by the host's account and by that of every control group."""

from pathlib import Path

import pytest

from capture.load.spare_memory import spare_bytes


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """Make a host with 1,000,000 KiB available, whose process is in the groups /a/b of versions 1 and 2."""
    _write(tmp_path / "proc/meminfo", "MemTotal: 4000000 kB\nMemAvailable: 1000000 kB\nHugePages_Total: 0\n")
    _write(tmp_path / "proc/self/cgroup", "5:cpu,memory:/a/b\n4:devices:/x\n0::/a/b\n")
    return tmp_path


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _spare(host: Path, processes: int = 1) -> int:
    return spare_bytes(processes, proc=host / "proc", groups=host / "groups")


def test_half_of_what_the_host_has_is_shared_by_its_processes(host: Path) -> None:
    assert _spare(host) == 512_000_000
    assert _spare(host, 4) == 128_000_000


@pytest.mark.parametrize("group", ["a/b", "a", ""])
def test_a_group_around_the_process_limits_it(host: Path, group: str) -> None:
    folder = host / "groups" / group
    _write(folder / "memory.max", "900\n")
    _write(folder / "memory.current", "500\n")
    _write(folder / "memory.stat", "anon 400\ninactive_file 40\n")
    assert _spare(host) == 220


def test_a_group_without_a_limit_changes_nothing(host: Path) -> None:
    _write(host / "groups/a/memory.max", "max\n")
    _write(host / "groups/a/memory.current", "500\n")
    assert _spare(host) == 512_000_000


def test_groups_of_version_1(host: Path) -> None:
    folder = host / "groups/memory/a/b"
    _write(folder / "memory.limit_in_bytes", "900\n")
    _write(folder / "memory.usage_in_bytes", "500\n")
    _write(folder / "memory.stat", "cache 7\ntotal_inactive_file 100\n")
    assert _spare(host) == 250


def test_a_group_beyond_its_limit_leaves_nothing(host: Path) -> None:
    _write(host / "groups/memory.max", "900\n")
    _write(host / "groups/memory.current", "1000\n")
    _write(host / "groups/memory.stat", "")
    assert _spare(host) == 0


def test_nothing_is_taken_where_the_host_says_nothing(tmp_path: Path) -> None:
    assert _spare(tmp_path) == 0
