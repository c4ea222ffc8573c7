"""A segment of a redo log is whole or not there, and every way in which it contradicts itself is named."""

import json
import os

import numpy as np
import pytest
from redo_helpers import add

import native
from catalog.disk.json_file import encode
from catalog.encoding.planes import unpacked
from catalog.errors import CorruptError, FormatError
from catalog.format import redo_writer
from catalog.format.redo_reader import open_blocks, read_redo_segment
from catalog.format.redo_segment import (
    BIAS_CORRECTION_SINCE,
    BLOCK_BYTES,
    RedoFlat,
    RedoFragment,
    RedoTensor,
    RedoWrites,
    is_redo_segment,
    redo_segments,
)
from catalog.format.redo_writer import PackedBlock, RedoFileWriter
from catalog.paths import HistoryPaths

WEIGHT = RedoTensor("gradient", "a.weight", "F32", (2, 3))
WRITES = RedoWrites((("a.weight",),))
FLAT = RedoFlat("flat 0", "F32", (8,), "partitioned", False, (RedoFragment("a.weight", 0, 6, 1),))
SECOND = RedoFlat("flat 1", "F32", (2,), "partitioned", False, ())
FLATS = RedoWrites((("flat 0",), ("flat 1",)), (FLAT, SECOND), (("flat 0",), ("flat 1",)), world_size=2)
TABLE = RedoTensor("buffer", "table", "I64", ())


@pytest.fixture
def paths(tmp_path):
    found = HistoryPaths(tmp_path)
    found.run_dir("run-a").mkdir(parents=True)
    return found


def write(paths, *, steps=(3, 4, 6)):
    writer = RedoFileWriter(paths, "run-a", 0, {"class": "SGD"}, WRITES)
    for step in steps:
        add(writer, WEIGHT, bytes([step]) * 24)
        if step == 4:
            add(writer, TABLE, bytes(8))
        writer.end_step(step, groups=[{"lr": 0.1 if step < 6 else 0.05}], broken="an edit" if step == 6 else None)
    writer.publish()
    (name,) = redo_segments(paths, "run-a")
    return paths.redo_dir("run-a") / name.name


def rewritten(path, change):
    """Write the footer anew, with a right checksum, after `change` has changed it."""
    data = path.read_bytes()
    length = int.from_bytes(data[-16:-8], "little")
    content = json.loads(data[-16 - length : -16])
    del content["checksum"]
    change(content)
    footer = encode(content)
    path.write_bytes(data[: -16 - length] + footer + len(footer).to_bytes(8, "little") + data[-8:])


def read_all(path):
    segment = read_redo_segment(path, run="run-a")
    return contents(segment, [block for step in segment.steps for block in step.blocks])


def contents(segment, blocks):
    """Return the bytes for which these blocks stand."""
    found = []
    with open_blocks(segment) as read:
        for block in blocks:
            found.append(bytearray(block.nbytes))
            unpacked(read(block), into=memoryview(found[-1]))
    return found


def test_what_was_written_is_read(paths):
    path = write(paths)
    assert path.name == "rank-00000-000000000003-to-000000000006.redo"
    assert is_redo_segment(path.name)
    assert not is_redo_segment("rank-00000-000000000006-to-000000000003.redo")
    segment = read_redo_segment(path, run="run-a")
    assert (segment.rank, segment.rule, segment.writes) == (0, {"class": "SGD"}, WRITES)
    assert segment.tensors == (WEIGHT, TABLE)
    assert [(one.step, one.groups, one.broken) for one in segment.steps] == [
        (3, [{"lr": 0.1}], None),
        (4, [{"lr": 0.1}], None),
        (6, [{"lr": 0.05}], "an edit"),
    ]
    assert contents(segment, segment.steps[1].blocks) == [bytes([4]) * 24, bytes(8)]


