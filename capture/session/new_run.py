"""Begins the run of a session, on all ranks: its name and facts, what earlier runs left, its locks."""

import contextlib
import datetime
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from capture.collectives import Ranks
from capture.user_warning import warn_user
from catalog.access.liveness import DEAD_AFTER_S
from catalog.errors import SetupError
from catalog.gc import collect_garbage
from catalog.history import History
from catalog.records import CheckpointRef, RunFacts
from catalog.run_writer import RunWriter, create_run, new_run_id

__all__ = ["begin_run"]


def begin_run(
    root: Path,
    ranks: Ranks,
    *,
    layout_hash: str,
    parent: CheckpointRef | None,
    facts: Mapping[str, Any],
    needs_locks: bool = False,
) -> RunWriter:
    """Make a new run in the history `root`, and return the writer of this rank, which holds its lock.

    All ranks must call it; a failure of one is raised on all. The first rank also removes what dead runs have left.

    needs_locks: whether all ranks must see each other's locks. SetupError, on all of them, where they do not.
    """
    run = ranks.broadcast(ranks.agree("making the run", lambda: _make_run(root, ranks, layout_hash, parent, facts)))
    with contextlib.ExitStack() as undo:
        writer = ranks.agree(
            "taking the run's lock",
            lambda: undo.enter_context(
                RunWriter(root, run=run, rank=ranks.rank, world_size=ranks.world_size, layout_hash=layout_hash)
            ),
        )
        _prove_locks(ranks, writer, needed=needs_locks)
        undo.pop_all()
    return writer


def _make_run(
    root: Path, ranks: Ranks, layout_hash: str, parent: CheckpointRef | None, facts: Mapping[str, Any]
) -> str | None:
    if ranks.rank != 0:
        return None
    for kept in collect_garbage(History.open(root).paths).kept:
        warn_user(f"leftovers of an earlier run stay: {kept}")
    run = new_run_id()
    created = datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds")
    create_run(
        root,
        RunFacts(
            run=run,
            created=created,
            world_size=ranks.world_size,
            parent_run=None if parent is None else parent.run,
            parent_step=None if parent is None else parent.step,
            layout_hash=layout_hash,
            facts=dict(facts),
        ),
    )
    return run


def _prove_locks(ranks: Ranks, run_writer: RunWriter, *, needed: bool) -> None:
    """Find out whether the hosts of this run see each other's locks, and note it where other sessions look. SetupError
    when they do not, and it is `needed`."""
    shared = ranks.see_locks(lambda rank: run_writer.paths.lock(run_writer.run, rank))
    if shared is False and needed:
        raise SetupError(
            f"keep: the hosts of this training do not see each other's locks in {run_writer.paths.root}, so the first "
            "rank can't know which earlier files the others refer to: leave keep= out, and prune when it has ended"
        )
    if shared:
        ranks.agree("noting that locks are shared", run_writer.note_shared_locks)
    elif shared is False and ranks.rank == 0:
        warn_user(
            f"the hosts of this training do not see each other's locks in {run_writer.paths.root}: leftovers of a run "
            f"that was killed are removed by another host only {DEAD_AFTER_S / 86_400:.0f} days after its last change, "
            "and nothing refuses to resume from a run that is still being written on another host"
        )
