"""What is wrong with a packed file or its base is found and named, and a data file may give way while it is read."""

import errno
import os
from pathlib import Path

import pytest
from catalog_helpers import flip_bit
from packed_helpers import RUN, all_bytes, compacted, make_history, ref

from catalog.data_files import packed_bytes, stored_bytes
from catalog.data_files.check_data import check_data_file
from catalog.data_files.pieces import Piece, piece_of
from catalog.encoding.planes import packed
from catalog.errors import CorruptError, FormatError
from catalog.format.packed_file import MAGIC, MAX_BLOCK_BYTES, Base, Block, encode_end, read_packed_file
from catalog.history import History
from catalog.paths import data_file, packed_file
from catalog.read.checkpoint import check_data_files, read_checkpoint
from catalog.verify import verify
from native import checksum

STEPS = range(0, 30, 10)
EVERY = 37
"""Of the blocks and the table one byte in so many is flipped; all are when this is 1, which takes minutes."""


@pytest.fixture
def history(tmp_path: Path) -> History:
    """Return a history of a key frame and two checkpoints that were packed against it."""
    made = make_history(tmp_path / "h", steps=STEPS, elements=40, world_size=1)
    compacted(made)
    return made


def image(history: History, step: int) -> Path:
    return history.root / packed_file(data_file(RUN, step, 0))


def base_offsets(history: History, step: int) -> set[int]:
    """Return where in the key frame the bases of a checkpoint's blocks begin."""
    blocks = read_packed_file(image(history, step), file=data_file(RUN, step, 0)).blocks()
    return {block.base.offset for block in blocks if block.base is not None}


def rewrite(path: Path, *, file: str, blocks: list[Block]) -> None:
    """Give a packed file another table, as a hostile hand would."""
    about = read_packed_file(path, file=file)
    end = max(block.offset + block.stored for block in about.blocks())
    _, step, rank = RUN, int(file.split("/")[3]), 0
    path.write_bytes(
        path.read_bytes()[:end] + encode_end(blocks, run=RUN, step=step, rank=rank, data_bytes=about.data_bytes)
    )


@pytest.mark.guards("Damage is found and named")
def test_flipped_bytes_of_every_part_of_a_packed_file_are_found(history: History) -> None:
    path = image(history, 10)
    (manifest,) = read_checkpoint(history.paths, RUN, 10).manifests
    whole = path.read_bytes()
    missed = []
    for offset in (*range(8), *range(8, len(whole) - 16, EVERY), *range(len(whole) - 16, len(whole))):
        changed = bytearray(whole)
        changed[offset] ^= 1 << offset % 8
        path.write_bytes(changed)
        found = list(check_data_file(history.root, manifest, progress=lambda nbytes: None))
        if {one.file for one in found} != {manifest.file}:
            missed.append(offset)
    for changed_length in (whole[:-1], whole + b"\0", whole[:20], b""):
        path.write_bytes(changed_length)
        assert {problem.file for problem in verify(history, [ref(10)])} == {manifest.file}
    assert missed == []


def test_a_damaged_base_is_named_with_what_needs_it(history: History) -> None:
    path = image(history, 0)
    offset = min(base_offsets(history, 10) & base_offsets(history, 20))
    (used,) = read_packed_file(path, file=data_file(RUN, 0, 0)).covering(offset, 1)
    flip_bit(path, offset=used.offset + used.stored - 1)
    problems = verify(history)
    assert {problem.file for problem in problems} == {data_file(RUN, step, 0) for step in STEPS}
    needing = [problem.message for problem in problems if problem.file != data_file(RUN, 0, 0)]
    assert all(str(path) in message and "need bytes" in message for message in needing)


def test_a_base_that_is_a_data_file_again_is_used_and_compared(history: History, tmp_path: Path) -> None:
    again = make_history(tmp_path / "again", steps=STEPS, elements=40, world_size=1)
    before = all_bytes(again)
    raw = (again.root / data_file(RUN, 0, 0)).read_bytes()
    image(history, 0).unlink()
    (history.root / data_file(RUN, 0, 0)).write_bytes(raw)
    assert all_bytes(history) == before
    (history.root / data_file(RUN, 0, 0)).write_bytes(bytes(len(raw)))
    with pytest.raises(CorruptError, match=r"need bytes .* of runs/run-a/steps/000000000000/.*the base is damaged"):
        all_bytes_of(history, 10)


def all_bytes_of(history: History, step: int) -> None:
    for extent in history.extents(ref(step)):
        stored_bytes.ReadBuffer().read(history.root, [piece_of(extent)])


@pytest.mark.guards("Damage is found and named")
def test_a_circle_of_bases_ends_by_name(history: History) -> None:
    first, second = data_file(RUN, 0, 0), data_file(RUN, 10, 0)
    about = read_packed_file(image(history, 0), file=first)
    circle = [block._replace(base=Base(second, block.begin, bytes(16))) for block in about.blocks()]
    rewrite(image(history, 0), file=first, blocks=circle)
    with pytest.raises(FormatError, match=f"{second}, where a base of others must need none"):
        all_bytes_of(history, 10)
    with pytest.raises(FormatError, match="where a base of others must need none"):
        all_bytes_of(history, 0)
    assert {problem.file for problem in verify(history)} >= {first, second}


