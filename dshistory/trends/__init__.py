"""Questions about all checkpoints of a run: trajectories, layers, distances, anomalies, and the first checkpoint at which something holds.

Questions about two checkpoints are in `dshistory.comparison`.
"""

__all__: list[str] = []
