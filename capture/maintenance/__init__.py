"""Maintenance of a run while it is trained: what its policy does not keep is removed, and cold checkpoints are packed.

Nothing here knows a snapshot: it is asked for room in a budget, and told which steps are published. The work itself is
that of `catalog.retention` and `catalog.compaction`, which do it after a training too.
"""

__all__: list[str] = []
