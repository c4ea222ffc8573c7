"""The histogram of a tensor's elements over the checkpoints of a run: shares by power of two, from the statistics; with
signs, which those do not have, from the tensors."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from catalog.errors import NotFoundError
from catalog.history import History
from catalog.nearest_names import nearest
from catalog.references import committed_lineage
from dshistory.display.formats import Format, counted
from dshistory.display.table import Table
from dshistory.trends.signed_counts import signed_counts

if TYPE_CHECKING:
    import plotly.graph_objects as go

__all__ = ["HistogramTable", "histogram"]

_SQL: Final = """
WITH path AS (
    SELECT unnest($runs) AS run, unnest($steps) AS step
), bins AS (
    SELECT run, step, unnest([NULL] || range(-52, len(exponents) - 52)) AS exponent,
           unnest([zeros] || exponents) AS elements, finite
    FROM statistics JOIN path USING (run, step) WHERE kind = $kind AND name = $name
), seen AS (
    SELECT DISTINCT exponent FROM bins WHERE elements > 0
)
SELECT path.run, path.step, seen.exponent, elements, elements / nullif(finite, 0) AS share
FROM path CROSS JOIN seen LEFT JOIN bins
ON bins.run = path.run AND bins.step = path.step AND bins.exponent IS NOT DISTINCT FROM seen.exponent
ORDER BY path.step, seen.exponent NULLS FIRST
"""
_NAMES: Final = "SELECT DISTINCT name FROM statistics WHERE kind = $kind AND list_contains($runs, run)"
_FORMATS: Final[dict[str, Format]] = {"share": "share"}


class HistogramTable(Table):
    """A row for each checkpoint and each power of two that occurs, and one for zeros where there are some.

    `elements` counts those with 2^exponent <= |x| < 2^(exponent + 1), of either sign, and those that are zero where the
    exponent is null; `share` is their share of the finite elements. Both are null where the checkpoint has no
    statistics. Exponent -52 counts smaller elements too, 11 larger ones. With signs there are rows for either sign, and
    the column `sign` is -1, 0 or 1."""

    name: str

    def plot(self) -> "go.Figure":
        """Draw the shares as a heat map, magnitude by step; with signs the negative ones at the bottom. Needs the
        [notebook] extra."""
        from dshistory.display import plot

        steps, lines, shares = self.picture()
        values = self.name if "sign" in self.columns else f"|element| of {self.name}"
        return plot.magnitudes(shares, steps=steps, lines=lines, values=values)

    def picture(self) -> tuple[list[int], list[str], list[list[float | None]]]:
        """Return the steps, the labels of the lines in ascending order, and the shares line by line."""
        rows: pa.Table = self.to_arrow()
        steps: list[int] = sorted(set(rows["step"].to_pylist()))
        bins = sorted({_bin(row) for row in self}, key=lambda one: (one[0], one[0] * one[1]))
        places = {step: i for i, step in enumerate(steps)}
        lines = {one: i for i, one in enumerate(bins)}
        shares: list[list[float | None]] = [[None] * len(steps) for _ in bins]
        for row in self:
            shares[lines[_bin(row)]][places[row["step"]]] = row["share"]
        return steps, [_label(*one) for one in bins], shares


def _bin(row: Mapping[str, Any]) -> tuple[int, int]:
    """Return the sign and the exponent of a row; magnitudes without a sign count as positive."""
    return (0, 0) if row["exponent"] is None else (row.get("sign", 1), row["exponent"])


def _label(sign: int, exponent: int) -> str:
    return f"{'-' if sign < 0 else ''}2<sup>{exponent}</sup>" if sign else "0"


def histogram(history: History, *, name: str, kind: str, run: str | None, signs: bool, quiet: bool) -> HistogramTable:
    """See `Explorer.histogram`."""
    run = run or history.current_run()
    path = committed_lineage(history.paths, run)
    if signs:
        table = HistogramTable(signed_counts(history, path, name=name, kind=kind, quiet=quiet), formats=_FORMATS)
        table.note = f"the elements of {name} in {counted(len(set(table['step'].to_pylist())), 'checkpoint')}"
        table.name = f"{name} ({kind})"
        return table
    runs, steps = [ref.run for ref in path], [ref.step for ref in path]
    rows = history.query(_SQL, {"runs": runs, "steps": steps, "kind": kind, "name": name})
    if not rows.num_rows:
        names = set(history.query(_NAMES, {"kind": kind, "runs": sorted(set(runs))})["name"].to_pylist())
        if not names:
            known = {extent.kind for ref in path[-1:] for extent in history.state_extents(ref)}
            if known and kind not in known:
                raise NotFoundError(f"no state {kind!r} in {path[-1]}; {nearest(kind, known)}")
            raise NotFoundError(
                f"no checkpoint of run {run} has statistics of {kind} tensors yet: `analyze` computes them"
            )
        if name not in names:
            raise NotFoundError(f"no statistics of {kind} {name!r} in run {run}; {nearest(name, names)}")
    table = HistogramTable(rows, formats=_FORMATS, note=_note(rows, name, path_length=len(path)))
    table.name = f"{name} ({kind})"
    return table


def _note(rows: pa.Table, name: str, *, path_length: int) -> str:
    if not rows.num_rows:
        return f"no element of {name} is finite"
    missing = len(set(rows.filter(pc.is_null(rows["elements"]))["step"].to_pylist()))
    note = f"the magnitudes of {name} in {counted(path_length - missing, 'checkpoint')}"
    return (
        f"{note}; {missing} {'has' if missing == 1 else 'have'} no statistics: `analyze` computes them"
        if missing
        else note
    )
