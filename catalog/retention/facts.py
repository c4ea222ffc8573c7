"""Gathers what is known of each checkpoint of a history when it is decided what stays, from its files and its catalog.

What one checkpoint needs of others is read from manifests, never from the index, since what is removed does not come
back. Published files never change, so a `FactsReader` that is kept reads each manifest once.
"""

import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from catalog.access.pins import is_pinned
from catalog.data_files.needed_files import NeededFile, bases_of, missing_file
from catalog.disk.durable import final_name
from catalog.errors import HistoryError, NotFoundError
from catalog.history import History
from catalog.paths import is_packed_name, parse_data_file
from catalog.read.checkpoint import needed_by, read_checkpoint
from catalog.records import CheckpointRef

__all__ = ["BLOCK_BYTES", "CheckpointFacts", "FactsReader", "bytes_on_disk", "is_image"]

BLOCK_BYTES = 512
"""The unit of `st_blocks`."""


@dataclass(frozen=True, slots=True)
class CheckpointFacts:
    """One committed checkpoint.

    created_s: the time at which its last part was published, in seconds since 1970
    nbytes: what its own files take on the disk, as the file system counts them, its statistics included
    statistics_bytes: what its statistics take, 0 while it has none
    needs: the other checkpoints whose files have bytes of it, or bytes that its own were packed against
    healthy: whether all values in it are finite, or None where that is not known
    damage: what is wrong with its files, "" when nothing is
    child: "run ... goes on from it", when one does
    is_read: whether somebody has it open
    """

    ref: CheckpointRef
    created_s: float = 0.0
    nbytes: int = 0
    statistics_bytes: int = 0
    needs: frozenset[CheckpointRef] = frozenset()
    tags: tuple[str, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    healthy: bool | None = None
    damage: str = ""
    child: str = ""
    is_read: bool = False


@dataclass(frozen=True, slots=True)
class _Published:
    """Holds what the published files of a checkpoint say, which never changes."""

    created_s: float
    needed: tuple[NeededFile, ...]
    needs: frozenset[CheckpointRef]
    problem: str = ""


class FactsReader:
    """Gathers the facts of a history's checkpoints, as often as it is asked. For one thread."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._published: dict[CheckpointRef, _Published] = {}

    def line(
        self, run: str, *, within: frozenset[str] = frozenset(), packing: int | None = None
    ) -> list[CheckpointFacts]:
        """Return the facts of a run's committed checkpoints, ascending by step; of those that are removed meanwhile,
        nothing. A child run that is `within` the same training does not hold what it goes on from.

        packing: the step whose images are being made beside its data files, and are no part of what it takes
        """
        history = self._history
        refs = [CheckpointRef(run, step) for step in history.steps(run)]
        known = _Known(history, run, within)
        statistics = _statistics_bytes(history, run)
        self._published = {ref: what for ref, what in self._published.items() if ref.run != run or ref in set(refs)}
        found = []
        for ref in refs:
            try:
                published = self._published_of(ref, refs)
                found.append(
                    CheckpointFacts(
                        ref,
                        created_s=published.created_s,
                        nbytes=self._own_bytes(ref, packing) + statistics[ref.step],
                        statistics_bytes=statistics[ref.step],
                        needs=published.needs | self._packed_against(published, ref, refs),
                        tags=tuple(known.tags[ref.step]),
                        metrics=known.metrics[ref.step],
                        healthy=known.healthy(ref.step),
                        damage=published.problem or missing_file(history.paths, published.needed),
                        child=known.child(ref.step),
                        is_read=is_pinned(history.paths, ref),
                    )
                )
            except (NotFoundError, FileNotFoundError):
                continue
        return found

    def _own_bytes(self, ref: CheckpointRef, packing: int | None) -> int:
        folder = self._history.paths.step_dir(ref.run, ref.step)
        return bytes_on_disk(folder, but=is_image if ref.step == packing else None)

    def _packed_against(
        self, published: _Published, ref: CheckpointRef, refs: Sequence[CheckpointRef]
    ) -> frozenset[CheckpointRef]:
        """Return the other checkpoints that have bases of packed files that this one needs; all earlier ones while an
        image can't be read."""
        try:
            bases = [base for file, _ in published.needed for base in bases_of(self._history.paths, file)]
        except (HistoryError, OSError):
            return _earlier(ref, refs)
        places = (parse_data_file(base) for base in bases)
        return frozenset(CheckpointRef(place[0], place[1]) for place in places if place is not None) - {ref}

    def _published_of(self, ref: CheckpointRef, refs: Sequence[CheckpointRef]) -> _Published:
        if ref not in self._published:
            try:
                checkpoint = read_checkpoint(self._history.paths, ref.run, ref.step)
            except NotFoundError:
                raise
            except HistoryError as error:
                # Nobody knows what it needs, so it holds everything that it may need. It is asked again the next time.
                return _Published(0.0, (), _earlier(ref, refs), f"can't be read: {error}")
            needed = needed_by(checkpoint)
            places = (parse_data_file(one.file) for one in needed)
            needs = {CheckpointRef(place[0], place[1]) for place in places if place is not None}
            created = max(manifest.created for manifest in checkpoint.manifests)
            self._published[ref] = _Published(created.timestamp(), needed, frozenset(needs - {ref}))
        return self._published[ref]


def _earlier(ref: CheckpointRef, refs: Sequence[CheckpointRef]) -> frozenset[CheckpointRef]:
    return frozenset(other for other in refs if other.step < ref.step)


class _Known:
    """Holds what the catalog knows of a run's checkpoints beside their files."""

    def __init__(self, history: History, run: str, within: frozenset[str]) -> None:
        self._children = {
            facts.parent_step: facts.run
            for facts in history.runs()
            if facts.parent_run == run and facts.parent_step is not None and facts.run not in within
        }
        self.tags: defaultdict[int, list[str]] = defaultdict(list)
        self.metrics: defaultdict[int, dict[str, float]] = defaultdict(dict)
        self._not_finite: dict[int, int] = {}
        with history.asking() as ask:
            for row in _rows(ask("SELECT step, name FROM tags WHERE run = ? ORDER BY name", [run])):
                self.tags[row["step"]].append(row["name"])
            for row in _rows(ask(_METRICS, {"run": run})):
                self.metrics[row["step"]][row["name"]] = row["value"]
            for row in _rows(ask(_NOT_FINITE, [run])):
                self._not_finite[row["step"]] = row["bad"]

    def child(self, step: int) -> str:
        """Return that a run goes on from a step, when one does."""
        return f"run {self._children[step]} goes on from it" if step in self._children else ""

    def healthy(self, step: int) -> bool | None:
        """Return False when a value of the weights or the optimizer, or the loss, is known not to be finite; True when
        the statistics say that all are."""
        loss = self.metrics[step].get("loss")
        if self._not_finite.get(step, 0) or (loss is not None and not math.isfinite(loss)):
            return False
        return True if step in self._not_finite else None


_METRICS = """
SELECT step, name, value FROM metrics WHERE run = $run AND step IN (SELECT step FROM checkpoints WHERE run = $run)
"""
_NOT_FINITE = """
SELECT step, (sum(nan) + coalesce(sum(inf) FILTER (kind <> 'buffer'), 0))::BIGINT AS bad
FROM statistics WHERE run = ? GROUP BY step
"""
"""Infinities in buffers do not count, because masks contain them."""


def _rows(table: Any) -> Iterator[dict[str, Any]]:
    yield from table.to_pylist()


def bytes_on_disk(folder: os.PathLike[str], *, but: Callable[[str], bool] | None = None) -> int:
    """Return the bytes that all files below a folder take, as the file system counts them; 0 when it is gone. Links are
    not followed.

    but: whether a file, or a folder, of this name directly in `folder` does not count; by default all do
    """
    total = 0
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            if but is not None and but(entry.name):
                continue
            # A file that is removed between the listing and the look at it takes nothing any more.
            with suppress(FileNotFoundError):
                if entry.is_dir(follow_symlinks=False):
                    total += bytes_on_disk(entry)
                else:
                    total += entry.stat(follow_symlinks=False).st_blocks * BLOCK_BYTES
    return total


def is_image(name: str) -> bool:
    """Return whether a file in the folder of a step is the image of a data file, or becomes one."""
    return is_packed_name(final_name(name) or name)


def _statistics_bytes(history: History, run: str) -> Mapping[int, int]:
    found: defaultdict[int, int] = defaultdict(int)
    folder = history.paths.statistics_dir(run)
    if folder.is_dir():
        with os.scandir(folder) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    if entry.name[:12].isdigit() and entry.is_file(follow_symlinks=False):
                        found[int(entry.name[:12])] += entry.stat(follow_symlinks=False).st_blocks * BLOCK_BYTES
    return found
