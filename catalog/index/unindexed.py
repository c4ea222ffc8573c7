"""The contents of a history's folders that its index does not have yet.

A query sees the index and the unindexed rest together, so it needs no lock on the folders and misses nothing. Two rules
make that right:

1. First the set of ingested steps, segments and statistics is read from the index, and then the folders are listed.
   A checkpoint that is committed in between is not in the set, and it is in the listing: it counts as unindexed. In the
   other order it could be missing from both. Nothing counts twice, because the caller holds one transaction: the rows
   it sees in the index are exactly those of the set.
2. Some rows depend on the checkpoint before theirs (`changed` of a tensor, the update of a statistic). When a
   checkpoint arrives between two that are indexed, the rows of the second are stale. They are read again from the files
   as unindexed, and those in the index are hidden from the query, and replaced at the next registration.

Files are parsed through the `RowCache`, so a checkpoint that stays unindexed is parsed once in each process.
"""

import json
import os
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pyarrow as pa

from catalog.disk.regular_file import is_real_folder
from catalog.errors import FormatError, MismatchError, NotFoundError
from catalog.format.audit_file import audited_step
from catalog.format.segments import Segment, current_segments, listings, parse_segment
from catalog.format.statistics_file import StatisticsFile, parse_name, read_merged
from catalog.index.ingest import (
    RowCache,
    Rows,
    audit_rows,
    checkpoint_rows,
    run_rows,
    segment_names,
    segment_rows,
    statistics_rows,
)
from catalog.index.schema import TABLES
from catalog.paths import HistoryPaths
from catalog.read.runs import run_facts, run_is_held, run_names, step_dirs

__all__ = ["Ingested", "Unindexed", "find_unindexed"]


@dataclass(frozen=True, slots=True)
class Ingested:
    """The contents of the index: the steps, the steps with statistics, the journal segments and the files of audits of
    each run."""

    steps: Mapping[str, frozenset[int]] = field(default_factory=dict)
    analyses: Mapping[str, frozenset[int]] = field(default_factory=dict)
    segments: Mapping[str, frozenset[str]] = field(default_factory=dict)
    audits: Mapping[str, frozenset[str]] = field(default_factory=dict)
    runs: frozenset[str] = frozenset()


@dataclass(slots=True)
class Unindexed:
    """The rows that the index does not have, and the rows in it that are no longer right.

    When it is not `complete`, it is the first part of the rest: whole checkpoints, segments and statistics, which can
    be registered as they are.
    """

    complete: bool = True
    unparsed: int = 0
    """The number of files that were not in the cache."""
    nbytes: int = 0
    rows: dict[str, list[pa.Table]] = field(default_factory=lambda: {name: [] for name in TABLES})
    checkpoints: int = 0
    """The number of checkpoints that the index does not have at all."""
    uncommitted: list[tuple[str, int, str]] = field(default_factory=list)
    """(run, step, state) of each step without a readable checkpoint."""
    previous: list[tuple[str, int, int]] = field(default_factory=list)
    """(run, step, step before it) of each checkpoint in `rows` that has one before it."""
    damaged: list[tuple[str, int | None, str]] = field(default_factory=list)
    """(run, step, JSON of file and problem) of each file that can't be trusted."""
    stale_steps: list[tuple[str, int]] = field(default_factory=list)
    """Indexed checkpoints that are gone, or that `rows` has again."""
    stale_statistics: list[tuple[str, int]] = field(default_factory=list)
    """Indexed statistics whose checkpoint is gone, or that `rows` has again."""
    stale_segments: list[tuple[str, str]] = field(default_factory=list)
    """(run, name) of each indexed segment of a journal that a merged one has replaced. Its rows stay right."""
    stale_runs: list[str] = field(default_factory=list)
    """Indexed runs without a run.json."""
    removed_runs: list[str] = field(default_factory=list)
    """The stale runs whose folder is gone too. The index goes on knowing the others: nobody has removed them on
    purpose."""

    def add(self, rows: Rows) -> None:
        for name, table in rows.items():
            self.rows[name].append(table)
            self.nbytes += table.nbytes

    def new(self) -> frozenset[str]:
        """Return the tables that have unindexed rows."""
        return frozenset(name for name, parts in self.rows.items() if any(part.num_rows for part in parts))

    def before(self) -> frozenset[int]:
        """Return the steps that the unindexed checkpoints are compared with."""
        return frozenset(previous for _, _, previous in self.previous)

    def tables(self, names: Collection[str]) -> dict[str, pa.Table]:
        """Return what the views read beside the index, by table name: the rows of the tables `names`, and all lists."""
        tables = {
            f"unindexed_{name}": pa.concat_tables([TABLES[name].empty_table(), *self.rows[name]]) for name in names
        }
        run, step, text = pa.string(), pa.int64(), pa.string()
        tables["uncommitted_steps"] = _columns(self.uncommitted, [("run", run), ("step", step), ("state", text)])
        tables["previous_steps"] = _columns(self.previous, [("run", run), ("step", step), ("previous", step)])
        tables["damaged_files"] = _columns(self.damaged, [("run", run), ("step", step), ("detail", text)])
        tables["stale_steps"] = _columns(self.stale_steps, [("run", run), ("step", step)])
        tables["stale_statistics"] = _columns(self.stale_statistics, [("run", run), ("step", step)])
        tables["stale_segments"] = _columns(self.stale_segments, [("run", run), ("segment", text)])
        tables["stale_runs"] = _columns([(name,) for name in self.stale_runs], [("run", run)])
        tables["removed_runs"] = _columns([(name,) for name in self.removed_runs], [("run", run)])
        return tables


