"""The steps in which a jump arises, found by replays: without batches of them, or from later and later checkpoints.

    "skip"  leave out the batches of all steps up to s: gone from the s on whose batch brings the jump about
    "redo"  begin again from checkpoint c, unchanged: gone up to the last c that was before what brought it about

Both are monotone where one step is to blame, so the range is halved. A jump that comes again in a plain replay is in
the batches, or in the state before them; one that does not was no part of the training: hardware, a race, an edit.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import pyarrow as pa

from capture.collectives import Ranks
from capture.replays.change import Change
from catalog.errors import NotFoundError, SetupError
from catalog.history import History
from catalog.nearest_names import nearest
from catalog.records import CheckpointRef
from dshistory.display.formats import counted
from dshistory.display.progress import CountProgress
from dshistory.display.table import Table
from dshistory.options import UNDO, Command
from dshistory.replays.followed import Followed
from dshistory.replays.live import Live
from dshistory.replays.ordinary import Ordinary, recorded_before
from dshistory.replays.result import ReplayTable
from dshistory.replays.start import start
from dshistory.user_functions import whether

__all__ = ["ReplayBisection", "bisect_replay"]

_SCHEMA: Final = pa.schema(
    [
        ("step", pa.int64()),
        ("changed", pa.string()),
        ("gone", pa.bool_()),
        ("highest_loss", pa.float64()),
        ("run", pa.string()),
    ]
)

_FAR: Final = 8.0
"""A loss so many spreads above the ordinary ones is a jump: by Chebyshev's inequality at most one in 64 of any
distribution is as far out, and of a normal one none."""


class ReplayBisection(Table):
    """A row for each replay, in the order in which they were made. `step` is the last step whose batch was left out,
    or, with undo="redo", the checkpoint from which it began; `changed` is what was done otherwise; `gone` is whether
    the jump was gone; `run` is the child run."""

    steps: range
    """The steps in which the jump arises: one with undo="skip", those between two checkpoints with "redo"; empty where
    the replays could not tell, and `note` says why."""

    alone: bool | None
    """With undo="skip", whether the jump is gone when the batch of that one step is left out, and all before it are
    trained on; None where that was not tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trials:
    """Makes replays and keeps what came of each."""

    history: History
    live: Live
    command: Command
    batches_per_step: int
    until: int
    linear: bool
    gone: Callable[[ReplayTable], Any]
    ranks: Ranks
    bar: CountProgress
    rows: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def __call__(self, ref: CheckpointRef, left_out: Sequence[int] = (), *, step: int) -> bool:
        """Replay from `ref` without the batches of these steps; return whether the jump is gone, as rank 0 says."""
        table = start(
            self.history,
            ref,
            until=self.until,
            change=Change(skip_batches=tuple(left_out)),
            command=self.command,
            batches_per_step=self.batches_per_step,
            quiet=True,
            live=self.live,
        )
        changed = f"without the batches of {_span(left_out)}" if left_out else f"nothing, from {ref}"
        at = f"the replay of {ref}, changed: {changed}"
        answer = self.ranks.agree(
            "bisect_replay's predicate", lambda: whether(self.gone, lambda: table, verb="bisect_replay", at=at)
        )
        gone: bool = self.ranks.broadcast(answer)
        self.rows.append(
            {"step": step, "changed": changed, "gone": gone, "highest_loss": _highest(table), "run": table.run}
        )
        self.bar.describe(f"{changed}: {'gone' if gone else 'still there'}")
        self.bar.advance(1)
        return gone

    def first(self, places: Sequence[int], at: Callable[[int], bool]) -> int:
        """Return the first place at which `at` holds, which holds at the last one and is not asked there."""
        if self.linear:
            return next((place for place in places[:-1] if at(place)), places[-1])
        low, high = -1, len(places) - 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if at(places[middle]) else (middle, high)
        return places[high]


def bisect_replay(
    history: History,
    good: CheckpointRef,
    bad: int,
    live: Live,
    *,
    predicate: Callable[[ReplayTable], Any] | None,
    undo: str,
    linear: bool,
    until: int | None,
    command: Command,
    batches_per_step: int,
    quiet: bool,
) -> ReplayBisection:
    """See `Explorer.bisect_replay`."""
    if undo not in UNDO:
        raise NotFoundError(f"bisect_replay: no undo={undo!r}; {nearest(undo, UNDO)}")
    last = bad if until is None else until
    if not good.step < bad <= last:
        raise SetupError(f"bisect_replay: good={good}, bad={bad}, until={last}: these steps must follow each other")
    if predicate is not None and not callable(predicate):
        raise SetupError(f"bisect_replay: predicate={predicate!r}: give a function of the result of a replay")
    if predicate is None:
        before = _before(history, good)
        nothing = _no_jump(history, good, last, before)
        if nothing is not None:
            return _answered([], _Found(_NOTHING, nothing))
        predicate = _ordinary(before)
    checkpoints = [good, *(ref for step, ref in Followed(history, good).checkpoints.items() if step < bad)]
    places = len(checkpoints) if undo == "redo" else bad - good.step
    total = 1 + (places if linear else math.ceil(math.log2(places + 1)) + 2)
    with CountProgress(total, description="bisect_replay", quiet=quiet, unit="replay") as bar:
        trials = _Trials(
            history=history,
            live=live,
            command=command,
            batches_per_step=batches_per_step,
            until=last,
            linear=linear,
            gone=predicate,
            ranks=live.ranks() if command is None and live.train_step is not None else Ranks(0, 1),
            bar=bar,
        )
        search = _redo if undo == "redo" else _skip_each if linear else _skip
        found = search(trials, checkpoints, bad)
    return _answered(trials.rows, found)


