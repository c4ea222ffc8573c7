"""The content of the golden history of format 1.

`PYTHONPATH=tests/support python tests/golden/contents/golden_history.py FOLDER` writes such a history.
The one beside this folder was written once and never changes, so that every later release must be able to read it.
"""

import struct
import sys
from pathlib import Path

from catalog_helpers import Piece, Run

W = struct.pack("<4f", 0.5, -1.0, 2.0, float("inf"))
BF16 = bytes.fromhex("803f 0040 0000")
RNG = b'{"python":{"$":"tuple","items":[3,null]}}'


def _part(step: int, rank: int) -> list[Piece]:
    changing = struct.pack("<2f", float(step), float(rank))
    return [
        Piece(
            "layer.w", W[8 * rank : 8 * rank + 8], dtype="F32", shape=(2, 2), start=2 * rank, placement="partitioned"
        ),
        Piece("layer.w", changing, "exp_avg", "F32", shape=(2, 2), start=2 * rank, placement="partitioned"),
        *([Piece("head", BF16, dtype="BF16", shape=(3, 1), aliases=("embed",))] if rank == 0 else []),
        Piece("empty", b"", dtype="I64", shape=(0, 4), placement="rank_local"),
        Piece("rng", RNG + b" " * rank, kind="object", placement="rank_local"),
    ]


def write(root: Path) -> None:
    """Write a run of two ranks with steps 0 and 50, then a run of one rank that continues from step 50."""
    facts = {"zero_stage": 1, "backend": "posix"}
    with Run(root, "20261121-101502-000001", world_size=2, created="2026-11-21T10:15:02+00:00", facts=facts) as run:
        for step in (0, 50):
            run.checkpoint(step, _part(step, 0), _part(step, 1), register=False, loss=2.0 - step / 100)
        run.writers[1].journal.metric(50, "loss", 2.5)
        run.writers[1].journal.event("failed", 25, reason="disk full")
        run.writers[0].journal.tag("good", 50)
        parent = (run.run, 50)
    with Run(root, "20261121-111502-000002", parent=parent, created="2026-11-21T11:15:02+00:00") as run:
        whole = [Piece("layer.w", W, dtype="F32", shape=(2, 2)), Piece("rng", RNG, kind="object")]
        run.checkpoint(50, whole, register=False)
    for lock in root.rglob("*.lock"):
        lock.unlink()


if __name__ == "__main__":
    write(Path(sys.argv[1]))
