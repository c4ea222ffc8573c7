"""The row of replicated tensors that the ranks cut into shares, which must be the same on all of them.

Each rank writes one share of its bytes, by its own list. The shares of different lists would overlap, or leave a hole,
in a checkpoint that is committed all the same.
"""

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import native
from capture.collectives import Ranks
from catalog.disk.json_file import canonical
from catalog.errors import SetupError

__all__ = ["require_same_row"]


def require_same_row(row: Sequence[Sequence[Any]], ranks: Ranks) -> None:
    """Raise SetupError, on all ranks, unless the rows of all are the same; it names the first tensor that differs. All
    ranks call it.

    row: kind, name, dtype and number of elements of each tensor
    """
    if len(set(ranks.gather(native.checksum(canonical(row)).hex()))) == 1:
        return
    first, *others = ranks.gather(row)
    rank, other = next((rank, other) for rank, other in enumerate(others, 1) if other != first)
    here, there = next(pair for pair in zip_longest(first, other) if pair[0] != pair[1])
    raise SetupError(
        f"rank 0 lists {_described(here)} where rank {rank} lists {_described(there)}: what is replicated must be the "
        'same on all ranks, since each writes a share of it; give what some ranks alone have placement="rank_local"'
    )


def _described(one: Sequence[Any] | None) -> str:
    if one is None:
        return "nothing more"
    kind, name, dtype, numel = one
    return f"{kind} {name!r} ({dtype}, {numel} elements)"
