"""Computes what can be known long after a training: averages of its checkpoints, and metrics and causes of its losses.

Nothing is exported here; `dshistory.explorer` is the public interface.
"""

__all__: list[str] = []
