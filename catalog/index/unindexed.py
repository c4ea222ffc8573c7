"""What stands in the folders of a history and not in its index: the tail.

The order matters: first the index is read, then the folders are listed. What is committed in between is in the tail, and what is
in the set as read is not: nothing is lost and nothing counts twice.
"""

import json
import os
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pyarrow as pa

from catalog.disk.locks import run_is_held
from catalog.errors import FormatError, MismatchError
from catalog.format.journal import is_segment
from catalog.format.json_facts import read_run_facts, run_names
from catalog.format.statistics_file import StatisticsFile, parse_name, read_merged
from catalog.index.ingest import RowCache, Rows, checkpoint_rows, run_rows, segment_rows, statistics_rows
from catalog.index.schema import TABLES
from catalog.paths import HistoryPaths, parse_step_dir

__all__ = ["Ingested", "Tail", "scan"]


@dataclass(frozen=True, slots=True)
class Ingested:
    """What the index has: the steps, the steps with statistics, and the journal segments of each run."""

    steps: Mapping[str, frozenset[int]] = field(default_factory=dict)
    analyses: Mapping[str, frozenset[int]] = field(default_factory=dict)
    segments: Mapping[str, frozenset[str]] = field(default_factory=dict)
    runs: frozenset[str] = frozenset()


@dataclass(slots=True)
class Tail:
    """What the index does not have; when it is not `complete`, the first part of that, which can be registered as it is."""

    complete: bool = True
    unparsed: int = 0
    nbytes: int = 0
    rows: dict[str, list[pa.Table]] = field(default_factory=lambda: {name: [] for name in TABLES})
    checkpoints: int = 0
    loose: list[tuple[str, int, str]] = field(default_factory=list)
    previous: list[tuple[str, int, int]] = field(default_factory=list)
    damage: list[tuple[str, int | None, str]] = field(default_factory=list)
    hidden: list[tuple[str, int]] = field(default_factory=list)
    gone: list[tuple[str, int]] = field(default_factory=list)
    hidden_runs: list[str] = field(default_factory=list)

    def add(self, rows: Rows) -> None:
        for name, table in rows.items():
            self.rows[name].append(table)
            self.nbytes += table.nbytes

    def new(self) -> frozenset[str]:
        """The tables that there are rows of."""
        return frozenset(name for name, parts in self.rows.items() if any(part.num_rows for part in parts))

    def before(self) -> frozenset[int]:
        """The steps that new checkpoints are compared with."""
        return frozenset(previous for _, _, previous in self.previous)

    def tables(self, names: Collection[str]) -> dict[str, pa.Table]:
        """The rows of those tables, and what else the views need, by its name there."""
        tables = {f"tail_{name}": pa.concat_tables([TABLES[name].empty_table(), *self.rows[name]]) for name in names}
        run, step, text = pa.string(), pa.int64(), pa.string()
        tables["tail_loose"] = _columns(self.loose, [("run", run), ("step", step), ("state", text)])
        tables["tail_previous"] = _columns(self.previous, [("run", run), ("step", step), ("previous", step)])
        tables["tail_damage"] = _columns(self.damage, [("run", run), ("step", step), ("detail", text)])
        tables["tail_hidden"] = _columns(self.hidden, [("run", run), ("step", step)])
        tables["tail_gone"] = _columns(self.gone, [("run", run), ("step", step)])
        tables["tail_hidden_runs"] = _columns([(name,) for name in self.hidden_runs], [("run", run)])
        return tables


def scan(
    paths: HistoryPaths,
    ingested: Ingested,
    *,
    cache: RowCache,
    max_unparsed: int | None = None,
    max_bytes: int | None = None,
) -> Tail:
    """List the folders and parse what is not ingested, up to so many files that are not in memory, and so many bytes of rows."""
    tail = Tail()
    runs = run_names(paths)
    tail.hidden_runs = sorted(ingested.runs - set(runs))
    for run in runs:
        scanner = _RunScan(paths, run, ingested, cache, tail, max_unparsed, max_bytes)
        if not (scanner.facts() and scanner.steps() and scanner.statistics() and scanner.journal()):
            tail.complete = False
            break
    return tail


