"""All checkpoints of a run: trajectories, layers, histograms, distances, anomalies, and the first checkpoint of a
change.

Questions about two checkpoints are in `dshistory.comparison`, which knows nothing of this package.
"""

__all__: list[str] = []
