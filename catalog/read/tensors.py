"""Logical tensors as a table: the fragments of all ranks merged and checked against each other."""

from collections.abc import Sequence
from itertools import chain
from math import prod
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

import native
from catalog.format.extents import element_counts, extent_records
from catalog.read.checkpoint import Checkpoint
from catalog.read.fragments import elements_held
from catalog.read.provider_tensors import with_provider_tensors
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
"""`hash` tells two states apart: it is the checksum of a tensor's one fragment, or the checksum of the list of its
fragments' starts and checksums. `covered` is how many of `numel` elements the fragments hold.
"""


def logical_tensors(checkpoint: Checkpoint, *, where: str) -> pa.Table:
    """Return all tensors and objects of a checkpoint with the columns of SCHEMA; headers and padding are left out.
    Tensors of providers' objects are under the kind and name by which people look at them.

    The fragments of all ranks count. A rank_local tensor is checked for each rank by itself, and `covered` is that of
    the lowest rank. FormatError, which begins with `where`, when the fragments of one tensor disagree or overlap.
    """
    rows = pa.concat_tables(
        manifest.table.append_column("rank", pa.repeat(pa.scalar(manifest.rank, pa.int64()), manifest.table.num_rows))
        for manifest in checkpoint.manifests
    )
    rows = with_provider_tensors(rows.filter(pc.invert(pc.is_in(rows["kind"], pa.array(["header", "pad"])))))
    key = pc.binary_join_element_wise(rows["kind"], rows["name"], "/")
    counts = key.value_counts()
    shared = counts.field("values").filter(pc.greater(counts.field("counts"), 1))
    if not len(shared):
        # Most checkpoints of one rank are such, and registration reads them by the thousand.
        return _single(rows)
    several = pc.is_in(key, shared)
    groups: dict[tuple[str, str], list[tuple[int, Extent]]] = {}
    split = rows.filter(several)
    for rank, extent in zip(split["rank"].to_pylist(), extent_records(split), strict=True):
        groups.setdefault((extent.kind, extent.name), []).append((rank, extent))
    merged = pa.Table.from_pylist([_merged(members, where=where) for members in groups.values()], schema=SCHEMA)
    return pa.concat_tables([_single(rows.filter(pc.invert(several))), merged])


def _single(rows: pa.Table) -> pa.Table:
    """Return the tensors of one fragment each. Their rows are complete, so this works on whole columns."""
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
    # The copies of a rank_local entry may differ in form: an object's JSON has another length on each rank.
    apart = members[0][1].placement == "rank_local"
    by_rank: dict[int, list[Extent]] = {}
    for rank, extent in members:
        by_rank.setdefault(rank if apart else 0, []).append(extent)
    copies = [sorted(by_rank[rank], key=lambda extent: (extent.start, extent.numel)) for rank in sorted(by_rank)]
    covered = [elements_held(fragments, where=where) for fragments in copies]
    fragments = list(chain.from_iterable(copies))
    first = fragments[0]
    return {
        "name": first.name,
        "kind": first.kind,
        "dtype": first.dtype,
        "shape": first.shape,
        "numel": prod(first.shape),
        "nbytes": sum(extent.nbytes for extent in fragments),
        "placement": first.placement,
        "fragments": len(fragments),
        "hash": native.checksum(b"".join(extent.start.to_bytes(8, "little") + extent.checksum for extent in fragments)),
        "covered": covered[0],
    }
