"""The update of each tensor from one analyzed checkpoint to the next, computed from merged statistics without reading
data."""

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

__all__ = ["with_updates", "without_updates"]

Floats = npt.NDArray[np.float64]


def with_updates(after: pa.Table, before: pa.Table, *, since: int) -> pa.Table:
    """Return `after` with the columns since, norm_before, update_norm and cosine.

    `after` and `before` are merged statistics with one row for each tensor; `before` is that of step `since`. Norms are
    exact, update_norm and cosine are estimates (docs/sketches.md). A value is null where one side lacks the data for
    it: the tensor is missing, the sketches have different lengths, or values are not finite.
    """
    at = _places(after, before)
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
        update_norm[rows], cosine[rows] = _moved(new.rows(rows, length), old.rows(at[rows], length))
    return _with(
        after,
        since=pa.array(np.full(len(at), since), pa.int64(), mask=~known),
        norm_before=pa.array(norm_before, mask=~known),
        update_norm=pa.array(update_norm, mask=~comparable),
        cosine=pa.array(cosine, mask=np.isnan(cosine)),
    )


def without_updates(after: pa.Table) -> pa.Table:
    """Return `after` with the same columns, all null: the first analyzed checkpoint has no update."""
    floats = pa.nulls(after.num_rows, pa.float64())
    since = pa.nulls(after.num_rows, pa.int64())
    return _with(after, since=since, norm_before=floats, update_norm=floats, cosine=floats)


class _Sketches:
    """The column of sketches as one flat array, with the start of each row in it."""

    def __init__(self, table: pa.Table) -> None:
        column = table["sketch"].combine_chunks()
        self.lengths = pc.list_value_length(column).to_numpy(zero_copy_only=False).astype(np.int64)
        self._starts = np.concatenate([[0], np.cumsum(self.lengths)])
        self._values: Floats = pc.list_flatten(column).to_numpy(zero_copy_only=False)
        odd = table["nan"].to_numpy() + table["inf"].to_numpy()
        self.usable = (self.lengths > 0) & (odd == 0) & np.isfinite(table["sum_of_squares"].to_numpy())

    def rows(self, rows: npt.NDArray[np.int64], length: int) -> Floats:
        """Return the sketches of `rows`, which all have this length, with shape (len(rows), length)."""
        return self._values[self._starts[rows][:, None] + np.arange(length)]


def _places(after: pa.Table, before: pa.Table) -> npt.NDArray[np.int64]:
    """Return, for each row of `after`, the index of the row of `before` for the same tensor, or -1."""
    new, old = (
        pc.binary_join_element_wise(table["kind"], table["name"], "/").combine_chunks() for table in (after, before)
    )
    if new.equals(old):
        return np.arange(len(new))
    found: npt.NDArray[np.int64] = pc.fill_null(pc.index_in(new, old), -1).to_numpy().astype(np.int64)
    return found


def _moved(new: Floats, old: Floats) -> tuple[Floats, Floats]:
    update = np.sqrt(np.square(new - old).sum(axis=1))
    lengths = np.sqrt(np.square(new).sum(axis=1) * np.square(old).sum(axis=1))
    with np.errstate(invalid="ignore", divide="ignore"):
        cosine = np.clip(np.einsum("ij,ij->i", new, old) / lengths, -1.0, 1.0)
    return update, cosine


def _with(table: pa.Table, **columns: pa.Array) -> pa.Table:
    for name, column in columns.items():
        table = table.append_column(name, column)
    return table
