"""References: from the words of a user to the one checkpoint that they name.

A reference is a step (an int), "latest", -1, "best" or a tag, all in the lineage of the current run; or "run:step",
"run:latest", "run:-1" or "run:best", in that run alone, of which the beginning of its name is enough.
"""

import operator
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

import pyarrow as pa

from catalog.disk.regular_file import check_folders, is_real_folder
from catalog.errors import HistoryError, NotFoundError, SetupError
from catalog.nearest_names import nearest
from catalog.paths import HistoryPaths
from catalog.read.run_order import current_run, fork_of
from catalog.read.runs import is_committed, run_facts, run_named, run_names, step_dirs, steps
from catalog.records import CheckpointRef

__all__ = ["committed_lineage", "generations", "lineage", "resolve"]

_NONE: Mapping[str, object] = {}


def generations(paths: HistoryPaths, run: str) -> list[tuple[str, int | None]]:
    """Return a run and its ancestors, the run first, each with the last step that belongs to the lineage: the earliest
    fork on the way to it, None for the run itself. NotFoundError when there is no such run; an ancestor that is not in
    the history any more ends the list."""
    return [(one.run, one.last if one.last < sys.maxsize else None) for one in _generations(paths, run)]


@dataclass(frozen=True, slots=True)
class _Generation:
    """A run of a lineage, the last of its steps that may belong to it, and the last that an ancestor can have (-1:
    none)."""

    run: str
    last: int = sys.maxsize
    before: int = -1


def _generations(paths: HistoryPaths, run: str) -> Iterator[_Generation]:
    """Yield what `generations` returns, and read the facts of no more runs than the caller takes."""
    seen: set[str] = set()
    last = sys.maxsize
    name: str | None = run
    # A damaged history may name a run as its own ancestor.
    while name is not None and name not in seen:
        seen.add(name)
        try:
            # Read before the run is yielded, so that an error comes before any step of it is used.
            fork = fork_of(paths, name)
        except NotFoundError:
            if name == run:
                raise
            return
        before = -1 if fork is None else min(last, fork.step)
        yield _Generation(name, last, before)
        name, last = (None if fork is None else fork.run), before


def lineage(paths: HistoryPaths, run: str) -> list[CheckpointRef]:
    """Return the committed checkpoints that a run can go back to, ascending by step: its own, those of its parent up to
    the fork, and so on. NotFoundError when there is no such run."""
    return [*_newest_first(paths, _generations(paths, run))][::-1]


def _newest_first(paths: HistoryPaths, within: Iterable[_Generation]) -> Iterator[CheckpointRef]:
    """Yield the committed checkpoints of these generations, descending by step. A generation is listed when the steps
    that it may have are reached, and a marker looked at when its step is."""
    owners: dict[int, list[str]] = {}

    def committed_after(last: int) -> Iterator[CheckpointRef]:
        for step in sorted((step for step in owners if step > last), reverse=True):
            # Of several runs with the same step, the descendant's counts.
            owner = next((name for name in owners.pop(step) if is_committed(paths, name, step)), None)
            if owner is not None:
                yield CheckpointRef(owner, step)

    for one in within:
        for step in step_dirs(paths, one.run):
            if step <= one.last:
                owners.setdefault(step, []).append(one.run)
        yield from committed_after(one.before)
    # An ancestor that is not in the history any more leaves its steps to its descendants.
    yield from committed_after(-1)


def committed_lineage(paths: HistoryPaths, run: str | None = None) -> list[CheckpointRef]:
    """Return the `lineage` of a run, by default the current one. NotFoundError when it has no checkpoint yet."""
    run = run or current_run(paths)
    refs = lineage(paths, run)
    if not refs:
        raise _no_checkpoint(paths, run)
    return refs


def _no_checkpoint(paths: HistoryPaths, run: str) -> NotFoundError:
    return NotFoundError(f"run {run} of {paths.root} has no committed checkpoint yet")


