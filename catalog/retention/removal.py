"""Removes checkpoints so that at every moment, and after a crash at any, a listed checkpoint has all its bytes.

The protocol for one checkpoint, while nobody else may write its run:

1. Its marker is locked alone, so that nobody reads it, and nobody begins to.
2. The folder of its step is renamed to a temporary name: in one instant all its files are there, or none. The name is
   made durable (fsync of the folder of steps). Now it is not listed any more, and no power cut brings it back.
3. Its files are removed, then its statistics. A crash leaves them to the garbage collection.

The redo log stays as long as there is a checkpoint before it: its steps are made again from an earlier one then. What
has none before it any more goes too.

Of several, those with the greater steps go first: a checkpoint only ever refers to earlier ones, and by the time that
one goes, whoever referred to it is durably gone.
"""

import os
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from catalog.access.pins import alone_with
from catalog.disk.durable import final_name, sync_dir, temporary_path
from catalog.disk.folders import open_folder, remove_files
from catalog.disk.regular_file import check_folders
from catalog.errors import HistoryError, NotFoundError
from catalog.format.journal import NO_RANK, Journal
from catalog.format.statistics_file import parse_name
from catalog.paths import HistoryPaths, is_checkpoint_file
from catalog.records import CheckpointRef
from catalog.retention.facts import CheckpointFacts
from catalog.retention.redo_segments import remove_useless_segments

__all__ = ["EVENT", "Removed", "remove_checkpoints", "retention_journal"]

EVENT = "removed"
"""The event of the journal that tells why a checkpoint is not there any more."""


@dataclass(slots=True)
class Removed:
    """Says what was removed, and what was left after all, each with the reason. `redo_bytes` is what the segments of
    the redo log counted for that went with them."""

    checkpoints: list[CheckpointRef] = field(default_factory=list)
    left: dict[CheckpointRef, str] = field(default_factory=dict)
    redo_bytes: int = 0


def retention_journal(paths: HistoryPaths, run: str) -> Journal:
    """Return a journal of its own for whoever removes something of a run and has no session."""
    return Journal(paths.journal_dir(run), run=run, writer=f"retention-{secrets.token_hex(4)}", rank=NO_RANK)


def remove_checkpoints(
    paths: HistoryPaths,
    removed: Sequence[CheckpointFacts],
    reasons: Mapping[CheckpointRef, str],
    *,
    journal: Journal | None = None,
) -> Removed:
    """Remove checkpoints of one run, and record the reason of each in its journal first.

    The caller makes sure that no other process writes the run (see `catalog.access.locked_run`), and that no other
    checkpoint that stays refers to these. Those that a reader has open, that hold files of somebody else, or that can't
    be removed are left, and with them those that they need.

    journal: that of a session; by default one of its own
    """
    done = Removed()
    if not removed:
        return done
    (run,) = {one.ref.run for one in removed}
    check_folders(paths.steps_dir(run), root=paths.root)
    check_folders(paths.journal_dir(run), root=paths.root)
    own = journal or retention_journal(paths, run)
    # The record comes before the removal: whoever misses a checkpoint finds out why.
    for one in removed:
        own.event(EVENT, one.ref.step, reason=reasons[one.ref])
    own.flush()
    needed: set[CheckpointRef] = set()
    for one in sorted(removed, key=lambda one: one.ref, reverse=True):
        try:
            problem = "a checkpoint that was left refers to its bytes" if one.ref in needed else _remove(paths, one.ref)
        except NotFoundError:
            continue
        except (HistoryError, OSError) as error:
            problem = str(error)
        if problem:
            done.left[one.ref] = problem
            needed |= one.needs
        else:
            done.checkpoints.append(one.ref)
    done.redo_bytes = remove_useless_segments(paths, run)
    return done


def _final(name: str) -> str:
    return final_name(name) or name


def _remove(paths: HistoryPaths, ref: CheckpointRef) -> str:
    """Remove one checkpoint, and return ""; or why it was left."""
    folder = paths.step_dir(ref.run, ref.step)
    hidden = temporary_path(folder)
    with alone_with(paths, ref) as alone:
        if not alone:
            return "a reader has it open"
        foreign = sorted(name for name in os.listdir(folder) if not is_checkpoint_file(_final(name)))
        if foreign:
            return f"{folder} contains {', '.join(foreign[:3])}, which is not ours: move it away first"
        folder.rename(hidden)
        sync_dir(paths.steps_dir(ref.run))
    # From here on it is gone: what can't be removed now is garbage.
    with suppress(OSError):
        with open_folder(hidden) as opened:
            remove_files(opened, is_checkpoint_file, only_temporaries=False)
        hidden.rmdir()
    _remove_statistics(paths, ref)
    return ""


def _remove_statistics(paths: HistoryPaths, ref: CheckpointRef) -> None:
    def is_of_it(name: str) -> bool:
        about = parse_name(name)
        return about is not None and about.step == ref.step

    with suppress(OSError), open_folder(paths.statistics_dir(ref.run)) as folder:
        remove_files(folder, is_of_it, only_temporaries=False)
