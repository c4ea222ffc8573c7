"""The readers of packed blocks, packed files and redo logs as targets, whose damage mostly has right checksums.

Blocks are damaged in their heads and planes, and what names them (a table, a footer) is made to fit: their places,
sizes and checksums. So most of what is tried reaches the unpacking, and what comes behind it.
"""

import itertools
import json
import os
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from catalog_helpers import Piece, Run
from damage import Chance, mutated, odd_json, odd_metadata, odd_table, plain
from small_training import train
from target import Target

import native
from capture.redo.rebuild import rebuilt_step
from capture.redo.steps import RedoRef
from catalog.compaction.compact import compact_run
from catalog.data_files.data_files import data_file_bytes
from catalog.data_files.stored_bytes import read_verified
from catalog.disk import json_file
from catalog.disk.checked_parquet import decode_checked, encode_checked
from catalog.encoding.planes import Transform, packed, unpacked
from catalog.errors import FormatError
from catalog.format import packed_file
from catalog.format.packed_file import MAX_BLOCK_BYTES
from catalog.format.redo_reader import read_redo_segment
from catalog.format.redo_segment import MAGIC
from catalog.history import History
from catalog.paths import data_file
from catalog.paths import packed_file as image_name
from catalog.read.checkpoint import read_checkpoint
from catalog.read.redo import RedoRecord
from catalog.read.redo_allowance import RedoAllowance
from catalog.records import CheckpointRef

__all__ = ["packed_targets"]

RUN, KEY, PACKED = "packed", 0, 10
_HEAD, _PLANE = struct.Struct("<BBBQ"), struct.Struct("<BQ")
_ODD_SIZES = (0, 1, 2, 3, 7, 64, 255, 4096, MAX_BLOCK_BYTES, MAX_BLOCK_BYTES + 1, 1 << 31, 1 << 56, (1 << 64) - 1)


def packed_targets(folder: Path) -> list[Target]:
    """Return the targets; their inputs are files of small histories in `folder`."""
    return [_block_target(), _image_target(folder / "packed"), *_redo_targets(folder / "redo")]


def _numbers(itemsize: int, *, near: bool) -> np.ndarray:
    """Return elements with many equal bytes, and their neighbours."""
    chance = np.random.default_rng(itemsize)
    words = np.dtype(f"u{itemsize}")
    base = (chance.integers(0, 200, 600) << 8 * (itemsize - 1)).astype(words)
    return base + (chance.random(600) < 0.1).astype(words) * words.type(3) if near else base


def odd_block(block: bytes, chance: Chance) -> bytes:
    """Return a packed block that is changed in one place and fits together otherwise, or is changed anywhere."""
    kind = chance.randrange(8)
    itemsize = block[2] if len(block) > 2 else 0
    at = _HEAD.size + itemsize * _PLANE.size
    if kind == 0 or not itemsize or len(block) < at:
        return mutated(block, chance)
    version, transform, _, nbytes = _HEAD.unpack_from(block)
    planes: list[tuple[int, bytes]] = []
    mantissas = block[at : at + 1 + 4 * block[at]] if transform == Transform.INDEXED and len(block) > at else b""
    at += len(mantissas)
    for number in range(itemsize):
        coding, length = _PLANE.unpack_from(block, _HEAD.size + number * _PLANE.size)
        planes.append((coding, block[at : at + length]))
        at += length
    rest = block[at:]
    one = chance.randrange(itemsize)
    coding, content = planes[one]
    if kind == 1:
        transform = chance.choice((*Transform, 6, 255))
    elif kind == 2:
        nbytes = max(0, min(chance.choice((*_ODD_SIZES, nbytes - 1, nbytes + 1, 2 * nbytes)), (1 << 64) - 1))
    elif kind == 3:
        planes[one] = chance.choice((0, 1, 2, 3, 4, 255)), content
    elif kind == 4:
        planes[one] = coding, mutated(content, chance)
    elif kind == 5:
        planes[one] = planes[chance.randrange(itemsize)]
    elif kind == 6:
        rest = chance.randbytes(chance.randrange(9))
    else:
        itemsize, planes = chance.choice(((1, planes[:1]), (0, []), (2 * itemsize, planes * 2), (3, (planes * 3)[:3])))
    table = b"".join(_PLANE.pack(coding, len(content)) for coding, content in planes)
    contents = b"".join(content for _, content in planes)
    return _HEAD.pack(version, transform, itemsize % 256, nbytes) + table + mantissas + contents + rest


