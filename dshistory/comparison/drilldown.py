"""The diff inside one tensor: which rows, columns, heads or tokens changed most between two checkpoints.

Both tensors are streamed side by side, so memory stays bounded. Each element belongs to one group along the axis; the
sums of a group give its row's figures.
"""

import math
from collections.abc import Callable
from glob import escape
from typing import Final

import numpy as np
import pyarrow as pa
import torch

from catalog.errors import MismatchError, NotFoundError, SetupError
from catalog.history import History
from catalog.records import CheckpointRef
from dshistory import metrics
from dshistory.comparison.diff import DiffTable, Rebuilt, select
from dshistory.comparison.ranking import MEANING
from dshistory.display.formats import Format
from dshistory.display.progress import ByteProgress
from dshistory.tensors.stream import side_by_side

__all__ = ["drill_down"]

_CHUNK_NUMEL: Final = 1 << 20
_FORMATS: Final[dict[str, Format]] = {"cosine": "cosine", "changed_share": "share"}


def drill_down(
    history: History,
    before: CheckpointRef,
    after: CheckpointRef,
    *,
    name: str,
    kind: str,
    axis: int,
    parts: int | None,
    quiet: bool,
    rebuilt: Rebuilt,
) -> DiffTable:
    """Return a row for each index along `axis`, or for each of `parts` equal parts of it, all of which are peers; the
    most unusual first.

    Figures are exact, in float64; norms and changes are over the elements that are finite on both sides. Raises
    NotFoundError for a tensor that is missing on a side, MismatchError when the two shapes differ, SetupError for an
    axis or a number of parts that the tensor does not have.
    """
    sides = select(history, before, after, kinds=escape(kind), names=escape(name), rebuilt=rebuilt)
    held = {extent: elements for step in rebuilt.values() for extent, elements in step.held.items()}
    found = [next(iter(side.values()), None) for side in sides]
    left, right = found
    if left is None or right is None:
        where = before if left is None else after
        raise NotFoundError(f"checkpoint {where} has no {kind} {name!r}")
    if left.shape != right.shape:
        raise MismatchError(f"{kind} {name!r} has shape {left.shape} in {before}, {right.shape} in {after}")
    groups = _Groups(left.shape, axis, parts, what=f"{kind} {left.name!r}")
    sums = _Sums(groups.count)
    at = 0
    with ByteProgress(left.nbytes + right.nbytes, description=f"diff of {left.name}", quiet=quiet) as bar:
        pairs = side_by_side(history.root, (left, right), bar.advance, most_numel=_CHUNK_NUMEL, held=held)
        for one, other in pairs:
            sums.add(groups.of(at, one.numel()), one.double(), other.double())
            at += one.numel()
    note = f"{before} to {after}: {kind} {left.name} {list(left.shape)} along axis {axis}; {MEANING}"
    table = sums.table(groups.size_of_each(left.numel), label=lambda i: f"{left.name}[{groups.label(i)}]", kind=kind)
    return DiffTable(table, formats=_FORMATS, note=note)


class _Groups:
    """Maps each element of a flattened tensor to its index, or part, along an axis."""

    def __init__(self, shape: tuple[int, ...], axis: int, parts: int | None, *, what: str) -> None:
        if not -len(shape) <= axis < len(shape):
            raise SetupError(f"{what} has shape {shape}: there is no axis {axis}")
        length = shape[axis]
        if parts is not None and (parts < 1 or length % parts):
            raise SetupError(
                f"{what} has {length} indices along axis {axis}: they can't be cut into {parts} equal parts"
            )
        self.count = length if parts is None else parts
        self._axis = axis % len(shape)
        self._stride = math.prod(shape[self._axis + 1 :])
        self._length = length
        self._width = length // self.count if self.count else 1

    def of(self, start: int, numel: int) -> torch.Tensor:
        """Return the groups of elements [start, start + numel)."""
        index = torch.arange(start, start + numel)
        return (
            index.div_(self._stride, rounding_mode="floor")
            .remainder_(self._length)
            .div_(self._width, rounding_mode="floor")
        )

    def label(self, group: int) -> str:
        """Return the group as one would index the tensor: ':, 3' or '0:64'."""
        index = str(group) if self._width == 1 else f"{group * self._width}:{(group + 1) * self._width}"
        return ":, " * self._axis + index

    def size_of_each(self, numel: int) -> int:
        """Return the number of elements in each group of a tensor of `numel` elements."""
        return numel // self.count if self.count else 0


class _Sums:
    """Running sums for each group."""

    def __init__(self, count: int) -> None:
        self._sums = {
            key: torch.zeros(count, dtype=torch.float64)
            for key in ("before", "after", "update", "dot", "max", "changed", "flips", "finite")
        }

    def add(self, group: torch.Tensor, before: torch.Tensor, after: torch.Tensor) -> None:
        """Add flat float64 tensors of equal length whose elements belong to these groups."""
        finite = before.isfinite() & after.isfinite()
        same = (before == after) | (before.isnan() & after.isnan())
        self._sums["changed"].index_add_(0, group, (~same).double())
        self._sums["finite"].index_add_(0, group, finite.double())
        group, before, after = group[finite], before[finite], after[finite]
        update, products = after - before, before * after
        self._sums["before"].index_add_(0, group, before.square())
        self._sums["after"].index_add_(0, group, after.square())
        self._sums["update"].index_add_(0, group, update.square())
        self._sums["dot"].index_add_(0, group, products)
        self._sums["flips"].index_add_(0, group, (products < 0).double())
        self._sums["max"].scatter_reduce_(0, group, update.abs(), "amax")

    def table(self, size: int, *, label: Callable[[int], str], kind: str) -> pa.Table:
        """Return the rows, the most unusual first; each group has `size` elements.

        A group without an element that is finite on both sides stands above the others; its figures are null, except
        for the changed share."""
        sums = {key: total.numpy() for key, total in self._sums.items()}
        update_norm = metrics.norm(sums["update"])
        relative = metrics.relative_update(sums["update"], sums["before"])
        unknown = (sums["finite"] == 0) & (size > 0)
        norm_before, norm_after = metrics.norm(sums["before"]), metrics.norm(sums["after"])
        numel = np.full(len(unknown), float(size))
        typical = metrics.typical_size(np.maximum(norm_before, norm_after) / math.sqrt(max(size, 1)), numel)
        moved = metrics.movement(sums["update"], sums["before"], numel, typical)
        times_usual = metrics.times_usual(moved, [kind] * len(moved))
        order = np.lexsort((-relative, -times_usual, ~unknown))
        figures = {
            "times_usual": times_usual,
            "relative_update": relative,
            "update_norm": update_norm,
            "cosine": metrics.cosine(sums["dot"], sums["before"], sums["after"]),
            "max_change": sums["max"],
            "changed_share": metrics.changed_share(sums["changed"], size),
            "sign_flips": sums["flips"].astype(np.int64),
            "norm_before": norm_before,
            "norm_after": norm_after,
        }
        columns = {
            "name": pa.array([label(i) for i in order.tolist()], pa.string()),
            "kind": pa.array([kind] * len(order), pa.string()),
            "index": pa.array(order.astype(np.int64)),
        }
        for name, values in figures.items():
            mask = None if name == "changed_share" else unknown[order]
            columns[name] = pa.array(values[order], mask=mask, from_pandas=True)
        return pa.table(columns)
