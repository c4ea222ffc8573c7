"""Tiny histories to pack: two ranks, numbers that change a little from step to step, and one tensor that never does."""

from dataclasses import replace
from pathlib import Path

import numpy as np
from catalog_helpers import Piece, Run, data_file_bytes
from retention_helpers import model_extents

from catalog.compaction.compact import Compacted, compact_run
from catalog.data_files.stored_bytes import read_verified
from catalog.format.extents import extent_table
from catalog.history import History
from catalog.records import CheckpointRef, Extent

__all__ = ["RUN", "STEPS", "all_bytes", "compacted", "make_history", "packed_files_of", "ref", "special_numbers"]

RUN = "run-a"
STEPS = range(0, 60, 10)
WORDS = {"F32": np.uint32, "BF16": np.uint16, "F16": np.uint16, "F64": np.uint64, "U8": np.uint8, "I64": np.uint64}
FROZEN_BYTES = 5000


def special_numbers(words: type) -> np.ndarray:
    """Return bits of what arithmetic would not keep: NaN with payloads, -0.0, infinities, denormals."""
    bits = np.iinfo(words).bits
    top = 1 << (bits - 1)
    exponent = {8: 0x78, 16: 0x7F80, 32: 0x7F800000, 64: 0x7FF << 52}[bits]
    values = [0, top, exponent, top | exponent, exponent | 1, top | exponent | 5, 1, top | 1, (1 << bits) - 1]
    return np.array(values, dtype=words)


def make_history(root: Path, *, steps: range = STEPS, elements: int = 3000, world_size: int = 2) -> History:
    """Write a history of a run that nobody writes any more; every second step refers to a tensor of the first."""
    rng = np.random.default_rng(7)
    state = {name: rng.integers(0, 200, elements).astype(words) for name, words in WORDS.items()}
    with Run(root, world_size=world_size) as run:
        history = History.open(root)
        frozen: Extent | None = None
        for step in steps:
            pieces = [Piece("frozen", rng.bytes(FROZEN_BYTES))] if frozen is None or step % 20 else []
            for dtype, words in WORDS.items():
                state[dtype] = state[dtype] + rng.integers(0, 3, elements).astype(words)
                data = np.concatenate([state[dtype], special_numbers(words)])
                pieces.append(Piece(f"{dtype}.weight", data.tobytes(), dtype=dtype))
            _commit(run, step, pieces, frozen if step % 20 == 0 else None)
            if frozen is None:
                frozen = model_extents(history, ref(step))["frozen"]
        run.register(patience_s=10.0)
    return history


def _commit(run: Run, step: int, pieces: list[Piece], frozen: Extent | None) -> None:
    for rank, writer in enumerate(run.writers):
        own = [replace(piece, name=f"{piece.name}.{rank}" if rank else piece.name) for piece in pieces]
        content, extents = data_file_bytes(own, run=run.run, step=step, rank=rank)
        data_tmp = writer.begin(step)
        data_tmp.write_bytes(content)
        referred = [frozen] if frozen is not None and rank == 0 else []
        writer.publish_part(step, data_tmp=data_tmp, extents=extent_table([*extents, *referred]))
    run.writers[0].journal.metric(step, "loss", 1 / (1 + step))
    assert run.writers[0].try_commit(step)
    run.writers[0].journal.flush()


def ref(step: int) -> CheckpointRef:
    return CheckpointRef(RUN, step)


def compacted(history: History, *, steps: range = STEPS, key_every: int = 3) -> Compacted:
    return compact_run(history, RUN, steps, key_every=key_every)


def all_bytes(history: History, *, steps: range | None = None) -> dict[tuple[int, str, str, int], bytes]:
    """Return the bytes of every extent of every checkpoint, or of some, headers and padding included, read and verified
    as a restore does."""
    found = {}
    for step in steps or history.steps(RUN):
        for extent in history.extents(ref(step)):
            memory = bytearray(max(extent.nbytes, 1))
            read_verified(history.root, [(extent, np.frombuffer(memory, np.uint8).ctypes.data)])
            found[step, extent.kind, extent.name, extent.start] = bytes(memory[: extent.nbytes])
    return found


def packed_files_of(history: History) -> list[Path]:
    return sorted(history.root.glob("runs/*/steps/*/*.packed"))