class _Found(NamedTuple):
    steps: range
    note: str
    alone: bool | None = None


def _answered(rows: Sequence[Mapping[str, Any]], found: _Found) -> ReplayBisection:
    table = ReplayBisection(pa.Table.from_pylist(list(rows), schema=_SCHEMA))
    table.steps, table.alone = found.steps, found.alone
    table.note = f"{found.note}; {counted(len(rows), 'replay')}"
    return table


_NOTHING: Final = range(0)


def _skip(trials: _Trials, checkpoints: Sequence[CheckpointRef], bad: int) -> _Found:
    """Leave out the batches of all steps up to one, and halve."""
    good, steps = checkpoints[0], range(checkpoints[0].step + 1, bad + 1)

    def without(step: int) -> bool:
        return trials(good, range(steps.start, step + 1), step=step)

    if trials(good, step=good.step):
        return _Found(_NOTHING, _not_again(good, bad))
    if not without(bad):
        note = (
            f"without any batch of the steps {_span(steps)} the jump is there too: it is in the state at {good}, or "
            "in the batches that came instead; begin earlier, or ask `crossover`"
        )
        return _Found(_NOTHING, note)
    found = trials.first(steps, without)
    if found == steps.start or trials(good, [found], step=found):
        return _Found(range(found, found + 1), _one(found), alone=True)
    note = (
        f"without the batches up to step {found} the jump is gone, up to {found - 1} it is not; the batch of step "
        f"{found} is not alone to blame: without it alone the jump is there"
    )
    return _Found(range(found, found + 1), note, alone=False)


def _skip_each(trials: _Trials, checkpoints: Sequence[CheckpointRef], bad: int) -> _Found:
    """Leave out the batch of one step after the other, each alone."""
    good, steps = checkpoints[0], range(checkpoints[0].step + 1, bad + 1)
    if trials(good, step=good.step):
        return _Found(_NOTHING, _not_again(good, bad))
    for step in steps:
        if trials(good, [step], step=step):
            return _Found(range(step, step + 1), _one(step), alone=True)
    note = f"no batch of the steps {_span(steps)} is alone to blame: several are (linear=False), or the state at {good}"
    return _Found(_NOTHING, note)


def _redo(trials: _Trials, checkpoints: Sequence[CheckpointRef], bad: int) -> _Found:
    """Begin from later and later checkpoints, and find the first one from which the jump comes again."""

    def again(place: int) -> bool:
        return not trials(checkpoints[place], step=checkpoints[place].step)

    if again(0):
        note = (
            f"from {checkpoints[0]} the jump comes again without a change: it is in the state there, or in the "
            "batches (undo='skip')"
        )
        return _Found(_NOTHING, note)
    # Behind the last checkpoint there is nothing to begin from, and the run as it was has the jump.
    found = trials.first(range(1, len(checkpoints) + 1), again)
    last = bad if found == len(checkpoints) else checkpoints[found].step
    steps = range(checkpoints[found - 1].step + 1, last + 1)
    note = (
        f"the jump arises in the steps {_span(steps)}, and is gone when the training goes on from "
        f"{checkpoints[found - 1]} again without a change: not by batches or code, but by hardware, a race, an edit, "
        "or state that was not captured (`reproducibility`)"
    )
    return _Found(steps, note)


def _one(step: int) -> str:
    return f"the batch of step {step} brings the jump about: without it alone the jump is gone"


def _not_again(good: CheckpointRef, bad: int) -> str:
    return (
        f"the jump does not come again when {good} is replayed up to step {bad} without a change: no batch is to blame "
        "but hardware, a race, an edit, or state that was not captured; undo='redo' tells in which steps"
    )


def _no_jump(history: History, good: CheckpointRef, last: int, before: Ordinary) -> str | None:
    """Return that the run itself has no loss up to `last` that is not as those before `good`; None where it has one, or
    has recorded none."""
    losses = {step: loss for step, loss in Followed(history, good).losses().items() if good.step < step <= last}
    worst = max(losses, key=lambda step: _size(losses[step]), default=None)
    if worst is None or before.times(_size(losses[worst])) >= _FAR:
        return None
    return (
        f"there is no jump to look for between {good} and step {last}: the highest loss is {losses[worst]:.6g} at step "
        f"{worst}, where those before {good} are {before.middle:.6g} and one from "
        f"{before.middle + _FAR * before.spread:.6g} on would be out of the ordinary: name a later step as bad, or "
        "give predicate= a function of a replay's result that returns whether the jump is gone"
    )


def _before(history: History, good: CheckpointRef) -> Ordinary:
    before = recorded_before(history, good)
    if before is None:
        raise SetupError(
            f"bisect_replay: too few losses are recorded up to {good} to tell what is ordinary: give predicate= a "
            "function of a replay's result that returns whether the jump is gone, as lambda r: r[-1]['loss'] < 5"
        )
    return before


def _ordinary(before: Ordinary) -> Callable[[ReplayTable], bool]:
    """Return a predicate: every loss of a replay is as those before."""

    def gone(table: ReplayTable) -> bool:
        highest = _highest(table)
        if highest is None:
            raise SetupError("the replay recorded no loss: let train_step return it, or give predicate=")
        return before.times(highest) < _FAR

    return gone


def _highest(table: ReplayTable) -> float | None:
    """Return the highest loss of a replay; one that is not finite is the highest there can be."""
    return max((_size(loss) for loss in table["loss"].to_pylist() if loss is not None), default=None)


def _size(loss: float) -> float:
    return loss if math.isfinite(loss) else math.inf


def _span(steps: Sequence[int]) -> str:
    return str(steps[0]) if len(steps) == 1 else f"{steps[0]}-{steps[-1]}"
