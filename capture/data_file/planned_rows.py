"""The manifest rows of a plan. Only the checksums and the file's name differ from one snapshot to the next."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa

import native
from catalog.format.extents import SCHEMA
from catalog.records import CHECKSUM_BYTES

__all__ = ["PlannedRows"]


class PlannedRows:
    """The rows of every part and every pad of a plan, in file order. `parts` are rows as dicts, without `file` and
    `checksum`, in the plan's order; `pads` are (offset, nbytes).
    """

    def __init__(self, parts: Sequence[Mapping[str, Any]], pads: Sequence[tuple[int, int]]) -> None:
        rows = [*parts, *(_pad(i, offset, nbytes) for i, (offset, nbytes) in enumerate(pads))]
        order = sorted(range(len(rows)), key=lambda i: (rows[i]["offset"], rows[i]["nbytes"]))
        self._columns = {
            name: pa.array([rows[i][name] for i in order], SCHEMA.field(name).type)
            for name in SCHEMA.names
            if name not in ("file", "checksum")
        }
        self._order = np.array(order, dtype=np.int64)
        zeros = b"".join(_checksum_of_zeros(nbytes) for _, nbytes in pads)
        self._digests_of_pads = np.frombuffer(zeros, np.uint8).reshape(-1, CHECKSUM_BYTES)

    def table(self, checksums: bytes, *, file: str) -> pa.Table:
        """Return the rows, with the checksums of the parts, CHECKSUM_BYTES each in the plan's order."""
        digests = np.concatenate(
            [np.frombuffer(checksums, np.uint8).reshape(-1, CHECKSUM_BYTES), self._digests_of_pads]
        )
        data = pa.py_buffer(np.ascontiguousarray(digests[self._order]))
        columns = {
            **self._columns,
            "file": pa.repeat(pa.scalar(file), len(self._order)),
            "checksum": pa.Array.from_buffers(SCHEMA.field("checksum").type, len(self._order), [None, data]),
        }
        return pa.table({name: columns[name] for name in SCHEMA.names}, schema=SCHEMA)


def _pad(index: int, offset: int, nbytes: int) -> dict[str, Any]:
    return {
        "name": f"__pad__.{index}",
        "kind": "pad",
        "dtype": "U8",
        "shape": (nbytes,),
        "start": 0,
        "numel": nbytes,
        "offset": offset,
        "nbytes": nbytes,
        "placement": "rank_local",
        "aliases": (),
        "codec": "raw",
        "base": None,
    }


@lru_cache(maxsize=4096)
def _checksum_of_zeros(nbytes: int) -> bytes:
    return native.checksum(bytes(nbytes))
