"""Matches names against patterns, and orders names by the numbers in them."""

import re
from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase

from catalog.errors import NotFoundError
from catalog.nearest_names import nearest

__all__ = ["Patterns", "matching", "natural_order"]

Patterns = str | Sequence[str]
"""One glob pattern (`*.mlp.*`) or several. A pattern that equals a name always matches it, and the name of a module or
layer (`blocks.0`) matches all that is inside it."""


def matching(names: Collection[str], patterns: Patterns, *, what: str, where: str) -> set[str]:
    """Return the names that match one of the patterns. Raises NotFoundError, with the nearest names, for a pattern that
    matches none."""
    wanted = [patterns] if isinstance(patterns, str) else patterns
    found: set[str] = set()
    for pattern in wanted:
        inside = f"{pattern}."
        hits = {name for name in names if name == pattern or name.startswith(inside) or fnmatchcase(name, pattern)}
        if not hits:
            raise NotFoundError(f"no {what} fits {pattern!r} in {where}; {nearest(pattern.strip('*?.'), names)}")
        found |= hits
    return found


def natural_order(name: str) -> list[tuple[int, int, str]]:
    """Return a sort key by which the numbers in names count as numbers: h.2 comes before h.10."""
    return [(1, int(part), "") if part.isdecimal() else (0, 0, part) for part in re.split(r"([0-9]+)", name)]
