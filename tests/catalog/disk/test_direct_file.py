"""A file that is written past the page cache holds exactly what was written, and leaves hardly any of it there."""

import ctypes
import errno
import mmap
import os
import resource
from pathlib import Path

import pytest
from catalog_helpers import can_be_direct, sizes_written

from catalog.disk import direct_file
from catalog.disk.direct_file import DirectFile, place_for

PIECE = direct_file._PIECE_BYTES


@pytest.mark.parametrize("sizes", [(), (0,), (1,), (PIECE,), (PIECE - 1, 2), (3 * PIECE + 5, 0, 7, PIECE)])
def test_the_file_has_what_was_written(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    parts = [os.urandom(size) for size in sizes]
    file = DirectFile(tmp_path / "file")
    for part in parts:
        file.write(part)
    file.close()
    assert (tmp_path / "file").read_bytes() == b"".join(parts)


@pytest.mark.parametrize("sizes", [(0,), (1, 4095, 1), (4096, 5000), (PIECE // 2, PIECE // 3, 7, PIECE // 2, 100)])
def test_what_is_made_in_its_memory_is_in_the_file_between_what_was_written(
    tmp_path: Path, sizes: tuple[int, ...]
) -> None:
    parts = [os.urandom(size) for size in sizes]
    file = DirectFile(tmp_path / "file")
    for part in parts:
        with file.room() as room:
            assert len(room) > PIECE - mmap.PAGESIZE
            room[: len(part)] = part
        file.extend(len(part))
        file.write(b"between")
    file.close()
    assert (tmp_path / "file").read_bytes() == b"".join(part + b"between" for part in parts)


@pytest.mark.parametrize("before", [0, 1, 4095, 4096, PIECE - 1, PIECE + 77])
@pytest.mark.parametrize("size", [PIECE, 3 * PIECE + 1234])
def test_many_bytes_that_lie_as_in_the_file_are_written_from_where_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: int, size: int
) -> None:
    first, content = os.urandom(before), os.urandom(size)
    memory = memoryview(bytearray(size + mmap.PAGESIZE))
    at = place_for(before, memory)
    assert at < mmap.PAGESIZE
    memory[at : at + size] = content
    file = _direct(tmp_path / "file")
    file.write(first)
    written = sizes_written(monkeypatch)
    file.write(memory[at : at + size])
    assert sum(written) > before % PIECE + size - mmap.PAGESIZE
    assert max(written) > size - 2 * mmap.PAGESIZE, "all whole pages in one call"
    memory[:] = bytes(len(memory))
    file.write(b"after")
    file.close()
    assert (tmp_path / "file").read_bytes() == first + content + b"after"


def test_bytes_that_lie_otherwise_are_gathered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = os.urandom(3 * PIECE)
    memory = memoryview(bytearray(len(content) + mmap.PAGESIZE))
    at = (place_for(0, memory) + 1) % mmap.PAGESIZE
    memory[at : at + len(content)] = content
    file = _direct(tmp_path / "file")
    written = sizes_written(monkeypatch)
    file.write(memory[at : at + len(content)])
    file.close()
    assert set(written) == {PIECE}
    assert (tmp_path / "file").read_bytes() == content


def test_the_page_cache_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "file"
    file = _direct(path)
    file.write(os.urandom(4 * PIECE + 100))
    file.close()
    assert 0 < _cached_bytes(path) <= PIECE


def test_blocks_that_are_larger_than_a_page_are_written_through_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the pieces are no multiple of the blocks instead: the kernel refuses these in the same way."""
    monkeypatch.setattr(direct_file, "_PIECE_BYTES", 1000)
    content = os.urandom(123_456)
    file = DirectFile(tmp_path / "file")
    file.write(content)
    file.close()
    assert (tmp_path / "file").read_bytes() == content


def test_an_existing_file_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("somebody else's")
    with pytest.raises(FileExistsError, match="file"):
        DirectFile(path)
    assert path.read_text() == "somebody else's"


def test_a_write_that_fails_is_an_error_and_leaves_no_descriptor(tmp_path: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    file = DirectFile(tmp_path / "file")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (PIECE, hard))
    try:
        with pytest.raises(OSError) as told:
            file.write(bytes(2 * PIECE))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert told.value.errno == errno.EFBIG
    file.abandon()
    file.abandon()
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_forked_child_writes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "file"
    file = DirectFile(path)
    file.write(b"begun")
    child = os.fork()
    if not child:
        del file
        os._exit(0)
    os.waitpid(child, 0)
    assert path.read_bytes() == b""
    file.close()
    assert path.read_bytes() == b"begun"


def _direct(path: Path) -> DirectFile:
    if not can_be_direct(path.parent):
        pytest.skip("this file system has no O_DIRECT")
    return DirectFile(path)


def _cached_bytes(path: Path) -> int:
    """Return how many bytes of a file the page cache has, by mincore(2)."""
    pages = -(-path.stat().st_size // mmap.PAGESIZE)
    found = (ctypes.c_ubyte * pages)()
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as content:
        address = ctypes.addressof(ctypes.c_char.from_buffer(content))
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(len(content)), found) == 0
    return sum(page & 1 for page in found) * mmap.PAGESIZE
