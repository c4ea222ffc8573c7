"""Writes a foreign checkpoint into a run as one rank's part, with one tensor in memory at a time.

An unchanged tensor becomes a reference. The header's length is fixed first, for as many entries as there can be. The
data follows as it is read, and the header is written last."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, BinaryIO, Final

import torch

import native
from capture.data_file.parts import HUGE, entry_key
from capture.state.objects import encode_object
from catalog.format.dtypes import DTYPES
from catalog.format.extents import extent_table
from catalog.format.header import Entry, encode_header, entries_json, header_bytes_needed
from catalog.records import Extent
from catalog.run_writer import RunWriter
from dshistory.conversion.importing.foreign_checkpoint import ForeignCheckpoint, ForeignTensor, in_memory

__all__ = ["StoredBefore", "write_checkpoint"]

_ALIGN: Final = 4096
_LEAST_REFERENCE_BYTES: Final = 64 << 10

StoredBefore = Mapping[tuple[str, str], Extent]
"""The extents of the checkpoint before, by (kind, name)."""


def write_checkpoint(
    writer: RunWriter, step: int, found: ForeignCheckpoint, *, before: StoredBefore, advance: Callable[[int], None]
) -> dict[tuple[str, str], Extent]:
    """Publish and commit `found` as `step`; return the extents of its tensors. Tensors that equal the checkpoint before
    are not written again."""
    data_tmp = writer.begin(step)
    try:
        with data_tmp.open("xb") as file:
            content = _Content(file, writer.paths.relative(writer.paths.data(writer.run, step, writer.rank)), before)
            extents = content.write([*found.tensors, *_object_tensors(found.objects)], _metadata(writer, step), advance)
        writer.publish_part(step, data_tmp=data_tmp, extents=extent_table(extents))
    except BaseException as error:
        writer.discard(step, reason=str(error))
        raise
    writer.try_commit(step)
    return {(extent.kind, extent.name): extent for extent in extents}


@dataclass
class _Content:
    file: BinaryIO
    name: str
    before: StoredBefore

    def write(
        self, tensors: list[ForeignTensor], metadata: Mapping[str, str], advance: Callable[[int], None]
    ) -> list[Extent]:
        # By decreasing item size, so that every tensor begins at a multiple of its item size.
        ordered = sorted(tensors, key=lambda tensor: (-DTYPES[tensor.dtype], tensor.kind, tensor.name))
        pad = Entry("__pad__.0", "U8", (_ALIGN,), HUGE, HUGE)
        widest = [Entry(_key(tensor), tensor.dtype, tensor.shape, HUGE, HUGE) for tensor in ordered]
        start = -(-header_bytes_needed([pad, *widest], metadata=metadata) // _ALIGN) * _ALIGN
        self.file.seek(start)
        own: list[Extent] = []
        references: list[Extent] = []
        for tensor in ordered:
            extent = self._write(tensor)
            (own if extent.file == self.name else references).append(extent)
            advance(tensor.nbytes)
        entries = [Entry(_key_of(e), e.dtype, e.shape, e.offset - start, e.offset - start + e.nbytes) for e in own]
        padding = bytes(-self.file.tell() % _ALIGN)
        if padding:
            own.append(self._bytes("__pad__.0", "pad", padding))
            entries.append(Entry("__pad__.0", "U8", (len(padding),), own[-1].offset - start, self.file.tell() - start))
        header = encode_header([entries_json(entries)], metadata=metadata, data_start=start)
        self.file.seek(0)
        return [self._bytes("__header__", "header", header), *own, *references]

    def _write(self, tensor: ForeignTensor) -> Extent:
        data = tensor.read().contiguous().view(-1).view(torch.uint8).numpy()
        # An empty view of a mapped file has no address to compute a checksum from.
        checksum = native.checksum(data if data.size else b"")
        last = self.before.get((tensor.kind, tensor.name))
        if (
            last is not None
            and data.nbytes >= _LEAST_REFERENCE_BYTES
            and (last.checksum, last.dtype, last.shape) == (checksum, tensor.dtype, tensor.shape)
        ):
            return replace(last, aliases=tensor.aliases)
        offset = self.file.tell()
        self.file.write(data.data)
        return Extent(
            name=tensor.name,
            kind=tensor.kind,
            dtype=tensor.dtype,
            shape=tensor.shape,
            start=0,
            numel=data.nbytes // DTYPES[tensor.dtype],
            file=self.name,
            offset=offset,
            nbytes=data.nbytes,
            checksum=checksum,
            placement="replicated",
            aliases=tensor.aliases,
        )

    def _bytes(self, name: str, kind: str, data: bytes) -> Extent:
        offset = self.file.tell()
        self.file.write(data)
        return Extent(
            name,
            kind,
            "U8",
            (len(data),),
            0,
            len(data),
            self.name,
            offset,
            len(data),
            native.checksum(data),
            "rank_local",
        )


def _object_tensors(objects: Mapping[str, Any]) -> list[ForeignTensor]:
    """Return the stored form of objects: JSON bytes, and the tensors in them."""
    found = []
    for name, value in objects.items():
        encoded = encode_object(name, value)
        found.append(in_memory("object", name, torch.frombuffer(bytearray(encoded.json), dtype=torch.uint8)))
        found += [in_memory("object_tensor", entry, tensor) for entry, tensor in encoded.tensors.items()]
    return found


def _metadata(writer: RunWriter, step: int) -> dict[str, str]:
    return {"format": "dshistory-1", "run": writer.run, "step": str(step), "rank": str(writer.rank)}


def _key(tensor: ForeignTensor) -> str:
    return f"{tensor.kind}/{tensor.name}"


def _key_of(extent: Extent) -> str:
    return entry_key(extent.kind, extent.name, extent.shape, extent.start, extent.numel)