class _RunScan:
    """One run's share of a scan; each method returns False once that is as much as was asked for."""

    def __init__(
        self,
        paths: HistoryPaths,
        run: str,
        ingested: Ingested,
        cache: RowCache,
        tail: Tail,
        max_unparsed: int | None,
        max_bytes: int | None,
    ) -> None:
        self.paths = paths
        self.run = run
        self.known = run in ingested.runs
        self.ingested_steps = ingested.steps.get(run, frozenset())
        self.analyzed_steps = ingested.analyses.get(run, frozenset())
        self.ingested_segments = ingested.segments.get(run, frozenset())
        self.cache = cache
        self.tail = tail
        self.max_unparsed = max_unparsed
        self.max_bytes = max_bytes
        self.present: frozenset[int] = frozenset()
        self.last_merged: tuple[int, pa.Table] | None = None

    def facts(self) -> bool:
        path = self.paths.run_json(self.run)
        if self.known:
            return True
        return self._parse(path, None, lambda: run_rows(read_run_facts(self.paths, self.run))) is not None

    def steps(self) -> bool:
        names = _names(self.paths.steps_dir(self.run))
        listed = sorted(step for step in map(parse_step_dir, names) if step is not None)
        present = self.present = frozenset(listed)
        self.tail.hidden += [(self.run, step) for step in sorted(self.ingested_steps - present)]
        self.tail.gone += [(self.run, step) for step in sorted(self.analyzed_steps - present)]
        held: bool | None = None
        previous: int | None = None
        follows_new = False
        for step in listed:
            known = step in self.ingested_steps
            if known and not follows_new:
                previous = step
                continue
            marker = self.paths.marker(self.run, step)
            if not marker.exists():
                if held is None:
                    held = run_is_held(self.paths, self.run)
                self.tail.loose.append((self.run, step, "pending" if held else "incomplete"))
                continue
            added = self._parse(marker, step, partial(checkpoint_rows, self.paths, self.run, step), sure=known)
            if added is None:
                return False
            if added:
                # `changed` of an indexed checkpoint was worked out before the one now in front of it arrived.
                if known:
                    self.tail.hidden.append((self.run, step))
                if previous is not None:
                    self.tail.previous.append((self.run, step, previous))
                self.tail.checkpoints += 0 if known else 1
                previous = step
                follows_new = not known
        return True

    def statistics(self) -> bool:
        """Of steps all of whose parts have some."""
        folder = self.paths.statistics_dir(self.run)
        names = _names(folder)
        # Most names are of steps that are known, and to look at no more than their beginning is fast.
        if not any(name[:12].isdigit() and int(name[:12]) not in self.analyzed_steps for name in names):
            return True
        parts = [part for part in map(parse_name, names) if part is not None]
        counts = Counter((part.step, part.world_size) for part in parts)
        previous: tuple[int, int] | None = None
        follows_new = False
        for (step, world_size), count in sorted(counts.items()):
            # A checkpoint that is gone leaves its statistics.
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
            added = self._parse(first, None, parse, since=previous[0] if previous else None, sure=known)
            if added is None:
                return False
            if added:
                # What an indexed one says of its moves is since the one before the one that has now come between.
                if known:
                    self.tail.gone.append((self.run, step))
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
        except (FormatError, MismatchError):
            # It was whole when it was registered: what is damaged now is no reason to do without this one.
            return None

    def journal(self) -> bool:
        folder = self.paths.journal_dir(self.run)
        for name in sorted(set(_names(folder)) - self.ingested_segments):
            if is_segment(name):
                path = folder / name
                if self._parse(path, None, partial(segment_rows, path, run=self.run)) is None:
                    return False
        return True

    def _parse(
        self, path: Path, step: int | None, parse: Callable[[], Rows], *, since: int | None = None, sure: bool = False
    ) -> bool | None:
        """True when the rows are in the tail, False when the file is damaged, None when there are enough already, unless it
        is `sure` to be read: what the index has wrong because of a row of this tail."""
        unparsed = self.tail.unparsed + (not self.cache.has(path, since=since))
        if not sure and (_over(unparsed, self.max_unparsed) or _over(self.tail.nbytes, self.max_bytes)):
            return None
        self.tail.unparsed = unparsed
        try:
            self.tail.add(self.cache.get(path, parse, since=since))
        except (FormatError, MismatchError) as error:
            detail = json.dumps({"file": self.paths.relative(path), "problem": str(error)}, sort_keys=True)
            self.tail.damage.append((self.run, step, detail))
            if step is not None:
                self.tail.loose.append((self.run, step, "failed"))
            return False
        return True


def _over(value: int, most: int | None) -> bool:
    return most is not None and value > most


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []


def _columns(rows: Sequence[tuple[object, ...]], schema: list[tuple[str, pa.DataType]]) -> pa.Table:
    columns = list(zip(*rows, strict=True)) or [() for _ in schema]
    return pa.table({name: pa.array(column, kind) for (name, kind), column in zip(schema, columns, strict=True)})
