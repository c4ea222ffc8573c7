"""Reads one segment of a redo log (`catalog.format.redo_segment`), and refuses one that contradicts itself by name."""

import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, get_args

import native
from catalog.disk.json_file import MAX_JSON_BYTES, decode
from catalog.disk.regular_file import open_regular, read_range
from catalog.errors import CorruptError, FormatError
from catalog.format.dtypes import DTYPES, MAX_DIMENSIONS
from catalog.format.redo_segment import (
    BLOCK_BYTES,
    MAGIC,
    RedoBlock,
    RedoFlat,
    RedoFragment,
    RedoKind,
    RedoSegment,
    RedoStep,
    RedoTensor,
    RedoWrites,
    parse_redo_name,
)

__all__ = ["open_blocks", "read_redo_segment"]

_TAIL_BYTES: Final = 8 + len(MAGIC)
_VERSIONS: Final = (1, 2, 3, 4)
"""A segment has the first version that can say what is in it: 2 has several ranks, flat tensors and skipped updates; 3
has steps that were counted twice, and products of betas that come from a power; 4 has indexed gradients."""
_PACKED_SLACK: Final = 2
"""Packed bytes are at most so many times as many as what they stand for, and 4 KiB more."""

_FLAGS: Final = {"applied": True, "counted_twice": False}
"""The fields of a step that are true or false, and what they are where they are missing."""

_MOST_RANKS: Final = 100_000
"""So many fit into the names of the files."""


def read_redo_segment(path: Path, *, run: str) -> RedoSegment:
    """Read the footer of one segment. CorruptError when it is damaged or torn, FormatError when it has another version,
    belongs to another run, or contradicts itself. The blocks are checked when they are read (`open_blocks`)."""
    with open_regular(path) as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - _TAIL_BYTES))
        tail = file.read(_TAIL_BYTES)
        length = int.from_bytes(tail[:8], "little")
        if len(tail) < _TAIL_BYTES or tail[8:] != MAGIC or not 0 < length <= size - _TAIL_BYTES:
            raise CorruptError(f"{path}: has no footer of a redo segment: it was cut off or damaged")
        if length > MAX_JSON_BYTES:
            raise FormatError(f"{path}: a footer of {length} bytes, where {MAX_JSON_BYTES} are allowed")
        begin = size - _TAIL_BYTES - length
        file.seek(begin)
        content = decode(file.read(length), path=path)
    try:
        return _parsed(content, path=path, run=run, end=begin)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        if isinstance(error, FormatError):
            raise
        raise FormatError(f"{path}: its footer is not that of a redo segment: {error!r}") from error


@contextmanager
def open_blocks(segment: RedoSegment) -> Iterator[Callable[[RedoBlock], bytes]]:
    """Give a function that returns the packed bytes of a block, for any thread. It raises CorruptError, which names the
    tensor, when they differ from their checksum."""
    with open_regular(segment.path) as file:

        def read(block: RedoBlock) -> bytes:
            data = read_range(file.fileno(), block.offset, block.stored)
            if len(data) != block.stored or (actual := native.checksum(data)) != block.checksum:
                tensor = segment.tensors[block.tensor]
                step = next(one.step for one in segment.steps if block in one.blocks)
                raise CorruptError(
                    f"{segment.path}: step {step}: {tensor.kind} of {tensor.name!r}: checksum "
                    f"{block.checksum.hex()} is recorded, its bytes give "
                    f"{actual.hex() if len(data) == block.stored else 'fewer bytes'}: the file was changed or damaged"
                )
            return data

        yield read


def _parsed(content: Mapping[str, Any], *, path: Path, run: str, end: int) -> RedoSegment:
    if content["format"] not in _VERSIONS:
        raise FormatError(
            f"{path}: field format: version {content['format']!r}, where this release reads "
            f"{', '.join(map(str, _VERSIONS[:-1]))} and {_VERSIONS[-1]}: use a release that knows it"
        )
    name = parse_redo_name(path.name)
    rank = content["rank"]
    if content["run"] != run or name is None or rank != name.rank:
        raise FormatError(f"{path}: is a segment of rank {rank} of run {content['run']!r}: it lies in another's place")
    tensors = tuple(_tensor(row, path=path) for row in content["tensors"])
    writes = _writes(content, path=path)
    if rank >= writes.world_size:
        raise FormatError(f"{path}: is a segment of rank {rank} of {writes.world_size}")
    steps: list[RedoStep] = []
    at = 0
    for row in content["steps"]:
        blocks, at = _blocks(row["blocks"], tensors, at=at, path=path)
        groups = row["groups"] if row["groups"] is not None else steps[-1].groups
        broken = _text(row["broken"], optional=True)
        applied, counted_twice = (_flag(row, name, default, path=path) for name, default in _FLAGS.items())
        if counted_twice and broken is None:
            raise FormatError(f"{path}: field counted_twice: step {row['step']!r} was, and is not broken")
        steps.append(RedoStep(_whole(row["step"]), groups, broken, blocks, applied, counted_twice))
    numbers = [one.step for one in steps]
    ascending = all(one < other for one, other in itertools.pairwise(numbers))
    if not ascending or [name.first, name.last] != [numbers[0], numbers[-1]] or at != end:
        raise FormatError(
            f"{path}: its footer has {len(numbers)} steps in {at} bytes, the file {name.first} to {name.last} in {end}"
        )
    if not isinstance(content["rule"], dict):
        raise FormatError(f"{path}: field rule: is no object")
    return RedoSegment(path, run, rank, content["rule"], writes, tensors, tuple(steps))


