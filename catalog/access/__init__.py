"""Knows who writes or reads a run now, so that nothing is removed beneath them: locks of writers and pins of readers.

Whoever removes something asks here first. Nothing here reads a checkpoint.
"""

__all__: list[str] = []
