"""Makes every checkpoint of a run again by its redo log, from the checkpoint before it, and compares all bytes."""

from typing import Any, Final

import pyarrow as pa

from capture.redo.key_frames import compare_key_frame, key_frames
from capture.redo.steps import RedoRef
from catalog.errors import HistoryError, NotFoundError
from catalog.history import History
from dshistory.display.table import Table

__all__ = ["redo_check"]

_SCHEMA: Final = pa.schema(
    [
        ("step", pa.int64()),
        ("since", pa.int64()),
        ("identical", pa.bool_()),
        ("tensors", pa.int64()),
        ("reason", pa.string()),
    ]
)


def redo_check(history: History, run: str) -> Table:
    """See `Explorer.redo_check`."""
    rows = [_checked(history, frame) for frame in key_frames(history, run)]
    if not rows:
        raise NotFoundError(
            f"run {run} of {history.root} has no redo log that reaches a second checkpoint: "
            "`capture.enable(..., redo=True)` records one"
        )
    wrong = [row for row in rows if not row["identical"]]
    note = f"{len(rows) - len(wrong)} of {len(rows)} checkpoints come out of their redo log bit for bit"
    return Table(pa.Table.from_pylist(rows, schema=_SCHEMA), note=note)


def _checked(history: History, frame: RedoRef) -> dict[str, Any]:
    row: dict[str, Any] = {"step": frame.ref.step, "since": frame.base.step, "tensors": None, "reason": None}
    try:
        row["tensors"] = compare_key_frame(history, frame)
    except HistoryError as error:
        row["reason"] = str(error)
    return {**row, "identical": row["reason"] is None}
