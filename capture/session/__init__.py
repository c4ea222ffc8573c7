"""A run being captured: which steps become snapshots, the barrier before each update, and the threads that finish the work.

What a snapshot consists of is the matter of `capture.snapshot`; when a step ends is told by `capture.loops`.
"""

__all__: list[str] = []