def test_tables_that_break_a_rule_are_refused(history: History) -> None:
    file, path = data_file(RUN, 10, 0), image(history, 10)
    whole = path.read_bytes()
    blocks = list(read_packed_file(path, file=file).blocks())
    own = blocks[0]._replace(base=Base(file, 0, bytes(16)))
    outside = blocks[0]._replace(base=Base("../../etc/passwd", 0, bytes(16)))
    for changed, told in (
        (blocks[1:], "do not cover the bytes"),
        ([*blocks, blocks[-1]], "do not cover the bytes"),
        ([own, *blocks[1:]], "is no other data file"),
        ([outside, *blocks[1:]], "is no other data file"),
        ([blocks[0]._replace(nbytes=1 << 60), *blocks[1:]], "are allowed"),
        ([blocks[0]._replace(nbytes=MAX_BLOCK_BYTES + 1), *blocks[1:]], f"{MAX_BLOCK_BYTES} are allowed"),
        ([blocks[0]._replace(stored=1 << 50), *blocks[1:]], "takes more than its own bytes"),
        ([blocks[0]._replace(base=Base(data_file(RUN, 0, 0), -1, bytes(16))), *blocks[1:]], "is out of range"),
    ):
        rewrite(path, file=file, blocks=changed)
        with pytest.raises(FormatError, match=told):
            read_packed_file(path, file=file)
        path.write_bytes(whole)
    with pytest.raises(FormatError, match="the fields are"):
        read_packed_file(path, file=data_file(RUN, 20, 0))


def test_an_image_of_more_bytes_than_its_manifest_says_is_not_unpacked(
    history: History, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few bytes may stand for any number of equal ones."""
    (manifest,) = read_checkpoint(history.paths, RUN, 10).manifests
    zeros = packed(memoryview(bytes(MAX_BLOCK_BYTES)), itemsize=1)
    assert len(zeros) < 30
    content, blocks = MAGIC, []
    while len(blocks) < 1000:
        begin = len(blocks) * MAX_BLOCK_BYTES
        blocks.append(Block(begin, MAX_BLOCK_BYTES, len(content), len(zeros), checksum(zeros), None))
        content += zeros
    size = len(blocks) * MAX_BLOCK_BYTES
    image(history, 10).write_bytes(content + encode_end(blocks, run=RUN, step=10, rank=0, data_bytes=size))
    monkeypatch.setattr(stored_bytes, "read_images", None)
    (found,) = check_data_file(history.root, manifest, progress=lambda nbytes: None)
    assert (found.field, found.message) == ("data_bytes", f"{size} bytes, the manifest says {manifest.data_bytes}")
    with pytest.raises(CorruptError, match="truncated or changed"):
        history.extents(ref(10))


def test_a_symbolic_link_in_place_of_an_image_is_refused(history: History, tmp_path: Path) -> None:
    path = image(history, 10)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FormatError, match="symbolic link"):
        check_data_files(history.paths, read_checkpoint(history.paths, RUN, 10))


def test_a_data_file_that_gives_way_between_look_and_open_is_read_from_its_image(
    history: History, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = all_bytes(history)
    looks = []

    def late(root: Path, files: set[str]) -> frozenset[str]:
        """Say first, as before the data file gave way, that nothing is packed."""
        looks.append(files)
        return frozenset() if len(looks) == 1 else looked(root, files)

    looked = stored_bytes.only_packed
    monkeypatch.setattr(stored_bytes, "only_packed", late)
    extent = next(one for one in history.extents(ref(10)) if one.name == "F32.weight")
    (found,), _ = stored_bytes.ReadBuffer().read(history.root, [piece_of(extent)])
    assert len(looks) == 2
    assert found.tobytes() == expected[10, extent.kind, extent.name, extent.start]


@pytest.mark.parametrize("of", [data_file(RUN, 10, 0), data_file(RUN, 0, 0)], ids=["image", "base"])
def test_a_stale_file_is_opened_once_more_by_its_name(
    history: History, monkeypatch: pytest.MonkeyPatch, of: str
) -> None:
    """As on NFS, where what was open is gone when another host has put another file in its place."""
    expected = all_bytes(history)
    stale: list[str] = []
    read, most = packed_bytes._read, 1

    def once(path: Path, descriptor: int, offset: int, nbytes: int) -> bytes:
        if path == history.root / packed_file(of) and len(stale) < most:
            stale.append(str(path))
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return read(path, descriptor, offset, nbytes)

    monkeypatch.setattr(packed_bytes, "_read", once)
    extent = next(one for one in history.extents(ref(10)) if one.name == "F32.weight")
    piece = piece_of(extent)
    (found,), _ = stored_bytes.ReadBuffer().read(history.root, [piece])
    assert len(stale) == 1
    assert found.tobytes() == expected[10, extent.kind, extent.name, extent.start]
    most = 3
    with pytest.raises(OSError, match="Stale") as raised:
        stored_bytes.ReadBuffer().read(history.root, [piece])
    assert raised.value.errno == errno.ESTALE
    assert len(stale) == 3


def test_any_part_of_an_extent_can_be_read(history: History) -> None:
    expected = all_bytes(history)
    extent = next(one for one in history.extents(ref(20)) if one.name == "F64.weight")
    whole = expected[20, extent.kind, extent.name, extent.start]
    buffer = stored_bytes.ReadBuffer()
    for begin, end in ((0, 1), (7, 100), (extent.nbytes - 3, extent.nbytes), (5, 5)):
        (found,), _ = buffer.read(history.root, [piece_of(extent, skip_bytes=begin, nbytes=end - begin)])
        assert found.tobytes() == whole[begin:end]
    size = image(history, 20).stat().st_size
    with pytest.raises(OSError, match="of a file of"):
        buffer.read(history.root, [Piece(extent.file, 1000 * size, 10)])
