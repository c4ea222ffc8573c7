"""Inside one tensor: which rows, columns, heads or tokens moved most between two checkpoints, streamed in bounded memory."""

import math
from collections.abc import Callable
from glob import escape
from typing import Final

import pyarrow as pa
import torch

from catalog.errors import MismatchError, NotFoundError, SetupError
from catalog.history import History
from catalog.records import CheckpointRef
from dshistory.comparison.diff import DiffTable, select
from dshistory.display.formats import Format
from dshistory.display.progress import ByteProgress
from dshistory.tensors.stream import FragmentStream

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
) -> DiffTable:
    """A row for each index along `axis`, or for each of `parts` equal parts of it, the most moved first; exact, in float64.
    Norms and changes are over the elements finite on both sides.

    NotFoundError for a tensor that is not there, MismatchError when its shapes differ, SetupError for an axis or a number of
    parts that it does not have.
    """
    sides = select(history, before, after, kinds=escape(kind), names=escape(name))
    found = [next(iter(side.values()), None) for side in sides]
    left, right = found
    if left is None or right is None:
        where = before if left is None else after
        raise NotFoundError(f"checkpoint {where} has no {kind} {name!r}")
    if left.shape != right.shape:
        raise MismatchError(f"{kind} {name!r} has shape {left.shape} in {before}, {right.shape} in {after}")
    groups = _Groups(left.shape, axis, parts, what=f"{kind} {left.name!r}")
    sums = _Sums(groups.count)
    streams = FragmentStream(history.root, left), FragmentStream(history.root, right)
    at = 0
    with ByteProgress(left.nbytes + right.nbytes, description=f"diff of {left.name}", quiet=quiet) as bar:
        while numel := min(_CHUNK_NUMEL, *(stream.ready() for stream in streams)):
            pair = [stream.take(numel) for stream in streams]
            sums.add(groups.of(at, numel), pair[0].double(), pair[1].double())
            at += numel
            bar.advance(sum(part.nbytes for part in pair))
    note = f"{before} to {after}: {kind} {left.name} {list(left.shape)} along axis {axis}"
    table = sums.table(groups.size_of_each(left.numel), label=lambda i: f"{left.name}[{groups.label(i)}]", kind=kind)
    return DiffTable(table, formats=_FORMATS, note=note)


class _Groups:
    """To which index, or part, along an axis each element of a flattened tensor belongs."""

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
        """Of elements [start, start + numel)."""
        index = torch.arange(start, start + numel)
        return (
            index.div_(self._stride, rounding_mode="floor")
            .remainder_(self._length)
            .div_(self._width, rounding_mode="floor")
        )

    def label(self, group: int) -> str:
        """The group as one would index the tensor."""
        index = str(group) if self._width == 1 else f"{group * self._width}:{(group + 1) * self._width}"
        return ":, " * self._axis + index

    def size_of_each(self, numel: int) -> int:
        """How many elements a group has."""
        return numel // self.count if self.count else 0


class _Sums:
    """Running sums for each group."""

    def __init__(self, count: int) -> None:
        self._sums = {
            key: torch.zeros(count, dtype=torch.float64)
            for key in ("before", "after", "update", "dot", "max", "changed", "flips", "finite")
        }

    def add(self, group: torch.Tensor, before: torch.Tensor, after: torch.Tensor) -> None:
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
        """The rows, the most moved first, above them those where no element is finite on both sides: of these only the changed
        share is known. `size` elements in each group."""
        sums = self._sums
        before, after, update = (sums[key].sqrt() for key in ("before", "after", "update"))
        relative = torch.where(update == 0, torch.zeros_like(update), update / before)
        cosine = (sums["dot"] / (before * after)).clamp(-1, 1)
        unknown = (sums["finite"] == 0) & (size > 0)
        order = sorted(range(len(update)), key=lambda i: (not unknown[i], -float(relative[i]), -float(update[i]), i))
        columns = {
            "name": pa.array([label(i) for i in order], pa.string()),
            "kind": pa.array([kind] * len(order), pa.string()),
            "index": pa.array(order, pa.int64()),
            "relative_update": relative,
            "update_norm": update,
            "cosine": cosine,
            "max_change": sums["max"],
            "changed_share": sums["changed"] / max(1, size),
            "sign_flips": sums["flips"].long(),
            "norm_before": before,
            "norm_after": after,
        }
        known, unknown = torch.zeros_like(unknown), unknown[order]

        def listed(name: str, column: torch.Tensor) -> pa.Array:
            mask = known if name == "changed_share" else unknown
            return pa.array(column[order].numpy(), mask=mask.numpy(), from_pandas=True)

        return pa.table(
            {name: column if isinstance(column, pa.Array) else listed(name, column) for name, column in columns.items()}
        )
