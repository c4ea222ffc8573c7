"""Writes one segment of a redo log (`catalog.format.redo_segment`).

Blocks are written as they come; the footer is last, because only then their sizes are known. A segment is published
whole, like every file of a history, so that a process that is killed leaves none that is torn, and loses the steps of
one segment at most.
"""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, Final, NamedTuple

import native
from catalog.disk.direct_file import DirectFile
from catalog.disk.durable import make_dirs, publish, temporary_path
from catalog.disk.json_file import MAX_JSON_BYTES, canonical, encode
from catalog.encoding.planes import MAX_HEAD_BYTES, is_indexed
from catalog.errors import FormatError
from catalog.format.dtypes import DTYPES
from catalog.format.redo_segment import BIAS_CORRECTION_SINCE, MAGIC, RedoSegmentName, RedoTensor, RedoWrites
from catalog.paths import HistoryPaths

__all__ = ["PackedBlock", "RedoFileWriter"]

_END_BYTES: Final = 8 + len(MAGIC)
_HEAD_BYTES: Final = 1024
_STEP_BYTES: Final = 128
_BLOCK_ROW_BYTES: Final = 128
"""The footer takes at most so much for its fields without rule, params, tensors and steps; for a step without blocks,
groups and reason; and for a block."""


class PackedBlock(NamedTuple):
    """A part of a tensor of `nbytes` bytes that was packed into `stored` bytes."""

    tensor: RedoTensor
    nbytes: int
    stored: int
    checksum: bytes


