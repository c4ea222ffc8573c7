"""The content of the golden history of a redo log of format 4, whose gradients were clipped.

`PYTHONPATH=tests/support python tests/golden/contents/golden_indexed.py FOLDER` writes such a history.
The one beside this folder was written once and never changes, so that every later release must be able to read it.
"""

import struct
import sys
from pathlib import Path

from catalog_helpers import Piece, Run

import native
from catalog.format.redo_segment import RedoTensor, RedoWrites
from catalog.format.redo_writer import RedoFileWriter

__all__ = ["CLIPPED", "GRADIENT", "STEPS", "gradient", "write"]

CLIPPED = "20261125-080502-000004"
STEPS = (1, 2)
COUNT = 2048
GRADIENT = RedoTensor("gradient", "layer.w", "F32", (COUNT,))


def gradient(step: int) -> bytes:
    """Return the gradient that was recorded of a step: bfloat16 numbers times a factor, some of them zero."""
    halves = ((37 * index * index + step) % 1024 + 0x3A00 | (index & 1) << 15 for index in range(COUNT))
    factor = struct.unpack("<f", struct.pack("<f", 0.3 / step))[0]
    numbers = [struct.unpack("<f", struct.pack("<I", half << 16))[0] * factor for half in halves]
    numbers[::100] = [0.0] * len(numbers[::100])
    return struct.pack(f"<{COUNT}f", *numbers)


def write(root: Path) -> None:
    """Write the run with its checkpoint and its log."""
    with Run(root, CLIPPED, created="2026-11-25T08:05:02+00:00") as run:
        run.checkpoint(0, [Piece("layer.w", bytes(4 * COUNT), dtype="F32", shape=(COUNT,))], register=False)
        writer = RedoFileWriter(run.writers[0].paths, CLIPPED, 0, {"class": "SGD"}, RedoWrites((("layer.w",),)))
        packer = native.ParallelPacker(threads=1)
        for step in STEPS:
            assert writer.pack([(GRADIENT, memoryview(gradient(step)))], packer) == 1
            writer.end_step(step, groups=[{"lr": 0.5}], broken=None)
        writer.publish()
    for derived in [*root.rglob("*.lock"), *root.glob("catalog.*")]:
        derived.unlink(missing_ok=True)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
