"""The update of each tensor from one analyzed checkpoint to the next, from their merged statistics: no tensor is read.

The formulas of norm, update norm and cosine are those of `dshistory.metrics`, which this package may not import;
tests/dshistory/test_metrics_sql.py holds both to equal figures on the same data.
"""

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

__all__ = ["with_updates", "without_updates"]

Floats = npt.NDArray[np.float64]


def with_updates(after: pa.Table, before: pa.Table, *, since: int) -> pa.Table:
    """Return `after` with the columns since, norm_before, update_norm and cosine; `before` are the merged statistics of
    step `since`.

    norm_before is exact; update_norm and cosine are estimates from the sketches (docs/sketches.md). They are null where
    the two sides cannot be compared: for a tensor that did not exist before, for sketches of different lengths, and
    where values are not finite. The cosine of a tensor that is zero on a side is null too.
    """
    at = _rows_before(after, before)
    known = at >= 0
    norms = np.sqrt(before["sum_of_squares"].to_numpy())
    norm_before = np.full(len(at), np.nan)
    norm_before[known] = norms[at[known]]
    update_norm, cosine = np.full(len(at), np.nan), np.full(len(at), np.nan)
    new, old = _Sketches(after), _Sketches(before)
    comparable = known.copy()
    comparable[known] &= new.usable[known] & old.usable[at[known]] & (new.lengths[known] == old.lengths[at[known]])
    for length in np.unique(new.lengths[comparable]).tolist():
        rows = np.flatnonzero(comparable & (new.lengths == length))
        update_norm[rows], cosine[rows] = _compared(new.rows(rows, length), old.rows(at[rows], length))
    return _with(
        after,
        since=pa.array(np.full(len(at), since), pa.int64(), mask=~known),
        norm_before=pa.array(norm_before, mask=~known),
        update_norm=pa.array(update_norm, mask=~comparable),
        cosine=pa.array(cosine, mask=np.isnan(cosine)),
    )


def without_updates(after: pa.Table) -> pa.Table:
    """Return `after` with the same columns, all null, as the first analyzed checkpoint of a run has them."""
    floats = pa.nulls(after.num_rows, pa.float64())
    since = pa.nulls(after.num_rows, pa.int64())
    return _with(after, since=since, norm_before=floats, update_norm=floats, cosine=floats)


class _Sketches:
    """The column of sketches as one flat array, and the start of each row in it.

    `usable` is true for a row that has a sketch and whose tensor is finite throughout: a sketch counts NaN and Inf as
    0, so that of any other tensor says nothing about an update."""

    def __init__(self, table: pa.Table) -> None:
        column = table["sketch"].combine_chunks()
        self.lengths = pc.list_value_length(column).to_numpy(zero_copy_only=False).astype(np.int64)
        self._starts = np.concatenate([[0], np.cumsum(self.lengths)])
        self._values: Floats = pc.list_flatten(column).to_numpy(zero_copy_only=False)
        nonfinite = table["nan"].to_numpy() + table["inf"].to_numpy()
        self.usable = (self.lengths > 0) & (nonfinite == 0) & np.isfinite(table["sum_of_squares"].to_numpy())

    def rows(self, rows: npt.NDArray[np.int64], length: int) -> Floats:
        """Return (len(rows), length): the sketches of rows that all have this length."""
        return self._values[self._starts[rows][:, None] + np.arange(length)]


def _rows_before(after: pa.Table, before: pa.Table) -> npt.NDArray[np.int64]:
    """Return, for each row of `after`, the row of `before` about the same tensor, or -1."""
    new, old = (
        pc.binary_join_element_wise(table["kind"], table["name"], "/").combine_chunks() for table in (after, before)
    )
    if new.equals(old):
        return np.arange(len(new))
    found: npt.NDArray[np.int64] = pc.fill_null(pc.index_in(new, old), -1).to_numpy().astype(np.int64)
    return found


def _compared(new: Floats, old: Floats) -> tuple[Floats, Floats]:
    """Return the update norm and the cosine of each pair of rows; the cosine is NaN where a sketch is zero.

    The roots are multiplied, not the squares: the product of the squares of two small tensors underflows."""
    update_norm = np.sqrt(np.square(new - old).sum(axis=1))
    lengths = np.sqrt(np.square(old).sum(axis=1)) * np.sqrt(np.square(new).sum(axis=1))
    with np.errstate(invalid="ignore", divide="ignore"):
        cosine = np.clip(np.einsum("ij,ij->i", new, old) / lengths, -1.0, 1.0)
    return update_norm, cosine


def _with(table: pa.Table, **columns: pa.Array) -> pa.Table:
    for name, column in columns.items():
        table = table.append_column(name, column)
    return table
