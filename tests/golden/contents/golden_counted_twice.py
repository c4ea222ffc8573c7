"""The content of the golden history of a redo log of format 3.

`PYTHONPATH=tests/support python tests/golden/contents/golden_counted_twice.py FOLDER` writes such a history.
The one beside this folder was written once and never changes, so that every later release must be able to read it.
"""

import struct
import sys
from pathlib import Path
from typing import Any, NamedTuple

from catalog_helpers import Piece, Run
from redo_helpers import add

from catalog.format.redo_segment import RedoTensor, RedoWrites
from catalog.format.redo_writer import RedoFileWriter

__all__ = ["COUNTED_BACK", "GRADIENT", "SEGMENTS", "LoggedStep", "gradient", "write"]

COUNTED_BACK = "20261123-101502-000003"
"""The run made steps 1 to 6, and then 2 again, which it captured; it had captured 4 the first time."""

GRADIENT = RedoTensor("gradient", "layer.w", "F32", (3, 4))

_RULE = {"class": "DeepSpeedCPUAdam", "deepspeed": "0.18.0", "adam_w_mode": True, "fp32_optimizer_states": True}


class LoggedStep(NamedTuple):
    """What a segment has of one step."""

    step: int
    groups: Any
    broken: str | None
    counted_twice: bool


_LOADED = "a load has counted the steps back"

SEGMENTS = (
    (1, [LoggedStep(step, [{"lr": 0.5}], None, False) for step in (1, 2)]),
    (3, [LoggedStep(step, [{"lr": 0.5, "bias_correction_since": 3}], None, False) for step in (3, 4, 5, 6)]),
    (3, [LoggedStep(step, [], _LOADED, True) for step in (2, 3)]),
)
"""The format of each segment, and its steps, in the order in which they were written."""


def gradient(step: int) -> bytes:
    """Return the gradient that was recorded of a step."""
    return struct.pack("<12f", *(step + index / 8 for index in range(12)))


def write(root: Path) -> None:
    """Write the run with its checkpoints and its log."""
    with Run(root, COUNTED_BACK, created="2026-11-23T10:15:02+00:00") as run:
        for step in (0, 2, 4):
            run.checkpoint(step, [Piece("layer.w", gradient(step), dtype="F32", shape=(3, 4))], register=False)
        for _, steps in SEGMENTS:
            writer = RedoFileWriter(run.writers[0].paths, COUNTED_BACK, 0, _RULE, RedoWrites((("layer.w",),)))
            for one in steps:
                if one.broken is None:
                    add(writer, GRADIENT, gradient(one.step))
                writer.end_step(one.step, groups=one.groups, broken=one.broken, counted_twice=one.counted_twice)
            writer.publish()
    for derived in [*root.rglob("*.lock"), *root.glob("catalog.*")]:
        derived.unlink(missing_ok=True)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
