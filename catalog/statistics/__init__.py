"""Statistics of committed checkpoints: computed from their bytes, and compared from one checkpoint to the next.

The file that keeps them is `catalog.format.statistics_file`; the tables that show them are in `catalog.index.index`.
"""

__all__: list[str] = []
