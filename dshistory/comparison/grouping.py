"""The rows of a diff grouped by layer or kind: the tensors of a group count as one long vector."""

import re
from collections.abc import Mapping, Sequence
from math import nan, prod
from typing import Any, Final

import numpy as np

from catalog.errors import NotFoundError
from dshistory import metrics
from dshistory.options import GROUPINGS

__all__ = ["column", "grouped", "layer_of", "require_grouping"]

_LAYER: Final = re.compile(r"(?:.*?\.)??[0-9]+(?=\.)")
_NONFINITE: Final = ("nonfinite_before", "nonfinite_after")

Row = Mapping[str, Any]


def layer_of(name: str) -> str:
    """Return the layer that a tensor belongs to, the block with all that is inside it: its name up to the first number
    in it (`h.3` of `h.3.mlp.0.weight`), else up to its last dot."""
    found = _LAYER.match(name)
    return found[0] if found else name.rpartition(".")[0] or name


def require_grouping(by: str) -> None:
    """Raise NotFoundError, which lists the groupings, for an unknown one."""
    if by not in GROUPINGS:
        raise NotFoundError(f"no grouping {by!r}; there are {', '.join(GROUPINGS)}")


def grouped(rows: Sequence[Row], by: str) -> list[Row]:
    """Return one row for each layer and kind, or for each kind; the rows unchanged for "tensor"."""
    if by == "tensor":
        return list(rows)
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        name = layer_of(row["name"]) if by == "layer" else "*"
        groups.setdefault((name, row["kind"]), []).append(row)
    return [_group_row(name, kind, members) for (name, kind), members in groups.items()]


def _group_row(name: str, kind: str, members: Sequence[Row]) -> Row:
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
    # A tensor that is only on one side, or nowhere finite, has no norms: those of the group are over the others. How
    # many of its elements changed is known wherever it is on both sides, and an estimate does not tell.
    compared = [member for member in members if member.get("update_norm") is not None]
    on_both_sides = [member for member in members if member.get("bound") is not None]
    if on_both_sides:
        row |= {"changed_share": _changed_share(on_both_sides), "bound": max(one["bound"] for one in on_both_sides)}
    return row | _figures(compared) if compared else row


def _changed_share(rows: Sequence[Row]) -> float | None:
    numel = np.array([prod(row["shape"]) for row in rows], np.float64)
    changed = (column(rows, "changed_share") * numel).sum()
    return metrics.known(metrics.changed_share(changed, numel.sum()))


def _figures(rows: Sequence[Row]) -> dict[str, Any]:
    """Compute the figures of a group from sums over its rows; a figure is None where that of one row is unknown."""
    update, before, after = (np.square(column(rows, key)).sum() for key in ("update_norm", "norm_before", "norm_after"))
    # Rows have no dot products, and a tensor that is equal on both sides has no cosine: the squares give their sum.
    dot = metrics.dot_of_squares(update, before, after)
    sign_flips = metrics.known(column(rows, "sign_flips").sum())
    return {
        "update_norm": metrics.known(metrics.norm(update)),
        "norm_before": metrics.known(metrics.norm(before)),
        "norm_after": metrics.known(metrics.norm(after)),
        "relative_update": metrics.known(metrics.relative_update(update, before)),
        "cosine": metrics.known(metrics.cosine(dot, before, after)),
        "max_change": metrics.known(column(rows, "max_change").max()),
        "sign_flips": None if sign_flips is None else int(sign_flips),
    }


def column(rows: Sequence[Row], key: str) -> metrics.Floats:
    """Return one figure of all rows; NaN where it is unknown."""
    return np.array([nan if row.get(key) is None else row[key] for row in rows], np.float64)
