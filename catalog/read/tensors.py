"""Logical tensors as all their fragments together make them: merged over ranks, checked against each other."""

from collections.abc import Sequence
from math import prod
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

import native
from catalog.errors import FormatError
from catalog.format.extents import element_counts, extent_records
from catalog.read.checkpoint import Checkpoint
from catalog.records import Extent

__all__ = ["SCHEMA", "logical_tensors"]

SCHEMA = pa.schema(
    [
        ("name", pa.string()),
        ("kind", pa.string()),
        ("dtype", pa.string()),
        ("shape", pa.list_(pa.int64())),
        ("numel", pa.int64()),
        ("nbytes", pa.int64()),
        ("placement", pa.string()),
        ("fragments", pa.int64()),
        ("hash", pa.binary()),
        ("covered", pa.int64()),
    ]
)
"""`hash` tells two states apart: the checksum of a tensor's one fragment, else the checksum of the list of its fragments'
starts and checksums. `covered`: how many of `numel` elements the fragments hold."""


def logical_tensors(checkpoint: Checkpoint, *, where: str) -> pa.Table:
    """All tensors and objects of a checkpoint, header and padding left out; FormatError when the fragments of one
    contradict each other or overlap. Of rank_local ones the fragments of all ranks count, each rank by itself.
    """
    rows = pa.concat_tables(
        manifest.table.append_column("rank", pa.repeat(pa.scalar(manifest.rank, pa.int64()), manifest.table.num_rows))
        for manifest in checkpoint.manifests
    )
    rows = rows.filter(pc.invert(pc.is_in(rows["kind"], pa.array(["header", "pad"]))))
    key = pc.binary_join_element_wise(rows["kind"], rows["name"], "/")
    counts = key.value_counts()
    shared = counts.field("values").filter(pc.greater(counts.field("counts"), 1))
    several = pc.is_in(key, shared)
    groups: dict[tuple[str, str], list[tuple[int, Extent]]] = {}
    split = rows.filter(several)
    for rank, extent in zip(split["rank"].to_pylist(), extent_records(split), strict=True):
        groups.setdefault((extent.kind, extent.name), []).append((rank, extent))
    merged = pa.Table.from_pylist([_merged(members, where=where) for members in groups.values()], schema=SCHEMA)
    return pa.concat_tables([_single(rows.filter(pc.invert(several))), merged])


def _single(rows: pa.Table) -> pa.Table:
    """Tensors of one fragment: the row says it all."""
    columns = {name: rows[name] for name in ("name", "kind", "dtype", "nbytes", "placement")}
    columns |= {
        "shape": rows["shape"].cast(SCHEMA.field("shape").type),
        "numel": pa.array(element_counts(rows["shape"])),
        "fragments": pa.repeat(pa.scalar(1, pa.int64()), rows.num_rows),
        "hash": rows["checksum"].cast(pa.binary()),
        "covered": rows["numel"],
    }
    return pa.table({name: columns[name] for name in SCHEMA.names}, schema=SCHEMA)


def _merged(members: Sequence[tuple[int, Extent]], *, where: str) -> dict[str, Any]:
    first = members[0][1]
    apart = first.placement == "rank_local"
    members = sorted(members, key=lambda member: (member[0] if apart else 0, member[1].start, member[1].numel))
    owner, end, covered = -1, 0, 0
    for rank, extent in members:
        if apart and rank != owner:
            # What is local to a rank may differ in form too: an object's JSON is as long as it is.
            owner, end, first = rank, 0, extent
        if (extent.dtype, extent.shape, extent.placement) != (first.dtype, first.shape, first.placement):
            raise FormatError(
                f"{where}: field shape of {first.kind}/{first.name}: fragments disagree: {first.dtype} {list(first.shape)} "
                f"{first.placement} and {extent.dtype} {list(extent.shape)} {extent.placement}"
            )
        if extent.start < end:
            raise FormatError(
                f"{where}: field start of {first.kind}/{first.name}: the fragment at {extent.start} overlaps the one before it, which ends at {end}"
            )
        end = extent.start + extent.numel
        if not apart or rank == members[0][0]:
            covered += extent.numel
    first = members[0][1]
    starts_and_checksums = (extent.start.to_bytes(8, "little") + extent.checksum for _, extent in members)
    return {
        "name": first.name,
        "kind": first.kind,
        "dtype": first.dtype,
        "shape": first.shape,
        "numel": prod(first.shape),
        "nbytes": sum(extent.nbytes for _, extent in members),
        "placement": first.placement,
        "fragments": len(members),
        "hash": native.checksum(b"".join(starts_and_checksums)),
        "covered": covered,
    }