def find_unindexed(
    paths: HistoryPaths,
    ingested: Ingested,
    *,
    cache: RowCache,
    max_unparsed: int | None = None,
    max_bytes: int | None = None,
) -> Unindexed:
    """List the folders and parse the files that are not ingested.

    `ingested` must have been read from the index before this call (rule 1 above). At most `max_unparsed` files that are
    not in the cache are parsed, and the search stops at about `max_bytes` of rows; the result is then not `complete`.
    Damaged files raise nothing: they are listed as `damaged`.
    """
    found = Unindexed()
    runs = run_names(paths)
    found.stale_runs = sorted(ingested.runs - set(runs))
    for run in found.stale_runs:
        if is_real_folder(paths.run_dir(run)):
            problem = "registered, but it is gone: put it back from a copy"
            detail = json.dumps({"file": paths.relative(paths.run_json(run)), "problem": problem}, sort_keys=True)
            found.damaged.append((run, None, detail))
        else:
            found.removed_runs.append(run)
    for run in runs:
        search = _RunSearch(paths, run, ingested, cache, found, max_unparsed, max_bytes)
        if not (search.facts() and search.steps() and search.statistics() and search.audits() and search.journal()):
            found.complete = False
            break
    return found


class _RunSearch:
    """The search in one run's folders. Each method returns False as soon as a limit is reached."""

    def __init__(
        self,
        paths: HistoryPaths,
        run: str,
        ingested: Ingested,
        cache: RowCache,
        found: Unindexed,
        max_unparsed: int | None,
        max_bytes: int | None,
    ) -> None:
        self.paths = paths
        self.run = run
        self.known = run in ingested.runs
        self.ingested_steps = ingested.steps.get(run, frozenset())
        self.analyzed_steps = ingested.analyses.get(run, frozenset())
        self.ingested_segments = ingested.segments.get(run, frozenset())
        self.ingested_audits = ingested.audits.get(run, frozenset())
        self.cache = cache
        self.found = found
        self.max_unparsed = max_unparsed
        self.max_bytes = max_bytes
        self.present: frozenset[int] = frozenset()
        self.last_merged: tuple[int, pa.Table] | None = None

    def facts(self) -> bool:
        """Add the run itself."""
        if self.known:
            return True
        path = self.paths.run_json(self.run)
        return self._parse(path, None, lambda: run_rows(run_facts(self.paths, self.run))) is not None

    def steps(self) -> bool:
        """Add the checkpoints, and note the steps without one."""
        listed = step_dirs(self.paths, self.run)
        present = self.present = frozenset(listed)
        self.found.stale_steps += [(self.run, step) for step in sorted(self.ingested_steps - present)]
        self.found.stale_statistics += [(self.run, step) for step in sorted(self.analyzed_steps - present)]
        held: bool | None = None
        previous: int | None = None
        follows_new = False
        for step in listed:
            known = step in self.ingested_steps
            if known and not follows_new:
                previous = step
                continue
            marker = self.paths.marker(self.run, step)
            if not os.path.lexists(marker):
                if not is_real_folder(marker.parent):
                    # Removed since the listing.
                    continue
                if held is None:
                    held = self._held()
                self.found.uncommitted.append((self.run, step, "pending" if held else "incomplete"))
                continue
            parse = partial(checkpoint_rows, self.paths, self.run, step)
            added = self._parse(marker, step, parse, ignore_limits=known)
            if added is None:
                return False
            if added:
                # Rule 2: `changed` of an indexed checkpoint was computed before the one now in front of it arrived.
                if known:
                    self.found.stale_steps.append((self.run, step))
                if previous is not None:
                    self.found.previous.append((self.run, step, previous))
                self.found.checkpoints += 0 if known else 1
                previous = step
                follows_new = not known
        return True

    def _held(self) -> bool:
        try:
            return run_is_held(self.paths, self.run)
        except FormatError as error:
            self._damaged(self.paths.locks_dir(self.run), None, str(error))
            return False

    def statistics(self) -> bool:
        """Add the statistics of the steps whose every rank has a statistics file."""
        folder = self.paths.statistics_dir(self.run)
        names = _names(folder)
        # Most names belong to known steps. Comparing only the step that they begin with is faster than parsing them.
        if not any(name[:12].isdigit() and int(name[:12]) not in self.analyzed_steps for name in names):
            return True
        parts = [part for part in map(parse_name, names) if part is not None]
        counts = Counter((part.step, part.world_size) for part in parts)
        previous: tuple[int, int] | None = None
        follows_new = False
        for (step, world_size), count in sorted(counts.items()):
            # When a checkpoint's folder is deleted by hand, its statistics files remain.
            if count < world_size or step not in self.present:
                continue
            known = step in self.analyzed_steps
            if known and not follows_new:
                previous = step, world_size
                continue
            if not self.paths.marker(self.run, step).exists():
                continue
            first = folder / StatisticsFile(step, 0, world_size).name
            parse = partial(self._statistics_rows, step, world_size, previous)
            try:
                added = self._parse(first, None, parse, variant=previous[0] if previous else None, ignore_limits=known)
            except FileNotFoundError:
                # Removed since the listing, with its checkpoint.
                continue
            if added is None:
                return False
            if added:
                # Rule 2: the update in the index was computed from an earlier checkpoint than the one now before it.
                if known:
                    self.found.stale_statistics.append((self.run, step))
                previous = step, world_size
                follows_new = not known
        return True

    def _statistics_rows(self, step: int, world_size: int, previous: tuple[int, int] | None) -> Rows:
        merged = read_merged(self.paths, self.run, step, world_size)
        before = None if previous is None else self._merged_before(*previous)
        self.last_merged = step, merged
        return statistics_rows(self.run, step, merged, before=before)

    def _merged_before(self, step: int, world_size: int) -> tuple[int, pa.Table] | None:
        if self.last_merged and self.last_merged[0] == step:
            return self.last_merged
        try:
            return step, read_merged(self.paths, self.run, step, world_size)
        except (FormatError, MismatchError, FileNotFoundError):
            # The file was readable when it was registered. Damage since then must not hide the step that follows.
            return None

    def audits(self) -> bool:
        """Add the audits. They go on saying what an update did when its checkpoints are gone."""
        folder = self.paths.audits_dir(self.run)
        for name in sorted(set(_names(folder)) - self.ingested_audits):
            step, path = audited_step(name), folder / name
            if step is None:
                continue
            if self._parse(path, None, partial(audit_rows, path, run=self.run, step=step)) is None:
                return False
        return True

    def journal(self) -> bool:
        """Add the rows of the journal's segments.

        A writer merges its segments at any time. Rows that the index has, or that were added here, are left out of a
        merged segment; and when a segment that was listed is gone, another one has replaced it, so the folder is listed
        again.
        """
        folder = self.paths.journal_dir(self.run)
        if not set(_names(folder)) - self.ingested_segments:
            return True
        known = _Numbers(self.ingested_segments)
        for names in listings(folder):
            new = (segment for segment in current_segments(names) if segment.name not in known.names)
            with suppress(FileNotFoundError):
                return all(self._segment(folder, segment, known) for segment in new)
        self._damaged(folder, None, "names files that are not there, each time that it is listed")
        return True

    def _segment(self, folder: Path, segment: Segment, known: "_Numbers") -> bool:
        """Add the rows of those numbers of a segment that are not known yet; return False when a limit is reached."""
        missing = known.missing(segment)
        if missing:
            path = folder / segment.name
            parse = partial(segment_rows, path, run=self.run, spans=missing)
            added = self._parse(path, None, parse, variant=missing)
            if not added:
                return added is not None
        self.found.add(segment_names(self.run, segment.name))
        known.add(segment.name)
        replaced = (name for name in self.ingested_segments if (old := parse_segment(name)) and segment.replaces(old))
        self.found.stale_segments += [(self.run, name) for name in replaced]
        return True

    def _parse(
        self,
        path: Path,
        step: int | None,
        parse: Callable[[], Rows],
        *,
        variant: Hashable = None,
        ignore_limits: bool = False,
    ) -> bool | None:
        """Add the rows of one file. Return True when they are added, False when the file is damaged, and None when a
        limit is reached.

        `variant` is what the rows depend on besides the file. `ignore_limits` is for a file whose indexed rows
        have become stale because of a row already found: both must be registered in the same transaction.
        """
        try:
            unparsed = self.found.unparsed + (not self.cache.has(path, variant=variant))
            is_full = _exceeds(unparsed, self.max_unparsed) or _exceeds(self.found.nbytes, self.max_bytes)
            if is_full and not ignore_limits:
                return None
            self.found.unparsed = unparsed
            self.found.add(self.cache.get(path, parse, variant=variant))
        except (FormatError, MismatchError, NotFoundError, FileNotFoundError) as error:
            if step is not None and not is_real_folder(path.parent):
                # Removed since the listing.
                return False
            if isinstance(error, (NotFoundError, FileNotFoundError)):
                raise
            self._damaged(path, step, str(error))
            if step is not None:
                self.found.uncommitted.append((self.run, step, "failed"))
            return False
        return True

    def _damaged(self, path: Path, step: int | None, problem: str) -> None:
        detail = json.dumps({"file": self.paths.relative(path), "problem": problem}, sort_keys=True)
        self.found.damaged.append((self.run, step, detail))


