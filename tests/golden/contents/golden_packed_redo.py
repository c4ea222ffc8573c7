"""The content of the golden history of packed files and redo logs.

`PYTHONPATH=tests/support python tests/golden/contents/golden_packed_redo.py FOLDER` writes such a history.
The one beside this folder was written once and never changes, so that every later release must be able to read it.
All numbers are made by whole-number arithmetic, the same on every machine.
"""

import struct
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from catalog_helpers import Piece, Run
from redo_helpers import add

from catalog.compaction.compact import compact_run
from catalog.format.dtypes import DTYPES
from catalog.format.redo_segment import RedoFlat, RedoFragment, RedoTensor, RedoWrites
from catalog.format.redo_writer import RedoFileWriter
from catalog.history import History
from catalog.paths import HistoryPaths

__all__ = ["ALONE", "FLATS", "KEY", "PACKED", "TOGETHER", "RecordedStep", "recorded", "tensors", "write"]

ALONE, TOGETHER = "20261122-101502-000001", "20261122-111502-000002"
"""A run of one rank has two packed checkpoints and a redo log of format 1, one of two ranks has a log of format 2."""

KEY, PACKED = 0, 10
"""The key frame, and the checkpoint that was packed against it."""

_WORDS = {1: "B", 2: "H", 4: "I", 8: "Q"}
_BLOCK_BYTES = 96
"""A gradient of more bytes is recorded in several blocks; those of real logs are larger."""


def _noise(count: int, *, seed: int) -> list[int]:
    """Return numbers from 0 to 65,535 that repeat no pattern."""
    found = []
    for _ in range(count):
        seed = (1103515245 * seed + 12345) % (1 << 31)
        found.append(seed >> 15)
    return found


def _bytes(words: list[int], itemsize: int) -> bytes:
    return struct.pack(f"<{len(words)}{_WORDS[itemsize]}", *(word % (1 << 8 * itemsize) for word in words))


def tensors(step: int) -> dict[str, tuple[str, bytes]]:
    """Return dtype and bytes of each tensor of a checkpoint."""
    later = step == PACKED
    noise = _noise(400, seed=1)
    other = _noise(400, seed=2)
    signs = [(n & 1) << 31 | 0x3F000000 | n << 7 for n in noise]
    if later:
        signs = [bits ^ ((n & 1) << 31 | n >> 3 & 1) for bits, n in zip(signs, other, strict=True)]
    return {
        "noise": ("U8", _bytes(other if later else noise, 1)),
        "text": ("U8", b"all work and no play " * 20 + b"!" * later),
        "counted": ("I64", _bytes([1000 * i + later * (n % 7) for i, n in enumerate(noise[:100])], 8)),
        "signs": ("F32", _bytes(signs, 4)),
        "flips": ("F64", _bytes([n << 44 ^ later * (n >> 5 & 1) << 40 for n in noise[:100]], 8)),
        "weight": ("BF16", _bytes([0x3F80 + n % 97 + later * (n % 13 == 0) for n in noise * 3], 2)),
        "odd": ("F32", bytes.fromhex("0000c07f 00000080 0100a07f 000080ff 01000000")),
    }  # fmt: skip


class RecordedStep(NamedTuple):
    """What a redo log has of one step of a rank."""

    step: int
    groups: Any
    broken: str | None
    applied: bool
    tensors: Mapping[RedoTensor, bytes]


_GRADIENT = RedoTensor("gradient", "layer.w", "F32", (5, 12))
_SEEN = RedoTensor("buffer", "seen", "I64", ())
_RATE = RedoTensor("buffer", "rate", "F64", (2, 0))
_RANDOM = RedoTensor("object", "rng", "U8", (37,))
_TOO_LARGE = RedoTensor("object", "loader", "U8", (0,))
_FLAT = RedoTensor("gradient", "flat 0", "BF16", (40,))

FLATS = RedoWrites(
    params=(("flat 0",), ("flat 1",)),
    flats=(
        RedoFlat("flat 0", "F32", (40,), "partitioned", False, (RedoFragment("layer.w", 0, 30, 2),)),
        RedoFlat("flat 1", "F32", (6,), "replicated", True, ()),
    ),
    calls=(("flat 1",), ("flat 0",)),
    world_size=2,
)
_PARAMS = RedoWrites((("layer.w", "layer.b"), ()))


def _gradient(tensor: RedoTensor, step: int) -> bytes:
    itemsize = DTYPES[tensor.dtype]
    top = {2: 0x3F00, 4: 0x3F000000}[itemsize]
    count = tensor.shape[0] * (tensor.shape[1] if len(tensor.shape) > 1 else 1)
    return _bytes([top | (n & 1) << 8 * itemsize - 1 | n & 0x7F for n in _noise(count, seed=step)], itemsize)


def recorded(run: str, rank: int) -> list[RecordedStep]:
    """Return what the log of a rank has."""
    groups = [{"lr": 0.1, "betas": {"$": "tuple", "items": [0.9, 0.999]}}, {"lr": 0.5, "betas": None}]
    slower = [{**group, "lr": 0.05} for group in groups]
    if run == TOGETHER:
        gradient = {_FLAT: _gradient(_FLAT, rank)}
        return [
            RecordedStep(1, groups, None, True, gradient),
            RecordedStep(2, groups, None, False, {} if rank else {_SEEN: _bytes([2], 8)}),
        ]
    random = b'{"torch":{"$":"tuple","items":[1,2]}}'
    return [
        RecordedStep(11, groups, None, True, {_GRADIENT: _gradient(_GRADIENT, 11), _SEEN: _bytes([11], 8)}),
        RecordedStep(12, groups, None, True, {_SEEN: _bytes([12], 8), _RANDOM: random, _TOO_LARGE: b"", _RATE: b""}),
        RecordedStep(13, slower, "an edit: modify()", True, {_GRADIENT: bytes(240)}),
    ]


def _write_log(paths: HistoryPaths, run: str, rank: int, writes: RedoWrites) -> None:
    writer = RedoFileWriter(paths, run, rank, {"class": "AdamW", "torch": "2.9.0", "threads": 1}, writes)
    for one in recorded(run, rank):
        for tensor, content in one.tensors.items():
            for at in range(0, max(1, len(content)), _BLOCK_BYTES):
                add(writer, tensor, content[at : at + _BLOCK_BYTES])
        writer.end_step(one.step, groups=one.groups, broken=one.broken, applied=one.applied)
    writer.publish()


def write(root: Path) -> None:
    """Write both runs, and pack the first one's checkpoints."""
    with Run(root, ALONE, created="2026-11-22T10:15:02+00:00") as run:
        for step in (KEY, PACKED):
            pieces = [Piece(name, data, dtype=dtype) for name, (dtype, data) in tensors(step).items()]
            run.checkpoint(step, pieces, register=False)
        _write_log(run.writers[0].paths, ALONE, 0, _PARAMS)
    with Run(root, TOGETHER, world_size=2, created="2026-11-22T11:15:02+00:00") as run:
        for rank, writer in enumerate(run.writers):
            _write_log(writer.paths, TOGETHER, rank, FLATS)
    compacted = compact_run(History.open(root), ALONE, (KEY, PACKED), key_every=2)
    assert [(one.ref.step, one.base) for one in compacted.steps] == [(KEY, None), (PACKED, KEY)]
    for derived in [*root.rglob("*.lock"), *root.glob("catalog.*")]:
        derived.unlink(missing_ok=True)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
