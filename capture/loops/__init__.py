"""Training loops: when a step begins and ends, and which State Providers hold its state; one folder for each framework.

A loop calls its session through `LoopEvents` and decides nothing about snapshots.
"""

__all__: list[str] = []
