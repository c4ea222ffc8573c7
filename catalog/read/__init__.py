"""Reads what a history's files say: runs, checkpoints whose manifests agree, logical tensors, fingerprints, redo logs.

Everything is read from the files alone. The DuckDB index, in `catalog.index`, is built on top and never asked here.
"""

__all__: list[str] = []
