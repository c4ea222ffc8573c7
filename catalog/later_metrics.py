"""Metrics of checkpoints that are computed after their step, by processes that are no rank of the run.

They are rows of the run's journal as the training's own are, with the rank of writers that are none, in segments of
writers `evaluation-<8 hexadecimal digits>`: each process has a writer of its own, so any number may write at once, also
beside the training. Of several values of one metric and step the latest counts.
"""

import datetime
import secrets
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, Final, Self

from catalog.errors import HistoryError
from catalog.format.journal import NO_RANK, Journal, read_segment
from catalog.format.segments import current_segments, listings
from catalog.paths import HistoryPaths
from catalog.records import CheckpointRef

__all__ = ["LaterMetrics", "later_metrics"]

_WRITER: Final = "evaluation-"
_FLUSH_S: Final = 1.0


class LaterMetrics:
    """A writer of metrics of any runs of a history, as a context manager.

    Values are durable a second after they were recorded, or when the block ends; those of one step always together.
    OSError when they can't be written.
    """

    def __init__(self, paths: HistoryPaths) -> None:
        self._paths = paths
        self._writer = f"{_WRITER}{secrets.token_hex(4)}"
        self._journals: dict[str, Journal] = {}
        self._flushed = time.monotonic()

    def record(self, ref: CheckpointRef, values: Mapping[str, float]) -> None:
        """Record metrics of one checkpoint by name; NaN and infinities are kept as they are."""
        if ref.run not in self._journals:
            folder = self._paths.journal_dir(ref.run)
            self._journals[ref.run] = Journal(folder, run=ref.run, writer=self._writer, rank=NO_RANK)
        for name, value in values.items():
            self._journals[ref.run].metric(ref.step, name, value)
        if time.monotonic() - self._flushed > _FLUSH_S:
            for journal in self._journals.values():
                journal.flush()
            self._flushed = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for journal in self._journals.values():
            journal.close()


def later_metrics(paths: HistoryPaths, runs: Collection[str]) -> dict[CheckpointRef, dict[str, float]]:
    """Return the metrics of these runs that were computed later, by checkpoint and name. Those in a segment that can't
    be read are left out: `verify` names it."""
    latest: dict[tuple[CheckpointRef, str], tuple[datetime.datetime, float]] = {}
    for run in runs:
        for row in _rows(paths, run):
            key = (CheckpointRef(run, row["step"]), row["name"])
            if key not in latest or latest[key][0] < row["time"]:
                latest[key] = (row["time"], row["value"])
    found: dict[CheckpointRef, dict[str, float]] = {}
    for (ref, name), (_, value) in latest.items():
        found.setdefault(ref, {})[name] = value
    return found


def _rows(paths: HistoryPaths, run: str) -> list[dict[str, Any]]:
    for names in listings(paths.journal_dir(run)):
        later = current_segments(name for name in names if name.startswith(_WRITER))
        with suppress(FileNotFoundError):
            return [row for segment in later for row in _of_segment(paths, run, segment.name)]
    return []


def _of_segment(paths: HistoryPaths, run: str, name: str) -> Iterator[dict[str, Any]]:
    try:
        table = read_segment(paths.journal_dir(run) / name, run=run)
    except HistoryError:
        return
    yield from (row for row in table.to_pylist() if row["kind"] == "metric" and row["step"] is not None)
