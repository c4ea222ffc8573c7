"""The background threads that finish what the training thread has begun: publish, commit, register, and statistics.

The committer owns the writing end of a run; the other threads and logs here are its own. It decides nothing about which
steps are captured, and keeps failures for the session to report.
"""

__all__: list[str] = []
