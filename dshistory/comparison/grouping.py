"""The rows of a diff put together by layer or kind: norms as of one long vector."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, Final

from catalog.errors import NotFoundError
from dshistory.options import GROUPINGS

__all__ = ["grouped", "layer_of", "require_grouping"]

_LAYER: Final = re.compile(r"(?:.*\.)?[0-9]+(?=\.)")
_NONFINITE: Final = ("nonfinite_before", "nonfinite_after")

Row = Mapping[str, Any]


def layer_of(name: str) -> str:
    """The layer that a tensor belongs to: its name up to the last number in it (`h.3` of `h.3.mlp.weight`), else up to its
    last dot.
    """
    found = _LAYER.match(name)
    return found[0] if found else name.rpartition(".")[0] or name


def require_grouping(by: str) -> None:
    """NotFoundError, naming those there are, for a grouping that is none."""
    if by not in GROUPINGS:
        raise NotFoundError(f"no grouping {by!r}; there are {', '.join(GROUPINGS)}")


def grouped(rows: Sequence[Row], by: str) -> list[Row]:
    """One row for each layer and kind, or for each kind; as they are for "tensor"."""
    if by == "tensor":
        return list(rows)
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        name = layer_of(row["name"]) if by == "layer" else "*"
        groups.setdefault((name, row["kind"]), []).append(row)
    return [_together(name, kind, members) for (name, kind), members in groups.items()]


def _together(name: str, kind: str, members: Sequence[Row]) -> Row:
    numel = sum(prod(row["shape"]) for row in members)
    statuses = {row["status"] for row in members}
    row: dict[str, Any] = {
        "name": name,
        "kind": kind,
        "shape": (numel,),
        "status": statuses.pop() if len(statuses) == 1 else "changed",
    }
    counted = [member for member in members if member.get("nonfinite_after") is not None]
    if counted:
        row |= {key: sum(member[key] for member in counted) for key in _NONFINITE}
    # A tensor that is only on one side, or nowhere finite, has no numbers: the group's are over the others.
    compared = [member for member in members if member.get("update_norm") is not None]
    if not compared:
        return row
    update, before, after = (_norm(compared, key) for key in ("update_norm", "norm_before", "norm_after"))
    row |= {
        "update_norm": update,
        "norm_before": before,
        "norm_after": after,
        "relative_update": _ratio(update, before),
        "cosine": _cosine(update, before, after),
        "max_change": _all_or_none(max, compared, "max_change"),
        "bound": max(member["bound"] for member in compared),
        "sign_flips": _all_or_none(sum, compared, "sign_flips"),
    }
    changed = _all_or_none(sum, compared, "changed_share", weight=lambda member: prod(member["shape"]))
    if changed is not None:
        row["changed_share"] = changed / max(1, sum(prod(member["shape"]) for member in compared))
    return row


def _norm(rows: Sequence[Row], key: str) -> float | None:
    norm: float | None = _all_or_none(lambda values: math.hypot(*values), rows, key)
    return norm


def _ratio(update: float | None, before: float | None) -> float | None:
    if update is None or before is None:
        return None
    return update / before if before else (math.inf if update else 0.0)


def _cosine(update: float | None, before: float | None, after: float | None) -> float | None:
    if update is None or not before or not after:
        return None
    return max(-1.0, min(1.0, (before**2 + after**2 - update**2) / (2 * before * after)))


def _all_or_none(
    together: Callable[[list[Any]], Any], rows: Sequence[Row], key: str, *, weight: Callable[[Row], int] = lambda row: 1
) -> Any:
    """The values of all rows together; unknown when one of them is."""
    if any(row.get(key) is None for row in rows):
        return None
    return together([row[key] * weight(row) for row in rows])
