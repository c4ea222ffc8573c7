"""The diff of two checkpoints: a row per logical tensor, streamed in bounded memory.

extents of both sides -> logical tensors -> pairs -> equal by checksum: a zero row, nothing is read
                                                  -> much to read, and both have sketches: an estimate, nothing is read,
                                                     but for the smallest, whose estimates are the worst
                                                  -> otherwise both streams side by side into one Comparison
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from glob import escape
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import torch

from capture.load.rebuilt import RebuiltStep
from capture.load.state_dict import state_dict_of
from catalog.access.pins import pinned
from catalog.errors import SetupError
from catalog.format.dtypes import DTYPES
from catalog.history import History
from catalog.read.fragments import StoredTensor, stored_tensors
from catalog.records import CheckpointRef
from dshistory.comparison.grouping import grouped, require_grouping
from dshistory.comparison.ranking import MEANING, sorted_rows
from dshistory.comparison.sketch_estimates import estimated, norms
from dshistory.comparison.sums import Comparison
from dshistory.display.formats import Format
from dshistory.display.progress import ByteProgress
from dshistory.display.table import Table
from dshistory.options import DIFF_METRICS
from dshistory.patterns import Patterns, matching
from dshistory.tensors.stream import NOTHING_HELD, Held, side_by_side

if TYPE_CHECKING:
    import plotly.graph_objects as go

__all__ = ["DiffTable", "Rebuilt", "compare", "diff", "select", "tensor"]

_SCHEMA: Final = pa.schema(
    [
        ("name", pa.string()),
        ("kind", pa.string()),
        ("shape", pa.list_(pa.int64())),
        ("status", pa.string()),
        ("times_usual", pa.float64()),
        ("relative_update", pa.float64()),
        ("update_norm", pa.float64()),
        ("cosine", pa.float64()),
        ("max_change", pa.float64()),
        ("changed_share", pa.float64()),
        ("sign_flips", pa.int64()),
        ("norm_before", pa.float64()),
        ("norm_after", pa.float64()),
        ("nonfinite_before", pa.int64()),
        ("nonfinite_after", pa.int64()),
        ("bound", pa.float64()),
    ]
)
_FORMATS: Final[dict[str, Format]] = {"shape": "shape", "cosine": "cosine", "changed_share": "share", "bound": "share"}
_OF_ELEMENTS: Final = tuple(name for name in DIFF_METRICS if name != "times_usual")
"""The figures of a row that its own elements give."""

_WHOLE_NUMBERS: Final = frozenset(dtype for dtype in DTYPES if dtype == "BOOL" or dtype[0] in "UI")
AT_ONCE_BYTES: Final = 256 << 20
"""Up to so many bytes a diff reads everything: that takes a moment, and exact figures are better than estimates."""

_UNCHANGED: Final[dict[str, Any]] = {
    "relative_update": 0.0,
    "update_norm": 0.0,
    "max_change": 0.0,
    "changed_share": 0.0,
    "sign_flips": 0,
    "bound": 0.0,
}

SMALL_BYTES: Final = 64 << 10
_MOST_SMALL: Final = 1_000
"""Beside estimates, so many tensors of so many bytes on both sides are read: a sketch of them would be a worse one."""

Key = tuple[str, str]
Rebuilt = Mapping[CheckpointRef, RebuiltStep]
"""Steps that were not captured and are in memory."""


class DiffTable(Table):
    """The rows of a diff, the most unusual movement first; rows that gained or lost non-finite values stand above the
    others.

    `times_usual` is how many times as far as such tensors moved between the two checkpoints: `|after - before|` over
    `|before|`, or over the length of a tensor of typical size where that is longer, divided by the median of the same
    for its peers, which are the tensors of its name in all layers; a tensor without peers is measured against the peers
    that moved most.
    `status` is "changed", "same" (equal bits), "added" (only in the second checkpoint), "removed" (only in the first)
    or "reshaped". Figures that were not computed are null, never zero. `bound` is 0 for an exact row; for an estimated
    one it is how far its update may be off, relatively, at about 95 %. `dshistory.metrics` defines the figures."""

    metric = "times_usual"
    """The figure by which the rows are ordered."""

    def only(self, metrics: Patterns) -> "DiffTable":
        """Return the rows with only these figures, ordered by the first of them: the largest first, for cosine the
        smallest.

        Raises NotFoundError, which names the nearest, for a pattern that matches no figure."""
        known = [name for name in DIFF_METRICS if name in self.columns]
        matches = (
            sorted(matching(known, pattern, what="metric", where="a diff"), key=known.index)
            for pattern in ([metrics] if isinstance(metrics, str) else metrics)
        )
        chosen = list(dict.fromkeys(chain.from_iterable(matches)))
        if not chosen:
            raise SetupError(f"diff: metrics=[] leaves nothing to show; there are {', '.join(known)}")
        others = [name for name in self.columns if name not in known]
        shown = self.to_arrow().select(
            [*(name for name in others if name != "bound"), *chosen, *(["bound"] if "bound" in others else [])]
        )
        order = "ascending" if chosen[0] == "cosine" else "descending"
        table = self._of(shown.sort_by([(chosen[0], order)]))
        table.metric = chosen[0]
        return table

    def plot(self, *, top: int = 20) -> "go.Figure":
        """Draw the first `top` rows as horizontal bars of the figure that orders them. Needs the [notebook] extra."""
        from dshistory.display import plot

        return plot.changed_tensors(self, metric=self.metric, top=top)


def select(
    history: History,
    *refs: CheckpointRef,
    kinds: Patterns,
    names: Patterns,
    rebuilt: Rebuilt = MappingProxyType({}),
) -> list[dict[Key, StoredTensor]]:
    """Return, for each checkpoint, its logical tensors whose kind and name (or alias) match; those of steps that were
    made again are `rebuilt`.

    Raises NotFoundError, which names the nearest, for a pattern that matches nothing in any of the checkpoints."""
    where = " and ".join(map(str, refs)) if len(refs) <= 2 else f"{refs[0]} to {refs[-1]} ({len(refs)} checkpoints)"
    sides = [rebuilt[ref].extents if ref in rebuilt else history.state_extents(ref) for ref in refs]
    wanted_kinds = matching({extent.kind for side in sides for extent in side}, kinds, what="kind", where=where)
    sides = [[extent for extent in side if extent.kind in wanted_kinds] for side in sides]
    known = {name for side in sides for extent in side for name in (extent.name, *extent.aliases)}
    wanted_names = matching(known, names, what="tensor", where=where)
    return [
        stored_tensors(extent for extent in side if not wanted_names.isdisjoint((extent.name, *extent.aliases)))
        for side in sides
    ]


def diff(
    history: History,
    before: CheckpointRef,
    after: CheckpointRef,
    *,
    kinds: Patterns,
    names: Patterns,
    by: str,
    exact: bool,
    quiet: bool,
    rebuilt: Rebuilt = MappingProxyType({}),
) -> DiffTable:
    """Compare two checkpoints, or steps that are `rebuilt`; see `Explorer.diff`."""
    require_grouping(by)
    with pinned(history.paths, *(rebuilt[ref].base if ref in rebuilt else ref for ref in (before, after))):
        sides = select(history, before, after, kinds=kinds, names=names, rebuilt=rebuilt)
        held = {extent: elements for step in rebuilt.values() for extent, elements in step.held.items()}
        pairs = {key: (sides[0].get(key), sides[1].get(key)) for key in sides[0] | sides[1]}
        unread = {key: _bytes_to_read(*pair) for key, pair in pairs.items()}
        known = {} if exact or sum(unread.values()) <= AT_ONCE_BYTES else estimated(history, before, after)
        known = {key: figures for key, figures in known.items() if unread.get(key)}
        small = set(sorted((key for key in known if unread[key] <= SMALL_BYTES), key=unread.__getitem__)[:_MOST_SMALL])
        known = {key: figures for key, figures in known.items() if key not in small}
        rows = []
        total = sum(nbytes for key, nbytes in unread.items() if key not in known)
        with ByteProgress(total, description=f"diff {before} {after}", quiet=quiet) as bar:
            for key, pair in pairs.items():
                rows.append(_row(history.root, *pair, known.get(key), advance=bar.advance, held=held))
        note = _note(rows, sides, before, after)
        if by != "tensor" and any(row["status"] == "same" for row in rows):
            unchanged_norms = norms(history, after)
            rows = [
                {**row, **unchanged_norms.get((row["kind"], row["name"]), {})} if row["status"] == "same" else row
                for row in rows
            ]
        counters = {key for side in sides for key, stored in side.items() if stored.dtype in _WHOLE_NUMBERS}
        table = sorted_rows(grouped(rows, by), whole_numbers=counters)
        return DiffTable(pa.Table.from_pylist(table, schema=_SCHEMA), formats=_FORMATS, note=note)


def tensor(
    history: History, ref: CheckpointRef, *, name: str, kind: str, rebuilt: Rebuilt = MappingProxyType({})
) -> torch.Tensor:
    """Return one logical tensor in its global shape; see `Explorer.tensor`."""
    (selected,) = select(history, ref, kinds=escape(kind), names=escape(name), rebuilt=rebuilt)
    (found,) = selected.values()
    chosen: dict[str, Any] = {"names": [escape(found.name)], "kinds": [escape(kind)]}
    state = state_dict_of(history, ref, **chosen, rebuilt=rebuilt.get(ref))
    return state[kind][found.name]


def _status(before: StoredTensor | None, after: StoredTensor | None) -> str:
    if before is None:
        return "added"
    if after is None:
        return "removed"
    if before.shape != after.shape:
        return "reshaped"
    return "same" if before.same_bytes(after) else "changed"


def _bytes_to_read(before: StoredTensor | None, after: StoredTensor | None) -> int:
    if before is None or after is None or _status(before, after) != "changed":
        return 0
    return before.nbytes + after.nbytes


def _row(
    root: Path,
    before: StoredTensor | None,
    after: StoredTensor | None,
    known: Mapping[str, Any] | None,
    *,
    advance: Callable[[int], None],
    held: Held,
) -> dict[str, Any]:
    shown = after or before
    assert shown is not None
    status = _status(before, after)
    figures: Mapping[str, Any] = {}
    if status == "same":
        figures = _UNCHANGED
    elif known is not None:
        figures = known
    elif status == "changed" and before and after:
        compared = compare(root, before, after, advance, held=held)
        figures = {name: compared.figure(name) for name in _OF_ELEMENTS} | {"bound": 0.0}
    return {"name": shown.name, "kind": shown.kind, "shape": shown.shape, "status": status, **figures}


def compare(
    root: Path, before: StoredTensor, after: StoredTensor, advance: Callable[[int], None], *, held: Held = NOTHING_HELD
) -> Comparison:
    """Read two tensors of one shape side by side and compare them; calls `advance` with the number of bytes of each
    read. What is `held` is not read again."""
    comparison = Comparison()
    for pair in side_by_side(root, (before, after), advance, held=held):
        comparison.add(*pair)
    return comparison


def _note(
    rows: list[dict[str, Any]],
    sides: Iterable[Mapping[Key, StoredTensor]],
    before: CheckpointRef,
    after: CheckpointRef,
) -> str:
    counts = Counter(row["status"] for row in rows)
    parts = [f"{counts['changed']} changed", f"{counts['same']} equal bit for bit"]
    if before == after:
        parts.append("this is one checkpoint, compared with itself")
    if counts["removed"]:
        parts.append(f"{counts['removed']} only in {before}")
    if counts["added"]:
        parts.append(f"{counts['added']} only in {after}")
    if counts["reshaped"]:
        parts.append(f"{counts['reshaped']} of another shape")
    bounds = [row["bound"] for row in rows if row.get("bound")]
    if bounds:
        parts.append(
            f"{len(bounds)} estimated from sketches, updates within about {max(bounds):.0%} "
            "(exact=True reads the tensors)"
        )
    if any(tensor.copies > 1 for side in sides for tensor in side.values()):
        parts.append("tensors that every rank has a copy of are rank 0's")
    if any(row.get("nonfinite_before") or row.get("nonfinite_after") for row in rows):
        parts.append("norms and changes are over the elements finite on both sides")
    if any(row["status"] == "changed" for row in rows):
        parts.append(MEANING)
    return f"{before} to {after}: {'; '.join(parts)}"