def test_what_is_given_up_leaves_nothing(paths):
    writer = RedoFileWriter(paths, "run-a", 0, {}, RedoWrites(()))
    add(writer, WEIGHT, bytes(24))
    writer.abort()
    RedoFileWriter(paths, "run-a", 0, {}, RedoWrites(())).publish()
    assert list(paths.redo_dir("run-a").iterdir()) == []


def test_a_forked_child_that_lets_go_of_a_segment_writes_nothing_into_it(paths):
    writer = RedoFileWriter(paths, "run-a", 0, {"class": "SGD"}, RedoWrites((("a.weight",),)))
    add(writer, WEIGHT, bytes([3]) * 24)
    child = os.fork()
    if child == 0:
        # As when an interpreter ends, or collects what nobody refers to.
        writer._file = None
        os._exit(0)
    os.waitpid(child, 0)
    writer.end_step(3, groups=[], broken=None)
    writer.publish()
    (name,) = redo_segments(paths, "run-a")
    assert read_all(paths.redo_dir("run-a") / name.name) == [bytes([3]) * 24]


def test_blocks_are_packed_as_many_at_a_time_as_there_is_room_for(paths):
    """And of the first there is always room for 8 MiB, whatever the file has left over from those before."""
    noise = np.random.default_rng(1).integers(0, 256, 8 << 20, np.uint8)
    tensor = RedoTensor("buffer", "noise", "U8", (3, 8 << 20))
    writer = RedoFileWriter(paths, "run-a", 0, {"class": "SGD"}, WRITES)
    packer = native.ParallelPacker(threads=2)
    add(writer, WEIGHT, bytes(24))
    blocks = [(tensor, memoryview(noise))] * 3
    assert [writer.pack(blocks[number:], packer) for number in range(3)] == [1, 1, 1]
    small = [(tensor, memoryview(noise)[:100_000])] * 200
    assert 1 < (found := writer.pack(small, packer)) < 200
    assert writer.pack([], packer) == 0
    writer.end_step(3, groups=[], broken=None)
    writer.publish()
    (name,) = redo_segments(paths, "run-a")
    read = read_all(paths.redo_dir("run-a") / name.name)
    assert read == [bytes(24), *[noise.data] * 3, *[noise.data[:100_000]] * found]


def test_a_block_that_never_finds_room_is_refused(paths):
    writer = RedoFileWriter(paths, "run-a", 0, {"class": "SGD"}, WRITES)
    with pytest.raises(ValueError, match=r"gradient of 'a\.weight': a block of 9437184 bytes may take 9437267, where"):
        add(writer, WEIGHT, bytes(9 << 20))
    writer.abort()
    assert list(paths.redo_dir("run-a").iterdir()) == []


def test_a_block_stands_for_the_bytes_of_its_memory_and_not_for_its_elements(paths):
    numbers = np.arange(6, dtype=np.float32)
    writer = RedoFileWriter(paths, "run-a", 0, {"class": "SGD"}, WRITES)
    add(writer, WEIGHT, numbers.data)
    writer.end_step(3, groups=[], broken=None)
    writer.publish()
    (name,) = redo_segments(paths, "run-a")
    assert read_all(paths.redo_dir("run-a") / name.name) == [numbers.tobytes()]


def test_a_footer_that_no_reader_takes_is_refused_under_the_name_of_the_segment(paths, monkeypatch):
    monkeypatch.setattr(redo_writer, "MAX_JSON_BYTES", 1000)
    writer = RedoFileWriter(paths, "run-a", 0, {"class": "SGD"}, WRITES)
    writer.end_step(7, groups=[{"lr": "x" * 1000}], broken=None)
    with pytest.raises(FormatError, match=r"rank-00000-000000000007-to-0+7\.redo: steps 7 to 7 take a footer of "):
        writer.publish()


@pytest.mark.guards("Damage is found and named")
def test_every_flipped_byte_is_found(paths):
    path = write(paths)
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(FormatError, match="rank-00000"):
            read_all(path)
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(CorruptError, match="rank-00000"):
            read_redo_segment(path, run="run-a")


