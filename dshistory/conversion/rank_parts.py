"""Finds the files into which the ranks of a DeepSpeed training have written their parts, and those that are missing."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from catalog.errors import FormatError

__all__ = ["partition_count", "require_all_parts"]

_PART: Final = re.compile(r"((?:bf16_)?zero_pp_rank_)(\d+)(_mp_rank_\d+_?(?:optim|model)_states\.pt)")
"""The number of the data parallel rank, with what is before it and behind it."""


def partition_count(content: Any) -> int | None:
    """Return the number of ranks that the optimizer state was written by, of the content of one rank's file; None when
    the file does not tell."""
    state = content.get("optimizer_state_dict") if isinstance(content, Mapping) else None
    counts = state.get("partition_count") if isinstance(state, Mapping) else None
    numbers = [one for one in (counts if isinstance(counts, (list, tuple)) else [counts]) if type(one) is int]
    return max(numbers, default=None)


def require_all_parts(folder: Path, names: Iterable[str], count: int | None) -> None:
    """Raise FormatError, with the missing files, unless `names`, of files in `folder`, has those of all `count` ranks;
    None: of all up to the last one that is there."""
    matches = [match for match in map(_PART.fullmatch, names) if match is not None]
    for before, behind in sorted({(match[1], match[3]) for match in matches}):
        found = {int(match[2]) for match in matches if (match[1], match[3]) == (before, behind)}
        wanted = range(max(found) + 1 if count is None else count)
        missing = [f"{before}{rank}{behind}" for rank in wanted if rank not in found]
        if missing:
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            raise FormatError(
                f"{folder}: {', '.join(missing[:3])}{more} is missing: {len(found)} of the {len(wanted)} ranks that "
                "wrote the optimizer state are there; take the whole folder"
            )
