"""Statistics of committed checkpoints: computed from their bytes, and compared from one checkpoint to the next.

`catalog.format.statistics_file` stores them, and the tables in `catalog.index.schema` show them.
"""

__all__: list[str] = []
