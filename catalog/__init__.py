"""The history on disk: its files, its index, and queries over both. Nothing here imports torch.

    retention, compaction -> writing (run_writer, gc), reading (history, references, verify)
      -> index -> statistics -> read -> format -> disk, encoding -> errors, records, paths

Imports go only to the right. `import catalog`, `catalog.errors`, `catalog.records` and `catalog.paths` load neither
pyarrow nor DuckDB.
"""

try:
    from native._siblings import check_siblings
except ImportError as error:
    import native

    raise ImportError(
        f"DSHistory needs its own package 'native', but `import native` finds {native.__file__}: "
        "rename that file, or put it after DSHistory on sys.path"
    ) from error

# Who imports an error from here most likely imports `capture` too, whose place a file of the user may have taken.
check_siblings(__file__, ("native", "capture"))

from catalog.errors import (  # noqa: E402
    CorruptError,
    FormatError,
    HistoryError,
    MismatchError,
    NotFoundError,
    RestoreError,
    SetupError,
    SnapshotError,
    UnsupportedError,
)

__all__ = [
    "CorruptError",
    "FormatError",
    "HistoryError",
    "MismatchError",
    "NotFoundError",
    "RestoreError",
    "SetupError",
    "SnapshotError",
    "UnsupportedError",
]
