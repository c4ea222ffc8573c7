"""Names and patterns against what a checkpoint has: matching, and the nearest ones when nothing fits."""

from collections.abc import Collection, Iterable, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

from catalog.errors import NotFoundError

__all__ = ["Patterns", "matching", "nearest"]

Patterns = str | Sequence[str]
"""One glob pattern (`*.mlp.*`) or several; a name that equals the pattern always matches."""


def matching(names: Collection[str], patterns: Patterns, *, what: str, where: str) -> set[str]:
    """The names that fit one of the patterns. Raises NotFoundError, naming the nearest, for a pattern that fits
    none."""
    wanted = [patterns] if isinstance(patterns, str) else patterns
    found: set[str] = set()
    for pattern in wanted:
        hits = {name for name in names if name == pattern or fnmatchcase(name, pattern)}
        if not hits:
            raise NotFoundError(f"no {what} fits {pattern!r} in {where}; {nearest(pattern.strip('*?.'), names)}")
        found |= hits
    return found


def nearest(wanted: str, names: Iterable[str], *, count: int = 5) -> str:
    """A clause for an error: the names closest to the one that is not there."""
    known = sorted(set(names))
    if not known:
        return "there are none"
    containing = [name for name in known if wanted and wanted in name]
    close = (get_close_matches(wanted, known, n=count, cutoff=0.4) or containing or known)[:count]
    return f"the nearest {'are' if len(close) > 1 else 'is'} {', '.join(close)}"
