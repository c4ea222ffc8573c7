"""Replays a step in this process: the training goes on from there, as a child run, under the eyes of the one before."""

import dataclasses
import uuid
from collections.abc import Callable, Collection, Iterator
from typing import Any, Final, get_args

import capture
from capture.changes.change_detector import Check
from capture.redo.steps import RedoRef, find_step
from capture.replays.change import Change
from capture.replays.course import ReplayEnded
from capture.replays.request import ReplayRequest, asking
from catalog.errors import MismatchError, NotFoundError, SetupError
from catalog.history import History
from catalog.records import CheckpointRef
from dshistory.display.progress import CountProgress
from dshistory.replays.followed import Followed
from dshistory.replays.live import Batches, Live
from dshistory.replays.result import ReplayTable, compared_with

__all__ = ["beside", "has_position", "replay", "request_for"]


def request_for(
    followed: Followed,
    *,
    until: int | None,
    also_at: frozenset[int] = frozenset(),
    change: Change,
    batches_per_step: int,
    leaves_out: bool = True,
) -> ReplayRequest:
    """Return the checked request for a replay. SetupError for one that ends before it begins, or skips batches that it
    does not come to."""
    ref = followed.ref
    last = followed.last_step() if until is None else until
    if last <= ref.step:
        raise SetupError(f"replay: until={last} is not after step {ref.step}, with which it begins")
    beyond = [step for step in change.skip_batches if not ref.step < step <= last]
    if beyond:
        raise SetupError(
            f"replay: skip_batches={beyond}: the replay makes steps {ref.step + 1} to {last} only: begin earlier, or "
            "name steps among those"
        )
    if batches_per_step < 1:
        raise SetupError(f"replay: batches_per_step={batches_per_step}: give a whole number of at least 1")
    return ReplayRequest(
        id=uuid.uuid4().hex,
        history=followed.history.root.absolute(),
        ref=ref,
        until=last,
        change=change,
        capture_at=frozenset({last, *also_at, *(step for step in followed.checkpoints if step <= last)}),
        batches_per_step=batches_per_step,
        leaves_out=leaves_out,
    )


def replay(
    history: History,
    ref: CheckpointRef,
    live: Live,
    *,
    until: int | None,
    also_at: frozenset[int] = frozenset(),
    change: Change,
    batches_per_step: int,
    quiet: bool,
) -> ReplayTable:
    """Train on from `ref` as `live` does, and compare; see `Explorer.replay`."""
    if (live.engine is None) == (live.model is None):
        raise SetupError("replay: pass engine=, or model= with its optimizer=")
    if not callable(live.train_step):
        raise SetupError(f"replay: train_step={live.train_step!r}: give a function that trains on one batch")
    dataloader = live.dataloader
    by_step = callable(dataloader) and not hasattr(dataloader, "__iter__")
    _check_data(history, ref, dataloader, by_step=by_step)
    followed = Followed(history, ref)
    request = request_for(
        followed,
        until=until,
        also_at=also_at,
        change=change,
        batches_per_step=batches_per_step,
        leaves_out=not by_step,
    )
    recorded: set[str] = set()
    request = dataclasses.replace(request, on_step=lambda _, metrics: recorded.update(metrics))
    with asking(request):
        session = capture.enable(
            live.target,
            every=_interval(followed),
            check=_check_of(followed),
            optimizer=live.optimizer,
            scheduler=live.scheduler,
            scaler=live.scaler,
            dataloader=None if by_step else dataloader,
            providers=live.providers,
        )
    batches = _of_steps(dataloader, request) if by_step else _of_loader(dataloader)
    with session:
        _train(session, request, followed, live, batches, recorded=recorded, quiet=quiet)
        # Another rank may still be writing its part of the last step, which is to be compared.
        session.wait()
    # A loss is the mean over the ranks once all have closed their journals.
    ranks = live.ranks()
    ranks.gather(None)
    return ranks.agree("comparing a replay", lambda: compared_with(followed, session.run, change=change))


_MOST_CALLS: Final = 1000
"""A step may be made of many batches, of which each is a call, but hardly of more than this."""


def _train(
    session: capture.Session,
    request: ReplayRequest,
    followed: Followed,
    live: Live,
    batches: Iterator[Any],
    *,
    recorded: Collection[str],
    quiet: bool,
) -> None:
    """Make the steps. The loss that `train_step` returns is recorded where the loop records none itself."""
    losses = followed.losses()
    steps = request.until - request.ref.step
    with CountProgress(steps, description=f"replay {request.ref}", quiet=quiet, unit="step") as bar:
        made = session.step
        of_step: list[float] = []
        calls = 0
        while session.step < request.until:
            if calls == _MOST_CALLS:
                raise SetupError(
                    f"replay: train_step was called {calls} times behind step {made}, and has made no step: it must "
                    "train on the batch that it is given, up to optimizer.step() or engine.step()"
                )
            calls += 1
            try:
                loss = live.loss_on(next(batches), verb="replay")
            except ReplayEnded:
                return
            if loss is not None:
                of_step.append(loss)
            if session.step > made:
                if of_step:
                    mean = sum(of_step) / len(of_step)
                    if "loss" not in recorded:
                        session.log(loss=mean)
                    bar.describe(beside(mean, losses.get(session.step)))
                bar.advance(session.step - made)
                made, of_step, calls = session.step, [], 0


def beside(loss: float, before: float | None) -> str:
    """Return what a bar says of a step: its loss, and that of the run that is replayed."""
    return f"loss {loss:.4g}" if before is None else f"loss {loss:.4g}, was {before:.4g}"


def has_position(history: History, ref: CheckpointRef) -> bool:
    """Return whether the checkpoint has the position of a data loader, at which the batches go on."""
    step = find_step(history, ref)
    stored = step.base if isinstance(step, RedoRef) else step
    return bool(history.extents(stored, kinds=["object"], names=["dataloader"]))


def _check_data(history: History, ref: CheckpointRef, dataloader: Batches, *, by_step: bool) -> None:
    if dataloader is None:
        raise SetupError("replay: pass dataloader=, the loader of the training or a function of the step, as batch_of")
    if by_step:
        return
    if not (hasattr(dataloader, "__iter__") and hasattr(dataloader, "state_dict")):
        raise SetupError(
            f"replay: dataloader: a {type(dataloader).__qualname__} can't tell its position: give one that can, as "
            "torchdata's StatefulDataLoader, or a function that returns the batch of a step"
        )
    if not has_position(history, ref):
        raise MismatchError(
            f"replay: {ref} has no position of a data loader, so the batches would begin anew: capture with "
            "capture.enable(..., dataloader=loader), or give dataloader= a function that returns the batch of a step"
        )


def _interval(followed: Followed) -> int:
    """Return the interval at which the run that is followed was captured, as far as it is known."""
    every = followed.history.run_facts(followed.run).facts.get("every")
    return every if type(every) is int and every > 0 else 50


def _check_of(followed: Followed) -> Any:
    """Return what was compared in the run that is followed: fingerprints of another coverage are not comparable."""
    known = followed.history.run_facts(followed.run).facts.get("check")
    return known if known in get_args(Check) else "sampled"


def _of_loader(dataloader: Any) -> Iterator[Any]:
    """Yield the batches of one epoch after the other."""
    while True:
        empty = True
        for batch in dataloader:
            empty = False
            yield batch
        if empty:
            raise NotFoundError("replay: the data loader gives no batch at all")


def _of_steps(batch_of: Callable[[int], Any], request: ReplayRequest) -> Iterator[Any]:
    step = request.ref.step
    while True:
        step += 1
        if step not in request.change.skip_batches:
            yield batch_of(step)
