"""A run being captured: which steps become snapshots, the barrier before each update, and the session object of users.

`capture.loops` tells when a step ends, and `capture.snapshot` makes one snapshot. `capture.publishing` finishes it in
the background, and `capture.redo_log` records what the updates consume.
"""

__all__: list[str] = []
