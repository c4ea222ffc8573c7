"""Checkpoints to other programs and from them: one writer and one reader for each format.

Nothing foreign is executed: what an import has to unpickle goes through `importing.safe_unpickle`.
"""

__all__: list[str] = []