def _writes(content: Mapping[str, Any], *, path: Path) -> RedoWrites:
    params = _names(content["params"])
    if content["format"] == 1:
        return RedoWrites(params)
    flats = tuple(_flat(row, path=path) for row in content["flats"])
    calls, world_size = _names(content["calls"]), _whole(content["world_size"])
    if not 0 < world_size <= _MOST_RANKS:
        raise FormatError(f"{path}: field world_size: {world_size}, where 1 to {_MOST_RANKS} ranks can write a log")
    updated = [name for names in params for name in names]
    if flats and sorted(updated) != sorted(flat.name for flat in flats):
        raise FormatError(f"{path}: field flats: they are not the tensors of the param groups")
    if calls and sorted(name for names in calls for name in names) != sorted(updated):
        raise FormatError(f"{path}: field calls: they do not update every tensor once")
    return RedoWrites(params, flats, calls, world_size)


def _flat(row: Any, *, path: Path) -> RedoFlat:
    name, dtype, shape, placement, is_model, rows = row
    described = _tensor(["gradient", name, dtype, shape], path=path)
    parts = tuple(RedoFragment(str(_text(part)), *map(_whole, place)) for part, *place in rows)
    apart = sorted(parts, key=lambda part: part.offset)
    fit = all(one.offset + one.numel <= other.offset for one, other in itertools.pairwise(apart))
    inside = not apart or apart[-1].offset + apart[-1].numel <= math.prod(described.shape)
    if placement not in ("partitioned", "replicated") or not isinstance(is_model, bool) or not (fit and inside):
        raise FormatError(f"{path}: field flats: {json.dumps(row)[:200]} describes no flat tensor")
    return RedoFlat(described.name, dtype, described.shape, placement, is_model, parts)


def _names(rows: Any) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(map(_text, names)) for names in rows)


def _tensor(row: Any, *, path: Path) -> RedoTensor:
    kind, name, dtype, shape = row
    sizes = isinstance(shape, list) and len(shape) <= MAX_DIMENSIONS and all(_whole(size) >= 0 for size in shape)
    if kind not in get_args(RedoKind) or dtype not in DTYPES or not sizes:
        raise FormatError(f"{path}: field tensors: {json.dumps(row)[:200]} describes no tensor")
    return RedoTensor(kind, str(_text(name)), dtype, tuple(shape))


def _blocks(
    rows: Sequence[Any], tensors: Sequence[RedoTensor], *, at: int, path: Path
) -> tuple[tuple[RedoBlock, ...], int]:
    found = []
    for tensor, nbytes, stored, digest in rows:
        if not 0 <= _whole(tensor) < len(tensors):
            raise FormatError(f"{path}: field blocks: there is no tensor {tensor}")
        if _whole(nbytes) > BLOCK_BYTES or _whole(stored) > _PACKED_SLACK * nbytes + 4096:
            raise FormatError(f"{path}: field blocks: {stored} bytes for {nbytes} are no block")
        found.append(RedoBlock(tensor, nbytes, at, stored, bytes.fromhex(digest)))
        at += stored
    return tuple(found), at


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 56:
        raise FormatError(f"{value!r} is no whole number of the format")
    return value


def _flag(row: Mapping[str, Any], name: str, default: bool, *, path: Path) -> bool:
    found = row.get(name, default)
    if not isinstance(found, bool):
        raise FormatError(f"{path}: field {name}: {found!r} is neither true nor false")
    return found


def _text(value: Any, *, optional: bool = False) -> Any:
    if not isinstance(value, str) and not (optional and value is None):
        raise FormatError(f"{value!r} is no text")
    return value