def resolve(paths: HistoryPaths, ref: int | str | CheckpointRef, run: str | None = None) -> CheckpointRef:
    """Return the committed checkpoint that `ref` names; steps, "latest", -1 and "best" mean those of the lineage of
    `run`, by default of the current one. NotFoundError names the nearest that exist; SetupError says that `ref` is not
    a reference."""
    if isinstance(ref, CheckpointRef):
        return _in_run(paths, ref.run, ref.step)
    if not isinstance(ref, str):
        ref = _number(ref)
    if isinstance(ref, str) and ":" in ref:
        run, _, which = ref.rpartition(":")
        return _in_run_by_name(paths, run_named(paths, run), which)
    if isinstance(ref, str) and ref.lstrip("-").isdigit():
        ref = int(ref)
    if ref == "latest":
        ref = -1
    if isinstance(ref, int):
        return _in_lineage(paths, ref, run)
    if ref == "best":
        return _best(paths, committed_lineage(paths, run))
    return _tagged(paths, ref)


def _number(ref: object) -> int:
    if not isinstance(ref, bool):
        try:
            return operator.index(ref)  # type: ignore[arg-type]
        except TypeError:
            pass
    raise SetupError(
        f"a checkpoint is named by a step (int), 'run:step', a tag, 'latest', 'best' or -1, not by {ref!r} of type "
        f"{type(ref).__qualname__}"
    )


def _in_lineage(paths: HistoryPaths, step: int, run: str | None) -> CheckpointRef:
    tip = run or current_run(paths)
    if step < 0:
        whose = "the current run" if run is None else f"run {run}"
        found = _from_end(paths, _generations(paths, tip), step, whose=whose)
        if found is None:
            raise _no_checkpoint(paths, tip)
        return found
    runs: list[str] = []
    for one in _generations(paths, tip):
        if step <= one.last:
            if _has(paths, one.run, step):
                return CheckpointRef(one.run, step)
            runs.append(one.run)
    refs = committed_lineage(paths, tip)
    whose = "" if run is None else f"in run {run} or its parents "
    missing = _what_became_of(paths, runs, step) or f"step {step} was not captured {whose}in {paths.root}"
    raise NotFoundError(f"{missing}: {_nearest(refs, step)}")


def _from_end(paths: HistoryPaths, within: Iterable[_Generation], step: int, *, whose: str) -> CheckpointRef | None:
    """Return the checkpoint that a negative `step` counts from the end of these generations; None when they have none
    at all. NotFoundError when they have fewer."""
    newest = [*islice(_newest_first(paths, within), min(-step, sys.maxsize))]
    if newest and len(newest) < -step:
        raise NotFoundError(f"checkpoint {step} from the end: {whose} of {paths.root} has only {len(newest)}")
    return newest[-1] if newest else None


def _has(paths: HistoryPaths, run: str, step: int) -> bool:
    """Return whether a step of a run is committed, in real folders."""
    folders = paths.steps_dir(run), paths.step_dir(run, step)
    return is_committed(paths, run, step) and all(map(is_real_folder, folders))


def _in_run_by_name(paths: HistoryPaths, run: str, which: str) -> CheckpointRef:
    """Return a run's own checkpoint by its step, by a negative count from the end, or as "latest" or "best"."""
    if which not in ("latest", "best"):
        return _in_run(paths, run, _whole(which, f"{run}:{which}"))
    others = _newest_first(paths, [_Generation(run)])
    newest = next(others, None)
    if newest is None:
        raise _no_checkpoint(paths, run)
    return newest if which == "latest" else _best(paths, [newest, *others])


def _in_run(paths: HistoryPaths, run: str, step: int) -> CheckpointRef:
    run_facts(paths, run)
    if step < 0:
        found = _from_end(paths, [_Generation(run)], step, whose=f"run {run}")
        if found is not None:
            return found
    elif _has(paths, run, step):
        return CheckpointRef(run, step)
    check_folders(paths.step_dir(run, step), root=paths.root)
    refs = [CheckpointRef(run, other) for other in steps(paths, run)]
    missing = _what_became_of(paths, [run], step) or f"step {step} was not captured in run {run} of {paths.root}"
    raise NotFoundError(f"{missing}: {_nearest(refs, step)}")


