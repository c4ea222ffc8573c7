"""Replays steps at random: on kernels that are deterministic, one that differs points to hardware or a race."""

import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final

import pyarrow as pa

from capture.replays.change import Change
from catalog.errors import NotFoundError, SetupError
from catalog.history import History
from catalog.records import CheckpointRef
from catalog.references import committed_lineage
from dshistory.display.table import Table
from dshistory.replays.live import Live
from dshistory.replays.replay import replay
from dshistory.replays.result import ReplayTable

__all__ = ["replay_check"]

_SCHEMA: Final = pa.schema(
    [
        ("step", pa.int64()),
        ("until", pa.int64()),
        ("identical", pa.bool_()),
        ("differing", pa.int64()),
        ("first", pa.string()),
        ("run", pa.string()),
    ]
)


def replay_check(
    history: History, count: int, live: Live, *, run: str | None, seed: int | None, batches_per_step: int, quiet: bool
) -> Table:
    """See `Explorer.replay_check`."""
    if count < 1:
        raise SetupError(f"replay_check: count={count}: give a whole number of at least 1")
    if live.train_step is None:
        raise SetupError("replay_check: pass train_step= with engine= or model=")
    refs = committed_lineage(history.paths, run)
    spans = list(pairwise(refs))
    if not spans:
        raise NotFoundError(f"run {refs[-1].run} has one checkpoint only, and two are needed to compare a replay with")
    drawn = sorted(random.Random(seed).sample(range(len(spans)), k=min(count, len(spans))))
    chosen: list[int] = live.ranks().broadcast(drawn)
    again = [
        replay(
            history,
            spans[place][0],
            live,
            until=spans[place][1].step,
            change=Change(),
            batches_per_step=batches_per_step,
            quiet=quiet,
        )
        for place in chosen
    ]
    rows = [_row(*spans[place], one) for place, one in zip(chosen, again, strict=True)]
    return Table(pa.Table.from_pylist(rows, schema=_SCHEMA), note=_verdict(again))


def _verdict(again: Sequence[ReplayTable]) -> str:
    differing = [one for one in again if one.parted is not None]
    if not differing:
        return f"{len(again)} of {len(again)} replays give the same bits"
    said = f"{len(differing)} of {len(again)} replays differ: "
    causes = list(dict.fromkeys(cause for one in differing for cause in one.causes))
    if causes:
        return f"{said}likely cause: {'; '.join(causes)}"
    return (
        f"{said}where kernels are deterministic and all state is captured (`reproducibility`), that is faulty hardware "
        "or a race"
    )


def _row(before: CheckpointRef, after: CheckpointRef, again: ReplayTable) -> dict[str, Any]:
    first = again.parted.first if again.parted is not None else None
    return {
        "step": before.step,
        "until": after.step,
        "identical": again.parted is None,
        "differing": 0 if again.parted is None else len(again.parted.tensors),
        "first": None if first is None else str(first),
        "run": again.run,
    }
