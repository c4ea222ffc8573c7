"""All checkpoints of a run: trajectories, layers, histograms, distances, anomalies and bisection.

Questions about two checkpoints are in `dshistory.comparison`, which knows nothing of this package.
"""

__all__: list[str] = []
