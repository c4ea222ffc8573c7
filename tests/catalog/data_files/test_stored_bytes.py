"""The one way to read data files verifies the bytes, and its errors name tensor, file and offset."""

import errno
from pathlib import Path

import numpy as np
import pytest

import native
from catalog.data_files.pieces import Piece
from catalog.data_files.stored_bytes import ReadBuffer, read_to, read_unverified, read_verified
from catalog.errors import CorruptError
from catalog.records import Extent

CONTENT = bytes(range(64))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "a").write_bytes(CONTENT)
    (tmp_path / "b").write_bytes(CONTENT[::-1])
    return tmp_path


def extent(file: str, offset: int, nbytes: int, name: str = "w") -> Extent:
    stored = (CONTENT if file == "a" else CONTENT[::-1])[offset : offset + nbytes].ljust(nbytes)
    return Extent(
        name, "model", "U8", (nbytes,), 0, nbytes, file, offset, nbytes, native.checksum(stored), "partitioned"
    )


def test_pieces_of_several_files_go_where_they_are_wanted(root):
    memory = np.zeros(12, np.uint8)
    checksums = read_to(root, [Piece("b", 4, 4), Piece("a", 60, 4)], [memory.ctypes.data + 8, memory.ctypes.data])
    assert memory.tobytes() == CONTENT[60:] + bytes(4) + CONTENT[::-1][4:8]
    assert checksums == native.checksum(CONTENT[::-1][4:8]) + native.checksum(CONTENT[60:])


def test_a_buffer_gives_the_pieces_in_order(root):
    pieces, checksums = ReadBuffer().read(root, [Piece("a", 10, 4), Piece("b", 0, 2)])
    assert [piece.tobytes() for piece in pieces] == [CONTENT[10:14], CONTENT[::-1][:2]]
    assert checksums == native.checksum(CONTENT[10:14]) + native.checksum(CONTENT[::-1][:2])


def test_a_buffer_leaves_the_checksums_to_who_wants_no_others(root):
    (piece,), checksums = ReadBuffer().read(root, [Piece("a", 10, 4)], checksums=False)
    assert piece.tobytes() == CONTENT[10:14]
    assert checksums == b""


@pytest.mark.parametrize("seed", range(8))
def test_pieces_lie_where_the_disk_can_put_them(tmp_path, seed):
    """Direct reads want address and offset aligned at once; a buffer that is used again fits other pieces too."""
    random = np.random.default_rng(seed)
    content = random.integers(0, 256, 300_000, np.uint8).tobytes()
    for name in "ab":
        (tmp_path / name).write_bytes(content)
    buffer = ReadBuffer()
    for _ in range(4):
        pieces = []
        for name in "ab":
            bounds = np.sort(random.integers(0, len(content), 2 * random.integers(1, 9)))
            pieces += [Piece(name, int(at), int(end - at)) for at, end in bounds.reshape(-1, 2)]
        found, checksums = buffer.read(tmp_path, pieces)
        expected = [content[offset : offset + nbytes] for _, offset, nbytes, _ in pieces]
        assert [data.tobytes() for data in found] == expected
        assert checksums == b"".join(map(native.checksum, expected))
        assert all(
            data.ctypes.data % 4096 == offset % 4096 for data, (_, offset, _, _) in zip(found, pieces, strict=True)
        )


def test_an_empty_list_of_reads_is_accepted(root):
    read_verified(root, [])


def test_verified_bytes_equal_the_written_ones(root):
    memory = np.zeros(8, np.uint8)
    read_verified(root, [(extent("a", 3, 8), memory.ctypes.data)])
    assert memory.tobytes() == CONTENT[3:11]


def test_damage_names_tensor_file_and_offset(root):
    fine, broken = extent("a", 0, 8), extent("b", 16, 8, name="damaged.weight")
    (root / "b").write_bytes(bytes(64))
    memory = np.zeros(16, np.uint8)
    with pytest.raises(CorruptError, match=r"/b: model 'damaged\.weight' at offset 16: .*the file is damaged"):
        read_verified(root, [(fine, memory.ctypes.data), (broken, memory.ctypes.data + 8)])


def test_a_cut_file_names_the_affected_tensor(root):
    fine, beyond = extent("b", 0, 8), extent("b", 60, 8, name="last.weight")
    memory = np.zeros(16, np.uint8)
    with pytest.raises(CorruptError, match=r"/b: model 'last\.weight' at offset 60: .*truncated") as caught:
        read_verified(root, [(fine, memory.ctypes.data), (beyond, memory.ctypes.data + 8)])
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == errno.EIO


def test_a_part_is_read_without_a_checksum_and_its_absence_is_named(root):
    memory = np.zeros(4, np.uint8)
    read_unverified(root, extent("a", 8, 16), memory.ctypes.data, skip_bytes=6, nbytes=4)
    assert memory.tobytes() == CONTENT[14:18]
    (root / "a").unlink()
    with pytest.raises(CorruptError, match=r"/a: model 'w' at offset 8: No such file"):
        read_unverified(root, extent("a", 8, 16), memory.ctypes.data, skip_bytes=6, nbytes=4)


@pytest.mark.parametrize("times", [1, 2])
def test_a_stale_file_is_opened_once_more_by_its_name(root, monkeypatch, times):
    """As on NFS, where another host has put another file in the place of one that was just found."""
    left, read = [None] * times, native.read

    def stale(paths, **options):
        if left:
            left.pop()
            raise OSError(errno.ESTALE, "Stale file handle", paths[0])
        return read(paths, **options)

    monkeypatch.setattr(native, "read", stale)
    if times == 1:
        (piece,), _ = ReadBuffer().read(root, [Piece("a", 10, 4)])
        assert piece.tobytes() == CONTENT[10:14]
    else:
        with pytest.raises(OSError, match="Stale file handle"):
            ReadBuffer().read(root, [Piece("a", 10, 4)])
        assert not left
