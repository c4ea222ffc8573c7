"""All errors of the project, as one tree. A message names what failed, the object, both values, and what to do.

HistoryError
  ├─ FormatError       (ValueError)         a file is not what the format says: truncated, hostile, of a newer version
  │    └─ CorruptError                      the bytes differ from their checksum
  ├─ NotFoundError     (LookupError)        no such history, run, step, tensor or name
  ├─ UnsupportedError  (TypeError)          state that can't be captured; `enable` refuses it by name
  ├─ MismatchError     (ValueError)         two things that must fit do not: names, shapes, ranks, layouts
  ├─ SnapshotError     (RuntimeError)       a snapshot failed; the training and earlier checkpoints are untouched
  ├─ RestoreError      (RuntimeError)       a restore stopped after it had begun to overwrite
  └─ SetupError        (RuntimeError)       the machine or the call can't work as asked: backend, budget, folder,
                                            packages
"""

from catalog.cell_traceback import cell_traceback

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


class HistoryError(Exception):
    """The base of every error that DSHistory raises on purpose."""

    def _render_traceback_(self) -> list[str]:
        """Return what IPython shows in place of a whole traceback, most of which would be ours."""
        return cell_traceback(self)


class FormatError(HistoryError, ValueError):
    """A file of the history is not what the format says it must be."""


class CorruptError(FormatError):
    """The bytes of a file differ from the checksum recorded for them."""


class NotFoundError(HistoryError, LookupError):
    """There is no such history, run, step or tensor; the message names the nearest that exist."""


class UnsupportedError(HistoryError, TypeError):
    """Some state can't be captured as data."""


class MismatchError(HistoryError, ValueError):
    """Two things that must fit together do not."""


class SnapshotError(HistoryError, RuntimeError):
    """A snapshot failed; the training and all earlier checkpoints are untouched."""


class RestoreError(HistoryError, RuntimeError):
    """A restore failed after it had begun to overwrite live state."""


class SetupError(HistoryError, RuntimeError):
    """The machine or the call can't work as asked."""
