"""The DuckDB index of a history, and what is not in it yet: every query sees both.

The index is derived: it can be deleted and rebuilt from the files at any time. Only `catalog.index.index.database` opens DuckDB.
"""

__all__: list[str] = []
