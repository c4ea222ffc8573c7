"""Audit files: what the audit of a step against a step before it found, parameter by parameter, so that it need not be
computed again.

Each audit has one checksummed Parquet file in the run's folder of audits. The files are derived from the data files: a
checkpoint is complete without them, and they can be deleted and computed anew.
"""

import re
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

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
"""One row for each parameter that an optimizer held; `since` is the step before, captured or of a redo log, the same in
all rows."""

_NAME = re.compile(r"([0-9]{12})(?:-since-([0-9]{12}))?\.parquet")
"""Files of earlier releases do not name the step before, of which a step had one then."""


def audited_step(name: str) -> int | None:
    """Return the step whose audit a file with this name has, or None when it is not the name of an audit file."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def publish_audit(paths: HistoryPaths, run: str, step: int, rows: pa.Table) -> None:
    """Write the audit of a step against the one that is `since` in its rows durably, beside those against others,
    unless it is there already; `rows` has the columns of SCHEMA, and at least one row. OSError when it can't be
    written."""
    folder = paths.audits_dir(run)
    make_dirs(folder, root=paths.root)
    (since,) = pc.unique(rows["since"]).to_pylist()
    path = folder / f"{step:012d}-since-{since:012d}.parquet"
    if not path.exists():
        publish_bytes(encode_checked(rows.select(SCHEMA.names).cast(SCHEMA), metadata=_metadata(run, step)), path)


def read_audit(path: Path, *, run: str) -> pa.Table:
    """Read the rows of a file, with the columns of SCHEMA. CorruptError when the file is damaged, FormatError when it
    has another version or belongs to another run or to other steps."""
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise FormatError(f"{path}: no audit file has this name")
    step, since = int(match[1]), match[2]
    table, metadata = decode_checked(read_bounded(path), schema=SCHEMA, file=str(path))
    for field, expected in _metadata(run, step).items():
        if metadata.get(field) != expected:
            raise FormatError(f"{path}: field {field}: {metadata.get(field)!r} where {expected!r} belongs")
    found = pc.unique(table["since"]).to_pylist()
    if since is not None and found != [int(since)]:
        raise FormatError(f"{path}: field since: {found} where {int(since)} belongs")
    return table


def _metadata(run: str, step: int) -> dict[str, str]:
    return {"dshistory.audit": _VERSION, "run": run, "step": str(step)}
