"""Starts a replay: in this process, or in the user's own script."""

import dataclasses
from collections.abc import Iterator

from capture.load.whole_state import require_whole_state
from capture.replays.change import Change
from catalog.errors import SetupError
from catalog.history import History
from catalog.records import CheckpointRef
from dshistory.options import Changes, Command, SkippedSteps
from dshistory.replays.launch import launch
from dshistory.replays.live import Live
from dshistory.replays.replay import replay
from dshistory.replays.result import ReplayTable

__all__ = ["change_of", "start"]


def change_of(change: Changes, skip_batches: SkippedSteps) -> Change:
    """Return what a user wants otherwise; the steps of both arguments together. SetupError for what can't be."""
    asked = Change.of(change)
    if skip_batches is None:
        return asked
    given = [skip_batches] if isinstance(skip_batches, (int, str)) else skip_batches
    steps = {step for one in given for step in _steps(one)}
    return dataclasses.replace(asked, skip_batches=tuple(sorted(steps | set(asked.skip_batches))))


def start(
    history: History,
    ref: CheckpointRef,
    *,
    until: int | None,
    also_at: frozenset[int] = frozenset(),
    change: Change,
    command: Command,
    batches_per_step: int,
    quiet: bool,
    live: Live,
) -> ReplayTable:
    """See `Explorer.replay`. `also_at` are further steps to capture."""
    if command is None and live.train_step is None:
        raise SetupError(
            "replay: give what trains: behind -- the script, as -- python train.py; in Python train_step= with engine= "
            "or model=, or command="
        )
    require_whole_state(history, ref)
    if command is not None:
        if any(value not in (None, ()) for value in live.given()):
            raise SetupError("replay: pass command=, or train_step= with what it trains, not both")
        return launch(
            history,
            ref,
            command=command,
            until=until,
            also_at=also_at,
            change=change,
            batches_per_step=batches_per_step,
            quiet=quiet,
        )
    return replay(
        history,
        ref,
        live,
        until=until,
        also_at=also_at,
        change=change,
        batches_per_step=batches_per_step,
        quiet=quiet,
    )


def _steps(text: int | str) -> Iterator[int]:
    """Yield the steps of a number, or of a text as "83" or "83-90,95"."""
    for part in str(text).split(","):
        first, _, last = part.strip().partition("-")
        if not first.isdecimal() or not (last or first).isdecimal():
            raise SetupError(f"replay: skip_batches={text!r}: give steps, as 83 or 83-90")
        yield from range(int(first), int(last or first) + 1)
