"""The two kinds of checked files, read as docs/format.md describes them, without the catalog."""

import json
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from native import checksum

__all__ = ["checked_json", "checked_table"]


def checked_json(data: bytes) -> dict[str, Any]:
    """Return the content of canonical JSON without its checksum, which is compared."""
    content: dict[str, Any] = json.loads(data)
    stored = content.pop("checksum")

    def canonical(value: Any) -> bytes:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()

    assert checksum(canonical(content)).hex() == stored
    assert canonical({**content, "checksum": stored}) == data
    return content


def checked_table(data: bytes) -> tuple[pa.Table, dict[str, str]]:
    """Return the rows and the facts of checked Parquet, whose checksum is compared."""
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    assert data[footer - 16 : footer] == checksum(data[: footer - 16] + data[footer:])
    facts = pq.ParquetFile(pa.BufferReader(data)).metadata.metadata
    return pq.read_table(pa.BufferReader(data)), {key.decode(): value.decode() for key, value in facts.items()}
