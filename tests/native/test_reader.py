"""The reader puts extents of files where they are wanted, with their checksums, or an error names the file."""

import errno
import itertools
import os
import stat
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from native_helpers import ALIGN, BLOCK, MIB, Piece, arena, extents, pieces, same_bytes

import native

numbers = itertools.count()


@dataclass(frozen=True)
class Stored:
    """This holds a file's content, and the extents to read from it into an arena."""

    path: Path
    content: bytes
    offsets: np.ndarray
    addresses: np.ndarray
    positions: np.ndarray
    nbytes: np.ndarray
    target: np.ndarray


def stored(folder: Path, layout: list[Piece], *, seed: int, trim: bool = True) -> Stored:
    data = extents(layout, seed=seed)
    used = int((data.offsets + data.nbytes).max()) if layout else 0
    content = np.random.default_rng(seed).integers(0, 256, used if trim else data.data_end, np.uint8).tobytes()
    path = folder / f"{next(numbers)}"
    path.write_bytes(content)
    target = arena(data.memory.size)
    return Stored(
        path,
        content,
        data.offsets,
        data.positions + np.uint64(target.ctypes.data),
        data.positions,
        data.nbytes,
        target,
    )


def read(*files: Stored, order: np.ndarray | None = None, **options: int) -> bytes:
    index = np.repeat(np.arange(len(files), dtype=np.uint32), [len(file.offsets) for file in files])
    columns = [np.concatenate([getattr(file, name) for file in files]) for name in ("offsets", "addresses", "nbytes")]
    if order is not None:
        index, *columns = (column[order] for column in (index, *columns))
    return native.read(
        [str(file.path) for file in files],
        file_index=index,
        offsets=columns[0],
        addresses=columns[1],
        nbytes=columns[2],
        **options,
    )


def one_extent(folder: Path, nbytes: int = 3 * MIB, place: str = "congruent") -> Stored:
    return stored(folder, [Piece(nbytes, 0, place, False)], seed=1)


@given(
    layouts=st.lists(pieces(), min_size=1, max_size=3),
    block_bytes=st.sampled_from([ALIGN, BLOCK, MIB]),
    depth=st.integers(1, 6),
    shuffle=st.randoms(use_true_random=False),
    trim=st.booleans(),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_read_bytes_equal_the_file(tmp_path: Path, layouts, block_bytes, depth, shuffle, trim) -> None:
    files = [stored(tmp_path, layout, seed=seed, trim=trim) for seed, layout in enumerate(layouts)]
    order = list(range(sum(map(len, layouts))))
    shuffle.shuffle(order)
    digests = read(*files, order=np.array(order, dtype=np.intp), block_bytes=block_bytes, depth=depth)
    wants = []
    for file in files:
        untouched = np.ones(file.target.size, dtype=bool)
        for offset, at, nbytes in zip(
            file.offsets.tolist(), file.positions.tolist(), file.nbytes.tolist(), strict=True
        ):
            want = file.content[offset : offset + nbytes]
            same_bytes(file.target[at : at + nbytes].tobytes(), want)
            untouched[at : at + nbytes] = False
            wants.append(native.checksum(want))
        assert not file.target[untouched].any()
        file.path.unlink()
    assert digests == b"".join(wants[i] for i in order)


def test_an_empty_list_of_extents_reads_nothing(tmp_path: Path) -> None:
    assert read(stored(tmp_path, [], seed=0)) == b""
    empty = stored(tmp_path, [Piece(0, 0, "odd", False)] * 3, seed=0)
    empty.path.unlink()
    assert read(empty) == native.checksum(b"") * 3


def test_an_empty_extent_overlaps_nothing(tmp_path: Path) -> None:
    file = stored(tmp_path, [Piece(0, 0, "odd", False), Piece(100, 0, "odd", False)], seed=0)
    file.offsets[0] += 50
    assert read(file)[:16] == native.checksum(b"")


@pytest.mark.parametrize("place", ["congruent", "odd"])
@pytest.mark.parametrize("cut", [1, ALIGN, ALIGN + 1, MIB, 3 * MIB, 3 * MIB + ALIGN])
def test_a_file_that_ends_early_is_an_error_that_names_it(tmp_path: Path, place, cut) -> None:
    good, file = one_extent(tmp_path, place=place), one_extent(tmp_path, place=place)
    with file.path.open("r+b") as stream:
        stream.truncate(len(file.content) - cut)
    with pytest.raises(OSError, match="ends early") as failure:
        read(good, file)
    assert failure.value.errno == errno.EIO
    assert failure.value.filename == str(file.path)
    assert "at offset" in str(failure.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    file = one_extent(tmp_path)
    file.path.unlink()
    with pytest.raises(FileNotFoundError) as failure:
        read(file)
    assert failure.value.filename == str(file.path)


@pytest.mark.parametrize("kind", ["FIFO", "device", "symbolic link"])
def test_only_regular_files_are_read(tmp_path: Path, kind) -> None:
    """The opening of a FIFO would wait for a writer for ever, and a device may give bytes without end."""
    file = one_extent(tmp_path)
    other = file.path.rename(tmp_path / "other")
    if kind == "FIFO":
        os.mkfifo(file.path)
    elif kind == "symbolic link":
        file.path.symlink_to(other)
    else:
        if os.geteuid() != 0:
            pytest.skip("needs root to make a device")
        os.mknod(file.path, stat.S_IFCHR | 0o600, os.makedev(1, 5))  # /dev/zero
    with pytest.raises(OSError, match=f"open of a {kind}, where only a regular file is read") as failure:
        read(file)
    assert failure.value.filename == str(file.path)


def test_a_folder_is_not_a_file(tmp_path: Path) -> None:
    file = one_extent(tmp_path)
    file.path.unlink()
    file.path.mkdir()
    with pytest.raises(IsADirectoryError) as failure:
        read(file)
    assert failure.value.filename == str(file.path)


@pytest.mark.parametrize("place", ["congruent", "odd"])
@pytest.mark.parametrize("at", [0, BLOCK - 1, BLOCK, 3 * MIB - 1])
def test_a_flipped_bit_gives_another_checksum(tmp_path: Path, place, at) -> None:
    file = one_extent(tmp_path, place=place)
    before = read(file, block_bytes=BLOCK)
    content = bytearray(file.content)
    content[int(file.offsets[0]) + at] ^= 0x10
    file.path.write_bytes(content)
    assert read(file, block_bytes=BLOCK) != before


@pytest.mark.parametrize(
    ("offsets", "nbytes", "message"),
    [
        ([0, 99], [100, 100], "overlap at offset 99"),
        ([50, 50], [10, 10], "overlap at offset 50"),
        ([0, 2**63], [10, 10], "extent 1 has 10 bytes at offset 9223372036854775808, where no file reaches"),
        ([0, 2**64 - 1], [10, 10], "where no file reaches"),
        ([0, 10], [10, 2**64 - 5], "where no file reaches"),
    ],
)
def test_extents_that_cannot_be_are_refused(tmp_path: Path, offsets, nbytes, message) -> None:
    file = stored(tmp_path, [Piece(100, 0, "odd", False)] * 2, seed=0)
    file.offsets[:] = offsets
    file.nbytes[:] = nbytes
    with pytest.raises(ValueError, match=message):
        read(file)


def test_the_same_place_of_two_files_does_not_overlap(tmp_path: Path) -> None:
    files = [one_extent(tmp_path, 1000) for _ in range(2)]
    assert read(*files) == native.checksum(files[0].content[ALIGN:]) * 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_bytes": 0}, "multiple of 4096 up to 1073741824, not 0"),
        ({"block_bytes": 4097}, "not 4097"),
        ({"depth": 0}, "between 1 and 1024, not 0"),
    ],
)
def test_wrong_options_are_refused_by_value(tmp_path: Path, options, message) -> None:
    with pytest.raises(ValueError, match=message):
        read(one_extent(tmp_path, 10), **options)


