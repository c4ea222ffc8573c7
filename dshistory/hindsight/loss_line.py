"""The loss along the straight line between two checkpoints, and beyond them: is there a barrier between the two?"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import torch

from catalog.errors import SetupError
from catalog.history import History
from catalog.records import CheckpointRef
from dshistory.display.progress import CountProgress
from dshistory.display.table import Table
from dshistory.hindsight.averages import point_between
from dshistory.hindsight.measuring import measured
from dshistory.tensors.borrowed_model import BorrowedModel

if TYPE_CHECKING:
    import plotly.graph_objects as go

__all__ = ["LineTable", "losses_between"]

_SCHEMA: Final = pa.schema([("t", pa.float64()), ("name", pa.string()), ("value", pa.float64())])
_NAME: Final = "loss"


class LineTable(Table):
    """A row for each point of the line, in the order asked, and each number that the function gives there."""

    barrier: float | None
    """How far the highest loss from t = 0 to t = 1 is above the straight line between those at both ends; None where
    one of the ends, or their loss, is not known."""

    def plot(self) -> "go.Figure":
        """Draw the values over t. Needs the [notebook] extra."""
        from dshistory.display import plot

        return plot.curves(self, x="t", empty="no point was measured")


def losses_between(
    history: History,
    a: CheckpointRef,
    b: CheckpointRef,
    loss_fn: Callable[[Any], Any],
    *,
    model: torch.nn.Module,
    t: Sequence[float],
    quiet: bool,
) -> LineTable:
    """See `Explorer.losses_between`."""
    if not len(t):
        raise SetupError("losses_between: t=[] names no point: give numbers, 0 for a and 1 for b")
    rows: list[dict[str, Any]] = []
    with (
        BorrowedModel(model, verb="losses_between") as borrowed,
        CountProgress(len(t), description=f"losses from {a} to {b}", quiet=quiet) as bar,
    ):
        for place in map(float, t):
            state = point_between(history, a, b, place, kinds="model", names="*", quiet=True)
            borrowed.load(state["model"], state.get("buffer", {}), where=state.label)
            values = measured(loss_fn, model, what=state.label)
            named = values if isinstance(values, dict) else {_NAME: values}
            rows += [{"t": place, "name": name, "value": value} for name, value in named.items()]
            bar.advance(1)
    barrier = _barrier({row["t"]: row["value"] for row in rows if row["name"] == _NAME})
    note = f"t = 0 is {a}, t = 1 is {b}"
    if barrier is not None:
        note += f"; the highest point is {barrier:.4g} above the straight line between the two losses"
    table = LineTable(pa.Table.from_pylist(rows, schema=_SCHEMA), note=note)
    table.barrier = barrier
    return table


def _barrier(losses: dict[float, float]) -> float | None:
    if not {0.0, 1.0} <= losses.keys():
        return None
    start, end = losses[0.0], losses[1.0]
    return max(value - (1 - t) * start - t * end for t, value in losses.items() if 0 <= t <= 1)
