"""Audit files: what the audit of one checkpoint found, parameter by parameter, so that it need not be computed again.

Each step has one checksummed Parquet file in the run's folder of audits. The files are derived from the data files: a
checkpoint is complete without them, and they can be deleted and computed anew.
"""

import re
from pathlib import Path

import pyarrow as pa

from catalog.disk.checked_parquet import decode_checked, encode_checked, read_bounded
from catalog.disk.durable import make_dirs, publish_bytes
from catalog.errors import FormatError
from catalog.paths import HistoryPaths

__all__ = ["SCHEMA", "audited_step", "publish_audit", "read_audit"]

_VERSION = "1"

SCHEMA = pa.schema(
    [
        pa.field("name", pa.string(), nullable=False),
        pa.field("since", pa.int64(), nullable=False),
        pa.field("cause", pa.string(), nullable=True),
        pa.field("updates", pa.int64(), nullable=True),
        *(
            pa.field(name, pa.float64(), nullable=True)
            for name in (
                "gradient_norm",
                "gradient_noise",
                "signal_to_noise",
                "learning_rate",
                "group_learning_rate",
                "decay",
                "group_decay",
                "second_moment",
                "unexplained",
                "over_bound",
            )
        ),
    ]
)
"""One row for each parameter that an optimizer held; `since` is the step before, captured or of a redo log."""

_NAME = re.compile(r"([0-9]{12})\.parquet")


def audited_step(name: str) -> int | None:
    """Return the step whose audit a file with this name has, or None when it is not the name of an audit file."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def publish_audit(paths: HistoryPaths, run: str, step: int, rows: pa.Table) -> None:
    """Write the audit of a step durably, unless it is there already; `rows` has the columns of SCHEMA. OSError when it
    can't be written."""
    folder = paths.audits_dir(run)
    make_dirs(folder, root=paths.root)
    path = folder / f"{step:012d}.parquet"
    if not path.exists():
        publish_bytes(encode_checked(rows.select(SCHEMA.names).cast(SCHEMA), metadata=_metadata(run, step)), path)


def read_audit(path: Path, *, run: str) -> pa.Table:
    """Read the rows of a file, with the columns of SCHEMA. CorruptError when the file is damaged, FormatError when it
    has another version or belongs to another run or step."""
    step = audited_step(path.name)
    if step is None:
        raise FormatError(f"{path}: no audit file has this name")
    table, metadata = decode_checked(read_bounded(path), schema=SCHEMA, file=str(path))
    for field, expected in _metadata(run, step).items():
        if metadata.get(field) != expected:
            raise FormatError(f"{path}: field {field}: {metadata.get(field)!r} where {expected!r} belongs")
    return table


def _metadata(run: str, step: int) -> dict[str, str]:
    return {"dshistory.audit": _VERSION, "run": run, "step": str(step)}
