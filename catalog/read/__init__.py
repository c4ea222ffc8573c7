"""Reads a history's files: checkpoints whose manifests agree, logical tensors, and the bytes of their fragments.

Everything is read from the files alone. The DuckDB index, in `catalog.index`, is built on top and never asked here.
"""

__all__: list[str] = []