def test_wrong_columns_are_refused_by_value(tmp_path: Path) -> None:
    file = one_extent(tmp_path, 10)
    right = {
        "file_index": np.zeros(1, np.uint32),
        "offsets": file.offsets,
        "addresses": file.addresses,
        "nbytes": file.nbytes,
    }
    paths = [str(file.path)]
    native.read(paths, **right)
    with pytest.raises(ValueError, match="request 0 names file 1 of 1"):
        native.read(paths, **(right | {"file_index": np.ones(1, np.uint32)}))
    with pytest.raises(ValueError, match="addresses has 0 entries where offsets has 1"):
        native.read(paths, **(right | {"addresses": file.addresses[:0]}))
    with pytest.raises(ValueError, match="extent 0 has 10 bytes at address 0"):
        native.read(paths, **(right | {"addresses": np.zeros(1, np.uint64)}))


@pytest.mark.parametrize(
    ("nbytes", "checksum"),
    [
        (0, "99aa06d3014798d86001c324468d497f"),
        (1, "a6cd5e9392000f6ac44bdff4074eecdb"),
        (3, "e3b55f57945a17cf5f4299fc161c9cbb"),
        (4, "eb70bf5fc779e9e6a6111d53e80a3db5"),
        (8, "e1e4432a62217fe4cfd50c61c8bb98c1"),
        (9, "16c769d83e4aebce907931979dca3746"),
        (16, "72950631827607e2842812cc870dcae2"),
        (17, "685bc458b37d057fc06e233df7729217"),
        (128, "14792fc3af88dc6c05321a0b64d67b41"),
        (129, "dd5e74ac6b45f54ebc30b63382b09a3b"),
        (240, "65b5be86da5540e7c92b68e16f83bbb6"),
        (241, "1da1cb61bcb8a2a102e8cd95421c6d02"),
        (1024, "d0ac1f7b93bf57b9e5d78bafa45b2aa5"),
        (1025, "2882ebca04ec915ce95c42288f28186e"),
        (5000, "b92ec02c39d33ce7b418500fc42320ee"),
        (100003, "b02e921ecad88f0facf33ba3cf61e369"),
    ],
)
def test_checksums_are_xxh3_128_in_canonical_form(nbytes: int, checksum: str) -> None:
    """The expected values come from libxxhash itself, one length for each way the hash takes."""
    data = (bytes(range(251)) * (nbytes // 251 + 1))[:nbytes]
    assert native.checksum(data).hex() == checksum


@given(st.binary(max_size=3000))
@settings(max_examples=30, deadline=None)
def test_a_checksum_depends_on_the_bytes_alone(data: bytes) -> None:
    assert native.checksum(data) == native.checksum(bytearray(data)) == native.checksum(np.frombuffer(data, np.uint8))
    assert len(native.checksum(data)) == 16


def test_a_checksum_requires_contiguous_bytes() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        native.checksum(np.zeros((4, 4))[:, 1])
    with pytest.raises(TypeError):
        native.checksum("text")