def _block_target() -> Target:
    bases = {itemsize: _numbers(itemsize, near=False).tobytes() for itemsize in (1, 2, 4, 8)}
    seeds = [
        native.pack_block(_numbers(itemsize, near=True).tobytes() + b"!", itemsize=itemsize,
                          base=base + b"!", transforms=[transform])
        for itemsize, base in bases.items()
        for transform in Transform
        if transform is not Transform.INDEXED
    ]  # fmt: skip
    plain_seeds = [packed(memoryview(base), itemsize=itemsize) for itemsize, base in bases.items()]
    scaled = np.arange(1, 257, dtype=np.float32).repeat(8) * np.float32(0.1)
    indexed = native.pack_block(scaled.tobytes() + b"!", itemsize=4, transforms=[0, 1], may_index=True)

    def make(chance: Chance) -> bytes:
        return odd_block(chance.choice((*seeds, *plain_seeds, indexed)), chance)

    def read(data: bytes) -> object:
        nbytes = _HEAD.unpack_from(data)[3] if len(data) >= _HEAD.size else 0
        if nbytes > MAX_BLOCK_BYTES:
            raise FormatError(f"{nbytes} bytes, which no table allows")
        into = bytearray(nbytes)
        unpacked(data, base=memoryview(bytes(nbytes)), into=memoryview(into))
        return into

    return Target("packed block", 20, make, read)


def _put(path: Path) -> Callable[[bytes], None]:
    """Return what writes a file so that it is read anew: a reader keeps the table of an image that looks unchanged."""
    times = itertools.count(1)

    def put(data: bytes) -> None:
        path.write_bytes(data)
        at = next(times)
        os.utime(path, ns=(at, at))

    return put


def _image_target(root: Path) -> Target:
    with Run(root, RUN) as run:
        for step in (KEY, PACKED):
            pieces = [
                Piece(f"u{itemsize}", _numbers(itemsize, near=step == PACKED).tobytes(), dtype=dtype)
                for itemsize, dtype in ((1, "U8"), (2, "BF16"), (4, "F32"), (8, "I64"))
            ]
            run.checkpoint(step, pieces, register=False)
    history = History.open(root)
    compact_run(history, RUN, (KEY, PACKED), key_every=2)
    file = data_file(RUN, PACKED, 0)
    path = root / image_name(file)
    seed = path.read_bytes()
    length = int.from_bytes(seed[-16:-8], "little")
    table, metadata = decode_checked(seed[-16 - length : -16], schema=packed_file.SCHEMA, file=file)
    rows = table.to_pylist()
    blocks = [seed[row["offset"] : row["offset"] + row["stored"]] for row in rows]
    (manifest,) = read_checkpoint(history.paths, RUN, PACKED).manifests
    extents = manifest.extents()
    put = _put(path)

    def make(chance: Chance) -> bytes:
        kind = chance.random()
        if kind < 0.2:
            return mutated(seed, chance)
        changed = list(blocks)
        if kind < 0.7:
            for _ in range(chance.choice((1, 1, 2))):
                one = chance.randrange(len(changed))
                changed[one] = odd_block(changed[one], chance)
        edited, facts = pa.Table.from_pylist(_fitting(rows, changed), schema=packed_file.SCHEMA), metadata
        if kind >= 0.6:
            edited, facts = odd_table(edited, chance), odd_metadata(metadata, chance)
        end = encode_checked(edited, metadata=facts)
        length = chance.choice(_ODD_SIZES) if chance.random() < 0.02 else len(end)
        return packed_file.MAGIC + b"".join(changed) + end + length.to_bytes(8, "little") + packed_file.MAGIC

    def read(data: bytes) -> object:
        put(data)
        if data_file_bytes(root, file) != manifest.data_bytes:
            raise FormatError("it is the image of another file")
        memory = [np.empty(max(extent.nbytes, 1), np.uint8) for extent in extents]
        read_verified(root, list(zip(extents, (one.ctypes.data for one in memory), strict=True)))
        return memory

    return Target("packed file", 12, make, read)


