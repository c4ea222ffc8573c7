"""Tables of what a policy, or a removal by name, takes away, and why."""

from collections import Counter
from collections.abc import Iterable
from typing import Any, Final

import pyarrow as pa

from catalog.errors import NotFoundError, SetupError
from catalog.history import History
from catalog.index import index
from catalog.records import CheckpointRef
from catalog.retention import prune as pruning
from catalog.retention.policy import policy_of
from dshistory.display.formats import Format, counted, text_of
from dshistory.display.table import Table
from dshistory.display.text import Layout
from dshistory.options import Steps

__all__ = ["RemovalTable", "prune", "remove"]

_SCHEMA: Final = pa.schema([("run", pa.string()), ("step", pa.int64()), ("frees", pa.int64()), ("reason", pa.string())])
_FORMATS: Final[dict[str, Format]] = {"frees": "bytes"}
_LAYOUT: Final = Layout(in_title=("run",), gives_way=("run",))
_PATIENCE_S: Final = 2.0
_REASONS_SHOWN: Final = 4


class RemovalTable(Table):
    """The checkpoints that go, or that would go in a dry run, with the bytes that each frees and the reason. `kept` are
    those that stay, with the same columns; `dry_run` says whether nothing was removed."""

    kept: Table
    dry_run: bool


def prune(history: History, keep: Any, *, run: str | None, dry_run: bool) -> RemovalTable:
    """See `Explorer.prune`."""
    policy = policy_of(keep)
    runs = [facts.run for facts in history.runs()] if run is None else [run]
    if not runs:
        raise NotFoundError(f"the history {history.root} has no run yet: there is nothing to prune")
    return _table(history, pruning.prune(history, policy, runs=runs, dry_run=dry_run), dry_run=dry_run)


def remove(history: History, refs: Steps, *, force: bool, dry_run: bool) -> RemovalTable:
    """See `Explorer.remove`."""
    several = [part.strip() for part in refs.split(",")] if isinstance(refs, str) else refs
    chosen = [history.resolve(ref) for ref in (several if isinstance(several, Iterable) else [several])]
    if not chosen:
        raise SetupError(f"remove: refs={refs!r} names no checkpoint: give steps, as in [10, 20]")
    return _table(history, pruning.remove(history, chosen, force=force, dry_run=dry_run), dry_run=dry_run)


def _table(history: History, pruned: pruning.Pruned, *, dry_run: bool) -> RemovalTable:
    if pruned.removed and not dry_run:
        index.register(history.paths, patience_s=_PATIENCE_S)
    table = RemovalTable(_rows(pruned, pruned.removed), formats=_FORMATS, layout=_LAYOUT, note=_note(pruned, dry_run))
    table.kept = Table(_rows(pruned, pruned.kept), formats=_FORMATS, layout=_LAYOUT)
    table.dry_run = dry_run
    return table


def _rows(pruned: pruning.Pruned, chosen: dict[CheckpointRef, str]) -> pa.Table:
    rows = [
        {"run": ref.run, "step": ref.step, "frees": pruned.facts[ref].nbytes, "reason": chosen[ref]}
        for ref in pruned.facts
        if ref in chosen
    ]
    return pa.Table.from_pylist(rows, schema=_SCHEMA)


def _note(pruned: pruning.Pruned, dry_run: bool) -> str:
    frees = text_of(sum(pruned.facts[ref].nbytes for ref in pruned.removed), "bytes")
    done = "would be removed" if dry_run else "removed"
    parts = [f"{counted(len(pruned.removed), 'checkpoint')} {done}, {frees}"]
    if pruned.kept:
        counts = Counter(pruned.kept.values()).most_common()
        told = [f"{count} {reason}" for reason, count in counts[:_REASONS_SHOWN]]
        more = [f"{len(counts) - _REASONS_SHOWN} other reasons"] if len(counts) > _REASONS_SHOWN else []
        parts.append(f"{len(pruned.kept)} kept: {', '.join([*told, *more])}")
    if pruned.redo:
        log_bytes = text_of(sum(one.nbytes for one in pruned.redo), "bytes")
        parts.append(f"{log_bytes} of redo logs {done}, their oldest steps")
    parts += [f"{what}: {why}" for what, why in pruned.left.items()]
    if dry_run and (pruned.removed or pruned.redo):
        parts.append("nothing was removed yet: dry_run=False does it")
    return "; ".join(parts)