class _Numbers:
    """The numbers of journal segments whose rows are known."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names: set[str] = set()
        self._spans: dict[str, list[tuple[int, int]]] = {}
        for name in names:
            self.add(name)

    def add(self, name: str) -> None:
        self.names.add(name)
        segment = parse_segment(name)
        if segment is not None:
            self._spans.setdefault(segment.writer, []).append((segment.first, segment.last))

    def missing(self, segment: Segment) -> tuple[tuple[int, int], ...]:
        """Return the spans of a segment's numbers, first and last, that are not known, ascending."""
        missing = []
        at = segment.first
        for first, last in sorted(self._spans.get(segment.writer, ())):
            if first > segment.last:
                break
            if at < first:
                missing.append((at, first - 1))
            at = max(at, last + 1)
        if at <= segment.last:
            missing.append((at, segment.last))
        return tuple(missing)


def _exceeds(value: int, limit: int | None) -> bool:
    return limit is not None and value > limit


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []


def _columns(rows: Sequence[tuple[object, ...]], schema: list[tuple[str, pa.DataType]]) -> pa.Table:
    columns = list(zip(*rows, strict=True)) or [() for _ in schema]
    return pa.table({name: pa.array(column, kind) for (name, kind), column in zip(schema, columns, strict=True)})
