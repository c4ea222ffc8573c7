"""Segments of a redo log: what the optimizer's updates of some steps consumed, so that these steps can be made again.

    blocks, one after the other  |  the footer, canonical JSON with its checksum  |  its length, 8 bytes  |  DSHREDO1

A block has the packed bytes of one gradient, one changed buffer or object, or a part of a large one, and the footer has
its checksum: so a flipped bit anywhere in a segment is found. Blocks are written as they come; the footer is last,
because only then their sizes are known. A segment is published whole, like every file of a history, so that a process
that is killed leaves none that is torn, and loses the steps of one segment at most.
"""

import contextlib
import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any, Final, Literal, get_args

import native
from catalog.disk.durable import make_dirs, publish, temporary_path
from catalog.disk.json_file import MAX_JSON_BYTES, canonical, decode, encode
from catalog.disk.regular_file import is_real_folder, open_regular
from catalog.errors import CorruptError, FormatError
from catalog.format.dtypes import DTYPES, MAX_DIMENSIONS
from catalog.paths import HistoryPaths
from catalog.records import Placement

__all__ = [
    "BLOCK_BYTES",
    "RedoBlock",
    "RedoFileWriter",
    "RedoFlat",
    "RedoFragment",
    "RedoSegment",
    "RedoSegmentName",
    "RedoStep",
    "RedoTensor",
    "RedoWrites",
    "is_redo_segment",
    "parse_redo_name",
    "read_blocks",
    "read_redo_segment",
    "redo_segments",
]

BLOCK_BYTES: Final = 16 << 20
"""A block stands for at most so many bytes of a tensor, which bounds the memory of whoever packs and unpacks."""

_MAGIC: Final = b"DSHREDO1"
_TAIL_BYTES: Final = 8 + len(_MAGIC)
_VERSIONS: Final = (1, 2)
"""A segment has the first version that can say what is in it: 2 has several ranks, flat tensors and skipped updates."""
_NAME: Final = re.compile(r"rank-([0-9]{5})-([0-9]{12})-to-([0-9]{12})\.redo")
_PACKED_SLACK: Final = 2
"""Packed bytes are at most so many times as many as what they stand for, and 4 KiB more."""

_MOST_RANKS: Final = 100_000
"""So many fit into the names of the files."""

_HEAD_BYTES: Final = 1024
_STEP_BYTES: Final = 128
_BLOCK_ROW_BYTES: Final = 128
"""The footer takes at most so much for its fields without rule, params, tensors and steps; for a step without blocks,
groups and reason; and for a block."""

Kind = Literal["gradient", "buffer", "object"]


@dataclass(frozen=True, slots=True)
class RedoFragment:
    """Elements `[offset, offset + numel)` of a flat tensor are `[start, start + numel)` of the parameter `name`."""

    name: str
    start: int
    numel: int
    offset: int


@dataclass(frozen=True, slots=True)
class RedoFlat:
    """A tensor that an optimizer updates in the place of parameters, as DeepSpeed's do; what no fragment holds is
    padding.

    placement: "partitioned" where each rank has another part of the parameters, "replicated" where all have the same
    is_model: whether its elements are the model's own; else they are its master weights, of which the model has rounded
       copies
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    placement: Placement
    is_model: bool
    fragments: tuple[RedoFragment, ...]


@dataclass(frozen=True, slots=True)
class RedoWrites:
    """What the updates of a segment write.

    params: the names of the tensors of each param group, in order: of parameters, or of `flats`
    flats: the flat tensors; none where the optimizer updates the parameters themselves
    calls: the names that each call of the optimizer updates, in order, where several make one update; none where one
       call updates all
    world_size: the number of ranks, each of which has a log of its own
    """

    params: tuple[tuple[str, ...], ...]
    flats: tuple[RedoFlat, ...] = ()
    calls: tuple[tuple[str, ...], ...] = ()
    world_size: int = 1


@dataclass(frozen=True, slots=True)
class RedoTensor:
    """A tensor of which a segment has bytes: the gradient of a parameter or a flat tensor, a buffer that forward
    changes, or the text of the JSON tree of a provider's object. An object without bytes was too large to be recorded.
    """

    kind: Kind
    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RedoBlock:
    """Bytes of the segment's tensor number `tensor`, `nbytes` of them, in `stored` bytes of the file at `offset`."""

    tensor: int
    nbytes: int
    offset: int
    stored: int
    checksum: bytes


@dataclass(frozen=True, slots=True)
class RedoStep:
    """One step: the hyperparameters of each param group and what changed, in blocks. The blocks of a tensor follow each
    other; a parameter without one had no gradient.

    broken: why the state after this step is not what the update has made of the state before; None where it is
    applied: False where the update was skipped, as on an overflow: nothing but objects and buffers has changed
    """

    step: int
    groups: Any
    broken: str | None
    blocks: tuple[RedoBlock, ...]
    applied: bool


