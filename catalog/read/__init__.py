"""From files to what they say together: runs, checkpoints whose manifests agree, logical tensors, and the bytes of fragments.

Everything is read from the files alone. The DuckDB index stands above, in `catalog.index.index`, and nothing here asks it.
"""

__all__: list[str] = []
