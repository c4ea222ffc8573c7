"""Files that survive a power cut: durable publication, file locks, and JSON and Parquet files that carry their checksums.

What a file means is said in `catalog.format`: nothing here knows a manifest, a run or a step.
"""

__all__: list[str] = []
