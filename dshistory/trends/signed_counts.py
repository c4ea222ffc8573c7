"""Counts the elements of a tensor by sign and power of two, at each checkpoint of a lineage, from the tensor itself."""

from collections.abc import Sequence
from glob import escape
from typing import Any, Final

import pyarrow as pa
import torch

from catalog.history import History
from catalog.read.fragments import StoredTensor
from catalog.records import CheckpointRef
from dshistory.comparison.diff import select
from dshistory.display.progress import ByteProgress
from dshistory.tensors.stream import FragmentStream

__all__ = ["signed_counts"]

_SCHEMA: Final = pa.schema(
    [
        ("run", pa.string()),
        ("step", pa.int64()),
        ("sign", pa.int8()),
        ("exponent", pa.int64()),
        ("elements", pa.int64()),
        ("share", pa.float64()),
    ]
)
_LEAST, _MOST = -52, 11
"""The exponents of the statistics: smaller and larger magnitudes count with these."""
_WIDTH: Final = _MOST - _LEAST + 1
_ZERO: Final = _WIDTH
"""The place of zeros, between the negative bins, the largest magnitude first, and the positive ones."""


def signed_counts(history: History, path: Sequence[CheckpointRef], *, name: str, kind: str, quiet: bool) -> pa.Table:
    """Return the columns run, step, sign, exponent, elements and share of `HistogramTable`: rows for what occurs.

    A checkpoint without the tensor has no rows; one with the bytes of the checkpoint before is not read again.
    NotFoundError, with the nearest names, where no checkpoint has it."""
    stored = [
        next(iter(side.values()), None) for side in select(history, *path, kinds=escape(kind), names=escape(name))
    ]
    rows: list[dict[str, Any]] = []
    total = sum(tensor.nbytes for tensor in stored if tensor is not None)
    last: tuple[StoredTensor, torch.Tensor] | None = None
    with ByteProgress(total, description=f"histogram {name}", quiet=quiet) as bar:
        for ref, tensor in zip(path, stored, strict=True):
            if tensor is None:
                continue
            counts = last[1] if last is not None and last[0].same_bytes(tensor) else _counts(history, tensor)
            bar.advance(tensor.nbytes)
            last = (tensor, counts)
            finite = max(1, int(counts.sum()))
            rows += [
                {"run": ref.run, "step": ref.step, **_bin(place), "elements": count, "share": count / finite}
                for place, count in enumerate(counts.tolist())
                if count
            ]
    return pa.Table.from_pylist(rows, schema=_SCHEMA)


def _bin(place: int) -> dict[str, int | None]:
    if place == _ZERO:
        return {"sign": 0, "exponent": None}
    away = abs(place - _ZERO) - 1
    return {"sign": 1 if place > _ZERO else -1, "exponent": _LEAST + away}


def _counts(history: History, tensor: StoredTensor) -> torch.Tensor:
    """Return how many finite elements are in each bin, int64 (2 * _WIDTH + 1,)."""
    counts = torch.zeros(2 * _WIDTH + 1, dtype=torch.int64)
    stream = FragmentStream(history.root, tensor)
    while numel := stream.ready():
        values = stream.take(numel).double()
        values = values[values.isfinite()]
        # frexp's mantissa is in [0.5, 1).
        exponents = torch.frexp(values).exponent.sub_(1).clamp_(_LEAST, _MOST)
        places = _ZERO + values.sign().long() * (exponents - _LEAST + 1)
        counts += torch.bincount(places, minlength=len(counts))
    return counts
