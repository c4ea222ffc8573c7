"""The order of a history's runs, and which run each one has gone on from.

A question about "the current run" begins here, and every resumed training is a run of its own. So each run.json is read
whenever it is asked for, but its place in the order is not decoded again from bytes that this process has seen before.
"""

import contextlib
from dataclasses import dataclass
from typing import Final

import native
from catalog.errors import HistoryError, NotFoundError
from catalog.format.json_facts import decode_run_facts
from catalog.paths import HistoryPaths
from catalog.read.runs import run_facts, run_json_bytes, run_names
from catalog.records import CheckpointRef, RunFacts

__all__ = ["RUN_NUMBER", "current_run", "fork_of", "next_number", "runs"]

RUN_NUMBER: Final = "number"
"""The field of a run's facts that orders the runs of a history."""
_MAX_NUMBER: Final = 1 << 53


@dataclass(frozen=True, slots=True)
class _Place:
    """The place of a run among the others, as its facts tell it."""

    number: int
    created: str
    run: str
    is_replay: bool
    fork: CheckpointRef | None


_known: dict[bytes, _Place] = {}
"""By the checksum of the bytes of a run.json."""
_MAX_KNOWN: Final = 10_000
"""In a history of more runs, every one is decoded each time."""


def runs(paths: HistoryPaths) -> list[RunFacts]:
    """Return the facts of all runs, oldest first."""
    return sorted((run_facts(paths, name) for name in run_names(paths)), key=lambda facts: _order(_place_of(facts)))


def current_run(paths: HistoryPaths) -> str:
    """Return the training run that was made last, the one that a plain step refers to. A replay never becomes current.
    NotFoundError when the history has no run."""
    training = [place for place in (_place(paths, name) for name in run_names(paths)) if not place.is_replay]
    if not training:
        raise NotFoundError(
            f"the history {paths.root} has no run yet: a training with "
            f"`capture.enable(..., history={str(paths.root)!r})` makes one"
        )
    return max(training, key=_order).run


def next_number(paths: HistoryPaths) -> int:
    """Return the number of a new run: greater than that of every run that is there and can be read."""
    number = 0
    for name in run_names(paths):
        with contextlib.suppress(HistoryError, OSError):
            number = max(number, _place(paths, name).number)
    return number + 1


def fork_of(paths: HistoryPaths, run: str) -> CheckpointRef | None:
    """Return the checkpoint from which a run has gone on; None of a run that began anew. Errors are those of
    `run_facts`."""
    return _place(paths, run).fork


def _place(paths: HistoryPaths, run: str) -> _Place:
    data = run_json_bytes(paths, run)
    checksum = native.checksum(data)
    place = _known.get(checksum)
    # A copy of another run's file has its checksum.
    if place is None or place.run != run:
        place = _place_of(decode_run_facts(data, path=paths.run_json(run), run=run))
        if len(_known) >= _MAX_KNOWN:
            _known.clear()
        _known[checksum] = place
    return place


def _place_of(facts: RunFacts) -> _Place:
    number = facts.facts.get(RUN_NUMBER)
    parent, step = facts.parent_run, facts.parent_step
    return _Place(
        number=number if type(number) is int and 0 < number < _MAX_NUMBER else 0,
        created=facts.created,
        run=facts.run,
        is_replay=bool(facts.facts.get("replay")),
        fork=None if parent is None or step is None else CheckpointRef(parent, step),
    )


def _order(place: _Place) -> tuple[int, str, str]:
    """Return what orders the runs of a history from the oldest to the newest.

    Clocks go backwards, and those of two hosts differ. So each run has a number, greater than those of the runs that it
    found. Runs without one, of earlier releases, come first; equal numbers are ordered by time.
    """
    return place.number, place.created, place.run
