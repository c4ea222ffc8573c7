"""Conversion of checkpoints to and from the formats of other programs: one writer and one reader for each format.

No foreign code is executed: an import unpickles only through `importing.safe_unpickle`.
"""

__all__: list[str] = []
