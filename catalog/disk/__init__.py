"""Files that survive a power cut: durable publication, file locks, and JSON and Parquet files with their own checksums.

Nothing here knows a manifest, a run or a step: `catalog.format` gives the files their meaning.
"""

__all__: list[str] = []
