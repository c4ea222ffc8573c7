"""Tiny checkpoints that refer to each other's bytes, and the moment at which a process dies between two changes of
files."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
from catalog_helpers import Run, data_file_bytes, pieces_of

from catalog.data_files.stored_bytes import read_verified
from catalog.format.extents import extent_table
from catalog.history import History
from catalog.records import CheckpointRef, Extent

__all__ = ["Cut", "commit", "contents", "cut_off", "model_extents"]

_CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.link", "os.mkdir")


class Cut(BaseException):
    """The process dies here: nothing that cleans up after an Exception runs."""


_left: int | None = None


def _hook(event: str, arguments: tuple[object, ...]) -> None:
    global _left
    if _left is None or not (event in _CHANGES or (event == "open" and _is_written(arguments))):
        return
    if _left == 0:
        _left = None
        raise Cut(event)
    _left -= 1


def _is_written(arguments: tuple[object, ...]) -> bool:
    return isinstance(arguments[1], str) and arguments[1] != "r" and "r" not in arguments[1]


sys.addaudithook(_hook)


@dataclass
class Cutting:
    """Whether the body of `cut_off` has died."""

    happened: bool = False


@contextmanager
def cut_off(after: int) -> Iterator[Cutting]:
    """Let the body die after so many changes of files; it goes on to its end when it makes fewer."""
    global _left
    _left = after
    cutting = Cutting()
    try:
        yield cutting
    except Cut:
        cutting.happened = True
    finally:
        _left = None


def commit(
    run: Run, step: int, tensors: Mapping[str, bytes], *, refer: Mapping[str, Extent] | None = None, **metrics: float
) -> None:
    """Commit a step with its own tensors, and with tensors whose bytes an earlier checkpoint of the run has."""
    for name, value in metrics.items():
        run.writers[0].journal.metric(step, name, value)
    for rank, writer in enumerate(run.writers):
        own = tensors if rank == 0 else {f"{name}.{rank}": data for name, data in tensors.items()}
        content, extents = data_file_bytes(pieces_of(own), run=run.run, step=step, rank=rank)
        referred = [replace(extent, name=name) for name, extent in (refer or {}).items()] if rank == 0 else []
        data_tmp = writer.begin(step)
        data_tmp.write_bytes(content)
        writer.publish_part(step, data_tmp=data_tmp, extents=extent_table([*extents, *referred]))
    assert run.writers[0].try_commit(step)
    run.writers[0].journal.flush()


def model_extents(history: History, ref: CheckpointRef) -> dict[str, Extent]:
    """Return the extents of a checkpoint's tensors by name."""
    return {extent.name: extent for extent in history.state_extents(ref)}


def contents(history: History, ref: CheckpointRef) -> dict[str, bytes]:
    """Return the bytes of every tensor of a checkpoint, read and verified as a restore does."""
    found = {}
    for name, extent in model_extents(history, ref).items():
        memory = bytearray(max(extent.nbytes, 1))

        read_verified(history.root, [(extent, np.frombuffer(memory, np.uint8).ctypes.data)])
        found[name] = bytes(memory[: extent.nbytes])
    return found
