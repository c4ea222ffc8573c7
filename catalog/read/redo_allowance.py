"""Bounds what the records of a redo log may ask for: a few bytes of a hostile segment may stand for much memory.

A constant plane of a block is one byte, however many elements it stands for. What a record has is therefore compared
with the checkpoint from which its step is made before any memory is taken for it.
"""

from collections.abc import Iterable, Mapping
from itertools import groupby
from math import prod
from typing import Final, TypeAlias

from catalog.errors import FormatError
from catalog.format.dtypes import DTYPES
from catalog.format.redo_segment import RedoFlat
from catalog.read.redo import RedoRecord

__all__ = ["MOST_MORE_BYTES", "Form", "RedoAllowance", "require_fitting_flats"]

MOST_MORE_BYTES: Final = 256 << 20
"""Buffers and objects that were recorded may take so much more than the buffers of the checkpoint: a buffer may have
grown since, and an object of a redo log has a few MiB at most."""

_MOST_PADDING: Final = 1 << 20
"""Flat tensors have together at most so many elements beside twice those of all parameters: partitions are padded a
little."""

Form: TypeAlias = tuple[str, tuple[int, ...]]
"""The dtype and the shape of a tensor."""


class RedoAllowance:
    """Bounds what the records after one checkpoint may take, all that is held of them together.

    gradients: the forms of what the optimizer updates, by name; each gradient has that of its tensor
    buffer_bytes: what the buffers of the checkpoint take
    """

    def __init__(self, gradients: Mapping[str, Form], *, buffer_bytes: int) -> None:
        self._gradients = gradients
        self._most_bytes = buffer_bytes + MOST_MORE_BYTES
        self._held: dict[tuple[str, str], int] = {}

    def admit(self, record: RedoRecord) -> None:
        """Take note of the tensors of the next record, of which nothing is read. FormatError when one of them is there
        twice, a gradient has not the form of its tensor, or buffers and objects take more than is allowed."""
        where = f"{record.segment.path}: step {record.step}"
        seen: set[tuple[str, str]] = set()
        for index, _ in groupby(block.tensor for block in record.content.blocks):
            tensor = record.segment.tensors[index]
            key = tensor.kind, tensor.name
            what = f"{where}: {tensor.kind} of {tensor.name!r}"
            if key in seen:
                raise FormatError(f"{what}: is there twice, which no training records")
            seen.add(key)
            if tensor.kind != "gradient":
                self._held[key] = DTYPES[tensor.dtype] * prod(tensor.shape)
            elif (found := (tensor.dtype, tensor.shape)) != (known := self._gradients.get(tensor.name)):
                raise FormatError(f"{what}: is {_told(found)}, where the checkpoint has {_told(known)}")
        total = sum(self._held.values())
        if total > self._most_bytes:
            raise FormatError(
                f"{where}: the buffers and objects that are recorded since the checkpoint take {total} bytes, "
                f"{self._most_bytes} are allowed"
            )


def require_fitting_flats(flats: Iterable[RedoFlat], *, elements: int, where: str) -> None:
    """Raise FormatError, which begins with `where`, when the flat tensors that are updated for all ranks are together
    larger than those of a training with so many elements of parameters can be."""
    found, most = sum(prod(flat.shape) for flat in flats), 2 * elements + _MOST_PADDING
    if found > most:
        raise FormatError(
            f"{where}: its flat tensors have {found} elements together, where the parameters of the checkpoint have "
            f"{elements}, and {most} are allowed with padding"
        )


def _told(form: Form | None) -> str:
    return "no such tensor" if form is None else f"{form[0]} of shape {list(form[1])}"
