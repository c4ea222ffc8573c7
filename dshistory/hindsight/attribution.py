"""Tells which update explains the change of a loss from one checkpoint to another.

    both checkpoints in memory, and the gradient at the first  ->  one part exchanged at a time, in both directions

For the loss L, the first checkpoint a, the second b, and a part p, such as a layer:

- alone    = L(a with p of b) - L(a): what the update of p does where nothing else has moved
- without  = L(b) - L(b with p of a): what it does where all else has moved; the change that goes away without it
- estimate = gradient of L at a, times (b - a), over the elements of p: what the slope at a foretells of `alone`

The parts interact, so the sum of `alone` is not the whole change. The rest is what no single part explains.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import torch

from catalog.errors import NotFoundError
from catalog.history import History
from catalog.records import CheckpointRef
from dshistory.comparison.grouping import layer_of
from dshistory.display.formats import Format
from dshistory.display.progress import CountProgress
from dshistory.display.table import Table
from dshistory.hindsight.measuring import measured_number
from dshistory.options import PARTS
from dshistory.patterns import Patterns, matching
from dshistory.tensors.borrowed_model import BorrowedModel, Tensors
from dshistory.tensors.checkpoint_tensors import CheckpointTensors

if TYPE_CHECKING:
    import plotly.graph_objects as go

__all__ = ["AttributionTable", "attribute"]

_SCHEMA: Final = pa.schema(
    [
        ("name", pa.string()),
        ("tensors", pa.int64()),
        ("share", pa.float64()),
        ("alone", pa.float64()),
        ("without", pa.float64()),
        ("estimate", pa.float64()),
    ]
)
_FORMATS: Final[dict[str, Format]] = {"share": "share"}


class AttributionTable(Table):
    """A row for each layer, tensor or parameter group, the largest part in the change of the loss first.

    `alone`, `without` and `estimate` are defined in `dshistory.hindsight.attribution`; `share` is the mean of the first
    two as a share of the whole change. `estimate` is null where the loss has no gradient.
    """

    change: float
    """The loss at the second checkpoint less that at the first."""

    unexplained: float
    """The change less the sum of `alone`: what no single part explains."""

    def plot(self, *, top: int = 20) -> "go.Figure":
        """Draw the first `top` rows as bars, with a mark for each estimate. Needs the [notebook] extra."""
        from dshistory.display import plot

        return plot.attributions(self, top=top)


def attribute(
    history: History,
    a: CheckpointRef,
    b: CheckpointRef,
    loss_fn: Callable[[Any], Any],
    *,
    model: torch.nn.Module,
    by: str,
    kinds: Patterns,
    quiet: bool,
) -> AttributionTable:
    """See `Explorer.attribute`."""
    with BorrowedModel(model, verb="attribute") as borrowed:
        stored = [CheckpointTensors(history, ref, advance=lambda nbytes: None) for ref in (a, b)]
        exchange = _Exchange(borrowed, loss_fn, (a, b), [one.loaded() for one in stored])
        parts = _parts(borrowed, by, kinds, stored[1])
        with CountProgress(2 * len(parts) + 2, description=f"attribute {a} {b}", quiet=quiet) as bar:
            before, slopes = exchange.gradient()
            after = exchange.loss(1)
            bar.advance(2)
            rows = []
            for part, names in parts.items():
                moved = [name for name in names if exchange.moved(name)]
                alone = exchange.loss(0, moved) - before if moved else 0.0
                without = after - exchange.loss(1, moved) if moved else 0.0
                estimate = _sum(slopes.get(name) for name in moved)
                rows.append(
                    {"name": part, "tensors": len(names), "alone": alone, "without": without, "estimate": estimate}
                )
                bar.advance(2)
    return _table(rows, before, after, by, (a, b), sloped=bool(slopes))


class _Exchange:
    """A model that is one of two checkpoints, with some of the tensors of the other."""

    def __init__(
        self,
        borrowed: BorrowedModel,
        loss_fn: Callable[[Any], Any],
        refs: Sequence[CheckpointRef],
        values: Sequence[tuple[Tensors, Tensors]],
    ) -> None:
        self._borrowed = borrowed
        self._loss_fn = loss_fn
        self._refs = refs
        self._values = values
        self._all = [{**buffers, **weights} for weights, buffers in values]

    def loss(self, side: int, exchanged: Sequence[str] = ()) -> float:
        """Return the loss of one checkpoint with some tensors of the other one."""
        self._load(side)
        self._borrowed.put({name: self._all[1 - side][name] for name in exchanged})
        return measured_number(self._loss_fn(self._borrowed.model), what=f"attribute at {self._refs[side]}")

    def gradient(self) -> tuple[float, dict[str, float]]:
        """Return the loss of the first checkpoint, and for each parameter its gradient there times its movement; for
        none when the loss has no gradient."""
        self._load(0)
        parameters = {
            name: one.requires_grad_()
            for name, one in self._borrowed.tensors.items()
            if name in self._borrowed.parameters and one.is_floating_point()
        }
        with torch.enable_grad():
            loss = self._loss_fn(self._borrowed.model)
        value = measured_number(loss, what=f"attribute at {self._refs[0]}")
        if not isinstance(loss, torch.Tensor) or not loss.requires_grad:
            return value, {}
        gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        return value, {
            name: 0.0 if gradient is None else float((gradient.cpu().double() * self._movement(name)).sum())
            for name, gradient in zip(parameters, gradients, strict=True)
        }

    def moved(self, name: str) -> bool:
        """Return whether any bit of a tensor differs between the two."""
        first, second = (side[name].reshape(-1).view(torch.uint8) for side in self._all)
        return not torch.equal(first, second)

    def _movement(self, name: str) -> torch.Tensor:
        return self._all[1][name].double() - self._all[0][name].double()

    def _load(self, side: int) -> None:
        self._borrowed.load(*self._values[side], where=f"checkpoint {self._refs[side]}")


def _parts(borrowed: BorrowedModel, by: str, kinds: Patterns, stored: CheckpointTensors) -> dict[str, list[str]]:
    """Return the names of the tensors of each part; a tied tensor is in the part of its first name."""
    if by not in PARTS:
        raise NotFoundError(f"attribute: no parts {by!r}; there are {', '.join(PARTS)}")
    wanted = matching({"model", "buffer"}, kinds, what="kind", where="a model; others do not take part in its loss")
    named = {"model": borrowed.parameters, "buffer": borrowed.buffers}
    groups = _groups(stored) if by == "group" else {}
    parts: dict[str, list[str]] = {}
    for name in (name for kind in ("model", "buffer") if kind in wanted for name in named[kind]):
        if name in borrowed.tensors:
            part = {"tensor": name, "layer": layer_of(name), "group": groups.get(name, "in no group")}[by]
            parts.setdefault(part, []).append(name)
    return parts


def _groups(stored: CheckpointTensors) -> dict[str, str]:
    """Return the parameter group of each parameter. NotFoundError when the checkpoint has no optimizer."""
    found = {
        name: f"{optimizer} group {number}"
        for optimizer, saved in stored.objects.items()
        if isinstance(saved, Mapping) and {"class", "groups", "kinds"} <= saved.keys()
        for number, group in enumerate(saved["groups"])
        for name in group["params"]
    }
    if not found:
        raise NotFoundError(
            f"attribute: by='group': checkpoint {stored.ref} has no optimizer, so no groups: use 'layer'"
        )
    return found


def _sum(estimates: Iterable[float | None]) -> float | None:
    """Return the sum of estimates; None when one of them is not known."""
    listed = list(estimates)
    known = [value for value in listed if value is not None]
    return math.fsum(known) if len(known) == len(listed) else None


def _table(
    rows: list[dict[str, Any]], before: float, after: float, by: str, refs: Sequence[CheckpointRef], *, sloped: bool
) -> AttributionTable:
    change = after - before
    for row in rows:
        mean = (row["alone"] + row["without"]) / 2
        row["share"] = mean / change if change else None
        row["rank"] = math.inf if math.isnan(mean) else abs(mean)
    # A part that alone makes the loss not finite is the cause; where all of b is, `without` says so of every part.
    rows.sort(key=lambda row: (math.isfinite(row["alone"]), -row["rank"]))
    finite = all(math.isfinite(row["alone"]) for row in rows)
    unexplained = change - math.fsum(row["alone"] for row in rows) if finite else math.nan
    note = f"loss {before:.6g} at {refs[0]}, {after:.6g} at {refs[1]}: {change:+.4g}"
    note += f"; {unexplained:+.4g} of it no single {by} explains"
    note += "" if sloped else "; no estimates: the loss has no gradient"
    table = AttributionTable(pa.Table.from_pylist(rows, schema=_SCHEMA), formats=_FORMATS, note=note)
    table.change, table.unexplained = change, unexplained
    return table
