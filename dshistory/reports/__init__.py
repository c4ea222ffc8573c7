"""What a history holds, from the catalog alone: the log of checkpoints, runs, parts, tags, damage; and filling in statistics.

Nothing here reads the elements of a tensor, except `analyze`, which has the catalog do it.
"""

__all__: list[str] = []
