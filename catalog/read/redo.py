"""Reads the redo log of a run: which steps can be made again from which checkpoint, and what their updates consumed.

A step can be made again when the log has every step from the checkpoint before it on, and the state after each of them
is what its update has made of the state before. Whatever breaks this chain is named: nothing is made up.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

from catalog.encoding.planes import unpacked
from catalog.errors import CorruptError, FormatError, HistoryError, MismatchError, NotFoundError
from catalog.format.dtypes import DTYPES
from catalog.format.redo_reader import open_blocks, read_redo_segment
from catalog.format.redo_segment import RedoBlock, RedoSegment, RedoStep, RedoTensor, redo_segments
from catalog.paths import HistoryPaths
from catalog.read.runs import steps
from catalog.records import CheckpointRef

__all__ = ["RedoChain", "RedoRecord", "recorded_steps", "redo_base"]


Memory = Callable[[RedoTensor, int], bytearray]
"""Gives memory for so many bytes of a tensor, which may hold anything."""


def _new_memory(tensor: RedoTensor, nbytes: int) -> bytearray:
    return bytearray(nbytes)


@dataclass(frozen=True, slots=True)
class RedoRecord:
    """Gives what the log has of one step; the bytes of its tensors are read when they are asked for."""

    segment: RedoSegment
    content: RedoStep

    @property
    def step(self) -> int:
        return self.content.step

    @property
    def rule(self) -> Mapping[str, Any]:
        """Return what the bits of the update depend on beside its input."""
        return self.segment.rule

    def tensors(self, memory: Memory = _new_memory) -> Iterator[tuple[RedoTensor, bytearray]]:
        """Yield each recorded tensor with its bytes, in row-major order, in what `memory` gives. CorruptError, which
        names the tensor, when they differ from their checksum."""
        if not self.content.blocks:
            return
        workers = len(os.sched_getaffinity(0))
        with open_blocks(self.segment) as read, ThreadPoolExecutor(workers, "dshistory-unpack") as pool:
            for index, group in groupby(self.content.blocks, key=lambda block: block.tensor):
                tensor, blocks = self.segment.tensors[index], list(group)
                nbytes = DTYPES[tensor.dtype]
                for size in tensor.shape:
                    nbytes *= size
                where = f"{self.segment.path}: step {self.step}: {tensor.kind} of {tensor.name!r}"
                if sum(block.nbytes for block in blocks) != nbytes:
                    found = sum(block.nbytes for block in blocks)
                    raise FormatError(f"{where}: its blocks have {found} of {nbytes} bytes")
                content = memory(tensor, nbytes)
                tasks = list(_unpackings(content, blocks, read, where=where))
                # A single one is not worth another thread.
                for _ in map(_call, tasks) if len(tasks) == 1 else pool.map(_call, tasks):
                    pass
                yield tensor, content


def recorded_steps(paths: HistoryPaths, run: str) -> list[int]:
    """Return the steps of which the log of every rank of a run has a record, ascending. Segments that can't be read are
    left out: `verify` names them."""
    ranks: dict[int, set[int]] = {}
    world_size = 1
    for name in redo_segments(paths, run):
        try:
            segment = read_redo_segment(paths.redo_dir(run) / name.name, run=run)
        except (HistoryError, FileNotFoundError):
            continue
        ranks.setdefault(segment.rank, set()).update(step.step for step in segment.steps)
        world_size = max(world_size, segment.writes.world_size)
    return sorted(set.intersection(*(ranks.get(rank, set()) for rank in range(world_size))))


def redo_base(paths: HistoryPaths, run: str, step: int) -> CheckpointRef | None:
    """Return the checkpoint from which a step that was not captured is made again; None when the run has no checkpoint
    before it, or its log ends before it."""
    before = max((one for one in steps(paths, run) if one < step), default=None)
    reaches = any(name.first <= step <= name.last for name in redo_segments(paths, run))
    return CheckpointRef(run, before) if before is not None and reaches else None


class RedoChain:
    """The records of the steps after a checkpoint; a segment is read when a step of it is asked for, and once."""

    def __init__(self, paths: HistoryPaths, base: CheckpointRef) -> None:
        self._paths = paths
        self._base = base
        self._unread = [name for name in redo_segments(paths, base.run) if name.last > base.step]
        self._found: dict[int, dict[int, RedoRecord]] = {}

    def records(self, step: int, *, after: int) -> list[Sequence[RedoRecord]]:
        """Return the records of the steps beyond `after` up to `step`, in order: for each step those of all ranks.

        NotFoundError names the first step of which the log of a rank has no record, MismatchError the first after which
        the state is not what its update has made, CorruptError a segment that is damaged.
        """
        while (name := next((one for one in self._unread if one.first <= step), None)) is not None:
            segment = read_redo_segment(self._paths.redo_dir(self._base.run) / name.name, run=self._base.run)
            self._unread.remove(name)
            for one in segment.steps:
                ranks = self._found.setdefault(one.step, {})
                known = ranks.get(segment.rank)
                if known is None or not known.content.counted_twice:
                    ranks[segment.rank] = RedoRecord(segment, one)
        what = f"step {step} of run {self._base.run} can't be made again from {self._base}"
        instead = f"restore {self._base.step}, or rebuild the step by a replay"
        numbers = range(after + 1, step + 1)
        found = [_whole_record(self._found.get(n, {}), n, what=what, instead=instead) for n in numbers]
        for n in numbers:
            # Whoever has their records needs them no longer.
            del self._found[n]
        return found


def _whole_record(ranks: Mapping[int, RedoRecord], step: int, *, what: str, instead: str) -> Sequence[RedoRecord]:
    """Return the records of a step, in the order of the ranks; they are of one update that was wholly recorded."""
    world_size = max((one.segment.writes.world_size for one in ranks.values()), default=1)
    missing = next((rank for rank in range(world_size) if rank not in ranks), None)
    if missing is not None:
        of = f"the redo log of rank {missing}" if world_size > 1 else "the redo log"
        raise NotFoundError(f"{what}: {of} has no record of step {step} (the table `events` may say why); {instead}")
    records = [ranks[rank] for rank in range(world_size)]
    for record in records:
        if record.content.broken is not None:
            on = f" on rank {record.segment.rank}" if world_size > 1 else ""
            raise MismatchError(
                f"{what}: the state after step {step} is not what its update made{on}: {record.content.broken}; "
                f"{instead}"
            )
    if len({(one.content.applied, one.segment.writes.world_size) for one in records}) > 1:
        raise MismatchError(f"{what}: the ranks do not agree whether the update of step {step} was made; {instead}")
    return records


def _unpackings(
    content: bytearray, blocks: Sequence[RedoBlock], read: Callable[[RedoBlock], bytes], *, where: str
) -> Iterator[Callable[[], None]]:
    """Yield for each block what fills its part of `content`, for any thread."""
    whole, at = memoryview(content), 0
    for block in blocks:
        yield partial(_unpack, block, read, whole[at : at + block.nbytes], where)
        at += block.nbytes


def _unpack(block: RedoBlock, read: Callable[[RedoBlock], bytes], into: memoryview, where: str) -> None:
    packed = read(block)
    try:
        unpacked(packed, into=into)
    except FormatError as error:
        raise CorruptError(f"{where}: {error}") from error


def _call(task: Callable[[], None]) -> None:
    task()
