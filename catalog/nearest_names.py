"""Names the known names that are nearest to one that is not known, for an error message."""

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Final

__all__ = ["close_names", "nearest"]

_MOST_LISTED: Final = 8


def nearest(wanted: str, names: Iterable[str], *, count: int = 5) -> str:
    """Return a clause for an error message: up to `count` known names that are close to the missing one, or the first
    ones of all where none is."""
    known = sorted(set(names))
    close = close_names(wanted, known, count=count)
    if close:
        return f"the nearest {_verb(close)} {', '.join(close)}"
    if not known:
        return "there are none"
    more = f" and {len(known) - _MOST_LISTED} more" if len(known) > _MOST_LISTED else ""
    return f"there {_verb(known)} {', '.join(known[:_MOST_LISTED])}{more}"


def close_names(wanted: str, known: list[str], *, count: int) -> list[str]:
    """Return up to `count` known names that are close to the missing one, the closest first, or else contain it."""
    containing = [name for name in known if wanted and wanted in name]
    return (get_close_matches(wanted, known, n=count, cutoff=0.4) or containing)[:count]


def _verb(names: list[str]) -> str:
    return "is" if len(names) == 1 else "are"
