"""The histogram of a tensor's elements over the checkpoints of a run: shares by power of two, from the statistics."""

from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pyarrow.compute as pc

from catalog.errors import NotFoundError
from catalog.history import History
from catalog.references import committed_lineage
from dshistory.display.formats import Format, counted
from dshistory.display.table import Table
from dshistory.patterns import nearest

if TYPE_CHECKING:
    import plotly.graph_objects as go

__all__ = ["HistogramTable", "histogram"]

_SQL: Final = """
WITH path AS (
    SELECT unnest($runs) AS run, unnest($steps) AS step
), bins AS (
    SELECT run, step, unnest(range(len(exponents))) - 52 AS exponent, unnest(exponents) AS elements, finite
    FROM statistics JOIN path USING (run, step) WHERE kind = $kind AND name = $name
), seen AS (
    SELECT DISTINCT exponent FROM bins WHERE elements > 0
)
SELECT run, step, exponent, elements, elements / nullif(finite, 0) AS share
FROM path CROSS JOIN seen LEFT JOIN bins USING (run, step, exponent) ORDER BY step, exponent
"""
_NAMES: Final = "SELECT DISTINCT name FROM statistics WHERE kind = $kind AND list_contains($runs, run)"
_FORMATS: Final[dict[str, Format]] = {"share": "share"}


class HistogramTable(Table):
    """A row for each checkpoint and each power of two that occurs.

    `elements` counts those with 2^exponent <= |x| < 2^(exponent + 1), and `share` is their share of the finite
    elements; both are null where the checkpoint has no statistics. Zeros are in no row; exponent -52 counts smaller
    elements too, 11 larger ones."""

    def plot(self) -> "go.Figure":
        """Draw the shares as a heat map, power of two by step. Needs the [notebook] extra."""
        from dshistory.display import plot

        steps, exponents, shares = self.grid()
        powers = [f"2^{exponent}" for exponent in reversed(exponents)]
        return plot.heat_map(shares[::-1], x=[str(step) for step in steps], y=powers, value="share")

    def grid(self) -> tuple[list[int], list[int], list[list[float | None]]]:
        """Return the steps, the exponents in ascending order, and the shares, a line for each exponent."""
        rows: pa.Table = self.to_arrow()
        steps: list[int] = sorted(set(rows["step"].to_pylist()))
        exponents: list[int] = sorted(set(rows["exponent"].to_pylist()))
        shares: list[list[float | None]] = [[None] * len(steps) for _ in exponents]
        for row in self:
            shares[exponents.index(row["exponent"])][steps.index(row["step"])] = row["share"]
        return steps, exponents, shares


def histogram(history: History, *, name: str, kind: str, run: str | None) -> HistogramTable:
    """See `Explorer.histogram`."""
    run = run or history.current_run()
    path = committed_lineage(history.paths, run)
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
    return HistogramTable(rows, formats=_FORMATS, note=_note(rows, name, path_length=len(path)))


def _note(rows: pa.Table, name: str, *, path_length: int) -> str:
    if not rows.num_rows:
        return f"all elements of {name} are zero or not finite"
    missing = len(set(rows.filter(pc.is_null(rows["elements"]))["step"].to_pylist()))
    note = f"the magnitudes of {name} in {counted(path_length - missing, 'checkpoint')}"
    return (
        f"{note}; {missing} {'has' if missing == 1 else 'have'} no statistics: `analyze` computes them"
        if missing
        else note
    )