@dataclass(frozen=True, slots=True)
class RedoSegment:
    """One segment as its footer describes it. `rule` is what the bits of an update depend on beside its input."""

    path: Path
    run: str
    rank: int
    rule: Mapping[str, Any]
    writes: RedoWrites
    tensors: tuple[RedoTensor, ...]
    steps: tuple[RedoStep, ...]


@dataclass(frozen=True, slots=True, order=True)
class RedoSegmentName:
    """The rank that wrote a segment, and its first and last step."""

    rank: int
    first: int
    last: int

    @property
    def name(self) -> str:
        """The name of the segment's file."""
        return f"rank-{self.rank:05d}-{self.first:012d}-to-{self.last:012d}.redo"


def parse_redo_name(name: str) -> RedoSegmentName | None:
    """Return what the name of a segment's file says, or None when no segment has such a name."""
    match = _NAME.fullmatch(name)
    found = RedoSegmentName(*map(int, match.groups())) if match else None
    return found if found is not None and found.first <= found.last else None


def is_redo_segment(name: str) -> bool:
    """Return whether a published segment can have this name."""
    return parse_redo_name(name) is not None


def redo_segments(paths: HistoryPaths, run: str) -> list[RedoSegmentName]:
    """Return the published segments of a run, ascending by rank and step; only the folder is read."""
    folder = paths.redo_dir(run)
    names = (path.name for path in folder.iterdir()) if is_real_folder(folder) else ()
    return sorted(filter(None, map(parse_redo_name, names)))


