"""Reads the redo log of a run: which steps can be made again from which checkpoint, and what their updates consumed.

A step can be made again when the log has every step from the checkpoint before it on, and the state after each of them
is what its update has made of the state before. Whatever breaks this chain is named: nothing is made up.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from catalog.encoding.planes import unpacked
from catalog.errors import CorruptError, FormatError, HistoryError, MismatchError, NotFoundError
from catalog.format.dtypes import DTYPES
from catalog.format.redo_file import RedoSegment, RedoStep, RedoTensor, read_blocks, read_redo_segment, redo_segments
from catalog.paths import HistoryPaths
from catalog.read.runs import steps
from catalog.records import CheckpointRef

__all__ = ["RedoRecord", "recorded_steps", "redo_base", "redo_chain"]


@dataclass(frozen=True, slots=True)
class RedoRecord:
    """What the log has of one step; the bytes of its tensors are read when they are asked for."""

    segment: RedoSegment
    content: RedoStep

    @property
    def step(self) -> int:
        return self.content.step

    @property
    def rule(self) -> Mapping[str, Any]:
        """What the bits of the update depend on beside its input."""
        return self.segment.rule

    def tensors(self) -> Iterator[tuple[RedoTensor, bytearray]]:
        """Yield each recorded tensor with its bytes, in row-major order. CorruptError, which names the tensor, when
        they differ from their checksum."""
        for index, group in groupby(self.content.blocks, key=lambda block: block.tensor):
            tensor, blocks = self.segment.tensors[index], list(group)
            nbytes = DTYPES[tensor.dtype]
            for size in tensor.shape:
                nbytes *= size
            where = f"{self.segment.path}: step {self.step}: {tensor.kind} of {tensor.name!r}"
            if sum(block.nbytes for block in blocks) != nbytes:
                raise FormatError(f"{where}: its blocks have {sum(block.nbytes for block in blocks)} of {nbytes} bytes")
            content = bytearray(nbytes)
            _unpack(content, blocks, read_blocks(self.segment, blocks), where=where)
            yield tensor, content


def recorded_steps(paths: HistoryPaths, run: str) -> list[int]:
    """Return the steps of which a run's log has a record, ascending. Segments that can't be read are left out: `verify`
    names them."""
    found: set[int] = set()
    for name in redo_segments(paths, run):
        try:
            segment = read_redo_segment(paths.redo_dir(run) / name.name, run=run)
        except (HistoryError, FileNotFoundError):
            continue
        found.update(step.step for step in segment.steps)
    return sorted(found)


def redo_base(paths: HistoryPaths, run: str, step: int) -> CheckpointRef | None:
    """Return the checkpoint from which a step that was not captured is made again; None when the run has no checkpoint
    before it, or its log ends before it."""
    before = max((one for one in steps(paths, run) if one < step), default=None)
    reaches = any(name.first <= step <= name.last for name in redo_segments(paths, run))
    return CheckpointRef(run, before) if before is not None and reaches else None


def redo_chain(paths: HistoryPaths, base: CheckpointRef, step: int) -> list[RedoRecord]:
    """Return the records of the steps after `base` up to `step`, in order.

    NotFoundError names the first step of which the log has no record, MismatchError the first after which the state is
    not what its update has made, CorruptError a segment that is damaged.
    """
    found: dict[int, RedoRecord] = {}
    for name in redo_segments(paths, base.run):
        if name.rank == 0 and name.last > base.step and name.first <= step:
            segment = read_redo_segment(paths.redo_dir(base.run) / name.name, run=base.run)
            found.update({one.step: RedoRecord(segment, one) for one in segment.steps})
    chain = []
    for number in range(base.step + 1, step + 1):
        what = f"step {step} of run {base.run} can't be made again from {base}"
        if number not in found:
            raise NotFoundError(
                f"{what}: the redo log has no record of step {number} (the table `events` may say why); restore "
                f"{base.step}, or rebuild the step by a replay"
            )
        record = found[number]
        if record.content.broken is not None:
            raise MismatchError(
                f"{what}: the state after step {number} is not what its update made: {record.content.broken}; restore "
                f"{base.step}, or rebuild the step by a replay"
            )
        chain.append(record)
    return chain


def _unpack(content: bytearray, blocks: Sequence[Any], packed: Iterator[bytes], *, where: str) -> None:
    at = 0
    for block, data in zip(blocks, packed, strict=True):
        try:
            unpacked(data, into=memoryview(content)[at : at + block.nbytes])
        except FormatError as error:
            raise CorruptError(f"{where}: {error}") from error
        at += block.nbytes
