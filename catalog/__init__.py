"""What a history is and where its bytes lie: manifests, commit markers, journals, the index and queries. Knows no
torch.
"""

try:
    from native._siblings import check_siblings
except ImportError as error:
    import native

    raise ImportError(
        f"DSHistory needs its own package 'native', but `import native` finds {native.__file__}: "
        "rename that file, or put it after DSHistory on sys.path"
    ) from error

check_siblings(__file__, ("native",))

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
