"""Pruning by hand: a policy, or somebody's own list, applied to the runs of a history that nobody writes.

A run that is being written belongs to its session: `capture.enable(keep=...)` prunes it. Here it is left out, and
named.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from catalog.access.locked_run import locked_run
from catalog.errors import HistoryError, NotFoundError, SetupError
from catalog.history import History
from catalog.records import CheckpointRef
from catalog.retention.choice import beyond, choose, in_the_way
from catalog.retention.facts import CheckpointFacts, FactsReader, bytes_on_disk
from catalog.retention.policy import Policy
from catalog.retention.redo_segments import SegmentFacts, remove_segments, segment_facts
from catalog.retention.removal import remove_checkpoints, retention_journal

__all__ = ["Pruned", "prune", "remove"]

_SHOWN = 3


@dataclass(slots=True)
class Pruned:
    """Says what goes and what stays, each with the reason; the facts of all; and what nothing was done with.

    removed: what was removed; in a dry run, what would be
    left: runs that are being written, or can't be looked at, and checkpoints that could not be removed, with the reason
    redo: the segments of redo logs that the budget has no room for
    """

    removed: dict[CheckpointRef, str] = field(default_factory=dict)
    kept: dict[CheckpointRef, str] = field(default_factory=dict)
    facts: dict[CheckpointRef, CheckpointFacts] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    redo: tuple[SegmentFacts, ...] = ()


def prune(history: History, policy: Policy, *, runs: Sequence[str], dry_run: bool) -> Pruned:
    """Remove the checkpoints of `runs` that the policy does not keep: its rules hold for each run by itself, its budget
    for all that the runs take together.

    SetupError when nothing that the policy says keeps anything, when it names a metric that no checkpoint has, when the
    budget can't be met, or when a lone run is being written.
    """
    with _own(history, runs) as (lines, left):
        if not any(lines.values()):
            return Pruned(left=left)
        has_budget = policy.budget_bytes is not None
        redo = [one for run in lines for one in segment_facts(history.paths, run)] if has_budget else []
        other = _other_bytes(history, lines) if has_budget else 0
        choice = choose(list(lines.values()), policy, more_bytes=other, redo=redo)
        _require_met(lines, policy, choice.unmet)
        result = _carry_out(history, lines, choice.removed, choice.kept, left, dry_run=dry_run)
        result.redo = choice.redo
        for run in [] if dry_run else sorted({one.run for one in choice.redo}):
            of_run = [one for one in choice.redo if one.run == run]
            journal = retention_journal(history.paths, run)
            remove_segments(history.paths, of_run, beyond(policy), journal=journal)
        return result


def remove(history: History, refs: Sequence[CheckpointRef], *, force: bool, dry_run: bool) -> Pruned:
    """Remove exactly these checkpoints, all or none.

    SetupError, with the reason, when another one refers to the bytes of one of these, when a reader has it open, or
    when its run is being written; and without `force` also when it has a tag, a child run goes on from it, or it is the
    last healthy one of its run.
    """
    wanted = list(dict.fromkeys(refs))
    runs = sorted({ref.run for ref in wanted})
    with _own(history, runs) as (lines, left):
        if left:
            raise SetupError(f"{next(iter(left))}: {next(iter(left.values()))}: nothing was removed")
        stays = in_the_way(list(lines.values()), wanted, force=force)
        if stays:
            listed = [f"{ref}: {reason}" for ref, reason in sorted(stays.items())]
            more = f", and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
            raise SetupError(f"nothing was removed: {'; '.join(listed[:_SHOWN])}{more}")
        return _carry_out(history, lines, dict.fromkeys(wanted, "asked for"), {}, left, dry_run=dry_run)


def _carry_out(
    history: History,
    lines: Mapping[str, Sequence[CheckpointFacts]],
    removed: Mapping[CheckpointRef, str],
    kept: Mapping[CheckpointRef, str],
    left: dict[str, str],
    *,
    dry_run: bool,
) -> Pruned:
    facts = {one.ref: one for line in lines.values() for one in line}
    result = Pruned(dict(removed), dict(kept), facts, left)
    for run in [] if dry_run else sorted({ref.run for ref in removed}):
        done = remove_checkpoints(history.paths, [one for one in lines[run] if one.ref in removed], removed)
        for ref, reason in done.left.items():
            del result.removed[ref]
            result.kept[ref] = reason
            result.left[str(ref)] = reason
    return result


@contextmanager
def _own(history: History, runs: Sequence[str]) -> Iterator[tuple[dict[str, list[CheckpointFacts]], dict[str, str]]]:
    """Yield the facts of the runs that nobody writes, locked until the end of the body, and why the others are left."""
    lines: dict[str, list[CheckpointFacts]] = {}
    left: dict[str, str] = {}
    reader = FactsReader(history)
    with ExitStack() as locks:
        for run in runs:
            try:
                if locks.enter_context(locked_run(history.paths, run)):
                    lines[run] = reader.line(run)
                else:
                    left[f"run {run}"] = (
                        "is being written, or may be: its session prunes it, with capture.enable(keep=...)"
                    )
            except NotFoundError:
                raise
            except (HistoryError, OSError) as error:
                left[f"run {run}"] = str(error)
        yield lines, left


def _other_bytes(history: History, lines: Mapping[str, Sequence[CheckpointFacts]]) -> int:
    """Return what the runs take beside their checkpoints and redo logs: journals, and what is not committed."""
    total = sum(bytes_on_disk(history.paths.run_dir(run), but="redo".__eq__) for run in lines)
    return max(0, total - sum(one.nbytes for line in lines.values() for one in line))


def _require_met(lines: Mapping[str, Sequence[CheckpointFacts]], policy: Policy, unmet: Sequence[str]) -> None:
    if policy.rules and len(unmet) == len(set(map(str, policy.rules))):
        known = sorted({name for line in lines.values() for one in line for name in one.metrics})
        hint = (
            f"; recorded metrics are {', '.join(known[:10])}" if any("best" in rule for rule in unmet) and known else ""
        )
        raise SetupError(
            f"keep={str(policy)!r}: keeps none of {sum(map(len, lines.values()))} checkpoints, so it would remove all "
            f"but the newest: nothing was removed{hint}"
        )
    missing = [rule for rule in unmet if rule.startswith("best")]
    if missing:
        known = sorted({name for line in lines.values() for one in line for name in one.metrics})
        raise SetupError(
            f"keep: {missing[0]!r} finds no checkpoint with such a metric: nothing was removed; recorded are "
            f"{', '.join(known[:10]) or 'none'}"
        )
