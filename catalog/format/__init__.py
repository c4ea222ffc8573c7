"""The files of a history, one module for each kind: how it is encoded, and how it is parsed strictly. docs/format.md says it in words.

A module here reads and writes one file at a time. What several files say together is put together in `catalog.read`.
"""

__all__: list[str] = []
