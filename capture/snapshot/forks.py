"""Counts the forks of this process. What is written while a child lives is copied, page by page."""

import os

__all__ = ["fork_count"]

_forks = 0


def fork_count() -> int:
    """Return how often this process has forked."""
    return _forks


def _count() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_parent=_count)
