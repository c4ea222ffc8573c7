"""Tables, in which the explorer returns rows: a small class around an Arrow table.

The Arrow table is exact and complete; only its display is shortened and rounded.
"""

import copy
import csv
import datetime
import io
import json
import math
from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any, Self, overload

import pyarrow as pa

from catalog.errors import NotFoundError, SetupError
from dshistory.display import html, text
from dshistory.display.formats import Format
from dshistory.patterns import natural_order

__all__ = ["Table", "json_value", "with_unique_names"]


class Table:
    """Rows of named columns, immutable; anything that reads Arrow (`__arrow_c_stream__`) takes it without a copy.

    `table["name"]` is a column, `table[0]` a row as a dict, `table[2:5]` and `table.top(5)` are tables; iteration
    yields rows. `formats` sets the display of columns ("bytes", "seconds", "share", "number"), `note` is the line under
    the table, and `layout` says what stands above it and what gives way in a narrow terminal.
    """

    def __init__(
        self,
        data: pa.Table,
        *,
        formats: Mapping[str, Format] | None = None,
        note: str = "",
        layout: text.Layout | None = None,
    ) -> None:
        self._data = data
        self._layout = layout
        self.formats: dict[str, Format] = dict(formats or {})
        self.note = note

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns, in order."""
        return tuple(self._data.column_names)

    def top(self, n: int) -> Self:
        """Return the first n rows, or all of them when there are fewer."""
        return self[: max(n, 0)]

    def sort(self, column: str, descending: bool | None = None) -> Self:
        """Return the rows in the order of a column, unknown values last; rows of equal values keep their order.

        Text is in natural order, so that h.2 comes before h.10, and ascends by default; all else descends by default.
        Raises NotFoundError, which lists the columns, for one that is not there."""
        values = self[column].to_pylist()
        is_text = self.is_text(column)
        down = not is_text if descending is None else descending
        known = [i for i, value in enumerate(values) if not _is_unknown(value)]
        known.sort(key=lambda i: natural_order(values[i]) if is_text else values[i], reverse=down)
        unknown = [i for i, value in enumerate(values) if _is_unknown(value)]
        return self._of(self._data.take([*known, *unknown]))

    def is_text(self, column: str) -> bool:
        """Return whether a column is text. Raises NotFoundError, which lists the columns, for one that is not there."""
        return bool(pa.types.is_string(self[column].type))

    def to_arrow(self) -> pa.Table:
        """Return the Arrow table itself, with every row and digit."""
        return self._data

    def to_pandas(self) -> Any:
        """Return a pandas DataFrame. Raises SetupError when pandas is not installed."""
        try:
            return self._data.to_pandas()
        except ImportError as error:
            raise SetupError("to_pandas needs pandas; install it with: pip install 'dshistory[notebook]'") from error

    def to_text(self) -> str:
        """Return all rows as aligned text, as in a terminal of any width: no row, column or value is shortened."""
        return text.table_text(self._data, self.formats, self.note, layout=self._layout, whole=True)

    def to_csv(self) -> str:
        """Return all rows as CSV with a header line; unknown values are empty, bytes are hexadecimal."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(self.columns)
        writer.writerows([_plain(value) for value in row.values()] for row in self)
        return out.getvalue()

    def to_json(self) -> str:
        """Return all rows as a JSON array of objects; `json_value` converts values that JSON does not have."""
        return json.dumps([json_value(row) for row in self], indent=1, ensure_ascii=False)

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        return self._data.__arrow_c_stream__(requested_schema)

    def __len__(self) -> int:
        return int(self._data.num_rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in self._data.to_batches(max_chunksize=1024):
            yield from batch.to_pylist()

    @overload
    def __getitem__(self, key: str) -> pa.ChunkedArray: ...
    @overload
    def __getitem__(self, key: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, key: slice) -> Self: ...
    def __getitem__(self, key: str | int | slice) -> "pa.ChunkedArray | dict[str, Any] | Self":
        if isinstance(key, str):
            if key not in self.columns:
                raise NotFoundError(f"no column {key!r}; the columns are {', '.join(self.columns)}")
            return self._data.column(key)
        if isinstance(key, slice):
            return self._of(self._data.take(list(range(len(self))[key])) if key.step else self._sliced(key))
        rows = range(len(self))[key]
        return dict(self._data.slice(rows, 1).to_pylist()[0])

    def _ipython_key_completions_(self) -> list[str]:
        return list(self.columns)

    def __repr__(self) -> str:
        width = text.terminal_width()
        return text.table_text(self._data, self.formats, self.note, layout=self._layout, width=width)

    def _repr_html_(self) -> str:
        return html.document(html.table_html(self._data, self.formats, self.note))

    def _sliced(self, key: slice) -> pa.Table:
        rows = range(len(self))[key]
        return self._data.slice(rows.start, len(rows))

    def _of(self, data: pa.Table) -> Self:
        other = copy.copy(self)
        other._data = data
        return other


def with_unique_names(data: pa.Table) -> pa.Table:
    """Return the table with unique column names: repeated names, as after a join, become a, a_1, a_2, ...

    A number is skipped when another column has that name."""
    taken, seen, names = set(data.column_names), set[str](), []
    for name in data.column_names:
        if name in seen:
            name = next(other for i in count(1) if (other := f"{name}_{i}") not in taken)
        seen.add(name)
        taken.add(name)
        names.append(name)
    return data.rename_columns(names)


def json_value(value: object) -> object:
    """Return the value in strict JSON: NaN and infinities as the strings "NaN", "Infinity" and "-Infinity", as in
    protobuf's JSON; bytes as hexadecimal digits; times in ISO 8601."""
    if isinstance(value, Mapping):
        return {str(key): json_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_value(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return _plain(value)


def _is_unknown(value: object) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def _plain(value: object) -> object:
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value).hex()
    if isinstance(value, (datetime.datetime, datetime.date)):
        return value.isoformat()
    if isinstance(value, (list, tuple)):
        return json.dumps(json_value(value))
    return value if value is None or isinstance(value, (bool, int, float)) else str(value)
