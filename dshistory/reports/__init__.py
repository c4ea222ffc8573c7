"""Reports on the content of a history: its checkpoints, runs, parts, tags and damage, and missing statistics.

Everything comes from the catalog; only `verify` and `analyze` have it read the data of tensors.
"""

__all__: list[str] = []
