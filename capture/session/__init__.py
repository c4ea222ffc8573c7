"""A run being captured: which steps become snapshots, the barrier before each update, and the threads that finish the
work.

`capture.snapshot` makes one snapshot; `capture.loops` tells when a step ends.
"""

__all__: list[str] = []