_LOST = {
    "removed": "was removed",
    "redo_removed": "was not captured, and its record in the redo log was removed",
    "redo_left_out": "was not captured, and is not in the redo log since it was left out",
}
"""An event of the journal says this of a step that is not there; where several do, the last of these counts."""


def _what_became_of(paths: HistoryPaths, runs: list[str], step: int) -> str:
    """Return when and why the first of these runs that had a step has lost it, or has not recorded it, as its journal
    tells; "" of a step that none had."""
    sql = (
        "SELECT run, name, strftime(time, '%Y-%m-%d %H:%M:%S') AS at, detail ->> 'reason' AS reason FROM events "
        "WHERE name = 'removed' AND step = $step OR name IN ('redo_removed', 'redo_left_out') AND step <= $step "
        "AND TRY_CAST(detail ->> 'last' AS BIGINT) >= $step ORDER BY name <> 'redo_left_out', name = 'removed', time"
    )
    try:
        rows = {row["run"]: row for row in _query(paths, sql, {"step": step}).to_pylist()}
    except HistoryError:
        # The step is missing either way; what ails the index is told by those who ask for more.
        return ""
    for row in (rows[run] for run in runs if run in rows):
        why = f" ({row['reason']})" if row["reason"] else ""
        return f"step {step} of run {row['run']} of {paths.root} {_LOST[row['name']]} on {row['at']} UTC{why}"
    return ""


def _nearest(refs: list[CheckpointRef], step: int) -> str:
    if not refs:
        return "it has no committed checkpoint"
    below = max((ref.step for ref in refs if ref.step < step), default=None)
    above = min((ref.step for ref in refs if ref.step > step), default=None)
    near = " and ".join(str(other) for other in (below, above) if other is not None)
    return f"the nearest are {near}" if below is not None and above is not None else f"the nearest is {near}"


def _whole(text: str, ref: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise NotFoundError(
            f"{ref!r}: after the last ':' a step is expected, 'latest' or 'best', not {text!r}"
        ) from error


def _best(paths: HistoryPaths, refs: list[CheckpointRef]) -> CheckpointRef:
    """Return the checkpoint with the lowest loss, the earliest of equal ones."""
    rows = _query(paths, "SELECT run, step, value FROM metrics WHERE name = 'loss' AND NOT isnan(value)").to_pylist()
    losses = {CheckpointRef(row["run"], row["step"]): row["value"] for row in rows}
    known = [ref for ref in refs if ref in losses]
    if not known:
        raise NotFoundError(
            f"no captured step of run {refs[-1].run} of {paths.root} has a recorded loss, so there is no 'best': name "
            "a step, or record one with session.log(loss=...)"
        )
    return min(known, key=lambda ref: (losses[ref], ref.step))


def _tagged(paths: HistoryPaths, tag: str) -> CheckpointRef:
    rows = _query(paths, "SELECT name, run, step FROM tags ORDER BY time").to_pylist()
    tags = {row["name"]: CheckpointRef(row["run"], row["step"]) for row in rows}
    if tag not in tags:
        if tag in run_names(paths):
            raise NotFoundError(f"{tag!r} is a run of {paths.root}: say which checkpoint, as {f'{tag}:latest'!r}")
        raise NotFoundError(
            f"{tag!r} is neither a step, 'latest', 'best', 'run:step' nor a tag of {paths.root}: "
            f"{nearest(tag, [*tags, 'latest', 'best'], count=3)}"
        )
    found = tags[tag]
    return _in_run(paths, found.run, found.step)


def _query(paths: HistoryPaths, sql: str, parameters: Mapping[str, object] = _NONE) -> pa.Table:
    # Imported here, since most references are resolved from the folders alone: they must not wait for DuckDB's import.
    from catalog.index import index

    return index.query(paths, sql, parameters)