@dataclass(slots=True)
class RedoFileWriter:
    """Writes one segment: for each step its blocks and then `end_step`, and at last `publish`, or `abort`. Nothing is
    seen under the segment's name before it is whole and durable."""

    paths: HistoryPaths
    run: str
    rank: int
    rule: Mapping[str, Any]
    writes: RedoWrites
    nbytes: int = 0
    blocks: int = 0
    _file: FileIO | None = None
    _tmp: Path = Path()
    _tensors: dict[RedoTensor, int] = field(default_factory=dict)
    _blocks: list[list[Any]] = field(default_factory=list)
    _steps: list[dict[str, Any]] = field(default_factory=list)
    _groups: Any = None
    _footer_bytes: int = 0

    def __post_init__(self) -> None:
        self._footer_bytes = _HEAD_BYTES + len(canonical([dict(self.rule), _rows_of(self.writes)]))

    @property
    def steps(self) -> list[int]:
        """The steps that were written so far."""
        return [step["step"] for step in self._steps]

    def has_room_for(self, tensors: Sequence[RedoTensor], *, blocks: int, groups: Any, broken: str | None) -> bool:
        """Return whether the footer can describe one more step, with so many blocks of these tensors."""
        new = [tensor for tensor in tensors if tensor not in self._tensors]
        more = self._step_bytes(blocks, groups, broken) + sum(len(canonical(_tensor_row(one))) + 1 for one in new)
        return self._footer_bytes + more <= MAX_JSON_BYTES

    def _step_bytes(self, blocks: int, groups: Any, broken: str | None) -> int:
        """Return how many bytes of the footer a step takes at most, without the tensors that are new."""
        own = None if self._has_groups(groups) else groups
        return _STEP_BYTES + blocks * _BLOCK_ROW_BYTES + len(canonical([own, broken]))

    def _has_groups(self, groups: Any) -> bool:
        return bool(self._steps) and groups == self._groups

    def add(self, tensor: RedoTensor, packed: bytes, *, nbytes: int) -> None:
        """Write the next block of the current step, which stands for `nbytes` bytes of `tensor`."""
        self._write(packed)
        self.nbytes += len(packed)
        self.blocks += 1
        if tensor not in self._tensors:
            self._footer_bytes += len(canonical(_tensor_row(tensor))) + 1
        index = self._tensors.setdefault(tensor, len(self._tensors))
        self._blocks.append([index, nbytes, len(packed), native.checksum(packed).hex()])

    def end_step(self, step: int, *, groups: Any, broken: str | None, applied: bool = True) -> None:
        """Note what else belongs to the step whose blocks were added; `groups` is a JSON tree."""
        same = self._has_groups(groups)
        blocks, self._blocks = self._blocks, []
        self._footer_bytes += self._step_bytes(len(blocks), groups, broken)
        self._groups = groups
        row = {"step": step, "groups": None if same else groups, "broken": broken, "blocks": blocks}
        self._steps.append(row if applied else {**row, "applied": False})

    def publish(self) -> None:
        """Make the segment durable under its name, which follows from its steps. FormatError when its footer is larger
        than a reader takes."""
        if not self._steps:
            self.abort()
            return
        footer = encode(
            {
                "run": self.run,
                "rank": self.rank,
                "rule": dict(self.rule),
                **self._described_writes(),
                "tensors": list(map(_tensor_row, self._tensors)),
                "steps": self._steps,
            }
        )
        if len(footer) > MAX_JSON_BYTES:
            raise FormatError(
                f"{self._tmp}: steps {self.steps[0]} to {self.steps[-1]} take a footer of {len(footer)} bytes, where "
                f"{MAX_JSON_BYTES} are allowed"
            )
        self._write(footer + len(footer).to_bytes(8, "little") + _MAGIC)
        self._opened().close()
        name = RedoSegmentName(self.rank, self._steps[0]["step"], self._steps[-1]["step"]).name
        publish(self._tmp, self.paths.redo_dir(self.run) / name)

    def _described_writes(self) -> dict[str, Any]:
        writes, rows = self.writes, _rows_of(self.writes)
        applied = all(row.get("applied", True) for row in self._steps)
        if applied and not writes.flats and not writes.calls and writes.world_size == 1:
            return {"format": 1, "params": rows["params"]}
        return {"format": 2, **rows, "world_size": writes.world_size}

    def abort(self) -> None:
        """Leave nothing of the segment on the disk."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            with contextlib.suppress(OSError):
                self._tmp.unlink(missing_ok=True)

    def _write(self, data: bytes) -> None:
        file, rest = self._opened(), memoryview(data)
        while rest:
            rest = rest[file.write(rest) :]

    def _opened(self) -> FileIO:
        if self._file is None:
            folder = self.paths.redo_dir(self.run)
            make_dirs(folder, root=self.paths.run_dir(self.run))
            self._tmp = temporary_path(folder / RedoSegmentName(self.rank, 0, 0).name)
            # Without a buffer: a forked child, such as a worker of a data loader, has a copy of what is in one, and
            # would write that too, into the same file, when it lets go of it.
            self._file = self._tmp.open("xb", buffering=0)
        return self._file


def read_redo_segment(path: Path, *, run: str) -> RedoSegment:
    """Read the footer of one segment. CorruptError when it is damaged or torn, FormatError when it has another version,
    belongs to another run, or contradicts itself. The blocks are checked by `read_blocks`."""
    with open_regular(path) as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - _TAIL_BYTES))
        tail = file.read(_TAIL_BYTES)
        length = int.from_bytes(tail[:8], "little")
        if len(tail) < _TAIL_BYTES or tail[8:] != _MAGIC or not 0 < length <= size - _TAIL_BYTES:
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


def read_blocks(segment: RedoSegment, blocks: Sequence[RedoBlock]) -> Iterator[bytes]:
    """Yield the packed bytes of the blocks, in order. CorruptError, which names the tensor, when they differ from their
    checksum."""
    with open_regular(segment.path) as file:
        for block in blocks:
            file.seek(block.offset)
            data = file.read(block.stored)
            if len(data) != block.stored or (actual := native.checksum(data)) != block.checksum:
                tensor = segment.tensors[block.tensor]
                step = next(one.step for one in segment.steps if block in one.blocks)
                raise CorruptError(
                    f"{segment.path}: step {step}: {tensor.kind} of {tensor.name!r}: checksum "
                    f"{block.checksum.hex()} is recorded, its bytes give "
                    f"{actual.hex() if len(data) == block.stored else 'fewer bytes'}: the file was changed or damaged"
                )
            yield data


def _parsed(content: Mapping[str, Any], *, path: Path, run: str, end: int) -> RedoSegment:
    if content["format"] not in _VERSIONS:
        raise FormatError(
            f"{path}: field format: version {content['format']!r}, where this release reads "
            f"{' and '.join(map(str, _VERSIONS))}: use a release that knows it"
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
        applied = row.get("applied", True)
        if not isinstance(applied, bool):
            raise FormatError(f"{path}: field applied: {applied!r} is neither true nor false")
        steps.append(RedoStep(_whole(row["step"]), groups, _text(row["broken"], optional=True), blocks, applied))
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


def _rows_of(writes: RedoWrites) -> dict[str, Any]:
    """Return as JSON which tensors the updates write, and in which calls."""
    flats = [
        [
            *(flat.name, flat.dtype, list(flat.shape), flat.placement, flat.is_model),
            [[part.name, part.start, part.numel, part.offset] for part in flat.fragments],
        ]
        for flat in writes.flats
    ]
    return {
        "params": [list(names) for names in writes.params],
        "flats": flats,
        "calls": [list(names) for names in writes.calls],
    }


def _tensor_row(tensor: RedoTensor) -> list[Any]:
    return [tensor.kind, tensor.name, tensor.dtype, list(tensor.shape)]


def _tensor(row: Any, *, path: Path) -> RedoTensor:
    kind, name, dtype, shape = row
    sizes = isinstance(shape, list) and len(shape) <= MAX_DIMENSIONS and all(_whole(size) >= 0 for size in shape)
    if kind not in get_args(Kind) or dtype not in DTYPES or not sizes:
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


def _text(value: Any, *, optional: bool = False) -> Any:
    if not isinstance(value, str) and not (optional and value is None):
        raise FormatError(f"{value!r} is no text")
    return value
