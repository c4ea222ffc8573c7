"""Writes tensors into a redo log, and logs that say something else than the training did, with right checksums."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

import native
from catalog.format.redo_reader import read_redo_segment
from catalog.format.redo_segment import RedoTensor, RedoWrites, redo_segments
from catalog.format.redo_writer import RedoFileWriter
from catalog.history import History
from catalog.read.redo import RedoRecord

__all__ = ["add", "with_another_bit", "with_other_writes"]


def add(writer: RedoFileWriter, tensor: RedoTensor, content: bytes | bytearray | memoryview) -> None:
    """Write the next block of the current step, which stands for these bytes of a tensor."""
    assert writer.pack([(tensor, memoryview(content))], native.ParallelPacker(threads=1)) == 1


def with_another_bit(history: History, run: str, *, rank: int, step: int) -> None:
    """Flip a high bit of the largest element of the first gradient, of float32, that a rank has recorded of a step. The
    lowest one may be rounded away, and then nothing is wrong."""
    _rewrite(history, run, rank=rank, step=step, flips=True, change=lambda writes: writes)


def with_other_writes(
    history: History, run: str, *, rank: int, step: int, change: Callable[[RedoWrites], RedoWrites]
) -> None:
    """Let the segment of a step say that the updates of a rank write something else."""
    _rewrite(history, run, rank=rank, step=step, flips=False, change=change)


def _rewrite(
    history: History, run: str, *, rank: int, step: int, flips: bool, change: Callable[[RedoWrites], RedoWrites]
) -> None:
    name = next(one for one in redo_segments(history.paths, run) if one.rank == rank and one.first <= step <= one.last)
    path: Path = history.paths.redo_dir(run) / name.name
    segment = read_redo_segment(path, run=run)
    writer = RedoFileWriter(history.paths, run, rank, segment.rule, change(segment.writes))
    for one in segment.steps:
        for tensor, content in RedoRecord(segment, one).tensors():
            if flips and one.step == step and tensor.kind == "gradient" and content:
                content[4 * int(np.abs(np.frombuffer(content, np.float32)).argmax()) + 2] ^= 0x40
                flips = False
            add(writer, tensor, content)
        writer.end_step(one.step, groups=one.groups, broken=one.broken, applied=one.applied)
    path.unlink()
    writer.publish()