def _fitting(rows: Iterable[dict[str, Any]], blocks: Iterable[bytes]) -> list[dict[str, Any]]:
    """Return rows with the places and checksums of the blocks as they are now."""
    at, found = len(packed_file.MAGIC), []
    for row, block in zip(rows, blocks, strict=True):
        found.append({**row, "offset": at, "stored": len(block), "checksum": native.checksum(block)})
        at += len(block)
    return found


def _redo_targets(root: Path) -> list[Target]:
    train(root, width=3, steps=2, every=2)
    history = History.open(root)
    run = history.runs()[0].run
    (path,) = history.paths.redo_dir(run).glob("rank-00000-000000000001-*")
    seed = path.read_bytes()
    length = int.from_bytes(seed[-16:-8], "little")
    content = json.loads(seed[-16 - length : -16])
    del content["checksum"]
    body = seed[: -16 - length]
    put = _put(path)
    (base,) = history.checkpoints()[:1]
    step = RedoRef(CheckpointRef(run, 1), base)
    gradients = {name: (dtype, tuple(shape)) for kind, name, dtype, shape in content["tensors"] if kind == "gradient"}

    def make(chance: Chance) -> bytes:
        kind = chance.random()
        if kind < 0.15:
            return mutated(seed, chance)
        footer, data = content, body
        if kind < 0.5:
            footer, data = _with_odd_block(content, body, chance)
        if kind >= 0.4:
            for _ in range(chance.choice((1, 1, 1, 2, 3))):
                footer = odd_json(footer, chance)
        try:
            encoded = json_file.encode(footer) if isinstance(footer, dict) else plain(footer)
        except (ValueError, UnicodeEncodeError):
            encoded = plain(footer)
        length = chance.choice(_ODD_SIZES) if chance.random() < 0.02 else len(encoded)
        return data + encoded + length.to_bytes(8, "little") + MAGIC

    def read_records(data: bytes) -> object:
        put(data)
        segment = read_redo_segment(path, run=run)
        allowance = RedoAllowance(gradients, buffer_bytes=0)
        found = []
        for one in segment.steps:
            record = RedoRecord(segment, one)
            allowance.admit(record)
            found += [tensor for tensor, _ in record.tensors()]
        return found

    def read_step(data: bytes) -> object:
        put(data)
        made = rebuilt_step(history, step)
        return made.extents, made.objects(0)

    return [Target("redo segment", 12, make, read_records), Target("redo step", 3, make, read_step)]


def _with_odd_block(content: dict[str, Any], body: bytes, chance: Chance) -> tuple[dict[str, Any], bytes]:
    """Return a footer and blocks, one of which is damaged; the footer fits."""
    changed = json.loads(json.dumps(content))
    rows = [row for step in changed["steps"] for row in step["blocks"]]
    one, at, blocks = chance.randrange(len(rows)), 0, []
    for number, row in enumerate(rows):
        block = body[at : at + row[2]]
        at += row[2]
        if number == one:
            block = odd_block(block, chance)
            row[2], row[3] = len(block), native.checksum(block).hex()
        blocks.append(block)
    return changed, b"".join(blocks)
