"""The DuckDB index of a history. Every query sees the index and the files that are not in it yet.

The index is derived: it can be deleted and rebuilt from the files at any time. Only `catalog.index.database` opens
DuckDB.
"""

__all__: list[str] = []
