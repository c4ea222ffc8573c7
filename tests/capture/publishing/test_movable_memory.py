"""Only private memory without a file is taken for movable, and the host's own settings are respected."""

import mmap

import numpy as np
import pytest
from huge_pages import in_small_pages, whole_pages

from capture.publishing import movable_memory
from capture.publishing.movable_memory import can_be_moved, huge_page_setting, movable
from native import HUGE_PAGE_BYTES as PAGE


def pages_of(memory):
    address, nbytes = whole_pages(memory.ctypes.data, memory.nbytes)
    return np.arange(address // PAGE, (address + nbytes) // PAGE)


def test_private_memory_is_movable_and_memory_of_files_or_other_processes_is_not(tmp_path):
    path = tmp_path / "mapped"
    path.write_bytes(bytes(16 << 20))
    with path.open("r+b") as file:
        of_file = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    shared = mmap.mmap(-1, 16 << 20, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)
    read_only = mmap.mmap(-1, 16 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ)
    private = in_small_pages(16 << 20)
    others = [pages_of(np.frombuffer(memory, np.uint8)) for memory in (of_file, shared, read_only)]
    assert all(len(pages) >= 6 for pages in others)
    asked = np.unique(np.concatenate([pages_of(private), *others]))
    assert movable(asked).tolist() == pages_of(private).tolist()


def test_a_huge_page_on_the_edge_of_a_mapping_is_not_movable():
    memory = in_small_pages(16 << 20)
    pages = pages_of(memory)
    around = np.arange(pages[0] - 1, pages[-1] + 2)
    assert set(pages.tolist()) <= set(movable(around).tolist())
    # The guards of the memory are other mappings, so that the pages around lie in two of them.
    assert len(movable(around)) == len(pages)
    assert movable(np.array([0, 1 << 26])).tolist() == []


def test_a_mapping_is_told_by_its_line_and_no_line_is_an_error(tmp_path, monkeypatch):
    private, odd, file = (i * 8 * PAGE for i in (1, 2, 3))
    lines = [
        f"{private:x}-{private + 2 * PAGE:x} rw-p 00000000 00:00 0 ".encode(),
        f"{odd:x}-{odd + 2 * PAGE:x} rw-p 00000000 00:00 0    [anon: a name]".encode(),
        f"{file:x}-{file + 2 * PAGE:x} rw-p 00000000 08:01 77   /a file\r with \xff".encode("latin-1"),
        b"",
        b"rest of a name",
    ]
    monkeypatch.setattr(movable_memory, "_MAPPINGS", tmp_path / "maps")
    pages = np.concatenate([np.arange(begin // PAGE, begin // PAGE + 3) for begin in (private, odd, file)])
    assert movable(pages).tolist() == []
    (tmp_path / "maps").write_bytes(b"\n".join(lines))
    assert movable(pages).tolist() == [begin // PAGE + i for begin in (private, odd) for i in range(2)]


@pytest.mark.parametrize(
    ("files", "release", "setting", "is_possible"),
    [
        ({"enabled": "always [madvise] never"}, "6.2.0-1-generic", "madvise", True),
        ({"enabled": "[always] madvise never"}, "7.0", "always", True),
        ({"enabled": "always [madvise] never"}, "6.1.99", "madvise", False),
        ({"enabled": "always [madvise] never"}, "unknown", "madvise", False),
        ({"enabled": "always madvise [never]"}, "6.8", "never", False),
        ({"enabled": "always [madvise] never", "hpage_pmd_size": "33554432\n"}, "6.8", "madvise", False),
        (
            {"enabled": "[always] madvise never", "hugepages-2048kB/enabled": "always inherit madvise [never]"},
            "6.8",
            "never",
            False,
        ),
        (
            {"enabled": "always [madvise] never", "hugepages-2048kB/enabled": "always [inherit] madvise never"},
            "6.8",
            "madvise",
            True,
        ),
        (
            {"enabled": "always madvise [never]", "hugepages-2048kB/enabled": "always inherit [madvise] never"},
            "6.8",
            "madvise",
            True,
        ),
        ({}, "6.8", "never", False),
    ],
)
def test_what_the_host_says_decides(tmp_path, monkeypatch, files, release, setting, is_possible):
    for name, text in ({"hpage_pmd_size": "2097152\n"} | files).items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(movable_memory, "_SETTINGS", tmp_path)
    monkeypatch.setattr(movable_memory.platform, "release", lambda: release)
    assert huge_page_setting() == setting
    assert can_be_moved() is is_possible
