"""Tables as plain text: aligned columns, human units, large tables paged to their first and last rows."""

from collections.abc import Mapping, Sequence

import pyarrow as pa
import pyarrow.types as types

from dshistory.units import Format, text_of

__all__ = ["Page", "is_numeric", "table_text"]

FIRST_ROWS = 20
LAST_ROWS = 5
SHOWN_WHOLE = 30
_CELL_WIDTH = 96


class Page:
    """What is shown of a table: all rows when they are few, else the first and the last, and how many are left out
    between."""

    def __init__(self, data: pa.Table, formats: Mapping[str, Format]) -> None:
        rows = data.num_rows
        self.left_out = rows - FIRST_ROWS - LAST_ROWS if rows > SHOWN_WHOLE else 0
        first = data if not self.left_out else data.slice(0, FIRST_ROWS)
        last = data.slice(rows - LAST_ROWS) if self.left_out else data.slice(rows)
        self.columns = [text_of(name) for name in data.column_names]
        self.first = _cells(first, formats)
        self.last = _cells(last, formats)

    @property
    def gap(self) -> str:
        """The line that stands for the rows left out."""
        return f"… {self.left_out:,} rows left out; .top(n), slices and .to_pandas() have them …"


def is_numeric(kind: pa.DataType) -> bool:
    """Whether a column is aligned to the right."""
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind))


def table_text(data: pa.Table, formats: Mapping[str, Format], note: str) -> str:
    """The table as aligned text without trailing newline; an empty table says so."""
    lines = []
    if data.num_rows:
        page = Page(data, formats)
        right = [is_numeric(field.type) for field in data.schema]
        shown = [[*map(_short, row[:-1]), row[-1]] for row in (page.columns, *page.first, *page.last)]
        widths = [max(len(row[i]) for row in shown) for i in range(data.num_columns)]
        lines = [_line(row, widths, right) for row in shown]
        lines.insert(1, "  ".join("-" * min(width, _CELL_WIDTH) for width in widths))
        if page.left_out:
            lines.insert(2 + FIRST_ROWS, page.gap)
    elif not note:
        lines = ["(no rows)"]
    return "\n".join([*lines, *([text_of(note)] if note else [])])


def _cells(data: pa.Table, formats: Mapping[str, Format]) -> list[list[str]]:
    columns = [
        [text_of(value, formats.get(name, "auto")) for value in column.to_pylist()]
        for name, column in zip(data.column_names, data.columns, strict=True)
    ]
    return [list(row) for row in zip(*columns, strict=True)]


def _line(row: Sequence[str], widths: Sequence[int], right: Sequence[bool]) -> str:
    cells = (
        cell.rjust(width) if to_right else cell.ljust(width)
        for cell, width, to_right in zip(row, widths, right, strict=True)
    )
    return "  ".join(cells).rstrip()


def _short(cell: str) -> str:
    """Long cells lose their middle: the beginning and the end of a name tell it apart. The last column, which no other
    has to stand beside, keeps all."""
    if len(cell) <= _CELL_WIDTH:
        return cell
    half = (_CELL_WIDTH - 1) // 2
    return f"{cell[: _CELL_WIDTH - 1 - half]}…{cell[-half:]}"