CHANGES = {
    "version": (lambda one: one.update(format=5), r"field format: version 5, where this release reads 1, 2, 3 and 4"),
    "run": (lambda one: one.update(run="run-b"), "is a segment of rank 0 of run 'run-b'"),
    "rank": (lambda one: one.update(rank=1), "is a segment of rank 1"),
    "no steps": (lambda one: one.update(steps=[]), "is not that of a redo segment"),
    "order": (lambda one: one["steps"].reverse(), "its footer has 3 steps in"),
    "dtype": (lambda one: one["tensors"].append(["gradient", "b", "F99", []]), "describes no tensor"),
    "kind": (lambda one: one["tensors"].append(["weight", "b", "F32", []]), "describes no tensor"),
    "shape": (lambda one: one["tensors"].append(["buffer", "b", "F32", [-1]]), "-1 is no whole number"),
    "tensor": (lambda one: one["steps"][0]["blocks"][0].__setitem__(0, 9), "there is no tensor 9"),
    "block": (lambda one: one["steps"][0]["blocks"][0].__setitem__(1, 1 << 40), "are no block"),
    "a byte more": (lambda one: one["steps"][0]["blocks"][0].__setitem__(1, BLOCK_BYTES + 1), "are no block"),
    "stored": (lambda one: one["steps"][0]["blocks"][0].__setitem__(2, 50), r"3 steps in 243 bytes, .* in 244"),
    "no groups": (lambda one: one["steps"][0].update(groups=None), "is not that of a redo segment"),
    "broken": (lambda one: one["steps"][0].update(broken=7), "7 is no text"),
    "rule": (lambda one: one.update(rule=[]), "field rule"),
    "a field": (lambda one: one.pop("params"), "is not that of a redo segment"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_footer_that_contradicts_itself_is_refused(paths, case):
    path = write(paths)
    change, message = CHANGES[case]
    rewritten(path, change)
    with pytest.raises(FormatError, match=message):
        read_redo_segment(path, run="run-a")


def test_a_block_may_stand_for_as_much_as_the_format_allows(paths):
    path = write(paths)
    rewritten(path, lambda one: one["steps"][0]["blocks"][0].__setitem__(1, BLOCK_BYTES))
    assert read_redo_segment(path, run="run-a").steps[0].blocks[0].nbytes == BLOCK_BYTES


def test_a_length_beyond_the_file_is_no_footer(paths):
    path = write(paths)
    data = path.read_bytes()
    path.write_bytes(data[:-16] + (1 << 62).to_bytes(8, "little") + data[-8:])
    with pytest.raises(CorruptError, match="has no footer"):
        read_redo_segment(path, run="run-a")


def write_flats(paths):
    writer = RedoFileWriter(paths, "run-a", 1, {"class": "AdamW"}, FLATS)
    add(writer, RedoTensor("gradient", "flat 0", "F32", (8,)), bytes(32))
    writer.end_step(3, groups=[{}, {}], broken=None)
    writer.end_step(4, groups=[{}, {}], broken=None, applied=False)
    writer.publish()
    (name,) = redo_segments(paths, "run-a")
    return paths.redo_dir("run-a") / name.name


def test_flat_tensors_and_skipped_updates_are_read(paths):
    path = write_flats(paths)
    segment = read_redo_segment(path, run="run-a")
    assert (segment.rank, segment.writes) == (1, FLATS)
    assert [step.applied for step in segment.steps] == [True, False]


VERSIONS = {
    "of one process": (1, WRITES, {}, [{"lr": 0.1}]),
    "of several": (2, RedoWrites((("a.weight",),), world_size=2), {}, [{"lr": 0.1}]),
    "with a skipped update": (2, WRITES, {"applied": False}, [{"lr": 0.1}]),
    "counted twice": (3, WRITES, {"broken": "a load", "counted_twice": True}, []),
    "whose bias is corrected by a power": (3, WRITES, {}, [{"lr": 0.1}, {BIAS_CORRECTION_SINCE: 7}]),
}


@pytest.mark.parametrize("case", VERSIONS)
def test_a_segment_has_the_first_version_that_says_what_is_in_it(paths, case):
    """So a release that does not know what it says refuses it, and reads all others."""
    version, writes, fields, groups = VERSIONS[case]
    writer = RedoFileWriter(paths, "run-a", 0, {"class": "SGD"}, writes)
    writer.end_step(3, **{"groups": groups, "broken": None, **fields})
    writer.publish()
    (name,) = redo_segments(paths, "run-a")
    path = paths.redo_dir("run-a") / name.name
    data = path.read_bytes()
    footer = json.loads(data[-16 - int.from_bytes(data[-16:-8], "little") : -16])
    assert footer["format"] == version
    (step,) = read_redo_segment(path, run="run-a").steps
    assert (step.groups, step.counted_twice) == (groups, "counted_twice" in fields)


@pytest.mark.parametrize("before", [False, True])
def test_a_segment_with_indexed_gradients_has_the_version_that_knows_them(paths, before):
    """Whether its blocks are packed by the writer, or were packed before."""
    tensor = RedoTensor("gradient", "a.weight", "F32", (4096,))
    gradient = np.arange(4096, dtype=np.uint32) % 251
    raw = memoryview(((gradient + 1).astype(np.float32) * np.float32(0.1)).astype(np.float32).tobytes())
    writer = RedoFileWriter(paths, "run-a", 0, {"class": "SGD"}, WRITES)
    packer = native.ParallelPacker(threads=1)
    if before:
        room = memoryview(bytearray(2 * len(raw)))
        ((stored, checksum),) = packer.pack([(raw, 4)], into=room)
        writer.add([PackedBlock(tensor, len(raw), stored, checksum)], room[:stored])
    else:
        assert writer.pack([(tensor, raw)], packer) == 1
    writer.end_step(3, groups=[{"lr": 0.1}], broken=None)
    writer.publish()
    (name,) = redo_segments(paths, "run-a")
    path = paths.redo_dir("run-a") / name.name
    data = path.read_bytes()
    assert json.loads(data[-16 - int.from_bytes(data[-16:-8], "little") : -16])["format"] == 4
    assert read_all(path) == [raw]
    assert len(data) < len(raw) / 2


FLAT_CHANGES = {
    "rank": (lambda one: one.update(world_size=1), "is a segment of rank 1 of 1"),
    "other names": (lambda one: one["params"][0].append("flat 7"), "not the tensors of the param groups"),
    "a call of others": (lambda one: one["calls"].pop(), "do not update every tensor once"),
    "a call twice": (lambda one: one["calls"].append(["flat 0"]), "do not update every tensor once"),
    "overlapping": (lambda one: one["flats"][0][5].append(["b", 0, 2, 5]), "describes no flat tensor"),
    "outside": (lambda one: one["flats"][0][5].append(["b", 0, 2, 7]), "describes no flat tensor"),
    "placement": (lambda one: one["flats"][0].__setitem__(3, "rank_local"), "describes no flat tensor"),
    "a dtype": (lambda one: one["flats"][0].__setitem__(1, "F99"), "describes no tensor"),
    "a fragment": (lambda one: one["flats"][0][5][0].pop(), "is not that of a redo segment"),
    "applied": (lambda one: one["steps"][0].update(applied=1), "field applied: 1 is neither true nor false"),
    "counted twice": (
        lambda one: one["steps"][0].update(counted_twice=0),
        "field counted_twice: 0 is neither true nor",
    ),
    "and whole": (lambda one: one["steps"][0].update(counted_twice=True), "field counted_twice: step 3 .* not broken"),
}


@pytest.mark.parametrize("case", FLAT_CHANGES)
def test_flat_tensors_that_contradict_themselves_are_refused(paths, case):
    path = write_flats(paths)
    change, message = FLAT_CHANGES[case]
    rewritten(path, change)
    with pytest.raises(FormatError, match=message):
        read_redo_segment(path, run="run-a")