@dataclass(slots=True)
class RedoFileWriter:
    """Writes one segment: for each step its blocks and then `end_step`, and at last `publish`, or `abort`. Nothing is
    seen under the segment's name before it is whole and durable. After an error only `abort` may be called."""

    paths: HistoryPaths
    run: str
    rank: int
    rule: Mapping[str, Any]
    writes: RedoWrites
    nbytes: int = field(default=0, init=False)
    blocks: int = field(default=0, init=False)
    _file: DirectFile | None = field(default=None, init=False)
    _tmp: Path = field(default=Path(), init=False)
    _tensors: dict[RedoTensor, int] = field(default_factory=dict, init=False)
    _blocks: list[list[Any]] = field(default_factory=list, init=False)
    _steps: list[dict[str, Any]] = field(default_factory=list, init=False)
    _groups: Any = field(default=None, init=False)
    _footer_bytes: int = field(default=0, init=False)
    _least_format: int = field(default=1, init=False)

    def __post_init__(self) -> None:
        self._footer_bytes = _HEAD_BYTES + len(canonical([dict(self.rule), _rows_of(self.writes)]))

    @property
    def steps(self) -> list[int]:
        """The steps that were written so far."""
        return [step["step"] for step in self._steps]

    def has_room_for(self, tensors: Sequence[RedoTensor], blocks: int, groups: Any, broken: str | None) -> bool:
        """Return whether the footer can describe one more step, with so many blocks of these tensors."""
        return self._footer_with(tensors, blocks, groups, broken) <= MAX_JSON_BYTES

    @property
    def most_bytes(self) -> int:
        """The bytes that the file takes at most when it ends with the steps that were written so far."""
        return self.nbytes + self._footer_bytes + _END_BYTES

    def most_bytes_with(
        self, tensors: Sequence[RedoTensor], blocks: int, groups: Any, broken: str | None, *, stored_bytes: int
    ) -> int:
        """Return how many bytes the file takes at most when it ends with one more step, whose blocks take
        `stored_bytes`."""
        return self.nbytes + stored_bytes + self._footer_with(tensors, blocks, groups, broken) + _END_BYTES

    def _footer_with(self, tensors: Sequence[RedoTensor], blocks: int, groups: Any, broken: str | None) -> int:
        new = [tensor for tensor in tensors if tensor not in self._tensors]
        more = self._step_bytes(blocks, groups, broken) + sum(len(canonical(_tensor_row(one))) + 1 for one in new)
        return self._footer_bytes + more

    def _step_bytes(self, blocks: int, groups: Any, broken: str | None) -> int:
        """Return how many bytes of the footer a step takes at most, without the tensors that are new."""
        own = None if self._has_groups(groups) else groups
        return _STEP_BYTES + blocks * _BLOCK_ROW_BYTES + len(canonical([own, broken]))

    def _has_groups(self, groups: Any) -> bool:
        return bool(self._steps) and groups == self._groups

    def pack(self, blocks: Sequence[tuple[RedoTensor, memoryview]], packer: native.ParallelPacker) -> int:
        """Pack the next blocks of the current step, as many as there is room for in memory, and write them; return how
        many: one at least, where any is given. ValueError when the first has no room, as one of more than 8 MiB may
        have none."""
        file = self._opened()
        with file.room() as room:
            given: list[tuple[memoryview, int]] = []
            most = 0
            for tensor, content in blocks:
                most += content.nbytes + MAX_HEAD_BYTES
                if most > len(room):
                    break
                given.append((content, DTYPES[tensor.dtype]))
            if blocks and not given:
                raise ValueError(
                    f"{blocks[0][0].kind} of {blocks[0][0].name!r}: a block of {blocks[0][1].nbytes} bytes may take "
                    f"{most}, where there is room for {len(room)}: cut it"
                )
            found = packer.pack(given, into=room)
            self._look_at([stored for stored, _ in found], room)
        for (tensor, content), (stored, checksum) in zip(blocks, found, strict=False):
            file.extend(stored)
            self._note(tensor, content.nbytes, stored, checksum)
        return len(found)

    def add(self, blocks: Sequence[PackedBlock], content: memoryview) -> None:
        """Write the next blocks of the current step, which were packed before; `content` has them one behind the
        other."""
        self._opened().write(content)
        self._look_at([block.stored for block in blocks], content)
        for block in blocks:
            self._note(block.tensor, block.nbytes, block.stored, block.checksum)

    def _look_at(self, sizes: Sequence[int], content: memoryview) -> None:
        """Note which format blocks of these sizes, one behind the other, need."""
        ends = accumulate(sizes)
        if any(is_indexed(content[end - size : end]) for size, end in zip(sizes, ends, strict=True)):
            self._least_format = 4

    def _note(self, tensor: RedoTensor, nbytes: int, stored: int, checksum: bytes) -> None:
        """Note for the footer the next block of the current step, which stands for `nbytes` bytes."""
        self.nbytes += stored
        self.blocks += 1
        if tensor not in self._tensors:
            self._footer_bytes += len(canonical(_tensor_row(tensor))) + 1
        index = self._tensors.setdefault(tensor, len(self._tensors))
        self._blocks.append([index, nbytes, stored, checksum.hex()])

    def end_step(
        self, step: int, *, groups: Any, broken: str | None, applied: bool = True, counted_twice: bool = False
    ) -> None:
        """Note what else belongs to the step whose blocks were packed; `groups` is a JSON tree."""
        same = self._has_groups(groups)
        blocks, self._blocks = self._blocks, []
        self._footer_bytes += self._step_bytes(len(blocks), groups, broken)
        self._groups = groups
        row = {"step": step, "groups": None if same else groups, "broken": broken, "blocks": blocks}
        self._steps.append(
            {**row, **({} if applied else {"applied": False}), **({"counted_twice": True} if counted_twice else {})}
        )
        if counted_twice or any(BIAS_CORRECTION_SINCE in group for group in groups):
            self._least_format = max(self._least_format, 3)

    @property
    def path(self) -> Path:
        """Where the segment is published; it has a step."""
        name = RedoSegmentName(self.rank, self._steps[0]["step"], self._steps[-1]["step"]).name
        return self.paths.redo_dir(self.run) / name

    def publish(self) -> int:
        """Make the segment durable under its name, which follows from its steps; return its size, 0 where there is no
        step. FormatError when its footer is larger than a reader takes."""
        if not self._steps:
            self.abort()
            return 0
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
                f"{self.path}: steps {self.steps[0]} to {self.steps[-1]} take a footer of {len(footer)} bytes, where "
                f"{MAX_JSON_BYTES} are allowed"
            )
        file = self._opened()
        file.write(footer + len(footer).to_bytes(8, "little") + MAGIC)
        file.close()
        publish(self._tmp, self.path)
        return self.nbytes + len(footer) + _END_BYTES

    def _described_writes(self) -> dict[str, Any]:
        writes, rows = self.writes, _rows_of(self.writes)
        if self._least_format > 2:
            return {"format": self._least_format, **rows, "world_size": writes.world_size}
        applied = all(row.get("applied", True) for row in self._steps)
        if applied and not writes.flats and not writes.calls and writes.world_size == 1:
            return {"format": 1, "params": rows["params"]}
        return {"format": 2, **rows, "world_size": writes.world_size}

    def abort(self) -> None:
        """Leave nothing of the segment on the disk."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.abandon()
            with contextlib.suppress(OSError):
                self._tmp.unlink(missing_ok=True)

    def _opened(self) -> DirectFile:
        if self._file is None:
            folder = self.paths.redo_dir(self.run)
            make_dirs(folder, root=self.paths.run_dir(self.run))
            self._tmp = temporary_path(folder / RedoSegmentName(self.rank, 0, 0).name)
            self._file = DirectFile(self._tmp)
        return self._file


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
