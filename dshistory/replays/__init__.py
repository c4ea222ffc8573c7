"""Runs beside each other: replays of a step, where two runs part, the tree of runs, and what exactness needs."""

__all__: list[str] = []
