"""Tables as plain text: aligned columns, human units, and only the first and last rows of long tables."""

import shutil
import sys
from collections.abc import Mapping, Sequence
from itertools import accumulate

import pyarrow as pa
import pyarrow.types as types

from dshistory.display.formats import Format, text_of

__all__ = ["Page", "is_numeric", "table_text", "terminal_width"]

FIRST_ROWS = 20
LAST_ROWS = 5
SHOWN_WHOLE = 30
_CELL_WIDTH = 96
_FEW_COLUMNS = 4


class Page:
    """The displayed part of a table: all rows when there are few, else the first and the last; `left_out` counts the
    rest."""

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
        """The line in place of the rows that are left out."""
        return f"… {self.left_out:,} rows left out; .top(n), slices and .to_pandas() show them …"


def is_numeric(kind: pa.DataType) -> bool:
    """Return whether a column is aligned to the right."""
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind))


def terminal_width() -> int | None:
    """Return the width of the terminal in characters; None in notebooks, pipes and files, which have no limit."""
    return shutil.get_terminal_size().columns if sys.stdout is not None and sys.stdout.isatty() else None


def table_text(data: pa.Table, formats: Mapping[str, Format], note: str, *, width: int | None = None) -> str:
    """Return the table as aligned text without a trailing newline.

    Columns that do not fit into `width` are only named under the table. An empty table is its note, or "(no rows)"."""
    if not data.num_rows:
        return text_of(note) if note else "(no rows)"
    page = Page(data, formats)
    rows = [page.columns, *page.first, *page.last]
    shown = [[*map(_short, row[:-1]), row[-1]] for row in rows]
    widths = [max(len(row[i]) for row in shown) for i in range(data.num_columns)]
    fitting = _fitting(widths, width)
    right = [is_numeric(field.type) for field in data.schema]
    lines = [_line(row[:fitting], widths, right) for row in shown]
    lines.insert(1, "  ".join("-" * min(wide, _CELL_WIDTH) for wide in widths[:fitting]))
    if page.left_out:
        lines.insert(2 + FIRST_ROWS, page.gap)
    if fitting < len(widths):
        lines.append(f"… too narrow for {', '.join(page.columns[fitting:])} …")
    if any(len(cell) > _CELL_WIDTH for row in rows for cell in row[: min(fitting, len(row) - 1)]):
        lines.append("… replaces the middle of long values; rows, .to_csv() and .to_pandas() have them whole …")
    return "\n".join([*lines, *([text_of(note)] if note else [])])


def _fitting(widths: Sequence[int], width: int | None) -> int:
    """Return the number of columns to show: those that fit, but at least a few, because a long line is better than
    none."""
    if width is None or len(widths) <= _FEW_COLUMNS:
        return len(widths)
    ends = accumulate(wide + 2 for wide in widths)
    return max(_FEW_COLUMNS, sum(end - 2 <= width for end in ends))


def _cells(data: pa.Table, formats: Mapping[str, Format]) -> list[list[str]]:
    columns = [
        [text_of(value, formats.get(name, "auto")) for value in column.to_pylist()]
        for name, column in zip(data.column_names, data.columns, strict=True)
    ]
    return [list(row) for row in zip(*columns, strict=True)]


def _line(row: Sequence[str], widths: Sequence[int], right: Sequence[bool]) -> str:
    cells = (
        cell.rjust(width) if to_right else cell.ljust(width)
        for cell, width, to_right in zip(row, widths, right, strict=False)
    )
    return "  ".join(cells).rstrip()


def _short(cell: str) -> str:
    """Shorten a long cell in its middle, because the beginning and the end distinguish names."""
    if len(cell) <= _CELL_WIDTH:
        return cell
    half = (_CELL_WIDTH - 1) // 2
    return f"{cell[: _CELL_WIDTH - 1 - half]}…{cell[-half:]}"
