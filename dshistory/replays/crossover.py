"""State or data: the same batches from two states, and other batches from the same states.

    for each state, and for the suspicious batches as for several sets of others:
        restore the state  ->  train on the set  ->  train on the same probes  ->  their mean loss

What a set of batches does is how far the loss on the probes ends from where other sets leave it, in units of the spread
of these. The design is the ablation by which PaLM's authors told a bad batch from a bad moment for it
(https://arxiv.org/abs/2204.02311, section 5.1).
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import pyarrow as pa

import capture
from capture.replays.batches import UnusedPosition
from catalog.errors import SetupError
from catalog.history import History
from catalog.records import CheckpointRef
from dshistory.display.progress import CountProgress
from dshistory.display.table import Table
from dshistory.replays.live import Live
from dshistory.replays.ordinary import Ordinary, recorded_before

__all__ = ["CrossoverTable", "Verdict", "crossover"]

Verdict = Literal["data", "state", "state and data", "neither"]

_SCHEMA: Final = pa.schema(
    [
        ("state", pa.string()),
        ("batches", pa.list_(pa.int64())),
        ("suspicious", pa.bool_()),
        ("highest_loss", pa.float64()),
        ("loss_after", pa.float64()),
        ("effect", pa.float64()),
        ("effect_size", pa.float64()),
    ]
)

_LARGE: Final = 5.0
"""An effect of so many spreads of the other sets counts."""


class CrossoverTable(Table):
    """A row for each state and set of batches. `loss_after` is the mean loss on the probes, `effect` how far it is from
    the median of the other sets of that state, `effect_size` the same in units of their spread; `highest_loss` is the
    highest one on the set itself."""

    verdict: Verdict
    """The loss rises with these batches whatever the state, with that state whatever the batches, with both together,
    or with neither."""


@dataclass(frozen=True, slots=True)
class _Design:
    """The batches by the steps that used them."""

    suspicious: tuple[int, ...]
    others: tuple[tuple[int, ...], ...]
    probes: tuple[int, ...]


def crossover(
    history: History,
    states: tuple[CheckpointRef, CheckpointRef],
    live: Live,
    *,
    batches: Sequence[int],
    sets: int,
    probes: int,
    quiet: bool,
) -> CrossoverTable:
    """See `Explorer.crossover`."""
    batch_of = _check(live, batches, sets=sets, probes=probes)
    design = _design(batches, sets=sets, probes=probes)
    rows: list[dict[str, Any]] = []
    total = len(states) * (1 + sets)
    try:
        with CountProgress(total, description="crossover", quiet=quiet, unit="set") as bar:
            for state in states:
                measured: dict[tuple[int, ...], tuple[float, float]] = {}
                for one in (design.suspicious, *design.others):
                    measured[one] = _train_on(history, state, live, batch_of, one, design.probes)
                    bar.advance(1)
                rows += _rows(state, design, measured)
    finally:
        _restore(history, states[0], live)
    table = CrossoverTable(pa.Table.from_pylist(rows, schema=_SCHEMA))
    table.verdict, table.note = _verdict(history, states, rows, design)
    return table


def _check(live: Live, batches: Sequence[int], *, sets: int, probes: int) -> Callable[[int], Any]:
    if live.train_step is None or (live.engine is None) == (live.model is None):
        raise SetupError("crossover: pass train_step=, with engine=, or model= and its optimizer=")
    if not callable(live.dataloader):
        raise SetupError("crossover: dataloader= must be a function that returns the batch of a step")
    if not batches or any(isinstance(step, bool) or not isinstance(step, int) or step < 1 for step in batches):
        raise SetupError(f"crossover: batches={batches!r}: give the steps whose batches are suspicious, as [83, 84]")
    for name, value, least in (("sets", sets, 3), ("probes", probes, 1)):
        if value < least:
            raise SetupError(f"crossover: {name}={value}: give a whole number of at least {least}")
    batch_of: Callable[[int], Any] = live.dataloader
    return batch_of


def _design(batches: Sequence[int], *, sets: int, probes: int) -> _Design:
    """Take as many other batches for each set, and the probes, from the steps behind the suspicious ones: those that
    the training had not seen in the state before either."""
    suspicious = tuple(sorted(set(batches)))
    following = iter(range(suspicious[-1] + 1, suspicious[-1] + 1 + sets * len(suspicious) + probes))
    others = tuple(tuple(next(following) for _ in suspicious) for _ in range(sets))
    return _Design(suspicious, others, tuple(following))


def _train_on(
    history: History,
    state: CheckpointRef,
    live: Live,
    batch_of: Callable[[int], Any],
    chosen: Sequence[int],
    probes: Sequence[int],
) -> tuple[float, float]:
    """Return the highest loss on the chosen batches, and the mean loss on the probes after them."""
    _restore(history, state, live)
    losses = live.mean_losses_on((batch_of(step) for step in (*chosen, *probes)), verb="crossover")
    if any(loss is None for loss in losses):
        raise SetupError("crossover: train_step returned None: let it return the loss")
    # A loss that is not finite is as far away as can be.
    known = [loss if loss is not None and math.isfinite(loss) else math.inf for loss in losses]
    return max(known[: len(chosen)]), statistics.fmean(known[len(chosen) :])


def _restore(history: History, state: CheckpointRef, live: Live) -> None:
    capture.restore(
        state,
        history=history.root,
        engine=live.engine,
        model=live.model,
        optimizer=live.optimizer,
        scheduler=live.scheduler,
        scaler=live.scaler,
        providers=[*live.providers, UnusedPosition()],
    )


def _rows(
    state: CheckpointRef, design: _Design, measured: Mapping[tuple[int, ...], tuple[float, float]]
) -> list[dict[str, Any]]:
    ordinary = Ordinary.of([measured[one][1] for one in design.others])
    return [
        {
            "state": str(state),
            "batches": list(one),
            "suspicious": one == design.suspicious,
            "highest_loss": highest,
            "loss_after": loss,
            "effect": ordinary.above(loss),
            "effect_size": ordinary.times(loss),
        }
        for one, (highest, loss) in measured.items()
    ]


def _verdict(
    history: History, states: Sequence[CheckpointRef], rows: Sequence[Mapping[str, Any]], design: _Design
) -> tuple[Verdict, str]:
    sizes = [row["effect_size"] for row in rows if row["suspicious"]]
    before = recorded_before(history, states[0])
    others = [row["loss_after"] for row in rows[: len(rows) // 2] if not row["suspicious"]]
    risen = None if before is None else before.times(statistics.median(others))
    harmful = [size >= _LARGE for size in sizes]
    steps = ", ".join(map(str, design.suspicious))
    both = f"effect sizes {sizes[0]:.2g} from {states[0]} and {sizes[1]:.2g} from {states[1]}"
    if all(harmful):
        return "data", f"data: the batches of {steps} raise the loss from either state; {both}"
    if any(harmful):
        one = states[harmful.index(True)]
        return "state and data", f"state and data: the batches of {steps} raise the loss from {one} only; {both}"
    if risen is not None and risen >= _LARGE:
        return "state", (
            f"state: from {states[0]} the loss rises with other batches too, by {risen:.2g} times the spread of the "
            f"losses before; {both}"
        )
    return "neither", f"neither: the batches of {steps} do what others do; {both}"
